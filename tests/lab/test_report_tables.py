import math
from statistics import mean, stdev

import pytest
from report_cases import ECONOMICAL_ON_CIFAR, column, make_run, table_of, with_recomputed

from adahessian.lab.report.command import make_document
from adahessian.lab.report.costs import step_seconds, step_time
from adahessian.lab.report.curves import task_pictures
from adahessian.lab.report.document import Details, Table
from adahessian.lab.report.groups import changed_settings, group_runs
from adahessian.lab.report.markdown import markdown
from adahessian.lab.report.terminal import terminal_table
from adahessian.lab.report.wording import group_title
from adahessian.lab.runs import differences
from adahessian.lab.settings import ECONOMICAL


def test_mean_and_deviation_are_those_of_the_seeds():
    accuracies = [91.9, 92.1, 92.4]
    runs = [make_run(seed=seed, accuracy=accuracy) for seed, accuracy in enumerate(accuracies)]
    (group,) = group_runs(runs)
    assert group.final("test_accuracy").mean == pytest.approx(mean(accuracies))
    assert group.final("test_accuracy").deviation == pytest.approx(stdev(accuracies))
    table = table_of([group])
    assert column(table, "test accuracy, %") == {"SGD": "92.13 ± 0.25"}
    assert column(table, "seeds") == {"SGD": "3 seeds"}
    assert column(table, "paper") == {"SGD": "92.08 ± 0.08"}
    assert column(table, "training loss") == {"SGD": "0.3333 ± 0.0000"}


def test_the_best_epoch_is_shown_where_the_paper_counts_it():
    run = make_run(accuracy=92.0)
    run.epochs[2]["test_accuracy"] = 92.5
    assert column(table_of(group_runs([run])), "best epoch") == {"SGD": "92.50"}
    assert "best epoch" not in table_of(group_runs([make_run(task="image-folder-resnet18")])).headings


def test_one_seed_has_no_deviation():
    table = table_of(group_runs([make_run()]))
    assert column(table, "test accuracy, %") == {"SGD": "92.00"}
    assert column(table, "seeds") == {"SGD": "1 seed"}


def test_diverged_runs_are_in_no_mean():
    runs = [make_run(seed=1, accuracy=92.0), make_run(seed=2, accuracy=94.0), make_run(seed=3, diverged=True)]
    table = table_of(group_runs(runs))
    assert column(table, "test accuracy, %") == {"SGD": "93.00 ± 1.41"}
    assert column(table, "seeds") == {"SGD": "1 of 3 diverged"}
    only_diverged = table_of(group_runs([make_run(diverged=True)]))
    assert column(only_diverged, "test accuracy, %") == {"SGD": "diverged"}


def test_a_result_that_is_not_finite_is_no_result():
    run = make_run("sgd", task="ptb-tensorized", final={"test_perplexity": math.inf})
    table = table_of(group_runs([run, make_run("sgd", 2, task="ptb-tensorized", accuracy=60.0)]))
    assert column(table, "test perplexity") == {"SGD": "60.00"}
    assert column(table, "seeds") == {"SGD": "1 of 2 diverged"}


def test_a_run_that_is_there_twice_counts_once():
    runs = [make_run(seed=1, accuracy=92.0), make_run(seed=2, accuracy=93.0), make_run(seed=2, accuracy=93.0)]
    (group,) = group_runs(runs)
    assert [run.seed for run in group.runs] == [1, 2]
    assert group.repeated == []


def test_of_two_runs_with_one_seed_the_later_counts():
    later = make_run(accuracy=93.0, date="2026-02-01T00:00:00+00:00")
    (group,) = group_runs([later, make_run(accuracy=92.0)])
    assert group.runs == [later]
    assert group.repeated == [1]
    details = [part for part in make_document([group]).sections[0].parts if isinstance(part, Details)]
    assert any("the latest counts" in line for line in details[-1].lines)


