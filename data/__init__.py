"""Data: `data.load` makes the batches of a run from a source's name. Imports neither JAX nor TensorFlow.

digits                          scikit-learn's handwritten digits
stdlib                          the source text of the running Python's standard library
text:PATH                       a file, a glob or a folder of UTF-8 text
cldr                            dates as twelve locales write them, and as ISO 8601 has them
pairs:PATH                      inputs and targets, a .tsv, a .jsonl or two parallel files "a.en,a.de", also gzipped
folder:PATH                     images, PATH/<train|validation|test>/<class>/<file>
tfds:NAME[/CONFIG][:VERSION]    any prepared TensorFlow data set of labelled images or of texts
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data import images, pairs, text, tfds, tokenizers, transforms
from data.masking import MaskTokens
from data.pipeline import Batch, EvaluationBatches, Source, TrainBatches
from data.tokenizers import Tokenizer

__all__ = ["Batch", "Data", "EvaluationBatches", "Source", "Tokenizer", "TrainBatches", "load"]

_TEXT_ONLY = (
    "tokenizer",
    "vocab_size",
    "sequence_length",
    "stride",
    "order",
    "max_bytes",
    "text_key",
    "validation_fraction",
    "cache_dir",
    "mask_rate",
)
_IMAGES_ONLY = ("image_key", "label_key", "image_size", "evaluation_crop", "augment", "mean", "std", "in_memory")
_STREAM_ONLY = ("stride", "order", "max_bytes", "text_key", "validation_fraction", "cache_dir", "mask_rate")
_OWN_SPLITS = ("digits", "stdlib", "cldr", "folder")
_PATHS = ("text", "pairs", "folder", "tfds")


@dataclass(frozen=True)
class Data:
    """What a run reads.

    `train` has endless batches, `splits` one exact pass by name; `tokenizer` is None for images. `info` has `kind` and,
    by split, `examples`; for images `num_classes`, `class_names`, `image_size` (h, w), `channels`, `mean` and `std`
    (picture in 0..1 = image * std + mean); for texts and pairs `vocab_size` and `sequence_length`; for texts, by split,
    `tokens`, `characters_per_token` and `bytes_per_token`.
    """

    train: TrainBatches
    splits: dict[str, EvaluationBatches]
    tokenizer: Tokenizer | None
    info: dict[str, Any]


def load(
    source: str = "digits",
    *,
    batch_size: int,
    evaluation_batch_size: int = 0,
    seed: int = 0,
    train_split: str = "",
    validation_split: str = "",
    test_split: str = "",
    data_dir: str = "",
    tokenizer: str = "bytes",
    vocab_size: int = 0,
    sequence_length: int = 0,
    stride: int = 0,
    order: str = "",
    validation_fraction: float = 0.1,
    max_bytes: int = 0,
    text_key: str = "text",
    cache_dir: str = "",
    mask_rate: float = 0.0,
    image_size: int = 0,
    evaluation_crop: float = 1.0,
    augment: str = "",
    mean: Sequence[float] = (0.5,),
    std: Sequence[float] = (0.5,),
    image_key: str = "image",
    label_key: str = "label",
    in_memory: bool = False,
    workers: int = 0,
    threads: int = 0,
    process_index: int = 0,
    process_count: int = 1,
    workdir: str | Path | None = None,
) -> Data:
    """Opens a source and makes its batches.

    Args:
      source: what to read; see the module.
      batch_size: examples in a training batch, of all processes together.
      evaluation_batch_size: the same for evaluation; 0 = batch_size.
      seed: of the order of training examples and of their augmentation.
      train_split, validation_split, test_split: TFDS splits such as `train[:99%]`; with text:PATH and pairs:PATH, other
        files for validation and test; "" = the source's own, if it has one.
      data_dir: where TFDS data sets are prepared; "" = TFDS's default.
      tokenizer: bytes, characters, words, bpe, or the path of a `tokenizer.json`; one in `workdir` comes first.
      vocab_size: of bpe, and of words (0 = every word).
      sequence_length: tokens in a window of text; of pairs, in an input and in a target: longer ones are left out
        of the training, and cut in evaluation.
      stride: tokens from one training window to the next; 0 = sequence_length; 1 = windows at every offset.
      order: of the windows: "" = another one in each epoch; stream = row b of a batch goes on where row b of the batch
        before ended, in training and in evaluation, for models with a memory.
      validation_fraction: the part of a text without a validation split that is held out, by file if there are many;
        0 = none.
      max_bytes: reads at most so much text, in whole documents; 0 = everything.
      text_key, image_key, label_key: the features of a TFDS data set.
      cache_dir: a folder that keeps the token ids from run to run; "" = tokenise at each start, in memory.
      mask_rate: the part of a window's tokens that is hidden, to be guessed (`MaskTokens`); 0 = the next token is.
      image_size: of the square that images are resized to; 0 = as they are, all of one size.
      evaluation_crop: the central part of the resized image that is seen (in training too, unless `augment` crops).
      augment: of training images, such as `shift(1)` or `crop | flip | randaugment(2, 10)`.
      mean, std: of the normalisation, in 0..1; one number, or one for each channel.
      in_memory: decodes all images at the start, for small images of one size.
      workers, threads: processes, and threads in each, that make batches ahead; 0 and 0 = made when asked for.
      process_index, process_count: this process has an equal contiguous part of each global batch.
      workdir: of the run; keeps its tokenizer.

    Raises ValueError or FileNotFoundError, in one sentence, for what cannot be read or does not fit together.
    """
    options = dict(locals())
    kind, _, path = source.partition(":")
    if kind not in ("digits", "stdlib", "cldr", *_PATHS) or bool(path) != (kind in _PATHS):
        raise ValueError(
            f"source={source!r} must be digits, stdlib, cldr, text:PATH, pairs:PATH, folder:PATH or "
            "tfds:NAME[/CONFIG][:VERSION]"
        )
    asked = {"train": train_split, "validation": validation_split, "test": test_split}
    if kind in _OWN_SPLITS and any(asked.values()):
        raise ValueError(
            f"source={source!r} has its own splits: train_split, validation_split and test_split must be ''"
        )
    if kind in ("text", "pairs") and train_split:
        raise ValueError(f"train_split={train_split!r}: the {kind} to train on is the PATH of source={source!r}")
    builder = None
    if kind == "tfds":
        builder = tfds.builder(path, data_dir)
        asked = _tfds_splits(builder, asked)
    is_pairs = kind in ("cldr", "pairs")
    is_text = kind in ("stdlib", "text") or (builder is not None and bool(sequence_length))
    read_as = "pairs" if is_pairs else "texts" if is_text else "images"
    foreign = {"pairs": _IMAGES_ONLY + _STREAM_ONLY, "texts": _IMAGES_ONLY, "images": _TEXT_ONLY}
    _refuse(options, foreign[read_as], source, read_as)

    if is_pairs:
        texts = pairs.cldr() if kind == "cldr" else {"train": pairs.read(path)}
        texts |= {name: pairs.read(where) for name, where in asked.items() if where}
        documents = {name: text.Documents([*inputs, *targets]) for name, (inputs, targets) in texts.items()}
        coder = _tokenizer(tokenizer, vocab_size, documents, workdir, process_index)
        sources = {name: pairs.encode(part, coder, sequence_length, name == "train") for name, part in texts.items()}
        before = after = None
        info = {"kind": "pairs", "vocab_size": coder.vocab_size, "sequence_length": sequence_length}
    elif is_text:
        if order and stride not in (0, sequence_length):
            raise ValueError(f"order={order!r} needs windows one after the other: stride={stride} must be 0")
        documents = _documents(kind, path, asked, builder, validation_fraction, max_bytes, text_key)
        coder = _tokenizer(tokenizer, vocab_size, documents, workdir, process_index, mask=bool(mask_rate))
        streams = {name: text.tokenize(part, coder, cache_dir) for name, part in documents.items()}
        sources = {
            name: text.Windows(stream.tokens, sequence_length, stride if name == "train" else 0)
            for name, stream in streams.items()
        }
        before = after = MaskTokens(mask_rate, coder) if mask_rate else None
        info = {
            "kind": "masked text" if mask_rate else "text",
            "vocab_size": coder.vocab_size,
            "sequence_length": sequence_length,
            "tokens": {name: len(stream.tokens) for name, stream in streams.items()},
            "characters_per_token": {name: stream.characters / len(stream.tokens) for name, stream in streams.items()},
            "bytes_per_token": {name: stream.bytes / len(stream.tokens) for name, stream in streams.items()},
        }
    else:
        coder = None
        sources, names = _images(kind, path, asked, builder, image_key, label_key)
        if in_memory:
            sources = {name: images.in_memory(part) for name, part in sources.items()}
        if not len(sources["train"]):
            raise ValueError(f"the data set {source!r} is empty: at least one example is needed")
        shape = sources["train"][0]["image"].shape
        before, after, info = _prepared(shape, image_size, evaluation_crop, augment, tuple(mean), tuple(std))
        info |= {"kind": "images", "num_classes": len(names), "class_names": names}
    info["examples"] = {name: len(part) for name, part in sources.items()}
    reading = {name: options[name] for name in ("order", "process_index", "process_count", "workers", "threads")}
    train = TrainBatches(source=sources.pop("train"), batch_size=batch_size, transform=before, seed=seed, **reading)
    size = evaluation_batch_size or batch_size
    splits = {
        name: EvaluationBatches(source=part, batch_size=size, transform=after, **reading)
        for name, part in sources.items()
    }
    return Data(train, splits, coder, info)


def _refuse(options: dict[str, Any], names: Sequence[str], source: str, kind: str) -> None:
    """An option that would have no effect is a mistake of the user's."""
    parameters = inspect.signature(load).parameters
    for name in names:
        value, default = options[name], parameters[name].default
        if (tuple(value) if isinstance(default, tuple) else value) != default:
            raise ValueError(f"{name}={value!r} has no meaning for source={source!r}, which is read as {kind}")


