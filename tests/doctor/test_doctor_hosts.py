"""What the doctor tells of several hosts: from what they said, and of two real ones that are well, dead or frozen."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from support.hosts_notebook import LOOP, Hosts, opened

import jaxshard_magic
from jaxshard_magic.doctor import Doctor, DoctorFinding
from jaxshard_magic.doctor.hosts import Host, host_findings
from jaxshard_magic.doctor.reachability import SILENT, Reachability, rounds
from jaxshard_magic.views.format import SPACE

AGAIN = "%mesh hosts:2 data=8 starts new ones"
HOST = Host("node1", {"python": "3.12.1", "jax": "0.10.2", "flax": "0.12"}, "cpu", "cpu", 4)
WELL = (Reachability((0, 1), ((1, 2e-4),), (1e-3, 1e-2)), Reachability((0, 1), ((0, 3e-4),), (2e-3, 2e-2)))


def told(hosts=(HOST, HOST), gone=None, reached=WELL, kernel=None) -> dict[str, DoctorFinding]:
    found = [
        replace(f, value=f.value.replace(SPACE, " ")) for f in host_findings(hosts, gone or {}, reached, AGAIN, kernel)
    ]
    assert all(f.remedy for f in found if f.level in ("warning", "error")), "each failure has its remedy"
    return {f.name: f for f in found}


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_in_a_tournament_all_pairs_meet_once_and_nobody_twice_in_a_round(count: int):
    seen = [list(rounds(me, count)) for me in range(count)]
    assert len({len(each) for each in seen}) == 1
    for me, each in enumerate(seen):
        assert sorted(peer for peer in each if peer is not None) == [p for p in range(count) if p != me]
        assert all(seen[peer][i] == me for i, peer in enumerate(each) if peer is not None)


def test_two_hosts_that_are_alike_and_reach_each_other_are_well():
    found = told()
    assert {f.level for f in found.values()} == {"ok"}
    assert "host 0 with host 1, takes 300" in found["pairs"].value, "the slower of both hosts' times"
    # A ring of two sends the array once: 4 bytes * 2**22 in 20 ms, the slower host's.
    assert "4 bytes in 2.00 ms, 16 MiB at 0.839 GB/s; simulated devices of one machine" in found["all-reduce"].value


def test_a_version_that_differs_names_who_has_which_and_what_to_do():
    other = replace(HOST, versions={"python": "3.12.1", "jax": "0.12.0", "flax": "0.12"})
    found = told((HOST, HOST, other), reached=(WELL[0],) * 3)["jax"]
    assert (found.level, found.value) == ("error", "0.10.2 on host 0, host 1; 0.12.0 on host 2")
    assert found.remedy == f"on host 2: pip install jax==0.10.2; then restart the hosts: {AGAIN}"
    flax = told((HOST, replace(HOST, versions={"python": "3.12.1", "jax": "0.10.2"})))["flax"]
    assert (flax.level, flax.value) == ("warning", "0.12 on host 0; none on host 1")


def test_a_kernel_whose_versions_are_apart_is_a_warning():
    found = told(kernel={"python": "3.12.1", "jax": "0.12.0", "flax": "0.12"})["jax"]
    assert found.level == "warning" and found.value == "0.10.2 on host 0, host 1; 0.12.0 in the kernel"
    assert (found.remedy or "").startswith("in the kernel: pip install jax==0.10.2; then restart the kernel and")


def test_devices_of_two_kinds_or_not_as_many_each_are_told():
    kinds = told((replace(HOST, platform="gpu", kind="H100"), replace(HOST, platform="gpu", kind="A100")))["devices"]
    assert kinds.level == "error" and kinds.value == "not of one kind: 4 x H100 on host 0; 4 x A100 on host 1"
    fewer = told((HOST, replace(HOST, devices=3)))["devices"]
    assert fewer.level == "warning" and fewer.value == "not as many each: 4 x cpu on host 0; 3 x cpu on host 1"
    assert "3 now" in (fewer.remedy or "")


def test_a_host_that_does_not_answer_is_told_and_nothing_else_is_tried():
    found = told(gone={1: "died (SIGKILL)"}, reached=())
    assert found["host 1"] == DoctorFinding("hosts", "host 1", "died (SIGKILL) (on node1)", "error", AGAIN)
    assert "pairs" not in found and found["reach"].value == "not tried, as host 1 does not answer"
    assert found["versions"].level == "ok", "what was known when it joined"


def test_a_pair_that_does_not_reach_each_other_is_named_and_no_other():
    well, bad = (1, 1e-4), SILENT
    hosts = (HOST,) * 3
    reached = (
        Reachability((0, 1, 2), (well,)),
        Reachability((0, 1, 2), ((0, 1e-4), (2, bad))),
        Reachability((0, 1, 2), ((1, bad),)),
    )
    found = list(host_findings(hosts, {}, reached, AGAIN))
    pairs = [f for f in found if f.name == "pairs"]
    assert [f.level for f in pairs] == ["error", "info"]
    assert pairs[0].value == "host 1 and host 2: their all-reduce has not ended"
    assert pairs[1].value.startswith("1 of 3 ")
    assert [f.level for f in found if f.name == "all-reduce"] == ["info"]


def test_a_host_that_is_not_heard_through_the_coordinator_is_told():
    found = told(reached=(Reachability((0,)), None))
    assert found["coordination"].level == "error" and found["coordination"].value.startswith("host 1 has not heard")
    assert found["pairs"].level == found["all-reduce"].level == "info"


# Two real hosts


@pytest.mark.ci
def test_the_doctor_looks_at_two_hosts_and_ends_where_one_is_frozen_or_dead(tmp_path: Path):
    with opened(tmp_path) as hosts:
        well = by_name(examined(hosts))
        assert well["hosts"].value.startswith("2 on ") and well["devices"].value == "4 x cpu on each of 2 hosts"
        assert well["pairs"].value.startswith("1 of 1 pair: sums right; measured: ")
        assert re.search(r"4 bytes in .*s, 16 MiB at .*/s; simulated devices of one", well["all-reduce"].value)
        assert {f.level for f in well.values()} == {"ok"}
        said = jaxshard_magic.doctor(hosts.cluster)
        assert "area" not in said.to_text() and "coordination" in said.to_text() and "all-reduce" in said.to_html()
        hosts.cell("print(jax.device_count())")  # they go on

        os.kill(hosts.pids[1], signal.SIGSTOP)
        frozen = by_name(examined(hosts))
        assert frozen["host 1"].level == "error" and "no longer answers" in frozen["host 1"].value
        assert frozen["host 1"].remedy == AGAIN
        os.kill(hosts.pids[1], signal.SIGKILL)
        dead = by_name(examined(hosts))
        assert "pairs" not in dead and dead["host 1"].level == "error"
        line, _ = hosts.fails(LOOP)
        assert line.startswith("host 1 ")
        buried = by_name(examined(hosts))
        assert buried["host 1"].level == "error" and buried["versions"].level == "ok"


@pytest.mark.ci
def test_programs_on_hosts_examine_themselves_even_if_one_is_missing(tmp_path: Path):
    program = textwrap.dedent(
        """
        import dataclasses, functools, json, sys
        import jax
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 2)
        port, me = sys.argv[1:]
        address = f"127.0.0.1:{port}"
        jax.distributed.initialize(address, 2, int(me), coordinator_bind_address=address)
        import jaxshard_magic
        from jaxshard_magic.doctor import connectivity, hosts
        said = [jaxshard_magic.doctor()]
        if me == "0":
            connectivity.connectivity = functools.partial(connectivity.connectivity, limit_s=2.0)
            hosts.SERVICE_S = 1.0
            said.append(jaxshard_magic.doctor("data=2"))
        print(json.dumps([[dataclasses.asdict(f) for f in each.findings if f.area == "hosts"] for each in said]))
        """
    )
    from jaxshard_magic.hosts import engine

    port = str(engine.free_port())
    run = [
        subprocess.Popen([sys.executable, "-c", program, port, str(me)], stdout=subprocess.PIPE, text=True)
        for me in range(2)
    ]
    out = [each.communicate(timeout=120)[0] for each in run]
    first, second = (json.loads(text.splitlines()[-1]) for text in out)
    for found in (first[0], second[0]):
        assert {f["level"] for f in found} == {"ok"}
        assert [f["name"] for f in found][-2:] == ["pairs", "all-reduce"]
    (alone,) = first[1]
    assert alone["level"] == "error" and alone["value"].startswith("host 1: not come to this examination within")


def examined(hosts: Hosts) -> Doctor:
    hosts.cell("%shard doctor -o found")
    return hosts.notebook["found"]


def by_name(found: Doctor) -> dict[str, DoctorFinding]:
    return {f.name: f for f in found.findings if f.area == "hosts"}
