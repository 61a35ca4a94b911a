"""However a kernel with hosts ends, or fails to start them: no process, port, file or folder is left, and no thread."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.hosts_notebook import gone

from jaxshard_magic.hosts import reaper

# Stands for ssh: it runs here what it is given, but for the host `nowhere`.
SSH = """#!/bin/sh
for word in "$@"; do [ "$word" = nowhere ] && { echo "ssh: Could not resolve hostname nowhere" >&2; exit 255; }; done
while [ "${1#-}" != "$1" ]; do shift; done
shift; [ "$1" = "--" ] && shift
exec sh -c "$*"
"""
REFUSES = "#!/bin/sh\necho 'no such queue' >&2\nexit 1\n"


class Kernel:
    """A Python process that has hosts; whatever comes of it has a folder of its own for temporary files."""

    def __init__(self, folder: Path, program: str, path: str | None = None):
        self.folder, self._tmp, self._here = folder, folder / "tmp", folder / "here"
        self._tmp.mkdir()
        self._here.mkdir()
        environment = {**os.environ, "TMPDIR": str(self._tmp), "IPYTHONDIR": str(folder / "ipython")}
        environment |= {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PATH": path or os.environ["PATH"],
        }
        environment.pop("PYTEST_CURRENT_TEST", None)
        text = "import os, signal, threading, time\nimport jaxshard_magic\n" + textwrap.dedent(program)
        self.process = subprocess.Popen(
            [sys.executable, "-c", text],
            env=environment,
            cwd=self._here,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def own(self) -> list[psutil.Process]:
        """It, and all that came of it."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TMPDIR") == str(self._tmp) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def left(self, seconds: float = 10.0) -> list[str]:
        """What is left of it so many seconds after its end: processes, with their ports, files and folders."""
        end = time.monotonic() + seconds
        while (found := self._left()) and time.monotonic() < end:
            time.sleep(0.1)
        return found

    def _left(self) -> list[str]:
        processes = [str(process) for process in self.own() if process.pid != self.process.pid]
        return processes + [str(path) for folder in (self._tmp, self._here) for path in folder.rglob("*")]

    def says(self, word: str) -> None:
        """Wait until it prints a word."""
        for line in self.process.stdout or ():
            if line.strip() == word:
                return
        raise AssertionError(self.process.communicate()[1])

    def ends(self, seconds: float = 120.0) -> tuple[str, str]:
        """What it printed, once it has ended."""
        return self.process.communicate(timeout=seconds)

    def kill(self) -> None:
        for process in self.own():
            process.kill()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def kernels() -> Iterator[list[Kernel]]:
    found: list[Kernel] = []
    yield found
    for each in found:
        each.kill()


