"""Hostile input: whatever comes in, the server answers as it is documented, changes nothing and serves on.

First what fuzzing and reading have found, a test each; then the fuzzers, in this process against `App.answer`
(thousands of inputs a second, with real handles); then clients of a server process that are slow, many or
talk nonsense. The fuzzers are seeded and brief; `pytest -m long -n 0 -s tests/test_fuzz.py` runs them for
long, and prints what was tried.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import re
import select
import socket
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import ipc_codec
import server
from protocol import GATE
from server import App, Reply
from test_roundtrip import Client, Server, digests, needs_cuda, refused, with_args

JSON = {"content-type": "application/json"}
INIT, START, UPDATE = "/init_weight_transfer_engine", "/start_weight_update", "/update_weights"
FINISH, SHUTDOWN = "/finish_weight_update", "/shutdown_weight_transfer_engine"


@pytest.fixture(autouse=True)
def _gate(monkeypatch):
    monkeypatch.setenv(GATE, "1")


def app_on(devices: str = "cpu", *, transcript: Any = None, strict: bool = False, model: Any = None) -> App:
    """What a server process would answer with."""
    engine = server.WeightTransferEngine(server.parse_devices(devices), model, strict)
    if transcript:
        engine.witness = server.Witness(str(transcript), engine.workers)
    return App(engine)


def post(app: App, target: str, body: Any = None, headers: Mapping[str, str] = JSON) -> Reply:
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    return app.answer("POST", target, headers, data)


# ---- what was found --------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["http://[/health", "//[", "http://[::1/health", "/health\x00", "", "*"])
def test_a_target_that_is_no_url_is_404(target):
    assert app_on().answer("GET", target, {}, b"").status == 404


FOREIGN = ["http://[", "null", "", "http://a.example", "http://a.example:8000", "http://127.0.0.1:8001"]


@pytest.mark.parametrize("origin", FOREIGN)
@pytest.mark.parametrize("host", ["127.0.0.1:8000", "a.example:8000"])
def test_a_web_page_is_refused_even_where_its_name_was_made_to_point_here(origin, host):
    """A page of a.example whose name now gives 127.0.0.1 sends its own name as Host, too."""
    reply = post(app_on(), "/pause", headers={"origin": origin, "host": host})
    assert reply.status == 403 and set(reply.body) == {"detail"}


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:8000", "[::1]:8000", "10.0.0.7"])
def test_a_page_of_the_servers_own_address_is_answered(host):
    assert post(app_on(), "/pause", headers={"origin": f"http://{host}", "host": host}).status == 200


@pytest.mark.parametrize("depth", [100, 600, 900, 5000, 100_000])
def test_a_witness_outlives_what_is_nested_deeply(tmp_path, depth):
    app = app_on(transcript=tmp_path / "transcript.jsonl")
    nested = b"[" * depth + b"]" * depth
    assert post(app, START).status == 200
    for target, field in [(INIT, b"init_info"), (UPDATE, b"update_info"), (FINISH, b"weight_version")]:
        reply = post(app, target, b'{"%s": {"packed": %s, "names": %s}}' % (field, nested, nested))
        assert reply.status in (200, 400, 500)
    lines = (tmp_path / "transcript.jsonl").read_text().splitlines()
    assert len(lines) == 5 and all(map(json.loads, lines))


LONG = "x" * 1_000_000
ECHOES = [
    ("/v1/completions", {"prompt": "a", "stop": LONG}),
    ("/v1/completions", {"prompt": "a", "stop": [[[[[LONG]]]]]}),
    ("/v1/completions", {"prompt": "a", "model": LONG}),
    ("/v1/completions", {"prompt": "a", "seed": LONG}),
    ("/weight_checker", {"action": LONG}),
    ("/update_weight_version", {"new_version": [LONG]}),
    ("/pause?mode=" + LONG, None),
    (INIT, {"init_info": {LONG: 1}}),
    (UPDATE, {"update_info": {"names": [LONG], "dtype_names": [LONG], "shapes": [LONG]}}),
]


@pytest.mark.parametrize("target,body", ECHOES, ids=[str(at) for at in range(len(ECHOES))])
def test_a_refusal_is_short_however_long_what_was_refused(target, body):
    app = app_on()
    post(app, START)
    reply = post(app, target, body)
    assert reply.status in (400, 500) and len(json.dumps(reply.body)) < 1000


@pytest.mark.parametrize("prompts,n", [(1, 1025), (1025, None), (1025, 1), (1024, 2), (3, 342)])
def test_a_completion_has_so_many_rows_and_no_more(prompts, n):
    reply = post(app_on(), "/v1/completions", {"prompt": [[97]] * prompts, "n": n})
    assert reply.status == 400 and reply.body["error"]["param"] in ("body.n", "body.prompt")
    if prompts <= 1024:
        body = {"prompt": [[97]] * prompts, "n": 1024 // prompts}
        assert post(app_on(), "/v1/completions", body).status == 503  # there are no weights yet


def test_json_of_many_values_is_refused_before_it_is_read():
    """15 MB of empty lists would be 350 MB of Python's, made in one go, while nobody else is answered."""
    app = app_on()
    bomb = b'{"update_info": {"names": [' + b"[]," * 5_000_000 + b"[]]}}"
    began = time.process_time()
    reply = post(app, UPDATE, bomb)
    assert time.process_time() - began < 1
    assert reply.status == 400 and "values" in reply.body["error"]["message"]


