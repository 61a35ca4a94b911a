"""What the step's cell needs of the cells that ran before it: enough to run it again, and nothing that only looked."""

import pytest

from jaxshard_magic.notebook import cells as notebook_cells

STEP = "def train_step(p):\n    return p - rate"
CALL = "p = train_step(p)"


def found(*cells: str) -> tuple[list[str], set[str]]:
    """The statements that the last of these cells needs and its own, and the names that nothing gives a value."""
    units = [notebook_cells.ExecutedCell(f"cell {n}", text) for n, text in enumerate(cells, 1)]
    statements, missing = notebook_cells.required_statements(units, {"train_step"}, "train_step")
    return [alone(s) for s in statements], missing


def alone(s: notebook_cells.Statement) -> str:
    """Its text without what another statement has of its first line."""
    return s.text.encode()[s.before :].decode()


def needed(*cells: str) -> list[str]:
    """Those of earlier cells, where nothing is missing."""
    statements, missing = found(*cells)
    assert missing == set()
    own = len(notebook_cells.ExecutedCell("the last", cells[-1]).statements)
    return statements[: len(statements) - own]


def test_all_of_the_last_cell_is_kept_in_its_order():
    last = ["import jax", "print('a')", "def train_step(p):\n    return p", "q = train_step(1)", "q"]
    assert found("unrelated = 1", "\n".join(last)) == (last, set())


def test_what_the_step_reads_is_kept_in_the_order_that_it_ran_and_the_rest_is_not():
    cells = ("a = 1\nunused = 2\nb = a + 1", "c = b * 3", f"rate = c\n{STEP}\np = 1\n{CALL}")
    assert needed(*cells) == ["a = 1", "b = a + 1", "c = b * 3"]


def test_what_functions_bodies_read_is_kept():
    cells = (
        "width = 4\nrate = 0.1",
        "def model(x):\n    def layer(x):\n        return x * width\n    return layer(x)",
    )
    last = "def train_step(p):\n    return model(p) - rate\np = 1\np = train_step(p)"
    assert needed(*cells, last) == ["width = 4", "rate = 0.1", cells[1]]


def test_a_name_that_only_an_earlier_call_gives_is_kept_with_that_call():
    cells = (
        f"rate, p = 0.1, 1\n{STEP}",
        "for i in range(3):\n    p = train_step(p)\n    last = p",
        "p = train_step(p)",
    )
    assert needed(*cells, f"{CALL}\nprint(last)") == ["rate, p = 0.1, 1", STEP, cells[1]]
    assert needed(*cells, f"last = 0\n{CALL}\nprint(last)") == ["rate, p = 0.1, 1", STEP]


def test_only_the_last_of_several_definitions_is_kept():
    assert needed("rate = 0.1\nrate = 0.2", "rate = 0.3", f"{STEP}\np = 1\n{CALL}") == ["rate = 0.3"]


def test_a_definition_that_reads_the_one_before_keeps_it():
    assert needed("rate = 0.1", "rate = rate / 2", f"{STEP}\np = 1\n{CALL}") == [
        "rate = 0.1",
        "rate = rate / 2",
    ]


def test_a_function_defined_twice_is_kept_once():
    cells = ("def model(x):\n    return x", "def model(x):\n    return 2 * x")
    assert needed(*cells, "def train_step(p):\n    return model(p)\ntrain_step(1)") == [cells[1]]


def test_a_definition_that_may_not_happen_leaves_the_one_before():
    branch = "if fast:\n    rate = 0.2"
    assert needed("fast = True\nrate = 0.1", branch, f"{STEP}\np = 1\n{CALL}") == [
        "fast = True",
        "rate = 0.1",
        branch,
    ]


def test_both_ways_of_an_import_that_may_fail_are_kept():
    tried = "try:\n    import fast as f\nexcept ImportError:\n    import slow as f"
    assert needed(tried, "def train_step(p):\n    return f(p)\ntrain_step(1)") == [tried]


