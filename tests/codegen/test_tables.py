"""Where arrays lie as a table of patterns: each path finds its own spec, by the first pattern that it matches."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxshard_magic.codegen.generated_program import spec_table

DATA, MODEL = P("data"), P(None, "model")


def read(found: Mapping[str, str], path: str) -> str:
    """What a program reads there."""
    return next((text for pattern, text in found.items() if fnmatchcase(path, pattern)), "P()")


def test_paths_that_differ_in_one_number_and_lie_alike_are_one_pattern():
    assert spec_table({"params.0.w": DATA, "params.1.w": DATA, "params.12.w": DATA}) == {"params.*.w": 'P("data")'}


def test_paths_that_differ_in_two_numbers_have_a_star_at_both():
    paths = ("h.0.heads.0", "h.0.heads.1", "h.1.heads.0")
    assert spec_table(dict.fromkeys(paths, DATA)) == {"h.*.heads.*": 'P("data")'}


def test_a_number_that_all_paths_share_stays():
    assert spec_table({"layers.0.conv2.w": DATA, "layers.1.conv2.w": DATA}) == {"layers.*.conv2.w": 'P("data")'}


def test_a_path_of_its_own_keeps_its_number():
    assert spec_table({"params.0.w": DATA}) == {"params.0.w": 'P("data")'}


def test_paths_whose_numbers_differ_and_that_lie_differently_stand_alone():
    found = spec_table({"params.0.w": DATA, "params.1.w": MODEL, "params.2.w": DATA})
    assert found == {
        "params.0.w": 'P("data")',
        "params.1.w": 'P(None, "model")',
        "params.2.w": 'P("data")',
    }


def test_one_of_several_that_is_not_divided_is_matched_by_no_pattern():
    found = spec_table({"params.0.w": DATA, "params.1.w": P(), "params.2.w": DATA})
    assert found == {"params.0.w": 'P("data")', "params.2.w": 'P("data")'}


def test_a_pattern_that_would_match_another_array_is_not_made():
    """`a.*.w` matches `a.0.b.w` too: a star matches dots."""
    found = spec_table({"a.0.w": DATA, "a.1.w": DATA, "a.0.b.w": P()})
    assert found == {"a.0.w": 'P("data")', "a.1.w": 'P("data")'}


def test_what_lies_whole_on_every_device_is_left_out():
    assert spec_table({"rate": P(), "step": P(None), "w": P(None, None)}) == {}
    assert spec_table({}) == {}


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (P("data"), 'P("data")'),
        (P("data", None, None), 'P("data")'),
        (P(None, "data"), 'P(None, "data")'),
        (P(("data", "model")), 'P(("data", "model"))'),
        (P(("data",), None, ("model", "seq")), 'P("data", None, ("model", "seq"))'),
    ],
)
def test_specs_are_written_as_they_are_typed(spec: P, text: str):
    assert spec_table({"w": spec}) == {"w": text}


def test_brackets_in_a_name_are_no_pattern():
    """`w[0]` as a pattern would match `w0`."""
    found = spec_table({"w[0]": DATA, "w[1]": MODEL, "w0": P(None, None, "seq")})
    assert [read(found, path) for path in ("w[0]", "w[1]", "w0")] == [
        'P("data")',
        'P(None, "model")',
        'P(None, None, "seq")',
    ]


def test_brackets_around_numbers_that_lie_alike():
    found = spec_table({"w[0]": DATA, "w[1]": DATA, "w0": P()})
    assert len(found) == 1
    assert [read(found, path) for path in ("w[0]", "w[1]", "w0")] == ['P("data")', 'P("data")', "P()"]


@pytest.mark.parametrize("name", ["*", "w?", "[!a]", "a[*]", "[", "]", "", "w x", "\u91cd\u307f.\u5c64_0"])
def test_a_name_of_any_letters_matches_itself_alone(name: str):
    found = spec_table({name: DATA, "other": MODEL, "wx": P()})
    assert [read(found, path) for path in (name, "other", "wx", "a", "ab")] == [
        'P("data")',
        'P(None, "model")',
        "P()",
        "P()",
        "P()",
    ]


def test_a_star_in_a_name_is_no_number():
    """The names differ, though both have a star where the other has a number."""
    assert spec_table({"w*": DATA, "w1": DATA}) == {"w[*]": 'P("data")', "w1": 'P("data")'}
    found = spec_table({"x*2": DATA, "x1*": DATA})
    assert [read(found, path) for path in ("x*2", "x1*", "x12")] == ['P("data")', 'P("data")', "P()"]


PARTS = st.sampled_from(["w", "b", "layers", "0", "1", "12", "w[0]", "w[1]", "a?", "conv2", "2", "w*", "*2", "1*"])
PATHS = st.lists(PARTS, min_size=1, max_size=4).map(".".join)
SPECS = st.sampled_from([P(), P("data"), P(None, "data"), P(("data", "model"))])
TEXTS = {P(): "P()", P("data"): 'P("data")', P(None, "data"): 'P(None, "data")'}
TEXTS[P(("data", "model"))] = 'P(("data", "model"))'


@given(st.dictionaries(PATHS, SPECS, max_size=12))
def test_every_path_finds_its_own_spec(specs: dict[str, P]):
    found = spec_table(specs)
    assert {path: read(found, path) for path in specs} == {path: TEXTS[spec] for path, spec in specs.items()}
