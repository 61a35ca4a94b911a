"""Where in the user's text the plan holds arrays in place: the expressions that make activations, and their specs."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..program.ir import Equation, Value
from ..strategies.hold import Hold
from ..strategies.layout import Spec, partition_spec
from ..strategies.sp import made_as
from .cells import Place
from .marks import Marks, expression_of


@dataclass(frozen=True)
class Pin:
    """An expression whose value is held as `specs` say, one after the other, in the notation of PartitionSpec.
    `mapped`: it is one example's, under `jax.vmap`, and so are its specs; `table`: it is looked up in."""

    place: Place
    specs: tuple[str, ...]
    mapped: bool = False
    table: bool = False


def pins(hold: Hold, marks: Marks) -> list[Pin]:
    """The expressions of a marked program at which activations are made that the plan holds, and how they lie there.

    Left out are those that give arrays which lie differently from call to call, and those under `jax.vmap` over more
    than the examples of the batch.
    """
    program = hold.program
    made_by = program.maker
    values: dict[int, list[Value]] = defaultdict(list)
    for e in program.equations:
        k = expression_of(e)
        if k is not None:
            values[k].append(e.outs[0])
    over: dict[int | None, int | None] = {k: _over(hold, vs, marks.ranks[k]) for k, vs in values.items()}
    over[None] = None  # of names that are none of ours

    def within(_v: Value, _w: Value, e: Equation | None) -> bool:
        """Does an expression's value come from what this equation reads, within the expression?"""
        return e is None or (not e.primitive.pinned and over[expression_of(e)] is None)

    pinned = []
    for k in values:
        outer = over[k]
        back = {v: list(hold.layout.flow.back([made_by[v].ins[0]], within)) for v in values[k]}
        specs = {
            tuple(_specs(hold, v, makers, outer))
            for v, ws in back.items()
            for makers in [_makers(hold, ws, made_by)]
        }
        holds = any(_makers(hold, (v, *ws), made_by) for v, ws in back.items())
        if outer is not None and holds and len(specs) == 1 and () not in specs:
            pinned.append(Pin(marks.places[k], *specs, mapped=bool(outer)))
            tables = {_used(hold, e) for ws in back.values() for e in _makers(hold, ws, made_by)}
            if k in marks.tables and not outer and len(tables) == 1 and None not in tables:
                pinned.append(Pin(marks.tables[k], (str(tables.pop()),), table=True))
    return pinned


def _used(hold: Hold, e: Equation) -> str | None:
    """Where the table of a lookup lies while it is looked up in; None for what is no lookup in a weight."""
    table = e.ins[0]
    if not e.primitive.gathers or table is None or hold.layout.batchy(table):
        return None
    return spec_text(hold.layout.in_use(table))


def _over(hold: Hold, values: Iterable[Value], ranks: set[int]) -> int | None:
    """How many dimensions of its values an expression does not see: the examples, or none; None for others."""
    layout, found = hold.layout, set()
    for v in values:
        more = len(layout.program.shapes[v]) - max(ranks)
        examples = more == 1 and layout.dims.of(v)[0] in layout.batch.classes
        found.add(more if more == 0 or examples else None)
    return found.pop() if len(found) == len(ranks) == 1 else None


def _makers(hold: Hold, values: Iterable[Value], made_by: Mapping[Value, Equation]) -> list[Equation]:
    exchanged = hold.layout.exchanges.makes
    found = ((v, made_by[v]) for v in values if v in made_by)
    return [e for v, e in found if e.primitive.pinned or v in exchanged]


def _specs(hold: Hold, value: Value, makers: Sequence[Equation], outer: int | None) -> Iterable[str]:
    layout = hold.layout
    if not layout.batchy(value):
        return
    exchanged = layout.exchanges.makes
    before = [list(exchanged[value])] if value in exchanged else []
    twice = (e for e in makers if e.primitive.gathers or e.outs[0] in exchanged)
    before += [s for e in twice for s in made_as(layout, e, e.outs[0])[:-1]]
    before = [s for s in before if len(s) == len(layout.program.shapes[value])]
    before += _made_otherwise(hold, value, makers)
    for spec in (*before, layout.active(value), *_read_otherwise(hold, value)):
        yield spec_text(spec[outer or 0 :])


def _made_otherwise(hold: Hold, value: Value, makers: Iterable[Equation]) -> list[Spec]:
    """Where an activation of experts goes to tokens, or the other way, within an expression: as it is made."""
    layout = hold.layout
    if layout.experts is None:
        return []
    same = [e.outs[0] for e in makers if layout.dims.of(e.outs[0]) == layout.dims.of(value)]
    return [spec for v in same if (spec := layout.active(v)) != layout.active(value)]


def _read_otherwise(hold: Hold, value: Value) -> list[Spec]:
    """Where all that read an activation of experts, or of tokens for them, have it on the other side."""
    layout = hold.layout
    if layout.experts is None:
        return []
    same = layout.flow.forward([value], lambda _v, _w, e: e is None)
    readers = ((v, e) for v in same for _, e in layout.flow.after[v])
    read = {tuple(layout.at(e, v)) for v, e in readers if e is not None}
    return [list(*read)] if len(read) == 1 and read != {tuple(layout.active(value))} else []


def spec_text(spec: Spec) -> str:
    """`P("data", None, ("a", "b"))` for a spec, without what it ends in of None."""
    entries = list(partition_spec(spec))
    while entries and entries[-1] is None:
        entries.pop()
    return f"P({', '.join(map(_entry, entries))})"


def _entry(entry: str | tuple[str, ...] | None) -> str:
    if isinstance(entry, tuple):
        return f"({', '.join(map(_entry, entry))})"
    return "None" if entry is None else f'"{entry}"'
