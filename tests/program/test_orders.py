"""Rows sorted by their expert and put back: what is followed of them, in one program and from microbatch to batch."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.followed import MEAN, W, X, case, check, normal
from support.thinned import thinned

import jaxshard_magic
from jaxshard_magic.gradients.remat import products_saveable
from jaxshard_magic.program.batching.batch_labels import ExampleSum, UnknownLabel
from jaxshard_magic.program.histograms import Histograms
from jaxshard_magic.program.ir import Program
from jaxshard_magic.program.sort_analysis import SortAnalysis
from jaxshard_magic.program.sort_states import UnknownOrder

E, BEST = 4, 2
FIRST = lambda x: jnp.argmax(x, -1)  # noqa: E731
BOTH = lambda x: lax.top_k(x, BEST)[1].reshape(-1)  # noqa: E731


def hot(keys):
    return jax.nn.one_hot(keys, E, dtype=jnp.int32)


COUNTED = {
    "bincount": (BOTH, lambda k: jnp.bincount(k, length=E)),
    "one_hot": (FIRST, lambda k: hot(k).sum(0)),
    "one_hot in two sums": (lambda x: lax.top_k(x, BEST)[1], lambda k: hot(k).sum(1).sum(0)),
    "one_hot in floats": (BOTH, lambda k: jax.nn.one_hot(k, E).sum(0).astype(jnp.int32)),
    "compared": (BOTH, lambda k: (k[:, None] == jnp.arange(E)).sum(0)),
    "compared the other way": (FIRST, lambda k: jnp.sum(jnp.arange(E)[:, None] == k[None], 1)),
    "segment_sum": (FIRST, lambda k: jax.ops.segment_sum(jnp.ones_like(k), k, E)),
    "of the first choice": (lambda x: lax.top_k(x, BEST)[1][:, 0], lambda k: jnp.bincount(k, length=E)),
    "as bytes": (BOTH, lambda k: jnp.bincount(k.astype(jnp.uint8), length=E)),
    "added at": (FIRST, lambda k: jnp.zeros(E, int).at[k].add(1)),
}
OTHERS = {
    "of other keys": lambda k: jnp.bincount(k + 1, length=E),
    "weighted": lambda k: jnp.bincount(k, weights=k, length=E).astype(int),
    "added to ones": lambda k: jnp.ones(E, int).at[k].add(1),
    "in another order": lambda k: (k[:, None] == jnp.arange(E)[::-1]).sum(0),
    "twos": lambda k: jnp.zeros(E, int).at[k].add(2),
    "running": lambda k: jnp.cumsum(hot(k).sum(0)),
}


@pytest.mark.parametrize("how", COUNTED)
def test_how_often_each_key_occurs_is_seen(how):
    keys, count = COUNTED[how]
    program = Program(jax.make_jaxpr(lambda x: (k := keys(x), count(k)))(jnp.ones((6, E))))
    root, counted = program.outputs
    found = Histograms(program)
    assert found.counted_keys(counted) == found.root(root) is not None


@pytest.mark.parametrize("how", OTHERS)
def test_what_is_no_count_of_all_keys_is_not_taken_for_one(how):
    program = Program(jax.make_jaxpr(lambda x: (k := FIRST(x), OTHERS[how](k)))(jnp.ones((6, E))))
    assert Histograms(program).counted_keys(program.outputs[1]) is None


def test_of_some_keys_these_are_counted_and_not_all():
    def some(x):
        keys = jnp.argmax(x, -1)
        first = keys[:3]
        return keys, first, jnp.bincount(first, length=E)

    program = Program(jax.make_jaxpr(some)(jnp.ones((6, E))))
    keys, first, counted = program.outputs
    found = Histograms(program)
    assert found.counted_keys(counted) == found.root(first) != found.root(keys)


def test_keys_that_do_not_fit_into_another_type_are_not_those_that_are_counted():
    def rounded(x):
        keys = jnp.argmax(x, -1)
        return keys, jnp.bincount(keys.astype(jnp.uint8), length=300)

    for number, fits in ((300, False), (256, True)):
        program = Program(jax.make_jaxpr(rounded)(jnp.ones((6, number))))
        root, counted = program.outputs
        found = Histograms(program)
        assert (found.counted_keys(counted) == found.root(root)) == fits


def test_keys_that_might_be_negative_are_not_counted():
    program = Program(jax.make_jaxpr(lambda k: jnp.bincount(k, length=E))(jnp.arange(6)))
    assert Histograms(program).counted_keys(program.outputs[0]) is None


# A mixture of experts on rows of 5 numbers, a gate for each.

P = {"route": W[:, :E], "up": normal(7, E, 5, 6), "bias": normal(9, E, 6), "down": normal(8, E, 6, 5)}


def routed(p, x):
    return lax.top_k(jax.nn.softmax(x @ p["route"]), BEST)


def experts(p, rows, sizes):
    return lax.ragged_dot(jnp.tanh(lax.ragged_dot(rows, p["up"], sizes)), p["down"], sizes)


def permuted(p, x):
    gates, chosen = routed(p, x)
    order = jnp.argsort(chosen.reshape(-1))
    made = experts(p, x[order // BEST], jnp.bincount(chosen.reshape(-1), length=E))
    return jnp.einsum("nkd,nk->nd", made[jnp.argsort(order)].reshape(-1, BEST, 5), gates)


def added(p, x):
    gates, chosen = routed(p, x)
    order = jnp.argsort(chosen.reshape(-1))
    made = experts(p, jnp.take(x, order // BEST, axis=0), hot(chosen).sum((0, 1)))
    return x.at[order // BEST].add(made * gates.reshape(-1)[order][:, None])


def set_back(p, x):
    gates, chosen = routed(p, x)
    key = chosen.reshape(-1)
    _, order = lax.sort_key_val(key, jnp.arange(key.size))
    made = experts(p, jnp.repeat(x, BEST, axis=0)[order], (key[:, None] == jnp.arange(E)).sum(0))
    back = jnp.zeros_like(made).at[order].set(made)
    return (back.reshape(-1, BEST, 5) * gates[..., None]).sum(1)


def sorted_along(p, x):
    """Gates are sorted with the keys; the inverse is set, not sorted; a bias of each row's expert is looked up."""
    gates, chosen = routed(p, x)
    key = chosen.reshape(-1)
    ordered, order, weights = lax.sort((key, jnp.arange(key.size), gates.reshape(-1)), num_keys=1)
    sizes = jnp.bincount(key, length=E)
    hidden = lax.ragged_dot(x[order // BEST], p["up"], sizes) + p["bias"][ordered]
    made = lax.ragged_dot(jax.nn.gelu(hidden), p["down"], sizes) * weights[:, None]
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
    return made[inverse].reshape(-1, BEST, 5).sum(1)


def best_alone(p, x):
    key = jnp.argmax(x @ p["route"], -1)
    order = jnp.argsort(key)
    return experts(p, x[order], jnp.bincount(key, length=E))[jnp.argsort(order)]


@jax.custom_vjp
def reordered(x, order):
    """As MaxText has it: the gradient is looked up by the inverse, not added up."""
    return x[order]


reordered.defvjp(lambda x, order: (x[order], order), lambda order, g: (g[jnp.argsort(order)], None))


def by_own_rule(p, x):
    gates, chosen = routed(p, x)
    order = jnp.argsort(chosen.reshape(-1))
    rows = reordered(jnp.repeat(x, BEST, axis=0), order)
    made = reordered(experts(p, rows, jnp.bincount(chosen.reshape(-1), length=E)), jnp.argsort(order))
    return jnp.einsum("nkd,nk->nd", made.reshape(-1, BEST, 5), gates)


FORMS = (by_own_rule, permuted, added, set_back, sorted_along, best_alone)


REMATS = {
    "none": lambda f: f,
    "full": jax.checkpoint,
    "dots": lambda f: jax.checkpoint(f, policy=products_saveable),
}


@pytest.mark.parametrize("form", thinned(FORMS, [*FORMS][::3]))
def test_each_microbatch_sorts_its_own_rows(form):
    check(case(lambda p, x: ((form(p, x) - x) ** 2).mean(), P, X), MEAN, rtol=2e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("remat", REMATS)
def test_an_order_is_followed_to_its_end_through_a_loop_and_its_derivatives(form, remat):
    def loss(ps, x):
        layer = lambda x, p: (x + form(p, x), None)  # noqa: E731
        return (lax.scan(REMATS[remat](layer), x, ps)[0] ** 2).sum()

    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), P)
    program = Program(jax.make_jaxpr(jax.value_and_grad(loss))(stacked, X))
    orders = SortAnalysis(program)
    assert not [
        e.name for e in program.equations if any(isinstance(orders.states.get(v), UnknownOrder) for v in e.results)
    ]
    assert orders.grouped_products == {e.index for e in program.equations if e.name == "ragged_dot_general"}
    assert len(orders.sorts) == 1 + (remat != "none")
    # With "dots" rows of both passes meet, so that what is sorted again has to be known for the same.
    assert len({*orders.sorts.values()}) == 1 + (remat == "full")


def ordered(p, x):
    key = routed(p, x)[1].reshape(-1)
    order = jnp.argsort(key)
    return key, order, x[order // BEST]


def other_sizes(p, x):
    key, order, rows = ordered(p, x)
    return experts(p, rows, jnp.bincount(jnp.minimum(key + 1, E - 1), length=E))[jnp.argsort(order)]


def first_rows(p, x):
    key, _, rows = ordered(p, x)
    return experts(p, rows, jnp.bincount(key, length=E))[: x.shape[0]]


def places_in_order(p, x):
    _, order, rows = ordered(p, x)
    return rows * (jnp.arange(order.size)[:, None] % 3)


def beside_unsorted(p, x):
    _, _, rows = ordered(p, x)
    return rows * jnp.repeat(x, BEST, axis=0)


def dropped_out(p, x):
    _, order, rows = ordered(p, x)
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, rows.shape), rows, 0)[jnp.argsort(order)]


