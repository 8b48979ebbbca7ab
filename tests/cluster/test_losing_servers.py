"""P3_ON_SERVER_LOSS=continue: servers die at random moments, and all sums keep their bits; and so do values where each
worker keeps what servers would that update."""

import os
import random
import re
import sys
import uuid

import pytest
from plugin_jobs import SCRIPTS
from processes import PYTHONPATH, Process

from p3.measure.chaos import strike

STEPS, WORKERS, SERVERS = 12, 3, 3
CUT = {"P3_SLICE_ELEMENTS": "10000"}
SLICES = STEPS * (4 * 12 + SERVERS)  # that come to each worker
CONTINUE = ("--on-server-loss", "continue")
# A job whose stores have optimizers, and how many slices come to each worker in it.
UPDATING = {"script": "losing_updating_servers.py", "P3_ON_SERVER_LOSS": "continue"}
UPDATING_SLICES = STEPS * 8 * 9


def run(folder, processes, *options, script="losing_servers.py", arguments=(STEPS,), servers=SERVERS, **env):
    argv = [sys.executable, "-m", "p3", "run", "-n", str(WORKERS), "-s", str(servers), *options, sys.executable]
    variables = {**strike.environment(uuid.uuid4().hex), "OMP_NUM_THREADS": "1", "P3_LOCAL_AGGREGATION": "0"}
    variables.update(CUT, PYTHONPATH=PYTHONPATH)
    command = [*argv, str(SCRIPTS / script), *map(str, arguments)]
    processes.append(Process(command, {**variables, **env}, folder))
    return processes[-1].wait(100)


