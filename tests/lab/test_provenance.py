"""Where a result says it comes from."""

import subprocess

import pytest

from adahessian.lab import provenance

COMMIT = "0123456789abcdef"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A package in a checkout of its own, and its commit."""
    monkeypatch.delenv("ADAHESSIAN_COMMIT", raising=False)
    package = tmp_path / "src" / "package"
    package.mkdir(parents=True)
    monkeypatch.setattr(provenance, "_PACKAGE", package)

    def git(*arguments):
        settings = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *settings, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    (package / "__init__.py").write_text("")
    (tmp_path / "results.json").write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "All")
    return tmp_path, git("rev-parse", "HEAD")


def test_the_commit_is_that_of_git(checkout):
    folder, newest = checkout
    assert provenance.commit() == newest
    (folder / "results.json").write_text("2")
    assert provenance.commit() == newest, "no number depends on what was measured before"
    (folder / "src/package/__init__.py").write_text("changed = True")
    assert provenance.commit() == f"{newest}-dirty"


def test_what_git_does_not_track_has_none(checkout, monkeypatch):
    folder, _ = checkout
    installed = folder / "installed"
    installed.mkdir()
    (installed / "__init__.py").write_text("")
    monkeypatch.setattr(provenance, "_PACKAGE", installed)
    assert provenance.commit() is None


def test_without_git_there_is_none(monkeypatch):
    monkeypatch.delenv("ADAHESSIAN_COMMIT", raising=False)
    monkeypatch.setattr(provenance, "_git", lambda *arguments, folder: None)
    assert provenance.commit() is None


def test_the_environment_knows_better(checkout, monkeypatch):
    _, newest = checkout
    monkeypatch.setenv("ADAHESSIAN_COMMIT", COMMIT)
    assert provenance.commit() == COMMIT
    monkeypatch.setenv("ADAHESSIAN_COMMIT", "")
    assert provenance.commit() == newest
