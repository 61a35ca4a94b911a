"""The zoo's steps run as they are: the same numbers each time, all of them finite."""

import numpy as np
import pytest
import zoo


@pytest.mark.parametrize("name", zoo.STEPS)
def test_step_gives_the_same_finite_numbers_from_the_same_seed(name):
    first, second = zoo.STEPS[name].make(), zoo.STEPS[name].make()
    results = first.run(), second.run()
    numbers = [zoo.snapshot(call, result) for call, result in zip((first, second), results, strict=True)]
    assert numbers[0], "the step leaves no numbers behind"
    for label, x, y in zip(zoo.names(first, results[0]), *numbers, strict=True):
        np.testing.assert_array_equal(x, y, err_msg=label)
        assert np.isfinite(x).all(), label
