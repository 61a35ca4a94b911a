"""Planned collectives beside those that Shardy's passes put into what a plan emits, loops with all their trips."""

from collections import Counter

import pytest
import zoo
from shardy_moves import SMALL, Moves, moves_by_shardy

import jaxshard_magic
from jaxshard_magic.plan import Plan
from jaxshard_magic.strategies.traffic import traffic

STRATEGIES = {"dp": "cpu:8 data=8", "fsdp": "cpu:8 data=8", "fsdp+tp": "cpu:8 data=4 model=2"}


def planned_moves(plan: Plan) -> Moves:
    moves: Moves = Counter()
    for move in traffic(plan.run):
        if move.bytes > SMALL:
            moves[move.kind, move.axes] += move.bytes * move.count
    return moves


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "name",
    [
        "transformer_unrolled",
        *(
            pytest.param(name, marks=pytest.mark.ci)
            for name in (
                "nnx_character_model",
                "linen_encoder_decoder",
                "vision_transformer",
                "nnx_lora",
                "transformer_scanned",
                "linen_train_state",
                "transformer_fused_tied",
                "u_net",
                "slice_of_a_data_set",
                "gradients_only",
                "accumulated_in_a_loop",
            )
        ),
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in (
                "linen_masked_language_model",
                "transformer_gated",
                "distillation",
                "linen_advantage_actor_critic",
                "nnx_transformer",
                "radiance_field",
                "private_per_example",
                "mixup_and_smoothing",
                "linen_scanned_transformer",
                "layers_of_experts",
                "linen_preference",
                "equinox_neural_ode",
                "epoch_in_one_scan",
                "bootstrap_own_latent",
                "variational_autoencoder",
                "equinox_batch_norm",
                "sharpness_aware",
                "nnx_wasserstein_gan",
            )
        ),
    ],
)
def test_a_plan_sends_what_shardy_would(name, strategy):
    call = zoo.STEPS[name].make()
    step = jaxshard_magic.shard(call.fn, strategy, mesh=jaxshard_magic.mesh(STRATEGIES[strategy]))
    plan = step.planned(*call.args, **call.kwargs).plan
    moves = planned_moves(plan)
    assert moves
    assert moves == moves_by_shardy(plan)
