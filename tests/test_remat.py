"""Remat keeps the numbers, keeps less for the backward pass, and does again what was asked for and nothing else."""

import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxshard_magic.errors import ShardError
from jaxshard_magic.gradients.kept import keeps
from jaxshard_magic.gradients.remat import Rematted, remat
from jaxshard_magic.gradients.segments import best_cuts, costs
from jaxshard_magic.program.ir import Program
from jaxshard_magic.program.lines import is_users
from jaxshard_magic.program.primitives import REMAT, is_literal
from jaxshard_magic.program.sizes import nbytes

ROWS, WIDTH, LAYERS = 64, 32, 8
ARRAY = 4 * ROWS * WIDTH  # bytes of one layer's activations
LENGTH, HEADS, MODEL, WORDS = 8, 2, 16, 11


def flat(loss: Callable, *args: Any) -> tuple[ClosedJaxpr, list]:
    """A loss, or a loss and more, as a jaxpr of flat arrays; and the arrays."""
    leaves, tree = jax.tree.flatten(args)
    return jax.make_jaxpr(lambda *xs: jax.tree.leaves(loss(*jax.tree.unflatten(tree, xs))))(*leaves), leaves


def gradients(closed: ClosedJaxpr) -> Callable:
    """`(loss, gradients, everything else)` of flat arrays."""
    wrt = [k for k, a in enumerate(closed.in_avals) if jnp.issubdtype(a.dtype, jnp.floating)]

    def run(*xs: Any) -> tuple[tuple[jax.Array, list], list]:
        outs = jaxpr_as_fun(closed)(*xs)
        return outs[0], outs[1:]

    return jax.value_and_grad(run, argnums=wrt, has_aux=True)


def same(closed: ClosedJaxpr, how: str, leaves: list) -> Rematted:
    """What remat makes of a loss, once its value, outputs and gradients are found to be those of the loss."""
    found = remat(closed, how)
    assert [str(a) for a in found.closed.in_avals] == [str(a) for a in closed.in_avals]
    assert [str(a) for a in found.closed.out_avals] == [str(a) for a in closed.out_avals]
    assert not found.closed.consts
    want, got = (jax.tree.leaves(jax.jit(gradients(c))(*leaves)) for c in (closed, found.closed))
    largest = max(jnp.abs(a).max() for a in want)
    assert all(jnp.allclose(a, b, rtol=1e-5, atol=1e-6 * largest) for a, b in zip(want, got, strict=True))
    return found


def kept(closed: ClosedJaxpr) -> int:
    """Bytes that the forward pass hands the backward pass besides the inputs of the loss."""
    wrt = [k for k, a in enumerate(closed.in_avals) if jnp.issubdtype(a.dtype, jnp.floating)]

    def run(*xs: Any) -> list:
        def loss(*ys: Any) -> Any:
            return jaxpr_as_fun(closed)(*(dict(enumerate(xs)) | dict(zip(wrt, ys, strict=True))).values())[0]

        return jax.tree.leaves(jax.vjp(loss, *(xs[k] for k in wrt))[1])

    jaxpr = jax.make_jaxpr(run)(*closed.in_avals).jaxpr
    return sum(nbytes(v.aval) for v in {v for v in jaxpr.outvars if not is_literal(v)} - set(jaxpr.invars))


def products(closed: ClosedJaxpr) -> int:
    """The matmuls of a loss and its gradients, trips of loops multiplied in."""
    jaxpr = jax.make_jaxpr(gradients(closed))(*closed.in_avals)
    return sum(e.trips for e in Program(jaxpr).equations if e.name == "dot_general")


def checkpoints(closed: ClosedJaxpr) -> int:
    return sum(e.name in REMAT for e in Program(closed).equations)


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sin(x @ w)


def chain(ws: list, x: jax.Array) -> jax.Array:
    """Of each layer the cosine is kept, and its input, which for the first is the loss's."""
    for w in ws:
        x = layer(w, x)
    return x.sum()


def looped(ws: jax.Array, x: jax.Array) -> jax.Array:
    return lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0].sum()


def weights(key: int = 0) -> list:
    keys = jax.random.split(jax.random.key(key), LAYERS)
    return [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in keys]


X = jax.random.normal(jax.random.key(9), (ROWS, WIDTH))


def norm(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def attention(p: dict, x: jax.Array) -> jax.Array:
    """Six matmuls."""
    q, k, v = (jnp.einsum("btd,dhe->bthe", x, p[name]) for name in "qkv")
    scores = checkpoint_name(jnp.einsum("bqhe,bkhe->bhqk", q, k), "scores")
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(scores), v)
    return jnp.einsum("bqhe,hed->bqd", mixed, p["o"])


@jax.jit
def mlp(p: dict, x: jax.Array) -> jax.Array:
    """Two matmuls."""
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def block(p: dict, x: jax.Array, key: jax.Array) -> jax.Array:
    x = x + attention(p, norm(x))
    x = x + mlp(p, norm(x))
    return x * jax.random.bernoulli(key, 0.9, x.shape)


