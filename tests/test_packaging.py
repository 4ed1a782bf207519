"""What an installation asks for: torch alone, and a library more for each extra."""

import importlib.metadata
import re
import subprocess
import sys

import pytest

EXTRAS = {"accelerate": "accelerate", "lightning": "lightning", "timm": "timm", "transformers": "transformers"}


def requirements():
    """Pairs of a library and the extra that asks for it, None for the core."""
    for line in importlib.metadata.requires("adahessian"):
        name = re.match(r"[\w.-]+", line).group()
        extra = re.search(r"extra == ['\"](\w+)['\"]", line)
        yield name, extra and extra.group(1)


def test_the_core_asks_for_torch_alone():
    assert [name for name, extra in requirements() if extra is None] == ["torch"]


@pytest.mark.parametrize(("extra", "library"), EXTRAS.items())
def test_each_integration_has_its_extra(extra, library):
    assert (library, extra) in set(requirements())


# What is None in the table of modules cannot be imported, and is not found either.
WITHOUT = "import sys; sys.modules.update(dict.fromkeys({libraries})); import adahessian; {then}"


def without(libraries, then="pass"):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT.format(libraries=list(libraries), then=then)],
        capture_output=True,
        text=True,
        timeout=900,
    )


def test_the_library_is_loaded_without_any_extra():
    every = ("accelerate", "hypothesis", "lightning", "matplotlib", "pytorch_lightning", "rich", "sklearn", "timm",
             "transformers", "triton", "tyro")  # fmt: skip
    assert without(every).returncode == 0


@pytest.mark.parametrize("extra", ["accelerate", "lightning", "transformers"])
def test_a_missing_library_is_answered_with_the_extra(extra):
    libraries = {"lightning": ["lightning", "pytorch_lightning"]}.get(extra, [extra])
    found = without(libraries, f"import adahessian.integrations.{extra}")
    assert found.returncode != 0
    assert f'pip install "adahessian[{extra}]"' in found.stderr.splitlines()[-1]


EVERYTHING = """
import io
import torch
from torch import nn
import adahessian

def squares(model, x):
    y = model(x)
    return (y[0] if isinstance(y, tuple) else y).square().mean()

def train(model, x, **settings):
    optimizer = adahessian.AdaHessian(adahessian.param_groups(model), update_every=2)
    curvature = adahessian.Curvature(model, squares, optimizer, **settings)
    for _ in range(3):
        curvature.measure(x)
        optimizer.zero_grad()
        squares(model, x).backward()
        optimizer.step()
    if settings.get("product") != "finite_difference":
        adahessian.CapturedStep(curvature)(x)
    adahessian.diagnose(curvature)
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    optimizer.load_state_dict(torch.load(saved))
    return curvature

torch.manual_seed(0)
image, rows = torch.randn(4, 1, 8, 8), torch.randn(8, 4)
train(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU()), image)
train(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU("tanh"), nn.Dropout()), rows, batch_fraction=0.5)
train(nn.LSTM(4, 4), rows.view(4, 2, 4))
train(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), rows, product="finite_difference")
curvature = train(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), rows, product="forward_over_reverse")
adahessian.suggest_lr(curvature, [rows])
model = nn.Linear(4, 3)
optimizer = adahessian.AdaHessian(model.parameters())
adahessian.GaussNewton(model, lambda m, x: m(x), optimizer).measure(rows)
"""


def test_all_of_the_core_works_with_torch_alone():
    """Torch itself does without numpy."""
    every = ("numpy", "scipy", "sklearn", "matplotlib", "rich", "transformers", "lightning", "accelerate", "tyro")
    program = f"import sys; sys.modules.update(dict.fromkeys({every}))\n{EVERYTHING}"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900, check=False)
    assert found.returncode == 0, found.stderr
