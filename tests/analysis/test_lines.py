"""The lines that a report's collectives are of: in cells, other cells, modules, and where the text is gone."""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from support.cells import GIVEN, LOOP, STEP

import jaxshard_magic
from jaxshard_magic.analysis.sources import CHANGED, GONE, Frame, Frames, SourceText
from jaxshard_magic.program.source_lines import is_user_file
from jaxshard_magic.report import Report, SourceExcerpt

WHOLE = """
import jax, jax.numpy as jnp

def predict(params, x):
    return x @ params["w"] + params["b"]

def loss_fn(params, batch):
    error = predict(params, batch["x"]) - batch["y"]
    return jnp.mean(error ** 2)

def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss
"""


def lines(report: Report) -> dict[str | None, str | None]:
    """What moves, by the text of its line."""
    return {c.what: c.source for c in report.collectives or ()}


def text_of(source: SourceExcerpt) -> dict[int, str]:
    return dict(zip(source.numbers, source.text, strict=True))


def test_a_collective_of_a_cell_has_the_line_that_its_editor_shows(given):
    report = given.run("%%shard dp --check" + WHOLE + LOOP)
    (source,) = report.sources
    assert re.fullmatch(r"cell \[\d+\]", source.name) and source.home
    assert text_of(source)[1] == "%%shard dp --check"
    assert lines(report) == {
        "gradient of state.w": 'return x @ params["w"] + params["b"]',
        "gradient of state.b": 'return x @ params["w"] + params["b"]',
        "a number, f32[]": "return jnp.mean(error ** 2)",
    }
    for c in report.collectives:
        assert c.file == source.name
        assert text_of(source)[c.line].strip() == c.source
        assert c.called is None


@pytest.mark.parametrize("option", ["", " --remat dots"])  # without one and with one that takes gradients anew
def test_the_innermost_line_comes_first_and_that_of_the_steps_own_cell_is_named(given, option):
    given.run(WHOLE.split("\ndef train_step")[0].lstrip())
    first = given.shell.execution_count - 1
    report = given.run(f"%%shard dp{option}" + STEP + LOOP)
    assert {c.called for c in report.collectives} == {f"cell [{first + 1}]:3"}
    assert {c.source for c in report.collectives} == {
        'return x @ params["w"] + params["b"]',
        "return jnp.mean(error ** 2)",
    }
    assert [source.name for source in report.sources] == [f"cell [{first + 1}]", f"cell [{first}]"]


def test_a_cell_that_only_calls_the_step_shows_the_cell_that_defines_it(given):
    given.run(WHOLE)
    report = given.run("%%shard dp" + LOOP)
    (source,) = report.sources
    assert "def train_step(state, batch):" in source.text
    assert 'return x @ params["w"] + params["b"]' in lines(report).values()


def test_a_cell_with_magics_in_it_is_shown_as_it_was_typed(given):
    report = given.run("%%shard dp\n%time 1 + 1" + WHOLE + LOOP)
    (source,) = report.sources
    assert source.text[:3] == ("%%shard dp", "%time 1 + 1", "import jax, jax.numpy as jnp")
    assert all(text_of(source)[c.line].strip() == c.source for c in report.collectives)


