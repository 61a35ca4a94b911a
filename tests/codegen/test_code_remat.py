"""`--remat` by a number or a name in programs of `%shard code`: where it stands, and what it does again and keeps."""

import json
from dataclasses import dataclass
from functools import cache

import pytest
from support.forked import printed

pytestmark = pytest.mark.usefixtures("as_asked")
ROWS, WIDTH, LAYERS = 512, 64, 8
ARRAY = 4 * ROWS * WIDTH  # bytes of one layer's activations
MODEL = f"""import functools
import jax, jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
ROWS, WIDTH, LAYERS = {ROWS}, {WIDTH}, {LAYERS}
"""
GIVEN = """
w = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5
x = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
"""
STEP = """
def train_step(w, x):
    loss, grad = jax.value_and_grad(loss_of)(w, x)
    return w - 0.1 * grad, loss
"""
LAYER = """
def layer(x, w):
    return jnp.sin(x @ w)
"""
LOOPED = "def loss_of(w, x):\n    return lax.scan(lambda x, w: (layer(x, w), None), x, w)[0].sum()\n"
CHAIN = "def loss_of(w, x):\n    for i in range(LAYERS):\n        x = layer(x, w[i])\n    return x.sum()\n"
MEASURED = """
import json, sys
assert "jaxshard_magic" not in sys.modules

def products(jaxpr):
    found = 0
    for e in jaxpr.eqns:
        inside = [getattr(b, "jaxpr", b) for p in e.params.values() for b in (p if isinstance(p, tuple) else (p,))]
        trips = e.params["length"] if e.primitive.name == "scan" else 1
        found += (e.primitive.name == "dot_general") + trips * sum(products(b) for b in inside if hasattr(b, "eqns"))
    return found

step = train_step.__wrapped__
temp = jax.jit(step).lower(w, x).compile().memory_analysis().temp_size_in_bytes
changed = float(abs(w).sum())
print(json.dumps([float(loss), changed, products(jax.make_jaxpr(step)(w, x).jaxpr), temp]))
"""


@dataclass(frozen=True)
class Ran:
    """What a program gave in a process that has not the package: its loss, the sum of what it changed; and the
    matmuls of its step, and the bytes that it takes for them as compiled for one device. (XLA's CPU backend finds what
    is computed twice outside of loops, and does it once.)"""

    loss: float
    changed: float
    products: int
    temp: int


def written(notebook, line: str, model: str, step: str = STEP):
    """The program of a step under `line` on two devices."""
    notebook.run("%mesh data=2;")
    notebook.run(MODEL + model)
    notebook.run(GIVEN)
    notebook.run(f"%%shard {line};\n{step}\nw, loss = train_step(w, x)\n")
    return notebook.run("%shard code")


@cache
def run(text: str) -> Ran:
    """What a program gives; many tests have the same one without remat."""
    return Ran(*json.loads(printed(text + MEASURED).splitlines()[-1]))


def compared(notebook, how: str, model: str) -> tuple[str, Ran, Ran]:
    """The text of the program with remat, what it gave, and what that without gave, once their numbers are the same."""
    plain, text = (written(notebook, line, model).text for line in ("dp", f"dp --remat {how}"))
    without, found = run(plain), run(text)
    assert found.loss == pytest.approx(without.loss, rel=1e-5)
    assert found.changed == pytest.approx(without.changed, rel=1e-5)
    return text, found, without


@pytest.mark.ci
def test_a_loop_that_the_plan_cuts_into_its_trips_has_each_checkpointed(notebook):
    """A trip keeps its input and a cosine; checkpointed, its input."""
    text, found, without = compared(notebook, str(LAYERS), LAYER + LOOPED)
    assert "lax.scan(jax.checkpoint(lambda x, w: (layer(x, w), None)), x, w)" in text
    assert "Without --" not in text
    assert found.products == without.products + LAYERS
    assert without.temp - found.temp > 0.9 * LAYERS * ARRAY - 2 * ARRAY


@pytest.mark.ci
def test_a_loop_that_the_plan_cuts_into_segments_is_scanned_in_segments(notebook):
    """Two arrays of each of 8 trips are kept; in 4 segments those of 2 trips, and 4 inputs."""
    text, found, without = compared(notebook, "4", LAYER + LOOPED)
    assert "scan_in_segments(4)(lambda x, w: (layer(x, w), None), x, w)" in text
    assert "Without --" not in text
    assert found.products == without.products + LAYERS
    assert without.temp - found.temp > 5 * ARRAY


