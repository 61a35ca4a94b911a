"""Messages between the processes of `jax.distributed`, through its coordination service: no devices take part.

Footguns:
- The service's client is private to JAX (`jax._src.distributed`, seen in jax 0.10.2 and 0.12.0; Orbax uses it as well),
  and so is the constructor of gloo (`jaxlib._jax`), for which JAX has no option. No other module touches them.
- A key can be set once, and the name of a barrier used once.
- The client waits in C++, where no signal reaches Python: an interrupt needs a wait in another thread
  (`_interruptible`).
"""

import json
import threading
import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import jax
from jax._src import distributed
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

PART = 2**20  # characters of a value in one message; gRPC takes 4 MiB
LONG_S = 24 * 3600.0  # no limit in practice
LOOK_S = 0.5  # seconds between checks for a failure during a wait
# Numbers of agreements. All processes agree on the same things in the same order, so that numbers match.
_numbers = count()
_scope = [""]  # prefix of these numbers, see `begin_scope`


class ProcessFailed(RuntimeError):
    """Failure of another process to send its message.

    Args:
        process: Index of the process; -1 for any of them.
        message: Error of the process, in words.
    """

    def __init__(self, process: int, message: str):
        super().__init__(message)
        self.process = process


class BarrierTimeout(RuntimeError):
    """Barrier that not all processes reached in time, or a process that is gone."""


def set_gloo_address(address: str | None) -> None:
    """Set the address at which gloo listens; call it before jax starts.

    Gloo carries collectives between CPU devices of several processes.

    Args:
        address: Address of this machine; "" for the address of the machine's own name; None for no gloo.
    """
    if address is None:
        jax.config.update("jax_cpu_collectives_implementation", None)
    elif address:
        # JAX has no option for the address: gloo would listen at that of the machine's own name.
        _jax.make_gloo_tcp_collectives = partial(_jax.make_gloo_tcp_collectives, hostname=address)


def is_multiprocess() -> bool:
    """Return whether this process is one of several of `jax.distributed`."""
    return _client() is not None and distributed.global_state.num_processes > 1


def begin_scope(scope: str) -> None:
    """Restart the numbering of agreements, under a name never used before.

    Args:
        scope: The name.
    """
    global _numbers
    # Otherwise a process interrupted between two agreements would stay one number behind the others for good.
    _numbers, _scope[0] = count(), f"{scope}/"


def _next(kind: str) -> str:
    return f"jaxshard/{kind}/{_scope[0]}{next(_numbers)}"


def barrier(name: str, seconds: float) -> None:
    """Wait until all processes are here; an interrupt ends the wait.

    Args:
        name: Name of the barrier, used once.
        seconds: Longest wait.

    Raises:
        BarrierTimeout: A process does not come.
    """
    try:
        _interruptible(lambda: _client().wait_at_barrier(name, max(1, int(seconds * 1000))))
    except jax.errors.JaxRuntimeError as error:
        raise BarrierTimeout(str(error).partition("\n")[0]) from None


def set_key(key: str, text: str, over: bool = False) -> bool:
    """Set a key for all processes.

    Args:
        key: The key.
        text: Value of the key.
        over: Whether to overwrite.

    Returns:
        False where the key is set already.
    """
    try:
        _client().key_value_set(key, text, allow_overwrite=over)
    except jax.errors.JaxRuntimeError as error:
        # JaxRuntimeError has no status code: the gRPC status is part of the message.
        if "ALREADY_EXISTS" not in str(error):
            raise
        return False
    return True


def get_key(key: str) -> str | None:
    """Return the value of a key, None where it is not set."""
    try:
        return _client().key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


def wait_for_key(key: str, seconds: float) -> str | None:
    """Wait for the value of a key.

    Args:
        key: The key.
        seconds: Longest wait.

    Returns:
        The value; None where the key was not set, or the service does not answer.
    """
    try:
        return _interruptible(lambda: _client().blocking_key_value_get(key, max(1, int(seconds * 1000))))
    except jax.errors.JaxRuntimeError:
        return None