@pytest.mark.parametrize("number", [2**64, -(2**64), 10**5000, -(10**5000)], ids=["", "-", "5000", "-5000"])
@pytest.mark.parametrize(
    "form", ["%s", "\ufeff%s", '{"init_info":{"packed":%s}}', '{"x": [1,%s]}', '{"x":\t\r\n%s}']
)
def test_an_integer_beyond_64_bits_is_found_wherever_it_stands(number, form):
    with all_digits():
        body = (form % number).encode()
    assert post(app_on(), INIT, body).body["error"]["type"] == "BadRequestError"


@contextlib.contextmanager
def all_digits():
    """Python prints integers of any length."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    yield
    sys.set_int_max_str_digits(limit)


def test_a_text_too_long_for_handles_is_refused_before_it_is_decoded():
    text = base64.b64encode(b"\x80\x04](" + b"N" * (3 << 24) + b"e.").decode()
    began = time.process_time()
    with pytest.raises(ipc_codec.HandleError, match="characters"):
        ipc_codec.decode_handles(text)
    assert time.process_time() - began < 0.1


class LostDevice(server.Worker):
    """A device that fails in mid-copy, and repeats its error ever after, as CUDA does after a bad read."""

    works = True

    def copy(self, names: Any, weights: Any) -> None:
        self.works = False

    def synchronize(self) -> None:
        if not self.works:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_after_the_error_of_a_lost_device_health_is_503_and_every_call_says_so():
    app = app_on()
    app.engine.workers = [LostDevice(torch.device("cpu", 0))]
    assert app.answer("GET", "/health", {}, b"") == Reply(200)
    assert post(app, START).status == 200
    assert post(app, UPDATE, {"update_info": update_of({"w": torch.ones(3)})}).status == 500
    assert app.answer("GET", "/health", {}, b"") == Reply(503)
    for target, body in [(INIT, {"init_info": {}}), (START, None), (FINISH, None), (SHUTDOWN, None)]:
        reply = post(app, target, body)
        assert reply.status == 500 and "lost" in reply.body["error"]["message"]
    reply = post(app, "/v1/completions", {"prompt": "a"})
    assert reply.status == 503 and "illegal memory access" in reply.body["error"]["message"]
    assert app.answer("GET", "/version", {}, b"").status == 200


def test_an_error_that_the_device_does_not_repeat_is_no_loss():
    app = app_on()
    assert post(app, START).status == 200
    assert post(app, UPDATE, {"update_info": {}}).status == 500
    assert app.answer("GET", "/health", {}, b"") == Reply(200)
    assert post(app, START).status == 200


def update_of(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    handles = ipc_codec.export_handles(weights, "cpu:0")
    return {
        "names": list(weights),
        "dtype_names": [ipc_codec.dtype_name(weight.dtype) for weight in weights.values()],
        "shapes": [list(weight.shape) for weight in weights.values()],
        "ipc_handles_pickled": ipc_codec.encode_handles(handles),
    }


@needs_cuda
def test_memory_that_lies_about_its_size_costs_the_device_and_the_server_says_so():
    """A size beyond the mapped block cannot be seen from Python: the read fails on the device."""
    with Server("cuda:0") as running:
        client = Client(running)
        client.begin()
        info = client.unpacked({"w": torch.ones(4)})
        elements = 1 << 30
        lie = with_args(info, {1: (elements,), 2: (1,), 8: 4 * elements})
        assert client.update(lie | {"shapes": [[elements]]}).status_code == 500
        health = client.get("/health")
        assert (health.status_code, health.content) == (503, b"")
        assert "lost" in refused(client.post(START))


@pytest.mark.parametrize("gigabytes", [1 << 8, 1 << 20])
def test_four_bytes_that_are_expanded_to_more_than_there_is_are_refused(gigabytes):
    """Without a GPU: the kernel would give out the memory, and end the process when it is written."""
    app = app_on()
    weight = torch.ones(1)
    info = update_of({"w": weight.expand(gigabytes << 28)})
    assert post(app, START).status == 200
    reply = post(app, UPDATE, {"update_info": info})
    assert reply.status == 500 and "bytes are needed" in reply.body["error"]["message"]
    assert app.engine.workers[0].weights == {}


# ---- clients that are slow, many, or talk nonsense -------------------------------------------------------

PATIENCE = {"IDLE_SECONDS": 3, "HEAD_SECONDS": 4, "BODY_SECONDS": 4, "MAX_CONNECTIONS": 600}


@pytest.fixture(scope="module")
def impatient():
    """A server whose time-outs are short."""
    patch = "".join(f"server.{name} = {value};" for name, value in PATIENCE.items())
    with Server("cpu", program=("-c", f"import server, sys; {patch} sys.exit(server.main())")) as running:
        yield running


def footprint(running: Server) -> tuple[int, int]:
    """The server's threads and open files."""
    [threads] = re.findall(r"Threads:\s*(\d+)", Path(f"/proc/{running.process.pid}/status").read_text())
    return int(threads), len(os.listdir(f"/proc/{running.process.pid}/fd"))


