"""Several ranks, or one process with several GPUs, against servers with several workers.

First what the tests use: ranks (processes over gloo; NCCL where there are GPUs), servers, weights. Then a
section a promise: one sync of all ranks, sharded weights, one process with several GPUs, rank-local lists,
ranks that disagree, ranks that fail or end, refusals, GPUs that do not meet, the oracle, the command line,
long runs. Ranks are on `cpu:0`, `cpu:1`, ...; where there are two GPUs, on `cuda:0`, `cuda:1` as well.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import itertools
import json
import multiprocessing
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from test_trainer import FINISH, GOOD, INIT, START, UPDATE, Answer, Fake
from torch import Tensor

import ipc_codec
import protocol
import server
import trainer
from ipc_codec import HandleError
from test_roundtrip import ROOT, Server, digests, environment, needs_two_gpus, noise
from trainer import HTTPWeightSyncClient, RankError, Ranks, SyncError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor  # takes a second, in this process for nothing

CUDA = torch.cuda.device_count() > 1
# Ranks are forked from a process that has imported all of this. CUDA does not live through a fork.
CONTEXT: Any = multiprocessing.get_context("spawn" if CUDA else "forkserver")
IMPORTED = ["torch.distributed.fsdp", "torch._dynamo"]  # by torch, in mid-work; each takes seconds
HERE = Path(__file__).parent
needs_four_gpus = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
kinds = pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=needs_two_gpus)])
kinds_of_four = pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=needs_four_gpus)])
cuda_is_long = pytest.mark.parametrize(  # where the ranks are new: to start them on GPUs takes ten seconds
    "kind", ["cpu", pytest.param("cuda", marks=[needs_two_gpus, pytest.mark.long])]
)
both_modes = pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
unpacked_is_long = pytest.mark.parametrize(
    "packed", [pytest.param(False, marks=pytest.mark.long), True], ids=["unpacked", "packed"]
)
HOLD = 0.3  # seconds that a slow witness leaves an update unanswered
SECONDS = 20.0  # the time-out of clients and groups, where none is waited for
PATIENCE = {"cpu": 2.0, "cuda": 4.0}  # where one is: the first use of a kernel on a GPU takes a while
SIZE = {"cpu": 3, "cuda": 2}  # ranks, where more than two say more, as far as two GPUs go
SOON = 8.0  # torch's helper for shared memory keeps the connections of a process two seconds after its end


# --- Ranks --------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """How a rank ended: with what it returned, or with what it raised."""

    value: Any = None
    error: str = ""  # the name of the class
    text: str = ""
    status: int | None = None
    seconds: float = 0.0


ENDED, HUNG = Outcome(error="(ended)"), Outcome(error="(hung)")


class Team:
    """So many ranks, a process each, in one group; with `kind` "" in none. `limit`: the group's time-out."""

    def __init__(self, size: int, kind: str = "cpu", limit: float = SECONDS):
        os.environ["PYTHONPATH"] = f"{ROOT}:{HERE}"  # for the process that ranks are forked from
        if not CUDA:
            CONTEXT.set_forkserver_preload(["test_ranks", *IMPORTED])
        self.folder, self.limit = tempfile.TemporaryDirectory(prefix="ranks-"), limit
        self.ranks: list[tuple[Any, Any]] = []
        for rank in range(size):
            ours, theirs = CONTEXT.Pipe()
            args = (rank, size, f"{self.folder.name}/store", kind, limit, theirs)
            process = CONTEXT.Process(target=be_rank, args=args)
            process.start()
            theirs.close()
            self.ranks.append((process, ours))
        for _process, pipe in self.ranks:  # nobody waits in the group for one that is not there yet
            assert pipe.poll(100), "a rank does not start"
            pipe.recv()
        for _process, pipe in self.ranks:
            pipe.send("go")

    def run(self, work: Callable[..., Any], *args: Any) -> list[Outcome]:
        """`work(rank, *args)` on each rank; how each ended."""
        for _process, pipe in self.ranks:
            pipe.send((work, args))
        end = time.monotonic() + 60 + self.limit
        return [outcome_of(process, pipe, end) for process, pipe in self.ranks]

    def end(self) -> None:
        for process, _pipe in self.ranks:
            process.kill()
            process.join()
        self.folder.cleanup()


def outcome_of(process: Any, pipe: Any, end: float) -> Outcome:
    wait([process.sentinel, pipe], max(0.0, end - time.monotonic()))
    try:
        return pipe.recv() if pipe.poll() else HUNG if process.is_alive() else ENDED
    except EOFError:
        return ENDED


def be_rank(rank: int, size: int, store: str, kind: str, limit: float, pipe: Any) -> None:
    torch.set_num_threads(1)
    for module in IMPORTED:  # a spawned rank has imported neither
        importlib.import_module(module)
    if kind == "cuda":
        torch.cuda.set_device(rank)
        torch.zeros(1, device="cuda")  # takes its context, which takes a while
    pipe.send("here")
    pipe.recv()
    if kind:
        backend, timeout = "nccl" if kind == "cuda" else "gloo", timedelta(seconds=limit)
        file = dist.FileStore(store, size)
        dist.init_process_group(backend, store=file, rank=rank, world_size=size, timeout=timeout)
    while True:
        work, args = pipe.recv()
        began = time.monotonic()
        try:
            ended = Outcome(work(rank, *args))
        except Exception as exc:
            ended = Outcome(None, type(exc).__name__, str(exc), getattr(exc, "status", None))
        put_back()
        pipe.send(ended._replace(seconds=time.monotonic() - began))


TEAMS: dict[tuple[int, str], Team] = {}


@pytest.fixture(scope="module", autouse=True)
def teams() -> Iterator[None]:
    yield
    for team in TEAMS.values():
        team.end()


def on_ranks(size: int, work: Callable[..., Any], *args: Any, kind: str = "cpu") -> list[Outcome]:
    """`work(rank, *args)` on ranks that other tests use as well: nothing of it stays there."""
    if (size, kind) not in TEAMS:
        TEAMS[size, kind] = Team(size, kind)
    return TEAMS[size, kind].run(work, *args)


def on_own_ranks(
    size: int, work: Callable[..., Any], *args: Any, kind: str = "cpu", limit: float = SECONDS
) -> list[Outcome]:
    """The same on new ranks, which may end in it."""
    team = Team(size, kind, limit)
    try:
        return team.run(work, *args)
    finally:
        team.end()


def values(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned; none of them raised."""
    assert not [outcome for outcome in outcomes if outcome.error], outcomes
    return [outcome.value for outcome in outcomes]


def errors(outcomes: list[Outcome]) -> list[str]:
    return [outcome.error for outcome in outcomes]


PUT: list[tuple[Any, str, Any]] = []


def put(owner: Any, **values: Any) -> None:
    """Sets attributes until the end of this rank's work."""
    for name, value in values.items():
        PUT.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)


