"""The spec as data: the tables are whole, every rule is broken by its counter-example and by nothing else."""

import ast
import dataclasses
import inspect
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

import ipc_codec
import protocol
import server
from protocol import (
    CALLS,
    IDLE,
    MUST,
    RULES,
    SEQUENCE,
    SHOULD,
    UPDATING,
    InitInfo,
    Move,
    Refuse,
    Session,
    State,
    UpdateInfo,
)

ROOT = Path(__file__).parents[1]
UUID = "c0dec0de-0000-4000-8000-000000000000"
OTHER = "c0dec0de-0000-4000-8000-000000000001"


def described(dtype, shape, nbytes, slot):
    stride = [torch.Size(shape[at + 1 :]).numel() for at in range(len(shape))]
    tensor = ["torch.Tensor", shape, stride, 0]
    storage = ["torch.storage.TypedStorage", f"torch.{dtype}", 0, "02" * 66, nbytes, 512 * slot]
    return [*tensor, *storage, False, b"/torch_1_2_3".hex(), slot, "00" * 64, True]


COLUMNS = {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[2, 2], [3]]}
UNPACKED = COLUMNS | {
    "ipc_handles_pickled": [
        {UUID: described("float32", [2, 2], 16, 0)},
        {UUID: described("bfloat16", [3], 6, 1)},
    ]
}
PACKED = COLUMNS | {"tensor_sizes": [16, 6], "ipc_handles_pickled": {UUID: described("uint8", [64], 64, 0)}}
GOOD = {"unpacked": UNPACKED, "packed": PACKED}


def shown(info):
    """An update_info whose handles are in place, as the receiver shows it to the rules after decoding."""
    update = UpdateInfo.from_json(info)
    handles = update.ipc_handles_pickled
    if isinstance(handles, str):
        return dataclasses.replace(update, handles={"undecodable": "not a pickle"})
    return dataclasses.replace(
        update, handles=handles, ipc_handles_pickled=None if handles is None else "text"
    )


def session(mode, **more):
    return Session(
        **{"uuid": UUID, "state": UPDATING, "packed": mode == "packed", "initialized": True} | more
    )


def broken(mode, update, **more):
    return [refusal.rule.id for refusal in session(mode, **more).broken_rules("update_weights", update)]


UPDATE_BREAKS = [
    pytest.param(mode, rule, at, id=f"{rule.id}-{mode}-{at}")
    for mode, rule in itertools.product(GOOD, RULES.values())
    for at in range(len(rule.breaks))
    if rule.call == "update_weights" and rule.mode in (mode, "both")
]


# --- Rules


@pytest.mark.parametrize("mode", GOOD)
def test_a_good_update_breaks_no_rule(mode):
    assert broken(mode, shown(GOOD[mode])) == []


@pytest.mark.parametrize(("mode", "rule", "at"), UPDATE_BREAKS)
def test_a_counterexample_breaks_its_own_rule_alone(mode, rule, at):
    assert broken(mode, shown(rule.breaks[at](GOOD[mode]))) == [rule.id]


@pytest.mark.parametrize(("mode", "rule", "at"), UPDATE_BREAKS)
def test_a_counterexample_breaks_its_rule_where_the_good_layout_is_known_too(mode, rule, at):
    good, bad = shown(GOOD[mode]), shown(rule.breaks[at](GOOD[mode]))
    known = good if bad.layout == good.layout else None
    assert broken(mode, dataclasses.replace(bad, known=known)) == [rule.id]


def test_a_layout_is_equal_type_for_type():
    layouts = {shown(UNPACKED | {"shapes": [first, [3]]}).layout for first in ([1, 2], [True, 2], [1.0, 2])}
    assert len(layouts) == 3
    assert shown(UNPACKED).layout == shown(json.loads(json.dumps(UNPACKED))).layout


@pytest.mark.parametrize("empty", [[], {}, 0, False, ""])
@pytest.mark.parametrize("mode", GOOD)
def test_handles_that_are_no_text_are_found_empty_too(mode, empty):
    info = {key: value for key, value in GOOD[mode].items() if key != "ipc_handles_pickled"}
    assert "handles.text" in broken(mode, shown(info | {"ipc_handles": empty}))


def test_a_layout_that_nests_too_deeply_is_nobodys():
    deep = []
    for _ in range(5000):
        deep = [deep]
    assert shown(UNPACKED | {"shapes": deep}).layout == b""


@pytest.mark.parametrize("rule", [r for r in RULES.values() if r.call.startswith("init") and r.breaks])
def test_an_init_counterexample_breaks_its_own_rule_alone(rule):
    def broken_by(info):
        return [refusal.rule.id for refusal in Session().broken_rules(rule.call, InitInfo.from_json(info))]

    assert broken_by({"packed": True}) == broken_by({}) == []
    assert broken_by(rule.breaks[0]({"packed": True})) == [rule.id]


