from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import tyro
from report_cases import make_run, write

from adahessian.lab.files import write_json
from adahessian.lab.report.command import Report, make_document
from adahessian.lab.report.curves import COLOURS
from adahessian.lab.report.document import Table
from adahessian.lab.report.groups import OPTIMIZER_ORDER, group_runs
from adahessian.lab.report.markdown import markdown, table_text
from adahessian.lab.settings import OPTIMIZER_NAMES
from adahessian.lab.tasks.registry import EXPERIMENTS


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


def test_what_was_written_down_of_runs_is_in_the_report(tmp_path):
    folder = tmp_path / "runs" / "cifar10-resnet20"
    write(make_run("sgd"), folder)
    write(make_run("sgd", epochs=16), folder)
    (folder / "notes.txt").write_text("The first line.\n\nAnother one.\n")
    Report(runs=(tmp_path / "runs",), output=tmp_path / "report").run()
    text = (tmp_path / "report" / "report.md").read_text()
    assert text.count("The first line.\n\nAnother one.\n") == 1, "once, not for each number of epochs"
