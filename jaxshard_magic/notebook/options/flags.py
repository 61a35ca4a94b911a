"""What the command lines of the magics take: strategies, commands, and the options of each, a row an option."""

import builtins
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from keyword import iskeyword
from typing import Any
from unicodedata import normalize

from ...errors import ShardError, quoted, whole_number

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
# The names that IPython keeps in the notebook, and those of Python's modules.
_OF_THE_SHELL = re.compile(r"__.*__|_{1,3}|_i{1,3}|_i?\d+|_[dio]h|In|Out")
COMMANDS = (
    "doctor",
    "abstract",
    "schedule",
    "compare",
    "history",
    "explore",
    "code",
    "profile",
    "save",
    "load",
    "rescue",
)


@dataclass(frozen=True)
class Flag:
    """One option as it is typed.

    Args:
        name: with its dashes.
        metavar: what stands for its value in the help text; empty where it takes none, and sets `sets`.
        help: one line.
        into: the field that it sets.
        reads: its value of the text; raises `ShardError`.
        many: whether it may stand several times, each value added to the field's tuple.
        alone: the value where none stands behind it but a number may; None for an option that always has one.
    """

    name: str
    metavar: str
    help: str
    into: str
    reads: "Callable[[Flag, str], Any]"
    sets: Any = True
    many: bool = False
    alone: Any = None


def said(_: Flag, text: str) -> str:
    """The text as it is."""
    return text


def count(flag: Flag, text: str) -> int:
    """A whole number from 1 to a million."""
    found = whole_number(text)
    if found is None:
        most = " and a million at most" if text.isdecimal() and len(text) > 1 else ""
        raise ShardError(f"{flag.name} takes a whole number from 1 on{most}, not {quoted(text)}")
    return found


def number(flag: Flag, text: str) -> float:
    """A finite number above 0."""
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise ShardError(f"{flag.name} takes a number above 0, not {quoted(text)}")


def variable(flag: Flag, text: str) -> str:
    """A name that a variable can have, as Python reads it, and that is neither Python's own nor IPython's."""
    name = normalize("NFKC", text)
    if not name.isidentifier() or iskeyword(name):
        raise ShardError(f"{flag.name} takes the name of a variable, not {quoted(text)}")
    if hasattr(builtins, name) or _OF_THE_SHELL.fullmatch(name):
        raise ShardError(
            f"{flag.name} {name}: Python or IPython needs that name; take another: {flag.name} found"
        )
    return name


def folder(flag: Flag, text: str) -> str:
    """The path of a folder, of whatever may be there."""
    if not text.strip():
        raise ShardError(f"{flag.name} takes the path of a folder, not {quoted(text)}")
    return text


def file_name(flag: Flag, text: str) -> str:
    """A path, of whatever may be there."""
    if not text.strip():
        raise ShardError(f"{flag.name} takes the path of a file, not {quoted(text)}")
    return text


def assignment(flag: Flag, text: str) -> str:
    """Text with an equals sign."""
    if "=" not in text:
        raise ShardError(f"{flag.name} {text!r} has no '='; write {flag.name} \"{flag.metavar}\"")
    return text


def option(
    name: str,
    metavar: str,
    help: str,
    default: Any = None,
    reads: Callable[[Flag, str], Any] = said,
    no: str = "",
    alone: Any = None,
) -> Any:
    """A field of a line's options with the flag that sets it, and the help of the flag `--no-...` where it has one."""
    flags = [(name, metavar, help, reads, True, alone)] + (
        [(f"--no-{name[2:]}", "", no, reads, False, None)] if no else []
    )
    return field(default=default, metadata={"flags": flags})


@dataclass(frozen=True)
class LineOptions:
    """What the options of every line begin with: `words` are those that are no option, in order."""

    words: tuple[str, ...] = ()
    output: str | None = option("-o", "VAR", "keep what is returned under this name", reads=variable)
    help: bool = option("--help", "", "this text", False)

    @classmethod
    def flags(cls) -> tuple[Flag, ...]:
        """The line's own options in the order of its fields, then those that all lines have."""
        own = [each for each in fields(cls) if each.name not in LineOptions.__dataclass_fields__]
        return tuple(
            Flag(name, metavar, help, each.name, reads, sets, isinstance(each.default, tuple), alone)
            for each in (*own, *(e for e in fields(cls) if e not in own))
            for name, metavar, help, reads, sets, alone in each.metadata.get("flags", ())
        )


