"""Where arrays lie as a table: patterns of their paths, each with its PartitionSpec."""

import glob
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from jax.sharding import PartitionSpec

from ..strategies.layout import spec_of
from .pins import spec_text

_NUMBER = re.compile(r"\d+")


def table(specs: Mapping[str, PartitionSpec]) -> dict[str, str]:
    """Patterns, as `fnmatch` has them, for the paths of arrays that are divided, with their specs as text. One pattern
    stands for paths that differ in numbers and lie alike.

    >>> from jax.sharding import PartitionSpec as P
    >>> table({"params.0.w": P("data"), "params.1.w": P("data"), "params.1.b": P()})
    {'params.*.w': 'P("data")'}
    """
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for path in specs:
        alike[tuple(_NUMBER.split(path))].append(path)
    rows: dict[str, str] = {}
    for paths in alike.values():
        pattern = _pattern(paths)
        texts = {text_of(specs[path]) for path in paths}
        others = [p for p in specs if p not in paths and fnmatchcase(p, pattern)]
        if len(paths) > 1 and len(texts) == 1 and not others:
            rows[pattern] = texts.pop()
        else:
            rows |= {glob.escape(path): text_of(specs[path]) for path in paths}
    return {pattern: text for pattern, text in rows.items() if text != "P()"}


def text_of(spec: PartitionSpec) -> str:
    """`P("data", None)` without what it ends in of None."""
    return spec_text(spec_of(spec))


def _pattern(paths: Sequence[str]) -> str:
    """One for paths that differ in numbers alone: where they do it has a star."""
    numbers = list(zip(*(_NUMBER.findall(path) for path in paths), strict=True))
    texts = _NUMBER.split(glob.escape(paths[0]))
    same = [each[0] if len(set(each)) == 1 else "*" for each in numbers]
    return "".join(text + number for text, number in zip(texts, [*same, ""], strict=True))
