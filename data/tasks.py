"""What a source's content is made into: the examples of a task.

images             labelled images, to be told apart
masked_images      the same, some of whose patches are hidden, to be painted from the others
detection          images with objects, to be found and told apart
next_token         windows of a text's tokens, each to be guessed from those before it
masked_tokens      windows of a text's tokens, some of which are hidden, to be guessed from the others
next_sentence      the same of two texts, and to be told whether the second follows the first (BERT)
sentence_order     the same, and to be told which of the two was first (ALBERT)
span_corruption    windows of a text's tokens without some spans, which are to be written (T5)
denoising          windows of a text's tokens under some noise, to be written without it (BART)
pairs              texts, and texts to be written for them
continuations      the same, each pair as one text
classification     texts or pairs of texts, to be told apart
regression         texts or pairs of texts, and a number to be guessed for each
tagging            sentences, whose words are to be told apart
spans              texts and questions, whose answers are to be found in them
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from lineage.data import tokenizers
from lineage.data.examples import (
    denoising,
    encoded,
    labelled_texts,
    pairs,
    questions,
    span_corruption,
    tagged_sentences,
)
from lineage.data.examples import windows as text
from lineage.data.examples.masking import MaskPatches, MaskTokens
from lineage.data.examples.sentence_pairs import Chunks, PairSentences, Sentences
from lineage.data.loader import Batch, Source
from lineage.data.options import Options
from lineage.data.sources import images, opening
from lineage.data.tokenizers import Tokenizer
from lineage.data.transforms import augmentation, boxes

Transform = Callable[[Batch, np.ndarray], Batch]


@dataclass(frozen=True)
class Examples:
    """What a task makes: examples by split, what batches of them go through (in evaluation, one for all splits or
    one for each), and facts about them."""

    splits: dict[str, Source]
    info: dict[str, Any]
    tokenizer: Tokenizer | None = None
    in_training: Transform | None = None
    in_evaluation: Transform | dict[str, Transform] | None = None


@dataclass(frozen=True)
class Task:
    """A way to make examples.

    Attributes:
        make: does it.
        kinds: of sources that it can be done with.
        options: that have a meaning in it, beside those that always have.
    """

    make: Callable[[Options], Examples]
    kinds: Sequence[str]
    options: Sequence[str]


def make_windows(options: Options) -> Examples:
    """Windows of the tokens of all texts in a row."""
    for name in ("stride", "evaluation_stride"):
        if options.order and getattr(options, name) not in (0, options.sequence_length):
            raise ValueError(
                f"order={options.order!r} needs windows one after the other: {name}={getattr(options, name)} must be 0"
            )
    return _windows(options, ("end_of_text",))


def make_masked(options: Options) -> Examples:
    """Windows, some of whose tokens are hidden."""
    examples = _windows(options, ("end_of_text", *encoded.ROLES))  # as what it learns for will need
    masked = MaskTokens(options.mask_rate, examples.tokenizer, options.mask_whole_words)
    return _changed(examples, masked, kind="masked text")


def make_sentences(options: Options) -> Examples:
    """Pairs of runs of sentences, some of whose tokens are hidden."""
    documents = {name: Sentences(part) for name, part in opening.read_documents(options).items()}
    coder = find_tokenizer(options, documents, ("pad", "cls", "sep", "mask", "end_of_text"))
    length, masked = options.sequence_length, MaskTokens(options.mask_rate, coder, options.mask_whole_words)
    if length < 5:
        raise ValueError(f"sequence_length={length}: pairs need at least 5, three special tokens among them")
    streams = {name: text.tokenize(part, coder, options.cache_dir).tokens for name, part in documents.items()}
    splits = {name: Chunks(tokens, coder.end_of_text, length - 3) for name, tokens in streams.items()}
    order = options.task == "sentence_order"
    paired = {name: PairSentences(part, coder, masked, order) for name, part in splits.items()}
    return Examples(splits, _info(options, coder, "masked text"), coder, paired["train"], paired)


def make_corrupted(options: Options) -> Examples:
    """Windows without some spans, and these."""
    length, targets = span_corruption.lengths(options.mask_rate, options.sequence_length)
    examples = _windows(replace(options, sequence_length=length), ("pad", "end_of_text", "sentinels"))
    coder, needed = examples.tokenizer, span_corruption.count_noise(options.mask_rate, length)[1]
    if len(coder.sentinels) < needed:
        raise ValueError(
            f"sequence_length={options.sequence_length} needs {needed} sentinels: there are {len(coder.sentinels)}"
        )
    corrupt = span_corruption.CorruptSpans(
        options.mask_rate, options.sequence_length, targets, np.array(coder.sentinels), coder.pad, coder.end_of_text
    )
    return _changed(examples, corrupt, kind="noisy text", start=coder.pad, sequence_length=options.sequence_length)


def make_noisy(options: Options) -> Examples:
    """Windows under noise, and without."""
    if options.sequence_length < 2:
        raise ValueError(f"sequence_length={options.sequence_length}: denoising needs at least 2, a token and the end")
    examples = _windows(replace(options, sequence_length=options.sequence_length - 1), ("pad", "mask", "end_of_text"))
    coder = examples.tokenizer
    noisy = denoising.AddNoise(denoising.parse(options.noise, coder), options.sequence_length, coder.end_of_text)
    info = {"kind": "noisy text", "start": coder.end_of_text, "sequence_length": options.sequence_length}
    return _changed(examples, noisy, **info)


def make_pairs(options: Options, kind: type[pairs.Pairs] = pairs.Pairs) -> Examples:
    """Pairs of texts as token ids."""
    texts, role = opening.read_pairs(options), options.start_token
    if role not in ("end_of_text", "pad"):
        raise ValueError(f"start_token={role!r} must be end_of_text or pad")
    both = {name: [*inputs, *targets] for name, (inputs, targets) in texts.items()}
    coder = find_tokenizer(options, both, tuple(dict.fromkeys([role, "end_of_text"])))
    start = getattr(coder, role)
    encode = partial(pairs.encode, tokenizer=coder, length=options.sequence_length, start=start, kind=kind)
    more = {"start": start} if kind is pairs.Pairs else {}
    return Examples(
        {name: encode(part, drop=name == "train") for name, part in texts.items()},
        _info(options, coder, options.task, **more),
        coder,
    )


def make_classified(options: Options) -> Examples:
    """Rows of texts with the numbers of their classes."""
    splits = opening.read_labelled(options)
    names = labelled_texts.names(splits)
    number_of = {name: number for number, name in enumerate(names)}
    labels = {name: np.array([number_of[label] for label in part.labels], np.int32) for name, part in splits.items()}
    return _labelled(options, splits, labels, num_classes=len(names), class_names=names)


def make_regression(options: Options) -> Examples:
    """Rows of texts with a number for each."""
    splits = opening.read_labelled(options)
    try:
        labels = {name: np.array(part.labels, np.float32) for name, part in splits.items()}
    except ValueError as error:
        raise ValueError(f"the labels of {options.source!r} must be numbers: {error}") from None
    for name, values in labels.items():
        if not np.isfinite(values).all():
            raise ValueError(f"the labels of {options.source!r} must be finite: one of the {name} split is not")
    return _labelled(options, splits, labels, num_classes=1)


def make_tagged(options: Options) -> Examples:
    """Rows of sentences with the tags of their words."""
    splits = opening.read_tagged(options)
    tags = tagged_sentences.names(splits)
    texts = {name: ["".join(sentence.words) for sentence in part] for name, part in splits.items()}
    coder = find_tokenizer(options, texts, encoded.ROLES)
    rows = {name: tagged_sentences.encode(part, tags, coder, options.sequence_length) for name, part in splits.items()}
    return Examples(rows, _info(options, coder, options.task, num_classes=len(tags), class_names=tags), coder)


def make_spans(options: Options) -> Examples:
    """Rows of questions and parts of texts, with the place of the answer."""
    splits = opening.read_questions(options)
    texts = {name: [text for item in part for text in (item.text, item.context)] for name, part in splits.items()}
    coder = find_tokenizer(options, texts, encoded.ROLES)
    encode = partial(questions.encode, tokenizer=coder, length=options.sequence_length, stride=options.stride)
    return Examples({name: encode(part) for name, part in splits.items()}, _info(options, coder, options.task), coder)


def make_images(options: Options) -> Examples:
    """Labelled images."""
    splits, names = opening.read_images(options)
    if options.max_examples:
        splits = splits | {"train": images.draw(splits["train"], options.max_examples, options.seed)}
    if options.in_memory:
        splits = {name: images.in_memory(part) for name, part in splits.items()}
    height, width, channels, mean, std = _pixels(options, splits["train"])
    size = options.image_size
    resize = augmentation.CentreCrop(size, options.evaluation_crop, options.resample) if size else None
    steps = augmentation.parse(options.augment, size, options.resample)
    crop = steps.pop(0) if steps and isinstance(steps[0], augmentation.RandomCrop) else resize
    erase = steps.pop() if steps and isinstance(steps[-1], augmentation.Erase) else None
    info = {"kind": "images", "num_classes": len(names), "class_names": names, "channels": channels}
    info |= {"image_size": (size, size) if size else (height, width), "mean": mean, "std": std}
    in_training, in_evaluation = (
        augmentation.Transform(crop, steps, mean, std, erase),
        augmentation.Transform(resize, [], mean, std),
    )
    return Examples(splits, info, None, in_training, in_evaluation)


def make_detection(options: Options) -> Examples:
    """Images with the boxes and the classes of their objects."""
    splits, names = opening.read_objects(options)
    *_, channels, mean, std = _pixels(options, splits["train"])
    size, most = options.image_size or 64, options.max_boxes
    fit = boxes.Resize(options.shorter_side or size, options.shorter_side or size, size)
    steps = boxes.parse(options.augment, size)
    resized = any(isinstance(step, boxes.Resize) for step in steps)
    make = partial(boxes.Transform, size=size, most=most, mean=mean, std=std)
    info = {"kind": "detection", "num_classes": len(names), "class_names": names, "image_size": (size, size)}
    info |= {"channels": channels, "mean": mean, "std": std}
    in_training = make(steps if resized else [*steps, fit], training=True)
    return Examples(splits, info, None, in_training, make([fit], training=False))


def make_masked_images(options: Options) -> Examples:
    """Images, some of whose patches are hidden."""
    examples = make_images(options)
    in_training, in_evaluation = (
        MaskPatches(images, options.patch_size, options.mask_rate, options.masking)
        for images in (examples.in_training, examples.in_evaluation)
    )
    info = examples.info | {"kind": "masked images"}
    return replace(examples, info=info, in_training=in_training, in_evaluation=in_evaluation)


def find_tokenizer(
    options: Options, texts: dict[str, Iterable[str]], special: Sequence[str] = ("end_of_text",)
) -> Tokenizer:
    """The tokenizer in the workdir, or of the file that is named, or one trained on the texts of the training split.

    Args:
        options: of the data.
        texts: by split.
        special: the roles of `tokenizers.SPECIAL` that a trained one gets tokens for.
    """
    workdir, spec = options.workdir, options.tokenizer
    if workdir is not None and (Path(workdir) / tokenizers.FILE).is_file():
        return Tokenizer.load(workdir)
    if spec not in tokenizers.KINDS and Path(spec).exists():
        coder = Tokenizer.load(spec)
    else:
        # Characters come from all splits, as in nanoGPT, because an unknown one cannot be encoded.
        seen = chain(*texts.values()) if spec == "characters" else texts["train"]
        coder = tokenizers.train(spec, seen, options.vocab_size, special, options.lowercase)
    # Texts that are only gone through in a row do without an end.
    optional = ("end_of_text",) if options.task in ("next_token", "masked_tokens", "pairs") else ()
    missing = [role for role in special if role not in optional and getattr(coder, role) in (None, [])]
    if missing:
        raise ValueError(f"task={options.task!r} needs {', '.join(missing)} in tokenizer={spec!r}, which has none")
    if workdir is not None and options.process_index == 0:
        coder.save(workdir)
    return coder


def _pixels(options, train):
    """Height, width and channels of the first image, and the mean and the deviation to normalise by."""
    if not len(train):
        raise ValueError(f"the data set {options.source!r} is empty: at least one example is needed")
    shape, mean, std = train[0]["image"].shape, tuple(options.mean), tuple(options.std)
    if not {len(mean), len(std)} <= {1, shape[-1]} or min(std) <= 0:
        raise ValueError(f"mean={mean} and std={std} need 1 or {shape[-1]} numbers each, and std above 0")
    return *shape, mean, std


def _changed(examples, transform, **info):
    """Examples that go through a transform, and what there is to know of them."""
    return replace(examples, info=examples.info | info, in_training=transform, in_evaluation=transform)


def _info(options, coder, kind, **more):
    return {"kind": kind, "vocab_size": coder.vocab_size, "sequence_length": options.sequence_length, **more}


def _labelled(options, splits, labels, **info):
    if len(counts := {len(row) for part in splits.values() for row in part.texts}) > 1:
        raise ValueError(f"{options.source!r} has rows of {min(counts)} and of {max(counts)} texts: give all as many")
    texts = {name: [text for row in part.texts for text in row] for name, part in splits.items()}
    coder, length = find_tokenizer(options, texts, encoded.ROLES), options.sequence_length
    fit = labelled_texts.Fit(options.long_text, coder, length, options.stride, splits["train"])
    rows = {name: labelled_texts.encode(part, labels[name], coder, length, fit) for name, part in splits.items()}
    return Examples(rows, _info(options, coder, options.task, **info), coder)


def _windows(options, special):
    documents = opening.read_documents(options)
    if options.tokenizer == "characters" and not any(len(part) > 1 for part in documents.values()):
        special = tuple(role for role in special if role != "end_of_text")  # one text has no end between texts
    coder = find_tokenizer(options, documents, special)
    streams = {name: text.tokenize(part, coder, options.cache_dir) for name, part in documents.items()}
    splits = {
        name: text.Windows(stream.tokens, options.sequence_length, options.stride)
        if name == "train"
        else text.Windows(stream.tokens, options.sequence_length, options.evaluation_stride, once=True)
        for name, stream in streams.items()
    }
    info = {
        "tokens": {name: len(stream.tokens) for name, stream in streams.items()},
        "characters_per_token": {name: stream.characters / len(stream.tokens) for name, stream in streams.items()},
        "bytes_per_token": {name: stream.bytes / len(stream.tokens) for name, stream in streams.items()},
    }
    return Examples(splits, _info(options, coder, "text", **info), coder)


_TOKENS = ("tokenizer", "vocab_size", "lowercase", "sequence_length")
_DOCUMENTS = (*_TOKENS, "max_bytes", "text_key", "validation_fraction", "cache_dir")
_WINDOWS = (*_DOCUMENTS, "stride")
_MASKED = ("mask_rate", "mask_whole_words")
_TEXTS = ("stdlib", "text", "tfds")
_PAIRS = ("cldr", "pairs", "labels", "tfds")
_OF_IMAGES = ("digits", "folder", "idx", "cifar", "tfds")
_LABELLED = (*_TOKENS, "buckets", "stride", "long_text", "text_key", "label_key")
_SIZES = ("image_size", "evaluation_crop", "resample")
_IMAGES = (*_SIZES, "image_key", "label_key", "max_examples", "in_memory", "augment", "repeats", "mean", "std")
_DETECTION = ("image_key", "image_size", "shorter_side", "max_boxes", "augment", "mean", "std")
TASKS = {
    "images": Task(make_images, _OF_IMAGES, _IMAGES),
    "masked_images": Task(make_masked_images, _OF_IMAGES, (*_IMAGES, "mask_rate", "masking", "patch_size")),
    "detection": Task(make_detection, ("shapes", "tfds"), _DETECTION),
    "next_token": Task(make_windows, _TEXTS, (*_WINDOWS, "evaluation_stride", "order")),
    "masked_tokens": Task(make_masked, (*_TEXTS, "conllu"), (*_WINDOWS, *_MASKED)),
    "next_sentence": Task(make_sentences, _TEXTS, (*_DOCUMENTS, *_MASKED)),
    "sentence_order": Task(make_sentences, _TEXTS, (*_DOCUMENTS, *_MASKED)),
    "span_corruption": Task(make_corrupted, _TEXTS, (*_WINDOWS, "mask_rate")),
    "denoising": Task(make_noisy, _TEXTS, (*_WINDOWS, "noise")),
    "pairs": Task(make_pairs, _PAIRS, (*_TOKENS, "buckets", "text_key", "start_token")),
    "continuations": Task(partial(make_pairs, kind=pairs.Continuations), _PAIRS, (*_TOKENS, "buckets", "text_key")),
    "classification": Task(make_classified, ("labels", "tfds"), _LABELLED),
    "regression": Task(make_regression, ("labels", "tfds"), _LABELLED),
    "tagging": Task(make_tagged, ("conllu",), (*_TOKENS, "buckets")),
    "spans": Task(make_spans, ("squad", "tfds"), (*_TOKENS, "buckets", "stride")),
}
