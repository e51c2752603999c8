"""The command `predict`: its files scored by the command `score` have the metrics of the run's own evaluation."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from scipy.special import softmax

from lineage import launch
from lineage.configs import cli
from lineage.data import EvaluationBatches, Facts, Loader, Question
from lineage.data.content import Arrays
from lineage.data.inputs import Inputs, Readable, from_files
from lineage.data.sources import shapes
from lineage.data.sources.packages import Digits
from lineage.data.transforms import boxes
from lineage.evaluation.prediction import with_categories
from lineage.evaluation.sampling import Sampler
from lineage.models.decoding import continuous
from lineage.tasks.object_detection import ObjectDetection
from lineage.train import loop
from lineage.train.experiment import Experiment
from tests.data.test_questions import CONTEXT, squad
from tests.tasks.test_detection import TINY as DETECTION

pytestmark = pytest.mark.usefixtures("no_report")
BERT = {"model.dropout": 0.0, "tokenizer": "bytes", "task.sequence_length": 24}
MASKED = {"source": "stdlib", "source.max_bytes": 20_000, "task.sequence_length": 24}


@pytest.fixture
def trained(tiny, tmp_path):
    """Return `trained(model, changes)`, which trains for a few steps and returns the folder and the metrics."""

    def train(model, changes, steps=2):
        every = {"total_steps": steps, "evaluate_every_steps": steps, "save_every_steps": steps}
        folder = tmp_path / "run"
        return folder, loop.train(tiny(model, dict(changes) | every), folder, devices=jax.devices()[:1])

    return train


@pytest.fixture
def call(capsys):
    """Return `call(*arguments)`, which runs a command and returns its exit code, output and messages."""

    def call(*arguments):
        code = launch.main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def predict(call, tmp_path):
    """Return `predict(folder, inputs, *options)`, which writes a file and returns its lines as objects."""

    def predict(folder, inputs, *options, output="out.jsonl"):
        code, _, said = call("predict", folder, f"--inputs={inputs}", f"--output={tmp_path / output}", *options)
        assert code == 0, said
        lines = (tmp_path / output).with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    return predict


@pytest.fixture
def score(call, tmp_path):
    """Return `score(metric, predictions, references)`, which returns the scores of a file."""

    def score(metric, predictions, references):
        files = f"--predictions={tmp_path / predictions}", f"--references={references}"
        code, _, said = call("score", f"--metric={metric}", *files, f"--output={tmp_path / 'scores.json'}")
        assert code == 0, said
        return json.loads((tmp_path / "scores.json").read_text())["scores"]

    return score


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def labeled(tmp_path, count=21):
    """Write labeled texts, two of which are longer than the model; return the path of a .tsv and one of a .jsonl."""
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcd "), rng.integers(3, 20))).strip() or "a" for _ in range(count)]
    texts[3], texts[9] = ("".join(rng.choice(list("abcd"), 60)) for _ in range(2))
    rows = [{"text": text, "label": str(rng.choice(["no", "yes", "maybe"]))} for text in texts]
    rows[0]["label"], rows[1]["label"], rows[2]["label"] = "no", "yes", "maybe"
    table = tmp_path / "labels.tsv"
    table.write_text("".join(f"{row['text']}\t{row['label']}\n" for row in rows))
    return table, write_jsonl(tmp_path / "labels.jsonl", rows)


def test_classes_of_texts(trained, predict, score, call, tmp_path):
    """Check the accuracy, other formats of the inputs, and the rule for long texts."""
    table, lines = labeled(tmp_path)
    source = {"source": f"labels:{table}", "source.validation_path": str(table), "task.name": "text_classification"}
    source |= {"task.long_text": "segments", "task.stride": 10}
    folder, metrics = trained("bert", BERT | source | {"model.num_classes": 3}, steps=40)
    found = predict(folder, lines)
    assert len(found) == 21
    for each in found:
        assert set(each["probabilities"]) == {"no", "yes", "maybe"}
        assert sum(each["probabilities"].values()) == pytest.approx(1, abs=1e-5)
        assert each["label"] == max(each["probabilities"], key=each["probabilities"].get)
    assert np.std([each["probabilities"]["no"] for each in found]) > 0.01
    assert score("accuracy", "out.jsonl", lines)["accuracy"] == pytest.approx(
        metrics["validation/mean_pooled_accuracy"], abs=1e-6
    )
    experiment = Experiment(cli.load(str(folder / "config.json"))[0], folder)
    split = experiment.data.splits["validation"]
    logits = experiment.context().rows(experiment.task.forward, experiment.restore().variables(), split)
    chances = softmax(logits, axis=-1)[split.source.origins == 3]
    assert np.std(chances, axis=0).max() > 0.01
    expected = dict(zip(experiment.data.facts.class_names, chances.mean(axis=0).tolist()))
    assert found[3]["probabilities"] == pytest.approx(expected, abs=1e-5)

    texts = [json.loads(line)["text"] for line in lines.read_text().splitlines()]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    (tmp_path / "texts.csv").write_text("n,review\n" + "".join(f'{n},"{text}"\n' for n, text in enumerate(texts)))
    others = [(tmp_path / "texts.txt",), (f"labels:{table}",), (tmp_path / "texts.csv", "--columns=review")]
    for number, (inputs, *options) in enumerate(others):
        code, printed, said = call("predict", folder, f"--inputs={inputs}", *options)
        assert code == 0, said
        assert [json.loads(line) for line in printed.splitlines()] == found, number


def test_values_of_texts(trained, predict, score, call, tmp_path):
    """Check the scores of values, of which some are means over the windows of a long text."""
    table = tmp_path / "numbers.tsv"
    table.write_text("".join(f"{'ab' * n}\t{n / 10}\n" for n in range(1, 19)))
    source = {"source": f"labels:{table}", "source.validation_path": str(table), "task.name": "text_regression"}
    folder, _ = trained("bert", BERT | source | {"model.num_classes": 1, "task.long_text": "segments"}, steps=5)
    code, printed, said = call("evaluate", f"--workdir={folder}")
    assert code == 0, said
    metrics = json.loads(printed)
    found = predict(folder, f"labels:{table}")
    assert len(found) == 18
    labels = write_jsonl(tmp_path / "labels.jsonl", [{"text": "a", "label": n / 10} for n in range(1, 19)])
    scores = score("regression", "out.jsonl", labels)
    assert scores == {name: metrics[f"validation/{name}"] for name in ("pearson", "spearman", "mse")}
    assert 0 < abs(scores["pearson"]) < 1
    values = np.array([each["value"] for each in found])
    assert scores["mse"] == pytest.approx(((values - np.arange(1, 19) / 10) ** 2).mean(), rel=1e-6)
    assert scores["pearson"] == pytest.approx(np.corrcoef(values, np.arange(18))[0, 1], abs=1e-5)


def test_tags_of_words(trained, predict, score, call, tmp_path):
    """Check the F1 of sentences, one of which is several sequences, and words in other formats."""
    rng = np.random.default_rng(1)
    tags = [rng.choice(["O", "B-X", "I-X"], size).tolist() for size in (4, 1, 9, 30, 2, 7)]
    words = [["".join(rng.choice(list("abc"), rng.integers(1, 4))) for _ in some] for some in tags]
    path = tmp_path / "tags.conllu"
    lines = [
        "".join(f"{i}\t{word}\t_\t{tag}\t_\t_\t_\t_\t_\t_\n" for i, (word, tag) in enumerate(zip(*some), 1))
        for some in zip(words, tags)
    ]
    path.write_text("\n".join(lines) + "\n")
    source = {"source": f"conllu:{path}", "source.validation_path": str(path), "task.name": "token_classification"}
    folder, metrics = trained("bert", BERT | source | {"model.num_classes": 3}, steps=20)
    found = predict(folder, path)
    assert [each["words"] for each in found] == words
    assert [len(each["tags"]) for each in found] == [4, 1, 9, 30, 2, 7]
    scores = score("tagging", "out.jsonl", write_jsonl(tmp_path / "true.jsonl", tags))
    assert scores["f1"] > 0
    for name in ("f1", "precision", "recall", "accuracy"):
        assert scores[name] == metrics[f"validation/{name}"]
    assert score("tagging", "out.jsonl", path) == scores
    (tmp_path / "words.txt").write_text("".join(" ".join(some) + "\n" for some in words))
    write_jsonl(tmp_path / "words.jsonl", [{"words": some} for some in words])
    for name in ("words.txt", "words.jsonl"):
        assert predict(folder, tmp_path / name, output=f"out_{name}.jsonl") == found, name


@pytest.mark.parametrize("unanswerable", [False, True])
def test_answers_to_questions(unanswerable, trained, predict, score, call, tmp_path):
    asked = [
        ("Who?", CONTEXT, [(13, "Normans")]),
        ("When?", CONTEXT, [(3, "1066")]),
        ("What?", CONTEXT[:9], [(0, "In")]),
    ]
    path = squad(tmp_path / "squad.json", asked + [("Why?", CONTEXT, [])] * unanswerable)
    options = {"task.name": "question_answering", "tokenizer": "words", "task.sequence_length": 16, "task.stride": 4}
    folder, metrics = trained("bert", BERT | options | {"source": f"squad:{path}", "source.validation_path": path}, 25)
    found = predict(folder, path, output="out.json")
    scores = score("squad", "out.json", path)
    for name in ("exact_match", "f1"):
        assert scores[name] == pytest.approx(metrics[f"validation/{name}"], abs=1e-9)
    assert scores["f1"] > 0
    assert [each["id"] for each in found] == list(map(str, range(len(found))))
    for each in found:
        best = [answer["score"] for answer in each["n_best"]]
        assert best == sorted(best, reverse=True)
        assert len({answer["text"] for answer in each["n_best"]}) == len(best) > 1
        assert each["prediction"] in ("", each["n_best"][0]["text"])
        assert ("no_answer_score" in each) == unanswerable
    for threshold, empty in ((-1e9, unanswerable), (1e9, False)):
        code, printed, said = call(
            "predict", folder, f"--inputs={path}", f"--config.task.no_answer_threshold={threshold}"
        )
        assert code == 0, said
        assert {json.loads(line)["prediction"] == "" for line in printed.splitlines()} == {empty}


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "task"), [("transformer", "sequence_to_sequence"), ("gpt", "conditional_lm")])
def test_generated_texts(model, task, trained, predict, score, tmp_path):
    """Check BLEU, and that decoding options change the texts."""
    rng = np.random.default_rng(0)
    rows = [" ".join(rng.choice(["a", "b", "cc", "d"], rng.integers(4, 9))) for _ in range(70)]
    targets = [f"x y x y {row[0]}" for row in rows]
    path = write_jsonl(
        tmp_path / "pairs.jsonl", [{"input": row, "target": target} for row, target in zip(rows, targets)]
    )
    references = write_jsonl(tmp_path / "references.jsonl", targets)
    source = {"source": f"pairs:{path}", "source.validation_path": str(path), "task.name": task, "tokenizer": "bytes"}
    sizes = {"task.sequence_length": 48, "model.max_length": 60, "sampling.max_new_tokens": 12}
    folder, metrics = trained(model, source | sizes | {"sampling.temperature": 0.0}, steps=60)
    found = predict(folder, path)
    assert len(found) == 70
    assert score("bleu", "out.jsonl", references)["bleu"] == pytest.approx(metrics["validation/bleu"], abs=1e-9)
    assert metrics["validation/bleu"] > 0
    (tmp_path / "inputs.txt").write_text("".join(f"{row}\n" for row in rows))
    assert predict(folder, tmp_path / "inputs.txt", output="lines.jsonl") == found
    assert len(predict(folder, path, "--config.sampling.num_beams=3", output="beams.jsonl")) == 70
    short = predict(folder, path, "--config.sampling.max_new_tokens=3", output="short.jsonl")
    assert [each["prediction"] for each in short] == [each["prediction"][:3] for each in found]


def test_generation_is_split_over_the_devices(tiny, monkeypatch):
    """Check that each device generates its part of a batch, and that the tokens are those of one device."""
    config = tiny("gpt", {"tokenizer": "bytes", "sampling.temperature": 1.0})
    found, made, run = {}, [], continuous._run

    def recorded(*args):
        state = run(*args)
        made.append(state[0])
        return state

    monkeypatch.setattr(continuous, "_run", recorded)
    for count in (1, 8):
        experiment = Experiment(config, devices=jax.devices()[:count])
        variables = jax.jit(experiment.make_state, out_shardings=experiment.state_shardings)().variables()
        batches = experiment.context().inputs(
            [chr(97 + number) * (1 + number % 8) for number in range(16)], Loader(batch_size=16)
        )
        found[count] = list(Sampler(experiment.context()).texts_of(variables, [batches]))
        assert len({str(shard.index) for shard in made[-1].tokens.addressable_shards}) == count
    assert found[1] == found[8]
    assert len(set(found[1])) == 16


def test_continued_prompts(trained, call, tmp_path):
    """Check that prompts of different lengths in a batch are continued as one by one."""
    folder, _ = trained("gpt", {"tokenizer": "bytes"})
    prompts = ["import", "d", "def f", "xyz("]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n")
    greedy = "--config.sampling.temperature=0"
    code, printed, said = call("predict", folder, f"--inputs={tmp_path / 'prompts.txt'}", greedy)
    assert code == 0, said
    found = [json.loads(line)["prediction"] for line in printed.splitlines()]
    for prompt, text in zip(prompts, found):
        _, printed, _ = call("generate", f"--workdir={folder}", f"--prompt={prompt}", greedy)
        assert printed == f"{prompt}{text}\n"
    (tmp_path / "prompts.txt").write_text("".join(f"{'ab' * (number % 4)}c\n" for number in range(40)))
    samples = []
    for size in (8, 16):
        code, printed, said = call("predict", folder, f"--inputs={tmp_path / 'prompts.txt'}", f"--batch-size={size}")
        assert code == 0, said
        samples.append([json.loads(line)["prediction"] for line in printed.splitlines()])
    assert samples[0] == samples[1]
    assert len(set(samples[0])) > 30
    (tmp_path / "prompts.txt").write_text("import\n\n")
    code, _, said = call("predict", folder, f"--inputs={tmp_path / 'prompts.txt'}")
    assert code == 1
    assert "error: The text '' has no token: a language model continues at least one." in said
    (tmp_path / "prompts.txt").write_text("b" * 12 + "\n")
    retried = "predict", folder, f"--inputs={tmp_path / 'prompts.txt'}", f"--output={tmp_path / 'out.jsonl'}"
    code, _, said = call(*retried, "--config.sampling.max_new_tokens=9")
    assert code == 1
    assert "error: the prompt has 12 tokens and sampling.max_new_tokens is 9: together they must be at most" in said
    code, _, said = call(*retried, "--config.sampling.max_new_tokens=2")  # the file is empty
    assert code == 0, said


def test_filled_masks(trained, predict, score, call, tmp_path):
    """Check tokens and probabilities against the model."""
    folder, _ = trained("bert", MASKED | {"task.name": "masked_lm", "model.dropout": 0.0})
    (tmp_path / "masked.txt").write_text("def <mask>oo(<mask>)\nno mask\n")
    code, printed, said = call("predict", folder, f"--inputs={tmp_path / 'masked.txt'}")
    assert code == 0, said
    first, second = map(json.loads, printed.splitlines())
    assert second == {"prediction": "no mask", "masks": []}
    assert len(first["masks"]) == 2
    for mask in first["masks"]:
        chances = [each["probability"] for each in mask]
        assert chances == sorted(chances, reverse=True)
        assert len(chances) == 5
    best = [mask[0]["token"] for mask in first["masks"]]
    assert first["prediction"] == f"def {best[0]}oo({best[1]})"
    predict(folder, tmp_path / "masked.txt")
    hidden = write_jsonl(tmp_path / "hidden.jsonl", [{"masks": [best[0], first["masks"][1][2]["token"]]}, {}])
    assert score("fill_mask", "out.jsonl", hidden) == {"accuracy": 0.5, "any_accuracy": 1}
    (tmp_path / "hidden.txt").write_text("a b\nc\n")
    code, _, said = call("score", "--metric=fill_mask", f"--predictions={tmp_path / 'out.jsonl'}",
                         f"--references={tmp_path / 'hidden.txt'}")  # fmt: skip
    assert code == 1
    assert "Text 2 has 0 masks and 1 hidden tokens." in said


@pytest.mark.thorough
def test_detected_objects(trained, predict, score, tmp_path, monkeypatch):
    """Check COCO's average precision of objects in pixels, with the category ids of a file, and larger images."""
    monkeypatch.setattr(shapes, "SIZES", {"train": 64, "validation": 30, "test": 2})
    folder, metrics = trained("detr", DETECTION | {"task.max_boxes": 6, "model.num_queries": 8}, steps=60)
    names = list(shapes.SHAPES)
    truth = {"categories": [{"id": 7 * n, "name": name} for n, name in enumerate(reversed(names), 1)]}
    ids = {each["name"]: each["id"] for each in truth["categories"]}
    truth |= {"images": [], "annotations": []}
    (tmp_path / "images").mkdir()
    for number in range(30):
        example = shapes.DrawnShapes("validation", 16)[number]
        image = Image.fromarray(example["image"])
        image.save(tmp_path / f"images/{number}.png")
        truth["images"].append({"id": 100 + number, "file_name": f"{number}.png"})
        for (left, top, right, bottom), kind in zip(example["boxes"].tolist(), example["classes"]):
            box = [left, top, right - left, bottom - top]
            entry = {"image_id": 100 + number, "category_id": ids[names[kind]], "bbox": box}
            truth["annotations"].append(entry | {"area": box[2] * box[3], "iscrowd": 0})
    path = tmp_path / "instances.json"
    path.write_text(json.dumps(truth))
    found = predict(folder, f"{path},{tmp_path / 'images'}", output="out.json")
    scores = score("coco", "out.json", path)
    for name in ("ap", "ap_50", "ap_75"):
        assert scores[name] == pytest.approx(metrics[f"validation/{name}"], abs=1e-6)
    assert scores["ap"] > 0

    def placed(rows):
        return np.array([[each["bbox"] for each in row["objects"]] for row in rows])

    own = predict(folder, "shapes", "--split=validation", output="own.jsonl")
    assert [each["image_id"] for each in own] == list(range(30))
    np.testing.assert_allclose(placed(own), placed(found), atol=1e-4)
    image.resize((32, 64), Image.Resampling.NEAREST).save(tmp_path / "large.png")
    (large,) = predict(folder, tmp_path / "large.png", output="large.jsonl")
    assert large["file"] == "large.png"
    image.resize((8, 16), Image.Resampling.NEAREST).save(tmp_path / "small.png")
    (small,) = predict(folder, tmp_path / "small.png", output="small.jsonl")
    np.testing.assert_allclose(placed([large]), 4 * placed([small]), rtol=0.2, atol=1)


