"""trainer.py: its client and its syncs against scripted servers and a real one, then its command line.

First what the tests use: weights, a scripted server, a real one. Then a section a promise: the bodies and
the failures of the client, the loan of a sync, start, kills, the policy, verify and checkpoints. The command
line comes last: its runs are child processes, in RUNS, and begin with the first test, two at a time.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import gc
import hashlib
import itertools
import json
import math
import os
import pickle
import pickletools
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests
import torch
from safetensors.torch import save_file
from torch import Tensor

import ipc_codec
import test_roundtrip
import trainer
from ipc_codec import Exports, HandleError, IpcArgs, PackedBuffer
from protocol import GATE
from trainer import HTTPWeightSyncClient, SyncError, send_weights, send_weights_packed, verify

ROOT = Path(trainer.__file__).resolve().parent
MARK = "WEIGHT_SYNC_TEST_RUN"  # in the environment of a run and of everything that it starts
ENVIRONMENT = test_roundtrip.environment(gate=False)
INIT, START, UPDATE = "/init_weight_transfer_engine", "/start_weight_update", "/update_weights"
FINISH, SHUTDOWN, CHECK = "/finish_weight_update", "/shutdown_weight_transfer_engine", "/weight_checker"
PAUSE, RESUME, IS_PAUSED = "/pause?mode=abort", "/resume", "/is_paused"

has_cuda = torch.cuda.is_available()
DEVICES = ["cpu:0", pytest.param("cuda:0", marks=pytest.mark.skipif(not has_cuda, reason="needs a GPU"))]
both_modes = pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
each_device = pytest.mark.parametrize("device", DEVICES)


# --- Weights ------------------------------------------------------------------------------------------


def small(device: str = "cpu", scale: float = 1.0) -> dict[str, Tensor]:
    """24, 10 and 24 bytes: three chunks of a buffer of 32."""
    weights = {
        "a": torch.arange(6.0).reshape(2, 3) * scale,
        "b": torch.ones(5, dtype=torch.bfloat16) * scale,
        "c": (torch.arange(3) * scale).long(),
    }
    return {name: weight.to(place(device)) for name, weight in weights.items()}


def odd(device: str) -> dict[str, Tensor]:
    """What a sync must carry as well; the last ones are empty."""
    weights = {
        "scalar": torch.tensor(1.5),
        "fp8 scalar": torch.tensor(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "fp16, 6 bytes": torch.tensor([1.0, -2.0, 3.0], dtype=torch.float16),
        "unaligned after it": torch.tensor([1.0, 2.0]),
        "empty": torch.empty(0, 3),
        "lazy conj": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "lazy neg": torch._neg_view(torch.tensor([1.0, 2.0])),
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "stepped": torch.arange(20)[3:9:2],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "row slice": torch.arange(100.0).reshape(10, 10)[4:7],
        "nan and -0.0": torch.tensor([math.nan, -0.0, 0.0, -math.inf]),
        "float4": torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(2, 4),
        "bool": torch.tensor([True]),
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
    }
    weights = {name: weight.to(place(device)) for name, weight in weights.items()}
    weights["tied"] = weights["parameter"]
    weights["empty tail"] = torch.empty(2, 0, 4, dtype=torch.bfloat16, device=place(device))
    return weights


def place(device: str) -> torch.device:
    """Where a worker's tensors are: torch knows one CPU only."""
    return torch.device("cpu" if device.startswith("cpu") else device)


def bits(tensor: Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return bytes(plain.reshape(-1).view(torch.uint8).tolist())


def digests(weights: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(bits(weight)).hexdigest() for name, weight in weights.items()}


serial = itertools.count()


def renamed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Under names that no other test has sent."""
    prefix = f"test{next(serial)}."
    return {prefix + name: weight for name, weight in weights.items()}


# --- Loans --------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def exports(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple]]:
    """The arguments of every export that the test makes. What it leaves lent is taken back after it."""
    for name, slot in ipc_codec._lent:  # by tests of another file, that release too often or never
        ipc_codec._counter_files[name][slot] = 0
    ipc_codec.ipc_collect()
    made: list[tuple] = []
    real = ipc_codec._export

    def export(tensor: Tensor, device: Any, aliases: Any) -> ipc_codec.Handle:
        handle = real(tensor, device, aliases)
        made.extend(handle.values())
        return handle

    monkeypatch.setattr(ipc_codec, "_export", export)
    yield made
    for args in made:
        ipc_codec.settle(args)
    ipc_codec.ipc_collect()
    assert not ipc_codec._lent


def counters(exports: list[tuple]) -> set[int | None]:
    """Of all exports that have memory."""
    return {ipc_codec.ref_count(args) for args in exports if IpcArgs(*args).storage_size_bytes}


def file_of(args: tuple) -> Path:
    """The shared-memory file of an emulated export; the data starts at byte 64."""
    return Path(ipc_codec.SHM + IpcArgs(*args).storage_handle.decode().removeprefix("cpu:"))


def lent_bytes(args: tuple, count: int) -> bytes:
    return file_of(args).read_bytes()[64 : 64 + count]


def send(
    client: HTTPWeightSyncClient, weights: Mapping[str, Tensor], packed: bool, room: int = 32, **more: Any
) -> trainer.Sent:
    more.setdefault("device", "cpu:0")
    more.setdefault("start_wait", 0.0)
    if packed:
        return send_weights_packed(client, weights, room, **more)
    return send_weights(client, weights, **more)


# --- A scripted server --------------------------------------------------------------------------------


class Seen(NamedTuple):
    path: str
    body: bytes
    content_type: str | None
    connection: int  # of this server, from 0

    @property
    def json(self) -> Any:
        return json.loads(self.body) if self.body else None

    @property
    def info(self) -> dict[str, Any]:
        return self.json["update_info"]

    @property
    def handles(self) -> Any:
        return ipc_codec.decode_handles(self.info["ipc_handles_pickled"])


class Answer(NamedTuple):
    status: int = 200
    body: Any = {"message": "done"}  # bytes as they are, anything else as JSON
    headers: Mapping[str, str] = {}
    cut: int | None = None  # bytes of the body that are sent
    then: str = ""  # DROPPED or NEVER, where it is cut


DROPPED, NEVER = "dropped", "never"
GOOD = Answer()
REFUSED = Answer(500, {"error": {"message": "because of this", "type": "InternalServerError", "code": 500}})


class Fake:
    """An HTTP server that answers by a script, {path: answer}, and 200 to the rest.

    An answer is an Answer, DROPPED, NEVER, a function of what was seen, or a list of those: first to last,
    then GOOD.
    """

    def __init__(self, script: Mapping[str, Any] | None = None):
        self.script = dict(script or {})
        self.seen: list[Seen] = []
        self.changed = threading.Condition()
        self.ended = threading.Event()
        self.connections = itertools.count()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (FakeConnection,), {"fake": self}))
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self) -> Fake:
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.http.shutdown()
        self.http.server_close()

    def answer(self, seen: Seen) -> Any:
        with self.changed:
            self.seen.append(seen)
            self.changed.notify_all()
            answer = self.script.get(seen.path, GOOD)
            if isinstance(answer, list):
                answer = answer.pop(0) if answer else GOOD
        return answer(seen) if callable(answer) else answer

    def wait_for(self, count: int, seconds: float) -> bool:
        """Whether that many requests came within that time."""
        with self.changed:
            return self.changed.wait_for(lambda: len(self.seen) >= count, seconds)

    @property
    def paths(self) -> list[str]:
        return [seen.path for seen in self.seen]

    @property
    def updates(self) -> list[Seen]:
        return [seen for seen in self.seen if seen.path == UPDATE]


class FakeConnection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps a connection, whatever it answered
    disable_nagle_algorithm = True
    fake: Fake

    def setup(self) -> None:
        super().setup()
        self.number = next(self.fake.connections)

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.reply(self.fake.answer(Seen(self.path, body, self.headers.get("content-type"), self.number)))

    do_GET = do_POST

    def reply(self, answer: Any) -> None:
        answer = Answer(0, b"", cut=0, then=answer) if isinstance(answer, str) else answer
        body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        if answer.status:
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
        self.wfile.write(body[: answer.cut])
        if answer.then == NEVER:
            self.fake.ended.wait(60)
        self.close_connection = bool(answer.then)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake() as running:
        yield running


# --- A real server ------------------------------------------------------------------------------------


class Server(test_roundtrip.Server):
    """`python server.py` on a free port."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


@pytest.fixture
def doomed() -> Iterator[Server]:
    """A server of the test's own, to kill."""
    with Server() as running:
        yield running


def held(url: str, names: Mapping[str, Any]) -> dict[str, str]:
    """The checksums that the first worker holds of these names."""
    reply = requests.post(url + CHECK, json={"action": "checksum"}, timeout=10).json()["checksums"]
    mine = {
        key.split(":", 4)[-1]: value for key, value in reply.items() if key.startswith("dp0:pp0:pcp0:tp0:")
    }
    return {name: value for name, value in mine.items() if name in names}


class Hooked(HTTPWeightSyncClient):
    """Records its calls, and runs a hook before some of them."""

    def __init__(self, url: str, timeout: float = 20.0, **hooks: Callable[[], Any]):
        super().__init__(url, timeout)
        self.called: list[str] = []
        self.hooks = hooks

    def call(self, path: str, body: Any = None) -> dict[str, Any]:
        self.called.append(path)
        if hook := self.hooks.get(path):
            hook()
        return super().call(path, body)


def until(condition: Callable[[], Any], seconds: float = 10.0) -> bool:
    """Whether the condition came true within that time."""
    end = time.monotonic() + seconds
    while not (found := bool(condition())) and time.monotonic() < end:
        time.sleep(0.02)
    return found


# --- The client: what it sends ------------------------------------------------------------------------


def test_start_has_no_body_and_no_content_type(fake):
    HTTPWeightSyncClient(fake.url).start_weight_update()
    assert fake.seen == [Seen(START, b"", None, 0)]


def test_finish_without_a_version_has_no_body(fake):
    HTTPWeightSyncClient(fake.url).finish_weight_update()
    assert fake.seen == [Seen(FINISH, b"", None, 0)]


@pytest.mark.parametrize("version", ["step 7", ""])
def test_finish_with_a_version_says_it(fake, version):
    HTTPWeightSyncClient(fake.url).finish_weight_update(version)
    assert [(seen.path, seen.json) for seen in fake.seen] == [(FINISH, {"weight_version": version})]


def test_the_other_calls_are_these_requests(fake):
    fake.script[CHECK] = Answer(body={"checksums": {"dp0:pp0:pcp0:tp0:a": "00"}})
    client = HTTPWeightSyncClient(fake.url + "/")
    client.init_weight_transfer_engine({"packed": True})
    client.shutdown_weight_transfer_engine()
    client.pause()
    client.pause("keep")
    client.resume()
    assert client.checksums() == {"dp0:pp0:pcp0:tp0:a": "00"}
    assert [(seen.path, seen.json) for seen in fake.seen] == [
        (INIT, {"init_info": {"packed": True}}),
        (SHUTDOWN, None),
        ("/pause?mode=abort", None),
        ("/pause?mode=keep", None),
        ("/resume", None),
        (CHECK, {"action": "checksum"}),
    ]
    assert {seen.content_type for seen in fake.seen if seen.body} == {"application/json"}


def test_update_encodes_raw_handles_and_leaves_the_callers_dict_alone(fake):
    handles = [ipc_codec.export_handle(torch.ones(2))]
    info = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2]], "ipc_handles": handles}
    HTTPWeightSyncClient(fake.url).update_weights(info)
    (seen,) = fake.seen
    assert seen.content_type == "application/json" and set(seen.json) == {"update_info"}
    assert set(seen.info) == {"names", "dtype_names", "shapes", "ipc_handles_pickled"}
    assert ipc_codec.describe_handles(seen.handles) == ipc_codec.describe_handles(handles)
    assert info["ipc_handles"] is handles and "ipc_handles_pickled" not in info


