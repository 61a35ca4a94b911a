"""Programs to compile: arguments, shardings and donation of each, and parallel compilation of all.

A program that differs from another in its devices only is not compiled again: the compiled program is loaded for other
devices of the same kind, in a thousandth of the compile time.
"""

from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled, Lowered

from ..compile_wait import tick
from ..program.callbacks import Callbacks
from ..program.compiling import await_compiled, compile_lowered, compile_pool, jit, unchecked_call
from ..program.memory_kinds import shapes_for_lowering
from ..program.source_lines import full_source_locations

ProgramKey = tuple[str, int]  # kind of the program, such as an action kind; number of its stage, rank or group
# Private API: jax.experimental.serialize_executable loads a program only for the devices that it was compiled for.
try:
    from jax._src.compiler import get_compile_options
    from jax._src.lib import xla_client as _runtime  # pyright: ignore[reportPrivateImportUsage]
except ImportError:
    get_compile_options: Any = None
    _runtime: Any = None


@dataclass(frozen=True)
class CompileJob:
    """A program to compile. Jobs with the same `run` and `avals` are traced once.

    Attributes:
        run: The function to jit.
        avals: Shapes and dtypes of the arguments.
        in_shardings: Shardings of the arguments.
        out_shardings: Shardings of the results.
        donate_argnums: Positions of donated arguments.
    """

    run: Callable[..., Any]
    avals: tuple[Any, ...]
    in_shardings: tuple[Any, ...]
    out_shardings: Any
    donate_argnums: tuple[int, ...] = ()

    @property
    def mesh(self) -> Mesh:
        """The mesh on which the program runs."""
        return jax.tree.leaves((self.in_shardings, self.out_shardings))[0].mesh

    @property
    def identity(self) -> Hashable:
        """A key that is equal for jobs that differ in their devices only."""
        types = [(a.shape, str(a.dtype)) for a in jax.tree.leaves(self.avals)]
        # Without the meshes: shardings of two ranks are never equal.
        specs = [f"{s.spec} {s.memory_kind}" for s in jax.tree.leaves((self.in_shardings, self.out_shardings))]
        return id(self.run), tuple(types), tuple(specs), self.donate_argnums

    def lower(self) -> Lowered:
        """Trace and lower the program."""
        jitted = jit(
            self.run,
            in_shardings=self.in_shardings,
            out_shardings=self.out_shardings,
            donate_argnums=self.donate_argnums,
        )
        shapes, tree = jax.tree.flatten(self.avals)
        with full_source_locations():
            return jitted.lower(*tree.unflatten(shapes_for_lowering(shapes, jax.tree.leaves(self.in_shardings))))


@dataclass(frozen=True)
class CompiledProgram:
    """A compiled program.

    Attributes:
        compiled: The executable.
        reads_argument: Whether each flat argument is read; jax drops the others.
        call: The executable as a function with little overhead per call; None if its devices are not attached.
    """

    compiled: Any
    reads_argument: tuple[bool, ...]
    call: Callable[..., Any] | None = None


# Returns the program for other hardware, and whether the program reads each of its flat arguments.
TargetCompiler = Callable[[CompileJob], tuple[Any, tuple[bool, ...]]]


def compile_jobs_for_target(
    jobs: Mapping[ProgramKey, CompileJob], compiler: TargetCompiler, say: Callable[[str], None]
) -> dict[ProgramKey, CompiledProgram]:
    """Compile all jobs for devices that are not attached; jobs that differ in devices only are compiled once.

    Args:
        jobs: The programs by key.
        compiler: The compiler of these devices.
        say: Called with the progress.
    """
    known: dict[Hashable, CompiledProgram] = {}
    made = {}
    alike = {key: job.identity for key, job in jobs.items()}
    total = len(set(alike.values()))
    for key, job in jobs.items():
        if alike[key] not in known:
            say(f"{len(known) + 1} of {total} programs")
            known[alike[key]] = CompiledProgram(*compiler(job))
        made[key] = known[alike[key]]
    return made


