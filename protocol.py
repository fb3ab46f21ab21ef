"""What may be said in a weight sync, and when; and who broke which rule. No I/O, no torch.

The contract is vLLM's `docs/training/weight_transfer/ipc.md` ("ipc.md" below) and what vLLM 0.33.0 was
seen to answer. Its laws are data, each written once:

    SEQUENCE   every (state, call) pair: a refusal, or two next states (done, failed)
    RULES      one function a rule: its docstring is the sentence, its body is the check, its
               decorator says how serious it is, where it is written, and how it is broken

A server refuses the first broken rule, an oracle reports all of them, the README prints them, and
the tests send every counter-example. Read on in `server.py` and `trainer.py`: one sync, both sides.

    python protocol.py              print the rules as Markdown
    python protocol.py FILE         judge a transcript (`server.py --transcript` writes one): a line a
                                    finding, the rules held and broken, and what to do. Exit code 0:
                                    nothing found; 1: something (SHOULD counts with --strict only);
                                    2: nothing can be judged: no update in it that was taken, or no transcript
"""

from __future__ import annotations

import argparse
import enum
import itertools
import json
import marshal
import math
import operator
import re
import reprlib
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeGuard

GATE = "VLLM_ALLOW_INSECURE_SERIALIZATION"  # 1 in the server's environment: decode what was pickled
VLLM = "0.33.0"  # every `source` that names a line means a line of this release

# The calls of a sync, and what vLLM says when one has succeeded.
SAID = {
    "init_weight_transfer_engine": "Weight transfer initialized",
    "start_weight_update": "Weight update started",
    "update_weights": "Weights updated",
    "finish_weight_update": "Weight update finished",
    "shutdown_weight_transfer_engine": "Weight transfer shut down",
}
CALLS = (*SAID, "start_draft_weight_update")

# Bytes of one element, under the name that torch prints (`str(dtype)` without `torch.`). The sub-byte
# integers and the quantized dtypes are missing: torch cannot copy them.
DTYPE_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "bits8", "bits1x8", "bits2x4", "bits4x2"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("uint16", "int16", "bits16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
}
# torch's other spellings, which vLLM takes (`getattr(torch, name)`).
DTYPE_ALIASES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "chalf": "complex32",
    "cfloat": "complex64",
    "cdouble": "complex128",
}

ALIAS_OF = {name: alias for alias, name in DTYPE_ALIASES.items()}
HUGE = 1 << 64  # bytes: sizes of junk end here, since Python prints no number of any length
NOT_BASE64 = re.compile(r"[^A-Za-z0-9+/=]")

# Positions in torch's fifteen handle arguments that rules look at (`ipc_codec.IpcArgs` names them all).
ARGS = 15
TENSOR_SIZE, TENSOR_STRIDE, TENSOR_OFFSET, DTYPE, STORAGE_HANDLE, STORAGE_OFFSET = 1, 2, 3, 5, 7, 9
REQUIRES_GRAD, COUNTER, SLOT = 10, 11, 12
Slot = tuple[str, str | bytes, int]  # uuid, counter file, slot: one a export

MUST = "MUST"  # the document says it; broken, it is refused by vLLM or gives wrong weights
SHOULD = "SHOULD"  # the field learned it; where vLLM does not let it pass, `refused_by_vllm` says so


class BadRequest(ValueError):
    """The envelope is wrong: HTTP 400, and no session was touched.

    `param` names the place as vLLM does: `body.update_info`, `query.mode`; None where it names none.
    """

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class Refused(ValueError):
    """A rule was broken: HTTP 500. Carries the rule and what was seen."""

    def __init__(self, rule: Rule, seen: str):
        super().__init__(f"{rule.id}: {rule.text}; seen: {seen} [{rule.source}]")
        self.rule = rule
        self.seen = seen


# --- Messages ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InitInfo:
    """`init_info`: whether the updates that follow are packed (ipc.md, "Inference Side")."""

    packed: Any = False
    unknown: tuple[str, ...] = ()  # keys that ipc.md does not have; never sent

    @classmethod
    def from_json(cls, info: Mapping[str, Any]) -> InitInfo:
        return cls(info.get("packed", False), tuple(key for key in info if key != "packed"))


@dataclass(frozen=True)
class UpdateInfo:
    """`update_info`: one chunk of a sync (ipc.md, "Trainer Without vLLM over HTTP").

    names, dtype_names, shapes: one entry a tensor: the checkpoint name, the torch dtype's name, the
        full shape (elements).
    ipc_handles_pickled: base64 text of pickled handles; unpacked a list with a `{gpu_uuid: args}` per
        name, packed one such dict for the shared buffer.
    tensor_sizes: packed only: the bytes of each tensor in the buffer, in the order of `names`.
    ipc_handles: the handles themselves, which JSON cannot hold; part of vLLM's class, never of HTTP.

    Whatever came over the wire is kept as it came: fields may hold anything, and the rules say what is
    wrong with it. `handles` is what the receiver found in the text (`ipc_codec.decode_handles`; in a
    transcript described in JSON's values), or `{"undecodable": reason}`.
    """

    names: Any = None
    dtype_names: Any = None
    shapes: Any = None
    ipc_handles_pickled: Any = None
    tensor_sizes: Any = None
    ipc_handles: Any = None
    unknown: tuple[str, ...] = ()
    handles: Any = None
    rank_local: bool = False  # an entry of a list: its chunks end with other workers' chunks
    known: UpdateInfo | None = None  # one with the same layout, in the same mode, that broke no rule
    again: bool = False  # word for word one of the sync before, in the same mode, that broke no rule

    WIRE = ("names", "dtype_names", "shapes", "ipc_handles_pickled", "tensor_sizes", "ipc_handles")

    @classmethod
    def from_json(cls, info: Mapping[str, Any]) -> UpdateInfo:
        known = {key: info[key] for key in cls.WIRE if key in info}
        return cls(**known, unknown=tuple(key for key in info if key not in known))

    def to_json(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in self.WIRE if getattr(self, key) is not None}

    @cached_property
    def rows(self) -> list[tuple[str, str, Sequence[int]]]:
        """(name, torch's dtype name, shape) of each tensor; empty where another rule finds them broken."""
        if self.known:
            return self.known.rows
        if not (_strings(self.names) and _strings(self.dtype_names) and isinstance(self.shapes, list)):
            return []
        dtypes = [DTYPE_ALIASES.get(name, name) for name in self.dtype_names]
        if not len(self.names) == len(dtypes) == len(self.shapes):
            return []
        if not all(map(_is_shape, self.shapes)) or not DTYPE_BYTES.keys() >= set(dtypes):
            return []
        return list(zip(self.names, dtypes, self.shapes, strict=True))

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each tensor by its shape and dtype, one for each of `rows`."""
        if self.known:
            return self.known.sizes
        return [min(math.prod(shape) * DTYPE_BYTES[dtype], HUGE) for _, dtype, shape in self.rows]

    @property
    def layout(self) -> bytes:
        """What does not change from sync to sync: equal bytes are equal metadata, type for type."""
        try:
            return marshal.dumps((self.names, self.dtype_names, self.shapes, self.tensor_sizes), 2)
        except ValueError:
            return b""  # nested more deeply than any shape is: a rule finds it

    @property
    def undecodable(self) -> str:
        """Why the text could not be decoded; empty where it could, or was not."""
        return str(self.handles.get("undecodable", "")) if isinstance(self.handles, dict) else ""

    @cached_property
    def labelled(self) -> list[tuple[int, str, Mapping[str, Any]]]:
        """(position, whose handle, handle dict); whose: a tensor's name, or the buffer."""
        if isinstance(self.handles, dict):
            return [] if self.undecodable else [(0, "the buffer", self.handles)]
        names = self.names if _strings(self.names) else []
        labels = itertools.chain(names, itertools.repeat("a handle too many"))
        handles = self.handles if isinstance(self.handles, list) else []
        found = zip(itertools.count(), labels, handles, strict=False)
        return [(at, label, handle) for at, label, handle in found if isinstance(handle, dict)]

    @cached_property
    def entries(self) -> list[tuple[int, str, str, Any]]:
        """(position, whose handle, uuid, what it maps to), for every entry of every handle dict."""
        return [(at, label, *entry) for at, label, handle in self.labelled for entry in handle.items()]

    @cached_property
    def args(self) -> list[tuple[int, str, str, Sequence[Any]]]:
        """Those entries that have fifteen values."""
        return [entry for entry in self.entries if _is_list(entry[3]) and len(entry[3]) == ARGS]

    @cached_property
    def slots(self) -> list[tuple[str, Slot]]:
        """(whose handle, the slot of its reference counter): of two alike the export is one."""
        return [
            (label, (uuid, args[COUNTER], args[SLOT]))
            for _at, label, uuid, args in self.args
            if isinstance(args[COUNTER], (str, bytes)) and type(args[SLOT]) is int
        ]

    @cached_property
    def extents(self) -> dict[tuple[Any, ...], list[tuple[int, int, str, Any]]]:
        """Contiguous tensors by the storage they lie in: (first byte, end, whose, layout), in order."""
        lengths: dict[tuple[Any, ...], int] = {}  # of few layouts there are many tensors
        found: dict[tuple[Any, ...], list[tuple[int, int, str, Any]]] = {}
        for _at, label, uuid, args in self.args:
            dtype, size, stride, offset = (
                args[at] for at in (DTYPE, TENSOR_SIZE, TENSOR_STRIDE, TENSOR_OFFSET)
            )
            if not (isinstance(dtype, str) and _is_shape(size) and _is_shape(stride) and _is_shape([offset])):
                continue
            if max(size, default=0) >= HUGE:
                continue  # junk: products of numbers of any length take seconds
            layout = (dtype.removeprefix("torch."), tuple(size), tuple(stride))
            if layout not in lengths:
                lengths[layout] = _contiguous_bytes(*layout)
            if (length := lengths[layout]) and offset < HUGE:
                start = offset * DTYPE_BYTES[layout[0]]
                storage = (uuid, str(args[STORAGE_HANDLE]), str(args[STORAGE_OFFSET]))
                found.setdefault(storage, []).append((start, start + length, label, layout[:2]))
        return {storage: sorted(extents, key=lambda e: e[:2]) for storage, extents in found.items()}


