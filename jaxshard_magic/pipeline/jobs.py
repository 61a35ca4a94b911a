"""Programs to compile: what each takes, where that lies, and all of them compiled side by side."""

from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered

from ..meanwhile import tick
from ..program.callbacks import Callbacks
from ..program.compiling import awaited, compile_lowered, compilers, jit
from ..program.lines import lines_kept
from ..program.memory_kinds import lowered_as
from ..program.strict import quick_call
from .loaded import compiled_like, likeness

Key = tuple[str, int]  # what a program is for, and of which stage, rank or group


@dataclass(frozen=True)
class Job:
    """A program: `run(*args)` with arguments of the types `avals`, where `ins` and `outs` say; `donate`: arguments
    whose memory it takes over. Jobs that share `run` and `avals` are traced once."""

    run: Callable[..., Any]
    avals: tuple[Any, ...]
    ins: tuple[Any, ...]
    outs: Any
    donate: tuple[int, ...] = ()

    @property
    def mesh(self) -> Mesh:
        """The devices that it runs on."""
        return jax.tree.leaves((self.ins, self.outs))[0].mesh

    @property
    def likeness(self) -> Hashable:
        """The same for jobs that are one program but for the devices that they run on."""
        types = [(a.shape, str(a.dtype)) for a in jax.tree.leaves(self.avals)]
        specs = [f"{s.spec} {s.memory_kind}" for s in jax.tree.leaves((self.ins, self.outs))]
        return id(self.run), tuple(types), tuple(specs), self.donate

    def lowered(self) -> Lowered:
        """The program before the compiler of its devices has seen it."""
        jitted = jit(self.run, in_shardings=self.ins, out_shardings=self.outs, donate_argnums=self.donate)
        shapes, tree = jax.tree.flatten(self.avals)
        with lines_kept():
            return jitted.lower(*tree.unflatten(lowered_as(shapes, jax.tree.leaves(self.ins))))


@dataclass(frozen=True)
class Made:
    """A compiled program; `reads`: whether it reads each of its flat arguments, since jax drops the others. `call`: it
    as a function that is quick to call, None where its devices are not attached."""

    compiled: Any
    reads: tuple[bool, ...]
    call: Callable[..., Any] | None = None


# A job's program for other hardware, and whether it reads each of its flat arguments.
Elsewhere = Callable[[Job], tuple[Any, tuple[bool, ...]]]


def made_elsewhere(
    jobs: Mapping[Key, Job], compiler: Elsewhere, say: Callable[[str], None]
) -> dict[Key, Made]:
    """All of them compiled by the compiler of devices that are not attached, alike ones once."""
    known: dict[Hashable, Made] = {}
    made = {}
    alike = {key: job.likeness for key, job in jobs.items()}
    total = len(set(alike.values()))
    for key, job in jobs.items():
        if alike[key] not in known:
            say(f"{len(known) + 1} of {total} programs")
            known[alike[key]] = Made(*compiler(job))
        made[key] = known[alike[key]]
    return made


def make(jobs: Mapping[Key, Job], *, calls_host: bool = False) -> dict[Key, Made]:
    """All of them compiled, as many at a time as there are cores, and alike ones once where that can be. `calls_host`:
    some may call functions of the host that raise; a call of these waits for its end, so that what is raised is that
    action's."""
    callbacks = {key: Callbacks() for key in jobs if calls_host}
    jobs = {**jobs} | {
        key: replace(jobs[key], run=each.caught(jobs[key].run)) for key, each in callbacks.items()
    }
    first: dict[Hashable, Future[Compiled]] = {}
    programs: dict[Key, Future[Compiled]] = {}
    with compilers() as pool:
        for key, job in jobs.items():
            tick()  # many of them take their time
            lowered = job.lowered()
            like = likeness(lowered) if jax.tree.leaves((job.ins, job.outs)) else key
            if like in first:
                programs[key] = pool.submit(_after, first[like], lowered, job.mesh)
            else:
                programs[key] = first[like] = pool.submit(compile_lowered, lowered)
        compiled = {key: awaited(each) for key, each in programs.items()}
    made = {key: Made(c, _reads(c), quick_call(c)) for key, c in compiled.items()}
    for key, each in callbacks.items():
        if each.any and (call := made[key].call) is not None:
            made[key] = replace(made[key], call=each.raising(call))
    return made


def _after(first: Future[Compiled], lowered: Lowered, mesh: Mesh) -> Compiled:
    # the pool begins in order, so that what is waited for here has begun
    with lines_kept():
        return compiled_like(lowered, first.result(), mesh)


def _reads(compiled: Compiled) -> tuple[bool, ...]:
    """Whether the program reads each of its arguments: jax gives those it dropped no sharding."""
    return tuple(s is not None for s in compiled.in_tree.flatten_up_to(compiled.input_shardings))


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """What a program is lowered for in the place of an array."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))
