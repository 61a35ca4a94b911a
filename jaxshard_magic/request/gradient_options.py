"""The options of a step's gradient calls, checked."""

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

import jax.numpy as jnp

from ..errors import ShardError, did_you_mean, one_of

REDUCE = ("each", "once", "once-gathered")
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
        if self.remat is not None and not str(self.remat):
            raise ShardError(
                "--remat takes a number of segments, a policy such as full or dots, or a regular expression"
            )

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


def check_count(option: str, value: Any) -> None:
    """Raise `ShardError` for what is no whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ShardError(f"{option} takes a whole number from 1 on, not {value!r}")


def check_choice(option: str, value: str, allowed: Collection[str]) -> None:
    """Raise `ShardError` for a value that is not `allowed`."""
    if value not in allowed:
        raise ShardError(
            f"{option} takes {one_of(allowed)}, not {value!r}.{did_you_mean(str(value), allowed)}"
        )
