"""Comparisons made by hand: one GPT-2-sized step under several strategies, and what can be missing of that."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from support.sample_collectives import GPT, GPT_COLLECTIVES, MIB
from support.sample_leaves import gpt_leaves, mesh, of_role
from support.sample_pipelines import measured
from support.sample_reports import GIB, attached, memory, wrong
from support.sample_staged import STAGES, staged_leaves, staged_memory

from jaxshard_magic.report import Check, Collective, Memory, Metrics, Pipeline, Report, TimeSpread, Timing
from jaxshard_magic.report.comparison import Comparison, Trial

LIMIT = 16128 * MIB  # of a TPU v5e: 15.75 GiB
STEP_FLOPS = 66_800_000_000_000
MS = 1e-3

_KINDS = {"data": "all-reduce", "model": "all-reduce", "pipe": "collective-permute", "seq": "all-gather"}


def line(strategy: str, axes: Mapping[str, int], options: Mapping[str, Any]) -> str:
    """What stands after `%%shard` to run a trial alone."""
    on = " ".join(f"{axis}={size}" for axis, size in axes.items())
    asked = "".join(f" --{name} {value}" for name, value in options.items())
    return f'{strategy} --mesh "{on}"{asked}'


def sends(axes: Mapping[str, int], sent: Mapping[str, int]) -> tuple[Collective, ...]:
    """A collective for each axis, that sends so many bytes from each device; `data+model` is over both."""
    rows = []
    for name, size in sent.items():
        over = tuple(name.split("+"))
        n = prod(axes[axis] for axis in over)
        rows.append(Collective(_KINDS.get(over[0], "all-reduce"), over, n, 12, size // 12, size))
    return tuple(rows)


def with_peak(found: Memory, peak: int) -> Memory:
    """The same arrays, with as many more temporaries on every device as bring the fullest to `peak` bytes."""
    more = peak - max(d.peak or 0 for d in found.per_device)
    rows = (replace(d, peak=(d.peak or 0) + more, temporaries=(d.temporaries or 0) + more) for d in found.per_device)
    return replace(found, per_device=tuple(rows))


def trial(
    strategy: str,
    axes: dict[str, int],
    peak: float,
    step_ms: tuple[float | None, float | None],
    sent: Mapping[str, int],
    differs: float | None = None,
    limit: int | None = LIMIT,
    source: str = "attached",
    **options: Any,
) -> Trial:
    """A trial whose fullest device holds `peak` GiB; `step_ms` is (measured, predicted), `sent` MiB over each axis."""
    asked = {name: value for name, value in options.items() if value is not None}
    ran, predicted = (None if t is None else t * MS for t in step_ms)
    staged = "pipe" in axes
    leaves = staged_leaves() if staged else gpt_leaves({"data": 1, "model": 1} | axes)
    info = mesh(axes, source)
    arrays = sum(of_role(leaves, role) for role in ("params", "optimizer", "batch", "rng", "other"))
    held = staged_memory(leaves, info, limit) if staged else memory(leaves, prod(axes.values()), 0, limit)
    assert staged or arrays < peak * GIB
    calls = 0 if ran is None else 20
    timing = Timing(
        6.8,
        calls,
        calls,
        None if ran is None else TimeSpread(0.99 * ran, ran, 1.04 * ran),
        predicted,
        None if predicted is None else "communication",
        flops=STEP_FLOPS,
        device_flops=STEP_FLOPS / prod(axes.values()),
        on=None if predicted is None else "TPU v5e",
    )
    check = None if differs is None else Check(True, differs, differs, 1e-4, "the plain step on one device")
    report = Report(
        name="train_step",
        strategy=strategy,
        options=asked,
        mesh=info,
        leaves=leaves,
        memory=with_peak(held, round(peak * GIB)),
        collectives=sends(axes, {name: size * MIB for name, size in sent.items()}),
        timing=timing,
        pipeline=_pipeline(ran is not None) if staged else None,
        check=check,
    )
    return Trial(strategy, axes, asked, line(strategy, axes, asked), report)


def _pipeline(ran: bool) -> Pipeline:
    made = measured()
    return made if ran else replace(made, bubble=replace(made.bubble, measured=None), source="predicted")


def failed(strategy: str, axes: dict[str, int], why: str, fix: str | None = None, **options: Any) -> Trial:
    """A trial that could not be compiled."""
    asked = {name: value for name, value in options.items() if value is not None}
    return Trial(strategy, axes, asked, line(strategy, axes, asked), None, why, fix)


HEADS = failed(
    "tp",
    {"model": 8},
    "12 heads do not divide by model=8 (blocks.attn.qkv.kernel, dim 3)",
    '--mesh "data=2 model=4"',
)


def measured_trials() -> Comparison:
    """Six, as in the design's picture: five ran, one could not be compiled; the loss is summed over both axes."""
    fsdp_tp = trial("fsdp+tp", GPT, 5.09, (47.3, 46.0), {}, 2e-6)
    assert fsdp_tp.report is not None
    bf16 = trial("fsdp+tp", GPT, 3.44, (39.0, 38.1), {"data": 473, "model": 288}, 3.1e-3, precision="bf16")
    staged = trial("pp+dp", STAGES, 3.12, (41.6, 39.2), {"data": 255, "pipe": 24}, 4e-6, schedule="zb-h1")
    return Comparison(
        "train_step",
        (
            replace(fsdp_tp, report=replace(fsdp_tp.report, collectives=GPT_COLLECTIVES)),
            bf16,
            trial("dp", {"data": 8}, 5.66, (40.4, 39.3), {"data": 831}, 2e-7),
            trial("fsdp", {"data": 8}, 4.18, (53.6, 52.1), {"data": 1245}, 4e-7),
            staged,
            HEADS,
        ),
    )


