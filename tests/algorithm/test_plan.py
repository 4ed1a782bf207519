"""A plan that is kept from step to step is made anew when something has changed: a new optimizer does the same."""

import weakref

import pytest
import torch
from torch import nn

from adahessian import AdaHessian


def make():
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in [(4, 6), (6,), (3, 2, 2, 2), (2, 6)]]
    groups = [{"params": params[:2], "block_size": 2}, {"params": params[2:3], "signed": True}]
    return params, AdaHessian(groups, lr=0.05, curvature_every=2, weight_decay=0.1)


def renewed(optimizer):
    """An optimizer that has seen nothing yet, with the groups and states of this one."""
    other = AdaHessian([nn.Parameter(torch.ones(1))])
    other.param_groups, other.state = optimizer.param_groups, optimizer.state
    return other


def reverse(params, optimizer):
    optimizer.param_groups[0]["params"].reverse()


def set_signed(params, optimizer):
    optimizer.param_groups[0]["signed"] = True


def set_learning_rate(params, optimizer):
    optimizer.param_groups[0]["lr"] = 0.3


def set_tensor_learning_rate(params, optimizer):
    optimizer.param_groups[0]["lr"] = torch.tensor(0.3)


def set_power_and_eps(params, optimizer):
    optimizer.param_groups[0].update(hessian_power=0.5, eps=0.1, betas=(0.5, 0.5), maximize=True)


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


def exchange_parameters(params, optimizer):
    params[0].data, params[3].data = torch.ones(2, 6), torch.ones(4, 6)
    optimizer.param_groups[0]["params"][0] = params[3]
    optimizer.state[params[3]] = optimizer.state.pop(params[0])


def replace_momentum(params, optimizer):
    optimizer.state[params[0]]["exp_avg"] = torch.ones(4, 6)


def replace_curvature(params, optimizer):
    optimizer.state[params[0]]["hessian_rms"] = torch.ones(4, 3)


def replace_counts(params, optimizer):
    optimizer.state[params[0]]["step"] = torch.tensor(10.0)
    optimizer.state[params[0]]["measurements"] = torch.tensor(5.0)


def other_precision(params, optimizer):
    for param in params:
        param.data = param.data.double()
        param.grad = None
    optimizer.load_state_dict(optimizer.state_dict())


def other_memory_format(params, optimizer):
    params[2].data = params[2].data.contiguous(memory_format=torch.channels_last)


def count_on_the_device(params, optimizer):
    for group in optimizer.param_groups:
        group["capturable"] = True


CHANGES = [
    reverse,
    set_signed,
    set_learning_rate,
    set_tensor_learning_rate,
    set_power_and_eps,
    add_group,
    remove_group,
    move_to_another_group,
    freeze,
    replace_state,
    exchange_parameters,
    replace_momentum,
    replace_curvature,
    replace_counts,
    other_precision,
    other_memory_format,
    count_on_the_device,
]


def steps(params, optimizer, first, count, *, forget=False):
    """The probes drawn, and the parameters, after each of several steps on losses that differ."""
    seen = []
    for number in range(first, first + count):
        if forget:
            optimizer = renewed(optimizer)
        measured = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
        generator = torch.Generator().manual_seed(number)
        for param in measured:
            param.grad = torch.randn(param.shape, generator=generator).to(param)
        if optimizer.curvature_due:
            seen += [probe.clone() for probe in optimizer._begin_measurement().draw(0)]
            diagonal = {param: torch.randn(param.shape, generator=generator).to(param) for param in measured}
            optimizer.set_curvature(diagonal, {param: param.grad for param in measured})
        optimizer.step()
        seen += [param.detach().clone() for param in params]
    return seen


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change):
    runs = []
    for forget in (False, True):
        params, optimizer = make()
        before = steps(params, optimizer, 0, 3, forget=forget)
        change(params, optimizer)
        runs.append(before + steps(params, optimizer, 3, 4, forget=forget))
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)


def test_the_changes_change_something():
    """Or the test above would prove nothing."""
    params, optimizer = make()
    unchanged = steps(params, optimizer, 0, 7)
    for change in CHANGES:
        if change in (exchange_parameters, count_on_the_device, other_precision, other_memory_format):
            continue
        params, optimizer = make()
        steps(params, optimizer, 0, 3)
        change(params, optimizer)
        final = steps(params, optimizer, 3, 4)[-len(params) :]
        assert any(not torch.equal(a, b) for a, b in zip(final, unchanged[-len(params) :], strict=True)), change


def test_parameters_without_a_gradient_now_and_then():
    runs = []
    for forget in (False, True):
        params, optimizer = make()
        steps(params, optimizer, 0, 1)
        for number in range(1, 7):
            if forget:
                optimizer = renewed(optimizer)
            for i, param in enumerate(params[:3]):
                param.grad = None if number % (i + 2) == 0 else torch.full_like(param, 1.0 + number)
            if number % 2 == 0:
                chosen = params[number % 3 : 3]
                optimizer.set_curvature({param: torch.full_like(param, 2.0) for param in chosen})
            optimizer.step()
        counts = [
            float(optimizer.state[param][key]) for param in params[:3] for key in ("step", "measurements", "dropped")
        ]
        runs.append([*counts, *(param.detach() for param in params)])
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)
    assert runs[0][0] != runs[0][3]


def test_a_parameter_of_another_shape_is_noticed():
    params, optimizer = make()
    steps(params, optimizer, 0, 3)
    params[0].data = torch.ones(3, 6)
    with pytest.raises(RuntimeError, match="shape"):
        steps(params, optimizer, 3, 1)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize(
    "make_other",
    [lambda: nn.Parameter(torch.eye(3).to_sparse_csr(), requires_grad=False), lambda: nn.LazyLinear(2).weight],
    ids=["compressed rows", "lazy"],
)
def test_parameters_that_are_not_measured_may_have_no_shape_or_strides(make_other):
    param = nn.Parameter(torch.ones(3))
    optimizer = AdaHessian([param, make_other()], lr=0.1)
    for _ in range(3):
        param.grad = torch.ones(3)
        optimizer.set_curvature({param: torch.full((3,), 2.0)})
        optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((3,), 1 - 3 * 0.05), rtol=1e-4, atol=0)


def test_a_lazy_parameter_joins_when_it_has_a_shape():
    layer = nn.LazyLinear(2)
    optimizer = AdaHessian(layer.parameters(), lr=0.1)
    layer(torch.ones(4, 3)).square().sum().backward(create_graph=True)
    before = layer.weight.detach().clone()
    optimizer.step()
    assert layer.weight.detach().ne(before).all()


def test_a_parameter_that_is_listed_twice_has_two_probes():
    param = nn.Parameter(torch.ones(64))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = AdaHessian([param, param])
    first, second = optimizer._begin_measurement().draw(0)
    assert not torch.equal(first, second)


def test_what_was_removed_is_not_kept_alive():
    params, optimizer = make()
    steps(params, optimizer, 0, 3)
    removed = weakref.ref(optimizer.param_groups[0]["params"].pop())
    optimizer.state.pop(removed())
    del params[1]
    steps(params, optimizer, 3, 3)
    assert removed() is None


def test_a_plan_is_kept_while_nothing_changes():
    params, optimizer = make()
    steps(params, optimizer, 0, 4)
    known = optimizer._plan.buckets
    assert len(known) == 2
    steps(params, optimizer, 4, 4)
    assert optimizer._plan.buckets is known
