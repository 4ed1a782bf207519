import pytest
import torch

from adahessian.lab.data import glue
from adahessian.lab.data.errors import DataError
from adahessian.lab.data.glue_tokens import read_tokenizer, tokenize

MNLI_PARSES = ["sentence1_binary_parse", "sentence2_binary_parse", "sentence1_parse", "sentence2_parse"]
MNLI_COLUMNS = ["index", "promptID", "pairID", "genre", *MNLI_PARSES, "sentence1", "sentence2", "label1", "gold_label"]

# A task, the header of its training file, a row of it, and what is to come out.
FILES = [
    (glue.RTE, "index\tsentence1\tsentence2\tlabel", "0\tA b.\tC d.\tnot_entailment", ("A b.", "C d."), 1),
    (
        glue.MRPC,
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        '1\t702876\t702977\tHe said " no\t"Yes" .',
        ('He said " no', '"Yes" .'),
        1,
    ),
    (
        glue.STSB,
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
        "1\tmain-captions\tMSRvid\t2012test\t0004\tnone\tnone\tA man.\tA flute.\t3.800",
        ("A man.", "A flute."),
        3.8,
    ),
    (glue.SST2, "sentence\tlabel", "no wit \t0", ("no wit ",), 0),
    (glue.QNLI, "index\tquestion\tsentence\tlabel", "0\tWho?\tHe.\tentailment", ("Who?", "He."), 0),
    (
        glue.QQP,
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        "133273\t213221\t213222\tWhy?\tHow?\t0",
        ("Why?", "How?"),
        0,
    ),
    (
        glue.MNLI,
        "\t".join(MNLI_COLUMNS),
        "0\t31193\t31193n\tgovernment\t( a )\t( b )\t(R a)\t(R b)\tCream.\tSkim.\tneutral\tneutral",
        ("Cream.", "Skim."),
        2,
    ),
]


def write(folder, form, text, name="train"):
    path = folder / form.folder / f"{name}.tsv"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(("form", "header", "row", "texts", "label"), FILES, ids=lambda v: getattr(v, "folder", ""))
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_reads_the_published_format(tmp_path, form, header, row, texts, label, end):
    write(tmp_path, form, f"{header}{end}{row}{end}{row}{end}")
    read = glue.read_sentences(tmp_path, form, "train")
    assert read.texts == [texts, texts]
    torch.testing.assert_close(read.labels, torch.tensor([label, label]))


def test_the_last_line_may_lack_its_end_and_a_sentence_may_hold_other_separators(tmp_path):
    write(tmp_path, glue.SST2, "sentence\tlabel\nodd\u2028line \x0c \x85\t1\nno wit\t0")
    read = glue.read_sentences(tmp_path, glue.SST2, "train")
    assert read.texts == [("odd\u2028line \x0c \x85",), ("no wit",)]


def test_mnli_has_two_development_sets_with_more_labels(tmp_path):
    header = "\t".join([*MNLI_COLUMNS[:-1], "label2", "label3", "label4", "label5", "gold_label"])
    row = "0\t6\t6e\tslate\tp\tp\tp\tp\tNew.\tOld.\tneutral\tneutral\tneutral\tneutral\tneutral\tcontradiction"
    for name in glue.MNLI.dev:
        write(tmp_path, glue.MNLI, f"{header}\n{row}\n", name)
        assert glue.read_sentences(tmp_path, glue.MNLI, name).labels.tolist() == [0]


@pytest.mark.parametrize(
    ("form", "text", "message"),
    [
        (glue.SST2, "", r"train\.tsv, line 1: there is no column 'sentence', 'label'"),
        (glue.SST2, "sentence\tlabel\n", r"train\.tsv has no examples"),
        (glue.SST2, "index\tsentence\n0\tgood\n", r"line 1: there is no column 'label'"),
        (glue.SST2, "sentence\tlabel\ngood\t1\nba", r"train\.tsv, line 3: 1 columns.*names 2.*truncated"),
        (glue.SST2, "sentence\tlabel\ngood\t\n", r"line 2: the label is '', but it must be one of '0', '1'"),
        (glue.RTE, "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tmaybe\n", r"line 2: the label is 'maybe'"),
        (glue.STSB, "sentence1\tsentence2\tscore\na\tb\t5.1\n", r"line 2: the score is '5\.1'"),
        (glue.STSB, "sentence1\tsentence2\tscore\na\tb\tnan\n", r"line 2: the score is 'nan'"),
        (glue.STSB, "sentence1\tsentence2\tscore\na\tb\t\n", r"line 2: the score is ''"),
        (glue.SST2, b"sentence\tlabel\n\xff\xfe\t1\n", r"train\.tsv is not UTF-8"),
    ],
)
def test_says_what_is_wrong_with_a_file(tmp_path, form, text, message):
    write(tmp_path, form, text)
    with pytest.raises(DataError, match=message):
        glue.read_sentences(tmp_path, form, "train")


