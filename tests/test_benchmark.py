"""benchmarks/sync.py: its presets are the checkpoints', and a tiny run shows every phase."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).parent.parent / "benchmarks" / "sync.py")
BENCHMARK = runpy.run_path(SCRIPT)


@pytest.mark.parametrize(
    ("preset", "tensors", "gigabytes"), [("llama-3.1-8b", 291, 16.06), ("qwen3-30b-a3b", 18_867, 61.06)]
)
def test_a_preset_has_the_tensors_and_bytes_of_its_checkpoint(preset, tensors, gigabytes):
    shapes = BENCHMARK["shapes_of"](preset)
    assert len(shapes) == tensors
    assert round(sum(map(BENCHMARK["size_of"], shapes.values())) / 1e9, 2) == gigabytes


@pytest.mark.long
def test_a_tiny_run_shows_every_phase():
    """A function that PHASES names and a sync no longer calls would leave its phase at 0."""
    command = [sys.executable, SCRIPT, "--device", "cpu", "--scale", "0.001", "--syncs", "1", "--json"]
    command += ["--transcript", os.devnull]  # so that there is something to witness
    ran = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=100)
    *blocks, round_trip = map(json.loads, ran.stdout.splitlines())
    assert [block["mode"] for block in blocks] == ["unpacked", "packed"]
    named = {(side, phase) for side, phases in BENCHMARK["PHASES"].items() for phase in phases}
    named -= {("trainer", "encode"), ("server", "decode")}  # what comes again word for word
    for block in blocks:
        assert {(row["side"], row["phase"]) for row in block["phases"] if row["ms"] > 0} == {
            *named,
            ("trainer", "other"),
        }
    assert round_trip["ratio"] > 0