def _contiguous_bytes(dtype: str, size: Sequence[int], stride: Sequence[int]) -> int:
    """The length of a row-major tensor; 0 for others: of strided views extents overlap where bytes do not."""
    row_major = list(itertools.accumulate(reversed(size[1:]), operator.mul, initial=1))[::-1]
    if any(n > 1 and a != b for n, a, b in zip(size, stride, row_major, strict=False)):
        return 0
    return min(math.prod(size) * DTYPE_BYTES.get(dtype, 0), HUGE)


def _strings(value: Any) -> bool:
    return isinstance(value, list) and {*map(type, value)} <= {str}


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _is_shape(value: Any) -> bool:
    # torch itself goes no further than 64 dimensions; more would only cost time here.
    fits = _is_list(value) and len(value) <= 64 and {*map(type, value)} <= {int}
    return fits and min(value, default=0) >= 0


def _is_sizes(value: Any) -> bool:
    return _is_list(value) and {*map(type, value)} <= {int}


def _plain_uuid(uuid: str) -> str:
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


def required(body: Any, key: str, kind: type | tuple[type, ...]) -> Any:
    """`body[key]`, or BadRequest where the body is no object or has no such key of that type."""
    value = body.get(key) if isinstance(body, dict) else None
    if not isinstance(value, kind):
        raise BadRequest(f"the body has no {key} of the right type, but {reprlib.repr(value)}", f"body.{key}")
    return value


def read_envelope(call: str, body: Any) -> Any:
    """What a call's JSON body carries: init_info, update_info, weight_version, or None.

    `body` is the parsed JSON, None where there was no body. Raises BadRequest: the session is not asked.
    """
    if call == "init_weight_transfer_engine":
        return required(body, "init_info", dict)
    if call == "finish_weight_update":
        given = isinstance(body, dict) and body.get("weight_version") is not None
        return required(body, "weight_version", str) if given else None
    if call != "update_weights":
        return None
    update_info = required(body, "update_info", (dict, list))
    if isinstance(update_info, list) and not all(isinstance(entry, dict) for entry in update_info):
        raise BadRequest("an entry of the update_info list is no object", "body.update_info")
    return update_info


def worker_entries(update_info: Mapping[str, Any] | Sequence[Any], workers: int) -> list[UpdateInfo]:
    """The update of each worker: the one for all, or its own of a rank-local list.

    The entry of a worker is at data_parallel_index * world_size + rank (ipc.md, "Rank-Local Updates").
    Longer lists pass, as in vLLM. Raises Refused where the list is too short.
    """
    if isinstance(update_info, Mapping):
        return [UpdateInfo.from_json(update_info)] * workers
    if len(update_info) < workers:
        raise Refused(RULES["rank-local.counted"], f"{len(update_info)} entries for {workers} workers")
    return [replace(UpdateInfo.from_json(entry), rank_local=True) for entry in update_info[:workers]]


# --- Sequence ---------------------------------------------------------------------------------------


class State(enum.Enum):
    IDLE = "idle"
    UPDATING = "updating"


class Move(NamedTuple):
    """Where a call that was let in leads."""

    done: State  # after it succeeded
    failed: State  # after it failed


class Refuse(NamedTuple):
    """The call is not let in; nothing changes."""

    rule_id: str


IDLE, UPDATING = State
NO_DRAFT = Refuse("draft.none")

# gpu_worker.py:1533-1646: a failed update closes the session, a failed finish leaves it open, init is
# never refused and never required, and packed stays as the last init left it.
SEQUENCE: dict[tuple[State, str], Move | Refuse] = {
    (IDLE, "init_weight_transfer_engine"): Move(IDLE, IDLE),
    (IDLE, "start_weight_update"): Move(UPDATING, IDLE),
    (IDLE, "update_weights"): Refuse("update.after-start"),
    (IDLE, "finish_weight_update"): Refuse("finish.after-start"),
    (IDLE, "shutdown_weight_transfer_engine"): Move(IDLE, IDLE),
    (IDLE, "start_draft_weight_update"): NO_DRAFT,
    (UPDATING, "init_weight_transfer_engine"): Move(UPDATING, UPDATING),
    (UPDATING, "start_weight_update"): Refuse("start.one-at-a-time"),
    (UPDATING, "update_weights"): Move(UPDATING, IDLE),
    (UPDATING, "finish_weight_update"): Move(IDLE, UPDATING),
    (UPDATING, "shutdown_weight_transfer_engine"): Refuse("shutdown.between-updates"),
    (UPDATING, "start_draft_weight_update"): NO_DRAFT,
}


@dataclass
class Session:
    """What one worker knows of the conversation: enough to judge the next message."""

    uuid: str | None = None  # the worker's GPU; None where it is not known
    state: State = IDLE
    packed: bool = False
    initialized: bool = False
    sent: set[str] = field(default_factory=set)  # names that the open sync has carried
    slots: set[Slot] = field(default_factory=set)  # of the exports that it has carried
    filled: int | None = None  # bytes of its last packed chunk
    workers: int = 1  # that read the same handles

    def forbids(self, call: str) -> Refused | None:
        """The refusal that SEQUENCE has for this call now, or None."""
        cell = SEQUENCE[self.state, call]
        if isinstance(cell, Refuse):
            return Refused(RULES[cell.rule_id], f"{call} while {self.state.value}")
        return None

    def broken_rules(self, call: str, message: Any = None) -> list[Refused]:
        """Every message rule about this call that is broken, in the order of RULES.

        `message`: InitInfo, UpdateInfo or None; or an Evidence, for the witness rules.
        """
        return list(self.breaking(call, message))

    def breaking(self, call: str, message: Any) -> Iterator[Refused]:
        """The same one by one: who needs the first only does not pay for the others."""
        about = WITNESS_RULES if isinstance(message, Evidence) else MESSAGE_RULES
        rules = about.get(call, [])
        if isinstance(message, UpdateInfo) and message.again:
            rules = [rule for rule in rules if rule.id in SYNC_RULES]
        elif isinstance(message, UpdateInfo) and message.known:
            rules = [rule for rule in rules if rule.id not in LAYOUT_RULES]
        return (Refused(rule, seen) for rule in rules if (seen := rule.violation(message, self)))

    def settle(self, call: str, message: InitInfo | UpdateInfo | None, ok: bool) -> None:
        """Records how a call that was let in ended."""
        move = SEQUENCE[self.state, call]
        assert isinstance(move, Move), f"{call} was not let in"
        self.state = move.done if ok else move.failed
        if ok and isinstance(message, InitInfo):
            self.packed, self.initialized = bool(message.packed), True
        if ok and isinstance(message, UpdateInfo) and _strings(message.names):
            self.sent.update(message.names)
            self.slots.update(slot for _label, slot in message.slots)
            if self.packed and message.sizes:
                self.filled = sum(message.sizes)
        if ok and call == "start_weight_update":
            self.sent.clear()
            self.slots.clear()
            self.filled = None


