"""`server.py` with exactly one fault: `python tests/mutant_server.py FAULT[+FAULT] [options of server.py]`.

Each fault patches one thing, and says which server cases of test_roundtrip.py it turns red. The cases that
build on those are not judged, and all others pass: test_mutant_servers.py sees to it.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import math
import os
import pickle
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import ipc_codec
import protocol
import server
from ipc_codec import PackedBufferImporter
from protocol import IDLE, RULES, SEQUENCE, UPDATING, Move
from server import App, Reply, WeightTransferEngine, Worker


@dataclass(frozen=True)
class Mutant:
    """fault: patches the server. red: the cases it fails, * as in fnmatch. device: where it is seen."""

    fault: Callable[[], None]
    red: frozenset[str]
    device: str = "cpu"
    strict: bool = False  # a SHOULD: seen with WEIGHT_SYNC_STRICT=1
    model: bool = False  # seen on a server with a model


MUTANTS: dict[str, Mutant] = {}


def mutant(name: str, *red: str, **more: Any) -> Callable[[Any], Any]:
    def enter(fault: Any) -> Any:
        MUTANTS[name] = Mutant(fault, frozenset(red), **more)
        return fault

    return enter


def patch(place: Any, name: str) -> Callable[[Any], None]:
    """Decorator: replaces `place.name` by the function, whose first argument is what was there."""

    def replace(function: Any) -> None:
        there = getattr(place, name)

        @functools.wraps(there)
        def patched(*args: Any, **more: Any) -> Any:
            return function(there, *args, **more)

        setattr(place, name, patched)

    return replace


# --- Memory and time ----------------------------------------------------------------------------------


@mutant("replies before the copy", "loan.reply")
def replies_before_the_copy() -> None:
    """Packed, the bytes are read 0.2 s after the reply; whatever comes next waits for it."""
    late: list[threading.Timer] = []

    def wait() -> None:
        while late:
            late.pop().join()

    @patch(Worker, "copy")
    def _(copy: Any, worker: Worker, names: Any, weights: Any, *_: Any) -> None:
        if not worker.session.packed:
            return copy(worker, names, weights)
        late.append(threading.Timer(0.2, copy, (worker, names, weights)))
        late[-1].start()

    for call in ("update_weights", "finish_weight_update", "start_weight_update"):

        @patch(WeightTransferEngine, call)
        def _(original: Any, *args: Any) -> Any:
            wait()
            return original(*args)


def keep(mode: str) -> None:
    @patch(Worker, "copy")
    def _(copy: Any, worker: Worker, names: Any, weights: Any, *_: Any) -> None:
        kept = worker.session.packed == (mode == "packed")
        held = [worker.weights[name] for name in names]
        views = (w.view(h.dtype).view(h.shape) for h, w in zip(held, weights, strict=True))
        worker.weights |= {n: w if kept else w.clone() for n, w in zip(names, views, strict=True)}


mutant("keeps a view of the buffer", "loan.kept-packed")(functools.partial(keep, "packed"))
mutant("keeps a view of each tensor", "loan.kept-unpacked")(functools.partial(keep, "unpacked"))


RENEWED = ("loan.renewed-packed", "loan.renewed-unpacked")


def at_a_body_that_came_before(wrong: Callable[..., Any]) -> Callable[[], None]:
    """A fault: `wrong(update_weights, engine, update_info)`, where a body comes for the second time."""

    def fault() -> None:
        bodies: list[Any] = []

        @patch(WeightTransferEngine, "update_weights")
        def _(update: Any, engine: Any, info: Any, body: bytes = b"") -> Any:
            if info in bodies:
                return wrong(update, engine, info)
            said = update(engine, info, body)
            bodies.extend([info] * (isinstance(info, dict) and info["names"] != []))
            return said

    return fault


@mutant("takes the same body for the same bytes", *RENEWED)
@at_a_body_that_came_before
def _(update: Any, engine: Any, info: Any) -> Any:
    kept = [{name: weight.clone() for name, weight in worker.weights.items()} for worker in engine.workers]
    said = update(engine, info)
    for worker, weights in zip(engine.workers, kept, strict=True):
        for name, weight in weights.items():
            worker.weights[name].copy_(weight)
    return said


@mutant("answers the same body unread", *RENEWED)
@at_a_body_that_came_before
def _(update: Any, engine: Any, info: Any) -> Any:
    return ""


@mutant("refuses the same body", *RENEWED)
@at_a_body_that_came_before
def _(update: Any, engine: Any, info: Any) -> Any:
    raise ValueError("this was here before")


@mutant("releases what is renewed twice", *RENEWED)
@at_a_body_that_came_before
def _(update: Any, engine: Any, info: Any) -> Any:
    handles = ipc_codec.decode_handles(info["ipc_handles_pickled"])
    for handle in handles if isinstance(handles, list) else [handles]:
        ipc_codec._count(list(filter(None, ipc_codec._counters(handle.values()))), -1)
    return update(engine, info)


@mutant("opens the mapping per chunk", "release.once")
def opens_the_mapping_per_chunk() -> None:
    @patch(PackedBufferImporter, "open_export")
    def _(original: Any, importer: Any, handle: Any) -> Any:
        importer.release()
        return original(importer, handle)


def never_release(mode: str) -> None:
    kept: list[Any] = []

    @patch(Worker, "open")
    def _(original: Any, worker: Worker, *args: Any) -> Any:
        opened = original(worker, *args)
        kept.append(opened if worker.session.packed == (mode == "packed") else None)
        return opened


for _mode in ("packed", "unpacked"):
    mutant(f"never releases, {_mode}", f"release.finish-{_mode}")(functools.partial(never_release, _mode))


@mutant("releases a refused export twice", "release.refused-unpacked", "release.refused-packed")
def releases_a_refused_export_twice() -> None:
    @patch(WeightTransferEngine, "_judge")
    def _(original: Any, engine: Any, call: str, messages: Any) -> None:
        try:
            original(engine, call, messages)
        except protocol.Refused:
            for _at, _label, _uuid, args in messages[0].args if call == "update_weights" else ():
                ipc_codec._count([ipc_codec._Counter(args[protocol.COUNTER], args[protocol.SLOT])] * 2, -1)
            raise


# --- Loading ------------------------------------------------------------------------------------------


@mutant("decodes packed updates, loads nothing", "sync-packed")
def loads_nothing_packed() -> None:
    @patch(Worker, "copy")
    def _(copy: Any, worker: Worker, *args: Any) -> None:
        if not worker.session.packed:
            copy(worker, *args)


@mutant("loads nothing", "sync-unpacked", "sync-packed")
def loads_nothing() -> None:
    Worker.copy = lambda *args: None  # type: ignore[assignment,method-assign]


@mutant("only the first worker loads", "sync-unpacked", "sync-packed", device="cpu:0,cpu:1")
def only_the_first_worker_loads() -> None:
    @patch(Worker, "copy")
    def _(copy: Any, worker: Worker, *args: Any) -> None:
        if worker.device.index == 0:
            copy(worker, *args)


@mutant("forgets the fourth chunk", "chunks.many-unpacked", "chunks.many-packed")
def forgets_a_fourth_chunk() -> None:
    """The fourth update of a sync is answered, and not loaded."""
    count = 0

    @patch(WeightTransferEngine, "start_weight_update")
    def _(original: Any, engine: Any) -> Any:
        nonlocal count
        count = 0
        return original(engine)

    @patch(Worker, "copy")
    def _(copy: Any, *args: Any) -> None:
        nonlocal count
        count += 1
        if count != 4:
            copy(*args)


@mutant("loads no second chunk", "chunks.2-unpacked", "chunks.2-packed")
def loads_no_second_chunk() -> None:
    """Only what comes first in a sync is loaded."""

    @patch(Worker, "copy")
    def _(copy: Any, worker: Worker, *args: Any) -> None:
        if not worker.session.sent:
            copy(worker, *args)


@mutant(
    "drops empty tensors",
    *(
        f"kind.empty-{which}-{mode}"
        for which in ("between", "tail", "alone")
        for mode in ("packed", "unpacked")
    ),
)
def drops_empty_tensors() -> None:
    @patch(Worker, "make_room")
    def _(original: Any, *args: Any) -> Any:
        return {name: room for name, room in original(*args).items() if room.numel()}

    @patch(Worker, "copy")
    def _(copy: Any, worker: Worker, names: Any, weights: Any, *_: Any) -> None:
        some = [(name, weight) for name, weight in zip(names, weights, strict=True) if weight.numel()]
        copy(worker, [name for name, _ in some], [weight for _, weight in some])


BOOL = [
    f"kind.{kind}-{mode}"
    for kind in ("bool", "every-dtype-at-once", "unaligned-after-bool")
    for mode in ("packed", "unpacked")
]


@mutant("takes bool for its opposite", *BOOL)
def takes_bool_for_its_opposite() -> None:
    @patch(Worker, "copy")
    def _(copy: Any, worker: Worker, names: Any, weights: Any, *_: Any) -> None:
        named = zip(names, weights, strict=True)
        copy(worker, names, [w ^ 1 if worker.weights[n].dtype == torch.bool else w for n, w in named])


@mutant(
    "refuses scalars",
    *(
        f"kind.{kind}-{mode}"
        for kind in ("scalar", "scalar-of-one-byte", "scalar-alone")
        for mode in ("packed", "unpacked")
    ),
    strict=True,
)
def refuses_scalars() -> None:
    @patch(Worker, "check")
    def _(original: Any, worker: Worker, update: Any) -> Any:
        if [] in update.shapes:
            raise ValueError("a scalar")
        return original(worker, update)


@mutant("forgets whatever a case about kinds sends", "kind.*")
def forgets_kinds() -> None:
    @patch(Worker, "copy")
    def _(copy: Any, worker: Worker, names: Any, weights: Any, *_: Any) -> None:
        copy(worker, names, weights)
        for name in names:
            if " " in name:
                del worker.weights[name]


# --- Addressing ---------------------------------------------------------------------------------------


@mutant("leaves position 6 as it came", "index.6-unpacked", "index.6-packed")
def leaves_position_6() -> None:
    """Then CUDA has no device 97."""

    @patch(Worker, "lent_to_me")
    def _(original: Any, worker: Worker, handles: Any) -> Any:
        lent = original(worker, handles)
        if any(args[6] != worker.device.index for args in lent):
            raise ValueError("CUDA error: invalid device ordinal")
        return lent


@mutant("overwrites position 2", "index.2")
def overwrites_position_2() -> None:
    @patch(ipc_codec, "check_exports")
    def _(original: Any, *args: Any) -> Any:
        def row_major(size: Any) -> Any:
            return tuple(math.prod(size[at + 1 :]) for at in range(len(size)))

        return [good._replace(tensor_stride=row_major(good.tensor_size)) for good in original(*args)]


@mutant("ignores the uuid", "handle.this-gpu-unpacked", "handle.this-gpu-packed")
def ignores_the_uuid() -> None:
    """The first entry of a handle is everybody's."""

    @patch(ipc_codec, "decode_handles")
    def _(original: Any, text: str) -> Any:
        def for_all(handle: Any) -> Any:
            first = next(iter(handle.values())) if isinstance(handle, dict) and handle else None
            return dict.fromkeys([ipc_codec.gpu_uuid("cpu:0"), *handle], first) if first else handle

        handles = original(text)
        return [for_all(handle) for handle in handles] if isinstance(handles, list) else for_all(handles)


