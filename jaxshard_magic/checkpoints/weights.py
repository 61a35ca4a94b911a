"""Parameters out of files that others wrote, laid out a part at a time: no device and no host has more of an array than
the parts that it keeps."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..coordination import gathered
from ..errors import ShardError, one_of, printable
from ..placing import from_parts
from .differs import check_same
from .objects import Opened
from .rename import Named, Order, Rule, dotted, to_here
from .saved import SavedLeaf
from .tensors import KINDS, Tensor, as_it_lies, tensors, unpacked

_NUMBER = re.compile(r"(?<![^./])\d+(?![^./])")  # between dots or slashes


@dataclass(frozen=True)
class Source:
    """What a state's array is read from: `tensors` in the order of the numbers by which they are stacked, in `lead`
    dimensions; `dims` are those of the file's array in the state's order; `rule` is what named it."""

    tensors: tuple[Tensor, ...]
    lead: tuple[int, ...] = ()
    dims: Order | None = None
    rule: Rule | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The state's."""
        shape = self.tensors[0].shape
        return (*self.lead, *(shape if self.dims is None else (shape[d] for d in self.dims)))

    @property
    def dtype(self) -> str:
        """The name of what is in the file, as jax calls it where it can be read."""
        tensor = self.tensors[0]
        return tensor.kind if tensor.dtype is None else tensor.dtype.newbyteorder("=").name

    def part(self, index: Sequence[slice], dtype: Any) -> np.ndarray:
        """The values at an index, in memory of their own, of another dtype converted."""
        whole = [range(*each.indices(n)) for each, n in zip(index, self.shape, strict=True)]
        made = np.empty([len(each) for each in whole], dtype)
        lead, inner = whole[: len(self.lead)], tuple(slice(r.start, r.stop) for r in whole[len(self.lead) :])
        for numbers in product(*lead):
            tensor = self.tensors[int(np.ravel_multi_index(numbers, self.lead)) if self.lead else 0]
            at = tuple(n - r.start for n, r in zip(numbers, lead, strict=True))
            with as_it_lies(tensor) as values:
                turned = values if self.dims is None else values.transpose(self.dims)
                made[at] = turned[inner].astype(dtype, copy=False)
        return made


def load(
    path: Path,
    state: Opened,
    places: Callable[[], Mapping[str, Any]],
    rules: Sequence[Rule] = (),
    *,
    cast: bool = False,
    tell: Callable[[str], object],
) -> Any:
    """The state with the arrays of a file of weights, each where `places()` has it.

    Each device's part is read by itself, of a part that several devices of this host have once; of several hosts each
    reads its own. Keys and counts of generators stay as they are. `tell` gets a line of arrays of the file that the
    state has no place for. Raises ShardError, before any array is read, where names, shapes or dtypes differ.
    """
    told = _same_on_all(lambda: sources(path, rules))
    wanted = [
        replace(leaf, path=dotted(leaf.path))
        for leaf, own in zip(state.told, state.own, strict=True)
        if not own
    ]
    found = [SavedLeaf(name, source.shape, source.dtype) for name, source in told.items()]
    names = {leaf.path for leaf in wanted}
    stacking = {} if names <= told.keys() else _stacking(name for name in told if name not in names)
    for leaf in wanted:
        if leaf.path in told:
            _check_source(path, leaf, told[leaf.path])
        elif rule := stacking.get(leaf.path):
            raise ShardError(
                f'{leaf} is one array here and one for each number there: --rename "{rule}" stacks them'
            )
    renamed = 'where it has another name there, --rename "there=here" says so'
    check_same(found, wanted, path.name, cast=cast, more=True, renamed=renamed)
    if left := [leaf for leaf in found if leaf.path not in names]:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        tell(printable(f"{path.name} has {left[0]}{more}, which nothing here is called: left out"))
    targets, arrays = state.targets(places()), {}
    for name, own in zip(state.names, state.own, strict=True):
        target = targets[name]
        if own:
            arrays[name] = state.kept(name)
        else:
            source = told[dotted(name)]
            with unpacked(source.tensors) as there:
                lies = replace(source, tensors=there)
                arrays[name] = from_parts(
                    target.shape, target.sharding, lambda index, s=lies, t=target: s.part(index, t.dtype)
                )
    return state.restored(arrays)