@pytest.mark.parametrize("rule", [r for r in RULES.values() if r.calls and not r.breaks and not r.evidence])
def test_the_last_of_its_calls_breaks_a_rule_about_order(rule):
    now = Session(initialized=rule.id != "init.first")
    for call in rule.calls[:-1]:
        assert not now.forbids(call) and not now.broken_rules(call)
        now.settle(call, None, ok=True)
    refusal = now.forbids(rule.calls[-1])
    assert [refusal.rule] if refusal else now.broken_rules(rule.calls[-1])[0].rule == rule


def test_every_rule_has_a_counterexample_or_a_test_of_its_own():
    without = {r.id for r in RULES.values() if not r.breaks and not r.calls and not r.evidence}
    assert without == {
        *("rank-local.counted", "handles.base64", "unpacked.tied-in-pairs", "unpacked.overlap-alike"),
        *("packed.one-export",),
        *("packed.chunk-full", "body.envelope", "call.one-in-flight", "sync.finished", "refusal.explained"),
    }  # test_judge.py has them


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.id)
def test_a_rule_is_a_whole_sentence_with_a_source(rule):
    assert rule.text and rule.source and rule.call in CALLS
    assert rule.level in (MUST, SHOULD) and rule.refused_by_vllm in ("always", "packed", "never")
    assert not {"must", "should", "shall"} & set(rule.text.lower().split())
    assert "|" not in rule.text + rule.source


def test_what_vllms_trainer_sends_breaks_nothing():
    assert broken("unpacked", shown(UNPACKED | {"tensor_sizes": None})) == []


def test_empty_lists_break_nothing():
    nothing = {"names": [], "dtype_names": [], "shapes": []}
    assert broken("unpacked", shown(nothing | {"ipc_handles_pickled": []})) == []
    assert broken("packed", shown(PACKED | nothing | {"tensor_sizes": []})) == []


def test_the_right_sizes_as_a_tuple_break_nothing():
    update = dataclasses.replace(shown(PACKED), tensor_sizes=(16, 6))
    assert broken("packed", update) == []
    assert broken("packed", dataclasses.replace(update, tensor_sizes=(16, 7))) == ["packed.size-of-shape"]


def test_a_name_of_an_earlier_chunk_is_not_sent_again():
    assert broken("packed", shown(PACKED), sent={"b"}) == ["names.unique"]


def test_an_alias_is_a_dtype_name_too():
    assert broken("unpacked", shown(UNPACKED | {"dtype_names": ["float", "bfloat16"]})) == ["dtype.canonical"]


def test_a_handle_for_several_gpus_is_good_for_each():
    both = [
        {OTHER: args, UUID: args} for handle in UNPACKED["ipc_handles_pickled"] for args in handle.values()
    ]
    update = shown(UNPACKED | {"ipc_handles_pickled": both})
    assert broken("unpacked", update) == broken("unpacked", update, uuid=OTHER) == []


def test_an_exactly_full_buffer_fits():
    exact = {UUID: described("uint8", [22], 22, 0)}
    assert broken("packed", shown(PACKED | {"ipc_handles_pickled": exact})) == []


JUNK: list = [None, 0, -1, 1.5, True, "", "x", [], {}, [[]], [None], [{}], {"a": 1}, [1, 2], "\ud800"]
JUNK += [[[1] * 70], {"undecodable": 3}, [["x"]], [{"u": [0] * 15}], {"u": (None,) * 15}]


@pytest.mark.parametrize("seed", range(20))
def test_no_rule_raises_whatever_the_fields_hold(seed):
    pick = random.Random(seed).choice
    for _ in range(500):
        fields = {
            field.name: pick(JUNK)
            for field in dataclasses.fields(UpdateInfo)
            if field.name not in ("unknown", "known")  # the receiver's own
        }
        good = {
            name: value for name, value in shown(GOOD[pick(list(GOOD))]).__dict__.items() if name in fields
        }
        mixed = {name: pick((value, good[name])) for name, value in fields.items()}
        broken(pick(list(GOOD)), UpdateInfo(**mixed), uuid=pick((None, UUID)))


@pytest.mark.parametrize("at", range(15))
@pytest.mark.parametrize("mode", GOOD)
def test_no_rule_raises_whatever_an_argument_holds(mode, at):
    for junk in JUNK:
        info = json.loads(json.dumps(GOOD[mode]))
        handles = info["ipc_handles_pickled"]
        (handles if mode == "packed" else handles[0])[UUID][at] = junk
        broken(mode, shown(info))


