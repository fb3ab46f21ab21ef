"""In between: `server.py --forward` passes everything on as it came, and names who broke what from outside.

First what the tests use: a real server with a switch for faults, a scripted one, forwarders before them, and
trainers. Then: correct on both sides, faults of servers, faults of trainers, what is passed on, answers that
never come, what it costs, transcripts by hand, the command line.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import http.server
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import test_judge
import torch
from test_judge import (
    FINISH_LINE,
    HOLD,
    MUTANTS,
    START_LINE,
    Found,
    found,
    init_line,
    line,
    pair,
    seen,
    several,
    sync_of,
    update_line,
)
from test_protocol import GOOD

import ipc_codec
import protocol
import server
import trainer
from test_roundtrip import (
    FINISH,
    INIT,
    JSON,
    SHUTDOWN,
    START,
    UPDATE,
    Client,
    Server,
    digests,
    environment,
    error,
    ok,
    refused,
)

ROOT = Path(protocol.__file__).resolve().parent
PATIENCE = 10.0  # seconds for what must come
both_modes = pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
NOTHING: Found = set()
MARK = "a key that every server ignores"


# --- Servers and forwarders ---------------------------------------------------------------------------

# `server.py` with a file that says which fault it has now; while it is empty, none.
FAULTY = """
import sys, threading, time
from pathlib import Path
sys.path.insert(0, {root!r})
import ipc_codec, server
from server import App, Reply, WeightTransferEngine as Engine

def fault():
    return Path(__file__ + ".fault").read_text()

held = []  # what is not let go
opened = []  # the counters of this sync
open_exports, open_buffer = ipc_codec.open_exports, ipc_codec.PackedBufferImporter.open_export
load, finish, answer = Engine._load, Engine.finish_weight_update, App.answer

def holding(exports, device):
    opened.extend(ipc_codec._counters(exports))
    tensors = open_exports(exports, device)
    if fault() in ("never releases", "releases late", "lets go in between"):
        held.append(tensors)
    return tensors

def opening(self, handle):
    if fault() == "opens every chunk":
        self.release()
    return open_buffer(self, handle)

def loading(self, *args):
    openings = load(self, *args)
    if fault() == "lets go in between":
        self._release()
        threading.Timer(0.05, held.clear).start()
    if fault() == "is slow":
        time.sleep(0.3)
    return openings

def finishing(self, *args):
    said = finish(self, *args)
    if fault() == "releases again":
        ipc_codec._count({{*opened}}, -1)
    opened.clear()
    if fault() == "releases late":
        threading.Timer(0.3, held.clear).start()
    return said

def answering(self, method, target, headers, body):
    call, now = target[1:], fault()
    if not now:
        held.clear()
    if now == "says yes" and call in server.protocol.SAID:
        return Reply(200, {{"message": server.protocol.SAID[call]}})
    if now.endswith(target):
        said = "out of memory" if now.startswith("explained") else ""
        return server._error(500, "InternalServerError", said, None)
    return answer(self, method, target, headers, body)

ipc_codec.open_exports, ipc_codec.PackedBufferImporter.open_export = holding, opening
Engine._load, Engine.finish_weight_update, App.answer = loading, finishing, answering
if __name__ == "__main__":
    sys.exit(server.main())
"""
PATCHED = """
import sys
sys.path.insert(0, {root!r})
import ipc_codec, server
{change}
if __name__ == "__main__":
    sys.exit(server.main())
"""


class Process(Server):
    """A program that is started as `server.py` is."""

    def __init__(self, folder: Path, program: Path, *options: str, devices: str = "cpu:0") -> None:
        self.devices = devices.split(",")
        self.log = (folder / f"log-{next(Client.serial)}").open("w+")
        command = [sys.executable, str(program), "--port", "0", *options]
        self.process = subprocess.Popen(
            command, env=environment(True), stdout=subprocess.PIPE, stderr=self.log, text=True
        )


class Faulty(Process):
    """A real server with a switch for faults."""

    def __init__(self, folder: Path, devices: str, *options: str) -> None:
        program = folder / f"faulty-{next(Client.serial)}.py"
        program.write_text(FAULTY.format(root=str(ROOT)))
        self.switch = Path(f"{program}.fault")
        self.switch.write_text("")
        super().__init__(folder, program, "--device", devices, *options, devices=devices)

    @contextlib.contextmanager
    def fault(self, name: str) -> Iterator[None]:
        self.switch.write_text(name)
        try:
            yield
        finally:
            self.switch.write_text("")


class Between(Process):
    """A forwarder before that server; `change` is made to its program first."""

    def __init__(self, folder: Path, upstream: Any, change: str = "") -> None:
        self.upstream, self.path = upstream, folder / f"between-{next(Client.serial)}.jsonl"
        program = folder / f"{self.path.stem}.py"
        program.write_text(PATCHED.format(root=str(ROOT), change=change))
        options = ("--forward", upstream.url, "--transcript", str(self.path))
        super().__init__(folder, program, *options, devices=",".join(upstream.devices))

    def lines(self, since: int = 0) -> list[dict[str, Any]]:
        """The header, and what was written since that byte, whole lines."""
        text = self.path.read_bytes()
        whole = text[since : text.rindex(b"\n") + 1]
        return [json.loads(said) for said in (text.split(b"\n", 1)[0], *whole.splitlines()[not since :])]

    def stop(self) -> int:
        """Ends it as a user does; what it has heard is then written."""
        self.process.terminate()
        return self.process.wait(PATIENCE)


class Scripted(http.server.ThreadingHTTPServer):
    """A server in this process: `script` maps a path to what is done with its handler and its body."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url, self.devices = f"http://127.0.0.1:{self.server_port}", ["cpu:0"]
        self.asked: list[str] = []
        self.script: dict[str, Callable[[Any, bytes], None]] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Scripted

    def serve(self) -> None:
        path = self.path.split("?")[0]
        self.server.asked.append(path)
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.script.get(path, lambda handler, body: handler.say({"world_size": 1}))(self, body)

    do_GET = do_POST = do_PUT = do_HEAD = serve

    def say(self, body: Any, status: int = 200, **headers: str) -> None:
        self.say_bytes(json.dumps(body).encode(), status, **headers)

    def say_bytes(self, content: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"content_length": str(len(content))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Between, Between]]:
    """A forwarder before a real server with one worker, and one before a scripted server."""
    folder = tmp_path_factory.mktemp("forward")
    with contextlib.ExitStack() as stack:
        upstream = Scripted()
        stack.callback(upstream.shutdown)
        change = "server.UPSTREAM_SECONDS, server.KEPT_SECONDS, server.MAX_CONNECTIONS = 0.5, 0.3, 100"
        scripted = Between(folder, upstream, change)
        stack.push(scripted.__exit__)  # from here on: also where another does not start
        faulty = stack.enter_context(Faulty(folder, "cpu:0"))
        before_one = stack.enter_context(Between(folder, faulty))
        yield before_one, scripted.__enter__()


