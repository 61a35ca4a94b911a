"""Sharding constraints of the plan, by expression of the user's text."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..program.ir import Equation, Value
from ..strategies.layout import Spec, partition_spec
from ..strategies.sharded_lowering import ShardedLowering
from ..strategies.sp import result_specs
from .cells import SourceSpan
from .expression_marks import ExpressionMarks, expression_number


@dataclass(frozen=True)
class Constraint:
    """Sharding constraints on the value of one expression.

    Attributes:
        span: Span of the expression.
        specs: Specs to apply in turn, in the notation of PartitionSpec.
        under_vmap: Whether the value belongs to a single example, under `jax.vmap`. The specs then omit the examples.
        is_table: Whether the expression is the table of a lookup.
    """

    span: SourceSpan
    specs: tuple[str, ...]
    under_vmap: bool = False
    is_table: bool = False


def find_constraints(hold: ShardedLowering, marks: ExpressionMarks) -> list[Constraint]:
    """Return constraints for the expressions that make activations constrained by the plan.

    Left out are expressions with arrays that are sharded differently from call to call, and expressions under a
    `jax.vmap` over anything but the examples of the batch.

    Args:
        hold: Lowering of the marked program.
        marks: The marks.
    """
    program = hold.program
    made_by = program.producer
    values: dict[int, list[Value]] = defaultdict(list)
    for e in program.equations:
        k = expression_number(e)
        if k is not None:
            values[k].append(e.results[0])
    over: dict[int | None, int | None] = {k: _hidden_dims(hold, vs, marks.ranks[k]) for k, vs in values.items()}
    over[None] = None  # equations other than marks have no number, nor have the user's own `checkpoint_name`s

    def within(_v: Value, _w: Value, e: Equation | None) -> bool:
        """Return whether the walk back from a value may pass an equation without leaving the expression."""
        return e is None or (not e.primitive.constrain_output and over[expression_number(e)] is None)

    pinned = []
    for k in values:
        outer = over[k]
        back = {v: list(hold.layout.flow.ancestors([made_by[v].operands[0]], within)) for v in values[k]}
        specs = {
            tuple(_specs(hold, v, makers, outer)) for v, ws in back.items() for makers in [_makers(hold, ws, made_by)]
        }
        holds = any(_makers(hold, (v, *ws), made_by) for v, ws in back.items())
        # One text stands for all calls, so calls that need different specs get no constraint.
        if outer is not None and holds and len(specs) == 1 and () not in specs:
            pinned.append(Constraint(marks.spans[k], *specs, under_vmap=bool(outer)))
            tables = {_table_spec(hold, e) for ws in back.values() for e in _makers(hold, ws, made_by)}
            if k in marks.table_spans and not outer and len(tables) == 1 and None not in tables:
                pinned.append(Constraint(marks.table_spans[k], (str(tables.pop()),), is_table=True))
    return pinned


def _table_spec(hold: ShardedLowering, e: Equation) -> str | None:
    """Return the spec of a weight while an equation looks up in it; None for other equations."""
    table = e.operands[0]
    if not e.primitive.is_gather or table is None or hold.layout.is_activation(table):
        return None
    return spec_text(hold.layout.compute_spec(table))


def _hidden_dims(hold: ShardedLowering, values: Iterable[Value], ranks: set[int]) -> int | None:
    """Return the number of leading dimensions hidden from an expression: 1 under `jax.vmap` over the examples, else 0.

    None where the calls differ, or where another dimension is mapped.
    """
    layout, found = hold.layout, set()
    for v in values:
        # Under `jax.vmap` a value has one dimension more in the program than in the user's code.
        more = len(layout.program.shapes[v]) - max(ranks)
        examples = more == 1 and layout.dims.classes_of(v)[0] in layout.batch.classes
        found.add(more if more == 0 or examples else None)
    return found.pop() if len(found) == len(ranks) == 1 else None


def _makers(hold: ShardedLowering, values: Iterable[Value], made_by: Mapping[Value, Equation]) -> list[Equation]:
    """Return the producers of some values, as far as the results are constrained or exchanged."""
    exchanged = hold.layout.spec_overrides.results
    found = ((v, made_by[v]) for v in values if v in made_by)
    return [e for v, e in found if e.primitive.constrain_output or v in exchanged]


def _specs(hold: ShardedLowering, value: Value, makers: Sequence[Equation], outer: int | None) -> Iterable[str]:
    """Yield the specs of an expression's value in the order in which the plan applies them.

    Args:
        hold: The lowering.
        value: Value of the expression.
        makers: Equations within the expression with constrained results.
        outer: Number of leading dimensions hidden from the expression.
    """
    layout = hold.layout
    if not layout.is_activation(value):
        return
    exchanged = layout.spec_overrides.results
    before = [list(exchanged[value])] if value in exchanged else []
    twice = (e for e in makers if e.primitive.is_gather or e.results[0] in exchanged)
    before += [s for e in twice for s in result_specs(layout, e, e.results[0])[:-1]]
    before = [s for s in before if len(s) == len(layout.program.shapes[value])]
    before += _made_otherwise(hold, value, makers)
    for spec in (*before, layout.activation_spec(value), *_read_otherwise(hold, value)):
        yield spec_text(spec[outer or 0 :])


def _made_otherwise(hold: ShardedLowering, value: Value, makers: Iterable[Equation]) -> list[Spec]:
    """Return the specs at production where an expression moves an activation between experts and tokens."""
    layout = hold.layout
    if layout.experts is None:
        return []
    same = [e.results[0] for e in makers if layout.dims.classes_of(e.results[0]) == layout.dims.classes_of(value)]
    return [spec for v in same if (spec := layout.activation_spec(v)) != layout.activation_spec(value)]


def _read_otherwise(hold: ShardedLowering, value: Value) -> list[Spec]:
    """Return the spec of all readers where experts read an activation of tokens, or the reverse."""
    layout = hold.layout
    if layout.experts is None:
        return []
    same = layout.flow.descendants([value], lambda _v, _w, e: e is None)
    readers = ((v, e) for v in same for _, e in layout.flow.successors[v])
    read = {tuple(layout.compute_spec_in(e, v)) for v, e in readers if e is not None}
    return [list(*read)] if len(read) == 1 and read != {tuple(layout.activation_spec(value))} else []


def spec_text(spec: Spec) -> str:
    """Return a spec as text, `P("data", None, ("a", "b"))`, without trailing None."""
    entries = list(partition_spec(spec))
    while entries and entries[-1] is None:
        entries.pop()
    return f"P({', '.join(map(_entry, entries))})"


def _entry(entry: str | tuple[str, ...] | None) -> str:
    """Return one entry of a spec as text."""
    if isinstance(entry, tuple):
        return f"({', '.join(map(_entry, entry))})"
    return "None" if entry is None else f'"{entry}"'