@pytest.mark.parametrize(
    ("imported", "read"),
    [
        ("import jax", "jax.numpy.sin(1)"),
        ("import jax.numpy as jnp", "jnp.sin(1)"),
        ("import jax.numpy", "jax.numpy.sin(1)"),
        ("from jax import numpy as jnp", "jnp.sin(1)"),
        ("from jax.numpy import sin, cos", "cos(1)"),
        ("from jax.numpy import *", "1"),
    ],
)
def test_imports_of_what_is_read_are_kept(imported: str, read: str):
    other = "import os, sys"
    assert needed(f"{other}\n{imported}", f"def train_step(p):\n    return {read}\ntrain_step(1)") == [imported]


@pytest.mark.parametrize(
    "change",
    [
        'cfg["a"] = 1',
        "cfg.a = 1",
        'cfg["a"]["b"] = 1',
        "cfg.a.b[0] += 1",
        'cfg["a"]: int = 1',
        "cfg.eval()",
        "cfg.layers[0].append(1)",
        'cfg["a"].update(b=1)',
        "cfg += [1]",
        "cfg, other = 1, 2",
        "[first, *cfg] = 1, 2",
        "(cfg := 3)",
        "del cfg[0]",
        "for i in range(3):\n    cfg.append(i)",
        "for layer in cfg.layers:\n    layer.eval()",
        "if cfg:\n    cfg['a'] = 1",
        "with made():\n    cfg.a, b = 1, 2",
        "made(cfg)",
        "for i in range(3):\n    made(i, to=cfg.layers)",
    ],
)
def test_what_changes_a_value_that_is_read_is_kept(change: str):
    made = "cfg = made()"
    kept = needed(f"def made():\n    return 1\n{made}", change, "def train_step(p):\n    return cfg\ntrain_step(1)")
    assert kept[-1] == change


@pytest.mark.parametrize(
    "look",
    [
        "cfg",
        "print(cfg)",
        "cfg.a",
        'cfg["a"]',
        "len(cfg)",
        "other.eval()",
        "other['a'] = cfg",
        "assert cfg",
        "cfg: int",
        "plots.show(cfg)",
        "for x in cfg:\n    print(x)",
        "for x, w in zip(other, cfg):\n    x.show(w)",
        "y = made(cfg)",
    ],
)
def test_what_only_looks_at_a_value_is_left_out(look: str):
    """`made` is the user's, and `plots` a module."""
    given = "import plots\ndef made(x):\n    return x\nother = {}"
    step = "def train_step(p):\n    return cfg\ntrain_step(1)"
    assert needed(f"{given}\ncfg = 1", look, step) == ["cfg = 1"]


def test_calls_of_modules_are_left_out_but_seeds_and_settings():
    cell = "import jax\nimport numpy as np\nimport unused"
    calls = ["jax.config.update('jax_enable_x64', True)", "np.random.seed(0)"]
    looks = ["jax.devices()", "np.set_printoptions(precision=3)", "unused.seed(0)"]
    last = "def train_step(p):\n    return jax.numpy.sin(np.pi)\ntrain_step(1)"
    assert needed(cell, "\n".join(calls + looks), last) == ["import jax", "import numpy as np", *calls]


def test_what_is_set_in_a_module_that_is_read_is_kept():
    cells = ("import os", "os.environ['A'] = '1'\nos.environ.setdefault('B', '2')\nos.getcwd()")
    assert needed(*cells, "def train_step(p):\n    return os.environ\ntrain_step(1)") == [
        "import os",
        "os.environ['A'] = '1'",
        "os.environ.setdefault('B', '2')",
    ]


def test_a_function_reads_the_values_that_names_have_when_it_is_called():
    assert needed("rate = 0.1", STEP, "rate = 0.2", "p = 1\np = train_step(p)") == [STEP, "rate = 0.2"]


