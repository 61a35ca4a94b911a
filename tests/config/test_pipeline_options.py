"""The words of a pipeline, `%%shard pp --stages 4 --schedule zb-h1`: read, checked, and given a mesh. Nothing runs."""

from types import SimpleNamespace

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st
from IPython.core.completer import provisionalcompleter
from support.cells import LOOP, STEP, one_line
from support.refusals import refusal

import jaxshard_magic
from jaxshard_magic import schedule, targets
from jaxshard_magic.config.mesh import default_spec, default_text
from jaxshard_magic.config.options import GradientOptions, PipelineOptions
from jaxshard_magic.config.pipeline_microbatches import default_microbatches, pipeline_options
from jaxshard_magic.config.request import step_options
from jaxshard_magic.config.strategy_text import batch_axes, jobs_of, parse_strategy, part_axes
from jaxshard_magic.errors import ShardError
from jaxshard_magic.hardware import chip
from jaxshard_magic.notebook.options import parse


def train_step(state, batch):
    return state


# What is asked


def test_a_pipeline_by_itself_is_1f1b_over_the_stages_of_the_mesh_with_even_flops():
    assert PipelineOptions() == PipelineOptions(stages=None, schedule="1f1b", chunks=None, balance="flops", cut=None)
    assert PipelineOptions().given == {}


def test_what_was_asked_is_what_differs():
    piped = PipelineOptions(stages=4, schedule="interleaved", chunks=2, balance="measured", cut="block_[24]$")
    assert piped.given == {
        "stages": 4,
        "schedule": "interleaved",
        "chunks": 2,
        "balance": "measured",
        "cut": "block_[24]$",
    }
    assert PipelineOptions(**piped.given) == piped


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"stages": 0}, "--stages takes a whole number from 1 on, not 0"),
        ({"stages": True}, "--stages takes a whole number from 1 on, not True"),
        ({"stages": 2.0}, "--stages takes a whole number from 1 on, not 2.0"),
        ({"chunks": -1, "schedule": "interleaved"}, "--chunks takes a whole number from 1 on, not -1"),
        ({"schedule": "zbh1"}, "Did you mean 'zb-h1'?"),
        (
            {"balance": "flop"},
            "--balance does not take 'flop'. Did you mean 'flops'? It takes flops, measured",
        ),
        ({"cut": "block("}, "--cut 'block(' is no regular expression: missing )"),
        ({"cut": ""}, "--cut takes a regular expression"),
        ({"chunks": 2}, "--chunks 2: the schedule 1f1b has 1 on each rank; leave --chunks out"),
        ({"chunks": 3, "schedule": "zb-v"}, "the schedule zb-v has 2 on each rank"),
    ],
)
def test_a_value_that_can_not_be_is_one_line(given, says):
    assert says in refusal(lambda: PipelineOptions(**given))


@pytest.mark.parametrize("name", schedule.NAMES)
def test_every_schedule_is_taken_with_the_chunks_that_it_is_made_for(name):
    chunks = schedule.NAMES[name].chunks
    made = PipelineOptions(schedule=name, chunks=chunks).scheduled(2, 4)
    assert (made.name, made.stages, made.microbatches, made.chunks) == (name, 2, 4, chunks or 1)


def test_the_chunks_of_the_line_are_those_of_the_schedule():
    assert PipelineOptions(schedule="looped-bfs", chunks=3).scheduled(2, 5) == schedule.make(
        "looped-bfs", stages=2, microbatches=5, chunks=3
    )


@pytest.mark.parametrize(
    ("name", "microbatches", "says", "fix"),
    [
        (
            "interleaved",
            6,
            "6 microbatches don't divide by 4 stages; use --microbatches 4 or --microbatches 8",
            "--microbatches 8",
        ),
        (
            "interleaved",
            3,
            "3 microbatches don't divide by 4 stages; use --microbatches 4",
            "--microbatches 4",
        ),
        ("dualpipev", 6, "ranks on the way down and up; use --microbatches 8", "--microbatches 8"),
    ],
)
def test_microbatches_that_a_schedule_has_no_form_for_are_told_as_options(name, microbatches, says, fix):
    with pytest.raises(ShardError) as raised:
        PipelineOptions(schedule=name).scheduled(4, microbatches)
    said = str(raised.value)
    assert said.startswith(f"--schedule {name} --stages 4 --microbatches {microbatches}: ")
    assert said.endswith(says)
    assert raised.value.fix == fix