def put_back() -> None:
    while PUT:
        setattr(*PUT.pop())


# --- Servers ------------------------------------------------------------------------------------------

serial = itertools.count()


class Witness:
    """A server in a thread of this process, which writes a transcript."""

    def __init__(self, kind: str, workers: int, folder: Path, *options: str):
        self.path = folder / f"sync{next(serial)}.jsonl"
        self.devices = [f"{kind}:{at}" for at in range(workers)]
        self.uuids = list(map(ipc_codec.gpu_uuid, self.devices))
        command = ["--port", "0", "--device", ",".join(self.devices), "--transcript", str(self.path)]
        self.http = server.make_server(server.build_parser().parse_args([*command, *options]))
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def lines(self, call: str = "") -> list[Any]:
        """The transcript, or the exchanges of one call."""
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [line for line in lines if line.get("call") == call] if call else lines

    def found(self) -> set[tuple[str, str]]:
        """What the oracle finds: (party, rule). Alignment is a matter of the weights here, not of ranks."""
        found = {(finding.party, finding.rule.id) for finding in protocol.check(self.lines())}
        return found - {("trainer", "packed.aligned")}

    def held(self) -> list[dict[str, str]]:
        """Each worker's checksums, by name."""
        table: dict[str, dict[str, str]] = {}
        for key, value in HTTPWeightSyncClient(self.url).checksums().items():
            worker, name = key.rsplit(":", 1)
            table.setdefault(worker, {})[name] = value
        return [table[worker] for worker in sorted(table)]


@pytest.fixture
def witness_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Witness]]:
    """Makes witnesses: (kind, workers, options)."""
    monkeypatch.setenv(protocol.GATE, "1")
    made: list[Witness] = []

    def make(kind: str, workers: int, *options: str) -> Witness:
        made.append(Witness(kind, workers, tmp_path, *options))
        return made[-1]

    yield make
    for witness in made:
        witness.http.shutdown()
        witness.http.server_close()


# --- Weights, and sending them ------------------------------------------------------------------------


def place(device: str) -> str:
    return "cpu" if device.startswith("cpu") else device


def small(device: str = "cpu", seed: int = 0) -> dict[str, Tensor]:
    """24, 10, 24, 8 and 0 bytes, and a tied name: packed with a room of 32, four chunks."""
    weights = {
        "a": noise(torch.float32, 2, 3, seed=seed),
        "b": noise(torch.bfloat16, 5, seed=seed + 1),
        "c": noise(torch.int64, 3, seed=seed + 2),
        "scalar": noise(torch.float64, seed=seed + 3),
        "empty": torch.empty(0, 4),
    }
    weights = {name: weight.to(place(device)) for name, weight in weights.items()}
    return weights | {"tied": weights["a"]}


SMALL = digests(small())


class Client(HTTPWeightSyncClient):
    """Of a rank that is not the sender: it has a time-out, and is not spoken through."""

    def _request(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        raise AssertionError(f"{path}: another rank than the sender speaks")


def client_of(rank: int, url: str, seconds: float = SECONDS) -> HTTPWeightSyncClient:
    return (Client if rank else HTTPWeightSyncClient)(url, seconds)


def send(
    client: HTTPWeightSyncClient, weights: Any, packed: bool, room: int = 32, **more: Any
) -> trainer.Sent:
    """A sync, and on the sender the init before it."""
    more.setdefault("start_wait", 0.0)
    if not isinstance(client, Client):
        client.init_weight_transfer_engine({"packed": packed})
    if packed:
        return trainer.send_weights_packed(client, weights, room, **more)
    return trainer.send_weights(client, weights, **more)


class Tried(NamedTuple):
    """A sync that may have failed, and what it left lent."""

    error: str
    text: str
    status: int | None
    counters: set[int | None]  # of its exports, see `counters_of`
    told: list[str]


def tried(send: Callable[..., Any]) -> Tried:
    """`send(progress=...)`."""
    exports: list[Any] = []
    told: list[str] = []
    real = ipc_codec._export

    def export(tensor: Tensor, *more: Any) -> ipc_codec.Handle:
        handle = real(tensor, *more)
        exports.extend(args for args in handle.values() if tensor.numel())
        return handle

    ipc_codec._export = export  # type: ignore[assignment]
    error: tuple[str, str, int | None] = ("", "", None)
    try:
        send(progress=told.append)
    except Exception as exc:
        error = (type(exc).__name__, str(exc), getattr(exc, "status", None))
    finally:
        ipc_codec._export = real
    return Tried(*error, counters_of(exports), told)


def counters_of(exports: list[Any]) -> set[int | None]:
    """0: released. Also where the file of a CUDA counter is gone: torch deletes one whose slots are all free.

    What is still lent has its file. The emulation keeps its files: there None is what should not be.
    """
    counts = zip(exports, ipc_codec.ref_counts(exports), strict=True)
    emulated = ipc_codec.CPU_MARK
    return {0 if n is None and not args[7].startswith(emulated) else n for args, n in counts}


# --- One sync of all ranks ----------------------------------------------------------------------------


def send_small(rank: int, url: str, kind: str, packed: bool) -> Tried:
    """Rank 1 is slow, so that a sender that does not wait for it is found out."""
    device, fill = f"{kind}:{rank}", trainer._fill

    def fill_late(parts: Any, at: int) -> None:
        time.sleep(0.05 * rank)
        fill(parts, at)

    put(trainer, _fill=fill_late)
    client, weights = client_of(rank, url), small(device)
    return tried(lambda **more: send(client, weights, packed, device=device, weight_version="v1", **more))


@kinds
@both_modes
def test_two_ranks_send_one_sync_to_two_workers(witness_of, kind, packed):
    witness = witness_of(kind, 2, "--hold-seconds", "0.1")
    first, second = values(on_ranks(2, send_small, witness.url, kind, packed, kind=kind))
    assert (first.error, second.error) == ("", ""), (first, second)
    assert witness.held() == [SMALL, SMALL]
    assert witness.found() == set()
    updates = witness.lines("update_weights")
    handles = [h for line in updates for h in ([line["handles"]] if packed else line["handles"])]
    assert {tuple(handle) for handle in handles} == {tuple(witness.uuids)}
    assert len(updates) == (4 if packed else 1) and len(handles) == (4 if packed else 6)
    assert first.counters == second.counters == {0}
    assert second.told == [] and first.told == [f"chunk {at}/4" for at in (1, 2, 3, 4)] * packed


def send_twice_to_a_process(rank: int, url: str, kind: str) -> None:
    client, device = client_of(rank, url), f"{kind}:{rank}"
    for packed in (False, True):
        send(client, small(device), packed, device=device)


@kinds
def test_two_ranks_send_to_a_server_process(kind):
    with Server(f"{kind}:0,{kind}:1") as process:
        values(on_ranks(2, send_twice_to_a_process, process.url, kind, kind=kind))
        held = HTTPWeightSyncClient(process.url).checksums()
    assert held == {f"dp0:pp0:pcp0:tp{at}:{name}": value for at in (0, 1) for name, value in SMALL.items()}


def send_in_a_group(rank: int, url: str, packed: bool) -> int:
    """Ranks 1 and 2 send; rank 0 takes no part, and rank 1 is the sender."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return -1
    ranks = Ranks(group)
    send(client_of(ranks.rank, url), small(), packed, device=f"cpu:{ranks.rank}", group=group)
    return ranks.rank


@unpacked_is_long
def test_the_first_rank_of_a_group_is_its_sender(witness_of, packed):
    witness = witness_of("cpu", 2)
    assert values(on_ranks(3, send_in_a_group, witness.url, packed)) == [-1, 0, 1]
    assert witness.held() == [SMALL, SMALL] and witness.found() == set()


def send_from_one(rank: int, url: str, device: str) -> None:
    group = dist.new_group([1])
    if rank == 1:
        send(client_of(0, url), small(device), False, device=device, group=group)


@kinds
def test_one_rank_sends_alone_in_a_group_of_its_own(witness_of, kind):
    witness = witness_of(kind, 1)
    values(on_ranks(2, send_from_one, witness.url, witness.devices[0], kind=kind))
    assert witness.held() == [SMALL] and witness.found() == set()


def send_in_a_group_of_others(rank: int) -> None:
    group = dist.new_group([1])
    if rank == 0:
        Ranks(group)


def test_a_process_that_is_not_in_the_group_is_told():
    outcome, _ = on_ranks(2, send_in_a_group_of_others)
    assert outcome.error == "ValueError" and "not in the group" in outcome.text


# --- Sharded weights ----------------------------------------------------------------------------------


class Mixed(torch.nn.Module):
    """Sharded and plain parameters, uneven shards, tied names, a persistent buffer, two dtypes, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 5)
        self.up = torch.nn.Linear(5, 9)
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = torch.nn.Linear(3, 3).requires_grad_(False)
        self.row = torch.nn.Parameter(torch.randn(1, 3))  # fewer rows than ranks: an empty shard
        self.bf16 = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.bfloat16))
        self.register_buffer("position", torch.arange(3.0))
        self.register_buffer("steps", torch.tensor(7))


