"""A program run plain and sharded, and what became of it: the same numbers, a refusal, or what is wrong.

A number is wrong where it is further from the plain step's than rounding explains. How far that is has two parts: a
share of the largest number of its array, by dtype, and, only where that is not kept, what the plain step itself does
when its inputs change by a rounding: a program whose own numbers jump then is told `unstable`, and is no evidence.
"""

import linecache
import re
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jaxshard_magic
from jaxshard_magic.strategies import fsdp

from .programs import SMALL_WEIGHT, Program, Type, made

MESHES = {
    "dp": "data=8",
    "fsdp": "data=8",
    "tp": "data=4 model=2",
    "fsdp+tp": "data=2 fsdp=2 model=2",
    "sp": "data=4 seq=2",
    "fsdp+sp": "data=2 fsdp=2 seq=2",
    "ep": "data=2 expert=4",
}
CALLS = 3
FAULTS = ("wrong", "traceback", "ended", "slow")
# The share of an array's largest number that rounding may take: sums of thousands of float32, and of bfloat16.
TOLERANCE, NARROW_TOLERANCE, LEAST = 2e-4, 0.06, 1e-5
ROUNDING, NARROW_ROUNDING = 2.0**-22, 2.0**-8
UNSTABLE = 0.1  # of the tolerance: what a rounding of the inputs may do to the plain step's numbers

_NAMED = re.compile(r'--spec "([^"=]+)=([^"]+)"')  # in a refusal, the option that would help

Numbers = dict[str, np.ndarray]


def applies(program: Program, strategy: str) -> bool:
    """Return whether a strategy has something to divide: `ep` experts, `sp` a dimension beside the examples."""
    if strategy == "ep":
        forms = ("mixture(", "routed(", "sorted_by_expert(")
        return any(form in o.text for o in program.operations for form in forms)
    return "sp" not in strategy.split("+") or any(len(x.type.shape) > 2 for x in program.batch)


@dataclass(frozen=True)
class Outcome:
    """`kind`: same, refused, wrong, traceback, unstable, plain (the plain step failed), ended or slow; with the `specs`
    that a refusal named, with which it was tried again."""

    kind: str
    told: str = ""
    specs: dict[str, str] = field(default_factory=dict)

    @property
    def fault(self) -> bool:
        return self.kind in FAULTS

    @property
    def sort(self) -> str:
        """The outcome without names and sizes: equal for equal causes, as far as a line tells."""
        short = re.sub(r"line \d+|'[^']*'|`[^`]*`|\"[^\"]*\"|[\[(][^\[\]()]*[\])]|\d+", "_", self.told.split("\n")[0])
        return self.kind if self.kind in ("same", "wrong") else f"{self.kind}: {re.sub('(_|, )+', '_', short)[:160]}"


class Inputs:
    """State and batch of a program; `noise` scales their floating numbers by 1 plus about so much."""

    def __init__(self, program: Program, noise: float = 0.0, seed: int = 0):
        rng = np.random.default_rng(seed)
        space = {"np": np, "jnp": jnp}

        def array(expression: str, t: Type) -> np.ndarray:
            found = eval(expression, space)  # our own text
            if noise and t.floating:
                found = (found * (1 + noise * rng.choice((-1, 1), found.shape))).astype(found.dtype)
            return found

        self.params = {p.name: array(made(p), p.type) for p in program.params}
        self.batch = {x.name: array(made(x), x.type) for x in program.batch}
        for x in program.batch:
            if x.same_as:
                self.batch[x.name] = self.batch[x.same_as]
        self.keyed = program.keyed

    def state(self) -> dict[str, Any]:
        key = {"key": jax.random.key(0)} if self.keyed else {}
        return {"params": jax.tree.map(jnp.asarray, self.params), **key, "count": jnp.int32(0)}


def step_of(program: Program) -> Any:
    """The program's `train_step`, with its source where tracebacks and the package look for it."""
    text, name = program.text(), f"<program {abs(hash(program))}>"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    module = SimpleNamespace(__name__="__main__")
    space = vars(module)
    exec(compile(text, name, "exec"), space)  # our own text
    return space["train_step"]


def numbers_of_calls(step: Any, inputs: Inputs) -> Iterator[Numbers]:
    """The numbers after each of the calls, which take NumPy and JAX batches in turn."""
    state = inputs.state()
    for call in range(CALLS):
        batch = jax.tree.map((np.asarray, jnp.asarray)[call % 2], inputs.batch)
        state, loss, more = step(state, batch)
        left = {"state": state, "loss": loss, "more": more}
        paths = jax.tree_util.tree_flatten_with_path(left)[0]
        yield {jax.tree_util.keystr(path, simple=True, separator="."): _array(x) for path, x in paths}


