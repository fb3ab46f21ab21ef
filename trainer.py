"""The training side of a weight sync: trains, and lends its weights to an engine on the same GPU.

Plain torch and requests; vLLM is not imported. Copy this file with its two leaves (`protocol.py`,
`ipc_codec.py`) and change the first part: the model, the reward, the loop. The second part is the sync;
read `send_weights` line by line (stations 1 to 6, then 12), and go on at `App.answer` in `server.py`.

    python trainer.py --spawn-server            GRPO on samples of the server; the reward rises only
                                                because every sync reaches it
    python trainer.py --spawn-server --packed   the same, through one buffer
    python trainer.py http://127.0.0.1:8000 --checkpoint model.safetensors
                                                sends a checkpoint, and checks that every byte arrived
    torchrun --nproc-per-node 2 trainer.py ...  the same on two GPUs: a rank lends to the worker on its own
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import functools
import gc
import itertools
import json
import math
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import requests
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import ipc_codec
from ipc_codec import Exports, HandleError, PackedBuffer
from protocol import GATE, NO_ANSWER, UpdateInfo, merge_handles, plan_chunks

URL = "http://127.0.0.1:8000"
STEPS = 24
TIMEOUT = 300.0  # seconds that nothing may come or go in a call
MAX_SECONDS = 1e6  # eleven days; sums of a few are still what every clock has
START_WAIT = 30.0  # seconds that another trainer is given to end its update
PACKED_BUFFER_SIZE_BYTES = 1 << 30  # vLLM's default
SERVER_START_SECONDS = 60.0
MAX_REASON = 2000  # characters of an error message that are repeated; server.py's have 1000
GRACE = 5.0  # seconds by which the other ranks outwait rank 0, so that it can say why it gave up


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
        prompts = [list(prompt.encode()) for prompt in PROMPTS for _ in range(GROUP)]
        tokens = torch.tensor([choice["token_ids"] for choice in answer["choices"]])
        logprobs = torch.tensor([choice["logprobs"]["token_logprobs"] for choice in answer["choices"]])
        shapes = list(tokens.shape), list(logprobs.shape)
        if shapes != ([len(prompts), MAX_TOKENS],) * 2 or not logprobs.is_floating_point():
            raise ValueError(f"they are {shapes}")
        if tokens.dtype != torch.long or tokens.min() < 0 or tokens.max() > 255:
            raise ValueError("a token is no byte")
        return Rollouts(prompts, tokens, logprobs, answer["weight_version"])
    except (KeyError, TypeError, ValueError, RuntimeError) as exc:  # the last: older torch's, of 2**70
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

    Under torchrun every rank steps on the same batch, which rank 0 samples. Raises SyncError unless at the
    end the weights are identical and, after STEPS steps or more, the reward has tripled.
    """
    ranks = Ranks(seconds=options.timeout)
    torch.manual_seed(options.seed)
    model = ByteLM().to(ipc_codec.place(device))
    ipc_codec.arena(model)  # its handles then name one memory, which the server opens once
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    sync = Sync(client, options, device)
    sync.send(model.state_dict(), "step 0")
    first = last = 0.0
    for step in range(1, options.steps + 1):
        seed = options.seed * 1_000_000 + step
        rollouts = ranks.first("sample", functools.partial(sample, client, seed))
        rewards = reward(rollouts.tokens).view(-1, GROUP)
        learning = functools.partial(learn, model, optimizer, rollouts, rewards, device)
        difference = ranks.together("step", learning, max)

        sent = sync.send(model.state_dict(), f"step {step}")
        last = rewards.mean().item()
        first = first or last
        if ranks.rank == 0:
            print(
                f"step {step:>3}  reward {last:.3f}  logprob difference {difference:.1e}  {sent}", flush=True
            )
    found = verify(client, model.state_dict(), lambda: sync.send(model.state_dict(), "again"))
    if ranks.rank == 0:
        print(found)
    if options.steps >= STEPS and last < 3 * first:
        raise SyncError(
            f"the reward went from {first:.3f} to {last:.3f}: not tripled, the policy did not learn"
        )


def learn(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rollouts: Rollouts,
    rewards: Tensor,
    device: torch.device,
) -> float:
    """One step on the batch. How far the model's log-probabilities are from the server's, at most."""
    advantage = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    logprobs = logprobs_of(model, rollouts, device)
    loss = -(advantage.view(-1, 1).to(device) * logprobs).mean()
    optimizer.zero_grad()
    loss.backward()
    if (ranks := Ranks().size) > 1:
        for grad in [p.grad for p in model.parameters() if p.grad is not None]:
            dist.all_reduce(grad)  # the same bits on every rank, and so are the weights after the step
            grad /= ranks
    optimizer.step()
    return (logprobs.detach().cpu() - rollouts.logprobs).abs().max().item()


class SyncError(RuntimeError):
    """A call failed, and with it the sync.

    `status` is the status of the server's answer, None where none came: then the server may still be
    reading what was lent.
    """

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class RankError(SyncError):
    """A rank failed, or is not like the others. No request is under way: the server reads nothing."""

    FAILED, ENDED, ECHO = range(3)
    order = (ENDED, 0.0)  # and when: of several the smallest is the cause


# --- The conversation: one HTTP client ----------------------------------------------------------------


