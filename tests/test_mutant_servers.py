"""The server cases of test_roundtrip.py find every fault of a server, and accuse no correct one.

Each runs them by URL, as an integrator does: a copy of the file with its two leaves, alone in a folder.
"""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from mutant_server import MUTANTS

import ipc_codec
from test_roundtrip import CASES, DTYPES, ROOT, Server, bits, noise_like

PROGRAM = Path(__file__).parent / "mutant_server.py"
MODEL = "trainer:ByteLM"


def run_cases(url, folder, cases="", **environment):
    """One run of the cases against that URL, which writes report.xml into the folder."""
    for name in ("test_roundtrip.py", "protocol.py", "ipc_codec.py"):
        shutil.copy(ROOT / name, folder)
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--junitxml=report.xml", "-k", cases]
    ours = {key: value for key, value in os.environ.items() if not key.startswith(("WEIGHT_SYNC", "PYTEST"))}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "test_roundtrip.py", *options],
        cwd=folder,
        env=ours | {"WEIGHT_SYNC_URL": url} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def judged(server, folder, cases="", **environment):
    """{case id: passed, failed, skipped or xfailed}."""
    there = {"WEIGHT_SYNC_DEVICE": ",".join(server.devices)}  # a machine with GPUs would lend on those
    done = run_cases(server.url, folder, cases, **there, **environment)
    assert (folder / "report.xml").exists(), done.stdout + done.stderr
    return dict(map(outcome, ElementTree.parse(folder / "report.xml").iter("testcase")))


def outcome(testcase):
    case = testcase.attrib["name"].removeprefix("test_a_server[url-").removesuffix("]")
    of = {child.tag: child for child in testcase}
    if "failure" in of or "error" in of:
        return case, "failed"
    skipped = "skipped" in of and of["skipped"].attrib["type"].removeprefix("pytest.")
    return case, {"skip": "skipped", "xfail": "xfailed"}[skipped] if skipped else "passed"


def of(outcomes, which):
    return {case for case, outcome in outcomes.items() if outcome == which}


def run_mutant(name, folder, cases="", **environment):
    mutant = MUTANTS[name.split("+")[0]]
    environment = {"WEIGHT_SYNC_STRICT": str(int(mutant.strict))} | environment
    options = []
    if mutant.model:
        environment |= {"WEIGHT_SYNC_CHECKPOINT": checkpoint(folder)}
        options = ["--model", MODEL]
    with Server(mutant.device, *options, program=(PROGRAM, name)) as server:
        return judged(server, folder, cases, **environment)


def expected(name):
    """The cases that the mutant turns red."""
    return {case for pattern in MUTANTS[name].red for case in fnmatch.filter(CASES, pattern)}


def checkpoint(folder):
    import trainer

    torch.save(trainer.ByteLM().state_dict(), folder / "bytelm.pt")
    return str(folder / "bytelm.pt")


# --- Faults -------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_turns_its_own_case_red_and_no_other(name, tmp_path):
    """Each is killed, and none of the cases that it keeps is accused."""
    outcomes = run_mutant(name, tmp_path)
    assert of(outcomes, "failed") == expected(name)
    assert outcomes.keys() == CASES.keys()


@pytest.mark.long
def test_a_fault_is_told_once_and_a_known_deviation_is_no_failure(tmp_path):
    """What builds on a failed case is skipped; of what is listed as expected only what passes fails."""
    (tmp_path / "expected").write_text("# ours\nversion.at-finish  known\n\nsession.empty  mended since\n")
    faults = "decodes packed updates, loads nothing+publishes the version early"
    cases = "sync- or loan or finish or session.empty"
    outcomes = run_mutant(faults, tmp_path, cases, WEIGHT_SYNC_EXPECTED="expected")
    assert of(outcomes, "failed") == {"sync-packed", "session.empty"}
    assert of(outcomes, "xfailed") == {"version.at-finish"}
    built_on_it = {"loan.reply", "loan.kept-packed", "release.finish-packed", "loan.renewed-packed"}
    assert of(outcomes, "skipped") == built_on_it
    assert {"sync-unpacked", "loan.kept-unpacked", "release.finish-unpacked"} <= of(outcomes, "passed")


def test_every_case_is_turned_red_by_a_fault():
    red = {case for name in MUTANTS for case in expected(name)}
    # The twin of the first dies of the same fault before; the last has the opposite of a fault.
    assert CASES.keys() - red == {"init.packed-bool-packed", "gate.off"}


