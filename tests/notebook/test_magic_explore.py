"""`%shard explore` on a real shell: the last step or what the notebook holds, and what its compiled line gives."""

import pytest
from jax.sharding import PartitionSpec as P
from support.cells import FAST, GIVEN, LOOP, NNX_STEP, STEP, one_line

from jaxshard_magic.explorer import Explorer

MOMENTUM = """
def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    m = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], m)
    return {"params": params, "m": m}, loss

moving = {"params": state, "m": jax.tree.map(jnp.zeros_like, state)}
moving, loss = train_step(moving, batch)
"""


def test_it_begins_with_the_last_steps_arrays_mesh_and_strategy(given):
    given.run("%%shard fsdp+tp --mesh 'data=4 model=2'" + STEP + LOOP)
    ex = given.run("%shard explore -o kept")
    assert isinstance(ex, Explorer) and ex is given["kept"]
    assert [a.path for a in ex.arrays] == ["state.b", "state.w", "batch.x", "batch.y"]
    assert (ex.mesh, ex.strategy) == ("data=4 model=2", "fsdp+tp")
    plan = given.shell.user_ns["train_step"].entry.plan
    assert [leaf.spec for leaf in ex.leaves] == [
        tuple(spec) + (None,) * (len(leaf.shape) - len(spec))
        for leaf, spec in zip(ex.leaves, plan.in_specs, strict=True)
    ]
    assert ex.bytes_per_device == ex.bytes_now


def test_the_line_keeps_the_cells_own_options_and_runs_as_it_is(given):
    given.run("%%shard dp --remat full --rule \"b=P()\" --name 'my run'" + STEP + LOOP)
    ex = given.run("%shard explore")
    ex["w"] = P("data")
    assert ex.line == ('%%shard dp --remat full --name "my run" --rule "state.w=P(\'data\')" --rule "b=P()"')
    report = given.run(ex.cell)
    assert report.name == "my run" and report.options["remat"] == "full"
    (w,) = (leaf for leaf in report.leaves if leaf.path == "state.w")
    assert w.spec == ("data", None) and w.bytes_per_device == 16 * 8 * 4 // 8
    again = given.run("%shard explore")
    again["w"] = P(None, "data")
    assert again.line.count("state.w") == 1, "the rule from before is replaced"


def test_the_name_that_a_cell_keeps_its_report_under_stays_that_cells(given):
    given.run("%%shard dp --remat full -o first" + STEP + LOOP)
    ex = given.run("%shard explore")
    assert ex.line == "%%shard dp --remat full"
    given.run(ex.cell)
    assert given["first"].timing.calls == 3


def test_a_rule_sets_the_momentum_of_its_parameter_as_the_explorer_says(given):
    given.run("%%shard dp" + MOMENTUM)
    ex = given.run("%shard explore")
    assert ex.follows("params.w") == ["state.m.w"]
    ex["params.w"] = P("data")
    said = [leaf.bytes_per_device for leaf in ex.leaves]
    report = given.run(ex.cell)
    assert [leaf.bytes_per_device for leaf in report.leaves] == said


def test_a_spec_of_an_argument_is_answered_with_a_spec(given):
    given.run("%%shard fsdp --spec \"state=P('data')\"" + STEP + LOOP)
    ex = given.run("%shard explore")
    ex["w"] = P()
    assert ex.line == '%%shard fsdp --spec "state=P(\'data\')" --spec "state.w=P()"'
    report = given.run(ex.cell)
    assert [leaf.spec for leaf in report.leaves if leaf.path == "state.w"] == [(None, None)]


@pytest.mark.parametrize("strategy", ["dp", "fsdp", "tp", "fsdp+tp", "spmd"])
def test_another_strategy_and_mesh_are_laid_out_as_a_run_of_them_is(given, strategy):
    given.run("%%shard dp" + FAST + LOOP)
    ex = given.run("%shard explore")
    ex.mesh, ex.strategy = "data=2 model=4", strategy
    assert ex.note == ""
    told = {leaf.path: (leaf.spec, leaf.bytes_per_device) for leaf in ex.leaves}
    report = given.run(ex.cell)
    assert {leaf.path: (leaf.spec, leaf.bytes_per_device) for leaf in report.leaves} == told


def test_compiling_gives_the_report_of_the_line_and_runs_nothing(given):
    given.run("%%shard dp" + STEP + LOOP)
    ex, state = given.run("%shard explore"), given["state"]
    ex["w"] = P("data")
    found = ex.compile()
    assert found.line == ex.line and found is ex.compiled
    assert found.report.timing.calls == 0 and given["state"] is state
    report = given.run(ex.cell)
    assert report.memory.per_device[0].params == found.report.memory.per_device[0].params
    assert [(c.kind, c.axes, c.count) for c in report.collectives] == [
        (c.kind, c.axes, c.count) for c in found.report.collectives
    ]
    assert found.predicted is not None and found.predicted.arrays <= found.predicted.peak


def test_a_mesh_of_more_devices_is_explored_and_not_compiled(given):
    given.run("%%shard fsdp" + STEP + LOOP)
    ex = given.run("%shard explore --mesh 'data=16'")
    assert "takes 16 devices, and there are 8" in ex.note
    ex["w"] = P("data")
    assert ex.leaves[1].bytes_per_device == 16 * 8 * 4 // 16
    with pytest.raises(Exception, match="takes 16 devices, and there are 8"):
        ex.compile()
    assert given.run("import jax\njax.device_count()") == 8