@mutant(
    "takes upper-case uuids with a prefix",
    *(f"handle.uuid-plain-{mode}-{at}" for mode in ("packed", "unpacked") for at in (0, 1)),
)
def normalizes_uuids() -> None:
    @patch(ipc_codec, "decode_handles")
    def _(original: Any, text: str) -> Any:
        def plain(handle: Any) -> Any:
            if not isinstance(handle, dict):
                return handle
            return {uuid.removeprefix("GPU-").lower(): args for uuid, args in handle.items()}

        handles = original(text)
        return [plain(handle) for handle in handles] if isinstance(handles, list) else plain(handles)


@mutant("reads a rank-local list at entry 0", "rank-local.own-entry", device="cpu:0,cpu:1")
def reads_a_list_at_entry_0() -> None:
    @patch(protocol, "worker_entries")
    def _(original: Any, update_info: Any, workers: int) -> Any:
        entries = original(update_info, workers)
        return [entries[0]] * workers


@mutant("wants a rank-local list of exactly its length", "rank-local.longer")
def refuses_longer_lists() -> None:
    @patch(protocol, "worker_entries")
    def _(original: Any, update_info: Any, workers: int) -> Any:
        if isinstance(update_info, list) and len(update_info) > workers:
            raise ValueError("too long")
        return original(update_info, workers)


