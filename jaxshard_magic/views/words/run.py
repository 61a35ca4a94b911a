"""Run in words: mesh, options, sources of the figures, and the result of the check."""

from collections.abc import Sequence
from math import prod

from jaxshard_magic.report import Check, EarlyEnd, MeshInfo, Report
from jaxshard_magic.views.format import byte_text, count_text, difference_text, number_text, seconds_text
from jaxshard_magic.views.words.spans import Span, leaves_text, line_span, strong

PREDICTED = "every figure is predicted from the plan"


def reported_devices(report: Report, times: str = "\u00d7") -> str:
    """Return the devices of a report, of a planned one as well, like `devices_text`.

    Args:
        report: Report.
        times: Multiplication sign.
    """
    return devices_text(report.mesh, times, planned=is_planned(report))


def devices_text(info: MeshInfo, times: str = "\u00d7", *, planned: bool = False) -> str:
    """Return the devices of a mesh: `8 x TPU v5 lite, attached`, `8 simulated CPU devices`.

    Args:
        info: Mesh.
        times: Multiplication sign.
        planned: Whether the figures are those of a plan that is not compiled.
    """
    n = len(info.devices) or prod(info.axes.values())
    many = len(set(info.hosts)) or info.processes
    hosts = f" on {count_text(many)} hosts" if many > 1 else ""
    if info.source == "simulated":
        return f"{count_text(n)} simulated {info.platform.upper()} device{'s' * (n != 1)}{hosts}"
    done = "planned only" if planned else "compiled, not run"
    state = {"topology": f"not attached: {done}"}.get(info.source, info.source)
    return f"{count_text(n)} {times} {info.device_kind}{hosts}, {state}"


def island_word(info: MeshInfo) -> str:
    """Return the word for an island of a mesh, beyond which only the network goes: "slice" of TPUs, else "host"."""
    return "slice" if info.platform == "tpu" else "host"


def hosts_lines(info: MeshInfo, most: int) -> list[str]:
    """Return the devices of each host: `host 0: 0–3`.

    Args:
        info: Mesh.
        most: Maximal number of lines; the last one then counts the omitted hosts.
    """
    of: dict[int, list[int]] = {}
    # `MeshInfo.hosts` is empty for a mesh on one host.
    for host, device in zip(info.hosts, info.devices, strict=bool(info.hosts)):
        of.setdefault(host, []).append(device)
    lines = [f"host {host}: {_runs(sorted(devices))}" for host, devices in sorted(of.items())]
    left = len(lines) - most
    return lines if left <= 0 else [*lines[: most - 1], f"and {count_text(left + 1)} more hosts"]


