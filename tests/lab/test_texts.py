from dataclasses import replace

import pytest
import torch

from adahessian.lab.data import subwords
from adahessian.lab.data.subwords import learn_bpe
from adahessian.lab.data.texts import SOURCES, read_bytes, read_subwords, read_words
from adahessian.lab.errors import DataError

PTB = SOURCES["ptb"]
# As their owners write them: a space at both ends of a line, and empty lines and headings in WikiText.
PTB_LINES = " no it was n't black monday \n but while the <unk> new york <unk> \n"
WIKI_LINES = " \n = Robert <unk> = \n \n Robert <unk> is an English film @-@ television actor . \n"


def write_words(folder, train, source=PTB):
    folder.mkdir(parents=True, exist_ok=True)
    for part, text in (("train", train), ("valid", " it was \n"), ("test", " monday zyx \n")):
        (folder / source.file_name.format(part)).write_bytes(text.encode())


def words_of(source, data_dir):
    text, words = read_words(source, data_dir)
    assert text.train.dtype == torch.int32
    return [[words[number] for number in part] for part in (text.train, text.valid, text.test)]


@pytest.mark.parametrize("folder", [".", "ptb"])
def test_every_line_ends_with_eos(tmp_path, folder):
    write_words(tmp_path / folder, PTB_LINES)
    expected = [PTB_LINES.replace("\n", "<eos>").split(), ["it", "was", "<eos>"], ["monday", "<unk>", "<eos>"]]
    assert words_of(PTB, tmp_path) == expected
    # An adaptive softmax needs the most frequent words first.
    write_words(tmp_path / folder, " a b c <unk> c b c \n c \n")
    assert read_words(PTB, tmp_path)[1] == ["c", "b", "<eos>", "a", "<unk>"]


def test_empty_lines_of_wikitext_count(tmp_path):
    source = SOURCES["wikitext103"]
    write_words(tmp_path / source.folder, WIKI_LINES, source)
    assert words_of(source, tmp_path)[0][:7] == ["<eos>", "=", "Robert", "<unk>", "=", "<eos>", "<eos>"]


def test_another_length_than_the_published_one_is_logged(tmp_path, caplog):
    write_words(tmp_path, PTB_LINES)
    read_words(replace(PTB, tokens=(15, 3, 3), vocabulary=13), tmp_path)
    assert not caplog.text
    read_words(PTB, tmp_path)
    assert str(tmp_path) in caplog.text


@pytest.mark.parametrize("part", ["train", "valid", "test"])
@pytest.mark.parametrize("content", [None, b"", PTB_LINES[:-9].encode(), PTB_LINES.encode() + b"\xff\n"])
def test_a_file_is_damaged_or_missing(tmp_path, part, content):
    write_words(tmp_path, PTB_LINES)
    (tmp_path / f"ptb.{part}.txt").unlink()
    if content is not None:
        (tmp_path / f"ptb.{part}.txt").write_bytes(content)
    with pytest.raises(DataError, match=rf"ptb\.{part}\.txt"):
        read_words(PTB, tmp_path)


def test_rare_words_must_be_replaced(tmp_path):
    with pytest.raises(DataError, match=r"ptb\.train\.txt.*--data-dir"):
        read_words(PTB, tmp_path)
    write_words(tmp_path, PTB_LINES.replace("<unk>", "Boulter"))
    with pytest.raises(DataError, match="<unk>"):
        read_words(PTB, tmp_path)


NOVEL = {"train": "Zoë said:\r\n\n  the sea, the sea. " * 50 + "the end", "valid": "the sëa\n", "test": "Ω the sea"}


@pytest.fixture
def folder(tmp_path):
    for part, text in NOVEL.items():
        (tmp_path / f"{part}.txt").write_bytes(text.encode())
    return tmp_path


def test_bytes_are_those_of_the_files(folder):
    text = read_bytes(folder)
    for part, expected in NOVEL.items():
        assert bytes(getattr(text, part).tolist()) == expected.encode()
    novels = folder / "novels"
    for name, content in (("train/b/2.txt", "two"), ("train/a.txt", "one"), ("valid-1.txt", "x"), ("test.txt", "y")):
        (novels / name).parent.mkdir(parents=True, exist_ok=True)
        (novels / name).write_text(content)
    assert bytes(read_bytes(folder).train.tolist()) == b"onetwo"


def test_subwords_stand_for_the_text(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    text = read_subwords(folder, 290)
    tokenizer = learn_bpe(NOVEL["train"].splitlines(keepends=True), 290)
    for part, expected in NOVEL.items():
        assert tokenizer.decode(getattr(text, part).tolist()) == expected
    assert len(text.train) < len(NOVEL["train"]) / 2
    assert text.train.max() < 290
    # The number of lines per call changes nothing.
    monkeypatch.setattr(subwords, "CHUNK", 7)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "other"))
    assert torch.equal(read_subwords(folder, 290).train, text.train)


@pytest.mark.parametrize("part", ["train", "valid", "test"])
def test_a_part_is_missing_or_not_utf8(folder, part):
    (folder / f"{part}.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=f"{part}.*--tokens"):
        read_subwords(folder, 300)
    for damage in (lambda file: file.write_bytes(b""), lambda file: file.unlink()):
        damage(folder / f"{part}.txt")
        with pytest.raises(DataError, match=f"{part}.*--data-dir"):
            read_bytes(folder)