@pytest.fixture
def one(running: tuple[Between, Between]) -> Iterator[Trainer]:
    with visit(running[0]) as t:
        yield t


@pytest.fixture
def scripted(running: tuple[Between, Between]) -> Between:
    """The forwarder before the scripted server, which does nothing special."""
    running[1].upstream.script.clear()
    running[1].upstream.asked.clear()
    return running[1]


@pytest.fixture(scope="module")
def before_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Between]:
    folder = tmp_path_factory.mktemp("two")
    with Faulty(folder, "cpu:0,cpu:1") as faulty, Between(folder, faulty) as between:
        yield between


@pytest.fixture
def two(before_two: Between) -> Iterator[Trainer]:
    with visit(before_two) as t:
        yield t


# --- Trainers -----------------------------------------------------------------------------------------


class Trainer(test_judge.Trainer):
    """A trainer whose calls go through a forwarder, and what that has written of it."""

    def __init__(self, between: Between) -> None:
        super().__init__(between)
        self.between, self.began = between, mark(between, self)

    def transcript(self) -> list[dict[str, Any]]:
        mark(self.between, self)
        return [said for said in self.between.lines(self.began) if MARK not in (said.get("body") or {})]

    def fault(self, name: str) -> contextlib.AbstractContextManager[None]:
        return self.between.upstream.fault(name)


def mark(between: Between, client: Client) -> int:
    """Says something that can be known again, and waits until it is written; the transcript's end then."""
    number = next(Client.serial)
    ok(client.post(INIT, {"init_info": {}, MARK: number}))
    await_true(lambda: f'"{MARK}":{number}}}' in between.path.read_text())
    return between.path.stat().st_size


def await_true(holds: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (value := holds()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)
    return value


@contextlib.contextmanager
def visit(between: Between, kind: type[Trainer] | None = None) -> Iterator[Trainer]:
    """A trainer of an idle, unpacked server that no refused export is left at. Takes back what it lent."""
    client = Client(between)
    test_judge.calm(client)
    t = (kind or Trainer)(between)
    try:
        yield t
    finally:
        test_judge.calm(client)
        t.give_up()
        t.http.close()
        client.http.close()
        ipc_codec._lent.clear()  # what a faulty server released twice is never reclaimed


# --- Correct on both sides ----------------------------------------------------------------------------


@both_modes
def test_a_correct_sync_arrives_and_accuses_nobody(one, packed):
    weights = several(5, 3)
    for _ in range(2):
        one.sync(weights, packed, chunks=3)
    assert one.checksums() == digests(weights)
    assert set(one.counters()) == {0}
    assert one.found() == NOTHING


@pytest.mark.long
@both_modes
def test_two_workers_get_their_bytes(two, packed):
    weights = several(5, 3)
    two.sync(weights, packed, chunks=3)
    for worker in range(2):
        assert two.checksums(f"dp0:pp0:pcp0:tp{worker}") == digests(weights)
    assert set(two.counters()) == {0} and len(two.counters()) == (2 if packed else 10)
    assert two.found() == NOTHING


@pytest.mark.long
def test_rank_local_updates_are_judged_by_worker(two):
    two.begin()
    info = two.unpacked({"a": torch.ones(3)})
    (handle,) = info["ipc_handles_pickled"]
    mine = [info | {"ipc_handles_pickled": [{uuid: args}]} for uuid, args in handle.items()]
    other = two.unpacked({"b": torch.ones(2)})
    mine[1] |= {"names": other["names"], "shapes": other["shapes"]}
    mine[1] |= {
        "ipc_handles_pickled": [{u: args} for u, args in list(other["ipc_handles_pickled"][0].items())[1:]]
    }
    ok(two.update(mine))
    ok(two.finish())
    assert two.found() == NOTHING
    finish = two.transcript()[-1]
    (worker,) = finish["seen"]["workers"]
    assert worker["names"] == [two.prefix + "a", two.prefix + "b"] and worker["after"] == [0, 0]


@both_modes
def test_the_trainer_of_this_project_is_accused_of_nothing(one, packed):
    client, weights = trainer.HTTPWeightSyncClient(one.url), trainer.ByteLM(width=16).state_dict()
    client.init_weight_transfer_engine({"packed": packed})
    named = {one.prefix + name: weight for name, weight in weights.items()}
    for version in "12":
        if packed:
            trainer.send_weights_packed(client, named, 1 << 16, device="cpu:0", weight_version=version)
        else:
            trainer.send_weights(client, named, device="cpu:0", weight_version=version)
    assert one.version() == "2" and one.checksums() == digests(weights)
    assert one.found() == NOTHING


def test_a_server_that_lets_go_before_the_finish_is_accused_of_nothing(one):
    with one.fault("lets go in between"):
        one.begin(packed=True)
        buffers, handles = one.buffers(64)
        ok(one.update(one.packed({"a": torch.ones(4)}, buffers, handles)))
        await_true(lambda: one.counters() == [0])
        ok(one.finish())
    assert one.found() == NOTHING


# --- Faults of servers --------------------------------------------------------------------------------


def findings(t: Trainer) -> list[tuple[str, str, str]]:
    """(party, rule, what was seen) of each."""
    return [(f.party, f.rule.id, f.seen) for f in protocol.check(t.transcript())]


SERVERS: dict[str, tuple[bool, str]] = {  # fault -> (packed, what is said of it)
    "never releases": (False, "a: left open, the counter is 1"),
    "never releases, packed": (True, "the buffer: left open, the counter is 1"),
    "releases late": (False, "a: released too late, the counter was 1 when the finish was answered"),
    "releases late, packed": (True, "the buffer: released too late, the counter was 1 when the finish"),
    "opens every chunk": (True, "the buffer: released 3 times"),
}


LONG = ("never releases, packed", "releases late")


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in SERVERS]
)
def test_a_server_is_named_for_what_it_does_to_an_export(one, fault):
    packed, says = SERVERS[fault]
    told = len(one.between.stderr())
    with one.fault(fault.removesuffix(", packed")):
        one.sync(
            {"a": torch.ones(2), "b": torch.ones(4), "c": torch.ones(4)}, packed, chunks=3 if packed else 1
        )
        ((party, rule, what),) = findings(one)
    assert (party, rule) == ("server", "export.released")
    assert what.removeprefix(one.prefix).startswith(says)
    assert "server MUST export.released" in one.between.stderr()[told:]  # at once, for who watches a job