# --- Rules ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """What a witness saw of one exchange, at one worker: `seen` holds lists in the order of the handles.

    With an update: `arrival`, `reply`: digests of the lent bytes; `before`: reference counters before they
    were opened; `unopened`, `misfit`: why the server could not take it. With a finish, for all of the sync:
    `names`; `reply`, `finish`: digests; `held`, `after`: counters before and after the release; `missing`:
    what the model has besides. With a start: `left`: the counters of refused exports. `others`: the
    `arrival` lists of the workers before.

    A witness from outside opens nothing. With a finish it has `after`, and `later`: counters when a grace has
    passed; `syncs`: in how many an export was lent; `held` only where somebody else than the server released.
    """

    worker: int
    names: Sequence[str]
    seen: Mapping[str, Any]
    others: Sequence[Any] = ()

    def has(self, key: str) -> bool:
        value = self.seen.get(key)
        return any(item is not None for item in value) if isinstance(value, list) else value is not None

    def column(self, key: str) -> list[int | None]:
        """The values under that key; None where there is nothing to see: an empty tensor has no counter."""
        values = self.seen.get(key)
        fits = isinstance(values, list) and all(v is None or type(v) is int for v in values)
        return values if fits else []  # type: ignore[return-value]

    def differ(self, one: str, two: str) -> str:
        """The first tensor whose values under the two keys are not equal; empty where all are."""
        pairs = zip(self.column(one), self.column(two), strict=False)
        return next(
            (f"{self.label(at)} on worker {self.worker}" for at, (a, b) in enumerate(pairs) if a != b), ""
        )

    def not_one(self, key: str) -> str:
        """The first reference counter under the key that is not 1; empty where all are."""
        values = enumerate(self.column(key))
        return next((f"{self.label(at)}: the counter is {n}" for at, n in values if n not in (1, None)), "")

    @property
    def from_outside(self) -> Iterator[tuple[str, int, list[int]]]:
        """(whose, syncs, [after, later]) of each export that only the server released, and was seen to."""
        columns = map(self.column, ("syncs", "held", "after", "later"))
        rows = itertools.zip_longest(*columns) if self.column("later") else ()
        for at, (syncs, held, *counters) in enumerate(rows):
            if held is None and (known := [n for n in counters if n is not None]):
                yield self.label(at), syncs or 1, known

    def label(self, at: int) -> str:
        names = self.seen.get("names") or self.names
        return names[at] if _strings(names) and at < len(names) else f"tensor {at}"


Violation = Callable[[Any, Session], str]
Break = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Rule:
    """One sentence of the contract, with its check and its counter-examples.

    id: stable: never renumbered, never reused.
    call: the call whose message it is about.
    level: MUST or SHOULD; it grades the sender.
    text: what holds, as a fact.
    source: where it is written or was learned.
    refused_by_vllm: "always", "packed" (only in packed mode) or "never"; a receiver is blamed for
        accepting only what vLLM would have refused.
    check: (message, session) -> what was seen that breaks it, empty while it holds. True where it does
        not apply, and never raises, whatever the message holds. None: SEQUENCE or the judge decides.
    evidence: the check looks at an Evidence, under these keys (a space between), and not at a message.
    breaks: each makes from a good `init_info` / `update_info` the smallest bad one. There the value of
        `ipc_handles_pickled` is the handles themselves; whoever sends it encodes what is no text. The
        good one has two tensors or more, none of them empty.
    calls: the shortest conversation whose last call can break it, where that is not an update between
        start and finish; a rule without `breaks` is broken by these very calls.
    """

    id: str
    level: str
    refused_by_vllm: str
    source: str
    text: str
    call: str
    check: Violation | None = None
    breaks: tuple[Break, ...] = ()
    calls: tuple[str, ...] = ()
    party: str = "trainer"
    evidence: str = ""

    @property
    def mode(self) -> str:
        """`packed` or `unpacked` where the rule is about one mode only, else `both`."""
        prefix = self.id.split(".")[0]
        return prefix if prefix in ("packed", "unpacked") else "both"

    def applies(self, session: Session) -> bool:
        return self.mode != ("unpacked" if session.packed else "packed")

    def violation(self, message: Any, session: Session) -> str:
        """What was seen that breaks the rule; empty while it holds, or where it does not apply."""
        if self.check is None or not self.applies(session):
            return ""
        return self.check(message, session)

    def holds(self, message: Any, session: Session) -> bool:
        return not self.violation(message, session)


RULES: dict[str, Rule] = {}

HTTP = 'ipc.md, "Trainer Without vLLM over HTTP"'
WORKER = "gpu_worker.py:1533-1646"

# Rules about the order of calls, which SEQUENCE decides; `calls` ends with the one that is refused.
for _id, _text, _source, *_calls in (
    ("start.one-at-a-time", "one weight update is open at a time",
     "gpu_worker.py:1569", "start_weight_update", "start_weight_update"),
    ("update.after-start", "an update lies between start and finish; a failed one ends the session",
     WORKER, "update_weights"),
    ("finish.after-start", "finish_weight_update ends an open weight update", WORKER, "finish_weight_update"),
    ("shutdown.between-updates", "a shutdown comes when no weight update is open",
     WORKER, "start_weight_update", "shutdown_weight_transfer_engine"),
    ("draft.none", "start_draft_weight_update is for a server with a draft model",
     "no draft models here: answered as by a vLLM without one", "start_draft_weight_update"),
):  # fmt: skip
    RULES[_id] = Rule(_id, MUST, "always", _source, _text, _calls[-1], calls=tuple(_calls))


def rule(id: str, level: str, refused_by_vllm: str, source: str, *calls: str, **more: str) -> Any:
    """Decorator: enters the function in RULES; its docstring is the rule's sentence.

    calls: the conversation whose last message it looks at, where that is not an update.
    """

    def enter(check: Any) -> Any:
        breaks = getattr(check, "breaks", ())
        call = calls[-1] if calls else "update_weights"
        RULES[id] = Rule(
            id, level, refused_by_vllm, source, check.__doc__, call, check, breaks, calls, **more
        )
        return check

    return enter


def witness_rule(
    id: str, level: str, source: str, evidence: str, call: str = "update_weights", **more: str
) -> Any:
    """Decorator, for a rule about what only a witness can see. vLLM refuses none of these."""
    return rule(id, level, "never", source, call, evidence=evidence, **more)


def broken_by(*breaks: Break) -> Any:
    """Decorator: the counter-examples of the rule below it."""

    def keep(check: Any) -> Any:
        check.breaks = breaks
        return check

    return keep


# How counter-examples are made: one thing changed, nothing else.
def _change(key: str, change: Callable[[Any], Any]) -> Break:
    return lambda good: {**good, key: change(good[key])}


def _first(key: str, change: Callable[[Any], Any]) -> Break:
    return _change(key, lambda items: [change(items[0]), *items[1:]])


def _without(key: str) -> Break:
    return lambda good: {k: v for k, v in good.items() if k != key}


def _plus(**more: Any) -> Break:
    return lambda good: {**good, **more}


def _handles(change: Callable[[str, Any], tuple[str, Any]]) -> Break:
    """A change to every `uuid: args` entry of the handles, in either form."""

    def bad(handles: Any) -> Any:
        if isinstance(handles, list):
            return [bad(handle) for handle in handles]
        return dict(change(uuid, args) for uuid, args in handles.items())

    return _change("ipc_handles_pickled", bad)


def _replace(args: Any, changes: Mapping[int, Any]) -> Any:
    """The arguments with other values at some positions; a list stays a list, a tuple a tuple."""
    return type(args)(changes.get(at, arg) for at, arg in enumerate(args))


def _counts(**lists: Any) -> str:
    """What was seen, where these are lists of different lengths; else nothing."""
    if not all(isinstance(items, list) for items in lists.values()):
        return ""
    differ = len({len(items) for items in lists.values()}) > 1
    return ", ".join(f"{len(items)} {key}" for key, items in lists.items()) if differ else ""


def _short(dtype: str, shape: Sequence[Any]) -> str:
    return f"{dtype[:40]} {reprlib.repr(shape)}"


def _seen(key: str, value: Any) -> str:
    return f"{key} is {reprlib.repr(value)}"


# Every rule's function is called _: its id is its name.


@rule("init.fields", MUST, "always", HTTP, "init_weight_transfer_engine")
@broken_by(_plus(backend="ipc"))
def _(init: InitInfo, session: Session) -> str:
    """init_info has no other field than packed"""
    return ", ".join(map(reprlib.repr, init.unknown))


@rule("init.packed-bool", SHOULD, "never", "vLLM takes any value's truth", "init_weight_transfer_engine")
@broken_by(_change("packed", lambda packed: str(packed).lower()))
def _(init: InitInfo, session: Session) -> str:
    """packed is true or false"""
    return "" if isinstance(init.packed, bool) else _seen("packed", init.packed)


@rule(
    "init.first", SHOULD, "never", "vLLM keeps the mode that the trainer before left", "start_weight_update"
)
def _(message: None, session: Session) -> str:
    """init_weight_transfer_engine comes before the first sync"""
    return "" if session.initialized else "no init since the server started"


@rule("rank-local.counted", MUST, "always", 'ipc.md, "Rank-Local Updates"')
def _(update: UpdateInfo, session: Session) -> str:
    """a rank-local list has the entry of a worker at data_parallel_index * world_size + rank"""
    return ""  # `worker_entries` counts: past it an update has no list


@rule("update.fields", MUST, "always", HTTP)
@broken_by(_without("names"), _without("dtype_names"), _without("shapes"), _plus(packed=True))
def _(update: UpdateInfo, session: Session) -> str:
    """names and dtype_names are lists of strings, shapes is a list; there are only ipc.md's fields"""
    if update.unknown:
        return f"the field {reprlib.repr(update.unknown[0])}"
    for key in ("names", "dtype_names"):
        if not _strings(getattr(update, key)):
            return _seen(key, getattr(update, key))
    return "" if isinstance(update.shapes, list) else _seen("shapes", update.shapes)


