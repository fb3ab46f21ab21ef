"""Trouble in the environment: each is said in one sentence that names it and what to do, without a traceback.

The real programs, most of them in this process with their words from the command line, against real servers.
`pytest -m long -n 0 -s tests/test_environment.py` plays those that take a process of their own, and prints
every sentence.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import warnings
from typing import Any

import pytest
import requests
import torch

import ipc_codec
import server
import trainer
from protocol import GATE
from test_roundtrip import ROOT, Server, both_modes, digests, environment, needs_cuda, needs_two_gpus

MODEL = "import torch\ndef linear():\n    return torch.nn.Linear(3, 2)\nnumber = 5\n"
LINEAR = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.arange(2.0)}


@pytest.fixture(autouse=True)
def _nothing_lent():
    yield
    ipc_codec.ipc_collect()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and checkpoints that fit it and that do not."""
    folder = tmp_path_factory.mktemp("environment")
    (folder / "a_model.py").write_text(MODEL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to give them up
        quantized = torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8)
    checkpoints = {
        "good": LINEAR,
        "unknown": LINEAR | {"scale": torch.ones(2)},
        "wrapped": {f"module._orig_mod.{name}": weight for name, weight in LINEAR.items()},
        "half": {name: weight.half() for name, weight in LINEAR.items()},
        "quantized": {"weight": quantized},
    }
    for name, weights in checkpoints.items():
        torch.save(weights, folder / f"{name}.pt")
    return folder


@pytest.fixture(scope="module")
def linear(folder):
    with Server("cpu", "--model", "a_model:linear", PYTHONPATH=str(folder)) as running:
        yield running


@pytest.fixture
def words(monkeypatch, capsys):
    """What a program says and returns with these words: all that it writes to stderr, and its exit code."""
    before = signal.getsignal(signal.SIGTERM)

    def call(program: Any, *line: Any) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [f"{program.__name__}.py", *map(str, line)])
        monkeypatch.setattr(sys, "path", [*sys.path])
        ended = program.main()
        said = capsys.readouterr().err + (f"{ended}\n" if isinstance(ended, str) else "")
        return 1 if isinstance(ended, str) else ended or 0, said

    yield call
    signal.signal(signal.SIGTERM, before)


def sentence(ended: tuple[int, str], *parts: str) -> None:
    """One line, with all of these in it, and exit code 1."""
    code, said = ended
    print(said, end="")
    assert code == 1 and said.count("\n") == 1 and "Error:" not in said, said
    for part in parts:
        assert part in said, (part, said)


