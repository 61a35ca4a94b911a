"""The search for a strategy: it finds the best that fits, with few compiles, and says what ruled the others out."""

from dataclasses import replace
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest
import zoo

import jaxshard_magic
from jaxshard_magic import hardware
from jaxshard_magic.analysis import program_reading
from jaxshard_magic.analysis.mesh_info import mesh_info
from jaxshard_magic.config.strategies import EXPERT_STRATEGIES, SEARCHED_STRATEGIES
from jaxshard_magic.errors import ShardError
from jaxshard_magic.report.choice import BOUND, ESTIMATE, LEFT, REFUSED, SLOWER, TOO_LARGE, Choice
from jaxshard_magic.search import (
    Hardware,
    Requests,
    StrategySearch,
    TrialOptions,
    strategy_search,
    strategy_space,
)
from jaxshard_magic.search.nodes import SearchNode, simplest_first

WIDTH, LAYERS = 256, 6


def step(params, batch):
    def loss(params):
        x = batch
        for w in params:
            x = x + jax.nn.gelu(x @ w)
        return jnp.square(x).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], value


def shapes(examples: int = 64, width: int = WIDTH) -> tuple:
    weight = jax.ShapeDtypeStruct((width, width), jnp.float32)
    return [weight] * LAYERS, jax.ShapeDtypeStruct((examples, width), jnp.float32)


def chosen(*args, **options) -> Choice:
    return jaxshard_magic.choose(step, args or shapes(), **{"mesh": "cpu:8 data=8", "budget": None, **options})


def outcomes(found: Choice) -> dict[str, str]:
    return {c.line: c.outcome for c in found.candidates}


@pytest.fixture
def memory(monkeypatch):
    """Makes a TPU v5e of so many bytes."""

    def of(size: int) -> None:
        small = replace(hardware.chip("v5e"), hbm=size, usable=size)
        names = {word: small if c.key == "v5e" else c for word, c in hardware._by_word().items()}
        monkeypatch.setattr(hardware, "_by_word", lambda: names)

    return of


@pytest.mark.ci
def test_the_choice_is_the_fastest_of_all_and_most_are_never_compiled():
    found = chosen()
    every = jaxshard_magic.compare(step, SEARCHED_STRATEGIES, shapes(), mesh="cpu:8 data=8", meshes="all", run=False)
    compiled = {t.line for t in found.comparison.trials if t.report is not None}
    assert every.fastest is not None and found.chosen is not None
    assert found.chosen.line == every.fastest.line
    assert 3 * len(compiled) <= sum(t.report is not None for t in every.trials)
    for candidate in found.candidates:
        if candidate.outcome == BOUND:
            trial = every[candidate.line]
            assert candidate.line not in compiled
            assert trial.predicted is not None and candidate.bound is not None
            assert candidate.bound <= 1.0001 * trial.predicted  # it can't be faster than that


@pytest.mark.ci
def test_what_a_plan_takes_at_least_is_never_more_than_the_compiled_step_takes():
    plans = {c.line: c.bound for c in chosen(plan_only=True).candidates}
    every = jaxshard_magic.compare(step, SEARCHED_STRATEGIES, shapes(), mesh="cpu:8 data=8", meshes="all", run=False)
    known = 0
    for trial in every.trials:
        bound = plans[trial.line]
        if trial.predicted is not None and bound is not None:
            known += 1
            assert bound <= 1.0001 * trial.predicted, trial.line
    assert known > 10


@pytest.mark.ci
def test_what_does_not_fit_is_tried_with_microbatches_and_remat(memory):
    args = shapes(2**15, 64)  # activations take nearly all
    whole = chosen(*args, among="dp")
    assert whole.trial is not None and whole.trial.peak is not None
    memory(int(0.6 * whole.trial.peak))
    found = chosen(*args, among="dp")
    assert found.chosen is not None and found.trial is not None
    assert found.trial.fits is True
    assert {"microbatches", "remat"} & found.chosen.options.keys()
    assert outcomes(found)['dp --mesh "data=8"'] in (TOO_LARGE, ESTIMATE)