@pytest.mark.parametrize("mode", GOOD)
def test_numbers_longer_than_python_prints_are_judged(mode):
    huge = 10**4200
    update = json.loads(json.dumps(GOOD[mode] | {"shapes": [[huge] * 64, [huge]]}))
    handles = update["ipc_handles_pickled"]
    args = (handles if mode == "packed" else handles[0])[UUID]
    args[1:4], args[8:10] = [[huge] * 64, [1] * 64, huge], [huge, huge]
    assert broken(mode, shown(update))


def lent_with_sizes(*sizes):
    """An update whose handles have these sizes, and strides 1."""
    handles = [{UUID: described("uint8", [4], 4, 0)} for _ in sizes]
    for handle, size in zip(handles, sizes, strict=True):
        handle[UUID][1:3] = size, [1] * len(size)
    return UpdateInfo(names=["w"] * len(sizes), handles=handles)


def test_sizes_of_thousands_of_bits_are_not_multiplied():
    assert lent_with_sizes([2**64 - 1]).extents and not lent_with_sizes([2**64]).extents


def test_many_sizes_are_multiplied_once():
    """Of thousands of layouts, that is: each is one pass over its sizes."""
    update = lent_with_sizes(*([at, *[1 << 63] * 63] for at in range(4000)))
    began = time.process_time()
    assert not update.extents
    assert time.process_time() - began < 0.5


# --- Sequence


def test_every_state_has_an_answer_to_every_call():
    assert set(SEQUENCE) == set(itertools.product(State, CALLS))


def test_every_refusal_names_a_rule_and_every_order_rule_is_a_refusal():
    named = {cell.rule_id for cell in SEQUENCE.values() if isinstance(cell, Refuse)}
    assert named == {rule.id for rule in RULES.values() if rule.check is None and rule.calls}


def test_a_failed_update_ends_the_session_and_a_failed_finish_does_not():
    assert SEQUENCE[UPDATING, "update_weights"] == Move(done=UPDATING, failed=IDLE)
    assert SEQUENCE[UPDATING, "finish_weight_update"] == Move(done=IDLE, failed=UPDATING)


def test_init_flips_the_mode_of_an_open_update_and_a_failed_one_does_not():
    now = session("unpacked")
    now.settle("init_weight_transfer_engine", InitInfo(True), ok=True)
    now.settle("init_weight_transfer_engine", InitInfo(False), ok=False)
    assert now.packed and now.state is UPDATING


def test_start_forgets_the_names_of_the_sync_before():
    now = session("packed", state=IDLE, sent={"a"})
    now.settle("start_weight_update", None, ok=True)
    assert now.sent == set()


# --- Messages


def test_an_update_on_the_wire():
    update = UpdateInfo(["w"], ["bfloat16"], [[2, 3]], "gASV", [12])
    assert json.dumps(update.to_json()) == (
        '{"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]], '
        '"ipc_handles_pickled": "gASV", "tensor_sizes": [12]}'
    )
    assert UpdateInfo.from_json(update.to_json()) == update


def test_a_rank_local_list_gives_each_worker_its_own():
    first, second, third = ({"names": [name], "dtype_names": [], "shapes": []} for name in "abc")
    assert [u.names for u in protocol.worker_entries([first, second, third], 2)] == [["a"], ["b"]]
    assert [u.names for u in protocol.worker_entries(first, 2)] == [["a"], ["a"]]
    with pytest.raises(protocol.Refused, match="1 entries for 2 workers") as refused:
        protocol.worker_entries([first], 2)
    assert refused.value.rule is RULES["rank-local.counted"]


# --- Planning and merging


@pytest.mark.parametrize(
    ("sizes", "capacity", "chunks"),
    [
        ([60, 60], 64, [["0"], ["1"]]),
        ([32, 32, 1], 64, [["0", "1"], ["2"]]),  # one that fills it exactly fits
        ([64, 0, 0], 64, [["0", "1", "2"]]),  # an empty tail is announced
        ([0], 64, [["0"]]),
        ([], 64, []),
        ([1] * 5, 2, [["0", "1"], ["2", "3"], ["4"]]),
    ],
)
def test_a_chunk_is_closed_before_it_would_overflow(sizes, capacity, chunks):
    assert protocol.plan_chunks({str(at): size for at, size in enumerate(sizes)}, capacity) == chunks


def test_a_tensor_larger_than_the_buffer_is_named():
    with pytest.raises(ValueError, match="big has 65 bytes"):
        protocol.plan_chunks({"small": 1, "big": 65}, 64)


