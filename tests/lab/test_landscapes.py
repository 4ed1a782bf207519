import pytest
import torch

from adahessian.lab import landscapes
from adahessian.lab.landscapes import WAVY_LRS, WAVY_STARTS, WavyWalks

STEPS = 300


@pytest.fixture(scope="module")
def walks():
    return landscapes.compare_hessian_momentum(steps=STEPS)


def test_one_step_solves_the_quadratic():
    paths = landscapes.solve_quadratic()
    distances = {name: path.norm(dim=1) for name, path in paths.items()}
    assert distances[landscapes.ADAHESSIAN][1:].max() < 1e-6
    assert distances[landscapes.ADAHESSIAN_WITH_MOMENTUM][1] < 1e-6
    assert distances[landscapes.GRADIENT_DESCENT][1] > 2


def test_gradient_descent_has_its_best_learning_rate():
    distance = landscapes.solve_quadratic()[landscapes.GRADIENT_DESCENT].norm(dim=1)
    # The condition number is 10: no constant learning rate shrinks both coordinates by more than 9/11 a step.
    torch.testing.assert_close(distance[1:] / distance[:-1], torch.full_like(distance[1:], 9 / 11))


def test_walks_cover_every_start_and_learning_rate(walks):
    for walk in walks.values():
        assert walk.positions.shape == (len(WAVY_LRS), STEPS + 1, len(WAVY_STARTS))
        assert walk.final_heights.shape == walk.arrived.shape == (len(WAVY_LRS), len(WAVY_STARTS))
        assert torch.equal(walk.positions[0, 0], WAVY_STARTS)


def test_hessian_momentum_helps_at_large_learning_rates_with_the_usual_beta1(walks):
    with_momentum = walks[landscapes.WITH_HESSIAN_MOMENTUM].shares()
    without = walks[landscapes.WITHOUT_HESSIAN_MOMENTUM].shares()
    for lr, share, share_without in zip(WAVY_LRS, with_momentum, without, strict=True):
        if lr >= 3:
            assert share > share_without


def test_a_walker_does_not_feel_the_others(walks):
    alone = landscapes.Walkers(landscapes.wavy, [WAVY_STARTS[40:41]])
    optimizer = landscapes.adahessian.AdaHessian(alone.parameters(), lr=WAVY_LRS[2])
    path = landscapes.walk(alone, optimizer, steps=20)[0, :, 0]
    torch.testing.assert_close(path, walks[landscapes.WITH_HESSIAN_MOMENTUM].positions[2, :21, 40])


def test_passing_through_the_lowest_valley_is_not_arriving():
    lowest, _ = landscapes.lowest_minimum()
    positions = torch.full((1, 301, 4), 0.5, dtype=torch.float64)
    positions[0, 7:, 0] = lowest
    positions[0, 7:, 1] = -lowest
    positions[0, 7:200, 2] = lowest
    walk = WavyWalks(positions)
    assert walk.arrived.tolist() == [[True, True, False, False]]
    assert walk.arrival_steps.tolist() == [[7, 7, 301, 301]]
    assert walk.shares() == [0.5]
    assert walk.median_arrival_steps() == [7]
