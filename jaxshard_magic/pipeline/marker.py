"""`cut(x)`: the marker that a model has where a stage of a pipeline may begin."""

from typing import Any, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

NAME = "jaxshard:cut"  # of the values that a marker gives
T = TypeVar("T")


def cut(x: T) -> T:
    """`x` as it is: under `%%shard pp` a stage may begin with what follows, and none begins where there is no marker.

    Use what it returns, as in `h = cut(h)` between two layers. At the start or the end of a scanned layer it allows
    stages to begin at each layer. Everywhere but in a pipeline it does nothing. `--cut` takes its place.

    Args:
        x: any pytree; its arrays may have any shapes and dtypes.

    >>> import jax.numpy as jnp
    >>> cut({"h": jnp.ones(2), "step": 3})
    {'h': Array([1., 1.], dtype=float32), 'step': 3}
    """
    return jax.tree.map(_marked, x)


def _marked(leaf: Any) -> Any:
    array = isinstance(leaf, Tracer) and isinstance(leaf, jax.Array)  # not a jax.Ref
    return checkpoint_name(leaf, NAME) if array else leaf
