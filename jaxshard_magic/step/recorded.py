"""Calls of a compiled step under jax's profiler, and what it recorded of them."""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.profiler import ProfileOptions, TraceAnnotation

from ..compiler_log import captured
from ..coordination import OtherFailed, Together
from ..errors import ShardError
from ..placing import hosts_of
from ..targets import target_of
from ..temporary import Kept, Temporary, elements

if TYPE_CHECKING:
    from ..analysis.profiled import Profile
    from ..report import Measured
    from .entry import Entry
    from .sharded import ShardedStep

PROFILED = 5  # steps that are recorded unless so many are asked for
MOST = 100  # as the profiler keeps all of them in memory until they are read
HOST_EVENTS = 2  # a level at which each operation of a CPU is an event
# libtpu, where it is installed, reads counters of every thread of the process again and again while something is
# recorded, where there is no TPU as well, on a thread that takes up to half a core. Here they are read once an hour.
COUNTED_SELDOM = {"tpu_cpu_perf_counter_interval_ms": 3_600_000}
_RUNNING = (
    "a trace is running already, and there can be one at a time: end it (jax.profiler.stop_trace()) first"
)


@dataclass(frozen=True, eq=False)
class Recording:
    """What the profiler recorded: an XSpace, serialized. `skip`: of the first calls so many are to be left out.
    `asked`: so many calls were to be recorded, without those."""

    xspace: bytes
    skip: int
    asked: int


def profiled(
    step: "ShardedStep",
    n: int,
    given: tuple[tuple[Any, ...], Mapping[str, Any]] | None,
    folder: "str | os.PathLike[str] | None" = None,
) -> "Measured":
    """Record `n` calls of a step on copies, after one more that is not read, and read them; see `ShardedStep.profile`.
    `given`: the arguments; None: those that were kept of the last call. On several hosts all of them come here."""
    recordable(step, n)
    step.meet()
    try:
        with Together(hosts_of(step.mesh) > 1) as all_of:
            step.take_profile(*_recorded(step, n, given, folder, all_of))
    except OtherFailed as failed:
        raise ShardError(f"host {failed.process} could not record {step.name}: {failed}") from None
    finally:
        step.say("")
    found = step.report().measured
    assert found is not None
    return found


def _recorded(
    step: "ShardedStep",
    n: int,
    given: tuple[tuple[Any, ...], Mapping[str, Any]] | None,
    folder: "str | os.PathLike[str] | None",
    all_of: Together,
) -> "tuple[Entry, Profile]":
    """The program of the calls, and what all hosts read of them. No host begins a call that another one can't make."""
    from ..analysis.profiled import worth_recording
    from ..analysis.summary import read_profile
    from ..analysis.traced import MARK

    if folder is not None and hosts_of(step.mesh) > 1:
        folder = Path(folder) / f"host{jax.process_index()}"
    asked = all_of(lambda: _ready(step, n, given, folder))
    if len(set(asked)) > 1:
        raise ShardError(f"hosts record other steps: {', '.join(asked)}. Ask for the same on all of them")
    entry, inputs = step.inputs(given)
    copied: list[tuple[Any, ...]] = []
    few = worth_recording(entry, n)

    def copy() -> str:
        copied[:] = [jax.block_until_ready(entry.copies(inputs))]
        return ""

    def calls() -> Iterator[Callable[[], Any]]:
        for _ in range(few + 1):
            step.meet()
            all_of(copy)
            yield partial(entry.call, *copied.pop())

    step.say(f"recording {few} step{'s' * (few > 1)}")
    with Kept(elements(entry.consts)):
        recording = Recording(record(calls(), MARK, folder), 1, n)
    step.say("reading what was recorded")
    return entry, read_profile(recording, entry, all_of)


def _ready(step: "ShardedStep", n: int, given: Any, folder: "str | os.PathLike[str] | None") -> str:
    """What this host is about to record. Raises ShardError where it has no arguments for the calls, or can't keep what
    it records, and what those raise who take rows of the calls so far, which have finished then."""
    step.settle()
    if given is None:
        step.inputs(None)
    if folder is not None:
        writable(folder)
    return f"{n} of {step.name}"


def recordable(step: "ShardedStep", n: int) -> None:
    """Raise ShardError for a step that can't be recorded."""
    if not 1 <= n <= MOST:
        raise ShardError(f"profile records 1 to {MOST} steps, not {n}")
    if (target := target_of(step.mesh)) is not None:
        raise ShardError(
            f"{target.name} is not attached: {step.name} is compiled for it, and can't be recorded"
        )


def record(
    calls: Iterable[Callable[[], Any]], mark: str, folder: "str | os.PathLike[str] | None" = None
) -> bytes:
    """Call each of `calls` and wait for what it gives, in an annotation `mark` each, under a recording.

    Args:
        calls: what is recorded; what each of them needs is made when it is taken, outside of the annotation.
        mark: the name of the annotation.
        folder: where to keep the files that xprof, TensorBoard and Perfetto read.

    Raises ShardError where another trace is running, and where the folder can't be written; what a call raises passes
    through, once the recording has ended.
    """
    place = None if folder is None else writable(folder)
    with _Recorder(keeps=place is not None) as recorder:
        for call in calls:
            with TraceAnnotation(mark):
                jax.block_until_ready(call())
    if place is not None:
        recorder.session.export(recorder.data, str(place))
    return recorder.data


def writable(folder: "str | os.PathLike[str]") -> Path:
    """The folder, made where it is not there yet. Raises ShardError where it can't be written."""
    place = Path(os.path.expanduser(os.fspath(folder)))
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            return place
    except OSError as error:
        why = error.strerror or error
        raise ShardError(
            f"the trace can't be kept in {os.fspath(folder)}: {why}; name another folder"
        ) from None


class _Recorder(Temporary):
    """The profiler of this process, which records one thing at a time; `data` is what it has recorded at the end."""

    def __init__(self, *, keeps: bool):
        self._keeps = keeps
        self.session: Any = None
        self.data = b""

    def begin(self) -> None:
        if self.session is None:
            with captured():  # libtpu has a profiler, which complains where no TPU is
                self.session = _session(self._keeps)

    def end(self) -> None:
        if self.session is not None and not self.data:
            with captured():
                self.data = self.session.stop()


class _InFolder:
    """A recording by jax's public functions, which write files."""

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


def _in_memory() -> Any:
    """The class of recordings that write no files, which has no public name; None in a jaxlib without it. Files take
    about a second more."""
    try:
        return import_module("jax._src.lib")._profiler.ProfilerSession
    except (ImportError, AttributeError):
        return None


def _session(keeps: bool) -> Any:
    """A recording that has begun."""
    options = ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, HOST_EVENTS
    options.enable_hlo_proto = keeps
    if (
        jax.default_backend() == "cpu"
    ):  # a profiler that begins before the backend sees nothing of its devices
        options.advanced_configuration = COUNTED_SELDOM
    begin = _in_memory()
    try:
        if begin is None:
            return _InFolder(options)
        begin(options).stop()  # one that can't be says so when it ends: ask before anything runs
        return begin(options)
    except RuntimeError as error:
        if "already" in str(error).lower() or "another" in str(error).lower():
            raise ShardError(_RUNNING) from None
        raise
