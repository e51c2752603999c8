"""Classification and regression of texts and of pairs of texts."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import log
from typing import Annotated, Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np

from lineage.configs.registry import Natural, Needs
from lineage.data import Examples, ExampleSource, Facts, LabeledTexts, Tokenizer
from lineage.data.content import check_length
from lineage.data.examples import encoded
from lineage.data.examples.encoded import Encoded
from lineage.data.examples.windows import ENDS
from lineage.metrics.states import F1, Matthews
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, InputExamples, Result
from lineage.tasks.losses import class_loss, probabilities, smoothed, sums
from lineage.tasks.prediction import probabilities_of, ranked
from lineage.tasks.text import EncoderTask


@dataclass(frozen=True)
class LabeledTextTask(EncoderTask):
    """Base class of labeled-text tasks.

    Attributes:
        long_text: handling of texts that are too long: keep the first tokens ("head"), the last tokens ("tail"), a
            quarter of them from the beginning and the rest from the end ("head_tail", arXiv 1905.05583), the sentences
            closest to the centroid of the text ("key_sentences"), or all, in several windows ("segments"). Of a
            pair, the longer text is truncated first; the last two are for single texts.
        stride: with "segments", distance between the starts of consecutive windows, in tokens; 0: no overlap.
    """

    reads = "labeled_texts"
    needs = ("classification",)
    head = "classification"
    arrays = EncoderTask.arrays | {"label": "int32 B", "mask": "bool B"}

    long_text: Literal["head", "tail", "head_tail", "key_sentences", "segments"] = "head"
    stride: Annotated[Natural, Needs("long_text", ("segments",))] = 0

    def texts(self, content: Mapping[str, LabeledTexts]) -> dict[str, Iterable[str]]:
        counts = {len(row) for part in content.values() for row in part.texts}
        if len(counts) > 1:
            raise ValueError(f"Rows have {min(counts)} and {max(counts)} texts: all must have the same number.")
        return {name: [text for row in part.texts for text in row] for name, part in content.items()}

    def labels(self, content: Mapping[str, LabeledTexts]) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
        """Return the labels of each split, and the class names (none for real numbers)."""
        raise NotImplementedError

    def examples(self, content: Mapping[str, LabeledTexts], tokenizer: Tokenizer | None, seed: int) -> Examples:
        labels, names = self.labels(content)
        if self.known:
            words, count = self.known.document_frequencies, self.known.examples.get("train", 0)
        else:
            counted = content["train"].texts if self.long_text == "key_sentences" else ()
            words, count = dict(document_frequencies(counted)), len(counted)
        encoder = TextEncoder(self, tokenizer, words, count)
        splits = {name: encoder.encode(part.texts, labels[name]) for name, part in content.items()}
        facts = self.facts(tokenizer, num_classes=len(names) or 1, class_names=names, document_frequencies=words)
        return Examples(splits, facts)

    def input_examples(self, rows: Sequence[tuple[str, ...]], tokenizer: Tokenizer, facts: Facts) -> InputExamples:
        encoder = TextEncoder(self, tokenizer, facts.document_frequencies, facts.examples.get("train", 0))
        return InputExamples(encoder.encode(rows))


@TASKS.register("text_classification")
@dataclass(frozen=True)
class TextClassification(LabeledTextTask):
    """Predict the class of a text or a pair of texts.

    Attributes:
        binary: whether to use a binary cross-entropy per class (multi-label targets).
    """

    evaluators = ("loss", "pooled_accuracy")

    binary: bool = False

    @property
    def problem_type(self) -> str:
        return "multi_label_classification" if self.binary else ""

    def labels(self, content: Mapping[str, LabeledTexts]) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
        names = class_names(content, self.known.class_names if self.known else ())
        number = {name: index for index, name in enumerate(names)}
        labels = {split: [number[label] for label in part.labels] for split, part in content.items()}
        return {split: np.array(part, np.int32) for split, part in labels.items()}, tuple(names)

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return the cross-entropy of `label` [B], or of soft labels [B, V], where `mask` [B] is True."""
        label, mask = batch["label"], batch["mask"]
        logits = self.forward(model, batch).astype(jnp.float32)
        target = probabilities(label, logits.shape[-1])
        label = target.argmax(axis=-1)
        loss, means = class_loss(logits, smoothed(model, target, self.label_smoothing), label, self.binary)
        empty = {"f1": F1.empty(logits.shape[-1]), "matthews": Matthews.empty(logits.shape[-1])}
        states = {name: state.update(logits.argmax(axis=-1), label, mask) for name, state in empty.items()}
        return sums(loss, mask, means, **states)

    def predict(self, outputs: Any, inputs: ExampleSource, facts: Facts) -> list[dict[str, Any]]:
        """Return the classes, with mean probabilities over the windows of a long text."""
        return ranked(inputs.means(probabilities_of(outputs, self.binary)), facts.class_names)


def class_names(splits: dict[str, LabeledTexts], known: Sequence[str] = ()) -> list[str]:
    """Return the known class names, those of the source, or the labels of the training split: numbers, then words."""

    def order(name):
        return not name.isdecimal(), int(name) if name.isdecimal() else 0, name

    names = list(known or splits["train"].names) or sorted(set(splits["train"].labels), key=order)
    for split, part in splits.items():
        unknown = sorted(set(part.labels) - set(names))
        if unknown:
            raise ValueError(f"The label {unknown[0]!r} of the {split} split is not one of {', '.join(names[:20])}.")
    return names


