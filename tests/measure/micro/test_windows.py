"""`p3 bench windows`, and with it a real job on full links: windows stay, though the kernel forgets the path."""

import pytest
from lab_traces import needs_lab

from p3 import cli
from p3.measure.micro import windows

RUN = ["--hosts", "3", "--forget", "1", "--every", "0.5", "--seconds"]


@needs_lab
def test_windows_do_not_follow_the_queue_that_they_fill():
    samples = windows.watch(windows.parse_options([*RUN, "6"]))
    late = [sample for sample in samples if sample.second > 3]
    assert late and max(sample.min_rtt_ms for sample in late) > 2, samples  # forgotten: the queue stands
    assert max(sample.window_bytes for sample in samples) <= 64 << 10, samples


@needs_lab
def test_a_table_says_whether_they_grew(capsys):
    assert cli.main(["bench", "windows", *RUN, "1"]) == 0
    assert "\nthe last window is 1.00 of that after a quarter of the time\n" in capsys.readouterr().out


def test_what_ss_says_is_read():
    text = (
        "ESTAB 0 0 10.0.0.1:9 10.0.0.2:9 skmem:(r0,rb131072,t0,tb65536,f0,w4,o0,bl0,d0) cubic rtt:9.7/1.2 cwnd:10 "
        "bytes_sent:2000000 bytes_acked:1 minrtt:0.5\n"
        "ESTAB 0 0 10.0.0.1:8 10.0.0.2:8 skmem:(r0,rb131072,t0,tb87040,f0,w4,o0,bl0,d0) rtt:1/1 bytes_sent:20 minrtt:1"
    )
    assert windows._connections(text) == [(65536, pytest.approx(0.5), pytest.approx(9.7))]
