"""What comes back is encoded, too: jobs against a reference that encodes as the documentation says."""

import re

import plugin_jobs as jobs
import pytest

torch = pytest.importorskip("torch")
import p3.torch  # noqa: E402
from p3.torch.rounds import choice  # noqa: E402
from torch_steps import backward, small_model, step  # noqa: E402


def script(*arguments):
    return jobs.python("torch_both_ways.py", *arguments)


def run(workers, *arguments, aggregates="0", **variables):
    """`aggregates`: what a machine has added up is encoded once, and not, as the reference has it, of each worker."""
    variables = {"P3_CHECK": "1", "P3_LOCAL_AGGREGATION": aggregates, **variables}
    status, output = jobs.run_p3(workers, 2, script(*arguments), **variables)
    assert status == 0, output
    return output


@pytest.mark.parametrize("way, optimizer, workers, staged", [
    ("int8", "sgd", 1, False),
    ("int8", "sgd", 3, False),
    ("int8", "adamw", 2, True),
    ("bf16", "adamw", 2, False),
    ("1bit", "sgd", 2, False),
    ("each", "adamw", 2, False),
    ("mixed", "sgd", 1, False),
    ("mixed", "adamw", 2, True),
    ("grouped", "adamw", 2, False),
    ("int8", "adam", 2, False),
    ("int8", "adagrad", 2, False),
    ("int8", "rmsprop", 2, False),
])  # fmt: skip
def test_servers_publish_encoded_changes_of_exact_weights(way, optimizer, workers, staged):
    assert run(workers, *["--staged"] * staged, "follows", way, optimizer).count("follows") == workers


@pytest.mark.parametrize("options", [(), ("clipped",), ("synchronous",), ("clipped", "synchronous")])
@pytest.mark.parametrize("way, workers, staged", [("int8", 3, False), ("down", 2, True), ("mixed", 2, False)])
def test_workers_get_encoded_means(way, workers, staged, options):
    assert run(workers, *["--staged"] * staged, "follows", way, "adamax", *options).count("follows") == workers


@pytest.mark.parametrize("way, optimizer", [("each", "adamw"), ("down", "adamax")])
def test_over_tls_it_is_the_same(way, optimizer):
    assert run(2, "follows", way, optimizer, P3_TLS="1").count("follows") == 2


def test_workers_whose_functions_choose_otherwise_are_told_of_which_parameter():
    status, output = jobs.run_p3(2, 1, script("differs"))
    assert status != 0
    assert re.search(
        r"worker 0 \(.*\) and worker 1 \(.*\) disagree about key '2.weight': compression is {'type': 'int8'} on the "
        "first and {'type': 'bf16'} on the second", output), output  # fmt: skip


@pytest.mark.parametrize("aggregates", ["0", "1"])
def test_workers_of_one_machine_get_the_same(aggregates):
    assert run(3, "follows", "down", "adamw", aggregates=aggregates).count("follows") == 3


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="torch has none for the CPU before 2.3")
@pytest.mark.parametrize("options", [(), ("synchronous",), ("clipped",)])
@pytest.mark.parametrize("way", ["bf16", "fp16"])
def test_a_step_that_overflows_is_left_out_with_a_codec_that_keeps_nothing(way, options):
    assert run(2, "scaled", way, *options).count("has left out one step") == 2


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamax"])
def test_int8_both_ways_learns_as_much_as_plain_training(optimizer):
    assert run(2, "learns", "int8", optimizer, aggregates="1").count("has learned as much") == 2


# One worker, in this process


@pytest.mark.parametrize("compression, up, down", [
    ("int8", "int8", "int8"),
    ({"up": "int8", "down": "bf16"}, "int8", "bf16"),
    ({"down": {"type": "2bit", "threshold": 0.1}}, None, "2bit"),
    ({"up": "int8", "down": None}, "int8", None),
    ({"type": "int8"}, "int8", None),
    ({"type": "2bit", "threshold": 0.1}, "2bit", None),
    (None, None, None),
])  # fmt: skip
def test_each_way_is_as_it_is_asked_for(compression, up, down):
    model = small_model()
    optimizer = p3.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, compression=compression
    )
    of_weight, of_bias = (one.key.axes for one in list(optimizer._p3.parameters)[:2])
    assert (of_weight.codec.get("type"), of_weight.value_codec.get("type")) == (up, down)
    assert (of_bias.codec.get("type"), of_bias.value_codec.get("type")) == (up, None)
    optimizer.release()


