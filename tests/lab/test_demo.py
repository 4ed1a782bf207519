import pytest

from adahessian.lab.command import main
from adahessian.lab.commands import demo as demo_module
from adahessian.lab.errors import ConfigError


def test_the_demo_trains_both_tasks_and_writes_its_figures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo_module.momentum, "draw", demo_module.quadratic.draw)  # slow, and has tests of its own
    main(["demo", "--seeds", "2", "--epochs", "1", "--steps", "3", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    for part in ("adahessian-kron", "adahessian", "adamw", "sgd", "lbfgs", "±"):
        assert part in printed
    names = ("digits.png", "pinn-poisson-1d.png", "figure1.png", "figure3.png")
    for name in names:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert name in printed
    assert len([*(tmp_path / "runs").rglob("*.json")]) == 4 * 2 + 3


def test_options_out_of_range_are_rejected():
    with pytest.raises(ConfigError, match="--seeds 0"):
        demo_module.main(["--seeds", "0"])
