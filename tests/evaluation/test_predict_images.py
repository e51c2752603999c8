"""The command `predict` for images: its files scored by `score` have the metrics of the run's own evaluation."""

import json
import os
import shutil
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from lineage.configs import cli
from lineage.data import EvaluationBatches, Facts, Loader
from lineage.data.content import Arrays
from lineage.data.inputs.images import Readable
from lineage.data.inputs.rows import skip
from lineage.data.sources import shapes
from lineage.data.sources.packages import Digits
from lineage.data.transforms import boxes
from lineage.evaluation.scorers import METRICS
from lineage.tasks.object_detection import ObjectDetection
from lineage.train.experiment import Experiment
from tests.evaluation.conftest import write_jsonl
from tests.tasks.test_detection import TINY as DETECTION

pytestmark = pytest.mark.usefixtures("no_report")


@pytest.mark.slow
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
        assert scores[name] == metrics[f"validation/{name}"]
    assert scores["ap"] > 0

    def placed(rows):
        return np.array([[each["bbox"] for each in row["objects"]] for row in rows])

    without_images = predict(folder, "shapes", "--split=validation", output="own.jsonl")
    assert [each["image_id"] for each in without_images] == list(range(30))
    np.testing.assert_allclose(placed(without_images), placed(found), atol=1e-4)
    image.resize((32, 64), Image.Resampling.NEAREST).save(tmp_path / "large.png")
    (large,) = predict(folder, tmp_path / "large.png", output="large.jsonl")
    assert large["file"] == "large.png"
    image.resize((8, 16), Image.Resampling.NEAREST).save(tmp_path / "small.png")
    (small,) = predict(folder, tmp_path / "small.png", output="small.jsonl")
    np.testing.assert_allclose(placed([large]), 4 * placed([small]), rtol=0.2, atol=1)


def test_boxes_are_in_pixels_of_the_original_image():
    """Check an image that is higher than wide: its size in a batch, and a box."""
    facts = Facts(num_classes=2, class_names=("a", "b"), image_size=(16, 16), channels=3, mean=(0.5,), std=(0.5,))
    images = Arrays({"image": np.zeros((1, 64, 32, 3), np.uint8)})
    images = Readable(images, (16, 16, 3), True, True, partial(skip, {}, 0))
    transform = boxes.Transform([boxes.Resize(16, 16, 16)], 16, 4, facts.mean, facts.std, training=False)
    (batch,) = EvaluationBatches(source=images, transform=transform, loader=Loader(batch_size=1))
    np.testing.assert_array_equal(batch["size"], [[64, 32]])
    outputs = np.array([[[0.0, 5.0, 0.0]]]), np.array([[[0.25, 0.5, 0.5, 0.125]]]), batch["size"]
    ((found,),) = (row["objects"] for row in ObjectDetection().predict(outputs, images, facts))
    assert (found["category_id"], found["category"], found["bbox"]) == (2, "b", [0, 28, 16, 8])
    assert found["score"] == pytest.approx(np.exp(5) / (np.exp(5) + 2))


def write_digits(tmp_path):
    """Write the test images of `digits` as files; return their folder and a file of the labels."""
    examples = Digits().images().splits["test"].features
    for number, image in enumerate(examples["image"]):
        (tmp_path / "digits").mkdir(exist_ok=True)
        Image.fromarray(image[..., 0]).save(tmp_path / f"digits/{number:03}.png")
    return tmp_path / "digits", write_jsonl(tmp_path / "labels.jsonl", [str(label) for label in examples["label"]])