@pytest.mark.ci
def test_remat_is_not_tried_for_a_step_that_recomputes_its_layers_itself(memory):
    def again(params, batch):
        def loss(params):
            x = batch
            for w in params:
                x = jax.checkpoint(lambda x, w: x + jax.nn.gelu(x @ w))(x, w)
            return jnp.square(x).mean()

        return [w - 0.1 * g for w, g in zip(params, jax.grad(loss)(params), strict=True)]

    options = {"mesh": "cpu:8 data=8", "among": "dp", "budget": None}
    options["vary"] = {"remat": [None, "full"], "microbatches": [None]}
    whole = jaxshard_magic.choose(again, shapes(2**15, 64), **options)
    assert whole.trial is not None and whole.trial.peak is not None
    for share in (0.95, 0.75):  # too little by the compiler, and by the estimate not clearly so, or clearly
        memory(int(share * whole.trial.peak))
        found = jaxshard_magic.choose(again, shapes(2**15, 64), **options)
        assert [t.options.get("remat") for t in found.comparison.trials] == [None]
        assert "hardly less" in next(c.why for c in found.candidates if c.options)


@pytest.mark.ci
def test_options_of_the_line_stay_and_only_the_others_are_varied(memory):
    args = shapes(2**15, 64)
    memory(3 * 2**20)  # too little for either, so that both are looked at
    found = chosen(*args, among="dp", microbatches=4, vary={"remat": [None, "full"]})
    options = {(c.options.get("microbatches"), c.options.get("remat")) for c in found.candidates}
    assert options == {(4, None), (4, "full")}


def test_where_nothing_fits_none_is_chosen_and_the_too_large_not_compiled(memory):
    memory(100_000)
    found = chosen(among="dp,fsdp")
    assert found.chosen is None and found.runner_up is None and found.report is None
    assert outcomes(found)['dp --mesh "data=8"'] == ESTIMATE
    assert found.comparison.trials == ()
    assert "fits" in found.to_text(80)


@pytest.mark.parametrize(
    ("times", "first"),
    [
        ({"dp": 1.09, "fsdp": 1.05, "fsdp+tp": 1.0, "pp": 0.995}, "dp"),
        ({"dp": 1.2, "fsdp": 1.05, "fsdp+tp": 1.0, "pp": 0.995}, "fsdp"),
        ({"dp": 1.2, "fsdp": 1.2, "fsdp+tp": 1.0, "pp": 0.95}, "fsdp+tp"),
        ({"dp": 1.2, "fsdp": 1.2, "fsdp+tp": 1.2, "pp": 1.0}, "pp"),
        ({"tp": 1.0, "fsdp": 1.08, "dp": 1.2}, "tp"),  # as simple as fsdp, and faster
        ({"tp": 1.0, "fsdp": 1.004}, "tp"),  # as fast as fsdp, and named first
        ({"fsdp": 1.0, "tp": 1.004}, "fsdp"),
        ({"dp": None, "fsdp": 1.0}, "fsdp"),
        ({"dp": 1.0}, "dp"),
    ],
)
def test_more_moving_parts_must_win_by_more_than_predictions_err(times, first):
    requests = Requests(list(times), jaxshard_magic.mesh("cpu:8 data=8"))
    found = {node.candidate.strategy: node for node in map(SearchNode, reversed(strategy_space(requests)))}
    fastest = sorted(found.values(), key=lambda n: times[n.candidate.strategy] or 9.0)
    place = {strategy: at for at, strategy in enumerate(times)}
    ranked = simplest_first(fastest, lambda n: times[n.candidate.strategy], place)
    assert ranked[0].candidate.strategy == first
    assert ranked[1:] == [n for n in fastest if n is not ranked[0]]


def test_what_is_too_close_to_call_is_said_and_the_simpler_one_taken():
    found = chosen(among="fsdp,dp")
    assert found.chosen is not None and found.chosen.strategy == "dp"
    ours, theirs = found.time_of(found.chosen), found.time_of(found.runner_up)
    assert ours is not None and theirs is not None and found.error == 0.1
    near = theirs < ours <= 1.1 * theirs
    assert ("too close to call" in found.to_text(200)) == near
    twice = replace(found, error=2.0, comparison=_slower(found, "dp", 1.5))
    said = " ".join(twice.to_text(200).split())
    assert "too close to call: fsdp" in said and "dp is the simpler one" in said


