"""Every piece of advice fires where it should, with a fix that holds, and stays silent where it should."""

import ast
import math
from dataclasses import replace

from jaxshard_magic.analysis.advice import Case
from jaxshard_magic.analysis.advice import advise as advice_on
from jaxshard_magic.analysis.collectives import module_collectives
from jaxshard_magic.analysis.hlo import parse_module
from jaxshard_magic.report import Advice, Leaf, MeshInfo

MIB = 2**20


def mesh(**axes: int) -> MeshInfo:
    return MeshInfo(axes, "cpu", "cpu", "simulated", tuple(range(math.prod(axes.values()))), 1)


def leaf(path, shape, spec=None, role="params", axes=None, wanted=(), why="a copy on every device") -> Leaf:
    """A float32 leaf; what it loses is what dividing it over `wanted` would have saved."""
    spec = spec or (None,) * len(shape)
    names = [a for e in spec for a in ((e,) if isinstance(e, str) else e or ())]
    whole = 4 * math.prod(shape)
    held = whole // math.prod((axes or {})[a] for a in names)
    lost = held - held // math.prod((axes or {})[a] for a in wanted) if wanted else 0
    return Leaf(path, role, shape, "float32", spec, whole, held, why, wanted, lost)


def pasteable(fix: str) -> bool:
    """Is it options of a line, a line of a magic, or Python, and no sentence?"""
    if fix.startswith(("--", "%")):
        return True
    try:
        return any(isinstance(node, ast.Assign) for node in ast.parse(fix).body)
    except SyntaxError:
        return False


def advise(leaves, mesh, strategy, **more) -> tuple[Advice, ...]:
    told = advice_on(Case(leaves, mesh, strategy, **more))
    assert all(a.fix is None or pasteable(a.fix) for a in told)
    return told


def codes(advice) -> list[str]:
    return [a.code for a in advice]


MESH = mesh(data=4, model=2)
AXES = MESH.axes
BATCH = leaf("batch.x", (32, 128), ("data", None), "batch", AXES)


def test_a_step_where_all_is_cut_as_planned_gets_no_advice():
    cut = leaf("params.w", (1024, 1024), ("data", "model"), axes=AXES)
    small = leaf("params.b", (1024,))
    assert advise([cut, small, BATCH], MESH, "fsdp+tp") == ()


def test_an_undivided_leaf_is_told_with_its_moments_and_a_rule_that_divides():
    shape, spec = (50257, 768), (None, "data")
    wte = [
        leaf(f"state.{where}wte.embedding", shape, spec, role, AXES, ("model",))
        for where, role in [
            ("params.", "params"),
            ("opt_state.0.mu.", "optimizer"),
            ("opt_state.0.nu.", "optimizer"),
        ]
    ]
    other = leaf("state.params.wpe.embedding", (1024, 768), (None, ("data", "model")), axes=AXES)
    # 50257 * 768 * 4 bytes over data=4, half of it for want of model, three times: 55.2 MiB.
    assert round(3 * 50257 * 768 * 4 / 4 / 2 / MIB, 1) == 55.2
    assert advise([*wte, other, BATCH], MESH, "fsdp+tp") == (
        Advice(
            "not-cut",
            "warning",
            "state.params.wte.embedding is not cut over model: 50257 does not divide by 2; 50258 would. "
            "With 2 more like it every device keeps 55.2\u202fMiB more than planned.",
            "--rule \"wte.embedding$=P(None,('data','model'))\"",
        ),
    )


def test_the_rule_matches_the_leaves_it_is_for_and_no_others():
    leaves = [
        leaf("a.w", (7, 64), axes=AXES, wanted=("model",)),
        leaf("a.bw", (7, 63), axes=AXES, wanted=("data",)),
    ]
    assert "--rule \"(^|[.])w$=P(None,'model')\"" in [a.fix for a in advise(leaves, MESH, "tp")]
    twins = [
        leaf("a.w", (7, 64), axes=AXES, wanted=("model",)),
        leaf("b.v", (7, 64), axes=AXES, wanted=("model",)),
        leaf("b.w", (7, 9), axes=AXES),
    ]
    (told,) = advise(twins, MESH, "tp")
    assert told.fix == "--rule \"^a.w$|^b.v$=P(None,'model')\""


