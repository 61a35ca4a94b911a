"""Choices made by hand: what searches of one step find on a slice, on attached chips, and by plans alone."""

from dataclasses import replace
from typing import Any

from support.sample_comparisons import HEADS, line, trial
from support.sample_comparisons import hostile as hostile_comparison
from support.sample_reports import GIB

from jaxshard_magic.report.choice import (
    BOUND,
    CHOSEN,
    ESTIMATE,
    LEFT,
    REFUSED,
    RUNNER_UP,
    SLOWER,
    TOO_LARGE,
    Choice,
    Question,
    SearchCandidate,
)
from jaxshard_magic.report.comparison import Comparison, Trial

CHIP, ROOM = "TPU v5e", round(15.75 * GIB)
WIDE, BOTH = {"data": 256}, {"data": 64, "model": 4}

ONE = Question("Does the whole step fit on one device?", False, "it needs about 61.3 GiB, a device has 15.75 GiB", "dp")
CUT = Question(
    "Does it fit with parameters and optimizer state cut over all 256 devices?",
    True,
    "about 215 MiB of them on a device, 12.4 GiB with temporaries",
    no="pp+dp",
)
ROWS = Question(
    "Do the products of a device's rows take longer than gathering the parameters for them?",
    True,
    "2 rows a device: 174 ms of products at 197 TFLOP/s, 151 ms of gathers at 45 GB/s",
    yes="fsdp",
)
NARROW = Question(
    "Does one matrix product still keep a device busy when it is cut over a second axis?",
    None,
    "",
    yes="fsdp+tp",
    no="fsdp+sp",
)
PATH = (ONE, CUT, ROWS, NARROW)


def considered(
    strategy: str,
    axes: dict[str, int],
    outcome: str,
    why: str = "",
    bound: float | None = None,
    needs: float | None = None,
    holds: float | None = None,
    **options: Any,
) -> SearchCandidate:
    """A candidate; `bound` in ms, `needs` and `holds` in GiB."""
    sizes = (None if size is None else round(size * GIB) for size in (needs, holds))
    seconds = None if bound is None else bound / 1000
    return SearchCandidate(strategy, axes, options, line(strategy, axes, options), outcome, why, seconds, *sizes)


def compiled(tried: Trial, outcome: str, bound: float, needs: float) -> SearchCandidate:
    """The candidate of a trial."""
    return considered(tried.strategy, tried.mesh, outcome, "", bound, needs, **tried.options)


