"""Several hosts from one notebook: engines of ipyparallel under `jax.distributed`, and cells that run on all."""

from .spec import HostsSpec

__all__ = ["HostsSpec"]