@both_modes
def test_of_a_renewed_export_a_second_release_is_the_servers(one, packed):
    """The trainer has lent it in two syncs, and was in its right."""
    import trainer

    client, exports = trainer.HTTPWeightSyncClient(one.between.url, PATIENCE), ipc_codec.Exports()
    weights, buffer = {"a": torch.ones(2), "b": torch.ones(4)}, ipc_codec.PackedBuffer(1 << 10, "cpu:0")
    for fault in ("", "", "releases again"):
        client.init_weight_transfer_engine({"packed": packed})
        with one.fault(fault):
            if packed:
                trainer.send_weights_packed(client, weights, buffer=buffer, device="cpu:0")
            else:
                trainer.send_weights(client, weights, exports=exports, device="cpu:0")
            found = findings(one)
    assert {(party, rule) for party, rule, _what in found} == {("server", "export.released")}
    assert {what.rpartition(": ")[2] for *_, what in found} == {"released 2 times"}


SYNC: dict[str, Any] = {INIT: {"init_info": {}}, START: None, UPDATE: "update_info", FINISH: None}


@pytest.mark.parametrize("path", SYNC)
@pytest.mark.parametrize("explained", [False, True], ids=["without a reason", "with a reason"])
def test_a_refusal_without_a_rule_is_the_servers_unless_it_gives_a_reason(one, path, explained):
    update = {"update_info": Client.encoded(one.unpacked({"a": torch.ones(2)}))}
    one.sync({"a": torch.ones(2)})  # from here on it is known that no update is open
    with one.fault(("explained" if explained else "") + path):
        for at, body in SYNC.items():
            if one.post(at, update if at == UPDATE else body).status_code == 500:
                break
    one.settle()
    ok(one.finish()) if path == FINISH else None
    party, says = ("unclear", "out of memory") if explained else ("server", "no reason")
    assert findings(one)[-1] == (party, "refusal.explained", says)
    assert {rule for _, rule, _ in findings(one)} <= {"refusal.explained", "init.first"}


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("never releases", {("server", "export.released")}),
        ("opens every chunk", NOTHING),  # a trainer may have settled it: a mistake of its own, and not seen
        ("", NOTHING),
    ],
)
def test_of_a_sync_that_failed_only_what_stays_open_is_the_servers(one, fault, expected):
    one.begin(packed=True)
    buffers, handles = one.buffers(64)
    with one.fault(fault):
        for name in "ab":
            ok(one.update(one.packed({name: torch.ones(16)}, buffers, handles)))
        refused(one.update(one.packed({"c": torch.ones(16)}, buffers, handles) | {"shapes": []}))
        one.sync({"d": torch.ones(2)}, packed=True)
    assert one.found() - {("trainer", "update.lengths")} == expected


def test_a_server_is_named_for_accepting_what_vllm_refuses(one):
    with one.fault("says yes"):
        one.begin()
        ok(one.update(one.unpacked(pair()) | {"shapes": []}))
        ok(one.post(SHUTDOWN))
        one.settle()
        ok(one.finish())
        rules = ("update.lengths", "shutdown.between-updates")
        assert one.found() == {(party, rule) for party in ("trainer", "server") for rule in rules}


# --- Faults of trainers -------------------------------------------------------------------------------


def refused_update(t: Trainer) -> None:
    t.begin()
    refused(t.update(t.unpacked(pair()) | {"dtype_names": []}))


def never_settles(t: Trainer) -> None:
    refused_update(t)
    t.sync(pair())


def never_settles_behind_a_400(t: Trainer) -> None:
    t.begin()
    body = {"update_info": Client.encoded(t.unpacked(pair()))}
    assert t.send("POST", UPDATE, json.dumps(body), "text/plain").status_code == 400
    ok(t.finish())


def uses_an_export_again(t: Trainer, packed: bool = False) -> None:
    info = t.info(pair(), packed)
    for _ in range(2):
        t.begin(packed)
        ok(t.update(info))
        ok(t.finish())


def uses_an_export_twice_in_a_sync(t: Trainer) -> None:
    t.begin()
    info = t.unpacked({"a": torch.ones(2)})
    ok(t.update(info))
    ok(t.update(info | {"names": [t.prefix + "b"]}))
    ok(t.finish())


def settles_what_is_lent(t: Trainer) -> None:
    t.begin(packed=True)
    ok(t.update(t.packed(pair())))
    t.settle()
    ok(t.finish())


def has_two_in_flight(t: Trainer) -> None:
    t.begin()
    updates = [t.unpacked({name: weight}) for name, weight in pair().items()]
    with t.fault("is slow"), ThreadPoolExecutor(2) as pool:
        assert [reply.status_code for reply in pool.map(t.update, updates)] == [200, 200]
    ok(t.finish())


def settles(t: Trainer) -> None:
    refused_update(t)
    t.settle()
    t.sync(pair())


TRAINERS: list[tuple[Callable[[Any], None], set[str]]] = [
    (settles, {"update.lengths"}),
    (never_settles, {"update.lengths", "export.settled"}),
    (never_settles_behind_a_400, {"body.envelope"}),
    (uses_an_export_again, {"export.fresh"}),
    (lambda t: uses_an_export_again(t, packed=True), {"export.fresh"}),
    (uses_an_export_twice_in_a_sync, {"unpacked.own-export"}),
    (settles_what_is_lent, {"export.kept"}),
    (has_two_in_flight, {"call.one-in-flight"}),
]


