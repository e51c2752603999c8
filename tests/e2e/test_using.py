"""The commands of `docs/using.md` run as they stand; after the training, no command needs the training data."""

import json
import re
import shlex
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import lineage
from lineage import launch, models
from lineage.data.tokenizers.kinds import TOKENIZERS
from lineage.models import convert
from tests.data.test_questions import squad

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("no_report")]
DOCS = (Path(__file__).parents[2] / "docs" / "using.md").read_text(encoding="utf-8")
SIZES = {"depth": 1, "width": 16, "num_heads": 2}
WORDS = ["a", "good", "bad", "film", "plot", "that", "was", "really", "not", "very", "dull", "or", "fine"]
RANDOM = np.random.default_rng(0)
FAST = "--config.schedule.learning_rate=1e-2"  # so that a few steps change the classifier


def commands(heading):
    """Return the commands of a section."""
    section = re.search(rf"^### {re.escape(heading)}$(.*?)^##", DOCS, re.M | re.S)
    return re.search(r"^```bash\n(.*?)^```$", section[1], re.M | re.S)[1].splitlines()


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return `run(command)`, which runs a command in a fresh folder and returns what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(command, *more):
        code = launch.main([*shlex.split(command)[1:], *more])
        out, output = capsys.readouterr()
        assert code == 0, output
        return out

    return run


def save(folder, name, example, tokenizer=None, roles=(), **settings):
    """Write a small model with random weights, and a tokenizer of the WORDS, in the layout of `transformers`."""
    if tokenizer:
        trained = TOKENIZERS[tokenizer]().train([" ".join(WORDS) + " ?"], roles)
        trained.save(folder)
        settings |= {"vocab_size": trained.vocab_size}
    model = models.build(name, **settings)
    variables = model.init(jax.random.key(0), *example)
    noisy = jax.tree.map(lambda a: a + 0.3 * RANDOM.standard_normal(a.shape).astype("f"), variables["params"])
    convert.save(folder, model, variables | {"params": noisy})


def text(count):
    return " ".join(RANDOM.choice(WORDS, count))