@dataclass(frozen=True)
class TextEncoder:
    """Encoder of texts that applies the option `long_text` of the task to those that do not fit into its sequences."""

    task: LabeledTextTask
    tokenizer: Tokenizer
    document_frequencies: Mapping[str, int]  # number of training texts with each word, for "key_sentences"
    count: int  # number of training texts, for "key_sentences"

    def __post_init__(self):
        check_length(self.task.sequence_length, 4)

    def encode(self, texts: Sequence[tuple[str, ...]], labels: np.ndarray | None = None) -> Encoded:
        """Encode texts and pairs of texts with their `labels` [N], if any.

        Raises ValueError for more than two texts in a row, and for pairs if `long_text` is for single texts.
        """
        if (longest := max(map(len, texts), default=1)) > 2:
            raise ValueError(f"A row has {longest} texts: it must have one or two.")
        if longest == 2 and (rule := self.task.long_text) in ("key_sentences", "segments"):
            raise ValueError(f"task.long_text is {rule!r}: it must be head, tail or head_tail for pairs of texts.")
        encodings = iter(self.tokenizer.encode_batch([text for row in texts for text in row]))
        joined, origins, cut = [], [], 0
        for origin, row in enumerate(texts):
            ids = tuple(islice(encodings, len(row)))
            sequences = self(row, ids)
            cut += sum(len(part) for parts in sequences for part in parts) < sum(map(len, ids))
            joined += [encoded.join(self.tokenizer, *parts) for parts in sequences]
            origins += [origin] * len(sequences)
        others = {} if labels is None else {"label": labels[origins]}
        return encoded.collect(joined, origins, self.task.sequence_length, self.tokenizer, per_sequence=others, cut=cut)

    def __call__(self, texts: tuple[str, ...], ids: tuple[np.ndarray, ...]) -> list[list[np.ndarray]]:
        """Return the token ids of the one or two texts of each sequence, given the texts and their token ids."""
        room = self.task.sequence_length - encoded.num_added(self.tokenizer, len(ids))
        if sum(map(len, ids)) <= room:
            return [list(ids)]
        if self.task.long_text == "segments":
            starts = encoded.window_starts(len(ids[0]), room, self.task.stride)
            return [[ids[0][start : start + room]] for start in starts]
        if self.task.long_text == "key_sentences":
            return [[self._key_sentences(texts[0], room)]]
        sizes = encoded.longest_first(*map(len, ids), room) if len(ids) > 1 else [room]
        return [[self._cut(part, size) for part, size in zip(ids, sizes)]]

    def _cut(self, ids, size):
        if len(ids) <= size:
            return ids
        head = {"tail": 0, "head_tail": round(size * 128 / 510)}.get(self.task.long_text, size)
        return np.concatenate([ids[:head], ids[len(ids) - size + head :]])

    def _key_sentences(self, text, room):
        """Choose sentences by the weights of their words in the tf-idf centroid (Radev et al. 2004, section 3.1)."""
        sentences = ENDS.split(text)
        frequencies = self.document_frequencies
        idf = {word: log((1 + self.count) / (1 + frequencies.get(word, 0))) for word in _words(text)}
        centroid = {word: times * idf[word] for word, times in Counter(_words(text)).items()}
        scores = [sum(centroid[word] for word in set(_words(sentence))) for sentence in sentences]
        ids, kept, left = self.tokenizer.encode_batch(sentences), [], room
        for number in sorted(range(len(sentences)), key=lambda number: -scores[number]):
            if len(ids[number]) <= left:
                kept.append(number)
                left -= len(ids[number])
        return np.concatenate([ids[number] for number in sorted(kept)]) if kept else self.tokenizer.encode(text)[:room]


def document_frequencies(texts: Iterable[tuple[str, ...]]) -> Counter[str]:
    """Return the number of texts, or first texts of pairs, that contain each word."""
    return Counter(word for (text, *_) in texts for word in set(_words(text)))


def _words(text):
    return re.findall(r"\w+", text.lower())


@TASKS.register("text_regression")
@dataclass(frozen=True)
class TextRegression(LabeledTextTask):
    """Predict a number for a text or a pair of texts, with the squared error as the loss."""

    arrays = LabeledTextTask.arrays | {"label": "float32 B"}
    evaluators = ("loss", "regression")
    problem_type = "regression"
    label_smoothing: ClassVar[float] = 0.0  # not an option

    def model_options(self) -> dict[str, Any]:
        return super().model_options() | {"num_classes": 1}

    def check_model(self, model: Model) -> None:
        super().check_model(model)
        if (count := model.data_options["num_classes"]) != 1:
            raise ValueError(f"model.num_classes is {count}: it must be 1 for a regression.")

    def labels(self, content: Mapping[str, LabeledTexts]) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
        try:
            labels = {name: np.array(part.labels, np.float32) for name, part in content.items()}
        except ValueError as error:
            raise ValueError(f"The labels must be numbers: {error}.") from None
        for name, values in labels.items():
            if not np.isfinite(values).all():
                raise ValueError(f"The labels must be finite: one of the {name} split is not.")
        return labels, ()

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return the squared error of the model's single output from `label` [B], where `mask` [B] is True."""
        values, label, mask = self.forward(model, batch), batch["label"], batch["mask"]
        values = values[..., 0].astype(jnp.float32)
        return sums((values - label) ** 2, mask)

    def predict(self, outputs: Any, inputs: ExampleSource, facts: Facts) -> list[dict[str, Any]]:
        return [{"value": value} for value in inputs.means(outputs)[:, 0].tolist()]
