"""The job's secret is on no command line, in no output and in no error; and without it there is no job."""

import os
import shutil
import subprocess
import sys

import pytest
from processes import SECRET, clean_environment

# Each worker looks at every process of the machine while all of the job live.
LOOK = """
    import glob, os, sys
    from p3.worker.session import Session
    session = Session.open()
    secret = os.environ["P3_SECRET"]
    session.barrier()

    def has_it(path):
        try:
            return secret.encode() in open(path, "rb").read()
        except OSError:  # it has just ended
            return False

    found = [path for path in glob.glob("/proc/[0-9]*/cmdline") if has_it(path)]
    print("command lines with it:", found)
    session.barrier()
    if session.rank == 0:
        with os.fdopen(os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            file.write(secret)
        raise ValueError("the disk is full")
"""


@pytest.mark.parametrize("hosts", ["here", "ssh"])
def test_the_secret_of_a_job_that_fails_is_on_no_command_line_and_in_no_output(run_job, request, tmp_path, hosts):
    env, options = {"P3_LOG": "debug"}, []
    if hosts == "ssh":
        env["P3_SSH"] = request.getfixturevalue("sshd")
        env["DMLC_NODE_HOST"] = "127.0.0.1"
        (tmp_path / "hosts").write_text("elsewhere\n")
        options = ["--hostfile", str(tmp_path / "hosts")]
    job = run_job(LOOK, 2, 1, env, options, [str(tmp_path / "told")])
    assert job.code != 0 and "the disk is full" in job.err, job
    assert job.out.count("command lines with it: []") == 2, job
    secret = (tmp_path / "told").read_text()
    assert len(secret) == 64 and secret not in job.out + job.err


@pytest.mark.parametrize(
    "role, settings, text",
    [
        ("scheduler", {"P3_RENDEZVOUS_TIMEOUT_S": "0.2"}, "did not join"),
        ("scheduler", {"inherits": False}, "cannot listen on"),
        ("server", {"P3_RENDEZVOUS_TIMEOUT_S": "0.2", "DMLC_PS_ROOT_URI": "127.0.0.2"}, "no scheduler at"),
        ("server", {"DMLC_PS_ROOT_URI": "nowhere.invalid"}, "does not resolve"),
        ("server", {"P3_TIMEOUT_S": "ten"}, "P3_TIMEOUT_S='ten': it must be"),
        ("server", {"P3_SECRETS": SECRET, "DMLC_PS_ROOT_URI": "127.0.0.2"}, "did you mean P3_SECRET"),
        ("worker", {"P3_SECRET": SECRET[:15]}, "P3_SECRET=(not shown)"),
        ("worker", {"P3_SECRET": "", "P3_SECRET_FILE": "open"}, "can be read by others: its mode is 0640"),
        ("worker", {"P3_SECRET": "", "P3_SECRET_FILE": "short"}, "holds fewer than"),
        ("worker", {"P3_SECRET": ""}, "the job has no secret"),
    ],
)
def test_no_error_tells_the_secret(make_cluster, tmp_path, role, settings, text):
    (tmp_path / "open").write_text(SECRET)
    (tmp_path / "short").write_text(SECRET[:15])
    os.chmod(tmp_path / "open", 0o640)
    os.chmod(tmp_path / "short", 0o600)
    settings = dict({"P3_LOG": "debug", "P3_RENDEZVOUS_TIMEOUT_S": "0.5"}, **settings)
    node = make_cluster(1, 1).start(role, "raise SystemExit(3)", **settings).wait(20)
    assert node.code != 0
    assert text in node.err and SECRET[:15] not in node.out + node.err, node.err


def test_a_secret_file_of_which_only_the_owner_knows_serves(make_cluster, tmp_path):
    (tmp_path / "secret").write_text(SECRET + "\n")
    os.chmod(tmp_path / "secret", 0o600)
    cluster = make_cluster(1, 1)
    nodes = [cluster.start("scheduler"), cluster.start("server", P3_SECRET="", P3_SECRET_FILE="secret")]
    nodes.append(cluster.start("worker", "from p3.worker.session import Session; Session.open().barrier()"))
    assert [node.wait(30).code for node in nodes] == [0, 0, 0]


