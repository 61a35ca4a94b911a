"""Re-emission of a step with sharding constraints, so that XLA inserts the collectives of the plan and no others.

With `in_shardings` and `out_shardings` alone, XLA under fsdp moves activations and their sums. Here the traced step is
re-emitted after its gradients were taken: weights are gathered where activations meet them, activations are constrained
where they are made, and gradients are constrained to the specs of their parameters, in loop bodies and checkpoints too.

`UnconstrainedEmitter` emits a step whose layout the compiler finds, corrected only for faults of XLA.

The habits of XLA named in comments were seen with jax 0.10.2 on simulated CPU devices; tests repeat them with the
newest jax.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import jax
from jax import lax
from jax._src.source_info_util import current_name_stack  # no public equivalent
from jax.sharding import NamedSharding, PartitionSpec

from ..program.emit import Emitter, current_traceback
from ..program.ir import Equation, SubJaxpr, Value
from ..program.op_labels import BODY_CONSTRAINT, COMBINE, DISPATCH, weight_label
from ..program.primitives import bind
from ..program.primitives.table import primitive_of
from ..program.sizes import nbytes
from ..program.source_lines import user_context
from ..program.xla_faults import bind_with_workaround, convolution_windows, find_replicated_dims
from .layout import Axes, Layout, Spec, without_axes
from .regions import KINDS, Context, Region
from .reshard_steps import reshard_steps
from .sp import result_specs, whole_operand_specs
from .unsharded_dims import has_several_axes, is_summed_before_scatter, must_choose_sharding
from .weight_gathers import gather_weight_in_steps

_CACHE_SHARE = 64  # 1/64 of the state: bytes of gathered weights that straight-line code may keep
Kind = TypeVar("Kind", bound=Region)


class ShardedLowering(Emitter):
    """Emitter that adds the sharding constraints of a layout, except to equations emitted by its `regions`.

    Args:
        layout: The layout of the step.
        scope_names: Name scopes for some equations, by index, as `Emitter` takes them.
        reduce: When devices reduce gradients added up by a loop (over microbatches, over time): "each" (in each trip),
            "once" (after the loop), or "once-gathered" (after the loop, and the weights read by the loop are gathered
            once before).
        sum_dtype: dtype of these reductions; None for the dtype in which each gradient is computed.
        external_reads: Values read by another program, besides the outputs.
        accepts_partial: Gradients among the outputs that another program sums, so they may be returned as partial sums.
            Only gradients stored whole on every device.
    """

    def __init__(
        self,
        layout: Layout,
        scope_names: Mapping[int, str] | None = None,
        reduce: str = "each",
        sum_dtype: Any = None,
        external_reads: Collection[Value] = (),
        accepts_partial: Collection[Value] = (),
    ):
        super().__init__(layout.program, scope_names)
        self.layout = layout
        context = Context(layout, scope_names or {}, reduce, sum_dtype, external_reads, accepts_partial)
        self.regions = tuple(find(context) for find in KINDS)
        self._regions_of: dict[int, tuple[Region, ...]] = {}
        for region in self.regions:
            for i in region.members:
                self._regions_of[i] = (*self._regions_of.get(i, ()), region)
        self._gathered_by_regions = frozenset[Value]().union(*(region.gathered_weights for region in self.regions))
        self._readers = context.readers
        self.cache_limit = self._gathered_cache_limit()  # bytes of gathered weights that straight-line code may keep
        self._weight_labels: dict[Value, str | None] = {}
        self.layout_changes = _find_layout_changes(layout)
        self._resharded_activations = _find_resharded_activations(layout)

    def __call__(self, *args: Any) -> list:
        self.reset()
        return super().__call__(*args)

    def run(self, scope: SubJaxpr, args: Any) -> list:
        outs = super().run(scope, args)
        if scope is self.program.top:
            for region in self.regions:
                outs = region.finish_outputs(outs)
        return outs

    def reset(self) -> None:
        """Clear the gathered weights and other caches of an earlier run."""
        self._bodies = [_BodyCache(is_loop=False)]
        # Gradients constrained only after the layout change that reads them (see `_constrain_gradient`).
        self._constrain_after_transpose: set[Value] = set()
        self._relayouts: dict[int, _Relayout] = {}

    def region(self, kind: type[Kind]) -> Kind:
        """Return the region of type `kind` among `regions`."""
        return next(region for region in self.regions if isinstance(region, kind))

    def regions_of(self, e: Equation) -> tuple[Region, ...]:
        """Return the regions with `e` as a member, the first to be asked first."""
        return self._regions_of.get(e.index, ())

    def gather_axes(self, weight: Value) -> Axes:
        """Return the mesh axes over which a weight is gathered where an activation meets it."""
        return () if weight in self._gathered_by_regions else self.layout.gather_axes(weight)

    def _gathered_cache_limit(self) -> int:
        stored = [self.program.inputs[i] for i in self.layout.roles.storage_order]
        size = {v: nbytes(self.program.avals[v]) for v in stored}
        gathered = [size[v] for v in stored if self.layout.gather_axes(v)]
        return max([*gathered, sum(size.values()) // _CACHE_SHARE])

    def run_equation(self, e: Equation, values: list) -> list:
        if e.bodies:
            values = [self._reshard_overridden(e, v, x) for v, x in zip(e.operands, values, strict=True)]
        outs = self._emit(e, values, self.regions_of(e))
        if e.bodies and not self._resharded_activations.isdisjoint(e.results):
            # Under Shardy all readers of a value with a single constraint read the result of that constraint. So a
            # value that is resharded for one reader is constrained here as well.
            outs = [
                self._constrain_boundary(v, x) if v in self._resharded_activations else x
                for v, x in zip(e.results, outs, strict=True)
            ]
        if e.results and e.results[0] in self.layout_changes:
            self._relayouts[id(outs[0])] = _Relayout(e, values[0], outs[0])
        return outs

    def _emit(self, e: Equation, values: list, regions: tuple[Region, ...]) -> list:
        if not regions:
            return super().run_equation(e, values)
        return regions[0].emit(e, values, lambda xs: self._emit(e, xs, regions[1:]), self)

    @contextmanager
    def at(self, path: Iterable[Equation]) -> Iterator[None]:
        """Bind equations under the name stack and traceback of the last equation of `path`, inside the loop being
        emitted."""
        names, lines, label = current_name_stack(), current_traceback(), None
        for e in path:
            names = names + e.jaxpr_eqn.source_info.name_stack
            lines = self._tracebacks.join(lines, e.jaxpr_eqn.source_info.traceback)
            label = self._scopes.get(e.index)
        with user_context(lines, name_stack=names if label is None else names + label):
            yield

    def enter_body(self, scope: SubJaxpr, args: Any) -> list:
        """Run a body with constraints on carries, slices and results at both ends."""
        # XLA chooses the shardings of a loop as a whole: one unconstrained end would reshard everything else.
        self._bodies.append(_BodyCache(is_loop=True))
        try:
            outs = self.run(scope, self._constrain_boundaries(scope.inputs, args))
        finally:
            self._bodies.pop()
        return self._constrain_boundaries(scope.outputs, outs)

    def _constrain_boundaries(self, values: list, arrays: Any) -> list:
        with jax.named_scope(BODY_CONSTRAINT):
            return [x if v is None else self._constrain_boundary(v, x) for v, x in zip(values, arrays, strict=True)]

    def _constrain_boundary(self, v: Value, x: Any) -> Any:
        for region in self.regions:
            if (spec := region.boundary_spec(v)) is not None:
                return self.layout.constrain(x, spec)
        if self.layout.is_activation(v):
            return self.layout.constrain(x, self.layout.activation_spec(v))
        spec = self.layout.stored_spec(v)
        if not any(spec):
            return x
        # Weights come here from jax 0.12 on, where a loop saves its slices of stacked weights for the backward pass.
        with self._named_scope_of(v):
            return self.layout.constrain(x, spec)

    def result(self, e: Equation, values: list) -> list:
        """Compute `e` in a form that XLA gets right on sharded operands."""
        divided = self.layout.sharded_dim_predicate(e)
        if not must_choose_sharding(self.layout, e):
            return bind_with_workaround(e, values, divided, cpu=self.layout.is_cpu)
        # Without a constraint, where the plan shards nothing, XLA could still choose to shard a dimension that it gets
        # wrong.
        values = [self._constrain_as_planned(e, v, x) for v, x in zip(e.operands, values, strict=True)]
        outs = bind_with_workaround(e, values, divided, cpu=self.layout.is_cpu)
        return [self._constrain_as_planned(e, v, x) for v, x in zip(e.results, outs, strict=True)]

    def _constrain_as_planned(self, e: Equation, v: Value | None, x: Any) -> Any:
        """Constrain an operand or result of `e` to the plan's spec; values made from no example to be whole.

        Weights met by activations stay as they are.
        """
        if v is None or not self.program.shapes[v]:
            return x
        if self.layout.is_activation(v):
            return self.layout.constrain(x, self.layout.spec_in(e, v))
        if self.layout.storage.touches_batch(e):
            return x
        return self.layout.constrain(x, [()] * len(self.program.shapes[v]))

    def _stored_spec(self, v: Value) -> Spec:
        """Return the spec under which a weight or a gradient is stored between uses."""
        return self.layout.compute_spec(v) if v in self._gathered_by_regions else self.layout.stored_spec(v)

    def before(self, e: Equation, values: list) -> list:
        """Gather weights to the specs in which `e` uses them, right before `e`, and reshard activations."""
        layout = self.layout
        for k, spec in whole_operand_specs(layout, e).items():
            values[k] = self.layout.constrain(values[k], spec)
        for k, v in enumerate(e.operands):
            is_resharded = layout.experts is not None and layout.is_activation(v)
            if v is not None and is_resharded:
                with self._expert_scope(v):
                    values[k] = self._reshard_activation(
                        values[k], layout.spec_between_uses(v), layout.compute_spec_in(e, v)
                    )
            else:
                values[k] = self._reshard_overridden(e, v, values[k])
        if not layout.storage.touches_batch(e) or e.primitive.is_scatter:
            return values
        reads = ((k, v) for k, v in enumerate(e.operands) if v is not None and self.program.shapes[v])
        for k, v in list(reads):
            if not layout.is_activation(v) and any(self._stored_spec(v)):
                with self._named_scope_of(v):
                    values[k] = self._gather_weight(e, values, k, v)
        return values

    def _reshard_overridden(self, e: Equation, v: Value | None, x: Any) -> Any:
        """Return an operand under the spec that `layout.spec_overrides` has for `e`; other operands unchanged."""
        if v is None or (e.index, v) not in self.layout.spec_overrides.operands:
            return x
        with self._expert_scope(v):
            return self._reshard_activation(x, self.layout.spec_between_uses(v), self.layout.compute_spec_in(e, v))

    def _expert_scope(self, v: Value) -> AbstractContextManager[Any]:
        """Return the named scope of activations sent to experts or back."""
        experts = self.layout.experts
        if experts is None or v in self.layout.spec_overrides.values:
            return nullcontext()
        return jax.named_scope(COMBINE if v in experts.activations else DISPATCH)

    def _reshard_activation(self, x: Any, current: Spec, target: Spec) -> Any:
        """Return an activation resharded from one spec to another, once in a body for all readers."""
        if current == target:
            return x
        resharded, key = self._bodies[-1].resharded, (id(x), tuple(target))
        if key not in resharded:
            # Constrain both ends and each step in between: with a constraint on one side alone, the partitioner gathers
            # where an all-to-all would do.
            result = x
            for spec in reshard_steps(current, target):
                result = self.layout.constrain(result, spec)
            resharded[key] = x, result
        return resharded[key][1]

    def after(self, e: Equation, outs: list) -> list:
        layout = self.layout
        works_on_activations = layout.storage.touches_batch(e)
        follows_gradient = e.primitive.folds_layout and any(
            v in self._constrain_after_transpose for v in e.operands if v is not None
        )
        if not works_on_activations:
            outs = [self._constrain_overridden_result(e, v, x) for v, x in zip(e.results, outs, strict=True)]
        if not works_on_activations and not follows_gradient:
            return outs
        for k, v in enumerate(e.results):
            if not self.program.shapes[v]:
                continue
            if layout.is_activation(v):
                moved = v in layout.spec_overrides.results or v in self._resharded_activations
                if e.primitive.constrain_output or moved or self._is_replicated_capacity(v):
                    for spec in result_specs(layout, e, v):
                        outs[k] = self.layout.constrain(outs[k], spec)
            elif any(layout.stored_spec(v)) or outs[k].dtype != self.program.avals[v].dtype:
                outs[k] = self._constrain_gradient(e, v, outs[k])
        return outs

    def _constrain_overridden_result(self, e: Equation, v: Value, x: Any) -> Any:
        """Constrain a result that is no activation to its overridden spec, then to its spec between uses."""
        if v in self.layout.spec_overrides.results:
            for spec in self.layout.result_specs(e, v):
                x = self.layout.constrain(x, spec)
        return x

    def _is_replicated_capacity(self, v: Value) -> bool:
        """Return whether an activation is replicated over several devices, for the capacity of all experts."""
        # Unconstrained, XLA would shard the tokens of such a value and gather them again.
        experts = self.layout.experts
        return experts is not None and bool(experts.shared_capacity_classes) and v in experts.activations

    def _constrain_gradient(self, e: Equation, v: Value, x: Any) -> Any:
        """Constrain a gradient, a sum over examples, to the stored spec of its parameter, so partial sums are
        reduce-scattered."""
        if e.primitive.is_scatter or is_summed_before_scatter(self.layout, e):
            # Reduce first, then shard: XLA gets some products wrong otherwise, and would gather the updates of a
            # scatter, which are activations.
            x = self.layout.constrain(x, self.layout.compute_spec(v))
        readers = self._readers.get(v, [])
        if len(readers) == 1 and primitive_of(readers[0]).folds_layout:
            # XLA folds a constraint into a layout change right after it, so constrain after the layout change.
            self._constrain_after_transpose.add(v)
            return x
        x = self.layout.constrain(x, self.layout.stored_spec(v))
        # The cast comes after the constraint, so that devices reduce in the dtype in which the sum was made
        # (`regions/reduction_dtypes.py`).
        return x if x.dtype == (dtype := self.program.avals[v].dtype) else x.astype(dtype)

    def _named_scope_of(self, v: Value) -> AbstractContextManager[Any]:
        """Return the named scope of a weight on the way to its use."""
        if v not in self._weight_labels:
            self._weight_labels[v] = weight_label(self.program, self.layout.flow, v)
        label = self._weight_labels[v]
        return jax.named_scope(label) if label else nullcontext()

    def _gather_weight(self, e: Equation, values: list, k: int, v: Value) -> Any:
        """Return a weight in the spec in which `e` reads it.

        Cost: an all-gather a body, or none while the gathered weight is cached. In straight-line code a later use
        gathers again once the cache exceeds `cache_limit` bytes.
        """
        layout, body, x = self.layout, self._bodies[-1], values[k]
        stored, target = self._stored_spec(v), layout.compute_spec(v)
        if not self.gather_axes(v):
            return self.layout.constrain(x, target)
        activation = next((values[q] for q, w in enumerate(e.operands) if layout.is_activation(w)), None)
        tie = body.last_activation if body.last_activation is not None else activation
        if activation is not None:
            body.last_activation = activation
        if id(x) in body.weights:
            # Inserted again as the newest entry: dicts are ordered, and `add_weight` evicts the oldest.
            body.weights[id(x)] = body.weights.pop(id(x))
            return body.weights[id(x)].gathered
        # The layout change of a weight already gathered costs no second gather.
        if (relayout := self._relayouts.get(id(x))) is not None and id(relayout.source) in body.weights:
            return self.layout.constrain(
                bind(relayout.equation.jaxpr_eqn, [body.weights[id(relayout.source)].gathered])[0], target
            )
        source, sharded_classes = (
            x,
            frozenset(c for c, axes in zip(layout.storage.classes_of(v), stored, strict=True) if axes),
        )
        if not body.is_loop and sharded_classes in body.gathered_classes and tie is not None:
            # XLA merges two gathers of one array over any distance, and every full weight would stay alive from forward
            # to backward. The barrier ties the second gather to an earlier activation.
            x, _ = lax.optimization_barrier((self.layout.constrain(x, stored), tie))
        body.gathered_classes.add(sharded_classes)
        body.add_weight(source, self._gather_for_use(x, v), nbytes(self.program.avals[v]), self.cache_limit)
        return body.weights[id(source)].gathered

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, called once in a body for each key."""
        results = self._bodies[-1].results_by_key
        if key not in results:
            results[key] = make()
        return results[key]

    def gather(self, x: Any, weight: Value) -> Any:
        """Return a stored weight gathered for use, under the weight's own named scope."""
        with self._named_scope_of(weight):
            return self._gather_for_use(x, weight)

    def _gather_for_use(self, x: Any, v: Value) -> Any:
        """Return a stored weight resharded to its spec in use."""
        stored, target = self.layout.stored_spec(v), self.layout.compute_spec(v)
        tensor_shard = without_axes(stored, self.layout.gather_axes(v))
        if (in_steps := gather_weight_in_steps(self.layout, x, v)) is not None:
            x = in_steps
        # In this order: the gather over the data axes, then the reshard of the tensor dimension.
        if tensor_shard != target:
            x = self.layout.constrain(x, tensor_shard)
        return self.layout.constrain(x, target)