class HTTPWeightSyncClient:
    """vLLM's client protocol (four calls that take plain dicts) over HTTP, and the calls around a sync.

    `ipc_handles` in an update_info are encoded here, so the client also fits vLLM's own trainer engines.
    Every method raises SyncError unless the server answers 2xx with a JSON object. Nothing is retried:
    an update that was not answered may have been applied.
    """

    def __init__(self, url: str, timeout: float = TIMEOUT):
        if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
            raise ValueError(f"{url!r} is no URL such as {URL}")
        self.url = url.rstrip("/")
        self.timeout = timeout
        self._http = requests.Session()
        self._http.headers.clear()  # which the server would parse, and nobody reads
        self._http.trust_env = False  # a proxy has no business between two processes of one host
        # To prepare takes longer than to send.
        self._prepared: dict[tuple[str, str], requests.PreparedRequest] = {}
        self._answered_at = 0.0
        self.left_open = False  # an update that was opened here, and perhaps not ended

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        self.call("init_weight_transfer_engine", {"init_info": dict(init_info)})

    def start_weight_update(self) -> None:
        self.call("start_weight_update")
        self.left_open = True

    def update_weights(self, update_info: Any) -> None:
        """One chunk, a dict, or rank-local a list of dicts; returns when the server has read it.

        Also takes what `update_body` made of it, to be sent more than once, or a `Late` of that.
        """
        made = isinstance(update_info, (bytes, Late))
        try:
            self.call("update_weights", update_info if made else update_body(update_info))
        except SyncError as exc:
            self.left_open &= exc.status != 500
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        version = {"weight_version": weight_version}
        self.call("finish_weight_update", version if weight_version is not None else None)
        self.left_open = False

    def shutdown_weight_transfer_engine(self) -> None:
        self.call("shutdown_weight_transfer_engine")

    def pause(self, mode: str = "abort") -> None:
        self.call(f"pause?mode={mode}")

    def resume(self) -> None:
        self.call("resume")

    def is_paused(self) -> bool:
        return self._request("GET", "is_paused").get("is_paused") is True

    def world_size(self) -> int:
        """The number of the server's workers."""
        size = self._request("GET", "get_world_size").get("world_size", 0)
        if type(size) is not int:
            raise SyncError("get_world_size: the server answered without a number")
        return size

    def checksums(self) -> dict[str, str]:
        """sha256 of each parameter the server holds, by `dp0:pp0:pcp0:tp0:<name>`."""
        checksums = self.call("weight_checker", {"action": "checksum"}).get("checksums")
        if not isinstance(checksums, dict) or not all(isinstance(value, str) for value in checksums.values()):
            raise SyncError("weight_checker: the server answered without checksums")
        return checksums

    def call(self, path: str, body: Any = None) -> dict[str, Any]:
        """One POST, one answer: the JSON object of a 2xx. Raises ValueError where the body cannot be JSON."""
        if body is not None and not isinstance(body, (bytes, Late)):
            try:
                body = json.dumps(body, allow_nan=False).encode()
            except (ValueError, TypeError, RecursionError) as exc:
                raise ValueError(f"{path}: the body cannot be JSON: {exc}") from None
        return self._request("POST", path, body)

    def _request(self, method: str, path: str, body: bytes | Late | None = None) -> dict[str, Any]:
        # A server closes idle connections (vLLM after 5 s), and must not do it under a request.
        if time.monotonic() - self._answered_at > 4:
            self._http.close()
        try:
            request = self._prepare(method, path, body)
            # By the adapter alone: the session would look for cookies and redirects, which are none of ours.
            reply = self._http.get_adapter(request.url or "").send(request, timeout=self.timeout)
            _ = reply.content  # all of it, or an error here
        # ValueError: urllib3, of the URL; OverflowError: of a time-out that no clock has.
        except (requests.RequestException, ValueError, OverflowError) as exc:
            self._http.close()
            reason = self._no_answer(exc)
            _clear_frames(exc)
            raise SyncError(f"{path}: {reason}") from None
        self._answered_at = time.monotonic()
        if not 200 <= reply.status_code < 300:
            self._http.close()  # vLLM closes it after a 500, and does not say so
            raise SyncError(
                f"{path}: the server answered {reply.status_code}: {_reason(reply)}", reply.status_code
            )
        try:
            answer = reply.json()
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise SyncError(f"{path}: the server answered {reply.status_code} without a JSON object")
        return answer

    def _prepare(self, method: str, path: str, body: bytes | Late | None) -> requests.PreparedRequest:
        if (method, path) not in self._prepared:
            plain = requests.Request(method, f"{self.url}/{path}")
            self._prepared[method, path] = self._http.prepare_request(plain)
        request = self._prepared[method, path]
        if body is not None:
            request = request.copy()
            request.headers["Content-Type"] = "application/json"
            request.prepare_body(body, files=None)
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


def _clear_frames(exc: BaseException | None) -> None:
    """urllib3's frames hold errors that hold the frames, and by them our tensors, until a collection."""
    while exc is not None and not isinstance(exc, SyncError):
        traceback.clear_frames(exc.__traceback__)
        exc = exc.__context__


class Late:
    """A body that is sent when `ready` has returned. The head of its request is on its way meanwhile."""

    def __init__(self, content: bytes, ready: Callable[[], Any]):
        self.content, self.ready, self.size = content, ready, len(content)

    def __len__(self) -> int:
        return self.size

    def read(self, size: int = -1) -> bytes:
        """All at once, then nothing."""
        content, self.content = self.content, b""
        if content:
            self.ready()
        return content


def update_body(update_info: Any) -> bytes:
    """Station 5: the JSON of an update_info, a dict or rank-local a list of dicts."""
    rank_local = isinstance(update_info, list)
    wire = [_encoded(info) for info in update_info] if rank_local else _encoded(update_info)
    return json.dumps({"update_info": wire}).encode()


def _encoded(update_info: Mapping[str, Any]) -> dict[str, Any]:
    """The handles as text; JSON cannot hold them."""
    info = dict(update_info)
    handles = info.pop("ipc_handles", None)
    if handles is not None:
        info["ipc_handles_pickled"] = ipc_codec.encode_handles(handles)
    return info


def _reason(reply: requests.Response) -> str:
    """What the server says is wrong: vLLM's error message, or the start of what it sent."""
    try:
        said = str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        said = reply.content[:200].decode(errors="replace")
    return _one_line(said) or "(empty)"


