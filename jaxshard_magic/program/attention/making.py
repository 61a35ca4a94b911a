"""Two products with a softmax between them put together as an `Attention`: which dimension of theirs is which."""

from dataclasses import dataclass, replace

from ..dimensions import Dimensions
from ..ir import Equation, Program
from .attention import Attention, Operand
from .chain import Chain
from .scored import scored
from .softmax import Softmax
from .trail import Label, Labels, Trail


@dataclass(frozen=True)
class Roles:
    """The products of an attention, and the labels of its dimensions, those of size 1 left out.

    `out` is the product with the values, operand `side` of it the probabilities, whose dimensions have their places as
    labels; `scores` that with the keys, operand `key` of it; `labels` of its result. `batch`, `groups`: in the order of
    `scores`.
    """

    out: Equation
    side: int
    scores: Equation
    key: int
    labels: tuple[int | None, ...]
    batch: tuple[int, ...]
    groups: tuple[int, ...]
    query_at: int
    key_at: int

    @property
    def places(self) -> dict[int, int]:
        """The place of each label among (batch..., groups..., query, key)."""
        return {x: i for i, x in enumerate((*self.batch, *self.groups, self.query_at, self.key_at))}


def roles_of(
    program: Program,
    dims: Dimensions,
    out: Equation,
    side: int,
    softmax: Softmax,
    scores: Equation,
    named: Labels,
) -> Roles | None:
    """The roles of dimensions in an attention among positions of one sequence; None where the two products are none.
    `named`: the labels of the product with the keys."""
    weigh, meet, shapes = out.contraction, scores.contraction, program.shapes
    assert weigh is not None and meet is not None
    probabilities = out.ins[side]
    if probabilities is None or [pair[side] for pair in weigh.contracted] != [softmax.along]:
        return None
    sizes = dict(enumerate(shapes[probabilities]))
    if any(not isinstance(x, int) for x, z in zip(named, shapes[scores.outs[0]], strict=True) if z > 1):
        return None
    labels = tuple(x if isinstance(x, int) and sizes[x] > 1 else None for x in named)
    free = [{x: d for d, o in pairs if (x := labels[o]) is not None} for pairs in (meet.left, meet.right)]
    key = next((k for k in (0, 1) if list(free[k]) == [softmax.along]), None)
    if key is None:
        return None
    batch = tuple(x for x in (labels[o] for *_, o in meet.batch) if x is not None)
    shared = {triple[side] for triple in weigh.batch if sizes[triple[side]] > 1}
    others = {d for d, _ in (weigh.left, weigh.right)[side] if sizes[d] > 1}
    if shared != set(batch) or others != set(free[1 - key]):
        return None
    query, keys = scores.ins[1 - key], scores.ins[key]
    position = dims.of(keys)[free[key][softmax.along]]
    same = [
        x
        for x, d in free[1 - key].items()
        if sizes[x] == sizes[softmax.along] and dims.of(query)[d] == position
    ]
    if len(same) != 1:
        return None
    groups = tuple(x for x in free[1 - key] if x != same[0])
    return Roles(out, side, scores, key, labels, batch, groups, same[0], softmax.along)


def made(trail: Trail, roles: Roles, softmax: Softmax, chain: Chain) -> Attention | Equation | None:
    """The attention; the equation that stands in the way of one; None for products that aren't those of one."""
    program, places, out, scores = trail.program, roles.places, roles.out, roles.scores
    operands = _operands(program, roles)
    if operands is None:
        return None
    found = scored(trail, places, softmax, chain)
    if isinstance(found, Equation):
        return found
    weigh = out.contraction
    assert weigh is not None
    width = len(places) - 1
    order: list[int | None] = [None] * len(program.shapes[out.outs[0]])
    for triple in weigh.batch:
        order[triple[2]] = places.get(triple[roles.side])
    for d, o in (weigh.left, weigh.right)[roles.side]:
        order[o] = places.get(d)
    for d, o in (weigh.left, weigh.right)[1 - roles.side]:
        order[o] = width if d == operands[2].dims[-1] else None
    attention = Attention(
        equation=out.index,
        query=operands[0],
        key=operands[1],
        value=operands[2],
        batch=len(roles.batch),
        groups=len(roles.groups),
        scale=found.scale,
        span=found.span,
        conditions=found.conditions,
        fill=found.fill,
        order=tuple(order),
        precision=(scores.params.get("precision"), out.params.get("precision")),
        change=found.change,
        exact=found.exact,
        factors=found.factors,
    )
    return _without_repeats(trail, attention)