def test_the_readme_lists_what_is_expected_of_vllm():
    listed = re.search(
        r"# WEIGHT_SYNC_EXPECTED for vLLM [\d.]+\n(.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    assert {line.split()[0] for line in listed[1].splitlines()} == MUTANTS["is vLLM 0.33.0"].red


@pytest.mark.long
def test_vllm_as_it_was_seen_breaks_no_must(tmp_path):
    """Where a wrong shape was sent, it takes a second sync to recover: the case grants it."""
    outcomes = run_mutant("is vLLM 0.33.0", tmp_path, WEIGHT_SYNC_STRICT="0")
    assert of(outcomes, "failed") == set() and MUTANTS["is vLLM 0.33.0"].red <= of(outcomes, "passed")


@pytest.mark.long
def test_an_expected_id_that_is_no_case_is_told(tmp_path):
    (tmp_path / "expected").write_text("sync.packed  a slip of the pen\n")
    done = run_cases("http://127.0.0.1:1", tmp_path, WEIGHT_SYNC_EXPECTED="expected")
    assert done.returncode == 4 or done.returncode == 2
    assert "names what is no case: sync.packed" in done.stdout + done.stderr


# --- A checkpoint's names -----------------------------------------------------------------------------


def safetensors(path, **specs):
    """A file with that header, and no data: names, dtypes and shapes are all that is read."""
    header = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
        for name, (dtype, shape) in specs.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def test_names_come_from_the_headers_of_a_folder(tmp_path):
    safetensors(tmp_path / "one.safetensors", a=("BF16", [2, 3]), b=("F8_E4M3", []))
    safetensors(tmp_path / "two.safetensors", c=("I64", [0]), d=("U16", [4]), e=("F64", [1]), f=("BOOL", [2]))
    weights = noise_like(str(tmp_path), 0)
    found = {
        name: (ipc_codec.dtype_name(weight.dtype), list(weight.shape)) for name, weight in weights.items()
    }
    assert found == {
        **{"c": ("int64", [0]), "e": ("float64", [1]), "a": ("bfloat16", [2, 3]), "d": ("uint16", [4])},
        **{"b": ("float8_e4m3fn", []), "f": ("bool", [2])},
    }
    assert [weight.itemsize for weight in weights.values()] == [8, 8, 2, 2, 1, 1]


def test_two_seeds_of_a_checkpoint_differ_are_finite_and_tied_alike(tmp_path):
    tied = torch.zeros(3, 4)
    state = {"embed": tied, "head": tied, "alone": torch.zeros(3, 4), "part": tied[0]}
    bytes_of = torch.zeros(2, 8, dtype=torch.uint8)
    state |= {str(dtype): bytes_of.clone().view(dtype) for dtype in DTYPES if dtype.itemsize <= 8}
    torch.save(state, tmp_path / "model.pt")
    one, two = (noise_like(str(tmp_path / "model.pt"), seed) for seed in (0, 1))
    assert one.keys() == two.keys() == state.keys()
    for name, weight in one.items():
        assert weight.shape == state[name].shape and bits(weight) != bits(two[name])
        if weight.dtype != torch.float4_e2m1fn_x2:
            assert weight.to(torch.complex64 if weight.is_complex() else torch.float64).isfinite().all()
    assert one["embed"] is one["head"] and bits(one["embed"]) != bits(one["alone"])


# --- Correct servers ----------------------------------------------------------------------------------

NOT_HERE = {
    "gate.off",
    "route.completions",
    "weights.unknown-name",
    "weights.other-shape",
    "rank-local.own-entry",
}


@pytest.mark.long
@pytest.mark.parametrize("strict", ["0", "1"], ids=["SHOULD reported", "SHOULD counts"])
@pytest.mark.parametrize("options", [[], ["--strict"]], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cpu:0,cpu:1"])
def test_our_server_is_not_accused(device, options, strict, tmp_path):
    with Server(device, *options) as server:
        outcomes = judged(server, tmp_path, WEIGHT_SYNC_STRICT=strict)
    kinds = ("every-dtype-at-once", "unaligned", "unaligned-after-bool")
    unaligned = {f"kind.{kind}-packed" for kind in kinds}
    skipped = NOT_HERE - ({"rank-local.own-entry"} if "," in device else set())
    assert of(outcomes, "failed") == set()
    assert of(outcomes, "skipped") == skipped | (unaligned if options else set())


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", "cpu:0,cpu:1"])
def test_our_server_with_a_model_is_not_accused(device, tmp_path):
    told = {"WEIGHT_SYNC_CHECKPOINT": checkpoint(tmp_path), "WEIGHT_SYNC_STRICT": "1"}
    with Server(device, "--model", MODEL) as server:
        outcomes = judged(server, tmp_path, **told)
    assert of(outcomes, "failed") == set()
    assert {"weights.unknown-name", "kind.float32-packed", "chunks.many-packed"} <= of(outcomes, "passed")
    assert {"kind.bool-packed", "kind.transposed-unpacked"} <= of(outcomes, "skipped")


@pytest.mark.long
def test_a_server_without_the_gate_is_judged_by_that_alone(tmp_path):
    with Server("cpu", gate=False) as server:
        outcomes = judged(server, tmp_path, WEIGHT_SYNC_GATE="off")
    assert of(outcomes, "passed") == {"health", "gate.off"} and not of(outcomes, "failed")


@pytest.mark.long
def test_nobody_at_the_url_is_one_failure(tmp_path):
    server = Server("cpu")
    with server:
        pass
    outcomes = judged(server, tmp_path)
    assert of(outcomes, "failed") == {"health"} and not of(outcomes, "passed")
