"""How long does a weight sync take, and where does the time go?

    python benchmarks/sync.py                          llama-3.1-8b, both modes, buffers of 1 GiB
    python benchmarks/sync.py --preset qwen3-30b-a3b --mode packed --buffer-bytes 268435456
    python benchmarks/sync.py --growth --json          also: how time grows with tensors and with bytes

This process is the trainer; the server is a child that runs this file too, and they talk real HTTP. The
weights have the names and shapes of the checkpoint, and random bits. PHASES says which functions are timed,
from outside: the self time of each, summed over a sync. What no phase covers is "other". `HTTP` is the
trainer's call without the server's part. Nothing synchronises a device that the program does not.
The total is of syncs without timers; the phases are of other syncs, and what timing cost them is printed.
They are of syncs after the first: what is kept between syncs is neither encoded nor decoded in them.
The floor is one copy of the same weights on the same device, measured before and after each block; packed,
every byte is copied twice. Minima and maxima are printed: where they are far apart the machine was busy.
On the CPU each side has one thread: with two, small copies took up to tens of times longer on a busy machine.
Peak extra memory is what torch allocated on the GPU in a sync; on the CPU it is the growth of the resident
set, in which the server's mapping of the trainer's memory counts as well.
"""

from __future__ import annotations

import argparse
import functools
import gc
import http.client
import json
import logging
import math
import os
import pkgutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import ipc_codec
import protocol
import server
import trainer

PHASES = {
    "trainer": {
        "gather/pack": [
            "ipc_codec.wire_form",
            "ipc_codec.PackedBuffer.lay_out",
            "ipc_codec.PackedBuffer.write",
            "ipc_codec.PackedBuffer.drain",
            "trainer.Part.make_plan",
        ],
        "export": ["ipc_codec.Exports.lend", "ipc_codec.Exports.renew"],
        "encode": ["trainer.update_body"],
        "HTTP": ["trainer.HTTPWeightSyncClient.call"],
        "collect": ["ipc_codec.ipc_collect"],
    },
    "server": {
        "parse": ["server.Request.json"],
        "decode": ["ipc_codec.decode_handles"],
        "rules": ["server.WeightTransferEngine._judge"],
        "check": ["server.Worker.check", "ipc_codec.check_memory"],
        "open": ["server.Worker.open"],
        "copy": ["server.Worker.copy", "server.Worker.synchronize"],
        "witness": ["ipc_codec.digests", "ipc_codec.describe_handles", "server.Witness.write"],
        # Unpacked, a mapping is closed when `_load` drops its tensors: what its own time is spent on.
        "release": ["ipc_codec.PackedBufferImporter.release", "server.WeightTransferEngine._load"],
        "other": ["server.App.answer"],
    },
}
TARGETS_MS = {  # one H200, arena, a buffer of 1 GiB
    ("llama-3.1-8b", "unpacked"): 22,
    ("llama-3.1-8b", "packed"): 35,
    ("qwen3-30b-a3b", "unpacked"): 1000,
    ("qwen3-30b-a3b", "packed"): 200,
}
MODES = ("unpacked", "packed")
DTYPE = torch.bfloat16
WARM_UPS = 2
GIB = 1 << 30
ALIGNMENT = 256  # bytes, of a tensor in the arena
SCRATCH_BYTES = 4 * GIB  # what the floor copies into: weights may fill half the device on either side
ROUND_TRIPS = 300
ROUND_TRIP_TARGET = 3  # times a bare http.client call
GROWTH_TENSORS = [(tensors, 4 * GIB) for tensors in (16, 256, 4096, 16384)]
GROWTH_BYTES = [(256, size * GIB) for size in (1, 4, 16)]

Shapes = dict[str, list[int]]


# --- What is sent -------------------------------------------------------------------------------------


def decoder(layers: int, hidden: int, vocabulary: int, layer: Shapes) -> Shapes:
    """Names and shapes of a checkpoint whose layers are alike."""
    norms = {"input_layernorm.weight": [hidden], "post_attention_layernorm.weight": [hidden]}
    each = (layer | norms).items()
    return {
        "model.embed_tokens.weight": [vocabulary, hidden],
        **{f"model.layers.{at}.{name}": shape for at in range(layers) for name, shape in each},
        "model.norm.weight": [hidden],
        "lm_head.weight": [vocabulary, hidden],
    }