def _tfds_splits(builder: Any, asked: dict[str, str]) -> dict[str, str]:
    has = builder.info.splits
    train = asked["train"] or "train"
    # Part of the training split as validation is for the user to ask for; what the data set calls so is taken.
    own = {name: name if name in has else "" for name in ("validation", "test")}
    return {"train": train} | {name: asked[name] or own[name] for name in own if asked[name] or own[name]}


def _images(
    kind: str, path: str, asked: dict[str, str], builder: Any, image_key: str, label_key: str
) -> tuple[dict[str, Source], list[str]]:
    if kind == "digits":
        return images.digits(), [str(digit) for digit in range(10)]
    if kind == "folder":
        return images.folders(path)
    opened = {name: tfds.images(builder, split, image_key, label_key) for name, split in asked.items()}
    return {name: part for name, (part, _) in opened.items()}, opened["train"][1]


def _prepared(
    shape: tuple[int, ...],
    image_size: int,
    evaluation_crop: float,
    augment: str,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> tuple[transforms.Transform, transforms.Transform, dict[str, Any]]:
    """What training images and evaluation images of a shape [h, w, c] go through, and how they come out."""
    height, width, channels = shape
    if not {len(mean), len(std)} <= {1, channels} or min(std) <= 0:
        raise ValueError(f"mean={mean} and std={std} need 1 or {channels} numbers each, and std above 0")
    resize = transforms.CentreCrop(image_size, evaluation_crop) if image_size else None
    steps = transforms.parse(augment, image_size)
    crop = steps.pop(0) if steps and isinstance(steps[0], transforms.RandomCrop) else resize
    size = (image_size, image_size) if image_size else (height, width)
    info = {"image_size": size, "channels": channels, "mean": mean, "std": std}
    return transforms.Transform(crop, steps, mean, std), transforms.Transform(resize, [], mean, std), info


def _documents(
    kind: str, path: str, asked: dict[str, str], builder: Any, fraction: float, max_bytes: int, text_key: str
) -> dict[str, text.Documents]:
    if kind == "tfds":
        return {name: tfds.texts(builder, split, text_key, max_bytes) for name, split in asked.items()}
    texts = {"train": text.stdlib(max_bytes) if kind == "stdlib" else text.files(path, max_bytes)}
    texts |= {name: text.files(where, max_bytes) for name, where in asked.items() if where}
    if "validation" not in texts and fraction:
        texts["train"], texts["validation"] = text.hold_out(texts["train"], fraction)
    return {name: text.Documents(part) for name, part in texts.items()}


def _tokenizer(
    spec: str,
    vocab_size: int,
    documents: dict[str, text.Documents],
    workdir: str | Path | None,
    process_index: int,
    mask: bool = False,
) -> Tokenizer:
    if workdir is not None and (Path(workdir) / tokenizers.FILE).is_file():
        return Tokenizer.load(workdir)
    if vocab_size and spec not in ("bpe", "words"):
        raise ValueError(f"vocab_size={vocab_size} is for bpe and words: tokenizer={spec!r} has its own")
    if spec not in tokenizers.KINDS and Path(spec).exists():
        coder = Tokenizer.load(spec)
    else:
        # Characters come from all splits, as in nanoGPT, because an unknown one cannot be encoded.
        parts = documents.values() if spec == "characters" else [documents["train"]]
        several = any(len(part) > 1 for part in documents.values())
        coder = tokenizers.train(spec, (document for part in parts for document in part), vocab_size, several, mask)
    if workdir is not None and process_index == 0:
        coder.save(workdir)
    return coder
