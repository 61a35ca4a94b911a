"""The usual decision path of a choice tells the figures that the search compares by: it turns down nothing chosen."""

import random
from dataclasses import replace

import pytest

import jaxshard_magic
from jaxshard_magic import hardware
from jaxshard_magic.report.choice import Question
from jaxshard_magic.search import Requests, strategy_space
from jaxshard_magic.search.decision_path import decision_questions
from jaxshard_magic.search.nodes import SearchNode, simplest_first
from jaxshard_magic.search.plan_estimate import PlanEstimate

V5E, ROOM = hardware.chip("v5e"), 16_000
FAMILIES = ("dp", "fsdp", "fsdp+tp", "tp", "pp")


def planned(**figures: tuple[float, float, int] | None) -> list[SearchNode]:
    """Candidates by strategy, with what each computes, waits for and needs."""
    requests = Requests(
        FAMILIES, jaxshard_magic.mesh("cpu:8 data=8"), ["data=8", "data=4 model=2", "stage=8", "model=8"]
    )
    nodes = []
    for each in strategy_space(requests):
        found = figures.get(each.strategy.replace("+", "_"))
        if found is not None:
            own, waits, needs = found
            sketch = PlanEstimate(own + waits, own, waits, needs // 2, needs, 4, own + waits, own + waits)
            nodes.append(SearchNode(each, own + waits, sketch))
    return nodes


def asked(nodes: list[SearchNode]) -> tuple[Question, ...]:
    return decision_questions(nodes, V5E, ROOM, lambda node: node.sketch and node.sketch.seconds)


def test_links_are_fast_enough_where_no_other_way_is_clearly_faster():
    large = (1.0, 0.0, 2 * ROOM)
    slow = planned(dp=large, fsdp=(1.0, 3.0, 9_000), tp=(1.0, 1.0, 9_000))
    _, links, _ = asked(slow)
    assert links.answer is False and "3.00" in links.because and links.because.endswith("a step under tp")
    _, links, _ = asked(planned(dp=large, fsdp=(1.0, 3.0, 9_000), tp=(1.0, 2.9, 9_000)))
    assert links.answer is True and "no other way is clearly faster" in links.because
    _, links, _ = asked(planned(dp=large, fsdp=(2.0, 1.9, 9_000), tp=(0.1, 0.1, 9_000)))
    assert links.answer is True and "tp" not in links.because


def test_what_does_not_fit_is_not_led_to():
    _, links, _ = asked(planned(dp=(1.0, 0.0, 2 * ROOM), fsdp=(1.0, 0.1, 2 * ROOM), pp=(1.0, 0.1, 9_000)))
    assert links.answer is False and "under fsdp" in links.because and "needs" in links.because


@pytest.mark.parametrize("peak", [0.9, 1.1])
def test_a_compiled_peak_counts_for_more_than_an_estimate(peak: float):
    (node,) = planned(dp=(1.0, 0.0, ROOM if peak > 1 else 2 * ROOM))[:1]

    class Compiled:
        fits, report = peak <= 1, None

    compiled = Compiled()
    compiled.peak = int(peak * ROOM)
    node.trial = compiled
    fits, *_ = decision_questions([node], V5E, ROOM, lambda _: None)
    assert fits.answer is (peak <= 1) and "about" not in fits.because


def test_options_that_save_memory_count_and_are_named():
    (bare,) = planned(dp=(1.0, 0.0, 2 * ROOM))[:1]
    saving = replace(bare.candidate, options={"remat": "full"})
    less = SearchNode(saving, 1.2, replace(bare.sketch, peak_bytes=9_000))
    fits, *_ = asked([bare, less])
    assert fits.answer is True and fits.because.endswith('as dp --mesh "data=8" --remat full')


def test_what_is_chosen_is_not_turned_down_before():
    order = {name: k for k, name in enumerate(FAMILIES)}
    draw = random.Random(7)
    for _ in range(300):
        nodes = planned(
            **{
                name.replace("+", "_"): (
                    draw.uniform(0.5, 2),
                    draw.uniform(0, 4),
                    draw.randrange(4_000, 30_000),
                )
                for name in FAMILIES
            }
        )
        fit = sorted((n for n in nodes if n.peak <= ROOM), key=lambda n: n.min_seconds)
        chosen = simplest_first(fit, lambda n: n.sketch.seconds, order)
        if chosen and (strategy := chosen[0].candidate.strategy) in ("dp", "fsdp"):
            fits, links, _ = asked(nodes)
            assert (fits if strategy == "dp" else links).answer is True, (strategy, fits, links)
