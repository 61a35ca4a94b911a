"""Multi-host meshes from one notebook: ipyparallel engines joined under `jax.distributed`, with every cell run on
all."""

from .spec import HostsSpec

__all__ = ["HostsSpec"]
