"""A step that is not jitted reads Python values in each call; what it does to them is done, or refused with a line."""

import dataclasses
import itertools
import random
import re
import sys
import types
from collections import Counter, deque

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.cells import made
from support.refusals import refusal
from support.stand_in import same, shard

X = np.arange(12, dtype="f").reshape(4, 3) / 10
W = jnp.ones((3, 2))
HEAD = "l, g = grad(w, x)\n"


def grad(w, x):
    return jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)


def step_of(body: str, parameters: str = "w, x", before: str = "", /, **names):
    """A step of the notebook's, with its globals: `body` is what it does."""
    lines = "\n    ".join(body.splitlines())
    return made(f"{before}\ndef step({parameters}):\n    {lines}\n", grad=grad, jax=jax, jnp=jnp, np=np, **names)


def moved(by: str, before: str = "", /, **names):
    return step_of(HEAD + f"return w - ({by}) * g", "w, x", before, **names)


class Rate:
    base = 0.1

    def __init__(self):
        self.factor = 1.0

    @property
    def rate(self):
        return self.base * self.factor

    def step(self, w, x):
        return w - self.rate * grad(w, x)[1]


class Slotted:
    __slots__ = ("__weakref__", "rate")

    def __init__(self):
        self.rate = 0.1

    def __call__(self, w, x):
        return w - self.rate * grad(w, x)[1]


class Dotted:
    """As configurations of several libraries are."""

    def __init__(self, **values):
        self.__dict__["held"] = values

    def __getattr__(self, name):
        try:
            return self.__dict__["held"][name]
        except KeyError:
            raise AttributeError(name) from None


@dataclasses.dataclass(slots=True)
class Config:
    rate: float = 0.1


def number():
    names = moved("rate", rate=0.1)
    return names["step"], [lambda v=v: names.update(rate=v) for v in (0.1, 0.5, 0.25, 0.5)]


def behind_a_function():
    names = moved("rate_of()", "def rate_of(): return RATE", RATE=0.1)
    return names["step"], [lambda v=v: names.update(RATE=v) for v in (0.5, 0.25)]


def dict_in_a_dict():
    config = {"optimizer": {"rate": 0.1}}
    names = moved("config['optimizer']['rate']", config=config)
    changes = [lambda v=v: config["optimizer"].update(rate=v) for v in (0.5, 0.25)]
    return names["step"], [*changes, lambda: config.update(optimizer={"rate": 1.0})]


def elements_of_a_list():
    rates = [0.1, 0.2]
    names = moved("sum(rates)", rates=rates)
    return names["step"], [lambda: rates.append(0.5), lambda: rates.__setitem__(0, 0.3), rates.clear]


def variable_of_a_closure():
    rate = 0.1

    def step(w, x):
        return w - rate * grad(w, x)[1]

    def change(v):
        nonlocal rate
        rate = v

    return step, [lambda v=v: change(v) for v in (0.5, 0.25)]


def attributes_of_its_object():
    of = Rate()
    changes = [lambda: setattr(of, "factor", 3.0), lambda: setattr(of, "base", 0.5)]
    return of.step, [*changes, lambda: setattr(of, "factor", 1.5)]


def slots_of_a_called_object():
    of = Slotted()
    return of, [lambda v=v: setattr(of, "rate", v) for v in (0.5, 0.25)]


def default_of_a_parameter():
    config = {"rate": 0.1}
    names = step_of(HEAD + "return w - config['rate'] * g", "w, x, config=config", config=config)
    return names["step"], [lambda v=v: config.update(rate=v) for v in (0.5, 0.25)]


def whole_record():
    config = Config()
    names = moved("asdict(config)['rate']", config=config, asdict=dataclasses.asdict)
    return names["step"], [lambda v=v: setattr(config, "rate", v) for v in (0.5, 0.25)]


def behind_getattr():
    config = Dotted(rate=0.1)
    return moved("config.rate", config=config)["step"], [lambda: config.held.update(rate=0.5)]


def attribute_of_an_alias():
    config = types.SimpleNamespace(optimizer=types.SimpleNamespace(rate=0.1))
    names = step_of("o = config.optimizer\n" + HEAD + "return w - o.rate * g", config=config)
    return names["step"], [lambda: setattr(config.optimizer, "rate", 0.5)]


