"""Remat keeps the numbers, keeps less for the backward pass, and cuts programs and loops where that holds least."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.rematted import (
    ARRAY,
    LAYERS,
    X,
    chain,
    flat,
    gradients,
    kept,
    layer,
    looped,
    products,
    same,
    scanned,
    transformer,
    unrolled,
    weights,
)
from support.thinned import thinned

from jaxshard_magic.gradients.remat import remat
from jaxshard_magic.gradients.segments import best_segmentations, costs
from jaxshard_magic.program.ir import Program


@pytest.mark.parametrize(
    ("loss", "how"),
    thinned(
        [(unrolled, "2"), (unrolled, "full"), (unrolled, "attention|mlp"), (scanned, "2"), (scanned, "dots")],
        [(scanned, "2")],
    ),
)
def test_a_transformer_with_dropout_has_the_same_loss_outputs_and_gradients(loss, how):
    closed, leaves = transformer(loss)
    assert kept(same(closed, how, leaves).closed) < kept(closed)


def test_cuts_are_where_the_backward_passes_hold_least():
    """A segment of m layers holds 2m - 1 arrays inside and hands on 1. With 5 arrays at once the segments may have
    3, 2, 2 and 1 layers, together just the 8 there are (the first holds 5 inside, the second 1 + 3, the third 2 + 3,
    the last 3 + 1); with 4 arrays 2, 2, 1 and 1."""
    program = Program(flat(chain, weights(), X)[0])
    found = costs(program, program.top)
    cuts = best_segmentations(found, 0, len(found.own), 4)
    assert found.residual_bytes(0, len(found.own)) == cuts[0].peak == 15 * ARRAY
    assert [len(cut.segments) for cut in cuts] == [1, 2, 3, 4]
    assert cuts[3].peak == 5 * ARRAY
    starts, stops = zip(*cuts[3].segments, strict=True)
    assert (0, *stops) == (*starts, len(found.own))


def test_what_crosses_and_what_is_inside_of_the_last_segment_is_all_that_is_kept():
    closed, _ = flat(chain, weights(), X)
    assert kept(closed) == 15 * ARRAY
    assert kept(remat(closed, "4").closed) <= 5 * ARRAY
    assert kept(remat(closed, "1").closed) == 0


def test_all_segments_but_the_last_are_done_again():
    closed, leaves = flat(chain, weights(), X)
    assert products(closed) == 3 * LAYERS
    assert products(remat(closed, "1").closed) == 4 * LAYERS
    assert same(closed, "1", leaves).block_count == 1
    found = remat(closed, "2")
    again = products(found.closed) - products(closed)
    assert found.block_count == 1 and 0 < again < LAYERS
    assert f"{100 * again // LAYERS} %" in found.note


def test_a_loop_over_layers_is_cut_into_blocks_of_trips():
    """Of 8 trips in 4 blocks 4 inputs are kept in place of 8 inputs and 8 cosines, and the weights in another shape."""
    closed, leaves = flat(looped, jnp.stack(weights()), X)
    found = same(closed, "4", leaves)
    assert kept(closed) == 16 * ARRAY
    assert kept(found.closed) == 4 * ARRAY + leaves[0].nbytes
    assert products(found.closed) == 4 * LAYERS
    assert found.note == "the loop of 8 trips in 4 segments"


def test_a_number_that_does_not_divide_the_trips_gives_the_next_that_does():
    closed, _ = flat(looped, jnp.stack(weights()), X)
    assert remat(closed, "5").note == "the loop of 8 trips in 4 segments (5 does not divide 8)"


def test_a_loop_in_reverse_that_gives_every_trips_result_is_cut_alike():
    def loss(ws, x):
        x, sums = lax.scan(lambda x, w: (layer(w, x), x.sum()), x, ws, reverse=True)
        return (x**2).sum() + (sums * jnp.arange(LAYERS)).sum(), sums

    closed, leaves = flat(loss, jnp.stack(weights()), X)
    assert kept(same(closed, "2", leaves).closed) < kept(closed)


@pytest.mark.parametrize("how", ["2", "full", "layer"])
def test_loops_in_loops_have_the_same_gradients(how):
    def loss(ws, xs):
        def time(carry, x):
            return lax.scan(lambda h, w: (layer(w, h), None), carry + x, ws)[0], None

        return lax.scan(time, jnp.zeros_like(xs[0]), xs)[0].sum()

    closed, leaves = flat(loss, jnp.stack(weights()[:3]), jnp.stack([X, 2 * X]))
    assert kept(same(closed, how, leaves).closed) < kept(closed)


@pytest.mark.parametrize("how", ["4", "full"])
def test_a_compiled_loop_has_smaller_temporaries(how):
    closed, leaves = flat(looped, jnp.stack(weights()), jnp.concatenate([X] * 8))
    sizes = []
    for c in (closed, remat(closed, how).closed):
        analysis = jax.jit(gradients(c)).lower(*leaves).compile().memory_analysis()
        assert analysis is not None
        sizes.append(analysis.temp_size_in_bytes)
    assert sizes[1] < 0.75 * sizes[0]
