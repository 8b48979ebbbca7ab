"""For scripts of jobs whose servers die: who is killed when. See begin()."""

import os
import signal
import socket
import threading
import time

from p3.measure.chaos import strike
from p3.measure.chaos.matrix import Victim


def begin(session):
    """P3S_DEATHS, "WHO:SLICES" separated by commas: worker 0 kills WHO, a server's rank or "scheduler", when so many
    slices have come to worker 0 since the one before. P3S_DEATH: how; "frozen" for ever, or "asleep" until worker 0 has
    heard that it is lost, or killed; or "cut": worker 0 only loses its connection. P3S_WORKER_DIES "RANK:SLICES": and
    that worker kills itself."""
    rank, _, slices = os.environ.get("P3S_WORKER_DIES", "").partition(":")
    blows = []
    if rank == str(session.rank):
        blows = [(_kill, os.getpid(), int(slices))]
    elif session.rank == 0:
        for who, _, slices in (part.partition(":") for part in os.environ.get("P3S_DEATHS", "").split(",") if part):
            if os.environ.get("P3S_DEATH") == "cut":
                blows.append((_cut, session._link._member.servers[int(who)]["port"], int(slices)))
            else:
                victim = Victim("scheduler", 0) if who == "scheduler" else Victim("server", int(who))
                blows.append((_kill, strike.find(victim, os.environ[strike.MARK]), int(slices)))

    def watch():
        for blow, victim, slices in blows:
            due = session.counters()["slices_received"] + slices
            while session.counters()["slices_received"] < due:
                time.sleep(1e-4)
            lost = session.servers.lost
            blow(victim)
            if os.environ.get("P3S_DEATH") == "asleep":
                while session.servers.lost == lost:
                    time.sleep(1e-4)
                os.kill(victim, signal.SIGCONT)
            print("struck at %d" % session.counters()["slices_received"], flush=True)

    threading.Thread(target=watch, daemon=True).start()


def _kill(pid):
    freezes = os.environ.get("P3S_DEATH") in ("frozen", "asleep")
    os.kill(pid, signal.SIGSTOP if freezes else signal.SIGKILL)


def _cut(port):
    """This process's TCP connection to there."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family == socket.AF_INET and connection.getpeername()[1] == port:
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # no socket, or none with a peer
            continue
