"""What a report says of a pipeline's compiled programs: lines, counts, costs, and what the compiler keeps to itself."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from support import pipelined_steps as steps
from support.pipelined_steps import block, normal
from support.sample_complaints import FOLDING

import jaxshard_magic
from jaxshard_magic import hardware
from jaxshard_magic.analysis.stage_products import first_with_same_programs, input_share
from jaxshard_magic.report import Report

WIDE, MICROBATCHES = 256, 4


def written_out():
    """A step whose layers stand on lines of their own."""

    def loss(params, x, y):
        h = x @ params["first"]
        h = block(h, params["layers"][0])
        h = block(h, params["layers"][1])
        h = block(h, params["layers"][2])
        h = block(h, params["layers"][3])
        return jnp.mean((h @ params["last"] - y) ** 2)

    def step(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    layers = [{"a": normal(i, WIDE, WIDE), "b": normal(9 + i, WIDE, WIDE)} for i in range(4)]
    params = {"first": normal(20, 16, WIDE), "layers": layers, "last": normal(21, WIDE, 16)}
    return step, (params, normal(1, 16, 16), normal(2, 16, 16))


def prepared(made, strategy, mesh, **options):
    step, args = made
    sharded = jaxshard_magic.shard(step, strategy, mesh=mesh, microbatches=MICROBATCHES, **options)
    sharded.prepare(*args)
    return sharded


def assert_each_layer_has_its_line(report: Report):
    moved = [c for c in report.collectives if "layers" in (c.what or "")]
    assert {c.what.split(".")[2] for c in moved} == {"0", "1", "2", "3"}
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    for c in moved:
        assert c.file.endswith("pipelined_steps.py") and "def" not in c.source and "block(" not in c.source
        file, _, line = c.called.rpartition(":")
        assert file.endswith("test_pipeline_programs.py")
        assert lines[int(line) - 1].strip() == f'h = block(h, params["layers"][{c.what.split(".")[2]}])'


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        pytest.param("pp", "1f1b", marks=pytest.mark.full),
        pytest.param("pp+fsdp", "1f1b", marks=pytest.mark.full),
        ("pp+fsdp", "zb-h1"),
    ],
)
def test_alike_stages_share_programs_and_each_has_its_own_lines(strategy, name):
    sharded = prepared(written_out(), strategy, "pipe=4 data=2", schedule=name, cut="^block$")
    assert first_with_same_programs(sharded.entry.compiled) == (0, 1, 1, 3)
    assert_each_layer_has_its_line(sharded.report())


def test_what_moves_is_counted_as_often_as_the_schedule_runs_it():
    """In dualpipev stages run some backward passes whole and some in halves."""
    sharded = prepared(written_out(), "pp+fsdp", "pipe=2 data=2", schedule="dualpipev", cut="^block$")
    kinds = {kind for kind, stage in sharded.entry.compiled.programs if stage == 1}
    assert {"B", "I", "W"} <= kinds
    report = sharded.report()
    assert_each_layer_has_its_line(report)
    gathers = [c for c in report.collectives if c.kind == "all-gather"]
    assert {c.phase for c in gathers} == {"forward", "backward"}
    for c in gathers:  # of both weights of a layer, once in each pass of a microbatch; the mean of two ranks is sent
        assert c.count == 2 * MICROBATCHES
        assert c.wire_bytes == c.count * WIDE * WIDE * 4 / 2 / 2


@pytest.mark.ci
def test_rows_of_several_stages_name_all_that_moves():
    sharded = prepared(steps.unrolled(), "pp", "pipe=4 data=2", cut="^block$")
    (layers,) = (c for c in sharded.report().collectives if "layers" in (c.what or ""))
    # two weights of each of four layers, each stage its own
    assert (layers.count, layers.what) == (8, "gradient of params.layers.0.a and 7 more")
    assert layers.wire_bytes == 8 * 16 * 32 * 4 / 4


@pytest.mark.ci
def test_measured_costs_of_alike_stages_are_the_same():
    step, args = written_out()
    sharded = jaxshard_magic.shard(step, "pp", mesh="pipe=4", microbatches=MICROBATCHES, cut="^block$")
    for _ in range(2):  # the first call is not timed
        sharded(*args)
    pipeline = sharded.report().pipeline
    assert pipeline.source == "measured"
    assert pipeline.costs[1][:3] == pipeline.costs[2][:3] != pipeline.costs[3][:3]


def chain():
    def loss(params, x, y):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - y) ** 2)

    def step(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    return step, ([normal(i, 8, 8) for i in range(4)], normal(5, 8, 8), normal(6, 8, 8))


def test_flops_are_of_the_pass_that_runs_them():
    report = prepared(chain(), "pp", "pipe=2").report()
    # Two products a stage: as many for its input and for its weights, but that nobody wants the gradient of the batch:
    # what the first stage does for its second input belongs to its weights.
    assert [each[:3] for each in report.pipeline.costs] == [(1.0, 0.0, 1.5), (1.0, 1.0, 1.0)]


@pytest.mark.ci
def test_the_update_goes_over_the_pieces_of_a_stack_that_are_on_a_rank():
    sharded = prepared(steps.scanned(7), "pp", "pipe=4", on="v5e")
    report, pieces = sharded.report(), sharded.entry.compiled.split.losses[0].split_loss.pieces
    layers = [
        next(pieces[i].end_layer - pieces[i].first_layer for i in program.stage.parameters if pieces[i].end_layer)
        for program in sharded.entry.compiled.split.programs
    ]
    assert sum(layers) == 7
    # The embedding is on the first rank, the head on the last; Adam's moments are twice the parameters.
    ends = [32 * 16 * 4, 0, 0, 16 * 32 * 4]
    held = [n * 2 * 16 * 32 * 4 + end for n, end in zip(layers, ends, strict=True)]
    update = report.timing.predicted_step_s - report.pipeline.makespan[1]
    wanted = (3 + 2 * 2) * max(held) / hardware.chip("v5e").hbm_bandwidth
    assert update == pytest.approx(wanted, rel=1e-2)  # besides, optax counts its steps


class Silent:
    """A program of a backend that has no figures and no text."""

    def memory_analysis(self) -> None:
        return None

    def as_text(self) -> None:
        return None


def test_what_the_compiler_does_not_tell_is_unknown_and_not_nothing():
    sharded = prepared(chain(), "pp", "pipe=2")
    pipeline = sharded.entry.compiled
    pipeline.programs["F", 1] = replace(pipeline.programs["F", 1], compiled=Silent())
    report = sharded.report()
    first, second = report.memory.per_device
    assert first.peak == first.params + first.optimizer + first.batch + first.other + first.temporaries
    assert (second.params, second.temporaries, second.peak) == (first.params, None, None)
    assert report.collectives is None
    assert Report.from_json(report.to_json()) == report
    assert report.to_text() and report.to_html()


def test_what_the_compiler_complains_of_is_told():
    sharded = prepared(chain(), "pp", "pipe=2")
    sharded.entry.compiler_messages = (FOLDING,)
    (told,) = (a for a in sharded.report().advice if a.code == "slow-folding")
    assert told.message.startswith("XLA computes f32[1000000], 3.81\u202fMiB, while it compiles")


def in_a_loop():
    """Layers stacked, and stepped through by a scan."""

    def loss(params, x, y):
        h, _ = jax.lax.scan(lambda h, w: (block(h, w), None), x @ params["first"], params["layers"])
        return jnp.mean((h @ params["last"] - y) ** 2)

    def step(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    layers = {"a": normal(1, 4, WIDE, WIDE), "b": normal(2, 4, WIDE, WIDE)}
    params = {"first": normal(20, 16, WIDE), "layers": layers, "last": normal(21, WIDE, 16)}
    return step, (params, normal(1, 16, 16), normal(2, 16, 16))


@pytest.mark.parametrize(
    ("strategy", "axes"),
    [("pp+fsdp+tp", "data=2 model=2"), pytest.param("pp+tp", "model=2", marks=pytest.mark.full)],
)
def test_the_gradients_of_stacked_layers_lie_as_these_do(strategy, axes):
    report = prepared(in_a_loop(), strategy, f"pipe=2 {axes}").report()
    gradients = [c for c in report.collectives if (c.what or "").startswith("gradient of params.layers")]
    assert {(c.kind, c.axes) for c in gradients} == ({("all-reduce", ("data",))} if "data" in axes else set())
    one_layer = WIDE * WIDE * 4 // 2  # on a device, along the model's axis
    assert all(c.bytes == one_layer for c in gradients)
    assert all(c.phase == "forward" or c.axes == ("data",) for c in report.collectives if c.kind == "all-gather")


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.full), "zb-h1"])
def test_the_gradients_of_stacked_layers_are_reduced_once_for_all_microbatches(schedule):
    report = prepared(in_a_loop(), "pp", "pipe=2 data=2", schedule=schedule).report()
    (gradients,) = (c for c in report.collectives if (c.what or "").startswith("gradient of params.layers"))
    assert (gradients.kind, gradients.axes) == ("all-reduce", ("data",))
    stages, weights, layers = 2, 2, 2
    assert gradients.count == stages * weights
    assert gradients.bytes == layers * WIDE * WIDE * 4


@pytest.mark.ci
def test_a_backward_loop_is_two_only_for_a_schedule_that_runs_its_halves():
    """What the first half makes for the second is held for all layers at once."""
    loops, shares = {}, {}
    for schedule in ("1f1b", "zb-h1"):
        pipeline = prepared(in_a_loop(), "pp", "pipe=2", schedule=schedule).entry.compiled
        program = pipeline.stages[1].program
        loops[schedule] = sum(e.name == "scan" for e in program.joint_program.top.equations)
        shares[schedule] = input_share(pipeline, 1)
    assert loops == {"1f1b": 2, "zb-h1": 3}  # one of them forward
    assert shares["1f1b"] == shares["zb-h1"] == pytest.approx(0.5, abs=0.01)
