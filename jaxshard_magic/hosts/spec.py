"""Which hosts a mesh is made of, as they are written: `hosts:2`, `ssh:node1,node2`, `slurm:4`, `cluster:PROFILE`."""

import os
import re
from dataclasses import dataclass

from ..errors import ShardError, whole_number

LOCAL, SSH, RUNNING = "hosts", "ssh", "cluster"
LAUNCHERS = (
    "slurm",
    "mpi",
    "pbs",
    "sge",
    "lsf",
    "htcondor",
)  # of ipyparallel, by the names that it has for them
KINDS = (LOCAL, SSH, *LAUNCHERS, RUNNING)
MOST = 512
UNENCRYPTED = "--unencrypted"


@dataclass(frozen=True)
class HostsSpec:
    """Hosts as they were asked for: `kind` is one of `KINDS`; how many, their names under ssh, or what names a cluster
    that runs already: a profile of ipyparallel or the path of its connection file. `unencrypted`: whether CPU devices
    may tell each other between machines what everybody on the network can read, `--unencrypted`.

    >>> HostsSpec.parse("ssh", "node1,node2")
    HostsSpec(kind='ssh', count=2, names=('node1', 'node2'), cluster=None)
    """

    kind: str
    count: int | None = None
    names: tuple[str, ...] = ()
    cluster: str | None = None
    unencrypted: bool = False

    @classmethod
    def parse(cls, kind: str, extent: str, unencrypted: bool = False) -> "HostsSpec":
        """Of what stands before and behind the colon. Raises ShardError for what names no hosts."""
        if unencrypted and kind == LOCAL:
            raise ShardError(f"{kind}:{extent} listens on this machine alone: leave {UNENCRYPTED} out")
        if kind == RUNNING:
            if not extent:
                raise ShardError(
                    "'cluster:': name a profile of ipyparallel, or its connection file: cluster:default"
                )
            return cls(kind, cluster=extent, unencrypted=unencrypted)
        if kind == SSH:
            names = tuple(name for name in extent.split(",") if name)
            if len(names) < 2 or len(set(names)) < len(names):
                raise ShardError(f"'ssh:{extent}': name two hosts or more, each once: ssh:node1,node2")
            if bad := next(
                (name for name in names if not re.fullmatch(r"[\w.@-]+", name) or name[0] == "-"), None
            ):
                raise ShardError(f"'ssh:{extent}': {bad!r} is no name of a host: ssh:node1,user@node2")
            return cls(kind, len(names), names, unencrypted=unencrypted)
        count = whole_number(extent)
        if count is None or not 2 <= count <= MOST:
            raise ShardError(f"'{kind}:{extent}': write how many hosts, 2 to {MOST}: {kind}:2")
        return cls(kind, count, unencrypted=unencrypted)

    @property
    def is_local(self) -> bool:
        """Whether the hosts are processes on this machine, with simulated devices."""
        return self.kind == LOCAL

    def again(self, count: int, axes: str) -> str:
        """What starts so many hosts again, after some are gone, in words.

        >>> HostsSpec("hosts", 2).again(2, "data=8")
        '%mesh hosts:2 data=8 starts new ones'
        """
        line = f"%mesh {self} {axes}".rstrip()
        if self.cluster is None:
            return f"{line} starts new ones"
        if is_file(self.cluster):
            return f"restart its engines, then {line}"
        profile = f"--profile={self.cluster}"
        return f"restart the engines: ipcluster stop {profile}; ipcluster start -n {count} {profile}; then {line}"

    def __str__(self) -> str:
        named = f"{self.kind}:{self.cluster or ','.join(self.names) or self.count}"
        return f"{named} {UNENCRYPTED}" if self.unencrypted else named


def is_file(cluster: str) -> bool:
    """Whether what names a cluster is the path of its connection file, and no profile."""
    return os.sep in cluster or cluster.endswith(".json")
