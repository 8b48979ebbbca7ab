"""Lines of results files that are valid and made up, for tests of what reads them."""

import json
import math


def settings(experiment, **changes):
    return {
        "kind": "settings", "experiment": experiment, "command": "p3 bench " + experiment,
        "time": "2024-05-01T12:00:00+00:00", "commit": "0123456789abcdef",
        "machine": {"cpu": "a processor", "cores": 2, "kernel": "6.1"},
        "versions": {"p3": "0.1.0", "mxnet": "1.9.1"}, "options": {"repeats": 3}, **changes,
    }  # fmt: skip


def run(experiment, store="p3_sync", seconds=(1.0, 1.1, 1.2), **changes):
    return {
        "kind": "run", **_configuration(experiment, store), "repeat": 0, "iteration_s": list(seconds),
        "median_s": sorted(seconds)[len(seconds) // 2], "bound_s": 0.9, "bound_reason": "the network is the limit",
        "stall_s": 0.1, "worst_layer": "fc6", "result": "right", "error": None, **changes,
    }  # fmt: skip


def failed(experiment, store, error="server 1 died", **changes):
    return run(experiment, store, (1.0,), **{
        "iteration_s": [], "median_s": None, "stall_s": None, "worst_layer": None, "result": "failed",
        "error": error, **changes,
    })  # fmt: skip


def nic(experiment, store, period_s=1.0, busy_s=0.8, rate_mbit=800, **changes):
    """Bursts: busy for `busy_s` of each period."""
    full = rate_mbit * 1e6 / 8 * 0.01
    sent = [full * (0.9 + 0.1 * math.sin(tick)) if tick * 0.01 % period_s < busy_s else 0 for tick in range(300)]
    return {
        "kind": "nic", **_configuration(experiment, store), "rate_mbit": rate_mbit, "repeat": 0, "host": 0,
        "interval_s": 0.01, "bytes_in": sent[20:] + sent[:20], "bytes_out": sent, **changes,
    }  # fmt: skip


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def _configuration(experiment, store):
    return {
        "experiment": experiment, "store": store, "model": "vgg19", "size": 0.15, "bytes": 86e6,
        "computation": "emulated", "compute_s": 1.0, "rate_mbit": 800, "delay_ms": 0, "hosts": 2, "workers": 2,
        "servers": 2, "slice_elements": 50000,
    }  # fmt: skip
