"""Help text of `%%shard`."""

from ...config.strategies import AUTO, AUTO_HELP, STRATEGIES
from .line_options import ShardOptions, flags_text


def _help() -> str:
    helps = ((row.name, row.help) for row in STRATEGIES.values())
    strategies = "\n".join(f"    {name:<21}{text}" for name, text in (*helps, (AUTO, AUTO_HELP)))
    flags = flags_text(ShardOptions)
    return f"""Run this cell's train step sharded over the mesh, with the same numbers, and return the Report.

    %%shard STRATEGY [options]     above a cell that defines the train step, or calls one
    %%shard dp,fsdp,fsdp+tp        several, side by side: each compiled, run on copies and checked
    %%shard auto                   the fastest that fits, with what ruled the others out
    %shard                         the last report, with all calls since
    %shard compare 3 5             reports of the past side by side, by number or name; alone it lists them
    %shard history WORDS           the reports of all notebooks so far; --help has more
    %shard profile N               where the time of the last step goes: N more are recorded; --help has more
    %shard doctor                  what is installed, which devices answer, whether they reach each other,
                                   and the same of hosts
    %shard abstract NAME...        make shapes of what the notebook holds under these names, and free it
    %shard rescue NAME...          bring what a host that is left after a death has whole to this kernel
    %shard schedule NAMES          a pipeline schedule in time, or several compared; --help has more
    %shard explore                 try meshes and PartitionSpecs on the arrays of the last step; --help has more
    %shard code                    the last step as plain JAX, to take home; --help has more

Strategies, or a sum of them such as fsdp+tp; fsdp@data says which mesh axis:
{strategies}

Options:
{flags}

While a cell trains its curves are drawn below it; they stay in the report, report.metrics.
train_step.on_metrics(write), below the step, hands each row of them to a writer.
A PartitionSpec may also annotate the step's argument: def train_step(state, batch: P('data')).
A cell that only defines the step runs it once, on copies of what the notebook holds under its
parameters' names; the next cells then train with the sharded step.
A comment, # and what follows, may stand at the end of any of these lines."""


HELP = _help()
