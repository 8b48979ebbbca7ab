"""Traces of real jobs: every slice's life is whole and in order, on one clock, and the report names what was late."""

import json
import shutil
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from plugin_jobs import python, run, run_p3

from p3 import cli
from p3.errors import ConfigError
from p3.settings import Settings
from p3.trace import chrome, lives, reader, report, waits

session_module = pytest.importorskip("p3.worker.session", reason="the extension is not built")

WORKERS, SERVERS, ROUNDS = 2, 2, 3
SLICES = {"first": 6, "late": 4, "last": 1}  # of tests/jobs/traced.py, 20000 elements in each

IN_ORDER = [moment for moment in lives.MOMENTS if moment not in ("sent", "returned")]


def record(folder, *arguments, **settings):
    job = dict({"P3_LOCAL_AGGREGATION": "0"}, P3_TRACE=str(folder), P3_SLICE_ELEMENTS="20000", **settings)
    status, output = run_p3(WORKERS, SERVERS, python("traced.py", *arguments), **job)
    assert status == 0, output
    return folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Through shared memory, summed by the receiver."""
    return record(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """Through TCP, summed by threads, and with marks."""
    return record(tmp_path_factory.mktemp("marked"), "marks", P3_LOCAL="tcp", P3_SERVER_THREADS="2")


@pytest.fixture
def copied(recorded, tmp_path):
    return shutil.copytree(recorded, tmp_path / "copy")


def name_of(trace, key):
    return trace.keys[int(key)].name


def assert_in_order(of_lives):
    for earlier, later in zip(IN_ORDER, IN_ORDER[1:]):
        assert (of_lives[earlier] <= of_lives[later]).all(), (earlier, later)
    assert (of_lives["leaving"] <= of_lives["sent"]).all()
    assert (of_lives["returning"] <= of_lives["returned"]).all()


@pytest.mark.parametrize("job", ["recorded", "marked"])
def test_every_slice_of_every_round_has_a_whole_life_in_order(request, job):
    trace = lives.load(str(request.getfixturevalue(job)))
    assert [process.label for process in trace.processes] == [
        "worker 0 (127.0.0.1)", "worker 1 (127.0.0.1)", "server 0 (127.0.0.1)", "server 1 (127.0.0.1)"
    ]  # fmt: skip
    assert all(process.complete for process in trace.processes)
    found = sorted((life["worker"], name_of(trace, life["key"]), life["slice"], life["round"]) for life in trace.lives)
    assert found == sorted(
        (worker, name, index, number)
        for worker in range(WORKERS)
        for name, count in SLICES.items()
        for index in range(count)
        for number in range(1, ROUNDS + 1)
    )
    for moment in lives.MOMENTS:
        assert np.isfinite(trace.lives[moment]).all(), moment
    assert_in_order(trace.lives)
    assert set(trace.lives["server"]) == {0, 1}
    assert set(trace.lives["bytes"]) == {80000, (70001 - 3 * 20000) * 4, 40}
    assert [trace.keys[key].slices for key in sorted(trace.keys)] == list(SLICES.values())


def test_a_partition_of_a_key_of_rows_lives_as_a_slice_does_also_after_it_moved(tmp_path):
    settings = dict(P3_TRACE=str(tmp_path), P3_SLICE_ELEMENTS="20000", P3_LOCAL_AGGREGATION="0")  # 20 rows to a frame
    status, output = run_p3(WORKERS, SERVERS, python("traced_rows.py"), **settings)
    assert status == 0, output
    trace = lives.load(str(tmp_path))
    assert sorted(key.name for key in trace.keys.values()) == ["table", "w"]
    of_table = trace.lives[[name_of(trace, life["key"]) == "table" for life in trace.lives]]
    assert [(life["round"], life["worker"], life["slice"]) for life in of_table] == [
        (number, worker, index)
        for number in range(1, 5)
        for worker in range(WORKERS)
        for index in range(2 if number <= 2 else 5)
    ]
    assert_in_order(of_table)
    values = 50 * 1000 * 4
    for number in range(1, 5):
        pushed = of_table["bytes"][(of_table["round"] == number) & (of_table["worker"] == 0)].sum()
        assert values < pushed < 1.01 * values
    (events,) = [process.events for process in trace.processes if process.label.startswith("worker 1")]
    arrived = events[(events["frame"] == reader.ROWS) & (events["round"] == 1) & (events["slice"] == 0)]
    landed = of_table[(of_table["round"] == 1) & (of_table["worker"] == 1) & (of_table["slice"] == 0)]["landed"]
    ends = trace.seconds(1, arrived["time_ns"][arrived["kind"] == reader.RECEIVE_END])
    assert len(ends) == 3 and landed == ends.max()  # 50 rows
    stalls = {(stall.key, stall.round) for stall in trace.stalls}
    assert stalls == {(of_table["key"][0], number) for number in range(1, 5)}
    assert " of 2 landed last" in "\n".join(report.lines(trace, only_round=1))
    assert chrome.write(trace, str(tmp_path / "out.json")) > 0


def test_an_embedded_job_records_both_of_its_halves(tmp_path):
    with session_module.Session.open(Settings(trace=str(tmp_path))) as session:
        key, landing = session.declare("w", (3,), "float32"), np.zeros(3, "float32")
        session.init(key, np.zeros(3, "float32"), landing).wait(30)
        for _ in range(2):
            session.pushpull(key, np.ones(3, "float32"), landing).wait(30)
    trace = lives.load(str(tmp_path))
    assert trace.lives["round"].tolist() == [1, 2]
    assert_in_order(trace.lives)


def test_a_value_set_anew_does_not_replace_that_of_the_round(tmp_path):
    with session_module.Session.open(Settings(trace=str(tmp_path))) as session:
        key, landing = session.declare("w", (3,), "float32"), np.zeros(3, "float32")
        session.init(key, np.zeros(3, "float32"), landing).wait(30)
        session.pushpull(key, np.ones(3, "float32"), landing).wait(30)
        session.init(key, np.zeros(3, "float32"), landing).wait(30)
        session.pushpull(key, np.ones(3, "float32"), landing).wait(30)
    trace = lives.load(str(tmp_path))
    first, second = trace.lives
    assert_in_order(trace.lives)
    events = trace.processes[0].events
    values = events[(events["frame"] == reader.VALUE) & (events["kind"] == reader.RECEIVE_END)]
    assert values["round"].tolist() == [0, 1, 1, 2]
    landed = trace.seconds(0, values["time_ns"])
    assert (first["landed"], second["landed"]) == (landed[1], landed[3])


def test_without_the_setting_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with session_module.Session.open(Settings()) as session:
        session.declare("w", (3,), "float32")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("job", ["recorded", "marked"])
def test_the_report_names_the_late_key_and_the_late_worker(request, job):
    trace = lives.load(str(request.getfixturevalue(job)))
    of_worker_0 = [wait for wait in waits.waits(trace) if wait.worker == 0]
    assert [(name_of(trace, wait.key), wait.round) for wait in of_worker_0] == [("late", 1), ("late", 2), ("late", 3)]
    for wait in of_worker_0:
        assert wait.marked == (job == "marked")
        assert wait.life["last_worker"] == 1
        assert max(wait.stages, key=wait.stages.get) == waits.OTHERS
        last = waits.last_push(trace, wait.life)
        assert last["worker"] == 1 and last["ready"] > wait.life["ready"]

    text = list(report.lines(trace))
    (row,) = [line for line in text if line.startswith("late ")]
    assert row.endswith(waits.OTHERS)

    text = "\n".join(report.lines(trace, only_round=2))
    assert ("waited" if job == "marked" else "would have waited") in text
    assert "for late; its slice" in text and "worker 1's came last: ready " in text and "round 3" not in text


def test_stages_of_a_marked_wait_end_with_it(marked):
    trace = lives.load(str(marked))
    for wait in waits.waits(trace):
        longest = max(
            (stall for stall in trace.stalls if (stall.worker, stall.round) == (wait.worker, wait.round)),
            key=lambda stall: stall.end - stall.begin,
        )
        assert sum(wait.stages.values()) == pytest.approx(longest.end - wait.life["ready"])


def test_the_front_stands_where_nothing_later_could_pass():
    of_round = np.zeros(3, lives.LIFE)
    of_round["key"], of_round["priority"] = [5, 6, 7], [0, -1, -2]
    of_round["ready"] = [3.0, 2.0, 1.0]
    of_round["landed"] = [4.0, 9.0, 8.0]  # key 7 waits behind key 6, which alone holds the pass
    assert waits._front(of_round) == (6, 5.0)
    of_round["landed"] = [4.0, 2.5, 9.0]
    assert waits._front(of_round) == (7, 5.0)


def test_what_left_meanwhile_is_told_by_priority(recorded):
    trace = lives.load(str(recorded))
    of_lives = np.zeros(4, lives.LIFE)
    of_lives["bytes"], of_lives["priority"] = [1, 20, 300, 4000], [0, 5, -5, 0]
    of_lives["queued"] = [10, 11, 1, 0]
    of_lives["leaving"], of_lives["sent"] = [20, 12, 9, 5], [21, 13, 11, 9]  # the last has left before
    trace = trace._replace(lives=of_lives)
    assert waits.ahead(trace, of_lives[0], "leaving") == (20, 0, 300)
    of_lives["received"] = [30, 20, 21, 25]  # the second has arrived as the first leaves
    assert waits.on_their_way(trace, of_lives[0], "leaving") == 4300


def shift(folder, pattern, seconds):
    """Gives processes the clock of another machine, which is that much ahead."""
    for path in folder.glob(pattern + reader.PROCESS_SUFFIX):
        head, *rest = path.read_text().splitlines(keepends=True)
        head = dict(json.loads(head), boot="another")
        head["monotonic_ns"] += int(seconds * 1e9)
        path.write_text(json.dumps(head) + "\n" + "".join(rest))
        path = folder / path.name.replace(reader.PROCESS_SUFFIX, reader.EVENTS_SUFFIX)
        content = bytearray(path.read_bytes())
        np.frombuffer(content, reader.EVENT, offset=len(reader.MAGIC))["time_ns"] += int(seconds * 1e9)
        path.write_bytes(content)


@pytest.mark.parametrize("ahead_s", [5.0, -7.25])
@pytest.mark.parametrize("moved", ["worker-1-*", "*-1-*", "server-*"])
def test_clocks_of_another_machine_are_brought_together(recorded, copied, moved, ahead_s):
    shift(copied, moved, ahead_s)
    shifted, original = lives.load(str(copied)), lives.load(str(recorded))
    assert_in_order(shifted.lives)  # no slice arrives before it leaves
    for process, offset in zip(shifted.processes, shifted.offsets):
        if process.boot == "another":
            assert abs(offset.ns + ahead_s * 1e9) <= offset.uncertainty_ns
            assert 0 < offset.uncertainty_ns < 1e9
        else:
            assert offset == (0, 0)
    uncertainty_s = max(offset.uncertainty_ns for offset in shifted.offsets) * 1e-9
    for moment in lives.MOMENTS:
        between = np.diff(shifted.lives[moment] - original.lives[moment])
        assert (np.abs(between) <= 2 * uncertainty_s + 1e-6).all()
    assert any("clock of" in line and " s from that of " in line for line in report.lines(shifted))


def test_in_a_group_lives_are_whole_too_and_clocks_are_compared_by_what_its_members_exchange(tmp_path):
    """Each worker leads for one server, and nothing of a round goes from it to the other."""
    folder = record(tmp_path / "grouped", P3_GROUPS="2")
    trace = lives.load(str(folder))
    assert_in_order(trace.lives)
    through = {(int(life["worker"]), int(life["server"])) for life in trace.lives}
    assert through == {(0, 0), (1, 1), (0, reader.local_peer(1)), (1, reader.local_peer(0))}
    shift(folder, "*-1-*", 5.0)
    for path in folder.glob("*" + reader.EVENTS_SUFFIX):  # first values are no part of it
        content = path.read_bytes()
        events = np.frombuffer(content, reader.EVENT, offset=len(reader.MAGIC))
        path.write_bytes(content[: len(reader.MAGIC)] + events[(events["round"] > 0) | (events["peer"] < 0)].tobytes())
    shifted = lives.load(str(folder))
    assert_in_order(shifted.lives)
    for process, offset in zip(shifted.processes, shifted.offsets):
        assert (process.boot == "another") == (offset.ns != 0)
        assert process.boot != "another" or abs(offset.ns + 5e9) <= offset.uncertainty_ns < 1e9


def test_machines_that_exchanged_nothing_cannot_be_compared(copied):
    for path in copied.glob("server-*"):
        path.unlink()
    shift(copied, "worker-1-*", 1.0)
    with pytest.raises(ConfigError, match="no slices went both ways between worker 0 .* and worker 1 "):
        lives.load(str(copied))


def test_the_chrome_file_is_valid(marked, tmp_path):
    trace = lives.load(str(marked))
    path = tmp_path / "out.json"
    count = chrome.write(trace, str(path))
    events = json.loads(path.read_text())["traceEvents"]
    assert len(events) == count
    by_phase = {phase: [event for event in events if event["ph"] == phase] for phase in "MXisfbe"}
    assert sum(map(len, by_phase.values())) == count
    assert [event["args"]["name"] for event in by_phase["M"] if event["name"] == "process_name"] == [
        process.label for process in trace.processes
    ]
    threads = {(event["pid"], event["tid"]) for event in by_phase["M"] if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] in "Xisf"} <= threads

    ends = {}
    for event in sorted(by_phase["X"], key=lambda event: event["ts"]):  # one after the other on each thread
        thread = event["pid"], event["tid"]
        assert event["dur"] >= 0 and event["ts"] >= ends.get(thread, 0) - 0.002, event
        ends[thread] = event["ts"] + event["dur"]
    slices = WORKERS * sum(SLICES.values()) * ROUNDS
    assert len([event for event in by_phase["X"] if event["cat"] != "stall"]) == 4 * slices
    assert len([event for event in by_phase["X"] if event["cat"] == "stall"]) == len(trace.stalls) > 0

    begun = {event["id"]: event["ts"] for event in by_phase["s"]}
    ended = {event["id"]: event["ts"] for event in by_phase["f"]}
    assert len(begun) == 2 * slices and begun.keys() == ended.keys()
    assert all(begun[arrow] <= ended[arrow] for arrow in begun)
    assert len(by_phase["b"]) == len(by_phase["e"]) == WORKERS * len(SLICES) * ROUNDS


def test_the_command_writes_the_file_and_explains(copied, capsys):
    assert cli.main(["trace", str(copied), "--round", "1"]) == 0
    text = capsys.readouterr().out
    assert "4 processes, 3 keys, rounds 1 to 3" in text and "for late;" in text
    assert json.loads((copied / "trace.json").read_text())["traceEvents"]
    assert cli.main(["trace", str(copied)]) == 0  # its own file is in nobody's way


def test_what_is_printed_becomes_a_picture_for_light_and_dark_pages(copied, tmp_path, capsys):
    assert cli.main(["trace", str(copied), "--round", "1", "--svg", str(tmp_path / "trace")]) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line][:-1]
    for name in ("light", "dark"):
        root = ElementTree.parse(str(tmp_path / ("trace-%s.svg" % name))).getroot()
        drawn = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
        assert drawn == ["$ p3 trace %s --round 1" % copied, *printed]
    assert cli.main(["trace", str(copied), "--svg", str(tmp_path / "nowhere" / "trace")]) == 1
    assert "--svg %s" % (tmp_path / "nowhere" / "trace") in capsys.readouterr().err


def refusal(capsys, *arguments):
    assert cli.main(["trace", *map(str, arguments)]) == 1
    return capsys.readouterr().err


def test_a_recording_that_was_cut_short_is_read_as_far_as_it_goes(copied, capsys):
    (path,) = copied.glob("worker-1-*" + reader.EVENTS_SUFFIX)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])  # in the midst of an event
    assert cli.main(["trace", str(copied)]) == 0
    assert "worker 1 (127.0.0.1) did not end normally" in capsys.readouterr().out
    found = lives.load(str(copied)).lives
    assert np.isfinite(found["landed"][found["worker"] == 0]).all()
    of_worker_1 = found[found["worker"] == 1]
    known = sum(np.isfinite(of_worker_1[moment]).sum() for moment in lives.MOMENTS)
    assert known < sum(SLICES.values()) * ROUNDS * len(lives.MOMENTS)


def test_a_missing_process_is_named(copied, capsys):
    for path in copied.glob("server-1-*"):
        path.unlink()
    assert cli.main(["trace", str(copied)]) == 0
    assert "server 1 has no files here" in capsys.readouterr().out


def test_damaged_files_are_refused_with_their_name(copied, capsys):
    (path,) = copied.glob("server-0-*" + reader.EVENTS_SUFFIX)
    good = path.read_bytes()
    path.write_bytes(b"x" + good[1:])
    assert "%s is damaged or not a file of P3_TRACE" % path in refusal(capsys, copied)
    path.write_bytes(good[: len(reader.MAGIC)] + b"\xff" * 64 + good[len(reader.MAGIC) :])
    assert "%s is damaged: event 0 is of an unknown kind" % path in refusal(capsys, copied)
    path.unlink()
    assert "%s cannot be read: No such file" % path in refusal(capsys, copied)


@pytest.mark.parametrize(
    "text, problem",
    [
        ("", "is damaged"),
        ("[]\n", "is damaged"),
        ("no JSON\n", "cannot be read"),
        ('{"kind": "process", "version": 99}\n', "is of another version of P3"),
        ('{"kind": "process", "version": 3, "role": "worker"}\n', "is damaged"),
    ],
)
def test_damaged_descriptions_are_refused_with_their_name(copied, capsys, text, problem):
    (path,) = copied.glob("worker-0-*" + reader.PROCESS_SUFFIX)
    path.write_text(text)
    assert "%s %s" % (path, problem) in refusal(capsys, copied)


def test_what_is_no_trace_is_refused(copied, tmp_path, capsys):
    assert "holds no trace: run the job with P3_TRACE=" in refusal(capsys, tmp_path / "nowhere")
    assert "no round 9; its rounds are 1 to 3" in refusal(capsys, copied, "--round", "9")
    assert "--out /dev/null/x cannot be written" in refusal(capsys, copied, "--out", "/dev/null/x")
    for path in list(copied.glob("worker-0-*")):
        shutil.copy(path, path.with_name(path.name.replace("worker-0-", "worker-0-1")))
    assert "holds two traces of worker 0" in refusal(capsys, copied)


def test_a_directory_that_cannot_be_written_is_told_by_every_role(tmp_path):
    with pytest.raises(ConfigError, match="worker 0 .*P3_TRACE='/dev/null/t': cannot write .*Not a directory"):
        session_module.Session.open(Settings(trace="/dev/null/t"))
    status, output = run_p3(1, 1, python("traced.py"), P3_TRACE="/dev/null/t")
    assert status == 1
    assert "P3_TRACE='/dev/null/t': cannot write" in output


def test_the_replay_marks_what_it_waits_for(tmp_path):
    options = "--store p3_sync --model sockeye --size 0.005 --compute 0 --iterations 2 --warmup 0".split()
    replay = (
        "import sys; from p3.measure.replay import gpu_clock, worker; gpu_clock.READY_S = 0; "
        "sys.exit(worker.main(sys.argv[1:]))"
    )
    status, output = run([sys.executable, "-c", replay, *options], P3_TRACE=str(tmp_path))
    assert status == 0, output
    trace = lives.load(str(tmp_path))
    assert {stall.round for stall in trace.stalls} == {0, 1}  # each pass waits for the round before it
    assert {stall.key for stall in trace.stalls} == set(trace.keys)
    assert all(stall.begin <= stall.end for stall in trace.stalls)
    assert any("forward pass waited for longest" in line for line in report.lines(trace))
