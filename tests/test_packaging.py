"""Dependencies: torch for the core, and one more library per extra."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import adahessian

EXTRAS = {"accelerate": "accelerate", "lightning": "lightning", "timm": "timm", "transformers": "transformers"}


def requirements():
    """Pairs of a library and the extra that requires it, None for the core."""
    for line in importlib.metadata.requires("adahessian"):
        name = re.match(r"[\w.-]+", line).group()
        extra = re.search(r"extra == ['\"](\w+)['\"]", line)
        yield name, extra and extra.group(1)


def test_the_core_requires_torch_only():
    assert [name for name, extra in requirements() if extra is None] == ["torch"]


@pytest.mark.parametrize(("extra", "library"), EXTRAS.items())
def test_each_integration_has_its_extra(extra, library):
    assert (library, extra) in set(requirements())


def test_the_version_is_the_same_everywhere():
    root = Path(__file__).parents[1]
    (cited,) = re.findall(r"^version: (.*)$", (root / "CITATION.cff").read_text(), re.MULTILINE)
    newest, *_ = re.findall(r"^## \[(\d.*)\]", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert cited == newest == adahessian.__version__


# A module that is None in this table cannot be imported.
WITHOUT = "import sys; sys.modules.update(dict.fromkeys({libraries})); import adahessian; {then}"


def without(libraries, then="pass"):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT.format(libraries=list(libraries), then=then)],
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_all_public_names_are_imported_without_any_extra():
    every = ("accelerate", "hypothesis", "lightning", "matplotlib", "pytorch_lightning", "rich", "sklearn", "timm",
             "transformers", "triton", "tyro")  # fmt: skip
    assert without(every, "from adahessian import *").returncode == 0


@pytest.mark.parametrize("extra", ["accelerate", "lightning", "transformers"])
def test_a_missing_library_is_answered_by_the_extra(extra):
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

def train(model, x, **options):
    optimizer = adahessian.AdaHessian(adahessian.param_groups(model), curvature_every=2)
    curvature = adahessian.Curvature(model, squares, optimizer, **options)
    for _ in range(3):
        curvature.measure(x)
        optimizer.zero_grad()
        squares(model, x).backward()
        optimizer.step()
    adahessian.TrainingStep(curvature)(x)
    adahessian.diagnose(optimizer, model)
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    optimizer.load_state_dict(torch.load(saved))

torch.manual_seed(0)
image, rows = torch.randn(4, 1, 8, 8), torch.randn(8, 4)
train(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU()), image)
train(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU("tanh"), nn.Dropout()), rows, batch_fraction=0.5)
train(nn.LSTM(4, 4), rows.view(4, 2, 4))
train(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), rows, compile=True)
"""


def test_the_core_works_with_torch_only():
    """Torch itself does not require numpy."""
    every = ("numpy", "scipy", "sklearn", "matplotlib", "rich", "transformers", "lightning", "accelerate", "tyro")
    program = f"import sys; sys.modules.update(dict.fromkeys({every}))\n{EVERYTHING}"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500, check=False)
    assert found.returncode == 0, found.stderr
