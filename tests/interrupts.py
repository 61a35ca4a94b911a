"""Cells of a notebook that are interrupted at random: `python tests/interrupts.py 1000` tells what each left behind.

Half of the interrupts are signals at any time; the others come at a line of the package that the cell runs, each line
as likely as any other, however often it runs. After each the next cell has to train as ever, and the process to hold
what it held before.
"""

import io
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax
from conftest import shell
from IPython.core.interactiveshell import InteractiveShell
from support.cells import FAST, GIVEN, STEP
from support.process_state import process_state, settled

import jaxshard_magic

PACKAGE = str(Path(jaxshard_magic.__file__).parent)
CLEAR_EVERY = 50  # runs: JAX keeps what was compiled
BEGIN = (
    "%load_ext jaxshard_magic",
    "%config ShardSession.options_limit = 0",
    GIVEN + "import numpy as np\nbegun = state",
    "%mesh data=4;",
)
LOOP = """
for _ in range(6):
    state, loss = train_step(state, batch)
"""
FED = """
for fed in ({name: np.asarray(x) for name, x in batch.items()} for _ in range(6)):
    state, loss = train_step(state, fed)
"""
KINDS = {
    "plain": f"%%shard fsdp{FAST}{LOOP}",
    "--check": f"%%shard fsdp --check{STEP}{LOOP}",
    "--profile": f"%%shard fsdp --profile 1{FAST}{LOOP}",
    "--feed": f"%%shard fsdp --feed\n{FAST}{FED}",
    "--checkpoint": f"%%shard fsdp --checkpoint FOLDER --every 2{FAST}{LOOP}",
    "--resume": f"%%shard fsdp --checkpoint KEPT --every 2 --resume{FAST}{LOOP}",
    "--microbatches": f"%%shard dp --microbatches 2 --remat full{FAST}{LOOP}",
    "compare": f"%%shard dp,fsdp{FAST}{LOOP}",
    "auto": f"%%shard auto --dry-run{FAST}{LOOP}",
    "code": "%shard code",
    "mesh": "%mesh data=2 model=2",
}
NEXT = f"%%shard fsdp{STEP}\nnext_state, next_loss = train_step(begun, batch)"

Line = tuple[CodeType, int]


@dataclass(frozen=True)
class Moment:
    """When a cell is interrupted: after `seconds`, or at the nth time that it comes to a line."""

    seconds: float | None = None
    line: Line | None = None
    nth: int = 1

    def __str__(self) -> str:
        if self.line is None:
            return f"after {self.seconds:.4f} s"
        code, number = self.line
        return f"at {Path(code.co_filename).relative_to(PACKAGE)}:{number}, {code.co_qualname}, time {self.nth}"


@dataclass
class Run:
    """How a cell ran: what it `raised`, the stack that the interrupt `met`, "" for none, and the lines of the package
    that it came to, each with how often, where that was asked."""

    raised: BaseException | None = None
    met: str = ""
    lines: Counter[Line] = field(default_factory=Counter)