def predicted() -> Comparison:
    """Compiled for a slice that is not attached: nothing ran, one does not fit."""
    return Comparison(
        "train_step",
        (
            trial("fsdp+tp", GPT, 5.09, (None, 46.0), {"data": 705, "model": 288}, source="topology"),
            trial("dp", {"data": 8}, 17.2, (None, 39.3), {"data": 831}, source="topology"),
            trial("fsdp", {"data": 8}, 4.18, (None, 52.1), {"data": 1245}, source="topology"),
            trial("pp+dp", STAGES, 3.12, (None, 39.2), {"data": 255, "pipe": 24}, source="topology"),
            HEADS,
        ),
    )


def simulated() -> Comparison:
    """On simulated CPU devices: measured, without a limit and without predictions, nothing checked."""
    return Comparison(
        "train_step",
        (
            trial(
                "fsdp+tp",
                GPT,
                5.09,
                (1840.0, None),
                {"data": 705, "model": 288},
                source="simulated",
                limit=None,
            ),
            trial("dp", {"data": 8}, 5.66, (1620.0, None), {"data": 831}, source="simulated", limit=None),
            trial("fsdp", {"data": 8}, 4.18, (1990.0, None), {"data": 1245}, source="simulated", limit=None),
        ),
    )


def alone() -> Comparison:
    """One trial."""
    return Comparison("train_step", (trial("fsdp", {"data": 8}, 4.18, (53.6, 52.1), {"data": 1245}, 4e-7),))


def none_ran() -> Comparison:
    """None could be compiled."""
    no_axis = failed("sp", {"data": 8}, "sp needs a sequence axis; the mesh's axes are data", '--mesh "data=2 seq=4"')
    return Comparison("train_step", (HEADS, no_axis))


def interrupted() -> Comparison:
    """Stopped after two of five, while the third ran."""
    made = measured_trials().trials
    stopped = replace(made[2], why="interrupted while it ran")
    return Comparison("train_step", (*made[:2], stopped), (made[3].line, made[4].line))


def one_too_big() -> Comparison:
    """The fastest of three does not fit, and was not run; the numbers of another are not the same."""
    made = measured_trials().trials
    big = trial("dp", {"data": 8}, 17.2, (None, 20.5), {"data": 831})
    other = made[3]
    assert other.report is not None
    return Comparison("train_step", (big, replace(other, report=replace(other.report, check=wrong().check)), made[0]))


def many() -> Comparison:
    """Forty: meshes of 64 devices under five strategies, with and without remat; every eighth could not be compiled."""
    made: list[Trial] = []
    for i, strategy in enumerate(("dp", "fsdp", "tp", "fsdp+tp", "fsdp+tp+sp")):
        for j, model in enumerate((1, 2, 4, 8)):
            axes = {"data": 64 // model, "model": model} | ({"seq": 1} if "sp" in strategy else {})
            for remat in (None, "full"):
                at = len(made)
                if at % 8 == 7:
                    made.append(failed(strategy, axes, f"12 heads do not divide by model={model}", remat=remat))
                    continue
                step = 30.0 + 4 * ((3 * i + 5 * j) % 11) + 9 * bool(remat)
                peak = 2.6 + 22 / (step - 26) + 0.9 * ((i + 2 * j) % 4) - 0.6 * bool(remat)
                sent = {"data": 100 + 90 * i, "model": 40 * j}
                made.append(trial(strategy, axes, peak, (step, 0.96 * step), sent, 2e-6, remat=remat))
    return Comparison("train_step", tuple(made))


def hostile() -> Comparison:
    """Names that break out of markup, five axes, bytes over unknown axes, no memory of one and no time of another."""
    evil = "<script>alert('x')</script>&\"'\x1b[2J\nq"
    axes = {"<b>": 2, "d\u00e4ta": 2, "c": 2, "d": 1, "e": 1}
    made = trial("fsdp", {"data": 8}, 4.18, (53.6, 52.1), {}, float("nan")).report
    assert made is not None
    rows = (
        Collective("all-reduce", ("<b>",), 2, 3, 64, 192),
        Collective("all-to-all", None, 4, 1, 1024, 768),
        Collective("all-gather", ("d\u00e4ta", "c"), 4, 1, 512 * MIB, 384 * MIB),
    )
    first = replace(made, name=evil, mesh=mesh(axes), collectives=rows, memory=None)
    second = replace(made, mesh=mesh({"x": 4}), timing=None, collectives=None, check=None)
    return Comparison(
        evil,
        (
            Trial(evil, axes, {"rule": {evil: "P()"}}, evil, first),
            Trial("\u91cd\u307f", {"x": 4}, {}, "\u91cd\u307f " * 12, second),
            Trial("tp", {"<b>": 8}, {}, "tp", None, evil * 4, evil),
        ),
        (evil,),
    )


def of_runs(*runs: Metrics | None) -> Comparison:
    """Reports with the metrics of these runs."""
    reports = [replace(attached(), metrics=each, number=3 + 2 * i) for i, each in enumerate(runs)]
    trials = (Trial(r.strategy, dict(r.mesh.axes), {}, r.strategy, r, number=r.number) for r in reports)
    return Comparison("train_step", tuple(trials))


_MADE = (measured_trials, predicted, simulated, alone, none_ran, interrupted, one_too_big, many, hostile)
COMPARISONS = {made.__name__: made for made in _MADE}
