"""Pipeline schedules: text there and back, what a wrong one is told, and times against hand-derived ones."""

from fractions import Fraction

import pytest
from support.refusals import refusal

from jaxshard_magic.errors import ShardError
from jaxshard_magic.schedule import NAMES, Action, Costs, Fused, Schedule, make, parse, simulate
from jaxshard_magic.schedule.actions import parse_entry
from jaxshard_magic.schedule.simulate import activations_held

SIZES = [(p, m) for p in range(2, 17) for m in (p, p + 1, 2 * p, 5 * p - 1, 8 * p)]
GROUPS = [(p, k * p, v) for p in (2, 3, 4, 7, 8, 16) for k in (1, 2, 5, 8) for v in (2, 3)]


# Actions


@pytest.mark.parametrize("text", ["0F0", "2I10", "31W512", "7B3"])
def test_an_action_prints_as_it_is_written(text):
    assert str(parse_entry(text)) == text


def test_an_action_is_stage_kind_and_microbatch():
    assert parse_entry("12I7") == Action(stage=12, kind="I", microbatch=7)
    assert parse_entry("2f0") == Action(2, "F", 0)


def test_fused_actions_are_joined_by_a_plus():
    fused = parse_entry("2F4+3B1")
    assert fused == Fused((Action(2, "F", 4), Action(3, "B", 1)))
    assert str(fused) == "2F4+3B1"


@pytest.mark.parametrize("text", ["F0", "2F", "2X0", "2F0+", "-1F0", "2F0.5", "", "2 F 0"])
def test_what_is_no_action_is_told_with_how_to_write_one(text):
    with pytest.raises(ShardError, match="write stage, kind, microbatch, as in 2F0; kinds are F"):
        parse_entry(text)


# Text


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_reads_back_from_its_text(name):
    schedule = make(name, stages=4, microbatches=8)
    assert parse(str(schedule)) == schedule


def test_commas_labels_empty_cells_and_lines_are_read():
    plain = parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", "mine")
    assert parse("# mine: a comment\n\nrank 0: 0F0,0F1,,0B0,0B1,\nrank 1: 1F0, ,1B0,1F1,1B1\n") == plain
    assert (plain.name, plain.stages, plain.microbatches, plain.chunks) == ("mine", 2, 2, 1)


def test_chunks_are_read_from_the_stages_on_a_rank():
    looped = parse("0F0 2F0 2B0 0B0\n1F0 3F0 3B0 1B0")
    assert looped.chunks == 2
    assert looped.stages_of == ((0, 2), (1, 3))
    assert looped.rank_of == (0, 1, 0, 1)
    assert parse("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0").rank_of == (0, 1, 1, 0)


def test_a_word_that_is_no_action_is_told_with_its_line():
    assert refusal(parse, "0F0 0B0\n# a comment\n1F0 1C0").startswith("line 3: '1C0' is no action")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a schedule needs a line for each rank; the text has none"),
        ("# only: a comment", "the text has none"),
        ("0F0 0B0 0F1", "rank 0 lacks 0B1, or 0I1 and 0W1"),
        ("0F0 0I0", "rank 0 lacks 0W0"),
        ("0F0 0B0 0F2 0B2", "rank 0 lacks 0F1"),
        ("0F0 0F0 0B0", "rank 0, action 1, 0F0: it already stands at action 0"),
        ("0F0 0B0 0B0", "rank 0, action 2, 0B0: it already stands at action 1"),
        ("0B0 0F0", "rank 0, action 0, 0B0: 0F0 must stand before it"),
        ("0F0 0W0 0I0", "rank 0, action 1, 0W0: 0I0 must stand before it"),
        ("0F0 0B0 0W0", "rank 0, action 2, 0W0: 0I0 must stand before it"),
        ("0F0 0I0 0B0 0W0", "rank 0, action 2, 0B0: 0I0 already does it, at action 1"),
        ("0F0 0B0 0I0", "rank 0, action 2, 0I0: 0B0 already does it, at action 1"),
        ("0F0 0B0 1F0\n1B0", "rank 1, action 0, 1B0: stage 1 already stands on rank 0"),
        ("0F0 0B0 2F0 2B0\n1F0 1B0", "3 stages on 2 ranks; each rank holds the same number of stages"),
        ("0F0 0B0\n3F0 3B0", "no rank has 1F0"),
        ("0F0 0F999999999", "too few for the 1 stages and 1,000,000,000 microbatches that they name"),
        ("0F0 0B0+0F0", "rank 0, action 1, 0F0: it already stands at action 0"),
    ],
)
def test_a_wrong_schedule_is_told_with_the_spot(text, says):
    assert refusal(parse, text).endswith(says)


