"""Weight matrices gathered per token (`w[chosen]`), replaced by products over tokens sorted by matrix.

A gather makes one copy of an expert's matrix for each token, stored where the token is. Sorted by expert, tokens meet
the experts' own matrices in one grouped product (`lax.ragged_dot`), and the results are put back in order.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from math import nan, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .emit import PerBodyReplay
from .flow import Flow, follow_aliases
from .histograms import Histograms
from .ir import Equation, Program, SubJaxpr, Value
from .loss_rewrites import LossByEquation, ReplaceLosses, retrace_with_losses
from .primitives import called_body, shape_of
from .source_lines import user_line
from .trace import Traced

_FILLS = lax.GatherScatterMode.FILL_OR_DROP

OperandDims = tuple[int | None, ...]  # by dimension of a gather's result: the operand's; None for one of the rows


@dataclass(frozen=True)
class WeightGather:
    """A gather of one slice per row: `indices[..., index_column]` along dimension `dim`, all of every other dimension.

    Attributes:
        dim: Dimension of the operand along which slices are chosen.
        index_column: Position in the last dimension of the indices.
        operand_dims: For each dimension of the result the operand's dimension; None for a dimension of the gather's
            rows.
        broadcast_equation: Equation that broadcasts the indices into that position; None where not known.
        valid_indices: Indices proven to be in bounds, as an `argmax` or a `top_k` over as many slices gives them; else
            None.
    """

    dim: int
    index_column: int
    operand_dims: OperandDims
    broadcast_equation: int | None = None
    valid_indices: Value | None = None


@dataclass(frozen=True)
class GatheredProducts:
    """Gathers of a program whose results are used in products only.

    Attributes:
        gathers: Gathers, by equation index.
        other_forms: Equations that give gathered matrices another form.
        products: Products by equation index, with the position of the gathered operand.
        lines: The user's lines of the products.
    """

    gathers: Mapping[int, WeightGather]
    other_forms: frozenset[int]
    products: Mapping[int, int]
    lines: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.products)


@dataclass(frozen=True)
class GatheredMatrices:
    """Stand-in for gathered matrices: the stack of matrices, and the index of each gathered one.

    Attributes:
        matrices: The stack gathered from.
        indices: Index of the matrix for each row, clipped to the stack.
        gather: The gather.
        in_bounds: Whether each index was in bounds; None where all are.
        fill: Value that the gather gives out of bounds: NaN or 0.
    """

    matrices: jax.Array
    indices: jax.Array
    gather: WeightGather
    in_bounds: jax.Array | None = None
    fill: Any = nan


@dataclass(frozen=True)
class RowSort:
    """Sort of rows by matrix.

    Attributes:
        indices: Index of the matrix for each row.
        permutation: Permutation that sorts the rows.
        inverse: Inverse permutation.
        group_sizes: Number of rows for each matrix.
    """

    indices: jax.Array
    permutation: jax.Array
    inverse: jax.Array
    group_sizes: jax.Array


def sort_gathered_products(captured: Traced) -> tuple[Traced | None, tuple[str, ...]]:
    """Return a captured step with tokens sorted by gathered matrix, and the user's lines of the products.

    Results differ from the step's by the order in which products are rounded.

    Args:
        captured: A step with captured gradient calls.

    Returns:
        The new step and its lines; None and no lines where nothing is gathered.
    """
    by_sorting, found = retrace_with_losses(captured, find_weight_gathers, _SortedProducts)
    return by_sorting, tuple(dict.fromkeys(line for f in found for line in f.lines))


def may_gather_weights(program: Program, weights: Container[Value | None]) -> bool:
    """Return whether stacks of matrices among `weights` are gathered, one matrix for each of several rows.

    Args:
        program: The step.
        weights: Values that are weights in any form.
    """
    return any(
        _as_weight_gather(program, e) is not None for e in program.equations if e.operands and e.operands[0] in weights
    )


def find_weight_gathers(program: Program, weights: Iterable[Value]) -> GatheredProducts:
    """Return the gathers from `weights` whose results are only multiplied. Cost: linear in the number of equations.

    Args:
        program: A step, or the loss of a gradient call.
        weights: Values that are weights.
    """
    # A function with a derivative rule of its own is run unchanged, gathers included.
    in_custom_rules = {e.index for rule in program.equations if rule.primitive.custom_derivative for e in rule.nested()}
    candidates = ((e.index, _as_weight_gather(program, e)) for e in program.equations if e.index not in in_custom_rules)
    lookups = {i: lookup for i, lookup in candidates if lookup is not None}
    if not lookups:
        return GatheredProducts({}, frozenset(), {}, ())
    weight_forms = Flow(program).descendants(weights, follow_aliases)
    readers, histograms, uses_by_gather = _Readers(program), Histograms(program), dict[int, _GatherUses]()
    for i, lookup in lookups.items():
        e = program.equations[i]
        trail = _uses_of_gather(e, lookup, readers) if e.operands[0] in weight_forms else None
        if trail is not None:
            uses_by_gather[i] = trail
            lookups[i] = _with_index_origin(histograms, e, lookup)
    gathers_by_product = defaultdict[int, set[int]](set)
    for i, trail in uses_by_gather.items():
        for product in trail.products:
            gathers_by_product[product].add(i)
    # A product of two gathered operands is left unchanged.
    for several in gathers_by_product.values():
        if len(several) > 1:
            for i in several:
                uses_by_gather.pop(i, None)
    products = {product: k for trail in uses_by_gather.values() for product, k in trail.products.items()}
    return GatheredProducts(
        {i: lookups[i] for i in uses_by_gather},
        frozenset(form for trail in uses_by_gather.values() for form in trail.other_forms),
        products,
        tuple(dict.fromkeys(user_line(program.equations[i].jaxpr_eqn) or "a library" for i in sorted(products))),
    )


@dataclass(frozen=True)
class _GatherUses:
    """Equations that use a gathered matrix.

    Attributes:
        other_forms: Equations that give it another form.
        products: Products, with the operand's position.
    """

    other_forms: tuple[int, ...]
    products: dict[int, int]


def _as_weight_gather(program: Program, e: Equation) -> WeightGather | None:
    """Return a gather of full slices from a stack of matrices, one for each of several rows; else None."""
    if not e.primitive.is_gather or e.operands[0] is None or e.operands[1] is None:
        return None
    numbers, sizes, mode = e.params["dimension_numbers"], e.params["slice_sizes"], e.params["mode"]
    shape, rows = program.shapes[e.operands[0]], len(program.shapes[e.operands[1]]) - 1
    sliced_dims = [d for d, size in enumerate(sizes) if size != shape[d]]
    if (
        len(shape) < 3
        or not rows
        or len(sliced_dims) != 1
        or sizes[sliced_dims[0]] != 1
        or numbers.operand_batching_dims
    ):
        return None
    if sliced_dims[0] not in numbers.start_index_map:
        return None
    # Rows out of bounds are filled after the product: with a matrix of NaN or 0 the product would be that number, but
    # not with a matrix of any other.
    if mode == _FILLS and (len(numbers.start_index_map) > 1 or not (np.isnan(_fill(e)) or _fill(e) == 0)):
        return None
    kept_dims = iter(d for d in range(len(shape)) if d not in numbers.collapsed_slice_dims)
    of = tuple(next(kept_dims) if d in numbers.offset_dims else None for d in range(len(program.shapes[e.results[0]])))
    return WeightGather(sliced_dims[0], numbers.start_index_map.index(sliced_dims[0]), of)


def _fill(e: Equation) -> Any:
    """Return the value that a gather gives out of bounds, where its mode fills."""
    fill = e.params["fill_value"]
    return nan if fill is None else fill


def _with_index_origin(counts: Histograms, e: Equation, lookup: WeightGather) -> WeightGather:
    """Return the gather with the origin of its indices."""
    program = counts.program
    # JAX's indexing broadcasts each index array to a column, and concatenates several columns.
    broadcast = program.producer.get(e.operands[1]) if e.operands[1] is not None else None
    if broadcast is not None and broadcast.name == "concatenate":
        single_columns = all(shape_of(v)[-1] == 1 for v in broadcast.jaxpr_eqn.invars)
        v = (
            broadcast.operands[lookup.index_column]
            if single_columns and len(broadcast.operands) > lookup.index_column
            else None
        )
        broadcast = None if v is None else program.producer.get(v)
    if (
        broadcast is None
        or broadcast.name != "broadcast_in_dim"
        or (numbers := counts.rearranged_operand(broadcast)) is None
    ):
        return lookup
    producer, slices = counts.index_producer(numbers), shape_of(e.jaxpr_eqn.invars[0])[lookup.dim]
    fit = producer is not None and counts.largest_indices[producer.index] < slices
    return replace(
        lookup, broadcast_equation=broadcast.index, valid_indices=counts.unwrapped_index(numbers) if fit else None
    )


class _Readers:
    """Index of the readers of each value of a program.

    Args:
        program: The program.

    Attributes:
        equations: Equations that read a value, with the operand's position.
        equal_values: Values equal to a value: inside of calls that read it, outside of calls that return it.
        returned: Values returned by bodies that stay bodies.
    """

    def __init__(self, program: Program):
        self.equations = defaultdict[Value, list[tuple[Equation, int]]](list)
        self.equal_values = defaultdict[Value, list[Value]](list)
        opened = set[SubJaxpr]()
        for e in program.equations:
            if called_body(e.jaxpr_eqn) is None or e.primitive.remat or e.primitive.custom_derivative:
                for k, v in enumerate(e.operands):
                    if v is not None:
                        self.equations[v].append((e, k))
                continue
            opened.add(e.bodies[0].sub_jaxpr)
            for a, b, _ in (*e.bodies[0].inputs, *e.bodies[0].outputs):
                if a is not None:
                    self.equal_values[a].append(b)
        self.returned = {v for scope in program.sub_jaxprs() if scope not in opened for v in scope.outputs}


def _uses_of_gather(e: Equation, lookup: WeightGather, readers: _Readers) -> _GatherUses | None:
    """Return the uses of a gather's result; None where anything but a product reads the result."""
    forms, products = list[int](), dict[int, int]()
    todo: list[tuple[Value, OperandDims]] = [(e.results[0], lookup.operand_dims)]
    while todo:
        v, of = todo.pop()
        if v in readers.returned:
            return None
        todo += [(w, of) for w in readers.equal_values[v]]
        for reader, k in readers.equations[v]:
            if (new_dims := _dims_in_other_form(reader, of)) is not None:
                forms.append(reader.index)
                todo.append((reader.results[0], new_dims))
            elif not _is_matrix_per_row(reader, k, of, lookup) or products.setdefault(reader.index, k) != k:
                return None
    return _GatherUses(tuple(forms), products) if products else None


