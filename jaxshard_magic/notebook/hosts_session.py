"""Cells on all hosts of a mesh: send each cell to the hosts instead of running it in the kernel, and display the
output.

An input transformer, like `%autopx` of ipyparallel, hands each cell to `%%hosts`; `%%here` runs a cell in the kernel.
Output of host 0 appears as if the cell ran in the kernel; output of another host appears folded, and only if different.
A Report arrives as data and is displayed by the views of the kernel.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class, no_var_expand
from IPython.display import display

from ..errors import ShardError
from .cells import Interrupted
from .displays import say
from .hosts_output import HostsOutput
from .hosts_values import HostNamespace
from .progress import Progress, line_for

if TYPE_CHECKING:
    from ..config.mesh import MeshSpec
    from ..hosts.cell_run import Interrupts
    from ..hosts.cluster import Cluster
    from ..report import Report
    from ..report.comparison import Comparison

# Cells that run in the kernel: those with such a first line, and those made of such magics, whose state is here.
_HERE = re.compile(r"\s*%%(here|hosts)\b")
_LINES = re.compile(
    r"\s*(%mesh\b|%load_ext\b|%unload_ext\b|%reload_ext\b|%config\b"
    r"|%shard[ \t]+(doctor|history|compare|schedule|explore|rescue)\b)"
)
_cells = count(1)


class HostsSession:
    """Hosts of one notebook, from `%mesh hosts:2 data=8` to `%mesh --close`.

    Args:
        shell: IPython's shell.
        session: State between cells.
        keep: Called with a report of host 0 and the text of its cell, to store both in the history.
        show_after_cell: Displays an object once the cell has ended.

    Attributes:
        cluster: The running hosts; None while cells run in the kernel.
    """

    def __init__(
        self,
        shell: Any,
        session: Any,
        keep: "Callable[[Report, str | None], None]",
        show_after_cell: Callable[[Any], None],
    ):
        self._shell, self._session, self._keep, self._show_after_cell = shell, session, keep, show_after_cell
        self.cluster: Cluster | None = None
        self._sent_settings: dict[str, Any] = {}  # settings of the session that the hosts have
        self._numbers: dict[int, int] = {}  # numbers of reports in the kernel, by their numbers on host 0
        self._names: HostNamespace | None = None
        self._running = False

    @property
    def are_running(self) -> bool:
        """True while cells run on hosts."""
        return self.cluster is not None

    def handles_mesh_line(self, text: str) -> bool:
        """Return whether a `%mesh` line is about hosts.

        True for a line that names hosts or ends them, and, while hosts run, for axes alone and for an empty line. A
        line that names other devices ends the hosts and is left to the caller.
        """
        if text == "--close" or (not text and self.are_running):
            return True
        if not text:
            return False
        spec = self._spec(text)
        if spec.hosts is None and self.are_running:
            self.close()
        return spec.hosts is not None

    def _spec(self, text: str) -> "MeshSpec":
        """Parse mesh text; while hosts run, axes alone mean a mesh over the hosts."""
        from ..config.mesh import MeshSpec

        spec = MeshSpec.parse(text)
        if self.cluster is None or spec.source != "attached":
            return spec
        return replace(spec, source="hosts", hosts=self.cluster.spec)

    def run_mesh_line(self, text: str, quiet: bool) -> None:
        """Run a `%mesh` line about hosts.

        Args:
            text: The line without a closing semicolon.
            quiet: Do not display the mesh.

        Raises:
            ShardError: The hosts can't be started, or are too few for the axes.
        """
        if text == "--close":
            if (cluster := self.cluster) is None:
                raise ShardError("there are no hosts: cells run in this kernel")
            self.close()
            if left := cluster.describe_running():
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
        """Start the hosts of a mesh; keep the running hosts if only the axes change."""
        from ..config.mesh import axes_text
        from ..doctor.hosts import version_differences, versions_text
        from ..hosts import engine, starting

        assert spec.hosts is not None
        axes = axes_text(spec.axes)
        if self.cluster is not None and (self.cluster.spec != spec.hosts or self.cluster.death_reason is not None):
            self.close()
        if self.cluster is None:
            self.cluster = starting.start(spec.hosts, spec.size, draw, self._session.hosts_limit)
            self._names, self._numbers = HostNamespace(self._shell, self.cluster), {}
        self.cluster.check_device_count(spec.size, axes)
        draw("making the mesh")
        self._sent_settings = self._settings()
        try:
            told = self.cluster.call(engine.prepare_host, axes, self._sent_settings)
        except ShardError:
            if self.cluster.mesh is None:
                self.close()
            raise
        self.cluster.mesh = told[0]
        if different := version_differences([each.versions for each in self.cluster.joined]):
            said = ", ".join(f"{name} {versions_text(by)}" for name, by in different.items())
            say(f"hosts differ: {said}. Programs and numbers may, too: %shard doctor says what to do")
        # Running hosts may be opened again for other axes; the transformer is installed once.
        if _transform_cell not in self._shell.input_transformers_cleanup:
            self._shell.input_transformers_cleanup.append(_transform_cell)

    def close(self) -> None:
        """End the hosts, and say so if they still run; later cells run in the kernel."""
        with suppress(ValueError):
            self._shell.input_transformers_cleanup.remove(_transform_cell)
        cluster, self.cluster, self._names = self.cluster, None, None
        if cluster is not None:
            if cluster.death_reason is None and cluster.is_ours:
                say(f"{cluster.spec} ended, with what was on it; cells run in this kernel.")
            cluster.close()

    def _show(self) -> None:
        """Display the host of each device, with the device's index on the host and its position in the mesh."""
        from ..display import writable
        from ..views.meshgrid import hosts_html, hosts_text

        if self.cluster is None or self.cluster.mesh is None:
            return
        meshed = self.cluster.mesh
        given = meshed.info, meshed.local_indices, [each.machine for each in self.cluster.joined]
        display({"text/plain": writable(hosts_text(*given)), "text/html": hosts_html(*given)}, raw=True)

    def run_cell(self, text: str) -> Any:
        """Run a cell on all hosts, and return the value of host 0.

        Values read by the cell and missing on the hosts are sent first.

        Raises:
            UsageError: The cell ended early; the message is one line.
            Interrupted: The user interrupted the cell.
        """
        from ..hosts import cell_run

        cluster, names = self.cluster, self._names
        if cluster is None or names is None:
            raise UsageError("no hosts: %mesh hosts:2 data=8 makes a mesh over two")
        if cluster.death_reason is not None:
            raise UsageError(f"the hosts are gone ({cluster.death_reason}): {cluster.restart_hint}")
        with cell_run.Interrupts() as interrupts:
            first = self._prepared(cluster, names, text, interrupts)
            for number, cell in first:
                self._run_once(cluster, names, number, cell, interrupts, prints=False)
            return self._run_once(cluster, names, len(self._shell.user_ns["In"]) - 1, text, interrupts)

    def _prepared(
        self, cluster: "Cluster", names: HostNamespace, text: str, interrupts: "Interrupts"
    ) -> list[tuple[int, str]]:
        """Send settings and values to the hosts; return the cells to run there first, each with its number."""
        from ..hosts import cell_run, engine

        try:
            cell_run.check_alive(cluster)
            if (settings := self._settings()) != self._sent_settings:
                cluster.call(engine.apply_settings, settings)
                self._sent_settings = settings
            first = names.send_missing(text)
            # Python drops a KeyboardInterrupt raised in a destructor; its time is recorded all the same.
            if interrupts.times:
                raise KeyboardInterrupt
            return first
        except cell_run.HostsLost as lost:
            raise UsageError(self._loss_message(lost)) from None
        except ShardError as error:
            raise UsageError(str(error)) from None
        except KeyboardInterrupt:
            raise Interrupted(cell_run.NOT_BEGUN) from None

    def _run_once(
        self,
        cluster: "Cluster",
        names: HostNamespace,
        number: int,
        text: str,
        interrupts: "Interrupts",
        prints: bool = True,
    ) -> Any:
        """Run one cell on all hosts, and return the value of host 0.

        Args:
            cluster: The hosts.
            names: The notebook's names on the hosts.
            number: Number of the cell.
            text: Source of the cell.
            interrupts: Counter of the user's interrupts.
            prints: Show printed text.
        """
        from ..hosts import cell_run

        output = HostsOutput(self._shell, len(cluster), lambda kind, data: self._received(kind, data, text), prints)
        self._running = True
        try:
            # Cells that shard a step run under the number of an earlier cell, so the number alone is not unique.
            name = f"{number}.{next(_cells)}"
            outcome = cell_run.run_on_hosts(cluster, text, name, number, output.handle_message, interrupts)
        except cell_run.HostsLost as lost:
            if lost.failed:
                output.print_traceback(lost.failed)
            raise UsageError(self._loss_message(lost)) from None
        finally:
            self._running = False
        for shown in output.after_error:
            self._show_after_cell(shown)
        output.show_differences()
        if (failed := outcome.failed) is not None and failed > 0:
            output.print_traceback(failed)
        if outcome.interrupted:
            raise Interrupted(outcome.summary())
        if errors := [each.error for each in outcome.hosts if each.error is not None]:
            missed = next(filter(None, map(names.explain_name_error, errors)), None)
            raise UsageError(outcome.summary() if missed is None else missed)
        return output.value

    def rescue(self, names: Sequence[str]) -> str:
        """Copy values that the first surviving host has completely into the kernel, as NumPy arrays.

        Returns:
            One line about the copied values.

        Raises:
            ShardError: No hosts exist, none survives, or the first surviving host has not all of a value.
        """
        from ..hosts import engine

        cluster = self.cluster
        if cluster is None:
            raise ShardError("no hosts to rescue anything from: cells run in this kernel")
        left = cluster.survivors or range(len(cluster))
        host = next(iter(left), None)
        if host is None or (cluster.death_reason is not None and not cluster.survivors):
            raise ShardError(f"no host is left: {cluster.death_reason}. {cluster.restart_hint}")
        # A survivor inside a blocked step answers no call.
        cluster.wait_for_survivors()
        try:
            found, without, keys = cluster.call(engine.plain_values, list(names), host=host, seconds=60)
        except ShardError as error:
            way = (
                "the step's own .gather(...) brings it there"
                if cluster.death_reason is None
                else "a checkpoint is needed"
            )
            raise ShardError(f"{error}. Under dp every host has all of it; else {way}") from None
        self._shell.user_ns.update(found)
        more = "; of typed keys their numbers, of which jax.random.wrap_key_data makes keys" if keys else ""
        left = f"; left there: {', '.join(without)}" if without else ""
        return f"{', '.join(names)}: brought to this kernel from host {host}, as NumPy arrays{more}{left}"

    def shapes(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the shapes of arrays on the hosts for names unknown in the kernel."""
        from ..hosts import engine

        lacking = [name for name in names if name not in self._shell.user_ns]
        if self.cluster is None or self.cluster.death_reason is not None or not lacking:
            return {}
        return self.cluster.call(engine.shapes_of, lacking, host=0)

    def _received(self, kind: str, data: Any, cell: str) -> Any:
        """Return an object displayed by host 0 as the kernel's own; None if displayed here already.

        A report keeps its number in the kernel when host 0 sends a newer version.
        """
        from ..report import Report
        from ..report.choice import Choice
        from ..report.comparison import Comparison
        from ..views.show import show_live

        made = cell if cell.lstrip().startswith("%%shard") else None
        if kind == "Report":
            there = Report.from_dict(data)
            known = self._numbers.get(there.number or 0)
            before = next((each for each in self._session.history if each.number == known), None)
            report = self._session.add_host_report(there, known)
            if report != before:
                self._keep(report, made)
            self._numbers[there.number or 0] = report.number
            return report
        if kind == "Comparison":
            found = Comparison.from_dict(data)
            return self._take_trials(found, self._session.add_comparison(found), made)
        choice = Choice.from_dict(data)
        if any(trial.report is not None and trial.report.number for trial in choice.comparison.trials):
            found, choice = choice.comparison, self._session.add_choice(choice)
            self._take_trials(found, choice.comparison, made)
        show_live(choice, self._session.view)  # the report of the chosen step arrives apart
        return None

    def _take_trials(self, there: "Comparison", ours: "Comparison", cell: str | None) -> "Comparison":
        """Store the reports of a comparison received from host 0, whose numbers there differ from the numbers here."""
        for theirs, trial in zip(there.trials, ours.trials, strict=True):
            if trial.report is not None and theirs.report is not None:
                self._numbers[theirs.report.number or 0] = trial.report.number or 0
                self._keep(trial.report, cell)
        return ours

    def complete(self, text: str, cursor: int) -> list[tuple[int, str]]:
        """Return completions of `text` at `cursor` on host 0, each with its start position; none while a cell runs
        there."""
        from ..hosts import engine

        if self.cluster is None or self.cluster.death_reason is not None or self._running:
            return []
        try:
            found = self.cluster.call(engine.completions, text, cursor, host=0, seconds=1)
            return [(found["cursor_start"], word) for word in found["matches"]]
        except ShardError:
            return []

    def _loss_message(self, lost: Any) -> str:
        """Return a line about lost hosts: the survivors, the use of `%shard rescue`, and the line that starts again."""
        assert self.cluster is not None
        if not lost.survivors:
            return f"{lost}. {self.cluster.restart_hint}"
        left = ", ".join(map(str, lost.survivors))
        are, have = ("hosts", "have") if len(lost.survivors) > 1 else ("host", "has")
        return (
            f"{lost}. What {are} {left} {have} whole (under dp all of the state, under fsdp none) %shard rescue NAME "
            f"brings to this kernel; {self.cluster.restart_hint}"
        )

    def _settings(self) -> dict[str, Any]:
        """Return the settings of the session that hosts need."""
        own = self._session
        return {name: getattr(own, name) for name in ("progress", "compile_limit", "options_limit", "meet_every")}


def runs_in_kernel(text: str) -> bool:
    """Return whether a cell runs in the kernel although hosts run.

    True for cells that begin with `%%here`, and for cells made of lines of magics with state in the kernel.
    """
    if _HERE.match(text):
        return True
    lines = [line for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    return not lines or all(map(_LINES.match, lines))


def _transform_cell(lines: list[str]) -> list[str]:
    """Rewrite the lines of a cell as a call of `%%hosts`, unless the cell stays in the kernel; an IPython input
    transformer."""
    text = "".join(lines)
    if (here := re.match(r"\s*%%here[^\n]*\n", text)) is not None:
        return text[here.end() :].splitlines(keepends=True)
    if runs_in_kernel(text):
        return lines
    return [f"get_ipython().run_cell_magic('hosts', '', {text!r})\n"]


@magics_class
class HostsMagics(Magics):
    """Magics that run a cell on the hosts or in the kernel.

    An input transformer turns each cell into a call of `%%hosts`.

    Args:
        shell: IPython's shell.
        hosts: Hosts of the notebook.
    """

    def __init__(self, shell: Any, hosts: HostsSession):
        super().__init__(shell)
        self._shell, self._hosts = shell, hosts

    @no_var_expand
    @cell_magic
    def hosts(self, line: str, cell: str) -> Any:
        """Run a cell on all hosts of the mesh, as every cell does while there are any; its value is host 0's."""
        # IPython leaves frames with this local variable out of tracebacks.
        __tracebackhide__ = True
        return self._hosts.run_cell(cell)

    @no_var_expand
    @cell_magic
    def here(self, line: str, cell: str) -> None:
        """Run a cell in this kernel, also while cells run on hosts."""
        self._shell.run_cell(cell).raise_error()
