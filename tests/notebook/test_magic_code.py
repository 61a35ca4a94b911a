"""`%shard code` in a shell: what it takes from which cells, what it says of what it lacks, and its errors."""

import re
import textwrap
from importlib.util import find_spec

import pytest
from support.coded_cells import ARGUMENTS, CALL, MODEL, STEP, begun
from support.forked import printed
from support.refusals import refusal

from jaxshard_magic.codegen import UserStatement, generate_code
from jaxshard_magic.codegen.code import unbound_names


@pytest.fixture
def prepared(notebook):
    return begun(notebook)


def test_the_program_has_what_its_cell_needs_and_nothing_else(prepared):
    prepared.run("unused = 1")
    prepared.run(f"%%shard fsdp;\n{STEP}\n{CALL}")
    text = prepared.run("%shard code").text
    assert "# squares, summed\ndef loss_of(w, x):" in text
    assert "unused" not in text and "get_ipython" not in text and "%" + "mesh" not in text


@pytest.mark.ci
def test_a_step_that_trained_before_begins_with_its_first_state(prepared):
    prepared.run(f"%%shard dp;\n{STEP}\n{CALL}")
    prepared.run("w, loss = train_step(w, x)")
    prepared.run(f"%%shard fsdp;\n{STEP}\n{CALL}")
    text = prepared.run("%shard code").text
    assert text.count("train_step(w, x)") == 2  # its definition and one call
    assert float(printed(text + "\nprint(loss)")) == pytest.approx(16.0**2)


@pytest.mark.ci
def test_what_only_an_earlier_training_loop_gives_is_trained_in_the_program(prepared):
    prepared.run(STEP)
    prepared.run("for _ in range(2):\n    w, first = train_step(w, x)")
    prepared.run("%%shard fsdp;\nw, loss = train_step(w, x)\ngain = first - loss")
    text = prepared.run("%shard code").text
    assert float(printed(text + "\nprint(gain)")) == pytest.approx(float(prepared["gain"]), rel=1e-4)


def test_a_cell_that_only_defines_its_step_gets_a_call(prepared):
    prepared.run(f"%%shard fsdp;\n{STEP}")
    text = prepared.run("%shard code").text
    assert text.endswith("results = train_step(w, x)\n")
    assert float(printed(text + "\nprint(results[1])")) == pytest.approx(256.0)


FIT = "def fit(n):\n    global w\n    for _ in range(n):\n        w, loss = train_step(w, x)\n    return loss"


@pytest.mark.parametrize(
    ("cells", "last"),
    [
        (["for y in [x, x]:\n    w, loss = train_step(w, y)"], "    w, loss = train_step(w, y)"),
        ([FIT, "loss = fit(2)"], "loss = fit(2)"),
        (["def fit(step):\n    return step(w, x)", "_, loss = fit(train_step)"], "_, loss = fit(train_step)"),
        ([CALL, "train_step = None", "print(train_step)"], CALL),
        (
            ["for n in range(9):\n    w, loss = train_step(w, x)\n    n == 1 and stop()"],
            "    n == 1 and stop()",
        ),
    ],
)
def test_a_later_cell_that_runs_the_step_ends_the_program(prepared, cells, last):
    prepared.run("def stop():\n    1 / 0")
    prepared.run(f"%%shard fsdp;\n{STEP}")
    for cell in cells:
        prepared.cell(cell)
    text = prepared.run("%shard code").text
    assert text.endswith(f"{last}\n") and not unbound_names(text)


def test_a_call_is_written_as_the_step_was_called(prepared):
    step = STEP.replace("(w, x)", "(w, x, rate=0.1, *, decay)", 1).replace("0.1 * grad", "rate * grad - decay * w")
    prepared.run("decay = 0.5")
    prepared.run(f"%%shard dp;\n{step}")
    text = prepared.run("%shard code").text
    assert text.endswith("results = train_step(w, x, decay=decay)\n") and not unbound_names(text)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import a.b as c\nfrom d import e\nprint(c, e, f)", {"f"}),
        ("def f():\n    global g\n    g = h\n    return i\nprint(g)", {"h", "i"}),
        ("globals()['w'] = 1\nfrom math import *\nprint(w, sin, [x for x in y], lambda z: z)", {"y"}),
        (
            "class A(B):\n    c: D = 1\n    def e(self, f: G = H): return __class__, self.c",
            {"B", "D", "G", "H"},
        ),
        (
            "try:\n    import q\nexcept E as e:\n    print(e)\nif (n := 1): match n:\n        case m: print(m)",
            None,
        ),
    ],
)
def test_names_that_nothing_in_a_program_binds_are_found(text, names):
    if names is None:
        with pytest.raises(SyntaxError):
            unbound_names(text)
    else:
        assert unbound_names(text) == names