@pytest.mark.thorough
def test_classes_of_images(trained, predict, score, call, refused, tmp_path):
    """Check the accuracy, images from files, and images that cannot be read."""
    folder, metrics = trained("vit", {}, steps=40)
    found = predict(folder, "digits", "--split=test")
    images, labels = write_digits(tmp_path)
    assert score("accuracy", "out.jsonl", labels)["accuracy"] == metrics["test/accuracy"]
    assert metrics["test/accuracy"] > 0.2
    files = predict(folder, images, output="files.jsonl")
    assert files == [{"file": f"{number:03}.png", **each} for number, each in enumerate(found)]
    latin = os.fsdecode(b"caf\xe9.png")  # a name that UTF-8 cannot have
    (tmp_path / "one").mkdir()
    shutil.copy(images / "000.png", tmp_path / "one" / latin)
    for output in ("one.jsonl", "two.json", "one/own.jsonl", "one/own.jsonl"):  # an output is not an input
        assert predict(folder, tmp_path / "one", output=output)[0]["file"] == latin
    assert json.loads((tmp_path / "two.json").read_text(encoding="utf-8"))[0]["file"] == latin
    said = refused(folder, "--inputs=digits")
    assert "--split is '': it must be one of the splits of the inputs, train, test." in said

    (images / "005.png").write_bytes(b"no image")
    Image.new("L", (9, 8)).save(images / "300.png")
    out = f"--output={tmp_path / 'bad.jsonl'}"
    said = refused(folder, f"--inputs={images}", out)
    assert f"error: Image 5: {images}/005.png cannot be read as an image: " in said
    said = refused(folder, f"--inputs={images}", out, "--skip-bad=1")
    assert "error: Image 300: The image has the shape (8, 9, 1): the model's images have (8, 8, 1)." in said
    assert len((tmp_path / "bad.jsonl").read_text().splitlines()) == 256  # four batches of 64
    code, _, said = call("predict", folder, f"--inputs={images}", out, "--skip-bad=2")
    assert code == 0, said
    assert "359 predictions (2 of them errors): " in said
    lines = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert [number for number, each in enumerate(lines) if each != files[number]] == [5, 300]
    assert lines[5].keys() == lines[300].keys() == {"file", "error"}


@pytest.mark.thorough
def test_other_images_of_a_list_are_refused(trained, predict, refused, tmp_path):
    """Check that predictions are not continued with a changed image, and that an output may be beside the images."""
    folder, _ = trained("vit", {})
    images, _ = write_digits(tmp_path)
    (images / "list.txt").write_text("000.png\n001.png\n")
    content = [{"id": number, "file_name": f"00{number}.png"} for number in range(2)]
    (tmp_path / "coco.json").write_text(json.dumps({"images": content}))
    lists = images / "list.txt", f"{tmp_path / 'coco.json'},{images}"
    for number, inputs in enumerate([*lists, *lists]):
        predict(folder, inputs, output=f"digits/{number % 2}.jsonl")
    shutil.copy(images / "002.png", images / "001.png")
    for number, inputs in enumerate(lists):
        said = refused(folder, f"--inputs={inputs}", f"--output={images / f'{number}.jsonl'}")
        assert f"{number}.jsonl has predictions with other settings (inputs): choose another --output" in said


@pytest.mark.thorough
def test_features(trained, predict, refused, tmp_path):
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
    said = refused(folder, "--inputs=digits", "--split=test", f"--output={tmp_path / 'x.npz'}")
    assert "x.npz': .npz is for --features." in said
    images, _ = write_digits(tmp_path)
    (images / "005.png").write_bytes(b"no image")
    said = refused(folder, f"--inputs={images}", f"--output={tmp_path / 'x.npz'}", "--features", "--skip-bad=1")
    assert "x.npz': .npz has no place for errors, unlike .parquet." in said
    predict(folder, images, "--features", "--skip-bad=1", output="bad.parquet")
    rows = pq.read_table(tmp_path / "bad.parquet").to_pylist()
    assert rows[5]["features"] is None
    assert "005.png cannot be read as an image" in rows.pop(5)["error"]
    np.testing.assert_array_equal([row["features"] for row in rows], np.delete(found, 5, axis=0))


@pytest.mark.slow
def test_reconstructed_images(trained, predict, score, refused, tmp_path):
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
    painted = np.stack([np.asarray(Image.open(tmp_path / row["reconstructed"])) for row in found])
    error = np.mean((painted / 255 - digits[..., 0] / 255) ** 2)
    scores = score("reconstruction", "out.jsonl", images)
    assert scores == pytest.approx({"mse": error, "psnr": -10 * np.log10(error)})
    assert score("reconstruction", "out.jsonl", tmp_path / "out.jsonl") == {"mse": 0, "psnr": None}
    said = refused(folder, "--split=test")
    assert "The predictions have images (masked, reconstructed): give an --output to write them beside." in said


def test_equal_images_have_an_infinite_psnr(tmp_path):
    images, _ = write_digits(tmp_path)
    files = [str(images / "000.png"), str(images / "001.png")]
    assert METRICS["reconstruction"].compute(files, [files]) == {"mse": 0, "psnr": np.inf}
