import re

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from support.refusals import refusal

from jaxshard_magic.errors import ShardError
from jaxshard_magic.specs import (
    check_rules,
    format_spec,
    match_rules,
    parse_assignment,
    parse_spec,
    validate_spec,
)

MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("P('data', None)", P("data", None)),
        ('PartitionSpec("data")', P("data")),
        ("jax.sharding.PartitionSpec('data',)", P("data")),
        ("jax.P('data')", P("data")),
        (" P( ) ", P()),
        ("P(None, ('data','model'))", P(None, ("data", "model"))),
        ("P(['data', 'model'])", P(("data", "model"))),
        ("'data', None", P("data", None)),
        ("('data', None)", P("data", None)),
        ("'data'", P("data")),
        ("None", P(None)),
    ],
)
def test_a_partition_spec_is_read_as_python_writes_it(text, spec):
    assert parse_spec(text) == spec


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["is no PartitionSpec", "P('data', None)"]),
        ("P('data'", ["is no PartitionSpec"]),
        ("P(data)", ["axis names are quoted", "P('data')"]),
        ("P(4)", ["4 is no entry of a PartitionSpec"]),
        ("P('')", ["'' is no entry"]),
        ("P(('data', None))", ["('data', None) is no entry"]),
        ("P(*axes)", ["*axes is no entry"]),
        ("PartitonSpec('data')", ["Did you mean 'PartitionSpec'?"]),
        ("P(data='x')", ["is no PartitionSpec"]),
        ("__import__('os').system('true')", ["is no PartitionSpec"]),
        ("P(print('x'))", ["print('x') is no entry"]),
    ],
)
def test_what_is_no_partition_spec_is_refused_in_one_line(text, parts):
    message = refusal(parse_spec, text)
    for part in parts:
        assert part in message


axis = st.text(min_size=1, max_size=6).filter(lambda name: name == " ".join(name.split()))
entries = st.none() | axis | st.lists(axis, min_size=2, max_size=3, unique=True).map(tuple)
specs = st.lists(entries, max_size=4).map(lambda parts: P(*parts))


@given(spec=specs)
def test_a_partition_spec_reads_back_from_its_own_text(spec):
    assert parse_spec(format_spec(spec)) == spec


@given(spec=specs, name=st.from_regex(re.compile(r"[a-z.*=?()]{1,12}"), fullmatch=True))
def test_an_assignment_reads_back_whatever_the_name_holds(spec, name):
    assert parse_assignment(f"{name}={format_spec(spec)}") == (name, spec)


@given(text=st.text(max_size=20) | st.text(alphabet="P('data',None)=[]", max_size=20))
def test_any_text_is_a_partition_spec_or_one_clear_line(text):
    for read in (parse_spec, parse_assignment):
        try:
            read(text)
        except ShardError as error:
            assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "name", "spec"),
    [
        ("batch=P('data')", "batch", P("data")),
        ("batch = jax.sharding.PartitionSpec('data')", "batch", P("data")),
        (".*kernel=P(None,'model')", ".*kernel", P(None, "model")),
        ("(?P<n>a=b)=P('data')", "(?P<n>a=b)", P("data")),
        ("(?=P(x))kernel=P('data')", "(?=P(x))kernel", P("data")),
        ("a=b.*='data', None", "a=b.*", P("data", None)),
    ],
)
def test_an_assignment_splits_before_its_spec(text, name, spec):
    assert parse_assignment(text) == (name, spec)


@pytest.mark.parametrize("text", ["P('data')", "=P('data')", "batch", "", "batch P('data')"])
def test_an_assignment_needs_a_name_and_a_spec(text):
    assert "write batch=P('data', None)" in refusal(parse_assignment, text)


def test_specs_are_written_as_one_types_them():
    assert format_spec(P(None, ("data", "model"))) == "P(None, ('data', 'model'))"
    assert format_spec(P()) == "P()"
    assert format_spec((None, "data")) == "P(None, 'data')"


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (P("data", "model"), (8, 4)),
        (P(("data", "model")), (16, 3)),
        (P("data"), (4, 5, 6)),
        (P(), ()),
        (P(None, "data"), (3, 0)),
    ],
)
def test_a_spec_that_fits_its_array_passes(spec, shape):
    validate_spec(spec, shape, MESH, "w")


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        (
            P("modle"),
            (8,),
            "w: P('modle') names axis 'modle'. Did you mean 'model'? The mesh's axes are data, model",
        ),
        (
            P("data", ("model", "data")),
            (8, 8),
            "w: P('data', ('model', 'data')) uses axis 'data' twice; an axis can divide one dimension. "
            "Write P('data', 'model')",
        ),
        (
            P("data", None, None),
            (32, 64),
            "w: P('data', None, None) has 3 entries, the array has 2 dimensions (32, 64). Write P('data', None)",
        ),
        (
            P(P.UNCONSTRAINED),
            (8,),
            "w: P(P.UNCONSTRAINED) leaves a dimension open; write an axis or None for it",
        ),
        (P("data"), (), "w: P('data') has 1 entry, the array has 0 dimensions. Write P()"),
        (
            P("data", None),
            (30, 64),
            "w: dimension 0 of (30, 64) has size 30, which data=4 does not divide. "
            "Make it 28 or 32, or write P(None, None)",
        ),
        (
            P(None, ("data", "model")),
            (30, 4),
            "w: dimension 1 of (30, 4) has size 4, which data=4 × model=2 does not divide. "
            "Make it 8, or write P(None, None)",
        ),
    ],
)
def test_a_spec_that_does_not_fit_says_what_would(spec, shape, message):
    assert refusal(validate_spec, spec, shape, MESH, "w") == message


def test_a_mesh_of_devices_is_checked_like_an_abstract_one():
    mesh = jax.make_mesh((1,), ("data",))
    validate_spec(P("data"), (3,), mesh, "w")
    assert "axes are data" in refusal(validate_spec, P("model"), (3,), mesh, "w")


RULES = [("bias", P()), (r"Dense_\d\.kernel", P(None, "model")), ("kernel", P("data"))]


def test_the_first_rule_found_in_the_path_wins():
    assert match_rules(RULES, "params.Dense_0.kernel") == RULES[1]
    assert match_rules(RULES, "params.Conv_0.kernel") == RULES[2]
    assert match_rules(RULES, "params.scale") is None


def test_a_broken_regular_expression_is_one_line():
    message = refusal(match_rules, [("*kernel", P())], "kernel")
    assert "'*kernel' is no regular expression" in message
    assert r"\*kernel" in message


def test_a_rule_that_matches_nothing_names_the_nearest_path():
    paths = ["params.Conv_0.bias", "params.Dense_0.kernel", "params.Dense_0.bias", "opt.mu.Dense_0.kernel"]
    check_rules(RULES, paths)
    message = refusal(check_rules, [("Dense0.kernel$", P("model"))], paths)
    assert message == (
        "rule Dense0.kernel$=P('model') matches no leaf; the nearest is params.Dense_0.kernel. Use a part of its path"
    )


def test_a_rule_for_a_step_without_arrays_says_so():
    assert "the step has no arrays" in refusal(check_rules, RULES[:1], [])