@pytest.mark.parametrize(("run", "rules"), TRAINERS)
def test_a_trainer_is_named_for_its_fault_alone(one, run, rules):
    run(one)
    assert one.found() == {("trainer", rule) for rule in rules}


@pytest.mark.long
def test_a_handle_for_one_of_two_workers_is_the_trainers_fault(two):
    two.begin()
    info = two.unpacked({"a": torch.ones(2)})
    (handle,) = info["ipc_handles_pickled"]
    first = dict(list(handle.items())[:1])
    refused(two.update(info | {"ipc_handles_pickled": [first]}))
    two.settle()
    assert two.found() == {("trainer", "handle.this-gpu")}


def test_handles_for_more_gpus_than_the_server_has_accuse_nobody(one):
    one.begin()
    info = one.unpacked({"a": torch.ones(2)})
    more = ipc_codec.export_handle(torch.ones(2), "cpu:1")
    one.lending(more)
    ok(one.update(info | {"ipc_handles_pickled": [info["ipc_handles_pickled"][0] | more]}))
    ok(one.finish())
    assert one.counters() == [0, 1]
    assert one.found() == NOTHING
    assert "lent on 2 GPUs, to 1 workers" in verdict(one.between)


def verdict(between: Between) -> str:
    said: list[str] = []
    protocol.verdict(str(between.path), out=said.append)
    return "\n".join(said)


# --- What is passed on --------------------------------------------------------------------------------


def ask(between: Between, method: str, path: str, body: bytes | None = None, **headers: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", between.port, timeout=PATIENCE)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    return connection.getresponse()


@pytest.mark.parametrize(
    "head, status",
    [
        (b"content-length: 0\r\ncontent-length: 3", 400),
        (b"content-length : 3", 400),
        (b"origin: http://x\r\nexpect: 100-continue\r\ncontent-length: 3", 403),
        (b"expect: 100-continue\r\ncontent-length: 1073741825", 413),
    ],
)
def test_what_the_head_refuses_is_neither_asked_for_nor_passed_on(scripted, head, status):
    seen: list[Any] = []
    scripted.upstream.script["/resume"] = lambda handler, body: (seen.append(body), handler.say({}))
    with socket.create_connection(("127.0.0.1", scripted.port), timeout=PATIENCE) as sock:
        sock.sendall(b"POST /resume HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 %d " % status)
    assert ask(scripted, "POST", "/resume", b"abc").status == 200 and seen == [b"abc"]


@pytest.mark.parametrize("path", ["/anything/else?a=%20b&a", "/update_weights?x=1"])
def test_bytes_go_on_as_they_came_and_so_they_return(scripted, path):
    sent, returned = random.Random(0).randbytes(100_000), random.Random(1).randbytes(100_000)
    seen: list[Any] = []

    def answer(handler, body):
        seen.append((handler.command, handler.path, body, handler.headers))
        handler.say_bytes(returned, 418, x_answer="it is, 1", set_cookie="a=b", connection="x-hop", x_hop="1")

    scripted.upstream.script[path.split("?")[0]] = answer
    reply = ask(scripted, "POST", path, sent, x_asked="what", cookie="c=d", connection="x-own", x_own="1")
    ((method, target, body, headers),) = seen
    assert (method, target, body) == ("POST", path, sent)
    assert (headers["x-asked"], headers["cookie"], headers["x-own"]) == ("what", "c=d", None)
    assert headers["host"] == scripted.upstream.url.removeprefix("http://")
    assert (reply.status, reply.read()) == (418, returned)
    assert (reply.headers["x-answer"], reply.headers["set-cookie"], reply.headers["x-hop"]) == (
        *("it is, 1", "a=b"),
        None,
    )
    assert len(reply.headers.get_all("server")) == len(reply.headers.get_all("date")) == 1  # the server's own


@pytest.mark.parametrize("method", ["GET", "PUT", "HEAD"])
def test_any_method_is_passed_on(scripted, method):
    reply = ask(scripted, method, "/")
    assert reply.status == 200 and reply.headers["content-length"] == "17"
    assert reply.read() == (b"" if method == "HEAD" else b'{"world_size": 1}')


@pytest.mark.parametrize("form", ["chunked", "until the end"])
def test_a_stream_is_passed_on_piece_by_piece(scripted, form):
    """Each piece is sent only when the one before it has arrived; the head is one too."""
    arrived = threading.Semaphore(0)

    def stream(handler, body):
        handler.send_response(200)
        handler.send_header(
            *(("transfer-encoding", "chunked") if form == "chunked" else ("connection", "close"))
        )
        handler.end_headers()
        for piece in (b"data: 1\n\n", b"data: 2\n\n"):
            assert arrived.acquire(timeout=PATIENCE)
            handler.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if form == "chunked" else piece)
        handler.wfile.write(b"0\r\n\r\n" if form == "chunked" else b"")

    scripted.upstream.script["/v1/completions"] = stream
    reply = ask(scripted, "POST", "/v1/completions", b"{}")
    arrived.release()
    assert reply.read1(100) == b"data: 1\n\n"
    arrived.release()
    assert reply.read() == b"data: 2\n\n"


def test_half_an_answer_is_not_taken_for_a_whole_one(scripted):
    scripted.upstream.script["/half"] = lambda handler, body: (
        handler.say_bytes(b"half", content_length="100"),
        handler.hang_up(),
    )
    began = time.monotonic()
    with pytest.raises(http.client.IncompleteRead):
        ask(scripted, "GET", "/half").read()
    assert time.monotonic() - began < server.IDLE_SECONDS / 2  # and not when the connection is idle


