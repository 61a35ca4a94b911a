"""A cell with --checkpoint on two real hosts: however it ends, it goes on where it was, there and on what is left."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts_notebook import SETUP, Hosts, once, opened

from jaxshard_magic.checkpoints.folder import META

pytestmark = pytest.mark.ci

TRAINING = """
import optax
tx, rng = optax.adam(1e-3), np.random.default_rng(0)
weights = {"up": rng.normal(size=(256, 512)).astype("f") / 16, "down": rng.normal(size=(512, 256)).astype("f") / 22}
state, losses = (weights, tx.init(weights)), []

def train_step(state, batch):
    weights, moments = state
    def loss_fn(weights):
        return jnp.mean((jnp.tanh(batch @ weights["up"]) @ weights["down"] - batch) ** 2)
    loss, grads = jax.value_and_grad(loss_fn)(weights)
    updates, moments = tx.update(grads, moments, weights)
    return (optax.apply_updates(weights, updates), moments), loss

for i in range(CALLS):
    state, loss = train_step(state, rng.normal(size=(16, 256)).astype("f"))
    losses.append(float(loss))
    THEN
"""


def training(line: str = "", calls: str = "12", then: str = "pass") -> str:
    return f"%%shard fsdp {line}\n{TRAINING.replace('CALLS', calls).replace('THEN', then)}"


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(each.name) for each in folder.iterdir() if each.name.isdecimal())


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with opened(tmp_path_factory.mktemp("hosts")) as found:
        yield found


@pytest.fixture(scope="module")
def whole(hosts: Hosts) -> list[float]:
    """The losses of a training that nothing stops."""
    hosts.cell(training())
    first, second = hosts.everywhere("losses")
    assert first == second
    return first


def test_stopped_by_an_exception_on_one_host_it_saves_once_more_and_goes_on(
    hosts: Hosts, whole: list[float], tmp_path: Path
):
    line = f"--checkpoint {tmp_path}/run --every 3 --resume"
    raises = "if i == 4 and jax.process_index() == 1: raise FileNotFoundError('data-3.npz')"
    said, _ = hosts.fails(training(line, then=raises))
    assert said == (
        "host 1: FileNotFoundError: data-3.npz; the others ended with it; all hosts hold the state of step 5"
    )
    assert checkpoints(tmp_path / "run") == [3, 5]
    hosts.cell(training(line))
    assert hosts.everywhere("losses") == [whole, whole]


def test_interrupted_it_saves_once_more_on_all_hosts(hosts: Hosts, tmp_path: Path):
    once((tmp_path / "run" / "10").exists, lambda: os.kill(os.getpid(), signal.SIGINT))
    said, _ = hosts.fails(training(f"--checkpoint {tmp_path}/run --every 10", calls="10**6", then="time.sleep(0.05)"))
    step = int(said.partition("Stopped at step ")[2].split()[0])
    assert f"saved at step {step} in {tmp_path}/run" in said
    assert checkpoints(tmp_path / "run")[-1] == step


def test_a_loop_shorter_on_one_host_ends_with_a_line_and_a_whole_checkpoint(hosts: Hosts, tmp_path: Path):
    line, _ = hosts.fails(training(f"--checkpoint {tmp_path}/run --every 3", calls="12 - 4 * jax.process_index()"))
    assert line == "host 1: its loop had ended"
    first, second, *last = checkpoints(tmp_path / "run")
    assert (first, second) == (3, 6) and last in ([], [8]), "all hold the state of step 8, unless 6 was being written"


def test_a_folder_with_checkpoints_is_refused_on_all_hosts_in_one_line(hosts: Hosts, tmp_path: Path):
    (tmp_path / "run" / "7" / META).mkdir(parents=True)
    line, said = hosts.fails(training(f"--checkpoint {tmp_path}/run"))
    assert line.startswith(f"--checkpoint {tmp_path}/run: it has checkpoint 7 of a run before")
    assert said.count("\n") == 1


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.full)])
def test_after_a_host_is_killed_new_hosts_or_one_go_on_with_the_same_numbers(
    victim: int, whole: list[float], tmp_path: Path
):
    with opened(tmp_path) as hosts:
        line = f"--checkpoint {tmp_path}/run --every 2 --resume"
        pids = hosts.pids

        def kill() -> None:
            time.sleep(0.2)
            os.kill(pids[victim], signal.SIGKILL)

        once((tmp_path / "run" / "4").exists, kill)
        said, _ = hosts.fails(training(line, then="time.sleep(0.1)"))
        assert f"host {victim} died (SIGKILL)" in said and said.endswith("starts new ones")
        saved = checkpoints(tmp_path / "run")[-1]
        assert 4 <= saved < 12
        shutil.copytree(tmp_path / "run", tmp_path / "rest")
        hosts.cell("%mesh hosts:2 data=8")
        hosts.cell(SETUP)
        said = hosts.cell(training(line))
        assert hosts.everywhere("losses") == [whole, whole], "to the bit"
        assert hosts.magics.session.history[-1].checkpoints.resumed == saved
        hosts.cell("%mesh cpu:4 data=4")
        hosts.cell(SETUP)
        hosts.cell(training(line.replace("/run", "/rest")))
        assert hosts.notebook["losses"] == pytest.approx(whole, rel=1e-5)
        assert hosts.notebook["losses"][:saved] == whole[:saved], "those are what they were"