def test_one_axis_of_two_is_better_than_none():
    stuck = leaf("w", (6, 9), axes=AXES, wanted=("data", "model"))
    (told,) = advise([stuck], MESH, "fsdp")
    assert told.fix == "--rule \"w$=P('model',None)\""


def test_no_devices_are_given_up_for_a_leaf_that_does_not_divide():
    axes = {"data": 8}
    stuck = leaf("w", (30, 5), axes=axes, wanted=("data",))
    batch = leaf("batch", (32,), ("data",), "batch", axes)
    (told,) = advise([stuck, batch], mesh(data=8), "fsdp")
    # data=2 would divide 30 and leave six devices out; 30 -> 32 grows least.
    assert told.fix is None and "30 does not divide by 8; 32 would." in told.message


def test_the_layers_of_a_scan_are_not_offered_for_cutting():
    stuck = leaf("blocks.w", (4, 1001, 3001), axes=AXES, wanted=("data",))
    (told,) = advise([stuck], MESH, "fsdp")
    # 1001 -> 1004 grows by 0.3%, 3001 -> 3004 by 0.1%.
    assert told.fix is None and "3001 does not divide by 4; 3004 would." in told.message


def test_a_dimension_that_would_grow_much_gets_another_mesh_of_as_many_devices():
    stuck = leaf("heads", (12, 5), axes={"data": 1, "model": 8}, wanted=("model",))
    batch = leaf("batch", (32,), ("data",), "batch", {"data": 1, "model": 8})
    # 12 -> 16 would grow by a third; 12 divides by 4, and 32 examples by data=2.
    (told,) = advise([stuck, batch], mesh(data=1, model=8), "tp")
    assert told.fix == '--mesh "data=2 model=4"'


def test_a_mesh_that_the_batch_does_not_divide_by_is_not_offered():
    axes = {"data": 1, "model": 8}
    stuck = leaf("heads", (12, 5), axes=axes, wanted=("model",))
    batch = leaf("batch", (33,), ("data",), "batch", axes)
    (told,) = advise([stuck, batch], mesh(**axes), "tp")
    assert told.fix is None and "12 does not divide by 8; 16 would." in told.message


def test_what_hardly_costs_anything_is_no_warning():
    big = leaf("w", (4096, 4096), ("data", None), axes=AXES)
    stuck = leaf("v", (129, 129), axes=AXES, wanted=("data",))
    (told,) = advise([big, stuck], MESH, "fsdp")
    assert stuck.lost < 0.01 * (big.bytes_per_device + stuck.bytes_per_device)
    assert told.level == "info"


def test_many_kinds_of_uncut_leaves_are_summed_up_after_the_largest_five():
    stuck = [leaf(f"w{i}", (201 + 2 * i, 203), axes=AXES, wanted=("model",)) for i in range(8)]
    told = advise(stuck, MESH, "tp")
    assert codes(told) == ["not-cut"] * 6
    assert [a.message.split()[0] for a in told[:5]] == ["w7", "w6", "w5", "w4", "w3"]
    lost = sum(leaf.lost for leaf in stuck[:3]) / 1024
    assert told[5] == Advice(
        "not-cut", "info", f"3 more leaves are not cut as planned, {lost:.3g}\u202fKiB more on every device."
    )


def test_an_idle_axis_is_given_to_the_batch_where_everything_still_divides():
    (told,) = advise([BATCH], MESH, "dp", idle_axes=("model",))
    assert told == Advice(
        "idle-axis", "warning", "Nothing uses model: 2 devices at a time do the same work.", "--mesh data=8"
    )