def until(condition: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (true := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(true)


def connect(running: Server, first: bytes = b"") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", running.port), timeout=10)
    sock.sendall(first)
    return sock


HEAD = b"POST /update_weights HTTP/1.1\r\nhost: x\r\n"
BEGUN = {
    "nothing": b"",
    "half a line": b"POST /upd",
    "half of the headers": HEAD,
    "half a body": HEAD + b"content-type: application/json\r\ncontent-length: 1000\r\n\r\n{",
    "a gigabyte to come": HEAD + b"content-length: %d\r\n\r\n" % (1 << 30),
    "expecting 100": HEAD + b"expect: 100-continue\r\ncontent-length: 9\r\n\r\n",
}
ENDLESS = {"half of the headers": b"x-more: 1\r\n", "half a line": b"x", "half a body": b" "}


def dripped(running: Server, begun: str, drop: bytes) -> float:
    """Seconds until the server gives up a client that sends a little now and then, and never ends."""
    began = time.monotonic()
    with connect(running, BEGUN[begun]) as sock, contextlib.suppress(OSError):
        while time.monotonic() - began < 10:
            if select.select([sock], [], [], 0.3)[0] and not sock.recv(1 << 16):
                break
            sock.sendall(drop)
    return time.monotonic() - began


def test_neither_slow_nor_half_open_clients_hold_anyone_up_or_stay(impatient):
    """500 connections that begin and do not go on, three that drip; meanwhile a trainer syncs."""
    client = Client(impatient)
    client.sync({"w": torch.arange(9.0)})
    before = footprint(impatient)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        drips = [pool.submit(dripped, impatient, *endless) for endless in ENDLESS.items()]
        for begun in itertools.islice(itertools.cycle(BEGUN.values()), 500):
            stack.enter_context(connect(impatient, begun))
        began = time.monotonic()
        assert until(lambda: footprint(impatient)[0] > before[0] + 490, 2), "they are all there"
        assert client.get("/health").status_code == 200
        client.sync({"w": torch.arange(9.0) + 1}, packed=True)
        assert time.monotonic() - began < 2
        assert client.checksums() == digests({"w": torch.arange(9.0) + 1})
        assert max(drip.result() for drip in drips) < 8
    client.http.close()
    assert until(lambda: footprint(impatient) <= before, 10), (before, footprint(impatient))
    client.give_up()


def test_connections_beyond_the_limit_are_closed_and_the_server_serves_on(impatient):
    before = footprint(impatient)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connect(impatient)) for _ in range(PATIENCE["MAX_CONNECTIONS"] + 100)]
        poll = select.poll()  # the descriptors may be beyond what select takes
        for sock in socks:
            poll.register(sock, select.POLLRDHUP)
        assert until(lambda: len(poll.poll(0)) >= 100, 2.5)
        assert footprint(impatient)[0] < before[0] + PATIENCE["MAX_CONNECTIONS"]
    assert until(lambda: footprint(impatient) <= before, 10), (before, footprint(impatient))
    assert Client(impatient).get("/health").status_code == 200


@pytest.mark.parametrize("length", [1 << 30, (1 << 30) + 1])
def test_a_body_over_the_limit_is_413_before_it_is_read(impatient, length):
    with connect(impatient, HEAD + b"content-length: %d\r\n\r\n" % length) as sock:
        answered = bool(select.select([sock], [], [], 0.5)[0])
        assert answered == (length > 1 << 30)
        assert not answered or sock.recv(100).startswith(b"HTTP/1.1 413 ")
