"""Tables of specs by patterns of array paths."""

import glob
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from jax.sharding import PartitionSpec

from ..strategies.layout import from_partition_spec
from .constraints import spec_text

_NUMBER = re.compile(r"\d+")


def spec_table(specs: Mapping[str, PartitionSpec]) -> dict[str, str]:
    """Return specs as text by `fnmatch` patterns of paths; replicated arrays are left out.

    Paths that differ in numbers alone share a pattern where their specs are equal.

    >>> from jax.sharding import PartitionSpec as P
    >>> spec_table({"params.0.w": P("data"), "params.1.w": P("data"), "params.1.b": P()})
    {'params.*.w': 'P("data")'}
    """
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for path in specs:
        alike[tuple(_NUMBER.split(path))].append(path)
    rows: dict[str, str] = {}
    for paths in alike.values():
        pattern = _pattern(paths)
        texts = {partition_spec_text(specs[path]) for path in paths}
        # A pattern for several paths must match no other path.
        others = [p for p in specs if p not in paths and fnmatchcase(p, pattern)]
        if len(paths) > 1 and len(texts) == 1 and not others:
            rows[pattern] = texts.pop()
        else:
            # A path may contain characters that are special in patterns.
            rows |= {glob.escape(path): partition_spec_text(specs[path]) for path in paths}
    return {pattern: text for pattern, text in rows.items() if text != "P()"}


def partition_spec_text(spec: PartitionSpec) -> str:
    """Return a spec as text, without trailing None."""
    return spec_text(from_partition_spec(spec))


def _pattern(paths: Sequence[str]) -> str:
    """Return the pattern of paths with different numbers, with a star for each different number."""
    numbers = list(zip(*(_NUMBER.findall(path) for path in paths), strict=True))
    texts = _NUMBER.split(glob.escape(paths[0]))
    same = [each[0] if len(set(each)) == 1 else "*" for each in numbers]
    return "".join(text + number for text, number in zip(texts, [*same, ""], strict=True))
