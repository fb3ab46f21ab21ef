"""POST /v1/completions of `python server.py`, from outside: which weights answer, and with what.

The helpers come first, then one section for each promise: the reply, agreement with a ByteLM of this
process, sampling, errors, which weights are served, pause, load, --model, other clients.
"""

import codecs
import contextlib
import copy
import functools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from pathlib import Path

import pytest
import requests
import torch

import ipc_codec
import test_roundtrip
import trainer

ROOT = Path(trainer.__file__).resolve().parent
NAME = "trainer:ByteLM"
CONTEXT = trainer.ByteLM.context
NOBODY = 255  # the byte that a mix of two `always` models emits
LONG = {"temperature": 1, "seed": 1, "max_tokens": 100}
SIZES = 6, 7, 8  # rows of the long completions that run at once, so that they can be told apart

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda:0", marks=needs_cuda)]


# ---- models ----------------------------------------------------------------------------------------------


def byte_lm(seed):
    """A ByteLM that is less even than a new one: what comes next hangs on the context and on the place."""
    torch.manual_seed(seed)
    model = trainer.ByteLM().requires_grad_(False).eval()
    model.embed.weight.mul_(4)
    model.position.normal_()
    for block in model.blocks:
        block.out.weight.mul_(4)
    return model


LM, OTHER_LM = byte_lm(0), byte_lm(1)


def constant(logits):
    """Weights that give these logits after whatever tokens: the last norm is its bias, the head reads it."""
    head = torch.zeros(256, 64)
    head[:, 0] = logits
    bias = torch.zeros(64)
    bias[0] = 1
    return nothing_but(head, bias)


def always(byte):
    """Weights that emit one byte only. Those of two bytes mixed, by tensors, emit NOBODY.

    A chunk has the head or the bias, and the place of the byte in the head is the bias's.
    """
    bias, head = torch.zeros(64), torch.zeros(256, 64)
    bias[byte % 64] = 1
    head[NOBODY] = 50
    head[NOBODY, byte % 64] = 0
    head[byte, byte % 64] = 50
    return nothing_but(head, bias)


def nothing_but(head, bias):
    """ByteLM's names: the head and its tied name first, zeros, and the bias of the last norm at the end."""
    zeros = {name: torch.zeros_like(weight) for name, weight in LM.state_dict().items()}
    zeros |= {"embed.weight": head, "head.weight": head, "norm.bias": bias}
    first, last = ("head.weight", "embed.weight"), ("norm.bias",)
    return {name: zeros[name] for name in (*first, *(zeros.keys() - {*first, *last}), *last)}


def logprobs_after(model, prompt, tokens):
    """Log-probabilities [tokens, 256] of what follows the prompt, and each of the tokens but the last."""
    ids = torch.tensor([[*prompt, *tokens]])
    return model(ids)[0, len(prompt) - 1 : -1].log_softmax(-1)


def check_logprobs(said, model, prompt, tokens):
    """Those that a reply has of its tokens are the model's, without any temperature."""
    expected = logprobs_after(model, prompt, tokens).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(said), expected, atol=1e-4, rtol=0)


def greedy(model, prompt, count):
    """The chain of the likeliest tokens."""
    return list(greedy_chain(model, bytes(prompt), count))


@functools.cache
def greedy_chain(model, prompt, count):
    tokens = []
    for _ in range(count):
        tokens.append(int(model(torch.tensor([[*prompt, *tokens]]))[0, -1].argmax()))
    return tuple(tokens)


def test_two_models_mixed_by_tensors_emit_no_ones_byte():
    head, bias = always(7), always(8)
    mix = head | {"norm.bias": bias["norm.bias"]}
    model = trainer.ByteLM().requires_grad_(False)
    for weights, byte in [(head, 7), (bias, 8), (mix, NOBODY)]:
        logits = torch.func.functional_call(model, weights, (torch.tensor([[1, 2]]),), tie_weights=False)
        assert logits.argmax(-1).tolist() == [[byte, byte]]


# ---- the server ------------------------------------------------------------------------------------------


class Server(test_roundtrip.Server):
    """A server, with a trainer of its own."""

    def __init__(self, device, *options, folder=ROOT):
        # small tensors: more threads are slower
        super().__init__(device, *options, folder=folder, OMP_NUM_THREADS="1")
        self.place = torch.device(device)  # of the weights that are sent
        self.device = self.devices[0]
        self.folder = Path(folder)
        self.serves_lm = False  # LM, at version "lm", and nothing was sent since

    def __enter__(self):
        super().__enter__()
        self.client = trainer.HTTPWeightSyncClient(self.url, timeout=60)
        return self

    # -- calls

    def send(self, method, path, **more):
        with requests.Session() as http:
            http.trust_env = False
            return http.request(method, f"{self.url}/{path}", timeout=60, **more)

    def get(self, path):
        return self.send("GET", path)

    def post(self, path, body=None):
        return self.send("POST", path, json=body)

    def ask(self, prompt="ab", **asked):
        return self.post("v1/completions", {"prompt": prompt, "temperature": 0, **asked})

    def complete(self, prompt="ab", **asked):
        return ok(self.ask(prompt, **asked))

    # -- weights

    def placed(self, weights):
        """What will be sent, on the server's device; a module's tied names stay tied."""
        self.serves_lm = False
        if isinstance(weights, torch.nn.Module):
            return copy.deepcopy(weights).to(self.place).state_dict()
        return {name: weight.to(self.place) for name, weight in weights.items()}

    def sync(self, weights, version=None, buffer=None):
        """Through a packed buffer of that many bytes where one is said. Returns how many chunks it took."""
        more = {"device": self.device, "weight_version": version, "start_wait": 0.0}
        self.client.init_weight_transfer_engine({"packed": bool(buffer)})
        if buffer:
            return trainer.send_weights_packed(self.client, self.placed(weights), buffer, **more).chunks
        return trainer.send_weights(self.client, self.placed(weights), **more).chunks

    def serve_lm(self):
        if not self.serves_lm:
            self.sync(LM, "lm")
            self.serves_lm = True

    @contextlib.contextmanager
    def lent(self, weights):
        """An unpacked update_info whose weights are lent for as long as the block lasts."""
        weights = self.placed(weights)
        handles = [ipc_codec.export_handle(weight, self.device) for weight in weights.values()]
        yield {
            "names": list(weights),
            "dtype_names": [ipc_codec.dtype_name(weight.dtype) for weight in weights.values()],
            "shapes": [list(weight.shape) for weight in weights.values()],
            "ipc_handles": handles,
        }
        for handle in handles:
            for args in handle.values():
                ipc_codec.settle(args)
        del weights
        ipc_codec.ipc_collect()

    def chunk(self, weights):
        """One good update of an open session."""
        with self.lent(weights) as info:
            self.client.update_weights(info)

    def bad_chunk(self, weights):
        """One update that is refused for its content."""
        with self.lent(weights) as info, pytest.raises(trainer.SyncError) as refusal:
            self.client.update_weights(info | {"names": [*info["names"][:-1], info["names"][0]]})
        assert refusal.value.status == 500

    def calm(self):
        """Idle, unpaused, unpacked."""
        self.post("finish_weight_update")
        ok(self.post("init_weight_transfer_engine", {"init_info": {}}))
        ok(self.post("resume"))


