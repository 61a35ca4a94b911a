"""Of every kind of step and under every strategy all measured time has a line and adds up to the step."""

import pytest
import zoo
from support.profiled import adds_up
from support.ten_steps import KINDS
from support.zoo_cases import MESHES, REFUSED

import jaxshard_magic

SCANNED = "transformer_scanned_remat", "mixture_of_experts", "linen_lstm"
STEPS = [*(kind.name for kind in KINDS.values()), *SCANNED]
OPTIONS = {"dp": {"microbatches": 2}, "fsdp": {"remat": "full"}}


def check(name: str, strategy: str, mesh: str | None = None, **options: object) -> None:
    call = zoo.STEPS[name].make(batches="jnp")
    on = jaxshard_magic.mesh(mesh or MESHES[strategy])
    step = jaxshard_magic.shard(call.fn, strategy, mesh=on, **options)
    step.keep_arguments = True
    step(*call.args, **call.kwargs)
    found = step.profile(2)
    adds_up(found)
    assert found.lines and {row.phase for row in found.lines} >= {"forward", "backward"}


@pytest.mark.ci
@pytest.mark.parametrize(("name", "strategy"), [(STEPS[0], "fsdp+tp"), (STEPS[-1], "fsdp")])
def test_time_of_a_zoo_step_has_lines(name: str, strategy: str):
    check(name, strategy)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "strategy"),
    [(name, strategy) for strategy in MESHES for name in STEPS if name not in REFUSED.get(strategy, ())],
)
def test_time_of_ten_steps_under_every_strategy_has_lines(name: str, strategy: str):
    check(name, strategy)


@pytest.mark.ci
@pytest.mark.parametrize(("name", "stages"), [(STEPS[0], 4), (STEPS[-2], 2)])
def test_time_of_a_zoo_step_in_stages_has_lines(name: str, stages: int):
    check(name, "pp", mesh=f"pipe={stages}")


@pytest.mark.full
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", STEPS)
def test_time_of_ten_steps_in_stages_has_lines(name: str, stages: int):
    check(name, "pp", mesh=f"pipe={stages}")


@pytest.mark.full
@pytest.mark.parametrize("strategy", list(OPTIONS))
@pytest.mark.parametrize("name", STEPS)
def test_time_of_ten_steps_with_microbatches_and_remat_has_lines(name: str, strategy: str):
    check(name, strategy, **OPTIONS[strategy])
