"""`MeshSpec`: mesh text such as `cpu:8 data=4 model=2` -> axes and devices -> `jax.sharding.Mesh`."""

import ast
import functools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from .. import simulate, targets
from ..compiler_log import capture_messages
from ..errors import ShardError, nearest, unknown_name
from ..hardware import chip_of, chips
from ..hosts.spec import KINDS, UNENCRYPTED, HostsSpec
from ..simulate import Machine
from ..targets import Target, slices
from ..temporary import run_in_context
from .strategies import AXIS_JOBS, job_of

DEFAULT_SIMULATED = 8
Axes = tuple[tuple[str, int], ...]
_MOST_AXES, _MOST = 32, 10**9  # most axes of a mesh, and most devices along an axis
_LISTED = '[[4,2],["data","model"]]'
FORMS = f"data=4 model=2, or {_LISTED}, or cpu:8 data=4 model=2, or v5e:4x4 data=4 model=4"


@dataclass(frozen=True)
class MeshSpec:
    """Mesh as requested.

    Attributes:
        axes: Names and sizes in order; one size may be -1, for all devices left.
        source: "attached" (devices of this machine), "simulated" (`cpu:N`), "topology" (a slice that isn't attached),
            or "hosts".
        platform: Platform named in the text; None without one.
        count: Number of devices named in the text; None without one.
        target: Hardware of a "topology"; None for others.
        hosts: Hosts of a mesh over hosts; None for others.
        text: Text as written, with single spaces.
    """

    axes: Axes
    source: str = "attached"
    platform: str | None = None
    count: int | None = None
    target: Target | None = None
    hosts: HostsSpec | None = None
    text: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        _check_axes(self.axes)
        if self.count is not None:
            self.resolve(self.count, exactly=True)

    @classmethod
    def parse(cls, text: str) -> "MeshSpec":
        """Parse mesh text.

        Raises:
            ShardError: The text is no mesh, or the sizes don't multiply to the number of devices.

        >>> MeshSpec.parse("cpu:8 data=-1 model=2").axes
        (('data', -1), ('model', 2))
        """
        given = " ".join(text.split())
        made_of, rest = _device_part(given)
        if not rest and made_of.source != "attached":
            rest = "data=-1"
        axes = _listed_axes(rest) if rest[:1] in ("[", "(") else _written_axes(rest, given)
        return cls(axes, *made_of, text=given)

    def __str__(self) -> str:
        axes = axes_text(self.axes)
        if self.source == "attached":
            return axes
        return f"{self.made_of} {axes}"

    @property
    def made_of(self) -> str:
        """Devices as text: cpu:8, v5e:4x4, hosts:2."""
        if self.hosts is not None:
            return str(self.hosts)
        return self.target.name if self.target else f"{self.platform}:{self.count}"

    @property
    def size(self) -> int | None:
        """Number of devices; None if an axis takes all that are left."""
        sizes = [n for _, n in self.axes]
        return None if -1 in sizes else math.prod(sizes)

    def resolve(self, devices: int, *, exactly: bool = False) -> Axes:
        """Return the axes with a number in place of -1.

        Args:
            devices: Number of devices.
            exactly: Whether the axes must take all devices.

        Raises:
            ShardError: The axes don't fit the number of devices.
        """
        size = self.size
        if size is not None:
            if exactly and size != devices:
                raise ShardError(
                    f"mesh {axes_text(self.axes)} takes {size} devices ({_sizes_text(self.axes)}), "
                    f"{self.made_of} has {devices}. {self._instead(devices)}"
                )
            return self.axes
        fixed = math.prod(n for _, n in self.axes if n != -1)
        if devices % fixed:
            raise ShardError(
                f"mesh {axes_text(self.axes)}: {devices} devices don't divide by {fixed}, so -1 has no value. "
                f"{self._instead(devices)}"
            )
        return tuple((a, devices // fixed if n == -1 else n) for a, n in self.axes)

    def _instead(self, devices: int) -> str:
        """Return a suggestion for axes that fit: simulated devices can be any number, others are limited."""
        fixed = math.prod(n for _, n in self.axes if n != -1)
        if self.source == "simulated":
            count = self.size or math.ceil(devices / fixed) * fixed
            return f"Use cpu:{count} {axes_text(self.axes)}"
        first, *others = self.axes
        rest = math.prod(n for _, n in others if n != -1)
        if devices % rest == 0:
            axes = tuple((a, abs(n)) for a, n in others)
            return f"Use {axes_text(((first[0], devices // rest), *axes))}"
        return f"Use {first[0]}={devices}"


@dataclass(frozen=True)
class BuiltMesh:
    """Mesh of devices.

    Attributes:
        mesh: Mesh with Auto axes.
        source: "attached", "simulated" or "topology".
        notes: Lines for the user.
    """

    mesh: Mesh
    source: str
    notes: tuple[str, ...] = ()


@run_in_context(capture_messages)  # backends may start here, and libtpu logs errors on a machine without a TPU
def build(spec: MeshSpec, namespaces: simulate.Namespaces = ()) -> BuiltMesh:
    """Build the mesh from the devices of this machine, or from simulated CPU devices if there are too few.

    More CPU devices need a new backend; then the arrays in `namespaces` are moved.

    Args:
        spec: Mesh as requested.
        namespaces: Dicts whose arrays are moved.

    Raises:
        ShardError: Too few devices, or a mesh over hosts.
    """
    if spec.target is not None:
        return _not_attached(spec, spec.target)
    if spec.hosts is not None:
        raise ShardError(
            f"{spec.hosts}: hosts run whole cells, so that a mesh over them is made by %mesh {spec}, or by "
            f"jaxshard_magic.mesh in Python; a script that runs on each host itself takes {axes_text(spec.axes)}"
        )
    simulated = spec.source == "simulated"
    if not simulated and simulate.machine().platform is None:
        # The number of CPU devices is fixed once the backend has started.
        if 1 < (spec.size or 1) <= simulate.MAX_DEVICES:
            simulate.set_default_count(spec.size or 1)
        # Starts the backend; before, the machine's platform is unknown.
        jax.devices()
    machine = simulate.machine()
    axes = spec.resolve(device_count(spec, machine))
    count = math.prod(n for _, n in axes)

    match choose(replace(spec, axes=axes), machine):
        case "attached":
            return _built(axes, evenly(jax.devices(), axes), unused=len(jax.devices()) - count)
        case "cpu":
            return _built(axes, evenly(simulate.cpu_devices(), axes))
        case "start":
            simulate.start(max(count, simulate.config_value("jax_num_cpu_devices")))
            return _built(axes, simulate.cpu_devices()[:count])
        case "restart":
            mesh, notes = simulate.restart(count, namespaces, lambda: _built(axes, simulate.cpu_devices()[:count]).mesh)
            return BuiltMesh(mesh, "simulated", (_simulating(count), *notes))


def evenly(devices: Sequence[Any], axes: Axes) -> list[Any]:
    """Return the first devices for a mesh; with several hosts, an equal number from each, in the order of the hosts.

    Args:
        devices: Devices of all hosts.
        axes: Axes of the mesh.

    Raises:
        ShardError: Hosts can't give an equal number.
    """
    count, of_host = math.prod(n for _, n in axes), by_host(devices)
    each = count // len(of_host)
    if len(of_host) > 1 and (count % len(of_host) or any(len(own) < each for own in of_host.values())):
        has = ", ".join(str(len(own)) for own in of_host.values())
        most = min(map(len, of_host.values()))
        raise ShardError(
            f"mesh {axes_text(axes)} takes {count} devices; a mesh over {len(of_host)} hosts takes as many of each, "
            f"and they have {has}. Use data={len(of_host) * most}, or -1 for what is left"
        )
    return [device for own in of_host.values() for device in own[:each]]


def by_host(devices: Sequence[Any]) -> dict[int, list[Any]]:
    """Return devices by process index, in ascending order."""
    found: dict[int, list[Any]] = {}
    for device in sorted(devices, key=lambda device: device.process_index):
        found.setdefault(device.process_index, []).append(device)
    return found


def device_count(spec: MeshSpec, machine: Machine) -> int:
    """Return the number of devices of a mesh: an axis of size -1 takes all there are; a lone CPU counts as 8.

    The 8 are rounded up to a multiple of the other axes.
    """
    if known := spec.size or spec.count:
        return known
    if (machine.platform, machine.devices) != ("cpu", 1):
        return machine.devices
    fixed = math.prod(n for _, n in spec.axes if n != -1)
    return math.ceil(DEFAULT_SIMULATED / fixed) * fixed


def choose(spec: MeshSpec, machine: Machine) -> Literal["attached", "cpu", "start", "restart"]:
    """Return the source of devices for a mesh of known size.

    Args:
        spec: Mesh with all sizes known.
        machine: Present backends.

    Returns:
        "attached": The default backend's devices.
        "cpu": CPU devices beside them.
        "start": New CPU devices; no backend has started yet, so any number is possible.
        "restart": More CPU devices by a restart of the backend, on a machine with a CPU only.

    Raises:
        ShardError: No source has enough devices.
    """
    count = spec.size or 0
    simulated = spec.source == "simulated"
    on_cpu = simulated or machine.platform == "cpu"
    if on_cpu and count > simulate.MAX_DEVICES:
        raise ShardError(
            f"mesh {axes_text(spec.axes)} takes {count} simulated devices; {simulate.MAX_DEVICES} are the most. "
            "Use smaller axes"
        )
    if not simulated and machine.devices >= count:
        return "attached"
    if machine.cpu is None:
        return "start"
    if simulated and (machine.cpu == 0 or machine.cpu >= count):
        return "cpu"  # without a CPU backend, `simulate.cpu_devices` raises an error with the reason
    remedy = f"%mesh cpu:{count} {axes_text(spec.axes)}"
    if on_cpu and machine.platform == "cpu":
        if machine.processes == 1:
            return "restart"
        raise ShardError(
            f"mesh {axes_text(spec.axes)} takes {count} devices; these {machine.processes} processes have "
            f"{machine.devices} CPU devices. Set jax_num_cpu_devices before jax.distributed.initialize"
        )
    if simulated:
        raise ShardError(
            f"cpu:{count}: beside the {machine.platform} the CPU runs with {_devices(machine.cpu)}, and that "
            f"is fixed once JAX has started. Restart the kernel and run {remedy} first",
            fix=remedy,
        )
    later = "" if machine.cpu >= count else " first thing after a restart of the kernel"
    raise ShardError(
        f"mesh {axes_text(spec.axes)} takes {count} devices; this machine has {_devices(machine.devices)} of "
        f"platform {machine.platform}. For simulated ones run {remedy}{later}",
        fix=remedy,
    )


def axes_for(mesh: Mesh, job: str) -> tuple[str, ...]:
    """Return the axes of `mesh` whose names belong to `job`, in the mesh's order."""
    return tuple(str(a) for a in mesh.axis_names if job_of(str(a)) == job)


def default_spec(jobs: Sequence[str], devices: int, platform: str, stages: int | None = None) -> MeshSpec:
    """Return the default mesh of all devices for strategies with these jobs.

    A single job takes all devices. A pipeline takes `stages`, or the first of 4, 3 and 2 that divides the devices. Of
    the rest, tensor and every other job takes 2 if the devices left are even, and fsdp (or data) all that is left. A
    lone CPU is simulated as 8 devices, or as `stages` if these are more.

    Args:
        jobs: Jobs of mesh axes, in the order of the strategy.
        devices: Number of devices.
        platform: Platform of the devices.
        stages: Number of pipeline stages; None if open.

    >>> str(default_spec(["pipeline", "fsdp", "tensor"], 16, "gpu"))
    'pipe=4 data=2 model=2'
    """
    left = max(DEFAULT_SIMULATED, stages or 1) if (platform, devices) == ("cpu", 1) else devices
    if "pipeline" in jobs:  # first axis, over the slowest links: stages send the fewest messages
        stages = stages or next((n for n in (4, 3, 2) if left % n == 0), min(4, left))
        inner = default_spec([j for j in jobs if j != "pipeline"], max(1, left // stages), "").axes
        axes = (("pipe", stages), *(a for a in inner if len(jobs) > 1 or a[1] > 1))
        return MeshSpec(axes, text=axes_text(axes))
    mesh_jobs = [job for job in AXIS_JOBS if job in jobs] or ["data"]
    rest = next((j for j in ("fsdp", "data") if j in mesh_jobs), mesh_jobs[0])
    sizes: dict[str, int] = {}
    for job in reversed(mesh_jobs):
        if job != rest:
            sizes[job] = 2 if left % 2 == 0 and (job != "data" or left > 2) else 1
            left //= sizes[job]
    sizes[rest] = left
    names = {job: AXIS_JOBS[job].axis_names[0] for job in mesh_jobs}
    if "data" not in mesh_jobs:
        names["fsdp"] = "data"
    axes = tuple((names[j], sizes[j]) for j in mesh_jobs)
    return MeshSpec(axes, text=axes_text(axes))


def default_text(mesh: Mesh, jobs: Sequence[str], stages: int | None = None) -> str:
    """Return mesh text for the devices of `mesh` with axes for these jobs."""
    spec, target = default_spec(jobs, mesh.size, "", stages), targets.target_of(mesh)
    return str(spec) if target is None else f"{target.name} {spec}"


def _built(axes: Axes, devices: Sequence[Any], unused: int = 0) -> BuiltMesh:
    mesh, notes = arranged(axes, devices)
    if unused and devices[0].platform != "cpu":
        notes.insert(0, f"using the first {len(devices)} of {len(devices) + unused} devices")
    simulated = devices[0].platform == "cpu" and len(devices) > 1
    if simulated:
        notes.append(_simulating(len(devices)))
    return BuiltMesh(mesh, "simulated" if simulated else "attached", tuple(notes))


def arranged(axes: Axes, devices: Sequence[Any]) -> tuple[Mesh, list[str]]:
    """Return the mesh and notes for the user.

    Devices are ordered for fast links if JAX knows an order.
    """
    names = tuple(name for name, _ in axes)
    ordered, note = _in_order(tuple(size for _, size in axes), tuple(devices))
    return Mesh(ordered, names, axis_types=(AxisType.Auto,) * len(axes)), [note] if note else []


# Cached: 16 ms for 1,024 devices, and a search needs the same sizes for each strategy.
@functools.lru_cache(256)
def _in_order(sizes: tuple[int, ...], devices: tuple[Any, ...]) -> tuple[np.ndarray, str]:
    """Return the devices in JAX's order for axes of these sizes, and a note; names of axes don't matter."""
    try:
        return jax.make_mesh(sizes, [*map(str, range(len(sizes)))], devices=devices).devices, ""
    except (NotImplementedError, ValueError) as error:  # sizes that do not fit the torus, or several slices
        said = str(error).partition(".")[0]
        return np.array(devices).reshape(sizes), f"devices in plain order, JAX knows no better one: {said}"


def _simulating(count: int) -> str:
    return f"simulating {count} CPU devices"


def _not_attached(spec: MeshSpec, target: Target) -> BuiltMesh:
    axes = spec.resolve(target.count)
    mesh, notes = arranged(axes, targets.devices(target))
    doubtful = slices.size_note(target.chip, target.extent)
    return BuiltMesh(mesh, "topology", tuple(note for note in (doubtful, *notes) if note))


def _devices(n: int) -> str:
    return f"{n} device" if n == 1 else f"{n} devices"


class MadeOf(NamedTuple):
    """Devices of a mesh, in fields of `MeshSpec`.

    Attributes:
        source: "attached", "simulated", "topology" or "hosts".
        platform: Platform; None if the text names none.
        count: Number of devices; None if the text names none.
        target: Hardware that is not attached; None for others.
        hosts: Hosts; None for others.
    """

    source: str = "attached"
    platform: str | None = None
    count: int | None = None
    target: Target | None = None
    hosts: HostsSpec | None = None


def _device_part(given: str) -> tuple[MadeOf, str]:
    """Split mesh text into devices and axes: `cpu:8 data=4` -> devices, and "data=4".

    Raises:
        ShardError: Unknown hardware, or a number of simulated devices out of range.
    """
    first, _, rest = given.partition(" ")
    if (sold := slices.parse_vendor_name(first.rstrip(","))) is not None:
        return _slice(Target(*sold)), rest
    over = re.match(rf"({'|'.join(KINDS)}):(\S*)\s*", given)
    if over is not None:
        words = given[over.end() :].split(" ")
        rest = " ".join(word for word in words if word != UNENCRYPTED)
        return MadeOf("hosts", hosts=HostsSpec.parse(over[1], over[2], UNENCRYPTED in words)), rest
    head = re.match(r"([^\W\d][\w-]*):([^\s,]*)[\s,]*", given)
    if head is None or (job_of(head[1]) and chip_of(head[1]) is None):
        # `data:4` is an axis written with a colon, and no platform.
        return MadeOf(), given
    platform, extent, rest = head[1].lower(), head[2].lower(), given[head.end() :]
    if platform == "cpu":
        if not re.fullmatch(r"[0-9]{1,9}", extent) or not 1 <= int(extent) <= simulate.MAX_DEVICES:
            raise ShardError(f"'cpu:{head[2]}': write how many devices to simulate, 1 to {simulate.MAX_DEVICES}: cpu:8")
        return MadeOf("simulated", "cpu", int(extent)), rest
    chip = chip_of(platform)
    if chip is None:
        said = f"'{head[0].strip()}' names no known hardware"
        raise ShardError(unknown_name(said, platform, ("cpu", *chips()), "%mesh --list has all, with their sizes"))
    return _slice(Target(chip, slices.parse_extent(chip, extent))), rest


def _slice(target: Target) -> MadeOf:
    return MadeOf("topology", target.chip.key, target.count, target)


def _written_axes(rest: str, given: str) -> Axes:
    """Return the axes of `data=4 model=2`; `given` is the whole mesh text, for messages."""
    words = re.sub(r"\s*=\s*", "=", rest).replace(",", " ").split()
    if not words:
        raise ShardError(f"'{given}' is no mesh: write {FORMS}")
    return tuple(_written_axis(*pair) for pair in zip(words, [*words[1:], ""], strict=True))


def _written_axis(word: str, behind: str) -> tuple[str, int]:
    """Return the axis named by `word`.

    Args:
        word: Word of the mesh text.
        behind: Next word, which may be a missing size, for the suggestion.
    """
    name, equals, size = word.partition("=")
    if equals and name.isidentifier():
        if not re.fullmatch(r"[+-]?[0-9]{1,9}", size):
            raise ShardError(f"axis '{name}' has the size '{size}'; a size is a whole number, as in {name}=4, or -1")
        return name, int(size)
    apart = f"{word}={behind}" if re.fullmatch(r"[0-9]{1,9}", behind) else word[:100]
    near = nearest(word, [name for job in AXIS_JOBS.values() for name in job.axis_names])
    sized = re.fullmatch(r"([^\W\d]\w*?)[^\w]*(\d{1,9})", apart)
    meant = f"{sized[1]}={sized[2]}" if sized else near and f"{near}=-1"
    help = f". Did you mean '{meant}'? %mesh --help has the forms" if meant else f": write {FORMS}"
    raise ShardError(f"'{word}' is no mesh axis{help}")


def _listed_axes(text: str) -> Axes:
    """Return the axes of `[[4,2],["fsdp","tp"]]`: (("fsdp", 4), ("tp", 2))."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        value = None
    match value:
        case [(list() | tuple()) as sizes, (list() | tuple()) as names]:
            pass
        case _:
            raise ShardError(f"'{text}' is no mesh: write sizes, then names: {_LISTED}")
    if len(sizes) != len(names):
        raise ShardError(f"'{text}' has {len(sizes)} sizes and {len(names)} names; an axis has both")
    for size in sizes:
        # A bool is an int, but not a size.
        if type(size) is not int:
            raise ShardError(f"'{text}': the size {size!r} is no whole number, as 4 is, or -1")
    for name in names:
        if not (isinstance(name, str) and name.isidentifier()):
            raise ShardError(f"'{text}': {name!r} is no axis name, as \"data\" is")
    return tuple(zip(names, sizes, strict=True))


def _check_axes(axes: Axes) -> None:
    """Raise ShardError for axes that no mesh can have."""
    if not 1 <= len(axes) <= _MOST_AXES or any(abs(n) > _MOST for _, n in axes):
        raise ShardError(f"a mesh has 1 to {_MOST_AXES} axes, of {_MOST:,} devices at most: write {FORMS}")
    names = [a for a, _ in axes]
    for name, size in axes:
        if names.count(name) > 1:
            raise ShardError(f"mesh {axes_text(axes)} has the axis '{name}' twice: give each its own name")
        if size == 0 or size < -1:
            raise ShardError(f"axis '{name}' has the size {size}; use 1 or more, or -1 for what is left")
    if len(left := [a for a, n in axes if n == -1]) > 1:
        raise ShardError(f"mesh {axes_text(axes)}: only one axis can be -1, not {' and '.join(left)}. Give one a size")


def axes_text(axes: Iterable[tuple[str, int]]) -> str:
    """Return axes as text: `data=4 model=2`."""
    return " ".join(f"{a}={n}" for a, n in axes)


def _sizes_text(axes: Axes) -> str:
    """Return the sizes of axes as a product: `4 × 2`."""
    return " × ".join(str(n) for _, n in axes)