FORMS = {
    "reverse": "lax.scan(layer2, x, w, reverse=True)[0]",
    "unrolled by two": "lax.scan(layer2, x, w, unroll=2)[0]",
    "with its length": "lax.scan(layer2, x, w, LAYERS)[0]",
    "results of each trip": "lax.scan(layer2, x, w)[1]",
    "trees": "lax.scan(lambda c, w: ((layer(c[0], w), c[1] + 1), {'y': c[0]}), (x, 0.0), w)[1]['y']",
    "nothing to scan over": (
        "lax.scan(lambda c, _: ((layer(c[0], w[0]), c[1] + 1), None), (x, 0.0), None, length=LAYERS)[0][0]"
    ),
    "arguments by their names": "lax.scan(f=layer2, init=x, xs=w)[0]",
    "on several lines": "lax.scan(\n        layer2,\n        x,\n        w,  # weights\n    )[0]",
    "mapped": "jax.vmap(lambda x: lax.scan(layer2, x, w)[0])(x)",
}


def rows(names, quick: int):
    """The first of them at each run of the tests, the rest with all."""
    return [pytest.param(name, marks=[pytest.mark.full] if k >= quick else []) for k, name in enumerate(names)]


@pytest.mark.ci
@pytest.mark.parametrize("form", rows(FORMS, 1))
def test_every_form_of_a_scan_is_cut_into_segments(notebook, form):
    layer2 = LAYER + "def layer2(x, w):\n    x = layer(x, w)\n    return x, x * 2\n"
    text, found, without = compared(notebook, "2", f"{layer2}def loss_of(w, x):\n    return ({FORMS[form]}).sum()\n")
    assert "scan_in_segments(2)(" in text and "Without --" not in text
    assert found.products == without.products + LAYERS


@pytest.mark.ci
def test_of_two_loops_that_which_keeps_more_is_cut(notebook):
    model = LAYER + (
        "def loss_of(w, x):\n"
        "    few, _ = lax.scan(lambda x, w: (layer(x, w), None), x[:64], w)\n"
        "    many, _ = lax.scan(lambda x, w: (layer(x, w), None), x, w)\n"
        "    return few.sum() + many.sum()\n"
    )
    text, found, without = compared(notebook, "2", model)
    assert "few, _ = lax.scan(lambda" in text and "many, _ = scan_in_segments(2)(lambda" in text
    assert found.products == without.products + LAYERS


@pytest.mark.ci
def test_a_line_that_is_two_loops_of_which_one_is_cut_is_left_alone(notebook):
    model = LAYER + (
        "def layers(x, w):\n    return lax.scan(lambda x, w: (layer(x, w), None), x, w)[0].sum()\n"
        "def loss_of(w, x):\n    return layers(x[:64], w) + layers(x, w)\n"
    )
    text, found, without = compared(notebook, "2", model)
    assert "Without --remat 2: " in text and "scan_in_segments" not in text
    assert found.products == without.products


@pytest.mark.ci
def test_one_segment_is_the_whole_loss(notebook):
    """A layer's sine is computed again from its matmul: that of each."""
    text, found, without = compared(notebook, "1", LAYER + CHAIN)
    assert "jax.value_and_grad(jax.checkpoint(loss_of))(w, x)" in text and "Without --" not in text
    assert found.products == without.products + LAYERS


@pytest.mark.ci
def test_segments_of_straight_line_code_are_told_to_be_left_out(notebook):
    text, found, without = compared(notebook, "3", LAYER + CHAIN)
    assert "Without --remat 3: " in text and "checkpoint(" not in text
    assert found == without


