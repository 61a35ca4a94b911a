"""The programs of a stage: forward, and backward whole or as input and weight gradients, each a part of one program."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.source_info_util import current_name_stack  # jax has no public form
from jax.extend.core import ClosedJaxpr, Literal

from ..gradients.part import Chosen, Part
from ..program.emit import Emitter
from ..program.flow import made_of, needed
from ..program.ir import Program, Value
from ..program.labels import gradient_labels
from ..program.lines import user_context
from ..program.replay import retraced
from ..strategies.hold import Hold
from ..strategies.layout import Layout, Spec
from ..strategies.regions.unreduced import Unreduced
from .halves import in_halves
from .stages import Stage

End = Value | Literal  # a result of a stage's program


@dataclass(frozen=True)
class Slots:
    """How many arrays of each kind a stage's program takes: parameters, other inputs of the loss, activations from the
    stage before, the cotangents of what it hands on and of the loss."""

    parameters: int
    others: int
    ins: int
    cotangents: int

    @property
    def given(self) -> int:
        """Inputs of the forward pass."""
        return self.parameters + self.others + self.ins


class StageProgram:
    """Forward and backward pass of one stage as one program, `(parameters, others, ins, cotangents)` ->
    `(outs, gives, cotangents of ins, gradients of parameters)`, and the parts of it that a schedule runs.

    `halved`: its backward loops are two each, for a schedule that runs input and weight gradients by themselves; what
    the first makes for the second, of all layers, is held between them. `opened`: the program as another one of the
    same stage has traced it.
    """

    def __init__(
        self,
        loss: Program,
        stage: Stage,
        examples: Collection[int],
        halved: bool = True,
        opened: ClosedJaxpr | None = None,
    ):
        self.stage, self._loss, self.halved = stage, loss, halved
        self.moving_ins = [k for k, v in enumerate(stage.ins) if _moves(loss, v)]
        self.moving_outs = [k for k, v in enumerate(stage.outs) if _moves(loss, v)]
        self.makes_loss = 0 in stage.gives
        at = loss.closed.in_avals
        self.avals = [
            *(at[i] for i in stage.parameters),
            *(at[i] for i in stage.others),
            *(loss.avals[v] for v in stage.ins),
            *(loss.avals[stage.outs[k]] for k in self.moving_outs),
            *([loss.closed.out_avals[0]] if self.makes_loss else []),
        ]
        self.slots = Slots(
            len(stage.parameters),
            len(stage.others),
            len(stage.ins),
            len(self.moving_outs) + self.makes_loss,
        )
        self.examples = [k for k, i in enumerate(stage.others) if i in examples]
        self._opened = retraced(Emitter(Program(self._traced()))) if opened is None else opened
        first = len(stage.outs) + len(stage.gives)
        urgent = range(first, first + len(self.moving_ins))
        self.whole = Program(in_halves(self._opened, urgent) if halved else self._opened)
        ends = zip(self.whole.outputs, self.whole.closed.jaxpr.outvars, strict=True)
        self._ends: list[End] = [var if v is None else v for v, var in ends]

    @cached_property
    def with_halves(self) -> "StageProgram":
        """The same stage with its backward loops in two."""
        if self.halved:
            return self
        examples = {self.stage.others[k] for k in self.examples}
        return StageProgram(self._loss, self.stage, examples, opened=self._opened)

    def _traced(self) -> ClosedJaxpr:
        stage, loss = self.stage, self._loss
        wanted = [*stage.outs, *(loss.outputs[j] for j in stage.gives)]
        forward = Part(loss, [v for v in wanted if v is not None], stage.ins)
        n, m, k = self.slots.parameters, self.slots.others, self.slots.ins

        def run(*args: Any) -> list:
            parameters, others = args[:n], args[n : n + m]
            ins, cotangents = args[n + m : n + m + k], args[n + m + k :]

            def differentiable(parameters: Sequence[Any], moving: Sequence[Any]) -> tuple[list, list]:
                known = dict(zip(stage.ins, ins, strict=True))
                known.update((stage.ins[i], x) for i, x in zip(self.moving_ins, moving, strict=True))
                inputs: list[Any] = [None] * len(loss.inputs)
                for i, x in zip((*stage.parameters, *stage.others), (*parameters, *others), strict=True):
                    inputs[i] = x
                made = forward(inputs, known)
                outs, gives = made[: len(stage.outs)], made[len(stage.outs) :]
                heads = [outs[i] for i in self.moving_outs] + gives[: int(self.makes_loss)]
                return heads, [*outs, *gives]

            moving = [ins[i] for i in self.moving_ins]
            _, back, made = jax.vjp(differentiable, list(parameters), moving, has_aux=True)
            gradients, given_back = back(list(cotangents))
            return [*made, *given_back, *gradients]

        return jax.make_jaxpr(run)(*self.avals)

    @cached_property
    def forward(self) -> "Share":
        """`(parameters, others, ins)` -> `(outs, gives, kept)`; `kept` is what the backward pass needs of it."""
        return Share(self.whole, range(self.slots.given), (), [*self.made, *self.kept])

    @cached_property
    def backward(self) -> "Share":
        """`(parameters, others, cotangents, kept)` -> `(cotangents of ins, gradients)`."""
        return Share(self.whole, self._behind, self.kept, [*self.given_back, *self.gradients])

    @cached_property
    def input_gradient(self) -> "Share":
        """`(parameters, others, cotangents, kept)` -> `(cotangents of ins, kept for the weights)`."""
        return Share(self.whole, self._behind, self.kept, [*self.given_back, *self.kept_for_weights])

    @cached_property
    def weight_gradient(self) -> "Share":
        """`(parameters, others, cotangents, kept, kept for the weights)` -> `gradients`."""
        known = [*self.kept, *self.kept_for_weights]
        return Share(self.whole, self._behind, known, self.gradients)

    def share(self, kind: str) -> "Share":
        """The part that an action of a kind runs: F, B, I or W."""
        if kind == "F":
            return self.forward
        return {"B": self.backward, "I": self.input_gradient, "W": self.weight_gradient}[kind]

    @property
    def _behind(self) -> list[int]:
        """The inputs that are there for the backward pass without being kept for each microbatch."""
        s = self.slots
        return [*range(s.parameters + s.others), *range(s.given, s.given + s.cotangents)]

    @property
    def made(self) -> list[End]:
        """What the forward pass hands on and gives."""
        return self._ends[: len(self.stage.outs) + len(self.stage.gives)]

    @property
    def given_back(self) -> list[End]:
        """The cotangents of what came from the stage before."""
        first = len(self.made)
        return self._ends[first : first + len(self.moving_ins)]

    @property
    def gradients(self) -> list[End]:
        """One for each parameter."""
        return self._ends[len(self.made) + len(self.moving_ins) :]

    @cached_property
    def kept(self) -> list[Value]:
        """What the backward pass reads of the forward one and of the stage's `ins`. What is made of parameters alone is
        made again: it would be kept for every microbatch."""
        inputs, s = self.whole.inputs, self.slots
        n = s.parameters + s.others
        given = set(inputs[n : s.given])
        after = made_of(self.whole.top, inputs[s.given :])
        varying = made_of(self.whole.top, given | {inputs[s.parameters + k] for k in self.examples})
        ends = [*self.given_back, *self.gradients]
        backward = [e for e in self.whole.top.equations if any(v in after for v in e.outs)]
        read = dict.fromkeys(v for e in backward for v in e.ins if v is not None)
        read.update(dict.fromkeys(_values(ends)))
        return [v for v in read if v not in after and (v in given or (v in varying and v not in inputs))]

    @cached_property
    def input_equations(self) -> set[int]:
        """The equations of the top level that an input gradient runs."""
        return needed(self.whole.top, _values(self.given_back), set(self.kept))

    @cached_property
    def backward_equations(self) -> set[int]:
        """The equations of the top level that a whole backward pass runs."""
        ends = [*self.given_back, *self.gradients]
        return needed(self.whole.top, _values(ends), set(self.kept))

    @cached_property
    def kept_for_weights(self) -> list[Value]:
        """What the weights' gradients, where they run by themselves, read of the equations that the inputs' gradients
        need."""
        if not self.halved:
            return []
        first, rest = self.input_equations, self.backward_equations - self.input_equations
        by_index = {e.index: e for e in self.whole.top.equations}
        made = {v for i in first for v in by_index[i].outs}
        read = dict.fromkeys(v for i in sorted(rest) for v in by_index[i].ins if v in made)
        read.update(dict.fromkeys(v for v in _values(self.gradients) if v in made))
        return list(read)


@dataclass(frozen=True)
class Share:
    """Some values of a stage's program, from some of its inputs, by position, and from values that another share
    made."""

    whole: Program
    inputs: Sequence[int]
    known: Sequence[Value]
    wanted: Sequence[End]

    @property
    def avals(self) -> list[Any]:
        """Of its arguments."""
        inputs = self.whole.inputs
        return [self.whole.avals[v] for v in (*(inputs[i] for i in self.inputs), *self.known)]


class Runner:
    """Emits shares of one stage's program: as they are, or held to a layout."""

    def __init__(self, program: StageProgram, layout: Layout | None):
        self._program, self._gradients = program.whole, program.gradients
        kept = [*program.kept, *program.kept_for_weights]
        if layout is None:
            self._emitter: PlainParts | HeldParts = PlainParts(program.whole)
        else:
            of = {v: k for k, v in enumerate(program.gradients) if isinstance(v, Value)}
            named = gradient_labels(program.whole, layout.flow, of)
            self._emitter = HeldParts(layout, named, handed_on=kept, waiting=list(of))

    @property
    def hold(self) -> Hold | None:
        """What holds the program to its layout; None where it runs as it is."""
        return self._emitter if isinstance(self._emitter, HeldParts) else None

    def parts_spec(self, k: int) -> Spec | None:
        """Where the gradient of parameter k lies in parts, one for each shard of the examples, along a dimension before
        its own; None where it comes summed."""
        value = self._gradients[k]
        if not isinstance(self._emitter, HeldParts) or not isinstance(value, Value):
            return None
        return self._emitter.region(Unreduced).lies(value)

    def summed(self, k: int, x: Any) -> Any:
        """The gradient of parameter k, of which `x` are the parts."""
        value = self._gradients[k]
        assert isinstance(self._emitter, HeldParts)
        assert isinstance(value, Value)
        made = next(e.eqn.source_info for e in self._program.top.equations if value in e.outs)
        with user_context(made.traceback, name_stack=current_name_stack() + made.name_stack):
            return self._emitter.region(Unreduced).parts.reduced(x, value, x.dtype)

    def __call__(self, share: Share, args: Sequence[Any]) -> list:
        """The values that `share` makes of its inputs and of what is known."""
        inputs: list[Any] = [None] * len(self._program.inputs)
        for i, x in zip(share.inputs, args, strict=False):
            inputs[i] = x
        known = dict(zip(share.known, args[len(share.inputs) :], strict=True))
        self._emitter.choose([v for v in share.wanted if isinstance(v, Value)], share.known)
        made = iter(self._emitter.make(inputs, known))
        return [next(made) if isinstance(v, Value) else jnp.asarray(v.val) for v in share.wanted]


class PlainParts(Chosen, Emitter):
    """Emits parts of a program as they are."""


class HeldParts(Chosen, Hold):
    """Emits parts of a program held to a layout."""


def _moves(loss: Program, v: Value) -> bool:
    return bool(jnp.issubdtype(loss.avals[v].dtype, jnp.inexact))


def _values(ends: Sequence[End]) -> list[Value]:
    return [v for v in ends if isinstance(v, Value)]
