"""Advice from a recording: each rule fires where it should and is silent where it should be."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from support.sample_measured import measured

import jaxshard_magic
from jaxshard_magic.analysis.advice import Case, advise
from jaxshard_magic.analysis.advice.program import SELDOM
from jaxshard_magic.report import LineTime, Measured, MeshInfo


def found(
    m: Measured | None, source: str = "attached", jobs: Mapping[str, Sequence[str]] | None = None
) -> dict[str, str]:
    axes = {"data": 8}
    mesh = MeshInfo(axes, "tpu", "TPU v5 lite", source, tuple(range(math.prod(axes.values()))), 1)
    advice = advise(Case((), mesh, "fsdp", jobs or {}, measured=m))
    return {a.code: a.message.replace("\u202f", " ") for a in advice}


def test_a_device_that_computes_longer_than_the_others_is_named():
    slow = replace(measured(), behind=0.0094)
    assert found(slow)["slow-device"].startswith(
        "Device 0 computes 9.40 ms longer in a step than the median one, 20% of the step"
    )
    assert "slow-device" not in found(slow, "simulated")  # which share cores
    assert "slow-device" in found(replace(slow, behind=0.02), "simulated")
    assert "slow-device" not in found(measured())  # 6.4%


def test_a_slow_device_is_compared_with_those_of_its_own_stage():
    slow = replace(measured(), behind=0.0094)
    assert found(slow, jobs={"pp": ("pipe",)})["slow-device"].startswith(
        "Device 0 computes 9.40 ms longer in a step than the median one of its own stage, 20% of the step"
    )


def test_waiting_for_python_is_told_with_its_line():
    row = LineTime("cell [7]", 4, "forward", 0.0, 0.0, 0.006, host=0.006)
    others = LineTime("cell [7]", 9, "forward", 0.0, 0.0, 0.02)  # of devices that wait for the one that asks
    waits = replace(measured(), host=0.0235, lines=(*measured().lines, row, others))
    assert found(waits)["waits-for-python"].startswith(
        "A device waits up to 23.5 ms of a step's 47.0 ms for Python on the host, most at cell [7], line 4"
    )
    assert "waits-for-python" not in found(replace(waits, host=0.002))


def test_the_text_to_paste_tells_one_sharded_step_in_a_hundred():
    told = []

    def step(w, count):
        value = jnp.sum(w)
        eval(SELDOM, {"jax": jax, "count": count, "tell": lambda x: told.append(float(x)), "value": value})
        return w + 1, count + 1

    sharded = jaxshard_magic.shard(step, "fsdp", mesh="cpu:2 data=2")
    state = jnp.ones(4), jnp.int32(99)
    for _ in range(3):
        state = sharded(*state)
    jax.effects_barrier()
    assert told == [8.0]


def test_without_a_recording_there_is_none_of_it():
    assert found(None) == {}
