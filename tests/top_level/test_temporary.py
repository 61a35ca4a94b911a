"""What is changed for a while is changed back, wherever an interrupt comes."""

import ast
import importlib
import io
import pkgutil
import signal
import sqlite3
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import jax
import pytest
from interrupts import PACKAGE
from support.process_state import process_state, settled

import jaxshard_magic
from jaxshard_magic.analysis.xplane import _tolerant
from jaxshard_magic.checkpoints import CheckpointStore
from jaxshard_magic.codegen.latest_call import swap_code
from jaxshard_magic.compiler_log import capture_messages
from jaxshard_magic.files import AtomicFile
from jaxshard_magic.hosts.cell_run import Interrupts
from jaxshard_magic.notebook import progress
from jaxshard_magic.notebook.cells import Binding, LoopLengths, MemoryGuard, StepLocation
from jaxshard_magic.notebook.cells.memory_guard import MemoryState
from jaxshard_magic.notebook.checkpointing import Checkpointing
from jaxshard_magic.notebook.displays import LiveOutput
from jaxshard_magic.notebook.options import ShardOptions
from jaxshard_magic.notebook.progress import Progress, TerminalLine
from jaxshard_magic.notebook.training_view import TrainingOutput
from jaxshard_magic.program import jax_settings, thread_state
from jaxshard_magic.program.compiling import compile_pool
from jaxshard_magic.program.gc_pause import gc_paused
from jaxshard_magic.program.hooks import hook_associative_scan, hook_vjp, retrace_context, trace_afresh
from jaxshard_magic.program.per_device import device_trace_context
from jaxshard_magic.program.source_lines import full_source_locations
from jaxshard_magic.step import profiler_recording
from jaxshard_magic.step.rejit import ShardedJits
from jaxshard_magic.targets.tpu import variables
from jaxshard_magic.temporary import (
    ChangeGroup,
    OpenResource,
    Replaced,
    TemporaryChange,
    UndoUnlessFinished,
    attribute,
    end_abandoned,
    item,
    list_elements,
    run_in_context,
    run_uninterrupted,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Bound:
    """A sharded step that stands in a namespace."""

    calls = 0

    def __call__(self) -> None: ...


NAMES: dict[str, Any] = {}
PLENTY = MemoryState(free=1 << 40, total=1 << 41, mine=0)


def sum_of(values):
    return sum(values)


def binding() -> Binding:
    NAMES["train_step"] = sum_of
    return Binding(NAMES, StepLocation("train_step", True), lambda _: Bound())


def looking(strict: Callable[[], Any]) -> Callable[[], Any]:
    """Under a setting of jax's that a step's own work has to be free of."""

    def made() -> ChangeGroup:
        return ChangeGroup(thread_state.override_setting(jax._src.config.debug_nans, True), Lazy(strict))

    return made


class Lazy(TemporaryChange):
    """Another change, made when this one begins."""

    def __init__(self, make: Callable[[], Any]):
        self._make, self._made = make, list[Any]()

    def apply(self) -> None:
        self._made.append(self._make())
        self._made[-1].apply()

    def revert(self) -> None:
        for each in self._made:
            each.revert()


def uses(folder: Path) -> dict[str, Callable[[], Any]]:
    """The changes that the package makes for a while."""
    mapped: Any = SimpleNamespace(sizes={"i": 2})
    run: Any = SimpleNamespace(steps=0)
    cell = ast.parse("def f():\n    return 1\n")
    options = ShardOptions(strategy="dp", checkpoint=str(folder / "run"), resume=True)
    return {
        "compiler log": capture_messages,
        "garbage": gc_paused,
        "lines": full_source_locations,
        "moves": looking(jax_settings.allow_transfers),
        "work": looking(jax_settings.suspend_checks),
        "thread": thread_state.preserve_thread_state,
        "retracing": retrace_context,
        "tracing": trace_afresh,
        "gradients": lambda: hook_vjp(lambda vjp: vjp),
        "scans": lambda: hook_associative_scan(lambda scan: scan),
        "a device": lambda: device_trace_context(mapped),
        "code": lambda: swap_code({__file__: (cell, cell)}, {"name_of_a_test": 1}),
        "variables": lambda: variables({"VARIABLE_OF_A_TEST": "1"}),
        "warnings": _tolerant,
        "lengths": lambda: LoopLengths().counting(lambda: 0),
        "progress": lambda: Progress(lambda line, share=None: None),
        "following": lambda: Progress(None).following(run),
        "terminal": lambda: TerminalLine(sys.stdout),
        "training": lambda: TrainingOutput(run, "text"),
        "growing": lambda: LiveOutput(True, "text"),
        "room": lambda: MemoryGuard(every=0.01, read=lambda: PLENTY),
        "new file": lambda: AtomicFile(folder / "file"),
        "database": lambda: OpenResource(lambda: sqlite3.connect(folder / "a.sqlite3")),
        "unfinished": lambda: UndoUnlessFinished(lambda: None),
        "elements": lambda: Replaced(list_elements([1, 2]), [3]),
        "compilers": lambda: compile_pool(1),
        "binding": binding,
        "checkpoints": lambda: Checkpointing(options, lambda _: None),
        "store": lambda: CheckpointStore(folder / "one"),
        "recorder": lambda: profiler_recording._Recorder(keeps=False),
        "rejits": ShardedJits,
        "interrupts of hosts": Interrupts,
    }


USES = uses(Path("unused"))
RUNNING: "weakref.WeakSet[Recording]" = weakref.WeakSet()


class Recording:
    """Stands for a recording of the profiler, whose end takes a second where libtpu is loaded."""

    def __init__(self) -> None:
        RUNNING.add(self)

    def stop(self) -> bytes:
        RUNNING.discard(self)
        return b"recorded"


@contextmanager
def interrupted_at(number: int) -> Iterator[list[int]]:
    """A KeyboardInterrupt at the line of the package with this number, of those that are run inside; the list has how
    many have been."""
    count = [0]

    def at_line(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            count[0] += 1
            if count[0] == number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return at_line

    sys.settrace(lambda frame, *_: at_line if frame.f_code.co_filename.startswith(PACKAGE) else None)
    try:
        yield count
    finally:
        sys.settrace(None)


def used(change: Any) -> None:
    with change:
        if isinstance(change, Binding):
            change.bind()
        if isinstance(change, CheckpointStore):
            change.lock()


@pytest.mark.parametrize("name", USES)
def test_an_interrupt_at_any_line_leaves_nothing_changed(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "TICK", 0.01)
    monkeypatch.setattr(profiler_recording, "_start_session", lambda keeps: Recording())
    monkeypatch.setattr(sys, "stdout", Terminal())
    make = uses(tmp_path)[name]
    used(make())  # what is only imported or started once
    before, number, lines = process_state(), 0, 1
    while number < lines:
        number, change = number + 1, make()
        try:
            with interrupted_at(number) as count:
                used(change)
            lines = count[0]
        except KeyboardInterrupt:
            lines = number + 1
        # Python 3.11 takes an exception for handled for good where a trace function raises in its handler: for all
        # tests that follow it would be what theirs were raised from.
        assert sys.exc_info() == (None, None, None), f"interrupted at line {number}, in a handler"
        end_abandoned()  # as the next cell does, or whatever is changed next
        assert settled(before) == [], f"interrupted at line {number}"
        used(make())
        assert settled(before) == [], f"after an interrupt at line {number}"
        assert not RUNNING
    assert number > 5, "no line of the package was interrupted"


def kinds(of: type = TemporaryChange) -> set[type]:
    return {of}.union(*(kinds(each) for each in of.__subclasses__()))


def test_every_kind_of_change_is_among_those_that_are_interrupted(tmp_path):
    for module in pkgutil.walk_packages(jaxshard_magic.__path__, "jaxshard_magic."):
        if not module.name.endswith(("__main__", ".demo", ".xprof")):
            importlib.import_module(module.name)
    ours = {each for each in kinds() if each.__module__.startswith("jaxshard_magic.")}
    seen: set[type] = set()

    def note(self: TemporaryChange, begin: Callable[[TemporaryChange], None]) -> None:
        seen.update(type(self).__mro__)
        begin(self)

    with pytest.MonkeyPatch.context() as patched:
        for each in ours:
            if "apply" in vars(each):
                own = vars(each)["apply"]
                patched.setattr(each, "apply", lambda self, own=own: note(self, own))
        for make in uses(tmp_path).values():
            used(make())
    assert {each.__name__ for each in ours - seen} == set()


def test_a_change_that_was_left_is_ended_by_the_next_one():
    names: dict[str, int] = {}
    change = Replaced(item(names, "x"), 1)

    def left() -> None:
        change.__enter__()

    left()
    assert names == {"x": 1}
    with Replaced(item(names, "y"), 2):
        assert names == {"y": 2}
    assert names == {}


def test_a_change_that_goes_on_is_left_alone_by_those_inside_of_it():
    names: dict[str, int] = {}

    @contextmanager
    def through_contextlib() -> Iterator[None]:
        with Replaced(item(names, "b"), 2):
            yield

    @run_in_context(lambda: Replaced(item(names, "c"), 3))
    def inside() -> dict[str, int]:
        end_abandoned()
        return dict(names)

    with Replaced(item(names, "a"), 1), through_contextlib():
        assert inside() == {"a": 1, "b": 2, "c": 3}
        assert names == {"a": 1, "b": 2}
    assert names == {}


def test_a_generator_may_hold_no_change_while_it_waits():
    def generator() -> Iterator[None]:
        with Replaced(item({}, "x"), 1):
            yield

    with pytest.raises(RuntimeError, match="can wait in its middle"):
        next(generator())


def test_what_an_end_raises_passes_once_and_those_around_it_end():
    names: dict[str, int] = {}

    class Fails(TemporaryChange):
        def apply(self) -> None: ...

        def revert(self) -> None:
            raise ValueError("once")

    with pytest.raises(ValueError, match="once"), Replaced(item(names, "x"), 1), Fails():
        pass
    assert names == {}
    end_abandoned()


def test_an_attribute_of_a_class_is_not_left_on_its_object():
    bound = Bound()
    with Replaced(attribute(bound, "calls"), 3):
        assert bound.calls == 3
    assert vars(bound) == {} and bound.calls == 0


def test_work_that_is_done_whole_ends_before_the_interrupt_is_raised():
    done: list[int] = []

    def work() -> int:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.05)
        done.append(1)
        return 1

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_uninterrupted(work)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == [1]
    assert run_uninterrupted(lambda: 2) == 2
    with pytest.raises(ZeroDivisionError):
        run_uninterrupted(lambda: 1 / 0)


def test_work_that_is_interrupted_at_any_line_is_done_whole_or_not_begun():
    before, number, lines = process_state(), 0, 1
    while number < lines:
        number, parts = number + 1, list[int]()
        try:
            with interrupted_at(number) as count:
                run_uninterrupted(lambda parts=parts: [parts.append(i) or time.sleep(0.001) for i in range(5)])
            lines = count[0]
        except KeyboardInterrupt:
            lines = number + 1
            assert parts in ([], [0, 1, 2, 3, 4]), f"at line {number}"
        assert settled(before) == []