def mixed() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


def sharded(kind: str, rank: int) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = mixed().to(place(f"{kind}:{rank}"))
    mesh = dist.init_device_mesh(kind, (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, ignored_params=set(model.frozen.parameters()))
    return model


@dataclass
class Gathered:
    """The shapes of gathered tensors in order; how many are alive, and how many were at most.

    alone: each is to be gone when the next is gathered, or soon: gloo's thread drops it after we go on.
    """

    alone: bool = False
    order: list[list[int]] = field(default_factory=list)
    alive: int = 0
    most: int = 0

    def count(self, change: int) -> None:
        self.alive += change
        self.most = max(self.most, self.alive)


def gather(gathered: Gathered, full_tensor: Callable[..., Tensor], weight: DTensor) -> Tensor:
    """`DTensor.full_tensor`, counted."""
    deadline = time.monotonic() + gathered.alone
    while gathered.alive and time.monotonic() < deadline:
        time.sleep(0.001)
    full = full_tensor(weight)
    gathered.order.append(list(full.shape))
    gathered.count(1)
    weakref.finalize(full.untyped_storage(), gathered.count, -1)
    return full


def put_gather(gather: Callable[..., Tensor]) -> None:
    """`gather(full_tensor, weight)` stands for `weight.full_tensor()`."""
    from torch.distributed.tensor import DTensor

    real = DTensor.full_tensor
    put(DTensor, full_tensor=lambda weight: gather(real, weight))


def send_sharded(rank: int, url: str, kind: str, packed: bool) -> tuple[Tried, Gathered, dict[str, str]]:
    state = sharded(kind, rank).state_dict()
    full = digests({name: trainer._full(weight) for name, weight in state.items()})
    client, device, gathered = client_of(rank, url), f"{kind}:{rank}", Gathered(packed and kind == "cpu")
    put_gather(functools.partial(gather, gathered))
    done = tried(lambda **more: send(client, state, packed, 200, device=device, **more))
    return done, gathered, full


@pytest.mark.long
@kinds
@both_modes
def test_sharded_and_plain_weights_arrive_full(witness_of, kind, packed):
    witness = witness_of(kind, 2)
    both = values(on_ranks(2, send_sharded, witness.url, kind, packed, kind=kind))
    expected, shapes = digests(mixed().state_dict()), [[1, 3], [5, 3], [7, 5], [9, 5], [9], [7, 5]]
    for done, gathered, full in both:
        assert (done.error, done.text, done.counters, full) == ("", "", {0}, expected)
        assert sorted(gathered.order) == sorted(shapes) and gathered.order == both[0][1].order
        if kind == "cpu":  # NCCL may hold what it has gathered for a while
            assert (gathered.most, gathered.alive) == (1 if packed else 6, 0)
    assert witness.held() == [expected, expected] and witness.found() == set()


@pytest.mark.long
@kinds_of_four
@both_modes
def test_with_four_ranks_some_shards_are_empty(witness_of, kind, packed):
    witness = witness_of(kind, 4)
    for done, gathered, _full in values(on_ranks(4, send_sharded, witness.url, kind, packed, kind=kind)):
        assert (done.error, done.text, done.counters) == ("", "", {0})
        assert kind == "cuda" or gathered.most == (1 if packed else 6)
    assert witness.held() == [digests(mixed().state_dict())] * 4 and witness.found() == set()


# --- One process with several GPUs --------------------------------------------------------------------


def two(kind: str) -> tuple[list[str], list[dict[str, Tensor]]]:
    devices = [f"{kind}:0", f"{kind}:1"]
    return devices, list(map(small, devices))


def send_from_all(rank: int, url: str, kind: str, packed: bool) -> Tried:
    devices, weights = two(kind)
    client = HTTPWeightSyncClient(url, SECONDS)
    return tried(lambda **more: send(client, weights, packed, device=devices, **more))


@kinds
@both_modes
def test_one_process_sends_what_it_holds_on_each_gpu(witness_of, kind, packed):
    witness = witness_of(kind, 2)
    (done,) = values(on_ranks(1, send_from_all, witness.url, kind, packed, kind=kind))
    assert (done.error, done.text, done.counters) == ("", "", {0})
    assert witness.held() == [SMALL, SMALL] and witness.found() == set()


def send_through_kept_buffers(rank: int, url: str, kind: str) -> None:
    devices, weights = two(kind)
    buffers = [ipc_codec.PackedBuffer(32, device) for device in devices]
    for _ in range(2):
        send(client_of(rank, url), weights, True, device=devices, buffer=buffers)


@kinds
def test_each_gpu_of_a_process_can_keep_its_buffer(witness_of, kind):
    witness = witness_of(kind, 2)
    values(on_ranks(1, send_through_kept_buffers, witness.url, kind, kind=kind))
    lent = [args for line in witness.lines("update_weights") for args in line["handles"].values()]
    assert len({(args[7], args[9]) for args in lent}) == 2 < len(lent)  # memory, and where in it
    assert witness.held() == [SMALL, SMALL] and witness.found() == set()


@kinds
def test_the_mappings_of_a_process_are_compared(witness_of, kind):
    witness, (devices, weights) = witness_of(kind, 2), two(kind)
    weights[1]["c"] = weights[1]["c"].int()
    with pytest.raises(RankError, match=r"rank 0, mapping 1 .* c int32 \[3\], and on rank 0 c int64 \[3\]"):
        send(HTTPWeightSyncClient(witness.url), weights, False, device=devices)
    assert witness.lines("start_weight_update") == []


@pytest.mark.parametrize("device", ["cpu:0", ["cpu:0"], None])
def test_each_mapping_has_its_own_device(witness_of, device):
    witness, (_, weights) = witness_of("cpu", 2), two("cpu")
    before = list(ipc_codec._lent)
    with pytest.raises((ValueError, RankError), match="mapping"):
        send(HTTPWeightSyncClient(witness.url), weights, False, device=device)
    assert witness.lines("start_weight_update") == [] and list(ipc_codec._lent) == before


def send_two(rank: int, url: str, kind: str, packed: bool) -> None:
    devices = [f"{kind}:{2 * rank}", f"{kind}:{2 * rank + 1}"]
    send(client_of(rank, url), list(map(small, devices)), packed, device=devices)


@kinds_of_four
@unpacked_is_long
def test_two_ranks_with_two_gpus_each(witness_of, kind, packed):
    witness = witness_of(kind, 4)
    values(on_ranks(2, send_two, witness.url, kind, packed, kind=kind))
    assert witness.held() == [SMALL] * 4 and witness.found() == set()


# --- Rank-local lists ---------------------------------------------------------------------------------

EXPERTS = {"even": [2, 2], "uneven": [3, 1], "none on the first": [0, 2], "none on the last": [4, 0]}
EXPERT_CASES = [
    pytest.param(
        packed,
        EXPERTS[name],
        id=f"{name}, {'packed' if packed else 'unpacked'}",
        marks=() if (packed, name) in ((True, "none on the first"), (False, "uneven")) else pytest.mark.long,
    )
    for name in EXPERTS
    for packed in (False, True)
]


def experts(rank: int, counts: list[int], device: str) -> dict[str, Tensor]:
    """The experts of one rank, 24 bytes each, under the names of the whole model."""
    first = sum(counts[:rank])
    return {
        f"experts.{at}": noise(torch.float32, 2, 3, seed=at).to(place(device))
        for at in range(first, first + counts[rank])
    }


def send_experts(rank: int, url: str, kind: str, packed: bool, counts: list[int]) -> Tried:
    device = f"{kind}:{rank}"
    client, weights = client_of(rank, url), experts(rank, counts, device)
    return tried(lambda **more: send(client, weights, packed, device=device, rank_local=True, **more))


@kinds
@pytest.mark.parametrize("packed, counts", EXPERT_CASES)
def test_each_worker_gets_its_own_experts_only(witness_of, kind, packed, counts):
    witness = witness_of(kind, 2, "--data-parallel-size", "2")
    done = values(on_ranks(2, send_experts, witness.url, kind, packed, counts, kind=kind))
    assert [one.error for one in done] == ["", ""], done
    assert [one.counters or {0} for one in done] == [{0}, {0}]  # who has nothing may have lent nothing
    assert witness.held() == [digests(experts(r, counts, "cpu")) for r in (0, 1) if counts[r]]
    assert witness.found() == set()
    assert len(witness.lines("update_weights")) == (max(counts) if packed else 1)


def send_routed_experts(rank: int, url: str, kind: str, packed: bool) -> None:
    """Experts, and behind them a router that is sharded over the ranks."""
    mesh, device = dist.init_device_mesh(kind, (2,)), f"{kind}:{rank}"
    router = noise(torch.float32, 3, 2).to(place(device))
    router = dist.tensor.distribute_tensor(router, mesh, [dist.tensor.Shard(0)])
    weights = experts(rank, [3, 1], device) | {"router": router}
    send(client_of(rank, url), weights, packed, device=device, rank_local=True)


@kinds
@unpacked_is_long
def test_rank_local_what_is_sharded_is_gathered_by_all_at_the_same_time(witness_of, kind, packed):
    witness = witness_of(kind, 2, "--data-parallel-size", "2")
    values(on_ranks(2, send_routed_experts, witness.url, kind, packed, kind=kind))
    router = digests({"router": noise(torch.float32, 3, 2)})
    assert witness.held() == [digests(experts(rank, [3, 1], "cpu")) | router for rank in (0, 1)]
    assert witness.found() == set()


def send_a_list(rank: int, url: str, kind: str, packed: bool) -> trainer.Sent:
    devices = [f"{kind}:0", f"{kind}:1"]
    weights = [experts(at, [2, 1], device) for at, device in enumerate(devices)]
    return send(client_of(rank, url), weights, packed, device=devices, rank_local=True)


@kinds
@both_modes
def test_one_process_sends_a_rank_local_list(witness_of, kind, packed):
    witness = witness_of(kind, 2)
    [sent] = values(on_ranks(1, send_a_list, witness.url, kind, packed, kind=kind))
    assert (sent.tensors, sent.nbytes, sent.chunks) == (3, 72, 2 if packed else 1)
    assert witness.held() == [digests(experts(at, [2, 1], "cpu")) for at in (0, 1)]
    assert witness.found() == set()


def test_a_list_for_fewer_workers_than_there_are_is_refused_with_both_numbers(witness_of):
    witness = witness_of("cpu", 3)
    done = values(on_ranks(2, send_experts, witness.url, "cpu", False, [1, 1]))
    words = "the server has 3 workers, and 2 mappings are for them"
    assert [one[:3] for one in done] == [("RankError", words, None)] * 2
    assert witness.lines("start_weight_update") == []


# --- Ranks that disagree ------------------------------------------------------------------------------


def reordered(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"b": weights["b"], "a": weights["a"], **weights}


def as_sharded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    from torch.distributed.tensor import DTensor

    mesh = dist.DeviceMesh(weights["b"].device.type, [dist.get_rank()], _init_backend=False)
    whole = DTensor.from_local(weights["b"], mesh, [dist.tensor.Replicate()], run_check=False)
    return weights | {"b": whole}


DISAGREEMENTS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "order": (reordered, "its tensor 0 is b bfloat16 [5], and on rank 0 a float32 [2, 3]"),
    "a name": (
        lambda weights: {name.replace("c", "d"): weight for name, weight in weights.items()},
        "its tensor 2 is d int64 [3], and on rank 0 c int64 [3]",
    ),
    "a dtype": (
        lambda weights: weights | {"b": weights["b"].half()},
        "its tensor 1 is b float16 [5], and on rank 0 b bfloat16 [5]",
    ),
    "a shape": (
        lambda weights: weights | {"a": weights["a"].t()},
        "its tensor 0 is a float32 [3, 2], and on rank 0 a float32 [2, 3]",
    ),
    "one fewer": (
        lambda weights: {name: weight for name, weight in weights.items() if name != "tied"},
        "its tensor 5 is the end",
    ),
    "sharded": (as_sharded, "its tensor 1 is b bfloat16 [5] sharded, and on rank 0 b bfloat16 [5]"),
}