def test_settings_that_are_not_the_tasks_own_make_another_row_in_words():
    groups = group_runs(
        [
            make_run("adahessian"),
            make_run("adahessian", update_every=10, batch_fraction=0.25, measured_epochs=1.0),
            make_run("adahessian", decay_epochs=(3, 4)),
            make_run("adahessian", name="mine"),
        ]
    )
    titles = {group_title(group, with_conditions=False) for group in groups}
    assert titles == {
        "AdaHessian",
        "AdaHessian, curvature every 10 steps on 25% of the batch after 1 epoch of every step",
        "AdaHessian, decay after epochs 3 4",
        "AdaHessian, “mine”",
    }
    # The paper's number belongs to its own settings.
    assert [bool(cell) for cell in column(table_of(groups), "paper").values()].count(True) == 2


def test_settings_that_only_say_how_to_compute_make_no_other_row():
    run = make_run("sgd", task="imagenet-resnet18", workers=9)
    assert changed_settings(run) == {}


def test_conditions_are_told_where_they_differ():
    on_cpu = {"device": "cpu", "precision": "float32", "compiled": False, "processes": 1}
    table = table_of(group_runs([make_run(), make_run(seed=2, conditions=on_cpu)]))
    assert {row[0] for row in table.rows} == {"SGD, on cuda in tf32, compiled", "SGD, on cpu in float32, not compiled"}


def test_time_of_a_step_leaves_out_the_first_epoch():
    assert step_seconds(make_run(step=0.004, compiling=500.0)) == pytest.approx(0.004)
    assert step_seconds(make_run(step=0.004, compiling=0.0, recorded=1)) == pytest.approx(0.004)


def test_time_of_a_step_is_set_against_sgd_on_the_same_hardware():
    sgd, adam = make_run("sgd", step=0.002), make_run("adam", step=0.004)
    there = make_run("sgd", seed=2, step=0.05, accelerator="another GPU")
    groups = group_runs([sgd, adam, there, make_run("adahessian", step=0.005)])
    time = step_time(groups[-1], groups)
    assert (time.base, time.ratio) == ("sgd", pytest.approx(2.5))
    assert step_time(groups[-1], groups, ("adam",)).ratio == pytest.approx(1.25)
    without_sgd = group_runs([adam, make_run("adahessian", step=0.005)])
    assert step_time(without_sgd[-1], without_sgd).base == "adam"


@pytest.mark.parametrize(
    "other",
    [
        {"accelerator": "another GPU"},
        {"conditions": {"device": "cuda", "precision": "bfloat16", "compiled": True, "processes": 1}},
        {"conditions": {"device": "cuda", "precision": "tf32", "compiled": False, "processes": 1}},
        {"batch_size": 32},
    ],
)
def test_times_under_other_conditions_are_not_compared(other):
    groups = group_runs([make_run("sgd", **other), make_run("adahessian")])
    assert step_time(groups[-1], groups).ratio is None


def test_times_of_runs_that_shared_the_device_are_left_out():
    shared = group_runs([make_run(shared=True), make_run(seed=2, shared=True)])
    assert not any("ms" in cell for row in table_of(shared).rows for cell in row)
    assert not any("by-time" in picture.file for picture in task_pictures(shared))
    some = group_runs([make_run(shared=True), make_run(seed=2)])
    assert any("ms" in cell for row in table_of(some).rows for cell in row)
    assert any("by-time" in picture.file for picture in task_pictures(some))


def test_a_number_that_some_seeds_lack_is_no_mean():
    both = [with_recomputed(make_run("sgd", seed)) for seed in (1, 2)]
    heading = "accuracy with recomputed statistics, %"
    assert column(table_of(group_runs(both)), heading) == {"SGD": "91.00 ± 0.00"}
    assert list(table_of(group_runs(both)).headings).index(heading) == 2, "beside the metric"
    older = [make_run("adahessian", 1), make_run("adam", 1), make_run("adam", 2, diverged=True)]
    newer = with_recomputed(make_run("adahessian", 2))
    gone = make_run("adamw", diverged=True)
    found = table_of(group_runs([*both, older[0], newer, gone]))
    assert column(found, heading) == {"SGD": "91.00 ± 0.00", "AdaHessian": "", "AdamW": ""}
    assert column(found, "test accuracy, %")["AdamW"] == "diverged"
    assert heading not in table_of(group_runs([*both, *older, newer])).headings, "one of three is no comparison"


