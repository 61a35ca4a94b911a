"""Random lines of the magics, run in a notebook: `python tests/any_line.py 10000` tells what each came to."""

import io
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from conftest import shell
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from support.cells import GIVEN, LOOP, STEP

from jaxshard_magic.config.flags import Flag, LineOptions
from jaxshard_magic.config.strategies import WORDS
from jaxshard_magic.errors import ShardError
from jaxshard_magic.notebook import options

LIMIT_S = 5.0
CLEAR_EVERY = 50  # runs: JAX keeps what was compiled
STEPS = {
    "%%shard": STEP + LOOP,
    "%%shard alone": STEP,
    "%%shard call": "state, loss = train_step(state, batch)",
}


def words(text: str) -> st.SearchStrategy[str]:
    return st.sampled_from(text.split())


# What is typed for an option: what may run, and what can't. Sizes that run stay small: a line that asks for hours of
# work takes them.
MANY = "9" * 5000
NAMES = words("w b f x state batch train_step jax state.w for print __builtins__ é")
WRONG_NUMBERS = st.one_of(
    words(f"-1 0 1.5 1e9 1e400 nan -inf 0x10 ² one {MANY} {MANY.replace('9', '0')}") | st.just(""),
    st.integers(10**7, 10**30).map(str),
    st.integers(max_value=0).map(str),
)
NUMBERS = words("1 2 3 4 8 16") | WRONG_NUMBERS
EXPRESSIONS = st.one_of(
    words(f"w .* w$ b|w ( [ * a{{99999999999}} {'(' * 5000} (?P<n>.)(?P=n) \x1b[31mw"),
    st.text("wb.*+?()[]{}|\\^$01,", max_size=12),
)
AXES = words("data model pipe seq expert é 1 Data for") | st.sampled_from(["", "x y"])
SPECS = st.one_of(
    words("P() P('data') P(None,'model') P(('data','model')) 'data' P('data','data') Q('data') P(data) P(*x) P(a=1)"),
    st.sampled_from(["P(" * 50, "P(" + "a." * 2000 + "a)", "-" * 5000 + "1"]),
    st.text("P('data,None)(*", max_size=12),
)
SIZES = words("1 2 4 8 -1 3") | WRONG_NUMBERS
AXIS = st.builds("{}={}".format, AXES, SIZES)
RUNS = ["data=8", "data=4 model=2", "pipe=4 data=2", "cpu:8", "data=2 seq=2 model=2", "pipe=2"]
LONG = [" ".join(f"a{i}=1" for i in range(200)), f"a{MANY}x", f"[[0x{'f' * 9000}],['d']]", "[" * 3000]
MESHES = st.one_of(
    st.sampled_from([*RUNS, *LONG, "cpu:0 data=1", "[[4,2],['data','model']]", "[[4],[1]]", "data"]),
    words("h9000:4 v5e:0x0"),
    st.lists(AXIS, min_size=1, max_size=3).map(" ".join),
)
TEXTS = st.one_of(
    st.text(st.characters(exclude_characters="\n\r\0", exclude_categories=["Cs"]), max_size=20),
    st.sampled_from(["", "-", "--", "=", "'", '"', "(", "~/x", "..", "%s{}", "\x1b[31mred\x1b[0m", "é" * 100_000]),
)
STRATEGY = st.sampled_from([*WORDS])
SUMS = st.one_of(
    STRATEGY,
    st.lists(STRATEGY, min_size=2, max_size=3).map("+".join),
    st.builds("{}@{}".format, STRATEGY, AXES),
    words("fsdp+tp dp+pp fsdp@data sp+tp dp,fsdp none fdsp + @ , dp,,fsdp"),
)
VALUES = {
    "TEXT": MESHES,
    "NAME": NAMES | TEXTS,
    "NAME=SPEC": st.builds("{}={}".format, NAMES, SPECS) | TEXTS,
    "REGEX=SPEC": st.builds("{}={}".format, EXPRESSIONS, SPECS) | TEXTS,
    "THERE=HERE": words("w=w a.b=c a=b:T *.w=w a=*.* = =w:9 w=w:00") | TEXTS,
    "REGEX": EXPRESSIONS,
    "WHAT": words("full dots offload flops measured") | EXPRESSIONS | NUMBERS,
    "AXES": st.just("data=8; data=4 model=2") | MESHES,
    "NAME=A,B": st.builds("{}={},{}".format, words("microbatches remat stages x"), NUMBERS, NUMBERS),
    "A,B": SUMS,
    "CHIP": words("v5e h100 v9") | st.just(""),
    "WHEN": words("each once 7d 9999w 0001-01-01 9999-12-31 soon ٣d"),
    "TYPE": words("bf16 fp16 f32 f8"),
    "FILE": words(f"new.txt kept.txt none/x . ~no-such-user/x /dev/full a/ a\x1b {'x' * 300}"),
    "DIR": words(f"kept . /dev/null/x /proc/x kept\x1b {'x' * 300}") | st.just(""),
    "LABEL": TEXTS,
    "VAR": NAMES | st.just("found"),
    **dict.fromkeys(("N", "M", "P", "V", "SECONDS"), NUMBERS),
}
WORDS = {
    "schedule": words("1f1b gpipe,zb-h1 all none mine.csv a/b") | TEXTS,
    "history": TEXTS | NUMBERS,
    "explore": NAMES | words(f"f32[4,4] f32[0] f32[{MANY}] q[2] state.w.x"),
    "compare": NUMBERS,
    "profile": words("1 2") | WRONG_NUMBERS | TEXTS,
    "abstract": NAMES,
    "save": words(f"kept w.safetensors a/w.npz w.index.json state state.w state. {'x' * 300}.npz") | NAMES | TEXTS,
    "load": words(f"kept w.safetensors a/w.npz kept.txt state state.w .w {'x' * 300}.npz") | NAMES | TEXTS,
}
LINES: dict[str, type[LineOptions]] = {
    "schedule": options.ScheduleOptions,
    "history": options.HistoryOptions,
    "explore": options.ExploreOptions,
    "code": options.CodeOptions,
    "profile": options.ProfileOptions,
    "save": options.SaveOptions,
    "load": options.LoadOptions,
}