def _array(x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x).astype(np.float64) if x.dtype == jnp.bfloat16 else np.asarray(x)


def plain_numbers(program: Program, noise: float = 0.0, seed: int = 0) -> list[Numbers]:
    return list(numbers_of_calls(jax.jit(step_of(program)), Inputs(program, noise, seed)))


def outcome(program: Program, strategy: str, plain: list[Numbers] | None = None) -> Outcome:
    """What becomes of a program under a strategy; `plain` are its numbers where they are known."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if plain is None:
            try:
                plain = plain_numbers(program)
            except Exception as error:  # a program that JAX itself refuses says nothing of the package
                return Outcome("plain", f"{type(error).__name__}: {str(error)[:300]}")
        if not all(np.isfinite(x).all() for numbers in plain for x in numbers.values()):
            return Outcome("unstable", "numbers that are not finite")
    specs: dict[str, str] = {}
    while True:
        found = replace(_sharded(program, strategy, plain, specs), specs=dict(specs))
        named = _NAMED.search(found.told) if found.kind == "refused" else None
        if named is None or named[1] in specs:
            return found
        specs[named[1]] = named[2]


def _sharded(program: Program, strategy: str, plain: list[Numbers], specs: dict[str, str]) -> Outcome:
    """What becomes of a program under a strategy, with specs as a line gives them."""
    with warnings.catch_warnings(), mock.patch.object(fsdp, "MIN_GATHERED_ELEMENTS", SMALL_WEIGHT):
        warnings.simplefilter("ignore")
        try:
            step = jaxshard_magic.shard(
                step_of(program), strategy, mesh=MESHES[strategy], pad=program.ragged, specs=specs
            )
            for call, (got, want) in enumerate(zip(numbers_of_calls(step, Inputs(program)), plain, strict=True), 1):
                if told := difference(program, got, want):
                    jumps = unstable(program, plain)
                    return Outcome("unstable", jumps) if jumps else Outcome("wrong", f"call {call}: {told}")
        except jaxshard_magic.ShardError as error:
            return Outcome("refused" if "\n" not in str(error) else "traceback", str(error))
        except Exception as error:  # whatever a step raises is what is looked for
            ours = [f for f in traceback.extract_tb(error.__traceback__) if "jaxshard_magic" in f.filename]
            where = f" ({Path(ours[-1].filename).name} {ours[-1].name})" if ours else ""
            return Outcome("traceback", f"{type(error).__name__}{where}: {str(error)[:300]}")
    return Outcome("same")


def difference(program: Program, got: Numbers, want: Numbers, share: float = 1.0) -> str:
    """What is further apart than `share` of the tolerance, or of another kind; empty where nothing is."""
    narrow = "bfloat16" in program.text() or any(t.dtype == "bfloat16" for t in program.types.values())
    if list(got) != list(want):
        return f"returns {', '.join(got)} for {', '.join(want)}"
    told: list[tuple[float, str]] = []
    for name, x in want.items():
        y = got[name]
        if (y.shape, y.dtype) != (x.shape, x.dtype):
            return f"{name} is {y.dtype}{[*y.shape]} for {x.dtype}{[*x.shape]}"
        if not x.size:
            continue
        off = np.abs(y.astype(np.float64) - x.astype(np.float64)).max()
        largest = np.abs(x.astype(np.float64)).max()
        allowed = share * (largest * (NARROW_TOLERANCE if narrow else TOLERANCE) + (0.01 if narrow else LEAST))
        if not off <= allowed:
            told.append((float(off), f"{name} is off by {off:.3g}, its largest is {largest:.3g}"))
    return max(told)[1] + f"; {len(told)} of {len(want)} arrays" if told else ""


def unstable(program: Program, plain: list[Numbers]) -> str:
    """Which of the plain step's numbers a rounding of its inputs changes; empty where none."""
    narrow = "bfloat16" in program.text() or any(t.dtype == "bfloat16" for t in program.types.values())
    for seed in range(2):
        again = plain_numbers(program, NARROW_ROUNDING if narrow else ROUNDING, seed)
        for got, want in zip(again, plain, strict=True):
            if told := difference(program, got, want, 1.0 if narrow else UNSTABLE):
                return told
    return ""