def test_update_passes_encoded_handles_on_and_never_null_ipc_handles(fake):
    HTTPWeightSyncClient(fake.url).update_weights({"ipc_handles": None, "ipc_handles_pickled": "gASVAA=="})
    assert fake.seen[0].info == {"ipc_handles_pickled": "gASVAA=="}


def test_a_list_of_updates_is_rank_local(fake):
    ranks = [{"names": [str(rank)], "ipc_handles": []} for rank in range(2)]
    HTTPWeightSyncClient(fake.url).update_weights(ranks)
    text = ipc_codec.encode_handles([])
    assert fake.seen[0].info == [{"names": [str(rank)], "ipc_handles_pickled": text} for rank in range(2)]


@both_modes
def test_a_sync_is_start_updates_finish_on_one_connection(fake, packed):
    client = HTTPWeightSyncClient(fake.url)
    client.init_weight_transfer_engine({"packed": packed})
    sent = send(client, small(), packed, weight_version="v1")
    updates = 3 if packed else 1
    assert fake.paths == [INIT, START, *[UPDATE] * updates, FINISH]
    assert {seen.connection for seen in fake.seen} == {0}
    assert fake.seen[-1].json == {"weight_version": "v1"}
    assert (sent.tensors, sent.nbytes, sent.chunks) == (3, 58, updates)
    assert str(sent).startswith("3 tensors, 0.0 MB, 3 chunks, " if packed else "3 tensors, 0.0 MB, 1 chunk, ")


