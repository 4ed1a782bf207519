import pytest
import torch

from adahessian.lab.data.errors import DataError
from adahessian.lab.data.word_text import PTB, WIKITEXT2, WIKITEXT103, TextSource, read_word_text

# As their owners write them: a blank at both ends of a line, in WikiText blank lines and headings too.
PTB_LINES = " no it was n't black monday \n but while the <unk> new york <unk> \n"
WIKI_LINES = " \n = Robert <unk> = \n \n Robert <unk> is an English film @-@ television actor . \n"


def write(folder, source, train, valid=" it was \n", test=" monday it \n"):
    folder.mkdir(parents=True, exist_ok=True)
    for part, text in (("train", train), ("valid", valid), ("test", test)):
        (folder / source.file_name.format(part)).write_bytes(text.encode())


def words_of(text, part):
    return [text.words[number] for number in getattr(text, part)]


@pytest.mark.parametrize("subfolder", [".", "ptb"])
def test_every_line_ends_with_a_word_of_its_own(tmp_path, subfolder):
    write(tmp_path / subfolder, PTB, PTB_LINES)
    text = read_word_text(PTB, tmp_path)
    assert words_of(text, "train") == PTB_LINES.replace("\n", "<eos>").split()
    assert words_of(text, "valid") == ["it", "was", "<eos>"]
    assert words_of(text, "test") == ["monday", "it", "<eos>"]
    assert text.train.dtype == torch.int32


@pytest.mark.parametrize("source", [WIKITEXT2, WIKITEXT103], ids=lambda source: source.folder)
def test_blank_lines_of_wikitext_count(tmp_path, source):
    write(tmp_path / source.folder, source, WIKI_LINES)
    text = read_word_text(source, tmp_path)
    assert words_of(text, "train")[:7] == ["<eos>", "=", "Robert", "<unk>", "=", "<eos>", "<eos>"]


def test_words_are_ordered_by_frequency(tmp_path):
    write(tmp_path, PTB, " a b c <unk> c b c \n c \n")
    assert read_word_text(PTB, tmp_path).words == ("c", "b", "<eos>", "a", "<unk>")


def test_a_word_that_training_lacks_is_unknown(tmp_path):
    write(tmp_path, PTB, PTB_LINES, valid=" it zyx \n")
    assert words_of(read_word_text(PTB, tmp_path), "valid") == ["it", "<unk>", "<eos>"]


def test_another_length_than_the_owners_is_said(tmp_path, caplog):
    write(tmp_path, PTB, PTB_LINES)
    read_word_text(PTB, tmp_path)
    assert "not the 929,589 / 73,760 / 82,430 and 10000 of Penn Treebank" in caplog.text
    caplog.clear()
    right = TextSource(title="rows", folder="rows", file_name="ptb.{}.txt", tokens=(15, 3, 3), vocabulary=13)
    read_word_text(right, tmp_path)
    assert not caplog.text


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"Penn Treebank is not in .*ptb\.train\.txt.*--data-dir"):
        read_word_text(PTB, tmp_path)
    write(tmp_path / "ptb", PTB, PTB_LINES)
    (tmp_path / "ptb" / "ptb.valid.txt").unlink()
    with pytest.raises(DataError, match=r"ptb\.valid\.txt is missing, beside its companions"):
        read_word_text(PTB, tmp_path)


@pytest.mark.parametrize("part", ["train", "valid", "test"])
@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (PTB_LINES[:-9].encode(), "ends in the middle of a line"),
        (PTB_LINES.encode() + b"\xff\n", "is not text in UTF-8"),
    ],
    ids=["empty", "cut off", "binary"],
)
def test_bad_files_are_named(tmp_path, part, content, complaint):
    write(tmp_path, PTB, PTB_LINES)
    path = tmp_path / f"ptb.{part}.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"ptb\.{part}\.txt {complaint}"):
        read_word_text(PTB, tmp_path)


def test_a_text_with_its_rare_words_is_another_text(tmp_path):
    write(tmp_path, WIKITEXT2, WIKI_LINES.replace("<unk>", "Boulter"))
    with pytest.raises(DataError, match=r"wiki\.train\.tokens has no <unk> in it"):
        read_word_text(WIKITEXT2, tmp_path)
