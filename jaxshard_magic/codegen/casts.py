"""`--precision` in the user's text: its expressions in the types that the plan holds their values in.

The step is traced with every expression named. What the plan makes of that program says in which type each value is
held and read; the step is traced once more with its values in these types, and where one changes a cast is written.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr

from ..gradients.autocast import Types, visible
from ..gradients.precision import TYPES, typed, wanted
from ..program.capture import gradients_of
from ..program.ir import Equation, Program, Value
from ..program.primitives import is_float
from ..program.primitives.primitive import Runs
from .cells import Cells, place_of
from .edits import Edit, OptionEdits, keyword_edit
from .inside import in_type
from .last import last_call, planned_with
from .marks import SEEN, Marks, expression_of

if TYPE_CHECKING:
    from ..step import ShardedStep

_HOW = "bf16"  # float16 needs a loss scale that goes on from step to step; float32 other text than casts
_LINEN = "flax.linen"
_SUMS = (
    "Devices may add up gradients of products in bfloat16, as these come. The plan adds them up in float32: with\n"
    "--reduce-dtype f32 on its line the program does as well."
)
_PLAIN = (dict, list)  # whose parts are expressions of their own


@dataclass
class _Cast(Marks):
    """Expressions with their values in other types. `casts[k]`: that of expression k; `typed`: calls that make modules
    of Linen, which are to compute in `dtype`.

    Found out: `made`, the casts that change something; `trees`, expressions that hold floats and are no arrays, and
    among them `methods`; `built`, those that make modules of Linen without a type.
    """

    names: bool = True
    casts: Mapping[int, Any] = field(default_factory=dict)
    typed: frozenset[int] = frozenset()
    dtype: Any = None
    made: set[int] = field(default_factory=set)
    trees: set[int] = field(default_factory=set)
    methods: set[int] = field(default_factory=set)
    built: set[int] = field(default_factory=set)

    def seen(self, k: int, x: Any) -> Any:
        to = self.casts.get(k)
        if isinstance(x, Tracer):
            if to is not None and is_float(x.dtype) and x.dtype != to:
                self.made.add(k)
                x = x.astype(to)
            return super().seen(k, x)
        if type(x) is tuple:
            return tuple(super(_Cast, self).seen(k, part) for part in x)
        if type(x).__module__.startswith(_LINEN):
            self.built |= {k} if getattr(x, "dtype", "") is None else set()
            return x
        owner = x.__self__ if isinstance(x, MethodType) else x
        if not isinstance(owner, _PLAIN) and any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(owner)):
            self.trees.add(k)
            self.methods |= {k} if owner is not x else set()
            if to is not None:
                self.made.add(k)
                other = in_type(owner, to)
                return other if owner is x else getattr(other, x.__name__)
        return x

    def both(self, cells: Cells) -> dict[str, tuple[ast.Module, ast.Module]]:
        trees = super().both(cells)
        for k in self.typed:
            node = self.nodes[k]
            assert isinstance(node, ast.Call)
            node.keywords.append(ast.keyword("dtype", ast.Constant(str(self.dtype))))
        return trees

    def called(self, k: int) -> int | None:
        """The expression that stands for the function in a call."""
        node = self.nodes[k]
        called = node.func if isinstance(node, ast.Call) else None
        if (
            not isinstance(called, ast.Call)
            or not isinstance(called.func, ast.Name)
            or called.func.id != SEEN
        ):
            return None
        number = called.args[0]
        return number.value if isinstance(number, ast.Constant) else None  # pyright: ignore[reportReturnType]


def cast_edits(step: "ShardedStep", cells: Cells) -> OptionEdits:
    """Casts at the expressions of the step's losses, so that they compute in the types that the plan gives them; none
    for a type that is not written so, and where no product of theirs can be reached."""
    how = step.request.gradients.precision
    if how != _HOW:
        return OptionEdits()
    dtype, plain = TYPES[how], _Cast()
    try:
        losses = [typed(loss, how) for loss in _losses(step, cells, plain)]
        planned = sum(types.changed for _, types in losses)
        if not planned:  # the plan has no product to run in it either
            return OptionEdits(options=frozenset({"precision"}))
        casts, built = _casts(plain, losses, dtype)
        cast, programs = _with(step, cells, casts, built, dtype)
        if useless := {k for k in cast.trees & cast.made if not _helps(cast, k, programs)}:
            casts = {k: to for k, to in casts.items() if k not in useless}
            cast, programs = _with(step, cells, casts, built, dtype)
    except Exception as error:  # of the user's own functions, given other types
        raised = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return OptionEdits(notes=(f"Casts at the lines of the cells are left out: {raised}",))
    before = [e for program, _ in losses for e in _products(program)]
    after = [e for program in programs for e in _products(program)]
    left = planned - (sum(_runs_in(e, dtype) for e in after) - sum(_runs_in(e, dtype) for e in before))
    if left == planned:
        return OptionEdits()
    notes = []
    if left:
        notes.append(f"{left} of {planned} products run in their own type: they stand in imported functions.")
    if step.request.gradients.reduce_dtype is None and last_call(step)[0].plan.shards > 1:
        notes.append(_SUMS)
    edits = [e for k in sorted({*cast.made, *built}) if (e := _edit(cast, k, plain, cells)) is not None]
    return OptionEdits(tuple(edits), frozenset({"precision"}), tuple(notes))


def _with(
    step: "ShardedStep", cells: Cells, casts: Mapping[int, Any], built: frozenset[int], dtype: Any
) -> tuple[_Cast, list[Program]]:
    """The marks of the step with these casts, and what it differentiates then."""
    cast = _Cast(casts=casts, typed=built, dtype=dtype)
    return cast, [Program(loss) for loss in _losses(step, cells, cast)]


def _losses(step: "ShardedStep", cells: Cells, marks: Marks) -> list[ClosedJaxpr]:
    """What the step differentiates, with the marks in it."""
    rewritten = planned_with(step, marks.both(cells), {SEEN: marks.seen}).rewritten
    assert rewritten is not None
    return [e.params["gradient"].loss for e in gradients_of(Program(rewritten.captured.closed))]


def _products(program: Program) -> list[Equation]:
    return [e for e in visible(program.top) if e.primitive.runs is Runs.PRODUCT]


def _runs_in(e: Equation, dtype: Any) -> bool:
    return all(v.aval.dtype == dtype for v in e.eqn.invars[:2])  # pyright: ignore[reportAttributeAccessIssue]


def _helps(marks: _Cast, k: int, losses: Iterable[Program]) -> bool:
    """Does a module whose weights are cast take a product in that type? Some have a type of their own."""
    own = [e for p in losses for e in _Reading(marks, p).own_of(marks.within.get(k, -1))]
    return any(_runs_in(e, marks.casts[k]) for e in own if e.primitive.runs is Runs.PRODUCT)


def _casts(
    marks: _Cast, losses: Iterable[tuple[Program, Types]], dtype: Any
) -> tuple[dict[int, Any], frozenset[int]]:
    """The type for the value of each expression: that in which the expression around it reads it, else that in which
    the plan holds it; and the modules to build with a type."""
    read: dict[int, set[Any]] = defaultdict(set)
    held: dict[int, set[Any]] = defaultdict(set)
    hidden: dict[int, set[Any]] = defaultdict(set)
    for program, types in losses:
        _Reading(marks, program, types).fill(read, held, hidden)
    casts = {}
    for k, own in held.items():
        if found := read.get(k) or (own if len(own) == 1 else ()):
            casts[k] = max(found, key=lambda t: t.itemsize)
    built = set()
    for k, found in hidden.items():
        called = marks.called(k)
        if called is not None and found == {dtype}:
            if called in marks.trees:
                casts[called] = dtype
            elif called in marks.built and _takes_a_type(marks.nodes[called]):
                built.add(called)
    return casts, frozenset(built)


def _takes_a_type(node: ast.expr) -> bool:
    """Is it a call with a place for one more argument by its name?"""
    return isinstance(node, ast.Call) and keyword_edit(node, "", "") is not None


class _Reading:
    """In which types the expressions of a loss read what they are made of."""

    def __init__(self, marks: _Cast, program: Program, types: Types | None = None):
        self.marks, self.program = marks, program
        self.types = types or Types([], {}, 0)
        self.equations = list(visible(program.top))
        self.by_index = {e.index: e for e in self.equations}
        self.made_by: dict[Value, Equation] = {v: e for e in self.equations for v in e.outs}
        self.readers: dict[Value, list[tuple[Equation, int]]] = defaultdict(list)
        self.named: dict[int, list[Equation]] = defaultdict(list)  # of each expression, where it is named
        for e in self.equations:
            for at, v in enumerate(e.ins):
                if v is not None:
                    self.readers[v].append((e, at))
            if (k := expression_of(e)) is not None:
                self.named[k].append(e)

    def fill(self, read: dict[int, set], held: dict[int, set], hidden: dict[int, set]) -> None:
        inner = {k: {e.index for e in self.own_of(k)} for k in self.named}
        for k, e in ((k, e) for k, names in self.named.items() for e in names):
            held[k].add(self.types.of[e.outs[0]])
            around = inner.get(self.marks.within.get(k, -1), set())
            found = set(self._read_in(e.outs[0], around))
            read[k] |= found if not found or self._has_products(around) else found | self._all(around)
        for k, own in inner.items():
            hidden[k] |= set(self._hidden(k, own))

    def own_of(self, k: int) -> Iterator[Equation]:
        """The equations that an expression runs itself: back from its values to other expressions."""
        todo, seen = [e.ins[0] for e in self.named.get(k, ())], set()
        while todo:
            v = todo.pop()
            e = self.made_by.get(v) if v is not None else None
            if e is None or e.index in seen or expression_of(e) is not None:
                continue
            seen.add(e.index)
            yield e
            todo += e.ins
            todo += [inside for door in _doors(e) for inside in door.scope.outs]

    def _has_products(self, own: set[int]) -> bool:
        return any(self.by_index[i].primitive.runs is Runs.PRODUCT for i in own)

    def _all(self, own: set[int]) -> set[Any]:
        """The types of all that an expression runs: what computes in several takes the widest throughout."""
        computing = (self.by_index[i] for i in own)
        found = (
            t for e in computing if not _doors(e) and not e.primitive.moves for t in wanted(e, self.types)
        )
        return {t for t in found if t is not None and is_float(t)}

    def _read_in(self, v: Value, around: set[int]) -> Iterator[Any]:
        """The types in which equations `around` a value read it, behind what only moves it."""
        for e, at in self.readers[v]:
            if e.index not in around:
                continue
            moved = e.primitive.moves and self.types.of[e.outs[0]] == self.types.of[v]
            behind = set(self._read_in(e.outs[0], around)) if moved else set()
            if behind:
                yield from behind
            elif (dtype := wanted(e, self.types)[at]) is not None and is_float(dtype):
                yield dtype

    def _hidden(self, k: int, own: set[int]) -> Iterator[Any]:
        """The types in which an expression with products reads floats that none of its parts gives: weights of a
        module, but for those that are only added to a product."""
        for e in (self.by_index[i] for i in own if self._has_products(own)):
            for v in e.ins if not _doors(e) and not _adds(e) else ():
                if v is None or not is_float(getattr(self.program.avals[v], "dtype", None)):
                    continue
                maker = self.made_by.get(v)
                if maker is not None and (
                    maker.index in own or self.marks.within.get(expression_of(maker) or -1) == k
                ):
                    continue
                if not (e.primitive.moves and all(_adds(r) for w in e.outs for r, _ in self.readers[w])):
                    yield from self._read_in(v, own)


def _doors(e: Equation) -> list:
    return e.doors if not e.primitive.custom else []


def _adds(e: Equation) -> bool:
    return e.primitive.elementwise and e.primitive.adds


def _edit(marks: _Cast, k: int, plain: Marks, cells: Cells) -> Edit | None:
    """What stands in the text for a cast; `plain` are the marks without any."""
    node, place = plain.nodes[k], plain.places[k]
    if k in marks.typed:
        assert isinstance(node, ast.Call)
        return keyword_edit(node, place.file, f"dtype={_text(marks.dtype, cells)}")
    to = _text(marks.casts[k], cells)
    if k in marks.trees:
        if k in marks.methods and isinstance(node, ast.Attribute):
            place = place_of(node.value, place.file)
        return Edit(place, f"{cells.name('in_type')}(", f", {to})")
    if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)):
        return Edit(place, "", f".astype({to})")
    return Edit(place, "(", f").astype({to})")


def _text(dtype: Any, cells: Cells) -> str:
    """`jnp.bfloat16`, as the cells name that module."""
    module = cells.module("jax.numpy")
    return f"{module}.{dtype}" if module else repr(str(dtype))
