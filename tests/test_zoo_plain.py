"""The zoo's steps run as they are, and what is said about their arguments fits their arguments."""

import jax
import numpy as np
import pytest
import zoo
from jax.tree_util import keystr, tree_flatten_with_path

ALL = pytest.mark.parametrize("step", zoo.STEPS.values(), ids=zoo.STEPS)


def array_shapes(call: zoo.Call) -> dict[str, tuple[int, ...]]:
    """The shape of every array among the arguments, by its path."""
    leaves = tree_flatten_with_path(call.arguments())[0]
    named = ((keystr(path, simple=True, separator=".").removesuffix(".value"), x) for path, x in leaves)
    return {name: x.shape for name, x in named if isinstance(x, jax.Array | np.ndarray)}


@ALL
def test_a_step_repeats_its_numbers_and_goes_on_from_its_own_result(step):
    calls = step.make(), step.make()
    results = [call.run() for call in calls]
    first, second = (zoo.snapshot(call, result) for call, result in zip(calls, results, strict=True))
    names = zoo.names(calls[0], results[0])
    assert len(set(names)) == len(names) > 0
    for name, x, y in zip(names, first, second, strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)
        assert np.isfinite(x).all(), name

    following = step.advance(calls[0], results[0])
    third = zoo.snapshot(following, following.run())
    assert [x.shape for x in first] == [x.shape for x in third]
    moved = any(not np.array_equal(x, y) for x, y in zip(first, third, strict=True))
    assert moved == bool(step.feeds or step.mutates)


@ALL
def test_every_array_has_a_role_and_every_batch_leaf_divides_by_eight(step):
    shapes = array_shapes(step.make())
    for path in shapes:
        step.role_of(path)
    for path, dimension in step.expected_batch.items():
        if not path.startswith("closure.") and dimension is not None:
            assert shapes[path][dimension] % 8 == 0, path
            assert step.role_of(path) in ("batch", None)
    for prefix in step.noise:
        assert any(path == prefix for path in shapes), prefix


def test_the_zoo_holds_every_family():
    families = frozenset().union(*(step.families for step in zoo.STEPS.values()))
    assert len(zoo.STEPS) >= 36
    assert families >= {"plain", "linen", "nnx", "equinox", "optax", "transformer", "cnn", "rnn", "graph"}
    assert families >= {"moe", "gan", "meta", "rl", "contrastive", "rng", "scan", "remat"}