def digest(ended, workers=WORKERS):
    """Of all workers, which have the same."""
    assert ended.code == 0, ended
    found = re.findall(r"worker \d: (\w{64})", ended.out)
    assert len(found) == workers, ended
    assert len(set(found)) == 1, ended
    return found[0]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Of a job of that script."""
    known, started = {}, []

    def of(**job):
        if repr(job) not in known:
            known[repr(job)] = digest(run(tmp_path_factory.mktemp("undisturbed"), started, **job))
        return known[repr(job)]

    yield of
    for process in started:
        process.end()


def death(drawn, most=SLICES - 200):
    return "%d:%d" % (drawn.randrange(SERVERS), drawn.randrange(1, most))


def plain_keys(ended):
    """The digest of keys that have the same bits whoever updates."""
    return re.findall(r"of plain keys: (\w{64})", ended.out)


@pytest.mark.parametrize("seed", range(5))
def test_the_sums_have_the_bits_of_a_job_that_has_lost_no_server(tmp_path, processes, undisturbed, seed):
    tls = ["--tls"] if seed == 0 else []
    ended = run(tmp_path, processes, *CONTINUE, *tls, P3S_DEATHS=death(random.Random(seed)))
    assert digest(ended) == undisturbed()
    assert ended.out.count("struck at") == 1 and ended.err.count("the job goes on without it") == 1, ended


@pytest.mark.parametrize("seed", range(3))
def test_so_they_have_if_it_dies_while_first_values_are_given(tmp_path, processes, undisturbed, seed):
    ended = run(tmp_path, processes, *CONTINUE, P3S_DEATHS=death(random.Random(seed), 60), P3S_EARLY="1")
    assert digest(ended) == undisturbed()
    assert ended.out.count("struck at") == 1, ended


@pytest.mark.parametrize("deaths", ["1:131,2:2", "2:10,0:1", "0:103,1:150"])
def test_so_they_have_behind_the_loss_of_the_heir(tmp_path, processes, undisturbed, deaths):
    ended = run(tmp_path, processes, *CONTINUE, P3S_DEATHS=deaths)
    assert digest(ended) == undisturbed()
    assert ended.err.count("the job goes on without it") == 2, ended


def test_so_they_have_if_it_only_freezes(tmp_path, processes, undisturbed):
    env = {"P3S_DEATHS": "1:150", "P3S_DEATH": "frozen", "P3_TIMEOUT_S": "3"}
    ended = run(tmp_path, processes, *CONTINUE, **env)
    assert digest(ended) == undisturbed()
    assert "server 1 (127.0.0.1) sent no heartbeat for 3 s" in ended.out + ended.err, ended


@pytest.mark.parametrize("slices", [130, 150, 171])
def test_so_they_have_if_it_wakes_up_behind_its_loss(make_cluster, undisturbed, slices):
    """Where nobody ends it: what it still sends comes to nobody."""
    env = {"P3S_DEATHS": "1:%d" % slices, "P3S_DEATH": "asleep", "P3_TIMEOUT_S": "3", "P3_ON_SERVER_LOSS": "continue",
           "P3_LOCAL_AGGREGATION": "0", "OMP_NUM_THREADS": "1", strike.MARK: uuid.uuid4().hex, **CUT}  # fmt: skip
    cluster = make_cluster(WORKERS, SERVERS)
    script = "import sys\nsys.path.insert(0, %r)\nsys.argv[1:] = ['%d']\nimport losing_servers\nlosing_servers.main()\n"
    script %= (str(SCRIPTS), STEPS)
    scheduler = cluster.start("scheduler", **env)
    servers = [cluster.start("server", P3_RANK=str(rank), **env) for rank in range(SERVERS)]
    workers = [cluster.start("worker", script, P3_RANK=str(rank), **env) for rank in range(WORKERS)]
    ended = [node.wait(100) for node in (*workers, scheduler, servers[0], servers[2])]
    assert [one.code for one in ended] == [0] * len(ended), ended
    out = "".join(one.out for one in ended)
    assert set(re.findall(r"worker \d: (\w{64})", out)) == {undisturbed()} and out.count("struck at") == 1, ended
    assert servers[1].wait(20).code == 1


def test_so_they_have_if_only_one_worker_does_not_reach_it(tmp_path, processes, undisturbed):
    env = {"P3S_DEATHS": "1:150", "P3S_DEATH": "cut", "P3_LOCAL": "tcp"}
    ended = run(tmp_path, processes, *CONTINUE, **env)
    assert digest(ended) == undisturbed()
    assert "server 1 (127.0.0.1) is not reached by worker 0 (127.0.0.1) any more" in ended.out + ended.err, ended


def test_a_worker_that_reaches_none_of_them_any_more_departs(tmp_path, processes):
    env = {"P3S_DEATHS": "1:150,0:0,2:0", "P3S_DEATH": "cut", "P3_LOCAL": "tcp", "P3S_WORKER_DIES": "none:0"}
    ended = run(tmp_path, processes, *CONTINUE, "--on-worker-loss", "continue", **env)
    digest(ended, WORKERS - 1)
    assert "worker 0 (127.0.0.1) reaches no server any more" in ended.out + ended.err, ended
    assert "Another server takes over" not in ended.out + ended.err, ended


@pytest.mark.parametrize("deaths", ["scheduler:100,1:1", "1:100,scheduler:1", "1:100,scheduler:150"])
def test_so_they_have_although_the_scheduler_dies_as_well(tmp_path, processes, undisturbed, deaths):
    ended = run(tmp_path, processes, *CONTINUE, P3S_DEATHS=deaths)
    assert digest(ended) == undisturbed()
    assert "starting another one" in ended.err and "server 1 ended with signal SIGKILL; the job goes on" in ended.err


@pytest.mark.parametrize("own", [140, 150, 160])
def test_a_worker_may_be_lost_with_it(tmp_path, processes, own):
    options = [*CONTINUE, "--on-worker-loss", "continue"]
    ended = run(tmp_path, processes, *options, P3S_DEATHS="0:150", P3S_WORKER_DIES="2:%d" % own)
    digest(ended, WORKERS - 1)
    assert ended.err.count("the job goes on without it") == 2, ended


def test_the_last_one_is_needed(tmp_path, processes):
    ended = run(tmp_path, processes, *CONTINUE, servers=2, P3S_DEATHS="0:20,1:20")
    assert ended.code != 0 and "The job cannot go on without it: no other server is left" in ended.out, ended


def test_one_that_fails_behind_its_goodbye_is_not_waited_for(tmp_path, processes):
    """No scheduler is there any more to say what becomes of the job."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os\n"
        "if os.environ.get('DMLC_ROLE') == 'server': atexit.register(os._exit, 7)\n"
    )  # fmt: skip
    path = os.pathsep.join([PYTHONPATH, str(tmp_path)])
    ended = run(tmp_path, processes, *CONTINUE, servers=2, PYTHONPATH=path, P3_TIMEOUT_S="60")
    assert ended.code == 7 and ended.seconds < 30, ended