def test_says_that_a_file_is_missing(tmp_path):
    with pytest.raises(DataError, match=r"QNLI.dev\.tsv cannot be read.*put GLUE's folder QNLI"):
        glue.read_sentences(tmp_path, glue.QNLI, "dev")


def test_the_torn_rows_of_qqp_are_left_out_but_not_many(tmp_path):
    header, row = FILES[5][1:3]
    torn = row.replace("Why?", "Why\n?")
    write(tmp_path, glue.QQP, f"{header}\n{row}\n{torn}\n{row}\n")
    assert len(glue.read_sentences(tmp_path, glue.QQP, "train").texts) == 2
    write(tmp_path, glue.QQP, f"{header}\n" + f"{torn}\n" * 51)
    with pytest.raises(DataError, match="line 102"):
        glue.read_sentences(tmp_path, glue.QQP, "train")


VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "##ly", "Good"]


@pytest.fixture
def tokenizer(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY))
    return read_tokenizer(tmp_path, max_length=8)


def test_pairs_are_tokens_with_separators_and_types(tokenizer):
    pair = glue.Sentences([("Goodly bad", "other")], torch.tensor([1]))
    batch = tokenize(pair, tokenizer).batch(torch.tensor([0]), max_length=8)
    assert batch["tokens"].tolist() == [[2, 5, 7, 6, 3, 1, 3, 0]]
    assert batch["types"].tolist() == [[0, 0, 0, 0, 0, 1, 1, 0]]
    assert batch["mask"].tolist() == [[1, 1, 1, 1, 1, 1, 1, 0]]
    assert batch["labels"].tolist() == [1]


def test_single_sentences_are_cut_and_batches_are_of_few_lengths(tmp_path, tokenizer):
    sentences = glue.Sentences([("good",), ("bad " * 20,), ("bad good",)], torch.tensor([1, 0, 0]))
    tokens = tokenize(sentences, tokenizer)
    batch = tokens.batch(torch.tensor([2, 1]), max_length=8)
    assert batch["tokens"].tolist() == [[2, 6, 5, 3, 0, 0, 0, 0], [2, 6, 6, 6, 6, 6, 6, 3]]
    tokens = tokenize(sentences, read_tokenizer(tmp_path, max_length=128))
    assert tokens.batch(torch.tensor([0]), max_length=128)["tokens"].shape == (1, 32)
    assert tokens.batch(torch.tensor([1]), max_length=128)["tokens"].shape == (1, 32)


def test_many_sentences_keep_their_order(tokenizer):
    texts = [("good",), ("bad",)] * 2500
    tokens = tokenize(glue.Sentences(texts, torch.zeros(5000)), tokenizer)
    first = tokens.batch(torch.arange(5000), max_length=8)["tokens"][:, 1]
    assert torch.equal(first, torch.tensor([5, 6]).repeat(2500))


def test_a_cased_vocabulary_stays_cased(tmp_path, tokenizer):
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert read_tokenizer(tmp_path, max_length=8).encode("Good").ids == [2, 8, 3]
    assert tokenizer.encode("Good").ids == [2, 5, 3]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("vocab.txt", "good\nbad\n", r"vocab\.txt is not a vocabulary of a BERT"),
        ("tokenizer_config.json", "[", r"tokenizer_config\.json is not the configuration of a tokenizer"),
    ],
)
def test_says_what_is_wrong_with_a_tokenizer(tmp_path, tokenizer, file, text, message):
    (tmp_path / file).write_text(text)
    with pytest.raises(DataError, match=message):
        read_tokenizer(tmp_path, max_length=8)


def test_says_that_a_vocabulary_is_missing(tmp_path):
    with pytest.raises(DataError, match=r"vocab\.txt is missing"):
        read_tokenizer(tmp_path, max_length=8)
