"""Compare a sharded call with the plain, unsharded step on the same inputs (`--check`), separating rounding from
errors."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from ..compilation.compiled_step import CompiledStep
from ..config.request import Request
from ..device_arrays import is_prng_key, put, to_numpy
from ..errors import list_names
from ..gradients.precision import cast_loss
from ..plan import Plan
from ..program.explicit_axes import ExplicitAxes, KeptPlacements
from ..program.flatten_call import FlatCall, shape_structs
from ..program.ir import Program
from ..program.jax_settings import suspend_checks
from ..program.per_device import PerDeviceTrace
from ..program.references import discharge_references
from ..program.roles import BATCH
from ..program.trace import Traced, path_name
from ..report import BY_HAND, Check
from ..temporary import run_in_context

# Allowed difference relative to the largest number of a leaf, by bits of its dtype; other dtypes: so many units in the
# last place of 1 (`finfo.eps`). Numbers of 8 bits are operands of products, which are summed in a wider dtype: rounded
# the other way, a single operand changes a sum by less than half a unit.
LIMITS = {64: 1e-9, 32: 1e-4}
NARROW_UNITS = {16: 4, 8: 0.5, 6: 0.5, 4: 0.5}
NOISE_FACTOR = 8  # a sharded sum adds in another order than the plain one
ROUNDING_FACTOR = 4  # two orders of a sum in float16 differ from the sum in float32 by at most this ratio
# Largest change of the inputs in ulps, for each perturbed run; the last two run only while leaves fail.
NOISE_ULPS = (2, 2, 8, 8)

Run = Callable[[Sequence[np.ndarray]], list[np.ndarray]]


class PlainStep:
    """Plain, unsharded step with copies of one call's inputs on the host.

    The inputs are copied before the call may donate them. The step is compiled once and run once on these inputs, for
    any number of compared calls.

    Args:
        peeled: Flat call of the step, with its inputs.
        mesh: Mesh that a step written for explicit axes may name without having one.
    """

    @run_in_context(suspend_checks)
    def __init__(self, peeled: FlatCall, mesh: Mesh):
        self._fun, self._avals = peeled.flat_function, shape_structs(peeled.leaves)
        self._axes = ExplicitAxes(peeled.explicit_mesh, mesh, KeptPlacements.NONE)
        self._own_shardings = peeled.own_shardings
        self._kinds = [_key_kind(x) for x in peeled.leaves]
        rows = zip(peeled.leaves, self._avals, self._kinds, strict=True)
        # Copied now, as the call may donate its arguments.
        self._leaves = [to_numpy(x) if kind is not None else to_numpy(x).astype(a.dtype) for x, a, kind in rows]
        self._known: dict[Any, Run] = {}

    @run_in_context(suspend_checks)
    def against(
        self,
        traced: Traced,
        outs: Sequence[Any],
        reference: Traced | None = None,
        product_dtype: Any = None,
        plan: Plan | None = None,
    ) -> Check:
        """Run the plain step on one device and compare with the outputs of a sharded call.

        Args:
            traced: Trace of the sharded call.
            outs: Flat outputs of the sharded call.
            reference: Trace of a loop over microbatches, to compare with in place of the plain step.
            product_dtype: Dtype given to the products of `traced` where the plain step has a wider dtype.
            plan: Plan of the sharded call, used if the outputs differ: `jax.jit` alone gets the same shardings.
        """
        float_dtypes = [a.dtype for a in Program(traced.closed).avals if jnp.issubdtype(a.dtype, jnp.floating)]
        limit = max(map(limit_of, float_dtypes), default=0.0)
        names = [path_name(path) for path in traced.out_paths[: len(outs)]]
        shapes = [x.shape for x in outs]
        run = self._plain_run(traced, shapes) if reference is None else self._compile_trace(reference, shapes)
        noise_run = None if product_dtype is None else (self._compile_trace(traced, shapes), product_dtype)
        # A step computing in float16 or bfloat16 by itself is as far from its float32 result as a correct sharded call
        # is.
        float32_run = None
        if product_dtype is None and any(jnp.finfo(dtype).bits < 32 for dtype in float_dtypes):
            float32_run = self._compile_trace(reference or traced, shapes, in_float32)
        outcome = compare(names, [to_numpy(x) for x in outs], run, self._leaves, limit, noise_run, float32_run)
        if outcome.failed and plan is not None and not isinstance(traced, PerDeviceTrace):
            failed = [i for i, name in enumerate(names) if name in outcome.failed]
            outcome = replace(outcome, compiler=self._compiler_also_fails(traced, plan, shapes, failed, limit))
        if reference is not None:
            return replace(outcome, reference=BY_HAND)
        if not isinstance(traced, PerDeviceTrace):
            return outcome
        axes = list_names(map(repr, traced.mapping.axes))
        return replace(outcome, reference=f"jax.vmap of the step over {axes} on one device")

    def _plain_run(self, traced: Traced, shapes: Sequence[tuple[int, ...]]) -> Run:
        """Return the compiled plain step; cached unless the step runs per device."""
        if isinstance(traced, PerDeviceTrace):
            return self._compiled(traced, shapes)
        key = *traced.out_paths[: len(shapes)], *shapes
        if key not in self._known:
            self._known[key] = self._once(self._compiled(traced, shapes))
        return self._known[key]

    def _once(self, run: Run) -> Run:
        """Return `run` with the outputs for the call's own inputs cached."""
        outs: list[list[np.ndarray]] = []

        def remembered(leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
            # Perturbed inputs are other lists: only the call's own inputs are compared with again.
            if leaves is not self._leaves:
                return run(leaves)
            if not outs:
                outs.append(run(leaves))
            return outs[0]

        return remembered

    def _compiler_also_fails(
        self, traced: Traced, plan: Plan, shapes: Sequence[tuple[int, ...]], failed: Iterable[int], limit: float
    ) -> bool:
        """Return whether `jax.jit` of the plain step gets all `failed` outputs wrong as well.

        Tries two placements: only the batch sharded, then every argument sharded as in `plan`.
        """
        n, plain = len(traced.consts), self._plain_run(traced, shapes)(self._leaves)
        divided = list(zip(plan.leaves, plan.in_specs, strict=True))[n:]
        batch = [spec if leaf.role == BATCH else PartitionSpec() for leaf, spec in divided]
        for lying in (batch, [spec for _, spec in divided]):
            where = {i: NamedSharding(plan.mesh, spec) for i, spec in enumerate(lying)}
            alone = self._compiled(traced, shapes, where)(self._leaves)
            off = ((_difference(alone[i], plain[i]), _allowed(plain[i], limit)) for i in failed)
            if all(d.max(initial=0.0) > most for d, most in off):
                return True
        return False

    def _compiled(
        self, traced: Traced, shapes: Sequence[tuple[int, ...]], where: Mapping[int, NamedSharding] | None = None
    ) -> Run:
        """Compile the plain step for one device, or with the shardings in `where`, by input."""
        out_paths: list[KeyPath] = []
        untraced_outputs: dict[KeyPath, Any] = {}

        def flat(*leaves):
            outs, out_paths[:], result = self._fun(*leaves)
            untraced_outputs.update(result.python_values)
            return outs

        alone = traced.emulate(flat, shapes) if isinstance(traced, PerDeviceTrace) else flat
        closed, mesh = self._axes.trace(
            lambda avals: discharge_references(jax.make_jaxpr(alone)(*avals)), self._avals, self._own_shardings
        )
        closed, _ = self._axes.untyped(closed, closed.consts, mesh)
        constants = [_device(to_numpy(c), _key_kind(c)) for c in closed.consts]
        program = jax.jit(lambda consts, xs: jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*xs))
        out_position = {path: i for i, path in enumerate(out_paths)}
        in_position = {path: i for i, path in enumerate(traced.in_paths[len(traced.consts) :])}

        def run(leaves):
            placed = list(map(_device, leaves, self._kinds))
            if where is not None:
                placed = put(placed, [where[i] for i in range(len(placed))])
            outs = program(constants, placed)

            def result(path):
                """Return one output as an array, also if it is a constant of a gradient call, or an object only read by
                the step."""
                if path in out_position:
                    return to_numpy(outs[out_position[path]])
                return (
                    to_numpy(jnp.asarray(untraced_outputs[path]))
                    if path in untraced_outputs
                    else leaves[in_position[path]]
                )

            return [result(path) for path in traced.out_paths[: len(shapes)]]

        return run

    def _compile_trace(
        self,
        traced: Traced,
        shapes: Sequence[tuple[int, ...]],
        changed: Callable[[ClosedJaxpr], ClosedJaxpr] = lambda closed: closed,
    ) -> Run:
        """Compile a trace, with `changed` applied to the jaxpr first."""
        traced = traced.emulated_trace(shapes) if isinstance(traced, PerDeviceTrace) else traced
        constants = [_device(to_numpy(c), _key_kind(c)) for c in traced.consts]
        program = jax.jit(lambda consts, xs: jaxpr_as_fun(changed(traced.closed))(*consts, *xs))

        def run(leaves):
            return [to_numpy(x) for x in program(constants, list(map(_device, leaves, self._kinds)))]

        return run


