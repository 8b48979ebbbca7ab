"""Which job `p3 top` means, if nobody has named it."""

import os
import subprocess
import sys

import pytest
from processes import SECRET, clean_environment

from p3.errors import ConfigError
from p3.settings import Settings
from p3.top import find


@pytest.fixture
def nodes(monkeypatch):
    """nodes(port, ...) starts a process for each, with the environment of a node; no other one is ours."""
    started = []

    def start(*ports):
        for port in ports:
            env = clean_environment(DMLC_ROLE="server", DMLC_PS_ROOT_URI="127.0.0.1", DMLC_PS_ROOT_PORT=str(port),
                                    P3_SECRET=SECRET, P3_TLS="1", P3_SLICE_ELEMENTS="wrong")  # fmt: skip
            command = [sys.executable, "-c", "print(flush=True); input()"]
            started.append(subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            started[-1].stdout.readline()  # until it has the environment
        monkeypatch.setattr(find, "_is_ours", [one.pid for one in started].__contains__)
        return started

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_the_only_job_of_a_user_is_meant(nodes):
    nodes(7001, 7001)
    found = find.settings_of(Settings(), None)
    assert (found.root_host, found.root_port, found.tls) == ("127.0.0.1", 7001, True)
    assert found.job_secret() == SECRET.encode()


def test_of_several_jobs_a_process_must_be_named(nodes):
    first, second = nodes(7001, 7002)
    listed = "2 jobs run on this host.*--pid %d .*; --pid %d " % (first.pid, second.pid)
    with pytest.raises(ConfigError, match=listed) as refused:
        find.settings_of(Settings(), None)
    assert str(refused.value).count(", in %s)" % os.getcwd()) == 2
    assert find.settings_of(Settings(), second.pid).root_port == 7002


def test_the_environments_own_job_comes_first_and_needs_a_secret(nodes):
    nodes(7001)
    own = Settings(root_host="10.0.0.1", root_port=7, secret=SECRET)
    assert find.settings_of(own, None) is own
    with pytest.raises(ConfigError, match="the job has no secret"):
        find.settings_of(Settings(root_host="10.0.0.1", root_port=7), None)


def test_where_no_job_runs_the_error_says_what_to_set(nodes):
    nodes()
    with pytest.raises(ConfigError, match="no job of this user runs on this host.*P3_SECRET_FILE"):
        find.settings_of(Settings(), None)
    with pytest.raises(ConfigError, match="is no process of a job"):
        find.settings_of(Settings(), os.getpid())