def send_unlike(rank: int, url: str, kind: str) -> list[Tried]:
    """A sync for each disagreement, in both modes; then one with other buffers; then a good one in each."""
    client, device = client_of(rank, url), f"{kind}:{rank}"
    good, done = small(device), []
    for (change, _), packed in itertools.product(DISAGREEMENTS.values(), (False, True)):
        weights = change(small(device)) if rank else good
        done.append(tried(lambda p=packed, w=weights, **told: send(client, w, p, device=device, **told)))
    room = 34 if rank else 32
    done.append(tried(lambda **told: send(client, good, True, room, device=device, **told)))
    for packed in (False, True):
        done.append(tried(lambda p=packed, **told: send(client, good, p, device=device, **told)))
    return done


@kinds
def test_ranks_that_disagree_are_found_before_start_and_go_on_to_a_good_sync(witness_of, kind):
    witness = witness_of(kind, 2)
    first, second = values(on_ranks(2, send_unlike, witness.url, kind, kind=kind))
    reasons = [words for _, words in DISAGREEMENTS.values() for _packed in (False, True)]
    for one, other, words in zip(first, second, [*reasons, "a buffer of 34 bytes"], strict=False):
        assert one[:3] == other[:3] and one.error == "RankError" and one.status is None
        assert one.text.startswith("rank 1 is not like rank 0: ") and words in one.text
        assert one.counters == other.counters == set()
    assert [one.error for one in (*first[-2:], *second[-2:])] == [""] * 4
    assert len(witness.lines("start_weight_update")) == 2
    assert witness.held() == [SMALL, SMALL] and witness.found() == set()


