"""Record calls of a compiled step with JAX's profiler, and read the recording."""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.profiler import ProfileOptions, TraceAnnotation

from ..analysis.profile_analysis import Profile, Recording, calls_to_record
from ..analysis.summary import read_profile
from ..analysis.xplane import STEP_ANNOTATION
from ..compilation.compiled_step import CompiledStep
from ..compiler_log import capture_messages
from ..coordination import ProcessFailed, SharedCalls
from ..device_arrays import count_hosts
from ..errors import ShardError
from ..targets import target_of
from ..temporary import Restored, TemporaryChange, list_elements

if TYPE_CHECKING:
    from ..report import Measured
    from .sharded_step import ShardedStep

DEFAULT_CALLS = 5
MAX_CALLS = 100  # the profiler keeps all events in memory until they are read
HOST_EVENTS = 2  # host tracer level from which each operation of a CPU is an event
# While the profiler runs, an installed libtpu polls counters of every thread of the process, also without a TPU, on a
# thread that takes up to half a core. In milliseconds: once an hour, which is never in a recording.
RARE_TPU_COUNTERS = {"tpu_cpu_perf_counter_interval_ms": 3_600_000}
_RUNNING = "a trace is running already, and there can be one at a time: end it (jax.profiler.stop_trace()) first"


def profile_step(
    step: "ShardedStep",
    n: int,
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]] | None,
    folder: "str | os.PathLike[str] | None" = None,
) -> "Measured":
    """Record `n` calls of a step on copies, after one call that is not read; see `ShardedStep.profile`.

    On several hosts, every host must call this function.

    Args:
        step: The sharded step.
        n: Number of calls to read.
        arguments: `(args, kwargs)`; None for the kept arguments of the last call.
        folder: Folder for the files of xprof, TensorBoard and Perfetto; None to keep none.

    Raises:
        ShardError: The step can't be recorded here or on another host.
    """
    check_recordable(step, n)
    step.meet()
    try:
        with SharedCalls(count_hosts(step.mesh) > 1) as all_of:
            step.take_profile(*_record_on_hosts(step, n, arguments, folder, all_of))
    except ProcessFailed as failed:
        raise ShardError(f"host {failed.process} could not record {step.name}: {failed}") from None
    finally:
        step.say("")
    measured = step.report().measured
    assert measured is not None
    return measured


def _record_on_hosts(
    step: "ShardedStep",
    n: int,
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]] | None,
    folder: "str | os.PathLike[str] | None",
    all_of: SharedCalls,
) -> tuple[CompiledStep, Profile]:
    """Return the recorded program and the profile of all hosts.

    No host begins a call that another host can't make.
    """
    if folder is not None and count_hosts(step.mesh) > 1:
        folder = Path(folder) / f"host{jax.process_index()}"
    descriptions = all_of(lambda: _describe_recording(step, n, arguments, folder))
    if len(set(descriptions)) > 1:
        raise ShardError(f"hosts record other steps: {', '.join(descriptions)}. Ask for the same on all of them")
    entry, inputs = step.inputs(arguments)
    copied: list[tuple[Any, ...]] = []
    few = calls_to_record(entry, n)

    def copy() -> str:
        copied[:] = [jax.block_until_ready(entry.copy_donated(inputs))]
        return ""

    def calls() -> Iterator[Callable[[], Any]]:
        for _ in range(few + 1):
            step.meet()
            # A copy may fail for lack of memory: no host then begins a call that the others would wait in.
            all_of(copy)
            yield partial(entry.call, *copied.pop())

    step.say(f"recording {few} step{'s' * (few > 1)}")
    # Calls replace the constants that the program carries, and recorded calls must update nothing.
    with Restored(list_elements(entry.consts)):
        recording = Recording(record(calls(), STEP_ANNOTATION, folder), 1, n)
    step.say("reading what was recorded")
    return entry, read_profile(recording, entry, all_of)


def _describe_recording(step: "ShardedStep", n: int, arguments: Any, folder: "str | os.PathLike[str] | None") -> str:
    """Return a description of the recording about to begin on this host, for comparison with other hosts.

    Waits for the calls so far. Raises ShardError if there are no arguments or the folder can't be written, and the
    exceptions of functions passed to `on_metrics`.
    """
    step.settle()
    if arguments is None:
        step.inputs(None)
    if folder is not None:
        writable_folder(folder)
    return f"{n} of {step.name}"


