"""A split step made programs and run: one actor a rank, each with its own actions, arrays handed from rank to rank."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import SingleDeviceSharding

from ..gradients.part import Part, needed
from ..gradients.rows import rows_of, split as in_microbatches
from ..program.ir import Value
from ..schedule.actions import Action, parts
from .actors import Actor, together
from .places import Group
from .programs import Share, StageProgram
from .split import Split


class Pipeline:
    """Runs a `Split` with one device a rank. `events` of the last run that was timed: rank, action, start and end in
    seconds. `peaks` of the last run: the most activations that each rank held, one a microbatch of a stage."""

    def __init__(self, split: Split, devices: Sequence[Any]):
        self.split, self._homes = split, [SingleDeviceSharding(d) for d in devices]
        self.actors = [Actor(rank) for rank in range(split.schedule.stages)]
        self.stages = [_StagePrograms(split, s) for s in range(len(split.programs))]
        self.groups = [(group, _of_group(split, group)) for group in split.placed.groups]
        self.whole = _Whole(split)
        self.wants = [self._wanted(rank) for rank in range(split.schedule.stages)]
        self.events: list[tuple[int, str, float, float]] = []
        self.peaks: list[int] = [0] * split.schedule.stages

    def put(self, x: Any, rank: int) -> Any:
        return jax.device_put(x, self._homes[rank])

    def readers(self, v: Value) -> list[int]:
        """The other ranks that read a value."""
        home = self.split.placed.at.get(v)
        return [r for r, wanted in enumerate(self.wants) if v in wanted and r != home]

    def _wanted(self, rank: int) -> set[Value]:
        split, found = self.split, set()
        for group, _ in self.groups:
            if group.place == rank:
                found.update(group.reads)
        for s in split.schedule.stages_of[rank]:
            stage = split.programs[s].stage
            for i in (*stage.parameters, *stage.others):
                if i in split.input_of:
                    found.add(split.input_of[i])
                elif split.loss.pieces[i].operand:
                    found.update(split.operands[k].values[0] for k in self.whole.norm_operands)
        if rank == split.hub:
            found.update(split.operands[k].values[0] for k in self.whole.operands)
        return found

    def __call__(
        self, leaves: Mapping[Value, Any], batch: Mapping[Value, Any], *, timed: bool = False
    ) -> dict[Value, Any]:
        """The outputs of the step by value; `leaves` lie at their places, `batch` anywhere."""
        made: dict[Value, Any] = {}
        events: list[tuple[int, str, float, float]] | None = [] if timed else None
        together(self.actors, lambda actor: _Rank(self, actor, batch, events).run(leaves, made))
        if events is not None:
            first = min(start for _, _, start, _ in events)
            self.events = sorted((r, a, s - first, e - first) for r, a, s, e in events)
        return made


class _StagePrograms:
    """The programs of one stage: each picks its microbatch out of the whole batch, and adds to sums of gradients."""

    def __init__(self, split: Split, s: int):
        program = self.program = split.programs[s]
        n = len(program.moving_ins)
        self.forward = jax.jit(_of_microbatch(program, program.forward))
        self.backward = jax.jit(_adding(program, program.backward, n), donate_argnums=0)
        self.input_gradient = jax.jit(_of_microbatch(program, program.input_gradient))
        self.weight_gradient = jax.jit(_adding(program, program.weight_gradient, 0), donate_argnums=0)
        loss = split.loss.program
        self.zeros = jax.jit(
            lambda: [
                jnp.zeros(a.shape, jnp.float32 if a.dtype in (jnp.bfloat16, jnp.float16) else a.dtype)
                for a in (loss.closed.in_avals[i] for i in program.stage.parameters)
            ]
        )


def _of_microbatch(program: StageProgram, share: Share) -> Callable[..., list]:
    def run(m: Any, parameters: list, others: list, *rest: Any) -> list:
        mine = [
            lax.dynamic_index_in_dim(x, m, 0, keepdims=False) if k in program.examples else x
            for k, x in enumerate(others)
        ]
        return share(*parameters, *mine, *rest)

    return run


def _adding(program: StageProgram, share: Share, first: int) -> Callable[..., tuple[list, list]]:
    own = _of_microbatch(program, share)

    def run(sums: list, m: Any, parameters: list, others: list, *rest: Any) -> tuple[list, list]:
        made = own(m, parameters, others, *rest)
        return made[:first], [a + x.astype(a.dtype) for a, x in zip(sums, made[first:], strict=True)]

    return run


def _of_group(split: Split, group: Group) -> Callable[..., list]:
    program = split.around.program
    part = Part(program, group.wanted, [v for v in group.reads if v not in program.inputs])
    place = {v: i for i, v in enumerate(program.inputs)}

    def run(*args: Any) -> list:
        inputs: list[Any] = [None] * len(program.inputs)
        known = dict(zip(group.reads, args, strict=True))
        for v, x in known.items():
            if v in place:
                inputs[place[v]] = x
        return part(inputs, known)

    return jax.jit(run)


class _Whole:
    """What is made of the whole batch: the sums that a microbatch's loss needs, and the results of the gradient call."""

    def __init__(self, split: Split):
        self.call = call = split.call
        self.norms = list(call.followed.norms.values())
        self.norm_operands = self._read(self.norms, ())
        outs = [
            v for j, v in enumerate(call.large.outputs) if v is not None and j not in call.outputs.carried
        ]
        self.operands = self._read(outs, call.outputs.how)
        self.make_norms = jax.jit(self._norms)
        self.finish = jax.jit(self._finish)

    def _read(self, wanted: Sequence[Value], known: Any) -> list[int]:
        """The operands that these values of the whole batch's loss are made of."""
        program = self.call.large
        indices = needed(program.top, set(wanted) - set(known), set(known))
        read = {v for e in program.top.equations if e.index in indices for v in e.ins} | set(wanted)
        return [k for k, v in enumerate(program.inputs) if v in read]

    def _operands(self, read: Sequence[int], given: Sequence[Any]) -> list:
        found: list[Any] = [None] * len(self.call.large.inputs)
        for k, x in zip(read, given, strict=True):
            found[k] = x
        return found

    def _norms(self, *given: Any) -> list:
        return Part(self.call.large, self.norms)(self._operands(self.norm_operands, given))

    def _finish(self, given: Sequence[Any], sums: Sequence[Any], stacked: Sequence[Any]) -> list:
        call = self.call
        state = [None] * len(call.outputs.carried)
        return call.outputs.whole(self._operands(self.operands, given), call.values(sums, stacked), state)


