"""A notebook on hosts looks as one without: what comes of pagers, progress bars, prompts, settings and reports."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.utils.capture import capture_output
from support.hosts_notebook import LOOP, STEP, Hosts, later, once, training

from jaxshard_magic.hosts.cell_run import NOT_BEGUN
from jaxshard_magic.notebook import hosts_output
from jaxshard_magic.notebook.hosts_output import HostsOutput
from jaxshard_magic.report import Measured

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two hosts that train."""
    with training(tmp_path_factory.mktemp("hosts"), "%%shard fsdp") as found:
        yield found


def folded(said: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> str:
    """What of two hosts' output is shown beside host 0's."""
    shown: list[dict[str, str]] = []
    monkeypatch.setattr(hosts_output, "display", lambda data, raw: shown.append(data))
    output = HostsOutput(None, 2, lambda *_: None)
    for host, text in said:
        output.handle_message(host, {"header": {"msg_type": "stream"}, "content": {"name": "stdout", "text": text}})
    output.show_differences()
    return "".join(data["text/plain"] for data in shown)


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        ("a\n", "a\n", ""),
        ("a\n", "b\n", "host 1: b"),
        ("\r 0% 9 it/s\r100% 9 it/s\n", "\r 0% 8 it/s\r100% 8 it/s\n", ""),
        ("\r 0%\r100%\na\n", "\r 0%\r100%\nb\n", "host 1: 100%\nhost 1: b"),
        ("/tmp/ipykernel_17/4.py:2: careful\n", "/tmp/ipykernel_19/4.py:2: careful\n", ""),
        ("<Line at 0x7f01>\n", "<Line at 0x7f02>\n", ""),
    ],
)
@pytest.mark.no_jax
def test_another_hosts_output_is_shown_where_it_says_something_else(
    first: str, second: str, shown: str, monkeypatch: pytest.MonkeyPatch
):
    assert folded([(0, first), (1, second)], monkeypatch) == shown


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (
            "print(12345)\nprint(2.5956)\nprint('1000 steps')\nprint(7, end='')",
            "12345\n2.5956\n1000 steps\n7",
        ),
        ("print('UsageError: mine')\nprint('[Gloo] Rank 0 is connected to 1')", None),
        ("for i in range(3): print(f'\\r{i} of 3', end='')", "\r0 of 3\r1 of 3\r2 of 3"),
        ("print('äöü 漢字 🎉', repr(b'\\xff'))", "äöü 漢字 🎉 b'\\xff'\n"),
        ("_ = os.write(1, '7\\n漢字 2.5\\n'.encode() * 999)", "7\n漢字 2.5\n" * 999),
        ("_ = os.write(1, b'\\xff raw')", "\ufffd raw"),
        ("import ctypes\n_ = ctypes.CDLL(None).printf(b'%d steps', 12345)", "12345 steps"),
        ("import subprocess\n_ = subprocess.run(['echo', '9'])", "9\n"),
        ("import threading\nt = threading.Thread(target=print, args=(5,))\nt.start()\nt.join()", "5\n"),
        ("for i in range(2000): print(i, flush=True)", "".join(f"{i}\n" for i in range(2000))),
        ("print('x' * 10**6)", "x" * 10**6 + "\n"),
    ],
)
def test_what_a_cell_prints_is_shown_to_the_letter(hosts: Hosts, cell: str, said: str | None):
    shown = hosts.cell(cell).stdout
    assert shown == ("UsageError: mine\n[Gloo] Rank 0 is connected to 1\n" if said is None else said)


