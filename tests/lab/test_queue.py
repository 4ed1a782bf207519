"""Many runs, in the order of a list, several at a time."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from adahessian.lab.command import main
from adahessian.lab.queue import Queue

# A second and less.
SHORT = "digits --device cpu --no-compile --epochs 1"


def queue(tmp_path, *lines, **settings):
    file = tmp_path / "queue.txt"
    file.write_text("\n".join(lines))
    return Queue(file=file, output=tmp_path / "runs", **settings)


def finished(tmp_path):
    return sorted(path.stem for path in (tmp_path / "runs").rglob("*.json"))


def test_every_seed_is_a_run_and_what_is_finished_is_passed_over(tmp_path, capfd):
    lines = ["# The first", "", f"{SHORT} --seeds 1 2  # two", f"{SHORT} --seeds 2 --optimizer=adahessian"]
    queue(tmp_path, *lines, at_once=2).run()
    assert finished(tmp_path) == ["adahessian_epochs=1_seed-1", "adahessian_epochs=1_seed-2"]
    said = capfd.readouterr().out
    assert "0 of 2 runs are finished" in said
    assert said.count("finished  test accuracy") == 2
    result = json.loads((tmp_path / "runs/digits/adahessian_epochs=1_seed-2.json").read_text())
    assert result["shared"]

    queue(tmp_path, *lines).run()
    said = capfd.readouterr().out
    assert "2 of 2 runs are finished" in said
    assert "begins" not in said


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("digitss", "line 2: .*digitss"),
        (f"{SHORT} --optimizer sgdd", "line 2: .*sgdd"),
        (f"{SHORT} --epoch 3", "line 2: digits .*--epoch 3"),
        (f"{SHORT} 'a", "line 2: No closing quotation"),
    ],
)
def test_a_line_that_is_wrong_is_refused_before_anything_runs(tmp_path, line, problem):
    with pytest.raises(SystemExit, match=problem):
        queue(tmp_path, SHORT, line).run()
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("settings", [{"at_once": 0}, {"minutes": 0.0}])
def test_settings_that_are_out_of_range_are_refused(tmp_path, settings):
    with pytest.raises(SystemExit, match="--at-once is 1 or more"):
        queue(tmp_path, SHORT, **settings).run()


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"nowhere\.txt cannot be read"):
        main(["queue", str(tmp_path / "nowhere.txt")])


def test_a_run_that_fails_lets_the_others_go_on(tmp_path, capfd):
    with pytest.raises(SystemExit, match="1 failed"):
        queue(tmp_path, "ptb-transformer --device cpu --no-compile", SHORT, data_dir=tmp_path).run()
    assert finished(tmp_path) == ["adahessian_epochs=1_seed-1"]
    said = capfd.readouterr().out
    assert "failed    ptb-transformer" in said
    assert "ptb.train.txt" in said


def test_when_time_is_over_runs_end_with_a_checkpoint(tmp_path, capfd):
    """By its own clock, and so in the middle of a run, or before it has begun: in both cases the run is left."""
    queue(tmp_path, SHORT.replace("--epochs 1", "--epochs 10000"), SHORT, minutes=0.2).run()
    said = capfd.readouterr().out
    assert "stopped   digits: adahessian_epochs=10000, seed 1" in said
    assert "2 are left" in said
    assert finished(tmp_path) == []


def test_a_signal_ends_all_runs_with_a_checkpoint(tmp_path):
    file = tmp_path / "queue.txt"
    file.write_text(f"{SHORT.replace('--epochs 1', '--epochs 10000')} --seeds 1 2 3")
    command = [sys.executable, "-m", "adahessian", "queue", str(file), "--output", str(tmp_path), "--at-once", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    folders = [tmp_path / f"digits/adahessian_epochs=10000_seed-{seed}" for seed in (1, 2, 3)]
    _wait_until(lambda: all((folder / "log.jsonl").exists() for folder in folders[:2]), process)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert [(folder / "checkpoint.pt").exists() for folder in folders] == [True, True, False]
    assert "3 are left" in said


def test_every_line_of_the_projects_own_queue_is_a_run():
    file = Path(__file__).parents[2] / "results/queue.txt"
    jobs = list(Queue(file=file, output=file.parent)._jobs())
    assert len(jobs) > 50
    # The first is finished, by the name that the queue knows it by.
    assert jobs[0].files.result.exists()


def _wait_until(holds, process):
    for _ in range(600):
        if holds():
            return
        assert process.poll() is None
        time.sleep(0.1)
    raise AssertionError("it takes too long")
