"""HLO text of any backend is read exactly, and how often each part runs is known or said to be unknown."""

import pytest

from jaxshard_magic.analysis.collectives import collectives, module_collectives
from jaxshard_magic.analysis.hlo import Module, RunCount, RunCounts, Shape, parse_module
from jaxshard_magic.report import Collective

SUM = """
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}
"""


def runs(module: Module) -> dict[str, RunCount]:
    counted = RunCounts(module)
    return {name: times for name in module.computations if (times := counted[name]).times}


def counter_loop(name: str, trips: int, inside: str = "", start: int = 0, step: int = 1) -> str:
    """Condition and body of a loop as TPU prints them: no trip count, a counter in element 0 of the state."""
    return f"""
%{name}_cond (c: (s32[], f32[8])) -> pred[] {{
  %c = (s32[]{{:T(128)}}, f32[8]{{0:T(128)S(1)}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%c), index=0
  %n = s32[]{{:T(128)}} constant({trips * step + start})
  ROOT %lt = pred[]{{:T(512)}} compare(%i, %n), direction=LT
}}

%{name}_body (p: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %p = (s32[]{{:T(128)}}, f32[8]{{0:T(128)S(1)}}) parameter(0)
  %j = s32[]{{:T(128)}} get-tuple-element(%p), index=0
  %one = s32[]{{:T(128)}} constant({step})
  %next = s32[]{{:T(128)}} add(%j, %one)
  %x = f32[8]{{0:T(128)S(1)}} get-tuple-element(%p), index=1
  {inside}
  ROOT %out = (s32[]{{:T(128)}}, f32[8]{{0:T(128)S(1)}}) tuple(%next, %x)
}}
"""


def while_of(name: str, init: str, attributes: str = "") -> str:
    return f"(s32[], f32[8]) while(%{init}), condition=%{name}_cond, body=%{name}_body{attributes}"


ENTRY = """
ENTRY %main (x0: f32[8]) -> f32[8] {{
  %x0 = f32[8]{{0}} parameter(0)
  %zero = s32[] constant({start})
  %first = s32[] copy(%zero)
  %init = (s32[], f32[8]) tuple(%first, %x0)
  %loop = {loop}
  ROOT %y = f32[8]{{0}} get-tuple-element(%loop), index=1
}}
"""


@pytest.mark.parametrize(
    ("dtype", "dims", "nbytes"),
    [
        ("f32", (4, 8), 128),
        ("bf16", (3,), 6),
        ("pred", (5,), 5),
        ("s4", (5,), 3),
        ("u2", (5,), 2),
        ("f4e2m1fn", (4,), 2),
        ("f8e4m3fn", (7,), 7),
        ("c64", (2,), 16),
        ("f64", (), 8),
        ("token", (), 0),
    ],
)
def test_a_shape_knows_its_bytes(dtype, dims, nbytes):
    assert Shape(dtype, dims).bytes == nbytes


def test_an_instruction_is_taken_apart_whatever_its_layout_and_strings_hold():
    text = """HloModule m, num_partitions=4, replica_count=2

ENTRY %e (p: f32[2,3]) -> (f32[2,3], s32[]) {
  %p = f32[2,3]{1,0:T(8,128)(2,1)S(1)} parameter(0), sharding={devices=[4,1]<=[4]}
  %c = s32[] constant(7)
  ROOT %t.1 = (f32[2,3]{1,0:T(8,128)}, (s32[], pred[5]), /*index=2*/token[]) fusion(%p, /*index=1*/%c), \
kind=kLoop, calls=%f.2, metadata={op_name="a, calls=%wrong) (\\"" stack_frame_id=3}, backend_config={"n":"1"}
}
"""
    module = parse_module(text)
    root = module.entry.root
    assert root is not None
    assert (root.name, root.opcode, root.operands) == ("t.1", "fusion", ("p", "c"))
    assert root.shapes == (Shape("f32", (2, 3)), Shape("s32", ()), Shape("pred", (5,)), Shape("token", ()))
    assert root.attribute("calls") == "%f.2"
    assert root.attribute("backend_config") == '{"n":"1"}'
    assert root.attribute("metadata") == '{op_name="a, calls=%wrong) (\\"" stack_frame_id=3}'
    assert root.attribute("to_apply") is None
    assert module.entry.instructions["p"].attribute("sharding") == "{devices=[4,1]<=[4]}"
    assert module.entry.instructions["c"].operands == ()
    assert (module.partitions, module.replicas) == (4, 2)