def test_a_program_that_reads_what_nothing_binds_is_not_handed_out(prepared):
    prepared.run(f"%%shard dp;\n{STEP}\n{CALL}")
    step = prepared["train_step"]
    piece = UserStatement(f"{MODEL}\n{ARGUMENTS}\n{STEP}\n{CALL}\nprint(lost, found)", "", 1, "cell [1]")
    said = refusal(generate_code, step, [piece], "train_step", missing={"found"})
    assert "reads lost, which nothing in it gives a value" in said


def test_the_users_own_names_stay_theirs(prepared):
    prepared.run("mesh, hold, where, P, sharded = 1.0, 2.0, 3.0, 4.0, 5.0")
    prepared.run(
        "%%shard fsdp;\ndef train_step(w, x):\n    def loss(w):\n"
        "        return loss_of(w, x) * mesh * hold * where * P * sharded / 120\n"
        f"    loss, grad = jax.value_and_grad(loss)(w)\n    return w - 0.1 * grad, loss\n{CALL}"
    )
    text = prepared.run("%shard code").text
    assert "sharding_mesh = jax.make_mesh(" in text and '"x": sharding_P("data"),' in text
    assert "train_step = sharding_sharded(train_step)" in text and "\nmesh, hold, where, P, sharded = 1.0" in text
    assert float(printed(text + "\nprint(loss)")) == pytest.approx(256.0)


def test_an_imported_step_stands_in_its_own_module(prepared, tmp_path, monkeypatch):
    (tmp_path / "their_step.py").write_text(MODEL + STEP)
    monkeypatch.syspath_prepend(str(tmp_path))
    prepared.run("from their_step import train_step")
    prepared.run(f"%%shard dp;\n{CALL}")
    text = prepared.run("%shard code").text
    assert "from their_step import train_step" in text
    assert text.index("train_step = sharded(train_step)") < text.index("w, loss = train_step(w, x)")
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    assert float(printed(path + text + "\nprint(loss)")) == pytest.approx(256.0)


def test_a_step_without_a_text_is_imported_and_the_program_says_so(prepared):
    prepared.run("import builtins; namespace = globals(); builtins.exec('''" + STEP + "''', namespace)")
    prepared.run(f"%%shard dp;\n{CALL}")
    text = prepared.run("%shard code").text
    assert "from my_step import train_step" in text
    assert "The text of train_step can't be had: no cell defines it." in text


def test_plain_values_and_functions_that_no_cell_binds_are_written_down(prepared):
    prepared.shell.user_ns["rate"] = 0.25
    prepared.run(f"%%shard dp;\n{STEP.replace('0.1', 'rate')}\n{CALL}")
    text = prepared.run("%shard code").text
    assert "rate = 0.25" in text and "No cell gives" not in text


def test_what_can_t_be_written_down_is_named(prepared):
    prepared.shell.user_ns["scale"] = prepared["w"][0, 0]
    prepared.run(f"%%shard dp;\n{STEP.replace('0.1', 'scale')}\n{CALL}")
    assert "No cell gives scale a value" in prepared.run("%shard code").text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "dp --precision fp16",
            "Without --precision fp16: products run in the types that the cells give them",
        ),
        ("dp --remat 2", "Without --remat 2: the numbers are the same"),
    ],
)
def test_an_option_that_is_left_out_is_said(prepared, options, said):
    prepared.run(f"%%shard {options} --mesh data=4;\n{STEP}\n{CALL}")
    assert said in prepared.run("%shard code").text


