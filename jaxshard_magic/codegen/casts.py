"""Write `--precision` into the user's text as casts of expressions.

The step is traced with every expression named. The precision plan of the traced program gives the dtype in which each
value is stored and read. The step is traced again with its values in these dtypes; an expression with a change gets a
cast.
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

from ..gradients.autocast import DtypeAssignment, visible_equations
from ..gradients.precision import TYPES, assign_dtypes, operand_dtypes
from ..program.gradient_calls import gradient_equations
from ..program.ir import Equation, Program, Value
from ..program.primitives import is_float
from ..program.primitives.primitive import AutocastPolicy
from .cells import Cells, span_of
from .edits import Edit, OptionEdits, keyword_edit
from .expression_marks import MARK_FUNCTION, ExpressionMarks, expression_number
from .latest_call import last_call, plan_with_code
from .step_functions import in_type

if TYPE_CHECKING:
    from ..step import ShardedStep

_HOW = "bf16"  # float16 needs a loss scale from step to step, float32 other edits than casts
_LINEN = "flax.linen"
_SUMS = (
    "Devices may add up gradients of products in bfloat16, as these come. The plan adds them up in float32: with\n"
    "--reduce-dtype f32 on its line the program does as well."
)
_PLAIN = (dict, list)  # containers whose elements are expressions of their own


@dataclass
class _CastMarks(ExpressionMarks):
    """Expression marks with casts of values.

    Attributes:
        names: True: names and attributes are expressions as well.
        casts: Target dtype by number of the expression.
        typed_modules: Constructor calls of Linen modules, to be given `dtype`.
        dtype: Compute dtype for `typed_modules`.
        effective: Casts that changed a value, found during the trace.
        pytrees: Expressions with floats in pytrees or modules instead of arrays, found during the trace.
        methods: Bound methods among `pytrees`.
        untyped_modules: Constructor calls of Linen modules without a dtype, found during the trace.
    """

    names: bool = True
    casts: Mapping[int, Any] = field(default_factory=dict)
    typed_modules: frozenset[int] = frozenset()
    dtype: Any = None
    effective: set[int] = field(default_factory=set)
    pytrees: set[int] = field(default_factory=set)
    methods: set[int] = field(default_factory=set)
    untyped_modules: set[int] = field(default_factory=set)

    def mark_value(self, k: int, x: Any) -> Any:
        """Cast the value of expression `k` and name its arrays."""
        to = self.casts.get(k)
        if isinstance(x, Tracer):
            if to is not None and is_float(x.dtype) and x.dtype != to:
                self.effective.add(k)
                x = x.astype(to)
            return super().mark_value(k, x)
        if type(x) is tuple:
            return tuple(super(_CastMarks, self).mark_value(k, part) for part in x)
        if type(x).__module__.startswith(_LINEN):
            # Linen modules with `dtype=None` compute in the dtype of their operands.
            self.untyped_modules |= {k} if getattr(x, "dtype", "") is None else set()
            return x
        owner = x.__self__ if isinstance(x, MethodType) else x
        if not isinstance(owner, _PLAIN) and any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(owner)):
            self.pytrees.add(k)
            self.methods |= {k} if owner is not x else set()
            if to is not None:
                self.effective.add(k)
                other = in_type(owner, to)
                return other if owner is x else getattr(other, x.__name__)
        return x

    def marked_trees(self, cells: Cells) -> dict[str, tuple[ast.Module, ast.Module]]:
        """Return the marked trees, with `dtype=` in the calls of `typed_modules`."""
        trees = super().marked_trees(cells)
        for k in self.typed_modules:
            node = self.nodes[k]
            assert isinstance(node, ast.Call)
            node.keywords.append(ast.keyword("dtype", ast.Constant(str(self.dtype))))
        return trees

    def callee_number(self, k: int) -> int | None:
        """Return the number of the expression that is the callee of call `k`, or None."""
        node = self.nodes[k]
        called = node.func if isinstance(node, ast.Call) else None
        if not isinstance(called, ast.Call) or not isinstance(called.func, ast.Name) or called.func.id != MARK_FUNCTION:
            return None
        number = called.args[0]
        return number.value if isinstance(number, ast.Constant) else None  # pyright: ignore[reportReturnType]


def cast_edits(step: "ShardedStep", cells: Cells) -> OptionEdits:
    """Return casts at the expressions of the step's losses, for the dtypes of the precision plan.

    Args:
        step: A step with a recorded call.
        cells: The user's text.

    Returns:
        Edits for the option `precision`. Empty for a precision other than bfloat16, and where the text reaches no
        matrix product of the losses. A note says how many products keep their own dtype, or what the user's functions
        raised.
    """
    how = step.request.gradients.precision
    if how != _HOW:
        return OptionEdits()
    dtype, plain = TYPES[how], _CastMarks()
    try:
        losses = [assign_dtypes(loss, how) for loss in _losses(step, cells, plain)]
        planned = sum(types.changed for _, types in losses)
        if not planned:  # the plan casts no product either
            return OptionEdits(options=frozenset({"precision"}))
        casts, built = _choose_casts(plain, losses, dtype)
        cast, programs = _trace_with_casts(step, cells, casts, built, dtype)
        # Modules with a dtype of their own ignore the dtype of their weights.
        if useless := {k for k in cast.pytrees & cast.effective if not _helps(cast, k, programs)}:
            casts = {k: to for k, to in casts.items() if k not in useless}
            cast, programs = _trace_with_casts(step, cells, casts, built, dtype)
    except Exception as error:  # raised by the user's functions for arrays of other dtypes
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
    if step.request.gradients.reduce_dtype is None and last_call(step)[0].plan.batch_shards > 1:
        notes.append(_SUMS)
    edits = [e for k in sorted({*cast.effective, *built}) if (e := _edit(cast, k, plain, cells)) is not None]
    return OptionEdits(tuple(edits), frozenset({"precision"}), tuple(notes))


def _trace_with_casts(
    step: "ShardedStep", cells: Cells, casts: Mapping[int, Any], built: frozenset[int], dtype: Any
) -> tuple[_CastMarks, list[Program]]:
    """Trace the step with these casts; return the marks and the losses."""
    cast = _CastMarks(casts=casts, typed_modules=built, dtype=dtype)
    return cast, [Program(loss) for loss in _losses(step, cells, cast)]


def _losses(step: "ShardedStep", cells: Cells, marks: ExpressionMarks) -> list[ClosedJaxpr]:
    """Return the losses of the step's gradient calls, traced with the marks."""
    rewritten = plan_with_code(step, marks.marked_trees(cells), {MARK_FUNCTION: marks.mark_value}).rewritten
    assert rewritten is not None
    return [e.params["gradient"].loss for e in gradient_equations(Program(rewritten.captured.closed))]