def module_that_it_imports():
    sys.modules["settings_of_a_step"] = module = types.ModuleType("settings_of_a_step")
    module.RATE = 0.1
    names = step_of("import settings_of_a_step as s\n" + HEAD + "return w - s.RATE * g")
    return names["step"], [lambda: setattr(module, "RATE", 0.5)]


def helper_that_is_defined_again():
    names = moved("rate_of()", "def rate_of(): return 0.1")
    return names["step"], [lambda: exec("def rate_of(): return 0.5", names)]


def branch():
    names = moved("0.1 if warm else 0.5", warm=True)
    return names["step"], [lambda v=v: names.update(warm=v) for v in (False, True)]


def set_that_it_asks():
    on = {"double"}
    return moved("0.2 if 'double' in on else 0.1", on=on)["step"], [on.clear, lambda: on.add("double")]


def numpy_array_changed_in_place():
    rates = np.array([0.1, 0.2], "f")
    return moved("rates.sum()", rates=rates)["step"], [lambda: rates.__setitem__(0, 0.5)]


def schedule_of_an_optimizer():
    names = made("def schedule(count): return RATE", RATE=0.1)
    optimizer = optax.sgd(names["schedule"])
    state = optimizer.init(W)

    def step(w, x):
        return optax.apply_updates(w, optimizer.update(grad(w, x)[1], state)[0])

    return step, [lambda: names.update(RATE=0.5)]


@pytest.mark.parametrize(
    "case",
    [
        number,
        behind_a_function,
        dict_in_a_dict,
        elements_of_a_list,
        variable_of_a_closure,
        attributes_of_its_object,
        slots_of_a_called_object,
        default_of_a_parameter,
        whole_record,
        behind_getattr,
        attribute_of_an_alias,
        module_that_it_imports,
        helper_that_is_defined_again,
        branch,
        set_that_it_asks,
        numpy_array_changed_in_place,
        schedule_of_an_optimizer,
    ],
)
def test_what_a_step_reads_is_what_python_reads(case):
    plain, changes = case()
    step = shard(plain)
    same(step(W, X), plain(W, X))
    for change in changes:
        change()
        same(step(W, X), plain(W, X))
        same(step(W, X), plain(W, X))


def test_numbers_and_arrays_that_change_become_inputs_of_one_program():
    names = step_of("l, g = grad(w, x)\nreturn w - rate * g", "w", rate=0.1, x=jnp.asarray(X))
    step = shard(names["step"])
    for i in range(8):
        names.update(rate=0.1 / (i + 1), x=jnp.asarray(X) + i)
        same(step(W), names["step"](W))
    assert len(step.programs.entries) == 2
    assert {"rate", "x"} <= {leaf.path for leaf in step.report().leaves}
    assert names["rate"] == 0.1 / 8  # it has its own value again after each trace


def test_of_values_that_decide_branches_the_newest_programs_are_kept():
    names = moved("0.1 if i % 2 else 0.5", i=0)
    step = shard(names["step"])
    for i in range(20):
        names["i"] = i
        same(step(W, X), names["step"](W, X))
    assert len(step.programs.entries) == 16 and step.calls == 20


def test_a_recompile_in_a_loop_names_what_had_changed():
    names = moved("0.1 if warm else 0.5", warm=True)
    step = shard(names["step"])
    for names["warm"] in (True, True, False):
        step(W, X)
    assert step.programs.recompilations[-1].changes == ("warm, which the step reads, is another value",)


def test_objects_in_a_model_that_is_an_argument_are_read_in_each_call():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.config, self.linear = types.SimpleNamespace(scale=1.0), nnx.Linear(3, 2, rngs=rngs)

        def __call__(self, x):
            return self.config.scale * self.linear(x)

    def step(model, x):
        return nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)[0]

    model, sharded = Model(nnx.Rngs(0)), shard(step)
    for scale in (1.0, 2.0, 3.0):
        model.config.scale = scale
        same(sharded(model, X), step(model, X))


