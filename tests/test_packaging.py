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
