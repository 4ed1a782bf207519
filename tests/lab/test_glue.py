import pytest
import torch
from tiny_data import write_checkpoint

from adahessian.lab.data.glue import FORMATS, read_sentences, tokenize
from adahessian.lab.errors import DataError
from adahessian.lab.models.bert import load_tokenizer

MNLI_HEADER = "index\tpromptID\tpairID\tgenre\tp1\tp2\tp3\tp4\tsentence1\tsentence2\tlabel1\tlabel2\tgold_label"
# A header of each dataset, a row, and the sentences and the label in it.
PUBLISHED = {
    "rte": ("index\tsentence1\tsentence2\tlabel", "0\tA b.\tC d.\tnot_entailment", ("A b.", "C d."), 1),
    "mrpc": ("\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String", '1\t70\t71\tHe " no\t"Y"', ('He " no', '"Y"'), 1),
    "stsb": ("genre\tsentence1\tsentence2\tscore", "cap\tA man.\tA cat.\t3.8", ("A man.", "A cat."), 3.8),
    "sst2": ("sentence\tlabel", "odd\u2028line \x0c \x85 \t0", ("odd\u2028line \x0c \x85 ",), 0),
    "qnli": ("index\tquestion\tsentence\tlabel", "0\tWho?\tHe.\tentailment", ("Who?", "He."), 0),
    "qqp": ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "1\t2\t3\tWhy?\tHow?\t0", ("Why?", "How?"), 0),
    "mnli": (MNLI_HEADER, "0\t31\t31n\tgov\t(\t(\t(\t(\tA.\tB.\tneutral\tneutral\tcontradiction", ("A.", "B."), 0),
}


def write(folder, dataset, text):
    (folder / FORMATS[dataset].folder).mkdir()
    (folder / FORMATS[dataset].folder / "train.tsv").write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.mark.parametrize("dataset", FORMATS)
@pytest.mark.parametrize(("end", "last"), [("\n", "\n"), ("\r\n", "\r\n"), ("\n", "")])
def test_the_published_format_can_be_read(tmp_path, dataset, end, last):
    header, row, sentences, label = PUBLISHED[dataset]
    write(tmp_path, dataset, f"{header}{end}{row}{end}{row}{last}")
    texts, labels = read_sentences(tmp_path, FORMATS[dataset], "train")
    assert texts == [sentences, sentences]
    torch.testing.assert_close(labels, torch.tensor([label, label]))


@pytest.mark.parametrize(
    ("dataset", "text", "place"),
    [
        ("sst2", "", "train.tsv"),
        ("sst2", "sentence\tlabel\n", "train.tsv"),
        ("sst2", "index\tsentence\n0\tgood\n", "line 1"),
        ("sst2", "sentence\tlabel\ngood\t1\nba", "line 3"),
        ("sst2", b"sentence\tlabel\n\xff\xfe\t1\n", "train.tsv"),
        ("rte", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tmaybe\n", "line 2"),
        ("stsb", "sentence1\tsentence2\tscore\na\tb\t5.1\n", "line 2"),
        ("stsb", "sentence1\tsentence2\tscore\na\tb\tnan\n", "line 2"),
        # A published file has at most a hundred broken rows.
        ("qqp", "\n".join([PUBLISHED["qqp"][0], *["4\t5\t6\tWhy\n not?"] * 51]), "line 102"),
    ],
)
def test_a_file_is_damaged(tmp_path, dataset, text, place):
    write(tmp_path, dataset, text)
    with pytest.raises(DataError, match=place):
        read_sentences(tmp_path, FORMATS[dataset], "train")
    with pytest.raises(DataError, match=r"dev\.tsv"):
        read_sentences(tmp_path, FORMATS[dataset], "dev")


def test_sentences_are_cut_and_padded(tmp_path):
    write_checkpoint(tmp_path)
    tokenizer = load_tokenizer(tmp_path, 32)
    # [PAD] [UNK] [CLS] [SEP] [MASK] a b c d e f g h good bad fine poor
    pair = tokenize([("Good bad good bad good", "other")], tokenizer, 8)
    assert pair["input_ids"].tolist() == [[2, 13, 14, 13, 14, 3, 1, 3]]
    assert pair["token_type_ids"].tolist() == [[0, 0, 0, 0, 0, 0, 1, 1]]
    single = tokenize([("bad good",), ("bad " * 20,)], tokenizer, 8)
    assert single["input_ids"].tolist() == [[2, 14, 13, 3, 0, 0, 0, 0], [2, *[14] * 6, 3]]
    assert single["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0, 0, 0], [1] * 8]
    # Batches have few lengths.
    assert {tokenize([("bad " * words,)], tokenizer, 32)["input_ids"].shape for words in (1, 9, 29, 90)} == {(1, 32)}
