"""The oracle: it finds every kind of fault, blames the right party, and accuses no correct trainer.

First what the tests use: witnesses, a trainer out of raw calls, transcripts by hand. Then a section a
promise: mutants (for each rule a trainer with exactly that fault), faults of servers, correct trainers,
transcripts, what `check` bears, the verdict, the judge's processes.

    PYTHONPATH=.:tests python tests/test_judge.py     writes transcripts/clean.jsonl anew
"""

from __future__ import annotations

import base64
import contextlib
import copy
import functools
import itertools
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from test_protocol import GOOD, UPDATE_BREAKS, UUID

import ipc_codec
import protocol
import server
import trainer
from protocol import MUST, RULES, SHOULD
from test_roundtrip import (
    FINISH,
    INIT,
    JSON,
    NO_BODY,
    SHUTDOWN,
    START,
    UPDATE,
    Client,
    Server,
    digests,
    environment,
    nbytes,
    needs_cuda,
    noise,
    ok,
    overwrite,
    refill,
    refused,
    split,
)

ROOT = Path(protocol.__file__).resolve().parent
TRANSCRIPTS = Path(__file__).parent / "transcripts"
HOLD = 0.4  # seconds that a slow witness leaves an update unanswered
kinds = pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=needs_cuda)])
both_modes = pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])

Found = set[tuple[str, str]]  # (party, rule id)


# --- Witnesses ----------------------------------------------------------------------------------------


class Trainer(Client):
    """A tiny correct trainer out of raw calls, and what the witness wrote of it. A mutant has one fault."""

    def __init__(self, witness: Any) -> None:
        super().__init__(witness)
        self.witness, self.began = witness, witness.path.stat().st_size

    def transcript(self) -> list[dict[str, Any]]:
        """The header, and the exchanges since this trainer came."""
        text = self.witness.path.read_text()
        return [json.loads(line) for line in (text.split("\n", 1)[0], *text[self.began :].splitlines())]

    def found(self) -> Found:
        return found(self.transcript())

    def put(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Where the worker reads them: a mutant that writes them writes what is lent."""
        place = self.devices[0] if self.devices[0].startswith("cuda") else "cpu"
        return {name: weight.to(place) for name, weight in weights.items()}

    def update_and(self, info: dict[str, Any], write: Callable[[], Any]) -> None:
        """An update, and `write` after the server has looked at it and before it answers."""
        looks = self.witness.looks()
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(self.update, info)
            while self.witness.looks() == looks:
                wait(reply, 0.005)
                assert not reply.done(), reply.result().text
            write()
            torch.cuda.synchronize() if torch.cuda.is_initialized() else None
            assert not reply.done()
            ok(reply.result())


def wait(reply: Future, seconds: float) -> None:
    """Until the reply, or for so long."""
    with contextlib.suppress(TimeoutError):
        reply.result(seconds)


def found(lines: list[Any]) -> Found:
    return {(finding.party, finding.rule.id) for finding in protocol.check(lines)}


# server.py, which tells us when it has looked at what an update lends.
TELLING = """
import sys, server
opened, told = server.Witness.opened, open(sys.argv.pop(1), "ab", buffering=0)
def opened_and_told(*args):
    opened(*args)
    told.write(b".")
server.Witness.opened = opened_and_told
sys.exit(server.main())
"""


class Witness(Server):
    """A server process that writes a transcript."""

    def __init__(self, device: str, path: Path, hold: float = 0) -> None:
        self.path, self.told = path, path.with_suffix(".told")
        options = ("--transcript", str(path), "--hold-seconds", str(hold))
        super().__init__(device, *options, program=("-c", TELLING, str(self.told)))

    def looks(self) -> int:
        """At how many updates it has looked."""
        return self.told.stat().st_size


class Inside:
    """The same in this process, for CPU tensors: quick to start, and nobody else's."""

    def __init__(self, path: Path, *options: str) -> None:
        self.path, self.devices = path, ["cpu:0"]
        command = ["--port", "0", "--device", "cpu:0", "--transcript", str(path), *options]
        self.server = server.make_server(server.build_parser().parse_args(command))
        self.url, self.port = f"http://127.0.0.1:{self.server.server_port}", self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@contextlib.contextmanager
def visit(witness: Any) -> Iterator[Trainer]:
    """A trainer of an idle, unpacked server that no refused export is left at. Takes back what it lent."""
    client = Client(witness)
    calm(client)
    visitor = Trainer(witness)
    try:
        yield visitor
    finally:
        calm(client)  # before the settling: the server may hold what it opened
        visitor.give_up()
        visitor.http.close()
        client.http.close()


def calm(client: Client) -> None:
    for call in (FINISH, START, FINISH, SHUTDOWN):
        client.post(call)
    ok(client.init())


@pytest.fixture(scope="module")
def witness_of(tmp_path_factory: Any) -> Iterator[Callable[..., Witness]]:
    """The witness of a kind of device, number of workers and pace; started when it is first asked for."""
    folder = tmp_path_factory.mktemp("witnesses")
    with contextlib.ExitStack() as stack:

        @functools.cache
        def witness(kind: str, workers: int, slow: bool) -> Witness:
            if kind == "cuda" and torch.cuda.device_count() < workers:
                pytest.skip(f"needs {workers} GPUs")
            devices = ",".join(f"{kind}:{at}" for at in range(workers))
            path = folder / f"{kind}-{workers}-{slow}.jsonl"
            return stack.enter_context(Witness(devices, path, HOLD if slow else 0))

        yield lambda kind, workers=1, slow=False: witness(kind, workers, slow)


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Inside]]:
    monkeypatch.setenv(protocol.GATE, "1")
    made: list[Inside] = []

    def witness(*options: str) -> Inside:
        made.append(Inside(tmp_path / f"inside-{len(made)}.jsonl", *options))
        return made[-1]

    yield witness
    for one in made:
        one.server.shutdown()
        one.server.server_close()


def pair(seed: int = 0) -> dict[str, torch.Tensor]:
    """16 and 6 bytes: aligned in a buffer, and not the other way round."""
    return {"a": noise(torch.float32, 2, 2, seed=seed), "b": noise(torch.bfloat16, 3, seed=seed)}


def several(count: int, *shape: int) -> dict[str, torch.Tensor]:
    return {f"w{at}": noise(torch.float32, *shape, seed=at) for at in range(count)}


