import hashlib
import io
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import tyro

from adahessian.lab.data import sources
from adahessian.lab.data.sources import SOURCES, Download, Source
from adahessian.lab.fetch import Fetch

CONTENT = bytes(range(256)) * 4096


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.requests.append((self.path, self.headers.get("Range"), self.headers.get("User-Agent")))
        content = server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        begin = 0
        if server.knows_ranges and (asked := self.headers.get("Range")):
            begin = int(asked.removeprefix("bytes=").removesuffix("-"))
            if begin >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206)
            sent_from = begin if server.honest else 0
            self.send_header("Content-Range", f"bytes {sent_from}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        rest = content[begin:]
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest[: server.breaks_after])

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.files, server.requests = {}, []
        server.knows_ranges, server.honest, server.breaks_after = True, True, None
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def publish(server, monkeypatch):
    """Make a server's files the data of the task ``rows-model``."""

    def publish(*files, **settings):
        downloads = []
        for name, content, details in files:
            server.files[f"/{name}"] = content
            md5 = hashlib.md5(content).hexdigest()
            downloads.append(Download(**{"file": name, "url": f"{server.url}/{name}", "md5": md5, **details}))
        source = Source(
            title="Rows", tasks=("rows",), page="https://rows.example", downloads=tuple(downloads), **settings
        )
        monkeypatch.setattr(sources, "SOURCES", (source,))

    return publish


def run(folder, **settings):
    Fetch(task="rows-model", data_dir=folder, **settings).run()


def test_a_file_is_fetched_and_verified(server, publish, tmp_path, capsys):
    publish(("rows.bin", CONTENT, {}))
    run(tmp_path / "data")
    assert (tmp_path / "data" / "rows.bin").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["rows.bin"]
    assert server.requests == [("/rows.bin", None, "adahessian")]
    assert "as published" in capsys.readouterr().out


def test_an_interrupted_download_goes_on_where_it_broke_off(server, publish, tmp_path):
    publish(("rows.bin", CONTENT, {}))
    server.breaks_after = 300_000
    with pytest.raises(SystemExit, match=r"broke off after 300,000 of 1,048,576 bytes\. Run this again"):
        run(tmp_path)
    assert (tmp_path / "rows.bin.part").read_bytes() == CONTENT[:300_000]
    assert not (tmp_path / "rows.bin").exists()
    with pytest.raises(SystemExit, match=r"broke off after 600,000 of 1,048,576 bytes"):
        run(tmp_path)
    server.breaks_after = None
    run(tmp_path)
    assert (tmp_path / "rows.bin").read_bytes() == CONTENT
    assert [asked for _, asked, _ in server.requests] == [None, "bytes=300000-", "bytes=600000-"]
    assert not (tmp_path / "rows.bin.part").exists()


def test_a_server_without_ranges_begins_anew(server, publish, tmp_path):
    publish(("rows.bin", CONTENT, {}))
    server.knows_ranges = False
    (tmp_path / "rows.bin.part").write_bytes(b"x" * 300_000)
    run(tmp_path)
    assert (tmp_path / "rows.bin").read_bytes() == CONTENT


def test_a_server_that_sends_another_part_is_refused(server, publish, tmp_path):
    publish(("rows.bin", CONTENT, {}))
    server.honest = False
    (tmp_path / "rows.bin.part").write_bytes(CONTENT[:10])
    with pytest.raises(SystemExit, match="it sends another part"):
        run(tmp_path)
    assert (tmp_path / "rows.bin.part").read_bytes() == CONTENT[:10]


def test_a_download_that_only_missed_its_end_is_verified(publish, tmp_path):
    publish(("rows.bin", CONTENT, {}))
    (tmp_path / "rows.bin.part").write_bytes(CONTENT)
    run(tmp_path)
    assert (tmp_path / "rows.bin").read_bytes() == CONTENT


def test_what_is_longer_than_the_file_begins_anew(publish, tmp_path):
    publish(("rows.bin", CONTENT, {}))
    (tmp_path / "rows.bin.part").write_bytes(CONTENT + b"more")
    run(tmp_path)
    assert (tmp_path / "rows.bin").read_bytes() == CONTENT


