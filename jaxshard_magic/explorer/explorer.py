"""`Explorer`: what the user holds and edits; every edit is worked out from shapes, and told to whoever listens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ..comparing.trials import described
from ..config.mesh import DEFAULT_SIMULATED, MeshSpec
from ..config.strategy_text import parse_strategy
from ..errors import ShardError
from ..report import Leaf, MeshInfo
from ..report.sent import PageWidget, Picture, Sendable
from ..specs import parse_spec, validate_spec
from .array import Array, Laid, following, index_of
from .cuts import Axes, Cut, copies, cut_of, fitting, held, spec_of
from .layouts import Layouts
from .line import Line, pattern
from .place import Place
from .stepped import Compiled, Refused, Stepped

if TYPE_CHECKING:
    from ..views.explorer_widget import ExplorerView

OWN, FOLLOWS = "set by hand", "follows one that is set by hand"
NO_STEP = "spmd"  # the strategy of arrays that no step is known of


class Explorer(Sendable):
    """A mesh, a strategy and the PartitionSpecs of arrays to try, and the `line` that asks for them.

        ex.mesh = "data=2 model=4"
        ex["wte.embedding"] = P(None, "model")
        ex.line

    Nothing runs and nothing is compiled but by `compile()`. Made by `%shard explore -o ex`.
    """

    def __init__(
        self,
        arrays: tuple[Array, ...],
        mesh: Axes,
        *,
        place: Place,
        line: Line,
        strategy: str = NO_STEP,
        stepped: Stepped | None = None,
        note: str = "",
    ):
        self.arrays, self.stepped, self.place, self.text_of = arrays, stepped, place, line
        self._axes, self._strategy = dict(mesh), strategy
        self._wishes: dict[int, Cut] = {}
        self._layouts = Layouts(stepped, self._whole() if stepped is None else stepped.laid, note)
        self._listeners: list[Callable[[], None]] = []
        self.compiled: Compiled | Refused | None = None
        self.answers = 0  # how often there was something compiled, or refused
        if stepped is not None and (self.laid.strategy, self.laid.mesh) != (strategy, self._axes):
            self._plan()

    @property
    def axes(self) -> Mapping[str, int]:
        """The mesh's axes with their sizes."""
        return self._axes

    @property
    def mesh(self) -> str:
        """The mesh as it is written; setting it takes what `%mesh` takes. Sizes alone count: no device is needed."""
        return self.place.text(self._axes)

    @mesh.setter
    def mesh(self, text: str) -> None:
        spec = MeshSpec.parse(text)
        place = Place.of_spec(spec)
        axes = dict(spec.resolve(spec.size or spec.count or place.count or DEFAULT_SIMULATED))
        moved, self.place = place != self.place, place
        self.change(axes=axes, anew=moved)

    @property
    def strategy(self) -> str:
        """Which strategy lays out what is not set by hand."""
        return self._strategy

    @strategy.setter
    def strategy(self, text: str) -> None:
        self.change(strategy=text)

    def check_strategy(self, text: str) -> None:
        """Raise ShardError for a text that is no strategy, for a pipeline's, and without a step for all but spmd."""
        if any(part.name == "pp" for part in parse_strategy(text)):
            raise ShardError(
                f"{text}: the stages of a pipeline can't be explored; take a strategy without pp"
            )
        if self.stepped is None and text != NO_STEP:
            raise ShardError(
                f"{text} lays out a step's arrays, and no step has run yet; your own specs are {NO_STEP}"
            )

    def change(
        self,
        *,
        axes: Axes | None = None,
        strategy: str | None = None,
        wishes: Mapping[str, Cut] | None = None,
        anew: bool = False,
    ) -> None:
        """Several edits at once: the sizes of the mesh's axes, the strategy, all that is set by hand, by path. What the
        mesh can't do of that waits for one that can. `anew`: the mesh is of other devices.

        Raises ShardError where one of them can't be, and changes nothing then.
        """
        strategy = self._strategy if strategy is None else strategy.replace(" ", "")
        axes = self._axes if axes is None else dict(axes)
        self.check_strategy(strategy)
        found = self._wishes if wishes is None else dict(self._found(wishes))
        before = self._strategy, list(self._axes.items())
        edited, self._wishes = found != self._wishes, found
        self._strategy, self._axes = strategy, axes
        if anew or before != (strategy, list(axes.items())):
            self._plan()
            edited = True
        if edited:
            self._settle()
            self._tell()

    @property
    def wishes(self) -> Mapping[str, Cut]:
        """What was set by hand, by path: the axes of each dimension, also those that this mesh can't do."""
        return {self.arrays[i].path: cut for i, cut in self._wishes.items()}

    @property
    def note(self) -> str:
        """Why a layout could not be planned, in one line; empty where it could."""
        return self._layouts.note

    @property
    def line(self) -> str:
        """What asks for this layout, as the first line of the step's cell."""
        rules, specs = self._set()
        return self.text_of.text(self._strategy, self.mesh, rules, specs)

    @property
    def cell(self) -> str | None:
        """The last step's cell with this line above it; None where there is none."""
        source = None if self.stepped is None else self.stepped.cell
        return None if source is None else f"{self.line}\n{source}"

    @property
    def devices(self) -> int:
        """How many the mesh takes, however many there are."""
        return prod(self._axes.values())

    @property
    def bytes_per_device(self) -> int:
        """Of all arrays together."""
        return sum(
            held(a.shape, a.bits, cut, self._axes) for a, cut in zip(self.arrays, self.cuts, strict=True)
        )

    @property
    def bytes_now(self) -> int | None:
        """The same of the last run; None without one."""
        return None if self.held_now is None else sum(self.held_now)

    @property
    def held_now(self) -> list[int] | None:
        """Bytes of each array on a device in the last run; None without one."""
        ran = None if self.stepped is None else self.stepped.ran
        if ran is None:
            return None
        return [held(a.shape, a.bits, cut, ran.mesh) for a, cut in zip(self.arrays, ran.cuts, strict=True)]

    @property
    def changed(self) -> list[int]:
        """The arrays, by number, that lie otherwise than the strategy alone would have them: set by hand, or following
        one that is."""
        return [i for i in self._otherwise if self._is_set(i)]

    @property
    def moved(self) -> list[int]:
        """Those that the strategy itself lays out otherwise because of that, as far as it was planned."""
        return [i for i in self._otherwise if not self._is_set(i)]

    @property
    def own(self) -> list[Cut]:
        """The strategy's own layout on this mesh; of one that could not be planned what still divides."""
        laid = self.laid.cuts
        return [fitting(cut, a.shape, self._axes) for cut, a in zip(laid, self.arrays, strict=True)]

    @property
    def cuts(self) -> list[Cut]:
        """How each array lies: as it was set by hand, as what it follows, or as the strategy has it."""
        found, mesh, fixed = self.own if self.settled is None else list(self.settled.cuts), self._axes, {}
        for i, wish in self._wishes.items():
            found[i] = fitting(wish, self.arrays[i].shape, mesh)
            fixed |= dict(zip(self.arrays[i].classes, found[i], strict=True))
        for i, a in enumerate(self.arrays):
            if i not in self._wishes and not fixed.keys().isdisjoint(a.classes):
                wish = tuple(fixed.get(c, axes) for c, axes in zip(a.classes, found[i], strict=True))
                found[i] = fitting(wish, a.shape, mesh)
        return found

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The arrays as a Report lists them."""
        mesh, laid, edited = self._axes, self.settled or self.laid, set(self.changed)
        rows = zip(self.arrays, self.cuts, laid.whys, strict=True)
        return tuple(
            Leaf(
                path=a.path,
                role=a.role,
                shape=a.shape,
                dtype=a.dtype,
                spec=tuple(axes if len(axes) > 1 else axes[0] if axes else None for axes in cut),
                bytes=a.bytes,
                bytes_per_device=held(a.shape, a.bits, cut, mesh),
                why=OWN if i in self._wishes and i in edited else FOLLOWS if i in edited else why,
            )
            for i, (a, cut, why) in enumerate(rows)
        )

    @property
    def laid(self) -> Laid:
        """The strategy's layout as it was planned last."""
        return self._layouts.laid

    @property
    def settled(self) -> Laid | None:
        """The layout with what is set by hand, as it was planned; None where it was not."""
        return self._layouts.settled

    @property
    def mesh_info(self) -> MeshInfo:
        """The mesh as a Report has it; of devices that need not be there."""
        ids = self.place.ids(self._axes, self.stepped and self.stepped.mesh)
        return MeshInfo(dict(self._axes), "", "", "topology", ids, 1)

    def copies(self, path: str) -> int:
        """On how many devices each slice of an array lies."""
        return copies(self.cuts[self.index(path)], self._axes)

    def __getitem__(self, path: str) -> PartitionSpec:
        """How an array lies. Raises ShardError for one that is not there."""
        return spec_of(self.cuts[self.index(path)])

    def __setitem__(self, path: str, spec: PartitionSpec | str) -> None:
        """Set an array's spec, and that of those which follow it. Raises ShardError for one that does not fit."""
        i = self.index(path)
        array = self.arrays[i]
        spec = parse_spec(spec) if isinstance(spec, str) else spec
        mesh = AbstractMesh(tuple(self._axes.values()), tuple(self._axes))
        validate_spec(spec, array.shape, mesh, array.path)
        self._wish({**self._without(i), i: cut_of(spec, len(array.shape))})

    def __delitem__(self, path: str) -> None:
        """Leave an array to the strategy again."""
        self._wish(self._without(self.index(path)))

    def __len__(self) -> int:
        return len(self.arrays)

    def reset(self) -> None:
        """Leave all arrays to the strategy."""
        self._wish({})

    def compile(self) -> Compiled:
        """Compile the step with this line, and run nothing; `compiled` is then the same.

        Raises ShardError where it can't be compiled, and without a step.
        """
        if self.stepped is None:
            raise ShardError("there is no step to compile: run a %%shard cell, then %shard explore")
        self._settle(anyway=True)
        found = self.stepped.compile(self.line, self.place.mesh(self._axes, exactly=True))
        self._answered(found)
        return found

    def try_to_compile(self) -> None:
        """As `compile`, without an exception: `compiled` is then the reason where it can't be."""
        line = self.line
        try:
            self.compile()
        except ShardError as error:
            self._answered(Refused(line, " ".join(str(error).split())))
        except KeyboardInterrupt:
            self._answered(Refused(line, "interrupted"))
        except Exception as error:  # the step's own, or a compiler's
            self._answered(Refused(line, described(error)))

    def index(self, path: str) -> int:
        """The number of an array, by its path or an end of it. Raises ShardError where none has it, or several."""
        return index_of(self.arrays, path)

    def follows(self, path: str) -> list[str]:
        """The arrays that lie as this one wherever it is put: of a parameter its moments."""
        return [self.arrays[i].path for i in following(self.arrays, self.index(path))]

    def listen(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call it after each change; what is returned ends that."""
        self._listeners.append(call)
        return lambda: self._listeners.remove(call)

    @cached_property
    def view(self) -> "ExplorerView":
        """The widget, the same each time."""
        from ..views.explorer_widget import ExplorerView

        return ExplorerView(self)

    def _ways(self) -> tuple[Any, Any, Any]:
        from ..views import explorer

        return explorer.to_text, explorer.to_html, explorer.page

    def _pictures(self) -> Mapping[str, Picture]:
        from ..views.pictures.layout import of_explorer

        return of_explorer(self)

    def _live(self) -> Sequence[PageWidget]:
        from ..views.explorer_payload import live

        return [live(self)]

    def _short(self) -> str:
        return f"<Explorer: {self.line}>"

    def _found(self, wishes: Mapping[str, Cut]) -> Iterator[tuple[int, Cut]]:
        for path, cut in wishes.items():
            i = self.index(path)
            if len(cut) != len(self.arrays[i].shape):
                raise ShardError(
                    f"{self.arrays[i].path} has {len(self.arrays[i].shape)} dimensions, not {len(cut)}"
                )
            yield i, tuple(map(tuple, cut))

    def _wish(self, wishes: dict[int, Cut]) -> None:
        if wishes != self._wishes:
            self._wishes = wishes
            self._settle()
            self._tell()

    def _without(self, i: int) -> dict[int, Cut]:
        """What is set by hand but for an array and those which share a dimension with it."""
        classes = set(self.arrays[i].classes)
        shared = {j for j in self._wishes if not classes.isdisjoint(self.arrays[j].classes)} | {i}
        return {j: cut for j, cut in self._wishes.items() if j not in shared}

    def _set(self) -> tuple[dict[str, Cut], dict[str, Cut]]:
        """Rules by their expression and specs by path, of what differs from the strategy's own layout; a spec where
        another one, which beats every rule, says where the array lies."""
        own, cuts = self.own, self.cuts
        paths = [a.path for a in self.arrays]
        rules, specs = {}, {}
        for i in self._wishes:
            if cuts[i] == own[i]:
                continue
            if self.laid.whys[i].startswith("given "):
                specs[paths[i]] = cuts[i]
            else:
                alike = [paths[j] for j in following(self.arrays, i) if cuts[j] == cuts[i]]
                rules[pattern(paths[i], paths, alike)] = cuts[i]
        return rules, specs

    @property
    def _otherwise(self) -> list[int]:
        return [i for i, (cut, base) in enumerate(zip(self.cuts, self.own, strict=True)) if cut != base]

    def _is_set(self, i: int) -> bool:
        """Whether an array is set by hand, or has a dimension of one that is."""
        classes = {c for j in self._wishes for c in self.arrays[j].classes}
        return i in self._wishes or not classes.isdisjoint(self.arrays[i].classes)

    def _plan(self) -> None:
        """How the strategy lays the arrays out on this mesh."""
        if self.stepped is None:
            self._layouts.laid = self._whole()
        else:
            self._layouts.plan(self.text_of.text(self._strategy, self.mesh, {}, {}), self._mesh)

    def _settle(self, *, anyway: bool = False) -> None:
        """How the others lie beside what is set by hand."""
        if self.stepped is not None:
            self._layouts.settle(self.line if any(self._set()) else None, self._mesh, anyway=anyway)

    def _mesh(self) -> Mesh:
        return self.place.mesh(self._axes)

    def _whole(self) -> Laid:
        cuts = tuple(((),) * len(a.shape) for a in self.arrays)
        return Laid(self._strategy, dict(self._axes), cuts, ("",) * len(self.arrays))

    def _answered(self, found: Compiled | Refused) -> None:
        self.compiled, self.answers = found, self.answers + 1
        self._tell()

    def _tell(self) -> None:
        for call in list(self._listeners):
            call()
