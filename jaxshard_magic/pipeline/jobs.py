"""Programs to compile: what each takes, where that lies, and all of them compiled side by side."""

import os
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
from jax.stages import Compiled, Lowered

from ..program.strict import quick_call


@dataclass(frozen=True)
class Job:
    """A program: `run(*args)` with arguments of the types `avals`, where `ins` and `outs` say; `donate`: arguments whose
    memory it takes over. Jobs that share `run` and `avals` are traced once."""

    run: Callable[..., Any]
    avals: tuple[Any, ...]
    ins: tuple[Any, ...]
    outs: Any
    donate: tuple[int, ...] = ()

    def lowered(self) -> Lowered:
        """The program before the compiler of its devices has seen it."""
        jitted = jax.jit(self.run, in_shardings=self.ins, out_shardings=self.outs, donate_argnums=self.donate)
        return jitted.lower(*self.avals)


@dataclass(frozen=True)
class Made:
    """A compiled program, and it as a function that is quick to call."""

    compiled: Compiled
    call: Callable[..., Any]


def make(jobs: Mapping[Hashable, Job]) -> dict[Hashable, Made]:
    """All of them compiled, as many at a time as there are cores."""
    lowered = {key: job.lowered() for key, job in jobs.items()}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = dict(zip(lowered, pool.map(Lowered.compile, lowered.values()), strict=True))
    return {key: Made(c, quick_call(c)) for key, c in compiled.items()}


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """What a program is lowered for in the place of an array."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))
