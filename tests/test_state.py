"""Checkpoints: nothing is lost, and a resumed run is the run that was never stopped, bit by bit."""

import copy
import io
import pickle
from collections import defaultdict

import pytest
import torch
from torch import nn

from adahessian import AdaHessian, AdaHessianKron
from cases import BATCH_NORM, MLP, flat_parameters, train

OPTIONS = {"lr": 0.05, "block_size": 3, "curvature_every": 4, "curvature_warmup": 2, "seed": 7, "weight_decay": 0.1}


both = pytest.mark.parametrize("make", [AdaHessian, AdaHessianKron])


def through_a_file(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("steps_before", range(1, 8))
@pytest.mark.parametrize("averaging", ["auto", "factored"])
@pytest.mark.parametrize("way", ["object", "graph"])
def test_resume_is_bit_exact_anywhere_in_the_interval(steps_before, averaging, way):
    options = {**OPTIONS, "averaging": averaging}
    model, batch = BATCH_NORM.model(torch.float32), BATCH_NORM.batch(torch.float32)
    optimizer = AdaHessian(model.parameters(), **options)
    train(BATCH_NORM, model, optimizer, batch, steps_before, way)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(BATCH_NORM, model, optimizer, batch, 6, way)

    resumed = BATCH_NORM.model(torch.float32, seed=99)
    other = AdaHessian(resumed.parameters())  # the file brings its own options
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    train(BATCH_NORM, resumed, other, batch, 6, way)
    assert torch.equal(flat_parameters(resumed), flat_parameters(model))
    torch.testing.assert_close(other.state_dict()["state"], optimizer.state_dict()["state"], rtol=0, atol=0)
    assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_deep_copies_and_pickles_go_on_alike(copy_of):
    model, batch = MLP.model(torch.float32), MLP.batch(torch.float32)
    optimizer = AdaHessian(model.parameters(), **OPTIONS)
    train(MLP, model, optimizer, batch, 3, "object")
    other_model, other = copy_of((model, optimizer))
    train(MLP, model, optimizer, batch, 6, "object")
    train(MLP, other_model, other, batch, 6, "object")
    assert torch.equal(flat_parameters(model), flat_parameters(other_model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_averages_and_counts_keep_their_dtype_in_low_precision(dtype):
    param = nn.Parameter(torch.linspace(1, 2, 12).view(3, 4).to(dtype))
    optimizer = AdaHessian([param], lr=1e-3, block_size=2)

    def step(optimizer, param):
        optimizer.zero_grad()
        (param**4).sum().backward(create_graph=True)
        optimizer.step()

    for _ in range(300):  # bfloat16 cannot count so many measurements
        step(optimizer, param)
    state = optimizer.state[param]
    assert state["exp_avg"].dtype == dtype
    assert {state[key].dtype for key in ("step", "hessian_rms", "measurements", "dropped")} == {torch.float32}
    assert state["measurements"] == 300

    twin = nn.Parameter(param.detach().clone())
    other = AdaHessian([twin])
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    for key, value in state.items():
        assert other.state[twin][key].dtype == value.dtype, key
        assert torch.equal(other.state[twin][key], value), key
    for _ in range(3):
        step(optimizer, param)
        step(other, twin)
    assert torch.equal(param, twin)


def test_hooks_may_change_what_is_loaded():
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = AdaHessian([param])
    (param**2).sum().backward(create_graph=True)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())

    def double(_, state_dict):
        state_dict = copy.deepcopy(state_dict)
        state_dict["state"][0]["hessian_rms"] *= 2
        return state_dict

    optimizer.register_load_state_dict_pre_hook(double)
    optimizer.load_state_dict(saved)
    assert optimizer.state[param]["hessian_rms"].eq(4).all()
    optimizer.register_load_state_dict_post_hook(lambda o: o.state[param]["hessian_rms"].fill_(7))
    optimizer.load_state_dict(saved)
    assert optimizer.state[param]["hessian_rms"].eq(7).all()
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1
    assert len(optimizer._optimizer_load_state_dict_post_hooks) == 1


def test_keys_missing_in_an_older_file_are_filled_in():
    model, batch = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters(), lr=0.05)
    train(MLP, model, optimizer, batch, 3, "object")
    older = copy.deepcopy(optimizer.state_dict())
    for group in older["param_groups"]:
        for name in ("averaging", "capturable", "sparse", "maximize", "curvature_warmup"):
            del group[name]
    for state in older["state"].values():
        del state["dropped"]
        state["step"] = state["step"].item()
    other = copy.deepcopy(model)
    resumed = AdaHessian(other.parameters())
    resumed.load_state_dict(older)
    train(MLP, model, optimizer, batch, 3, "object")
    train(MLP, other, resumed, batch, 3, "object")
    assert torch.equal(flat_parameters(model), flat_parameters(other))


@pytest.mark.parametrize("missing", ["hessian_rms", "measurements"])
def test_a_state_without_curvature_waits_for_its_measurement(missing):
    """As in a checkpoint of another AdaHessian that left the Hessian out."""
    param = nn.Parameter(torch.ones(3))
    optimizer = AdaHessian([param])

    def step(curvature):
        optimizer.set_curvature({param: torch.full((3,), curvature)})
        param.grad = torch.ones(3)
        optimizer.step()

    for _ in range(3):
        step(5.0)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0][missing]
    saved["param_groups"][0]["measurements"] = 0
    optimizer.load_state_dict(saved)
    assert optimizer.curvature_due
    step(2.0)
    torch.testing.assert_close(optimizer.state[param]["hessian_rms"], torch.full((3,), 2.0))  # it counts alone
    assert optimizer.state[param]["measurements"] == 1


