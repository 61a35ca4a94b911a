"""Hardware that isn't attached: its own compiler, in a process of its own, and the devices it compiles for."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

from ..errors import ShardError
from ..files import own_folder, put_own
from ..hardware import Chip, chip
from . import cache as kept
from . import gpu, tpu
from .built import Built
from .compiler import LIMIT_S, Compiler, CompilerFailed, given_up
from .slices import written
from .worker import Failed, Job, load

__all__ = [
    "LIMIT_S",
    "Built",
    "CompilerFailed",
    "Target",
    "compiled",
    "compiler_of",
    "devices",
    "given_up",
    "stop_compilers",
    "target_of",
]

ROOMY = "v5p"  # compiles what the smaller chips have no room for


@dataclass(frozen=True)
class Target:
    """A slice or nodes of one kind of chip, to compile for.

    `extent`: the chips of a TPU slice per dimension, as (4, 4); of GPUs, nodes and GPUs per node.
    """

    chip: Chip
    extent: tuple[int, ...]

    @property
    def name(self) -> str:
        """As `%mesh` takes it: "v5e:4x4", "h100:8", "a100-80:2x8"."""
        return written(self.chip, self.extent)

    @property
    def count(self) -> int:
        """Devices, as JAX counts them: some TPUs have two to a chip."""
        return math.prod(self.extent) * self.chip.per_chip

    @property
    def platform(self) -> str:
        return "cuda" if self.chip.kind == "gpu" else "tpu"

    def topology(self) -> Mapping[str, Any]:
        """What `jax.experimental.topologies.get_topology_desc` takes for it, as keyword arguments."""
        if self.chip.kind == "gpu":
            nodes, gpus = self.extent
            return {"platform": "cuda", **gpu.options(self.chip, nodes, gpus)}
        return {"platform": "tpu", **tpu.options(self.chip.key, self.extent)}

    def environment(self) -> dict[str, str]:
        """What its compiler wants to find in the environment."""
        return gpu.environment() if self.chip.kind == "gpu" else tpu.environment()

    def roomier(self) -> "Target | None":
        """As many devices with more memory, for a program that does not fit; None where there are none."""
        larger = chip(ROOMY)
        if self.chip.kind == "gpu" or (self.chip.usable or 0) >= (larger.usable or 0):
            return None
        first, *rest = (*self.extent, 1, 1)[: len(self.extent) + 1]
        return Target(larger, (first * self.chip.per_chip, *rest)[:3])


@functools.cache
def devices(target: Target) -> tuple[Any, ...]:
    """The devices of a target, which compile and do not run. Raises `ShardError` without its compiler, and for a
    slice that it refuses."""
    refused = gpu.missing(target.chip) if target.chip.kind == "gpu" else tpu.missing()
    if refused is not None:
        raise refused
    environment = target.environment()
    if target.platform == "tpu" and tpu.attached():
        jax.devices()  # what is attached starts first, and under its own variables
        environment = {}
    try:
        with tpu.variables(environment):
            slice_devices = load(target.topology())
    except JaxRuntimeError as error:
        raise ShardError(f"the compiler refuses {target.name}: {' '.join(str(error).split())}") from error
    _targets[slice_devices[0].client] = target
    return slice_devices


def target_of(mesh: Mesh) -> Target | None:
    """The target whose devices a mesh is of; None for devices that are attached or simulated."""
    return _targets.get(mesh.devices.flat[0].client)


_targets: dict[Any, Target] = {}
_compilers: dict[str, Compiler] = {}


def compiler_of(target: Target) -> Compiler:
    """The process that compiles for targets like this one."""
    if target.platform not in _compilers:
        _compilers[target.platform] = Compiler(target.environment())
    return _compilers[target.platform]


def stop_compilers() -> None:
    """End the processes that compile, whatever they do; the next program to compile starts another one."""
    while _compilers:
        _compilers.popitem()[1].stop()


def compiled(
    target: Target, program: bytes, order: Sequence[int], *, tupled: bool = False, limit_s: float = LIMIT_S
) -> Built:
    """What the compiler of a target says of a program, from the user's cache where it has said it before.

    `program`: a StableHLO module as bytecode; `order`: the ids of the target's devices in the order of the mesh.
    One that the target has no room for is compiled for `Target.roomier` too. Raises `ShardError` for a program that
    the compiler refuses for another reason, and `CompilerFailed` at `limit_s` seconds and where its process dies.
    """
    built = _compiled(target, program, order, tupled, limit_s)
    larger = target.roomier()
    if built.refused is None or larger is None:
        return built
    other = _compiled(larger, program, range(len(order)), tupled, limit_s)
    if other.refused is not None:
        return built
    return replace(
        other, refused=built.refused, stand_in=larger.chip.key, seconds=built.seconds + other.seconds
    )


def _compiled(target: Target, program: bytes, order: Sequence[int], tupled: bool, limit_s: float) -> Built:
    """What the compiler of exactly this target says, from the cache where it has said it before."""
    job = Job(program, target.topology(), tuple(order), tupled)
    key = kept.key_of(program, job.topology, job.order, tupled)
    built = kept.get(key)
    if built is None:
        answer = compiler_of(target).compile(job, limit_s)
        if isinstance(answer, Failed):
            raise _refusal(target, answer.message)
        built = answer
        kept.put(key, built)
    return built


def _refusal(target: Target, message: str) -> ShardError:
    """One line of what a compiler says; the whole in a file."""
    first = " ".join(message.partition("\n")[0].split())
    try:
        path = own_folder(kept.folder()) / "compiler-error.txt"
        put_own(path, message.encode("utf-8", "replace"))
    except OSError:
        return ShardError(f"the compiler for {target.name} refuses this step: {first}")
    return ShardError(f"the compiler for {target.name} refuses this step: {first}. All it says: {path}")
