"""Remat of what a policy or a name picks, and what is left as its author wrote it."""

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr
from support.rematted import (
    ARRAY,
    LAYERS,
    LENGTH,
    MODEL,
    ROWS,
    WIDTH,
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

from jaxshard_magic.errors import ShardError
from jaxshard_magic.gradients.remat import remat
from jaxshard_magic.gradients.segments import costs, equation_residuals
from jaxshard_magic.program.ir import Program
from jaxshard_magic.program.source_lines import is_user_file


def checkpoints(closed: ClosedJaxpr) -> int:
    return sum(e.primitive.remat for e in Program(closed).equations)


def test_a_policy_wraps_each_trip_of_a_loop():
    closed, _ = flat(looped, jnp.stack(weights()), X)
    assert kept(remat(closed, "full").closed) == LAYERS * ARRAY  # the inputs
    assert kept(remat(closed, "dots").closed) == 2 * LAYERS * ARRAY  # the inputs and the products
    assert kept(remat(closed, "everything_saveable").closed) == kept(closed)
    assert remat(closed, "full").note == "full: 1 loop body"
    assert products(remat(closed, "dots").closed) == products(closed)


def test_dots_keeps_ragged_products_as_well():
    def layer(x, w):
        return jnp.tanh(jax.lax.ragged_dot(x, w, jnp.array([3, ROWS - 3]))), None

    experts = jnp.stack([jnp.stack(weights()), jnp.stack(weights())], 1)
    closed, _ = flat(lambda ws, x: jax.lax.scan(layer, x, ws)[0].sum(), experts, X)
    assert kept(remat(closed, "dots").closed) == kept(remat(closed, "full").closed) + LAYERS * ARRAY


def test_only_offload_needs_the_hosts_memory():
    closed, _ = flat(looped, jnp.stack(weights()), X)
    found = remat(closed, "offload")
    assert found.needs_host_memory and not remat(closed, "dots").needs_host_memory
    assert "host" in str(jax.make_jaxpr(gradients(found.closed))(*closed.in_avals))


@pytest.mark.parametrize("loss", [unrolled, scanned])
def test_an_expression_picks_the_functions_that_it_names(loss):
    """Attention has 6 matmuls, the MLP, which is a jit, 2; of both the last one's result is not needed again."""
    closed, _ = transformer(loss)
    again = {how: products(remat(closed, how).closed) - products(closed) for how in ("attention", "mlp")}
    assert again == {"attention": 2 * 5, "mlp": 2 * 1}


def test_each_call_of_a_function_in_a_python_loop_is_a_block():
    closed, _ = flat(chain, weights(), X)
    assert remat(closed, "layer").block_count == LAYERS
    assert kept(remat(closed, "layer").closed) == (LAYERS - 1) * ARRAY


def test_a_loop_that_a_name_covers_is_done_again_trip_by_trip():
    def layers(ws, x):
        return lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0]

    closed, _ = flat(lambda ws, x: (layers(ws, x) ** 2).sum(), jnp.stack(weights()), X)
    assert checkpoints(remat(closed, "layers").closed) == 1
    assert kept(remat(closed, "layers").closed) == (LAYERS + 1) * ARRAY


def test_a_value_with_a_name_is_computed_again_and_nothing_else_is():
    def loss(ws, x):
        for k, w in enumerate(ws):
            x = checkpoint_name(x @ w, f"hidden{k}") * jnp.sin(x @ w.T)
        return x.sum()

    closed, leaves = flat(loss, weights()[:3], X)
    found = same(closed, "hidden[01]", leaves)
    assert found.note == "values named hidden0, hidden1"
    assert products(found.closed) == products(closed) + 2
    assert kept(found.closed) == kept(closed) - 2 * ARRAY


