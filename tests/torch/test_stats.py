"""p3.torch.stats(): flat numbers of this worker."""

import re

import pytest
from processes import ROOT

torch = pytest.importorskip("torch")
import p3.torch  # noqa: E402
from p3.torch.start import job  # noqa: E402
from torch_steps import step  # noqa: E402

STEPS = """
    import torch
    import p3.torch
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(4)))
    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6), model)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.ones(1, 300)).sum().backward()
        optimizer.step()
    optimizer.synchronize()
    stats = p3.torch.stats()
    by_group = {name: value for name, value in stats.items() if name.startswith("p3/waited_s/")}
    assert sorted(by_group) == ["p3/waited_s/%d" % layer for layer in range(4)], stats
    assert stats["p3/steps"] == 20 and stats["p3/steps_per_s"] > 0, stats
    assert abs(sum(by_group.values()) - stats["p3/waited_s"]) < 1e-6 and stats["p3/waited_s"] > 0
    assert 0 < stats["p3/waited_share"] <= 1
    gradients = 20 * 4 * 300 * 301 * 4
    exchanged = stats["p3/sent_bytes"] + stats["p3/local_sent_bytes"]
    assert exchanged >= gradients, (exchanged, gradients)
    print("all of it is there")
"""


def test_each_worker_tells_of_its_steps_waits_and_bytes(run_job):
    finished = run_job(STEPS, servers=2)
    assert finished.code == 0 and finished.out.count("all of it is there") == 2, finished


def test_they_are_numbers_that_grow_and_each_is_documented(model, optimizer):
    before = p3.torch.stats()
    step(model, optimizer)
    optimizer.synchronize()
    after = p3.torch.stats()
    assert all(type(value) is float for value in after.values())
    assert after["p3/sent_bytes"] > before["p3/sent_bytes"]
    page = (ROOT / "docs" / "watching.md").read_text(encoding="utf-8")
    documented = set(re.findall(r'`"(p3/\w+)(?:/GROUP)?"`', page))
    assert {re.match(r"p3/\w+", name).group() for name in after} == documented


def test_to_read_them_asks_nobody(model, optimizer, monkeypatch):
    step(model, optimizer)
    session, sent = job.current(), []
    monkeypatch.setattr(session._link, "send", sent.append)
    p3.torch.stats()
    assert sent == []
