"""What several hosts give one call of a step: the same arrays on all of them, or each its own rows of the batch."""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar
from weakref import WeakSet
from zlib import crc32

import jax
import numpy as np

from ..coordination import gathered
from ..errors import ShardError
from ..placing import hosts_of, is_key, is_part
from ..plan import Finding
from ..program.hooks import retracing
from ..program.peel import Peeled, aval, specs
from ..program.roles import BATCH
from ..program.trace import path_name
from ..request import Request
from ..strategies import understand
from ..targets import target_of
from .donation import Ours
from .entry import Entry
from .planned import own_mesh, traced
from .sign import is_done

PER_HOST = "--data per-host"
WHOLE = "-"  # in the place of an array's sum: hosts have it together, and it is no host's own
_ALL: "WeakSet[OnHosts]" = WeakSet()


class OnHosts:
    """The calls of a step whose mesh lies on several hosts, each of which comes here with its own arguments. `meet` are
    called before each: a host does not go on where another one has failed."""

    meet: ClassVar[list[Callable[[], None]]] = []
    # Lets the others out of such a meeting, and tells them what was raised here, or that the loop is over.
    leave: ClassVar[list[Callable[[BaseException | None], None]]] = []

    def __init__(self, request: Request, hosts: int):
        self._request, self._hosts = request, hosts
        self._under_way: deque[tuple[Entry, Any, Any, Any]] = deque()
        _ALL.add(self)
        self._apart = request.data == "per-host"
        self._calls: Counter[Entry] = Counter()
        self._kinds: dict[tuple[tuple[int, int], ...], dict[Hashable, Hashable]] = {}

    def of_all(self, peeled: Peeled, say: Callable[[str], None]) -> Peeled:
        """A call as it is planned: of the whole batch."""
        return self._together(peeled, _rows(peeled, self._request, say)) if self._apart else peeled

    def known(self, peeled: Peeled) -> Peeled:
        """A call under the key of its program: the same one for a part of the batch on each host and for the arrays
        that hosts have together."""
        if not self._apart:
            return peeled
        own, loose = peeled.keys_with([(aval(x), is_part(x)) for x in peeled.leaves])
        for rows, keys in self._kinds.items():
            whole = self._whole_keys(peeled, dict(rows))
            if whole is not None:
                loose = whole[1]
                if whole[0] in keys:
                    return replace(peeled, key=keys[whole[0]], loose=loose)
        return replace(peeled, key=own, loose=loose)

    def built(self, build: Callable[[Peeled], Entry], say: Callable[[str], None], peeled: Peeled) -> Entry:
        """The program of a call, which `build` makes of the call as it is planned."""
        rows = _rows(peeled, self._request, say) if self._apart else {}
        entry = build(self._together(peeled, rows))
        entry.rows = rows
        if self._apart and (whole := self._whole_keys(peeled, rows)) is not None:
            self._kinds.setdefault(tuple(rows.items()), {})[whole[0]] = peeled.key
        return entry

    def enter(self) -> None:
        """A call begins: hosts meet, and what calls were given that have finished is let go of."""
        for meet in OnHosts.meet:
            meet()
        while self._under_way and ((sign := self._under_way[0][-1]) is None or is_done(sign)):
            self._under_way.popleft()

    def called(self, entry: Entry, inputs: Any, outs: Any) -> None:
        """A call was made. Until it has finished, which it never does where a host dies, what it was given is kept: the
        devices do so anyway."""
        self._under_way.append((entry, inputs, outs, entry.clock.sign))

    def before(self, x: Any) -> Any:
        """What a call that is under way was given for the state that it gives back as `x`; None for anything else."""
        for entry, inputs, outs, _ in self._under_way:
            at = next((o for o, out in enumerate(jax.tree.leaves(outs)) if out is x), None)
            if at is not None and (place := entry.plan.state_pairs.get(at)) is not None:
                return entry.leaves(inputs)[place - len(entry.consts)]
        return None

    def joined(self, entry: Entry, peeled: Peeled) -> Peeled:
        """A call with what hosts have in parts put together, after they have compared what they were given. Raises
        ShardError where that does not go together."""
        if entry.calls == 0:
            _kinds_agree(peeled, self._together(peeled, entry.rows), self._request)
        self._agree(entry, peeled.leaves)
        return replace(peeled, leaves=entry.joined(peeled.leaves)) if entry.rows else peeled

    def later(self, call: Any, ours: Ours) -> "LaterCall":
        """`call`, one of `calls`, as hosts make it together."""
        return LaterCall(self, call, ours)

    def brought(self, entry: Entry, inputs: tuple[Any, ...], ours: Ours) -> tuple[Any, ...]:
        """The arranged inputs of a later call where the program wants them. Raises ShardError as `joined` does."""
        leaves = entry.leaves(inputs)
        self._agree(entry, leaves)
        return entry.brought(inputs, leaves, ours)

    def _whole_keys(self, peeled: Peeled, rows: Mapping[int, int]) -> tuple[Hashable, Hashable] | None:
        """Both keys of a call with the whole batch, whose `rows` each host has or all have together."""
        whole = list(map(aval, peeled.leaves))
        if any(i >= len(whole) or dim >= len(whole[i][0]) for i, dim in rows.items()):
            return None
        for i, dim in rows.items():
            shape, dtype, weak, memory = whole[i]
            if is_part(peeled.leaves[i]):
                shape = (*shape[:dim], shape[dim] * self._hosts, *shape[dim + 1 :])
                whole[i] = shape, dtype, weak, memory
        return peeled.keys_with(whole)

    def _together(self, peeled: Peeled, rows: Mapping[int, int]) -> Peeled:
        """The call with shapes for arrays, those of which each host has a part as long as all of them."""
        leaves = specs(peeled.leaves)
        for i, dim in rows.items():
            x = peeled.leaves[i]
            if is_part(x):
                shape = leaves[i].shape
                leaves[i] = leaves[i].update(
                    shape=(*shape[:dim], shape[dim] * self._hosts, *shape[dim + 1 :])
                )
        return replace(peeled, leaves=leaves) if rows else peeled

    def _agree(self, entry: Entry, leaves: Sequence[Any]) -> None:
        """Compare what hosts have for the first call of a kind, then ever more seldom: after 1, 2, 4, 8 calls."""
        calls = self._calls[entry]  # those that a loop skips, too
        self._calls[entry] += 1
        if calls & (calls - 1) == 0:
            _values_agree(entry, leaves)


