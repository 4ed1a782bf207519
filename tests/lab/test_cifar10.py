import io
import os
import pickle
import struct
import tarfile

import pytest
import torch

from adahessian.lab.data.cifar10 import read_cifar10
from adahessian.lab.data.errors import DataError

NAMES = ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]
ROWS = 3


def examples(seed, rows=ROWS):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (rows, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return images, torch.randint(10, (rows,), generator=generator)


def binary(images, labels):
    return torch.cat((labels.to(torch.uint8)[:, None], images.flatten(1)), 1).numpy().tobytes()


def py2_string(text):
    """As Python 2 wrote it: the opcode BINSTRING, a length and the bytes."""
    return b"T" + struct.pack("<I", len(text)) + text


def py2_number(number):
    return b"J" + struct.pack("<i", number)


def pickled(images, labels, dtype=b"u1"):
    """Protocol 2 as Python 2 and its numpy wrote it: the published format, which Python 3 writes otherwise."""
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + py2_number(0) + b"\x85" + py2_string(b"b") + b"tR"
    )
    numpy_dtype = (
        b"cnumpy\ndtype\n(" + py2_string(dtype) + py2_number(0) + py2_number(1) + b"tR"
        b"(" + py2_number(3) + py2_string(b"|") + b"NNN" + py2_number(-1) + py2_number(-1) + py2_number(0) + b"tb"
    )
    shape = py2_number(len(labels)) + py2_number(3072) + b"\x86"
    state = b"(" + py2_number(1) + shape + numpy_dtype + b"\x89" + py2_string(images.numpy().tobytes()) + b"tb"
    numbers = b"](" + b"".join(map(py2_number, labels.tolist())) + b"e"
    return (
        b"\x80\x02}(" + py2_string(b"data") + array + state + py2_string(b"labels") + numbers
        + py2_string(b"batch_label") + py2_string(b"a batch") + py2_string(b"filenames") + b"]u."
    )  # fmt: skip


def write(folder, form):
    """The six batches, in one of the two forms."""
    folder.mkdir(parents=True)
    suffix, content = {"bin": (".bin", binary), "py": ("", pickled)}[form]
    for seed, name in enumerate(NAMES):
        (folder / f"{name}{suffix}").write_bytes(content(*examples(seed)))
    return folder


def archive(file, form, folder):
    with tarfile.open(file, "w:gz") as members:
        members.add(write(folder, form), f"cifar-10-batches-{form}")
    return file


def assert_is_the_whole(read):
    (images, labels), (test_images, test_labels) = read
    assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
    assert torch.equal(images, torch.cat([examples(seed)[0] for seed in range(5)]))
    assert torch.equal(labels, torch.cat([examples(seed)[1] for seed in range(5)]))
    assert torch.equal(test_images, examples(5)[0])
    assert torch.equal(test_labels, examples(5)[1])


@pytest.mark.parametrize("form", ["bin", "py"])
def test_reads_the_folder_or_the_one_that_holds_it(tmp_path, form):
    folder = write(tmp_path / f"cifar-10-batches-{form}", form)
    assert_is_the_whole(read_cifar10(folder))
    assert_is_the_whole(read_cifar10(tmp_path))


@pytest.mark.parametrize(("form", "name"), [("bin", "cifar-10-binary.tar.gz"), ("py", "cifar-10-python.tar.gz")])
def test_reads_the_archive_without_unpacking_it(tmp_path, form, name):
    (tmp_path / "data").mkdir()
    file = archive(tmp_path / "data" / name, form, tmp_path / "elsewhere")
    assert_is_the_whole(read_cifar10(tmp_path / "data"))
    assert_is_the_whole(read_cifar10(file))
    assert list((tmp_path / "data").iterdir()) == [file]


def test_the_pickles_of_these_tests_are_what_numpy_takes_for_an_array():
    images, labels = examples(0)
    batch = pickle.loads(pickled(images, labels), encoding="bytes")
    assert batch[b"data"].dtype == "uint8"
    assert torch.equal(torch.from_numpy(batch[b"data"]).view(-1, 3, 32, 32), images)
    assert batch[b"labels"] == labels.tolist()


def test_nothing_there(tmp_path):
    with pytest.raises(DataError, match=r"No CIFAR-10 in .*expected cifar-10-batches-bin"):
        read_cifar10(tmp_path)


