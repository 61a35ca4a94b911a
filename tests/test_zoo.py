"""Every zoo step runs as it is; under every strategy it gives the same numbers, or says in one line why not."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np
import pytest
import zoo
from jax.tree_util import keystr, tree_flatten_with_path
from thinned import CI, thinned

import jaxshard_magic
from jaxshard_magic.errors import ShardError

MESHES = {
    "dp": "data=8",
    "fsdp": "data=8",
    "tp": "data=4 model=2",
    "fsdp+tp": "data=2 fsdp=2 model=2",
    "spmd": "data=4 model=2",
}
REFUSED = {  # strategy -> steps without what it divides: factors that are looked up and multiplied elementwise
    "tp": {"matrix_factors"},
    "fsdp+tp": {"matrix_factors"},
}
FEW, LARGEST = 2e-3, 2e-2


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
        named = ((keystr(path, simple=True, separator=".").removesuffix(".value"), x) for path, x in leaves)
        return {name: x.shape for name, x in named if isinstance(x, jax.Array | np.ndarray)}

    @cached_property
    def numbers(self) -> dict[str, np.ndarray]:
        """What the call left behind, by name. From here on the call's own objects have moved."""
        found = zoo.numbers(self.call, self.result)
        assert [name for name, x in found.items() if not np.isfinite(x).all()] == []
        return found

    @cached_property
    def result(self):
        _ = self.shapes
        return self.call.run()


@pytest.fixture(scope="module", params=thinned(zoo.STEPS, list(zoo.STEPS)[::3], CI))
def plain(request: pytest.FixtureRequest) -> Plain:
    """One step after another."""
    return Plain(zoo.STEPS[request.param])


@pytest.mark.full
def test_a_step_repeats_its_numbers_and_goes_on_from_its_own_result(plain: Plain):
    numbers, again = plain.numbers, plain.step.make()
    second = zoo.numbers(again, again.run())
    assert list(numbers) == list(second)
    for name, x in numbers.items():
        np.testing.assert_array_equal(x, second[name], err_msg=name)

    following = plain.step.advance(plain.call, plain.result)
    third = zoo.numbers(following, following.run())
    assert [x.shape for x in numbers.values()] == [x.shape for x in third.values()]
    moved = any(not np.array_equal(x, y) for x, y in zip(numbers.values(), third.values(), strict=True))
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
    step, call = plain.step, plain.step.make()
    refused = step.name in REFUSED.get(strategy, ())
    mesh = jaxshard_magic.mesh(MESHES[strategy])
    try:
        got = jaxshard_magic.shard(call.fn, strategy, mesh=mesh)(*call.args, **call.kwargs)
    except ShardError as error:
        assert refused, str(error)
        assert "\n" not in str(error)
        return
    assert not refused
    assert_same(step, zoo.numbers(call, got), plain.numbers)


def assert_same(step: zoo.Step, got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> None:
    """But for rounding, as `step` says how much there is."""
    assert list(got) == list(want)
    for name, b in want.items():
        a, inside = got[name], name.removeprefix("result.")
        if any(inside.startswith(n) or f".{n}" in name for n in step.noise):
            continue  # only rounding moves it, in the plain step too
        assert a.shape == b.shape, name
        off = np.abs(a.astype(complex) - b.astype(complex)) / max(float(np.max(np.abs(b), initial=0)), 1e-6)
        # Adam's first step turns the sign of a gradient near zero into a whole step: of few elements, not of a leaf.
        assert np.mean(off > step.tolerance, dtype=float) <= FEW, name
        assert np.max(off, initial=0) <= LARGEST, name


def test_the_zoo_holds_every_family():
    families = frozenset().union(*(step.families for step in zoo.STEPS.values()))
    assert len(zoo.STEPS) >= 36
    assert families >= {"plain", "linen", "nnx", "equinox", "optax", "transformer", "cnn", "rnn", "graph"}
    assert families >= {"moe", "gan", "meta", "rl", "contrastive", "rng", "scan", "remat"}
