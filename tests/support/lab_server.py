"""A JupyterLab of its own: nothing of the person's settings, kernels or history is read or written."""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from support.browsing import refused

PACKAGE = Path(__file__).parents[2]
FOLDERS = (
    "JUPYTER_CONFIG_DIR",
    "JUPYTER_DATA_DIR",
    "JUPYTER_RUNTIME_DIR",
    "JUPYTERLAB_SETTINGS_DIR",
    "JUPYTERLAB_WORKSPACES_DIR",
    "IPYTHONDIR",
)
QUIET = {"fetchNews": "false", "checkForUpdates": False}
OPTIONS = (
    "--allow-root",
    "--no-browser",
    "--ip=127.0.0.1",
    "--ServerApp.port_retries=0",
    "--LabApp.expose_app_in_browser=True",
    "--LabApp.extension_manager=readonly",
)


@dataclass(frozen=True)
class Lab:
    """A running server; `root` holds its notebooks."""

    url: str
    token: str
    root: Path

    def ask(self, path: str, method: str = "GET") -> Any:
        """What the server's REST interface answers."""
        request = Request(f"{self.url}/api/{path}", method=method, headers={"Authorization": f"token {self.token}"})
        with urlopen(request, timeout=10) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def ready(self) -> bool:
        """Whether a notebook's kernel is idle with a page connected to it: before that, run-all does nothing."""
        kernels = [session["kernel"] for session in self.ask("sessions")]
        return any(kernel["execution_state"] == "idle" and kernel["connections"] for kernel in kernels)

    def shut_down_kernels(self) -> None:
        for session in self.ask("sessions"):
            self.ask(f"sessions/{session['id']}", "DELETE")


def until(holds: Callable[[], Any], what: str, seconds: float = 60) -> None:
    """Wait for `holds()`."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.1)


@contextmanager
def lab(place: Path) -> Iterator[Lab]:
    """JupyterLab on a free port, its folders under `place`."""
    if find_spec("jupyterlab") is None:
        refused("no JupyterLab: pip install -e '.[test]'")
    ours = (str(PACKAGE), os.environ.get("PYTHONPATH"))
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, ours)))
    for name in FOLDERS:
        (place / name.lower()).mkdir()
        env[name] = str(place / name.lower())
    settings = place / "jupyterlab_settings_dir" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(QUIET))
    root = place / "notebooks"
    root.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex()
    options = [
        *OPTIONS,
        f"--port={port}",
        f"--IdentityProvider.token={token}",
        f"--ServerApp.root_dir={root}",
    ]
    log = place / "lab.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options], env=env, cwd=root, stdout=out, stderr=out
        )
    made = Lab(f"http://127.0.0.1:{port}", token, root)
    try:
        until(lambda: _answers(made, server, log), "JupyterLab to answer")
        yield made
        made.shut_down_kernels()
    finally:
        server.terminate()
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()


def _answers(made: Lab, server: subprocess.Popen, log: Path) -> bool:
    assert server.poll() is None, f"JupyterLab ended:\n{log.read_text()}"
    try:
        made.ask("status")
    except OSError:
        return False
    return True
