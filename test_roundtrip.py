"""`python server.py` from outside: a child process, spoken to over HTTP, reading weights lent from here.

The helpers come first (bits, Server, Client), then one section for each thing the server promises:
boot, routes, errors, session, syncs, counters, refusals, gate, workers, completions, concurrency, options.
Every weight is compared as bytes, by the sha256 that POST /weight_checker answers.

Last come the server cases: what any server promises. With WEIGHT_SYNC_URL=http://host:8000 they, and only
they, run against that one.
"""

import base64
import contextlib
import functools
import hashlib
import http.client
import http.server
import inspect
import itertools
import json
import os
import pickle
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

import ipc_codec
from protocol import GATE, MUST, RULES, SAID, SHOULD, UPDATING, Session, UpdateInfo, merge_handles

ROOT = Path(ipc_codec.__file__).resolve().parent
JSON = "application/json"
NO_BODY = type("NoBody", (), {"__repr__": lambda self: "NO_BODY"})()  # one name in every process
INIT, START, UPDATE = "/init_weight_transfer_engine", "/start_weight_update", "/update_weights"
FINISH, SHUTDOWN = "/finish_weight_update", "/shutdown_weight_transfer_engine"

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ONE_WORKER = ["cpu", pytest.param("cuda:0", marks=needs_cuda)]
TWO_WORKERS = ["cpu:0,cpu:1", pytest.param("cuda:0,cuda:1", marks=needs_two_gpus)]
both_modes = pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])


# ---- tensors ---------------------------------------------------------------------------------------------


def bits(tensor):
    """The logical row-major bytes of a tensor."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return bytes(
        plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).tolist()
    )  # any stride of one element


def digests(weights):
    return {name: hashlib.sha256(bits(tensor)).hexdigest() for name, tensor in weights.items()}


def noise(dtype, *shape, seed=0):
    """Any bit pattern of the dtype, NaN payloads included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def model(seed):
    """Three weights whose packed offsets (0, 24, 30) are no multiple of the last item size."""
    dtypes = {"a": (torch.float32, 2, 3), "b": (torch.bfloat16, 3), "c": (torch.int32, 5)}
    return {name: noise(*spec, seed=seed) for name, spec in dtypes.items()}


def split(weights, chunks):
    """The weights in order, as that many dicts of nearly equal length."""
    items = list(weights.items())
    ends = [len(items) * i // chunks for i in range(chunks + 1)]
    return [dict(items[a:b]) for a, b in itertools.pairwise(ends)]


def nbytes(weights):
    return sum(tensor.numel() * tensor.itemsize for tensor in weights.values())


# ---- the server ------------------------------------------------------------------------------------------


class Server:
    """One `python server.py`; taken down when the with block ends."""

    def __init__(self, device="cpu", *options, gate=True, folder=ROOT, program=(ROOT / "server.py",), **env):
        self.devices = ["cpu:0" if entry == "cpu" else entry for entry in device.split(",")]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in __exit__)
        command = [sys.executable, *program, "--port", "0", "--device", device, *options]
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(gate) | env,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def __enter__(self):
        try:
            assert select.select([self.process.stdout], [], [], 60)[0], "the server said nothing in 60 s"
            line = self.process.stdout.readline()
            said = re.fullmatch(r"listening on (http://127\.0\.0\.1:(\d+))\n", line)
            assert said, (line, self.stderr())
            self.url, self.port = said[1], int(said[2])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()

    def stderr(self):
        self.log.seek(0)
        return self.log.read()


def environment(gate):
    """Ours, with the gate open or shut; torch's own warnings are not the server's words."""
    kept = {key: value for key, value in os.environ.items() if key != GATE}
    return kept | {"PYTHONWARNINGS": "ignore"} | ({GATE: "1"} if gate else {})


# ---- the client ------------------------------------------------------------------------------------------


class Client:
    """A trainer. Its names get a prefix of its own, so that tests share a server and never a weight."""

    serial = itertools.count()

    def __init__(self, server):
        self.url, self.port, self.devices = server.url, server.port, server.devices
        self.prefix = f"test{next(self.serial)}."
        self.http = requests.Session()
        self.http.trust_env = False
        self.lent, self.loans = [], []  # the tensors we keep alive, the args of every export

    # -- calls

    def send(self, method, path, data=None, content_type=None, **more):
        headers = {"Content-Type": content_type} if content_type else {}
        headers |= more.pop("headers", {})
        return self.http.request(method, self.url + path, data=data, headers=headers, timeout=60, **more)

    def get(self, path):
        return self.send("GET", path)

    def post(self, path, body=NO_BODY):
        return self.send("POST", path) if body is NO_BODY else self.send("POST", path, json.dumps(body), JSON)

    def init(self, packed=False):
        return self.post(INIT, {"init_info": {"packed": packed}})

    def begin(self, packed=False):
        ok(self.init(packed))
        ok(self.post(START))

    def update(self, info):
        """POST /update_weights; handles that are not text yet are encoded."""
        entries = [self.encoded(entry) for entry in (info if isinstance(info, list) else [info])]
        return self.post(UPDATE, {"update_info": entries if isinstance(info, list) else entries[0]})

    @staticmethod
    def encoded(info):
        handles = info.get("ipc_handles_pickled", "")
        text = handles if isinstance(handles, str) else ipc_codec.encode_handles(handles)
        return info | {"ipc_handles_pickled": text} if text else info

    def finish(self, **body):
        return self.post(FINISH, body if body else NO_BODY)

    # -- loans

    def lend(self, tensor):
        """{uuid: args} with an entry for every worker of the server."""
        handles = {}
        for device in self.devices:
            cuda = device.startswith("cuda")
            on_device = on_gpu(tensor, device) if cuda else tensor
            handle = ipc_codec.export_handle(on_device, None if cuda else device)
            self.lent.append(on_device)
            handles |= self.lending(handle)
        return handles

    def lending(self, handle):
        self.loans += handle.values()
        return handle

    def buffers(self, capacity):
        """The packed buffer of every worker, and the handles of all."""
        buffers = [ipc_codec.PackedBuffer(max(capacity, 1), device) for device in self.devices]
        self.lent += buffers
        handles = {}
        for buffer in buffers:
            handles |= self.lending(buffer.export())
        return buffers, handles

    def counters(self):
        return [ipc_codec.ref_count(args) for args in self.loans if args[8]]

    def settle(self):
        """After an error answer: nobody opened what still counts 1, and nobody will."""
        for args in self.loans:
            ipc_codec.settle(args)

    def give_up(self):
        """Forget all loans, settled, and collect."""
        self.settle()
        self.lent, self.loans = [], []
        ipc_codec.ipc_collect()

    # -- what an update says

    def described(self, weights):
        return {
            "names": [self.prefix + name for name in weights],
            "dtype_names": [ipc_codec.dtype_name(tensor.dtype) for tensor in weights.values()],
            "shapes": [list(tensor.shape) for tensor in weights.values()],
        }

    def unpacked(self, weights, form=ipc_codec.wire_form):
        handles = [self.lend(form(tensor)) for tensor in weights.values()]
        return {**self.described(weights), "ipc_handles_pickled": handles}

    def packed(self, weights, buffers=None, handles=None):
        if buffers is None:
            buffers, handles = self.buffers(nbytes(weights))
        refill(buffers, [ipc_codec.wire_form(tensor) for tensor in weights.values()])
        sizes = [tensor.numel() * tensor.itemsize for tensor in weights.values()]
        return {**self.described(weights), "ipc_handles_pickled": handles, "tensor_sizes": sizes}

    def info(self, weights, packed):
        return self.packed(weights) if packed else self.unpacked(weights)

    # -- whole syncs

    def sync(self, weights, packed=False, chunks=1):
        """A good sync: every answer is 200, and the packed buffer is overwritten after each."""
        self.begin(packed)
        if packed:
            self.send_packed(split(weights, chunks))
        else:
            for chunk in split(weights, chunks):
                ok(self.update(self.unpacked(chunk)))
        ok(self.finish())

    def send_packed(self, chunks):
        buffers, handles = self.buffers(max(map(nbytes, chunks)))
        for chunk in chunks:
            ok(self.update(self.packed(chunk, buffers, handles)))
            overwrite(buffers)

    # -- read-back

    def table(self):
        """Every checksum on the server: {"dp0:pp0:pcp0:tp0:<name>": hex}."""
        return ok(self.post("/weight_checker", {"action": "checksum"}))["checksums"]

    def checksums(self, worker="dp0:pp0:pcp0:tp0"):
        """Those of our names on one worker: {name: hex}."""
        mine = f"{worker}:{self.prefix}"
        return {key.removeprefix(mine): value for key, value in self.table().items() if key.startswith(mine)}

    def version(self):
        return ok(self.get("/weight_info"))["weight_version"]


def on_gpu(tensor, device):
    """The tensor with its strides and its offset, in a copy of its storage there."""
    storage = tensor.untyped_storage().to(device=device)
    empty = torch.empty(0, dtype=tensor.dtype, device=device)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def refill(buffers, tensors):
    for buffer in buffers:
        cuda = torch.device(buffer.device).type == "cuda"
        buffer.fill([tensor.to(buffer.device) for tensor in tensors] if cuda else tensors)
        buffer.drain()


def overwrite(buffers):
    refill(buffers, [torch.full((buffers[0].capacity_bytes,), 0xFF, dtype=torch.uint8)])


# ---- what answers look like ------------------------------------------------------------------------------


def ok(reply, expected=None):
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert expected is None or body == expected
    return body


def error(reply, status, kind, param):
    """The error body, exact; its message."""
    assert reply.status_code == status, reply.text
    body = reply.json()
    message = body["error"]["message"]
    assert isinstance(message, str) and message
    assert body == {"error": {"message": message, "type": kind, "param": param, "code": status}}
    return message


def refused(reply):
    return error(reply, 500, "InternalServerError", None)


def bad_request(reply, param):
    return error(reply, 400, "Bad Request", param)


def bad_body(reply):
    """A 400 about some part of the body; says which."""
    assert reply.status_code == 400, reply.text
    param = reply.json()["error"]["param"]
    bad_request(reply, param)
    assert param.startswith("body")
    return param


def detail(reply, status):
    assert reply.status_code == status, reply.text
    assert isinstance(reply.json()["detail"], str) and set(reply.json()) == {"detail"}


# ---- fixtures --------------------------------------------------------------------------------------------


def visit(server):
    """A client of an idle, unpaused, unpacked server. Afterwards no export is held or was released twice."""
    client = Client(server)
    calm(client)
    yield client
    calm(client)
    client.settle()
    assert all(count in (0, None) for count in client.counters())
    client.give_up()
    client.http.close()


def calm(client):
    client.finish()  # closes what a test left open
    ok(client.post(SHUTDOWN))
    ok(client.init())
    ok(client.post("/resume"))


@pytest.fixture(scope="module", params=ONE_WORKER)
def server(request):
    with Server(request.param) as server:
        server.boot = look_at_boot(server)
        yield server


def look_at_boot(server):
    """What a server answers before anybody has told it anything."""
    client = Client(server)
    seen = {path: client.get(path).json() for path in ("/weight_info", "/is_paused")}
    seen["table"] = client.table()
    weights = {"w": noise(torch.float32, 3)}
    seen["start"] = client.post(START).status_code
    seen["update"] = client.update(client.unpacked(weights)).status_code
    seen["finish"] = client.finish().status_code
    seen["exact"] = client.checksums() == digests(weights)
    client.give_up()
    return seen


@pytest.fixture
def client(server):
    yield from visit(server)


@pytest.fixture(scope="module", params=TWO_WORKERS)
def two_worker_server(request):
    with Server(request.param) as server:
        yield server


@pytest.fixture
def two_workers(two_worker_server):
    yield from visit(two_worker_server)


@pytest.fixture(scope="module", params=TWO_WORKERS)
def data_parallel_server(request):
    with Server(request.param, "--data-parallel-size", "2") as server:
        yield server


@pytest.fixture
def data_parallel(data_parallel_server):
    yield from visit(data_parallel_server)


# ---- boot ------------------------------------------------------------------------------------------------


def test_the_version_is_default_at_boot(server):
    assert server.boot["/weight_info"] == {"weight_version": "default"}


def test_a_server_boots_unpaused_and_without_weights(server):
    assert server.boot["/is_paused"] == {"is_paused": False}
    assert server.boot["table"] == {}


def test_a_fresh_server_needs_no_init_and_is_unpacked(server):
    assert [server.boot[call] for call in ("start", "update", "finish", "exact")] == [200, 200, 200, True]


# ---- routes ----------------------------------------------------------------------------------------------


def test_the_pause_mode_is_read_from_the_query_only(client):
    ok(client.post("/pause", {"mode": "no such mode"}), {"status": "paused"})


def test_a_sync_runs_while_paused(client):
    ok(client.post("/pause"))
    client.sync(model(1))
    assert client.checksums() == digests(model(1))
    ok(client.get("/is_paused"), {"is_paused": True})


@pytest.mark.parametrize("query", ["", *(f"?include_dp={value}" for value in ("true", "false", "1", "0"))])
def test_one_worker_is_a_world_of_one(client, query):
    ok(client.get("/get_world_size" + query), {"world_size": 1})


def test_the_checksum_is_the_sha256_of_a_parameters_bytes(client):
    client.sync({"w": torch.tensor([1.0, 2.0])})
    key = f"dp0:pp0:pcp0:tp0:{client.prefix}w"
    assert client.table()[key] == hashlib.sha256(b"\0\0\x80\x3f\0\0\0\x40").hexdigest()


def test_reset_zeroes_every_parameter_and_keeps_its_name(client):
    client.sync(model(1))
    before = set(client.table())
    ok(client.post("/weight_checker", {"action": "reset"}), {"status": "reset"})
    zeros = {name: torch.zeros(len(bits(tensor)), dtype=torch.uint8) for name, tensor in model(1).items()}
    assert client.checksums() == digests(zeros)
    assert set(client.table()) == before
    client.sync(model(1))
    assert client.checksums() == digests(model(1))


