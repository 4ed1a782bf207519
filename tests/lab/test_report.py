import json
import math
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from statistics import mean, stdev

import pytest
import tyro

from adahessian.lab.files import write_json
from adahessian.lab.report.command import Report, make_document
from adahessian.lab.report.costs import step_seconds, step_time
from adahessian.lab.report.curves import COLOURS, plainest, task_pictures
from adahessian.lab.report.document import Details, Table
from adahessian.lab.report.groups import OPTIMIZER_ORDER, changed_settings, group_runs
from adahessian.lab.report.markdown import markdown, table_text
from adahessian.lab.report.tables import task_table
from adahessian.lab.report.terminal import terminal_table
from adahessian.lab.report.wording import group_title
from adahessian.lab.runs import Result, label
from adahessian.lab.settings import ECONOMICAL, OPTIMIZER_NAMES
from adahessian.lab.tasks.registry import EXPERIMENTS

STEPS = 196


def make_run(
    optimizer="sgd",
    seed=1,
    accuracy=92.0,
    *,
    task="cifar10-resnet20",
    step=0.003,
    compiling=60.0,
    recorded=6,
    diverged=False,
    accelerator="NVIDIA H200",
    conditions=None,
    shared=False,
    name=None,
    date="2026-01-01T00:00:00+00:00",
    final=None,
    **changed,
):
    experiment = EXPERIMENTS[task]
    defaults = experiment.defaults[optimizer]
    settings = replace(defaults, **changed)
    records = [
        {
            "epoch": number,
            "step": STEPS * number,
            "train_loss": math.nan if diverged and number == recorded else 2.0 / number,
            "lr": 0.1,
            "seconds": compiling + STEPS * number * step,
            **({} if diverged and number == recorded else {experiment.curve.name: accuracy - 10 / number}),
        }
        for number in range(1, recorded + 1)
    ]
    return Result(
        task=task,
        name=name or label(optimizer, settings, defaults),
        optimizer=optimizer,
        seed=seed,
        settings=json.loads(json.dumps(asdict(settings))),
        conditions=conditions or {"device": "cuda", "precision": "tf32", "compiled": True, "processes": 1},
        shared=shared,
        epochs=records,
        final={} if diverged else final or {experiment.metric.name: accuracy},
        diverged=diverged,
        parameters=100,
        peak_bytes=2**30,
        provenance=[
            {
                "command": f"adahessian train {task} --optimizer {optimizer} --seeds {seed}",
                "commit": "0123456789",
                "date": date,
                "seed": seed,
                "hardware": {"processor": "a processor", "cores": 1, "threads": 1, "accelerator": accelerator},
                "versions": {"adahessian": "1", "python": "3", "torch": "2"},
            }
        ],
    )


def write(run, folder):
    path = folder / f"{run.task}_{run.name}_seed-{run.seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run.to_json()))
    return path


def table_of(groups):
    return task_table(groups, groups)


def column(table, heading):
    position = list(table.headings).index(heading)
    return {row[0]: row[position] for row in table.rows}


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


class References(HTMLParser):
    """Everything that a browser would load, and all tags."""

    def __init__(self):
        super().__init__()
        self.loaded, self.tags, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        loading = {"src", "srcset", "href", "data", "poster", "action", "background", "xlink:href"}
        self.loaded += [value for name, value in attrs if name in loading]

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("report")
    runs = tmp_path / "runs"
    for seed in (1, 2):
        write(make_run("sgd", seed, 92.0 + seed / 10), runs)
        write(make_run("adahessian", seed, 92.1 + seed / 10, step=0.009), runs)
    write(make_run("adam", diverged=True, name="<b>&'\"| name"), runs / "deeper")
    write(make_run("adagrad", task="criteo-dlrm", recorded=1, accuracy=79.1), runs)
    (runs / "other.json").write_text("[]")
    page = tmp_path / "pages" / "RESULTS.md"
    Report(runs=(runs,), output=tmp_path / "report", results_page=page).run()
    return tmp_path


def test_page_needs_nothing_but_itself(written):
    html = (written / "report" / "index.html").read_text()
    references = References()
    references.feed(html)
    assert "script" not in references.tags
    assert "link" not in references.tags
    assert references.loaded
    assert all(value.startswith(("data:image/svg+xml;base64,", "#")) for value in references.loaded)
    style = html.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    assert 'name="viewport"' in html
    assert "prefers-color-scheme: dark" in style


def test_page_has_tables_pictures_and_origins(written):
    references = References()
    references.feed((written / "report" / "index.html").read_text())
    assert references.tags.count("table") == 2
    assert references.tags.count("img") == 4
    assert references.tags.count("source") == 4
    # A name is text, whatever it looks like.
    assert "b" not in references.tags
    text = "".join(references.text)
    for said in ("92.15 ± 0.07", "diverged", "“<b>&'\"| name”", "0123456789", "NVIDIA H200", "torch 2", "79.100"):
        assert said in text
    assert "adahessian train cifar10-resnet20 --optimizer sgd --seeds 1" in text


