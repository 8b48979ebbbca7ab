"""What reports make of a job: rates, tables, one line; and how layers are grouped. No job runs."""

import pytest

from p3.cluster import messages
from p3.cluster.watching import words
from p3.cluster.watching.history import History, Pace
from p3.cluster.watching.view import Links, Process, Reports, view, waiting
from p3.top import screen
from p3.worker.groups import groups


# Rates


def test_rates_are_of_the_last_seconds_or_of_all_there_are():
    history = History()
    for second in range(0, 120, 5):
        history.add(second + 5.0, {"bytes": 1000.0 * second})
    assert history.over(10).per_s("bytes") == pytest.approx(1000)
    assert history.over(10).seconds == 10 and history.over(60).seconds == 60
    assert history.over(1000).seconds == 60, "what nobody looks back to is kept"
    young = History()
    young.add(3.0, {"bytes": 600})
    assert (young.over(10).per_s("bytes"), young.over(10).seconds) == (200, 3)


def test_however_often_somebody_asks_few_moments_are_kept():
    history = History()
    for tenth in range(1, 10000):
        history.add(tenth / 10, {"bytes": tenth})
    assert len(history._moments) < 20
    assert history.over(10).per_s("bytes") == pytest.approx(10)


def test_a_process_that_took_anothers_place_has_no_negative_rate():
    history = History()
    history.add(10.0, {"bytes": 5000})
    history.add(20.0, {"bytes": 10})
    assert history.over(5).per_s("bytes") == 0


def test_two_rounds_that_are_heard_of_at_once_make_no_pace():
    """As of a process that comes back to another scheduler: by a heartbeat, and by its report."""
    pace = Pace()
    for now, round in ((0.0, 38), (0.001, 39)):
        pace.note(now, round)
    assert pace.per_s(0.1, 10) == 0
    for now, round in ((1.0, 40), (2.0, 41)):
        pace.note(now, round)
    assert pace.per_s(2.0, 10) == pytest.approx(1.5)


def test_a_pace_of_slow_steps_is_exact_wherever_one_looks():
    pace = Pace()
    for round in range(30):
        pace.note(4.0 * round, round)
    for now in (116.0, 117.5, 119.9):
        assert pace.per_s(now, 10) == pytest.approx(0.25)
    assert pace.per_s(200, 10) == 0, "nothing was completed for a long time"


# Tables


def process(rank, machine, report, round=0, began=100.0):
    reports = Reports()
    reports.pace.note(began, 0)
    reports.pace.note(began + 20, round)
    if report is not None:
        reports.take(messages.check(report), began + 20)
    return Process(rank, "10.0.0.%d" % machine, "m%d" % machine, "runs", round, reports)


