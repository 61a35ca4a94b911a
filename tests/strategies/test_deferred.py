"""Gradients that a loop adds up are reduced between devices once, after it: the plain numbers, and fewer bytes."""

import functools
from collections import Counter
from math import prod

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from support.deferring import (
    AG,
    AR,
    EXAMPLES,
    F32,
    HIDDEN,
    LAYERS,
    RS,
    TRIPS,
    VOCAB,
    WIDTH,
    accumulating,
    deferred,
    descend,
    halves,
    held,
    moved,
    network,
    ran,
    reductions,
    same,
)
from support.thinned import thinned

import jaxshard_magic
from jaxshard_magic.analysis.collectives import collectives
from jaxshard_magic.strategies.footprint import footprint
from jaxshard_magic.strategies.planned_collectives import planned_collectives
from jaxshard_magic.strategies.sharded_lowering import ShardedLowering

MESHES = {"dp": "data=8", "fsdp": "data=8", "fsdp+tp": "data=4 model=2"}


def swapped(x, shards=8):
    """A part of every shard's own examples in each microbatch."""
    x = x.reshape(shards, TRIPS, -1, *x.shape[1:]).swapaxes(0, 1)
    return x.reshape(TRIPS, -1, *x.shape[3:])


@functools.cache
def accumulated(scanned):
    """The step of `network` over microbatches, its arguments, and what it gives on one device."""
    loss, params, batch = network(scanned)
    step = accumulating(loss, swapped if scanned else halves)
    return step, params, batch, jax.jit(step)(params, batch)


def of_blocks(count, size, scanned):
    """How often which sizes are reduced in one pass over the layers, all together (True) or one by one."""
    return {LAYERS * size: count} if scanned else {size: LAYERS * count}


def expected_once(strategy, scanned):
    """Each parameter once, as large as it is on a device that holds it whole or its tensor parallel part; the loss,
    a number. Only what is too small to be stored in shares stays whole on every device."""
    cut = 2 if "tp" in strategy else 1
    whole = {"embed": VOCAB * WIDTH, "head": WIDTH * VOCAB}
    weights = [F32 * n // cut for n in whole.values()]
    kind = RS if "fsdp" in strategy else AR
    out = Counter({(AR, F32): 1})
    for size in weights:
        out[kind, size] += 1
    for size, n in of_blocks(2, F32 * WIDTH * HIDDEN // cut, scanned).items():
        out[kind, size] += n
    for size, n in of_blocks(1, F32 * HIDDEN // cut, scanned).items():
        out[AR, size] += n
    return out


@pytest.mark.parametrize(
    ("strategy", "scanned"),
    thinned(
        [("dp", False), ("fsdp", False), ("fsdp", True), ("fsdp+tp", True)],
        [("fsdp+tp", True)],
    ),
)
def test_each_weights_gradient_is_reduced_once_per_step(strategy, scanned):
    step, params, batch, want = accumulated(scanned)
    entry, got = ran(step, strategy, MESHES[strategy], "once", params, batch)
    same(got, want)
    assert reductions(entry) == expected_once(strategy, scanned)
    assert deferred(held(entry)) == len(jax.tree.leaves(params))


def test_each_reduces_at_every_trip():
    step, params, batch, _ = accumulated(True)
    entry, _ = ran(step, "dp", "data=8", "each", params, batch)
    layer, whole = WIDTH * HIDDEN * F32, WIDTH * VOCAB * F32
    per_trip = {layer: 2 * LAYERS, HIDDEN * F32: LAYERS, whole: 2, F32: 1}
    assert reductions(entry) == Counter({(AR, b): TRIPS * n for b, n in per_trip.items()})
    assert deferred(held(entry)) == 0


def test_weights_can_be_gathered_once_for_all_microbatches():
    step, params, batch, want = accumulated(True)
    entry, got = ran(step, "fsdp", "data=8", "once-gathered", params, batch)
    same(got, want)
    stacked, whole = LAYERS * WIDTH * HIDDEN * F32, WIDTH * VOCAB * F32
    gathers = {(AG, stacked): 2, (AG, whole): 2}
    assert {k: n for k, n in moved(entry).items() if k[0] == AG} == gathers
    assert Counter((m.kind, m.bytes) for m in planned_collectives(held(entry)) if m.kind == AG) == gathers
    assert footprint(held(entry)).temporaries > 2 * stacked + 2 * whole
    assert reductions(entry) == expected_once("fsdp", True)


def test_over_several_batch_axes_each_reduces_what_the_other_left():
    step, params, batch, want = accumulated(True)
    entry, got = ran(step, "dp+fsdp+tp", "data=2 fsdp=2 model=2", "once", params, batch)
    same(got, want)
    sizes = {LAYERS * WIDTH * HIDDEN * F32 // 2: 2, WIDTH * VOCAB * F32 // 2: 2}
    found = collectives(entry.compiled.as_text(), {"data": 2, "fsdp": 2, "model": 2})
    scattered = {c.bytes: c.count for c in found if c.kind == RS and c.axes == ("fsdp",)}
    summed = {c.bytes: c.count for c in found if c.kind == AR and c.axes == ("data",)}
    assert scattered == sizes
    assert summed == {b // 2: n for b, n in sizes.items()}


@pytest.mark.ci
def test_a_gradient_keeps_its_line_its_name_and_its_phase():
    step, params, batch, _ = accumulated(True)

    def told(reduce):
        run = jaxshard_magic.shard(step, "fsdp", mesh=jaxshard_magic.mesh("data=8"), reduce=reduce)
        run.prepare(params, batch)
        found = [c for c in run.report().collectives or () if c.kind in (AR, RS) and c.bytes > F32]
        return {(c.source, c.phase, c.what) for c in found}

    once = told("once")
    assert once == told("each")
    assert {phase for _, phase, _ in once} == {"backward"}
    assert ('x = params["embed"][batch["token"]]', "backward", "gradient of params.embed") in once


@pytest.mark.ci
@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
def test_a_step_whose_loops_add_no_gradients_up_is_the_same_program(scanned):
    loss, params, batch = network(scanned)
    entry, _ = ran(lambda p, b: descend(p, jax.grad(loss)(p, b)), "fsdp", "data=8", "each", params, batch)
    layout = held(entry).layout
    inputs = layout.program.closed.in_avals
    each, once = (ShardedLowering(layout, reduce=how) for how in ("each", "once-gathered"))
    assert deferred(once) == 0
    assert jax.jit(each.__call__).lower(*inputs).as_text() == jax.jit(once.__call__).lower(*inputs).as_text()


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(nn.tanh(nn.Dense(HIDDEN)(x)))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.tanh(self.up(x)))


def linen(x):
    module = Linen()
    return module.init(jax.random.key(0), x), module.apply


def nnx_split(_x):
    graph, params = nnx.split(Nnx(nnx.Rngs(0)))
    return params, lambda params, x: nnx.merge(graph, params)(x)


@pytest.mark.ci
@pytest.mark.parametrize("library", [linen, nnx_split])
def test_flax_modules_are_reduced_once_per_step(library):
    batch = {"x": jax.random.normal(jax.random.key(1), (EXAMPLES, WIDTH))}
    params, call = library(batch["x"])
    step = accumulating(lambda params, piece: jnp.mean((call(params, piece["x"]) - 1) ** 2))
    entry, got = ran(step, "fsdp", "data=8", "once", params, batch)
    same(got, jax.jit(step)(params, batch))
    weights = Counter((RS if x.ndim > 1 else AR, F32 * prod(x.shape)) for x in jax.tree.leaves(params))
    assert reductions(entry) == weights + Counter({(AR, F32): 1})
