"""The browser writes numbers as Python does: one table of cases for both."""

import json
from pathlib import Path

import pytest
from support.browsing import Stage

from jaxshard_magic.views.timeline.data import ticks

CASES = json.loads((Path(__file__).parents[1] / "data" / "format_cases.json").read_text(encoding="utf-8"))
WRITERS = {
    "bytes": "format.bytes(value)",
    "seconds": "format.seconds(value)",
    "share": "format.share(value)",
    "count": "format.count(value)",
}


def test_every_kind_that_the_browser_writes_is_in_the_table():
    assert set(WRITERS) <= set(CASES)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_number_is_written_in_the_browser_as_the_table_says(kind: str, show: Stage):
    given = [value for value, _ in CASES[kind]]
    code = f"values => values.map(value => {{ const {{ format }} = report; return {WRITERS[kind]}; }})"
    said = show.page.evaluate(code, given)
    assert dict(zip(map(str, given), said, strict=True)) == {str(value): text for value, text in CASES[kind]}


def test_the_parts_of_a_size_are_its_text(show: Stage):
    given = [value for value, _ in CASES["bytes"] if value is not None]
    parts = show.page.evaluate("values => values.map(value => report.format.bytesParts(value))", given)
    assert ["\u202f".join(pair) for pair in parts] == [said for value, said in CASES["bytes"] if value is not None]


@pytest.mark.parametrize("unit", ["s", ""])
def test_the_ticks_of_a_timeline_are_those_of_its_static_twin(unit: str, show: Stage):
    ends = [digit * 10.0**power for power in range(-6, 4) for digit in (1, 1.3, 2, 3.53, 5, 9.99)]
    given = [[end, most] for end in ends for most in (2, 5, 8, 9.375)]
    code = "([given, unit]) => given.map(([end, most]) => report.timeline.ticks(0, end, end, most, unit))"
    drawn = show.page.evaluate(code, [given, unit])
    for (end, most), found in zip(given, drawn, strict=True):
        twin = ticks(end, most, unit)
        assert [label.replace("\u202f", " ") for _, label in found] == [label for _, label in twin], (end, most)
        assert [at for at, _ in found] == pytest.approx([at for at, _ in twin])