class Interrupter:
    """Runs cells in a notebook, and interrupts them."""

    def __init__(self, opened: InteractiveShell):
        self._shell = opened
        self._run = Run()
        self._armed = False
        signal.signal(signal.SIGALRM, self._arrived)  # raises as SIGINT does, and needs no thread that sends it

    def run(self, cell: str, moment: Moment | None = None, traced: Callable[[FrameType], bool] | None = None) -> Run:
        """Run a cell, interrupted at a `moment`; `traced`: count the lines of the package's functions for which this
        is true."""
        self._run = run = Run()
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            try:
                with self._interrupts(moment, traced):
                    result = self._shell.run_cell(cell, store_history=True)
            except KeyboardInterrupt:  # before the cell, or behind it
                return run
        run.raised = result.error_before_exec or result.error_in_exec
        return run

    @contextmanager
    def _interrupts(self, moment: Moment | None, traced: Callable[[FrameType], bool] | None) -> Iterator[None]:
        self._armed = moment is not None
        try:
            if traced is not None or (moment is not None and moment.line is not None):
                sys.settrace(lambda frame, event, arg: self._entered(frame, moment, traced))
            elif moment is not None:
                signal.setitimer(signal.ITIMER_REAL, moment.seconds or 0)
            yield
        finally:
            self._armed = False
            sys.settrace(None)
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self._armed:
            self._interrupt(frame)

    def _interrupt(self, frame: FrameType | None) -> None:
        self._armed = False
        self._run.met = "".join(traceback.format_stack(frame)[-8:])
        raise KeyboardInterrupt

    def _entered(self, frame: FrameType, moment: Moment | None, traced: Callable[[FrameType], bool] | None) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return None
        if moment is not None and (moment.line is None or moment.line[0] is not code):
            return None
        if traced is not None and not traced(frame):
            return None

        def at_line(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "line":
                here = code, frame.f_lineno
                self._run.lines[here] += 1
                if moment is not None and here == moment.line and self._run.lines[here] == moment.nth:
                    sys.settrace(None)
                    self._interrupt(frame)
            return at_line

        return at_line


class Notebook:
    """A notebook in which cells are interrupted, and what they leave behind is told; `tell` gets a line for each."""

    def __init__(self, opened: InteractiveShell, folder: Path, kinds: Mapping[str, str], tell: Callable[[str], None]):
        self._interrupter, self._folder, self._kinds, self._tell = Interrupter(opened), folder, kinds, tell
        self._names = opened.user_ns
        self._folders = 0
        for cell in BEGIN:
            self._sound(cell)
        for kind in kinds:  # what is only imported or started once
            self._sound(NEXT)
            self._sound(self.cell(kind))
        self.after()
        self._loss, self._before = float(self._names["next_loss"]), process_state()

    def cell(self, kind: str) -> str:
        """The cell of a kind; each saves into a folder of its own, or goes on with the same one."""
        self._folders += 1
        text = self._kinds[kind].replace("FOLDER", str(self._folder / str(self._folders)))
        return text.replace("KEPT", str(self._folder / "kept"))

    def run(self, kind: str, traced: Callable[[FrameType], bool] | None = None) -> Run:
        """Run a cell of a kind, and nothing comes between."""
        return self._interrupter.run(self.cell(kind), None, traced)

    def faults(self, kind: str, moment: Moment) -> list[str]:
        """What is wrong once a cell of a kind was interrupted at a moment."""
        run = self._interrupter.run(self.cell(kind), moment)
        found = []
        if run.raised is not None and not isinstance(run.raised, KeyboardInterrupt):
            found.append(f"the cell raised {run.raised!r}")
        if (error := self.after()) is not None:
            found.append(f"the next cell raised {error!r}")
        elif float(self._names["next_loss"]) != self._loss:
            found.append(f"the next cell's loss is {self._names['next_loss']}, not {self._loss}")
        if left := settled(self._before):
            found += left
            self._before = process_state()
        lines = [f"{kind} {moment}: {line}" for line in found]
        for line in lines:
            self._tell(f"{line}\n{run.met}")
        return lines

    def after(self) -> BaseException | None:
        """What the cells that follow raise."""
        self._interrupter.run("%mesh data=4;")
        return self._interrupter.run(NEXT).raised

    def _sound(self, cell: str) -> None:
        error = self._interrupter.run(cell).raised
        assert error is None, f"{cell}\n{error!r}"


@contextmanager
def notebook(kinds: Mapping[str, str] = KINDS, tell: Callable[[str], None] = lambda _: None) -> Iterator[Notebook]:
    with tempfile.TemporaryDirectory() as folder, shell() as opened:
        yield Notebook(opened, Path(folder), kinds, tell)


def faults(
    count: int, seed: int = 0, kinds: Mapping[str, str] = KINDS, tell: Callable[[str], None] = lambda _: None
) -> list[str]:
    """What `count` random interrupts left behind; the same ones for each `seed`, as far as a machine is as fast."""
    found: list[str] = []
    choose = random.Random(seed)
    with notebook(kinds, tell) as opened:
        took, lines = {}, {}
        for kind in kinds:
            start = time.perf_counter()
            opened.run(kind)
            took[kind] = time.perf_counter() - start
            lines[kind] = [] if kind == "code" else [*opened.run(kind, lambda _: True).lines.items()]
            opened.after()
        for number in range(1, count + 1):
            kind = choose.choice([*kinds])
            if lines[kind] and choose.random() < 0.5:
                line, times = choose.choice(lines[kind])
                moment = Moment(line=line, nth=choose.choice([1, choose.randint(1, times)]))
            else:
                moment = Moment(choose.uniform(0, took[kind]))
            found += opened.faults(kind, moment)
            if number % CLEAR_EVERY == 0:
                jax.clear_caches()
                tell(f"{number} interrupts, {len(found)} wrong")
    return found


if __name__ == "__main__":
    wrong = faults(int(sys.argv[1]), *map(int, sys.argv[2:3]), tell=lambda line: print(line, flush=True))
    print(len(wrong), "wrong")
    sys.exit(bool(wrong))
