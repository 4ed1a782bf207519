"""The notebook of examples/ is stored without outputs, and its cells run in order, on a GPU in float16."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch

NOTEBOOK = json.loads((Path(__file__).parents[1] / "examples" / "adahessian.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def test_cells_run_in_order(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    matplotlib.use("agg")
    if device == "cuda":
        gc.collect()  # of other tests
        torch.cuda.reset_peak_memory_stats()
        held_before = torch.cuda.memory_allocated()
    here: dict[str, Any] = {"__name__": "__main__"}
    for cell in CODE:
        exec(compile("".join(cell["source"]), f"<cell {cell['id']}>", "exec"), here)
    here["plt"].close("all")

    for name in ("AdaHessian", "AdamW"):
        runs = [run for run in here["accuracies"] if run[0] == name]
        assert len(runs) == 3
        assert max(here["accuracies"][run] for run in runs) > 0.9
    losses = here["losses"]["AdaHessian", 0.15]
    assert losses[-1] < 0.5 * losses[0]
    printed = capsys.readouterr().out
    if device == "cuda":
        assert "float16" in printed
        assert torch.cuda.max_memory_allocated() - held_before < 2**30
    else:
        # 20 of the first steps, then every fifth of the other 40.
        assert here["numbers"]["measurements"] == 20 + 40 // 5


def test_stored_without_outputs_and_without_paths() -> None:
    assert NOTEBOOK["nbformat"] == 4
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)
    names = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(names)) == len(names)
    text = "\n".join("".join(cell["source"]) for cell in NOTEBOOK["cells"])
    assert not re.search(r"(?<![\w/])/\w+/|\b[A-Z]:\\", text)  # a path of the machine it was written on
