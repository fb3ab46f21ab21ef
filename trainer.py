"""The training side of a weight sync: trains, and lends its weights to an engine on the same GPU.

Plain torch and requests; vLLM is not imported. Copy this file with its two leaves (`protocol.py`,
`ipc_codec.py`) and change the first part: the model, the reward, the loop. The second part is the sync;
read `send_weights` with a finger (stations 1 to 6, then 12), and go on at `App.answer` in `server.py`.

    python trainer.py --spawn-server            GRPO on samples of the server; the reward rises only
                                                because every sync reaches it
    python trainer.py --spawn-server --packed   the same, through one buffer
    python trainer.py http://127.0.0.1:8000 --checkpoint model.safetensors
                                                sends a checkpoint, and checks that every byte arrived
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import requests
import torch
from torch import Tensor
from torch.nn import functional

import ipc_codec
from ipc_codec import HandleError, PackedBuffer
from protocol import GATE, UpdateInfo, plan_chunks

STEPS = 24
TIMEOUT = 300.0  # seconds a call may take
START_WAIT = 30.0  # seconds that another trainer is given to end its update
PACKED_BUFFER_SIZE_BYTES = 1 << 30  # vLLM's default
SERVER_START_SECONDS = 60.0


# --- The policy: model, reward, loop ------------------------------------------------------------------


class Block(torch.nn.Module):
    """Attention and MLP: [batch, length, width] -> the same."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class ByteLM(torch.nn.Module):
    """A small transformer over bytes: ids [batch, length] -> logits [batch, length, 256].

    Its state dict has what a real one has: tied names (`embed.weight`, `head.weight`) and a persistent
    buffer (`position`).
    """

    context = 128  # tokens

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2):
        super().__init__()
        self.position: Tensor
        angles = torch.arange(self.context)[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("position", torch.cat([angles.sin(), angles.cos()], dim=1))
        self.embed = torch.nn.Embedding(256, width)
        self.blocks = torch.nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, 256, bias=False)
        self.head.weight = self.embed.weight
        torch.nn.init.normal_(self.embed.weight, std=0.05)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


PROMPTS = ["The sky is ", "2 + 2 = ", "Once upon ", "Dear Sir, ", "HTTP 200: ", "QWERTY", "?!", "vLLM "]
GROUP = 16  # completions of a prompt; the advantage is relative to their mean
MAX_TOKENS = 16
LEARNING_RATE = 5e-3


def reward(token_ids: Tensor) -> Tensor:
    """The share of lower-case letters in each row."""
    return ((token_ids >= ord("a")) & (token_ids <= ord("z"))).float().mean(-1)


class Rollouts(NamedTuple):
    """What the server sampled for PROMPTS: rows are completions, groups of GROUP rows share a prompt."""

    prompts: list[list[int]]  # bytes, one a row
    tokens: Tensor  # [rows, MAX_TOKENS]
    logprobs: Tensor  # [rows, MAX_TOKENS], the server's
    weight_version: str