MOUNT = """
    mount -t tmpfs none "$1" && printf %s "$2" > "$1/secret" && chmod "$3" "$1/secret" && chown 1234:1234 "$1/secret" &&
    { [ "$4" = rw ] || mount -o "remount,$4" "$1"; } || exit
    shift 4 && exec "$@"
"""
READ = """
import os, sys
from p3.errors import ConfigError
from p3.settings import Settings
try:
    print(Settings.from_env({"P3_SECRET_FILE": sys.argv[1]}).job_secret().decode())
except ConfigError as error:
    print(error)
"""


def can_mount():
    command = ["unshare", "--mount", "true"]
    return shutil.which("unshare") and subprocess.run(command, capture_output=True).returncode == 0


needs_mounts = pytest.mark.skipif(not can_mount(), reason="mounts need unshare and root")


def read_behind(unshare, path):
    command = [*unshare, sys.executable, "-c", READ, path]
    return subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=30)


@needs_mounts
@pytest.mark.parametrize(
    "mode, options, serves",
    [
        ("0444", "ro", True),  # Docker
        ("0440", "ro,bind", True),  # Kubernetes with an fsGroup; of this mount alone, as in a container
        ("0644", "ro", True),
        ("0444", "rw", False),  # any tmpfs of a host
        ("0664", "ro", False),
        ("0400", "rw", True),
    ],
)
def test_a_secret_that_a_container_mounts_serves(tmp_path, mode, options, serves):
    (tmp_path / "secrets").mkdir()
    path = str(tmp_path / "secrets" / "secret")
    unshare = ["unshare", "--mount", "sh", "-c", MOUNT, "sh", str(tmp_path / "secrets"), SECRET, mode, options]
    ran = read_behind(unshare, path)
    if serves:
        assert (ran.stdout, ran.stderr) == (SECRET + "\n", "")
    else:
        assert "can be read by others: its mode is %s, and it is not on" % mode in ran.stdout, ran
        assert SECRET not in ran.stdout + ran.stderr


@needs_mounts
def test_a_read_only_mount_of_a_disk_is_open_to_others(tmp_path):
    (tmp_path / "secret").write_text(SECRET)
    mounting = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && shift && exec "$@"'
    unshare = ["unshare", "--mount", "sh", "-c", mounting, "sh", str(tmp_path)]
    ran = read_behind(unshare, str(tmp_path / "secret"))
    assert "can be read by others" in ran.stdout, ran


def test_the_embedded_mode_listens_nowhere(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "import numpy as np\n"
        "from p3.worker.session import Session\n"
        "session = Session.open()\n"
        "landing = np.zeros(5, np.float32)\n"
        "session.init(session.declare('w', (5,), 'float32'), landing.copy(), landing).wait(10)\n"
        "own = {os.readlink('/proc/self/fd/' + fd) for fd in os.listdir('/proc/self/fd')\n"
        "       if os.path.islink('/proc/self/fd/' + fd)}\n"
        "found = []\n"
        "for name, inode in (('tcp', 9), ('tcp6', 9), ('udp', 9), ('udp6', 9)):\n"
        "    found += [line for line in open('/proc/self/net/' + name).readlines()[1:]\n"
        "              if 'socket:[%s]' % line.split()[inode] in own]\n"
        "for line in open('/proc/self/net/unix').readlines()[1:]:\n"
        "    words = line.split()  # flags 00010000: it listens; an eighth word: it has a name\n"
        "    if 'socket:[%s]' % words[6] in own and (words[3] == '00010000' or len(words) > 7):\n"
        "        found.append(line)\n"
        "print(len([link for link in own if link.startswith('socket:')]) > 0, found)\n"
    )
    ran = subprocess.run(
        [sys.executable, str(script)], env=clean_environment(), capture_output=True, text=True, timeout=30
    )
    assert (ran.stdout, ran.stderr) == ("True []\n", "")