def test_a_schedule_made_by_hand_is_checked_too():
    row = (Action(0, "F", 0), Action(0, "B", 0))
    assert Schedule("mine", 1, 1, 1, (row,)).actions == 2
    with pytest.raises(ShardError, match="there are 1 stages and 1 microbatches, each counted from 0"):
        Schedule("mine", 1, 1, 1, ((Action(0, "F", 1), *row),))
    with pytest.raises(ShardError, match="mine has 1 lines for 2 ranks"):
        Schedule("mine", 2, 1, 1, (row,))


# Names and sizes


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"name": "1f1v"}, "no schedule '1f1v'.*Did you mean '1f1b'?"),
        ({"stages": 0}, "stages is 0; it must be a whole number from 1"),
        ({"microbatches": 2.0}, "microbatches is 2.0; it must be a whole number from 1"),
        ({"stages": True}, "stages is True; it must be a whole number from 1"),
        ({"chunks": -1}, "chunks is -1; it must be a whole number from 1"),
        ({"chunks": 2}, "1f1b has 1 chunks a rank, not 2; any number of chunks have interleaved, looped-bfs"),
        ({"memory_limit": 3}, "1f1b takes no memory limit"),
        (
            {"name": "interleaved", "microbatches": 10},
            "interleaved: 10 microbatches don't divide by 4 stages; use 8 or 12",
        ),
        ({"name": "interleaved", "microbatches": 3}, "3 microbatches don't divide by 4 stages; use 4$"),
    ],
)
def test_what_a_schedule_has_no_form_for_is_told(asked, says):
    with pytest.raises(ShardError, match=says):
        make(**{"name": "1f1b", "stages": 4, "microbatches": 8, **asked})


# Costs


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"forward": -1}, "cost forward is -1; it must be a number from 0"),
        ({"input_grad": [1, -2]}, "cost input_grad of stage 1 is -2; it must be a number from 0"),
        ({"transfer": float("nan")}, "cost transfer is nan"),
        ({"weight_grad": float("inf")}, "cost weight_grad is inf"),
        ({"forward": "1"}, "cost forward is '1'; write a number, or a list of one number per stage"),
        ({"forward": ["1"]}, "cost forward of stage 0 is '1'"),
        ({"forward": True}, "cost forward is True"),
        ({"kept_for_weight_grad": 1.5}, "cost kept_for_weight_grad is 1.5; it must be a share from 0 to 1"),
    ],
)
def test_a_cost_that_can_not_be_is_told(given, says):
    with pytest.raises(ShardError) as refused:
        Costs(**given)
    assert str(refused.value).startswith(says)


def test_costs_of_another_length_than_the_stages_are_told():
    schedule = make("1f1b", stages=4, microbatches=4)
    with pytest.raises(ShardError, match="cost transfer has 3 numbers for 4 stages; write one per stage"):
        simulate(schedule, Costs(transfer=[0, 0, 0]))
    simulate(make("interleaved", stages=2, microbatches=4, chunks=2), Costs(forward=[1, 2, 3, 4]))


