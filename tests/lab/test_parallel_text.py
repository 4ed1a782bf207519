import pytest

from adahessian.lab.data.parallel_text import read_folder, read_tatoeba
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
    text = read_folder(folder, "de", "en")
    # A separator of paragraphs is a space within a line.
    assert text.training.source == ["Ein Hund läuft.", "Zwei Männer warten."]
    assert text.training.target == ["A dog is running.", "Two men are waiting."]
    assert (text.validation.source, text.test.target) == (["Eine Frau."], ["A ball."])
    assert read_folder(folder, "en", "de").test.source == ["A ball."]


def test_files_may_have_the_names_of_iwslt14_and_wmt14(folder):
    write(folder, {"valid.de": "1\n", "valid.en": "one\n", "newstest2014.de": "2\n", "newstest2014.en": "two\n"})
    (folder / "test_2016_flickr.de").unlink()
    text = read_folder(folder, "de", "en")
    assert (text.validation.target, text.test.target) == (["one"], ["two"])


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("train.en", "A dog is running.\n", r"train\.de has 2 .*train\.en has 1"),
        ("train.de", "Ein Hund.\n \n", r"train\.de, line 2"),
        ("val.en", b"", r"val\.en"),
        ("train.en", "A dog\nM\u00e4nner\n".encode("latin-1"), r"train\.en, line 2"),
        ("train.de", "ein hu@@ nd\nz@@ wei\n", "'@@ '"),
        ("val.en", None, r"val\.en"),
        ("deu.txt", "Hi.\tHallo!\nRun!\n", r"deu\.txt, line 2"),
        ("deu.txt", "Hi.\tHallo!\nRun!\t \tCC-BY\n", r"deu\.txt, line 2"),
        ("deu.txt", "Hi.\tHallo!\nHi.\tServus!\n", r"deu\.txt"),
        ("deu.txt", b"Hi.\tGr\xfc\xdf Gott!\n", r"deu\.txt, line 1"),
    ],
)
def test_a_file_is_damaged_or_missing(folder, name, text, place):
    if text is None:
        (folder / name).unlink()
    else:
        write(folder, {name: text})
    with pytest.raises(DataError, match=place):
        read_tatoeba(folder) if name == "deu.txt" else read_folder(folder, "de", "en")


def test_tatoeba_is_split_by_the_english_sentence(tmp_path):
    rows = []
    for number in range(200):
        rows.append(f"I have {number} cats.\tIch habe {number} Katzen.\tCC-BY 2.0 (France) Attribution: tatoeba.org\n")
        rows.append(f"I have {number} cats.\tIch besitze {number} Katzen.\n")
    write(tmp_path, {"deu.txt": "".join(rows)})
    text = read_tatoeba(tmp_path)
    parts = [text.training, text.validation, text.test]
    assert [len(part) for part in parts] == [384, 8, 8]
    sentences = [set(part.target) for part in parts]
    assert sum(map(len, sentences)) == len(set.union(*sentences)) == 200
    pairs = {pair for part in parts for pair in zip(part.source, part.target, strict=True)}
    assert ("Ich besitze 7 Katzen.", "I have 7 cats.") in pairs
    assert len(pairs) == 400
    write(tmp_path, {"deu.txt": "".join(reversed(rows))})
    assert set(read_tatoeba(tmp_path).test.target) == sentences[2]