def test_pictures_of_the_markdown_are_there(written):
    for page in (written / "report" / "report.md", written / "pages" / "RESULTS.md"):
        sources = [part.partition('"')[0] for part in page.read_text().split('<img src="')[1:]]
        assert len(sources) == 4
        assert all((page.parent / source).read_bytes().startswith(b"\x89PNG") for source in sources)
        assert not any(source.startswith("/") for source in sources)


def test_rows_of_markdown_have_the_cells_of_the_heading(written):
    lines = [line for line in (written / "report" / "report.md").read_text().splitlines() if line.startswith("|")]
    bars = {line.replace("\\|", "").count("|") for line in lines[:5]}
    assert len(bars) == 1
    assert table_text(Table(headings=["a", "b"], rows=[["x|y", "1"]])) == "| a | b |\n| --- | ---: |\n| x\\|y | 1 |"


def test_same_runs_make_the_same_report(written):
    first = (written / "report" / "index.html").read_bytes()
    Report(runs=(written / "runs",), output=written / "report").run()
    assert (written / "report" / "index.html").read_bytes() == first


def test_every_task_has_a_section():
    runs = [
        make_run(optimizer, task=task) for task, experiment in EXPERIMENTS.items() for optimizer in experiment.defaults
    ]
    document = make_document(group_runs(runs))
    assert [section.anchor for section in document.sections] == list(EXPERIMENTS)
    assert markdown(document).count("\n## ") == len(EXPERIMENTS)


def test_every_optimizer_has_a_place_and_a_colour():
    assert sorted(OPTIMIZER_ORDER) == sorted(COLOURS) == sorted(OPTIMIZER_NAMES)


def test_runs_of_unknown_tasks_are_left_out(tmp_path, capsys):
    unknown = replace(make_run(), task="no-such-task")
    Report(runs=(write(unknown, tmp_path), write(make_run(), tmp_path)), output=tmp_path / "report").run()
    assert "no-such-task" in capsys.readouterr().out


