"""A step that returns nothing of what it computes is told so, with what is lost, and not blamed for its batch."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from support.refusals import refusal

import jaxshard_magic

W, X, Y = jnp.ones((16, 24)), jnp.ones((64, 16)), jnp.ones((64, 24))


def gradient(w, x, y):
    return jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)


def forgets_all(w, x, y):
    _, grads = gradient(w, x, y)
    w = w - grads


def gives_its_parameters_back(w, x, y):
    gradient(w, x, y)
    return w


def forgets_the_parameters(w, x, y):
    loss, grads = gradient(w, x, y)
    w = w - grads
    return loss


def prints(w, x, y):
    loss, _ = gradient(w, x, y)
    jax.debug.callback(lambda loss: None, loss)


def has_no_gradient(w, x, y):
    jnp.mean((x @ w - y) ** 2)


def trains(w, x, y):
    loss, grads = gradient(w, x, y)
    return w - grads, loss


def evaluates(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def said_of(step, strategy="dp", args=(W, X, Y)):
    sharded = jaxshard_magic.shard(step, strategy, mesh="data=8")
    sharded(*args)
    codes = ("returns-nothing", "gradients-unused", "no-batch")
    return {a.code: a.message for a in sharded.report().advice if a.code in codes}


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (forgets_all, "The step returns nothing that it computes"),
        (gives_its_parameters_back, "The step returns nothing that it computes"),
        (has_no_gradient, "The step returns nothing that it computes"),
        (forgets_the_parameters, "The step returns nothing that is made of the gradient of w"),
        (prints, "The step returns nothing that is made of the gradient of w"),
    ],
)
def test_what_is_lost_of_a_step_is_told_alone(step, says):
    for strategy in ("dp", "fsdp"):
        (message,) = said_of(step, strategy).values()
        assert message.startswith(says)
        assert ("the loss and the gradient of w" in message) == (step in (forgets_all, gives_its_parameters_back))
    line = gradient.__code__.co_firstlineno + 1
    if step is not has_no_gradient:
        assert f"test_lost_results.py, line {line})" in message


def test_a_model_that_is_not_updated_is_told():
    model = nnx.Linear(16, 24, rngs=nnx.Rngs(0))

    @nnx.jit
    def step(model, x, y):
        nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)

    (message,) = said_of(step, args=(model, X, Y)).values()
    assert message.startswith("The step returns nothing that it computes")
    assert "the gradient of model.bias and 1 more" in message


def test_a_step_that_returns_what_it_makes_is_told_nothing():
    assert said_of(trains) == said_of(evaluates) == {}


@pytest.mark.parametrize(("strategy", "mesh"), [("pmap", "data=8"), ("sp", "seq=2"), ("ep", "expert=2")])
def test_where_nothing_shows_what_to_divide_the_step_is_refused_for_what_it_lacks(strategy, mesh):
    step = jaxshard_magic.shard(forgets_all, strategy, mesh=mesh)
    assert refusal(step, W, X, Y).startswith("The step returns nothing that it computes")