def go_different_ways(rank: int, url: str, kind: str) -> Tried:
    client, device = client_of(rank, url), f"{kind}:{rank}"
    weights = small(device)
    if rank == 0:
        return tried(lambda **more: send(client, weights, False, device=device, **more))
    return tried(lambda progress: trainer.verify(client, weights, lambda: None))


@kinds
def test_ranks_that_make_different_calls_are_told(witness_of, kind):
    witness = witness_of(kind, 2)
    words = "rank 1 is at 'verify' and rank 0 at 'plan': they go different ways"
    done = values(on_ranks(2, go_different_ways, witness.url, kind, kind=kind))
    assert [one[:3] for one in done] == [("RankError", words, None)] * 2


def send_alone(rank: int, url: str, device: str) -> Tried | None:
    if rank:
        time.sleep(2)
        return None
    client, weights = client_of(0, url, 0.5), small(device)
    return tried(lambda **more: send(client, weights, False, device=device, **more))


def take_two_steps(rank: int, late: int) -> list[str]:
    """One rank does not come, and is there all the time."""
    put(trainer, GRACE=0.2)
    ranks, said = Ranks(dist.new_group([0, 1]), SECONDS), []
    if rank == late:
        return []
    ranks.seconds = 0.3
    for step in ("first", "second"):
        with pytest.raises(SyncError) as caught:
            ranks.together(step)
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.long), 1])
def test_after_one_was_late_nobody_is_said_to_have_ended(late):
    """gloo closes all connections when a wait times out."""
    waited = values(on_ranks(2, take_two_steps, late))[1 - late]
    silent, gone = {
        0: ("first: rank 0 did not answer within 0.8 s", "second: rank 0 is not heard any more"),
        1: ("rank 1 did not come within 0.3 s; rank 0", "rank 1 is not heard any more since one was late"),
    }[late]
    assert waited[0].startswith(silent) and waited[1].startswith(gone) and "anew" in waited[1]


@cuda_is_long
def test_a_rank_that_never_comes_is_not_waited_for_longer_than_the_time_out(witness_of, kind):
    witness = witness_of(kind, 2)
    first, _ = on_own_ranks(2, send_alone, witness.url, witness.devices[0], kind=kind)
    assert first.value.error == "SyncError" and first.seconds < SOON
    assert first.value.text.startswith("the 2 ranks did not meet within 0.5 s")
    assert witness.lines("start_weight_update") == []


# --- Ranks that fail or end ---------------------------------------------------------------------------


def sabotage(step: str, how: str, seconds: float) -> None:
    """This rank does not do its part of that step; where it hangs, for longer than `seconds`."""
    real = Ranks.together

    def fail() -> None:
        if how == "raises":
            raise HandleError("no room is left")
        if how == "hangs":
            time.sleep(seconds + 2)
        os._exit(1)

    def together(self: Ranks, name: str, mine: Any = lambda: None, *rest: Any, **more: Any) -> Any:
        return real(self, name, fail if name == step else mine, *rest, **more)

    put(Ranks, together=together)


def send_with_a_bad_rank(rank: int, url: str, kind: str, step: str, how: str, seconds: float) -> Tried:
    if rank == 1:
        sabotage(step, how, seconds)
    client, device, packed = client_of(rank, url, seconds), f"{kind}:{rank}", step != "update"
    weights = small(device)
    return tried(lambda **more: send(client, weights, packed, device=device, **more))


WHEN = {"plan": 0, "export": 0, "start": 0, "update": 0, "chunk 1": 0, "chunk 2": 1, "finish": 4}
SOME = [("update", "raises"), ("chunk 2", "ends")]
BAD_RANKS = [
    pytest.param(step, how, marks=() if (step, how) in SOME else pytest.mark.long)
    for step in WHEN
    for how in ("ends", "raises", "hangs")
]


@cuda_is_long
@pytest.mark.parametrize("step, how", BAD_RANKS)
def test_a_rank_that_fails_is_named_on_all_and_ends_all(witness_of, kind, step, how):
    witness, seconds = witness_of(kind, SIZE[kind]), PATIENCE[kind] if how == "hangs" else SECONDS
    args = (witness.url, kind, step, how, seconds)
    outcomes = on_own_ranks(SIZE[kind], send_with_a_bad_rank, *args, kind=kind)
    words = {
        "ends": f"rank 1 has ended; rank 0 was at '{step}'",
        "raises": "rank 1: HandleError: no room is left",
        "hangs": f"rank 1 did not come within {seconds:g} s; rank 0 was at '{step}'",
    }[how]
    bad, others = outcomes.pop(1), outcomes
    assert [one.value[:3] for one in others] == [("RankError", words, None)] * len(others)
    assert max(one.seconds for one in others) < SOON + (seconds if how == "hangs" else 0)
    if how == "raises":
        assert bad.value[:2] == ("HandleError", "no room is left")
    assert len(witness.lines("update_weights")) == WHEN[step]
    assert witness.lines("finish_weight_update") == []
    lent = {1} if WHEN[step] else {0}
    assert [one.value.counters or {0} for one in others] == [lent] * len(others)  # at first nothing is lent
    assert lent == {0} or "stays lent" in others[0].value.told[-1]