def test_a_client_that_hangs_up_aborts_its_completion(scripted):
    aborted = threading.Event()

    def wait(handler, body):
        handler.connection.settimeout(PATIENCE)
        aborted.set() if handler.rfile.read(1) == b"" else None

    scripted.upstream.script["/v1/completions"] = wait
    with socket.create_connection(("127.0.0.1", scripted.port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
        await_true(lambda: "/v1/completions" in scripted.upstream.asked)
    assert aborted.wait(0.4)  # and not at the time-out, which is 0.5 s here


def test_a_connection_is_kept_as_long_as_the_server_may_keep_it(scripted):
    """Not after a 5xx, not when it was idle for long (0.3 s here), and not when the server has closed it."""
    from_: list[Any] = []
    done = threading.Semaphore(0)

    def answer(handler, body):
        from_.append(handler.client_address)
        handler.say({}, 500 if body == b"fail" else 200)
        handler.hang_up() if body == b"close" else None
        done.release()

    scripted.upstream.script["/x"] = scripted.upstream.script[START] = answer
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", scripted.port, timeout=PATIENCE)
    ) as client:
        for path in ("/x", START):
            for body in (b"", b"", b"fail", b"", b"close", b"", b"wait", b""):
                client.request("POST", path, body)
                assert client.getresponse().read() == b"{}"
                assert done.acquire(timeout=PATIENCE)
                time.sleep(0.4 if body == b"wait" else 0)
    for eight in (from_[:8], from_[8:]):
        new = [one != two for one, two in itertools.pairwise(eight)]
        assert new == [False, False, True, False, True, False, True]


def test_pages_of_the_web_and_bodies_without_a_length_are_refused_here(scripted):
    assert ask(scripted, "POST", START, origin="http://example.org").status == 403
    assert ask(scripted, "POST", UPDATE, b"", transfer_encoding="chunked").status == 411
    assert scripted.upstream.asked == []


# --- Answers that never come --------------------------------------------------------------------------


NO_BYTES = {
    "update_info": {
        "names": [],
        "dtype_names": [],
        "shapes": [],
        "ipc_handles_pickled": "gASVAgAAAAAAAABdlC4=",
    }
}
LOST: dict[str, tuple[Callable[[Any, bytes], Any], int, str]] = {
    "hangs up": (lambda handler, body: handler.hang_up(), 502, "hung up without an answer"),
    "hangs up in mid-answer": (
        lambda handler, body: (handler.say_bytes(b"{", content_length="100"), handler.hang_up()),
        502,
        "hung up without an answer",
    ),
    "is silent": (lambda handler, body: time.sleep(0.7), 504, "gave no answer within 0.5 s"),
}


@pytest.mark.parametrize("way", LOST)
def test_a_call_that_is_not_answered_is_the_servers_and_is_not_sent_again(scripted, way):
    answer, status, says = LOST[way]
    t = Trainer(scripted)
    t.begin()
    scripted.upstream.script[UPDATE] = answer
    reply = t.update(t.unpacked(pair()))
    kind = "GatewayTimeoutError" if status == 504 else "BadGatewayError"
    assert says in error(reply, status, kind, None) and scripted.upstream.url in reply.text
    assert scripted.upstream.asked.count(UPDATE) == 1
    ok(t.post(START))  # and what was lent is not settled: the server may still read it
    ok(t.finish())
    ((party, rule, what),) = findings(t)
    assert (party, rule) == ("server", "refusal.explained") and says in what
    t.give_up()


def test_any_other_call_is_given_up_after_one_time_out_too(scripted):
    scripted.upstream.script["/slow"] = lambda handler, body: (time.sleep(0.8), handler.say({}))
    reply = ask(scripted, "GET", "/slow")
    assert (reply.status, b"no answer within 0.5 s" in reply.read()) == (504, True)


def test_half_as_many_clients_are_let_in_since_each_needs_a_connection_to_the_server(scripted):
    """A server would take 100 here."""
    tasks = Path(f"/proc/{scripted.process.pid}/task")
    before = len(list(tasks.iterdir()))
    with contextlib.ExitStack() as stack:
        address = "127.0.0.1", scripted.port
        clients = [stack.enter_context(socket.create_connection(address)) for _ in range(100)]
        await_true(lambda: server._readable(clients[-1]))  # closed, and it came last
        assert 50 <= sum(map(server._readable, clients)) < 90
    await_true(lambda: len(list(tasks.iterdir())) <= before)


@pytest.mark.parametrize("path", [START, UPDATE, FINISH])
@pytest.mark.parametrize("done", [False, True], ids=["not done", "done"])
def test_what_comes_after_a_lost_answer_is_not_held_against_the_trainer(scripted, path, done):
    """Whether the call was done nobody knows: its trainer may say it again, or begin anew."""
    t = Trainer(scripted)
    ok(t.init())
    for at in (START, UPDATE, FINISH):
        body = NO_BYTES if at == UPDATE else None
        if at == path:
            scripted.upstream.script[at] = lambda handler, body: handler.hang_up()
            assert t.post(at, body).status_code == 502
            scripted.upstream.script.clear()
            if done:
                scripted.upstream.script[at] = lambda handler, body: handler.say(
                    {"error": {"message": "open"}}, 500
                )
                assert t.post(at, body).status_code == 500
                scripted.upstream.script.clear()
                continue
        ok(t.post(at, body))
    assert [(party, rule) for party, rule, _ in findings(t)] == [("server", "refusal.explained")]


@pytest.mark.long
def test_a_server_that_is_gone_is_named(tmp_path):
    upstream = Scripted()
    with Between(tmp_path, upstream) as between:
        upstream.shutdown()
        upstream.server_close()
        client = Client(between)
        assert "cannot be reached" in error(client.post(START), 502, "BadGatewayError", None)
        assert "cannot be reached" in error(client.get("/health"), 502, "BadGatewayError", None)
        assert between.stop() == 0
        assert ("server", "refusal.explained") in found(between.lines())


def test_counters_that_cannot_be_seen_are_said_once_and_the_rest_is_judged(scripted):
    t = Trainer(scripted)
    for _ in range(2):
        t.begin()
        info = t.unpacked(pair())
        handles = info["ipc_handles_pickled"]
        away = [{u: (*args[:11], b"/torch_1_2_3", *args[12:]) for u, args in h.items()} for h in handles]
        ok(t.update(info | {"ipc_handles_pickled": away, "dtype_names": ["float", "bfloat16"]}))
        ok(t.finish())
    assert t.found() == {("trainer", "dtype.canonical")}
    said = verdict(scripted)
    assert said.count("not observable: /dev/shm/torch_1_2_3: No such file or directory") == 1
    t.give_up()


@pytest.mark.parametrize(("after", "now", "says"), [(0, -1, ""), (0, 1, ""), (1, -1, "released too late")])
def test_what_comes_after_a_finish_is_not_held_against_it(tmp_path, after, now, says):
    """The observer may be late: then the next sync has been there, and used the same export."""
    path = tmp_path / "said.jsonl"
    observer = server.Observer(str(path), "http://x", 1)
    body, lent = prepared(1)
    (args,) = lent[1][0].values()
    file, at = Path("/dev/shm" + args[11].decode()), 64 + 8 * args[12]

    def counting(count: int) -> server.Counters:
        return {args[11]: file.read_bytes()[64:at] + count.to_bytes(8, "little", signed=True)}

    with file.open("r+b") as counters:
        counters.seek(at)
        counters.write(now.to_bytes(8, "little", signed=True))
    for call, sent, count in (("start", b"", 1), ("update", body, 1), ("finish", b"", after)):
        name = {"update": "update_weights"}.get(call, f"{call}_weight_update")
        files = counting(count)
        observer._write(observer._hear(server.Said(name, JSON, sent, 200, b"{}", 0.0, 0.0, files, files)))
    header, *lines = [json.loads(text) for text in path.read_text().splitlines()]
    seen = [(f.party, f.rule.id, f.seen) for f in protocol.check([header, init_line(), *lines])]
    assert [(party, rule) for party, rule, _ in seen] == [("server", "export.released")] * bool(says)
    assert all(says in what for *_, what in seen)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_said_is_written_down_and_judged(tmp_path, seed):
    rng = random.Random(seed)
    observer = server.Observer(str(tmp_path / "said.jsonl"), "http://x", rng.choice([1, 2]))
    (args,) = GOOD["unpacked"]["ipc_handles_pickled"][0].values()  # type: ignore[index]
    bodies = [{"init_info": {"packed": True}}, {"weight_version": "1"}]
    for at in range(200):
        junk = [rng.choice(test_judge.JUNK) if rng.random() < 0.1 else arg for arg in args]
        handles = rng.choice([[{"u": junk}], {"u": junk}, [junk], {"u": junk, "v": args}, None])
        info = GOOD["unpacked"] | {"ipc_handles_pickled": ipc_codec.encode_handles(handles)}
        entry = {"update_info": rng.choice([info, [info], [info, info]])}
        body = test_judge.mutated(rng, [rng.choice([entry, entry, entry, *bodies])])
        sent = json.dumps(body[0] if body else None).encode()
        status, reply = (
            rng.choice([200, 200, 200, 400, 500, 502, 504]),
            rng.choice([b"", b"[]", b"{}", b"\xff"]),
        )
        call = rng.choice([*protocol.CALLS, *["update_weights"] * 5])
        files: server.Counters = rng.choice(
            [{}, {b"/torch_1_2_3": bytes(100)}, {b"/torch_1_2_3": "no such file"}]
        )
        said = server.Said(
            call, rng.choice([JSON, ""]), sent, status, reply, at, at + rng.random(), files, files
        )
        observer._write(observer._hear(said))
    lines = [json.loads(text) for text in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert len(lines) == 201 and protocol.check(lines)


# --- What it costs ------------------------------------------------------------------------------------


@pytest.mark.long  # a busy machine has other things to do
def test_a_call_of_300_tensors_takes_two_milliseconds_more_at_most(scripted):
    t = Trainer(scripted)
    info = {"update_info": Client.encoded(t.unpacked(several(300, 4)))}
    body, took = json.dumps(info).encode(), {}

    def answer(handler, body):
        time.sleep(0.005)
        handler.say({})

    scripted.upstream.script[UPDATE] = answer
    for port in (scripted.upstream.server_port, scripted.port) * 20:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        client.connect()
        began = time.perf_counter()
        client.request("POST", UPDATE, body, {"content-type": JSON})
        assert client.getresponse().read() == b"{}"
        took.setdefault(port, []).append(time.perf_counter() - began)
        client.close()
    direct, forwarded = map(min, took.values())
    print(f"{1e3 * direct:.2f} ms, forwarded {1e3 * forwarded:.2f} ms")
    assert forwarded - direct < 0.002
    t.give_up()


def prepared(count: int) -> tuple[bytes, list[Any]]:
    """The body of an unpacked update of that many tensors, and what it lends."""
    weights = [torch.zeros(4) for _ in range(count)]
    handles = [ipc_codec.export_handle(weight, "cpu:0") for weight in weights]
    columns = {"dtype_names": ["float32"] * count, "shapes": [[4]] * count}
    names = [f"layers.{at}.weight" for at in range(count)]
    update = {"names": names, **columns, "ipc_handles_pickled": ipc_codec.encode_handles(handles)}
    return json.dumps({"update_info": update}).encode(), [weights, handles]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("count", "times"), [(300, 40), (18_867, 5)])
def test_what_forwarding_costs(tmp_path, count, times):
    """A report: medians of whole syncs, direct and forwarded in turn."""
    took: dict[tuple[str, str], list[float]] = {}
    with Server("cpu") as upstream, Between(tmp_path, upstream) as between:
        for _ in range(times):
            for way, at in (("direct", upstream), ("forwarded", between)):
                body, lent = prepared(count)
                client = http.client.HTTPConnection("127.0.0.1", at.port, timeout=120)
                for path, sent in ((START, b""), (UPDATE, body), (FINISH, b"")):
                    began = time.perf_counter()
                    client.request("POST", path, sent, {"content-type": JSON})
                    assert client.getresponse().read() and client.sock is not None
                    took.setdefault((path, way), []).append(1e3 * (time.perf_counter() - began))
                client.close()
                lent.clear()
                ipc_codec.ipc_collect()
    for path in (START, UPDATE, FINISH):
        direct, forwarded = (statistics.median(took[path, way]) for way in ("direct", "forwarded"))
        print(f"{count} tensors, {path[1:]}: {direct:.2f} ms, forwarded {forwarded - direct:+.2f} ms")


# --- Transcripts by hand ------------------------------------------------------------------------------

OUTSIDE = {"names": ["a", "b"], "syncs": [1, 1], "held": [None, None], "after": [0, 0], "later": [0, 0]}
SEEN_FROM_OUTSIDE: list[tuple[dict[str, Any], Found]] = [
    ({}, NOTHING),
    ({"after": [1, 0], "later": [1, 0]}, {("server", "export.released")}),
    ({"after": [0, 1]}, {("server", "export.released")}),
    ({"after": [0, 1], "later": [0, None]}, {("server", "export.released")}),  # and then its file was gone
    ({"after": [0, -1], "later": [0, -1]}, {("server", "export.released")}),
    ({"later": [-2, 0]}, {("server", "export.released")}),
    ({"after": [None, 0], "later": [1, None]}, {("server", "export.released")}),
    ({"syncs": [1, 2], "after": [0, -1], "later": [0, -1]}, {("trainer", "export.fresh")}),
    ({"syncs": [1, 2], "after": [0, 1], "later": [0, 1]}, {("server", "export.released")}),
    ({"syncs": [7, 2]}, NOTHING),  # a slot that was taken again is no export that was used again
    ({"held": [None, 0], "after": [0, -1], "later": [0, -1]}, {("trainer", "export.kept")}),
    ({"after": [None, None], "later": [None, None]}, NOTHING),
]


@pytest.mark.parametrize(("change", "expected"), SEEN_FROM_OUTSIDE)
def test_what_is_seen_from_outside_names_one_party(change, expected):
    lines = sync_of(update_line(GOOD["unpacked"]))
    lines[-1] = FINISH_LINE | {"seen": seen(OUTSIDE | change)}
    assert found([lines[0] | {"uuids": [None]}, *lines[1:]]) == expected


def test_what_nobody_could_see_is_not_held():
    lines, rules = sync_of(update_line(GOOD["unpacked"])), set[str]()
    unseen = OUTSIDE | {"after": [None, None], "later": [None, None]}
    protocol.check([*lines[:-1], FINISH_LINE | {"seen": seen(unseen)}], rules)
    assert rules.isdisjoint({"export.released", "export.fresh", "export.kept"})
    protocol.check([*lines[:-1], FINISH_LINE | {"seen": seen(OUTSIDE)}], rules)
    assert {"export.released", "export.fresh"} <= rules


def test_workers_whose_gpus_are_not_known():
    lines = sync_of(update_line(GOOD["unpacked"]))
    assert found([lines[0] | {"uuids": [None]}, *lines[1:]]) == NOTHING
    assert found([lines[0] | {"uuids": [None, None]}, *lines[1:]]) == {
        ("trainer", "handle.this-gpu"),
        ("server", "handle.this-gpu"),
    }
    short = line("update_weights", {"update_info": [GOOD["unpacked"] | {"ipc_handles_pickled": ""}]}, 500)
    assert found([lines[0] | {"uuids": [None, None]}, *sync_of(short)[1:-1]]) == {
        ("trainer", "rank-local.counted")
    }


def test_the_mode_that_a_server_was_told_before_is_seen_from_its_handles():
    header, _, *lines = sync_of(update_line(GOOD["packed"]))
    assert found([header | {"forwarded": "http://vllm:8000"}, *lines]) == NOTHING
    assert ("trainer", "handles.form") in found([header, *lines])


@pytest.mark.parametrize("status", [502, 503, 504])
def test_no_answer_is_the_servers_even_where_the_trainer_broke_a_rule(status):
    lines = sync_of(update_line(GOOD["unpacked"] | {"shapes": []}, status, error="gone"))[:-1]
    assert found(lines) == {("trainer", "update.lengths"), ("server", "refusal.explained")}


def test_an_open_update_that_got_lost_is_not_the_trainers():
    lines = [*sync_of(update_line(GOOD["unpacked"]))[:-1], FINISH_LINE | {"status": 504, "error": "gone"}]
    assert found(lines) == {("server", "refusal.explained")}
    assert found([*lines, init_line(), START_LINE]) == {
        ("server", "refusal.explained"),
        ("trainer", "sync.finished"),
    }
    assert found([*lines, line("start_draft_weight_update")]) == {
        ("server", "refusal.explained"),
        *((party, "draft.none") for party in ("trainer", "server")),
    }


# --- The command line ---------------------------------------------------------------------------------


def refusal_of(*options: str) -> str:
    with pytest.raises(ValueError) as refusal:
        server.make_server(server.build_parser().parse_args(["--port", "0", *options]))
    return str(refusal.value)


def test_the_command_line_says_what_is_missing(tmp_path, scripted):
    transcript = ("--transcript", str(tmp_path / "sync.jsonl"))
    assert "--transcript FILE or --judge COMMAND" in refusal_of("--forward", scripted.upstream.url)
    for url in ("vllm:8000", "ftp://vllm", "http://", ""):
        assert "no URL such as" in refusal_of("--forward", url, *transcript)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        assert f"{url}: no server answers there" in refusal_of("--forward", url, *transcript)
    for answer in ({"world_size": 0}, {"world_size": "1"}, {}, []):
        scripted.upstream.script["/get_world_size"] = lambda handler, body, answer=answer: handler.say(answer)
        assert "VLLM_SERVER_DEV_MODE=1" in refusal_of("--forward", scripted.upstream.url, *transcript)
    assert not (tmp_path / "sync.jsonl").exists()


def test_the_forwarder_that_has_the_address_keeps_its_transcript(scripted):
    Trainer(scripted).http.close()  # has said something
    written = scripted.path.read_bytes()
    command = ["--port", str(scripted.port), "--forward", scripted.upstream.url]
    options = server.build_parser().parse_args([*command, "--transcript", str(scripted.path)])
    with pytest.raises(OSError, match="in use"):
        server.make_server(options)
    assert scripted.path.read_bytes().startswith(written)


def test_who_writes_the_transcript_has_no_part_in_the_address(scripted):
    """When the forwarder has ended it may still be writing, and another may take the address."""
    Trainer(scripted).http.close()  # it has begun to write
    pid = scripted.process.pid
    child = Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()
    opened = [os.readlink(file) for file in Path(f"/proc/{child}/fd").iterdir() if int(file.name) > 2]
    assert str(scripted.path) in opened
    assert not [file for file in opened if file.startswith("socket:")]


@pytest.mark.parametrize("number", ["SIGTERM", "SIGKILL"])
@pytest.mark.long
def test_what_was_heard_is_written_however_it_ends(tmp_path, number):
    with Faulty(tmp_path, "cpu:0") as faulty, Between(tmp_path, faulty) as between:
        client = Client(between)
        with faulty.fault("never releases"):
            client.sync(pair())
            if number == "SIGKILL":  # what it has not told its child by then is lost
                await_true(lambda: "finish_weight_update: 200" in between.stderr())
            os.kill(between.process.pid, getattr(signal, number))
            between.process.wait(PATIENCE)
        await_true(lambda: between.lines()[-1]["call"] == "finish_weight_update")
        assert found(between.lines()) == {("server", "export.released")}
        client.settle()


@pytest.mark.long
def test_calls_pass_when_nobody_writes_them_down_any_more(tmp_path):
    with Faulty(tmp_path, "cpu:0") as faulty, Between(tmp_path, faulty) as between:
        pid = between.process.pid
        os.kill(int(Path(f"/proc/{pid}/task/{pid}/children").read_text()), signal.SIGKILL)
        client = Client(between)
        for _ in range(3):
            client.sync(pair())
        assert client.checksums() == digests(pair())
        await_true(lambda: "nothing is written down any more" in between.stderr())
        assert between.stop() == 0


@pytest.mark.long
@pytest.mark.parametrize(("fault", "code"), [("", 0), ("never releases", 1)])
def test_judge_runs_a_trainer_through_the_forwarder(tmp_path, fault, code):
    weights = tmp_path / "weights.pt"
    torch.save({"a": torch.ones(4), "b": torch.zeros(2, 3)}, weights)
    with Faulty(tmp_path, "cpu:0") as faulty, faulty.fault(fault):
        command = f"{sys.executable} trainer.py {{url}} --checkpoint {weights} --device cpu"
        options = ["--forward", faulty.url, "--judge", command]
        ended = subprocess.run(
            [sys.executable, "server.py", *options], capture_output=True, text=True, timeout=90, cwd=ROOT
        )
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert ("server broke export.released" if code else "nothing found") in ended.stdout.splitlines()[-1]


# --- Long: everything that the judge knows, from outside ------------------------------------------------

INSIDE_ONLY = {"loan.until-reply", "loan.until-finish", "workers.same-bytes", "handle.opens", "weights.fit"}
INSIDE_ONLY |= {"init.first"}  # the server was there before the forwarder


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int, bool], Between]]:
    """The forwarder before a server of so many workers, that is slow or not; started when first asked for."""
    folder = tmp_path_factory.mktemp("before")
    with contextlib.ExitStack() as stack:

        @functools.cache
        def between(workers: int, slow: bool) -> Between:
            devices = ",".join(f"cpu:{at}" for at in range(workers))
            upstream = stack.enter_context(
                Faulty(folder, devices, "--hold-seconds", str(HOLD if slow else 0))
            )
            return stack.enter_context(Between(folder, upstream))

        yield between


