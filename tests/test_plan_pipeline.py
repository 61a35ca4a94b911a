"""`step.plan(...)` of pipelines: the report of stages that nothing has compiled, beside that of the compiled ones."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxshard_magic
from jaxshard_magic import ShardError
from jaxshard_magic.pipeline import executed, jobs
from jaxshard_magic.report import Report
from jaxshard_magic.step import building

WIDTH, LAYERS = 32, 4
FORMS = {
    "data": ("pp+dp", "stage=2 data=4", {}),
    "fully sharded": ("pp+fsdp", "stage=2 fsdp=4", {}),
    "tensor": ("pp+dp+tp", "stage=2 data=2 model=2", {}),
    "halves": ("pp+dp", "stage=4 data=2", {"schedule": "zb-h1"}),
    "interleaved": ("pp+dp", "stage=2 data=4", {"schedule": "interleaved", "chunks": 2}),
    "recomputed": ("pp+fsdp", "stage=2 fsdp=4", {"remat": "full"}),
    "one device": ("pp", "stage=8", {"microbatches": 8}),
}


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


def large(report):
    """The communication of a report but single numbers, of which a plan leaves some out, and the names of activations,
    which it does not tell."""
    named = (c.what if c.what is None or "activation" not in c.what else None for c in report.collectives)
    return sorted(
        (c.kind, c.axes, c.bytes, c.count, c.wire_bytes, c.phase or "", c.line or 0, what or "")
        for c, what in zip(report.collectives, named, strict=True)
        if c.bytes > 4
    )


@pytest.fixture
def no_compiler(monkeypatch):
    def refused(*_, **__):
        raise AssertionError("something was compiled")

    monkeypatch.setattr(executed, "make", refused)
    monkeypatch.setattr(executed, "made_elsewhere", refused)


@pytest.mark.parametrize("form", FORMS)
def test_the_plan_of_a_pipeline_sends_what_its_compiled_stages_send_from_the_same_lines(form):
    given = arguments(8 if form == "one device" else LAYERS)
    step = sharded(form)
    planned = step.plan(*given)
    step.prepare(*given)
    compiled = step.report()
    assert planned.leaves == compiled.leaves
    assert large(planned) == large(compiled) != []
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
        # XLA for CPU devices orders what it computes again with no thought of memory.
        assert a.peak == pytest.approx(b.peak, rel=0.25 if form == "recomputed" else 0.1)


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


def test_the_plan_of_a_pipeline_is_the_prediction_of_its_compiled_stages_for_a_chip():
    step, given = sharded("tensor", on="v5e"), arguments()
    planned = step.plan(*given).timing
    step.prepare(*given)
    compiled = step.report().timing
    assert planned.predicted_step_s == pytest.approx(compiled.predicted_step_s, rel=0.01)


def test_stages_that_are_to_be_measured_are_balanced_by_flops_in_a_plan(no_compiler):
    (told,) = [
        a
        for a in sharded("data", balance="measured").plan(*arguments()).advice
        if a.code == "balanced-by-flops"
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
    monkeypatch.setattr(building, "EARLY_S", 0.0)
    step, (state, rows) = sharded("data"), arguments()
    step.early = early
    state, _ = step(state, rows)
    step(state, rows)
    assert told == [step.entry.planned]
    assert not [a for a in step.report().advice if a.code == "plan-differs"]
