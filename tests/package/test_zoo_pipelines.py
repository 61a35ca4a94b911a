"""Every zoo step as a pipeline: the plain step's numbers in three calls, or one line why not."""

import pytest
import zoo
from support.thinned import thinned
from zoo_table import Cell, outcome, plain_numbers

QUICK = (
    ("nnx_returns_loss", "pp-2", "numpy"),
    ("linen_train_state", "pp+fsdp", "numpy"),
)
LOOP, VMAPPED = "takes gradients in a loop of its own", "inside jax.vmap"
REFUSED = {  # step -> what its line says
    **dict.fromkeys(("linen_ppo_epochs", "lbfgs_whole_fit", "epoch_in_one_scan"), LOOP),
    **dict.fromkeys(("lbfgs_line_search", "projected_attack"), LOOP),
    **dict.fromkeys(("private_per_example", "gradient_noise_scale"), VMAPPED),
    "partial_accumulation": "in a loop of its own",
    "slice_of_a_data_set": "nothing to cut into stages",
    "trainer_owns_its_modules": "which jax does not know",
}
ROWS = [
    *QUICK,
    ("transformer_scanned", "pp-4", "jnp"),
    ("equinox_dcgan", "pp+fsdp", "numpy"),
    *((name, "pp-2", "numpy") for name in zoo.STEPS if name != "nnx_returns_loss"),
]


@pytest.mark.parametrize(("name", "column", "batches"), thinned(ROWS, QUICK))
def test_a_step_in_stages_has_the_plain_numbers_or_says_why_not(name: str, column: str, batches: str):
    found = outcome(Cell(name, column, batches), plain_numbers(name, batches))
    if name in REFUSED:
        assert found.kind == "refused" and REFUSED[name] in found.told, found
    else:
        assert found.kind == "same", found