def attention(hidden: int, q: int, kv: int) -> Shapes:
    shapes = {"q": [q, hidden], "k": [kv, hidden], "v": [kv, hidden], "o": [hidden, q]}
    return {f"self_attn.{name}_proj.weight": shape for name, shape in shapes.items()}


def mlp(prefix: str, hidden: int, inner: int) -> Shapes:
    shapes = {"gate": [inner, hidden], "up": [inner, hidden], "down": [hidden, inner]}
    return {f"{prefix}.{name}_proj.weight": shape for name, shape in shapes.items()}


def llama() -> Shapes:
    return decoder(32, 4096, 128256, attention(4096, 4096, 1024) | mlp("mlp", 4096, 14336))


def qwen() -> Shapes:
    layer = attention(2048, 4096, 512) | {f"self_attn.{name}_norm.weight": [128] for name in "qk"}
    layer["mlp.gate.weight"] = [128, 2048]
    for expert in range(128):
        layer |= mlp(f"mlp.experts.{expert}", 2048, 768)
    return decoder(48, 2048, 151936, layer)


class Preset(NamedTuple):
    shapes: Callable[[], Shapes]
    tensors: int
    nbytes: int  # bf16


PRESETS = {
    "llama-3.1-8b": Preset(llama, 291, 16_060_522_496),
    "qwen3-30b-a3b": Preset(qwen, 18_867, 61_064_245_248),
}


def shapes_of(preset: str, scale: float = 1) -> Shapes:
    """A preset's shapes, every leading dimension times `scale`."""
    make, tensors, nbytes = PRESETS[preset]
    shapes = make()
    assert (len(shapes), sum(map(size_of, shapes.values()))) == (tensors, nbytes), preset
    return {name: [max(1, int(first * scale)), *rest] for name, (first, *rest) in shapes.items()}


def size_of(shape: list[int]) -> int:
    return math.prod(shape) * DTYPE.itemsize


class Weights(NamedTuple):
    tensors: dict[str, torch.Tensor]
    memory: list[torch.Tensor]  # what they are views of, bf16 and flat

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.tensors.values())