def _one_line(said: str) -> str:
    """A stranger's words, for a terminal."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(said[:MAX_REASON].split()))


# --- The ranks: processes that take part in a sync ----------------------------------------------------


class Ranks:
    """The processes of a sync: each lends to the worker on its own GPU, and rank 0 alone speaks HTTP.

    They go step by step, `together`, and talk through rank 0, over gloo groups of their own. Every wait has
    a limit. A process that is alone says nothing, and waits for nobody.

    group: of torch.distributed; None: the default group if there is one, else this process alone.
    seconds: how much later than rank 0 another may come to a step, and how long rank 0 may take for it.
    """

    def __init__(self, group: Any = None, seconds: float = TIMEOUT):
        self.seconds = seconds
        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not in the group: only the ranks of a group call this")
        if self.size > 1:
            self._up, self._down, self._hanging = _control_groups(group or dist.group.WORLD, seconds)

    def together(
        self,
        step: str,
        mine: Callable[[], Any] = lambda: None,
        then: Callable[[list[Any]], Any] = lambda each: None,
        seconds: float | None = None,
    ) -> Any:
        """All do `mine`; when all have, rank 0 does `then` with what they returned; all return what it did.

        A barrier before `then`, and one after it. What either raises ends the step on all ranks: as it is
        where it was raised; a SyncError of `then` as it is everywhere; else elsewhere as a RankError.
        """
        if self.size == 1:
            return then([mine()])
        seconds = self.seconds if seconds is None else seconds
        try:
            said = mine()
        except Exception as exc:
            failure = _failure(self.rank, exc)
            try:
                self._exchange(step, failure, then, seconds)
            except RankError as cause:
                if failure.order[0] == RankError.ECHO and cause.order != failure.order:
                    raise cause from exc
            except SyncError:
                pass  # rank 0 has ended as well: our own failure says more
            raise
        return self._exchange(step, said, then, seconds)

    def first(self, step: str, work: Callable[[], Any], seconds: float | None = None) -> Any:
        """Rank 0 does it, when all are there; all return what it returned, or raise what it raised."""
        return self.together(step, then=lambda each: work(), seconds=seconds)

    def _exchange(self, step: str, said: Any, then: Callable[[list[Any]], Any], seconds: float) -> Any:
        """Up to rank 0, and down from it."""
        if self.rank == 0:
            return self._lead(step, said, then)
        limit, began = self.seconds + seconds + GRACE, time.monotonic()
        try:
            with contextlib.suppress(RuntimeError):  # rank 0 has given a rank up: it says so
                _say(self._up, 0, (step, said), limit)
            answer = _hear(self._down, 0, limit)
        except RuntimeError:
            late = time.monotonic() - began >= limit
            how = f"did not answer within {limit:g} s" if late else self._gone
            if late:
                self._hanging.add(0)
            raise SyncError(f"{step}: rank 0 {how}; the server may have been asked") from None
        if isinstance(answer, SyncError):
            raise copy.copy(answer)  # a local that is raised holds itself, and all tensors of its frames
        return answer

    def _lead(self, step: str, said: Any, then: Callable[[list[Any]], Any]) -> Any:
        """Rank 0's part: hears all, does `then`, tells all."""
        try:
            each = [said, *self._hear_all(step)]
            if failed := [one for one in each if isinstance(one, RankError)]:
                raise copy.copy(min(failed, key=lambda failure: failure.order))
            answer = then(each)
        except Exception as exc:
            self._tell_all(exc if isinstance(exc, SyncError) else _failure(0, exc))
            raise
        self._tell_all(answer)
        return answer

    def _hear_all(self, step: str) -> Iterator[Any]:
        """What each other rank says in this step; a RankError where it failed, has ended or is late."""
        deadline = time.monotonic() + self.seconds
        for rank in range(1, self.size):
            try:
                its_step, said = _hear(self._up, rank, max(deadline - time.monotonic(), 0.001))
            except RuntimeError:
                late = time.monotonic() >= deadline
                why = f"did not come within {self.seconds:g} s" if late else self._gone
                yield RankError(f"rank {rank} {why}; rank 0 was at {step!r}")
                if late:  # and gloo has closed the group: nobody is heard any more
                    self._hanging.add(rank)
                    return
            else:
                why = f"rank {rank} is at {its_step!r} and rank 0 at {step!r}: they go different ways"
                yield said if its_step == step else RankError(why)

    @property
    def _gone(self) -> str:
        """Why a connection is closed: its other end has ended, or gloo closed all after a wait timed out."""
        return "is not heard any more since one was late: start all anew" if self._hanging else "has ended"

    def _tell_all(self, answer: Any) -> None:
        for rank in range(1, self.size):
            if rank not in self._hanging:  # gloo waits until one listens
                with contextlib.suppress(RuntimeError):  # it has ended: the next step will see that
                    _say(self._down, rank, answer, self.seconds)


def _failure(rank: int, exc: Exception) -> RankError:
    """What the other ranks raise for it. A bare RuntimeError is a collective's: an echo of another's end."""
    failure = RankError(f"rank {rank}: {type(exc).__name__}: {exc}")
    echo = type(exc) is RuntimeError or isinstance(exc, dist.DistError)
    failure.order = (RankError.ECHO if echo else RankError.FAILED, time.monotonic())
    return failure


_CONTROL: weakref.WeakKeyDictionary[Any, tuple[Any, Any, set[int]]] = weakref.WeakKeyDictionary()


def _control_groups(group: Any, seconds: float) -> tuple[Any, Any, set[int]]:
    """Two gloo groups of the same ranks, up to rank 0 and down, and who hangs. Making them takes all ranks.

    Two, because a wait that times out closes all connections of its group: rank 0 can still say who is late.
    """
    if group not in _CONTROL:
        if not torch.cuda.is_available():  # torch's helper for shared memory would inherit the connections,
            torch.UntypedStorage(1)._share_filename_cpu_()  # and keep them for two seconds after our end
        ranks, limit = dist.get_process_group_ranks(group), timedelta(seconds=seconds)
        some = len(ranks) < dist.get_world_size()  # the others do not come here
        new = functools.partial(dist.new_group, ranks, limit, "gloo", use_local_synchronization=some)
        try:
            _CONTROL[group] = new(), new(), set()
        except RuntimeError as exc:
            raise SyncError(f"the {len(ranks)} ranks did not meet within {seconds:g} s: {exc}") from None
    return _CONTROL[group]


def _say(group: Any, to: int, value: Any, seconds: float) -> None:
    """Sends any value, pickled, its length first. Raises RuntimeError, as `_hear` does."""
    data = bytearray(pickle.dumps(value))
    for part in (torch.tensor([len(data)]), torch.frombuffer(data, dtype=torch.uint8)):
        _done(dist.isend(part, group=group, group_dst=to), seconds)


def _hear(group: Any, of: int, seconds: float) -> Any:
    """The next value of that rank. Raises RuntimeError where it ends before, or says nothing for so long."""
    length = torch.empty(1, dtype=torch.long)
    _done(dist.irecv(length, group=group, group_src=of), seconds)
    data = bytearray(int(length))
    _done(dist.irecv(torch.frombuffer(data, dtype=torch.uint8), group=group, group_src=of), seconds)
    return pickle.loads(data)


def _done(work: Any, seconds: float) -> None:
    work.wait(timedelta(seconds=seconds))


# --- The sync -----------------------------------------------------------------------------------------


class Sent(NamedTuple):
    """What a sync moved, and how long it took from the plan to the end of the loan."""

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
Weights = Mapping[str, Tensor]  # by checkpoint name; a DTensor stands for its full tensor
Device = torch.device | str | None


