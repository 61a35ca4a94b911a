"""The end of everything that was started on this machine for a cluster: processes and the folder with its keys.

All of them have the folder in their environment, whoever started them (IPP_PROFILE_DIR, which ipyparallel sets for its
controller and its launchers; what these start inherits it), and are found by it: engines' nannies, the controller's
schedulers, and what cells have started.

Run as a program, `python -P reaper.py PID FOLDER`, this watches the process PID, the kernel, and ends everything once
that is gone, however it went. It runs in a session of its own, so that a signal to the kernel's group spares it.
"""

import shutil
import sys
import time
from contextlib import suppress

import psutil

MARK = "IPP_PROFILE_DIR"
LOOK_S = 0.5  # between two looks at the kernel
PASSES = 20  # over all processes, as what is killed may have started another one


def started_for(folder: str) -> list[psutil.Process]:
    """The processes that were started for the cluster of a folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # gone by now, or another user's
            if process.environ().get(MARK) == folder and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end(folder: str, wait_s: float = 5.0) -> None:
    """Kill all of them, wait so long in all until they are gone, and remove the folder."""
    until = time.monotonic() + wait_s
    for _ in range(PASSES):
        if not (left := started_for(folder)):
            break
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=max(0.0, until - time.monotonic()))
    shutil.rmtree(folder, ignore_errors=True)


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _main(pid: str, folder: str) -> None:
    with suppress(psutil.NoSuchProcess):
        kernel = psutil.Process(int(pid))
        while _lives(kernel):
            time.sleep(LOOK_S)
    end(folder)


if __name__ == "__main__":
    _main(*sys.argv[1:])
