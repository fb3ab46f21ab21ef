"""Trainer and server killed at every station of a tensor's journey: what the survivor does, and the next run.

Both are the real programs, each in a process of its own. They are forked off a nursery, this file run as a
program, that has imported them already; all that a child has besides is that it stops at the stations it is
told, and says so: a kill hits exactly there. First what runs in the children, then what the tests do with
them, then the tests: kills of the trainer, of the server, a server that hangs, programs that start others.
`pytest -m long -n 0 -s tests/test_kills.py` plays every combination, and prints a line for each.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import http.client
import itertools
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests
import torch

import ipc_codec
import server
import trainer
from test_roundtrip import digests, environment, model

ROOT = Path(trainer.__file__).resolve().parent
MARK = "WEIGHT_SYNC_TEST_KILL"  # in the environment of everything that a child starts
SIGKILL, SIGTERM, SIGINT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT

# The stations of the README, what stops there, and whose they are; in the order of an unpacked sync.
STATIONS = {
    "1 begins": "trainer",
    "2 copied": "trainer",  # unpacked: about to be; packed: the buffer is filled, and not drained
    "3 exported": "trainer",  # the first of three; packed: the buffer
    "4 described": "trainer",
    "start": "server",  # it has opened the update; packed, this comes before 2
    "5 encoded": "trainer",
    "6 asks": "trainer",
    "6 half sent": "trainer",  # the headers without the body
    "7 arrived": "server",
    "8 decoded": "server",
    "9 opened": "server",  # the first of three; packed: the buffer
    "10 copied": "server",
    "11 synchronized": "server",
    "11 answered": "trainer",
    "12 asks": "trainer",
    "12 asked": "server",
    "12 released": "server",
    "12 answered": "trainer",
}


# --- In the children: programs that stop at stations --------------------------------------------------


Only = Callable[..., bool]


def always(*_: Any) -> bool:
    return True


def of(word: str) -> Only:
    """Whether a call has that argument."""
    return lambda *args: word in args


class Leash:
    """A child's end of the socket to its test."""

    def __init__(self, end: int):
        self.end = end
        self.stops: list[str] = []  # a station that is here twice is stopped at the second time

    def say(self, text: str) -> None:
        os.write(self.end, text.encode())

    def hear(self) -> str:
        return os.read(self.end, 100).decode() or os._exit(1)  # the test is gone

    def reached(self, station: str) -> None:
        """Where the test wants it: says so, and stays until it may go on."""
        while select.select([self.end], [], [], 0)[0]:
            self.stops.append(self.hear())
        if station in self.stops:
            self.stops.remove(station)
            if station not in self.stops:
                self.say(station)
                self.hear()

    def stop(self, station: str, owner: Any, name: str, only: Only = always, after: bool = True) -> None:
        """The station is reached after a call of this function, or before it; `only` sees its arguments."""
        real = getattr(owner, name)

        def stopping(*args: Any, **named: Any) -> Any:
            here = only(*args)
            if here and not after:
                self.reached(station)
            result = real(*args, **named)
            if here and after:
                self.reached(station)
            return result

        setattr(owner, name, stopping)


def trainer_on(leash: Leash) -> Callable[[], Any]:
    client, connection = trainer.HTTPWeightSyncClient, http.client.HTTPConnection
    leash.stop("1 begins", trainer, "send_weights", after=False)
    leash.stop("1 begins", trainer, "send_weights_packed", after=False)
    if "--packed" in sys.argv:
        leash.stop("2 copied", trainer.PackedBuffer, "write")
    else:
        leash.stop("2 copied", ipc_codec, "wire_form", after=False)
    leash.stop("3 exported", ipc_codec, "_export")
    leash.stop("4 described", trainer.Updates, "lend")
    leash.stop("5 encoded", ipc_codec, "encode_handles")
    leash.stop("6 asks", client, "call", of("update_weights"), after=False)
    leash.stop("6 half sent", connection, "send", lambda _, data: data[:14] == b'{"update_info"', after=False)
    leash.stop("11 answered", client, "call", of("update_weights"))
    leash.stop("12 asks", client, "call", of("finish_weight_update"), after=False)
    leash.stop("12 answered", client, "call", of("finish_weight_update"))
    leash.stop("waits", connection, "getresponse", after=False)
    return trainer.main


