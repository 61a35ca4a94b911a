"""Microbatches: the full batch's numbers from one scan, with less memory and one reduction between devices."""

import gc
import threading
import weakref
from itertools import product
from queue import SimpleQueue

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.refusals import refusal
from support.thinned import thinned

import jaxshard_magic
from jaxshard_magic.errors import ShardError
from jaxshard_magic.gradients.rows import join_microbatches, microbatch_rows, split_microbatches

KEY = jax.random.key(0)
WIDTH, LAYERS, EXAMPLES = 32, 3, 32


def weights(layers=LAYERS, width=WIDTH):
    keys = jax.random.split(KEY, layers)
    return [{"w": jax.random.normal(k, (width, width)) * width**-0.5, "b": jnp.zeros(width)} for k in keys]


def batch(examples=EXAMPLES, width=WIDTH):
    x, y, w = jax.random.split(jax.random.key(1), 3)
    return {
        "x": jax.random.normal(x, (examples, width)),
        "y": jax.random.normal(y, (examples, width)),
        "w": jax.random.bernoulli(w, 0.6, (examples,)).astype(jnp.float32),
    }


def errors(params, data, key=None):
    x = data["x"]
    for i, layer in enumerate(params):
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
        if key is not None:
            kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.8, x.shape)
            x = jnp.where(kept, x / 0.8, 0)
    return jnp.square(x - data["y"]).mean(-1)


def mean(params, data):
    return errors(params, data).mean(), {}


def total(params, data):
    return errors(params, data).sum(), {}


def total_with_decay(params, data):
    return errors(params, data).sum() + 0.1 * optax.global_norm(params) ** 2, {}


def masked(params, data):
    e = errors(params, data)
    return (e * data["w"]).sum() / data["w"].sum(), {}


def dropped(params, data):
    return errors(params, data, jax.random.key(7)).mean(), {}


def reporting(params, data):
    e = errors(params, data)
    told = {
        "each": e,
        "worst": e.max(),
        "small": (e < 1).sum(),
        "share": (e < 1).mean(),
        "perplexity": jnp.exp(e.mean()),
    }
    return e.mean(), told | {"norm": optax.global_norm(params)}


OPTIMIZERS = {
    "adam, clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "schedule": optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-2, 3, 12)),
    "every second step": optax.MultiSteps(optax.sgd(0.1), 2),
}


def step_of(loss, optimizer=OPTIMIZERS["adam, clipped"]):
    def step(params, state, data):
        (value, told), grads = jax.value_and_grad(loss, has_aux=True)(params, data)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, {"loss": value, **told}

    return step, optimizer.init


def farthest(got, want):
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    far = [np.max(np.abs(np.asarray(a) - np.asarray(b))) / (np.max(np.abs(np.asarray(b))) + 1e-9) for a, b in pairs]
    return max(map(float, far))


def trained(step, params, state, data, times):
    for _ in range(times):
        params, state, told = step(params, state, data)
    return params, state, told


def compare(loss, times=1, optimizer=OPTIMIZERS["adam, clipped"], mesh="data=4", strategy="fsdp", **options):
    step, init = step_of(loss, optimizer)
    params = weights()
    sharded = jaxshard_magic.shard(step, strategy, mesh=mesh, microbatches=4, **options)
    got = trained(sharded, params, init(params), batch(), times)
    want = trained(jax.jit(step), params, init(params), batch(), times)
    return farthest(got, want), sharded


@pytest.mark.parametrize(
    "loss",
    thinned([mean, total, total_with_decay, masked, dropped, reporting], [masked, reporting]),
)
def test_a_loss_over_microbatches_has_the_full_batch_s_numbers(loss):
    off, sharded = compare(loss)
    assert off < 2e-5
    assert not [f for f in sharded.entry.plan.findings if f.code == "microbatches"]


REDUCE = ("each", "once", "once-gathered")


@pytest.mark.parametrize(
    ("optimizer", "reduce"),
    thinned(product(OPTIMIZERS, REDUCE), [next(zip(OPTIMIZERS, REDUCE, strict=True))]),
)
def test_ten_steps_stay_those_of_the_plain_step(optimizer, reduce):
    off, _ = compare(dropped, 10, OPTIMIZERS[optimizer], reduce=reduce)
    assert off < 2e-4  # adam turns rounding into steps


@pytest.mark.parametrize(
    ("strategy", "kind"),
    thinned([("dp", "all-reduce"), ("fsdp", "reduce-scatter")], [("fsdp", "reduce-scatter")]),
)
def test_gradients_are_reduced_between_devices_once_a_step(strategy, kind):
    def moved(reduce):
        step, init = step_of(mean)
        sharded = jaxshard_magic.shard(step, strategy, mesh="data=4", microbatches=4, reduce=reduce)
        params = weights(width=128)
        sharded.prepare(params, init(params), batch(width=128))
        rows = sharded.report().collectives
        return sum(c.count * c.bytes for c in rows if c.kind == kind and "gradient" in (c.what or ""))

    parameters = LAYERS * 128 * 128 * 4
    assert parameters <= moved("once") <= 1.05 * parameters
    if strategy == "dp":
        assert moved("each") >= 4 * parameters