def test_a_step_of_a_module_shows_the_parts_of_its_file_that_matter(given, tmp_path, monkeypatch):
    padding = "\n".join(f"A{i} = {i}" for i in range(50))
    (tmp_path / "lined_steps.py").write_text(padding + WHOLE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lined_steps", raising=False)
    report = given.run("%%shard dp\nfrom lined_steps import train_step" + LOOP)
    (source,) = report.sources
    assert (source.name, source.home, source.note) == ("lined_steps.py", True, None)
    assert 0 < len(source.numbers) < 20
    assert lines(report)["gradient of state.w"] == 'return x @ params["w"] + params["b"]'


def test_a_step_that_a_file_ran_is_told_by_that_files_lines(given, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        GIVEN + WHOLE + '\nimport jaxshard_magic\nstep = jaxshard_magic.shard(train_step, "dp", mesh="data=8")\n'
        "step(state, batch)\nreport = step.report()\n"
    )
    report = given.run(f"%run {script}\nreport")
    assert [s.name for s in report.sources] == ["train.py"]
    assert lines(report)["a number, f32[]"] == "return jnp.mean(error ** 2)"


def sharded(path: Path):
    namespace: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    step = jaxshard_magic.shard(namespace["train_step"], "dp", mesh="data=8")
    state = {"w": jnp.ones((16, 8)), "b": jnp.zeros(8)}
    return step, (state, {"x": jnp.ones((8, 16)), "y": jnp.ones((8, 8))})


@pytest.mark.parametrize(
    ("then", "note"),
    [
        (lambda path: path.unlink(), GONE),
        (lambda path: path.write_text("def other():\n    pass\n" * 30), CHANGED),
        (lambda path: path.write_text("short = 1\n"), CHANGED),
    ],
)
def test_the_text_of_a_file_that_is_gone_or_has_changed_is_not_guessed_at(tmp_path, then, note):
    path = tmp_path / "moved.py"
    path.write_text(WHOLE)
    step, args = sharded(path)
    step.prepare(*args)
    then(path)
    report = step.report()
    (source,) = report.sources
    assert (source.note, source.text) == (note, ())
    assert {c.source for c in report.collectives} == {None}
    assert all(c.file == "moved.py" and c.line for c in report.collectives)


def test_two_calls_of_one_jitted_function_are_told_apart(tmp_path):
    path = tmp_path / "twice.py"
    path.write_text(
        WHOLE.replace("def predict", "@jax.jit\ndef layer(x, w):\n    return jnp.tanh(x @ w)\n\ndef predict").replace(
            'return x @ params["w"] + params["b"]',
            'x = jax.nn.log_softmax(x @ params["a"])\n    x = layer(x, params["w"])\n    return layer(x, params["b"])',
        )
    )
    namespace: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    step = jaxshard_magic.shard(namespace["train_step"], "tp", mesh="model=8")
    state = {k: jnp.ones((16, 16)) for k in "awb"}
    step.prepare(state, {"x": jnp.ones((8, 16)), "y": jnp.ones((8, 16))})
    found = {c.source for c in step.report().collectives}
    assert found <= {line.strip() for line in path.read_text().splitlines()}


def test_one_device_moves_nothing_and_has_no_lines():
    path_step = jaxshard_magic.shard(lambda w, x: w - 0.1 * jax.grad(lambda w: (w * x).sum())(w), "dp", mesh="data=1")
    path_step.prepare(jnp.ones(8), jnp.ones(8))
    report = path_step.report()
    assert report.collectives == ()


def test_frames_of_a_program_whose_parents_count_from_one():
    header = """HloModule m

FileNames
1 "/home/me/model.py"
2 "/home/me/train.py"

FunctionNames
1 "loss_fn"
2 "train_step"

FileLocations
1 {file_name_id=2 function_name_id=2 line=12 end_line=12 column=4 end_column=9}
2 {file_name_id=1 function_name_id=1 line=31 end_line=31 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
"""
    chain = (Frame("/home/me/train.py", "train_step", 12), Frame("/home/me/model.py", "loss_fn", 31))
    assert Frames(header)[2] == chain
    assert Frames(header)[9] == ()
    plain = header.replace("parent_frame_id=1", "parent_frame_id=0").replace("parent_frame_id=2", "parent_frame_id=1")
    assert Frames(plain)[2] == chain
    assert Frames("HloModule m\n")[1] == ()


def test_libraries_are_not_the_users_own_files():
    assert not is_user_file(jax.__file__)
    assert not is_user_file(jaxshard_magic.__file__)
    assert not is_user_file(re.__file__)
    assert not is_user_file("<frozen importlib._bootstrap>")
    assert is_user_file(__file__)
    assert is_user_file("<ipython-input-3-0a1b2c>")


def test_a_line_is_read_only_where_its_function_still_stands(tmp_path):
    path = tmp_path / "model.py"
    path.write_text("def a():\n    return 1\n\ndef b():\n    return 2\n")
    assert SourceText().line(Frame(str(path), "a", 2)) == "return 1"
    assert SourceText().line(Frame(str(path), "Net.b", 5)) == "return 2"
    assert SourceText().line(Frame(str(path), "<lambda>", 5)) == "return 2"
    assert SourceText().line(Frame(str(path), "a", 5)) is None
    assert SourceText().line(Frame(str(path), "a", 50)) is None


def test_a_cached_compilation_never_tells_the_lines_of_an_earlier_text(tmp_path):
    from jax.experimental.compilation_cache import compilation_cache

    old = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    compilation_cache.reset_cache()
    try:
        for shift in (0, 7):
            path = tmp_path / "cached.py"
            path.write_text("\n" * shift + WHOLE)
            step, args = sharded(path)
            step.prepare(*args)
            (line,) = {c.line for c in step.report().collectives if c.what == "gradient of state.w"}
            assert line == 5 + shift
    finally:
        jax.config.update("jax_compilation_cache_dir", old[0])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", old[1])
        compilation_cache.reset_cache()


def test_a_gather_after_a_cast_of_a_parameter_has_the_parameters_name():
    def train_step(params, x):
        def loss(params):
            h, _ = jax.lax.scan(lambda h, w: (h @ w.astype(jnp.bfloat16), None), x, params["layers"])
            return jnp.square(h.astype(jnp.float32)).mean()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    params = {"layers": jax.ShapeDtypeStruct((3, 256, 256), jnp.float32)}
    step = jaxshard_magic.shard(train_step, "fsdp", mesh=jaxshard_magic.mesh("cpu:8 data=8"))
    entry = step.prepare(params, jax.ShapeDtypeStruct((64, 256), jnp.bfloat16))
    assert re.search(r'op_name="[^"]*/shard\.weight\.0/convert_element_type"', entry.compiled.as_text())


def _by_a_counter(layers, x):
    return jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ layers["w"][i] + layers["b"][i]), x)


def _by_a_constant(layers, x):
    for i in range(3):
        x = jnp.tanh(x @ layers["w"][i] + layers["b"][i])
    return x


def _by_a_scanned_index(layers, x):
    def block(h, i):
        w, b = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, keepdims=False), (layers["w"], layers["b"]))
        return jnp.tanh(h @ w.astype(jnp.bfloat16) + b).astype(h.dtype), None

    return jax.lax.scan(block, x, jnp.arange(3))[0]


@pytest.mark.parametrize("predict", [_by_a_counter, _by_a_constant, _by_a_scanned_index])
def test_weights_that_are_taken_out_of_a_stack_are_no_activations(predict):
    def train_step(params, x):
        grads = jax.grad(lambda params: jnp.square(predict(params, x)).mean())(params)
        return jax.tree.map(lambda p, g: p - g, params, grads)

    params = {
        "w": jax.ShapeDtypeStruct((3, 256, 256), jnp.float32),
        "b": jax.ShapeDtypeStruct((3, 256), jnp.float32),
    }
    step = jaxshard_magic.shard(train_step, "fsdp", mesh=jaxshard_magic.mesh("cpu:8 data=8"))
    step.prepare(params, jax.ShapeDtypeStruct((64, 256), jnp.float32))
    moved = {c.what for c in step.report().collectives}
    assert moved == {"params.w", "gradient of params.w", "gradient of params.b"}
