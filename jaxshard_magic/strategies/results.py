"""What is said of a step whose results are lost: it returns nothing, or nothing that is made of its gradients."""

from collections.abc import Iterator

from ..plan import Finding
from ..program.facts import Facts
from ..program.flow import Flow, by_alias
from ..program.lines import users_line
from ..program.roles import PARAMS
from ..program.trace import Traced, path_name


def returns_nothing(flow: Flow) -> bool:
    """Return whether all outputs of a step are its inputs as they came, and it is run for nothing else: it prints
    nothing, and calls nothing back."""
    hops = (e for v in flow.back(flow.program.outputs, by_alias) for _, e in flow.before[v])
    computed = any(e is not None and not e.primitive.alias for e in hops)
    return not computed and not any(e.eqn.effects for e in flow.program.equations)


def nothing_returned(traced: Traced, flow: Flow) -> str:
    """The line about such a step."""
    what = f"the loss and {_gradient(traced, flow)} are" if flow.gradients else "what it computes is"
    return (
        f"The step returns nothing that it computes, so that JAX leaves all of it out: {what} lost. Let it return what "
        "it makes, as in 'return new_params, loss'."
    )


def about_results(facts: Facts) -> Iterator[Finding]:
    """Warn of a step that is run for nothing, and of gradients that nothing is made of."""
    flow, roles = facts.flow, facts.roles
    if returns_nothing(flow):
        yield Finding("returns-nothing", "warning", nothing_returned(facts.traced, flow))
    elif flow.gradients and flow.gradients.isdisjoint(flow.used):
        changes = ", and no parameter changes" if PARAMS in roles.of else ""
        message = (
            f"The step returns nothing that is made of {_gradient(facts.traced, flow)}: JAX leaves that out{changes}. "
            "Let it return the new parameters, too."
        )
        yield Finding("gradients-unused", "warning", message)


def _gradient(traced: Traced, flow: Flow) -> str:
    """`the gradient of params.w and 5 more (cell [3], line 4)`."""
    marked = flow.differentiated
    inputs = sorted(flow.inputs_behind((v for e in marked for v in e.ins), by_alias))
    names = [path_name(traced.in_paths[i]) for i in inputs]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    of = f" of {names[0]}{more}" if names else ""
    line = next((line for e in marked if (line := users_line(e.eqn)) is not None), None)
    return f"the gradient{of}" + ("" if line is None else f" ({line})")
