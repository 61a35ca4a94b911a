"""A program that fails made as short as it can be while it fails in the same way."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from .programs import Operation, Program

Fails = Callable[[Program], bool]


def shrink(program: Program, fails: Fails, seconds: float) -> Program:
    """The shortest program found in that time by taking away one thing after another; `fails` runs each candidate."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for candidate in smaller(program):
            if time.monotonic() > until:
                return program
            if fails(candidate):
                program = candidate
                break
        else:
            return program
    return program


def smaller(program: Program) -> Iterator[Program]:
    """Programs that lack something of this one, those that lack most first."""
    types = program.types
    seen = {program}
    for candidate in (
        *_without_much(program),
        *(replace(program, outputs=tuple(o for o in program.outputs if o != name)) for name in program.outputs),
        *(replace(program, loss=tuple(v for v in program.loss if v != name)) for name in program.loss[1:]),
        *(replace(program, loss=program.loss[1:]) for _ in program.loss[1:2]),
        *(replace(program, kept=tuple(k for k in program.kept if k != name)) for name in program.kept),
        *_bypassed(program),
        *_bodies(program),
        *([replace(program, jitted=False)] if program.jitted else []),
        *([replace(program, keyed=False)] if program.keyed and "(key" not in program.text() else []),
    ):
        candidate = candidate.pruned()
        if candidate not in seen and candidate.loss and all(n in types for n in candidate.loss):
            seen.add(candidate)
            yield candidate


def _without_much(program: Program) -> Iterator[Program]:
    """The loss of one early value alone; nothing but the loss; no unused input."""
    for o in program.operations:
        if o.type.floating and (o.name,) != program.loss:
            yield replace(program, loss=(o.name,), outputs=(), kept=())
    if program.outputs or program.kept:
        yield replace(program, outputs=(), kept=())
    for o in program.operations:
        if not o.type.floating and len(program.operations) > 1:
            yield replace(program, loss=program.loss[:1], outputs=(o.name,), kept=())


def _bypassed(program: Program) -> Iterator[Program]:
    """An operation less: what read it reads another value of its type, one of its operands first, else ones."""
    types = program.types
    for k, o in enumerate(program.operations):
        earlier = [*o.operands, *(v.name for v in (*program.params, *program.batch, *program.operations[:k]))]
        for other in dict.fromkeys(earlier):
            if types[other] == o.type:
                yield _renamed(program, o.name, other)
                break
        if o.operands:
            constant = f"jnp.ones({o.type.shape}, jnp.{o.type.dtype.replace('bool', 'bool_')})"
            yield _with(program, replace(o, text=constant, operands=(), body=None))


def _bodies(program: Program) -> Iterator[Program]:
    for o in program.operations:
        if o.body is not None:
            yield from (_with(program, replace(o, body=less)) for less in o.body.smaller())


def _with(program: Program, new: Operation) -> Program:
    return replace(program, operations=tuple(new if o.name == new.name else o for o in program.operations))


def _renamed(program: Program, old: str, new: str) -> Program:
    def names(among: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(new if n == old else n for n in among))

    operations = tuple(
        replace(o, operands=tuple(new if n == old else n for n in o.operands))
        for o in program.operations
        if o.name != old
    )
    floating = program.types[new].floating and new[0] != "x"
    loss = names(program.loss) if floating else tuple(v for v in program.loss if v != old)
    return replace(program, operations=operations, loss=loss, outputs=names(program.outputs))
