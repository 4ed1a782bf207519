import math

import numpy as np
import pytest
import torch

from adahessian.lab.data import criteo
from adahessian.lab.data.criteo import find_log, read_log
from adahessian.lab.data.errors import DataError

# Two rows as they are published: with empty and negative numbers, and with empty categories.
FIRST = (
    "0\t1\t1\t5\t0\t1382\t4\t15\t2\t181\t1\t2\t\t2\t68fd1e64\t80e26c9b\tfb936136\t7b4723c4\t25c83c98\t7e0ccccf\t"
    "de7995b8\t1f89b562\ta73ee510\ta8cd5504\tb2cb9c98\t37c9c164\t2824a5f6\t1adce6ef\t8ba8b39a\t891b62e7\te5ba7672\t"
    "f54016b9\t21ddcdc9\tb1252a9d\t07b5194c\t\t3a171ecb\tc5c50484\te8b83407\t9727dd16"
)
SECOND = "1\t\t-2\t0\t" + "\t" * 9 + "7" + "\tffffffff" + "\t" * 24 + "\t00000000"


def write(tmp_path, lines, end="\n"):
    path = tmp_path / "train.txt"
    path.write_text("".join(line + end for line in lines), newline="")
    return path


def test_reads_the_published_format(tmp_path):
    log = read_log(write(tmp_path, [FIRST, SECOND] * 7), tmp_path / "cache")
    numbers, buckets, labels = log.examples(0, 2, hash_size=1000)
    assert labels.tolist() == [0.0, 1.0]
    wanted = [1, 1, 5, 0, 1382, 4, 15, 2, 181, 1, 2, 0, 2]
    torch.testing.assert_close(numbers[0], torch.tensor([math.log(number + 1) for number in wanted]))
    torch.testing.assert_close(numbers[1], torch.tensor([0.0] * 12 + [math.log(8)]))
    categories = FIRST.split("\t")[14:]
    assert buckets[0].tolist() == [int(text, 16) % 1000 if text else 1000 for text in categories]
    # Zero is a value as any other, and not the same as none.
    assert buckets[1].tolist() == [0xFFFFFFFF % 1000, *[1000] * 24, 0]
    assert numbers.dtype == labels.dtype == torch.float32
    assert buckets.dtype == torch.int64


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(("rows", "training"), [(7, 6), (13, 12), (14, 12), (20, 18)])
def test_the_last_seventh_is_the_test_day(tmp_path, rows, training, end):
    log = read_log(write(tmp_path, [FIRST] * rows, end), tmp_path / "cache")
    assert (len(log.rows), log.training_rows) == (rows, training)


def test_many_rows_keep_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(criteo, "_BYTES_AT_ONCE", 1000)
    lines = [FIRST.replace("\t1382\t", f"\t{number}\t") for number in range(500)]
    log = read_log(write(tmp_path, lines), tmp_path / "cache")
    assert log.rows[:, 5].tolist() == list(range(500))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("\t".join(FIRST.split("\t")[:-1]), r"train\.txt, line 8: 39 columns, but .* are 40: the file is truncated"),
        (FIRST + "\t", r"line 8: 41 columns"),
        ("", r"line 8: 1 columns"),
        ("2" + FIRST[1:], r"line 8: the label is '2', but it must be 0 or 1"),
        (FIRST[1:], r"line 8: the label is ''"),
        (FIRST.replace("\t1382\t", "\tmany\t"), r"line 8: invalid literal"),
        (FIRST.replace("68fd1e64", "68fd1eg4"), r"line 8: invalid literal"),
        (FIRST.replace("68fd1e64", "168fd1e64"), r"line 8: a value does not fit into 32 bits"),
        (FIRST.replace("68fd1e64", "-8fd1e64"), r"line 8: a value does not fit into 32 bits"),
    ],
)
def test_says_which_line_is_wrong_and_leaves_nothing_behind(tmp_path, line, message):
    with pytest.raises(DataError, match=message):
        read_log(write(tmp_path, [*[FIRST] * 7, line, FIRST]), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_says_that_there_are_too_few_rows(tmp_path):
    with pytest.raises(DataError, match="has 6 rows, but seven days"):
        read_log(write(tmp_path, [FIRST] * 6), tmp_path / "cache")


def test_the_log_is_in_the_data_folder_or_in_criteo(tmp_path):
    with pytest.raises(DataError, match=r"no train\.txt in .* or in .*criteo: put the train\.txt of Criteo"):
        find_log("train.txt", tmp_path)
    (tmp_path / "criteo").mkdir()
    write(tmp_path / "criteo", [FIRST])
    assert find_log("train.txt", tmp_path) == tmp_path / "criteo" / "train.txt"
    write(tmp_path, [FIRST])
    assert find_log("train.txt", tmp_path) == tmp_path / "train.txt"


# The cache -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def conversions(monkeypatch):
    """How often a log was read."""
    calls = []
    convert = criteo._convert
    monkeypatch.setattr(criteo, "_convert", lambda *args: calls.append(args) or convert(*args))
    return calls


def test_a_log_is_converted_once_and_then_mapped(tmp_path, conversions, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    path = write(tmp_path, [FIRST, SECOND] * 10)
    first, second = read_log(path), read_log(path)
    assert len(conversions) == 1
    assert isinstance(second.rows, np.memmap)
    assert np.array_equal(first.rows, second.rows)
    assert [file.parent for file in (tmp_path / "home").rglob("*.npy")] == [tmp_path / "home" / "adahessian"]


def test_another_log_is_another_cache(tmp_path, conversions):
    read_log(write(tmp_path, [FIRST] * 9), tmp_path / "cache")
    changed = read_log(write(tmp_path, [*[FIRST] * 8, "1" + FIRST[1:]]), tmp_path / "cache")
    assert len(conversions) == 2
    assert changed.rows[-1, 0] == 1


def flip_a_bit(content):
    return content[:-30] + bytes([content[-30] ^ 1]) + content[-29:]


@pytest.mark.parametrize(
    "damage",
    [flip_a_bit, lambda content: content[:-100], lambda content: b"", lambda content: b"none" + content[4:]],
    ids=["bit", "short", "empty", "other"],
)
def test_a_damaged_cache_is_made_again(tmp_path, conversions, damage):
    path = write(tmp_path, [FIRST, SECOND] * 10)
    whole = np.array(read_log(path, tmp_path / "cache").rows)
    (cached,) = (tmp_path / "cache").iterdir()
    cached.write_bytes(damage(cached.read_bytes()))
    assert np.array_equal(read_log(path, tmp_path / "cache").rows, whole)
    assert len(conversions) == 2
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_pickle_is_not_loaded(tmp_path, conversions):
    path = write(tmp_path, [FIRST] * 9)
    read_log(path, tmp_path / "cache")
    (cached,) = (tmp_path / "cache").iterdir()
    with cached.open("wb") as file:
        np.save(file, np.array([{}], dtype=object), allow_pickle=True)
    assert len(read_log(path, tmp_path / "cache").rows) == 9
    assert len(conversions) == 2
