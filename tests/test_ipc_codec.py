"""ipc_codec.py against a second real process, against torch, and against strangers."""

from __future__ import annotations

import base64
import collections
import gc
import inspect
import json
import multiprocessing
import os
import pickle
import random
import re
import struct
import subprocess
import sys
import time
import tracemalloc
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ipc_codec
from ipc_codec import Exports, HandleError, IpcArgs, PackedBuffer, PackedBufferImporter

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu:0", pytest.param("cuda:0", marks=needs_cuda)]


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().reshape(-1)
    flat = torch.empty(plain.numel(), dtype=plain.dtype).copy_(plain).view(torch.uint8)
    return bytes(flat.tolist())


def as_dtype(values: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8).view(dtype)


def tensors() -> dict[str, torch.Tensor]:
    """Field notes B20 to B25, on the CPU, fresh: lending moves a storage for good."""
    return {
        "scalar": torch.tensor(1.5),
        "fp8 scalar": as_dtype([0x7F], torch.float8_e4m3fn).reshape(()),
        "fp16": torch.tensor([1.0, -2.0, 3.0], dtype=torch.float16),
        "after fp16": torch.tensor([1.0, 2.0]),
        "bool": torch.tensor([True]),
        "after bool": torch.tensor([-(2**62)]),
        "bf16": torch.tensor([3.0], dtype=torch.bfloat16),
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "stepped": torch.arange(20)[3:9:2],
        "one of a step": torch.arange(2.0)[::2],
        "empty of a step": torch.empty(0)[::2],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "channels last": torch.arange(48.0).reshape(2, 2, 3, 4).to(memory_format=torch.channels_last),
        "row slice": torch.arange(1000.0).reshape(100, 10)[40:43],
        "two": torch.tensor([1.0, 2.0]),
        "empty": torch.empty(0, 3),
        "empty middle": torch.empty(2, 0, 4, dtype=torch.bfloat16),
        "empty slice of a full one": torch.arange(8.0)[3:3],
        "one": torch.tensor([7], dtype=torch.int8),
        "nan and -0.0": torch.tensor([float("nan"), -0.0, 0.0, float("-inf")]),
        "e4m3": as_dtype([*range(16), 0x7F, 0xFF], torch.float8_e4m3fn),
        "e5m2": as_dtype(list(range(240, 256)), torch.float8_e5m2),
        "e8m0": as_dtype(list(range(8)), torch.float8_e8m0fnu),
        "float4": as_dtype(list(range(8)), torch.float4_e2m1fn_x2).reshape(2, 4),
        "complex64": torch.tensor([1 + 2j, 3 - 4j]),
        "complex128": torch.tensor([1 + 2j], dtype=torch.complex128),
        "uint32": torch.tensor([2**32 - 1], dtype=torch.uint32),
        "uint16": torch.tensor([2**16 - 1], dtype=torch.uint16),
        "uint64": torch.tensor([2**63], dtype=torch.uint64),
        "lazy conj": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "lazy neg": torch.tensor([1 + 1j, 1 + 2j]).conj().imag,
        "lazy neg, dense": torch._neg_view(torch.tensor([1.0, 2.0])),
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
    }


# The other process ------------------------------------------------------------------------------------------


class Receiver:
    """What the peer does on request. A method's result goes back through the pipe."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.held: list[torch.Tensor] = []
        self.importer = PackedBufferImporter(device)

    def open(self, text: str) -> list[tuple]:
        handles = ipc_codec.decode_handles(text)
        self.held += [ipc_codec.import_handle(handle, self.device) for handle in handles]
        return [(ipc_codec.dtype_name(t.dtype), tuple(t.shape), bits(t), t.requires_grad) for t in self.held]

    def view(self) -> None:
        self.held = [tensor.reshape(-1)[1:].view(torch.uint8) for tensor in self.held]

    def add(self, value: float) -> None:
        for tensor in self.held:
            tensor.add_(value)
        self.sync()

    def drop(self) -> None:
        gc.disable()  # dropping alone is enough: no cycle keeps a mapping
        self.held.clear()
        self.sync()
        gc.enable()

    def sync(self) -> None:
        if self.device != "cpu:0":
            torch.cuda.synchronize()

    def unpack(self, text: str, names: list[str], shapes: list, sizes: list[int]) -> tuple[int, list[bytes]]:
        buffer = self.importer.open(ipc_codec.decode_handles(text))
        tensors = ipc_codec.unpack(buffer, [ipc_codec.parse_dtype(n) for n in names], shapes, sizes)
        assert [tuple(t.shape) for t in tensors] == [tuple(shape) for shape in shapes]
        return buffer.data_ptr(), [bits(t) for t in tensors]

    def release(self) -> None:
        self.importer.release()
        self.sync()

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))


def serve(pipe: Connection, device: str) -> None:
    receiver = Receiver(device)
    while (request := pipe.recv()) is not None:
        name, args = request
        try:
            pipe.send((None, getattr(receiver, name)(*args)))
        except Exception as exc:
            pipe.send((f"{type(exc).__name__}: {exc}", None))


class Peer:
    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def __call__(self, name: str, *args: Any) -> Any:
        self.pipe.send((name, args))
        assert self.pipe.poll(60), "the peer does not answer"
        error, result = self.pipe.recv()
        if error:
            raise HandleError(error)
        return result


@pytest.fixture(scope="module", params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(scope="module")
def peer(device):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, device), daemon=True)
    process.start()
    yield Peer(ours)
    ours.send(None)
    process.join(10)
    assert process.exitcode == 0


@pytest.fixture(autouse=True)
def nothing_stays_lent():
    """Every test ends with all its exports released or settled, and every file unlinked."""
    ipc_codec.ipc_collect()
    lent_before, files_before = set(ipc_codec._lent), our_files()  # of other files' tests
    yield
    ipc_codec.ipc_collect()
    if set(ipc_codec._lent) - lent_before or our_files() - files_before:
        gc.collect()  # not after every test: that took half of the run
        ipc_codec.ipc_collect()
    still_lent = set(ipc_codec._lent) - lent_before
    for where in still_lent:
        del ipc_codec._lent[where]  # one test's fault is not the next one's
    assert not still_lent
    left = our_files() - files_before - {name.decode()[1:] for name in ipc_codec._counter_files}
    assert len(left) <= torch.cuda.is_initialized()  # torch keeps one file for CUDA's own counters


def our_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")}


def args_of(handle: dict[str, Any]) -> tuple:
    (args,) = handle.values()
    return args


# Tensors in both modes --------------------------------------------------------------------------------------


def test_ipc_args_are_torchs():
    assert IpcArgs._fields == tuple(inspect.signature(rebuild_cuda_tensor).parameters)


def test_every_tensor_arrives_bit_for_bit_unpacked(device, peer):
    weights = [ipc_codec.wire_form(t.to(device[:-2])) for t in tensors().values()]
    handles = [ipc_codec.export_handle(weight, device) for weight in weights]
    arrived = peer("open", ipc_codec.encode_handles(handles))
    for (name, tensor), got in zip(tensors().items(), arrived, strict=True):
        assert got == (ipc_codec.dtype_name(tensor.dtype), tuple(tensor.shape), bits(tensor), False), name
    peer("drop")
    assert {ipc_codec.ref_count(args_of(h)) for h in handles} == {None, 0}


def test_strides_and_offsets_are_honoured_unpacked(device, peer):
    names = ["transposed", "stepped", "expanded", "channels last", "row slice", "empty slice of a full one"]
    weights = [tensors()[name].to(device[:-2]) for name in names]
    handles = [ipc_codec.export_handle(weight, device) for weight in weights]
    assert not all(weight.is_contiguous() for weight in weights)
    arrived = peer("open", ipc_codec.encode_handles(handles))
    assert [got[2] for got in arrived] == [bits(weight) for weight in weights]
    peer("drop")


def test_every_tensor_arrives_bit_for_bit_packed(device, peer):
    weights = [t.to(device[:-2]) for t in tensors().values()]
    sizes = [len(bits(t)) for t in weights]
    buffer = PackedBuffer(sum(sizes), device)
    handle = buffer.export()
    buffer.fill(weights)
    buffer.drain()
    names = [ipc_codec.dtype_name(t.dtype) for t in weights]
    shapes = [list(t.shape) for t in weights]
    _, arrived = peer("unpack", ipc_codec.encode_handles(handle), names, shapes, sizes)
    assert dict(zip(tensors(), arrived, strict=True)) == {name: bits(t) for name, t in tensors().items()}
    peer("release")
    assert ipc_codec.ref_count(args_of(handle)) == 0


def test_wire_form_copies_nothing_that_is_ready(device):
    ready = torch.nn.Parameter(torch.ones(3, device=device[:-2]))
    assert ipc_codec.wire_form(ready).data_ptr() == ready.data_ptr()
    assert type(ipc_codec.wire_form(ready)) is torch.Tensor and not ipc_codec.wire_form(ready).requires_grad
    assert ipc_codec.wire_form(torch.tensor([1 + 2j]).conj()).is_conj() is False


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.empty(2, device="meta"), "meta"),
        (torch.ones(2, 2).to_sparse(), "sparse"),
        (torch.ones(2, 2).to_sparse_csr(), "sparse"),
        (torch.nested.nested_tensor([torch.ones(1)]), "nested"),
        ("no tensor", "no tensor"),
    ],
)
def test_what_has_no_bytes_to_lend_is_refused(tensor, says):
    for function in (ipc_codec.wire_form, ipc_codec.export_handle):
        with pytest.raises(HandleError, match=says):
            function(tensor)


def test_export_refuses_flags_and_freed_storages():
    for flagged in (tensors()["lazy conj"], tensors()["lazy neg"]):
        with pytest.raises(HandleError, match="flag"):
            ipc_codec.export_handle(flagged)
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    with pytest.raises(HandleError, match="freed"):
        ipc_codec.export_handle(freed)


# The loan ---------------------------------------------------------------------------------------------------


def test_the_result_is_the_trainers_memory(device, peer):
    weight = torch.zeros(3, device=device[:-2])
    alias = weight[1:]
    handle = ipc_codec.export_handle(weight, device)
    peer("open", ipc_codec.encode_handles([handle]))
    peer("add", 5)
    assert weight.tolist() == [5, 5, 5]
    weight.fill_(8)  # an optimizer goes on updating it
    if device != "cpu:0":
        torch.cuda.synchronize()
    peer("add", 1)
    assert alias.tolist() == [9, 9]
    peer("drop")


def test_the_counter_follows_the_loan(device, peer):
    weight = torch.zeros(1000, device=device[:-2])
    handle = ipc_codec.export_handle(weight, device)
    args = args_of(handle)
    assert ipc_codec.ref_count(args) == 1
    peer("open", ipc_codec.encode_handles([handle]))
    assert ipc_codec.ref_count(args) == 1
    peer("view")
    assert ipc_codec.ref_count(args) == 1, "a view keeps the mapping"
    peer("drop")
    assert ipc_codec.ref_count(args) == 0
    ipc_codec.settle(args)
    assert ipc_codec.ref_count(args) == 0, "settle leaves any other value alone"


def test_opening_one_export_twice_shows(device, peer):
    weight = torch.zeros(1000, device=device[:-2])
    handle = ipc_codec.export_handle(weight, device)
    for _ in range(2):
        peer("open", ipc_codec.encode_handles([handle]))
        peer("drop")
    assert ipc_codec.ref_count(args_of(handle)) == -1
    ipc_codec._lent.clear()  # by law it stays lent for ever; not for the tests after this one


def test_settle_lets_memory_go(device):
    weight = torch.zeros(1 << 20, device=device[:-2])
    args = args_of(ipc_codec.export_handle(weight, device))
    del weight
    ipc_codec.ipc_collect()
    assert ipc_codec.ref_count(args) == 1
    ipc_codec.settle(args)
    assert ipc_codec.ref_count(args) == 0
    if device == "cpu:0":
        assert file_of(args) in our_files()
        ipc_codec.ipc_collect()
        assert file_of(args) not in our_files()


def file_of(args: tuple) -> str:
    return IpcArgs(*args).storage_handle.decode().removeprefix("cpu:/")


EXPORTS = """
import os, sys, torch, ipc_codec
def files(): return sum(name.startswith(f"torch_{os.getpid()}_") for name in os.listdir("/dev/shm"))
weight = torch.ones(1 << 20, device="cuda")
for count in range(40_000):  # torch 2.11: 30,000 of one storage end the process when it is freed
    [args] = ipc_codec.export_handle(weight).values()
    ipc_codec.settle(args)
    if count % 1000 == 999:
        ipc_codec.ipc_collect()
