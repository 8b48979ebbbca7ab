"""Priorities follow the order in which the forward pass first uses the parameters."""

import itertools

import pytest

mx = pytest.importorskip("mxnet")
from mxnet import autograd, gluon  # noqa: E402

import p3  # noqa: E402,F401  (after MXNet on purpose: the plugin must find it imported already)
from p3.mxnet import forward_order  # noqa: E402
from p3.mxnet.priorities import Priorities  # noqa: E402

# The smallest square input that each net takes.
NETS = {"vgg19": 32, "resnet50_v1": 32, "mobilenet1.0": 32, "densenet121": 224}
MODES = {
    "imperative": None,
    "hybridized": {},
    "static_alloc": {"static_alloc": True},
    "static_shape": {"static_alloc": True, "static_shape": True},
}


def call_order(net):
    """Parameters in the order in which their blocks are called; complete after a forward pass."""
    order = []

    def note(block, _inputs):
        order.extend(parameter for parameter in block._reg_params.values() if parameter not in order)

    net.apply(lambda block: block.register_forward_pre_hook(note))
    return order


def graph_order(net):
    parameters = net.collect_params()
    names = net(mx.sym.var("data")).list_arguments()
    return [parameters[name] for name in names if name in parameters]


def wrong_pairs(order):
    used = [p for p in order if p.grad_req != "null"]
    assert len(used) > 30
    return sum(
        forward_order.position(sooner) > forward_order.position(later)
        for sooner, later in itertools.combinations(used, 2)
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NETS)
def test_no_pair_of_parameters_in_the_wrong_order(name, mode):
    net = gluon.model_zoo.vision.get_model(name)
    net.initialize(mx.init.Zero())
    if MODES[mode] is None:
        order = call_order(net)
    else:
        order = graph_order(net)
        net.hybridize(**MODES[mode])
    with autograd.record():
        net(mx.nd.zeros((1, 3, NETS[name], NETS[name]))).wait_to_read()
    assert wrong_pairs(order) == 0


def test_trainers_own_numbering_would_have_pairs_in_the_wrong_order():
    """Or the tests above would show nothing."""
    net = gluon.model_zoo.vision.get_model("mobilenet1.0")
    order = graph_order(net)
    numbers = {name: number for number, name in enumerate(sorted(net.collect_params()))}
    wrong = sum(numbers[a.name] > numbers[b.name] for a, b in itertools.combinations(order, 2))
    assert wrong > 0.3 * len(order) * (len(order) - 1) / 2


def dense(name, **settings):
    layer = gluon.nn.Dense(2, in_units=2, prefix=name, **settings)
    layer.initialize()
    return layer


def use(*layers):
    x = mx.nd.ones((1, 2))
    with autograd.record():
        for layer in layers:
            x = layer(x)


def positions(*layers):
    return [forward_order.position(layer.weight) for layer in layers]


def test_only_what_is_used_while_recording_counts():
    early, late = dense("early"), dense("late")
    late(mx.nd.ones((1, 2)))
    assert positions(early, late) == [None, None]
    use(early)
    use(late)
    assert positions(early)[0] < positions(late)[0]


def test_shared_parameter_counts_at_first_use():
    first, second = dense("first"), dense("second")
    again = dense("again", params=first.params)
    use(first, second, again)
    assert again.weight is first.weight
    assert positions(first)[0] < positions(second)[0]


def test_until_its_gradient_is_pushed_only_the_first_use_of_a_parameter_counts():
    first, skipped, last = dense("first"), dense("skipped"), dense("last")
    use(first, last)
    before = positions(first, last)
    use(first, skipped, last)
    assert positions(first, last) == before
    assert positions(skipped)[0] > before[1]
    for layer in (first, skipped, last):
        forward_order.end_step(layer.weight)
    use(last, skipped)
    assert positions(last)[0] < positions(skipped)[0] and positions(first)[0] == before[0]


def test_deferred_initialisation_keeps_the_order():
    net = gluon.nn.HybridSequential()
    for units in (4, 3, 2):
        net.add(gluon.nn.Dense(units))
    net.initialize()
    net.hybridize()
    use(net)
    order = positions(*net)
    assert None not in order and order == sorted(order)


def test_owner_of_finds_values_and_gradients_by_identity():
    layer = dense("owned")
    use(layer)
    assert forward_order.owner_of(layer.weight.data()) is layer.weight
    assert forward_order.owner_of(layer.weight.grad()) is layer.weight
    assert forward_order.owner_of(layer.weight.data().copy()) is None
    old = layer.weight.data()
    layer.weight.cast("float64")
    assert forward_order.owner_of(old) is None


class Session:
    """What Priorities uses of a session, and of its orders."""

    def __init__(self, rank=0):
        self.rank, self.is_first = rank, rank == 0
        self.orders = self
        self.version = 0
        self.announced = []
        self.arrived = []

    def announce(self, store, names):
        if self.rank == 0:
            self.announced.append((store, names))

    def of(self, store):
        return self.arrived


class Key:
    def __init__(self, id):
        self.id = id


