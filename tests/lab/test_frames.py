import json
import math
from statistics import mean, stdev

import pytest
from made_up_runs import make_run, rows_of, write

from adahessian.lab.errors import RunFileError
from adahessian.lab.results import frames
from adahessian.lab.results.run_file import RunFiles, read_run

NAN = math.nan


def test_a_run_file_holds_all_of_a_run(tmp_path):
    run = make_run(lr=0.2, curve={"test_accuracy": [50.0, NAN, 92.0]}, selection={"trials": 5})
    write(tmp_path, run)
    read = read_run(RunFiles(output=tmp_path, task=run.task, label="sgd lr=0.2", seed=1).result)
    assert read.curve["test_accuracy"][::2] == [50.0, 92.0]
    assert math.isnan(read.curve["test_accuracy"][1])
    for name in ("config", "final", "cost", "conditions", "provenance", "selection", "label"):
        assert getattr(read, name) == getattr(run, name)


def test_mean_and_deviation_are_those_of_the_seeds(tmp_path):
    values, losses = [92.0, 91.5, 92.7], [0.5, 0.25, 0.75]
    finals = [{"test_accuracy": value, "test_loss": loss} for value, loss in zip(values, losses, strict=True)]
    diverged = make_run(seed=8, value=NAN), make_run(seed=9, final={"test_accuracy": math.inf})
    sgd = (make_run(seed=seed, final=final) for seed, final in enumerate(finals))
    runs = rows_of(tmp_path, *sgd, *diverged, make_run("adam"))
    summary = frames.summarize(runs).set_index("label")
    assert summary.loc["sgd", "mean"] == pytest.approx(mean(values))
    assert summary.loc["sgd", "std"] == pytest.approx(stdev(values))
    assert summary.loc["sgd", ["n", "diverged"]].tolist() == [3, 2]
    assert math.isnan(summary.loc["adam", "std"])
    other = frames.summarize(runs, "test_loss").set_index("label")
    assert other.loc["sgd", ["mean", "n"]].tolist() == [0.5, 3]
    assert frames.summarize(runs, "peak_mib")["mean"].tolist() == [100.0, 100.0]


def test_the_latest_of_two_runs_with_the_same_seed_counts(tmp_path):
    for folder, value, date in (("a", 90.0, "2026-02-01"), ("b", 80.0, "2026-01-01")):
        write(tmp_path / folder, make_run(value=value, date=date))
    files = sorted(tmp_path.rglob("*.json"))
    for order in (files, files[::-1]):
        assert frames.runs(order).value.tolist() == [90.0]
    assert frames.runs([tmp_path]).value.tolist() == [90.0]


def test_rows_tell_runs_apart(tmp_path):
    options = {"weight_decay": 0.01, "epochs": 16, "decay_epochs": (8, 12)}
    trial = make_run(holdout=100, exclusive=False, final={"test_accuracy": 80.0})
    runs = rows_of(tmp_path, make_run("adamw", lr=0.02, step_ms=5.0, **options), trial).set_index("optimizer")
    row = runs.loc["adamw"]
    assert row["label"] == "adamw lr=0.02 weight-decay=0.01 decay-epochs=8+12 epochs=16"
    assert row["family"] == "adamw lr=0.02 weight-decay=0.01"
    assert row["recipe"] == "adamw decay-epochs=8+12 epochs=16"
    assert row["length"] == "16 epochs"
    assert runs.is_trial.to_dict() == {"adamw": False, "sgd": True}
    assert runs.step_ms["adamw"] == 5.0
    assert math.isnan(runs.step_ms["sgd"])  # its device was shared


def test_curves_have_a_row_per_evaluation(tmp_path):
    rows = frames.curves(rows_of(tmp_path, make_run(), make_run("adam", task="digits")))
    assert rows.groupby("label").size().to_dict() == {"sgd": 3, "adam": 3}
    assert rows[rows.label == "adam"].test_accuracy.tolist() == [46.0, pytest.approx(82.8), 92.0]


def test_damaged_files_and_unknown_tasks(tmp_path):
    write(tmp_path, make_run())
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "lacking.json").write_text('{"schema": 2, "curve": {}}')
    (tmp_path / "other.json").write_text("[]")
    unknown = json.loads(next(tmp_path.glob("*/*.json")).read_text()) | {"task": "tennis"}
    (tmp_path / "unknown.json").write_text(json.dumps(unknown))
    messages = []
    assert len(frames.runs([tmp_path], messages.append)) == 1
    assert [name in text for name, text in zip(("broken", "lacking", "tennis"), messages, strict=True)] == [True] * 3
    for name in ("broken", "lacking", "other", "absent"):
        with pytest.raises(RunFileError, match=name):
            frames.runs([tmp_path / f"{name}.json"])


def race(tmp_path, **changed):
    """Two optimizers at three lengths."""
    lengths = {550: 3.4, 1100: 3.2, 2200: 3.0}
    options = {"task": "gpt-novels", **changed}
    return rows_of(
        tmp_path,
        *(make_run("adamw", 1, value, step_ms=50.0, steps=steps, **options) for steps, value in lengths.items()),
        *(make_run("muon", 1, value - 0.2, step_ms=60.0, steps=steps, **options) for steps, value in lengths.items()),
        make_run("sgd", 1, 4.0, **options),
    )


def test_a_race_is_by_time_if_all_times_compare(tmp_path):
    points = frames.race_points(race(tmp_path))
    assert points.attrs["unit"] == "seconds"
    assert points.groupby("family").budget.apply(list).to_dict() == {
        "adamw": pytest.approx([27.5, 55, 110]),
        "muon": pytest.approx([33, 66, 132]),
    }
    assert points[points.family == "muon"]["mean"].tolist() == pytest.approx([3.2, 3.0, 2.8])
    shared = frames.race_points(race(tmp_path / "shared", exclusive=False))
    mixed = race(tmp_path / "mixed")
    mixed.loc[mixed.optimizer == "muon", "hardware"] = "another GPU"
    for points in (shared, frames.race_points(mixed)):
        assert points.attrs["unit"] == "steps"
        assert points.budget.tolist() == [550, 1100, 2200] * 2


def test_labels_leave_out_what_all_have():
    assert [*frames.short_labels(["sgd model=a lr=1", "adamw model=a"]).values()] == ["sgd lr=1", "adamw"]
    assert frames.short_labels(["sgd lr=1"]) == {"sgd lr=1": "sgd lr=1"}
    assert frames.title("adahessian-kron curvature-every=5 steady-start=True") == "AdaHessianKron every=5 steady-start"
