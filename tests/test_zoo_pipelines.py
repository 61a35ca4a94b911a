"""Every zoo step as a pipeline of two and four stages: the plain step's numbers in three calls, or one line why not."""

from itertools import product

import pytest
import zoo
from thinned import thinned
from zoo_table import Cell, outcome, plain_numbers

COLUMNS = (("pp-2", "numpy"), ("pp-4", "jnp"), ("pp+fsdp", "numpy"))
QUICK = (
    ("nnx_returns_loss", ("pp-2", "numpy")),
    ("linen_train_state", ("pp+fsdp", "numpy")),
    ("transformer_scanned", ("pp-4", "jnp")),
)
REFUSED: dict[str, str] = {}  # step -> what its line says


@pytest.mark.parametrize(("name", "on"), thinned(product(zoo.STEPS, COLUMNS), QUICK))
def test_a_step_in_stages_has_the_plain_numbers_or_says_why_not(name: str, on: tuple[str, str]):
    column, batches = on
    found = outcome(Cell(name, column, batches), plain_numbers(name, batches))
    if name in REFUSED:
        assert found.kind == "refused" and REFUSED[name] in found.told, found
    else:
        assert found.kind == "same", found
