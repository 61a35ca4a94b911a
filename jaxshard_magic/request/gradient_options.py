"""The options of a step's gradient calls, checked."""

import re
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

import jax.numpy as jnp

from ..errors import ShardError, none_of, one_of, regular

REDUCE = ("each", "once", "once-gathered")
MOST = 1_000_000  # of whatever is counted
REMAT_WORDS = ("full", "dots", "nothing", "offload")
REMAT = f"allowed are a number of segments, {', '.join(REMAT_WORDS)}, or a regular expression"
PRECISION = ("bf16", "fp16", "f32")
_NARROW = {"bf16": jnp.bfloat16, "fp16": jnp.float16}


@dataclass(frozen=True)
class Options:
    """Options that have defaults."""

    @property
    def given(self) -> dict[str, Any]:
        """The options that differ from the defaults, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}


@dataclass(frozen=True)
class GradientOptions(Options):
    """`microbatches`: how many parts the batch is taken in. `reduce`: when their gradients are summed over devices.
    `reduce_dtype`: the type in which devices add gradients up; by default float32 where `precision` is a narrower one.
    `remat`: what the backward pass computes again, a number of segments, a policy or a regular expression.
    `precision`: the type of the products; parameters stay as they are. `pad`: add rows to a batch that does not divide
    over the devices, or into its microbatches."""

    microbatches: int = 1
    reduce: str = "each"
    remat: str | None = None
    precision: str | None = None
    pad: bool = False
    reduce_dtype: str | None = None

    def __post_init__(self) -> None:
        check_count("--microbatches", self.microbatches)
        check_choice("--reduce", self.reduce, REDUCE)
        if self.precision is not None:
            check_choice("--precision", self.precision, PRECISION)
        if self.reduce_dtype is not None:
            check_choice("--reduce-dtype", self.reduce_dtype, PRECISION)
        if self.remat is not None and not is_number(str(self.remat)):
            remat_expression(str(self.remat))

    @property
    def changes_gradients(self) -> bool:
        """Whether any option rewrites the gradient calls."""
        return self.microbatches > 1 or self.remat is not None or self.precision is not None

    @property
    def rewrites(self) -> bool:
        """Whether any option makes another step of it."""
        return self.changes_gradients or self.pad

    @property
    def narrow(self) -> Any:
        """The dtype shorter than float32 that products run in, or devices add up in; None for none."""
        return _NARROW.get(self.precision or "", _NARROW.get(self.reduce_dtype or ""))

    @property
    def sum_dtype(self) -> Any:
        """The dtype in which devices add up gradients, None for that in which each is computed."""
        how = self.reduce_dtype or (self.precision and "f32")
        return None if how is None else jnp.dtype(_NARROW.get(how, jnp.float32))


def is_number(how: str) -> bool:
    """Whether `--remat` says a number of segments. Raises `ShardError` for one that no loss can be cut into."""
    digits = re.fullmatch(r"[+-]?(\d+)", how.strip())
    if digits is None:
        return False
    if len(digits[1]) > len(str(MOST)):
        raise ShardError(
            f"--remat takes {MOST:,} segments at most, not a number of {len(digits[1]):,} digits"
        )
    return True


def remat_expression(how: str) -> "re.Pattern[str]":
    """The regular expression that `--remat` says, policies among them. Raises `ShardError` for text that is none."""
    found = regular(how.strip()) if how.strip() else "it is empty"
    if isinstance(found, str):
        raise ShardError(f"--remat {how}: no regular expression ({found}); {REMAT}")
    return found


def check_count(option: str, value: Any) -> None:
    """Raise `ShardError` for what is no whole number from 1 on, and for one of more than `MOST`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ShardError(f"{option} takes a whole number from 1 on, not {value!r}")
    if value > MOST:
        raise ShardError(f"{option} takes {MOST:,} at most")


def check_choice(option: str, value: str, allowed: Collection[str]) -> None:
    """Raise `ShardError` for a value that is not `allowed`."""
    if value not in allowed:
        said = f"{option} does not take {value!r}"
        raise ShardError(none_of(said, str(value), allowed, f"it takes {one_of(allowed)}"))