def test_a_connection_that_was_idle_for_longer_than_four_seconds_is_not_used_again(fake, monkeypatch):
    client = HTTPWeightSyncClient(fake.url)
    client.start_weight_update()
    monkeypatch.setattr(trainer, "time", Clock(time.monotonic() + 4.1))
    client.finish_weight_update()
    assert [seen.connection for seen in fake.seen] == [0, 1]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("variable", ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"])
def test_proxy_variables_are_ignored(fake, monkeypatch, host, variable):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in (variable, variable.lower()):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        send_weights(HTTPWeightSyncClient(fake.url.replace("127.0.0.1", host), 5), small())
        assert not select.select([proxy], [], [], 0)[0], "the proxy was spoken to"
    assert fake.paths == [START, UPDATE, FINISH]


# --- The client: what it makes of answers -------------------------------------------------------------

CALLS: dict[str, Callable[[HTTPWeightSyncClient], Any]] = {
    INIT: lambda client: client.init_weight_transfer_engine({"packed": False}),
    START: lambda client: client.start_weight_update(),
    UPDATE: lambda client: client.update_weights({"names": [], "ipc_handles": []}),
    FINISH: lambda client: client.finish_weight_update("v1"),
    SHUTDOWN: lambda client: client.shutdown_weight_transfer_engine(),
}
BAD = {  # answer, the status of the error, and a part of its message
    "500": (REFUSED, 500, "answered 500: because of this"),
    "503": (Answer(503, b""), 503, "answered 503: (empty)"),
    "404": (Answer(404, {"detail": "Not Found"}), 404, "Not Found"),
    "400": (Answer(400, {"error": {"message": "no names", "param": "body"}}), 400, "answered 400: no names"),
    "200 without JSON": (Answer(200, b"<html>hello</html>"), None, "answered 200 without a JSON object"),
    "200 with a list": (Answer(200, ["done"]), None, "answered 200 without a JSON object"),
    "dropped": (DROPPED, None, "no answer from http://127.0.0.1:"),
    "half an answer": (Answer(cut=9, then=DROPPED), None, "no answer from http://127.0.0.1:"),
    "half, then silence": (Answer(cut=9, then=NEVER), None, "no answer from http://127.0.0.1:"),
    "never": (NEVER, None, "within 1 s"),
}


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("answer, status, reason", BAD.values(), ids=BAD)
def test_a_bad_answer_is_one_sync_error_with_the_reason_and_nothing_is_retried(
    fake, path, answer, status, reason
):
    fake.script[path] = [answer]  # the next one would be good
    client, began = HTTPWeightSyncClient(fake.url, timeout=1), time.monotonic()
    with pytest.raises(SyncError) as caught:
        CALLS[path](client)
    assert time.monotonic() - began < 3
    assert fake.paths == [path]
    assert caught.value.status == status
    assert reason in str(caught.value) and str(caught.value).startswith(path[1:] + ": ")
    assert "\n" not in str(caught.value)


STRANGE = {  # the answer, and what the error says of it
    "nested": (Answer(500, b"[" * 100_000), "answered 500: " + "[" * 200),
    "nested, with 200": (Answer(200, b"[" * 100_000), "answered 200 without a JSON object"),
    "long": (Answer(500, {"error": {"message": "A" * 3_000_000}}), "answered 500: " + "A" * 2000),
    "of control codes": (Answer(500, {"error": {"message": "a\x1b[2J\nb"}}), "answered 500: a?[2J b"),
    "of no text": (Answer(500, {"error": {"message": ["a", 1]}}), "answered 500: ['a', 1]"),
    "binary": (
        Answer(500, b"\xff\0\x07", {"content-type": "text/x; charset=a\0b"}),
        "answered 500: \ufffd??",
    ),
}


@pytest.mark.parametrize("answer, reason", STRANGE.values(), ids=STRANGE)
def test_an_answer_of_a_stranger_is_a_line_that_a_terminal_can_show(fake, answer, reason):
    fake.script[START] = answer
    with pytest.raises(SyncError) as caught:
        HTTPWeightSyncClient(fake.url, timeout=5).start_weight_update()
    assert str(caught.value) == f"start_weight_update: the server {reason}"


@pytest.mark.parametrize(
    "said", [{}, {"checksums": [1]}, {"checksums": {"a": [1]}}, {"checksums": {"a": None}}]
)
def test_checksums_are_texts(fake, said):
    fake.script[CHECK] = Answer(body=said)
    with pytest.raises(SyncError, match="without checksums"):
        verify(HTTPWeightSyncClient(fake.url), small(), pytest.fail)


def test_a_number_of_workers_is_a_number(fake):
    fake.script["/get_world_size"] = [Answer(body={"world_size": size}) for size in (8, "8")]
    client = HTTPWeightSyncClient(fake.url)
    assert client.world_size() == 8
    with pytest.raises(SyncError, match="without a number"):
        client.world_size()


ROW: dict[str, Any] = {"token_ids": [97] * 16, "logprobs": {"token_logprobs": [-1.0] * 16}}
NO_ROLLOUTS = {
    "a token beyond bytes": [ROW | {"token_ids": [97] * 15 + [256]}] * 128,
    "a negative token": [ROW | {"token_ids": [97] * 15 + [-1]}] * 128,
    "half a token": [ROW | {"token_ids": [97] * 15 + [1.5]}] * 128,
    "a huge token": [ROW | {"token_ids": [97] * 15 + [2**70]}] * 128,
    "tokens that are lists": [ROW | {"token_ids": [[97]] * 16}] * 128,
    "too few tokens": [ROW | {"token_ids": [97] * 15}] * 128,
    "too few rows": [ROW] * 127,
    "no row": [],
    "too few log-probabilities": [ROW | {"logprobs": {"token_logprobs": [-1.0]}}] * 128,
    "log-probabilities of text": [ROW | {"logprobs": {"token_logprobs": ["a"] * 16}}] * 128,
    "text": "abc",
}


@pytest.mark.parametrize("choices", NO_ROLLOUTS.values(), ids=NO_ROLLOUTS)
def test_completions_that_are_none_of_what_was_asked_for_are_a_sync_error(fake, choices):
    good = Answer(body={"choices": [ROW] * 128, "weight_version": "v"})
    fake.script["/v1/completions"] = [good, Answer(body={"choices": choices, "weight_version": "v"})]
    client = HTTPWeightSyncClient(fake.url)
    assert trainer.sample(client, 0).tokens.shape == (128, 16)
    with pytest.raises(SyncError, match="without tokens and log-probabilities"):
        trainer.sample(client, 0)


@pytest.mark.parametrize("bad", ["500", "503", "404", "400", "half an answer"])
def test_the_connection_is_dropped_after_a_failure(fake, bad):
    fake.script[START] = [GOOD, BAD[bad][0]]
    client = HTTPWeightSyncClient(fake.url, timeout=1)
    client.start_weight_update()
    with pytest.raises(SyncError):
        client.start_weight_update()
    client.start_weight_update()
    assert [seen.connection for seen in fake.seen] == [0, 0, 1]


@pytest.mark.parametrize("value", [math.nan, {1, 2}])
def test_a_body_that_cannot_be_json_is_said_and_nothing_is_sent(fake, value):
    with pytest.raises(ValueError, match="collective_rpc: the body cannot be JSON: "):
        HTTPWeightSyncClient(fake.url).call("collective_rpc", {"a": value})
    assert fake.seen == []


def test_nobody_listening_is_a_sync_error_that_names_the_url():
    with pytest.raises(SyncError, match=re.escape(closed_url()) + ".*refused") as caught:
        HTTPWeightSyncClient(closed_url()).start_weight_update()
    assert caught.value.status is None


def closed_url() -> str:
    return "http://127.0.0.1:9"  # discard: nobody listens


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(fake, status):
    fake.script[START] = Answer(status, b"moved", {"location": FINISH})
    with pytest.raises(SyncError, match=str(status)):
        HTTPWeightSyncClient(fake.url).start_weight_update()
    assert fake.paths == [START]


def test_a_redirect_with_a_json_body_is_no_success(fake):
    fake.script[START] = Answer(307, {"message": "moved"}, {"location": FINISH})
    with pytest.raises(SyncError) as caught:
        HTTPWeightSyncClient(fake.url).start_weight_update()
    assert caught.value.status == 307


def test_https_to_an_http_server_is_a_sync_error(fake):
    with pytest.raises(SyncError):
        HTTPWeightSyncClient(fake.url.replace("http:", "https:"), 5).start_weight_update()


def test_a_url_that_cannot_be_is_a_sync_error():
    with pytest.raises(SyncError):
        HTTPWeightSyncClient("http://a..b:80").start_weight_update()


def test_checksums_that_are_missing_in_the_answer_are_a_sync_error(fake):
    with pytest.raises(SyncError):
        HTTPWeightSyncClient(fake.url).checksums()


@both_modes
@pytest.mark.parametrize("path", [START, UPDATE, FINISH])
@pytest.mark.parametrize("bad", ["404", "200 without JSON", "dropped"])
def test_after_a_failed_call_nothing_is_sent(fake, packed, path, bad):
    fake.script[path] = [BAD[bad][0]]
    with pytest.raises(SyncError, match=path[1:]):
        send(HTTPWeightSyncClient(fake.url), small(), packed)
    calls = [START, *[UPDATE] * (3 if packed else 1), FINISH]
    assert fake.paths == calls[: calls.index(path) + 1]


# --- The loan: what is on the wire --------------------------------------------------------------------


def handles_in(seen: Seen) -> list[dict[str, tuple]]:
    return seen.handles if isinstance(seen.handles, list) else [seen.handles]


@each_device
@both_modes
def test_a_handle_is_fifteen_plain_arguments_by_the_plain_uuid(fake, packed, device):
    send(HTTPWeightSyncClient(fake.url), odd(device), packed, room=1024, device=device)
    handles = [handle for seen in fake.updates for handle in handles_in(seen)]
    assert len(handles) == (1 if packed else len(odd(device)))
    for handle in handles:
        ((key, args),) = handle.items()
        assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", key)
        assert type(args) is tuple and len(args) == 15
        named = IpcArgs(*args)
        assert named.tensor_cls == "torch.Tensor" and named.requires_grad is False
        assert type(named.storage_device) is int


@each_device
@both_modes
def test_the_pickle_names_torchs_classes_only_and_no_function(fake, packed, device):
    send(HTTPWeightSyncClient(fake.url), odd(device), packed, room=1024, device=device)
    payload = base64.b64decode(fake.updates[0].info["ipc_handles_pickled"], validate=True)
    opcodes = [(opcode.name, arg) for opcode, arg, _ in pickletools.genops(payload)]
    words = {arg for _, arg in opcodes if isinstance(arg, str)}
    words -= {key for handle in handles_in(fake.updates[0]) for key in handle}
    dtypes = {str(weight.dtype).removeprefix("torch.") for weight in odd(device).values()} | {"uint8"}
    assert words <= {"torch", "Size", "Tensor", "torch.storage", "TypedStorage"} | dtypes
    assert ("PROTO", 4) in opcodes


@both_modes
def test_the_metadata_is_of_the_tensors_in_order(fake, packed):
    weights = odd("cpu")
    send(HTTPWeightSyncClient(fake.url), weights, packed, room=128)
    infos = [seen.info for seen in fake.updates]
    joined = {key: [x for info in infos for x in info[key]] for key in ("names", "dtype_names", "shapes")}
    assert joined["names"] == list(weights)
    assert joined["dtype_names"] == [str(w.dtype).removeprefix("torch.") for w in weights.values()]
    assert joined["shapes"] == [list(w.shape) for w in weights.values()]
    sizes = [size for info in infos for size in info.get("tensor_sizes") or []]
    assert sizes == ([w.numel() * w.itemsize for w in weights.values()] if packed else [])


def test_no_chunk_exceeds_the_buffer_and_one_that_fills_it_exactly_fits(fake):
    weights = {str(at): torch.ones(size, dtype=torch.uint8) for at, size in enumerate([60, 60, 4, 64, 1, 0])}
    send(HTTPWeightSyncClient(fake.url), weights, packed=True, room=64)
    assert [seen.info["tensor_sizes"] for seen in fake.updates] == [[60], [60, 4], [64], [1, 0]]
    assert {IpcArgs(*args).storage_size_bytes for args in handles_in(fake.updates[0])[0].values()} == {64}


def test_a_buffer_is_no_larger_than_all_weights(fake, exports):
    send(HTTPWeightSyncClient(fake.url), small(), packed=True, room=1 << 20)
    assert [IpcArgs(*args).storage_size_bytes for args in exports] == [58]


def test_the_packed_buffer_is_exported_once_a_sync_and_not_written_before_the_reply(fake, exports):
    weights, arrived = small(), []

    def look(seen: Seen) -> Answer:
        (args,) = seen.handles.values()
        size, already = sum(seen.info["tensor_sizes"]), len(fake.seen)
        before = lent_bytes(args, size)
        sent_on = fake.wait_for(already + 1, 0.2)  # a trainer that does not wait for the reply
        arrived.append((before, lent_bytes(args, size), sent_on))
        return GOOD

    fake.script[UPDATE] = look
    send(HTTPWeightSyncClient(fake.url), weights, packed=True)
    assert arrived == [(bits(weight), bits(weight), False) for weight in weights.values()]
    assert len(exports) == 1
    assert len({seen.info["ipc_handles_pickled"] for seen in fake.updates}) == 1


def test_unpacked_the_lent_bytes_are_there_until_finish_is_answered(fake, exports):
    weights, at_finish = renamed(odd("cpu")), []

    def look(seen: Seen) -> Answer:
        at_finish.extend(file_of(args).exists() for args in exports if args[8])
        return GOOD

    fake.script[FINISH] = look
    send(HTTPWeightSyncClient(fake.url), weights, packed=False)
    assert at_finish and all(at_finish)
    stored = [IpcArgs(*args) for args in exports]
    transposed = stored[list(odd("cpu")).index("transposed")]
    assert transposed.tensor_stride == (3, 1)  # a contiguous copy was lent


@pytest.mark.parametrize("keep", [False, True], ids=["own buffer", "a kept buffer"])
def test_a_kept_buffer_is_exported_once_and_renewed_with_each_sync(fake, exports, keep):
    buffer = PackedBuffer(32, "cpu:0") if keep else None
    for _ in range(2):
        send(HTTPWeightSyncClient(fake.url), small(), packed=True, buffer=buffer)
        assert counters(exports[-1:]) == {1}
        ipc_codec.settle(*exports)  # as the server would
        ipc_codec.ipc_collect()
    assert len(exports) == 2 - keep and len(ipc_codec._lent) == keep


UNLENDABLE = {
    "meta": lambda: torch.empty(2, device="meta"),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "not a tensor": lambda: [1.0],
}


@both_modes
@pytest.mark.parametrize("make", UNLENDABLE.values(), ids=UNLENDABLE)
def test_what_cannot_be_lent_is_named_before_anything_is_said(fake, exports, packed, make):
    with pytest.raises(HandleError, match=r"^layer\.7: "):
        send(HTTPWeightSyncClient(fake.url), {"good": torch.ones(2), "layer.7": make()}, packed)
    assert fake.seen == [] and exports == []


def test_a_tensor_larger_than_the_buffer_is_named_before_anything_is_said(fake, exports):
    weights = {"a": torch.ones(15), "b": torch.ones(15), "layer.7": torch.ones(50)}
    with pytest.raises(HandleError, match=r"layer\.7.*200.*64"):
        send(HTTPWeightSyncClient(fake.url), weights, packed=True, room=64)
    assert fake.seen == [] and exports == []


def test_where_one_of_many_exports_fails_the_others_are_taken_back(fake, exports, monkeypatch):
    recording = ipc_codec._export

    def third_fails(tensor: Tensor, *more: Any) -> ipc_codec.Handle:
        if len(exports) == 2:
            raise HandleError("no room")
        return recording(tensor, *more)

    monkeypatch.setattr(ipc_codec, "_export", third_fails)
    with pytest.raises(HandleError, match=r"^c: no room"):
        send(HTTPWeightSyncClient(fake.url), small(), packed=False)
    assert fake.seen == [] and len(exports) == 2 and counters(exports) == {0}
    ipc_codec.ipc_collect()
    assert not ipc_codec._lent


# --- The loan: how it ends after a failure ------------------------------------------------------------


@each_device
@both_modes
@pytest.mark.parametrize("path", [START, UPDATE])
@pytest.mark.parametrize("bad", ["500", "400", "404"])
def test_after_a_refusal_every_export_is_settled_and_reclaimed(fake, exports, packed, path, bad, device):
    fake.script[path] = BAD[bad][0]
    told: list[str] = []
    with pytest.raises(SyncError, match=re.escape(BAD[bad][2])):
        send(HTTPWeightSyncClient(fake.url), small(device), packed, device=device, progress=told.append)
    assert len(exports) == (1 if packed else 3)
    assert counters(exports) <= {0, None}  # None: all that its file counted is over
    assert not ipc_codec._lent
    assert not any("lent" in line for line in told)
    gc.collect()
    assert not packed or device.startswith("cuda") or not file_of(exports[0]).exists()


@each_device
@both_modes
@pytest.mark.parametrize(
    "answer", [NEVER, DROPPED, Answer(200, b"what?")], ids=["never", "dropped", "no JSON"]
)
def test_after_no_answer_to_an_update_nothing_is_settled_and_it_says_so(
    fake, exports, packed, answer, device
):
    fake.script[UPDATE] = answer
    told: list[str] = []
    with pytest.raises(SyncError):
        send(HTTPWeightSyncClient(fake.url, 1), small(device), packed, device=device, progress=told.append)
    assert fake.paths == [START, UPDATE]
    assert counters(exports) == {1}
    lent = "a buffer of 32 bytes" if packed else "3 tensors"
    assert told == [f"{lent} stay{'s' * packed} lent: the server may still read {'it' if packed else 'them'}"]
    ipc_codec.ipc_collect()
    assert counters(exports) == {1}
    assert device.startswith("cuda") or len(ipc_codec._lent) == len(exports)


@both_modes
def test_a_start_that_was_refused_keeps_no_memory_once_the_sync_is_over(fake, clock, exports, packed):
    fake.script[START] = [REFUSED]
    gc.collect()
    gc.disable()
    try:
        send(HTTPWeightSyncClient(fake.url), {"a": torch.ones(4, 4).t()}, packed, room=64, start_wait=30)
        for args in exports:
            ipc_codec.settle(args)  # as the server would
        ipc_codec.ipc_collect()
        assert not file_of(exports[0]).exists()
    finally:
        gc.enable()


@both_modes
def test_where_start_is_not_answered_nobody_was_told_of_the_exports_and_they_are_settled(exports, packed):
    told: list[str] = []
    with pytest.raises(SyncError):
        send(HTTPWeightSyncClient(closed_url()), small(), packed, progress=told.append)
    assert counters(exports) == {0} and not told


def test_ctrl_c_during_the_first_chunk_settles_nothing(fake, exports):
    def interrupt(seen: Seen) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return NEVER

    fake.script[UPDATE] = interrupt
    with pytest.raises(KeyboardInterrupt):
        send(HTTPWeightSyncClient(fake.url, 5), small(), packed=True)
    assert counters(exports) == {1}


def test_packed_a_refusal_after_some_chunks_releases_what_the_server_opened(server, exports):
    client, weights = Hooked(server.url), renamed(small())
    client.init_weight_transfer_engine({"packed": True})
    send(client, dict(list(weights.items())[2:]), packed=True)
    client.called.clear()
    weights[list(weights)[2]] = torch.ones(2)  # another shape than the server holds
    told: list[str] = []
    with pytest.raises(SyncError, match="the server holds int64") as caught:
        send(client, weights, packed=True, progress=told.append)
    assert caught.value.status == 500
    assert ["/" + path for path in client.called] == [START, UPDATE, UPDATE, SHUTDOWN]
    assert told == ["chunk 1/2"]
    assert counters(exports) == {0} and not ipc_codec._lent
    del caught  # its traceback holds the buffer
    gc.collect()
    assert not file_of(exports[-1]).exists()


@pytest.mark.parametrize(
    "weights, says", [({"a": 1}, "1 tensor stays"), ({"a": 1, "b": 2}, "2 tensors stay")]
)
def test_what_stays_lent_is_counted(fake, weights, says):
    fake.script[UPDATE] = DROPPED
    told: list[str] = []
    with pytest.raises(SyncError):
        tensors = {name: torch.tensor(value) for name, value in weights.items()}
        send_weights(HTTPWeightSyncClient(fake.url), tensors, device="cpu:0", progress=told.append)
    assert told == [f"{says} lent: the server may still read them"]


def test_packed_a_shutdown_that_fails_does_not_hide_the_first_error_and_the_buffer_stays_lent(fake, exports):
    fake.script |= {UPDATE: [GOOD, REFUSED], SHUTDOWN: Answer(500, b"no")}
    told: list[str] = []
    with pytest.raises(SyncError, match="because of this"):
        send(HTTPWeightSyncClient(fake.url), small(), packed=True, progress=told.append)
    assert fake.paths == [START, UPDATE, UPDATE, SHUTDOWN]
    assert counters(exports) == {1} and "stays lent" in told[-1]


def test_packed_an_error_of_our_own_in_mid_sync_leaves_the_update_to_the_next_sync(server, exports):
    client, weights = Hooked(server.url), renamed(small())
    client.init_weight_transfer_engine({"packed": True})
    client.called.clear()

    def trouble(line: str) -> None:
        raise HandleError("no room is left")

    with pytest.raises(HandleError) as caught:
        send(client, weights, packed=True, progress=trouble)
    assert ["/" + path for path in client.called] == [START, UPDATE] and counters(exports) == {1}
    assert "stays lent" in "".join(getattr(caught.value, "__notes__", ["stays lent"]))  # Python 3.11
    client.called.clear()
    send(client, weights, packed=True)
    assert ["/" + path for path in client.called] == [START, FINISH, START, *[UPDATE] * 3, FINISH]
    assert held(server.url, weights) == digests(weights) and counters(exports) == {0}


def test_packed_no_answer_after_some_chunks_calls_no_shutdown(fake, exports):
    fake.script[UPDATE] = [GOOD, DROPPED]
    with pytest.raises(SyncError):
        send(HTTPWeightSyncClient(fake.url), small(), packed=True)
    assert fake.paths == [START, UPDATE, UPDATE] and counters(exports) == {1}


@pytest.mark.parametrize("script", [[NEVER], [GOOD, NEVER]], ids=["first chunk", "second chunk"])
def test_after_a_time_out_the_buffer_is_left_to_the_server(fake, exports, script):
    fake.script[UPDATE] = script
    buffer = PackedBuffer(32, "cpu:0")
    with pytest.raises(SyncError, match="within 1 s"):
        send(HTTPWeightSyncClient(fake.url, 1), small(), packed=True, buffer=buffer)
    left = lent_bytes(exports[0], 32)
    send(HTTPWeightSyncClient(fake.url, 1), small(scale=-3.0), packed=True, buffer=buffer)
    first, second = exports
    assert first[7] != second[7]
    assert lent_bytes(first, 32) == left
    assert ipc_codec.ref_count(first) == 1


def test_after_a_refusal_the_buffer_is_used_again(fake, exports):
    fake.script[UPDATE] = [REFUSED]
    buffer = PackedBuffer(32, "cpu:0")
    with pytest.raises(SyncError):
        send(HTTPWeightSyncClient(fake.url), small(), packed=True, buffer=buffer)
    send(HTTPWeightSyncClient(fake.url), small(), packed=True, buffer=buffer)
    assert exports[0][7] == exports[1][7]


# --- The loan: on the real server ---------------------------------------------------------------------


@test_roundtrip.needs_cuda
@both_modes
def test_writes_that_are_queued_on_a_gpu_are_there_when_the_server_reads(packed):
    """A second of work is queued before them. Handles that are renewed have events that cover nothing."""
    weights = {name: torch.zeros(1 << 16, device="cuda:0") for name in "ab"}
    kept: Any = {"exports": Exports()}
    if packed:
        kept = {"buffer": trainer.new_buffer(weights, 1 << 18)}
    with Server("cuda:0") as running:
        client = HTTPWeightSyncClient(running.url)
        client.init_weight_transfer_engine({"packed": packed})
        for seed in range(3):
            new = {n: test_roundtrip.noise(torch.int32, 1 << 16, seed=seed).cuda() for n in weights}
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000_000)
            for name, weight in weights.items():
                weight.view(torch.int32).copy_(new[name])
            send(client, weights, packed, device="cuda:0", room=1 << 18, **kept)
            assert held(running.url, weights) == digests(new)


