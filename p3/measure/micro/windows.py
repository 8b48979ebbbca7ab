"""Do windows stay as they are where the link's queue never drains?

    sudo p3 bench windows                             # 15 minutes at 100 Mbit/s
    sudo p3 bench windows --seconds 20 --forget 1     # the same in short

--hosts with a worker and a server each push and get values without staleness of any bound, so their links are full all
the time. A connection's window is its send buffer: what the link carries in a round trip, and a little more. The kernel
forgets the least round trip after net.ipv4.tcp_min_rtt_wlen, 300 s; --forget sets that on the hosts. What it then takes
for the least one holds the queue that the windows fill. `ss -tinm` says, every --every seconds, of the data connections
between the hosts:

window KiB      the largest send buffer
minrtt, rtt ms  the largest of what the kernel has for the least round trip, and for the last ones
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import List, NamedTuple, Sequence

from p3.measure.arguments import number
from p3.measure.bench import jobs, machine
from p3.measure.lab.hosts import Host, lab

_LEAST_SENT = 1_000_000  # by then it is no control connection
_COMMAND_TIMEOUT_S = 10.0
_STARTED_IN_S = 60.0


class Sample(NamedTuple):
    second: float
    window_bytes: int
    min_rtt_ms: float
    rtt_ms: float


def main(arguments: Sequence[str]) -> int:
    options = parse_options(arguments)
    print(f"commit {machine.commit()}; kernel {machine.machine()['kernel']}")
    print(f"{options.hosts} hosts, {options.rate:g} Mbit/s")
    print(f"{'s':>6}{'window KiB':>12}{'minrtt ms':>11}{'rtt ms':>9}", flush=True)
    try:
        samples = watch(options)
    except jobs.JobError as error:
        print(f"FAILED {error}", file=sys.stderr)
        return 1
    settled = samples[len(samples) // 4]
    grown = samples[-1].window_bytes / settled.window_bytes
    print(f"the last window is {grown:.2f} of that after a quarter of the time")
    return 0


def watch(options: argparse.Namespace) -> List[Sample]:
    """JobError if the job fails."""
    samples: List[Sample] = []
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(lab(options.hosts, options.rate))
        if options.forget is not None:
            for host in hosts:
                _run(host, "sh", "-c", f"echo {options.forget} > /proc/sys/net/ipv4/tcp_min_rtt_wlen")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="p3-windows-")))
        job = stack.enter_context(jobs.Job(
            jobs.STORES["p3_sync"], hosts, [sys.executable, "-m", "p3.measure.micro.windows_worker"], root=hosts[0],
            port=9100, folder=folder, omp_threads=1,
        ))  # fmt: skip
        job.start()
        began = time.monotonic()
        started = None
        while started is None or samples[-1].second < options.seconds:
            job.check()
            found = [connection for host in hosts for connection in _connections(_run(host, "ss", "-tinmOH"))]
            if found:
                now = time.monotonic()
                started = started or now
                samples.append(Sample(now - started, *map(max, zip(*found))))
                _print(samples[-1])
            elif started is None and time.monotonic() > began + _STARTED_IN_S:
                raise job.error(f"sent nothing in {_STARTED_IN_S:.0f} s", *job.names())
            time.sleep(options.every if started else jobs.POLL_S)
    return samples


def _print(sample: Sample) -> None:
    window, min_rtt, rtt = sample.window_bytes / 1024, sample.min_rtt_ms, sample.rtt_ms
    print(f"{sample.second:6.0f}{window:12.0f}{min_rtt:11.2f}{rtt:9.2f}", flush=True)


def _connections(text: str) -> List[tuple]:
    """(send buffer, least round trip, round trip) of those that have sent much, as ss -tinmOH prints them."""
    found = []
    for line in text.splitlines():
        fields = dict(re.findall(r"\b(bytes_sent|minrtt|rtt):([\d.]+)", line))
        buffer = re.search(r"skmem:\(.*?,tb(\d+)", line)
        if buffer and int(fields.get("bytes_sent", 0)) >= _LEAST_SENT:
            found.append((int(buffer.group(1)), float(fields["minrtt"]), float(fields["rtt"])))
    return found


def _run(host: Host, *command: str) -> str:
    return subprocess.check_output(host.command(*command), timeout=_COMMAND_TIMEOUT_S, universal_newlines=True)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="p3 bench windows", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=number(1, 1e6), default=100.0, metavar="MBIT", help="(%(default)s)")
    parser.add_argument("--hosts", type=number(2, 64, int), default=4, metavar="N", help="(%(default)s)")
    parser.add_argument("--seconds", type=number(1, 1e6), default=900.0, metavar="S", help="(%(default)s)")
    parser.add_argument("--every", type=number(0.1, 1e6), default=30.0, metavar="S", help="(%(default)s)")
    parser.add_argument(
        "--forget", type=number(1, 86400, int), metavar="S", help="net.ipv4.tcp_min_rtt_wlen (the kernel's: 300)"
    )
    return parser.parse_args(arguments)