def test_one_server_has_no_heir(tmp_path, processes):
    ended = run(tmp_path, processes, *CONTINUE, servers=1)
    assert ended.code != 0 and "needs another server that can take over" in ended.err, ended


@pytest.mark.parametrize("seed", range(3))
def test_snapshots_behind_a_loss_are_whole(tmp_path, processes, undisturbed, seed):
    taking = ("--snapshot-dir", str(tmp_path / "snapshots"), "--snapshot-every", "2")
    ended = run(tmp_path, processes, *CONTINUE, *taking, P3S_DEATHS=death(random.Random(seed)))
    assert digest(ended) == undisturbed()
    ended = run(tmp_path, processes, *taking, arguments=(STEPS + 3,))
    assert digest(ended) == undisturbed(arguments=(STEPS + 3,)), ended


COMING_BACK = (*CONTINUE, "--rejoin", "--worker-restarts", "20")


def came_back(ended):
    return len(re.findall(r"scheduler \(127.0.0.1\): server \d \(127.0.0.1\) is back", ended.out + ended.err))


@pytest.mark.parametrize("seed", range(6))
def test_servers_come_back_are_lost_again_and_all_bits_stay(tmp_path, processes, undisturbed, seed):
    """Each is struck when all are there, some of them while the workers still take the one before back; and every
    other time the scheduler dies in between."""
    drawn, job = random.Random(seed), [{}, UPDATING][seed % 2]
    blows = ["%d:%d" % (drawn.randrange(SERVERS), drawn.choice([0, 1, 5, 30, 100, 200])) for _ in range(4)]
    if seed >= 4:
        blows.insert(2, "scheduler:%d" % drawn.choice([0, 1, 5, 30]))
    env = {**job, "P3S_DEATHS": ",".join(blows), "P3S_MARKS": "2"}
    ended = run(tmp_path, processes, *COMING_BACK, *(["--tls"] if seed == 0 else []), **env)
    assert digest(ended) == undisturbed(**job), (blows, ended)
    assert ended.out.count("struck at") >= 2 and came_back(ended) >= 2, (blows, ended)


@pytest.mark.parametrize("how", ["frozen", "cut"])
def test_another_process_takes_the_place_of_one_that_is_not_dead(tmp_path, processes, undisturbed, how):
    env = {"P3S_DEATHS": "1:150", "P3S_DEATH": how, "P3_TIMEOUT_S": "3", "P3_LOCAL": "tcp", "P3S_MARKS": "2"}
    ended = run(tmp_path, processes, *COMING_BACK, **env)
    assert digest(ended) == undisturbed() and came_back(ended) == 1, ended


def test_snapshots_are_of_the_servers_that_there_are(tmp_path, processes, undisturbed):
    taking = ("--snapshot-dir", str(tmp_path / "snapshots"), "--snapshot-every", "3", *COMING_BACK)
    ended = run(tmp_path, processes, *taking, P3S_DEATHS="1:100,2:120", P3S_MARKS="2")
    assert digest(ended) == undisturbed() and came_back(ended) == 2, ended
    assert (tmp_path / "snapshots" / "round-000000000012").exists()
    ended = run(tmp_path, processes, *taking, arguments=(STEPS + 3,))
    assert digest(ended) == undisturbed(arguments=(STEPS + 3,)), ended


