"""`step.plan(...)` of pipelines: the report of stages that nothing has compiled, beside that of the compiled ones."""

import threading
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxshard_magic
from jaxshard_magic import ShardError
from jaxshard_magic.compilation import single_program
from jaxshard_magic.pipeline import executor, jobs
from jaxshard_magic.report import Report

WIDTH, LAYERS = 64, 4
FORMS = {
    "data": ("pp+dp", "stage=2 data=4", {}),
    "fully sharded": ("pp+fsdp", "stage=2 fsdp=4", {}),
    "tensor": ("pp+dp+tp", "stage=2 data=2 model=2", {}),
    "halves": ("pp+dp", "stage=4 data=2", {"schedule": "zb-h1"}),
    "interleaved": ("pp+dp", "stage=2 data=4", {"schedule": "interleaved", "chunks": 2}),
    "recomputed": ("pp+fsdp", "stage=2 fsdp=4", {"remat": "full"}),
    "one device": ("pp", "stage=8", {"microbatches": 8}),
}

# By how much planned memory may be off where XLA for CPU devices keeps weights that it gathered, and what it computes
# again, for longer than a plan takes it to.
LONGER_HELD = {"fully sharded": 0.2, "recomputed": 0.45}


def train_step(state, rows):
    def loss(p):
        x = rows
        for layer in p["layers"]:
            h = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-3)
            x = x + jax.nn.gelu(h @ layer["up"]) @ layer["down"]
        return jnp.mean((x @ p["out"] - rows) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda p, g: p - 0.1 * g / norm, state, grads), value


def arguments(layers=LAYERS):
    draw = np.random.default_rng(0)

    def weight(*shape):
        return draw.normal(0, 0.1, shape).astype(np.float32)

    rows = [{"up": weight(WIDTH, 4 * WIDTH), "down": weight(4 * WIDTH, WIDTH)} for _ in range(layers)]
    return {"layers": rows, "out": weight(WIDTH, WIDTH)}, weight(64, 16, WIDTH)


def sharded(form, step=train_step, **more):
    strategy, mesh, options = FORMS[form]
    return jaxshard_magic.shard(step, strategy, mesh=f"cpu:8 {mesh}", **{"check": False, **options, **more})


def large(report, lines=True):
    """How often each sends of what is more than a number, of which a plan leaves some out; with its line, and the
    weight that it is for."""
    found = Counter()
    for c in report.collectives:
        weight = None if c.what is None or "activation" in c.what else c.what
        if c.bytes > 4:
            found[c.kind, c.axes, c.bytes, c.phase, *((c.line, weight) if lines else ())] += c.count
    return found


@pytest.fixture
def no_compiler(monkeypatch):
    def refused(*_, **__):
        raise AssertionError("something was compiled")

    monkeypatch.setattr(executor, "compile_jobs", refused)
    monkeypatch.setattr(executor, "compile_jobs_for_target", refused)


@pytest.mark.parametrize("form", FORMS)
def test_a_pipelines_plan_sends_what_its_compiled_stages_do_line_by_line(form):
    given = arguments(8 if form == "one device" else LAYERS)
    step = sharded(form)
    planned = step.plan(*given)
    step.prepare(*given)
    compiled = step.report()
    assert planned.leaves == compiled.leaves
    # Of what is computed again, compilers choose whose line a gather has.
    lines = form != "recomputed"
    assert large(planned, lines) == large(compiled, lines) != Counter()
    assert sum(c.wire_bytes for c in planned.collectives if c.bytes > 4) == sum(
        c.wire_bytes for c in compiled.collectives if c.bytes > 4
    )
    assert planned.pipeline.bubble == compiled.pipeline.bubble
    assert [rank.holds for rank in planned.pipeline.ranks] == [rank.holds for rank in compiled.pipeline.ranks]


@pytest.mark.parametrize("form", FORMS)
def test_the_planned_memory_of_a_pipeline_is_near_that_of_its_compiled_stages(form):
    given = arguments(8 if form == "one device" else LAYERS)
    step = sharded(form)
    planned = step.plan(*given).memory
    step.prepare(*given)
    compiled = step.report().memory
    assert planned.source == "planned"
    for a, b in zip(planned.per_device, compiled.per_device, strict=True):
        assert (a.device, a.params, a.optimizer, a.batch) == (b.device, b.params, b.optimizer, b.batch)
        assert a.peak == pytest.approx(b.peak, rel=LONGER_HELD.get(form, 0.1))


