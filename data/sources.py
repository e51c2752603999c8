"""What a source's name stands for: splits of texts, of pairs of texts or of images."""

from typing import Any

from data import images, pairs, text, tfds
from data.options import Options
from data.pipeline import Source

# kind of source -> the task that it is for unless another one is asked for
KINDS = {
    "digits": "images",
    "folder": "images",
    "stdlib": "next_token",
    "text": "next_token",
    "cldr": "pairs",
    "pairs": "pairs",
    "tfds": "images",
}
PATHS = ("text", "pairs", "folder", "tfds")
_OWN_SPLITS = ("digits", "stdlib", "cldr", "folder")


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


def read_documents(options: Options) -> dict[str, text.Documents]:
    """The texts of each split."""
    if options.kind == "tfds":
        builder = tfds.builder(options.path, options.data_dir)
        splits = tfds.splits(builder, options.splits)
        return {name: tfds.texts(builder, split, options.text_key, options.max_bytes) for name, split in splits.items()}
    size = options.max_bytes
    texts = {"train": text.stdlib(size) if options.kind == "stdlib" else text.files(options.path, size)}
    texts |= {name: text.files(where, size) for name, where in options.splits.items()}
    if "validation" not in texts and options.validation_fraction:
        texts["train"], texts["validation"] = text.hold_out(texts["train"], options.validation_fraction)
    return {name: text.Documents(part) for name, part in texts.items()}


def read_pairs(options: Options) -> dict[str, pairs.Texts]:
    """The inputs and the targets of each split."""
    if options.kind == "cldr":
        return pairs.cldr()
    if options.kind == "tfds":
        builder, keys = tfds.builder(options.path, options.data_dir), options.text_key.split(",")
        if len(keys) != 2:
            raise ValueError(f"text_key={options.text_key!r} must name two features, such as en,de")
        splits = tfds.splits(builder, options.splits)
        return {name: tuple(list(tfds.texts(builder, part, key)) for key in keys) for name, part in splits.items()}
    return {name: pairs.read(where) for name, where in ({"train": options.path} | options.splits).items()}


def read_images(options: Options) -> tuple[dict[str, Source], list[str]]:
    """The labelled images of each split, and the names of their classes."""
    if options.kind == "digits":
        splits: dict[str, Any] = images.digits()
        return splits, [str(digit) for digit in range(10)]
    if options.kind == "folder":
        return images.folders(options.path)
    builder = tfds.builder(options.path, options.data_dir)
    opened = {
        name: tfds.images(builder, split, options.image_key, options.label_key)
        for name, split in tfds.splits(builder, options.splits).items()
    }
    return {name: part for name, (part, _) in opened.items()}, opened["train"][1]
