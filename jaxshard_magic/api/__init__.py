"""Functions of the magics for scripts: `mesh`, `shard`, `compare`, `choose`, `layout`, `show`, `doctor`.

The magics call nothing else.
"""

from .meshes import build_mesh, default_mesh, doctor, get_ready, mesh
from .searches import choose, compare
from .steps import layout, shard, show

__all__ = ["build_mesh", "choose", "compare", "default_mesh", "doctor", "get_ready", "layout", "mesh", "shard", "show"]