def test_the_plan_tells_what_a_teacher_before_the_gradient_sends():
    def run(weights, x):
        for w in weights:
            x = jax.nn.gelu(x @ w)
        return x

    def step(weights, teacher, rows):
        wanted = run(teacher, rows)
        value, grads = jax.value_and_grad(lambda w: jnp.mean((run(w, rows) - wanted) ** 2))(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    draw = np.random.default_rng(0)
    weights, teacher = ([draw.normal(0, 0.1, (256, 256)).astype(np.float32) for _ in range(4)] for _ in range(2))
    given = weights, teacher, draw.normal(size=(64, 256)).astype(np.float32)
    sharded_step = sharded("fully sharded", step)
    planned = sharded_step.plan(*given)
    sharded_step.prepare(*given)
    of_planned, of_compiled = (
        sum(c.count for c in report.collectives if c.kind == "all-gather" and c.bytes == 256 * 256 * 4)
        for report in (planned, sharded_step.report())
    )
    # Each of the 8 microbatches: 4 weights forward, and 3 of them backward.
    assert of_planned == of_compiled == len(teacher) + 8 * (4 + 3)
    assert any((c.what or "").startswith("teacher") for c in planned.collectives)


def test_what_a_loss_gives_beside_its_value_counts_in_the_planned_memory():
    def step(weights, rows):
        def loss(w):
            made = jax.nn.gelu(rows @ w["up"]) @ w["down"]
            return jnp.mean(made**2), made @ w["wide"]

        (value, made), grads = jax.value_and_grad(loss, has_aux=True)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value, made

    draw = np.random.default_rng(0)
    sizes = {"up": (32, 64), "down": (64, 32), "wide": (32, 2048)}
    weights = {name: draw.normal(0, 0.1, size).astype(np.float32) for name, size in sizes.items()}
    given = weights, draw.normal(size=(64, 8, 32)).astype(np.float32)
    sharded_step = sharded("data", step)
    planned = sharded_step.plan(*given).memory.per_device[-1]
    sharded_step.prepare(*given)
    compiled = sharded_step.report().memory.per_device[-1]
    assert compiled.temporaries > 64 * 8 * 2048 * 4 / 4
    assert planned.temporaries == pytest.approx(compiled.temporaries, rel=0.25)


@pytest.mark.ci
def test_a_plan_shows_nothing_that_was_recorded_of_another_call():
    step, (state, rows) = sharded("data"), arguments()
    state, _ = step(state, rows)
    step.profile(args=(state, rows))
    report = step.plan(state, rows[:32])
    assert report.pipeline.source == "predicted" and report.measured is None


def test_the_plan_of_a_pipeline_compiles_nothing_and_is_the_same_again(no_compiler):
    step, given = sharded("fully sharded"), arguments()
    report = step.plan(*given)
    assert report == step.plan(*jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given))
    assert Report.from_json(report.to_json()) == report
    assert "planned only" in report.to_text()
    with pytest.raises(ShardError, match="has not run yet"):
        step.report()


def test_the_plan_of_a_pipeline_predicts_a_chip_that_is_not_attached(no_compiler):
    report = sharded("data", on="v5e").plan(*arguments())
    assert report.pipeline.source == "predicted" and report.pipeline.unit == "s"
    assert report.timing.predicted_low_s < report.timing.predicted_step_s < report.timing.predicted_high_s


def test_a_pipelines_plan_predicts_what_its_compiled_stages_do_for_a_chip():
    step, given = sharded("tensor", on="v5e"), arguments()
    planned = step.plan(*given).timing
    step.prepare(*given)
    compiled = step.report().timing
    assert planned.predicted_step_s == pytest.approx(compiled.predicted_step_s, rel=0.01)


def test_stages_that_are_to_be_measured_are_balanced_by_flops_in_a_plan(no_compiler):
    (told,) = [
        a for a in sharded("data", balance="measured").plan(*arguments()).advice if a.code == "balanced-by-flops"
    ]
    assert "FLOPs" in told.message and told.level == "info"


def test_a_pipeline_that_cannot_be_split_is_refused_by_its_plan_in_one_line():
    with pytest.raises(ShardError) as told:
        sharded("one device", microbatches=7).plan(*arguments())
    assert "\n" not in str(told.value)


def test_the_plan_of_a_pipeline_is_told_while_its_stages_compile(monkeypatch):
    told, may_end, compile_lowered = [], threading.Event(), jobs.compile_lowered

    def slow(lowered):
        assert may_end.wait(60)
        return compile_lowered(lowered)

    def early(plan):
        told.append(plan)
        may_end.set()

    monkeypatch.setattr(jobs, "compile_lowered", slow)
    monkeypatch.setattr(single_program, "EARLY_S", 0.0)
    step, (state, rows) = sharded("data"), arguments()
    step.programs.on_planned = early
    state, _ = step(state, rows)
    step(state, rows)
    assert told == [step.entry.early_plan]
    assert not [a for a in step.report().advice if a.code == "plan-differs"]
