"""Training with p3.torch is torch's: the weights and states of one process on the joined batch, and of DDP."""

import socket
import sys

import plugin_jobs as jobs
import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(jobs.SCRIPTS))
import torch_training  # noqa: E402
from weights import distance, load, same_bits  # noqa: E402

CASES = list(torch_training.CASES)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of all cases, in one job of two workers and in one process of torch's."""
    folder = tmp_path_factory.mktemp("trained")
    command = jobs.python("torch_training.py", folder)
    for result in (jobs.run([*command, "alone", *CASES], timeout_s=110),
                   jobs.run_p3(2, 2, [*command, "p3", *CASES], timeout_s=110, P3_CHECK="1")):  # fmt: skip
        assert result[0] == 0, result[1:]
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_two_workers_train_as_one_process_on_the_joined_batch(trained, name):
    reference = load(trained, "alone", 0, name)
    first, second = load(trained, "p3", 0, name), load(trained, "p3", 1, name)
    tolerance = torch_training.CASES[name].tolerance
    assert distance(first["model"], reference["model"]) < tolerance
    assert same_bits(first["model"], second["model"])
    states = distance(first["optimizer"], reference["optimizer"])
    assert tolerance > 1e-3 or states < 10 * tolerance  # else what half precision rounds off counts for too much


@pytest.mark.timeout(300)
def test_one_process_gives_the_bits_of_torch(trained, tmp_path):
    status, *said = jobs.run([*jobs.python("torch_training.py", tmp_path), "p3", *CASES], timeout_s=110)
    assert status == 0, said
    differing = {
        name: distance(load(tmp_path, "p3", 0, name)["model"], load(trained, "alone", 0, name)["model"])
        for name in CASES
        if not same_bits(load(tmp_path, "p3", 0, name)["model"], load(trained, "alone", 0, name)["model"])
    }
    assert all(differs < torch_training.CASES[name].tolerance for name, differs in differing.items()), differing
    assert all(may_round_otherwise(name) for name in differing), differing


def may_round_otherwise(name):
    """torch's square root is not exactly rounded, the servers' is; states of half precision are float32 there; norms to
    clip by are added up in float64; and torch takes the parts of a row that occurs twice one after the other, where P3
    takes their sum."""
    case = torch_training.CASES[name]()
    optimizer = case.optimizer(case.model())
    takes_roots = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop)
    on_servers = [one for one in (optimizer, getattr(case, "rest", None)) if isinstance(one, takes_roots)]
    is_other = case.dtype.itemsize == 2 or name.startswith("sparse") or "max_grad_norm" in case.options
    return is_other or (on_servers and not case.options)


def test_two_runs_give_the_same_bits(trained, tmp_path):
    names = ["adamw_amsgrad", "momentum", "sparse", "clipped", "adamax", "brain", "one_cycle", "changing_adamw"]
    assert jobs.run_p3(2, 2, [*jobs.python("torch_training.py", tmp_path), "p3", *names])[0] == 0
    for name in names:
        assert same_bits(load(tmp_path, "p3", 0, name), load(trained, "p3", 0, name)), name


def test_ddp_gives_the_same(trained, tmp_path):
    names = [name for name in CASES if torch_training.CASES[name].has_ddp]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    command = [*torchrun, *jobs.script("torch_training.py", tmp_path), "ddp", *names]
    status, *said = jobs.run(command, timeout_s=100, OMP_NUM_THREADS="1")
    assert status == 0, said
    for name in names:
        assert distance(load(tmp_path, "ddp", 0, name)["model"], load(trained, "p3", 0, name)["model"]) < 1e-6, name