def rows(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def same_classes(path, other):
    for row, again in zip(rows(path), rows(other), strict=True):
        assert row["label"] == again["label"]
        assert row["probabilities"] == pytest.approx(again["probabilities"], abs=1e-5)
    assert np.std([max(row["probabilities"].values()) for row in rows(path)]) > 1e-4


TOKENS = jnp.zeros((1, 4), jnp.int32)
BERT = {"tokenizer": "words", "roles": ("cls", "sep", "pad", "mask"), "head": "pretraining", "max_length": 64, **SIZES}


def test_texts_with_labels(run):
    save("bert-base-uncased", "bert", [TOKENS], **BERT)
    lines = [f'"{text(6)}",{label}' for label in ("no", "yes", "maybe") * 12]
    Path("reviews.csv").write_text("\n".join(["review,label", *lines]) + "\n")
    Path("new.csv").write_text("\n".join(["review,label", *lines[:9]]) + "\n")
    train, predict, score, export, again = commands("Texts with labels, and BERT")
    run(train, FAST)
    config = json.loads(Path("outputs/reviews/config.json").read_text())
    assert {key: config["model"][key] for key in SIZES} == SIZES
    assert config["task"]["sequence_length"] == 64  # that of the model, which is below the recipe's 128
    Path("reviews.csv").unlink()
    shutil.rmtree("bert-base-uncased")
    for command in (predict, score, export, again):
        run(command)
    assert len(rows("predictions.jsonl")) == 9
    same_classes("predictions.jsonl", "again.jsonl")
    config = json.loads(Path("bert-reviews/config.json").read_text())
    assert config["id2label"] == {"0": "maybe", "1": "no", "2": "yes"}
    assert config["label2id"] == {"maybe": 0, "no": 1, "yes": 2}
    pipeline = transformers.pipeline("text-classification", "bert-reviews", top_k=None)
    assert pipeline.tokenizer.model_max_length == 64
    texts = [line.split('"')[1] for line in lines[:9]]
    for entry, theirs in zip(rows("predictions.jsonl"), pipeline(texts), strict=True):
        assert entry["probabilities"] == pytest.approx({row["label"]: row["score"] for row in theirs}, abs=1e-5)
    model = lineage.load("outputs/reviews")
    actual = model.predict(texts)
    assert [entry["label"] for entry in actual] == [entry["label"] for entry in rows("predictions.jsonl")]
    assert model.embed(texts).shape == (9, 16)


def draw(folder, count):
    """Write images of two classes, of several sizes."""
    for name, color in (("dark", 40), ("light", 200)):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            size = (17 + number % 3, 16, 3)
            Image.fromarray(RANDOM.integers(color - 40, color + 40, size, np.uint8)).save(
                folder / name / f"{number}.png"
            )


@pytest.mark.slow
def test_folders_of_images(run):
    shape = {"image_size": 16, "patch_size": 4, "num_classes": 7}
    save("vit-base-patch16-224", "vit", [jnp.zeros((1, 16, 16, 3))], **shape, **SIZES)
    about = {"size": {"height": 16, "width": 16}, "resample": 3, "image_mean": [0.4] * 3, "image_std": [0.2] * 3}
    Path("vit-base-patch16-224/preprocessor_config.json").write_text(json.dumps(about))
    draw(Path("photos/train"), 20)
    draw(Path("photos/test"), 4)
    train, predict, score, export, again = commands("Folders of images, and ViT")
    run(train, FAST)
    task = json.loads(Path("outputs/photos/config.json").read_text())["task"]
    assert (task["image_size"], task["mean"], task["std"], task["resample"]) == (16, [0.4] * 3, [0.2] * 3, "bicubic")
    shutil.rmtree("photos/train")
    for command in (predict, score, export, again):
        run(command)
    assert len(rows("predictions.jsonl")) == 8
    same_classes("predictions.jsonl", "again.jsonl")
    truth = [Path(entry["file"]).parent.name for entry in rows("predictions.jsonl")]
    accuracy = np.mean([entry["label"] == label for entry, label in zip(rows("predictions.jsonl"), truth)])
    assert json.loads(Path("predictions.jsonl.accuracy.json").read_text())["scores"]["accuracy"] == accuracy
    pipeline = transformers.pipeline("image-classification", "vit-photos")
    for entry in rows("predictions.jsonl"):
        actual = {row["label"]: row["score"] for row in pipeline(f"photos/test/{entry['file']}")}
        assert entry["probabilities"] == pytest.approx(actual, abs=2e-3)  # its pixels are rounded differently


@pytest.mark.slow
def test_folder_of_texts(run):
    save("gpt2", "gpt", [TOKENS], "bytes", ("end_of_text",), max_length=256, **SIZES)
    Path("texts").mkdir()
    for number in range(3):
        Path(f"texts/{number}.txt").write_text(text(800))
    Path("prompts.txt").write_text("a good\nreally\n")
    Path("dev.txt").write_text("a good film\nreally bad\n")
    train, predict, generate, score, export = commands("A folder of texts, and GPT-2")
    run(train)
    shutil.rmtree("texts")
    run(predict)
    assert run(generate).startswith("Once upon a time")
    assert run(score).startswith("perplexity ")
    run(export)
    found = lineage.load("outputs/texts", changes={"sampling.temperature": 0.0, "sampling.max_new_tokens": 8})
    exported = lineage.load("gpt2-texts", task="causal_lm", changes=vars_of(found))
    (ours,) = found.generate("a good")
    assert exported.generate("a good") == [ours]
    assert len(ours) == 8
    tokenizer = transformers.AutoTokenizer.from_pretrained("gpt2-texts")
    theirs = transformers.AutoModelForCausalLM.from_pretrained("gpt2-texts")
    tokens = torch.tensor([tokenizer("a good")["input_ids"]])
    generated = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(generated[0][tokens.shape[1] :]) == ours


def vars_of(model):
    return {f"sampling.{key}": model.experiment.config.sampling[key] for key in ("temperature", "max_new_tokens")}


@pytest.mark.slow
def test_questions(run):
    save("bert-base-uncased", "bert", [TOKENS], **BERT)
    found = []
    for number in range(24):
        context, answer = text(30), WORDS[number % len(WORDS)]
        context = f"{context} {answer}"
        found.append((f"{text(3)} ?", context, [(len(context) - len(answer), answer)]))
    squad(Path("train.json"), found, "1.1")
    squad(Path("dev.json"), found[:6], "1.1")
    train, predict, score, export, again = commands("Questions in the format of SQuAD, and BERT")
    run(train)
    Path("train.json").unlink()
    for command in (predict, score, export, again):
        run(command)
    answers = json.loads(Path("answers.json").read_text())
    assert len(answers) == 6
    assert json.loads(Path("again.json").read_text()) == answers


@pytest.mark.slow
def test_parallel_texts(run):
    roles = ("pad", "end_of_text")
    save("t5-small", "t5", [TOKENS, TOKENS], "words", roles, mlp_dim=16, **SIZES)
    for split, count in (("train", 64), ("dev", 8)):
        sources = [text(4) for _ in range(count)]
        Path(f"{split}.en").write_text("\n".join(sources) + "\n")
        Path(f"{split}.de").write_text("\n".join(one.upper().lower()[::1] for one in sources) + "\n")
    for language in ("en", "de"):
        Path(f"test.{language}.txt").write_text(Path(f"dev.{language}").read_text())
    train, predict, score, export, again = commands("Parallel texts, and T5")
    run(train)
    assert json.loads(Path("outputs/translation/config.json").read_text())["task"]["start_token"] == "pad"
    for path in Path().glob("train.*"):
        path.unlink()
    for command in (predict, score, export, again):
        run(command)
    assert len(rows("test.jsonl")) == len(rows("again.jsonl")) == 8
    greedy = run(predict.replace("num_beams=4", "num_beams=1").replace("test.jsonl", "greedy.jsonl"))
    assert greedy == ""
    assert rows("greedy.jsonl") == rows("again.jsonl")


def annotated(split, count):
    """Write images with a box each, in the format of COCO."""
    Path("shapes", split).mkdir(parents=True)
    images, annotations = [], []
    for number in range(count):
        image = np.zeros((24, 32, 3), np.uint8)
        left, top = 2 + number % 8, 3 + number % 5
        image[top : top + 10, left : left + 12] = 255
        Image.fromarray(image).save(f"shapes/{split}/{number}.png")
        images.append({"id": 50 + number, "file_name": f"{number}.png", "width": 32, "height": 24})
        box = {"bbox": [left, top, 12, 10], "area": 120, "iscrowd": 0, "category_id": 3 + 4 * (number % 2)}
        annotations.append({"id": number + 1, "image_id": 50 + number, **box})
    categories = [{"id": 3, "name": "box"}, {"id": 7, "name": "block"}]
    Path("shapes/annotations").mkdir(exist_ok=True)
    content = {"images": images, "annotations": annotations, "categories": categories}
    Path(f"shapes/annotations/instances_{split}.json").write_text(json.dumps(content))


@pytest.mark.slow
def test_images_with_boxes(run):
    backbone = {"name": "resnet", "depths": (1, 1), "widths": (8, 16), "stem_width": 8, "bottleneck": False}
    options = {"mlp_dim": 16, "num_queries": 100, "num_classes": 9, "image_size": 32, **SIZES}
    save("detr-resnet-50", "detr", [jnp.zeros((1, 32, 32, 3))], backbone=backbone | {"num_classes": 0}, **options)
    about = {"size": {"shortest_edge": 24, "longest_edge": 32}, "image_mean": [0.5] * 3, "image_std": [0.2] * 3}
    Path("detr-resnet-50/preprocessor_config.json").write_text(json.dumps(about))
    annotated("train", 16)
    annotated("val", 4)
    train, predict, score, export, again = commands("Images with boxes in the format of COCO, and DETR")
    run(train)
    config = json.loads(Path("outputs/shapes/config.json").read_text())
    assert (config["task"]["image_size"], config["task"]["shorter_side"]) == (32, 24)
    assert config["model"]["backbone"]["stem_width"] == 8
    shutil.rmtree("shapes/train")
    Path("shapes/annotations/instances_train.json").unlink()
    for command in (predict, score, export, again):
        run(command)
    actual = json.loads(Path("objects.json").read_text())
    assert {entry["category_id"] for entry in actual} <= {3, 7}
    assert len(rows("again.jsonl")) == 4
    ours = [entry["score"] for entry in sorted(actual, key=lambda entry: -entry["score"])][:4]
    theirs = sorted((entry["score"] for row in rows("again.jsonl") for entry in row["objects"]), reverse=True)[:4]
    assert ours == pytest.approx(theirs, abs=1e-4)