assert files() <= 1, files()
del weight
ipc_codec.ipc_collect()
assert torch.cuda.memory_allocated() == 0
"""


@needs_cuda
def test_a_storage_that_is_exported_in_sync_after_sync_takes_no_more_each_time():
    command = [sys.executable, "-c", EXPORTS]
    subprocess.run(command, cwd=Path(ipc_codec.__file__).parent, check=True, timeout=100)


def test_an_arena_keeps_bytes_ties_views_and_what_an_optimizer_knows(device):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    module[1].weight = torch.nn.Parameter(module[0].weight.detach().t())  # tied by storage, transposed
    module.to(device[:-2])
    module[1].weight.data = module[0].weight.data.t()
    before = {name: bits(weight) for name, weight in module.state_dict().items()}
    parameters = list(module.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    memory = ipc_codec.arena(module)
    weights = module.state_dict()
    assert {name: bits(weight) for name, weight in weights.items()} == before
    assert {w.untyped_storage().data_ptr() for w in weights.values()} == {memory.data_ptr()}
    assert all((weight.data_ptr() - memory.data_ptr()) % 512 == 0 for weight in weights.values())
    assert module[0].weight.data_ptr() == module[1].weight.data_ptr()
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    module[0].bias.grad = torch.ones_like(module[0].bias)
    optimizer.step()
    step = [struct.unpack("5f", bits(weights["0.bias"])), struct.unpack("5f", before["0.bias"])]
    assert all(abs(a + 1 - b) < 1e-6 for a, b in zip(*step, strict=True))


def test_a_lazy_conj_or_neg_is_no_arena():
    module = torch.nn.Module()
    module.register_buffer("lazy", torch._neg_view(torch.ones(3)))
    with pytest.raises(HandleError, match="flag"):
        ipc_codec.arena(module)
    assert torch.equal(module.lazy, -torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(7,), (64,), (512, 512)])
def test_digests_tell_what_changed_everywhere_at_once(device, dtype, shape):
    """Signs are the highest bits: of an even number of them a sum modulo 2^64 could know nothing."""
    torch.manual_seed(0)
    tensor = (100 * torch.randn(shape)).to(device[:-2], dtype) + 1
    changed = [tensor, -tensor, tensor.flip(0), torch.zeros_like(tensor), tensor + 1, tensor * 256]
    assert len(set(ipc_codec.digests(changed))) == 6
    assert ipc_codec.digests([tensor.clone()]) == ipc_codec.digests([tensor])


ROW = ipc_codec.ROW
SIZES = [5 * ROW, ROW, 3 * ROW, 0, 2 * ROW, 1, 3 * ROW + 1, 7, 5120, 4 * ROW - 4, 3 * ROW, 12, 3 * ROW]


def random_bytes(nbytes: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(nbytes)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator).to(device[:-2])


def side_by_side(pieces: list[torch.Tensor], alignment: int, start: int = 0) -> list[torch.Tensor]:
    """The same bytes in one storage, between others."""
    rooms = [-(-piece.numel() // alignment) * alignment for piece in pieces]
    memory = random_bytes(start + sum(rooms), str(pieces[0].device) + ":0")
    places = memory[start:].split(rooms)
    return [place[: piece.numel()].copy_(piece) for place, piece in zip(places, pieces, strict=True)]


@pytest.mark.parametrize("alignment, start", [(1, 0), (1, 1), (4, 8), (512, 0), (ROW, 256)])
def test_digests_are_of_the_bytes_alone_wherever_they_lie(device, alignment, start):
    alone = [random_bytes(size, device) for size in SIZES]
    alone[-1][-1] += 1  # of three tensors of one size the last differs in a byte
    expected = [ipc_codec.digests([piece])[0] for piece in alone]
    assert len(set(expected)) == len(SIZES) - 1 and expected[2] == expected[10]
    together = side_by_side(alone, alignment, start)
    assert ipc_codec.digests(together) == expected
    order = random.Random(0).sample(range(len(SIZES)), len(SIZES))
    mixed = [(together if at % 3 else alone)[at] for at in order]
    assert ipc_codec.digests(mixed) == [expected[at] for at in order]
    begins = together[0][: 3 * ROW]  # what overlaps
    first = ipc_codec.digests([begins.clone()])
    assert ipc_codec.digests([together[0], *together, begins]) == [expected[0], *expected, *first]


def test_digests_do_not_know_dtype_or_strides(device):
    alone = [random_bytes(size, device) for size in (3 * ROW, 8 * ROW, 64, 5120)]
    memory = side_by_side(alone, 512)
    expected = ipc_codec.digests(alone)
    for dtype in (torch.bool, torch.bfloat16, torch.float32, torch.complex128):
        assert ipc_codec.digests([piece.view(dtype).view(2, -1) for piece in memory]) == expected
    stepped = [torch.stack([piece, piece], 1)[:, 0] for piece in alone]
    assert ipc_codec.digests(stepped) == expected
    across = [piece.view(8, -1).t().contiguous().t() for piece in alone]
    assert ipc_codec.digests([*across, *memory]) == 2 * expected
    turned = [piece.view(8, -1).t() for piece in memory]  # at the same addresses
    copied = ipc_codec.digests([piece.clone(memory_format=torch.contiguous_format) for piece in turned])
    assert ipc_codec.digests([*memory, *turned]) == expected + copied
    assert ipc_codec.digests([]) == [] and len(set(ipc_codec.digests([alone[0][:0], alone[0][:0]]))) == 1


def test_a_run_ends_with_its_storage_and_before_a_gap():
    """Two storages may lie side by side: torch would not look from one into the other."""
    memory = bytearray(random_bytes(6 * ROW, "cpu:0").tolist())
    halves = [torch.frombuffer(memory, dtype=torch.uint8, count=3 * ROW, offset=at * ROW) for at in (0, 3)]
    assert halves[0].data_ptr() + 3 * ROW == halves[1].data_ptr()
    assert ipc_codec.digests(halves) == ipc_codec.digests([half.clone() for half in halves])
    rows = torch.zeros(9 * ROW, dtype=torch.uint8).split(ROW)
    found = ipc_codec.runs([*rows[:2], rows[2][:8], rows[2][8:], *rows[5:7], rows[4]], ROW)
    at = [(run.data_ptr() - rows[0].data_ptr(), sizes) for run, sizes in found]
    second, last = (2 * ROW + 8, [ROW - 8]), (4 * ROW, [ROW])
    assert at == [(0, [ROW, ROW, 8]), second, (5 * ROW, [ROW, ROW]), last]
    assert [len(run) for run, _ in found] == [2 * ROW + 8, ROW - 8, 2 * ROW, ROW]
    assert [sizes for _, sizes in ipc_codec.runs([rows[0], rows[1][:3], rows[1][3:]])] == [[ROW, 3, ROW - 3]]


@pytest.mark.parametrize("alignment", [1, 512])
def test_a_flipped_bit_changes_one_digest(device, alignment):
    together = side_by_side([random_bytes(size, device) for size in SIZES], alignment)
    expected = ipc_codec.digests(together)
    chance = random.Random(alignment)
    for at, tensor in enumerate(together):
        edges = {0, len(tensor) - 1, len(tensor) // ROW * ROW - 1, len(tensor) // ROW * ROW}
        for byte in sorted(edges & {*range(len(tensor))}):
            for bit in {7, chance.randrange(7)}:
                tensor[byte] ^= 1 << bit
                now = ipc_codec.digests(together)
                assert [a == b for a, b in zip(now, expected, strict=True)] == [n != at for n in range(13)]
                tensor[byte] ^= 1 << bit


def test_bytes_that_move_over_a_border_change_both_digests(device):
    first, second = side_by_side([random_bytes(3 * ROW, device), random_bytes(4 * ROW, device)], 1)
    before = ipc_codec.digests([first, second])
    first[-4:], second[:4] = second[:4].clone(), first[-4:].clone()
    after = ipc_codec.digests([first, second])
    assert before[0] != after[0] and before[1] != after[1]
    first[-ROW:], second[:ROW] = second[:ROW].clone(), first[-ROW:].clone()
    assert not {*ipc_codec.digests([first, second])} & {*before, *after}


def test_rows_that_change_places_are_seen(device):
    tensor = random_bytes(4 * ROW, device)
    rows = tensor.view(4, ROW)
    orders = [rows, rows.flip(0), rows[[0, 2, 1, 3]], rows[[1, 2, 3, 0]]]
    assert len(set(ipc_codec.digests(orders))) == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_items_that_change_places_are_seen_however_near(device, dtype, rows):
    """Inside a row of 4 KiB too: experts that are exchanged, halves that are interleaved, neighbours."""
    torch.manual_seed(0)
    tensor = (50 * torch.rand(rows, 128)).to(device[:-2], dtype)
    swapped, mirrored, near = tensor.clone(), tensor.clone(), tensor.clone()
    swapped[:, [3, 7]] = tensor[:, [7, 3]]
    mirrored[0, [0, 1, 126, 127]] = tensor[0, [1, 0, 127, 126]]
    near[0, [4, 5]] = tensor[0, [5, 4]]
    interleaved = tensor.view(rows, 2, 64).transpose(1, 2)
    orders = [tensor, swapped, mirrored, near, tensor.flip(1), tensor.roll(1, 1), interleaved]
    assert len(set(ipc_codec.digests(orders))) == len(orders)


def test_high_bits_do_not_cancel(device):
    """In a row of 512 words, and over 64 rows: 2^55 in each word is 2^64 in a row."""
    words = random_bytes(64 * ROW, device).view(torch.int64) >> 2  # room for a step, below the signs
    same = words.clone()
    same[1:3] = same[1]
    for bit in (0, 31, 32, *range(52, 64)):
        step = (1 << bit) - (bit == 63) * (1 << 64)
        pair = same.clone()
        pair[1:3] ^= step
        changed = [words, words + step, same, pair]
        assert len(set(ipc_codec.digests(changed))) == 4, bit


def test_a_meta_module_is_no_arena():
    with pytest.raises(HandleError, match="meta"):
        ipc_codec.arena(torch.nn.Linear(2, 2, device="meta"))


def test_memory_is_reclaimed_after_release(device, peer):
    def sync() -> tuple[int, int]:
        weight = torch.ones(1 << 20, device=device[:-2])
        handle = ipc_codec.export_handle(weight, device)
        peer("open", ipc_codec.encode_handles([handle]))
        del weight
        peer("drop")
        ipc_codec.ipc_collect()
        allocated = torch.cuda.memory_allocated() if device != "cpu:0" else 0
        return len(our_files()), allocated

    first = sync()
    before = peer("descriptors")
    assert [sync() for _ in range(5)] == [first] * 5
    assert peer("descriptors") == before


def test_each_export_has_its_own_slot_and_aliases_share_a_file():
    weight = torch.arange(10.0)
    exports = [args_of(ipc_codec.export_handle(t)) for t in (weight, weight, weight[3:])]
    assert len({IpcArgs(*args)[11:13] for args in exports}) == 3
    assert len({IpcArgs(*args).storage_handle for args in exports}) == 1
    for args in exports:
        ipc_codec.settle(args)


def test_more_exports_than_slots_take_another_file():
    weight, files = torch.arange(10.0), set()
    for _ in range(3):
        exports = [args_of(ipc_codec.export_handle(weight)) for _ in range(ipc_codec.SLOTS + 1)]
        files |= {IpcArgs(*args).ref_counter_handle for args in exports}
        ipc_codec.settle(*exports)
        ipc_codec.ipc_collect()
    assert len(files) == 3, "slots come back, but not those that came back last"


def test_a_slot_that_was_given_back_last_speaks_for_its_export_yet():
    """A witness looks at what a refused sync has left when the next one starts, which may have exported."""
    weight = torch.arange(10.0)
    for _ in range(3):
        refused = [args_of(ipc_codec.export_handle(weight)) for _ in range(6000)]
        ipc_codec.settle(*refused)
        ipc_codec.ipc_collect()
        again = [args_of(ipc_codec.export_handle(weight)) for _ in range(6000)]
        assert set(ipc_codec.ref_counts(refused)) == {0}
        ipc_codec.settle(*again)
        ipc_codec.ipc_collect()


def test_the_counter_has_cudas_layout():
    args = IpcArgs(*args_of(ipc_codec.export_handle(torch.ones(1))))
    raw = Path("/dev/shm" + args.ref_counter_handle.decode()).read_bytes()
    assert len(raw) == 64 + 8 * 10_000
    assert struct.unpack_from("<q", raw, 64 + 8 * args.ref_counter_offset) == (1,)
    ipc_codec.settle(args)


def test_ref_count_and_settle_without_a_counter():
    empty = args_of(ipc_codec.export_handle(torch.empty(0, 3)))
    gone = (*good_args()[:11], b"/torch_1_2_3", *good_args()[12:])
    for args in (empty, gone):
        assert ipc_codec.ref_count(args) is None
        ipc_codec.settle(args)
    assert not os.path.exists("/dev/shm/torch_1_2_3")
    for bad in (b"/../etc/passwd", b"/torch_1_2_3/../x", "text"):
        with pytest.raises(HandleError):
            ipc_codec.ref_count((*good_args()[:11], bad, *good_args()[12:]))


def test_a_full_shared_memory_mount_is_refused_not_killed(monkeypatch):
    full = os.statvfs("/dev/shm")
    monkeypatch.setattr(os, "statvfs", lambda path: type("", (), {"f_bavail": 0, "f_frsize": full.f_frsize}))
    with pytest.raises(HandleError, match="/dev/shm"):
        ipc_codec.export_handle(torch.ones(3))


def test_a_trainer_that_is_gone_is_released_without_a_word(peer, device):
    if device != "cpu:0":
        pytest.skip("the emulation's own")
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    trainer = context.Process(target=lend_and_wait, args=(theirs,), daemon=True)
    trainer.start()
    text = ours.recv()
    peer("open", text)
    trainer.kill()
    trainer.join()
    handle = ipc_codec.decode_handles(text)[0]
    deadline = time.monotonic() + 10
    while ipc_codec.ref_count(args_of(handle)) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ipc_codec.ref_count(args_of(handle)) is None, "torch's manager unlinks what the killed one lent"
    peer("add", 1)
    peer("drop")
    with pytest.raises(HandleError, match="--ipc=host"):
        peer("open", text)
    assert not os.path.exists("/dev/shm/" + file_of(args_of(handle)))


def lend_and_wait(pipe: Connection) -> None:
    weight = torch.ones(5)
    pipe.send(ipc_codec.encode_handles([ipc_codec.export_handle(weight)]))
    time.sleep(60)


# The packed buffer ------------------------------------------------------------------------------------------


def test_one_mapping_for_all_chunks_of_a_sync(device, peer):
    buffer = PackedBuffer(64, device)
    for _ in range(2):
        handle = buffer.export()
        text = ipc_codec.encode_handles(handle)
        places = set()
        for chunk in range(3):
            buffer.fill([torch.full((12,), float(chunk), device=device[:-2])])
            buffer.drain()
            place, (got,) = peer("unpack", text, ["float32"], [[12]], [48])
            places.add(place)
            assert got == struct.pack("<12f", *[chunk] * 12)
            assert ipc_codec.ref_count(args_of(handle)) == 1
        assert len(places) == 1
        peer("release")
        peer("release")
        assert ipc_codec.ref_count(args_of(handle)) == 0


def test_a_new_export_releases_the_one_before(device, peer):
    buffer = PackedBuffer(8, device)
    first, second = buffer.export(), buffer.export()
    for handle in (first, second):
        peer("unpack", ipc_codec.encode_handles(handle), [], [], [])
    assert ipc_codec.ref_count(args_of(first)) == 0
    peer("release")
    assert ipc_codec.ref_count(args_of(second)) == 0


def test_what_does_not_fit_writes_nothing(device):
    buffer = PackedBuffer(8, device)
    buffer.fill([torch.ones(2, device=device[:-2])])
    with pytest.raises(HandleError, match="12 bytes do not fit"):
        buffer.fill([torch.zeros(2, device=device[:-2]), torch.zeros(1, device=device[:-2])])
    buffer.drain()
    assert buffer._bytes is not None and bits(buffer._bytes) == struct.pack("<2f", 1, 1)
    buffer.fill([])
    buffer.fill([torch.empty(0, device=device[:-2])])
    with pytest.raises(HandleError, match="0 bytes"):
        PackedBuffer(0, device)


def test_an_abandoned_buffer_is_left_to_its_reader(device):
    buffer = PackedBuffer(8, device)
    buffer.fill([torch.ones(2, device=device[:-2])])
    old = args_of(buffer.export())
    buffer.abandon()
    with pytest.raises(HandleError, match="abandoned"):
        buffer.fill([])
    new = args_of(buffer.export())
    buffer.fill([torch.zeros(2, device=device[:-2])])
    assert ipc_codec.ref_count(old) == 1
    assert (IpcArgs(*old)[7], IpcArgs(*old)[9]) != (IpcArgs(*new)[7], IpcArgs(*new)[9])
    for args in (old, new):
        ipc_codec.settle(args)


def test_unpack_gives_views_where_it_can():
    buffer = torch.arange(16, dtype=torch.uint8)
    aligned, unaligned = ipc_codec.unpack(buffer, [torch.int32, torch.bool], [[2], [1]], [8, 1])
    assert aligned.data_ptr() == buffer.data_ptr() and unaligned.data_ptr() == buffer.data_ptr() + 8
    _, copied = ipc_codec.unpack(buffer, [torch.bool, torch.int64], [[], []], [1, 8])
    assert copied.item() == int.from_bytes(range(1, 9), "little") and copied.shape == ()


# Names and text ---------------------------------------------------------------------------------------------


def test_dtype_names_round_trip():
    dtypes = set(ipc_codec.DTYPES.values())
    assert len(dtypes) > 20
    for dtype in dtypes:
        assert ipc_codec.parse_dtype(ipc_codec.dtype_name(dtype)) is dtype
    assert ipc_codec.parse_dtype("half") is torch.float16
    for bad in (
        "nn",
        "load",
        "Tensor",
        "__name__",
        "torch.float16",
        "quint8",
        "int4",
        "",
        None,
        3,
        ["float16"],
    ):
        with pytest.raises(HandleError):
            ipc_codec.parse_dtype(bad)


def test_uuids():
    pattern = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    uuids = [ipc_codec.gpu_uuid(device) for device in ("cpu", "cpu:0", "cpu:1", torch.device("cpu", 11))]
    assert all(re.fullmatch(pattern, uuid) for uuid in uuids)
    assert uuids[0] == uuids[1] and len(set(uuids)) == 3
    with pytest.raises(HandleError):
        ipc_codec.gpu_uuid("meta")


def good_args() -> tuple:
    """Honest CUDA arguments of a 2 x 3 bfloat16 tensor at element 2 of its storage."""
    layout = (torch.Tensor, torch.Size([2, 3]), (3, 1), 2, torch.storage.TypedStorage, torch.bfloat16, 0)
    memory = (b"\x02c" + bytes(range(64)), 16, 512, False)
    return (*layout, *memory, b"/torch_417_2881137107_0", 7, bytes(64), True)


GOLDEN = (
    "gASVIwEAAAAAAABdlH2UjANhLWKUKIwFdG9yY2iUjAZUZW5zb3KUk5RoA4wEU2l6ZZSTlEsCSwOGlIWUUpRLA0sBhpRLAowN"
    "dG9yY2guc3RvcmFnZZSMDFR5cGVkU3RvcmFnZZSTlIwFdG9yY2iUjAhiZmxvYXQxNpSTlEsAQ0ICYwABAgMEBQYHCAkKCwwN"
    "Dg8QERITFBUWFxgZGhscHR4fICEiIyQlJicoKSorLC0uLzAxMjM0NTY3ODk6Ozw9Pj+USxBNAAKJQxcvdG9yY2hfNDE3XzI4"
    "ODExMzcxMDdfMJRLB0NAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
    "AAAAAAAAAJSIdJRzYS4="
)


def test_the_text_of_a_handle():
    text = ipc_codec.encode_handles([{"a-b": good_args()}])
    assert text == GOLDEN
    assert ipc_codec.decode_handles(text) == [{"a-b": GOOD_DECODED}]


GOOD_DECODED = (
    "torch.Tensor",
    (2, 3),
    (3, 1),
    2,
    "torch.storage.TypedStorage",
    "torch.bfloat16",
    *good_args()[6:],
)


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("packed", [False, True])
def test_honest_pickles_decode(protocol, packed):
    handles: Any = (
        {"u": good_args(), "v": good_args()} if packed else [{"u": good_args()} for _ in range(2500)]
    )
    decoded = ipc_codec.decode_handles(base64.b64encode(pickle.dumps(handles, protocol=protocol)).decode())
    plain = {"u": GOOD_DECODED, "v": GOOD_DECODED} if packed else [{"u": GOOD_DECODED}] * 2500
    assert decoded == plain
    described = ipc_codec.describe_handles(decoded)
    assert described == ipc_codec.describe_handles(handles)
    assert json.loads(json.dumps(described)) == described
    one = described["u"] if packed else described[0]["u"]
    assert one[:7] == ["torch.Tensor", [2, 3], [3, 1], 2, "torch.storage.TypedStorage", "torch.bfloat16", 0]
    assert one[7] == good_args()[7].hex()


def test_equal_bytes_are_pickled_once():
    handles = [
        {"u": tuple(bytes(bytearray(a)) if isinstance(a, bytes) else a for a in good_args())}
        for _ in range(99)
    ]
    assert len(ipc_codec.encode_handles(handles)) * 2 < len(base64.b64encode(pickle.dumps(handles)))


def test_the_alphabet_is_vllms():
    text = ipc_codec.encode_handles({"u": good_args()})
    assert ipc_codec.decode_handles(" \n".join(text)) == {"u": GOOD_DECODED}
    for bad in (text[:-1], "é" + text, "", "====", None, b"bytes", 7, [text]):
        with pytest.raises(HandleError):
            ipc_codec.decode_handles(bad)


def test_protocol_two_is_told_what_to_do():
    with pytest.raises(HandleError, match="protocol 3 or later"):
        ipc_codec.decode_handles(base64.b64encode(pickle.dumps([{"u": good_args()}], protocol=2)).decode())


def test_a_pair_decodes_to_be_told_apart():
    text = ipc_codec.encode_handles([{"u": (rebuild_cuda_tensor, good_args())}])
    (handle,) = ipc_codec.decode_handles(text)
    assert handle["u"] == ("torch.multiprocessing.reductions.rebuild_cuda_tensor", GOOD_DECODED)
    with pytest.raises(HandleError, match="bare fifteen"):
        ipc_codec.check_exports([handle["u"]], "cuda:0")[0]


def test_describe_bounds_what_it_does_not_know():
    bomb: Any = ()
    for _ in range(60):
        bomb = (bomb, bomb)

    class Loud:  # fmt: skip
        def __repr__(self) -> str:
            raise AssertionError

    described = ipc_codec.describe_handles([{"u": (bomb, Loud()), 3: None}])  # fmt: skip
    assert described[0]["u"][1] == "<Loud>" and described[0]["<int>"] is None
    assert len(json.dumps(described)) < 2000


# Every check of check_exports -------------------------------------------------------------------------------


@pytest.fixture
def counter_file():
    path = Path("/dev/shm/torch_417_2881137107_0")
    path.write_bytes(bytes(ipc_codec.COUNTER_FILE_BYTES))
    yield path
    path.unlink(missing_ok=True)


BAD = [  # (field, bad value, what the message says); one argument of good ones changed
    ("tensor_cls", torch.nn.Module, "tensor_cls"),
    ("tensor_cls", None, "tensor_cls"),
    ("tensor_cls", (torch.Tensor,), "tensor_cls"),
    ("tensor_size", [2, True], "tensor_size"),
    ("tensor_size", (2, -3), "tensor_size"),
    ("tensor_size", (2, 3.0), "tensor_size"),
    ("tensor_size", (2, 2**63), "tensor_size"),
    ("tensor_size", 6, "tensor_size"),
    ("tensor_size", "23", "tensor_size"),
    ("tensor_size", (1,) * 65, "tensor_size"),
    ("tensor_size", (2,), "one stride a dimension"),
    ("tensor_size", (3, 3), "past storage_size_bytes"),
    ("tensor_stride", (-3, 1), "tensor_stride"),
    ("tensor_stride", (3, "1"), "tensor_stride"),
    ("tensor_stride", (3, 1, 1), "one stride a dimension"),
    ("tensor_stride", (4, 1), "past storage_size_bytes"),
    ("tensor_stride", (2**62, 1), "past storage_size_bytes"),
    ("tensor_offset", -1, "tensor_offset"),
    ("tensor_offset", True, "tensor_offset"),
    ("tensor_offset", 3, "past storage_size_bytes"),
    ("storage_cls", torch.Tensor, "storage_cls"),
    ("storage_cls", torch.FloatStorage, "storage_cls"),
    ("dtype", "torch.nn", "dtype"),
    ("dtype", "bfloat16", "dtype"),
    ("dtype", torch.qint8, "dtype"),
    ("dtype", None, "dtype"),
    ("dtype", torch.float32, "past storage_size_bytes"),
    ("storage_device", -1, "storage_device"),
    ("storage_device", False, "storage_device"),
    ("storage_handle", None, "storage_handle"),
    ("storage_handle", "\x02c" + "h" * 64, "storage_handle"),
    ("storage_handle", b"", "version"),
    ("storage_handle", b"h" * 64, "version"),
    ("storage_handle", b"\x03c" + bytes(64), "version"),
    ("storage_handle", b"\x02x" + bytes(64), "storage_handle"),
    ("storage_handle", b"\x02c" + bytes(63), "storage_handle"),
    ("storage_handle", b"cpu:/torch_1_2_3", "--device cpu"),
    ("storage_size_bytes", 15, "past storage_size_bytes"),
    ("storage_size_bytes", -1, "storage_size_bytes"),
    ("storage_size_bytes", True, "storage_size_bytes"),
    ("storage_size_bytes", 2**63, "storage_size_bytes"),
    ("storage_offset_bytes", -1, "storage_offset_bytes"),
    ("storage_offset_bytes", None, "storage_offset_bytes"),
    ("requires_grad", 0, "requires_grad"),
    ("ref_counter_handle", None, "ref_counter_handle"),
    ("ref_counter_handle", "/torch_417_2881137107_0", "ref_counter_handle"),
    ("ref_counter_handle", b"/torch_417_2881137107_0\n", "ref_counter_handle"),
    ("ref_counter_handle", b"/../dev/shm/torch_417_2881137107_0", "ref_counter_handle"),
    ("ref_counter_handle", b"/torch_0_0_0", "--ipc=host"),
    ("ref_counter_offset", 10_000, "ref_counter_offset"),
    ("ref_counter_offset", -1, "ref_counter_offset"),
    ("ref_counter_offset", True, "ref_counter_offset"),
    ("event_handle", None, "event_handle"),
    ("event_handle", bytes(63), "event_handle"),
    ("event_sync_required", None, "event_sync_required"),
    ("event_sync_required", 1, "event_sync_required"),
]


def test_good_args_pass_raw_and_decoded(counter_file):
    for args in (good_args(), list(good_args()), GOOD_DECODED, IpcArgs(*good_args())):
        checked = ipc_codec.check_exports([args], "cuda:3")[0]
        assert checked == (*good_args()[:6], 3, *good_args()[7:10], False, *good_args()[11:])
        assert type(checked) is IpcArgs and checked.tensor_cls is torch.Tensor
        assert checked.dtype is torch.bfloat16 and checked.storage_cls is torch.storage.TypedStorage
    trained = IpcArgs(*good_args())._replace(tensor_cls=torch.nn.Parameter, requires_grad=True)
    assert ipc_codec.check_exports([trained], "cuda:3")[0] == checked
    segments = IpcArgs(*good_args())._replace(storage_handle=b"\x02e" + bytes(28))
    assert ipc_codec.check_exports([segments], "cuda:0")[0].storage_handle == segments.storage_handle


@pytest.mark.parametrize(("field", "value", "says"), BAD, ids=lambda v: str(v)[:20])
def test_one_bad_argument_is_refused(counter_file, field, value, says):
    with pytest.raises(HandleError, match=re.escape(says)):
        ipc_codec.check_exports([tuple(IpcArgs(*good_args())._replace(**{field: value}))], "cuda:0")[0]


@pytest.mark.parametrize("args", [None, "text", {}, (), good_args()[:14], (*good_args(), 0), 15, b"x" * 15])
def test_what_is_not_fifteen_arguments_is_refused(args):
    with pytest.raises(HandleError):
        ipc_codec.check_exports([args], "cuda:0")[0]


def test_sizes_that_overflow_are_refused(counter_file):
    huge = IpcArgs(*good_args())._replace(tensor_size=(2**62, 2**62), tensor_stride=(0, 0))
    with pytest.raises(HandleError, match="more than any memory"):
        ipc_codec.check_exports([huge], "cuda:0")[0]


def test_a_counter_file_must_be_whole_and_a_file(counter_file):
    for wrong in (-1, 1):  # a longer one is no counter file: it may be somebody's weights
        counter_file.write_bytes(bytes(ipc_codec.COUNTER_FILE_BYTES + wrong))
        with pytest.raises(HandleError, match="of 80064 bytes"):
            ipc_codec.check_exports([good_args()], "cuda:0")[0]
    counter_file.unlink()
    counter_file.symlink_to("/proc/kcore")
    with pytest.raises(HandleError, match="of 80064 bytes"):
        ipc_codec.check_exports([good_args()], "cuda:0")[0]


def test_a_storage_without_bytes_has_no_handle():
    empty = IpcArgs(*args_of(ipc_codec.export_handle(torch.empty(0, 3))))
    assert empty[7:] == (None, 0, 0, False, None, 0, None, None)
    for device in ("cpu:0", "cuda:0"):
        assert ipc_codec.check_exports([empty], device)[0].tensor_size == (0, 3)
        assert ipc_codec.check_exports(
            [empty._replace(event_handle=bytes(64), event_sync_required=True)], device
        )[0]
    for field, value in {
        "storage_handle": b"\x02c" + bytes(64),
        "tensor_size": (1, 3),
        "ref_counter_handle": b"/etc/passwd",
        "event_handle": "text",
        "event_sync_required": 0,
        "tensor_offset": 2**62,  # beyond what its views can add to it
    }.items():
        with pytest.raises(HandleError):
            ipc_codec.check_exports([empty._replace(**{field: value})], "cuda:0")[0]


def test_an_emulated_handle_is_checked():
    weight = torch.ones(4)
    good = IpcArgs(*args_of(ipc_codec.export_handle(weight)))
    assert ipc_codec.check_exports([good], "cpu:1")[0].storage_device == 1
    for field, value, says in [
        ("storage_handle", good.storage_handle + b"0", "no file"),
        ("storage_handle", b"cpu:/torch_1_2_3/../x", "storage_handle"),
        ("storage_handle", b"\x02c" + bytes(64), "--device cuda"),
        ("storage_offset_bytes", 4, "at 0"),
        ("storage_size_bytes", 17, "no file"),
    ]:
        with pytest.raises(HandleError, match=re.escape(says)):
            ipc_codec.check_exports([good._replace(**{field: value})], "cpu:0")[0]
    assert Path("/dev/shm", file_of(good)).stat().st_size == 64 + 16, "nothing has grown"
    ipc_codec.settle(good)


def test_a_handle_for_another_gpu_is_refused():
    for handle in ({"GPU-" + ipc_codec.gpu_uuid("cpu"): good_args()}, {}, [], None, {"x" * 10**6: ()}):
        with pytest.raises(HandleError) as refused:
            ipc_codec.import_handle(handle, "cpu:0")
        assert len(str(refused.value)) < 1500


# Strangers --------------------------------------------------------------------------------------------------


def wire(payload: bytes) -> str:
    return base64.b64encode(payload).decode()


def refused_in(payload: bytes, megabytes: float) -> str:
    text = wire(payload)
    tracemalloc.start()
    try:
        start = time.process_time()
        with pytest.raises(HandleError) as refused:
            ipc_codec.decode_handles(text)
        assert time.process_time() - start < 6
        assert tracemalloc.get_traced_memory()[1] < megabytes * 1e6
    finally:
        tracemalloc.stop()
    return str(refused.value)


class Calls:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def by_name(module: str, name: str, command: str) -> bytes:
    return (
        b"\x80\x04c"
        + f"{module}\n{name}\n".encode()
        + b"\x8c"
        + bytes([len(command)])
        + command.encode()
        + b"\x85R."
    )


HOSTILE_NAMES = """
    posix.system os.system builtins.eval builtins.exec builtins.getattr builtins.__import__ subprocess.Popen
    torch.load torch.hub.load torch.storage._load_from_bytes torch.ops torch.nn torch.Size.mro torch.Tensor
    torch.Tensor.__class__ torch.multiprocessing.reductions.rebuild_cuda_tensor torch.nn.parameter.Parameter
    torch.storage.UntypedStorage torch.bfloat16 copyreg._reconstructor importlib.import_module _codecs.encode