CALLS = {  # a model; how it is named; what the program has then
    "a function in a Python loop": (LAYER + CHAIN, "layer", "x = jax.checkpoint(layer)(x, w[i])"),
    "one with options": (
        "def layer(x, w, kind, *, scale=None):\n    return {'sine': jnp.sin}[kind](x @ w) * (scale or 1)\n"
        + CHAIN.replace("layer(x, w[i])", "layer(x, w[i], 'sine', scale=2)"),
        "layer",
        "x = recomputed(layer)(x, w[i], 'sine', scale=2)",
    ),
    "one that is decorated": (
        "@jax.jit" + LAYER + CHAIN,
        "layer",
        "x = jax.checkpoint(layer)(x, w[i])",
    ),
    "one in a decorator of the cells": (
        "def doubled(f):\n    @functools.wraps(f)\n    def run(*args):\n        return 2 * f(*args)\n    return run\n"
        "@doubled" + LAYER + CHAIN,
        "^layer$",
        "return 2 * jax.checkpoint(f)(*args)",
    ),
    "one inside of another": (
        "def loss_of(w, x):\n    def layer(x, w):\n        return jnp.sin(x @ w)\n"
        "    for i in range(LAYERS):\n        x = layer(x, w[i])\n    return x.sum()\n",
        "layer",
        "x = jax.checkpoint(layer)(x, w[i])",
    ),
    "one called on two lines": (
        LAYER + "def loss_of(w, x):\n    for i in range(0, LAYERS, 2):\n        x = layer(x, w[i])\n"
        "        x = x + layer(x, w[i + 1])\n    return x.sum()\n",
        "layer",
        "x = x + jax.checkpoint(layer)(x, w[i + 1])",
    ),
    "one that is mapped": (
        LAYER + CHAIN.replace("layer(x, w[i])", "jax.vmap(layer, (0, None))(x, w[i])"),
        "layer",
        "x = jax.checkpoint(jax.vmap(layer, (0, None)))(x, w[i])",
    ),
    "a method": (
        "class Layer:\n    def __init__(self, w):\n        self.w = w\n"
        "    def apply(self, x):\n        return jnp.sin(x @ self.w)\n"
        + CHAIN.replace("layer(x, w[i])", "Layer(w[i]).apply(x)"),
        "Layer.apply",
        "x = recomputed(Layer(w[i]).apply)(x)",
    ),
    "an object": (
        "class Layer:\n    def __init__(self, w):\n        self.w = w\n"
        "    def __call__(self, x):\n        return jnp.sin(x @ self.w)\n"
        + CHAIN.replace("layer(x, w[i])", "Layer(w[i])(x)"),
        "Layer",
        "x = recomputed(Layer(w[i]))(x)",
    ),
    "the outermost of two that match": (
        "def sublayer(x, w):\n    return jnp.sin(x @ w)\ndef layer(x, w):\n    return sublayer(x, w)\n" + CHAIN,
        "layer",
        "x = jax.checkpoint(layer)(x, w[i])",
    ),
    "a method on a line of its own": (
        "class Layer:\n    def __init__(self, w):\n        self.w = w\n"
        "    def apply(self, x):\n        return jnp.sin(x @ self.w)\n"
        + CHAIN.replace("layer(x, w[i])", "(\n            Layer(w[i])\n            .apply(x)\n        )"),
        "apply",
        "recomputed(Layer(w[i]).apply)(x)",
    ),
}


@pytest.mark.ci
@pytest.mark.parametrize("case", rows(CALLS, 2))
def test_a_call_that_the_expression_means_is_checkpointed_where_it_stands(notebook, case):
    """Each of the layers has one matmul to do again."""
    model, how, line = CALLS[case]
    text, found, without = compared(notebook, how, model)
    assert line in text.replace('"', "'") and "Without --" not in text
    assert found.products == without.products + LAYERS


@pytest.mark.ci
def test_a_call_inside_of_a_loop_and_a_function_that_is_scanned_over(notebook):
    text, found, without = compared(notebook, "layer", LAYER + LOOPED)
    assert "lambda x, w: (jax.checkpoint(layer)(x, w), None)" in text
    assert found.products == without.products + LAYERS
    trip = "def trip(x, w):\n    return jnp.sin(x @ w), None\n"
    model = trip + "def loss_of(w, x):\n    return lax.scan(trip, x, w)[0].sum()\n"
    text, found, without = compared(notebook, "trip", model)
    assert "lax.scan(jax.checkpoint(trip), x, w)" in text and "Without --" not in text
    assert found.products == without.products + LAYERS


def test_jax_goes_by_the_name_that_the_cells_give_it(notebook):
    model = "import jax as j\n" + LAYER + CHAIN
    step = STEP.replace("jax.", "j.")
    text = written(notebook, "dp --remat layer", model.replace("import jax,", "import"), step=step).text
    assert ".checkpoint(layer)(x, w[i])" in text and "Without --" not in text


LEFT_OUT = {  # a model; how it is named
    "a scope": (
        "def layer(x, w):\n    with jax.named_scope('mixing'):\n        return jnp.sin(x @ w)\n" + CHAIN,
        "mixing",
    ),
    "one of two that go through the same call": (
        "def sine(x, w):\n    return jnp.sin(x @ w)\ndef cosine(x, w):\n    return jnp.cos(x @ w)\n"
        "def loss_of(w, x):\n    for f in (sine, cosine):\n        x = f(x, w[0])\n    return x.sum()\n",
        "cosine",
    ),
}


