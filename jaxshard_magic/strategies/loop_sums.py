"""The sums that are reduced where a loop ends, and whose they are."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..program.ir import Equation, Value
from ..program.labels import GRADIENT
from ..program.phases import BACKWARD, phases
from .deferred import Deferred
from .layout import Layout


@dataclass(frozen=True)
class LoopSum:
    """`path`: the equation in the loop that made the parts, or the first of them, after those whose bodies it is in,
    from the loop inwards. `gradient`: it belongs to the backward pass."""

    path: tuple[Equation, ...]
    gradient: bool


def loop_sums(
    layout: Layout, deferred: Deferred, labels: Mapping[int, str]
) -> dict[tuple[int, int], LoopSum]:
    """What loops add up in parts and the rest of the step needs whole, by the index of the loop's equation and the
    position among its results. An equation whose gradient is known by its label tells more than another."""
    program, found = layout.program, {}
    if not deferred.values:
        return found
    enclosing = {i.index: e for e in program.equations for door in e.doors for i in door.scope.equations}
    made_by = {program.equations[i].outs[0]: program.equations[i] for i in deferred.makers}
    phase = phases(program, layout.flow)

    def rank(e: Equation) -> tuple[bool, bool]:
        return not labels.get(e.index, "").startswith(GRADIENT), phase.get(e.index) != BACKWARD

    def in_parts(_v: Value, w: Value, _name: str) -> bool:
        return w in deferred.values

    for e in program.equations if made_by else ():
        for k, (inside, outside) in enumerate(_results(e)):
            if inside in deferred.values and outside not in deferred.values:
                met = layout.flow.back([inside], in_parts)
                maker = min((made_by[v] for v in met if v in made_by), key=rank)
                path = [maker]
                while (outer := enclosing[path[0].index]) is not e:
                    path.insert(0, outer)
                found[e.index, k] = LoopSum(tuple(path), phase.get(maker.index) == BACKWARD)
    return found


def _results(e: Equation) -> list[tuple[Value | None, Value | None]]:
    return [(a, b) for a, b, _ in e.doors[0].out] if e.name == "scan" else []