@rule("update.lengths", MUST, "always", HTTP)
@broken_by(_change("dtype_names", lambda names: names[:-1]), _change("shapes", lambda shapes: shapes[:-1]))
def _(update: UpdateInfo, session: Session) -> str:
    """names, dtype_names and shapes have the same length"""
    return _counts(names=update.names, dtype_names=update.dtype_names, shapes=update.shapes)


@rule("names.unique", MUST, "never", "vLLM takes the first of two, and counts a layer twice (vllm #44814)")
@broken_by(_change("names", lambda names: [names[0], *names[:-1]]))
def _(update: UpdateInfo, session: Session) -> str:
    """a name is sent once in a sync"""
    names = update.names if _strings(update.names) else []
    if len(set(names)) == len(names) and session.sent.isdisjoint(names):
        return ""
    counted = Counter(itertools.chain(session.sent, names))
    return next(f"{reprlib.repr(name)} twice" for name in names if counted[name] > 1)


@rule("dtype.real", MUST, "packed", HTTP + "; unpacked, vLLM does not look")
@broken_by(_first("dtype_names", lambda name: "torch." + name), _first("dtype_names", lambda name: "Tensor"))
def _(update: UpdateInfo, session: Session) -> str:
    """a dtype name is a torch dtype's: bfloat16, not torch.bfloat16"""
    names = update.dtype_names if _strings(update.dtype_names) else []
    return next((reprlib.repr(n) for n in names if n not in DTYPE_BYTES and n not in DTYPE_ALIASES), "")


@rule("dtype.canonical", SHOULD, "never", "getattr(torch, name) takes them too; other engines look names up")
@broken_by(_change("dtype_names", lambda names: [ALIAS_OF.get(name, name) for name in names]))
def _(update: UpdateInfo, session: Session) -> str:
    """a dtype name is the one torch prints: float16, not half"""
    names = update.dtype_names if _strings(update.dtype_names) else []
    return next((reprlib.repr(name) for name in names if name in DTYPE_ALIASES), "")


@rule("shapes.sizes", MUST, "never", HTTP + "; unpacked, vLLM does not look")
@broken_by(_first("shapes", lambda shape: [-1]), _first("shapes", lambda shape: [*shape, True]))
def _(update: UpdateInfo, session: Session) -> str:
    """a shape is a list of at most 64 ints, none of them negative"""
    shapes = update.shapes if isinstance(update.shapes, list) else []
    return next((reprlib.repr(shape) for shape in shapes if not _is_shape(shape)), "")


@rule("handles.one-form", MUST, "always", "ipc_engine.py:79-93")
@broken_by(_plus(ipc_handles=[]), _without("ipc_handles_pickled"))
def _(update: UpdateInfo, session: Session) -> str:
    """exactly one of ipc_handles and ipc_handles_pickled is given"""
    given = (update.ipc_handles is not None) + (update.ipc_handles_pickled is not None)
    return ("neither", "", "both")[given]


@rule("handles.text", MUST, "always", HTTP + ": ipc_handles is not JSON-serializable")
@broken_by(lambda good: {**_without("ipc_handles_pickled")(good), "ipc_handles": [{}] * len(good["names"])})
def _(update: UpdateInfo, session: Session) -> str:
    """over HTTP the handles travel as the text ipc_handles_pickled"""
    text = update.ipc_handles_pickled
    if update.ipc_handles is not None and text is None:
        return "ipc_handles"
    return "" if text is None or isinstance(text, str) else _seen("ipc_handles_pickled", text)


@rule("handles.base64", SHOULD, "never", "vLLM drops what is outside the alphabet; other decoders do not")
def _(update: UpdateInfo, session: Session) -> str:
    """ipc_handles_pickled has base64's alphabet only: no line breaks, no spaces"""
    text = update.ipc_handles_pickled
    return reprlib.repr(found[0]) if isinstance(text, str) and (found := NOT_BASE64.search(text)) else ""


@rule("handles.decodable", MUST, "always", HTTP)
@broken_by(_plus(ipc_handles_pickled="bm90IGEgcGlja2xl"))
def _(update: UpdateInfo, session: Session) -> str:
    """ipc_handles_pickled is base64(pickle.dumps(handles)), and holds nothing but handles"""
    return update.undecodable


@rule("handles.form", MUST, "always", HTTP + "; ipc_engine.py:205")
@broken_by(_change("ipc_handles_pickled", lambda h: h[0] if isinstance(h, list) else [h]))
def _(update: UpdateInfo, session: Session) -> str:
    """unpacked, the handles are a list of dicts; packed, one dict for the shared buffer"""
    handles = update.handles
    if handles is None or update.undecodable:
        return ""
    if session.packed or not isinstance(handles, list):
        fits = session.packed and isinstance(handles, dict)
        mode = f"{'packed' if session.packed else 'unpacked'} mode, which init_weight_transfer_engine sets"
        return "" if fits else f"a {type(handles).__name__} in {mode}"
    return next((f"a {type(h).__name__} in the list" for h in handles if not isinstance(h, dict)), "")


@rule("unpacked.handles-counted", MUST, "always", HTTP)
@broken_by(_change("ipc_handles_pickled", lambda handles: handles[:-1]))
def _(update: UpdateInfo, session: Session) -> str:
    """unpacked, there is one handle per name"""
    return _counts(names=update.names, handles=update.handles)


