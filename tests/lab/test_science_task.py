import pytest
import torch
from small_tasks import load
from torch.func import hessian, vmap


@pytest.fixture(params=[1, 2])
def task(request):
    return load(f"pinn-poisson-{request.param}d")


def test_the_exact_solution_solves_the_equation(task):
    points, force = next(task.batches(0))
    second = vmap(hessian(lambda x: task.exact(x[None])[0][0]))(points)
    torch.testing.assert_close(-second.diagonal(dim1=1, dim2=2).sum(1), force)
    assert points.dtype == force.dtype == torch.float64
    assert points.abs().max() < 1
    assert (task._boundary.abs().amax(1) == 1).all()
    assert task.exact(task._boundary)[0].abs().max() < 1e-14

    def predict(points, shift=0.0, factor=1.0):
        solution, force = task.exact(points)
        return solution + shift, None, -factor * force

    batch = points, force
    assert task.loss(predict, batch) < 1e-25
    assert task.evaluate(predict)["relative_error"] == 0
    # The boundary excludes other solutions of the equation.
    assert task.loss(lambda points: predict(points, shift=1.0), batch) > 1
    assert task.loss(lambda points: predict(points, factor=0.0), batch) == pytest.approx(1, rel=0.5)
