import pytest

from adahessian.lab.data.parallel_text import read_folder
from adahessian.lab.errors import DataError


def write(folder, texts):
    for name, text in texts.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.fixture
def folder(tmp_path):
    texts = {
        "train.de": "Ein Hund läuft.\nZwei Männer\u2028warten. \n",
        "train.en": "A dog is running.\nTwo  men are waiting.\n",
        "val.de": b"\xef\xbb\xbfEine Frau.\r\n",  # as Windows writes it
        "val.en": "A woman.\n",
        "test_2016_flickr.de": "Ein Ball.",
        "test_2016_flickr.en": "A ball.",
    }
    write(tmp_path, texts)
    return tmp_path


def test_files_are_read_line_by_line(folder):
    # A separator of paragraphs is a space within a line.
    training = ["Ein Hund läuft.", "Zwei Männer warten."], ["A dog is running.", "Two men are waiting."]
    parts = (training, (["Eine Frau."], ["A woman."]), (["Ein Ball."], ["A ball."]))
    assert read_folder(folder, "de", "en") == parts
    assert read_folder(folder, "en", "de") == tuple(part[::-1] for part in parts)


def test_files_may_have_the_names_of_iwslt14_and_wmt14(folder):
    write(folder, {"valid.de": "1\n", "valid.en": "one\n", "newstest2014.de": "2\n", "newstest2014.en": "two\n"})
    (folder / "test_2016_flickr.de").unlink()
    assert read_folder(folder, "de", "en")[1:] == ((["1"], ["one"]), (["2"], ["two"]))


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("train.en", "A dog is running.\n", r"train\.de has 2 .*train\.en has 1"),
        ("train.de", "Ein Hund.\n \n", r"train\.de, line 2"),
        ("val.en", b"", r"val\.en"),
        ("train.en", "A dog\nM\u00e4nner\n".encode("latin-1"), r"train\.en, line 2"),
        ("train.de", "ein hu@@ nd\nz@@ wei\n", "'@@ '"),
        ("val.en", None, r"val\.en"),
    ],
)
def test_a_file_is_damaged_or_missing(folder, name, text, place):
    if text is None:
        (folder / name).unlink()
    else:
        write(folder, {name: text})
    with pytest.raises(DataError, match=place):
        read_folder(folder, "de", "en")
