"""A body that is byte for byte one of the last good sync: it is not read again, and everything else holds.

First what the tests use: servers (one in this process, which says what it has decoded, and real ones), loans
that are renewed. Then a section a promise: values, rules, what is known and until when, memory that is gone,
envelopes, several workers.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ipc_codec
import protocol
import server as server_module
from ipc_codec import Exports, IpcArgs, PackedBuffer
from protocol import GATE, RULES, Session, UpdateInfo
from test_roundtrip import (
    FINISH,
    INIT,
    JSON,
    SHUTDOWN,
    START,
    UPDATE,
    Client,
    Server,
    bad_request,
    digests,
    nbytes,
    needs_cuda,
    needs_two_gpus,
    noise,
    ok,
    refused,
)

both_modes = pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
KINDS = ["here", "cpu:0", pytest.param("cuda:0", marks=needs_cuda)]
TWO = ["here", pytest.param("cuda:0,cuda:1", marks=needs_two_gpus)]


# --- Servers ------------------------------------------------------------------------------------------


class Here:
    """A server in this process, without a socket."""

    url, port = "", 0

    def __init__(self, devices: str, path: Path, strict: bool):
        self.devices, self.path = devices.split(","), path
        self.engine = server_module.WeightTransferEngine(server_module.parse_devices(devices), None, strict)
        self.engine.witness = self.witness = server_module.Witness(str(path), self.engine.workers)
        self.app = server_module.App(self.engine)


class Answer:
    """A reply, looked at as those of a socket are."""

    def __init__(self, reply: Any):
        self.status_code, self.body = reply.status, reply.body
        self.text = json.dumps(reply.body)

    def json(self) -> Any:
        return json.loads(self.text)


class Trainer(Client):
    """Speaks to either kind. `decoded` are the handles that a server in this process has read, in order."""

    def __init__(self, server: Any, decoded: list[str]):
        super().__init__(server)
        self.server, self.decoded, self.kept = server, decoded, []  # type: ignore[var-annotated]
        self.began = server.path.stat().st_size

    def send(self, method: str, path: str, data: Any = None, content_type: Any = None, **more: Any) -> Any:
        if not isinstance(self.server, Here):
            return super().send(method, path, data, content_type, **more)
        headers = {"content-type": content_type or ""} | more.get("headers", {})
        body = data.encode() if isinstance(data, str) else data or b""
        return Answer(self.server.app.answer(method, path, headers, body))

    def say(self, body: bytes, content_type: str | None = JSON, path: str = UPDATE) -> Any:
        return self.send("POST", path, body, content_type)

    def sync_of(self, *bodies: bytes, packed: bool = False) -> None:
        """A good sync of these."""
        self.begin(packed)
        for body in bodies:
            ok(self.say(body))
        ok(self.finish())

    def has_decoded(self, count: int) -> bool:
        """Whether that many handles were read since this was asked last."""
        found = len(self.decoded)
        self.decoded.clear()
        return found == count if isinstance(self.server, Here) else True

    def transcript(self) -> list[Any]:
        lines = self.server.path.read_bytes()
        header, ours = lines.split(b"\n", 1)[0], lines[self.began :]
        return [json.loads(header), *map(json.loads, ours.splitlines())]

    def found(self) -> set[tuple[str, str]]:
        return {(finding.party, finding.rule.id) for finding in protocol.check(self.transcript())}


class Loan:
    """Weights that are lent to all workers of a server, and what an update says of them."""

    def __init__(self, client: Trainer, weights: Mapping[str, Tensor], packed: bool = False, room: int = 0):
        self.names, self.packed, self.devices = list(weights), packed, client.devices
        self.buffers = [PackedBuffer(room or nbytes(weights), d) for d in self.devices] if packed else []
        self.mine = [{n: on(d, w) for n, w in weights.items()} for d in self.devices] if not packed else []
        self.exports = [b.exports for b in self.buffers] or [Exports() for _ in self.devices]
        self.info: dict[str, Any] = client.described(weights)
        self.info |= {"tensor_sizes": [w.nbytes for w in weights.values()]} if packed else {}
        client.kept.append(self)
        if packed:
            self.info["ipc_handles_pickled"] = protocol.merge_handles([b.export() for b in self.buffers])
        else:
            lent = [e.lend(m, d) for e, m, d in zip(self.exports, self.mine, self.devices, strict=True)]
            self.info["ipc_handles_pickled"] = protocol.merge_handles(lent)
        self.fill(weights)
        self.body = json.dumps({"update_info": client.encoded(self.info)}).encode()

    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Writes these values where the ones before were."""
        for buffer in self.buffers:
            buffer.fill([on(str(buffer.device), weight) for weight in weights.values()])
            buffer.drain()
        for lent in self.mine:
            for name, weight in weights.items():
                lent[name].view(torch.uint8).copy_(weight.view(torch.uint8))
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def again(self, weights: Mapping[str, Tensor] | None = None) -> bytes:
        """The loan is renewed, with these values. The body, as it was."""
        assert all(exports.renew() for exports in self.exports)
        self.fill(weights or {})
        return self.body

    @property
    def args(self) -> list[tuple]:
        return [args for e in self.exports for handle in e.handles for args in handle.values()]

    @property
    def counters(self) -> set[int | None]:
        return set(ipc_codec.ref_counts(self.args))

    def end(self) -> None:
        """What is lent still is lent to nobody, and nothing will be again."""
        ipc_codec.settle(*self.args)
        for exports in self.exports:
            exports.forget()
        self.buffers, self.mine = [], []
        ipc_codec.ipc_collect()


