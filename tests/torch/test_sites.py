"""Sites: processes that train by DistributedDataParallel among themselves, and by local steps with other sites."""

import re
import socket
import sys

import forked
import plugin_jobs as jobs
import pytest
from processes import wait_until

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

import p3.torch  # noqa: E402

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without Gloo")
MEMBERS = {"site %d member %d" % (site, member) for site in range(2) for member in range(2)}


def script(*arguments):
    return jobs.python("torch_sites.py", *arguments)


def run(*arguments, **variables):
    """Two sites of two members."""
    status, output = jobs.run_p3(2, 2, script(*arguments), **variables)
    assert status == 0, output
    return output


@pytest.mark.parametrize("kind", ["diloco", "streaming", "weighed"])
def test_a_site_is_one_worker_with_the_batches_of_all_its_members(kind):
    """As the papers' algorithms in one process of plain torch have it, with two workers."""
    assert run("follows", kind).count("follows") == 4


@pytest.mark.parametrize("codec", ["none", "int4"])
def test_all_members_of_all_sites_have_the_same_global_bits(codec):
    output = run("has_same_bits", codec, P3_CHECK="1")
    found = re.findall(r"site (\d) member \d: first (\w+) local (\w+) global (\w+) again (\w+)", output)
    assert len(found) == 4, output
    for place, count in ((1, 1), (2, 2), (3, 1), (4, 1)):
        assert len({one[place] for one in found}) == count, output
    assert len({one[:3] for one in found}) == 2, output  # a site's members are alike


def test_a_loaded_state_takes_the_same_steps(tmp_path):
    assert run("loads", tmp_path).count("goes on") == 4


def test_a_job_resumes_with_the_bits_of_an_uninterrupted_one(tmp_path):
    whole = run("resumed", tmp_path, 13, 0)
    launcher = [sys.executable, "-m", "p3", "run", "-n", "2", "-s", "2", "--restarts", "1"]
    status, output = jobs.run([*launcher, *script("resumed", tmp_path, 13, 9)], timeout_s=100,
                              P3_SNAPSHOT_DIR=str(tmp_path / "snapshots"), P3_SNAPSHOT_EVERY="4")  # fmt: skip
    assert status == 0, output
    assert output.count("began at 8") == 4, output
    expected, found = (sorted(re.findall(r"(site . member .) began at . and has (\w+)", one))
                       for one in (whole, output))  # fmt: skip
    assert len(found) == 4 and found == expected


def told(folder, count):
    """What each process has been told, by its place; waits for them, as a job may have ended before."""
    wait_until(lambda: len(list(folder.glob("site *"))) >= count and
               all(one.read_text() for one in folder.glob("site *")), "all have ended", 30)  # fmt: skip
    return {one.name: one.read_text() for one in folder.glob("site *")}


# Whoever notices a death first names it: a server, the scheduler, or Gloo.
DEATH = r"lost worker \d|worker \d \(127.0.0.1\) closed its control connection|has ended|Connection"


@pytest.mark.parametrize("how, others", [
    ("killed", DEATH),
    ("raises", "ValueError: the leader's script has a fault|has ended|Connection"),
    ("server", "lost server|server \\d"),
    ("silent", "TimeoutError|waited 10 s"),
    ("other call", "is in broadcast.., and its leader in take_global..|" + DEATH),
])  # fmt: skip
def test_no_member_outlives_a_failure_and_each_is_told_of_it(tmp_path, how, others):
    variables = {"P3_WAIT_TIMEOUT_S": "10"} if how == "silent" else {}
    status, output = jobs.run_p3(2, 1, script("fails", tmp_path, how), timeout_s=60, **variables)
    assert status != 0, output
    found = told(tmp_path, {"killed": 3, "silent": 2}.get(how, 4))
    for place, text in found.items():
        assert re.search(others, text), (place, found, output)
    if how == "raises":
        assert "member 1 of 2 of a site: its leader has said: the script ended with ValueError: the leader's" in output
    if how == "other call":
        assert "RuntimeError: member 1 of 2 of a site is in broadcast(), and its leader in take_global()" in output


@pytest.mark.parametrize("how, problem", [
    ("every", "LocalSteps was given every=3, and on worker 0 2"),
    ("model", "member 1 has a model of other parameters or buffers than the leader"),
])  # fmt: skip
def test_what_differs_is_an_error_on_all_members(tmp_path, how, problem):
    status, output = jobs.run_p3(2, 1, script("differs", tmp_path, how))
    assert status != 0 and problem in output, output
    found = told(tmp_path, 4 if how == "every" else 2)
    assert all(text.startswith("ValueError: member") or "worker" in text for text in found.values()), found


def test_what_a_site_cannot_have_is_refused_by_name():
    output = run("refused")
    for name, problem in (
        ("DistributedOptimizer", "a site of several processes and gradients that all workers share exclude each other"),
        ("process_group", "a site of several processes and a trainer's loop exclude each other"),
        ("DDP after", "Within a site .* it comes before LocalSteps"),
        ("again", "another optimizer trains 0.weight: in a site call its release.. before"),
        ("of others", "adds up gradients of the ranks .*give it the site's group"),
        ("other site", "this process is of a site already, of the ranks .0, 1."),
    ):
        assert len(re.findall("member . ?.*: %s is refused: .*%s" % (name, problem), output)) == 4, (name, output)
    assert output.count("all_reduce is refused: member 1 of 2 of a site: its leader alone is a worker") == 2, output


def test_processes_that_were_started_as_several_workers_are_told_how_to_start(tmp_path):
    status, output = jobs.run_p3(2, 1, script("several_workers", tmp_path))
    assert status != 0
    assert "its processes were started as 2 workers of P3's job (P3_RANK), and must be one: start one" in output


def test_a_site_comes_first_and_is_a_group():
    with pytest.raises(ValueError, match="call torch.distributed.init_process_group.. before"):
        p3.torch.site(None)


def torchrun(*options):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return [sys.executable, "-m", "torch.distributed.run", "--master-port", str(port), *options]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("launch", ["a torchrun for each", "one torchrun"])
def test_torchrun_starts_sites(launch):
    if launch == "one torchrun":
        command = [*torchrun("--nproc-per-node", "4"), *forked.started(script("launched", 2))]
        status, output = jobs.run(command, timeout_s=150, DMLC_NODE_HOST="127.0.0.1")
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        status, output = jobs.run_p3(2, 1, [*command, *forked.started(script("launched", 0))], timeout_s=200,
                                     P3_RENDEZVOUS_TIMEOUT_S="150")  # fmt: skip
    assert status == 0, output
    found = re.findall(r"(site \d) of 2 (member \d): local (\w+) global (\w+)", output)
    assert {"%s %s" % one[:2] for one in found} == MEMBERS, output
    assert len({one[3] for one in found}) == 1 and len({(one[0], one[2]) for one in found}) == 2, output