def keys_for(priorities, layers):
    """One key per weight, numbered against the forward order."""
    keys = [Key(number) for number in range(len(layers))]
    for key, layer in zip(keys, reversed(layers)):
        priorities.add(key, [layer.weight.data()])
    return keys[::-1]  # in forward order


def test_auto_ranks_by_first_use_and_unused_keys_last_by_the_callers_priority():
    layers = [dense("a"), dense("b"), dense("c")]
    use(*layers)
    priorities = Priorities(Session(), 0, "auto")
    keys = keys_for(priorities, layers)
    other, another = Key("other"), Key("another")
    priorities.add(other, [])
    priorities.add(another, [])
    pushed = [*zip(keys, (5, 7, 9)), (another, -1), (other, -2)]
    ranked = [priorities.of_round(key, caller, []) for key, caller in pushed]
    assert ranked == sorted(ranked, reverse=True)
    assert [core for core, _ in ranked[:3]] == [0, -1, -2]
    assert len({engine for _, engine in ranked}) == 5
    assert all(-(2**31) <= engine < 2**31 for _, engine in ranked)


def test_parameters_are_found_by_the_arrays_of_a_push():
    layers = [dense("a"), dense("b")]
    priorities = Priorities(Session(), 0, "auto")
    keys = keys_for(priorities, layers)  # before they are used
    use(*layers)
    for key, layer in zip(keys, layers):
        priorities.of_round(key, 0, [layer.weight.grad()])
    assert [priorities.of(key, 0, [])[0] for key in keys] == [0, -1]
    assert priorities.order_stats()["passes"] == 0, "one step, of which more and more was known"


def test_rank_0_announces_the_order_once_and_again_when_it_has_grown():
    layers = [dense("a"), dense("b"), dense("c")]
    use(*layers[:2])
    session = Session()
    priorities = Priorities(session, 3, "auto")
    keys = [Key(layer.name) for layer in layers]
    for key in keys:
        priorities.add(key, [])
    priorities.know_parameters({layer.name: layer.weight for layer in layers})
    assert session.announced == []
    for _ in range(2):
        for key in keys:
            priorities.of_round(key, 0, [])
    assert session.announced == [(3, ["a", "b"])]
    use(*layers)
    priorities.of_round(keys[0], 0, [])
    assert session.announced[1:] == [(3, ["a", "b", "c"])]


def test_the_order_follows_steps_that_have_another_one_and_reads_do_not_count():
    layers = [dense("a"), dense("b"), dense("c")]
    session = Session()
    priorities = Priorities(session, 0, "auto")
    keys = keys_for(priorities, layers)
    priorities.know_parameters({key.id: layer.weight for key, layer in zip(keys, layers)})

    def step(names):
        use(*(layers["abc".index(name)] for name in names))
        priorities.of(keys[0], 0, [])  # as of a fetch of rows in the middle of a forward pass
        pushed = {name: priorities.of_round(key, 0, [])[0] for name, key in zip("abc", keys)}
        return "".join(sorted(pushed, key=lambda name: -pushed[name]))

    assert [step(names) for names in ("abc", "abc", "cba", "cba", "cb")] == ["abc", "abc", "abc", "cba", "cba"]
    assert len(session.announced) == 2
    found = priorities.order_stats()
    assert (found["passes"], found["orders"]) == (4, 2)
    assert found["first"] == pytest.approx(1 / 4) and found["followed"] == pytest.approx(2 / 4)


def test_other_ranks_follow_rank_0_as_soon_as_its_order_arrives():
    layers = [dense("a"), dense("b")]
    use(*layers)
    session = Session(rank=1)
    priorities = Priorities(session, 0, "auto")
    keys = keys_for(priorities, layers)
    assert [priorities.of_round(key, 0, [])[0] for key in keys] == [0, -1]
    session.arrived = [keys[1].id, keys[0].id]
    session.orders.version += 1
    assert [priorities.of_round(key, 0, [])[0] for key in keys] == [-1, 0]
    assert session.announced == []


@pytest.mark.parametrize("mode, expected", [("caller", [3, 3, 8]), ("index", [0, -1, -2]), ("off", [0, 0, 0])])
def test_settings_caller_and_index(mode, expected):
    layers = [dense("a"), dense("b"), dense("c")]
    use(*reversed(layers))
    priorities = Priorities(Session(), 0, mode)
    keys = [Key(number) for number in range(3)]
    for key, layer in zip(keys, layers):
        priorities.add(key, [layer.weight.data()])
    ranked = [priorities.of(key, caller, []) for key, caller in zip(keys, (3, 3, 8))]
    assert [core for core, _ in ranked] == expected
    assert len({engine for _, engine in ranked}) == 3


def test_callers_priority_alone_where_no_parameter_was_seen():
    priorities = Priorities(Session(), 0, "auto")
    keys = [Key("x"), Key("y")]
    for key in keys:
        priorities.add(key, [])
    assert [priorities.of(key, caller, [])[0] for key, caller in zip(keys, (-4, 10**9))] == [-4, (1 << 19) - 1]
