"""What only shows in size or over time: `pytest -m long -n 0`. Without a GPU the sizes are small."""

import gc
import json
import os
import time

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
pytestmark = [pytest.mark.long, pytest.mark.timeout(500)]


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


def footprint(server):
    """(our open files, the server's, shared-memory files, device memory in use by all, allocated by us)."""
    gc.collect()
    ipc_codec.ipc_collect()
    if CUDA:
        torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(PLACE) if CUDA else (0, 0)
    return {
        "our files": len(os.listdir("/proc/self/fd")),
        "server's files": len(os.listdir(f"/proc/{server.process.pid}/fd")),
        "shm files": len([name for name in os.listdir("/dev/shm") if name.startswith("torch_")]),
        "device bytes": total - free,
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