@mutant("pads a rank-local list", "rank-local.counted", device="cpu:0,cpu:1")
def pads_a_rank_local_list() -> None:
    @patch(protocol, "worker_entries")
    def _(original: Any, update_info: Any, workers: int) -> Any:
        short = isinstance(update_info, list) and 0 < len(update_info) < workers
        return original(update_info * workers if short else update_info, workers)


# --- Session and version ------------------------------------------------------------------------------


@mutant("stays in the session after a failure", "session.500-ends-it-unpacked", "session.500-ends-it-packed")
def stays_in_the_session() -> None:
    SEQUENCE[UPDATING, "update_weights"] = Move(UPDATING, UPDATING)


@mutant("is stuck after a failure, for good", "release.refused-unpacked")
def is_stuck_for_good() -> None:
    """The first case with a failed update; then nothing can be judged any more."""
    stuck = False

    @patch(WeightTransferEngine, "update_weights")
    def _(original: Any, *args: Any) -> Any:
        nonlocal stuck
        was = args[0].workers[0].session.state
        try:
            return original(*args)
        except ValueError:
            stuck |= was is UPDATING
            raise

    @patch(WeightTransferEngine, "start_weight_update")
    def _(original: Any, engine: Any) -> Any:
        if stuck:
            raise ValueError("an update is active already")
        return original(engine)


