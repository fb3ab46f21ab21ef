"""What only shows in size or over time: `pytest -m long -n 0`. Without a GPU the sizes are small."""

import gc
import json
import os
import random
import re
import socket
import statistics
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import ipc_codec
import trainer
from test_roundtrip import Server

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if CUDA else "cpu:0")
PLACE = torch.device("cuda:0" if CUDA else "cpu")
GB = 8.6 if CUDA else 0.05
both_modes = pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server():
    with Server(str(DEVICE)) as running:
        yield running


def report(**figures):
    print(json.dumps(figures))


def checkpoint(gigabytes, seed):
    """bf16 matrices of 64 MB (or 1 MB), random bits."""
    rows = 4096 if gigabytes > 1 else 64
    generator = torch.Generator(PLACE).manual_seed(seed)
    count = max(2, int(gigabytes * 1e9 / (rows * 8192 * 2)))
    return {
        f"layer.{at}.weight": torch.randint(
            -(1 << 15), 1 << 15, (rows, 8192), dtype=torch.int16, device=PLACE, generator=generator
        ).view(torch.bfloat16)
        for at in range(count)
    }


def send(client, weights, packed, **more):
    client.init_weight_transfer_engine({"packed": packed})
    if packed:
        return trainer.send_weights_packed(client, weights, 1 << 30, device=DEVICE, **more)
    return trainer.send_weights(client, weights, device=DEVICE, **more)


def gpu_memory(pids):
    """What is in use on the GPU, by each of the processes.

    Where nvidia-smi does not know them (in a container with a PID namespace): by all processes together.
    Then the GPU has to be idle otherwise, or what compares two of these fails.
    """
    if not CUDA:
        return {}
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout
    except OSError:
        said = ""
    used = {int(pid): int(mib) for pid, mib in re.findall(r"^(\d+), (\d+)$", said, re.M)}
    if used.keys() >= set(pids.values()):
        return {f"{who} GPU MiB": used[pid] for who, pid in pids.items()}
    free, total = torch.cuda.mem_get_info(PLACE)
    return {"everybody's GPU bytes": total - free}


def footprint(server):
    """Open files, ours and the server's; shared-memory files; GPU memory; what is allocated by us."""
    gc.collect()
    ipc_codec.ipc_collect()
    if CUDA:
        torch.cuda.empty_cache()
    pids = {"our": os.getpid(), "server's": server.process.pid}
    ours = tuple(f"torch_{pid}_" for pid in pids.values())
    return {
        **gpu_memory(pids),
        "our files": len(os.listdir("/proc/self/fd")),
        "server's files": len(os.listdir(f"/proc/{server.process.pid}/fd")),
        "shm files": sum(name.startswith(ours) for name in os.listdir("/dev/shm")),
        "our bytes": torch.cuda.memory_allocated(PLACE) if CUDA else len(ipc_codec._lent),
    }


@both_modes
def test_a_large_checkpoint_arrives_byte_for_byte(server, packed):
    client = trainer.HTTPWeightSyncClient(server.url)
    weights = checkpoint(GB, seed=int(packed))
    sent = [send(client, weights, packed) for _ in range(3)]
    report(test="large checkpoint", packed=packed, **{f"sync {at}": str(s) for at, s in enumerate(sent)})
    began = time.monotonic()
    print(trainer.verify(client, weights, lambda: None), f"in {time.monotonic() - began:.1f} s")


@both_modes
def test_fifty_syncs_leave_nothing_behind(server, packed):
    client = trainer.HTTPWeightSyncClient(server.url)
    weights = {f"fifty.{at}": weight for at, weight in enumerate(checkpoint(GB / 8, seed=3).values())}
    for _ in range(3):
        send(client, weights, packed)
    before = footprint(server)
    sent = [send(client, weights, packed) for _ in range(50)]
    after = footprint(server)
    report(
        test="fifty syncs", packed=packed, before=before, after=after, first=str(sent[0]), last=str(sent[-1])
    )
    assert after == before


