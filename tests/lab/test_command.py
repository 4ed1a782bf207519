import logging
import sys

import pytest

from adahessian.lab import command


@pytest.mark.parametrize("package", ["matplotlib", "rich", "sklearn", "tyro"])
def test_a_missing_extra_is_named_with_its_remedy(package, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith(("adahessian.lab.", f"{package}."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(SystemExit) as exit_:
        command.main(["demo", "--help"])

    assert exit_.value.code == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert package in message
    assert 'pip install "adahessian[lab]"' in message


def test_a_missing_module_of_another_kind_is_not_hidden(monkeypatch):
    monkeypatch.setitem(sys.modules, "adahessian.lab.demo", None)
    with pytest.raises(ModuleNotFoundError, match=r"adahessian\.lab\.demo"):
        command.main(["demo"])


def test_settings_become_options(monkeypatch, tmp_path):
    from adahessian.lab.demo import Demo

    ran = []
    monkeypatch.setattr(Demo, "run", lambda self: ran.append(self))
    command.main(["demo", "--seeds", "3", "--output", str(tmp_path)])
    assert ran == [Demo(seeds=3, output=tmp_path)]


def test_an_interrupt_is_no_traceback(monkeypatch, capsys):
    from adahessian.lab.demo import Demo

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Demo, "run", interrupted)
    with pytest.raises(SystemExit) as exit_:
        command.main(["demo"])
    assert exit_.value.code == 130
    assert capsys.readouterr().err == "adahessian: stopped\n"


def test_what_the_library_reports_is_shown(monkeypatch, capsys):
    from adahessian.lab.demo import Demo

    monkeypatch.setattr(Demo, "run", lambda self: logging.getLogger("adahessian").info("compiling"))
    command.main(["demo"])
    logging.getLogger("adahessian").info("after the command")
    assert capsys.readouterr().err == "adahessian: compiling\n"
