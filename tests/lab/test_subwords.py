import json

import pytest

from adahessian.lab.data import subwords
from adahessian.lab.data.subwords import RESERVED, learn_subwords

GERMAN = ["Ein Hund läuft über die Wiese.", "Zwei Hunde laufen.", "Ein Mann läuft mit dem Hund."] * 5
ENGLISH = ["A dog is running across the meadow.", "Two dogs are running.", "A man is running with the dog."] * 5
TEXTS = (GERMAN, ENGLISH)
SIZE = 330


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "adahessian" / "subwords"


@pytest.fixture
def learned(monkeypatch):
    """How often subwords were learned."""
    times = []
    learn = subwords._learn
    monkeypatch.setattr(subwords, "_learn", lambda *args: times.append(1) or learn(*args))
    return times


@pytest.mark.parametrize("tokenized", [False, True])
def test_any_text_comes_back(tokenized):
    learned = learn_subwords(TEXTS, SIZE, tokenized=tokenized)
    assert len(learned) == SIZE
    texts = [*GERMAN[:3], *ENGLISH[:3], "Ω 漢字 🐕 </s> <pad>", "u.s. 1,000 &apos;s @-@", "x"]
    encoded = learned.encode(texts)
    assert learned.decode(encoded) == texts
    assert all(RESERVED <= token < SIZE for sentence in encoded for token in sentence)


def test_reserved_numbers_have_no_text():
    learned = learn_subwords(TEXTS, SIZE, tokenized=False)
    assert learned.decode([[1, *learned.encode(["A dog"])[0], 2, 0, 0]]) == ["A dog"]


def test_a_frequent_word_is_one_token_wherever_it_is():
    learned = learn_subwords(TEXTS, SIZE, tokenized=False)
    (first, second, third) = learned.encode(["running", "running running", "running."])
    assert len(first) == 1
    assert second == 2 * first
    assert third[:1] == first
    assert len(third) == 2


def test_words_of_prepared_text_are_not_split_at_punctuation():
    text = ["that &apos;s it", "what &apos;s that"] * 20
    word = learn_subwords([text], 300, tokenized=True).encode(["&apos;s"])[0]
    pieces = learn_subwords([text], 300, tokenized=False).encode(["&apos;s"])[0]
    assert len(word) == 1
    assert len(pieces) == 4


def test_the_same_text_gives_the_same_subwords_which_are_learned_once(cache, learned):
    first = learn_subwords(TEXTS, SIZE, tokenized=False).encode(ENGLISH)
    assert learn_subwords(TEXTS, SIZE, tokenized=False).encode(ENGLISH) == first
    assert len(learned) == 1
    (file,) = cache.iterdir()
    file.unlink()
    assert learn_subwords(TEXTS, SIZE, tokenized=False).encode(ENGLISH) == first
    assert len(learned) == 2


def test_other_text_size_or_kind_is_learned_anew(cache, learned):
    learn_subwords(TEXTS, SIZE, tokenized=False)
    learn_subwords(TEXTS, SIZE - 1, tokenized=False)
    learn_subwords(TEXTS, SIZE, tokenized=True)
    learn_subwords((GERMAN, ENGLISH[1:]), SIZE, tokenized=False)
    assert len(learned) == 4
    assert len(list(cache.iterdir())) == 4


@pytest.mark.parametrize("damage", ["cut", "changed", "other", "empty"])
def test_a_damaged_file_is_not_trusted(cache, learned, damage, caplog):
    expected = learn_subwords(TEXTS, SIZE, tokenized=False).encode(ENGLISH)
    (file,) = cache.iterdir()
    content = file.read_text()
    saved = json.loads(content)
    changed = json.loads(saved["tokenizer"])
    merges = changed["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]
    file.write_text(
        {
            "cut": content[: len(content) // 2],
            "changed": json.dumps({**saved, "tokenizer": json.dumps(changed)}),
            "other": "[]",
            "empty": "",
        }[damage]
    )
    assert learn_subwords(TEXTS, SIZE, tokenized=False).encode(ENGLISH) == expected
    assert len(learned) == 2
    assert "learning subwords again" in caplog.text
    assert file.read_text() == content
    assert list(cache.iterdir()) == [file]


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(learn_subwords(TEXTS, SIZE, tokenized=False)) == SIZE
    assert "subwords are not cached" in caplog.text