def _slower(found: Choice, strategy: str, factor: float):
    """The comparison with the trials of a strategy predicted to take so many times as long as all others."""
    most = factor * max(t.predicted or 0.0 for t in found.comparison.trials)
    trials = [
        t
        if t.strategy != strategy or t.report is None or t.report.timing is None
        else replace(t, report=replace(t.report, timing=replace(t.report.timing, predicted_step_s=most)))
        for t in found.comparison.trials
    ]
    return replace(found.comparison, trials=tuple(trials))


@pytest.mark.ci
def test_what_needs_a_little_too_much_by_its_estimate_is_compiled_in_its_turn(memory):
    args = shapes(2**15, 64)
    whole = chosen(*args, among="dp,pp", plan_only=True)
    needs = {c.strategy: c.needs for c in whole.candidates}
    assert needs["pp"] < needs["dp"] / 1.05
    memory(int(needs["dp"] / 1.05))
    assert chosen(*args, among="dp,pp").comparison.trials[0].strategy == "dp"


def test_plans_alone_choose_without_compiling_anything():
    found = chosen(plan_only=True)
    assert found.source == "planned" and found.comparison.trials == ()
    assert found.chosen is not None and found.runner_up is not None
    assert found.time_of(found.chosen) == found.chosen.bound
    assert set(outcomes(found).values()) >= {BOUND}


def test_a_search_traces_no_more_often_than_its_most_demanding_strategy():
    def traced(among: str) -> int:
        count = 0

        def counted(params, batch):
            nonlocal count
            count += 1
            return step(params, batch)

        jaxshard_magic.choose(jax.jit(counted), shapes(), mesh="cpu:8 data=8", among=among, plan_only=True, budget=None)
        return count

    assert traced("dp,fsdp,tp,dp+tp") == traced("dp") > 0
    assert traced("dp,fsdp,tp,pp") == traced("pp")


def test_a_budget_that_ends_before_the_first_compile_says_so():
    with pytest.raises(ShardError, match=r"--budget 1e-06: .* give it more, or --plan-only"):
        chosen(budget=1e-6)


def test_when_the_budget_ends_the_choice_is_of_what_has_compiled(monkeypatch):
    ended = []
    monkeypatch.setattr(strategy_search.time, "monotonic", lambda: 100.0 if ended else 0.0)
    monkeypatch.setattr(strategy_search.StrategySearch, "_slower", lambda *_: False)  # all would be compiled
    found = chosen(budget=50.0, among="dp,fsdp,tp,dp+tp,fsdp+tp", show=ended.append)
    compiled = {t.line for t in found.comparison.trials}
    assert found.chosen is not None and found.chosen.line in compiled
    assert outcomes(found).keys() - compiled == {c.line for c in found.with_outcome(LEFT)}
    assert len(compiled) < len(found.candidates)


def test_an_interrupt_keeps_what_has_compiled():
    def interrupt(comparison):
        raise KeyboardInterrupt

    found = chosen(show=interrupt)
    assert found.chosen is not None
    assert any("Interrupted" in note for note in found.notes)


def test_too_many_candidates_are_refused_with_what_makes_them_fewer():
    mesh = jaxshard_magic.mesh("cpu:8 data=8")
    with pytest.raises(ShardError, match=r"42 candidates to search .* at most 40 are; name fewer"):
        strategy_space(Requests(SEARCHED_STRATEGIES, mesh, vary={"precision": [None, "bf16"]}), most=40)


@pytest.mark.parametrize("among", ["dp,fspd", "auto"])
def test_a_strategy_that_is_none_is_refused_first(among):
    with pytest.raises(ShardError, match=r"fsdp|auto searches"):
        chosen(among=among)


def test_a_strategy_that_this_step_can_t_have_is_told_with_its_reason():
    found = chosen(among="dp,dp+sp")
    refused = [c for c in found.candidates if c.outcome == REFUSED]
    assert refused and all("positions" in c.why for c in refused)
    assert found.chosen is not None


def test_what_divides_experts_is_searched_for_a_step_that_has_some():
    call = zoo.STEPS["mixture_of_experts"].make()
    found = {}
    for name, fn, args in (("moe", call.fn, call.args), ("mlp", step, shapes())):
        choice = jaxshard_magic.choose(fn, args, mesh="cpu:8 data=8", meshes=["data=2 expert=4"], plan_only=True)
        found[name] = {c.strategy: c for c in choice.candidates if "ep" in c.strategy.split("+")}
    assert set(found["moe"]) == set(EXPERT_STRATEGIES) and not found["mlp"]
    assert found["moe"]["ep+dp"].bound is not None


