"""The mesh of a line: its own, the notebook's, or one of all devices; and how a mesh is shown."""

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
    """The meshes of one notebook, whose arrays are moved along where its devices are made anew."""

    def __init__(self, shell: "InteractiveShell", session: "ShardSession"):
        self._shell, self._session = shell, session
        self._hinted = False  # that a mesh may be made: said once

    def wanted(self, options: ShardOptions) -> "Mesh":
        """The line's mesh, else the notebook's, else one of all devices.

        Raises ShardError for what the line alone tells, before the cell runs.
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
            mesh = self.built(options.mesh).mesh
        elif current := self.current():
            mesh = current.mesh
        else:
            mesh = self._default(options)
        part_axes(parts, mesh, options.step_options.get("stages"))
        return mesh

    def devices(self, options: ShardOptions) -> "Mesh":
        """The mesh whose devices a comparison is on."""
        if options.on is not None:
            from ..hardware import chip

            chip(options.on)
        if options.mesh:
            return self.built(options.mesh).mesh
        if current := self.current():
            return current.mesh
        return self._default(replace(options, strategy="dp", step_options={}))

    def _default(self, options: ShardOptions) -> "Mesh":
        from .. import api
        from ..config.mesh_text import axes_text

        built = api.default_mesh(
            options.strategy, stages=options.step_options.get("stages"), namespaces=[self._shell.user_ns]
        )
        axes = axes_text(built.mesh.shape.items())
        hint = () if self._hinted else (f"no %mesh yet, taking {axes}",)
        self._hinted = True
        if said := (*hint, *built.notes):
            say("; ".join(said))
        return built.mesh

    def built(self, text: str) -> "BuiltMesh":
        from .. import api

        built = api.build_mesh(text, namespaces=[self._shell.user_ns])
        for note in built.notes:
            say(note)
        api.get_ready(built.mesh)
        return built

    def current(self) -> "BuiltMesh | None":
        """The mesh of `%mesh`; made anew where a later one restarted the CPU backend under it."""
        import jax

        from ..config.mesh_text import axes_text

        built = self._session.mesh
        if built is None or built.source == "topology":
            return built
        first = built.mesh.devices.flat[0]
        if first not in jax.devices(first.platform):
            axes = axes_text(built.mesh.shape.items())
            self._session.mesh = self.built(f"cpu:{built.mesh.size} {axes}")
        return self._session.mesh


def show(built: "BuiltMesh") -> None:
    from ..analysis.mesh_info import mesh_info
    from ..views.meshgrid import mesh_html, mesh_text
    from ..views.terminal import writable

    info = mesh_info(built.mesh, built.source)
    display({"text/plain": writable(mesh_text(info)), "text/html": mesh_html(info)}, raw=True)
