"""What several hosts give one call of a step: the same arrays on all of them, or each its own rows of the batch."""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar
from weakref import WeakSet
from zlib import crc32

import jax
import numpy as np
from jax.sharding import NamedSharding

from ..config.request import Request
from ..coordination import gathered
from ..errors import ShardError
from ..placing import hosts_of, is_key, is_part
from ..plan import Finding
from ..program.hooks import retracing
from ..program.peel import Peeled, aval, specs
from ..program.roles import BATCH
from ..program.trace import path_name
from ..strategies import understand
from ..targets import target_of
from .call_kinds import CallKind, Description, Leaf, fixed
from .calls import Mismatch
from .donation import Ours
from .entry import Entry, kind, lies
from .planned import own_mesh, traced
from .sign import is_done

PER_HOST = "--data per-host"
BETWEEN_S = 60.0  # for the others to come with another kind of call, between two meetings
SAMPLED = 64  # calls from one comparison of the hosts' data to the next, at most
# In the place of an array's sum: hosts have it together, where the program wants it or elsewhere.
WHOLE, AWAY = "-", "~"
_ALL: "WeakSet[OnHosts]" = WeakSet()


class OnHosts:
    """The calls of a step whose mesh lies on several hosts, each of which comes here with its own arguments. `meet` are
    called before each with what it is: a host does not go on where another one has failed, or calls otherwise."""

    meet: ClassVar[list[Callable[[CallKind], None]]] = []
    # Lets the others out of such a meeting, and tells them what was raised here, or that the loop is over.
    leave: ClassVar[list[Callable[[BaseException | None], None]]] = []
    cell: ClassVar[int] = 0  # the number of the cell that runs, whose first call of each kind is compared

    def __init__(self, request: Request, hosts: int):
        self._request, self._hosts = request, hosts
        self._under_way: deque[tuple[Entry, Any, Any, Any]] = deque()
        _ALL.add(self)
        self._apart = request.data == "per-host"
        self._calls: Counter[tuple[int, Entry]] = Counter()
        self._last: Entry | None = None
        self._has_met = False
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

    def begin(self) -> None:
        """A call begins, in which hosts meet once."""
        self._has_met = False

    def meet_again(self) -> None:
        """Meet before a call that is made beside those of the user's."""
        self.begin()
        self.enter("the step", self._last, lambda: (["a call that is recorded"], []))

    def enter(self, name: str, entry: Entry | None, describe: Callable[[], Description]) -> None:
        """Meet for a call of a step's program `entry`, None for one that is still to be made, and let go of what calls
        were given that have finished. Raises ShardError where hosts call otherwise, before anything runs."""
        if self._has_met:
            return
        self._has_met = True
        call = CallKind(name, entry is None or entry is not self._last, describe, self._hosts, self._apart)
        for meet in OnHosts.meet:
            meet(call)
        if call.is_new and not call.compared and (OnHosts.meet or entry is None or entry.calls == 0):
            call.compare(BETWEEN_S if OnHosts.meet else None)
        self._last = entry
        while self._under_way and ((sign := self._under_way[0][-1]) is None or is_done(sign)):
            self._under_way.popleft()

    def called(self, entry: Entry, inputs: Any, outs: Any) -> None:
        """A call was made. Until it has finished, which it never does where a host dies, what it was given is kept: the
        devices do so anyway."""
        self._last = entry
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
        ShardError where that is not the same on all."""
        self._agree(entry, peeled.leaves)
        return replace(peeled, leaves=entry.joined(peeled.leaves)) if entry.rows else peeled

    def later(self, call: Any, ours: Ours) -> "LaterCall":
        """`call`, one of `calls`, as hosts make it together."""
        return LaterCall(self, call, ours)

    def takes(self, entry: Entry, leaves: Sequence[Any]) -> bool:
        """Whether these flat inputs, as this host has them, are those of a call that the program was made for. Arrays
        that hosts have together are the same on all, and not looked at: half a microsecond each."""
        avals = entry.traced.closed.in_avals[len(entry.consts) :]
        return all(
            not is_part(x) or self._fits(entry, i, x, aval)
            for i, (x, aval) in enumerate(zip(leaves, avals, strict=True))
        )

    def _fits(self, entry: Entry, i: int, x: Any, aval: Any) -> bool:
        shape, dtype, weak = kind(x)
        dim = entry.rows.get(i)
        if dim is not None and dim < len(shape):
            shape = (*shape[:dim], shape[dim] * self._hosts, *shape[dim + 1 :])
        return (shape, dtype, weak) == (aval.shape, aval.dtype, aval.weak_type)

    def described(self, entry: Entry, leaves: Sequence[Any]) -> Description:
        """What hosts compare of a call of a known program."""
        call, paths = entry.call_of, entry.traced.in_paths
        names = map(path_name, paths[len(paths) - len(leaves) :])
        return self._description(call, list(map(_leaf, names, leaves)))

    def described_anew(self, peeled: Peeled) -> Description:
        """What hosts compare of a call as it is made here."""
        names = (path_name(path) for path, _, _ in peeled.inputs)
        return self._description(peeled, list(map(_leaf, names, peeled.leaves)))

    def _description(self, call: Peeled | None, leaves: list[Leaf]) -> Description:
        request = self._request
        head = [request.strategy, str(request.options), str(dict(request.mesh.shape))]
        if call is not None:
            head += fixed([*call.held.values(), *call.statics.values()])
        return head, leaves

    def brought(
        self, entry: Entry, inputs: tuple[Any, ...], leaves: Sequence[Any], ours: Ours
    ) -> tuple[Any, ...]:
        """The arranged inputs of a later call, flat as `leaves`, where the program wants them. Raises ShardError as
        `joined` does."""
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
        """Compare what hosts have for the first call of a kind in a cell, then ever more seldom: after 1, 2, 4, ...
        calls, and each SAMPLED calls."""
        calls = self._calls[OnHosts.cell, entry]  # those that a loop skips, too
        if not calls:
            self._calls.clear()
        self._calls[OnHosts.cell, entry] += 1
        if calls % SAMPLED == 0 or calls & (calls - 1) == 0:
            _values_agree(entry, leaves)


class LaterCall:
    """A later call on several hosts: a call of `calls` whose inputs hosts compare and bring where the program wants
    them, and which is under way until it has finished."""

    def __init__(self, hosts: OnHosts, call: Any, ours: Ours):
        self._hosts, self._call, self._ours = hosts, call, ours
        self.entry: Entry = call.entry
        self.watch = call.watch

    def gather(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        hosts, entry = self._hosts, self.entry
        inputs, watch = self._call.gather(args, kwargs)
        leaves = entry.leaves(inputs)
        if not hosts.takes(entry, leaves):
            raise Mismatch
        hosts.enter(_name(entry), entry, partial(hosts.described, entry, leaves))
        return hosts.brought(entry, inputs, leaves, self._ours), watch

    def finish(self, watch: Any, inputs: tuple[Any, ...], outs: Any) -> Any:
        self._hosts.called(self.entry, inputs, outs)
        return self._call.finish(watch, inputs, outs)


def finished(x: Any) -> jax.Array | None:
    """An array that a step gave back, or where a dead host keeps the step from its end, that of the last step which has
    come to one; None where that is gone, as it was given away."""
    while x is not None and not x.is_deleted() and not _bits(x).is_ready():
        x = next((before for each in list(_ALL) if (before := each.before(x)) is not None), None)
    return None if x is None or x.is_deleted() else x


def on_hosts(request: Request) -> OnHosts | None:
    """None where the devices are those of one host, or not attached."""
    hosts = 1 if target_of(request.mesh) is not None else hosts_of(request.mesh)
    return None if hosts == 1 else OnHosts(request, hosts)


def _leaf(path: str, x: Any) -> Leaf:
    shape, dtype, *_ = aval(x)
    return path, str(dtype), list(shape), is_part(x)


def _name(entry: Entry) -> str:
    return "the step" if entry.call_of is None else entry.call_of.step.name


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
    sums = " ".join(map(_told, leaves, entry.shardings))
    said = [set(each) for each in zip(*(host.split(" ") for host in gathered(sums)), strict=True)]
    same = [len(each) == 1 for each in said]
    n = len(entry.consts)
    inputs = entry.plan.leaves[n : n + len(leaves)]
    if mixed := [leaf for leaf, each in zip(inputs, said, strict=True) if AWAY in each and len(each) > 1]:
        raise ShardError(
            f"{_name(entry)}: {mixed[0].path} is an array of all {entry.hosts} hosts on some, and a host's own on "
            "others. Make it in the same way on all"
        )
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
    head = f"{_name(entry)}: {leaf.path} is not the same on all {entry.hosts} hosts"
    if leaf.role == BATCH:
        return ShardError(
            f"{head}. Where each host loads its own part of the batch, say {PER_HOST}; else load the same on all",
            fix=PER_HOST,
        )
    return ShardError(f"{head}. Make it alike on all of them, from the same seed or the same file")


def _told(x: Any, sharding: NamedSharding) -> str:
    """What a host says of an array that it gives a call."""
    if is_part(x):
        return f"{_sum(x):x}"
    return WHOLE if lies(x, sharding) else AWAY


def _sum(x: Any) -> int:
    return crc32(np.ascontiguousarray(_bits(x)).tobytes())


def _bits(x: Any) -> Any:
    """The array that a typed key's numbers are in; any other array is its own."""
    return jax.random.key_data(x) if is_key(x) else x
