"""What a checkpoint has, held against what is wanted of it, before anything is read."""

from collections.abc import Collection, Sequence

from ..errors import ShardError, did_you_mean
from .parts import top, under
from .saved import SavedLeaf

_CAST = "cast=True, or --cast on the line, converts it"


def check_same(
    saved: Sequence[SavedLeaf],
    wanted: Sequence[SavedLeaf],
    where: str,
    *,
    cast: bool | None = False,
    spare: Collection[str] = (),
    more: bool = False,
    renamed: str = "",
) -> None:
    """Raise ShardError, in one line that names the first leaf that differs, where a checkpoint is of another state.

    `where`: what the checkpoint is called. `cast`: whether another dtype is converted, never to or from PRNG keys; None
    where it can't be asked for.
    `spare`: leaves that need not be wanted.
    `more`: whether it may have arrays that are not wanted. `renamed`: what to do where it has another name for one.

    >>> check_same([SavedLeaf("w", (8,), "float32")], [SavedLeaf("w", (4,), "float32")], "ckpt/3")
    Traceback (most recent call last):
    jaxshard_magic.errors.ShardError: w is float32[8] in ckpt/3 and float32[4] here; build the model that was saved
    """
    have, want = {x.path: x for x in saved}, {x.path: x for x in wanted}
    if missing := [path for path in want if path not in have]:
        raise ShardError(_lacks(where, missing, [*have], [*want], renamed))
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
    spared = set(spare)
    if not more and (left := [path for path in have if path not in want and path not in spared]):
        raise ShardError(
            f"{where} has {left[0]}, which is not in the state that it is restored into"
            f"{f', and {len(left) - 1} more' if len(left) > 1 else ''}; give all of the state that was saved"
        )


def _lacks(where: str, missing: Sequence[str], have: Sequence[str], want: Sequence[str], renamed: str) -> str:
    """What is said where arrays are wanted that are not there: that it has a part of the state alone, else the first of
    them, with the nearest."""
    there = set(have)
    parts = [part for part, rest in under(want).items() if part and rest == there]
    [*begins] = top(have)
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
