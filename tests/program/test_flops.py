"""FLOPs of a traced step: as derived by hand, and as XLA's cost analysis counts them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import zoo
from jax import lax
from support.thinned import thinned
from theory import flops as theory
from theory.steps import STEPS

from jaxshard_magic.program.flatten_call import flatten_call
from jaxshard_magic.program.flops import Work, count_work, num_shards, total_work, uncounted_primitives
from jaxshard_magic.program.flow import Flow
from jaxshard_magic.program.ir import Program
from jaxshard_magic.program.phases import equation_phases
from jaxshard_magic.program.trace import trace
from jaxshard_magic.program.unwrap import unwrap_step

X, W = jnp.ones((8, 4)), jnp.ones((4, 4))
ONCE = 2 * 8 * 4 * 4  # of X @ W


def program(f: Callable, *args: Any, **kwargs: Any) -> Program:
    peeled = flatten_call(unwrap_step(f), args, kwargs)
    paths = [path for path, _, _ in peeled.inputs]
    return Program(trace(lambda *xs: peeled.flat_function(*xs)[:2], peeled.leaves, paths).closed)


def works(f: Callable, *args: Any) -> tuple[Work, ...]:
    found = program(f, *args)
    return count_work(found, Flow(found))


def by_xla(f: Callable, *args: Any) -> float:
    analysis = jax.jit(f).lower(*args).cost_analysis()
    assert isinstance(analysis, dict)
    return analysis["flops"]


@pytest.mark.parametrize("name", thinned(STEPS, [*STEPS][::3]))
def test_a_step_has_the_flops_derived_by_hand(name):
    call, want = STEPS[name](), theory.STEPS[name]
    got = total_work(works(call.step, call.state, call.batch))
    assert got.by_phase == {"forward": want.forward, "backward": want.backward, "update": 0}
    assert got.recomputed == want.recomputed
    assert got.by_dtype == {"float32": got.flops}
    assert got.exact


def test_an_inner_layer_costs_twice_as_much_backward_as_forward():
    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x.sum()

    got = total_work(works(jax.grad(loss), [W] * 3, X)).by_phase
    assert got == {"forward": 3 * ONCE, "backward": (1 + 2 + 2) * ONCE, "update": 0}


CONVOLUTIONS = {  # of (4, 9, 11, 6) images, unless the second part says otherwise
    "same": ({"padding": "SAME"}, None, (3, 3, 6, 10)),
    "valid": ({"padding": "VALID"}, None, (3, 5, 6, 10)),
    "strides": ({"padding": "SAME", "window_strides": (2, 3)}, None, (3, 5, 6, 10)),
    "cut and padded": ({"padding": ((-1, 3), (4, 0))}, None, (3, 3, 6, 10)),
    "dilated window": ({"padding": "SAME", "rhs_dilation": (2, 3)}, None, (3, 3, 6, 10)),
    "dilated input": ({"padding": ((1, 2), (0, 1)), "lhs_dilation": (2, 3)}, None, (3, 3, 6, 10)),
    "all at once": (
        {
            "padding": ((1, 2), (3, 1)),
            "lhs_dilation": (2, 3),
            "window_strides": (3, 2),
            "rhs_dilation": (2, 1),
        },
        None,
        (3, 3, 6, 10),
    ),
    "groups": ({"padding": "SAME", "feature_group_count": 3}, None, (3, 3, 2, 12)),
    "depthwise": ({"padding": "SAME", "feature_group_count": 6}, None, (3, 3, 1, 6)),
    "groups of examples": ({"padding": "SAME", "batch_group_count": 2}, None, (3, 3, 6, 12)),
    "window above the image": ({"padding": ((2, 2), (4, 0))}, (4, 3, 3, 6), (5, 5, 6, 10)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_and_its_gradients_have_as_many_flops_as_xla_counts(name):
    options, image, window = CONVOLUTIONS[name]

    def conv(x, w):
        given = {"window_strides": (1, 1), "dimension_numbers": ("NHWC", "HWIO", "NHWC"), **options}
        return lax.conv_general_dilated(x, w, **given)

    def gradients(x, w, g):
        return jax.vjp(conv, x, w)[1](g)

    x, w = jnp.ones(image or (4, 9, 11, 6)), jnp.ones(window)
    g = jnp.ones(jax.eval_shape(conv, x, w).shape)
    once = total_work(works(conv, x, w)).flops
    assert once == by_xla(conv, x, w)
    assert total_work(works(gradients, x, w, g)).flops == by_xla(gradients, x, w, g) == 2 * once


def normal(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def wide_mlp(params, x):
    for up, down in params:
        x = x + jax.nn.gelu(x @ up) @ down
    return jnp.mean(x**2)


def wide_convolutions(params, x):
    for i, w in enumerate(params):
        x = jax.nn.relu(
            lax.conv_general_dilated(
                x,
                w,
                (1 + i, 1 + i),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=1 + i,
            )
        )
    return jnp.mean(x**2)


def wide_transformer(params, x):
    for p in params:
        q, k, v = jnp.split((x @ p["qkv"]).reshape(*x.shape[:2], 4, -1), 3, -1)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ p["out"]
        x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
    return jnp.mean(x**2)


WIDE = {
    "mlp": (wide_mlp, [(normal(2048, 4096), normal(4096, 2048))] * 3, normal(8192, 2048)),
    "convolutions": (
        wide_convolutions,
        [normal(3, 3, 256, 512), normal(3, 3, 256, 512)],
        normal(16, 32, 32, 256),
    ),
    "transformer": (
        wide_transformer,
        [
            {
                "qkv": normal(2048, 6144),
                "out": normal(2048, 2048),
                "up": normal(2048, 8192),
                "down": normal(8192, 2048),
            }
        ]
        * 2,
        normal(8, 1024, 2048),
    ),
}


@pytest.mark.parametrize("name", WIDE)
def test_of_wide_layers_xla_counts_less_than_one_percent_more(name):
    loss, params, x = WIDE[name]

    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    found = Program(jax.make_jaxpr(step)(params, x))
    flops = total_work(count_work(found, Flow(found))).flops
    assert flops < by_xla(step, params, x) < 1.01 * flops


def test_a_product_in_bfloat16_is_one_also_where_it_is_summed_in_float32():
    def f(x, w):
        return jnp.matmul(x, w, preferred_element_type=jnp.float32)

    (got,) = works(f, X.astype(jnp.bfloat16), W.astype(jnp.bfloat16))
    assert (got.flops, got.dtype, got.bytes) == (ONCE, "bfloat16", 2 * 8 * 4 + 2 * 4 * 4 + 4 * 8 * 4)


@pytest.mark.parametrize(
    ("left", "right", "wider"),
    [
        (jnp.int4, jnp.int8, "int8"),
        (jnp.bfloat16, jnp.float32, "float32"),
        (jnp.float8_e4m3fn, jnp.float8_e4m3fn, "float8_e4m3fn"),
    ],
)
def test_the_wider_operand_says_what_a_product_is_computed_in(left, right, wider):
    def f(x, w):
        return lax.dot(x, w, preferred_element_type=jnp.float32)

    assert [w.dtype for w in works(f, X.astype(left), W.astype(right))] == [wider]


def test_each_row_of_a_ragged_product_meets_its_own_group_only():
    sizes = jnp.array([2, 3, 3])

    def loss(x, w):
        return (lax.ragged_dot(x, w, sizes) ** 2).sum()

    got = works(jax.grad(loss, argnums=(0, 1)), X, jnp.ones((3, 4, 5)))
    assert [w.flops for w in got] == [2 * 8 * 4 * 5] * 3


def test_the_scales_of_a_scaled_product_are_read_and_not_multiplied_by():
    def f(x, w, a, b):
        return lax.scaled_dot(x, w, lhs_scale=a, rhs_scale=b)

    narrow, scale = jnp.float8_e4m3fn, jnp.float8_e8m0fnu
    shapes = [((4, 64), narrow), ((64, 8), narrow), ((4, 2), scale), ((2, 8), scale)]
    found = Program(jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(*s) for s in shapes)))
    (got,) = count_work(found, Flow(found))
    out = found.avals[found.top.equations[got.equation].results[0]].dtype.itemsize
    assert (got.flops, got.dtype) == (2 * 4 * 64 * 8, "float8_e4m3fn")
    assert got.bytes == 4 * 64 + 64 * 8 + 4 * 2 + 2 * 8 + out * 4 * 8


def looped(f: Callable) -> Callable:
    """`f` three times in a loop."""
    return lambda x, w: lax.fori_loop(0, 3, lambda _i, y: f(y, w), x)


def test_trips_of_nested_loops_are_multiplied_in():
    def f(x, w):
        return lax.scan(lambda y, _: (looped(jnp.matmul)(y, w), None), x, None, length=5)[0]

    (got,) = works(f, X, W)
    assert (got.flops, got.bytes, got.exact) == (15 * ONCE, 15 * 4 * (8 * 4 + 4 * 4 + 8 * 4), True)


def test_a_loop_of_unknown_length_counts_once_and_is_not_exact():
    def f(x, w):
        return lax.while_loop(lambda y: (y @ w).sum() < 1e6, lambda y: y @ w @ w, x) @ w

    got = works(f, X, W)
    assert [(w.flops, w.exact) for w in got] == [(ONCE, False)] * 3 + [(ONCE, True)]
    assert not total_work(got).exact


def test_of_branches_the_one_with_most_flops_counts():
    def f(x, w):
        branches = [lambda x: x @ w, lambda x: looped(jnp.matmul)(x, w), lambda x: x]
        return lax.switch(x[0, 0].astype(int), branches, x)

    assert [w.flops for w in works(f, X, W)] == [3 * ONCE]


def test_a_product_that_nothing_uses_is_not_counted():
    def f(x, w):
        return jax.grad(lambda w: ((x @ w).sum(), x @ w @ w), has_aux=True)(w)[0]

    got = works(f, X, W)
    assert [(w.flops, w.phase) for w in got] == [(ONCE, "backward")]


def test_a_product_that_decides_on_a_branch_or_is_printed_is_used():
    def f(x, w):
        jax.debug.print("{}", x @ w)
        return lax.cond((x @ w).sum() > 0, jnp.sin, jnp.cos, x)

    assert [w.flops for w in works(f, X, W)] == [ONCE, ONCE]


def layers(x, w):
    return jnp.tanh(jnp.tanh(x @ w) @ w)


def recomputed(f: Callable) -> int:
    return total_work(works(jax.grad(lambda w: f(X, w).sum()), W)).recomputed


def test_remat_recomputes_the_products_that_it_does_not_keep():
    policy = jax.checkpoint_policies.dots_saveable
    assert recomputed(layers) == 0
    assert recomputed(jax.checkpoint(layers)) == 2 * ONCE
    assert recomputed(jax.checkpoint(jax.jit(layers))) == 2 * ONCE
    assert recomputed(jax.checkpoint(layers, policy=policy)) == 0
    assert recomputed(looped(jax.checkpoint(layers))) == 6 * ONCE
    assert recomputed(jax.checkpoint(looped(layers))) == 6 * ONCE


def test_remat_within_remat_recomputes_what_leads_to_the_inner_one_and_then_that():
    """The outer backward pass does the inner products over, too, but nothing needs them: the inner one does its own."""
    inner = jax.checkpoint(layers)
    assert recomputed(jax.checkpoint(lambda x, w: inner(layers(x, w), w))) == (2 + 2) * ONCE


def test_a_rematerialised_function_that_is_not_differentiated_runs_once():
    (one, two) = works(jax.checkpoint(layers), X, W)
    assert not one.recomputed and not two.recomputed


@jax.custom_vjp
def times(x, w):
    return x @ w


times.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))


def test_what_a_custom_rule_computes_backward_is_of_the_backward_pass():
    got = total_work(works(jax.grad(lambda x, w: (times(x, w) ** 2).sum(), argnums=(0, 1)), X, W)).by_phase
    assert got == {"forward": ONCE, "backward": 2 * ONCE, "update": 0}


def test_a_step_without_gradient_calls_is_forward_as_a_whole():
    got = total_work(works(lambda x, w: w - x.T @ (x @ w), X, W)).by_phase
    assert got == {"forward": 2 * ONCE, "backward": 0, "update": 0}


def test_products_with_an_accumulated_gradient_are_of_the_update():
    """As Shampoo and Muon have them: the gradient, here summed over microbatches and clipped, is multiplied."""

    def step(w, xs):
        def one(total, x):
            return total + jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w), None

        total = lax.scan(one, jnp.zeros_like(w), xs)[0]
        clipped = total / jnp.maximum(1.0, jnp.linalg.norm(total))
        return w - clipped @ clipped.T @ clipped

    got = total_work(works(step, W, jnp.ones((6, 8, 4)))).by_phase
    assert got == {"forward": 6 * ONCE, "backward": 6 * ONCE, "update": 2 * 2 * 4**3}


def test_work_is_divided_by_each_mesh_axis_once():
    found = program(lambda x, w: x @ w, X, W)
    (e,) = (e for e in found.equations if e.name == "dot_general")
    sizes = {"data": 4, "model": 2, "pipe": 3}
    x, w, out = *e.operands, e.results[0]

    def over(**axes):
        spec = {x: axes.get("x"), w: axes.get("w"), out: axes.get("out")}
        return num_shards(e, lambda v: spec[v] or [(), ()], sizes)

    assert over() == 1
    assert over(x=[("data",), ()], out=[("data",), ()]) == 4
    assert over(x=[("data",), ("model",)], w=[("model",), ()], out=[("data",), ()]) == 8
    assert over(x=[("data", "pipe"), ()], w=[(), ("model",)], out=[("data", "pipe"), ("model",)]) == 24


def test_what_cannot_be_seen_is_named():
    def f(x, w):
        return jnp.linalg.cholesky(x.T @ x + w), jnp.fft.fft(x), jax.pure_callback(lambda x: x, x, x)

    assert uncounted_primitives(program(f, X, W)) == ("cholesky", "fft", "pure_callback")
    assert uncounted_primitives(program(layers, X, W)) == ()


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in zoo.TRACED if name in zoo.OFTEN])
def test_every_step_is_counted_and_each_equation_has_a_phase(name):
    call = zoo.STEPS[name].make()
    found = program(call.fn, *call.args, **call.kwargs)
    flow = Flow(found)
    got = total_work(count_work(found, flow))
    assert equation_phases(found, flow).keys() == set(range(len(found.equations)))
    assert got.flops > 0 or name == "matrix_factors"  # two tables, looked up
    assert 0 <= got.recomputed <= got.by_phase["backward"]
    assert sum(got.by_phase.values()) == sum(got.by_dtype.values()) == got.flops
    assert got.exact == (name not in ("lbfgs_line_search", "lbfgs_whole_fit"))


def gradient(x, w):
    return jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)


def test_a_loop_of_steps_has_the_phases_of_one():
    got = total_work(works(lambda w, xs: lax.scan(lambda w, x: (w - gradient(x, w), None), w, xs)[0], W, X[None]))
    assert got.by_phase == {"forward": ONCE, "backward": ONCE, "update": 0}


def test_a_second_gradients_forward_pass_is_not_the_firsts_update():
    def step(w, x):
        moved = w - gradient(x, w)
        return jax.grad(lambda v: (jnp.tanh(x @ moved) @ v).sum())(w)

    assert [w.phase for w in works(step, W, X)] == ["forward", "backward", "forward", "backward"]


def test_what_only_the_update_reads_is_of_the_update():
    def step(w, count, x):
        rate = 0.1 * 0.9**count
        loss = (jnp.tanh(x @ w) ** 2).sum()
        return w - rate * gradient(x, w), count + 1, loss

    found = program(step, W, jnp.float32(1), X)
    told = equation_phases(found, Flow(found))
    assert {told[e.index] for e in found.equations if e.name == "pow"} == {"update"}
    plain = {
        told[e.index] for e in found.equations if e.primitive.is_product and not str(e.jaxpr_eqn.source_info.name_stack)
    }
    assert plain == {"forward"}