def make_weights(shapes: Shapes, device: torch.device, arena: bool) -> Weights:
    """Tensors of random bits: views of one storage, or each with its own."""
    sizes = [size_of(shape) for shape in shapes.values()]
    rooms = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    generator = torch.Generator(ipc_codec.place(device)).manual_seed(0)

    def noise(nbytes: int) -> torch.Tensor:
        words = torch.empty(nbytes // 2, dtype=torch.int16, device=generator.device)
        return words.random_(generator=generator).view(DTYPE)

    memory = [noise(sum(rooms))] if arena else [noise(size) for size in sizes]
    pieces = memory[0].split([room // 2 for room in rooms]) if arena else memory
    named = zip(shapes.items(), pieces, sizes, strict=True)
    return Weights({name: piece[: size // 2].view(shape) for (name, shape), piece, size in named}, memory)


# --- One side of a sync: its phases and its memory ----------------------------------------------------


class Watch:
    """What one process does in a sync: the self time of its phases, and its peak memory.

    One thread of a process is in a sync at a time; timed calls of several threads would be mixed up.
    """

    def __init__(self, side: str, device: torch.device):
        self.device = device
        self.sums: dict[str, float] = dict.fromkeys(PHASES[side], 0.0)
        self.inner = 0.0  # seconds of the timed calls inside the running one
        places = [(phase, path.rpartition(".")) for phase, paths in PHASES[side].items() for path in paths]
        found = [(phase, pkgutil.resolve_name(owner), name) for phase, (owner, _, name) in places]
        self.plain = [(owner, name, getattr(owner, name)) for _phase, owner, name in found]
        self.timed = [(owner, name, self._timed(phase, getattr(owner, name))) for phase, owner, name in found]

    def _timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **more: Any) -> Any:
            outer, self.inner = self.inner, 0.0
            began = time.perf_counter()
            try:
                return function(*args, **more)
            finally:
                took = time.perf_counter() - began
                self.sums[phase] += took - self.inner
                self.inner = outer + took

        return timed

    def begin(self, timed: bool) -> None:
        for owner, name, function in self.timed if timed else self.plain:
            setattr(owner, name, function)
        self.sums = dict.fromkeys(self.sums, 0.0)
        if self.device.type == "cuda":
            torch.cuda.init()
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins again at what is resident now
        self.before = self._peak_bytes()

    def end(self) -> dict[str, Any]:
        return {"phases": self.sums, "extra_bytes": self._peak_bytes() - self.before}

    def _peak_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) << 10


def serve(device: str, transcript: str | None) -> None:
    """The child: `server.py`, watched. A line on stdin begins or ends a sync, a line on stdout answers."""
    watch = Watch("server", server.parse_devices(device)[0])

    def answer() -> None:
        for line in sys.stdin:
            if line != "end\n":
                watch.begin(timed=line == "begin timed\n")
            print(json.dumps(watch.end()), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)  # the trainer has ended

    logging.disable(logging.INFO)
    sys.argv = ["server.py", "--port", "0", "--device", device]
    sys.argv += ["--transcript", transcript] if transcript else []
    threading.Thread(target=answer, daemon=True).start()
    sys.exit(server.main())


class Pair:
    """The two processes: this one and its server."""

    def __init__(self, device: torch.device, transcript: str | None = None):
        self.device = device
        command = [sys.executable, __file__, "--serve", "--device", str(device)]
        command += ["--transcript", transcript] if transcript else []
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.child = subprocess.Popen(command, env=os.environ | {protocol.GATE: "1"}, **pipes)
        self.url = self._line().removeprefix("listening on ")
        self.client = trainer.HTTPWeightSyncClient(self.url)
        self.watch = Watch("trainer", device)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self.child.stdin
        self.child.stdin.close()
        try:
            self.child.wait(30)
        finally:
            self.child.kill()

    def _line(self) -> str:
        assert self.child.stdout
        if not (line := self.child.stdout.readline()):
            sys.exit("benchmarks/sync.py: the server ended")
        return line.strip()

    def ask(self, line: str) -> Any:
        print(line, file=self.child.stdin, flush=True)
        return json.loads(self._line())

    def sync(self, send: Callable[[], Any], timed: bool = False) -> dict[str, Any]:
        """One sync, in seconds and bytes; the phases by (side, phase)."""
        self.watch.begin(timed)
        self.ask("begin timed" if timed else "begin")
        began = time.perf_counter()
        send()
        total = time.perf_counter() - began
        ours, theirs = self.watch.end(), self.ask("end")
        ours["phases"]["HTTP"] -= sum(theirs["phases"].values())
        ours["phases"]["other"] = total - sum(ours["phases"].values()) - sum(theirs["phases"].values())
        both = {"trainer": ours, "server": theirs}
        phases = {(side, phase): s for side, seen in both.items() for phase, s in seen["phases"].items()}
        extra = {side: seen["extra_bytes"] for side, seen in both.items()}
        return {"total": total, "phases": phases, "extra": extra}

    def sender(self, weights: Weights, mode: str, buffer_bytes: int) -> Callable[[], Any]:
        """Sends all weights; a packed buffer lives for the run."""
        self.client.init_weight_transfer_engine({"packed": mode == "packed"})
        more: dict[str, Any] = {"device": self.device}
        if mode == "unpacked":
            exports = ipc_codec.Exports()
            return lambda: trainer.send_weights(self.client, weights.tensors, exports=exports, **more)
        buffer = ipc_codec.PackedBuffer(buffer_bytes, self.device)
        return lambda: trainer.send_weights_packed(self.client, weights.tensors, buffer=buffer, **more)


# --- What is measured ---------------------------------------------------------------------------------


def one_copy(weights: Weights, syncs: int) -> list[float]:
    """Seconds of one copy of all weights on their device, `syncs` times, into a scratch that is reused."""
    parts = [part for memory in weights.memory for part in memory.split(SCRATCH_BYTES // 2)]
    sizes = {str(at): part.numel() for at, part in enumerate(parts)}
    groups = [[parts[int(at)] for at in group] for group in protocol.plan_chunks(sizes, SCRATCH_BYTES // 2)]
    scratch = torch.empty(min(sum(sizes.values()), SCRATCH_BYTES // 2), dtype=DTYPE, device=parts[0].device)
    places = [scratch[: sum(map(len, group))].split(list(map(len, group))) for group in groups]

    def copy() -> float:
        began = time.perf_counter()
        for place, group in zip(places, groups, strict=True):
            torch._foreach_copy_(place, group) if len(group) > 1 else place[0].copy_(group[0])
        if scratch.is_cuda:
            torch.cuda.synchronize(scratch.device)
        return time.perf_counter() - began

    return [copy() for _ in range(WARM_UPS + syncs)][WARM_UPS:]


def measure(pair: Pair, weights: Weights, mode: str, buffer_bytes: int, syncs: int) -> dict[str, Any]:
    """Medians over `syncs` syncs without timers (total, memory), and over as many with (phases), in turns."""
    send = pair.sender(weights, mode, buffer_bytes)
    first, *_ = (pair.sync(send) for _ in range(WARM_UPS))
    turns = [(pair.sync(send), pair.sync(send, timed=True)) for _ in range(syncs)]
    plain, timed = zip(*turns, strict=True)
    total, with_timers = (median(sync["total"] for sync in each) for each in (plain, timed))
    seconds = {key: median(sync["phases"][key] for sync in timed) for key in timed[0]["phases"]}
    return {
        "mode": mode,
        "buffer_bytes": buffer_bytes if mode == "packed" else None,
        "tensors": len(weights.tensors),
        "bytes": weights.nbytes,
        "first_ms": 1e3 * first["total"],
        "total_ms": 1e3 * total,
        "total_range_ms": spread([sync["total"] for sync in plain]),
        "timed_total_ms": 1e3 * with_timers,
        "gb_per_s": weights.nbytes / total / 1e9,
        "phases": [
            {"side": side, "phase": phase, "ms": 1e3 * took, "share": took / with_timers}
            for (side, phase), took in seconds.items()
        ],
        "peak_extra_bytes": {side: max(sync["extra"][side] for sync in plain) for side in PHASES},
    }


def blocks(options: argparse.Namespace, preset: str) -> Iterator[dict[str, Any]]:
    """One preset on a fresh server: a block for each mode and buffer, then the round trip."""
    with Pair(options.device, options.transcript) as pair:
        weights = make_weights(shapes_of(preset, options.scale), options.device, options.arena)
        for mode in options.modes:
            for buffer_bytes in options.buffer_bytes if mode == "packed" else [0]:
                copies = one_copy(weights, options.syncs)
                tidy(options.device)  # its scratch
                block = measure(pair, weights, mode, buffer_bytes, options.syncs)
                tidy(options.device)
                copies += one_copy(weights, options.syncs)
                floor = 1e3 * median(copies)
                about = {"kind": "sync", "preset": preset, "scale": options.scale, "arena": options.arena}
                floors = {"floor_ms": floor, "floor_range_ms": spread(copies)}
                yield about | block | floors | {"floors": block["total_ms"] / floor}
        del weights
        tidy(options.device)
        yield {"kind": "round trip", **round_trip(pair)}


def round_trip(pair: Pair) -> dict[str, Any]:
    """A control-plane call, `POST /resume`, by the trainer's client and by a bare http.client, in turns."""
    bare = http.client.HTTPConnection(pair.url.removeprefix("http://"))

    def bare_call() -> None:
        bare.request("POST", "/resume")
        bare.getresponse().read()

    def timed(call: Callable[[], None]) -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    pair.watch.begin(timed=False)
    pair.ask("begin")
    took = [(timed(pair.client.resume), timed(bare_call)) for _ in range(ROUND_TRIPS)]
    bare.close()
    client_ms, bare_ms = (1e3 * median(each) for each in zip(*took, strict=True))
    return {"client_ms": client_ms, "bare_ms": bare_ms, "ratio": client_ms / bare_ms}


def growth(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time over the number of tensors at fixed bytes, and over bytes at a fixed number of tensors."""
    with Pair(options.device, options.transcript) as pair:
        for series, points in (("tensors", GROWTH_TENSORS), ("bytes", GROWTH_BYTES)):
            for tensors, nbytes in points:
                elements = int(nbytes * options.scale) // tensors // 2
                shapes = {f"{series}.{tensors}.{nbytes}.{at}": [elements] for at in range(tensors)}
                weights = make_weights(shapes, options.device, options.arena)
                for mode in options.modes:
                    room = max(options.buffer_bytes[0], 2 * elements)
                    block = measure(pair, weights, mode, room, options.syncs)
                    yield {"kind": "growth", "series": series, **block}
                del weights
                tidy(options.device)


def spread(seconds: list[float]) -> list[float]:
    return [1e3 * min(seconds), 1e3 * max(seconds)]


def tidy(device: torch.device) -> None:
    ipc_codec.ipc_collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# --- What is printed ----------------------------------------------------------------------------------


def as_text(result: dict[str, Any]) -> str:
    size = f"{result.get('tensors', 0):,} tensors, {result.get('bytes', 0) / 1e9:.3f} GB"
    if result["kind"] == "round trip":
        ratio = f"{result['ratio']:.2f} times (target {ROUND_TRIP_TARGET})"
        client, bare = f"client {result['client_ms']:.3f} ms", f"http.client {result['bare_ms']:.3f} ms"
        return f"POST /resume: {client}, {bare}, {ratio}\n"
    if result["kind"] == "growth":
        rate = f"{_ranged(result, 'total')}, {result['gb_per_s']:.3g} GB/s{_doubt(result)}"
        return f"growth with {result['series']:<8} {result['mode']:<9} {size:<28} {rate}"
    buffer = f", buffer {result['buffer_bytes']:,} bytes" if result["buffer_bytes"] else ""
    layout = "arena" if result["arena"] else "no arena"
    extra = ", ".join(f"{side} {count / 1e9:.3f} GB" for side, count in result["peak_extra_bytes"].items())
    row = "  {side:<8} {phase:<12} {ms:10.2f} ms {share:6.1%}"
    return "\n".join(
        [
            f"{result['preset']}, {result['mode']}{buffer}, {layout}, scale {result['scale']:g}: {size}",
            *(row.format(**phase) for phase in result["phases"] if phase["ms"]),
            f"  total {_ranged(result, 'total')} (with timers {result['timed_total_ms']:.2f}), "
            f"{result['gb_per_s']:.1f} GB/s{_target(result)}",
            f"  {result['floors']:.2f} times one copy: {_ranged(result, 'floor')}{_doubt(result)}",
            f"  the first sync, before anything is known: {result['first_ms']:.2f} ms",
            f"  peak extra memory in a sync: {extra}\n",
        ]
    )


def _ranged(result: dict[str, Any], what: str) -> str:
    least, most = result[f"{what}_range_ms"]
    return f"{result[f'{what}_ms']:.2f} ms ({least:.2f} to {most:.2f})"


def _doubt(result: dict[str, Any]) -> str:
    """A sync contains a copy of all bytes, so none is faster; and a quiet machine repeats itself."""
    ranges = [result[key] for key in ("total_range_ms", "floor_range_ms") if key in result]
    apart = max(most / least for least, most in ranges)
    return "; NOT TO BE TRUSTED: was the machine busy?" if result.get("floors", 1) < 1 or apart > 2 else ""


def _target(result: dict[str, Any]) -> str:
    """Of the very case that the target is for: full scale, on a GPU, arena, 1 GiB."""
    target = TARGETS_MS[result["preset"], result["mode"]]
    asked = result["scale"] == 1 and result["arena"] and result["buffer_bytes"] in (None, GIB)
    return f"; target {target} ms" if asked and torch.cuda.is_available() else ""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", action="append", choices=PRESETS, help="may be repeated (default llama-3.1-8b)")
    add("--mode", choices=[*MODES, "both"], default="both", help="default both")
    add("--buffer-bytes", type=int, action="append", metavar="N", help="packed; may be repeated (1 GiB)")
    add("--scale", type=float, metavar="F", help="of leading dimensions and the default buffer (CPU 0.02)")
    add("--syncs", type=int, default=5, metavar="N", help="that a median is over (default %(default)s)")
    add("--arena", action=argparse.BooleanOptionalAction, default=True, help="weights in one storage")
    add("--growth", action="store_true", help="also how time grows with tensors and with bytes")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:1 (default %(default)s)")
    add("--json", action="store_true", help="a JSON object a line")
    add("--transcript", metavar="FILE", help="the server is a witness: to see what that costs")
    add("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    options = build_parser().parse_args()
    gc.freeze()  # as trainer.py and server.py do
    device = server.parse_devices(options.device)[0]
    if device.type == "cpu":
        torch.set_num_threads(1)
    if options.serve:
        serve(options.device, options.transcript)
    options.device = device
    options.scale = options.scale or (1 if options.device.type == "cuda" else 0.02)
    options.modes = MODES if options.mode == "both" else [options.mode]
    presets = options.preset or ["llama-3.1-8b"]
    largest = max(size_of(shape) for preset in presets for shape in shapes_of(preset, options.scale).values())
    options.buffer_bytes = options.buffer_bytes or [max(int(GIB * options.scale), largest)]
    for preset in presets:
        for result in blocks(options, preset):
            print(json.dumps(result) if options.json else as_text(result), flush=True)
    for result in growth(options) if options.growth else ():
        print(json.dumps(result) if options.json else as_text(result), flush=True)


if __name__ == "__main__":
    main()
