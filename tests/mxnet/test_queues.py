"""What a job does to the queues in front of slow links: nothing is dropped there and next to nothing sent again.

Every host of the lab has ten connections, of its worker and its server with those of five others, and 196 KB of queue
in front of its link each way. Counted is what the kernels of the hosts and the token buckets count, not time.
"""

import json
import subprocess

from lab_traces import needs_lab

from p3.measure.lab.hosts import lab
from p3.measure.micro.processes import pushpull_job as jobs

HOSTS = 6
RATE_MBIT = 40
SETUP = jobs.Setup(workers=HOSTS, servers=HOSTS, keys="10x200000", elements=2_000_000, omp_threads=1, timeout_s=120)


def tcp_counters(host):
    """/proc/net/snmp of a host: what its TCP has counted so far."""
    text = subprocess.check_output(host.command("cat", "/proc/net/snmp"), universal_newlines=True, timeout=20)
    names, values = (line.split()[1:] for line in text.splitlines() if line.startswith("Tcp:"))
    return dict(zip(names, map(int, values)))


def dropped(host):
    """Packets that the queue of a host's own link has dropped so far."""
    text = subprocess.check_output(host.command("tc", "-s", "-j", "qdisc", "show", "dev", "eth0"), timeout=20)
    return sum(queue["drops"] for queue in json.loads(text))


@needs_lab
def test_many_connections_fit_into_the_queue_of_a_slow_link(tmp_path):
    with lab(HOSTS, RATE_MBIT) as hosts, jobs.PushPullJob("p3_sync", hosts, SETUP, port=9100, folder=tmp_path) as job:
        job.start()
        for _ in range(3):  # where nothing is dropped, a busy machine's late acknowledgements make TCP probe
            drops_before, before = sum(map(dropped, hosts)), [tcp_counters(host) for host in hosts]
            job.turn(rounds=2)
            drops, after = sum(map(dropped, hosts)), [tcp_counters(host) for host in hosts]
            sent, again = (sum(b[name] - a[name] for a, b in zip(before, after)) for name in ("OutSegs", "RetransSegs"))
            assert sent > SETUP.workers * SETUP.model_bytes / 1448  # it was the job that was counted
            assert drops == drops_before
            if again <= sent / 1000:
                break
        job.leave()
    assert again <= sent / 1000, f"{again} of {sent} segments were sent again"