def test_a_wrong_checksum_removes_the_download(publish, tmp_path):
    publish(("rows.bin", CONTENT, {"md5": "0" * 32}))
    with pytest.raises(
        SystemExit, match=rf"its md5 is {hashlib.md5(CONTENT).hexdigest()} instead of 0+\. It was removed"
    ):
        run(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_checksum_is_said(publish, tmp_path, capsys):
    publish(("rows.bin", CONTENT, {"md5": None}))
    run(tmp_path)
    assert "no checksum of it is known" in capsys.readouterr().out


def test_a_file_that_is_there_stays(server, publish, tmp_path):
    publish(("rows.bin", CONTENT, {}))
    (tmp_path / "rows.bin").write_bytes(CONTENT)
    run(tmp_path)
    assert server.requests == []
    (tmp_path / "rows.bin").write_bytes(b"mine")
    with pytest.raises(SystemExit, match=r"is not what its owner publishes.*Move it away"):
        run(tmp_path)
    assert (tmp_path / "rows.bin").read_bytes() == b"mine"
    assert server.requests == []


def test_what_is_there_in_another_form_is_not_fetched(server, publish, tmp_path, capsys):
    publish(("rows.tar", CONTENT, {}), unpacked=(("text/1", "text/2"), ("bytes/1", "bytes/2")))
    for name in ("text", "bytes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1").touch()
    (tmp_path / "bytes" / "2").touch()
    run(tmp_path)
    assert f"It is there already, in {tmp_path / 'bytes' / '1'} and so on" in capsys.readouterr().out
    assert server.requests == []
    run(tmp_path, from_url=f"{server.url}/rows.tar")
    assert len(server.requests) == 1, "where somebody says from where, it is to be fetched"
    (tmp_path / "rows.tar").unlink()
    (tmp_path / "bytes" / "2").unlink()
    run(tmp_path)
    assert len(server.requests) == 2, "half of it is not the whole"


def test_no_network_names_the_address_and_the_way_around(server, publish, tmp_path):
    publish(("rows.bin", CONTENT, {"url": "http://127.0.0.1:9/rows.bin"}))
    with pytest.raises(SystemExit, match=r"http://127\.0\.0\.1:9/rows\.bin cannot be reached.*--data-dir"):
        run(tmp_path)


def test_a_missing_file_names_the_answer(server, publish, tmp_path):
    publish(("rows.bin", CONTENT, {}))
    server.files.clear()
    with pytest.raises(SystemExit, match=r"rows\.bin answers 404 Not Found.*--from-url"):
        run(tmp_path)


def test_what_is_no_address_is_said(publish, tmp_path):
    publish(("rows.bin", CONTENT, {}))
    with pytest.raises(SystemExit, match="nowhere is not an address"):
        run(tmp_path, from_url="nowhere")


def test_a_mirror_is_asked_for_each_file(server, publish, tmp_path):
    publish(("ptb/a.txt", b"a", {}), ("ptb/b.txt", b"b", {}))
    server.files = {"/mirror/a.txt": b"a", "/mirror/b.txt": b"b"}
    with pytest.raises(SystemExit, match=r"several files \(a\.txt, b\.txt\).* with / at its end"):
        run(tmp_path, from_url=f"{server.url}/mirror")
    run(tmp_path, from_url=f"{server.url}/mirror/")
    assert (tmp_path / "ptb" / "b.txt").read_bytes() == b"b"


def zipped(**files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(f"text/{name}.txt", text)
    return buffer.getvalue()


def tarred(**files):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"./text/{name}.txt")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_texts_are_taken_out_of_their_archive(server, publish, tmp_path, pack):
    archive = pack(train="to train", test="to test", readme="not asked for")
    publish(("text/rows.archive", archive, {"members": ("train.txt", "test.txt")}))
    run(tmp_path)
    assert {path.name: path.read_text() for path in (tmp_path / "text").iterdir()} == {
        "train.txt": "to train",
        "test.txt": "to test",
    }
    run(tmp_path)
    assert len(server.requests) == 1


@pytest.mark.parametrize("pack", [zipped, tarred, lambda **_: b"no archive"])
def test_an_archive_without_the_texts_is_named(publish, tmp_path, pack):
    publish(("rows.archive", pack(train="to train"), {"members": ("train.txt", "test.txt")}))
    with pytest.raises(SystemExit, match=r"rows\.archive is not an archive with train\.txt, test\.txt in it"):
        run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.archive"]


def test_a_tar_cannot_write_outside_of_its_folder(publish, tmp_path):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo("../../train.txt")
        entry.size = 1
        archive.addfile(entry, io.BytesIO(b"x"))
    publish(("data/rows.tar", buffer.getvalue(), {"members": ("train.txt",)}))
    with pytest.raises(SystemExit, match="is not an archive with"):
        run(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")] == ["data/rows.tar"]


def test_what_needs_hands_is_said_and_nothing_fetched(server, publish, tmp_path, capsys):
    publish(("rows.bin", CONTENT, {"url": None}), by_hand="Accept the terms.", besides="A model is needed too.")
    run(tmp_path)
    out = capsys.readouterr().out
    assert "https://rows.example" in out
    assert "Accept the terms." in out
    assert "A model is needed too." in out
    assert server.requests == []
    run(tmp_path, from_url=f"{server.url}/rows.bin")
    assert (tmp_path / "rows.bin").read_bytes() == CONTENT


def test_what_is_no_file_has_no_other_address(publish, tmp_path):
    publish(by_hand="Accept the terms.")
    with pytest.raises(SystemExit, match=r"not a file that could be fetched.*Accept the terms\."):
        run(tmp_path, from_url="http://127.0.0.1:9/rows.bin")


def test_an_unknown_task_is_answered_with_the_known_ones(tmp_path):
    with pytest.raises(SystemExit, match=r"no data is known of cifar.*cifar10, ptb, wikitext2"):
        Fetch(task="cifar", data_dir=tmp_path).run()


def test_the_sources_are_told_apart():
    names = [name for source in SOURCES for name in source.tasks]
    assert len(set(names)) == len(names)
    for source in SOURCES:
        assert source.downloads or source.by_hand
        for download in source.downloads:
            assert download.url is None or download.url.rpartition("/")[2] == download.file.rpartition("/")[2]
            assert download.url or source.by_hand
            assert download.md5 is None or len(download.md5) == 32


@pytest.mark.parametrize(
    ("task", "title"),
    [("cifar10-resnet32", "CIFAR-10"), ("wikitext103-tensorized", "WikiText-103"), ("glue-rte", "RTE of GLUE")],
)
def test_a_task_has_its_source(task, title):
    assert sources.source_of(task).title == title


def test_the_command_line():
    parsed = tyro.cli(Fetch, args=["ptb-tensorized", "--data-dir", "here", "--from-url", "http://127.0.0.1/"])
    assert parsed == Fetch(task="ptb-tensorized", data_dir=Path("here"), from_url="http://127.0.0.1/")