def with_args(info: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The update with other values in every handle's arguments."""

    def changed(handle: dict[str, Any]) -> dict[str, Any]:
        return {uuid: tuple(ipc_codec.IpcArgs(*args)._replace(**changes)) for uuid, args in handle.items()}

    handles = info["ipc_handles_pickled"]
    changed_handles = list(map(changed, handles)) if isinstance(handles, list) else changed(handles)
    return info | {"ipc_handles_pickled": changed_handles}


# --- Transcripts by hand ------------------------------------------------------------------------------

HEADER = {"transcript": "weight-sync", "version": 1, "uuids": [UUID]}


def line(call: str, body: Any = None, status: int = 200, **more: Any) -> dict[str, Any]:
    return {"call": call, "body": body, "status": status, **more}


def init_line(packed: Any = False, **more: Any) -> dict[str, Any]:
    return line("init_weight_transfer_engine", {"init_info": {"packed": packed}}, **more)


def update_line(info: dict[str, Any], status: int = 200, **more: Any) -> dict[str, Any]:
    """`info` has its handles in place, described; a text there is one that holds none."""
    handles = info.get("ipc_handles_pickled")
    text = {"ipc_handles_pickled": ""} if handles is not None else {}
    shown = {"undecodable": "no pickle"} if isinstance(handles, str) else handles
    return line("update_weights", {"update_info": info | text}, status, handles=shown, **more)


def seen(*workers: dict[str, Any]) -> dict[str, Any]:
    return {"workers": list(workers)}


START_LINE = line("start_weight_update")
FINISH_LINE = line("finish_weight_update")


def sync_of(*updates: dict[str, Any], packed: bool = False) -> list[dict[str, Any]]:
    return [HEADER, init_line(packed), START_LINE, *updates, FINISH_LINE]


# --- Mutants: trainers with one fault -----------------------------------------------------------------


class Mutant(NamedTuple):
    run: Callable[[Trainer], Any]
    workers: int = 1
    slow: bool = False
    besides: tuple[str, ...] = ()  # what comes before the fault breaks these


MUTANTS: dict[str, list[Any]] = {}  # rule id -> parameters: (rule id, Mutant)


def mutant(rule_id: str, name: str = "", **more: Any) -> Any:
    """Decorator: the function is a trainer that breaks that rule alone."""

    def enter(run: Any) -> Any:
        label = f"{rule_id}-{name or run.__name__.replace('_', ' ')}"
        entry = pytest.param(rule_id, Mutant(run, **more), id=label)
        MUTANTS.setdefault(rule_id, []).append(entry)
        return run

    return enter


def send_broken(t: Trainer, packed: bool, rule: protocol.Rule, change: protocol.Break) -> None:
    """A sync whose one update is a counter-example. Refused, the trainer stops and settles."""
    t.begin(packed)
    reply = t.update(change(t.info(t.put(pair()), packed)))
    if rule.level == SHOULD:
        ok(reply)
        ok(t.finish())
    else:
        refused(reply)
        t.settle()


_breaks: list[Any] = [parameters.values for parameters in UPDATE_BREAKS]
for _mode, _rule, _at in _breaks:
    mutant(_rule.id, f"{_mode} {_at}")(
        functools.partial(send_broken, packed=_mode == "packed", rule=_rule, change=_rule.breaks[_at])
    )


# -- the order of calls


@mutant("start.one-at-a-time")
def starts_twice(t: Trainer) -> None:
    t.begin()
    refused(t.post(START))
    ok(t.update(t.unpacked(pair())))
    ok(t.finish())


@mutant("update.after-start")
def updates_without_a_start(t: Trainer) -> None:
    ok(t.init())
    refused(t.update(t.unpacked(pair())))
    t.settle()


@mutant("update.after-start", besides=("update.lengths",))
def goes_on_after_a_refusal(t: Trainer) -> None:
    t.begin()
    refused(t.update(t.unpacked(pair()) | {"shapes": []}))
    refused(t.update(t.unpacked(pair())))
    t.settle()


@mutant("finish.after-start")
def finishes_twice(t: Trainer) -> None:
    t.sync(pair())
    refused(t.finish())


@mutant("shutdown.between-updates")
def shuts_down_in_a_sync(t: Trainer) -> None:
    t.begin()
    refused(t.post(SHUTDOWN))
    ok(t.update(t.unpacked(pair())))
    ok(t.finish())


@mutant("draft.none")
def starts_a_draft(t: Trainer) -> None:
    ok(t.init())
    refused(t.post("/start_draft_weight_update"))


@mutant("sync.finished")
def never_finishes(t: Trainer) -> None:
    t.begin()
    ok(t.update(t.unpacked(pair())))


@mutant("call.one-in-flight", slow=True)
def has_two_updates_in_flight(t: Trainer) -> None:
    t.begin()
    updates = [t.unpacked({name: weight}) for name, weight in pair().items()]
    with ThreadPoolExecutor(2) as pool:
        for reply in pool.map(t.update, updates):
            ok(reply)
    ok(t.finish())


# -- init and envelopes


@mutant("init.fields")
def names_the_backend(t: Trainer) -> None:
    refused(t.post(INIT, {"init_info": {"packed": False, "backend": "ipc"}}))
    t.sync(pair())


@mutant("init.packed-bool")
def says_packed_in_words(t: Trainer) -> None:
    ok(t.post(INIT, {"init_info": {"packed": "true"}}))
    ok(t.post(START))
    ok(t.update(t.packed(pair())))
    ok(t.finish())


@mutant("init.first")
def never_calls_init(t: Trainer) -> None:
    ok(t.post(START))
    ok(t.update(t.unpacked(pair())))
    ok(t.finish())


def send_envelope(t: Trainer, path: str, body: Any, content_type: str = JSON) -> None:
    """A call with that body in a sync, which it leaves as it was."""
    t.begin()
    raw = body if isinstance(body, bytes) else None if body is NO_BODY else json.dumps(body).encode()
    assert t.send("POST", path, raw, content_type).status_code == 400
    ok(t.update(t.unpacked(pair())))
    ok(t.finish())


ENVELOPES: dict[str, tuple[Any, ...]] = {
    "init without init_info": (INIT, {}),
    "init_info null": (INIT, {"init_info": None}),
    "update without a body": (UPDATE, NO_BODY),
    "update without update_info": (UPDATE, {}),
    "body a list": (UPDATE, []),
    "update_info null": (UPDATE, {"update_info": None}),
    "entry null": (UPDATE, {"update_info": [None]}),
    "update not JSON": (UPDATE, b'{"update_info": {'),
    "update not called JSON": (UPDATE, {"update_info": {}}, "text/plain"),
    "lone surrogate": (UPDATE, {"update_info": {"names": ["\ud800"]}}),
    "65 bits": (INIT, {"init_info": {"packed": 1 << 65}}),
    "version no text": (FINISH, {"weight_version": 7}),
    "finish not JSON": (FINISH, b"{"),
    "finish not called JSON": (FINISH, {"weight_version": "7"}, "text/plain"),
}
for _name, _envelope in ENVELOPES.items():
    mutant("body.envelope", _name)(
        functools.partial(lambda t, envelope: send_envelope(t, *envelope), envelope=_envelope)
    )


# -- messages that only a whole sync breaks


@mutant("rank-local.counted", workers=2)
def sends_one_entry_for_two_workers(t: Trainer) -> None:
    t.begin()
    refused(t.update([t.unpacked(pair())]))
    t.settle()


@mutant("names.unique")
def sends_a_name_in_two_chunks(t: Trainer) -> None:
    t.begin()
    ok(t.update(t.unpacked(pair())))
    refused(t.update(t.unpacked({"b": pair()["b"]})))
    t.settle()


@mutant("handle.this-gpu", workers=2)
def exports_for_one_of_two_workers(t: Trainer) -> None:
    t.begin()
    info = t.unpacked(pair())
    info["ipc_handles_pickled"] = [dict([*handle.items()][:1]) for handle in info["ipc_handles_pickled"]]
    refused(t.update(info))
    t.settle()


@mutant("handles.base64")
def breaks_the_lines_of_base64(t: Trainer) -> None:
    t.begin()
    info = t.unpacked(pair())
    raw = base64.b64decode(ipc_codec.encode_handles(info["ipc_handles_pickled"]))
    ok(t.update(info | {"ipc_handles_pickled": base64.encodebytes(raw).decode()}))
    ok(t.finish())


@mutant("unpacked.tied-in-pairs")
def sends_three_names_on_the_same_bytes(t: Trainer) -> None:
    t.sync(dict.fromkeys("abc", t.put(pair())["a"]))


@mutant("unpacked.overlap-alike")
def sends_overlapping_views(t: Trainer) -> None:
    base = t.put({"base": torch.arange(6.0)})["base"]
    t.sync({"a": base[:4], "b": base[2:]})


@mutant("unpacked.overlap-alike")
def sends_the_same_bytes_in_two_shapes(t: Trainer) -> None:
    base = t.put({"base": torch.arange(6.0)})["base"]
    t.sync({"a": base, "b": base.view(2, 3)})


@mutant("packed.chunk-full")
def closes_chunks_too_early(t: Trainer) -> None:
    t.begin(packed=True)
    buffers, handles = t.buffers(64)
    for name, weight in several(2, 4).items():
        ok(t.update(t.packed({name: weight}, buffers, handles)))
    ok(t.finish())


@mutant("packed.one-export")
def exports_the_buffer_for_every_chunk(t: Trainer) -> None:
    t.begin(packed=True)
    (buffer,), _ = t.buffers(16)
    for name, weight in several(3, 4).items():
        ok(t.update(t.packed({name: weight}, [buffer], t.lending(buffer.export()))))
    ok(t.finish())


@mutant("weights.fit")
def sends_another_shape_than_the_server_holds(t: Trainer) -> None:
    t.sync(pair())
    t.begin()
    refused(t.update(t.unpacked({"a": noise(torch.float32, 4)})))
    t.settle()


@mutant("weights.fit")
def sends_another_dtype_than_the_server_holds(t: Trainer) -> None:
    t.sync(pair())
    t.begin(packed=True)
    refused(t.update(t.packed({"a": noise(torch.int32, 2, 2)})))
    t.settle()


BAD_ARGUMENTS: dict[str, dict[str, Any]] = {
    "past its storage": {"tensor_offset": 1 << 20},
    "storage larger than its file": {"storage_size_bytes": 1 << 40},
    "memory of nobody": {"storage_handle": b"cpu:/torch_0_0_0"},
    "counter of nobody": {"ref_counter_handle": b"/torch_0_0_0"},
    "no storage class": {"storage_cls": "torch.nn.parameter.Parameter"},
    "negative stride": {"tensor_stride": (-1,)},
}


def send_bad_arguments(t: Trainer, changes: dict[str, Any]) -> None:
    if "storage_size_bytes" in changes and t.devices[0].startswith("cuda"):
        pytest.skip("how much a CUDA handle maps cannot be seen from Python")
    t.begin()
    refused(t.update(with_args(t.unpacked({"a": torch.ones(3)}), **changes)))
    t.settle()


for _name, _changes in BAD_ARGUMENTS.items():
    mutant("handle.opens", name=_name)(functools.partial(send_bad_arguments, changes=_changes))


# -- memory: loans


@mutant("loan.until-reply", slow=True)
def fills_the_buffer_before_the_reply(t: Trainer) -> None:
    t.begin(packed=True)
    buffers, handles = t.buffers(64)
    t.update_and(t.packed(pair(), buffers, handles), lambda: overwrite(buffers))
    ok(t.finish())


@mutant("loan.until-reply", slow=True, workers=2)
def fills_one_of_two_buffers_before_the_reply(t: Trainer) -> None:
    t.begin(packed=True)
    buffers, handles = t.buffers(64)
    t.update_and(t.packed(pair(), buffers, handles), lambda: overwrite(buffers[1:]))
    ok(t.finish())


@mutant("loan.until-reply", slow=True)
def steps_before_the_reply(t: Trainer) -> None:
    weights = t.put(pair())
    t.begin()
    t.update_and(t.unpacked(weights), weights["a"].zero_)
    ok(t.finish())


@mutant("loan.until-reply", slow=True, besides=("packed.aligned",))
def fills_an_unaligned_slice_before_the_reply(t: Trainer) -> None:
    t.begin(packed=True)
    buffers, handles = t.buffers(64)
    weights = {"a": torch.ones(1, dtype=torch.uint8), "b": torch.ones(2)}
    info = t.packed(weights, buffers, handles)
    t.update_and(info, lambda: refill(buffers, [weights["a"], torch.zeros(2)]))
    ok(t.finish())


@mutant("loan.until-finish")
def steps_before_the_finish(t: Trainer) -> None:
    weights = t.put(pair())
    t.begin()
    ok(t.update(t.unpacked(weights)))
    weights["b"].zero_()
    torch.cuda.synchronize() if torch.cuda.is_initialized() else None
    ok(t.finish())


@mutant("workers.same-bytes", workers=2)
def packs_in_another_order_on_one_rank(t: Trainer) -> None:
    t.begin(packed=True)
    buffers, handles = t.buffers(64)
    weights = several(2, 4)
    info = t.packed(weights, buffers, handles)
    refill(buffers[1:], [*weights.values()][::-1])
    ok(t.update(info))
    ok(t.finish())


@mutant("workers.same-bytes", workers=2)
def lends_another_tensor_on_one_rank(t: Trainer) -> None:
    t.begin()
    info, other = t.unpacked({"a": torch.ones(4)}), t.unpacked({"a": torch.zeros(4)})
    (handle,), (another,) = info["ipc_handles_pickled"], other["ipc_handles_pickled"]
    second = list(handle)[1]
    ok(t.update(info | {"ipc_handles_pickled": [handle | {second: another[second]}]}))
    ok(t.finish())


# -- memory: exports


@mutant("export.fresh")
def uses_an_export_in_two_syncs(t: Trainer) -> None:
    info = t.unpacked(pair())
    for _ in range(2):
        t.begin()
        ok(t.update(info))
        ok(t.finish())


@mutant("export.kept")
def settles_what_is_lent(t: Trainer) -> None:
    t.begin()
    ok(t.update(t.unpacked(pair())))
    t.settle()
    ok(t.finish())


@mutant("export.settled", besides=("weights.fit",))
def leaves_the_exports_of_a_refused_update(t: Trainer) -> None:
    sends_another_shape(t)
    t.sync(pair())


def sends_another_shape(t: Trainer) -> None:
    t.sync(pair())
    t.begin()
    refused(t.update(t.unpacked({"a": noise(torch.float32, 4)})))


@mutant("export.settled", besides=("update.lengths",))
def leaves_the_exports_of_an_update_that_broke_a_rule(t: Trainer) -> None:
    t.begin()
    refused(t.update(t.unpacked(pair()) | {"shapes": []}))
    t.sync(pair())


@mutant("unpacked.own-export")
def uses_an_export_in_two_updates(t: Trainer) -> None:
    t.begin()
    info = t.unpacked({"a": pair()["a"]})
    ok(t.update(info))
    ok(t.update(info | {"names": [t.prefix + "tied"]}))
    ok(t.finish())


@mutant("unpacked.own-export")
def uses_an_export_for_two_names(t: Trainer) -> None:
    t.begin()
    handle = t.lend(pair()["a"])
    info = t.described(dict.fromkeys(("a", "tied"), pair()["a"]))
    ok(t.update(info | {"ipc_handles_pickled": [handle, handle]}))
    ok(t.finish())


@kinds
@pytest.mark.parametrize(("rule_id", "mutant"), list(itertools.chain(*MUTANTS.values())))
def test_a_mutant_turns_its_rule_red_and_no_other(witness_of, kind, rule_id, mutant):
    with visit(witness_of(kind, mutant.workers, mutant.slow)) as t:
        mutant.run(t)
        assert t.found() == {("trainer", broken) for broken in (rule_id, *mutant.besides)}


def test_an_unknown_name_is_found(inside):
    with visit(inside("--model", "trainer:ByteLM")) as t:
        t.begin()
        t.prefix = "module."
        refused(t.update(t.unpacked({"norm.bias": torch.zeros(64)})))
        t.settle()
        assert t.found() == {("trainer", "weights.fit")}


@pytest.mark.parametrize("changes", [{"ref_counter_offset": 10_000}, {"ref_counter_handle": b"/etc/passwd"}])
def test_a_start_after_a_handle_without_a_counter_is_answered(inside, changes):
    with visit(inside()) as t:
        t.begin()
        refused(t.update(with_args(t.unpacked({"a": torch.ones(3)}), **changes)))
        t.settle()
        t.sync(pair())
        assert t.found() == {("trainer", "handle.opens")}


# --- Faults of servers, by hand -----------------------------------------------------------------------


def blames_the_server(rule: protocol.Rule, packed: bool) -> bool:
    return rule.level == MUST and rule.refused_by_vllm in ("always", *(["packed"] if packed else []))


@pytest.mark.parametrize(("mode", "rule", "at"), UPDATE_BREAKS)
def test_a_server_is_named_for_letting_in_what_vllm_refuses(mode, rule, at):
    packed = mode == "packed"
    bad = rule.breaks[at](GOOD[mode])
    parties = {"trainer", "server"} if blames_the_server(rule, packed) else {"trainer"}
    assert found(sync_of(update_line(bad), packed=packed)) == {(party, rule.id) for party in parties}
    refused_one = [*sync_of(update_line(bad, 500), packed=packed)][:-1]
    assert found(refused_one) == {("trainer", rule.id)}


def test_examples_of_what_a_server_is_named_for():
    packed, unpacked = ({(r.id) for r in RULES.values() if blames_the_server(r, p)} for p in (True, False))
    assert packed - unpacked == {
        *("dtype.real", "packed.tensor-sizes", "packed.size-of-shape", "packed.within-buffer")
    }
    assert unpacked.isdisjoint({"names.unique", "unpacked.handle-matches", "packed.aligned", "weights.fit"})
    assert {"update.lengths", "handle.this-gpu", "handles.decodable", "body.envelope"} <= unpacked


ORDER = [rule for rule in RULES.values() if rule.check is None and rule.calls]


@pytest.mark.parametrize("rule", ORDER, ids=lambda rule: rule.id)
def test_a_server_is_named_for_an_order_that_vllm_refuses(rule):
    calls = [update_line(GOOD["unpacked"]) if c == "update_weights" else line(c) for c in rule.calls]
    closing = [FINISH_LINE] if "start_weight_update" in rule.calls else []
    lines = [HEADER, init_line(), *calls]
    assert found([*lines, *closing]) == {("trainer", rule.id), ("server", rule.id)}
    lines[-1] = lines[-1] | {"status": 500}
    assert found([*lines, *closing]) == {("trainer", rule.id)}


@pytest.mark.parametrize("body", [None, {}, {"update_info": 1}, {"update_info": [None]}, "text"])
def test_a_server_is_named_for_an_envelope_that_vllm_refuses(body):
    lines = sync_of(line("update_weights", body), update_line(GOOD["unpacked"]))
    assert found(lines) == {("trainer", "body.envelope"), ("server", "body.envelope")}


def test_a_server_is_named_for_a_short_rank_local_list():
    lines = sync_of(line("update_weights", {"update_info": [GOOD["unpacked"]]}))
    lines[0] = HEADER | {"uuids": [UUID, UUID[:-1] + "1"]}
    assert found(lines) == {("trainer", "rank-local.counted"), ("server", "rank-local.counted")}


def test_a_server_is_named_for_init_fields():
    lines = sync_of(update_line(GOOD["unpacked"]))
    lines[1] = line("init_weight_transfer_engine", {"init_info": {"backend": "ipc"}})
    assert found(lines) == {("trainer", "init.fields"), ("server", "init.fields")}


SEEN_AT_UPDATE = {"arrival": [1, 2], "reply": [1, 2], "before": [1, 1], "unopened": "", "misfit": ""}
SEEN_AT_FINISH = {**{"names": ["a", "b"], "reply": [1, 2], "finish": [1, 2], "held": [1, 1], "after": [0, 0]}}
EVIDENCE: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("loan.until-reply", {"reply": [1, 3]}, {}, "trainer"),
    ("export.fresh", {"before": [1, 0]}, {}, "trainer"),
    ("handle.opens", {"unopened": "no such file"}, {}, "trainer"),
    ("weights.fit", {"misfit": "no such name"}, {}, "trainer"),
    ("loan.until-finish", {}, {"finish": [3, 2]}, "trainer"),
    ("export.kept", {}, {"held": [0, 1], "after": [-1, 0]}, "trainer"),
    ("weights.complete", {}, {"missing": "1 of 3 were not sent, c first"}, "trainer"),
    ("export.released", {}, {"after": [0, 1]}, "server"),
    ("export.released", {}, {"after": [-1, 0]}, "server"),
]


