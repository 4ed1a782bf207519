import pytest
from tokenizers import trainers

from adahessian.lab.data.subwords import WORDS, WORDS_AND_PUNCTUATION, learn_bpe
from adahessian.lab.data.token_batches import END

GERMAN = ["Ein Hund läuft über die Wiese.", "Zwei Hunde laufen.", "Ein Mann läuft mit dem Hund."] * 5
ENGLISH = ["A dog is running across the meadow.", "Two dogs are running.", "A man is running with the dog."] * 5
TEXTS = [*GERMAN, *ENGLISH]
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


def encode(tokenizer, texts=ENGLISH):
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]


@pytest.mark.parametrize("words", [WORDS, WORDS_AND_PUNCTUATION])
def test_any_text_comes_back(words):
    learn_bpe(TEXTS, SIZE, words)
    found = learn_bpe(TEXTS, SIZE, words)  # from the cache
    assert found.get_vocab_size() == SIZE
    texts = [*GERMAN[:3], *ENGLISH[:3], "Ω 漢字 🐕 </s> <padding> <end>", "u.s. 1,000 &apos;s @-@", "x"]
    encoded = encode(found, texts)
    assert found.decode_batch([[1, *sentence, 2, 0] for sentence in encoded]) == [f" {text}" for text in texts]
    assert all(END < token < SIZE for sentence in encoded for token in sentence)


def test_words_are_split_at_punctuation_in_plain_text_only():
    for words, lengths in ((WORDS, [1, 2, 1]), (WORDS_AND_PUNCTUATION, [1, 2, 4])):
        found = learn_bpe(["that &apos;s it", "what &apos;s that"] * 20, 300, words)
        assert list(map(len, encode(found, ["that", "that that", "&apos;s"]))) == lengths


def test_subwords_are_learned_once_for_each_text_size_and_kind(cache, learned):
    first = encode(learn_bpe(TEXTS, SIZE, WORDS))
    assert encode(learn_bpe(TEXTS, SIZE, WORDS)) == first
    assert len(learned) == 1
    learn_bpe(TEXTS, SIZE - 1, WORDS)
    learn_bpe(TEXTS, SIZE)
    learn_bpe(TEXTS[1:], SIZE, WORDS)
    assert len(learned) == len(list(cache.iterdir())) == 4


@pytest.mark.parametrize("damage", ["truncated", "other", "empty"])
def test_a_damaged_cache_is_replaced(cache, learned, damage):
    expected = encode(learn_bpe(TEXTS, SIZE, WORDS))
    (file,) = cache.iterdir()
    content = file.read_bytes()
    file.write_bytes({"truncated": content[: len(content) // 2], "other": b"[]", "empty": b""}[damage])
    assert encode(learn_bpe(TEXTS, SIZE, WORDS)) == expected
    assert len(learned) == 2
    assert file.read_bytes() == content
    assert list(cache.iterdir()) == [file]


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path, caplog):
    (tmp_path / "cache").write_text("not a folder")
    assert learn_bpe(TEXTS, SIZE, WORDS).get_vocab_size() == SIZE
    assert str(tmp_path / "cache") in caplog.text