def compare_call(plain: Any, entry: CompiledStep, outs: Any, request: Request) -> Check:
    """Return the comparison of a call's outputs with the plain step's, for the same inputs.

    Args:
        plain: The `PlainStep` of the call, or a reference with its method `against`.
        entry: Program of the call.
        outs: Outputs of the program.
        request: Strategy, mesh and options of the step.
    """
    by_hand = entry.rewritten.reference_step() if entry.rewritten is not None else None
    flat = jax.tree.leaves(outs) if entry.takes_pytrees else outs
    if by_hand is not None and isinstance(entry.traced, PerDeviceTrace):
        by_hand = entry.traced.with_trace(by_hand)
    return plain.against(
        entry.traced,
        flat,
        by_hand,
        None if entry.padding else request.gradients.narrow,
        None if entry.padding or request.pipeline is not None else entry.plan,
    )


def compare(
    names: Sequence[str],
    sharded: Sequence[np.ndarray],
    run: Run,
    inputs: Sequence[np.ndarray],
    limit: float = 0.0,
    noise_run: tuple[Run, Any] | None = None,
    float32_run: Run | None = None,
) -> Check:
    """Compare the outputs of a sharded call with those of the plain step.

    Differences are relative to the largest number of an output. Each float dtype has a limit, and `limit` is a lower
    bound for all. An output beyond the limit counts as noise if the plain step itself changes as much, in as many
    numbers, when the inputs change by 1 to 8 ulps. Example: a bias before a normalization has gradient zero except for
    rounding, and Adam turns the rounding into full steps. Keys and integers must be equal, or be noise likewise.

    Args:
        names: Path of each output.
        sharded: Outputs of the sharded call.
        run: Plain step.
        inputs: Flat inputs of both.
        limit: Limit of the coarsest dtype inside the step.
        noise_run: Step and dtype of an ulp for measuring noise in place of the plain step, for a sharded call computing
            in a narrower dtype.
        float32_run: Plain step in float32, for a step computing in a narrower dtype by itself. An output about as near
            to the float32 result as the plain step's output is rounding.

    Returns:
        Verdict with the largest differences, and the paths of noisy and failed outputs.
    """
    plain = run(inputs)
    limits = [_allowed(x, limit) for x in plain]
    off = [_difference(s, p) for s, p in zip(sharded, plain, strict=True)]
    suspects = [i for i, d in enumerate(off) if d.max(initial=0.0) > limits[i]]
    failed, spreads = suspects, {i: [] for i in suspects}
    perturbed_run, narrow = noise_run or (run, None)
    # The noise run may compute in another dtype, so that its result without noise differs from the plain one.
    unperturbed = plain if noise_run is None or not suspects else perturbed_run(inputs)
    for seed, ulps in enumerate(NOISE_ULPS):
        if not failed:
            break
        perturbed = perturbed_run(
            [_perturb(x, ulps, np.random.default_rng([seed, i]), narrow) for i, x in enumerate(inputs)]
        )
        for i in suspects:
            spreads[i].append(_difference(perturbed[i], unperturbed[i], plain[i]))
        # A single run says little: numbers near a rounding border change only now and then.
        if seed:
            failed = [i for i in failed if not _is_noise(off[i], spreads[i], limits[i])]
    if failed and float32_run is not None:
        true = float32_run(inputs)
        failed = [i for i in failed if not _is_rounding(sharded[i], plain[i], true[i], limits[i])]
    noise = [i for i in suspects if i not in failed]
    sound = [i for i in range(len(names)) if i not in noise]
    return Check(
        passed=not failed,
        max_abs_diff=_finite(max((_absolute(sharded[i], plain[i]) for i in sound), default=0.0)),
        max_rel_diff=_finite(max((float(off[i].max(initial=0.0)) for i in sound), default=0.0)),
        limit=max(limits, default=0.0),
        reference="the plain step on one device",
        noise=tuple(names[i] for i in noise),
        noise_in=tuple((int((off[i] > limits[i]).sum()), off[i].size) for i in noise),
        failed=tuple(names[i] for i in failed),
        failed_by=tuple(_finite(float(off[i].max(initial=0.0))) for i in failed),
    )


