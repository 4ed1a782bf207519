"""The file of results: what it keeps, and what it refuses."""

import errno
import json
import os
import tempfile

import pytest
from bench_cases import cell

from adahessian.lab.bench.command import Bench
from adahessian.lab.bench.results import Results, UnusableFileError

pytestmark = pytest.mark.usefixtures("tiny_bench")


def about(commit="abc", device="cpu", **provenance):
    return {
        "provenance": {"command": "adahessian bench", "commit": commit, "hardware": {}, "versions": {}, **provenance},
        "conditions": {"device": device},
        "not_found": [],
    }


def test_ratios_follow_when_a_base_is_measured_later(tmp_path):
    Results(tmp_path / "a.json", **about()).add(cell("AdaHessian", time_to_sgd=3.0))
    later = Results(tmp_path / "a.json", **about())
    later.add(cell("AdamW", time_to_sgd=1.5))
    later.add(cell("AdamW", mode="compiled", time_to_sgd=6.0))
    written = json.loads((tmp_path / "a.json").read_text())["cells"]
    assert written["steps/gpt/eager/AdaHessian"]["time_to_adamw"] == 2.0


@pytest.mark.parametrize(
    ("other", "differing"),
    [
        (about(commit="def"), "commit"),
        (about(hardware={"cores": 64}), "hardware"),
        (about(commit="def", versions={"torch": "3.0"}), "commit, versions"),
        (about(device="cuda"), "device"),
    ],
)
def test_cells_from_elsewhere_are_given_up_only_if_asked(other, differing, tmp_path):
    Results(tmp_path / "a.json", **about()).add(cell("SGD"))
    with pytest.raises(UnusableFileError, match=rf"differs in {differing}, .*--overwrite"):
        Results(tmp_path / "a.json", **other)
    results = Results(tmp_path / "a.json", **other, overwrite=True)
    results.add(cell("Adam"))
    assert results.cells.keys() == {"steps/gpt/eager/Adam"}


def test_cells_of_unknown_code_are_not_kept(tmp_path):
    Results(tmp_path / "a.json", **about(commit=None)).add(cell("SGD"))
    with pytest.raises(UnusableFileError, match="differs in commit, which is unknown now"):
        Results(tmp_path / "a.json", **about(commit=None))
    assert Results(tmp_path / "a.json", **about(commit=None), overwrite=True).cells == {}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"provenance": {}, "models": []}', b"\xff"])
def test_a_file_that_holds_something_else_is_left_alone(text, tmp_path):
    path = tmp_path / "mine.json"
    content = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(content)
    with pytest.raises(SystemExit, match=r"--output: .*mine\.json holds no results") as refusal:
        Bench(device="cpu", output=path).run()
    assert len(str(refusal.value).splitlines()) == 1
    assert path.read_bytes() == content


def test_a_path_that_cannot_become_a_file_is_refused_before_anything_is_measured(tmp_path):
    (tmp_path / "file").touch()
    # A link, so that the device itself is never the one at risk.
    (tmp_path / "device").symlink_to(os.devnull)
    for path, message in (
        (tmp_path, "is a folder: name a file"),
        (tmp_path / "file" / "bench.json", "cannot be made or written to"),
        (tmp_path / "device", "is not an ordinary file: name a file"),
    ):
        with pytest.raises(SystemExit, match=message) as refusal:
            Bench(device="cpu", output=path).run()
        assert len(str(refusal.value).splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"file", "device"}


def test_a_file_system_that_cannot_be_written_is_noticed_before_anything_is_measured(tmp_path, monkeypatch):
    def read_only(**settings):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    with pytest.raises(SystemExit, match="Read-only file system"):
        Bench(device="cpu", output=tmp_path / "bench.json").run()