def _find_resharded_activations(layout: Layout) -> frozenset[Value]:
    """Return the activations, at their definition, that some equation reads under another spec.

    They are constrained where they are made: otherwise Shardy, where it applies constraints, gives all later readers
    the spec of that one equation.
    """
    program, counts = layout.program, layout.flow.sort_analysis.histograms
    loops = {} if layout.experts is None else layout.experts.loops
    resharded = set[Value | None]()
    for e in program.equations if layout.experts is not None or layout.spec_overrides.operands else ():
        for v in e.operands if not e.bodies or e.index in loops else ():
            if v is not None and layout.is_activation(v):
                read = layout.operand_spec(v, True) if e.bodies else layout.compute_spec_in(e, v)
                resharded |= {counts.resolve_calls(v)} if read != layout.activation_spec(v) else set()
    return frozenset(v for v in resharded if v is not None)


def _find_layout_changes(layout: Layout) -> dict[Value, Value]:
    """Return weights that are other weights in another memory layout (a transposed embedding table), mapped to
    these."""
    source_by_result: dict[Value, Value] = {}
    for e in layout.program.equations:
        if (
            e.primitive.folds_layout
            and len(e.operands) == 1
            and (v := e.operands[0]) is not None
            and not layout.is_activation(v)
        ):
            source_by_result[e.results[0]] = v
    return source_by_result


