"""The types that the widgets are checked with are those of what Python sends."""

import json
import zlib
from functools import cache
from typing import Any

import pytest
from support import sample_metrics
from support.payload_types import Types
from support.sample_choices import CHOICES
from support.sample_comparisons import COMPARISONS, of_runs
from support.sample_explorers import EXPLORERS
from support.sample_pipelines import PIPELINES, reported
from support.sample_reports import SAMPLES

from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.views.choice.payload import packed_choice
from jaxshard_magic.views.comparison.payload import packed_comparison
from jaxshard_magic.views.explorer_payload import packed_explorer, state
from jaxshard_magic.views.payload import packed_report
from jaxshard_magic.views.payload_encoding import compressed
from jaxshard_magic.views.timeline.payload import packed_pipeline
from jaxshard_magic.views.training.payload import packed_training, update_payload

SCHEDULES = {name: PIPELINES[name] for name in ("measured", "one_f_one_b", "fused", "hostile")}
RUNS = {"running": lambda: update_payload(1, sample_metrics.run().tails({}), "step 400 of 800", 0.5)}


def two_runs() -> Comparison:
    return of_runs(sample_metrics.metrics(), None, sample_metrics.metrics(300))


PACKED = (
    ("Report", {**SAMPLES, "reported": reported}, packed_report),
    ("PipelineAlone", SCHEDULES, packed_pipeline),
    ("TrainingUpdate", RUNS, packed_training),
    (
        "Comparison",
        {**COMPARISONS, "of runs": lambda: of_runs(sample_metrics.metrics(), None, sample_metrics.metrics(300))},
        packed_comparison,
    ),
    ("Comparison", CHOICES, packed_choice),
    ("Explorer", EXPLORERS, packed_explorer),
    ("ExplorerState", EXPLORERS, lambda ex: compressed(state(ex))),
)
CASES = [(kind, name, made, packed) for kind, samples, packed in PACKED for name, made in samples.items()]
TYPES = Types()


@cache
def wrong(kind: str, made: Any, packed: Any) -> list[str]:
    value = json.loads(zlib.decompress(packed(made())))
    return list(TYPES.wrong(value, TYPES.named[kind]))[:10]


@pytest.mark.parametrize(("kind", "made", "packed"), [pytest.param(k, m, p, id=f"{k}-{n}") for k, n, m, p in CASES])
def test_a_payload_is_of_its_type(kind: str, made: Any, packed: Any):
    assert not wrong(kind, made, packed)


def test_every_type_is_met_in_a_sample():
    for kind, _, made, packed in CASES:
        assert not wrong(kind, made, packed)
    roots = {kind for kind, _, _ in PACKED}
    assert set(TYPES.named) - TYPES.met - roots == {"Lanes", "LineFacts"}, "the two that others extend"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"kind": "share"}, ".share is missing"),
        ({"kind": "share", "share": "0.5"}, ".share: '0.5' is no number"),
        ({"kind": "share", "share": 0.5, "of": 1}, ".of is in no type"),
        ({"kind": "axes", "share": 0.5}, ".kind: 'axes' is no 'share'"),
    ],
)
def test_what_is_not_of_its_type_is_told_with_its_place(value: Any, said: str):
    assert list(TYPES.wrong(value, TYPES.named["ShareMark"])) == [said]
