"""Reports made by hand, one per state that a view has to show."""

from dataclasses import replace

from support import sample_measured
from support.sample_attached import GIB, SAME, WTE, attached, memory, simulated
from support.sample_collectives import GPT, GPT_COLLECTIVES, GPT_STEP, KIB, MIB, moved, predicted_timing, source
from support.sample_divided import AXES, with_divided
from support.sample_extremes import hostile, large, one_device, shapes, toy
from support.sample_leaves import gpt_leaves, leaf, mesh, of_role
from support.sample_memory import LOGITS, with_measured
from support.sample_metrics import metrics
from support.sample_options import ALTERNATIVES, ASKED
from support.sample_staged import staged

from jaxshard_magic.report import Advice, Check, Collective, Report, SourceExcerpt, TimeSpread, Timing


def profiled() -> Report:
    """Where the time of recorded steps went, line by line, on the same TPU."""
    return replace(attached(), measured=sample_measured.measured())


def hinted() -> Report:
    """Seven hints, more than are open at first, with and without something to paste."""
    return replace(
        attached(),
        advice=(
            WTE,
            Advice(
                "communication",
                "warning",
                "62% of the predicted step is communication: 28.4\u202fms of 46.0\u202fms on TPU v5e, most by "
                "all-gathers over data (14.3\u202fms, most from cell [7], line 12). What moves for weights stays the "
                "same when the batch grows: of 512 examples, where there are 64, it would be about 17%.",
                saves=0.42,
            ),
            Advice(
                "slow-fsdp",
                "warning",
                "The weights that fsdp gathers go over data at 34\u202fGB/s (2 links); TPU v5e has "
                "links of 90\u202fGB/s.",
                '--mesh "model=2 data=4"',
                0.25,
            ),
            Advice(
                "float32",
                "info",
                "83% of the FLOPs are in float32: bfloat16 moves half.",
                "--precision bf16",
                0.2,
            ),
            Advice(
                "not-donated",
                "info",
                "The old state stays while the new one is made: 1.39\u202fGiB more.",
                "--donate",
            ),
            Advice("loop-length", "info", "A collective runs in a loop of unknown length: counted for one pass."),
            Advice("hold", "info", "475 MiB of params0 lie on device 0, which your notebook still holds."),
        ),
    )


def looped() -> Report:
    """Simulated devices and a chip to predict for: a loop that does more than its step, a check with noise, hints."""
    report = hinted()
    spent = sum(c.seconds or 0 for c in GPT_COLLECTIVES)
    assert report.timing is not None
    timing = replace(
        report.timing,
        step_s=TimeSpread(0.0055, 0.00584, 0.0071),
        how="start to end",
        apart_s=0.0217,
        predicted_step_s=0.0176 + spent,
        compute_s=0.0110,
        memory_s=0.0151,
        waiting_s=0.0109,
    )
    return replace(
        report,
        options={"check": True, "on": "v5e"},
        mesh=mesh(GPT, "simulated"),
        timing=timing,
        check=replace(SAME, noise=("state.params.mlp.up.kernel",), noise_in=((2, 28311552),)),
    )


def over_hosts() -> Report:
    """The same on two hosts, half of the data axis on each: two groups of data leave a host, no group of model does."""
    report = simulated()
    hosts = (0, 0, 0, 0, 1, 1, 1, 1)
    sent = [
        replace(c, network_bytes={("data",): 2 * c.wire_bytes, ("model",): 0}.get(c.axes or (), c.wire_bytes))
        for c in report.collectives or ()
    ]
    over = mesh(GPT, "simulated", processes=2, hosts=hosts, islands=hosts)
    return replace(report, mesh=over, collectives=tuple(sent))