def test_boxes_are_in_pixels_of_the_original_image():
    """Check an image that is higher than wide: its size in a batch, and a box."""
    facts = Facts(num_classes=2, class_names=("a", "b"), image_size=(16, 16), channels=3, mean=(0.5,), std=(0.5,))
    images = Readable(Arrays({"image": np.zeros((1, 64, 32, 3), np.uint8)}), (16, 16, 3), True, True)
    transform = boxes.Transform([boxes.Resize(16, 16, 16)], 16, 4, facts.mean, facts.std, training=False)
    (batch,) = EvaluationBatches(source=images, transform=transform, loader=Loader(batch_size=1))
    np.testing.assert_array_equal(batch["size"], [[64, 32]])
    outputs = np.array([[[0.0, 5.0, 0.0]]]), np.array([[[0.25, 0.5, 0.5, 0.125]]]), batch["size"]
    ((found,),) = (each["objects"] for each in ObjectDetection().predict(outputs, images, facts))
    assert (found["category_id"], found["category"], found["bbox"]) == (2, "b", [0, 28, 16, 8])
    assert found["score"] == pytest.approx(np.exp(5) / (np.exp(5) + 2))


def write_digits(tmp_path):
    """Write the test images of `digits` as files; return their folder and a file of the labels."""
    examples = Digits().images().splits["test"].features
    for number, image in enumerate(examples["image"]):
        (tmp_path / "digits").mkdir(exist_ok=True)
        Image.fromarray(image[..., 0]).save(tmp_path / f"digits/{number:03}.png")
    return tmp_path / "digits", write_jsonl(tmp_path / "labels.jsonl", [str(label) for label in examples["label"]])


