"""The command `score`: scores of files match the metric functions."""

import hashlib
import json

import numpy as np
import pytest
import sacrebleu

from lineage import launch
from lineage.evaluation.score import METRICS, parse
from lineage.metrics import embedding
from lineage.metrics.diversity import distinct, repetition, self_bleu, sentence_burstiness, word_burstiness
from lineage.metrics.embedding import Embedded
from lineage.metrics.summary import corpus_rouge, tokens, words
from lineage.metrics.translation import compare, d2l_bleu

OUTPUTS = ["a man rides a bicycle .", "two dogs run . two dogs run . two", "the caf\u00e9 is a house and a caf\u00e9"]
TRUTHS = ["a man rides a red bicycle .", "two dogs play", "the caf\u00e9 is in a house"]
OTHERS = ["a man on a bicycle .", "dogs run", "a caf\u00e9"]
IMAGES = {"images": [{"id": 7}, {"id": 3}], "categories": [{"id": 4, "name": "tree"}, {"id": 1, "name": "cat"}]}


def shown(value):
    return "nan" if value is None else f"{value:.3g}" if 0 < abs(value) < 0.001 else f"{value:.4f}"


@pytest.fixture
def scored(tmp_path, capsys):
    """Return a function that scores files and returns (scores, other fields), checking that output and file agree."""

    def put(name, lines):
        path = tmp_path / name
        path.write_text(lines if isinstance(lines, str) else "".join(f"{line}\n" for line in lines), encoding="utf-8")
        return str(path)

    def scored(metric, predictions, *references, options=(), suffix="txt"):
        out = put(f"out.{suffix}", predictions)
        files = [f"--references={put(f'{number}.{suffix}', lines)}" for number, lines in enumerate(references)]
        options = [f"--option={option}" for option in options]
        arguments = ["score", f"--metric={metric}", f"--predictions={out}", *files, *options]
        code = launch.main(arguments)
        printed = capsys.readouterr()
        assert code == 0, printed.err
        result = json.loads((tmp_path / f"out.{suffix}.{metric}.json").read_text(encoding="utf-8"))
        lines = printed.out.splitlines()
        assert lines[-2:] == [result["signature"], f"scores: {out}.{metric}.json"]
        table = dict(line.rsplit(maxsplit=1) for line in lines[:-2])
        assert table == {key: shown(value) for key, value in result["scores"].items()}
        return result.pop("scores"), result

    return scored


def squad(answers):
    """Return a data set in the SQuAD layout of questions with these answers."""
    asked = [{"id": name, "answers": [{"text": text} for text in texts]} for name, texts in answers.items()]
    return {"data": [{"paragraphs": [{"qas": asked[:1]}, {"qas": asked[1:]}]}]}


def test_translation_metrics_with_two_reference_files(scored):
    scores, rest = scored("bleu", OUTPUTS, TRUTHS, OTHERS, options=["tokenize=char", "lowercase=true", "samples=20"])
    theirs = sacrebleu.BLEU(tokenize="char", lowercase=True)
    expected = theirs.corpus_score(OUTPUTS, [TRUTHS, OTHERS], 20)
    assert scores == {"bleu": expected.score, "mean": expected._mean, "interval": expected._ci}
    assert rest["signature"] == str(theirs.get_signature())
    assert rest["options"]["smooth_method"] == "exp"
    assert rest["options"]["tokenize"] == "char"
    assert rest["command"].startswith("python launch.py score --metric=bleu --predictions=")
    assert rest["versions"]["sacrebleu"] == sacrebleu.__version__
    path = next(iter(rest["files"]))
    assert len(rest["files"]) == 3
    with open(path, "rb") as file:
        assert rest["files"][path] == hashlib.sha256(file.read()).hexdigest()
    both = [[*pair] for pair in zip(TRUTHS, OTHERS)]
    rouge, rest = scored("rouge", OUTPUTS, TRUTHS, OTHERS, options=["kinds=1,SU4", "samples=50", "stem=true", "beta=2"])
    ours = corpus_rouge(OUTPUTS, both, ("1", "SU4"), samples=50, beta=2.0, tokenize=lambda text: tokens(text, True))
    assert rouge["rougeSU4_recall"] == ours["SU4"]["mean"].recall
    assert rouge["rouge1_f_low"] == ours["1"]["low"].f
    assert len(rouge) == 10
    assert (
        rest["signature"]
        == "metric:rouge|kinds:1,SU4|beta:2.0|tokenize:ascii|stem:True|perl:False|samples:50|confidence:0.95|seed:0"
    )


