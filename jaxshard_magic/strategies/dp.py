"""Data parallel: every device has all parameters and a part of the examples."""

from .layout import Axes, Layout


def data_parallel(layout: Layout, axes: Axes) -> None:
    """Nothing to store differently: the examples are divided over the batch axes by the layout itself."""
    for i in layout.roles.stored:
        if layout.fixed_by(layout.program.inputs[i]) is None:
            layout.why[i].append(f"dp: a copy on every device of {'+'.join(axes)}")
