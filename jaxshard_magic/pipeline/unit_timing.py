"""Measured times of the stages of a compiled pipeline, on zeros."""

import time
from typing import Any

import jax
import jax.numpy as jnp

from ..schedule.actions import KINDS
from .executor import PipelineExecutor
from .jobs import CompileJob

_TIMES = 3


def measure_unit_seconds(pipeline: PipelineExecutor) -> list[list[float] | None]:
    """Measure the seconds of each loss's units, forward and backward together.

    A unit gets its share, by FLOPs, of the best of three runs of its stage's programs. All inputs are zeros, since
    times do not depend on values.

    Returns:
        One list per loss; None for a loss that can't be split.
    """
    losses: list[list[float] | None] = []
    for loss in pipeline.split.losses:
        if loss.split_error is not None:
            losses.append(None)
            continue
        times = []
        for s, units in zip(loss.stages, loss.split_loss.units, strict=True):
            kinds = [kind for kind, stage in pipeline.programs if kind in KINDS and stage == s]
            seconds = sum(_program_seconds(pipeline, kind, s) for kind in kinds)
            total = sum(unit.cost for unit in units)
            times += [seconds * (unit.cost / total if total else 1 / len(units)) for unit in units]
        losses.append(times)
    return losses


def _program_seconds(pipeline: PipelineExecutor, kind: str, s: int) -> float:
    job, program = pipeline.stages[s].job(kind), pipeline.programs[kind, s].call
    assert program is not None
    best = float("inf")
    for _ in range(_TIMES + 1):  # one more, since the first run is a warm-up
        args = jax.block_until_ready(_zeros(job))
        start = time.perf_counter()
        jax.block_until_ready(program(*args))
        best = min(best, time.perf_counter() - start)
    return best


def _zeros(job: CompileJob) -> Any:
    return jax.tree.map(lambda a, at: jax.device_put(_zero(a), at), job.avals, job.in_shardings)


def _zero(aval: jax.ShapeDtypeStruct) -> Any:
    if not jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jnp.zeros(aval.shape, aval.dtype)
    kinds: list[Any] = []
    # `jax.random.key_impl` takes no ShapeDtypeStruct, but a tracer.
    jax.eval_shape(lambda keys: kinds.append(jax.random.key_impl(keys)), aval)
    return jnp.broadcast_to(jax.random.key(0, impl=kinds[0]), aval.shape)