def server_on(leash: Leash) -> Callable[[], Any]:
    leash.stop("start", server.WeightTransferEngine, "start_weight_update")
    leash.stop("7 arrived", server.App, "answer", of("/update_weights"), after=False)
    leash.stop("8 decoded", ipc_codec, "decode_handles")
    leash.stop("9 opened", server.Worker, "open")
    leash.stop("10 copied", server.Worker, "copy")
    leash.stop("11 synchronized", server.Worker, "synchronize")
    leash.stop("12 asked", server.WeightTransferEngine, "finish_weight_update", after=False)
    leash.stop("12 released", server.WeightTransferEngine, "finish_weight_update")
    return server.main


def become(program: str, words: list[str], token: str, end: int, out: int, err: int) -> Any:
    """What a forked child does: the program, on a leash, in a session of its own; a SIGINT interrupts it."""
    os.setsid()
    ctypes.CDLL(None).prctl(1, SIGKILL)  # PR_SET_PDEATHSIG: it ends with the nursery
    signal.signal(SIGINT, signal.default_int_handler)
    for fd, number in ((out, 1), (err, 2)):
        os.dup2(fd, number)
        os.close(fd)
    os.set_inheritable(end, False)
    os.environ[MARK] = token
    sys.argv = [f"{program}.py", *words]
    leash = Leash(end)
    code = {"trainer": trainer_on, "server": server_on}[program](leash)()
    lent = [1 for name, slot in ipc_codec._lent if ipc_codec._counter_files[name][slot]]
    leash.say(f"lent {len(lent)}")  # what is kept to be lent again is not
    return code


def nursery(line: socket.socket) -> Any:
    """Forks a child at every order and answers its pid, or a dead one's exit code; ends with the socket."""
    gc.freeze()  # so that a child's last collection does not copy all pages of torch
    while True:
        text, fds, *_ = socket.recv_fds(line, 1 << 16, 3)
        if not text:
            return 0
        order = json.loads(text)
        if isinstance(order, int):
            answer = os.waitstatus_to_exitcode(os.waitpid(order, 0)[1])
        elif not (answer := os.fork()):
            line.close()
            return become(*order, *fds)
        for fd in fds:
            os.close(fd)
        line.send(str(answer).encode())


# --- In the test: the nursery's other side ------------------------------------------------------------


class Nursery:
    """The process that children are forked off, and all children there were."""

    def __init__(self) -> None:
        self.line, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.children: list[Child] = []
        self.token = uuid.uuid4().hex
        self.kept: Server | None = None
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(its.fileno())],
            pass_fds=[its.fileno()],
            cwd=ROOT,
            env=environment(gate=True) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        its.close()
        self.line.settimeout(60)

    def ask(self, order: Any, *fds: int) -> int:
        socket.send_fds(self.line, [json.dumps(order).encode()], fds)
        return int(self.line.recv(100))

    @contextlib.contextmanager
    def survivor(self) -> Iterator[Server]:
        """A server that holds NEXT: the same one for all tests, as long as none has failed."""
        running = self.kept or Server(self)
        if self.kept is None:
            for mode in MODES:
                sync(running, mode)
            assert running.comes_to_rest()
        self.kept = None
        yield running
        self.kept = running

    def close(self) -> None:
        """The children that are left are killed with it."""
        self.line.close()
        self.process.wait(10)


class Ended(NamedTuple):
    code: int
    out: str
    err: str
    lent: int | None  # how many exports it had not got back; None where it was killed
    seconds: float  # from the last signal, or its start


