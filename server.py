"""The inference side of a weight sync: a stub that holds weights, and answers as vLLM 0.33.0 does.

It reads the trainer's memory through the handles that come over HTTP, so that an `update_weights` that
is answered with 200 has been read, on every device. Read one sync from the bottom up: `App.answer` takes
the request (station 7), `WeightTransferEngine.update_weights` judges it and reads the bytes (8 to 11).

    VLLM_ALLOW_INSECURE_SERIALIZATION=1 python server.py
    ... python server.py --transcript sync.jsonl        a witness: `protocol.py sync.jsonl` judges it
    ... python server.py --judge 'COMMAND {url}'        runs that trainer, and judges it: exit code 0
                                    clean, 1 findings, 2 nothing can be judged
    python server.py --forward http://vllm:8000 --transcript sync.jsonl        in between: passes every
                                    request on to a real server, and judges both sides

Without a GPU the same is played through shared memory (see `ipc_codec`). Without --model the server
takes any names; a name that it holds keeps its shape and dtype.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import ctypes
import email.errors
import gc
import http.client
import http.server
import importlib
import io
import ipaddress
import itertools
import json
import logging
import marshal
import os
import queue
import re
import reprlib
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor

import ipc_codec
import protocol
from protocol import GATE, BadRequest, InitInfo, UpdateInfo, required

PAUSE_MODES = ("abort", "wait", "keep")
IDLE_SECONDS = 5  # a kept-alive connection without a request is closed after this, as vLLM does
HEAD_SECONDS = 15  # a request's line and headers are there by then, however little comes at a time
BODY_SECONDS = 60  # a body that pauses for longer than this is given up
SLOWEST = 1 << 20  # and one that brings fewer bytes a second, after that time
MAX_CONNECTIONS = 900  # each is a thread and a descriptor, of which a process has 1,024 by default
MAX_BODY_BYTES = 1 << 30
MAX_HELD_BYTES = 4 << 30  # of all bodies at once; one alone is let in whatever --max-body-bytes lets pass
SMALL_BODY = 1 << 20  # up to this a body is not counted: MAX_CONNECTIONS of them are little
QUEUE_SECONDS = 300  # a completion that is queued by pause(keep), or a pause that waits for completions
HOLD_SECONDS = 0.1  # with --judge an update is answered so late: who does not wait is caught in the act
KNOWN_BYTES = 1 << 26  # of bodies that are remembered until the next sync
MAX_VALUES = 1 << 22  # in the JSON of a body; 20,000 tensors have 200,000
LONG_INT = re.compile(rb"[ \t\r\n:,[]-?[0-9]{19}")  # seven times as fast as one that may begin anywhere
MAX_MESSAGE = 1000  # characters: what was refused is not sent back whole, nor logged
MAX_COMPLETIONS = 600  # that run or are queued; the rest of MAX_CONNECTIONS is the trainer's
MAX_PROMPT = 1 << 20  # tokens of the prompts of all rows, where nobody knows the model's context yet
MAX_ROWS = 1024  # sequences of one completion: prompts times n
DEFAULT_MODEL = "trainer:ByteLM"  # what is served when the weights are exactly its parameters
ADDRESS = re.compile(r"(localhost|[\d.]+|\[[\da-f:.]+\])(:\d+)?")
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")

log = logging.getLogger("weight-sync")


# --- The engine: weights on devices ------------------------------------------------------------------


class Misfit(ValueError):
    """A name, dtype or shape is not the one that the server holds."""


class Opening(NamedTuple):
    """What a worker opens of an update: one export a tensor, or packed the buffer's; and in which dtypes."""

    exports: list[ipc_codec.IpcArgs]
    dtypes: list[torch.dtype]
    places: list[Tensor] = []  # packed, where they are copied to, once that is known: neighbours are one


Layout = tuple[bool, bytes] | None  # a mode, and what tells a layout from others in it


class Known(NamedTuple):
    """An update of a good sync, and what it came to. The same text means the same in the next sync."""

    update_info: Any
    updates: list[UpdateInfo]  # one a worker
    layout: Layout
    openings: list[Opening]  # one a worker


class Learned:
    """What the updates of one sync came to: by mode and text, and by mode and layout."""

    def __init__(self) -> None:
        self.texts: dict[tuple[bool, bytes], Known] = {}
        self.layouts: dict[tuple[bool, bytes], UpdateInfo] = {}
        self.room = KNOWN_BYTES

    def add(self, text: tuple[bool, bytes], known: Known) -> None:
        if known.layout:
            self.layouts[known.layout] = known.updates[0].known  # type: ignore[assignment]
        self.room -= len(text[1])
        if text[1] and self.room >= 0:
            self.texts[text] = known


class Worker:
    """One --device entry: its own copy of the weights, and its mapping of the trainer's packed buffer."""

    def __init__(self, device: torch.device, model: Callable[[], torch.nn.Module] | None = None):
        self.device = device
        self.place = ipc_codec.place(device)
        self.session = protocol.Session(uuid=ipc_codec.gpu_uuid(device))
        self.buffer = ipc_codec.PackedBufferImporter(device)
        self.weights: dict[str, Tensor] = {}
        self.places: dict[str, Tensor] = {}  # the same as integers, to copy to
        self.flat_places: dict[str, Tensor] = {}  # in one dimension
        self.takes_any_name = model is None
        self.model = None if model is None else self.make_model(model)
        if self.model is not None:
            self.hold(self.model.state_dict())

    def hold(self, weights: Mapping[str, Tensor]) -> None:
        new = {name: ipc_codec.wire_form(weight) for name, weight in weights.items()}
        places = {name: ipc_codec.words_of(weight) for name, weight in new.items()}
        self.weights |= new
        self.places |= places
        self.flat_places |= {name: place.view(-1) for name, place in places.items()}

    def make_model(self, model: Callable[[], torch.nn.Module]) -> torch.nn.Module:
        try:
            return model().requires_grad_(False).eval().to(self.place)
        except (Exception, SystemExit) as exc:
            why = _words_of(exc)
            raise ValueError(
                f"the model is no callable that gives a module without arguments: {why}"
            ) from exc

    def check(self, update: UpdateInfo) -> Opening:
        """Everything that can be said before a device is touched. Raises ValueError."""
        for name, dtype, shape in () if update.known else update.rows:
            self._check_fit(name, dtype, list(shape))
        exports = ipc_codec.check_exports(self.lent_to_me(update), self.device)
        dtypes = [ipc_codec.word_dtype(ipc_codec.parse_dtype(dtype)) for _name, dtype, _shape in update.rows]
        if not self.session.packed:
            exports = [args._replace(dtype=dtype) for args, dtype in zip(exports, dtypes, strict=True)]
        return Opening(exports, dtypes)

    def _check_fit(self, name: str, dtype: str, shape: list[int]) -> None:
        held = self.weights.get(name)
        if held is None and not self.takes_any_name:
            bare = name
            while wrapper := next((w for w in WRAPPERS if bare.startswith(w)), ""):
                bare = bare.removeprefix(wrapper)
            hint = f"; it has {bare!r}: send names without wrapper prefixes" if bare in self.weights else ""
            raise Misfit(f"the model has no parameter {name!r}{hint}")
        if held is not None and (dtype, shape) != (ipc_codec.dtype_name(held.dtype), list(held.shape)):
            holds = f"{ipc_codec.dtype_name(held.dtype)} {list(held.shape)}"
            since = " from an earlier sync (a new server has no weights)" if self.takes_any_name else ""
            raise Misfit(f"{name}: the server holds {holds}{since}, the update brings {dtype} {shape}")

    def open(self, update: UpdateInfo, opening: Opening) -> list[Tensor]:
        """Station 9: the trainer's tensors, in the order of `names`, as integers. They are its memory.

        Packed, each has one dimension.
        """
        with _on(self.device):
            if self.session.packed:
                buffer = self.buffer.open_export(*opening.exports)
                if opening.places:
                    sizes = [place.numel() for place in opening.places]
                    return list(buffer[: sum(sizes)].split(sizes))
                return ipc_codec.split(buffer, opening.dtypes, update.sizes)
            return ipc_codec.open_exports(opening.exports, self.device)

    def lent_to_me(self, update: UpdateInfo) -> list[Any]:
        """The arguments of this worker's exports: one a tensor, or packed the buffer's."""
        handles = [update.handles] if self.session.packed else update.handles
        return [handle[self.session.uuid] for handle in handles]

    def make_room(self, update: UpdateInfo) -> dict[str, Tensor]:
        """Memory for the names that are new here; nothing is held under them yet."""
        if update.known:
            return {}
        new = [
            (row, size)
            for row, size in zip(update.rows, update.sizes, strict=True)
            if row[0] not in self.weights
        ]
        starts, needed = ipc_codec.side_by_side(size for _row, size in new)
        if self.device.type == "cpu" and needed > (free := _free_memory() if new else 0):
            raise MemoryError(f"{needed:,} bytes are needed for new names, and {free:,} are there")
        memory = torch.empty(needed, dtype=torch.uint8, device=self.place)
        return {
            name: memory[start : start + size].view(ipc_codec.parse_dtype(dtype)).view(shape)
            for start, ((name, dtype, shape), size) in zip(starts, new, strict=True)
        }

    def copy(self, names: Sequence[str], weights: Sequence[Tensor], places: Sequence[Tensor] = ()) -> None:
        """Station 10: a real copy into what the server holds, queued on this thread's stream."""
        held = self.flat_places if self.session.packed else self.places
        with _on(self.device), torch.no_grad():
            ipc_codec.copy_all(places or [held[name] for name in names], weights)

    def learned(self, update: UpdateInfo, opening: Opening) -> Opening:
        """The opening, with the places; all names are held by now."""
        if not self.session.packed:
            return opening
        return opening._replace(
            places=[run for run, _ in ipc_codec.runs(self.weights[n] for n in update.names)]
        )

    def logits(self, ids: Tensor) -> Tensor:
        """The model's output for ids [batch, length]: [batch, length, vocabulary]."""
        with _on(self.device), torch.no_grad():
            assert self.model is not None, "`unservable` comes first"
            weights = dict(self.weights)
            return torch.func.functional_call(self.model, weights, (ids.to(self.place),), tie_weights=False)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _free_memory() -> int:
    """Bytes. The kernel gives out more than there is, and kills whoever then uses it."""
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))


def _handles_of(update: UpdateInfo) -> Any:
    """What the update's text holds; None where it has no text: then a rule says what is wrong."""
    if not isinstance(update.ipc_handles_pickled, str):
        return None
    if not _gate_is_open():
        seen = repr(os.environ[GATE]) if GATE in os.environ else "not set"
        raise ValueError(f"handles are pickled, and {GATE} is {seen}: start the server with {GATE}=1")
    return _decoded(update.ipc_handles_pickled)


