"""`--check`: a sharded call against the plain step on the same inputs, rounding noise told apart from
errors."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from ..errors import one_of
from ..gradients.precision import precision
from ..placing import is_key, put, whole
from ..plan import Plan
from ..program.ir import Program
from ..program.mapped import PerDevice
from ..program.peel import Peeled, specs
from ..program.roles import BATCH
from ..program.settings import own_work
from ..program.trace import Traced, path_name
from ..report import BY_HAND, Check
from ..temporary import within

LIMITS = {8: 1e-9, 4: 1e-4}  # by bytes of a float, of the leaf's largest number; shorter ones: 4 epsilons
FACTOR = 8  # sharded sums run in another order than the plain ones
AS_NEAR = 4  # two orders of one sum in float16 are this many times as far from the sum in float32, at most
RUNS = (2, 2, 8, 8)  # up to so many ulps the inputs are moved; the last two only while leaves fail

Run = Callable[[Sequence[np.ndarray]], list[np.ndarray]]


class Plain:
    """The plain step and copies of one call's inputs, taken to the host before the call may use them up. It is compiled
    once, and run once on these inputs, however many calls it is compared with."""

    @within(own_work)
    def __init__(self, peeled: Peeled):
        self._fun, self._avals = peeled.fun, specs(peeled.leaves)
        self._kinds = [_key_kind(x) for x in peeled.leaves]
        rows = zip(peeled.leaves, self._avals, self._kinds, strict=True)
        self._leaves = [whole(x) if kind is not None else whole(x).astype(a.dtype) for x, a, kind in rows]
        self._known: dict[Any, Run] = {}

    @within(own_work)
    def against(
        self,
        traced: Traced,
        outs: Sequence[Any],
        by_hand: Traced | None = None,
        narrow: Any = None,
        plan: Plan | None = None,
    ) -> Check:
        """Run the plain step on one device and compare with `outs`, a sharded call's flat outputs.

        `by_hand`: what to compare with in the place of the plain step, a loop over microbatches. `narrow`: the dtype
        that the products of `traced` were given, where the plain ones have a wider one. `plan`: how the call's
        arguments lay, which `jax.jit` is given alone where the numbers differ."""
        coarse = [a.dtype for a in Program(traced.closed).avals if jnp.issubdtype(a.dtype, jnp.floating)]
        limit = max(map(limit_of, coarse), default=0.0)
        names = [path_name(path) for path in traced.out_paths[: len(outs)]]
        shapes = [x.shape for x in outs]
        run = self._as_it_is(traced, shapes) if by_hand is None else self._compiled_by_hand(by_hand, shapes)
        rounding = None if narrow is None else (self._compiled_by_hand(traced, shapes), narrow)
        wide = None
        if narrow is None and any(jnp.finfo(dtype).bits < 32 for dtype in coarse):
            wide = self._compiled_by_hand(by_hand or traced, shapes, widened)
        outcome = compare(names, [whole(x) for x in outs], run, self._leaves, limit, rounding, wide)
        if outcome.failed and plan is not None and not isinstance(traced, PerDevice):
            failed = [i for i, name in enumerate(names) if name in outcome.failed]
            outcome = replace(outcome, compiler=self._compiler_too(traced, plan, shapes, failed, limit))
        if by_hand is not None:
            return replace(outcome, reference=BY_HAND)
        if not isinstance(traced, PerDevice):
            return outcome
        axes = one_of(map(repr, traced.mapped.axes))
        return replace(outcome, reference=f"jax.vmap of the step over {axes} on one device")

    def _as_it_is(self, traced: Traced, shapes: Sequence[tuple[int, ...]]) -> Run:
        if isinstance(traced, PerDevice):
            return self._compiled(traced, shapes)
        key = *traced.out_paths[: len(shapes)], *shapes
        if key not in self._known:
            self._known[key] = self._once(self._compiled(traced, shapes))
        return self._known[key]

    def _once(self, run: Run) -> Run:
        """`run`, which remembers what it gives for the call's own inputs."""
        outs: list[list[np.ndarray]] = []

        def remembered(leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
            if leaves is not self._leaves:
                return run(leaves)
            if not outs:
                outs.append(run(leaves))
            return outs[0]

        return remembered

    def _compiler_too(
        self,
        traced: Traced,
        plan: Plan,
        shapes: Sequence[tuple[int, ...]],
        failed: Iterable[int],
        limit: float,
    ) -> bool:
        """Does `jax.jit` of the plain step get all of the `failed` outputs wrong as well, where nothing but the batch
        lies divided, or every argument as `plan` has it?"""
        n, plain = len(traced.consts), self._as_it_is(traced, shapes)(self._leaves)
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
        self,
        traced: Traced,
        shapes: Sequence[tuple[int, ...]],
        where: Mapping[int, NamedSharding] | None = None,
    ) -> Run:
        """The plain step, on the inputs that a run is given: on one device, or `where` each is to lie."""
        own: list[KeyPath] = []
        held: dict[KeyPath, Any] = {}

        def flat(*leaves):
            outs, own[:], result = self._fun(*leaves)
            held.update(result.held)
            return outs

        alone = traced.on_one(flat, shapes) if isinstance(traced, PerDevice) else flat
        closed = jax.make_jaxpr(alone)(*self._avals)
        constants = [_device(whole(c), _key_kind(c)) for c in closed.consts]
        program = jax.jit(lambda consts, xs: jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*xs))
        place = {path: i for i, path in enumerate(own)}
        untouched = {path: i for i, path in enumerate(traced.in_paths[len(traced.consts) :])}

        def run(leaves):
            placed = list(map(_device, leaves, self._kinds))
            if where is not None:
                placed = put(placed, [where[i] for i in range(len(placed))])
            outs = program(constants, placed)

            def result(path):
                """What is seen of a gradient call are arrays: its constants too, and objects' that it only read."""
                if path in place:
                    return whole(outs[place[path]])
                return whole(jnp.asarray(held[path])) if path in held else leaves[untouched[path]]

            return [result(path) for path in traced.out_paths[: len(shapes)]]

        return run

    def _compiled_by_hand(
        self,
        traced: Traced,
        shapes: Sequence[tuple[int, ...]],
        changed: Callable[[ClosedJaxpr], ClosedJaxpr] = lambda closed: closed,
    ) -> Run:
        traced = traced.together(shapes) if isinstance(traced, PerDevice) else traced
        constants = [_device(whole(c), _key_kind(c)) for c in traced.consts]
        program = jax.jit(lambda consts, xs: jaxpr_as_fun(changed(traced.closed))(*consts, *xs))

        def run(leaves):
            return [whole(x) for x in program(constants, list(map(_device, leaves, self._kinds)))]

        return run


