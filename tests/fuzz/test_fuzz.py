"""Random train steps have the plain step's numbers under every strategy; the fuzzer finds what does not."""

import time
from collections import Counter
from dataclasses import replace

import pytest

from fuzz.generate import generate
from fuzz.judge import MESHES, Outcome, outcome
from fuzz.operations import OPERATIONS
from fuzz.programs import Input, Operation, Program, Type
from fuzz.run import Judge, faults
from fuzz.shrink import shrink
from jaxshard_magic.strategies import fsdp, sharded_lowering

TODAY = int(time.strftime("%Y%m%d")) * 1000  # the first seed
SEVERAL = 10  # programs that say something of all of them
ROWS = Type((8, 4), "float32")
SMALL = Program(
    params=(Input("p0", Type((4, 4), "float32"), 1),),
    batch=(Input("x0", ROWS, 2),),
    operations=(
        Operation("v0", "{0} @ {1}", ("x0", "p0"), ROWS),
        Operation("v1", "jnp.tanh({0})", ("v0",), ROWS),
        Operation("v2", "jnp.flip({0}, 1)", ("v1",), ROWS),
        Operation("v3", "{0} * {1}", ("v2", "v0"), ROWS),
    ),
    loss=("v3",),
    outputs=("v1",),
)


def wrong_number(monkeypatch: pytest.MonkeyPatch, primitive: str, factor: float) -> None:
    """Make sharded steps multiply what a primitive gives by `factor`."""
    right = sharded_lowering.bind_with_workaround

    def bind_mended(e, values, divided, **more):
        made = right(e, values, divided, **more)
        return [x * factor for x in made] if e.name == primitive else made

    monkeypatch.setattr(sharded_lowering, "bind_with_workaround", bind_mended)


def test_a_step_without_a_fault_has_the_plain_numbers():
    assert outcome(SMALL, "fsdp+tp") == Outcome("same")


def test_a_planted_wrong_number_is_found_and_made_short(monkeypatch):
    wrong_number(monkeypatch, "rev", 1.001)
    assert outcome(SMALL, "dp").kind == "wrong"
    short = shrink(SMALL, lambda p: outcome(p, "dp").kind == "wrong", 60)
    assert [o.text for o in short.operations] == ["jnp.flip({0}, 1)"]
    assert short.outputs == ()


def test_an_error_that_is_no_refusal_is_a_fault(monkeypatch):
    monkeypatch.setattr(sharded_lowering, "bind_with_workaround", lambda *_, **__: 1 / 0)
    found = outcome(SMALL, "fsdp")
    assert found.fault
    assert "ZeroDivisionError" in found.told


def test_a_step_whose_own_numbers_jump_is_no_evidence(monkeypatch):
    jumps = Operation("v4", "jnp.floor({0} * 1e7) % 2", ("v2",), ROWS)
    wrong_number(monkeypatch, "rev", 1.001)
    program = replace(SMALL, operations=(*SMALL.operations, jumps), outputs=("v4",), loss=("v0",))
    assert outcome(program, "dp").kind == "unstable"


def test_the_printed_program_shows_the_failure_by_itself(monkeypatch, capsys):
    wrong_number(monkeypatch, "rev", 1.5)
    monkeypatch.setattr(fsdp, "MIN_GATHERED_ELEMENTS", fsdp.MIN_GATHERED_ELEMENTS)  # the program sets it for good
    space: dict = {"__name__": "__main__"}
    exec(SMALL.script("dp", MESHES["dp"], ("np",)), space)
    assert float(capsys.readouterr().out.split("[")[1].split(",")[0]) > 0.01  # the loss


def test_a_seed_makes_the_same_program_again_and_others_differ():
    assert generate(7) == generate(7)
    assert len({generate(seed).text() for seed in range(SEVERAL)}) == SEVERAL


@pytest.mark.ci
def test_programs_hold_every_kind_of_operation():
    text = "".join(generate(seed).text() for seed in range(120))
    kinds = (
        "@ params",
        "conv",
        "einsum",
        "jnp.take",
        ".at[",
        "sort",
        "cum",
        "scan",
        "while_loop",
        "cond",
        "pmean",
    )
    assert [k for k in (*kinds, "checkpoint", "own_", "random", "bfloat16", "int32", "vmap") if k not in text] == []
    assert len(OPERATIONS) >= 20


@pytest.mark.ci
def test_random_steps_of_the_day_have_the_plain_numbers():
    """Each under one strategy, in turn."""
    check(range(TODAY, TODAY + 150), each=False)


@pytest.mark.full
@pytest.mark.parametrize("part", range(7))
def test_random_steps_of_the_day_under_every_strategy(part: int):
    check(range(TODAY + 150 + 50 * part, TODAY + 200 + 50 * part), each=True)


def check(seeds: range, each: bool) -> None:
    judge = Judge(limit=120, memory=4)
    try:
        found, outcomes = faults(seeds, [*MESHES], judge, each=each)
    finally:
        judge.close()
    assert found == [], "\n\n".join(found)
    kinds = Counter[str]()
    for sort, n in outcomes.items():
        kinds[sort.split(":")[0]] += n
    assert kinds["same"] > outcomes.total() / 2, kinds
    assert kinds["plain"] + kinds["unstable"] < outcomes.total() / 10, kinds
