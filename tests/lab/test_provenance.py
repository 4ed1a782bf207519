from adahessian.lab import provenance

COMMIT = "0123456789abcdef"


def test_the_commit_is_that_of_git(monkeypatch):
    monkeypatch.delenv("ADAHESSIAN_COMMIT", raising=False)
    monkeypatch.setattr(provenance, "_git", lambda *arguments, folder: "of git")
    assert provenance.commit() == "of git"
    monkeypatch.setattr(provenance, "_git", lambda *arguments, folder: None)
    assert provenance.commit() is None


def test_the_environment_knows_better(monkeypatch):
    monkeypatch.setattr(provenance, "_git", lambda *arguments, folder: "of git")
    monkeypatch.setenv("ADAHESSIAN_COMMIT", COMMIT)
    assert provenance.commit() == COMMIT
    monkeypatch.setenv("ADAHESSIAN_COMMIT", "")
    assert provenance.commit() == "of git"
