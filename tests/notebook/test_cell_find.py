"""Which function of a cell is its train step, and where it is bound."""

import ast
import textwrap
import time

import pytest
from support.cells import made
from support.refusals import refusal

from jaxshard_magic.notebook import cells

PLAIN_STEP = """
def update(params, batch):
    grads = jax.grad(loss_fn)(params, batch)
    return jax.tree.map(lambda p, g: p - g, params, grads)
"""


def found(source: str, name: str | None = None, **namespace) -> cells.StepLocation:
    return cells.find_step(ast.parse(textwrap.dedent(source)), namespace, name)


def error(source: str, name: str | None = None, **namespace) -> str:
    return refusal(found, source, name, **namespace)


def test_the_default_name_wins_over_everything_else():
    source = PLAIN_STEP + "def train_step(x):\n    return x\n"
    assert found(source) == cells.StepLocation("train_step", in_cell=True)


@pytest.mark.parametrize(
    "binding",
    [
        "train_step = jax.jit(update)",
        "from steps import train_step",
        "from steps import update as train_step",
        "with mesh:\n    train_step = jax.jit(update)",
        "if fast:\n    train_step = jax.jit(update)\nelse:\n    train_step = update",
        "@functools.partial(jax.jit, static_argnums=0)\ndef train_step(n, x): return x",
    ],
)
def test_every_way_to_bind_the_name_counts_as_bound_here(binding):
    assert found(binding) == cells.StepLocation("train_step", in_cell=True)


def test_a_step_of_an_earlier_cell_is_found_where_this_cell_calls_it():
    namespace = made("def train_step(s, b): return s")
    assert found("for b in batches:\n    s = train_step(s, b)", **namespace) == cells.StepLocation("train_step", False)


def test_a_step_of_an_earlier_cell_is_found_through_the_function_that_calls_it():
    namespace = made("def train_step(s): return s\ndef fit(s):\n    for _ in range(3): s = train_step(s)")
    assert found("fit(state)", **namespace) == cells.StepLocation("train_step", in_cell=False)


def test_the_default_name_is_not_taken_when_the_cell_has_nothing_to_do_with_it():
    namespace = made("def train_step(s): return s")
    assert found(PLAIN_STEP, **namespace) == cells.StepLocation("update", in_cell=True)


@pytest.mark.parametrize(
    "head",
    [
        "@jax.jit\ndef epoch(s, b): return train_step(s, b)",
        """
def body(s, b): return train_step(s, b)
def epoch(s, b): return jax.lax.scan(body, s, b)""",
    ],
)
def test_an_epoch_that_traces_the_step_inside_is_the_step(head):
    source = "def train_step(s, b): return s, b\n" + head
    assert found(source + "\ns = epoch(s, b)") == cells.StepLocation("epoch", in_cell=True)
    assert found(source + "\ns = epoch(s, b)\ns = train_step(s, b)") == cells.StepLocation("train_step", in_cell=True)
    assert found(source) == cells.StepLocation("train_step", in_cell=True)


def test_the_only_function_is_the_step():
    assert found("def forward(params, x):\n    return x @ params") == cells.StepLocation("forward", in_cell=True)


def test_the_function_that_takes_gradients_is_the_step_not_the_loss_nor_the_loop():
    source = f"""
def loss_fn(params, batch):
    return jnp.mean(batch @ params)
{PLAIN_STEP}
def evaluate(params, batch):
    return loss_fn(params, batch)
def fit(params):
    for batch in batches:
        params = update(params, batch)
    return params
params = fit(params)
"""
    assert found(source) == cells.StepLocation("update", in_cell=True)


def test_gradients_taken_in_a_helper_count_for_the_step_that_updates():
    source = """
def grads_of(params, batch):
    return jax.value_and_grad(loss_fn)(params, batch)
def one_step(params, opt_state, batch):
    loss, grads = grads_of(params, batch)
    updates, opt_state = tx.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state
for batch in batches:
    params, opt_state = one_step(params, opt_state, batch)
"""
    assert found(source) == cells.StepLocation("one_step", in_cell=True)


def test_the_jitted_name_is_the_step_not_the_function_it_wraps():
    assert found(PLAIN_STEP + "fast_update = nnx.jit(update)") == cells.StepLocation("fast_update", in_cell=True)


def test_a_function_made_by_a_factory_is_the_step_and_the_factory_is_not():
    source = """
def make_step(tx):
    @jax.jit
    def step(params, batch):
        grads = jax.grad(loss_fn)(params, batch)
        return tx.update(grads, params)
    return step
step = make_step(tx)
params = step(params, batch)
"""
    assert found(source) == cells.StepLocation("step", in_cell=True)


def test_an_imported_step_is_found_by_the_call_that_replaces_its_argument():
    namespace = made("def improve(s, b): return s\ndef batches(): return []")
    source = "for b in batches():\n    s = improve(s, b)"
    assert found(source, **namespace) == cells.StepLocation("improve", in_cell=False)