def in_float32(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return the step with all computation in narrower dtypes done in float32."""
    return cast_loss(closed, "f32").closed


def _is_rounding(sharded: np.ndarray, plain: np.ndarray, true: np.ndarray, limit: float) -> bool:
    """Return whether a sharded output is about as near to the float32 result as the plain step's output."""
    off, rounding = _difference(sharded, true, plain), _difference(plain, true)
    far, many = off.max(initial=0.0), (off > limit).sum()
    return (
        _is_float(plain)
        and far <= ROUNDING_FACTOR * rounding.max(initial=0.0)
        and many <= 2 * (rounding > limit).sum() + 2
    )


def _finite(x: float) -> float | None:
    """Return a difference, or None for a difference from a non-finite number."""
    return x if np.isfinite(x) else None


def limit_of(dtype: Any) -> float:
    """Return the largest relative difference explained by rounding in a float dtype."""
    info = jnp.finfo(dtype)
    return LIMITS.get(info.bits) or NARROW_UNITS[info.bits] * float(info.eps)


def _allowed(x: np.ndarray, limit: float) -> float:
    """Return the allowed difference of an output: 0 for keys and integers."""
    return max(limit, limit_of(x.dtype)) if _is_float(x) else 0.0


def _is_noise(off: np.ndarray, spreads: Iterable[np.ndarray], limit: float) -> bool:
    """Return whether the plain step changes an output as far as `off`, in as many numbers."""
    farthest = max(float(s.max(initial=0.0)) for s in spreads)
    most = max(int((s > limit / NOISE_FACTOR).sum()) for s in spreads)
    return off.max() <= NOISE_FACTOR * farthest and (off > limit).sum() <= 4 * most + 2


def _difference(x: np.ndarray, reference: np.ndarray, scale: np.ndarray | None = None) -> np.ndarray:
    """Return the difference of each number, relative to the largest finite number of `scale`, by default the reference.

    Infinite for unequal numbers of which one is NaN or infinite, and for different shapes or dtypes. For keys and
    integers 1 where they differ, else 0.
    """
    if x.shape != reference.shape or x.dtype != reference.dtype:
        return np.full(max(x.size, 1), np.inf)
    if not _is_float(x):
        return (x != reference).astype(np.float64)
    a, b = _wide(x), _wide(reference)
    of = b if scale is None else _wide(scale)
    largest = np.abs(of[np.isfinite(of)]).max(initial=0.0)
    # Infinity minus infinity is NaN, and treated below.
    with np.errstate(invalid="ignore"):
        off = np.abs(a - b) / (largest or 1.0)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, np.where(np.isnan(off), np.inf, off))


