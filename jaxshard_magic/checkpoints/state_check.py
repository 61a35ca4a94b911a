"""Comparison of a checkpoint's leaves with a state's, before any array is read."""

from collections.abc import Collection, Sequence

from ..errors import ShardError, did_you_mean
from .checkpoint_info import SavedLeaf
from .state_parts import first_words, paths_by_prefix

_CAST = "cast=True, or --cast on the line, converts it"


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
