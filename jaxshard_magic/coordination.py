"""What the processes of `jax.distributed` tell each other, through its coordination service: without their devices.

The service's client is private to jax (`jax._src.distributed`, jax 0.10.2 and 0.12.0; orbax uses it as well), and so is
what makes gloo (`jaxlib._jax`), for which jax has no option; both are known here alone.
A key is set once; a barrier's name is used once.
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

PART = 2**20  # characters of a value that one message carries; gRPC takes 4 MiB
LONG_S = 24 * 3600.0
LOOK_S = 0.5  # from one look for a failure to the next, while something is waited for
_numbers = count()  # of what is agreed on: each process comes to these in the same order
_scope = [""]  # in which they are counted


class OtherFailed(RuntimeError):
    """What the process with this number was to tell it did not; -1 for any of them."""

    def __init__(self, process: int, message: str):
        super().__init__(message)
        self.process = process


class Late(RuntimeError):
    """Not all processes came to a barrier in time, or one of them is gone."""


def gloo_at(address: str | None) -> None:
    """Where gloo, which carries what CPU devices of several processes tell each other, is to listen, before jax starts:
    at an address of this machine; "" for the one that this machine's own name means; None for no gloo."""
    if address is None:
        jax.config.update("jax_cpu_collectives_implementation", None)
    elif address:
        _jax.make_gloo_tcp_collectives = partial(_jax.make_gloo_tcp_collectives, hostname=address)


def is_there() -> bool:
    """Whether this process is one of several of `jax.distributed`."""
    return _client() is not None and distributed.global_state.num_processes > 1


def begin(scope: str) -> None:
    """Count what is agreed on from here on anew, under a name that no process has used: where one of them was stopped
    between two agreements, its next ones would be others' last."""
    global _numbers
    _numbers, _scope[0] = count(), f"{scope}/"


def _next(kind: str) -> str:
    return f"jaxshard/{kind}/{_scope[0]}{next(_numbers)}"


def barrier(name: str, seconds: float) -> None:
    """Wait until all processes are here, which an interrupt ends. Raises `Late` where one does not come."""
    try:
        _waited(lambda: _client().wait_at_barrier(name, max(1, int(seconds * 1000))))
    except jax.errors.JaxRuntimeError as error:
        raise Late(str(error).partition("\n")[0]) from None


def tell(key: str, text: str, over: bool = False) -> bool:
    """Set a key for all processes; False where one has set it. `over`: set it again."""
    try:
        _client().key_value_set(key, text, allow_overwrite=over)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
        return False
    return True


def told(key: str) -> str | None:
    """What a key was set to, None where it is not set."""
    try:
        return _client().key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


def heard(key: str, seconds: float) -> str | None:
    """What a key is set to, waiting so long for it; None where it was not set, or the service does not answer."""
    try:
        return _waited(lambda: _client().blocking_key_value_get(key, max(1, int(seconds * 1000))))
    except jax.errors.JaxRuntimeError:
        return None


def from_first(make: Callable[[], str], seconds: float = LONG_S) -> str:
    """What `make()` gives on process 0, on all of them, which come here together. Where it raises there, `OtherFailed`,
    or the interrupt that it was, is raised elsewhere. On one process alone it is `make()`."""
    if not is_there():
        return make()
    name = _next("first")
    if jax.process_index() == 0:
        try:
            made = make()
        except BaseException as error:
            _send(name, _failure(error))
            raise
        _send(name, f"={made}")
        return made
    said = _waited(lambda: _receive(name, seconds))
    return _checked(0, said)


def gathered(text: str, seconds: float = LONG_S) -> list[str]:
    """What each process gives, in their order, on all of them, which come here together. It takes a message a process,
    which an interrupt ends; without `jax.distributed` it is the own text alone. Raises `Late` where one comes too
    late."""
    if not is_there():
        return [text]
    try:
        return _gathered(_next("gathered"), text, seconds)
    except jax.errors.JaxRuntimeError as error:
        raise Late(str(error).partition("\n")[0]) from None


class Together:
    """What processes do one thing after the other, each of which tells the others something.

        with Together() as all_of:
            texts = all_of(make)

    All come to the same calls in the same order, and each gives what `make()` gave on each process. Where one raises,
    in `make` or between the calls, `OtherFailed`, or the interrupt that it was, is raised on the others in their next
    call: nobody waits for it. `several` False: it is about this process alone.
    """

    def __init__(self, several: bool = True):
        self._several = several and is_there()
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

    def __enter__(self) -> "Together":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or not self._several or self._over:
            return
        name, process = f"{self._name}/{self._calls}", jax.process_index()
        if process == 0:  # all others wait for what it has heard
            _send(name, json.dumps([_failure(error)]))
        elif not tell(f"{name}/{process}", _failure(error)):  # interrupted while it waited
            tell(f"{self._name}/{self._calls + 1}/{process}", _failure(error))


