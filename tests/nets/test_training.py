"""Training: steps by relative rates, the moving average, schedules, checkpoints of a trainer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sfumato.data import ImageSet
from sfumato.engine import GradientVault
from sfumato.engine.state import restore, state_of
from sfumato.methods.class_counts import COUNTS_WEIGHT, class_counts, counts_release
from sfumato.nets.training import Trainer, equal_batches, even_labels, state_below, use_average, warm_cosine
from sfumato.privacy import Budget, Plan, Release


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


def ones(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: torch.ones_like(value) for name, value in trainer.parameters.items()}


def test_rates_go_by_prefix() -> None:
    """The first step of Adam moves each weight by its rate, against the sign of the gradient."""
    trainer = Trainer(network(), ema=0.5, rates={"0.": 1.0, "": 0.1})
    before = {name: value.detach().clone() for name, value in trainer.parameters.items()}
    trainer.set_rate(0.01)
    trainer.step(ones(trainer))
    for name, value in trainer.parameters.items():
        moved = float((value.detach() - before[name]).mean())
        assert moved == pytest.approx(-0.01 if name.startswith("0.") else -0.001, rel=1e-3), name


@pytest.mark.parametrize("warm_up", [False, True])
def test_the_average_follows_the_weights(warm_up: bool) -> None:
    trainer = Trainer(network(), ema=0.5, warm_up=warm_up)
    expected = next(trainer.average.parameters()).clone()
    trainer.set_rate(0.1)
    for step in range(4):
        trainer.step(ones(trainer))
        decay = min(0.5, (1 + step) / (10 + step)) if warm_up else 0.5
        expected = decay * expected + (1 - decay) * next(trainer.network.parameters()).detach()
        assert torch.allclose(next(trainer.average.parameters()), expected, atol=1e-6)
    use_average(trainer)
    assert torch.equal(next(trainer.network.parameters()), next(trainer.average.parameters()))


def test_descending_lowers_a_loss_and_reset_forgets_adam() -> None:
    trainer, inputs = Trainer(network(), ema=0.9), torch.ones(4, 3)
    losses = []
    for _ in range(50):
        trainer.set_rate(0.02)
        loss = (trainer.network(inputs) - 1).square().mean()
        losses.append(float(loss.detach()))
        trainer.descend(loss)
    assert losses[-1] < 0.01 * losses[0]
    assert trainer._optimizer.state
    trainer.reset()
    assert not trainer._optimizer.state


def test_schedules_and_batches() -> None:
    assert warm_cosine(0, 1000) < 0.1
    assert max(warm_cosine(step, 1000) for step in range(1000)) == pytest.approx(1, abs=0.01)
    assert warm_cosine(999, 1000) == pytest.approx(0.02, abs=1e-3)
    assert equal_batches(100, 1000) == 130
    assert equal_batches(100, 50) <= 50
    assert even_labels(3, 7, torch.device("cpu")).tolist() == [0, 1, 2] * 3
    assert state_below({"a.x": torch.ones(1), "b.x": torch.ones(1)}, "a.").keys() == {"x"}


def test_counts_are_declared_or_released(few_digits: ImageSet) -> None:
    public = few_digits.public()
    (release,) = counts_release(public, 0.5)
    assert (release.name, release.weight, release.nonnegative) == ("counts", COUNTS_WEIGHT / 2, True)
    declared = few_digits.public(declare_size=True)
    assert counts_release(declared) == []
    vault = GradientVault(few_digits, Plan((Release("counts", noise_multiplier=50.0),), Budget(10.0)), secure=False)
    assert class_counts(vault, declared).tolist() == [20, 20, 20, 1]
    assert not vault.ledger.charged("counts")
    released = class_counts(vault, public)
    assert vault.ledger.charged("counts") == 1
    assert released.min() >= 1


@pytest.mark.parametrize("frozen", ["0.", "1."])
def test_only_parameters_with_requires_grad_are_trained_and_averaged(frozen: str) -> None:
    """Frozen parameters stay in the network and in its average; the average follows the others by name."""
    model = network()
    for name, value in model.named_parameters():
        value.requires_grad_(not name.startswith(frozen))
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    trainer = Trainer(model, ema=0.5)
    assert trainer.parameters.keys() == {name for name in start if not name.startswith(frozen)}
    trainer.set_rate(0.1)
    trainer.descend((model(torch.ones(4, 3)) - 1).square().mean())
    own, average = dict(model.named_parameters()), dict(trainer.average.named_parameters())
    assert own.keys() == average.keys() == start.keys()
    for name, value in own.items():
        assert torch.equal(value, start[name]) == name.startswith(frozen), name
        assert torch.allclose(average[name], (start[name] + value.detach()) / 2, atol=1e-6), name
        assert not average[name].requires_grad
    assert not any(value.grad is not None for name, value in own.items() if name.startswith(frozen))
    use_average(trainer)
    assert all(torch.equal(own[name], average[name]) for name in start)


def test_a_trainer_of_frozen_parts_continues_from_its_state() -> None:
    def steps(trainer: Trainer, count: int) -> None:
        trainer.set_rate(0.1)
        for _ in range(count):
            trainer.descend((trainer.network(torch.ones(4, 3)) - 1).square().mean())

    trainers = []
    for _ in range(2):
        model = network()
        model[0].requires_grad_(False)
        trainers.append(Trainer(model, ema=0.5, warm_up=True))
    steps(trainers[0], 3)
    restore(trainers[1], {name: value.clone() for name, value in state_of(trainers[0]).items()})
    for trainer in trainers:
        steps(trainer, 2)
    states = [state_of(trainer) for trainer in trainers]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