class Child:
    """trainer.py or server.py in a process of its own."""

    def __init__(self, home: Nursery, program: str, *words: Any, stops: tuple[str, ...] = ()):
        self.home, self.token = home, f"{home.token}.{len(home.children)}."
        self.out, self.err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.leash, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.stop_at(*stops)
        order = [program, [str(word) for word in words], self.token]
        self.pid = home.ask(order, its.fileno(), self.out.fileno(), self.err.fileno())
        its.close()
        home.children.append(self)
        self.since, self.ended = time.monotonic(), False

    def stop_at(self, *stations: str) -> None:
        for station in stations:
            self.leash.send(station.encode())

    def hear(self, seconds: float = 20) -> str:
        """What it says; empty where it has ended."""
        self.leash.settimeout(seconds)
        while True:
            try:
                return self.leash.recv(100).decode()
            except ConnectionResetError:  # it has not read all that it was told
                continue

    def await_at(self, station: str) -> None:
        assert self.hear() == station, said(self.err)

    def go_on(self) -> None:
        self.leash.send(b"go on")

    def send(self, by: signal.Signals, group: bool = False) -> None:
        self.since = time.monotonic()
        os.killpg(self.pid, by) if group else os.kill(self.pid, by)

    def end(self, seconds: float = 15) -> Ended:
        """Waits for its end, that long from now at most."""
        began, lent = self.since, None
        while word := self.hear(seconds):
            lent = int(word.removeprefix("lent "))
        code = self.home.ask(self.pid)
        self.ended = True
        ended = Ended(code, said(self.out), said(self.err), lent, time.monotonic() - began)
        for file in (self.leash, self.out, self.err):
            file.close()
        return ended

    def started(self) -> set[int]:
        """The processes that it has started, and those these have started."""
        return started_by(self.token)