def on(device: str, weight: Tensor) -> Tensor:
    return weight.to(device) if device.startswith("cuda") else weight.clone()


def start(kind: str, path: Path, *options: str) -> Any:
    if kind == "here":
        workers = "cpu:0,cpu:1" if "two" in path.name else "cpu:0"
        return Here(workers, path, "--strict" in options)
    running = Server(kind, "--transcript", str(path), *options).__enter__()
    running.path = path  # type: ignore[attr-defined]
    return running


def end(running: Any) -> None:
    if isinstance(running, Here):
        running.witness.file.close()
    else:
        running.__exit__()


@pytest.fixture(scope="module", params=KINDS)
def strict_server(request: Any, tmp_path_factory: Any) -> Iterator[Any]:
    running = start(request.param, tmp_path_factory.mktemp("one") / "transcript.jsonl", "--strict")
    yield running
    end(running)


@pytest.fixture(scope="module", params=TWO)
def two_worker_server(request: Any, tmp_path_factory: Any) -> Iterator[Any]:
    running = start(request.param, tmp_path_factory.mktemp("two") / "two.jsonl")
    yield running
    end(running)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv(GATE, "1")
    found: list[str] = []
    decode = ipc_codec.decode_handles

    def recording(text: str) -> Any:
        found.append(text)
        return decode(text)

    monkeypatch.setattr(ipc_codec, "decode_handles", recording)
    return found


def visit(running: Any, decoded: list[str]) -> Iterator[Trainer]:
    """A trainer of an idle, unpacked server. What it lent is taken back after it."""
    client = Trainer(running, decoded)
    ok(client.init())
    yield client
    client.finish()
    for call in (START, FINISH, SHUTDOWN):
        ok(client.post(call))
    for loan in client.kept:
        loan.end()
    client.http.close()


@pytest.fixture
def client(strict_server: Any, decoded: list[str]) -> Iterator[Trainer]:
    yield from visit(strict_server, decoded)


@pytest.fixture
def two_workers(two_worker_server: Any, decoded: list[str]) -> Iterator[Trainer]:
    yield from visit(two_worker_server, decoded)


@pytest.fixture
def here(tmp_path: Path, decoded: list[str]) -> Iterator[Trainer]:
    """A trainer of a server of the test's own, in this process."""
    running = start("here", tmp_path / "transcript.jsonl", "--strict")
    yield from visit(running, decoded)
    end(running)