def _dims_in_other_form(e: Equation, of: OperandDims) -> OperandDims | None:
    """Return the operand dimensions of another form of gathered matrices; None where `e` computes anything else."""
    if e.primitive.changes_dtype:
        return of
    if e.name == "squeeze" and all(of[d] is not None for d in e.params["dimensions"]):
        return tuple(c for d, c in enumerate(of) if d not in e.params["dimensions"])
    return None


def _is_matrix_per_row(e: Equation, k: int, of: OperandDims, lookup: WeightGather) -> bool:
    """Return whether operand `k` of `e` is one matrix for each row, by which the rows are multiplied."""
    c = e.contraction
    if e.name != "dot_general" or c is None or lookup.dim in of:
        return False
    return any(of[pair[k]] is not None for pair in c.contracted) and all(of[triple[k]] is None for triple in c.batch)


class _SortedProducts(ReplaceLosses, PerBodyReplay):
    """Emitter of a program with the given products computed over sorted rows.

    Args:
        program: A step or a loss.
        found: Gathers and products to replace.
        losses: Replacements of the losses of gradient calls.
    """

    def __init__(self, program: Program, found: GatheredProducts, losses: LossByEquation):
        super().__init__(program, losses)
        self._gathered_products = found
        self._broadcasts = {f.broadcast_equation for f in found.gathers.values()}
        self._indices_by_broadcast = dict[int, Any]()  # by index of the broadcast

    def run_equation(self, e: Equation, values: list) -> list:
        if e.index in self._broadcasts:
            self._indices_by_broadcast[e.index] = values[0]
        if (lookup := self._gathered_products.gathers.get(e.index)) is not None:
            return [self._gathered(e, lookup, *values)]
        if e.index in self._gathered_products.other_forms:
            return [_apply_form(e, values[0])]
        k = self._gathered_products.products.get(e.index)
        if k is None:
            return super().run_equation(e, values)
        return [_grouped_product(e, k, values[k], values[1 - k], self._row_sort)]

    def _row_sort(self, taken: GatheredMatrices, shape: tuple[int, ...], matrices: int) -> "RowSort":
        """Return the sort of rows for indices broadcast to `shape`."""
        numbers, chosen = taken.indices, taken.gather.valid_indices
        lead = numbers.reshape(*numbers.shape, *(1,) * (len(shape) - numbers.ndim))
        # One sort serves all products with the same indices in a body.
        key = id(numbers) if chosen is None else ("chosen", chosen), shape, matrices
        if key not in self.cache:
            repeated = jnp.broadcast_to(lead, shape).reshape(-1)
            order, sizes = jnp.argsort(repeated), jnp.bincount(repeated, length=matrices)
            self.cache[key] = RowSort(numbers, order, jnp.argsort(order), sizes)
        return self.cache[key]

    def _gathered(self, e: Equation, lookup: WeightGather, matrices: jax.Array, indices: jax.Array) -> GatheredMatrices:
        """Return the stand-in for a gather."""
        rows, count = indices.shape[:-1], matrices.shape[lookup.dim]
        if lookup.broadcast_equation is None:
            numbers = indices[..., lookup.index_column]
        else:
            numbers = jnp.asarray(self._indices_by_broadcast[lookup.broadcast_equation]).reshape(rows)
        # Indices from an argmax or a top_k over as many matrices are in bounds, so there is nothing to clip or to fill.
        if lookup.valid_indices is not None:
            return GatheredMatrices(matrices, numbers, lookup)
        inside = (numbers >= 0) & (numbers < count) if e.params["mode"] == _FILLS else None
        return GatheredMatrices(matrices, jnp.clip(numbers, 0, count - 1), lookup, inside, _fill(e))