def run_on_first(make: Callable[[], str], seconds: float = LONG_S) -> str:
    """Call `make()` on process 0 and return its text on all processes. All processes must call this together.

    Args:
        make: Called on process 0, or on a process alone.
        seconds: Longest wait.

    Raises:
        ProcessFailed: `make` raised on process 0. An interrupt there is raised as `KeyboardInterrupt`.
    """
    if not is_multiprocess():
        return make()
    name = _next("first")
    if jax.process_index() == 0:
        try:
            made = make()
        # An interrupt as well: the other processes would wait for this one.
        except BaseException as error:
            _send(name, _failure(error))
            raise
        _send(name, f"={made}")
        return made
    said = _interruptible(lambda: _receive(name, seconds))
    return _checked(0, said)


def gather_texts(text: str, seconds: float = LONG_S) -> list[str]:
    """Return the texts of all processes, by process index. All processes must call this together.

    Cost: a message a process; an interrupt ends the wait. Without `jax.distributed` the result is `[text]`.

    Args:
        text: Text of this process.
        seconds: Longest wait.

    Raises:
        BarrierTimeout: A process comes too late.
    """
    if not is_multiprocess():
        return [text]
    try:
        return _gathered(_next("gathered"), text, seconds)
    except jax.errors.JaxRuntimeError as error:
        raise BarrierTimeout(str(error).partition("\n")[0]) from None


class SharedCalls:
    """Series of exchanges between processes, with a failure on one raised on all.

        with SharedCalls() as all_of:
            texts = all_of(make)

    All processes make the same calls in the same order. Each call returns the results of `make()` on all processes.
    Where a process raises, in `make` or between calls, the others raise `ProcessFailed` in their next call, or
    `KeyboardInterrupt` for an interrupt: no process waits for the failed one.

    Args:
        several: False for this process alone.
    """

    def __init__(self, several: bool = True):
        self._several = several and is_multiprocess()
        self._name = _next("together") if self._several else ""
        self._calls, self._over = 0, False

    def __call__(self, make: Callable[[], str]) -> list[str]:
        text = make()
        if not self._several:
            return [text]
        said = _gathered(f"{self._name}/{self._calls}", f"={text}")
        self._calls += 1
        self._over = any(each[0] == "!" for each in said)
        return [_checked(process, each) for process, each in enumerate(said)]

    def __enter__(self) -> "SharedCalls":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or not self._several or self._over:
            return
        name, process = f"{self._name}/{self._calls}", jax.process_index()
        # All others wait for the texts that process 0 gathers.
        if process == 0:
            _send(name, json.dumps([_failure(error)]))
        # The key has a value already if the failure came while this process waited: fail in the next call.
        elif not set_key(f"{name}/{process}", _failure(error)):
            set_key(f"{self._name}/{self._calls + 1}/{process}", _failure(error))


class NamedBarriers:
    """Series of barriers with names, for threads other than the main threads of the processes.

    A process that fails, or reaches another barrier, releases the others. All processes create the object together.
    """

    def __init__(self) -> None:
        self._name = _next("passage")
        self._failed = f"{self._name}/failed"
        self._points = 0

    def fail(self, why: str) -> str:
        """Report that this process reaches no further barrier, and return the reason given by the first failed
        process."""
        set_key(self._failed, why)
        return get_key(self._failed) or why

    def why(self, seconds: float) -> str:
        """Return the reason of the first failed process, after waiting up to `seconds`; "" for none."""
        return wait_for_key(self._failed, seconds) or ""

    def raise_if_failed(self) -> None:
        """Raise ProcessFailed where a process has failed."""
        if why := get_key(self._failed):
            raise ProcessFailed(-1, why)

    def wait_at(self, point: str, seconds: float) -> None:
        """Wait for all processes at the next barrier.

        Args:
            point: Name of the barrier.
            seconds: Longest wait.

        Raises:
            ProcessFailed: A process has failed or is at another barrier.
            BarrierTimeout: A process does not come in time.
        """
        self._points += 1
        state, key = distributed.global_state, f"{self._name}/{self._points}"
        end = time.monotonic() + seconds
        if state.process_id:
            set_key(f"{key}/{state.process_id}", point)
            here = self._hear(f"{key}/all", end) == point
        else:
            said = [self._hear(f"{key}/{process}", end) for process in range(1, state.num_processes)]
            here = set(said) == {point}
            set_key(f"{key}/all", point if here else "apart")
        if not here:
            raise ProcessFailed(-1, "")

    def _hear(self, key: str, end: float) -> str:
        # Short waits: a process that has failed never sets the key.
        while (said := wait_for_key(key, LOOK_S)) is None:
            self.raise_if_failed()
            if time.monotonic() > end:
                raise BarrierTimeout(f"not all processes came to {key}")
        return said


