"""A sharded step is called as the user's, however that is written, and gives the plain step's numbers."""

import dataclasses
import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.stand_in import BATCH, descend, no_way_back, params, same, shard

from jaxshard_magic.errors import ShardError
from jaxshard_magic.program.compiling import _checked_call, strict_call


class Trainer:
    def __init__(self, rate):
        self.rate = rate

    @functools.partial(jax.jit, static_argnums=0)
    def jitted(self, params, batch):
        return descend(params, batch)

    def plain(self, params, batch):
        return descend(params, batch)


class Callable:
    def __call__(self, params, batch):
        return descend(params, batch)


WAYS = {
    "function": descend,
    "jit": jax.jit(descend),
    "donating jit": jax.jit(descend, donate_argnums=0),
    "filter_jit": eqx.filter_jit(descend),
    "donating filter_jit": eqx.filter_jit(descend, donate="all-except-first"),
    "method": Trainer(0.1).plain,
    "jitted method": Trainer(0.1).jitted,
    "object": Callable(),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_write_a_step_gives_the_plain_numbers(way, monkeypatch):
    step = shard(WAYS[way])
    state, plain = params(), params()
    for call in range(4):
        state, loss = step(state, BATCH)
        plain, expected = descend(plain, BATCH)
        same((state, loss), (plain, expected))
        if call == 0:
            no_way_back(monkeypatch)
    assert step.calls == 4 and len(step.programs.entries) == 1


def test_partials_bind_arrays_and_keywords(monkeypatch):
    def step(rate, params, batch, *, power):
        new, loss = descend(params, batch)
        return jax.tree.map(lambda p, n: p + rate * (n - p), params, new), loss**power

    bound = functools.partial(step, jnp.float32(0.5), power=2)
    sharded_step = shard(bound)
    same(sharded_step(params(), BATCH), bound(params(), BATCH))
    no_way_back(monkeypatch)
    same(sharded_step(params(), BATCH), bound(params(), BATCH))


def test_results_may_be_gradients_nothing_or_python_values(monkeypatch):
    def gradients(params, batch):
        return jax.grad(lambda p: descend(p, batch)[1])(params)

    same(shard(gradients)(params(), BATCH), gradients(params(), BATCH))
    assert shard(lambda params, batch: None)(params(), BATCH) is None
    step = shard(lambda params, batch, kind: {"kind": kind, "loss": params["b"].sum(), "none": None})
    for _ in range(2):
        assert step(params(), BATCH, "mse") == {"kind": "mse", "loss": 0.0, "none": None}
        no_way_back(monkeypatch)


def test_keys_old_and_new_and_a_callback_inside():
    seen = []

    def step(key, old, batch):
        jax.debug.callback(lambda x: seen.append(float(x)), batch["x"].sum())
        return jax.random.split(key)[0], jax.random.normal(key, (3,)) + jax.random.uniform(old, (3,))

    sharded_step, args = shard(step), (jax.random.key(1), jax.random.PRNGKey(2), BATCH)
    for _ in range(3):
        key, drawn = sharded_step(*args)
    assert jax.random.key_data(key).tolist() == jax.random.key_data(step(*args)[0]).tolist()
    same(drawn, step(*args)[1])
    jax.effects_barrier()
    assert len(seen) >= 4


def test_another_batch_size_makes_another_program_and_both_stay(monkeypatch):
    step = shard(jax.jit(descend))
    small = jax.tree.map(lambda x: x[:4], BATCH)
    step(params(), BATCH)
    step(params(), small)
    no_way_back(monkeypatch)
    for batch in (BATCH, small, BATCH):
        same(step(params(), batch), descend(params(), batch))
    assert len(step.programs.entries) == 2


def test_weak_types_are_told_apart_as_jit_does():
    fn = jax.jit(lambda p, rate: p * rate)
    step, p = shard(fn), jnp.ones(4, jnp.bfloat16)
    for rate in (0.5, jnp.float32(0.5), 0.5, np.float32(0.5), jnp.asarray(0.5), 2):
        assert step(p, rate).dtype == fn(p, rate).dtype


def test_a_python_counter_makes_one_more_program_at_most():
    step = shard(jax.jit(lambda count, batch: count + 1))
    count = 0
    for _ in range(4):
        count = step(count, BATCH)
    assert int(count) == 4 and len(step.programs.entries) <= 2


def test_strict_calls_work_without_jaxs_private_names():
    p = NamedSharding(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)), P())
    spec = jax.ShapeDtypeStruct((), jnp.float32, weak_type=True)
    compiled = jax.jit(lambda x: x + 1, in_shardings=p).lower(spec).compile()
    for call in (
        strict_call(compiled, (True,)),
        strict_call(lambda x: compiled(x), (True,)),
        functools.partial(_checked_call, compiled, (True,)),
    ):
        assert call(1.0) == 2.0
        with pytest.raises(TypeError, match="weak types differ"):
            call(jnp.float32(1))


