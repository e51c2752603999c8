"""COCO metrics match pycocotools, VOC metrics match a direct implementation of the definition; invalid inputs raise."""

import contextlib
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from lineage.metrics.detection import Detections, box_overlaps, coco, mask_overlaps, mean_over_images, rank, voc

CLASSES = 3


@st.composite
def scenes(draw):
    """Generate images with few boxes on a coarse grid, so that overlaps and scores are often equal."""
    side, place = st.integers(0, 5).map(lambda n: 30.0 * n), st.integers(0, 4).map(lambda n: 20.0 * n)
    box = st.tuples(place, place, side, side)
    truth = st.tuples(box, st.integers(0, CLASSES - 1), st.booleans(), st.floats(0, 1))
    detection = st.tuples(box, st.integers(0, CLASSES - 1), st.sampled_from([0.1, 0.5, 0.9]))
    return draw(
        st.lists(st.tuples(st.lists(truth, max_size=5), st.lists(detection, max_size=8)), min_size=1, max_size=4)
    )


def ours(scene, **options):
    state = Detections.empty(CLASSES)
    for number, (truths, detections) in enumerate(scene):
        state = state.update(
            number,
            np.array([box for box, *_ in detections]).reshape(-1, 4),
            np.array([score for *_, score in detections]),
            np.array([label for _, label, _ in detections], int),
            np.array([box for box, *_ in truths]).reshape(-1, 4),
            np.array([label for _, label, *_ in truths], int),
            true_crowd=np.array([crowd for _, _, crowd, _ in truths], bool),
            true_areas=np.array([part * box[2] * box[3] for box, *_, part in truths]),
            **options,
        )
    return state


def theirs(scene):
    """Return the precision and recall arrays of pycocotools, with -1 replaced by nan, and its twelve scores."""
    annotations, results = [], []
    for image, (truths, detections) in enumerate(scene):
        for box, label, crowd, part in truths:
            entry = {"id": len(annotations) + 1, "image_id": image, "category_id": label, "bbox": list(box)}
            annotations.append(entry | {"iscrowd": int(crowd), "area": part * box[2] * box[3]})
        results += [
            {"image_id": n, "category_id": c, "bbox": list(b), "score": s} for n in [image] for b, c, s in detections
        ]
    truth = COCO()
    images = [{"id": number} for number in range(len(scene))]
    truth.dataset = {"images": images, "annotations": annotations, "categories": [{"id": c} for c in range(CLASSES)]}
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
        detections = truth.loadRes(results) if results else COCO()
        evaluation = COCOeval(truth, detections, "bbox")
        evaluation.params.imgIds = list(range(len(scene)))
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    results = evaluation.eval["precision"][..., 2], evaluation.eval["recall"], evaluation.stats
    return [np.where(values == -1, np.nan, values) for values in results]


@settings(max_examples=300)
@given(scenes())
def test_coco_matches_pycocotools(scene):
    result = coco(ours(scene))
    precision, recall, stats = theirs(scene)
    np.testing.assert_allclose(result.precision, precision, atol=1e-12)
    np.testing.assert_allclose(result.recall, recall, atol=1e-12)
    np.testing.assert_allclose([*result.summary().values()], stats, atol=1e-12)
    curves, known = result.curves(), ~np.isnan(precision[..., 0])
    means = [precision[n, ..., 0][known[n]].mean() if known.any() else np.nan for n in (0, 5)]
    np.testing.assert_allclose(curves[[0, 5]].mean(axis=1), means, atol=1e-12)


def test_coco_counts_at_most_100_detections():
    """Check that only the 100 detections with the highest scores of each class count."""
    random = np.random.default_rng(0)
    boxes = [tuple(row) for row in np.concatenate([random.integers(0, 200, (120, 2)), np.full((120, 2), 40)], 1) * 1.0]
    scene = [([(box, 0, False, 1.0) for box in boxes[:30]], [(box, 0, float(random.random())) for box in boxes * 2])]
    result, (precision, recall, _) = coco(ours(scene)), theirs(scene)
    np.testing.assert_allclose(result.precision, precision, atol=1e-12)
    np.testing.assert_allclose(result.recall, recall, atol=1e-12)


@settings(max_examples=100)
@given(scenes(), st.randoms(use_true_random=False))
def test_result_does_not_depend_on_split_and_order(scene, random):
    whole = ours(scene)
    parts = [Detections(CLASSES, {number: image}) for number, image in whole.images.items()]
    random.shuffle(parts)
    merged = Detections.empty(CLASSES)
    for part in parts:
        merged = merged.merge(part) if random.random() < 0.5 else part.merge(merged)
    np.testing.assert_array_equal(coco(merged).precision, coco(whole).precision)