def test_a_schedule_is_simulated_at_the_costs_it_was_made_for():
    costs = Costs(forward=3)
    assert simulate(make("gpipe", stages=2, microbatches=2, costs=costs)).costs == costs


# Closed forms. p ranks, m microbatches, v chunks; the backward pass takes twice the forward one.


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_and_1f1b_idle_p_minus_1_of_m_plus_p_minus_1_slots(name, p, m):
    """Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1."""
    found = simulate(make(name, stages=p, microbatches=m))
    assert found.bubble == pytest.approx(Fraction(p - 1, m + p - 1))
    assert found.makespan == pytest.approx(3 * (m + p - 1))
    assert found.idle == pytest.approx([3 * (p - 1)] * p)


@pytest.mark.parametrize("name", ["interleaved", "looped-bfs"])
@pytest.mark.parametrize(("p", "m", "v"), GROUPS)
def test_chunks_divide_the_bubble(name, p, m, v):
    """Narayanan et al. 2021, section 2.2.2; Lamy-Poirier 2022, arXiv 2211.05953."""
    found = simulate(make(name, stages=p, microbatches=m, chunks=v))
    assert found.bubble == pytest.approx(Fraction(p - 1, v * m + p - 1))


@pytest.mark.parametrize(("p", "m"), [*SIZES, (8, 1), (8, 3)])
def test_1f1b_holds_at_most_p_minus_s_and_gpipe_everything(p, m):
    one = simulate(make("1f1b", stages=p, microbatches=m))
    assert one.peak_activations == tuple(min(p - s, m) for s in range(p))
    assert one.peak_microbatches == min(p, m)
    assert simulate(make("gpipe", stages=p, microbatches=m)).peak_activations == (m,) * p


@pytest.mark.parametrize(("p", "m", "v"), GROUPS)
def test_interleaved_holds_its_warm_up_and_one_more_and_looped_bfs_everything(p, m, v):
    """Of all m v, at most: 2(p - s - 1) + (v - 1)p before the first backward action, arXiv 2104.04473."""
    found = simulate(make("interleaved", stages=p, microbatches=m, chunks=v))
    assert found.peak_activations == tuple(min(m * v, 2 * (p - s - 1) + (v - 1) * p + 1) for s in range(p))
    looped = simulate(make("looped-bfs", stages=p, microbatches=m, chunks=v))
    assert looped.peak_activations == (m * v,) * p and looped.peak_microbatches == m


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zb_h1_idles_p_minus_1_units_and_holds_as_much_on_every_rank(p, m):
    """Qi et al. 2024, arXiv 2401.10241, section 2.3, with unit costs: (p - 1)(F + I - W), and p microbatches."""
    found = simulate(make("zb-h1", stages=p, microbatches=m))
    assert found.bubble == pytest.approx(Fraction(p - 1, 3 * m + p - 1))
    assert found.peak_activations == (p,) * p


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= 2 * p - 1])
def test_zb_h2_never_waits_and_holds_2p_minus_1(p, m):
    """Section 2.3 again: (p - 1)(F + I - 2W), which is none, and 2p - 1 microbatches."""
    found = simulate(make("zb-h2", stages=p, microbatches=m))
    assert found.span == 3 * m and found.steady_bubble == 0
    assert found.peak_activations == (2 * p - 1,) * p


def test_one_rank_never_idles():
    assert all(simulate(make(name, stages=1, microbatches=3)).bubble == 0 for name in ("gpipe", "1f1b"))


# Times by hand


def test_gpipe_with_uneven_stages_waits_for_the_slowest_in_both_directions():
    """Forward: 1 + 2 to the slow stage, 5 x 3 there, 1 after it. Backward, twice as long: 2, 5 x 6, 4, 2."""
    uneven = Costs(forward=(1, 2, 3, 1), input_grad=(1, 2, 3, 1), weight_grad=(1, 2, 3, 1))
    found = simulate(make("gpipe", stages=4, microbatches=5), uneven)
    assert found.makespan == (1 + 2 + 15 + 1) + (2 + 30 + 4 + 2)
    assert found.idle == (57 - 15, 57 - 30, 57 - 45, 57 - 15)
    assert found.bubble == pytest.approx(1 - (15 + 30 + 45 + 15) / (4 * 57))