def model(seed: int) -> dict[str, Tensor]:
    """16, 6 and 2 bytes, aligned in a buffer, in no order of names; any bits: a NaN may have changed."""
    dtypes = {"b": (torch.float32, 2, 2), "c": (torch.bfloat16, 3), "a": (torch.float8_e5m2, 2)}
    return {name: noise(*spec, seed=seed) for name, spec in dtypes.items()}


def one(seed: int, name: str = "x", words: int = 4) -> dict[str, Tensor]:
    return {name: noise(torch.int32, words, seed=seed)}


# --- Values -------------------------------------------------------------------------------------------


@both_modes
def test_the_same_body_brings_the_values_of_now(client, packed):
    loan = Loan(client, model(0), packed)
    for seed in range(4):
        body = loan.again(model(seed)) if seed else loan.body
        client.begin(packed)
        ok(client.say(body), {"message": "Weights updated"})
        assert loan.counters == {1}, "it is open until the finish"
        ok(client.finish())
        assert loan.counters == {0}
        loan.fill(model(99))
        assert client.checksums() == digests(model(seed)), "what the server holds is its own"
    assert client.has_decoded(1)


@both_modes
def test_a_witness_writes_of_a_known_body_what_it_wrote_of_the_first(client, packed):
    loan = Loan(client, model(0), packed)
    client.sync_of(loan.body, packed=packed)
    client.sync_of(loan.again(model(1)), packed=packed)
    client.sync_of(loan.again(model(1)), packed=packed)
    _, *lines = client.transcript()
    syncs = [[line for line in lines if line["call"] == call] for call in ("update_weights", FINISH[1:])]
    for first, second, third in syncs:
        assert untimed(second) == untimed(third)
        assert without_digests(first) == without_digests(second)
        if first["call"] == "update_weights":
            assert first["handles"] == ipc_codec.describe_handles(loan.info["ipc_handles_pickled"])
            assert first["body"]["update_info"]["names"] == loan.info["names"]
            [mine] = second["seen"]["workers"]
            assert mine["arrival"] == mine["reply"] and len(mine["arrival"]) == 3
            assert mine["arrival"] != first["seen"]["workers"][0]["arrival"]
    assert client.found() == set() and client.has_decoded(1)


def untimed(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in ("began", "ended")}


def without_digests(line: dict[str, Any]) -> dict[str, Any]:
    """Of the digests how many there are."""
    columns = line["seen"]["workers"][0].items()
    counted = {k: len(v) if k in ("arrival", "reply", "finish") else v for k, v in columns}
    return untimed(line) | {"seen": counted}


def test_known_chunks_may_come_in_another_order_and_beside_new_ones(client):
    parts = [Loan(client, {name: weight}) for name, weight in model(1).items()]
    client.sync_of(*(part.body for part in parts))
    assert client.has_decoded(3)
    bodies = [part.again({name: model(2)[name]}) for part, name in zip(parts, "bca", strict=True)]
    new = Loan(client, one(2))
    client.sync_of(bodies[2], new.body, bodies[0], bodies[1])
    assert client.checksums() == digests(model(2) | one(2)) and client.has_decoded(1)
    other = Loan(client, one(3))  # a layout that is known, in other memory
    client.sync_of(other.body)
    assert client.checksums() == digests(model(2) | one(3)) and client.has_decoded(1)


def test_after_a_known_sync_a_name_keeps_its_dtype_and_shape(client):
    loan = Loan(client, one(1))
    client.sync_of(loan.body)
    client.sync_of(loan.again(one(2)))
    for other in (one(3, words=5), {"x": noise(torch.float32, 4)}):
        client.begin()
        assert "the server holds int32 [4]" in refused(client.say(Loan(client, other).body))
        assert client.checksums() == digests(one(2))


# --- Rules --------------------------------------------------------------------------------------------


