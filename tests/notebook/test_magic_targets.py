"""`%mesh` and `%%shard` on hardware that isn't attached, in a real shell with the real TPU compiler."""

from importlib.util import find_spec

import jax
import pytest

from jaxshard_magic import ShardError, api
from jaxshard_magic.compilation import target_compile
from jaxshard_magic.targets import CompilerFailed

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="no TPU compiler: libtpu is not installed")

STATE = """
import jax, jax.numpy as jnp
def init(key):
    a, b = jax.random.split(key)
    return {"up": jax.random.normal(a, (1024, 4096)), "down": jax.random.normal(b, (4096, 1024))}
"""
STEP = """
def train_step(state, batch):
    def loss(p):
        return jnp.mean((jax.nn.gelu(batch @ p["up"]) @ p["down"] - batch) ** 2)
    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value
"""
SHAPES = (
    STATE + "state = jax.eval_shape(init, jax.random.key(0))\nbatch = jax.ShapeDtypeStruct((64, 1024), jnp.float32)\n"
)
GIB = 2**30


def advice(report, code):
    return [a for a in report.advice if a.code == code]


def test_the_list_names_every_chip_and_what_installs_its_compiler(notebook, capsys):
    assert notebook.run("%mesh --list") is None
    shown = capsys.readouterr().out
    for name in ("v5e", "v5p", "h100", "l4", "15.75\u202fGiB", "the extra tpu", "the extra cuda-aot"):
        assert name in shown
    assert max(map(len, shown.splitlines())) <= 100


ENDED = "the compiler's process ended by signal 6 (SIGABRT); its last words: F0101 Check failed: n < 8"


@pytest.fixture
def fails(monkeypatch):
    """Every compile for a target ends as if its process had died."""

    def compiled(*_, **__):
        raise CompilerFailed(ENDED)

    monkeypatch.setattr(target_compile, "compile_for_target", compiled)


@needs_libtpu
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("dp", marks=pytest.mark.full)])
def test_where_the_compiler_fails_the_plan_stands_and_says_so(notebook, fails, strategy):
    notebook.run(SHAPES)
    notebook.run("%mesh v5e:2x4 data=8;")
    report = notebook.run(f"%%shard {strategy} --microbatches 2\n" + STEP)
    (told,) = advice(report, "compiler-failed")
    assert told.level == "error" and told.message.startswith(f"Not compiled: {ENDED}.")
    assert report.memory.source == "planned" and report.memory.per_device[0].peak > 2**20
    assert report.collectives and report.timing.predicted_step_s and report.timing.compile_s is None
    text = report.to_text()
    assert "Would fit, by its plan:" in text and "every figure is predicted from the plan" in text
    assert "Not run: planned only" in text and "compiled program" not in text
    assert "SIGABRT" in report.to_html()
    assert type(report).from_dict(report.to_dict()) == report


@needs_libtpu
def test_where_the_compiler_decides_the_layout_only_arrays_are_known(notebook, fails):
    notebook.run(SHAPES)
    notebook.run("%mesh v5e:2x4 data=8;")
    report = notebook.run("%%shard spmd\n" + STEP)
    assert advice(report, "compiler-failed")
    assert report.memory.per_device[0].peak is None and report.collectives is None


@needs_libtpu
def test_in_a_script_the_line_of_a_failed_compiler_has_the_verdict_of_the_plan(notebook, fails):
    notebook.run(SHAPES + STEP)
    step = api.shard(notebook["train_step"], "fsdp", mesh="v5e:2x4 data=8")
    with pytest.raises(ShardError) as refused:
        step.prepare(notebook["state"], notebook["batch"])
    assert str(refused.value).startswith(f"{ENDED}. By its plan the step takes ")
    assert str(refused.value).endswith("of a device's 15.75\u202fGiB")


@pytest.mark.ci
@needs_libtpu
def test_every_view_names_the_devices_of_a_slice_alike(notebook):
    notebook.run(SHAPES)
    ids = [device.id for device in notebook.run("%mesh v5e:2x4 data=8").devices.flat]
    assert ids != sorted(ids), "a ring round the slice"
    report = notebook.run("%%shard fsdp\n" + STEP)
    ex = notebook.run("%shard explore")
    assert list(report.mesh.devices) == list(ex.mesh_info.devices) == ex.view.laid["devices"] == ids
    ex.mesh = "v5e:2x4 data=4 model=2"
    other = [device.id for device in notebook.run("%mesh v5e:2x4 data=4 model=2").devices.flat]
    assert ex.view.laid["devices"] == other
    ex.mesh = "data=16"
    assert ex.view.laid["devices"] == list(range(16)), "more than there are"


@pytest.mark.ci
@needs_libtpu
def test_shapes_are_compiled_for_the_slice_and_nothing_runs(notebook):
    notebook.run(SHAPES)
    notebook.run("%mesh v5e:2x2 data=2 model=2;")
    report = notebook.run("%%shard fsdp+tp\n" + STEP)
    assert (report.mesh.source, report.mesh.platform, len(report.mesh.devices)) == ("topology", "tpu", 4)
    assert report.timing.calls == 0 and report.timing.on == "TPU v5e" and report.timing.predicted_step_s > 0
    one = report.memory.per_device[0]
    assert one.params == 2 * 4 * 1024 * 4096 // 4
    assert one.limit == int(15.75 * GIB) and one.peak < one.limit
    assert {c.kind for c in report.collectives} >= {"all-gather", "all-reduce"}
    assert all(c.line for c in report.collectives)
    assert report.memory.buffers is not None
    assert not advice(report, "does-not-fit")
    assert notebook["train_step"].__class__ is type(lambda: None)  # the plain one is back


