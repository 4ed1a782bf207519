"""Python in README.md and docs/ runs, commands are understood, and files, headings and messages exist."""

import ast
import copy
import itertools
import json
import re
import shlex
import statistics
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import adahessian
from adahessian.lab import command

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# These blocks need several processes, a GPU or a trainer.
NEEDS_MORE = re.compile(
    r"DistributedDataParallel|fully_shard|cuda|scaler|Trainer|Lightning|Accelerator|timm|recipe|_curvature|mmengine"
)


def fences(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    if page.name != "tutorial.md"
    for number, block in enumerate(fences(page.read_text(), "python"))
]
COMMANDS = [
    pytest.param(line, id=line.partition("#")[0].strip())
    for page in PAGES
    for block in fences(re.sub(r"^```[^\n]+\n.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE), "")
    for line in block.replace("\\\n", "").splitlines()
]
SCRIPTS = sorted((ROOT / "examples" / "gallery").glob("*.py"))


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
    assert len(BLOCKS) >= 12
    assert sum(not NEEDS_MORE.search(block.values[0]) for block in BLOCKS) >= 10
    assert len(COMMANDS) >= 10
    assert len(SCRIPTS) == 6


def test_the_tutorial_is_one_script_that_prints_what_it_says(capsys):
    text = (ROOT / "docs" / "tutorial.md").read_text()
    exec(compile("\n".join(fences(text, "python")), "tutorial", "exec"), {"__name__": "tutorial"})
    (promised,), printed = fences(text, "text"), capsys.readouterr().out
    for line in promised.splitlines():
        name, _, percent = line.partition(": ")
        found = re.search(rf"^{name}: (\d+)%$", printed, re.MULTILINE)
        assert int(found[1]) == pytest.approx(int(percent.rstrip("%")), abs=4), line


def words_after_positional(words):
    return next((number for number, word in enumerate(words) if word.startswith("-")), len(words))


@pytest.mark.parametrize("line", COMMANDS)
def test_command_is_understood(line, capsys):
    program, *words = shlex.split(line, comments=True)
    if program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    if program in ("torchrun", "python") and "adahessian" in words:
        program, words = "adahessian", words[words.index("adahessian") + 1 :]
    if program != "adahessian":
        assert program in ("make", "pip", "python"), line
        return
    with pytest.raises(SystemExit) as stop:
        command.main([*words[: words_after_positional(words)], "--help"])
    understood = re.findall(r"--[\w-]+", capsys.readouterr().out)
    assert stop.value.code == 0
    assert {word for word in words if word.startswith("--")} <= set(understood)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_of_the_gallery_compiles(path):
    """The build of the documentation executes it, which takes too long here."""
    compile(path.read_text(), path, "exec")
    assert path.read_text().count("\n") <= 130


def messages():
    """The strings of the library, with "..." in place of what is filled in."""

    def text(node):
        if isinstance(node, ast.JoinedStr):
            return "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""

    for path in (ROOT / "src" / "adahessian").rglob("*.py"):
        if "lab" not in path.parts:
            yield from filter(None, map(text, ast.walk(ast.parse(path.read_text()))))


def test_messages_of_the_faq_are_the_librarys():
    quoted = re.findall(r"^\*\*`(.*)`\*\*$", (ROOT / "docs" / "faq.md").read_text(), re.MULTILINE)
    known = [message.replace("%s", "...") for message in messages()]
    assert len(quoted) > 50
    for message in quoted:
        pattern = ".*".join(map(re.escape, message.split("...")))
        assert any(re.search(pattern, each, re.DOTALL) for each in known), message


def test_costs_are_those_of_the_files():
    text = (ROOT / "docs" / "cost.md").read_text()
    for file, field in (("bench-cuda.json", "peak_mib"), ("bench-cuda-update.json", "state_bytes_per_parameter")):
        for row in json.loads((ROOT / "results" / file).read_text())["rows"]:
            columns = [f"{row['step_ms']:.2f}", f"{row[field]:.0f}" if field == "peak_mib" else f"{row[field]:.2f}"]
            is_left_out = (row["workload"], row["label"]) == ("gpt", "baseline")  # AdamW once more
            found = [line for line in text.splitlines() if all(f" {column} " in line for column in columns)]
            assert is_left_out or found, (row["workload"], row["label"], columns)


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
    """Paths in backticks are the repository's, the package's or the tests'. A file of results may be a pattern."""
    folders = (ROOT, ROOT / "src" / "adahessian", ROOT / "tests", ROOT / "results" / "cifar10-resnet20")
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