def _gate_is_open() -> bool:
    return os.environ.get(GATE) == "1"


def _each(updates: Sequence[UpdateInfo], make: Callable[[UpdateInfo], UpdateInfo]) -> list[UpdateInfo]:
    """`make` of each, once where workers share one."""
    made = {id(update): make(update) for update in {id(update): update for update in updates}.values()}
    return [made[id(update)] for update in updates]


def _decoded(text: str) -> Any:
    try:
        return ipc_codec.decode_handles(text)
    except ipc_codec.HandleError as exc:
        return {"undecodable": str(exc)}


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class WeightTransferEngine:
    """The five calls, over all workers. Not thread-safe: `App` lets one call in at a time.

    A call that raises has changed no weight, unless a device failed in mid-copy. After a failed update
    the session is over; what earlier chunks of it brought stays, and `mixed` says so.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        model: Callable[[], torch.nn.Module] | None = None,
        strict: bool = False,
        model_name: str = DEFAULT_MODEL,
    ):
        self.model_name = model_name
        self.workers = [Worker(device, model) for device in devices]
        self.strict = strict
        self.weight_version = "default"
        self.hold_seconds = 0.0  # how long an update stays unanswered after it was read
        self.witness: Witness | None = None
        self.lost = ""  # why a device answers nothing any more
        self.wreck: BaseException | None = None  # the error that showed it; see `look_for_lost_devices`
        self.writes = 0  # how often weights were written
        self.applied: set[str] = set()  # names written by the open session
        self.torn: set[str] = set()  # names written by failed sessions, and not by a good one since
        self.awaited = False  # whether a start was refused since the last start or update: somebody waits
        self.taken_over: set[Any] = set()  # exports of a session that was closed for somebody else
        self.learned = Learned()  # from the last good sync
        self.learning = Learned()  # from the open one

    @property
    def mixed(self) -> bool:
        """Whether the weights are of no single version: from a first chunk until a good finish."""
        return bool(self.applied or self.torn)

    def look_for_lost_devices(self, exc: BaseException) -> None:
        """After an error: one that a device repeats is for good, until this process ends.

        Its frames hold the trainer's memory, and are kept: torch waits for the device where that is dropped,
        in a destructor, and an error there ends the process.
        """
        if self.lost:
            return
        try:
            for worker in self.workers:
                worker.synchronize()
        except RuntimeError as repeated:
            self.lost = f"{worker.device} is lost, and only a new server process gets it back: {repeated}"
            self.wreck = exc

    def unservable(self) -> str:
        """Why no completion can be made of these weights; empty where one can."""
        if self.lost:
            return self.lost
        if self.mixed:
            return (
                "the weights are a mix: a sync is open, has failed, or was closed for another trainer; "
                "a full sync repairs them"
            )
        worker = self.workers[0]
        if worker.model is None:
            worker.model = worker.make_model(load_callable(DEFAULT_MODEL))
        wanted = worker.model.state_dict()
        if odd := sorted(wanted.keys() ^ worker.weights.keys()):
            side = "misses" if odd[0] in wanted else "has besides"
            return (
                f"the weights are not {self.model_name}'s: the table {side} {odd[0]} and {len(odd) - 1} "
                "more; start the server with --model MODULE:CALLABLE to sample from another model, or anew "
                "to be rid of what earlier syncs brought"
            )
        for name, weight in worker.weights.items():
            if weight.shape != wanted[name].shape or weight.dtype != wanted[name].dtype:
                return f"{name} has another shape or dtype than the model's"
        return ""

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> str:
        info = InitInfo.from_json(init_info)
        messages = [info] * len(self.workers)
        with self._session("init_weight_transfer_engine", messages):
            self._judge("init_weight_transfer_engine", messages)
        return f"packed {bool(info.packed)}, "

    def start_weight_update(self) -> None:
        with self._session("start_weight_update"):
            if self.witness:
                self.witness.started()
            self._judge("start_weight_update", [None] * len(self.workers))
            self.awaited = False

    def update_weights(self, update_info: Mapping[str, Any] | Sequence[Any], body: bytes = b"") -> str:
        """One chunk. Returns when every device has read it; raises with no weight changed.

        `body`: the JSON that it came in, and nothing else with it: by that it is known in the next sync.
        """
        updates: list[UpdateInfo] = []
        text = self.workers[0].session.packed, body
        with self._session("update_weights", updates):
            known = self.learned.texts.get(text) if _gate_is_open() else None
            layout = known.layout if known else self._read(update_info, updates)
            updates += known.updates if known else []
            if self.witness:
                self.witness.decoded(update_info, updates)
            self._judge("update_weights", updates)
            self._refuse_late(updates)
            openings = self._load(updates, known)
            self.learning.add(text, known or self._known(update_info, updates, layout, openings))
            self.awaited = False
        count = len(updates[0].rows)
        return f"{count:,} tensor{'s' * (count != 1)}, {_bytes(sum(updates[0].sizes))}, "

    def _refuse_late(self, updates: Sequence[UpdateInfo]) -> None:
        """Whoever goes on with an update that was closed for another trainer would write into the other's."""
        if not self.taken_over:
            return
        lent: Iterator[tuple[str, Any]] = itertools.chain.from_iterable(update.slots for update in updates)
        late = [(label, slot) for label, slot in lent if slot in self.taken_over]
        counters = read_counters({file for _label, (_uuid, file, _at) in late})
        exports = [(label, Export(uuid, file, at, "")) for label, (uuid, file, at) in late]
        if released := [label for label, export in exports if export.counter(counters) == 0]:
            raise ValueError(
                f"{released[0]} was lent in an update that was closed for another trainer, who sends "
                "everything anew: start again, and send all"
            )

    def known_body(self, body: bytes) -> Any:
        """The parsed JSON of a body that the last good sync brought in this mode, else None."""
        known = self.learned.texts.get((self.workers[0].session.packed, body))
        return known and {"update_info": known.update_info}

    def _read(self, update_info: Mapping[str, Any] | Sequence[Any], updates: list[UpdateInfo]) -> Layout:
        """Station 8: adds each worker's update, its handles as inert values; one, where it is for all."""
        entries = protocol.worker_entries(update_info, len(self.workers))
        layout = self._layout(entries[0])
        known = self.learned.layouts.get(layout) if layout else None
        updates += _each(entries, lambda entry: replace(entry, handles=_handles_of(entry), known=known))
        return layout

    def _known(
        self, update_info: Any, updates: list[UpdateInfo], layout: Layout, openings: list[Opening]
    ) -> Known:
        def again(update: UpdateInfo) -> UpdateInfo:
            known = update.known or replace(update, ipc_handles_pickled=None, handles=None)
            return replace(update, known=known, again=True)

        each = zip(self.workers, updates, openings, strict=True)
        learned = [worker.learned(update, opening) for worker, update, opening in each]
        return Known(update_info, _each(updates, again), layout, learned)

    def _layout(self, update: UpdateInfo) -> Layout:
        """None where it cannot be told."""
        packed = self.workers[0].session.packed
        told = (update if packed else replace(update, tensor_sizes=None)).layout
        return (packed, told) if told and not update.rank_local else None

    def _load(self, updates: Sequence[UpdateInfo], known: Known | None) -> list[Opening]:
        """All workers open before any of them copies, so that a refusal comes before the first write."""
        openings, opened, rooms = self._open(updates, known)
        if self.witness:
            self.witness.opened(updates, opened)
        each = zip(self.workers, updates, rooms, opened, openings, strict=True)
        for worker, update, room, weights, opening in each:
            worker.hold(room)
            self.applied.update(update.names)
            self.writes += bool(weights)
            worker.copy(update.names, weights, opening.places)
        for worker in self.workers:
            worker.synchronize()  # station 11: the bytes have been read, on every device
        if self.hold_seconds:
            time.sleep(self.hold_seconds)
        if self.witness:
            self.witness.read()
        return openings

    def _open(self, updates: Sequence[UpdateInfo], known: Known | None) -> tuple[list[Any], ...]:
        """Every worker's view of the trainer's tensors, and memory for the names that are new."""
        each = list(zip(self.workers, updates, strict=True))
        try:
            if known:
                openings = known.openings
                for worker, opening in zip(self.workers, openings, strict=True):
                    ipc_codec.check_memory(opening.exports, worker.device)
            else:
                openings = [worker.check(update) for worker, update in each]
            opened = [w.open(u, opening) for (w, u), opening in zip(each, openings, strict=True)]
            return openings, opened, [worker.make_room(update) for worker, update in each]
        except ValueError as exc:
            if self.witness:
                self.witness.not_taken(exc)
            raise
        except (RuntimeError, MemoryError) as exc:
            raise ValueError(f"the device could not take the update: {exc}") from exc

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Ends the session: mappings are released, and the version is set if one is given."""
        with self._session("finish_weight_update"):
            if self.witness:
                self.witness.finishing(self.applied)
            self._release()
            if self.witness:
                self.witness.finished()
            if self.awaited and weight_version is None:  # closed for another trainer, and perhaps half sent
                self.taken_over.update(*(worker.session.slots for worker in self.workers))
                self.torn |= self.applied
            else:
                self.taken_over = set()
                self.torn -= self.applied
            self.applied = set()
            self.learned, self.learning = self.learning, Learned()
            if weight_version is not None:
                self.weight_version = weight_version

    def shutdown_weight_transfer_engine(self) -> None:
        with self._session("shutdown_weight_transfer_engine"):
            self._release()

    def start_draft_weight_update(self) -> None:
        """There is no draft model here; SEQUENCE refuses it in every state."""
        with self._session("start_draft_weight_update"):
            raise AssertionError("SEQUENCE let a draft update in")

    @contextlib.contextmanager
    def _session(self, call: str, messages: Sequence[Any] = ()) -> Iterator[None]:
        """Lets a call in or refuses it, and records how it ended: with `messages`, one a worker, if any."""
        nothing = [None] * len(self.workers)
        if self.lost:
            raise ValueError(self.lost)
        if refusal := self.workers[0].session.forbids(call):
            self.awaited |= call == "start_weight_update"
            raise refusal
        try:
            yield
        except BaseException as exc:
            self._settle(call, nothing, ok=False)
            self.look_for_lost_devices(exc)
            if call == "update_weights":
                self.torn |= self.applied
                self.applied = set()
                self.learning = Learned()
                if not self.lost:
                    self._release()
                    if self.witness:
                        self.witness.failed()
            raise
        self._settle(call, messages or nothing, ok=True)

    def _settle(self, call: str, messages: Sequence[Any], ok: bool) -> None:
        for worker, message in zip(self.workers, messages, strict=True):
            worker.session.settle(call, message, ok)

    def _judge(self, call: str, messages: Sequence[Any]) -> None:
        """Raises the first broken rule: MUST always, SHOULD where the server is strict."""
        for worker, message in zip(self.workers, messages, strict=True):
            for refusal in worker.session.breaking(call, message):
                if self.strict or refusal.rule.level == protocol.MUST:
                    raise refusal
                log.warning("let in against a SHOULD: %.1000s", refusal)

    def _release(self) -> None:
        for worker in self.workers:
            worker.buffer.release()


# --- The witness: a transcript ------------------------------------------------------------------------


def begin_transcript(path: str, header: Mapping[str, Any]) -> TextIO:
    """The file with its first line, open. An OSError names it."""
    file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (open as long as the server is)
    try:
        _write_line(file, header)
    except OSError as exc:
        with contextlib.suppress(OSError):
            file.close()
        raise OSError(exc.errno, exc.strerror, path) from None
    return file


def _write_line(file: TextIO, line: Mapping[str, Any]) -> None:
    file.write(json.dumps(line, separators=(",", ":")) + "\n")
    file.flush()


@dataclass
class Loan:
    """One export that a worker has opened, and holds until the finish, so that it can be looked at."""

    name: str
    args: Any
    weight: Tensor | None  # None where it is the packed buffer: its loan ends with each reply
    counted: bool  # whether its counter says something: it was 1 when it came, and it is still open
    digest: int | None = None  # at the reply


class Witness:
    """Writes what was said, and what was seen in memory and time (README, "Transcripts"): a line a call.

    With a witness an unpacked mapping is kept until the finish, as the trainer's loan allows.
    """

    def __init__(self, path: str, workers: Sequence[Worker], hold_seconds: float = 0.0):
        self.workers = workers
        self.loans: list[list[Loan]] = [[] for _ in workers]
        self.chunk: list[list[Tensor]] = []  # what the running update has opened, by worker
        self.refused: list[Any] = []  # exports of refused updates, of all workers
        self.described: tuple[Any, Any] = (None, None)  # an update, and its handles as plain values
        self._begin()
        uuids = [worker.session.uuid for worker in workers]
        told = {"digest": "ipc_codec.digests", "hold_seconds": hold_seconds, "uuids": uuids}
        self.file = begin_transcript(path, {**protocol.TRANSCRIPT, **told})

    def _begin(self) -> None:
        """Nothing is seen yet of the exchange to come."""
        self.handles: Any = None
        self.came: list[Any] = []  # exports of the running update
        self.seen: list[dict[str, Any]] = [{} for _ in self.workers]

    def write(self, call: str, body: Any, reply: Reply, began: float) -> None:
        """The line of one exchange, with what was seen since the line before."""
        error = (reply.body or {}).get("error", {}).get("message")
        line = {"call": call, "body": _without_pickles(body), "status": reply.status, "error": error}
        seen = {"handles": self.handles, "seen": {"workers": self.seen}}
        try:
            _write_line(self.file, {**line, "began": began, "ended": time.monotonic(), **seen})
        except OSError as exc:  # the call was done: it is answered all the same
            log.error("%s was not written down: %s", call, exc)
        self._begin()

    def decoded(self, update_info: Any, updates: Sequence[UpdateInfo]) -> None:
        rank_local = isinstance(update_info, list)
        said = updates if rank_local else updates[:1]
        self.came = list(_exports(update.handles for update in said if not update.undecodable))
        described = list(map(self._described, said))
        self.handles = described if rank_local else described[0]

    def _described(self, update: UpdateInfo) -> Any:
        """Its handles as plain values. One that comes again is described once."""
        if update is not self.described[0]:
            self.described = update, ipc_codec.describe_handles(update.handles)
        return self.described[1]

    def not_taken(self, exc: ValueError) -> None:
        self.seen[0]["misfit" if isinstance(exc, Misfit) else "unopened"] = str(exc)

    def opened(self, updates: Sequence[UpdateInfo], opened: list[list[Tensor]]) -> None:
        self.chunk = []
        for at, (worker, update, weights) in enumerate(zip(self.workers, updates, opened, strict=True)):
            exports = worker.lent_to_me(update)
            before = _counters(exports, self.loans[at])
            if not worker.session.packed:
                loans = zip(update.names, exports, weights, [count == 1 for count in before], strict=True)
                self.loans[at] += [Loan(*loan) for loan in loans]
            else:
                # The slices themselves: an unaligned one was copied.
                buffer = worker.buffer.open(update.handles)
                weights = list(buffer[: sum(update.sizes)].split(update.sizes)) if update.sizes else []
                self._lend_buffer(self.loans[at], exports[0], before[0] == 1)
            self.chunk.append(weights)
            self.seen[at] |= {"arrival": ipc_codec.digests(weights), "before": before, "unopened": ""}
            self.seen[at] |= {} if worker.takes_any_name else {"misfit": ""}

    @staticmethod
    def _lend_buffer(loans: list[Loan], args: Any, counted: bool) -> None:
        if args not in [loan.args for loan in loans]:
            for loan in loans:
                loan.counted &= loan.weight is not None  # the mapping of an older buffer was released
            loans.append(Loan("the buffer", args, None, counted))

    def read(self) -> None:
        for at, weights in enumerate(self.chunk):
            self.seen[at]["reply"] = digests = ipc_codec.digests(weights)
            if not self.workers[at].session.packed and weights:
                for loan, digest in zip(self.loans[at][-len(weights) :], digests, strict=True):
                    loan.digest = digest
        self.chunk = []

    def finishing(self, named: Collection[str]) -> None:
        """Before the release. `named`: what the open session has sent, on all workers."""
        for at, loans in enumerate(self.loans):
            slots = [(loan.args[protocol.COUNTER], loan.args[protocol.SLOT]) for loan in loans]
            uses = Counter(slots)  # an export that is used twice is released twice
            counted = [loan.counted and uses[slot] == 1 for loan, slot in zip(loans, slots, strict=True)]
            counters = _counters([loan.args for loan in loans], [])
            digests = iter(ipc_codec.digests(loan.weight for loan in loans if loan.weight is not None))
            self.seen[at] |= {
                "names": [loan.name for loan in loans],
                "reply": [loan.digest for loan in loans],
                "finish": [None if loan.weight is None else next(digests) for loan in loans],
                "held": [n if known else None for n, known in zip(counters, counted, strict=True)],
            }
        if named and not self.workers[0].takes_any_name:
            held = self.workers[0].weights
            missing = [name for name in held if name not in named]
            seen = f"{len(missing)} of {len(held)} were not sent, {missing[0]} first" if missing else ""
            self.seen[0]["missing"] = seen

    def finished(self) -> None:
        for at, loans in enumerate(self.loans):
            exports = [loan.args for loan in loans]
            loans.clear()
            self.seen[at]["after"] = ipc_codec.ref_counts(exports)

    def failed(self) -> None:
        """The session is over: nothing is kept that a failed update, or a chunk before it, has opened."""
        self.chunk = []
        self.refused, self.came = self.came, []
        for loans in self.loans:
            loans.clear()

    def started(self) -> None:
        self.seen[0]["left"] = list(map(_left, self.refused))
        self.refused = []


def _exports(handles: Iterable[Any]) -> Iterator[Any]:
    """The arguments of every export in decoded handles, whatever is wrong with them."""
    for found in handles:
        for handle in found if isinstance(found, list) else [found]:
            for args in handle.values() if isinstance(handle, dict) else ():
                yield args[1] if isinstance(args, tuple) and len(args) == 2 else args


def _left(args: Any) -> int | None:
    try:
        return ipc_codec.ref_count(args)
    except ipc_codec.HandleError:
        return None  # the arguments name no counter


def _counters(exports: Sequence[Any], loans: Sequence[Loan]) -> list[int | None]:
    """Reference counters; None where the storage is open already: then torch releases the export at once."""
    storages = {_storage(loan.args) for loan in loans}
    counts: list[int | None] = []
    for args, count in zip(exports, ipc_codec.ref_counts(exports), strict=True):
        storage = _storage(args)
        counts.append(None if storage in storages else count)
        storages.add(storage)
    return counts


def _storage(args: Any) -> tuple[Any, Any]:
    named = ipc_codec.IpcArgs(*args)
    return named.storage_handle, named.storage_offset_bytes


def _without_pickles(value: Any, key: str = "", levels: int = 20) -> Any:
    """The body as it goes into the transcript: of a handles' text only what is outside base64's alphabet.

    So with any long text, wherever it is: it may be one in a wrong place. No call has more than six levels.
    """
    if not levels:
        return "(nested too deeply)"
    if isinstance(value, dict):
        return {name: _without_pickles(item, name, levels - 1) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_pickles(item, key, levels - 1) for item in value]
    long = len(value) > 80 and key not in ("names", "dtype_names") if isinstance(value, str) else False
    if long or (isinstance(value, str) and key == "ipc_handles_pickled"):
        return "".join(protocol.NOT_BASE64.findall(value)[:80])
    return value


# --- The application: routes, statuses, shapes --------------------------------------------------------


class Reply(NamedTuple):
    status: int
    body: Any = None  # None: an empty body
    headers: Mapping[str, str] = {}


class Unavailable(Exception):
    """HTTP 503: nothing is wrong with the request, and it cannot be served now."""


class App:
    """Every route of `http-behaviour`, without a socket. One lock: calls that touch weights take turns."""

    def __init__(
        self, engine: WeightTransferEngine, data_parallel_size: int = 1, max_body_bytes: int = MAX_BODY_BYTES
    ):
        self.max_body_bytes = max_body_bytes
        self.engine = engine
        self.data_parallel_size = data_parallel_size
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)  # of `paused` or `running`
        self.paused: str | None = None  # the mode, while paused
        self.running = 0  # completions
        self.places = threading.Semaphore(MAX_COMPLETIONS)  # of those, and of the queued ones

    def answer(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """Station 7. The envelope is judged first (400), then the session and the content (500)."""
        if refusal := self.refusal(method, target, headers):
            return refusal
        url = _split(target)
        handler = ROUTES[url.path][1]
        began = time.monotonic()
        request = Request(
            headers.get("content-type", ""), body, dict(urllib.parse.parse_qsl(url.query, True))
        )
        with contextlib.nullcontext() if handler in UNLOCKED else self.lock:
            reply = self._perform(handler, url.path[1:], request)
            if handler is not App.sync_call:
                return reply
            if self.engine.witness:
                self.engine.witness.write(url.path[1:], request.parsed, reply, began)
        if reply.status == 200:
            took = f"{1e3 * (time.monotonic() - began):.1f} ms"
            log.info("%s: %s%s, version %.100s", url.path[1:], request.said, took, self.engine.weight_version)
        return reply

    def refusal(self, method: str, target: str, headers: Mapping[str, str]) -> Reply | None:
        """What is answered whatever the body is: then nobody reads it."""
        wanted, handler = ROUTES.get(_split(target).path, ("", None))
        if refusal := of_a_web_page(headers):
            return refusal
        if handler is None:
            return Reply(404, {"detail": "Not Found"})
        if method != wanted:
            return Reply(405, {"detail": "Method Not Allowed"}, {"allow": wanted})
        return None

    def _perform(self, handler: Handler, call: str, request: Request) -> Reply:
        """The handler's reply, or the one that vLLM gives to what it raises."""
        try:
            return handler(self, call, request)
        except UnicodeDecodeError:
            return Reply(400, {"detail": "There was an error parsing the body"})
        except Unavailable as exc:
            return _error(503, "ServiceUnavailableError", str(exc), None)
        except BadRequest as exc:
            kind = "Bad Request" if exc.param else "BadRequestError"
            log.warning("%s refused, 400: %.1000s", call, exc)
            return _error(400, kind, str(exc), exc.param)
        except Exception as exc:
            self.engine.look_for_lost_devices(exc)
            # An unexpected error is ours: it gets its traceback, in the log only.
            expected = isinstance(exc, (ValueError, MemoryError))
            log.error("%s refused, 500: %.1000s", call, exc, exc_info=not expected)
            return _error(500, "InternalServerError", str(exc) or type(exc).__name__, None)

    # Handlers: (call, request) -> Reply

    def sync_call(self, call: str, request: Request) -> Reply:
        reads_body = call in ("init_weight_transfer_engine", "update_weights", "finish_weight_update")
        known = self.engine.known_body(request.body) if call == "update_weights" else None
        given = protocol.read_envelope(call, request.json(known) if reads_body else None)
        words = [given] if reads_body else []
        if call == "update_weights" and list(request.parsed) == ["update_info"]:
            words.append(request.body)
        request.said = getattr(self.engine, call)(*words) or ""
        return Reply(200, {"message": protocol.SAID[call]})

    def pause(self, call: str, request: Request) -> Reply:
        mode = request.query.get("mode", "abort")
        if mode not in PAUSE_MODES:
            seen = reprlib.repr(mode)
            raise BadRequest(f"mode is one of {', '.join(PAUSE_MODES)}, not {seen}", "query.mode")
        self.paused = mode
        self.changed.notify_all()
        if mode != "keep":  # answered when no completion runs: aborted, or at its end
            self.changed.wait_for(lambda: not self.running or self.paused != mode, QUEUE_SECONDS)
        return Reply(200, {"status": "paused"})

    def resume(self, call: str, request: Request) -> Reply:
        self.paused = None
        self.changed.notify_all()
        return Reply(200, {"status": "resumed"})

    def is_paused(self, call: str, request: Request) -> Reply:
        return Reply(200, {"is_paused": self.paused is not None})

    def get_world_size(self, call: str, request: Request) -> Reply:
        words = dict.fromkeys(("true", "1", "yes", "on", "t", "y"), True)
        words |= dict.fromkeys(("false", "0", "no", "off", "f", "n"), False)  # as pydantic reads them
        include_dp = words.get(given := request.query.get("include_dp", "true").lower())
        if include_dp is None:
            raise BadRequest(f"include_dp is true or false, not {reprlib.repr(given)}", "query.include_dp")
        workers = len(self.engine.workers)
        return Reply(200, {"world_size": workers if include_dp else workers // self.data_parallel_size})

    def update_weight_version(self, call: str, request: Request) -> Reply:
        self.engine.weight_version = required(request.json(), "new_version", str)
        return Reply(200, {"success": True, "new_version": self.engine.weight_version})

    def weight_info(self, call: str, request: Request) -> Reply:
        return Reply(200, {"weight_version": self.engine.weight_version})

    def weight_checker(self, call: str, request: Request) -> Reply:
        body = request.json()
        action = required(body, "action", str)
        if action == "checksum":
            return Reply(200, {"checksums": self._checksums()})
        if action == "compare":
            baseline = required(body, "baseline", dict)
            now = self._checksums()
            differ = {key for key in baseline.keys() | now.keys() if baseline.get(key) != now.get(key)}
            return Reply(200, {"match": not differ, "mismatches": sorted(differ)})
        if action == "reset":
            for worker in self.engine.workers:
                for weight in worker.weights.values():
                    weight.view(-1).view(torch.uint8).zero_()
            self.engine.writes += 1
            return Reply(200, {"status": "reset"})
        raise BadRequest(f"action is checksum, compare or reset, not {reprlib.repr(action)}", "body.action")

    def completions(self, call: str, request: Request) -> Reply:
        asked = Asked.from_json(request.json(), self.engine.model_name)
        if not self.places.acquire(blocking=False):  # not by the lock: an update may have it
            raise Unavailable(f"{MAX_COMPLETIONS} completions run or are queued; try again")
        try:
            return self._complete(asked)
        finally:
            self.places.release()

    def _complete(self, asked: Asked) -> Reply:
        with self.changed:
            self._await_resume()
            if self.paused is not None:
                raise Unavailable(f"paused ({self.paused}); POST /resume ends it")
            self._check_servable()
            if context := getattr(self.engine.workers[0].model, "context", None):
                asked.check_length(context)
            self.running += 1
            served = self.engine.writes, self.engine.weight_version
        try:
            return Reply(200, asked.reply(*self._generate(asked, served)))
        finally:
            with self.changed:
                self.running -= 1
                self.changed.notify_all()

    def _generate(self, asked: Asked, served: tuple[int, str]) -> tuple[list[Row], str, str]:
        """Rows, finish reason, weight version. The lock is free between two tokens: a pause can come in."""
        rows = [Row(list(prompt)) for prompt in asked.prompts for _ in range(asked.n)]
        generator = torch.Generator()
        generator.manual_seed(asked.seed) if asked.seed is not None else generator.seed()
        for _ in range(asked.max_tokens):
            with self.changed:
                if self.paused == "keep":
                    self._await_resume()
                    self._check_servable()
                    served = self.engine.writes, self.engine.weight_version  # goes on with those of now
                if self.paused == "abort":
                    return rows, "abort", served[1]
                if self.engine.writes != served[0]:
                    raise Unavailable("the weights changed under the completion; pause before a sync")
                logits = _next_logits(self.engine.workers[0], rows).float().cpu()
            if not logits.isfinite().all():
                raise Unavailable("the weights give logits that are no finite numbers")
            for row, token, logprob in zip(rows, *_sample(logits, asked.temperature, generator), strict=True):
                row.tokens.append(token)
                row.logprobs.append(logprob)
        return rows, "length", served[1]

    def _await_resume(self) -> None:
        """Queues a completion while paused with keep; the lock is free meanwhile."""
        if not self.changed.wait_for(lambda: self.paused != "keep", QUEUE_SECONDS):
            raise Unavailable(f"paused (keep) for more than {QUEUE_SECONDS} s")

    def _check_servable(self) -> None:
        if why := self.engine.unservable():
            raise Unavailable(why)

    def models(self, call: str, request: Request) -> Reply:
        model = {"id": self.engine.model_name, "object": "model", "created": 0, "owned_by": "weight-sync"}
        return Reply(200, {"object": "list", "data": [model]})

    def health(self, call: str, request: Request) -> Reply:
        return Reply(503 if self.engine.lost else 200)

    def version(self, call: str, request: Request) -> Reply:
        return Reply(200, {"version": protocol.VLLM})

    def _checksums(self) -> dict[str, str]:
        """sha256 of every parameter's bytes, on every worker."""
        ranks = len(self.engine.workers) // self.data_parallel_size
        named = {
            f"dp{at // ranks}:pp0:pcp0:tp{at % ranks}:{name}": weight
            for at, worker in enumerate(self.engine.workers)
            for name, weight in worker.weights.items()
        }
        with ThreadPoolExecutor() as pool:
            many = sum(weight.nbytes for weight in named.values()) > 1 << 26  # worth the threads
            run = pool.map if many else map
            return dict(zip(named, run(ipc_codec.checksum, named.values()), strict=True))


Handler = Callable[[App, str, "Request"], Reply]
ROUTES: dict[str, tuple[str, Handler]] = {
    **{f"/{call}": ("POST", App.sync_call) for call in protocol.CALLS},
    "/pause": ("POST", App.pause),
    "/resume": ("POST", App.resume),
    "/is_paused": ("GET", App.is_paused),
    "/get_world_size": ("GET", App.get_world_size),
    "/update_weight_version": ("POST", App.update_weight_version),
    "/weight_info": ("GET", App.weight_info),
    "/weight_checker": ("POST", App.weight_checker),
    "/v1/completions": ("POST", App.completions),
    "/v1/models": ("GET", App.models),
    "/health": ("GET", App.health),
    "/version": ("GET", App.version),
}
# Answered while an update runs; a completion takes the lock for a token at a time.
UNLOCKED = (App.health, App.version, App.get_world_size, App.models, App.completions)


@dataclass
class Row:
    """One sequence in the making: token ids, and the log-probability of each sampled one."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Asked:
    """An OpenAI completion request, as far as a byte-level stub can serve it."""

    prompts: list[list[int]]
    model: str
    max_tokens: int = 16
    temperature: float = 1.0
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None

    # What OpenAI's clients may send, and the only value of it that is served here.
    NEUTRAL = {
        **{"stream": False, "stop": None, "top_p": 1, "echo": False, "suffix": None, "best_of": 1},
        **{"frequency_penalty": 0, "presence_penalty": 0, "logit_bias": None},
    }

    @classmethod
    def from_json(cls, body: Any, model: str) -> Asked:
        """Raises BadRequest, naming the field."""
        if not isinstance(body, dict):
            raise BadRequest("the body is no object", "body")
        for key, neutral in cls.NEUTRAL.items():
            if body.get(key, neutral) not in (neutral, None, [], "", {}):
                seen = reprlib.repr(body[key])
                raise BadRequest(f"{key} {seen} is not supported by this stub", f"body.{key}")
        if body.get("model") not in (None, model):
            seen = reprlib.repr(body["model"])
            raise BadRequest(f"the model {seen} does not exist; {model!r} does", "body.model")
        prompt: Any = body.get("prompt")
        many = isinstance(prompt, list) and not all(type(token) is int for token in prompt)
        if many and len(prompt) > MAX_ROWS:
            raise BadRequest(f"there are {len(prompt)} prompts; {MAX_ROWS} sequences at most", "body.prompt")
        texts = [one.encode() if isinstance(one, str) else one for one in (prompt if many else [prompt])]
        if (total := sum(len(one) for one in texts if isinstance(one, (bytes, list)))) > MAX_PROMPT:
            raise BadRequest(f"the prompt has {total:,} tokens; {MAX_PROMPT:,} at most", "body.prompt")
        prompts = [_token_ids(one) for one in texts]
        return cls(
            prompts,
            model,
            _within(body, "max_tokens", int, 1, 1 << 20, 16),
            _within(body, "temperature", (int, float), 0, 100, 1.0),
            _within(body, "seed", int, -(1 << 63), (1 << 63) - 1, None),
            _within(body, "n", int, 1, min(MAX_ROWS // len(prompts), MAX_PROMPT // total), 1),
            _within(body, "logprobs", int, 0, 20, None),
        )

    def check_length(self, context: int) -> None:
        longest = max(map(len, self.prompts)) + self.max_tokens
        if longest > context:
            raise BadRequest(
                f"prompt and max_tokens are {longest} tokens, the context {context}", "body.prompt"
            )

    def reply(self, rows: list[Row], finish_reason: str, version: str) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "text": _text(row.tokens),
                "token_ids": row.tokens,
                "finish_reason": finish_reason,
                "logprobs": None if self.logprobs is None else row_logprobs(row),
            }
            for index, row in enumerate(rows)
        ]
        told, made = sum(map(len, self.prompts)), sum(len(row.tokens) for row in rows)
        return {
            "id": f"cmpl-{time.time_ns():x}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.model,
            "weight_version": version,
            "choices": choices,
            "usage": {"prompt_tokens": told, "completion_tokens": made, "total_tokens": told + made},
        }


def row_logprobs(row: Row) -> dict[str, Any]:
    """OpenAI's shape; `top_logprobs` stays null. Log-probabilities are of the unscaled distribution."""
    return {
        "tokens": [_text([token]) for token in row.tokens],
        "token_logprobs": row.logprobs,
        "top_logprobs": None,
        "text_offset": [len(_text(row.tokens[:at])) for at in range(len(row.tokens))],
    }


def _text(tokens: list[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


def _token_ids(prompt: Any) -> list[int]:
    tokens: Any = list(prompt) if isinstance(prompt, bytes) else prompt
    if not isinstance(tokens, list) or not tokens or not all(type(t) is int and 0 <= t < 256 for t in tokens):
        raise BadRequest("a prompt is text or token ids (bytes, 0 to 255), and not empty", "body.prompt")
    return tokens


def _within(body: Mapping[str, Any], key: str, kind: Any, least: float, most: float, default: Any) -> Any:
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, kind) or isinstance(value, bool) or not least <= value <= most:
        seen = reprlib.repr(value)
        raise BadRequest(f"{key} is a number from {least} to {most}, not {seen}", f"body.{key}")
    return value


def _next_logits(worker: Worker, rows: list[Row]) -> Tensor:
    """Logits [rows, vocabulary] of each row's next token. Rows are padded behind: attention is causal."""
    lengths = torch.tensor([len(row.prompt) + len(row.tokens) for row in rows])
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for at, row in enumerate(rows):
        ids[at, : lengths[at]] = torch.tensor(row.prompt + row.tokens)
    logits = worker.logits(ids)
    return logits[torch.arange(len(rows)), lengths.to(logits.device) - 1]


def _sample(logits: Tensor, temperature: float, generator: torch.Generator) -> tuple[list[int], list[float]]:
    """A token for each row, and its log-probability without the temperature."""
    if temperature == 0:
        tokens = logits.argmax(-1)
    else:
        below = logits - logits.max(-1, keepdim=True).values  # at most 0: no overflow
        scaled = below.double() / temperature
        tokens = torch.multinomial(scaled.softmax(-1), 1, generator=generator)[:, 0]
    return tokens.tolist(), logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist()


class Request:
    """What a handler may look at."""

    def __init__(self, content_type: str, body: bytes, query: Mapping[str, str]):
        self.content_type = content_type
        self.body = body
        self.query = query
        self.parsed: Any = None  # for the transcript
        self.said = ""  # for the log line

    def json(self, known: Any = None) -> Any:
        """The body's JSON; None where there is no body. Raises BadRequest, or UnicodeDecodeError.

        `known`: what the same body was parsed to before.
        """
        if not self.body:
            return None
        self.parsed = "(a body that cannot be read)"
        if not re.match(r"application/([\w.-]+\+)?json\s*(;|$)", self.content_type.strip().lower()):
            raise BadRequest(f"the content type is {self.content_type or 'missing'!r}, not JSON's", "body")
        if known is not None:
            self.parsed = known
            return known
        text = self.body.decode("utf-8-sig")
        if sum(map(self.body.count, (b",", b"[", b"{"))) > MAX_VALUES:  # three bytes can become seventy
            raise BadRequest(f"the JSON has more than {MAX_VALUES:,} values", "body")
        long = LONG_INT.search(b":" + text[:20].encode()) or LONG_INT.search(self.body)
        try:
            parsed = json.loads(text, parse_int=_int64 if long else None)
            if "\\u" in text:
                json.dumps(parsed, ensure_ascii=False).encode()  # finds lone surrogates
        except UnicodeEncodeError:
            raise BadRequest("a string has a lone surrogate") from None
        except RecursionError:
            raise BadRequest("the JSON is nested too deeply", "body") from None
        except json.JSONDecodeError as exc:
            raise BadRequest(f"the body is not JSON: {exc}", "body") from None
        self.parsed = parsed
        return parsed


def _int64(digits: str) -> int:
    if len(digits) > 20 or not -(1 << 63) <= int(digits) < 1 << 64:
        raise BadRequest(f"the integer {digits[:24]} does not fit 64 bits")
    return int(digits)


def of_a_web_page(headers: Mapping[str, str]) -> Reply | None:
    """The refusal of a foreign page. Start, finish and pause need no body: any web page could send them."""
    origin = headers.get("origin")
    if origin is None:
        return None
    ours = _split(origin)
    # By address only: a name that a page's owner chose may have been made to point here.
    if ours.netloc == headers.get("host") and ADDRESS.fullmatch(ours.netloc.lower()):
        return None
    return Reply(403, {"detail": f"requests of web pages of {origin[:80]} are not answered"})


def _split(url: str) -> urllib.parse.SplitResult:
    """A URL's parts; all empty where it is none."""
    try:
        return urllib.parse.urlsplit(url)
    except ValueError:
        return urllib.parse.urlsplit("")


def _error(status: int, kind: str, message: str, param: str | None) -> Reply:
    message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."
    return Reply(status, {"error": {"message": message, "type": kind, "param": param, "code": status}})


class OneLine(logging.Formatter):
    """A short line a message: names and versions are a stranger's, and may hold a terminal's codes."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return protocol.printable(" ".join(super().formatMessage(record)[:MAX_MESSAGE].split()))


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


# --- The socket --------------------------------------------------------------------------------------


class Patience(io.RawIOBase):
    """What a client sends, for as long as it is waited for: a pause has its limit, and so has the whole."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.wait(IDLE_SECONDS, HEAD_SECONDS)

    def wait(self, pause: float, whole: float) -> None:
        self.pause, self.deadline = pause, time.monotonic() + whole

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the client was too slow")
        self.connection.settimeout(min(self.pause, left))
        try:
            return self.connection.recv_into(buffer)
        finally:
            self.connection.settimeout(IDLE_SECONDS)  # of writes


DEFECTS = (  # of a head; what follows such a line the parser drops, and an Origin may be in it
    email.errors.MissingHeaderBodySeparatorDefect,
    email.errors.FirstHeaderLineIsContinuationDefect,
    email.errors.MisplacedEnvelopeHeaderDefect,
    email.errors.InvalidHeaderDefect,
)


class Connection(http.server.BaseHTTPRequestHandler):
    """HTTP/1.1 with keep-alive: reads a request, hands it to `App.answer`, writes the reply at once."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    disable_nagle_algorithm = True
    wbufsize = -1  # buffered: one write a reply
    app: App

    def setup(self) -> None:
        super().setup()
        self.patience = Patience(self.connection)
        self.rfile.close()
        self.rfile = io.BufferedReader(self.patience)

    def handle_one_request(self) -> None:
        self.patience.wait(IDLE_SECONDS, HEAD_SECONDS)
        self.expects = False
        super().handle_one_request()

    def serve(self) -> None:
        """Of what the head alone refuses the body is not asked for, and what comes of it is dropped."""
        self.began = time.monotonic()
        self.lowered = {name.lower(): value for name, value in self.headers.items()}
        length = self._length()
        if isinstance(length, Reply):
            self._give_up(length)
        elif refusal := self.refusal():
            self._pass_over(length, refusal)
        else:
            with self.server.room(length) as there:  # type: ignore[attr-defined]
                if there:
                    self.reply(self._read_body(length))
                else:
                    full = "the bodies of other requests fill the server's memory; try again"
                    self._give_up(_error(429, "TooManyRequests", full, None))

    def refusal(self) -> Reply | None:
        asked = self.command, self.path, self.lowered
        return self.app.answer(*asked, b"") if self.app.refusal(*asked) else None

    def reply(self, body: bytes) -> None:
        reply = self.app.answer(self.command, self.path, self.lowered, body)
        self._write(reply, close=reply.status >= 500)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # whatever the method: the routes know which is right
            return self.serve
        raise AttributeError(name)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """For what http.server itself finds wrong: a broken request line, headers without end."""
        self._write(Reply(code, {"detail": message or "Bad Request"}), close=True)

    def _length(self) -> int | Reply:
        """The body's; or the refusal of one that cannot be read, or that another reader may see elsewhere."""
        length = self.headers.get("content-length", "0")
        ended = self.headers.get_payload() or self.headers.get_unixfrom()  # the parser, before the head did
        if ended or any(isinstance(defect, DEFECTS) for defect in self.headers.defects):
            return _error(400, "Bad Request", "a line of the head is no header", None)
        for name in ("content-length", "host", "origin"):
            if len({*self.headers.get_all(name, [])}) > 1:
                return _error(400, "Bad Request", f"there are two values of {name}", None)
        if "transfer-encoding" in self.headers:
            return _error(411, "Length Required", "send a content-length, not a chunked body", None)
        if not re.fullmatch(r"\d{1,18}", length):
            return _error(400, "Bad Request", f"content-length is {length[:40]!r}", None)
        if int(length) > (most := self.app.max_body_bytes):
            message = f"the body has {int(length):,} bytes, the server reads {most:,} (--max-body-bytes)"
            return _error(413, "Content Too Large", message, None)
        return int(length)

    def _read_body(self, length: int) -> bytes:
        self._expect(length)
        body = self.rfile.read(length)
        if len(body) < length:
            raise ConnectionAbortedError("the client hung up in mid-body")
        return body

    def _expect(self, length: int) -> None:
        """The body may come now."""
        if self.expects:  # the client waits for this before it sends the body
            self.send_response_only(100)
            self.end_headers()
            self.wfile.flush()
        self.patience.wait(BODY_SECONDS, BODY_SECONDS + length / SLOWEST)

    def _pass_over(self, length: int, reply: Reply) -> None:
        """Answers when the body has been dropped; at once where the client asks first."""
        if self.expects:
            self._give_up(reply)
            return
        self._expect(length)
        while length:
            length -= len(piece := self.rfile.read(min(length, 1 << 16)))
            if not piece:
                raise ConnectionAbortedError("the client hung up in mid-body")
        self._write(reply, close=False)

    def _give_up(self, reply: Reply) -> None:
        """Answers, and closes: what of the body still comes is dropped, or the client would see a reset."""
        self._write(reply, close=True)
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.patience.wait(IDLE_SECONDS, IDLE_SECONDS)
            while self.rfile.read1(1 << 16):
                pass

    def _write(self, reply: Reply, close: bool) -> None:
        content = b"" if reply.body is None else json.dumps(reply.body, separators=(",", ":")).encode()
        self.send_response(reply.status)
        for header, value in reply.headers.items():
            self.send_header(header, value)
        if content:
            self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        if close:
            self.send_header("connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.wfile.flush()

    def handle_expect_100(self) -> bool:
        self.expects = True  # answered when the body is wanted
        return True

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        """`App.answer` logs, a line a call."""


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # what comes in a burst beyond it would be tried again after a second
    descriptors = 1  # that a connection takes
    held = 0  # bytes of bodies
    lock = threading.Lock()

    @contextlib.contextmanager
    def room(self, length: int) -> Iterator[bool]:
        """Whether there is room for a body, which is held while the block runs."""
        counted = length if length > SMALL_BODY else 0
        with self.lock:
            there = not counted or not self.held or self.held + counted <= MAX_HELD_BYTES
            self.held += counted * there
        try:
            yield there
        finally:
            with self.lock:
                self.held -= counted * there

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """One too many is closed at once: out of descriptors, the loop that accepts would spin."""
        return threading.active_count() < MAX_CONNECTIONS // self.descriptors


# --- In between: passes on to a real server, and looks from outside -----------------------------------

CONNECT_SECONDS = 5
UPSTREAM_SECONDS = 600  # a call that is not answered for so long is given up, with 504
KEPT_SECONDS = 4  # a connection that was idle for longer is not used again: vLLM closes it after 5
GRACE_SECONDS = 1.0  # after the answer to a finish: what still counts 1 then was left open
COUNTER_FILES = 64  # that are looked at; torch begins a new one after 10,000 exports
EXPORTS_KEPT = 1 << 18  # of syncs that are over, to know one that comes again
HOP_BY_HOP = {
    *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"),
    *("expect", "host", "content-length"),  # which are written anew
}
HANDLES_TEXT = re.compile(rb'"ipc_handles_pickled"\s*:\s*"([^"]*)"')
COUNTER_NAME = re.compile(rb"(?<!cpu:)" + ipc_codec.SHM_NAME.pattern)  # not the emulation's storages
STILL = "it may still be at it, and read what was lent"

Headers = list[tuple[str, str]]
Counters = dict[bytes, bytes | str]  # counter file -> what is in it, or why it cannot be read


def read_counters(names: Iterable[bytes]) -> Counters:
    """Each file is read once, however many exports are in it."""
    found: Counters = {}
    for name in names:
        try:
            found[name] = ipc_codec.read_counters(name)
        except OSError as exc:
            found[name] = exc.strerror or str(exc)
    return found


class Said(NamedTuple):
    """A sync call and its answer; and the counter files before it was passed on, and at its answer."""

    call: str
    content_type: str
    body: bytes
    status: int
    reply: bytes
    began: float
    ended: float
    before: Counters
    after: Counters

    @property
    def good(self) -> bool:
        return 200 <= self.status < 300


class Forward:
    """Where requests go, and what is remembered of them for the transcript. `Relay` passes them on.

    Nothing here decodes, judges or writes: an `Observer` does, in a process of its own, because it would
    hold up the next call by the interpreter's lock.
    """

    def __init__(self, url: str, max_body_bytes: int):
        """Raises ValueError where no server with workers is at the URL."""
        self.parts = urllib.parse.urlsplit(url.rstrip("/"))
        if self.parts.scheme != "http" or not self.parts.hostname:
            raise ValueError(f"--forward {url!r} is no URL such as http://127.0.0.1:8000")
        self.host = self.parts.netloc.rpartition("@")[2]
        self.url = f"http://{self.host}{self.parts.path}"
        self.max_body_bytes = max_body_bytes
        self.lock = threading.Lock()
        self.counter_files: dict[bytes, None] = {}  # the newest last
        self.heard: queue.SimpleQueue[Said | None] = queue.SimpleQueue()
        self.workers = self._world_size()
        self.feeder: threading.Thread | None = None

    def begin(self, transcript: str, listening: socket.socket) -> None:
        """From now on it is written down. Raises OSError for the transcript."""
        observer = Observer(transcript, self.url, self.workers)
        self.child, pipe = _fork(observer.run, listening)
        self.feeder = threading.Thread(target=self._feed, args=(pipe,), daemon=True)
        self.feeder.start()

    def connect(self) -> socket.socket:
        sock = socket.create_connection((self.parts.hostname, self.parts.port or 80), CONNECT_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(UPSTREAM_SECONDS)
        return sock

    def _world_size(self) -> int:
        status, text = 0, b""
        try:
            with contextlib.closing(self.connect()) as sock:
                sock.settimeout(CONNECT_SECONDS)
                path = f"{self.parts.path}/get_world_size?include_dp=true"
                sock.sendall(f"GET {path} HTTP/1.1\r\nhost: {self.host}\r\n\r\n".encode())
                response = http.client.HTTPResponse(sock, method="GET")
                response.begin()
                status, text = response.status, response.read()
            return range(1, 1 + json.loads(text)["world_size"])[-1]  # 1 or more
        except (OSError, http.client.HTTPException) as exc:
            raise ValueError(f"--forward {self.url}: no server answers there: {exc}") from None
        except (ValueError, LookupError, TypeError):
            hint = "vLLM has it with VLLM_SERVER_DEV_MODE=1"
            raise ValueError(
                f"--forward {self.url}: it answers {status} to /get_world_size; {hint}"
            ) from None

    def note(self, body: bytes) -> None:
        """Remembers the counter files that an update names. Nothing is decoded but base64."""
        for text in HANDLES_TEXT.findall(body):
            with contextlib.suppress(ValueError):
                names = dict.fromkeys(COUNTER_NAME.findall(base64.b64decode(text)))
                with self.lock:
                    older = [name for name in self.counter_files if name not in names]
                    self.counter_files = dict.fromkeys([*older, *names][-COUNTER_FILES:])

    def look(self) -> Counters:
        return read_counters(self.counter_files)

    def _feed(self, pipe: int) -> None:
        with contextlib.suppress(OSError), os.fdopen(pipe, "wb") as file:
            while said := self.heard.get():
                marshal.dump(tuple(said), file)
                file.flush()
            return
        log.error("the transcript's writer has ended: nothing is written down any more")
        while self.heard.get():
            pass

    def close(self) -> None:
        """Returns when all that was heard is written."""
        if self.feeder is None:
            return
        self.heard.put(None)
        self.feeder.join()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.child, 0)


def _fork(run: Callable[[int], None], listening: socket.socket) -> tuple[int, int]:
    """A child that runs `run(pipe)` until the pipe ends: its pid, and our end. The address is ours alone."""
    theirs, ours = os.pipe()
    if pid := os.fork():
        os.close(theirs)
        return pid, ours
    try:
        os.close(ours)
        listening.close()
        for number in (signal.SIGINT, signal.SIGTERM):  # may go to both; then the rest is still written
            signal.signal(number, signal.SIG_IGN)
        os.nice(12)  # a call goes before what is written of it
        run(theirs)
    finally:
        os._exit(0)


class NoAnswer(Exception):
    """The server gave none; the client is told `status` instead."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.reply = _error(
            status, "GatewayTimeoutError" if status == 504 else "BadGatewayError", message, None
        )


class Relay(Connection):
    """A client's connection, and one to the server for it. Bytes go on as they came, and so they return."""

    forward: Forward
    upstream: socket.socket | None = None
    answered_at = 0.0

    def refusal(self) -> Reply | None:
        """Which routes there are the server knows."""
        return of_a_web_page(self.lowered)

    def reply(self, body: bytes) -> None:
        call = _split(self.path).path[1:]
        if self.command == "POST" and call in protocol.CALLS:
            self._sync_call(call, body)
        else:
            self._other_call(body)

    def _sync_call(self, call: str, body: bytes) -> None:
        """Between the answer and its passing on there is nothing but a look at the counters."""
        looks = call in ("start_weight_update", "update_weights", "finish_weight_update")
        before = self.forward.look() if looks else {}
        try:
            response = self._ask(body, update=call == "update_weights")
            status, reason, headers = response.status, response.reason, response.getheaders()
            content = self._whole(response)
        except NoAnswer as exc:
            status, reason, headers = exc.reply.status, "", [("content-type", "application/json")]
            content = json.dumps(exc.reply.body).encode()
        ended = time.monotonic()
        after = self.forward.look() if call in ("update_weights", "finish_weight_update") else {}
        content_type = self.headers.get("content-type", "")
        said = Said(call, content_type, body, status, content, self.began, ended, before, after)
        self.forward.heard.put(said)  # in the order of the answers
        more = [("content-length", str(len(content)))]
        self._write_head(status, reason, headers, more, close=status >= 500)
        self.wfile.write(content)
        self.wfile.flush()

    def _other_call(self, body: bytes) -> None:
        """Any other answer is passed on in pieces, as they come. A client that hangs up aborts its call."""
        try:
            response = self._ask(body, update=False, watch=True)
        except NoAnswer as exc:
            self._write(exc.reply, close=True)
            return
        headers = response.getheaders()
        length = [(name, value) for name, value in headers if name.lower() == "content-length"]
        ends = bool(length) or self.command == "HEAD" or response.length == 0
        chunked = not ends and self.request_version != "HTTP/1.0"
        more = [("transfer-encoding", "chunked")] if chunked else length
        self._write_head(response.status, response.reason, headers, more, close=not (ends or chunked))
        self.connection.settimeout(UPSTREAM_SECONDS)  # a slow reader is no idle one
        try:
            self._pieces(response, chunked)
            self._answered(response)
            self.connection.settimeout(IDLE_SECONDS)
        except (OSError, http.client.HTTPException):
            self._hang_up()  # on both sides: half an answer is not to be taken for a whole one
            self.close_connection = True

    def _pieces(self, response: http.client.HTTPResponse, chunked: bool) -> None:
        """The answer's body, a piece as soon as it is there. Raises where it ends too early."""
        if chunked:
            self.wfile.flush()  # the head: a stream's first piece may be long in coming
        while piece := response.read1(1 << 16):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            self.wfile.flush()
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        self.wfile.write(b"0\r\n\r\n" if chunked else b"")
        self.wfile.flush()

    def _ask(self, body: bytes, update: bool, watch: bool = False) -> http.client.HTTPResponse:
        """Passes the request on; returns when the answer begins. Nothing is ever sent twice."""
        try:
            sock = self._connected()
        except OSError as exc:
            raise NoAnswer(502, f"{self.forward.url} cannot be reached: {exc}") from None
        with self._or_no_answer():
            sock.sendall(self._request_head() + body)
            if update:
                self.forward.note(body)
            if watch:
                self._await_either(sock)
            response = http.client.HTTPResponse(sock, method=self.command)
            response.begin()
            return response

    def _whole(self, response: http.client.HTTPResponse) -> bytes:
        with self._or_no_answer():
            content = response.read()
        self._answered(response)
        return content

    @contextlib.contextmanager
    def _or_no_answer(self) -> Iterator[None]:
        """What the block raises for want of an answer as NoAnswer; the connection is given up."""
        try:
            yield
        except TimeoutError:
            self._hang_up()
            late = f"{self.forward.url} gave no answer within {UPSTREAM_SECONDS:g} s; {STILL}"
            raise NoAnswer(504, late) from None
        except (OSError, http.client.HTTPException) as exc:
            self._hang_up()
            raise NoAnswer(502, f"{self.forward.url} hung up without an answer: {exc}; {STILL}") from None

    def _await_either(self, sock: socket.socket) -> None:
        """Until the server answers, or the client hangs up. Raises ConnectionAbortedError for the client."""
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        poll.register(self.connection, select.POLLRDHUP)
        ready = dict(poll.poll(UPSTREAM_SECONDS * 1000))
        if not ready:
            raise TimeoutError
        if sock.fileno() not in ready:
            raise ConnectionAbortedError("the client hung up first")

    def _connected(self) -> socket.socket:
        """The connection of the call before, if nobody has closed it, or a new one."""
        if self.upstream and (time.monotonic() - self.answered_at > KEPT_SECONDS or _readable(self.upstream)):
            self._hang_up()
        self.upstream = self.upstream or self.forward.connect()
        return self.upstream

    def _answered(self, response: http.client.HTTPResponse) -> None:
        self.answered_at = time.monotonic()
        if response.will_close or response.status >= 500:  # vLLM closes it after a 500, and does not say so
            self._hang_up()

    def _hang_up(self) -> None:
        if self.upstream:
            self.upstream.close()
        self.upstream = None

    def _request_head(self) -> bytes:
        headers = [("host", self.forward.host), *_end_to_end(self.headers.items())]
        if "content-length" in self.headers:
            headers.append(("content-length", self.headers["content-length"]))
        head = [f"{self.command} {self.forward.parts.path}{self.path} HTTP/1.1"]
        return "\r\n".join([*head, *map(": ".join, headers), "", ""]).encode("latin-1")

    def _write_head(self, status: int, reason: str, headers: Headers, more: Headers, close: bool) -> None:
        self.send_response_only(status, reason or None)
        for name, value in [*_end_to_end(headers), *more, *([("connection", "close")] if close else [])]:
            self.send_header(name, value)
        self.end_headers()

    def finish(self) -> None:
        self._hang_up()
        super().finish()


def _end_to_end(headers: Iterable[tuple[str, str]]) -> Headers:
    """Those that are not about one connection, unfolded."""
    named = ",".join(value for name, value in headers if name.lower() == "connection")
    dropped = {*HOP_BY_HOP, *(token.strip().lower() for token in named.split(","))}
    return [(name, " ".join(value.splitlines())) for name, value in headers if name.lower() not in dropped]


def _readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


class Forwarder(Server):
    descriptors = 2  # the second is to the server

    def __init__(self, address: tuple[str, int], relay: type[Relay], forward: Forward):
        self.forward = forward
        super().__init__(address, relay)

    def server_close(self) -> None:
        super().server_close()
        self.forward.close()


# --- The observer: a transcript from outside ----------------------------------------------------------


class Export(NamedTuple):
    """One export, by what tells it from every other: each has a counter's slot of its own."""

    uuid: str
    file: bytes
    slot: int
    storage: str

    @classmethod
    def of(cls, uuid: str, args: Any) -> Export | None:
        """From described arguments; None where they name no counter."""
        try:
            file, slot = bytes.fromhex(args[protocol.COUNTER]), args[protocol.SLOT]
        except (TypeError, ValueError, LookupError):
            return None
        if not ipc_codec.SHM_NAME.fullmatch(file) or type(slot) is not int or not 0 <= slot < ipc_codec.SLOTS:
            return None
        return cls(uuid, file, slot, f"{args[protocol.STORAGE_HANDLE]} {args[protocol.STORAGE_OFFSET]}")

    def counter(self, counters: Counters) -> int | None:
        file = counters.get(self.file)
        return ipc_codec.counter_at(file, self.slot) if isinstance(file, bytes) else None


@dataclass
class Lent:
    """What an update that was accepted has lent, until a finish is."""

    label: str
    syncs: int  # in which it was lent without a renewal, this one too
    replied: int | None = None  # its counter when the last update that names it was answered
    times: int = 1  # unpacked, each handle is opened and released
    now: bool = True  # lent in the sync that is open


class Observer:
    """Writes a transcript of what was passed on, and warns of each finding. It opens no handle.

    What a server took it owes a release, once, before it answers the finish; what it refused the trainer
    settles before the next start.
    """

    def __init__(self, path: str, url: str, workers: int):
        self.workers = workers
        self.lent: dict[Export, Lent] = {}
        self.refused: dict[Export, None] = {}
        self.past: dict[Export, int] = {}  # in how many syncs they were lent
        header = {**protocol.TRANSCRIPT, "forwarded": url, "uuids": [None] * workers}
        self.judge = protocol.Judge.of(header, set())
        self.file = begin_transcript(path, header)
        self.lines, self.warned = 1, 0

    def run(self, pipe: int) -> None:
        """Hears what is said until the pipe ends."""
        with os.fdopen(pipe, "rb") as file, contextlib.suppress(EOFError):
            while True:
                said = Said(*marshal.load(file))
                took = f"{1e3 * (said.ended - said.began):.1f} ms"
                log.info("%s: %d in %s", said.call, said.status, took)
                try:
                    self._write(self._hear(said))
                except Exception:  # of a stranger's bytes; the next call is heard all the same
                    log.exception("%s was not written down", said.call)
        self.judge.conclude()
        self._warn()

    def _write(self, line: Mapping[str, Any]) -> None:
        _write_line(self.file, line)
        self.lines += 1
        self.judge.hear(self.lines, line)
        self._warn()

    def _warn(self) -> None:
        for finding in self.judge.findings[self.warned :]:
            log.warning("line %s", " ".join(str(finding).split()))
        self.warned = len(self.judge.findings)

    def _hear(self, said: Said) -> dict[str, Any]:
        request = Request(said.content_type, said.body, {})
        with contextlib.suppress(BadRequest, UnicodeDecodeError):
            request.json()
        handles, seen = None, {}
        if said.call == "update_weights":
            handles, updates = self._decode(request.parsed)
            seen = self._updated(said, updates)
        elif said.good and said.call == "start_weight_update":
            seen = self._started(said)
        elif said.good and said.call == "finish_weight_update":
            seen = self._finished(said)
        error = None if said.good else _reason(said.reply)
        line = {"call": said.call, "body": _without_pickles(request.parsed), "status": said.status}
        times = {"error": error, "began": said.began, "ended": said.ended}
        return {**line, **times, "handles": handles, "seen": {"workers": [seen]}}

    def _decode(self, body: Any) -> tuple[Any, list[UpdateInfo]]:
        """The handles as the transcript has them, and what each worker was sent."""
        try:
            given = protocol.read_envelope("update_weights", body)
            entries = protocol.worker_entries(given, self.workers)
        except (BadRequest, protocol.Refused):
            return None, []  # the judge says what is wrong with it
        texts = [e.ipc_handles_pickled for e in entries]
        once = {text for text in texts if isinstance(text, str)}
        described = {text: ipc_codec.describe_handles(_decoded(text)) for text in once}
        each = [described[text] if isinstance(text, str) else None for text in texts]
        updates = [replace(entry, handles=found) for entry, found in zip(entries, each, strict=True)]
        return each if isinstance(given, list) else each[0], updates

    def _updated(self, said: Said, updates: Sequence[UpdateInfo]) -> dict[str, Any]:
        """The counters at the reply; what was accepted is lent now, what was refused is the trainer's."""
        came = list(_exports_of(updates))
        seen: dict[str, Any] = {"replied": [export.counter(said.after) for export, _, _ in came]}
        if not said.good:
            if said.status not in protocol.NO_ANSWER:
                self.refused |= {export: None for export, _, _ in came if export not in self.lent}
            return seen
        files = {export.file: None for export, _, _ in came}
        unread = ((file, why) for file in files if isinstance(why := said.after.get(file), str))
        blind = next((f"{ipc_codec.SHM}{file.decode()}: {why}" for file, why in unread), "")
        if blind := blind or _too_many_gpus(updates, self.workers):
            seen["uncounted"] = blind
        for (export, label, packed), count in zip(came, seen["replied"], strict=True):
            self.refused.pop(export, None)
            if not blind:
                renewed = export.counter(said.before) == 1
                self._lend(export, label, packed, renewed).replied = count
        return seen

    def _lend(self, export: Export, label: str, packed: bool, renewed: bool) -> Lent:
        lent = self.lent.get(export)
        if lent and lent.now:
            lent.times += not packed
            return lent
        before = lent.syncs if lent else self.past.get(export, 0)
        self.lent[export] = Lent(label, 1 if renewed else 1 + before)
        return self.lent[export]

    def _started(self, said: Said) -> dict[str, Any]:
        left = [export.counter(said.before) for export in self.refused]
        self.refused.clear()
        for lent in self.lent.values():
            lent.now = False  # of a sync that failed
        return {"left": left}

    def _finished(self, said: Said) -> dict[str, Any]:
        """What was seen of every export; of a failed sync's only whether they are still open."""
        lent, self.lent = self.lent, {}
        self.past |= {export: one.syncs for export, one in lent.items()}
        for export in list(itertools.islice(self.past, max(0, len(self.past) - EXPORTS_KEPT))):
            del self.past[export]
        after = [export.counter(said.after) for export in lent]
        later = self._later(list(lent), after, said.ended)
        uses: Counter[tuple[bytes, int]] = Counter()  # a counter that is used twice is counted down twice
        for export, one in lent.items():
            uses[export.file, export.slot] += one.times
        columns: dict[str, list[Any]] = {key: [] for key in ("names", "syncs", "held", "after", "later")}
        for (export, one), *counts in zip(lent.items(), after, later, strict=True):
            early = _released_early(one, export.counter(said.before), counts[0])
            if uses[export.file, export.slot] > 1 or not one.now:
                counts = [n if n and n > 0 else None for n in counts]
            for column, value in zip(columns.values(), (one.label, one.syncs, early, *counts), strict=True):
                column.append(value)
        return columns

    @staticmethod
    def _later(exports: Sequence[Export], after: Sequence[int | None], ended: float) -> list[int | None]:
        """Those of the counters that were not 0, when none is 1 any more, or when the grace has passed.

        A counter that was 0 is over: what changes it then belongs to another sync, as does a negative one.
        """
        open_then = [
            export for export, count in zip(exports, after, strict=True) if count is None or count > 0
        ]
        while True:
            counters = read_counters({export.file: None for export in open_then})
            now = {export: export.counter(counters) for export in open_then}
            if 1 not in now.values() or time.monotonic() > ended + GRACE_SECONDS:
                break
            time.sleep(0.02)
        seen = {export: n and max(n, 0) for export, n in now.items()}
        return [seen.get(export, count) for export, count in zip(exports, after, strict=True)]


def _released_early(lent: Lent, before: int | None, after: int | None) -> int | None:
    """The counter before the finish, where the server held the export and somebody else has released it.

    The server has then released it once more, with the finish. One that lets go earlier does not.
    """
    if lent.replied != 1 or lent.syncs > 1 or before is None or after is None:
        return None
    return before if after < before < 1 else None


def _exports_of(updates: Sequence[UpdateInfo]) -> Iterator[tuple[Export, str, bool]]:
    """(export, whose, whether it is the packed buffer), in the order of the handles and of their GPUs."""
    for update in updates if updates and updates[0].rank_local else updates[:1]:
        for _at, label, handle in update.labelled:
            for uuid, args in handle.items():
                if export := Export.of(uuid, args):
                    whose = f"{label} on GPU {uuid}" if len(handle) > 1 else label
                    yield export, whose, isinstance(update.handles, dict)


def _too_many_gpus(updates: Sequence[UpdateInfo], workers: int) -> str:
    """What handles are for more GPUs than workers read them: an export for nobody looks as a leak does."""
    for update in updates:
        readers = 1 if update.rank_local else workers
        for _at, label, handle in update.labelled:
            if len(handle) > readers:
                return f"{label} is lent on {len(handle)} GPUs, to {readers} workers"
    return ""


def _reason(reply: bytes) -> str:
    """What an error answer says is wrong: its message, detail or text; empty where it says nothing."""
    try:
        body = json.loads(reply)
        return str(body["error"]["message"] if "error" in body else body["detail"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return reply[:400].decode(errors="replace")


# --- The command line --------------------------------------------------------------------------------


def parse_devices(text: str) -> list[torch.device]:
    """`auto`, `cpu`, `cuda`, or a list with one worker an entry: `cuda:0,cuda:1`. Raises ValueError."""
    if text == "auto":
        text = "cuda" if torch.cuda.is_available() else "cpu"
    devices = []
    for entry in text.split(","):
        if not re.fullmatch(r"(cpu|cuda)(:\d{1,2})?", entry):
            raise ValueError(
                f"--device has {entry!r}; auto, cpu, cuda, or a list such as cuda:0,cuda:1 is meant"
            )
        device = torch.device(entry)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"--device has {entry}, and torch sees {torch.cuda.device_count()} CUDA devices")
        devices.append(device if device.index is not None else torch.device(device.type, 0))
    if len(set(devices)) < len(devices):
        raise ValueError(f"--device names a device twice: {text}")
    return devices


def _words_of(exc: BaseException) -> str:
    return " ".join(str(exc).split()) or type(exc).__name__


def load_callable(path: str) -> Callable[[], torch.nn.Module]:
    """`MODULE:CALLABLE` as the callable. Raises ValueError."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as exc:  # whatever a module does while it is imported
        why = _words_of(exc)
        raise ValueError(f"--model {path!r} is no MODULE:CALLABLE that can be imported: {why}") from exc


def _at_least(least: float, kind: Callable[[str], Any], most: float = sys.maxsize) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        if not least <= (value := kind(text)) <= most:
            raise ValueError
        return value

    return number


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="the address to listen on (default %(default)s)")
    add("--port", type=int, default=8000, help="the port; 0 takes a free one (default %(default)s)")
    add("--device", default="auto", help="auto, cpu, cuda, or one worker an entry: cuda:0,cuda:1")
    add("--data-parallel-size", type=int, default=1, metavar="N", help="divides the workers (default 1)")
    add("--model", metavar="MODULE:CALLABLE", help="makes the model whose parameters are the weights")
    add("--strict", action="store_true", help="refuse what breaks a SHOULD as well, where a message shows it")
    add(
        "--max-body-bytes",
        type=_at_least(1, int),
        default=MAX_BODY_BYTES,
        metavar="N",
        help="413 over it (%(default)s)",
    )
    add(
        "--hold-seconds",
        type=_at_least(0, float, 1e6),
        metavar="S",
        help=f"delay each update's answer by S seconds (default 0; with --judge {HOLD_SECONDS})",
    )
    add("--transcript", metavar="FILE", help="write what was said and seen, for `protocol.py FILE` to judge")
    add(
        "--forward",
        metavar="URL",
        help="hold no weights (--device, --model, --hold-seconds say nothing then): pass every request on to "
        "that server, and judge both",
    )
    add("--judge", metavar="COMMAND", help="run a trainer on a free port, {url} in it replaced, and judge it")
    return parser


def make_server(options: argparse.Namespace) -> Server:
    """The listening server. Raises ValueError for options that cannot be, OSError for the address."""
    if options.forward is not None:
        return make_forwarder(options)
    devices = parse_devices(options.device)
    if options.data_parallel_size < 1 or len(devices) % options.data_parallel_size:
        raise ValueError(
            f"--data-parallel-size {options.data_parallel_size} does not divide {len(devices)} workers"
        )
    model = load_callable(options.model) if options.model else None
    engine = WeightTransferEngine(devices, model, options.strict, options.model or DEFAULT_MODEL)
    default = 0.0 if options.judge is None else HOLD_SECONDS
    engine.hold_seconds = default if options.hold_seconds is None else options.hold_seconds
    app = App(engine, options.data_parallel_size, options.max_body_bytes)
    server = Server((options.host, options.port), type("Connection", (Connection,), {"app": app}))
    if options.transcript:
        with _closed_on_error(server):
            engine.witness = Witness(options.transcript, engine.workers, engine.hold_seconds)
    return server


def make_forwarder(options: argparse.Namespace) -> Server:
    """As `make_server`, without an engine: no device is touched."""
    if not options.transcript:
        raise ValueError("--forward writes down what was said: it needs --transcript FILE or --judge COMMAND")
    gc.freeze()  # torch's objects: a collection that looks through them would hold up a call by 0.1 s
    forward = Forward(options.forward, options.max_body_bytes)
    relay = type("Relay", (Relay,), {"app": forward, "forward": forward})
    server = Forwarder((options.host, options.port), relay, forward)
    with _closed_on_error(server):
        forward.begin(options.transcript, server.socket)
    return server


@contextlib.contextmanager
def _closed_on_error(server: Server) -> Iterator[None]:
    """In it a transcript begins. Not before: the server that has the address may be writing the same file."""
    try:
        yield
    except OSError:
        server.server_close()
        raise


def open_to_others(host: str) -> str:
    """A warning where others than this machine may come in; empty where not."""
    try:
        loopback = ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:
        loopback = False
    if loopback:
        return ""
    return (
        f"warning: on {host} whoever reaches this machine may overwrite the weights and make this process "
        "read its memory; there is no authentication: let only those come in who may, or use 127.0.0.1"
    )


def judge(server: Server, url: str, options: argparse.Namespace) -> int:
    """Runs the trainer against this witness, and judges it. Returns the exit code."""
    try:
        command = [word.replace("{url}", url) for word in shlex.split(options.judge)]
        if not command:
            raise ValueError("it has no words")
        given = os.environ | {"WEIGHT_SYNC_URL": url}
        trainer = subprocess.Popen(command, env=given, preexec_fn=_end_with_parent)
    except (OSError, ValueError) as exc:
        print(f"server.py: {options.judge!r} cannot be run: {exc}", file=sys.stderr)
        return 2

    def serve() -> None:
        with contextlib.suppress(OSError, ValueError):  # an interrupt has closed it before we came here
            server.serve_forever()

    serving = threading.Thread(target=serve, daemon=True)
    try:
        serving.start()
        ended = trainer.wait()  # an interrupt ends this process, and so the trainer
    finally:
        if serving.is_alive():
            server.shutdown()
    # The transcript is whole: a call that the trainer gave up is in it as well, but of a forwarder.
    with server.RequestHandlerClass.app.lock:  # type: ignore[attr-defined]
        server.server_close()
    print(f"{command[0]} ended with exit code {ended}; the transcript is {options.transcript}")
    verdict = protocol.verdict(options.transcript, options.strict)
    if ended:
        print(f"{command[0]} itself ended with exit code {ended}: its own output says why")
    return verdict


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: also when this process is killed


def main() -> int:
    options = build_parser().parse_args()
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    sys.path.insert(0, os.getcwd())  # --model of the folder one stands in
    made = ""
    if options.judge is not None:
        options.port = 0
        if not options.transcript:
            options.transcript = made = tempfile.mkstemp(suffix=".jsonl", prefix="weight-sync-")[1]
    try:
        server = make_server(options)
    except (ValueError, OSError, OverflowError) as exc:
        with contextlib.suppress(OSError):
            os.unlink(made)
        where = f"cannot start on {options.host}:{options.port}: "
        if isinstance(exc, ValueError) or getattr(exc, "filename", None):
            where = ""
        print(f"server.py: {where}{exc}", file=sys.stderr)
        return 1 if options.judge is None else 2  # 1 would be a finding
    if warning := open_to_others(options.host):
        print(f"server.py: {warning}", file=sys.stderr)
    if options.forward is None and not _gate_is_open():
        print(f"server.py: warning: {GATE} is not 1, so that every update is refused", file=sys.stderr)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    gc.freeze()  # what is here now stays: a collection need not look at it during a sync
    url = f"http://{options.host}:{server.server_port}"
    print(f"listening on {url}", flush=True)
    with server:
        try:
            if options.judge is not None:
                return judge(server, url, options)
            server.serve_forever()
        except KeyboardInterrupt:
            for again in (signal.SIGINT, signal.SIGTERM):
                signal.signal(again, signal.SIG_IGN)  # what remains is taking down
            if options.judge is not None:
                print("server.py: interrupted before there was a verdict", file=sys.stderr)
                return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