@pytest.mark.ci
@pytest.mark.skipif(find_spec("libtpu") is None, reason="no TPU compiler: libtpu is not installed")
def test_what_a_loop_keeps_goes_to_the_host_s_memory_in_a_program_for_a_slice(prepared, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    step = """
        def train_step(w, x):
            def loss(w):
                return loss_of(w, jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=4)[0])
            value, grad = jax.value_and_grad(loss)(w)
            return w - grad, value
        """
    prepared.run(f'%%shard dp --remat offload --mesh "v5e:2x4 data=8";\n{textwrap.dedent(step)}\n{CALL}')
    text = re.sub(r"\s+", "", prepared.run("%shard code").text)
    assert "Without" not in text
    kept = 'policy=jax.checkpoint_policies.offload_dot_with_no_batch_dims("device","pinned_host")'
    assert f"scan(jax.checkpoint(lambdah,_:(jnp.tanh(h@w),None),{kept}" in text


def test_a_step_that_gives_back_the_gradients_of_an_nnx_model_has_a_program(notebook):
    notebook.run(
        """
        import jax.numpy as jnp
        from flax import nnx

        model, x = nnx.Linear(32, 16, rngs=nnx.Rngs(0)), jnp.ones((8, 32))
        """
    )
    notebook.run(
        """
        %%shard fsdp --mesh data=4;
        @nnx.jit
        def train_step(model, x):
            return nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)

        loss, grads = train_step(model, x)
        """
    )
    assert notebook.run("%shard code").same


@pytest.mark.ci
def test_a_pipeline_is_left_out_and_the_numbers_stay(notebook):
    notebook.run(MODEL)
    notebook.run("w, x = [jnp.ones((SIZE, SIZE)) / SIZE] * 4, jnp.ones((8, SIZE))")
    step = """def train_step(w, x):
    def loss(w):
        h = x
        for v in w:
            h = jnp.tanh(h @ v)
        return jnp.mean(h)

    loss, grads = jax.value_and_grad(loss)(w)
    return [v - g for v, g in zip(w, grads)], loss
"""
    notebook.run(f"%%shard pp --stages 2 --microbatches 2 --mesh pipe=2;\n{step}\n{CALL}")
    text = notebook.run("%shard code").text
    assert "Without the pipeline: plain JAX runs no schedule of stages" in text
    assert float(printed(text + "\nprint(loss)")) == pytest.approx(float(notebook["loss"]), rel=1e-5)


def test_what_functions_made_through_global_is_made_in_the_program(notebook):
    notebook.run("%mesh data=8;")
    notebook.run(MODEL)
    notebook.run("def filled(n):\n    return jnp.ones((n, SIZE))")
    made = "    global w, train_step\n    from functools import partial as w\n    w = filled(SIZE)\n"
    notebook.run(f"def build():\n{made}{textwrap.indent(STEP, '    ')}")
    notebook.run("class Data:\n    def load(self):\n        globals()['x'] = filled(8)")
    notebook.run("build()\n[each.load() for each in [Data()]]\nprint(w.sum())")
    notebook.run(f"%%shard fsdp;\n{CALL}")
    text = notebook.run("%shard code").text
    assert "No cell gives" not in text and "print(w.sum())" not in text
    assert float(printed(text + "\nprint(loss)")) == pytest.approx(256.0)


def test_a_padded_batch_has_no_plain_form(prepared):
    prepared.run("x = jnp.ones((6, SIZE))")
    prepared.run(f"%%shard dp --pad;\n{STEP}\n{CALL}")
    assert "run the step on a batch that does, without --pad" in str(prepared.fails("%shard code"))


def test_functions_are_what_they_were_after_it(prepared):
    prepared.run(f"%%shard fsdp;\n{STEP}\n{CALL}")
    before = prepared["loss_of"].__code__
    prepared.run("%shard code")
    assert prepared["loss_of"].__code__ is before
    prepared.run("w, loss = train_step(w, x)")


@pytest.mark.ci
@pytest.mark.skipif(find_spec("libtpu") is None, reason="no TPU compiler: libtpu is not installed")
def test_a_program_for_a_slice_is_compiled_by_the_slices_own_compiler(prepared):
    prepared.run("%mesh v5e:2x4 data=8;")
    prepared.run(f"%%shard fsdp;\n{STEP}\n{CALL}")
    program = prepared.run("%shard code")
    assert program.sent is not None and program.same is not None
    assert "v5e:2x4 was not attached where this was written" in program.text
    assert "jax_num_cpu_devices" not in program.text


def test_modules_that_the_cells_call_by_our_names_stay_theirs(prepared):
    prepared.run("import jax.numpy as np\nfrom math import sqrt as inspect")
    prepared.run(f"%%shard dp;\n{STEP.replace('w - 0.1', 'np.abs(w) - inspect(0.01)')}\n{CALL}")
    text = prepared.run("%shard code").text
    assert "import inspect as sharding_inspect" in text and "sharding_inspect.signature(step)" in text
    assert "import jax.numpy as np" in text and "import numpy" not in text
    assert float(printed(text + "\nprint(loss)")) == pytest.approx(256.0)


def test_a_timed_line_is_in_the_program_without_its_magic(prepared):
    prepared.run("%time scale = 0.5")
    prepared.run(f"%%shard dp;\n{STEP.replace('0.1', 'scale')}\n%time {CALL}")
    text = prepared.run("%shard code").text
    assert "scale = 0.5" in text and text.endswith("w, loss = train_step(w, x)\n")


def test_a_step_called_by_a_function_of_its_cell_gets_no_call_of_its_own(notebook):
    notebook.run(MODEL)
    main = f"def main():\n    {ARGUMENTS}\n    return train_step(w, x)\n"
    notebook.run(f"%%shard dp --mesh data=8;\n{STEP}\n{main}\nw, loss = main()")
    text = notebook.run("%shard code").text
    assert text.endswith("w, loss = main()\n")
    assert float(printed(text + "\nprint(loss)")) == pytest.approx(256.0)


def test_attributes_that_a_class_is_given_later_are_kept(prepared):
    prepared.run("class Trainer:\n    rate = 0.1\n\n    def step(self, w, x):\n        " + STEP.split("\n")[1].strip())
    prepared.run("Trainer.rate = 0.25")
    prepared.run("def stepped(w, x, by=Trainer):\n    return w - by.rate * jax.grad(loss_of)(w, x), loss_of(w, x)")
    prepared.run("%%shard dp --step stepped;\nw, loss = stepped(w, x)")
    assert "Trainer.rate = 0.25" in prepared.run("%shard code").text


def test_what_a_cell_displays_a_program_prints(prepared):
    prepared.run(f"%%shard dp;\n{STEP}\n{CALL}\ndisplay('the loss', float(loss))")
    assert printed(prepared.run("%shard code").text) == "the loss 256.0\n"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("made", "draw"),
    [("rng = np.random.default_rng(0)", "rng.normal"), ("draw = np.random.default_rng(0).normal", "draw")],
)
def test_what_else_was_drawn_from_a_generator_is_drawn_again(prepared, made, draw):
    prepared.run(f"import numpy as np\n{made}")
    prepared.run(f"other = {draw}(size=3)")
    prepared.run(f"x = jnp.asarray({draw}(size=(8, SIZE)), jnp.float32)")
    prepared.run(f"%%shard dp;\n{STEP}\n{CALL}")
    text = prepared.run("%shard code").text
    assert f"other = {draw}(size=3)" in text
    assert float(printed(text + "\nprint(loss)")) == pytest.approx(float(prepared["loss"]), rel=1e-5)