def witnessed(at_update: dict[str, Any], at_finish: dict[str, Any]) -> list[dict[str, Any]]:
    update = update_line(GOOD["unpacked"], seen=seen(SEEN_AT_UPDATE | at_update))
    lines = sync_of(update)
    lines[-1] = FINISH_LINE | {"seen": seen(SEEN_AT_FINISH | at_finish)}
    return lines


@pytest.mark.parametrize(("rule_id", "at_update", "at_finish", "party"), EVIDENCE)
def test_what_a_witness_saw_names_one_party(rule_id, at_update, at_finish, party):
    assert found(witnessed({}, {})) == set()
    assert found(witnessed(at_update, at_finish)) == {(party, rule_id)}


def test_a_counter_that_nobody_sees_is_nobodys_fault():
    lines = witnessed({"before": [None, None]}, {"held": [None, 1], "after": [None, 0]})
    assert found(lines) == set()


def test_workers_that_saw_other_bytes():
    one, two = SEEN_AT_UPDATE, SEEN_AT_UPDATE | {"arrival": [1, 3], "reply": [1, 3]}
    other = UUID[:-1] + "1"
    both = [{**handle, other: handle[UUID]} for handle in GOOD["unpacked"]["ipc_handles_pickled"]]
    update = update_line(GOOD["unpacked"] | {"ipc_handles_pickled": both}, seen=seen(one, two))
    lines = [HEADER | {"uuids": [UUID, other]}, *sync_of(update)[1:]]
    (finding,) = protocol.check(lines)
    assert (finding.party, finding.rule.id) == ("trainer", "workers.same-bytes")
    assert "b differs on workers 0 and 1" in finding.seen


