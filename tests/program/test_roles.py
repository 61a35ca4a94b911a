"""What every argument of a step is, and where its batch lies, found from the traced program of every zoo step."""

import pytest
import zoo
from support.thinned import thinned

from jaxshard_magic.program.batching.batch import find_batch
from jaxshard_magic.program.dimensions import Dimensions
from jaxshard_magic.program.flatten_call import flatten_call
from jaxshard_magic.program.flow import Flow
from jaxshard_magic.program.ir import Program
from jaxshard_magic.program.roles import find_roles
from jaxshard_magic.program.trace import path_name, trace
from jaxshard_magic.program.unwrap import unwrap_step

GUESSED = {  # every token by itself: to divide sentences or their positions sends as much
    "masked_loss_dataclass",
    *("mixture_of_experts", "experts_in_turn", "experts_scanned", "experts_mapped"),
}


NOT_FOUND = {  # what is known to be missed: a step that is understood leaves this list
    "linen_ppo_epochs",  # minibatches of a permutation, in a scan of epochs
    "padded_graphs",  # edges for each graph, beside those of all
}


def traced(call):
    peeled = flatten_call(unwrap_step(call.fn), call.args, call.kwargs)
    return trace(lambda *xs: peeled.flat_function(*xs)[:2], peeled.leaves, [path for path, _, _ in peeled.inputs])


@pytest.fixture(
    scope="module",
    params=[
        *thinned(zoo.TRACED, [n for n in zoo.OFTEN[1::6] if n in zoo.TRACED]),
    ],
)
def found(request):
    step = zoo.STEPS[request.param]
    t = traced(step.make())
    program = Program(t.closed)
    flow = Flow(program)
    roles = find_roles(t, flow)
    batch = find_batch(Dimensions(program, (4, 2)), roles)
    used = flow.ancestors(program.outputs)
    names = {i: path_name(p) for i, p in enumerate(t.in_paths) if program.inputs[i] in used}
    return (
        step,
        {i: n for i, n in names.items() if not n.startswith("closure.") or n in step.expected_batch},
        roles,
        batch,
    )


def test_every_argument_has_the_role_a_person_would_name(found):
    step, names, roles, _ = found
    described = {i: n for i, n in names.items() if not n.startswith("closure.")}
    wrong = {n: roles.by_input[i] for i, n in described.items() if step.role_of(n) not in (None, roles.by_input[i])}
    assert wrong == {}


def test_the_batch_lies_where_a_person_would_say(found):
    step, names, _, batch = found
    said = {n: d for n, d in step.expected_batch.items() if n in names.values()}
    got = {n: (batch.input_dims.get(i) or (None,))[0] for i, n in names.items() if n in said}
    assert (got == said) == (step.name not in NOT_FOUND)


def test_a_guess_is_called_one(found):
    step, *_, batch = found
    assert batch.unambiguous == (step.name not in GUESSED)