def _apply_form(e: Equation, taken: GatheredMatrices) -> GatheredMatrices:
    """Return the stand-in in another form."""
    of = _dims_in_other_form(e, taken.gather.operand_dims)
    assert of is not None
    matrices = taken.matrices
    if e.primitive.changes_dtype:
        matrices = matrices.astype(e.params["new_dtype"])
    return replace(taken, matrices=matrices, gather=replace(taken.gather, operand_dims=of))


def _grouped_product(
    e: Equation, k: int, taken: GatheredMatrices, x: jax.Array, row_sort: Callable[..., RowSort]
) -> jax.Array:
    """Return the product of `x` with the gathered matrices, operand `k`.

    Rows are the gathered matrices' indices times the free dimensions of `x`. They are sorted by matrix, multiplied in
    groups, and put back.
    """
    c, of, lookup = e.contraction, taken.gather.operand_dims, taken.gather
    assert c is not None
    rows = [d for d, parent in enumerate(of) if parent is None]
    pairs = [(pair[k], pair[1 - k]) for pair in (*c.contracted, *c.batch)]
    dim_of_x = dict(pairs)  # dimension of `x` by the dimension of the gathered operand that it is paired with
    summed = [pair[k] for pair in c.contracted if of[pair[k]] is None]
    contracted = [pair[k] for pair in c.contracted if of[pair[k]] is not None]
    matrix_free = [d for d, parent in enumerate(of) if parent is not None and d not in contracted]
    free = [d for d, _ in (c.left_free, c.right_free)[1 - k]]

    lead = [dim_of_x[d] for d in rows if d in dim_of_x]
    x = jnp.transpose(x, (*lead, *free, *(dim_of_x[d] for d in contracted)))
    x = jnp.expand_dims(x, tuple(n for n, d in enumerate(rows) if d not in dim_of_x))
    inner = x.shape[len(rows) + len(free) :]
    outer = (*taken.indices.shape, *x.shape[len(rows) : len(rows) + len(free)])
    x = jnp.broadcast_to(x, (*outer, *inner)).reshape(prod(outer), prod(inner))
    parents = [of[d] for d in (*contracted, *matrix_free)]
    matrices = jnp.transpose(taken.matrices, (lookup.dim, *parents))  # pyright: ignore[reportArgumentType]
    sizes = matrices.shape[1 + len(contracted) :]
    matrices = matrices.reshape(len(matrices), prod(inner), prod(sizes))

    # `ragged_dot` multiplies consecutive rows by one matrix for each group.
    sort = row_sort(taken, outer, len(matrices))
    result = lax.ragged_dot(
        jnp.take(x, sort.permutation, axis=0),
        matrices,
        sort.group_sizes,
        precision=e.params["precision"],
        preferred_element_type=e.jaxpr_eqn.outvars[0].aval.dtype,  # pyright: ignore[reportAttributeAccessIssue]
    )
    result = jnp.take(result, sort.inverse, axis=0).reshape(*outer, *sizes)
    if taken.in_bounds is not None:
        inside = taken.in_bounds.reshape(*taken.in_bounds.shape, *(1,) * (result.ndim - len(rows)))
        result = jnp.where(inside, result, jnp.asarray(taken.fill, result.dtype))
    labels: list[Any] = [*rows, *((d,) for d in free), *matrix_free]
    # Row dimensions that the product sums over can't be summed inside the groups: their rows have different matrices.
    result = jnp.sum(result, axis=tuple(labels.index(d) for d in summed), dtype=result.dtype)
    labels = [label for label in labels if label not in summed]
    own, others = [d for d, _ in (c.left_free, c.right_free)[k]], [(d,) for d in free]
    result_order = [triple[k] for triple in c.batch] + (own + others if k == 0 else others + own)
    return jnp.transpose(result, [labels.index(label) for label in result_order])
