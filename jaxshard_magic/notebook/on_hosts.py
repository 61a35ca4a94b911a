"""Cells that run on all hosts of a mesh: sent there in the place of this kernel, what they publish shown here.

An input transformer, as that of `%autopx`, hands each cell to `%%hosts`. What host 0 publishes is shown as if it ran
here; what another one does only where it differs, folded. A Report comes as data and is shown by this kernel's views.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.display import display

from ..errors import ShardError
from .displays import say
from .hosts_names import Names
from .hosts_output import Output
from .progress import Progress, line_for

if TYPE_CHECKING:
    from ..hosts.cluster import Cluster
    from ..mesh import MeshSpec
    from ..report import Report

# What stays in the kernel: cells that begin so, and lines of the magics whose state is here.
_HERE = re.compile(r"\s*%%(here|hosts)\b")
_LINES = re.compile(
    r"\s*(%mesh\b|%load_ext\b|%unload_ext\b|%reload_ext\b|%config\b"
    r"|%shard[ \t]+(doctor|history|compare|schedule|explore|rescue)\b)"
)
_ASKED = re.compile(r"\s*(?=[^\n]*\?)(\?{0,2})([^\W\d][\w.]*)(\?{0,2})\s*")  # a cell that is `name?`
_cells = count(1)


class OnHosts:
    """The hosts of one notebook, while there are some. `keep(report, cell)` puts a report that comes from host 0 into
    the history."""

    def __init__(self, shell: Any, session: Any, keep: "Callable[[Report, str], None]"):
        self._shell, self._session, self._keep = shell, session, keep
        self.cluster: Cluster | None = None
        self._names: Names | None = None
        self._running = False

    @property
    def are_there(self) -> bool:
        """Whether cells run on hosts now."""
        return self.cluster is not None

    def takes(self, text: str) -> bool:
        """Whether a `%mesh` line is about hosts: it names some, or asks about those that are there, or ends them. One
        that names another mesh ends them, and goes on as ever."""
        from ..mesh import MeshSpec

        if text == "--close" or (not text and self.are_there):
            return True
        if not text:
            return False
        spec = MeshSpec.parse(text)
        if spec.hosts is None and self.are_there:
            self.close()
        return spec.hosts is not None

    def mesh(self, text: str, quiet: bool) -> None:
        """Do what such a line says. Raises ShardError where that can't be."""
        from ..mesh import MeshSpec

        if text == "--close":
            if (cluster := self.cluster) is None:
                raise ShardError("there are no hosts: cells run in this kernel")
            self.close()
            if left := cluster.left():
                say(left)
            return
        if text:
            with Progress(line_for(self._shell) if self._session.progress else None) as progress:
                self._open(MeshSpec.parse(text), progress)
            say(
                "Cells run on all hosts from here on; %%here runs one in this kernel, %mesh --close ends the hosts."
            )
        if not quiet:
            self._show()

    def _open(self, spec: "MeshSpec", draw: Callable[[str], None]) -> None:
        """Start the hosts of a mesh, or take those that are there where only the axes change."""
        from ..doctor.hosts import apart, apart_text
        from ..hosts import engine, starting
        from ..mesh import axes_text

        assert spec.hosts is not None
        axes = axes_text(spec.axes)
        if self.cluster is not None and (self.cluster.spec != spec.hosts or self.cluster.died is not None):
            self.close()
        if self.cluster is None:
            self.cluster = starting.start(spec.hosts, spec.size, draw, self._session.hosts_limit)
            self._names = Names(self._shell, self.cluster)
        self.cluster.has_room(spec.size)
        draw("making the mesh")
        try:
            told = self.cluster.call(engine.get_ready, axes, self._settings())
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
        """End the hosts; cells run in the kernel again."""
        with suppress(ValueError):
            self._shell.input_transformers_cleanup.remove(_transformed)
        cluster, self.cluster, self._names = self.cluster, None, None
        if cluster is not None:
            cluster.close()

    def _show(self) -> None:
        """Display of each device its host, its place there, and its place on the mesh."""
        from ..views.hosts import hosts_html, hosts_text
        from ..views.terminal import writable

        if self.cluster is None or self.cluster.meshed is None:
            return
        meshed, machines = self.cluster.meshed, [each.machine for each in self.cluster.joined]
        given = meshed.axes, meshed.places, machines, meshed.kind
        display({"text/plain": writable(hosts_text(*given)), "text/html": hosts_html(*given)}, raw=True)

    def run(self, text: str) -> Any:
        """Run a cell on all hosts; what host 0 gives as its value. Raises UsageError, one line, where it ends early."""
        from ..hosts import watch

        cluster, names = self.cluster, self._names
        if cluster is None or names is None:
            raise UsageError("no hosts: %mesh hosts:2 data=8 makes a mesh over two")
        if cluster.died is not None:
            raise UsageError(f"the hosts are gone ({cluster.died}): {cluster.again}")
        try:
            watch.look(cluster)
            if (asked := _ASKED.fullmatch(text)) is not None:
                return self._told_of(cluster, *asked.groups())
            names.bring(text)
        except watch.HostsLost as lost:
            raise UsageError(self._told(lost)) from None
        except ShardError as error:
            raise UsageError(str(error)) from None
        number = len(self._shell.user_ns["In"]) - 1
        output = Output(self._shell, len(cluster), lambda kind, data: self._received(kind, data, text))
        self._running = True
        try:
            outcome = watch.run(cluster, text, f"{number}.{next(_cells)}", number, output.publish)
        except watch.HostsLost as lost:
            raise UsageError(self._told(lost)) from None
        finally:
            self._running = False
        output.others()
        names.defined(text)
        if (failed := outcome.failed) is not None and failed > 0:
            output.error_of(failed)
        if any(each.error is not None for each in outcome.hosts):
            raise UsageError(outcome.told())
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
            found = cluster.call(engine.whole_on_this, list(names), host=host, seconds=60)
        except ShardError as error:
            raise ShardError(
                f"{error}. Under dp every host has all of it; under fsdp a checkpoint is needed"
            ) from None
        self._shell.user_ns.update(found)
        return f"{', '.join(names)}: brought to this kernel from host {host}, as NumPy arrays"

    def _received(self, kind: str, data: Any, cell: str) -> Any:
        """What host 0 shows of ours, as this kernel's own."""
        from ..report import Report
        from ..report.choice import Choice
        from ..report.comparison import Comparison

        if kind == "Report":
            report = self._session.received(Report.from_dict(data))
            self._keep(report, cell)
            return report
        if kind == "Comparison":
            return self._session.compared(Comparison.from_dict(data))
        return self._session.chose(Choice.from_dict(data))

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

    def _told_of(self, cluster: "Cluster", before: str, name: str, behind: str) -> None:
        """What host 0 knows of a name, for a cell that is `name?`. Shows it, or a line where it knows none."""
        from ..hosts import engine

        found = cluster.call(engine.inspected, name, len(name), int("??" in (before, behind)), host=0)
        if not found["found"]:
            raise ShardError(f"{name} means nothing on the hosts")
        display(found["data"], raw=True)

    def _told(self, lost: Any) -> str:
        """What is left after a death, and the line that begins again."""
        assert self.cluster is not None
        if not lost.survivors:
            return f"{lost}. {self.cluster.again}"
        left = ", ".join(map(str, lost.survivors))
        are = "hosts" if len(lost.survivors) > 1 else "host"
        return (
            f"{lost}. What {are} {left} has whole (under dp all of the state, under fsdp none) %shard rescue NAME "
            f"brings to this kernel; {self.cluster.again}"
        )

    def _settings(self) -> dict[str, Any]:
        own = self._session
        return {name: getattr(own, name) for name in ("progress", "compile_limit", "options_limit")}


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
