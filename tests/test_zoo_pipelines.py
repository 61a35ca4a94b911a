"""Every zoo step as a pipeline of two and four stages: the plain step's numbers in three calls, or one line why not."""

from itertools import product

import pytest
import zoo
from thinned import thinned
from zoo_table import Cell, outcome, plain_numbers

COLUMNS = (("pp-2", "numpy"), ("pp-4", "jnp"), ("pp+fsdp", "numpy"))
QUICK = (
    ("nnx_lora", ("pp-2", "numpy")),
    ("linen_deep_q", ("pp+fsdp", "numpy")),
    ("packed_state", ("pp-4", "jnp")),
)
LOOP, ONE_BY_ONE = "in a loop of its own", "inside jax.vmap"
REFUSED = {  # step -> what its line says: where a step's gradient is not one call, there is nothing to cut into stages
    "epoch_in_one_scan": LOOP,
    "partial_accumulation": LOOP,
    "linen_ppo_epochs": LOOP,
    "lbfgs_whole_fit": LOOP,
    "private_per_example": ONE_BY_ONE,
    "gradient_noise_scale": ONE_BY_ONE,
    "trainer_owns_its_modules": "does not know as a pytree",
}


@pytest.mark.parametrize(("name", "on"), thinned(product(zoo.STEPS, COLUMNS), QUICK))
def test_a_step_in_stages_has_the_plain_numbers_or_says_why_not(name: str, on: tuple[str, str]):
    column, batches = on
    found = outcome(Cell(name, column, batches), plain_numbers(name, batches))
    if name in REFUSED:
        assert found.kind == "refused" and REFUSED[name] in found.told, found
    else:
        assert found.kind == "same", found