STATUSES = [400, 500, *(s for s in (403, 404, 409, 413))]


@pytest.mark.parametrize("status", STATUSES)
def test_a_refusal_that_nothing_explains_is_unclear(status):
    lines = [HEADER, init_line(status=status, error="out of memory"), START_LINE, FINISH_LINE]
    assert ("unclear", "refusal.explained") in found(lines)
    lines = sync_of(update_line(GOOD["unpacked"], status, error="out of memory"))
    assert ("unclear", "refusal.explained") in found(lines)


@pytest.mark.parametrize("status", [400, 409, 422, 500])
def test_a_refusal_that_a_rule_explains_is_the_trainers(status):
    lines = sync_of(update_line(GOOD["unpacked"] | {"shapes": []}, status))
    lines = lines if status == 400 else lines[:-1]  # after a 400 the update is still open
    assert found(lines) == {("trainer", "update.lengths")}


@pytest.mark.parametrize("status", [201, 202, 204])
def test_any_2xx_is_a_success(status):
    lines = [HEADER, *({**said, "status": status} for said in sync_of(update_line(GOOD["unpacked"]))[1:])]
    assert found(lines) == set()


BY_HAND_ONLY = {"export.released", "refusal.explained", "weights.complete"}  # the last: with a model only


def test_every_rule_has_a_mutant_or_a_transcript_by_hand():
    assert set(MUTANTS) | BY_HAND_ONLY == set(RULES)
    assert set(MUTANTS).isdisjoint(BY_HAND_ONLY)
    assert {rule.id for rule in RULES.values() if rule.party == "server"} <= BY_HAND_ONLY


FORWARDED = HEADER | {"forwarded": "http://127.0.0.1:8000"}
REST = sync_of(update_line(GOOD["unpacked"]))[3:]


@pytest.mark.parametrize(
    "lines",
    [
        [START_LINE | {"status": 500, "error": "one is open"}, FINISH_LINE, START_LINE, *REST],
        REST,
        [FINISH_LINE, START_LINE, *REST],
        [init_line(), *REST],
    ],
    ids=["a start is refused", "an update", "a finish", "an init"],
)
def test_who_joins_while_an_update_is_open_accuses_nobody(lines):
    assert found([FORWARDED, *lines]) == set()
    assert found([FORWARDED, *lines, FINISH_LINE]) == {
        ("trainer", "finish.after-start"),
        ("server", "finish.after-start"),
    }


@pytest.mark.parametrize("status", [401, 403, 404, 409, 411, 413, 422, 429])
@pytest.mark.parametrize("goes_on", [True, False], ids=["the update stays open", "the update has ended"])
def test_after_another_refusal_than_vllms_an_update_may_be_open_or_not(status, goes_on):
    refused = update_line(GOOD["unpacked"], status, error="no")
    lines = [FORWARDED, init_line(), START_LINE, refused, *[START_LINE] * (not goes_on), *REST]
    assert found(lines) == {("unclear", "refusal.explained")}


@pytest.mark.parametrize("status", [404, 500])
def test_where_no_update_was_taken_nothing_can_be_judged(tmp_path, status):
    refused = {"status": status, "error": "not here"}
    lines = [FORWARDED, START_LINE | refused, REST[0] | refused, FINISH_LINE | refused]
    assert said_of(lines, tmp_path)[1] == 2


@pytest.mark.parametrize("call", [init_line(), START_LINE])
@pytest.mark.parametrize("error", ["no answer", ""])
def test_no_answer_is_found_once(call, error):
    [finding] = protocol.check([FORWARDED, call | {"status": 503, "error": error}])
    assert (finding.party, finding.rule.id) == ("server", "refusal.explained")


def test_a_finish_whose_body_is_not_read_sets_no_version():
    lines = [*sync_of(update_line(GOOD["unpacked"]))[:-1], FINISH_LINE | {"body": "(no JSON)"}]
    assert found(lines) == {("trainer", "body.envelope")}


def test_a_rank_that_exports_anew_for_each_chunk_is_found_beside_one_that_does_not():
    other = UUID[:-1] + "1"

    def chunk(name: str, slot: int) -> dict[str, Any]:
        handle: Any = GOOD["packed"]["ipc_handles_pickled"]
        again = protocol._replace(handle[UUID], {protocol.SLOT: slot})
        info: Any = GOOD["packed"] | {"ipc_handles_pickled": {**handle, other: again}}
        return update_line(info | {"names": [name + n for n in info["names"]]})

    for slots, rules in [((7, 7), set()), ((7, 8), {("trainer", "packed.one-export")})]:
        lines = sync_of(*map(chunk, "ab", slots), packed=True)
        lines[0] = HEADER | {"uuids": [UUID, other]}
        assert {one for one in found(lines) if one[1] != "packed.chunk-full"} == rules


@both_modes
def test_a_witness_with_a_model_misses_what_a_sync_left_out(inside, packed):
    one, weights = inside("--model", "trainer:ByteLM"), trainer.ByteLM().state_dict()
    client = trainer.HTTPWeightSyncClient(one.url)
    client.init_weight_transfer_engine({"packed": packed})
    send = trainer.send_weights_packed if packed else trainer.send_weights
    first, *others = weights
    send(client, {name: weights[name] for name in others}, device="cpu:0")
    send(client, weights, device="cpu:0")
    send(client, {}, device="cpu:0")
    [finding] = protocol.check(read(one.path))
    assert (finding.rule.id, finding.at) == ("weights.complete", 5)
    assert finding.seen == f"1 of {len(weights)} were not sent, {first} first"


# --- Correct trainers ---------------------------------------------------------------------------------

DTYPES = list(dict.fromkeys(ipc_codec.DTYPES.values()))