def test_classes_of_images(trained, predict, score, call, tmp_path):
    """Check the accuracy, images from files, and images that cannot be read."""
    folder, metrics = trained("vit", {}, steps=40)
    found = predict(folder, "digits", "--split=test")
    images, labels = write_digits(tmp_path)
    assert score("accuracy", "out.jsonl", labels)["accuracy"] == pytest.approx(metrics["test/accuracy"], abs=1e-6)
    assert metrics["test/accuracy"] > 0.2
    files = predict(folder, images, output="files.jsonl")
    assert files == [{"file": f"{number:03}.png", **each} for number, each in enumerate(found)]
    code, _, said = call("predict", folder, "--inputs=digits")
    assert code == 1
    assert "--split is '': it must be one of the splits of the inputs, train, test." in said

    (images / "005.png").write_bytes(b"no image")
    Image.new("L", (9, 8)).save(images / "300.png")
    out = f"--output={tmp_path / 'bad.jsonl'}"
    code, _, said = call("predict", folder, f"--inputs={images}", out)
    assert code == 1
    assert f"error: Image 5: {images}/005.png cannot be read as an image: " in said
    code, _, said = call("predict", folder, f"--inputs={images}", out, "--skip-bad=1")
    assert code == 1
    assert "error: Image 300: The image has the shape (8, 9, 1): the model's images have (8, 8, 1)." in said
    assert len((tmp_path / "bad.jsonl").read_text().splitlines()) == 256  # four batches of 64
    code, _, said = call("predict", folder, f"--inputs={images}", out, "--skip-bad=2")
    assert code == 0, said
    assert "359 predictions (2 images could not be read): " in said
    lines = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert [number for number, each in enumerate(lines) if each != files[number]] == [5, 300]
    assert lines[5].keys() == lines[300].keys() == {"file", "error"}