def test_an_idle_axis_is_dropped_where_the_batch_does_not_divide_further():
    batch = leaf("x", (12, 3), ("data", None), "batch", AXES)
    (told,) = advise([batch], MESH, "dp", idle_axes=("model",))
    assert told.fix == "--mesh data=4"


def test_an_idle_axis_takes_the_examples_where_none_does():
    cut = leaf("w", (64, 64), (None, "model"), axes=AXES)
    batch = leaf("x", (12, 3), role="batch")
    (told,) = advise([cut, batch], MESH, "tp", idle_axes=("data",))
    assert told.fix == "%%shard tp+dp@data"
    (told,) = advise([cut, leaf("batch.x", (12, 3), role="batch")], MESH, "spmd", idle_axes=("data",))
    assert told.fix == "--spec \"batch=P('data')\""


def test_what_a_step_closes_over_is_never_named_as_an_argument():
    cut, data = leaf("w", (64, 64), (None, "model"), axes=AXES), leaf("closure.0", (12, 3), role="batch")
    for strategy, jobs in (("spmd", {}), ("tp", {"tp": ("model",)}), ("fsdp+tp", {"tp": (), "fsdp": ()})):
        (told,) = advise([cut, data], MESH, strategy, idle_axes=("data",), jobs=jobs)
        assert told.fix == "--mesh model=2"
    (told,) = advise([cut, data], MESH, "dp", idle_axes=("data", "model"))
    assert told.fix is None


def test_an_argument_that_does_not_divide_is_not_offered_for_an_idle_axis():
    odd, even = leaf("ids", (7,), role="batch"), leaf("x", (12, 3), role="batch")
    (told,) = advise([odd, even], MESH, "spmd", idle_axes=("data",))
    assert told.fix == "--spec \"x=P('data')\""


def test_a_strategy_that_divides_examples_already_is_not_told_to():
    whole = leaf("x", (12, 3), role="batch")
    (told,) = advise([whole], MESH, "dp@model", idle_axes=("data",), jobs={"dp": ("model",)})
    assert told.fix == "--mesh model=2"


def test_a_data_set_that_the_step_closes_over_is_to_become_an_argument():
    cut, data = leaf("w", (512, 512), ("data", None), axes=AXES), leaf("closure.0", (1000, 512))
    (told,) = advise([cut, data, BATCH], MESH, "fsdp")
    assert told.fix is None
    assert told.message.endswith("The step closes over it: as an argument it can be cut.")


def test_a_large_leaf_left_whole_among_cut_ones_is_named_with_a_rule():
    cut = leaf("w", (512, 512), ("data", None), axes=AXES)
    whole = leaf("emb.table", (1000, 512))
    (told,) = advise([cut, whole, BATCH], MESH, "fsdp")
    assert told == Advice(
        "whole",
        "info",
        "emb.table lies whole on every device: a copy on every device. It takes 1.95\u202fMiB there.",
        "--rule \"table$=P('data',None)\"",
    )


def test_what_alike_leaves_take_is_told_of_all_together():
    cut = leaf("w", (512, 512), ("data", None), axes=AXES)
    alike = [leaf(f"{name}.table", (1000, 512)) for name in ("emb", "mu", "nu")]
    (told,) = advise([cut, *alike, BATCH], MESH, "fsdp")
    assert told.message.startswith("emb.table lies whole on every device: ")
    assert told.message.endswith("With 2 more like it, it takes 5.86\u202fMiB there.")  # 3 of 1000 x 512 x 4 B


def test_leaves_left_whole_on_purpose_are_not_named():
    whole, small = leaf("emb.table", (1000, 512)), leaf("bias", (512,))
    cut = leaf("w", (512, 512), ("data", None), axes=AXES)
    assert advise([whole, BATCH], MESH, "dp") == ()
    assert advise([cut, small, BATCH], MESH, "fsdp") == ()
    assert advise([cut, whole, BATCH], MESH, "fsdp", user_spec_paths={"emb.table"}) == ()