@pytest.mark.parametrize("among", ["dp", "dp,fsdp", SEARCHED_STRATEGIES])
def test_a_step_that_raises_under_all_strategies_raises_as_it_does(among):
    def broken(params, batch):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        jaxshard_magic.choose(broken, shapes(), mesh="cpu:8 data=8", among=among)


def test_a_strategy_that_raises_alone_is_told_and_the_others_are_searched(monkeypatch):
    from jaxshard_magic.strategies import tp

    def broken(layout, axes):
        raise RuntimeError("no such layout")

    monkeypatch.setattr(tp, "tensor_parallel", broken)
    found = chosen(among="dp,tp,fsdp")
    assert outcomes(found)['tp --mesh "model=8"'] == REFUSED
    assert [c.why for c in found.with_outcome(REFUSED)] == ["RuntimeError: no such layout"]
    assert found.chosen is not None and found.chosen.strategy in ("dp", "fsdp")


def test_an_interrupt_before_anything_has_compiled_ends_the_search(monkeypatch):
    def interrupt(doing):
        if "planning" in doing:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chosen(say=interrupt)


def test_the_decision_path_has_this_steps_figures(memory):
    fits = chosen(plan_only=True).path
    assert [q.answer for q in fits] == [True, True, True]
    assert "beside 6.84" in fits[1].because and "no other way is clearly faster: 216" in fits[1].because
    assert fits[2].because == "it can be cut into 2 stages"  # of more, each action is too small for its start
    memory(100_000)
    assert chosen(plan_only=True).path[0].answer is False


@pytest.mark.skipif(find_spec("libtpu") is None, reason="no TPU compiler: libtpu is not installed")
def test_a_chip_is_named_once():
    with pytest.raises(ShardError, match="the mesh names the chip"):
        jaxshard_magic.choose(step, shapes(), mesh="v5e:2x2 data=4", on="v5e")


def test_a_chip_stands_in_for_simulated_devices():
    assert chosen(plan_only=True, on="h100", among="dp,fsdp").on == "H100"


@pytest.mark.ci
def test_a_slice_that_is_not_attached_is_searched_with_its_own_compiler():
    found = jaxshard_magic.choose(step, shapes(), mesh="v5e:2x2 data=4", among="dp,fsdp,tp")
    assert found.source == "predicted" and found.trial is not None and found.report is not None
    assert found.report.mesh.source == "topology" and found.trial.fits is True
    assert set(outcomes(found).values()) <= {"chosen", "runner-up", SLOWER, BOUND}


def test_what_is_attached_is_run_on_copies_and_the_measured_times_decide(monkeypatch):
    """Hardware that no figures are known of: nothing is ruled out by a plan, everything that fits runs."""
    monkeypatch.setattr(program_reading, "detect_mesh_info", lambda mesh: mesh_info(mesh, "attached"))
    mesh = jaxshard_magic.mesh("cpu:8 data=8")
    params, batch = [jnp.ones((64, 64))] * 3, jnp.ones((16, 64))
    attached = Hardware(hardware.chip("v5e"), known=False, limit=None, runs=True)
    searching = StrategySearch(step, Requests(["dp", "fsdp", "tp"], mesh), TrialOptions("step"), attached)
    found = searching((params, batch), {})
    times = {t.line: t.measured for t in found.comparison.trials}
    assert found.source == "measured" and found.on is None
    assert len(times) == 3 and all(times.values())
    assert found.chosen is not None and found.chosen.line == min(times, key=lambda line: times[line] or 0)
    checks = [t.report.check for t in found.comparison.trials if t.report is not None]
    assert len(checks) == 3 and all(check is not None and check.passed for check in checks)
    assert any("No figures of this hardware" in note for note in found.notes)


def test_a_guess_lies_between_a_plans_least_time_and_nothing_overlapped():
    known = [c for c in chosen(plan_only=True).candidates if c.guess is not None]
    assert known
    assert all(c.bound <= c.guess <= c.most for c in known), known