@pytest.mark.parametrize(("form", "suffix"), [("bin", ".bin"), ("py", "")])
def test_a_batch_is_missing(tmp_path, form, suffix):
    (write(tmp_path / "c", form) / f"data_batch_3{suffix}").unlink()
    with pytest.raises(DataError, match="has no data_batch_3"):
        read_cifar10(tmp_path / "c")


def test_a_batch_lacks_whole_rows(tmp_path):
    file = write(tmp_path / "c", "bin") / "data_batch_3.bin"
    file.write_bytes(file.read_bytes()[:-3073])
    with pytest.raises(DataError, match=r"data_batch_3 is truncated: it has [0-9]+ images, where others have [0-9]+"):
        read_cifar10(tmp_path / "c")


@pytest.mark.parametrize(("form", "suffix"), [("bin", ".bin"), ("py", "")])
def test_a_batch_is_truncated(tmp_path, form, suffix):
    file = write(tmp_path / "c", form) / f"data_batch_2{suffix}"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match=f"data_batch_2{suffix} is truncated"):
        read_cifar10(tmp_path / "c")


def test_an_archive_is_truncated(tmp_path):
    file = archive(tmp_path / "cifar-10-binary.tar.gz", "bin", tmp_path / "elsewhere")
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(DataError, match=r"cifar-10-binary.tar.gz is truncated"):
        read_cifar10(tmp_path)


def test_an_archive_is_none(tmp_path):
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"<html>Not found</html>")
    with pytest.raises(DataError, match=r"cifar-10-python.tar.gz is truncated or not a tar.gz archive"):
        read_cifar10(tmp_path)


def test_an_archive_of_something_else(tmp_path):
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as members:
        members.addfile(tarfile.TarInfo("letter.txt"), io.BytesIO())
    with pytest.raises(DataError, match="has no data_batch_1"):
        read_cifar10(tmp_path)


@pytest.mark.parametrize(("form", "suffix", "content"), [("bin", ".bin", binary), ("py", "", pickled)])
def test_a_label_is_none_of_ten(tmp_path, form, suffix, content):
    images, labels = examples(3)
    labels[1] = 10
    (write(tmp_path / "c", form) / f"data_batch_4{suffix}").write_bytes(content(images, labels))
    with pytest.raises(DataError, match=f"data_batch_4{suffix} has the label 10"):
        read_cifar10(tmp_path / "c")


@pytest.mark.parametrize(("form", "suffix", "content"), [("bin", ".bin", binary), ("py", "", pickled)])
def test_a_batch_is_empty(tmp_path, form, suffix, content):
    folder = write(tmp_path / "c", form)
    (folder / f"test_batch{suffix}").write_bytes(content(*examples(0, rows=0)))
    with pytest.raises(DataError, match="no images in its test batch"):
        read_cifar10(folder)
    (folder / f"data_batch_1{suffix}").write_bytes(content(*examples(0, rows=0)))
    with pytest.raises(DataError, match=f"data_batch_1 is truncated: it has 0 images, where others have {ROWS}"):
        read_cifar10(folder)


class Harm:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (self.file,)


def test_a_pickle_that_asks_for_anything_else_is_refused_by_name(tmp_path):
    folder = write(tmp_path / "c", "py")
    (folder / "data_batch_1").write_bytes(pickle.dumps({"data": Harm(str(tmp_path / "harm"))}, protocol=2))
    with pytest.raises(DataError, match=r"data_batch_1 asks for posix\.mkdir"):
        read_cifar10(folder)
    assert not (tmp_path / "harm").exists()


def wrong_pickles():
    images, labels = examples(0)
    first_label = b"](" + py2_number(int(labels[0]))
    return {
        "no dict": pickle.dumps([1, 2], protocol=2),
        "other numbers": pickled(images, labels, dtype=b"f4"),
        "an object array": pickled(images, labels, dtype=b"O8"),
        "fewer labels": pickled(images, labels).replace(first_label, b"]("),
        "fewer pixels": pickled(images[:2], labels),
    }


@pytest.mark.parametrize("kind", ["no dict", "other numbers", "an object array", "fewer labels", "fewer pixels"])
def test_a_pickle_of_something_else(tmp_path, kind):
    folder = write(tmp_path / "c", "py")
    (folder / "data_batch_5").write_bytes(wrong_pickles()[kind])
    with pytest.raises(DataError, match="data_batch_5 is truncated or not a batch of CIFAR-10's Python version"):
        read_cifar10(folder)