def send_weights(
    client: HTTPWeightSyncClient,
    weights: Weights | Sequence[Weights],
    *,
    exports: Exports | Sequence[Exports] | None = None,
    device: Device | Sequence[Device] = None,
    weight_version: str | None = None,
    start_wait: float = START_WAIT,
    progress: Progress = lambda line: None,
    group: Any = None,
    rank_local: bool = False,
) -> Sent:
    """One unpacked sync: every tensor is lent where it lies, and all cross in one update.

    client: on every rank; only rank 0's is spoken through, of the others' the time-out counts.
    weights: checkpoint names and their tensors (station 1). Nobody may write them until this returns. Where
        one is not contiguous a copy is lent, where one is sharded the full tensor. A list has a mapping for
        each GPU that this process lends on.
    exports: one for all syncs (`Exports()`), so that handles are made and told once, and renewed while the
        weights stay where they are. It keeps those that it lent last alive: drop it where they move away.
        Of a list of weights, a list.
    device: the worker a CPU tensor is lent to, such as "cpu:1"; CUDA tensors know theirs. Of a list, a list.
    weight_version: set on the server with the finish, and only with it.
    group: the ranks that send together (see `Ranks`), all of them the same weights.
    rank_local: the mappings are not the same. Counted by rank, mapping i is for worker i, which is the one
        at data_parallel_index * world_size + rank. Sharded weights are sent before all others.

    Raises HandleError before anything was said to the server, SyncError after; where a rank failed, the
    others raise RankError.
    """
    began = time.monotonic()
    _check_version(weight_version)
    ranks, parts = Ranks(group, client.timeout), _parts(weights, device, Exports, exports, rank_local)
    updates = Updates(client, rank_local, parts[0])
    told = read = False
    try:
        ranks.together("plan", lambda: _plan(parts), updates.agree)  # 1
        ranks.together("export", lambda: [part.export() for part in parts], updates.lend)  # 2 to 4: the loan
        ranks.first("start", lambda: _start(client, start_wait, progress), start_wait + 3 * client.timeout)
        told = True
        ranks.first("update", lambda: client.update_weights(updates.body(0)))  # 5 to 11
        read = True
        ranks.first("finish", lambda: client.finish_weight_update(weight_version))  # 12: the loan ends
        _settle_unopened(parts, ranks, progress)
    except BaseException as exc:
        if not told or (not read and _answered(exc)):
            _settle(parts)  # nobody opened them, and nobody will
        elif left := sum(ipc_codec.ref_counts(list(part.args())).count(1) for part in parts):
            what = "1 tensor stays" if left == 1 else f"{left} tensors stay"
            _tell(exc, progress, f"{what} lent: the server may still read them")
        _forget(parts)
        raise
    finally:
        _end(parts)
    return _sent(parts, rank_local, time.monotonic() - began)


def send_weights_packed(
    client: HTTPWeightSyncClient,
    weights: Weights | Sequence[Weights],
    packed_buffer_size_bytes: int = PACKED_BUFFER_SIZE_BYTES,
    *,
    buffer: PackedBuffer | Sequence[PackedBuffer] | None = None,
    device: Device | Sequence[Device] = None,
    weight_version: str | None = None,
    start_wait: float = START_WAIT,
    progress: Progress = lambda line: None,
    group: Any = None,
    rank_local: bool = False,
) -> Sent:
    """One packed sync: the tensors are copied into one buffer, chunk by chunk, and the buffer is lent.

    weights: checkpoint names and their tensors (station 1); they may be written again as soon as this
        returns. None may be larger than the buffer. A sharded one is gathered when its turn comes: beside
        the buffer there is one full tensor at a time.
    buffer: one for all syncs (`new_buffer`), so that what depends on the layout alone is worked out and told
        once. It keeps the weights alive that it sent last: drop it where they move away. Without it one is
        made for this sync. Of a list of weights, a list.
    The rest, and what it raises, as for `send_weights`.
    """
    began = time.monotonic()
    _check_version(weight_version)
    ranks, parts = Ranks(group, client.timeout), _parts(weights, device, PackedBuffer, buffer, rank_local)
    updates, room = Updates(client, rank_local, parts[0]), packed_buffer_size_bytes
    told, read = False, 0

    def fill(at: int) -> None:
        nonlocal told
        _fill(parts, at)  # 2
        if ranks.rank > 0:
            _drain(parts)
        told = True  # from here on the server may be asked

    def send_chunk(at: int) -> None:
        """Barriers on both sides: all have filled before it is sent, and all know that it was read after."""
        ranks.together(
            f"chunk {at + 1}",
            lambda: fill(at),
            lambda each: client.update_weights(Late(updates.body(at), lambda: _drain(parts))),  # 5 to 11
        )

    try:
        count = ranks.together("plan", lambda: _plan(parts, room), updates.agree)  # 1
        ranks.together("export", lambda: [part.export_buffer() for part in parts], updates.lend)  # 3, 4
        ranks.first("start", lambda: _start(client, start_wait, progress), start_wait + 3 * client.timeout)
        for at in range(count):
            send_chunk(at)
            read += 1  # answered, so the buffer may be filled again
            if ranks.rank == 0:
                progress(f"chunk {read}/{count}")
        ranks.first("finish", lambda: client.finish_weight_update(weight_version))  # 12
        _settle_unopened(parts, ranks, progress)
    except BaseException as exc:
        if not told or (not read and _answered(exc)):
            _settle(parts)  # nobody opened it, and nobody will
        elif _answered(exc):
            with contextlib.suppress(SyncError):
                ranks.first("shutdown", functools.partial(_shut_down, client))
        for part in parts:
            part.abandon_buffer(exc, progress)
        _forget(parts)
        raise
    finally:
        _end(parts)
    return _sent(parts, rank_local, time.monotonic() - began)


# --- The sync: its parts ------------------------------------------------------------------------------


class Plan(NamedTuple):
    """What a worker will be told, and how it comes about: the same on all ranks, unless rank-local."""

    chunks: list[dict[str, Any]]  # an update_info each, without handles
    sharded: list[str]  # names that all ranks gather, in this order
    capacity: int  # bytes of the packed buffer; 0: unpacked

    def rows(self) -> Iterator[str]:
        """Name, dtype and shape of each tensor, and whether it is gathered; for people."""
        for info in self.chunks:
            for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
                yield f"{name} {dtype} {shape}{' sharded' * (name in self.sharded)}"
        yield "the end"
        yield f"followed by a buffer of {self.capacity} bytes"


NOTHING = Plan([], [], 0)