def sources(path: Path, rules: Sequence[Rule] = ()) -> dict[str, Source]:
    """What a file has, by the state's names. Raises ShardError for a file that can't be read, and for a table that
    doesn't fit it."""
    there = tensors(path)
    by_name: dict[str, list[Named]] = defaultdict(list)
    for named in to_here(rules, there, path.name):
        by_name[named.here].append(named)
    return {here: _source(here, each, there, path.name) for here, each in by_name.items()}


def listing(path: Path) -> list[str]:
    """What a file of weights has, a line for names that differ in their numbers alone."""
    found = tensors(path)
    size = sum(tensor.nbytes for tensor in found.values())
    rows = sorted((*_starred(name), str(_told(tensor))) for name, tensor in found.items())
    lines = [f"{path.name}: {len(found)} arrays, {size:,} bytes"]
    for (stars, _), each in groupby(rows, key=lambda row: (row[0], row[2].partition(" ")[2])):
        alike = [*each]
        kind = alike[0][2].partition(" ")[2]
        lines.append(alike[0][2] if len(alike) == 1 else f"{stars} {kind}, {len(alike)} of them")
    return [printable(line) for line in lines]


def _source(here: str, each: list[Named], there: Mapping[str, Tensor], where: str) -> Source:
    rule, ordered = each[0].rule, sorted(each, key=lambda named: named.numbers)
    first = there[ordered[0].there]
    lead = tuple(max(n) + 1 for n in zip(*(named.numbers for named in ordered), strict=True))
    if prod(lead) != len(ordered):
        have = {named.numbers for named in ordered}
        near = product(*(range(min(n, len(have) + 1)) for n in lead))  # the first gap is among these
        gap = next(numbers for numbers in near if numbers not in have)
        raise ShardError(
            f"--rename {str(rule)!r} stacks {len(ordered)} arrays of {where} into {here}, the last is "
            f"{ordered[-1].there}, and there is none of number {'.'.join(map(str, gap))}"
        )
    for named in ordered:
        other = there[named.there]
        if (other.shape, other.kind) != (first.shape, first.kind):
            raise ShardError(
                f"--rename {str(rule)!r} stacks arrays of one shape, and {_told(first)} and {_told(other)} of {where} "
                "differ"
            )
    dims = None if rule is None else rule.dims(first.name, len(first.shape))
    return Source(tuple(there[named.there] for named in ordered), lead, dims, rule)


def _told(tensor: Tensor) -> SavedLeaf:
    return SavedLeaf(tensor.name, tensor.shape, Source((tensor,)).dtype)


def _starred(name: str) -> tuple[str, list[int]]:
    return _NUMBER.sub("*", name), [int(number) for number in _NUMBER.findall(name)]


def _check_source(path: Path, leaf: SavedLeaf, source: Source) -> None:
    """Refuse a dtype that can't be read; and a shape that is the file's with two dimensions swapped, which has a fix of
    its own."""
    first = source.tensors[0]
    if first.dtype is None:
        raise ShardError(
            f"{first.name} is of dtype {first.kind} in {path.name}, which can't be read; those that can are "
            f"{one_of(KINDS)}"
        )
    if len(first.shape) == 2 and source.shape == (*leaf.shape[:-2], *leaf.shape[:-3:-1]) != leaf.shape:
        there = f"{source.dtype}[{','.join(map(str, source.shape))}]"
        rule = source.rule or Rule(first.name, leaf.path)
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


def _stacking(names: Iterable[str]) -> dict[str, Rule]:
    """The rules that stack arrays of a file which has one for each layer, by the name of the one array of them all."""
    found: dict[str, Rule] = {}
    for name in names:
        words = name.split(".")
        for i, word in enumerate(words):
            if word.isdecimal():
                here = ".".join([*words[:i], *words[i + 1 :]])
                found.setdefault(here, Rule(".".join([*words[:i], "*", *words[i + 1 :]]), here))
    return found


def _same_on_all(read: Callable[[], dict[str, Source]]) -> dict[str, Source]:
    """What `read` gives on this host. Raises ShardError on all hosts where it does on one, or gives other arrays."""
    found, failed = dict[str, Source](), ""
    try:
        found = read()
    except ShardError as error:
        failed = str(error)
    rows = sorted((name, source.shape, source.dtype) for name, source in found.items())
    said = gathered(f"!{failed}" if failed else repr(rows))
    for host, text in enumerate(said):
        if text[0] == "!":
            raise ShardError(text[1:] if len(said) == 1 else f"host {host}: {text[1:]}")
        if text != said[0]:
            raise ShardError(
                f"host {host} has other arrays in this file than host 0: copy it to all, or to a shared disk"
            )
    return found
