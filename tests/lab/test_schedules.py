import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau

from adahessian.lab.schedules import Schedule
from adahessian.lab.settings import Settings


def rates(steps, **settings):
    """The learning rate of each step, with four steps an epoch."""
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = Schedule(
        optimizer,
        Settings(**{"epochs": 10, "batch_size": 1, "lr": 1.0, **settings}),
        steps_per_epoch=4,
        higher_is_better=True,
    )
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def test_constant_after_a_warm_up():
    assert rates(6, lr_warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def test_by_steps_at_the_end_of_epochs():
    assert rates(14, schedule="steps", decay_epochs=(2, 3)) == pytest.approx([1] * 8 + [0.1] * 4 + [0.01] * 2)


def test_inverse_square_root():
    found = rates(17, schedule="inverse-sqrt", lr_warmup_steps=4)
    assert found[3] == 1
    assert found[15] == pytest.approx(0.5)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_to_zero_at_the_end(schedule):
    found = rates(41, schedule=schedule)
    assert found[0] == 1
    assert found[20] == pytest.approx(0.5)
    assert found[40] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_on_a_plateau_as_torchs_own(higher_is_better):
    results = [1.0, 2.0, 2.0005, 2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    results = results if higher_is_better else [10 - result for result in results]
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    other = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    settings = Settings(epochs=20, batch_size=1, lr=1.0, schedule="plateau", decay_factor=0.5, plateau_patience=3)
    schedule = Schedule(optimizer, settings, steps_per_epoch=3, higher_is_better=higher_is_better)
    theirs = ReduceLROnPlateau(other, "max" if higher_is_better else "min", factor=0.5, patience=3, threshold=1e-3)
    for result in results:
        for _ in range(3):
            assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]
            optimizer.step()
            schedule.step()
            other.step()
        schedule.after_epoch(result)
        theirs.step(result)
    assert optimizer.param_groups[0]["lr"] < 0.5