class Correct:
    """Does everything that a trainer may do, at random; the right bytes are there after each sync."""

    def __init__(self, t: Trainer, seed: int) -> None:
        self.t, self.rng = t, random.Random(seed)
        self.packed: bool | None = None  # as the last init left it
        self.held: dict[str, torch.Tensor] = {}  # by name, on every worker
        self.buffers: list[Any] = []
        self.client = trainer.HTTPWeightSyncClient(t.url)
        self.log: list[str] = []

    def tensor(self, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        """Noise of that shape: contiguous, a slice, a stepped slice or a transposed tensor."""
        seed = self.rng.randrange(1 << 30)
        form = self.rng.choice(["plain", "slice", "step", "transpose"])
        if form == "transpose" and len(shape) > 1:
            return noise(dtype, *shape[::-1], seed=seed).permute(*range(len(shape))[::-1])
        if form in ("slice", "step") and shape:
            step = 2 if form == "step" else 1
            return noise(dtype, 1 + step * shape[0], *shape[1:], seed=seed)[1::step][: shape[0]]
        return noise(dtype, *shape, seed=seed)

    def fresh(self) -> dict[str, torch.Tensor]:
        """A few weights under new names: scalars, empties and tied pairs among them."""
        rng, start = self.rng, len(self.held)
        weights = {}
        for at in range(rng.randint(1, 8)):
            shape = [rng.choice([0, 1, 2, 3, 5]) for _ in range(rng.randrange(4))]
            weights[f"w{start + at}"] = self.tensor(shape, rng.choice(DTYPES))
        if rng.random() < 0.5:
            weights[f"tied{start}"] = rng.choice(list(weights.values()))
        return weights

    def weights(self) -> dict[str, torch.Tensor]:
        """New names, or some of the old ones with new bytes."""
        if not self.held or self.rng.random() < 0.5:
            weights = self.fresh()
        else:
            names = self.rng.sample(list(self.held), self.rng.randint(1, len(self.held)))
            weights = {n: self.tensor(list(self.held[n].shape), self.held[n].dtype) for n in names}
        return self.t.put(weights)

    def pause(self) -> None:
        time.sleep(self.rng.choice([0, 0, 0.001, 0.004]))

    def init(self, packed: bool) -> None:
        if packed != self.packed or self.rng.random() < 0.3:
            ok(self.t.init(packed))
        self.packed = packed

    def version(self) -> dict[str, str]:
        return self.rng.choice([{}, {"weight_version": f"v{self.rng.random()}"}, {"weight_version": ""}])

    def sync(self) -> None:
        ways = [self.unpacked, self.in_chunks, self.rank_local]
        ways += [self.trainers, self.trainers] if len(self.t.devices) == 1 else []
        way = self.rng.choice(ways)
        weights = self.weights()
        self.log.append(f"{way.__name__} { ({n: (w.dtype, list(w.shape)) for n, w in weights.items()}) }")
        way(weights)
        self.held |= weights
        told = digests(self.held)
        for worker in range(len(self.t.devices)):
            there = self.t.checksums(f"dp0:pp0:pcp0:tp{worker}")
            assert {name: there[name] for name in told} == told
        self.t.give_up()

    def unpacked(self, weights: dict[str, torch.Tensor]) -> None:
        self.init(False)
        ok(self.t.post(START))
        form = self.rng.choice([ipc_codec.wire_form, torch.Tensor.detach])
        for chunk in split(weights, self.rng.randint(1, 4)):  # some of them are empty
            self.pause()
            null = self.rng.choice([{}, {"tensor_sizes": None}])
            ok(self.t.update(self.t.unpacked(chunk, form) | null))
        self.pause()
        ok(self.t.finish(**self.version()))

    def in_chunks(self, weights: dict[str, torch.Tensor]) -> None:
        """Packed, with the wide dtypes first: all are aligned."""
        self.init(True)
        weights = dict(sorted(weights.items(), key=lambda item: -item[1].dtype.itemsize))
        sizes = {name: weight.nbytes for name, weight in weights.items()}
        if not self.buffers or max(sizes.values()) > self.buffers[0].capacity_bytes:
            room = self.rng.choice([max(sizes.values()), sum(sizes.values()), 2 * sum(sizes.values())])
            self.buffers, handles = self.t.buffers(room)
        else:
            handles = {}
            for buffer in self.buffers:
                handles |= self.t.lending(buffer.export())
        ok(self.t.post(START))
        for names in protocol.plan_chunks(sizes, self.buffers[0].capacity_bytes):
            chunk = {name: weights[name] for name in names}
            ok(self.t.update(self.t.packed(chunk, self.buffers, handles)))
            overwrite(self.buffers)
            self.pause()
        if self.rng.random() < 0.2:
            ok(self.t.update(self.t.packed({}, self.buffers, handles)))
        ok(self.t.finish(**self.version()))

    def rank_local(self, weights: dict[str, torch.Tensor]) -> None:
        """A list with an entry a worker, each with handles for that worker alone; one too many at times."""
        self.init(False)
        ok(self.t.post(START))
        for chunk in split(weights, 2):
            info = self.t.unpacked(chunk)
            handles = info["ipc_handles_pickled"]
            uuids = [ipc_codec.gpu_uuid(device) for device in self.t.devices]
            mine = [[{uuid: handle[uuid]} for handle in handles] for uuid in uuids]
            ok(
                self.t.update(
                    [info | {"ipc_handles_pickled": own} for own in mine + self.rng.choice([[], [[]]])]
                )
            )
        ok(self.t.finish(**self.version()))

    def trainers(self, weights: dict[str, torch.Tensor]) -> None:
        """trainer.py's own, either mode."""
        named = {self.t.prefix + name: weight for name, weight in weights.items()}
        more: dict[str, Any] = {"device": self.t.devices[0], **self.version()}
        if self.rng.random() < 0.5:
            self.init(False)
            trainer.send_weights(self.client, named, **more)
        else:
            self.init(True)
            named = dict(sorted(named.items(), key=lambda item: -item[1].dtype.itemsize))
            largest = max(1, *(weight.nbytes for weight in named.values()), 0)
            room = self.rng.choice([largest, 2 * largest, 1 << 30])
            trainer.send_weights_packed(self.client, named, room, **more)


def run_correct(witness: Witness, seed: int) -> None:
    with visit(witness) as t:
        correct = Correct(t, seed)
        for _ in range(correct.rng.randint(2, 4)):
            correct.sync()
        assert protocol.check(t.transcript()) == [], correct.log


@kinds
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_a_correct_trainer_is_accused_of_nothing(witness_of, kind, workers, seed):
    run_correct(witness_of(kind, workers), seed)


@pytest.mark.long
@kinds
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("seed", range(100, 200))
def test_correct_trainers_are_accused_of_nothing(witness_of, kind, workers, seed):
    run_correct(witness_of(kind, workers), seed)


@pytest.mark.long
@kinds
@both_modes
@pytest.mark.parametrize("seed", range(100))
def test_the_example_trainer_is_accused_of_nothing(witness_of, kind, packed, seed):
    """ByteLM, tied names and a buffer included; buffers from the largest tensor to all of them."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    with visit(witness_of(kind)) as t:
        weights = t.put(trainer.ByteLM(width=16).state_dict())
        named = {t.prefix + name: weight for name, weight in weights.items()}
        client = trainer.HTTPWeightSyncClient(t.url)
        client.init_weight_transfer_engine({"packed": packed})
        for _ in range(2):
            room = rng.randint(max(weight.nbytes for weight in named.values()), nbytes(named) + 100)
            if packed:
                trainer.send_weights_packed(client, named, room, device=t.devices[0])
            else:
                trainer.send_weights(client, named, device=t.devices[0])
        assert protocol.check(t.transcript()) == []


@both_modes
def test_a_refusal_that_was_settled_is_the_only_finding(witness_of, packed):
    with visit(witness_of("cpu")) as t:
        t.sync(pair(), packed)
        t.begin(packed)
        refused(t.update(t.info({"a": noise(torch.float32, 4)}, packed)))
        t.give_up()
        t.sync(pair(1), packed)
        assert t.checksums() == digests(pair(1))
        (finding,) = protocol.check(t.transcript())
        assert (finding.party, finding.rule.id) == ("trainer", "weights.fit")


@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
def test_the_trainers_next_sync_after_a_refusal_is_accused_of_nothing(witness_of, packed):
    """It exports before it starts, as it may: what it settled is settled."""
    with visit(witness_of("cpu")) as t:
        client = trainer.HTTPWeightSyncClient(t.url)
        client.init_weight_transfer_engine({"packed": packed})

        def send(weight: torch.Tensor) -> None:
            weights = {t.prefix + "a": weight}
            if packed:
                trainer.send_weights_packed(client, weights, device="cpu:0")
            else:
                trainer.send_weights(client, weights, device="cpu:0")

        send(torch.ones(2))
        with pytest.raises(trainer.SyncError, match="the server holds"):
            send(torch.ones(3))
        send(torch.ones(2))
        assert t.found() == {("trainer", "weights.fit")}


@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
def test_an_update_without_tensors_is_a_no_op(witness_of, packed):
    with visit(witness_of("cpu")) as t:
        t.begin(packed)
        if packed:
            buffers, handles = t.buffers(64)
            for weights in ({}, several(1, 4)):
                ok(t.update(t.packed(weights, buffers, handles)))
        else:
            for weights in ({}, several(1, 4)):
                ok(t.update(t.unpacked(weights)))
        ok(t.finish())
        assert t.found() == set()


@both_modes
def test_a_stepped_slice_of_one_element_is_sent(witness_of, packed):
    with visit(witness_of("cpu")) as t:
        t.begin(packed)
        weight = torch.arange(2.0)[::2]
        ok(t.update(t.packed({"a": weight}) if packed else t.unpacked({"a": weight}, torch.Tensor.detach)))
        ok(t.finish())
        assert t.found() == set()


def test_rank_local_chunks_close_together(witness_of):
    with visit(witness_of("cpu", 2)) as t:
        t.begin(packed=True)
        buffers, _ = t.buffers(64)
        handles = [t.lending(buffer.export()) for buffer in buffers]
        for at in range(2):
            mine = [{f"full{at}": torch.ones(16)}, {f"small{at}": torch.ones(2)}]
            entries = zip(mine, buffers, handles, strict=True)
            ok(t.update([t.packed(weights, [buffer], handle) for weights, buffer, handle in entries]))
        ok(t.finish())
        assert t.found() == set()


def test_an_init_in_mid_sync_flips_the_mode(witness_of):
    with visit(witness_of("cpu")) as t:
        t.begin()
        ok(t.update(t.unpacked({"a": torch.ones(2)})))
        ok(t.init(packed=True))
        buffers, handles = t.buffers(64)
        ok(t.update(t.packed({"b": torch.ones(2)}, buffers, handles)))
        ok(t.finish())
        assert t.found() == set()


def test_a_slow_server_accuses_nobody(witness_of):
    with visit(witness_of("cpu", 2, slow=True)) as t:
        t.sync(pair())
        t.sync(several(2, 4), packed=True, chunks=1)
        assert t.found() == set()


def test_two_trainers_in_turn_are_accused_of_nothing(witness_of):
    with visit(witness_of("cpu")) as t, contextlib.closing(Trainer(t.witness).http):
        for _ in range(2):
            for one in (t, Trainer(t.witness)):
                one.sync(pair())
                one.sync(pair(), packed=True)
                one.give_up()
        assert t.found() == set()


@needs_cuda
@both_modes
@pytest.mark.parametrize("ours", [False, True], ids=["vllm's client", "our client"])
def test_vllms_own_trainer_is_accused_of_nothing(witness_of, monkeypatch, packed, ours):
    ipc_engine = pytest.importorskip("vllm.distributed.weight_transfer.ipc_engine")
    from vllm.distributed import weight_transfer

    monkeypatch.setenv(protocol.GATE, "1")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).cuda()
    with visit(witness_of("cuda")) as t:
        client = (trainer.HTTPWeightSyncClient if ours else weight_transfer.HTTPVLLMWeightSyncClient)(t.url)
        room = {"packed_buffer_size_bytes": 1 << 20} if packed else {}
        engine = weight_transfer.WeightTransferTrainerFactory.trainer_init(
            init_info=ipc_engine.IPCTrainerInitInfo(rank=0, packed=packed, **room),
            client=client,
            source=weight_transfer.ModuleSource(model),
        )
        for _ in range(2):
            engine.send_weights()
        assert protocol.check(t.transcript()) == []
        t.prefix = ""
        assert digests(model.state_dict()).items() <= t.checksums().items()


# --- Transcripts --------------------------------------------------------------------------------------


def clean_syncs(url: str) -> None:
    """What transcripts/clean.jsonl has: three tensors, two of them tied, unpacked, then in three chunks."""
    client = trainer.HTTPWeightSyncClient(url)
    embed, bias = torch.arange(6.0).reshape(2, 3), torch.ones(5, dtype=torch.bfloat16)
    weights = {"embed.weight": embed, "head.weight": embed, "head.bias": bias}
    client.init_weight_transfer_engine({"packed": False})
    trainer.send_weights(client, weights, device="cpu:0", weight_version="step 1")
    client.init_weight_transfer_engine({"packed": True})
    trainer.send_weights_packed(client, weights, 24, device="cpu:0", weight_version="step 2")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


CLEAN = TRANSCRIPTS / "clean.jsonl"
HELD = "0.01"  # seconds
BY_HAND = TRANSCRIPTS / "by_hand.jsonl"


def test_the_clean_transcript_is_clean():
    lines = read(CLEAN)
    calls = " ".join(said["call"].split("_")[0] for said in lines[1:])
    assert calls == "init start update finish init start update update update finish"
    assert found(lines) == set()


def test_the_witness_writes_the_clean_transcript(inside):
    one = inside("--hold-seconds", HELD)
    clean_syncs(one.url)
    assert without_chance(read(one.path)) == without_chance(read(CLEAN))


def test_a_call_is_answered_where_it_cannot_be_written_down(inside, caplog):
    one = inside()
    full = open("/dev/full", "w")  # noqa: SIM115
    one.server.RequestHandlerClass.app.engine.witness.file = full
    client = trainer.HTTPWeightSyncClient(one.url, 20)
    client.init_weight_transfer_engine({"packed": False})
    client.start_weight_update()
    client.finish_weight_update("v1")
    with contextlib.suppress(OSError):
        full.close()
    assert client._request("GET", "weight_info") == {"weight_version": "v1"}
    assert caplog.text.count("was not written down: [Errno 28] No space left on device") == 3


def without_chance(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without times, and without what names files and slots of shared memory."""
    lines = copy.deepcopy(lines)
    for said in lines:
        handles = said.get("handles") or []
        for handle in handles if isinstance(handles, list) else [handles]:
            for args in handle.values():
                args[7], args[11], args[12] = len(args[7]) > 8, len(args[11]) > 8, args[12] >= 0
        said.pop("began", None), said.pop("ended", None)
    return lines


def test_a_transcript_by_hand_is_judged_alike():
    lines = read(BY_HAND)
    assert set().union(*lines[1:]) == {"call", "body", "status"} and set(lines[0]) == {
        "transcript",
        "version",
    }
    (finding,) = protocol.check(lines)
    assert (finding.at, finding.call) == (4, "update_weights")
    assert (finding.party, finding.rule.id) == ("trainer", "dtype.real")
    assert finding.seen == "'torch.bfloat16'"


def test_the_keys_that_may_be_missing():
    lines = read(CLEAN)
    for key in ("handles", "error", "began", "ended", "seen"):
        assert (
            found([lines[0], *({k: v for k, v in said.items() if k != key} for said in lines[1:])]) == set()
        )
    assert found([{k: lines[0][k] for k in ("transcript", "version")}, *lines[1:]]) == set()


def strings(value: Any) -> Iterator[str]:
    """Every string in JSON, keys included."""
    if isinstance(value, str):
        yield value
    for item in (
        value
        if isinstance(value, list)
        else itertools.chain(*value.items())
        if isinstance(value, dict)
        else ()
    ):
        yield from strings(item)


def is_pickle(text: str) -> bool:
    """Whether base64 or hex of a pickle."""
    for decode in (functools.partial(base64.b64decode, validate=True), bytes.fromhex):
        with contextlib.suppress(ValueError):
            raw = decode(text)
            if raw[:1] == b"\x80" and raw[1:2] in (b"\2", b"\3", b"\4", b"\5") and raw[-1:] == b".":
                return True
    return False


PATTERN = b"weights!"


def holds_weights(text: str) -> bool:
    forms = [
        PATTERN.decode(),
        PATTERN.hex(),
        *(base64.b64encode(b"?" * at + PATTERN * 3).decode()[4:20] for at in range(3)),
    ]
    return any(form in text for form in forms)


@both_modes
@pytest.mark.parametrize("workers", [1, 2])
def test_a_transcript_holds_no_pickle_and_no_weight_bytes(witness_of, packed, workers):
    weight = torch.tensor(list(PATTERN * 64), dtype=torch.uint8)
    assert holds_weights((PATTERN * 64).hex()) and is_pickle(ipc_codec.encode_handles([]))
    with visit(witness_of("cpu", workers)) as t:
        t.sync({"a": weight}, packed)
        t.begin(packed)
        info = t.encoded(t.info({"b": weight}, packed))
        ok(t.update([info] * workers))
        ok(t.finish())
        text = t.witness.path.read_text()[t.began :]
        assert not any(map(is_pickle, strings(t.transcript())))
        assert info["ipc_handles_pickled"][:40] not in text
        assert not holds_weights(text) and str(list(PATTERN))[1:-1].replace(" ", "") not in text


WRONG_PLACES: dict[str, Callable[[str], dict[str, Any]]] = {
    "ipc_handles": lambda text: {"ipc_handles": text, "ipc_handles_pickled": None},
    "in a list": lambda text: {"ipc_handles_pickled": [text]},
    "another field": lambda text: {"handles": text},
    "tensor_sizes": lambda text: {"tensor_sizes": text},
}


@pytest.mark.parametrize("place", WRONG_PLACES)
def test_a_pickle_in_a_wrong_place_is_not_written_down(witness_of, place):
    with visit(witness_of("cpu")) as t:
        t.begin()
        info = t.encoded(t.unpacked(pair()))
        t.send(
            "POST",
            UPDATE,
            json.dumps({"update_info": info | WRONG_PLACES[place](info["ipc_handles_pickled"])}),
            JSON,
        )
        t.settle()
        assert not any(map(is_pickle, strings(t.transcript())))


# --- What check bears ---------------------------------------------------------------------------------

JUNK: list[Any] = [
    None,
    0,
    -1,
    1.5,
    1 << 70,
    True,
    "",
    "x",
    "\ud800",
    [],
    {},
    [[]],
    [None],
    [{}],
    {"a": 1},
    [1, 2],
]
JUNK += [
    [[1] * 70],
    {"undecodable": 3},
    [["x"]],
    [{UUID: [0] * 15}],
    {UUID: [None] * 15},
    200,
    500,
    "update_weights",
]
JUNK += [float("nan"), float("inf"), [{"workers": [5]}], {"workers": [{"arrival": [1], "reply": [None, 2]}]}]


def mutated(rng: random.Random, lines: list[Any]) -> list[Any]:
    """The lines with one value replaced or left out, somewhere; or a line twice, or none of it."""
    lines = copy.deepcopy(lines)
    at = rng.randrange(len(lines))
    if rng.random() < 0.1:
        lines[at : at + 1] = rng.choice([[], [lines[at]] * 2])
        return lines
    place: Any = lines[at]
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        key = rng.choice(keys)
        inner = place[key]
        if not isinstance(inner, (dict, list)) or not inner or rng.random() < 0.25:
            break
        place = inner
    if rng.random() < 0.2:
        del place[key]
    else:
        place[key] = copy.deepcopy(rng.choice(JUNK))
    return lines


def judged(lines: Any) -> bool:
    """Whether check judges them; a ValueError says that it does not."""
    try:
        assert all(
            isinstance(finding, protocol.Finding) and str(finding) for finding in protocol.check(lines)
        )
    except ValueError:
        return False
    return True


def full_transcript() -> list[dict[str, Any]]:
    """The clean one, and an update of two workers by a rank-local list."""
    good = GOOD["unpacked"]
    entry = good | {"ipc_handles_pickled": ""}
    both: dict[str, Any] = {"handles": [good["ipc_handles_pickled"]] * 2}
    both["seen"] = seen(SEEN_AT_UPDATE, SEEN_AT_UPDATE)
    update = line("update_weights", {"update_info": [entry, entry]}, **both)
    lines = read(CLEAN)
    return [lines[0] | {"uuids": [UUID, UUID]}, *lines[1:], START_LINE, init_line(), update, FINISH_LINE]


@pytest.mark.parametrize("seed", range(6))
def test_check_raises_nothing_but_valueerror(seed):
    rng = random.Random(seed)
    lines = full_transcript()
    outcomes = set()
    for _ in range(150):
        changed = mutated(rng, lines)
        for _ in range(rng.randrange(3)):
            changed = mutated(rng, changed) if len(changed) > 1 else changed
        outcomes.add(judged(changed))
        judged(json.loads(json.dumps(changed)))
    assert outcomes == {True, False}


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: dict[str, Any] = {
    "no lines": [],
    "a header that is a list": [[]],
    "a header that is null": [None],
    "a line that is a list": [HEADER, [1]],
    "a line that is a string": [HEADER, "update_weights"],
    "times beyond any float": [HEADER, init_line(began=-(10**400), ended=1.5)],
    "an error nested deeply": [HEADER, init_line(status=500, error=nested(2000))],
    "evidence nested deeply": sync_of(update_line(GOOD["unpacked"], seen=seen({"misfit": nested(2000)}))),
    "a shape beyond any memory": sync_of(
        update_line(GOOD["packed"] | {"shapes": [[10**4000] * 64, [3]]}), packed=True
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_check_bears_what_json_can_hold(name):
    judged(HOSTILE[name])


def test_a_handle_of_many_dimensions_is_judged_at_once():
    info: Any = copy.deepcopy(GOOD["unpacked"])
    args = info["ipc_handles_pickled"][0][UUID]
    args[1] = args[2] = [1 << 62] * 800
    began = time.process_time()
    found(sync_of(update_line(info)))
    assert time.process_time() - began < 0.1


def big_transcript(count: int) -> list[dict[str, Any]]:
    """One sync of that many updates, each of one tensor, with all that a witness sees."""
    good: Any = GOOD["unpacked"]
    first = good["ipc_handles_pickled"][0][UUID]
    lines = [HEADER, init_line(), START_LINE | {"seen": seen({"left": []})}]
    for at in range(count):
        args = [*first[:7], f"{at:0132x}", *first[8:12], at % 10_000, *first[13:]]
        columns = {"names": [f"layers.{at}.weight"], "dtype_names": ["float32"], "shapes": [[2, 2]]}
        at_update = {"arrival": [at], "before": [1], "unopened": "", "misfit": "", "reply": [at]}
        info = columns | {"ipc_handles_pickled": [{UUID: args}], "tensor_sizes": None}
        lines.append(update_line(info, error=None, began=at, ended=at + 0.5, seen=seen(at_update)))
    whole: dict[str, Any] = {"reply": list(range(count)), "finish": list(range(count))}
    whole |= {"names": [f"layers.{at}.weight" for at in range(count)]}
    return [*lines, FINISH_LINE | {"seen": seen(whole | {"held": [1] * count, "after": [0] * count})}]


@pytest.mark.long
def test_ten_thousand_exchanges_are_judged_in_under_two_seconds(tmp_path):
    lines = big_transcript(10_000)
    path = tmp_path / "big.jsonl"
    path.write_text("".join(json.dumps(said) + "\n" for said in lines))
    began = time.process_time()
    assert protocol.check(lines) == []
    checked = time.process_time()
    assert protocol.verdict(str(path), out=lambda text: None) == 0
    read_and_checked = time.process_time()
    print(f"10,000 exchanges: {checked - began:.2f} s, read from a file {read_and_checked - checked:.2f} s")
    assert checked - began < 2 and read_and_checked - checked < 2


# --- The verdict --------------------------------------------------------------------------------------


def exercised(lines: list[Any]) -> set[str]:
    rules: set[str] = set()
    protocol.check(lines, rules)
    return rules


def test_what_a_clean_transcript_exercises():
    rules = exercised(read(CLEAN))
    assert {
        "loan.until-reply",
        "loan.until-finish",
        "export.fresh",
        "export.kept",
        "export.released",
    } <= rules
    assert {"packed.chunk-full", "unpacked.tied-in-pairs", "sync.finished", "call.one-in-flight"} <= rules
    assert {"start.one-at-a-time", "update.after-start", "finish.after-start", "init.first"} <= rules
    assert rules.isdisjoint({"draft.none", "shutdown.between-updates", "refusal.explained"})


def test_a_mode_that_was_not_used_is_not_exercised():
    rules = exercised(sync_of(update_line(GOOD["unpacked"])))
    assert not any(rule.startswith("packed.") for rule in rules)
    rules = exercised(sync_of(update_line(GOOD["packed"]), packed=True))
    assert not any(rule.startswith("unpacked.") for rule in rules)


NOT_EXERCISED: dict[str, tuple[list[dict[str, Any]], set[str]]] = {
    "without handles nothing is known of them": (
        read(BY_HAND) if BY_HAND.exists() else [],
        {r.id for r in RULES.values() if r.id.startswith("handle.")}
        | {"handles.form", "unpacked.own-export"},
    ),
    "one worker differs from none": (witnessed({}, {}), {"workers.same-bytes"}),
    "updates were answered at once": (
        [HEADER | {"hold_seconds": 0.0}, *witnessed({}, {})[1:]],
        {"loan.until-reply"},
    ),
    "a sync of which nobody knows whether it was finished": (
        [
            *sync_of(update_line(GOOD["unpacked"])),
            START_LINE,
            update_line(GOOD["unpacked"], 504, error="gone"),
        ],
        {"sync.finished"},
    ),
    "a sync that the next trainer finished": (
        [HEADER, init_line(), START_LINE, START_LINE | {"status": 500, "error": "no"}, FINISH_LINE],
        {"sync.finished"},
    ),
    "no list is too short": (witnessed({}, {}), {"rank-local.counted"}),
    "a packed loan ends with its reply": (
        [
            *sync_of(update_line(GOOD["packed"]), packed=True)[:-1],
            FINISH_LINE | {"seen": seen({"names": ["the buffer"], "reply": [], "finish": []})},
        ],
        {"loan.until-finish"},
    ),
    "nothing was refused": (
        [
            HEADER,
            init_line(),
            START_LINE | {"seen": seen({"left": []})},
            *sync_of(update_line(GOOD["unpacked"]))[3:],
        ],
        {"export.settled"},
    ),
    "what was not looked at": (
        sync_of(line("update_weights", {"update_info": []}, 500)),
        {"update.lengths", "names.unique", "unpacked.handle-matches"},
    ),
}


@pytest.mark.parametrize("name", NOT_EXERCISED)
def test_what_could_not_be_broken_is_not_held(name):
    lines, rules = NOT_EXERCISED[name]
    assert exercised(lines).isdisjoint(rules)


def test_without_a_model_no_name_could_be_wrong(inside):
    for options, fits in [((), set()), (("--model", "trainer:ByteLM"), {"weights.fit"})]:
        one = inside(*options)
        client = trainer.HTTPWeightSyncClient(one.url)
        client.init_weight_transfer_engine({"packed": False})
        trainer.send_weights(client, trainer.ByteLM().state_dict(), device="cpu:0")
        assert exercised(read(one.path)) & {"weights.fit"} == fits


FINDING = re.compile(
    r" *(?P<at>\d+) (?P<call>\w+) +(?P<party>trainer|server|unclear) +(MUST|SHOULD) +(?P<rule>[\w.-]+): "
    r"(?P<text>.+); seen: (?P<seen>.+) \[answered (?P<status>\d+); (?P<source>.+)\]"
)
TABLE = re.compile(r" +(held|broken|not exercised) +(MUST|SHOULD) +([\w.-]+)")


def said_of(lines: list[Any], tmp_path: Path, strict: bool = False) -> tuple[list[str], int]:
    path = tmp_path / "said.jsonl"
    path.write_text("".join(json.dumps(said) + "\n" for said in lines))
    said: list[str] = []
    return said, protocol.verdict(str(path), strict, said.append)


def test_the_verdict_is_findings_a_table_and_a_sentence(tmp_path):
    said, code = said_of(sync_of(update_line(GOOD["unpacked"] | {"shapes": []})), tmp_path)
    assert code == 1
    first, second, *table, sentence = said
    for text, party in ((first, "trainer"), (second, "server")):
        finding = FINDING.fullmatch(text)
        assert finding and (finding["at"], finding["call"], finding["party"]) == (
            "4",
            "update_weights",
            party,
        )
        assert (finding["rule"], finding["text"]) == ("update.lengths", RULES["update.lengths"].text)
        assert finding["source"] == RULES["update.lengths"].source and finding["status"] == "200"
    rows = [row for row in map(TABLE.fullmatch, table) if row]
    assert [row[3] for row in rows] == list(RULES) and len(rows) == len(table)
    states = {row[3]: row[1] for row in rows}
    assert [
        states[rule] for rule in ("update.lengths", "names.unique", "packed.tensor-sizes", "draft.none")
    ] == [*("broken", "held", "not exercised", "not exercised")]
    assert all(word in sentence for word in ("4 exchanges", "line 4", "trainer broke update.lengths"))


def test_a_should_alone_does_not_count_unless_strict(tmp_path):
    lines = [HEADER, *sync_of(update_line(GOOD["unpacked"]))[2:]]
    for strict in (False, True):
        said, code = said_of(lines, tmp_path, strict)
        assert code == int(strict) and "trainer broke init.first" in said[-1]
        assert ("does not count" in said[-1]) is not strict


def test_the_first_must_is_named_before_an_earlier_should(tmp_path):
    said, _ = said_of([HEADER, *sync_of(update_line(GOOD["unpacked"] | {"shapes": []}))[2:]], tmp_path)
    assert "trainer broke update.lengths" in said[-1]


def test_a_clean_verdict_says_so(tmp_path):
    said, code = said_of(read(CLEAN), tmp_path)
    assert code == 0 and "10 exchanges, nothing found" in said[-1] and not any(map(FINDING.fullmatch, said))


def test_a_finding_is_one_line(tmp_path):
    said, _ = said_of([HEADER, init_line(status=500, error="Traceback:\n  boom\n")], tmp_path)
    assert all("\n" not in text for text in said)


def run(*command: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=ROOT,
        env=environment(True),
        **more,
    )


SHOULD_ONLY = [HEADER, *sync_of(update_line(GOOD["unpacked"]))[2:]]
FILES: dict[str, Any] = {
    "by hand": BY_HAND.read_text() if BY_HAND.exists() else "",
    "a should": "".join(json.dumps(said) + "\n" for said in SHOULD_ONLY),
    "empty": "",
    "blank": "\n\n",
    "header only": json.dumps(HEADER) + "\n",
    "no update": "".join(json.dumps(said) + "\n" for said in (HEADER, init_line(), START_LINE, FINISH_LINE)),
    "no header": json.dumps(init_line()) + "\n",
    "a list": json.dumps(HEADER) + "\n[1]\n",
    "not JSON": json.dumps(HEADER) + "\n{\n",
    "not text": b"\xff\xfe\x00",
    "nested deeply": json.dumps(HEADER) + "\n" + "[" * 100_000 + "\n",
}
EXITS = [
    ("by hand", [], 1),
    ("by hand", ["--strict"], 1),
    ("a should", [], 0),
    ("a should", ["--strict"], 1),
    *((name, [], 2) for name in ("empty", "blank", "header only", "no update", "no header")),
    *((name, [], 2) for name in ("a list", "not JSON", "not text", "missing")),
    pytest.param("nested deeply", [], 2),
]


@pytest.mark.parametrize(("name", "options", "code"), EXITS)
def test_the_exit_code_of_protocol_py(tmp_path, name, options, code):
    path = tmp_path / "said.jsonl"
    if name in FILES:
        content = FILES[name]
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    ended = run("protocol.py", *options, str(path))
    assert (ended.returncode, "Traceback" in ended.stderr) == (code, False), ended.stderr


def test_protocol_py_judges_the_clean_transcript():
    ended = run("protocol.py", "--strict", str(CLEAN))
    assert (ended.returncode, ended.stderr) == (0, "") and "nothing found" in ended.stdout


def test_an_empty_file_name_is_no_clean_verdict():
    assert run("protocol.py", "").returncode == 2


def test_findings_that_are_alike_are_counted_after_the_third(tmp_path):
    twice = [init_line(), START_LINE, START_LINE | {"status": 500, "error": "no"}, FINISH_LINE]
    for syncs, shown, more in [(3, 3, []), (8, 3, ["5 times more"])]:
        said, code = said_of([HEADER, *twice * syncs], tmp_path)
        refused = [text for text in said if "start.one-at-a-time: " in text][:-1]
        assert code == 1 and len(list(filter(FINDING.fullmatch, refused))) == shown
        assert [text.rpartition(": ")[2] for text in refused[shown:]] == more


def test_a_name_in_a_verdict_is_no_line_of_its_own(tmp_path):
    names = {"names": ["a\nnothing found \x1b[2K", "\ud800"], "tensor_sizes": [1, 1]}
    said, code = said_of(sync_of(update_line(GOOD["packed"] | names), packed=True), tmp_path)
    assert code == 1 and all(line.isprintable() for line in said)
    assert any("a\\nnothing found" in line for line in said)


def test_a_verdict_on_updates_that_were_answered_at_once_says_what_does_not_show(tmp_path):
    for seconds, says in [(0.0, True), (0.1, False)]:
        said, code = said_of([HEADER | {"hold_seconds": seconds}, *witnessed({}, {})[1:]], tmp_path)
        assert code == 0 and any("--hold-seconds 0.1" in line for line in said) == says


# --- The judge's processes ----------------------------------------------------------------------------

CALLER = """
import base64, json, pickle, sys, urllib.error, urllib.request

def post(call, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{sys.argv[1]}/{call}", data, {"Content-Type": "application/json"}, method="POST"
    )
    try:
        urllib.request.urlopen(request, timeout=30).close()
    except urllib.error.HTTPError as exc:
        exc.close()

EMPTY = {"names": [], "dtype_names": [], "shapes": []}
EMPTY["ipc_handles_pickled"] = base64.b64encode(pickle.dumps([])).decode()
"""
STARTS_TWICE = CALLER + 'for call in ("start", "start", "finish"): post(call + "_weight_update")\n'
NEVER_INITS = f"""{CALLER}
post("start_weight_update")
post("update_weights", {{"update_info": EMPTY}})
post("finish_weight_update")
"""
GIVES_UP = f"""{CALLER}
import os, threading, time
for call in ("init_weight_transfer_engine", "start_weight_update"):
    post(call, {{"init_info": {{}}}} if call.startswith("init") else None)
threading.Thread(target=post, args=["update_weights", {{"update_info": EMPTY}}], daemon=True).start()
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
"""
OVERWRITES = f"""
import sys, threading
import torch
sys.path.insert(0, {str(ROOT)!r})
import trainer

client, weights = trainer.HTTPWeightSyncClient(sys.argv[1]), {{"a": torch.ones(4096)}}
real = client.update_weights

def update(info):  # does not wait for the answer
    threading.Timer(0.05, weights["a"].zero_).start()
    real(info)

client.update_weights = update
client.init_weight_transfer_engine({{"packed": False}})
trainer.send_weights(client, weights, device="cpu:0")
"""
JUDGED: dict[str, tuple[list[str], str, int]] = {
    "clean": ([], "{python} trainer.py {url} --checkpoint {folder}/weights.pt --device cpu", 0),
    "clean, packed, strict": (
        *(["--strict"], "{python} trainer.py {url} --checkpoint {folder}/weights.pt --device cpu --packed"),
        0,
    ),
    "starts twice": ([], "{python} {folder}/starts_twice.py {url}", 1),
    "never inits": ([], "{python} {folder}/never_inits.py {url}", 0),
    "never inits, strict": (["--strict"], "{python} {folder}/never_inits.py {url}", 1),
    "overwrites": ([], "{python} {folder}/overwrites.py {url}", 1),
    "nothing": ([], "true", 2),
    "no such command": ([], "/no/such/command {url}", 2),
    "an open quote": ([], "'", 2),
}


@pytest.fixture(scope="module")
def judged_runs(request: Any, tmp_path_factory: Any) -> Iterator[dict[str, Future]]:
    """The runs of JUDGED that a selected test wants, two at a time."""
    folder = tmp_path_factory.mktemp("judged")
    torch.save({"a": torch.ones(4), "b": torch.zeros(2, 3)}, folder / "weights.pt")
    (folder / "starts_twice.py").write_text(STARTS_TWICE)
    (folder / "never_inits.py").write_text(NEVER_INITS)
    (folder / "overwrites.py").write_text(OVERWRITES)

    def judge(name: str) -> subprocess.CompletedProcess[str]:
        options, command, _code = JUDGED[name]
        command = command.replace("{python}", sys.executable).replace("{folder}", str(folder))
        transcript = str(folder / f"{name}.jsonl")
        fixed = ["--device", "cpu", "--transcript", transcript]
        return run("server.py", *fixed, *options, "--judge", command)

    names = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(judge, name) for name in JUDGED if name in names}


IN_CI = ("clean, packed, strict", "starts twice", "no such command")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in IN_CI)) for name in JUDGED]
)
def test_the_exit_code_of_the_judge(judged_runs, name):
    ended = judged_runs[name].result()
    assert ended.returncode == JUDGED[name][2], ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr


SENTENCES = {
    "starts twice": "trainer broke start.one-at-a-time",
    "clean, packed, strict": "nothing found",
    "overwrites": "trainer broke loan.until-reply",
    "nothing": "it has no exchange",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in IN_CI)) for name in SENTENCES]
)
def test_the_judge_says_what_it_found(judged_runs, name):
    *_, sentence = judged_runs[name].result().stdout.splitlines()
    assert SENTENCES[name] in sentence


def test_a_call_that_the_trainer_gave_up_is_judged_as_well(tmp_path, monkeypatch, capsys):
    """It ends when its update has been looked at; the answer would come 0.8 s later."""
    program, looked, path = tmp_path / "gives_up.py", tmp_path / "looked", tmp_path / "sync.jsonl"
    program.write_text(GIVES_UP)
    opened = server.Witness.opened
    monkeypatch.setattr(server.Witness, "opened", lambda *args: (opened(*args), looked.touch()))
    monkeypatch.setenv(protocol.GATE, "1")
    command = f"{sys.executable} {program} {{url}} {looked}"
    words = ["--port", "0", "--device", "cpu", "--hold-seconds", "0.8", "--transcript", str(path)]
    options = server.build_parser().parse_args([*words, "--judge", command])
    with server.make_server(options) as judged:
        code = server.judge(judged, f"http://127.0.0.1:{judged.server_port}", options)
    *_, last = read(path)
    assert (last["call"], last["status"], code) == ("update_weights", 200, 1)
    assert "sync.finished" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("name", ["clean, packed, strict"])
def test_the_judge_holds_updates_unless_told_otherwise(judged_runs, name):
    assert re.search(r" +held +MUST +loan\.until-reply\n", judged_runs[name].result().stdout)


if __name__ == "__main__":
    import os

    os.environ[protocol.GATE] = "1"
    with tempfile.TemporaryDirectory() as folder:
        witness = Inside(Path(folder) / "clean.jsonl", "--hold-seconds", HELD)
        clean_syncs(witness.url)
        CLEAN.write_text(witness.path.read_text())