def await_opened(t: Trainer) -> None:
    """Until the server has mapped all that is lent."""
    files = [args[7][4:] for args in t.loans if args[7] and args[7].startswith(b"cpu:")]
    maps = Path(f"/proc/{t.between.upstream.process.pid}/maps")
    await_true(lambda: all(file in maps.read_bytes() for file in files))


class Mutated(Trainer):
    """Waits for the server's mapping: behind a forwarder it tells nobody when it has looked."""

    def update_and(self, info: dict[str, Any], write: Callable[[], Any]) -> None:
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(self.update, info)
            await_opened(self)
            write()
            assert not reply.done()
            ok(reply.result())


@pytest.mark.long
@pytest.mark.parametrize(("rule_id", "mutant"), list(itertools.chain(*MUTANTS.values())))
def test_a_mutant_is_named_from_outside_as_far_as_it_shows(before, rule_id, mutant):
    with visit(before(mutant.workers, mutant.slow), Mutated) as t:
        ok(t.post(START)), ok(t.finish())  # from here on it is known that no update is open
        mutant.run(t)
        broken, hidden = (
            {rule_id, *mutant.besides},
            INSIDE_ONLY | {"export.kept"},
        )  # 0 after an unpacked update
        if mutant.workers == 1:  # with an entry for one GPU: who knows whether it is the right one
            hidden |= {"handle.this-gpu"}
        expected = {("trainer", rule) for rule in broken - hidden}
        if broken & hidden & {"handle.opens", "weights.fit", "handle.this-gpu"}:
            expected |= {("unclear", "refusal.explained")}
        assert t.found() == expected


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("seed", range(300, 340))
def test_correct_trainers_are_accused_of_nothing_from_outside(before, workers, seed):
    with visit(before(workers, False)) as t:
        correct = test_judge.Correct(t, seed)
        for _ in range(3):
            correct.sync()
        assert protocol.check(t.transcript()) == [], correct.log


@pytest.mark.long
def test_counters_on_another_mount_are_said_to_be_unseen(tmp_path):
    change = f"ipc_codec.SHM = {str(tmp_path / 'nowhere')!r}"
    with Faulty(tmp_path, "cpu:0") as faulty, Between(tmp_path, faulty, change) as between:
        client = Client(between)
        with faulty.fault("never releases"):
            client.sync(pair())
        assert between.stop() == 0
        client.settle()
        assert found(between.lines()) == NOTHING
        assert verdict(between).count("reference counters are not observable") == 1


@pytest.mark.long
@both_modes
def test_a_server_that_is_killed_in_mid_update_is_named(tmp_path, packed):
    with Faulty(tmp_path, "cpu:0", "--hold-seconds", "30") as faulty, Between(tmp_path, faulty) as between:
        t = Trainer(between)
        t.begin(packed)
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(t.update, t.info(pair(), packed))
            await_opened(t)
            faulty.process.kill()
            assert "hung up without an answer" in error(reply.result(), 502, "BadGatewayError", None)
        assert between.stop() == 0
        assert found(between.lines(t.began)) == {("server", "refusal.explained")}
        t.give_up()
