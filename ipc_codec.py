"""A tensor as a handle, a handle as text, and back; and the packed buffer.

Answers for both sides of a weight sync: how does memory of one process become a tensor of another
(`export_handle`, `import_handle`), how does that travel inside JSON (`encode_handles`, `decode_handles`),
and how do many tensors share one export (`PackedBuffer`, `PackedBufferImporter`, `unpack`)?

Laws:

- `import_handle` copies nothing: the result *is* the trainer's memory, until the last view of it is dropped.
- One export pays for one open and one release. Its counter is 1 from the export on, 0 after the release;
  `Exports.renew` begins the next loan of the same memory.
- What was lent stays allocated until its counter is 0 and `ipc_collect` has run.
- What came over the wire stays inert: `decode_handles` builds None, bool, int, str, bytes, tuple, list and
  dict, and calls nothing; `check_exports` looks at every value before a device sees one.
- `parse_dtype(dtype_name(d)) is d`; `describe_handles` says the same of handles before and after the wire.
- Every refusal is a `HandleError`, and it changes nothing.

CUDA memory goes through torch's own `reduce_tensor` and `rebuild_cuda_tensor`. CPU memory goes through an
EMULATION of it for machines without a GPU: a shared-memory file stands for the CUDA allocation, and the
fifteen arguments, the reference counter and the life of the memory are CUDA's.

Source: vLLM 0.33.0 docs/training/weight_transfer/ipc.md, torch 2.11-2.13 torch/multiprocessing/reductions.py.
"""

from __future__ import annotations

import array
import atexit
import base64
import collections
import contextlib
import ctypes
import functools
import hashlib
import itertools
import math
import os
import pickle
import pickletools
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

Handle = dict[str, Any]  # {gpu_uuid: fifteen arguments}, one entry per GPU

SHM = "/dev/shm"
HEADER_BYTES = 64  # torch's own header, at the start of every shared-memory file it makes
SLOTS = 10_000  # reference counters in one file, an int64 each
ALIGNMENT = 512  # bytes, of what lies side by side in one storage, as torch's allocator has it
COUNTER_FILE_BYTES = HEADER_BYTES + 8 * SLOTS
SHM_NAME = re.compile(rb"/torch_\d{1,20}_\d{1,20}_\d{1,20}")
CPU_MARK = b"cpu:"  # an emulated storage handle is this and the name of its file
CUDA_HANDLE_VERSION = 2
EVENT_BYTES = 64
MAX_TEXT = 1 << 26  # characters of encoded handles; 20,000 tensors on one GPU have 5 million
# By every name torch has for them. The quantized dtypes (their scales do not travel) and the sub-byte
# integers (torch cannot copy them) are none that a sync can carry.
DTYPES = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and not re.fullmatch(r"qu?int.*|u?int[1-7]|bit", name)
}
CARRIED = frozenset(DTYPES.values())
CAUSES = (
    "trainer and server share one host, one GPU, one PID namespace and one /dev/shm (containers: --ipc=host "
    "or a common /dev/shm mount, and --pid=host), and the trainer lives until finish is answered"
)


class HandleError(ValueError):
    """A handle, or what should become one, is refused. The message: what was seen, what holds, what to do."""


class IpcArgs(NamedTuple):
    """The fifteen arguments of torch's `rebuild_cuda_tensor`, by name. On the wire they are a plain tuple."""

    tensor_cls: Any
    tensor_size: Any  # elements, one a dimension
    tensor_stride: Any  # elements
    tensor_offset: Any  # elements, inside the storage
    storage_cls: Any
    dtype: Any
    storage_device: Any  # the sender's index; the receiver writes its own
    storage_handle: Any  # bytes; None for an empty storage
    storage_size_bytes: Any
    storage_offset_bytes: Any  # of the storage inside its CUDA allocation
    requires_grad: Any
    ref_counter_handle: Any  # bytes, the name of the counter's file
    ref_counter_offset: Any  # its slot there
    event_handle: Any  # bytes
    event_sync_required: Any


# --- Names --------------------------------------------------------------------------------------------


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` as the wire writes it: `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str) -> torch.dtype:
    """The inverse. An alias (`"half"`) gives its dtype; any other attribute of torch is a HandleError."""
    dtype = DTYPES.get(name) if type(name) is str else None
    if dtype is None:
        raise HandleError(f"dtype {_seen(name)} is none that a sync can carry; 'bfloat16' is one")
    return dtype


def gpu_uuid(device: torch.device | str) -> str:
    """The key of a device in a handle: the GPU's uuid without `GPU-`; for `cpu:i` a made-up one per index."""
    ours = _device(device)
    if ours.type == "cuda":
        return _cuda_uuid(ours.index)
    return f"c0dec0de-0000-4000-8000-{ours.index:012x}"


@functools.cache
def _cuda_uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def checksum(tensor: torch.Tensor) -> str:
    """sha256, in hex, of a tensor's bytes in row-major order."""
    flat = _bytes_of(wire_form(tensor)).cpu()
    return hashlib.sha256((ctypes.c_char * flat.numel()).from_address(flat.data_ptr())).hexdigest()


