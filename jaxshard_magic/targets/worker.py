"""The process that compiles: `main` with REQUESTS LIFELINE IDLE as arguments, two open descriptors and the seconds
that it waits for a job.

It reads one `Job` at a time and answers with a `Built`, or with a `Failed`. A compiler that aborts, or has to be
stopped, takes this process with it and not the notebook's.
"""

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..compiler_log import captured
from . import gpu, tpu
from .built import Built, MemoryStats

IDLE_S = 600.0  # without a job for so long, the process ends: a compiler keeps its memory
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
DUMP = {
    "xla_dump_hlo_as_proto": True,
    "xla_dump_hlo_as_text": False,
}  # compilers hand out the buffers no other way


@dataclass(frozen=True)
class Job:
    """`program`: a StableHLO module as bytecode. `topology`: what `get_topology_desc` takes. `order`: ids of its
    devices in the order of the mesh. `tupled`: the program's arguments go in as one tuple."""

    program: bytes
    topology: Mapping[str, Any]
    order: Sequence[int]
    tupled: bool = False


@dataclass(frozen=True)
class Failed:
    """The compiler's own message, whole."""

    message: str


def main() -> None:
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
    """The notebook's process holds the other end; the descriptor ends when that process does."""
    os.read(lifeline, 1)
    os._exit(0)


def _ready(topology: Mapping[str, Any]) -> str | Failed:
    """Get a compiler ready before there is anything to compile."""
    try:
        return load(topology)[0].device_kind
    except RuntimeError as error:
        return Failed(str(error))


def _answer(job: Job) -> Built | Failed:
    from jax.errors import JaxRuntimeError

    start = time.perf_counter()
    try:
        return _built(job, start)
    except JaxRuntimeError as error:
        if OUT_OF_MEMORY in str(error):
            return Built(refused=str(error), seconds=time.perf_counter() - start)
        return Failed(str(error))


def _built(job: Job, start: float) -> Built:
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
        with captured() as log, mlir.make_ir_context():
            module = ir.Module.parse(job.program)
            made = devices[0].client.compile(
                module, executable_devices=DeviceList(devices), compile_options=options
            )
        seconds = time.perf_counter() - start
        proto = next((path.read_bytes() for path in Path(folder).glob("*after_optimizations.hlo.pb")), b"")
    stats = made.get_compiled_memory_stats()
    return Built(
        text=made.hlo_modules()[0].to_string(),
        stats=MemoryStats(**{f.name: getattr(stats, f.name, 0) for f in fields(MemoryStats)}),
        proto=proto,
        log=log.messages,
        seconds=seconds,
    )


def load(topology: Mapping[str, Any]) -> tuple[Any, ...]:
    """The devices of a topology, by the arguments of `get_topology_desc`; the same ones each time."""
    key = repr(sorted(topology.items()))
    if key not in _loaded:
        _loaded[key] = gpu.load(topology) if topology["platform"] == "cuda" else tpu.load(topology)
    return _loaded[key]


_loaded: dict[str, tuple[Any, ...]] = {}