@each_device
@both_modes
def test_every_kind_of_tensor_is_announced_and_arrives_exactly(server, exports, packed, device):
    weights = renamed(odd(device))
    with contextlib.ExitStack() as stack:
        url = server.url if device == "cpu:0" else stack.enter_context(Server(device)).url
        client = HTTPWeightSyncClient(url)
        client.init_weight_transfer_engine({"packed": packed})
        send(client, weights, packed, room=128, device=device, weight_version="exact")
        assert held(url, weights) == digests(weights)
        assert requests.get(url + "/weight_info", timeout=10).json() == {"weight_version": "exact"}
        assert (
            verify(client, weights, pytest.fail)
            == f"identical: sha256 of {len(weights)} tensors, on every worker"
        )
    assert counters(exports) <= {0, None} and not ipc_codec._lent


@both_modes
def test_weights_that_change_arrive_changed_and_come_back(server, packed):
    first = renamed(small())
    second = {name: weight * 2 + 1 for name, weight in first.items()}
    client = HTTPWeightSyncClient(server.url)
    client.init_weight_transfer_engine({"packed": packed})
    buffer = {"buffer": PackedBuffer(32, "cpu:0")} if packed else {}
    for weights in (first, second, first):
        send(client, weights, packed, **buffer)
        assert held(server.url, weights) == digests(weights)
    assert digests(first) != digests(second)


@both_modes
def test_a_refusal_of_the_real_server_is_its_own_words_and_settles(server, exports, packed):
    client, weights = HTTPWeightSyncClient(server.url), renamed(small())
    client.init_weight_transfer_engine({"packed": not packed})  # another mode than is sent
    with pytest.raises(SyncError, match="packed mode") as caught:
        send(client, weights, packed, room=64)
    assert caught.value.status == 500
    assert counters(exports) == {0} and not ipc_codec._lent
    assert held(server.url, weights) == {}


# --- The loan: renewed with each sync -------------------------------------------------------------------


class Reader:
    """Makes a server of the fake: it reads what is lent at each update, and lets go at the finish."""

    def __init__(self, fake: Fake):
        self.syncs: list[dict[str, dict[str, bytes]]] = []  # by GPU and name
        self.bodies: list[bytes] = []
        self.slots: list[tuple[bytes, int]] = []  # of the last sync, one an export
        self.lent: list[tuple] = []  # by the last sync
        self.lets_go = True
        fake.script |= {START: self.start, UPDATE: self.update, FINISH: self.finish}

    def start(self, seen: Seen) -> Answer:
        self.syncs.append({})
        self.lent, self.slots = [], []
        return GOOD

    def update(self, seen: Seen) -> Answer:
        self.bodies.append(seen.body)
        for info in seen.info if isinstance(seen.info, list) else [seen.info]:
            self.read(info, ipc_codec.decode_handles(info["ipc_handles_pickled"]))
        return GOOD

    def read(self, info: dict[str, Any], handles: Any) -> None:
        at, each = 0, handles if isinstance(handles, list) else [handles] * len(info["names"])
        for name, dtype, shape, handle in zip(
            info["names"], info["dtype_names"], info["shapes"], each, strict=True
        ):
            length = math.prod(shape) * getattr(torch, dtype).itemsize
            for gpu, args in handle.items():
                start = (
                    at if handles is handle else IpcArgs(*args).tensor_offset * getattr(torch, dtype).itemsize
                )
                got = lent_bytes(args, start + length)[start:] if length else b""
                self.syncs[-1].setdefault(gpu, {})[name] = got
            at += length
        for handle in handles if isinstance(handles, list) else [handles]:
            new = [args for args in handle.values() if args not in self.lent and args[8]]
            assert set(ipc_codec.ref_counts(new)) <= {1}
            self.lent += new
            self.slots += [IpcArgs(*args)[11:13] for args in new]

    def finish(self, seen: Seen) -> Answer:
        if self.lets_go:
            ipc_codec.settle(*self.lent)
        return GOOD

    @property
    def last(self) -> dict[str, bytes]:
        """What the last sync brought, to one GPU."""
        [by_name] = self.syncs[-1].values()
        return by_name


def as_bytes(weights: Mapping[str, Tensor]) -> dict[str, bytes]:
    return {name: bits(weight) for name, weight in weights.items()}


@pytest.fixture
def reader(fake: Fake) -> Reader:
    return Reader(fake)


@pytest.fixture
def kept() -> Iterator[Exports]:
    """For all syncs of a test."""
    exports = Exports()
    yield exports
    exports.forget()


class Recording(HTTPWeightSyncClient):
    """Keeps the bodies of its updates."""

    def __init__(self, url: str):
        super().__init__(url, 20.0)
        self.bodies: list[bytes] = []

    def call(self, path: str, body: Any = None) -> dict[str, Any]:
        if path == "update_weights":
            self.bodies.append(body if isinstance(body, bytes) else body.content)
        return super().call(path, body)


@each_device
@both_modes
def test_a_sync_like_the_one_before_says_the_same_and_brings_the_values_of_now(
    server, exports, kept, packed, device, monkeypatch
):
    """Odd ones that lie contiguously: two names on one tensor, rows of a larger one, empty ones."""
    made: list[Any] = []
    make = trainer.update_body

    def recording(info: Any) -> bytes:
        made.append(info)
        return make(info)

    monkeypatch.setattr(trainer, "update_body", recording)
    weights = {name: w for name, w in renamed(odd(device)).items() if w.is_contiguous() and not w.is_neg()}
    weights = {name: w for name, w in weights.items() if not w.is_conj()}
    with contextlib.ExitStack() as stack:
        url = server.url if device == "cpu:0" else stack.enter_context(Server(device)).url
        client = Recording(url)
        client.init_weight_transfer_engine({"packed": packed})
        more: dict[str, Any] = {"buffer": PackedBuffer(128, device)} if packed else {"exports": kept}
        seen = []
        for _ in range(4):
            send(client, weights, packed, device=device, **more)
            assert held(url, weights) == digests(weights)
            seen.append(digests(weights))
            for weight in {id(weight): weight for weight in weights.values()}.values():
                with torch.no_grad():
                    weight.view(torch.uint8).bitwise_xor_(1) if weight.dim() else weight.fill_(len(seen))
        assert len(set(map(str, seen))) == 4
        chunks = len(client.bodies) // 4
        assert chunks > 1 if packed else chunks == 1
        assert client.bodies == client.bodies[:chunks] * 4 and len(made) == chunks
        assert len(exports) == (1 if packed else len(weights))
    assert counters(exports) <= {0, None}


def test_handles_that_are_kept_serve_weights_that_change_in_any_way(fake, reader, kept):
    """Each change twice, with other bytes, and the plain one around it: nothing is told that has changed."""
    client, base = HTTPWeightSyncClient(fake.url), torch.arange(8.0)
    odd, even = torch.ones(3, dtype=torch.uint8), torch.ones(2)
    for name, change in CHANGES.items():
        for at, change_now in enumerate((lambda w: w, change, change, lambda w: w[:4], lambda w: w[::2])):
            weights = {"a": change_now(base), "b": odd, "c": even}
            send(client, weights, packed=False, exports=kept)
            assert reader.last == as_bytes(weights), (name, at)
            info = fake.updates[-1].info
            assert info["shapes"][0] == list(weights["a"].shape), (name, at)
            assert "torch." + info["dtype_names"][0] == str(weights["a"].dtype), (name, at)
            base.add_(1)
            even.add_(1)


@pytest.mark.parametrize("with_what", [{}, {"plain": torch.ones(4)}], ids=["alone", "beside another"])
@pytest.mark.parametrize("lie", [Tensor.t, lambda w: torch._neg_view(w)], ids=["transposed", "negated"])
def test_where_a_copy_was_lent_it_is_made_and_lent_anew(fake, reader, kept, exports, lie, with_what):
    client, base = HTTPWeightSyncClient(fake.url), torch.arange(12.0).reshape(3, 4)
    for count in (1, 2, 3):
        weights = with_what | {"copied": lie(base)}
        send(client, weights, packed=False, exports=kept)
        assert reader.last == as_bytes(weights)
        assert len(exports) == count * len(weights)
        base.add_(1)


def test_other_names_another_order_and_exchanged_weights_are_told_anew(fake, reader, kept):
    client, a, b = HTTPWeightSyncClient(fake.url), torch.zeros(3), torch.ones(3)
    told = [
        {"a": a, "b": b},
        {"b": b, "a": a},
        {"a": b, "b": a},
        {"a": b, "b": a, "c": a},
        {"a": b, "b": b, "c": a},
        {"a": b},
        {"x": b},
        {},
        {"a": a, "b": b},
    ]
    for weights in told:
        for _ in range(2):
            send(client, weights, packed=False, exports=kept)
            assert fake.updates[-1].info["names"] == list(weights)
            assert reader.syncs[-1] == ({ipc_codec.gpu_uuid("cpu:0"): as_bytes(weights)} if weights else {})
            a.add_(2)
            b.add_(2)
    assert len(set(reader.bodies)) == len(told) and reader.bodies[::2] == reader.bodies[1::2]


@pytest.mark.parametrize("what", ["exports", "buffer"])
def test_what_is_kept_for_another_device_is_not_told_to_this_one(fake, reader, kept, what):
    """A buffer has the device that it was made for, whatever is said later."""
    client, weights = HTTPWeightSyncClient(fake.url), small()
    more = {"buffer": PackedBuffer(64, "cpu:0")} if what == "buffer" else {"exports": kept}
    for device in ("cpu:0", "cpu:1", "cpu:1", "cpu:0"):
        send(client, weights, what == "buffer", device=device, **more)
        lent_on = "cpu:0" if what == "buffer" else device
        assert reader.syncs[-1] == {ipc_codec.gpu_uuid(lent_on): as_bytes(weights)}
        weights["a"].add_(1)
    ipc_codec.settle(*reader.lent)