def test_what_is_no_run_is_told(tmp_path):
    (tmp_path / "notes.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"adahessian report: .*notes\.json is no run"):
        Report(runs=(tmp_path / "notes.json",), output=tmp_path / "report").run()
    with pytest.raises(SystemExit, match="adahessian report: no finished run in"):
        Report(runs=(tmp_path,), output=tmp_path / "report").run()
    assert not (tmp_path / "report").exists()
    with pytest.raises(SystemExit, match=r"adahessian report: .*--output"):
        Report(runs=(write(make_run(), tmp_path),), output=tmp_path / "notes.json").run()


def test_broken_files_are_told(tmp_path, capsys):
    broken = write(make_run(seed=2), tmp_path)
    broken.write_text(broken.read_text()[:900])
    Report(runs=(write(make_run(), tmp_path), tmp_path), output=tmp_path / "report").run()
    assert f"passed over: {broken} cannot be read" in capsys.readouterr().out


def test_command_line():
    parsed = tyro.cli(Report, args=["a.json", "b", "--output", "o", "--results-page", "R.md"])
    assert parsed == Report(runs=(Path("a.json"), Path("b")), output=Path("o"), results_page=Path("R.md"))


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


def test_times_of_runs_that_shared_the_device_are_left_out():
    shared = group_runs([make_run(shared=True), make_run(seed=2, shared=True)])
    assert not any("ms" in cell for row in table_of(shared).rows for cell in row)
    assert not any("by-time" in picture.file for picture in task_pictures(shared))
    some = group_runs([make_run(shared=True), make_run(seed=2)])
    assert any("ms" in cell for row in table_of(some).rows for cell in row)
    assert any("by-time" in picture.file for picture in task_pictures(some))


def test_unfinished_runs_are_named(tmp_path, capsys):
    write_json(tmp_path / "a_seed-1.json", make_run().to_json())
    (tmp_path / "b_seed-1").mkdir()
    (tmp_path / "b_seed-1" / "checkpoint.pt").touch()
    Report(runs=(tmp_path,), output=tmp_path / "report").run()
    assert "not finished, and not in the report: " in capsys.readouterr().out.replace("\n", " ")


def test_what_all_runs_of_a_task_have_in_common_is_said_once():
    runs = [make_run(optimizer, batch_size=64) for optimizer in ("sgd", "adamw")]
    document = make_document(group_runs([*runs, make_run("adahessian", batch_size=64, update_every=5)]))
    text = markdown(document)
    assert "In all of them, and not the task's own: batch size 64." in text
    assert "| SGD |" in text
    assert "| AdaHessian, curvature every 5 steps |" in text


def test_runs_of_another_length_have_a_section_of_their_own():
    short = {"epochs": 16, "decay_epochs": (8, 12)}
    groups = group_runs(
        [make_run("adahessian"), make_run("sgd"), make_run("sgd", **short), make_run("adahessian", **short)]
    )
    long, shorter = make_document(groups).sections
    assert (long.title, shorter.title) == ("ResNet20 on CIFAR-10", "ResNet20 on CIFAR-10, 16 epochs")
    assert long.anchor != shorter.anchor
    for section in (long, shorter):
        (table,) = (part for part in section.parts if isinstance(part, Table))
        assert [row[0] for row in table.rows] == ["SGD", "AdaHessian"]
    assert "not the task's own: decay after epochs 8 12." in shorter.parts[0].text
    files = [picture.file for picture in make_document(groups).pictures]
    assert len(set(files)) == len(files)


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
    for record in newer.epochs:
        record["test_accuracy_recomputed"] = record["test_accuracy"] + 1
    mixed = [newer, make_run("adahessian", seed=2)]
    assert not any("recomputed" in picture.file for picture in task_pictures(group_runs(mixed)))
    pictures = [picture for picture in task_pictures(group_runs([older, newer, diverged])) if "recom" in picture.file]
    assert [picture.file.rpartition("-by-")[2] for picture in pictures] == ["epoch.png", "time.png"]
    figure = pictures[0].draw("light")
    assert figure.axes[0].get_title(loc="left").startswith("ResNet20 on CIFAR-10: accuracy with recomputed statistics")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["AdaHessian"]
    assert legend.get_title().get_text() == "1 of 3 choices of settings"
    (all_legend,) = next(task_pictures(group_runs([older, newer, diverged]))).draw("light").legends
    assert [text.get_text() for text in all_legend.get_texts()] == ["SGD", "Adam (diverged)", "AdaHessian"]
    with_a_diverged_seed = [newer, make_run("adahessian", 2, diverged=True)]
    for record in with_a_diverged_seed[1].epochs[:-1]:
        record["test_accuracy_recomputed"] = 50.0
    assert any("recom" in picture.file for picture in task_pictures(group_runs(with_a_diverged_seed)))


def test_shades_tell_choices_with_the_same_line_apart():
    groups = group_runs([make_run("adahessian", lr=0.1 * number) for number in range(1, 9)])
    figure = next(task_pictures(groups)).draw("light")
    looks = [(line.get_color(), line.get_linestyle()) for line in figure.legends[0].get_lines()]
    assert len(set(looks)) == len(groups)


def test_a_number_that_some_seeds_lack_is_no_mean():
    both = [make_run("sgd", seed, final={"test_accuracy": 92.0, "test_accuracy_recomputed": 91.0}) for seed in (1, 2)]
    heading = "accuracy with recomputed statistics, %"
    assert column(table_of(group_runs(both)), heading) == {"SGD": "91.00 ± 0.00"}
    assert list(table_of(group_runs(both)).headings).index(heading) == 2, "beside the metric"
    older = [make_run("adahessian", 1), make_run("adam", 1), make_run("adam", 2, diverged=True)]
    newer = make_run("adahessian", 2, final=both[0].final)
    gone = make_run("adamw", diverged=True)
    found = table_of(group_runs([*both, *older, newer, gone]))
    assert column(found, heading) == {"SGD": "91.00 ± 0.00", "AdaHessian": "", "Adam": "", "AdamW": ""}
    assert column(found, "test accuracy, %")["AdamW"] == "diverged"
    assert heading not in table_of(group_runs([*older, gone])).headings


def test_what_a_terminal_has_no_room_for_is_named():
    table = table_of(group_runs([make_run("sgd")]))
    assert terminal_table(table, 200).caption is None
    narrow = terminal_table(table, 60)
    assert str(narrow.caption).startswith("4 more in report.md: seeds; ")
    assert [c.header for c in narrow.columns] + str(narrow.caption).partition(": ")[2].split("; ") == table.headings


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


ECONOMICAL_ON_CIFAR = ECONOMICAL | {"steady_start": True, "lr": 0.3, "weight_decay": 0.001667}


def test_economical_runs_are_called_so_and_stand_before_their_variants():
    preset = ECONOMICAL_ON_CIFAR
    changed = {
        "economical": preset,
        "economical, uncorrected": ECONOMICAL,
        "economical, 4 probes": preset | {"num_probes": 4},
        "economical, but on the whole batch": preset | {"batch_fraction": 1.0},
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


def test_what_is_switched_off_is_told_from_what_is_as_ever():
    groups = group_runs([make_run("sgd", task="ptb-tensorized", **changed) for changed in ({}, {"clip_norm": None})])
    assert [group_title(group, with_conditions=False) for group in groups] == ["SGD", "SGD, clip norm none"]


def test_times_are_set_against_runs_of_another_length_where_there_are_no_others():
    groups = group_runs([make_run("sgd"), make_run("adahessian", epochs=16, step=0.006)])
    short = make_document(groups).sections[1]
    (table,) = (part for part in short.parts if isinstance(part, Table))
    assert "2.00 x SGD" in column(table, "time of a step")["AdaHessian"]


def test_what_was_written_down_of_runs_is_in_the_report(tmp_path):
    folder = tmp_path / "runs" / "cifar10-resnet20"
    write(make_run("sgd"), folder)
    write(make_run("sgd", epochs=16), folder)
    (folder / "notes.txt").write_text("The first line.\n\nAnother one.\n")
    Report(runs=(tmp_path / "runs",), output=tmp_path / "report").run()
    text = (tmp_path / "report" / "report.md").read_text()
    assert text.count("The first line.\n\nAnother one.\n") == 1, "once, not for each number of epochs"