def compare(
    names: Sequence[str],
    sharded: Sequence[np.ndarray],
    run: Run,
    inputs: Sequence[np.ndarray],
    limit: float = 0.0,
    rounding: tuple[Run, Any] | None = None,
    wide: Run | None = None,
) -> Check:
    """Compare a sharded call's outputs with those of `run(inputs)`, the plain step.

    Differences are relative to the leaf's largest number; each float dtype has its limit, at least `limit`
    (that of the coarsest dtype within the step). A leaf above it is noise where the plain step itself moves
    it as far, and as many of its numbers, when its inputs are moved by an ulp or two: a bias before a norm
    has gradient zero but for rounding, which Adam turns into full steps. Keys and integers must be equal,
    or be noise likewise. `rounding`: the run, and the dtype of an ulp, to look at for noise in the place of the plain
    step's, where the sharded call computes in a narrower type. `wide`: the plain step in float32, where it computes in
    a narrower type by itself: what that is as far from as the sharded call is its rounding.
    """
    plain = run(inputs)
    limits = [_allowed(x, limit) for x in plain]
    off = [_difference(s, p) for s, p in zip(sharded, plain, strict=True)]
    suspects = [i for i, d in enumerate(off) if d.max(initial=0.0) > limits[i]]
    failed, spreads = suspects, {i: [] for i in suspects}
    own, narrow = rounding or (run, None)
    still = plain if rounding is None or not suspects else own(inputs)
    for seed, ulps in enumerate(RUNS):
        if not failed:
            break
        moved = own([_moved(x, ulps, np.random.default_rng([seed, i]), narrow) for i, x in enumerate(inputs)])
        for i in suspects:
            spreads[i].append(_difference(moved[i], still[i], plain[i]))
        if seed:  # one run says little about numbers of which each flips now and then
            failed = [i for i in failed if not _is_noise(off[i], spreads[i], limits[i])]
    if failed and wide is not None:
        true = wide(inputs)
        failed = [i for i in failed if not _as_near(sharded[i], plain[i], true[i], limits[i])]
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