class Passage:
    """Points that processes pass together, one after the other, in threads of their own, while their main threads do
    other things. One that fails, or comes to another point, lets the others out. All make it together."""

    def __init__(self) -> None:
        self._name = _next("passage")
        self._failed = f"{self._name}/failed"
        self._points = 0

    def fail(self, why: str) -> str:
        """This process comes to no point any more. What the first one that failed has said of it."""
        tell(self._failed, why)
        return told(self._failed) or why

    def why(self, seconds: float) -> str:
        """What that one has said, waiting so long for it; "" for nothing."""
        return heard(self._failed, seconds) or ""

    def look(self) -> None:
        """Raise `OtherFailed` where one has failed."""
        if why := told(self._failed):
            raise OtherFailed(-1, why)

    def go_through(self, point: str, seconds: float) -> None:
        """Wait for all processes. Raises `OtherFailed` where one has failed or is at another point, `Late` where one
        does not come in time."""
        self._points += 1
        state, key = distributed.global_state, f"{self._name}/{self._points}"
        end = time.monotonic() + seconds
        if state.process_id:
            tell(f"{key}/{state.process_id}", point)
            here = self._hear(f"{key}/all", end) == point
        else:
            said = [self._hear(f"{key}/{process}", end) for process in range(1, state.num_processes)]
            here = set(said) == {point}
            tell(f"{key}/all", point if here else "apart")
        if not here:
            raise OtherFailed(-1, "")

    def _hear(self, key: str, end: float) -> str:
        while (said := heard(key, LOOK_S)) is None:
            self.look()
            if time.monotonic() > end:
                raise Late(f"not all processes came to {key}")
        return said


class Verdict:
    """Whether all processes say the same, each in its own time: found once, and the same on all of them. All make it
    together."""

    def __init__(self) -> None:
        self._name = _next("verdict")

    def agreed(self, text: str, seconds: float) -> bool:
        """Say `text`, and wait so long for the others: who has not come by then says otherwise."""
        self.say(text)
        found = self.heard(text, seconds)
        if found is None:
            tell(f"{self._name}/all", "no")  # unless another one has set it meanwhile
            return told(f"{self._name}/all") == "yes"
        return found

    def say(self, text: str) -> None:
        """What this process says, once."""
        tell(f"{self._name}/{distributed.global_state.process_id}", text)

    def heard(self, text: str, seconds: float) -> bool | None:
        """Whether all have said `text`; None where not all have come within so many seconds."""
        state, verdict, end = distributed.global_state, f"{self._name}/all", time.monotonic() + seconds
        if state.process_id == 0:
            others = range(1, state.num_processes)
            said = [heard(f"{self._name}/{p}", max(0.0, end - time.monotonic())) for p in others]
            if None not in said:
                tell(verdict, "yes" if set(said) == {text} else "no")
            return None if (found := told(verdict)) is None else found == "yes"
        found = heard(verdict, seconds)
        return None if found is None else found == "yes"


def _failure(error: BaseException) -> str:
    return f"!{type(error).__name__} {error}"


def _checked(process: int, said: str) -> str:
    if said[0] == "!":
        kind, _, message = said[1:].partition(" ")
        if kind == KeyboardInterrupt.__name__:
            raise KeyboardInterrupt
        raise OtherFailed(process, message)
    return said[1:]


def _gathered(name: str, text: str, seconds: float = LONG_S) -> list[str]:
    state = distributed.global_state
    if state.process_id:
        tell(f"{name}/{state.process_id}", text)
        return json.loads(_waited(lambda: _receive(name, seconds)))
    others = range(1, state.num_processes)
    most = int(seconds * 1000)
    found = _waited(lambda: [_client().blocking_key_value_get(f"{name}/{p}", most) for p in others])
    _send(name, json.dumps([text, *found]))
    return [text, *found]


def _waited(wait: Callable[[], Any]) -> Any:
    """What `wait` gives, which is in C++ meanwhile, where no signal reaches it: this thread can be interrupted."""
    found: list[Any] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            found.append(wait())
        except Exception as error:  # raised below
            failed.append(error)
        done.release()

    done = threading.Lock()
    done.acquire()
    threading.Thread(target=run, name="jaxshard coordination", daemon=True).start()
    done.acquire()
    if failed:
        raise failed[0]
    return found[0]


def _send(name: str, text: str) -> None:
    packed = b64encode(zlib.compress(text.encode())).decode()
    parts = [packed[i : i + PART] for i in range(0, len(packed), PART)]
    for i, part in enumerate(parts):
        tell(f"{name}/{i}", part)
    tell(f"{name}/parts", str(len(parts)))


def _receive(name: str, seconds: float) -> str:
    client, most = _client(), int(seconds * 1000)
    parts = int(client.blocking_key_value_get(f"{name}/parts", most))
    packed = "".join(client.blocking_key_value_get(f"{name}/{i}", most) for i in range(parts))
    return zlib.decompress(b64decode(packed)).decode()


def _client() -> Any:
    return distributed.global_state.client
