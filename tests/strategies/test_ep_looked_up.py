"""Matrices that each token looks up: tokens are sorted by them under `ep`, and each expert's stay on its device."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from IPython.core.error import UsageError
from jax import lax
from jax.extend.core import jaxpr_as_fun
from support.divided_experts import AG, AR, RS, sent, told
from support.experts_in_turn import (
    CELLS,
    EXPERTS,
    F32,
    HIDDEN,
    ROWS,
    TIME,
    WIDTH,
    Params,
    close,
    entry_of,
    normal,
    routed,
    weights,
)
from support.experts_in_turn import of_form as step_of
from support.refusals import refusal

import jaxshard_magic
from jaxshard_magic.program.gathered_weights import sort_gathered_products
from jaxshard_magic.program.gradient_calls import capture_vjp
from jaxshard_magic.program.trace import trace

EACH, BESIDE = WIDTH * HIDDEN, ("ep+dp", "data=2 expert=4")


def best_two(p: Params, x: jax.Array) -> jax.Array:
    """With biases that are looked up as well, and the sum over the chosen in the second product."""
    best, chosen = routed(p, x)
    hidden = jax.nn.silu(jnp.einsum("btd,btkdf->btkf", x, p["up"][chosen]) + p["bias"][chosen])
    return x + jnp.einsum("btkf,btkfd,btk->btd", hidden, p["down"][chosen], best)


def best_one(p: Params, x: jax.Array) -> jax.Array:
    flat = x.reshape(-1, WIDTH)
    gates = jax.nn.softmax(flat @ p["router"])
    chosen = jnp.argmax(gates, -1)
    hidden = jax.nn.relu(jnp.einsum("td,tdf->tf", flat, jnp.take(p["up"], chosen, axis=0)))
    made = jnp.einsum("tf,tfd->td", hidden, jnp.take(p["down"], chosen, axis=0))
    return x + (made * gates.max(-1, keepdims=True)).reshape(x.shape)


def one_token(p: Params, x: jax.Array) -> jax.Array:
    def of_token(x, best, chosen):
        one = jax.vmap(lambda i: jax.nn.gelu(x @ p["up"][i]) @ p["down"][i])
        return best @ one(chosen)

    best, chosen = routed(p, x)
    return x + jax.vmap(jax.vmap(of_token))(x, best, chosen)


def one_by_one(p: Params, x: jax.Array) -> jax.Array:
    """The first expert of each token, then the second, of matrices with their columns first."""
    best, chosen = routed(p, x)
    columns = jnp.swapaxes(p["up"], 1, 2)
    for k in range(best.shape[-1]):
        mine = chosen[..., k]
        hidden = jax.nn.silu((columns[mine] @ x[..., None])[..., 0])
        x = x + jnp.einsum("btfd,btf->btd", p["down"][mine], hidden) * best[..., k : k + 1]
    return x


def in_layers(p: Params, x: jax.Array) -> jax.Array:
    return lax.scan(jax.checkpoint(lambda x, layer: (best_two(layer, x), None)), x, p["layers"])[0]


def by_place(p: Params, x: jax.Array) -> jax.Array:
    """No router: which expert a token goes to is known, for each example and all its tokens."""
    mine = 3 * jnp.arange(len(x)) % EXPERTS
    hidden = jnp.tanh(jnp.einsum("btd,bdf->btf", x, p["up"][mine]))
    return x + jnp.einsum("btf,bfd->btd", hidden, p["down"][mine])


def params_of(form: Any) -> Params:
    own = weights() | {"bias": normal(5, EXPERTS, HIDDEN)}
    return {"layers": jax.tree.map(lambda a: jnp.stack([a, a / 2]), own)} if form is in_layers else own


FORMS = (best_two, best_one, one_token, one_by_one, in_layers, by_place)
SUMS = (("ep", "expert=8"), BESIDE, ("ep+fsdp", "data=2 expert=4"), ("ep+tp", "data=2 expert=2 model=2"))
QUICK = ((best_two, SUMS[3]),)
TABLE = [
    pytest.param(form, *on, marks=() if (form, on) in QUICK else pytest.mark.full, id=f"{form.__name__} {on[0]}")
    for form in FORMS
    for on in SUMS
]


@pytest.mark.parametrize(("form", "strategy", "axes"), TABLE)
def test_tokens_that_look_up_their_matrices_get_the_plain_numbers_of_five_steps(form, strategy, axes):
    """No matrix of an expert is moved, but for the parts that fsdp has and the columns of tensor parallelism."""
    x, step = normal(9, ROWS, TIME, WIDTH), step_of(form)
    sharded = jaxshard_magic.shard(step, strategy, mesh=jaxshard_magic.mesh(f"cpu:8 {axes}"))
    here = there = params_of(form)
    plain = jax.jit(step)
    for _ in range(5):
        (here, loss), (there, other) = plain(here, x), sharded(there, x)
        close((there, other), (here, loss))
    moved = sent(sharded.report())
    matrices = {n * EACH * F32 for n in (1, 2, 4, EXPERTS, 2 * EXPERTS)}
    assert not any(kind == AG and over and "expert" in over and size in matrices for kind, over, size in moved)
    specs = {leaf.path: tuple(leaf.spec) for leaf in sharded.planned(there, x).plan.leaves}
    assert all("expert" in spec for path, spec in specs.items() if "up" in path or "down" in path)


def test_each_row_goes_to_its_expert_and_back_for_each_matrix():
    """Of half the tokens on four devices: forward inputs and hidden rows there, hidden rows and results back; backward
    the gradients of both results there, that of the hidden rows back: tokens are data. How many rows there are of each
    expert is asked once."""
    step = jaxshard_magic.shard(step_of(best_one), *BESIDE[:1], mesh=jaxshard_magic.mesh(f"cpu:8 {BESIDE[1]}"))
    args = weights(), normal(9, ROWS, TIME, WIDTH)
    step(*args)
    rows, over, own = ROWS * TIME // 2, ("expert",), EXPERTS // 4
    wanted = Counter(
        {
            (AG, over, rows * WIDTH * F32): 2,
            (AG, over, rows * HIDDEN * F32): 2,
            (RS, over, rows * HIDDEN * F32): 2,
            (RS, over, rows * WIDTH * F32): 1,
            (AR, ("data",), own * EACH * F32): 2,
            (AR, ("data", "expert"), WIDTH * EXPERTS * F32): 1,
            (AG, over, 4 * EXPERTS * F32): 1,
        }
    )
    assert sent(step.report()) == wanted == told(step.planned(*args).plan)


def test_no_token_has_a_matrix_of_its_own():
    entry = entry_of(best_two, params=params_of(best_two))
    assert max(entry.facts.program.sizes) < ROWS * TIME * EACH
    largest = max(np.prod(shape, dtype=int) for shape in entry.facts.program.shapes)
    assert largest < ROWS * TIME * EACH
    (said,) = (f.message for f in entry.plan.findings if f.code == "experts-looked-up")
    first = best_two.__code__.co_firstlineno + 3
    assert f"line {first}, " in said and f"line {first + 1})" in said


def test_a_search_tries_ep_for_matrices_looked_up_not_for_batches():
    """A batch whose images are put in another order takes whole slices of a stack, too."""

    def shuffled(p, x):
        images = x.reshape(len(x), TIME, WIDTH, 1)
        return images[jnp.argsort(images.sum((1, 2, 3)))][..., 0] @ p["up"] @ p["down"]

    plain = {name: weights()[name][0] for name in ("up", "down")}
    assert not entry_of(shuffled, "dp", "data=8", params=plain).facts.may_mix_experts
    assert entry_of(best_two, "dp", "data=8", params=params_of(best_two)).facts.may_mix_experts


def sorted_run(f: Any, *args: Any) -> Any:
    """What a function gives whose look-ups are sorted."""
    traced = trace(lambda *xs: ([f(*xs)], [()]), args, [()] * len(args), capture_vjp)
    found, lines = sort_gathered_products(traced)
    assert found is not None and lines
    (out,) = jaxpr_as_fun(found.closed)(*found.consts, *args)
    return out


PRODUCTS = (
    ("btd,btkdf->btkf", (3, 4, 5), (3, 4, 2), (7, 5, 6)),
    ("btkfd,btd->btkf", (3, 4, 2), (3, 4, 5), (7, 6, 5)),
    ("td,tfd->ft", (4, 5), (4,), (7, 6, 5)),
    ("tkd,tkdf->tf", (4, 2, 5), (4, 2), (7, 5, 6)),
    ("bthd,bhdf->bthf", (3, 4, 2, 5), (3, 2), (7, 5, 6)),
    ("td,tdhf->thf", (4, 5), (4,), (7, 5, 2, 6)),
    ("thd,thdf->tf", (4, 2, 5), (4,), (7, 2, 5, 6)),
)
OFTEN = ("btkfd,btd->btkf", "tkd,tkdf->tf", "bthd,bhdf->bthf")
ROWS_OF_PRODUCTS = [
    pytest.param(*row, marks=() if row[0] in OFTEN else pytest.mark.full, id=row[0]) for row in PRODUCTS
]


@pytest.mark.parametrize(("product", "first", "second", "stack"), ROWS_OF_PRODUCTS)
def test_products_with_what_is_looked_up_are_those_of_sorted_rows(product, first, second, stack):
    """Whichever operand it is, with rows that only the tokens or only the look-ups have, summed over or not."""
    looked_first = len(product.split(",")[0]) > len(product.split(",")[1].split("->")[0])
    x, shape = (second, first) if looked_first else (first, second)
    tokens, w = normal(0, *x), normal(1, *stack)
    chosen = jax.random.randint(jax.random.key(2), shape, -stack[0], stack[0])  # some counted from the end

    def f(w, tokens, chosen):
        return jnp.einsum(product, *((w[chosen], tokens) if looked_first else (tokens, w[chosen])))

    np.testing.assert_allclose(sorted_run(f, w, tokens, chosen), f(w, tokens, chosen), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("mode", "fill"), [("fill", None), ("fill", 0), ("clip", None)])
def test_numbers_of_no_matrix_give_what_they_give_in_the_step(mode, fill):
    w, tokens, chosen = (
        normal(1, EXPERTS, WIDTH, HIDDEN),
        normal(0, 4, WIDTH),
        jnp.array([1, EXPERTS, 99, -99]),
    )

    def f(w, tokens, chosen):
        return jnp.einsum("td,tdf->tf", tokens, jnp.take(w, chosen, axis=0, mode=mode, fill_value=fill))

    got, wanted = sorted_run(f, w, tokens, chosen), f(w, tokens, chosen)
    assert np.isnan(wanted).any() == (mode == "fill" and fill is None)
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)


def test_matrices_of_ones_for_numbers_of_none_are_looked_up_as_they_stand():
    def f(w, tokens, chosen):
        return jnp.einsum("td,tdf->tf", tokens, w.at[chosen].get(mode="fill", fill_value=1))

    args = normal(1, EXPERTS, WIDTH, HIDDEN), normal(0, 4, WIDTH), jnp.array([1, EXPERTS, 99, -99])
    traced = trace(lambda *xs: ([f(*xs)], [()]), args, [()] * 3, capture_vjp)
    assert sort_gathered_products(traced)[0] is None


def test_what_something_else_reads_than_products_is_refused_in_one_line():
    """And so is what stands in a function with a derivative rule of its own, which runs as it is."""

    @jax.custom_jvp
    def ruled(x, up, chosen):
        return jnp.einsum("btd,btdf->btf", x, up[chosen])

    @ruled.defjvp
    def _(given, tangents):
        (x, up, chosen), (dx, dup, _) = given, tangents
        return ruled(*given), ruled(dx, up, chosen) + ruled(x, dup, chosen)

    for of_tokens in (ruled, lambda x, up, chosen: (x[..., None] * up[chosen]).sum(-2)):

        def form(p, x, of_tokens=of_tokens):
            return x + of_tokens(x, p["up"], jnp.argmax(x @ p["router"], -1))[..., :WIDTH]

        assert "params.up is looked up for each token (up[chosen])" in refusal(entry_of, form)


@pytest.mark.ci
def test_code_to_take_home_asks_for_ragged_products(notebook):
    first, *others = CELLS
    head, _, tail = first.partition("def moe")
    looked_up = """def moe(p, x):
    chosen = jnp.argmax(x @ p["router"], -1)
    return jnp.einsum("btf,btfd->btd", jax.nn.gelu(jnp.einsum("btd,btdf->btf", x, p["up"][chosen])), p["down"][chosen])

"""
    for cell in ("%mesh expert=4;", head + looked_up + tail[tail.index("shapes =") :], *others):
        notebook.run(cell)
    with pytest.raises(UsageError, match=r"looks up a matrix for each token.* write it with jax\.lax\.ragged_dot"):
        notebook.run("%shard code")