"""


@pytest.mark.parametrize("name", HOSTILE_NAMES.split())
def test_no_name_runs(tmp_path, name):
    canary = tmp_path / "canary"
    module, _, attribute = name.rpartition(".")
    refused_in(by_name(module, attribute, f"touch {canary}"), 1)
    refused_in(by_name(module, attribute, f"open({str(canary)!r}, 'w')"), 1)
    assert not canary.exists()


def test_the_canary_would_have_died(tmp_path):
    canary = tmp_path / "canary"
    payload = pickle.dumps([{"u": Calls(os.system, f"touch {canary}")}])
    assert "posix" in refused_in(payload, 1)
    assert not canary.exists()
    pickle.loads(payload)
    assert canary.exists(), "the payload is a real one"


HEAD, TENSOR = b"\x80\x04", b"ctorch\nTensor\n"


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (HEAD + TENSOR + b"}\x8c\x08__eq__xx" + TENSOR + b"sb.", "BUILD"),
        (HEAD + TENSOR + b")\x81.", "NEWOBJ"),
        (HEAD + b"(" + TENSOR + b"o.", "OBJ"),
        (HEAD + b"(itorch\nTensor\n.", "INST"),
        (HEAD + b"\x82\x01.", "EXT1"),
        (HEAD + b"Vid\nQ.", "UNICODE"),
        (HEAD + b"G\x00\x00\x00\x00\x00\x00\x00\x00.", "BINFLOAT"),
        (HEAD + b"\x96\x00\x00\x00\x00\x00\x00\x00\x00.", "BYTEARRAY8"),
        (HEAD + b"]0.", "POP"),
        (HEAD + b"\xff.", "0xff"),
        (HEAD + TENSOR + b")R.", "calls"),
        (HEAD + b"ctorch\nSize\n)R.", "calls"),
        (HEAD + b"ctorch\nSize\n]\x85R.", "calls"),
        (HEAD + b"ctorch\nSize\n))\x86R.", "calls"),
        (HEAD + b"]r\xff\xff\xff\xff.", "memo"),
        (HEAD + b"]q\x05.", "memo"),
        (HEAD + b"}]Ns.", "key"),
        (HEAD + b"}K\x01Ns.", "key"),
        (HEAD + b"}(\x8c\x01au.", "items"),
        (HEAD + b"]]Ns.", "items"),
        (HEAD + b"}Na.", "appends"),
        (HEAD + b"N.", "list of dicts"),
        (HEAD + b"\x8c\x01a.", "list of dicts"),
        (HEAD + b"]].", "one value"),
        (HEAD + b"(].", "one value"),
        (HEAD + b"].x", "one value"),
        (HEAD + b".", "one value"),
        (HEAD + b"a.", "broken"),
        (HEAD + b"\x87.", "broken"),
        (HEAD + b"]]\x87.", "broken"),
        (HEAD + b"t.", "broken"),
        (HEAD + b"N(Na\x85u.", "no list"),
        (HEAD + b"]]((\x86e.", "broken"),
        (HEAD + b"h\x00.", "broken"),
        (HEAD + b"j\xff\xff\xff\xff.", "broken"),
        (HEAD + b"\x8c\x01\xff.", "broken"),
        (HEAD + b"\x8c\x09a.", "broken"),
        (HEAD + b"X\xff\xff\xff\xffa.", "broken"),
        (HEAD + b"B\xff\xff\xff\xffa.", "broken"),
        (HEAD + b"\x8a\xffa.", "broken"),
        (HEAD + b"\x95\xff\xff\xff\xff\xff\xff\xff\xff].", "broken"),
        (HEAD + b"ctorch\nTensor", "broken"),
        (HEAD + b"]K\x01\x93.", "no str"),
        (HEAD + HEAD + b"].", "PROTO"),
        (b"\x80\x06].", "protocol 3"),
        (b"].", "protocol 3"),
        (b"\x80", "protocol 3"),
        (HEAD, "broken"),
    ],
)
def test_what_no_pickler_of_handles_writes(payload, says):
    assert says in refused_in(payload, 1)


FLOODS = {
    "nested lists": lambda n: b"]" * n + b"a" * (n - 1),
    "nested tuples": lambda n: b")" + b"\x85" * n,
    "empty dicts": lambda n: b"}" * n,
    "marks": lambda n: b"(" * n,
    "memo": lambda n: b"N" + b"\x94" * n,
    "nones": lambda n: b"](" + b"N" * n,
    "numbers": lambda n: b"](" + b"M\xff\xff" * (n // 3),
}


LATER = ("nested tuples", "marks", "nones", "numbers")  # in a long run: tracing memory is slow


@pytest.mark.parametrize(
    "flood", [pytest.param(name, marks=[pytest.mark.long] * (name in LATER)) for name in FLOODS]
)
def test_megabytes_of(flood):
    """Memory is measured on a tenth: tracing is slow, and the bound is linear."""
    refused_in(HEAD + FLOODS[flood](400_000) + b".", 12)
    text = wire(HEAD + FLOODS[flood](7_500_000 if flood != "nested lists" else 3_750_000) + b".")
    start = time.process_time()
    with pytest.raises(HandleError):
        ipc_codec.decode_handles(text)
    assert time.process_time() - start < 6, len(text)


def doubled(levels: int) -> bytes:
    """t = (t, t), that many times over: 2 ** levels values in 4 * levels bytes."""
    return b")" + b"".join(b"\x94h%c\x86" % i for i in range(levels))


@pytest.mark.parametrize(
    "body",
    [
        b"]" + doubled(40) + b"a",
        b"}\x8c\x01u" + doubled(40) + b"s",
        b"}" + doubled(40) + b"Ns",
        b"]" + doubled(200) + b"a",
        b"]("
        + b"}\x94("
        + b"".join(b"\x8c\x04%04dN" % i for i in range(5000))
        + b"u"
        + b"h\x00" * 5000
        + b"e",
        b"](" + b"(" + b"N" * 5000 + b"t\x94" + b"h\x00" * 5000 + b"e",
        b"](}\x94(\x8c\x01aN\x8c\x01bN\x8c\x01cNu" + b"h\x00" * 5000 + b"e",
        b"](}\x94(\x8c\x01aN\x8c\x01bN\x8c\x01cNu" + b"j\0\0\0\0" * 5000 + b"e",
        b"]\x94h\x00a",
        b"]\x94(h\x00h\x00h\x00e",
        b"]}\x94\x8c\x01ah\x00sa",
    ],
)
def test_bombs(body):
    assert len(refused_in(HEAD + body + b".", 5)) < 300


def test_a_bomb_would_have_exploded():
    assert len(str(pickle.loads(HEAD + b"]" + doubled(10) + b"a."))) > 1000


def small_payload() -> bytes:
    return base64.b64decode(ipc_codec.encode_handles([{"u": good_args()}, {"u": good_args()}]))


def test_every_cut_is_refused():
    payload = small_payload()
    for length in range(len(payload)):
        with pytest.raises(HandleError):
            ipc_codec.decode_handles(wire(payload[:length]))


def inert(value: Any) -> bool:
    if type(value) is dict:
        return all(type(k) is str and inert(v) for k, v in value.items())
    if type(value) in (list, tuple):
        return all(map(inert, value))
    return value is None or type(value) in (bool, int, str, bytes)


def test_random_flips_are_refused_or_inert():
    payload, chance = small_payload(), random.Random(0)
    decoded = 0
    for _ in range(5000):
        flipped = bytearray(payload)
        for _ in range(chance.randint(1, 4)):
            flipped[chance.randrange(len(flipped))] = chance.randrange(256)
        try:
            handles = ipc_codec.decode_handles(wire(bytes(flipped)))
        except HandleError:
            continue
        decoded += 1
        assert inert(handles)
        json.dumps(ipc_codec.describe_handles(handles))
        for args in (
            handles[0].values() if type(handles) is list and handles and type(handles[0]) is dict else ()
        ):
            with pytest.raises(HandleError):  # the counter file of a made-up handle is missing at the least
                ipc_codec.check_exports([args], "cuda:0")[0]
    assert 500 < decoded < 4500


def test_eighteen_thousand_handles_are_quick():
    handles = [{"u": (*good_args()[:13], os.urandom(64), True)} for _ in range(18_867)]
    text = ipc_codec.encode_handles(handles)
    start = time.process_time()
    decoded = ipc_codec.decode_handles(text)
    assert time.process_time() - start < 3 and len(decoded) == 18_867


# Exports that are lent again --------------------------------------------------------------------------------


def lent_by(exports: Exports) -> list[tuple]:
    return [args_of(handle) for handle in exports.handles]


def counts_of(exports: Exports) -> list[int | None]:
    return ipc_codec.ref_counts(lent_by(exports))


def three(device: str) -> dict[str, torch.Tensor]:
    return {name: torch.full((5,), float(at), device=device[:-2]) for at, name in enumerate("abc")}


def test_nothing_is_renewed_that_was_not_lent_or_is_forgotten(device):
    exports = Exports()
    assert not exports.renew() and exports.handles == []
    exports.forget()
    handles = exports.lend(three(device), device)
    ipc_codec.settle(*lent_by(exports))
    exports.forget()
    assert not exports.renew() and exports.handles == []
    assert ipc_codec.ref_counts(list(map(args_of, handles))) == [0, 0, 0]


@pytest.mark.parametrize("late", range(3))
def test_all_are_renewed_or_none(device, late):
    exports = Exports()
    exports.lend(three(device), device)
    assert not exports.renew() and counts_of(exports) == [1, 1, 1]
    others = [args for at, args in enumerate(lent_by(exports)) if at != late]
    ipc_codec.settle(*others)
    before = counts_of(exports)
    assert not exports.renew() and counts_of(exports) == before and sorted(map(int, before)) == [0, 0, 1]
    ipc_codec.settle(*lent_by(exports))
    assert exports.renew() and counts_of(exports) == [1, 1, 1]
    assert not exports.renew() and counts_of(exports) == [1, 1, 1]
    ipc_codec.settle(*lent_by(exports))
    assert exports.renew()
    ipc_codec.settle(*lent_by(exports))


def test_what_was_released_twice_is_not_renewed(device, peer):
    exports = Exports()
    text = ipc_codec.encode_handles(exports.lend(three(device), device))
    for _ in range(2):
        peer("open", text)
        peer("drop")
    assert counts_of(exports) == [-1, -1, -1]
    assert not exports.renew() and counts_of(exports) == [-1, -1, -1]
    ipc_codec._count(exports._counters, 1)  # so that it does not stay lent for ever, as by law it does


def test_a_counter_file_that_is_gone_renews_nothing_and_is_not_made_again(device):
    exports = Exports()
    exports.lend(three(device), device)
    ipc_codec.settle(*lent_by(exports))
    path = Path(ipc_codec.SHM + IpcArgs(*lent_by(exports)[0]).ref_counter_handle.decode())
    path.rename(away := path.with_suffix(".away"))
    try:
        assert not exports.renew() and counts_of(exports) == [None] * 3 and not path.exists()
    finally:
        away.rename(path)
    assert counts_of(exports) == [0, 0, 0] and exports.renew()
    ipc_codec.settle(*lent_by(exports))


def test_a_renewed_export_is_the_same_handle_on_the_bytes_of_now(device, peer):
    weights, exports = three(device), Exports()
    text = ipc_codec.encode_handles(exports.lend(weights, device))
    for value in range(5):
        for weight in weights.values():
            weight.fill_(value)
        if device != "cpu:0":
            torch.cuda.synchronize()
        assert exports.renew() is (value > 0)
        assert ipc_codec.encode_handles(exports.handles) == text and counts_of(exports) == [1, 1, 1]
        arrived = peer("open", text)
        assert [got[2] for got in arrived] == [struct.pack("<5f", *[value] * 5)] * 3
        assert not exports.renew() and counts_of(exports) == [1, 1, 1], "the peer has them open"
        peer("drop")
        assert counts_of(exports) == [0, 0, 0]


def test_what_has_no_bytes_has_no_counter_and_is_renewed_with_the_rest(device, peer):
    empty = torch.empty(0, 3, device=device[:-2])
    alone, beside = Exports(), Exports()
    alone.lend({"empty": empty}, device)
    assert counts_of(alone) == [None] and alone.renew() and alone.renew()
    text = ipc_codec.encode_handles(beside.lend({"empty": empty, "a": three(device)["b"]}, device))
    assert not beside.renew()
    for _ in range(2):
        arrived = peer("open", text)
        assert [got[2] for got in arrived] == [b"", struct.pack("<5f", *[1] * 5)]
        peer("drop")
        assert counts_of(beside) == [None, 0] and beside.renew() and counts_of(beside) == [None, 1]
    ipc_codec.settle(*lent_by(beside))


@pytest.mark.long
def test_many_exports_of_one_storage_are_renewed_and_its_memory_comes_back(device, peer):
    """More than torch may have of one alias: see `_Alias.MOST`."""

    def used() -> tuple[int, int]:
        gc.collect()  # what other tests have left
        ipc_codec.ipc_collect()
        return len(our_files()), torch.cuda.memory_allocated() if device != "cpu:0" else 0

    exports, warm = Exports(), Exports()
    warm.lend(three(device), device)  # a counter's file, and what CUDA takes for the first
    ipc_codec.settle(*lent_by(warm))
    warm.forget()
    before = used()
    weight = torch.arange(1 << 16, dtype=torch.float32, device=device[:-2])
    views = {str(at): weight[at:][:7] for at in range(2 * ipc_codec._Alias.MOST + 88)}
    text = ipc_codec.encode_handles(exports.lend(views, device))
    slots = {IpcArgs(*args)[11:13] for args in lent_by(exports)}
    assert len(slots) == len(views) and len({IpcArgs(*args)[7] for args in lent_by(exports)}) == 1
    ipc_codec.settle(*lent_by(exports))
    assert exports.renew() and {*counts_of(exports)} == {1}
    arrived = peer("open", text)
    assert [got[2] for got in arrived] == [bits(view) for view in views.values()]
    peer("drop")
    ipc_codec.settle(*lent_by(exports))  # this peer opened them one by one: once a storage is enough
    del views, weight
    assert used()[0] >= before[0] and used() != before, "what can be lent again stays"
    exports.forget()
    assert used() == before


def test_what_can_be_lent_again_keeps_its_memory_until_it_is_forgotten_or_dropped():
    def lend() -> tuple[Exports, str]:
        exports = Exports()
        exports.lend({"a": torch.ones(1 << 10)}, "cpu:0")
        ipc_codec.settle(*lent_by(exports))
        ipc_codec.ipc_collect()
        return exports, file_of(lent_by(exports)[0])

    forgotten, path = lend()
    assert path in our_files()
    forgotten.forget()
    ipc_codec.ipc_collect()
    assert path not in our_files()
    dropped, path = lend()
    assert path in our_files()
    del dropped
    ipc_codec.ipc_collect()
    assert path not in our_files()
    anew, path = lend()
    anew.lend({"b": torch.ones(1)}, "cpu:0")
    ipc_codec.ipc_collect()
    assert path not in our_files()
    ipc_codec.settle(*lent_by(anew))


def test_a_slot_that_can_be_lent_again_is_nobody_elses(monkeypatch):
    [used] = ipc_codec.Exports().lend({"a": torch.ones(1)})  # there is a file with slots
    ipc_codec.settle(*used.values())
    two = collections.deque(ipc_codec._free_slots.popleft() for _ in range(2))
    monkeypatch.setattr(ipc_codec, "_free_slots", two)
    exports, weight = Exports(), torch.ones(1)

    def slot_of(args: tuple) -> tuple:
        return IpcArgs(*args)[11:13]

    def others(count: int) -> set[tuple]:
        found = set()
        for _ in range(count):
            args = args_of(ipc_codec.export_handle(weight))
            found.add(slot_of(args))
            ipc_codec.settle(args)
            ipc_codec.ipc_collect()
        return found

    exports.lend({"a": weight})
    mine = slot_of(lent_by(exports)[0])
    ipc_codec.settle(*lent_by(exports))
    ipc_codec.ipc_collect()
    assert mine not in others(5)
    assert exports.renew() and mine not in others(2)
    ipc_codec.settle(*lent_by(exports))
    exports.forget()
    ipc_codec.ipc_collect()
    assert mine in others(3)


def test_what_is_forgotten_while_it_is_lent_stays_lent(device, peer):
    exports = Exports()
    handles = exports.lend(three(device), device)
    peer("open", ipc_codec.encode_handles(handles))
    exports.forget()
    ipc_codec.ipc_collect()
    assert ipc_codec.ref_counts(list(map(args_of, handles))) == [1, 1, 1]
    if device == "cpu:0":
        assert {file_of(args_of(handle)) for handle in handles} <= our_files()
    peer("drop")
    assert ipc_codec.ref_counts(list(map(args_of, handles))) == [0, 0, 0]


def test_where_lending_fails_nothing_is_kept_and_what_was_kept_is_forgotten(device):
    exports = Exports()
    exports.lend(three(device), device)
    before = lent_by(exports)
    ipc_codec.settle(*before)
    with pytest.raises(HandleError, match=r"^bad: a meta"):
        exports.lend(three(device) | {"bad": torch.empty(1, device="meta")}, device)
    assert exports.handles == [] and not exports.renew()
    assert ipc_codec.ref_counts(before) == [0, 0, 0]


def test_a_buffer_lends_the_same_handle_when_it_is_back_and_another_while_it_is_not(device, peer):
    buffer = PackedBuffer(8, device)
    texts = []
    for value in range(4):
        texts.append(ipc_codec.encode_handles(handle := buffer.export()))
        buffer.fill([torch.full((2,), float(value), device=device[:-2])])
        buffer.drain()
        _, (got,) = peer("unpack", texts[-1], ["float32"], [[2]], [8])
        assert got == struct.pack("<2f", value, value) and ipc_codec.ref_count(args_of(handle)) == 1
        if value != 2:
            peer("release")
            assert ipc_codec.ref_count(args_of(handle)) == 0
    assert texts[0] == texts[1] == texts[2] != texts[3]
    late = args_of(ipc_codec.decode_handles(texts[0]))
    assert ipc_codec.ref_count(late) == 0, "an importer lets go of one when it opens another"
    assert IpcArgs(*late).storage_handle == IpcArgs(*args_of(handle)).storage_handle
    assert args_of(buffer.export()) == args_of(handle), "the last one is renewed"
    buffer.abandon()
    ipc_codec.settle(args_of(handle))  # its reader has let go of it, late
    new = args_of(buffer.export())
    assert ipc_codec.ref_count(args_of(handle)) == 0, "the handle of memory that is filled no more"
    assert new[7:13] != args_of(handle)[7:13]
    ipc_codec.settle(new)


# Counters that are counted together -------------------------------------------------------------------------


@pytest.fixture
def counters():
    """A counter file of nobody's: (its name, what is in it)."""
    name = b"/torch_%d_7_7" % os.getpid()
    path = Path("/dev/shm" + name.decode())
    path.write_bytes(bytes(ipc_codec.COUNTER_FILE_BYTES))
    yield name, lambda: struct.unpack_from(f"<{ipc_codec.SLOTS}q", path.read_bytes(), 64)
    path.unlink()


