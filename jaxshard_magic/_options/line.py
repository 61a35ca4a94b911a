"""The command lines of `%%shard` and `%shard schedule`: options from one table each, parsed, and their help text."""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from jaxshard_magic.errors import ShardError, did_you_mean, one_of

STRATEGIES = {
    "dp": "data parallel: the batch is split, every device holds all weights",
    "fsdp": "fully sharded data parallel: weights and optimizer state are split as well",
    "tp": "tensor parallel: the weights of one layer are split, column then row",
    "sp": "sequence parallel: positions are split; with tp, between its layers, as Megatron does",
    "pp": "pipeline parallel: the model's layers are cut into stages, which work on microbatches in turn",
    "pmap": "steps written for one device, with jax.lax.pmean(x, 'batch'), as jax.pmap runs them",
    "spmd": "your own PartitionSpecs only: --spec, --rule, annotations, Flax metadata",
    "auto": "search for the fastest of these that fits, on every mesh of these devices",
}
COMMANDS = ("doctor", "abstract", "schedule", "compare", "history")
LATER_COMMANDS = ("explore", "code")


@dataclass(frozen=True)
class Flag:
    """One option: `metavar` is empty where it takes no value, `into` is the field of `Options` it sets."""

    name: str
    metavar: str
    help: str
    into: str
    sets: Any = True


FLAGS = (
    Flag("--mesh", "TEXT", 'the mesh, for this cell only: --mesh "data=4 model=2"', "mesh"),
    Flag("--step", "NAME", "which function is the train step; trainer.step too", "step"),
    Flag("--spec", "NAME=SPEC", "PartitionSpec of an argument: --spec \"batch=P('data')\"", "specs"),
    Flag(
        "--rule",
        "REGEX=SPEC",
        "PartitionSpec of leaves: --rule \".*kernel=P(None,'tp')\"",
        "rules",
    ),
    Flag("--microbatches", "N", "take the batch in N parts; same gradients, less memory", "microbatches"),
    Flag("--reduce", "WHEN", "sum microbatches' gradients over devices: each, once, once-gathered", "reduce"),
    Flag("--remat", "WHAT", "compute again for the backward pass: N segments, full, dots, REGEX", "remat"),
    Flag("--precision", "TYPE", "products in bf16 or fp16; parameters stay float32", "precision"),
    Flag("--reduce-dtype", "TYPE", "add gradients up over devices in bf16, fp16 or f32", "reduce_dtype"),
    Flag("--pad", "", "add rows to an uneven batch; numbers stay those of the real ones", "pad"),
    Flag(
        "--stages",
        "P",
        "of pp: stages of the pipeline; else those of the mesh's pipeline axis, or 4",
        "stages",
    ),
    Flag(
        "--schedule",
        "NAME",
        "of pp: their order, 1f1b unless said; %shard schedule --help has all",
        "schedule",
    ),
    Flag(
        "--chunks",
        "V",
        "of pp: parts of the model for each stage's devices, as for %shard schedule",
        "chunks",
    ),
    Flag("--balance", "WHAT", "of pp: stages of the same flops, or of the same measured time", "balance"),
    Flag(
        "--cut", "REGEX", "of pp: stages begin at these modules and scopes; else at jaxshard_magic.cut", "cut"
    ),
    Flag("--check", "", "compare with the plain step on the same inputs", "check"),
    Flag("--on", "CHIP", "predict the step's time on this chip: --on v5e, --on h100", "on"),
    Flag("--dry-run", "", "trace, plan and compile; run no step", "dry_run"),
    Flag("--repeat", "N", "call the step N more times on copies, for its timing", "repeat"),
    Flag("--compare", "", "try several strategies, the usual ones unless said, side by side", "compare"),
    Flag("--meshes", "AXES", 'compared on these: all, or "data=8; data=4 model=2"', "meshes"),
    Flag("--vary", "NAME=A,B", "compared with each value: --vary microbatches=1,4,16", "vary"),
    Flag("--keep-going", "", "compare the others where a strategy of the list is none", "keep_going"),
    Flag("--budget", "SECONDS", "of auto: search no longer than this, 300 unless said", "budget"),
    Flag("--among", "A,B", "of auto: search only these strategies", "among"),
    Flag("--plan-only", "", "of auto: compile nothing, choose by what plans say", "plan_only"),
    Flag("--donate", "", "let the step reuse the memory of its own earlier results", "donate", True),
    Flag("--no-donate", "", "keep every array that the step was given", "donate", False),
    Flag("--name", "LABEL", "the Report's name", "name"),
    Flag("-o", "VAR", "keep the Report under this name", "output"),
    Flag("--help", "", "this text", "help"),
)
SCHEDULE_FLAGS = (
    Flag("--stages", "P", "ranks of the pipeline; else those of the mesh's pipeline axis, or 4", "stages"),
    Flag("--microbatches", "M", "parts of the batch; else 4 for each stage", "microbatches"),
    Flag("--chunks", "V", "parts of the model that a rank holds, where the schedule has no number", "chunks"),
    Flag("--costs", "TEXT", "of a microbatch: F,I,W or F,I,W,transfer, or with names, as below", "costs"),
    Flag("--memory-limit", "N", "for those that search: most microbatches that a rank holds", "memory_limit"),
    Flag("-o", "VAR", "keep what is returned under this name", "output"),
    Flag("--help", "", "this text", "help"),
)
HISTORY_FLAGS = (
    Flag("--strategy", "NAME", "those of this strategy: --strategy fsdp+tp", "strategy"),
    Flag("--name", "NAME", "those of the step, or the label, of this name", "name"),
    Flag("--since", "WHEN", "from then on: 3h, 7d, 2w, or a day, 2026-11-01", "since"),
    Flag("--limit", "N", "show so many of the newest, 50 unless said", "limit"),
    Flag("--json", "FILE", "write them with their reports in full", "json"),
    Flag("-o", "VAR", "keep what is returned under this name", "output"),
    Flag("--help", "", "this text", "help"),
)
_REPEATABLE = ("specs", "rules", "vary")
_COUNTS = ("repeat", "microbatches", "stages", "chunks", "limit")