def running(p, x):
    _, order, rows = ordered(p, x)
    return jnp.cumsum(rows, axis=0)[jnp.argsort(order)]


def back_by_another(p, x):
    _, _, rows = ordered(p, x)
    return rows[jnp.argsort(jnp.argsort(x[:, 0].repeat(BEST)))]


def numbers_themselves(p, x):
    return x * ordered(p, x)[1].reshape(-1, BEST)[:, :1]


@pytest.mark.parametrize(
    "form",
    [
        other_sizes,
        first_rows,
        places_in_order,
        beside_unsorted,
        dropped_out,
        running,
        back_by_another,
        numbers_themselves,
    ],
)
def test_what_depends_on_where_a_row_was_sorted_to_is_unknown(form):
    assert isinstance(case(lambda p, x: (form(p, x) ** 2).mean(), P, X).labels[0], UnknownLabel)


@pytest.mark.parametrize("dtype", (jnp.int32, jnp.uint8))
def test_numbers_of_rows_that_go_round_in_their_type_are_no_order(dtype):
    """400 rows are sorted; as bytes the last 144 of them have the numbers of the first."""

    def form(p, x):
        key = routed(p, x)[1].reshape(-1)
        order = lax.sort_key_val(key, jnp.arange(key.size, dtype=dtype))[1]
        return x.repeat(BEST, axis=0)[order].sum(0)

    orders = SortAnalysis(Program(jax.make_jaxpr(form)(P, normal(9, 200, 5))))
    assert orders.sorts and bool(orders.lost_at) == (dtype == jnp.uint8)


