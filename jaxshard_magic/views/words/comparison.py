"""Comparison in words: names of trials, the best ones, the cells of each trial, and options that tell lines apart."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxshard_magic.report.comparison import Comparison, Trial
from jaxshard_magic.report.parts import mesh_text
from jaxshard_magic.views.format import MINUS, byte_text, count_text, difference_text, rounded, seconds_text, share_text
from jaxshard_magic.views.words.communication import predicted_text
from jaxshard_magic.views.words.run import devices_text, largest_difference
from jaxshard_magic.views.words.spans import Span, sentence_case, strong

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_TOLD_BY_VALUE = ("precision", "schedule")  # named by value alone: `bf16`, `zb-h1`
NAMED = 2  # trials named in a sentence, at most
_OPTION = re.compile(r"""--([\w-]+)(?:[ =]("[^"]*"|'[^']*'|(?!--)\S+))?""")
_FOR_ALL = ("mesh", "step", "spec", "rule", "donate", "no-donate", "on", "name")


@dataclass(frozen=True)
class TrialName:
    """Name of a trial.

    Attributes:
        strategy: Strategy.
        options: Options that not all trials share.
        mesh: Mesh, if another trial has the same name without a mesh; else "".
    """

    strategy: str
    options: str
    mesh: str = ""

    @property
    def text(self) -> str:
        return " ".join(filter(None, (self.strategy, self.options, self.mesh)))


@dataclass(frozen=True)
class SignedAnswer:
    """Answer of a check.

    Attributes:
        sign: "ok", "error", or None for neither.
        word: Answer in a word or two.
        more: Qualification.
    """

    sign: str | None
    word: str
    more: str = ""

    @property
    def text(self) -> str:
        return f"{self.word} {self.more}".rstrip()


def trial_names(comparison: Comparison) -> dict[str, TrialName]:
    """Return the name of each trial by key."""
    common = _common(comparison)
    names = {trial.key: TrialName(trial.strategy, " ".join(_own(trial, common))) for trial in comparison.trials}
    many = Counter(name.text for name in names.values())
    return {
        trial.key: replace(name, mesh=mesh_text(trial.mesh)) if many[name.text] > 1 else name
        for trial in comparison.trials
        for name in [names[trial.key]]
    }


def _own(trial: Trial, common: Sequence[tuple[str, str]]) -> list[str]:
    """Return the number of a past report, then the options that not all trials share."""
    past = [] if trial.number is None else [f"#{trial.number}"]
    return past + [_short(option) for option in _options(trial) if option not in common]


def report_text(trial: Trial) -> str:
    """Return the number of a trial's report in the history; empty without one, or if the trial's name has the
    number."""
    number = None if trial.report is None or trial.number is not None else trial.report.number
    return "" if number is None else str(number)


def _options(trial: Trial) -> list[tuple[str, str]]:
    """Return the options of a trial's line as (name, value), without those given for all trials."""
    return [(name, value.strip("\"'")) for name, value in distinguishing_options(trial.line)]


def _short(option: tuple[str, str]) -> str:
    name, value = option
    return value if name in _TOLD_BY_VALUE and value else f"{name} {value}".rstrip()


