"""The task of the user's own in docs/laboratory.md trains and can be tuned."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "laboratory.md"


def run(script, *words):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, str(script), *words, "--output", str(script.parent / "runs")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_it_trains_and_can_be_tuned(tmp_path):
    (block,) = re.findall(r"^```python\n(\"\"\"Two spirals.*?)^```$", PAGE.read_text(), re.DOTALL | re.M)
    script = tmp_path / "spirals.py"
    script.write_text(block)
    printed = run(script, "train", "spirals", "adahessian-kron", "--epochs", "2")
    assert "test accuracy" in printed
    assert (tmp_path / "runs/spirals/adahessian-kron_epochs=2_seed-1.json").exists()
    printed = run(script, "sweep", "spirals", "adamw", "--trials", "2", "--epochs", "1")
    assert "validation accuracy" in printed
    assert "train spirals adamw" in printed