@both
def test_names_of_parameters_are_kept(make):
    model, batch = MLP.model(), MLP.batch()
    optimizer = make(model.named_parameters(), lr=0.05)
    train(MLP, model, optimizer, batch, 1, "object")
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_state_takes_one_plus_one_over_b_times_four_bytes_per_parameter(block_size):
    param = nn.Parameter(torch.randn(64, 128))
    optimizer = AdaHessian([param], block_size=block_size)
    (param**2).sum().backward(create_graph=True)
    optimizer.step()
    tensors = [value for value in optimizer.state[param].values() if value.dim()]
    assert sum(value.numel() * value.element_size() for value in tensors) == param.numel() * 4 * (1 + 1 / block_size)


def test_factored_state_is_one_value_per_row_and_column():
    param = nn.Parameter(torch.randn(64, 128))
    optimizer = AdaHessian([param], averaging="factored")
    (param**2).sum().backward(create_graph=True)
    optimizer.step()
    assert set(optimizer.state[param]) == {
        "step", "exp_avg", "hessian_row", "hessian_column", "measurements", "dropped"
    }  # fmt: skip
    assert sum(value.numel() for value in optimizer.state[param].values() if value.dim()) == 64 * 128 + 64 + 128


@both
def test_distributed_checkpoint_of_a_fresh_optimizer_moves_nothing(make):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model, batch = MLP.model(), MLP.batch()
    before = flat_parameters(model)
    optimizer = make(model.parameters(), **OPTIONS)
    get_optimizer_state_dict(model, optimizer)
    assert torch.equal(flat_parameters(model), before)
    assert optimizer.param_groups[0]["steps"] == 0
    train(MLP, model, optimizer, batch, 3, "object")

    resumed = MLP.model()
    resumed.load_state_dict(model.state_dict())
    other = make(resumed.parameters())
    set_optimizer_state_dict(resumed, other, copy.deepcopy(get_optimizer_state_dict(model, optimizer)))
    train(MLP, model, optimizer, batch, 6, "object")
    train(MLP, resumed, other, batch, 6, "object")
    assert torch.equal(flat_parameters(model), flat_parameters(resumed))


@both
def test_a_parameter_without_state_is_loaded_as_such(make):
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = make([unused, used])
    (used**2).sum().backward(create_graph=True)
    optimizer.step()
    other = make([unused, used])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert unused not in other.state
    torch.testing.assert_close(other.state[used], optimizer.state[used], rtol=0, atol=0)


