"""Tables of options: a dataclass for each command of the magics, with help text, parser and conflicts of each
option."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from ...config.flags import Flag, LineOptions, assignment, count, file_name, folder, number, option, variable
from ...config.options import DATA, FLAGS

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
class ShardOptions(LineOptions):
    """Options of a `%%shard` line.

    Fields with a flag are documented by their help texts.

    Attributes:
        strategy: The strategy, a word of the line.
        step_options: Options that change the step, by the parameter names of `shard`; only options on the line.
    """

    strategy: str = ""
    mesh: str | None = option("--mesh", "TEXT", 'the mesh, for this cell only: --mesh "data=4 model=2"')
    step: str | None = option("--step", "NAME", "which function is the train step; trainer.step and main.step too")
    specs: tuple[str, ...] = option(
        "--spec", "NAME=SPEC", "PartitionSpec of an argument: --spec \"batch=P('data')\"", (), assignment
    )
    rules: tuple[str, ...] = option(
        "--rule", "REGEX=SPEC", "PartitionSpec of leaves: --rule \".*kernel=P(None,'tp')\"", (), assignment
    )
    step_options: Mapping[str, Any] = field(default_factory=dict, metadata={"flags": tuple(FLAGS.values())})
    check: bool = option(
        "--check",
        "",
        "compare with the plain step on the same inputs",
        False,
        calls=True,
        refused={"compare": "each is checked anyway"},
    )
    on: str | None = option("--on", "CHIP", "predict the step's time on this chip: --on v5e, --on h100")
    dry_run: bool = option("--dry-run", "", "trace, plan and compile; run no step", False)
    repeat: int = option("--repeat", "N", "call the step N more times on copies, for its timing", 0, count, calls=True)
    profile: int = option(
        "--profile",
        "[N]",
        "record N more steps on copies, 5 unless said: where their time goes",
        0,
        count,
        bare=5,
        calls=True,
        refused={
            "auto": "many are tried; %shard profile records the step that was chosen",
            "compare": "none is recorded; record one of them with %%shard and its name",
            "dry_run": "it records steps that run, and --dry-run runs none",
        },
    )
    trace: str | None = option(
        "--trace", "DIR", "of --profile: keep the files that xprof and Perfetto read", read=folder, needs="profile"
    )
    checkpoint: str | None = option(
        "--checkpoint",
        "DIR",
        "save the loop's state there between its steps, while it runs",
        read=folder,
        calls=True,
        refused={
            "auto": "the steps of many are tried; save with the one that was chosen",
            "compare": "none trains; save with one of them, %%shard and its name",
            "dry_run": "it saves what steps return, and --dry-run runs none",
        },
    )
    every: str | None = option(
        "--every", "N", "of --checkpoint: steps from save to save, 100 unless said, or 10m", needs="checkpoint"
    )
    keep: int | None = option(
        "--keep",
        "N",
        "of --checkpoint: so many checkpoints stay, the newest, 3 unless said",
        read=count,
        needs="checkpoint",
    )
    resume: bool = option("--resume", "", "of --checkpoint: go on from the newest one there", False, needs="checkpoint")
    compare: bool = option(
        "--compare",
        "",
        "try several strategies, the usual ones unless said, side by side",
        False,
        refused={"auto": "what it compiles is compared in any case"},
        command="compare",
    )
    meshes: str | None = option(
        "--meshes", "AXES", 'compared on these: all, or "data=8; data=4 model=2"', command="compare"
    )
    vary: tuple[str, ...] = option(
        "--vary", "NAME=A,B", "compared with each value: --vary microbatches=1,4,16", (), assignment, command="compare"
    )
    keep_going: bool = option(
        "--keep-going",
        "",
        "compare the others where a strategy of the list is none",
        False,
        refused={"auto": "it goes on in any case"},
        command="compare",
    )
    budget: float | None = option(
        "--budget", "SECONDS", "of auto: search no longer than this, 300 unless said", read=number, command="auto"
    )
    among: str | None = option("--among", "A,B", "of auto: search only these strategies", command="auto")
    plan_only: bool = option(
        "--plan-only", "", "of auto: compile nothing, choose by what plans say", False, command="auto"
    )
    donate: bool | None = option(
        "--donate",
        "",
        "let the step reuse the memory of its own earlier results",
        negative="keep every array that the step was given",
        refused={"compare": "each runs on copies"},
    )
    data: str = option(
        "--data", "WHAT", "of several hosts: each has the whole batch, or its own rows: per-host", "whole", choices=DATA
    )
    feed: bool = option("--feed", "", "take the batches of the cell's loop ahead, in a thread", False)
    name: str | None = option("--name", "LABEL", "the Report's name")
    output: str | None = option("-o", "VAR", "keep the Report under this name", read=variable)

    def value(self, flag: Flag) -> Any:
        """Return the value of a flag, or its default if the line does not have the flag."""
        if flag.parameter in FLAGS:
            return self.step_options.get(flag.parameter, flag.default)
        return super().value(flag)

    def has(self, flag: Flag) -> bool:
        """Return whether the line has a flag; a flag that changes the step counts even with its default value."""
        return flag.parameter in self.step_options if flag.parameter in FLAGS else super().has(flag)

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with other values, by field or by name of an option of the step."""
        step = {name: value for name, value in values.items() if name in FLAGS}
        own = {name: value for name, value in values.items() if name not in FLAGS}
        return replace(self, step_options={**self.step_options, **step}, **own)


