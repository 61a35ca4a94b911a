"""Public marker `cut(x)`: a pipeline stage may begin here."""

from typing import Any, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

MARKER_NAME = "jaxshard:cut"  # name of marked values in a jaxpr
T = TypeVar("T")


def cut(x: T) -> T:
    """Mark a point in the model at which a stage may begin under `%%shard pp`, and return `x` unchanged.

    With at least one marker in the loss, stages begin at markers only. Use the returned value, as in `h = cut(h)`
    between two layers. A marker at the start or the end of a scanned layer allows a stage to begin at each layer.
    Outside of a pipeline the marker has no effect. `--cut` overrides markers.

    Args:
        x: Any pytree; its arrays may have any shapes and dtypes.

    >>> import jax.numpy as jnp
    >>> cut({"h": jnp.ones(2), "step": 3})
    {'h': Array([1., 1.], dtype=float32), 'step': 3}
    """
    return jax.tree.map(_marked, x)


def _marked(leaf: Any) -> Any:
    # Outside of a trace there is nothing to mark. The tracer of a jax.Ref is no jax.Array.
    array = isinstance(leaf, Tracer) and isinstance(leaf, jax.Array)
    return checkpoint_name(leaf, MARKER_NAME) if array else leaf