def test_functions_of_installed_packages_are_no_candidates():
    namespace = made("from numpy import copy\nfrom textwrap import dedent\ndef improve(s): return s")
    source = "s = copy(s)\nt = dedent(t)\ns = improve(s)"
    assert found(source, **namespace) == cells.StepLocation("improve", in_cell=False)


def test_models_and_optimizers_made_in_the_cell_are_no_candidates():
    source = "model = Model(rngs=rngs)\nlogits = model(x)\n" + PLAIN_STEP
    assert found(source) == cells.StepLocation("update", in_cell=True)


def test_a_step_that_needs_choosing_is_named_with_its_rivals():
    source = PLAIN_STEP.replace("update", "d_step") + PLAIN_STEP.replace("update", "g_step")
    assert error(source) == (
        "this cell has 2 functions that may be the train step: d_step, g_step; say which: --step d_step"
    )
    assert found(source, "g_step") == cells.StepLocation("g_step", in_cell=True)


def test_a_cell_without_a_function_says_so():
    assert "no function that may be the train step; name it: --step NAME" in error("x = 1\nprint(x)")


def test_a_method_that_the_cell_calls_is_the_step():
    namespace = made("class Trainer:\n    def step(self, b): return b\ntrainer = Trainer()")
    assert found("trainer.step(batch)", **namespace) == cells.StepLocation("trainer.step", in_cell=False)


def test_a_name_that_is_nowhere_gets_the_nearest_one():
    assert error(PLAIN_STEP, "updat") == (
        "--step updat: no function 'updat' in this cell or the notebook. Did you mean 'update'?"
    )
    assert "no object 'trainr'" in error("x = 1", "trainr.step", trainer=1)
    assert "Did you mean 'trainer'?" in error("x = 1", "trainr.step", trainer=1)


def test_a_method_is_found_on_an_object_of_this_cell_or_of_an_earlier_one():
    assert found("trainer = Trainer()\ntrainer.step()", "trainer.step").in_cell
    assert not found("trainer.step()", "trainer.step", trainer=object()).in_cell


NESTED = """
def main():
    @eqx.filter_jit
    def make_step(model, state, x):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x)
        updates, state = optim.update(grads, state)
        return loss, eqx.apply_updates(model, updates), state
    for x in loader:
        loss, model, state = make_step(model, state, x)
"""
INSIDE = cells.StepLocation("make_step", in_cell=True, inside=("main",))


@pytest.mark.parametrize(
    "call",
    [
        "",
        "main()",
        "if __name__ == '__main__':\n    main()",
        "app.run(main)",
        "tyro.cli(main)",
        "asyncio.run(main())",
    ],
)
def test_a_step_inside_the_function_that_loops_over_it_is_found_there(call):
    assert found(NESTED + call) == INSIDE
    assert found(NESTED + call, "make_step") == found(NESTED + call, "main.make_step") == INSIDE


def test_steps_in_functions_in_functions_are_found():
    deeper = "def run():\n" + textwrap.indent(NESTED, "    ") + "    main()\n"
    assert found(deeper + "run()").inside == ("run", "main")


METHODS = """
class Trainer:
    def __init__(self): {init}
    {decorator}def improve(self, params, batch):
        grads = jax.grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - g, params, grads)
    def fit(self, batches):
        for batch in batches: self.params = self.{name}(self.params, batch)
"""
BOUND = METHODS.format(init="self.fast = jax.jit(self.improve)", decorator="", name="fast")


@pytest.mark.parametrize("end", ["", "Trainer().fit(batches)", "trainer = Trainer()\ntrainer.fit(batches)"])
def test_methods_of_a_class_are_steps_where_the_class_has_them_or_gives_them(end):
    plain = METHODS.format(init="pass", decorator="@functools.partial(jax.jit, static_argnums=0)\n    ", name="improve")
    assert found(plain + end) == cells.StepLocation("Trainer.improve", in_cell=True, method=True)
    given = found(BOUND + end)
    assert given == cells.StepLocation("self.fast", in_cell=True, inside=("Trainer", "__init__"))
    assert (given.name, given.full) == ("Trainer.fast", "Trainer.fast")
    assert found(BOUND + end, "fast") == found(BOUND + end, "Trainer.fast") == given


def test_a_method_that_is_jitted_under_its_own_name_is_bound_where_that_happens():
    source = BOUND.replace("self.fast", "self.improve")
    assert found(source + "Trainer().fit(b)").path == "self.improve"


def test_the_outermost_of_what_wraps_a_step_is_the_step():
    wrapped = PLAIN_STEP + "fast = nnx.cached_partial(nnx.jit(update), model, optimizer)\nfor b in data:\n    fast(b)"
    assert found(wrapped).path == "fast"
    assert found(PLAIN_STEP + "go = jax.jit(partial(update, cfg))\nfor b in data:\n    s = go(s, b)").path == "go"
    both = "train_step, eval_step = make(cfg)\nfor b in data:\n    s = train_step(s, b)"
    makes = "def make(cfg):" + textwrap.indent(PLAIN_STEP, "    ") + "    return jax.jit(update), jax.jit(loss_fn)\n"
    assert found(makes + both).path == "train_step"