def test_handles_are_merged_by_index():
    assert protocol.merge_handles([{"u0": 1}, {"u1": 2}]) == {"u0": 1, "u1": 2}
    assert protocol.merge_handles([[{"u0": 1}, {"u0": 2}], [{"u1": 3}, {"u1": 4}]]) == [
        {"u0": 1, "u1": 3},
        {"u0": 2, "u1": 4},
    ]
    assert protocol.merge_handles([[], []]) == []


def test_ranks_that_disagree_are_not_merged():
    with pytest.raises(ValueError, match=r"different numbers of handles: \[1, 2\]"):
        protocol.merge_handles([[{"u0": 1}], [{"u1": 1}, {"u1": 2}]])
    with pytest.raises(ValueError, match="rank 1 exports for GPU u0"):
        protocol.merge_handles([{"u0": 1}, {"u0": 2}])


# --- What stands in two places is compared


def test_ipc_args_are_torchs():
    assert ipc_codec.IpcArgs._fields == tuple(inspect.signature(rebuild_cuda_tensor).parameters)


def test_positions_that_rules_look_at_are_torchs():
    names = (
        "tensor_size",
        "tensor_stride",
        "dtype",
        "requires_grad",
        "ref_counter_handle",
        "ref_counter_offset",
    )
    positions = (protocol.TENSOR_SIZE, protocol.TENSOR_STRIDE, protocol.DTYPE, protocol.REQUIRES_GRAD)
    positions += (protocol.COUNTER, protocol.SLOT)
    assert tuple(map(ipc_codec.IpcArgs._fields.index, names)) == positions
    assert len(ipc_codec.IpcArgs._fields) == protocol.ARGS


def test_dtypes_are_torchs():
    torchs = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    for name, size in protocol.DTYPE_BYTES.items():
        assert torchs[name].itemsize == size and str(torchs[name]) == f"torch.{name}"
    for alias, name in protocol.DTYPE_ALIASES.items():
        assert torchs[alias] is torchs[name]
    assert ipc_codec.DTYPES.keys() == protocol.DTYPE_BYTES.keys() | protocol.DTYPE_ALIASES.keys()


def test_the_readme_prints_the_tables():
    readme = (ROOT / "README.md").read_text()
    assert protocol.rules_as_markdown() in readme
    assert protocol.sequence_as_markdown() in readme


def test_the_readme_lists_the_calls_and_what_they_answer():
    """Each row as it stands there, one after the other; not what has `...` in it."""
    app = server.App(server.WeightTransferEngine([torch.device("cpu:0")]))
    table = re.search(r"\| call \| body \| 200 \|\n.*?\n\n", (ROOT / "README.md").read_text(), re.S)
    _, _, *rows = table[0].strip().splitlines()
    listed, method, target = set(), "", ""
    for row in rows:
        call, body, answer = (cell.strip() for cell in row.strip("|").split("|"))
        listed |= {(path, method) for method, path in re.findall(r"`(GET|POST) ([\w/]+)", call)}
        method, target = re.match(r"`(GET|POST) (\S+)`", call).groups() if call else (method, target)
        given, expected = (re.match(r"`(\{.*?\})`(?!\w)", cell) for cell in (body, answer))
        if ("..." in body + answer and "compare" not in body) or "OpenAI" in body:
            continue
        headers = {"content-type": "application/json"} if given else {}
        reply = app.answer(method, target, headers, given[1].encode() if given else b"")
        assert reply.status == (500 if answer.startswith("500") else 200), (row, reply)
        assert not expected or reply.body == json.loads(expected[1]), (row, reply)
    assert listed == {(path, method) for path, (method, _handler) in server.ROUTES.items()}


def test_protocol_prints_the_rules():
    command = [sys.executable, str(ROOT / "protocol.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert printed.strip() == protocol.rules_as_markdown()


@pytest.mark.parametrize(
    "words", [[], [ROOT / "tests" / "transcripts" / "clean.jsonl"]], ids=["rules", "file"]
)
def test_a_reader_that_has_seen_enough_ends_it_without_a_word(words):
    """As in `python protocol.py FILE | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as pipe:
        command = [sys.executable, ROOT / "protocol.py", *words]
        ended = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (-signal.SIGPIPE, "")


LEAVES = {"protocol", "ipc_codec"}
MAY_IMPORT = {
    "protocol.py": set(),
    "ipc_codec.py": {"torch"},
    "server.py": {"torch"} | LEAVES,
    "trainer.py": {"torch", "requests", "safetensors"} | LEAVES,
}


@pytest.mark.parametrize("file", MAY_IMPORT)
def test_the_import_drawing_holds(file):
    imported = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).split(".")[0])
    assert imported - sys.stdlib_module_names == MAY_IMPORT[file]
