"""What the command lines of the magics take: strategies, commands, and the options of each, as tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
COMMANDS = ("doctor", "abstract", "schedule", "compare", "history", "explore", "code")


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
EXPLORE_FLAGS = (
    Flag("--mesh", "TEXT", 'the mesh to begin with: --mesh "data=4 model=2"; else the last step\'s', "mesh"),
    Flag("-o", "VAR", "keep the explorer under this name", "output"),
    Flag("--help", "", "this text", "help"),
)
CODE_FLAGS = (
    Flag("--file", "FILE", "write the program there as well", "file"),
    Flag("-o", "VAR", "keep what is returned under this name", "output"),
    Flag("--help", "", "this text", "help"),
)


def flags_text(flags: Sequence[Flag]) -> str:
    """The options as lines of a help text."""
    return "\n".join(f"    {flag.name + ' ' + flag.metavar:<21}{flag.help}" for flag in flags)