@pytest.mark.ci
@pytest.mark.parametrize("case", rows(LEFT_OUT, 1))
def test_what_no_call_of_the_text_is_alone_is_told_to_be_left_out(notebook, case):
    model, how = LEFT_OUT[case]
    text, found, without = compared(notebook, how, model)
    assert f"Without --remat {how}: " in text and "checkpoint" not in text.partition('"""')[2].replace(
        "checkpoint_name", ""
    ).replace("ad_checkpoint", "")
    assert found == without


FORGETTING = "@recomputing(['hidden'], ['dot_general'])"
VALUES = {  # a model; what the program has then
    "several statements": (
        "def layer(x, w):\n"
        "    h = checkpoint_name(x @ w, 'hidden')\n"
        "    # at the same width\n"
        "    x = jnp.sin(h) * h\n"
        "    return x @ w\n" + CHAIN,
        f"    {FORGETTING}\n    def segment(x):\n        h = checkpoint_name(x @ w, 'hidden')\n"
        "        # at the same width\n        x = jnp.sin(h) * h\n        return x\n\n    x = segment(x)\n"
        "    return x @ w\n",
    ),
    "up to a return": (
        "def layer(x, w):\n    h = x @ w\n    h = checkpoint_name(h, 'hidden')\n    return jnp.sin(h) * h\n" + CHAIN,
        f"    {FORGETTING}\n    def segment():\n        h = x @ w\n        h = checkpoint_name(h, 'hidden')\n"
        "        return jnp.sin(h) * h\n\n    return segment()\n",
    ),
    "one statement in a loop": (
        "def loss_of(w, x):\n    for i in range(LAYERS):\n"
        "        x = (lambda h: jnp.sin(h) * h)(checkpoint_name(x @ w[i], 'hidden'))\n    return x.sum()\n",
        "def segment(x):\n            x = (lambda h: jnp.sin(h) * h)(checkpoint_name(x @ w[i], 'hidden'))\n"
        "            return x\n",
    ),
}


@pytest.mark.ci
@pytest.mark.parametrize("case", rows(VALUES, 1))
def test_statements_around_a_named_value_become_a_recomputed_function(notebook, case):
    model, after = VALUES[case]
    text, found, without = compared(notebook, "hidden", model)
    assert after.replace("'", '"') in text.replace("'", '"') and "Without --" not in text
    assert found.products == without.products + LAYERS


@pytest.mark.ci
def test_statements_with_more_matmuls_than_that_of_the_value_are_left_as_they_are(notebook):
    """The statement that makes the value has another matmul, whose result is needed as well."""
    model = (
        "def bent(h):\n    return jnp.sin(h) * h\n"
        "def layer(x, w):\n    return bent(checkpoint_name(bent(x @ w) @ w, 'hidden'))\n" + CHAIN
    )
    text, found, without = compared(notebook, "hidden", model)
    assert "Without --remat hidden: " in text and found == without


NNX = """
from flax import nnx

class Layer(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def mixed(self, x):
        return jnp.sin(self.dense(x))

    def __call__(self, x):
        return self.dropout(self.mixed(x))

class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(4)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""
NNX_STEP = """
def train_step(model, x):
    loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
    nnx.update(model, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(model, nnx.Param), grads))
    return None, loss
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("Layer$", "x = recomputed_method(layer, nnx.remat)(x)"),
        ("mixed", "return self.dropout(recomputed_method(self.mixed, nnx.remat)(x))"),
        ("1", "nnx.value_and_grad(nnx.remat(lambda m: (m(x) ** 2).mean()))(model)"),
    ],
)
def test_objects_of_nnx_are_done_again_by_its_own_remat(notebook, how, line):
    given = GIVEN + "model = Model(nnx.Rngs(0))\n"
    step = NNX_STEP + "\n_, loss = train_step(model, x)\n"
    notebook.run("%mesh data=2;")
    notebook.run(MODEL + NNX)
    notebook.run(given)
    notebook.run(f"%%shard dp --remat {how};\n{step}")
    wanted = float(notebook.shell.user_ns["loss"])
    text = notebook.run("%shard code").text
    assert line in text and "Without --" not in text
    assert float(printed(text + "print(float(loss))")) == pytest.approx(wanted, rel=1e-5)