@rule("handle.bare-arguments", MUST, "always", HTTP + ": {gpu_uuid: reduce_tensor(t)[1]}")
@broken_by(
    _handles(lambda uuid, args: (uuid, ("rebuild_cuda_tensor", args))),
    _handles(lambda uuid, args: (uuid, args[:-1])),
)
def _(update: UpdateInfo, session: Session) -> str:
    """a uuid maps to the bare fifteen arguments, reduce_tensor(t)[1], without the function"""
    for _at, label, _uuid, args in update.entries:
        if not _is_list(args):
            return f"{label}: a {type(args).__name__}"
        if len(args) != ARGS:
            pair = len(args) == 2 and _is_list(args[1])
            return f"{label}: {'a (function, arguments) pair' if pair else f'{len(args)} values'}"
    return ""


def _gpus(handle: Mapping[str, Any]) -> str:
    return ", ".join(uuid[:80] for uuid in itertools.islice(handle, 8)) or "no GPU"


@rule("handle.this-gpu", MUST, "always", "ipc_engine.py:225")
@broken_by(_handles(lambda uuid, args: ("00000000-0000-4000-8000-00000000dead", args)))
def _(update: UpdateInfo, session: Session) -> str:
    """a handle has an entry for every GPU that the server uses"""
    uuid, least = session.uuid, 1 if update.rank_local else session.workers
    for _at, label, handle in update.labelled:
        if uuid and uuid not in handle and uuid not in list(map(_plain_uuid, handle)):
            return f"{label}: {_gpus(handle)}, and the worker's GPU is {uuid}"
        if not uuid and len(handle) < least:
            return f"{label}: {_gpus(handle)}, and the server has {least} workers"
    return ""


@rule("handle.uuid-plain", MUST, "always", HTTP + ": without the GPU- prefix")
@broken_by(
    _handles(lambda uuid, args: ("GPU-" + uuid, args)), _handles(lambda uuid, args: (uuid.upper(), args))
)
def _(update: UpdateInfo, session: Session) -> str:
    """a GPU's uuid is written as torch prints it: lower case, without GPU-"""
    for _at, label, handle in update.labelled:
        for uuid in handle if session.uuid not in handle else ():
            if uuid != _plain_uuid(uuid) and session.uuid in (None, _plain_uuid(uuid)):
                return f"{label}: {reprlib.repr(uuid)}"
    return ""


@rule("handle.detached", SHOULD, "never", "one that requires grad keeps the mapping alive in a clone")
@broken_by(_handles(lambda uuid, args: (uuid, _replace(args, {REQUIRES_GRAD: True}))))
def _(update: UpdateInfo, session: Session) -> str:
    """a tensor is detached before it is exported"""
    return next(
        (f"{label} requires grad" for _, label, _, args in update.args if args[REQUIRES_GRAD] is True), ""
    )


def _share_a_slot(handles: list[Any]) -> list[Any]:
    first, second, *rest = handles
    slots = {uuid: {COUNTER: args[COUNTER], SLOT: args[SLOT]} for uuid, args in first.items()}
    return [first, {uuid: _replace(args, slots[uuid]) for uuid, args in second.items()}, *rest]


@rule("unpacked.own-export", SHOULD, "never", "torch: one reduce_tensor pays for one open and release")
@broken_by(_change("ipc_handles_pickled", _share_a_slot))
def _(update: UpdateInfo, session: Session) -> str:
    """unpacked, no reference-counter slot is in two handles of a sync"""
    slots: set[Slot] = set()
    for label, slot in update.slots:
        if slot in slots or slot in session.slots:
            return f"{label}: the slot of another handle"
        slots.add(slot)
    return ""


@rule("unpacked.tied-in-pairs", SHOULD, "never", "two names may be tied; three are a buffer that was reused")
def _(update: UpdateInfo, session: Session) -> str:
    """unpacked, at most two names are on the same bytes"""
    for extents in update.extents.values():
        for (start, end), same in itertools.groupby(extents, key=lambda e: e[:2]):
            if len(names := [label for _, _, label, _ in same]) > 2:
                return f"{', '.join(names[:3])} on bytes {start} to {end} of one storage"
    return ""


@rule("unpacked.overlap-alike", SHOULD, "never", "a buffer was reused, or a shape is wrong")
def _(update: UpdateInfo, session: Session) -> str:
    """unpacked, tensors whose bytes overlap have the same bytes, dtype and shape"""
    for extents in update.extents.values():
        for one, two in itertools.pairwise(extents):
            if two[0] < one[1] and (one[:2], one[3]) != (two[:2], two[3]):
                return (
                    f"{one[2]} on bytes {one[0]} to {one[1]}, {two[2]} on {two[0]} to {two[1]} of one storage"
                )
    return ""


@rule("unpacked.handle-matches", MUST, "never", HTTP + ": full shapes, dtype names; vLLM does not look")
@broken_by(
    _first("shapes", lambda shape: [1, *shape]),
    _first("dtype_names", lambda name: "uint8" if name != "uint8" else "int8"),
)
def _(update: UpdateInfo, session: Session) -> str:
    """unpacked, a handle has the dtype and the shape that dtype_names and shapes say"""
    said = [(dtype, list(shape)) for _name, dtype, shape in update.rows]
    for at, label, _uuid, args in update.args if isinstance(update.handles, list) else ():
        if at < len(said) and isinstance(args[DTYPE], str) and _is_list(args[TENSOR_SIZE]):
            has = (args[DTYPE].removeprefix("torch."), list(args[TENSOR_SIZE]))
            if has != said[at]:
                return f"{label}: {_short(*has)} in the handle, {_short(*said[at])} in the update"
    return ""


@rule("unpacked.no-tensor-sizes", SHOULD, "never", HTTP + ": packed only; vLLM's trainer sends null")
@broken_by(_plus(tensor_sizes=[1, 1]))
def _(update: UpdateInfo, session: Session) -> str:
    """unpacked, tensor_sizes is absent or null"""
    return "" if update.tensor_sizes is None else _seen("tensor_sizes", update.tensor_sizes)


@rule("packed.tensor-sizes", MUST, "packed", "ipc_engine.py:203")
@broken_by(_without("tensor_sizes"), _change("tensor_sizes", lambda sizes: list(map(str, sizes))))
def _(update: UpdateInfo, session: Session) -> str:
    """packed, tensor_sizes is a list of byte counts"""
    return "" if _is_sizes(update.tensor_sizes) else _seen("tensor_sizes", update.tensor_sizes)


@rule("packed.sizes-counted", MUST, "never", HTTP + "; vLLM drops the tensors that have no size")
@broken_by(_change("tensor_sizes", lambda sizes: sizes[:-1]))
def _(update: UpdateInfo, session: Session) -> str:
    """packed, there is one tensor size per name"""
    return _counts(names=update.names, tensor_sizes=update.tensor_sizes)


@rule("packed.size-of-shape", MUST, "packed", HTTP + ": byte size of each tensor")
@broken_by(_first("tensor_sizes", lambda size: size - 1))
def _(update: UpdateInfo, session: Session) -> str:
    """packed, a tensor's size is its elements times the bytes of its dtype"""
    said, sizes = update.tensor_sizes, update.sizes
    if said == sizes or not _is_sizes(said) or len(said) != len(sizes):
        return ""
    at = next((at for at, size in enumerate(sizes) if size != said[at]), None)
    return "" if at is None else f"{update.names[at]}: {said[at]} bytes said, {sizes[at]} by shape and dtype"


@rule("packed.buffer-form", MUST, "never", HTTP + ": one uint8 buffer")
@broken_by(
    _handles(
        lambda uuid, args: (uuid, _replace(args, {TENSOR_SIZE: (1, *args[1]), TENSOR_STRIDE: (*args[1], 1)}))
    )
)
def _(update: UpdateInfo, session: Session) -> str:
    """packed, the buffer is one contiguous uint8 tensor with one dimension"""
    for _at, _label, _uuid, args in update.args if isinstance(update.handles, dict) else ():
        dtype, size, stride = args[DTYPE], args[TENSOR_SIZE], args[TENSOR_STRIDE]
        if dtype != "torch.uint8" or not _is_list(size) or len(size) != 1 or stride not in ([1], (1,)):
            return "dtype {}, size {}, stride {}".format(*map(reprlib.repr, (dtype, size, stride)))
    return ""


def _shrink_buffer(good: dict[str, Any]) -> dict[str, Any]:
    room = sum(good["tensor_sizes"]) - 1
    return _handles(
        lambda uuid, args: (uuid, _replace(args, {TENSOR_SIZE: type(args[TENSOR_SIZE])([room])}))
    )(good)