def test_sorted_rows_among_the_outputs_are_unknown_and_their_sum_is_not():
    made = case(lambda p, x: ((rows := ordered(p, x)[2]).sum(), rows), P, X)
    assert made.labels[0] == ExampleSum() and isinstance(made.labels[1], UnknownLabel)


def carried(p, x):
    """Layers whose sorted rows a loop carries, and which are put back after the last."""
    keys = jnp.argmax(x @ p["route"], -1)
    order, sizes = jnp.argsort(keys), jnp.bincount(keys, length=E)
    layer = lambda rows, w: (rows + jnp.tanh(lax.ragged_dot(rows, w, sizes)), None)  # noqa: E731
    rows, _ = lax.scan(layer, x[order], p["layers"])
    return jnp.zeros_like(x).at[order].set(rows)


def mixed_on_the_way(p, x):
    keys = jnp.argmax(x @ p["route"], -1)
    order = jnp.argsort(keys)
    rows, _ = lax.scan(lambda rows, w: (rows + jnp.roll(rows, 1, 0) @ w[0], None), x[order], p["layers"])
    return jnp.zeros_like(x).at[order].set(rows)


LAYERS = {"route": normal(1, 8, E), "layers": 0.3 * normal(2, 3, E, 8, 8)}


def test_rows_that_a_loop_carries_stay_in_their_order_unless_it_mixes_them():
    def orders(model):
        loss = lambda p, x: (model(p, x) ** 2).mean()  # noqa: E731
        return SortAnalysis(Program(jax.make_jaxpr(jax.grad(loss))(LAYERS, normal(3, 16, 8))))

    kept, mixed = orders(carried), orders(mixed_on_the_way)
    assert len(kept.grouped_products) == 3 and not kept.lost_at, "forward, and the gradients of rows and weights"
    assert mixed.lost_at


