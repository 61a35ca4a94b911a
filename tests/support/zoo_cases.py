"""Meshes, batches and refusals of the steps of the zoo under each strategy."""

from collections.abc import Mapping

import numpy as np
import zoo

MESHES = {
    "dp": "data=8",
    "fsdp": "data=8",
    "tp": "data=4 model=2",
    "fsdp+tp": "data=2 fsdp=2 model=2",
    "spmd": "data=4 model=2",
}

BATCHES: dict[str, zoo.Library | None] = {  # what a batch is made of; None: as the step is written
    "dp": "numpy",
    "fsdp": "jnp",
    "tp": "numpy",
    "fsdp+tp": None,
    "spmd": "jnp",
}

# No matrix is multiplied with a batch: factors looked up, a kernel's few numbers, weights that each task adapts.
NO_PRODUCT = {"matrix_factors", "gaussian_process", "meta_of_sinusoids"}

REFUSED = {"tp": NO_PRODUCT, "fsdp+tp": NO_PRODUCT}


def assert_same(step: zoo.Step, got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> None:
    """But for rounding, as `step` says how much there is."""
    assert list(got) == list(want)
    for difference in zoo.differences(step, got, want):
        assert difference.rounding, difference