@pytest.mark.ci
@needs_libtpu
def test_arrays_are_taken_by_their_shapes_and_stay_where_they_are(notebook):
    notebook.run(STATE + "state = init(jax.random.key(0))\nbatch = jnp.ones((64, 1024))\n")
    before = notebook["state"]["up"]
    notebook.run("%%shard dp --mesh v5e:2x2\n" + STEP)
    assert notebook["state"]["up"] is before and not before.is_deleted()
    assert before.devices() <= set(jax.devices("cpu"))


@pytest.mark.ci
@needs_libtpu
def test_a_cell_ends_at_its_first_call_of_the_step(notebook):
    notebook.run(SHAPES)
    notebook.run("%mesh v5e:2x2 data=4;")
    report = notebook.run(
        "%%shard dp\n"
        + STEP
        + "done = []\nfor _ in range(3):\n    state, loss = train_step(state, batch)\n    done.append(loss)"
    )
    assert report.mesh.source == "topology"
    assert notebook["done"] == []


@pytest.mark.ci
@needs_libtpu
def test_what_does_not_fit_is_a_finding_with_a_change_that_was_compiled(notebook):
    # 8 GiB of weights and as much of new ones, whole on each of 4 chips of 15.75 GiB; a quarter of it fits.
    notebook.run(SHAPES.replace("4096", str(2**20)))
    notebook.run("%mesh v5e:2x2 data=4;")
    report = notebook.run("%%shard dp\n" + STEP)
    (found,) = advice(report, "does-not-fit")
    assert found.level == "error" and "on a device that has 15.75\u202fGiB" in found.message
    assert found.fix == "%%shard fsdp"
    assert "Compiled so, it needs" in found.message and "it fits" in found.message
    one = report.memory.per_device[0]
    assert one.peak > one.limit == int(15.75 * GIB)
    assert report.collectives
    better = notebook.run(f"{found.fix}\n" + STEP)
    assert not advice(better, "does-not-fit")
    assert better.memory.per_device[0].peak < one.limit


@needs_libtpu
@pytest.mark.parametrize(
    ("options", "part"),
    [
        ("--check", "--check runs the step, and v5e:2x2 is not attached"),
        ("--repeat 3", "--repeat runs the step, and v5e:2x2 is not attached"),
        ("--on v5p", "the mesh names the chip, v5e:2x2"),
    ],
)
def test_what_asks_for_calls_is_refused_before_the_cell_runs(notebook, capsys, options, part):
    notebook.run("%mesh v5e:2x2 data=4;")
    assert part in str(notebook.fails(f"%%shard dp {options}\nran = True\n" + STEP))
    assert "ran" not in notebook.shell.user_ns


@needs_libtpu
def test_without_arguments_it_says_what_is_missing(notebook):
    notebook.run("%mesh v5e:2x2 data=4;")
    assert "no state and no batch" in str(notebook.fails("%%shard dp\nimport jax, jax.numpy as jnp\n" + STEP))


@pytest.mark.ci
@needs_libtpu
def test_a_slice_that_nobody_offers_is_compiled_for_and_said(notebook, capsys):
    notebook.run("%mesh v5e:3x5 data=15")
    assert "v5e:3x5 is no slice that is offered; the nearest are v5e:4x4 and v5e:2x4" in capsys.readouterr().out


@needs_libtpu
def test_the_doctor_sends_nothing_over_a_mesh_that_is_not_attached(notebook):
    notebook.run("%mesh v5e:2x2 data=2 model=2;")
    told = notebook.run("%shard doctor").to_text()
    assert "data=2 model=2 on v5e:2x2, which is not attached" in " ".join(told.split())
    assert "✗" not in told


@pytest.mark.ci
@needs_libtpu
def test_in_python_a_step_on_a_slice_compiles_and_refuses_to_be_called():
    def double(x):
        return 2 * x

    step = api.shard(double, "dp", mesh="v5e:2x2 data=4")
    shape = jax.ShapeDtypeStruct((8, 4), "float32")
    step.prepare(shape)
    assert step.report().mesh.source == "topology"
    with pytest.raises(ShardError, match=r"v5e:2x2 is not attached, so double can't run on it: .prepare"):
        step(jax.numpy.ones((8, 4)))
    with pytest.raises(ShardError, match="the mesh names the chip, v5e:2x2"):
        api.shard(double, "dp", mesh="v5e:2x2 data=4", on="v5p")


@pytest.mark.ci
def test_abstract_makes_shapes_of_what_the_notebook_holds(notebook, capsys):
    notebook.run(STATE + "state = init(jax.random.key(0))\n")
    notebook.run("%shard abstract state")
    assert "state: 2 arrays" in capsys.readouterr().out
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(notebook["state"]))
    assert "takes the names" in str(notebook.fails("%shard abstract"))
    assert "'stat'" in str(notebook.fails("%shard abstract stat"))