def test_another_tensor_in_place_of_one_is_lent_itself(fake, reader, kept, exports):
    """Parameters are given other memory (`.data`), also what has the address of what was there before."""
    client, weight = HTTPWeightSyncClient(fake.url), torch.nn.Parameter(torch.rand(1 << 10))
    for at in range(4):
        send(client, {"a": weight}, packed=False, exports=kept)
        assert reader.last == as_bytes({"a": weight}) and len(exports) == at + 1
        weight.data = torch.rand(1 << 10)
        ipc_codec.ipc_collect()
        assert sum(path.exists() for path in map(file_of, exports)) == 1, "the last one is kept, no other"


def test_a_weight_that_was_freed_is_refused_with_kept_exports_too(fake, reader, kept, exports):
    weight, other, client = torch.rand(8), torch.rand(8), HTTPWeightSyncClient(fake.url)
    send(client, {"b": other, "a": weight}, packed=False, exports=kept)
    weight.untyped_storage().resize_(0)  # as a sharded trainer frees what it gathered
    said = len(fake.seen)
    with pytest.raises(HandleError, match=r"^a: .* was freed"):
        send(client, {"b": other, "a": weight}, packed=False, exports=kept)
    assert len(fake.seen) == said and counters(exports) == {0}
    send(client, {"b": other, "a": other}, packed=False, exports=kept)
    assert reader.last == as_bytes({"b": other, "a": other})


@both_modes
def test_a_sync_that_lends_nothing_settles_nothing_that_was_lent_before(fake, reader, kept, exports, packed):
    client, buffer = HTTPWeightSyncClient(fake.url), PackedBuffer(64, "cpu:0")
    more: dict[str, Any] = {"buffer": buffer} if packed else {"exports": kept}
    weight = torch.ones(3)
    reader.lets_go = False  # yet
    send(client, {"a": weight}, packed, **more)
    told: list[str] = []
    with pytest.raises(HandleError, match=r"^a: a meta"):
        send(client, {"a": torch.ones(3, device="meta")}, packed, progress=told.append, **more)
    assert counters(exports) == {1} and not told
    ipc_codec.settle(*exports)
    reader.lets_go = True
    for _ in range(2):
        send(client, {"a": weight}, packed, **more)
    assert len(exports) == 2, "a failure ends the right to renew"
    buffer.exports.forget()


UNANSWERED = {"never": NEVER, "dropped": DROPPED, "503": Answer(503, b"later"), "no JSON": Answer(200, b"ok")}
FAULTS = {  # of the second sync: where, and what comes back; and whether all that was lent is over then
    **{f"500 to {path[1:]}": (path, REFUSED, path != FINISH) for path in (START, UPDATE, FINISH)},
    **{f"{name} to update_weights": (UPDATE, answer, False) for name, answer in UNANSWERED.items()},
    "dropped to start_weight_update": (START, DROPPED, True),
}


@both_modes
@pytest.mark.parametrize("path, answer, over", FAULTS.values(), ids=FAULTS)
def test_after_a_failure_nothing_is_renewed(fake, reader, kept, exports, packed, path, answer, over):
    """Not even what is released later: the receiver may be at it still, or again."""
    client, weights = HTTPWeightSyncClient(fake.url, 20), small()
    buffer = PackedBuffer(64, "cpu:0")
    more: dict[str, Any] = {"buffer": buffer} if packed else {"exports": kept}
    send(client, weights, packed, **more)
    before = [*exports]
    good, fake.script[path] = fake.script[path], answer
    client.timeout = 0.3 if answer == NEVER else 20
    with pytest.raises(SyncError):
        send(client, weights, packed, **more)
    client.timeout = 20
    assert exports == before and counters(exports) == ({0} if over else {1})
    ipc_codec.ipc_collect()
    assert bool(ipc_codec._lent) is not over, "kept for the receiver, and for nobody else"
    ipc_codec.settle(*exports)
    fake.script[path] = good
    for weight in weights.values():
        weight.add_(1)
    for _ in range(2):
        send(client, weights, packed, **more)
        assert reader.last == as_bytes(weights)
        assert len(exports) == 2 * len(before), "lent anew, and then renewed"
        assert not {*reader.slots} & {IpcArgs(*args)[11:13] for args in before}
    buffer.exports.forget()


@both_modes
def test_an_interrupt_ends_the_right_to_renew(fake, reader, kept, exports, packed):
    client, weights, buffer = Hooked(fake.url), small(), PackedBuffer(64, "cpu:0")
    more: dict[str, Any] = {"buffer": buffer} if packed else {"exports": kept}
    send(client, weights, packed, **more)
    made = len(exports)
    client.hooks["update_weights"] = functools.partial(signal.raise_signal, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        send(client, weights, packed, **more)
    client.hooks.clear()
    assert counters(exports) == {1} and kept.handles == buffer.exports.handles == []
    ipc_codec.settle(*exports)
    send(client, weights, packed, **more)
    assert reader.last == as_bytes(weights) and len(exports) == 2 * made
    buffer.exports.forget()


@both_modes
def test_what_the_receiver_has_not_released_is_lent_anew(fake, reader, kept, exports, packed):
    client, weights, buffer = HTTPWeightSyncClient(fake.url), small(), PackedBuffer(64, "cpu:0")
    more: dict[str, Any] = {"buffer": buffer} if packed else {"exports": kept}
    reader.lets_go = False
    slots = []
    for _ in range(3):
        send(client, weights, packed, **more)
        assert reader.last == as_bytes(weights)
        slots += reader.slots
        weights["a"].add_(1)
    assert len(set(slots)) == len(slots) == len(exports) and counters(exports) == {1}
    ipc_codec.settle(*exports)
    reader.lets_go = True
    send(client, weights, packed, **more)
    assert reader.last == as_bytes(weights) and reader.slots == slots[-len(reader.slots) :]
    buffer.exports.forget()


def test_the_mode_may_change_between_syncs_and_both_are_kept(server, kept):
    client, weights, buffer = Recording(server.url), renamed(small()), PackedBuffer(64, "cpu:0")
    for packed in (False, True, True, False, False, True):
        client.init_weight_transfer_engine({"packed": packed})
        send(client, weights, packed, **({"buffer": buffer} if packed else {"exports": kept}))
        assert held(server.url, weights) == digests(weights)
        for weight in weights.values():
            weight.add_(1)
    assert len(set(client.bodies)) == 2 and [body == client.bodies[0] for body in client.bodies] == [
        True, False, False, True, True, False
    ]  # fmt: skip
    buffer.exports.forget()


def test_exports_that_are_kept_serve_another_server_and_other_weights_too(fake, kept):
    """Each in turn: what was kept for one is not told to the other."""
    with Fake() as second:
        readers = [Reader(fake), Reader(second)]
        models = [small(), {name: weight + 5 for name, weight in small().items()}]
        for model, at in itertools.product((0, 0, 1, 0), (0, 1)):
            client = HTTPWeightSyncClient([fake, second][at].url)
            send(client, models[model], packed=False, exports=kept)
            assert readers[at].last == as_bytes(models[model]), (model, at)
            for weight in models[model].values():
                weight.add_(1)
    assert readers[0].bodies == readers[1].bodies


@both_modes
def test_what_is_no_tensor_any_more_is_named_with_what_is_kept_too(fake, reader, kept, packed):
    client, buffer = HTTPWeightSyncClient(fake.url), PackedBuffer(32, "cpu:0")
    more: dict[str, Any] = {"buffer": buffer} if packed else {"exports": kept}
    for make in UNLENDABLE.values():
        send(client, {"a": torch.ones(2)}, packed, **more)
        said = len(fake.seen)
        with pytest.raises(HandleError, match=r"^a: "):
            send(client, {"a": make()}, packed, **more)
        assert len(fake.seen) == said


class Sharded(Tensor):
    """As a DTensor is one: what is here is not all of it."""

    def full_tensor(self) -> Tensor:
        return self.to_local().clone()

    def to_local(self) -> Tensor:
        return self.as_subclass(Tensor)


def test_a_weight_that_changes_places_with_a_sharded_one_arrives_under_its_new_name(fake, reader):
    client, buffer = HTTPWeightSyncClient(fake.url), PackedBuffer(32, "cpu:0")
    plain, sharded = torch.zeros(8), torch.ones(8).as_subclass(Sharded)
    for weights in ({"x": plain, "y": sharded}, {"x": sharded, "y": plain}, {"x": plain, "y": sharded}):
        send(client, weights, packed=True, buffer=buffer)
        assert reader.last == {name: bits(trainer._local(weight)) for name, weight in weights.items()}
    buffer.exports.forget()


@pytest.mark.parametrize("weight", [torch.ones(3, 4).t(), torch.ones(3).as_subclass(Sharded)])
def test_copies_that_were_lent_are_gone_after_the_sync(fake, reader, kept, exports, weight):
    """They are made anew each time; what is kept beside them would be the weights twice."""
    for _ in range(2):
        send(HTTPWeightSyncClient(fake.url), {"a": weight}, packed=False, exports=kept)
        assert not ipc_codec._lent and not file_of(exports[-1]).exists()


def test_where_nothing_could_be_lent_what_the_receiver_has_from_before_is_not_settled(
    fake, reader, kept, exports
):
    reader.lets_go, client = False, HTTPWeightSyncClient(fake.url)
    send(client, {"a": torch.ones(3)}, packed=False, exports=kept)
    with pytest.raises(HandleError, match=r"^a: .*(memory|allocate)"):
        send(client, {"a": torch.ones(1).expand(1 << 45)}, packed=False, exports=kept)
    assert counters(exports) == {1}


def test_two_mappings_with_one_exports_are_refused(fake, kept):
    with pytest.raises(ValueError, match="each has its own"):
        send(World(fake.url), [small()] * 2, packed=False, device=["cpu:0", "cpu:1"], exports=[kept] * 2)
    assert fake.seen == []


class World(HTTPWeightSyncClient):
    """Of a server with two workers."""

    def world_size(self) -> int:
        return 2


@both_modes
@pytest.mark.parametrize("rank_local", [False, True], ids=["one for all", "rank-local"])
def test_of_two_mappings_each_has_what_is_kept_of_its_own(fake, reader, packed, rank_local):
    client, devices = World(fake.url), ["cpu:0", "cpu:1"]
    weights = [small(), {name: weight + 9 for name, weight in small().items()}]
    if rank_local:
        weights[1] = {"d": torch.rand(7), **weights[1]}
    each = [PackedBuffer(1 << 10, device) for device in devices] if packed else [Exports(), Exports()]
    own = [one.exports if isinstance(one, PackedBuffer) else one for one in each]
    more: dict[str, Any] = {"buffer" if packed else "exports": each, "rank_local": rank_local}

    def sync() -> bytes:
        send(client, weights, packed, device=devices, **more)
        expected = dict(zip(map(ipc_codec.gpu_uuid, devices), map(as_bytes, weights), strict=True))
        assert reader.syncs[-1] == expected
        for of_one in weights:
            of_one["a"].add_(1)
        return reader.bodies[-1]

    first = sync()
    handles = [one.handles for one in own]
    assert sync() == first and all(one.handles is h for one, h in zip(own, handles, strict=True))
    weights[1]["a"] = weights[1]["a"].clone()
    other = sync()
    assert (own[0].handles is handles[0]) and (other == first) is packed
    assert sync() == other
    weights[0]["a"] = weights[0]["a"].clone()
    assert (sync() == other) is packed
    for one in own:
        one.forget()


def test_what_was_told_rank_local_is_told_again_where_it_is_not(fake, reader, kept, monkeypatch):
    client, weights = World(fake.url), small()
    monkeypatch.setattr(client, "world_size", lambda: 1)
    for rank_local in (True, False, False, True, True):
        send(client, weights, packed=False, exports=kept, rank_local=rank_local)
        assert type(fake.updates[-1].info) is (list if rank_local else dict)
        assert reader.last == as_bytes(weights)
        weights["a"].add_(1)


@pytest.mark.parametrize("count", [1, 3, None], ids=["one", "three", "no list"])
def test_of_a_list_of_weights_there_is_a_list_of_exports(fake, exports, count):
    given: Any = Exports() if count is None else [Exports() for _ in range(count)]
    client = HTTPWeightSyncClient(fake.url)
    with pytest.raises(ValueError, match=r"2 mappings .* exports"):
        send(client, [small(), small()], packed=False, device=["cpu:0", "cpu:1"], exports=given)
    assert fake.seen == [] and exports == []


# --- start --------------------------------------------------------------------------------------------


class Clock:
    """Stands for the time module: sleeping costs nothing."""

    def __init__(self, now: float = 1000.0):
        self.now = now
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_a_weight_that_was_freed_is_refused_with_a_kept_buffer_too(fake):
    weight, client = torch.rand(8), HTTPWeightSyncClient(fake.url)
    buffer = PackedBuffer(64, "cpu:0")
    send(client, {"a": weight}, packed=True, buffer=buffer)
    weight.untyped_storage().resize_(0)  # as a sharded trainer frees what it gathered
    with pytest.raises(HandleError, match=r"^a: .* was freed"):
        send(client, {"a": weight}, packed=True, buffer=buffer)


# What a weight may become between two syncs that share a buffer, each from `torch.arange(8.0)`.
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "the same": lambda w: w,
    "written in place": lambda w: w.add_(1),
    "elsewhere": lambda w: w.clone().mul_(2),
    "another view of the same": lambda w: w.detach().add_(3),
    "a part of the same": lambda w: w[:4],
    "strided": lambda w: w.view(2, 4).t(),
    "another shape": lambda w: w.view(2, 4),
    "another dtype": lambda w: w.view(torch.int32),
    "negated": lambda w: torch._neg_view(w),
    "half as large": lambda w: w.to(torch.bfloat16),
}


