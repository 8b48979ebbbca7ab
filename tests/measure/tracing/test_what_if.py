"""`p3 trace --what-if`: the run as it was recorded, and the same changed, as `p3 simulate` has it."""

import re
import shutil

import numpy as np
import pytest
from plugin_jobs import python, run_p3

from p3 import cli
from p3.errors import ConfigError
from p3.settings import Settings
from p3.trace import lives

session_module = pytest.importorskip("p3.worker.session", reason="the extension is not built")
what_if = pytest.importorskip("p3.measure.tracing.what_if", reason="the simulator is not built")
from p3.measure import compressions  # noqa: E402
from p3.measure.compressions import Compression  # noqa: E402
from p3.plan.strategy import Cut, Strategy  # noqa: E402


def record(folder, **settings):
    settings = {"P3_LOCAL_AGGREGATION": "0", "P3_SLICE_ELEMENTS": "20000", "P3_TRACE": str(folder), **settings}
    status, output = run_p3(2, 2, python("traced.py"), **settings)
    assert status == 0, output
    return folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Two workers and two servers on one host, in slices of 20000 elements: 760 kB, more than 0.4 s an iteration."""
    return record(tmp_path_factory.mktemp("recorded"))


def as_of_two_hosts(recorded, folder):
    """The same run, as if rank 1 of each had been on another host."""
    shutil.copytree(recorded, folder)
    for path in folder.glob("*-1-*.process.json"):
        path.write_text(path.read_text().replace("127.0.0.1", "10.0.0.2"))
    return folder


@pytest.fixture
def on_two_hosts(recorded, tmp_path):
    return as_of_two_hosts(recorded, tmp_path / "two")


def table(text):
    """By the name of the row: seconds and ratio."""
    rows = re.findall(r"^ *(\S.*?)  +([\d.]+)  +([\d.]+)$", text, re.M)
    return {name: (float(seconds), float(ratio)) for name, seconds, ratio in rows}


def told(capsys, *arguments):
    assert cli.main(["trace", *map(str, arguments)]) == 0
    return table(capsys.readouterr().out)


def test_the_run_as_it_was_is_what_is_changed(recorded):
    setting = what_if.recorded_setting(lives.load(str(recorded)), None)
    assert (setting.network.hosts, setting.workers_per_host, setting.servers) == (1, 2, 2)
    assert (setting.slice_elements, setting.strategy, setting.compression) == (20000, Strategy(), None)
    assert (setting.local_aggregation, setting.sparse, setting.model.bytes) == (False, {}, 4 * (120000 + 70001 + 10))


def test_a_run_in_groups_is_simulated_in_groups(on_two_hosts, tmp_path, capsys):
    grouped = as_of_two_hosts(record(tmp_path / "grouped", P3_GROUPS="2"), tmp_path / "of two hosts")
    assert what_if.recorded_setting(lives.load(str(grouped)), (20.0,)).groups == (2,)
    assert what_if.recorded_setting(lives.load(str(on_two_hosts)), (20.0,)).groups == ()
    assert list(told(capsys, grouped, "--rate", "20mbit", "--what-if", "rate=40mbit"))[-1] == "rate=40mbit"


def test_what_ifs_are_told_beside_the_run_and_are_what_simulate_says(recorded, capsys):
    changes = ["hosts=2,rate=20mbit", "rate=20mbit,codec=int8-bf16,hosts=2", "hosts=2,rate=20mbit,slice=5000,servers=3"]
    rows = told(capsys, recorded, *(word for change in changes for word in ("--what-if", change)))
    assert list(rows) == ["as recorded", "as simulated", *changes]
    recorded_s, simulated_s = rows["as recorded"][0], rows["as simulated"][0]
    assert 0.35 < recorded_s < 10, "of which 0.4 s are slept"
    assert rows["as simulated"][1] == 1.0
    for seconds, ratio in rows.values():
        assert ratio == pytest.approx(seconds / simulated_s, abs=0.01)
    run = ["--recorded", str(recorded), "--workers-per-host", "2", "--no-local-aggregation", "--rate", "20mbit",
           "--hosts", "2"]  # fmt: skip
    for change, options in zip(changes, (
        ["--servers", "2", "--slice-elements", "20000"],
        ["--servers", "2", "--slice-elements", "20000", "--compression", "int8-bf16"],
        ["--servers", "3", "--slice-elements", "5000"],
    )):  # fmt: skip
        assert cli.main(["simulate", *run, *options]) == 0
        iteration_s = float(re.search(r"^iteration ([\d.]+) s", capsys.readouterr().out, re.M).group(1))
        assert rows[change][0] == pytest.approx(iteration_s, abs=0.0006)
    assert rows[changes[1]][0] < rows[changes[0]][0]


def test_several_hosts_need_the_rate_of_their_links(on_two_hosts, capsys):
    assert cli.main(["trace", str(on_two_hosts), "--what-if", "codec=int8"]) == 1
    assert "the run was on 2 hosts, and no trace tells the rate of their links: say it, as --rate 100mbit" in (
        capsys.readouterr().err
    )
    rows = told(capsys, on_two_hosts, "--rate", "20mbit", "--what-if", "codec=int8", "--what-if", "hosts=4")
    assert rows["codec=int8"][0] < rows["as simulated"][0] < rows["hosts=4"][0]
    setting = what_if.recorded_setting(lives.load(str(on_two_hosts)), (20.0, 10.0))
    assert (setting.network.up_mbit, setting.servers, setting.workers_per_host) == ((20.0, 10.0), None, 1)
    more = what_if.changed(setting, (20.0, 10.0), what_if.parse("hosts=3"))
    assert (more.network.down_mbit, more.server_hosts, more.workers) == ((20.0, 10.0, 10.0), [0, 1, 2], [0, 1, 2])
    each = what_if.changed(setting, (20.0, 10.0), what_if.parse("rate=4mbit:3mbit:2mbit,hosts=3"))
    assert each.network.up_mbit == (4.0, 3.0, 2.0), "hosts come first, however it is written"


def test_codecs_rows_and_a_strategy_of_the_run_are_in_it(tmp_path):
    with session_module.Session.open(Settings(trace=str(tmp_path))) as session:
        store = session.new_store(Strategy(Cut((0,)), {"w": Cut(slice=500)}))
        session.set_option(store, "compression", {"type": "2bit", "threshold": 0.25})
        session.set_option(store, "value_compression", {"type": "bf16"})
        dense = session.declare("w", (100, 100), "float32", store)
        rows = session.declare("table", (50, 10), "float32", store, sparse=True)
        bias, landing = session.declare("bias", (50,), "float32", store), np.zeros(50, np.float32)
        weights, table = np.zeros((100, 100), np.float32), np.zeros((50, 10), np.float32)
        session.wait([session.init(dense, weights.copy(), weights), session.init(rows, table.copy(), table),
                      session.init(bias, landing.copy(), landing)])  # fmt: skip
        for _ in range(3):
            ids, values = np.arange(5), np.ones((5, 10), np.float32)
            pushed = session.pushpull(rows, (ids, values), table, 1)
            of_bias = session.pushpull(bias, landing + 1, landing)
            session.wait([pushed, of_bias, session.pushpull(dense, weights + 1, weights)])
    setting = what_if.recorded_setting(lives.load(str(tmp_path)), None)
    assert setting.compression == Compression("2bit:0.25", "bf16")
    assert setting.slice_elements == 500
    own = {"w": Cut((0,)), "bias": Cut((0,), 50000), "table": Cut((0,))}
    assert setting.strategy == Strategy(keys=own, path="of the run")
    changed = what_if.changed(setting, None, what_if.parse("slice=700"))
    assert (changed.slice_elements, set(changed.strategy.keys.values())) == (700, {Cut((0,))})
    assert setting.sparse == {"table": pytest.approx(0.1, rel=0.5)}, "5 of 50 rows, with their numbers"


def test_keys_of_a_run_keep_their_own_codecs(tmp_path):
    with session_module.Session.open(Settings(trace=str(tmp_path))) as session:
        store = session.new_store(Strategy())
        of_large = {"compression": {"type": "topk", "ratio": 0.1, "value_bits": 4}}
        keys = {
            "large": session.declare("large", (200, 100), "float32", store, options=of_large),
            "small": session.declare("small", (50, 100), "float32", store),
            "bias": session.declare("bias", (50,), "float32", store, options=of_large),
        }
        landing = {name: np.zeros(key.shape, np.float32) for name, key in keys.items()}
        session.wait([session.init(key, landing[name].copy(), landing[name]) for name, key in keys.items()])
        for _ in range(3):
            session.wait([session.pushpull(key, landing[name] + 1, landing[name]) for name, key in keys.items()])
    setting = what_if.recorded_setting(lives.load(str(tmp_path)), None)
    assert setting.compression is None
    found = {name: setting.compression_of(name) for name in keys}
    assert found == {"large": Compression("topk:0.1:4", "exact"), "small": None, "bias": found["bias"]}
    pushed = {name: compressions.of_push(key.shape, 50, found[name]) for name, key in keys.items()}
    assert pushed["small"] == pushed["bias"] == 200 > 4 * pushed["large"], "topk leaves biases as they are"
    changed = what_if.changed(setting, None, what_if.parse("codec=int8"))
    assert {changed.compression_of(name) for name in keys} == {Compression("int8", "int8")}


def test_servers_that_the_runs_strategy_names_cannot_go(recorded):
    trace = lives.load(str(recorded))
    keys = {number: key._replace(servers=(1,)) for number, key in trace.keys.items()}
    with pytest.raises(ConfigError, match="the strategy of the run, key .*: server 1 is named, but the job has 1"):
        list(what_if.lines(trace._replace(keys=keys), None, [what_if.parse("servers=1")]))


@pytest.mark.parametrize("options, said", [
    (["--what-if", "host=2"], "--what-if host=2: 'host=2' is no change; there are hosts=, rate=, servers=, slice=, "),
    (["--what-if", "hosts=2,,"], "'' is no change"),
    (["--what-if", "hosts=2,hosts=3"], "--what-if hosts=2,hosts=3: there are two of hosts="),
    (["--what-if", "rate=20"], "--what-if rate=20: rate: '20' is not a rate such as 800mbit"),
    (["--what-if", "slice=0"], "slice: '0' is not a number from 1"),
    (["--what-if", "codec=int5"], "codec: compression 'int5': 'int5' is no codec"),
    (["--what-if", "hosts=2"], "the run was on one host, so nobody knows of a link: add rate=, as hosts=2,rate=100"),
    (["--what-if", "rate=20mbit:10mbit"], "2 rates are given for 1 hosts"),
    (["--rate", "fast"], "'fast' is not a rate"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_by_name(recorded, capsys, options, said):
    assert cli.main(["trace", str(recorded), *options]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("moved, said", [
    ("server-1", "the trace has no servers, or some on hosts without workers"),
    ("worker-1", "2 workers were on 2 hosts"),
])  # fmt: skip
def test_a_job_that_the_simulator_does_not_know_is_refused(recorded, tmp_path, moved, said):
    folder = shutil.copytree(recorded, tmp_path / "copy")
    (path,) = folder.glob(moved + "-*.process.json")
    path.write_text(path.read_text().replace("127.0.0.1", "10.0.0.2"))
    trace = lives.load(str(folder))
    if moved == "worker-1":
        trace = trace._replace(processes=[trace.processes[0], *trace.processes])
        said = "3 workers were on 2 hosts; the simulator has as many on each"
    with pytest.raises(ConfigError, match=said):
        what_if.recorded_setting(trace, (20.0,))


def test_one_round_tells_no_iteration(tmp_path):
    with session_module.Session.open(Settings(trace=str(tmp_path))) as session:
        key, landing = session.declare("w", (3,), "float32"), np.zeros(3, np.float32)
        session.init(key, landing.copy(), landing).wait(30)
        session.pushpull(key, landing + 1, landing).wait(30)
    trace = lives.load(str(tmp_path))
    with pytest.raises(ConfigError, match="holds no two rounds|come all at once"):
        list(what_if.lines(trace, None, []))