class LaterCall:
    """A later call on several hosts: a call of `calls` whose inputs hosts compare and bring where the program wants
    them, and which is under way until it has finished."""

    def __init__(self, hosts: OnHosts, call: Any, ours: Ours):
        self._hosts, self._call, self._ours = hosts, call, ours
        self.entry: Entry = call.entry
        self.watch = call.watch

    def gather(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        inputs, watch = self._call.gather(args, kwargs)
        return self._hosts.brought(self.entry, inputs, self._ours), watch

    def finish(self, watch: Any, inputs: tuple[Any, ...], outs: Any) -> Any:
        self._hosts.called(self.entry, inputs, outs)
        return self._call.finish(watch, inputs, outs)


def finished(x: Any) -> jax.Array | None:
    """An array that a step gave back, or where a dead host keeps the step from its end, that of the last step which has
    come to one; None where that is gone, as it was given away."""
    while x is not None and not x.is_deleted() and not x.is_ready():
        x = next((before for each in list(_ALL) if (before := each.before(x)) is not None), None)
    return None if x is None or x.is_deleted() else x


def on_hosts(request: Request) -> OnHosts | None:
    """None where the devices are those of one host, or not attached."""
    hosts = 1 if target_of(request.mesh) is not None else hosts_of(request.mesh)
    return None if hosts == 1 else OnHosts(request, hosts)


def _kinds_agree(peeled: Peeled, whole: Peeled, request: Request) -> None:
    """Raise ShardError where hosts call a step with arguments of other kinds, which would be other programs. `whole` is
    the call with the whole batch: some may have its arrays together already."""
    inputs = list(zip((path_name(path) for path, _, _ in peeled.inputs), specs(peeled.leaves), strict=True))
    kinds = [
        f"{path} {spec.shape} {spec.dtype}"
        for (path, _), spec in zip(inputs, specs(whole.leaves), strict=True)
    ]
    given = f"{request.strategy} {request.options} {dict(request.mesh.shape)} {kinds}"
    if len(set(gathered(f"{crc32(given.encode()):x}"))) > 1:
        path, spec = max(inputs, key=lambda row: row[1].size, default=("nothing", None))
        here = path if spec is None else f"{path} is {spec.dtype}{list(spec.shape)}"
        raise ShardError(
            f"hosts call {peeled.step.name} with different shapes, types or options; here {here}. Give all hosts as "
            "many rows and the same options"
        )


def _rows(peeled: Peeled, request: Request, say: Callable[[str], None]) -> dict[int, int]:
    """The flat inputs of a call that hold examples, and the dimension of each. Raises ShardError where none does."""
    with own_mesh(request.mesh), retracing():
        call = traced(peeled, request, say)
        if not request.per_device:
            call = call.at_home(request.mesh, whole=True)
        facts = understand(call.traced, request, [noted for _, noted, _ in peeled.inputs])
    first = len(call.traced.consts)
    found = {i - first: dims[0] for i, dims in facts.batch.dims.items() if dims and i >= first}
    if not found:
        raise ShardError(
            f"{PER_HOST}: {peeled.step.name} has no argument that holds examples; --spec names one, as in "
            "--spec \"batch=P('data')\", or leave it out"
        )
    return found


def _values_agree(entry: Entry, leaves: Sequence[Any]) -> None:
    """Raise ShardError where hosts give a call different values of what all are to have. Where each has rows of its own
    and all are the same, the report warns."""
    sums = " ".join(f"{_sum(x):x}" if is_part(x) else WHOLE for x in leaves)
    said = [set(each) for each in zip(*(host.split(" ") for host in gathered(sums)), strict=True)]
    same = [len(each) == 1 for each in said]
    n = len(entry.consts)
    inputs = entry.plan.leaves[n : n + len(leaves)]
    other = [leaf for i, leaf in enumerate(inputs) if len(said[i] - {WHOLE}) > 1 and i not in entry.rows]
    if other:
        raise _different(entry, sorted(other, key=lambda leaf: leaf.role == BATCH)[0])
    own = [i for i in entry.rows if is_part(leaves[i])]
    if own and all(same[i] for i in own) and not any(f.code == "same-rows" for f in entry.plan.findings):
        message = (
            f"All {entry.hosts} hosts have the same rows of {inputs[own[0]].path}: every example counts {entry.hosts} "
            f"times. Load other rows on each, by jax.process_index(), or leave {PER_HOST} out."
        )
        entry.plan = replace(
            entry.plan, findings=(*entry.plan.findings, Finding("same-rows", "warning", message))
        )


def _different(entry: Entry, leaf: Any) -> ShardError:
    name = "the step" if entry.call_of is None else entry.call_of.step.name
    head = f"{name}: {leaf.path} is not the same on all {entry.hosts} hosts"
    if leaf.role == BATCH:
        return ShardError(
            f"{head}. Where each host loads its own part of the batch, say {PER_HOST}; else load the same on all",
            fix=PER_HOST,
        )
    return ShardError(f"{head}. Make it alike on all of them, from the same seed or the same file")


def _sum(x: Any) -> int:
    bits = jax.random.key_data(x) if is_key(x) else x
    return crc32(np.ascontiguousarray(bits).tobytes())