class _Rank:
    """One rank's run of one step."""

    def __init__(self, pipeline: Pipeline, actor: Actor, batch: Mapping[Value, Any], events: list | None):
        self.pipeline, self.actor, self.rank = pipeline, actor, actor.rank
        self.split, self._batch, self._events = pipeline.split, batch, events
        self._have: dict[Value, Any] = {}
        self._held: dict[tuple[int, int], tuple] = {}
        self._waiting: dict[tuple[int, int], tuple] = {}

    def run(self, leaves: Mapping[Value, Any], made: dict[Value, Any]) -> None:
        at, split = self.split.placed.at, self.split
        for v, x in leaves.items():
            if at[v] == self.rank:
                self._emit(v, x)
        self._run_groups(before=True)
        self._prepare()
        for step in split.schedule.grid[self.rank]:
            for action in parts(step):
                self._act(action)
        self._hand_in()
        self._run_groups(before=False)
        for part in split.outputs:
            for v in part.values:
                if at.get(v) == self.rank:
                    made[v] = self._have[v]
                elif v not in at and self.rank == split.hub:
                    made[v] = self._want(v)

    def _emit(self, v: Value, x: Any) -> None:
        self._have[v] = x
        for rank in self.pipeline.readers(v):
            self.pipeline.actors[rank].give(("value", v), self.pipeline.put(x, rank))

    def _want(self, v: Value) -> Any:
        if v not in self._have:
            here = self._batch.get(v)
            self._have[v] = (
                self.actor.take(("value", v)) if here is None else self.pipeline.put(here, self.rank)
            )
        return self._have[v]

    def _run_groups(self, *, before: bool) -> None:
        for group, program in self.pipeline.groups:
            if group.place == self.rank and group.before == before:
                outs = program(*(self._want(v) for v in group.reads))
                for v, x in zip(group.wanted, outs, strict=True):
                    self._emit(v, x)

    def _prepare(self) -> None:
        """What the stages of this rank read, and where they add up."""
        split, call, pipeline = self.split, self.split.call, self.pipeline
        cut, norms = call.cut, None
        self._numbers = [pipeline.put(jnp.int32(m), self.rank) for m in range(cut.microbatches)]
        self._parameters, self._others, self._sums, self._given = {}, {}, {}, defaultdict(list)
        for s in split.schedule.stages_of[self.rank]:
            stage, others = split.programs[s].stage, []
            for i in stage.others:
                k = split.loss.pieces[i].operand
                if k == 0:
                    others.append(
                        pipeline.put(rows_of(cut.examples, cut.microbatches, cut.shards), self.rank)
                    )
                elif i not in split.input_of:
                    if norms is None:
                        read = (split.operands[q].values[0] for q in pipeline.whole.norm_operands)
                        norms = pipeline.whole.make_norms(*(self._want(v) for v in read))
                    others.append(norms[k - 1])
                else:
                    x, dim = self._want(split.input_of[i]), call.batch.get(k - split.first)
                    others.append(x if dim is None else in_microbatches(x, dim, cut.microbatches, cut.shards))
            self._parameters[s] = [self._want(split.input_of[i]) for i in stage.parameters]
            self._others[s] = others
            self._sums[s] = pipeline.stages[s].zeros()

    def _act(self, action: Action) -> None:
        s, kind, m = action
        {"F": self._forward, "B": self._backward, "I": self._input, "W": self._weight}[kind](
            s, m, str(action)
        )

    def _timed(self, name: str, program: Callable[..., Any], *args: Any) -> Any:
        if self._events is None:
            return program(*args)
        start = time.perf_counter()
        outs = jax.block_until_ready(program(*args))
        self._events.append((self.rank, name, start, time.perf_counter()))
        return outs

    def _forward(self, s: int, m: int, name: str) -> None:
        stage, programs = self.split.programs[s].stage, self.pipeline.stages[s]
        ins = self.actor.take(("forward", s, m)) if s else []
        others = list(self._others[s])
        outs = self._timed(name, programs.forward, self._numbers[m], self._parameters[s], others, *ins)
        n, g = len(stage.outs), len(stage.gives)
        if stage.outs:
            self._hand("forward", s + 1, m, outs[:n])
        for j, x in zip(stage.gives, outs[n : n + g], strict=True):
            self._give(s, j, x)
        self._held[s, m] = others, outs[n + g :]
        peaks = self.pipeline.peaks
        peaks[self.rank] = max(peaks[self.rank], len(self._held) + len(self._waiting))

    def _give(self, s: int, j: int, x: Any) -> None:
        """A value that a microbatch gives of its loss: added up, put beside the others, or state for the next."""
        call = self.split.call
        given = len(call.outputs.given)
        if j >= given:
            operand = list(call.outputs.carried.values())[j - given]
            for k, i in enumerate(self.split.programs[s].stage.others):
                if self.split.loss.pieces[i].operand == self.split.first + operand:
                    self._others[s][k] = x
            self._given[j] = [x]
        elif call.is_sum[j] and self._given[j]:
            self._given[j] = [self._given[j][0] + x.astype(self._given[j][0].dtype)]
        else:
            short = x.dtype in (jnp.bfloat16, jnp.float16) and call.is_sum[j]
            self._given[j].append(x.astype(jnp.float32) if short else x)

    def _cotangents(self, s: int, m: int) -> list:
        program = self.split.programs[s]
        found = self.actor.take(("backward", s, m)) if program.moving_outs else []
        return [*found, self._seed] if program.makes_loss else found

    @cached_property
    def _seed(self) -> Any:
        value = self.split.loss.program.closed.out_avals[0]
        return self.pipeline.put(jnp.asarray(self.split.call.seed, value.dtype), self.rank)

    def _backward(self, s: int, m: int, name: str) -> None:
        others, kept = self._held.pop((s, m))
        args = self._numbers[m], self._parameters[s], others, *self._cotangents(s, m), *kept
        back, self._sums[s] = self._timed(name, self.pipeline.stages[s].backward, self._sums[s], *args)
        self._hand("backward", s - 1, m, back)

    def _input(self, s: int, m: int, name: str) -> None:
        others, kept = self._held.pop((s, m))
        rest = *self._cotangents(s, m), *kept
        outs = self._timed(
            name, self.pipeline.stages[s].input_gradient, self._numbers[m], self._parameters[s], others, *rest
        )
        n = len(self.split.programs[s].moving_ins)
        self._waiting[s, m] = others, (*rest, *outs[n:])
        self._hand("backward", s - 1, m, outs[:n])

    def _weight(self, s: int, m: int, name: str) -> None:
        others, rest = self._waiting.pop((s, m))
        args = self._numbers[m], self._parameters[s], others, *rest
        _, self._sums[s] = self._timed(name, self.pipeline.stages[s].weight_gradient, self._sums[s], *args)

    def _hand(self, key: str, s: int, m: int, arrays: Sequence[Any]) -> None:
        if s >= 0 and arrays:
            rank = self.split.schedule.rank_of[s]
            there = [self.pipeline.put(x, rank) for x in arrays]
            self.pipeline.actors[rank].give((key, s, m), there)

    def _hand_in(self) -> None:
        """Gradients to the ranks that own their parameters, what the loss gives to the last stage's."""
        split, pipeline, call = self.split, self.pipeline, self.split.call
        total: dict[int, Any] = {}
        for s in split.schedule.stages_of[self.rank]:
            stage = split.programs[s].stage
            for i, x in zip(stage.parameters, self._sums.pop(s), strict=True):
                if (owner := split.owner(i)) == self.rank:
                    total[i] = total[i] + x if i in total else x
                else:
                    pipeline.actors[owner].give(("gradient", i, s), pipeline.put(x, owner))
            for j in stage.gives:
                if j < len(call.outputs.given):
                    xs = self._given.pop(j)
                    x = xs[0] if call.is_sum[j] else jnp.stack(xs)
                    pipeline.actors[split.hub].give(("given", j), pipeline.put(x, split.hub))
        for i, v in split.gradient_of.items():
            if split.owner(i) != self.rank:
                continue
            aval = split.loss.program.closed.in_avals[i]
            for s in split.users.get(i, ()):
                if split.schedule.rank_of[s] != self.rank:
                    x = self.actor.take(("gradient", i, s))
                    total[i] = total[i] + x if i in total else x
            g = total.pop(i, None)
            g = (
                pipeline.put(jnp.zeros(aval.shape, aval.dtype), self.rank)
                if g is None
                else g.astype(aval.dtype)
            )
            self._emit(v, g)
        self._results()

    def _results(self) -> None:
        split, call = self.split, self.split.call
        given = len(call.outputs.given)
        for n, j in enumerate(call.outputs.carried):
            if (xs := self._given.pop(given + n, None)) is not None:
                self._emit(split.results[j].values[0], xs[0])
        if self.rank != split.hub:
            return
        found = [self.actor.take(("given", j)) for j in range(given)]
        sums = [x for x, summed in zip(found, call.is_sum, strict=True) if summed]
        stacked = [x for x, summed in zip(found, call.is_sum, strict=True) if not summed]
        read = [self._want(split.operands[k].values[0]) for k in self.pipeline.whole.operands]
        outs = self.pipeline.whole.finish(read, sums, stacked)
        for j, x in enumerate(outs):
            if j not in call.outputs.carried:
                self._emit(split.results[j].values[0], x)
