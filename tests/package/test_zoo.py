"""Every zoo step runs as it is; under every strategy it gives the same numbers, or says in one line why not."""

from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np
import pytest
import zoo
from jax.tree_util import tree_flatten_with_path
from support.thinned import CI, thinned
from support.zoo_cases import BATCHES, MESHES, REFUSED, assert_same

import jaxshard_magic
from jaxshard_magic.errors import ShardError


@dataclass(frozen=True)
class Plain:
    """A step, and its plain call, which all tests of the step share; nothing may be changed in it."""

    step: zoo.Step

    @cached_property
    def call(self) -> zoo.Call:
        return self.step.make()

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every array among the arguments, by its path."""
        leaves = tree_flatten_with_path(self.call.arguments())[0]
        named = ((zoo.leaf_name(path), x) for path, x in leaves)
        return {name: x.shape for name, x in named if isinstance(x, jax.Array | np.ndarray)}

    @cached_property
    def numbers(self) -> list[dict[str, np.ndarray]]:
        """What each of two calls left behind, by name. From here on the call's own objects have moved."""
        _ = self.shapes
        found = list(zoo.numbers_of_calls(self.step, self.call, self.call.fn, calls=2))
        assert [name for each in found for name, x in each.items() if not np.isfinite(x).all()] == []
        return found


# Ten seconds each, of which `test_strategies.py` and `test_ep_in_turn.py` have shorter ones.
LONG = ("transformer_unrolled", "experts_in_turn")


def rows() -> list:
    """A few steps always, others of each kind and long ones under `ci`, and all others under `full`."""
    always = [name for name in zoo.OFTEN[::16] if name not in LONG]
    often = [*zoo.OFTEN[4::8], *LONG]
    shown = [*always, *thinned(often, (), CI)]
    return shown + thinned([name for name in zoo.STEPS if name not in (*always, *often)], ())


@pytest.fixture(scope="module", params=rows())
def plain(request: pytest.FixtureRequest) -> Plain:
    """One step after another."""
    return Plain(zoo.STEPS[request.param])


@pytest.mark.full
def test_a_step_repeats_its_numbers_and_goes_on_from_its_own_result(plain: Plain):
    (first, second), again = plain.numbers, plain.step.make()
    repeated = zoo.numbers(again, again.run())
    assert list(first) == list(repeated)
    for name, x in first.items():
        np.testing.assert_array_equal(x, repeated[name], err_msg=name)

    assert [x.shape for x in first.values()] == [x.shape for x in second.values()]
    moved = any(not np.array_equal(x, y) for x, y in zip(first.values(), second.values(), strict=True))
    assert moved == bool(plain.step.feeds or plain.step.mutates)


def test_every_array_has_a_role_and_every_batch_leaf_divides_by_eight(plain: Plain):
    step, shapes = plain.step, plain.shapes
    for path in shapes:
        step.role_of(path)
    for path, dimension in step.expected_batch.items():
        if not path.startswith("closure.") and dimension is not None:
            assert shapes[path][dimension] % 8 == 0, path
            assert step.role_of(path) in ("batch", None)
    for prefix in step.noise:
        assert any(path == prefix for path in shapes), prefix


def test_fully_sharded_over_three_axes_gives_the_plain_numbers(plain: Plain):
    check(plain, "fsdp+tp")


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["dp", "fsdp", "tp", "spmd"])
def test_every_strategy_gives_the_plain_numbers(plain: Plain, strategy: str):
    check(plain, strategy)


def check(plain: Plain, strategy: str) -> None:
    step, mesh = plain.step, jaxshard_magic.mesh(MESHES[strategy])
    call = step.make(batches=BATCHES[strategy])
    sharded = jaxshard_magic.shard(call.fn, strategy, mesh=mesh)
    refused = step.name in REFUSED.get(strategy, ()) or step.name not in zoo.TRACED
    try:
        found = list(zoo.numbers_of_calls(step, call, sharded, calls=2))
    except ShardError as error:
        assert refused, str(error)
        assert "\n" not in str(error)
        return
    assert not refused
    for got, want in zip(found, plain.numbers, strict=True):
        assert_same(step, got, want)


def test_the_zoo_holds_every_family():
    families = frozenset().union(*(step.families for step in zoo.STEPS.values()))
    assert len(zoo.STEPS) >= 36
    assert families >= {"plain", "linen", "nnx", "equinox", "optax", "transformer", "cnn", "rnn", "graph"}
    assert families >= {"moe", "gan", "meta", "rl", "contrastive", "rng", "scan", "remat"}
    assert sum("public" in step.families for step in zoo.STEPS.values()) >= 30