@rule("packed.within-buffer", MUST, "packed", 'ipc.md, "Packed (Chunked) Transfer"')
@broken_by(_shrink_buffer)
def _(update: UpdateInfo, session: Session) -> str:
    """packed, the sizes together are at most the buffer's"""
    total = sum(update.sizes)
    for _at, _label, _uuid, args in update.args if isinstance(update.handles, dict) else ():
        size = args[TENSOR_SIZE]
        if _is_list(size) and len(size) == 1 and type(size[0]) is int and size[0] < total:
            return f"{total} bytes of tensors in a buffer of {size[0]}"
    return ""


@rule(
    "packed.aligned", SHOULD, "packed", "vllm #57665: torch refuses the view; a copy of the slice can be read"
)
@broken_by(lambda good: {k: v[::-1] if isinstance(v, list) else v for k, v in good.items()})
def _(update: UpdateInfo, session: Session) -> str:
    """in a packed buffer a tensor starts at a multiple of its item size"""
    starts = itertools.accumulate(update.sizes, initial=0)
    for (name, dtype, _shape), start in zip(update.rows, starts, strict=False):
        if start % DTYPE_BYTES[dtype]:
            return f"{name}: {dtype} at byte {start}"
    return ""


@rule("packed.chunk-full", SHOULD, "never", "one call per tensor is very slow (vllm #24163)")
def _(update: UpdateInfo, session: Session) -> str:
    """a chunk is closed only before a tensor that would overflow it, not with half the buffer free"""
    buffer: Any = next((args[TENSOR_SIZE] for _at, _label, _uuid, args in update.args), None)
    if session.filled is None or update.rank_local or not update.sizes:
        return ""
    if not _is_sizes(buffer) or len(buffer) != 1 or session.filled + update.sizes[0] > buffer[0] // 2:
        return ""
    return f"{session.filled} bytes in a buffer of {buffer[0]}, then {update.names[0]} of {update.sizes[0]}"


@rule(
    "packed.one-export", SHOULD, "never", HTTP + ": export one uint8 buffer once and reuse it for every chunk"
)
def _(update: UpdateInfo, session: Session) -> str:
    """packed, the chunks of a sync carry one export of one buffer"""
    slots = {slot for _label, slot in update.slots}
    is_new = session.filled is not None and not slots <= session.slots
    return "another export than the chunk before" if is_new else ""


def printable(text: str) -> str:
    """In one line, whatever a name in it holds: it cannot look like a line of its own, or move a cursor."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _one_line(value: Any) -> str:
    return " ".join(value.split()) if isinstance(value, str) else reprlib.repr(value)


@witness_rule("loan.until-reply", MUST, HTTP + ": do not overwrite until the call returns", "reply")
def _(evidence: Evidence, session: Session) -> str:
    """what is lent does not change between the request and its reply, on any rank"""
    return evidence.differ("arrival", "reply")


@witness_rule("workers.same-bytes", MUST, 'ipc.md, "How It Works": every rank has the full tensor', "arrival")
def _(evidence: Evidence, session: Session) -> str:
    """every worker is lent the same bytes, in the same order"""
    mine = evidence.column("arrival")
    for worker, theirs in enumerate(evidence.others):
        if isinstance(theirs, list) and len(theirs) == len(mine) and theirs != mine:
            at = next(at for at, (a, b) in enumerate(zip(theirs, mine, strict=True)) if a != b)
            return f"{evidence.label(at)} differs on workers {worker} and {evidence.worker}"
    return ""


@witness_rule(
    "export.fresh", SHOULD, "torch: one reduce_tensor pays for one open and release", "before later"
)
def _(evidence: Evidence, session: Session) -> str:
    """an export that was released is not lent again unless it is renewed: its counter is 1 when it comes"""
    for label, syncs, counters in evidence.from_outside:
        if syncs > 1 and min(counters) < 0:
            return f"{label}: lent in {syncs} syncs, and the counter is {min(counters)}"
    return evidence.not_one("before")


@witness_rule("handle.opens", MUST, "torch's rebuild_cuda_tensor", "unopened")
def _(evidence: Evidence, session: Session) -> str:
    """a handle's arguments are torch's, lie inside their storage, and can be opened on this host"""
    return _one_line(evidence.seen.get("unopened") or "")


@witness_rule("weights.fit", MUST, "vLLM's load_weights", "misfit")
def _(evidence: Evidence, session: Session) -> str:
    """names, dtypes and shapes are those of the server's model"""
    return _one_line(evidence.seen.get("misfit") or "")


@witness_rule(
    "loan.until-finish", MUST, HTTP + ": keep every tensor until finish", "finish", "finish_weight_update"
)
def _(evidence: Evidence, session: Session) -> str:
    """a tensor that was lent unpacked does not change before the finish"""
    return evidence.differ("reply", "finish")


@witness_rule(
    "weights.complete",
    SHOULD,
    "vLLM leaves what a sync does not name as it was, or uninitialised",
    "missing",
    "finish_weight_update",
)
def _(evidence: Evidence, session: Session) -> str:
    """a sync names every weight of the server's model"""
    return _one_line(evidence.seen.get("missing") or "")


@witness_rule("export.kept", MUST, "torch: memory is reclaimed at counter 0", "held", "finish_weight_update")
def _(evidence: Evidence, session: Session) -> str:
    """only the receiver releases what it has opened: the counter is 1 until the finish"""
    return evidence.not_one("held")


@witness_rule(
    "export.released",
    MUST,
    "torch: memory is reclaimed at counter 0",
    "after later",
    "finish_weight_update",
    party="server",
)
def _(evidence: Evidence, session: Session) -> str:
    """after the finish every export that was opened has been released once: its counter is 0"""
    for label, syncs, counters in evidence.from_outside:
        if min(counters) < 0:
            if syncs == 1:
                return f"{label}: released {1 - min(counters)} times"
        elif counters[-1] > 0:
            return f"{label}: left open, the counter is {counters[-1]}"
        elif counters[0] > 0:
            return f"{label}: released too late, the counter was {counters[0]} when the finish was answered"
    pairs = enumerate(zip(evidence.column("held"), evidence.column("after"), strict=False))
    return next((f"{evidence.label(at)}: the counter is {n}" for at, (h, n) in pairs if h == 1 and n), "")


@witness_rule(
    "export.settled", SHOULD, "what nobody opened is never reclaimed", "left", "start_weight_update"
)
def _(evidence: Evidence, session: Session) -> str:
    """exports of a refused update are settled before the next sync"""
    left = evidence.column("left").count(1)
    return f"{left} exports still count 1" if left else ""


# Rules that the judge itself decides: they are about more than one exchange, or about none.
for _id, _level, _refused, _source, _text, _call in (
    ("body.envelope", MUST, "always", HTTP,
     "a call has the JSON body that the document gives it", "update_weights"),
    ("call.one-in-flight", SHOULD, "never", "vllm #37476",
     "a call is made after the call before it was answered", "update_weights"),
    ("sync.finished", MUST, "never", HTTP, "a sync that was started is finished", "finish_weight_update"),
    ("refusal.explained", MUST, "never", "no answer (502 to 504) or no reason: the server's; else unclear",
     "a refused call breaks a rule", "update_weights"),
):  # fmt: skip
    RULES[_id] = Rule(_id, _level, _refused, _source, _text, _call)

MESSAGE_RULES: dict[str, list[Rule]] = {}
WITNESS_RULES: dict[str, list[Rule]] = {}
ABOUT_HANDLES = {  # what is not known of an update whose handles nobody has described
    *(id for id in RULES if id.startswith("handle.")),
    *("handles.decodable", "handles.form", "unpacked.handles-counted", "unpacked.handle-matches"),
    *("unpacked.own-export", "unpacked.tied-in-pairs", "unpacked.overlap-alike"),
    *("packed.buffer-form", "packed.within-buffer", "packed.chunk-full", "packed.one-export"),
}
LAYOUT_RULES = {  # what need not be looked at again where the layout is known
    *("update.lengths", "dtype.real", "dtype.canonical", "shapes.sizes"),
    *("packed.tensor-sizes", "packed.sizes-counted", "packed.size-of-shape", "packed.aligned"),
}
SYNC_RULES = {  # what depends on the updates before, in the same sync
    *("names.unique", "unpacked.own-export", "packed.chunk-full", "packed.one-export")
}
for _rule in RULES.values():
    if _rule.check is not None:
        (WITNESS_RULES if _rule.evidence else MESSAGE_RULES).setdefault(_rule.call, []).append(_rule)