def digests(tensors: Iterable[torch.Tensor]) -> list[int]:
    """A 64-bit sum of each tensor's bytes, each weighted by its place; computed on its device.

    Equal bytes have equal digests, and a witness compares no others: it is no hash for an adversary.
    """
    plain = [dense(tensor).contiguous() for tensor in tensors]
    if not plain:
        return []
    sizes = [tensor.nbytes for tensor in plain]
    many = torch.tensor([[n // ROW for n in sizes], [n % ROW for n in sizes]], device=plain[0].device)
    memory = [(run, run.numel() // ROW * ROW) for run, _sizes in runs(plain, ROW)]
    rest = torch.cat([run[end:] for run, end in memory]).long()
    values = torch.cat([*_of_rows([run[:end] for run, end in memory if end]), rest])
    rows, rests = _weighted(values, many.view(-1)).view(2, -1)
    return rows.add(rests, alpha=3).tolist()


def _bytes_of(contiguous: torch.Tensor) -> torch.Tensor:
    """Its bytes, no copy. One element may have any stride and be contiguous: torch would not view it."""
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)


def runs(tensors: Iterable[torch.Tensor], multiple: int = 1) -> list[tuple[torch.Tensor, list[int]]]:
    """Contiguous tensors, those that lie one behind the other in a storage as one: (uint8, their sizes).

    Sizes are in bytes; of all but the last of a run they are multiples of `multiple`.
    """
    found: list[tuple[torch.Tensor, list[int]]] = []
    end = limit = -1
    for tensor in tensors:
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        if address != end or end + nbytes > limit:
            storage = tensor.untyped_storage()
            limit = storage.data_ptr() + storage.nbytes()
            found.append((tensor, []))
        found[-1][1].append(nbytes)
        end = -1 if nbytes % multiple else address + nbytes
    return [(_bytes_of(first).as_strided((sum(sizes),), (1,)), sizes) for first, sizes in found]


ROW = 4096  # bytes
SUMS = 16  # of a row, each with weights of its own
ODD = -7046029254386353131


def _of_rows(memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A number for each row of all, in their order, in one vector; none where there is no row.

    Its bytes are weighted by their place. As a product of matrices, which reads memory once, at its full
    speed: a product by elements writes twice what it reads. Of int8 it is exact: 4096 products of two bytes
    stay below 2^31.
    """
    if not memory:
        return []
    powers, weights = _weights(memory[0].device)
    sums = [torch._int_mm(_as_rows(part), weights)[: len(part) // ROW] for part in memory]
    return [(torch.cat(sums) * powers).sum(1)]


@functools.cache
def _weights(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights: odd ones for the sums of a row, int64 [SUMS]; for its bytes any, int8 [ROW, SUMS]."""
    powers = torch.full((SUMS * ROW,), ODD, device=device).cumprod(0)
    return powers[:SUMS].clone(), (powers >> 56).to(torch.int8).view(SUMS, ROW).t()


def _as_rows(memory: torch.Tensor) -> torch.Tensor:
    """Whole rows as int8 [rows, ROW]: aligned, and so many as torch wants on a GPU."""
    rows = (memory.clone() if memory.data_ptr() % 16 else memory).view(torch.int8).view(-1, ROW)
    return rows if len(rows) > 16 else torch.cat([rows, rows.new_zeros(16, ROW)])


def _weighted(values: torch.Tensor, many: torch.Tensor) -> torch.Tensor:
    """The sums of so many values each, every value times an odd number of its place among them."""
    ends = many.cumsum(0)
    owner = torch.repeat_interleave(many, output_size=len(values))
    at = torch.arange(len(values), device=values.device) - (ends - many)[owner]
    sums = torch.cat([many[:1] * 0, (values * (at * ODD | 1)).cumsum(0)])  # adding to few places is slower
    return sums[ends] - sums[ends - many]


def place(device: torch.device) -> torch.device:
    """Where tensors of a worker's device are made: torch knows one CPU only, whatever its number here."""
    return torch.device("cpu") if device.type == "cpu" else device


def _device(device: torch.device | str) -> torch.device:
    ours = torch.device(device)
    if ours.type not in ("cpu", "cuda"):
        raise HandleError(f"device {ours} shares no memory this way; a cuda or cpu device does")
    if ours.index is None:
        return torch.device(ours.type, torch.cuda.current_device() if ours.type == "cuda" else 0)
    return ours


def _seen(value: object) -> str:
    """A value for an error message: bounded, and never the repr of something nested."""
    if isinstance(value, (str, bytes)):
        return repr(value[:80]) + (f"... ({len(value)} long)" if len(value) > 80 else "")
    if value is None or isinstance(value, (bool, torch.dtype)):
        return str(value)
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 64 else f"an int of {value.bit_length()} bits"
    return f"of type {type(value).__name__}"


# --- Stations 2 and 3: a tensor as a handle -----------------------------------------------------------


def wire_form(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as its bytes travel: detached, conj and neg resolved, contiguous; no copy where it already is.

    Raises HandleError as `dense` does, and where there is no memory for the copy.
    """
    try:
        return dense(tensor).resolve_conj().resolve_neg().contiguous()
    except RuntimeError as exc:  # torch's, of any allocator
        count = tensor.numel() * tensor.itemsize
        why = str(exc).split("\n", 1)[0]
        raise HandleError(f"its {count:,} bytes cannot be laid side by side: {why}") from exc


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, detached. Raises HandleError where it has no plain bytes: meta, sparse, sharded, ..."""
    if not isinstance(tensor, torch.Tensor):
        raise HandleError(f"a {type(tensor).__name__} is no tensor")
    kind = "meta" if tensor.is_meta else "sparse" if tensor.layout is not torch.strided else ""
    kind = kind or ("nested" if tensor.is_nested else "")
    if tensor.dtype not in CARRIED:
        kind = dtype_name(tensor.dtype)
    is_plain = type(tensor) is torch.Tensor
    if not is_plain and hasattr(tensor, "__tensor_flatten__"):
        kind = type(tensor).__name__  # DTensor and other wrappers: the bytes lie elsewhere
    if kind:
        raise HandleError(f"a {kind} tensor has no bytes to lend; a dense one does: gather or convert it")
    if tensor.untyped_storage().nbytes() == 0 and tensor.numel():
        raise HandleError(f"the storage of a tensor of shape {list(tensor.shape)} was freed; refill it first")
    return tensor.detach() if is_plain else tensor.detach().as_subclass(torch.Tensor)


def export_handle(tensor: torch.Tensor, device: torch.device | str | None = None) -> Handle:
    """Lends a tensor: `{gpu_uuid: fifteen arguments}`. The loan begins.

    Each call is a new export and pays for one open and release. A non-contiguous tensor travels with its
    strides. `device` names the worker that a CPU tensor is for (`"cpu:1"`); a CUDA tensor knows its own.
    A CPU storage is moved into shared memory in place, so that its aliases stay aliases.
    Raises HandleError for what cannot be lent, too little shared memory included.
    """
    return _export(dense(tensor), device, {})


class Exports:
    """Handles that are lent in one sync after another: made once, and renewed.

    A handle names memory and a counter, and both stay ours for as long as this object lives. So when the
    counter is 0 the receiver has let go, and set to 1 again the same handle pays for one more open and
    release. What was lent last stays allocated: drop this where the memory is to be freed.
    """

    def __init__(self) -> None:
        self.handles: list[Handle] = []
        self.layout: Any = None  # its owner's, for as long as the tensors lie where they are
        self.in_use = threading.Lock()  # its owner's, for the length of a sync
        self._aliases: Aliases = {}
        self._counters: list[_Counter] = []
        _renewable.add(self)

    def lend(
        self, tensors: Mapping[str, torch.Tensor], device: torch.device | str | None = None
    ) -> list[Handle]:
        """`export_handle` of each, or of none: a failure settles. What was kept before is forgotten."""
        self.forget()
        self.handles = _export_all(tensors, device, self._aliases)
        lent = itertools.chain.from_iterable(map(dict.values, self.handles))
        self._counters = list(filter(None, _counters(lent)))
        return self.handles

    def renew(self) -> bool:
        """Lends all handles again: each counter from 0 to 1. False, and nothing is lent, unless all are 0.

        The events in the handles are those of the first loan: wait for later writes before you say a word.
        """
        if not self.handles or any(count != 0 for count in _counts(self._counters)):
            return False
        _count(self._counters, 1)
        return True

    def forget(self) -> None:
        """Ends the right to renew. What is lent stays so until it is released."""
        self.handles, self.layout, self._aliases, self._counters = [], None, {}, []


def _export_all(
    tensors: Mapping[str, torch.Tensor], device: torch.device | str | None, aliases: Aliases
) -> list[Handle]:
    handles: list[Handle] = []
    name = ""
    try:
        for name, tensor in tensors.items():  # noqa: B007 (for the message)
            handles.append(_export(dense(tensor), device, aliases))
    except BaseException as exc:
        settle(*itertools.chain.from_iterable(map(dict.values, handles)))
        if isinstance(exc, HandleError):
            raise HandleError(f"{name}: {exc}") from None
        raise
    return handles


def _export(plain: torch.Tensor, device: torch.device | str | None, aliases: Aliases) -> Handle:
    if plain.is_conj() or plain.is_neg():
        raise HandleError("the conj or neg flag of a tensor is not in its handle; export wire_form(tensor)")
    there = plain.device
    ours = _device(device if device is not None and there.type == "cpu" else there)
    if ours.type != there.type:
        raise HandleError(f"a tensor on {there} cannot be lent to a worker on {ours}; move it first")
    storage = plain.untyped_storage()
    of_storage = aliases.setdefault(storage._cdata, [])
    if not of_storage or of_storage[-1].exports == _Alias.MOST:
        of_storage.append(_Alias(storage))
    alias = of_storage[-1]
    export = _export_cpu(plain, ours.index, alias) if ours.type == "cpu" else _export_cuda(alias.of(plain))
    return {gpu_uuid(ours): export}


_renewable: weakref.WeakSet[Exports] = weakref.WeakSet()


class _Alias:
    """A second storage on the memory of one that lives on, to export from.

    What torch takes for an export (a counter's slot, an event) it gives back when the *storage* dies: one
    that is exported sync after sync would pile them up, and 30,000 of them end the process when it is freed
    (torch 2.11: a destructor in a destructor in ...). The alias dies with its `Exports`; torch keeps the
    memory until they are released and `ipc_collect` has run. The emulation needs only to see that it lives.
    """

    MOST = 256  # exports

    def __init__(self, storage: torch.UntypedStorage):
        self.exports = 0
        whole = _whole(storage)
        self.flat = {torch.uint8: from_dlpack(to_dlpack(whole)) if whole.is_cuda and len(whole) else whole}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, on the alias."""
        self.exports += 1
        flat = _flat(self.flat, tensor.dtype)
        return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


Aliases = dict[int, list[_Alias]]  # by their storage


def _whole(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage: uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _flat(flat: dict[torch.dtype, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Flat memory, uint8, as that dtype: `flat` keeps what was asked for once."""
    if dtype not in flat:
        memory = flat[torch.uint8]
        flat[dtype] = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return flat[dtype]


def _export_cuda(tensor: torch.Tensor) -> tuple:
    setting = "unset PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or copy into memory made without it"
    try:
        function, args = reduce_tensor(tensor)
    except RuntimeError as exc:
        raise HandleError(f"torch cannot export this CUDA memory ({exc}); {setting}") from exc
    if function is not rebuild_cuda_tensor:
        raise HandleError(f"torch exports this tensor by {function.__name__}, not by rebuild_cuda_tensor")
    handle = IpcArgs(*args).storage_handle
    if handle is not None and handle[1:2] == b"e":
        settle(args)
        raise HandleError(f"memory of expandable segments opens in few containers and kernels; {setting}")
    return tuple(args)


def arena(module: torch.nn.Module) -> torch.Tensor:
    """Moves a module's parameters and buffers into one storage, in place; returns it, uint8 [bytes].

    All handles then name one memory, which a receiver opens once. What shares a storage goes on sharing it
    (tied weights, views), and parameters stay the objects that an optimizer knows. While it is built, both
    copies are there. Raises HandleError where one has no bytes of its own: a sharded module is no arena.
    """
    tensors = [tensor for group in (module.parameters(), module.buffers()) for tensor in group]
    storages = {dense(tensor).untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    if any(tensor.is_conj() or tensor.is_neg() for tensor in tensors):
        raise HandleError("the conj or neg flag of a tensor is not in its bytes; resolve it first")
    places, end = side_by_side([storage.nbytes() for storage in storages.values()])
    starts = dict(zip(storages, places, strict=True))
    if len({storage.device for storage in storages.values()}) > 1:
        raise HandleError("the module lies on several devices; an arena lies on one")
    memory = torch.empty(end, dtype=torch.uint8, device=tensors[0].device if tensors else "cpu")
    for at, storage in storages.items():
        memory[starts[at] :][: storage.nbytes()].copy_(_whole(storage))
    flat = {torch.uint8: memory}
    for tensor in tensors:
        start = starts[tensor.untyped_storage()._cdata] // tensor.itemsize + tensor.storage_offset()
        tensor.data = _flat(flat, tensor.dtype).as_strided(tensor.size(), tensor.stride(), start)
    return memory


def side_by_side(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where parts of so many bytes begin in one storage, and how many bytes that has."""
    ends = list(itertools.accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
    return ends[:-1], ends[-1]


# --- Stations 5 and 8: handles as text, and back ------------------------------------------------------


def encode_handles(handles: list[Handle] | Handle) -> str:
    """base64(pickle(handles)), protocol 4. Unpacked: one dict per name; packed: the buffer's dict.

    Equal bytes are pickled once: all tensors of one CUDA allocation share a storage handle.
    """
    known: dict[bytes, bytes] = {}

    def entry(handle: Any) -> Any:
        return {uuid: shared(args) for uuid, args in handle.items()} if isinstance(handle, dict) else handle

    def shared(args: Any) -> Any:
        if type(args) not in (tuple, IpcArgs):
            return args
        return tuple([known.setdefault(arg, arg) if type(arg) is bytes else arg for arg in args])

    plain = [entry(handle) for handle in handles] if isinstance(handles, list) else entry(handles)
    return base64.b64encode(pickle.dumps(plain, protocol=4)).decode("ascii")


def decode_handles(text: str) -> Any:
    """The inverse, for text of a stranger: a list or a dict of inert values, whatever the text holds.

    A `torch.Size` becomes a tuple, a permitted global (`torch.Tensor`, `torch.bfloat16`) its name as a str.
    Characters outside the base64 alphabet are dropped, as vLLM does. Raises HandleError for everything that
    no honest sender makes, in time and memory linear in the text; later loops over the result are linear too.
    """
    if not isinstance(text, str):
        raise HandleError(f"ipc_handles_pickled is {_seen(text)}; it is base64 text")
    if len(text) > MAX_TEXT:
        raise HandleError(f"ipc_handles_pickled has {len(text):,} characters; {MAX_TEXT:,} at most")
    try:
        payload = base64.b64decode(text)
    except ValueError as exc:
        raise HandleError(f"ipc_handles_pickled is no base64 text: {exc}") from exc
    handles = _PickleReader(payload).read()
    if type(handles) not in (list, dict):
        raise HandleError(f"the handles are {_seen(handles)}; they are a list of dicts, or packed one dict")
    _check_cost(handles, 1000 + 4 * len(payload))
    return handles


def _check_cost(handles: list | dict, limit: int) -> None:
    """Handles nest list, dict, (function, arguments), arguments, sizes: five levels, and few shared values.

    Level by level, because a pickle can say "that again" in two bytes: a billion values in 100 bytes.
    """
    level, total = [handles], 0
    for _ in range(5):
        total += sum(map(len, level))
        if total > limit:
            raise HandleError(f"the handles hold over {limit} values, more than their text has room for")
        inner = itertools.chain.from_iterable(v.values() if type(v) is dict else v for v in level)
        level = [v for v in inner if type(v) in (tuple, list, dict)]
    if level:
        raise HandleError("the handles are nested more than five levels deep; no handle is")


class _PickleReader:
    """A reader for pickles of protocol 3 to 5 that knows the opcodes of honest handles, and no object at all.

    `pickle.Unpickler` with a `find_class` would not do: BUILD can overwrite methods of a permitted class,
    REDUCE can call it, one LONG_BINPUT takes gigabytes. Here a global is a string and nothing is called.
    """

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.at = 0
        self.stack: list[Any] = []
        self.push = self.stack.append
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.containers_left = 1000 + len(payload) // 6  # an honest one takes eight bytes or more

    def read(self) -> Any:
        payload = self.payload
        if payload[:1] != b"\x80" or payload[1:2] not in (b"\3", b"\4", b"\5"):
            raise HandleError(f"the payload begins with {_seen(payload[:2])}; {PROTOCOL_HINT}")
        self.at = 2
        try:
            while (code := payload[self.at]) != STOP:
                self.at += 1
                STEPS[code](self)
        except HandleError:
            raise
        except KeyError:
            opcode = OPCODES.get(code, hex(code))
            raise HandleError(f"the pickle has the opcode {opcode}; handles do not") from None
        except (IndexError, ValueError) as exc:
            raise HandleError(f"the pickle is broken or cut off at byte {self.at} of {len(payload)}") from exc
        if self.at + 1 != len(payload) or len(self.stack) != 1 or self.marks:
            raise HandleError(f"the pickle ends at byte {self.at} of {len(payload)}, and not with one value")
        return self.stack[0]

    def take(self, count: int) -> bytes:
        start, self.at = self.at, self.at + count
        if self.at > len(self.payload):
            raise IndexError
        return self.payload[start : self.at]

    def number(self, width: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(width), "little", signed=signed)

    def line(self) -> str:
        return self.take(self.payload.index(b"\n", self.at) + 1 - self.at)[:-1].decode()

    def skip_frame(self) -> None:
        if self.number(8) > len(self.payload) - self.at:
            raise IndexError

    # The four steps that a handle takes most are written out.

    def read_byte(self) -> None:
        self.push(self.payload[self.at])
        self.at += 1

    def read_two_bytes(self) -> None:
        self.push(self.payload[self.at] | self.payload[self.at + 1] << 8)
        self.at += 2

    def get(self) -> None:
        self.push_again(self.memo[self.payload[self.at]])
        self.at += 1

    def memoize(self) -> None:
        self.memo.append(self.stack[-1])

    def push_container(self, value: Any) -> None:
        self.containers_left -= 1
        if self.containers_left < 0:
            raise HandleError("the pickle makes more lists, dicts and tuples than handles of its length have")
        self.push(value)

    def push_again(self, value: Any) -> None:
        """From the memo: a list or a dict, which two bytes can say again, counts again with what is in it."""
        if type(value) in (list, dict):
            self.containers_left -= len(value)
            self.push_container(value)
        else:
            self.push(value)

    def pop(self, count: int) -> list[Any]:
        return self.pop_from(len(self.stack) - count)

    def pop_from(self, start: int) -> list[Any]:
        if not 0 <= start <= len(self.stack):
            raise IndexError
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def append(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise HandleError("the pickle appends to what is no list")
        self.stack[-1].extend(values)

    def set_items(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not dict or len(values) % 2:
            raise HandleError("the pickle sets items of what is no dict")
        if {*map(type, keys := values[::2])} != {str}:  # hashing a nested tuple can take for ever
            raise HandleError("a handle has a key that is no str; GPU uuids are")
        self.stack[-1].update(zip(keys, values[1::2], strict=True))

    def put(self, index: int) -> None:
        if index != len(self.memo):
            raise HandleError(f"the pickle puts at {index} in the memo; picklers count from 0 by 1")
        self.memo.append(self.stack[-1])

    def push_global(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise HandleError("the pickle names a global by what is no str")
        if module == "torch" and name in DTYPES:
            self.push(str(DTYPES[name]))
        elif f"{module}.{name}" in PERMITTED_GLOBALS:
            self.push(f"{module}.{name}")
        else:
            hint = PROTOCOL_HINT if module == "_codecs" else "handles name torch's tensor, storage and dtype"
            raise HandleError(f"the pickle names the global {_seen(module)} {_seen(name)}; {hint}")

    def reduce(self) -> None:
        function, args = self.pop(2)
        size_of_one = type(args) is tuple and len(args) == 1 and type(args[0]) is tuple
        if type(function) is not str or function != "torch.Size" or not size_of_one:
            raise HandleError("the pickle calls something other than torch.Size of one tuple; handles do not")
        self.push(args[0])


STOP = b"."[0]
TENSOR_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter")
STORAGE_CLASSES = ("torch.storage.TypedStorage", "torch.storage.UntypedStorage")
PROTOCOL_HINT = "pickle with protocol 3 or later (pickle.dumps's default)"
OPCODES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
PERMITTED_GLOBALS = {
    *TENSOR_CLASSES,
    *STORAGE_CLASSES,
    "torch.Size",
    "torch.multiprocessing.reductions.rebuild_cuda_tensor",  # only to say "send the bare arguments"
}
_STEPS: dict[str, Callable[[_PickleReader], None]] = {
    "FRAME": lambda r: r.skip_frame(),
    "MARK": lambda r: r.marks.append(len(r.stack)),
    "NONE": lambda r: r.push(None),
    "NEWTRUE": lambda r: r.push(True),
    "NEWFALSE": lambda r: r.push(False),
    "BININT": lambda r: r.push(r.number(4, signed=True)),
    "BININT1": _PickleReader.read_byte,
    "BININT2": _PickleReader.read_two_bytes,
    "LONG1": lambda r: r.push(r.number(r.number(1), signed=True)),
    "SHORT_BINUNICODE": lambda r: r.push(r.take(r.number(1)).decode()),
    "BINUNICODE": lambda r: r.push(r.take(r.number(4)).decode()),
    "SHORT_BINBYTES": lambda r: r.push(r.take(r.number(1))),
    "BINBYTES": lambda r: r.push(r.take(r.number(4))),
    "EMPTY_TUPLE": lambda r: r.push(()),
    "EMPTY_LIST": lambda r: r.push_container([]),
    "EMPTY_DICT": lambda r: r.push_container({}),
    "TUPLE": lambda r: r.push_container(tuple(r.pop_from(r.marks.pop()))),
    "TUPLE1": lambda r: r.push_container(tuple(r.pop(1))),
    "TUPLE2": lambda r: r.push_container(tuple(r.pop(2))),
    "TUPLE3": lambda r: r.push_container(tuple(r.pop(3))),
    "APPEND": lambda r: r.append(r.pop(1)),
    "APPENDS": lambda r: r.append(r.pop_from(r.marks.pop())),
    "SETITEM": lambda r: r.set_items(r.pop(2)),
    "SETITEMS": lambda r: r.set_items(r.pop_from(r.marks.pop())),
    "MEMOIZE": _PickleReader.memoize,
    "BINPUT": lambda r: r.put(r.number(1)),
    "LONG_BINPUT": lambda r: r.put(r.number(4)),
    "BINGET": _PickleReader.get,
    "LONG_BINGET": lambda r: r.push_again(r.memo[r.number(4)]),
    "GLOBAL": lambda r: r.push_global(r.line(), r.line()),
    "STACK_GLOBAL": lambda r: r.push_global(*r.pop(2)),
    "REDUCE": lambda r: r.reduce(),
}
STEPS = {code: _STEPS[name] for code, name in OPCODES.items() if name in _STEPS}


def describe_handles(handles: Any) -> Any:
    """The same structure in plain JSON values, for rules and transcripts; alike for raw and decoded handles.

    Arguments are a list of fifteen, bytes are hex, classes and dtypes names such as `"torch.bfloat16"`.
    """
    return _plain(handles, 5)


def _plain(value: Any, levels: int) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, torch.dtype):
        return str(value)
    if levels and isinstance(value, dict):
        return {
            (k if isinstance(k, str) else f"<{type(k).__name__}>"): _plain(v, levels - 1)
            for k, v in value.items()
        }
    if levels and isinstance(value, (tuple, list)):
        return [_plain(v, levels - 1) for v in value]
    return _global_name(value) or f"<{type(value).__name__}>"


def _global_name(value: Any) -> str | None:
    """`"torch.Tensor"` of a class or function, or of its name."""
    if isinstance(value, str):
        return value
    named = isinstance(value, (type, FunctionType))
    return f"{value.__module__}.{value.__qualname__}" if named else None


# --- Station 9: a handle as a tensor ------------------------------------------------------------------


def import_handle(handle: Handle, device: torch.device | str) -> torch.Tensor:
    """A tensor on `device` that is the trainer's memory, from `{gpu_uuid: fifteen arguments}`.

    Open an export once; dropping the last view of the result releases it. Never requires grad.
    Raises HandleError, and has then opened nothing.
    """
    return open_exports(check_exports([_pick(handle, device)], device), device)[0]


def _pick(handle: Handle, device: torch.device | str) -> Any:
    uuid = gpu_uuid(device)
    if type(handle) is not dict:
        raise HandleError(f"a handle is {_seen(handle)}; it is a dict {{gpu_uuid: fifteen arguments}}")
    if uuid not in handle:
        keys = ", ".join(map(_seen, itertools.islice(handle, 8)))
        raise HandleError(
            f"the handle has entries for {keys or 'no GPU'} and none for {uuid}, this worker's; trainer and "
            "server share a GPU, and the key is str(torch.cuda.get_device_properties(i).uuid), without GPU-"
        )
    return handle[uuid]


def open_exports(exports: Sequence[IpcArgs], device: torch.device | str) -> list[torch.Tensor]:
    """The tensors of exports that `check_exports` let pass, in their order; the same one for equal exports.

    A storage is mapped once, however many of the exports lie in it: the last view of it releases the first
    of them, the others are released here, as torch releases an export of a storage that is open already.
    Raises HandleError; what was opened is released.
    """
    ours = _device(device)
    storages: dict[tuple[Any, ...], dict[torch.dtype, torch.Tensor]] = {}  # see `_flat`
    opened: dict[IpcArgs, torch.Tensor] = {}
    spare: list[_Counter] = []
    for args in exports:
        if args in opened:
            continue
        if args.storage_size_bytes == 0:
            shape = args.tensor_size, args.tensor_stride
            opened[args] = torch.empty_strided(*shape, dtype=args.dtype, device=place(ours))
            continue
        storage = (args.storage_handle, args.storage_offset_bytes, args.storage_size_bytes)
        if storage in storages:
            spare.append(_Counter(args.ref_counter_handle, args.ref_counter_offset))
        else:
            memory = _open_cpu(args) if ours.type == "cpu" else _open_cuda(args, ours)
            storages[storage] = {torch.uint8: memory}
        flat = _flat(storages[storage], args.dtype)
        start = flat.storage_offset() + args.tensor_offset
        opened[args] = flat.as_strided(args.tensor_size, args.tensor_stride, start)
    _count(spare, -1)
    return [opened[args] for args in exports]


def _open_cuda(args: IpcArgs, device: torch.device) -> torch.Tensor:
    """The whole storage: uint8 [bytes]."""
    try:
        with torch.cuda.device(device):
            return _whole(rebuild_cuda_tensor(*args).untyped_storage())
    except RuntimeError as exc:
        raise HandleError(
            f"CUDA cannot open the trainer's memory ({exc}); {CAUSES}; memory of "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True opens in few containers; and both sides run "
            f"the same torch (here {torch.__version__})"
        ) from exc


def check_exports(exports: Sequence[Any], device: torch.device | str) -> list[IpcArgs]:
    """Exports, each one checked without touching a device, with our classes and device index.

    Takes raw arguments (torch's classes) and decoded ones (their names). The results have the real classes
    and dtype, `storage_device` = ours and `requires_grad` = False. Raises HandleError.
    """
    ours = _device(device)
    given = [_by_name(args) for args in exports]
    _check(given, LAYOUT)
    lent = [args for args in given if args.storage_size_bytes]
    _check(lent, MEMORY)
    _check([args for args in given if not args.storage_size_bytes], NO_MEMORY)
    check_memory(lent, ours)
    checked = [_with_our_classes(args, ours) for args in given]
    _check_extents(checked)
    return checked


def _with_our_classes(args: IpcArgs, ours: torch.device) -> IpcArgs:
    dtype = args.dtype if isinstance(args.dtype, torch.dtype) else DTYPES[args.dtype.removeprefix("torch.")]
    layout = tuple(args.tensor_size), tuple(args.tensor_stride), args.tensor_offset
    storage = torch.storage.TypedStorage, dtype, ours.index
    return IpcArgs(torch.Tensor, *layout, *storage, *args[7:10], False, *args[11:])


def _by_name(args: Any) -> IpcArgs:
    if type(args) not in (tuple, list, IpcArgs):
        raise HandleError(f"the arguments of a handle are {_seen(args)}; they are a tuple of fifteen")
    if len(args) == 2 and type(args[1]) in (tuple, list):
        raise HandleError("a (function, arguments) pair came; send the bare fifteen, reduce_tensor(t)[1]")
    if len(args) != len(IpcArgs._fields):
        raise HandleError(f"a handle has {len(args)} arguments; reduce_tensor(t)[1] has fifteen")
    return IpcArgs(*args)


def _is_index(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_shape(value: Any) -> bool:
    fits = isinstance(value, (tuple, list)) and len(value) <= 64 and {*map(type, value)} <= {int}
    return fits and min(value, default=0) >= 0 and max(value, default=0) < 2**63


def _is_dtype(value: Any) -> bool:
    name = str(value) if isinstance(value, (str, torch.dtype)) else ""
    return name.startswith("torch.") and name.removeprefix("torch.") in DTYPES


def _is_shm_name(value: Any) -> bool:
    return type(value) is bytes and SHM_NAME.fullmatch(value) is not None


Checks = dict[str, tuple[Callable[[Any], bool], str]]  # argument -> (what holds, in words)
COUNTER: Checks = {
    "ref_counter_handle": (_is_shm_name, "the name of a counter file, such as b'/torch_417_2881137107_0'"),
    "ref_counter_offset": (lambda v: _is_index(v) and v < SLOTS, f"a slot from 0 to {SLOTS - 1}"),
}
LAYOUT: Checks = {
    "tensor_cls": (lambda v: _global_name(v) in TENSOR_CLASSES, "torch.Tensor: detach, send no subclass"),
    "tensor_size": (_is_shape, "a tuple of at most 64 ints, none negative"),
    "tensor_stride": (_is_shape, "a tuple of at most 64 ints, none negative"),
    "tensor_offset": (lambda v: _is_index(v) and v < 2**62, "an int, not negative, below 2**62"),
    "storage_cls": (lambda v: _global_name(v) in STORAGE_CLASSES, "torch.storage.TypedStorage"),
    "dtype": (_is_dtype, "a torch dtype that a sync can carry"),
    "storage_device": (_is_index, "an int, not negative"),
    "storage_size_bytes": (_is_index, "an int, not negative"),
    "storage_offset_bytes": (_is_index, "an int, not negative"),
    "requires_grad": (lambda v: type(v) is bool, "a bool"),
}
MEMORY: Checks = COUNTER | {
    "storage_handle": (lambda v: type(v) is bytes, "bytes where storage_size_bytes is not 0"),
    "event_handle": (lambda v: type(v) is bytes and len(v) == EVENT_BYTES, f"{EVENT_BYTES} bytes"),
    "event_sync_required": (lambda v: type(v) is bool, "a bool"),
}
NO_MEMORY: Checks = {  # torch gives None for each of these
    "storage_handle": (lambda v: v is None, "None where storage_size_bytes is 0"),
    "ref_counter_handle": (lambda v: v is None or _is_shm_name(v), "None where storage_size_bytes is 0"),
    "ref_counter_offset": COUNTER["ref_counter_offset"],
    "event_handle": (lambda v: v is None or type(v) is bytes, "None where storage_size_bytes is 0"),
    "event_sync_required": (lambda v: v is None or type(v) is bool, "None where storage_size_bytes is 0"),
}


def _check(given: Sequence[IpcArgs], checks: Checks) -> None:
    for at, field in enumerate(IpcArgs._fields):
        if field not in checks:
            continue
        holds, words = checks[field]
        column = {id(args[at]): args[at] for args in given}  # what the handles share is looked at once
        for value in itertools.filterfalse(holds, column.values()):
            raise HandleError(f"argument {at} of a handle, {field}, is {_seen(value)}; it is {words}")


def _check_extents(checked: Sequence[IpcArgs]) -> None:
    """Every tensor lies in its storage."""
    lengths: dict[tuple[Any, ...], int] = {}  # elements from a tensor's first to its last; 0: it has none
    for args in checked:
        layout = (args.tensor_size, args.tensor_stride, args.dtype)
        if layout not in lengths:
            lengths[layout] = _length(*layout)
        end = (args.tensor_offset + lengths[layout]) * args.dtype.itemsize
        if lengths[layout] and end > args.storage_size_bytes:
            raise HandleError(
                f"the tensor of a handle ends {_seen(end)} bytes into its storage, past storage_size_bytes, "
                f"{args.storage_size_bytes}; export a tensor that lies inside its storage"
            )


def _length(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    if len(size) != len(stride):
        raise HandleError(f"a handle has {len(size)} sizes and {len(stride)} strides; one stride a dimension")
    if math.prod(n or 1 for n in size) * dtype.itemsize >= 2**63:
        raise HandleError("the sizes of a handle multiply to more than any memory has")
    return 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


def check_memory(exports: Iterable[IpcArgs], device: torch.device | str) -> None:
    """What of `check_exports` may have another answer the next time: the files are there. HandleError."""
    ours, lent = _device(device), [args for args in exports if args.storage_size_bytes]
    files: dict[bytes, int] = {}
    storages = {(args.storage_handle, args.storage_offset_bytes, args.storage_size_bytes) for args in lent}
    for handle, offset, size in storages:
        _check_storage(handle, offset, ours)
        if ours.type == "cpu":
            name = handle[len(CPU_MARK) :]
            files[name] = max(files.get(name, 0), HEADER_BYTES + size)
    for name in {args.ref_counter_handle for args in lent}:
        _check_file(name, COUNTER_FILE_BYTES, COUNTER_FILE_BYTES)  # a longer one holds something else
    for name, size in files.items():
        _check_file(name, size)


def _check_storage(handle: bytes, offset: int, ours: torch.device) -> None:
    emulated = handle.startswith(CPU_MARK)
    if emulated != (ours.type == "cpu"):
        seen, kind = ("an emulated CPU handle", "cpu") if emulated else ("a CUDA handle", "cuda")
        raise HandleError(f"{seen} came to a worker on {ours}; run trainer and server with --device {kind}")
    if emulated:
        if not _is_shm_name(handle[len(CPU_MARK) :]) or offset:
            raise HandleError(f"the storage_handle is {_seen(handle)}; it is cpu:/torch_<n>_<n>_<n>, at 0")
    elif handle[:1] != bytes([CUDA_HANDLE_VERSION]):
        raise HandleError(
            f"the CUDA storage_handle has {len(handle)} bytes and version {_seen(handle[:1])}; torch "
            f"{torch.__version__} here opens version {CUDA_HANDLE_VERSION}; run the same torch on both sides"
        )
    elif handle[1:2] != b"e" and (handle[1:2] != b"c" or len(handle) != 66):
        raise HandleError(f"the storage_handle is {_seen(handle)}; it is a version byte, 'c' and 64 bytes")


def _check_file(name: bytes, size: int, most: float = math.inf) -> None:
    try:
        there = size <= os.lstat(os.fsencode(SHM) + name).st_size <= most  # a link is itself: too small
    except OSError:
        there = False
    if not there:
        raise HandleError(f"no file {_seen(name)} of {size} bytes is in {SHM} here; {CAUSES}")


# --- Reference counters -------------------------------------------------------------------------------


class _Counter(NamedTuple):
    name: bytes
    slot: int


def ref_count(args: Any) -> int | None:
    """The counter of an export: 1 until it is released, 0 after. None: it has none, or its file is gone.

    Negative: released more than once. Raises HandleError where the arguments name no counter.
    """
    return ref_counts([args])[0]


def ref_counts(exports: Sequence[Any]) -> list[int | None]:
    """The same of many, reading each file once."""
    return _counts(_counters(exports))


def _counts(counters: Sequence[_Counter | None]) -> list[int | None]:
    files: dict[bytes, bytes] = {}  # none where it is gone
    for name in {counter.name for counter in counters if counter}:
        with contextlib.suppress(OSError):
            files[name] = read_counters(name)
    return [counter and counter_at(files.get(counter.name, b""), counter.slot) for counter in counters]


def settle(*exports: Any) -> None:
    """For exports that nobody opened: sets each counter from 1 to 0, so that the memory can be reclaimed."""
    counters = _counters(exports)
    _count({c for c, count in zip(counters, _counts(counters), strict=True) if c and count == 1}, -1)


def _counters(exports: Iterable[Any]) -> list[_Counter | None]:
    given = [_by_name(args) for args in exports]
    _check([args for args in given if args.ref_counter_handle is not None], COUNTER)
    slots = [(args.ref_counter_handle, args.ref_counter_offset) for args in given]
    return [None if name is None else _Counter(name, slot) for name, slot in slots]


def read_counters(name: bytes) -> bytes:
    """All counters of a file, for `counter_at`. Raises OSError where it cannot be read, or is gone."""
    file = _open_shm(name, os.O_RDONLY)
    try:
        return os.pread(file, 8 * SLOTS, HEADER_BYTES)
    finally:
        os.close(file)


def counter_at(counters: bytes, slot: int) -> int | None:
    """One of them; None where the file was too short for it."""
    word = counters[8 * slot : 8 * slot + 8]
    return int.from_bytes(word, "little", signed=True) if len(word) == 8 else None


def _count(counters: Iterable[_Counter], by: int) -> None:
    """Adds to each counter, as torch does; nothing where its file is gone, or is none of counters any more.

    A loan has one writer.
    """
    slots: dict[bytes, list[int]] = {}
    for counter in counters:
        slots.setdefault(counter.name, []).append(counter.slot)
    for name, mine in slots.items():
        # ValueError, IndexError: the file was cut; OverflowError: the counter is at its least.
        with contextlib.suppress(OSError, ValueError, IndexError, OverflowError), _lock:
            file = _open_shm(name)
            try:
                values = array.array("q", os.pread(file, 8 * SLOTS, HEADER_BYTES))
                for slot in mine:
                    values[slot] += by
                for start, end in _runs(sorted({*mine})):  # between them others may write
                    os.pwrite(file, values[start:end].tobytes(), HEADER_BYTES + 8 * start)
            finally:
                os.close(file)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as (first, last + 1) of those that follow each other."""
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        yield found[0], found[-1] + 1


def _open_shm(name: bytes, access: int = os.O_RDWR) -> int:
    """Opens what exists. Nothing here creates a file or lets one grow."""
    return os.open(os.fsencode(SHM) + name, access | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)


def ipc_collect() -> None:
    """Takes back the memory of all our exports whose counter is 0, CUDA's and the emulation's."""
    global _resting
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.ipc_collect()
    with _lock:
        values = {name: counters.tolist() for name, counters in _counter_files.items()} if _lent else {}
        over = [at for at, (_, alias) in _lent.items() if not values[at.name][at.slot] and alias() is None]
        for where in over:
            del _lent[where]
            _free_slots.append(where)
        _resting = len(over) or _resting


# --- The emulation: CPU memory lent as CUDA memory is -------------------------------------------------

_lock = threading.RLock()  # re-entrant: a release can run inside any allocation of the same thread
# Keeps what is lent alive, as CUDA's limbo does, and what can be lent again, as an alias does there.
_lent: dict[_Counter, tuple[torch.UntypedStorage, weakref.ref[_Alias]]] = {}
_counter_files: dict[bytes, torch.Tensor] = {}  # int64, [SLOTS]; torch unlinks the file with us
# The longest free first: a slot that is taken again at once would speak for the export before.
_free_slots: collections.deque[_Counter] = collections.deque()
_resting = 0  # so many of them, at the end, were given back last, and still speak for the exports before


@atexit.register
def _forget() -> None:
    """Unlinks our files now; otherwise torch's manager process does, two seconds after us.

    Of CUDA's torch would say at the end that something is still lent.
    """
    for exports in list(_renewable):
        exports.forget()
    _lent.clear()
    _free_slots.clear()
    _counter_files.clear()


def _export_cpu(tensor: torch.Tensor, index: int, alias: _Alias) -> tuple:
    storage, shape = tensor.untyped_storage(), (tensor.size(), tensor.stride(), tensor.storage_offset())
    layout = (torch.Tensor, *shape, torch.storage.TypedStorage, tensor.dtype, index)
    if storage.nbytes() == 0:
        return (*layout, None, 0, 0, False, None, 0, None, None)
    with _lock:
        name = _share(storage)
        where = _take_slot()
        _lent[where] = storage, weakref.ref(alias)
    return (*layout, CPU_MARK + name, storage.nbytes(), 0, False, *where, bytes(EVENT_BYTES), False)


def _share(storage: torch.UntypedStorage) -> bytes:
    """Moves a storage into shared memory in place; the name of its file. The data starts at byte 64."""
    try:
        room, needed = os.statvfs(SHM), HEADER_BYTES + storage.nbytes()
        left = room.f_bavail * room.f_frsize
        if not storage.is_shared() and left < needed:  # a full tmpfs kills by SIGBUS
            raise HandleError(
                f"{needed} bytes do not fit into {SHM}, which has {left} left (docker: --shm-size)"
            )
        _manager, name, _size = storage._share_filename_cpu_()
    except (OSError, RuntimeError) as exc:
        raise HandleError(f"no memory can be shared in {SHM} ({exc}); mount a tmpfs there") from exc
    return name


def _take_slot() -> _Counter:
    if len(_free_slots) <= _resting:
        counters = torch.zeros(SLOTS, dtype=torch.int64)
        name = _share(counters.untyped_storage())
        _counter_files[name] = counters
        _free_slots.extendleft(_Counter(name, slot) for slot in reversed(range(SLOTS)))
    where = _free_slots.popleft()
    _counter_files[where.name][where.slot] = 1
    return where


def _open_cpu(args: IpcArgs) -> torch.Tensor:
    """The whole storage: uint8 [bytes]. torch's own opener would leave a daemon and a descriptor behind."""
    length = HEADER_BYTES + args.storage_size_bytes
    try:
        file = _open_shm(args.storage_handle[len(CPU_MARK) :])
        try:
            if os.fstat(file).st_size < length:
                raise OSError("the file is too small")
            # By descriptor: from_file creates or grows what a name does not find.
            storage: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{file}", True, length)
        finally:
            os.close(file)
    except (OSError, RuntimeError) as exc:
        raise HandleError(f"the trainer's memory cannot be mapped ({exc}); {CAUSES}") from exc
    # Every view holds the storage: the last one takes the mapping along, and the loan ends.
    weakref.finalize(storage, _count, [_Counter(args.ref_counter_handle, args.ref_counter_offset)], -1)
    return torch.empty(0, dtype=torch.uint8).set_(storage, HEADER_BYTES, (args.storage_size_bytes,), (1,))


# --- The packed buffer --------------------------------------------------------------------------------


Copies = tuple[list[torch.Tensor], list[torch.Tensor]]  # (places, what is copied there), integers
LARGE_BYTES = 8 << 20  # from here on the device's own copy is the fastest
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, where there are integers of that size."""
    return tensor.view(word_dtype(tensor.dtype))


def word_dtype(dtype: torch.dtype) -> torch.dtype:
    return WORDS.get(dtype.itemsize, dtype)


def copy_all(places: Iterable[torch.Tensor], words: Iterable[torch.Tensor]) -> None:
    """Copies each to its place, asynchronously: the large ones one by one, all others together.

    Both are `words_of` tensors: torch fuses copies of half types through float32, and changes a NaN.
    """
    small: Copies = ([], [])
    for to, tensor in zip(places, words, strict=True):
        if tensor.nbytes >= LARGE_BYTES or tensor.itemsize not in WORDS:
            to.copy_(tensor, non_blocking=True)
        else:
            small[0].append(to)
            small[1].append(tensor)
    if small[0]:
        torch._foreach_copy_(*small)


class PackedBuffer:
    """The trainer's side: one uint8 buffer, allocated once, exported once a sync, filled once a chunk.

    export, then for each chunk fill, drain, send. A chunk's loan is from its request to its reply: nothing
    may fill the buffer in between.
    """

    def __init__(self, capacity_bytes: int, device: torch.device | str) -> None:
        if capacity_bytes < 1:
            raise HandleError(f"a packed buffer of {capacity_bytes} bytes holds no tensor")
        self.capacity_bytes = capacity_bytes
        self.device = _device(device)
        self.exports = Exports()  # of this buffer
        self._stream: torch.cuda.Stream | None = None
        self._bytes: torch.Tensor | None = self._allocate()

    def _allocate(self) -> torch.Tensor:
        return torch.empty(self.capacity_bytes, dtype=torch.uint8, device=place(self.device))

    def export(self) -> Handle:
        """Lends the buffer: `{gpu_uuid: fifteen arguments}`. Once a sync; all chunks carry it.

        It is the handle of the sync before, renewed, where that has been released.
        """
        if self._bytes is None:
            self._bytes = self._allocate()
        if not self.exports.renew():
            self.exports.lend({"the buffer": self._bytes}, self.device)
        return self.exports.handles[0]

    def fill(self, tensors: Iterable[torch.Tensor]) -> None:
        """Writes the tensors' bytes one after the other, row-major, without padding; on CUDA asynchronously.

        Any device, shape and dtype. Raises HandleError, with nothing written, if they do not fit.
        """
        self.write(self.lay_out(tensors))

    def lay_out(self, tensors: Iterable[torch.Tensor]) -> Copies:
        """What `fill` will copy, and where to: to be written again for as long as no tensor moves."""
        if self._bytes is None:
            raise HandleError("the buffer was abandoned; export it anew first")
        pieces = [piece for piece, _sizes in runs(map(wire_form, tensors))]
        total = sum(piece.numel() for piece in pieces)
        if total > self.capacity_bytes:
            raise HandleError(f"{total} bytes do not fit into a packed buffer of {self.capacity_bytes}")
        room = self._bytes[:total]
        if all(piece.numel() % 4 == 0 and piece.storage_offset() % 4 == 0 for piece in pieces):
            pieces, room = [piece.view(torch.int32) for piece in pieces], room.view(torch.int32)
        return list(room.split([piece.numel() for piece in pieces])) if pieces else [], pieces

    def write(self, copies: Copies) -> None:
        """Queues the copies on this thread's stream, for which `drain` waits."""
        if self.device.type == "cuda":
            self._stream = torch.cuda.current_stream(self.device)
        copy_all(*copies)

    def write_one(self, at: int, tensor: torch.Tensor) -> int:
        """Writes one tensor at that byte; how many it has. For tensors that cannot all be there at once."""
        if self._bytes is None:
            raise HandleError("the buffer was abandoned; export it anew first")
        piece = _bytes_of(wire_form(tensor))
        self.write(([self._bytes[at : at + piece.numel()]], [piece]))
        return piece.numel()

    def drain(self) -> None:
        """Waits until the bytes are in the buffer; the event of the older export covers none of them."""
        if self._stream is not None:
            self._stream.synchronize()

    def abandon(self) -> None:
        """Forgets this memory, unsettled: a receiver may still read it. The next export allocates anew."""
        self._bytes = None
        self.exports.forget()


class PackedBufferImporter:
    """The server's side: one mapping per export, whatever the number of chunks, released exactly once."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = _device(device)
        self._args: IpcArgs | None = None
        self._buffer: torch.Tensor | None = None

    def open(self, handle: Handle) -> torch.Tensor:
        """The buffer, uint8 [bytes]. Equal arguments as last time: the same mapping. Raises HandleError."""
        return self.open_export(check_exports([_pick(handle, self.device)], self.device)[0])

    def open_export(self, args: IpcArgs) -> torch.Tensor:
        """The same, of an export that `check_exports` let pass."""
        if self._buffer is None or args != self._args:
            self.release()
            [self._buffer], self._args = open_exports([args], self.device), args
        return self._buffer

    def release(self) -> None:
        """Drops the mapping; the counter goes to 0 with the last slice. Harmless when nothing is open."""
        self._buffer = self._args = None


def unpack(
    buffer: torch.Tensor,
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[Sequence[int]],
    tensor_sizes: Sequence[int],
) -> list[torch.Tensor]:
    """The tensors of a packed uint8 buffer, in order: views of it, or a copy of a slice that is unaligned.

    `tensor_sizes` are bytes, of each tensor its elements times its item size; each starts where the one
    before it ends, and all lie inside the buffer: the rules of `protocol` see to that.
    """
    flat = split(buffer, dtypes, tensor_sizes)
    return [tensor.view(shape) for tensor, shape in zip(flat, shapes, strict=True)]


def split(
    buffer: torch.Tensor, dtypes: Sequence[torch.dtype], tensor_sizes: Sequence[int]
) -> list[torch.Tensor]:
    """The same without their shapes: each has one dimension."""
    tensors: list[torch.Tensor] = []
    end = 0
    for dtype, run in itertools.groupby(zip(tensor_sizes, dtypes, strict=True), lambda row: row[1]):
        sizes = [size for size, _ in run]
        start, end = end, end + sum(sizes)
        flat = buffer[start:end]
        if flat.storage_offset() % dtype.itemsize:
            flat = flat.clone()  # torch views no bytes as a dtype across its item size
        tensors += flat.view(dtype).split([size // dtype.itemsize for size in sizes])
    return tensors
