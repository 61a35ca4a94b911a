"""A training that is killed at moments of chance, saves among them, ends as one that never was."""

import inspect
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.resumed import train_step

TRAINING = """
import sys
from IPython.core.interactiveshell import InteractiveShell

folder, out, slow = sys.argv[1:]
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "jaxshard_magic")
cell = '''
import time
import numpy as np, jax, jax.numpy as jnp, optax
from support.resumed import TX, new_state
STEP
state, rng, losses, order = new_state(), np.random.default_rng(0), [], []
for i in range(60):
    batch = rng.normal(size=(16, 16)).astype("f")
    order.append(batch[0, 0])
    state, metrics = train_step(state, batch)
    losses.append(float(metrics["loss"]))
    if not train_step.skipping:
        print("step", i + 1, flush=True)
        time.sleep(float(SLOW))
np.savez(OUT, losses=losses, order=order, key=jax.random.key_data(state[2]), **state[0])
'''
line = "%%shard fsdp" + ("" if folder == "-" else f" --checkpoint {folder} --every 3 --resume")
result = shell.run_cell(line + cell.replace("OUT", repr(out)).replace("SLOW", slow))
result.raise_error()
"""


def training(tmp_path, folder, out, slow):
    """A process that trains and tells each step; into no `folder` where that is "-"."""
    text = TRAINING.replace("STEP", inspect.getsource(train_step))
    command = [sys.executable, "-c", text, str(folder), str(out), str(slow)]
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.mark.ci
def test_a_training_killed_five_times_ends_as_one_that_was_never_killed(tmp_path):
    whole = training(tmp_path, "-", tmp_path / "whole.npz", 0)
    said, _ = whole.communicate(timeout=120)
    assert whole.returncode == 0, said
    chance = random.Random(5)
    for _ in range(5):
        killed = training(tmp_path, tmp_path / "run", tmp_path / "never.npz", 0.15)
        left, lines = chance.randint(3, 9), []
        for line in killed.stdout:
            lines.append(line)
            left -= line.startswith("step ")
            if left <= 0:
                break
        assert left <= 0, "".join(lines)
        time.sleep(chance.random() * 0.4)
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
    last = training(tmp_path, tmp_path / "run", tmp_path / "ended.npz", 0)
    said, _ = last.communicate(timeout=120)
    assert last.returncode == 0, said
    assert "step 1\n" not in said, "the last run goes on from a checkpoint"
    with np.load(tmp_path / "whole.npz") as a, np.load(tmp_path / "ended.npz") as b:
        assert set(a) == set(b)
        for name in a:
            assert np.array_equal(a[name], b[name]), name
    assert not (tmp_path / "never.npz").exists(), "each of the five was killed before its end"
