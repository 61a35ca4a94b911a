"""What XLA complains of, as it writes it."""

import os

AXES = {"x": 4, "y": 2}
HEAD = "W1121 10:01:49.656686   32617 spmd_partitioner.cc:656] "
MOVED = (
    "[SPMD] Involuntary full rematerialization. The compiler cannot go from sharding {FROM} to {TO} efficiently for "
    'HLO operation %copy.1 = bf16[8,16,4]{2,1,0} copy(%a), sharding={FROM}, metadata={op_name="jit(step)/add" '
    "stack_frame_id=7}. As the last resort, and so on."
)
FOLDING = """Constant folding an instruction is taking > 1s:

  %scatter.5 = f32[1000000]{0} scatter(%a, %b, %c), metadata={op_name="jit(step)/scatter" stack_frame_id=2}

This isn't necessarily a bug; and so on.

If you'd like to file a bug, do so."""
STARS = "*" * 32
SLOW = f"{STARS}\n[Compiling module jit_step] Very slow compile? And so on.\n{STARS}"


def moved(before: str, after: str) -> str:
    return MOVED.replace("{FROM}", before).replace("{TO}", after)


TILES = moved("{devices=[2,1,4]<=[4,2]T(1,0)}", "{devices=[1,8,1]<=[8]}")
NAMED = moved("{mesh['x'=4,'y'=2], [{'y'}, {}, {'x'}]}", "{mesh['x'=4,'y'=2], [{}, {'x', 'y'}, {}]}")
# XLA ends each with a line feed; the alarm for a compilation begins with one as well.
LOGGED = (TILES, FOLDING, f"The operation took 3.5s\n{FOLDING}", SLOW, f"The operation took 2m3s\n\n{SLOW}")


def log(text: str) -> bytes:
    return f"{HEAD}{chr(10) * text.startswith('*')}{text}\n".encode()


def say(data: bytes) -> None:
    os.write(2, data)