def test_text_without_percent_signs_and_with_typed_operands_reads_the_same():
    module = parse_module(
        "HloModule m\n\nENTRY e {\n"
        "  p = f32[2,3]{1,0} parameter(0)\n"
        "  ROOT a = f32[2,3]{1,0} add(f32[2,3]{1,0:T(8,128)} p, f32[2,3]{1,0} p), metadata={}\n}\n"
    )
    assert module.entry.instructions["a"].operands == ("p", "p")


def test_elements_that_are_named_in_place_are_those_that_would_be_taken_out():
    module = parse_module(
        "HloModule m, num_partitions=8\n"
        + SUM
        + """
ENTRY %e (p: (f32[8], (s32[], f32[4,2]))) -> f32[4,2] {
  %p = (f32[8]{0}, (s32[], /*index=1*/f32[4,2]{1,0})) parameter(0)
  %first = (f32[8]{0}, f32[4,2]{1,0}) all-reduce(%p#0, f32[4,2]{1,0} %p#1#1), replica_groups=[4,2]<=[8], \
use_global_device_ids=true, channel_id=1, to_apply=%sum
  %both = (f32[4,2]{1,0}, f32[8]{0}) all-reduce(%first#1, %first#0), replica_groups=[2,4]<=[4,2]T(1,0), \
use_global_device_ids=true, channel_id=2, to_apply=%sum
  ROOT %y = f32[4,2]{1,0} copy(%both#0), metadata={op_name="y#0/p#7"}
}
"""
    )
    entry = module.entry.instructions
    assert entry["first"].operands == ("p#0", "p#1#1")
    taken = entry["p#1#1"]
    assert (taken.opcode, taken.operands, taken.attribute("index")) == ("get-tuple-element", ("p#1",), "1")
    assert taken.shapes == (Shape("f32", (4, 2)),)
    moved = [(m.axes, m.bytes, m.operand) for m in module_collectives(module, {"data": 4, "model": 2})]
    assert moved == [
        (("model",), 32, "p#0"),
        (("model",), 32, "p#1#1"),
        (("data",), 32, "first#1"),
        (("data",), 32, "first#0"),
    ]


def test_the_source_tables_before_the_program_are_kept():
    header = 'HloModule m\n\nFileNames\n1 "cell.py"\n\nStackFrames\n1 {file_location_id=1 parent_frame_id=1}\n'
    assert parse_module(header + "\nENTRY %e () -> f32[] {\n  ROOT %c = f32[] constant(1)\n}\n").header.startswith(
        header
    )


def test_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        parse_module(SUM)


def test_a_loop_runs_its_body_as_often_as_xla_says_and_its_condition_once_more():
    known = ', backend_config={"known_trip_count":{"n":"12"},"known_init_step":{"init":"0","step":"1"}}'
    text = counter_loop("l", 5) + ENTRY.format(start=0, loop=while_of("l", "init", known))
    found = runs(parse_module(text))
    assert found["l_body"] == RunCount(12, True)
    assert found["l_cond"] == RunCount(13, True)


@pytest.mark.parametrize(("start", "step", "trips"), [(0, 1, 6), (2, 1, 7), (0, 3, 4), (0, 1, 0)])
def test_a_trip_count_that_is_not_printed_follows_from_the_counter(start, step, trips):
    text = counter_loop("l", trips, start=start, step=step)
    text += ENTRY.format(start=start, loop=while_of("l", "init"))
    found = runs(parse_module(text))
    assert found.get("l_body", RunCount(0, True)) == RunCount(trips, True)
    assert found["l_cond"] == RunCount(trips + 1, True)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("direction=LT", "direction=NE"),
        ("add(%j, %one)", "multiply(%j, %one)"),
        ("add(%j, %one)", "add(%j, %j)"),
        ("copy(%zero)", "copy(%unseen)"),
        ("constant(5)", "parameter(1)"),
        ("get-tuple-element(%c), index=0", "negate(%c), index=0"),
    ],
)
def test_a_loop_that_counts_otherwise_is_marked_unknown_and_not_guessed(old, new):
    text = counter_loop("l", 5) + ENTRY.format(start=0, loop=while_of("l", "init"))
    assert old in text
    assert runs(parse_module(text.replace(old, new)))["l_body"] == RunCount(1, False)


