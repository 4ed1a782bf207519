import contextlib
import io
import json

import pytest

from adahessian.lab.contenders import CONTENDERS
from adahessian.lab.demo import Demo

NAMES = [contender.name for contender in CONTENDERS]


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def printed(output):
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        Demo(seeds=2, epochs=1, walk_steps=5, output=output).run()
    return stdout.getvalue()


@pytest.fixture
def results(output, printed):
    return json.loads((output / "results.json").read_text())


def test_the_table_has_every_contender(results):
    table = results["digits"]["table"]
    assert [row["name"] for row in table] == NAMES
    assert table[0]["step_time_ratio"] == 1
    for row in table:
        assert len(row["test_accuracies"]) == len(row["train_losses"]) == 2


def test_figure_3_has_every_pair_of_momenta(results):
    pairs = {(walk["beta1"], walk["beta2"]) for walk in results["figure3"]["walks"]}
    assert pairs == {(0.9, 0.999), (0.9, 0.0), (0.0, 0.999), (0.0, 0.0)}


def test_the_plots_are_written(results, output):
    assert sorted(path.name for path in output.iterdir()) == [
        "digits.png",
        "figure1.png",
        "figure3.png",
        "results.json",
    ]
    for plot in output.glob("*.png"):
        assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_results_say_where_they_come_from(results, output):
    assert results["settings"] == {"seeds": 2, "epochs": 1, "walk_steps": 5, "output": str(output)}
    assert {"command", "commit", "date", "seed", "hardware", "versions"} == results["provenance"].keys()
    assert results["provenance"]["seed"] == [0, 1]
    assert results["seconds"] > 0


def test_it_prints_each_run_each_contender_and_each_file(printed, output):
    for name in NAMES:
        # Two runs in the log and one row in the table.
        assert printed.count(name) >= 3
    for part in ("run 2 of 2", "s left", "figure 1", "figure 3", *map(str, output.iterdir())):
        assert part in printed


@pytest.mark.parametrize("setting", ["seeds", "epochs", "walk_steps"])
def test_settings_out_of_range_are_refused(setting, tmp_path):
    with pytest.raises(SystemExit, match=setting.replace("_", "-")):
        Demo(**{setting: 0, "output": tmp_path}).run()
