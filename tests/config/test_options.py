"""The table of options: each row is complete, and all that read it have the same options."""

import inspect
from dataclasses import fields

import pytest

import jaxshard_magic
from jaxshard_magic.config.options import (
    FLAGS,
    GradientOptions,
    PipelineOptions,
    PositionOptions,
)
from jaxshard_magic.config.request import Request, make_request
from jaxshard_magic.config.strategies import STRATEGIES
from jaxshard_magic.errors import ShardError
from jaxshard_magic.notebook.options import ShardOptions, check_kind, parse, with_strategies
from jaxshard_magic.search import VARIABLE_OPTIONS

GROUPS = (GradientOptions, PipelineOptions, PositionOptions)
LINE = ShardOptions.flags()


@pytest.mark.parametrize("group", GROUPS)
def test_every_field_of_an_option_class_is_a_row(group):
    assert [flag.parameter for flag in FLAGS.values() if flag.parameter in group.names()] == [
        each.name for each in fields(group)
    ]


def test_shard_takes_every_option_of_the_table_and_documents_it():
    parameters = inspect.signature(jaxshard_magic.shard).parameters
    missing = FLAGS.keys() - parameters.keys()
    assert not missing, f"api.shard lacks {missing}"
    text = inspect.getdoc(jaxshard_magic.shard) or ""
    assert not [name for name in FLAGS if f"    {name}: " not in text]


def test_the_command_line_has_every_option_of_the_table_once():
    names = [flag.name for flag in LINE]
    assert len(names) == len(set(names))
    assert {flag.name for flag in FLAGS.values()} <= {*names}


def test_a_row_of_the_gradients_tells_the_program_to_take_home_what_it_lacks():
    assert not [name for name in GradientOptions.names() if not FLAGS[name].without]


def test_a_comparison_varies_the_options_whose_rows_say_so():
    assert {flag.parameter for flag in FLAGS.values() if flag.varies} == {*VARIABLE_OPTIONS}
    assert "pad" not in VARIABLE_OPTIONS and "cut" not in VARIABLE_OPTIONS


def test_a_row_names_strategies_and_other_rows_that_exist():
    assert {flag.strategy for flag in FLAGS.values()} - {""} <= STRATEGIES.keys()
    parameters = {flag.parameter for flag in LINE}
    assert {flag.needs for flag in LINE} - {""} <= parameters
    assert {key for flag in LINE for key in flag.refused} <= {*STRATEGIES, "auto", "compare", "dry_run"}


@pytest.mark.parametrize(
    "flag", [flag for flag in FLAGS.values() if flag.choices and not flag.open], ids=lambda f: f.name
)
def test_a_word_that_an_option_does_not_take_is_refused_with_those_that_it_takes(flag):
    group = next(group for group in GROUPS if flag.parameter in group.names())
    with pytest.raises(ShardError, match=f"^{flag.name} does not take 'nonsense'"):
        group(**{flag.parameter: "nonsense"})


@pytest.mark.parametrize("flag", [flag for flag in LINE if "compare" in flag.refused], ids=lambda f: f.name)
def test_a_comparison_refuses_what_its_row_says(flag):
    value = "" if not flag.metavar or flag.bare is not None else " there"
    with pytest.raises(ShardError, match=f"^{flag.name}: in a comparison"):
        with_strategies(parse(f"dp,fsdp {flag.name}{value}"))


@pytest.mark.parametrize("flag", [flag for flag in LINE if flag.needs], ids=lambda f: f.name)
def test_an_option_that_needs_another_names_it(flag):
    value = " 3" if flag.metavar else ""
    with pytest.raises(ShardError, match=f"^{flag.name} is of --{flag.needs}: add --{flag.needs}"):
        check_kind(parse(f"fsdp {flag.name}{value}"))


def test_options_of_the_line_reach_the_request():
    options = parse("fsdp --microbatches 4 --reduce once --remat full --precision bf16 --reduce-dtype f32 --pad")
    request = make_request("fsdp", jaxshard_magic.mesh("cpu:8 data=8"), **options.step_options)
    assert isinstance(request, Request) and request.gradients.given == {
        "microbatches": 4,
        "reduce": "once",
        "remat": "full",
        "precision": "bf16",
        "pad": True,
        "reduce_dtype": "f32",
    }