def _products(program: Program) -> list[Equation]:
    """Return the matrix products of a program."""
    return [e for e in visible_equations(program.top) if e.primitive.autocast is AutocastPolicy.COMPUTE_DTYPE]


def _runs_in(e: Equation, dtype: Any) -> bool:
    """Return whether both operands of `e` have this dtype."""
    return all(v.aval.dtype == dtype for v in e.jaxpr_eqn.invars[:2])  # pyright: ignore[reportAttributeAccessIssue]


def _helps(marks: _CastMarks, k: int, losses: Iterable[Program]) -> bool:
    """Return whether a module with cast weights computes a product in the cast's dtype.

    A module with a dtype of its own does not.
    """
    own = [e for p in losses for e in _ReadDtypes(marks, p).equations_of(marks.parents.get(k, -1))]
    return any(_runs_in(e, marks.casts[k]) for e in own if e.primitive.autocast is AutocastPolicy.COMPUTE_DTYPE)


def _choose_casts(
    marks: _CastMarks, losses: Iterable[tuple[Program, DtypeAssignment]], dtype: Any
) -> tuple[dict[int, Any], frozenset[int]]:
    """Choose the dtype of each expression's value and the modules to construct with a dtype.

    A value gets the widest dtype read by the enclosing expression, else the dtype of the plan.
    """
    read: dict[int, set[Any]] = defaultdict(set)
    held: dict[int, set[Any]] = defaultdict(set)
    hidden: dict[int, set[Any]] = defaultdict(set)
    for program, types in losses:
        _ReadDtypes(marks, program, types).fill(read, held, hidden)
    casts = {}
    for k, own in held.items():
        if found := read.get(k) or (own if len(own) == 1 else ()):
            casts[k] = max(found, key=lambda t: t.itemsize)
    built = set()
    for k, found in hidden.items():
        called = marks.callee_number(k)
        if called is not None and found == {dtype}:
            if called in marks.pytrees:
                casts[called] = dtype
            elif called in marks.untyped_modules and _takes_a_type(marks.nodes[called]):
                built.add(called)
    return casts, frozenset(built)


def _takes_a_type(node: ast.expr) -> bool:
    """Return whether the expression is a call with room for one more keyword argument."""
    return isinstance(node, ast.Call) and keyword_edit(node, "", "") is not None


