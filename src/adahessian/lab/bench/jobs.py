"""An optimizer on a workload: its step, and its memory."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import adahessian
from adahessian.base.batches import tensors_in
from adahessian.cuda_graphs import CapturedFunction, Memory
from adahessian.lab.bench.workloads import LABELS, LR, Batch, Workload
from adahessian.lab.configs import optimizers as configs
from adahessian.lab.configs.optimizers import OptimizerConfig
from adahessian.lab.training.optimizers import build_optimizer, set_precision
from adahessian.lab.training.steps import LossFn, Take, make_step

Mode = Literal["eager", "captured", "update"]  # whole steps, or updates without gradients and curvature
Row: TypeAlias = dict[str, Any]

BASELINE = "baseline"


class Job(NamedTuple):
    """An optimizer to measure. Jobs are sent to processes of their own."""

    workload: Workload
    mode: Mode
    label: str
    config: OptimizerConfig
    device: torch.device

    @classmethod
    def of(cls, workload: Workload, mode: Mode, label: str, device: torch.device) -> Job:
        """Return the job of a label of LABELS, or of the BASELINE."""
        return cls(workload, mode, label, LABELS[workload.baseline if label == BASELINE else label], device)

    @property
    def cycle(self) -> int:
        """The number of steps after which the cost of a step repeats."""
        refreshes = 3 if isinstance(self.config, configs.AdaHessianKron) else 1  # of the roots
        every: int = getattr(self.config, "curvature_every", getattr(self.config, "precondition_every", 1))
        return 1 if self.mode == "update" else refreshes * every


class Training(NamedTuple):
    """A model in training. It keeps alive everything that a CUDA graph knows only by address."""

    model: nn.Module
    optimizer: Optimizer
    batch: Batch
    take: Take
    step: str  # how the step is taken: eager, compiled or captured

    def __call__(self) -> Tensor:
        """Take a step and return its loss."""
        return self.take(self.batch)


def prepare(job: Job) -> tuple[Training, Row]:
    """Start a training, take steps until their cost repeats, and measure the memory of a cycle."""
    on_gpu, captured = job.device.type == "cuda", job.mode == "captured"
    if on_gpu:
        set_precision("tf32")
        torch.backends.cudnn.benchmark = True  # as `train` does
        start(job._replace(label="", mode="eager", config=configs.SGD(lr=LR)))()  # one-time allocations do not count
    before = _held(captured=captured) if on_gpu else 0
    training = start(job)
    for _ in range(2 * job.cycle + getattr(job.config, "curvature_warmup", 0)):
        training()
    if on_gpu:
        _held(captured=captured)
        torch.cuda.reset_peak_memory_stats()
    for _ in range(job.cycle):
        loss = training()
    if not math.isfinite(loss.item()):
        raise ArithmeticError("The loss is not finite.")
    peak = torch.cuda.max_memory_reserved() if captured else torch.cuda.max_memory_allocated()
    parameters = sum(param.numel() for param in training.model.parameters())
    return training, {
        "step": training.step,
        "peak_mib": (peak - before) / 2**20 if on_gpu else None,
        "state_bytes_per_parameter": state_bytes(training.optimizer) / parameters,
        "parameters": parameters,
    }


def start(job: Job) -> Training:
    """Build the model, the optimizer and the step of a job."""
    model, batch = job.workload.build(job.device)
    if job.mode == "update":
        return _start_updates(job.config, model, batch)
    loss, optimizer = job.workload.loss, build_optimizer(job.config, model, seed=0)
    if job.label == BASELINE and job.mode == "captured" and job.device.type == "cuda":
        return Training(model, optimizer, batch, _one_graph(model, loss, optimizer, batch), "captured")
    take, mode = make_step(model, loss, optimizer, job.config, compiled=job.mode == "captured")
    return Training(model, optimizer, batch, take, mode)


def _start_updates(config: OptimizerConfig, model: nn.Module, batch: Batch) -> Training:
    """Return updates along noise. Optimizers that measure have measured a quadratic, and do not measure again."""
    if isinstance(config, (configs.AdaHessian, configs.AdaHessianKron)):
        config = replace(config, curvature_every=10**9)
    optimizer = build_optimizer(config, model, seed=0)

    def quadratic(model: nn.Module, _: Tensor) -> Tensor:
        return torch.stack([param.square().sum() for param in model.parameters()]).sum()

    if isinstance(optimizer, adahessian.AdaHessian):
        adahessian.Curvature(model, quadratic, optimizer, compile=False).measure(torch.ones(4))
    for param in model.parameters():
        param.grad = torch.randn_like(param).mul_(0.02)

    def update(_: Batch) -> Tensor:
        optimizer.step()
        return torch.zeros(())

    return Training(model, optimizer, batch, update, "eager")


def _one_graph(model: nn.Module, loss_fn: LossFn, optimizer: Optimizer, batch: Batch) -> Take:
    """Return a step whose compiled gradient and fused update are captured together as one CUDA graph.

    TrainingStep captures the gradient only, because schedules and hooks need an ordinary update.
    """
    params = list(model.parameters())
    loss_of = torch.compile(loss_fn, dynamic=False)
    for group in optimizer.param_groups:
        group["capturable"] = True

    def step() -> Tensor:
        loss = loss_of(model, batch)
        # backward() would accumulate gradients on the stream on which it first ran.
        for param, gradient in zip(params, torch.autograd.grad(loss, params), strict=True):
            is_ordered = gradient.stride() == param.stride()
            param.grad = gradient if is_ordered else torch.empty_like(param).copy_(gradient)
        optimizer.step()
        return loss.detach()

    captured = CapturedFunction(step, model, Memory())
    return lambda _: captured.replay()


def _held(*, captured: bool) -> int:
    """Free what can be freed and return the bytes that stay in use on the GPU.

    The replay of a CUDA graph allocates nothing, so the memory that its graph has reserved counts for captured steps.
    """
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() if captured else torch.cuda.memory_allocated()


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of the optimizer's state, except for scalars such as step counts."""
    return sum(tensor.nbytes for tensor in tensors_in([*optimizer.state.values()]) if tensor.dim())