def test_a_leaf_named_value_lies_where_the_plan_has_it(prepared):
    prepared.run('w, x = {"key": jnp.ones((256, 256)), "value": jnp.ones((256, 256))}, jnp.ones((8, 256))')
    prepared.run(
        "%%shard fsdp;\ndef train_step(w, x):\n    def loss(w):\n        return loss_of(w['key'] @ w['value'], x)\n"
        f"    value, grad = jax.value_and_grad(loss)(w)\n    return jax.tree.map(jnp.subtract, w, grad), value\n{CALL}"
    )
    text = prepared.run("%shard code").text
    out = printed(text + "\nprint([w[k].addressable_shards[0].data.shape for k in ('key', 'value')])")
    assert out == str([prepared["w"][k].addressable_shards[0].data.shape for k in ("key", "value")]) + "\n"
    assert "(256, 256)" not in out


def test_a_change_of_what_something_else_holds_is_kept(prepared):
    prepared.run("from types import SimpleNamespace\ncfg = SimpleNamespace(rate=0.1)")
    step = STEP.replace("0.1", "cfg.rate").replace("\n", "\n    ")
    prepared.run(f"def made(cfg):\n    {step}\n    return train_step")
    prepared.run("train_step = made(cfg)\ncfg.rate = 0.5")
    prepared.run(f"%%shard dp;\n{CALL}")
    assert "cfg.rate = 0.5" in prepared.run("%shard code").text


@pytest.mark.ci
def test_what_is_drawn_without_a_generator_of_its_own_is_drawn_in_order(prepared):
    prepared.run("import numpy as np\ndef seed_all(n):\n    np.random.seed(n)")
    prepared.run("seed_all(3)\nunread = np.random.rand(3)")
    prepared.run("x = jnp.asarray(np.random.rand(8, SIZE), jnp.float32)")
    prepared.run(f"%%shard dp;\n{STEP}\n{CALL}")
    text = prepared.run("%shard code").text
    assert "seed_all(3)" in text and "unread = np.random.rand(3)" in text
    assert float(printed(text + "\nprint(loss)")) == pytest.approx(float(prepared["loss"]), rel=1e-5)


