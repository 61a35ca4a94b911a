"""NVIDIA GPUs that aren't attached: what XLA is told of them, what is missing by name, and real compiles for nodes."""

import os

os.environ.setdefault("NPROC", "32")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import doctest
import subprocess
import sys
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard_magic.analysis.collectives import collectives, module_collectives
from jaxshard_magic.analysis.hlo import parse_module
from jaxshard_magic.errors import ShardError
from jaxshard_magic.hardware import chip, chip_of, chips
from jaxshard_magic.packages import install_command
from jaxshard_magic.targets import gpu

DATA = Path(__file__).parents[1] / "data"
GPUS = [key for key, row in chips().items() if row.kind == "gpu"]
F32, WIDTH, HIDDEN, EXAMPLES = 4, 64, 128, 32
WEIGHT = WIDTH * HIDDEN * F32  # bytes of each of the two

# jax's cache on disk can't give back programs for devices that aren't attached, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry")
compiles = pytest.mark.skipif(gpu.missing() is not None, reason=str(gpu.missing()))


@pytest.fixture
def here(monkeypatch):
    """A Linux machine with a plugin that pairs with its jax, and ptxas; `here(name=version)` changes packages."""
    versions = {"jax": "0.10.2", "jax-cuda12-plugin": "0.10.2", "jax-cuda13-plugin": None}

    def change(**other):
        versions.update({name.replace("_", "-"): version for name, version in other.items()})

    monkeypatch.setattr(gpu.platform, "system", lambda: "Linux")
    monkeypatch.setattr(gpu.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(gpu, "installed", lambda: versions)
    monkeypatch.setattr(gpu, "jax_requirements", lambda: {"jax-cuda12-plugin": "<=0.10.2,>=0.10.2"})
    monkeypatch.setattr(gpu, "plugin", lambda: "jax_plugins.xla_cuda12")
    monkeypatch.setattr(gpu, "ptxas", lambda: Path("ptxas"))
    monkeypatch.setattr(gpu, "architectures", lambda _: frozenset({"sm_75", "sm_80", "sm_90a"}))
    return change


def reason(row=None) -> ShardError:
    """What is missing; it must be one line."""
    found = gpu.missing(row)
    assert isinstance(found, ShardError)
    assert len(str(found).splitlines()) == 1
    return found


def test_nothing_is_missing_where_all_is_there(here):
    assert gpu.missing() is None
    assert gpu.missing(chip("h100")) is None


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Windows", "AMD64"), ("Linux", "ppc64le")])
def test_a_machine_for_which_there_is_no_plugin_is_named(here, monkeypatch, system, machine):
    monkeypatch.setattr(gpu.platform, "system", lambda: system)
    monkeypatch.setattr(gpu.platform, "machine", lambda: machine)
    assert str(reason()).startswith(f"no GPU compiler on {system} {machine}:")
    assert reason().fix is None


def test_a_missing_plugin_gives_the_line_that_installs_it_and_leaves_jax_alone(here):
    here(jax_cuda12_plugin=None)
    line = install_command("cuda-aot", "jax==0.10.2")
    assert str(reason()) == f"no GPU compiler: jax-cuda12-plugin is not installed. Run {line}"
    assert reason().fix == line


def test_a_plugin_without_its_other_half_says_which(here, monkeypatch):
    monkeypatch.setattr(gpu, "plugin", lambda: None)
    assert str(reason()).startswith("no GPU compiler: jax-cuda12-pjrt is not installed. Run pip")


def test_a_plugin_of_another_version_says_what_jax_needs(here):
    here(jax_cuda12_plugin="0.9.0")
    expected = "jax-cuda12-plugin 0.9.0 does not pair with jax 0.10.2, which needs jax-cuda12-plugin<=0.10.2,>=0.10.2. "
    assert str(reason()).startswith(expected + "Run pip install")


def test_missing_ptxas_says_which_package_has_it(here, monkeypatch):
    monkeypatch.setattr(gpu, "ptxas", lambda: None)
    assert "ptxas, of nvidia-cuda-nvcc-cu12, is not installed" in str(reason())


def test_a_chip_that_ptxas_makes_no_code_for_names_those_that_work(here):
    message = str(reason(chip("v100")))
    assert message.startswith("ptxas makes no code for V100 32GB (sm_70), but for a100-40, a100-80, h100, h200, t4.")


def test_a_ptxas_that_does_not_answer_is_asked_nothing(tmp_path):
    assert gpu.architectures(tmp_path / "none") == frozenset()


def test_ptxas_is_looked_for_where_jax_looks_first(monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ptxas").touch()
    monkeypatch.setenv("CUDA_ROOT", str(tmp_path))
    assert gpu.ptxas() == tmp_path / "bin" / "ptxas"


@pytest.mark.parametrize("key", GPUS)
def test_what_xla_is_told_names_the_device_as_jax_does(key):
    row = chip(key)
    text = gpu.target_config(row)
    assert row.compiler is not None
    assert f'device_description_str: "{row.compiler["device_kind"]}"' in text
    assert chip_of(row.compiler["device_kind"]) is row
    assert f"device_memory_size: {row.visible}" in text


def test_hopper_is_told_with_the_instructions_of_its_own():
    assert "{ major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }" in gpu.target_config(chip("h100"))
    assert "{ major: 7 minor: 5 feature_extension: NONE }" in gpu.target_config(chip("t4"))


def test_a_tpu_is_no_gpu():
    with pytest.raises(ShardError, match="TPU v5e is no GPU; those are v100-16, v100-32,"):
        gpu.topology_options(chip("v5e"), 1, 8)


def test_a_program_gets_three_quarters_of_gpu_memory_unless_told_otherwise():
    row = chip("h100")
    assert row.visible is not None
    assert gpu.usable_bytes(row, {}) == row.usable == row.visible * 3 // 4
    assert gpu.usable_bytes(row, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"}) == int(row.visible * 0.9)
    newer = {"XLA_CLIENT_MEM_FRACTION": "0.5", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"}
    assert gpu.usable_bytes(row, newer) == row.visible // 2


@pytest.mark.parametrize("share", ["0", "most", "-1", "90%"])
def test_a_share_that_is_none_says_so(share):
    with pytest.raises(ShardError, match=f"XLA_CLIENT_MEM_FRACTION={share} is no share"):
        gpu.usable_bytes(chip("h100"), {"XLA_CLIENT_MEM_FRACTION": share})


DP = {"all-reduce": 2 * WEIGHT}  # both gradients
FSDP = {"all-gather": 2 * WEIGHT, "reduce-scatter": 2 * WEIGHT}


@pytest.mark.parametrize(
    ("file", "expected"), [("gpu_dp.hlo", DP), ("gpu_fsdp.hlo", FSDP), ("gpu_fsdp_jax_0_12.hlo", FSDP)]
)
def test_the_text_of_a_gpu_program_is_counted_to_the_byte(file, expected):
    """Arrays travel together there, several to a collective, between a start and a done."""
    assert moved((DATA / file).read_text("utf-8"), {"data": 8}) == expected


def test_gradients_that_are_strung_together_are_told_one_by_one():
    found = module_collectives(parse_module((DATA / "gpu_dp.hlo").read_text("utf-8")), {"data": 8})
    assert [(m.operand, m.bytes) for m in found] == [("bitcast.3", WEIGHT), ("bitcast.4", WEIGHT)]


def moved(text: str, axes: dict[str, int]) -> dict[str, int]:
    """Bytes by kind of collective, each array once."""
    found = Counter[str]()
    for row in collectives(text, axes):
        found[row.kind] += row.count * row.bytes
    return dict(found)


@cache
def mesh(key: str, nodes: int, gpus: int) -> Mesh:
    devices = gpu.load(gpu.topology_options(chip(key), nodes, gpus))
    return Mesh(np.array(devices), ("data",))


def step(params, batch, whole):
    def loss(params):
        params = jax.lax.with_sharding_constraint(params, whole)
        hidden = jnp.tanh(batch["x"] @ params["up"])
        return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

    return jax.tree.map(lambda p, g: p - 0.01 * g, params, jax.grad(loss)(params))


def compiled(on: Mesh, weights: P) -> Any:
    def shape(*sizes, spec):
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=NamedSharding(on, spec))

    params = {"up": shape(WIDTH, HIDDEN, spec=weights), "down": shape(HIDDEN, WIDTH, spec=weights)}
    batch = {name: shape(EXAMPLES, WIDTH, spec=P("data")) for name in "xy"}
    outs = {name: NamedSharding(on, weights) for name in params}
    held = partial(step, whole=NamedSharding(on, P()))
    return jax.jit(held, out_shardings=outs).lower(params, batch).compile()


@compiles
@pytest.mark.parametrize(("key", "nodes", "gpus"), [("h100", 1, 8), ("a100-80", 2, 8)])
def test_a_step_compiles_for_nodes_that_are_not_there_and_moves_what_theory_says(key, nodes, gpus):
    on, axes = mesh(key, nodes, gpus), {"data": nodes * gpus}
    assert moved(compiled(on, P()).as_text(), axes) == DP
    assert moved(compiled(on, P("data")).as_text(), axes) == FSDP


@compiles
def test_a_compiled_step_says_what_it_holds():
    stats = compiled(mesh("h100", 1, 8), P()).memory_analysis()
    assert stats is not None
    assert stats.argument_size_in_bytes == 2 * WEIGHT + 2 * EXAMPLES * WIDTH * F32 // 8
    assert stats.peak_memory_in_bytes >= stats.argument_size_in_bytes + 2 * WEIGHT


@compiles
def test_devices_come_node_by_node_and_are_known_by_their_kind():
    devices = mesh("a100-80", 2, 8).devices.tolist()
    assert [d.process_index for d in devices] == [0] * 8 + [1] * 8
    assert [d.id for d in devices] == list(range(16))
    assert chip_of(devices[0].device_kind) is chip("a100")


@compiles
@pytest.mark.parametrize("key", [key for key in GPUS if gpu.missing(chip(key)) is None])
def test_the_compiler_takes_every_chip_that_ptxas_makes_code_for(key):
    on = Mesh(np.array(gpu.load(gpu.topology_options(chip(key), 1, 2))), ("data",))
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(on, P("data")))
    assert jax.jit(lambda x: jnp.tanh(x @ x.T)).lower(x).compile().as_text()


@compiles
def test_the_cpu_stays_where_work_runs():
    mesh("h100", 1, 8)
    assert {d.platform for d in jax.devices()} == {"cpu"}
    assert float(jnp.ones(3).sum()) == 3


@compiles
def test_a_process_that_has_looked_for_gpus_in_vain_gets_them_too():
    code = (
        "import os, jax; before = jax.devices()\n"
        "from jaxshard_magic.hardware import chip\n"
        "from jaxshard_magic.targets import gpu\n"
        "os.environ.update(gpu.environment())\n"
        "found = gpu.load(gpu.topology_options(chip('h100'), 1, 8))\n"
        "assert jax.devices() == before and before[0].platform == 'cpu'\n"
        "print(len(found), found[0].device_kind)\n"
    )
    quiet = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    paths = os.pathsep.join([str(DATA.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **quiet, "JAX_PLATFORMS": "", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "8 NVIDIA H100 80GB HBM3\n", done.stderr[-2000:]


def test_the_examples_run():
    assert doctest.testmod(gpu).failed == 0
