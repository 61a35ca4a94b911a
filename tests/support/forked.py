"""Programs in processes that have not the package. Each is a fork of one process that has imported jax and its
libraries, which takes longer than most programs run, and has used no device: a program chooses its own."""

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from support.settings import FLAGS

SERVER = """
import json, os, runpy, sys, traceback
import flax.linen, flax.nnx, jax.numpy, numpy, optax
for line in sys.stdin:
    asked = json.loads(line)
    if not (process := os.fork()):
        out, error = (os.open(asked[name], os.O_WRONLY | os.O_CREAT) for name in ("out", "error"))
        os.dup2(out, 1), os.dup2(error, 2)
        os.environ["XLA_FLAGS"] = asked["flags"]
        sys.argv = asked["argv"]
        code = 0
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


@cache
def _server() -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA", "PYTHON"))}
    command = [sys.executable, "-c", SERVER]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=kept)
    atexit.register(server.kill)
    return server


def printed(text: str, *arguments: object, flags: Sequence[str] = ()) -> str:
    """What a program prints that is run alone with these arguments; `flags` are XLA's, beside those for quick compiles.
    Fails with what it wrote to stderr where it does not end well."""
    code, out, error = ran(text, *arguments, flags=flags)
    assert code == 0, error[-3000:]
    return out


def ran(text: str, *arguments: object, flags: Sequence[str] = ()) -> tuple[int, str, str]:
    """The exit code of such a program, negative where a signal ended it, and what it wrote to stdout and stderr."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with TemporaryDirectory() as folder:
        program, out, error = (Path(folder, name) for name in ("program.py", "out", "error"))
        program.write_text(text)
        argv = [str(program), *map(str, arguments)]
        asked = {"argv": argv, "out": str(out), "error": str(error), "flags": " ".join([*FLAGS, *flags])}
        print(json.dumps(asked), file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        return code, out.read_text(), error.read_text()