def test_a_buffer_takes_weights_that_change_in_any_way():
    """Each change twice, with other bytes, and the plain one around it: nothing worked out outlives it."""
    base, odd, even = torch.arange(8.0), torch.ones(3, dtype=torch.uint8), torch.ones(2)
    buffer = PackedBuffer(64, "cpu")
    for name, change in CHANGES.items():
        for at, change_now in enumerate((lambda w: w, change, change, lambda w: w[:4], lambda w: w[::2])):
            weights = {"a": change_now(base), "b": odd, "c": even}
            part, fresh = (trainer._part(weights, None, one) for one in (buffer, PackedBuffer(64, "cpu")))
            assert part.make_plan(64) == fresh.make_plan(64), (name, at)
            ipc_codec.settle(*part.export_buffer().values())
            part.fill(0)
            part.drain()
            sent = b"".join(map(bits, weights.values()))
            assert bits(buffer._bytes[: len(sent)]) == sent, (name, at)  # type: ignore[index]
            base.add_(1)


def test_memory_that_was_given_out_again_is_not_taken_for_what_lay_there(server):
    place = torch.device("cpu")
    buffer = ipc_codec.PackedBuffer(1 << 20, place)
    client = HTTPWeightSyncClient(server.url)
    client.init_weight_transfer_engine({"packed": True})
    weight = torch.nn.Parameter(torch.rand(1 << 12, device=place))
    for round in range(4):
        address = weight.data_ptr()
        weight.data.untyped_storage().resize_(0)  # as a sharded trainer frees what it gathered
        if round % 2:
            weight.data.untyped_storage().resize_(weight.numel() * 4)
            weight.data.fill_(round)
        else:
            weight.data = torch.full((1 << 12,), float(round), device=place)
        moved = weight.data_ptr() != address
        trainer.send_weights_packed(client, {"given out again": weight}, buffer=buffer)
        assert held(server.url, ["given out again"]) == digests({"given out again": weight}), (round, moved)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(trainer, "time", clock)
    return clock


@both_modes
def test_a_start_that_is_refused_for_a_while_is_waited_for(fake, clock, packed):
    fake.script[START] = [REFUSED] * 4
    told: list[str] = []
    send(HTTPWeightSyncClient(fake.url), small(), packed, start_wait=30, progress=told.append)
    assert fake.paths == [*[START] * 5, *[UPDATE] * (3 if packed else 1), FINISH]
    assert 0 < sum(clock.slept) <= 5
    assert "because of this" in told[0] and "another trainer may be at it" in told[0]


def test_an_update_that_stays_open_is_closed_once_without_a_version(fake, clock, exports):
    fake.script[START] = lambda seen: GOOD if FINISH in fake.paths else REFUSED
    told: list[str] = []
    client = HTTPWeightSyncClient(fake.url)
    send(client, small(), False, start_wait=30, weight_version="v1", progress=told.append)
    assert sum(clock.slept) == pytest.approx(30)
    after = fake.seen[fake.paths.index(FINISH) :]
    assert [(seen.path, seen.body) for seen in after[:2]] == [(FINISH, b""), (START, b"")]
    assert [seen.path for seen in after[2:]] == [UPDATE, FINISH]
    assert after[-1].json == {"weight_version": "v1"}
    assert set(fake.paths[: fake.paths.index(FINISH)]) == {START}
    assert "closing the update that was left open" in told[-1]


def test_where_finish_is_refused_too_the_reason_of_start_is_raised(fake, clock, exports):
    fake.script |= {START: REFUSED, FINISH: Answer(500, {"error": {"message": "nothing to finish"}})}
    with pytest.raises(SyncError, match=r"start_weight_update: .*because of this") as caught:
        send(HTTPWeightSyncClient(fake.url), small(), False, start_wait=3)
    assert caught.value.status == 500
    assert fake.paths[-2:] == [START, FINISH] and fake.paths.count(FINISH) == 1
    assert counters(exports) == {0} and not ipc_codec._lent


@pytest.mark.parametrize("bad", ["503", "404", "400", "dropped", "200 without JSON"])
def test_another_failure_of_start_is_not_retried_and_closes_nothing(fake, clock, bad):
    fake.script[START] = BAD[bad][0]
    with pytest.raises(SyncError):
        send(HTTPWeightSyncClient(fake.url), small(), False, start_wait=30)
    assert fake.paths == [START] and clock.slept == []


def test_of_two_trainers_at_once_the_later_waits(server, exports):
    """The first stays between two chunks until the second has been refused."""
    between_chunks, waiting = threading.Event(), threading.Event()
    weights = renamed(small())

    def hold(line: str) -> None:
        if line == "chunk 1/3":
            between_chunks.set()
            assert waiting.wait(20)

    def later(line: str) -> None:
        if "another trainer may be at it" in line:
            waiting.set()

    first = HTTPWeightSyncClient(server.url)
    first.init_weight_transfer_engine({"packed": True})
    with ThreadPoolExecutor(1) as pool:
        one = pool.submit(send, first, small(), True, progress=hold, weight_version="first")
        assert between_chunks.wait(20)
        second = Hooked(server.url)
        send(second, weights, True, start_wait=20, progress=later, weight_version="second")
        assert one.result(20).chunks == 3
    assert waiting.is_set() and second.called.count("finish_weight_update") == 1
    assert held(server.url, weights) == digests(weights)
    assert requests.get(server.url + "/weight_info", timeout=10).json() == {"weight_version": "second"}


# --- A server that hangs; test_kills.py has those that are killed --------------------------------------


def stop(process):
    process.send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{process.pid}/stat")
    assert until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")


def test_a_server_that_hangs_ends_the_sync_in_time_and_serves_the_next_one(doomed, exports):
    buffer = PackedBuffer(32, "cpu:0")
    for packed in (False, True):
        weights = renamed(small())
        client = Hooked(doomed.url, 1)
        client.init_weight_transfer_engine({"packed": packed})
        client.hooks["update_weights"] = functools.partial(stop, doomed.process)
        more = {"buffer": buffer} if packed else {}
        began = time.monotonic()
        with pytest.raises(SyncError, match=r"update_weights: no answer from .* within 1 s") as caught:
            send(client, weights, packed, **more)
        assert time.monotonic() - began < 3
        assert caught.value.status is None and counters(exports[-1:]) == {1}

        doomed.process.send_signal(signal.SIGCONT)  # it goes on, and reads what is still lent
        assert until(functools.partial(held, doomed.url, weights))
        client.hooks.clear()
        client.timeout = 20
        send(client, {name: weight + 1 for name, weight in weights.items()}, packed, **more)
        assert held(doomed.url, weights) == digests({name: weight + 1 for name, weight in weights.items()})
        buffer.exports.forget()
        ipc_codec.ipc_collect()
        assert counters(exports) == {0} and not ipc_codec._lent


# --- The policy ---------------------------------------------------------------------------------------


def test_reward_is_the_share_of_lower_case_letters():
    rows = [list(b"azmk"), list(b"`{AZ"), list(b"a b1"), [0, 255, 97, 122]]
    assert trainer.reward(torch.tensor(rows)).tolist() == [1.0, 0.0, 0.5, 0.5]


class NextByte(torch.nn.Module):
    """Gives the byte after the last one the logit 2, and all others 0."""

    def forward(self, ids: Tensor) -> Tensor:
        return 2.0 * torch.nn.functional.one_hot((ids + 1) % 256, 256).float()


def test_logprobs_are_those_of_the_sampled_tokens_after_prompts_of_any_length():
    follows = torch.arange(10, 10 + trainer.MAX_TOKENS)  # each token is its predecessor plus one
    stays = torch.full((trainer.MAX_TOKENS,), 7)
    rollouts = trainer.Rollouts(
        [[1, 9], [3, 4, 5, 6], [9]], torch.stack([follows, stays, follows]), follows, ""
    )
    hit, miss = 2 - math.log(255 + math.exp(2)), -math.log(255 + math.exp(2))
    expected = torch.tensor([[hit] * 16, [hit] + [miss] * 15, [hit] * 16])
    found = trainer.logprobs_of(NextByte(), rollouts, torch.device("cpu"))
    torch.testing.assert_close(found, expected)


def test_the_state_dict_of_the_example_has_tied_names_and_a_buffer():
    state = trainer.ByteLM().state_dict()
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    assert "position" in state and "position" not in dict(trainer.ByteLM().named_parameters())


# --- verify -------------------------------------------------------------------------------------------


def worker_table(weights: Mapping[str, str], *workers: int) -> dict[str, str]:
    return {f"dp0:pp0:pcp0:tp{rank}:{name}": value for rank in workers for name, value in weights.items()}


def checksums(*tables: dict[str, str]) -> list[Answer]:
    return [Answer(body={"checksums": table}) for table in tables]


def test_verify_compares_every_name_on_every_worker(fake):
    weights = small()
    good = worker_table(digests(weights), 0, 1)
    bad = good | {"dp0:pp0:pcp0:tp1:b": "00"}
    fake.script[CHECK] = checksums(good, bad)
    client = HTTPWeightSyncClient(fake.url)
    assert verify(client, weights, pytest.fail) == "identical: sha256 of 3 tensors, on every worker"
    with pytest.raises(SyncError, match="1 of 3 tensors differ on the server, b first"):
        verify(client, weights, pytest.fail)


def test_verify_sends_again_to_a_server_with_other_names(fake):
    table, again = {"dp0:pp0:pcp0:tp0:fused": "aa", "dp0:pp0:pcp0:tp0:z": "bb"}, []
    fake.script[CHECK] = checksums(table, table, table, table | {"dp0:pp0:pcp0:tp0:z": "cc"})
    client = HTTPWeightSyncClient(fake.url)
    said = verify(client, small(), lambda: again.append(len(fake.seen)))
    assert "its 2 checksums are the same" in said and again == [1]
    with pytest.raises(SyncError, match="other checksums the second time: dp0:pp0:pcp0:tp0:z"):
        verify(client, small(), lambda: None)