def _runs(numbers: Sequence[int]) -> str:
    """Return ascending numbers with consecutive ones joined: `0–3, 8`."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(run[0]) if len(run) < 2 else f"{run[0]}\u2013{run[-1]}" for run in runs)


def title_text(report: Report) -> str:
    """Return the subject of a report: the strategy, or `arrays` without a step."""
    return report.strategy if report.of_step else "arrays"


def named_text(report: Report) -> str:
    """Return the name of the step and the number of its report in notebook and history: `train_step, report 12`.

    Empty if there is neither.
    """
    name = report.name if report.name != report.strategy else ""
    return ", ".join(filter(None, [name, "" if report.number is None else f"report {report.number}"]))


LeafNote = tuple[str, str]  # (path of a leaf, its difference or the number of noisy values)
HINTS = 3  # pieces of advice shown at first; others are folded


def has_run(report: Report) -> bool:
    """Return whether the step was called, or recorded on copies of its arguments."""
    return report.measured is not None or (report.timing is not None and report.timing.calls > 0)


def progress_text(ended: EarlyEnd) -> str:
    """Return the progress of a cell that ended early: `step 396 of 3,000`."""
    if not ended.calls:
        return "the first step"
    return f"step {count_text(ended.calls)}" + (f" of {count_text(ended.of)}" if ended.of else "")


def ended_spans(ended: EarlyEnd) -> list[Span]:
    """Return the early end of a cell: `Stopped at step 396 of 3,000, loss 0.042.`, or the error and its line."""
    at = [Span(" at "), line_span(ended.file, ended.line)] if ended.line is not None else []
    loss = f", loss {number_text(ended.loss)}" if ended.loss is not None else ""
    if ended.error is None:
        return [strong(f"Stopped {'at' if ended.calls else 'in'} {progress_text(ended)}"), Span(f"{loss}.")]
    return [
        strong("The cell raised"),
        Span(" "),
        Span(ended.error, "code"),
        *at,
        Span(f", {'after' if ended.calls else 'in'} {progress_text(ended)}{loss}."),
    ]


def notes(report: Report) -> list[str]:
    """Return notes on the sources of the figures, and on whether the step ran."""
    return [*origin_notes(report), *run_notes(report), *saved_notes(report)]


def saved_notes(report: Report) -> list[str]:
    """Return notes on checkpoints.

    `3 saves took the loop 1.2 s, 0.4 s each; the last, of step 300, 144 MiB, in runs/a. While a save is written a
    device holds up to 18 MiB more: the state that the step would have taken over.`
    """
    checkpoints = report.checkpoints
    if checkpoints is None:
        return []
    lines = []
    if checkpoints.resumed is not None:
        lines.append(
            f"Resumed at step {count_text(checkpoints.resumed)}, from {checkpoints.folder}: those before "
            "were not computed."
        )
    if checkpoints.count:
        last, one = checkpoints.saves[-1], checkpoints.count == 1
        each = "" if one else f", {seconds_text(checkpoints.seconds / checkpoints.count)} each"
        lines.append(
            f"{count_text(checkpoints.count)} save{'s' * (not one)} took the loop "
            f"{seconds_text(checkpoints.seconds)}{each}; the "
            f"last, of step {count_text(last.step)}, {byte_text(last.bytes)}, in {checkpoints.folder}."
        )
    if checkpoints.copy:
        lines.append(
            f"While a save is written a device holds up to {byte_text(checkpoints.copy)} more: the state "
            "that the step would "
            "have taken over."
        )
    return lines


def run_notes(report: Report) -> list[str]:
    """Return a note on a step that did not run: `Not run: compiled only; your variables are as they were.`"""
    checkpoints = report.checkpoints
    if not report.of_step or has_run(report) or (checkpoints is not None and checkpoints.resumed is not None):
        return []
    how = "planned only; " if is_planned(report) else "compiled only; " * _known(report)
    return [f"Not run: {how}your variables are as they were."]


def is_planned(report: Report) -> bool:
    """Return whether the figures of a report are those of a plan that is not compiled."""
    return report.memory is not None and report.memory.source == "planned"


def _known(report: Report) -> bool:
    return report.memory is not None or report.collectives is not None


def origin_notes(report: Report) -> list[str]:
    """Return notes on the sources of the figures."""
    if is_planned(report):
        failed = any(a.code == "compiler-failed" for a in report.advice)
        why = "The chip's compiler failed" if failed else "Nothing is compiled"
        known = "arrays at rest are exact, and no more is known" if report.collectives is None else PREDICTED
        return [f"{why}: {known}."]
    lines = []
    if report.mesh.source == "simulated" and _known(report):
        instead = "" if report.timing and report.timing.on else "; --on v5e predicts one"
        lines.append(
            "Peak and bytes sent are exact for the program compiled for this CPU; a chip's own may send otherwise, "
            "such as by a reduce-scatter for an all-reduce. "
            f"Times on this CPU say nothing about an accelerator{instead}."
        )
        if report.timing and report.timing.on:
            how = "what overlaps there is a rule" if report.timing.overlap else "nothing is taken to overlap"
            lines.append(
                f"Predicted times and the memory limit are of {report.timing.on}; the program is the one compiled for "
                f"this CPU, and {how}."
            )
    elif report.mesh.source == "topology":
        lines.append("Every figure is computed from the compiled program or predicted.")
        # A source "compiled for CHIP" means that the chip's compiler refused the step; figures are those of a larger
        # chip.
        _, refused, stand_in = (report.memory.source if report.memory else "").partition("compiled for ")
        if refused:
            lines.append(
                f"The chip's own compiler refuses the step; the peak is what it asks for, the rest is as compiled for "
                f"{stand_in}, which has the room."
            )
    return lines


def check_lines(report: Report) -> list[tuple[str, tuple[LeafNote, ...]]]:
    """Return the result of the check with the leaves it names."""
    return [*result_lines(report), *noise_lines(report)]


def noise_lines(report: Report) -> list[tuple[str, tuple[LeafNote, ...]]]:
    """Return the leaves with rounding noise alone; empty if there are none."""
    check = report.check
    if check is None or not check.noise:
        return []
    return [(f"{leaves_text(len(check.noise))} with rounding noise only, no error:", _with_numbers(check))]


def result_lines(report: Report) -> list[tuple[str, tuple[LeafNote, ...]]]:
    """Return whether the numbers are the same, the leaves that differ, and whether the compiler is at fault."""
    check = report.check
    if check is None:
        return []
    same = "The same numbers as" if check.passed else "Not the same numbers as"
    lines: list[tuple[str, tuple[LeafNote, ...]]] = [(f"{same} {check.reference}: {check_difference(report)}.", ())]
    if check.failed:
        lines.append((f"{leaves_text(len(check.failed))} not the same:", _with_amounts(check)))
    if check.compiler is not None:
        lines.append((_whose_fault(check.compiler), ()))
    return lines


def _whose_fault(compiler: bool) -> str:
    if compiler:
        return (
            "jax.jit alone, with the arguments divided in the same way, gets these wrong as well: the fault is the "
            "compiler's, XLA's partitioner; another strategy or mesh may do without what it gets wrong."
        )
    return "jax.jit alone, with the arguments divided in the same way, gets them right: please report it with the step."


def _with_amounts(check: Check) -> tuple[LeafNote, ...]:
    """Return (path, amount) of failed leaves: `state.params.w`, `by 0.012`."""
    amounts = check.failed_by or (None,) * len(check.failed)
    pairs = zip(check.failed, amounts, strict=True)
    return tuple((path, "" if by is None else f"by {difference_text(by)}") for path, by in pairs)


def _with_numbers(check: Check) -> tuple[LeafNote, ...]:
    """Return (path, numbers with noise) of leaves: `state.params.w`, `(12 of 262,144 numbers)`."""
    if not check.noise_in:
        return tuple((path, "") for path in check.noise)
    pairs = zip(check.noise, check.noise_in, strict=True)
    return tuple((path, _numbers_text(*many)) for path, many in pairs)


def _numbers_text(n: int, of: int) -> str:
    if of == 1:
        return ""
    return f"(all {count_text(of)} numbers)" if n == of else f"({count_text(n)} of {count_text(of)} numbers)"


def largest_difference(check: Check) -> float | None:
    """Return the largest relative difference of a check, else the absolute one; None if both are unknown."""
    return check.max_rel_diff if check.max_rel_diff is not None else check.max_abs_diff


def check_difference(report: Report) -> str:
    """Return the difference and its limit: `differs by 2e-6, limit 1e-4`."""
    check = report.check
    if check is None:
        return "not checked"
    known = largest_difference(check)
    if known is None:
        return f"limit {difference_text(check.limit)}"
    differs = "no difference" if known == 0 else f"differs by {difference_text(known)}"
    return f"{differs}, limit {difference_text(check.limit)}"