def widened(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A step with all in float32 that it computes in narrower types."""
    return precision(closed, "f32").closed


def _as_near(sharded: np.ndarray, plain: np.ndarray, true: np.ndarray, limit: float) -> bool:
    """Is a sharded call's output about as near to the one without rounding as the plain step's is?"""
    off, rounding = _difference(sharded, true, plain), _difference(plain, true)
    far, many = off.max(initial=0.0), (off > limit).sum()
    return (
        _is_float(plain)
        and far <= AS_NEAR * rounding.max(initial=0.0)
        and many <= 2 * (rounding > limit).sum() + 2
    )


def _finite(x: float) -> float | None:
    """A difference from what is not a number has no size."""
    return x if np.isfinite(x) else None


def limit_of(dtype: Any) -> float:
    """The largest difference that rounding explains, of the leaf's largest number."""
    info = jnp.finfo(dtype)
    return LIMITS.get(info.bits // 8, 4 * float(info.eps))


def _allowed(x: np.ndarray, limit: float) -> float:
    """How far an output may be off: keys and whole numbers not at all."""
    return max(limit, limit_of(x.dtype)) if _is_float(x) else 0.0


def _is_noise(off: np.ndarray, spreads: Iterable[np.ndarray], limit: float) -> bool:
    """Does the plain step move this leaf as far as `off`, and as many of its numbers?"""
    farthest = max(float(s.max(initial=0.0)) for s in spreads)
    most = max(int((s > limit / FACTOR).sum()) for s in spreads)
    return off.max() <= FACTOR * farthest and (off > limit).sum() <= 4 * most + 2


def _difference(x: np.ndarray, reference: np.ndarray, scale: np.ndarray | None = None) -> np.ndarray:
    """Per number, relative to the largest of `scale`, or of the reference; infinite where one of the two is not a
    number."""
    if x.shape != reference.shape or x.dtype != reference.dtype:
        return np.full(max(x.size, 1), np.inf)
    if not _is_float(x):
        return (x != reference).astype(np.float64)
    a, b = _wide(x), _wide(reference)
    of = b if scale is None else _wide(scale)
    largest = np.abs(of[np.isfinite(of)]).max(initial=0.0)
    with np.errstate(invalid="ignore"):
        off = np.abs(a - b) / (largest or 1.0)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, np.where(np.isnan(off), np.inf, off))


def _absolute(x: np.ndarray, reference: np.ndarray) -> float:
    if x.shape != reference.shape or x.dtype != reference.dtype:
        return float("inf")
    a, b = _wide(x), _wide(reference)
    with np.errstate(invalid="ignore"):
        off = np.abs(a - b)
    return float(np.nan_to_num(np.where(a == b, 0.0, off), nan=0.0).max(initial=0.0))


def _moved(x: np.ndarray, ulps: int, rng: np.random.Generator, narrow: Any = None) -> np.ndarray:
    """Floats a random 1 to `ulps` units in the last place up or down; everything else as it is."""
    if not _is_float(x) or not x.size:
        return x
    steps = rng.integers(1, ulps, x.shape, endpoint=True) * rng.choice([-1, 1], x.shape)
    return np.asarray(_wide(x) * (1 + steps * float(jnp.finfo(narrow or x.dtype).eps))).astype(x.dtype)


def _is_float(x: np.ndarray) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64)


def _key_kind(x: Any) -> Any:
    return jax.random.key_impl(x) if is_key(x) else None


def _device(x: np.ndarray, kind: Any) -> Any:
    """Uncommitted, so that it goes where the step's own constants are."""
    return jnp.asarray(x) if kind is None else jax.random.wrap_key_data(jnp.asarray(x), impl=kind)