def test_health_has_an_empty_body(client):
    reply = client.get("/health")
    assert (reply.status_code, reply.content) == (200, b"")


def test_there_is_no_draft_model(client):
    refused(client.post("/start_draft_weight_update"))
    client.sync(model(1))
    assert client.checksums() == digests(model(1))


GETS = ["/is_paused", "/get_world_size", "/weight_info", "/health", "/version"]
POSTS = [INIT, START, UPDATE, FINISH, SHUTDOWN, "/pause", "/resume", "/start_draft_weight_update"]
POSTS += ["/update_weight_version", "/weight_checker"]


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", [*GETS, *POSTS])
def test_a_wrong_method_is_405_and_says_which_is_right(client, method, path):
    check_method(client, method, path, "GET" if path in GETS else "POST")


def test_a_method_that_nobody_knows_is_405_too(client):
    check_method(client, "PROPFIND", "/health", "GET")


def check_method(client, method, path, right):
    if method != right:
        reply = client.send(method, path)
        detail(reply, 405)
        assert right in reply.headers["allow"].split(", ")


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
@pytest.mark.parametrize("path", ["/", "/nope", "/update_weights/more", "/v1", "/HEALTH", "/health%00"])
def test_an_unknown_path_is_404(client, method, path):
    detail(client.send(method, path), 404)


# ---- errors ----------------------------------------------------------------------------------------------

READS = {INIT: "init_info", UPDATE: "update_info"}
READS |= {"/update_weight_version": "new_version", "/weight_checker": "action"}
EMPTY_UPDATE: dict = {
    "names": [], "dtype_names": [], "shapes": [],
    "ipc_handles_pickled": ipc_codec.encode_handles([]), "tensor_sizes": None,
}  # fmt: skip
GOOD = {
    INIT: {"init_info": {}},
    UPDATE: {"update_info": EMPTY_UPDATE},
    FINISH: {"weight_version": "v1"},
    "/update_weight_version": {"new_version": "v1"},
    "/weight_checker": {"action": "checksum"},
}
reads_a_body = pytest.mark.parametrize("path", READS)
takes_a_body = pytest.mark.parametrize("path", GOOD)


@reads_a_body
@pytest.mark.parametrize("body", ["null", "[]", "[1]", "5", '"text"', "{}", '{"other": 1}'])
def test_a_body_without_the_field_is_400_and_names_it(client, path, body):
    bad_request(client.send("POST", path, body, JSON), f"body.{READS[path]}")


@reads_a_body
@pytest.mark.parametrize("content_type", [None, JSON])
def test_no_body_is_400_and_names_the_field(client, path, content_type):
    bad_request(client.send("POST", path, None, content_type), f"body.{READS[path]}")


NO_DICT = [None, 5, True, "text", ["x"]]
NO_TEXT: list = [None, 5, True, ["x"], {}]
WRONG_TYPES = [(path, value) for path in (INIT, UPDATE) for value in NO_DICT]
WRONG_TYPES += [(path, value) for path in ("/update_weight_version", "/weight_checker") for value in NO_TEXT]


@pytest.mark.parametrize("path,value", WRONG_TYPES)
def test_a_field_of_the_wrong_type_is_400_and_names_it(client, path, value):
    reply = client.post(path, {READS[path]: value})
    assert bad_body(reply).startswith(f"body.{READS[path]}")


@pytest.mark.parametrize("value", [5, True, [], {}], ids=json.dumps)
def test_a_version_that_is_no_text_is_400_and_leaves_the_update_open(client, value):
    client.begin()
    bad_request(client.post(FINISH, {"weight_version": value}), "body.weight_version")
    ok(client.finish())


@takes_a_body
@pytest.mark.parametrize("body", [b"{", b"not json", b'{"a": 1,}', b"\0"], ids=repr)
def test_what_is_not_json_is_400(client, path, body):
    bad_body(client.send("POST", path, body, JSON))


@takes_a_body
@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"a": 1' + b"0" * 5000 + b"}"], ids=["deep", "long number"]
)
def test_json_that_python_cannot_read_is_400(client, path, body):
    assert client.send("POST", path, body, JSON).status_code == 400


NO_JSON_TYPES = [None, "text/plain", "application/octet-stream", "application/jsonx"]


@takes_a_body
@pytest.mark.parametrize("content_type", NO_JSON_TYPES)
def test_json_without_a_json_content_type_is_400(client, path, content_type):
    ok(client.post(START))
    bad_body(client.send("POST", path, json.dumps(GOOD[path]).encode(), content_type))
    ok(client.finish())


@takes_a_body
def test_bytes_that_are_not_utf8_are_400_with_a_detail(client, path):
    key = READS.get(path, "weight_version")
    detail(client.send("POST", path, b'{"%s": "\xff"}' % key.encode(), JSON), 400)


@pytest.mark.parametrize("number", [2**64, -(2**64)])
@pytest.mark.parametrize("path", [INIT, UPDATE])
def test_integers_beyond_64_bits_are_a_bad_request_error(client, path, number):
    info = {INIT: {"packed": number}, UPDATE: EMPTY_UPDATE | {"shapes": [[number]]}}[path]
    error(client.post(path, {READS[path]: info}), 400, "BadRequestError", None)


@pytest.mark.parametrize("path", [INIT, UPDATE, FINISH, "/update_weight_version"])
def test_lone_surrogates_are_a_bad_request_error(client, path):
    lone = {INIT: {"packed": "\ud800"}, UPDATE: EMPTY_UPDATE | {"names": ["\udc80"]}}.get(path, "\ud800")
    client.post(START)
    error(client.post(path, {READS.get(path, "weight_version"): lone}), 400, "BadRequestError", None)
    ok(client.finish())


@takes_a_body
@pytest.mark.parametrize("content_type", [JSON, "application/json; charset=utf-8", "application/x+json"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "bom"])
def test_json_may_come_with_a_charset_a_suffix_or_a_byte_order_mark(client, path, content_type, mark):
    client.post(START)
    ok(client.send("POST", path, mark + json.dumps(GOOD[path]).encode(), content_type))


@takes_a_body
def test_more_keys_at_the_top_level_are_ignored(client, path):
    client.post(START)
    ok(client.post(path, GOOD[path] | {"more": 1}))


@pytest.mark.parametrize("method,path,param", [
    ("POST", "/pause?mode=stop", "query.mode"),
    ("POST", "/pause?mode=", "query.mode"),
    ("GET", "/get_world_size?include_dp=perhaps", "query.include_dp"),
])  # fmt: skip
def test_a_bad_query_value_is_400_and_names_it(client, method, path, param):
    bad_request(client.send(method, path), param)
    ok(client.get("/is_paused"), {"is_paused": False})


def test_a_connection_is_kept_over_many_good_and_bad_requests(client):
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=30)
    connection.connect()
    first = connection.sock
    for method, path, body, status in 20 * [
        ("GET", "/health", None, 200),
        ("POST", INIT, b'{"init_info": {}}', 200),
        ("POST", INIT, b"{", 400),
        ("GET", "/nope", None, 404),
        ("POST", "/nope", b"x" * 100, 404),
        ("GET", INIT, b"x" * 100, 405),
        ("POST", "/resume", b'{"nobody": "reads this"}', 200),
        ("POST", START, b"x" * 100, 200),
        ("POST", FINISH, None, 200),
    ]:
        connection.request(method, path, body, {"Content-Type": JSON})
        reply = connection.getresponse()
        reply.read()
        assert (path, reply.status) == (path, status)
        assert connection.sock is first
    connection.close()


def test_the_connection_is_closed_after_a_500(client):
    reply = client.finish()
    refused(reply)
    assert reply.headers["Connection"].lower() == "close"
    with socket.create_connection(("127.0.0.1", client.port), timeout=30) as raw:
        raw.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n" % FINISH.encode())
        assert b" 500 " in received_until_closed(raw)


def received_until_closed(raw):
    return b"".join(iter(lambda: raw.recv(65536), b""))


def test_a_client_that_hangs_up_in_mid_body_changes_nothing(client):
    client.begin()
    before = client.table()
    with socket.create_connection(("127.0.0.1", client.port), timeout=30) as raw:
        head = f"POST {UPDATE} HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON}\r\nContent-Length: 1000\r\n\r\n"
        raw.sendall(head.encode() + b'{"update_info": {"names": [')
    ok(client.update(client.unpacked(model(1))))
    ok(client.finish())
    assert client.get("/health").status_code == 200
    assert client.checksums() == digests(model(1)) and before.items() <= client.table().items()


# ---- session ---------------------------------------------------------------------------------------------


def test_an_empty_packed_update_changes_nothing(client):
    client.begin(packed=True)
    before = client.table()
    ok(client.update(client.packed({})))
    ok(client.finish())
    assert client.table() == before


def test_an_empty_init_info_means_unpacked(client):
    ok(client.init(packed=True))
    ok(client.post(INIT, {"init_info": {}}))
    ok(client.post(START))
    ok(client.update(client.unpacked(model(1))))
    ok(client.finish())


@pytest.mark.parametrize("body", [b"{", b"null", b'{"update_info": 5}', b'{"update_info": [null]}', b"\xff"])
def test_an_update_that_is_400_leaves_the_session_open(client, body):
    client.begin()
    assert client.send("POST", UPDATE, body, JSON).status_code == 400
    ok(client.update(client.unpacked(model(1))))
    ok(client.finish())
    assert client.checksums() == digests(model(1))


@pytest.mark.parametrize("body", [NO_BODY, {}, {"weight_version": None}, {"other": "v2"}], ids=str)
def test_finish_without_a_version_keeps_the_old_one(client, body):
    ok(client.post("/update_weight_version", {"new_version": "kept"}))
    ok(client.post(START))
    ok(client.post(FINISH, body))
    assert client.version() == "kept"


def test_a_version_without_a_json_content_type_is_400_and_drops_nothing(client):
    ok(client.post("/update_weight_version", {"new_version": "old"}))
    ok(client.post(START))
    bad_body(client.send("POST", FINISH, b'{"weight_version": "new"}'))
    assert client.version() == "old"
    ok(client.finish(weight_version="new"))
    assert client.version() == "new"


def test_an_open_update_that_a_dead_trainer_left_is_closed_by_finish(client):
    ok(client.post(START))
    ok(client.update(client.unpacked({"a": model(1)["a"]})))
    other = Client(client)
    refused(other.post(START))
    ok(other.finish())
    client.sync(model(2))
    assert client.checksums() == digests(model(2))


# ---- syncs -----------------------------------------------------------------------------------------------

DTYPES = [torch.bool, torch.bfloat16, torch.float16, torch.float32, torch.float64]
DTYPES += [
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
DTYPES += [torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.complex64, torch.complex128]


def in_order(*tensors):
    return {f"w{i}": tensor for i, tensor in enumerate(tensors)}


def lazily_negated():
    return torch.tensor([1 + 2j, -3 - 4j]).conj().imag  # torch flags it instead of computing it


def noises(dtype, *shapes):
    return in_order(*(noise(dtype, *shape) for shape in shapes))


KINDS = {
    "scalar": lambda: in_order(torch.tensor(1.5), torch.tensor([1.0, 2.0, 3.0])),
    "scalar of one byte": lambda: noises(torch.float8_e4m3fn, (), (3,)),
    "scalar alone": lambda: noises(torch.float64, ()),
    "empty between": lambda: noises(torch.float32, (2,), (0, 3), (2, 0, 4), (1,)),
    "empty tail": lambda: noises(torch.bfloat16, (4,), (0, 3), (0,)),
    "empty alone": lambda: noises(torch.float32, (0, 3)),
    "transposed": lambda: in_order(torch.arange(12.0).reshape(3, 4).t()),
    "stepped": lambda: in_order(torch.arange(20)[3:9:2]),
    "expanded": lambda: in_order(torch.ones(1, 3).expand(4, 3)),
    "channels last": lambda: in_order(noise(torch.half, 2, 3, 4, 5).to(memory_format=torch.channels_last)),
    "rows of a large one": lambda: in_order(noise(torch.float32, 100, 7)[40:42]),
    "columns of a large one": lambda: in_order(noise(torch.int16, 9, 9)[:, 2:5]),
    "unaligned": lambda: in_order(noise(torch.float16, 3), noise(torch.float32, 2)),
    "unaligned after bool": lambda: in_order(
        noise(torch.bool, 1), noise(torch.int64, 1), noise(torch.half, 1)
    ),
    "every dtype at once": lambda: in_order(*(noise(d, 3, 2, seed=i) for i, d in enumerate(DTYPES))),
    "every pattern of e4m3": lambda: in_order(torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)),
    "nan and minus zero": lambda: in_order(torch.tensor([float("nan"), -0.0, float("-inf")])),
    "lazily conjugated": lambda: in_order(torch.tensor([1 + 2j, 3 - 4j]).conj()),
    "lazily negated": lambda: in_order(torch.tensor([1 + 2j, -3 - 4j]).conj().imag),
    "tied": lambda: dict.fromkeys(["embed", "head"], noise(torch.float32, 3, 4)),
    "parameter": lambda: in_order(torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.zeros(3))),
}
KINDS |= {str(dtype): lambda dtype=dtype: noises(dtype, (2, 4)) for dtype in DTYPES}  # type: ignore[misc]


@both_modes
@pytest.mark.parametrize("chunks", [1, 3, 24])
def test_a_sync_in_any_number_of_chunks_is_exact(client, packed, chunks):
    weights = in_order(*(noise(DTYPES[i % len(DTYPES)], i, seed=i) for i in range(24)))
    client.sync(weights, packed, chunks)
    assert client.checksums() == digests(weights)


