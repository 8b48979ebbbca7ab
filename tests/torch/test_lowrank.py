"""Low-rank gradients in p3.torch: jobs of real processes against a reference in float64, and what is refused."""

import plugin_jobs as jobs
import pytest

torch = pytest.importorskip("torch")
import p3.torch  # noqa: E402

LOW_RANK = {"type": "lowrank", "rank": 2}


def run(workers, *arguments, aggregates="0", servers=2, **settings):
    settings = {"P3_CHECK": "1", "P3_LOCAL_AGGREGATION": aggregates, **settings}
    status, output = jobs.run_p3(workers, servers, jobs.python("torch_lowrank.py", *arguments), **settings)
    assert status == 0, output
    assert output.count("is right") == workers, output
    return output


@pytest.mark.parametrize("workers, way, optimizer, options, aggregates", [
    (1, "all", "sgd", (), "0"),
    (2, "all", "adamw", (), "1"),
    (4, "all", "sgd", (), "0"),
    (2, "function", "adamax", (), "0"),
    (2, "grouped", "adamw", (), "0"),
    (2, "all", "adamw", ("clipped",), "0"),
    (2, "all", "sgd", ("synchronous",), "1"),
    (2, "all", "adamw", ("clipped", "synchronous"), "0"),
    (2, "beside bf16", "sgd", (), "0"),
])  # fmt: skip
def test_weights_are_those_of_a_reference(workers, way, optimizer, options, aggregates):
    run(workers, "follows", way, optimizer, *options, aggregates=aggregates)


@pytest.mark.parametrize("options", [(), ("synchronous",)])
def test_a_worker_without_batches_follows_and_keeps_what_it_has_left_out(options):
    run(3, "uneven", *options)


def test_what_is_left_out_is_owed_to_the_mean_of_another_number_of_workers(tmp_path):
    snapshots = {"P3_SNAPSHOT_DIR": str(tmp_path), "P3_SNAPSHOT_EVERY": "1"}
    for workers in (2, 1):
        run(workers, "rest", servers=1, **snapshots)


def test_it_learns():
    run(2, "learns", aggregates="1", P3_CHECK="0")


def test_a_step_sends_what_the_formula_says():
    run(2, "counts", P3_CHECK="0")


# In this process


def small_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(9, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def ranks(optimizer):
    return [one.key.rank for one in optimizer._p3.parameters]


@pytest.mark.parametrize("compression, expected", [
    (LOW_RANK, [2, 0, 0, 0]), ("lowrank", [4, 0, 0, 0]), ({"up": LOW_RANK}, [2, 0, 0, 0]),
    ({"type": "lowrank", "rank": 1}, [1, 0, 1, 0]), ({"type": "lowrank", "rank": 7}, [0, 0, 0, 0]),
    (lambda name, shape: {"type": "lowrank", "rank": 1} if name == "2.weight" else None, [0, 0, 1, 0]),
])  # fmt: skip
def test_matrices_for_which_it_pays_have_it(compression, expected):
    model = torch.nn.Sequential(torch.nn.Linear(30, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = p3.torch.DistributedOptimizer(optimizer, model, compression=compression)
    assert ranks(optimizer) == expected
    optimizer.release()


@pytest.mark.parametrize("options, said", [
    ({"compression": {"up": "lowrank", "down": "int8"}}, "lowrank and compression of what comes back"),
    ({"compression": {"down": "lowrank"}}, "value_compression: type is 'lowrank'; it must be one of"),
    ({"compression": {"type": "lowrank", "rank": 0}}, "rank .* whole number from 1 to 1024"),
    ({"compression": "lowrank", "staleness": 1}, "lowrank and staleness exclude each other|staleness and sums handed"),
    ({"compression": lambda name, shape: "lowrank" if name == "0.weight" else "dgc"},
     r"dgc and sums handed to the workers \(compression by lowrank\) exclude each other"),
])  # fmt: skip
def test_what_cannot_be_had_is_refused_by_name(options, said):
    model = small_model()
    with pytest.raises(ValueError, match=said):
        p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="torch has none for the CPU before 2.3")
@pytest.mark.parametrize("synchronous", [False, True])
def test_loss_scalers_are_refused(synchronous):
    model, kind = small_model(), torch.amp.GradScaler if synchronous else p3.torch.GradScaler
    with pytest.raises(ValueError, match="lowrank and .* exclude each other: what it leaves out has the scale"):
        p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, compression=LOW_RANK,
                                      synchronous=synchronous, grad_scaler=kind("cpu"))  # fmt: skip


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="torch has none for the CPU before 2.3")
def test_a_scaler_that_nobody_has_named_is_found():
    model = small_model()
    optimizer = p3.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, compression=LOW_RANK, synchronous=True
    )
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(sum(one.sum() for one in model.parameters())).backward()
    optimizer.synchronize()
    with pytest.raises(ValueError, match="lowrank and a GradScaler that DistributedOptimizer does not know exclude"):
        scaler.step(optimizer)
    optimizer.release()


def test_parameters_on_a_device_are_refused(monkeypatch):
    model = small_model().to("meta")
    monkeypatch.setattr(p3.torch.requirements, "_require_supported", lambda *_ignored: None)
    monkeypatch.setattr(p3.torch.requirements, "_require_apart", lambda parameters, names: None)
    with pytest.raises(ValueError, match=r"lowrank and parameters on a GPU \(0.weight\) exclude each other"):
        p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, compression=LOW_RANK)


def test_sparse_parameters_and_layers_of_factors_go_their_own_way():
    model = torch.nn.Sequential(torch.nn.Embedding(50, 20, sparse=True), torch.nn.Flatten(), torch.nn.Linear(60, 30))
    p3.torch.factors(model, batch_size=4, route="factors")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = p3.torch.DistributedOptimizer(optimizer, model, compression=LOW_RANK)
    before = [one.detach().clone() for one in model.parameters()]
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(12).view(4, 3)).square().sum().backward()
        optimizer.step()
    optimizer.synchronize()
    assert not any(one.equal(was) for one, was in zip(model.parameters(), before))
    optimizer.release()


def test_channels_last_is_a_matrix_of_its_output_channels():
    model = torch.nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = p3.torch.DistributedOptimizer(optimizer, model, compression=LOW_RANK)
    assert ranks(optimizer)[0] == 2 and list(optimizer._p3.parameters)[0].key.shape == (16, 3, 3, 8)
    before = model.weight.detach().clone()
    model(torch.randn(2, 8, 5, 5)).square().sum().backward()
    gradient = model.weight.grad.clone()
    optimizer.step()
    optimizer.synchronize()
    step = (before - model.weight) / 0.1
    assert 0 < torch.linalg.matrix_rank(step.flatten(1), atol=1e-3 * step.abs().max()) <= 2
    assert (step * gradient).sum() > 0
    optimizer.release()


def test_what_is_compressed_is_said_once(caplog):
    caplog.set_level("INFO", logger="p3")
    model = small_model()
    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, compression=LOW_RANK)
    optimizer.release()
    assert caplog.text.count("travel as lowrank") == 1
    assert "the gradients of 1 of 4 parameters travel as lowrank" in caplog.text
