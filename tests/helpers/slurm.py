"""A Slurm of the tests' own: slurmctld and one slurmd for each of several nodes, all on this machine.

Its configuration, state and logs are in one folder; nothing of it is left when it ends. It authenticates nobody
(auth/none), and listens on 127.0.0.1 alone; so no munge, and no configuration of the system's, is needed or touched.
"""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time

from launched_jobs import parent

_DAEMONS = ("slurmctld", "slurmd")
_PROGRAMS = ("srun", "sbatch", "scancel", "scontrol", "squeue", "sinfo")
_START_S = 30.0
_ATTEMPTS = 3  # at finding free ports


def missing():
    """The programs that are not here."""
    path = os.environ.get("PATH", "") + os.pathsep + "/usr/sbin"
    return [name for name in (*_DAEMONS, *_PROGRAMS) if shutil.which(name, path=path) is None]


class Slurm:
    def __init__(self, folder, nodes, env, *settings):
        """`env`: of the daemons; jobs get that of their submission. `settings`: further lines of its configuration."""
        self.folder, self._settings = folder, settings
        self.env = dict(env, SLURM_CONF=str(folder / "slurm.conf"), PATH=os.environ["PATH"] + ":/usr/sbin")
        self._nodes = ["n%d" % number for number in range(1, nodes + 1)]
        self._daemons = []
        for attempt in range(_ATTEMPTS):
            self._configure()
            try:
                self._start()
                return
            except TimeoutError as error:  # another program has taken a port, perhaps
                self.end()
                if attempt + 1 == _ATTEMPTS:
                    logs = [path.read_text(errors="replace")[-2000:] for path in sorted(folder.glob("*.log"))]
                    raise AssertionError("%s\n%s" % (error, "\n".join(logs))) from None

    def run(self, *command, timeout_s=60, check=True, **variables):
        """A command of Slurm's, to its end: its output, standard error included."""
        env = dict(self.env, **variables)
        ran = subprocess.run(command, env=env, cwd=str(self.folder), timeout=timeout_s, stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
        assert not check or ran.returncode == 0, ran.stdout
        return ran.stdout

    def submit(self, script, *options, **variables):
        """The number of a new batch job; its output goes to the folder's job.NUMBER."""
        output = "--output=%s" % (self.folder / "job.%j")
        return self.run("sbatch", "--parsable", output, *options, str(script), **variables).strip()

    def output(self, job):
        path = self.folder / ("job." + job)
        return path.read_text() if path.exists() else ""

    def field(self, job, name):
        """As `scontrol show job` has it."""
        words = dict(word.partition("=")[::2] for word in self.run("scontrol", "show", "job", job).split())
        return words[name]

    def wait(self, job, *states, timeout_s=60):
        deadline = time.monotonic() + timeout_s
        while self.field(job, "JobState") not in states:
            assert time.monotonic() < deadline, self.run("scontrol", "show", "job", job) + self.output(job)
            time.sleep(0.1)

    def lose(self, node, task):
        """As if that node, which runs this task alone, had lost its power."""
        self._daemons[1 + self._nodes.index(node)].kill()
        os.kill(parent(task), signal.SIGKILL)  # slurmstepd
        os.kill(task, signal.SIGKILL)  # whose children the kernel ends

    def end(self):
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()

    def _configure(self):
        folder, host = self.folder, socket.gethostname()
        free = [socket.create_server(("127.0.0.1", 0)) for _ in range(len(self._nodes) + 1)]
        controller, *ports = [listener.getsockname()[1] for listener in free]
        for listener in free:
            listener.close()
        lines = [
            "ClusterName=p3",
            "SlurmctldHost=%s(127.0.0.1)" % host,
            "SlurmctldPort=%d" % controller,
            "SlurmUser=" + getpass.getuser(),
            "SlurmdUser=" + getpass.getuser(),
            "AuthType=auth/none",
            "AuthInfo=cred_expire=10",  # so long a requeued job is held back, instead of two minutes
            "CredType=cred/none",
            "StateSaveLocation=%s/state" % folder,
            "SlurmdSpoolDir=%s/spool.%%n" % folder,
            "SlurmctldPidFile=%s/slurmctld.pid" % folder,
            "SlurmdPidFile=%s/slurmd.%%n.pid" % folder,
            "SlurmctldLogFile=%s/slurmctld.log" % folder,
            "SlurmdLogFile=%s/slurmd.%%n.log" % folder,
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "SelectType=select/linear",
            "MpiDefault=none",
            "SlurmdParameters=config_overrides",
            "SchedulerParameters=batch_sched_delay=1,sched_min_interval=100000",
            "KillWait=10",
            "MinJobAge=3600",
            *self._settings,
        ]
        for name, port in zip(self._nodes, ports):
            (folder / ("spool." + name)).mkdir(exist_ok=True)
            lines.append("NodeName=%s NodeHostname=%s NodeAddr=127.0.0.1 Port=%d CPUs=4" % (name, host, port))
        lines.append("PartitionName=all Nodes=ALL Default=YES State=UP")
        (folder / "state").mkdir(exist_ok=True)
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")

    def _start(self):
        commands = [["slurmctld", "-D", "-i"], *(["slurmd", "-D", "-N", name] for name in self._nodes)]
        for number, command in enumerate(commands):
            with open(self.folder / ("daemon%d.log" % number), "w") as log:
                daemon = subprocess.Popen(command, env=self.env, cwd=str(self.folder), stdin=subprocess.DEVNULL,
                                          stdout=log, stderr=log, start_new_session=True)  # fmt: skip
            self._daemons.append(daemon)
        deadline = time.monotonic() + _START_S
        while True:
            states = self.run("sinfo", "-h", "-N", "-o", "%T", check=False).split()
            if states == ["idle"] * len(self._nodes):
                return
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in self._daemons):
                raise TimeoutError("Slurm's nodes are %s" % states)
            time.sleep(0.1)
