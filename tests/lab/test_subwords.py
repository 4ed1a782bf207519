import pytest
import torch

from adahessian.lab.data import plain_text, subwords
from adahessian.lab.data.plain_text import read_bytes, read_subwords
from adahessian.lab.data.subwords import RESERVED, learn_bpe, learn_subwords
from adahessian.lab.errors import DataError

GERMAN = ["Ein Hund läuft über die Wiese.", "Zwei Hunde laufen.", "Ein Mann läuft mit dem Hund."] * 5
ENGLISH = ["A dog is running across the meadow.", "Two dogs are running.", "A man is running with the dog."] * 5
TEXTS = (GERMAN, ENGLISH)
SIZE = 330


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "adahessian" / "subwords"


@pytest.fixture
def learned(monkeypatch):
    """One entry for each time that subwords are learned."""
    calls = []
    monkeypatch.setattr(subwords, "learn_bpe", lambda *args: calls.append(args) or learn_bpe(*args))
    return calls


@pytest.mark.parametrize("tokenized", [False, True])
def test_any_text_comes_back(tokenized):
    found = learn_subwords(TEXTS, SIZE, tokenized=tokenized)
    assert len(found) == SIZE
    texts = [*GERMAN[:3], *ENGLISH[:3], "Ω 漢字 🐕 </s> <pad>", "u.s. 1,000 &apos;s @-@", "x"]
    encoded = found.encode(texts)
    assert found.decode([[1, *sentence, 2, 0] for sentence in encoded]) == texts
    assert all(RESERVED <= token < SIZE for sentence in encoded for token in sentence)


def test_words_are_split_at_punctuation_in_plain_text_only():
    for tokenized, lengths in ((True, [1, 2, 1]), (False, [1, 2, 4])):
        found = learn_subwords([["that &apos;s it", "what &apos;s that"] * 20], 300, tokenized=tokenized)
        assert list(map(len, found.encode(["that", "that that", "&apos;s"]))) == lengths


def test_subwords_are_learned_once_for_each_text_size_and_kind(cache, learned):
    first = learn_subwords(TEXTS, SIZE, tokenized=False).encode(ENGLISH)
    assert learn_subwords(TEXTS, SIZE, tokenized=False).encode(ENGLISH) == first
    assert len(learned) == 1
    learn_subwords(TEXTS, SIZE - 1, tokenized=False)
    learn_subwords(TEXTS, SIZE, tokenized=True)
    learn_subwords((GERMAN, ENGLISH[1:]), SIZE, tokenized=False)
    assert len(learned) == len(list(cache.iterdir())) == 4


@pytest.mark.parametrize("damage", ["truncated", "other", "empty"])
def test_a_damaged_cache_is_replaced(cache, learned, damage):
    expected = learn_subwords(TEXTS, SIZE, tokenized=False).encode(ENGLISH)
    (file,) = cache.iterdir()
    content = file.read_text()
    file.write_text({"truncated": content[: len(content) // 2], "other": "[]", "empty": ""}[damage])
    assert learn_subwords(TEXTS, SIZE, tokenized=False).encode(ENGLISH) == expected
    assert len(learned) == 2
    assert file.read_text() == content
    assert list(cache.iterdir()) == [file]


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path, caplog):
    (tmp_path / "cache").write_text("not a folder")
    assert len(learn_subwords(TEXTS, SIZE, tokenized=False)) == SIZE
    assert str(tmp_path / "cache") in caplog.text


# Plain text -----------------------------------------------------------------------------------------------------------

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


def test_subwords_stand_for_the_text(folder, cache, monkeypatch):
    text = read_subwords(folder, 290)
    tokenizer = learn_bpe(NOVEL["train"].splitlines(keepends=True), 290)
    for part, expected in NOVEL.items():
        assert tokenizer.decode(getattr(text, part).tolist()) == expected
    assert len(text.train) < len(NOVEL["train"]) / 2
    assert text.train.max() < 290
    # The number of lines per call changes nothing.
    monkeypatch.setattr(plain_text, "CHUNK", 7)
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
