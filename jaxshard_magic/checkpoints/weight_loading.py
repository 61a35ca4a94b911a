"""Load parameters from weight files of other programs, a shard at a time.

No device and no host has more of an array in memory than its own shards.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..coordination import gather_texts
from ..device_arrays import read_shards
from ..errors import ShardError, list_names, printable
from .checkpoint_info import SavedLeaf
from .name_rules import NamePair, NameRule, Order, dotted, pair_file_names
from .state_arrays import StateArrays
from .state_match import check_same
from .weight_files import SAFETENSORS_DTYPES, FileArray, memory_mapped, read_headers, unpacked

_NUMBER = re.compile(r"(?<![^./])\d+(?![^./])")  # between dots or slashes


@dataclass(frozen=True)
class ArraySource:
    """Arrays of a file that make up one array of a state.

    Attributes:
        tensors: Arrays in the order of their positions in the stack.
        stack_shape: Leading dimensions by which they are stacked; () for a single array.
        dims: Dimensions of a file's array in the state's order; None to keep them.
        rule: Rule that named the array; None without one.
    """

    tensors: tuple[FileArray, ...]
    stack_shape: tuple[int, ...] = ()
    dims: Order | None = None
    rule: NameRule | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the state."""
        shape = self.tensors[0].shape
        return (*self.stack_shape, *(shape if self.dims is None else (shape[d] for d in self.dims)))

    @property
    def dtype(self) -> str:
        """Name of the dtype in the file, as JAX calls it if it can be read."""
        tensor = self.tensors[0]
        return tensor.dtype_name if tensor.dtype is None else tensor.dtype.newbyteorder("=").name

    def part(self, index: Sequence[slice], dtype: Any) -> np.ndarray:
        """Read values into new memory.

        Args:
            index: One slice a dimension of the state's array.
            dtype: Values are converted to this.
        """
        whole = [range(*each.indices(n)) for each, n in zip(index, self.shape, strict=True)]
        made = np.empty([len(each) for each in whole], dtype)
        lead, inner = (
            whole[: len(self.stack_shape)],
            tuple(slice(r.start, r.stop) for r in whole[len(self.stack_shape) :]),
        )
        for numbers in product(*lead):
            tensor = self.tensors[int(np.ravel_multi_index(numbers, self.stack_shape)) if self.stack_shape else 0]
            at = tuple(n - r.start for n, r in zip(numbers, lead, strict=True))
            # A memory map reads the pages of this shard alone.
            with memory_mapped(tensor) as values:
                turned = values if self.dims is None else values.transpose(self.dims)
                made[at] = turned[inner].astype(dtype, copy=False)
        return made


def load_weights(
    path: Path,
    state: StateArrays,
    shardings: Callable[[], Mapping[str, Any]],
    rules: Sequence[NameRule] = (),
    *,
    cast: bool = False,
    tell: Callable[[str], object],
) -> Any:
    """Load a weight file into a state.

    Each shard is read by itself, once for all devices of this host that share it; each host reads its own. PRNG keys
    and counts of generators keep their values.

    Args:
        path: File, folder or index of safetensors.
        state: State to fill.
        shardings: Called once all checks have passed; returns the sharding of each name.
        rules: Renaming rules.
        cast: Whether to convert dtypes.
        tell: Receives a line about arrays of the file that the state lacks.

    Returns:
        The state with the arrays of the file.

    Raises:
        ShardError: Names, shapes or dtypes differ. Raised before any array is read.
    """
    told = _same_on_all(lambda: sources(path, rules))
    wanted = [
        replace(leaf, path=dotted(leaf.path))
        for leaf, own in zip(state.saved_leaves, state.is_generator, strict=True)
        if not own
    ]
    found = [SavedLeaf(name, source.shape, source.dtype) for name, source in told.items()]
    names = {leaf.path for leaf in wanted}
    stacking = {} if names <= told.keys() else _stacking(name for name in told if name not in names)
    for leaf in wanted:
        if leaf.path in told:
            _check_source(path, leaf, told[leaf.path])
        elif rule := stacking.get(leaf.path):
            raise ShardError(f'{leaf} is one array here and one for each number there: --rename "{rule}" stacks them')
    renamed = 'where it has another name there, --rename "there=here" says so'
    check_same(found, wanted, path.name, cast=cast, allow_extra=True, rename_hint=renamed)
    if left := [leaf for leaf in found if leaf.path not in names]:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        tell(printable(f"{path.name} has {left[0]}{more}, which nothing here is called: left out"))
    # Only after all checks: asking for shardings may warn about arrays that the plan lacks.
    targets, arrays = state.restore_targets(shardings()), {}
    for name, own in zip(state.names, state.is_generator, strict=True):
        target = targets[name]
        if own:
            arrays[name] = state.current_value(name)
        else:
            source = told[dotted(name)]
            with unpacked(source.tensors) as there:
                lies = replace(source, tensors=there)
                arrays[name] = read_shards(
                    target.shape, target.sharding, lambda index, s=lies, t=target: s.part(index, t.dtype)
                )
    return state.rebuild(arrays)


def sources(path: Path, rules: Sequence[NameRule] = ()) -> dict[str, ArraySource]:
    """Return the arrays of a weight file by the state's names.

    Raises ShardError if the file can't be read, or if the rules don't fit the file.
    """
    there = read_headers(path)
    by_name: dict[str, list[NamePair]] = defaultdict(list)
    for named in pair_file_names(rules, there, path.name):
        by_name[named.state_name].append(named)
    return {here: _source(here, each, there, path.name) for here, each in by_name.items()}