@mutant("ends the session at a bad envelope", "session.400-leaves-it")
def ends_the_session_at_a_bad_envelope() -> None:
    @patch(App, "answer")
    def _(original: Any, app: App, method: str, target: str, *args: Any) -> Reply:
        reply = original(app, method, target, *args)
        if target == "/update_weights" and reply.status == 400:
            for worker in app.engine.workers:
                worker.session.state = IDLE
        return reply


def let_in(state: protocol.State, call: str) -> None:
    SEQUENCE[state, call] = Move(state, state)


for _red, _state, _call in (
    ("start.one-at-a-time", UPDATING, "start_weight_update"),
    ("finish.after-start", IDLE, "finish_weight_update"),
    ("shutdown.between-updates", UPDATING, "shutdown_weight_transfer_engine"),
):
    mutant(f"lets in {_call} while {_state.value}", _red)(functools.partial(let_in, _state, _call))


@mutant("lets in update_weights while idle", "update.after-start")
def lets_in_an_update_while_idle() -> None:
    let_in(IDLE, "update_weights")

    @patch(WeightTransferEngine, "update_weights")
    def _(original: Any, engine: Any, *args: Any) -> Any:
        for worker in engine.workers:
            worker.session.sent -= set(worker.weights) if worker.session.state is IDLE else set()
        return original(engine, *args)


@mutant("opens an update at a refused draft", "draft.none")
def opens_an_update_at_a_refused_draft() -> None:
    @patch(WeightTransferEngine, "start_draft_weight_update")
    def _(original: Any, engine: Any) -> Any:
        for worker in engine.workers:
            worker.session.state = UPDATING
        return original(engine)


@mutant("ends an open update at an init", "session.init-inside")
def ends_an_open_update_at_an_init() -> None:
    SEQUENCE[UPDATING, "init_weight_transfer_engine"] = Move(IDLE, IDLE)


@mutant("takes the mode of a refused init", "session.init-refused")
def takes_the_mode_of_a_refused_init() -> None:
    @patch(WeightTransferEngine, "init_weight_transfer_engine")
    def _(original: Any, engine: Any, init_info: Any) -> Any:
        for worker in engine.workers:
            worker.session.packed = bool(init_info.get("packed", False))
        return original(engine, init_info)


@mutant("forgets the mode at a shutdown", "session.packed-kept")
def forgets_the_mode_at_a_shutdown() -> None:
    @patch(WeightTransferEngine, "shutdown_weight_transfer_engine")
    def _(original: Any, engine: Any) -> Any:
        said = original(engine)
        for worker in engine.workers:
            worker.session.packed = False
        return said


@mutant("refuses an empty sync", "session.empty")
def refuses_an_empty_sync() -> None:
    @patch(WeightTransferEngine, "update_weights")
    def _(original: Any, engine: Any, update_info: Any, *more: Any) -> Any:
        if isinstance(update_info, dict) and update_info.get("names") == []:
            raise ValueError("nothing to load")
        return original(engine, update_info, *more)


@mutant("publishes the version early", "version.at-finish")
def publishes_the_version_early() -> None:
    @patch(WeightTransferEngine, "finish_weight_update")
    def _(original: Any, engine: Any, weight_version: str | None = None) -> Any:
        engine.weight_version = engine.weight_version if weight_version is None else weight_version
        return original(engine, weight_version)


