"""A part of a checkpoint is restored alone, from Python and by a notebook's line, which loads files of weights too."""

import jax
import numpy as np
from support.refusals import refusal
from support.weight_files import same, trained

from jaxshard_magic.checkpoints.state_match import matching_part


def test_a_part_of_a_checkpoint_is_restored_by_its_own_names_alone(tmp_path):
    step, state = trained()
    step.save(tmp_path / "c", state)
    back = step.restore
    params = back(tmp_path / "c", like={"params": state["params"]})["params"]
    assert all(map(same, jax.tree.leaves(params), jax.tree.leaves(state["params"])))
    ema = back(tmp_path / "c", like=state["ema"], part="ema")
    assert all(map(same, jax.tree.leaves(ema), jax.tree.leaves(state["ema"])))
    assert "as ema, params: say which, part='ema'" in refusal(back, tmp_path / "c", state["params"])
    assert " has no emma. Did you mean 'ema'?" in refusal(back, tmp_path / "c", state["params"], part="emma")
    smaller = {"params": {"head": state["params"]["head"]}}
    assert " has params.down, which is not in the state" in refusal(back, tmp_path / "c", smaller)
    renamed = {"up": 0, **state["params"], "haed": state["params"]["head"]}
    del renamed["head"], renamed["up"]
    assert " has no haed.bias. Did you mean 'head.bias'?" in refusal(back, tmp_path / "c", renamed, part="ema")
    step.save(tmp_path / "d", {"params": state["params"]})
    said = refusal(back, tmp_path / "d", state)
    assert " has params alone, and no ema.down: restore that part, step.restore(DIR, like=state.params)" in said
    assert "Did you mean 'c'?" in refusal(back, tmp_path / "cc", state)


def test_moments_are_never_taken_for_parameters_of_which_some_are_wanted():
    have = ["w", "b", "opt.mu.w"]
    assert matching_part(have, ["w"], "c/1") == ""
    have = ["params.w", "params.b", "opt.0.mu.w", "opt.0.nu.w"]
    assert matching_part(have, ["w"], "c/1") == "params"
    assert matching_part(["params.w", "ema.w"], ["w"], "c/1", state_name="ema") == "ema"


STEP = """%%shard dp
def train(state, batch):
    g = jax.grad(lambda p: jnp.mean((batch - p["w"]) ** 2))(state["params"])
    return {"params": {"w": state["params"]["w"] - g["w"]}, "calls": state["calls"] + 1}
state = train(state, batch)
"""


def test_the_lines_of_a_notebook_save_and_load_parts_and_tell_what_there_is(notebook, tmp_path, capsys):
    notebook.run("import jax, jax.numpy as jnp\nbatch = jnp.ones((8, 4))\n%mesh data=4;")
    notebook.run('state = {"params": {"w": jnp.arange(4.0)}, "calls": jnp.int32(0)}')
    notebook.run(STEP)
    saved = np.asarray(notebook["state"]["params"]["w"])
    file = tmp_path / "w.safetensors"
    notebook.run(f'%shard save {file} state.params --rename "model.0.weight=w"')
    assert f"state.params saved into {file}" in capsys.readouterr().out
    notebook.run(f"%shard save {tmp_path}/c state")
    notebook.run("state = train(state, batch)")
    capsys.readouterr()
    notebook.run(f"%shard load {file}")
    assert capsys.readouterr().out.splitlines() == [
        "w.safetensors: 1 arrays, 16 bytes",
        "model.0.weight float32[4]",
    ]
    error = notebook.fails(f"%shard load {file} state.parms")
    assert "the state has no parms. Did you mean 'params'?" in str(error)
    notebook.run(f'%shard load {file} state.params --rename "model.0.weight=w"')
    assert f"state.params restored from {file}" in capsys.readouterr().out
    assert same(notebook["state"]["params"]["w"], saved) and int(notebook["state"]["calls"]) == 2
    notebook.run('params = {"w": jnp.zeros(4)}')
    notebook.run(f"%shard load {tmp_path}/c params")
    assert "params restored from checkpoint 1 of" in capsys.readouterr().out
    assert same(notebook["params"]["w"], saved)
