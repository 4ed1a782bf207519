import pytest
import torch
from tiny_data import cifar10_binary, cifar10_examples, write_cifar10

from adahessian.lab.data.cifar10 import read_cifar10
from adahessian.lab.errors import DataError


@pytest.fixture
def folder(tmp_path):
    write_cifar10(tmp_path)
    return tmp_path / "cifar-10-batches-bin"


def test_the_folder_and_its_parent_can_be_read(folder):
    for source in (folder, folder.parent):
        training, test = read_cifar10(source)
        for found, each in zip(training, zip(*map(cifar10_examples, range(5)), strict=True), strict=True):
            assert torch.equal(found, torch.cat(each))
        assert all(map(torch.equal, test, cifar10_examples(5)))
        assert [part.dtype for part in training] == [torch.uint8, torch.int64]


def bad_label():
    images, labels = cifar10_examples(3)
    labels[1] = 10
    return cifar10_binary(images, labels)


@pytest.mark.parametrize("name", ["data_batch_2", "test_batch"])
@pytest.mark.parametrize("content", [None, b"", cifar10_binary(*cifar10_examples(2))[:-1], bad_label()])
def test_a_file_is_damaged(folder, name, content):
    file = folder / f"{name}.bin"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=name):
        read_cifar10(folder)


def test_a_file_is_shorter_than_the_others(folder):
    (folder / "data_batch_5.bin").write_bytes(cifar10_binary(*cifar10_examples(4, rows=2)))
    with pytest.raises(DataError, match="data_batch_5"):
        read_cifar10(folder)
    with pytest.raises(DataError, match="cifar-10-batches-bin"):
        read_cifar10(folder.parent / "elsewhere")