def test_numbers_are_whole_where_devices_connect_for_the_first_time(hosts: Hosts):
    sums = "jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, {axes}), mesh=mesh, in_specs=P(), out_specs=P()))"
    hosts.cell("from jax.sharding import PartitionSpec as P\nmesh = jax.make_mesh((2, 2, 2), ('a', 'b', 'c'))")
    cell = "for axes in (('a',), ('b',), ('a', 'b'), ('a', 'c'), ('a', 'b', 'c')):\n"
    cell += f"    print(1234567)\n    print(float({sums.format(axes='axes')}(2.5956)))\n    print('1000 steps')"
    lines = hosts.cell(cell).stdout.splitlines()
    assert lines[::3] == ["1234567"] * 5 and lines[2::3] == ["1000 steps"] * 5
    assert [float(line) for line in lines[1::3]] == pytest.approx([2.5956 * n for n in (2, 2, 4, 4, 8)], rel=1e-5)


def test_other_rows_on_one_host_are_told_and_all_hosts_go_on(hosts: Hosts):
    hosts.cell(f"%%shard fsdp --data per-host\n{STEP}")
    loop = "n = 0\nfor i in range(5):\n    rows = {rows}\n"
    loop += "    state, loss = train_step(state, {{'x': x[:rows], 'y': x[:rows]}})\n    n += 1"
    line, _ = hosts.fails(loop.format(rows="12 if i == 3 and jax.process_index() else 16"))
    assert line == (
        "train_step: batch.x is float32[16, 32] on host 0 and float32[12, 32] on host 1. Give all hosts as many rows: "
        "leave out a short last batch, or fill it up"
    )
    assert hosts.everywhere("n") == [3, 3]
    hosts.cell(loop.format(rows="12 if i == 3 else 16") + "\nassert np.isfinite(float(loss))")


def test_other_data_on_one_host_is_seen_on_first_calls_and_in_samples(hosts: Hosts):
    hosts.cell(f"%%shard fsdp\n{STEP}for _ in range(40): state, loss = train_step(state, batch)")
    other = "{k: v + {when} * jax.process_index() for k, v in batch.items()}"
    for when, most in (("(i >= 0)", 0), ("(i > 70)", 128)):
        cell = f"for i in range(200): state, loss = train_step(state, {other.replace('{when}', when)})"
        line, _ = hosts.fails(cell)
        assert line.startswith("train_step: batch.x is not the same on all 2 hosts")
        assert max(hosts.everywhere("i")) <= most


def test_a_model_with_typed_keys_is_gathered_and_rescued(hosts: Hosts):
    hosts.cell(
        "from flax import nnx\nimport optax\n"
        "class Net(nnx.Module):\n    def __init__(self, rngs):\n"
        "        self.a, self.drop = nnx.Linear(32, 32, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)\n"
        "    def __call__(self, x): return self.drop(self.a(x))\n"
        "model = Net(nnx.Rngs(0))\noptimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)"
    )
    step = "def net_step(model, optimizer, x):\n"
    step += "    loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)\n"
    step += "    optimizer.update(model, grads)\n    return loss\nnet_step(model, optimizer, x)"
    hosts.cell(f"%%shard dp --step net_step\n{step}")
    hosts.cell("kept = net_step.gather(nnx.state(model))\nassert len(kept['a']['kernel'][...].devices()) == 1")
    said = hosts.cell("%shard rescue model kept optimizer").stdout
    assert "of typed keys their numbers" in said
    model = hosts.notebook["model"]
    assert model["a"]["kernel"].shape == (32, 32) and model["drop"]["rngs"]["key"].shape == (2,)
    assert (hosts.notebook["kept"]["a"]["kernel"] == model["a"]["kernel"]).all()
    assert hosts.notebook["optimizer"]["step"] == 1


def test_a_question_is_answered_by_the_hosts(hosts: Hosts):
    hosts.cell("def only_there(x):\n    'Twice of it.'\n    return 2 * x")
    for asked in ("only_there?", "?only_there", "x = 1\nonly_there?"):
        (answer,) = hosts.cell(asked).outputs
        assert "Twice of it." in answer.data["text/plain"]
    assert hosts.cell("nowhere?").stdout == "Object `nowhere` not found.\n"
    (answer,) = hosts.cell("%%shard?").outputs
    assert "train step sharded over the mesh" in answer.data["text/plain"]