@pytest.mark.ci
def test_texts_in_quotes_stay_as_they_are_in_microbatches(prepared):
    prepared.run(
        "%%shard dp --microbatches 2 --mesh data=4;\ndef train_step(w, x):\n    def loss(w):\n"
        '        text = """a\nb"""\n        return loss_of(w, x) * len(text)\n'
        f"    value, grad = jax.value_and_grad(loss)(w)\n    return w - grad, value\n{CALL}"
    )
    text = prepared.run("%shard code").text
    assert "in_microbatches(microbatch, 2, x)" in text
    assert float(printed(text + "\nprint(loss)")) == pytest.approx(3 * 256.0)


def test_arguments_that_are_no_arrays_and_new_numbers_are_the_steps(prepared):
    prepared.run(
        "from dataclasses import dataclass\n@dataclass\nclass Config:\n    rate: float = 0.1\n\ncfg = Config()"
    )
    prepared.run(
        "%%shard dp;\ntraced = []\n@jax.jit\ndef inner(w, x, rate):\n    traced.append(0)\n"
        "    return w - rate * jax.grad(loss_of)(w, x), loss_of(w, x)\n"
        "def train_step(w, x, rate, /, *, how):\n    return inner(w, x, rate * (2 if how == 'fast' else 1))\n"
        "w, loss = train_step(w, x, 0.1, how='fast')"
    )
    text = prepared.run("%shard code").text
    assert float(printed(text + "\nprint(loss)")) == pytest.approx(256.0)


def test_a_step_with_star_arguments_is_refused_in_one_line(prepared):
    prepared.run("%%shard dp;\ndef train_step(*args):\n    return jax.grad(loss_of)(*args)\ngrad = train_step(w, x)")
    assert "takes * or ** arguments" in str(prepared.fails("%shard code"))


EXPLICIT = """%%shard spmd
def doubled(x):
    return jax.reshard(x * 2, jax.P("data"))
"""
IN_PLACE = """%%shard dp
def counted(total, x):
    total[...] += jnp.sum(x)
"""


@pytest.mark.parametrize(
    ("cell", "call", "told"),
    [
        (EXPLICIT, "doubled(jnp.ones(8))", "written for explicit mesh axes"),
        (IN_PLACE, "counted(jax.new_ref(jnp.zeros(())), jnp.ones(8))", "writes into a jax.Ref"),
    ],
)
def test_a_step_whose_own_text_says_the_layout_has_no_other_code(notebook, cell, call, told):
    notebook.run("import jax, jax.numpy as jnp")
    notebook.run("%mesh data=8;")
    notebook.run(cell)
    notebook.run(call)
    assert told in str(notebook.fails("%shard code"))


def test_what_a_failed_cell_did_not_run_is_left_out(prepared):
    prepared.run("rate = 0.1")
    prepared.fails("kept = 1\nrate = boom(3)\nrate = 7")
    prepared.fails("rate = = 3")
    prepared.run(f"%%shard dp;\n{STEP.replace('0.1', 'rate * kept')}\n{CALL}")
    text = prepared.run("%shard code").text
    assert "rate = 0.1" in text and "kept = 1" in text and "boom" not in text and "rate = 7" not in text


@pytest.mark.ci
def test_a_way_that_the_cells_do_not_bear_is_left_out_with_what_they_raised(notebook):
    notebook.run("import jax, jax.numpy as jnp\nw, x = [jnp.ones((256, 256)) / 256] * 4, jnp.ones((16, 256))")
    step = """def train_step(w, x):
    def loss(w):
        y = x
        for v in w:
            y = jnp.tanh(y @ v)
        return jnp.mean(y), "a text, which jax.checkpoint does not give back"

    (value, _), grads = jax.value_and_grad(loss, has_aux=True)(w)
    return [v - g for v, g in zip(w, grads)], value
"""
    notebook.run(f"%%shard fsdp --mesh data=8;\n{step}\n{CALL}")
    text = notebook.run("%shard code").text
    assert "is left out: they raise under it\n    TypeError: " in text and "again(" not in text
    assert float(printed(text + "\nprint(loss)")) == pytest.approx(float(notebook["loss"]), rel=1e-5)
