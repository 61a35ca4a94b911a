"""Dataflow of a program: dependencies between values, followed forward and backward.

`Flow` follows values individually, through bodies and loops. `dependents`, `required_equations` and `root_dependencies`
look at one body and take each equation as a whole, for code that runs some equations of a body and not others.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Set
from functools import cached_property

from .ir import Equation, Program, SubJaxpr, Value
from .sort_analysis import SortAnalysis
from .trace import DIFFERENTIATED, GRADIENT, VALUE

Edge = tuple[Value, Equation | None]
EdgeFilter = Callable[[Value, Value, Equation | None], bool]
"""(a value, the one that it was made from, by which equation; None: through the door of a body) -> go on?"""


class Flow:
    """Dataflow graph of a program.

    Args:
        program: The program.

    Attributes:
        predecessors: Edges into each value: the values read, with the equation; None for the equation where a value
            enters or leaves a body.
        differentiation_marks: Equations that mark the arguments differentiated by gradient calls.
        gradients: Gradients returned by gradient calls.
        loss_values: Scalars differentiated by gradient calls.
        random_equations: Equations that use a random key.
    """

    def __init__(self, program: Program):
        self.program = program
        self.predecessors: list[list[Edge]] = [[] for _ in program.avals]
        self.differentiation_marks: list[Equation] = []
        self.gradients: set[Value] = set()
        self.loss_values: set[Value] = set()
        self.random_equations: list[Equation] = []
        for e in program.equations:
            for body in e.bodies:
                # A loop may run zero times, so its results depend on the initial carries directly too.
                pairs = [(a, b) for a, b, _ in (*body.inputs, *body.outputs)]
                self._add_body_edges([*pairs, *body.carries, *body.zero_trip])
            if not e.bodies:
                self._add_equation(e)

    def _add_body_edges(self, pairs: Iterable[tuple[Value | None, Value | None]]) -> None:
        """Add edges where values enter, leave or go round bodies."""
        for a, b in pairs:
            if a is not None and b is not None:
                self.predecessors[b].append((a, None))

    def _add_equation(self, e: Equation) -> None:
        """Add the edges of an equation without a body, and note markers and random keys."""
        sources = [(a, e) for a in e.operands if a is not None]
        for out in e.results:
            self.predecessors[out].extend(sources)
        if e.primitive.names_value and e.params["name"] == DIFFERENTIATED:
            self.differentiation_marks.append(e)
        if e.primitive.names_value and e.params["name"] == GRADIENT:
            self.gradients.update(e.results)
        if e.primitive.names_value and e.params["name"] == VALUE:
            self.loss_values.update(e.results)
        if e.primitive.uses_key:
            self.random_equations.append(e)

    @cached_property
    def sort_analysis(self) -> SortAnalysis:
        """Analysis of sorted rows and of all values made from them."""
        return SortAnalysis(self.program)

    @cached_property
    def successors(self) -> list[list[Edge]]:
        """Edges out of each value: the reverse of `predecessors`."""
        hops: list[list[Edge]] = [[] for _ in self.predecessors]
        for v, sources in enumerate(self.predecessors):
            for w, e in sources:
                hops[w].append((v, e))
        return hops

    @cached_property
    def live_values(self) -> Set[Value]:
        """Values with a use: for an output, a branch, a trip or a side effect."""
        return self.ancestors(live_roots(self.program)).keys()

    def ancestors(
        self, start: Iterable[Value | None], edge_filter: EdgeFilter | None = None, limit: int | None = None
    ) -> dict[Value, int]:
        """Return the values from which `start` is made, `start` included, each with the number of equations passed.

        Args:
            start: Values, None for literals.
            edge_filter: Filter on edges `(value, value read, equation)`; None for all edges.
            limit: Stop after so many values; time grows with the number of values.
        """
        seen = {v: 0 for v in start if v is not None}
        todo = list(seen)
        # `todo` grows during the loop, which Python allows for a list.
        for v in todo:
            for w, e in self.predecessors[v]:
                if w not in seen and (edge_filter is None or edge_filter(v, w, e)):
                    seen[w] = seen[v] + (e is not None)
                    todo.append(w)
            if limit is not None and len(seen) > limit:
                break
        return seen

    def input_ancestors(self, start: Iterable[Value | None], edge_filter: EdgeFilter | None = None) -> set[int]:
        """Return the inputs, by position, from which the values of `start` are made.

        Args:
            start: Values, None for literals.
            edge_filter: Filter on edges, as in `ancestors`.
        """
        seen = self.ancestors(start, edge_filter)
        return {i for i, v in enumerate(self.program.inputs) if v in seen}

    def descendants(self, start: Iterable[Value | None], edge_filter: EdgeFilter | None = None) -> set[Value]:
        """Return the values made from those of `start`, `start` included.

        Args:
            start: Values, None for literals.
            edge_filter: Filter on edges `(value made, value read, equation)`; None for all edges.
        """
        return transitive_closure(
            (v for v in start if v is not None),
            lambda v: (w for w, e in self.successors[v] if edge_filter is None or edge_filter(w, v, e)),
        )


def transitive_closure(
    start: Iterable[Value], after: Callable[[Value], Iterable[Value]], among: Set[Value] | None = None
) -> set[Value]:
    """Return the transitive closure of `start` under `after`, for relations other than all edges of a program.

    Args:
        start: First values.
        after: Function from a value to its successors.
        among: Values to stay within; None for all.
    """
    seen = set(start)
    todo = list(seen)
    for v in todo:
        new = {w for w in after(v) if w not in seen and (among is None or w in among)}
        seen |= new
        todo += new
    return seen


def follow_aliases(_v: Value, _w: Value, e: Equation | None) -> bool:
    """Return whether an edge leads to the same array in another form. An edge filter."""
    return e is None or e.primitive.alias


def stop_at_products(_v: Value, _w: Value, e: Equation | None) -> bool:
    """Return whether an edge passes no product. An edge filter."""
    return e is None or not e.primitive.is_product


def live_roots(program: Program) -> list[Value | None]:
    """Return the values for which a step runs: outputs, conditions of branches and loops, and operands of side effects.

    Args:
        program: The step.
    """
    values = list(program.outputs)
    for e in program.equations:
        if e.is_cond:
            values.append(e.operands[0])
        elif e.is_while:
            # The second body of a `while` is its condition.
            values += e.bodies[1].sub_jaxpr.outputs
        elif e.jaxpr_eqn.effects and not e.bodies:
            values += e.operands
    return values


def dependents(scope: SubJaxpr, start: Collection[Value]) -> set[Value]:
    """Return `start` and all values of a body computed by equations that depend on `start`.

    Args:
        scope: The body.
        start: Values of the body.
    """
    values = set(start)
    for e in scope.equations:
        if any(v in values for v in e.operands):
            values.update(e.results)
    return values


def required_equations(scope: SubJaxpr, targets: Collection[Value], known: Collection[Value]) -> set[int]:
    """Return the equations of a body, by index, on which the values `targets` depend.

    Args:
        scope: The body.
        targets: Values to compute.
        known: Values available already; their equations are not needed.
    """
    todo, indices = set(targets), set()
    # In reverse: an equation is needed by later ones only.
    for e in reversed(scope.equations):
        # A target may be a value inside of a body of the equation.
        body_values = {v for body in e.bodies for inner in body.sub_jaxpr.equations for v in inner.results}
        if todo.isdisjoint(e.results) and todo.isdisjoint(body_values):
            continue
        indices.add(e.index)
        todo.update(v for v in e.operands if v is not None and v not in known)
    return indices


def root_dependencies(scope: SubJaxpr, roots: Collection[Value]) -> Mapping[Value, frozenset[Value]]:
    """Return the members of `roots` on which each value of a body depends; values that depend on none are left out.

    Args:
        scope: The body.
        roots: Values at which dependencies end.
    """
    dependencies = {v: frozenset([v]) for v in roots}
    for e in scope.equations:
        operand_dependencies = operand_roots(e, dependencies)
        if operand_dependencies:
            dependencies |= {v: operand_dependencies for v in e.results if v not in roots}
    return dependencies


def operand_roots(e: Equation, dependencies: Mapping[Value, frozenset[Value]]) -> frozenset[Value]:
    """Return the union of the dependencies of all operands of an equation.

    Args:
        e: The equation.
        dependencies: Dependencies of values, from `root_dependencies`.
    """
    nothing = frozenset[Value]()
    return nothing.union(*(dependencies.get(v, nothing) for v in e.operands if v is not None))
