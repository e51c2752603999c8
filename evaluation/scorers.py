"""Metrics of the command `score`; the table `METRICS` declares them.

A metric is a function of the entries of the predictions, of the entries of each file of references (if it needs any),
and of keyword options. It returns values by name, and may return its own `signature`.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lineage.data.sources.boxes import FLAGS, category_names
from lineage.data.transforms.pillow import decode
from lineage.evaluation.likelihood import CHOICES, choice_scores, detection_scores, last_word_scores, perplexity_scores
from lineage.evaluation.records import IMAGES, OBJECTS, PREDICTIONS, TEXTS, Readers, read, texts_or
from lineage.metrics import answers, diversity, embedding, summary, translation
from lineage.metrics.classification import precision_recall_f1, regression
from lineage.metrics.detection import Detections, coco, mean_over_images, voc
from lineage.metrics.states import Matthews
from lineage.metrics.tagging import Spans, is_chunk, word_accuracy

Entries = Sequence[Any]  # texts, or lists of texts, of a file


class Metric(NamedTuple):
    """Metric of the command `score`, and the files that it takes."""

    compute: Callable[..., dict[str, Any]]
    readers: Readers = TEXTS
    unpaired: tuple[type, ...] = ()  # types of predictions that are not matched with the references in order
    needs_model: bool = False  # whether the option `model`, a run or folder, is loaded as a `LanguageModel`


def _texts(entries: Entries) -> list[str]:
    """Return the only text of each entry."""
    texts = [entry[0] if isinstance(entry, list) and len(entry) == 1 else entry for entry in entries]
    if wrong := [entry for entry in texts if not isinstance(entry, str)]:
        raise ValueError(f"{str(wrong[0])[:80]} is not a single text: each entry must have one text.")
    return texts


def _all_texts(columns: Sequence[Entries]) -> list[list[str]]:
    """Return the references of each text from all files."""
    return [[text for entry in row for text in ([entry] if isinstance(entry, str) else entry)] for row in zip(*columns)]


def _single(columns: Sequence[Any]) -> Any:
    """Return the entries of a single file of references."""
    if len(columns) > 1:
        raise ValueError(f"there are {len(columns)} files of references: this metric takes one.")
    return columns[0]


def _sacrebleu(name, predictions, references, *, samples=0, baseline="", test="bs", **settings):
    """Compute a metric of sacreBLEU; with a `baseline` file, also the p-value of the difference from it."""
    if samples < 0 or samples == 1:
        raise ValueError(f"samples is {samples}: it must be 0 or at least 2.")
    if test != "bs" and not baseline:
        raise ValueError(f"test is {test!r}, which compares with a baseline: set the option baseline to its file.")
    outputs, rows = _texts(predictions), _all_texts(references)
    score = translation.corpus_score(name, outputs, rows, samples=samples, **settings)
    scores = {name: score.score, "signature": score.signature}
    if samples > 1:
        scores |= {"mean": score.mean, "interval": score.interval}
    if baseline:
        systems = {"baseline": _texts(read(baseline, PREDICTIONS)), "this": outputs}
        if len(systems["baseline"]) != len(outputs):
            count = len(systems["baseline"])
            raise ValueError(f"{baseline} has {count} texts and the predictions {len(outputs)}: they must be equal.")
        both, scores["signature"] = translation.compare(name, systems, rows, test=test, samples=samples, **settings)
        scores |= {"baseline": both["baseline"].score, "p_value": both["this"].p_value}
    return scores


def _d2l_bleu(predictions, references, *, order=2):
    columns = ([text.split() for text in _texts(column)] for column in (predictions, _all_texts(references)))
    return {"d2l_bleu": translation.d2l_bleu(*columns, order)}


def _rouge(
    predictions,
    references,
    *,
    kinds=("1", "2", "L", "Lsum"),
    beta=1.0,
    tokenize="ascii",
    stem=False,
    perl=False,
    samples=1000,
    confidence=0.95,
    seed=0,
):
    """Compute ROUGE; `tokenize` is "ascii", or "words" for any script; `perl`: see `metrics.summary.rouge`."""
    tokenizers = {"ascii": partial(summary.tokens, stem=stem), "words": summary.words}
    if tokenize not in tokenizers or (stem and tokenize == "words"):
        raise ValueError(f"tokenize is {tokenize!r}, stem {stem}: it must be ascii, or words without stem.")
    options = {"beta": beta, "tokenize": tokenizers[tokenize], "perl": perl, "confidence": confidence, "seed": seed}
    texts, rows = _texts(predictions), _all_texts(references)
    scores = {}
    for kind, ends in summary.corpus_rouge(texts, rows, kinds, samples=samples, **options).items():
        scores |= {f"rouge{kind}_{part}": value for part, value in ends["mean"]._asdict().items()}
        scores |= {f"rouge{kind}_f_{end}": ends[end].f for end in ("low", "high")}
    return scores


def _distinct(predictions, *, orders=(1, 2, 3)):
    tokens = [summary.words(text) for text in _texts(predictions)]
    return {f"distinct_{order}": diversity.distinct(tokens, order) for order in orders}


def _repetition(predictions, *, order=4):
    return {"repetition": diversity.repetition(map(summary.words, _texts(predictions)), order)}


def _self_bleu(predictions, *, order=4):
    return {"self_bleu": diversity.self_bleu(_texts(predictions), order)}


def _burstiness(predictions, *, least=3):
    """Compute the burstiness of sentence lengths, and the mean over words that occur at least `least` times."""
    text = "\n".join(_texts(predictions))
    words = diversity.word_burstiness(summary.words(text), least)
    mean = float(np.mean(list(words.values()))) if words else math.nan
    return {"sentence_burstiness": diversity.sentence_burstiness(text), "word_burstiness": mean}


def _squad(predictions, references):
    """Compute exact match and F1, also separately for questions with and without an answer if there are both.

    Predictions are texts, or {id: answer} if the references are in the format of SQuAD.
    """
    if isinstance(predictions, dict):
        truth = _single(references)
        try:
            asked = [item for article in truth["data"] for text in article["paragraphs"] for item in text["qas"]]
            by_id = {str(item["id"]): ["" + answer["text"] for answer in item["answers"]] for item in asked}
        except (KeyError, TypeError) as error:
            raise ValueError(f"the references are not in the format of SQuAD: {type(error).__name__} {error}") from None
        if not asked:
            raise ValueError("the references have no questions: there is nothing to score.")
        if len(by_id) < len(asked):
            raise ValueError(f"the references have {len(asked)} questions with {len(by_id)} ids: each needs its own.")
        if missing := by_id.keys() - predictions.keys():
            raise ValueError(f"{len(missing)} of {len(by_id)} questions have no prediction, such as {min(missing)}.")
        predictions, references = [predictions[number] for number in by_id], [list(by_id.values())]
    rows = list(zip(_texts(predictions), _all_texts(references)))
    groups = {"": rows}
    if not all(truth for _, truth in rows):
        groups |= {"answered_": [row for row in rows if row[1]], "unanswerable_": [row for row in rows if not row[1]]}
    return {
        prefix + score.__name__: float(np.mean([score(*row) for row in group]))
        for prefix, group in groups.items()
        for score in (answers.exact_match, answers.f1)
        if group
    }


def _accuracy(predictions, references):
    """Compute the accuracy of labels, the mean of the F1 of the classes, and the Matthews correlation."""
    labels, truths = _texts(predictions), _texts(_single(references))
    if empty := [number for number, label in enumerate(truths, 1) if not label.strip()]:
        raise ValueError(
            f"{len(empty)} references have no label, the first one in entry {empty[0]}: remove these rows."
        )
    numbers = {name: number for number, name in enumerate(sorted({*labels, *truths}))}
    counts = np.zeros((len(numbers), len(numbers)), int)
    np.add.at(counts, tuple([numbers[name] for name in side] for side in (truths, labels)), 1)
    scores = {"accuracy": float(counts.trace() / len(labels)), "macro_f1": precision_recall_f1(counts, "macro").f1}
    return scores | {"matthews": float(Matthews(counts, np.int64(0)).compute())}


def _regression(predictions, references):
    """Compute the correlations of predicted values and labels, and their mean squared error."""
    try:
        values, labels = (np.array(_texts(entries), float) for entries in (predictions, _single(references)))
    except ValueError as error:
        raise ValueError(f"The values must be numbers: {str(error)[:80]}.") from None
    if infinite := [value for value in (*values, *labels) if not abs(value) <= np.finfo(np.float32).max]:
        raise ValueError(f"The values must be finite: one is {infinite[0]}.")
    return regression(values, labels)


def _tagging(predictions, references, *, scheme=""):
    """Compute the word accuracy and, if the tags are chunk tags (unlike NOUN), precision, recall and F1 of chunks.

    `scheme` is one of `metrics.tagging.spans`; "": the lenient scheme.
    """
    sides = predictions, _single(references)
    tags, truths = ([entry.split() if isinstance(entry, str) else entry for entry in side] for side in sides)
    scores = {"accuracy": word_accuracy(tags, truths)}
    known = {tag for side in (tags, truths) for sentence in side for tag in sentence}
    letters = "O" in known and known <= {*"OBIESLU"}
    if not (scheme or letters or any(is_chunk(tag) for tag in known - {"O"})):
        return scores
    state = Spans.empty().update(tags, truths, scheme or None)
    scores |= state.compute()._asdict() | {f"{how}_f1": state.compute(how).f1 for how in ("macro", "weighted")}
    return scores | {f"f1 {kind}": value for kind, value in zip(state.types, state.compute(None).f1)}


def _fill_mask(predictions, references):
    """Compute how often the most probable token, and how often any candidate, equals the hidden token.

    The references have the hidden tokens of each text as a list `masks`, or as a text of words.
    """
    hits = []
    for number, (row, truth) in enumerate(zip(predictions, _single(references)), 1):
        try:
            hidden = truth.get("masks", ()) if isinstance(truth, dict) else truth.split()
            candidates = [[candidate["token"] for candidate in mask] for mask in row["masks"]]
            for token, texts in zip(hidden, candidates, strict=True):
                hits.append([token in (text, text.strip()) for text in texts])
        except (AttributeError, KeyError, TypeError):
            raise ValueError(f"Text {number} is not a prediction with `masks` and its hidden tokens.") from None
        except ValueError:
            raise ValueError(f"Text {number} has {len(candidates)} masks and {len(hidden)} hidden tokens.") from None
    if not all(hits) or not hits:
        raise ValueError("The predictions have no masks: there is nothing to score.")
    return {"accuracy": float(np.mean([hit[0] for hit in hits])), "any_accuracy": float(np.mean(list(map(any, hits))))}


def _reconstruction(predictions, references):
    """Compute the mean squared error of pixels from 0 to 1, and the PSNR in dB (inf for equal images)."""
    errors = []
    for ours, theirs in zip(predictions, _single(references)):
        image, truth = (decode(file, 3).astype(float) / 255 for file in (ours, theirs))
        if image.shape != truth.shape:
            raise ValueError(f"{ours} has {image.shape[:2]} pixels and {theirs} {truth.shape[:2]}: they must be equal.")
        errors.append(np.mean((image - truth) ** 2))
    error = float(np.mean(errors))
    return {"mse": error, "psnr": 10 * math.log10(1 / error) if error else math.inf}


def _coco(predictions, references):
    """Compute the twelve COCO metrics, and the average precision of each category."""
    names, state = _detections(predictions, references)
    result = coco(state)
    return result.summary() | {f"ap {name}": value for name, value in zip(names, result.by_class())}


def _voc(predictions, references, *, threshold=0.5, points=0, pixel=0.0, by_image=False):
    """Compute PASCAL VOC's mean average precision; `points` is 11, or 0 for the area under the curve.

    Annotations whose `difficult` is 1 are ignored. `pixel` is 1 for boxes whose width is xmax - xmin of VOC's files.
    With `by_image`, each class in each image counts as one (see `metrics.detection.mean_over_images`).
    """
    if points not in (0, 11) or not 0 <= threshold < 1:
        raise ValueError(f"points is {points}, threshold {threshold}: they must be 0 or 11, and from 0 to below 1.")
    names, state = _detections(predictions, references, pixel, ignored="difficult")
    if by_image:
        return {"map": mean_over_images(state, threshold, points or None)}
    scores = voc(state, threshold, points or None)
    known = [score for score in scores if not math.isnan(score)]
    mean = float(np.mean(known)) if known else math.nan
    return {"map": mean} | {f"ap {name}": score for name, score in zip(names, scores)}


def _detections(predictions, references, pixel=0.0, ignored="iscrowd"):
    """Return the names of the categories, and the detections of files in the formats of COCO.

    Annotations whose key `ignored` is 1 are ignored, as are crowds.
    """
    truth = _single(references)
    try:
        names = category_names("the file of references", truth["categories"])
        numbers = {category: number for number, category in enumerate(names)}
        images = {id: ([], []) for id in sorted(image["id"] for image in truth["images"])}  # of one type
        for which, entries in enumerate((predictions, truth["annotations"])):
            for entry in entries:
                flags = [FLAGS[entry.get(key, 0)] for key in ("iscrowd", ignored)]
                for key, known in (("category_id", numbers), ("image_id", images)):
                    if entry[key] not in known:
                        raise ValueError(f"{key} is {str(entry[key])[:60]}, which the references do not have")
                rest = (flags[0], float(entry["area"]), flags[1]) if which else (float(entry["score"]),)
                left, top, width, height = map(float, entry["bbox"])
                box = (left, top, width, height), numbers[entry["category_id"]], *rest
                images[entry["image_id"]][which].append(box)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"the files are not in the formats of COCO: {type(error).__name__} {error}") from None
    state = Detections.empty(len(names))
    for image, (predicted, true) in images.items():
        boxes, classes, scores = map(np.array, zip(*predicted) if predicted else ((), (), ()))
        true_boxes, true_classes, crowd, areas, skipped = map(np.array, zip(*true) if true else ((),) * 5)
        sizes = {"true_crowd": crowd, "true_areas": areas, "true_ignored": skipped, "pixel": pixel}
        state = state.update(image, boxes, scores, classes, true_boxes, true_classes, **sizes)
    return names.values(), state


def _bert_score(predictions, references, *, model="", layer=-1, idf=False, baseline=""):
    """Compute BERTScore; `model` is a folder (see `Encoder`), `baseline` a rescaling file of bert-score."""
    zero = embedding.read_baseline(baseline, layer) if baseline else None
    texts, rows, encoder = _texts(predictions), _all_texts(references), _encoder(model, layer)
    scores = embedding.bert_score(texts, rows, encoder, idf=idf, baseline=zero)
    return {f"bert_score_{part}": float(values.mean()) for part, values in scores._asdict().items()}


def _mover_score(predictions, references, *, model="", version=1, size=1, idf=True, entropy=0.0):
    """Compute MoverScore without punctuation and word continuations; `model` is a folder (see `Encoder`)."""
    encoder = _encoder(model, tuple(range(-5, 0)) if version == 1 else -1)
    options = {"version": version, "size": size, "idf": idf, "skip": encoder.skip(), "entropy": entropy}
    scores = embedding.mover_score(_texts(predictions), _all_texts(references), encoder, **options)
    return {"mover_score": float(scores.mean())}


def _encoder(model, layer):
    from lineage.evaluation.encoder import Encoder

    if not model:
        raise ValueError("the option model is missing: give the folder of a checkpoint of the BERT family.")
    return Encoder(model, layer)


def _of_texts(score, predictions, *, model=""):
    """Compute a metric of texts by a language model."""
    return score(model, _texts(predictions))


def _detector(predictions, references, *, model="", samples=1000, seed=0):
    """Detect the predictions, texts of a model, among the references, texts of humans."""
    return detection_scores(model, _texts(predictions), _texts(_single(references)), samples, seed)


def _choices(name, predictions, *, model=""):
    return choice_scores(name, model, predictions)


DOCUMENTS = dict, list
METRICS = {name: Metric(partial(_sacrebleu, name)) for name in translation.SACREBLEU} | {
    "d2l_bleu": Metric(_d2l_bleu),
    "rouge": Metric(_rouge),
    "bert_score": Metric(_bert_score),
    "mover_score": Metric(_mover_score),
    "distinct": Metric(_distinct),
    "self_bleu": Metric(_self_bleu),
    "repetition": Metric(_repetition),
    "burstiness": Metric(_burstiness),
    "accuracy": Metric(_accuracy, texts_or("label", "label")),
    "regression": Metric(_regression, texts_or("value", "label")),
    "squad": Metric(_squad, unpaired=(dict,)),
    "tagging": Metric(_tagging, texts_or("tags", "tags")),
    "fill_mask": Metric(_fill_mask, OBJECTS),
    "reconstruction": Metric(_reconstruction, IMAGES),
    "coco": Metric(_coco, OBJECTS, DOCUMENTS),
    "voc": Metric(_voc, OBJECTS, DOCUMENTS),
    "perplexity": Metric(partial(_of_texts, perplexity_scores), needs_model=True),
    "detector": Metric(_detector, unpaired=DOCUMENTS, needs_model=True),
    "lambada": Metric(partial(_of_texts, last_word_scores), needs_model=True),
}
METRICS |= {name: Metric(partial(_choices, name), OBJECTS, DOCUMENTS, needs_model=True) for name in CHOICES}
