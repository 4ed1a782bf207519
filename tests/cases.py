"""Small networks with their data and losses, and ways to train them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jvp

from adahessian import AdaHessian, Curvature

Batch = tuple[Tensor, Tensor]


@dataclass
class Case:
    """A model, its loss and its data, in float64 unless cast."""

    name: str
    make: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    classes: int | None = 3

    def __str__(self) -> str:
        return self.name

    def model(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        # Made in float64 and then cast: every dtype starts from the same numbers.
        return self.make().to(torch.float64).to(dtype)

    def batch(self, dtype: torch.dtype = torch.float64, seed: int = 1) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(self.inputs, generator=generator, dtype=torch.float64).to(dtype)
        if self.classes is None:
            return x, torch.randn(self.inputs[0], 2, generator=generator, dtype=torch.float64).to(dtype)
        return x, torch.randint(self.classes, (self.inputs[0],), generator=generator)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        output = model(x)
        return nn.functional.mse_loss(output, y) if self.classes is None else nn.functional.cross_entropy(output, y)


class Attention(nn.Module):
    """One block of attention, by torch's fused function."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        return self.head(attended.mean(1))


class Recurrent(nn.Module):
    """A recurrent layer, which runs on cuDNN on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


MLP = Case("mlp", lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), (16, 5))
REGRESSION = Case("regression", lambda: nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 2)), (12, 3), None)
CONVOLUTION = Case(
    "convolution",
    lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)),
    (8, 2, 4, 4),
)
CONVOLUTION_1D = Case(
    "convolution1d", lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3)), (8, 2, 4)
)
CONVOLUTION_3D = Case(
    "convolution3d",
    lambda: nn.Sequential(nn.Conv3d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)),
    (8, 1, 3, 3, 3),
)
BATCH_NORM = Case(
    "batch norm",
    lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)),
    (8, 1, 4, 4),
)
ATTENTION = Case("attention", Attention, (6, 5, 4))
RECURRENT = Case("recurrent", Recurrent, (6, 5, 4))

CASES = [MLP, REGRESSION, CONVOLUTION, CONVOLUTION_1D, CONVOLUTION_3D, BATCH_NORM, ATTENTION]


def train(case: Case, model: nn.Module, optimizer: AdaHessian, batch: Batch, steps: int, way: str) -> None:
    """Take some steps, with the curvature from an object, from the graph of the gradient, or from a closure."""
    curvature = Curvature(model, case.loss, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss = case.loss(model, batch)
        loss.backward(create_graph=optimizer.curvature_due)
        return loss

    for _ in range(steps):
        if way == "object":
            curvature.measure(batch)
            optimizer.zero_grad()
            case.loss(model, batch).backward()
            optimizer.step()
        elif way == "graph":
            closure()
            optimizer.step()
        else:
            optimizer.step(closure)


def exact_derivatives(
    case: Case, model: nn.Module, batch: Batch
) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return a function from all parameters, flattened and joined, to the gradient and the Hessian matrix."""
    names = [name for name, _ in model.named_parameters()]
    shapes = [param.shape for param in model.parameters()]

    def loss(flat: Tensor) -> Tensor:
        parts = torch.split(flat, [shape.numel() for shape in shapes])
        params = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        # Copies of the buffers, because batch norm counts its batches.
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return case.loss(lambda x: functional_call(model, {**params, **buffers}, (x,)), batch)

    def hessian_by_columns(flat: Tensor) -> Tensor:
        """Compute what torch.func.hessian does, without vmap, which gets batch norm wrong."""
        return torch.stack([jvp(grad(loss), (flat,), (unit,))[1] for unit in torch.eye(len(flat), dtype=flat.dtype)], 1)

    has_batch_norm = any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    exact_hessian = hessian_by_columns if has_batch_norm else hessian(loss)

    def derivatives(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        flat = torch.from_numpy(theta)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return grad(loss)(flat).numpy(), exact_hessian(flat).numpy()

    return derivatives


def flat_parameters(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten().to(torch.float64) for param in model.parameters()])