def process(*command: Any, **env: str) -> tuple[int, str]:
    """The same of a program in a process of its own; the last line, since libraries may warn before it."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=ROOT,
        env=environment(True) | env,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stderr.splitlines()[-1] + "\n" if done.stderr else ""


# ---- the server's ----------------------------------------------------------------------------------------

OPTIONS = {
    "no such model": (["--model", "no_such_module:linear"], ["no_such_module", "MODULE:CALLABLE"]),
    "no such name in it": (["--model", "os:linear"], ["os:linear", "MODULE:CALLABLE"]),
    "a model that is none": (["--model", "trainer:STEPS"], ["without arguments", "'int'"]),
    "a model with arguments": (["--model", "trainer:Block"], ["without arguments", "'width'"]),
    "a model that gives no module": (["--model", "os:getcwd"], ["without arguments", "'str'"]),
    "a port that cannot be": (["--port", "70000"], ["127.0.0.1:70000", "0-65535"]),
    "a host that is nobody's": (["--host", "203.0.113.1"], ["203.0.113.1", "cannot start"]),
    "a device that is none": (["--device", "tpu"], ["'tpu'", "cuda:0,cuda:1"]),
    "workers that cannot be divided": (
        ["--device", "cpu:0,cpu:1", "--data-parallel-size", "3"],
        ["--data-parallel-size 3 does not divide 2 workers"],
    ),
    "a transcript nowhere": (["--transcript", "/nowhere/sync.jsonl"], ["/nowhere/sync.jsonl"]),
    "a transcript without room": (["--transcript", "/dev/full"], ["No space left", "/dev/full"]),
}


@pytest.mark.parametrize("trouble", OPTIONS)
def test_a_server_that_cannot_start_says_why(words, trouble):
    line, parts = OPTIONS[trouble]
    sentence(words(server, "--device", "cpu", "--port", "0", *line), *parts)


def test_a_judge_that_cannot_start_has_no_verdict(words, monkeypatch, tmp_path):
    """1 would be a finding. And no empty transcript stays behind."""
    monkeypatch.setattr(server.tempfile, "tempdir", str(tmp_path))
    for line in (["--device", "tpu"], ["--forward", "nonsense"], ["--transcript", "/nowhere/sync.jsonl"]):
        assert words(server, "--device", "cpu", *line, "--judge", "true")[0] == 2
    assert not [file for file in tmp_path.iterdir() if not file.stat().st_size]


def test_a_port_in_use_is_named(words):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sentence(words(server, "--device", "cpu", "--port", port), str(port), "in use")


def test_a_server_that_finds_its_port_in_use_leaves_the_transcript_alone(words, tmp_path):
    """The server that has the port may be writing it."""
    path = tmp_path / "sync.jsonl"
    path.write_text("what was said\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        line = ["--port", taken.getsockname()[1], "--transcript", path]
        sentence(words(server, "--device", "cpu", *line), "in use")
    assert path.read_text() == "what was said\n"


@pytest.mark.parametrize("device", ["cpu:128", "cpu:0,cpu:128", "cuda:128"])
def test_a_device_beyond_those_that_torch_counts_is_no_device(device):
    """torch lets its index wrap around."""
    with pytest.raises(ValueError, match=f"'{device.rpartition(',')[2]}'; auto, cpu"):
        server.parse_devices(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_server_without_a_gpu_says_how_many_torch_sees(words):
    sentence(words(server, "--device", "cuda:0"), "cuda:0", "0 CUDA devices")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_an_address_that_others_reach_is_warned_of(words, host, tmp_path):
    judged = ["--transcript", tmp_path / "sync.jsonl", "--judge", "true"]
    _, said = words(server, "--device", "cpu", "--host", host, *judged)
    print(said, end="")
    assert ("no authentication" in said and f"on {host} whoever" in said) == (host == "0.0.0.0")


# ---- the trainer's ---------------------------------------------------------------------------------------


def send(words, url, checkpoint, *more):
    return words(trainer, url, "--checkpoint", checkpoint, "--device", "cpu", "--timeout", 20, *more)


def test_a_good_checkpoint_arrives_whatever_proxy_is_set(words, linear, folder, monkeypatch):
    """The check of the checks: the same words with nothing wrong. A proxy is not asked: nobody is there."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert send(words, linear.url, folder / "good.pt") == (0, "")
    assert trainer.HTTPWeightSyncClient(linear.url).checksums() == {
        f"dp0:pp0:pcp0:tp0:{name}": digest for name, digest in digests(LINEAR).items()
    }