def too_big() -> Report:
    """Does not fit, and was not run."""
    leaves = gpt_leaves({"data": 8, "model": 1})
    error = Advice("memory", "error", "Does not fit: 1.46 GiB too much on every device.", "--microbatches 4")
    held = sum(of_role(leaves, r) for r in ("params", "optimizer", "batch", "rng"))
    return replace(
        attached(),
        strategy="dp",
        mesh=mesh({"data": 8}),
        leaves=leaves,
        memory=replace(
            memory(leaves, 8, 17626 * MIB - held, 16128 * MIB),
            buffers=(replace(LOGITS, reads="wte.embedding", kept=True),),
            others=(212, 14 * GIB),
        ),
        collectives=(Collective("all-reduce", ("data",), 8, 49, 9 * MIB, 831 * MIB),),
        sources=(),
        timing=Timing(6.1, 0, 0, None),
        advice=(error,),
        check=None,
    )


def wrong() -> Report:
    """The check failed in two leaves, and found noise in one."""
    failed = ("params.wte.embedding", "params.blocks.mlp.up.kernel")
    check = Check(False, 3.1e-3, 4.3e-4, 1e-4, "one device", ("params.attn.key.bias",), failed)
    return replace(attached(), check=check)


def noisy() -> Report:
    """The check passed but for leaves that carry rounding noise alone."""
    noise = ("state.params.attn.key.bias", "state.opt_state[0].mu.attn.key.bias")
    return replace(simulated(), check=replace(SAME, noise=noise, noise_in=((768, 768), (12, 768))))


def dry() -> Report:
    """Compiled for a slice that is not attached; not run."""
    leaves = gpt_leaves()
    return replace(
        attached(),
        options={"precision": "bf16", "rule": {"wte": "P(None,'data')"}, "dry_run": True},
        mesh=mesh(GPT, "topology"),
        memory=memory(leaves, 8, 4506 * MIB, 16128 * MIB),
        timing=predicted_timing(GPT_COLLECTIVES, None, 0),
        check=None,
    )


def unknown() -> Report:
    """Temporaries, peak and compile time are not known; nothing was timed."""
    leaves = gpt_leaves()
    timing = Timing(None, 4, 0, None)
    return replace(simulated(), memory=memory(leaves, 8, None, None), timing=timing, collectives=None)


def bare() -> Report:
    """Nothing but a mesh and a strategy: a report before anything is known."""
    return Report("step", "spmd", {}, mesh({"data": 2}, "simulated"))


def files() -> Report:
    """No time predicted; a cell too long to show whole, two files of which a part matters, one with a long line."""
    cell = [f"x{n} = f(x{n - 1}, {n})" for n in range(1, 121)]
    model = [f"        h{n} = self.dense(h{n - 1}, {n})" for n in range(1, 15)]
    long = ["y = " + " + ".join(f"w{n} @ x{n}" for n in range(40))]
    sources = (
        source("cell [12]", cell, home=True),
        source("model.py", model, numbers=(*range(28, 35), *range(207, 214))),
        source("layers.py", long),
    )
    texts = {(s.name, n): text.strip() for s in sources for n, text in zip(s.numbers, s.text, strict=True)}
    sizes = {("cell [12]", 20): 400, ("cell [12]", 24): 200, ("cell [12]", 90): 100, ("model.py", 31): 300}
    sizes |= {("model.py", 210): 50, ("layers.py", 1): 20}
    gathers = tuple(
        Collective("all-gather", ("data",), 4, 2, n * 512 * KIB, n * 768 * KIB, None, "forward", line, text, file)
        for (file, line), n in sizes.items()
        for text in [texts[file, line]]
    )
    return replace(simulated(), collectives=gathers, sources=sources)


