"""Speed of the metrics against their reference libraries on random data, and their maximum absolute difference.

Each round times all implementations; medians over the rounds are printed, as wall time and as processor time.

python -m benchmarks.metrics
python -m benchmarks.metrics --only coco rouge --images=500 --rounds=3

Install the libraries with: pip install pycocotools faster-coco-eval rouge-score bert-score transformers torch
"""

import argparse
import contextlib
import io
import logging
import os
import tempfile
import time

import numpy as np

from lineage.evaluation.encoder import Encoder
from lineage.metrics.answers import f1
from lineage.metrics.detection import Detections
from lineage.metrics.embedding import bert_score
from lineage.metrics.summary import rouge

CLASSES, TRUTHS, DETECTED = 80, 7, 100  # classes, and objects and detections per image
ROUGE = ("1", "2", "L", "Lsum")
WORDS = [f"w{number}" for number in range(5000)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--texts", type=int, default=1000, help="pairs of 300 words, for ROUGE")
    parser.add_argument("--sentences", type=int, default=500, help="pairs of 5 to 40 words, for BERTScore")
    parser.add_argument("--width", type=int, default=512, help="width of the encoder of BERTScore")
    parser.add_argument("--depth", type=int, default=4, help="depth of the encoder of BERTScore")
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"{'':52} seconds   of ours   processor   of ours   difference")
    for task in options.only:
        ways = TASKS[task](options)
        rounds = [[timed(way) for way in ways.values()] for _ in range(options.rounds)]
        seconds = [np.median([times for times, _ in some], axis=0) for some in zip(*rounds)]
        for name, (wall, processor), (_, result) in zip(ways, seconds, rounds[-1]):
            gap = np.max(np.abs(np.subtract(result, rounds[-1][0][1])))
            factors = wall / seconds[0][0], processor / seconds[0][1]
            cells = f"{wall:7.2f}   {factors[0]:6.1f}x   {processor:9.2f}   {factors[1]:6.1f}x   {gap:10.1e}"
            print(f"{name:52} {cells}", flush=True)


def timed(way):
    """Return the wall and processor seconds of a call, and its result."""
    start = time.perf_counter(), time.process_time()
    result = way()
    return (time.perf_counter() - start[0], time.process_time() - start[1]), result


def coco(options):
    """Evaluate boxes; construction of the data structures of the libraries is not timed."""
    random, count = np.random.default_rng(0), options.images
    truth, classes = boxes(random, (count, TRUTHS)), random.integers(0, CLASSES, (count, TRUTHS))
    # Some detections are near an object, and these often have its class.
    of = random.integers(0, 3 * TRUTHS, (count, DETECTED))
    rows, near = np.arange(count)[:, None], of % TRUTHS
    detected = np.where((of < TRUTHS)[..., None], truth[rows, near] + random.normal(0, 3, (count, DETECTED, 4)), 0)
    detected = np.where((of < TRUTHS)[..., None], detected.clip(1), boxes(random, (count, DETECTED)))
    labels = np.where((of < TRUTHS) & (random.random(of.shape) < 0.7), classes[rows, near], of * 4 % CLASSES)
    scores = random.random((count, DETECTED))

    def ours():
        state = Detections.empty(CLASSES)
        for n in range(count):
            state = state.update(n, detected[n], scores[n], labels[n], truth[n], classes[n])
        return list(state.compute().values())

    images, categories = [{"id": n} for n in range(count)], [{"id": n} for n in range(CLASSES)]
    annotations = [
        {"id": n * TRUTHS + m + 1, "image_id": n, "category_id": int(classes[n, m]), "iscrowd": 0}
        | {"bbox": truth[n, m].tolist(), "area": float(truth[n, m, 2] * truth[n, m, 3])}
        for n, m in np.ndindex(count, TRUTHS)
    ]
    results = [
        {"image_id": n, "category_id": int(labels[n, m]), "bbox": detected[n, m].tolist(), "score": float(scores[n, m])}
        for n, m in np.ndindex(count, DETECTED)
    ]

    def theirs(library, evaluation):
        with contextlib.redirect_stdout(io.StringIO()):
            dataset = library()
            dataset.dataset = {"images": images, "annotations": annotations, "categories": categories, "info": {}}
            dataset.createIndex()
            predicted = dataset.loadRes([dict(result) for result in results])

        def evaluate():
            with contextlib.redirect_stdout(io.StringIO()):
                run = evaluation(dataset, predicted, "bbox")
                run.evaluate()
                run.accumulate()
                run.summarize()
            return list(run.stats[:12])

        return evaluate

    from faster_coco_eval import COCO as FastCOCO
    from faster_coco_eval import COCOeval_faster
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    logging.getLogger("faster_coco_eval").setLevel(logging.ERROR)
    return {
        f"COCO, {count:,} images": ours,
        "  pycocotools": theirs(COCO, COCOeval),
        "  faster-coco-eval": theirs(FastCOCO, COCOeval_faster),
    }