def _common(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the options shared by all trials; empty for a single trial."""
    first, *rest = map(_options, comparison.trials) if comparison.trials else [[]]
    return [option for option in first if rest and all(option in each for each in rest)]


def comparison_lead(comparison: Comparison) -> list[Span]:
    """Return the answers of a comparison, in bold where they name trials.

    `Fastest: fsdp+tp bf16, 39.0 ms at 3.44 GiB. Least memory: pp+dp zb-h1, 3.12 GiB at 41.6 ms. One of six could not
    run.`
    """
    fastest, smallest = _fastest(comparison), _smallest(comparison)
    names, rest = trial_names(comparison), _fates(comparison)

    def named(trials: Sequence[Trial]) -> str:
        return _joined([names[trial.key].text for trial in trials])

    if not fastest and not smallest:
        unknown = "No step time and no peak is known." if comparison.trials else "Nothing has been tried."
        first, *rest = rest if comparison.trials and not comparison.usable else [unknown, *rest]
        spans = [strong(first)]
    elif len(comparison.trials) == 1:
        trial = comparison.trials[0]
        spans = [strong(f"{names[trial.key].text}: {_both(comparison, trial)}.")]
    elif both := [trial for trial in fastest if trial in smallest]:
        told = f"{named(both)}, {_both(comparison, both[0])}"
        spans = [strong(f"Fastest, and least memory: {told}.")]
    else:
        spans = []
        if fastest:
            told = f"Fastest: {named(fastest)}, {_time(comparison, fastest[0])}"
            sizes = [byte_text(trial.peak) for trial in fastest if trial.peak is not None]
            at = f" at {_joined(list(dict.fromkeys(sizes)))}" if sizes else ""
            spans += [strong(told), Span(f"{at}.")]
        if smallest:
            told = f"Least memory: {named(smallest)}, {byte_text(smallest[0].peak)}"
            times = [seconds_text(s) for trial in smallest if (s := comparison.seconds(trial)) is not None]
            at = f" at {_joined(list(dict.fromkeys(times)))}" if times else ""
            spans += [Span(" ")] * bool(spans) + [strong(told), Span(f"{at}.")]
    return [*spans, *(Span(f" {sentence}") for sentence in rest)]


def _fastest(comparison: Comparison) -> list[Trial]:
    """Return the trials whose step times print like the least one, the fastest first."""
    first, least = comparison.fastest, None
    if first is not None:
        least = seconds_text(comparison.seconds(first))
    # Times that print equally are ties for a reader.
    alike = [t for t in comparison.usable if t is not first and seconds_text(comparison.seconds(t)) == least]
    return [] if first is None else [first, *alike]


def _smallest(comparison: Comparison) -> list[Trial]:
    """Return the trials whose peaks print like the least one, the smallest first."""
    first, least = comparison.smallest, None
    if first is not None:
        least = byte_text(first.peak)
    alike = [t for t in comparison.usable if t is not first and byte_text(t.peak) == least]
    return [] if first is None else [first, *alike]


def _fates(comparison: Comparison) -> list[str]:
    """Return a sentence on each kind of trials that are no answer."""
    ran = [t for t in comparison.trials if t.report is not None]
    ended = [t for t in ran if t.why is None]
    large = sum(t.fits is False for t in ended)
    wrong = sum(same_answer(t).sign == "error" for t in ended)
    has, does = ("has" if wrong == 1 else "have"), ("does" if large == 1 else "do")
    outcomes = (
        (len(comparison.trials) - len(ran), "could not run", "could run"),
        (len(ran) - len(ended), "did not run to the end", "ran to the end"),
        (large, f"{does} not fit", "fits"),
        (wrong, f"{has} other numbers than the plain step", "has the numbers of the plain step"),
    )
    total, sentences = len(comparison.trials), list[str]()
    for many, negative, positive in outcomes:
        if total == many == 1:
            sentences.append(f"It {negative}.")
        elif many == total:
            sentences += [f"None of {_number(total)} {positive}."] * bool(total)
        elif many:
            sentences.append(sentence_case(f"{_number(many)} of {_number(total)} {negative}."))
    left = len(comparison.left)
    if left:
        sentences.append(sentence_case(f"{_number(left)} {'was' if left == 1 else 'were'} not tried."))
    return sentences


def _number(many: int) -> str:
    return _NUMBERS[many] if many < len(_NUMBERS) else count_text(many)


def _both(comparison: Comparison, trial: Trial) -> str:
    known = [_time(comparison, trial)] if comparison.seconds(trial) is not None else []
    return ", ".join(known + ([byte_text(trial.peak)] if trial.peak is not None else []))


def _time(comparison: Comparison, trial: Trial) -> str:
    how = "" if comparison.source == "measured" else f" {source_text(comparison)}"
    return f"{seconds_text(comparison.seconds(trial))}{how}"


def on_cpu(comparison: Comparison) -> bool:
    """Return whether simulated devices alone ran a step."""
    ran = [trial for trial in comparison.trials if trial.measured is not None]
    return bool(ran) and all(trial.simulated for trial in ran)


def source_text(comparison: Comparison) -> str:
    """Return the source of step times: `measured`, `predicted`; empty if none is known."""
    return comparison.source or ""


def comparison_about(comparison: Comparison) -> str:
    """Return step, devices and shared options: `train_step on 8 × TPU v5 lite, attached; all with --microbatches 8.`"""
    on = list(dict.fromkeys(devices_text(t.report.mesh) for t in comparison.trials if t.report is not None))
    where = f" on {on[0]}" if len(on) == 1 else ""
    quoted = ((name, f'"{value}"' if " " in value else value) for name, value in _common(comparison))
    common = " ".join(f"--{name} {value}".rstrip() for name, value in quoted)
    return f"{comparison.name or 'step'}{where}" + (f"; all with {common}" if common else "") + "."


def comparison_notes(comparison: Comparison) -> list[str]:
    """Return notes on the sources of the figures."""
    lines = list(comparison.notes)
    known = [t.report for t in comparison.trials if t.report is not None]
    if not known:
        return lines
    computed = "Peak, bytes and FLOPs are of one device, computed from the compiled program"
    if comparison.source == "predicted":
        chips = ", ".join(dict.fromkeys(r.timing.on for r in known if r.timing and r.timing.on))
        at = f" for {chips}" if chips else ""
        lines.append(f"{computed}; step times are predicted{at}.")
    elif comparison.source == "measured":
        lines.append(f"{computed}; step times are the median of those measured.")
    else:
        lines.append(f"{computed}.")
    if on_cpu(comparison):
        instead = "; --on v5e predicts a chip's" if comparison.source is None else ""
        lines.append(f"What a step took on this CPU says nothing about an accelerator, and is not compared{instead}.")
    return lines


def fits_answer(trial: Trial) -> SignedAnswer:
    """Return whether a trial fits; a trial that could not be compiled does not."""
    if trial.report is None or trial.fits is False:
        return SignedAnswer("error", "no")
    if trial.fits:
        return SignedAnswer("ok", "yes")
    return SignedAnswer(None, "unknown" if trial.peak is None else "no limit")


def same_answer(trial: Trial) -> SignedAnswer:
    """Return whether a trial has the numbers of the plain step.

    Answers: `yes 2e−7`, `to bf16 0.0031`, `no 4.3e−4`, `not checked`, and `as by hand 2e−7` for microbatches coupled by
    the loss.
    """
    check = None if trial.report is None else trial.report.check
    if check is None:
        return SignedAnswer(None, "not checked")
    by = largest_difference(check)
    more = "" if by is None else difference_text(by)
    if not check.passed:
        return SignedAnswer("error", "no", more)
    return SignedAnswer("ok", "as by hand" if check.by_hand else passed_text(trial.options), more)


def passed_text(options: Mapping[str, Any]) -> str:
    """Return `yes` for a passed check, `to bf16` if the options make that precision the limit."""
    narrow = str(options.get("precision"))
    return f"to {narrow}" if narrow in ("bf16", "fp16") else "yes"


def step_text(comparison: Comparison, trial: Trial) -> str:
    """Return the step time for comparison; the predicted one if no other is known.

    Args:
        comparison: Decides between measured and predicted times.
        trial: Trial.
    """
    if trial.report is not None and (comparison.source != "measured" or comparison.seconds(trial) is None):
        return predicted_text(trial.report)
    return seconds_text(comparison.seconds(trial))


def is_predicted(comparison: Comparison, trial: Trial) -> bool:
    """Return whether `step_text` is a prediction among measured times.

    Args:
        comparison: Decides between measured and predicted times.
        trial: Trial.
    """
    apart = comparison.source == "measured" and comparison.seconds(trial) is None
    return apart and trial.predicted is not None


def prediction_text(comparison: Comparison, trial: Trial) -> str:
    """Return the predicted step beside the measured one: `46.0 ms, −2.7%`; empty without a comparable pair."""
    measured, predicted = comparison.seconds(trial), comparable_prediction(comparison, trial)
    if not measured or predicted is None or trial.report is None:
        return ""
    off = predicted / measured - 1
    sign = "+" if off >= 0 else MINUS
    return f"{predicted_text(trial.report)}, {sign}{rounded(100 * abs(off), 1)}%"


def comparable_prediction(comparison: Comparison, trial: Trial) -> float | None:
    """Return the step time predicted for the chip that ran a trial, in seconds.

    None without a measured step on an attached chip.
    """
    ran = trial.measured is not None and comparison.source == "measured"
    attached = trial.report is not None and trial.report.mesh.source == "attached"
    return trial.predicted if ran and attached else None


def limit_share(trial: Trial) -> str:
    """Return peak memory as a share of the limit: `32%`; empty if either is unknown."""
    return share_text(trial.peak / trial.limit) if trial.peak is not None and trial.limit else ""


def front_text(comparison: Comparison, trial: Trial) -> str:
    """Return whether a trial is on the Pareto front: `on it`, `no: fsdp+tp bf16 and pp+dp zb-h1 are faster and
    smaller`.

    Args:
        comparison: Comparison of the trial.
        trial: Trial.
    """
    if trial.report is None:
        return "no: it could not run"
    if trial.why is not None:
        return "no: it did not run to the end"
    if trial.fits is False:
        return "no: it does not fit"
    if same_answer(trial).sign == "error":
        return "no: its numbers are not the same"
    seconds, peak = comparison.seconds(trial), trial.peak
    if seconds is None or peak is None:
        return "unknown: no peak is known" if seconds is not None else "unknown: no step time is known"
    if any(each is trial for each in comparison.front):
        return "on it"
    better = [
        (s, p, each.key)
        for each in comparison.front
        if (s := comparison.seconds(each)) is not None and (p := each.peak) is not None and s <= seconds and p <= peak
    ]
    names = trial_names(comparison)
    said = _joined([names[line].text for _, _, line in better])
    return f"no: {said} {'is' if len(better) == 1 else 'are'} {_better(better, seconds, peak)}"


def _better(better: Sequence[tuple[float, int, str]], seconds: float, peak: int) -> str:
    """Return the advantage of trials at least as fast and as small.

    Args:
        better: (seconds, peak bytes, key) of these trials.
        seconds: Step time to compare with.
        peak: Peak memory in bytes to compare with.
    """
    faster, smaller = all(s < seconds for s, _, _ in better), all(p < peak for _, p, _ in better)
    if faster and smaller:
        return "faster and smaller"
    if faster and all(p == peak for _, p, _ in better):
        return "faster and as small"
    if smaller and all(s == seconds for s, _, _ in better):
        return "smaller and as fast"
    return "at least as fast and as small"


def _joined(names: Sequence[str]) -> str:
    """Return names as a list in words: `a`, `a and b`, `a, b and 3 more`."""
    if len(names) > NAMED:
        return f"{', '.join(names[:NAMED])} and {_number(len(names) - NAMED)} more"
    return " and ".join(names)


def failure_parts(trial: Trial) -> tuple[str, str]:
    """Return the reason of a failed trial, split before a bracket at its end.

    `12 heads do not divide by model=8` and `(blocks.attn.qkv.kernel, dim 3)`; the second part is empty without a
    bracket.
    """
    why = (trial.why or "").rstrip(".")
    head, bracket, rest = why.partition(" (")
    return (head, f"({rest}") if bracket and rest.endswith(")") else (why, "")


def distinguishing_options(line: str) -> list[tuple[str, str]]:
    """Return the options of a line as (name, value), with values as typed, without options given for all candidates.

    >>> distinguishing_options('fsdp --mesh "data=8" --remat "a|b" --pad --on v5e')
    [('remat', '"a|b"'), ('pad', '')]
    """
    return [(name, value) for name, value in _OPTION.findall(line) if name not in _FOR_ALL]