@pytest.mark.torch
@pytest.mark.parametrize("mode", ["by itself", "clipping", "synchronous", "bf16", "int4"])
def test_pytorch_trains_on_with_the_same_bits(tmp_path, processes, undisturbed, mode):
    job = {"script": "torch_losing_servers.py", "arguments": (mode,)}
    expected = undisturbed(**job, P3_ON_SERVER_LOSS="continue")
    ended = run(tmp_path, processes, *CONTINUE, **job, P3S_DEATHS="1:40,2:7")
    assert digest(ended) == expected
    assert ended.err.count("the job goes on without it") == 2, ended


@pytest.mark.torch
@pytest.mark.parametrize("mode", ["by itself", "clipping", "synchronous", "bf16", "int4"])
def test_servers_come_back_to_pytorch_at_its_members(tmp_path, processes, undisturbed, mode):
    job = {"script": "torch_losing_servers.py", "arguments": (mode,)}
    expected = undisturbed(**job, P3_ON_SERVER_LOSS="continue")
    ended = run(tmp_path, processes, *COMING_BACK, **job, P3S_DEATHS="1:40,2:7,1:20", P3S_MARKS="2")
    assert digest(ended) == expected and came_back(ended) == 3, ended


@pytest.mark.parametrize("optimizer", ["", "sgd", "adam"])
def test_mxnet_trains_on_with_the_same_bits(tmp_path, processes, undisturbed, optimizer):
    pytest.importorskip("mxnet")
    job = {"script": "mxnet_losing_servers.py", "arguments": (optimizer,)}
    ended = run(tmp_path, processes, *CONTINUE, **job, P3S_DEATHS="1:40,2:7")
    assert digest(ended) == undisturbed(**job)  # by the servers, where the store has an optimizer
    assert ended.err.count("the job goes on without it") == 2, ended


@pytest.mark.parametrize("optimizer", ["", "sgd", "adam"])
def test_servers_come_back_to_mxnet_at_its_members(tmp_path, processes, undisturbed, optimizer):
    pytest.importorskip("mxnet")
    job = {"script": "mxnet_losing_servers.py", "arguments": (optimizer,)}
    ended = run(tmp_path, processes, *COMING_BACK, **job, P3S_DEATHS="1:40,2:7,1:20", P3S_MARKS="2")
    assert digest(ended) == undisturbed(**job) and came_back(ended) == 3, ended


def test_servers_come_back_to_weights_of_a_framework_of_functions(tmp_path, processes, undisturbed):
    job = {"script": "weights_losing_servers.py", "arguments": (), "P3_ON_SERVER_LOSS": "continue"}
    ended = run(tmp_path, processes, *COMING_BACK, **job, P3S_DEATHS="1:40,2:7,1:20", P3S_MARKS="2")
    assert digest(ended) == undisturbed(**job) and came_back(ended) == 3, ended


@pytest.mark.parametrize("optimizer", ["", "adam"])
def test_snapshots_of_mxnet_have_what_the_workers_keep(tmp_path, processes, undisturbed, optimizer):
    pytest.importorskip("mxnet")
    job = {"script": "mxnet_losing_servers.py"}
    taking = ("--snapshot-dir", str(tmp_path / "snapshots"), "--snapshot-every", "5", *CONTINUE)
    before = run(tmp_path, processes, *taking, **job, arguments=(optimizer,), P3S_DEATHS="1:7")
    assert before.code == 0 and before.err.count("the job goes on without it") == 1, before
    assert (tmp_path / "snapshots" / "round-000000000010").exists()
    job["arguments"] = (optimizer, STEPS + 3)
    assert digest(run(tmp_path, processes, *taking, **job)) == undisturbed(**job)


