import json

import pytest

from adahessian.lab.contenders import CONTENDERS
from adahessian.lab.demo import Demo

NAMES = [contender.name for contender in CONTENDERS]


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def results(output):
    Demo(seeds=2, epochs=1, walk_steps=5, output=output).run()
    return json.loads((output / "results.json").read_text())


def test_the_table_has_every_contender(results):
    table = results["digits"]["table"]
    assert [row["name"] for row in table] == NAMES
    assert table[0]["step_time_ratio"] == 1
    for row in table:
        assert len(row["test_accuracies"]) == len(row["train_losses"]) == 2


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
    assert {"adahessian", "torch", "python"} <= results["versions"].keys()
    assert {"command", "commit", "seconds"} <= results.keys()


def test_it_prints_each_run_and_each_contender(tmp_path, capsys):
    Demo(seeds=1, epochs=1, walk_steps=1, output=tmp_path).run()
    printed = capsys.readouterr().out
    for name in NAMES:
        assert printed.count(name) >= 2
    for part in ("1 of 1", "s left", "test", "figure 1", "figure 3", str(tmp_path / "digits.png")):
        assert part in printed


@pytest.mark.parametrize("setting", ["seeds", "epochs", "walk_steps"])
def test_settings_out_of_range_are_refused(setting, tmp_path):
    with pytest.raises(SystemExit, match=setting.replace("_", "-")):
        Demo(**{setting: 0, "output": tmp_path}).run()