def test_verify_does_not_pass_a_server_that_holds_nothing(fake):
    fake.script[CHECK] = checksums({}, {})
    with pytest.raises(SyncError):
        verify(HTTPWeightSyncClient(fake.url), small(), lambda: None)


# --- Checkpoints --------------------------------------------------------------------------------------


def write_checkpoints(folder: Path) -> None:
    """`small` in every form that is read, and what is none."""
    weights = small()
    torch.save(weights, folder / "small.pt")
    torch.save(weights, folder / "small.bin")
    save_file(weights, folder / "small.safetensors")
    for name, forms in {"parts": "safetensors", "bins": "bin"}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text("{}")
        for at, (key, weight) in enumerate(weights.items()):
            path = folder / name / f"model-{at}.{forms}"
            save_file({key: weight}, path) if forms == "safetensors" else torch.save({key: weight}, path)
    torch.save(weights, folder / "parts" / "old.pt")
    for name in ("hollow", "pths"):
        (folder / name).mkdir()
    torch.save(weights, folder / "pths" / "small.pth")
    torch.save([weights["a"]], folder / "list.pt")
    torch.save({"model": weights}, folder / "nested.pt")
    torch.save({"a": torch.zeros(1).expand(1 << 45)}, folder / "expanded.pt")
    torch.save({"a": torch.eye(2).to_sparse()}, folder / "sparse.pt")
    (folder / "hostile.pt").write_bytes(pickle.dumps({"a": Hostile(str(folder / "canary"))}, protocol=2))
    for suffix in ("pt", "safetensors"):
        (folder / f"text.{suffix}").write_text("hello\nworld\n")


class Hostile:
    def __init__(self, canary: str):
        self.canary = canary

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.canary,)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    write_checkpoints(folder)
    return folder


@each_device
@pytest.mark.parametrize("name", ["small.pt", "small.bin", "small.safetensors", "parts", "bins"])
def test_a_checkpoint_is_read_as_it_was_written(checkpoints, name, device):
    weights = trainer.load_checkpoint(checkpoints / name, torch.device(device))
    assert sorted(weights) == ["a", "b", "c"] and digests(weights) == digests(small())
    assert {weight.device for weight in weights.values()} == {place(device)}
    assert weights["b"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["missing.pt", "hollow", "list.pt", "nested.pt", "hostile.pt"])
def test_what_is_no_checkpoint_is_refused_by_its_path(checkpoints, name):
    with pytest.raises(ValueError, match=re.escape(str(checkpoints / name))):
        trainer.load_checkpoint(checkpoints / name, torch.device("cpu"))
    assert not (checkpoints / "canary").exists()


# --- The command line, in this process ----------------------------------------------------------------


class Said(NamedTuple):
    code: int
    out: str
    err: list[str]  # lines


@pytest.fixture
def main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Said]]:
    """`trainer.main` with these words: what it returned and printed."""
    before = signal.getsignal(signal.SIGTERM)

    def call(*words: Any) -> Said:
        monkeypatch.setattr(sys, "argv", ["trainer.py", *map(str, words)])
        code = trainer.main()
        out, err = capsys.readouterr()
        return Said(code, out, err.splitlines())

    yield call
    signal.signal(signal.SIGTERM, before)


@each_device
@both_modes
@pytest.mark.parametrize("name", ["small.pt", "small.bin", "small.safetensors", "parts"])
def test_a_checkpoint_is_sent_in_each_form_and_mode(main, server, checkpoints, name, packed, device):
    with contextlib.ExitStack() as stack:
        url = server.url if device == "cpu:0" else stack.enter_context(Server(device)).url
        modes = ["--packed", "--packed-buffer-size-bytes", 32] if packed else []
        said = main(url, "--checkpoint", checkpoints / name, "--device", device, *modes)
        assert held(url, small()) == digests(small())
    first, second = said.out.splitlines()
    sent = f"{'packed' if packed else 'unpacked'}: 3 tensors, 0.0 MB, {'3 chunks' if packed else '1 chunk'}, "
    assert said.code == 0 and first.startswith(f"{checkpoints / name} -> {url}, {sent}")
    assert second == "identical: sha256 of 3 tensors, on every worker"


REFUSALS = {
    "missing.pt": "does not exist",
    "hollow": "has no .safetensors, .bin or .pt file",
    "pths": "has no .safetensors, .bin or .pt file",
    "list.pt": "is no plain state dict: a dict of names and tensors",
    "nested.pt": "is no plain state dict: a dict of names and tensors",
}


@pytest.mark.parametrize("name, reason", REFUSALS.items())
def test_what_is_no_checkpoint_is_one_line(main, fake, checkpoints, name, reason):
    said = main(fake.url, "--checkpoint", checkpoints / name)
    assert said == (1, "", [f"trainer.py: {checkpoints / name} {reason}"])
    assert START not in fake.paths


@pytest.mark.parametrize("name", ["hostile.pt", "text.pt", "text.safetensors"])
def test_a_file_that_cannot_be_read_is_one_line(main, fake, checkpoints, name):
    code, out, (line,) = main(fake.url, "--checkpoint", checkpoints / name)
    assert (code, out) == (1, "") and line.startswith(f"trainer.py: {checkpoints / name} ")


@both_modes
@pytest.mark.parametrize("name", ["expanded.pt", "sparse.pt"])
def test_a_tensor_that_cannot_be_lent_is_one_line_that_names_it(main, fake, checkpoints, name, packed):
    words = ["--device", "cpu", *(["--packed"] if packed else [])]
    code, out, (line,) = main(fake.url, "--checkpoint", checkpoints / name, *words)
    assert (code, out) == (1, "") and re.match(r"trainer\.py: a(:| has) .*(bytes|sparse)", line)
    assert fake.paths == [INIT, IS_PAUSED, PAUSE, RESUME]


def test_too_small_a_buffer_is_one_line_that_names_the_tensor(main, fake, checkpoints):
    words = ["--packed", "--packed-buffer-size-bytes", "20"]
    code, out, (line,) = main(fake.url, "--checkpoint", checkpoints / "small.pt", "--device", "cpu", *words)
    assert (code, out) == (1, "") and line.startswith("trainer.py: a has 24 bytes, the packed buffer 20")
    assert fake.paths == [INIT, IS_PAUSED, PAUSE, RESUME]


@both_modes
def test_what_is_in_another_sync_is_not_taken(fake, reader, kept, packed):
    """Of two threads the second would be told the handles of the first."""
    buffer = PackedBuffer(64, "cpu:0")
    more = {"buffer": buffer} if packed else {"exports": kept}
    exports = buffer.exports if packed else kept
    client = HTTPWeightSyncClient(fake.url)
    send(client, small(), packed, **more)
    handles, said = exports.handles, len(fake.seen)
    with exports.in_use, pytest.raises(HandleError, match="in another sync now"):
        send(client, small(), packed, **more)
    assert len(fake.seen) == said and exports.handles is handles
    send(client, small(), packed, **more)
    buffer.exports.forget()


def test_a_sync_of_nothing_leaves_nothing_lent(fake, exports):
    buffer = PackedBuffer(64, "cpu:0")
    for _ in range(2):
        send(HTTPWeightSyncClient(fake.url), {}, packed=True, buffer=buffer)
        assert counters(exports) == {0}
    buffer.exports.forget()