def head(embed: jax.Array, x: jax.Array, words: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = norm(x) @ embed.T
    found = jnp.take_along_axis(jax.nn.log_softmax(logits), words[..., None], -1)
    return -found.mean(), (logits.argmax(-1) == words).sum()


def unrolled(p: dict, words: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = p["embed"][words]
    for p_block, k in zip(p["blocks"], jax.random.split(key, len(p["blocks"])), strict=True):
        x = block(p_block, x, k)
    return head(p["embed"], x, words)


def scanned(p: dict, words: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(key, len(p["blocks"]["up"]))
    x, _ = lax.scan(
        lambda x, given: (block(given[0], x, given[1]), None), p["embed"][words], (p["blocks"], keys)
    )
    return head(p["embed"], x, words)


def transformer(loss: Callable, blocks: int = 2) -> tuple[ClosedJaxpr, list]:
    keys = iter(jax.random.split(jax.random.key(0), 7 * blocks + 2))
    each = MODEL // HEADS
    shapes = dict.fromkeys("qkv", (MODEL, HEADS, each)) | {"o": (HEADS, each, MODEL)}
    shapes |= {"up": (MODEL, 4 * MODEL), "down": (4 * MODEL, MODEL)}

    def one() -> dict:
        return {name: 0.25 * jax.random.normal(next(keys), shape) for name, shape in shapes.items()}

    found: Any = [one() for _ in range(blocks)]
    if loss is scanned:
        found = jax.tree.map(lambda *ws: jnp.stack(ws), *found)
    params = {"blocks": found, "embed": jax.random.normal(next(keys), (WORDS, MODEL))}
    words = jax.random.randint(next(keys), (4, LENGTH), 0, WORDS)
    return flat(loss, params, words, jax.random.key(3))


@pytest.mark.parametrize(
    ("loss", "how"),
    [(unrolled, "2"), (unrolled, "full"), (unrolled, "attention|mlp"), (scanned, "2"), (scanned, "dots")],
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
    cuts = best_cuts(found, 0, len(found.own), 4)
    assert found.inside(0, len(found.own)) == cuts[0].peak == 15 * ARRAY
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
    assert same(closed, "1", leaves).blocks == 1
    found = remat(closed, "2")
    again = products(found.closed) - products(closed)
    assert found.blocks == 1 and 0 < again < LAYERS
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


def test_a_policy_wraps_each_trip_of_a_loop():
    closed, _ = flat(looped, jnp.stack(weights()), X)
    assert kept(remat(closed, "full").closed) == LAYERS * ARRAY  # the inputs
    assert kept(remat(closed, "dots").closed) == 2 * LAYERS * ARRAY  # the inputs and the products
    assert kept(remat(closed, "everything_saveable").closed) == kept(closed)
    assert remat(closed, "full").note == "full: 1 loop body"
    assert products(remat(closed, "dots").closed) == products(closed)


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
    assert remat(closed, "layer").blocks == LAYERS
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
    assert same(closed, "^Attention$", leaves).blocks == 3
    assert remat(closed, "MultiHead").blocks == 3
    assert kept(remat(closed, "3").closed) < kept(closed)


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
    assert same(closed, "Layer_[01]", leaves).blocks == 2
    assert remat(closed, "Layer_2/Dense_0").blocks == 1


def test_remat_of_the_users_stays_and_gets_none_around_it():
    def loss(ws, x):
        for w in ws:
            x = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)(w, x)
        return x.sum()

    closed, _ = flat(loss, weights(), X)
    found = remat(closed, "full")
    assert (found.blocks, checkpoints(found.closed)) == (0, LAYERS)
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
    printed = [e for e in Program(jaxpr).equations if e.eqn.effects and not e.doors]
    assert len(printed) == LAYERS


def test_a_cast_of_a_weight_crosses_at_no_cost():
    """bfloat16 weights and activations: of each layer the cosine and the input are kept, and nothing of the cast."""

    def loss(ws, x):
        ws = [w.astype(jnp.bfloat16) for w in ws]
        return chain(ws, x.astype(jnp.bfloat16)).astype(jnp.float32)

    closed, leaves = flat(loss, weights(), X)
    program = Program(closed)
    assert costs(program, program.top).inside(0, len(program.top.equations)) == 15 * ARRAY // 2
    assert [a.dtype for a in remat(closed, "3").closed.in_avals] == [w.dtype for w in leaves]


def test_what_no_gradient_flows_through_keeps_nothing():
    program = Program(flat(lambda x, k: (lax.stop_gradient(jnp.sin(x)) * k).sum(), X, jnp.arange(WIDTH))[0])
    assert [found.own for found in keeps(program.top)] == [ARRAY] + [0] * (len(program.top.equations) - 1)


def test_equations_in_a_block_keep_the_users_line():
    closed, _ = flat(chain, weights(), X)
    found = Program(remat(closed, "4").closed)
    lines = [e.eqn.source_info.traceback for e in found.equations if e.name == "dot_general"]
    codes = [line.raw_frames()[0] for line in lines if line is not None]
    assert len(codes) == LAYERS
    assert {next(c.co_name for c in code if is_users(c.co_filename)) for code in codes} == {"layer"}


@pytest.mark.parametrize("how", ["full", "dots"])
def test_a_loss_that_does_nothing_stays_as_it_is(how):
    closed, _ = flat(lambda x: x, jnp.float32(1))
    assert remat(closed, how).blocks == 0


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