def test_nested_loops_multiply_and_an_unknown_one_makes_what_is_in_it_unknown():
    inner = counter_loop("inner", 3)
    state = "%k = s32[] constant(0)\n  %st = (s32[], f32[8]) tuple(%k, %x)\n  %w = " + while_of("inner", "st")
    text = inner + counter_loop("outer", 5, state) + ENTRY.format(start=0, loop=while_of("outer", "init"))
    found = runs(parse_module(text))
    assert found["inner_body"] == RunCount(15, True)
    assert found["inner_cond"] == RunCount(5 * 4, True)
    unknown = text.replace("%n = s32[]{:T(128)} constant(5)", "%n = s32[]{:T(128)} get-tuple-element(%c), index=2")
    assert runs(parse_module(unknown))["inner_body"] == RunCount(3, False)


def test_calls_fusions_and_branches_run_once_per_site_and_reductions_not_at_all():
    body = "(x: f32[8]) -> f32[8] {\n  ROOT %x = f32[8] parameter(0)\n}\n"
    names = ("called", "fused", "yes", "no", "wrapped", "begun", "dead")
    text = SUM + "\n".join(f"%{name} {body}" for name in names)
    text += """
ENTRY %main (p: f32[8], q: pred[]) -> f32[8] {
  %p = f32[8] parameter(0)
  %q = pred[] parameter(1)
  %a = f32[8] call(%p), to_apply=%called
  %b = f32[8] call(%a), to_apply=%called
  %c = f32[8] fusion(%b), kind=kLoop, calls=%fused
  %d = f32[8] conditional(%q, %c, %c), branch_computations={%yes, %no}
  %start = ((f32[8]), f32[8], u32[]) async-start(%d), calls=%wrapped
  %update = ((f32[8]), f32[8], u32[]) async-update(%start), calls=%wrapped
  %done = f32[8] async-done(%update), calls=%wrapped
  %begin = ((f32[8]), f32[8]) call-start(%done), async_execution_thread="sparsecore", to_apply=%begun
  %sum.1 = f32[8] all-reduce-start(%done), to_apply=%dead
  %r = f32[] reduce(%done, %q), dimensions={0}, to_apply=%sum
  ROOT %out = f32[8] copy(%done)
}
"""
    found = {name: r.times for name, r in runs(parse_module(text)).items()}
    assert found == {"called": 2, "fused": 1, "yes": 1, "no": 1, "wrapped": 1, "begun": 1, "main": 1}


def test_the_older_form_of_a_conditional_names_both_branches():
    body = "(x: f32[8]) -> f32[8] {\n  ROOT %x = f32[8] parameter(0)\n}\n"
    text = f"%yes {body}\n%no {body}\n" + (
        "ENTRY %e (q: pred[], p: f32[8]) -> f32[8] {\n"
        "  %q = pred[] parameter(0)\n  %p = f32[8] parameter(1)\n"
        "  ROOT %d = f32[8] conditional(%q, %p, %p), true_computation=%yes, false_computation=%no\n}\n"
    )
    assert set(runs(parse_module(text))) == {"yes", "no", "e"}


def test_a_program_of_a_thousand_fusions_is_read_whole():
    body = "".join(f"  %x.{i} = f32[64,64]{{1,0}} add(%x.{i - 1}, %x.{i - 1})\n" for i in range(1, 20))
    head = "(x.0: f32[64,64]) -> f32[64,64] {\n  %x.0 = f32[64,64] parameter(0)\n"
    parts = "\n".join(f"%c.{n} {head}{body}}}\n" for n in range(1000))
    calls = "".join(f"  %f.{n} = f32[64,64] fusion(%p), kind=kLoop, calls=%c.{n}\n" for n in range(1000))
    text = f"{parts}\nENTRY %e (p: f32[64,64]) -> f32[64,64] {{\n  %p = f32[64,64] parameter(0)\n{calls}}}\n"
    module = parse_module(text)
    assert {name: r.times for name, r in runs(module).items()} == {f"c.{n}": 1 for n in range(1000)} | {"e": 1}