@dataclass(frozen=True)
class Options:
    """A parsed `%%shard` line; `specs` and `rules` are the texts `NAME=SPEC` and `REGEX=SPEC` in order."""

    strategy: str = ""
    mesh: str | None = None
    step: str | None = None
    specs: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    microbatches: int | None = None
    reduce: str = "each"
    remat: str | None = None
    precision: str | None = None
    reduce_dtype: str | None = None
    pad: bool = False
    stages: int | None = None
    schedule: str | None = None
    chunks: int | None = None
    balance: str | None = None
    cut: str | None = None
    check: bool = False
    on: str | None = None
    dry_run: bool = False
    repeat: int = 0
    compare: bool = False
    meshes: str | None = None
    vary: tuple[str, ...] = ()
    keep_going: bool = False
    budget: float | None = None
    among: str | None = None
    plan_only: bool = False
    donate: bool | None = None
    name: str | None = None
    output: str | None = None
    help: bool = False
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScheduleOptions:
    """A parsed `%shard schedule` line; a size that it does not say is None, `costs` is its text."""

    stages: int | None = None
    microbatches: int | None = None
    chunks: int | None = None
    costs: str | None = None
    memory_limit: float | None = None
    output: str | None = None
    help: bool = False
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class HistoryOptions:
    """A parsed `%shard history` line; what it does not say is None."""

    strategy: str | None = None
    name: str | None = None
    since: str | None = None
    limit: int | None = None
    json: str | None = None
    output: str | None = None
    help: bool = False
    words: tuple[str, ...] = ()


Line = TypeVar("Line", Options, ScheduleOptions, HistoryOptions)


def parse(line: str) -> Options:
    """`fsdp+tp --mesh "data=4 model=2"` as Options; what is no option is in `words`.

    Raises ShardError for an unknown option, a missing or impossible value, and an unclosed quote.
    """
    return _parsed(line, "%%shard", FLAGS, Options())


def parse_schedule(line: str) -> ScheduleOptions:
    """`schedule 1f1b --stages 4` as ScheduleOptions; `words` are those after the command. Raises as `parse` does."""
    options = _parsed(line, "%shard schedule", SCHEDULE_FLAGS, ScheduleOptions())
    return replace(options, words=options.words[1:])


def parse_history(line: str) -> HistoryOptions:
    """`history fsdp --since 7d` as HistoryOptions; `words` are those after the command. Raises as `parse` does."""
    options = _parsed(line, "%shard history", HISTORY_FLAGS, HistoryOptions())
    return replace(options, words=options.words[1:])