def test_a_model_that_the_notebook_changes_is_read_in_each_call():
    teacher = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def step(w, x):
        return w - jax.grad(lambda w: jnp.mean((x @ w - teacher(x)) ** 2))(w)

    sharded = shard(step)
    for _ in range(3):
        same(sharded(W, X), step(W, X))
        teacher.kernel[...] = teacher.kernel[...] * 2


@pytest.mark.parametrize("jit", [jax.jit, eqx.filter_jit])
def test_a_jitted_step_reads_once_as_jax_has_it(jit):
    names = moved("rate", rate=0.1)
    step, plain = shard(jit(names["step"])), jit(names["step"])
    first = plain(W, X)
    for names["rate"] in (0.1, 0.5):
        same(step(W, X), first)
        same(plain(W, X), first)


def test_a_jitted_function_of_a_step_reads_once_as_jax_has_it():
    names = step_of(
        "return inner(w, x)", "w, x", "@jax.jit\ndef inner(w, x): return w - rate * grad(w, x)[1]", rate=0.1
    )
    step = shard(names["step"])
    for names["rate"] in (0.1, 0.5):
        same(step(W, X), names["step"](W, X))
    assert len(step.programs.entries) == 1


class Trainer:
    def __init__(self):
        self.losses, self.count = [], 0

    def keeps(self, w, x):
        loss, g = grad(w, x)
        self.losses.append(loss)
        return w - g

    def counts(self, w, x):
        self.count += 1
        return w - self.count * grad(w, x)[1]

    def sets(self, w, x):
        self.loss, g = grad(w, x)
        return w - g


class Loader:
    def __init__(self):
        self.at = 0

    def next_batch(self):
        self.at += 1
        return X + self.at


def constants():
    calls = []
    return step_of("calls.append(1)\n" + HEAD + "return w - g", calls=calls)["step"], (), lambda: list(calls)


def counter():
    seen = Counter()
    return step_of("seen['calls'] += 1\n" + HEAD + "return w - g", seen=seen)["step"], (), lambda: dict(seen)


def queue():
    last = deque([1], maxlen=3)
    return step_of("last.append(2)\n" + HEAD + "return w - g", last=last)["step"], (), lambda: list(last)


def global_number():
    names = step_of("global n\nn += 1\n" + HEAD + "return w - n * g", n=0)
    return names["step"], (), lambda: names["n"]


def global_array():
    names = step_of("global held\nheld, g = grad(w, x)\nreturn w - g", held=None)
    return names["step"], (), lambda: names["held"]


def closure_number():
    n = 0

    def step(w, x):
        nonlocal n
        n += 1
        return w - n * grad(w, x)[1]

    return step, (), lambda: n


def method(name):
    def case():
        of = Trainer()
        return getattr(of, name), (), lambda: dict(vars(of), losses=list(of.losses))

    case.__name__ = name
    return case


def loader():
    of = Loader()
    names = step_of("x = of.next_batch()\n" + HEAD + "return w - g", "w, of")
    return names["step"], (W, of), lambda: of.at


def iterator():
    batches = iter([X, X])
    names = step_of("x = next(batches)\n" + HEAD + "return w - g", "w", batches=batches)
    return names["step"], (W,), batches.__length_hint__


def iterator_argument():
    batches = iter([X, X])
    return (
        step_of("x = next(it)\n" + HEAD + "return w - g", "w, it")["step"],
        (W, batches),
        batches.__length_hint__,
    )


def count():
    seeds = itertools.count()
    return moved("next(seeds)", seeds=seeds)["step"], (), lambda: repr(seeds)


def numpy_random():
    return moved("np.random.rand()")["step"], (), lambda: repr(np.random.get_state())


def python_random():
    return moved("random.random()", random=random)["step"], (), random.getstate


def generator():
    rng = np.random.default_rng(0)
    return moved("rng.normal()", rng=rng)["step"], (), lambda: repr(rng.bit_generator.state)


def generator_argument():
    rng = np.random.default_rng(0)
    names = step_of(HEAD + "return w - rng.normal() * g", "w, x, rng")
    return names["step"], (W, X, rng), lambda: repr(rng.bit_generator.state)