# How many microbatches


@pytest.mark.parametrize(
    ("batch", "shards", "stages", "name", "want"),
    [
        (64, 1, 4, "1f1b", 16),  # four for each stage
        (8, 1, 4, "1f1b", 8),  # one example in each
        (30, 1, 4, "1f1b", 15),  # 16 does not divide 30
        (32, 4, 4, "1f1b", 8),  # 8 examples on each shard
        (24, 1, 4, "interleaved", 12),  # a multiple of the stages
        (40, 1, 4, "interleaved", 8),
        (20, 2, 4, "dualpipev", 10),  # from twice the stages on
        (7, 1, 1, "1f1b", 1),  # a single stage needs no other
    ],
)
def test_without_a_number_as_many_microbatches_are_taken_as_four_for_each_stage(batch, shards, stages, name, want):
    assert default_microbatches(batch, shards, stages, PipelineOptions(schedule=name)) == want


@pytest.mark.parametrize(
    ("batch", "shards", "name", "says"),
    [
        (17, 1, "1f1b", "use a batch of 16 or 18, or --microbatches 17"),
        (37, 1, "1f1b", "use a batch of 36 or 38"),
        (31, 2, "1f1b", "a batch of 31 over 2 shards does not divide into 2 to 16 microbatches"),
        (31, 2, "1f1b", "use a batch of 30 or 32"),
        (30, 1, "interleaved", "use a batch of 28 or 32"),
        (1, 1, "1f1b", "use a batch of 2"),
        (0, 1, "1f1b", "use a batch of 2"),
    ],
)
def test_a_batch_that_microbatches_do_not_divide_is_told_numbers_that_do(batch, shards, name, says):
    assert says in refusal(lambda: default_microbatches(batch, shards, 4, PipelineOptions(schedule=name)))


@drawn(
    st.integers(1, 400),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from(["1f1b", "interleaved", "dualpipev"]),
)
def test_the_number_taken_divides_the_batch_and_suits_the_schedule(batch, shards, stages, name):
    piped = PipelineOptions(schedule=name)
    try:
        taken = default_microbatches(batch, shards, stages, piped)
    except ShardError:
        for m in range(2, 4 * stages + 1):
            assert batch % (shards * m) or piped.refused(stages, m)
        return
    assert batch % (shards * taken) == 0
    assert taken <= 4 * stages
    assert piped.scheduled(stages, taken).microbatches == taken


# Beside other options


def test_options_of_a_pipeline_without_one_are_told_the_strategy_for_them():
    said = refusal(lambda: pipeline_options(("fsdp",), {"stages": 4}, GradientOptions()))
    assert said.startswith("--stages 4 is for pipelines, and fsdp is none")
    assert said.endswith("%%shard pp+fsdp --stages 4")
    assert refusal(lambda: pipeline_options(("spmd",), {"cut": "up"}, GradientOptions())).endswith(
        "%%shard pp --cut up"
    )


def test_without_pp_and_its_options_there_is_no_pipeline():
    assert (
        pipeline_options(("fsdp",), {"stages": None, "schedule": None}, GradientOptions(reduce="once", pad=True))
        is None
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"reduce": "once"}, "--reduce once: a pipeline sums gradients"),
        ({"reduce_dtype": "bf16"}, "--reduce-dtype bf16: a pipeline adds"),
        ({"pad": True}, "--pad: a pipeline takes batches that divide"),
        ({"microbatches": 1}, "--microbatches 1: one stage of the pipeline would work at a time"),
    ],
)
def test_an_option_that_a_pipeline_has_no_use_for_is_one_line(given, says):
    assert says in refusal(lambda: jaxshard_magic.shard(train_step, "pp", **given))


def test_remat_and_precision_and_microbatches_go_with_a_pipeline():
    step = jaxshard_magic.shard(
        train_step, "pp", stages=2, schedule="zb-h1", remat="full", precision="bf16", microbatches=8
    )
    assert step.request.pipeline == PipelineOptions(stages=2, schedule="zb-h1")
    assert step.request.gradients == GradientOptions(microbatches=8, remat="full", precision="bf16")
    assert step.request.options == {
        "microbatches": 8,
        "remat": "full",
        "precision": "bf16",
        "stages": 2,
        "schedule": "zb-h1",
    }


def test_a_step_without_pp_has_no_pipeline():
    assert jaxshard_magic.shard(train_step, "fsdp").request.pipeline is None