WITNESS_RULES["finish_weight_update"].append(RULES["export.fresh"])  # from outside it shows only there


# --- The judge --------------------------------------------------------------------------------------

TRANSCRIPT = {"transcript": "weight-sync", "version": 1}  # the first line has these, and `uuids`
MOST_ALIKE = 3  # findings that are written out, of one party about one rule in one call
NO_ANSWER = (502, 503, 504)  # of what stands before the server, or before its engine: the call may be done


class Finding(NamedTuple):
    """Who broke which rule, where: `at` is the exchange's line in the transcript, from 1."""

    at: int
    call: str
    party: str
    rule: Rule
    seen: str
    status: int

    def __str__(self) -> str:
        rule = self.rule
        return printable(
            f"{self.at:>5} {self.call:<28} {self.party:<8} {rule.level:<6} {rule.id}: {rule.text}; "
            f"seen: {self.seen} [answered {self.status}; {rule.source}]"
        )


def check(exchanges: Iterable[Mapping[str, Any]], exercised: set[str] | None = None) -> list[Finding]:
    """Judges the lines of a transcript, the header first (README, "Transcripts").

    `exercised` is filled with the ids of the rules that the exchanges could have broken. Raises
    ValueError where a line is none of a transcript.
    """
    lines = iter(exchanges)
    header = next(lines, {})
    if not isinstance(header, Mapping) or any(header.get(key) != value for key, value in TRANSCRIPT.items()):
        raise ValueError(f"the first line is no transcript's header: {reprlib.repr(header)}")
    judge = Judge.of(header, set() if exercised is None else exercised)
    for at, line in enumerate(lines, 2):
        judge.hear(at, line)
    return judge.conclude()


@dataclass
class Judge:
    """One pass over the exchanges. Every worker's session is replayed."""

    sessions: list[Session]
    exercised: set[str]
    findings: list[Finding] = field(default_factory=list)
    last: tuple[int, str, int] = (0, "", 0)
    ended: float = 0.0
    lost: bool = False  # nobody knows whether an update is open, until a call that succeeds shows it
    joined: bool = False  # the server was there before: who knows which mode it was told
    held: bool = False  # updates were answered late, so that who does not wait for the answer shows

    @classmethod
    def of(cls, header: Mapping[str, Any], exercised: set[str]) -> Judge:
        uuids = header.get("uuids")
        known = isinstance(uuids, list) and all(uuid is None or isinstance(uuid, str) for uuid in uuids)
        each: Any = uuids if known and uuids else [None]
        sessions = [Session(uuid=uuid, workers=len(each)) for uuid in each]
        held = bool(header.get("hold_seconds"))
        joined = "forwarded" in header
        return cls(sessions, exercised, joined=joined, lost=joined, held=held)

    def hear(self, at: int, line: Any) -> None:
        call, status = (line.get("call"), line.get("status")) if isinstance(line, Mapping) else (None, None)
        if call not in CALLS or type(status) is not int:
            raise ValueError(f"line {at} has no call and status of a transcript: {reprlib.repr(line)}")
        self.last = (at, call, status)
        self._time(line)
        error = line.get("error")
        if status in NO_ANSWER:
            self.lost = True
            self._find([Refused(RULES["refusal.explained"], _one_line(error))], party="server")
        try:
            given = read_envelope(call, line.get("body"))
        except BadRequest as exc:
            self._find([Refused(RULES["body.envelope"], str(exc))])
            return
        self.exercised.add("body.envelope")
        if isinstance(line.get("body"), str) and (status == 400 or call == "finish_weight_update"):
            self._find([Refused(RULES["body.envelope"], line["body"])], let_in=False)  # vLLM does, a finish
            if status == 400:
                return
        open_to = [state for state in State if isinstance(SEQUENCE[state, call], Move)]
        if self.lost and self._succeeded and len(open_to) == 1:  # which says where the session was
            self.lost = False
            for session in self.sessions:
                session.state = open_to[0]
        refusal = None if self.lost and open_to else self.sessions[0].forbids(call)
        self.exercised |= {
            rule.id for rule in RULES.values() if rule.call == call and rule.calls and not rule.evidence
        }
        broken = [refusal] if refusal else self._content(call, given, line)
        found = self._find(broken)
        silent = isinstance(error, str) and not error.strip()
        open_perhaps = self.lost and len(open_to) == 1  # or not: then that is why it is refused
        if status not in NO_ANSWER and not self._succeeded and not found and (silent or not open_perhaps):
            party = "server" if silent else "unclear"
            self._find([Refused(RULES["refusal.explained"], _one_line(error) or "no reason")], party)
        if self.joined and 400 <= status < 500:  # vLLM leaves the update open; others may not
            self.lost = True

    @property
    def _succeeded(self) -> bool:
        return 200 <= self.last[2] < 300

    def _time(self, line: Mapping[str, Any]) -> None:
        began, ended = line.get("began"), line.get("ended")
        if _is_time(began) and _is_time(ended):
            self.exercised.add("call.one-in-flight")
            if began < self.ended:
                seen = f"it came {self.ended - began:.3f} s before the answer to another"
                self._find([Refused(RULES["call.one-in-flight"], seen)])
            self.ended = max(self.ended, ended)

    def _content(self, call: str, given: Any, line: Mapping[str, Any]) -> list[Refused]:
        """The rules that the message breaks, and the evidence, at any worker; and the session goes on."""
        messages: list[Any] = [None] * len(self.sessions)
        broken: dict[str, Refused] = {}
        try:
            if call == "update_weights":
                messages = _shown(worker_entries(given, len(self.sessions)), given, line)
            elif call == "init_weight_transfer_engine":
                messages = [InitInfo.from_json(given)] * len(self.sessions)
        except Refused as exc:
            broken[exc.rule.id] = exc
        others: list[Any] = []
        for worker, (session, message) in enumerate(zip(self.sessions, messages, strict=True)):
            if self.joined and not session.initialized and getattr(message, "labelled", None):
                session.packed = isinstance(message.handles, dict)
            evidence = _evidence(worker, message, line, others if isinstance(given, Mapping) else [])
            found = (
                session.broken_rules(call, message) if message is not None or call != "update_weights" else []
            )
            for refusal in [*found, *session.broken_rules(call, evidence)]:
                broken.setdefault(refusal.rule.id, refusal)
            self._exercise(call, session, message, evidence)
            others.append(evidence.seen.get("arrival"))
            if self.last[2] != 400 and (self._succeeded or not self.lost):  # 400 leaves it as it was
                session.settle(call, message, ok=self._succeeded)
        return list(broken.values())

    def _exercise(self, call: str, session: Session, message: Any, evidence: Evidence) -> None:
        """The rules that this exchange could have broken; not those about what nobody has seen."""
        update = message if isinstance(message, UpdateInfo) else None
        silent = ABOUT_HANDLES if update and update.handles is None else set()
        silent = silent if update and update.rank_local else silent | {"rank-local.counted"}
        rules = MESSAGE_RULES.get(call, []) if update or call != "update_weights" else []
        self.exercised |= {rule.id for rule in rules if rule.applies(session)} - silent
        shows = {"workers.same-bytes": bool(evidence.others), "loan.until-reply": self.held}
        for rule in WITNESS_RULES.get(call, []):
            if shows.get(rule.id, True) and any(map(evidence.has, rule.evidence.split())):
                self.exercised.add(rule.id)

    def _find(self, broken: Iterable[Refused], party: str = "", let_in: bool = True) -> int:
        """The findings that these are; `let_in`: of the server too, where it takes what vLLM refuses."""
        at, call, status = self.last
        before = len(self.findings)
        for refusal in broken:
            rule = refusal.rule
            if self.joined and rule.id == "init.first":
                continue
            self.exercised.add(rule.id)
            self.findings.append(Finding(at, call, party or rule.party, rule, refusal.seen, status))
            refuses = rule.refused_by_vllm == "always" or (
                rule.refused_by_vllm == "packed" and self.sessions[0].packed
            )
            if rule.level == MUST and refuses and self._succeeded and let_in:
                self.findings.append(Finding(at, call, "server", rule, "let in what vLLM refuses", status))
        return len(self.findings) - before

    def conclude(self) -> list[Finding]:
        if self.joined:
            self.exercised.discard("init.first")
        if self.sessions[0].state is UPDATING and not self.lost:
            self._find([Refused(RULES["sync.finished"], "the transcript ends in an open update")])
        taken_over = "start.one-at-a-time" in {finding.rule.id for finding in self.findings}
        if not self.lost and not taken_over and "finish.after-start" in self.exercised:
            self.exercised.add("sync.finished")
        return self.findings


