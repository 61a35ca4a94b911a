"""A benchmark's ratios in a kernel of its own, as a notebook has one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def good_in_kernel(benchmark: str, rounds: int, heard: Callable[[dict[str, Any]], object] = lambda _: None) -> bool:
    """What `ratios(shell, rounds)` of a benchmark says in a new kernel, whose output is printed here. `heard`: told of
    each message. Raises RuntimeError for an error there."""
    from jupyter_client.manager import start_new_kernel

    def output(message: dict[str, Any]) -> None:
        heard(message)
        if message["msg_type"] == "stream":
            print(message["content"]["text"], end="", flush=True)
        elif message["msg_type"] == "error":
            raise RuntimeError("\n".join(message["content"]["traceback"]))

    manager, client = start_new_kernel(kernel_name="python3")
    try:
        here = str(Path(__file__).resolve().parent)
        reply = client.execute_interactive(
            f"import sys; sys.path.insert(0, {here!r}); import {benchmark}; "
            f"good = {benchmark}.ratios(get_ipython(), {rounds})",
            user_expressions={"good": "good"},
            output_hook=output,
        )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return reply["content"]["user_expressions"]["good"]["data"]["text/plain"] == "True"
