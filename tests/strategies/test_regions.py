"""What is emitted in another way than equation by equation: a kind of it is a file and an entry in a list."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxshard_magic
from jaxshard_magic.plan import PlannedCollective
from jaxshard_magic.strategies import sharded_lowering
from jaxshard_magic.strategies.footprint import footprint
from jaxshard_magic.strategies.planned_collectives import planned_collectives
from jaxshard_magic.strategies.regions import KINDS, Region
from jaxshard_magic.strategies.sharded_lowering import ShardedLowering

WIDTH, HIDDEN, EXAMPLES, TRIPS = 64, 256, 32, 4
BYTES = 1 << 30


@jax.checkpoint
def block(x, up, down):
    return jnp.tanh(x @ up) @ down


def step(params, batch):
    def loss(params):
        def layer(x, _):
            return x + block(x, params["up"], params["down"]), None

        out, _ = jax.lax.scan(layer, batch, None, length=TRIPS)
        return jnp.square(out).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments():
    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    params = {k: 0.1 * jax.random.normal(jax.random.key(len(k)), s) for k, s in shapes.items()}
    return params, jax.random.normal(jax.random.key(0), (EXAMPLES, WIDTH))


@dataclass(frozen=True, eq=False)
class Passed(Region):
    """A way of its own through `tanh`, or through whole bodies: it multiplies, permutes and needs room."""

    factor: float = 1.0

    def emit(self, e, values, rest, hold):
        return [self.factor * x for x in rest(values)]

    def collectives(self, e, operands, rest):
        yield from operands
        yield PlannedCollective("collective-permute", ("data",), 8, BYTES, e.trip_count)

    def scratch_bytes(self, e, rest):
        return BYTES


def kind(name, factor=1.0):
    def find(context):
        return Passed({e.index for e in context.layout.program.equations if e.name == name}, factor)

    return find


def planned(monkeypatch, *kinds) -> ShardedLowering:
    monkeypatch.setattr(sharded_lowering, "KINDS", (*kinds, *KINDS))
    mesh = jaxshard_magic.mesh("cpu:8 data=8")
    run = jaxshard_magic.shard(step, "fsdp", mesh=mesh).planned(*arguments()).plan.run
    assert isinstance(run, ShardedLowering)
    return run


def outputs(run: ShardedLowering):
    return jax.jit(run.__call__)(*jax.tree.leaves(arguments()))


def test_a_region_emits_its_members_sends_for_them_and_holds_while_they_run(monkeypatch):
    plain, with_region = planned(monkeypatch), planned(monkeypatch, kind("tanh", 0.5))
    runs = sum(e.trip_count for e in plain.program.equations if e.name == "tanh")
    assert runs > TRIPS  # forward, and again for the backward pass
    own = [move for move in planned_collectives(with_region) if move.kind == "collective-permute"]
    assert sum(move.count for move in own) == runs
    assert [m for m in planned_collectives(with_region) if m not in own] == [*planned_collectives(plain)]
    assert float(outputs(with_region)[-1]) != pytest.approx(float(outputs(plain)[-1]))


def test_what_members_with_bodies_send_and_hold_is_told_by_the_region_alone(monkeypatch):
    plain, with_region = planned(monkeypatch), planned(monkeypatch, kind("scan"))
    loops = [e for e in plain.program.equations if e.name == "scan"]
    assert [m.count for m in planned_collectives(with_region) if m.kind == "collective-permute"] == [1] * len(loops)
    assert not [m for m in planned_collectives(with_region) if m.count == TRIPS]
    assert [m for m in planned_collectives(plain) if m.count == TRIPS]
    more = footprint(with_region).temporaries - footprint(plain).temporaries
    assert BYTES - (1 << 20) < more <= BYTES


def test_of_an_equation_in_two_regions_the_first_kind_is_asked_first(monkeypatch):
    run = planned(monkeypatch, kind("scan", 2.0), kind("scan", 3.0))
    loop = next(e for e in run.program.equations if e.name == "scan")
    assert [r.factor for r in run.regions_of(loop) if isinstance(r, Passed)] == [2.0, 3.0]
    once = planned(monkeypatch, kind("scan", 6.0))
    np.testing.assert_allclose(outputs(run)[-1], outputs(once)[-1], rtol=1e-5)


def test_what_a_region_does_not_define_is_as_without_it(monkeypatch):
    def silent(context):
        return Region(range(len(context.layout.program.equations)))

    plain, with_region = planned(monkeypatch), planned(monkeypatch, silent)
    assert planned_collectives(with_region) == planned_collectives(plain)
    assert footprint(with_region) == footprint(plain)
    texts = [jax.jit(r.__call__).lower(*jax.tree.leaves(arguments())).as_text() for r in (plain, with_region)]
    assert texts[0] == texts[1]
