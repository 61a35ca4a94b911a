"""Who can reach hosts: what listens where, who gets in without the keys, and where these are to be found."""

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.hosts_notebook import STEP, opened

from jaxshard_magic import ShardError
from jaxshard_magic.config.mesh import MeshSpec
from jaxshard_magic.hosts import engine, starting
from jaxshard_magic.hosts.spec import HostsSpec

SSH = HostsSpec.parse("ssh", "node1,node2")


def listening(pids: set[int]) -> set[str]:
    """The addresses on which these processes listen."""
    found = psutil.net_connections("inet")
    return {c.laddr.ip.removeprefix("::ffff:") for c in found if c.pid in pids and c.status == "LISTEN"}


@pytest.mark.ci
def test_hosts_of_this_machine_listen_locally_and_keys_are_the_users_files(tmp_path: Path):
    with opened(tmp_path) as hosts:
        said = [hosts.cell(f"%%shard fsdp --check\n{STEP}")]
        known = {*hosts.pids, *(process.pid for process in hosts.cluster.hub_processes())}
        assert listening(known) and all(ip.startswith("127.") for ip in listening(known)), listening(known)
        folder = hosts.cluster.folder
        assert folder is not None and folder.stat().st_mode & 0o077 == 0
        files = [*(folder / "security").glob("ipcontroller*.json")]
        assert len(files) == 2 and all(path.stat().st_mode & 0o077 == 0 for path in files)
        engines, client = (json.loads(path.read_text()) for path in sorted(files))
        assert engines["key"] == client["key"]
        keys = {client["key"]}

        line, error = hosts.fails("raise ValueError(repr(__import__('ipyparallel')))")
        said += [hosts.cell("%shard doctor"), hosts.cell("%mesh")]
        shown = [line, error, repr(hosts.magics.session.history[-1].to_dict())]
        shown += [each.stdout + each.stderr + repr([o.data for o in each.outputs]) for each in said]
        hosts.magics.history_writer.write()
        kept = b"".join(path.read_bytes() for path in tmp_path.glob("history.db*"))
        commands = repr([psutil.Process(pid).cmdline() for pid in known])
        for key in keys:
            assert len(key) > 20
            assert not any(key in text for text in (*shown, commands)) and key.encode() not in kept


@pytest.mark.ci
def test_what_simulated_devices_send_goes_through_the_address_that_is_asked_for():
    program = textwrap.dedent(
        """
        import sys, jax
        from jaxshard_magic.coordination import set_gloo_address
        port, me, at = sys.argv[1:]
        jax.config.update("jax_platforms", "cpu")
        set_gloo_address(at or None)
        address = f"127.0.0.1:{port}"
        jax.distributed.initialize(address, 2, int(me), coordinator_bind_address=address)
        import psutil, numpy as np
        from jaxshard_magic.doctor.reachability import reach
        found = reach("x")
        own = {c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"}
        print(sorted(ip for ip in own if "ffff" not in ip), type(found.reduced).__name__)
        """
    )

    def said(at: str) -> list[str]:
        port = str(engine.free_port())
        run = [
            subprocess.Popen([sys.executable, "-c", program, port, str(me), at], stdout=subprocess.PIPE, text=True)
            for me in range(2)
        ]
        return [each.communicate(timeout=120)[0].splitlines()[-1] for each in run]

    assert said("127.0.0.2") == ["['127.0.0.2'] tuple"] * 2, "else it is the address of this machine's name"
    assert said("") == ["[] NoneType"] * 2, "without gloo nothing listens, and no sum is made"


@pytest.mark.ci
def test_hosts_of_other_machines_let_nobody_in_without_the_keys(tmp_path: Path):
    """What ssh and the schedulers get, with engines of this machine in the place of theirs."""
    import ipyparallel as ipp
    import zmq

    given = starting.options(SSH, tmp_path)
    given |= {"engines": "local", "n": 1}
    given["controller_args"] = [each.replace("--ip=*", "--ip=127.0.0.1") for each in given["controller_args"]]
    own: Any = ipp.Cluster(**given)
    try:
        own.start_cluster_sync()
        path = tmp_path / "security" / "ipcontroller-client.json"
        if not path.exists():
            (path,) = (tmp_path / "security").glob("ipcontroller*-client.json")
        known = json.loads(path.read_text())
        assert len(known["curve_serverkey"]) == 40 and path.stat().st_mode & 0o077 == 0

        with ipp.Client(connection_info=known, timeout=20) as client:
            client.wait_for_engines(1, timeout=60, interactive=False)
            assert client[0].apply_sync(int, "7") == 7
        for wrong in (None, zmq.curve_keypair()[0].decode()):
            with pytest.raises(TimeoutError):
                ipp.Client(connection_info={**known, "curve_serverkey": wrong}, timeout=3)
    finally:
        own.stop_cluster_sync()


def test_without_encryption_in_libzmq_hosts_on_other_machines_are_refused(monkeypatch: pytest.MonkeyPatch):
    import zmq

    monkeypatch.setattr(zmq, "has", lambda _: False)
    with pytest.raises(ShardError, match=r"ssh:node1,node2: libzmq .* has no CURVE"):
        starting.start(SSH, 8)
    assert "--ip=*" not in starting.options(HostsSpec.parse("hosts", "2"), Path())["controller_args"]


def test_cpu_devices_of_several_machines_need_the_word_unencrypted():
    with pytest.raises(ShardError, match=r"neither password nor encryption.*%mesh ssh:node1,node2 --unencrypted"):
        starting._check_encryption(SSH, alone=False)
    starting._check_encryption(SSH, alone=True)
    for text in ("ssh:node1,node2 --unencrypted data=8", "ssh:node1,node2 data=8 --unencrypted"):
        spec = MeshSpec.parse(text)
        assert spec.hosts is not None and spec.axes == (("data", 8),)
        assert str(spec) == "ssh:node1,node2 --unencrypted data=8"
        starting._check_encryption(spec.hosts, alone=False)
    with pytest.raises(ShardError, match="hosts:2 listens on this machine alone: leave --unencrypted out"):
        MeshSpec.parse("hosts:2 --unencrypted data=8")


def test_engines_say_whether_they_are_on_one_machine_and_have_accelerators(monkeypatch: pytest.MonkeyPatch):
    from jaxshard_magic.doctor import devices

    here = engine.engine_state()
    assert here.machine == os.uname().nodename == socket.gethostname() and here.machine_id.startswith(here.machine)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(devices, "find_accelerators", lambda: devices.SystemAccelerators(gpu="2 x H100"))
    assert engine.engine_state().accelerators
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert not engine.engine_state().accelerators