def test_what_a_terminal_has_no_room_for_is_named():
    table = table_of(group_runs([make_run("sgd")]))
    assert terminal_table(table, 200).caption is None
    narrow = terminal_table(table, 60)
    assert str(narrow.caption).startswith("4 more in report.md: seeds; ")
    assert [c.header for c in narrow.columns] + str(narrow.caption).partition(": ")[2].split("; ") == table.headings


def test_economical_runs_are_called_so_and_stand_before_their_variants():
    preset = ECONOMICAL_ON_CIFAR
    changed = {
        "economical": preset,
        "economical, uncorrected": ECONOMICAL,
        "economical, 4 probes": preset | {"num_probes": 4},
        "economical, but on the whole batch": preset | {"batch_fraction": 1.0},
        "economical, but every 20 steps": preset | {"update_every": 20},
        "economical, but every step": preset | {"update_every": 1},
        "economical, lr 0.2": preset | {"lr": 0.2},
        "economical, no steady start": preset | {"steady_start": False},
        "economical, uncorrected, but on 12.5% of the batch": ECONOMICAL | {"batch_fraction": 0.125},
        "economical, the task's own lr and weight decay": ECONOMICAL | {"steady_start": True},
        "economical, the task's own lr, no steady start, weight decay 0.001": ECONOMICAL | {"weight_decay": 0.001},
    }
    groups = group_runs([make_run("adahessian", **of_one) for of_one in reversed(changed.values())])
    titles = [group_title(group, with_conditions=False) for group in groups]
    assert titles[0] == "AdaHessian, economical"
    assert [title.count(",") for title in titles] == sorted(title.count(",") for title in titles)
    assert sorted(titles) == sorted(f"AdaHessian, {title}" for title in changed)
    text = markdown(make_document(groups))
    assert "Economical: curvature every 10 steps on 25% of the batch after 1 epoch of every step" in text
    assert "All on cuda in tf32, compiled.\n" in text, "not all are economical alike"


def test_what_is_economical_in_part_is_said_in_full():
    in_part = make_run("adahessian", update_every=10, batch_fraction=0.25)
    economical = make_run("adahessian", **ECONOMICAL_ON_CIFAR)
    for others in ([], [economical]):
        group = group_runs([in_part, *others])[-1]
        assert group_title(group, with_conditions=False) == "AdaHessian, curvature every 10 steps on 25% of the batch"
    twice_otherwise = make_run("adahessian", **ECONOMICAL | {"batch_fraction": 1.0, "update_every": 15})
    (group,) = group_runs([twice_otherwise])
    assert group_title(group, with_conditions=False).startswith("AdaHessian, curvature every 15 steps after 1 epoch")


def test_what_is_switched_off_is_told_from_what_is_as_ever():
    groups = group_runs([make_run("sgd", task="ptb-tensorized", **changed) for changed in ({}, {"clip_norm": None})])
    assert [group_title(group, with_conditions=False) for group in groups] == ["SGD", "SGD, clip norm none"]


def test_times_are_set_against_runs_of_another_length_where_there_are_no_others():
    groups = group_runs([make_run("sgd"), make_run("adahessian", epochs=16, step=0.006)])
    short = make_document(groups).sections[1]
    (table,) = (part for part in short.parts if isinstance(part, Table))
    assert "2.00 x SGD" in column(table, "time of a step")["AdaHessian"]


def test_a_setting_that_was_removed_is_told_where_it_was_not_at_its_default():
    default, other = make_run("adahessian"), make_run("adahessian", name="adahessian_beta2-per=step")
    default.settings["beta2_per"], other.settings["beta2_per"] = "measurement", "step"
    titles = [group_title(group, with_conditions=False) for group in group_runs([default, other])]
    assert titles == ["AdaHessian", "AdaHessian, beta2 per step"]
    assert differences(default.identity, make_run("adahessian").identity) == ""