def test_what_the_step_itself_raises_under_a_strategy_is_a_note(given):
    given.run("%%shard dp" + STEP + LOOP)
    ex = given.run("%shard explore")
    ex.strategy = "tp"
    assert ex.note.startswith("tp needs a mesh axis for it (model)")
    ex.mesh = "data=4 model=2"
    assert ex.note == ""


def test_a_step_of_nnx_objects_is_explored_and_compiled(given):
    pytest.importorskip("flax")
    given.run(
        """
from flax import nnx
import optax
model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
"""
    )
    given.run("%%shard fsdp" + NNX_STEP + "\ntrain_step(model, optimizer, batch)")
    ex = given.run("%shard explore")
    assert len(ex.follows("model.kernel")) == 2  # Adam's moments
    ex["model.kernel"] = P("data")
    assert ex.compile().report.timing.calls == 0


def test_names_of_the_notebook_and_types_need_no_step(given):
    ex = given.run('%shard explore state "wte=f32[50257,768]" bf16[8] --mesh "data=4 model=2"')
    assert [(a.path, a.dtype, a.shape) for a in ex.arrays] == [
        ("state.b", "float32", (8,)),
        ("state.w", "float32", (16, 8)),
        ("wte", "float32", (50257, 768)),
        ("x", "bfloat16", (8,)),
    ]
    ex["wte"] = P(None, ("data", "model"))
    assert ex.line == """%%shard spmd --mesh "data=4 model=2" --rule "wte=P(None, ('data', 'model'))\""""
    assert ex.cell is None
    assert [a.path for a in given.run("%shard explore state.w").arrays] == ["state.w"]


def test_keys_scalars_and_shapes_are_arrays_too(given):
    given.run("big = jax.ShapeDtypeStruct((2**20, 2**20), jnp.bfloat16)")
    given.run("more = {'key': jax.random.key(0), 'n': jnp.int32(3), 'big': big}")
    ex = given.run("%shard explore more")
    assert {a.path: (a.dtype, a.bytes) for a in ex.arrays} == {
        "more.big": ("bfloat16", 2**41),
        "more.key": ("key<fry>", 8),
        "more.n": ("int32", 4),
    }


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("explore", "nothing to explore yet: run a %%shard cell first, or name arrays"),
        ("explore stat", "Did you mean 'state'?"),
        ("explore state.x", "'state' has no 'x'"),
        ("explore loss_fn", "holds no arrays"),
        ("explore flot32[8]", "flot32 is no type of elements"),
        ("explore state --mesh data=0", "axis 'data' has the size 0"),
        ("explore --mesg data=8", "Did you mean '--mesh'?"),
    ],
)
def test_a_line_that_can_not_be_answered_says_so(given, capsys, line, says):
    assert says in one_line(given, capsys, f"%shard {line}")


def test_the_help_is_printed_and_nothing_returned(given, capsys):
    assert given.run("%shard explore --help") is None
    assert "--mesh TEXT" in capsys.readouterr().out


def test_a_step_that_only_compiled_is_explored(given):
    given.run("%%shard fsdp --dry-run" + STEP + LOOP)
    ex = given.run("%shard explore")
    assert ex.strategy == "fsdp" and "--dry-run" in ex.line


def test_a_pipelines_stages_are_left_out_and_it_says_so(given):
    given.run("%%shard pp+dp --mesh 'pipe=2 data=4'" + STEP + LOOP)
    ex = given.run("%shard explore")
    assert ex.strategy == "dp" and "pp" not in ex.line.split()


def test_the_choice_of_a_search_is_explored_with_its_options(given):
    given.run("%%shard auto --among dp,fsdp --budget 30" + STEP + LOOP)
    ex = given.run("%shard explore")
    assert ex.strategy in ("dp", "fsdp") and "--among" not in ex.line and "--budget" not in ex.line


def test_nothing_given_names_the_cells_that_ran(notebook):
    notebook.run(GIVEN)
    ex = notebook.run("%shard explore batch")
    assert ex.line.startswith("%%shard spmd --mesh ")


LAYERS = """
state = {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16)), "embed": jnp.ones((40, 16))}
ids = jnp.arange(8)

def deep_loss(params, ids):
    x = params["embed"][ids]
    return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"]) ** 2)
"""
DEEP = """
def train_step(state, ids):
    loss, grads = jax.value_and_grad(deep_loss)(state, ids)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

state, loss = train_step(state, ids)
"""


def test_what_a_rule_moves_beside_its_own_array_is_shown_as_the_run_has_it(given):
    """An axis for tensor parallelism that a rule puts on an embedding's columns: the layers that read them lie
    otherwise, too."""
    given.run(LAYERS)
    given.run("%%shard fsdp+tp --mesh 'data=4 model=2'" + DEEP)
    ex = given.run("%shard explore")
    ex["embed"] = P(None, "model")
    told = {leaf.path: leaf.spec for leaf in ex.leaves}
    report = given.run(ex.cell)
    assert {leaf.path: leaf.spec for leaf in report.leaves} == told
    by_hand, moved = ([ex.arrays[i].path for i in found] for found in (ex.changed, ex.moved))
    assert by_hand == ["state.embed"]
    if moved:
        assert f"{len(moved)} more lie otherwise because of it" in ex.to_text(100)
    ex.reset()
    assert ex.moved == [] and ex.settled is None
