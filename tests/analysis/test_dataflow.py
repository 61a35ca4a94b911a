"""Where a value of a compiled program comes from, also through the bodies that compilers write operations as."""

import pytest

from jaxshard_magic.analysis.dataflow import Dataflow
from jaxshard_magic.analysis.hlo import parse_module

# A reduce-scatter as TPU's compiler writes it: an all-reduce of the padded gradient inside a fusion.
FUSED = """HloModule m, is_scheduled=true

%scattered (one: f32[7,4], other: f32[7,4]) -> f32[2,4] {
  %one = f32[7,4]{1,0} parameter(0)
  %other = f32[7,4]{1,0} parameter(1)
  %zero = f32[] constant(0)
  %padded = f32[8,4]{1,0} pad(%other, %zero), padding=0_1x0_0
  %all-reduce = f32[8,4]{1,0} all-reduce(%padded), replica_groups={{0,1,2,3}}, to_apply=%sum
  ROOT %mine = f32[2,4]{1,0} slice(%all-reduce), slice={[0:2], [0:4]}
}

ENTRY %main (p: f32[7,4], q: f32[7,4]) -> f32[2,4] {
  %p = f32[7,4]{1,0} parameter(0)
  %q = f32[7,4]{1,0} parameter(1)
  %gradient = f32[7,4]{1,0} negate(%q)
  ROOT %fusion = f32[2,4]{1,0} fusion(OPERANDS), kind=kCustom, calls=%scattered
}
"""


@pytest.mark.parametrize(
    ("operands", "wanted"),
    [
        ("%p, %gradient", ["padded", "other", "gradient"]),
        ("%gradient, %p", ["padded", "other", "p"]),
    ],
)
def test_what_a_fusion_is_given_is_behind_the_parameter_of_its_body(operands, wanted):
    module = parse_module(FUSED.replace("OPERANDS", operands))
    found = Dataflow(module).producers(module.computations["scattered"], "padded")
    assert [instruction.name for _, instruction in found] == wanted


def test_a_fusion_of_one_array_is_asked_first_for_its_name_is_that_of_the_array():
    one = FUSED.replace("OPERANDS", "%gradient").replace("(%other, %zero)", "(%one, %zero)")
    module = parse_module(one)
    found = Dataflow(module).producers(module.computations["scattered"], "padded")
    assert [instruction.name for _, instruction in found] == ["padded", "one", "fusion", "gradient"]


def test_the_parameters_of_the_program_itself_come_from_nowhere():
    module = parse_module(FUSED.replace("OPERANDS", "%p, %q"))
    found = Dataflow(module).producers(module.entry, "p")
    assert [instruction.name for _, instruction in found] == ["p"]


# What a callback gives to the first device, handed to all of them: what does so has no name.
HANDED = """HloModule m, is_scheduled=true

ENTRY %main (p: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %loss = f32[] negate(%p), metadata={op_name="jit(step)/neg" stack_frame_id=1}
  %asked = f32[] custom-call(%loss), custom_call_target="callback", metadata={op_name="jit(step)/asks" stack_frame_id=2}
  %id = u32[] partition-id()
  %zero = u32[] constant(0)
  %first = pred[] compare(%id, %zero), direction=EQ
  %none = f32[] constant(0)
  %chosen = f32[] select(%first, %asked, %none)
  ROOT %all-reduce = f32[] all-reduce(%chosen), replica_groups={{0,1,2,3}}, to_apply=%sum
}
"""


def test_what_the_compiler_made_without_a_name_is_made_of_what_has_one():
    module = parse_module(HANDED)
    flow = Dataflow(module)
    assert [i.name for _, i in flow.producers(module.entry, "chosen")] == ["chosen"]  # it is no other array
    found = [i.name for _, i in flow.sources(module.entry, "chosen")]
    assert found == ["chosen", "first", "asked", "none", "id", "zero"]  # and no further than what has a name


