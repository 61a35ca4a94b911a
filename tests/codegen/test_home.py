"""`%shard code`: the program runs in a bare process, gives the step's own numbers, and moves what it says it moves."""

import linecache

import pytest
from support.taken_home import FIVE, MESHES, POSITIONS, Home, code, proved

pytestmark = pytest.mark.usefixtures("as_asked")

# Strategies under which a program can't do all that the plan does: sums of partial products joined before devices add
# them up, sums scattered, the last weight that was gathered kept, lookups inside of library modules.
TENSOR = ("tp", "dp+tp", "fsdp+tp", "dp+fsdp+tp", "sp", "dp+tp+sp", "fsdp+tp+sp")
OTHERS = {
    *(("transformer_scanned", strategy) for strategy in ("fsdp", "dp+fsdp", *TENSOR)),
    *(("nnx_transformer", strategy) for strategy in ("fsdp", "dp+fsdp", *TENSOR)),
}


def rows():
    for home in FIVE:
        for strategy, mesh in [*MESHES, *(POSITIONS if home.positions else ())]:
            mark = () if home is FIVE[0] else pytest.mark.ci
            mark = mark if (home.name, strategy) in QUICK else pytest.mark.full
            yield pytest.param(home, strategy, mesh, id=f"{home.name}-{strategy}", marks=mark)


QUICK = {
    ("dict_of_arrays", "fsdp"),
    ("linen_train_state", "fsdp+tp"),
    ("transformer_scanned", "fsdp"),
    ("nnx_transformer", "dp"),
    ("equinox_filter_jit", "fsdp"),
}


@pytest.mark.parametrize(("home", "strategy", "mesh"), list(rows()))
def test_the_program_gives_the_same_numbers_and_moves_what_it_says(notebook, tmp_path, home: Home, strategy, mesh):
    program = proved(notebook, tmp_path, home, strategy, mesh)
    assert program.same is ((home.name, strategy) not in OTHERS)
    assert program.same or " more per device and step" in program.text or " less per device and step" in program.text


HELD = 'x = jax.nn.gelu(hold(x @ layer["w"], P("data")) + layer["b"])'


def test_constraints_stand_at_the_cells_own_lines(notebook):
    program = code(notebook, FIVE[0], "fsdp", "data=8")
    assert HELD in program.text
    assert 'return hold(x @ last["w"], P("data")) + last["b"]' in program.text


@pytest.mark.ci
def test_they_stand_there_where_the_cell_of_the_step_ran_once_more(notebook):
    net = """def train_step(w, x):
    def loss_of(w):
        return jnp.mean((jax.nn.gelu(x @ w["in"]) @ w["out"]) ** 2)

    loss, grad = jax.value_and_grad(loss_of)(w)
    return jax.tree.map(lambda w, g: w - g, w, grad), loss
"""
    weights = 'w, x = {"in": jnp.ones((64, 256)), "out": jnp.ones((256, 32))}, jnp.ones((16, 64))'
    imports = "import jax, jax.numpy as jnp"
    run = "%%shard fsdp\nw, loss = kept(w, x)"
    for cell in ("%mesh data=8;", imports, weights, net, "kept = train_step", net, run):
        notebook.run(cell)
    program = notebook.run("%shard code")
    assert 'hold(x @ w["in"], P("data"))' in program.text
    assert program.same


@pytest.mark.ci
def test_they_stand_there_where_another_shell_of_the_process_ran_the_same_cell(notebook, monkeypatch):
    definitions, made, run = FIVE[0].cells("fsdp")
    for cell in ("%mesh data=8;", definitions, made, run):
        notebook.run(cell)
    file = notebook["mlp"].__code__.co_filename
    monkeypatch.setitem(linecache.cache, file.replace("-input-2-", "-input-30-"), linecache.cache[file])
    assert HELD in notebook.run("%shard code").text


