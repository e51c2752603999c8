"""What a source's name stands for: splits of texts, of pairs of texts or of images."""

from typing import Any

from lineage.data.examples import labelled_texts, pairs, questions, tagged_sentences, windows
from lineage.data.loader import Source
from lineage.data.options import Options
from lineage.data.sources import images, raw_images, tfds
from lineage.data.transforms import boxes

# kind of source -> the task that it is for unless another one is asked for
KINDS = {
    "digits": "images",
    "folder": "images",
    "shapes": "detection",
    "idx": "images",
    "cifar": "images",
    "stdlib": "next_token",
    "text": "next_token",
    "cldr": "pairs",
    "pairs": "pairs",
    "labels": "classification",
    "conllu": "tagging",
    "squad": "spans",
    "tfds": "images",
}
PATHS = ("text", "pairs", "labels", "conllu", "squad", "folder", "idx", "cifar", "tfds")
_OWN_SPLITS = ("digits", "stdlib", "cldr", "folder", "idx", "cifar", "shapes")


def check(options: Options) -> None:
    """Raises ValueError for a source that there is not, or splits that it cannot have."""
    source, kind = options.source, options.kind
    if kind not in KINDS or bool(options.path) != (kind in PATHS):
        names = (kind if kind not in PATHS else f"{kind}:PATH" for kind in KINDS if kind != "tfds")
        raise ValueError(f"source={source!r} must be {', '.join(names)} or tfds:NAME[/CONFIG][:VERSION]")
    if kind in _OWN_SPLITS and options.splits:
        raise ValueError(
            f"source={source!r} has its own splits: train_split, validation_split and test_split must be ''"
        )
    if kind in PATHS and kind != "tfds" and options.train_split:
        raise ValueError(
            f"train_split={options.train_split!r}: the {kind} to train on is the PATH of source={source!r}"
        )


def read_documents(options: Options) -> dict[str, windows.Documents]:
    """The texts of each split."""
    if options.kind == "tfds":
        builder, splits = _prepared(options)
        return {name: tfds.texts(builder, split, options.text_key, options.max_bytes) for name, split in splits.items()}
    if options.kind == "conllu":
        return {
            name: windows.Documents(["".join(s.words) for s in part]) for name, part in read_tagged(options).items()
        }
    size = options.max_bytes
    texts = {"train": windows.stdlib(size) if options.kind == "stdlib" else windows.files(options.path, size)}
    texts |= {name: windows.files(where, size) for name, where in options.splits.items()}
    if "validation" not in texts and options.validation_fraction:
        texts["train"], texts["validation"] = windows.hold_out(texts["train"], options.validation_fraction)
    return {name: windows.Documents(part) for name, part in texts.items()}


def read_pairs(options: Options) -> dict[str, pairs.Texts]:
    """The inputs and the targets of each split."""
    if options.kind == "cldr":
        return pairs.cldr()
    if options.kind == "labels":  # which are to be written, as T5 does (arXiv 1910.10683)
        return {
            name: ([" ".join(row) for row in part.texts], part.labels) for name, part in read_labelled(options).items()
        }
    if options.kind == "tfds":
        keys = options.text_key.split(",")
        if len(keys) != 2:
            raise ValueError(f"text_key={options.text_key!r} must be two features for pairs, such as 'de,en'")
        return {name: (inputs, targets) for name, (inputs, targets) in _columns(options, keys).items()}
    return {name: pairs.read(where) for name, where in _files(options).items()}


def read_labelled(options: Options) -> dict[str, labelled_texts.Labelled]:
    """The labelled texts of each split; of TFDS's, those that have a label."""
    if options.kind != "tfds":
        return {name: labelled_texts.read(where) for name, where in _files(options).items()}
    keys, splits = options.text_key.split(","), {}
    feature = tfds.feature(tfds.builder(options.path, options.data_dir), options.label_key)
    known = [str(name) for name in getattr(feature, "names", None) or ()]
    for name, (*texts, labels) in _columns(options, [*keys, options.label_key]).items():
        none = -1 if known or set(labels) == {-1} else None  # of numbers, -1 is one, but not where it is the only one
        rows = [(row, label) for row, label in zip(zip(*texts), labels) if label != none]
        if rows:
            named = [known[label] if known else str(label) for _, label in rows]
            splits[name] = labelled_texts.Labelled([row for row, _ in rows], named, known)
    return splits


def read_tagged(options: Options) -> dict[str, list[tagged_sentences.Sentence]]:
    """The tagged sentences of each split."""
    files = tagged_sentences.find_splits(options.path) | options.splits
    return {name: tagged_sentences.read(where) for name, where in files.items()}


def read_questions(options: Options) -> dict[str, list[questions.Question]]:
    """The questions of each split."""
    if options.kind != "tfds":
        return {name: questions.read(where) for name, where in _files(options).items()}
    return {
        name: [
            questions.ask(
                question, context, [(int(s), t.decode()) for s, t in zip(found["answer_start"], found["text"])]
            )
            for question, context, found in zip(*columns)
        ]
        for name, columns in _columns(options, ["question", "context", "answers"]).items()
    }


def _files(options: Options) -> dict[str, str]:
    return {"train": options.path} | options.splits


def _columns(options: Options, keys: list[str]) -> dict[str, list[list[Any]]]:
    builder, splits = _prepared(options)
    return {name: tfds.columns(builder, split, keys) for name, split in splits.items()}


def _prepared(options: Options) -> tuple[Any, dict[str, str]]:
    """The builder of a TFDS data set, and the splits to read."""
    builder = tfds.builder(options.path, options.data_dir)
    return builder, tfds.splits(builder, options.splits)


def read_images(options: Options) -> tuple[dict[str, Source], list[str]]:
    """The labelled images of each split, and the names of their classes."""
    if options.kind == "digits":
        splits: dict[str, Any] = images.digits()
        return splits, [str(digit) for digit in range(10)]
    readers = {"folder": images.folders, "idx": raw_images.idx, "cifar": raw_images.cifar}
    if options.kind in readers:
        return readers[options.kind](options.path)
    return tfds.images(*_prepared(options), options.image_key, options.label_key)


def read_objects(options: Options) -> tuple[dict[str, Source], list[str]]:
    """The images with boxes of each split, and the names of the objects' classes."""
    if options.kind == "shapes":
        size = options.image_size or 64
        return {split: boxes.Shapes(split, size) for split in boxes.SIZES}, list(boxes.SHAPES)
    return tfds.objects(*_prepared(options), options.image_key)