class Looks(Session):
    """A session that remembers which of the things that an update leaves in it were looked at."""

    seen: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        if name in ("sent", "slots", "filled"):
            Looks.seen.add(name)
        return super().__getattribute__(name)


@both_modes
def test_what_is_judged_again_is_all_that_depends_on_the_updates_before(packed):
    """And nothing that depends on the layout alone looks at a handle."""
    args = [0] * protocol.ARGS
    args[protocol.TENSOR_SIZE], args[protocol.COUNTER] = [8], "file"
    handle = {"u": args}
    update = UpdateInfo(["a"], ["uint8"], [[1]], "text", [1], handles=handle if packed else [handle])
    for rule in protocol.MESSAGE_RULES["update_weights"]:
        session = Looks("u", protocol.UPDATING, packed, True, {"b"}, {("u", "file", 1)}, 1)
        Looks.seen = set()
        rule.violation(update, session)
        assert bool(Looks.seen) <= (rule.id in protocol.SYNC_RULES), rule.id
        if rule.applies(session):
            assert bool(Looks.seen) == (rule.id in protocol.SYNC_RULES), rule.id
    assert {RULES[id].call for id in protocol.SYNC_RULES | protocol.LAYOUT_RULES} == {"update_weights"}


@both_modes
def test_a_known_layout_twice_in_one_sync_is_refused_whatever_its_handles(client, packed):
    client.sync_of(Loan(client, one(1), packed).body, packed=packed)
    client.begin(packed)
    ok(client.say(Loan(client, one(2), packed).body))
    assert refused(client.say(Loan(client, one(3), packed).body)).startswith("names.unique: ")
    assert client.checksums() == digests(one(2))


def test_of_a_known_layout_a_handle_of_another_shape_or_dtype_is_refused(client):
    loan = Loan(client, one(1))
    client.sync_of(loan.body)
    for other in (one(2)["x"].view(2, 2), one(2)["x"].view(torch.float32)):
        client.begin()
        handles = Loan(client, {"x": other}).info["ipc_handles_pickled"]
        said = refused(client.update(loan.info | {"ipc_handles_pickled": handles}))
        assert said.startswith("unpacked.handle-matches: ")
    assert client.checksums() == digests(one(1))


@both_modes
@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
def test_the_same_body_twice_in_one_sync_is_refused(client, packed, known):
    loan = Loan(client, model(1), packed)
    if known:
        client.sync_of(loan.body, packed=packed)
        loan.again(model(2))
    client.begin(packed)
    ok(client.say(loan.body))
    assert refused(client.say(loan.body)).startswith("names.unique: ")
    assert client.checksums() == digests(model(1 + known)) and loan.counters == {0}
    assert client.has_decoded(1 if known else 2)


def test_a_known_body_on_an_export_of_this_sync_is_refused_under_strict(client):
    loan = Loan(client, one(1))
    client.sync_of(loan.body)
    loan.again(one(2))
    client.begin()
    ok(client.update(loan.info | {"names": [client.prefix + "another name"]}))
    assert refused(client.say(loan.body)).startswith("unpacked.own-export: ")
    assert client.checksums() == digests(one(1) | one(2, "another name")) and loan.counters == {0}


def test_a_known_chunk_on_another_buffer_is_refused_under_strict(client):
    first, other = Loan(client, one(1), packed=True), Loan(client, one(2, "y"), packed=True)
    client.sync_of(first.body, packed=True)
    client.begin(packed=True)
    ok(client.say(other.body))
    assert refused(client.say(first.again())).startswith("packed.one-export: ")
    assert client.checksums() == digests(one(1) | one(2, "y")) and client.has_decoded(2)


def test_a_known_chunk_after_one_that_was_closed_early_is_refused_under_strict(client):
    loan = Loan(client, one(1), packed=True, room=64)
    little = loan.info | client.described(one(0, "y", words=1)) | {"tensor_sizes": [4]}
    client.sync_of(loan.body, packed=True)
    loan.again(one(2))
    client.begin(packed=True)
    ok(client.update(little))
    assert refused(client.say(loan.body)).startswith("packed.chunk-full: ")
    assert client.checksums()["x"] == digests(one(1))["x"]