def test_a_sort_of_what_a_loop_carries_sorted_makes_no_order():
    """In the first trip it sorts rows as they are, and in all others those of the trip before."""

    def sorted_again(keys, rows):
        trip = lambda rows, _: (lax.sort((keys, rows), num_keys=1)[1], None)  # noqa: E731
        return lax.scan(trip, rows, None, length=3)[0]

    orders = SortAnalysis(Program(jax.make_jaxpr(sorted_again)(jnp.arange(6) % 4, jnp.arange(6.0))))
    assert not orders.sorts and isinstance(orders.states[orders.program.outputs[0]], UnknownOrder)


def test_the_order_of_a_loops_last_trip_is_not_that_of_another_trip():
    def each_sorted(routes, x):
        def trip(_, route):
            rows = x[jnp.argsort(jnp.argmax(x @ route, -1))]
            return rows, rows

        last, each = lax.scan(trip, jnp.zeros_like(x), routes)
        return last, lax.scan(lambda total, rows: (total + (last * rows).sum(), None), 0.0, each)[0]

    orders = SortAnalysis(Program(jax.make_jaxpr(each_sorted)(normal(1, 3, 8, E), normal(2, 16, 8))))
    last, total = orders.program.outputs
    assert isinstance(orders.states.get(last), UnknownOrder) and isinstance(orders.states.get(total), UnknownOrder)  # pyright: ignore[reportArgumentType]


def test_the_order_of_one_trip_is_not_that_of_the_trip_of_a_loop_around_it():
    def put_back(routes, x, around):
        def sort(_, route):
            order = jnp.argsort(jnp.argmax(x @ route, -1))
            return None, (x[order], jnp.argsort(order))

        (each, back) = lax.scan(sort, None, routes)[1]
        if around:  # the rows of each trip by the places of each
            every = lambda _, rows: (None, lax.scan(lambda _, k: (None, rows[k]), None, back)[1])  # noqa: E731
            return lax.scan(every, None, each)[1]
        return lax.scan(lambda _, both: (None, both[0][both[1]]), None, (each, back))[1]

    for around in (True, False):
        step = jax.make_jaxpr(partial(put_back, around=around))(normal(1, 3, 8, E), normal(2, 16, 8))
        orders = SortAnalysis(Program(step))
        assert orders.sorts and bool(orders.lost_at) == around


def test_an_order_that_leaves_one_branch_is_lost():
    def sorted_or_not(p, x, rest):
        return lax.cond(rest, lambda: routed_rows(p, x), lambda: x)

    def routed_rows(p, x):
        keys = jnp.argmax(x @ p["route"], -1)
        return lax.ragged_dot(x[jnp.argsort(keys)], p["layers"][0], jnp.bincount(keys, length=E))

    orders = SortAnalysis(Program(jax.make_jaxpr(sorted_or_not)(LAYERS, normal(3, 16, 8), True)))
    assert set(orders.sorts.values()) == orders.lost_at.keys() != set()


@pytest.mark.parametrize(
    ("strategy", "mesh", "options"),
    [("ep", "cpu:8 data=2 expert=4", {}), ("dp", "cpu:4 data=4", {"microbatches": 2})],
)
def test_layers_whose_sorted_rows_a_loop_carries_are_divided(strategy, mesh, options):
    def step(p, x):
        value, gradients = jax.value_and_grad(lambda p: ((carried(p, x) - 1) ** 2).mean())(p)
        return jax.tree.map(lambda a, b: a - 0.1 * b, p, gradients), value

    sharded = jaxshard_magic.shard(step, strategy, mesh=mesh, **options)
    x = normal(3, 32, 8)
    for got, want in zip(*map(jax.tree.leaves, (sharded(LAYERS, x), jax.jit(step)(LAYERS, x))), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    plan = sharded.planned(LAYERS, x).plan
    assert not [f for f in plan.findings if "no sum over examples" in f.message]
    specs = {leaf.path: tuple(leaf.spec) for leaf in plan.leaves}
    assert ("expert" in specs["p.layers"]) == (strategy == "ep")
