from adahessian.lab import provenance

COMMIT = "0123456789abcdef"


def test_in_a_checkout_the_commit_is_that_of_git(monkeypatch):
    monkeypatch.setenv("ADAHESSIAN_COMMIT", COMMIT)
    monkeypatch.setattr(provenance, "_git", lambda *arguments, folder: "of git")
    assert provenance.commit() == "of git"


def test_outside_a_checkout_the_environment_says_the_commit(monkeypatch):
    monkeypatch.setattr(provenance, "_git", lambda *arguments, folder: None)
    monkeypatch.setenv("ADAHESSIAN_COMMIT", COMMIT)
    assert provenance.commit() == COMMIT
    monkeypatch.setenv("ADAHESSIAN_COMMIT", "")
    assert provenance.commit() is None
    monkeypatch.delenv("ADAHESSIAN_COMMIT")
    assert provenance.commit() is None
