"""Experts that a step goes through one by one, in Python or by the number of the trip: side by side under `ep`."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from IPython.core.error import UsageError
from jax import lax
from jax.extend.core import jaxpr_as_fun
from support.divided_experts import AG, AR, RS, sent, told
from support.experts_in_turn import (
    CELLS,
    EXPERTS,
    F32,
    HEADS,
    HIDDEN,
    ROWS,
    TIME,
    WIDTH,
    WORDS,
    Params,
    close,
    entry_of,
    normal,
    of_form,
    routed,
    trained,
    weights,
)
from support.refusals import refusal

import jaxshard_magic
from jaxshard_magic.program.unrolled_experts.equation_equality import EquationComparison

MATRIX, TOKENS = WIDTH * HIDDEN * F32, ROWS // 2 * TIME * WIDTH * F32  # tokens: of half the batch


def masked(p: Params, x: jax.Array) -> jax.Array:
    """As Mixtral's reference: what an expert makes counts where its mask holds."""
    best, chosen = routed(p, x)
    out = jnp.zeros_like(x)
    for e in range(EXPERTS):
        own = jax.tree.map(lambda a, e=e: a[e], {"up": p["up"], "down": p["down"]})
        mask = chosen == e
        made = jax.nn.silu(x @ own["up"]) @ own["down"]
        share = jnp.where(mask, best, 0).sum(-1)
        out = out + jnp.where(mask.any(-1)[..., None], made * share[..., None], 0)
    return out


@jax.jit
def expert(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ up) @ down  # relu has a derivative rule of its own


def taken(p: Params, x: jax.Array) -> jax.Array:
    """Calls of one function, on matrices that are looked up; a sum over a generator."""
    best, chosen = routed(p, x)
    gates = (jax.nn.one_hot(chosen, EXPERTS) * best[..., None]).sum(-2)
    ups, downs = ([jnp.take(p[name], e, axis=0) for e in range(EXPERTS)] for name in ("up", "down"))
    return sum((expert(x, ups[e], downs[e]) * gates[..., e : e + 1] for e in range(EXPERTS)), start=0 * x)


def stacked(p: Params, x: jax.Array) -> jax.Array:
    best, chosen = routed(p, x)
    made = jnp.stack([jax.nn.gelu(x @ up) @ down for up, down in zip(p["up"], p["down"], strict=True)], -2)
    return jnp.einsum("btkd,btk->btd", jnp.take_along_axis(made, chosen[..., None], -2), best)


def dropped(p: Params, x: jax.Array) -> jax.Array:
    """Each expert drops numbers of its own; of two that a token chooses the last one counts."""
    _, chosen = routed(p, x)
    out, key = x, jax.random.key(1)
    for e in range(EXPERTS):
        hidden = jnp.tanh(x @ p["up"][e])
        hidden = hidden * jax.random.bernoulli(jax.random.fold_in(key, e), 0.9, hidden.shape)
        out = jnp.where((chosen == e).any(-1)[..., None], hidden @ p["down"][e], out)
    return out


def counted(p: Params, x: jax.Array) -> jax.Array:
    best, chosen = routed(p, x)

    def add(e, out):
        up, down = (lax.dynamic_index_in_dim(p[name], e, keepdims=False) for name in ("up", "down"))
        share = jnp.where(chosen == e, best, 0).sum(-1, keepdims=True)
        return out + share * (jax.nn.silu(x @ up) @ down)

    return lax.fori_loop(0, EXPERTS, add, jnp.zeros_like(x))


def numbered(p: Params, x: jax.Array) -> jax.Array:
    best, chosen = routed(p, x)

    def add(out, e):
        share = jnp.where(chosen == e, best, 0).sum(-1, keepdims=True)
        return out + share * (jax.nn.silu(x @ jnp.take(p["up"], e, 0)) @ p["down"][e]), None

    return lax.scan(add, jnp.zeros_like(x), jnp.arange(EXPERTS))[0]


FORMS = [
    taken,
    *(pytest.param(f, marks=pytest.mark.full) for f in (dropped, counted, masked, stacked, numbered)),
]


