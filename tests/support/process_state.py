"""What a process holds that code may take and has to give back: descriptors, threads, replaced functions, settings."""

import builtins
import gc
import inspect
import os
import signal
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import ad_checkpoint, api, config, pjit, source_info_util
from jax._src import core as jax_core
from jax._src.interpreters import partial_eval

SETTLES_S = 5.0  # for threads that end by themselves
OF_IPYTHON = {"exit", "quit", "get_ipython"}  # builtins that it changes around each cell


@dataclass(frozen=True)
class ProcessState:
    """A picture of the process; `changes(later)` names what differs."""

    held: dict[str, Any]
    descriptors: dict[int, str]
    threads: tuple[str, ...]

    def changes(self, later: "ProcessState") -> list[str]:
        """One line for each thing that `later` has otherwise, or more of."""
        found = [
            f"{name}: {_short(value)} became {_short(later.held.get(name))}"
            for name, value in self.held.items()
            if later.held.get(name) is not value and later.held.get(name) != value
        ]
        more = later.descriptors.keys() - self.descriptors.keys()
        if len(later.descriptors) > len(self.descriptors):
            found.append(f"descriptors: {[later.descriptors[fd] for fd in sorted(more)]}")
        threads = list(later.threads)
        for name in self.threads:
            if name in threads:
                threads.remove(name)
        if threads and len(later.threads) > len(self.threads):
            found.append(f"threads: {threads}")
        return found


def process_state() -> ProcessState:
    """The process as it is now."""
    held = {
        "sys.stdout": sys.stdout,
        "sys.stderr": sys.stderr,
        "sys.excepthook": sys.excepthook,
        "sys.displayhook": sys.displayhook,
        "garbage collection": gc.isenabled(),
        "warnings": [*warnings.filters],
        "environment": dict(os.environ),
        "builtins": {*vars(builtins)} - OF_IPYTHON,
        "the working folder": os.getcwd(),
        "jax's trace": jax_core.trace_state_clean(),
        "jax's name stack": str(source_info_util.current_name_stack()),
        "descriptor 2": _identity(2),
    }
    held |= {
        f"{module.__name__}.{name}": getattr(module, name)
        for module, name in (
            (api, "vjp"),
            (jax, "vjp"),
            (partial_eval, "trace_to_jaxpr"),
            (pjit, "_infer_params_cached"),
            (ad_checkpoint, "_trace_to_jaxpr"),
        )
    }
    held["jax.lax.associative_scan"] = inspect.unwrap(jax.lax.associative_scan).__code__
    held |= {f"signal {number.name}": signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR2)}
    held |= {f"{name} of this thread": state.get_local() for name, state in config.config_states.items()}
    held["user_context of this thread"] = config.trace_context()
    return ProcessState(held, _descriptors(), tuple(sorted(t.name for t in threading.enumerate())))


def settled(before: ProcessState, seconds: float = SETTLES_S) -> list[str]:
    """What of `before` has changed for good: threads and what they hold may take a while to end."""
    start, collected = time.monotonic(), False
    while (found := before.changes(process_state())) and time.monotonic() < start + seconds:
        if not collected and time.monotonic() > start + 0.3:
            collected = bool(gc.collect()) or True
        time.sleep(0.01)
    return found


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # that of the listing
            continue
    return found


def _identity(descriptor: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _short(value: Any) -> str:
    return repr(value)[:80]