WRONG = {
    "--device bogus": "'bogus' is none of auto, cpu, cuda, cuda:1",
    "--device mps": "'mps' is none of auto, cpu, cuda, cuda:1",
    "--device cpu:128": "'cpu:128' is none of auto",  # torch lets it wrap around
    "--device cuda:99": "torch sees",
    "--timeout 0": "--timeout",
    "--timeout nan": "--timeout",
    "--timeout 1e300": "--timeout: 1e300 is more than 1,000,000",  # which no clock has
    "--start-wait inf": "--start-wait: inf is more than 1,000,000",
    "--start-wait -1": "--start-wait",
    "--steps -3": "--steps",
    "--packed-buffer-size-bytes 0": "--packed-buffer-size-bytes",
    "127.0.0.1:8000": "'127.0.0.1:8000' is no URL such as http://127.0.0.1:8000",
    "nonsense": "'nonsense' is no URL",
    "http://127.0.0.1:8000 --spawn-server": "which server is meant?",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_usage_is_one_sentence_and_2(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["trainer.py", *words.split()])
    with pytest.raises(SystemExit) as ended:
        trainer.main()
    *_, last = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and last.startswith("trainer.py: error: ") and WRONG[words] in last


@pytest.mark.parametrize("weights", [torch.nn.Linear(2, 2), [("a", torch.ones(2))], None])
def test_what_is_no_mapping_of_weights_is_said(fake, weights):
    with pytest.raises(ValueError, match="a mapping of names to tensors"):
        trainer.send_weights(HTTPWeightSyncClient(fake.url), weights)
    assert fake.seen == []


def test_what_a_trainer_before_left_paused_is_resumed(main, server, checkpoints):
    HTTPWeightSyncClient(server.url).pause()
    assert main(server.url, "--checkpoint", checkpoints / "small.pt", "--device", "cpu").code == 0
    assert requests.get(server.url + "/is_paused", timeout=10).json() == {"is_paused": False}


def test_what_was_paused_before_a_failure_stays_so(main, fake, checkpoints):
    """A sync before may have left a mix."""
    fake.script[IS_PAUSED] = Answer(200, {"is_paused": True})
    words = ["--checkpoint", checkpoints / "small.pt", "--device", "cpu", "--packed"]
    assert main(fake.url, *words, "--packed-buffer-size-bytes", "20").code == 1
    assert fake.paths == [INIT, IS_PAUSED, PAUSE]


@both_modes
def test_after_a_refused_update_it_stays_paused(main, fake, checkpoints, packed):
    fake.script[UPDATE] = [REFUSED]
    words = ["--checkpoint", checkpoints / "small.pt", "--device", "cpu", *["--packed"] * packed]
    assert main(fake.url, *words).code == 1
    assert fake.paths == [INIT, IS_PAUSED, PAUSE, START, UPDATE]


def test_a_server_that_has_nothing_to_pause_is_sent_to(main, fake, checkpoints):
    fake.script |= {PAUSE: Answer(404, b"{}"), RESUME: Answer(404, b"{}"), CHECK: checksums({}, {})}
    words = ["--checkpoint", checkpoints / "small.pt", "--device", "cpu"]
    main(fake.url, *words)
    assert fake.paths[:7] == [INIT, IS_PAUSED, PAUSE, START, UPDATE, FINISH, RESUME]


def test_a_server_with_other_names_is_sent_to_twice(main, fake, checkpoints):
    other = {"dp0:pp0:pcp0:tp0:fused": "aa"}
    fake.script[CHECK] = checksums(other, other, other, {"dp0:pp0:pcp0:tp0:fused": "bb"})
    words = fake.url, "--checkpoint", checkpoints / "small.pt", "--weight-version", "v1"
    said = main(*words)
    assert (said.code, said.err) == (0, [])
    assert said.out.endswith("\nthe server holds other names; sent twice, its 1 checksums are the same\n")
    sync = [IS_PAUSED, PAUSE, START, UPDATE, FINISH, RESUME, CHECK]
    assert fake.paths == [INIT, *sync, *sync]
    assert [seen.json for seen in fake.seen if seen.path == FINISH] == [{"weight_version": "v1"}] * 2
    said = main(*words)
    reason = "the same weights gave other checksums the second time: dp0:pp0:pcp0:tp0:fused"
    assert (said.code, said.err) == (1, [f"trainer.py: {reason}"])


# --- The command line: its runs -----------------------------------------------------------------------


class Run(NamedTuple):
    code: int
    out: str
    err: str
    seconds: float
    token: str
    pids: set[int]  # its own, and those it had started when it was signalled


def processes(token: str) -> set[int]:
    """All processes that have this token in their environment."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={token}".encode() in (entry / "environ").read_bytes():
                found.add(int(entry.name))
    return found


def command(*words: Any, by: signal.Signals | None = None, group: bool = False) -> Run:
    """`python WORDS` in a session of its own; a signal is sent after its first line of output.

    It writes to files: torch's shared-memory manager would hold a pipe for two seconds more.
    """
    token, began = uuid.uuid4().hex, time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(
            [sys.executable, *map(str, words)],
            cwd=ROOT,
            env=ENVIRONMENT | {MARK: token, "OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        pids = {child.pid}
        if by is not None:
            assert until(lambda: os.fstat(out.fileno()).st_size or child.poll() is not None, 60)
            pids |= processes(token)
            os.killpg(child.pid, by) if group else child.send_signal(by)
        code = child.wait(100)
        seconds = time.monotonic() - began
        out.seek(0)
        err.seek(0)
        return Run(code, out.read(), err.read(), seconds, token, pids)


class Place:
    """Where runs run: the folder with checkpoints, and for each thread a server."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.servers: list[Server] = []
        self.mine = threading.local()

    @property
    def url(self) -> str:
        if not hasattr(self.mine, "server"):
            self.mine.server = Server().__enter__()
            self.servers.append(self.mine.server)
        return self.mine.server.url

    def send(self, name: str, *options: str, url: str = "", spawn: bool = False) -> Run:
        where = "--spawn-server" if spawn else url or self.url
        return command("trainer.py", where, "--checkpoint", self.folder / name, "--device", "cpu", *options)


def trained(*options: str, **more: Any) -> Callable[[Place], Run]:
    return lambda place: command("trainer.py", "--spawn-server", "--device", "cpu", *options, **more)


def sent(name: str, *options: str, **more: Any) -> Callable[[Place], Run]:
    return lambda place: place.send(name, *options, **more)


def to_a_server_that_holds_a_wrong_byte(place: Place) -> Run:
    with Fake({CHECK: checksums(WRONG_BYTE)}) as fake:
        return place.send("small.pt", url=fake.url)


def to_a_server_without_gate(place: Place) -> Run:
    with Server(gate=False) as closed:
        return place.send("small.pt", url=closed.url)


DIES_AFTER_A_CHUNK = """
import os, signal, sys, torch, trainer
client = trainer.HTTPWeightSyncClient(sys.argv[1])
client.init_weight_transfer_engine({"packed": True})
other = {name: torch.zeros_like(weight) for name, weight in torch.load(sys.argv[2]).items()}
trainer.send_weights_packed(
    client, other, 32, device="cpu:0", progress=lambda line: os.kill(os.getpid(), signal.SIGKILL)
)
"""
LEARNS_NOTHING = """
import sys, trainer
trainer.STEPS, trainer.LEARNING_RATE = 2, 0.0
sys.argv = ["trainer.py", "--spawn-server", "--device", "cpu", "--steps", "2"]
sys.exit(trainer.main())
"""
STAYS_FLAT = """
import json, os, sys, torch, trainer, ipc_codec
def footprint():
    files = [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")]
    return len(ipc_codec._lent), len(os.listdir("/proc/self/fd")), len(files)
client = trainer.HTTPWeightSyncClient(sys.argv[1])
weights = {f"flat.{at}": torch.arange(256.0 * at).reshape(-1, 256).t() for at in range(9)}
for packed in (False, True):
    client.init_weight_transfer_engine({"packed": packed})
    for sync in range(12):
        if packed:
            trainer.send_weights_packed(client, weights, 10_000, device="cpu:0")
        else:
            trainer.send_weights(client, weights, device="cpu:0")
        if sync == 1:
            before = footprint()
    print(json.dumps([before, footprint()]))
"""


def next_after_a_kill(place: Place) -> tuple[Run, Run]:
    dead = command("-c", DIES_AFTER_A_CHUNK, place.url, place.folder / "small.pt")
    return dead, place.send("small.pt", "--start-wait", "1")


WITHIN_150_KB = ("--packed", "--packed-buffer-size-bytes", "150000")
FOREVER = ("--steps", "1000000")
WRONG_BYTE = worker_table(digests(small()) | {"b": digests({"b": torch.ones(1)})["b"]}, 0)

RUNS: dict[str, Callable[[Place], Any]] = {
    "grpo": trained(*WITHIN_150_KB),
    "grpo that cannot learn": lambda place: command("-c", LEARNS_NOTHING),
    "SIGTERM": trained(*FOREVER, *WITHIN_150_KB, by=signal.SIGTERM),
    "Ctrl-C": trained(*FOREVER, by=signal.SIGINT, group=True),
    "SIGKILL": trained(*FOREVER, by=signal.SIGKILL),
    "spawned, .pt": sent("small.pt", "--weight-version", "v1", spawn=True),
    "spawned, .bin, packed": sent("small.bin", "--packed", spawn=True),
    "spawned, .safetensors": sent("small.safetensors", spawn=True),
    "spawned, folder, packed": sent("parts", "--packed", "--packed-buffer-size-bytes", "32", spawn=True),
    "spawned, missing": sent("missing.pt", spawn=True),
    "hostile": sent("hostile.pt"),
    "no server": sent("small.pt", url=closed_url()),
    "no gate": to_a_server_without_gate,
    "wrong byte": to_a_server_that_holds_a_wrong_byte,
    "next after a kill": next_after_a_kill,
    "flat": lambda place: command("-c", STAYS_FLAT, place.url),
    "help": lambda place: command("trainer.py", "--help"),
}


# What is told by another run as well, or by test_kills.py, waits for a long one.
SLOW = (
    *("grpo that cannot learn", "SIGTERM", "Ctrl-C", "SIGKILL", "next after a kill", "flat", "no gate"),
    *("spawned, .bin, packed", "spawned, .safetensors"),
)


def the_run(*names: Any) -> pytest.MarkDecorator:
    runs = [pytest.param(name, marks=[pytest.mark.long] * (name in SLOW)) for name in names]
    return pytest.mark.parametrize("run", runs, indirect=True)


@pytest.fixture(scope="module", autouse=True)
def runs(request: pytest.FixtureRequest, checkpoints: Path) -> Iterator[dict[str, Future]]:
    """Those that a selected test wants, begun; two at a time."""
    specs = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = {spec.params["run"] for spec in specs if spec and spec.params.get("run") in RUNS}
    where, pool = Place(checkpoints), ThreadPoolExecutor(2)
    yield {name: pool.submit(run, where) for name, run in RUNS.items() if name in wanted}
    pool.shutdown(cancel_futures=True)
    for one in where.servers:
        one.__exit__()


@pytest.fixture
def run(request: pytest.FixtureRequest, runs: dict[str, Future]) -> Any:
    return runs[request.param].result(100)


def leaves_nothing(run: Run) -> None:
    """No process and no shared-memory file is left of a run, a few seconds after it."""
    assert until(lambda: not processes(run.token)), processes(run.token)
    files = [f"torch_{pid}_*" for pid in run.pids]
    assert until(lambda: not [file for name in files for file in Path(ipc_codec.SHM).glob(name)])


def one_line(run: Run, code: int) -> str:
    """The single line on stderr of a run that ended with that code."""
    assert run.code == code, (run.out, run.err)
    (line,) = run.err.splitlines()
    assert line.startswith("trainer.py: ")
    return line.removeprefix("trainer.py: ")


# --- The command line: what it promises ---------------------------------------------------------------


@the_run("help")
def test_help_teaches(run):
    assert (run.code, run.err) == (0, "")
    assert "python trainer.py --spawn-server" in run.out and "stations 1 to 6" in run.out
    for option in ("--packed", "--checkpoint", "--start-wait", "--timeout", "--weight-version", "--device"):
        assert option in run.out


@the_run("spawned, .pt", "spawned, .bin, packed", "spawned, .safetensors", "spawned, folder, packed")
def test_a_checkpoint_arrives_identically(run):
    assert run.code == 0, run.err
    assert "\nidentical: sha256 of 3 tensors, on every worker\n" in run.out
    assert "Traceback" not in run.err
    leaves_nothing(run)


@the_run("spawned, folder, packed")
def test_the_buffer_size_of_the_command_line_makes_the_chunks(run):
    assert "packed: 3 tensors" in run.out and ", 3 chunks, " in run.out
    assert run.err.splitlines() == ["chunk 1/3", "chunk 2/3", "chunk 3/3"]


@the_run("hostile")
def test_a_hostile_pickle_is_refused_and_not_run(run, checkpoints):
    assert run.code == 1 and "Traceback" not in run.err
    assert "hostile.pt is no checkpoint that can be read (UnpicklingError: " in run.err
    assert not (checkpoints / "canary").exists()


@the_run("no server")
def test_no_server_is_one_line_with_the_url(run):
    assert closed_url() in (line := one_line(run, 1)) and "Connection refused" in line


@the_run("no gate")
def test_a_server_without_the_gate_is_named_with_the_variable(run):
    assert f"start the server with {GATE}=1" in one_line(run, 1)


@the_run("wrong byte")
def test_a_wrong_byte_is_a_failure(run):
    assert one_line(run, 1) == "1 of 3 tensors differ on the server, b first"


@the_run("spawned, missing")
def test_a_failure_leaves_no_server_and_shows_its_log(run):
    assert run.code == 1 and "Traceback" not in run.err
    assert run.err.startswith("the end of the server's log:\n") and "init_weight_transfer_engine" in run.err
    assert run.err.splitlines()[-1].endswith("missing.pt does not exist")
    leaves_nothing(run)


@the_run("SIGTERM", "Ctrl-C")
def test_an_interrupt_is_one_line_and_leaves_nothing(run):
    lines = [line for line in run.err.splitlines() if not line.startswith(("chunk ", "a buffer of "))]
    assert (run.code, lines) == (130, ["trainer.py: interrupted"])
    assert run.out.startswith("step   1 ")
    assert len(run.pids) > 1  # its server was among them
    leaves_nothing(run)


@the_run("SIGKILL")
def test_a_killed_trainer_takes_its_server_along_and_leaves_no_file(run):
    assert run.code == -signal.SIGKILL and len(run.pids) > 1
    leaves_nothing(run)


@the_run("next after a kill")
def test_after_a_trainer_was_killed_between_chunks_the_next_run_works_without_help(run):
    dead, following = run
    assert dead.code == -signal.SIGKILL
    assert following.code == 0, following.err
    assert "identical: sha256 of 3 tensors" in following.out
    assert "another trainer may be at it" in following.err
    assert following.err.splitlines()[-1] == "start is still refused: closing the update that was left open"
    leaves_nothing(dead)


@the_run("flat")
def test_ten_syncs_leave_loans_descriptors_and_files_as_they_were(run):
    assert run.code == 0, run.err
    for line in run.out.splitlines():
        before, after = json.loads(line)
        assert before == after and before[0] == 0
    assert len(run.out.splitlines()) == 2


STEP = re.compile(r"step +(\d+)  reward (\d\.\d+)  logprob difference (\d\.\de[+-]\d+)  (.*)")


def steps_of(run: Run) -> list[tuple[float, float]]:
    """(reward, logprob difference) of each step, in order."""
    found = [match.groups() for match in map(STEP.fullmatch, run.out.splitlines()) if match]
    assert [int(step) for step, *_ in found] == list(range(1, len(found) + 1))
    return [(float(reward), float(difference)) for _, reward, difference, _ in found]


@the_run("grpo")
def test_the_main_job_learns_through_its_syncs(run):
    assert run.code == 0, run.err
    rewards, differences = zip(*steps_of(run), strict=True)
    assert len(rewards) == 24 and run.seconds < 60
    assert rewards[-1] > 3 * rewards[0] and sum(rewards[12:]) > sum(rewards[:12])
    assert max(differences) < 1e-4
    assert run.out.endswith("identical: sha256 of 29 tensors, on every worker\n")
    assert " 4 chunks, " in run.out
    leaves_nothing(run)


@the_run("grpo that cannot learn")
def test_a_policy_that_did_not_learn_is_a_failure(run):
    assert run.code == 1 and len(steps_of(run)) == 2
    assert "identical: sha256 of 29 tensors" in run.out
    assert "not tripled, the policy did not learn" in run.err.splitlines()[-1]
    leaves_nothing(run)
