"""Windows stay as they are where the link's queue never drains, though the kernel forgets how short the path is; and
where it is long they are what it holds.

A connection's window is its send buffer: what the link carries in a round trip, and a little more. The kernel forgets
the least round trip after net.ipv4.tcp_min_rtt_wlen, 300 s; here after 1 s. What it then takes for the least one holds
the queue that the windows fill.
"""

import re
import sys
import time
from pathlib import Path

import pytest
from lab_traces import needs_lab, needs_relay, output
from processes import PYTHONPATH, ROOT

from p3.measure.jobs.job import POLL_S, Job
from p3.measure.jobs.stores import STORES
from p3.measure.lab.hosts import lab

LEAST_SENT = 1_000_000  # by then it is no control connection
WATCHED_S = 6.0
STARTS_IN_S = 60.0
LONG_MBIT, LONG_DELAY_MS = 48.0, 50.0
PATH_BYTES = LONG_MBIT * 1e6 / 8 * 2 * LONG_DELAY_MS / 1e3


def connections(text):
    """(send buffer, least round trip, round trip) of those that have sent much, as ss -tinmOH prints them."""
    found = []
    for line in text.splitlines():
        fields = dict(re.findall(r"\b(bytes_sent|minrtt|rtt):([\d.]+)", line))
        buffer = re.search(r"skmem:\(.*?,tb(\d+)", line)
        if buffer and int(fields.get("bytes_sent", 0)) >= LEAST_SENT:
            found.append((int(buffer.group(1)), float(fields["minrtt"]), float(fields["rtt"])))
    return found


@needs_lab
def test_windows_do_not_follow_the_queue_that_they_fill(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    command = [sys.executable, str(ROOT / "tests" / "jobs" / "full_links.py")]
    samples, started, deadline = [], None, time.monotonic() + STARTS_IN_S
    with lab(3, 100.0) as hosts:
        for host in hosts:
            output(host, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/tcp_min_rtt_wlen")
        with Job(STORES["p3_sync"], hosts, command, root=hosts[0], port=9100, folder=tmp_path,
                      omp_threads=1) as job:  # fmt: skip
            job.start()
            while started is None or samples[-1][0] < WATCHED_S:
                job.check()
                found = [one for host in hosts for one in connections(output(host, "ss", "-tinmOH"))]
                if found:
                    started = started or time.monotonic()
                    samples.append((time.monotonic() - started, *map(max, zip(*found))))
                assert started or time.monotonic() < deadline, job.error("nothing is sent", *job.names())
                time.sleep(POLL_S)
    late = [sample for sample in samples if sample[0] > WATCHED_S / 2]  # all nodes know of each other by then
    assert late and max(min_rtt_ms for _, _, min_rtt_ms, _ in late) > 2, samples  # forgotten: the queue stands
    assert max(window_bytes for _, window_bytes, _, _ in late) <= 64 << 10, samples


@needs_lab
def test_all_windows_of_a_job_become_the_same_though_its_links_are_not(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    command = [sys.executable, str(ROOT / "tests" / "jobs" / "full_links.py")]
    found, deadline = [], time.monotonic() + STARTS_IN_S
    with lab(3, [100.0, 100.0, 50.0]) as hosts:
        with Job(STORES["p3_sync"], hosts, command, root=hosts[0], port=9100, folder=tmp_path,
                      omp_threads=1) as job:  # fmt: skip
            job.start()
            # Each of three hosts sends to two others, its worker and its server.
            while len(found) < 12 or len({window_bytes for window_bytes, _, _ in found}) > 1 or found[0][0] < 20 << 10:
                job.check()
                assert time.monotonic() < deadline, found
                time.sleep(POLL_S)
                found = [one for host in hosts for one in connections(output(host, "ss", "-tinmOH"))]
    # What four connections have of a queue that holds what the faster link carries in 20 ms.
    assert 4 * found[0][0] <= 100e6 / 8 * 0.02, found


def under_way(text):
    """(bytes sent, send buffer, bytes in flight, congestion control) of those that have sent much, likewise."""
    found = []
    for line in text.splitlines():
        numbers = {name: int(value) for name, value in re.findall(r"\b(bytes_sent|unacked|mss):(\d+)", line)}
        after_memory = re.search(r"skmem:\(.*?,tb(\d+).*?\)(?: ts| sack)* (\w+)", line)
        if after_memory and numbers.get("bytes_sent", 0) >= LEAST_SENT // 4:
            in_flight = numbers.get("unacked", 0) * numbers["mss"]
            found.append((numbers["bytes_sent"], int(after_memory.group(1)), in_flight, after_memory.group(2)))
    return found


@needs_relay
def test_a_long_link_is_filled_from_the_start(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    command = [sys.executable, str(ROOT / "tests" / "jobs" / "full_links.py")]
    samples, deadline = [], time.monotonic() + STARTS_IN_S
    with lab(2, LONG_MBIT, delay_ms=LONG_DELAY_MS) as hosts:
        with Job(STORES["p3_sync"], hosts, command, root=hosts[0], port=9100, folder=tmp_path,
                      omp_threads=1) as job:  # fmt: skip
            job.start()
            while not any(in_flight > PATH_BYTES / 2 for _, _, in_flight, _ in samples):
                job.check()
                assert time.monotonic() < deadline, samples or job.error("nothing is sent", *job.names())
                time.sleep(POLL_S)
                samples += [one for host in hosts for one in under_way(output(host, "ss", "-tinmOH"))]
    # That of a rate which nobody knows yet would be 16 KiB.
    assert min(buffer_bytes for _, buffer_bytes, _, _ in samples) > 32 << 10, samples
    if "bbr" in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split():
        assert {control for _, _, _, control in samples} == {"bbr"}, samples


def test_what_ss_says_is_read():
    text = (
        "ESTAB 0 0 10.0.0.1:9 10.0.0.2:9 skmem:(r0,rb131072,t0,tb65536,f0,w4,o0,bl0,d0) cubic rtt:9.7/1.2 cwnd:10 "
        "bytes_sent:2000000 bytes_acked:1 minrtt:0.5\n"
        "ESTAB 0 0 10.0.0.1:8 10.0.0.2:8 skmem:(r0,rb131072,t0,tb87040,f0,w4,o0,bl0,d0) rtt:1/1 bytes_sent:20 minrtt:1"
    )
    assert connections(text) == [(65536, pytest.approx(0.5), pytest.approx(9.7))]
    text = (
        "ESTAB 0 9 10.0.0.1:9 10.0.0.2:9 skmem:(r0,rb131072,t0,tb87040,f0,w4,o0,bl0,d0) ts sack bbr wscale:10,10 "
        "rtt:101/1 mss:1448 cwnd:80 bytes_sent:2000000 bytes_acked:1 unacked:70 minrtt:100.1\n"
        "ESTAB 0 0 10.0.0.1:8 10.0.0.2:8 skmem:(r0,rb131072,t0,tb16384,f0,w4,o0,bl0,d0) cubic mss:1448 bytes_sent:20"
    )
    assert under_way(text) == [(2000000, 87040, 70 * 1448, "bbr")]