def test_two_steps_of_a_main_are_both_named():
    said = error(
        "def main():\n"
        + textwrap.indent("@jax.jit" + PLAIN_STEP.replace("update", "d_step"), "    ")
        + textwrap.indent("@jax.jit" + PLAIN_STEP.replace("update", "g_step"), "    ")
        + "    for b in data:\n        d = d_step(d, b)\n        g = g_step(g, b)\nmain()"
    )
    assert said == (
        "this cell has 2 functions that may be the train step: main.d_step, main.g_step; say which: --step main.d_step"
    )


def test_a_jitted_gradient_is_the_step_where_the_update_stands_outside():
    source = """
@jax.jit
def apply_model(state, x):
    return jax.value_and_grad(loss_fn)(state.params, x)
@jax.jit
def update_model(state, grads):
    return state.apply_gradients(grads=grads)
def train_epoch(state, data):
    for x in data:
        loss, grads = apply_model(state, x)
        state = update_model(state, grads)
    return state
state = train_epoch(state, data)
"""
    assert found(source).path == "apply_model"


def test_what_adds_gradients_up_in_a_loop_is_a_step():
    source = """
def improve(state, batches):
    total = None
    for batch in batches:
        grads = jax.grad(loss_fn)(state.params, batch)
        total = add(total, grads)
    return state.apply_gradients(grads=total)
for batches in data:
    state = improve(state, batches)
"""
    assert found(source).path == "improve"


def test_a_step_that_gives_back_what_has_a_functions_name_makes_no_functions():
    source = """
def improve(w, x):
    def loss(w):
        return jnp.mean(x @ w)
    loss, grad = jax.value_and_grad(loss)(w)
    return w - grad, loss
w, loss = improve(w, x)
"""
    assert found(source) == cells.StepLocation("improve", in_cell=True)


def test_a_gradient_that_a_decorator_takes_counts():
    source = NESTED.replace(
        "    @eqx.filter_jit",
        "    @eqx.filter_value_and_grad\n    def compute(m, x): return m(x)\n    @eqx.filter_jit",
    )
    assert found(source.replace("eqx.filter_value_and_grad(loss_fn)(", "compute(") + "main()") == INSIDE


def test_a_method_of_an_object_that_a_function_is_given_is_found():
    run = "def run(t, data):\n    for b in data: t.params = t.improve(t.params, b)\nrun(Trainer(), data)"
    assert found(METHODS.format(init="pass", decorator="", name="improve") + run).path == "Trainer.improve"


INNER = """
def attack(params, x):
    for _ in range(3):
        x = x + jax.grad(loss_fn, 1)(params, x)
    return x
def robust(params, batch):
    grads = jax.grad(loss_fn)(params, attack(params, batch))
    return jax.tree.map(lambda p, g: p - g, params, grads)
"""


def test_a_step_with_a_loop_of_its_own_is_no_loop_over_steps():
    assert found(INNER + "for b in data:\n    params = robust(params, b)").path == "robust"
    warm = "def fit(params):\n    params = robust(params, data[0])\n    for b in data: params = robust(params, b)\n"
    assert found(INNER + warm + "fit(params)").path == "robust"


def test_a_loop_over_the_updates_of_a_library_is_told_to_make_a_step():
    source = "def epoch(state, n):\n    for i in range(n): state, loss = svi.update(state, batch)\nepoch(state, 3)"
    assert error(source).startswith("epoch holds the loop over steps, and a step is what each pass of it runs")
    assert found("go = jax.jit(svi.update)\nfor b in data:\n    state, loss = go(state, b)").path == "go"


def test_what_is_called_without_a_name_is_told_to_get_one():
    source = "def train(key):\n    return jax.grad(loss_fn)(key)\nout = jax.jit(jax.vmap(train))(keys)"
    assert error(source) == (
        "the cell calls jax.jit(jax.vmap(train)) without a name for it; bind it to one: "
        "train_step = jax.jit(jax.vmap(train))"
    )


def test_a_step_that_only_another_cells_function_has_is_told_where_it_is():
    namespace = made(NESTED)
    assert error("main()", **namespace).startswith("main holds the loop over steps")


def test_many_functions_that_call_each_other_take_no_time():
    chain = "".join(f"def f{i}(x):\n    return f{i + 1}(x) + f{i + 2}(x) + f{i // 2}(x)\n" for i in range(200))
    start = time.process_time()
    assert found(chain + PLAIN_STEP + "for b in data:\n    f0(b)\n    p = update(p, b)").path == "update"
    assert time.process_time() - start < 2


def test_objects_that_answer_to_every_name_do_no_harm():
    class Anything:
        def __getattr__(self, name):
            return self

        def __call__(self, *args):
            return self

    namespace = made(PLAIN_STEP) | {"lib": Anything()}
    assert found("lib.run(batch)\nfor b in data:\n    p = update(p, b)", **namespace).path == "update"