def send_and_lose_rank_0(rank: int, url: str, kind: str, packed: bool, how: str, seconds: float) -> Tried:
    put(trainer, GRACE=0.5)
    client, device = client_of(rank, url, seconds), f"{kind}:{rank}"
    weights = small(device)
    del weights["tied"]  # one memory is opened once: the server releases a second export of it at once
    if rank == 0:
        real = client.update_weights

        def update(info: Any) -> None:
            threading.Timer(HOLD / 2, os._exit, [1]).start() if how == "ends" else time.sleep(3 * seconds + 2)
            real(info)

        put(client, update_weights=update)
    return tried(lambda **more: send(client, weights, packed, device=device, **more))


@cuda_is_long
@unpacked_is_long
@pytest.mark.parametrize("how", ["ends", pytest.param("hangs", marks=pytest.mark.long)])
def test_when_rank_0_is_lost_in_an_update_nothing_is_settled_or_written(witness_of, kind, packed, how):
    witness = witness_of(kind, 2, "--hold-seconds", str(HOLD))
    seconds = PATIENCE[kind] / 2 if how == "hangs" else SECONDS
    args = (witness.url, kind, packed, how, seconds)
    lost, other = on_own_ranks(2, send_and_lose_rank_0, *args, kind=kind)
    step, limit = "chunk 1" if packed else "update", 2 * seconds + 0.5
    why = "has ended" if how == "ends" else f"did not answer within {limit:g} s"
    assert (lost.error, bool(lost.value)) == (("(ended)", False) if how == "ends" else ("", True)), lost
    assert other.value[:3] == ("SyncError", f"{step}: rank 0 {why}; the server may have been asked", None)
    assert other.value.counters == {1} and "lent: the server may still read" in other.value.told[-1]
    assert other.seconds < SOON + (limit if how == "hangs" else 0)


def send_sharded_with_a_bad_rank(rank: int, url: str, packed: bool, how: str) -> Tried:
    state, calls = sharded("cpu", rank).state_dict(), itertools.count()

    def gather(full_tensor: Callable[..., Tensor], weight: DTensor) -> Tensor:
        if rank == 1 and next(calls) == 2:
            if how == "ends":
                os._exit(1)
            raise torch.OutOfMemoryError("no room is left")
        return full_tensor(weight)

    put_gather(gather)
    client = client_of(rank, url)
    return tried(lambda **more: send(client, state, packed, 1 << 20, device=f"cpu:{rank}", **more))


@pytest.mark.long
@both_modes
@pytest.mark.parametrize("how, limit", [("ends", SECONDS), ("raises", 2.0)])
def test_a_rank_that_fails_while_all_gather_is_named(witness_of, packed, how, limit):
    """Where it can still speak, the others are stuck in the collective until that times out.

    Gloo's: over NCCL they are stuck on the GPU, and torch's watchdog ends them, which says nothing here.
    """
    witness = witness_of("cpu", 3)
    outcomes = on_own_ranks(3, send_sharded_with_a_bad_rank, witness.url, packed, how, limit=limit)
    step = "chunk 1" if packed else "export"
    ended, raised = f"rank 1 has ended; rank 0 was at '{step}'", "rank 1: OutOfMemoryError: no room is left"
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.value[:2] == ("RankError", ended if how == "ends" else raised)
        assert outcome.value.counters <= {0} and outcome.seconds < (SOON if how == "ends" else limit + SOON)
    assert witness.lines("update_weights") == []


# --- Refusals -----------------------------------------------------------------------------------------

REFUSALS = {
    "start": (START, [Answer(503, b"not now")], 503),
    "first update": (UPDATE, [Answer(400, b"what?")], 400),
    "second update": (UPDATE, [GOOD, Answer(500, b"no")], 500),
    "finish": (FINISH, [Answer(500, b"no")], 500),
}


def send_to_be_refused(rank: int, url: str, kind: str, packed: bool) -> Tried:
    client, device = client_of(rank, url), f"{kind}:{rank}"
    weights = small(device)
    return tried(lambda **more: send(client, weights, packed, device=device, **more))