def by_definition(scene, label, points):
    """Compute the VOC average precision of a class, detection by detection."""
    detections = [(score, n, box) for n, (_, rows) in enumerate(scene) for box, c, score in rows if c == label]
    truths = {n: [(box, hard) for box, c, hard, _ in rows if c == label] for n, (rows, _) in enumerate(scene)}
    count = sum(not hard for rows in truths.values() for _, hard in rows)
    matched, right = set(), []
    for _, n, (x, y, w, h) in sorted(detections, key=lambda row: -row[0]):
        best, largest = None, 0.0
        for place, ((a, b, c, d), _) in enumerate(truths[n]):
            inside = max(min(x + w, a + c) - max(x, a) + 1, 0) * max(min(y + h, b + d) - max(y, b) + 1, 0)
            overlap = inside / ((w + 1) * (h + 1) + (c + 1) * (d + 1) - inside)
            if overlap > largest:
                best, largest = place, overlap
        if largest > 0.5 and truths[n][best][1]:
            continue
        right.append(largest > 0.5 and (n, best) not in matched)
        matched |= {(n, best)} if right[-1] else set()
    if not count:
        return None
    recall = np.cumsum(right) / count
    precision = np.cumsum(right) / np.arange(1, len(right) + 1)
    if points == 11:
        return np.mean([max(precision[recall >= at], default=0) for at in np.arange(0, 1.1, 0.1)])
    return sum((r - before) * precision[i:].max() for i, (r, before) in enumerate(zip(recall, [0, *recall])))


@settings(max_examples=300)
@given(scenes(), st.sampled_from([11, None]))
def test_voc_matches_its_definition(scene, points):
    state = Detections.empty(CLASSES)
    for number, image in ours(scene, pixel=1.0).images.items():
        free = image._replace(true_crowd=np.zeros_like(image.true_crowd))
        boxes = [np.array([box for box, *_ in rows]).reshape(-1, 4) for rows in scene[number]]
        overlaps = box_overlaps(boxes[1], boxes[0], free.true_crowd, pixel=1.0)
        state = state.merge(Detections(CLASSES, {number: free._replace(overlaps=overlaps)}))
    expected = [by_definition(scene, label, points) for label in range(CLASSES)]
    np.testing.assert_allclose(voc(state, points=points), [np.nan if x is None else x for x in expected], atol=1e-12)


def test_table_of_ten_ranked_detections():
    """Check the table of a widely taught example: five objects, of which ten detections find all."""
    correct = np.array([1, 1, 0, 0, 0, 1, 1, 0, 0, 1], bool)
    truths = np.array([[20.0 * number, 0, 10, 10] for number in range(5)])
    boxes = np.where(correct[:, None], truths[np.cumsum(correct) - 1], [500.0, 0, 10, 10])
    order = [3, 7, 0, 9, 5, 1, 8, 2, 6, 4]  # detections need not come in the order of their scores
    zeros, scores = np.zeros(10, int), np.linspace(0.95, 0.5, 10)
    state = Detections.empty(1).update(0, boxes[order], scores[order], zeros, truths, zeros[:5])
    table = rank(state, 0)
    np.testing.assert_array_equal(table.scores, scores)
    np.testing.assert_array_equal(table.correct, correct)
    np.testing.assert_allclose(table.precision, [1, 1, 2 / 3, 1 / 2, 2 / 5, 1 / 2, 4 / 7, 1 / 2, 4 / 9, 1 / 2])
    np.testing.assert_allclose(table.recall, [0.2, 0.4, 0.4, 0.4, 0.4, 0.6, 0.8, 0.8, 0.8, 1])
    assert voc(state, points=11) == [pytest.approx((5 * 1 + 4 * 4 / 7 + 2 * 1 / 2) / 11)]
    assert voc(state) == [pytest.approx(0.4 * 1 + 0.4 * 4 / 7 + 0.2 * 1 / 2)]


def test_overlap_must_exceed_the_threshold_of_voc():
    boxes = np.array([[0.0, 0, 10, 10]]), np.array([[0.0, 0, 20, 10]])  # IoU 0.5
    state = Detections.empty(1).update(0, boxes[0], [0.5], [0], boxes[1], [0])
    assert (voc(state), voc(state, threshold=0.49)) == ([0], [1])


def test_mean_over_images_counts_each_class_in_each_image_once():
    box, far = [0.0, 0, 10, 10], [50.0, 0, 10, 10]
    state = Detections.empty(2).update(0, [box, far], [0.9, 0.8], [0, 1], [box, box], [0, 1])  # 1 and 0
    state = state.update(1, [far, box], [0.9, 0.8], [1, 1], [box], [1])  # 0.5
    state = state.update(2, [box], [0.5], [0], np.zeros((0, 4)), np.zeros(0, int))  # no object: not counted
    assert mean_over_images(state) == pytest.approx(0.5)
    assert np.mean(voc(state)) == pytest.approx((1 + 1 / 6) / 2)
    assert np.isnan(mean_over_images(Detections.empty(2)))


