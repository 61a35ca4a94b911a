"""`Explorer`: an editable layout of arrays, computed from shapes alone."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from math import prod
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ..config.mesh import DEFAULT_SIMULATED, MeshSpec
from ..config.strategy_text import parse_strategy
from ..display import renderer
from ..errors import ShardError
from ..report import Leaf, MeshInfo
from ..report.exports import Exportable
from ..search.trials import described
from ..specs import parse_spec, validate_spec
from .arrays import ExploredArray, ExploredLayout, index_of, linked_arrays
from .device_source import DeviceSource
from .explored_step import CompiledLine, ExploredStep, PlannedLayouts, RefusedLine
from .line import ShardLine, path_regex
from .shard_sizes import DimAxes, MeshAxes, dim_axes, fit_to_mesh, num_replicas, shard_bytes, spec_of

OWN, FOLLOWS = "set by hand", "follows one that is set by hand"
NO_STEP = "spmd"  # strategy of arrays without a step


class Explorer(Exportable):
    """A mesh, a strategy and PartitionSpecs of arrays to try, with the `line` that asks for them.

        ex.mesh = "data=2 model=4"
        ex["wte.embedding"] = P(None, "model")
        ex.line

    Only `compile()` compiles, and nothing runs. `%shard explore -o ex` makes an explorer.

    Args:
        arrays: Arrays to lay out.
        mesh: Mesh axes with their sizes.
        place: Source of the mesh's devices.
        line: Parts of the `%%shard` line that the explorer does not edit.
        strategy: Strategy for all arrays that are not set by hand.
        stepped: The step with these arrays; None for arrays without a step.
        note: Sentence for the user on the initial layout.
    """

    def __init__(
        self,
        arrays: tuple[ExploredArray, ...],
        mesh: MeshAxes,
        *,
        place: DeviceSource,
        line: ShardLine,
        strategy: str = NO_STEP,
        stepped: ExploredStep | None = None,
        note: str = "",
    ):
        self.arrays, self.stepped, self.place, self.text_of = arrays, stepped, place, line
        self._axes, self._strategy = dict(mesh), strategy
        self._wishes: dict[int, DimAxes] = {}
        self._layouts = PlannedLayouts(stepped, self._whole() if stepped is None else stepped.layout, note)
        self._listeners: list[Callable[[], None]] = []
        self.compiled: CompiledLine | RefusedLine | None = None
        self.answers = 0  # number of compile results, errors included
        if stepped is not None and (self.laid.strategy, self.laid.mesh) != (strategy, self._axes):
            self._plan()

    @property
    def axes(self) -> Mapping[str, int]:
        """Mesh axes with their sizes."""
        return self._axes

    @property
    def mesh(self) -> str:
        """Mesh as text. Assignments take the text of `%mesh`; the mesh may have more devices than the machine."""
        return self.place.text(self._axes)

    @mesh.setter
    def mesh(self, text: str) -> None:
        spec = MeshSpec.parse(text)
        place = DeviceSource.of_spec(spec)
        axes = dict(spec.resolve(spec.size or spec.count or place.count or DEFAULT_SIMULATED))
        moved, self.place = place != self.place, place
        self.change(axes=axes, anew=moved)

    @property
    def strategy(self) -> str:
        """Strategy for all arrays that are not set by hand."""
        return self._strategy

    @strategy.setter
    def strategy(self, text: str) -> None:
        self.change(strategy=text)

    def check_strategy(self, text: str) -> None:
        """Check a strategy text.

        Raises:
            ShardError: The text is no strategy, has pipeline stages, or is not `spmd` while no step is known.
        """
        if any(part.name == "pp" for part in parse_strategy(text)):
            raise ShardError(f"{text}: the stages of a pipeline can't be explored; take a strategy without pp")
        if self.stepped is None and text != NO_STEP:
            raise ShardError(f"{text} lays out a step's arrays, and no step has run yet; your own specs are {NO_STEP}")

    def change(
        self,
        *,
        axes: MeshAxes | None = None,
        strategy: str | None = None,
        wishes: Mapping[str, DimAxes] | None = None,
        anew: bool = False,
    ) -> None:
        """Apply several edits at once.

        Specs that the mesh does not allow are kept for a later mesh.

        Args:
            axes: Mesh axes with their sizes; None leaves them.
            strategy: Strategy text; None leaves it.
            wishes: Axes of each dimension by path, for all arrays set by hand; None leaves them.
            anew: Whether the mesh is of other devices.

        Raises:
            ShardError: An edit is invalid. Nothing is changed then.
        """
        strategy = self._strategy if strategy is None else strategy.replace(" ", "")
        axes = self._axes if axes is None else dict(axes)
        # All checks come before the first assignment: an invalid edit changes nothing.
        self.check_strategy(strategy)
        found = self._wishes if wishes is None else dict(self._found(wishes))
        # As a list, because the order of mesh axes counts.
        before = self._strategy, list(self._axes.items())
        edited, self._wishes = found != self._wishes, found
        self._strategy, self._axes = strategy, axes
        if anew or before != (strategy, list(axes.items())):
            self._plan()
            edited = True
        if edited:
            self._settle()
            self._notify()

    @property
    def wishes(self) -> Mapping[str, DimAxes]:
        """Axes of each dimension of the arrays set by hand, by path, including axes not possible on the mesh."""
        return {self.arrays[i].path: cut for i, cut in self._wishes.items()}

    @property
    def note(self) -> str:
        """Reason why a layout could not be planned, in one line; empty if it could."""
        return self._layouts.note

    @property
    def line(self) -> str:
        """First line of a cell, `%%shard ...`, for this layout."""
        rules, specs = self._rules_and_specs()
        return self.text_of.text(self._strategy, self.mesh, rules, specs)

    @property
    def cell(self) -> str | None:
        """Source of the last step's cell under this line; None without a step in a cell."""
        source = None if self.stepped is None else self.stepped.cell
        return None if source is None else f"{self.line}\n{source}"

    @property
    def devices(self) -> int:
        """Number of devices of the mesh, available or not."""
        return prod(self._axes.values())

    @property
    def bytes_per_device(self) -> int:
        """Bytes of all arrays on one device."""
        return sum(shard_bytes(a.shape, a.bits, cut, self._axes) for a, cut in zip(self.arrays, self.cuts, strict=True))

    @property
    def bytes_now(self) -> int | None:
        """Bytes of all arrays on one device in the last run; None without a run."""
        return None if self.held_now is None else sum(self.held_now)

    @property
    def held_now(self) -> list[int] | None:
        """Bytes of each array on one device in the last run; None without a run."""
        ran = None if self.stepped is None else self.stepped.run_layout
        if ran is None:
            return None
        return [shard_bytes(a.shape, a.bits, cut, ran.mesh) for a, cut in zip(self.arrays, ran.cuts, strict=True)]

    @property
    def changed(self) -> list[int]:
        """Indices of arrays laid out by hand, directly or linked, in another way than the strategy's own."""
        return [i for i in self._otherwise if self._is_set(i)]

    @property
    def moved(self) -> list[int]:
        """Indices of other arrays with a new layout from the strategy because of edits by hand, as far as it was
        planned."""
        return [i for i in self._otherwise if not self._is_set(i)]

    @property
    def own(self) -> list[DimAxes]:
        """Layout by the strategy alone on the mesh. Without a plan for the mesh: the last layout, as far as axes still
        divide."""
        laid = self.laid.cuts
        return [fit_to_mesh(cut, a.shape, self._axes) for cut, a in zip(laid, self.arrays, strict=True)]

    @property
    def cuts(self) -> list[DimAxes]:
        """Mesh axes of each dimension, by array: set by hand, linked to an array set by hand, or from the strategy."""
        found, mesh, fixed = self.own if self.settled is None else list(self.settled.cuts), self._axes, {}
        for i, wish in self._wishes.items():
            found[i] = fit_to_mesh(wish, self.arrays[i].shape, mesh)
            fixed |= dict(zip(self.arrays[i].classes, found[i], strict=True))
        for i, a in enumerate(self.arrays):
            if i not in self._wishes and not fixed.keys().isdisjoint(a.classes):
                wish = tuple(fixed.get(c, axes) for c, axes in zip(a.classes, found[i], strict=True))
                found[i] = fit_to_mesh(wish, a.shape, mesh)
        return found

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Arrays in the form of a Report."""
        mesh, laid, edited = self._axes, self.settled or self.laid, set(self.changed)
        rows = zip(self.arrays, self.cuts, laid.reasons, strict=True)
        return tuple(
            Leaf(
                path=a.path,
                role=a.role,
                shape=a.shape,
                dtype=a.dtype,
                spec=tuple(axes if len(axes) > 1 else axes[0] if axes else None for axes in cut),
                bytes=a.bytes,
                bytes_per_device=shard_bytes(a.shape, a.bits, cut, mesh),
                why=OWN if i in self._wishes and i in edited else FOLLOWS if i in edited else why,
            )
            for i, (a, cut, why) in enumerate(rows)
        )

    @property
    def laid(self) -> ExploredLayout:
        """Last planned layout of the strategy alone."""
        return self._layouts.strategy_layout

    @property
    def settled(self) -> ExploredLayout | None:
        """Planned layout with the edits by hand; None if not planned."""
        return self._layouts.edited_layout

    @property
    def mesh_info(self) -> MeshInfo:
        """Mesh in the form of a Report. Its devices need not exist."""
        ids = self.place.ids(self._axes, self.stepped and self.stepped.mesh)
        return MeshInfo(dict(self._axes), "", "", "topology", ids, 1)

    def copies(self, path: str) -> int:
        """Return the number of devices that have each shard of an array."""
        return num_replicas(self.cuts[self.index(path)], self._axes)

    def __getitem__(self, path: str) -> PartitionSpec:
        """Return the PartitionSpec of an array. Raises ShardError for an unknown path."""
        return spec_of(self.cuts[self.index(path)])

    def __setitem__(self, path: str, spec: PartitionSpec | str) -> None:
        """Set the spec of an array and of all arrays linked to it. Raises ShardError for a spec that does not fit."""
        i = self.index(path)
        array = self.arrays[i]
        spec = parse_spec(spec) if isinstance(spec, str) else spec
        # Axis sizes are enough for the check: the mesh may have more devices than the machine.
        mesh = AbstractMesh(tuple(self._axes.values()), tuple(self._axes))
        validate_spec(spec, array.shape, mesh, array.path)
        self._wish({**self._without(i), i: dim_axes(spec, len(array.shape))})

    def __delitem__(self, path: str) -> None:
        """Return an array to the strategy."""
        self._wish(self._without(self.index(path)))

    def __len__(self) -> int:
        return len(self.arrays)

    def reset(self) -> None:
        """Return all arrays to the strategy."""
        self._wish({})

    def compile(self) -> CompiledLine:
        """Compile the step with this line, without running it; `compiled` is then the same result.

        Raises:
            ShardError: The line can't be compiled, or there is no step.
        """
        if self.stepped is None:
            raise ShardError("there is no step to compile: run a %%shard cell, then %shard explore")
        # The line depends on the layout, whose planning may have been skipped as slow.
        self._settle(anyway=True)
        found = self.stepped.compile(self.line, self.place.mesh(self._axes, exactly=True))
        self._answered(found)
        return found

    def try_to_compile(self) -> None:
        """Compile without raising exceptions: on failure `compiled` has the reason."""
        line = self.line
        try:
            self.compile()
        except ShardError as error:
            self._answered(RefusedLine(line, " ".join(str(error).split())))
        except KeyboardInterrupt:
            self._answered(RefusedLine(line, "interrupted"))
        except Exception as error:  # raised by the step's code or by a compiler
            self._answered(RefusedLine(line, described(error)))

    def index(self, path: str) -> int:
        """Return the index of an array by path or the end of the path. Raises ShardError if none or several match."""
        return index_of(self.arrays, path)

    def follows(self, path: str) -> list[str]:
        """Return the paths of all arrays always laid out as this array, such as the moments of a parameter."""
        return [self.arrays[i].path for i in linked_arrays(self.arrays, self.index(path))]

    def listen(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call `call` after each change. Returns a function that ends this."""
        self._listeners.append(call)
        return lambda: self._listeners.remove(call)

    @cached_property
    def view(self) -> Any:
        """Widget of this explorer, the same object each time."""
        return renderer(self, "widget")(self)

    def _summary_line(self) -> str:
        return f"<Explorer: {self.line}>"

    def _found(self, wishes: Mapping[str, DimAxes]) -> Iterator[tuple[int, DimAxes]]:
        """Yield the wishes by array index. Raises ShardError for an unknown path or another number of dimensions."""
        for path, cut in wishes.items():
            i = self.index(path)
            if len(cut) != len(self.arrays[i].shape):
                raise ShardError(f"{self.arrays[i].path} has {len(self.arrays[i].shape)} dimensions, not {len(cut)}")
            yield i, tuple(map(tuple, cut))

    def _wish(self, wishes: dict[int, DimAxes]) -> None:
        """Replace the specs set by hand and plan again."""
        if wishes != self._wishes:
            self._wishes = wishes
            self._settle()
            self._notify()

    def _without(self, i: int) -> dict[int, DimAxes]:
        """Return the specs set by hand, except for an array and all arrays with a common dimension class."""
        classes = set(self.arrays[i].classes)
        shared = {j for j in self._wishes if not classes.isdisjoint(self.arrays[j].classes)} | {i}
        return {j: cut for j, cut in self._wishes.items() if j not in shared}

    def _rules_and_specs(self) -> tuple[dict[str, DimAxes], dict[str, DimAxes]]:
        """Return the rules by regular expression and the specs by path that differ from the strategy's own layout."""
        own, cuts = self.own, self.cuts
        paths = [a.path for a in self.arrays]
        rules, specs = {}, {}
        for i in self._wishes:
            if cuts[i] == own[i]:
                continue
            # A spec in the cell's own line takes precedence over every rule, so only a spec can replace it.
            if self.laid.reasons[i].startswith("given "):
                specs[paths[i]] = cuts[i]
            else:
                alike = [paths[j] for j in linked_arrays(self.arrays, i) if cuts[j] == cuts[i]]
                rules[path_regex(paths[i], paths, alike)] = cuts[i]
        return rules, specs

    @property
    def _otherwise(self) -> list[int]:
        """Indices of the arrays with another layout than the strategy's own."""
        return [i for i, (cut, base) in enumerate(zip(self.cuts, self.own, strict=True)) if cut != base]

    def _is_set(self, i: int) -> bool:
        """Return whether an array is set by hand, or has a dimension of an array that is."""
        classes = {c for j in self._wishes for c in self.arrays[j].classes}
        return i in self._wishes or not classes.isdisjoint(self.arrays[i].classes)

    def _plan(self) -> None:
        """Plan the layout of the strategy alone on this mesh."""
        if self.stepped is None:
            self._layouts.strategy_layout = self._whole()
        else:
            self._layouts.plan(self.text_of.text(self._strategy, self.mesh, {}, {}), self._mesh)

    def _settle(self, *, anyway: bool = False) -> None:
        """Plan the layout of all other arrays under the edits by hand; with `anyway` also where planning is slow."""
        if self.stepped is not None:
            self._layouts.plan_edited(self.line if any(self._rules_and_specs()) else None, self._mesh, anyway=anyway)

    def _mesh(self) -> Mesh:
        return self.place.mesh(self._axes)

    def _whole(self) -> ExploredLayout:
        """Return the layout with all arrays replicated."""
        cuts = tuple(((),) * len(a.shape) for a in self.arrays)
        return ExploredLayout(self._strategy, dict(self._axes), cuts, ("",) * len(self.arrays))

    def _answered(self, found: CompiledLine | RefusedLine) -> None:
        """Record a compile result and call the listeners."""
        self.compiled, self.answers = found, self.answers + 1
        self._notify()

    def _notify(self) -> None:
        # A listener may remove itself during the loop.
        for call in list(self._listeners):
            call()