OPTIONS = [
    ("fsdp --microbatches 4", "data=4"),
    ("fsdp --remat full", "data=4"),
    ("dp --remat dots --microbatches 2", "data=4"),
]
# The draws of dropout are one after the other, and the last weight that was gathered is kept; sums are scattered.
OTHER_OPTIONS = {
    *(("nnx_transformer", line) for line, _ in OPTIONS),
    *(("transformer_scanned", line) for line, _ in OPTIONS if line.startswith("fsdp")),
}


def option_rows():
    for home in FIVE:
        for line, mesh in OPTIONS:
            quick = home.name == "linen_train_state" and "microbatches 4" in line
            mark = pytest.mark.ci if quick else pytest.mark.full
            yield pytest.param(home, line, mesh, id=f"{home.name}-{line}", marks=mark)


@pytest.mark.parametrize(("home", "line", "mesh"), list(option_rows()))
def test_with_microbatches_and_remat_the_numbers_and_the_moves_are_the_same(notebook, tmp_path, home: Home, line, mesh):
    program = proved(notebook, tmp_path, home, line, mesh)
    assert program.same is ((home.name, line) not in OTHER_OPTIONS)
    if program.same:
        assert ("in_microbatches(microbatch," in program.text) is ("microbatches" in line)
        assert "Without --" not in program.text


def test_a_name_of_the_users_changes_the_programs_own_and_no_word_of_its_comments(notebook):
    step = "def train_step(w, x, where):\n    return jax.tree.map(lambda a: a * where, w), jnp.sum(x * where)"
    for cell in ("%mesh data=8;", "import jax, jax.numpy as jnp", step):
        notebook.run(cell)
    notebook.run("%%shard dp\nw, total = train_step({'a': jnp.ones((8, 8))}, jnp.ones((8, 2)), 2.0)")
    text = notebook.run("%shard code").text
    assert "def sharding_where(tree, table):" in text
    assert "ARGUMENTS)" in text and " where(" not in text
    assert "take these two lines out where there are some." in text


EXPERTS = (
    """import jax, jax.numpy as jnp

def moe(p, x):
    gates = jax.nn.softmax(x @ p["router"])
    best, chosen = jax.lax.top_k(gates, 2)
    one = jax.nn.one_hot(chosen, 8)
    order = one.swapaxes(-3, -2)
    before = jnp.cumsum(order.reshape(*one.shape[:-3], -1, 8), axis=-2).reshape(order.shape) - 1
    place = (before.swapaxes(-3, -2) * one).sum(-1).astype(jnp.int32)
    taken = one[..., None] * jax.nn.one_hot(place, 6)[..., None, :]
    dispatch, combine = taken.sum(-3), (taken * best[..., None, None]).sum(-3)
    rows = jnp.einsum("gsec,gsm->egcm", dispatch, x)
    hidden = jax.nn.gelu(jnp.einsum("egcm,emh->egch", rows, p["up"]))
    back = jnp.einsum("egch,ehm->egcm", hidden, p["down"])
    return jnp.einsum("gsec,egcm->gsm", combine, back)

def loss_of(p, x):
    return jnp.mean((moe(p, x) - x) ** 2)
""",
    """keys = jax.random.split(jax.random.key(0), 4)
shapes = {"router": (64, 8), "up": (8, 64, 128), "down": (8, 128, 64)}
p = {name: 0.1 * jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items())}
x = jax.random.normal(keys[3], (16, 12, 64))
""",
    """%%shard ep
def train_step(p, x):
    loss, grad = jax.value_and_grad(loss_of)(p, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, grad), loss
""",
    "p, loss = train_step(p, x)",
)


@pytest.mark.ci
def test_experts_have_both_constraints_at_each_boundary_and_move_the_same(notebook):
    for cell in ("%mesh data=2 expert=4;", *EXPERTS):
        notebook.run(cell)
    program = notebook.run("%shard code")
    tokens, experts = 'P(None, ("data", "expert"))', 'P("expert", "data")'
    text = " ".join(program.text.split())
    assert f'hold(jnp.einsum("gsec,gsm->egcm", dispatch, x), {tokens}), {experts}' in text
    assert f'hold(jnp.einsum("egch,ehm->egcm", hidden, p["down"]), {experts}), {tokens}' in text
    assert program.same