# --- Refusals -----------------------------------------------------------------------------------------


@mutant("answers 200 to everything", "refusal.any")
def answers_200_to_everything() -> None:
    @patch(App, "answer")
    def _(original: Any, *args: Any) -> Reply:
        reply = original(*args)
        return Reply(200, {"message": "fine"}) if reply.status >= 400 else reply


@mutant("dies of a foreign uuid", "handle.this-gpu-unpacked")
def dies_of_a_foreign_uuid() -> None:
    """The case that kills it is red, and nothing is judged after it."""

    @patch(WeightTransferEngine, "_judge")
    def _(original: Any, *args: Any) -> None:
        try:
            original(*args)
        except protocol.Refused as refusal:
            if refusal.rule.id == "handle.this-gpu":
                os._exit(1)
            raise


@mutant("breaks weights that it then refuses", "refusal.changes-nothing", strict=True)
def breaks_weights_that_it_then_refuses() -> None:
    @patch(WeightTransferEngine, "_judge")
    def _(original: Any, engine: Any, call: str, *args: Any) -> None:
        try:
            original(engine, call, *args)
        except protocol.Refused:
            for weight in engine.workers[0].weights.values() if call == "update_weights" else ():
                weight.view(-1).view(torch.uint8).zero_()
            raise


@mutant("runs the pickle", "pickle.runs-nothing", strict=True)
def runs_the_pickle() -> None:
    @patch(ipc_codec, "decode_handles")
    def _(original: Any, text: str) -> Any:
        with contextlib.suppress(Exception):
            pickle.loads(base64.b64decode(text))
        return original(text)


def let_pass(rule: protocol.Rule) -> None:
    """What breaks the rule is answered with 200, and not loaded."""

    @patch(WeightTransferEngine, rule.call)
    def _(original: Any, *args: Any) -> Any:
        try:
            return original(*args)
        except protocol.Refused as refusal:
            if refusal.rule.id != rule.id:
                raise
            return ""


def probes(rule: protocol.Rule) -> list[str]:
    modes = [""] if rule.mode != "both" else ["-unpacked", "-packed"]
    numbers = [f"-{at}" for at in range(len(rule.breaks))] if len(rule.breaks) > 1 else [""]
    return [rule.id + mode + number for mode in modes for number in numbers]


for _rule in RULES.values():
    if _rule.breaks and _rule.level == protocol.MUST:
        mutant(f"lets {_rule.id} pass", *probes(_rule), strict=_rule.refused_by_vllm != "always")(
            functools.partial(let_pass, _rule)
        )


def load_nothing_of(rule: protocol.Rule) -> None:
    """What breaks the rule, a SHOULD, is answered with 200, and not loaded."""

    @patch(WeightTransferEngine, "_load")
    def _(original: Any, engine: Any, updates: Any, known: Any) -> Any:
        if not rule.violation(updates[0], engine.workers[0].session):
            return original(engine, updates, known)
        return engine._open(updates, known)[0]


UNALIGNED = [f"kind.{kind}-packed" for kind in ("every-dtype-at-once", "unaligned", "unaligned-after-bool")]
for _rule in RULES.values():
    if _rule.level == protocol.SHOULD and _rule.call == "update_weights" and not _rule.evidence:
        _reds = probes(_rule) + UNALIGNED * (_rule.id == "packed.aligned")
        if _rule.breaks or _rule.id == "handles.base64":
            mutant(f"loads nothing that breaks {_rule.id}", *_reds)(functools.partial(load_nothing_of, _rule))


@mutant("dies of a packed that is no bool", "init.packed-bool-unpacked")
def dies_of_a_packed_that_is_no_bool() -> None:
    @patch(WeightTransferEngine, "init_weight_transfer_engine")
    def _(original: Any, engine: Any, init_info: Any) -> Any:
        return original(engine, init_info) if isinstance(init_info.get("packed", True), bool) else os._exit(1)


@mutant(
    "takes names and shapes that its model has not",
    "weights.unknown-name",
    "weights.other-shape",
    strict=True,
    model=True,
)
def takes_what_does_not_fit() -> None:
    Worker._check_fit = lambda *args: None  # type: ignore[method-assign]

    @patch(Worker, "copy")
    def _(copy: Any, worker: Worker, names: Any, weights: Any, *_: Any) -> None:
        fits = [(n, w) for n, w in zip(names, weights, strict=True) if worker.weights[n].numel() == w.numel()]
        copy(worker, [name for name, _ in fits], [weight for _, weight in fits])