def test_a_function_that_was_called_before_keeps_the_value_it_read_then():
    made = "def made():\n    return width"
    assert needed(
        "width = 4",
        made,
        "params = made()",
        "width = 8",
        "def train_step(p):\n    return p\ntrain_step(params)",
    )[:3] == ["width = 4", made, "params = made()"]


@pytest.mark.parametrize(
    "block",
    [
        "def block(x):\n    return act(x)",
        "block = lambda x: act(x)",
        "class block:\n    def __call__(self, x): return act(x)",
    ],
)
def test_a_function_below_the_one_that_calls_it_is_kept(block: str):
    act = "def act(x):\n    return x"
    assert needed(f"{block}\n{act}", "def train_step(x):\n    return block(x)\ntrain_step(1)") == [block, act]


def test_what_a_function_read_before_it_was_defined_anew_is_not_kept():
    cells = ("old = 1\ndef model(x):\n    return x * old * typo", "def model(x):\n    return x")
    assert needed(*cells, "def train_step(p):\n    return model(p)\ntrain_step(1)") == [cells[1]]


def test_a_list_that_a_loop_fills_is_kept_with_the_loop():
    made, filled = "params = []", "for i in range(3):\n    params.append(i)"
    assert needed(f"{made}\n{filled}", "def train_step(p):\n    return p\ntrain_step(params)") == [
        made,
        filled,
    ]


def test_a_function_may_change_its_argument_and_training_is_an_earlier_call():
    fill, fit = "def fill(d):\n    d['a'] = 1", "def fit(d):\n    for i in range(3):\n        train_step(d)"
    step = "def train_step(p):\n    return p"
    cells = (f"{fill}\n{step}\n{fit}", "cfg = {}", "fill(cfg)", "fit(cfg)")
    assert needed(*cells, "train_step(cfg)") == [fill, step, "cfg = {}", "fill(cfg)"]


def test_a_name_that_hides_one_of_pythons_own_is_kept():
    assert needed("input = 3", "def train_step(p):\n    return p\ntrain_step(input)") == ["input = 3"]


@pytest.mark.parametrize(
    ("imported", "setting"),
    [
        ("import jax", "jax.config.update('jax_enable_x64', True)"),
        ("import jax", "jax.config.jax_enable_x64 = True"),
        ("from jax import config", "config.update('jax_enable_x64', True)"),
        ("import os", "os.environ['XLA_FLAGS'] = 'a'"),
        ("from os import environ", "environ.setdefault('XLA_FLAGS', 'a')"),
        ("import numpy as np", "np.random.seed(0)"),
        ("from numpy.random import seed", "seed(0)"),
        ("import random", "if True:\n    random.seed(0)"),
    ],
)
def test_what_changes_how_all_code_runs_is_kept_with_its_import(imported: str, setting: str):
    last = "def train_step(p):\n    return p\ntrain_step(1)"
    assert needed(f"{imported}\n{setting}", last) == [imported, setting]


def test_a_users_object_that_is_called_config_is_no_setting():
    cells = ("class A: pass\nconfig = A()", "config.update(1)")
    assert needed(*cells, "def train_step(p):\n    return p\ntrain_step(1)") == []


def test_earlier_calls_of_the_step_are_left_out_and_its_arguments_are_as_before():
    loop = "for i in range(3):\n    p = train_step(p)"
    assert needed("rate = 1\np = 1", STEP, CALL, loop, "value = train_step(p)", CALL) == [
        "rate = 1",
        "p = 1",
        STEP,
    ]


def test_calls_of_the_step_in_its_own_cell_are_kept():
    own = f"{STEP}\np = train_step(1)\n{CALL}"
    assert found("rate = 1", own)[0] == ["rate = 1", STEP, "p = train_step(1)", CALL]


def test_a_step_that_is_given_its_name_anew_keeps_what_it_was_made_of():
    cells = ("import jax\nrate = 1", STEP, "train_step = jax.jit(train_step)", "p = 1\ntrain_step(p)")
    assert needed(*cells) == ["import jax", "rate = 1", STEP, "train_step = jax.jit(train_step)"]