def _absolute(x: np.ndarray, reference: np.ndarray) -> float:
    """Return the largest absolute difference; infinite for different shapes or dtypes."""
    if x.shape != reference.shape or x.dtype != reference.dtype:
        return float("inf")
    a, b = _wide(x), _wide(reference)
    with np.errstate(invalid="ignore"):
        off = np.abs(a - b)
    return float(np.nan_to_num(np.where(a == b, 0.0, off), nan=0.0).max(initial=0.0))


def _perturb(x: np.ndarray, ulps: int, rng: np.random.Generator, narrow: Any = None) -> np.ndarray:
    """Return floats changed randomly by 1 to `ulps` units in the last place of a dtype; other dtypes unchanged."""
    if not _is_float(x) or not x.size:
        return x
    steps = rng.integers(1, ulps, x.shape, endpoint=True) * rng.choice([-1, 1], x.shape)
    return np.asarray(_wide(x) * (1 + steps * float(jnp.finfo(narrow or x.dtype).eps))).astype(x.dtype)


def _is_float(x: np.ndarray) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64)


def _key_kind(x: Any) -> Any:
    return jax.random.key_impl(x) if is_prng_key(x) else None


def _device(x: np.ndarray, kind: Any) -> Any:
    """Return an uncommitted array or key: it can follow the step's own constants to any device."""
    return jnp.asarray(x) if kind is None else jax.random.wrap_key_data(jnp.asarray(x), impl=kind)