@pytest.mark.parametrize("form", FORMS)
def test_experts_one_by_one_are_divided_and_no_matrix_of_theirs_is_moved(form):
    """The rewritten step, on one device, has the plain one's numbers. Of an expert only gradients move, over data."""
    entry, (p, x) = entry_of(form), (weights(), normal(9, ROWS, TIME, WIDTH))
    specs = {leaf.path: tuple(leaf.spec) for leaf in entry.plan.leaves}
    assert specs["params.up"] == specs["params.down"] == ("expert", None, None)
    moves = told(entry.plan)
    assert not any(kind != AR and size in (MATRIX, EXPERTS // 4 * MATRIX) for kind, _, size in moves)
    assert moves[AG, ("expert",), TOKENS] in (1, 2, 3)
    added_up = moves[RS, ("expert",), TOKENS] + moves[AR, ("expert",), TOKENS]
    assert added_up == (form is not stacked)  # that is dealt out anew, and each token picks of it
    assert any(f.code == "experts-together" for f in entry.plan.findings)
    run = jax.jit(jaxpr_as_fun(entry.traced.closed))
    close(run(*entry.traced.consts, *jax.tree.leaves((p, x))), jax.jit(of_form(form))(p, x))


@pytest.mark.ci
def test_no_matrix_is_gathered_between_the_passes_of_a_loop():
    """What the backward pass reads of one, here each transposed, lies where its expert is."""

    def form(p, x):
        best, chosen = routed(p, x)
        shares = (jax.nn.one_hot(chosen, EXPERTS) * best[..., None]).sum(-2)

        def add(out, one):
            share, first, last = one
            return out + share[..., None] * (jnp.tanh(x @ first.T) @ last.T), None

        return lax.scan(add, x, (jnp.moveaxis(shares, -1, 0), p["down"], p["up"]))[0]

    p, x = weights(), normal(9, ROWS, TIME, WIDTH)
    sharded = jaxshard_magic.shard(of_form(form), "ep+dp", mesh=jaxshard_magic.mesh("cpu:8 data=2 expert=4"))
    close(sharded(p, x), jax.jit(of_form(form))(p, x))
    assert max(size for kind, _, size in sent(sharded.report()) if kind == AG) == TOKENS


@pytest.mark.ci
def test_an_expert_is_the_one_that_an_index_of_its_type_wraps_round_to():
    """Of bytes 0 - 1 is 255: the least of that and 7, and 1 more, is out of range, and the first trip takes the last
    expert, as the last trip does: the matrices are not taken one after the other, as they are with signs."""

    def looped(p, x, dtype, scanned):
        best, chosen = routed(p, x)

        def add(out, e):
            one = jnp.minimum(e - 1, EXPERTS - 1) + 1
            share = jnp.where(chosen == e, best, 0).sum(-1, keepdims=True)
            return out + share * (jax.nn.silu(x @ p["up"][one]) @ p["down"][one]), None

        out, numbers = jnp.zeros_like(x), jnp.arange(EXPERTS, dtype=dtype)
        if scanned:
            return lax.scan(add, out, numbers)[0]
        for e in range(EXPERTS):
            out, _ = add(out, dtype(e))
        return out

    for scanned in (False, True):
        signed, bytewise = (partial(looped, dtype=dtype, scanned=scanned) for dtype in (jnp.int8, jnp.uint8))
        assert any(f.code == "experts-together" for f in entry_of(signed).plan.findings)
        assert ("ep found no experts" if scanned else "taken apart expert by expert") in refusal(entry_of, bytewise)


def decoder(p: Params, tokens: jax.Array) -> jax.Array:
    x = p["words"][tokens]
    for layer in p["layers"]:
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, layer[name]) for name in "qkv")
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ layer["o"]
        x = x + masked(layer, x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6))
    guesses = jax.nn.log_softmax(x @ p["words"].T)
    return -jnp.take_along_axis(guesses[:, :-1], tokens[:, 1:, None], -1).mean()


