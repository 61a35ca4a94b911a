"""Hosts of a mesh as written in mesh text: `hosts:2`, `ssh:node1,node2`, `slurm:4`, `cluster:PROFILE`."""

import os
import re
from dataclasses import dataclass

from ..errors import ShardError, parse_count

LOCAL, SSH, RUNNING = "hosts", "ssh", "cluster"
LAUNCHERS = ("slurm", "mpi", "pbs", "sge", "lsf", "htcondor")  # names of ipyparallel's launchers
KINDS = (LOCAL, SSH, *LAUNCHERS, RUNNING)
MOST = 512
UNENCRYPTED = "--unencrypted"


@dataclass(frozen=True)
class HostsSpec:
    """Requested hosts.

    Attributes:
        kind: One of `KINDS`.
        count: Number of hosts; None for a running cluster.
        names: Host names under ssh.
        cluster: For a running cluster the ipyparallel profile, or the path of its connection file.
        unencrypted: Whether CPU devices may send data between machines in the clear, `--unencrypted`.

    >>> HostsSpec.parse("ssh", "node1,node2")
    HostsSpec(kind='ssh', count=2, names=('node1', 'node2'), cluster=None, unencrypted=False)
    """

    kind: str
    count: int | None = None
    names: tuple[str, ...] = ()
    cluster: str | None = None
    unencrypted: bool = False

    @classmethod
    def parse(cls, kind: str, extent: str, unencrypted: bool = False) -> "HostsSpec":
        """Parse hosts.

        Args:
            kind: Text before the colon, one of `KINDS`.
            extent: Text after the colon: a count, host names or a cluster.
            unencrypted: Whether `--unencrypted` was given.

        Raises:
            ShardError: The text names no hosts, or `--unencrypted` has no effect.
        """
        if unencrypted and kind == LOCAL:
            raise ShardError(f"{kind}:{extent} listens on this machine alone: leave {UNENCRYPTED} out")
        if kind == RUNNING:
            if not extent:
                raise ShardError("'cluster:': name a profile of ipyparallel, or its connection file: cluster:default")
            return cls(kind, cluster=extent, unencrypted=unencrypted)
        if kind == SSH:
            names = tuple(name for name in extent.split(",") if name)
            if len(names) < 2 or len(set(names)) < len(names):
                raise ShardError(f"'ssh:{extent}': name two hosts or more, each once: ssh:node1,node2")
            # ssh would read a name with a leading dash as an option.
            if bad := next((name for name in names if not re.fullmatch(r"[\w.@-]+", name) or name[0] == "-"), None):
                raise ShardError(f"'ssh:{extent}': {bad!r} is no name of a host: ssh:node1,user@node2")
            return cls(kind, len(names), names, unencrypted=unencrypted)
        count = parse_count(extent)
        if count is None or not 2 <= count <= MOST:
            raise ShardError(f"'{kind}:{extent}': write how many hosts, 2 to {MOST}: {kind}:2")
        return cls(kind, count, unencrypted=unencrypted)

    @property
    def is_local(self) -> bool:
        """Return whether the hosts are processes on this machine, with simulated devices."""
        return self.kind == LOCAL

    def restart_hint(self, count: int, axes: str) -> str:
        """Return the instruction for starting lost hosts again.

        Args:
            count: Number of hosts.
            axes: Axes of the mesh as text, or empty.

        >>> HostsSpec("hosts", 2).restart_hint(2, "data=8")
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
    """Return whether the name of a running cluster is a path of a connection file, not a profile."""
    return os.sep in cluster or cluster.endswith(".json")