@pytest.mark.ci
def test_temporaries_fall_with_the_microbatches():
    def loss(params, data):
        x = data["x"]
        for layer in params:
            x = x + jax.nn.gelu(x @ layer["w"])
        return jnp.square(x).mean(), {}

    step, init = step_of(loss)
    params, data = weights(8), batch(4096)

    def temporaries(n):
        sharded = jaxshard_magic.shard(step, "dp", mesh="data=2", microbatches=n)
        sharded.prepare(params, init(params), data)
        return sharded.report().memory.per_device[0].temporaries

    assert temporaries(1) > 3.2 * temporaries(4)
    assert temporaries(1) > 5.5 * temporaries(8)


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.BatchNorm(WIDTH, rngs=rngs)
        self.drop, self.last = nnx.Dropout(0.2, rngs=rngs), nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(nnx.gelu(self.norm(self.first(x)))))


def nnx_step(model, optimizer, data):
    def loss(model):
        return jnp.square(model(data["x"]) - data["y"][:, :4]).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def nnx_state():
    model = Normed(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@pytest.mark.ci
def test_statistics_of_a_batch_norm_go_from_one_microbatch_to_the_next_as_by_hand():
    sharded = jaxshard_magic.shard(nnx_step, "fsdp", mesh="data=2", microbatches=4, check=True)
    model, optimizer = nnx_state()
    sharded(model, optimizer, batch())
    assert sharded.checked.passed
    assert sharded.checked.reference == "a loop over microbatches written by hand, on one device"
    (said,) = [f for f in sharded.entry.plan.findings if f.code == "microbatches"]
    assert "from one to the next" in said.message

    by_hand, _ = nnx_state()
    data, rows = batch(), microbatch_rows(EXAMPLES, 4, 2)
    for mine in rows:
        by_hand(data["x"][mine])
    np.testing.assert_allclose(model.norm.mean[...], by_hand.norm.mean[...], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.norm.var[...], by_hand.norm.var[...], rtol=1e-5, atol=1e-6)


def test_both_gradient_calls_of_a_step_are_taken_in_microbatches():
    def step(maker, critic, data):
        def critical(critic):
            return (jnp.tanh(data["x"] @ critic) - jnp.tanh(data["x"] @ maker @ critic)).mean()

        def making(maker):
            return -jnp.tanh(data["x"] @ maker @ critic).mean()

        a, g = jax.value_and_grad(critical)(critic)
        critic = critic - 0.1 * g
        b, h = jax.value_and_grad(making)(maker)
        return maker - 0.1 * h, critic, a, b

    maker, critic = weights()[0]["w"], weights()[1]["w"]
    sharded = jaxshard_magic.shard(step, "dp", mesh="data=2", microbatches=4)
    assert farthest(sharded(maker, critic, batch()), step(maker, critic, batch())) < 1e-5
    assert str(sharded.entry.plan.traced.closed).count("scan[") == 2


def test_a_gradient_that_reads_no_examples_is_that_of_the_whole_batch():
    def step(w, data):
        g = jax.grad(lambda w: jnp.tanh(data["x"] @ w).mean())(w)
        penalty, h = jax.value_and_grad(lambda w: (w**2).sum())(w)
        return w - 0.1 * g - 0.01 * h, penalty

    w = weights()[0]["w"]
    sharded = jaxshard_magic.shard(step, "dp", mesh="data=2", microbatches=4)
    assert farthest(sharded(w, batch()), step(w, batch())) < 1e-5


def test_rows_of_every_shard_are_in_every_microbatch_and_join_undoes_split():
    assert microbatch_rows(12, 3, 2).tolist() == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    x = jnp.arange(5 * 12).reshape(5, 12)
    np.testing.assert_array_equal(split_microbatches(x, 1, 3, 2)[1], x[:, jnp.array([2, 3, 8, 9])])
    np.testing.assert_array_equal(join_microbatches(split_microbatches(x, 1, 3, 2), 1, 2), x)


@pytest.mark.parametrize("options", thinned([{"microbatches": 4}, {"remat": "full"}, {"pad": True}], [{"pad": True}]))
def test_a_step_with_options_keeps_no_argument_and_no_model_alive(options):
    step, init = step_of(mean)
    sharded, params = jaxshard_magic.shard(step, "dp", mesh="data=2", **options), weights()
    sharded(params, init(params), batch())
    gone = weakref.ref(params[0]["w"])
    del params
    ours, (model, optimizer) = jaxshard_magic.shard(nnx_step, "dp", mesh="data=2", **options), nnx_state()
    ours(model, optimizer, batch())
    let_go = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None and let_go() is None


def contrasted(params, data):
    x = data["x"] @ params[0]["w"]
    return jax.nn.logsumexp(x @ x.T, axis=-1).mean(), {}


def test_a_loss_that_couples_examples_says_so_and_is_that_of_a_loop_by_hand():
    step, init = step_of(contrasted)
    sharded = jaxshard_magic.shard(step, "dp", mesh="data=2", microbatches=4, check=True)
    sharded(weights(1), init(weights(1)), batch())
    assert sharded.checked.passed and "by hand" in sharded.checked.reference
    (said,) = [f for f in sharded.entry.plan.findings if f.code == "microbatches"]
    assert said.level == "warning" and "no sum over examples" in said.message and "dot_general" in said.message


def test_a_loss_that_couples_examples_may_return_a_share_for_each_example():
    def with_shares(params, data):
        x = data["x"] @ params[0]["w"]
        return contrasted(params, data)[0], {"share": (x**2).sum(-1) / len(x)}

    step, init = step_of(with_shares)
    sharded = jaxshard_magic.shard(step, "dp", mesh="data=2", microbatches=4, check=True)
    sharded(weights(1), init(weights(1)), batch())
    assert sharded.checked.passed and "by hand" in sharded.checked.reference


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"microbatches": 3},
            "--microbatches 3: 32 examples do not divide into 3 microbatches on 2 shards; --microbatches 2",
        ),
        ({"microbatches": 0}, "--microbatches takes a whole number from 1 on, not 0"),
        ({"reduce": "twice"}, "--reduce does not take 'twice'; it takes each, once, once-gathered"),
        ({"precision": "bf8"}, "--precision does not take 'bf8'. Did you mean"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(options, message):
    step, init = step_of(mean)
    args = weights(), init(weights()), batch()
    said = refusal(lambda: jaxshard_magic.shard(step, "dp", mesh="data=2", **options)(*args))
    assert said.startswith(message)


def test_a_step_without_a_gradient_is_refused():
    def step(params, data):
        return jax.tree.map(lambda p: p * 0.9, params), errors(params, data).mean()

    sharded = jaxshard_magic.shard(step, "dp", mesh="data=2", microbatches=2, reduce_dtype="bf16")
    with pytest.raises(ShardError, match=r"^--microbatches and --reduce-dtype: the step takes no gradient"):
        sharded(weights(), batch())


def test_a_step_that_accumulates_by_itself_is_told_so():
    def step(params, data):
        def part(total, mine):
            value, grads = jax.value_and_grad(lambda p: mean(p, mine)[0])(params)
            return jax.tree.map(jnp.add, total, grads), value

        parts = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), data)
        grads, values = jax.lax.scan(part, jax.tree.map(jnp.zeros_like, params), parts)
        return jax.tree.map(lambda p, g: p - 0.1 * g / 4, params, grads), values.mean()

    with pytest.raises(ShardError, match="takes its gradient in a loop of its own"):
        jaxshard_magic.shard(step, "dp", mesh="data=2", microbatches=2)(weights(), batch())