def test_rectangular_masks_score_as_boxes():
    random = np.random.default_rng(0)
    corners = np.sort(random.integers(0, 20, (12, 2, 2)), axis=1)
    boxes = np.concatenate([corners[:, 0], corners[:, 1] - corners[:, 0]], axis=1).astype(float)
    masks = np.zeros((12, 20, 20), bool)
    for mask, (x, y, w, h) in zip(masks, boxes.astype(int)):
        mask[y : y + h, x : x + w] = True
    crowd = np.arange(7) == 3
    expected = box_overlaps(boxes[:5], boxes[5:], crowd)
    np.testing.assert_allclose(mask_overlaps(masks[:5], masks[5:], crowd), expected, atol=1e-12)
    labels, scores = np.arange(12) % CLASSES, random.random(5)
    states = (
        Detections.empty(CLASSES).update(0, each[:5], scores, labels[:5], each[5:], labels[5:], true_crowd=crowd)
        for each in (boxes, masks)
    )
    results = [coco(state) for state in states]
    np.testing.assert_array_equal(results[0].precision, results[1].precision)


@pytest.mark.parametrize("none", [np.zeros((0, 20, 20), bool), []])
def test_masks_of_images_without_detections_or_objects(none):
    mask = np.zeros((1, 20, 20), bool)
    mask[0, :9, :9] = True
    state = Detections.empty(2).update(0, mask, [0.5], [1], mask, [1]).update(1, none, [], [], mask, [1])
    boxes = Detections.empty(2).update(0, BOX, [0.5], [1], BOX, [1]).update(1, [], [], [], BOX, [1])
    state, boxes = state.update(2, mask, [0.9], [1], none, []), boxes.update(2, BOX, [0.9], [1], [], [])
    np.testing.assert_array_equal(coco(state.update(3, none, [], [], none, [])).precision, coco(boxes).precision)


def test_box_formats():
    boxes = np.array([[10.0, 20, 30, 40], [0, 0, 8, 8]])
    corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    centers = np.concatenate([boxes[:, :2] + boxes[:, 2:] / 2, boxes[:, 2:]], axis=1)
    for box_format, these in (("xywh", boxes), ("xyxy", corners), ("cxcywh", centers)):
        state = Detections.empty(2).update(0, these, [0.5, 0.6], [0, 1], these, [0, 1], box_format=box_format)
        assert state.compute()["ap"] == pytest.approx(1)
        assert state.images[0].areas.tolist() == [1200, 64]


def test_no_images_or_objects():
    assert all(np.isnan(value) for value in Detections.empty(2).compute().values())
    none = np.zeros((0, 4))
    one = np.array([[0.0, 0, 9, 9]])
    assert np.isnan(Detections.empty(2).update(0, one, [0.5], [1], none, []).compute()["ap"])
    state = Detections.empty(2).update(0, none, [], [], one, [1])
    assert state.compute()["ap"] == 0
    result = coco(state)  # class 0 has no objects: nan, as in `compute`
    assert np.isnan(result.precision[:, :, 0]).all()
    assert np.isnan(result.recall[:, 0]).all()
    np.testing.assert_array_equal(result.by_class(), [np.nan, 0])
    assert np.isnan(voc(Detections.empty(2))).all()


BOX = np.array([[0.0, 0, 9, 9]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": [0.1, 0.2]}, r"The shape of scores of image 0 is \(2,\): it must be \(1,\)"),
        ({"scores": [np.nan]}, "Image 0: a score is not finite"),
        ({"classes": [2]}, "A class of image 0 is 2: it must be from 0 to 1"),
        ({"true_classes": [-1]}, "A class of image 0 is -1: it must be from 0 to 1"),
        ({"true_boxes": BOX * np.nan}, "Image 0: a box is not finite"),
        ({"boxes": np.ones((4, 2)), "scores": [0.1, 0.2], "classes": [0, 1]}, r"the boxes have the shape \(4, 2\): it"),
        ({"boxes": np.array([[9.0, 9, 0, 0]]), "box_format": "xyxy"}, "Image 0: a box has a negative width or height"),
        ({"box_format": "yxyx"}, "box_format is 'yxyx': it must be xywh, xyxy or cxcywh"),
        (
            {"boxes": np.ones((1, 4, 6)), "true_boxes": np.ones((1, 6, 4))},
            r"The size of a mask of image 0 is \(4, 6\): it must be \(6, 4\), as of others",
        ),
        ({"true_crowd": [True, False]}, r"The shape of true_crowd of image 0 is \(2,\): it must be \(1,\)"),
    ],
)
def test_invalid_inputs_raise(changes, message):
    given = {"boxes": BOX, "scores": [0.5], "classes": [0], "true_boxes": BOX, "true_classes": [0]}
    with pytest.raises(ValueError, match=message):
        Detections.empty(2).update(0, **given | changes)


def test_duplicate_image_raises():
    state = Detections.empty(2).update(3, BOX, [0.5], [0], BOX, [0])
    with pytest.raises(ValueError, match="Image 3 was added before"):
        state.update(3, BOX, [0.5], [0], BOX, [0])
    with pytest.raises(ValueError, match="Image 3 is in both"):
        state.merge(state)
    with pytest.raises(ValueError, match="have 2 and 4 classes"):
        state.merge(Detections.empty(4))