@pytest.mark.parametrize("asks", ["input('name? ')", "import getpass\ngetpass.getpass()", "breakpoint()"])
def test_what_waits_for_somebody_to_type_is_one_line_and_does_not_wait(hosts: Hosts, asks: str):
    line, said = hosts.fails(asks)
    assert line.startswith("nobody types on a host") and "%%here" in line
    assert "Traceback" not in said


def test_a_report_that_is_shown_again_keeps_its_number(hosts: Hosts):
    hosts.cell(f"%%shard fsdp\n{STEP}")
    number = hosts.magics.session.history[-1].number
    hosts.cell("%shard")
    assert [r.number for r in hosts.magics.session.history].count(number) == 1
    assert hosts.magics.session.history[-1].number == number
    hosts.cell("for _ in range(3):\n    state, loss = train_step(state, batch)")
    hosts.cell("%shard")
    again = hosts.magics.session.history[-1]
    assert again.number == number and again.timing is not None and again.timing.calls >= 3


def test_the_loop_of_a_later_cell_has_its_numbers_in_the_report(hosts: Hosts):
    hosts.cell(f"%%shard fsdp\n{STEP}")
    said = hosts.cell("for _ in range(7):\n    state, loss = train_step(state, batch)\nprint(float(loss))")
    hosts.cell("%shard")
    metrics = hosts.magics.session.history[-1].metrics
    assert metrics is not None and metrics.steps == 7
    assert metrics["loss"].last[-1] == pytest.approx(float(said.stdout), rel=1e-5)


def test_trials_are_in_the_history_and_a_search_shows_the_chosen_step(hosts: Hosts):
    hosts.cell(f"%%shard dp,fsdp\n{STEP}")
    tried = [t.report.number for t in hosts.magics.session.comparison.trials if t.report is not None]
    kept = hosts.notebook.run("%shard history").rows
    assert len(tried) == 2 and {*tried} <= {row.id for row in kept}
    said = hosts.cell(f"%%shard auto --among dp,fsdp --budget 60\n{STEP}")
    (shown,) = [o.data["text/plain"] for o in said.outputs if "report " in o.data.get("text/plain", "")]
    last = hosts.magics.session.history[-1]
    assert last.timing is not None and last.timing.calls == 1
    assert f"report {last.number}" in shown and "Not run" not in shown


def test_where_the_time_of_a_step_goes_is_told_of_the_devices_of_all_hosts(hosts: Hosts):
    hosts.cell(f"%%shard fsdp --profile 2\n{STEP}")
    report = hosts.magics.session.history[-1]
    assert report.measured is not None and (report.measured.read, report.timing.calls) == (2, 1)
    for found in (report.measured, recorded_again(hosts)):
        assert [each.device for each in found.devices] == [*range(8)]
        assert {row.file for row in found.lines} == {report.sources[0].name}
        assert found.unknown is None or found.unknown.seconds < 0.01 * found.step_s.median
    line, _ = hosts.fails("%shard profile 101")
    assert "profile records 1 to 100 steps, not 101" in line
    hosts.cell("state, loss = train_step(state, batch)")


def recorded_again(hosts: Hosts) -> Measured:
    before = hosts.magics.session.history[-1]
    shown = hosts.cell("%shard profile 1")
    report = hosts.magics.session.history[-1]
    assert report.number == before.number and report.measured is not None and report.measured.read == 1
    assert "lanes begin with its own first operation" in shown.outputs[-1].data["text/html"]
    return report.measured