@dataclass(frozen=True)
class Options(LineOptions):
    """A parsed `%%shard` line; `strategy` is the word of it that is one."""

    strategy: str = ""
    mesh: str | None = option("--mesh", "TEXT", 'the mesh, for this cell only: --mesh "data=4 model=2"')
    step: str | None = option(
        "--step", "NAME", "which function is the train step; trainer.step and main.step too"
    )
    specs: tuple[str, ...] = option(
        "--spec", "NAME=SPEC", "PartitionSpec of an argument: --spec \"batch=P('data')\"", (), assignment
    )
    rules: tuple[str, ...] = option(
        "--rule", "REGEX=SPEC", "PartitionSpec of leaves: --rule \".*kernel=P(None,'tp')\"", (), assignment
    )
    microbatches: int | None = option(
        "--microbatches", "N", "take the batch in N parts; same gradients, less memory", reads=count
    )
    reduce: str = option(
        "--reduce", "WHEN", "sum microbatches' gradients over devices: each, once, once-gathered", "each"
    )
    remat: str | None = option(
        "--remat", "WHAT", "compute again for the backward pass: N segments, full, dots, REGEX"
    )
    precision: str | None = option("--precision", "TYPE", "products in bf16 or fp16; parameters stay float32")
    reduce_dtype: str | None = option(
        "--reduce-dtype", "TYPE", "add gradients up over devices in bf16, fp16 or f32"
    )
    pad: bool = option("--pad", "", "add rows to an uneven batch; numbers stay those of the real ones", False)
    stages: int | None = option(
        "--stages",
        "P",
        "of pp: stages of the pipeline; else those of the mesh's pipeline axis, or 4",
        reads=count,
    )
    schedule: str | None = option(
        "--schedule", "NAME", "of pp: their order, 1f1b unless said; %shard schedule --help has all"
    )
    chunks: int | None = option(
        "--chunks",
        "V",
        "of pp: parts of the model for each stage's devices, as for %shard schedule",
        reads=count,
    )
    balance: str | None = option(
        "--balance", "WHAT", "of pp: stages of the same flops, or of the same measured time"
    )
    cut: str | None = option(
        "--cut", "REGEX", "of pp: stages begin at these modules and scopes; else at jaxshard_magic.cut"
    )
    check: bool = option("--check", "", "compare with the plain step on the same inputs", False)
    on: str | None = option("--on", "CHIP", "predict the step's time on this chip: --on v5e, --on h100")
    dry_run: bool = option("--dry-run", "", "trace, plan and compile; run no step", False)
    repeat: int = option("--repeat", "N", "call the step N more times on copies, for its timing", 0, count)
    profile: int = option(
        "--profile",
        "[N]",
        "record N more steps on copies, 5 unless said: where their time goes",
        0,
        count,
        alone=5,
    )
    trace: str | None = option(
        "--trace", "DIR", "of --profile: keep the files that xprof and Perfetto read", reads=folder
    )
    checkpoint: str | None = option(
        "--checkpoint", "DIR", "save the loop's state there between its steps, while it runs", reads=folder
    )
    every: str | None = option(
        "--every", "N", "of --checkpoint: steps from save to save, 100 unless said, or 10m"
    )
    keep: int | None = option(
        "--keep", "N", "of --checkpoint: so many checkpoints stay, the newest, 3 unless said", reads=count
    )
    resume: bool = option("--resume", "", "of --checkpoint: go on from the newest one there", False)
    compare: bool = option(
        "--compare", "", "try several strategies, the usual ones unless said, side by side", False
    )
    meshes: str | None = option("--meshes", "AXES", 'compared on these: all, or "data=8; data=4 model=2"')
    vary: tuple[str, ...] = option(
        "--vary", "NAME=A,B", "compared with each value: --vary microbatches=1,4,16", (), assignment
    )
    keep_going: bool = option(
        "--keep-going", "", "compare the others where a strategy of the list is none", False
    )
    budget: float | None = option(
        "--budget", "SECONDS", "of auto: search no longer than this, 300 unless said", reads=number
    )
    among: str | None = option("--among", "A,B", "of auto: search only these strategies")
    plan_only: bool = option("--plan-only", "", "of auto: compile nothing, choose by what plans say", False)
    donate: bool | None = option(
        "--donate",
        "",
        "let the step reuse the memory of its own earlier results",
        no="keep every array that the step was given",
    )
    data: str = option(
        "--data", "WHAT", "of several hosts: each has the whole batch, or its own rows: per-host", "whole"
    )
    feed: bool = option("--feed", "", "take the batches of the cell's loop ahead, in a thread", False)
    name: str | None = option("--name", "LABEL", "the Report's name")
    output: str | None = option("-o", "VAR", "keep the Report under this name", reads=variable)