def test_a_function_of_name_and_shape_chooses_for_each_parameter_once():
    asked, model = [], small_model()

    def choose(name, shape):
        asked.append((name, shape))
        return {"0.weight": "int8", "0.bias": {"down": "int8"}, "2.weight": {"up": "topk", "down": "bf16"}}.get(name)

    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, compression=choose)
    assert asked == [("0.weight", (3, 4)), ("0.bias", (3,)), ("2.weight", (2, 3)), ("2.bias", (2,))]
    assert types_of(optimizer) == [("int8", "int8"), (None, None), ("topk", "bf16"), (None, None)]
    step(model, optimizer)
    optimizer.synchronize(exact=True)
    optimizer.release()


def test_a_group_has_its_own_and_the_others_have_what_is_given():
    model = small_model()
    groups = [{"params": [model[0].weight], "compression": {"up": "int8"}},
              {"params": [model[0].bias, model[2].bias], "compression": None},
              {"params": [model[2].weight]}]  # fmt: skip
    plain = torch.optim.AdamW(groups, lr=0.1)
    optimizer = p3.torch.DistributedOptimizer(plain, model, compression=lambda name, shape: "bf16")
    expected = [("int8", None), (None, None), (None, None), ("bf16", "bf16")]
    assert types_of(optimizer) == expected
    step(model, optimizer)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    optimizer.release()
    torch.optim.AdamW(groups, lr=0.1).load_state_dict(saved)
    optimizer = p3.torch.DistributedOptimizer(plain, model, compression=lambda name, shape: "bf16")
    assert types_of(optimizer) == expected
    step(model, optimizer)
    optimizer.release()


def test_trainers_take_it_from_the_groups():
    from p3.trainers import gradients

    model = small_model()
    groups = [{"params": [model[0].weight, model[2].weight], "compression": "int8"},
              {"params": [model[0].bias, model[2].bias]}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    gradients.distribute(optimizer, [model])
    assert types_of(optimizer) == [("int8", "int8")] * 2 + [(None, None)] * 2
    backward(model)
    gradients.clip_norm([optimizer], list(model.parameters()), 1.0, 2.0)
    optimizer.step()
    optimizer.release()


def test_steps_of_dgc_and_gradients_in_few_bits_are_trained_side_by_side():
    model, dgc = small_model(), {"type": "dgc", "ratio": 1.0, "masking": False}
    optimizer = p3.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), model,
        compression=lambda name, shape: dgc if name == "0.weight" else "int8",
    )  # fmt: skip
    assert [one.takes_steps for one in optimizer._p3.parameters] == [True, False, False, False]
    plain = small_model()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)
    for _ in range(3):
        step(model, optimizer)
        step(plain, reference)
    optimizer.synchronize()
    for one, expected in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(one, expected, rtol=0, atol=0.02)
    optimizer.release()


def types_of(optimizer):
    """Up and down, of each parameter."""
    axes = [one.key.axes for one in optimizer._p3.parameters]
    return [(one.codec.get("type"), one.value_codec.get("type")) for one in axes]


@pytest.mark.parametrize("compression, said", [
    (lambda name, shape: "int9" if name == "2.weight" else "int8",
     "the compression of 2.weight: compression: type is 'int9'; it must be one of"),
    (lambda name, shape: {"down": "dgc"}, "the compression of 0.weight: value_compression: type is 'dgc'"),
    (lambda name, shape: choice,
     "the compression of 0.weight: compression is <module .*; it must be a name, as 'int8', a dict"),
    (lambda name, shape: {"type": "dgc"} if name == "2.weight" else "int8",
     r"DistributedOptimizer, parameter 2.weight: dgc and another optimizer on the servers .* exclude each other"),
])  # fmt: skip
def test_what_a_function_cannot_have_is_refused_by_the_parameters_name(compression, said):
    model = small_model()
    with pytest.raises(ValueError, match=said):
        p3.torch.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model, compression=compression)


@pytest.mark.parametrize("compression, said", [
    ("int9", "param group 1 of the optimizer: compression: type is 'int9'; it must be one of"),
    (lambda name, shape: "int8", "param group 1 of the optimizer: its compression is a function; give that to Distri"),
])  # fmt: skip
def test_what_a_group_cannot_have_is_refused_by_its_number(compression, said):
    model = small_model()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "compression": compression}]
    with pytest.raises(ValueError, match=said):
        p3.torch.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1), model)


