"""What a recording of the sample step would have measured: 8 devices, the first of them slow."""

from dataclasses import replace

from jaxshard_magic.report import CollectiveTime, DeviceLane, DeviceTime, LineTime, Measured, TimeSpread

STEP = 0.047  # seconds
CELL = "cell [7]"
MODEL, CALLED = "gpt2.py", "cell [7]:12"
ROWS = (
    LineTime(MODEL, 46, "backward", 0.012, 0.004, 0.001, 0.0143, called=CALLED),
    LineTime(MODEL, 46, "forward", 0.006, 0.002, 0.0, 0.006, called=CALLED),
    LineTime(MODEL, 36, "recomputed", 0.005, 0.001, 0.0, 0.0052, called=CALLED),
    LineTime(CELL, 14, "forward", 0.003, 0.0, 0.006),
    LineTime(CELL, 9, "update", 0.004, 0.0, 0.0),
)
TICKS = 2000


def lane(device: int) -> DeviceLane:
    """A forward pass, a gather, what is recomputed, the backward pass with a wait behind it, the update."""
    pieces = [(0, 380 + 20 * (device == 0), 1, "c"), (420, 200, 1, "m"), (620, 200, 2, "c")]
    pieces += [(830, 500, 0, "c"), (1330, 160, 0, "m"), (1500, 240 - 100 * (device == 0), 3, "w")]
    pieces += [(1750, 160, 4, "c"), (1910, 40, -1, "c")]
    starts, takes, of, kinds = zip(*pieces, strict=True)
    return DeviceLane(device, starts, takes, of, "".join(kinds))


def measured(devices: int = 8, waits: bool = True) -> Measured:
    """`waits`: whether the trace tells waiting from moving."""

    def told(seconds: float) -> float | None:
        return seconds if waits else None

    busy = []
    for device in range(devices):
        slow = 0.003 * (device == 0)
        busy.append(DeviceTime(device, 0.030 + slow, 0.007, told(0.007 - slow), 0.0015, 0.003))
    least = 0.003 / devices  # what the slow device computes longer, shared out
    waiting = [row.waiting or 0.0 for row in ROWS]
    waiting[3] -= least
    rows = tuple(replace(row, waiting=told(each)) for row, each in zip(ROWS, waiting, strict=True))
    return Measured(
        asked=5,
        recorded=5,
        read=5,
        operations=1230,
        step_s=TimeSpread(0.0458, STEP, 0.0492),
        lines=rows,
        others=None,
        unknown=LineTime(None, None, None, least, 0.0, None),
        collectives=(
            CollectiveTime("all-gather", ("data",), 0.0055, told(0.004), 400_000_000, 72.7e9, 90e9, 0.0143),
            CollectiveTime("all-reduce", ("data", "model"), 0.0015, told(0.003), 90_000_000, 60e9),
        ),
        devices=tuple(busy),
        of_devices=devices,
        slowest=0 if devices > 1 else None,
        behind=0.003 if devices > 1 else None,
        lanes=tuple(lane(d) for d in range(min(8, devices))),
        tick=STEP / TICKS,
        grain=1,
        host=0.0,
        dispatch=0.0011,
    )