@dataclass(frozen=True)
class ScheduleOptions(LineOptions):
    """A parsed `%shard schedule` line; a size that it does not say is None, `costs` is its text."""

    stages: int | None = option(
        "--stages", "P", "ranks of the pipeline; else those of the mesh's pipeline axis, or 4", reads=count
    )
    microbatches: int | None = option(
        "--microbatches", "M", "parts of the batch; else 4 for each stage", reads=count
    )
    chunks: int | None = option(
        "--chunks", "V", "parts of the model that a rank holds, where the schedule has no number", reads=count
    )
    costs: str | None = option(
        "--costs", "TEXT", "of a microbatch: F,I,W or F,I,W,transfer, or with names, as below"
    )
    memory_limit: float | None = option(
        "--memory-limit", "N", "for those that search: most microbatches that a rank holds", reads=number
    )


@dataclass(frozen=True)
class HistoryOptions(LineOptions):
    """A parsed `%shard history` line; what it does not say is None."""

    strategy: str | None = option("--strategy", "NAME", "those of this strategy: --strategy fsdp+tp")
    name: str | None = option("--name", "NAME", "those of the step, or the label, of this name")
    since: str | None = option("--since", "WHEN", "from then on: 3h, 7d, 2w, or a day, 2026-11-01")
    limit: int | None = option("--limit", "N", "show so many of the newest, 50 unless said", reads=count)
    json: str | None = option(
        "--json", "FILE", "write them with their reports in full to a new file", reads=file_name
    )
    force: bool = option("--force", "", "write over the file where there is one", False)
    calibration: bool = option("--calibration", "", "measured over predicted step times, by chip", False)


@dataclass(frozen=True)
class ExploreOptions(LineOptions):
    """A parsed `%shard explore` line; what it does not say is None."""

    mesh: str | None = option(
        "--mesh", "TEXT", 'the mesh to begin with: --mesh "data=4 model=2"; else the last step\'s'
    )
    output: str | None = option("-o", "VAR", "keep the explorer under this name", reads=variable)


@dataclass(frozen=True)
class CodeOptions(LineOptions):
    """A parsed `%shard code` line; what it does not say is None."""

    file: str | None = option("--file", "FILE", "write the program to a new file as well", reads=file_name)
    force: bool = option("--force", "", "write over the file where there is one", False)


@dataclass(frozen=True)
class ProfileOptions(LineOptions):
    """A parsed `%shard profile` line; what it does not say is None."""

    trace: str | None = option(
        "--trace", "DIR", "keep the files that xprof, TensorBoard and Perfetto read", reads=folder
    )


@dataclass(frozen=True)
class SaveOptions(LineOptions):
    """A parsed `%shard save` line."""

    rename: tuple[str, ...] = option(
        "--rename",
        "THERE=HERE",
        'names in a file of weights: --rename "fc.weight=fc.kernel:T"',
        (),
        assignment,
    )
    force: bool = option("--force", "", "write over a file of weights where there is one", False)


@dataclass(frozen=True)
class LoadOptions(LineOptions):
    """A parsed `%shard load` line; what it does not say is None."""

    number: int | None = option("--number", "N", "this checkpoint; the newest by default", reads=count)
    cast: bool = option("--cast", "", "convert to the dtypes that the names have now", False)
    rename: tuple[str, ...] = option(
        "--rename",
        "THERE=HERE",
        'names in a file of weights: --rename "fc.weight=fc.kernel:T"',
        (),
        assignment,
    )
    part: str | None = option("--part", "NAME", "the part of the checkpoint, where several fit the name")


def flags_text(options: type[LineOptions]) -> str:
    """The options of a line as lines of a help text."""
    return "\n".join(f"    {flag.name + ' ' + flag.metavar:<21}{flag.help}" for flag in options.flags())