@pytest.mark.parametrize("seed", range(5))
def test_values_and_states_have_the_bits_of_a_job_that_has_lost_no_server(tmp_path, processes, undisturbed, seed):
    deaths = death(random.Random(seed), UPDATING_SLICES - 150)
    ended = run(tmp_path, processes, **UPDATING, P3S_DEATHS=deaths)
    assert digest(ended) == undisturbed(**UPDATING)
    assert ended.out.count("struck at") == 1 and ended.err.count("the job goes on without it") == 1, ended


def test_so_they_have_behind_two_losses_at_once(tmp_path, processes, undisturbed):
    ended = run(tmp_path, processes, **UPDATING, P3S_DEATHS="1:300,2:2")
    assert digest(ended) == undisturbed(**UPDATING)
    assert ended.err.count("the job goes on without it") == 2, ended


@pytest.mark.parametrize("how", ["frozen", "cut"])
def test_so_they_have_if_the_lost_server_is_not_dead(tmp_path, processes, undisturbed, how):
    env = {"P3S_DEATHS": "1:300", "P3S_DEATH": how, "P3_TIMEOUT_S": "3", "P3_LOCAL": "tcp"}
    assert digest(run(tmp_path, processes, **UPDATING, **env)) == undisturbed(**UPDATING)


def test_a_worker_or_the_scheduler_may_be_lost_with_it(tmp_path, processes):
    job = dict(UPDATING, P3S_DEATHS="scheduler:100,0:150", P3S_WORKER_DIES="1:260")
    ended = run(tmp_path, processes, "--on-worker-loss", "continue", **job)
    digest(ended, WORKERS - 1)
    assert "starting another one" in ended.err and ended.err.count("the job goes on without it") == 2, ended


def test_what_travels_as_it_is_has_the_bits_of_servers_that_update(tmp_path, processes):
    ended = [run(tmp_path, processes, **{**UPDATING, "P3_ON_SERVER_LOSS": how}) for how in ("fail", "continue")]
    assert len(plain_keys(ended[0])) == 1 and plain_keys(ended[0]) == plain_keys(ended[1]), ended


@pytest.mark.parametrize("goes_on_with", ["continue", "fail"])
def test_snapshots_have_what_the_workers_keep(tmp_path, processes, undisturbed, goes_on_with):
    """Also for a job whose servers update."""
    taking = ("--snapshot-dir", str(tmp_path / "snapshots"), "--snapshot-every", "5")
    before = run(tmp_path, processes, *taking, **UPDATING, P3S_DEATHS="2:200")
    assert digest(before) == undisturbed(**UPDATING)
    job = {**UPDATING, "P3_ON_SERVER_LOSS": goes_on_with, "arguments": (STEPS + 3,)}
    after = run(tmp_path, processes, *taking, **job)
    if goes_on_with == "continue":
        assert digest(after) == undisturbed(**job)
    else:
        assert plain_keys(after) == plain_keys(run(tmp_path, processes, **job)), after


def test_workers_take_over_what_servers_have_updated(tmp_path, processes):
    taking = ("--snapshot-dir", str(tmp_path / "snapshots"), "--snapshot-every", "5")
    digest(run(tmp_path, processes, *taking, **{**UPDATING, "P3_ON_SERVER_LOSS": "fail"}))
    job = {**UPDATING, "arguments": (STEPS + 3,)}
    after = run(tmp_path, processes, *taking, **job, P3S_DEATHS="1:100")
    digest(after)
    assert plain_keys(after) == plain_keys(run(tmp_path, processes, **job)), after


def test_what_its_workers_cannot_keep_is_refused_by_name(tmp_path, processes):
    script = tmp_path / "script.py"
    script.write_text(
        "import p3\n"
        "with p3.Session.open() as session:\n"
        "    session.declare('w', (3,), 'float32', session.new_store(), staleness=1)\n"
    )
    ended = run(tmp_path, processes, *CONTINUE, script=script, arguments=())
    assert ended.code != 0, ended
    assert "going on without lost servers (P3_ON_SERVER_LOSS=continue is set) and staleness exclude" in ended.out, ended