STRIDED = ["transposed", "stepped", "expanded", "channels last", "tied"]
STRIDED += ["rows of a large one", "columns of a large one"]


def with_args(info, changes):
    """The handles of an update with those positions replaced, everywhere."""

    def changed(handle):
        return {
            uuid: tuple(changes.get(i, arg) for i, arg in enumerate(args)) for uuid, args in handle.items()
        }

    handles = info["ipc_handles_pickled"]
    return changed(handles) if isinstance(handles, dict) else [changed(handle) for handle in handles]


def test_a_parameter_that_was_not_detached_is_taken_as_a_plain_tensor(client):
    client.begin()
    info = client.unpacked(model(1) | {"p": torch.ones(3)})
    ok(client.update(info | {"ipc_handles_pickled": with_args(info, {0: torch.nn.Parameter, 10: True})}))
    ok(client.finish())
    assert client.checksums() == digests(model(1) | {"p": torch.ones(3)})
    assert client.counters() == [0] * 4


def test_names_that_a_sync_leaves_out_keep_their_bytes(client):
    client.sync(model(1))
    client.sync({"a": model(2)["a"]})
    client.sync({"c": model(2)["c"]}, packed=True)
    assert client.checksums() == digests(model(2) | {"b": model(1)["b"]})


def test_null_tensor_sizes_are_accepted_unpacked(client):
    client.begin()
    ok(client.update(client.unpacked(model(1)) | {"tensor_sizes": None}))
    ok(client.finish())
    assert client.checksums() == digests(model(1))


def test_a_packed_buffer_may_be_larger_than_the_chunk(client):
    client.begin(packed=True)
    ok(client.update(client.packed(model(1), *client.buffers(4096))))
    ok(client.finish())
    assert client.checksums() == digests(model(1))


def test_a_list_of_one_update_is_the_update_of_the_one_worker(client):
    client.begin()
    ok(client.update([client.unpacked(model(1))]))
    ok(client.finish())
    assert client.checksums() == digests(model(1))


# ---- reference counters ----------------------------------------------------------------------------------


def test_tied_exports_are_each_released_once(client):
    client.sync(KINDS["tied"]())
    assert client.counters() == [0, 0]


def test_one_export_under_two_names_is_never_released_twice(client):
    weights = KINDS["tied"]()
    client.begin()
    info = client.unpacked({"embed": weights["embed"]})
    reply = client.update(
        client.described(weights) | {"ipc_handles_pickled": info["ipc_handles_pickled"] * 2}
    )
    if reply.status_code == 200:
        ok(client.finish())
        assert client.counters() == [0] and client.checksums() == digests(weights)
    else:
        refused(reply)
        assert client.counters() in ([0], [1]) and client.checksums() == {}


def test_the_packed_counter_is_1_after_each_chunk_and_0_after_finish(client):
    client.begin(packed=True)
    buffers, handles = client.buffers(24)
    for chunk in split(model(1), 3):
        ok(client.update(client.packed(chunk, buffers, handles)))
        assert client.counters() == [1]
        overwrite(buffers)
    ok(client.finish())
    assert client.counters() == [0]
    assert client.checksums() == digests(model(1))


def test_the_next_export_releases_the_packed_mapping(client):
    client.begin(packed=True)
    ok(client.update(client.packed({"a": model(1)["a"]})))
    ok(client.update(client.packed({"b": model(1)["b"]})))
    assert client.counters() == [0, 1]
    ok(client.finish())
    assert client.counters() == [0, 0]


def test_a_failed_chunk_and_a_shutdown_leave_the_packed_counter_at_0(client):
    client.begin(packed=True)
    buffers, handles = client.buffers(24)
    ok(client.update(client.packed({"a": model(1)["a"]}, buffers, handles)))
    refused(client.update(client.packed({"b": model(1)["b"]}, buffers, handles) | {"tensor_sizes": [5]}))
    assert client.counters()[0] in (0, 1)
    ok(client.post(SHUTDOWN))
    assert client.counters() == [0]


def test_a_valid_update_before_a_refused_one_is_released_too(client):
    client.begin()
    ok(client.update(client.unpacked({"a": model(1)["a"]})))
    refused(client.update(client.unpacked({"b": model(1)["b"]}) | {"names": []}))
    assert client.counters() == [0, 1]


@both_modes
def test_settling_a_refused_export_brings_its_memory_back(client, packed):
    with memory_returns(client):
        client.begin(packed)
        info = client.info({"w": noise(torch.uint8, 1 << 16)}, packed)
        refused(client.update(info | {"dtype_names": []}))
        assert client.counters() == [1]
        del info


@both_modes
def test_repeated_syncs_leave_no_memory_behind(client, packed):
    client.sync(model(0), packed)
    client.give_up()
    with memory_returns(client):
        for seed in range(5):
            client.sync(model(seed), packed, chunks=3)
        assert set(client.counters()) == {0}


@contextlib.contextmanager
def memory_returns(client):
    """What the block lent is ours again once the client has given up its loans."""
    client.give_up()
    before = lent_memory(client)
    yield
    client.give_up()
    assert lent_memory(client) == before


def lent_memory(client):
    """GPU bytes, or without a GPU the bytes of our files in shared memory that hold weights."""
    if client.devices[0].startswith("cuda"):
        return torch.cuda.memory_allocated()
    return len(list(Path("/dev/shm").glob(f"torch_{os.getpid()}_*")))


# ---- refusals --------------------------------------------------------------------------------------------


def setting(**fields):
    return lambda info: info | fields


def without(field):
    return lambda info: {key: value for key, value in info.items() if key != field}


def last(field, value):
    """The same with another last entry; a function of the old one is called."""

    def changed(info):
        *head, old = info[field]
        return info | {field: [*head, value(old) if callable(value) else value]}

    return changed


def shorter(field):
    return lambda info: info | {field: info[field][:-1]}


def longer(field):
    return lambda info: info | {field: info[field] + info[field][-1:]}


def handle(change):
    """The last handle, `{uuid: args}`, replaced by what the change makes of it."""

    def changed(info):
        handles = info["ipc_handles_pickled"]
        if isinstance(handles, dict):
            return info | {"ipc_handles_pickled": change(handles)}
        return last("ipc_handles_pickled", change)(info)

    return changed


def arg(position, value):
    return handle(lambda h: {u: (*args[:position], value, *args[position + 1 :]) for u, args in h.items()})


def each_args(change):
    return handle(lambda h: {uuid: change(args) for uuid, args in h.items()})


def base64_of(data):
    return base64.b64encode(data).decode()


def chain(*changes):
    def changed(info):
        for change in changes:
            info = change(info)
        return info

    return changed


of_another_gpu = handle(
    lambda h: dict.fromkeys(["01234567-89ab-cdef-0123-456789abcdef"], next(iter(h.values())))
)
BROKEN = {
    "names short": shorter("names"),
    "names long": lambda info: info | {"names": [*info["names"], "more"]},
    "dtype_names short": shorter("dtype_names"),
    "dtype_names long": longer("dtype_names"),
    "shapes short": shorter("shapes"),
    "shapes long": longer("shapes"),
    "no names": without("names"),
    "no dtype_names": without("dtype_names"),
    "no shapes": without("shapes"),
    "names null": setting(names=None),
    "name a number": last("names", 5),
    "names one text": setting(names="abc"),
    "names an object": setting(names={"a": 1, "b": 2, "c": 3}),
    "dtype unknown": last("dtype_names", "int33"),
    "dtype with prefix": last("dtype_names", lambda name: "torch." + name),
    "dtype torch.bfloat16": last("dtype_names", "torch.bfloat16"),
    "dtype no dtype": last("dtype_names", "load"),
    "dtype a number": last("dtype_names", 5),
    "shape negative": last("shapes", [-1]),
    "shape negative twice": last("shapes", [-1, -5]),
    "shape a number": last("shapes", 5),
    "shape of texts": last("shapes", ["5"]),
    "shape of floats": last("shapes", [5.0]),
    "shape huge": last("shapes", [1 << 62, 5]),
    "shape another": last("shapes", [4]),
    "shape with more rows": last("shapes", [2, 5]),
    "name twice": last("names", lambda name: name.removesuffix("c") + "a"),
    "field unknown": setting(more=1),
    "handles and pickled handles": setting(ipc_handles=[]),
    "raw handles": chain(without("ipc_handles_pickled"), setting(ipc_handles=[{"uuid": [1]}] * 3)),
    "no handles": without("ipc_handles_pickled"),
    "handles not encoded": setting(ipc_handles_pickled="[]"),
    "pickle of null": setting(ipc_handles_pickled=None),
    "not base64": setting(ipc_handles_pickled="!" * 8),
    "base64 cut": lambda info: shorter("ipc_handles_pickled")(Client.encoded(info)),
    "not ascii": setting(ipc_handles_pickled="ünïcode"),
    "not a pickle": setting(ipc_handles_pickled=base64_of(b"not a pickle")),
    "pickle cut": lambda info: info | {"ipc_handles_pickled": base64_of(pickle.dumps(info, 4)[:-20])},
    "pickle of broken text": setting(ipc_handles_pickled=base64_of(b"\x80\x04\x8c\x02\xff\xff.")),
    "pickle of a number": setting(ipc_handles_pickled=base64_of(pickle.dumps(5, 4))),
    "handle null": handle(lambda h: None),
    "handle without a uuid": handle(lambda h: {}),
    "handle of another uuid": of_another_gpu,
    "handle with GPU- prefix": handle(lambda h: {"GPU-" + uuid: args for uuid, args in h.items()}),
    "handle of a broken uuid": handle(lambda h: {"\ud800" + uuid: args for uuid, args in h.items()}),
    "handle of bare args": handle(lambda h: next(iter(h.values()))),
    "pair of function and args": each_args(lambda args: (rebuild_cuda_tensor, args)),
    "args 14": each_args(lambda args: args[:-1]),
    "args 16": each_args(lambda args: (*args, None)),
    "args null": each_args(lambda args: None),
    "args of texts": each_args(lambda args: ("x",) * 15),
    "size beyond the storage": arg(1, (1 << 30,)),
    "size huge": arg(1, (1 << 40, 1 << 40)),
    "size negative": arg(1, (-1,)),
    "stride beyond the storage": arg(2, (1 << 30,)),
    "stride negative": arg(2, (-1,)),
    "offset beyond the storage": arg(3, 1 << 30),
    "offset huge": arg(3, 1 << 100),
    "offset negative": arg(3, -1),
    "another dtype in the handle": arg(5, torch.float64),
    "storage handle of noise": arg(7, bytes(range(64))),
    "storage handle of no text": arg(7, b"\xff" * 64),
    "storage handle of nobody": arg(7, b"/torch_1_2_3"),
    "storage handle null": arg(7, None),
    "storage handle a path": arg(7, b"/../../etc/passwd"),
    "storage size negative": arg(8, -1),
    "counter file a path": arg(11, b"/../../etc/passwd"),
    "counter file of no text": arg(11, b"\xff" * 20),
    "counter slot negative": arg(12, -1),
    "counter slot beyond the file": arg(12, 1 << 40),
}
UNPACKED_ONLY = {
    "handles short": shorter("ipc_handles_pickled"),
    "handles long": longer("ipc_handles_pickled"),
    "dtype another": last("dtype_names", "float32"),
    "one dict for all": lambda info: info | {"ipc_handles_pickled": info["ipc_handles_pickled"][0]},
}
PACKED_ONLY = {
    "list of one dict": lambda info: info | {"ipc_handles_pickled": [info["ipc_handles_pickled"]]},
    "list of a dict per name": lambda info: info | {"ipc_handles_pickled": [info["ipc_handles_pickled"]] * 3},
    "no tensor_sizes": without("tensor_sizes"),
    "tensor_sizes null": setting(tensor_sizes=None),
    "tensor_sizes short": shorter("tensor_sizes"),
    "tensor_sizes long": lambda info: info | {"tensor_sizes": [*info["tensor_sizes"], 0]},
    "tensor_sizes empty": setting(tensor_sizes=[]),
    "size too large": last("tensor_sizes", 21),
    "size too small": last("tensor_sizes", 19),
    "size negative": last("tensor_sizes", -20),
    "size a float": last("tensor_sizes", 20.0),
    "size a text": last("tensor_sizes", "20"),
    "sizes beyond the buffer": chain(last("tensor_sizes", 4000), last("shapes", [1000])),
}
BROKEN_UNPACKED = BROKEN | UNPACKED_ONLY
BROKEN_PACKED = BROKEN | PACKED_ONLY


@pytest.mark.parametrize("thing", BROKEN_UNPACKED)
def test_a_broken_unpacked_update_is_refused_and_changes_nothing(client, thing):
    check_refusal(client, BROKEN_UNPACKED[thing], packed=False)


@pytest.mark.parametrize("thing", BROKEN_PACKED)
def test_a_broken_packed_update_is_refused_and_changes_nothing(client, thing):
    check_refusal(client, BROKEN_PACKED[thing], packed=True)


def check_refusal(client, broken, packed):
    """`a` and `b` are there, `c` is new: a partial apply shows, and so does a name that came in."""
    client.sync({name: model(1)[name] for name in "ab"}, packed)
    before = client.table()
    client.begin(packed)
    refused(client.update(broken(client.info(model(2), packed))))
    client.settle()
    assert client.table() == before
    assert client.get("/health").status_code == 200
    client.sync(model(2), packed)
    assert client.checksums() == digests(model(2))


OTHERS = [(torch.float32, 3, 2), (torch.float32, 6), (torch.float32, 2, 4), (torch.int32, 2, 3)]


@both_modes
@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_a_known_name_keeps_its_shape_and_dtype(client, packed, other):
    def grown(info):
        return client.info(model(2) | {"a": noise(*other, seed=2)}, packed)

    check_refusal(client, grown, packed)


