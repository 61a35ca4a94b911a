"""What each option of the gradients changes: shown beside the step without it, from compiled programs."""

import re

import jax
import jax.numpy as jnp
import pytest
from support.cells import STEP

import jaxshard_magic
from jaxshard_magic.report import Alternative, MeshInfo, Report
from jaxshard_magic.step.alternatives import compile_alternatives
from jaxshard_magic.views.sections import summary

WIDTH, LAYERS, EXAMPLES = 64, 6, 2048


def step(params, batch):
    def loss(params):
        x = batch
        for w in params:
            x = x + jax.nn.gelu(x @ w)
        return jnp.square(x).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], value


def sharded(**given):
    made = jaxshard_magic.shard(step, "dp", mesh="data=2", **given)
    weights = [jax.random.normal(k, (WIDTH, WIDTH)) * 0.1 for k in jax.random.split(jax.random.key(0), LAYERS)]
    made.prepare(weights, jnp.ones((EXAMPLES, WIDTH)))
    return made


@pytest.mark.ci
def test_microbatches_and_remat_are_compared_with_the_step_without_them():
    found = {a.change: a for a in compile_alternatives(sharded(microbatches=8, remat="full"), 600)}
    own, whole, kept = found[""], found["without --microbatches 8"], found["without --remat full"]
    assert own.peak < whole.peak
    forward = LAYERS * 2 * EXAMPLES * WIDTH**2 // 2  # on one of two devices
    assert kept.flops == 3 * forward - forward // LAYERS  # no gradient of the batch
    assert kept.flops < own.flops <= kept.flops + forward
    gradients = LAYERS * WIDTH**2 * 4
    assert own.sent >= 8 * gradients  # an all-reduce over two devices sends as much as it reduces
    assert gradients <= found["--reduce once"].sent < 2 * gradients
    assert set(found) >= {"--reduce once-gathered"}


@pytest.mark.ci
def test_a_step_without_options_has_nothing_to_compare():
    assert compile_alternatives(sharded(), 600) == ()


def test_too_long_compiles_are_left_out_and_said():
    own, *others = compile_alternatives(sharded(microbatches=2), 0.0)
    assert own.peak
    assert [a.peak for a in others] == [None] * 3
    assert all("the limit is 0 s" in a.why for a in others)


@pytest.mark.ci
def test_an_interrupt_ends_the_comparison_and_keeps_what_is_known(monkeypatch):
    step = sharded(microbatches=2, remat="full")
    compiled, asked = step.programs.otherwise, []

    def otherwise(inside):
        asked.append(inside)
        if len(asked) > 1:
            raise KeyboardInterrupt
        return compiled(inside)

    monkeypatch.setattr(step.programs, "otherwise", otherwise)
    own, first, *others = compile_alternatives(step, 600)
    assert own.peak and first.peak and len(asked) == 2
    assert [a.why for a in others] == ["not compiled: interrupted"] * 3


REPORT = Report(
    "step",
    "dp",
    {"remat": "full"},
    MeshInfo({"data": 2}, "cpu", "cpu", "simulated", (0, 1), 1),
    alternatives=(
        Alternative("", 2**20, 4_000_000, 2**10),
        Alternative("without --remat full", 3 * 2**20, 3_000_000, 2**10),
        Alternative("without --precision bf16", why="not compiled: too long"),
    ),
)


def test_each_option_is_a_line_with_its_share_of_the_step_as_it_is():
    text = REPORT.to_text(80)
    (line,) = re.findall(r"without --remat full .*", text)
    assert line.split() == [
        "without",
        "--remat",
        "full",
        "3.00",
        "MiB",
        "300%",
        "3.00",
        "M",
        "75%",
        "1.00",
        "KiB",
        "100%",
    ]
    assert "without --precision bf16: not compiled: too long" in text
    html = REPORT.to_html()
    assert re.search(r"3.00.MiB <small>300%</small>", html) and summary.OPTIONS_TITLE in html
    assert Report.from_json(REPORT.to_json()) == REPORT


@pytest.mark.parametrize(
    "line",
    [
        "fsdp --microbatches 4 --reduce once --remat full --check",
        "dp --precision bf16",
        "dp --remat 2 --dry-run",
    ],
)
def test_a_cell_shows_what_its_options_change(given, line):
    report = given.run(f'%%shard {line} --mesh "data=2"\n' + STEP)
    asked = report.options
    changes = [a.change for a in report.alternatives]
    assert changes[0] == "" and all(a.peak for a in report.alternatives)
    assert {f"without --{name} {value}" for name, value in asked.items() if name not in ("reduce", "check")} < set(
        changes
    )
    assert report.check is None or report.check.passed