def of_worker(sent_to, waited_s=5.0, waits=None):
    return {
        "kind": "worker_reported", "at_s": 20.0, "last_round": 40, "bytes_sent": sum(sent_to), "bytes_received": 4000,
        "queued_slices": 3, "memory_bytes": 1 << 20, "waited_s": waited_s, "waits": waits or {},
        "servers": [[sent, sent // 2, 10, 10 * 0.001] for sent in sent_to],
    }  # fmt: skip


def of_server(late_s):
    return {
        "kind": "server_reported", "at_s": 20.0, "last_round": 40, "bytes_sent": 1000, "bytes_received": 2000,
        "queued_slices": 1, "memory_bytes": 1 << 20, "received_slices": 2, "value_bytes": 900, "buffer_bytes": 0,
        "late_s": late_s,
    }  # fmt: skip


def job(late_s=(0.0, 0.2), slow_server=None):
    """Two hosts with a worker and a server each."""
    waits = {"encoder": 4.0, "decoder": 1.0}
    reports = [of_worker([1000, 3000], waits=waits), of_worker([5000, 700])]
    if slow_server is not None:
        for report in reports:
            report["servers"][slow_server][3] = 10 * 0.3
    workers = [process(rank, rank + 1, report, 40) for rank, report in enumerate(reports)]
    servers = [process(rank, rank + 1, of_server(list(late_s)), 40) for rank in range(2)]
    links = Links()
    links.record(20.0, workers, servers)
    return messages.check(view(120.0, 20.0, 10.0, workers, servers, links))


def test_a_view_says_what_each_process_does():
    made = job()
    assert messages.decode(messages.encode(made)[4:]) == made
    first, second = made["workers"]
    assert (first["round"], first["steps_per_s"], first["sent_per_s"]) == (40, 2.0, 200.0)
    assert (first["waited_share"], first["group"], first["group_share"]) == (0.25, "encoder", 0.2)
    assert (second["group"], second["late_s"]) == ("", 0.2)
    assert made["servers"][0]["queue_s"] == pytest.approx(0.001)
    assert made["slowest_worker"] == 1 and made["slowest_server"] is None


def test_workers_of_other_ranks_than_the_first_have_rows_of_their_own():
    """As in a job that has grown, where a place between is empty."""
    workers = [process(rank, 1, of_worker([1000]), 40) for rank in (0, 3)]
    servers = [process(0, 1, of_server([0.0, 7.0, 7.0, 0.2]), 40)]
    made = messages.check(view(120.0, 20.0, 10.0, workers, servers, Links()))
    assert [(row["rank"], row["late_s"]) for row in made["workers"]] == [(0, 0.0), (3, 0.2)]
    assert made["slowest_worker"] == 3


def test_links_have_what_crosses_the_network_and_no_more():
    """Worker 0 sends 3000 to the other host and gets 1500; worker 1 sends 5000 and gets 2500."""
    first, second = job()["links"]
    assert (first["host"], first["processes"]) == ("10.0.0.1", 2)
    assert (first["sent_per_s"], first["received_per_s"]) == ((3000 + 2500) / 20, (1500 + 5000) / 20)
    assert (second["sent_per_s"], second["received_per_s"]) == (first["received_per_s"], first["sent_per_s"])


def test_nobody_is_slow_where_all_are_about_equal():
    made = job(late_s=(0.01, 0.02))
    assert made["slowest_worker"] is None, "4% of a step of 0.5 s"
    assert job(slow_server=1)["slowest_server"] == 1


def test_what_has_not_been_reported_is_shown_as_such():
    silent = process(0, 1, None)
    made = messages.check(view(120.0, 20.0, 10.0, [silent], [], Links()))
    assert (made["workers"][0]["age_s"], made["over_s"]) == (None, 0.0)
    assert "0 (silent)" in "\n".join(screen.lines(made))


def test_reports_tell_of_rounds_before_heartbeats_do():
    young = Reports()
    young.pace.note(100.0, 0)
    young.take(dict(of_worker([0]), last_round=17), 100.5)
    worker = Process(0, "10.0.0.1", "m1", "runs", 0, young)
    (row,) = view(100.6, 0.6, 10.0, [worker], [], Links())["workers"]
    assert (row["round"], row["steps_per_s"]) == (17, pytest.approx(34))


# In words


def test_a_job_in_one_line():
    assert words.line(job()) == (
        "round 40, 2 steps/s, workers waited 25% of the time, longest for encoder, links 325 B/s out, 325 B/s in, "
        "slowest worker 1 (10.0.0.2), 200 ms behind the first (over the last 20 s)"
    )
    assert words.line(waiting("1 of 2 workers")) == "the job has not begun: 1 of 2 workers missing"


@pytest.mark.parametrize("number, text", [
    (0, "0 B"), (999.4, "999 B"), (999.6, "1.00 kB"), (12345, "12.3 kB"), (9.996e6, "10.0 MB"), (2.5e10, "25.0 GB"),
    (5e15, "5000 TB"),
])  # fmt: skip
def test_numbers_have_three_digits(number, text):
    assert words.count(number, "B") == text


def test_a_table_has_all_processes_with_its_columns_under_each_other():
    drawn = screen.lines(job())
    workers = drawn[drawn.index("") + 1 :][:3]
    assert workers[0].split() == ["worker", "host", "round", "steps/s", "waited", "longest", "for", "sent/s",
                                  "received/s", "queue", "memory"]  # fmt: skip
    assert workers[1].split()[:7] == ["0", "10.0.0.1", "40", "2", "25%", "encoder", "20%"]
    ends = [line.index(text) + len(text) for line, text in zip(workers, ("round", " 40", " 40"))]
    assert len(set(ends)) == 1, workers
    assert [line.split()[0] for line in drawn if line[:1].isdigit()] == ["0", "1", "0", "1", "10.0.0.1", "10.0.0.2"]


def test_on_a_low_terminal_each_table_says_how_many_more_there_are():
    workers = [process(rank, rank, of_worker([0]), 40) for rank in range(50)]
    made = view(120.0, 20.0, 10.0, workers, [process(0, 0, of_server([0.0] * 50), 40)], Links())
    drawn = screen.lines(made, 24)
    assert len(drawn) <= 24 and sum(line.startswith("and ") for line in drawn) == 2, drawn


# Groups of layers


def grouped(names, most=10):
    return list(dict.fromkeys(groups(names, most).values()))


def named(*modules):
    return ["%s.%s" % (module, one) for module in modules for one in ("weight", "bias")]


def test_a_small_net_has_its_modules_for_groups():
    assert grouped(named("conv1", "conv2", "fc")) == ["conv1", "conv2", "fc"]
    assert grouped(["weight", "bias"]) == ["weight", "bias"]
    assert grouped(named("model.conv", "model.fc")) == ["model.conv", "model.fc"]
    assert groups([]) == {}


def test_the_blocks_of_a_deep_net_are_split_into_runs():
    blocks = ["transformer.h.%d.%s" % (block, part) for block in range(48) for part in ("attn", "mlp.in", "mlp.out")]
    found = grouped(named("transformer.wte", "transformer.wpe", *blocks, "transformer.ln_f"))
    assert {"transformer.wte", "transformer.wpe", "transformer.ln_f"} < set(found) and len(found) == 10
    runs = [name for name in found if name.startswith("transformer.h.")]
    assert runs[0] == "transformer.h.0-5" and runs[-1].endswith("-47")
    assert groups(named(*blocks))["transformer.h.47.mlp.out.bias"].endswith("-47")


@pytest.mark.parametrize("names", [
    [str(number) for number in range(161)],  # as Trainer of Gluon names keys
    named(*("layer%d.%d.conv%d" % (number // 18, number // 2 % 9, number % 2) for number in range(72))),
    named(*("a" * depth + ".x" * depth for depth in range(1, 90))),
    ["same"] * 3,
])  # fmt: skip
def test_each_name_has_one_group_and_there_are_about_ten(names):
    found = groups(names)
    assert found.keys() == set(names) and len(set(found.values())) <= 10