def started_by(token: str) -> set[int]:
    """Of a child, or of all children of a nursery; a child itself is forked, and does not show the mark."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={token}".encode() in (entry / "environ").read_bytes():
                found.add(int(entry.name))
        except OSError:
            continue  # it has just ended, or is not ours
    return found


def said(file: Any) -> str:
    file.seek(0)
    return file.read()


def until(condition: Callable[[], Any], seconds: float = 10.0) -> bool:
    """Whether the condition came true within that time."""
    end = time.monotonic() + seconds
    while not (found := bool(condition())) and time.monotonic() < end:
        time.sleep(0.01)
    return found


def files_of(pid: int) -> list[Path]:
    """Its shared-memory files."""
    return list(Path(ipc_codec.SHM).glob(f"torch_{pid}_*"))


class Server(Child):
    """A server, and what can be seen of it from outside."""

    def __init__(self, home: Nursery, *options: str, port: int = 0):
        super().__init__(home, "server", "--device", "cpu", "--port", port, *options)
        ready = re.compile(r"listening on (http://127\.0\.0\.1:(\d+))\n")
        assert until(lambda: ready.match(said(self.out)), 20), said(self.err)
        words = ready.match(said(self.out))
        assert words
        self.url, self.port = words[1], int(words[2])
        self.at_rest = self.footprint()

    def footprint(self) -> tuple[int, int, int]:
        """(descriptors, threads, connections whose requests it has not all dealt with)."""
        here, established, half_closed = f":{self.port:04X}", "01", "08"
        rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        open_ones = [row for row in rows if row[1].endswith(here) and row[3] in (established, half_closed)]
        mine = Path(f"/proc/{self.pid}")
        return len(list((mine / "fd").iterdir())), len(list((mine / "task").iterdir())), len(open_ones)

    def comes_to_rest(self) -> bool:
        """Whether it soon has the descriptors and threads it started with, and nothing more to answer."""
        return until(lambda: self.footprint() == self.at_rest)

    def is_stopped(self) -> bool:
        """Whether a SIGSTOP has got to all of its threads."""
        stats = [stat.read_text() for stat in Path(f"/proc/{self.pid}/task").glob("*/stat")]
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    def maps_memory_of(self, pid: int) -> bool:
        return f"/torch_{pid}_" in Path(f"/proc/{self.pid}/maps").read_text()

    def ask(self, method: str, path: str, **body: Any) -> requests.Response:
        with requests.Session() as http:
            http.trust_env = False
            return http.request(method, self.url + path, json=body or None, timeout=10)

    def version(self) -> str:
        return self.ask("GET", "/weight_info").json()["weight_version"]

    def holds(self) -> dict[str, str]:
        """The checksum of every weight on its one worker."""
        table = self.ask("POST", "/weight_checker", action="checksum").json()["checksums"]
        return {key.removeprefix("dp0:pp0:pcp0:tp0:"): digest for key, digest in table.items()}


# --- What a kill is, and what is to follow ------------------------------------------------------------

BUFFER = 24  # bytes: three chunks, for weights of 24, 6 and 20
KILLED, NEXT = model(seed=1), model(seed=2)  # what the trainer that dies has, and the one after it
MODES = ("unpacked", "packed", "second chunk")  # of a packed sync: stopped in its first chunk, or its second
ONCE = (
    "1 begins",
    "3 exported",
    "4 described",
    "start",
    "12 asks",
    "12 asked",
    "12 released",
    "12 answered",
)  # a sync


class Kill(NamedTuple):
    """Who is killed, how, and when: somebody is at that station of a sync in that mode."""

    victim: str
    by: signal.Signals
    station: str
    mode: str

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.station,) * (2 if self.mode == "second chunk" else 1)

    @property
    def told(self) -> bool:
        """Whether the trainer has begun an update, or does before it knows: what is lent may then be read.

        A trainer that outlives its server learns of the death at the next call.
        """
        before = ["1 begins", "3 exported", "4 described", "start"]
        before += ["2 copied"] * (self.mode == "unpacked" or self.victim == "trainer")
        return self.mode == "second chunk" or self.station not in before

    @property
    def lends(self) -> int:
        """How many exports the trainer cannot have back: what the server, for all it knows, still reads."""
        if not self.told or self.station in ("12 released", "12 answered"):
            return 0
        if self.mode != "unpacked":
            return 1
        return 0 if self.station in ("11 answered", "12 asks", "12 asked") else 3

    @property
    def started(self) -> bool:
        """Whether its update is open on the server: packed, it is before the buffer is filled."""
        early = ("start",) if self.mode == "unpacked" else ("start", "2 copied")
        return self.told or self.station in early

    @property
    def finished(self) -> bool:
        """Whether its finish gets to the server."""
        return self.station in ("12 asked", "12 released", "12 answered")

    @property
    def refused(self) -> bool:
        """Whether the server then finds the memory gone: a trainer that ends in order takes it along."""
        return self.by != SIGKILL and self.station in ("7 arrived", "8 decoded")

    @property
    def left_open(self) -> bool:
        """Whether the server, when the trainer is dead, has an update open that nobody will finish."""
        return self.started and not self.finished and not self.refused


def diagonal() -> list[Kill]:
    """Each number of the journey once, with alternating victims and modes; other signals in a long run."""
    numbered = {station.split()[0]: station for station in STATIONS if station != "start"}.values()
    return [
        Kill(("trainer", "server")[i % 2], SIGKILL, station, MODES[i // 2 % 2])
        for i, station in enumerate(numbered)
    ]


def kills(victim: str, signals: tuple[signal.Signals, ...] = (SIGKILL, SIGTERM, SIGINT)) -> list[Any]:
    """All of them; those that are not on the diagonal are for a long run."""
    every = itertools.product([victim], signals, STATIONS, MODES)
    all_kills = [Kill(*kill) for kill in every if not (kill[3] == "second chunk" and kill[2] in ONCE)]
    return [
        pytest.param(kill, id=f"{kill.by.name}, {kill.station}, {kill.mode}", marks=marks_of(kill))
        for kill in all_kills
    ]


def marks_of(kill: Kill) -> list[pytest.MarkDecorator]:
    return [pytest.mark.long] * (kill not in diagonal())


@pytest.fixture(scope="module")
def home() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kills") / "killed.pt"
    torch.save(KILLED, path)
    return path


def trainer_of(home: Nursery, url: str, checkpoint: Path, kill: Kill, timeout: float = 20) -> Child:
    """A trainer that sends KILLED in that mode. It stops at the kill's station, if that is a trainer's."""
    stops = kill.stops if STATIONS[kill.station] == "trainer" else ()
    packed = () if kill.mode == "unpacked" else ("--packed", "--packed-buffer-size-bytes", BUFFER)
    fixed = ("--checkpoint", checkpoint, "--device", "cpu", "--weight-version", "killed")
    return Child(home, "trainer", url, *fixed, "--timeout", timeout, *packed, stops=stops)


def sync(running: Server, mode: str) -> list[str]:
    """The next run: a whole sync of NEXT from here, without help. What it said meanwhile."""
    client, lent = trainer.HTTPWeightSyncClient(running.url, 20), len(ipc_codec._lent)
    lines: list[str] = []
    more: dict[str, Any] = {"device": "cpu:0", "weight_version": "next", "start_wait": 0.1}
    more["progress"] = lines.append
    client.init_weight_transfer_engine({"packed": mode != "unpacked"})
    if mode == "unpacked":
        trainer.send_weights(client, NEXT, **more)
    else:
        trainer.send_weights_packed(client, NEXT, BUFFER, **more)
    client._http.close()
    assert running.holds() == digests(NEXT) and running.version() == "next"
    assert len(ipc_codec._lent) == lent
    return lines


PROGRESS = re.compile(r"chunk \d/3|\d+ tensors? stays? lent: .*|a buffer of 24 bytes stays lent: .*")


def sentence(ended: Ended) -> tuple[str, bool]:
    """The one sentence on stderr, and whether a line before it says that something stays lent."""
    *progress, last = ended.err.splitlines()
    assert last.startswith("trainer.py: ") and all(map(PROGRESS.fullmatch, progress)), ended.err
    return last.removeprefix("trainer.py: "), any("lent" in line for line in progress)


def report(kill: Kill, **seen: Any) -> None:
    """A line of the long run's table."""
    print(json.dumps({**kill._asdict(), "by": kill.by.name, **seen}))


