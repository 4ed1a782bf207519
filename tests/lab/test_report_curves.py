from report_cases import make_run, with_recomputed

from adahessian.lab.report.curves import plainest, task_pictures
from adahessian.lab.report.groups import group_runs


def corner_of(*runs):
    """What is drawn again, with its limits in epochs; None if nothing is."""
    picture = next(each for each in task_pictures(group_runs(runs)) if "test-accuracy-by-epoch" in each.file)
    axes = picture.draw("light").axes[0]
    return axes.child_axes[0] if axes.child_axes else None


def test_the_last_epochs_are_drawn_again_where_there_is_room():
    corner = corner_of(make_run(recorded=40), make_run("adam", accuracy=92.1, recorded=40))
    assert corner.get_xlim() == (30, 40)
    low, high = corner.get_ylim()
    assert 91.6 < low < high < 91.9
    assert len(corner.lines) == 2
    assert corner_of(make_run(recorded=6)) is None, "a few epochs are seen as they are"
    assert corner_of(make_run(recorded=40), make_run("adam", accuracy=88.0, recorded=40)) is None, "no room"


def test_a_plot_has_no_more_curves_than_can_be_told_apart():
    plain = [make_run(name) for name in ("sgd", "adamw", "adahessian")]
    pairs = [make_run("adahessian", update_every=every, measured_epochs=5.0) for every in range(2, 6)]
    assert len(plainest(group_runs([*plain, *pairs]))) == 7
    triples = [make_run("adahessian", update_every=every, measured_epochs=5.0, lr=0.2) for every in range(2, 6)]
    again = make_run("adahessian", seed=2, update_every=5, measured_epochs=5.0, lr=0.2)
    groups = group_runs([*triples, *pairs, *plain, again])
    names = {run.name for run in (*plain, *pairs, again)}
    drawn = plainest(groups)
    assert {group.name for group in drawn} == names, "what has more seeds, and then what is plainer"
    assert drawn == [group for group in groups if group in drawn], "in the order of the table"
    picture = next(task_pictures(groups))
    assert picture.draw("light").legends[0].get_title().get_text() == "8 of 11 choices of settings"


def test_what_stands_beside_the_curve_is_drawn_of_the_runs_that_recorded_it():
    older, newer, diverged = make_run("sgd"), make_run("adahessian"), make_run("adam", diverged=True)
    assert not any("recomputed" in picture.file for picture in task_pictures(group_runs([older])))
    with_recomputed(newer)
    mixed = [newer, make_run("adahessian", seed=2)]
    assert not any("recomputed" in picture.file for picture in task_pictures(group_runs(mixed)))
    pictures = [picture for picture in task_pictures(group_runs([older, newer, diverged])) if "recom" in picture.file]
    assert [picture.file.rpartition("-by-")[2] for picture in pictures] == ["epoch.png", "time.png"]
    figure = pictures[0].draw("light")
    title = figure.axes[0].get_title(loc="left").replace("\n", " ")
    assert title.startswith("ResNet20 on CIFAR-10: accuracy with recomputed statistics")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["AdaHessian"]
    assert legend.get_title().get_text() == "1 of 3 choices of settings"
    (all_legend,) = next(task_pictures(group_runs([older, newer, diverged]))).draw("light").legends
    assert [text.get_text() for text in all_legend.get_texts()] == ["SGD", "Adam (diverged)", "AdaHessian"]
    with_a_diverged_seed = [newer, with_recomputed(make_run("adahessian", 2, diverged=True))]
    assert any("recom" in picture.file for picture in task_pictures(group_runs(with_a_diverged_seed)))
    from_some_epoch_on, without_an_end = (with_recomputed(make_run()) for _ in range(2))
    del from_some_epoch_on.epochs[0]["test_accuracy_recomputed"]
    del without_an_end.final["test_accuracy_recomputed"]
    for run in (from_some_epoch_on, without_an_end):
        assert not any("recom" in picture.file for picture in task_pictures(group_runs([run])))
    few = group_runs([older, newer, make_run("adamw")])
    assert not any("recom" in picture.file for picture in task_pictures(few)), "one of three is no comparison"


def test_shades_tell_choices_with_the_same_line_apart():
    groups = group_runs([make_run("adahessian", lr=0.1 * number) for number in range(1, 9)])
    figure = next(task_pictures(groups)).draw("light")
    looks = [(line.get_color(), line.get_linestyle()) for line in figure.legends[0].get_lines()]
    assert len(set(looks)) == len(groups)


def test_axes_say_what_is_off_the_scale_of_the_lines_that_are_drawn():
    def make(optimizer, seed=1, first=51.0, **changed):
        run = make_run(optimizer, seed, recorded=20, **changed)
        for record in run.epochs:
            record["test_accuracy"] = 50.0 + max(4, record["epoch"])
        run.epochs[0]["test_accuracy"] = first
        return run

    def axis(runs):
        return next(task_pictures(group_runs(runs))).draw("light").axes[0].get_xlabel()

    seeds = [make("sgd", 1, first=10.0), make("sgd", 2, first=98.0)]
    others = [make("adahessian", first=54.0, lr=0.1 * number) for number in range(1, 7)]
    assert axis(seeds) == "epoch (the first are off the scale)"
    assert axis([*seeds, *others]) == "epoch", "single seeds are not drawn, and their mean lies within"
    falls = make("adam", first=54.0, diverged=True)
    falls.epochs[-2]["test_accuracy"] = 10.0
    assert axis([*others, falls]) == "epoch", "it is the last that are off"
