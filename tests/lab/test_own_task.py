"""The task of the user's own in docs/laboratory.md trains and can be tuned."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "laboratory.md"


def test_it_trains_and_can_be_tuned(tmp_path):
    (block,) = re.findall(r"^```python\n(\"\"\"Two spirals.*?)^```$", PAGE.read_text(), re.DOTALL | re.M)
    (tmp_path / "spirals.py").write_text(block)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}

    def run(words):
        command = [sys.executable, "spirals.py", *words.split()]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    assert "test accuracy" in run("train spirals adahessian-kron --epochs 2")
    assert (tmp_path / "runs/spirals/adahessian-kron_epochs=2_seed-1.json").exists()
    printed = run("sweep spirals adamw --trials 2 --epochs 1")
    assert "validation accuracy" in printed
    assert "train spirals adamw" in printed