@both_modes
def test_a_name_sent_twice_in_one_sync_is_refused(client, packed):
    client.begin(packed)
    ok(client.update(client.info(model(1), packed)))
    before = client.table()
    refused(client.update(client.info({"d": noise(torch.int8, 3), "a": model(2)["a"]}, packed)))
    assert client.table() == before
    client.sync(model(2), packed)
    assert client.checksums() == digests(model(2))


def test_packed_chunks_are_refused_by_an_unpacked_server_and_the_reverse(client):
    for packed in (True, False):
        before = client.table()
        client.begin(not packed)
        refused(client.update(client.info(model(1), packed)))
        assert client.table() == before
    client.sync(model(1), packed=True)
    assert client.checksums() == digests(model(1))


def test_a_counter_file_that_is_gone_leaves_the_server_serving(client):
    client.begin()
    reply = client.update(arg(11, b"/torch_0_0_0")(client.unpacked(model(1))))
    assert reply.status_code in (200, 500)
    assert client.get("/health").status_code == 200
    client.finish()
    client.sync(model(2))
    assert client.checksums() == digests(model(2))


def test_many_handles_of_another_gpu_are_refused_soon(client):
    count = 20_000
    client.begin()
    info = of_another_gpu(client.unpacked({"w": torch.ones(1)}))
    names = [f"w{i}" for i in range(count)]
    many = {key: value * count for key, value in info.items()} | {"names": names}
    began = time.monotonic()
    refused(client.update(many))
    assert time.monotonic() - began < 10


# ---- hostile payloads ------------------------------------------------------------------------------------


class Calls:
    """Pickles as a call of the function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def calling(module, name, argument):
    """A hand-made pickle that calls module.name(argument); no import needed here."""
    return f"c{module}\n{name}\n(S{argument!r}\ntR.".encode()


def hostile(canary):
    touch = f"touch {canary}"
    return {
        "os.system": pickle.dumps([Calls(os.system, touch)] * 3, 4),
        "eval": pickle.dumps([Calls(eval, f"open({str(canary)!r}, 'w')")] * 3, 4),
        "exec": pickle.dumps([Calls(exec, f"open({str(canary)!r}, 'w')")] * 3, 4),
        "check_output": pickle.dumps([Calls(subprocess.check_output, ["touch", str(canary)])] * 3, 4),
        "getattr": pickle.dumps([Calls(getattr, Calls(__import__, "os"), "system")] * 3, 4),
        "protocol 0": calling("os", "system", touch),
        "posix": calling("posix", "system", touch),
        "torch.load": calling("torch", "load", str(canary)),
        "torch.hub.load": calling("torch.hub", "load", str(canary)),
        "load_from_bytes": pickle.dumps(
            [Calls(torch.storage._load_from_bytes, calling("os", "system", touch))]
        ),
        "rebuild": pickle.dumps([Calls(rebuild_cuda_tensor, *range(15))] * 3, 4),
        "dotted": b"\x80\x04\x8c\x05torch\x8c\x0dhub.os.system\x93" + pickle.dumps(touch, 0)[:-1] + b"\x85R.",
        "build on a class": b"\x80\x04ctorch\nTensor\n}\x8c\x05storeK\x01sb.",
    }


@pytest.mark.parametrize("attack", hostile("x"))
def test_a_hostile_pickle_runs_nothing(client, attack, tmp_path):
    canary = tmp_path / "canary"
    check_refusal(client, setting(ipc_handles_pickled=base64_of(hostile(canary)[attack])), packed=False)
    assert not canary.exists()


BOMBS = {
    "lists in lists": b"\x80\x04" + b"]" * 2_000_000 + b"a" * 1_999_999 + b".",
    "tuples in tuples": b"\x80\x04)" + b"\x85" * 2_000_000 + b".",
    "marks": b"\x80\x04" + b"(" * 5_000_000 + b"l.",
    "huge memo index": b"\x80\x04]r" + (0x7FFFFFFF).to_bytes(4, "little") + b".",
    "huge bytes": b"\x80\x04\x8e" + (1 << 62).to_bytes(8, "little") + b"x.",
    "doubling memo": b"\x80\x04]" + b"".join(b"q\x00]h\x00ah\x00a" for _ in range(64)) + b".",
    "huge integer": b"\x80\x04\x8b" + (10_000_000).to_bytes(4, "little") + b"\x7f" * 10_000_000 + b".",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_pickle_bomb_is_refused_soon(client, bomb):
    client.begin()
    began = time.monotonic()
    refused(client.update(setting(ipc_handles_pickled=base64_of(BOMBS[bomb]))(client.described(model(1)))))
    assert time.monotonic() - began < 5
    client.sync(model(1))
    assert client.checksums() == digests(model(1))


# ---- a server with a model -------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=ONE_WORKER)
def linear_server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "a_model.py").write_text("import torch\ndef linear():\n    return torch.nn.Linear(3, 2)\n")
    with Server(request.param, "--model", "a_model:linear", PYTHONPATH=str(folder)) as server:
        yield server


@pytest.fixture
def linear(linear_server):
    for client in visit(linear_server):
        client.prefix = ""
        yield client


LINEAR = {"weight": noise(torch.float32, 2, 3), "bias": noise(torch.float32, 2)}


def test_a_model_has_its_parameters_at_boot_and_takes_them(linear):
    assert linear.checksums().keys() == LINEAR.keys()
    linear.sync(LINEAR)
    assert linear.checksums() == digests(LINEAR)


@both_modes
@pytest.mark.parametrize("other", [
    {"weight": noise(torch.float32, 3, 2)},
    {"bias": noise(torch.float32, 3)},
    {"bias": noise(torch.float64, 2)},
    {"more": noise(torch.float32, 2)},
    {"module.bias": noise(torch.float32, 2)},
], ids=lambda other: " ".join(other))  # fmt: skip
def test_a_model_takes_no_unknown_name_and_no_other_shape_or_dtype(linear, packed, other):
    linear.sync(LINEAR, packed)
    linear.begin(packed)
    refused(linear.update(linear.info({"weight": torch.zeros(2, 3)} | other, packed)))
    assert linear.checksums() == digests(LINEAR)


# ---- the gate --------------------------------------------------------------------------------------------


def test_without_the_gate_the_first_update_is_500_and_names_the_variable():
    with Server("cpu", gate=False) as server:
        client = Client(server)
        ok(client.init())
        ok(client.post(START))
        assert GATE in refused(client.update(client.unpacked(model(1))))
        assert client.table() == {} and client.get("/health").status_code == 200
        client.give_up()


# ---- several workers -------------------------------------------------------------------------------------

TP0, TP1, DP1 = "dp0:pp0:pcp0:tp0", "dp0:pp0:pcp0:tp1", "dp1:pp0:pcp0:tp0"


@both_modes
@pytest.mark.parametrize("chunks", [1, 3])
def test_every_worker_reads_the_handle_of_its_own_gpu(two_workers, packed, chunks):
    two_workers.sync(model(1), packed, chunks)
    assert two_workers.checksums(TP0) == two_workers.checksums(TP1) == digests(model(1))
    assert set(two_workers.counters()) == {0}


def uuid_of(client, worker):
    return ipc_codec.gpu_uuid(client.devices[worker])


@both_modes
@pytest.mark.parametrize("absent", [0, 1])
def test_a_handle_missing_one_workers_uuid_changes_no_worker(two_workers, packed, absent):
    uuid = uuid_of(two_workers, absent)
    check_refusal(two_workers, handle(lambda h: {u: args for u, args in h.items() if u != uuid}), packed)
    assert two_workers.checksums(TP1) == digests(model(2))


@both_modes
def test_a_weight_that_one_worker_cannot_take_changes_no_worker(two_workers, packed):
    two_workers.begin(packed)
    ok(two_workers.update(for_each_worker(two_workers, [{"a": torch.ones(2)}, {"a": torch.ones(3)}], packed)))
    ok(two_workers.finish())
    before = two_workers.table()
    for size in (2, 3):
        two_workers.begin(packed)
        refused(two_workers.update(two_workers.info({"a": torch.zeros(size)}, packed)))
        assert two_workers.table() == before


def for_each_worker(client, subsets, packed=False):
    """A rank-local list: each entry has handles for its own worker only."""
    entries = []
    for worker, weights in enumerate(subsets):
        info, uuid = client.info(weights, packed), uuid_of(client, min(worker, len(client.devices) - 1))
        handles = info["ipc_handles_pickled"]
        own = {uuid: handles[uuid]} if packed else [{uuid: handle[uuid]} for handle in handles]
        entries.append(info | {"ipc_handles_pickled": own})
    return entries


@both_modes
def test_a_rank_local_list_gives_every_worker_its_own_subset(two_workers, packed):
    two_workers.begin(packed)
    first, second = {"a": model(1)["a"]}, {"b": model(1)["b"], "c": model(1)["c"]}
    ok(two_workers.update(for_each_worker(two_workers, [first, second], packed)))
    ok(two_workers.finish())
    assert two_workers.checksums(TP0) == digests(first)
    assert two_workers.checksums(TP1) == digests(second)


@pytest.mark.parametrize("thing", ["names short", "shapes short", "dtype unknown", "not base64"])
@both_modes
def test_a_broken_entry_of_a_rank_local_list_changes_no_worker(two_workers, packed, thing):
    two_workers.sync(model(1), packed)
    before = two_workers.table()
    two_workers.begin(packed)
    good, bad = for_each_worker(two_workers, [model(2), model(2)], packed)
    refused(two_workers.update([good, BROKEN[thing](bad)]))
    assert two_workers.table() == before


def test_an_empty_entry_of_a_rank_local_list_changes_nothing_there(two_workers):
    two_workers.begin()
    ok(two_workers.update(for_each_worker(two_workers, [model(1), {}])))
    ok(two_workers.finish())
    assert (two_workers.checksums(TP0), two_workers.checksums(TP1)) == (digests(model(1)), {})


def test_a_rank_local_list_that_is_too_short_is_refused(two_workers):
    before = two_workers.table()
    for entries in ([], for_each_worker(two_workers, [model(1)])):
        two_workers.begin()
        refused(two_workers.update(entries))
        assert two_workers.table() == before
        refused(two_workers.finish())


def test_a_rank_local_list_that_is_longer_passes(two_workers):
    two_workers.begin()
    ok(two_workers.update(for_each_worker(two_workers, [model(1), model(2), model(3)])))
    ok(two_workers.finish())
    assert two_workers.checksums(TP0) == digests(model(1))
    assert two_workers.checksums(TP1) == digests(model(2))


@pytest.mark.parametrize("entries", [[None], [None, None], [5]], ids=json.dumps)
def test_a_rank_local_list_of_anything_but_objects_is_400(two_workers, entries):
    two_workers.begin()
    reply = two_workers.post(UPDATE, {"update_info": entries})
    assert bad_body(reply).startswith("body.update_info")
    ok(two_workers.update(two_workers.unpacked(model(1))))
    ok(two_workers.finish())


def test_two_tensor_parallel_workers_are_a_world_of_two(two_workers):
    for query in ("", "?include_dp=true", "?include_dp=false"):
        ok(two_workers.get("/get_world_size" + query), {"world_size": 2})


def test_data_parallel_workers_have_keys_of_their_own(data_parallel):
    data_parallel.sync(model(1))
    assert {key[: len(TP0)] for key in data_parallel.table()} == {TP0, DP1}
    assert data_parallel.checksums(TP0) == data_parallel.checksums(DP1) == digests(model(1))


def test_the_world_without_data_parallelism_is_smaller(data_parallel):
    for query, size in [("", 2), ("?include_dp=true", 2), ("?include_dp=false", 1)]:
        ok(data_parallel.get("/get_world_size" + query), {"world_size": size})


def test_a_rank_local_list_is_indexed_by_data_parallel_index_times_world_size_plus_rank(data_parallel):
    data_parallel.begin()
    ok(data_parallel.update(for_each_worker(data_parallel, [model(1), model(2)])))
    ok(data_parallel.finish())
    assert data_parallel.checksums(TP0) == digests(model(1))
    assert data_parallel.checksums(DP1) == digests(model(2))


# ---- concurrency -----------------------------------------------------------------------------------------


def test_of_fifty_starts_at_once_exactly_one_is_let_in(client):
    clients = [Client(client) for _ in range(50)]
    gate = threading.Barrier(50)

    def start(one):
        gate.wait()
        return one.post(START).status_code

    with ThreadPoolExecutor(50) as pool:
        assert sorted(pool.map(start, clients)) == [200] + [500] * 49
    ok(client.update(client.unpacked(model(1))))
    ok(client.finish())


def test_two_updates_at_once_are_both_exact(client):
    client.begin()
    others = [Client(client), Client(client)]
    infos = [other.unpacked(model(seed)) for seed, other in enumerate(others)]
    with ThreadPoolExecutor(2) as pool:
        for reply in pool.map(Client.update, others, infos):
            ok(reply)
    ok(client.finish())
    for seed, other in enumerate(others):
        assert other.checksums() == digests(model(seed))
        other.give_up()


# ---- command line ----------------------------------------------------------------------------------------


def run_server(*options):
    command, env = [sys.executable, "server.py", *options], environment(True)
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


# A process of its own costs seconds; tests/test_environment.py has the same words without one.


@pytest.mark.long
def test_help_exits_0():
    done = run_server("--help")
    assert done.returncode == 0 and "--data-parallel-size" in done.stdout


@pytest.mark.long
def test_a_port_in_use_is_said_in_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run_server("--port", port, "--device", "cpu")
    assert done.returncode != 0 and "listening" not in done.stdout
    assert len(done.stderr.splitlines()) == 1 and port in done.stderr


WRONG_OPTIONS = [("--device", "tpu"), ("--device", "cpu:0,cpu:1", "--data-parallel-size", "3")]


@pytest.mark.long
@pytest.mark.parametrize("options", WRONG_OPTIONS, ids=" ".join)
def test_a_wrong_option_is_said_without_a_traceback(options):
    done = run_server("--port", "0", *options)
    assert done.returncode != 0 and done.stderr and "Traceback" not in done.stderr


@pytest.mark.long
def test_sigterm_ends_the_server_in_mid_sync_without_a_traceback():
    with Server("cpu") as server:
        client = Client(server)
        client.begin(packed=True)
        ok(client.update(client.packed(model(1))))
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(timeout=5)
        assert "Traceback" not in server.stderr()
        client.give_up()


# ---- completions -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=ONE_WORKER)
def byte_lm_server(request):
    with Server(request.param) as server:
        yield server


@pytest.fixture
def byte_lm(byte_lm_server):
    """A client of a server that holds exactly the default model."""
    for client in visit(byte_lm_server):
        client.prefix = ""
        client.weights = default_model()
        client.sync(client.weights)
        yield client


def default_model():
    import trainer  # the default model of both sides; only these tests need it

    torch.manual_seed(0)
    return trainer.ByteLM().state_dict()


def complete(client):
    model_name = ok(client.get("/v1/models"))["data"][0]["id"]
    body = {"model": model_name, "prompt": "ab", "max_tokens": 4, "temperature": 0}
    return client.post("/v1/completions", body)


def test_models_lists_one_model_as_openai_does(client):
    body = ok(client.get("/v1/models"))
    assert body["object"] == "list"
    assert [(type(entry["id"]), entry["object"]) for entry in body["data"]] == [(str, "model")]


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
@pytest.mark.parametrize("path,right", [("/v1/models", "GET"), ("/v1/completions", "POST")])
def test_a_wrong_method_of_an_openai_route_is_405(client, method, path, right):
    check_method(client, method, path, right)


def test_a_completion_is_the_usual_openai_one(byte_lm):
    body = ok(complete(byte_lm))
    assert body["object"] == "text_completion"
    assert [(choice["index"], type(choice["text"])) for choice in body["choices"]] == [(0, str)]
    assert complete(byte_lm).json()["choices"] == body["choices"]


@pytest.mark.parametrize("query", ["", "?mode=abort", "?mode=wait"])
def test_new_completions_are_503_while_paused(byte_lm, query):
    ok(byte_lm.post("/pause" + query))
    assert complete(byte_lm).status_code == 503
    ok(byte_lm.post("/resume"))
    ok(complete(byte_lm))


def test_completions_queue_while_paused_with_keep(byte_lm):
    ok(byte_lm.post("/pause?mode=keep"))
    with ThreadPoolExecutor(1) as pool:
        queued = pool.submit(complete, Client(byte_lm))
        with pytest.raises(TimeoutError):
            queued.result(timeout=0.3)
        ok(byte_lm.post("/resume"))
        ok(queued.result(timeout=30))


def test_a_mix_of_weights_answers_503_until_a_good_finish(byte_lm):
    half, rest = split(byte_lm.weights, 2)
    byte_lm.begin()
    ok(complete(byte_lm))
    ok(byte_lm.update(byte_lm.unpacked(half)))
    assert complete(byte_lm).status_code == 503
    ok(byte_lm.update(byte_lm.unpacked(rest)))
    ok(byte_lm.finish())
    ok(complete(byte_lm))


def test_a_failed_sync_that_applied_a_chunk_answers_503_until_a_full_one(byte_lm):
    half, rest = split(byte_lm.weights, 2)
    byte_lm.begin()
    ok(byte_lm.update(byte_lm.unpacked(half)))
    refused(byte_lm.update(byte_lm.unpacked(rest) | {"names": []}))
    assert complete(byte_lm).status_code == 503
    byte_lm.sync(byte_lm.weights, packed=True)
    ok(complete(byte_lm))


@pytest.mark.parametrize("goes_on", [False, True], ids=["", "goes on"])
@pytest.mark.parametrize("told", [None, "v1"], ids=["without a version", "with one"])
def test_an_update_that_is_closed_for_a_trainer_that_waits_is_a_mix(byte_lm, told, goes_on):
    """Closed for it is what ends without a version, right after its start was refused."""
    served = goes_on or told is not None
    byte_lm.begin()
    ok(byte_lm.update(byte_lm.unpacked(byte_lm.weights)))
    refused(byte_lm.post(START))
    if goes_on:
        ok(byte_lm.update(byte_lm.unpacked({})))
    ok(byte_lm.finish(weight_version=told))
    assert (complete(byte_lm).status_code == 200) == served
    ok(byte_lm.post(START))
    ok(byte_lm.finish(weight_version="empty"))
    assert (complete(byte_lm).status_code == 200) == served, "what is a mix is repaired by what overwrites it"
    byte_lm.sync(byte_lm.weights)
    ok(complete(byte_lm))


def test_however_often_updates_are_closed_no_trainer_writes_into_another(client):
    late = client.unpacked({"e": torch.zeros(0), "x": noise(torch.int32, 4, seed=1)})
    client.begin()
    ok(client.update(late))
    for seed in (2, 3):
        refused(client.post(START))
        ok(client.finish())
        ok(client.post(START))
        ok(client.update(client.unpacked({"y": noise(torch.int32, 4, seed=seed)})))
    assert "closed for another trainer" in refused(client.update(late))


def test_a_trainer_whose_update_was_closed_writes_into_no_other(client):
    """Packed, it goes on with the export that it began with, which was released with its update."""
    first, second = model(0), model(1)
    buffers, handles = client.buffers(nbytes(first))
    one, *others = (client.packed({name: weight}, buffers, handles) for name, weight in first.items())
    client.begin(packed=True)
    ok(client.update(one))
    refused(client.post(START))  # the second trainer's, which then closes what is open, and sends everything
    ok(client.finish())
    ok(client.post(START))
    ok(client.update(client.packed({"a": second["a"]})))
    assert "closed for another trainer" in refused(client.update(others[0]))
    client.sync(second, packed=True)
    assert client.checksums() == digests(second)
    assert all(lent.renew() for lent in [buffer.exports for buffer in buffers])
    client.begin(packed=True)
    ok(client.update(client.packed(first, buffers, handles)))  # renewed it is another loan
    ok(client.finish())
    assert client.checksums() == digests(first)


def test_a_refusal_before_the_first_chunk_leaves_the_old_weights_serving(byte_lm):
    byte_lm.begin()
    refused(byte_lm.update(byte_lm.unpacked(byte_lm.weights) | {"names": []}))
    ok(complete(byte_lm))


# ---- an update that is held ------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=ONE_WORKER)
def slow_server(request, tmp_path_factory):
    transcript = tmp_path_factory.mktemp("slow") / "sync.jsonl"
    with Server(request.param, "--hold-seconds", "1", "--transcript", str(transcript)) as server:
        yield server


@pytest.fixture
def slow(slow_server):
    yield from visit(slow_server)


def test_while_an_update_runs_health_version_and_world_size_answer_and_what_it_changes_waits(slow):
    slow.begin()
    info = slow.unpacked(model(1))
    with ThreadPoolExecutor(6) as pool:
        update = pool.submit(slow.update, info)
        paths = ["/health", "/version", "/get_world_size", "/weight_info", "/is_paused"]
        watch = [pool.submit(longest_answer, Client(slow), path, update) for path in paths]
        *at_once, weight_info, is_paused = (longest.result() for longest in watch)
    ok(update.result())
    assert max(at_once) < 0.5 < min(weight_info, is_paused)
    ok(slow.finish())
    assert slow.checksums() == digests(model(1))


def longest_answer(client, path, running):
    """The longest that one GET took of those that began while the other call ran."""
    longest = 0.0
    while not running.done():
        began = time.monotonic()
        assert client.get(path).status_code == 200
        longest = max(longest, time.monotonic() - began)
    return longest


# ---- design.md's other additions -------------------------------------------------------------------------


@pytest.mark.parametrize("path", [INIT, START, "/pause", "/resume"])
def test_a_foreign_browser_origin_is_403(client, path):
    headers = {"Origin": "http://a.example"}
    reply = client.send("POST", path, b'{"init_info": {"packed": true}}', JSON, headers=headers)
    assert reply.status_code == 403
    ok(client.get("/is_paused"), {"is_paused": False})
    ok(client.post(START))


OPTIONS = ["host", "port", "device", "data-parallel-size", "model"]
OPTIONS += ["strict", "hold-seconds", "transcript", "judge"]


def test_help_lists_every_option_of_the_design():
    done = run_server("--help")
    for option in OPTIONS:
        assert f"--{option}" in done.stdout


# ==== The server cases: any server, by URL ================================================================
#
#   WEIGHT_SYNC_URL=http://host:8000 pytest test_roundtrip.py
#
# judges a server on this machine; README, "Judge a server", has the variables. The other tests of this file
# are then not collected, and the file needs only its two leaves. Without a URL the cases run against our own.
#
# A case is one promise, under a stable id; its docstring says what holds. It reads back what the server has
# (`Peer.arrived`), and is judged only where the cases that it builds on were not failed: so one fault turns
# one case red, the first that tells it from all others.

URL = os.environ.get("WEIGHT_SYNC_URL", "").rstrip("/")
CHECKPOINT = os.environ.get("WEIGHT_SYNC_CHECKPOINT", "")
GATE_IS_OFF = os.environ.get("WEIGHT_SYNC_GATE") == "off"
STRICT = os.environ.get("WEIGHT_SYNC_STRICT") == "1" or not URL  # ours is held to every SHOULD
MODES = {"unpacked": False, "packed": True}


def read_expected(path):
    """{case id: reason} of a file with a line `case-id  reason` for each; one that begins with # is none."""
    try:
        text = Path(path).read_text()
    except OSError as exc:
        raise pytest.UsageError(f"WEIGHT_SYNC_EXPECTED: {exc}") from None
    lines = [line.split(None, 1) for line in text.splitlines() if not line.startswith("#")]
    if lonely := [line[0] for line in lines if len(line) == 1]:
        raise pytest.UsageError(f"{path}: no reason after {', '.join(lonely)}")
    return {id: reason.strip() for id, reason in filter(None, lines)}


