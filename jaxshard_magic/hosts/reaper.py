"""Kill all processes started on this machine for a cluster, and remove its folder of keys.

Run as a program, `python -P reaper.py PID FOLDER`, it waits for the end of process PID, the kernel, however that comes,
and then does so. It runs in a session of its own, so that a signal to the kernel's process group spares it.

Processes are recognised by the folder in their environment, whoever started them: engines' nannies, the controller's
schedulers, and processes started by cells.
"""

import shutil
import sys
import time
from contextlib import suppress

import psutil

# ipyparallel sets the variable for its controller and launchers, and their children inherit it.
MARK = "IPP_PROFILE_DIR"
LOOK_S = 0.5  # between two checks of the kernel
PASSES = 20  # over all processes: each may start another one before it is killed


def started_for(folder: str) -> list[psutil.Process]:
    """Return the running processes of the cluster of a folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # gone, or another user's
            if process.environ().get(MARK) == folder and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_cluster(folder: str, wait_s: float = 5.0) -> None:
    """Kill all processes of the cluster of a folder, then remove the folder.

    Args:
        folder: Profile folder of the cluster.
        wait_s: Seconds to wait, in all, for the processes to end.
    """
    until = time.monotonic() + wait_s
    for _ in range(PASSES):
        if not (left := started_for(folder)):
            break
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=max(0.0, until - time.monotonic()))
    shutil.rmtree(folder, ignore_errors=True)


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie does not."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _main(pid: str, folder: str) -> None:
    """Wait for the end of process `pid`, then end the cluster of `folder`."""
    with suppress(psutil.NoSuchProcess):
        kernel = psutil.Process(int(pid))
        while is_alive(kernel):
            time.sleep(LOOK_S)
    end_cluster(folder)


if __name__ == "__main__":
    _main(*sys.argv[1:])
