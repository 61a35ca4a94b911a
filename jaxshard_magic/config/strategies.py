"""Strategies and the jobs of mesh axes, one row each, for the parser, help, completion, planner, searches and views.

A new strategy is a row here and the file in `strategies/` that its row names. Some questions are still asked by name:
which axes divide the examples (`strategy_text.batch_axes`), what a search and an explorer try (`SEARCHED_STRATEGIES`,
`search/decision_path.py`, `search/nodes.py`), and some rules of `analysis/advice`.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class AxisJob:
    """Use of a mesh axis, recognized by the name of the axis.

    Attributes:
        name: Of the job.
        axis_names: Names of axes that have it; the first is the usual one.
        hue: Colour number of such an axis in all views; `widgets/shared/axes.js` has the same numbers.
    """

    name: str
    axis_names: tuple[str, ...]
    hue: int


@dataclass(frozen=True)
class Strategy:
    """One strategy as it is typed.

    Attributes:
        name: In a sum such as `fsdp+tp`.
        help: One line of `%%shard --help`.
        jobs: Jobs of mesh axes that it divides over, in order of preference; the first is that of a default mesh.
        alone: Reason why it can't be part of a sum; empty if it can.
        divides: `module:function` in `strategies/` that fills in a layout; empty where none does.
        order: Place in the order in which the parts of a sum take dimensions: experts are divided by themselves, and
            tensor parallel takes its dimensions before fsdp takes what is left.
    """

    name: str
    help: str
    jobs: tuple[str, ...] = ()
    alone: str = ""
    divides: str = ""
    order: int = 9

    def function(self) -> Any:
        """Return the function of `divides`."""
        module, _, name = self.divides.partition(":")
        return getattr(import_module(f"...strategies.{module}", __name__), name)


AXIS_JOBS = {
    job.name: job
    for job in (
        AxisJob("data", ("data", "dp", "batch", "replica"), 0),
        AxisJob("fsdp", ("fsdp",), 2),
        AxisJob("tensor", ("model", "tp", "tensor"), 1),
        AxisJob("sequence", ("seq", "sp", "sequence", "context", "cp"), 4),
        AxisJob("pipeline", ("pipe", "pp", "stage", "pipeline"), 3),
        AxisJob("expert", ("expert", "ep"), 5),
    )
}

STRATEGIES = {
    row.name: row
    for row in (
        Strategy(
            "dp",
            "data parallel: the batch is split, every device holds all weights",
            ("data", "fsdp"),
            divides="dp:data_parallel",
            order=0,
        ),
        Strategy(
            "fsdp",
            "fully sharded data parallel: weights and optimizer state are split as well",
            ("fsdp", "data"),
            divides="fsdp:fully_sharded",
            order=4,
        ),
        Strategy(
            "tp",
            "tensor parallel: the weights of one layer are split, column then row",
            ("tensor",),
            divides="tp:tensor_parallel",
            order=2,
        ),
        Strategy(
            "sp",
            "sequence parallel: positions are split; with tp, between its layers, as Megatron does",
            ("sequence",),
            divides="sp:sequence_parallel",
            order=3,
        ),
        Strategy(
            "ep",
            "expert parallel: experts are split, and tokens go to the devices that have theirs",
            ("expert",),
            divides="ep:expert_parallel",
            order=1,
        ),
        Strategy(
            "pp",
            "pipeline parallel: the model's layers are cut into stages, which work on microbatches in turn",
            ("pipeline",),
        ),
        Strategy(
            "pmap",
            "steps written for one device, with jax.lax.pmean(x, 'batch'), as jax.pmap runs them",
            ("data",),
            alone="runs the step as it is written for one device",
        ),
        Strategy(
            "spmd",
            "your own PartitionSpecs only: --spec, --rule, annotations, Flax metadata",
            alone="uses only your own specs",
        ),
    )
}
AUTO = "auto"  # in place of a strategy: a search for one
WORDS = (*STRATEGIES, AUTO)  # the first word of a `%%shard` line
AUTO_HELP = "search for the fastest of these that fits, on every mesh of these devices"
COMPARED = ("dp", "fsdp", "tp", "fsdp+tp", "pp")  # strategies of a comparison that names none
# Searches try these, and those of experts where a step has some.
SEARCHED_STRATEGIES = (
    *("dp", "fsdp", "tp", "dp+fsdp", "dp+tp", "fsdp+tp", "dp+sp", "fsdp+sp", "fsdp+tp+sp"),
    *("pp", "pp+dp", "pp+fsdp", "pp+fsdp+tp"),
)
EXPERT_STRATEGIES = ("ep", "ep+dp", "ep+fsdp", "ep+tp", "ep+fsdp+tp")
EXPLORED = ("dp", "fsdp", "tp", "sp", "ep", "dp+tp", "fsdp+tp", "fsdp+sp", "tp+sp", "fsdp+tp+sp", "spmd")


def job_of(axis_name: str) -> str | None:
    """Return the job of a mesh axis by its name; None for any other name.

    >>> job_of("tp")
    'tensor'
    """
    return next((job.name for job in AXIS_JOBS.values() if axis_name.lower() in job.axis_names), None)