def _operands(program: Program, roles: Roles) -> tuple[Operand, Operand, Operand] | None:
    """Queries, keys and values with their dimensions in order."""
    meet, weigh, labels, shapes = (
        roles.scores.contraction,
        roles.out.contraction,
        roles.labels,
        program.shapes,
    )
    assert meet is not None and weigh is not None
    key, side = roles.key, roles.side
    query, keys, values = roles.scores.ins[1 - key], roles.scores.ins[key], roles.out.ins[1 - side]
    assert query is not None and keys is not None and values is not None
    sides: tuple[dict[int, int], dict[int, int]] = {}, {}
    for left, right, o in meet.batch:
        if (x := labels[o]) is not None:
            sides[0][x], sides[1][x] = left, right
    for k, pairs in enumerate((meet.left, meet.right)):
        sides[k].update({x: d for d, o in pairs if (x := labels[o]) is not None})
    widths = [pair for pair in meet.contracted if shapes[keys][pair[key]] > 1]
    free = [d for d, _ in (weigh.left, weigh.right)[1 - side] if shapes[values][d] > 1]
    if len(widths) != 1 or len(free) != 1:
        return None
    of_values = {triple[side]: triple[1 - side] for triple in weigh.batch}
    of_values |= {pair[side]: pair[1 - side] for pair in weigh.contracted}
    before = (*roles.batch, *roles.groups, roles.query_at)
    return (
        Operand(query, (*(sides[1 - key][x] for x in before), widths[0][1 - key])),
        Operand(keys, (*(sides[key][x] for x in (*roles.batch, roles.key_at)), widths[0][key])),
        Operand(values, (*(of_values[x] for x in (*roles.batch, roles.key_at)), free[0])),
    )


def _without_repeats(trail: Trail, attention: Attention) -> Attention:
    """With the keys and values of fewer heads that were repeated for those of the queries, where they were."""
    key, value = (_repeated(trail, operand) for operand in (attention.key, attention.value))
    if key is None or value is None or key[1:] != value[1:]:
        return attention
    return replace(attention, key=key[0], value=value[0], repeats=key[1:])


def _repeated(trail: Trail, operand: Operand) -> tuple[Operand, int, int] | None:
    """What an operand repeats, the place of the dimension along which it does, and how often: each number of that
    dimension comes so often in succession."""
    program = trail.program
    places: list[int | None] = [None] * len(program.shapes[operand.value])
    for i, d in enumerate(operand.dims):
        places[d] = i
    v, labels = trail.plain(operand.value, tuple(places))
    merge = trail.maker(v)
    if merge is None or merge.factors is None or merge.ins[0] is None:
        return None
    wide = merge.factors.operand
    inside: list[Label | None] = [None] * len(wide)
    at: Label | None = None
    for old, new in merge.factors.groups:
        if len(new) == 1 and len(old) == 2 and at is None:
            at, (inside[old[0]], minor) = labels[new[0]], (labels[new[0]], old[1])
        elif len(old) == len(new) == 1:
            inside[old[0]] = labels[new[0]]
        elif old and new:
            return None
    if not isinstance(at, int) or at >= len(operand.dims) - 2:
        return None
    v, times = merge.ins[0], wide[minor]
    marked: Labels = tuple(-1 if d == minor else x for d, x in enumerate(inside))
    while (e := trail.maker(v)) is not None and (back := trail.moved(e, marked)) is not None:
        v, marked = e.ins[0], back
        assert v is not None
        if -1 not in marked:
            return Operand(v, _dims(marked, len(operand.dims))), at, times
    return None


def _dims(labels: Labels, rank: int) -> tuple[int, ...]:
    return tuple(labels.index(i) for i in range(rank))
