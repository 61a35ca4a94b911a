"""Rows sorted by expert: each shard of the batch sorts its own; divided experts get all rows and do their own."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo
from jax import lax
from jax.sharding import PartitionSpec as P
from support.divided_experts import AG, AR, RS, finding, leaves, planned, sent, told
from support.divided_experts import ran as ran
from support.positions import same
from support.refusals import refusal
from zoo.dropless_experts import (
    BEST,
    EXPERTS,
    HIDDEN,
    LENGTH,
    WIDTH,
    expert_params,
    of_sorted,
    permuted,
    placed,
    regression,
)
from zoo.parts import BATCH, Draw, descend

import jaxshard_magic
from jaxshard_magic.strategies.regions.sorted_rows import order_local_experts_first

PERMUTED, SCANNED, LANGUAGE = "dropless_permuted", "dropless_scanned", "dropless_language_model"
ALONE, BESIDE = ("ep", "expert=8"), ("ep+dp", "data=2 expert=4")
STORED, INSIDE = ("ep+fsdp", "data=2 expert=4"), ("ep+tp", "data=2 expert=2 model=2")
QUICK = {(PERMUTED, BESIDE), (SCANNED, STORED)}
TABLE = [
    pytest.param(form, on, marks=() if (form, on) in QUICK else pytest.mark.full, id=" ".join((form, *on)))
    for form in (PERMUTED, SCANNED, LANGUAGE)
    for on in (ALONE, BESIDE, STORED, INSIDE)
]
F32 = 4
TOKENS, ROWS = BATCH * LENGTH, BATCH * LENGTH * BEST
MATRIX, ROUTER, HEAD = WIDTH * HIDDEN * F32, WIDTH * EXPERTS * F32, WIDTH * WIDTH * F32


@pytest.mark.parametrize(("form", "on"), TABLE)
def test_divided_experts_of_sorted_rows_give_the_plain_numbers_of_five_steps(ran, form, on):
    ran(form, *on)


def test_rows_go_to_the_experts_and_back_and_no_weight_does(ran):
    """Forward the rows of the devices that share experts, and the sum of what these made; backward the gradient of
    that. That of the rows is not asked for: tokens are data. Gradients of an expert are added up over data alone."""
    step, both, own = ran(PERMUTED, *BESIDE), ("data", "expert"), EXPERTS // 4
    rows, sizes = ROWS // 2 * WIDTH * F32, EXPERTS * F32
    wanted = Counter({(AG, ("expert",), rows): 2, (RS, ("expert",), rows): 1, (AR, ("data",), own * MATRIX): 3})
    wanted |= {(AR, both, ROUTER): 1, (AR, both, HEAD): 1}
    wanted |= {(AG, ("expert",), 4 * sizes): 1}  # how many rows each device has of each expert
    wanted |= {(AR, both, sizes): 2}  # how many each expert has of all, and its mean gate, for the balance of the loss
    assert sent(step.report()) == wanted == told(planned(PERMUTED, *BESIDE))


def test_in_layers_that_are_computed_again_rows_go_six_times_each_way(ran):
    """To the experts forward, again, and with gradients, and back from them as often: the gradient of the rows is the
    sum of what two products make of it, which goes back once. fsdp gathers each expert's weights over data, forward and
    again."""
    found, layers, rows = sent(ran(SCANNED, *STORED).report()), 2, ROWS // 2 * WIDTH * F32
    assert found[AG, ("expert",), rows] == found[RS, ("expert",), rows] == 3 * layers
    assert found[AG, ("data",), EXPERTS // 4 * MATRIX] == 2 * 3 * layers
    plan = told(planned(SCANNED, *STORED))
    assert plan[AG, ("expert",), rows] == plan[RS, ("expert",), rows] == 3 * layers


@pytest.mark.ci
def test_under_dp_no_row_goes_to_another_device_to_be_sorted(ran):
    found = sent(ran(SCANNED, "dp", "data=8").report())
    layers, over = 2, ("data",)
    wanted = {(AR, over, EXPERTS * MATRIX): 3 * layers, (AR, over, ROUTER): layers, (AR, over, HEAD): 1}
    assert found == wanted == told(planned(SCANNED, "dp", "data=8"))


AGAIN = {"remat": "full", "microbatches": 2}


def test_rows_of_microbatches_that_are_computed_again_are_known_for_the_same():
    """So that none of them are mixed with those of the forward pass: an expert's gradients move over data alone."""
    plan = planned(PERMUTED, *BESIDE, **AGAIN)
    assert "experts-sorted" in {f.code for f in plan.findings}
    assert told(plan)[AR, ("data",), EXPERTS // 4 * MATRIX] == 3 * AGAIN["microbatches"]


@pytest.mark.full
def test_rows_that_are_computed_again_have_the_numbers_of_those_that_are_kept():
    step, mesh = zoo.STEPS[PERMUTED], jaxshard_magic.mesh("cpu:8 expert=8")
    calls = []
    for remat in ("full", None):
        call = step.make()
        sharded = jaxshard_magic.shard(call.fn, "ep", mesh=mesh, remat=remat, microbatches=2)
        calls.append(zoo.numbers_of_calls(step, call, sharded, calls=3))
    for again, kept in zip(*calls, strict=True):
        assert all(difference.rounding for difference in zoo.differences(step, again, kept))


@pytest.mark.ci
def test_rows_that_are_set_back_go_no_further_than_others(ran):
    """The derivative of `.at[order].set` asks which row was set last at each place: all were, in any order."""
    found = sent(ran(LANGUAGE, *BESIDE).report())
    rows = ROWS // 2 * WIDTH * F32
    assert {m[1:] for m in found if m[0] == AG} == {(("expert",), rows), (("expert",), 4 * EXPERTS * F32)}


@pytest.mark.ci
def test_where_one_expert_gets_all_rows_none_is_dropped():
    step = zoo.STEPS[PERMUTED]
    (params, batch) = step.make().args
    params["experts"]["route"] = jnp.zeros_like(params["experts"]["route"])
    call = step.make()
    sharded = jaxshard_magic.shard(call.fn, "ep", mesh=jaxshard_magic.mesh("cpu:8 expert=8"))
    want = call.fn(params, batch)
    for a, b in zip(jax.tree.leaves(sharded(params, batch)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


def test_a_devices_own_rows_are_first_and_in_the_order_of_its_experts():
    """Four experts on two devices, which have 3 and 4 rows: 1, 0, 2, 0 and 2, 1, 0, 1 of each expert. Rows are numbered
    through: of experts 0 and 1 (the first device's) 0, then 3, 4 of expert 0 and 5 of 1; of the others 1, 2 and 6."""
    counts = jnp.array([[1, 0, 2, 0], [2, 1, 0, 0]])
    mesh = jaxshard_magic.mesh("cpu:8 expert=2 data=4")

    def on_device(mine):
        own, order = order_local_experts_first(mine[0], ("expert",), jax.lax.axis_index("expert"), 6)
        return own[None], order[None]

    found = jax.shard_map(on_device, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False)
    own, order = map(np.asarray, jax.jit(found)(counts))
    assert own.tolist() == [[3, 1], [2, 0]]
    assert order[0][:4].tolist() == [0, 3, 4, 5] and order[1][:2].tolist() == [1, 2]


def test_the_cost_of_bringing_rows_is_told_and_unsorted_rows_not_divided():
    message = next(f.message for f in planned(PERMUTED, *ALONE).findings if f.code == "experts-sorted")
    assert "the rows of all 8 devices of expert are gathered on each" in message
    codes = {f.code for f in planned("dropless_placed", *ALONE).findings}
    assert "experts-ragged" in codes and "experts-sorted" not in codes


def random_rows(p, x):
    """As `permuted`, with random numbers that are drawn for sorted rows."""
    flat = x.reshape(-1, WIDTH)
    experts = lax.top_k(jax.nn.softmax(flat @ p["route"]), BEST)[1].reshape(-1)
    order, sizes = jnp.argsort(experts), jnp.bincount(experts, length=EXPERTS)
    rows = flat[order // BEST]
    rows = rows * jax.random.bernoulli(jax.random.key(0), 0.9, rows.shape)
    made = of_sorted(p, rows, sizes)[jnp.argsort(order)]
    return x + made.reshape(-1, BEST, WIDTH).sum(1).reshape(x.shape)


def two_layers(second):
    """The plan of a layer that sorts rows of its own and another one, and what says that weights are whole."""

    def step(params, batch):
        def loss_fn(p):
            x, _ = permuted(p["first"], batch["x"])
            return jnp.mean((second(p["second"], x) - batch["y"]) ** 2)

        return descend(params, jax.grad(loss_fn)(params))

    d = Draw(0)
    params, mesh = {name: expert_params(d) for name in ("first", "second")}, jaxshard_magic.mesh("expert=4")
    plan = jaxshard_magic.shard(step, "ep", mesh=mesh).planned(params, regression(d)).plan
    (said,) = [f.message for f in plan.findings if f.code in ("experts-ragged", "experts-beside")]
    return {leaf.path.removeprefix("params."): leaf.spec[0] for leaf in plan.leaves if leaf.spec}, said


def of_all_tokens(p, x):
    best, chosen = lax.top_k(jax.nn.softmax(x @ p["route"]), BEST)
    shares = (jax.nn.one_hot(chosen, EXPERTS) * best[..., None]).sum(-2)
    hidden = jnp.tanh(jnp.einsum("btd,edf->btef", x, p["up"]))
    return x + jnp.einsum("btef,efd,bte->btd", hidden, p["down"], shares)


def looped(p, x):
    def add(out, one):
        up, down, share = one
        return out + share[..., None] * (jnp.tanh(x @ up) @ down), None

    best, chosen = lax.top_k(jax.nn.softmax(x @ p["route"]), BEST)
    shares = (jax.nn.one_hot(chosen, EXPERTS) * best[..., None]).sum(-2)
    return lax.scan(add, x, (p["up"], p["down"], jnp.moveaxis(shares, -1, 0)))[0]


@pytest.mark.parametrize("second", (of_all_tokens, looped))
def test_experts_of_another_form_beside_sorted_ones_are_said_to_be_whole(second):
    specs, said = two_layers(second)
    assert (specs["first.up"], specs["second.up"]) == ("expert", None)
    assert "params.second.down and 1 more are whole on every device of expert" in said


def test_a_layer_whose_rows_are_not_sorted_is_named_beside_one_that_is_divided():
    specs, said = two_layers(placed)
    assert (specs["first.up"], specs["second.up"]) == ("expert", None)
    assert "params.second.gate and 2 more, are whole" in said and "Its rows would have to be sorted" in said


def test_what_mixes_rows_is_named_also_for_a_layer_before_it():
    """Its gradient comes back through these rows, so that nothing is known of it."""
    specs, said = two_layers(random_rows)
    assert (specs["first.up"], specs["second.up"]) == (None, None)
    line = random_rows.__code__.co_firstlineno + 6
    assert "params.first.gate and 5 more" in said and f"mul at test_ep_sorted.py, line {line} makes" in said


def test_experts_of_ragged_products_that_do_not_divide_are_refused():
    assert "8 experts do not divide by expert=16" in refusal(planned, PERMUTED, "ep", "v5e:4x4 expert=16")


def biased(made, params, batch):
    """Experts with biases and one product for two, as gpt-oss has them. `made`: of their hidden rows, the sizes of
    their groups and which expert each is of."""

    def loss_fn(p):
        mixture, flat = p["mixture"], batch["x"].reshape(-1, WIDTH)
        gates, chosen = lax.top_k(jax.nn.softmax(flat @ mixture["route"]), BEST)
        experts = chosen.reshape(-1)
        order = jnp.argsort(experts)
        sizes, of = jnp.bincount(experts, length=EXPERTS), experts[order]
        both = lax.ragged_dot(flat[order // BEST], mixture["both"], sizes) + mixture["bias"][of]
        gate, up = jnp.split(both, 2, axis=-1)
        rows = made(mixture, jax.nn.silu(gate) * up, sizes, of)
        back = rows[jnp.argsort(order)].reshape(-1, BEST, WIDTH)
        y = batch["x"] + jnp.einsum("bkd,bk->bd", back, gates).reshape(batch["x"].shape)
        return jnp.mean((y @ p["head"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return descend(params, grads), loss


def with_bias(p, rows, sizes, of):
    return lax.ragged_dot(rows, p["down"], sizes) + p["last"][of]


def with_what_is_not_linear(p, rows, sizes, of):
    rest = jax.nn.sigmoid(lax.ragged_dot(rows, p["down"], sizes))
    return with_bias(p, rows, sizes, of) + lax.stop_gradient(rest)


def biased_call(made):
    def train_step(params, batch):
        return biased(made, params, batch)

    d = Draw(0)
    mixture = expert_params(d)
    mixture |= {"both": jnp.concatenate([mixture.pop("gate"), mixture.pop("up")], -1)}
    mixture |= {"bias": d.normal(EXPERTS, 2 * HIDDEN, scale=0.1), "last": d.normal(EXPERTS, WIDTH, scale=0.1)}
    return jax.jit(train_step), ({"mixture": mixture, "head": d.weight(WIDTH, WIDTH)}, regression(d))


def shard_biased(made, on, device="", **options):
    step, args = biased_call(made)
    strategy, axes = on
    return jaxshard_magic.shard(step, strategy, mesh=jaxshard_magic.mesh(f"{device}{axes}"), **options), args


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_each_row_gets_its_bias_where_its_expert_is(dtype):
    """Rows go there and back as without biases, the cut in two between products included, and besides them which expert
    each is of. The gradient of a bias is added up over data alone, as its expert's matrix is. The CPU sends bfloat16 as
    float32."""
    step, args = shard_biased(with_bias, BESIDE)
    args = jax.tree.map(lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x, args)
    plan, both, own, rows = step.planned(*args).plan, ("data", "expert"), EXPERTS // 4, ROWS // 2
    wanted = Counter({(AG, ("expert",), rows * WIDTH * F32): 2, (RS, ("expert",), rows * WIDTH * F32): 1})
    wanted |= {(AG, ("expert",), rows * F32): 1, (AG, ("expert",), 4 * EXPERTS * F32): 1}
    wanted |= {(AR, ("data",), own * 2 * MATRIX): 1, (AR, ("data",), own * MATRIX): 1}
    wanted |= {(AR, ("data",), own * 2 * HIDDEN * F32): 1, (AR, ("data",), own * WIDTH * F32): 1}
    wanted |= {(AR, both, ROUTER): 1, (AR, both, HEAD): 1}
    assert told(plan) == wanted
    found = leaves(plan)
    assert found["bias"] == found["last"] == ("expert", None)


def test_what_is_not_zero_where_its_expert_is_not_goes_back_before_it_is_added():
    """The sum of a product and of what is not linear in another: two sums over the devices, each of a product."""
    step, args = shard_biased(with_what_is_not_linear, BESIDE)
    assert told(step.planned(*args).plan)[RS, ("expert",), ROWS // 2 * WIDTH * F32] == 2


def has_plain_numbers(step, made, args):
    plain, _ = biased_call(made)
    for got, want in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(plain(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-5)


@pytest.mark.full
def test_biases_of_microbatches_are_added_up_where_their_experts_are():
    step, args = shard_biased(with_bias, BESIDE, "cpu:8 ", microbatches=2, reduce="once")
    has_plain_numbers(step, with_bias, args)
    assert not any(kind == AG and size > ROWS // 4 * WIDTH * F32 for kind, _, size in sent(step.report()))


@pytest.mark.full
@pytest.mark.parametrize("made", (with_bias, with_what_is_not_linear))
@pytest.mark.parametrize("on", (ALONE, BESIDE, STORED, INSIDE), ids=" ".join)
def test_biased_experts_give_the_plain_numbers_and_send_what_is_told(made, on):
    step, args = shard_biased(made, on, "cpu:8 ")
    has_plain_numbers(step, made, args)
    if on != INSIDE:  # halves of a divided dimension are the compiler's to move
        assert sent(step.report()) == told(step.planned(*args).plan)


def routed(returned):
    """A step whose aux is `returned(rows, order, sizes, keys)`, and its arguments."""

    def train_step(params, batch):
        def loss_fn(p):
            keys = jnp.argmax(batch["x"] @ p["route"], -1)
            order = jnp.argsort(keys)
            rows, sizes = batch["x"][order], jnp.bincount(keys, length=EXPERTS)
            aux = returned(rows, order, sizes, keys)
            rows = lax.ragged_dot(jax.nn.relu(lax.ragged_dot(rows, p["up"], sizes)), p["down"], sizes)
            return jnp.mean((rows[jnp.argsort(order)] - batch["y"]) ** 2), aux

        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return descend(params, grads), loss, aux

    d = Draw(0)
    rows = {"x": d.normal(TOKENS, WIDTH), "y": d.normal(TOKENS, WIDTH)}
    up, down = d.normal(EXPERTS, WIDTH, HIDDEN, scale=0.1), d.normal(EXPERTS, HIDDEN, WIDTH, scale=0.1)
    return jax.jit(train_step), ({"route": d.weight(WIDTH, EXPERTS), "up": up, "down": down}, rows)


SIZES = {
    "as they are": lambda rows, order, sizes, keys: sizes,
    "twice, and more": lambda rows, order, sizes, keys: (sizes, 2 * sizes, sizes.astype(float)),
    "of branches": lambda rows, order, sizes, keys: lax.cond(rows.sum() > 0, jnp.negative, abs, sizes),
    "sorted": lambda rows, order, sizes, keys: (jnp.sort(sizes), sizes[jnp.argsort(sizes)]),
    "within bounds": lambda rows, order, sizes, keys: (jnp.clip(sizes, 0, 5), jnp.arange(TOKENS + 1)[sizes]),
    "behind a barrier": lambda rows, order, sizes, keys: lax.optimization_barrier((keys, sizes, 1.0)),
}
IN_ORDER = {
    "sorted rows": lambda rows, order, sizes, keys: rows,
    "their places": lambda rows, order, sizes, keys: order,
    "the places back": lambda rows, order, sizes, keys: jnp.argsort(order),
    "sorted keys": lambda rows, order, sizes, keys: keys[order],
    "of each of a loop's trips": lambda rows, order, sizes, keys: lax.scan(lambda n, r: (n, r), 0, rows)[1],
    "sizes that a loop adds to": lambda rows, order, sizes, keys: lax.fori_loop(
        0, sizes[0], lambda i, n: n + sizes, sizes
    ),
}


@pytest.mark.parametrize("on", [("dp", "data=8"), BESIDE], ids=" ".join)
@pytest.mark.parametrize("what", [*SIZES, *IN_ORDER])
def test_what_a_step_returns_of_sorted_rows_is_what_it_is_on_one_device(what, on):
    """How many tokens each expert has are added up. Rows in the order of all of them need a sort of all of them."""
    step, args = routed((SIZES | IN_ORDER)[what])
    sharded = jaxshard_magic.shard(step, on[0], mesh=jaxshard_magic.mesh(f"cpu:8 {on[1]}"))
    for got, want in zip(jax.tree.leaves(sharded(*args)), jax.tree.leaves(step(*args)), strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-5)
    if on == BESIDE:
        said = {f.code for f in sharded.planned(*args).plan.findings}
        assert ("experts-sorted" in said) == (what in SIZES) != ("experts-ragged" in said)
    if what == "as they are":
        assert sent(sharded.report()) == told(sharded.planned(*args).plan)


@pytest.mark.parametrize(
    "told_of",
    [
        lambda sizes: jax.jit(lambda s: s.max())(sizes),
        lambda sizes: lax.cond(sizes[0, 0] > 3, lambda s: s.sum(0), lambda s: s[0], sizes),
        lambda sizes: lax.scan(lambda n, s: (n + s, n * s), jnp.zeros(EXPERTS, int), sizes),
    ],
    ids=["in a body", "in branches", "trip by trip"],
)
def test_sizes_stacked_by_one_loop_for_another_are_of_all_tokens(told_of):
    def train_step(params, batch):
        def loss_fn(p):
            def route(_, w):
                keys = jnp.argmax(batch["x"] @ w, -1)
                return None, (keys, jnp.bincount(keys, length=EXPERTS))

            def layer(x, each):
                w, (keys, sizes) = each
                order = jnp.argsort(keys)
                rows = lax.ragged_dot(jnp.tanh(lax.ragged_dot(x[order], w["up"], sizes)), w["down"], sizes)
                return x + rows[jnp.argsort(order)], None

            _, routes = lax.scan(route, None, p["route"])
            x, _ = lax.scan(layer, batch["x"], (p, routes))
            return jnp.mean((x - batch["y"]) ** 2), told_of(routes[1])

        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return descend(params, grads), loss, aux

    _, (params, batch) = routed(lambda *_: ())
    params = jax.tree.map(lambda w: jnp.stack([w, w[::-1], -w]), params)
    sharded = jaxshard_magic.shard(train_step, "dp", mesh=jaxshard_magic.mesh("cpu:8 data=8"))
    for got, want in zip(*map(jax.tree.leaves, (sharded(params, batch), train_step(params, batch))), strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-5)


def test_who_reads_sorted_rows_in_the_order_of_all_of_them_is_named():
    for show, said in (
        (lambda rows, *_: rows, "gather at test_ep_sorted.py, line"),
        (lambda rows, *_: jax.debug.callback(print, rows), "debug_callback at test_ep_sorted.py, line"),
    ):
        step, args = routed(show)
        plan = jaxshard_magic.shard(step, "ep", mesh=jaxshard_magic.mesh("expert=8")).planned(*args).plan
        message = finding(plan, "experts-ragged")
        assert said in message and message.endswith("in the order of all of them.")


def test_a_print_of_how_many_tokens_each_expert_has_is_of_all_tokens(capfd):
    step, args = routed(lambda rows, order, sizes, keys: jax.debug.print("{}", sizes))
    printed = []
    for made in (step, jaxshard_magic.shard(step, "ep", mesh=jaxshard_magic.mesh("cpu:8 expert=8"))):
        jax.block_until_ready(made(*args))
        jax.effects_barrier()
        printed.append({*capfd.readouterr().out.splitlines()})
    assert printed[0] == printed[1] and len(printed[0]) == 1


def test_sorted_tokens_beside_a_leaf_without_elements_have_no_positions_for_sp():
    step, (params, batch) = routed(lambda *_: ())
    batch = {name: x.reshape(BATCH, LENGTH, WIDTH) for name, x in batch.items()} | {"none": jnp.ones((BATCH, 0))}

    def of_sequences(params, batch):
        return step(params, {name: x.reshape(-1, WIDTH) for name, x in batch.items() if x.size})

    sharded = jaxshard_magic.shard(of_sequences, "sp", mesh=jaxshard_magic.mesh("data=4 seq=2"))
    assert "tokens are sorted by their expert at test_ep" in refusal(lambda: sharded.planned(params, batch))


@pytest.mark.ci
def test_a_pipeline_keeps_how_many_rows_each_expert_has_for_its_backward_pass():
    def train_step(params, batch):
        def loss_fn(p):
            def layer(x, w):
                keys = jnp.argmax(x @ w["route"], -1)
                order, sizes = jnp.argsort(keys), jnp.bincount(keys, length=EXPERTS)
                rows = lax.ragged_dot(jnp.tanh(lax.ragged_dot(x[order], w["up"], sizes)), w["down"], sizes)
                return x + rows[jnp.argsort(order)], None

            x, _ = lax.scan(layer, batch["x"], p)
            return jnp.mean((x - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return descend(params, grads), loss

    _, (params, batch) = routed(lambda *_: ())
    params = jax.tree.map(lambda w: jnp.stack([w, w[::-1]]), params)
    mesh = jaxshard_magic.mesh("cpu:4 stage=2 data=2")
    sharded = jaxshard_magic.shard(train_step, "pp+dp", mesh=mesh, microbatches=2)
    for got, want in zip(*map(jax.tree.leaves, (sharded(params, batch), train_step(params, batch))), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-5)


def test_weights_of_ragged_products_stay_whole_and_are_named():
    def train_step(params, x):
        def loss_fn(p):
            chosen = jnp.argmax(x @ p["router"], -1)
            order = jnp.argsort(-chosen)  # by another number than that of which the sizes are counted
            hidden = lax.ragged_dot(x[order], p["up"], jnp.bincount(chosen, length=4))
            return jnp.mean(hidden**2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    keys = jax.random.split(jax.random.key(0), 3)
    params = {"router": jax.random.normal(keys[0], (8, 4)), "up": jax.random.normal(keys[1], (4, 8, 16))}
    x = jax.random.normal(keys[2], (16, 8))
    step = jaxshard_magic.shard(train_step, "ep", mesh=jaxshard_magic.mesh("expert=4"))
    same(step(params, x), jax.jit(train_step)(params, x))
    entry = step.planned(params, x)
    message = finding(entry.plan, "experts-ragged")
    assert (
        "its weights, params.up, are whole" in message
        and "sizes of the groups of ragged_dot_general at test_ep_sorted.py, line" in message
    )
