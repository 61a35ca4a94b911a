"""Compile for hardware that isn't attached: devices of a target, and compilers in processes of their own."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

from ..errors import ShardError
from ..files import private_folder, write_private
from ..hardware import Chip, chip
from . import cache as kept
from . import gpu, tpu
from .compiler import LIMIT_S, Compiler, CompilerFailed, given_up
from .slices import target_name
from .worker import CompileRequest, CompileResult, CompilerRefusal, load

__all__ = [
    "LIMIT_S",
    "CompileResult",
    "CompilerFailed",
    "Target",
    "compile_for_target",
    "compiler_of",
    "devices",
    "given_up",
    "stop_compilers",
    "target_of",
]

ROOMY = "v5p"  # stand-in with more memory, for programs that do not fit a target


@dataclass(frozen=True)
class Target:
    """Slice of TPUs or nodes of GPUs, of one kind of chip, to compile for.

    Attributes:
        chip: Kind of chip.
        extent: Chips of a TPU slice per dimension, such as (4, 4); for GPUs, nodes and GPUs per node.
    """

    chip: Chip
    extent: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name in the syntax of `%mesh`: "v5e:4x4", "h100:8", "a100-80:2x8"."""
        return target_name(self.chip, self.extent)

    @property
    def count(self) -> int:
        """Number of devices as JAX counts them: some TPUs have two per chip."""
        return math.prod(self.extent) * self.chip.per_chip

    @property
    def platform(self) -> str:
        """Platform of the devices, "cuda" or "tpu"."""
        return "cuda" if self.chip.kind == "gpu" else "tpu"

    def topology(self) -> Mapping[str, Any]:
        """Return keyword arguments for `jax.experimental.topologies.get_topology_desc`."""
        if self.chip.kind == "gpu":
            nodes, gpus = self.extent
            return {"platform": "cuda", **gpu.topology_options(self.chip, nodes, gpus)}
        return {"platform": "tpu", **tpu.topology_options(self.chip.key, self.extent)}

    def environment(self) -> dict[str, str]:
        """Return environment variables for the compiler's process."""
        return gpu.environment() if self.chip.kind == "gpu" else tpu.environment()

    def with_more_memory(self) -> "Target | None":
        """Return a target of as many devices with more memory, for a program that does not fit; None if there is
        none."""
        larger = chip(ROOMY)
        if self.chip.kind == "gpu" or (self.chip.usable or 0) >= (larger.usable or 0):
            return None
        first, *rest = (*self.extent, 1, 1)[: len(self.extent) + 1]
        return Target(larger, (first * self.chip.per_chip, *rest)[:3])


@functools.cache
def devices(target: Target) -> tuple[Any, ...]:
    """Return the devices of a target, which compile and do not run.

    Raises ShardError if the compiler is not installed, or refuses the slice.
    """
    refused = gpu.missing(target.chip) if target.chip.kind == "gpu" else tpu.missing()
    if refused is not None:
        raise refused
    environment = target.environment()
    if target.platform == "tpu" and tpu.attached():
        # An attached TPU must start before the compiler is loaded, with its own environment variables.
        jax.devices()
        environment = {}
    try:
        with tpu.variables(environment):
            slice_devices = load(target.topology())
    except JaxRuntimeError as error:
        raise ShardError(f"the compiler refuses {target.name}: {' '.join(str(error).split())}") from error
    _targets[slice_devices[0].client] = target
    return slice_devices


def target_of(mesh: Mesh) -> Target | None:
    """Return the target of a mesh's devices; None for devices that are attached or simulated."""
    return _targets.get(mesh.devices.flat[0].client)


def mesh_prefix(mesh: Mesh) -> str:
    """Return the text before the axes of a mesh on these devices: the slice, "v5e:4x4"; "cpu" for simulated devices
    beside an accelerator; "" for the default devices."""
    if (target := target_of(mesh)) is not None:
        return target.name
    return "cpu" if mesh.devices.flat[0].platform == "cpu" and jax.default_backend() != "cpu" else ""


_targets: dict[Any, Target] = {}  # by JAX client of the devices
_compilers: dict[str, Compiler] = {}  # by platform


def compiler_of(target: Target) -> Compiler:
    """Return the compiler process for all targets of a platform."""
    if target.platform not in _compilers:
        _compilers[target.platform] = Compiler(target.environment())
    return _compilers[target.platform]


def stop_compilers() -> None:
    """Kill all compiler processes, even at work. The next program to compile starts a new one."""
    while _compilers:
        _compilers.popitem()[1].stop()


def compile_for_target(
    target: Target, program: bytes, order: Sequence[int], *, tupled: bool = False, limit_s: float = LIMIT_S
) -> CompileResult:
    """Compile a program for a target, or take the result from the user's cache.

    A program that does not fit into the target's memory is compiled for `Target.with_more_memory` as well.

    Args:
        target: Slice or nodes.
        program: StableHLO module as bytecode.
        order: Ids of the target's devices in the order of the mesh.
        tupled: Whether the program takes its arguments as one tuple.
        limit_s: Seconds for each compilation.

    Raises:
        ShardError: The compiler refuses the program for another reason than memory.
        CompilerFailed: The time is over, or the compiler's process has died.
    """
    built = _compiled(target, program, order, tupled, limit_s)
    larger = target.with_more_memory()
    if built.refused is None or larger is None:
        return built
    other = _compiled(larger, program, range(len(order)), tupled, limit_s)
    if other.refused is not None:
        return built
    return replace(other, refused=built.refused, stand_in=larger.chip.key, seconds=built.seconds + other.seconds)


def _compiled(target: Target, program: bytes, order: Sequence[int], tupled: bool, limit_s: float) -> CompileResult:
    """Return the result of exactly this target's compiler, from the cache if it is there. Raises as
    `compile_for_target`."""
    job = CompileRequest(program, target.topology(), tuple(order), tupled)
    key = kept.key_of(program, job.topology, job.order, tupled)
    built = kept.get(key)
    if built is None:
        answer = compiler_of(target).compile(job, limit_s)
        if isinstance(answer, CompilerRefusal):
            raise _refusal(target, answer.message)
        built = answer
        kept.put(key, built)
    return built


def _refusal(target: Target, message: str) -> ShardError:
    """Return the error for a compiler's message: the first line, and the path of a file with the full message."""
    first = " ".join(message.partition("\n")[0].split())
    try:
        path = private_folder(kept.folder()) / "compiler-error.txt"
        write_private(path, message.encode("utf-8", "replace"))
    except OSError:
        return ShardError(f"the compiler for {target.name} refuses this step: {first}")
    return ShardError(f"the compiler for {target.name} refuses this step: {first}. All it says: {path}")