@dataclass(frozen=True)
class Line:
    """`text` after the magic: `%mesh`, `%shard`, or `%%shard` above one of the cells of `STEPS`."""

    magic: str
    text: str


def typed(value: str) -> str:
    """In quotes where it is several words, if it has none of them itself."""
    mark = "'" if '"' in value else '"'
    return f"{mark}{value}{mark}" if not value or set(value) & set(" ()[]{}'\"") else value


@st.composite
def lines(draw: Callable[..., Any]) -> Line:
    magic = draw(st.sampled_from([*STEPS, *STEPS, "%shard", "%shard", "%mesh"]))
    if magic == "%mesh":
        return Line(magic, draw(MESHES | TEXTS))
    if magic == "%shard":
        command = draw(st.sampled_from([*options.COMMANDS, "", "none"]))
        line = [command, *map(typed, draw(st.lists(WORDS.get(command, TEXTS), max_size=2)))]
        kind = LINES.get(command, options.ShardOptions)
    else:
        line, kind = [draw(SUMS)], options.ShardOptions
    chosen = draw(st.lists(st.sampled_from(kind.flags()), max_size=3))
    return Line(magic, " ".join([*line, *(draw(option(flag)) for flag in chosen)]))


@st.composite
def option(draw: Callable[..., Any], flag: Flag) -> str:
    if not flag.metavar:
        return flag.name
    among = VALUES.get(flag.metavar, TEXTS)
    if flag.name in ("--repeat", "--profile"):
        among = st.just("2") | WRONG_NUMBERS
    return f"{flag.name}{draw(st.sampled_from(' ='))}{typed(draw(among))}"


class Typist:
    """A notebook in a folder of its own in which lines are typed; `outcomes` counts what they came to."""

    def __init__(self, opened: InteractiveShell):
        self._shell = opened
        self.outcomes: Counter[str] = Counter()
        opened.run_line_magic("load_ext", "jaxshard_magic")
        opened.run_cell("%config ShardSession.options_limit = 0")

    def fault(self, line: Line) -> str | None:
        """What is wrong with how a line ends; None for a run, and for one line that says why there is none."""
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._shell.run_cell(GIVEN + STEP + "%mesh data=8;")
            wall, own = time.perf_counter(), time.process_time()
            try:
                found = self._run(line)
                if hasattr(found, "to_text"):
                    found.to_text(), found.to_html()
                outcome = "ran"
            except (UsageError, ShardError) as error:
                outcome = type(error).__name__ if "\n" not in str(error) else f"several lines: {error}"
            except BaseException as error:
                outcome = f"{type(error).__name__}: {error}"
            seconds = min(time.perf_counter() - wall, time.process_time() - own)
        self.outcomes[outcome] += 1
        if outcome in ("ran", "UsageError", "ShardError"):
            return f"{seconds:.1f} s" if seconds > LIMIT_S else None
        return outcome

    def _run(self, line: Line) -> Any:
        if line.magic in STEPS:
            return self._shell.run_cell_magic("shard", line.text, STEPS[line.magic])
        return self._shell.run_line_magic(line.magic.removeprefix("%"), line.text)


@contextmanager
def typist() -> Iterator[Typist]:
    with tempfile.TemporaryDirectory() as folder, shell() as opened:
        before = os.getcwd()
        os.chdir(folder)
        try:
            yield Typist(opened)
        finally:
            os.chdir(before)


def faults(count: int, start: int = 0, tell: Callable[[str], None] = lambda _: None) -> tuple[list[str], Counter[str]]:
    """What is wrong with how `count` random lines end, and what they came to; the same ones for each `start`."""
    found: list[str] = []
    with typist() as typing:

        @seed(start)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=[*HealthCheck],
        )
        @given(lines())
        def each(line: Line) -> None:
            done = sum(typing.outcomes.values())
            if done % CLEAR_EVERY == 0:
                jax.clear_caches()
                tell(f"{done} lines: {dict(typing.outcomes)}")
            if (fault := typing.fault(line)) is not None:
                found.append(f"{line.magic} {line.text[:300]!r} -> {fault[:300]}")
                tell(found[-1])

        each()
        return found, typing.outcomes


if __name__ == "__main__":
    found, outcomes = faults(int(sys.argv[1]), *map(int, sys.argv[2:]), tell=partial(print, flush=True))
    print(*found, f"{dict(outcomes)}, {len(found)} wrong", sep="\n")
    sys.exit(bool(found))