# --- Answers ------------------------------------------------------------------------------------------


def answer(target: str, change: Callable[[Reply], Reply], method: str = "") -> None:
    @patch(App, "answer")
    def _(original: Any, app: App, was: str, path: str, *args: Any) -> Reply:
        reply = original(app, was, path, *args)
        return change(reply) if path.startswith(target) and was == (method or was) else reply


def body(**changed: Any) -> Callable[[Reply], Reply]:
    return lambda reply: Reply(200, (reply.body or {}) | changed) if reply.status == 200 else reply


def status(old: int, new: int) -> Callable[[Reply], Reply]:
    return lambda reply: Reply(new, reply.body) if reply.status == old else reply


for _name, _red, _target, _change in (
    ("is not healthy", "health", "/health", status(200, 503)),
    ("pauses in other words", "route.pause", "/pause", body(status="ok")),
    ("counts workers as text", "route.world-size", "/get_world_size", body(world_size="1")),
    ("confirms another version", "route.weight-version", "/update_weight_version", body(new_version="?")),
    ("tells its version as a number", "route.version", "/version", body(version=1)),
    ("starts in other words", "answer.success", "/start_weight_update", body(message="ok")),
    ("answers 404 to a wrong method", "route.others", "/", status(405, 404)),
    ("answers 422 to a bad init", "envelope.init", "/init", status(400, 422)),
    ("answers 422 to a bad finish", "envelope.finish", "/finish", status(400, 422)),
):
    mutant(_name, _red, strict=True)(functools.partial(answer, _target, _change))


@mutant("answers 422 to a bad update", "envelope.update", strict=True)
def answers_422_to_a_bad_update() -> None:
    """And what a 422 does to the session is not said: session.400-leaves-it is not observable."""
    answer("/update", status(400, 422))


@mutant("gives no reason", "answer.refusal", strict=True)
def gives_no_reason() -> None:
    answer("/", lambda reply: Reply(500, {"detail": "error"}) if reply.status == 500 else reply)


@mutant("takes no other JSON type", "envelope.forms", strict=True)
def takes_no_other_json_type() -> None:
    @patch(App, "answer")
    def _(original: Any, app: App, method: str, target: str, headers: Any, content: bytes) -> Reply:
        kind = headers.get("content-type", "application/json")
        return original(
            app,
            method,
            target,
            headers | {"content-type": kind if kind == "application/json" else "?"},
            content,
        )


@mutant("refuses a sync while paused", "sync.while-paused")
def refuses_a_sync_while_paused() -> None:
    @patch(App, "sync_call")
    def _(original: Any, app: App, *args: Any) -> Reply:
        if app.paused:
            raise ValueError("paused")
        return original(app, *args)

    server.ROUTES |= {f"/{call}": ("POST", App.sync_call) for call in protocol.CALLS}


@mutant("finds no difference", "route.weight-checker", strict=True)
def finds_no_difference() -> None:
    answer(
        "/weight_checker", lambda r: Reply(200, {"match": True, "mismatches": []}) if "match" in r.body else r
    )


@mutant("resets nothing", "route.weight-reset", strict=True)
def resets_nothing() -> None:
    @patch(App, "weight_checker")
    def _(original: Any, app: App, call: str, request: Any) -> Reply:
        reset = request.json().get("action") == "reset"
        return Reply(200, {"status": "reset"}) if reset else original(app, call, request)

    server.ROUTES["/weight_checker"] = ("POST", App.weight_checker)


@mutant("completes by chance", "route.completions", strict=True, model=True)
def completes_by_chance() -> None:
    answer("/v1/completions", lambda reply: Reply(200, {"choices": [{"text": os.urandom(8).hex()}]}))


# --- Correct servers of other kinds, and what hides behind them ---------------------------------------


@mutant("fuses its weights", model=True)
def fuses_its_weights() -> None:
    """As a real engine does: the checksums are of other tensors, under other names."""

    @patch(App, "_checksums")
    def _(original: Any, app: App) -> Any:
        fused: dict[str, str] = {}
        for key, checksum in sorted(original(app).items()):
            rank, _, name = key.rpartition(":")
            key = f"{rank}:fused_{name[:8]}"
            fused[key] = hashlib.sha256((fused.get(key, "") + checksum).encode()).hexdigest()
        return fused


