"""Short summaries of many pytree paths: `emb, layers 0-3`."""

import re
from collections.abc import Iterable, Sequence

_WORD = re.compile(r"\w+(?::\w+)?")
_NUMBER = re.compile(r"[0-9]{1,9}(?::[0-9]{1,9})?")  # number of a layer, or a slice of layers
_MOST = 4  # names listed; further ones are counted


def common_words(paths: Iterable[str]) -> int:
    """Return the number of leading words shared by all paths; at least one word of each path is left over."""
    words = [_words(path) for path in dict.fromkeys(paths)]
    common = 0
    while words and all(len(w) > common + 1 for w in words) and len({w[common] for w in words}) == 1:
        common += 1
    return common


def summarize_paths(paths: Sequence[str], common: int | None = None) -> str:
    """Return the parts of a model that leaves belong to, named by the first word in which their paths differ.

    Layer numbers become ranges. At most four names are listed, and the others counted.

    Args:
        paths: Paths of leaves; duplicates are ignored.
        common: Number of leading words to leave out, where other paths count as well; by default the words shared by
            `paths`.

    >>> summarize_paths(["p.emb", "p.layers[0].a", "p.layers[0].b", "p.layers[1].a", "p.layers[2].a"])
    'emb, layers 0-2'
    >>> summarize_paths(["p.emb", "p.layers.down[0:2]", "p.layers.up[0:2]"])
    'emb, layers 0-1'
    """
    words = [_words(path) for path in dict.fromkeys(paths)]
    if not words:
        return ""
    common = common_words(paths) if common is None else common
    numbers_of: dict[str, list[str]] = {}
    for w in words:
        rest = w[common:]
        # A number names no part by itself: the word before it does.
        if _NUMBER.fullmatch(rest[0]) and common:
            rest = [w[common - 1], *rest]
        numbers = numbers_of.setdefault(rest[0], [])
        numbers += [word for word in rest[1:] if _NUMBER.fullmatch(word)][:1]
    parts = [f"{name} {_ranges(numbers)}" if numbers else name for name, numbers in numbers_of.items()]
    more = [f"{len(parts) - _MOST} more"] if len(parts) > _MOST else []
    return ", ".join([*parts[:_MOST], *more])


def _words(path: str) -> list[str]:
    """Return the words of a path; a path without word characters is one word."""
    return _WORD.findall(path) or [path]


def _ranges(numbers: Iterable[str]) -> str:
    """Return numbers as ranges, `0-3, 7`; a slice `0:3` stands for the layers 0 to 2."""
    runs: list[tuple[int, int]] = []
    for first, last in sorted(map(_run, numbers)):
        if runs and first <= runs[-1][1] + 1:
            runs[-1] = runs[-1][0], max(last, runs[-1][1])
        else:
            runs.append((first, last))
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _run(number: str) -> tuple[int, int]:
    """Return the first and the last layer of a number or a slice."""
    first, _, end = number.partition(":")
    return int(first), max(int(first), int(end) - 1) if end else int(first)