def layer(seed: int) -> Params:
    heads = {name: normal(seed + 3 + i, WIDTH, HEADS, WIDTH // HEADS) for i, name in enumerate("qkv")}
    return {**weights(seed), **heads, "o": normal(seed + 7, WIDTH, WIDTH)}


ON = [pytest.param("ep+fsdp", "data=2 expert=4", marks=pytest.mark.ci)] + [
    pytest.param(*on, marks=pytest.mark.full)
    for on in (("ep", "expert=8"), ("ep+dp", "data=2 expert=4"), ("ep+tp", "data=2 expert=2 model=2"))
]


@pytest.mark.parametrize(("strategy", "axes"), ON)
def test_a_decoder_as_mixtrals_has_the_plain_numbers_of_five_steps(strategy, axes):
    """Two layers with as many heads as experts; over the expert axis no array as large as a matrix is gathered."""
    params = {"words": normal(50, WORDS, WIDTH), "layers": [layer(10), layer(30)]}
    tokens = jax.random.randint(jax.random.key(2), (ROWS, TIME), 0, WORDS)
    step = trained(decoder)
    plain, sharded = (
        jax.jit(step),
        jaxshard_magic.shard(step, strategy, mesh=jaxshard_magic.mesh(f"cpu:8 {axes}")),
    )
    here, there = params, params
    for _ in range(5):
        (here, loss), (there, other) = plain(here, tokens), sharded(there, tokens)
        close((there, other), (here, loss))
    moved = sent(sharded.report())
    assert not any(kind == AG and over and "expert" in over and size % MATRIX == 0 for kind, over, size in moved)


def test_loops_over_other_things_stay_as_they_are():
    """Heads and layers of which there are as many as experts: nothing is chosen among them, or each needs the last."""

    def form(p, x):
        for e in range(EXPERTS):
            x = x + jnp.tanh(x @ p["in"][e]) @ p["out"][e]
        heads = jnp.concatenate([jax.nn.softmax(x @ p["heads"][h]) for h in range(HEADS)], -1)
        best, chosen = routed(p, x)
        made = jax.vmap(lambda up, down: jnp.tanh(x @ up) @ down)(p["up"], p["down"])
        gates = (jax.nn.one_hot(chosen, EXPERTS) * best[..., None]).sum(-2)
        return heads + jnp.einsum("ebtd,bte->btd", made, gates)

    more = {"in": "up", "out": "down"}
    params = weights() | {name: weights(20)[like] for name, like in more.items()}
    entry = entry_of(form, params=params | {"heads": normal(40, HEADS, WIDTH, WIDTH // HEADS)})
    assert not {"experts-together", "experts-apart"} & {f.code for f in entry.plan.findings}


def test_experts_that_cannot_be_put_side_by_side_are_named_with_their_line():
    def differs(p, x):
        (best, chosen), out = routed(p, x), x
        for e in range(EXPERTS):
            hidden = (jnp.tanh if e == 3 else jax.nn.silu)(x @ p["up"][e])
            out = out + jnp.where(chosen == e, best, 0).sum(-1, keepdims=True) * (hidden @ p["down"][e])
        return out

    def after_another(p, x):
        best, chosen = routed(p, x)
        for e in range(EXPERTS):
            share = jnp.where(chosen == e, best, 0).sum(-1, keepdims=True)
            x = x + share * (jnp.tanh(x @ p["up"][e]) @ p["down"][e])
        return x

    def selected(p, x):
        best, chosen = routed(p, x)

        def add(out, one):
            e, up, down = one
            share = jnp.where(chosen == e, best, 0).sum(-1, keepdims=True)
            return jnp.where(share > 0, out + share * (jnp.tanh(x @ up) @ down), out), None

        return lax.scan(add, jnp.zeros_like(x), (jnp.arange(EXPERTS), p["up"], p["down"]))[0]

    line = selected.__code__.co_firstlineno + 8
    said = f"the loop over 8 experts (test_ep_in_turn.py, line {line}) hands on"
    assert said in refusal(entry_of, selected)

    line = differs.__code__.co_firstlineno + 3
    here = f"(test_ep_in_turn.py, line {line})"
    assert f"expert 3 has `tanh` {here} where expert 0 has `silu` {here}" in refusal(entry_of, differs)
    assert "can't be put side by side: each reads what the one before it made" in refusal(entry_of, after_another)


@pytest.mark.parametrize("named", (False, True))
def test_experts_with_arrays_of_their_own_are_named_with_what_stacks_them(named):
    """In a list, or by names, of which `mlp_10` stands before `mlp_2`."""
    number = 12 if named else EXPERTS

    def form(p, x):
        best, chosen = routed(p, x)
        each = [p["experts"][f"mlp_{e}" if named else e] for e in range(number)]
        made = (jnp.tanh(x @ own["up"]) @ own["down"] for own in each)
        shares = (jnp.where(chosen == e, best, 0).sum(-1, keepdims=True) for e in range(number))
        return jnp.stack([y * share for y, share in zip(made, shares, strict=True)]).sum(0)

    apart = [{name: weights()[name][0] for name in ("up", "down")} for _ in range(number)]
    experts = {f"mlp_{e}": own for e, own in enumerate(apart)} if named else apart
    said = refusal(entry_of, form, params={"router": normal(0, WIDTH, number), "experts": experts})
    first, last = ("mlp_0", "mlp_11") if named else ("0", "7")
    told = f"params.experts.{first}.up to params.experts.{last}.up are {number} arrays, one for each expert"
    assert told in said and "jnp.stack" in said


def test_functions_with_other_derivatives_are_not_alike():
    def with_rule(slope: float) -> Callable[[jax.Array], jax.Array]:
        f = jax.custom_jvp(lambda x: 2 * x)
        f.defjvp(lambda x, t: (2 * x[0], slope * t[0]))
        return f

    one, other = with_rule(1.0), with_rule(3.0)
    jaxpr = jax.make_jaxpr(lambda x: one(x) + one(x + 1) + other(x))(1.0)
    first, second, third = (e for e in jaxpr.eqns if e.primitive.name == "custom_jvp_call")
    assert EquationComparison().are_equivalent(first, second) and not EquationComparison().are_equivalent(first, third)


def test_comparisons_of_other_types_are_not_alike():
    """Put side by side they would be of one: 2**31 and more are no int32."""
    jaxpr = jax.make_jaxpr(lambda x, y: (x > x[0], y > y[0], x > x[1]))(*(jnp.ones(3, d) for d in ("i4", "u4")))
    first, other, second = (e for e in jaxpr.eqns if e.primitive.name == "gt")
    assert EquationComparison().are_equivalent(first, second) and not EquationComparison().are_equivalent(first, other)


@pytest.mark.ci
def test_code_to_take_home_asks_for_vmap_in_the_loops_place(notebook):
    for cell in ("%mesh expert=4;", *CELLS):
        notebook.run(cell)
    with pytest.raises(UsageError, match=r"goes through its experts one by one.* write the loop as jax\.vmap"):
        notebook.run("%shard code")