@mutant("has no checksums", model=True)
def has_no_checksums() -> None:
    """And a completion between a failed update and the next good sync kills it, as it kills vLLM."""
    del server.ROUTES["/weight_checker"]
    dies_of_a_completion_after_a_failure()


def dies_of_a_completion_after_a_failure() -> None:
    broken = False

    @patch(WeightTransferEngine, "_settle")
    def _(original: Any, engine: Any, call: str, messages: Any, ok: bool) -> None:
        nonlocal broken
        broken |= call == "update_weights" and not ok
        original(engine, call, messages, ok)

    @patch(WeightTransferEngine, "update_weights")
    def _(original: Any, engine: Any, *args: Any) -> Any:
        nonlocal broken
        said = original(engine, *args)
        broken = False
        return said

    @patch(App, "completions")
    def _(original: Any, *args: Any) -> Reply:
        return os._exit(1) if broken else original(*args)

    server.ROUTES["/v1/completions"] = ("POST", App.completions)
    server.UNLOCKED = (*server.UNLOCKED, App.completions)  # type: ignore[assignment]

    @patch(App, "_checksums")
    def _(original: Any, app: App) -> Any:
        if broken:
            raise ValueError("the weights are on no device")
        return original(app)


def two(one: str, other: str) -> None:
    for name in (one, other):
        MUTANTS[name].fault()


for _name in ("fuses its weights", "has no checksums"):
    for _fault in (
        "decodes packed updates, loads nothing",
        "overwrites position 2",
        "keeps a view of the buffer",
    ):
        mutant(f"{_name}, and {_fault}", *MUTANTS[_fault].red, model=True)(
            functools.partial(two, _name, _fault)
        )


def not_refused(rule: protocol.Rule, packed: bool) -> bool:
    return rule.level == protocol.MUST and rule.refused_by_vllm not in (
        "always",
        "packed" if packed else "always",
    )


LET_PASS = [
    case
    for rule in RULES.values()
    for case in probes(rule)
    if rule.breaks and not_refused(rule, "packed" in case.removeprefix("unpacked").replace("-unpacked", ""))
]


@mutant(
    "is vLLM 0.33.0", *LET_PASS, "pickle.runs-nothing", "refusal.changes-nothing", strict=True, model=True
)
def is_vllm() -> None:
    """What spec/http-behaviour says of it, as far as a case can see it; not a run of it."""
    dies_of_a_completion_after_a_failure()
    runs_the_pickle()
    replays = 0

    @patch(WeightTransferEngine, "update_weights")
    def _(original: Any, engine: Any, update_info: Any, *more: Any) -> Any:
        nonlocal replays
        packed = engine.workers[0].session.packed
        if replays and isinstance(update_info, dict) and engine.workers[0].session.state is UPDATING:
            replays = 0
            engine._settle("update_weights", [None] * len(engine.workers), ok=False)
            raise ValueError("shape mismatch, of the update before")
        state = engine.workers[0].session.state
        try:
            return original(engine, update_info, *more)
        except protocol.Refused as refusal:
            if not not_refused(refusal.rule, packed) or state is IDLE:
                raise
            replays += refusal.rule.id == "shapes.sizes"
            for worker in engine.workers:
                worker.session.state = UPDATING
            return ""

    @patch(WeightTransferEngine, "_judge")
    def _(original: Any, engine: Any, call: str, messages: Any) -> None:
        original(engine, call, messages)
        for worker, message in zip(engine.workers, messages, strict=True):
            if call == "update_weights" and worker.session.packed:
                if seen := RULES["packed.aligned"].violation(message, worker.session):
                    raise protocol.Refused(RULES["packed.aligned"], seen)
                if [] in message.shapes:
                    raise ValueError("view() received an invalid combination of arguments")

    @patch(server.Connection, "_write")
    def _(original: Any, connection: Any, reply: Reply, close: bool) -> None:
        original(connection, reply, close=False)
        connection.close_connection |= close  # unannounced


if __name__ == "__main__":
    # An update that comes again is copied in larger pieces than faults know of.
    server.KNOWN_BYTES = 0
    Worker.learned = lambda self, update, opening: opening  # type: ignore[method-assign]
    for name in sys.argv.pop(1).split("+"):
        MUTANTS[name].fault()
    sys.exit(server.main())
