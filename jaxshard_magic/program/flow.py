"""From which values a value was made, bodies and loops included."""

from collections.abc import Callable, Iterable

from .ir import Equation, Program, Value
from .trace import DIFFERENTIATED, GRADIENT, VALUE

ALIASES = frozenset(
    {
        *(
            "convert_element_type",
            "reduce_precision",
            "copy",
            "copy_p",
            "name",
            "device_put",
            "sharding_constraint",
        ),
        *("reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "slice"),
        *("random_wrap", "random_unwrap"),
    }
)
MIXING = frozenset({"dot_general", "conv_general_dilated", "gather", "sort", "cumsum"})
_RANDOM = frozenset(
    {"random_wrap", "threefry2x32", "random_bits", "random_split", "random_fold_in", "random_seed"}
)

Through = Callable[[Value, Value, str], bool]  # (value, what it was made from, primitive or "" at a door)


class Flow:
    """`before[v]`: what `v` was made from, each with the primitive's name, or "" at the door of a body.

    `differentiated`: the equations that mark what gradient calls differentiate; `gradients`: what they give back,
    `values`: the scalars that they differentiate. `random`: equations that use a key.
    """

    def __init__(self, program: Program):
        self.program = program
        self.before: list[list[tuple[Value, str]]] = [[] for _ in program.avals]
        self.differentiated: list[Equation] = []
        self.gradients: set[Value] = set()
        self.values: set[Value] = set()
        self.random: list[Equation] = []
        for e in program.equations:
            for door in e.doors:
                pairs = [(a, b) for a, b, _ in (*door.into, *door.out)]
                self._doors([*pairs, *door.loop, *door.skip])
            if not e.doors:
                self._plain(e)

    def _doors(self, pairs: Iterable[tuple[Value | None, Value | None]]) -> None:
        for a, b in pairs:
            if a is not None and b is not None:
                self.before[b].append((a, ""))

    def _plain(self, e: Equation) -> None:
        name = e.name
        sources = [(a, name) for a in e.ins if a is not None]
        for out in e.outs:
            self.before[out].extend(sources)
        if name == "name" and e.params["name"] == DIFFERENTIATED:
            self.differentiated.append(e)
        if name == "name" and e.params["name"] == GRADIENT:
            self.gradients.update(e.outs)
        if name == "name" and e.params["name"] == VALUE:
            self.values.update(e.outs)
        if name in _RANDOM:
            self.random.append(e)

    def back(
        self, start: Iterable[Value | None], through: Through, limit: int | None = None
    ) -> dict[Value, int]:
        """The values met going back from `start`, each with the fewest-first number of equations passed."""
        seen = {v: 0 for v in start if v is not None}
        todo = list(seen)
        for v in todo:
            for w, name in self.before[v]:
                if w not in seen and through(v, w, name):
                    seen[w] = seen[v] + bool(name)
                    todo.append(w)
            if limit is not None and len(seen) > limit:
                break
        return seen


def by_alias(_v: Value, _w: Value, name: str) -> bool:
    """Only what is the same array in another form."""
    return name == "" or name in ALIASES


def by_anything(_v: Value, _w: Value, _name: str) -> bool:
    return True