@both_modes
def test_a_refused_sync_gives_the_memory_back(server, packed):
    client = trainer.HTTPWeightSyncClient(server.url)
    send(client, {"refused": torch.zeros(8, device=PLACE)}, packed)
    before = footprint(server)
    weights = {"refused": torch.zeros(1 << 22, device=PLACE)}  # another shape than the server holds
    with pytest.raises(trainer.SyncError, match="the server holds"):
        send(client, weights, packed)
    del weights
    after = footprint(server)
    report(test="refused sync", packed=packed, before=before, after=after)
    assert after["our bytes"] == before["our bytes"]
    assert client.checksums()


SYNCS = 500 if CUDA else 2000
WINDOW = 100
BUFFERS = [4096, 5000, 16_384, 100_000, 1 << 20]  # bytes; the first hold no more than the largest tensor


def layers(seed):
    """Some 30 tensors of every size up to 4 kB, 60 kB together."""
    chance, generator = random.Random(0), torch.Generator().manual_seed(seed)
    dtypes = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]
    found = {}
    for at in range(30):
        nbytes = chance.randrange(0, 4097, 4)
        raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
        found[f"flat.{at}"] = raw.view(dtypes[at % 4]).to(PLACE)
    return found


class Broken(trainer.HTTPWeightSyncClient):
    """Its updates are sent on as `change` makes them."""

    def __init__(self, url, change):
        super().__init__(url)
        self.change = change

    def update_weights(self, body):
        if isinstance(body, trainer.Late):
            body = body.read()
        super().update_weights(self.change(json.loads(body)["update_info"]))


def cut(info):
    return info | {"ipc_handles_pickled": info["ipc_handles_pickled"][:-40]}


def of_another_gpu(info):
    handles = ipc_codec.decode_handles(info["ipc_handles_pickled"])
    renamed = (
        [{f"{uuid[:-1]}{'e' if uuid[-1] == 'f' else 'f'}": args for uuid, args in h.items()} for h in handles]
        if type(handles) is list
        else {}
    )
    return info | {"ipc_handles_pickled": ipc_codec.encode_handles(renamed)}


def another_shape(info):
    return info | {"shapes": [[1, *shape] for shape in info["shapes"]]}


class InTheSecondChunk:
    """A change that leaves the first chunk as it is."""

    def __init__(self):
        self.count = 0

    def __call__(self, info):
        self.count += 1
        return info if self.count == 1 else cut(info)


def refused_sync(change):
    def run(server, packed, weights):
        with pytest.raises(trainer.SyncError, match="the server answered 500"):
            buffered(Broken(server.url, change()), weights, packed, 16_384)

    return run


def hang_up_in_mid_body(server, packed, weights):
    head = (
        b"POST /update_weights HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 100000\r\n\r\n"
    )
    trainer.HTTPWeightSyncClient(server.url).start_weight_update()
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(head + b'{"update_info": {')


def die_after_the_start(server, packed, weights):
    trainer.HTTPWeightSyncClient(server.url).start_weight_update()


def die_between_two_chunks(server, packed, weights):
    def stop(line):
        if line == "chunk 1/1" or re.match("chunk 2/", line):
            raise KeyboardInterrupt

    client = trainer.HTTPWeightSyncClient(server.url)
    client.init_weight_transfer_engine({"packed": True})
    with pytest.raises(KeyboardInterrupt):
        trainer.send_weights_packed(client, weights, 16_384, device=DEVICE, start_wait=0, progress=stop)


FAILURES = {
    "a cut text": refused_sync(lambda: cut),
    "another GPU's uuid": refused_sync(lambda: of_another_gpu),
    "another shape": refused_sync(lambda: another_shape),
    "a cut text in the second chunk": lambda server, packed, weights: refused_sync(InTheSecondChunk)(
        server, True, weights
    ),
    "a client that hangs up in mid-body": hang_up_in_mid_body,
    "a client that dies after the start": die_after_the_start,
    "a client that dies between two chunks": die_between_two_chunks,
}


def buffered(client, weights, packed, size, kept=None):
    """`kept`: exports or a buffer of syncs before."""
    client.init_weight_transfer_engine({"packed": packed})
    more = {"device": DEVICE, "start_wait": 0}
    if packed:
        return trainer.send_weights_packed(client, weights, size, buffer=kept, **more)
    return trainer.send_weights(client, weights, exports=kept, **more)