class Agreement:
    """Check whether all processes submit the same text, each in its own time.

    The result is decided once, equal on all processes. All processes create the object together.
    """

    def __init__(self) -> None:
        self._name = _next("verdict")

    def agreed(self, text: str, seconds: float) -> bool:
        """Submit `text` and return whether all processes submitted the same.

        Args:
            text: Text of this process.
            seconds: Longest wait. Processes that have not submitted by then count as different.
        """
        self.submit(text)
        found = self.wait_for_result(text, seconds)
        if found is None:
            # A key can be set once: a result set by another process meanwhile stays.
            set_key(f"{self._name}/all", "no")
            return get_key(f"{self._name}/all") == "yes"
        return found

    def submit(self, text: str) -> None:
        """Submit this process's text, once."""
        set_key(f"{self._name}/{distributed.global_state.process_id}", text)

    def wait_for_result(self, text: str, seconds: float) -> bool | None:
        """Wait for the result: whether all processes submitted `text`.

        Args:
            text: Text of this process.
            seconds: Longest wait.

        Returns:
            None where not all processes have submitted in time.
        """
        state, verdict, end = distributed.global_state, f"{self._name}/all", time.monotonic() + seconds
        if state.process_id == 0:
            others = range(1, state.num_processes)
            said = [wait_for_key(f"{self._name}/{p}", max(0.0, end - time.monotonic())) for p in others]
            if None not in said:
                set_key(verdict, "yes" if set(said) == {text} else "no")
            return None if (found := get_key(verdict)) is None else found == "yes"
        found = wait_for_key(verdict, seconds)
        return None if found is None else found == "yes"


def _failure(error: BaseException) -> str:
    # A message begins with "!" for a failure, with "=" for a text.
    return f"!{type(error).__name__} {error}"


def _checked(process: int, said: str) -> str:
    if said[0] == "!":
        kind, _, message = said[1:].partition(" ")
        if kind == KeyboardInterrupt.__name__:
            raise KeyboardInterrupt
        raise ProcessFailed(process, message)
    return said[1:]


def _gathered(name: str, text: str, seconds: float = LONG_S) -> list[str]:
    state = distributed.global_state
    if state.process_id:
        set_key(f"{name}/{state.process_id}", text)
        return json.loads(_interruptible(lambda: _receive(name, seconds)))
    others = range(1, state.num_processes)
    most = int(seconds * 1000)
    found = _interruptible(lambda: [_client().blocking_key_value_get(f"{name}/{p}", most) for p in others])
    _send(name, json.dumps([text, *found]))
    return [text, *found]


def _interruptible(wait: Callable[[], Any]) -> Any:
    """Return the result of `wait()`, called in another thread."""
    found: list[Any] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            found.append(wait())
        except Exception as error:  # raised again below, in the caller's thread
            failed.append(error)
        done.release()

    done = threading.Lock()
    done.acquire()
    # `wait` blocks in C++, where no signal reaches Python; `acquire` below can be interrupted.
    threading.Thread(target=run, name="jaxshard coordination", daemon=True).start()
    done.acquire()
    if failed:
        raise failed[0]
    return found[0]


def _send(name: str, text: str) -> None:
    # Values of the service are strings, and gRPC takes 4 MiB a message.
    packed = b64encode(zlib.compress(text.encode())).decode()
    parts = [packed[i : i + PART] for i in range(0, len(packed), PART)]
    for i, part in enumerate(parts):
        set_key(f"{name}/{i}", part)
    set_key(f"{name}/parts", str(len(parts)))


def _receive(name: str, seconds: float) -> str:
    client, most = _client(), int(seconds * 1000)
    parts = int(client.blocking_key_value_get(f"{name}/parts", most))
    packed = "".join(client.blocking_key_value_get(f"{name}/{i}", most) for i in range(parts))
    return zlib.decompress(b64decode(packed)).decode()


def _client() -> Any:
    return distributed.global_state.client
