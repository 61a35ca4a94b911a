"""Numbers in words: one table of cases, which the browser code reads as well."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sample_leaves import leaf, mesh
from support.sample_pipelines import measured
from support.sample_reports import attached

from jaxshard_magic.views import format as fmt
from jaxshard_magic.views.words import devices_text, options_text

CASES = json.loads((Path(__file__).parents[1] / "data" / "format_cases.json").read_text(encoding="utf-8"))

WRITERS: dict[str, Callable] = {
    "bytes": fmt.byte_text,
    "limit": fmt.limit_text,
    "seconds": fmt.seconds_text,
    "share": fmt.share_text,
    "count": fmt.count_text,
    "difference": fmt.difference_text,
    "dtype": fmt.dtype_text,
}


def test_every_kind_of_number_in_the_table_has_a_writer():
    assert set(CASES) == set(WRITERS)


@pytest.mark.parametrize(
    ("kind", "value", "said"), [(kind, value, said) for kind, rows in CASES.items() for value, said in rows]
)
def test_a_number_is_written_as_the_table_says(kind: str, value: object, said: str):
    assert WRITERS[kind](value) == said


@given(st.integers(1, 2**59))
def test_bytes_keep_their_value_to_three_digits(n: int):
    number, unit = fmt.byte_text(n).split(fmt.SPACE)
    factor = 1024 ** fmt.BYTE_UNITS.index(unit)
    assert float(number) * factor == pytest.approx(n, rel=0.005)
    assert float(number) < 1000


@given(st.floats(1e-6, 900))
def test_seconds_keep_their_value_to_three_digits(s: float):
    number, unit = fmt.seconds_text(s).split(fmt.SPACE)
    assert float(number) * {"us": 1e-6, "ms": 1e-3, "s": 1}[unit] == pytest.approx(s, rel=0.005)


def test_infinite_differences_are_words():
    assert fmt.difference_text(float("inf")) == "infinity"
    assert fmt.difference_text(float("nan")) == "NaN"


def test_a_range_tells_its_unit_once():
    assert fmt.range_text(0.0468, 0.0491) == f"46.8 to 49.1{fmt.SPACE}ms"
    assert fmt.range_text(0.0009, 0.0491) == f"900{fmt.SPACE}us to 49.1{fmt.SPACE}ms"


@pytest.mark.parametrize(
    ("shape", "spec", "said"),
    [
        ((50257, 768), (None, "data"), "f32[50257,768@data]"),
        ((), (), "f32[]"),
        ((8,), ("data",), "f32[8@data]"),
        ((8, 4), (("data", "model"),), "f32[8@(data,model),4]"),
        ((8, 4), (("data",), None), "f32[8@data,4]"),
    ],
)
def test_a_type_names_the_axes_of_each_dimension(shape, spec, said):
    assert fmt.type_text(leaf("w", shape, spec, {"data": 4, "model": 2})) == said


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([3], "device\u00a03"),
        ([1, 2, 3, 4], "devices 1 to 4"),
        ([0, 1], "devices 0, 1"),
        ([0, 1, 2, 5], "devices 0 to 2, 5"),
        ([0, 2, 4, 6], "4 devices"),
    ],
)
def test_devices_are_named_by_their_runs(ids, said):
    assert fmt.device_text(ids) == said


def test_no_name_moves_the_cursor():
    assert fmt.printable("a\x1b[2Jb\nc\u202ed") == "a\ufffd[2Jb c\ufffdd"
    assert fmt.printable("\u91cd\u307f \u00e4") == "\u91cd\u307f \u00e4"


def test_devices_say_whether_they_are_real():
    assert devices_text(mesh({"data": 8}, "simulated")) == "8 simulated CPU devices"
    assert devices_text(mesh({"data": 1}, "simulated")) == "1 simulated CPU device"
    assert devices_text(mesh({"data": 8})) == "8 \u00d7 TPU v5 lite, attached"
    assert devices_text(mesh({"data": 8}, "topology")) == "8 \u00d7 TPU v5 lite, not attached: compiled, not run"
    assert devices_text(mesh({"data": 8}, processes=2)) == "8 \u00d7 TPU v5 lite on 2 hosts, attached"


def test_options_are_written_as_they_are_typed():
    options = {
        "precision": "bf16",
        "rule": {".*w": "P('model')"},
        "dry_run": True,
        "check": False,
        "specs": None,
    }
    assert (
        options_text(replace(attached(), options=options)) == """--precision bf16 --rule ".*w=P('model')" --dry-run"""
    )


def test_the_schedule_is_among_a_pipelines_options_once_given_or_not():
    report = replace(attached(), pipeline=measured(), options={"microbatches": 8})
    assert options_text(report) == "--schedule zb-h1 --microbatches 8"
    given = replace(report, options={"microbatches": 8, "schedule": "zb-h1"})
    assert options_text(given) == options_text(report)
    assert given.to_text(100).splitlines()[0].startswith("fsdp+tp   --schedule zb-h1 --microbatches 8   ")
    assert options_text(replace(report, pipeline=None)) == "--microbatches 8"
