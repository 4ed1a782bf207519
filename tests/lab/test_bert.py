import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_data import write_checkpoint

from adahessian.lab.errors import DataError
from adahessian.lab.models.bert import load_classifier, load_tokenizer

WEIGHTS, BIAS = "model.fp16.safetensors", "encoder.layer.1.output.dense.bias"


@pytest.fixture
def folder(tmp_path):
    write_checkpoint(tmp_path)
    return tmp_path


def assert_loaded(folder, weights):
    found = load_classifier(folder, 3, 0.1).base_model.state_dict()
    for name, weight in weights.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], weight.float()), name


@pytest.mark.parametrize("has_prefix", [False, True])
@pytest.mark.parametrize("squeeze", [False, True])
def test_weights_are_found_with_and_without_a_prefix(tmp_path, squeeze, has_prefix):
    write_checkpoint(tmp_path, squeeze=squeeze)
    weights = load_file(tmp_path / WEIGHTS)
    if has_prefix:
        prefix = "transformer" if squeeze else "bert"
        old_head = {"classifier.weight": torch.ones(7, 8), "cls.bias": torch.ones(3)}
        save_file(old_head | {f"{prefix}.{name}": each for name, each in weights.items()}, tmp_path / WEIGHTS)
    assert_loaded(tmp_path, weights)


def test_a_torch_file_is_read_without_running_its_code(folder):
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert_loaded(folder, weights)
    torch.save({"weights": pytest.approx}, folder / "pytorch_model.bin")
    with pytest.raises(DataError, match=str(folder)):
        load_classifier(folder, 2, 0.1)


def test_the_head_is_new_and_dropout_is_the_given_one(folder):
    def load(seed):
        torch.manual_seed(seed)
        return load_classifier(folder, 3, 0.25)

    heads = [load(seed).classifier.weight for seed in (0, 0, 1)]
    assert heads[0].shape == (3, 8)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert {module.p for module in load(0).modules() if isinstance(module, torch.nn.Dropout)} == {0.25}


@pytest.mark.parametrize(("name", "shape"), [(BIAS, None), ("encoder.more", 1), (BIAS, 3)])
def test_weights_do_not_fit(folder, name, shape):
    weights = {key: weight for key, weight in load_file(folder / WEIGHTS).items() if key != name}
    save_file(weights | ({name: torch.ones(shape)} if shape else {}), folder / WEIGHTS)
    with pytest.raises(DataError, match=name):
        load_classifier(folder, 2, 0.1)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", None),
        ("config.json", '{"model_type": "unheard-of"}'),
        ("config.json", "{"),
        (WEIGHTS, None),
        (WEIGHTS, "short"),
        ("vocab.txt", None),
        ("vocab.txt", "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnop"])),
        ("tokenizer_config.json", "["),
    ],
)
def test_a_checkpoint_is_damaged(folder, file, content):
    (folder / file).unlink(missing_ok=True)
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(DataError, match=str(folder)):
        load_tokenizer(folder, 8), load_classifier(folder, 2, 0.1)


def test_examples_must_not_be_too_long_for_the_model(folder):
    with pytest.raises(DataError, match="--max-length"):
        load_tokenizer(folder, 33)
