"""Several processes under `jax.distributed`, each of which runs the same function of a test's module: hosts.

    results = run("hosts_steps:losses", "fsdp", hosts=2, devices=8)

gives what the function returned on each, as JSON has it. `devices` are those of all hosts together, simulated.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MARK = "several_hosts result: "


def free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run(function: str, *args: Any, hosts: int = 2, devices: int = 8, seconds: float = 240) -> list[Any]:
    """What `module:function` returned on each host. Fails with their output where one ends otherwise."""
    where = json.dumps(
        {
            "at": f"127.0.0.1:{free_port()}",
            "hosts": hosts,
            "each": devices // hosts,
            "call": function,
            "args": args,
        }
    )
    paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "NPROC": "32"}
    started = [
        subprocess.Popen(
            [sys.executable, __file__, where, str(process)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for process in range(hosts)
    ]
    try:
        said = [process.communicate(timeout=seconds)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    results = [
        line.removeprefix(MARK) for text in said for line in text.splitlines() if line.startswith(MARK)
    ]
    assert len(results) == hosts, "\n".join(said)
    return [json.loads(result) for result in results]


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
    result = getattr(importlib.import_module(module), name)(*asked["args"])
    print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