def test_between_the_counters_that_are_counted_others_may_write(counters, monkeypatch):
    """Another process writes all that is not ours, just before we write."""
    name, values = counters
    mine = {0: 1, 1: 1, 2: 1, 5: 2, 700: 1, ipc_codec.SLOTS - 1: 1}  # slot: how often it is counted
    write, written = os.pwrite, []

    def others_first(file: int, data: bytes, at: int) -> int:
        for slot in range(ipc_codec.SLOTS) if not written else ():
            if slot not in mine:
                write(file, struct.pack("<q", 1000 + slot), 64 + 8 * slot)
        written.append((at - 64) // 8)
        return write(file, data, at)

    monkeypatch.setattr(os, "pwrite", others_first)
    slots = [slot for slot, times in mine.items() for _ in range(times)]
    random.Random(0).shuffle(slots)
    ipc_codec._count([ipc_codec._Counter(name, slot) for slot in slots], -1)
    assert values() == tuple(-mine[slot] if slot in mine else 1000 + slot for slot in range(ipc_codec.SLOTS))
    assert written == [0, 5, 700, ipc_codec.SLOTS - 1], "neighbours are written together"


def test_counters_of_several_files_are_counted_and_one_that_is_gone_is_passed_over(counters, tmp_path):
    name, values = counters
    gone = ipc_codec._Counter(b"/torch_1_2_3", 3)
    ipc_codec._count([gone, ipc_codec._Counter(name, 3), gone], 1)
    assert values()[2:5] == (0, 1, 0) and not os.path.exists("/dev/shm/torch_1_2_3")
    ipc_codec._count([], 1)
    assert sum(values()) == 1


@pytest.mark.parametrize("length", [64 + 8 * 3, 64 + 8 * 3 + 5, 0], ids=["cut", "cut in a word", "empty"])
def test_a_counter_that_cannot_be_counted_is_passed_over(counters, length):
    """A finalizer counts: what it raised Python would print, and nobody could catch."""
    name, values = counters
    path = Path("/dev/shm" + name.decode())
    with path.open("r+b") as file:
        file.write(struct.pack("<q", -(1 << 63)).rjust(72, b"\0"))
    ipc_codec._count([ipc_codec._Counter(name, 0)], -1)
    assert values()[0] == -(1 << 63)
    os.truncate(path, length)
    ipc_codec._count([ipc_codec._Counter(name, 3)], -1)
    assert path.stat().st_size == length


def test_settle_takes_many_and_settles_each_once(counters):
    name, values = counters

    def export(slot: int, name: bytes = name) -> tuple:
        return (*good_args()[:11], name, slot, *good_args()[13:])

    for slot, count in enumerate([1, 1, 0, -1, 2]):
        ipc_codec._count([ipc_codec._Counter(name, slot)] * abs(count), 1 if count > 0 else -1)
    assert values()[:6] == (1, 1, 0, -1, 2, 0)
    without = args_of(ipc_codec.export_handle(torch.empty(0, 3)))
    all_of_them = [export(slot) for slot in range(6)]
    ipc_codec.settle(export(1), *all_of_them, export(1), without, export(1, b"/torch_1_2_3"))
    assert values()[:6] == (0, 0, 0, -1, 2, 0)
    ipc_codec.settle()
    assert values()[:6] == (0, 0, 0, -1, 2, 0)


def test_settle_settles_none_where_one_names_no_counter(counters):
    name, values = counters
    ipc_codec._count([ipc_codec._Counter(name, 3)], 1)
    with pytest.raises(HandleError):
        ipc_codec.settle(
            (*good_args()[:11], name, 3, *good_args()[13:]),
            (*good_args()[:11], b"/../x", 3, *good_args()[13:]),
        )
    assert values()[3] == 1
