import hashlib
import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from adahessian.lab.commands import fetch
from adahessian.lab.configs import PRESETS
from adahessian.lab.data.sources import Download, downloads_of, instructions_of
from adahessian.lab.errors import DataError


@pytest.fixture
def server(tmp_path_factory):
    """A server with a folder, which counts requests."""
    folder = tmp_path_factory.mktemp("server")

    class Handler(SimpleHTTPRequestHandler):
        def copyfile(self, source, output):
            output.write(source.read()[: server.breaks_after])

        def log_request(self, *_):
            server.requests.append(self.path)

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as server:
        server.folder, server.requests, server.breaks_after = folder, [], None
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def run(server, monkeypatch, tmp_path):
    """A function that publishes a file as the data of a task, runs the command, and returns the files."""

    def run(name, content, **details):
        (server.folder / name).write_bytes(content)
        url = f"http://127.0.0.1:{server.server_address[1]}/{name}"
        details = {"url": url, "md5": hashlib.md5(content).hexdigest(), **details}
        monkeypatch.setattr(fetch, "downloads_of", lambda task: (Download(**details),))
        fetch.main(["cifar10-resnet20", "--data-dir", str(tmp_path)])
        return {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.*")}

    return run


def packed(folder, form, **texts):
    (folder / "text").mkdir(parents=True)
    for name, text in texts.items():
        (folder / "text" / f"{name}.txt").write_text(text)
    return Path(shutil.make_archive(str(folder / "rows"), form, folder, "text")).read_bytes()


def test_a_file_is_downloaded_once(run, server):
    for _ in range(2):
        assert run("rows.txt", b"rows", folder="text") == {"text/rows.txt": "rows"}
    assert server.requests == ["/rows.txt"]


@pytest.mark.parametrize(("name", "form"), [("rows.zip", "zip"), ("rows.tar.gz", "gztar")])
def test_members_are_taken_out_of_an_archive(run, server, tmp_path_factory, name, form):
    content = packed(tmp_path_factory.mktemp("server"), form, train="to train", test="to test", readme="else")
    for _ in range(2):
        found = run(name, content, folder="words", members=("text/train.txt", "text/test.txt"))
        assert found == {"words/text/train.txt": "to train", "words/text/test.txt": "to test"}
    assert len(server.requests) == 1


@pytest.mark.parametrize("problem", ["missing", "broken", "other", "not an archive", "no member", "no server"])
def test_a_failure_leaves_nothing_behind(run, server, tmp_path, tmp_path_factory, problem):
    content = packed(tmp_path_factory.mktemp("server"), "zip", train="to train")
    details = {"members": ("text/test.txt",) if problem == "no member" else ("text/train.txt",)}
    if problem in ("missing", "no server"):
        details["url"] = f"http://127.0.0.1:{9 if problem == 'no server' else server.server_address[1]}/rows.zip/no"
    elif problem == "other":
        details["md5"] = "0" * 32
    server.breaks_after = 50 if problem == "broken" else None
    with pytest.raises(DataError, match=r"/rows\.zip"):
        run("rows.zip", b"<html>Sign in</html>" if problem == "not an archive" else content, **details)
    assert not [*tmp_path.iterdir()]


def test_every_task_has_a_source(tmp_path, capsys):
    for name, preset in PRESETS.items():
        assert bool(downloads_of(name) or instructions_of(name)) != (preset.data == fetch.NO_DATA)
        assert all(published.url.startswith("https://") for published in downloads_of(name))
    assert [each.folder for each in downloads_of("ptb-tensorized")] == ["ptb"] * 3
    assert "MRPC" in instructions_of("glue-mrpc")
    assert "squeezebert" in instructions_of("glue-rte")
    fetch.main(["criteo-dlrm", "--data-dir", str(tmp_path)])
    fetch.main(["digits"])
    assert "https://ailab.criteo.com" in capsys.readouterr().out
    assert not [*tmp_path.iterdir()]