def formatted():
    return step_of(HEAD + "print(f'{l:.3f}')\nreturn w - g")["step"], (), lambda: None


def element_of_an_array():
    x = X.copy()
    return step_of("x[0] = 0\n" + HEAD + "return w - g")["step"], (W, x), x.tobytes


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (constants, r"^step changes calls each time that it is called \(.*line 3\), .*: change it outside"),
        (counter, "^step changes seen each time"),
        (queue, "^step changes last each time"),
        (global_number, "^step changes n each time"),
        (
            global_array,
            r"^step keeps an array in held \(.*\), which a compiled step can't: return it from the step",
        ),
        (closure_number, "^step changes n each time"),
        (method("keeps"), "^keeps keeps an array in self.losses"),
        (method("counts"), "^counts changes self.count each time"),
        (method("sets"), "^sets keeps an array in self.loss"),
        (loader, "^step changes (self|of).at each time"),
        (
            iterator,
            r"^step takes from the iterator batches \(.*\), .* Take it outside, batch = next\(batches\)",
        ),
        (iterator_argument, "^step: it is a list_iterator, .*batch = next"),
        (count, "^step takes from the iterator seeds"),
        (numpy_random, "^step draws random numbers from np.random"),
        (python_random, "^step draws random numbers from random"),
        (generator, "^step draws random numbers from rng"),
        (generator_argument, "^step: rng is a Generator, .*draw outside"),
        (formatted, "writes the value of an array as text; use jax.debug.print"),
        (element_of_an_array, r"changes elements of an array in place; use x = x.at\[i\].set"),
    ],
)
def test_what_each_call_does_to_python_is_refused_and_undone(case, said, capsys):
    step, arguments, state = case()
    before = state()
    message = refusal(shard(step), *(arguments or (W, X)))
    assert re.search(said, message), message
    assert state() == before


def test_a_table_that_a_step_fills_once_is_filled():
    names = step_of("if 'n' not in table: table['n'] = x.shape[0]\n" + HEAD + "return w - g / table['n']", table={})
    step = shard(names["step"])
    for _ in range(3):
        same(step(W, X), names["step"](W, X))
    assert names["table"] == {"n": 4} and len(step.programs.entries) <= 2


def test_what_runs_when_a_step_is_traced_alone_is_told():
    import time

    step = shard(step_of("t = time.time()\nprint('step')\n" + HEAD + "return w - g", time=time)["step"])
    step(W, X)
    said = [advice.message for advice in step.report().advice if advice.code == "runs-once"]
    assert len(said) == 1 and "prints (" in said[0] and "reads the clock (" in said[0]


def in_place(state, x):
    loss, g = grad(state["w"], x)
    state["w"] = state["w"] - 0.1 * g
    state["count"] += 1
    state["last"], state["inner"]["m"] = loss, state["inner"]["m"] + g
    state["history"][0], _ = g, state.pop("note", None)
    return loss


def test_dicts_and_lists_that_a_step_changes_in_place_are_changed():
    def state():
        return {"w": W, "count": 0, "inner": {"m": W * 0}, "history": [W, W], "note": None}

    mine, plain, step = state(), state(), shard(in_place)
    inner, history = mine["inner"], mine["history"]
    for _ in range(4):
        same(step(mine, X), in_place(plain, X))
        same(mine, plain)
    assert mine["inner"] is inner and mine["history"] is history
    pairs = step.entry.plan.state_pairs
    assert len(pairs) >= 3  # what is written back is the next value of what it takes the place of


def test_an_object_of_another_kind_that_a_step_changes_is_refused():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class State:
        w: jax.Array

    def step(state, x):
        state.w = state.w - grad(state.w, x)[1]
        return state.w.sum()

    message = refusal(shard(step), State(W), X)
    assert message.startswith("step changes state.w in place") and "return the new one" in message


def test_one_dict_given_twice_is_refused_where_it_is_changed():
    def step(one, other, x):
        one["w"] = one["w"] - grad(other["w"], x)[1]
        return one["w"].sum()

    state = {"w": W}
    message = refusal(shard(step), state, state, X)
    assert message.startswith("step changes a dict in place that it is given twice")
