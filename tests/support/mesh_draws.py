"""Meshes and axes of them, drawn by hypothesis."""

from typing import Any

from hypothesis import strategies as st

sizes = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4)


@st.composite
def meshes_and_axes(draw, sizes: Any = sizes):
    axes = dict(zip("abcd", draw(sizes), strict=False))
    chosen = draw(st.sets(st.sampled_from(list(axes)), min_size=1))
    return axes, tuple(a for a in axes if a in chosen)