EXPECTED = read_expected(path) if (path := os.environ.get("WEIGHT_SYNC_EXPECTED")) else {}


@dataclass(frozen=True)
class Case:
    """One promise. run: takes the peer, and raises where it is not kept; needs: ids of what it builds on."""

    id: str
    run: Callable[..., None]
    needs: tuple[str, ...]


CASES: dict[str, Case] = {}


def case(id, *needs):
    """Decorator: enters the function in CASES. All cases but the first build on `health`."""

    def enter(run):
        assert id not in CASES and CASES.keys() >= set(needs), f"{id} comes twice, or before what it needs"
        CASES[id] = Case(id, run, needs or tuple(CASES)[:1])
        return run

    return enter


def in_both_modes(name, *needs):
    """Decorator: two cases of a function (peer, packed); {} in what they need is the mode."""

    def enter(run):
        for mode, packed in MODES.items():
            needed = [need.format(mode) for need in needs]
            case(f"{name}-{mode}", *needed)(functools.partial(run, packed=packed))
        return run

    return enter


# ---- the server under test -------------------------------------------------------------------------------


class AtURL:
    """A server that somebody else started, and the devices that its workers read from."""

    def __init__(self, url):
        self.url, self.port = url, None
        self.devices = os.environ.get("WEIGHT_SYNC_DEVICE", "").split(",")
        if not self.devices[0]:
            kind = "cuda" if torch.cuda.is_available() else "cpu"
            self.devices = [f"{kind}:{worker}" for worker in range(world_size(url))]


MOST_WORKERS = 1024  # what a server says is made room for


def world_size(url):
    """Its workers; 1 where it does not say, or what cannot be: a case finds that."""
    unreadable = requests.RequestException, ValueError, LookupError, TypeError
    with requests.Session() as http, contextlib.suppress(*unreadable):
        http.trust_env = False
        size = http.get(f"{url}/get_world_size", timeout=60).json()["world_size"]
        return int(size) if size in range(1, MOST_WORKERS + 1) else 1
    return 1


