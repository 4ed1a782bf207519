"""Many runs, in the order of a file, several at once."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from adahessian.lab.command import main
from adahessian.lab.commands import queue
from adahessian.lab.errors import ConfigError, LabError
from adahessian.lab.results.run_file import read_run

# A second and less.
SHORT = "digits sgd --device cpu --epochs 1"
LONG = SHORT.replace("--epochs 1", "--epochs 10000")


@pytest.fixture
def write(tmp_path):
    """Writes a queue file, and returns the arguments for it."""

    def argv(*lines):
        (tmp_path / "queue.txt").write_text("\n".join(lines))
        return [str(tmp_path / "queue.txt"), "--output", str(tmp_path / "runs")]

    return argv


def finished(tmp_path):
    return sorted(path.stem for path in (tmp_path / "runs").rglob("*.json"))


def test_every_seed_is_a_run_and_finished_runs_are_skipped(tmp_path, write, capfd):
    lines = ["# The first", "", f"{SHORT} --seeds 1 2  # two", f"adahessian train {SHORT} --seeds 2"]
    queue.main([*write(*lines), "--at-once", "2"])
    assert finished(tmp_path) == ["sgd_epochs=1_seed-1", "sgd_epochs=1_seed-2"]
    printed = capfd.readouterr().out
    assert "0 of 2 runs" in printed
    assert printed.count("finished  test accuracy") == 2
    assert not read_run(tmp_path / "runs/digits/sgd_epochs=1_seed-2.json").cost["exclusive"]
    queue.main(write(*lines, f"{SHORT} --seeds 3"))
    printed = capfd.readouterr().out
    assert "2 of 3 runs" in printed
    assert printed.count("started") == 1
    assert read_run(tmp_path / "runs/digits/sgd_epochs=1_seed-3.json").cost["exclusive"]
    assert not [*tmp_path.rglob("*.log")]


def test_other_runs_go_on_after_a_failure(tmp_path, write, capfd):
    with pytest.raises(LabError, match="1 runs"):
        queue.main([*write("ptb-tensorized --device cpu", SHORT), "--data-dir", str(tmp_path)])
    assert finished(tmp_path) == ["sgd_epochs=1_seed-1"]
    printed = capfd.readouterr().out
    assert "failed    ptb-tensorized" in printed
    assert "ptb.train.txt" in printed
    assert "are left" not in printed


def test_a_signal_stops_all_runs_with_a_checkpoint(tmp_path, write):
    argv = write(f"{LONG} --seeds 1 2 3")
    command = [sys.executable, "-m", "adahessian", "queue", *argv, "--at-once", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    folders = [tmp_path / f"runs/digits/sgd_epochs=10000_seed-{seed}" for seed in (1, 2, 3)]
    while not all((folder / "log.jsonl").exists() for folder in folders[:2]):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate()
    assert process.returncode == 130, printed
    assert [(folder / "checkpoint.pt").exists() for folder in folders] == [True, True, False]
    assert "3 runs are left" in printed


# Without processes ---------------------------------------------------------------------------------------------------


@pytest.fixture
def processes(monkeypatch):
    """Stands for subprocess.Popen, with a clock. Tasks take the minutes that ``minutes`` says."""
    found = SimpleNamespace(now=0.0, started=[], minutes={}, terminated=[])

    def start(command, stdout, env, **kwargs):
        end, process = found.now + 60 * found.minutes[command[4]], Mock(returncode=None)

        def poll():
            process.returncode = 0 if process.returncode is None and found.now >= end else process.returncode
            return process.returncode

        def terminate():
            found.terminated.append(process)
            process.returncode = 130

        process.poll, process.terminate = poll, terminate
        found.started.append((command[4], command[4:], env["OMP_NUM_THREADS"]))
        stdout.write(b"done\n")
        return process

    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr(queue.subprocess, "Popen", start)
    monkeypatch.setattr(queue.time, "monotonic", lambda: found.now)
    monkeypatch.setattr(queue.time, "sleep", lambda seconds: setattr(found, "now", found.now + 6))
    return found


def test_runs_are_stopped_at_the_time_limit(write, processes, capfd):
    processes.minutes = {"digits": 4}
    queue.main([*write("digits sgd --seeds 1 2 3 4"), "--minutes", "10"])
    assert len(processes.started) == 3
    printed = capfd.readouterr().out
    assert "stopped   digits: sgd, seed 3" in printed
    assert "4 runs are left" in printed


def test_a_run_is_started_by_a_command_that_reads_well(tmp_path, write, processes, monkeypatch):
    processes.minutes = {"digits": 1}
    queue.main(write("digits sgd --seeds 3 4 --name run#1[b]  # don't", "digits --seeds=5 --data_dir elsewhere"))
    common = ["--output", str(tmp_path / "runs"), "--resume", "--exclusive"]
    assert [arguments for _, arguments, _ in processes.started] == [
        ["digits", "sgd", "--name", "run#1[b]", *common, "--data-dir", "data", "--seeds", "3"],
        ["digits", "sgd", "--name", "run#1[b]", *common, "--data-dir", "data", "--seeds", "4"],
        ["digits", "--data_dir", "elsewhere", *common, "--seeds", "5"],
    ]
    monkeypatch.delenv("OMP_NUM_THREADS")
    queue.main([*write(f"{SHORT} --name other"), "--at-once", "1000"])
    assert [threads for *_, threads in processes.started] == ["7", "7", "7", "1"]


def test_no_process_stays_behind(write, processes, monkeypatch):
    processes.minutes = {"digits": 1}
    monkeypatch.setattr(queue.time, "sleep", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        queue.main([*write(f"{SHORT} --seeds 1 2"), "--at-once", "2"])
    assert len(processes.terminated) == 2


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("digitss sgd", "digits"),
        ("digits sgdd", "sgd"),
        (f"{SHORT} --epoch 3", "--epoch 3"),
        (f"{SHORT} 'a", "quotation"),
        (f"{SHORT} --overwrite", "--overwrite"),
        (f"{SHORT} --output elsewhere", "--output"),
        (f"{SHORT} --stop-after-steps 3", "--stop-after-steps"),
        (f"{SHORT} --precision bfloat16", "--name"),
    ],
)
def test_lines_are_checked_before_anything_runs(tmp_path, write, line, name):
    with pytest.raises(ConfigError, match=f"line 3: .*{name}"):
        queue.main(write("# Two lines", SHORT, line))
    assert not (tmp_path / "runs").exists()


def test_files_without_runs_are_rejected(write):
    with pytest.raises(ConfigError, match=r"queue\.txt"):
        queue.main(write("# to come"))
    with pytest.raises(SystemExit, match=r"nowhere\.txt"):
        main(["queue", "nowhere.txt"])
