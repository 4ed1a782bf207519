import pytest

from adahessian.lab import task_list
from adahessian.lab.command import main
from adahessian.lab.runs import label
from adahessian.lab.settings import OPTIMIZER_TITLES
from adahessian.lab.tasks.registry import EXPERIMENTS
from adahessian.lab.train import parse_train


def test_all_tasks_are_listed_with_the_papers_numbers(capsys):
    main(["tasks"])
    said = capsys.readouterr().out
    assert all(name in said for name in EXPERIMENTS)
    assert "AdaHessian 92.13 ± 0.18" in said


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_one_task_is_described(name, capsys):
    main(["tasks", name])
    said = " ".join(capsys.readouterr().out.split())
    experiment = EXPERIMENTS[name]
    assert experiment.metric.title in said
    for optimizer, settings in experiment.defaults.items():
        assert OPTIMIZER_TITLES[optimizer] in said
        assert f"--lr {settings.lr:.4g}" in said


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_settings_are_shown_as_they_are_typed(name):
    experiment = EXPERIMENTS[name]
    for optimizer, settings in experiment.defaults.items():
        of_all = task_list._common_settings(experiment)
        own = next(
            row[1].partition("\nthe paper")[0]
            for row in zip(
                *(column._cells for column in task_list._differing_settings(experiment).columns), strict=True
            )
            if row[0] == OPTIMIZER_TITLES[optimizer]
        )
        parsed = parse_train([name, "--optimizer", optimizer, *of_all.split(), *own.split()]).settings
        assert label(optimizer, parsed, settings) == optimizer


def test_an_unknown_one_is_answered_with_all(capsys):
    with pytest.raises(SystemExit, match=r"there is no task mnist\. There are digits, cifar10-resnet20"):
        main(["tasks", "mnist"])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_is_whole(name):
    """What the reports rely on."""
    experiment = EXPERIMENTS[name]
    assert "adahessian" in experiment.defaults
    assert len(experiment.defaults) > 1
    assert experiment.paper.keys() <= experiment.defaults.keys()
    assert len({type(settings) for settings in experiment.defaults.values()}) == 1