@pytest.mark.ci
@pytest.mark.parametrize(
    "ending",
    [
        "hosts.close()\ntime.sleep(1)\nprint(sorted({t.name for t in threading.enumerate()} - {'MainThread'}))",
        "",
        pytest.param("raise SystemError('no')", marks=pytest.mark.full),
        pytest.param("os._exit(3)", marks=pytest.mark.full),
        pytest.param("os.kill(os.getpid(), signal.SIGTERM)", marks=pytest.mark.full),
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.kill(hosts.joined[0].pid, signal.SIGKILL)\ntime.sleep(0.2)\nos.kill(os.getpid(), signal.SIGKILL)",
        "for each in (*hosts._processes, hosts.hub_processes()[0]): each.kill()\nos.kill(os.getpid(), signal.SIGKILL)",
        'hosts.run(\'import subprocess; _ = subprocess.Popen(["sleep", "1000"])\')',
    ],
    ids=[
        "closed",
        "end of the program",
        "exception",
        "_exit",
        "SIGTERM",
        "SIGKILL",
        "SIGKILL after host 0 has died",
        "SIGKILL after the hosts and the hub have died",
        "a cell started a process",
    ],
)
def test_nothing_is_left_of_hosts(kernels: list[Kernel], tmp_path: Path, ending: str):
    kernel = Kernel(tmp_path, f"hosts = jaxshard_magic.mesh('hosts:2 data=2')\nprint('open', flush=True)\n{ending}")
    kernels.append(kernel)
    kernel.says("open")
    said, _ = kernel.ends()
    assert kernel.left() == []
    assert not said.strip() or said.strip() == "[]", "threads"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("line", "command", "script", "said"),
    [
        ("slurm:2 data=2", None, "", "sbatch, which is not on this machine's PATH"),
        ("mpi:2 data=2", None, "", "mpiexec, which is not on this machine's PATH"),
        ("slurm:2 data=2", "sbatch", REFUSES, "slurm:2: the hosts did not start, 0 of 2 came"),
        ("pbs:2 data=2", "qsub", REFUSES, "pbs:2: the hosts did not start, 0 of 2 came"),
        ("ssh:here,nowhere data=2", "ssh", SSH, "ssh:here,nowhere: the hosts did not start, 0 of 2 came"),
    ],
)
def test_nothing_is_left_of_hosts_that_can_not_be_started(
    kernels: list[Kernel], tmp_path: Path, line: str, command: str | None, script: str, said: str
):
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    if command is not None:
        (bin_ / command).write_text(script)
        (bin_ / command).chmod(0o755)
    path = f"{bin_}:{Path(sys.executable).parent}:/usr/bin:/bin" if command else str(bin_)
    kernel = Kernel(
        tmp_path,
        f"""
        try:
            jaxshard_magic.mesh({line!r})
        except jaxshard_magic.ShardError as error:
            print(error)
        time.sleep(0.5)
        print(sorted({{t.name for t in threading.enumerate()}} - {{'MainThread'}}), flush=True)
        print("over", flush=True)
        time.sleep(60)
        """,
        path,
    )
    kernels.append(kernel)
    lines = []
    for each in kernel.process.stdout or ():
        if each.strip() == "over":
            break
        lines.append(each.strip())
    assert said in lines[0] and lines[-1] == "[]", lines
    assert kernel.left(3) == [], "while the kernel lives"


@pytest.mark.ci
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize(
    "seconds", [pytest.param(0.5, marks=pytest.mark.full), 2.0, pytest.param(3.5, marks=pytest.mark.full)]
)
def test_nothing_is_left_of_a_start_that_is_stopped(kernels: list[Kernel], tmp_path: Path, seconds: float, number: int):
    kernel = Kernel(
        tmp_path,
        """
        import ipyparallel
        from jaxshard_magic.hosts import starting
        print("begins", flush=True)
        jaxshard_magic.mesh("hosts:2 data=2")
        """,
    )
    kernels.append(kernel)
    kernel.says("begins")
    time.sleep(seconds)
    kernel.process.send_signal(number)
    kernel.ends()
    assert kernel.left() == []


def test_the_reaper_ends_what_bears_its_folders_name_and_nothing_else(tmp_path: Path):
    folders = [tmp_path / name for name in ("ended", "spared")]
    started = []
    for folder in folders:
        folder.mkdir()
        (folder / "key").touch()
        sleeps = "import subprocess; subprocess.run(['sleep', '100'])"  # with a child of its own
        environment = {**os.environ, reaper.MARK: str(folder)}
        started.append(subprocess.Popen([sys.executable, "-c", sleeps], env=environment))
    try:
        while any(len(reaper.started_for(str(folder))) < 2 for folder in folders):
            time.sleep(0.05)
        pids = [process.pid for process in reaper.started_for(str(folders[0]))]
        kernel = subprocess.Popen(["sleep", "100"])
        command = [sys.executable, "-P", reaper.__file__, str(kernel.pid), str(folders[0])]
        beside = subprocess.Popen(command)
        time.sleep(0.5)
        assert len(reaper.started_for(str(folders[0]))) == 2, "the kernel lives"
        kernel.kill()  # and stays there as a zombie
        assert beside.wait(20) == 0 and gone(pids)
        assert not folders[0].exists() and folders[1].exists()
        assert len(reaper.started_for(str(folders[1]))) == 2
        kernel.wait()
    finally:
        for folder in folders:
            reaper.end_cluster(str(folder))
        for process in started:
            process.wait()
