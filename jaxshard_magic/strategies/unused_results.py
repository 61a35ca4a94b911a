"""Findings for steps with lost results: nothing is returned, or nothing made of the gradients."""

from collections.abc import Iterator

from ..plan import Finding
from ..program.facts import Facts
from ..program.flow import Flow, follow_aliases
from ..program.roles import PARAMS
from ..program.source_lines import user_line
from ..program.trace import Traced, path_name


def returns_nothing(flow: Flow) -> bool:
    """Return whether all outputs of a step are unchanged inputs and the step has no effect such as printing or a
    callback."""
    hops = (e for v in flow.ancestors(flow.program.outputs, follow_aliases) for _, e in flow.predecessors[v])
    computed = any(e is not None and not e.primitive.alias for e in hops)
    # JAX runs equations with effects even if nothing reads their results.
    return not computed and not any(e.jaxpr_eqn.effects for e in flow.program.equations)


def returns_nothing_message(traced: Traced, flow: Flow) -> str:
    """Return the message for a step that returns nothing it computes."""
    what = f"the loss and {_gradient_text(traced, flow)} are" if flow.gradients else "what it computes is"
    return (
        f"The step returns nothing that it computes, so that JAX leaves all of it out: {what} lost. Let it return what "
        "it makes, as in 'return new_params, loss'."
    )


def result_findings(facts: Facts) -> Iterator[Finding]:
    """Warn of a step that computes nothing it returns, and of gradients without a use."""
    flow, roles = facts.flow, facts.roles
    if returns_nothing(flow):
        yield Finding("returns-nothing", "warning", returns_nothing_message(facts.traced, flow))
    elif flow.gradients and flow.gradients.isdisjoint(flow.live_values):
        changes = ", and no parameter changes" if PARAMS in roles.by_input else ""
        message = (
            f"The step returns nothing that is made of {_gradient_text(facts.traced, flow)}: JAX leaves "
            f"that out{changes}. "
            "Let it return the new parameters, too."
        )
        yield Finding("gradients-unused", "warning", message)


def _gradient_text(traced: Traced, flow: Flow) -> str:
    """Return the gradient as text, such as `the gradient of params.w and 5 more (cell [3], line 4)`."""
    marked = flow.differentiation_marks
    inputs = sorted(flow.input_ancestors((v for e in marked for v in e.operands), follow_aliases))
    names = [path_name(traced.in_paths[i]) for i in inputs]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    of = f" of {names[0]}{more}" if names else ""
    line = next((line for e in marked if (line := user_line(e.jaxpr_eqn)) is not None), None)
    return f"the gradient{of}" + ("" if line is None else f" ({line})")
