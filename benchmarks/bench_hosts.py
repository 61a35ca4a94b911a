"""What a mesh over hosts costs: starting them, a cell, the meeting before each step, placing arrays.

    python benchmarks/bench_hosts.py [--hosts N]

Hosts are processes of this machine, with 8 simulated devices together. Prints each figure beside its limit, and exits
with 1 where one is above. Last, how long the meeting takes for more hosts: clients of jax's coordination service alone,
a thread each, in one process that has the service as well, so that all of them share this machine's cores.
"""

import argparse
import os
import signal
import statistics
import sys
import threading
import time
from typing import Any

from jaxshard_magic.hosts import cell_run, engine, starting, step_barrier
from jaxshard_magic.hosts.spec import HostsSpec

MEETING_MS, DISPATCH_MS, PLACING_MS = 2.0, 20.0, 5.0
STEPS, CELLS, TIMES = 200, 40, 20
MANY = (2, 8, 16, 32, 64)

SETUP = """
import statistics, time
import jax, jax.numpy as jnp, numpy as np
import jaxshard_magic as js
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxshard_magic.device_arrays import put
from jaxshard_magic.step.multihost_calls import MultihostCalls

mesh = js.mesh("data=8")
weights = {"up": jnp.ones((256, 512)) / 16, "down": jnp.ones((512, 256)) / 16}
batch = np.ones((64, 256), np.float32)

def train_step(weights, batch):
    def loss_fn(weights):
        return jnp.mean((jax.nn.relu(batch @ weights["up"]) @ weights["down"] - batch) ** 2)
    loss, grads = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, grads), loss

step = js.shard(train_step, "fsdp", mesh=mesh)
weights, loss = step(weights, batch)
placed = put([batch], NamedSharding(mesh, P("data")))[0]
"""
MEETINGS = f"""
(meet,) = MultihostCalls.barriers
taken = []
for _ in range({STEPS}):
    start = time.perf_counter()
    meet()
    taken.append(time.perf_counter() - start)
print("figure", 1e3 * statistics.median(taken))
"""
# Rounds of ten steps with the meeting and ten without, in turns.
LOOPS = """
meeting, found = MultihostCalls.barriers[:], {True: [], False: []}
for turn in range(20):
    with_it = turn % 2 == 0
    MultihostCalls.barriers[:] = meeting if with_it else []
    start = time.perf_counter()
    for _ in range(10):
        weights, loss = step(weights, placed)
    float(loss)
    found[with_it].append((time.perf_counter() - start) / 10)
MultihostCalls.barriers[:] = meeting
print("figure", 1e3 * statistics.median(found[True]), 1e3 * statistics.median(found[False]))
"""
PLACING = f"""
leaves = [np.ones((256, 256), np.float32) for _ in range(10)]
taken = []
for _ in range({TIMES}):
    start = time.perf_counter()
    jax.block_until_ready(put(leaves, NamedSharding(mesh, P("data"))))
    taken.append(time.perf_counter() - start)
print("figure", 1e3 * statistics.median(taken))
"""


class Bench:
    """Hosts, and the cells that measure on them."""

    def __init__(self, hosts: int):
        start = time.perf_counter()
        self.cluster = starting.start(HostsSpec.parse("hosts", str(hosts)), 8)
        self.cluster.call(engine.prepare_host, "data=8", {"view": "text"})
        self.started = time.perf_counter() - start
        self._cells = 0

    def cell(self, text: str) -> list[float]:
        """The figures that a cell prints on host 0."""
        said: list[str] = []

        def hear(host: int, message: dict[str, Any]) -> None:
            if host == 0 and message["header"]["msg_type"] == "stream":
                said.append(message["content"]["text"])

        self._cells += 1
        with cell_run.Interrupts() as interrupts:
            outcome = cell_run.run_on_hosts(self.cluster, text, f"bench {self._cells}", self._cells, hear, interrupts)
        assert not outcome.summary(), outcome.summary()
        lines = "".join(said).splitlines()
        return [float(word) for line in lines if line.startswith("figure") for word in line.split()[1:]]

    def dispatch(self) -> float:
        """Milliseconds of a cell that does nothing."""
        taken = []
        for _ in range(CELLS):
            start = time.perf_counter()
            self.cell("pass")
            taken.append(time.perf_counter() - start)
        return 1e3 * statistics.median(taken)

    def again(self) -> float:
        """Seconds from a dead host to the next step, with nothing compiled kept."""
        os.kill(self.cluster.joined[-1].pid, signal.SIGKILL)
        start = time.perf_counter()
        try:
            self.cell("while True:\n    weights, loss = step(weights, placed)")
        except cell_run.HostsLost:
            self.cluster.kill()
        self.cluster = Bench(len(self.cluster)).cluster
        self.cell(SETUP)
        return time.perf_counter() - start


def meetings(hosts: int) -> float:
    """Milliseconds of a meeting of so many clients of one coordination service."""
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    address = f"127.0.0.1:{engine.free_port()}"
    service = _jax.get_distributed_runtime_service(address, hosts, heartbeat_timeout=100, shutdown_timeout=10)
    taken: list[float] = []

    def client(host: int) -> None:
        own = _jax.get_distributed_runtime_client(address, host, init_timeout=60, heartbeat_timeout=100)
        own.connect()
        own.wait_at_barrier("ready", 60_000)
        for k in range(TIMES):
            start = time.perf_counter()
            own.wait_at_barrier(f"meeting {k}", 60_000)
            if host == 0:
                taken.append(time.perf_counter() - start)
        own.wait_at_barrier("done", 60_000)
        own.shutdown()

    threads = [threading.Thread(target=client, args=(host,)) for host in range(hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    service.shutdown()
    return 1e3 * statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    hosts = parser.parse_args().hosts
    bench = Bench(hosts)
    try:
        bench.cell(SETUP)
        (meeting,) = bench.cell(MEETINGS)
        guarded, free = bench.cell(LOOPS)
        (placing,) = bench.cell(PLACING)
        dispatch = bench.dispatch()
        print(f"{hosts} hosts started and joined, with a mesh: {bench.started:.1f} s")
        print(f"the meeting before a step: {meeting:.2f} ms, limit {MEETING_MS:g}")
        print(f"a step of {free:.1f} ms: {guarded / free:.3f} times as long with it; {meeting / 200:.2%} of 200 ms")
        print(f"10 leaves of 256 KiB placed: {placing:.2f} ms, limit {PLACING_MS:g}")
        print(f"a cell that does nothing: {dispatch:.1f} ms, limit {DISPATCH_MS:g}")
        print(f"from a dead host to the next step: {bench.again():.1f} s")
    finally:
        bench.cluster.kill()
    for many in MANY:
        taken = meetings(many)
        often = (
            ""
            if many <= step_barrier.MAX_HOSTS_EVERY_STEP
            else f", every {step_barrier.steps_between(taken / 1e3, 0.02)} steps of 20 ms"
        )
        print(f"a meeting of {many} clients, all on these cores: {taken:.2f} ms{often}")
    sys.exit(meeting > MEETING_MS or placing > PLACING_MS or dispatch > DISPATCH_MS)


if __name__ == "__main__":
    main()
