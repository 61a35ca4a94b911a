"""A step recorded on several hosts: each reads its own trace, and all have what all have read."""

from typing import Any

import pytest
from support import several_hosts

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def hosts() -> list[dict[str, Any]]:
    return several_hosts.run("support.hosts_steps:profiled", "fsdp+tp", "data=4 model=2")


def test_every_device_of_all_hosts_is_there_and_its_times_add_up_to_the_step(hosts: list[dict[str, Any]]):
    first, second = (host["measured"] for host in hosts)
    assert {row["file"] for row in first["lines"]} == {"hosts_steps.py"}
    assert first == second, "all hosts have the same"
    assert [each["device"] for each in first["devices"]] == [*range(8)] == [e["device"] for e in first["lanes"]]
    assert (first["recorded"], first["read"], first["of_devices"]) == (2, 2, 8)
    low, high = first["step_s"]["min"], first["step_s"]["max"]
    steps = [sum(each[what] for what in ("compute", "moving", "waiting", "idle")) for each in first["devices"]]
    assert steps == pytest.approx([(low + high) / 2] * 8, rel=1e-3)
    rows = [*first["lines"], *filter(None, (first["others"], first["unknown"]))]
    for what in ("compute", "moving", "waiting"):
        of_lines = sum(row[what] for row in rows)
        assert of_lines == pytest.approx(sum(each[what] for each in first["devices"]) / 8, rel=1e-3, abs=1e-8)
    assert all(lane["starts"][-1] + lane["takes"][-1] <= 2001 for lane in first["lanes"])
    assert {min(lane["starts"][0] for lane in first["lanes"][of]) for of in (slice(4), slice(4, 8))} == {0}
    assert sorted({moved["kind"] for moved in first["collectives"]}) == hosts[0]["kinds"]
    assert all(moved["seconds"] > 0 for moved in first["collectives"])


def test_a_host_that_cannot_record_tells_the_others_and_all_can_later(
    hosts: list[dict[str, Any]],
):
    for what, why in (
        ("tracing", "a trace is running already, and there can be one at a time"),
        ("no room", "no room for copies"),
    ):
        for fails in (0, 1):
            own, other = (hosts[host]["refused"][what][fails] for host in (fails, 1 - fails))
            kind, _, message = own.partition(": ")
            assert message.startswith(why) and kind == {"no room": "MemoryError"}.get(what, "ShardError")
            assert other == f"ShardError: host {fails} could not record train_step: {message}"
    assert all(host["kept"] and host["given"] == 1 for host in hosts)


def test_hosts_that_ask_for_other_steps_are_refused(hosts: list[dict[str, Any]]):
    told = "ShardError: hosts record other steps: 1 of train_step, 2 of train_step. Ask for the same on all of them"
    assert [host["refused"]["other"] for host in hosts] == [[told], [told]]