@dataclass
class Part:
    """What one worker is lent: the weights on its GPU. A process has one, or one for each of its GPUs."""

    weights: Weights
    device: Device = None
    buffer: PackedBuffer | None = None
    exports: Exports = field(default_factory=Exports)  # packed, the buffer's
    kept: bool = False  # whether they outlive this sync
    begun: threading.Lock | None = None  # of its exports, from the plan to the end of the sync
    lends: bool = False  # whether this sync has begun to lend them
    plan: Plan = NOTHING
    lent: dict[str, Tensor] = field(default_factory=dict)  # unpacked: held until the loan ends

    def begin(self) -> None:
        if not self.exports.in_use.acquire(blocking=False):
            raise HandleError(
                "this buffer, or these Exports, are in another sync now; each thread has its own"
            )
        self.begun = self.exports.in_use

    def make_plan(self, room: int = 0) -> Plan:
        """Station 1, packed with `room` for a buffer: looks at all, gathers and writes nothing.

        Raises HandleError, naming the tensor, where one cannot be lent.
        """
        if self.exports.layout and self.exports.layout.is_of(self.weights, self.device):
            self.plan = self.exports.layout.plan
            return self.plan
        sharded = [name for name, weight in self.weights.items() if _is_sharded(weight)]
        for name, weight in self.weights.items():
            if not isinstance(name, str):
                raise HandleError(f"{name!r} is the name of a weight, and no str")
            _named(name, ipc_codec.dense, _local(weight))
        if room:
            sizes = {name: weight.nbytes for name, weight in self.weights.items()}
            capacity = self.buffer.capacity_bytes if self.buffer else _capacity(self.weights, room)
            self.plan = Plan(_chunks(self.weights, sizes, capacity), sharded, capacity)
        else:
            self.plan = Plan([_update_info(self.weights)], sharded, 0)
        return self.plan

    @property
    def layout_holds(self) -> bool:
        return self.exports.layout is not None and self.exports.layout.plan is self.plan

    def export(self) -> list[ipc_codec.Handle]:
        """Stations 2 and 3: a handle for each tensor. Gathers all before the first is lent."""
        self.lends = True
        if self.layout_holds and self.exports.renew():
            _synchronize(self.exports.layout.held)
            return self.exports.handles
        self.exports.forget()  # before others are made: they are not lent any more, and not settled
        self.lent = {name: _named(name, ipc_codec.wire_form, _full(w)) for name, w in self.weights.items()}
        self.exports.lend(self.lent, self.device)
        _synchronize(self.lent.values())
        if self.kept:
            layout = Layout(self.weights, self.plan, self.device)
            if list(map(_address, self.lent.values())) == layout.look[0]:
                self.exports.layout = layout  # no copy was lent
        return self.exports.handles

    def export_buffer(self) -> ipc_codec.Handle:
        """Station 3, packed: once a sync; before the buffer is filled, so its event covers no write."""
        self.lends = True
        if self.buffer is None:
            self.buffer = PackedBuffer(self.plan.capacity, self.device or _device_of(self.weights))
            self.exports = self.buffer.exports
        layout = self.exports.layout if self.layout_holds else Layout(self.weights, self.plan, self.device)
        handle = self.buffer.export()
        self.exports.layout = layout
        return handle

    def fill(self, at: int) -> None:
        """Station 2, packed: writes that chunk; on CUDA it is there after `drain` only."""
        assert self.buffer is not None, "exported before it is filled"
        if at < len(self.plan.chunks):
            self.exports.layout.fill(self.buffer, self.weights, at)

    def drain(self) -> None:
        """Station 6, packed: the bytes are there before the server is told."""
        if self.buffer:
            self.buffer.drain()

    def abandon_buffer(self, exc: BaseException, progress: Progress) -> None:
        """After a failure: a buffer that the server may still read is never written again."""
        if self.buffer and any(map(ipc_codec.ref_count, self.args())):
            self.buffer.abandon()
            size = self.buffer.capacity_bytes
            _tell(exc, progress, f"a buffer of {size:,} bytes stays lent: the server may still read it")

    def args(self) -> Iterator[Any]:
        """The arguments of all exports of this sync."""
        return itertools.chain.from_iterable(map(dict.values, self.exports.handles if self.lends else []))


class Layout:
    """What is worked out and told once, and holds until another weight comes, or one elsewhere.

    It holds the weights, and looks at them too: memory that was freed is given out again, to others.
    """

    def __init__(self, weights: Weights, plan: Plan, device: Device):
        self.plan, self.device = plan, device
        self.names = list(weights)
        self.held = [weight.detach() for weight in weights.values() if not _is_sharded(weight)]
        self.look = _look(weights.values())
        self.copies: dict[int, ipc_codec.Copies] = {}  # by chunk, where all of it lies ready to be copied
        self.said: Any = None  # what rank 0 last made into `bodies`
        self.bodies: dict[int, bytes] = {}  # by chunk

    def is_of(self, weights: Weights, device: Device) -> bool:
        """Whether these are the weights that it was made for, where they were."""
        try:
            there = device == self.device and list(weights) == self.names
            held, *_ = self.look
            return there and _look(weights.values()) == self.look and list(map(_address, self.held)) == held
        except (RuntimeError, TypeError, AttributeError):  # of what has no address, or is no tensor
            return False

    def fill(self, buffer: PackedBuffer, weights: Weights, at: int) -> None:
        """Writes chunk `at`. A sharded weight is gathered, written, and dropped before the next."""
        if at in self.copies:
            return buffer.write(self.copies[at])
        chunk = [weights[name] for name in self.plan.chunks[at]["names"]]
        if not any(map(_is_sharded, chunk)):
            there = list(map(ipc_codec.wire_form, chunk))
            buffer.write(copies := buffer.lay_out(there))
            if list(map(_address, there)) == list(map(_address, chunk)):
                self.copies[at] = copies
            return None
        start = 0
        for weight in chunk:
            start += buffer.write_one(start, _full(weight))
        return None


def _synchronize(weights: Iterable[Tensor]) -> None:
    """Station 6, unpacked: what is queued is done. The event in a renewed handle covers none of it."""
    for device in {weight.device for weight in weights}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


_address = Tensor.data_ptr
_HOW: list[Callable[[Tensor], Any]] = [_address, Tensor.stride, Tensor.is_conj, Tensor.is_neg]


def _look(weights: Collection[Tensor]) -> list[list[Any]]:
    """What weights are, where, and how they lie there, in columns; the places first.

    Only what they are of sharded ones, which are gathered elsewhere each time.
    """
    plain = [weight for weight in weights if not _is_sharded(weight)]
    what: list[list[Any]] = [[weight.dtype for weight in weights], [weight.shape for weight in weights]]
    what.append(list(map(_is_sharded, weights)))
    return [list(map(how, plain)) for how in _HOW] + what


def _check_version(weight_version: Any) -> None:
    """The server would refuse it with the finish only, when all is sent and the update stays open."""
    if weight_version is not None and not isinstance(weight_version, str):
        raise ValueError(f"weight_version is a str, such as 'step 7', and not {weight_version!r}")


