"""Imports go down through the layers only, and importing the package itself imports next to nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import adahessian

ROOT = Path(adahessian.__file__).parent
LAYERS = (
    ("base",),
    ("algorithm", "hessian"),
    ("parallel",),
    ("groups", "loss_scale", "optimizer", "kron"),
    ("curvature",),
    ("attachment", "cuda_graphs", "diagnostics", "training_step"),
    ("__init__",),
    ("integrations",),
    ("lab",),
    ("__main__",),
)
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
FILES = [path.relative_to(ROOT) for path in sorted(ROOT.rglob("*.py")) if "lab" not in path.relative_to(ROOT).parts]


def imports(source, folder):
    """The first name below the package in each import, "__init__" for the public names."""
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom):
            parents = ["adahessian", *folder][: len(folder) + 2 - node.level] if node.level else []
            names = [".".join([*parents, *filter(None, [node.module]), name]) for name in names]
        for package, _, name in (name.partition(".") for name in names):
            if package == "adahessian":
                yield name.partition(".")[0] if name.partition(".")[0] in LAYER else "__init__"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from adahessian.base.log import logger", "base"),
        ("def f():\n    import adahessian.curvature", "curvature"),
        ("from adahessian import optimizer", "optimizer"),
        ("from adahessian import AdaHessian", "__init__"),
        ("from . import state", "algorithm"),
        ("from .state import init_state", "algorithm"),
        ("from ..lab.train import Train", "lab"),
        ("from .. import lab", "lab"),
        ("import torch.base", None),
    ],
)
def test_all_kinds_of_imports_are_found(source, found):
    assert list(imports(source, ("algorithm",))) == ([found] if found else [])


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_go_down_only(path):
    own = path.parts[0].removesuffix(".py")
    for name in imports((ROOT / path).read_text(), path.parent.parts):
        is_of_one_folder = name == own or not ((ROOT / name).is_dir() or (ROOT / own).is_dir())
        assert LAYER[name] < LAYER[own] or (LAYER[name] == LAYER[own] and is_of_one_folder), f"{path} imports {name}"


def run(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_does_not_import_torch():
    run(
        "import sys, adahessian; dir(adahessian), adahessian.__version__; import adahessian.__main__\n"
        "assert not {'torch', 'numpy', 'tyro', 'adahessian.lab'} & set(sys.modules)"
    )


IN_ANY_ORDER = """
import importlib, inspect, itertools, sys
names = ["AdaHessian", "AdaHessianKron", "Curvature", "CurvatureError", "TrainingStep"]
names += ["attach", "diagnose", "param_groups"]
files = ["optimizer", "kron", "curvature", "base.errors", "training_step"]
files += ["attachment", "diagnostics", "groups"]
for files_first, turn in itertools.product((False, True), range(len(names))):
    for loaded in [name for name in sys.modules if name.partition(".")[0] == "adahessian"]:
        del sys.modules[loaded]
    import adahessian
    assert sorted(adahessian.__all__) == names
    if files_first:
        [importlib.import_module(f"adahessian.{file}") for file in files]
    found = {name: getattr(adahessian, name) for name in names[turn:] + names[:turn]}
    [importlib.import_module(f"adahessian.{file}") for file in files]
    for name, value in found.items():
        assert value.__name__ == name and not inspect.ismodule(value) and value is getattr(adahessian, name)
        assert name in dir(adahessian)
assert not hasattr(adahessian, "CapturedStep")
"""


def test_public_names_work_in_any_order():
    run(IN_ANY_ORDER)