def boxes(random, shape):
    """Draw boxes (left, top, width, height) of all sizes."""
    return np.concatenate([random.uniform(0, 400, (*shape, 2)), np.exp(random.uniform(1, 5.5, (*shape, 2)))], axis=-1)


def summaries(options):
    """Compute ROUGE of texts of 15 lines of 20 words."""
    from rouge_score.rouge_scorer import RougeScorer

    random = np.random.default_rng(0)
    texts = ["\n".join(sentence(random, 20) for _ in range(15)) for _ in range(2 * options.texts)]
    pairs = list(zip(texts[::2], texts[1::2]))
    scorer = RougeScorer([f"rouge{kind}" for kind in ROUGE])
    return {
        f"ROUGE-1, 2, L, Lsum, {len(pairs):,} pairs of 300 words": lambda: [
            [score.f for score in rouge(a, b, ROUGE).values()] for a, b in pairs
        ],
        "  rouge-score": lambda: [[score.fmeasure for score in scorer.score(b, a).values()] for a, b in pairs],
    }


def sentence(random, length):
    """Draw words by Zipf's law."""
    return " ".join(WORDS[place] for place in (len(WORDS) ** random.random(length)).astype(int) - 1)


def similarities(options):
    """Compute BERTScore with a random BERT, which is compiled beforehand."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers
    from bert_score import BERTScorer

    from lineage.data import tokenizers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    random = np.random.default_rng(0)
    texts = [sentence(random, random.integers(5, 40)) for _ in range(2 * options.sentences)]
    with tempfile.TemporaryDirectory() as folder:
        special = ("pad", "unknown", "cls", "sep", "mask")
        coder = tokenizers.kinds.WordPiece(2000, lowercase=True).train(texts, special)
        coder.save(folder)
        theirs = transformers.BertTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json", model_max_length=128)
        theirs.save_pretrained(folder)
        config = transformers.BertConfig(
            vocab_size=coder.vocab_size,
            hidden_size=options.width,
            num_hidden_layers=options.depth,
            num_attention_heads=options.width // 64,
            intermediate_size=4 * options.width,
            max_position_embeddings=128,
        )
        transformers.BertModel(config).save_pretrained(folder)
        encoder = Encoder(folder)
        scorer = BERTScorer(folder, num_layers=options.depth, device="cpu")
    ways = {
        f"BERTScore, {options.sentences:,} pairs, width {options.width}, depth {options.depth}": lambda: bert_score(
            texts[::2], texts[1::2], encoder
        ),
        "  bert-score": lambda: [part.numpy() for part in scorer.score(texts[::2], texts[1::2])],
    }
    for way in ways.values():
        way()
    return ways


def answers(options):
    """Compute SQuAD F1 of answers of 1 to 10 words with three references each."""
    random = np.random.default_rng(0)
    texts = [sentence(random, random.integers(1, 10)) for _ in range(4 * options.answers)]
    rows = [(texts[n], texts[n + 1 : n + 4]) for n in range(0, len(texts), 4)]
    return {f"SQuAD's F1, {len(rows):,} answers": lambda: [f1(answer, references) for answer, references in rows]}


TASKS = {"coco": coco, "rouge": summaries, "bert_score": similarities, "squad": answers}

if __name__ == "__main__":
    main()
