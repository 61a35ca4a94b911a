"""A notebook whose cells run on two real processes: what they say, what they have, and every way in which they fail."""

import gc
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ipyparallel as ipp
import psutil
import pytest
from IPython.utils.capture import capture_output
from support.hosts_notebook import LOOP, SETUP, STEP, Hosts, gone, later, training
from traitlets.config import Config

from jaxshard_magic import Report, ShardError
from jaxshard_magic.config.mesh import MeshSpec
from jaxshard_magic.hosts import cell_run, starting
from jaxshard_magic.hosts.spec import HostsSpec
from jaxshard_magic.notebook.hosts_values import HostNamespace
from jaxshard_magic.views.format import SPACE

pytestmark = pytest.mark.ci

interrupt = partial(os.kill, os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two hosts that train; no test ends them."""
    with training(tmp_path_factory.mktemp("hosts"), "%%shard fsdp --check") as found:
        yield found


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts of a test's own, which train under dp."""
    with training(tmp_path, "%%shard dp") as found:
        yield found


def test_a_cell_says_what_host_0_says_and_what_another_says_otherwise(hosts: Hosts):
    same = hosts.cell("print('training on', jax.device_count())")
    assert same.stdout == "training on 8\n" and not same.outputs
    other = hosts.cell("print('I am', jax.process_index())")
    assert other.stdout == "I am 0\n"
    (folded,) = other.outputs
    assert folded.data["text/plain"] == "host 1: I am 1"
    assert "<details><summary>host 1</summary>" in folded.data["text/html"]


def test_the_value_of_a_cell_is_that_of_host_0(hosts: Hosts):
    with capture_output():
        value = hosts.notebook.run("2 ** jax.process_count()")
    assert repr(value) == "4"


def test_the_report_of_a_step_on_hosts_is_this_notebooks_own(hosts: Hosts):
    said = hosts.cell(f"%%shard fsdp --check\n{STEP}")
    texts = [o.data.get("text/plain", "") for o in said.outputs]
    (text,) = [text for text in texts if "train_step" in text and "report" in text]  # a slow compile has a line
    report = hosts.magics.session.history[-1]
    assert isinstance(report, Report) and report.mesh.processes == 2
    assert report.check is not None and report.check.passed
    number = len(hosts.notebook["In"]) - 1
    assert f"cell [{number}], line" in text and f"report {report.number}" in text
    again = hosts.cell("%shard")
    assert "fsdp" in again.outputs[0].data["text/plain"]
    assert str(report.number) in repr(hosts.notebook.run("%shard history --limit 1").to_text())


def test_names_of_the_kernel_go_along_where_they_are_small_or_can_be_made_there(hosts: Hosts):
    hosts.cell(
        "%%here\nimport math as maths\nfactor = 3\n\n"
        "def scaled(x):\n    return inner(x) * factor\n\ndef inner(x):\n    return maths.floor(x)\n"
    )
    said = hosts.cell("print(scaled(2.5))")
    assert said.stdout.endswith("6\n")
    assert "to the hosts: " in said.stdout
    told = said.stdout.partition("to the hosts: ")[2].partition("\n")[0]
    assert set(told.split(", ")) == {"scaled", "inner", "maths", "factor"}
    assert hosts.cell("print(scaled(3.5))").stdout == "9\n", "they are there now"


def test_names_bound_anew_are_followed_while_hosts_have_what_was_sent(hosts: Hosts):
    for rate in (0.1, 0.2):
        hosts.cell(f"%%here\nrate = {rate}\ndef of_rate(): return rate * 2")
        assert hosts.cell("print(rate, of_rate())").stdout.splitlines()[-1] == f"{rate} {rate * 2}"
    hosts.cell("rate = 5")
    hosts.cell("%%here\nrate = 0.3")
    assert hosts.cell("print(rate, of_rate())").stdout == "5 10\n", "the hosts' own"


def test_a_cell_that_names_what_cannot_be_sent_runs_until_that_is_read(hosts: Hosts):
    hosts.cell("%%here\nimport threading\nh = threading.Lock()")
    made = len(hosts.notebook["In"]) - 1
    own = "def double(h): return h * 2\ndef locked():\n    with h: pass\nprint([h for h in range(2)], double(2))"
    assert hosts.cell(own).stdout == "[0, 1] 4\n"
    line = f"h is in this kernel, and not on the hosts: run cell [{made}], which makes it, again, there"
    assert hosts.fails("locked()")[0] == line == hosts.fails("with h: pass")[0]
    assert hosts.cell("h = 3\nprint(h)").stdout == "3\n"


def test_a_value_that_is_too_large_is_named_with_the_cell_that_makes_it(hosts: Hosts):
    hosts.cell("%%here\nimport numpy as np\nlarge = np.zeros(10**7)")
    made = len(hosts.notebook["In"]) - 1
    line, _ = hosts.fails("print(large.sum())")
    assert line.replace(SPACE, " ") == (
        "large is in this kernel and takes 76.3 MiB, and not on the hosts: "
        f"run cell [{made}], which makes it, again, there"
    )


def test_here_is_the_kernel_and_the_mesh_line_shows_every_device(hosts: Hosts):
    hosts.cell("%%here\nown = __import__('os').getpid()")
    assert hosts.notebook["own"] == os.getpid()
    shown = hosts.cell("%mesh").outputs[0].data["text/plain"].splitlines()
    assert shown[0] == "data=8   8 simulated CPU devices on 2 hosts"
    assert shown[-1].split()[:2] == ["host", "1"] and shown[-1].endswith("0: 4  1: 5  2: 6  3: 7")


def test_names_of_the_hosts_complete(hosts: Hosts):
    completes = hosts.notebook.shell.complete
    end = time.monotonic() + 20  # a host that is slow to answer is not waited for: nobody waits for Tab
    while not (found := completes("", "print(bat", 9)[1]) and time.monotonic() < end:
        time.sleep(0.2)
    assert "batch" in found
    assert "train_step" in completes("", "train_", 6)[1]
    assert any(word.endswith(".keys") for word in completes("", "batch.ke", 8)[1])


def test_an_error_on_all_hosts_is_told_once(hosts: Hosts):
    line, said = hosts.fails("1 / 0")
    assert line == "ZeroDivisionError: division by zero, on all 2 hosts"
    assert said.count("Traceback") == 1


def test_what_is_refused_on_the_hosts_is_one_line(hosts: Hosts):
    line, said = hosts.fails("%%shard fsdpp\n" + STEP)
    assert line.startswith("'fsdpp' is no strategy") and said.count("\n") == 1
    different = "{name: rows + jax.process_index() for name, rows in batch.items()}"
    line, said = hosts.fails(
        f"%%shard fsdp\n{STEP.rpartition('state, loss')[0]}state, loss = train_step(state, {different})"
    )
    assert line.startswith("train_step: batch.x is not the same on all 2 hosts.") and said.count("\n") == 1
    hosts.cell(f"%%shard fsdp --check\n{STEP}")


def test_an_exception_on_one_host_ends_the_cell_at_the_same_step_on_all(hosts: Hosts):
    line, said = hosts.fails(
        "n = 0\nfor i in range(10**6):\n    state, loss = train_step(state, batch)\n    n += 1\n"
        "    if i == 20 and jax.process_index() == 1: raise FileNotFoundError('data-3.npz')"
    )
    assert line == (
        "host 1: FileNotFoundError: data-3.npz; the others ended with it; all hosts hold the state of step 21"
    )
    assert "FileNotFoundError" in said and "jaxshard_magic/" not in said
    assert len(set(hosts.everywhere("n"))) == 1
    hosts.cell("state, loss = train_step(state, batch)\nassert float(loss) == float(loss)")


def test_a_cell_that_is_shorter_on_one_host_ends_with_a_line(hosts: Hosts):
    line, _ = hosts.fails("for i in range(40 - 10 * jax.process_index()):\n    state, loss = train_step(state, batch)")
    assert line.startswith("host 1: its cell had ended")
    hosts.cell("state, loss = train_step(state, batch)")


@pytest.mark.parametrize("times", [6, pytest.param(200, marks=pytest.mark.full)])
def test_an_interrupt_at_any_time_leaves_all_hosts_after_the_same_step(hosts: Hosts, times: int):
    draw = random.Random(times)
    for _ in range(times):
        hosts.cell("n = 0")
        later(0.1 + draw.random() / 2, interrupt)
        line, said = hosts.fails(LOOP)
        assert line.startswith("Stopped ") and "steps, the hosts after" not in line and "jaxshard_magic/" not in said
        assert len(set(hosts.everywhere("n"))) == 1
    hosts.cell("state, loss = train_step(state, batch)\nassert np.isfinite(float(loss))")


def test_an_interrupt_during_a_garbage_collection_stops_the_cell(hosts: Hosts, monkeypatch: pytest.MonkeyPatch):
    bring, came = HostNamespace.send_missing, list[str]()

    def interrupted(phase: str, _: object = None) -> None:
        if not came:
            came.append(phase)
            signal.raise_signal(signal.SIGINT)

    def slow(names: HostNamespace, text: str) -> object:
        gc.callbacks.append(interrupted)  # what is raised in one is printed and goes no further
        try:
            made = [[] for _ in range(10 * gc.get_threshold()[0])]
        finally:
            gc.callbacks.remove(interrupted)
        interrupted(f"none while {len(made)} objects were made")
        return bring(names, text)

    monkeypatch.setattr(HostNamespace, "send_missing", slow)
    hosts.cell("%%here\nn = 0")
    line, _ = hosts.fails("print(n)")
    assert line == cell_run.NOT_BEGUN and came[0] in ("start", "stop")


def test_an_interrupt_reaches_a_host_that_never_says_that_its_cell_has_begun(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cell_run, "BEGUN", "another message")
    monkeypatch.setattr(cell_run, "UNHEARD_S", 1.0)
    hosts.cell("n = 0")
    line, _ = hosts.fails_in_steps(interrupt)
    assert line.startswith("Stopped ")
    assert len(set(hosts.everywhere("n"))) == 1


@pytest.mark.parametrize("asked", [False, True])
def test_an_interrupt_that_comes_before_a_busy_host_begins_is_not_lost(hosts: Hosts, asked: bool):
    hosts.cell("n = 0")
    sleeps = hosts.cluster.client[hosts.cluster.ids[0]].apply_async(time.sleep, 1)
    if asked:  # after its names were brought there
        with cell_run.Interrupts() as interrupts:
            later(0.5, interrupt)
            line = cell_run.run_on_hosts(hosts.cluster, LOOP, "late", 1, lambda *_: None, interrupts).summary()
    else:
        later(0.5, interrupt)
        line, said = hosts.fails(LOOP)
        assert "jaxshard_magic/" not in said
    assert line.startswith("Stopped ")
    sleeps.get(20)
    assert len(set(hosts.everywhere("n"))) == 1
    hosts.cell("state, loss = train_step(state, batch)")


def test_a_cell_without_a_step_is_interrupted_too(hosts: Hosts):
    later(0.5, interrupt)
    line, _ = hosts.fails("time.sleep(60)")
    assert line.startswith("Stopped")


def test_a_comparison_runs_on_hosts(hosts: Hosts):
    said = hosts.cell(f"%%shard dp,fsdp,pp --on v5e\n{STEP}")
    text = max((o.data["text/plain"] for o in said.outputs), key=len)
    assert "fsdp" in text and "pp on 2 hosts" in text


def test_two_clusters_do_not_know_each_other(hosts: Hosts):
    other = starting.start(HostsSpec.parse("hosts", "2"), 4)
    try:
        os.kill(other.joined[1].pid, signal.SIGKILL)
        hosts.cell("for _ in range(5):\n    state, loss = train_step(state, batch)")
    finally:
        other.kill()
    hosts.cell("for _ in range(5):\n    state, loss = train_step(state, batch)")


def test_hosts_of_two_kernels_do_not_know_each_other(hosts: Hosts):
    program = textwrap.dedent(
        """
        import jaxshard_magic
        own = jaxshard_magic.mesh("hosts:2 data=4")
        own.run("import jax; print(jax.device_count())")
        own.close()
        """
    )
    other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    steps = 0
    while other.poll() is None:
        hosts.cell("for _ in range(5):\n    state, loss = train_step(state, batch)")
        steps += 1
    assert other.communicate()[0] == "4\n" and other.returncode == 0 and steps > 1
    assert hosts.cell("print(jax.device_count())").stdout == "8\n"


def test_a_host_that_is_killed_is_told_and_one_line_begins_again(mortal: Hosts):
    for host in (1, 0):
        old = mortal.pids
        line, _ = mortal.fails_in_steps(partial(os.kill, old[host], signal.SIGKILL))
        # jaxlib's gloo ends now and then a process whose peer dies in the middle of a message: then both are named.
        assert re.match(rf"host {host} died \(SIGKILL\)( and host {1 - host} died( \(\w+\))?)? \d", line)
        assert line.endswith("%mesh hosts:2 data=8 starts new ones")
        line, _ = mortal.fails("print(1)")
        assert line.startswith("the hosts are gone (host")
        mortal.cell("%mesh hosts:2 data=8")
        assert gone(old)
        mortal.cell(SETUP)
        mortal.cell(f"%%shard dp\n{STEP}")


def test_what_a_survivor_has_whole_is_rescued_under_dp(mortal: Hosts):
    mortal.fails_in_steps(partial(os.kill, mortal.pids[1], signal.SIGKILL))
    if gone(mortal.pids[:1], 1):  # jaxlib's gloo ends a process whose peer dies in the middle of a message
        line, _ = mortal.fails("%shard rescue state")
        assert "state" not in mortal.notebook.shell.user_ns and "starts new ones" in line
        return
    said = mortal.cell("%shard rescue state")
    assert said.stdout == "state: brought to this kernel from host 0, as NumPy arrays\n"
    assert {name: value.shape for name, value in mortal.notebook["state"].items()} == {
        "up": (32, 64),
        "down": (64, 32),
    }


def test_a_host_that_dies_between_cells_is_told_by_the_next(mortal: Hosts):
    os.kill(mortal.pids[1], signal.SIGKILL)
    assert gone(mortal.pids[1:], 5)
    end = time.monotonic() + 5
    while not mortal.cluster.lost_hosts() and time.monotonic() < end:
        time.sleep(0.05)
    line, _ = mortal.fails("print(state['up'].shape)")
    assert line.startswith("host 1 died (SIGKILL) before the cell. What host 0 has whole")
    assert mortal.cell("%shard rescue state").stdout.startswith("state: brought to this kernel from host 0")


def test_a_host_that_is_lost_as_a_cell_is_asked_for_is_told(mortal: Hosts, monkeypatch: pytest.MonkeyPatch):
    begin = cell_run._start_cell

    def killed_first(cluster, host, *more):
        if host == 1:
            os.kill(mortal.pids[1], signal.SIGKILL)
            end = time.monotonic() + 10
            while not cluster.lost_hosts() and time.monotonic() < end:
                time.sleep(0.05)
        return begin(cluster, host, *more)

    monkeypatch.setattr(cell_run, "_start_cell", killed_first)
    line, _ = mortal.fails("print(1)")
    assert line.startswith("host 1 died (SIGKILL) before the cell")


def test_a_host_that_is_frozen_is_told(mortal: Hosts):
    line, _ = mortal.fails_in_steps(partial(os.kill, mortal.pids[1], signal.SIGSTOP))
    assert line.startswith("host 1 no longer answers")
    pids = mortal.pids
    mortal.magics.hosts.close()
    assert gone(pids)


def test_a_hub_that_is_killed_is_told_and_nothing_is_left(mortal: Hosts):
    pids, hub = mortal.pids, mortal.cluster.hub_processes()
    line, _ = mortal.fails_in_steps(hub[0].kill)
    assert line.startswith("the process that connects the hosts died; all hosts were ended")
    assert gone([*pids, *(process.pid for process in hub)])


def test_hosts_that_come_late_are_waited_for_and_then_counted(monkeypatch: pytest.MonkeyPatch):
    """The first engine comes at once; the second after 6 s, or never. The limit begins to run once the first is there,
    which on a busy machine takes longer than the limit."""
    slow = textwrap.dedent(
        """
        import os, runpy, sys, time
        first = os.path.join(os.environ["IPP_PROFILE_DIR"], "first")
        try:
            os.close(os.open(first, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            time.sleep({seconds})
        sys.argv[0] = "ipengine"
        runpy.run_module("ipyparallel.engine", run_name="__main__", alter_sys=True)
        """
    )
    plain = starting.options

    def delayed(seconds: int) -> None:
        config = Config()
        config.LocalEngineSetLauncher.engine_cmd = [sys.executable, "-c", slow.format(seconds=seconds)]
        monkeypatch.setattr(starting, "options", lambda *given: plain(*given) | {"config": config})

    def engines() -> list[int]:
        ours = psutil.Process().children(recursive=True)
        commands = {p.pid: p.info["cmdline"] or () for p in psutil.process_iter(["cmdline"]) if p in ours}
        return [pid for pid, words in commands.items() if any("IPP_PROFILE_DIR" in word for word in words)]

    spec = HostsSpec.parse("hosts", "2")
    delayed(6)
    start = time.monotonic()
    found = starting.start(spec, 4)
    try:
        assert len(found.joined) == 2 and time.monotonic() - start > 6
        assert len(engines()) == 2
    finally:
        found.kill()
    delayed(600)
    waits = ipp.Client.wait_for_engines

    def after_the_first(client: ipp.Client, count: int, **given: Any) -> None:
        waits(client, 1, timeout=starting.LIMIT_S, interactive=False)
        waits(client, count, **given)

    monkeypatch.setattr(ipp.Client, "wait_for_engines", after_the_first)
    with pytest.raises(ShardError, match=r"hosts:2: 1 of 2 hosts came within 3 s\. %config ShardSession\.hosts_limit"):
        starting.start(spec, 4, limit_s=3.0)
    assert gone(engines()), "the one that sleeps, too"


def test_nothing_is_left_of_a_kernel_that_is_killed(tmp_path: Path):
    script = textwrap.dedent(
        """
        import os, signal
        from jaxshard_magic.hosts import cell_run, starting
        from jaxshard_magic.hosts.spec import HostsSpec
        found = starting.start(HostsSpec.parse("hosts", "2"), 4)
        print(found.folder)
        print(*(j.pid for j in found.joined), *(p.pid for p in found.hub_processes()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    folder, *pids = done.stdout.split()
    assert len(pids) > 2, done.stderr
    assert gone([int(pid) for pid in pids])
    end = time.monotonic() + 5
    while Path(folder).exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(folder).exists()


def test_a_port_that_is_taken_is_tried_again_elsewhere(monkeypatch: pytest.MonkeyPatch):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = [taken.getsockname()[1]]
        free = starting._port
        monkeypatch.setattr(starting, "_port", lambda cluster: ports.pop() if ports else free(cluster))
        found = starting.start(HostsSpec.parse("hosts", "2"), 4)
        try:
            assert not ports and len(found.joined) == 2
        finally:
            found.kill()


def test_in_python_a_mesh_over_hosts_runs_text_on_all_of_them(capsys: pytest.CaptureFixture[str]):
    import jaxshard_magic

    hosts = jaxshard_magic.mesh("hosts:2 data=4")
    try:
        hosts.run("import jax\nprint(jax.device_count(), jax.process_index())")
        assert capsys.readouterr().out == "4 0\n"
        with pytest.raises(ShardError, match="ValueError: no, on all 2 hosts"):
            hosts.run("raise ValueError('no')")
    finally:
        hosts.close()


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("hosts:2 data=8", HostsSpec("hosts", 2)),
        ("ssh:node1,me@node2 data=16", HostsSpec("ssh", 2, ("node1", "me@node2"))),
        ("slurm:4 data=32", HostsSpec("slurm", 4)),
        ("cluster:/tmp/client.json data=8", HostsSpec("cluster", cluster="/tmp/client.json")),
    ],
)
def test_hosts_are_read_as_they_are_written(text: str, spec: HostsSpec):
    assert MeshSpec.parse(text).hosts == spec and str(MeshSpec.parse(text)) == text