class _ReadDtypes:
    """Operand dtypes of the expressions of one loss.

    Args:
        marks: The marks of the trace.
        program: The loss.
        types: Dtypes of the precision plan.
    """

    def __init__(self, marks: _CastMarks, program: Program, types: DtypeAssignment | None = None):
        self.marks, self.program = marks, program
        self.types = types or DtypeAssignment([], {}, 0)
        self.equations = list(visible_equations(program.top))
        self.by_index = {e.index: e for e in self.equations}
        self.made_by: dict[Value, Equation] = {v: e for e in self.equations for v in e.results}
        self.readers: dict[Value, list[tuple[Equation, int]]] = defaultdict(list)
        self.named: dict[int, list[Equation]] = defaultdict(list)  # `name` equations of each expression
        for e in self.equations:
            for at, v in enumerate(e.operands):
                if v is not None:
                    self.readers[v].append((e, at))
            if (k := expression_number(e)) is not None:
                self.named[k].append(e)

    def fill(self, read: dict[int, set], held: dict[int, set], hidden: dict[int, set]) -> None:
        """Add the dtypes of each expression to three sets, by number of the expression.

        Args:
            read: Dtypes read by the enclosing expression.
            held: Dtypes of the value in the plan.
            hidden: Dtypes of the weights that the expression reads from outside of all subexpressions.
        """
        inner = {k: {e.index for e in self.equations_of(k)} for k in self.named}
        for k, e in ((k, e) for k, names in self.named.items() for e in names):
            held[k].add(self.types.value_dtypes[e.results[0]])
            around = inner.get(self.marks.parents.get(k, -1), set())
            found = set(self._read_in(e.results[0], around))
            read[k] |= found if not found or self._has_products(around) else found | self._all_read(around)
        for k, own in inner.items():
            hidden[k] |= set(self._hidden(k, own))

    def equations_of(self, k: int) -> Iterator[Equation]:
        """Yield the equations of expression `k` alone, walking back from the named values to other expressions."""
        todo, seen = [e.operands[0] for e in self.named.get(k, ())], set()
        while todo:
            v = todo.pop()
            e = self.made_by.get(v) if v is not None else None
            if e is None or e.index in seen or expression_number(e) is not None:
                continue
            seen.add(e.index)
            yield e
            todo += e.operands
            todo += [inside for body in _bodies(e) for inside in body.sub_jaxpr.outputs]

    def _has_products(self, own: set[int]) -> bool:
        return any(self.by_index[i].primitive.autocast is AutocastPolicy.COMPUTE_DTYPE for i in own)

    def _all_read(self, own: set[int]) -> set[Any]:
        """Return all dtypes of floats read by the equations. Code with several compute dtypes takes the widest
        throughout."""
        computing = (self.by_index[i] for i in own)
        found = (
            t
            for e in computing
            if not _bodies(e) and not e.primitive.data_movement
            for t in operand_dtypes(e, self.types)
        )
        return {t for t in found if t is not None and is_float(t)}

    def _read_in(self, v: Value, around: set[int]) -> Iterator[Any]:
        """Yield the dtypes in which the equations `around` read `v`, looking through mere data movement."""
        for e, at in self.readers[v]:
            if e.index not in around:
                continue
            moved = e.primitive.data_movement and self.types.value_dtypes[e.results[0]] == self.types.value_dtypes[v]
            behind = set(self._read_in(e.results[0], around)) if moved else set()
            if behind:
                yield from behind
            elif (dtype := operand_dtypes(e, self.types)[at]) is not None and is_float(dtype):
                yield dtype

    def _hidden(self, k: int, own: set[int]) -> Iterator[Any]:
        """Yield the dtypes of floats that an expression with matrix products reads from outside of all subexpressions.

        The floats are weights of a module. Weights only added to a product are left out.
        """
        for e in (self.by_index[i] for i in own if self._has_products(own)):
            for v in e.operands if not _bodies(e) and not _adds(e) else ():
                if v is None or not is_float(getattr(self.program.avals[v], "dtype", None)):
                    continue
                maker = self.made_by.get(v)
                if maker is not None and (
                    maker.index in own or self.marks.parents.get(expression_number(maker) or -1) == k
                ):
                    continue
                if not (e.primitive.data_movement and all(_adds(r) for w in e.results for r, _ in self.readers[w])):
                    yield from self._read_in(v, own)


def _bodies(e: Equation) -> list:
    """Return the bodies of `e`; none for custom derivative rules."""
    return e.bodies if not e.primitive.custom_derivative else []


def _adds(e: Equation) -> bool:
    """Return whether `e` is an elementwise addition."""
    return e.primitive.is_elementwise and e.primitive.is_additive


def _edit(marks: _CastMarks, k: int, plain: ExpressionMarks, cells: Cells) -> Edit | None:
    """Return the edit for one cast; `plain` has the spans in the text without casts."""
    node, place = plain.nodes[k], plain.spans[k]
    if k in marks.typed_modules:
        assert isinstance(node, ast.Call)
        return keyword_edit(node, place.file, f"dtype={_text(marks.dtype, cells)}")
    to = _text(marks.casts[k], cells)
    if k in marks.pytrees:
        if k in marks.methods and isinstance(node, ast.Attribute):
            # A bound method has no dtype: the cast goes around its object.
            place = span_of(node.value, place.file)
        return Edit(place, f"{cells.program_name('in_type')}(", f", {to})")
    if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)):
        return Edit(place, "", f".astype({to})")
    # Without parentheses `.astype` would apply to the last operand alone.
    return Edit(place, "(", f").astype({to})")


def _text(dtype: Any, cells: Cells) -> str:
    """Return the dtype as text, `jnp.bfloat16` under the cells' own name for `jax.numpy`, else a quoted string."""
    module = cells.module("jax.numpy")
    return f"{module}.{dtype}" if module else repr(str(dtype))
