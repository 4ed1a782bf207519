from adahessian.lab.command import main
from adahessian.lab.paper_figures import walks


def test_the_demo_trains_both_tasks_and_writes_its_figures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(walks, "draw_momentum", walks.draw_quadratic)  # slow, and has tests of its own
    main(["demo", "--seeds", "2", "--epochs", "1", "--steps", "3", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    for part in ("adahessian-kron", "adahessian", "adamw", "sgd", "lbfgs", "±"):
        assert part in printed
    names = ("digits.png", "pinn-poisson-1d.png", "figure1.png", "figure3.png")
    for name in names:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert name in printed
    assert len([*(tmp_path / "runs").rglob("*.json")]) == (4 + 3) * 2