@both_modes
def test_a_body_that_is_known_in_one_mode_is_judged_in_the_other(client, packed):
    loan = Loan(client, model(1), packed)
    client.sync_of(loan.body, packed=packed)
    loan.again(model(2))
    client.begin(not packed)
    assert "handles" in refused(client.say(loan.body))
    assert client.checksums() == digests(model(1)) and loan.counters == {1}
    ok(client.post(SHUTDOWN))
    client.has_decoded(0)
    client.sync_of(loan.body, packed=packed)
    assert client.checksums() == digests(model(2)) and client.has_decoded(0)


def test_a_layout_that_is_known_unpacked_is_judged_packed_and_the_reverse(client):
    unpacked, packed = Loan(client, one(1)), Loan(client, one(2), packed=True)
    client.sync_of(unpacked.body)
    client.begin(packed=True)
    without = {key: value for key, value in packed.info.items() if key != "tensor_sizes"}
    assert refused(client.update(without)).startswith("packed.tensor-sizes: ")
    client.sync_of(packed.body, packed=True)
    client.begin()
    both = unpacked.info | {"tensor_sizes": packed.info["tensor_sizes"]}
    assert refused(client.update(both)).startswith("unpacked.no-tensor-sizes: ")
    assert client.checksums() == digests(one(2))


def test_a_known_body_comes_between_start_and_finish(client):
    loan = Loan(client, one(1))
    client.sync_of(loan.body)
    loan.again(one(2))
    assert refused(client.say(loan.body)).startswith("update.after-start: ")
    assert client.checksums() == digests(one(1)) and loan.counters == {1}


@both_modes
def test_a_known_body_is_not_read_or_judged_again_but_for_what_may_have_another_answer(
    here, packed, monkeypatch
):
    done: list[str] = []

    def spy(where: Any, name: str, says: Any = None) -> None:
        real = getattr(where, name)

        def spying(*args: Any, **more: Any) -> Any:
            done.append(says(*args) if says else name)
            return real(*args, **more)

        monkeypatch.setattr(where, name, spying)

    loan = Loan(here, model(1), packed)
    spy(json, "loads")
    spy(ipc_codec, "check_exports")
    spy(ipc_codec, "check_memory")
    spy(server_module.Worker, "_check_fit")
    spy(protocol.Rule, "violation", lambda rule, *_: rule.id)
    judged = {rule.id for rule in protocol.MESSAGE_RULES["update_weights"]}
    once = {"loads", "check_exports", "_check_fit", "check_memory"}
    here.begin(packed)
    for at, expected in enumerate([judged | once, protocol.SYNC_RULES | {"check_memory"}]):
        done.clear()
        assert here.say(loan.again(model(2)) if at else loan.body).status_code == 200
        assert {*done} == expected | ({"check_exports"} if packed else set()), "the witness looks by itself"
        here.finish()
        here.post(START)
    assert here.has_decoded(1)


# --- What is known, and until when --------------------------------------------------------------------


@both_modes
def test_of_a_failed_sync_nothing_is_known_but_of_the_last_good_one_all(client, packed):
    """That is safe: a name keeps its shape, and whether its memory is there is looked at each time."""
    loans = [Loan(client, one(1, name), packed) for name in "xyz"]
    x, y, z = loans
    client.sync_of(x.body, packed=packed)
    assert client.has_decoded(1)
    client.begin(packed)
    ok(client.say(x.again(one(2, "x"))))
    if not packed:  # strict: a second buffer is refused
        ok(client.say(y.body))
    refused(client.say(z.body.replace(b'"int32"', b'"int33"')))
    assert client.has_decoded(1 if packed else 2)
    if isinstance(client.server, Here):
        assert client.server.engine.mixed
    for seed, (loan, name, decodes) in enumerate([(x, "x", 0), (y, "y", 1), (y, "y", 0), (x, "x", 1)], 3):
        ipc_codec.settle(*loan.args)
        client.sync_of(loan.again(one(seed, name)), packed=packed)
        assert client.checksums()[name] == digests(one(seed))["x"]
        assert client.has_decoded(decodes), "only of the last good sync"


