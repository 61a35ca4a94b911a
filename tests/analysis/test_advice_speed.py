"""Advice on speed, memory and the program: each rule fires where it should and is silent where it should be."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.advised import MATMUL, batch, case, mesh, told

import jaxshard_magic
from jaxshard_magic.analysis.advice import Case, advise, by_level
from jaxshard_magic.analysis.roofline import roofline
from jaxshard_magic.hardware import chip
from jaxshard_magic.notebook.options import parse, with_strategy
from jaxshard_magic.plan import DeviceWork
from jaxshard_magic.report import Advice, Collective, DeviceMemory, Leaf, Memory

GIB = 2**30


def leaf(path: str, nbytes: int, spec=(None,), role: str = "params", parts: int = 1) -> Leaf:
    return Leaf(path, role, (nbytes // 4,), "float32", spec, nbytes, nbytes // parts, "")


def sent(kind: str, nbytes: int, *axes: str, group: int = 8, line: int | None = None) -> Collective:
    return Collective(kind, axes, group, 1, nbytes, nbytes, line=line)


def memory(peak: int | None, limit: int | None) -> Memory:
    return Memory((DeviceMemory(0, 0, 0, 0, 0, None, peak, limit),), "compiled")


def test_communication_above_a_fifth_of_the_step_warns_and_says_from_where():
    # 0.9 of 180 GB/s: 900 MB take 5.56 ms; the products take 5.08 ms at the peak, 5.34 at 0.95 of it.
    busy = told(
        case({"data": 256}, "v5e", collectives=[sent("all-reduce", 900 * 10**6, "data", group=256, line=12)]),
        "communication",
    )
    assert busy is not None and busy.level == "warning"
    assert "51% of the predicted step is communication: 5.56\u202fms of 10.9\u202fms" in busy.message
    assert "most by all-reduces over data" in busy.message and "line 12" in busy.message
    assert "of 512 examples, where there are 64, it would be about 11%." in busy.message  # 5.56 of 48.3 ms
    assert busy.fix is None and busy.saves == pytest.approx(0.31, abs=0.01)
    quiet = case({"data": 256}, "v5e", collectives=[sent("all-reduce", 10**8, "data", group=256)])
    assert told(quiet, "communication") is None
    assert told(case({"data": 8}, None, collectives=[sent("all-reduce", 10**12, "data")]), "communication") is None


def summing(axes: dict[str, int], on: str) -> Case:
    """A step of tensor parallelism whose sums go over `model`."""
    return case(axes, on, collectives=[sent("all-reduce", 10**6, "model")], strategy="tp", jobs={"tp": ("model",)})


def test_tensor_parallelism_across_nodes_is_told_to_move_to_the_inner_axis():
    warned = told(summing({"model": 2, "data": 8}, "h100"), "slow-tp")  # the two of a group lie on two nodes
    assert warned is not None and "50\u202fGB/s" in warned.message and "450\u202fGB/s" in warned.message
    assert warned.fix == '--mesh "data=8 model=2"'
    assert told(summing({"data": 8, "model": 2}, "h100"), "slow-tp") is None
    assert told(summing({"data": 2, "model": 16}, "v100"), "slow-tp") is not None  # wider than a node
    assert told(summing({"data": 2, "model": 8}, "h100"), "slow-tp") is None


def test_fsdp_across_slow_links_is_told_to_stay_inside_a_node():
    made = case({"data": 16}, "v100", collectives=[sent("all-gather", 10**6, "data")], strategy="fsdp")
    warned = told(made, "slow-fsdp")
    assert warned is not None and warned.fix == '%%shard dp+fsdp --mesh "data=2 fsdp=8"'
    inside = case({"data": 8}, "v100", collectives=[sent("all-gather", 10**6, "data")], strategy="fsdp")
    assert told(inside, "slow-fsdp") is None


def test_an_axis_that_dominates_is_told_with_the_mesh_that_helps():
    axes = {"data": 4, "model": 4}
    moved = [sent("all-reduce", 10**9, "model", group=4), sent("all-reduce", 10**7, "data", group=4)]
    made = case(axes, "v5e", collectives=moved, strategy="tp", jobs={"dp": ("data",), "tp": ("model",)})
    warned = told(made, "wide-axis")
    assert warned is not None and warned.fix == '--mesh "data=8 model=2"'
    # 1 GB over 0.9 of 45 GB/s is 24.7 ms; half the activations and 1/2 in the place of 3/4: a third.
    assert "24.7\u202fms" in warned.message and "8.23\u202fms" in warned.message
    balanced = case(
        axes, "v5e", collectives=[sent("all-reduce", 10**6, "model")], strategy="tp", jobs={"tp": ("model",)}
    )
    assert told(balanced, "wide-axis") is None


def test_what_two_hints_say_of_the_batch_is_one_number():
    waiting = case(
        {"data": 8},
        "v5e",
        collectives=[sent("all-reduce", 300 * 10**6, "data")],
        shares=[DeviceWork(60 * 10**9, 10**9, "bfloat16", weights=10**9)],
    )
    said = [told(waiting, code).message for code in ("communication", "small-batch")]
    assert len(re.findall(r"of ([\d,]+) examples, where", said[0])) == 1
    assert "a larger batch would keep it busy" in said[1]


def test_hints_of_a_level_come_in_the_order_of_what_they_save():
    hints = [
        Advice("a", "info", ""),
        Advice("b", "warning", "", None, 0.1),
        Advice("c", "warning", "", None, 0.4),
    ]
    hints += [Advice("d", "info", "", None, 0.01), Advice("e", "error", "")]
    assert [each.code for each in by_level(hints)] == ["e", "c", "b", "d", "a"]


def test_of_hints_of_a_level_those_with_a_cure_come_first():
    hints = [
        Advice("told", "info", "", None, 0.9),
        Advice("cure", "info", "", "--donate", 0.1),
        Advice("no figure", "info", "", "--rule"),
        Advice("warned", "warning", ""),
        Advice("better cure", "info", "", "--remat", 0.5),
    ]
    assert [each.code for each in by_level(hints)] == ["warned", "better cure", "cure", "told", "no figure"]


def test_a_batch_too_small_to_keep_the_chip_busy():
    # v5e needs about 240 FLOPs a byte; 60 a byte is a quarter of that.
    weights = DeviceWork(60 * 10**9, 10**9, "bfloat16", weights=10**9)
    small = case({"data": 8}, "v5e", shares=[weights])
    warned = told(small, "small-batch")
    assert warned is not None and "60 FLOPs for each byte" in warned.message
    assert re.search("has 8 of the 64 examples: a batch of (256|512) would keep it busy", warned.message)
    assert warned.fix is None
    assert told(case({"data": 8}, "v5e"), "small-batch") is None
    assert told(case({"data": 8}, None, shares=[DeviceWork(1, 10**9, "bfloat16")]), "small-batch") is None


def test_no_larger_batch_is_advised_where_its_own_bytes_are_the_bound():
    # 60 FLOPs for each byte of the scores, whatever the batch.
    scores = DeviceWork(60 * 10**9, 10**9, "bfloat16", weights=10**6)
    warned = told(case({"data": 8}, "v5e", shares=[scores]), "small-batch")
    assert warned is not None and warned.fix is None
    assert "100% of the bytes grow with the batch" in warned.message


def test_float32_matmuls_are_told_where_a_chip_is_known():
    wide = DeviceWork(10**12, 10**6, "float32")
    gpu = told(case({"data": 8}, "h100", shares=[wide]), "float32")
    assert gpu is not None and "times as fast on" in gpu.message
    tpu = told(case({"data": 8}, "v5e", shares=[wide]), "float32")
    assert tpu is not None and "times as fast" not in tpu.message  # a TPU multiplies float32 in bfloat16
    assert told(case({"data": 8}, "h100", shares=[MATMUL]), "float32") is None
    assert told(case({"data": 8}, None, shares=[wide]), "float32") is None


def test_a_step_that_does_not_fit_is_told_what_cutting_its_state_saves():
    axes = {"data": 8}
    leaves = (
        leaf("w", 4 * GIB),
        leaf("mu", 4 * GIB, role="optimizer"),
        leaf("nu", 4 * GIB, role="optimizer"),
        batch(axes),
    )
    told_of = told(case(axes, leaves=leaves, memory=memory(18 * GIB, 16 * GIB)), "does-not-fit")
    assert told_of is not None and told_of.level == "error"
    assert "needs 18.0\u202fGiB on a device that has 16\u202fGiB: 2.00\u202fGiB too much" in told_of.message
    assert (
        "take off up to 14.0\u202fGiB: it may be enough" in told_of.message
    )  # 7/8 of the parameters, gradients and two moments
    assert told_of.fix == "%%shard fsdp"
    with_strategy(parse(told_of.fix.removeprefix("%%shard")))
    cut = tuple(leaf(x.path, x.bytes, ("data",), x.role, 8) for x in leaves[:3])
    assert told(case(axes, leaves=(*cut, batch(axes)), memory=memory(18 * GIB, 16 * GIB)), "does-not-fit").fix is None
    kept = case(axes, leaves=(*cut, batch(axes)), memory=memory(18 * GIB, 16 * GIB), undonated_state=cut)
    assert told(kept, "does-not-fit").fix == "--donate"
    for fits in (memory(15 * GIB, 16 * GIB), memory(18 * GIB, None), memory(None, 16 * GIB), None):
        assert told(case(axes, leaves=leaves, memory=fits), "does-not-fit") is None


def test_parameters_that_leave_no_room_for_adam_are_told_before_they_are_trained():
    axes = {"data": 8}
    fits = memory(6 * GIB, 16 * GIB)
    warned = told(case(axes, leaves=(leaf("w", 5 * GIB), batch(axes)), memory=fits), "replicated-state")
    assert warned is not None and "20.0\u202fGiB" in warned.message and warned.fix == "%%shard fsdp"
    small = case(axes, leaves=(leaf("w", 3 * GIB), batch(axes)), memory=fits)
    assert told(small, "replicated-state") is None
    cut = case(axes, leaves=(leaf("w", 5 * GIB, ("data",), parts=8), batch(axes)), memory=fits)
    assert told(cut, "replicated-state") is None


def test_a_grown_batch_is_told_with_its_learning_rate():
    grown = told(case({"data": 8}, examples=256, examples_before=64), "learning-rate")
    assert grown is not None and "from 64 to 256" in grown.message
    assert "4 times as large for SGD, 2 times for Adam" in grown.message
    for now, before in ((64, 64), (32, 64), (64, None), (None, 64)):
        assert told(case({"data": 8}, examples=now, examples_before=before), "learning-rate") is None


def step_with(inside):
    def train_step(w, x):
        loss, grad = jax.value_and_grad(lambda w: inside(jnp.mean((x @ w) ** 2)))(w)
        return w - 0.1 * grad, loss

    step = jaxshard_magic.shard(train_step, "dp", mesh="data=8")
    step.prepare(jnp.ones((16, 16)), jnp.ones((8, 16)))
    return [a for a in step.report().advice if a.code == "host-call"]


def test_a_call_to_python_from_inside_the_step_is_told_with_its_line():
    def printed(x):
        jax.debug.callback(lambda value: None, x)
        return x

    line = printed.__code__.co_firstlineno + 1
    (warned,) = step_with(printed)
    assert warned.level == "warning" and f"line {line}" in warned.message
    assert step_with(lambda x: x) == []


@pytest.mark.parametrize("on", ["v5e", "h100", "t4", "v2", "tpu7x"])
def test_every_rule_holds_on_steps_without_anything(on):
    empty = Case((), mesh(data=1), "dp", roof=roofline(chip(on), {"data": 1}, (), (), ()))
    assert advise(empty) == ()


def gather(nbytes: int, **more) -> Collective:
    return Collective("all-gather", ("model",), 4, 16, nbytes, nbytes, phase="backward", **more)


def test_a_gather_that_is_larger_than_any_weight_warns_with_what_it_is():
    made = case({"model": 4}, collectives=[gather(27 * GIB, what="gradient of params.up", line=7), gather(GIB)])
    assert told(made, "large-gather") is None, "weights are not known"
    found = told(replace(made, largest_weight=2 * GIB), "large-gather")
    assert "27.0\u202fGiB whole on each device, 16 times a step: gradient of params.up, line 7" in found.message
    assert "reads is 2.00\u202fGiB" in found.message and found.level == "warning"
    assert told(replace(made, largest_weight=27 * GIB), "large-gather") is None
    small = case({"model": 4}, collectives=[gather(2**20)], largest_weight=4)
    assert told(small, "large-gather") is None, "too small for a word"


def test_of_stacked_weights_a_layer_counts_and_of_a_step_without_loops_each_whole():
    def step(params, x):
        def loss(params):
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x @ params["first"], params["layers"])
            return (h**2).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    params = {"first": jnp.ones((16, 32)), "layers": jnp.ones((8, 32, 32), jnp.bfloat16)}
    sharded = jaxshard_magic.shard(step, "fsdp", mesh="data=2")
    sharded.prepare(params, jnp.ones((8, 16)))
    assert sharded.entry.plan.largest_weight == max(16 * 32 * 4, 32 * 32 * 2)


def test_activations_made_whole_by_a_constraint_are_found_and_no_others():
    def step(w, x, whole):
        def loss(w):
            h = jnp.tanh(x @ w)
            h = jax.lax.with_sharding_constraint(h, P()) if whole else h
            return (h * jnp.roll(h, 1, 0)).mean()

        return w - 0.1 * jax.grad(loss)(w)

    w, x = jnp.ones((64, 256)), jnp.ones((2**15, 64))
    with jax.set_mesh(jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))):
        for whole in (True, False):
            sharded = jaxshard_magic.shard(partial(step, whole=whole), "dp", mesh="data=4")
            sharded.prepare(w, x)
            found = [a.message for a in sharded.report().advice if a.code == "large-gather"]
            assert len(found) == whole
            for message in found:  # the line that holds the activations whole
                assert (
                    "32.0\u202fMiB whole on each device, once a step: activation f32[8192,256], test_advice_speed.py, "
                    "line " in message
                )