def test_ctrl_c_in_a_recording_stops_all_hosts_and_they_can_record_again(hosts: Hosts):
    hosts.cell(f"%%shard fsdp --profile 1\n{STEP}")
    later(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    line, _ = hosts.fails("%shard profile 100")
    assert line == NOT_BEGUN or (line.startswith("Stopped") and "the same on all 2 hosts" in line)
    recorded_again(hosts)


def test_a_loop_on_hosts_has_the_numbers_of_each_of_its_steps(hosts: Hosts):
    loop = "losses = []\nfor _ in range(6):\n    state, loss = train_step(state, batch)\n    losses.append(float(loss))"
    hosts.cell(f"%%shard fsdp\n{STEP}\n{loop}")
    metrics = hosts.magics.session.history[-1].metrics
    assert metrics is not None and (metrics.steps, metrics.skipped) == (7, 0)
    loss, (first, other) = metrics["loss"], hosts.everywhere("losses")
    assert first == other and loss.step == (*range(1, 8),)
    assert loss.last[1:] == pytest.approx(first, rel=1e-5)  # six digits are kept


def test_a_loop_that_is_stopped_is_told_once_with_its_report_behind_it(hosts: Hosts, tmp_path: Path):
    third = tmp_path / "third step"
    once(third.exists, lambda: os.kill(os.getpid(), signal.SIGINT))
    with capture_output() as said:
        error = hosts.notebook.fails(f"%%shard dp\n{STEP}\n{LOOP}    if n == 3: open({str(third)!r}, 'w').close()")
    assert str(error).startswith("Stopped at step ") and ", line " in str(error)
    assert f"{said.stdout}{said.stderr}".count("Stopped at") == 1
    assert "Stopped at" in said.outputs[-1].data["text/plain"]
    last = hosts.magics.session.history[-1]
    assert last.ended is not None and last.ended.calls > 1


def test_a_setting_of_the_kernel_is_one_of_the_hosts(hosts: Hosts):
    found = "get_ipython().magics_manager.registry['ShardMagics'].session.options_limit"
    hosts.cell("%config ShardSession.options_limit = 17.0")
    assert hosts.cell(f"print({found})").stdout == "17.0\n"


def test_devices_of_all_hosts_are_counted_through(hosts: Hosts):
    hosts.cell(f"%%shard fsdp\n{STEP}")
    report = hosts.magics.session.history[-1]
    assert report.mesh.devices == tuple(range(8))
    assert [d.device for d in report.memory.per_device] == [*range(8)]


def test_what_lies_in_parts_can_not_be_rescued_and_the_line_says_what_does_it(hosts: Hosts):
    hosts.cell(
        "from jax.sharding import NamedSharding, PartitionSpec as P\n"
        "cut = NamedSharding(train_step.mesh, P('data'))\n"
        "parts = jax.make_array_from_callback((8,), cut, lambda at: np.ones(8)[at])"
    )
    line, _ = hosts.fails("%shard rescue parts")
    assert "none of which has all of it" in line and ".gather(...)" in line


def test_names_of_the_hosts_are_explored(hosts: Hosts):
    said = hosts.cell("%shard explore state")
    assert "state.up" in said.stdout + "".join(o.data["text/plain"] for o in said.outputs)


def test_axes_alone_make_a_mesh_over_the_same_hosts_and_another_machine_ends_them(hosts: Hosts):
    pids = hosts.pids
    shown = hosts.cell("%mesh data=4 model=2").outputs[-1].data["text/plain"]
    assert shown.startswith("data=4 model=2   8 simulated CPU devices on 2 hosts") and hosts.pids == pids
    assert hosts.cell("print(state['up'].shape)").stdout == "(32, 64)\n"
    line, _ = hosts.fails("%mesh data=16")
    assert "the mesh takes 16: after %mesh --close, %mesh hosts:2 data=16 starts it with as many" in line
    hosts.cell("%mesh data=8")
    assert hosts.cell("%mesh cpu:8 data=8;").stdout.startswith("hosts:2 ended, with what was on it")
    assert hosts.cell("print(__import__('os').getpid())").stdout == f"{os.getpid()}\n"