@both_modes
def test_after_a_failed_sync_what_was_known_before_it_still_is(client, packed):
    loan = Loan(client, model(1), packed)
    client.sync_of(loan.body, packed=packed)
    client.begin(packed)
    refused(client.say(b'{"update_info": {}}'))
    client.has_decoded(0)
    client.sync_of(loan.again(model(2)), packed=packed)
    assert client.checksums() == digests(model(2)) and client.has_decoded(0)


def test_an_empty_sync_ends_what_was_known(client):
    loan = Loan(client, one(1))
    client.sync_of(loan.body)
    client.sync_of()
    client.sync_of(loan.again(one(2)))
    assert client.checksums() == digests(one(2)) and client.has_decoded(2)


@pytest.mark.parametrize("room", [0, 1, 2])
def test_a_sync_of_more_than_is_remembered_works_and_memory_is_bounded(here, monkeypatch, room):
    loans = [Loan(here, one(1, name)) for name in "xyz"]
    lengths = [len(loan.body) for loan in loans]
    limit = sum(lengths[:room]) + lengths[room] // 2
    monkeypatch.setattr(server_module, "KNOWN_BYTES", limit)
    engine = here.server.engine
    here.sync_of()
    here.sync_of()  # both were made with the room of before
    for seed in range(1, 4):
        for loan, name in zip(loans if seed > 1 else [], "xyz", strict=False):
            loan.again(one(seed, name))
        here.sync_of(*(loan.body for loan in loans))
        assert here.checksums() == {name: digests(one(seed))["x"] for name in "xyz"}
        assert here.has_decoded(3 if seed == 1 else 3 - room)
        assert sum(len(text) for _mode, text in engine.learned.texts) <= limit
        assert len(engine.learned.texts) == room and not engine.learning.texts


def test_what_is_known_is_decoded_by_nobody_while_the_gate_is_shut(here, monkeypatch):
    loan = Loan(here, one(1))
    here.sync_of(loan.body)
    loan.again(one(2))
    here.begin()
    monkeypatch.delenv(GATE)
    assert GATE in refused(here.say(loan.body))
    assert here.checksums() == digests(one(1)) and loan.counters == {1}
    monkeypatch.setenv(GATE, "1")
    here.sync_of(loan.body)
    assert here.checksums() == digests(one(2))


# --- Memory -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def gone(path: Path) -> Iterator[Path]:
    """Its file is elsewhere. It is back afterwards: torch ends a process that cannot unlink its own."""
    away = path.rename(path.with_suffix(".away"))
    try:
        yield away
    finally:
        away.replace(path)


def cpu_only(client: Trainer) -> None:
    if client.devices != ["cpu:0"]:
        pytest.skip("CUDA's memory has no file")


@both_modes
@pytest.mark.parametrize("what", ["storage", "storage, cut", "counters"])
def test_a_known_body_whose_memory_is_gone_is_refused_and_changes_nothing(client, packed, what):
    cpu_only(client)
    loan = Loan(client, model(1), packed)
    client.sync_of(loan.body, packed=packed)
    loan.again(model(2))
    named = IpcArgs(*loan.args[-1])
    name = named.ref_counter_handle if what == "counters" else named.storage_handle[len("cpu:") :]
    path = Path(ipc_codec.SHM + name.decode())
    with gone(path) as away:
        if what == "storage, cut":
            path.write_bytes(away.read_bytes()[:-1])
        client.begin(packed)
        words = refused(client.say(loan.body))
        assert path.name in words and "--ipc=host" in words
        assert client.checksums() == digests(model(1))
        assert path.exists() is (what == "storage, cut"), "nothing is made in its place"
    assert loan.counters == {1}, "nothing was opened"
    client.sync_of(loan.body, packed=packed)
    assert client.checksums() == digests(model(2))


