"""The process that compiles, one job at a time, and the messages between it and this one.

Arguments of `main`: REQUESTS and LIFELINE, two open file descriptors, and IDLE, seconds to wait for a job. A compiler
that aborts or has to be stopped takes this process with it and not the notebook's. `CompileResult` is plain data, which
is also stored on disk.
"""

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..compiler_log import capture_messages
from . import gpu, tpu

IDLE_S = 600.0  # seconds without a job, then the process ends: a loaded compiler does not free its memory
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
# These compilers give the buffer assignment in a dump only.
DUMP = {"xla_dump_hlo_as_proto": True, "xla_dump_hlo_as_text": False}


@dataclass(frozen=True)
class CompileRequest:
    """Program to compile.

    Attributes:
        program: StableHLO module as bytecode.
        topology: Arguments for `get_topology_desc`.
        order: Ids of the topology's devices in the order of the mesh.
        tupled: Whether the program takes its arguments as one tuple.
    """

    program: bytes
    topology: Mapping[str, Any]
    order: Sequence[int]
    tupled: bool = False


@dataclass(frozen=True)
class CompilerRefusal:
    """Message of a compiler that refuses a program.

    Attributes:
        message: Full message.
    """

    message: str


@dataclass(frozen=True)
class MemoryStats:
    """XLA's `CompiledMemoryStats` of one device, in bytes, with XLA's names."""

    argument_size_in_bytes: int = 0
    output_size_in_bytes: int = 0
    alias_size_in_bytes: int = 0
    temp_size_in_bytes: int = 0
    generated_code_size_in_bytes: int = 0
    peak_memory_in_bytes: int = 0


@dataclass(frozen=True)
class CompileResult:
    """Compiled program that can't run here.

    Attributes:
        text: HLO of the compiled program.
        stats: Memory; None if the compiler gives no figures.
        proto: XLA's `HloProto`, serialized, with module and buffer assignment; empty if the compiler wrote none.
        log: Complaints of the compiler.
        seconds: Time of the compiler.
        refused: Message of the target's compiler if memory did not suffice; all else is then from the compiler of
            `stand_in`.
        stand_in: Key of a chip with more memory; None without one, and all else is then empty if `refused` is set.
        failed: Reason why the compiler ended without an answer; all else is then empty.
    """

    text: str = field(default="", repr=False)
    stats: MemoryStats | None = None
    proto: bytes = field(default=b"", repr=False)
    log: tuple[str, ...] = ()
    seconds: float = 0.0
    refused: str | None = None
    stand_in: str | None = None
    failed: str | None = None

    def as_text(self) -> str:
        """Return the compiled program as HLO text, like `jax.stages.Compiled`."""
        return self.text

    def memory_analysis(self) -> MemoryStats | None:
        """Return the memory of one device, like `jax.stages.Compiled`; None without figures."""
        return self.stats


def main() -> None:
    """Answer jobs until the connection is closed or IDLE seconds have passed without one."""
    requests, lifeline, idle_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    threading.Thread(target=_end_with_the_other, args=(lifeline,), daemon=True).start()
    with Connection(requests) as connection:
        while connection.poll(idle_s):
            try:
                job = connection.recv()
            except EOFError:
                return
            connection.send(_ready(job) if isinstance(job, Mapping) else _answer(job))


def _end_with_the_other(lifeline: int) -> None:
    """Exit when the notebook's process ends."""
    # Returns at the end of the file: the other end of the pipe is open as long as the notebook's process runs.
    os.read(lifeline, 1)
    # `sys.exit` would end this thread alone.
    os._exit(0)


def _ready(topology: Mapping[str, Any]) -> str | CompilerRefusal:
    """Load a compiler before there is a program. Return the kind of its devices, or the compiler's message."""
    try:
        return load(topology)[0].device_kind
    except RuntimeError as error:
        return CompilerRefusal(str(error))


def _answer(job: CompileRequest) -> CompileResult | CompilerRefusal:
    """Compile a program. Lack of memory gives a result with `refused`, any other error the compiler's message."""
    from jax.errors import JaxRuntimeError

    start = time.perf_counter()
    try:
        return _built(job, start)
    except JaxRuntimeError as error:
        if OUT_OF_MEMORY in str(error):
            return CompileResult(refused=str(error), seconds=time.perf_counter() - start)
        return CompilerRefusal(str(error))


def _built(job: CompileRequest, start: float) -> CompileResult:
    """Compile a program. Raises JaxRuntimeError."""
    # jax has no public way to compile a module for devices that are not attached.
    from jax._src.compiler import get_compile_options
    from jax._src.interpreters import mlir
    from jaxlib._jax import DeviceList
    from jaxlib.mlir import ir

    found = {device.id: device for device in load(job.topology)}
    devices = tuple(found[i] for i in job.order)
    with TemporaryDirectory() as folder:
        asked = {**DUMP, "xla_dump_to": folder}
        options = get_compile_options(1, len(devices), [list(job.order)], asked, detailed_logging=False)
        options.parameter_is_tupled_arguments = job.tupled
        with capture_messages() as log, mlir.make_ir_context():
            module = ir.Module.parse(job.program)
            made = devices[0].client.compile(module, executable_devices=DeviceList(devices), compile_options=options)
        seconds = time.perf_counter() - start
        proto = next((path.read_bytes() for path in Path(folder).glob("*after_optimizations.hlo.pb")), b"")
    stats = made.get_compiled_memory_stats()
    return CompileResult(
        text=made.hlo_modules()[0].to_string(),
        stats=MemoryStats(**{f.name: getattr(stats, f.name, 0) for f in fields(MemoryStats)}),
        proto=proto,
        log=log.messages,
        seconds=seconds,
    )


def load(topology: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the devices of a topology, the same objects each time.

    Args:
        topology: Arguments for `get_topology_desc`.
    """
    key = repr(sorted(topology.items()))
    if key not in _loaded:
        _loaded[key] = gpu.load(topology) if topology["platform"] == "cuda" else tpu.load(topology)
    return _loaded[key]


_loaded: dict[str, tuple[Any, ...]] = {}
