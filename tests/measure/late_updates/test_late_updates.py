"""Chapter 5 of Zhang's thesis: gradients, rules and delays against independent implementations, and the command."""

import numpy as np
import pytest

from p3 import cli
from p3.measure.late_updates import rules
from p3.measure.late_updates.problems import Digits, Ratings
from p3.measure.late_updates.simulation import batches_to_target


class Line:
    """Whose gradients say which worker has made them in which iteration: worker w's in its n-th is n * 100 ** w."""

    def __init__(self):
        self.seen = []

    def first(self, random):
        return np.zeros(1)

    def gradients(self, copies, random):
        self.seen.append(copies[:, 0].copy())
        return np.array([[len(self.seen) * 100.0**worker] for worker in range(len(copies))])

    def is_reached(self, parameters):
        return False


class Plus(rules.Sgd):
    def __init__(self):
        super().__init__(-1.0)


def test_without_staleness_all_copies_have_all_updates_of_the_iterations_before():
    line = Line()
    assert batches_to_target(line, Plus(), workers=2, staleness=0, most=10, seed=0) is None
    sums = [sum(range(1, iteration + 1)) * 101.0 for iteration in range(6)]
    np.testing.assert_array_equal(line.seen, [[one, one] for one in sums])


def test_updates_come_once_to_each_copy_and_up_to_s_iterations_late():
    line, s = Line(), 3
    batches_to_target(line, Plus(), workers=2, staleness=s, most=400, seed=1)
    seen = np.array(line.seen)
    assert len(np.unique(seen[:, 0] - seen[:, 1])) > 1  # delays are drawn for each pair
    for iteration, copies in enumerate(seen):
        at_least, at_most = (sum(range(1, last + 1)) * 101.0 for last in (max(iteration - s, 0), iteration))
        assert np.all((at_least <= copies) & (copies <= at_most))


@pytest.mark.torch
@pytest.mark.parametrize("problem", [Digits(0), Digits(2)], ids=["regression", "network"])
def test_gradients_of_digits_are_torchs(problem):
    import torch

    random = np.random.default_rng(3)
    copies = np.stack([problem.first(random) + random.normal(0, 0.01, len(problem.first(random))) for _ in range(3)])
    made = problem.gradients(copies, np.random.default_rng(4))
    chosen = np.random.default_rng(4).integers(0, len(problem.labels), (3, 32))
    for copy, gradient, batch in zip(copies, made, chosen):
        leaf = torch.tensor(copy, requires_grad=True)
        values, begin = torch.tensor(problem.pictures[batch]), 0
        for number, (ins, outs) in enumerate(problem.shapes):
            weight = leaf[begin : begin + ins * outs].reshape(ins, outs)
            begin += ins * outs
            values = values @ weight + leaf[begin : begin + outs]
            begin += outs
            values = values.relu() if number + 1 < len(problem.shapes) else values
        torch.nn.functional.cross_entropy(values, torch.tensor(problem.labels[batch])).backward()
        np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-9, atol=1e-12)


def test_gradients_of_ratings_are_differences_of_their_loss():
    problem, random = Ratings(), np.random.default_rng(5)
    copy = problem.first(random)
    direction = random.normal(0, 1, len(copy))

    def loss(parameters):
        left, right = problem.factors(parameters)
        chosen = np.random.default_rng(6).integers(0, len(problem.ratings), len(problem.ratings) // 40)
        errors = (left[problem.rows[chosen]] * right[problem.columns[chosen]]).sum(axis=1) - problem.ratings[chosen]
        return errors @ errors + problem.PENALTY * parameters @ parameters

    (gradient,) = problem.gradients(copy[None], np.random.default_rng(6))
    step = 1e-5
    slope = (loss(copy + step * direction) - loss(copy - step * direction)) / (2 * step)
    assert gradient @ direction == pytest.approx(slope, rel=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize("name", rules.ALL)
def test_rules_are_torchs(name):
    import torch

    lr, first = 0.01, np.array([[0.5, -2.0], [3.0, 1.0]])
    made = {
        "SGD": lambda p: torch.optim.SGD([p], lr=lr),
        "momentum": lambda p: torch.optim.SGD([p], lr=lr, momentum=0.9),
        "Adam": lambda p: torch.optim.Adam([p], lr=lr),
        "RMSProp": lambda p: torch.optim.RMSprop([p], lr=lr, alpha=0.9),
        "Adagrad": lambda p: torch.optim.Adagrad([p], lr=lr, eps=rules.EPSILON),
    }[name]
    parameter = torch.nn.Parameter(torch.tensor(first))
    theirs, ours, rule = made(parameter), first.copy(), rules.ALL[name](lr)
    rule.start(*first.shape)
    for gradient in np.random.default_rng(7).normal(0, 1, (20, 2, 2)):
        parameter.grad = torch.tensor(gradient)
        theirs.step()
        ours += rule.updates(gradient)
        np.testing.assert_allclose(ours, parameter.detach().numpy(), rtol=1e-6)


def test_training_reaches_its_target_and_what_grows_without_bound_never_does():
    assert 0 < batches_to_target(Digits(1), rules.Momentum(0.01), workers=2, staleness=0, most=4000, seed=0) < 4000
    assert batches_to_target(Ratings(), rules.Sgd(1.0), workers=2, staleness=4, most=400, seed=0) is None


def test_command_prints_a_line_for_each_row(capsys):
    assert cli.main(["bench", "late_updates", "--studies", "workers", "--seeds", "1", "--most", "40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["workers", *"s = 0 s = 5 s = 10 s = 15 s = 20".split()]
    assert [line.split("  ")[0] for line in lines[3:]] == ["factors, workers: 4", "factors, workers: 8"]
