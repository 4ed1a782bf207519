"""The notebook of examples/ is stored clean, and its cells run in order, on a GPU in float16."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch

NOTEBOOK = Path(__file__).parents[1] / "examples" / "adahessian.ipynb"


def notebook() -> Any:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))


def code_cells() -> list[Any]:
    return [cell for cell in notebook()["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def test_cells_run_in_order(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    matplotlib.use("agg")
    if device == "cuda":
        gc.collect()  # what other tests have left behind is not the notebook's
        torch.cuda.reset_peak_memory_stats()
        held_before = torch.cuda.memory_allocated()
    here: dict[str, Any] = {"__name__": "__main__"}
    for cell in code_cells():
        exec(compile("".join(cell["source"]), f"<cell {cell['id']}>", "exec"), here)
    here["plt"].close("all")

    assert 0 < here["found"].suggestion < here["found"].largest_descending
    assert set(here["accuracies"]) == {"AdaHessian", "AdamW"}
    assert min(here["accuracies"].values()) > 0.9
    assert here["losses"]["AdaHessian"][-1] < 0.5 * here["losses"]["AdaHessian"][0]
    said = capsys.readouterr().out
    if device == "cuda":
        assert "float16" in said
        assert torch.cuda.max_memory_allocated() - held_before < 2**30
    else:
        # 20 of the first steps, then every fifth of the other 40.
        assert here["numbers"]["measurements"] == 20 + 40 // 5
        assert "28 measurements in 60 steps" in said


def test_stored_without_outputs_and_without_paths() -> None:
    assert notebook()["nbformat"] == 4
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code_cells())
    names = [cell["id"] for cell in notebook()["cells"]]
    assert len(set(names)) == len(names)
    of_cells = "\n".join("".join(cell["source"]) for cell in notebook()["cells"])
    assert not re.search(r"(?<![\w/])/\w+/|\b[A-Z]:\\", of_cells)  # a path of the machine it was written on