# Meshes


def test_pp_asks_for_a_pipeline_axis_and_sums_with_what_works_inside_a_stage():
    assert jobs_of(parse_strategy("pp")) == ("pipeline",)
    assert jobs_of(parse_strategy("pp+fsdp+sp+tp")) == ("pipeline", "fsdp", "tensor")
    for alone in ("spmd", "pmap"):
        assert "stands alone" in refusal(lambda alone=alone: parse_strategy(f"pp+{alone}"))


@pytest.mark.parametrize(
    ("jobs", "devices", "platform", "stages", "text"),
    [
        (["pipeline"], 8, "gpu", None, "pipe=4 data=2"),
        (["pipeline"], 4, "gpu", None, "pipe=4"),
        (["pipeline"], 2, "gpu", None, "pipe=2"),
        (["pipeline"], 1, "tpu", None, "pipe=1"),
        (["pipeline"], 6, "gpu", None, "pipe=3 data=2"),
        (["pipeline"], 5, "gpu", None, "pipe=4"),
        (["pipeline"], 8, "gpu", 2, "pipe=2 data=4"),
        (["pipeline"], 8, "gpu", 8, "pipe=8"),
        (["pipeline"], 8, "gpu", 3, "pipe=3 data=2"),
        (["pipeline"], 1, "cpu", None, "pipe=4 data=2"),
        (["pipeline"], 1, "cpu", 16, "pipe=16"),
        (["pipeline", "data"], 8, "gpu", 8, "pipe=8 data=1"),
        (["pipeline", "fsdp"], 8, "gpu", None, "pipe=4 data=2"),
        (["pipeline", "tensor"], 8, "gpu", None, "pipe=4 model=2"),
        (["tensor", "fsdp", "pipeline"], 8, "gpu", 2, "pipe=2 data=2 model=2"),
        (["pipeline", "data", "fsdp"], 16, "gpu", 2, "pipe=2 data=2 fsdp=4"),
    ],
)
def test_a_default_mesh_has_the_stages_and_what_is_left_for_the_others(jobs, devices, platform, stages, text):
    assert str(default_spec(jobs, devices, platform, stages)) == text


@pytest.mark.parametrize(
    ("strategy", "stages", "want"),
    [
        ("pp", None, {"pipe": 4, "data": 2}),
        ("pp", 8, {"pipe": 8}),
        ("pp+fsdp+tp", 2, {"pipe": 2, "data": 2, "model": 2}),
    ],
)
def test_a_step_without_a_mesh_gets_that(strategy, stages, want):
    assert jaxshard_magic.shard(train_step, strategy, stages=stages).mesh.shape == want


def test_more_stages_than_devices_are_told_with_what_would_do():
    said = refusal(lambda: jaxshard_magic.shard(train_step, "pp+tp", stages=16))
    assert "there are 8. Use --stages 8 or fewer" in said
    assert said.endswith("%mesh cpu:16 pipe=16 model=1")


@pytest.mark.parametrize(
    ("strategy", "axes", "want"),
    [
        ("pp", "pipe=4 data=2", ("pipe",)),
        ("pp", "pp=4 data=2", ("pp",)),
        ("pp", "data=2 stage=4", ("stage",)),
        ("pp@x+tp", "x=4 model=2", ("x",)),
        ("pp@stage", "pipe=2 stage=4", ("stage",)),
    ],
)
def test_the_axis_of_a_pipeline_is_known_by_its_name_or_named(strategy, axes, want):
    assert part_axes(parse_strategy(strategy), jaxshard_magic.mesh(axes), 4)["pp"] == want


def test_examples_are_divided_over_the_data_axes_and_not_over_stages():
    mesh = jaxshard_magic.mesh("pipe=2 data=2 fsdp=2")
    assert batch_axes(part_axes(parse_strategy("pp"), mesh), mesh) == ("data", "fsdp")
    mesh = jaxshard_magic.mesh("data=4 fsdp=2")
    assert batch_axes(part_axes(parse_strategy("pp@data"), mesh), mesh) == ("fsdp",)


