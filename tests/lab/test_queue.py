"""Many runs, in the order of a list, several at a time."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

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

    with pytest.raises(SystemExit, match=r"line 1: .* is another run, which differs in precision"):
        queue(tmp_path, f"{SHORT} --precision bfloat16").run()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("digitss", "line 2: .*digitss"),
        (f"{SHORT} --optimizer sgdd", "line 2: .*sgdd"),
        (f"{SHORT} --epoch 3", "line 2: digits .*--epoch 3"),
        (f"{SHORT} 'a", "line 2: No closing quotation"),
        (f"{SHORT} --seeds", "line 2: .*--seeds takes one number or more"),
        (f"{SHORT} --name a/b", "line 2: .*a name has no folders in it"),
        (f"{SHORT} --overwrite", "line 2: --output, --resume and --overwrite are the queue's own"),
        (f"{SHORT} --output elsewhere", "line 2: --output, --resume and --overwrite are the queue's own"),
        (f"{SHORT} --stop-after-steps 3", "line 2: .*leave --stop-after away"),
        (f"{SHORT} --device tpu", "line 2: .*--device tpu"),
        (f"{SHORT} --precision bfloat16", "line 2: it has the name of line 1 and differs in precision"),
    ],
)
def test_a_line_that_is_wrong_is_refused_before_anything_runs(tmp_path, line, problem):
    with pytest.raises(SystemExit, match=problem):
        queue(tmp_path, SHORT, line).run()
    assert not (tmp_path / "runs").exists()


def test_all_wrong_lines_are_named_at_once(tmp_path):
    with pytest.raises(SystemExit) as error:
        queue(tmp_path, "digitss", SHORT, "digitsss").run()
    assert [part in str(error.value) for part in ("line 1", "line 2", "line 3")] == [True, False, True]


def test_a_list_of_nothing_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="names no run"):
        queue(tmp_path, "# to come").run()


@pytest.mark.parametrize("seeds", ["--seeds 1 2", "--seeds=1"])
def test_a_run_is_started_by_a_command_that_reads_well(tmp_path, seeds):
    first, *_ = queue(tmp_path, f"digits {seeds} --epochs 1")._jobs()
    common = ["--output", str(tmp_path / "runs"), "--data-dir", "data", "--resume", "--seeds", "1"]
    assert first.arguments == ["digits", "--epochs", "1", *common]


def test_whole_commands_are_understood(tmp_path):
    (job,) = queue(tmp_path, f"adahessian train {SHORT}")._jobs()
    assert job.plan.experiment.name == "digits"


@pytest.mark.parametrize(("set_by_user", "expected"), [(None, "1"), ("7", "7")])
def test_runs_at_once_share_the_cores(tmp_path, monkeypatch, set_by_user, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_by_user:
        monkeypatch.setenv("OMP_NUM_THREADS", set_by_user)
    assert queue(tmp_path, SHORT, at_once=1000)._environment()["OMP_NUM_THREADS"] == expected


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


def test_names_and_folders_are_taken_as_they_are_written(tmp_path):
    (job,) = queue(tmp_path, f"{SHORT} --name run#1[b] --data_dir elsewhere  # don't")._jobs()
    assert job.plan.files.name == "run#1[b]"
    assert job.plan.data_dir == Path("elsewhere")


def test_a_run_that_another_process_is_at_is_refused(tmp_path):
    with taken_by_another_process(tmp_path / "runs/digits/adahessian_epochs=1_seed-1"), pytest.raises(SystemExit):
        queue(tmp_path, SHORT).run()
    assert finished(tmp_path) == []


@contextmanager
def taken_by_another_process(folder):
    folder.mkdir(parents=True)
    code = (
        f"from adahessian.lab.files import taken; from pathlib import Path\nwith taken(Path({str(folder)!r})): input(1)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.read(1) == "1"
    yield
    process.communicate("\n")


def test_whoever_stops_listening_leaves_no_run_behind(tmp_path, monkeypatch):
    started = []
    start, say = subprocess.Popen, Console.print

    def remember(*args, **kwargs):
        started.append(start(*args, **kwargs))
        return started[-1]

    def say_until_the_first_has_begun(console, *args, **kwargs):
        if started:
            raise BrokenPipeError
        say(console, *args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", remember)
    monkeypatch.setattr(Console, "print", say_until_the_first_has_begun)
    with pytest.raises(BrokenPipeError):
        queue(tmp_path, f"{SHORT.replace('--epochs 1', '--epochs 10000')} --seeds 1 2", at_once=2).run()
    assert [process.poll() is None for process in started] == [False]


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
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 130, said
    assert [(folder / "checkpoint.pt").exists() for folder in folders] == [True, True, False]
    assert "3 are left" in said


def test_every_line_of_the_projects_own_queue_is_a_run(tmp_path):
    results = Path(__file__).parents[2] / "results"
    jobs = Queue(file=results / "queue.txt", output=tmp_path)._jobs()
    assert len(jobs) > 50
    # The first is finished, by the name that the queue knows it by.
    assert (results / jobs[0].plan.files.result.relative_to(tmp_path)).exists()


def _wait_until(holds, process):
    for _ in range(6000):
        if holds():
            return
        assert process.poll() is None
        time.sleep(0.1)
    raise AssertionError("it takes too long")