def _parts(weights: Any, device: Any, kind: type, kept: Any, rank_local: bool) -> list[Part]:
    """A part for each mapping of weights, with its device, and its buffer or exports where they are kept."""
    if isinstance(weights, Mapping):
        weights, device, kept = [weights], [device], [kept]
    if not isinstance(weights, (list, tuple)) or not all(isinstance(each, Mapping) for each in weights):
        raise ValueError(
            "weights are a mapping of names to tensors, such as model.state_dict(), or a list of them"
        )
    devices = device or [None] * len(weights)
    each_kept = kept or [None] * len(weights)
    lists = not isinstance(devices, (str, torch.device)) and isinstance(each_kept, Sequence)
    if not weights or not lists or not len(weights) == len(devices) == len(each_kept):
        raise ValueError(
            f"of {len(weights)} mappings of weights each has a device, and a buffer or exports, of its own"
        )
    if strange := [type(one).__name__ for one in each_kept if one is not None and type(one) is not kind]:
        raise ValueError(f"a {kind.__name__} is kept from sync to sync here, and not a {strange[0]}")
    if len({id(one) for one in each_kept if one}) < sum(map(bool, each_kept)):
        raise ValueError("two mappings of weights have one buffer, or one Exports; each has its own")
    if rank_local:  # of what comes first the chunks are alike, and so is the order of gathering
        weights = [dict(sorted(w.items(), key=lambda item: not _is_sharded(item[1]))) for w in weights]
    return list(map(_part, weights, devices, each_kept))


def _part(weights: Weights, device: Device, kept: PackedBuffer | Exports | None) -> Part:
    if isinstance(kept, PackedBuffer):
        return Part(weights, device, kept, kept.exports, kept=True)
    return Part(weights, device, exports=kept or Exports(), kept=kept is not None)


class Updates:
    """What the server will be told, a chunk at a time: out of all ranks' plans and handles. On rank 0."""

    def __init__(self, client: HTTPWeightSyncClient, rank_local: bool, part: Part):
        self.client = client
        self.rank_local = rank_local
        self.part = part  # in whose layout the bodies are kept
        self.chunks: list[Any] = []
        self.bodies: dict[int, bytes] = {}

    def agree(self, each: list[list[Plan]]) -> int:
        """Takes the plans; the number of chunks. Raises RankError unless all ranks have the same."""
        plans = [plan for of_rank in each for plan in of_rank]
        if self.rank_local:
            # More entries than workers pass, as in vLLM: a rank may have none.
            if (workers := self.client.world_size()) > len(plans):
                raise RankError(f"the server has {workers} workers, and {len(plans)} mappings are for them")
            nothing: dict[str, Any] = {"names": [], "dtype_names": [], "shapes": [], "tensor_sizes": []}
            by_chunk = itertools.zip_longest(*(plan.chunks for plan in plans), fillvalue=nothing)
            self.chunks = list(map(list, by_chunk))
        else:
            _check_alike(each)
            self.chunks = [*plans[0].chunks]
        return len(self.chunks)

    def lend(self, each: list[list[Any]]) -> None:
        """Station 4: takes the handles, and enters them in every chunk."""
        handles = [handle for of_rank in each for handle in of_rank]
        said, layout = (self.chunks, handles), self.part.exports.layout
        if layout and layout.said == said:
            self.bodies = layout.bodies
            return
        if layout:
            layout.said, layout.bodies = said, self.bodies
        if self.rank_local:
            self.chunks = [list(map(_with_handles, infos, handles)) for infos in self.chunks]
            return
        try:
            merged = merge_handles(handles) if len(handles) > 1 else handles[0]
        except ValueError as exc:
            raise RankError(f"{exc}; each rank, and each mapping of one, is on a GPU of its own") from None
        self.chunks = [_with_handles(info, merged) for info in self.chunks]

    def body(self, at: int) -> bytes:
        """Station 5, once."""
        if at not in self.bodies:
            self.bodies[at] = update_body(self.chunks[at])
        return self.bodies[at]


def _with_handles(info: dict[str, Any], handles: Any) -> dict[str, Any]:
    return info | {"ipc_handles": handles}


def _check_alike(each: list[list[Plan]]) -> None:
    """Raises RankError, naming the first difference, unless all plans are the same."""
    ours = each[0][0]
    for rank, plans in enumerate(each):
        for at, theirs in enumerate(plans):
            if theirs != ours:
                pairs = enumerate(itertools.zip_longest(ours.rows(), theirs.rows(), fillvalue="nothing"))
                tensor, (a, b) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
                who = f"rank {rank}" + f", mapping {at}" * (len(plans) > 1)
                raise RankError(f"{who} is not like rank 0: its tensor {tensor} is {b}, and on rank 0 {a}")


def _update_info(weights: Weights) -> dict[str, Any]:
    """Station 4: the metadata, from the very tensors that are lent."""
    return UpdateInfo(
        names=list(weights),
        dtype_names=[ipc_codec.dtype_name(weight.dtype) for weight in weights.values()],
        shapes=[list(weight.shape) for weight in weights.values()],
    ).to_json()


def _chunks(weights: Weights, sizes: Mapping[str, int], capacity: int) -> list[dict[str, Any]]:
    """The update_info of each packed chunk. Raises HandleError where one tensor is larger than the buffer."""
    try:
        chunks = plan_chunks(sizes, capacity)
    except ValueError as exc:
        raise HandleError(str(exc)) from None
    return [
        _update_info({name: weights[name] for name in names}) | {"tensor_sizes": [sizes[n] for n in names]}
        for names in chunks
    ]


def new_buffer(weights: Weights, packed_buffer_size_bytes: int, device: Device = None) -> PackedBuffer:
    """A buffer for all packed syncs of these weights: no larger than all of them together."""
    return PackedBuffer(_capacity(weights, packed_buffer_size_bytes), device or _device_of(weights))


def _capacity(weights: Weights, room: int) -> int:
    # Not nbytes, which a sparse tensor has not: the plan refuses it by its name.
    return max(1, min(room, sum(weight.numel() * weight.itemsize for weight in weights.values())))


def _is_sharded(weight: Tensor) -> bool:
    # A DTensor; importing its class takes a second.
    return type(weight) not in (Tensor, torch.nn.Parameter) and hasattr(weight, "full_tensor")


def _local(weight: Tensor) -> Tensor:
    """What of it is here."""
    return weight.to_local() if _is_sharded(weight) else weight  # type: ignore[attr-defined]


def _full(weight: Tensor) -> Tensor:
    """The full tensor of a sharded one, on every rank that has a shard: all of them call this together."""
    return weight.detach().full_tensor() if _is_sharded(weight) else weight  # type: ignore[attr-defined]


def _fill(parts: Iterable[Part], at: int) -> None:
    """Fills all buffers, several GPUs at once."""
    for part in parts:
        part.fill(at)


def _drain(parts: Iterable[Part]) -> None:
    for part in parts:
        part.drain()