def test_a_plain_functions_numbers_stay_python():
    def step(params, batch, layers, flag):
        for _ in range(layers):
            params = jax.tree.map(lambda p: 2 * p, params)
        return params if flag else None

    sharded_step = shard(step)
    for layers, flag in itertools.product((1, 2, 3), (True, False)):
        one, other = sharded_step(params(), BATCH, layers, flag), step(params(), BATCH, layers, flag)
        assert one is other is None or same(one, other) is None
    assert len(sharded_step.programs.entries) == 6


def test_a_plain_functions_changing_number_is_traced_where_it_can_be():
    def step(params, batch, epoch):
        return jax.tree.map(lambda p: p * 0.5**epoch, params)

    sharded_step = shard(step)
    for epoch in range(6):
        same(sharded_step(params(), BATCH, epoch), step(params(), BATCH, epoch))
    assert len(sharded_step.programs.entries) == 2


def test_prepare_compiles_for_shapes_alone():
    step = shard(jax.jit(descend))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params(), BATCH))
    entry = step.prepare(*shapes)
    assert entry is step.entry and step.calls == 0 and entry.compile_s > 0
    step(params(), BATCH)
    assert step.entry is entry and entry.calls == 1


def test_progress_says_what_takes_long():
    step, said = shard(jax.jit(descend)), []
    step.programs.progress = said.append
    step(params(), BATCH)
    step(params(), BATCH)
    assert said == ["tracing", "planning dp", "compiling for 2 devices", "first run", ""]


def test_a_report_needs_a_call():
    with pytest.raises(ShardError, match="descend has not run yet"):
        shard(descend).report()


def test_it_keeps_the_steps_name_and_works_as_a_method():
    step = shard(descend)
    assert step.__name__ == step.name == "descend" and step.__wrapped__ is descend

    class Owner:
        step = shard(lambda self, params, batch: descend(params, batch))

    same(Owner().step(params(), BATCH), descend(params(), BATCH))


@dataclasses.dataclass(frozen=True)
class Config:
    scale: float
    sizes: list = dataclasses.field(default_factory=list)


def test_objects_without_arrays_are_held_by_value():
    def step(params, batch, config):
        return jax.tree.map(lambda p: p * config.scale + len(config.sizes), params)

    sharded_step, config = shard(step), Config(2.0)
    for _ in range(2):
        same(sharded_step(params(), BATCH, config), step(params(), BATCH, config))
    config.sizes.append(1)
    same(sharded_step(params(), BATCH, config), step(params(), BATCH, config))
    assert len(sharded_step.programs.entries) == 2


def test_a_sharded_step_is_sharded_anew_from_the_plain_one():
    first = shard(jax.jit(descend, donate_argnums=0))
    again = shard(first, donate=False)
    assert again.__wrapped__ is first.__wrapped__
    same(again(params(), BATCH), descend(params(), BATCH))
    bound = shard(functools.partial(first, params()))
    same(bound(BATCH), descend(params(), BATCH))
    assert first.calls == 0 and bound.entry.traced.in_paths[0][0].name == "params"


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Checked:
    x: jax.Array

    def __post_init__(self):
        assert self.x.ndim == 2


def test_pytrees_that_check_what_they_hold_are_no_trouble(monkeypatch):
    def step(params, batch):
        return Checked(batch.x * params["b"].sum() + 1)

    sharded_step = shard(jax.jit(step))
    for _ in range(2):
        same(sharded_step(params(), Checked(BATCH["x"])), Checked(np.ones((8, 3))))
        no_way_back(monkeypatch)
