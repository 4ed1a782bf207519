import pytest

from adahessian.lab.command import main
from adahessian.lab.settings import OPTIMIZER_TITLES
from adahessian.lab.tasks.registry import EXPERIMENTS


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