def test_two_trainers_at_once_never_mix_their_bytes(tmp_path):
    """Each waits for the other; the transcript has whole syncs of one of them, one after the other."""
    told, transcript = {"one": [], "two": []}, tmp_path / "sync.jsonl"
    with Server(str(DEVICE), "--transcript", str(transcript)) as running:

        def sync_often(name):
            client = trainer.HTTPWeightSyncClient(running.url)
            weights = {f"{name}.{at}": weight for at, weight in enumerate(layers(len(told)).values())}
            for at in range(10):
                more = {"device": DEVICE, "weight_version": f"{name} {at}", "progress": told[name].append}
                trainer.send_weights_packed(client, weights, 5000, **more)
            return weights

        trainer.HTTPWeightSyncClient(running.url).init_weight_transfer_engine({"packed": True})
        with ThreadPoolExecutor(2) as pool:
            weights = {name: weight for sent in pool.map(sync_often, told) for name, weight in sent.items()}
        held = trainer.HTTPWeightSyncClient(running.url).checksums()
    assert held == {f"dp0:pp0:pcp0:tp0:{name}": ipc_codec.checksum(w) for name, w in weights.items()}
    assert any("another trainer may be at it" in line for line in told["one"] + told["two"])
    lines = [json.loads(line) for line in transcript.read_text().splitlines()[1:]]
    good, owners = [line for line in lines if line["status"] == 200], []
    for line in good:
        if line["call"] == "start_weight_update":
            owners.append(set())
        elif line["call"] == "update_weights":
            owners[-1] |= {name.partition(".")[0] for name in line["body"]["update_info"]["names"]}
    refused = len(lines) - len(good)
    report(test="two trainers", syncs=len(owners), refused=refused, calls=len(lines))
    assert sorted(map(sorted, owners)) == [["one"]] * 10 + [["two"]] * 10 and refused > 0


def resident(pid):
    [kilobytes] = re.findall(r"VmRSS:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(kilobytes)


def everything(server):
    """`footprint`, and threads and resident memory of both."""
    found = footprint(server)
    return found | {
        "our threads": threading.active_count(),
        "server's threads": len(os.listdir(f"/proc/{server.process.pid}/task")),
        "our resident kB": resident(os.getpid()),
        "server's resident kB": resident(server.process.pid),
    }


def test_thousands_of_syncs_stay_flat(server):
    """Modes, buffer sizes, what is kept and, every tenth time, failures alternate: all bytes arrive, nothing
    grows."""
    client, chance = trainer.HTTPWeightSyncClient(server.url), random.Random(0)
    versions = [layers(seed) for seed in range(4)]
    expected = [{f"dp0:pp0:pcp0:tp0:{n}": ipc_codec.checksum(w) for n, w in v.items()} for v in versions]
    exports = [ipc_codec.Exports() for _ in versions]
    buffers = {size: ipc_codec.PackedBuffer(size, DEVICE) for size in BUFFERS}
    seconds, failed, marks = [], [], {}
    for at in range(SYNCS):
        weights, packed = versions[at % 4], chance.random() < 0.5
        if at % 10 == 9:
            failed.append(chance.choice([*FAILURES]))
            FAILURES[failed[-1]](server, packed, weights)
            continue
        began = time.monotonic()
        size, keep = chance.choice(BUFFERS), chance.random() < 0.5
        kept = (buffers[size] if packed else exports[at % 4]) if keep else None
        buffered(client, weights, packed, size, kept)
        seconds.append(time.monotonic() - began)
        held = client.checksums()
        assert all(held[name] == checksum for name, checksum in expected[at % 4].items())
        if at in (WINDOW, SYNCS - 2):
            marks[at] = everything(server)
    [start, end] = marks.values()
    first, last = (1e3 * statistics.median(part) for part in (seconds[:WINDOW], seconds[-WINDOW:]))
    report(
        test="flat",
        syncs=SYNCS,
        failed={name: failed.count(name) for name in FAILURES},
        start=start,
        end=end,
        **{"median ms of the first 100": round(first, 2), "of the last 100": round(last, 2)},
    )
    for what, before in start.items():
        assert end[what] <= before + (SYNCS * 4 if "resident" in what else 0), what
    assert last < 1.5 * first + 1