def test_magics_are_left_out_of_earlier_cells_and_of_the_last():
    magic = "get_ipython().run_line_magic('matplotlib', 'inline')"
    assigned = "p = get_ipython().getoutput('ls')"
    cells = (f"{magic}\nrate = 1", f"{magic}\n{STEP}\n{assigned}\ntrain_step(1)")
    assert found(*cells)[0] == ["rate = 1", STEP, "train_step(1)"]


def test_names_that_nothing_gives_a_value_are_told():
    statements, missing = found("a = 1", "def train_step(p):\n    return p - rate * a + offset\ntrain_step(len([1]))")
    assert missing == {"rate", "offset"}
    assert statements[0] == "a = 1"


def test_a_name_that_is_read_before_it_has_a_value_is_told():
    assert found("def train_step(s):\n    return s", "state = train_step(state)")[1] == {"state"}


def test_a_name_that_is_deleted_has_a_value_before():
    assert needed("n = 0", "del n\ndef train_step(p):\n    return p\ntrain_step(1)") == ["n = 0"]


def test_an_annotation_alone_gives_no_value():
    assert needed("x = 3", "x: int", "def train_step(p):\n    return p\ntrain_step(x)") == ["x = 3"]


def test_imports_of_two_parts_of_a_package_are_both_kept():
    imports = ["import xml.dom", "import xml.sax"]
    last = "def train_step(p):\n    return xml.dom, xml.sax\ntrain_step(1)"
    assert needed("\n".join(imports), last) == imports


def test_names_that_a_star_imports_are_not_told():
    last = "def train_step(p):\n    return sin(p) + sine(p)\ntrain_step(pi)"
    assert found("from math import *", last)[1] == {"sine"}


def test_a_loops_variable_is_its_own():
    plots = "import plots\nfor i in range(3):\n    plots.show(i)"
    last = "def train_step(p):\n    return p\nfor i in range(3):\n    train_step(i)\nprint(i)"
    assert needed(plots, last) == []


def test_names_that_only_functions_bind_inside_are_not_looked_for():
    assert (
        needed(
            "loss = 1\ngrads = 2",
            "def train_step(p):\n    loss = p\n    grads = loss\n    return grads\ntrain_step(1)",
        )
        == []
    )


def test_a_cell_that_is_no_python_is_passed_over():
    assert needed("rate = 1", "rate = = 2", "def f():\n    nonlocal rate\nrate = 3", f"{STEP}\np = 1\n{CALL}") == [
        "rate = 1"
    ]


def test_what_is_printed_together_is_not_needed_together():
    kept = needed("rate = 1\nother = 2", "other = 3\nprint(rate, other)", STEP, "p = 0\np = train_step(p)\nprint(p)")
    assert kept == ["rate = 1", STEP]


def test_what_a_function_gives_by_global_is_kept_with_its_call():
    defined = "def build():\n    global p, rate\n    p, rate = 1, 0.1"
    for call in ("build()", "other = build\nother()", "done = [build() for _ in range(2)]", "run(build)"):
        cells = ("def run(f):\n    f()", defined, f"{call}\nprint(p)", f"{STEP}\n{CALL}")
        assert needed(*cells)[-1] == call.split("\n")[-1] and defined in needed(*cells)
    cells = (defined, "class Data:\n    def load(self):\n        build()", "data = Data()\ndata.load()")
    assert needed(*cells, f"{STEP}\n{CALL}")[-1] == "data.load()"


def test_a_training_loop_that_gives_by_global_is_an_earlier_call_of_the_step():
    train = "def train():\n    global p\n    for _ in range(3):\n        p = train_step(p)"
    cells = (f"rate, p = 0.1, 1\n{STEP}", f"{train}\ntrain()")
    assert needed(*cells, CALL) == ["rate, p = 0.1, 1", STEP]
    assert found(*cells, f"{train}\ntrain()")[1] == set()