def test_sizes_written_into_the_step_are_named():
    def fixed(params, data):
        return (errors(params, data).reshape(EXAMPLES, 1)).mean(), {}

    step, init = step_of(fixed)
    with pytest.raises(ShardError, match="can't be traced for 8 examples in the place of 32"):
        jaxshard_magic.shard(step, "dp", mesh="data=2", microbatches=4)(weights(), init(weights()), batch())


def test_nothing_stays_patched_and_other_threads_see_nothing_of_it():
    before = jax.vjp
    seen = SimpleQueue()  # a list that the step reaches would be as it was before

    def loss(params, data):
        other = threading.Thread(target=lambda: seen.put(jax.grad(lambda x: x**2)(3.0)))
        other.start()
        other.join()
        raise RuntimeError("the user's own")

    step, init = step_of(loss)
    with pytest.raises(RuntimeError, match="the user's own"):
        jaxshard_magic.shard(step, "dp", mesh="data=2", microbatches=2)(weights(), init(weights()), batch())
    assert jax.vjp is before and float(seen.get(timeout=10)) == 6.0
    assert float(jax.grad(lambda x: x**3)(2.0)) == 12.0


@pytest.mark.parametrize(
    "options", [{"microbatches": 4}, {"remat": "full"}, {"precision": "bf16"}, {"precision": "fp16"}], ids=str
)
def test_arrays_that_a_jit_of_the_loss_holds_are_its_constants(options):
    held = np.linspace(0.5, 1.5, WIDTH, dtype=np.float32)
    scaled = jax.jit(lambda x: x * held)

    def loss(params, data):
        return jnp.square(scaled(data["x"] @ params[0]["w"])).mean(), {}

    step, init = step_of(loss)
    sharded = jaxshard_magic.shard(step, "dp", mesh="data=2", check=True, **options)
    sharded(weights(1), init(weights(1)), batch())
    check = sharded.report().check
    assert check is not None and check.passed