def test_other_text_metrics(scored, tmp_path):
    assert scored("chrf", OUTPUTS, TRUTHS)[0] == {"chrf": sacrebleu.corpus_chrf(OUTPUTS, [TRUTHS]).score}
    assert scored("ter", OUTPUTS, TRUTHS)[0] == {"ter": sacrebleu.corpus_ter(OUTPUTS, [TRUTHS]).score}
    split = [[text.split() for text in texts] for texts in (OUTPUTS, TRUTHS)]
    assert scored("d2l_bleu", OUTPUTS, TRUTHS, options=["order=3"])[0] == {"d2l_bleu": d2l_bleu(*split, 3)}
    found = [words(text) for text in OUTPUTS]
    assert scored("distinct", OUTPUTS, options=["orders=2"])[0] == {"distinct_2": distinct(found, 2)}
    assert scored("repetition", OUTPUTS, options=["order=2"])[0] == {"repetition": repetition(found, 2)}
    assert scored("self_bleu", OUTPUTS)[0] == {"self_bleu": self_bleu(OUTPUTS)}
    whole = "\n".join(OUTPUTS)
    means = np.mean(list(word_burstiness(words(whole)).values()))
    expected = {"sentence_burstiness": sentence_burstiness(whole), "word_burstiness": means}
    assert scored("burstiness", OUTPUTS)[0] == expected
    assert scored("squad", ["The Cat", "dog"], ["cat", "a dog barks"])[0] == {"exact_match": 0.5, "f1": (1 + 2 / 3) / 2}
    assert scored("distinct", ["a"], options=["orders=1,2"])[0] == {"distinct_1": 1, "distinct_2": None}
    (tmp_path / "before.txt").write_text("\n".join(OTHERS), encoding="utf-8")
    test = ["samples=50", "test=ar", f"baseline={tmp_path / 'before.txt'}"]
    scores, rest = scored("chrf", OUTPUTS, TRUTHS, options=test)
    ours, signature = compare("chrf", {"a": OTHERS, "b": OUTPUTS}, TRUTHS, test="ar", samples=50)
    assert (scores["baseline"], scores["p_value"]) == (ours["a"].score, ours["b"].p_value)
    assert rest["signature"] == signature
    assert any(path.endswith("before.txt") for path in rest["files"])


def test_embedding_metrics(scored, tmp_path, monkeypatch):
    asked = []

    class Encoder:
        def __init__(self, *asked_for):
            asked.append(asked_for)

        def __call__(self, texts):
            ids = [np.array([0, *(7 + len(word) % 5 for word in text.split()), 1]) for text in texts]
            return [Embedded(row, np.cos(np.arange(8) * row[:, None]).astype(np.float32)) for row in ids]

        def skip(self):
            return frozenset({0, 1})

    monkeypatch.setattr("lineage.evaluation.encoder.Encoder", Encoder)
    (tmp_path / "zero.tsv").write_text("LAYER,P,R,F\n0,0.5,0.5,0.5\n2,0.1,0.2,0.3\n")
    options = ["model=bert", "layer=2", "idf=true", f"baseline={tmp_path / 'zero.tsv'}"]
    scores, rest = scored("bert_score", OUTPUTS, TRUTHS, OTHERS, options=options)
    both = [[*pair] for pair in zip(TRUTHS, OTHERS)]
    theirs = embedding.bert_score(OUTPUTS, both, Encoder(), idf=True, baseline=(0.1, 0.2, 0.3))
    assert scores == {f"bert_score_{part}": values.mean() for part, values in theirs._asdict().items()}
    assert any(path.endswith("zero.tsv") for path in rest["files"])
    scores, _ = scored("mover_score", OUTPUTS, TRUTHS, OTHERS, options=["model=bert", "size=2"])
    theirs = embedding.mover_score(OUTPUTS, both, Encoder(), size=2, skip=frozenset({0, 1}))
    assert scores == {"mover_score": theirs.mean()}
    assert asked == [("bert", 2), (), ("bert", (-5, -4, -3, -2, -1)), ()]


def test_json_objects_lists_and_tags(scored):
    lines = [{"prediction": "cat", "references": ["dog", "the cat"]}, {"prediction": "", "references": []}]
    rows = list(map(json.dumps, lines))
    scores = scored("squad", rows, rows, suffix="jsonl")[0]
    assert len(scores) == 6
    assert set(scores.values()) == {1}
    tags = [["O", "B-X", "I-X"], ["B-Y"]]
    truths = [["O", "B-X", "O"], ["B-Y"]]
    scores, _ = scored("tagging", list(map(json.dumps, tags)), list(map(json.dumps, truths)), suffix="jsonl")
    expected = {"precision": 0.5, "recall": 0.5, "f1": 0.5, "macro_f1": 0.5, "weighted_f1": 0.5, "f1 X": 0, "f1 Y": 1}
    expected["accuracy"] = 0.75
    assert scores == expected
    assert scored("tagging", map(" ".join, tags), map(" ".join, truths))[0] == expected
    assert scored("tagging", ["O I-X"], ["O I-X"], options=["scheme=IOB2"])[0]["f1"] == 0


def test_tags_that_are_not_chunks_have_an_accuracy(scored):
    assert scored("tagging", ["NOUN VERB", "X"], ["NOUN NOUN", "X"])[0] == {"accuracy": 2 / 3}
    assert scored("tagging", ["N V O", "P"], ["N N O", "P"])[0] == {"accuracy": 3 / 4}  # O: pronoun
    assert scored("tagging", ["PER O", "O"], ["PER LOC", "O"])[0] == {"accuracy": 2 / 3}
    assert scored("tagging", ["B I", "O"], ["B I", "O"])[0]["f1"] == 1


