"""A witness and a judge, end to end: clean syncs are clean, and a fault in memory or order is named."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import ipc_codec
import protocol
import trainer
from test_roundtrip import ONE_WORKER, Server

ROOT = Path(protocol.__file__).parent


@pytest.fixture(params=ONE_WORKER)
def witness(request, tmp_path):
    path = tmp_path / "sync.jsonl"
    with Server(request.param, "--transcript", str(path), "--hold-seconds", "0.2") as server:
        yield Witnessed(server, path, torch.device(request.param))


class Witnessed:
    def __init__(self, server, path, device):
        self.client = trainer.HTTPWeightSyncClient(server.url, 20)
        self.path, self.device = path, device

    def weights(self):
        place = None if self.device.type == "cpu" else self.device
        generator = torch.Generator().manual_seed(0)
        weights = {name: torch.rand(64, 8, generator=generator).to(place) for name in "abc"}
        return weights | {"tied": weights["a"], "scalar": torch.tensor(1.5, device=place)}

    def lines(self):
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def found(self):
        return {(finding.party, finding.rule.id) for finding in protocol.check(self.lines())}


def test_clean_syncs_are_clean(witness):
    client, weights = witness.client, witness.weights()
    client.init_weight_transfer_engine({"packed": False})
    trainer.send_weights(client, weights, device=witness.device)
    client.init_weight_transfer_engine({"packed": True})
    for _ in range(2):
        trainer.send_weights_packed(client, weights, 4096, device=witness.device, weight_version="1")
    assert witness.found() == set()
    assert "gASV" not in witness.path.read_text()  # how a pickle begins in base64


def test_a_tensor_that_changes_before_the_reply_is_seen(witness):
    client, weights = witness.client, witness.weights()
    client.init_weight_transfer_engine({"packed": False})
    done = threading.Event()

    def write():
        while not done.wait(0.01):
            weights["b"].add_(1)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        trainer.send_weights(client, weights, device=witness.device)
    finally:
        done.set()
        thread.join()
    assert ("trainer", "loan.until-reply") in witness.found()
    assert all(party == "trainer" for party, _ in witness.found())


def test_a_tensor_that_changes_before_the_finish_is_seen(witness):
    client, weights = witness.client, witness.weights()
    finish = client.finish_weight_update

    def write_then_finish(version):
        weights["c"].zero_()
        torch.cuda.synchronize() if torch.cuda.is_initialized() else None
        finish(version)

    client.finish_weight_update = write_then_finish
    client.init_weight_transfer_engine({"packed": False})
    trainer.send_weights(client, weights, device=witness.device)
    (finding,) = protocol.check(witness.lines())
    assert (
        finding.rule.id == "loan.until-finish"
        and finding.party == "trainer"
        and "c on worker 0" in finding.seen
    )


def test_an_export_that_is_used_again_is_seen(witness):
    weight = witness.weights()["b"]
    handle = ipc_codec.export_handle(weight, witness.device)
    update = {"names": ["b"], "dtype_names": ["float32"], "shapes": [[64, 8]], "ipc_handles": [handle]}
    witness.client.init_weight_transfer_engine({"packed": False})
    for _ in range(2):
        witness.client.start_weight_update()
        witness.client.update_weights(update)
        witness.client.finish_weight_update()
    assert ("trainer", "export.fresh") in witness.found()
    ipc_codec._lent.clear()  # released twice: never reclaimed


def test_a_sync_that_is_never_finished_and_a_second_start_are_seen(witness):
    witness.client.init_weight_transfer_engine({"packed": False})
    witness.client.start_weight_update()
    with pytest.raises(trainer.SyncError):
        witness.client.start_weight_update()
    assert witness.found() == {("trainer", "start.one-at-a-time"), ("trainer", "sync.finished")}


HEADER = {**protocol.TRANSCRIPT, "uuids": []}
EMPTY = {"names": [], "dtype_names": [], "shapes": [], "ipc_handles_pickled": ""}
BY_HAND = [
    HEADER,
    {"call": "init_weight_transfer_engine", "body": {"init_info": {"packed": False}}, "status": 200},
    {"call": "start_weight_update", "body": None, "status": 200},
    {"call": "update_weights", "body": {"update_info": EMPTY}, "handles": [], "status": 200},
    {"call": "finish_weight_update", "body": None, "status": 200},
]


@pytest.mark.parametrize(
    ("lines", "options", "code"),
    [
        (BY_HAND, [], 0),
        ([*BY_HAND, BY_HAND[2]], [], 1),  # never finished
        ([HEADER, *BY_HAND[2:]], [], 0),  # no init: SHOULD
        ([HEADER, *BY_HAND[2:]], ["--strict"], 1),
        ([HEADER], [], 2),
        (BY_HAND[1:], [], 2),  # no header
        ([], [], 2),
    ],
)
def test_the_exit_code_of_the_judge(tmp_path, lines, options, code):
    path = tmp_path / "by-hand.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, str(ROOT / "protocol.py"), *options, str(path)]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == code


def test_a_server_that_lets_in_what_vllm_refuses_is_named():
    twice = [*BY_HAND[:3], BY_HAND[2], *BY_HAND[3:]]
    found = [(finding.party, finding.rule.id) for finding in protocol.check(twice)]
    assert found == [("trainer", "start.one-at-a-time"), ("server", "start.one-at-a-time")]


def test_after_finish_a_counter_that_is_not_0_is_the_servers():
    seen = {"workers": [{"names": ["a", "b"], "held": [1, 1], "after": [0, 1]}]}
    (finding,) = protocol.check([*BY_HAND[:-1], BY_HAND[-1] | {"seen": seen}])
    assert (finding.party, finding.rule.id) == ("server", "export.released") and "b: " in finding.seen
