import pytest
from tokenizers import trainers

from adahessian.lab.data.subwords import RESERVED, Subwords

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
    calls, trainer = [], trainers.BpeTrainer
    monkeypatch.setattr(trainers, "BpeTrainer", lambda **options: calls.append(options) or trainer(**options))
    return calls


@pytest.mark.parametrize("tokenized", [False, True])
def test_any_text_comes_back(tokenized):
    found = Subwords(TEXTS, SIZE, tokenized=tokenized)
    assert len(found) == SIZE
    texts = [*GERMAN[:3], *ENGLISH[:3], "Ω 漢字 🐕 </s> <pad>", "u.s. 1,000 &apos;s @-@", "x"]
    encoded = found.encode(texts)
    assert found.decode([[1, *sentence, 2, 0] for sentence in encoded]) == texts
    assert all(RESERVED <= token < SIZE for sentence in encoded for token in sentence)


def test_words_are_split_at_punctuation_in_plain_text_only():
    for tokenized, lengths in ((True, [1, 2, 1]), (False, [1, 2, 4])):
        found = Subwords([["that &apos;s it", "what &apos;s that"] * 20], 300, tokenized=tokenized)
        assert list(map(len, found.encode(["that", "that that", "&apos;s"]))) == lengths


def test_subwords_are_learned_once_for_each_text_size_and_kind(cache, learned):
    first = Subwords(TEXTS, SIZE, tokenized=False).encode(ENGLISH)
    assert Subwords(TEXTS, SIZE, tokenized=False).encode(ENGLISH) == first
    assert len(learned) == 1
    Subwords(TEXTS, SIZE - 1, tokenized=False)
    Subwords(TEXTS, SIZE, tokenized=True)
    Subwords((GERMAN, ENGLISH[1:]), SIZE, tokenized=False)
    assert len(learned) == len(list(cache.iterdir())) == 4


@pytest.mark.parametrize("damage", ["truncated", "other", "empty"])
def test_a_damaged_cache_is_replaced(cache, learned, damage):
    expected = Subwords(TEXTS, SIZE, tokenized=False).encode(ENGLISH)
    (file,) = cache.iterdir()
    content = file.read_bytes()
    file.write_bytes({"truncated": content[: len(content) // 2], "other": b"[]", "empty": b""}[damage])
    assert Subwords(TEXTS, SIZE, tokenized=False).encode(ENGLISH) == expected
    assert len(learned) == 2
    assert file.read_bytes() == content
    assert list(cache.iterdir()) == [file]


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path, caplog):
    (tmp_path / "cache").write_text("not a folder")
    assert len(Subwords(TEXTS, SIZE, tokenized=False)) == SIZE
    assert str(tmp_path / "cache") in caplog.text
