"""What the options of a line change, for the sample reports."""

from jaxshard_magic.report import Alternative

MIB = 2**20
ASKED = {"microbatches": 8, "reduce": "once", "remat": "attention", "precision": "bf16"}
ALTERNATIVES = (
    Alternative("", 5_321 * MIB, 33_400_000_000_000, 993 * MIB),
    Alternative("without --microbatches 8", 11_870 * MIB, 33_400_000_000_000, 993 * MIB),
    Alternative("without --remat attention", 6_904 * MIB, 27_100_000_000_000, 993 * MIB),
    Alternative("without --precision bf16", 7_011 * MIB, 33_400_000_000_000, 1_986 * MIB),
    Alternative("--reduce each", 4_780 * MIB, 33_400_000_000_000, 7_121 * MIB),
    Alternative(
        "--reduce once-gathered",
        why="not compiled: all of these would take about 95 s, and the limit is 60 s",
    ),
)
