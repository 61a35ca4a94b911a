"""Planned collectives beside those that Shardy's passes put into what a plan emits, loops with all their trips."""

import pytest
import zoo
from support.moves_apart import APART, OLDER, REFUSED
from support.planned_moves import planned_moves
from support.shardy_moves import moves_by_shardy

import jaxshard_magic
from jaxshard_magic import ShardError

STRATEGIES = {"dp": "cpu:8 data=8", "fsdp": "cpu:8 data=8", "fsdp+tp": "cpu:8 data=4 model=2"}


QUICK = ("transformer_unrolled",)
SOME = (
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


def marks_of(name: str) -> tuple[pytest.MarkDecorator, ...]:
    """The whole zoo in parts: minutes of lowering."""
    return () if name in QUICK else (pytest.mark.ci,) if name in SOME else (pytest.mark.full,)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in zoo.STEPS])
def test_a_plan_sends_what_shardy_would_or_has_a_reason_in_the_table(name, strategy):
    call = zoo.STEPS[name].make()
    step = jaxshard_magic.shard(call.fn, strategy, mesh=jaxshard_magic.mesh(STRATEGIES[strategy]))
    if (name, strategy) in REFUSED:
        with pytest.raises(ShardError, match=REFUSED[name, strategy]):
            step.planned(*call.args, **call.kwargs)
        return
    plan = step.planned(*call.args, **call.kwargs).plan
    moves, found = planned_moves(plan), moves_by_shardy(plan)
    if (reason := APART.get((name, strategy))) is None:
        assert moves == found
    elif reason != OLDER:
        assert moves != found, f"they are equal now: take it out of the table ({reason})"


def test_the_table_is_of_steps_that_there_are():
    assert {name for name, _ in (*APART, *REFUSED)} <= zoo.STEPS.keys()
    assert not APART.keys() & REFUSED.keys()
