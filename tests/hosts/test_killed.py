"""One of two hosts is killed at moments of chance, saves among them: the last whole checkpoint is there."""

import signal
import time

import jax
import numpy as np
import pytest
from support import several_hosts

from jaxshard_magic.checkpoints import CheckpointStore


def killed_in_a_save(folder, victim, delay, stays):
    """The last save that was whole when a host was killed, `delay` seconds into the third or later; the other one
    lives `stays` seconds longer."""
    with several_hosts.started("support.hosts_keep:saving", str(folder), devices=2) as (hosts, logs):
        end = time.monotonic() + 120
        while "begun 2" not in (said := logs[0].read_text()):
            assert time.monotonic() < end and all(host.poll() is None for host in hosts), said
            time.sleep(0.01)
        time.sleep(delay)
        hosts[victim].send_signal(signal.SIGKILL)
        time.sleep(stays)
        hosts[1 - victim].kill()
        hosts[1 - victim].wait()
        begun = [line.split()[1] for line in logs[0].read_text().splitlines() if line.startswith("begun ")]
        return int(begun[-1]) - 1


@pytest.mark.parametrize("times", [pytest.param(2, marks=pytest.mark.ci), pytest.param(50, marks=pytest.mark.full)])
def test_a_host_killed_at_any_moment_of_a_save_leaves_the_last_whole_checkpoint(times, tmp_path):
    chance, cut = np.random.default_rng(7), 0
    for i in range(times):
        folder = tmp_path / str(i)
        whole = killed_in_a_save(folder, i % 2, chance.uniform(0, 0.5), stays=(1.0, 0.0, 3.0)[i % 3])
        store = CheckpointStore(folder)
        assert store.latest() in (whole, whole + 1)
        torn = store.remove_interrupted()
        assert all(name.startswith((str(whole + 1), str(whole + 2))) for name in torn)
        cut += bool(torn)
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        for n in store.steps():
            leaves = store.info(n).leaves
            target = {x.path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for x in leaves}
            assert all(np.all(np.asarray(x) == n) for x in store.restore(n, target).values())
        assert not store.remove_interrupted()
        store.close()
        print(f"moment {i}: host {i % 2} killed, {store.latest()} whole, cut off {torn}", flush=True)
    assert times < 50 or cut, "no moment was inside a save"