def _is_time(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and abs(value) < 1e15  # false for what is no number


def _shown(entries: list[UpdateInfo], given: Any, line: Mapping[str, Any]) -> list[UpdateInfo]:
    """The updates with the described handles that the transcript has beside them."""
    handles = line.get("handles")
    if isinstance(given, Mapping):
        return [replace(entries[0], handles=handles)] * len(entries)
    each = handles if isinstance(handles, list) else [handles] * len(entries)
    return [replace(entry, handles=h) for entry, h in itertools.zip_longest(entries, each[: len(entries)])]


def _evidence(worker: int, message: Any, line: Mapping[str, Any], others: list[Any]) -> Evidence:
    seen = line.get("seen")
    workers = seen.get("workers") if isinstance(seen, dict) else None
    mine = workers[worker] if isinstance(workers, list) and worker < len(workers) else None
    names = message.names if isinstance(message, UpdateInfo) and _strings(message.names) else []
    return Evidence(worker, names, mine if isinstance(mine, dict) else {}, list(others))


def verdict(path: str, strict: bool = False, out: Callable[[str], Any] = print) -> int:
    """Judges the transcript in a file and says what it found. Returns the exit code of `protocol.py`."""
    exercised: set[str] = set()
    try:
        with open(path, encoding="utf-8") as file:
            lines = list(map(_json_line, itertools.count(1), file.read().rstrip().split("\n")))
        if len(lines) < 2 or not all(isinstance(line, dict) for line in lines):
            raise ValueError("it has no exchange")
        findings = check(lines, exercised)
    except RecursionError:
        out(f"{path}: cannot be judged: it is nested too deeply")
        return 2
    except (OSError, ValueError) as exc:
        out(f"{path}: cannot be judged: {exc}")
        return 2
    if not findings and not any(
        line.get("call") == "update_weights" and 200 <= line["status"] < 300 for line in lines
    ):
        out(f"{path}: no update in it that was taken: nothing can be judged")
        return 2
    for text in _folded(findings):
        out(text)
    if unseen := next(filter(None, map(_uncounted, lines)), ""):
        out(f"  reference counters are not observable: {unseen}")
    if lines[0].get("hold_seconds") == 0:
        out("  updates were answered at once: who does not wait for the answer shows with --hold-seconds 0.1")
    broken = {finding.rule.id for finding in findings}
    for rule in RULES.values():
        state = "broken" if rule.id in broken else "held" if rule.id in exercised else "not exercised"
        out(f"  {state:<14} {rule.level:<6} {rule.id}")
    counted = [f for f in findings if strict or f.rule.level == MUST]
    out(printable(f"{path}: {_sentence(findings, counted, len(lines) - 1)}"))
    return 1 if counted else 0


def _folded(findings: list[Finding]) -> Iterator[str]:
    """A line a finding; of those that are alike the first, and how many there are besides."""
    alike: Counter[Finding] = Counter()
    for finding in findings:
        kind = finding._replace(at=0, seen="", status=0)
        alike[kind] += 1
        if alike[kind] <= MOST_ALIKE:
            yield str(finding)
    for kind, count in alike.items():
        if count > MOST_ALIKE:
            more = f"{kind.rule.id}: {count - MOST_ALIKE} times more"
            yield f"{'':>5} {kind.call:<28} {kind.party:<8} {kind.rule.level:<6} {more}"


def _uncounted(line: Mapping[str, Any]) -> str:
    """Why the witness could see no counters; empty where it could."""
    return _one_line(_evidence(0, None, line, []).seen.get("uncounted") or "")


def _json_line(at: int, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as exc:
        raise ValueError(f"line {at} is not JSON: {exc}") from None


def _sentence(findings: list[Finding], counted: list[Finding], exchanges: int) -> str:
    """What a human acts on."""
    if not findings:
        return (
            f"{exchanges} exchanges, nothing found: what was exercised, both sides did as the document says."
        )
    first = (counted or findings)[0]
    passes = "vLLM lets it pass" if first.rule.refused_by_vllm == "never" else "vLLM refuses it"
    grade = "" if counted else f" (SHOULD: {passes}, and it does not count without --strict)"
    what = f"in {first.call} the {first.party} broke {first.rule.id}: {first.rule.text}{grade}"
    what += f"; seen: {first.seen[:200]}"
    if first.party == "unclear":
        what = f"{first.call} was refused, and no rule says why, but the answer does: {first.seen[:200]}"
    number = f"{len(findings)} finding{'s' * (len(findings) > 1)}"
    return f"{exchanges} exchanges, {number}. Look first at line {first.at}: {what}."


# --- Planning and merging ---------------------------------------------------------------------------


def plan_chunks(sizes: Mapping[str, int], capacity: int) -> list[list[str]]:
    """The names of each packed chunk, in order; `sizes` maps a name to its bytes.

    A chunk is closed before the tensor that would overflow it (ipc.md, "Trainer Without vLLM over
    HTTP"); one that fills it exactly fits. Raises ValueError, naming the tensor, where one is larger
    than the whole buffer.
    """
    chunks: list[list[str]] = []
    room = -1
    for name, size in sizes.items():
        if size > capacity:
            raise ValueError(
                f"{name} has {size:,} bytes, the packed buffer {capacity:,}: make the buffer larger"
            )
        if size > room:
            chunks.append([])
            room = capacity
        chunks[-1].append(name)
        room -= size
    return chunks


def merge_handles(per_rank: Sequence[Any]) -> Any:
    """One set of handles out of every rank's: by index `{uuid: args}` dicts, packed one such dict.

    Raises ValueError where ranks have different numbers of handles, or two ranks the same GPU.
    """
    if all(isinstance(handles, Mapping) for handles in per_rank):
        merged: dict[str, Any] = {}
        for rank, handle in enumerate(per_rank):
            if twice := merged.keys() & handle.keys():
                raise ValueError(f"rank {rank} exports for GPU {twice.pop()}, and so does a rank before it")
            merged |= handle
        return merged
    counts = [len(handles) for handles in per_rank]
    if len(set(counts)) > 1:
        raise ValueError(f"the ranks have different numbers of handles: {counts}")
    return [merge_handles(handles) for handles in zip(*per_rank, strict=True)]


# --- For people -------------------------------------------------------------------------------------


def rules_as_markdown() -> str:
    """RULES as the table that the README prints."""
    return _table(
        ("rule", "level", "what holds", "vLLM refuses", "source"),
        ((f"`{r.id}`", r.level, r.text, r.refused_by_vllm, r.source) for r in RULES.values()),
    )


def sequence_as_markdown() -> str:
    """SEQUENCE as the table that the README prints."""

    def cell(state: State, call: str) -> str:
        found = SEQUENCE[state, call]
        if isinstance(found, Refuse):
            return f"refused: `{found.rule_id}`"
        return f"{found.done.value}; failed: {found.failed.value}"

    return _table(
        ("call", *(f"while {state.value}" for state in State)),
        ((f"`{call}`", *(cell(state, call) for state in State)) for call in CALLS),
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines: Iterator[Sequence[str]] = itertools.chain([head, ["---"] * len(head)], rows)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="a transcript to judge")
    parser.add_argument("--strict", action="store_true", help="count SHOULD as well")
    options = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if options.file is not None:
        return verdict(options.file, options.strict)
    print(rules_as_markdown())
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it as it does other tools
    sys.exit(main())