# --- The trainer dies ---------------------------------------------------------------------------------


def ends_by(kill: Kill, ended: Ended) -> None:
    """It was killed, or it ended as an interrupted trainer does: at once, with one sentence and no file."""
    if kill.by == SIGKILL:
        assert ended.code == -SIGKILL
        return
    said_last, says_lent = sentence(ended)
    assert (ended.code, said_last) == (130, "interrupted") and ended.seconds < 10
    in_export = kill.station == "3 exported"  # interrupted before its caller had the handle
    assert ended.lent == (1 if in_export else kill.lends)
    assert in_export or says_lent or not ended.lent
    assert kill.told or not says_lent


def stop_somebody(kill: Kill, running: Server, sending: Callable[[], Child]) -> tuple[Child, Child]:
    """A trainer, and who of the two stands at the station."""
    if STATIONS[kill.station] == "server":
        running.stop_at(*kill.stops)
    sender = sending()
    stands = running if STATIONS[kill.station] == "server" else sender
    stands.await_at(kill.station)
    return sender, stands


def is_no_third(kill: Kill, holds: dict[str, str]) -> int:
    """Each tensor on the server is whole: the one before, or the dead trainer's. How many are the latter."""
    new = [name for name, digest in digests(KILLED).items() if holds[name] == digest]
    assert holds == digests(NEXT) | {name: digests(KILLED)[name] for name in new}
    assert len(new) in ((0, 3) if kill.mode == "unpacked" or kill.finished else range(3 + 1))
    return len(new)