@both
def test_two_optimizers_with_one_state_dict_count_for_themselves(make):
    model, batch = MLP.model(), MLP.batch()
    first = make(model.parameters())
    train(MLP, model, first, batch, 2, "object")
    other_model = MLP.model()
    second = make(other_model.parameters())
    second.load_state_dict(first.state_dict())
    train(MLP, model, first, batch, 3, "object")
    assert {int(state["step"]) for state in first.state.values()} == {5}
    assert {int(state["step"]) for state in second.state.values()} == {2}
    train(MLP, other_model, second, batch, 1, "object")
    assert {int(state["step"]) for state in second.state.values()} == {3}


def test_parameters_that_skip_steps_count_their_own():
    params = [torch.ones(3, requires_grad=True) for _ in range(3)]
    optimizer = AdaHessian(params, curvature_every=100)
    for number in range(4):
        for i, param in enumerate(params):
            param.grad = torch.ones(3) if i == 0 or number % (i + 1) == 0 else None
        if number == 0:
            optimizer.set_curvature({param: torch.ones(3) for param in params})
        optimizer.step()
    assert [int(optimizer.state[param]["step"]) for param in params] == [4, 2, 2]


def test_a_state_that_was_exchanged_is_noticed():
    param = torch.ones(3, requires_grad=True)
    optimizer = AdaHessian([param])
    param.grad = torch.ones(3)
    optimizer.set_curvature({param: torch.ones(3)})
    optimizer.step()
    optimizer.state[param]["exp_avg"] = torch.full((3,), -100.0)
    before = param.detach().clone()
    optimizer.step()
    assert (param > before).all()
    optimizer.state[param]["step"] = torch.tensor(1000.0)
    optimizer.step()
    assert optimizer.state[param]["step"] == 1001
    optimizer.state[param]["hessian_rms"] = torch.ones(4)
    with pytest.raises(RuntimeError, match="hessian_rms"):
        optimizer.step()


def test_the_state_of_a_fresh_optimizer_is_made_without_using_up_its_measurement():
    """torch.distributed.checkpoint makes it by a step with zero gradients and no learning rate."""
    param = nn.Parameter(torch.ones(3))
    optimizer = AdaHessian([param], lr=0.0)
    optimizer.set_curvature({param: torch.ones(3)})
    param.grad = torch.zeros(3)
    optimizer.step()
    assert optimizer.param_groups[0]["steps"] == optimizer.param_groups[0]["measurements"] == 0
    assert not optimizer.curvature_due
    optimizer.param_groups[0]["lr"] = 0.1
    param.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.param_groups[0]["measurements"] == 1


def test_another_averaging_is_rejected_while_there_is_a_state():
    param = nn.Parameter(torch.ones(3, 4))
    optimizer = AdaHessian([param])
    optimizer.set_curvature({param: torch.ones(3, 4)})
    param.grad = torch.ones(3, 4)
    optimizer.step()
    before = param.detach().clone()
    optimizer.param_groups[0]["averaging"] = "factored"
    with pytest.raises(RuntimeError, match="averaging"):
        optimizer.step()
    assert torch.equal(param, before)


def test_states_are_made_in_the_state_that_the_optimizer_has_now():
    param = nn.Parameter(torch.ones(3))
    optimizer = AdaHessian([param])
    optimizer.set_curvature({param: torch.ones(3)})
    optimizer.state = defaultdict(dict)
    optimizer.set_curvature({param: torch.ones(3)})
    param.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 1


def test_a_capturable_step_count_keeps_its_address():
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = AdaHessian(params, capturable=True)
    address = None
    for number in (1, 2):  # the second parameter gets its first gradient later
        optimizer.set_curvature({param: torch.ones(3) for param in params[:number]})
        for param in params[:number]:
            param.grad = torch.ones(3)
        optimizer.step()
        place = optimizer.state[params[0]]["step"]
        address = address or place.data_ptr()
    assert (place.data_ptr(), place.item()) == (address, 2.0)
    assert optimizer.state[params[1]]["step"] == 1


def test_bfloat16_decay_is_not_rounded_before_it_is_applied():
    param = nn.Parameter(torch.linspace(0.5, 2, 64, dtype=torch.bfloat16))
    expected = param.detach().clone().mul_(1 - 0.03 * 0.1)
    optimizer = AdaHessian([param], lr=0.03, weight_decay=0.1)
    optimizer.set_curvature({param: torch.ones_like(param)})
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert torch.equal(param, expected)