# ---- collectives in forms that CPU does not print; one device holds p: f32[16,8], 512 bytes

MODEL, BYTES = {"data": 4, "model": 2}, 16 * 8 * 4


def program(body: str, before: str = "", header: str = "num_partitions=8") -> str:
    return f"""HloModule m, is_scheduled=true, {header}
{SUM}{before}
ENTRY %main (p: f32[16,8], q: bf16[4]) -> f32[16,8] {{
  %p = f32[16,8]{{1,0:T(8,128)}} parameter(0)
  %q = bf16[4]{{0:T(128)(2,1)}} parameter(1)
{body}
}}
"""


REDUCE = "use_global_device_ids=true, to_apply=%sum"


def test_groups_of_replicas_stand_for_all_their_partitions_without_global_ids():
    text = program("  ROOT %r = f32[16,8] all-reduce(%p), channel_id=1, replica_groups={{0}}, to_apply=%sum")
    (got,) = module_collectives(parse_module(text), MODEL)
    assert (got.axes, got.group_size) == (("data", "model"), 8)


def test_a_program_for_other_devices_than_the_mesh_has_no_axes():
    text = program(
        f"  ROOT %r = f32[16,8] all-reduce(%p), channel_id=1, replica_groups=[1,4]<=[4], {REDUCE}",
        header="num_partitions=4",
    )
    (got,) = module_collectives(parse_module(text), MODEL)
    assert (got.axes, got.group_size) == (None, 4)
    permute = "  ROOT %r = f32[16,8] collective-permute(%p), channel_id=1, source_target_pairs={{0,8},{8,0}}"
    (got,) = module_collectives(parse_module(program(permute)), MODEL)
    assert (got.axes, got.group_size) == (None, 2)