def on_stages(first: int, end: int, *args, **fields) -> Leaf:
    return replace(leaf(*args, axes={"pipe": end - first, "data": 2}, **fields), within={"pipe": (first, end)})


def test_an_array_on_one_stage_is_not_called_whole_on_each_device():
    pipe = mesh(pipe=4, data=2)
    table, head = (on_stages(s, s + 1, name, (1000, 512)) for s, name in ((0, "table"), (3, "head")))
    stack = on_stages(1, 3, "layers", (8, 512, 512), ("pipe", None, None))
    assert advise([table, stack, head, BATCH], pipe, "pp") == ()
    cut = on_stages(1, 2, "w", (512, 512), ("data", None))
    (told,) = advise([table, cut, BATCH], pipe, "pp+fsdp")
    assert told.message.startswith("table lies whole on every device of pipe=0: ")
    assert told.message.endswith(" It takes 1.95\u202fMiB there.")
    assert told.fix == "--rule \"table$=P('data',None)\""


def test_what_stages_lose_is_that_of_the_fullest_and_not_of_all_together():
    pipe = mesh(pipe=4, data=2)
    odd = [on_stages(s, s + 1, f"w{i}", (511, 511), wanted=("data",)) for i, s in enumerate((0, 1, 2, 2))]
    lost = 511 * 511 * 4 / 2  # of one leaf; stage 2 has two of them
    (told,) = advise([*odd, BATCH], pipe, "pp+fsdp")
    assert told.message == (
        "w0 is not cut over data: 511 does not divide by 2; 512 would. "
        f"With 3 more like it every device of pipe=0-2 keeps up to {2 * lost / 2**20:.3g}\u202fMiB more than planned."
    )
    assert told.fix is None


LOOP = """HloModule m, num_partitions=8

%body (c: f32[8]) -> f32[8] {
  %c = f32[8] parameter(0)
  ROOT %r = f32[8] all-reduce(%c), channel_id=1, replica_groups=[4,2]<=[8], to_apply=%s
}

%cond (d: f32[8]) -> pred[] {
  %d = f32[8] parameter(0)
  ROOT %t = pred[] custom-call(%d)
}

ENTRY %e (p: f32[8]) -> f32[8] {
  %p = f32[8] parameter(0)
  ROOT %w = f32[8] while(%p), condition=%cond, body=%body
}
"""


def test_collectives_in_a_loop_of_unknown_length_are_told():
    found = module_collectives(parse_module(LOOP), AXES)
    (told,) = advise([BATCH], MESH, "dp", hlo_collectives=found)
    assert told.code == "loop-length"
    assert told.message.startswith("A collective runs in a loop whose length is only known while it runs")
    known = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"3"}}')
    assert advise([BATCH], MESH, "dp", hlo_collectives=module_collectives(parse_module(known), AXES)) == ()


def test_warnings_come_before_what_is_only_worth_knowing():
    cut = leaf("w", (512, 512), ("data", None), axes=AXES)
    told = advise(
        [cut, leaf("emb", (1000, 512)), BATCH],
        MESH,
        "fsdp",
        idle_axes=("model",),
        hlo_collectives=module_collectives(parse_module(LOOP), AXES),
    )
    assert codes(told) == ["idle-axis", "whole", "loop-length"]


def test_state_that_lies_in_memory_twice_is_told_from_a_mebibyte():
    state = leaf("w", (1024, 512), ("data", None), axes=AXES)
    assert codes(advise([BATCH], MESH, "fsdp", undonated_state=[state])) == []
    (told,) = advise([BATCH], MESH, "fsdp", undonated_state=[state] * AXES["data"])
    assert (told.code, told.fix) == ("not-donated", "--donate")
    assert "2.00\u202fMiB more on every device" in told.message