@kinds
@pytest.mark.parametrize("path, answers, status", REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_is_the_same_error_on_every_rank(kind, path, answers, status):
    with Fake({path: list(answers)}) as fake:
        args = (fake.url, kind, path != FINISH)
        done = values(on_ranks(SIZE[kind], send_to_be_refused, *args, kind=kind))
    assert {one[:3] for one in done} == {("SyncError", done[0].text, status)}
    assert f"{path[1:]}: the server answered {status}" in done[0].text
    assert fake.paths.count(START) == 1 and fake.paths.count(INIT) == 1
    early = path == START or (path == UPDATE and len(answers) == 1)
    assert [one.counters for one in done] == [{0} if early else {1}] * len(done)  # Fake opens nothing


def send_a_misfit(rank: int, url: str, kind: str) -> Tried:
    client, device = client_of(rank, url), f"{kind}:{rank}"
    weights = small(device)
    send(client, {"c": torch.zeros(5, device=place(device))}, True, device=device)
    return tried(lambda **more: send(client, weights, True, device=device, **more))


@kinds
def test_after_a_refused_chunk_every_rank_gets_its_buffer_back(witness_of, kind):
    witness = witness_of(kind, 2)
    done = values(on_ranks(2, send_a_misfit, witness.url, kind, kind=kind))
    assert all(one.status == 500 and "c: the server holds float32 [5]" in one.text for one in done)
    assert [one.counters for one in done] == [{0}, {0}]
    assert len(witness.lines("shutdown_weight_transfer_engine")) == 1


# --- GPUs that do not meet ----------------------------------------------------------------------------


def send_from(rank: int, url: str, packed: bool, devices: list[str]) -> Tried:
    client, device = client_of(rank, url), devices[rank]
    weights = small(device)
    return tried(lambda **more: send(client, weights, packed, device=device, **more))


RANKS_ON = {"cpu": ["cpu:0", "cpu:2"], "cuda": ["cuda:0"]}  # the second worker is alone


@kinds
@unpacked_is_long
def test_a_worker_that_no_rank_is_on_is_named_by_the_server_and_on_every_rank(witness_of, kind, packed):
    witness, devices = witness_of(kind, 2), RANKS_ON[kind]
    done = values(on_ranks(len(devices), send_from, witness.url, packed, devices, kind=kind))
    for one in done:
        assert (one.error, one.status, one.counters) == ("SyncError", 500, {0})
        assert "handle.this-gpu: " in one.text and witness.uuids[1] in one.text
    assert ("trainer", "handle.this-gpu") in witness.found()


TOO_MANY = {"cpu": (2, ["cpu:1", "cpu:7", "cpu:0"]), "cuda": (1, ["cuda:0", "cuda:1"])}  # rank 1 is extra


@kinds
@unpacked_is_long
def test_a_rank_that_no_worker_is_on_does_no_harm_and_is_told(witness_of, kind, packed):
    workers, devices = TOO_MANY[kind]
    witness = witness_of(kind, workers)
    done = values(on_ranks(len(devices), send_from, witness.url, packed, devices, kind=kind))
    assert [one.error for one in done] == [""] * len(done)
    told = f"nobody has opened what was lent on GPU {ipc_codec.gpu_uuid(devices[1])}: no worker is on it"
    assert [told in one.told for one in done] == [at == 1 for at in range(len(done))]
    assert [len(one.told) for one in done[1:]] == [1, 0][: len(done) - 1]
    assert [one.counters for one in done] == [{0}] * len(done)
    assert witness.held() == [SMALL] * workers and witness.found() == set()


@kinds
def test_two_ranks_on_one_gpu_are_named_before_start(witness_of, kind):
    witness = witness_of(kind, 1)
    devices = witness.devices * 2
    done = values(on_ranks(2, send_from, witness.url, False, devices, kind=kind))
    assert all(one.error == "RankError" and "rank 1 exports for GPU" in one.text for one in done)
    assert [one.counters for one in done] == [{0}, {0}] and witness.lines("start_weight_update") == []


# --- The oracle: multi-rank trainers with one fault ---------------------------------------------------


def no_barrier_before(rank: int) -> None:
    """Rank 1 says that its buffer is full before it is."""
    fill = trainer._fill
    if rank == 1:
        put(trainer, _fill=lambda parts, at: threading.Timer(HOLD / 2, fill, [parts, at]).start())


def no_barrier_after(rank: int) -> None:
    """Rank 1 fills its next chunk while this one is being read."""
    fill = trainer._fill

    def fill_and_go_on(parts: Any, at: int) -> None:
        fill(parts, at)
        threading.Timer(HOLD / 2, fill, [parts, at + 1]).start()

    if rank == 1:
        put(trainer, _fill=fill_and_go_on)


def packs_in_another_order(rank: int) -> None:
    """Rank 1 has the names in the order that was agreed on, and the bytes in another."""

    def fill(self: trainer.Part, at: int) -> None:
        assert self.buffer is not None
        self.buffer.fill([self.weights[name] for name in reversed(self.plan.chunks[at]["names"])])

    if rank == 1:
        put(trainer.Part, fill=fill)


def merges_on_the_wrong_rank(rank: int) -> None:
    """What rank 0 sends has its own handles only."""
    lend = trainer.Updates.lend
    put(trainer.Updates, lend=lambda self, each: lend(self, each[:1]))


def sends_other_bytes(rank: int) -> None:
    """Rank 1 has stepped on another batch."""
    if rank == 1:
        put(sys.modules[__name__], small=functools.partial(small, seed=9))


def sends_replica_0_to_all(rank: int) -> None:
    """Each entry of the rank-local list is that of replica 0."""
    lend = trainer.Updates.lend

    def lend_first(self: trainer.Updates, each: Any) -> None:
        lend(self, each)
        self.chunks = [[entries[0]] * len(entries) for entries in self.chunks]

    put(trainer.Updates, lend=lend_first)


def send_mutated(
    rank: int, url: str, kind: str, packed: bool, rank_local: bool, mutate: Callable[[int], None]
) -> Tried:
    mutate(rank)
    client, device = client_of(rank, url), f"{kind}:{rank}"
    more = {"device": device, "rank_local": rank_local}
    return tried(lambda **told: send(client, small(device), packed, 64, **more, **told))


MUTANTS = [  # mutant, packed, rank-local, what is found, whether the server lets it in
    (no_barrier_before, True, False, {"loan.until-reply", "workers.same-bytes"}, True),
    (no_barrier_after, True, False, {"loan.until-reply"}, True),
    (packs_in_another_order, True, False, {"workers.same-bytes"}, True),
    (sends_other_bytes, False, False, {"workers.same-bytes"}, True),
    (merges_on_the_wrong_rank, False, False, {"handle.this-gpu"}, False),
    (sends_replica_0_to_all, False, True, {"handle.this-gpu"}, False),
]


@kinds
@pytest.mark.parametrize(
    "mutate, packed, rank_local, rules, let_in", MUTANTS, ids=[mutant[0].__name__ for mutant in MUTANTS]
)
def test_the_oracle_finds(witness_of, kind, mutate, packed, rank_local, rules, let_in):
    witness = witness_of(kind, 2, "--hold-seconds", str(HOLD if let_in else 0))
    args = (witness.url, kind, packed, rank_local, mutate)
    first, second = values(on_ranks(2, send_mutated, *args, kind=kind))
    assert (first.error, second.error) == (("", "") if let_in else ("SyncError", "SyncError"))
    assert witness.found() == {("trainer", rule) for rule in rules}


# --- The command line ---------------------------------------------------------------------------------


class Said(NamedTuple):
    code: int
    out: str
    err: str


def environment_of(rank: int, size: int, port: int) -> dict[str, str]:
    """As torchrun sets it."""
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    return ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def be_trainer(rank: int, size: int, port: int, *words: Any) -> Said:
    """`trainer.py WORDS`, as torchrun starts it."""
    os.environ.update(environment_of(rank, size, port))
    sys.argv = ["trainer.py", *map(str, words)]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = trainer.main()
    return Said(code, out.getvalue(), err.getvalue())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def trainers(size: int, *words: Any) -> list[Said]:
    return values(on_own_ranks(size, be_trainer, size, free_port(), *words, kind="", limit=60))


PACKED = ("--packed", "--packed-buffer-size-bytes", "150000")


@pytest.mark.long
@pytest.mark.skipif(
    torch.cuda.is_available() and not CUDA, reason="its ranks are forked, which CUDA does not bear"
)
def test_two_trainers_train_alike_and_rank_0_speaks(witness_of):
    witness = witness_of("cpu", 2)
    first, second = trainers(2, witness.url, "--device", "cpu", "--steps", "2", *PACKED)
    assert (first.code, second) == (0, Said(0, "", ""))
    steps = [line for line in first.out.splitlines() if line.startswith("step ")]
    assert len(steps) == 2 and first.out.endswith("identical: sha256 of 29 tensors, on every worker\n")
    assert witness.held()[0] == witness.held()[1] and witness.found() == set()


@pytest.mark.long
def test_trainers_send_a_checkpoint_from_every_rank(witness_of, tmp_path):
    witness = witness_of("cpu", 2)
    torch.save(small(), tmp_path / "small.pt")
    first, second = trainers(2, witness.url, "--checkpoint", tmp_path / "small.pt", "--device", "cpu")
    assert (first.code, second) == (0, Said(0, "", "")), first
    assert first.out.endswith("identical: sha256 of 6 tensors, on every worker\n")
    assert witness.held() == [SMALL, SMALL]


@pytest.mark.long
def test_a_refusal_is_one_line_of_each_trainer(tmp_path):
    torch.save(small(), tmp_path / "small.pt")
    with Fake({UPDATE: Answer(400, b"what?")}) as fake:
        words = fake.url, "--checkpoint", tmp_path / "small.pt", "--device", "cpu"
        first, second = trainers(2, *words)
    reason = "update_weights: the server answered 400: what?\n"
    assert first == Said(1, "", f"trainer.py, rank 0: {reason}")
    assert second == Said(1, "", f"trainer.py, rank 1: {reason}")


@pytest.mark.parametrize(
    "choice, local_rank, seen, device",
    [
        ("cpu", "3", 0, "cpu:3"),
        ("cuda", "1", 4, "cuda:1"),
        ("cuda", "1", 1, "cuda:0"),  # CUDA_VISIBLE_DEVICES shows each rank its own
        ("cuda", "5", 4, "cuda:1"),
        ("cuda:2", "1", 4, "cuda:2"),
        ("cpu", None, 0, "cpu"),
    ],
)
def test_a_rank_takes_its_device_by_local_rank(monkeypatch, choice, local_rank, seen, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert str(trainer.my_device(choice)) == device


# --- Long runs: torchrun, and over time ---------------------------------------------------------------


def torchrun(size: int, *words: str, seconds: float = 200, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    return subprocess.run(
        [*command, "trainer.py", *words],
        cwd=ROOT,
        env=environment(gate=False) | {"OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        timeout=seconds,
    )


@pytest.mark.long
@pytest.mark.timeout(400)
@kinds
@both_modes
def test_torchrun_learns_with_a_server_that_rank_0_spawns(kind, packed):
    done = torchrun(2, "--spawn-server", "--device", kind, *(PACKED if packed else ()))
    assert done.returncode == 0, done.stderr
    rewards = [float(reward) for reward in re.findall(r"^step +\d+  reward (\S+)", done.stdout, re.M)]
    assert len(rewards) == 24 and rewards[-1] > 3 * rewards[0]
    assert done.stdout.endswith("identical: sha256 of 29 tensors, on every worker\n")


SHOWN = {"each its own": ("0", "1"), "both": ("0,1", "0,1"), "swapped": ("1,0", "1,0")}


@pytest.mark.long
@needs_two_gpus
@both_modes
@pytest.mark.parametrize("shown", SHOWN.values(), ids=SHOWN)
@pytest.mark.parametrize("server_sees", ["0,1", "1,0"])
def test_ranks_and_server_number_their_gpus_differently(tmp_path, packed, shown, server_sees):
    torch.save(small(), tmp_path / "small.pt")
    port = free_port()
    with Server("cuda:0,cuda:1", CUDA_VISIBLE_DEVICES=server_sees) as process:
        words = [process.url, "--checkpoint", tmp_path / "small.pt", *(PACKED if packed else ())]
        ranks = [
            subprocess.Popen(
                [sys.executable, ROOT / "trainer.py", *words],
                env=os.environ | environment_of(rank, 2, port) | {"CUDA_VISIBLE_DEVICES": sees},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, sees in enumerate(shown)
        ]
        said = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert "identical: sha256 of 6 tensors, on every worker" in said[0] and said[1] == ""


class Slowed(NamedTuple):
    syncs: int
    gigabytes: float  # on each GPU
    room: int


OVER_TIME = Slowed(100, 4.3, 1 << 30) if CUDA else Slowed(100, 0.02, 5_000_000)


def send_at_random_paces(rank: int, url: str, kind: str) -> list[int]:
    """Many packed syncs of new bytes; each rank fills each chunk after a delay of its own."""
    device, pace = f"{kind}:{rank}", random.Random(rank)
    fill = trainer._fill

    def fill_late(parts: Any, at: int) -> None:
        time.sleep(pace.random() * 0.01)
        fill(parts, at)

    put(trainer, _fill=fill_late)
    client = client_of(rank, url, 100)
    count = max(2, int(OVER_TIME.gigabytes * 1e9 / (OVER_TIME.room / 8)))
    elements = OVER_TIME.room // 16
    buffer = ipc_codec.PackedBuffer(OVER_TIME.room, device)
    weights = {str(at): torch.empty(elements, dtype=torch.int16, device=place(device)) for at in range(count)}
    for step in range(OVER_TIME.syncs):
        for at, weight in enumerate(weights.values()):
            weight.fill_((step * 97 + at) % 30_000)
        send(client, weights, True, OVER_TIME.room, device=device, buffer=buffer)
    trainer.verify(client, weights, lambda: None)
    return [torch.cuda.memory_allocated(device)] if kind == "cuda" else [len(ipc_codec._lent)]


@pytest.mark.long
@pytest.mark.timeout(900)
@kinds
def test_a_hundred_packed_syncs_at_random_paces_are_clean(witness_of, kind):
    witness = witness_of(kind, 2)
    began = time.monotonic()
    on = on_own_ranks(2, send_at_random_paces, witness.url, kind, kind=kind, limit=800)
    print(json.dumps({"syncs": OVER_TIME, "seconds": time.monotonic() - began, "left": values(on)}))
    assert len(witness.lines("finish_weight_update")) == OVER_TIME.syncs
    assert witness.found() == set() and witness.held()[0] == witness.held()[1]


def peak_of_a_packed_sync(rank: int, url: str) -> dict[str, int]:
    """Bytes that a packed sync of a sharded model takes beside it, on the GPU."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(8192, 8192, bias=False) for _ in range(8)]).cuda()
    fully_shard(model, mesh=dist.init_device_mesh("cuda", (dist.get_world_size(),)))
    state, client, room = model.state_dict(), client_of(rank, url, 100), 1 << 29
    send(client, state, True, room, device=f"cuda:{rank}")  # NCCL takes its own on the first
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    send(client, state, True, room, device=f"cuda:{rank}")
    peak, largest = torch.cuda.max_memory_allocated() - before, 8192 * 8192 * 4
    return {"peak": peak, "buffer": room, "largest": largest, "after": torch.cuda.memory_allocated() - before}


@pytest.mark.long
@needs_two_gpus
def test_a_packed_sync_takes_one_buffer_and_one_full_tensor():
    with Server("cuda:0,cuda:1") as process:
        for figures in values(on_own_ranks(2, peak_of_a_packed_sync, process.url, kind="cuda")):
            print(json.dumps(figures))
            assert figures["peak"] <= figures["buffer"] + figures["largest"] + (8 << 20)
            assert figures["after"] == 0