def list_arrays(path: Path) -> list[str]:
    """Return lines about the arrays of a weight file, one for all names that differ merely in their numbers."""
    found = read_headers(path)
    size = sum(tensor.nbytes for tensor in found.values())
    rows = sorted((*_starred(name), str(_told(tensor))) for name, tensor in found.items())
    lines = [f"{path.name}: {len(found)} arrays, {size:,} bytes"]
    for (stars, _), each in groupby(rows, key=lambda row: (row[0], row[2].partition(" ")[2])):
        alike = [*each]
        kind = alike[0][2].partition(" ")[2]
        lines.append(alike[0][2] if len(alike) == 1 else f"{stars} {kind}, {len(alike)} of them")
    return [printable(line) for line in lines]


def _source(here: str, each: list[NamePair], there: Mapping[str, FileArray], where: str) -> ArraySource:
    """Return the source of one array of the state. Raises ShardError for gaps in a stack and for unequal shapes or
    dtypes."""
    rule, ordered = each[0].rule, sorted(each, key=lambda named: named.stack_index)
    first = there[ordered[0].file_name]
    lead = tuple(max(n) + 1 for n in zip(*(named.stack_index for named in ordered), strict=True))
    if prod(lead) != len(ordered):
        have = {named.stack_index for named in ordered}
        # The first gap is among these; all numbers below `lead` could be a billion.
        near = product(*(range(min(n, len(have) + 1)) for n in lead))
        gap = next(numbers for numbers in near if numbers not in have)
        raise ShardError(
            f"--rename {str(rule)!r} stacks {len(ordered)} arrays of {where} into {here}, the last is "
            f"{ordered[-1].file_name}, and there is none of number {'.'.join(map(str, gap))}"
        )
    for named in ordered:
        other = there[named.file_name]
        if (other.shape, other.dtype_name) != (first.shape, first.dtype_name):
            raise ShardError(
                f"--rename {str(rule)!r} stacks arrays of one shape, and {_told(first)} and {_told(other)} of {where} "
                "differ"
            )
    dims = None if rule is None else rule.dims(first.name, len(first.shape))
    return ArraySource(tuple(there[named.file_name] for named in ordered), lead, dims, rule)


def _told(tensor: FileArray) -> SavedLeaf:
    """Return name, shape and dtype of a file's array."""
    return SavedLeaf(tensor.name, tensor.shape, ArraySource((tensor,)).dtype)


def _starred(name: str) -> tuple[str, list[int]]:
    """Return a name with `*` for each number between dots or slashes, and the numbers."""
    return _NUMBER.sub("*", name), [int(number) for number in _NUMBER.findall(name)]


def _check_source(path: Path, leaf: SavedLeaf, source: ArraySource) -> None:
    """Raise ShardError for a dtype that can't be read, and for shapes that differ although the elements may be the
    same.

    For two dimensions swapped, the message has the rule that swaps them back.
    """
    first = source.tensors[0]
    if first.dtype is None:
        raise ShardError(
            f"{first.name} is of dtype {first.dtype_name} in {path.name}, which can't be read; those that can are "
            f"{list_names(SAFETENSORS_DTYPES)}"
        )
    if len(first.shape) == 2 and source.shape == (*leaf.shape[:-2], *leaf.shape[:-3:-1]) != leaf.shape:
        there = f"{source.dtype}[{','.join(map(str, source.shape))}]"
        rule = source.rule or NameRule(first.name, leaf.path)
        turned = replace(rule, order="" if source.dims else "T")
        raise ShardError(
            f"{leaf} is {there} in {path.name}, its last two dimensions swapped, as torch has weights: "
            f'--rename "{turned}"'
        )
    if source.shape != leaf.shape and prod(source.shape) == prod(leaf.shape):
        raise ShardError(
            f"{leaf} is {source.dtype}[{','.join(map(str, source.shape))}] in {path.name}, the same elements in "
            "another shape: keep it as the file has it, and reshape it in the step"
        )


def _stacking(names: Iterable[str]) -> dict[str, NameRule]:
    """Return rules that stack a file's arrays, one for each layer, by the name of the stacked array."""
    found: dict[str, NameRule] = {}
    for name in names:
        words = name.split(".")
        for i, word in enumerate(words):
            if word.isdecimal():
                here = ".".join([*words[:i], *words[i + 1 :]])
                found.setdefault(here, NameRule(".".join([*words[:i], "*", *words[i + 1 :]]), here))
    return found


def _same_on_all(read: Callable[[], dict[str, ArraySource]]) -> dict[str, ArraySource]:
    """Return `read()`. Raises ShardError on all hosts if it fails on one, or if hosts read different arrays."""
    found, failed = dict[str, ArraySource](), ""
    try:
        found = read()
    except ShardError as error:
        failed = str(error)
    rows = sorted((name, source.shape, source.dtype) for name, source in found.items())
    # Also after an error, as the other hosts wait for this text.
    said = gather_texts(f"!{failed}" if failed else repr(rows))
    for host, text in enumerate(said):
        if text[0] == "!":
            raise ShardError(text[1:] if len(said) == 1 else f"host {host}: {text[1:]}")
        if text != said[0]:
            raise ShardError(
                f"host {host} has other arrays in this file than host 0: copy it to all, or to a shared disk"
            )
    return found
