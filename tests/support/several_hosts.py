"""Several processes under `jax.distributed`, each of which runs the same function of a test's module: hosts.

    results = run("support.hosts_steps:losses", "fsdp", hosts=2, devices=8)

gives what the function returned on each, as JSON has it. `devices` are those of all hosts together, simulated.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

TESTS = Path(__file__).parents[1]
MARK = "several_hosts result: "


def free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run(function: str, *args: Any, hosts: int = 2, devices: int = 8, seconds: float = 240) -> list[Any]:
    """What `module:function` returned on each host. Fails with their output where one ends otherwise."""
    with started(function, *args, hosts=hosts, devices=devices) as (processes, logs):
        _wait(processes, time.monotonic() + seconds)
        said = [log.read_text() for log in logs]
    results = [line.removeprefix(MARK) for text in said for line in text.splitlines() if line.startswith(MARK)]
    assert len(results) == hosts, "\n".join(said)
    return [json.loads(result) for result in results]


@contextmanager
def started(
    function: str, *args: Any, hosts: int = 2, devices: int = 8
) -> Iterator[tuple[list[subprocess.Popen], list[Path]]]:
    """The processes that run it, which end with the context, and the files of what they say."""
    where = json.dumps(
        {
            "at": f"127.0.0.1:{free_port()}",
            "hosts": hosts,
            "each": devices // hosts,
            "call": function,
            "args": args,
        }
    )
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "NPROC": "32"}
    with TemporaryDirectory() as folder:
        logs = [Path(folder, str(process)) for process in range(hosts)]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, where, str(process)],
                stdout=logs[process].open("w"),
                stderr=subprocess.STDOUT,
                env=environment,
            )
            for process in range(hosts)
        ]
        try:
            yield processes, logs
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _wait(started: list[subprocess.Popen], end: float) -> None:
    """Until all have ended, one has failed, or it takes too long."""
    while any(process.poll() is None for process in started) and time.monotonic() < end:
        if any(process.poll() for process in started):
            return
        time.sleep(0.05)


def _main(where: str, process: str) -> None:
    import jax

    asked = json.loads(where)
    jax.config.update("jax_num_cpu_devices", asked["each"])
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        asked["at"],
        asked["hosts"],
        int(process),
        initialization_timeout=60,
        coordinator_bind_address=asked["at"] if process == "0" else None,
        cluster_detection_method="deactivate",
    )
    module, _, name = asked["call"].partition(":")
    try:
        result = getattr(importlib.import_module(module), name)(*asked["args"])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # jax would wait for the others
    print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