@dataclass(frozen=True)
class ScheduleOptions(LineOptions):
    """Options of a `%shard schedule` line. Sizes missing on the line are None; `costs` is text."""

    stages: int | None = option(
        "--stages", "P", "ranks of the pipeline; else those of the mesh's pipeline axis, or 4", read=count
    )
    microbatches: int | None = option("--microbatches", "M", "parts of the batch; else 4 for each stage", read=count)
    chunks: int | None = option(
        "--chunks", "V", "parts of the model that a rank holds, where the schedule has no number", read=count
    )
    costs: str | None = option("--costs", "TEXT", "of a microbatch: F,I,W or F,I,W,transfer, or with names, as below")
    memory_limit: float | None = option(
        "--memory-limit", "N", "for those that search: most microbatches that a rank holds", read=number
    )


@dataclass(frozen=True)
class HistoryOptions(LineOptions):
    """Options of a `%shard history` line; None for what is missing."""

    strategy: str | None = option("--strategy", "NAME", "those of this strategy: --strategy fsdp+tp")
    name: str | None = option("--name", "NAME", "those of the step, or the label, of this name")
    since: str | None = option("--since", "WHEN", "from then on: 3h, 7d, 2w, or a day, 2026-11-01")
    limit: int | None = option("--limit", "N", "show so many of the newest, 50 unless said", read=count)
    json: str | None = option("--json", "FILE", "write them with their reports in full to a new file", read=file_name)
    force: bool = option("--force", "", "write over the file where there is one", False)
    calibration: bool = option("--calibration", "", "measured over predicted step times, by chip", False)


@dataclass(frozen=True)
class ExploreOptions(LineOptions):
    """Options of a `%shard explore` line; None for what is missing."""

    mesh: str | None = option(
        "--mesh", "TEXT", 'the mesh to begin with: --mesh "data=4 model=2"; else the last step\'s'
    )
    output: str | None = option("-o", "VAR", "keep the explorer under this name", read=variable)


@dataclass(frozen=True)
class CodeOptions(LineOptions):
    """Options of a `%shard code` line; None for what is missing."""

    file: str | None = option("--file", "FILE", "write the program to a new file as well", read=file_name)
    force: bool = option("--force", "", "write over the file where there is one", False)


@dataclass(frozen=True)
class ProfileOptions(LineOptions):
    """Options of a `%shard profile` line; None for what is missing."""

    trace: str | None = option(
        "--trace", "DIR", "keep the files that xprof, TensorBoard and Perfetto read", read=folder
    )


@dataclass(frozen=True)
class SaveOptions(LineOptions):
    """Options of a `%shard save` line."""

    rename: tuple[str, ...] = option(
        "--rename", "THERE=HERE", 'names in a file of weights: --rename "fc.weight=fc.kernel:T"', (), assignment
    )
    force: bool = option("--force", "", "write over a file of weights where there is one", False)


@dataclass(frozen=True)
class LoadOptions(LineOptions):
    """Options of a `%shard load` line; None for what is missing."""

    number: int | None = option("--number", "N", "this checkpoint; the newest by default", read=count)
    cast: bool = option("--cast", "", "convert to the dtypes that the names have now", False)
    rename: tuple[str, ...] = option(
        "--rename", "THERE=HERE", 'names in a file of weights: --rename "fc.weight=fc.kernel:T"', (), assignment
    )
    part: str | None = option("--part", "NAME", "the part of the checkpoint, where several fit the name")


def flags_text(options: type[LineOptions]) -> str:
    """Return a help text of the options of a line, one line each."""
    return "\n".join(f"    {flag.name + ' ' + flag.metavar:<21}{flag.help}" for flag in options.flags())