@contextlib.contextmanager
def saying(body):
    """A server that answers everything with this: its URL."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as running:
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.mark.parametrize("size", [0, -1, 1025, 10**9, "8", [8], None, float("inf")])
def test_a_number_of_workers_that_cannot_be_is_taken_for_one(size):
    with saying({"world_size": size}) as url:
        assert world_size(url) == 1
    with saying({"world_size": 1024}) as url:
        assert world_size(url) == 1024


def test_a_server_without_checksums_in_its_answer_fails_its_case_with_a_sentence():
    with saying({"match": True}) as url:
        peer = Peer(AtURL(url))
        with pytest.raises(AssertionError, match="without checksums"):
            peer.look()


class Peer(Client):
    """A trainer of the server under test, and what it knows of it so far.

    It sends the weights "A" and "B": all that the server's model has, or where it takes any names a few
    of its own. Each has the same names, dtypes and shapes, and other values.
    """

    def __init__(self, server):
        super().__init__(server)
        self.prefix = "" if CHECKPOINT else f"by-url-{time.time_ns():x}."
        self.failed: dict[str, str] = {}  # case id -> why nothing that builds on it is judged
        self.unsettled = ""  # the case before, where it did not pass
        self.gone = ""  # why no case is judged any more
        self.at = ""  # label of the weights that the server has, where it is known
        self.answered_at = 0.0
        self.names_are_ours = None if CHECKPOINT else True  # whether checksums are those of what was sent
        self.known: dict[str, Any] = {}  # label of weights -> what showed when they were there
        self.of: dict[str, dict[str, torch.Tensor]] = {
            label: noise_like(CHECKPOINT, seed) if CHECKPOINT else aligned(seed)
            for seed, label in enumerate("AB")
        }

    # -- calls

    def send(self, *request, **more):
        """A new connection where the old one may be closed: vLLM does so after a 500, and after 5 s."""
        if time.monotonic() - self.answered_at > 3:
            self.http.close()
        try:
            reply = super().send(*request, **more)
        except requests.RequestException as exc:
            method, path, *body = request
            pytest.fail(f"{method} {path} has no answer: {exc}; the body: {body[:1]!r:.200}", pytrace=False)
        self.answered_at = time.monotonic() if reply.status_code < 500 else 0
        return reply

    def route(self, method, path, body=NO_BODY):
        """The answer of a route that a server may lack; then the case is not observable."""
        reply = self.post(path, body) if method == "POST" else self.get(path)
        if reply.status_code in (404, 405, 501):
            unobservable(f"{path} answers {reply.status_code}")
        return reply

    def open(self, packed=False):
        """init and start, whatever was left open: a trainer closes that with a finish."""
        self.at = ""
        good(self.init(packed))
        if not accepted(reply := self.post(START)):
            self.finish()
            reply = self.post(START)
        good(reply)

    def put(self, label, packed=False, chunks=1):
        """A good sync."""
        self.open(packed)
        parts = split(self.of[label], chunks)
        if packed and chunks > 1:
            self.send_packed(parts)
        else:
            for part in parts:
                good(self.update(self.info(part, packed)))
        good(self.finish())
        self.at = label

    def other(self):
        """The label of weights that are not there, so that they can be seen to arrive; then `at` is known."""
        if self.at not in self.of:
            self.put("A")
        return "B" if self.at == "A" else "A"

    def complete(self, label, packed=False, info=None):
        """The open sync goes on to its end with these weights, and they have arrived."""
        good(self.update(info or self.info(self.of[label], packed)))
        good(self.finish())
        self.arrived(label)

    def put_and_see(self, label, packed=False, chunks=1):
        """A good sync, which has arrived."""
        self.put(label, packed, chunks)
        self.arrived(label)

    def recover(self, label, attempts=1):
        """After a probe: the server lives, and a full good sync goes through (`arrived` is for the case)."""
        assert self.get("/health").status_code == 200, "the server is not healthy any more"
        for left in reversed(range(attempts)):
            try:
                return self.put(label)
            except AssertionError:
                if not left:
                    raise

    # -- read-back

    @functools.cached_property
    def has_checksums(self):
        return self.post("/weight_checker", {"action": "checksum"}).status_code not in (404, 405, 501)

    def look(self):
        """What shows of the weights, after a good sync: {key: checksum}, or greedy completions."""
        if not self.has_checksums:
            return self.completions()
        table = checksums_in(self.post("/weight_checker", {"action": "checksum"}))
        return {key: value for key, value in table.items() if self.prefix in key}

    def completions(self):
        model = self.route("GET", "/v1/models").json()["data"][0]["id"]
        asked = {"model": model, "max_tokens": 16, "temperature": 0}
        prompts = ["The sky is", "2 + 2 =", "Once upon a time", "QWERTY"]
        replies = [self.post("/v1/completions", asked | {"prompt": prompt}) for prompt in prompts]
        if not self.known and not accepted(replies[0]):
            unobservable(f"completions answer {replies[0].status_code}")
        texts = [accepted(reply) and reply.json()["choices"][0]["text"] for reply in replies]
        return [text or f"(answers {reply.status_code})" for text, reply in zip(texts, replies, strict=True)]

    def arrived(self, label, weights=None):
        """The server has these weights. Fails where it has others; skips where nothing can be seen."""
        if wrong := self.wrong(label, weights):
            pytest.fail(f"after a good sync of {label}: {wrong}")
        self.at = label

    def wrong(self, label, weights=None):
        """What differs from the weights of that label; empty where nothing does.

        Compared by bytes where the server holds what was sent, under its names. A real engine fuses and
        shards: then by what showed when weights of that label came before.
        """
        weights = self.of[label] if weights is None else weights
        seen = self.look()
        if self.names_are_ours is not False and isinstance(seen, dict):
            odd = self.odd(seen, weights)
            if self.names_are_ours is None:
                self.names_are_ours = not odd
            if self.names_are_ours:
                return odd
        if label not in self.known:
            if seen in self.known.values():
                unobservable("other weights show no other completions") if isinstance(seen, list) else None
                return "the checksums are those of other weights"
            self.known[label] = seen
        return "" if seen == self.known[label] else "what shows is not what showed with these weights before"

    def odd(self, table, weights):
        held: dict[str, list[str]] = {}
        for key, value in table.items():
            held.setdefault(key.split(":", 4)[-1], []).append(value)
        for name, weight in weights.items():
            found = held.get(self.prefix + name, [])
            if len(found) != len(self.devices):
                return f"{name} is on {len(found)} of {len(self.devices)} workers"
            if set(found) != {ipc_codec.checksum(weight)}:
                return f"{name} ({weight.dtype}, {list(weight.shape)}) has other bytes than were sent"
        return ""

    def by_worker(self):
        """What shows, worker by worker; skips where that cannot be told."""
        seen = self.look()
        if not isinstance(seen, dict) or not all(KEY.match(key) for key in seen):
            unobservable("no checksums by worker")
        workers: dict[tuple[int, ...], dict[str, str]] = {}
        for key, value in seen.items():
            rank = KEY.match(key)
            workers.setdefault(tuple(map(int, rank.groups())), {})[key[rank.end() :]] = value
        return [workers[rank] for rank in sorted(workers)]

    # -- verdicts

    def should(self, holds, text):
        """Reports what a server should do; fails where SHOULD counts."""
        if not holds and (STRICT or self.case.id in EXPECTED):
            pytest.fail(f"SHOULD: {text}")
        elif not holds:
            self.note("should", text)
            warnings.warn(f"{self.case.id}: SHOULD: {text}", stacklevel=2)

    def not_judged(self, case):
        """Why this case cannot be judged; empty where it can."""
        if self.unsettled and not self.gone and not self.usable():
            self.gone = f"not judged: the server is gone, or lets no sync start, since {self.unsettled}"
        why = next((self.failed[need] for need in case.needs if need in self.failed), self.gone)
        if case.id != "health" and GATE_IS_OFF is not (case.id == "gate.off"):
            why = f"not observable: the gate is {'off' if GATE_IS_OFF else 'open'} (WEIGHT_SYNC_GATE)"
        if why:
            self.failed[case.id] = why
        return why

    def usable(self):
        """Whether a sync can be started, after a case that left things as they were."""
        with contextlib.suppress(pytest.fail.Exception):
            self.calm()
            return accepted(self.post(START)) and accepted(self.finish())
        return False

    def calm(self):
        """As idle, unpaused and unpacked as it can be made."""
        self.at = ""
        self.finish()
        self.post(SHUTDOWN)
        self.init()
        self.post("/resume")


KEY = re.compile(r"dp(\d+):pp(\d+):pcp(\d+):tp(\d+):")


def unobservable(why):
    pytest.skip(f"not observable: {why}")


def accepted(reply):
    return 200 <= reply.status_code < 300


def good(reply):
    """The JSON object of a 2xx."""
    assert accepted(reply), f"{reply.request.path_url} answers {reply.status_code}: {reply.text[:500]}"
    body = reply.json()
    assert isinstance(body, dict), f"{reply.request.path_url} answers {body!r}, no JSON object"
    return body


def checksums_in(reply):
    """The table in a good answer of /weight_checker."""
    table = good(reply).get("checksums")
    assert isinstance(table, dict), f"/weight_checker answers {reply.text[:200]!r}, without checksums"
    return table


def bad(reply):
    """A refusal: any status but 2xx."""
    assert not accepted(reply), f"{reply.request.path_url} answers {reply.status_code} to what it refuses"


def aligned(seed):
    """Weights for a server that takes any names. In this order every packed offset is aligned."""
    specs = [(torch.float64, 3), (torch.float32, 2, 3), (torch.int32, 5), (torch.bfloat16, 3, 4)]
    return in_order(*(noise(*spec, seed=seed) for spec in [*specs, (torch.float16, 7), (torch.uint8, 5)]))


# ---- a checkpoint's names --------------------------------------------------------------------------------

SAFETENSORS = {"BOOL": "bool", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
SAFETENSORS |= {"F8_E8M0": "float8_e8m0fnu", "C64": "complex64"}
SAFETENSORS |= {
    f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)
}
SAFETENSORS |= {f"F{bits}": f"float{bits}" for bits in (16, 32, 64)}


@functools.cache
def layout(path):
    """{name: (dtype, shape, what it is tied to)} of a .safetensors file, a state dict, or a folder."""
    if Path(path).is_dir():
        files = sorted(file for kind in ("safetensors", "bin", "pt") for file in Path(path).glob(f"*.{kind}"))
        return {name: spec for file in files for name, spec in layout(file).items()}
    if Path(path).suffix == ".safetensors":
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        named = {name: (SAFETENSORS[entry["dtype"]], entry["shape"]) for name, entry in header.items()}
        return {name: (getattr(torch, dtype), shape, name) for name, (dtype, shape) in named.items()}
    state = torch.load(path, map_location="cpu", weights_only=True)
    return {
        name: (w.dtype, list(w.shape), (w.data_ptr(), w.dtype, w.shape) if w.numel() else name)
        for name, w in state.items()
    }


def noise_like(path, seed):
    """Small finite numbers under the checkpoint's names; what is tied there is tied here.

    The largest items come first, so that every packed offset is aligned.
    """
    largest_first = sorted(layout(path).items(), key=lambda item: -item[1][0].itemsize)
    made: dict[Any, torch.Tensor] = {}
    weights = {}
    for at, (name, (dtype, shape, tie)) in enumerate(largest_first):
        weights[name] = made.setdefault(tie, small(dtype, shape, at, seed))
    return weights


def small(dtype, shape, at, seed):
    """The tensor of the seed at that place. An integer or bool differs from the other seed's everywhere."""
    generator = torch.Generator().manual_seed(2 * at + (seed if dtype.is_floating_point else 0))
    if dtype in (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2):  # their bytes are finite, and near 1
        return torch.randint(120, 127, shape, generator=generator).to(torch.uint8).view(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return (torch.randn(shape, generator=generator) / 50 * (1 + seed)).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool() ^ bool(seed)
    return (2 * torch.randint(0, 5, shape, generator=generator) + seed).to(dtype)


# ---- the cases: does it speak at all ---------------------------------------------------------------------

GARBAGE = "bm90IGEgcGlja2xl"  # "not a pickle"


@case("health")
def _(peer):
    """GET /health answers 200."""
    try:
        assert peer.get("/health").status_code == 200
    except requests.ConnectionError:
        pytest.fail(f"no server answers at {peer.url}: is it started?", pytrace=False)


@case("refusal.any")
def _(peer):
    """Not everything is answered with 2xx: here is nothing right."""
    replies = [peer.finish(), peer.post(UPDATE, {"update_info": {}}), peer.post(INIT, [])]
    replies += [peer.get("/no_such_route"), peer.send("POST", INIT, b"{", JSON)]
    assert not all(map(accepted, replies)), "the server says 200 to everything; its refusals cannot be judged"


@case("gate.off")
def _(peer):
    """Without the gate init and start are 200, and the first update is 500 and names the variable."""
    good(peer.init())
    good(peer.post(START))
    reply = peer.update(peer.unpacked(peer.of["A"]))
    assert reply.status_code == 500 and GATE in reply.text, (reply.status_code, reply.text[:500])


# ---- the cases: syncs ------------------------------------------------------------------------------------


@in_both_modes("sync")
def _(peer, packed):
    """A, B, A: each arrives; so both modes give the same checksums."""
    for label in "ABA":
        peer.put_and_see(label, packed)
    if CHECKPOINT and peer.names_are_ours is False:
        peer.note("read-back", "what shows has other names or bytes than were sent: judged by A, B, A")


@case("loan.reply", "sync-packed")
def _(peer):
    """The 200 of an update means read: the packed buffer may be overwritten at once."""
    other = peer.other()
    peer.open(packed=True)
    buffers, handles = peer.buffers(nbytes(peer.of[other]))
    good(peer.update(peer.packed(peer.of[other], buffers, handles)))
    overwrite(buffers)
    good(peer.finish())
    refill(buffers, list(peer.of[other].values()))  # a view of it is right again: loan.kept is about that
    peer.arrived(other)


@in_both_modes("loan.kept", "sync-{}")
def _(peer, packed):
    """Nothing that the server holds is the trainer's memory: after the finish it may be overwritten."""
    other = peer.other()
    peer.give_up()
    weights = {name: weight.clone() for name, weight in peer.of[other].items()}
    peer.open(packed)
    good(peer.update(peer.info(weights, packed)))
    good(peer.finish())
    if packed:
        overwrite(peer.lent)
    for tensor in peer.lent if not packed else ():
        ipc_codec.dense(tensor).view(-1).view(torch.uint8).fill_(0xFF) if tensor.numel() else None
    torch.cuda.synchronize() if torch.cuda.is_initialized() else None
    peer.arrived(other)


def in_chunks(peer, packed, most):
    """A sync in several updates is exact; packed they go through one buffer, refilled after each 200."""
    peer.put_and_see("A", packed)
    peer.put_and_see("B", packed, min(most, len(peer.of["B"])))


in_both_modes("chunks.2", "loan.reply", "loan.kept-{}")(functools.partial(in_chunks, most=2))
in_both_modes("chunks.many", "chunks.2-{}")(functools.partial(in_chunks, most=16))


@case("sync.while-paused", "sync-unpacked")
def _(peer):
    """A sync goes through while generation is paused."""
    other = peer.other()
    peer.route("POST", "/pause")
    peer.put(other)
    good(peer.post("/resume"))
    peer.arrived(other)


@case("index.2", "sync-unpacked")
def _(peer):
    """Strides are taken from the handle: position 2 is left alone."""
    other = peer.other()
    weights = {name: swapped(weight) for name, weight in peer.of[other].items()}
    if all(weight.is_contiguous() for weight in weights.values()):
        unobservable("no tensor has two sizes above 1")
    peer.open()
    peer.complete(other, info=peer.unpacked(weights, form=torch.Tensor.detach))


def swapped(weight):
    """The same tensor, its first two dimensions stored the other way round."""
    return weight.transpose(0, 1).contiguous().transpose(0, 1) if weight.dim() > 1 else weight


@in_both_modes("index.6", "sync-{}")
def _(peer, packed):
    """The device index of a handle is the sender's: the server writes its own at position 6."""
    other = peer.other()
    peer.open(packed)
    info = peer.info(peer.of[other], packed)
    peer.complete(other, info=info | {"ipc_handles_pickled": with_args(info, {6: 97})})


# ---- the cases: tensor kinds -----------------------------------------------------------------------------

# Which tensors of a checkpoint are of a kind; the kinds that are not here are for free names only.
IN_A_MODEL: dict[str, Callable[[torch.Tensor], bool]] = {
    "scalar": lambda weight: weight.dim() == 0,
    **{str(dtype): functools.partial(lambda dtype, weight: weight.dtype == dtype, dtype) for dtype in DTYPES},
}


def kind_arrives(peer, kind, packed):
    """Tensors of that kind arrive bit for bit, wherever the server takes them."""
    label, weights = of_kind(peer, kind, packed)
    peer.open(packed)
    strided = kind in STRIDED and not packed
    info = peer.unpacked(weights, torch.Tensor.detach) if strided else peer.info(weights, packed)
    if not accepted(reply := peer.update(info)):
        unaligned = bool(breaks(peer, RULES["packed.aligned"], info, packed))
        peer.should(unaligned, f"{kind} tensors are taken: {reply.text[:200]}")
        peer.recover("A")
        unobservable("the server refuses them" + ", as vLLM does (packed.aligned)" * unaligned)
    good(peer.finish())
    peer.arrived(label, weights)


def of_kind(peer, kind, packed):
    """(label, weights) of that kind, under names of their own; or a checkpoint's, those of the kind new."""
    if not CHECKPOINT:
        return kind, {f"{kind} {packed}.{name}": weight for name, weight in KINDS[kind]().items()}
    is_one = IN_A_MODEL.get(kind, lambda weight: False)
    chosen = {name for name, weight in peer.of["A"].items() if is_one(weight)}
    if not chosen:
        unobservable("the model has none")
    peer.put("A")
    if len(chosen) == len(peer.of["A"]):
        return "B", peer.of["B"]
    return kind, {name: peer.of["B" if name in chosen else "A"][name] for name in peer.of["A"]}


for _kind in KINDS:
    _needs = ["sync-{}", "index.2"] if _kind in STRIDED else ["sync-{}"]
    _id = "kind." + _kind.removeprefix("torch.").replace(" ", "-")
    in_both_modes(_id, *_needs)(functools.partial(kind_arrives, kind=_kind))


# ---- the cases: reference counters -----------------------------------------------------------------------


@in_both_modes("release.finish", "sync-{}", "loan.kept-{}")
def _(peer, packed):
    """After the finish every export has been released: its counter is 0."""
    peer.put("B", packed)
    counters = peer.counters()
    assert set(counters) <= {0}, f"counters after the finish: {counters[:9]}"


@case("release.once", "release.finish-packed")
def _(peer):
    """One export of the packed buffer is released once, whatever the number of chunks: 1 or 0, then 0."""
    peer.open(packed=True)
    chunks = split(peer.of["B"], min(3, len(peer.of["B"])))
    buffers, handles = peer.buffers(max(map(nbytes, chunks)))
    for chunk in chunks:
        good(peer.update(peer.packed(chunk, buffers, handles)))
        assert set(peer.counters()) <= {0, 1}, f"counters after a chunk: {peer.counters()}"
    good(peer.finish())
    assert set(peer.counters()) == {0}, f"counters after the finish: {peer.counters()}"


@in_both_modes("loan.renewed", "release.finish-{}", "loan.kept-{}")
def _(peer, packed):
    """A loan that is renewed, its counters 1 again, is read again: the same body, and other bytes."""
    other, at = peer.other(), peer.at
    peer.give_up()
    info, exports, write = renewable(peer, peer.of[other], packed)
    for label in (other, at):
        renewed = label == other or all(lent.renew() for lent in exports)
        assert renewed, "the counters are not 0 after the finish"
        write(peer.of[label])
        peer.open(packed)
        peer.complete(label, info=info)
    assert set(peer.counters()) <= {0}, f"counters after it was lent twice: {peer.counters()[:9]}"


def renewable(peer, weights, packed):
    """An update of these, its exports, and what writes other values where these are."""
    if packed:
        buffers, handles = peer.buffers(nbytes(weights))
        info = peer.packed(weights, buffers, handles)
        return info, [buffer.exports for buffer in buffers], lambda new: refill(buffers, list(new.values()))
    lent = [
        {n: on_gpu(w, d) if d.startswith("cuda") else w.clone() for n, w in weights.items()}
        for d in peer.devices
    ]
    exports = [ipc_codec.Exports() for _ in lent]
    handles = merge_handles([own.lend(*pair) for own, *pair in zip(exports, lent, peer.devices, strict=True)])
    info = peer.described(weights) | {"ipc_handles_pickled": list(map(peer.lending, handles))}

    def write(new):
        for name, weight in new.items():
            for there in lent:
                ipc_codec.words_of(there[name]).copy_(ipc_codec.words_of(weight))
        torch.cuda.synchronize() if torch.cuda.is_initialized() else None

    return info, exports, write


@in_both_modes("release.refused", "refusal.any", "release.finish-{}")
def _(peer, packed):
    """An export of a refused update is released once, or not at all: never twice."""
    peer.open(packed)
    info = peer.info(peer.of["B"], packed)
    if accepted(peer.update(info | {"dtype_names": info["dtype_names"][1:]})):
        unobservable("the update was not refused")
    loans = list(peer.loans)
    peer.recover("A")
    counters = [ipc_codec.ref_count(args) for args in loans if args[8]]
    assert set(counters) <= {0, 1}, f"counters after a refusal and a good sync: {counters[:9]}"


# ---- the cases: session ----------------------------------------------------------------------------------

OUT_OF_ORDER = [rule for rule in RULES.values() if rule.calls and not rule.check and not rule.breaks]


def order_is_kept(peer, rule):
    """The last of the rule's calls is refused; what was open stays open and usable, and nothing is queued."""
    peer.put("A")
    info = peer.unpacked(peer.of["B"])
    for call in rule.calls[:-1]:
        good(peer.post("/" + call))
    last = rule.calls[-1]
    reply = peer.update(info) if last == "update_weights" else peer.post("/" + last)
    if accepted(reply) and rule.id == "draft.none":
        unobservable("the server has a draft model")
    bad(reply)
    if peer.has_checksums and not rule.calls[:-1]:
        good(peer.post(START))
        good(peer.finish())
        peer.arrived("A")
    elif rule.calls[:-1]:
        peer.complete("B", info=info)


for _rule in OUT_OF_ORDER:
    case(_rule.id, "refusal.any", "sync-unpacked")(functools.partial(order_is_kept, rule=_rule))


@in_both_modes("session.500-ends-it", "update.after-start", "finish.after-start", "sync-{}")
def _(peer, packed):
    """A failed update ends the session: update and finish are refused, and the next start is let in."""
    other = peer.other()
    peer.open(packed)
    info = peer.info(peer.of[other], packed)
    if (status := peer.update(info | {"ipc_handles_pickled": GARBAGE}).status_code) < 500:
        unobservable(f"what is no pickle is answered with {status}")
    bad(peer.update(info))
    bad(peer.finish())
    good(peer.post(START))
    peer.complete(other, packed)


@case("session.400-leaves-it", "refusal.any", "sync-unpacked")
def _(peer):
    """An update whose envelope is refused with 400 has not reached the session, which stays open."""
    other = peer.other()
    peer.open()
    if (status := peer.post(UPDATE, {"update_info": 5}).status_code) != 400:
        unobservable(f"a wrong envelope is answered with {status}")
    peer.complete(other)


@case("session.init-inside", "sync-packed")
def _(peer):
    """An init inside an open update sets the mode, and leaves it open."""
    other = peer.other()
    peer.open(packed=False)
    good(peer.init(packed=True))
    peer.complete(other, packed=True)


@case("session.init-refused", "refusal.any", "sync-packed")
def _(peer):
    """A refused init leaves the mode as it was."""
    other = peer.other()
    good(peer.init(packed=True))
    if accepted(peer.post(INIT, {"init_info": {"packed": False, "backend": "ipc"}})):
        unobservable("the init was not refused (init.fields)")
    good(peer.post(START))
    peer.complete(other, packed=True)


@case("session.packed-kept", "sync-packed")
def _(peer):
    """The mode stays over syncs and a shutdown, until the next init."""
    peer.put("A", packed=True)
    good(peer.post(SHUTDOWN))
    good(peer.post(START))
    peer.complete("B", packed=True)


@case("session.empty", "sync-unpacked")
def _(peer):
    """A sync without an update, and one with an empty update, are good and change nothing."""
    peer.put("A")
    for infos in ([], [peer.unpacked({})]):
        peer.open()
        for info in infos:
            good(peer.update(info))
        good(peer.finish())
        peer.arrived("A")


def version(peer):
    return good(peer.route("GET", "/weight_info"))["weight_version"]


@case("version.at-finish", "finish.after-start", "sync-unpacked")
def _(peer):
    """The version moves at a good finish that has one, and nowhere else."""
    version(peer)
    for told, expected in [("v1", "v1"), (None, "v1"), ("", "")]:
        peer.open()
        good(peer.post(FINISH, {"weight_version": told}))
        assert version(peer) == expected
    peer.finish(weight_version="idle")
    assert version(peer) == ""
    peer.open()
    good(peer.update(peer.unpacked(peer.of["B"])))
    assert version(peer) == ""
    good(peer.finish(weight_version="v2"))
    assert version(peer) == "v2"


# ---- the cases: several workers --------------------------------------------------------------------------


@case("rank-local.own-entry", "sync-unpacked")
def _(peer):
    """Of a list of updates every worker takes its own: data_parallel_index * world_size + rank."""
    if len(peer.devices) < 2:
        unobservable("there is one worker")
    shown = {}
    for label in "AB":
        peer.put(label)
        shown[label] = peer.by_worker()
    labels = ["AB"[worker % 2] for worker in range(len(peer.devices))]
    peer.open()
    good(peer.update([peer.unpacked(peer.of[label]) for label in labels]))
    good(peer.finish())
    assert peer.by_worker() == [shown[label][worker] for worker, label in enumerate(labels)]


@case("rank-local.longer", "sync-unpacked")
def _(peer):
    """A list of updates that is too long passes: each worker has its entry. Of one worker it is the first."""
    other = peer.other()
    peer.open()
    peer.complete(other, info=[peer.unpacked(peer.of[other])] * (len(peer.devices) + 1))


@case("rank-local.counted", "refusal.any", "sync-unpacked")
def _(peer):
    """A list of updates without an entry for the last worker is refused."""
    other = peer.other()
    peer.open()
    reply = peer.update([peer.unpacked(peer.of[other])] * (len(peer.devices) - 1))
    peer.recover(other)
    bad(reply)
    peer.arrived(other)


# ---- the cases: probes, one for each counter-example -----------------------------------------------------

# vLLM keeps a weight of a wrong shape, and fails at the next good one: then two syncs recover.
WRONG_SHAPES = ("shapes.sizes", "unpacked.handle-matches", "packed.size-of-shape", "weights.fit")


def must_refuse(rule, packed):
    return rule.level == MUST and rule.refused_by_vllm in ("always", "packed" if packed else "")


def breaks(peer, rule, info, packed):
    """What of an update breaks the rule, as a receiver would see it; empty where nothing does."""
    handles = info.get("ipc_handles_pickled")
    shown = {"undecodable": "no pickle"} if isinstance(handles, str) else ipc_codec.describe_handles(handles)
    text = handles if isinstance(handles, str) else handles and "text"
    update = replace(UpdateInfo.from_json(info), handles=shown, ipc_handles_pickled=text)
    uuid = ipc_codec.gpu_uuid(peer.devices[0])
    session = Session(uuid=uuid, state=UPDATING, packed=packed, initialized=True)
    return rule.violation(update, session)


def probe(peer, packed, rule, change):
    """The rule's counter-example, made of an update that is good here.

    A MUST is refused where vLLM refuses it, and should be elsewhere; a SHOULD is refused or taken exactly.
    """
    other, at = peer.other(), peer.at
    weights = {name: weight for name, weight in peer.of[other].items() if weight.numel()}
    if len(weights) < 2:
        unobservable("the model has no two tensors with elements")
    peer.open(packed)
    buffers, handles = peer.buffers(nbytes(weights)) if packed else ([], None)
    info = change(peer.packed(weights, buffers, handles) if packed else peer.unpacked(weights))
    if not (seen := breaks(peer, rule, info, packed)):
        assert URL, "our own server takes any names, and what is sent here breaks every rule"
        unobservable("no tensor of this model breaks it")
    if packed and rule.level == SHOULD:  # taken, it is what it says: the bytes in the order of the names
        refill(buffers, [ipc_codec.wire_form(weights[name[len(peer.prefix) :]]) for name in info["names"]])
    reply = peer.update(info)
    taken = accepted(reply) and accepted(peer.finish())
    peer.note("answer", str(reply.status_code))
    shows = len(weights) == len(peer.of[other]) and (peer.names_are_ours or other in peer.known)
    wrong = peer.wrong(other) if taken and rule.level == SHOULD and shows and peer.has_checksums else ""
    good_one = at if taken else other
    peer.recover(good_one, attempts=2 if rule.id in WRONG_SHAPES else 1)
    assert not wrong, f"answered 200, and {wrong}"
    judge(peer, rule, seen, reply, packed)
    peer.arrived(good_one)


def judge(peer, rule, seen, reply, packed):
    told = f"what breaks {rule.id} ({rule.text}) is answered with {reply.status_code}; sent: {seen}"
    if accepted(reply) and must_refuse(rule, packed):
        pytest.fail(told)
    peer.should(not accepted(reply) or rule.level == SHOULD, told + "; a refusal is right")


def probe_init(peer, packed, rule, change):
    """The rule's counter-example as init, judged as an update is; a good sync goes through after it."""
    other = peer.other()
    info = change({"packed": packed})
    reply = peer.post(INIT, {"init_info": info})
    peer.note("answer", str(reply.status_code))
    peer.recover(other)
    judge(peer, rule, info, reply, packed)
    peer.arrived(other)


def not_base64(info):
    text = ipc_codec.encode_handles(info["ipc_handles_pickled"])
    return info | {"ipc_handles_pickled": "\n".join(text[at : at + 76] for at in range(0, len(text), 76))}


for _rule in [rule for rule in RULES.values() if rule.breaks]:
    _needs = ["refusal.any", "sync-unpacked", "sync-{}"]
    if _rule.id == "handle.uuid-plain":
        _needs.append("handle.this-gpu-{}")  # where the uuid is not looked at, its spelling is not either
    _run = probe_init if _rule.call.startswith("init") else probe
    for _at, _change in enumerate(_rule.breaks):
        for _mode, _packed in MODES.items():
            if _rule.mode in (_mode, "both"):
                _id = _rule.id + f"-{_mode}" * (_rule.mode == "both") + f"-{_at}" * (len(_rule.breaks) > 1)
                case(_id, *(need.format(_mode) for need in _needs))(
                    functools.partial(_run, packed=_packed, rule=_rule, change=_change)
                )


in_both_modes("handles.base64", "refusal.any", "sync-unpacked", "sync-{}")(
    functools.partial(probe, rule=RULES["handles.base64"], change=not_base64)
)


def does_not_fit(peer, change, attempts):
    """What is not in the server's model should be refused."""
    if not CHECKPOINT:
        unobservable("the server takes any names")
    peer.open()
    reply = peer.update(peer.unpacked(change(dict(peer.of["B"]))))
    finished = accepted(reply) and accepted(peer.finish())
    peer.recover("A", attempts)
    peer.should(not finished, f"{RULES['weights.fit'].text}: answered with {reply.status_code}")
    peer.arrived("A")


case("weights.unknown-name", "refusal.any", "sync-unpacked")(
    functools.partial(does_not_fit, change=lambda b: b | {"no.such.weight": torch.ones(2)}, attempts=1)
)
case("weights.other-shape", "refusal.any", "sync-unpacked")(
    functools.partial(
        does_not_fit, change=lambda b: {n: torch.stack([w, w]) for n, w in b.items()}, attempts=2
    )
)


@case("refusal.changes-nothing", "update.lengths-unpacked-0")
def _(peer):
    """A refused update leaves the weights as they were."""
    if not peer.has_checksums:
        unobservable("no /weight_checker, and a completion before the next good sync may kill an engine")
    other = peer.other()
    before = peer.look()
    peer.open()
    info = peer.unpacked(peer.of[other])
    if accepted(peer.update(info | {"dtype_names": info["dtype_names"][1:]})):
        unobservable("the update was not refused (update.lengths)")
    reply = peer.post("/weight_checker", {"action": "checksum"})
    after = peer.look() if accepted(reply) else f"the checksums answer {reply.status_code}"
    peer.recover(other)
    peer.arrived(other)
    peer.should(
        after == before, "a refused update changes no weight, and checksums can be asked for after it"
    )


@case("pickle.runs-nothing", "handles.decodable-unpacked")
def _(peer):
    """A hostile pickle is refused, and what it names is not called (SHOULD: vLLM calls it).

    It would make a folder in /dev/shm, which trainer and server have in common, whoever runs them.
    """
    other = peer.other()
    canary = Path(ipc_codec.SHM) / f"weight-sync-canary-{time.time_ns():x}"
    payload = pickle.dumps([Calls(os.mkdir, str(canary))] * len(peer.of[other]), 4)
    peer.open()
    reply = peer.update(peer.described(peer.of[other]) | {"ipc_handles_pickled": base64_of(payload)})
    ran = canary.exists()
    with contextlib.suppress(OSError):
        canary.rmdir()
    peer.recover(other)
    bad(reply)
    peer.arrived(other)
    peer.should(not ran, "nothing in the handles is called; the server has called os.mkdir")


# ---- the cases: envelopes and answers --------------------------------------------------------------------


def wrong_envelope(peer, path, bodies):
    """What is wrong with the envelope is refused; it should be with 400 and vLLM's error body."""
    odd = {}
    other = peer.other()
    for body in bodies:
        peer.open()
        reply = peer.send("POST", path, body, JSON if body else None)
        bad(reply)
        if reply.status_code != 400 or not vllms_error(reply):
            odd[body] = reply.status_code
    peer.recover(other)
    peer.arrived(other)
    peer.should(not odd, f"each of these is answered with 400 and vLLM's error body: {odd}")


def vllms_error(reply):
    with contextlib.suppress(ValueError):
        error = reply.json().get("error", {})
        said = isinstance(error.get("message"), str) and error["message"]
        return (
            said
            and error.keys() == {"message", "type", "param", "code"}
            and error["code"] == reply.status_code
        )
    return False


for _path, _field in {INIT: "init_info", UPDATE: "update_info"}.items():
    _bodies = [None, b"{", b"[]", b"5", b'{"other": 1}', b'{"%s": 5}' % _field.encode()]
    _bodies += [b'{"update_info": [null]}'] if _path == UPDATE else []
    case(f"envelope.{_path.split('_')[0][1:]}", "refusal.any", "sync-unpacked")(
        functools.partial(wrong_envelope, path=_path, bodies=_bodies)
    )
case("envelope.finish", "refusal.any", "sync-unpacked")(
    functools.partial(
        wrong_envelope, path=FINISH, bodies=[b'{"weight_version": 5}', b'{"weight_version": []}']
    )
)


@case("envelope.forms", "sync-unpacked")
def _(peer):
    """JSON with a charset, a suffix, a byte-order mark or more keys is taken; {} is a whole init_info."""
    body = b'{"init_info": {}, "more": 1}'
    types = [JSON, "application/json; charset=utf-8", "application/x+json"]
    replies = {
        (kind, mark): peer.send("POST", INIT, mark + body, kind)
        for kind in types
        for mark in (b"", b"\xef\xbb\xbf")
    }
    odd = {form: reply.status_code for form, reply in replies.items() if not accepted(reply)}
    peer.recover("A")
    peer.should(not odd, f"each of these is taken: {odd}")


@case("answer.success", "sync-unpacked")
def _(peer):
    """The calls of a sync answer 200 with vLLM's words."""
    replies = {
        "init_weight_transfer_engine": peer.init(),
        "start_weight_update": peer.post(START),
        "update_weights": peer.update(peer.unpacked(peer.of["B"])),
        "finish_weight_update": peer.finish(),
        "shutdown_weight_transfer_engine": peer.post(SHUTDOWN),
    }
    odd = {call: reply.text for call, reply in replies.items() if good(reply) != {"message": SAID[call]}}
    peer.should(not odd, f"the calls answer {SAID}: {odd}")


@case("answer.refusal", "handles.decodable-unpacked", "finish.after-start")
def _(peer):
    """What is refused behind the envelope is a 500 with vLLM's error body, which says why."""
    peer.open()
    replies = [peer.update(peer.described(peer.of["B"]) | {"ipc_handles_pickled": GARBAGE}), peer.finish()]
    peer.recover("A")
    odd = [reply.text[:200] for reply in replies if reply.status_code != 500 or not vllms_error(reply)]
    peer.should(not odd, f"a refusal is a 500 with vLLM's error body: {odd}")


# ---- the cases: the other routes -------------------------------------------------------------------------


def answers(peer, method, path, expected, body=NO_BODY):
    reply = peer.route(method, path, body)
    peer.should(
        reply.status_code == 200 and reply.json() == expected, f"{path} answers {expected}: {reply.text}"
    )


@case("route.pause")
def _(peer):
    """pause and resume may be repeated; is_paused tells."""
    for mode in ("", "?mode=abort", "?mode=wait", "?mode=keep"):
        for path, status in {f"/pause{mode}": "paused", "/resume": "resumed"}.items():
            for _ in range(2):
                answers(peer, "POST", path, {"status": status})
            answers(peer, "GET", "/is_paused", {"is_paused": status == "paused"})


@case("route.world-size")
def _(peer):
    """get_world_size counts the workers; with include_dp=false those of one engine."""
    sizes = [
        good(peer.route("GET", "/get_world_size" + query))
        for query in ("", "?include_dp=true", "?include_dp=false")
    ]
    every, same, one = (size.get("world_size") for size in sizes)
    told = isinstance(every, int) and isinstance(one, int) and every == same >= one >= 1 and every % one == 0
    peer.should(told, f"get_world_size answers world_size: {sizes}")
    peer.should(every == len(peer.devices), f"{every} workers, and weights are lent to {peer.devices}")


@case("route.weight-version")
def _(peer):
    """update_weight_version sets what weight_info tells."""
    for told in ("v1", "step ☃", ""):
        body = {"success": True, "new_version": told}
        answers(peer, "POST", "/update_weight_version", body, {"new_version": told})
        answers(peer, "GET", "/weight_info", {"weight_version": told})


@case("route.weight-checker", "sync-unpacked")
def _(peer):
    """compare names the keys that differ, are missing or too many."""
    table = checksums_in(peer.route("POST", "/weight_checker", {"action": "checksum"}))
    if len(table) < 2:
        unobservable("the server has fewer than two parameters")
    other, gone, *_ = sorted(table)
    baseline = {key: value for key, value in table.items() if key != gone} | {other: "0", "more": "0"}
    for given, differ in [(table, []), (baseline, sorted([other, gone, "more"]))]:
        body = {"action": "compare", "baseline": given}
        answers(peer, "POST", "/weight_checker", {"match": not differ, "mismatches": differ}, body)


@case("route.weight-reset", "sync-unpacked")
def _(peer):
    """reset zeroes every parameter under its name; a full sync brings the weights back."""
    peer.put("A")
    peer.route("POST", "/weight_checker", {"action": "checksum"})
    before = peer.look()
    answers(peer, "POST", "/weight_checker", {"status": "reset"}, {"action": "reset"})
    after = peer.look()
    peer.put_and_see("A")
    peer.should(after.keys() == before.keys() and after != before, "a reset changes the weights, and no name")


@case("route.version")
def _(peer):
    """version tells one string."""
    body = good(peer.route("GET", "/version"))
    peer.should(body.keys() == {"version"} and isinstance(body["version"], str), f"version: {body}")


@case("route.completions", "refusal.any", "sync-unpacked")
def _(peer):
    """A greedy completion has a text, and has it again."""
    peer.put("A")
    first, again = peer.completions(), peer.completions()
    peer.should(first == again, f"greedy completions of the same weights are the same: {first}, {again}")


@case("route.others", "refusal.any")
def _(peer):
    """An unknown path is 404, a wrong method 405."""
    replies = {
        path: peer.send(method, path)
        for method, path in [("POST", "/nope"), ("GET", "/"), ("GET", START + "/x")]
    }
    odd = {path: reply.status_code for path, reply in replies.items() if reply.status_code != 404}
    for method, path in [
        ("GET", START),
        ("GET", UPDATE),
        ("PUT", FINISH),
        ("DELETE", INIT),
        ("POST", "/health"),
    ]:
        reply = peer.send(method, path)
        bad(reply)
        odd |= {path: reply.status_code} if reply.status_code != 405 else {}
    peer.should(not odd, f"an unknown path is 404, a wrong method 405: {odd}")


# ---- the cases, run --------------------------------------------------------------------------------------

if unknown := EXPECTED.keys() - CASES.keys():
    raise pytest.UsageError(f"WEIGHT_SYNC_EXPECTED names what is no case: {', '.join(sorted(unknown))}")

SERVERS: list[Any] = ["url"]
if not URL:
    two_gpus = pytest.param("cuda:0,cuda:1", marks=[pytest.mark.long, needs_two_gpus])
    SERVERS = [*ONE_WORKER, pytest.param("cpu:0,cpu:1", marks=pytest.mark.long), two_gpus]


@pytest.fixture(scope="module", params=SERVERS)
def visited(request):
    with contextlib.nullcontext(AtURL(URL)) if URL else Server(request.param) as server:
        yield Peer(server)


@pytest.fixture
def peer(visited, case, request, record_property):
    """The server under test, calm; where the case cannot be judged it is skipped."""
    if case.id in EXPECTED:
        request.node.add_marker(pytest.mark.xfail(reason=EXPECTED[case.id], strict=True))
    if why := visited.not_judged(case):
        pytest.skip(why)
    visited.case, visited.note, visited.unsettled = case, record_property, case.id
    yield visited
    visited.give_up()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_server(peer, case):
    """Every promise of a server, at WEIGHT_SYNC_URL or our own."""
    print(inspect.getdoc(getattr(case.run, "func", case.run)))  # shown where it fails
    try:
        case.run(peer)
    except pytest.skip.Exception:
        raise
    except BaseException:
        peer.failed[case.id] = f"not judged: it builds on {case.id}, which failed"
        raise
    peer.unsettled = ""


if URL:  # only what is true of any server
    for _name in [name for name in globals() if name.startswith("test_") and name != "test_a_server"]:
        del globals()[_name]
