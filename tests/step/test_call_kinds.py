"""What hosts that call a step otherwise are told, and what goes together though it looks different."""

import json

import pytest

from jaxshard_magic import ShardError
from jaxshard_magic.coordination import BarrierTimeout
from jaxshard_magic.step import call_comparison
from jaxshard_magic.step.call_comparison import CallComparison, LeafInfo, comparable_values

W: LeafInfo = ("w", "float32", [16, 16], False)


def x(*shape: int, dtype: str = "float32", own: bool = True) -> LeafInfo:
    return "batch.x", dtype, list(shape), own


def compared(monkeypatch: pytest.MonkeyPatch, said: list[tuple[list[str], list[LeafInfo]]], apart: bool = True) -> None:
    """Compare the calls of hosts, which have one half of the batch each where `apart`."""
    monkeypatch.setattr(call_comparison, "gather_texts", lambda text: [json.dumps(each) for each in said])
    CallComparison("train_step", True, lambda: said[0], len(said), apart).compare()


@pytest.mark.parametrize(
    ("one", "two", "apart"),
    [
        (x(64, 16), x(64, 16), True),
        (x(128, 16, own=False), x(64, 16), True),
        (x(64, 16), x(64, 32, own=False), True),
        (x(64, 16, own=False), x(64, 16), False),
        (x(64, 16), x(64, 16), False),
    ],
)
def test_equal_parts_and_all_of_them_go_together(
    monkeypatch: pytest.MonkeyPatch, one: LeafInfo, two: LeafInfo, apart: bool
):
    compared(monkeypatch, [(["dp"], [W, one]), (["dp"], [W, two])], apart)


@pytest.mark.parametrize(
    ("one", "two", "line"),
    [
        (
            [W, x(64, 16)],
            [W, x(60, 16)],
            "train_step: batch.x is float32[64, 16] on host 0 and float32[60, 16] on host 1. Give all hosts as many "
            "rows: leave out a short last batch, or fill it up",
        ),
        (
            [W, x(128, 16, own=False)],
            [W, x(60, 16)],
            r"is float32[128, 16] on host 0 and float32[60, 16] on host 1",
        ),
        (
            [W, x(64, 16)],
            [W, x(64, 16, dtype="float16")],
            "is float32[64, 16] on host 0 and float16[64, 16] on host 1",
        ),
        ([W, x(64, 16)], [W], "train_step with 2 arrays on host 0 and 1 on host 1"),
        ([W, x(64)], [x(64), W], "with other trees: w on host 0 is batch.x on host 1"),
    ],
)
def test_both_sizes_are_named(monkeypatch: pytest.MonkeyPatch, one: list[LeafInfo], two: list[LeafInfo], line: str):
    with pytest.raises(ShardError) as refused:
        compared(monkeypatch, [(["dp"], one), (["dp"], two)])
    assert line in str(refused.value)


def test_the_host_that_differs_is_named_among_many(monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[list[str], list[LeafInfo]]] = [(["dp"], [x(rows, 4)]) for rows in (8, 8, 8, 7)]
    with pytest.raises(ShardError, match=r"float32\[7, 4\] on host 3"):
        compared(monkeypatch, calls)


def test_options_and_fixed_arguments_are_compared(monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[list[str], list[LeafInfo]]] = [
        (["dp", *comparable_values([train, object(), 0.1])], []) for train in (True, False)
    ]
    with pytest.raises(ShardError, match="other options or fixed arguments: True on host 0, False on host 1"):
        compared(monkeypatch, calls)
    compared(monkeypatch, [calls[0], (["dp", *comparable_values([True, object(), 0.1])], [])])


def test_hosts_that_do_not_come_are_not_waited_for_between_meetings(monkeypatch: pytest.MonkeyPatch):
    def late(text: str, seconds: float) -> list[str]:
        raise BarrierTimeout("not all came")

    monkeypatch.setattr(call_comparison, "gather_texts", late)
    with pytest.raises(ShardError, match=r"batch.x is float32\[60, 16\], and not all hosts .* within 60 s"):
        CallComparison("train_step", True, lambda: ([], [("n", "int32", [], True), x(60, 16)]), 2, True).compare(60.0)