@pytest.mark.parametrize("options, said", [
    ({"compression": "int9"}, "compression: type is 'int9'; it must be one of"),
    ({"compression": {"up": "int8", "down": "dgc"}}, "value_compression: type is 'dgc'; it must be one of"),
    ({"compression": {"down": {"type": "int8", "bits": 8}}}, "value_compression int8: 'bits'"),
    ({"compression": {"up": {"type": "dgc", "ratio": 0.1}, "down": "int8"}},
     r"compression of what comes back \(int8\) and dgc exclude each other"),
    ({"compression": "2bit"}, "threshold is missing"),
    ({"compression": 5}, "compression is 5; it must be a name, .* a dict, .* or None"),
])  # fmt: skip
def test_what_cannot_be_had_is_refused_by_name(options, said):
    model = small_model()
    with pytest.raises(ValueError, match=said):
        p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="torch has none for the CPU before 2.3")
@pytest.mark.parametrize("is_synchronous", [False, True])
def test_with_a_loss_scaler_nothing_that_servers_would_have_to_undo(is_synchronous):
    model, kind = small_model(), torch.amp.GradScaler if is_synchronous else p3.torch.GradScaler
    options = {"synchronous": is_synchronous}
    made = lambda: torch.optim.AdamW(model.parameters(), lr=0.1)  # noqa: E731
    with pytest.raises(ValueError, match=r"keeps what it leaves out \(int8\).*Use bf16 or fp16"):
        p3.torch.DistributedOptimizer(made(), model, compression={"down": "int8"}, grad_scaler=kind("cpu"), **options)
    optimizer = p3.torch.DistributedOptimizer(
        made(), model, compression={"down": "bf16"}, grad_scaler=kind("cpu"), **options
    )
    optimizer.release()


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="torch has none for the CPU before 2.3")
def test_a_scaler_that_nobody_has_named_is_found():
    model = small_model()
    optimizer = p3.torch.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.1), model, compression={"down": "int8"}, synchronous=True
    )
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(sum(one.sum() for one in model.parameters())).backward()
    optimizer.synchronize()
    with pytest.raises(ValueError, match="a GradScaler that DistributedOptimizer does not know"):
        scaler.step(optimizer)
    optimizer.release()


def test_with_staleness_it_gives_way():
    model = small_model()
    optimizer = p3.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, compression="int8", staleness=1
    )
    assert all(not one.key.axes.value_codec and one.key.axes.codec for one in optimizer._p3.parameters)
    step(model, optimizer)
    optimizer.release()


def test_what_is_encoded_is_said_once(caplog):
    caplog.set_level("INFO", logger="p3")
    model = small_model()
    optimizer = p3.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, compression="int8")
    optimizer.release()
    assert len(re.findall("what comes back of store .* is compressed", caplog.text)) == 1
    assert len(re.findall("changes of the weights .* come back as int8", caplog.text)) == 1


def test_what_a_function_has_chosen_is_said_of_each_type_once_with_a_warning(caplog):
    caplog.set_level("INFO", logger="p3")
    model = small_model()
    optimizer = p3.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model,
        compression=lambda name, shape: "int8" if name == "0.weight" else "bf16" if len(shape) > 1 else None,
    )  # fmt: skip
    optimizer.release()
    for codec in ("int8", "bf16"):
        assert len(re.findall("the gradients of 1 of 4 parameters travel as %s" % codec, caplog.text)) == 1
        assert len(re.findall("changes of the weights of 1 of 4 parameters come back as %s" % codec, caplog.text)) == 1
        lossy = r"WARNING .*: key '\d.weight' of store \d+, and others so, is compressed, {'type': '%s'}" % codec
        assert len(re.findall(lossy, caplog.text)) == 1, caplog.text
        assert len(re.findall("what comes back of key .* is compressed, {'type': '%s'}" % codec, caplog.text)) == 1


def test_exact_weights_come_also_behind_load_state_dict_of_an_optimizer_without_states():
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = p3.torch.DistributedOptimizer(optimizer, model, compression={"down": "int8"})
    model(torch.randn(4, 64)).square().sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.synchronize()
    compressed = model.weight.detach().clone()
    optimizer.synchronize(exact=True)
    assert not model.weight.equal(compressed)
    optimizer.release()