def test_started_and_finished_collectives_count_once_with_all_their_arrays():
    text = program(f"""
  %ag = ((f32[16,8], bf16[4]), (f32[32,8], bf16[8])) all-gather-start(%p, %q), channel_id=1, \
replica_groups=[4,2]<=[8], dimensions={{0}}, use_global_device_ids=true
  %agd = (f32[32,8], bf16[8]) all-gather-done(%ag)
  %ar = f32[16,8] all-reduce-start(%p), channel_id=2, replica_groups={{{{0,2,4,6}},{{1,3,5,7}}}}, {REDUCE}
  %ard = f32[16,8] all-reduce-done(%ar)
  %cp = (f32[16,8], f32[16,8], u32[]{{:S(2)}}, u32[]{{:S(2)}}) collective-permute-start(%p), channel_id=3, \
source_target_pairs={{{{0,1}},{{1,0}},{{2,3}},{{3,2}},{{4,5}},{{5,4}},{{6,7}},{{7,6}}}}
  ROOT %cpd = f32[16,8] collective-permute-done(%cp)""")
    assert collectives(text, MODEL) == (
        Collective("all-reduce", ("data",), 4, 1, BYTES, 2 * BYTES * 3 // 4),
        Collective("all-gather", ("model",), 2, 1, 2 * BYTES, BYTES),
        Collective("collective-permute", ("model",), 2, 1, BYTES, BYTES),
        Collective("all-gather", ("model",), 2, 1, 2 * 4 * 2, 4 * 2),
    )


def test_a_collective_in_an_async_wrapper_counts_once():
    scatter = f"replica_groups=[2,4]<=[4,2]T(1,0), dimensions={{0}}, {REDUCE}"
    wrapper = f"""
%wrapped (x: f32[16,8]) -> f32[4,8] {{
  %x = f32[16,8] parameter(0)
  ROOT %rs = f32[4,8] reduce-scatter(%x), channel_id=1, {scatter}
}}
"""
    rows = (Collective("reduce-scatter", ("data",), 4, 1, BYTES, BYTES * 3 // 4),)
    for start in ("async-start(%p), calls=%wrapped", "reduce-scatter-start(%p), calls=%wrapped"):
        body = f"""
  %start = ((f32[16,8]), f32[4,8], u32[]) {start}
  %update = ((f32[16,8]), f32[4,8], u32[]) async-update(%start), calls=%wrapped
  ROOT %done = f32[4,8] async-done(%update), calls=%wrapped"""
        assert collectives(program(body, wrapper), MODEL) == rows
    sugar = f"""
  %start = ((f32[16,8]), f32[4,8], u32[]) reduce-scatter-start(%p), channel_id=1, {scatter}
  ROOT %done = f32[4,8] reduce-scatter-done(%start)"""
    assert collectives(program(sugar), MODEL) == rows


def test_a_collective_repeated_in_a_tpus_fusions_counts_once():
    gather = (
        "all-gather(%x), channel_id=16, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, "
        'use_global_device_ids=true, frontend_attributes={chain_id="0"}'
    )
    fusions = f"""
%start_fusion (x: f32[16,8]) -> (f32[16,8], f32[64,8], u32[]) {{
  %x = f32[16,8]{{1,0:T(8,128)}} parameter(0)
  %g = f32[64,8]{{1,0:T(8,128)}} {gather}
  ROOT %c = (f32[16,8], f32[64,8], u32[]) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}}

%step_fusion (x: f32[16,8], y: f32[64,8], w: f32[8,8]) -> (f32[16,8], f32[64,8]) {{
  %x = f32[16,8]{{1,0:T(8,128)}} parameter(0)
  %y = f32[64,8]{{1,0:T(8,128)}} parameter(1)
  %w = f32[8,8]{{1,0:T(8,128)}} parameter(2)
  %g = f32[64,8]{{1,0:T(8,128)}} {gather}
  %m = f32[16,8]{{1,0:T(8,128)}} convolution(%x, %w), dim_labels=bf_io->bf
  ROOT %t = (f32[16,8], f32[64,8]) tuple(%m, %g)
}}

%done_fusion (x: f32[16,8], y: f32[64,8]) -> f32[64,8] {{
  %x = f32[16,8]{{1,0:T(8,128)}} parameter(0)
  %y = f32[64,8]{{1,0:T(8,128)}} parameter(1)
  %g = f32[64,8]{{1,0:T(8,128)}} {gather}
  ROOT %c = f32[64,8] custom-call(%x, %y, %g), custom_call_target="AsyncCollectiveDone"
}}
"""
    body = """
  %s = (f32[16,8], f32[64,8], u32[]) fusion(%p), kind=kCustom, calls=%start_fusion
  %f = (f32[16,8], f32[64,8]) fusion(%s), kind=kOutput, calls=%step_fusion
  ROOT %d = f32[64,8] fusion(%f), kind=kCustom, calls=%done_fusion"""
    assert collectives(program(body, fusions), MODEL) == (
        Collective("all-gather", ("data",), 4, 1, 4 * BYTES, 3 * BYTES),
    )


def test_tpu_s_fused_reduce_and_slice_is_a_reduce_scatter():
    fusion = f"""
%all-reduce-scatter.1.clone (x: f32[16,8]) -> f32[4,8] {{
  %x = f32[16,8] parameter(0)
  %r = f32[16,8] all-reduce(%x), channel_id=12, replica_groups={{{{0,2,4,6}},{{1,3,5,7}}}}, {REDUCE}
  %i = u32[] constant(0)
  ROOT %d = f32[4,8] dynamic-slice(%r, %i, %i), dynamic_slice_sizes={{4,8}}
}}
"""
    body = "  ROOT %f = f32[4,8] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1.clone"
    assert collectives(program(body, fusion), MODEL) == (
        Collective("reduce-scatter", ("data",), 4, 1, BYTES, BYTES * 3 // 4),
    )


def test_a_ragged_all_to_all_counts_the_array_it_sends():
    offsets = "".join(f"  %o{i} = s32[4] constant({{0, 4, 8, 12}})\n" for i in range(4))
    body = f"""{offsets}  ROOT %r = f32[16,8] ragged-all-to-all(%p, %p, %o0, %o1, %o2, %o3), channel_id=1, \
replica_groups=[2,4]<=[4,2]T(1,0)"""
    assert collectives(program(body), MODEL) == (
        Collective("ragged-all-to-all", ("data",), 4, 1, BYTES, BYTES * 3 // 4),
    )


def test_a_program_without_collectives_or_on_one_device_has_none():
    assert collectives(program("  ROOT %n = f32[16,8] negate(%p)"), MODEL) == ()
    alone = program(f"  ROOT %r = f32[16,8] all-reduce(%p), replica_groups={{}}, {REDUCE}", header="x=1")
    assert collectives(alone, {"data": 1}) == ()