@pytest.mark.parametrize(
    ("strategy", "axes", "stages", "says"),
    [
        ("pp", "data=8", None, "the mesh has data=8. Use %mesh pipe=4 data=2 or name one: pp@data"),
        ("pp", "data=8", 2, "Use %mesh pipe=2 data=4"),
        ("pp", "data=8", 3, "use --stages 4 and %mesh pipe=4 data=2"),
        ("pp+tp", "data=4 model=2", None, "Use %mesh pipe=4 model=2"),
        (
            "pp",
            "pipe=2 data=4",
            4,
            "--stages 4: the mesh's pipeline axis is pipe=2. Leave --stages out for 2",
        ),
        ("pp", "pipe=2 data=4", 4, "use %mesh pipe=4 data=2"),
        ("pp", "pipe=2 data=4", 16, "use --stages 8 and %mesh pipe=8"),
        ("pp@dta", "data=8", None, "Did you mean 'data'?"),
        ("pp@data+dp", "data=8", None, "pp and dp both take the mesh axis data"),
        ("pp", "pipe=2 stage=4", None, "several pipeline axes, pipe, stage; say which: pp@pipe"),
    ],
)
def test_a_mesh_that_is_none_for_the_pipeline_is_one_line_with_one_that_is(strategy, axes, stages, says):
    said = refusal(lambda: jaxshard_magic.shard(train_step, strategy, mesh=axes, stages=stages))
    assert says.lower() in said.lower()


def test_a_mesh_of_hardware_that_is_not_attached_is_told_with_its_name(monkeypatch):
    monkeypatch.setattr(targets, "target_of", lambda mesh: SimpleNamespace(name="v5e:2x4"))
    assert default_text(jaxshard_magic.mesh("data=8"), ["pipeline"]) == "v5e:2x4 pipe=4 data=2"


def test_stages_that_are_parts_of_a_slice_whose_compiler_takes_none_are_one_line(monkeypatch):
    def asked(mesh: str, *extent: int):
        target = targets.Target(chip("v5e"), extent)
        monkeypatch.setattr("jaxshard_magic.config.request.target_of", lambda _: target)
        return jaxshard_magic.shard(train_step, "pp+dp", mesh=jaxshard_magic.mesh(mesh))

    assert refusal(lambda: asked("pipe=2 data=4", 4, 8)) == (
        "pp on v5e:4x8: a stage would have 4 of its 8 devices, and on more than 16 chips the compiler of TPU v5e takes "
        "programs for all of them or for one; use v5e:16 or fewer chips, or a strategy without pp"
    )
    asked("pipe=8 data=1", 4, 8)
    asked("pipe=2 data=4", 4, 4)


# Lines


def test_the_line_has_the_options_and_hands_them_on():
    options = parse(
        "pp+fsdp --stages 4 --microbatches 16 --schedule interleaved --chunks 2 --balance measured --cut 'block_[2]'"
    )
    inside, piped = step_options("pp+fsdp", options.step_options)
    assert inside == GradientOptions(microbatches=16)
    assert piped == PipelineOptions(4, "interleaved", 2, "measured", "block_[2]")


def test_a_line_that_says_nothing_of_it_leaves_a_pipeline_as_it_is():
    assert step_options("pp", parse("pp").step_options) == (
        GradientOptions(),
        PipelineOptions(),
    )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("pp --stages two", "--stages takes a whole number from 1 on, not 'two'"),
        ("pp --chunks 0", "--chunks takes a whole number from 1 on, not '0'"),
        ("pp --schedule 1f1", "Did you mean '1f1b'?"),
        ("pp --schedule", "--schedule needs a value: --schedule NAME"),
        ("fsdp --stages 2", "%%shard pp+fsdp --stages 2"),
        ("pp --pad", "leave --pad out under pp"),
        ("pp --microbatches 1", "--microbatches 1: one stage of the pipeline"),
        ("pp --stages 16", "Use --stages 8 and %mesh pipe=8"),
        ('pp --mesh "data=8"', "%mesh pipe=4 data=2"),
        ('pp --mesh "pipe=2 data=4" --stages 4', "the mesh's pipeline axis is pipe=2"),
    ],
)
def test_a_line_that_can_not_be_is_refused_before_the_cell_runs(given, capsys, line, says):
    given.run(STEP)
    assert says in one_line(given, capsys, f"%%shard {line}\nran = 1{LOOP}")


def test_the_names_of_schedules_are_completed(notebook):
    def completed(text: str) -> list[str]:
        with provisionalcompleter():
            return [found.text for found in notebook.shell.Completer.completions(text, len(text))]

    assert "zb-h1" in completed("%%shard pp --schedule zb")
    assert "--schedule" in completed("%%shard pp --sch")