def test_no_server_is_named(words, folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    sentence(send(words, url, folder / "good.pt"), url, "refused")


@pytest.mark.long
def test_a_gate_that_is_shut_is_named(words, folder):
    with Server("cpu", gate=False) as shut:
        sentence(send(words, shut.url, folder / "good.pt"), GATE, "start the server with")


@both_modes
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(
    "checkpoint,parts",
    [
        ("unknown", ["no parameter 'scale'"]),
        (
            "wrapped",
            ["no parameter 'module._orig_mod.weight'", "it has 'weight'", "without wrapper prefixes"],
        ),
        ("half", ["weight: the server holds float32 [2, 3]", "brings float16 [2, 3]"]),
        ("quantized", ["weight: a qint8 tensor has no bytes to lend"]),
    ],
)
def test_a_checkpoint_that_does_not_fit_names_the_parameter(words, linear, folder, packed, checkpoint, parts):
    before = trainer.HTTPWeightSyncClient(linear.url).checksums()
    sentence(send(words, linear.url, folder / f"{checkpoint}.pt", *["--packed"] * packed), *parts)
    assert trainer.HTTPWeightSyncClient(linear.url).checksums() == before


def test_another_gpu_is_named_by_its_uuid(words, linear, folder):
    said = words(trainer, linear.url, "--checkpoint", folder / "good.pt", "--device", "cpu:1")
    sentence(said, "handle.this-gpu", ipc_codec.gpu_uuid("cpu:0"), "c0dec0de-0000-4000-8000-000000000001")


def test_a_trainer_on_the_cpu_and_a_server_on_a_gpu_are_told_apart():
    handle = ipc_codec.export_handle(torch.ones(3), "cpu:0")
    with pytest.raises(ipc_codec.HandleError, match="run trainer and server with --device cpu") as refused:
        ipc_codec.check_exports(handle.values(), "cuda:0")
    print(refused.value)
    ipc_codec.settle(*handle.values())


@pytest.mark.parametrize("theirs", [b"\x01", b"\x03"])
def test_handles_of_another_torch_are_told_by_both_version_bytes(theirs):
    """The first byte of torch's CUDA storage handles says their format; no device is touched."""
    [args] = ipc_codec.export_handle(torch.ones(3), "cpu:0").values()
    with pytest.raises(ipc_codec.HandleError, match="the same torch on both sides") as refused:
        ipc_codec.check_exports([(*args[:7], theirs + b"c" + bytes(64), *args[8:])], "cuda:0")
    print(refused.value)
    for version in (theirs, ipc_codec.CUDA_HANDLE_VERSION):
        assert f"version {version!r}" in str(refused.value)
    ipc_codec.settle(args)


@both_modes
def test_shared_memory_that_is_missing_is_named(words, linear, folder, monkeypatch, packed):
    monkeypatch.setattr(ipc_codec, "SHM", "/dev/nowhere")
    ended = send(words, linear.url, folder / "good.pt", *["--packed"] * packed)
    sentence(ended, "no memory can be shared in /dev/nowhere", "mount")


# ---- in a mount namespace of its own, as in a container --------------------------------------------------

NAMESPACE = ["unshare", "--mount", "sh", "-c"]
can_unshare = not subprocess.run([*NAMESPACE, "mount -t tmpfs none /dev/shm"], capture_output=True).returncode
in_a_container = pytest.mark.skipif(not can_unshare, reason="needs the right to mount")
SHM_OF_ITS_OWN = {
    "another /dev/shm": ("-o size=64m", ["no file", "one /dev/shm", "--ipc=host"]),
    "a /dev/shm that is too small": ("-o size=64k", ["do not fit into /dev/shm", "--shm-size"]),
    "a /dev/shm that is read-only": ("-o ro", ["no memory can be shared in /dev/shm", "Read-only"]),
}


@pytest.mark.long
@in_a_container
@pytest.mark.parametrize("trouble", SHM_OF_ITS_OWN)
def test_shared_memory_that_is_not_the_servers_is_named(linear, folder, trouble):
    options, parts = SHM_OF_ITS_OWN[trouble]
    run = f"mount -t tmpfs {options} none /dev/shm && exec {sys.executable} trainer.py {linear.url}"
    ended = process(*NAMESPACE, f"{run} --checkpoint {folder}/good.pt --device cpu")
    sentence(ended, *parts)


# ---- on GPUs ---------------------------------------------------------------------------------------------


@needs_cuda
@both_modes
def test_memory_of_expandable_segments_is_refused_before_start(folder, packed):
    with Server("cuda:0", "--model", "a_model:linear", PYTHONPATH=str(folder)) as running:
        line = [running.url, "--checkpoint", folder / "good.pt", "--device", "cuda:0", *["--packed"] * packed]
        env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        ended = process(sys.executable, "trainer.py", *line, **env)
        sentence(ended, "expandable_segments:True", "unset PYTORCH_CUDA_ALLOC_CONF")
        start = requests.post(running.url + "/start_weight_update", timeout=10)
        assert start.status_code == 200, "no update was open"


@needs_two_gpus
def test_a_gpu_that_no_worker_is_on_is_named_by_its_uuid(folder):
    with Server("cuda:0") as running:
        line = [running.url, "--checkpoint", folder / "good.pt", "--device", "cuda:1"]
        ended = process(sys.executable, "trainer.py", *line)
        sentence(ended, "handle.this-gpu", ipc_codec.gpu_uuid("cuda:0"))