def check_recordable(step: "ShardedStep", n: int) -> None:
    """Raise ShardError for a step or a number of calls that can't be recorded."""
    if not 1 <= n <= MAX_CALLS:
        raise ShardError(f"profile records 1 to {MAX_CALLS} steps, not {n}")
    if (target := target_of(step.mesh)) is not None:
        raise ShardError(f"{target.name} is not attached: {step.name} is compiled for it, and can't be recorded")


def record(calls: Iterable[Callable[[], Any]], mark: str, folder: "str | os.PathLike[str] | None" = None) -> bytes:
    """Run each of `calls` under the profiler, wait for the result, and return the serialized recording.

    Args:
        calls: Calls to record. Preparations of a call belong into the iterator, outside of the annotation.
        mark: Name of the annotation around each call.
        folder: Folder for the files of xprof, TensorBoard and Perfetto; None to keep none.

    Raises:
        ShardError: Another trace is running, or the folder can't be written. Exceptions of a call pass through, once
            the recording has ended.
    """
    path = None if folder is None else writable_folder(folder)
    with _Recorder(keeps=path is not None) as recorder:
        for call in calls:
            with TraceAnnotation(mark):
                jax.block_until_ready(call())
    if path is not None:
        recorder.session.export(recorder.data, str(path))
    return recorder.data


def writable_folder(folder: "str | os.PathLike[str]") -> Path:
    """Return the folder, created if missing. Raises ShardError if it can't be written."""
    path = Path(os.path.expanduser(os.fspath(folder)))
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        why = error.strerror or error
        raise ShardError(f"the trace can't be kept in {os.fspath(folder)}: {why}; name another folder") from None


class _Recorder(TemporaryChange):
    """Recording by the profiler of this process, limited to one at a time; `data` has the recording at the end."""

    def __init__(self, *, keeps: bool):
        self._keeps = keeps
        self.session: Any = None
        self.data = b""

    def apply(self) -> None:
        if self.session is None:
            with capture_messages():  # libtpu's profiler logs errors if there is no TPU
                self.session = _start_session(self._keeps)

    def revert(self) -> None:
        if self.session is not None and not self.data:
            with capture_messages():
                self.data = self.session.stop()


class _InFolder:
    """Recording by JAX's public functions, which write files."""

    def __init__(self, options: ProfileOptions):
        self._folder = tempfile.TemporaryDirectory()
        jax.profiler.start_trace(self._folder.name, profiler_options=options)
        self._runs = True

    def stop(self) -> bytes:
        if self._runs:
            jax.profiler.stop_trace()
            self._runs = False
        (file,) = Path(self._folder.name).rglob("*.xplane.pb")
        data = file.read_bytes()
        self._folder.cleanup()
        return data

    def export(self, data: bytes, folder: str) -> None:
        place = Path(folder) / "plugins" / "profile" / "jaxshard_magic"
        place.mkdir(parents=True, exist_ok=True)
        (place / "host.xplane.pb").write_bytes(data)


def _memory_session_class() -> Any:
    """Return the class of recordings in memory; None for a jaxlib without it. Recording into files takes about 1 s
    more."""
    try:
        # JAX has no public name for a recording that writes no files.
        return import_module("jax._src.lib")._profiler.ProfilerSession
    except (ImportError, AttributeError):
        return None


def _start_session(keeps: bool) -> Any:
    """Start a recording and return it."""
    options = ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, HOST_EVENTS
    options.enable_hlo_proto = keeps
    # This also initializes the backend: a recording that begins before has no events of its devices.
    if jax.default_backend() == "cpu":
        options.advanced_configuration = RARE_TPU_COUNTERS
    begin = _memory_session_class()
    try:
        if begin is None:
            return _InFolder(options)
        # A session that could not start raises only when it stops, so one is tried before any call runs.
        begin(options).stop()
        return begin(options)
    except RuntimeError as error:
        if "already" in str(error).lower() or "another" in str(error).lower():
            raise ShardError(_RUNNING) from None
        raise