def _parsed(line: str, command: str, flags: Sequence[Flag], options: Line) -> Line:
    by_name = {flag.name: flag for flag in flags} | {"-h": flags[-1]}
    tokens = _tokens(line)
    while tokens:
        token = tokens.pop(0)
        if not re.match(r"--?[A-Za-z]", token):
            options = replace(options, words=(*options.words, token))
            continue
        name, given, value = token.partition("=")
        flag = _flag(name, command, by_name)
        if not flag.metavar:
            if given:
                raise ShardError(f"{name} takes no value, not {value!r}")
            options = replace(options, **{flag.into: flag.sets})
            continue
        if not given:
            if not tokens or tokens[0] in by_name:
                raise ShardError(f"{name} needs a value: {name} {flag.metavar}")
            value = tokens.pop(0)
        options = replace(options, **{flag.into: _value(flag, _unquoted(value), options)})
    return options


def _tokens(line: str) -> list[str]:
    """The words of the line; spaces inside quotes and brackets do not part them, inner quotes stay."""
    words, start, end = [], 0, 0
    while start < len(line):
        if line[start].isspace():
            start += 1
            continue
        end = _end_of_word(line, start)
        words.append(_unquoted(line[start:end]))
        start = end
    return words


def _end_of_word(line: str, start: int) -> int:
    depth, at = 0, start
    while at < len(line) and not (line[at].isspace() and depth <= 0):
        if line[at] in "\"'":
            at = line.find(line[at], at + 1)
            if at < 0:
                raise ShardError(f"a quote is not closed in: {line.strip()}")
        depth += (line[at] in "([{") - (line[at] in ")]}")
        at += 1
    if depth > 0:
        raise ShardError(f"a bracket is not closed in: {line.strip()}")
    return at


def _unquoted(word: str) -> str:
    whole = len(word) > 1 and word[0] in "\"'" and word.find(word[0], 1) == len(word) - 1
    return word[1:-1] if whole else word


def _flag(name: str, command: str, by_name: Mapping[str, Flag]) -> Flag:
    if name in by_name:
        return by_name[name]
    names = one_of(each for each in by_name if each != "-h")
    raise ShardError(f"{command} has no option {name}; it has {names}.{did_you_mean(name, by_name)}")


def _value(flag: Flag, value: str, options: Options | ScheduleOptions | HistoryOptions) -> Any:
    if flag.into in _REPEATABLE:
        if "=" not in value:
            raise ShardError(f"{flag.name} {value!r} has no '='; write {flag.name} \"{flag.metavar}\"")
        return (*getattr(options, flag.into), value)
    if flag.into in _COUNTS:
        if not value.isdecimal() or int(value) < 1:
            raise ShardError(f"{flag.name} takes a whole number from 1 on, not {value!r}")
        return int(value)
    if flag.into in ("memory_limit", "budget"):
        return _number(flag.name, value)
    if flag.into == "output" and not value.isidentifier():
        raise ShardError(f"-o takes the name of a variable, not {value!r}")
    return value


def _number(what: str, value: str) -> float:
    with suppress(ValueError):
        if 0 < float(value) < math.inf:
            return float(value)
    raise ShardError(f"{what} takes a number above 0, not {value!r}")


def chooses(options: Options) -> bool:
    """Whether a `%%shard` line asks for a search. Raises ShardError for its options on another line, and for those that
    it has no place for."""
    if options.words[:1] == ("auto",):
        if options.words[1:]:
            raise ShardError(f"%%shard auto takes options alone; unexpected: {' '.join(options.words[1:])}")
        for given, name, why in (
            (options.compare, "--compare", "what it compiles is compared in any case"),
            (options.keep_going, "--keep-going", "it goes on in any case"),
        ):
            if given:
                raise ShardError(f"{name}: under auto {why}; leave {name} out")
        return True
    for name in ("budget", "among", "plan_only"):
        if getattr(options, name) != getattr(Options, name):
            raise ShardError(f"--{name.replace('_', '-')} is for a search: %%shard auto")
    return False


def compares(options: Options) -> bool:
    """Whether a `%%shard` line asks for several candidates side by side."""
    several = any("," in word for word in options.words)
    return several or options.compare or options.meshes is not None or bool(options.vary)


