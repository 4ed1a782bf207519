import math

import numpy as np
import pytest
import torch

from adahessian.lab.data import criteo
from adahessian.lab.data.criteo import examples, read_log
from adahessian.lab.errors import DataError

# Two rows as published: with empty and negative numbers, and with empty categories.
FIRST = (
    "0\t1\t1\t5\t0\t1382\t4\t15\t2\t181\t1\t2\t\t2\t68fd1e64\t80e26c9b\tfb936136\t7b4723c4\t25c83c98\t7e0ccccf\t"
    "de7995b8\t1f89b562\ta73ee510\ta8cd5504\tb2cb9c98\t37c9c164\t2824a5f6\t1adce6ef\t8ba8b39a\t891b62e7\te5ba7672\t"
    "f54016b9\t21ddcdc9\tb1252a9d\t07b5194c\t\t3a171ecb\tc5c50484\te8b83407\t9727dd16"
)
SECOND = "1\t\t-2\t0\t" + "\t" * 9 + "7" + "\tffffffff" + "\t" * 24 + "\t00000000"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "adahessian"


@pytest.fixture
def conversions(monkeypatch):
    """One entry for each log that was converted."""
    calls = []
    convert = criteo._convert
    monkeypatch.setattr(criteo, "_convert", lambda *args: calls.append(args) or convert(*args))
    return calls


def write(folder, lines, end="\n"):
    (folder / "train.txt").write_text("".join(line + end for line in lines), newline="")
    return folder / "train.txt"


def test_the_published_format_can_be_read(tmp_path):
    numbers, buckets, labels = examples(read_log(write(tmp_path, [FIRST, SECOND] * 7))[0][:2], hash_size=1000)
    assert labels.tolist() == [0.0, 1.0]
    expected = [1, 1, 5, 0, 1382, 4, 15, 2, 181, 1, 2, 0, 2]
    torch.testing.assert_close(numbers, torch.tensor([expected, [0] * 12 + [7]]).add(1.0).log())
    categories = [int(text, 16) % 1000 if text else 1000 for text in FIRST.split("\t")[14:]]
    # 0 is a value, and differs from an empty field.
    assert buckets.tolist() == [categories, [0xFFFFFFFF % 1000, *[1000] * 24, 0]]
    assert (numbers.dtype, buckets.dtype, labels.dtype) == (torch.float32, torch.int64, torch.float32)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("rows", [7, 13, 14, 500])
def test_rows_keep_their_order_and_the_last_seventh_is_the_test_day(tmp_path, monkeypatch, rows, end):
    monkeypatch.setattr(criteo, "_BYTES_AT_ONCE", 1000)
    path = write(tmp_path, [FIRST.replace("\t1382\t", f"\t{number}\t") for number in range(rows)], end)
    training, test = (part[:, 5].tolist() for part in read_log(path))
    assert training + test == list(range(rows))
    assert len(training) == math.ceil(rows * 6 / 7)


@pytest.mark.parametrize(
    "line",
    [
        "\t".join(FIRST.split("\t")[:-1]),
        FIRST + "\t",
        "",
        "2" + FIRST[1:],
        FIRST.replace("\t1382\t", "\tmany\t"),
        FIRST.replace("68fd1e64", "68fd1eg4"),
        FIRST.replace("68fd1e64", "168fd1e64"),
        FIRST.replace("68fd1e64", "-8fd1e64"),
    ],
)
def test_a_line_is_damaged(tmp_path, cache, line):
    with pytest.raises(DataError, match=r"train\.txt, line 8 "):
        read_log(write(tmp_path, [*[FIRST] * 7, line, FIRST]))
    assert list(cache.iterdir()) == []


def test_a_log_is_too_short(tmp_path):
    with pytest.raises(DataError, match=r"train\.txt has 6 rows"):
        read_log(write(tmp_path, [FIRST] * 6))


def test_a_log_is_converted_once_and_then_mapped(tmp_path, cache, conversions):
    path = write(tmp_path, [FIRST, SECOND] * 10)
    first, second = read_log(path), read_log(path)
    assert isinstance(second[0], np.memmap)
    assert np.array_equal(first[0], second[0])
    assert len(conversions) == len(list(cache.iterdir())) == 1
    assert read_log(write(tmp_path, [*[FIRST] * 8, "1" + FIRST[1:]]))[1][-1, 0] == 1


@pytest.mark.parametrize("damage", ["truncated", "empty", "pickle"])
def test_a_damaged_cache_is_replaced(tmp_path, cache, conversions, damage):
    path = write(tmp_path, [FIRST, SECOND] * 10)
    rows = np.array(read_log(path)[0])
    (cached,) = cache.iterdir()
    if damage == "pickle":
        np.save(cached, np.array([{}], dtype=object), allow_pickle=True)
    else:
        cached.write_bytes(cached.read_bytes()[:-100] if damage == "truncated" else b"")
    assert np.array_equal(read_log(path)[0], rows)
    assert len(conversions) == 2
    assert list(cache.iterdir()) == [cached]
