"""Every zoo step with its gradients taken in microbatches, again, or in another precision: the plain step's numbers."""

import pytest
import zoo

import jaxshard_magic
from jaxshard_magic.errors import ShardError

REFUSED = {
    "partial_accumulation": "in a loop of its own",
    "equinox_key_per_example": "can't be traced for 8 examples in the place of 16",
    "adversarial": "with respect to its examples",
    "private_per_example": "inside jax.vmap",
    "closed_over_data": "closed over by the step",
    "graph_network": "made of each other",
    "linen_ppo_epochs": "in a loop of its own",
    "lbfgs_whole_fit": "in a loop of its own",
    "gradient_noise_scale": "inside jax.vmap",
    "trainer_owns_its_modules": "does not know as a pytree",
}


@pytest.mark.full
@pytest.mark.parametrize("name", zoo.OFTEN)
def test_a_step_in_microbatches_with_remat_is_the_plain_step_or_the_loop_by_hand(name):
    call = zoo.STEPS[name].make()
    step = jaxshard_magic.shard(call.fn, "fsdp", mesh="data=2", microbatches=2, reduce="once", remat="full", check=True)
    try:
        step(*call.args, **call.kwargs)
    except ShardError as error:
        assert REFUSED.get(name, "?") in str(error) and "\n" not in str(error)
        return
    assert name not in REFUSED
    assert step.checked.passed, step.checked


KINDS = (
    "nnx_cnn_returns_nothing",
    "nnx_transformer",
    "linen_train_state",
    "dict_of_arrays",
    "equinox_filter_jit",
    "clip_schedule_masked_decay",
    "multi_steps",
)
PAIRS = {
    "fsdp": {"microbatches": 2, "reduce": "once", "remat": 2},
    "fsdp+tp": {"microbatches": 2, "reduce": "once-gathered", "precision": "bf16"},
    "dp": {"remat": "dots", "precision": "bf16"},
}


@pytest.mark.full
@pytest.mark.parametrize("strategy", PAIRS)
@pytest.mark.parametrize("name", KINDS)
def test_options_go_together_under_every_strategy(name, strategy):
    call = zoo.STEPS[name].make()
    mesh = "data=2 model=2" if "tp" in strategy else "data=2"
    step = jaxshard_magic.shard(call.fn, strategy, mesh=mesh, check=True, **PAIRS[strategy])
    step(*call.args, **call.kwargs)
    assert step.checked.passed, step.checked