def with_strategies(options: Options) -> tuple[Options, list[str]]:
    """The options of a line that compares, and the strategies that it names. Raises ShardError for options that only
    one step can have."""
    for given, name in ((options.check, "--check"), (options.donate, "--donate")):
        if given:
            why = "each is checked anyway" if name == "--check" else "each runs on copies"
            raise ShardError(f"{name}: in a comparison {why}; leave {name} out")
    words = [word for text in options.words for word in text.split(",") if word]
    return replace(options, words=(), strategy=",".join(words)), words


def with_strategy(options: Options) -> Options:
    """The options of a `%%shard` line, which has one word, as they are with that word as the strategy."""
    if options.keep_going:
        raise ShardError(
            "--keep-going is for a comparison: name several strategies, as in %%shard dp,fsdp,tp"
        )
    if not options.words:
        raise ShardError(f"%%shard needs a strategy: {one_of(STRATEGIES)}, or a sum such as fsdp+tp")
    strategy, *rest = options.words
    if rest:
        quote = f'; quote the mesh: --mesh "{options.mesh} {" ".join(rest)}"' if options.mesh else ""
        raise ShardError(f"%%shard takes one strategy, then options; unexpected: {' '.join(rest)}{quote}")
    return replace(options, strategy=strategy)


def compiled_only(options: Options, target: str) -> Options:
    """The options of a cell whose step is compiled for what is not attached. Raises ShardError where they ask for
    calls of it."""
    for asked, name in ((options.check, "--check"), (options.repeat, "--repeat")):
        if asked:
            raise ShardError(
                f"{name} runs the step, and {target} is not attached: it only compiles. Leave {name} out, or take a "
                "mesh of simulated devices"
            )
    if options.on is not None:
        raise ShardError(f"--on {options.on}: the mesh names the chip, {target}. Leave --on out")
    return replace(options, dry_run=True)


def only(options: Options, command: str, *fields: str) -> None:
    """Raise ShardError where a line of `%shard command` has more than that word and the options of `fields`."""
    plain = replace(options, words=(command,), **{name: getattr(Options, name) for name in fields})
    if options.words == (command,) and plain == Options(words=(command,)):
        return
    allowed = one_of(f"{flag.name} {flag.metavar}" for flag in FLAGS if flag.into in fields)
    given = " ".join(options.words[1:]) or one_of(_given(plain))
    quote = f'; quote the mesh: --mesh "{options.mesh} {given}"' if options.mesh and options.words[1:] else ""
    raise ShardError(f"%shard {command} takes {allowed} and nothing else; unexpected: {given}{quote}")


def _given(options: Options) -> list[str]:
    return [flag.name for flag in FLAGS if getattr(options, flag.into) != getattr(Options, flag.into)]


def flags_text(flags: Sequence[Flag]) -> str:
    """The options as lines of a help text."""
    return "\n".join(f"    {flag.name + ' ' + flag.metavar:<21}{flag.help}" for flag in flags)


def _help() -> str:
    strategies = "\n".join(f"    {name:<21}{text}" for name, text in STRATEGIES.items())
    flags = flags_text(FLAGS)
    return f"""Run this cell's train step sharded over the mesh, with the same numbers, and return the Report.

    %%shard STRATEGY [options]     above a cell that defines the train step, or calls one
    %%shard dp,fsdp,fsdp+tp        several, side by side: each compiled, run on copies and checked
    %%shard auto                   the fastest that fits, with what ruled the others out
    %shard                         the last report, with all calls since
    %shard compare 3 5             reports of the past side by side, by their numbers; alone it lists them
    %shard history WORDS           the reports of all notebooks so far; --help has more
    %shard doctor                  what is installed, which devices answer, whether they reach each other
    %shard abstract NAME...        make shapes of what the notebook holds under these names, and free it
    %shard schedule NAMES          a pipeline schedule in time, or several compared; --help has more

Strategies, or a sum of them such as fsdp+tp; fsdp@data says which mesh axis:
{strategies}

Options:
{flags}

A PartitionSpec may also annotate the step's argument: def train_step(state, batch: P('data')).
A cell that only defines the step runs it once, on copies of what the notebook holds under its
parameters' names; the next cells then train with the sharded step."""


HELP = _help()