@pytest.mark.ci
def test_modules_of_nnx_are_known_by_their_classes():
    class Attention(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.inner = nnx.MultiHeadAttention(2, MODEL, rngs=rngs, decode=False)

        def __call__(self, x):
            return self.inner(x)

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.attention = nnx.List([Attention(rngs) for _ in range(3)])
            self.out = nnx.Linear(MODEL, MODEL, rngs=rngs)

        def __call__(self, x):
            for attention in self.attention:
                x = x + attention(x)
            return self.out(nnx.relu(x))

    graph, state = nnx.split(Model(nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(1), (2, LENGTH, MODEL))
    closed, leaves = flat(lambda state, x: (nnx.merge(graph, state)(x) ** 2).mean(), state, x)
    assert same(closed, "^Attention$", leaves).block_count == 3
    assert remat(closed, "MultiHead").block_count == 3
    assert kept(remat(closed, "3").closed) < kept(closed)


@pytest.mark.ci
def test_modules_of_linen_are_known_by_their_scopes():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(MODEL)(nn.gelu(nn.Dense(2 * MODEL)(x)))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(3):
                x = Layer()(x)
            return nn.Dense(1)(x)

    model: Any = Model()
    x = jnp.ones((2, MODEL))
    params = model.init(jax.random.key(0), x)
    closed, leaves = flat(lambda params, x: (model.apply(params, x) ** 2).mean(), params, x)
    assert same(closed, "Layer_[01]", leaves).block_count == 2
    assert remat(closed, "Layer_2/Dense_0").block_count == 1


def test_remat_of_the_users_stays_and_gets_none_around_it():
    def loss(ws, x):
        for w in ws:
            x = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)(w, x)
        return x.sum()

    closed, _ = flat(loss, weights(), X)
    found = remat(closed, "full")
    assert (found.block_count, checkpoints(found.closed)) == (0, LAYERS)
    assert kept(found.closed) == kept(closed)
    assert "nothing changed" in found.note
    assert checkpoints(remat(closed, "2").closed) == LAYERS + 1


def test_a_print_is_not_seen_twice():
    def loss(ws, x):
        for w in ws:
            x = layer(w, x)
            jax.debug.print("{}", x.sum())
        return x.sum()

    closed, _ = flat(loss, weights(), X)
    jaxpr = jax.make_jaxpr(gradients(remat(closed, "4").closed))(*closed.in_avals)
    printed = [e for e in Program(jaxpr).equations if e.jaxpr_eqn.effects and not e.bodies]
    assert len(printed) == LAYERS


def test_a_cast_of_a_weight_crosses_at_no_cost():
    """bfloat16 weights and activations: of each layer the cosine and the input are kept, and nothing of the cast."""

    def loss(ws, x):
        ws = [w.astype(jnp.bfloat16) for w in ws]
        return chain(ws, x.astype(jnp.bfloat16)).astype(jnp.float32)

    closed, leaves = flat(loss, weights(), X)
    program = Program(closed)
    assert costs(program, program.top).residual_bytes(0, len(program.top.equations)) == 15 * ARRAY // 2
    assert [a.dtype for a in remat(closed, "3").closed.in_avals] == [w.dtype for w in leaves]


def test_what_no_gradient_flows_through_keeps_nothing():
    program = Program(flat(lambda x, k: (lax.stop_gradient(jnp.sin(x)) * k).sum(), X, jnp.arange(WIDTH))[0])
    assert [found.own for found in equation_residuals(program.top)] == [ARRAY] + [0] * (len(program.top.equations) - 1)


def test_equations_in_a_block_keep_the_users_line():
    closed, _ = flat(chain, weights(), X)
    found = Program(remat(closed, "4").closed)
    lines = [e.jaxpr_eqn.source_info.traceback for e in found.equations if e.name == "dot_general"]
    codes = [line.raw_frames()[0] for line in lines if line is not None]
    assert len(codes) == LAYERS
    assert {next(c.co_name for c in code if is_user_file(c.co_filename)) for code in codes} == {"layer"}


@pytest.mark.parametrize("how", ["full", "dots"])
def test_a_loss_that_does_nothing_stays_as_it_is(how):
    closed, _ = flat(lambda x: x, jnp.float32(1))
    assert remat(closed, how).block_count == 0


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("0", "--remat 0: a loss is cut into 1 segment or more; give a number from 1 on"),
        ("-1", "--remat -1: a loss is cut into 1 segment or more; give a number from 1 on"),
        ("99", "--remat 99: this loss can be cut into 17 segments at most"),
        ("lair", "--remat lair: nothing in the loss has such a name, there are layer;"),
        ("dot", "Did you mean 'dots'?"),
        ("(", "--remat (: no regular expression"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(how, said):
    closed, _ = flat(chain, weights(), X)
    with pytest.raises(ShardError, match=re.escape(said)) as raised:
        remat(closed, how)
    assert "\n" not in str(raised.value)


def test_straight_code_behind_a_loop_is_cut_by_itself():
    def loss(loop, rest, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, loop)
        for w in rest:
            x = jax.nn.gelu(x @ w) @ w
        return jnp.square(x).mean()

    ws = jax.random.normal(jax.random.key(0), (10, 16, 16)) / 4
    closed = jax.make_jaxpr(lambda *xs: [loss(xs[0], xs[1:-1], xs[-1])])(ws[:2], *ws[2:], jnp.ones((64, 16)))
    again = remat(closed, "full")
    names = [e.primitive.name for e in again.closed.jaxpr.eqns]
    loop = names.index("scan")
    assert "remat2" in names[loop + 1 :] or "checkpoint" in names[loop + 1 :]
