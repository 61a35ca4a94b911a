"""What fills memory at the peak of a sharded step: by line, by leaf, and as much as XLA lays out."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from theory.steps import STEPS

import jaxshard_magic
from jaxshard_magic.analysis.memory import with_measured
from jaxshard_magic.analysis.memory_timeline import _describe_part, _phases
from jaxshard_magic.report import DeviceMemory, Leaf, Memory, Report
from jaxshard_magic.targets.device_memory import peak_bytes

N, D, H = 512, 64, 1024


def attention(w, x):
    scores = x @ w @ x.T
    weights = jax.nn.softmax(scores)
    return jnp.mean((weights @ x) ** 2)


def train_step(w, x):
    loss, grad = jax.value_and_grad(attention)(w, x)
    return w - 0.1 * grad, loss


def report_of(step, *args, strategy="dp", mesh="data=1") -> Report:
    sharded = jaxshard_magic.shard(step, strategy, mesh=mesh)
    sharded.prepare(*args)
    return sharded.report()


def line(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, found in enumerate(lines, 1) if found.strip() == text)


def test_the_largest_buffer_of_attention_is_its_scores_on_their_line():
    memory = report_of(train_step, jnp.ones((D, D)), jnp.ones((N, D))).memory
    top = memory.buffers[0]
    assert (top.dtype, top.shape) == ("f32", (N, N))
    assert top.bytes == top.count * 4 * N * N
    assert top.file == Path(__file__).name
    assert top.line in (line("scores = x @ w @ x.T"), line("weights = jax.nn.softmax(scores)"))
    assert memory.live.line in range(line("scores = x @ w @ x.T"), line("return w - 0.1 * grad, loss") + 1)


@pytest.mark.parametrize("step", ["mlp", pytest.param("transformer, scanned", marks=pytest.mark.full)])
def test_the_buffers_and_the_rest_add_up_to_the_temporaries(step):
    call = STEPS[step]()
    memory = report_of(call.step, call.state, call.batch, strategy="fsdp+tp", mesh="data=4 model=2").memory
    held = memory.per_device[0]
    count, rest = memory.others
    told = sum(b.bytes for b in memory.buffers) + rest
    gaps = 64 * (sum(b.count for b in memory.buffers) + count)  # XLA aligns each
    assert held.temporaries - gaps <= told <= held.temporaries
    live = memory.live
    assert max(live.bytes) == live.bytes[live.peak]
    assert held.peak - gaps <= live.bytes[live.peak] <= held.peak + 2**10  # constants, which `peak` leaves out on CPU


@pytest.mark.ci
def test_gathered_weights_are_named_by_their_leaves():
    call = STEPS["transformer"]()
    memory = report_of(call.step, call.state, call.batch, strategy="fsdp+tp", mesh="data=4 model=2").memory
    gathered = {b.what.removesuffix(", gathered") for b in memory.buffers if b.what.endswith(", gathered")}
    assert gathered and all(path.startswith("state.params.blocks.block") for path in gathered)


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(256, 1024, rngs=rngs)
        self.down = nnx.Linear(1024, 256, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


@nnx.jit
def mlp_step(model, optimizer, batch):
    def loss_fn(model):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def test_gradients_that_one_collective_sums_are_each_named_by_their_own_leaf():
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    batch = {"x": jnp.ones((64, 256)), "y": jnp.ones((64, 256))}
    memory = report_of(mlp_step, model, optimizer, batch, strategy="fsdp+tp", mesh="data=4 model=2").memory
    told = {(b.what, b.shape) for b in memory.buffers}
    assert told == {
        ("gradient of model.down.kernel", (256, 512)),
        ("gradient of model.up.kernel", (512, 256)),
    }
    assert not [b for b in memory.buffers if b.toward or b.kept or not b.shape]


@pytest.mark.parametrize(
    ("dims", "shape", "said"),
    [
        ((256, 1024), (1024,), None),  # summed over the examples only later: not yet the gradient of a bias
        ((1024,), (1024,), ""),
        ((512,), (1024,), ""),  # the half that one of two devices has
        ((3072, 768), (768, 3072), ""),
        ((768, 1536), (12, 768, 3072), ", one of 12"),
        ((768,), (768, 3072), None),
        ((), (1024,), None),
        ((0, 4), (0, 4), None),
    ],
)
def test_an_array_is_a_leaf_only_with_the_elements_of_it_or_of_a_device_s_part(dims, shape, said):
    leaf = Leaf("w", "params", shape, "float32", (), 0, 0, "")
    assert _describe_part(dims, leaf, 2) == said


def test_buffers_at_the_peak_have_their_weight_stack_and_whether_kept():
    def layer(x, w):
        return jnp.tanh(x @ w), None

    def scanned(weights, x):
        out, _ = jax.lax.scan(layer, x, weights)
        return jnp.mean(out**2)

    def step(weights, x):
        loss, grads = jax.value_and_grad(scanned)(weights, x)
        return weights - 0.1 * grads, loss

    buffers = report_of(step, jnp.ones((6, D, D)), jnp.ones((N, D))).memory.buffers
    assert all(b.dtype for b in buffers), "a table of addresses has no row"
    stacks = [b for b in buffers if b.trips is not None]
    assert stacks and all(b.trips == 6 == b.shape[0] and b.kept for b in stacks if b.phase == "forward")
    top = report_of(train_step, jnp.ones((D, D)), jnp.ones((N, D))).memory.buffers
    assert not [b for b in top if b.what.startswith("gradient of") and b.shape != (D, D)]


def test_a_phase_begins_where_most_of_it_follows():
    f, b, u = "forward", "backward", "update"
    assert _phases([f, b, f, f, None, b, b, u, b, u, u]) == ((f, 0), (b, 4), (u, 7))
    assert _phases([f, f, u]) == ()
    assert _phases([b, b]) == ((f, 0), (b, 0))
    assert _phases([]) == ()


def test_a_report_with_buffers_survives_json():
    report = report_of(train_step, jnp.ones((D, D)), jnp.ones((N, D)))
    assert report.memory.live.phases[0] == ("forward", 0)
    assert Report.from_json(report.to_json()) == report


@dataclass
class Device:
    """A device whose backend tells its memory."""

    stats: dict | None

    def memory_stats(self):
        return self.stats


def mesh_of(*stats):
    return SimpleNamespace(devices=np.array([Device(s) for s in stats]))


def test_a_measured_peak_is_the_steps_own_only_where_it_rose():
    before = peak_bytes(mesh_of({"peak_bytes_in_use": 100}, {"peak_bytes_in_use": 900}, None))
    after = peak_bytes(mesh_of({"peak_bytes_in_use": 700}, {"peak_bytes_in_use": 900}, None))
    assert (before, after) == ((100, 900, None), (700, 900, None))
    found = Memory(tuple(DeviceMemory(d, 0, 0, 0, 0, 0, 650, 1000) for d in range(3)), "compiled")
    assert [d.measured for d in with_measured(found, before, after).per_device] == [700, None, None]
    assert with_measured(found, (), after) == found


def test_simulated_devices_measure_nothing():
    report = report_of(train_step, jnp.ones((D, D)), jnp.ones((N, D)))
    assert {d.measured for d in report.memory.per_device} == {None}
