"""The line of a model in another cell or module: the innermost of the user's own, then the one that led there."""

import sys
from types import ModuleType

import pytest

from jaxshard_magic.analysis.origin import describe_origin, locate_frames
from jaxshard_magic.analysis.sources import Frame
from jaxshard_magic.program.source_lines import is_user_file
from jaxshard_magic.report import Report

ARRAYS = """
key = jax.random.key(0)
params = {"w1": jax.random.normal(key, (64, 64)), "w2": jax.random.normal(key, (64, 64))}
params["ws"] = jax.random.normal(key, (4, 64, 64))
rows = {"x": jnp.ones((32, 64)), "y": jnp.ones((32, 64))}
"""
STEP = """
def loss_fn(params, batch):
    return jnp.mean((mlp(params, batch["x"]) - batch["y"]) ** 2)
def step(params, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss
params, loss = step(params, rows)
"""
BASE = """
class Base:
    def __init__(self, params):
        self.params = params
    def linear(self, name, x):
        return x @ self.params[name]
    def __call__(self, x):
        return self.forward(x)
"""
# The cell of a model, and the lines of it that move its weights.
MODELS = {
    "functions": (
        """
def mlp(params, x):
    h = jax.nn.relu(x @ params["w1"])
    return h @ params["w2"]
""",
        ('h = jax.nn.relu(x @ params["w1"])', 'return h @ params["w2"]'),
    ),
    "lambdas": (
        """
up = lambda p, x: x @ p["w1"]
mlp = lambda params, x: jax.nn.relu(up(params, x)) @ params["w2"]
""",
        (
            'up = lambda p, x: x @ p["w1"]',
            'mlp = lambda params, x: jax.nn.relu(up(params, x)) @ params["w2"]',
        ),
    ),
    "a class of a module": (
        """
from lined_base import Base
class Net(Base):
    def forward(self, x):
        return self.linear("w2", jax.nn.relu(self.linear("w1", x)))
mlp = lambda params, x: Net(params)(x)
""",
        ("return x @ self.params[name]",),
    ),
    "a scan": (
        """
def body(h, w):
    return jnp.tanh(h @ w), None
def mlp(params, x):
    h, _ = jax.lax.scan(body, x, params["ws"])
    return h
""",
        ("return jnp.tanh(h @ w), None",),
    ),
    "a scan of remat": (
        """
@jax.checkpoint
def body(h, w):
    return jnp.tanh(h @ w), None
def mlp(params, x):
    h, _ = jax.lax.scan(body, x, params["ws"])
    return h
""",
        ("return jnp.tanh(h @ w), None",),
    ),
    "remat": (
        """
@jax.checkpoint
def block(params, x):
    h = jax.nn.relu(x @ params["w1"])
    return h @ params["w2"]
def mlp(params, x):
    return block(params, x)
""",
        ('h = jax.nn.relu(x @ params["w1"])', 'return h @ params["w2"]'),
    ),
    "a rule of its own": (
        """
@jax.custom_vjp
def dense(x, w):
    return x @ w
def forward(x, w):
    return dense(x, w), (x, w)
def backward(kept, g):
    x, w = kept
    return g @ w.T, x.T @ g
dense.defvjp(forward, backward)
def mlp(params, x):
    h = jax.nn.relu(dense(x, params["w1"]))
    return dense(h, params["w2"])
""",  # of the backward rule jax tells the line that called for it
        ('h = jax.nn.relu(dense(x, params["w1"]))', 'return dense(h, params["w2"])'),
    ),
    "jit and vmap": (
        """
@jax.jit
def dense(x, w):
    return x @ w
def one(params, x):
    return dense(jax.nn.relu(dense(x, params["w1"])), params["w2"])
def mlp(params, x):
    return jax.vmap(one, (None, 0))(params, x)
""",
        ("return x @ w",),
    ),
}


@pytest.fixture
def made(given, as_asked, tmp_path, monkeypatch):
    (tmp_path / "lined_base.py").write_text(BASE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lined_base", raising=False)
    given.run(ARRAYS)
    return given


@pytest.mark.parametrize("kind", list(MODELS))
def test_the_innermost_line_is_told_and_the_one_that_led_there(made, kind: str):
    model, expected = MODELS[kind]
    made.run(model)
    report: Report = made.run("%%shard fsdp --dry-run" + STEP)
    step = f"cell [{made.shell.execution_count - 1}]"
    weights = [c for c in report.collectives or () if "params.w" in (c.what or "")]
    assert {c.source for c in weights} == set(expected)
    assert {c.called for c in weights} - {None} == {f"{step}:3"}
    assert all(c.called or (c.phase == "forward" and kind == "remat") for c in weights)
    assert report.memory is not None
    buffers = [b for b in report.memory.buffers or () if "params.w" in (b.of or "")]
    texts = {(s.name, n): text.strip() for s in report.sources for n, text in zip(s.numbers, s.text, strict=True)}
    assert buffers and {texts[b.file or "", b.line or 0] for b in buffers} <= set(expected)
    assert {b.called for b in buffers} <= {f"{step}:3", None}


def test_a_library_function_traced_earlier_has_no_line_of_that_step(made):
    made.run(MODELS["remat"][0])
    made.run("%%shard fsdp --microbatches 4 --dry-run" + STEP)
    before = f"cell [{made.shell.execution_count - 1}]"
    made.run(MODELS["a scan"][0])
    report: Report = made.run("%%shard fsdp --microbatches 4 --dry-run" + STEP)
    assert report.memory is not None
    assert before not in {b.file for b in report.memory.buffers or ()}
    assert before not in {s.name for s in report.sources}


def test_recorded_time_is_of_the_innermost_line_and_names_the_one_that_led_there(made):
    made.run(MODELS["functions"][0])
    model = f"cell [{made.shell.execution_count - 1}]"
    report: Report = made.run("%%shard fsdp --profile 1" + "for _ in range(3):".join(STEP.split("params, loss = ")))
    step = f"cell [{made.shell.execution_count - 1}]"
    assert report.measured is not None
    lines = {(row.file, row.line): row.called for row in report.measured.lines}
    assert lines[model, 2] == lines[model, 3] == f"{step}:3"


def test_of_calls_at_home_alone_none_is_named_twice():
    inner, outer = Frame("step.py", "loss_fn", 4), Frame("step.py", "step", 9)
    deep = Frame("/home/me/model.py", "mlp", 31)
    assert describe_origin(locate_frames([outer, inner], ["step.py"])) == "step.py, line 4"
    assert (
        describe_origin(locate_frames([outer, inner, deep], ["step.py"]))
        == "model.py, line 31, called at step.py, line 4"
    )
    assert describe_origin(locate_frames([deep], ["step.py"])) == "model.py, line 31"
    assert describe_origin(locate_frames([], ["step.py"])) is None


def test_a_library_is_no_users_file_wherever_it_is_installed(monkeypatch, tmp_path):
    library, own = ModuleType("haiku"), ModuleType("my_models")
    library.__path__, own.__path__ = [str(tmp_path / "dm" / "haiku")], [str(tmp_path / "my_models")]
    monkeypatch.setitem(sys.modules, "haiku", library)
    monkeypatch.setitem(sys.modules, "my_models", own)
    assert not is_user_file(str(tmp_path / "dm" / "haiku" / "linear.py"))
    assert is_user_file(str(tmp_path / "my_models" / "gpt.py"))
    assert not is_user_file("<@beartype(lined.attend) at 0x7f0>")
    assert is_user_file("<stdin>")
