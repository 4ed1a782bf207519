"""Python in README.md and docs/ runs, and the files and headings that they name exist."""

import copy
import itertools
import re
import statistics
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import adahessian

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# What such a block needs is not here: several processes, a GPU, a trainer.
NEEDS_MORE = re.compile(r"DistributedDataParallel|fully_shard|cuda|scaler|Trainer|Lightning|Accelerator|timm")


def fences(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(fences(page.read_text(), "python"))
]


def names():
    """What a reader has before a block: a model, a loss, batches, and all that the first block of the README makes."""
    batches = [(torch.randn(16, 20), torch.randint(10, (16,))) for _ in range(24)]
    model = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 10))

    def loss_fn(model, batch):
        return cross_entropy(model(batch[0]), batch[1])

    optimizer = adahessian.AdaHessian(adahessian.param_groups(model), lr=0.15)
    return {
        **{module.__name__: module for module in (adahessian, copy, itertools, statistics, torch)},
        "model": model,
        "loss_fn": loss_fn,
        "loader": batches,
        "batch": batches[0],
        "step": 0,
        "optimizer": optimizer,
        "curvature": adahessian.Curvature(model, loss_fn, optimizer),
        "warmup": torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=100),
        "wandb": types.SimpleNamespace(log=lambda numbers: None),
    }


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block):
    code = compile(block, "block", "exec")
    if NEEDS_MORE.search(block):
        return
    exec(code, found := names())
    assert all(param.isfinite().all() for param in found["model"].parameters())


def test_blocks_were_found():
    assert len(BLOCKS) >= 6
    assert sum(not NEEDS_MORE.search(block.values[0]) for block in BLOCKS) >= 6


def anchors(page):
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_exist(page):
    """Paths in backticks are the repository's, or the package's. A file of results may be a pattern."""
    folders = (ROOT, ROOT / "src" / "adahessian", ROOT / "results" / "cifar10-resnet20")
    for name in re.findall(r"`([\w/.=*-]+\.(?:py|json|md))`", page.read_text()):
        if page.name == "migrating.md" or name.startswith("runs/"):  # files of others, and of the reader's own runs
            continue
        pattern = re.sub(r"^\.\./", "", name)
        assert any(list(folder.glob(pattern)) for folder in folders), name


def test_the_reference_has_every_public_name():
    reference = (ROOT / "docs" / "reference.md").read_text()
    assert set(re.findall(r"::\s+adahessian\.(\w+)$", reference, re.M)) == set(adahessian.__all__)
    for name, members in re.findall(r"autoclass:: adahessian\.(\w+)\n\s+:members: (.*)", reference):
        for member in members.split(", "):
            assert hasattr(getattr(adahessian, name), member), member
