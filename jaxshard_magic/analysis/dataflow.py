"""Follow a value of a compiled program back to producers and on to consumers, through loops and fusions."""

import re
from collections import deque
from collections.abc import Callable, Iterator
from functools import cached_property

from .hlo import Computation, Instruction, Module

SiteName = tuple[str, str]  # computation, instruction
Site = tuple[Computation, Instruction]

_MOST = 200  # values visited from one start; values further away say nothing about it
_MOVING = frozenset(
    {"copy", "bitcast", "convert", "reshape", "transpose", "slice", "dynamic-slice", "reverse", "pad"}
    | {"copy-start", "copy-done", "bitcast-convert", "opt-barrier"}
)
_ELEMENT = "get-tuple-element"
_STARTS = 'custom_call_target="AsyncCollectiveStart"'
_ENDS = 'custom_call_target="AsyncCollectiveDone"'
_NAMED = 'op_name="'
_CHAIN = re.compile(r'chain_id="([^"]*)"')
_CHANNEL = re.compile(r"channel_id=(\d+)")


class Dataflow:
    """Walks over the values of one module; each computation is indexed once, at the first visit.

    Args:
        module: Parsed program.
    """

    def __init__(self, module: Module):
        self.module = module
        self._known_users: dict[str, dict[str, list[Instruction]]] = {}
        self._fusions: dict[str, SiteName] = {}  # calling fusion, by the name of its body, for bodies entered by a walk
        self._calls: dict[str, Site | None] = {}  # calling instruction of a computation, by its name

    def producers(self, computation: Computation, name: str) -> Iterator[Site]:
        """Yield the instructions producing a value, nearest first: followed back while instructions only move data.

        The last item computes something, or is a parameter of the program.
        """
        return self._walk((computation.name, name), self._step_back)

    def sources(self, computation: Computation, name: str) -> Iterator[Site]:
        """Yield the producers, and everything before instructions without an `op_name`."""
        # The compiler adds unnamed instructions, for example to send a value of one device to all.
        return self._walk((computation.name, name), self._step_back_unnamed)

    def consumers(self, computation: Computation, name: str) -> Iterator[Site]:
        """Yield the instructions depending on a value, nearest first."""
        walk = self._walk((computation.name, name), self._step_forward)
        next(walk, None)
        return walk

    def elements(self, computation: Computation, name: str) -> dict[int, Instruction]:
        """Return the get-tuple-element instructions on a tuple by index, also after the end of an asynchronous
        operation."""
        elements: dict[int, Instruction] = {}
        for user in self._users(computation).get(name, ()):
            if user.opcode == _ELEMENT:
                elements.setdefault(_index(user), user)
            elif user.opcode.endswith("-done"):
                elements.update(self.elements(computation, user.name))
        return elements

    def _walk(self, start: SiteName, step: Callable[[Computation, Instruction], Iterator[SiteName]]) -> Iterator[Site]:
        seen, todo = {start}, deque([start])
        while todo and len(seen) < _MOST:
            where, name = todo.popleft()
            computation = self.module.computations[where]
            instruction = computation.instructions.get(name)
            if instruction is None:
                continue
            yield computation, instruction
            for place in step(computation, instruction):
                if place not in seen:
                    seen.add(place)
                    todo.append(place)

    def _step_back(self, computation: Computation, i: Instruction) -> Iterator[SiteName]:
        if i.opcode == _ELEMENT:
            yield from self._element_back(computation, i)
        elif i.opcode == "parameter":
            yield from self._caller_operands(computation, i)
        elif i.operands and (i.opcode in _MOVING or (i.opcode == "fusion" and self._moves_only(i))):
            yield computation.name, i.operands[0]

    def _step_back_unnamed(self, computation: Computation, i: Instruction) -> Iterator[SiteName]:
        yield from self._step_back(computation, i)
        if i.opcode not in (_ELEMENT, "parameter") and _NAMED not in i.rest:
            yield from ((computation.name, operand) for operand in i.operands)

    def _caller_operands(self, computation: Computation, parameter: Instruction) -> Iterator[SiteName]:
        """Yield the caller's operand for a parameter of a fusion or an asynchronous operation."""
        if (call := self._call_of(computation)) is not None:
            where, caller = call
            number = int(parameter.rest.partition(")")[0])
            # TPU's compiler writes a reduce-scatter as a fusion with the `op_name` on the call. Of several operands,
            # that name belongs to only one.
            if len(caller.operands) == 1:
                yield where.name, caller.name
            yield from ((where.name, operand) for operand in caller.operands[number : number + 1])

    def _call_of(self, computation: Computation) -> Site | None:
        if computation.name not in self._calls:
            # The lookahead keeps `fusion.1` from matching `fusion.12`.
            written = re.compile(rf"calls=%?{re.escape(computation.name)}(?![\w.-])")
            callers = (c for c in self.module.computations.values() if written.search(c.text))
            calls = ((c, i) for c in callers for i in c.instructions.values() if written.search(i.rest))
            self._calls[computation.name] = next(calls, None)
        return self._calls[computation.name]

    def _element_back(self, computation: Computation, i: Instruction) -> Iterator[SiteName]:
        index, source = _index(i), computation.instructions.get(i.operands[0])
        if source is None:
            return
        if source.opcode == "tuple":
            yield computation.name, source.operands[index]
        elif source.opcode == "while":
            yield from self._end_of(source, index)
            yield from self._start_of(computation, source, index)
        elif source.opcode == "parameter":
            for caller, loop in self._loops.get(computation.name, ()):
                yield from self._start_of(caller, loop, index)
        else:
            yield computation.name, source.name

    def _end_of(self, loop: Instruction, index: int) -> Iterator[SiteName]:
        """Yield the value written to one element of a loop's state by a trip."""
        # TPU's compiler moves sums of gradients out of loops: the value after a loop was computed in the body.
        body = self.module.find_computation(loop.attribute("body"))
        if body is not None and (root := body.root) is not None and root.opcode == "tuple":
            yield body.name, root.operands[index]

    def _start_of(self, computation: Computation, loop: Instruction, index: int) -> Iterator[SiteName]:
        """Yield the initial value of one element of a loop's state."""
        start = computation.instructions.get(loop.operands[0])
        if start is not None and start.opcode == "tuple":
            yield computation.name, start.operands[index]

    def _moves_only(self, fusion: Instruction) -> bool:
        body = self.module.find_computation(fusion.attribute("calls"))
        inside = body.instructions.values() if body else ()
        # Scalars are loop counters and slice indices.
        arrays = [i for i in inside if any(shape.dims for shape in i.shapes)]
        return bool(arrays) and all(i.opcode in _MOVING or i.opcode == "parameter" for i in arrays)

    def _step_forward(self, computation: Computation, i: Instruction) -> Iterator[SiteName]:
        for user in self._users(computation).get(i.name, ()):
            if user.opcode == "tuple":
                yield from self._through_tuple(computation, user, i.name)
            else:
                yield self._fusion_parameter(computation, user, i.name) or (computation.name, user.name)
        if _STARTS in i.rest:
            yield from self._collective_end(computation, i)
        elif i.root and computation.name in self._fusions:
            yield self._fusions[computation.name]

    def _collective_end(self, computation: Computation, start: Instruction) -> Iterator[SiteName]:
        """Yield the end of a collective split over several fusions."""
        # TPU's compiler splits a collective into fusions and repeats the instruction in each.
        place = self._ends.get(_chain(computation, start))
        if place is not None:
            where, _ = place
            if (call := self._call_of(self.module.computations[where])) is not None:
                self._fusions[where] = call[0].name, call[1].name
            yield place

    def _fusion_parameter(self, computation: Computation, fusion: Instruction, name: str) -> SiteName | None:
        """Return the parameter through which a value enters a fusion; None for other instructions."""
        # A fusion has the name of its last operation, and the consumer asked for may be another one.
        body = self.module.find_computation(fusion.attribute("calls")) if fusion.opcode == "fusion" else None
        if body is None:
            return None
        number = f"{fusion.operands.index(name)})"
        inside = (i.name for i in body.instructions.values() if i.opcode == "parameter" and i.rest.startswith(number))
        self._fusions[body.name] = computation.name, fusion.name
        return next(((body.name, parameter) for parameter in inside), None)

    def _through_tuple(self, computation: Computation, made: Instruction, name: str) -> Iterator[SiteName]:
        indices = {k for k, operand in enumerate(made.operands) if operand == name}
        for user in self._users(computation).get(made.name, ()):
            body = self.module.find_computation(user.attribute("body")) if user.opcode == "while" else None
            if body is not None:
                yield from self._elements(body, None, indices)
        yield from self._elements(computation, made.name, indices)
        # The root of a loop body is both the state of the next trip and the result of the loop.
        if made.root and computation.name in self._loops:
            yield from self._elements(computation, None, indices)
            for caller, loop in self._loops[computation.name]:
                yield from self._elements(caller, loop.name, indices)

    def _elements(self, computation: Computation, whole: str | None, indices: set[int]) -> Iterator[SiteName]:
        """Yield the get-tuple-element instructions on a tuple, or on the computation's parameter if `whole` is None."""
        for i in computation.instructions.values() if whole is None else self._users(computation).get(whole, ()):
            if i.opcode == _ELEMENT and _index(i) in indices:
                source = computation.instructions.get(i.operands[0])
                if whole is not None or (source is not None and source.opcode == "parameter"):
                    yield computation.name, i.name

    def _users(self, computation: Computation) -> dict[str, list[Instruction]]:
        if computation.name not in self._known_users:
            users: dict[str, list[Instruction]] = {}
            for instruction in computation.instructions.values():
                operands = instruction.operands
                for operand in dict.fromkeys(operands) if len(operands) > 1 else operands:
                    users.setdefault(operand, []).append(instruction)
            self._known_users[computation.name] = users
        return self._known_users[computation.name]

    @cached_property
    def _ends(self) -> dict[tuple[str, str] | None, SiteName]:
        """End of each collective split into fusions, by chain and channel."""
        return {
            _chain(computation, i): (computation.name, i.name)
            for computation in self.module.computations.values()
            if _ENDS in computation.text
            for i in computation.instructions.values()
            if _ENDS in i.rest
        }

    @cached_property
    def _loops(self) -> dict[str, list[Site]]:
        """Loops by the name of the body."""
        loops: dict[str, list[Site]] = {}
        for computation in self.module.computations.values():
            if " while(" in computation.text:
                for i in computation.instructions.values():
                    body = self.module.find_computation(i.attribute("body")) if i.opcode == "while" else None
                    if body is not None:
                        loops.setdefault(body.name, []).append((computation, i))
        return loops


def _chain(computation: Computation, mark: Instruction) -> tuple[str, str] | None:
    """Return the chain and channel names of the collective started or ended by `mark`."""
    near = (computation.instructions[name].rest for name in mark.operands)
    for text in near:
        if chain := _CHAIN.search(text):
            channel = _CHANNEL.search(text)
            return chain[1], channel[1] if channel else ""
    return None


def _index(element: Instruction) -> int:
    return int(element.attribute("index") or 0)