def _named(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, with the tensor's name in front of what it refuses."""
    try:
        return function(*args)
    except HandleError as exc:
        raise HandleError(f"{name}: {exc}") from None


def _settle(parts: Iterable[Part]) -> None:
    for part in parts:
        ipc_codec.settle(*part.args())


def _settle_unopened(parts: list[Part], ranks: Ranks, progress: Progress) -> None:
    """After a good sync: nobody opened what was lent on a GPU that no worker is on, or to send no tensor."""
    if ranks.size == 1 and not any(part.plan.chunks for part in parts):
        _settle(parts)
    for part in parts if len(parts) * ranks.size > 1 else ():
        exports = list(part.args())
        if exports and {*ipc_codec.ref_counts(exports)} <= {1, None}:
            ipc_codec.settle(*exports)
            uuids = ", ".join(part.exports.handles[0])
            progress(f"nobody has opened what was lent on GPU {uuids}: no worker is on it")


def _plan(parts: list[Part], room: int = 0) -> list[Plan]:
    for part in parts:
        part.begin()
    return [part.make_plan(room) for part in parts]


def _forget(parts: Iterable[Part]) -> None:
    """After a failure nothing is renewed."""
    for part in parts:
        if part.begun:
            part.exports.forget()


def _end(parts: Iterable[Part]) -> None:
    """The loan is over, or nothing more can be done about it."""
    for part in parts:
        part.lent.clear()
        if part.begun and (not part.kept or part.exports.layout is None):  # copies are not lent again
            part.exports.forget()
        if part.begun:
            part.begun.release()
    ipc_codec.ipc_collect()


def _tell(exc: BaseException, progress: Progress, line: str) -> None:
    """Says what stays lent, with the error too where Python can (3.11)."""
    if hasattr(exc, "add_note"):
        exc.add_note(line)
    with contextlib.suppress(Exception):  # which may be what the first error came from
        progress(line)


def _answered(exc: BaseException) -> bool:
    """Whether no request is under way: the server answered, or was not asked."""
    if isinstance(exc, SyncError):
        return exc.status not in (None, *NO_ANSWER) or isinstance(exc, RankError)
    return isinstance(exc, Exception)


def _start(client: HTTPWeightSyncClient, start_wait: float, progress: Progress) -> None:
    """Opens the update. Where one is open already, its trainer gets `start_wait` seconds to end it.

    A trainer that died leaves its update open, and vLLM has no call that aborts one: it is closed with a
    finish without a version, and everything is sent again.
    """
    deadline = time.monotonic() + start_wait
    who = "our last sync, which failed, or another trainer" if client.left_open else "another trainer"
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
        progress(f"{refusal}; {who} may be at it, trying again for {left:.0f} s")
        time.sleep(min(1.0, left))
    progress("start is still refused: closing the update that was left open")
    try:
        client.finish_weight_update()
    except SyncError:
        raise SyncError(refusal, 500) from None  # none was open: start has another reason
    client.start_weight_update()


def _shut_down(client: HTTPWeightSyncClient) -> None:
    """Releases what the server had opened. While the update is open, that is for the next `_start`."""
    if not client.left_open:
        client.shutdown_weight_transfer_engine()


def _device_of(weights: Weights) -> torch.device:
    return next((weight.device for weight in weights.values()), torch.device("cpu"))


def _sent(parts: list[Part], rank_local: bool, seconds: float) -> Sent:
    """Of what is sent to every worker alike, one counts."""
    counted = [part.weights for part in (parts if rank_local else parts[:1])]
    nbytes = sum(weight.nbytes for weights in counted for weight in weights.values())
    return Sent(sum(map(len, counted)), nbytes, max(len(part.plan.chunks) for part in parts), seconds)


# --- Checking -----------------------------------------------------------------------------------------


def verify(
    client: HTTPWeightSyncClient, weights: Weights, send_again: Callable[[], Any], group: Any = None
) -> str:
    """Compares what the server holds with what was sent. Returns what was found; raises SyncError if wrong.

    A stub holds the sent names. A real engine fuses and shards, so that its checksums are of other
    tensors: then the same weights, sent once more, must give the same checksums. Every rank compares its own.
    """
    ranks = Ranks(group, client.timeout)
    held = ranks.first("verify", client.checksums)
    if weights and not held:
        raise SyncError("the server holds no weights")
    by_name: dict[str, set[str]] = {}
    for key, value in held.items():
        by_name.setdefault(key.split(":", 4)[-1], set()).add(value)
    if not weights.keys() <= by_name.keys():
        send_again()
        again = ranks.first("verify again", client.checksums)
        if again != held:
            differ = sorted(key for key in held.keys() | again.keys() if held.get(key) != again.get(key))
            first = _one_line(differ[0])
            raise SyncError(f"the same weights gave other checksums the second time: {first}")
        return f"the server holds other names; sent twice, its {len(held)} checksums are the same"
    wrong = [name for name, weight in weights.items() if by_name[name] != {ipc_codec.checksum(_full(weight))}]
    if wrong:
        raise SyncError(f"{len(wrong)} of {len(weights)} tensors differ on the server, {wrong[0]} first")
    return f"identical: sha256 of {len(weights)} tensors, on every worker"


def load_checkpoint(path: Path, device: torch.device) -> dict[str, Tensor]:
    """A state dict (.pt, .pth, .bin), a .safetensors file, or a folder. Raises ValueError.

    Of a folder all .safetensors files; where it has none, all .bin files; else all .pt files.
    """
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
        why = "".join(str(exc).strip().splitlines()[:1])
        if isinstance(exc, pickle.UnpicklingError):  # torch's words are the advice to trust it
            why = "it holds more than plain tensors, such as torch.save(model.state_dict(), path) writes"
        raise ValueError(f"{path} is no checkpoint that can be read ({type(exc).__name__}: {why})") from None
    if state == {}:
        raise ValueError(f"{path} has no tensor")
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
    program = Path(__file__).with_name("server.py")
    if not program.exists():
        raise SyncError(f"--spawn-server runs {program}, and that is not there: copy it, or give a URL")
    command = [sys.executable, str(program), "--port", "0", "--device", device]
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


def _at_least(least: float, kind: Callable[[str], Any], most: float = math.inf) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        if not (value := kind(text)) >= least:
            raise ValueError
        if value > most:
            raise argparse.ArgumentTypeError(f"{text} is more than {most:,.0f}")
        return value

    return number


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="exit codes: 0 all is well, 1 the sync or the check failed, 2 wrong usage, 130 interrupted",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("url", nargs="?", help=f"the server (default {URL})")
    add("--spawn-server", action="store_true", help="run the server.py beside this file as a child instead")
    steps = "of training (default %(default)s; with fewer the reward need not have tripled)"
    add("--steps", type=_at_least(0, int), default=STEPS, metavar="N", help=steps)
    add("--seed", type=int, default=0, metavar="N", help="of the training (default %(default)s)")
    add(
        "--checkpoint", type=Path, metavar="PATH", help="send this instead: .pt, .bin, .safetensors, a folder"
    )
    add("--packed", action="store_true", help="send through one buffer, chunk by chunk")
    size: dict[str, Any] = {"type": _at_least(1, int), "default": PACKED_BUFFER_SIZE_BYTES, "metavar": "N"}
    add("--packed-buffer-size-bytes", **size, help="of that buffer (default 1 GiB)")
    add("--device", default="auto", help="where the weights lie: auto, cpu, cuda or cuda:1; one a process")
    add("--weight-version", metavar="V", help="with --checkpoint: what the server then publishes")
    seconds: dict[str, Any] = {"type": _at_least(0.001, float, MAX_SECONDS), "metavar": "S"}
    silent = "seconds that nothing may come or go in a call (default %(default)g)"
    add("--timeout", **seconds, default=TIMEOUT, help=silent)
    wait = "seconds for another trainer to end (default %(default)g)"
    add("--start-wait", **seconds | {"type": _at_least(0, float, MAX_SECONDS)}, default=START_WAIT, help=wait)
    return parser


class Sync:
    """The command line's choice of mode, for one sync after another."""

    def __init__(self, client: HTTPWeightSyncClient, options: argparse.Namespace, device: torch.device):
        self.client, self.options = client, options
        self.more: dict[str, Any] = {
            "device": device,
            "start_wait": options.start_wait,
            "progress": lambda line: print(line, file=sys.stderr),
        }
        self.exports = Exports()  # one for all syncs
        self.buffer: PackedBuffer | None = None  # and so is this

    def send(self, weights: Weights, weight_version: str | None) -> Sent:
        """One sync, paused: nobody samples from a mix, and what was cached of the old weights goes.

        After a failure it stays paused, until a later sync has sent everything.
        """
        ranks = Ranks(seconds=self.options.timeout)
        resume = functools.partial(_unless_missing, self.client.resume)
        was_paused = ranks.first("is paused", functools.partial(_unless_missing, self.client.is_paused))
        ranks.first("pause", functools.partial(_unless_missing, self.client.pause))
        try:
            sent = self._send(weights, weight_version)
        except (RankError, ValueError):
            if ranks.rank == 0 and not was_paused and not self.client.left_open:  # no weight was touched
                with contextlib.suppress(SyncError):
                    resume()
            raise
        ranks.first("resume", resume)
        return sent

    def _send(self, weights: Weights, weight_version: str | None) -> Sent:
        more = self.more | {"weight_version": weight_version}
        if not self.options.packed:
            return send_weights(self.client, weights, exports=self.exports, **more)
        if self.buffer is None:
            self.buffer = new_buffer(weights, self.options.packed_buffer_size_bytes, self.more["device"])
        return send_weights_packed(self.client, weights, buffer=self.buffer, **more)


def _unless_missing(call: Callable[[], Any]) -> Any:
    """A server that serves nobody may have nothing to pause."""
    try:
        return call()
    except SyncError as exc:
        if exc.status not in (404, 405):
            raise
        return None


def send_checkpoint(client: HTTPWeightSyncClient, options: argparse.Namespace, device: torch.device) -> None:
    """Sends the checkpoint, and checks that every byte arrived."""
    weights = load_checkpoint(options.checkpoint, device)
    sync = Sync(client, options, device)
    sent = sync.send(weights, options.weight_version)
    if Ranks().rank == 0:
        print(f"{options.checkpoint} -> {client.url}, {'packed' if options.packed else 'unpacked'}: {sent}")
    found = verify(client, weights, lambda: sync.send(weights, options.weight_version))
    if Ranks().rank == 0:
        print(found)


def my_device(choice: str) -> torch.device:
    """`auto`, `cpu` or `cuda`, of which a rank takes its own by LOCAL_RANK; or a device as it is named.

    A rank that sees fewer GPUs than there are ranks (CUDA_VISIBLE_DEVICES) counts on from the first.
    """
    choice = ("cuda" if torch.cuda.is_available() else "cpu") if choice == "auto" else choice
    device = torch.device(choice) if re.fullmatch(r"(cpu|cuda)(:\d{1,2})?", choice) else None
    if device is None:
        raise ValueError(f"--device {choice!r} is none of auto, cpu, cuda, cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device is {choice}, and torch sees {torch.cuda.device_count()} CUDA devices")
    if device.index is None and "LOCAL_RANK" in os.environ:
        seen = torch.cuda.device_count() if device.type == "cuda" else 0
        at = int(os.environ["LOCAL_RANK"])
        return torch.device(device.type, at % seen if seen else at)
    return device


@contextlib.contextmanager
def process_group(device: torch.device, timeout: float) -> Iterator[Ranks]:
    """The ranks that torchrun has started, or this process alone."""
    if "RANK" not in os.environ:
        yield Ranks()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as exc:
        raise SyncError(f"the ranks did not meet: {exc}") from None
    yield Ranks(seconds=timeout)
    dist.destroy_process_group()  # not after a failure: a rank that has ended takes no part in it


def run(options: argparse.Namespace) -> None:
    """Raises SyncError, HandleError or ValueError."""
    device = my_device(options.device)
    with process_group(device, options.timeout) as ranks, contextlib.ExitStack() as stack:

        def spawn(devices: list[str]) -> str:
            return stack.enter_context(spawned_server(",".join(devices)))

        url = options.url or URL
        if options.spawn_server:
            url = ranks.together("spawn", lambda: str(device), spawn, SERVER_START_SECONDS)
        client = HTTPWeightSyncClient(url, options.timeout)
        ranks.first("init", lambda: client.init_weight_transfer_engine({"packed": options.packed}))
        (send_checkpoint if options.checkpoint else train)(client, options, device)


def main() -> int:
    parser = build_parser()
    options = parser.parse_args()
    if options.url and options.spawn_server:
        parser.error("a URL and --spawn-server: which server is meant?")
    try:
        HTTPWeightSyncClient(options.url or URL)
        my_device(options.device)
    except ValueError as exc:
        parser.error(str(exc))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a child is taken down
    gc.freeze()  # what was imported stays: a collection need not look at it during a sync
    who = "trainer.py" + (f", rank {os.environ['RANK']}" if "RANK" in os.environ else "")
    try:
        run(options)
    except (SyncError, ValueError) as exc:
        print(f"{who}: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        for again in (signal.SIGINT, signal.SIGTERM):
            signal.signal(again, signal.SIG_IGN)  # it ends already
        print(f"{who}: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
