from dataclasses import replace

import pytest
import torch

from adahessian.lab.data.word_text import SOURCES, read_word_text
from adahessian.lab.errors import DataError

PTB = SOURCES["ptb"]
# As their owners write them: a space at both ends of a line, and empty lines and headings in WikiText.
PTB_LINES = " no it was n't black monday \n but while the <unk> new york <unk> \n"
WIKI_LINES = " \n = Robert <unk> = \n \n Robert <unk> is an English film @-@ television actor . \n"


def write(folder, train, source=PTB):
    folder.mkdir(parents=True, exist_ok=True)
    for part, text in (("train", train), ("valid", " it was \n"), ("test", " monday zyx \n")):
        (folder / source.file_name.format(part)).write_bytes(text.encode())


def words_of(text, part):
    return [text.words[number] for number in getattr(text, part)]


@pytest.mark.parametrize("folder", [".", "ptb"])
def test_every_line_ends_with_eos(tmp_path, folder):
    write(tmp_path / folder, PTB_LINES)
    text = read_word_text(PTB, tmp_path)
    assert words_of(text, "train") == PTB_LINES.replace("\n", "<eos>").split()
    assert words_of(text, "valid") == ["it", "was", "<eos>"]
    assert words_of(text, "test") == ["monday", "<unk>", "<eos>"]
    assert text.train.dtype == torch.int32
    # An adaptive softmax needs the most frequent words first.
    write(tmp_path / folder, " a b c <unk> c b c \n c \n")
    assert read_word_text(PTB, tmp_path).words == ("c", "b", "<eos>", "a", "<unk>")


@pytest.mark.parametrize("name", ["wikitext2", "wikitext103"])
def test_empty_lines_of_wikitext_count(tmp_path, name):
    write(tmp_path / SOURCES[name].folder, WIKI_LINES, SOURCES[name])
    text = read_word_text(SOURCES[name], tmp_path)
    assert words_of(text, "train")[:7] == ["<eos>", "=", "Robert", "<unk>", "=", "<eos>", "<eos>"]


def test_another_length_than_the_published_one_is_logged(tmp_path, caplog):
    write(tmp_path, PTB_LINES)
    read_word_text(replace(PTB, tokens=(15, 3, 3), vocabulary=13), tmp_path)
    assert not caplog.text
    read_word_text(PTB, tmp_path)
    assert str(tmp_path) in caplog.text


@pytest.mark.parametrize("part", ["train", "valid", "test"])
@pytest.mark.parametrize("content", [None, b"", PTB_LINES[:-9].encode(), PTB_LINES.encode() + b"\xff\n"])
def test_a_file_is_damaged_or_missing(tmp_path, part, content):
    write(tmp_path, PTB_LINES)
    (tmp_path / f"ptb.{part}.txt").unlink()
    if content is not None:
        (tmp_path / f"ptb.{part}.txt").write_bytes(content)
    with pytest.raises(DataError, match=rf"ptb\.{part}\.txt"):
        read_word_text(PTB, tmp_path)


def test_rare_words_must_be_replaced(tmp_path):
    with pytest.raises(DataError, match=r"ptb\.train\.txt.*--data-dir"):
        read_word_text(PTB, tmp_path)
    write(tmp_path, PTB_LINES.replace("<unk>", "Boulter"))
    with pytest.raises(DataError, match="<unk>"):
        read_word_text(PTB, tmp_path)