@pytest.mark.parametrize("kill", kills("trainer"))
def test_a_server_outlives_its_trainer(home, checkpoint, kill):
    """It goes on, keeps no memory, descriptor or thread of the dead one, and no mix passes for a version."""
    with home.survivor() as survivor:
        dying, stands = stop_somebody(
            kill, survivor, lambda: trainer_of(home, survivor.url, checkpoint, kill)
        )
        assert survivor.ask("GET", "/health").status_code == 200
        dying.send(kill.by)
        ends_by(kill, ended := dying.end())
        assert kill.by == SIGKILL or not files_of(dying.pid)
        if stands is survivor:
            survivor.go_on()
        assert survivor.comes_to_rest()
        assert survivor.ask("GET", "/health").status_code == 200
        keeps = survivor.maps_memory_of(dying.pid)
        assert not keeps or (kill.mode != "unpacked" and kill.left_open)
        assert survivor.version() == ("killed" if kill.finished else "next")
        new = is_no_third(kill, survivor.holds())
        lines = sync(survivor, kill.mode)
        waited = any("another trainer may be at it" in line for line in lines)
        assert waited == kill.left_open, lines
        assert not survivor.maps_memory_of(dying.pid) and "Traceback" not in said(survivor.err)
        assert survivor.comes_to_rest()
    seen = {"new on the server": new, "mapped until the next": keeps, "next closed it": waited}
    report(kill, code=ended.code, lent=ended.lent, **seen)


# --- The server dies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kill", kills("server"))
def test_a_trainer_outlives_its_server(home, checkpoint, kill):
    """It ends soon, with one sentence, says what it has not got back, and leaves no file; both can go on."""
    dying = Server(home)
    survivor, stands = stop_somebody(kill, dying, lambda: trainer_of(home, dying.url, checkpoint, kill))
    dying.send(kill.by)
    ended_server = dying.end()
    assert ended_server.code == (-SIGKILL if kill.by == SIGKILL else 0)
    assert "Traceback" not in ended_server.err and "Fatal" not in ended_server.err
    survivor.since = time.monotonic()
    if stands is survivor:
        survivor.go_on()
    ended = survivor.end()
    last, says_lent = sentence(ended)
    assert ended.code == 1 and f": no answer from {dying.url}: " in last and ended.seconds < 10
    ended_in_order = kill.by != SIGKILL  # then the server has released what it had opened
    assert ended.lent == kill.lends or (ended_in_order and ended.lent < kill.lends)
    assert says_lent if ended.lent else kill.told or not says_lent
    files = len(files_of(survivor.pid))
    again = Server(home, port=dying.port)
    assert not any("another trainer" in line for line in sync(again, kill.mode))
    again.send(SIGKILL)
    again.end()
    seen = {"says_lent": says_lent, "files at its end": files, "seconds": ended.seconds}
    report(kill, code=ended.code, said=last, lent=ended.lent, **seen)


# --- The server hangs ---------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("kill", kills("server", (signal.SIGSTOP,)))
def test_a_server_that_hangs_costs_a_time_out_and_serves_the_next_one(home, checkpoint, kill):
    """Stopped whole at a station, and let go when the trainer has given up: it finds memory that is gone."""
    with home.survivor() as survivor:
        stuck, stands = stop_somebody(
            kill, survivor, lambda: trainer_of(home, survivor.url, checkpoint, kill, timeout=1)
        )
        survivor.send(signal.SIGSTOP)
        assert until(survivor.is_stopped)
        if stands is stuck:
            stuck.go_on()
        ended = stuck.end()
        last, says_lent = sentence(ended)
        assert ended.code == 1 and last.endswith(f": no answer from {survivor.url} within 1 s")
        assert ended.seconds < 10
        assert ended.lent == kill.lends and (says_lent if ended.lent else kill.told or not says_lent)
        assert until(lambda: not files_of(stuck.pid), 3)  # torch's manager process unlinks what is left
        survivor.send(signal.SIGCONT)
        if stands is survivor:
            survivor.go_on()
        assert survivor.comes_to_rest()
        lines = sync(survivor, kill.mode)
        assert not survivor.maps_memory_of(stuck.pid) and "Traceback" not in said(survivor.err)
        assert survivor.comes_to_rest()
    waited = any("another trainer may be at it" in line for line in lines)
    seen = {"says_lent": says_lent, "next closed it": waited, "seconds": ended.seconds}
    report(kill, code=ended.code, said=last, lent=ended.lent, **seen)


