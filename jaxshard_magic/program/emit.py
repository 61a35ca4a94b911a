"""Re-emit a traced program equation by equation, with hooks to change operands and results.

`Emitter` is an interpreter of `Program`. Called under a JAX trace it rebuilds the step: the same numbers, plus what a
subclass adds (sharding constraints, casts, captured values). Gradients have been taken before, so calls and custom
derivative rules are inlined; loops, branches and checkpoints keep their structure.

Footguns:
- Before gradients are taken the emitter to use is `Replay`, which keeps custom derivative rules and checkpoints.
- Subclasses share the private names `_tracebacks` and `_scopes`: a field of the same name hides them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax._src.source_info_util import current_name_stack, new_name_stack  # no public equivalent
from jax.extend.core import ClosedJaxpr

from . import control_flow
from .ir import Body, Equation, Program, SubJaxpr
from .primitives import bind, scan_counts
from .references import discharge_references
from .source_lines import TracebackJoiner, user_context
from .thread_state import traceback_of_equation


def current_traceback() -> Any:
    """Return the traceback of the equation that runs now; None where none runs.

    A loss has an emitter of its own inside the emitter of its step; the traceback is that of the innermost emitter.
    """
    return traceback_of_equation.get()


class Emitter:
    """Interpreter that rebuilds a `Program`; subclasses override the hooks.

    `Emitter(program)(*arrays)` returns the outputs of the program. Hooks, in the order in which an equation without a
    body passes them: `before` changes operands, `result` computes, `after` changes results. `enter_body` runs each body
    that stays a body: of a loop, a branch, a checkpoint.

    Args:
        program: The program to rebuild.
        scope_names: Name scopes for some equations, by equation index; they show up in HLO metadata and profiles.
    """

    def __init__(self, program: Program, scope_names: Mapping[int, str] | None = None):
        self.program = program
        self.scope_names: Mapping[int, str] = scope_names or {}
        self._scopes = {i: new_name_stack(name) for i, name in (scope_names or {}).items()}
        self._tracebacks = TracebackJoiner()

    def __call__(self, *args: Any) -> list:
        """Return the outputs of the program for flat `args`, which match `program.inputs` in shape and dtype."""
        return self.run(self.program.top, args)

    def before(self, e: Equation, values: list) -> list:
        """Return the operands that `e` should read."""
        return values

    def after(self, e: Equation, outs: list) -> list:
        """Return the results of `e` that the rest of the program should read."""
        return outs

    def result(self, e: Equation, values: list) -> list:
        """Compute `e`, which has no body, and return its results."""
        return bind(e.jaxpr_eqn, values)

    def enter_body(self, scope: SubJaxpr, args: Any) -> list:
        """Run a body that stays a body (of a loop, a branch, a checkpoint) and return its outputs."""
        return self.run(scope, args)

    def run(self, scope: SubJaxpr, args: Any) -> list:
        """Run a sub-jaxpr on `args` and return its outputs."""
        env = scope.bind_inputs(args)
        self.run_equations(scope.equations, env)
        return scope.read_outputs(env)

    def run_equations(self, equations: Iterable[Equation], env: dict) -> None:
        """Run equations in order, reading arrays from `env` and writing results to it.

        Args:
            equations: Equations of one body.
            env: Arrays by value.
        """
        for e in equations:
            operands = zip(e.operands, e.jaxpr_eqn.invars, strict=True)
            values = [var.val if v is None else env[v] for v, var in operands]  # pyright: ignore[reportAttributeAccessIssue]
            with self.source_context(e):
                env.update(zip(e.results, self.run_equation(e, values), strict=True))

    def traceback_of(self, e: Equation) -> Any:
        """Return the traceback of `e`, joined with those of the equations around it; None without one."""
        outer = None if e.parent is None else self.traceback_of(e.parent)
        return self._tracebacks.join(outer, e.jaxpr_eqn.source_info.traceback)

    @contextmanager
    def source_context(self, e: Equation) -> Iterator[None]:
        """Open the traceback, name stack and JAX context of `e` for all that is bound inside."""
        info = e.jaxpr_eqn.source_info
        # The equations of a body have only the scopes opened inside of the body.
        names = current_name_stack() + info.name_stack
        if e.index in self._scopes:
            names = names + self._scopes[e.index]
        traceback = self._tracebacks.join(current_traceback(), info.traceback)
        # XLA attributes a collective to the Python frames of its equation: without its own traceback all communication
        # would be reported on the line that calls the emitter.
        with user_context(traceback, name_stack=names), e.jaxpr_eqn.ctx.manager:
            token = traceback_of_equation.set(traceback)
            try:
                yield
            finally:
                traceback_of_equation.reset(token)

    def run_equation(self, e: Equation, values: list) -> list:
        """Compute one equation and return its results: control flow here, all else by the hooks."""
        if e.is_scan:
            return self._scan(e, values, e.bodies[0])
        if e.is_while:
            return self._while(e, values, *e.bodies)
        if e.is_cond:
            branches = [self._as_function(body.sub_jaxpr) for body in e.bodies]
            return control_flow.cond(e, branches, values[0], values[1:])
        if e.primitive.remat and e.params["differentiated"] and e.params["prevent_cse"]:
            # Without the barrier XLA merges the recomputation with the forward pass, and the checkpoint saves no
            # memory.
            return self.enter_body(e.bodies[0].sub_jaxpr, control_flow.prevent_cse(e, values))
        # Calls and custom derivative rules are inlined: gradients have been taken already.
        if e.bodies:
            return self.run(e.bodies[0].sub_jaxpr, values)
        return self.after(e, self.result(e, self.before(e, values)))

    def _scan(self, e: Equation, values: list, body: Body) -> list:
        num_constants, num_carries = scan_counts(e.params)
        constants, initial, xs = (
            values[:num_constants],
            values[num_constants : num_constants + num_carries],
            values[num_constants + num_carries :],
        )

        def trip(carry, x):
            outs = self.enter_body(body.sub_jaxpr, [*constants, *carry, *x])
            return tuple(outs[:num_carries]), tuple(outs[num_carries:])

        carry, ys = control_flow.scan(e, trip, initial, tuple(xs))
        return [*carry, *ys]

    def _while(self, e: Equation, values: list, body: Body, test: Body) -> list:
        tested, fixed = e.params["cond_nconsts"], e.params["body_nconsts"]
        condition = self._as_function(test.sub_jaxpr, values[:tested])
        trip = self._as_function(body.sub_jaxpr, values[tested : tested + fixed])
        return control_flow.while_loop(e, condition, trip, values[tested + fixed :])

    def _as_function(self, scope: SubJaxpr, constants: Sequence[Any] = ()) -> Callable[..., list]:
        """Return a body that stays a body as a function of the inputs after `constants`."""
        return lambda *xs: self.enter_body(scope, [*constants, *xs])


class Replay(Emitter):
    """Emitter for a loss: keeps custom derivative rules and remat, inlines jits.

    `Emitter` inlines derivative rules as well, since gradients of its programs have been taken. Subclasses rewrite
    equations with the same hooks.
    """

    def run_equation(self, e: Equation, values: list) -> list:
        if e.primitive.custom_derivative:
            return self.after(e, bind(e.jaxpr_eqn, self.before(e, values)))
        if e.primitive.remat:
            return control_flow.checkpoint(e, self._as_function(e.bodies[0].sub_jaxpr), values)
        return super().run_equation(e, values)


class PerBodyReplay(Replay):
    """Replay with a cache per body, for results shared by everything that reads them in the same body.

    Attributes:
        cache: Empty at the start of a body.
    """

    def __init__(self, program: Program):
        super().__init__(program)
        self.cache: dict[Any, Any] = {}

    def run(self, scope: SubJaxpr, args: Any) -> list:
        # Tracers of one body must not be used in another, so each body has a cache of its own.
        outer, self.cache = self.cache, {}
        try:
            return super().run(scope, args)
        finally:
            self.cache = outer


def retrace(emitter: Emitter, avals: Sequence[Any] | None = None) -> ClosedJaxpr:
    """Return the program of an emitter as a new jaxpr. Its constants are those of jits in the program.

    Args:
        emitter: Emitter to run.
        avals: Input avals; None for those of the program.
    """
    inputs = emitter.program.closed.in_avals if avals is None else avals
    return discharge_references(jax.make_jaxpr(lambda *xs: emitter(*xs))(*inputs))


def run_replay(closed: ClosedJaxpr, kind: type[Replay], *options: Any) -> ClosedJaxpr:
    """Return `closed` after a single rewrite: trace `kind(Program(closed), *options)`.

    Args:
        closed: Jaxpr to rewrite.
        kind: Replay class.
        options: Further arguments of `kind`.
    """
    return retrace(kind(Program(closed), *options))