def test_features(trained, predict, call, tmp_path):
    """Check the features of images against those of probes, and those of texts against the hidden states."""
    folder, _ = trained("vit", {}, steps=1)
    predict(folder, "digits", "--split=test", "--features", output="features.npz")
    found = np.load(tmp_path / "features.npz")["features"]
    experiment = Experiment(cli.load(str(folder / "config.json"))[0], folder)
    context, batches = experiment.context(), experiment.data.splits["test"]
    model = experiment.task.feature_extractor(experiment.model)
    expected = context.rows(experiment.task.forward, experiment.restore().variables(), batches, model)
    assert found.shape == (359, 16)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    code, _, said = call("predict", folder, "--inputs=digits", "--split=test", f"--output={tmp_path / 'x.npz'}")
    assert code == 1
    assert "x.npz': .npz is for --features without skipped images." in said


@pytest.mark.thorough
def test_features_of_texts(trained, predict, tmp_path):
    folder, _ = trained("bert", MASKED | {"task.name": "masked_lm", "model.dropout": 0.0}, steps=1)
    texts = ["import os", "d"]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    found = predict(folder, tmp_path / "texts.txt", "--features")
    experiment = Experiment(cli.load(str(folder / "config.json"))[0], folder)
    variables, encoder = experiment.restore().variables(), experiment.model
    for each, text in zip(found, texts):
        tokens = experiment.data.tokenizer.encode(text)[None]
        hidden = encoder.apply(variables, jnp.asarray(tokens), method="encode")
        np.testing.assert_allclose(each["features"], hidden[0].mean(axis=0), atol=1e-5)