class _Relayout(NamedTuple):
    equation: Equation
    source: Any
    result: Any  # held alive, so that no other array gets its id


class _GatheredWeight(NamedTuple):
    source: Any  # held alive, so that no other array gets its id
    gathered: Any
    bytes: int


class _BodyCache:
    """Caches of one body during emission: gathered weights, and activations resharded for experts and back."""

    def __init__(self, *, is_loop: bool):
        self.is_loop = is_loop
        self.weights: dict[int, _GatheredWeight] = {}
        self.gathered_classes: set[frozenset[int]] = set()
        self.last_activation: Any = None
        self.results_by_key: dict[Hashable, Any] = {}
        # By array id and spec: the array, held alive so that its id stays its own, and the result.
        self.resharded: dict[tuple[int, tuple[Axes, ...]], tuple[Any, Any]] = {}

    def add_weight(self, source: Any, gathered: Any, size: int, cap: int) -> None:
        self.weights[id(source)] = _GatheredWeight(source, gathered, size)
        # A loop body has the weights of one layer at a time, and needs no limit.
        while not self.is_loop and len(self.weights) > 1 and sum(x.bytes for x in self.weights.values()) > cap:
            self.weights.pop(next(iter(self.weights)))


class UnconstrainedEmitter(Emitter):
    """Emitter without sharding constraints.

    Any dimension may be sharded, except those for which XLA would be wrong: these are constrained to be whole, and all
    others of the array are left unconstrained.

    Args:
        layout: The layout.
        labels: Name scope of equations, by index.
    """

    def __init__(self, layout: Layout, labels: Any = None):
        super().__init__(layout.program, labels)
        self._mesh, self._cpu, self._has_several_axes = layout.mesh, layout.is_cpu, has_several_axes(layout)

    def result(self, e: Equation, values: list) -> list:
        requirement = find_replicated_dims(e, cpu=self._cpu)
        slots = {k: set(dims) for k, dims in ({} if requirement is None else requirement[1]).items()}
        # On a mesh with one axis XLA does not have this fault (`DIVIDED_CONVOLUTION`).
        for dims in convolution_windows(e) if self._has_several_axes else ():
            for k, d in enumerate(dims):
                slots.setdefault(k, set()).add(d)
        values = [self._unshard(x, slots.get(k, ())) for k, x in enumerate(values)]
        outs = bind_with_workaround(e, values, lambda _d: True, cpu=self._cpu)
        return [self._unshard(x, slots.get(k, ())) for k, x in enumerate(outs, len(values))]

    def _unshard(self, x: Any, dims: Any) -> Any:
        if not dims:
            return x
        spec = [None if d in dims else PartitionSpec.UNCONSTRAINED for d in range(x.ndim)]
        return lax.with_sharding_constraint(x, NamedSharding(self._mesh, PartitionSpec(*spec)))
