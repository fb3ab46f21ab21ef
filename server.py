"""The inference side of a weight sync: a stub that holds weights, and answers as vLLM 0.33.0 does.

It reads the trainer's memory through the handles that come over HTTP, so that an `update_weights` that
is answered with 200 has been read, on every device. Read one sync from the bottom up: `App.answer` takes
the request (station 7), `WeightTransferEngine.update_weights` judges it and reads the bytes (8 to 11).

    VLLM_ALLOW_INSECURE_SERIALIZATION=1 python server.py
    ... python server.py --transcript sync.jsonl        a witness: `protocol.py sync.jsonl` judges it
    ... python server.py --judge 'COMMAND {url}'        runs that trainer, and judges it: exit code 0
                                    clean, 1 findings, 2 nothing was exercised

Without a GPU the same is played through shared memory (see `ipc_codec`). Without --model the server
takes any names; a name that it holds keeps its shape and dtype.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import http.server
import importlib
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ipc_codec
import protocol
from protocol import GATE, BadRequest, InitInfo, UpdateInfo, required

PAUSE_MODES = ("abort", "wait", "keep")
IDLE_SECONDS = 5  # a kept-alive connection without a request is closed after this, as vLLM does
BODY_SECONDS = 60  # a body that pauses for longer than this is given up
MAX_BODY_BYTES = 1 << 30
QUEUE_SECONDS = 300  # a completion that is queued by pause(keep), or a pause that waits for completions
DEFAULT_MODEL = "trainer:ByteLM"  # what is served when the weights are exactly its parameters
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")

log = logging.getLogger("weight-sync")


# --- The engine: weights on devices ------------------------------------------------------------------


class Misfit(ValueError):
    """A name, dtype or shape is not the one that the server holds."""


class Worker:
    """One --device entry: its own copy of the weights, and its mapping of the trainer's packed buffer."""

    def __init__(self, device: torch.device, model: Callable[[], torch.nn.Module] | None = None):
        self.device = device
        self.place = ipc_codec.place(device)
        self.session = protocol.Session(uuid=ipc_codec.gpu_uuid(device))
        self.buffer = ipc_codec.PackedBufferImporter(device)
        self.weights: dict[str, Tensor] = {}
        self.takes_any_name = model is None
        self.model = None if model is None else self.make_model(model)
        if self.model is not None:
            self.weights = dict(self.model.state_dict())

    def make_model(self, model: Callable[[], torch.nn.Module]) -> torch.nn.Module:
        return model().requires_grad_(False).eval().to(self.place)

    def check(self, update: UpdateInfo) -> list[ipc_codec.IpcArgs]:
        """Everything that can be said before a device is touched. The exports; raises ValueError."""
        for name, dtype, shape in () if update.known else update.rows:
            self._check_fit(name, dtype, list(shape))
        return ipc_codec.check_exports(self.lent_to_me(update), self.device)

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
            raise Misfit(f"{name}: the server holds {holds}, the update brings {dtype} {shape}")

    def open(self, update: UpdateInfo, exports: Sequence[ipc_codec.IpcArgs]) -> list[Tensor]:
        """Station 9: the trainer's tensors, in the order of `names`. They are its memory, not a copy."""
        with _on(self.device):
            if self.session.packed:
                dtypes = [ipc_codec.parse_dtype(dtype) for _name, dtype, _shape in update.rows]
                shapes = [shape for _name, _dtype, shape in update.rows]
                return ipc_codec.unpack(self.buffer.open(update.handles), dtypes, shapes, update.sizes)
            return ipc_codec.open_exports(exports, self.device)

    def lent_to_me(self, update: UpdateInfo) -> list[Any]:
        """The arguments of this worker's exports: one a tensor, or packed the buffer's."""
        handles = [update.handles] if self.session.packed else update.handles
        return [handle[self.session.uuid] for handle in handles]

    def make_room(self, update: UpdateInfo) -> dict[str, Tensor]:
        """Memory for the names that are new here; nothing is held under them yet."""
        return {
            name: torch.empty(shape, dtype=ipc_codec.parse_dtype(dtype), device=self.place)
            for name, dtype, shape in update.rows
            if name not in self.weights
        }

    def copy(self, names: Sequence[str], weights: Sequence[Tensor]) -> None:
        """Station 10: a real copy into what the server holds, queued on this thread's stream."""
        with _on(self.device), torch.no_grad():
            ipc_codec.copy_all([self.weights[name] for name in names], weights)

    def logits(self, ids: Tensor) -> Tensor:
        """The model's output for ids [batch, length]: [batch, length, vocabulary]."""
        with _on(self.device), torch.no_grad():
            assert self.model is not None, "`unservable` comes first"
            weights = dict(self.weights)
            return torch.func.functional_call(self.model, weights, (ids.to(self.place),), tie_weights=False)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _handles_of(update: UpdateInfo) -> Any:
    """What the update's text holds; None where it has no text: then a rule says what is wrong."""
    if not isinstance(update.ipc_handles_pickled, str):
        return None
    if os.environ.get(GATE) != "1":
        raise ValueError(f"handles are pickled, and {GATE} is not set: start the server with {GATE}=1")
    try:
        return ipc_codec.decode_handles(update.ipc_handles_pickled)
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
        self.writes = 0  # how often weights were written
        self.applied: set[str] = set()  # names written by the open session
        self.torn: set[str] = set()  # names written by failed sessions, and not by a good one since
        self.layouts: dict[
            tuple[bool, bytes], UpdateInfo
        ] = {}  # of the last good sync: they need no second look
        self.brought: dict[tuple[bool, bytes], UpdateInfo] = {}  # by the open session

    @property
    def mixed(self) -> bool:
        """Whether the weights are of no single version: from a first chunk until a good finish."""
        return bool(self.applied or self.torn)

    def unservable(self) -> str:
        """Why no completion can be made of these weights; empty where one can."""
        if self.mixed:
            return "the weights are a mix: a sync is open, or failed; a full sync repairs them"
        worker = self.workers[0]
        if worker.model is None:
            worker.model = worker.make_model(load_callable(DEFAULT_MODEL))
        wanted = worker.model.state_dict()
        if odd := sorted(wanted.keys() ^ worker.weights.keys()):
            side = "misses" if odd[0] in wanted else "has besides"
            return (
                f"the weights are not {self.model_name}'s: the table {side} {odd[0]} and {len(odd) - 1} more"
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

    def start_weight_update(self) -> str:
        with self._session("start_weight_update"):
            if self.witness:
                self.witness.started()
            self._judge("start_weight_update", [None] * len(self.workers))
        return ""

    def update_weights(self, update_info: Mapping[str, Any] | Sequence[Any]) -> str:
        """One chunk. Returns when every device has read it; raises with no weight changed."""
        updates: list[UpdateInfo] = []
        with self._session("update_weights", updates):
            updates += protocol.worker_entries(update_info, len(self.workers))
            updates[:] = self._decode(updates)
            if self.witness:
                self.witness.decoded(update_info, updates)
            self._judge("update_weights", updates)
            self._load(updates)
            if not updates[0].rank_local:
                known = updates[0].known or replace(updates[0], ipc_handles_pickled=None, handles=None)
                self.brought[self._layout(updates[0])] = known
        count = len(updates[0].rows)
        return f"{count:,} tensor{'s' * (count != 1)}, {_bytes(sum(updates[0].sizes))}, "

    def _decode(self, updates: Sequence[UpdateInfo]) -> list[UpdateInfo]:
        """Station 8: the updates with their handles as inert values. Workers share one that is for all."""
        distinct = {id(update): update for update in updates}
        decoded = {
            at: replace(update, handles=_handles_of(update), known=self._known(update))
            for at, update in distinct.items()
        }
        return [decoded[id(update)] for update in updates]

    def _known(self, update: UpdateInfo) -> UpdateInfo | None:
        return None if update.rank_local else self.layouts.get(self._layout(update))

    def _layout(self, update: UpdateInfo) -> tuple[bool, bytes]:
        return self.workers[0].session.packed, update.layout

    def _load(self, updates: Sequence[UpdateInfo]) -> None:
        """All workers open before any of them copies, so that a refusal comes before the first write."""
        opened, rooms = self._open(updates)
        if self.witness:
            self.witness.opened(updates, opened)
        for worker, update, room, weights in zip(self.workers, updates, rooms, opened, strict=True):
            worker.weights |= room
            self.applied.update(update.names)
            self.writes += bool(weights)
            worker.copy(update.names, weights)
        for worker in self.workers:
            worker.synchronize()  # station 11: the bytes have been read, on every device
        if self.hold_seconds:
            time.sleep(self.hold_seconds)
        if self.witness:
            self.witness.read()

    def _open(self, updates: Sequence[UpdateInfo]) -> tuple[list[Any], list[Any]]:
        """Every worker's view of the trainer's tensors, and memory for the names that are new."""
        try:
            each = list(zip(self.workers, updates, strict=True))
            checked = [worker.check(update) for worker, update in each]
            opened = [w.open(u, exports) for (w, u), exports in zip(each, checked, strict=True)]
            return opened, [worker.make_room(update) for worker, update in each]
        except ValueError as exc:
            if self.witness:
                self.witness.not_taken(exc)
            raise
        except (RuntimeError, MemoryError) as exc:
            raise ValueError(f"the device could not take the update: {exc}") from exc

    def finish_weight_update(self, weight_version: str | None = None) -> str:
        """Ends the session: mappings are released, and the version is set if one is given."""
        with self._session("finish_weight_update"):
            if self.witness:
                self.witness.finishing()
            self._release()
            if self.witness:
                self.witness.finished()
            self.torn -= self.applied
            self.applied = set()
            self.layouts, self.brought = self.brought, {}
            if weight_version is not None:
                self.weight_version = weight_version
        return ""

    def shutdown_weight_transfer_engine(self) -> str:
        with self._session("shutdown_weight_transfer_engine"):
            self._release()
        return ""

    def start_draft_weight_update(self) -> str:
        """There is no draft model here; SEQUENCE refuses it in every state."""
        with self._session("start_draft_weight_update"):
            raise AssertionError("SEQUENCE let a draft update in")

    @contextlib.contextmanager
    def _session(self, call: str, messages: Sequence[Any] = ()) -> Iterator[None]:
        """Lets a call in or refuses it, and records how it ended: with `messages`, one a worker, if any."""
        nothing = [None] * len(self.workers)
        if refusal := self.workers[0].session.forbids(call):
            raise refusal
        try:
            yield
        except BaseException:
            self._settle(call, nothing, ok=False)
            if call == "update_weights":
                self.torn |= self.applied
                self.applied = set()
                self.brought = {}
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
            for refusal in worker.session.broken_rules(call, message):
                if self.strict or refusal.rule.level == protocol.MUST:
                    raise refusal

    def _release(self) -> None:
        for worker in self.workers:
            worker.buffer.release()


# --- The witness: a transcript ------------------------------------------------------------------------


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

    def __init__(self, path: str, workers: Sequence[Worker]):
        self.workers = workers
        self.file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (open as long as the server is)
        self.loans: list[list[Loan]] = [[] for _ in workers]
        self.chunk: list[list[Tensor]] = []  # what the running update has opened, by worker
        self.refused: list[Any] = []  # exports of refused updates, of all workers
        self._begin()
        self._line(
            {**protocol.TRANSCRIPT, "digest": "ipc_codec.digests", "uuids": [w.session.uuid for w in workers]}
        )

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
        self._line({**line, "began": began, "ended": time.monotonic(), **seen})
        self._begin()

    def _line(self, line: Mapping[str, Any]) -> None:
        self.file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self.file.flush()

    def decoded(self, update_info: Any, updates: Sequence[UpdateInfo]) -> None:
        rank_local = isinstance(update_info, list)
        said = updates if rank_local else updates[:1]
        self.came = list(_exports(update.handles for update in said if not update.undecodable))
        described = [ipc_codec.describe_handles(update.handles) for update in said]
        self.handles = described if rank_local else described[0]

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
                buffer = worker.buffer.open(
                    update.handles
                )  # the slices themselves: an unaligned one was copied
                weights = list(buffer[: sum(update.sizes)].split(update.sizes)) if update.sizes else []
                self._lend_buffer(self.loans[at], exports[0], before[0] == 1)
            self.chunk.append(weights)
            seen = {"arrival": ipc_codec.digests(weights), "before": before}
            self.seen[at] |= {**seen, "unopened": "", "misfit": ""}

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

    def finishing(self) -> None:
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

    def finished(self) -> None:
        for at, loans in enumerate(self.loans):
            exports = [loan.args for loan in loans]
            loans.clear()
            self.seen[at]["after"] = list(map(ipc_codec.ref_count, exports))

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
    for args in exports:
        storage = _storage(args)
        counts.append(None if storage in storages else ipc_codec.ref_count(args))
        storages.add(storage)
    return counts


def _storage(args: Any) -> tuple[Any, Any]:
    named = ipc_codec.IpcArgs(*args)
    return named.storage_handle, named.storage_offset_bytes


def _without_pickles(value: Any, key: str = "") -> Any:
    """The body as it goes into the transcript: of a handles' text only what is outside base64's alphabet.

    So with any long text, wherever it is: it may be one in a wrong place.
    """
    if isinstance(value, dict):
        return {name: _without_pickles(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_pickles(item, key) for item in value]
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

    def answer(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """Station 7. The envelope is judged first (400), then the session and the content (500)."""
        url = urllib.parse.urlsplit(target)
        if (origin := headers.get("origin")) and urllib.parse.urlsplit(origin).netloc != headers.get("host"):
            # Start, finish and pause need no body: any web page could send them.
            return Reply(403, {"detail": f"requests of web pages of {origin} are not answered"})
        wanted, handler = ROUTES.get(url.path, ("", None))
        if handler is None:
            return Reply(404, {"detail": "Not Found"})
        if method != wanted:
            return Reply(405, {"detail": "Method Not Allowed"}, {"allow": wanted})
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
            log.info("%s: %s%s, version %s", url.path[1:], request.said, took, self.engine.weight_version)
        return reply

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
            log.warning("%s refused, 400: %s", call, exc)
            return _error(400, kind, str(exc), exc.param)
        except Exception as exc:
            # An unexpected error is ours: it gets its traceback, in the log only.
            expected = isinstance(exc, (ValueError, MemoryError))
            log.error("%s refused, 500: %s", call, exc, exc_info=not expected)
            return _error(500, "InternalServerError", str(exc) or type(exc).__name__, None)

    # Handlers: (call, request) -> Reply

    def sync_call(self, call: str, request: Request) -> Reply:
        reads_body = call in ("init_weight_transfer_engine", "update_weights", "finish_weight_update")
        given = protocol.read_envelope(call, request.json(required=False) if reads_body else None)
        request.said = getattr(self.engine, call)(*([given] if reads_body else []))
        return Reply(200, {"message": protocol.SAID[call]})

    def pause(self, call: str, request: Request) -> Reply:
        mode = request.query.get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise BadRequest(f"mode is one of {', '.join(PAUSE_MODES)}, not {mode!r}", "query.mode")
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
        words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False}
        include_dp = words.get(given := request.query.get("include_dp", "true").lower())
        if include_dp is None:
            raise BadRequest(f"include_dp is true or false, not {given!r}", "query.include_dp")
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
        raise BadRequest(f"action is checksum, compare or reset, not {action!r}", "body.action")

    def completions(self, call: str, request: Request) -> Reply:
        asked = Asked.from_json(request.json(), self.engine.model_name)
        with self.changed:
            self._await_resume()
            if self.paused is not None:
                raise Unavailable(f"paused ({self.paused}); POST /resume ends it")
            self._check_servable()
            if context := getattr(self.engine.workers[0].model, "context", None):
                asked.check_length(context)
            self.running += 1
        try:
            return Reply(200, asked.reply(*self._generate(asked)))
        finally:
            with self.changed:
                self.running -= 1
                self.changed.notify_all()

    def _generate(self, asked: Asked) -> tuple[list[Row], str, str]:
        """Rows, finish reason, weight version. The lock is free between two tokens: a pause can come in."""
        rows = [Row(list(prompt)) for prompt in asked.prompts for _ in range(asked.n)]
        generator = torch.Generator()
        generator.manual_seed(asked.seed) if asked.seed is not None else generator.seed()
        served = self.engine.writes, self.engine.weight_version
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
        return Reply(200)

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
                raise BadRequest(f"{key} {body[key]!r} is not supported by this stub", f"body.{key}")
        if body.get("model") not in (None, model):
            raise BadRequest(f"the model {body['model']!r} does not exist; {model!r} does", "body.model")
        prompt = body.get("prompt")
        many = isinstance(prompt, list) and not all(type(token) is int for token in prompt)
        return cls(
            [_token_ids(one) for one in (prompt if many else [prompt])],  # type: ignore[union-attr]
            model,
            _within(body, "max_tokens", int, 1, 1 << 20, 16),
            _within(body, "temperature", (int, float), 0, 100, 1.0),
            _within(body, "seed", int, -(1 << 63), (1 << 63) - 1, None),
            _within(body, "n", int, 1, 4096, 1),
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
    tokens: Any = list(prompt.encode()) if isinstance(prompt, str) else prompt
    if not isinstance(tokens, list) or not tokens or not all(type(t) is int and 0 <= t < 256 for t in tokens):
        raise BadRequest("a prompt is text or token ids (bytes, 0 to 255), and not empty", "body.prompt")
    return tokens


def _within(body: Mapping[str, Any], key: str, kind: Any, least: float, most: float, default: Any) -> Any:
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, kind) or isinstance(value, bool) or not least <= value <= most:
        raise BadRequest(f"{key} is a number from {least} to {most}, not {value!r}", f"body.{key}")
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
        scaled = (
            logits - logits.max(-1, keepdim=True).values
        ).double() / temperature  # at most 0: no overflow
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

    def json(self, required: bool = True) -> Any:
        """The body's JSON; None where there is no body. Raises BadRequest, or UnicodeDecodeError."""
        if not self.body:
            return None
        self.parsed = "(a body that cannot be read)"
        if not re.match(r"application/([\w.-]+\+)?json\s*(;|$)", self.content_type.strip().lower()):
            raise BadRequest(f"the content type is {self.content_type or 'missing'!r}, not JSON's", "body")
        text = self.body.decode("utf-8-sig")
        try:
            parsed = json.loads(text, parse_int=_int64 if re.search(r"\d{19}", text) else None)
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


def _error(status: int, kind: str, message: str, param: str | None) -> Reply:
    return Reply(status, {"error": {"message": message, "type": kind, "param": param, "code": status}})


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


# --- The socket --------------------------------------------------------------------------------------


class Connection(http.server.BaseHTTPRequestHandler):
    """HTTP/1.1 with keep-alive: reads a request, hands it to `App.answer`, writes the reply at once."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    disable_nagle_algorithm = True
    wbufsize = -1  # buffered: one write a reply
    app: App

    def serve(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self._read_body()
        if isinstance(body, Reply):
            self._write(body, close=True)
            return
        reply = self.app.answer(self.command, self.path, headers, body)
        self._write(reply, close=reply.status >= 500)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # whatever the method: the routes know which is right
            return self.serve
        raise AttributeError(name)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """For what http.server itself finds wrong: a broken request line, headers without end."""
        self._write(Reply(code, {"detail": message or "Bad Request"}), close=True)

    def _read_body(self) -> bytes | Reply:
        """The whole body, or the refusal of one that cannot be read."""
        length = self.headers.get("content-length", "0")
        if "transfer-encoding" in self.headers:
            return _error(411, "Length Required", "send a content-length, not a chunked body", None)
        if not re.fullmatch(r"\d{1,18}", length):
            return _error(400, "Bad Request", f"content-length is {length[:40]!r}", None)
        if int(length) > (most := self.app.max_body_bytes):
            message = f"the body has {int(length):,} bytes, the server reads {most:,} (--max-body-bytes)"
            return _error(413, "Content Too Large", message, None)
        self.connection.settimeout(BODY_SECONDS)
        body = self.rfile.read(int(length))
        self.connection.settimeout(IDLE_SECONDS)
        if len(body) < int(length):
            raise ConnectionAbortedError("the client hung up in mid-body")
        return body

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
        super().handle_expect_100()
        self.wfile.flush()  # the client waits for it before it sends the body
        return True

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        """`App.answer` logs, a line a call."""


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


# --- The command line --------------------------------------------------------------------------------


def parse_devices(text: str) -> list[torch.device]:
    """`auto`, `cpu`, `cuda`, or a list with one worker an entry: `cuda:0,cuda:1`. Raises ValueError."""
    if text == "auto":
        text = "cuda" if torch.cuda.is_available() else "cpu"
    devices = []
    for entry in text.split(","):
        if not re.fullmatch(r"(cpu|cuda)(:\d{1,3})?", entry):
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


def load_callable(path: str) -> Callable[[], torch.nn.Module]:
    """`MODULE:CALLABLE` as the callable. Raises ValueError."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ValueError(f"--model {path!r} is no MODULE:CALLABLE that can be imported: {exc}") from exc


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
    add("--strict", action="store_true", help="refuse what breaks a SHOULD as well")
    add("--max-body-bytes", type=int, default=MAX_BODY_BYTES, metavar="N", help="413 over it (%(default)s)")
    add("--hold-seconds", type=float, default=0, metavar="S", help="answer an update so much later")
    add("--transcript", metavar="FILE", help="write what was said and seen, for `protocol.py FILE` to judge")
    add("--judge", metavar="COMMAND", help="run a trainer on a free port, {url} in it replaced, and judge it")
    return parser


def make_server(options: argparse.Namespace) -> Server:
    """The listening server. Raises ValueError for options that cannot be, OSError for the address."""
    devices = parse_devices(options.device)
    if options.data_parallel_size < 1 or len(devices) % options.data_parallel_size:
        raise ValueError(
            f"--data-parallel-size {options.data_parallel_size} does not divide {len(devices)} workers"
        )
    model = load_callable(options.model) if options.model else None
    engine = WeightTransferEngine(devices, model, options.strict, options.model or DEFAULT_MODEL)
    engine.hold_seconds = options.hold_seconds
    if options.transcript:
        engine.witness = Witness(options.transcript, engine.workers)
    app = App(engine, options.data_parallel_size, options.max_body_bytes)
    return Server((options.host, options.port), type("Connection", (Connection,), {"app": app}))


def judge(server: Server, url: str, options: argparse.Namespace) -> int:
    """Runs the trainer against this witness, and judges it. Returns the exit code."""
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        command = [word.replace("{url}", url) for word in shlex.split(options.judge)] or [""]
        ended = subprocess.run(command, env=os.environ | {"WEIGHT_SYNC_URL": url}).returncode
    except (OSError, ValueError) as exc:
        print(f"server.py: {options.judge!r} cannot be run: {exc}", file=sys.stderr)
        return 2
    server.shutdown()
    print(f"{command[0]} ended with exit code {ended}; the transcript is {options.transcript}")
    return protocol.verdict(options.transcript, options.strict)


def main() -> str | int | None:
    options = build_parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    sys.path.insert(0, os.getcwd())  # --model of the folder one stands in
    if options.judge is not None:
        options.port = 0
        options.transcript = options.transcript or tempfile.mkstemp(suffix=".jsonl", prefix="weight-sync-")[1]
    try:
        server = make_server(options)
    except ValueError as exc:
        return f"server.py: {exc}"
    except OSError as exc:
        return f"server.py: cannot start on {options.host}:{options.port}: {exc}"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    gc.freeze()  # what is here now stays: a collection need not look at it during a sync
    url = f"http://{options.host}:{server.server_port}"
    print(f"listening on {url}", flush=True)
    with contextlib.suppress(KeyboardInterrupt), server:
        if options.judge is not None:
            return judge(server, url, options)
        server.serve_forever()
    return None


if __name__ == "__main__":
    sys.exit(main())