# A gather that TPU's compiler has split, so that a product runs while it does.
SPLIT = """HloModule m, is_scheduled=true

%starting (part: f32[2,4]) -> (f32[2,4], f32[8,4], u32[]) {
  %part = f32[2,4] parameter(0)
  %gather.1 = f32[8,4] all-gather(%part), channel_id=5, dimensions={0}, frontend_attributes={chain_id="3"}
  ROOT %start = (f32[2,4], f32[8,4], u32[]) custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}

%ending (part: f32[2,4], whole: f32[8,4]) -> f32[8,4] {
  %part = f32[2,4] parameter(0)
  %whole = f32[8,4] parameter(1)
  %gather.2 = f32[8,4] all-gather(%part), channel_id=5, dimensions={0}, frontend_attributes={chain_id="3"}
  ROOT %end = f32[8,4] custom-call(%part, %whole, %gather.2), custom_call_target="AsyncCollectiveDone"
}

%another (part: f32[2,4], whole: f32[8,4]) -> f32[8,4] {
  %part = f32[2,4] parameter(0)
  %whole = f32[8,4] parameter(1)
  %gather.3 = f32[8,4] all-gather(%part), channel_id=6, dimensions={0}, frontend_attributes={chain_id="4"}
  ROOT %other.end = f32[8,4] custom-call(%part, %whole, %gather.3), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (p: f32[2,4], q: f32[8,4]) -> f32[8,4] {
  %p = f32[2,4] parameter(0)
  %q = f32[8,4] parameter(1)
  %started = (f32[2,4], f32[8,4], u32[]) fusion(%p), kind=kCustom, calls=%starting
  %part = f32[2,4] get-tuple-element(%started), index=0
  %whole = f32[8,4] get-tuple-element(%started), index=1
  %first = f32[8,4] fusion(%part, %q), kind=kCustom, calls=%another
  %ended = f32[8,4] fusion(%part, %whole), kind=kCustom, calls=%ending
  ROOT %used = f32[8,4] multiply(%ended, %q)
}
"""


def test_users_of_a_collective_split_into_fusions_are_found_after_its_end():
    module = parse_module(SPLIT)
    found = Dataflow(module).consumers(module.computations["starting"], "gather.1")
    assert [instruction.name for _, instruction in found] == ["start", "end", "ended", "used"]


# A sum of gradients that TPU's compiler takes out of the loop that adds them up.
LOOPED = """HloModule m, is_scheduled=true

%again (state: (f32[4], f32[4])) -> pred[] {
  ROOT %more = pred[] constant(true)
}

%body (state: (f32[4], f32[4])) -> (f32[4], f32[4]) {
  %state = (f32[4], f32[4]) parameter(0)
  %sum = f32[4] get-tuple-element(%state), index=0
  %kept = f32[4] get-tuple-element(%state), index=1
  %added = f32[4] add(%sum, %kept)
  ROOT %next = (f32[4], f32[4]) tuple(%added, %kept)
}

ENTRY %main (p: f32[4], q: f32[4]) -> f32[4] {
  %p = f32[4] parameter(0)
  %q = f32[4] parameter(1)
  %start = (f32[4], f32[4]) tuple(%p, %q)
  %loop = (f32[4], f32[4]) while(%start), condition=%again, body=%body
  %made = f32[4] get-tuple-element(%loop), index=0
  %same = f32[4] get-tuple-element(%loop), index=1
  ROOT %all-reduce = f32[4] all-reduce(%made), replica_groups={{0,1}}, to_apply=%sum
}
"""


def test_what_comes_out_of_a_loop_was_made_by_its_body_and_then_given_to_it():
    module = parse_module(LOOPED)
    flow = Dataflow(module)
    assert [i.name for _, i in flow.producers(module.entry, "made")] == ["made", "added", "p"]
    assert [i.name for _, i in flow.producers(module.entry, "same")] == ["same", "kept", "q"]
