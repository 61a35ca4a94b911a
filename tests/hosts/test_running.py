"""A mesh over engines that somebody else has started with `ipcluster`, which go on after it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import shell
from support.hosts_notebook import SETUP, STEP, Hosts, Notebook, gone

from jaxshard_magic import ShardError
from jaxshard_magic.hosts import engine, starting
from jaxshard_magic.hosts.spec import HostsSpec

PROFILE = "ours"
SPEC = HostsSpec.parse("cluster", PROFILE)


@contextmanager
def started(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two engines under a profile of an IPython folder of their own; the folder of the profile."""
    patch.setenv("IPYTHONDIR", str(folder))
    ipcluster = [sys.executable, "-m", "ipyparallel.cluster"]
    run = subprocess.Popen(
        [*ipcluster, "start", "-n", "2", f"--profile={PROFILE}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        file = folder / f"profile_{PROFILE}" / "security" / "ipcontroller-client.json"
        end = time.monotonic() + 60
        while not file.exists() and time.monotonic() < end:
            time.sleep(0.1)
        yield file
    finally:
        subprocess.run([*ipcluster, "stop", f"--profile={PROFILE}"], capture_output=True, timeout=60)
        run.wait(30)


@pytest.mark.ci
def test_engines_of_ipcluster_take_a_mesh_again_and_again_and_go_on_after_it(tmp_path: Path):
    import ipyparallel as ipp

    with pytest.MonkeyPatch.context() as patch, started(tmp_path / "ipython", patch) as file:
        patch.setenv("JAXSHARD_HISTORY", str(tmp_path / "history.db"))
        with shell() as found:
            found.run_line_magic("load_ext", "jaxshard_magic")
            hosts = Hosts(Notebook(found), tmp_path)
            line, _ = hosts.fails(f"%mesh cluster:{PROFILE} data=7")
            assert line == "7 devices don't divide over 2 hosts; a mesh takes as many of each"

            for name in (PROFILE, str(file)):
                opened = hosts.cell(f"%mesh cluster:{name} data=8")
                assert "data=8   8 simulated CPU devices on 2 hosts" in opened.outputs[0].data["text/plain"]
                pids = hosts.pids
                hosts.cell(SETUP)
                said = hosts.cell(f"%%shard dp --check\n{STEP}")
                assert any("train_step" in o.data.get("text/plain", "") for o in said.outputs)
                report = hosts.magics.session.history[-1]
                assert report.check is not None and report.check.passed and report.mesh.processes == 2
                line, _ = hosts.fails("if jax.process_index(): raise ValueError('no')\ntrain_step(state, batch)")
                assert line.startswith("host 1: ValueError: no; the others ended with it")
                hosts.cell("%shard doctor -o found")
                assert hosts.notebook["found"].ok
                closed = hosts.cell("%mesh --close")
                assert f"The 2 engines of cluster:{name} go on" in closed.stdout
                assert not gone(pids, 1)

            line, _ = hosts.fails(f"%mesh cluster:{PROFILE} data=16")
            assert "has 8 CPU devices, those that its hosts joined with, and the mesh takes 16" in line
            assert "restart the engines" in line

            with ipp.Client(str(file), timeout=10) as client:  # they are their owner's as before
                assert client[:].apply_sync(int, "7") == [7, 7]
                kernel = "__import__('IPython').get_ipython().kernel"
                assert client[1].apply_sync(eval, f"{kernel}.saved_sigint_handler.__name__") == "default_int_handler"
                busy = client[1].apply_async(time.sleep, 4)
                patch.setattr(starting, "ANSWER_S", 1.5)
                line, _ = hosts.fails(f"%mesh cluster:{PROFILE} data=8")
                assert line.startswith(
                    f"a host of cluster:{PROFILE} has not answered within 1.5 s: restart the engines"
                )
                busy.get(20)
            hosts.cell(f"%mesh cluster:{PROFILE} data=8")
            hosts.cell("assert float(loss) == float(loss)")  # what cells made is there
            hosts.cell("%mesh --close")


def stand(group: str | None) -> engine.EngineState:
    return engine.EngineState("here", "here", False, group)


class Engines:
    """The part of a cluster that joining asks."""

    def __init__(self, processes: list[int], hosts: int):
        self.spec, self.restart_hint = SPEC, SPEC.restart_hint(2, "data=8")
        self._joined = [engine.JoinedHost(p, hosts, 1, "m", ("cpu:0",), "cpu", "cpu", {}) for p in processes]

    def __len__(self) -> int:
        return 2

    def call(self, function: Any) -> Any:
        return self._joined


def test_engines_that_joined_others_have_to_be_restarted_and_the_line_says_how():
    both: Any = Engines([1, 0], 2)
    assert starting._joined_before(both, [stand(None), stand(None)]) == []
    assert len(starting._joined_before(both, [stand("a"), stand("a")])) == 2
    restart = r"restart the engines: ipcluster stop --profile=ours; ipcluster start -n 2 --profile=ours; then %mesh"
    for groups in (("a", None), ("a", "b")):
        with pytest.raises(ShardError, match=restart):
            starting._joined_before(both, [stand(group) for group in groups])
    of_three: Any = Engines([0, 2], 3)
    with pytest.raises(ShardError, match=restart):
        starting._joined_before(of_three, [stand("a"), stand("a")])


@pytest.mark.ci
def test_a_cluster_that_is_not_there_is_told_with_what_starts_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    with pytest.raises(ShardError, match=r"cluster:ours: .*\. ipcluster start -n 2 --profile=ours starts one"):
        starting.start(SPEC, 8)
    nobody = tmp_path / "ipcontroller-client.json"
    nobody.write_text(json.dumps({"ssh": "", "interface": "tcp://127.0.0.1", "location": os.uname().nodename}))
    with pytest.raises(ShardError, match=r"ipcluster start -n 2 starts one"):
        starting.start(HostsSpec.parse("cluster", str(nobody)), 8)