def partly() -> Report:
    """Of some collectives no line is known, of some no axes, no time, no array and no exact count."""
    data, model = ("data",), ("model",)
    rows = (
        moved("all-gather", "data", 24, 8 * MIB, "params.w", (12, None), "forward"),
        Collective("all-reduce", data, 4, 3, 4 * MIB, 18 * MIB, 6e-4, "backward", exact=False),
        replace(moved("all-reduce", "model", 12, 2 * MIB, None, (14, None), None), exact=False),
        Collective("collective-permute", None, 2, 1, MIB, MIB),
        Collective("all-to-all", model, 2, 2, MIB, MIB, 2e-5, "update"),
        *(Collective("all-gather", data, 4, 1, n * KIB, 3 * n * KIB // 4, 1e-9 * n) for n in range(4, 80, 4)),
    )
    rows = tuple(replace(c, exposed=c.seconds) for c in rows)
    return replace(attached(), collectives=rows, timing=predicted_timing(rows, GPT_STEP, 20))


def changed() -> Report:
    """The text of the step's file can't be had any more, nor that of a module."""
    note = "this file has changed since the step was traced"
    notes = (SourceExcerpt("train.py", (), (), True, note), SourceExcerpt("gpt2.py", (), (), False, note))
    lines = {14: ("train.py", 44), 9: ("gpt2.py", 9), 15: ("gpt2.py", 15)}
    rows = (
        replace(c, source=None, called="train.py:41")
        if c.called
        else replace(c, source=None, file=lines[c.line or 0][0], line=lines[c.line or 0][1])
        for c in GPT_COLLECTIVES
    )
    return replace(attached(), collectives=tuple(rows), sources=notes)


def measured() -> Report:
    """The devices told their peaks, the compiler its largest buffers."""
    report = attached()
    assert report.memory is not None
    return replace(report, memory=with_measured(report.memory))


def overlapped() -> Report:
    """The order of the program known: gathers are hidden but for a tenth, sums are not; a range around the guess."""
    report = attached()
    assert report.timing is not None
    rows = tuple(
        replace(c, exposed=(0.1 if c.kind == "all-gather" else 1.0) * (c.seconds or 0.0))
        for c in report.collectives or ()
    )
    timing = replace(
        predicted_timing(rows, GPT_STEP, 20),
        predicted_low_s=0.0164,
        predicted_high_s=0.0512,
        overlap="scheduled",
    )
    return replace(report, collectives=rows, timing=timing)


def options() -> Report:
    """What the options of the line change, one of them not compiled."""
    report = attached()
    assert report.memory is not None and report.memory.per_device[0].peak is not None
    sent = sum(c.wire_bytes for c in report.collectives or ())
    own = replace(ALTERNATIVES[0], peak=report.memory.per_device[0].peak, sent=sent)
    return replace(report, options=ASKED, alternatives=(own, *ALTERNATIVES[1:]))


def trained() -> Report:
    """With the metrics of a run whose loss went astray, and a name of the step's that is markup."""
    return replace(attached(), metrics=metrics(astray=350, own={"<b>norm</b>": 1.5}))


def divided() -> Report:
    """Experts and positions over axes of their own, with the rows of each layer's experts and a causal ring."""
    leaves = tuple(
        leaf(f"blocks.{name}", shape, spec, AXES, why=why)
        for name, shape, spec, why in (
            ("router", (4, 512, 32), (), "ep: a copy on every device of expert"),
            ("up", (4, 32, 512, 2048), (None, "expert"), "ep: experts, dim 1 over expert"),
            ("down", (4, 32, 2048, 512), (None, "expert"), "ep: experts, dim 1 over expert"),
        )
    )
    made = replace(attached(), strategy="ep+sp", mesh=mesh(AXES), leaves=leaves)
    return with_divided(replace(made, memory=memory(leaves, 32, 700 * MIB, 16128 * MIB)))


_MADE = (attached, hinted, looped, simulated, over_hosts, too_big, wrong, noisy, dry, unknown, bare)
_MADE += (
    one_device,
    shapes,
    large,
    hostile,
    files,
    partly,
    changed,
    toy,
    measured,
    overlapped,
    options,
    staged,
    profiled,
    trained,
    divided,
)
SAMPLES = {made.__name__: made for made in _MADE}
