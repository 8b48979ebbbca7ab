"""Programs on the hosts of a lab, and programs that have one."""

import contextlib
import subprocess
import sys

from lab_traces import DEADLINE_S, traces
from processes import clean_environment


def start(host, script, *argv):
    return subprocess.Popen(
        host.command(sys.executable, "-c", script, *map(str, argv)), stdout=subprocess.PIPE, universal_newlines=True
    )


def connected(source, source_script, sink, sink_script, *arguments):
    """What two scripts print: one listens on a port that it tells first, the other is given its address, that port and
    the arguments."""
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(start(sink, sink_script))
        stack.callback(receiver.kill)
        port = receiver.stdout.readline().strip()
        sender = stack.enter_context(start(source, source_script, sink.address, port, *arguments))
        stack.callback(sender.kill)
        return [end.communicate(timeout=DEADLINE_S)[0].strip() for end in (sender, receiver)]


LAB_UNTIL_SIGNALLED = """
import signal
from p3.measure.lab import hosts
with hosts.lab(2, %s) as lab:
    print(lab[0].lab, flush=True)
    signal.pause()
"""


@contextlib.contextmanager
def program_with_a_lab(how=""):
    """(its process, the name of its lab). `how`: further arguments of the lab, as Python has them."""
    with subprocess.Popen(
        [sys.executable, "-c", LAB_UNTIL_SIGNALLED % how], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        universal_newlines=True, env=clean_environment(),
    ) as process:
        name = process.stdout.readline().strip()
        try:
            assert traces(name)
            yield process, name
        finally:
            process.kill()
