"""Meshes of a notebook: the mesh of a line, of the last `%mesh`, or of all devices; and the display of a mesh."""

from dataclasses import replace
from typing import TYPE_CHECKING

from IPython.display import display

from .displays import say
from .options import ShardOptions

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from jax.sharding import Mesh

    from ..config.mesh import BuiltMesh
    from .session import ShardSession


class Meshes:
    """Source of meshes for the lines of one notebook.

    If the CPU backend restarts with another number of devices, arrays of the notebook are moved to the new devices.

    Args:
        shell: IPython's shell.
        session: State between cells, with the mesh of the last `%mesh`.
    """

    def __init__(self, shell: "InteractiveShell", session: "ShardSession"):
        self._shell, self._session = shell, session
        self._hinted = False  # whether the hint about `%mesh` was printed

    def for_line(self, options: ShardOptions) -> "Mesh":
        """Return the mesh for a `%%shard` line: its own, otherwise the notebook's, otherwise one of all devices.

        Raises:
            ShardError: The line is impossible, as far as the line alone shows: strategy, specs, rules, options, chip or
                axes.
        """
        from ..config.request import step_options
        from ..config.strategy_text import parse_strategy, part_axes
        from ..hardware import chip
        from ..specs import parse_assignment, parse_rule

        parts = parse_strategy(options.strategy)
        for text in options.specs:
            parse_assignment(text)
        for text in options.rules:
            parse_rule(text)
        step_options(options.strategy, options.step_options)
        if options.on is not None:
            chip(options.on)
        if options.mesh:
            mesh = self.build(options.mesh).mesh
        elif current := self.current():
            mesh = current.mesh
        else:
            mesh = self._default(options)
        part_axes(parts, mesh, options.step_options.get("stages"))
        return mesh

    def for_comparison(self, options: ShardOptions) -> "Mesh":
        """Return a mesh of the devices on which a comparison or a search runs."""
        if options.on is not None:
            from ..hardware import chip

            chip(options.on)
        if options.mesh:
            return self.build(options.mesh).mesh
        if current := self.current():
            return current.mesh
        return self._default(replace(options, strategy="dp", step_options={}))

    def _default(self, options: ShardOptions) -> "Mesh":
        """Return a mesh of all devices, with the axes of the strategy, and print its axes the first time."""
        from .. import api
        from ..config.mesh import axes_text

        built = api.default_mesh(
            options.strategy, stages=options.step_options.get("stages"), namespaces=[self._shell.user_ns]
        )
        axes = axes_text(built.mesh.shape.items())
        hint = () if self._hinted else (f"no %mesh yet, taking {axes}",)
        self._hinted = True
        if said := (*hint, *built.notes):
            say("; ".join(said))
        return built.mesh

    def build(self, text: str) -> "BuiltMesh":
        """Build a mesh from its text, and print notes about the devices taken."""
        from .. import api

        built = api.build_mesh(text, namespaces=[self._shell.user_ns])
        for note in built.notes:
            say(note)
        api.get_ready(built.mesh)
        return built

    def current(self) -> "BuiltMesh | None":
        """Return the mesh of the last `%mesh`; None before the first.

        The mesh is built again if a later one has restarted the CPU backend, with new devices.
        """
        import jax

        from ..config.mesh import axes_text

        built = self._session.mesh
        # Devices of a target are never among `jax.devices()`.
        if built is None or built.source == "topology":
            return built
        first = built.mesh.devices.flat[0]
        # A restarted CPU backend has new Device objects; the mesh still has the old ones.
        if first not in jax.devices(first.platform):
            axes = axes_text(built.mesh.shape.items())
            self._session.mesh = self.build(f"cpu:{built.mesh.size} {axes}")
        return self._session.mesh


def show_mesh(built: "BuiltMesh") -> None:
    """Display a mesh: devices on a grid of its axes."""
    from ..analysis.mesh_info import mesh_info
    from ..display import writable
    from ..views.meshgrid import mesh_html, mesh_text

    info = mesh_info(built.mesh, built.source)
    display({"text/plain": writable(mesh_text(info)), "text/html": mesh_html(info)}, raw=True)
