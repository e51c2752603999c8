"""Images with boxes: boxes follow their pixels exactly; the TFDS layouts of COCO and Pascal VOC."""

import contextlib

import numpy as np
import pytest

from lineage.data import shuffle
from lineage.data.content import gather
from lineage.data.sources.shapes import SHAPES, DrawnShapes, Shapes
from lineage.data.sources.tfds import TFDS
from lineage.data.transforms import boxes as detection
from lineage.tasks.object_detection import ObjectDetection
from tests.data.conftest import load, png


def blocks(seed):
    """Return an example with three rectangles of different colors and their boxes."""
    rng = np.random.default_rng(seed)
    height, width = rng.integers(40, 90, 2)
    image, boxes = np.zeros((height, width, 3), np.uint8), []
    for number in range(3):
        left, top = number * width // 3, rng.integers(0, height // 2)
        right, bottom = left + rng.integers(5, width // 3 + 1), top + rng.integers(5, height // 2 + 1)
        image[top:bottom, left:right, number] = 255
        boxes.append([left, top, right, bottom])
    arrays = {"boxes": np.float32(boxes), "classes": np.arange(3, dtype=np.int32), "crowd": np.zeros(3, bool)}
    return {"image": image} | arrays


def assert_boxes_match_colors(example, tolerance):
    """Assert that each box encloses the pixels of its color, and that objects without a box have no pixels."""
    image = example["image"].astype(float)
    for number in range(3):
        inside = image[..., number] > 127
        at = np.flatnonzero(example["classes"] == number)
        if not len(at):
            assert inside.sum() <= tolerance * max(image.shape)
            continue
        rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
        assert len(rows) or tolerance
        if len(rows):
            expected = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
            np.testing.assert_allclose(example["boxes"][at[0]], expected, atol=tolerance)
    assert (example["boxes"] >= 0).all()
    assert (example["boxes"] <= np.array(image.shape[1::-1] * 2)).all()
    assert len(example["boxes"]) == len(example["classes"]) == len(example["crowd"])


@pytest.mark.parametrize("seed", range(20))
def test_boxes_move_with_their_pixels(seed):
    example, random = blocks(seed), np.random.default_rng(seed)
    assert_boxes_match_colors(example, 0)
    assert_boxes_match_colors(detection.flip(example), 0)
    height, width = example["image"].shape[:2]
    cut = [int(random.integers(1, side + 1)) for side in (height, width)]
    start = [int(random.integers(side - part + 1)) for side, part in zip((height, width), cut)]
    assert_boxes_match_colors(detection.crop(example, *start, *cut), 0)
    assert_boxes_match_colors(detection.resize(example, 2 * height, 3 * width), 1)
    for step in (detection.Flip(), detection.Resize(30, 80, 100), detection.Crop(20, 50)):
        changed = step(example, random)
        assert_boxes_match_colors(changed, 1.5)
        if isinstance(step, detection.Resize):
            assert max(changed["image"].shape) <= 100


def test_random_transforms_have_expected_frequency_and_range():
    example, random = blocks(0), np.random.default_rng(0)
    flip, crop = detection.Flip(), detection.Crop(48, 60)
    mirrored = [np.array_equal(flip(example, random)["image"], example["image"][:, ::-1]) for _ in range(200)]
    assert 70 < sum(mirrored) < 130
    sizes = np.array([crop(example, random)["image"].shape[:2] for _ in range(300)])
    whole = (sizes == example["image"].shape[:2]).all(axis=1)
    assert 110 < whole.sum() < 190
    assert sizes[~whole].min() == 48
    assert sizes[~whole].max() == 60


def test_image_that_would_become_too_large_raises():
    example = {"image": np.zeros((1, 400_000, 3), np.uint8), "boxes": np.zeros((0, 4), np.float32)}
    with pytest.raises(ValueError, match="An image of 400000x1 pixels would become 12800000x32: too large"):
        detection.Resize(32, 32)(example, np.random.default_rng(0))


def test_batches_are_padded_and_boxes_relative():
    examples = [blocks(seed) for seed in range(6)]
    batch = gather(examples) | {"mask": np.arange(6) < 5}
    keys = shuffle.keys(np.arange(6), 0)
    make = detection.Transform([detection.Resize(64, 64, 64)], 64, 4, (0.5,), (0.25,), training=False)
    out = make(batch, keys)
    assert out["image"].shape == (6, 64, 64, 3)
    np.testing.assert_array_equal(out["mask"], batch["mask"])
    for row in range(6):
        height, width = np.rint(out["extent"][row] * 64).astype(int)
        assert max(height, width) == 64
        image = out["image"][row] * 0.25 + 0.5
        assert (out["image"][row, height:] == 0).all()
        assert (out["image"][row, :, width:] == 0).all()
        center, size = out["boxes"][row, :3, :2], out["boxes"][row, :3, 2:]
        boxes = np.concatenate([center - size / 2, center + size / 2], axis=1) * np.tile([width, height], 2)
        actual = {"image": image[:height, :width] * 255, "boxes": boxes, "classes": out["classes"][row, :3]}
        assert_boxes_match_colors(actual | {"crowd": out["crowd"][row, :3]}, 1.5)
        assert out["boxes_mask"][row].tolist() == [True] * 3 + [False]
    alone = make({name: value[3:4] for name, value in batch.items()}, keys[3:4])
    for name, value in alone.items():
        np.testing.assert_array_equal(value, out[name][3:4])


def test_crowds_and_excess_objects_in_training_and_evaluation():
    example = blocks(0) | {"crowd": np.array([False, True, False])}
    batch, keys = gather([example]) | {"mask": np.ones(1, bool)}, shuffle.keys(np.arange(1), 0)

    def make(max_boxes, training):
        return detection.Transform([], 96, max_boxes, (0.5,), (0.5,), training)(batch, keys)

    seen = make(3, False)
    assert seen["boxes_mask"].tolist() == [[True, False, True]]
    assert seen["crowd"].tolist() == [[False, True, False]]
    seen = make(3, True)
    assert seen["classes"][seen["boxes_mask"]].tolist() == [0, 2]
    assert "crowd" not in seen
    seen = make(1, True)
    assert seen["classes"][seen["boxes_mask"]].tolist() == [0]
    with pytest.raises(ValueError, match=r"task.max_boxes is 2: an image has 3 objects"):
        make(2, False)
    with pytest.raises(ValueError, match=r"does not fit in task.image_size, which is 32"):
        detection.Transform([], 32, 3, (0.5,), (0.5,), True)(batch, keys)


def test_boxes_outside_of_the_image_and_empty_boxes_in_training():
    sides = np.float32([[-5, 10, 20, 40], [90, 70, 100, 90], [8, 8, 8, 20], [97, 10, 99, 20], [10, 20, 30, 40]])
    example = {
        "image": np.zeros((80, 96, 3), np.uint8),
        "boxes": sides,
        "classes": np.arange(5),
        "crowd": np.zeros(5, bool),
    }
    batch, keys = gather([example]) | {"mask": np.ones(1, bool)}, shuffle.keys(np.arange(1), 0)
    kept = {True: ([0, 1, 4], [[0, 10, 20, 40], [90, 70, 96, 80], [10, 20, 30, 40]]), False: (range(5), sides)}
    for training, (classes, boxes) in kept.items():
        out = detection.Transform([], 96, 6, (0.5,), (0.5,), training)(batch, keys)
        assert out["classes"][out["boxes_mask"]].tolist() == list(classes)
        center, size = np.split(out["boxes"][out["boxes_mask"]], 2, axis=1)
        actual = np.concatenate([center - size / 2, center + size / 2], axis=1) * [96, 80, 96, 80]
        np.testing.assert_allclose(actual, boxes, atol=1e-4)


def test_drawn_shapes_depend_on_index_and_split_only():
    train, test = DrawnShapes("train"), DrawnShapes("test")
    first = train[7]
    for name, value in train[7].items():
        np.testing.assert_array_equal(value, first[name])
        np.testing.assert_array_equal(train.take(np.array([3, 7]))[name][1], value)
    others = [train[8], test[7]]
    assert all(other["image"].tobytes() != first["image"].tobytes() for other in others)
    counts = np.array([len(train[i]["boxes"]) for i in range(300)])
    assert 1 <= counts.min() < counts.max() <= 6
    for boxes in (train[i]["boxes"] for i in range(100)):
        sides = boxes[:, 2:] - boxes[:, :2]
        common = np.minimum(boxes[:, None, 2:], boxes[:, 2:]) - np.maximum(boxes[:, None, :2], boxes[:, :2])
        hidden = np.clip(common, 0, None).prod(-1) / np.minimum(sides.prod(-1)[:, None], sides.prod(-1))
        assert (hidden[~np.eye(len(boxes), dtype=bool)] < 0.2).all()
    kinds = np.concatenate([train[i]["classes"] for i in range(300)])
    assert (np.bincount(kinds, minlength=4) > 100).all()
    with pytest.raises(IndexError):
        test[len(test)]


def test_boxes_of_drawn_shapes_match_their_pixels():
    """Compare the boxes with the pixels that differ from the background."""
    source, seen = DrawnShapes("train"), set()
    for index in range(200):
        example = source[index]
        if len(example["boxes"]) > 1:
            continue
        left, top, right, bottom = example["boxes"][0].astype(int)
        image = example["image"].astype(float)
        inside = np.zeros(image.shape[:2], bool)
        inside[top:bottom, left:right] = True
        ground = np.median(image[~inside], axis=0)
        far = np.abs(image - ground).mean(axis=-1)
        assert ((far > 50) & ~inside).sum() <= 3  # noise of the background
        shape = (far > 40) & inside
        assert shape.any(1)[top:bottom].all()
        assert shape.any(0)[left:right].all()
        seen.add(int(example["classes"][0]))
    assert seen == {0, 1, 2, 3}


def test_load():
    task = ObjectDetection(max_boxes=6, augment="flip", image_size=32)
    loaded = load(Shapes(image_size=32), task, batch_size=4)
    assert loaded.facts.class_names == tuple(SHAPES)
    assert loaded.facts.num_classes == 4
    assert loaded.facts.image_size == (32, 32)
    batch = loaded.train[0]
    assert batch["image"].shape == (4, 32, 32, 3)
    assert "crowd" not in batch
    assert loaded.splits["test"][0]["crowd"].shape == (4, 6)
    with pytest.raises(ValueError, match="is not one of flip, crop"):
        load(Shapes(), ObjectDetection(augment="shift(1)"))
    with pytest.raises(ValueError, match=r"Crop.low is 9: it must be at most 24/25 of high, which is 3"):
        load(Shapes(), ObjectDetection(augment="crop(9, 3)"))
    with pytest.raises(ValueError, match="need 1 or 3 numbers each"):
        load(Shapes(), ObjectDetection(mean=(0.5, 0.5)))
    with pytest.raises(ValueError, match=r"task.std is .* above 0"):
        load(Shapes(), ObjectDetection(std=(0.0,)))


def test_shapes_smaller_than_a_pixel_are_omitted():
    actual = [DrawnShapes("test", size=4)[index]["boxes"] for index in range(100)]
    assert {boxes.shape[1] for boxes in actual} == {4}
    assert min(map(len, actual)) == 0
    assert all((boxes[:, 2:] > boxes[:, :2]).all() for boxes in actual)


@pytest.mark.parametrize("flag", ["is_crowd", "is_difficult"])
def test_coco_and_voc_of_tfds(flag, prepare, tmp_path):
    images = [np.full((20, 40, 3), 50, np.uint8), np.full((30, 30, 3), 90, np.uint8)]
    boxes = [[[0.1, 0.2, 0.5, 0.6], [0.0, 0.0, 1.0, 1.0]], []]  # top, left, bottom and right, relative

    def features(kinds):
        one = {"bbox": kinds.BBoxFeature(), "label": kinds.ClassLabel(names=["cat", "dog"]), flag: np.bool_}
        return {"image": kinds.Image(shape=(None, None, 3)), "objects": kinds.Sequence(one)}

    examples = []
    for image, found in zip(images, boxes):
        kinds = {f"objects/{name}": np.arange(len(found)) % 2 for name in ("label", flag)}
        examples.append({"image": png(image), "objects/bbox": np.float32(found).reshape(-1)} | kinds)
    prepare(tmp_path, "coco", features, {"train": examples, "validation": examples})
    task = ObjectDetection(image_size=40, shorter_side=20, max_boxes=2)
    loaded = load(TFDS("coco", str(tmp_path)), task, batch_size=2)
    assert loaded.facts.class_names == ("cat", "dog")
    batch = loaded.splits["validation"][0]
    np.testing.assert_allclose(batch["boxes"][0], [[0.4, 0.3, 0.4, 0.4], [0.5, 0.5, 1, 1]], atol=1e-6)
    assert batch["boxes_mask"].tolist() == [[True, False], [False, False]]
    assert batch["crowd"].tolist() == [[False, True], [False, False]]
    np.testing.assert_allclose(batch["extent"], [[0.5, 1], [0.5, 0.5]])
    assert sorted(loaded.train[0]["boxes_mask"].sum(axis=1)) == [0, 1]
    plain = {"train": [{"image": png(images[0])}]}
    prepare(tmp_path, "plain", lambda kinds: {"image": kinds.Image(shape=(None, None, 3))}, plain)
    with pytest.raises(ValueError, match="has no feature 'objects'"):
        load(TFDS("plain", str(tmp_path)), task, batch_size=2)


@pytest.mark.parametrize("kind", ["XYXY", "YXYX", "XYWH", "REL_XYXY", None])
def test_boxes_of_tfds_in_another_format_raise(kind, prepare, tmp_path):
    """Check the formats that a data set may declare; old data sets, which declare none, have the default one."""

    def features(kinds):
        one = {"bbox": kinds.BBoxFeature(bbox_format=kind), "label": kinds.ClassLabel(names=["cat"])}
        return {"image": kinds.Image(shape=(None, None, 3)), "objects": kinds.Sequence(one)}

    row = {"image": png(np.zeros((20, 40, 3), np.uint8)), "objects/label": np.array([0])}
    prepare(tmp_path, "some", features, {"train": [row | {"objects/bbox": np.float32([0.1, 0.2, 0.5, 0.6])}]})
    source, message = TFDS("some", str(tmp_path)), rf"'objects/bbox' of some/1\.0\.0 has the format {kind}: it must be"
    with pytest.raises(ValueError, match=message) if kind else contextlib.nullcontext():
        load(source, ObjectDetection(image_size=40), batch_size=1)
