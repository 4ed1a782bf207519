"""What is looked up once is looked up again when it has changed: beside an optimizer that forgets at every step."""

import weakref

import pytest
import torch
from torch import nn

from adahessian import AdaHessian


class Forgetful(AdaHessian):
    """Looks everything up anew."""

    def _look_up(self, params, members, *, of_shards):
        self._measuring.clear()
        return super()._look_up(params, members, of_shards=of_shards)

    def _gather(self, group):
        self._stepping.clear()
        return super()._gather(group)


def make(kind):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in [(4, 6), (6,), (3, 2, 2, 2), (2, 6)]]
    groups = [{"params": params[:2], "block_size": 2}, {"params": params[2:3], "averaging": "signed"}]
    return params, kind(groups, lr=0.05, update_every=2, weight_decay=0.1)


def reverse(params, optimizer):
    optimizer.param_groups[0]["params"].reverse()


def set_averaging(params, optimizer):
    optimizer.param_groups[0]["averaging"] = "signed"


def add_group(params, optimizer):
    optimizer.add_param_group({"params": params[3:], "block_size": 3})


def remove_group(params, optimizer):
    del optimizer.param_groups[0]


def move_to_another_group(params, optimizer):
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())


def freeze(params, optimizer):
    params[1].requires_grad_(False)
    params[1].grad = None


def replace_state(params, optimizer):
    optimizer.state[params[0]] = {key: value.clone() for key, value in optimizer.state[params[0]].items()}
    optimizer.state[params[0]]["exp_avg"].zero_()


def let_another_take_over(params, optimizer):
    params[0].data, params[3].data = torch.ones(2, 6), torch.ones(4, 6)
    optimizer.param_groups[0]["params"][0] = params[3]
    optimizer.state[params[3]] = optimizer.state.pop(params[0])


def replace_momentum(params, optimizer):
    optimizer.state[params[0]]["exp_avg"] = torch.ones(4, 6)


def replace_count(params, optimizer):
    optimizer.state[params[0]]["step"] = torch.tensor(10.0)


def other_precision(params, optimizer):
    for param in params:
        param.data = param.data.double()
        param.grad = None
    optimizer.load_state_dict(optimizer.state_dict())


def count_on_the_device(params, optimizer):
    for group in optimizer.param_groups:
        group["capturable"] = True


CHANGES = [
    reverse,
    set_averaging,
    add_group,
    remove_group,
    move_to_another_group,
    freeze,
    replace_state,
    let_another_take_over,
    replace_momentum,
    replace_count,
    other_precision,
    count_on_the_device,
]


def steps(params, optimizer, first, count):
    """What was drawn, and the parameters, after each of several steps on losses that differ."""
    seen = []
    for number in range(first, first + count):
        measured = optimizer.measured_parameters()
        generator = torch.Generator().manual_seed(number)
        for param in measured:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        if optimizer.curvature_due:
            probes = optimizer.draw_probes(0)
            seen += [probe.clone() for probe in probes]
            diagonal = [torch.randn(param.shape, generator=generator).to(param.dtype) for param in measured]
            optimizer.feed_curvature(
                dict(zip(measured, diagonal, strict=True)), {param: param.grad for param in measured}
            )
        optimizer.step()
        seen += [param.detach().clone() for param in params]
    return seen


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change):
    runs = []
    for kind in (AdaHessian, Forgetful):
        params, optimizer = make(kind)
        seen = steps(params, optimizer, 0, 3)
        change(params, optimizer)
        runs.append(seen + steps(params, optimizer, 3, 4))
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)


def test_a_parameter_of_another_shape_is_noticed():
    params, optimizer = make(AdaHessian)
    steps(params, optimizer, 0, 3)
    params[0].data = torch.ones(3, 6)
    with pytest.raises(RuntimeError, match="has the shape"):
        steps(params, optimizer, 3, 1)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize(
    "make_other",
    [lambda: nn.Parameter(torch.eye(3).to_sparse_csr(), requires_grad=False), lambda: nn.LazyLinear(2).weight],
    ids=["compressed rows", "lazy"],
)
def test_nothing_is_asked_of_parameters_that_are_not_measured(make_other):
    """They may have no shape or no strides."""
    param = nn.Parameter(torch.ones(3))
    optimizer = AdaHessian([param, make_other()], lr=0.1)
    for _ in range(3):
        param.grad = torch.ones(3)
        optimizer.feed_curvature({param: torch.full((3,), 2.0)})
        optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((3,), 1 - 3 * 0.05), rtol=1e-4, atol=0)


def test_a_parameter_that_is_listed_twice_has_two_probes():
    param = nn.Parameter(torch.ones(64))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = AdaHessian([param, param])
    first, second = optimizer.draw_probes(0)
    assert not torch.equal(first, second)


def test_what_was_removed_is_not_kept_alive():
    params, optimizer = make(AdaHessian)
    steps(params, optimizer, 0, 3)
    removed = weakref.ref(optimizer.param_groups[0]["params"].pop())
    optimizer.state.pop(removed())
    del params[1]
    steps(params, optimizer, 3, 3)
    assert removed() is None


def test_what_has_not_changed_is_recognised():
    params, optimizer = make(AdaHessian)
    steps(params, optimizer, 0, 4)
    known = dict(optimizer._measuring), dict(optimizer._stepping)
    steps(params, optimizer, 4, 4)
    assert known == (optimizer._measuring, optimizer._stepping)
    assert len(optimizer._measuring) == 2
    assert len(optimizer._stepping) == 2