@both_modes
def test_a_known_body_of_a_trainer_that_has_freed_it_is_refused(client, packed):
    cpu_only(client)
    loan = Loan(client, model(1), packed)
    client.sync_of(loan.body, packed=packed)
    files = {ipc_codec.SHM + IpcArgs(*args).storage_handle.decode()[4:] for args in loan.args}
    loan.end()
    gc.collect()
    assert not any(map(os.path.exists, files))
    client.begin(packed)
    assert "--ipc=host" in refused(client.say(loan.body))
    assert client.checksums() == digests(model(1))
    client.sync_of(Loan(client, model(2), packed).body, packed=packed)
    assert client.checksums() == digests(model(2))


@both_modes
def test_a_known_body_whose_exports_were_not_renewed_is_taken_and_the_witness_says_so(client, packed):
    """As vLLM takes it: the counter is the sender's affair."""
    loan = Loan(client, model(1), packed)
    client.sync_of(loan.body, packed=packed)
    assert client.found() == set()
    loan.fill(model(2))
    client.sync_of(loan.body, packed=packed)
    assert client.checksums() == digests(model(2)) and loan.counters == {-1}
    assert ("trainer", "export.fresh") in client.found()
    assert {party for party, _ in client.found()} == {"trainer"}
    ipc_codec._count(set(ipc_codec._counters(loan.args)), 1)


# --- Envelopes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("content_type", [None, "", "text/plain", "application/octet-stream"])
def test_a_known_body_needs_its_content_type(client, content_type):
    loan = Loan(client, one(1))
    client.sync_of(loan.body)
    client.begin()
    bad_request(client.say(loan.again(one(2)), content_type), "body")
    assert client.checksums() == digests(one(1)) and loan.counters == {1}
    ok(client.say(loan.body, "application/json; charset=utf-8"))
    ok(client.finish())
    assert client.checksums() == digests(one(2)) and client.has_decoded(1)


def test_a_known_body_is_one_of_update_weights_only(client):
    loan = Loan(client, one(1))
    client.sync_of(loan.body)
    bad_request(client.say(loan.body, path=INIT), "body.init_info")
    ok(client.say(loan.body, path=START))
    ok(client.say(loan.body, path=FINISH))
    assert client.send("GET", UPDATE, loan.body, JSON).status_code == 405
    foreign = client.send("POST", UPDATE, loan.body, JSON, headers={"origin": "http://a.example"})
    assert foreign.status_code == 403


def test_the_same_update_in_other_words_is_read_and_means_the_same(client):
    loan = Loan(client, one(1))
    info = json.loads(loan.body)
    forms = [
        loan.body,
        b"\xef\xbb\xbf" + loan.body,
        b" " + loan.body,
        json.dumps(info | {"more": 1}).encode(),
        json.dumps({"before": [1]} | info, indent=1).encode(),
        loan.body + b"\n",
    ]
    for seed, form in enumerate(forms):
        more = len(json.loads(form.decode("utf-8-sig"))) - 1  # what it has besides is not remembered
        client.sync_of(loan.again(one(seed)) and form if seed else form)
        assert client.checksums() == digests(one(seed or 1)) and client.has_decoded(1)
        client.sync_of(loan.again(one(seed + 50)) and form)
        assert client.checksums() == digests(one(seed + 50)) and client.has_decoded(more)
    assert client.found() == set()


def test_a_known_body_that_is_cut_or_continued_is_no_known_body(client):
    loan = Loan(client, one(1))
    client.sync_of(loan.body)
    client.begin()
    for bad in (loan.body[:-1], loan.body + b"}", loan.body + loan.body):
        bad_request(client.say(bad), "body")
    bad_request(client.say(b'{"update_info": [5]}'), "body.update_info")
    ok(client.say(loan.again(one(2))))
    ok(client.finish())
    assert client.checksums() == digests(one(2))


# --- Several workers ----------------------------------------------------------------------------------