def sample(client: HTTPWeightSyncClient, seed: int) -> Rollouts:
    asked = {"prompt": PROMPTS, "n": GROUP, "max_tokens": MAX_TOKENS, "logprobs": 0, "seed": seed}
    answer = client.call("v1/completions", asked)
    try:
        return Rollouts(
            [list(prompt.encode()) for prompt in PROMPTS for _ in range(GROUP)],
            torch.tensor([choice["token_ids"] for choice in answer["choices"]]),
            torch.tensor([choice["logprobs"]["token_logprobs"] for choice in answer["choices"]]),
            answer["weight_version"],
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise SyncError(
            f"v1/completions: the server answered without tokens and log-probabilities: {exc!r}"
        ) from None


def logprobs_of(model: torch.nn.Module, rollouts: Rollouts, device: torch.device) -> Tensor:
    """The model's log-probabilities of the sampled tokens: [rows, MAX_TOKENS]."""
    starts = torch.tensor([len(prompt) for prompt in rollouts.prompts])
    ids = torch.zeros(len(starts), int(starts.max()) + MAX_TOKENS, dtype=torch.long)
    for row, prompt in enumerate(rollouts.prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    places = starts[:, None] + torch.arange(MAX_TOKENS)  # of the sampled tokens
    ids = ids.scatter(1, places, rollouts.tokens).to(device)
    places = places.to(device)
    predicted = model(ids).log_softmax(-1).gather(1, places[..., None].expand(-1, -1, 256) - 1)
    return predicted.gather(2, ids.gather(1, places)[..., None])[..., 0]


def train(client: HTTPWeightSyncClient, options: argparse.Namespace, device: torch.device) -> None:
    """GRPO: sample from the server, reward, advantage in the group, a step, and the weights go back.

    Raises SyncError unless at the end the weights are identical and the reward has tripled.
    """
    torch.manual_seed(options.seed)
    model = ByteLM().to(ipc_codec.place(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    sync = Sync(client, options, device)
    sync.send(model.state_dict(), "step 0")
    first = last = 0.0
    for step in range(1, options.steps + 1):
        rollouts = sample(client, seed=options.seed * 1_000_000 + step)
        rewards = reward(rollouts.tokens).view(-1, GROUP)
        advantage = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        logprobs = logprobs_of(model, rollouts, device)
        difference = (logprobs.detach().cpu() - rollouts.logprobs).abs().max().item()
        loss = -(advantage.view(-1, 1).to(device) * logprobs).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        client.pause()  # nobody samples from a mix; and it drops what was cached of the old weights
        sent = sync.send(model.state_dict(), f"step {step}")
        client.resume()

        last = rewards.mean().item()
        first = first or last
        print(f"step {step:>3}  reward {last:.3f}  logprob difference {difference:.1e}  {sent}", flush=True)
    print(verify(client, model.state_dict(), lambda: sync.send(model.state_dict(), "again")))
    if options.steps and last < 3 * first:
        raise SyncError(
            f"the reward went from {first:.3f} to {last:.3f}: not tripled, the policy did not learn"
        )


class SyncError(RuntimeError):
    """A call failed, and with it the sync.

    `status` is the status of the server's answer, None where none came: then the server may still be
    reading what was lent.
    """

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


# --- The conversation: one HTTP client ----------------------------------------------------------------


class HTTPWeightSyncClient:
    """vLLM's client protocol (four calls that take plain dicts) over HTTP, and the calls around a sync.

    `ipc_handles` in an update_info are encoded here, so the client also fits vLLM's own trainer engines.
    Every method raises SyncError unless the server answers 2xx with a JSON object. Nothing is retried:
    an update that was not answered may have been applied.
    """

    def __init__(self, url: str, timeout: float = TIMEOUT):
        self.url = url.rstrip("/")
        self.timeout = timeout
        self._http = requests.Session()
        self._http.trust_env = False  # a proxy has no business between two processes of one host
        self._prepared: dict[str, requests.PreparedRequest] = {}  # to prepare takes longer than to send
        self._answered_at = 0.0

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        self.call("init_weight_transfer_engine", {"init_info": dict(init_info)})

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """One chunk, a dict, or rank-local a list of dicts; returns when the server has read it."""
        rank_local = isinstance(update_info, list)
        wire = [_encoded(info) for info in update_info] if rank_local else _encoded(update_info)
        self.call("update_weights", {"update_info": wire})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        version = {"weight_version": weight_version}
        self.call("finish_weight_update", version if weight_version is not None else None)

    def shutdown_weight_transfer_engine(self) -> None:
        self.call("shutdown_weight_transfer_engine")

    def pause(self, mode: str = "abort") -> None:
        self.call(f"pause?mode={mode}")

    def resume(self) -> None:
        self.call("resume")

    def checksums(self) -> dict[str, str]:
        """sha256 of each parameter the server holds, by `dp0:pp0:pcp0:tp0:<name>`."""
        checksums = self.call("weight_checker", {"action": "checksum"}).get("checksums")
        if not isinstance(checksums, dict):
            raise SyncError("weight_checker: the server answered without checksums")
        return checksums

    def call(self, path: str, body: Any = None) -> dict[str, Any]:
        """One POST, one answer: the JSON object of a 2xx."""
        # A server closes idle connections (vLLM after 5 s), and must not do it under a request.
        if time.monotonic() - self._answered_at > 4:
            self._http.close()
        try:
            reply = self._http.send(self._request(path, body), timeout=self.timeout, allow_redirects=False)
        except (requests.RequestException, ValueError) as exc:  # ValueError: urllib3, of the URL
            self._http.close()
            raise SyncError(f"{path}: {self._no_answer(exc)}") from None
        self._answered_at = time.monotonic()
        if not 200 <= reply.status_code < 300:
            self._http.close()  # vLLM closes it after a 500, and does not say so
            raise SyncError(
                f"{path}: the server answered {reply.status_code}: {_reason(reply)}", reply.status_code
            )
        try:
            answer = reply.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise SyncError(f"{path}: the server answered {reply.status_code} without a JSON object")
        return answer

    def _request(self, path: str, body: Any) -> requests.PreparedRequest:
        if path not in self._prepared:
            plain = requests.Request("POST", f"{self.url}/{path}")
            self._prepared[path] = self._http.prepare_request(plain)
        request = self._prepared[path].copy()
        if body is not None:
            request.headers["Content-Type"] = "application/json"
            request.prepare_body(json.dumps(body, allow_nan=False), files=None)
        return request

    def _no_answer(self, exc: Exception) -> str:
        if isinstance(exc, requests.Timeout):
            return f"no answer from {self.url} within {self.timeout:g} s"
        cause: BaseException = exc
        while inner := next(
            (e for e in (getattr(cause, "reason", 0), *cause.args) if isinstance(e, Exception)), None
        ):
            cause = inner
        return f"no answer from {self.url}: {cause}"


def _encoded(update_info: Mapping[str, Any]) -> dict[str, Any]:
    """Station 5: the handles as text; JSON cannot hold them."""
    info = dict(update_info)
    handles = info.pop("ipc_handles", None)
    if handles is not None:
        info["ipc_handles_pickled"] = ipc_codec.encode_handles(handles)
    return info


def _reason(reply: requests.Response) -> str:
    """What the server says is wrong: vLLM's error message, or the start of what it sent."""
    try:
        return reply.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return " ".join(reply.text.split())[:200] or "(empty)"


# --- The sync -----------------------------------------------------------------------------------------


class Sent(NamedTuple):
    """What a sync moved, and how long it took from export to the end of the loan."""

    tensors: int
    nbytes: int
    chunks: int
    seconds: float

    def __str__(self) -> str:
        rate = self.nbytes / self.seconds / 1e9
        return (
            f"{self.tensors:,} tensors, {self.nbytes / 1e6:,.1f} MB, {self.chunks} "
            f"chunk{'s' * (self.chunks != 1)}, {1e3 * self.seconds:.1f} ms, {rate:.2f} GB/s"
        )


Progress = Callable[[str], None]


def send_weights(
    client: HTTPWeightSyncClient,
    weights: Mapping[str, Tensor],
    *,
    device: torch.device | str | None = None,
    weight_version: str | None = None,
    start_wait: float = START_WAIT,
    progress: Progress = lambda line: None,
) -> Sent:
    """One unpacked sync: every tensor is lent where it lies, and all cross in one update.

    weights: checkpoint names and their full tensors (station 1). Nobody may write them until this
        returns; where a tensor is not contiguous a copy is lent.
    device: the worker a CPU tensor is lent to, such as "cpu:1"; CUDA tensors know theirs.
    weight_version: set on the server with the finish, and only with it.

    Raises HandleError before anything was said to the server, SyncError after.
    """
    began = time.monotonic()
    lent = {name: _named(name, ipc_codec.wire_form, weight) for name, weight in weights.items()}  # 2
    exports = _export(lent, device)  # 3: the loan begins
    update = _update_info(lent) | {"ipc_handles": exports}  # 4
    told = read = False
    try:
        _start(client, start_wait, progress)
        told = True
        client.update_weights(update)  # 5 to 11
        read = True
        client.finish_weight_update(weight_version)  # 12: answered, the loan ends
    except BaseException as exc:
        if not told or (not read and _answered(exc)):
            _settle(exports)  # nobody opened them, and nobody will
        elif not _answered(exc):
            progress(f"{len(lent)} tensors stay lent: the server may still read them")
        raise
    finally:
        del lent
        ipc_codec.ipc_collect()
    nbytes = sum(weight.nbytes for weight in weights.values())
    return Sent(len(weights), nbytes, 1, time.monotonic() - began)


def send_weights_packed(
    client: HTTPWeightSyncClient,
    weights: Mapping[str, Tensor],
    packed_buffer_size_bytes: int = PACKED_BUFFER_SIZE_BYTES,
    *,
    buffer: PackedBuffer | None = None,
    device: torch.device | str | None = None,
    weight_version: str | None = None,
    start_wait: float = START_WAIT,
    progress: Progress = lambda line: None,
) -> Sent:
    """One packed sync: the tensors are copied into one buffer, chunk by chunk, and the buffer is lent.

    weights: checkpoint names and their full tensors (station 1); they may be written again as soon as
        this returns. None may be larger than the buffer.
    buffer: one of an earlier sync, for use again; without it one is made, no larger than all weights.
    The rest, and what it raises, as for `send_weights`.
    """
    began = time.monotonic()
    for name, weight in weights.items():
        _named(name, ipc_codec.dense, weight)
    sizes = {name: weight.nbytes for name, weight in weights.items()}
    if buffer is None:
        room = max(1, min(packed_buffer_size_bytes, sum(sizes.values())))
        buffer = PackedBuffer(room, device or _device_of(weights))
    try:
        chunks = plan_chunks(sizes, buffer.capacity_bytes)
    except ValueError as exc:
        raise HandleError(str(exc)) from None
    handle = buffer.export()  # 3: once a sync; before it is filled, so its event covers no write
    told, read = False, 0
    try:
        _start(client, start_wait, progress)
        for names in chunks:
            chunk = {name: weights[name] for name in names}
            buffer.fill(chunk.values())  # 2
            buffer.drain()  # 6: the bytes are there before the server is told
            tensor_sizes = [sizes[name] for name in names]
            told = True
            client.update_weights(_update_info(chunk) | {"ipc_handles": handle, "tensor_sizes": tensor_sizes})
            read += 1  # 11: answered, so the buffer may be filled again
            progress(f"chunk {read}/{len(chunks)}")
        client.finish_weight_update(weight_version)  # 12
    except BaseException as exc:
        if not told or (not read and _answered(exc)):
            _settle([handle])  # nobody opened it, and nobody will
        elif _answered(exc):
            with contextlib.suppress(SyncError):
                client.shutdown_weight_transfer_engine()  # releases what the server had opened
        if any(ipc_codec.ref_count(args) for args in handle.values()):
            buffer.abandon()
            progress(f"a buffer of {buffer.capacity_bytes:,} bytes stays lent: the server may still read it")
        raise
    finally:
        ipc_codec.ipc_collect()
    return Sent(len(weights), sum(sizes.values()), len(chunks), time.monotonic() - began)


def _update_info(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Station 4: the metadata, from the very tensors that are lent."""
    return UpdateInfo(
        names=list(weights),
        dtype_names=[ipc_codec.dtype_name(weight.dtype) for weight in weights.values()],
        shapes=[list(weight.shape) for weight in weights.values()],
    ).to_json()


def _named(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, with the tensor's name in front of what it refuses."""
    try:
        return function(*args)
    except HandleError as exc:
        raise HandleError(f"{name}: {exc}") from None


def _export(lent: Mapping[str, Tensor], device: torch.device | str | None) -> list[ipc_codec.Handle]:
    """A handle for each tensor; all or none."""
    exports: list[ipc_codec.Handle] = []
    try:
        for name, weight in lent.items():
            exports.append(_named(name, ipc_codec.export_handle, weight, device))
    except BaseException:
        _settle(exports)
        raise
    return exports


def _settle(exports: list[ipc_codec.Handle]) -> None:
    for handle in exports:
        for args in handle.values():
            ipc_codec.settle(args)


def _answered(exc: BaseException) -> bool:
    """Whether no request is under way: the server answered, or was not asked."""
    return exc.status is not None if isinstance(exc, SyncError) else isinstance(exc, Exception)


def _start(client: HTTPWeightSyncClient, start_wait: float, progress: Progress) -> None:
    """Opens the update. Where one is open already, its trainer gets `start_wait` seconds to end it.

    A trainer that died leaves its update open, and vLLM has no call that aborts one: it is closed with a
    finish without a version, and everything is sent again.
    """
    deadline = time.monotonic() + start_wait
    while True:
        try:
            return client.start_weight_update()
        except SyncError as exc:
            if exc.status != 500:
                raise
            refusal = str(exc)
        left = deadline - time.monotonic()
        if left <= 0:
            break
        progress(f"{refusal}; another trainer may be at it, trying again for {left:.0f} s")
        time.sleep(min(1.0, left))
    progress("start is still refused: closing the update that was left open")
    try:
        client.finish_weight_update()
    except SyncError:
        raise SyncError(refusal, 500) from None  # none was open: start has another reason
    client.start_weight_update()


def _device_of(weights: Mapping[str, Tensor]) -> torch.device:
    return next((weight.device for weight in weights.values()), torch.device("cpu"))


# --- Checking -----------------------------------------------------------------------------------------


def verify(client: HTTPWeightSyncClient, weights: Mapping[str, Tensor], send_again: Callable[[], Any]) -> str:
    """Compares what the server holds with what was sent. Returns what was found; raises SyncError if wrong.

    A stub holds the sent names. A real engine fuses and shards, so that its checksums are of other
    tensors: then the same weights, sent once more, must give the same checksums.
    """
    held = client.checksums()
    if weights and not held:
        raise SyncError("the server holds no weights")
    by_name: dict[str, set[str]] = {}
    for key, value in held.items():
        by_name.setdefault(key.split(":", 4)[-1], set()).add(value)
    if not weights.keys() <= by_name.keys():
        send_again()
        again = client.checksums()
        if again != held:
            differ = sorted(key for key in held.keys() | again.keys() if held.get(key) != again.get(key))
            raise SyncError(f"the same weights gave other checksums the second time: {differ[0]}")
        return f"the server holds other names; sent twice, its {len(held)} checksums are the same"
    wrong = [name for name, weight in weights.items() if by_name[name] != {ipc_codec.checksum(weight)}]
    if wrong:
        raise SyncError(f"{len(wrong)} of {len(weights)} tensors differ on the server, {wrong[0]} first")
    return f"identical: sha256 of {len(weights)} tensors, on every worker"


def load_checkpoint(path: Path, device: torch.device) -> dict[str, Tensor]:
    """A state dict (.pt, .pth, .bin), a .safetensors file, or a folder of those. Raises ValueError."""
    if path.is_dir():
        files = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin")) or sorted(path.glob("*.pt"))
        parts = [load_checkpoint(file, device) for file in files]
        if not parts:
            raise ValueError(f"{path} has no .safetensors, .bin or .pt file")
        return {name: weight for part in parts for name, weight in part.items()}
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    place = str(ipc_codec.place(device))
    if path.suffix == ".safetensors":
        try:
            from safetensors.torch import load_file
        except ImportError:
            raise ValueError(f"{path} needs `pip install safetensors`") from None
        load: Callable[[], Any] = functools.partial(load_file, path, device=place)
    else:
        load = functools.partial(torch.load, path, map_location=place, weights_only=True)
    try:
        state = load()
    except Exception as exc:  # whatever a damaged or hostile file makes them raise
        why = str(exc).strip().splitlines()[:1]
        raise ValueError(
            f"{path} is no checkpoint that can be read ({type(exc).__name__}: {''.join(why)})"
        ) from None
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(weight, Tensor) for name, weight in state.items()
    ):
        raise ValueError(f"{path} is no plain state dict: a dict of names and tensors")
    return state


# --- The command line ---------------------------------------------------------------------------------


@contextlib.contextmanager
def spawned_server(device: str) -> Iterator[str]:
    """server.py as a child on a free port: its URL. The child ends with the block, or with this process.

    Its log is shown only where the block fails.
    """
    command = [sys.executable, str(Path(__file__).with_name("server.py")), "--port", "0", "--device", device]
    environment = os.environ | {GATE: "1"}
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=log, preexec_fn=_end_with_parent
        )
        try:
            yield _listening_url(child)
        except Exception:
            log.seek(0)
            last = log.read().decode(errors="replace").splitlines()[-10:]
            print("the end of the server's log:", *last, sep="\n  ", file=sys.stderr)
            raise
        finally:
            child.terminate()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _listening_url(child: subprocess.Popen[bytes]) -> str:
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], SERVER_START_SECONDS)
    line = child.stdout.readline().decode() if ready else ""
    if not line.startswith("listening on "):
        late = f"said nothing for {SERVER_START_SECONDS:g} s"
        raise SyncError(f"the server did not start: it {'ended' if ready else late}")
    return line.removeprefix("listening on ").strip()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: also when this process is killed


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("url", nargs="?", default="http://127.0.0.1:8000", help="the server (default %(default)s)")
    add("--spawn-server", action="store_true", help="run server.py as a child instead")
    add("--steps", type=int, default=STEPS, metavar="N", help="of training (default %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of the training (default %(default)s)")
    add(
        "--checkpoint", type=Path, metavar="PATH", help="send this instead: .pt, .bin, .safetensors, a folder"
    )
    add("--packed", action="store_true", help="send through one buffer, chunk by chunk")
    add("--packed-buffer-size-bytes", type=int, default=PACKED_BUFFER_SIZE_BYTES, metavar="N")
    add("--device", default="auto", help="where the weights lie: auto, cpu, cuda or cuda:1")
    add("--weight-version", metavar="V", help="the version the server publishes with these weights")
    add("--timeout", type=float, default=TIMEOUT, metavar="S", help="seconds a call may take (%(default)g)")
    add(
        "--start-wait", type=float, default=START_WAIT, metavar="S", help="seconds for another trainer to end"
    )
    return parser


class Sync(NamedTuple):
    """The command line's choice of mode, for one sync after another."""

    client: HTTPWeightSyncClient
    options: argparse.Namespace
    device: torch.device

    def send(self, weights: Mapping[str, Tensor], weight_version: str | None) -> Sent:
        more: dict[str, Any] = {
            "device": self.device,
            "weight_version": weight_version,
            "start_wait": self.options.start_wait,
            "progress": lambda line: print(line, file=sys.stderr),
        }
        if self.options.packed:
            return send_weights_packed(self.client, weights, self.options.packed_buffer_size_bytes, **more)
        return send_weights(self.client, weights, **more)


def send_checkpoint(client: HTTPWeightSyncClient, options: argparse.Namespace, device: torch.device) -> None:
    """Sends the checkpoint, and checks that every byte arrived."""
    weights = load_checkpoint(options.checkpoint, device)
    sync = Sync(client, options, device)
    sent = sync.send(weights, options.weight_version)
    print(f"{options.checkpoint} -> {client.url}, {'packed' if options.packed else 'unpacked'}: {sent}")
    print(verify(client, weights, lambda: sync.send(weights, options.weight_version)))


def run(options: argparse.Namespace) -> None:
    """Raises SyncError, HandleError or ValueError."""
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(auto if options.device == "auto" else options.device)
    except RuntimeError:
        raise ValueError(f"--device {options.device!r} is none of auto, cpu, cuda, cuda:1") from None
    spawned = spawned_server(str(device)) if options.spawn_server else contextlib.nullcontext(options.url)
    with spawned as url:
        client = HTTPWeightSyncClient(url, options.timeout)
        client.init_weight_transfer_engine({"packed": options.packed})
        (send_checkpoint if options.checkpoint else train)(client, options, device)


def main() -> int:
    options = build_parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a child is taken down
    try:
        run(options)
    except (SyncError, ValueError) as exc:
        print(f"trainer.py: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("trainer.py: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
