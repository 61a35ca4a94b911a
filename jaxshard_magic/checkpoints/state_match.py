"""Comparison of a checkpoint's leaves with a state's, before any array is read.

A state may be a part of the checkpoint, such as the parameters of one with parameters and optimizer.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace

from ..errors import ShardError, did_you_mean, list_names, unknown_name
from .checkpoint_info import SavedLeaf

_CAST = "cast=True, or --cast on the line, converts it"


def matching_part(
    have: Iterable[str], want: Iterable[str], where: str, requested: str | None = None, state_name: str = ""
) -> str:
    """Return the prefix of a checkpoint's paths below which they are those of a state; "" for no prefix.

    Of several prefixes with all paths, the shortest wins, then one with no other paths, then one that ends in
    `state_name`. If no prefix has all paths, the one with most is returned.

    Args:
        have: Paths in the checkpoint.
        want: Paths in the state.
        where: Name of the checkpoint in messages.
        requested: Prefix that the user asked for; None to search.
        state_name: Name of the state in the user's code.

    Raises:
        ShardError: The requested prefix is missing, or several prefixes are left.

    >>> matching_part(["params.w", "params.b", "opt.0.mu.w", "opt.0.mu.b"], ["w", "b"], "ckpt/3")
    'params'
    """
    parts, want = paths_by_prefix(have), set(want)
    if requested is not None:
        if requested not in parts:
            there = [part for part in parts if part]
            raise ShardError(
                unknown_name(
                    f"{where} has no {requested}", requested, there, f"it has {list_names(first_words(there))}"
                )
            )
        return requested
    whole = [part for part, rest in parts.items() if want <= rest]
    if not whole:
        return closest_part(parts, want)
    # A criterion that no prefix meets does not count.
    near = [part for part in whole if _depth(part) == min(map(_depth, whole))]
    near = [part for part in near if parts[part] == want] or near
    near = [part for part in near if part.rpartition(".")[2] == state_name] or near
    if len(near) > 1:
        raise ShardError(
            f"{where} has arrays of these names as {list_names(near)}: say which, part={near[0]!r}, or "
            f"--part {near[0]} "
            "on the line"
        )
    return near[0]


def closest_part(parts: Mapping[str, Set[str]], want: Set[str]) -> str:
    """Return the prefix with most of the paths in `want`; of several, the shortest.

    Args:
        parts: Paths below each prefix, from `paths_by_prefix`.
        want: Paths in the state.
    """
    return max(parts, key=lambda part: (len(parts[part] & want), -_depth(part)), default="")


def leaves_of_part(part: str, saved: Iterable[SavedLeaf], wanted: Iterable[SavedLeaf]) -> list[SavedLeaf]:
    """Return a part's leaves with paths below the part.

    If all wanted leaves begin with the same name and the part has them, only leaves with this beginning are returned.

    Args:
        part: Prefix of the part; "" for the whole checkpoint.
        saved: Leaves of the checkpoint.
        wanted: Leaves of the state.
    """
    begins = {leaf.path.partition(".")[0] for leaf in wanted}
    alone = f"{next(iter(begins))}." if len(begins) == 1 else ""
    here = [replace(x, path=_from(part, x.path)) for x in saved if _from(part, x.path)]
    begun = [leaf for leaf in here if leaf.path.startswith(alone)]
    return begun if {leaf.path for leaf in wanted} <= {leaf.path for leaf in begun} else here


def join_path(part: str, path: str) -> str:
    """Return the path in the checkpoint of `path` in `part`."""
    return f"{part}.{path}" if part else path


def _from(part: str, path: str) -> str:
    """Return a path relative to a part; "" if it is outside."""
    return path.removeprefix(f"{part}.") if path.startswith(f"{part}.") else "" if part else path


def paths_by_prefix(names: Iterable[str]) -> dict[str, set[str]]:
    """Return, by each prefix of the names that ends before a dot, the set of remainders; by "" all names."""
    found: dict[str, set[str]] = defaultdict(set)
    for name in names:
        words = name.split(".")
        for i in range(len(words)):
            found[".".join(words[:i])].add(".".join(words[i:]))
    return found


def first_words(names: Sequence[str]) -> list[str]:
    """Return the first words of names, each once."""
    return [*dict.fromkeys(name.partition(".")[0] for name in names)]


def _depth(part: str) -> int:
    """Return the number of words in a prefix."""
    return len(part.split(".")) if part else 0


def check_same(
    saved: Sequence[SavedLeaf],
    wanted: Sequence[SavedLeaf],
    where: str,
    *,
    cast: bool | None = False,
    optional: Collection[str] = (),
    allow_extra: bool = False,
    rename_hint: str = "",
) -> None:
    """Raise ShardError if a checkpoint has other leaves than a state. One line names the first leaf that differs.

    Args:
        saved: Leaves of the checkpoint.
        wanted: Leaves of the state.
        where: Name of the checkpoint in messages.
        cast: Whether another dtype is accepted, to be converted; never to or from PRNG keys. None where users have no
            option to ask for a conversion.
        optional: Paths in the checkpoint that the state may lack.
        allow_extra: Whether the checkpoint may have any arrays that the state lacks.
        rename_hint: Advice for arrays that were saved under another name.

    >>> check_same([SavedLeaf("w", (8,), "float32")], [SavedLeaf("w", (4,), "float32")], "ckpt/3")
    Traceback (most recent call last):
    jaxshard_magic.errors.ShardError: w is float32[8] in ckpt/3 and float32[4] here; build the model that was saved
    """
    have, want = {x.path: x for x in saved}, {x.path: x for x in wanted}
    if missing := [path for path in want if path not in have]:
        raise ShardError(_lacks(where, missing, [*have], [*want], rename_hint))
    for path, leaf in want.items():
        there = have[path]
        keys = "key<" in leaf.dtype or "key<" in there.dtype
        if there.shape != leaf.shape or (there.dtype != leaf.dtype and (keys or not cast)):
            a, b = (str(x).removeprefix(f"{path} ") for x in (there, leaf))
            converts = there.shape == leaf.shape and not keys
            fix = "build the model that was saved"
            if converts:
                fix = _CAST if cast is not None else "go on with the dtype that was saved"
            raise ShardError(f"{path} is {a} in {where} and {b} here; {fix}")
    spared = set(optional)
    if not allow_extra and (left := [path for path in have if path not in want and path not in spared]):
        raise ShardError(
            f"{where} has {left[0]}, which is not in the state that it is restored into"
            f"{f', and {len(left) - 1} more' if len(left) > 1 else ''}; give all of the state that was saved"
        )


def _lacks(where: str, missing: Sequence[str], have: Sequence[str], want: Sequence[str], renamed: str) -> str:
    """Return the message about missing arrays: the checkpoint is of a part of the state alone, or the first missing
    name with the nearest existing one."""
    there = set(have)
    parts = [part for part, rest in paths_by_prefix(want).items() if part and rest == there]
    [*begins] = first_words(have)
    if len(begins) == 1 and there == {path for path in want if path.partition(".")[0] in begins}:
        parts = begins
    if parts:
        left = next(path for path in missing if not path.startswith(f"{parts[0]}."))
        how = f"like=state[{parts[0]}], or its name alone on the line"
        if not parts[0].isdecimal():
            how = f"step.restore(DIR, like=state.{parts[0]}) or %shard load DIR state.{parts[0]}"
        return f"{where} has {' or '.join(parts)} alone, and no {left}: restore that part, {how}"
    first = missing[0]
    near = did_you_mean(first, sorted(set(have) - set(want)))
    told = f"{len(missing)} of {len(want)} are not in it"
    if renamed:
        return f"{where} has no {first}.{near} {told[:1].upper()}{told[1:]}; {renamed}"
    return f"{where} has no {first}.{near} It was saved under another name, or of another model: {told}"