def halves(weights):
    items = list((weights.state_dict() if isinstance(weights, torch.nn.Module) else weights).items())
    return dict(items[: len(items) // 2]), dict(items[len(items) // 2 :])


def until(condition, what):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"not in 30 s: {what}"
        time.sleep(0.001)


# ---- what answers look like ------------------------------------------------------------------------------


def ok(reply):
    assert reply.status_code == 200, reply.text[:300]
    return json.loads(reply.text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def error(reply, status):
    """The body of an error, exact but for type and message; its param."""
    assert reply.status_code == status, reply.text[:300]
    said = reply.json()["error"]
    assert reply.json() == {"error": {**said, "code": status}}
    assert said.keys() == {"message", "type", "param", "code"}
    assert said["message"] and isinstance(said["message"], str) and isinstance(said["type"], str)
    return said["param"]


def unavailable(reply):
    assert error(reply, 503) is None


def tokens_of(reply):
    return [choice["token_ids"] for choice in reply["choices"]]


def token_logprobs_of(reply):
    return [choice["logprobs"]["token_logprobs"] for choice in reply["choices"]]


def text_of(tokens):
    return codecs.decode(bytes(tokens), "utf-8", "replace")


# ---- fixtures --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=DEVICES)
def plain_server(request):
    with Server(request.param) as server:
        server.boot = {path: server.get(path) for path in ("v1/models", "weight_info")}
        server.boot["v1/completions"] = server.ask()
        yield server


@pytest.fixture
def plain(plain_server):
    """A server without --model, with whatever weights the test gives it."""
    plain_server.calm()
    yield plain_server
    plain_server.calm()


@pytest.fixture
def lm(plain):
    """A server without --model that serves LM, at version "lm"."""
    plain.serve_lm()
    return plain


# Runs in the server, from the folder that it was started in. `forwards` has a byte for each forward pass:
# how many rows it had. A sampling waits, 5 s at most, while there is a file `hold`, and says so in `held`.
COUNTING = """
import os, time, torch, trainer

class Counting(trainer.ByteLM):
    def forward(self, ids):
        with open("forwards", "ab") as file:
            file.write(bytes([len(ids)]))
        return super().forward(ids)

multinomial = torch.multinomial

def held(*args, **more):
    deadline = time.monotonic() + 5
    while os.path.exists("hold") and time.monotonic() < deadline:
        open("held", "w").close()
        time.sleep(0.001)
    return multinomial(*args, **more)

torch.multinomial = held
"""


@pytest.fixture(scope="module", params=DEVICES)
def counting_server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("counting")
    (folder / "counting.py").write_text(COUNTING)
    with Server(request.param, "--model", "counting:Counting", folder=folder) as server:
        server.boot = server.ask(model="counting:Counting", logprobs=0)
        yield server


@pytest.fixture
def counting(counting_server):
    """A server with --model counting:Counting that serves LM, at version "lm"; it has made no forward yet."""
    counting_server.calm()
    counting_server.serve_lm()
    (counting_server.folder / "forwards").write_bytes(b"")
    yield counting_server
    for name in ("hold", "held"):
        (counting_server.folder / name).unlink(missing_ok=True)
    counting_server.calm()


def forwards(server):
    return (server.folder / "forwards").read_bytes()


@contextlib.contextmanager
def threads(count):
    """A pool whose block does not wait for what still runs when a test has failed already."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


# ---- the reply -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt,ids", [
    ("ab", [b"ab"]),
    ("h\u00e9 \u20ac", [b"h\xc3\xa9 \xe2\x82\xac"]),
    ([97, 98], [b"ab"]),
    ([0, 255], [b"\x00\xff"]),
    (["ab"], [b"ab"]),
    (["ab", "c", "ab"], [b"ab", b"c", b"ab"]),
    ([[97, 98]], [b"ab"]),
    ([[97], [255, 0, 3]], [b"a", b"\xff\x00\x03"]),
    (["ab", [99]], [b"ab", b"c"]),
], ids=["text", "utf-8", "ids", "ends", "a-text", "texts", "an-id-list", "id-lists", "mixed"])  # fmt: skip
def test_the_reply_to_every_form_of_prompt(lm, prompt, ids):
    began = int(time.time())
    reply = lm.complete(prompt, max_tokens=5, model=NAME)
    told, made = sum(map(len, ids)), 5 * len(ids)
    tokens = [greedy(LM, one, 5) for one in ids]
    assert isinstance(reply["id"], str) and reply["id"].startswith("cmpl-")
    assert type(reply["created"]) is int and began <= reply["created"] <= time.time()
    assert reply == {
        "id": reply["id"],
        "object": "text_completion",
        "created": reply["created"],
        "model": NAME,
        "weight_version": "lm",
        "choices": [
            {
                "index": index,
                "text": text_of(made),
                "token_ids": made,
                "finish_reason": "length",
                "logprobs": None,
            }
            for index, made in enumerate(tokens)
        ],
        "usage": {"prompt_tokens": told, "completion_tokens": made, "total_tokens": told + made},
    }


def test_every_reply_has_an_id_of_its_own(lm):
    assert len({lm.complete(max_tokens=1)["id"] for _ in range(5)}) == 5


@pytest.mark.parametrize("logprobs", [0, 1, 5])
def test_the_logprobs_that_were_asked_for(lm, logprobs):
    (choice,) = lm.complete(max_tokens=6, logprobs=logprobs)["choices"]
    said = choice["logprobs"]
    assert said.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert said["tokens"] == [text_of([token]) for token in choice["token_ids"]]
    assert [type(value) for value in said["token_logprobs"]] == [float] * 6
    assert said["top_logprobs"] is None
    assert len(said["text_offset"]) == 6


def test_the_text_is_the_bytes_with_replacement_characters(lm):
    choices = lm.complete(temperature=1, seed=0, n=4, max_tokens=100)["choices"]
    assert [choice["text"] for choice in choices] == [text_of(choice["token_ids"]) for choice in choices]
    assert all("\ufffd" in choice["text"] for choice in choices)  # random bytes: some are no UTF-8


def test_n_completions_of_each_prompt_lie_together(lm):
    prompts = ["ab", "Once upon ", "?"]
    reply = lm.complete(prompts, n=3, max_tokens=4)
    assert [choice["index"] for choice in reply["choices"]] == list(range(9))
    assert tokens_of(reply) == [greedy(LM, prompt.encode(), 4) for prompt in prompts for _ in range(3)]
    assert reply["usage"] == {"prompt_tokens": 13, "completion_tokens": 36, "total_tokens": 49}


def test_n_samples_of_a_prompt_are_different_samples(lm):
    rows = tokens_of(lm.complete(temperature=1, seed=3, n=8, max_tokens=8))
    assert len(set(map(tuple, rows))) == 8


@pytest.mark.parametrize("asked,count", [({}, 16), ({"max_tokens": None}, 16), ({"max_tokens": 1}, 1)])
def test_max_tokens_are_made_and_16_by_default(lm, asked, count):
    reply = lm.complete(**asked)
    assert [len(row) for row in tokens_of(reply)] == [count]
    assert reply["usage"]["completion_tokens"] == count


def test_a_completion_may_fill_the_context_and_no_more(lm):
    (tokens,) = tokens_of(lm.complete("x" * 100, max_tokens=CONTEXT - 100))
    assert tokens == greedy(LM, b"x" * 100, CONTEXT - 100)
    reply = lm.ask(["a", "x" * 100], max_tokens=CONTEXT - 99)
    assert error(reply, 400) in ("body.prompt", "body.max_tokens")


def test_without_a_temperature_it_is_1(lm):
    asked = {"prompt": "ab", "seed": 4, "max_tokens": 20}
    given, default = (ok(lm.post("v1/completions", asked | more)) for more in ({"temperature": 1.0}, {}))
    assert tokens_of(given) == tokens_of(default) != tokens_of(lm.complete(max_tokens=20))


# ---- agreement with a ByteLM of this process -------------------------------------------------------------


@pytest.mark.parametrize("buffer", [None, 1 << 30, 1 << 16], ids=["unpacked", "packed", "packed-in-chunks"])
def test_greedy_tokens_are_the_chain_of_the_weights_that_were_sent(lm, buffer):
    chunks = lm.sync(OTHER_LM, "other", buffer)
    assert chunks > 3 if buffer == 1 << 16 else chunks == 1
    reply = lm.complete("The sky is ", max_tokens=40)
    expected = greedy(OTHER_LM, b"The sky is ", 40)
    assert len(set(expected)) > 5  # a chain, not one token again and again
    assert tokens_of(reply) == [expected]
    assert reply["weight_version"] == "other"


@pytest.mark.parametrize("temperature", [0, 0.3, 1.0, 2.5])
def test_token_logprobs_are_of_the_unscaled_distribution(lm, temperature):
    prompts = [b"The sky is ", b"?", b"Once upon "]
    asked = {"temperature": temperature, "seed": 5, "n": 2, "max_tokens": 30, "logprobs": 0}
    reply = lm.complete([list(prompt) for prompt in prompts], **asked)
    rows = [prompt for prompt in prompts for _ in range(2)]
    for prompt, tokens, said in zip(rows, tokens_of(reply), token_logprobs_of(reply), strict=True):
        check_logprobs(said, LM, prompt, tokens)


def test_prompts_of_different_lengths_do_not_disturb_each_other(lm):
    prompts = ["a", "QWERTY", "x" * 60, "Dear Sir, "]
    together = lm.complete(prompts, max_tokens=40, logprobs=0)
    alone = [lm.complete(prompt, max_tokens=40, logprobs=0) for prompt in prompts]
    assert tokens_of(together) == [tokens for reply in alone for tokens in tokens_of(reply)]
    apart = torch.tensor([logprobs for reply in alone for logprobs in token_logprobs_of(reply)])
    torch.testing.assert_close(torch.tensor(token_logprobs_of(together)), apart, atol=1e-4, rtol=0)


def test_both_of_two_tied_names_arrive(lm):
    weights = lm.placed(OTHER_LM)
    embed, head = weights["embed.weight"], weights["head.weight"]
    assert embed.data_ptr() == head.data_ptr()
    trainer.send_weights(lm.client, weights, device=lm.device)
    checksums = {key.split(":")[-1]: value for key, value in lm.client.checksums().items()}
    assert checksums["embed.weight"] == checksums["head.weight"] == ipc_codec.checksum(head)
    assert tokens_of(lm.complete(max_tokens=20)) == [greedy(OTHER_LM, b"ab", 20)]


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_name_that_is_tied_in_the_model_is_used_as_it_was_sent(lm, name):
    untied = copy.deepcopy(LM)
    untied.head.weight = torch.nn.Parameter(untied.head.weight.clone(), requires_grad=False)
    untied.get_parameter(name).copy_(OTHER_LM.get_parameter(name))
    lm.sync(untied, "untied")
    expected = greedy(untied, b"ab", 20)
    assert expected != greedy(LM, b"ab", 20)
    assert tokens_of(lm.complete(max_tokens=20)) == [expected]


def test_the_trainers_own_samples_have_the_models_logprobs(lm):
    rollouts = trainer.sample(lm.client, seed=6)
    assert rollouts.weight_version == "lm"
    difference = trainer.logprobs_of(LM, rollouts, torch.device("cpu")) - rollouts.logprobs
    assert difference.abs().max() < 1e-4
    assert len(set(map(tuple, rollouts.tokens.tolist()))) == len(rollouts.prompts)


# ---- sampling --------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_tokens_and_another_seed_others(lm):
    asked = {"temperature": 1, "n": 3, "max_tokens": 20, "logprobs": 0}
    first, again, other = (lm.complete(seed=seed, **asked)["choices"] for seed in (7, 7, 8))
    assert first == again
    assert all(a["token_ids"] != b["token_ids"] for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("seed", [0, -1, -(1 << 63), (1 << 63) - 1])
def test_any_64_bit_seed_will_do(lm, seed):
    first, again = (lm.complete(temperature=1, seed=seed)["choices"] for _ in range(2))
    assert first == again


def test_without_a_seed_no_two_samples_are_alike(lm):
    rows = [tokens_of(lm.complete(temperature=1, max_tokens=20))[0] for _ in range(4)]
    assert len(set(map(tuple, rows))) == 4


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_scaled_distribution_says(plain, temperature):
    logits = torch.full((256,), -200.0)
    logits[torch.tensor([97, 98, 99])] = torch.tensor([0.6, 0.3, 0.1]).log()
    plain.sync(constant(logits), "three bytes")
    reply = plain.complete(temperature=temperature, seed=9, n=400, max_tokens=10, logprobs=0)
    tokens, said = torch.tensor(tokens_of(reply)), torch.tensor(token_logprobs_of(reply))
    expected = (logits / temperature).softmax(-1)
    often = tokens.flatten().bincount(minlength=256) / tokens.numel()
    torch.testing.assert_close(often, expected, atol=0.04, rtol=0)  # five sigma of 4,000 tokens
    torch.testing.assert_close(said, logits.log_softmax(-1)[tokens], atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-40, 5e-324])
def test_a_temperature_near_0_is_greedy(lm, temperature):
    reply = lm.ask(temperature=temperature, seed=1)
    if reply.status_code == 400 and temperature < 1e-6:  # what divides no float32 may be refused
        assert error(reply, 400) == "body.temperature"
    else:
        assert tokens_of(ok(reply)) == [greedy(LM, b"ab", 16)]


# ---- errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field,value", [
    ("prompt", None), ("prompt", ""), ("prompt", 5), ("prompt", True), ("prompt", 0.5), ("prompt", {"a": 1}),
    ("prompt", []), ("prompt", [[]]), ("prompt", ["ab", ""]), ("prompt", [[97], []]), ("prompt", [None]),
    ("prompt", [256]), ("prompt", [-1]), ("prompt", [1 << 62]), ("prompt", [97.0]), ("prompt", [True]),
    ("prompt", [97, "b"]), ("prompt", [[97], [256]]), ("prompt", [[[97]]]), ("prompt", [[97, None]]),
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "4"), ("max_tokens", True),
    ("max_tokens", [4]), ("max_tokens", (1 << 63) - 1),
    ("temperature", -1), ("temperature", -1e-9), ("temperature", "0"), ("temperature", True),
    ("temperature", [1]), ("temperature", float("nan")), ("temperature", float("inf")),
    ("n", 0), ("n", -1), ("n", 1.5), ("n", "1"), ("n", True), ("n", {}),
    ("seed", "7"), ("seed", 1.5), ("seed", True), ("seed", [7]),
    ("logprobs", -1), ("logprobs", "0"), ("logprobs", 0.5), ("logprobs", True),
    ("stream", True), ("stop", "\n"), ("stop", ["a", "b"]),
    ("echo", True), ("suffix", "x"), ("top_p", 0.5), ("best_of", 2),
    ("model", "gpt-4"), ("model", ""), ("model", 5), ("model", [NAME]),
], ids=lambda value: json.dumps(value)[:24] if not isinstance(value, str) else value[:12])  # fmt: skip
def test_a_field_of_a_wrong_type_or_range_is_400_and_named(lm, field, value):
    body = {"prompt": "ab", "max_tokens": 2, "temperature": 0, "model": NAME, field: value}
    reply = lm.send(
        "POST", "v1/completions", data=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert (error(reply, 400), reply.json()["error"]["type"]) in [
        (f"body.{field}", "Bad Request"),
        *([("body.prompt", "Bad Request")] if value == (1 << 63) - 1 else []),  # too long for the context
    ]


def test_a_prompt_that_is_missing_is_400_and_named(lm):
    assert error(lm.post("v1/completions", {"max_tokens": 2}), 400) == "body.prompt"


@pytest.mark.parametrize("prompt", ["x" * CONTEXT, [97] * 5000, ["ab", "x" * 5000]])
def test_a_prompt_that_is_too_long_is_400_and_named(lm, prompt):
    assert error(lm.ask(prompt, max_tokens=1), 400) == "body.prompt"


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b'"ab"', b"5", b"{", b'{"prompt": }'])
@pytest.mark.parametrize("content_type", ["application/json", None])
def test_a_body_that_is_no_object_is_400(lm, data, content_type):
    headers = {"content-type": content_type} if content_type else {}
    assert error(lm.send("POST", "v1/completions", data=data, headers=headers), 400).startswith("body")


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_json_without_its_content_type_is_400(lm, content_type):
    headers = {"content-type": content_type} if content_type else {}
    reply = lm.send("POST", "v1/completions", data=b'{"prompt": "ab"}', headers=headers)
    assert error(reply, 400) == "body"


@pytest.mark.parametrize("data", [
    b'{"prompt": "ab", "seed": 18446744073709551616}',
    b'{"prompt": "\\ud800"}',
], ids=["65-bits", "surrogate"])  # fmt: skip
def test_what_vllm_cannot_read_is_a_bad_request_error(lm, data):
    headers = {"content-type": "application/json"}
    reply = lm.send("POST", "v1/completions", data=data, headers=headers)
    assert (error(reply, 400), reply.json()["error"]["type"]) == (None, "BadRequestError")


def test_fields_that_nobody_knows_are_ignored(lm):
    more = {"user": "u", "metadata": {"a": [1]}, "no_such_field": None, "min_p": {}}
    assert lm.complete(**more)["choices"] == lm.complete()["choices"]


def test_fields_that_say_nothing_are_as_good_as_none(lm):
    said = {"stream": False, "stop": None, "top_p": 1.0, "echo": False, "suffix": None, "best_of": None}
    nulls = dict.fromkeys(["max_tokens", "seed", "n", "logprobs", "stream", "top_p", "echo"])
    expected = lm.complete()["choices"]
    assert lm.complete(**said)["choices"] == lm.complete(**nulls)["choices"] == expected


@pytest.mark.parametrize("bad", [{"prompt": ""}, {"n": 0}, {"model": "gpt-4"}])
def test_a_refused_request_leaves_the_server_serving(lm, bad):
    error(lm.ask(**bad), 400)
    assert tokens_of(lm.complete()) == [greedy(LM, b"ab", 16)]


# ---- which weights are served ----------------------------------------------------------------------------


def test_before_the_first_sync_completions_are_503_and_the_model_is_listed(plain_server):
    unavailable(plain_server.boot["v1/completions"])
    assert ok(plain_server.boot["weight_info"]) == {"weight_version": "default"}
    listed = ok(plain_server.boot["v1/models"])
    (model,) = listed["data"]
    assert listed == {"object": "list", "data": [model]}
    assert (model["id"], model["object"], type(model["created"])) == (NAME, "model", int)
    assert isinstance(model["owned_by"], str)


@pytest.mark.parametrize("device", DEVICES)
def test_missing_names_are_503_and_so_are_names_too_many(device):
    first, rest = halves(LM)
    with Server(device) as server:
        server.sync(first, "half")
        unavailable(server.ask())
        server.sync(rest, "whole")
        reply = server.complete()
        assert tokens_of(reply) == [greedy(LM, b"ab", 16)]
        assert reply["weight_version"] == "whole"
        server.sync({"blocks.2.norm1.bias": torch.zeros(64)}, "one more")
        unavailable(server.ask())
        server.sync(LM, "whole, and one more")
        unavailable(server.ask())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("odd", [
    {"norm.bias": torch.zeros(65)},
    pytest.param({"embed.weight": torch.zeros(64, 256)}, marks=pytest.mark.long),
    pytest.param({"norm.weight": torch.zeros(64, dtype=torch.int32)}, marks=pytest.mark.long),
], ids=["longer", "transposed", "integers"])  # fmt: skip
def test_a_name_whose_tensor_does_not_fit_is_503(device, odd):
    with Server(device) as server:
        server.sync(LM.state_dict() | odd, "odd")
        unavailable(server.ask())
        assert server.get("health").status_code == 200


def test_a_start_alone_leaves_the_old_weights_serving(lm):
    lm.client.start_weight_update()
    reply = lm.complete()
    assert (tokens_of(reply), reply["weight_version"]) == ([greedy(LM, b"ab", 16)], "lm")
    lm.chunk({})
    assert tokens_of(lm.complete()) == [greedy(LM, b"ab", 16)]


def test_from_the_first_chunk_until_the_finish_it_is_503(lm):
    lm.client.start_weight_update()
    for part in halves(OTHER_LM):
        lm.chunk(part)
        unavailable(lm.ask())
        assert ok(lm.get("weight_info")) == {"weight_version": "lm"}
    lm.client.finish_weight_update("other")
    reply = lm.complete()
    assert (tokens_of(reply), reply["weight_version"]) == ([greedy(OTHER_LM, b"ab", 16)], "other")


def test_a_refusal_before_the_first_chunk_leaves_the_old_weights_serving(lm):
    lm.client.start_weight_update()
    lm.bad_chunk(OTHER_LM)
    reply = lm.complete()
    assert (tokens_of(reply), reply["weight_version"]) == ([greedy(LM, b"ab", 16)], "lm")


def fail_after_a_chunk(server):
    """A sync of OTHER_LM whose second chunk is refused. Returns what arrived, and what did not."""
    arrived, missed = halves(OTHER_LM)
    server.client.start_weight_update()
    server.chunk(arrived)
    server.bad_chunk(missed)
    return arrived, missed


@pytest.mark.parametrize("buffer", [None, 1 << 16], ids=["unpacked", "packed-in-chunks"])
def test_a_failed_second_chunk_is_503_until_a_full_sync(lm, buffer):
    fail_after_a_chunk(lm)
    unavailable(lm.ask())
    lm.sync(OTHER_LM, "other", buffer)
    reply = lm.complete()
    assert (tokens_of(reply), reply["weight_version"]) == ([greedy(OTHER_LM, b"ab", 16)], "other")


def test_a_sync_that_leaves_out_what_a_failed_one_wrote_repairs_nothing(lm):
    _arrived, missed = fail_after_a_chunk(lm)
    lm.client.start_weight_update()
    unavailable(lm.ask())
    lm.client.finish_weight_update("nothing")
    unavailable(lm.ask())
    lm.sync(halves(LM)[1], "the rest")
    unavailable(lm.ask())
    lm.client.start_weight_update()
    lm.bad_chunk(missed)
    unavailable(lm.ask())
    lm.sync(LM, "lm again")
    assert tokens_of(lm.complete()) == [greedy(LM, b"ab", 16)]


@pytest.mark.parametrize("temperature", [0, 1])
def test_weights_that_give_no_numbers_are_answered_in_json(lm, temperature):
    lm.sync(LM.state_dict() | {"norm.bias": torch.full((64,), float("nan"))}, "nan")
    reply = lm.ask(temperature=temperature, logprobs=0)
    if reply.status_code == 200:
        ok(reply)  # json has no NaN
    else:
        assert reply.status_code in (500, 503)
        error(reply, reply.status_code)


def test_the_version_is_the_one_of_the_weights_that_made_the_tokens(counting):
    """A whole sync comes in while the last token is drawn."""
    counting.sync(always(1), "1")
    (counting.folder / "hold").touch()
    with threads(1) as pool:
        reply = pool.submit(counting.ask, temperature=1, max_tokens=1)
        until((counting.folder / "held").exists, "the completion is at its token")
        counting.sync(always(2), "2")
        (counting.folder / "hold").unlink()
        reply = reply.result()
    if reply.status_code == 200:
        assert (tokens_of(ok(reply)), ok(reply)["weight_version"]) in [([[1]], "1"), ([[2]], "2")]
    else:
        unavailable(reply)


# ---- pause -----------------------------------------------------------------------------------------------


def start_long_ones(server, pool, sizes=SIZES):
    """Long completions, of these numbers of rows, all at a token when this returns. Their replies to be."""
    replies = [pool.submit(server.ask, n=size, logprobs=0, **LONG) for size in sizes]
    until(lambda: set(sizes) <= set(forwards(server)), "each completion has made a forward pass")
    assert not any(reply.done() for reply in replies), "a completion is too short for this test"
    return replies


def check_rows(model, reply, least, most):
    """Whatever the number of tokens so far, they and their log-probabilities are the model's."""
    made = 0
    for choice in reply["choices"]:
        tokens, said = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        made += len(tokens)
        assert least <= len(tokens) <= most
        assert choice["text"] == text_of(tokens)
        check_logprobs(said, model, b"ab", tokens)
    assert reply["usage"]["completion_tokens"] == made


def finish_reasons(reply):
    return {choice["finish_reason"] for choice in reply["choices"]}


@pytest.mark.parametrize("query", ["", "?mode=abort"], ids=["default", "abort"])
def test_abort_answers_the_running_ones_with_the_tokens_so_far(counting, query):
    with threads(3) as pool:
        replies = start_long_ones(counting, pool)
        ok(counting.post("pause" + query))
        made = len(forwards(counting))
        replies = [ok(reply.result()) for reply in replies]
        assert len(forwards(counting)) == made < 300, "something ran after the pause was answered"
    for reply, size in zip(replies, SIZES, strict=True):
        assert finish_reasons(reply) == {"abort"}
        assert len(reply["choices"]) == size
        check_rows(LM, reply, 1, 99)
        assert reply["weight_version"] == "lm"
    unavailable(counting.ask())
    ok(counting.post("resume"))
    assert finish_reasons(counting.complete()) == {"length"}


def test_wait_lets_the_running_ones_end_and_is_answered_after_them(counting):
    with threads(4) as pool:
        replies = start_long_ones(counting, pool)
        pause = pool.submit(lambda: (counting.post("pause?mode=wait"), len(forwards(counting))))
        until(lambda: ok(counting.get("is_paused"))["is_paused"], "paused")
        unavailable(counting.ask())
        assert not pause.done() and not any(reply.done() for reply in replies)
        answer, made = pause.result()
        assert ok(answer) == {"status": "paused"}
        assert made == 300
        replies = [ok(reply.result()) for reply in replies]
    for reply in replies:
        assert finish_reasons(reply) == {"length"}
        check_rows(LM, reply, 100, 100)
    unavailable(counting.ask())
    ok(counting.post("resume"))
    assert finish_reasons(counting.complete()) == {"length"}


def test_keep_stops_the_running_ones_and_queues_new_ones(counting):
    with threads(3) as pool:
        (running,) = start_long_ones(counting, pool, sizes=[6])
        assert ok(counting.post("pause?mode=keep")) == {"status": "paused"}
        queued = [pool.submit(counting.ask, temperature=0) for _ in range(2)]
        with pytest.raises(TimeoutError):
            queued[0].result(timeout=0.2)
        made = len(forwards(counting))
        with pytest.raises(TimeoutError):
            running.result(timeout=0.2)
        assert len(forwards(counting)) == made < 100
        ok(counting.post("resume"))
        for reply in queued:
            assert tokens_of(ok(reply.result())) == [greedy(LM, b"ab", 16)]
        assert finish_reasons(ok(running.result())) == {"length"}
        check_rows(LM, ok(running.result()), 100, 100)


@pytest.mark.parametrize("buffer", [None, 1 << 16], ids=["unpacked", "packed-in-chunks"])
def test_what_keep_queued_is_answered_by_the_weights_that_came_in_between(counting, buffer):
    ok(counting.post("pause?mode=keep"))
    with threads(1) as pool:
        queued = pool.submit(counting.ask, max_tokens=20)
        with pytest.raises(TimeoutError):
            queued.result(timeout=0.2)
        counting.sync(OTHER_LM, "other", buffer)
        assert not queued.done()
        ok(counting.post("resume"))
        reply = ok(queued.result())
    assert (tokens_of(reply), reply["weight_version"]) == ([greedy(OTHER_LM, b"ab", 20)], "other")


def test_what_keep_stopped_goes_on_after_a_sync(counting):
    counting.sync(always(1), "1")
    with threads(1) as pool:
        (running,) = start_long_ones(counting, pool, sizes=[6])
        ok(counting.post("pause?mode=keep"))
        counting.sync(always(2), "2")
        ok(counting.post("resume"))
        reply = ok(running.result())
    assert finish_reasons(reply) == {"length"}
    for tokens in tokens_of(reply):
        old = tokens.count(1)
        assert 1 <= old < 100 and tokens == [1] * old + [2] * (100 - old)


@pytest.mark.parametrize("failed", [False, True], ids=["open", "failed"])
def test_what_keep_stopped_does_not_go_on_with_a_mix(counting, failed):
    counting.sync(always(1), "1")
    with threads(2) as pool:
        (running,) = start_long_ones(counting, pool, sizes=[6])
        ok(counting.post("pause?mode=keep"))
        queued = pool.submit(counting.ask)
        first, rest = halves(always(2))
        counting.client.start_weight_update()
        counting.chunk(first)
        if failed:
            counting.bad_chunk(rest)
        ok(counting.post("resume"))
        unavailable(queued.result())
        unavailable(running.result())


def test_abort_after_keep_answers_what_was_stopped_with_the_tokens_so_far(counting):
    with threads(2) as pool:
        (running,) = start_long_ones(counting, pool, sizes=[6])
        ok(counting.post("pause?mode=keep"))
        queued = pool.submit(counting.ask)
        with pytest.raises(TimeoutError):
            queued.result(timeout=0.2)
        ok(counting.post("pause?mode=abort"))
        unavailable(queued.result())
        reply = ok(running.result())
    assert finish_reasons(reply) == {"abort"}
    check_rows(LM, reply, 1, 99)


def test_wait_after_keep_lets_what_was_stopped_end(counting):
    with threads(2) as pool:
        (running,) = start_long_ones(counting, pool, sizes=[6])
        ok(counting.post("pause?mode=keep"))
        with pytest.raises(TimeoutError):
            running.result(timeout=0.2)
        assert len(forwards(counting)) < 100
        ok(counting.post("pause?mode=wait"))
        assert len(forwards(counting)) == 100
        reply = ok(running.result())
    assert finish_reasons(reply) == {"length"}
    check_rows(LM, reply, 100, 100)


def test_abort_after_wait_ends_what_was_let_run(counting):
    with threads(4) as pool:
        replies = start_long_ones(counting, pool)
        waiting = pool.submit(counting.post, "pause?mode=wait")
        until(lambda: ok(counting.get("is_paused"))["is_paused"], "paused")
        ok(counting.post("pause?mode=abort"))
        ok(waiting.result())
        replies = [ok(reply.result()) for reply in replies]
    assert [finish_reasons(reply) for reply in replies] == [{"abort"}] * 3
    for reply in replies:
        check_rows(LM, reply, 1, 99)


@pytest.mark.parametrize("modes", [
    ["abort", "abort"], ["wait", "wait"], ["keep", "keep"],
    ["keep", "abort"], ["keep", "wait"], ["abort", "keep"], ["wait", "keep"],
], ids="-".join)  # fmt: skip
def test_pauses_may_be_repeated_and_one_resume_ends_them(lm, modes):
    for mode in modes:
        assert ok(lm.post(f"pause?mode={mode}")) == {"status": "paused"}
        assert ok(lm.get("is_paused")) == {"is_paused": True}
    if modes[-1] == "keep":
        with threads(1) as pool:
            queued = pool.submit(lm.ask)
            with pytest.raises(TimeoutError):
                queued.result(timeout=0.1)
            ok(lm.post("resume"))
            ok(queued.result())
    else:
        unavailable(lm.ask())
    for _ in range(2):
        assert ok(lm.post("resume")) == {"status": "resumed"}
        assert ok(lm.get("is_paused")) == {"is_paused": False}
    lm.complete()


def test_a_pause_over_a_sync_stays_a_pause(lm):
    for mode in ("abort", "wait"):
        ok(lm.post(f"pause?mode={mode}"))
        lm.sync(OTHER_LM, mode)
        unavailable(lm.ask())
        ok(lm.post("resume"))
        reply = lm.complete()
        assert (tokens_of(reply), reply["weight_version"]) == ([greedy(OTHER_LM, b"ab", 16)], mode)


def test_the_quick_routes_answer_while_completions_run(counting):
    said = {"get_world_size": {"world_size": 1}, "version": ok(counting.get("version"))}
    said["v1/models"] = ok(counting.get("v1/models"))
    with threads(3) as pool:
        replies = start_long_ones(counting, pool)
        assert all(ok(counting.get(path)) == expected for path, expected in said.items())
        health = counting.get("health")
        assert (health.status_code, health.content) == (200, b"")
        assert ok(counting.get("is_paused")) == {"is_paused": False}
        assert ok(counting.get("weight_info")) == {"weight_version": "lm"}
        assert not any(reply.done() for reply in replies), "the completions had ended before"
        assert all(finish_reasons(ok(reply.result())) == {"length"} for reply in replies)


# ---- load ------------------------------------------------------------------------------------------------


class Load:
    """Threads that sample without a stop, and what they were answered."""

    def __init__(self, server, count=3):
        self.server = server
        self.count = count
        self.replies = []  # list.append is atomic
        self.versions = set()  # of the completions that came back
        self.ended = threading.Event()

    def __enter__(self):
        self.threads = [threading.Thread(target=self.sample, args=[at]) for at in range(self.count)]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        for thread in self.threads:
            thread.join()

    def sample(self, at):
        while not self.ended.is_set():
            reply = self.server.ask(temperature=at % 2, n=2 + at, max_tokens=15 + 5 * at)
            self.replies.append(reply)
            if reply.ok:
                self.versions.add(reply.json()["weight_version"])

    def served(self, version):
        """Returns once a completion of that version has come back."""
        until(lambda: str(version) in self.versions, f"a completion of version {version}")

    def check(self):
        """Each reply is 503, or wholly of the one version that it names. Returns those that are 200."""
        good = []
        for reply in self.replies:
            if reply.status_code == 503:
                unavailable(reply)
                continue
            good.append(ok(reply))
            seen = {token for tokens in tokens_of(good[-1]) for token in tokens}
            assert seen <= {int(good[-1]["weight_version"])}, (good[-1]["weight_version"], seen)
        return good


def cycle(server, load, versions, mode):
    """pause, sync, resume; the next only after the threads have got a completion of these weights."""
    for version in versions:
        ok(server.post(f"pause?mode={mode}"))
        chunks = server.sync(always(version), str(version), buffer=None if version % 2 else 1 << 18)
        assert version % 2 or chunks > 1
        ok(server.post("resume"))
        load.served(version)


@pytest.mark.parametrize("aborts,waits", [(10, 4), pytest.param(50, 20, marks=pytest.mark.long)])
def test_under_load_every_completion_is_of_one_version(plain, aborts, waits):
    plain.sync(always(0), "0")
    with Load(plain) as load:
        cycle(plain, load, range(1, aborts + 1), "abort")
        cycle(plain, load, range(aborts + 1, aborts + waits + 1), "wait")
    good = load.check()
    reasons: dict[int, set[str]] = {}
    for reply in good:
        reasons.setdefault(int(reply["weight_version"]), set()).update(finish_reasons(reply))
    assert reasons.keys() >= set(range(1, aborts + waits + 1))
    assert set.union(*(said for version, said in reasons.items() if version < aborts)) == {"abort", "length"}
    assert set.union(*(said for version, said in reasons.items() if version >= aborts)) == {"length"}


@pytest.mark.long
def test_a_sync_without_a_pause_mixes_no_completion(plain):
    plain.sync(always(0), "0")
    with Load(plain) as load:
        for version in range(1, 31):
            assert plain.sync(always(version), str(version), buffer=None if version % 2 else 1 << 17) >= 1
            if version % 3 == 0:
                load.served(version)
    good = load.check()
    assert {int(reply["weight_version"]) for reply in good} >= set(range(3, 31, 3))
    assert {reason for reply in good for reason in finish_reasons(reply)} == {"length"}


# ---- a server with --model -------------------------------------------------------------------------------


def test_a_model_of_the_folder_one_stands_in_is_served_from_boot(counting_server):
    reply = ok(counting_server.boot)
    assert reply["model"] == "counting:Counting"
    assert reply["weight_version"] == "default"
    assert [len(row) for row in tokens_of(reply)] == [16]
    assert finish_reasons(reply) == {"length"}


def test_a_models_name_is_module_and_callable(counting):
    (model,) = ok(counting.get("v1/models"))["data"]
    assert model["id"] == "counting:Counting"
    assert counting.complete(model="counting:Counting")["model"] == "counting:Counting"
    assert error(counting.ask(model=NAME), 400) == "body.model"


@pytest.mark.parametrize("odd", [
    {"no_such.weight": torch.zeros(3)},
    {"module.norm.bias": torch.zeros(64)},
    {"norm.bias": torch.zeros(65)},
    {"embed.weight": torch.zeros(64, 256)},
], ids=["unknown", "wrapped", "longer", "transposed"])  # fmt: skip
@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
def test_a_model_refuses_what_it_has_not_and_serves_on(counting, odd, packed):
    with pytest.raises(trainer.SyncError) as refusal:
        counting.sync(OTHER_LM.state_dict() | odd, "odd", buffer=1 << 30 if packed else None)
    assert refusal.value.status == 500
    reply = counting.complete()
    assert (tokens_of(reply), reply["weight_version"]) == ([greedy(LM, b"ab", 16)], "lm")


def test_a_model_takes_a_sync_of_its_own_names(counting):
    counting.sync(OTHER_LM, "other", buffer=1 << 16)
    reply = counting.complete()
    assert (tokens_of(reply), reply["weight_version"]) == ([greedy(OTHER_LM, b"ab", 16)], "other")


# ---- other clients ---------------------------------------------------------------------------------------


@pytest.fixture
def openai_client(lm, monkeypatch):
    openai = pytest.importorskip("openai")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with openai.OpenAI(base_url=f"{lm.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_openais_client_lists_the_model(openai_client):
    assert [model.id for model in openai_client.models.list()] == [NAME]


def test_openais_client_completes(openai_client):
    completion = openai_client.completions.create(
        model=NAME, prompt=["ab", "c"], max_tokens=8, temperature=0, n=2, logprobs=1, seed=1
    )
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    expected = [greedy(LM, prompt, 8) for prompt in (b"ab", b"ab", b"c", b"c")]
    assert [choice.token_ids for choice in completion.choices] == expected
    assert [choice.text for choice in completion.choices] == [text_of(tokens) for tokens in expected]
    assert {choice.finish_reason for choice in completion.choices} == {"length"}
    assert completion.weight_version == "lm"
    assert completion.usage.total_tokens == 3 + 32
    for choice, prompt, tokens in zip(completion.choices, (b"ab", b"ab", b"c", b"c"), expected, strict=True):
        check_logprobs(choice.logprobs.token_logprobs, LM, prompt, tokens)


def test_openais_client_raises_its_own_errors(openai_client, lm):
    import openai

    with pytest.raises(openai.BadRequestError) as refusal:
        openai_client.completions.create(model=NAME, prompt="ab", stream=True)
    assert refusal.value.param == "body.stream"
    with pytest.raises(openai.BadRequestError) as refusal:
        openai_client.completions.create(model="gpt-4", prompt="ab")
    assert refusal.value.param == "body.model"
    ok(lm.post("pause"))
    with pytest.raises(openai.InternalServerError) as unserved:
        openai_client.completions.create(model=NAME, prompt="ab")
    assert unserved.value.status_code == 503