TP0, TP1 = "dp0:pp0:pcp0:tp0", "dp0:pp0:pcp0:tp1"


@both_modes
def test_every_worker_reads_a_known_body(two_workers, packed):
    loan = Loan(two_workers, model(0), packed)
    for seed in range(3):
        body = loan.again(model(seed)) if seed else loan.body
        two_workers.sync_of(body, packed=packed)
        for worker in (TP0, TP1):
            assert two_workers.checksums(worker) == digests(model(seed))
        assert loan.counters == {0}
    assert two_workers.has_decoded(1) and two_workers.found() == set()


class OnOne:
    """A client's words, for a loan to one of its workers."""

    def __init__(self, client: Trainer, worker: int):
        self.devices, self.kept = [client.devices[worker]], client.kept
        self.described, self.encoded = client.described, client.encoded


@both_modes
def test_a_known_rank_local_list_gives_every_worker_its_own(two_workers, packed):
    both: list[Any] = [OnOne(two_workers, 0), OnOne(two_workers, 1)]
    loans = [Loan(both[0], model(0), packed), Loan(both[1], one(0), packed)]
    body = rank_local(two_workers, loans)
    for seed in range(3):
        if seed:
            loans[0].again(model(seed)), loans[1].again(one(seed))
        two_workers.sync_of(body, packed=packed)
        assert two_workers.checksums(TP0) == digests(model(seed))
        assert two_workers.checksums(TP1) == digests(one(seed))
    assert two_workers.has_decoded(2)
    loans[0].again(), loans[1].again()
    two_workers.begin(packed)
    ok(two_workers.say(body))
    assert refused(two_workers.say(body)).startswith("names.unique: ")
    two_workers.has_decoded(0)
    for loan in loans:
        ipc_codec.settle(*loan.args)
    other = rank_local(two_workers, [loans[0], Loan(both[1], one(7), packed)])
    loans[0].again(model(7))
    two_workers.sync_of(other, packed=packed)
    assert two_workers.checksums(TP0) == digests(model(7)) and two_workers.checksums(TP1) == digests(one(7))
    assert two_workers.has_decoded(2), "one entry is another: the list is"


def rank_local(client: Trainer, loans: list[Loan]) -> bytes:
    return json.dumps({"update_info": [client.encoded(loan.info) for loan in loans]}).encode()


@both_modes
def test_where_one_worker_cannot_read_a_known_body_no_worker_has(two_workers, packed):
    if two_workers.devices[0].startswith("cuda"):
        pytest.skip("CUDA's memory has no file")
    loan = Loan(two_workers, model(1), packed)
    two_workers.sync_of(loan.body, packed=packed)
    loan.again(model(2))
    path = Path(ipc_codec.SHM + IpcArgs(*loan.args[-1]).storage_handle.decode()[len("cpu:") :])
    two_workers.begin(packed)
    with gone(path):
        assert path.name in refused(two_workers.say(loan.body))
    for worker in (TP0, TP1):
        assert two_workers.checksums(worker) == digests(model(1))
    assert loan.counters == {1}, "nothing was opened, on no worker"
    two_workers.sync_of(loan.body, packed=packed)
    for worker in (TP0, TP1):
        assert two_workers.checksums(worker) == digests(model(2))


class Odd(torch.nn.Module):
    """With buffers that are no plain bytes as they stand."""

    def __init__(self) -> None:
        super().__init__()
        self.conj: torch.Tensor
        self.register_buffer("conj", torch.tensor([1 + 2j, 3 - 1j]).conj())
        self.register_buffer("neg", torch._neg_view(torch.arange(3.0)))
        self.register_buffer("across", torch.arange(6.0).view(2, 3).t())


def test_what_a_model_has_is_held_as_plain_memory():
    worker, model = server_module.Worker(torch.device("cpu", 0), Odd), Odd()
    for name, weight in worker.weights.items():
        assert torch.equal(weight, getattr(model, name))
        assert weight.is_contiguous() and not weight.is_conj() and not weight.is_neg()