def compile_jobs(
    jobs: Mapping[ProgramKey, CompileJob], *, calls_host: bool = False
) -> dict[ProgramKey, CompiledProgram]:
    """Compile all jobs, as many at a time as there are cores; equal programs once where possible.

    Args:
        jobs: The programs by key.
        calls_host: Some programs may call host functions that raise. A call of such a program waits for its end, so
            that the exception belongs to the right action.
    """
    callbacks = {key: Callbacks() for key in jobs if calls_host}
    jobs = {**jobs} | {
        key: replace(jobs[key], run=each.suppress_errors(jobs[key].run)) for key, each in callbacks.items()
    }
    first_of_identity: dict[Hashable, Future[Compiled]] = {}
    futures: dict[ProgramKey, Future[Compiled]] = {}
    with compile_pool() as pool:
        for key, job in jobs.items():
            # Lowering all programs may take seconds, and work due in this thread must not wait for the last one.
            tick()
            lowered = job.lower()
            identity = program_identity(lowered) if jax.tree.leaves((job.in_shardings, job.out_shardings)) else key
            if identity in first_of_identity:
                futures[key] = pool.submit(_reuse_or_compile, first_of_identity[identity], lowered, job.mesh)
            else:
                futures[key] = first_of_identity[identity] = pool.submit(compile_lowered, lowered)
        compiled = {key: await_compiled(each) for key, each in futures.items()}
    result = {key: CompiledProgram(c, _reads_arguments(c), unchecked_call(c)) for key, c in compiled.items()}
    for key, each in callbacks.items():
        if each.may_raise and (call := result[key].call) is not None:
            result[key] = replace(result[key], call=each.reraise_errors(call))
    return result


def _reuse_or_compile(first: Future[Compiled], lowered: Lowered, mesh: Mesh) -> Compiled:
    # The pool starts jobs in order, so `first` has started, and waiting for it here can't deadlock.
    with full_source_locations():
        return reuse_executable(lowered, first.result(), mesh)


def _reads_arguments(compiled: Compiled) -> tuple[bool, ...]:
    """Return whether the program reads each argument."""
    # jax reports no sharding for arguments that it dropped.
    return tuple(s is not None for s in compiled.in_tree.flatten_up_to(compiled.input_shardings))


def shape_dtype_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype (with weak type) of an array, for lowering."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def program_identity(lowered: Lowered) -> Hashable:
    """Return a key that is equal for programs that differ in their devices only.

    Programs with host callbacks or closed-over arrays get a unique key.
    """
    try:
        inner: Any = lowered._lowering
        given = inner.compile_args
        # Private to jax: after a change of these names, no two programs compare equal and each is compiled.
        if inner.const_args or given["host_callbacks"] or given["keepalive"] or given["ordered_effects"]:
            return object()
        return tuple(sorted(given["kept_var_idx"])), lowered.in_tree, lowered.out_tree, lowered.as_text()
    except (AttributeError, KeyError):
        return object()


def reuse_executable(lowered: Lowered, compiled: Compiled, mesh: Mesh) -> Compiled:
    """Return `lowered` as an executable, loaded from an equal program on another mesh instead of compiled.

    Falls back to compiling where programs can't be loaded for other devices. Loading works for simulated (CPU) devices
    only, and not with jax's compilation cache on disk.

    Args:
        lowered: The program, with all arrays on `mesh`.
        compiled: The same program, compiled for another mesh.
        mesh: The devices to load for.
    """
    config: Any = jax.config
    devices = list(mesh.devices.flat)
    # XLA writes a CPU program to the cache on disk without its functions: an executable from there can't be loaded for
    # other devices.
    has_disk_cache = config.jax_enable_compilation_cache and config.jax_compilation_cache_dir is not None
    if get_compile_options is not None and devices[0].platform == "cpu" and not has_disk_cache:
        numbers = np.array([[d.id for d in devices]])  # (replicas, partitions): one replica over all devices
        try:
            inner: Any = lowered._lowering
            executable: Any = compiled._executable
            unloaded, device_list = executable._unloaded_executable, _runtime.DeviceList(tuple(devices))
            serialized, options = (unloaded.xla_executable.serialize(), get_compile_options(1, len(devices), numbers))
            inner._executable = replace(
                unloaded,
                xla_executable=devices[0].client.deserialize_executable(serialized, device_list, options),
                device_list=device_list,
                input_shardings=[
                    NamedSharding(mesh, s.spec, memory_kind=s.memory_kind) for s in unloaded.input_shardings
                ],
                output_shardings=[
                    NamedSharding(mesh, s.spec, memory_kind=s.memory_kind) for s in unloaded.output_shardings
                ],
            ).load()
        except (AttributeError, TypeError, jax.errors.JaxRuntimeError):
            pass  # the private API has changed: compile
    return lowered.compile()