@pytest.mark.thorough
def test_reconstructed_images(trained, predict, score, call, tmp_path):
    """Check the masked images, that they do not depend on the batch size, their error, and that they need a file."""
    sizes = {"model.patch_size": 2, "model.decoder_depth": 1, "model.decoder_width": 8, "model.decoder_num_heads": 2}
    folder, _ = trained("mae", sizes | {"task.name": "masked_autoencoding", "task.mask_rate": 0.5}, steps=1)
    found = predict(folder, "digits", "--split=test")
    assert found[300] == {"masked": "out/000300_masked.png", "reconstructed": "out/000300_reconstructed.png"}
    predict(folder, "digits", "--split=test", "--batch-size=24", output="small.jsonl")
    digits = Digits().images().splits["test"].features["image"]
    for number in (0, 358):
        masked, painted = (np.asarray(Image.open(tmp_path / f"out/{number:06}_{name}.png")) for name in found[0])
        seen = masked == digits[number, ..., 0]
        assert 16 <= 64 - seen.sum() <= 32  # of the masked half, some pixels are gray already
        assert (painted == digits[number, ..., 0])[seen & (masked != 128)].all()
        again = np.asarray(Image.open(tmp_path / f"small/{number:06}_masked.png"))
        np.testing.assert_array_equal(masked, again)
    images, _ = write_digits(tmp_path)
    painted = np.stack([np.asarray(Image.open(tmp_path / each["reconstructed"])) for each in found])
    error = np.mean((painted / 255 - digits[..., 0] / 255) ** 2)
    scores = score("reconstruction", "out.jsonl", images)
    assert scores == pytest.approx({"mse": error, "psnr": -10 * np.log10(error)})
    assert score("reconstruction", "out.jsonl", tmp_path / "out.jsonl") == {"mse": 0, "psnr": None}
    code, _, said = call("predict", folder, "--split=test")
    assert code == 1
    assert "The predictions have images (masked, reconstructed): give an --output to write them beside." in said


