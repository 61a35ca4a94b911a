"""Data parallel: all parameters on every device, and a shard of the examples."""

from .layout import Axes, Layout


def data_parallel(layout: Layout, axes: Axes) -> None:
    """Give each parameter the reason for its copy on every device; the layout itself shards the examples over the batch
    axes."""
    for i in layout.roles.storage_order:
        if layout.placement_source(layout.program.inputs[i]) is None:
            layout.reasons[i].append(f"dp: a copy on every device of {'+'.join(axes)}")