def test_1f1b_with_a_slow_last_stage_is_paced_by_it():
    """The last of two ranks is busy from 1 on, 3 x (2 + 4); the first rank's last backward pass, 2, follows it."""
    slow = Costs(forward=(1, 2), input_grad=(1, 2), weight_grad=(1, 2))
    found = simulate(make("1f1b", stages=2, microbatches=3), slow)
    assert found.makespan == 1 + 18 + 2
    assert found.starts[1] == (1, 3, 7, 9, 13, 15)
    assert found.starts[0] == (
        0,
        1,
        7,
        9,
        13,
        19,
    )  # the third forward action waits behind the first backward one


def test_a_transfer_delays_who_waits_and_keeps_nobody_busy():
    """0F0 0-1, on its way to 1.5; 1F0 1F1 to 3.5, since 0F1 is there at 2.5; 1B1 to 7.5, home at 8, 0B1 to 10."""
    found = simulate(parse("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1"), Costs(transfer=0.5))
    assert found.starts == ((0, 1, 6, 8), (1.5, 2.5, 3.5, 5.5))
    assert found.makespan == 10
    assert found.idle == (4, 4)


def test_a_transfer_is_the_senders():
    """Of activations down, and of their gradients up, each as long as the rank that sends it says."""
    found = simulate(parse("0F0 0B0\n1F0 1B0"), Costs(transfer=(5, 7)))
    assert found.starts == ((0, 6 + 3 + 7), (6, 7))


def test_stages_of_one_rank_hand_over_at_once():
    """V-shaped: stages 1 and 2 stand on rank 1, so that only 0-1 and 2-3 cost a transfer."""
    found = simulate(parse("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0"), Costs(transfer=10))
    assert found.starts == ((0, 23, 24, 50), (11, 12, 36, 38))


def test_a_whole_backward_pass_lets_go_later_than_its_input_gradient():
    """The rank below starts after I, not after I and W: two instead of three after 1F0."""
    costs = Costs(forward=1, input_grad=1, weight_grad=2)
    whole = simulate(parse("0F0 0B0\n1F0 1B0"), costs)
    halves = simulate(parse("0F0 0I0 0W0\n1F0 1I0 1W0"), costs)
    assert (whole.makespan, halves.makespan) == (8, 6)
    assert halves.starts == ((0, 3, 4), (1, 2, 3))


def test_a_span_is_that_of_the_longest_rank_from_its_own_first_start():
    """Rank 0 works 0-1 and 3-6, rank 1 from 1 to 5: the longest span is rank 0's, and the makespan."""
    costs = Costs(forward=1, input_grad=1, weight_grad=2)
    found = simulate(parse("0F0 0I0 0W0\n1F0 1I0 1W0"), costs)
    assert (found.makespan, found.span) == (6, 6)
    assert found.bubble == found.steady_bubble == pytest.approx(1 - 8 / 12)


def test_a_steady_bubble_forgets_that_ranks_start_one_after_the_other():
    """Rank 0 works without a break from 0 to 9, rank 1 from 1 to 10: the makespan is 10, each rank's span 9."""
    text = "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2\n1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2"
    found = simulate(parse(text))
    assert found.starts[0] == tuple(range(9)) and found.starts[1] == tuple(range(1, 10))
    assert (found.makespan, found.span) == (10, 9)
    assert found.bubble == pytest.approx(0.1) and found.steady_bubble == 0