@pytest.mark.thorough
def test_interrupted_predictions_continue(trained, predict, call, tmp_path):
    """Check that a file that ends anywhere is completed, also where tokens are sampled, and what is refused."""
    folder, _ = trained("gpt", {"tokenizer": "bytes", "sampling.temperature": 1.0}, steps=1)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"a{number}\n" for number in range(50)))
    found = predict(folder, prompts, "--batch-size=8")
    assert len({each["prediction"] for each in found}) >= 8  # those of a batch differ
    path = tmp_path / "out.jsonl"
    whole = path.read_bytes()
    for size in (0, 1, whole.index(b"\n") + 1, len(whole) // 2, len(whole) - 1, len(whole)):
        path.write_bytes(whole[:size])
        assert predict(folder, prompts, "--batch-size=8") == found
        assert path.read_bytes() == whole
    for option, what in (
        ("--config.sampling.temperature=0.5", "config.sampling.temperature"),
        ("--batch-size=16", "batch_size, config.loader.evaluation_batch_size"),
        ("--columns=a", "inputs"),
    ):
        options = ["--batch-size=8", option]
        code, _, said = call("predict", folder, f"--inputs={prompts}", f"--output={path}", *options)
        assert code == 1
        assert f"out.jsonl has predictions of another {what}: choose another --output, or delete it." in said
    prompts.write_text("b\n")
    code, _, said = call("predict", folder, f"--inputs={prompts}", f"--output={path}", "--batch-size=8")
    assert "has predictions of another inputs" in said
    (tmp_path / "out.jsonl.about.json").unlink()
    code, _, said = call("predict", folder, f"--inputs={prompts}", f"--output={path}", "--batch-size=8")
    assert "has predictions not of this command" in said
    assert path.read_bytes() == whole
    code, _, said = call("predict", folder, f"--inputs={prompts}", f"--output={tmp_path / 'a.txt'}")
    assert "a.txt': it must end with .jsonl, .json or .npz." in said


def test_tasks_without_predictions_are_refused(tiny):
    experiment = Experiment(tiny("gpt", {"model.name": "elmo", "task.name": "bidirectional_lm", "model.width": 8}))
    with pytest.raises(ValueError, match="The task 'bidirectional_lm' has no predictions"):
        experiment.context().inputs(["a"], Loader(batch_size=8))
    with pytest.raises(ValueError, match="The task 'bidirectional_lm' has no predictions"):
        experiment.task.predict([], experiment.data.train.source, experiment.data.facts)


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.txt", "", (), "a.txt is empty: there is no input."),
        ("a.csv", "n,review\n1,good\n", (), "a.csv has no column 'text': its columns are n, review."),
        ("a.jsonl", '{"text": 1}\n', (), "a.jsonl, line 1 has 1: it must be a text."),
        ("a.jsonl", "{\n", (), "a.jsonl, line 1 is not a JSON object."),
        ("a.docx", "x", (), "a.docx must be a file of .txt, .jsonl, .csv, .tsv, .parquet, or a source such as NAME:"),
        ("a.txt", "x", ("--columns=a,b",), "a.txt must be a file of .jsonl, .csv, .tsv, .parquet, or a source such"),
        ("b/a.txt", None, (), "There is no file"),
    ],
)
def test_invalid_files_raise(name, content, options, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_text(content)
    columns = options[0].partition("=")[2].split(",") if options else ()
    with pytest.raises((ValueError, OSError), match=re.escape(message)):
        from_files(str(tmp_path / name), "labeled_texts", columns)


def test_inputs_of_questions_and_images(tmp_path):
    """Check ids, answers that are missing, lists of images, and what is refused."""
    article = {"paragraphs": [{"context": "It is.", "qas": [{"id": "x7", "question": "Is it?"}]}]}
    (tmp_path / "a.json").write_text(json.dumps({"data": [article]}))
    found = from_files(str(tmp_path / "a.json"), "questions")
    assert found.rows == [Question("Is it?", "It is.", [], "x7")]
    assert found.about == [{"id": "x7"}]
    (tmp_path / "a.csv").write_text("question,context\nIs it?,It is.\n")
    found = from_files(str(tmp_path / "a.csv"), "questions")
    assert (found.rows[0].text, found.rows[0].context, found.about) == ("Is it?", "It is.", [{"id": "0"}])
    Image.new("L", (4, 2)).save(tmp_path / "a.png")
    (tmp_path / "list.txt").write_text(f"a.png\n{tmp_path / 'a.png'}\n")
    for name in ("list.txt", "a.png", ""):
        found = from_files(str(tmp_path / name), "images", channels=3)
        assert found.rows[len(found.rows) - 1]["image"].shape == (2, 4, 3)
        assert {each["file"] for each in found.about} == {"a.png"}
        assert len(found.rows) == (2 if name == "list.txt" else 1)
    (tmp_path / "empty").mkdir()
    for name, message in (("empty", "There is no image in"), ("a.csv", "a.csv must be an image, a folder"),
                          ("a.json", "a.json is not a file in COCO's format: KeyError 'images'")):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(message)):
            from_files(str(tmp_path / name), "images", channels=3)


def test_model_needs_the_categories_of_a_file():
    facts = Facts(class_names=("cat", "dog"))
    assert with_categories(facts, Inputs([], categories={"dog": 3, "cat": 9})).category_ids == (9, 3)
    with pytest.raises(ValueError, match="The inputs have no category 'dog': the model's classes must be among theirs"):
        with_categories(facts, Inputs([], categories={"cat": 9}))
