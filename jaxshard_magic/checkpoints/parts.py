"""Which part of a checkpoint a state is: its parameters alone, say, of parameters and the optimizer's state."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

from ..errors import ShardError, none_of, one_of
from .saved import SavedLeaf


def part_of(
    have: Iterable[str], want: Iterable[str], where: str, named: str | None = None, called: str = ""
) -> str:
    """Under which name the paths of `have` are those of `want`: "" where they are as they stand.

    Of several it is the one whose name is shortest; where none has all of them, the one that has most. `named`: the
    part that was asked for; `called`: what the state is called, which decides between several. Raises ShardError for
    one that is not there, and for several of one length.

    >>> part_of(["params.w", "params.b", "opt.0.mu.w", "opt.0.mu.b"], ["w", "b"], "ckpt/3")
    'params'
    """
    parts, want = under(have), set(want)
    if named is not None:
        if named not in parts:
            there = [part for part in parts if part]
            raise ShardError(none_of(f"{where} has no {named}", named, there, f"it has {one_of(top(there))}"))
        return named
    whole = [part for part, rest in parts.items() if want <= rest]
    if not whole:
        return most_of(parts, want)
    near = [part for part in whole if _depth(part) == min(map(_depth, whole))]
    near = [part for part in near if parts[part] == want] or near
    near = [part for part in near if part.rpartition(".")[2] == called] or near
    if len(near) > 1:
        raise ShardError(
            f"{where} has arrays of these names as {one_of(near)}: say which, part={near[0]!r}, or --part {near[0]} "
            "on the line"
        )
    return near[0]


def most_of(parts: Mapping[str, Set[str]], want: Set[str]) -> str:
    """The one of `under` that has most of the paths of `want`, of several the shortest."""
    return max(parts, key=lambda part: (len(parts[part] & want), -_depth(part)), default="")


def leaves_of(part: str, saved: Iterable[SavedLeaf], wanted: Iterable[SavedLeaf]) -> list[SavedLeaf]:
    """The leaves of a part, their paths from it on; of a part in that, where all that are wanted begin with its name,
    no others."""
    begins = {leaf.path.partition(".")[0] for leaf in wanted}
    alone = f"{next(iter(begins))}." if len(begins) == 1 else ""
    here = [replace(x, path=_from(part, x.path)) for x in saved if _from(part, x.path)]
    begun = [leaf for leaf in here if leaf.path.startswith(alone)]
    return begun if {leaf.path for leaf in wanted} <= {leaf.path for leaf in begun} else here


def joined(part: str, path: str) -> str:
    """The path of what is at `path` in a part."""
    return f"{part}.{path}" if part else path


def _from(part: str, path: str) -> str:
    return path.removeprefix(f"{part}.") if path.startswith(f"{part}.") else "" if part else path


def under(names: Iterable[str]) -> dict[str, set[str]]:
    """By each beginning of paths, up to a dot, what follows it; by "" all of them."""
    found: dict[str, set[str]] = defaultdict(set)
    for name in names:
        words = name.split(".")
        for i in range(len(words)):
            found[".".join(words[:i])].add(".".join(words[i:]))
    return found


def top(names: Sequence[str]) -> list[str]:
    """The first words of paths, each once."""
    return [*dict.fromkeys(name.partition(".")[0] for name in names)]


def _depth(part: str) -> int:
    return len(part.split(".")) if part else 0