def test_events_are_the_actions_with_their_times():
    schedule = make("1f1b", stages=2, microbatches=2)
    events = simulate(schedule).events
    assert [str(event.action) for event in events if event.rank == 1] == ["1F0", "1B0", "1F1", "1B1"]
    assert [(event.start, event.end) for event in events if event.rank == 1] == [
        (1, 2),
        (2, 4),
        (4, 5),
        (5, 7),
    ]


def test_no_cost_at_all_has_no_bubble():
    found = simulate(make("gpipe", stages=2, microbatches=2), Costs(0, 0, 0))
    assert (found.makespan, found.bubble, found.steady_bubble) == (0, 0, 0)


# Memory


def test_activations_are_held_until_the_weight_gradient_is_done():
    row = parse("0F0 0F1 0I0 0I1 0W0 0W1").grid[0]
    assert activations_held(row, [1.0]) == [1, 2, 2, 2, 2, 1, 0]


def test_the_share_that_a_weight_gradient_needs_is_held_longest():
    row = parse("0F0 0F1 0I0 0I1 0W0 0W1").grid[0]
    assert activations_held(row, [0.25]) == [1, 2, 2, 1.25, 0.5, 0.25, 0]
    assert activations_held(row, [0.0]) == [1, 2, 2, 1, 0, 0, 0]


def test_a_whole_backward_pass_holds_them_while_it_runs():
    assert activations_held(parse("0F0 0B0 0F1 0B1").grid[0], [0.5]) == [1, 1, 1, 1, 0]


def test_each_stage_keeps_its_own_share():
    row = parse("0F0 1F0 1I0 0I0 1W0 0W0").grid[0]
    assert activations_held(row, [0.5, 0.0]) == [1, 2, 2, 1, 0.5, 0.5, 0]


def test_a_peak_in_microbatches_counts_a_chunk_as_its_share():
    found = simulate(make("looped-bfs", stages=2, microbatches=4, chunks=2))
    assert found.peak_activations == (8, 8)
    assert found.peak_microbatches == 4


# Fused steps


def test_fused_actions_start_together_and_end_together():
    """0F1+0B0 on rank 0 waits for 1B0, which ends at 4, and takes 1 + 2; 1F1 starts when it ends."""
    found = simulate(parse("0F0 0F1+0B0 0B1\n1F0 1B0 1F1 1B1"))
    assert found.starts == ((0, 4, 10), (1, 2, 7, 8))
    assert found.ends == ((1, 7, 12), (2, 4, 8, 10))
    assert str(found.events[1].action) == "0F1+0B0"


def test_fused_actions_hold_what_both_need():
    assert activations_held(parse("0F0 0F1+0B0 0B1").grid[0], [1.0]) == [1, 2, 1, 0]


# Deadlocks


def test_a_deadlock_names_the_circle():
    """Rank 0 waits with 0B0 for 1B0, behind which rank 1 waits for 0F1, which rank 0 has behind 0B0."""
    with pytest.raises(ShardError) as refused:
        simulate(parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", "mine"))
    assert str(refused.value) == (
        "schedule mine never ends: rank 0 stands at action 1, 0B0, until rank 1 has run 1B0; "
        "rank 1 stands at action 1, 1F1, until rank 0 has run 0F1. Move one of them behind the other"
    )


def test_a_rank_that_only_waits_is_no_part_of_the_circle():
    text = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n2F0 2F1 2B0 2B1"
    with pytest.raises(ShardError) as refused:
        simulate(parse(text))
    assert "rank 0" not in str(refused.value)
    assert "rank 1 stands at action 1, 1B0, until rank 2 has run 2B0" in str(refused.value)
    assert "rank 2 stands at action 1, 2F1, until rank 1 has run 1F1" in str(refused.value)


def test_a_deadlock_inside_fused_actions_names_them():
    with pytest.raises(ShardError, match=r"rank 0 stands at action 0, 0F0\+0B0, until rank 1 has run 1B0"):
        simulate(parse("0F0+0B0\n1F0 1B0"))
