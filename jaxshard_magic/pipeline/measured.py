"""What the stages of a compiled pipeline take, measured on zeros."""

import time
from typing import Any

import jax
import jax.numpy as jnp

from ..schedule.actions import KINDS
from .executed import Pipeline
from .jobs import Job

_TIMES = 3


def unit_seconds(pipeline: Pipeline) -> list[list[float] | None]:
    """Of each loss the seconds of its units, forward and backward together: their share, by FLOPs, of what their
    stage's programs take at best of three runs; None for one that can't be cut. Arrays are zeros: time does not depend
    on what numbers are."""
    losses: list[list[float] | None] = []
    for loss in pipeline.split.losses:
        if loss.uncut is not None:
            losses.append(None)
            continue
        times = []
        for s, units in zip(loss.stages, loss.cut.units, strict=True):
            kinds = [kind for kind, stage in pipeline.programs if kind in KINDS and stage == s]
            seconds = sum(_seconds(pipeline, kind, s) for kind in kinds)
            total = sum(unit.cost for unit in units)
            times += [seconds * (unit.cost / total if total else 1 / len(units)) for unit in units]
        losses.append(times)
    return losses


def _seconds(pipeline: Pipeline, kind: str, s: int) -> float:
    job, program = pipeline.stages[s].job(kind), pipeline.programs[kind, s].call
    assert program is not None
    best = float("inf")
    for _ in range(_TIMES + 1):  # the first run may do what later ones need not
        args = jax.block_until_ready(_zeros(job))
        start = time.perf_counter()
        jax.block_until_ready(program(*args))
        best = min(best, time.perf_counter() - start)
    return best


def _zeros(job: Job) -> Any:
    return jax.tree.map(lambda a, at: jax.device_put(_zero(a), at), job.avals, job.ins)


def _zero(aval: jax.ShapeDtypeStruct) -> Any:
    if not jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jnp.zeros(aval.shape, aval.dtype)
    kinds: list[Any] = []
    jax.eval_shape(lambda keys: kinds.append(jax.random.key_impl(keys)), aval)
    return jnp.broadcast_to(jax.random.key(0, impl=kinds[0]), aval.shape)
