"""A training on several hosts that is saved, and goes on there, on fewer and on more."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import hosts_keep, several_hosts

pytestmark = pytest.mark.ci
CALLS = 14


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)  # another user of a host looks into it
        yield Path(name)


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return several_hosts.run("support.hosts_keep:first", str(folder))


@pytest.fixture(scope="module")
def one(folder: Path, two: list[dict[str, Any]]) -> dict[str, Any]:
    shutil.copytree(folder / "loop", folder / "loop of two")
    found = {
        "restored": hosts_keep.restored(str(folder / "state"), "fsdp+tp", "data=4 model=2"),
        "saved": hosts_keep.saved(str(folder / "one"), "dp", "data=8"),
        "whole": hosts_keep.looped(None),
        "resumed": hosts_keep.looped(str(folder / "loop of two"), every=4, resume=True),
    }
    hosts_keep.looped(str(folder / "loop of one"), every=4, stop=6)
    return found


@pytest.fixture(scope="module")
def again(folder: Path, one: dict[str, Any]) -> list[dict[str, Any]]:
    return several_hosts.run("support.hosts_keep:second", str(folder))


def test_a_state_goes_through_a_save_of_two_hosts_and_to_one_process_to_the_bit(two, one):
    for host in two:
        saved = host["saved"]
        assert saved["number"] == 2 and saved["after"] == saved["before"]
        assert saved["losses"] == two[0]["saved"]["losses"]
    assert one["restored"]["after"] == two[0]["saved"]["before"]
    assert one["restored"]["losses"] == pytest.approx(two[0]["saved"]["losses"], rel=1e-5)


def test_a_state_of_one_process_is_laid_out_over_two_hosts_to_the_bit(one, again):
    for host in again:
        assert host["restored"]["after"] == one["saved"]["before"] and host["restored"]["cut"] == 2
        assert host["restored"]["losses"] == pytest.approx(one["saved"]["losses"], rel=1e-5)


def test_a_loop_on_hosts_goes_on_to_the_bit_each_host_with_its_own_rows(two, again):
    for before, host in zip(two, again, strict=True):
        assert host["resumed"]["state"] == before["whole"]["state"]
        assert host["resumed"]["losses"] == before["whole"]["losses"]
        assert host["resumed"]["computed"] == CALLS - 4, "those before the checkpoint are not"
        assert 4 not in host["resumed"]["loaded"], "the first three batches are taken before it is known, no more"


@pytest.mark.parametrize("there", ["one", "two"])
def test_with_other_hosts_the_numbers_are_those_of_a_loop_never_stopped(there, two, one, again):
    for host in [one["resumed"]] if there == "one" else [each["after one"] for each in again]:
        assert host["losses"] == pytest.approx(one["whole"]["losses"], rel=1e-5)
        assert host["loaded"] == [1, 2, 3, *range(4, CALLS + 1)] and host["computed"] == CALLS - 4
        were = "2 hosts, and is by 1 now" if there == "one" else "1 host, and is by 2 now"
        assert f"the data was read by {were}: batches are counted" in host["said"][0]


def test_hosts_time_their_saves_by_one_clock_and_save_at_the_same_calls(two):
    saves = [host["timed"]["saves"] for host in two]
    assert saves[0] == saves[1] and saves[0][-1] == 36
    assert 3 <= len(saves[0]) < 36, "each second of a loop of more than three, and the last"


def test_a_folder_that_a_host_does_not_share_or_may_not_write_is_one_line_on_all(two):
    assert two[0]["refused"] == two[1]["refused"]
    said = two[0]["refused"]
    assert said["read"] == (
        "host 1 doesn't see checkpoint 2 of FOLDER/ckpt that host 0 sees: name a folder on a disk that all hosts share"
    )
    unseen = "host 1 doesn't see what host 0 writes into FOLDER/{}: name a folder on a disk that all hosts share"
    assert said["written"] == unseen.format("new") and said["in a loop"] == unseen.format("loop")
    assert said.get("closed", "not the superuser") in (
        "host 1: this user may not write into FOLDER/closed: name a folder that can be written, or change its mode",
        "not the superuser",
    )


def test_a_save_that_one_host_cannot_write_fails_on_all_and_keeps_the_last(two):
    assert two[0]["full"]["said"] == two[1]["full"]["said"]
    first, by_1, by_0, last = two[0]["full"]["said"]
    assert first == last == "done"
    for said, host, n in ((by_1, 1, 2), (by_0, 0, 3)):
        assert said.startswith(f"host {host}: can't write checkpoint {n} into") and said.endswith("the last one is 1")
    for host in two:
        assert host["full"]["steps"] == [1, 4] and host["full"]["same"]
        assert host["full"]["left"] == [".jaxshard-saving", "1", "4"]
        assert host["full"]["seconds"] < 60, "nobody waits for Orbax's limit"
