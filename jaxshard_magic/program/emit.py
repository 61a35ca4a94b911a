"""Run a `Program` again, equation by equation, with a chance to change operands and results.

Under a trace this re-emits the step: same numbers, with what a subclass of `Emitter` adds.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jax._src.source_info_util import current_name_stack, new_name_stack  # jax has no public form

from . import control_flow
from .ir import Door, Equation, Program, Scope
from .lines import Calls, user_context
from .primitives import bind, scan_counts
from .thread_state import traceback_of_equation


def caller() -> Any:
    """The traceback of the equation that runs, of whichever emitter: a loss is run by one of its own inside of that of
    its step. None where none runs."""
    return traceback_of_equation.get()


class Emitter:
    """`Emitter(program)(*arrays)` gives the outputs of the program. Gradients are already taken, so custom
    derivative rules and jits are opened; loops, branches and remat stay. `labels`: scopes to put equations in, by
    their index."""

    def __init__(self, program: Program, labels: Mapping[int, str] | None = None):
        self.program = program
        self.labels: Mapping[int, str] = labels or {}
        self._scopes = {i: new_name_stack(name) for i, name in (labels or {}).items()}
        self._calls = Calls()

    def __call__(self, *args: Any) -> list:
        return self.run(self.program.top, args)

    def before(self, e: Equation, values: list) -> list:
        """The operands that `e` is to see."""
        return values

    def after(self, e: Equation, outs: list) -> list:
        """The results that the rest of the step is to see."""
        return outs

    def result(self, e: Equation, values: list) -> list:
        """What `e`, without a body, makes of these operands."""
        return bind(e.eqn, values)

    def body(self, scope: Scope, args: Any) -> list:
        """A body that stays a body (of a loop, a branch, remat)."""
        return self.run(scope, args)

    def run(self, scope: Scope, args: Any) -> list:
        env = scope.env(args)
        self.through(scope.equations, env)
        return scope.results(env)

    def through(self, equations: Iterable[Equation], env: dict) -> None:
        """Run equations on the arrays of `env`, by value, and put what they make there."""
        for e in equations:
            operands = zip(e.ins, e.eqn.invars, strict=True)
            values = [var.val if v is None else env[v] for v, var in operands]  # pyright: ignore[reportAttributeAccessIssue]
            with self.context_of(e):
                env.update(zip(e.outs, self.equation(e, values), strict=True))

    def traceback(self, e: Equation) -> Any:
        """The traceback of `e`, joined to those of the equations in whose bodies it is; None where there is none."""
        outer = None if e.outer is None else self.traceback(e.outer)
        return self._calls.join(outer, e.eqn.source_info.traceback)

    @contextmanager
    def context_of(self, e: Equation) -> Iterator[None]:
        """What runs meanwhile has the line, the names and the context of `e`."""
        info = e.eqn.source_info
        names = current_name_stack() + info.name_stack
        if e.index in self._scopes:
            names = names + self._scopes[e.index]
        lines = self._calls.join(caller(), info.traceback)
        with user_context(lines, name_stack=names), e.eqn.ctx.manager:
            token = traceback_of_equation.set(lines)
            try:
                yield
            finally:
                traceback_of_equation.reset(token)

    def equation(self, e: Equation, values: list) -> list:
        """The results of one equation."""
        if e.is_scan:
            return self._scan(e, values, e.doors[0])
        if e.is_while:
            return self._while(e, values, *e.doors)
        if e.is_cond:
            branches = [self._function(door.scope) for door in e.doors]
            return control_flow.cond(e, branches, values[0], values[1:])
        if e.primitive.remat and e.params["differentiated"] and e.params["prevent_cse"]:
            return self.body(e.doors[0].scope, control_flow.prevent_cse(e, values))
        if e.doors:
            return self.run(e.doors[0].scope, values)
        return self.after(e, self.result(e, self.before(e, values)))

    def _scan(self, e: Equation, values: list, door: Door) -> list:
        consts, carried = scan_counts(e.params)
        fixed, start, xs = values[:consts], values[consts : consts + carried], values[consts + carried :]

        def trip(carry, x):
            outs = self.body(door.scope, [*fixed, *carry, *x])
            return tuple(outs[:carried]), tuple(outs[carried:])

        carry, ys = control_flow.scan(e, trip, start, tuple(xs))
        return [*carry, *ys]

    def _while(self, e: Equation, values: list, body: Door, test: Door) -> list:
        tested, fixed = e.params["cond_nconsts"], e.params["body_nconsts"]
        condition = self._function(test.scope, values[:tested])
        trip = self._function(body.scope, values[tested : tested + fixed])
        return control_flow.while_loop(e, condition, trip, values[tested + fixed :])

    def _function(self, scope: Scope, constants: Sequence[Any] = ()) -> Callable[..., list]:
        """A body that stays one, as a function of its inputs after `constants`."""
        return lambda *xs: self.body(scope, [*constants, *xs])
