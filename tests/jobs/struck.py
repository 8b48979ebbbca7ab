"""For scripts of jobs whose servers die: who is killed when. See begin()."""

import os
import signal
import socket
import threading
import time

from p3.measure.chaos import returns, strike
from p3.measure.chaos.matrix import Victim
from p3.measure.chaos.returns import key_of_marks  # noqa: F401, of those who use this

MARKS = int(os.environ.get("P3S_MARKS", "0"))  # so many steps from one to the next
struck = 0  # servers, by worker 0


def begin(session):
    """P3S_DEATHS, "WHO:SLICES" separated by commas: worker 0 kills WHO, a server's rank or "scheduler", when so many
    slices have come to worker 0 since the one before. P3S_DEATH: how; "frozen" for ever, or "asleep" until worker 0 has
    heard that it is lost, or killed; or "cut": worker 0 only loses its connection. P3S_WORKER_DIES "RANK:SLICES": and
    that worker kills itself. P3S_MARKS: servers come back (until_all_are_back()); one is struck when all are there."""
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
                # To find it takes a while, in which a short job ends; but who comes back is another process.
                blow = (_strike, victim) if MARKS else (_kill, strike.find(victim, os.environ[strike.MARK]))
                blows.append((*blow, int(slices)))

    def watch():
        global struck
        for blow, victim, slices in blows:
            due = session.counters()["slices_received"] + slices
            while session.counters()["slices_received"] < due:
                time.sleep(1e-4)
            while MARKS and session.servers.changes < 2 * struck:
                time.sleep(1e-4)
            changes = session.servers.changes
            if blow is _cut or getattr(victim, "role", "") == "server":
                struck += 1
            pid = blow(victim)
            if os.environ.get("P3S_DEATH") == "asleep":
                while session.servers.changes == changes:
                    time.sleep(1e-4)
                os.kill(pid, signal.SIGCONT)
            print("struck at %d" % session.counters()["slices_received"], flush=True)

    threading.Thread(target=watch, daemon=True).start()


def until_all_are_back(session, key, step, mark=None):
    """Each server that was struck. `key`: key_of_marks(), declared before begin(). `mark(step)`: the front end's."""
    mark = mark or session.agree_on_members
    returns.until_all_are_back(session, key, lambda: mark(step), lambda: lacks_one(session), 300)


def pace(session):
    """Between two steps of worker 0: gives a server that is on its way back some time, so that it comes before the job
    has ended."""
    if lacks_one(session):
        time.sleep(0.2)


def lacks_one(session):
    """Whether this is worker 0, and has struck a server that is not back."""
    return session.is_first and session.servers.changes < 2 * struck


def _strike(victim):
    return _kill(strike.find(victim, os.environ[strike.MARK]))


def _kill(pid):
    freezes = os.environ.get("P3S_DEATH") in ("frozen", "asleep")
    os.kill(pid, signal.SIGSTOP if freezes else signal.SIGKILL)
    return pid


def _cut(port):
    """This process's TCP connection to there."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family == socket.AF_INET and connection.getpeername()[1] == port:
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # no socket, or none with a peer
            continue
