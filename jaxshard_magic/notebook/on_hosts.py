"""Cells that run on all hosts of a mesh: sent there in the place of this kernel, what they publish shown here.

An input transformer, as that of `%autopx`, hands each cell to `%%hosts`. What host 0 publishes is shown as if it ran
here; what another one does only where it differs, folded. A Report comes as data and is shown by this kernel's views.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.display import display

from ..errors import ShardError
from .cells import Interrupted
from .displays import say
from .hosts_names import Names
from .hosts_output import Output
from .progress import Progress, line_for

if TYPE_CHECKING:
    from ..config.mesh import MeshSpec
    from ..hosts.cluster import Cluster
    from ..hosts.watch import Interrupts
    from ..report import Report
    from ..report.comparison import Comparison

# What stays in the kernel: cells that begin so, and lines of the magics whose state is here.
_HERE = re.compile(r"\s*%%(here|hosts)\b")
_LINES = re.compile(
    r"\s*(%mesh\b|%load_ext\b|%unload_ext\b|%reload_ext\b|%config\b"
    r"|%shard[ \t]+(doctor|history|compare|schedule|explore|rescue)\b)"
)
_cells = count(1)


class OnHosts:
    """The hosts of one notebook, while there are some. `keep(report, cell)` puts a report that comes from host 0 into
    the history, and `later(shown)` has one shown once the cell has ended."""

    def __init__(
        self,
        shell: Any,
        session: Any,
        keep: "Callable[[Report, str | None], None]",
        later: Callable[[Any], None],
    ):
        self._shell, self._session, self._keep, self._later = shell, session, keep, later
        self.cluster: Cluster | None = None
        self._settled: dict[str, Any] = {}  # what the hosts have of the session's settings
        self._numbers: dict[int, int] = {}  # of reports: ours by host 0's
        self._names: Names | None = None
        self._running = False

    @property
    def are_there(self) -> bool:
        """Whether cells run on hosts now."""
        return self.cluster is not None

    def takes(self, text: str) -> bool:
        """Whether a `%mesh` line is about hosts: it names some, or axes alone while there are some, or asks about
        those, or ends them. One that names other devices ends them, and goes on as ever."""
        if text == "--close" or (not text and self.are_there):
            return True
        if not text:
            return False
        spec = self._spec(text)
        if spec.hosts is None and self.are_there:
            self.close()
        return spec.hosts is not None

    def _spec(self, text: str) -> "MeshSpec":
        """Axes alone are those of a mesh over the hosts that are there."""
        from ..config.mesh import MeshSpec

        spec = MeshSpec.parse(text)
        if self.cluster is None or spec.source != "attached":
            return spec
        return replace(spec, source="hosts", hosts=self.cluster.spec)

    def mesh(self, text: str, quiet: bool) -> None:
        """Do what such a line says. Raises ShardError where that can't be."""
        if text == "--close":
            if (cluster := self.cluster) is None:
                raise ShardError("there are no hosts: cells run in this kernel")
            self.close()
            if left := cluster.left():
                say(left)
            return
        if text:
            before = self.cluster
            with Progress(line_for(self._shell) if self._session.progress else None) as progress:
                self._open(self._spec(text), progress)
            if self.cluster is not before:
                say(
                    "Cells run on all hosts from here on; %%here runs one in this kernel, %mesh --close ends the hosts."
                )
        if not quiet:
            self._show()

    def _open(self, spec: "MeshSpec", draw: Callable[[str], None]) -> None:
        """Start the hosts of a mesh, or take those that are there where only the axes change."""
        from ..config.mesh_text import axes_text
        from ..doctor.hosts import apart, apart_text
        from ..hosts import engine, starting

        assert spec.hosts is not None
        axes = axes_text(spec.axes)
        if self.cluster is not None and (self.cluster.spec != spec.hosts or self.cluster.died is not None):
            self.close()
        if self.cluster is None:
            self.cluster = starting.start(spec.hosts, spec.size, draw, self._session.hosts_limit)
            self._names, self._numbers = Names(self._shell, self.cluster), {}
        self.cluster.has_room(spec.size, axes)
        draw("making the mesh")
        self._settled = self._settings()
        try:
            told = self.cluster.call(engine.get_ready, axes, self._settled)
        except ShardError:
            if self.cluster.meshed is None:
                self.close()
            raise
        self.cluster.meshed = told[0]
        if different := apart([each.versions for each in self.cluster.joined]):
            said = ", ".join(f"{name} {apart_text(by)}" for name, by in different.items())
            say(f"hosts differ: {said}. Programs and numbers may, too: %shard doctor says what to do")
        if _transformed not in self._shell.input_transformers_cleanup:
            self._shell.input_transformers_cleanup.append(_transformed)

    def close(self) -> None:
        """End the hosts, which is said where they are there; cells run in the kernel again."""
        with suppress(ValueError):
            self._shell.input_transformers_cleanup.remove(_transformed)
        cluster, self.cluster, self._names = self.cluster, None, None
        if cluster is not None:
            if cluster.died is None and cluster.is_ours:
                say(f"{cluster.spec} ended, with what was on it; cells run in this kernel.")
            cluster.close()

    def _show(self) -> None:
        """Display of each device its host, its place there, and its place on the mesh."""
        from ..views.hosts import hosts_html, hosts_text
        from ..views.terminal import writable

        if self.cluster is None or self.cluster.meshed is None:
            return
        meshed = self.cluster.meshed
        given = meshed.info, meshed.places, [each.machine for each in self.cluster.joined]
        display({"text/plain": writable(hosts_text(*given)), "text/html": hosts_html(*given)}, raw=True)

    def run(self, text: str) -> Any:
        """Run a cell on all hosts; what host 0 gives as its value. Raises UsageError, one line, where it ends early,
        and Interrupted where it was stopped."""
        from ..hosts import watch

        cluster, names = self.cluster, self._names
        if cluster is None or names is None:
            raise UsageError("no hosts: %mesh hosts:2 data=8 makes a mesh over two")
        if cluster.died is not None:
            raise UsageError(f"the hosts are gone ({cluster.died}): {cluster.again}")
        with watch.Interrupts() as interrupts:
            first = self._prepared(cluster, names, text, interrupts)
            for number, cell in first:
                self._watched(cluster, names, number, cell, interrupts, prints=False)
            return self._watched(cluster, names, len(self._shell.user_ns["In"]) - 1, text, interrupts)

    def _prepared(
        self, cluster: "Cluster", names: Names, text: str, interrupts: "Interrupts"
    ) -> list[tuple[int, str]]:
        """Give the hosts what a cell reads; the cells to run before it, by number, as `Names.bring`."""
        from ..hosts import engine, watch

        try:
            watch.look(cluster)
            if (settings := self._settings()) != self._settled:
                cluster.call(engine.settle, settings)
                self._settled = settings
            first = names.bring(text)
            if interrupts.times:  # raised, and dropped by Python
                raise KeyboardInterrupt
            return first
        except watch.HostsLost as lost:
            raise UsageError(self._told(lost)) from None
        except ShardError as error:
            raise UsageError(str(error)) from None
        except KeyboardInterrupt:
            raise Interrupted(watch.NOT_BEGUN) from None

    def _watched(
        self,
        cluster: "Cluster",
        names: Names,
        number: int,
        text: str,
        interrupts: "Interrupts",
        prints: bool = True,
    ) -> Any:
        """Run a cell on all hosts under a number, as `run`; what it prints is shown where `prints`."""
        from ..hosts import watch

        output = Output(
            self._shell, len(cluster), lambda kind, data: self._received(kind, data, text), prints
        )
        self._running = True
        try:
            name = f"{number}.{next(_cells)}"
            outcome = watch.run(cluster, text, name, number, output.publish, interrupts)
        except watch.HostsLost as lost:
            if lost.failed:
                output.error_of(lost.failed)
            raise UsageError(self._told(lost)) from None
        finally:
            self._running = False
        for shown in output.late:
            self._later(shown)
        output.others()
        if (failed := outcome.failed) is not None and failed > 0:
            output.error_of(failed)
        if outcome.interrupted:
            raise Interrupted(outcome.told())
        if errors := [each.error for each in outcome.hosts if each.error is not None]:
            missed = next(filter(None, map(names.missed, errors)), None)
            raise UsageError(outcome.told() if missed is None else missed)
        return output.value

    def rescue(self, names: Sequence[str]) -> str:
        """Bring what is whole on a host that is left to the kernel. Raises ShardError where there is none."""
        from ..hosts import engine

        cluster = self.cluster
        if cluster is None:
            raise ShardError("no hosts to rescue anything from: cells run in this kernel")
        left = cluster.survivors or range(len(cluster))
        host = next(iter(left), None)
        if host is None or (cluster.died is not None and not cluster.survivors):
            raise ShardError(f"no host is left: {cluster.died}. {cluster.again}")
        cluster.has_left()
        try:
            found, without, keys = cluster.call(engine.whole_on_this, list(names), host=host, seconds=60)
        except ShardError as error:
            way = (
                "the step's own .gather(...) brings it there"
                if cluster.died is None
                else "a checkpoint is needed"
            )
            raise ShardError(f"{error}. Under dp every host has all of it; else {way}") from None
        self._shell.user_ns.update(found)
        more = "; of typed keys their numbers, of which jax.random.wrap_key_data makes keys" if keys else ""
        left = f"; left there: {', '.join(without)}" if without else ""
        return f"{', '.join(names)}: brought to this kernel from host {host}, as NumPy arrays{more}{left}"

    def shapes(self, names: Iterable[str]) -> dict[str, Any]:
        """The arrays that hosts have under names that mean nothing in the kernel, as shapes."""
        from ..hosts import engine

        lacking = [name for name in names if name not in self._shell.user_ns]
        if self.cluster is None or self.cluster.died is not None or not lacking:
            return {}
        return self.cluster.call(engine.shapes_of, lacking, host=0)

    def _received(self, kind: str, data: Any, cell: str) -> Any:
        """What host 0 shows of ours, as this kernel's own."""
        from ..report import Report
        from ..report.choice import Choice
        from ..report.comparison import Comparison
        from ..views.show import show_live

        made = cell if cell.lstrip().startswith("%%shard") else None
        if kind == "Report":
            there = Report.from_dict(data)
            known = self._numbers.get(there.number or 0)
            before = next((each for each in self._session.history if each.number == known), None)
            report = self._session.received(there, known)
            if report != before:
                self._keep(report, made)
            self._numbers[there.number or 0] = report.number
            return report
        if kind == "Comparison":
            found = Comparison.from_dict(data)
            return self._take_trials(found, self._session.compared(found), made)
        choice = Choice.from_dict(data)
        if any(trial.report is not None and trial.report.number for trial in choice.comparison.trials):
            found, choice = choice.comparison, self._session.chose(choice)
            self._take_trials(found, choice.comparison, made)
        show_live(choice, self._session.view)  # host 0 sends the report of what was chosen as well
        return None

    def _take_trials(self, there: "Comparison", ours: "Comparison", cell: str | None) -> "Comparison":
        """Keep the reports of a comparison that has come from host 0, where they have other numbers."""
        for theirs, trial in zip(there.trials, ours.trials, strict=True):
            if trial.report is not None and theirs.report is not None:
                self._numbers[theirs.report.number or 0] = trial.report.number or 0
                self._keep(trial.report, cell)
        return ours

    def complete(self, text: str, cursor: int) -> list[tuple[int, str]]:
        """What completes `text` at `cursor` on host 0, each with the place where it begins; nothing while a cell runs
        there."""
        from ..hosts import engine

        if self.cluster is None or self.cluster.died is not None or self._running:
            return []
        try:
            found = self.cluster.call(engine.completions, text, cursor, host=0, seconds=1)
            return [(found["cursor_start"], word) for word in found["matches"]]
        except ShardError:
            return []

    def _told(self, lost: Any) -> str:
        """What is left after a death, and the line that begins again."""
        assert self.cluster is not None
        if not lost.survivors:
            return f"{lost}. {self.cluster.again}"
        left = ", ".join(map(str, lost.survivors))
        are, have = ("hosts", "have") if len(lost.survivors) > 1 else ("host", "has")
        return (
            f"{lost}. What {are} {left} {have} whole (under dp all of the state, under fsdp none) %shard rescue NAME "
            f"brings to this kernel; {self.cluster.again}"
        )

    def _settings(self) -> dict[str, Any]:
        own = self._session
        return {
            name: getattr(own, name) for name in ("progress", "compile_limit", "options_limit", "meet_every")
        }


def stays_here(text: str) -> bool:
    """Whether a cell runs in the kernel all the same: it begins with `%%here`, or is made of lines of the magics whose
    state is there."""
    if _HERE.match(text):
        return True
    lines = [line for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    return not lines or all(map(_LINES.match, lines))


def _transformed(lines: list[str]) -> list[str]:
    text = "".join(lines)
    if (here := re.match(r"\s*%%here[^\n]*\n", text)) is not None:
        return text[here.end() :].splitlines(keepends=True)
    if stays_here(text):
        return lines
    return [f"get_ipython().run_cell_magic('hosts', '', {text!r})\n"]
