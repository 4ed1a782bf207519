import pytest

from adahessian.lab.data.errors import DataError
from adahessian.lab.data.parallel_text import read_folder, read_tatoeba


def write(folder, **lines):
    for name, text in lines.items():
        (folder / name.replace("__", ".")).write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.fixture
def folder(tmp_path):
    write(
        tmp_path,
        train__de="Ein Hund läuft.\nZwei Männer\u2028warten. \n",
        train__en="A dog is running.\nTwo  men are waiting.\n",
        val__de="Eine Frau.\n",
        val__en="A woman.\n",
        test_2016_flickr__de="Ein Ball.",
        test_2016_flickr__en="A ball.",
    )
    return tmp_path


def test_a_folder_is_read_line_by_line(folder):
    text = read_folder(folder, "de", "en")
    # What separates paragraphs elsewhere is space inside of a line here.
    assert text.training.source == ["Ein Hund läuft.", "Zwei Männer warten."]
    assert text.training.target == ["A dog is running.", "Two men are waiting."]
    assert (text.validation.source, text.validation.target) == (["Eine Frau."], ["A woman."])
    assert (text.test.source, text.test.target) == (["Ein Ball."], ["A ball."])


def test_the_other_direction(folder):
    assert read_folder(folder, "en", "de").test.source == ["A ball."]


def test_names_of_iwslt14_and_wmt14(folder):
    write(folder, valid__de="eins\n", valid__en="one\n", newstest2014__de="zwei\n", newstest2014__en="two\n")
    (folder / "test_2016_flickr.de").unlink()
    text = read_folder(folder, "de", "en")
    assert (text.validation.target, text.test.target) == (["one"], ["two"])


def test_a_byte_order_mark_and_ends_of_lines_of_windows(folder):
    write(folder, val__de=b"\xef\xbb\xbfEine Frau.\r\n")
    assert read_folder(folder, "de", "en").validation.source == ["Eine Frau."]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("train__en", "A dog is running.\n", r"train\.de has 2 lines and .*train\.en has 1,"),
        ("train__de", "Ein Hund.\n \n", r"train\.de, line 2: empty"),
        ("val__en", b"\n", r"val\.en, line 1: empty"),
        ("val__en", b"", r"val\.en: empty"),
        ("train__en", "A dog\nM\u00e4nner\n".encode("latin-1"), r"train\.en, line 2: not UTF-8"),
        ("train__de", "ein hu@@ nd\nz@@ wei\n", "split into subwords"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(folder, name, text, message):
    write(folder, **{name: text})
    with pytest.raises(DataError, match=message):
        read_folder(folder, "de", "en")


def test_a_missing_file_is_named(folder):
    (folder / "val.en").unlink()
    with pytest.raises(DataError, match=r"val\.en: No such file.*--data-dir"):
        read_folder(folder, "de", "en")
    with pytest.raises(DataError, match=r"nowhere.train\.de: No such file"):
        read_folder(folder / "nowhere", "de", "en")


def tatoeba_rows():
    rows = []
    for number in range(200):
        rows.append(f"I have {number} cats.\tIch habe {number} Katzen.\tCC-BY 2.0 (France) Attribution: tatoeba.org\n")
        rows.append(f"I have {number} cats.\tIch besitze {number} Katzen.\n")
    return rows


def test_tatoeba_is_split_by_the_english_sentence(tmp_path):
    rows = tatoeba_rows()
    write(tmp_path, deu__txt="".join(rows))
    text = read_tatoeba(tmp_path)
    parts = [text.training, text.validation, text.test]
    assert [len(part) for part in parts] == [384, 8, 8]
    sentences = [set(part.target) for part in parts]
    assert sum(map(len, sentences)) == len(set.union(*sentences)) == 200
    pairs = {pair for part in parts for pair in zip(part.source, part.target, strict=True)}
    assert ("Ich besitze 7 Katzen.", "I have 7 cats.") in pairs
    assert len(pairs) == 400
    # Sentences of all lengths are tested, not the shortest or the first ones.
    assert sentences[2] != {f"I have {number} cats." for number in range(4)}


def test_the_split_of_tatoeba_does_not_depend_on_the_order_of_its_lines(tmp_path):
    write(tmp_path, deu__txt="".join(tatoeba_rows()))
    first = set(read_tatoeba(tmp_path).test.target)
    write(tmp_path, deu__txt="".join(reversed(tatoeba_rows())))
    assert set(read_tatoeba(tmp_path).test.target) == first


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Hi.\tHallo!\nRun!\n", r"deu\.txt, line 2: expected an English and a German sentence"),
        ("Hi.\tHallo!\nRun!\t \tCC-BY\n", r"deu\.txt, line 2: expected"),
        ("Hi.\tHallo!\nHi.\tGr\u00fc\u00df Gott!\n", r"deu\.txt: 1 different English sentences are too few"),
        (b"Hi.\tGr\xfc\xdf Gott!\n", r"deu\.txt, line 1: not UTF-8"),
    ],
)
def test_what_is_wrong_with_tatoeba_is_told(tmp_path, text, message):
    write(tmp_path, deu__txt=text)
    with pytest.raises(DataError, match=message):
        read_tatoeba(tmp_path)