def _slice(strategy: str, axes: dict[str, int], peak: float, step: float | None, **options: Any) -> Trial:
    sent = {axis: 900 // (i + 1) for i, axis in enumerate(axes)}
    return trial(strategy, axes, peak, (None, step), sent, source="topology", **options)


def predicted() -> Choice:
    """On a slice that is not attached: four compiled, of which one does not fit; the usual path leads elsewhere."""
    best = _slice("fsdp+tp", BOTH, 12.1, 212.0, remat="full")
    second = _slice("fsdp", WIDE, 12.4, 229.0)
    slower = _slice("fsdp", WIDE, 9.7, 251.0, remat="full")
    large = _slice("dp", WIDE, 17.2, 240.0, remat="full")
    return Choice(
        "train_step",
        Comparison("train_step", (best, second, slower, large)),
        (
            compiled(best, CHOSEN, 174.0, 12.6),
            compiled(second, RUNNER_UP, 182.0, 12.9),
            compiled(slower, SLOWER, 188.0, 9.9),
            compiled(large, TOO_LARGE, 190.0, 15.2),
            considered(
                "tp",
                {"model": 8, "data": 32},
                BOUND,
                "sends 9.1 GiB over model",
                231.0,
                8.2,
                4.1,
                remat="full",
            ),
            considered("fsdp+tp", {"data": 32, "model": 8}, BOUND, "sends 7.4 GiB over model", 219.0, 7.7, 3.9),
            considered(
                "dp",
                WIDE,
                ESTIMATE,
                "its arrays alone take 22.4 GiB, a device has 15.75 GiB",
                171.0,
                61.3,
                22.4,
            ),
            considered("tp", {"model": 256}, REFUSED, "12 heads do not divide by model=256 (blocks.attn.qkv.kernel)"),
        ),
        PATH,
        "predicted",
        CHIP,
        budget=60.0,
        seconds=48.2,
    )


def measured() -> Choice:
    """On attached chips: three ran, and the usual path leads to what was found."""
    best = trial("fsdp", {"data": 8}, 4.18, (38.9, 37.6), {"data": 1245}, 4e-7)
    second = trial("dp", {"data": 8}, 5.66, (40.4, 39.3), {"data": 831}, 2e-7)
    slower = trial("fsdp+tp", {"data": 4, "model": 2}, 5.09, (47.3, 46.0), {"data": 705, "model": 288}, 2e-6)
    return Choice(
        "train_step",
        Comparison("train_step", (second, best, slower)),
        (
            compiled(best, CHOSEN, 30.1, 4.4),
            compiled(second, RUNNER_UP, 29.0, 5.9),
            compiled(slower, SLOWER, 33.0, 5.2),
        ),
        (replace(ONE, because="it needs about 17.0 GiB, a device has 15.75 GiB"), CUT, ROWS),
        "measured",
        seconds=131.0,
        notes=("No budget was given: every candidate was compiled and run.",),
    )


def planned() -> Choice:
    """By plans alone, the first of them without figures of the chip."""
    return Choice(
        "train_step",
        Comparison("train_step", ()),
        (
            considered("fsdp", WIDE, CHOSEN, "", 182.0, 12.9, 0.21),
            considered("fsdp+tp", BOTH, RUNNER_UP, "", 204.0, 11.2, 0.2),
            considered("fsdp", WIDE, SLOWER, "", 240.0, 9.9, 0.2, remat="full"),
            considered("dp", WIDE, ESTIMATE, "its arrays alone take 22.4 GiB", 171.0, 61.3, 22.4),
            considered("sp", {"seq": 256}, REFUSED, "the batch has no sequence dimension"),
        ),
        PATH,
        "planned",
        CHIP,
        ROOM,
        seconds=1.4,
    )


def nothing_fits() -> Choice:
    """The smallest that was compiled needs 17.2 of 15.75 GiB."""
    large = _slice("fsdp", WIDE, 17.2, 240.0, remat="full")
    larger = _slice("fsdp+tp", BOTH, 19.5, 212.0)
    return Choice(
        "train_step",
        Comparison("train_step", (large, larger)),
        (
            compiled(large, TOO_LARGE, 190.0, 15.2),
            compiled(larger, TOO_LARGE, 174.0, 15.6),
            considered("dp", WIDE, ESTIMATE, "its arrays alone take 22.4 GiB", 171.0, 61.3, 22.4),
        ),
        (ONE, replace(CUT, answer=False, because="about 16.9 GiB with temporaries"), ROWS, NARROW),
        "predicted",
        CHIP,
        ROOM,
        budget=60.0,
        seconds=22.0,
    )


def without_positions(axis: str) -> str:
    return (
        "sp found no dimension of positions in batch (64 x 512): besides the examples none goes through most products"
        f" with weights; say which it is, --spec \"batch=P(None, '{axis}')\", or use dp, fsdp or tp"
    )


def alike() -> Choice:
    """Six refused for one reason, in which an axis has two names; three need too much, two of them for one reason."""
    refused = [
        considered(strategy, {first: n, second: 8 // n}, REFUSED, without_positions(second))
        for strategy, first, second in (
            ("dp+sp", "data", "seq"),
            ("fsdp+sp", "data", "seq"),
            ("fsdp+tp+sp", "data", "model"),
        )
        for n in (2, 4)
    ]
    fsdp, tp = {"data": 8}, {"model": 8}
    return Choice(
        "train_step",
        Comparison("train_step", ()),
        (
            considered("pp", {"pipe": 8}, CHOSEN, "", 229.0, 6.3, 1.1),
            considered("fsdp", fsdp, ESTIMATE, "it needs far more than a device has", 175.0, 52.0, 1.2),
            considered("dp", fsdp, ESTIMATE, "its arrays alone take more than a device has", 181.0, 61.3, 22.4),
            considered("tp", tp, ESTIMATE, "it needs far more than a device has", 290.0, 49.0, 1.2),
            *refused,
        ),
        PATH,
        "planned",
        CHIP,
        ROOM,
        seconds=1.4,
    )


def all_refused() -> Choice:
    """No candidate could be compiled."""
    return Choice(
        "train_step",
        Comparison("train_step", (HEADS,)),
        (considered("tp", {"model": 8}, REFUSED, HEADS.why or ""),),
        (),
        "predicted",
        CHIP,
    )


def alone() -> Choice:
    """One candidate, and no path."""
    only = _slice("dp", {"data": 8}, 5.66, 39.3)
    return Choice(
        "train_step",
        Comparison("train_step", (only,)),
        (compiled(only, CHOSEN, 30.0, 5.9),),
        (),
        "predicted",
        CHIP,
    )


def untimed() -> Choice:
    """For a chip without figures: nothing is known of times, and where the path leads is not known."""
    best, second = _slice("fsdp", WIDE, 12.4, None), _slice("dp", WIDE, 14.4, None)
    candidates = (compiled(best, CHOSEN, 0.0, 12.9), compiled(second, RUNNER_UP, 0.0, 14.0))
    return Choice(
        "train_step",
        Comparison("train_step", (best, second)),
        (
            *(replace(c, bound=None, needs=None) for c in candidates),
            considered("tp", {"model": 256}, LEFT),
        ),
        (replace(ONE, answer=None, because=""), CUT, ROWS),
        "predicted",
        budget=10.0,
        seconds=10.2,
    )


def ended() -> Choice:
    """The budget ended with candidates left."""
    made = predicted()
    left = tuple(considered("fsdp+tp", BOTH, LEFT, "", 180.0 + n, 11.0, 3.0, microbatches=2**n) for n in range(1, 6))
    return replace(made, candidates=made.candidates + left, budget=30.0, seconds=31.7)


def many() -> Choice:
    """Two hundred, most of them ruled out by what they multiply and send."""
    made = predicted()
    axes = [{"data": 256 // model, "model": model} for model in (1, 2, 4, 8, 16, 32, 64)]
    strategies = ("fsdp", "tp", "fsdp+tp", "fsdp+tp+sp")
    more = [
        considered(
            strategy,
            on,
            BOUND,
            f"its plan takes {213 + i + 7 * n} ms",
            213.0 + i + 7 * n,
            9.0,
            2.0,
            microbatches=n,
        )
        for i, (strategy, on) in enumerate((s, a) for s in strategies for a in axes)
        for n in range(2, 8)
    ]
    large = [
        considered("dp", WIDE, ESTIMATE, "its arrays alone take 22.4 GiB", 171.0, 61.3, 22.4, microbatches=n)
        for n in range(2, 200 - len(more) - len(made.candidates) + 2)
    ]
    return replace(made, candidates=(*made.candidates, *more, *large))


def hostile() -> Choice:
    """Names that break out of markup, and options and questions longer than a line, with a word longer than one."""
    evil = "<script>alert('x')</script>&\"'\x1b[2J\nq"
    compared = hostile_comparison()
    first, second, _ = compared.trials
    rule = '--rule "' + "blocks.attn.qkv.kernel-" * 12 + "=P(None,'model')\""
    long = replace(considered("fsdp", {"<b>": 8}, BOUND, evil, 1.0, 2.0), line=f"fsdp {rule}")
    return Choice(
        evil,
        compared,
        (
            SearchCandidate(first.strategy, first.mesh, {}, first.line, CHOSEN, evil),
            SearchCandidate(second.strategy, second.mesh, {}, second.line, RUNNER_UP),
            long,
            SearchCandidate(evil, {evil: 2}, {}, evil * 2, REFUSED, evil),
        ),
        (
            Question(evil * 4, False, "W" * 90, evil),
            Question("\u91cd\u307f" * 30, None, evil, no="x" * 60),
            Question("MMMM " * 30, True, evil * 3, evil, "\u91cd\u307f" * 12),
        ),
        "measured",
        evil,
        notes=(evil,),
    )


_MADE = (
    predicted,
    measured,
    planned,
    nothing_fits,
    alike,
    all_refused,
    alone,
    untimed,
    ended,
    many,
    hostile,
)
CHOICES = {made.__name__: made for made in _MADE}