# --- Programs that start others -----------------------------------------------------------------------

# What the trainer waits for when it is killed: its server, or the answer to which of its requests.
LATER = {
    "completion": 5,  # after init, and start, update, finish
    "sync": 8,  # after these, and pause, start
}


@pytest.mark.parametrize("by", [SIGKILL, SIGTERM, SIGINT], ids=lambda by: by.name)
@pytest.mark.parametrize("place", ["start-up", *(pytest.param(p, marks=pytest.mark.long) for p in LATER)])
def test_the_server_of_a_trainer_goes_with_it(home, place, by):
    """Also where it is not up yet. A SIGINT is a terminal's: both get it."""
    options = ("--spawn-server", "--device", "cpu", "--steps", 2)
    dying = Child(home, "trainer", *options, stops=("waits",) * LATER.get(place, 0))
    if place in LATER:
        dying.await_at("waits")
    assert until(dying.started)
    dying.send(by, group=by == SIGINT)
    ended = dying.end()
    if by != SIGKILL:
        last, _ = sentence(ended)
        assert (ended.code, last) == (130, "interrupted")
        assert not files_of(dying.pid)
    at_once = 1 if place == "start-up" else 5  # later it has torch's manager process, which takes two seconds
    assert until(lambda: not dying.started(), at_once), dying.started()
    assert until(lambda: not files_of(dying.pid), 5)
    line = {"program": "trainer.py --spawn-server", "by": by.name, "place": place, **ended._asdict()}
    print(json.dumps(line))


@pytest.mark.parametrize("by", [SIGKILL, SIGTERM, SIGINT], ids=lambda by: by.name)
def test_a_judge_that_is_interrupted_takes_its_trainer_down_and_has_no_verdict(home, tmp_path, by):
    """A SIGTERM is sent to it alone, a SIGINT is a terminal's. Exit code 0 would say: nothing found."""
    options = ("--device", "cpu", "--transcript", tmp_path / "sync.jsonl")
    dying = Child(home, "server", *options, "--judge", "sleep 60")
    assert until(dying.started)
    dying.send(by, group=by == SIGINT)
    ended = dying.end()
    print(json.dumps({"program": "server.py --judge", "by": by.name, **ended._asdict()}))
    gone = until(lambda: not dying.started(), 1)
    for pid in dying.started():
        os.kill(pid, SIGKILL)
    assert gone and "Traceback" not in ended.err
    if by == SIGKILL:
        assert ended.code == -SIGKILL
    else:
        assert ended.code in (2, 130) and re.fullmatch(r"server\.py: .+\n", ended.err)


# --- What is left of them all -------------------------------------------------------------------------


def test_nobody_leaves_a_process_or_a_file(home, checkpoint):
    """Of all that died in the tests before, and of one that is killed here with all it can have."""
    dying = Server(home)
    dying.stop_at("10 copied")
    kill = Kill("both", SIGKILL, "10 copied", "packed")
    lender = trainer_of(home, dying.url, checkpoint, kill)
    dying.await_at(kill.station)
    assert files_of(lender.pid) and lender.started()
    for one in (lender, dying):
        one.send(SIGKILL)
        one.end()
    dead = [child.pid for child in home.children if child.ended]
    assert until(lambda: not started_by(home.token)), started_by(home.token)
    assert until(lambda: not any(map(files_of, dead))), list(map(files_of, dead))


if __name__ == "__main__":
    sys.exit(nursery(socket.socket(fileno=int(sys.argv[1]))))
