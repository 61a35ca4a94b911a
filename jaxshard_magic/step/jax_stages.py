"""A sharded step in the hands of JAX's own tools, as the `jax.jit` function that it stands for: `lower`, `trace`,
`eval_shape`, `jax.export`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax

from ..compilation.planned_call import PlannedCall, mesh_context
from ..device_arrays import put
from ..errors import ShardError
from ..program.compiling import jit
from ..program.explicit_axes import without_explicit_mesh
from ..program.flatten_call import FlatCall, ResultStructure, split_arguments
from ..program.unwrap import NUMBERS
from ..targets import target_of

if TYPE_CHECKING:
    from .step_programs import StepPrograms


@dataclass(frozen=True)
class JaxStages:
    """One kind of call of a step as a function for `jax.jit`.

    Attributes:
        call: The call, with numbers as traced inputs, as `jax.jit` has them.
        planned: Its plan.
    """

    call: FlatCall
    planned: PlannedCall

    @classmethod
    def of(cls, programs: "StepPrograms", args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "JaxStages":
        """Plan a call.

        Args:
            programs: Programs of the step.
            args: Arrays or `jax.ShapeDtypeStruct`, as for a call.
            kwargs: The same, by name.

        Raises:
            ShardError: The step can't be planned, or `jax.jit` can't express its call.
        """
        name = programs.name
        if programs.request.pipeline is not None:
            raise ShardError(
                f"{name}: a pipeline is a program for each stage, and no single function of jax.jit; "
                ".prepare(...) compiles them, and .report() tells what they do"
            )
        # As `jax.jit` has it: numbers are inputs, and what the step reads besides its arguments is a constant.
        step = replace(programs.step, numbers=NUMBERS - {bool}, input_names=frozenset())
        call = programs.flatten_for_plan(args, kwargs, step)
        others = [type(x).__name__ for x in call.python_values.values() if not any(x is y for y in call.step.bound)]
        if call.nodes is not None or call.reference_positions or others:
            what = others[0] if others else "jax.Ref" if call.reference_positions else "Flax NNX object"
            raise ShardError(
                f"{name} takes a {what}, which is no array for jax.jit: .prepare(...) compiles the step with it; "
                "or pass its arrays (nnx.split), or make it a static argument of the step's own jit"
            )
        with without_explicit_mesh():
            planned = programs.planned_for(call)
        if planned.rewritten is not None and planned.rewritten.added:
            raise ShardError(f"{name}: --pad adds rows before each call, which jax.jit does not; leave it out")
        return cls(call, planned)

    def trace(self) -> Any:
        """Return the sharded step as `jax.stages.Traced`."""
        plan, result, call = self.planned.plan, self.planned.result, self.call
        count = len(self.planned.traced.consts)
        consts = self.planned.traced.consts
        if target_of(plan.mesh) is None:
            consts = put(consts, plan.in_shardings[:count])

        def program(*args: Any, **kwargs: Any) -> Any:
            arguments, _, _ = split_arguments(call.step, args, kwargs)
            leaves = jax.tree.leaves(arguments)
            return result.build(plan.run(*consts, *(leaves[i] for i in call.array_positions)))

        program.__name__ = program.__qualname__ = call.step.name
        args, kwargs = self._shapes()
        bound = len(call.step.bound)
        numbers = [k - bound for k in call.statics if isinstance(k, int)]
        names = [k for k in call.statics if isinstance(k, str)]
        placed = _results(result, plan.out_shardings)
        jitted = jit(
            program,
            static_argnums=numbers,
            static_argnames=names,
            donate_argnums=self._donated_arguments(args),
            out_shardings=placed,
        )
        with mesh_context(plan.mesh):
            return jitted.trace(*args, **kwargs)

    def eval_shape(self) -> Any:
        """Return the step's result with a `jax.ShapeDtypeStruct`, with its sharding, for each array."""
        pairs = zip(self.planned.traced.closed.out_avals, self.planned.plan.out_shardings, strict=True)
        return self.planned.result.build([jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at) for x, at in pairs])

    def _shapes(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the caller's arguments, with a shape and the plan's sharding for each array."""
        call, shardings = self.call, self.planned.plan.in_shardings[len(self.planned.traced.consts) :]
        leaves: dict[int, Any] = {
            i: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at, weak_type=bool(x.weak_type))
            for i, x, at in zip(call.array_positions, self.planned.avals, shardings, strict=True)
        }
        leaves |= call.python_values
        [*args], kwargs = call.treedef.unflatten([leaves[i] for i in range(call.treedef.num_leaves)])
        for i in sorted(k for k in call.statics if isinstance(k, int)):
            args.insert(i, call.statics[i])
        kwargs |= {k: v for k, v in call.statics.items() if isinstance(k, str)}
        return args[len(call.step.bound) :], {k: v for k, v in kwargs.items() if k not in call.step.bound_kwargs}

    def _donated_arguments(self, args: list[Any]) -> list[int]:
        """Return the positional arguments of the caller whose arrays are all donated."""
        donated = {self.call.array_positions[i] for i in self.planned.donated}
        found, first = [], len(jax.tree.leaves(self.call.step.bound))
        statics = {k - len(self.call.step.bound) for k in self.call.statics if isinstance(k, int)}
        for k, x in enumerate(args):
            if k in statics:
                continue
            leaves = range(first, first := first + len(jax.tree.leaves(x)))
            if leaves and donated.issuperset(leaves):
                found.append(k)
        return found


def _results(result: ResultStructure, shardings: Any) -> Any:
    """Return the sharding of each array of the result, in the result's structure; None for other leaves."""
    return result.treedef.unflatten([shardings[v] if kind == "out" else None for kind, v in result.leaves])