def test_labels_that_are_true_or_false(scored):
    assert (
        scored("accuracy", ['{"label": "True"}'] * 2, ['{"label": true}', "false"], suffix="jsonl")[0]["accuracy"]
        == 0.5
    )


def test_values_and_numbers(scored):
    """Check labels that are numbers in JSON, and those of a regression."""
    truth = [json.dumps({"text": "a", "label": label}) for label in (1, 0, 1)]
    found = [json.dumps({"label": label}) for label in ("1", "0", "0")]
    assert scored("accuracy", found, truth, suffix="jsonl")[0]["accuracy"] == 2 / 3
    values = [json.dumps({"value": value}) for value in (0.1, 0.2, 1e-7)]
    expected = {"pearson": -0.8660255, "spearman": -0.8660254, "mse": (0.9**2 + 0.2**2 + 1) / 3}
    assert scored("regression", values, truth, suffix="jsonl")[0] == pytest.approx(expected, rel=1e-5)


def test_squad_documents(scored):
    truth = squad({"x": ["a dog", "cat"], "y": ["fish", "the fish"], "z": []})
    answers = {"z": "", "y": "The Fish!", "x": "cat barks", "other": "a"}
    scores, _ = scored("squad", json.dumps(answers), json.dumps(truth), suffix="json")
    parts = {"answered_exact_match": 0.5, "answered_f1": (2 / 3 + 1) / 2}
    whole = {"exact_match": pytest.approx(2 / 3), "f1": pytest.approx((2 / 3 + 1 + 1) / 3)}
    assert scores == whole | parts | {"unanswerable_exact_match": 1, "unanswerable_f1": 1}
    del truth["data"][0]["paragraphs"][1]["qas"][1]
    assert scored("squad", json.dumps(answers), json.dumps(truth), suffix="json")[0] == {
        name.removeprefix("answered_"): value for name, value in parts.items()
    }


def test_coco_boxes(scored):
    box, far = [0, 0, 10, 10], [50, 50, 10, 10]
    entry = {"iscrowd": 0, "area": 100, "bbox": box}
    tree, cat = {"image_id": 7, "category_id": 4}, {"image_id": 3, "category_id": 1}
    truth = IMAGES | {"annotations": [entry | tree, entry | cat]}
    found = [tree | {"bbox": box, "score": 0.5}, cat | {"bbox": far, "score": 0.9}]
    scores, _ = scored("coco", json.dumps(found), json.dumps(truth), suffix="json")
    assert scores["ap"] == pytest.approx(0.5)
    assert (scores["ap cat"], scores["ap tree"], scores["ap_large"]) == (0, pytest.approx(1), None)
    assert len(scores) == 14


def test_voc_boxes(scored):
    def entry(image, category, left, size=10, **rest):
        about = {"image_id": image, "category_id": category, "bbox": [left, 0, size, 10]}
        return about | (rest if "score" in rest else {"iscrowd": 0, "area": 100, **rest})

    true = [entry(7, 4, 0), entry(7, 4, 20), entry(3, 4, 0), entry(3, 1, 0), entry(3, 1, 50, difficult=1)]
    truth = IMAGES | {"annotations": true}
    found = [entry(7, 4, 0, score=0.9), entry(7, 4, 90, score=0.8), entry(3, 4, 0, score=0.7)]
    found += [entry(3, 1, 50, score=0.9), entry(3, 1, 0, 6, score=0.5)]
    files = json.dumps(found), json.dumps(truth)

    def scores(**options):
        given = [f"{key}={value}" for key, value in options.items()]
        return scored("voc", *files, options=given, suffix="json")[0]

    assert scores() == pytest.approx({"map": 7 / 9, "ap tree": 5 / 9, "ap cat": 1})  # recalls 1/3 and 2/3
    assert scores(points=11)["ap tree"] == pytest.approx((4 * 1 + 3 * 2 / 3) / 11)
    assert scores(threshold=0.6)["ap cat"] == 0  # the IoU is exactly 0.6
    assert scores(threshold=0.6, pixel=1)["ap cat"] == 1  # 77 / 121
    assert scores(by_image="true") == pytest.approx({"map": (0.5 + 1 + 1) / 3})


def test_options_are_converted_to_the_types_of_the_defaults():
    assert parse("rouge", ["kinds=L", "beta=2", "stem=false"])["kinds"] == ("L",)
    assert parse("distinct", ["orders=1,5"])["orders"] == (1, 5)
    assert parse("bleu", ["smooth_value=0.5", "tokenize=13a"])["smooth_value"] == 0.5
    assert parse("bleu", ["tokenize=none"])["tokenize"] == "none"  # a tokenizer, not the default None
    assert parse("bleu", ["lowercase=True"])["lowercase"] is True
    assert parse("bleu", ["lowercase=false", "force=True"])["lowercase"] is False
    assert all(parse(name, []) is not None for name in METRICS)


def test_small_scores_are_not_rounded_to_zero(scored):
    scores, _ = scored("accuracy", ["a", *["b"] * 19_999], ["a"] * 20_000)
    assert scores["accuracy"] == 5e-5
    assert shown(5e-5) == "5e-05"
