"""Images with boxes in the formats of COCO and Pascal VOC."""

import gzip
import json
import lzma
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from PIL import Image

from lineage.data import Facts
from lineage.data.facts import evaluating
from lineage.data.fingerprint import fingerprint
from lineage.data.inputs import from_source
from lineage.data.sources.boxes import COCO, VOC, BoxedImages
from lineage.data.sources.files import find_files
from lineage.tasks.object_detection import ObjectDetection
from tests.data.conftest import load

CATEGORIES = [{"id": 18, "name": "dog"}, {"id": 1, "name": "person"}, {"id": 17, "name": "cat"}]


def draw(path, value, size=(40, 30)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, 0, 0)).save(path)


def annotation(image, category, box, **others):
    return {"image_id": image, "category_id": category, "bbox": box, "area": box[2] * box[3], **others}


def coco(root, name="train2017", folder="{name}", file="annotations/instances_{name}.json", **changes):
    """Write two images of 40x30 pixels, the second one without objects, and return the path of the JSON file."""
    images = [{"id": id_, "file_name": f"{id_:012}.png", "width": 40, "height": 30} for id_ in (139, 7)]
    for image in images:
        draw(root / folder.format(name=name) / image["file_name"], image["id"])
    objects = [
        annotation(139, 17, [1.5, 2, 10, 20.25], iscrowd=0, segmentation=[]),
        annotation(139, 18, [0, 0, 40, 30], iscrowd=1),
        annotation(139, 1, [5, 6, 0, 7]),
    ]
    path = root / file.format(name=name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"images": images, "annotations": objects, "categories": CATEGORIES} | changes))
    return str(path)


def test_coco(tmp_path):
    coco(tmp_path)
    coco(tmp_path, "val2017")
    (tmp_path / "annotations/person_keypoints_train2017.json").write_text("{}")
    (tmp_path / "annotations/instances_other.json").write_text("{}")
    source = COCO(str(tmp_path))
    assert source.content_kinds() == ["images_with_boxes"]
    splits, names = source.images_with_boxes()
    assert names == ["person", "cat", "dog"]
    assert {name: len(part) for name, part in splits.items()} == {"train": 2, "validation": 2}
    inputs = from_source(source.images_with_boxes(), "images_with_boxes", "validation")
    assert list(inputs.identifiers) == [{"image_id": 139}, {"image_id": 7}]
    assert inputs.categories == {"person": 1, "cat": 17, "dog": 18}
    first, second = splits["train"][0], splits["train"][1]
    assert first["image"].shape == second["image"].shape == (30, 40, 3)
    assert (int(first["image"][..., 0].mean()), int(second["image"][..., 0].mean())) == (139, 7)
    np.testing.assert_array_equal(first["boxes"], [[1.5, 2, 11.5, 22.25], [0, 0, 40, 30], [5, 6, 5, 13]])
    assert (first["classes"].tolist(), first["crowd"].tolist()) == ([1, 2, 0], [False, True, False])
    kinds = {name: (*value.shape, value.dtype.name) for name, value in second.items()}
    empty = {"boxes": (0, 4, "float32"), "classes": (0, "int32"), "crowd": (0, "bool")}
    assert kinds == {"image": (30, 40, 3, "uint8")} | empty
    copy = cloudpickle.loads(cloudpickle.dumps(splits["train"]))
    np.testing.assert_array_equal(copy[0]["boxes"], first["boxes"])
    data = load(source, ObjectDetection(image_size=40), batch_size=2)
    assert data.facts.category_ids == (1, 17, 18)
    batch = data.splits["validation"][0]
    assert batch["boxes_mask"].sum(axis=1).tolist() == [2, 0]
    assert batch["crowd"].sum(axis=1).tolist() == [1, 0]
    np.testing.assert_allclose(batch["boxes"][0, 0], [6.5 / 40, 12.125 / 30, 10 / 40, 20.25 / 30])


@pytest.mark.parametrize(
    ("box", "note"),
    [
        ([30, 10, 11, 20], ""),  # one pixel outside
        (
            [30, 10, 35, 28],
            "1 of 1 boxes are partly outside of their images, such as {root}/train2017/000000000139.png.",
        ),
        ([-2, 10, 5, 5], "1 of 1 boxes are partly outside of their images, such as {root}/train2017/000000000139.png."),
        ([0.2, 0.2, 0.5, 0.8], "all 1 boxes lie in the first pixel of their images: they must be in pixels."),
    ],
)
def test_boxes_in_another_format(box, note, tmp_path):
    """Check notes on boxes with the right and bottom edges instead of sides, and relative to the image."""
    actual = COCO(coco(tmp_path, annotations=[annotation(139, 17, box)])).images_with_boxes().splits["train"]
    assert list(actual.notes()) == [note.format(root=tmp_path)] * bool(note)
    assert not [*COCO(coco(tmp_path, annotations=[])).images_with_boxes().splits["train"].notes()]


def test_images_that_are_listed_twice(tmp_path):
    """Check a note on an image that counts twice, as the metrics do not tell."""
    images = [{"id": id, "file_name": "000000000139.png"} for id in (139, 140)]
    (note,) = COCO(coco(tmp_path, images=images, annotations=[])).images_with_boxes().splits["train"].notes()
    assert (
        note
        == f"{tmp_path}/train2017/000000000139.png is listed several times and is counted each time (1 such images)."
    )


@pytest.mark.parametrize(
    ("folder", "annotations", "images_path"),
    [
        ("images/{name}", "annotations/instances_{name}.json", ""),
        ("images", "annotations/instances_{name}.json", ""),
        (".", "annotations/instances_{name}.json", ""),
        ("images", "{name}.json", ""),
        ("{name}", "{name}/_annotations.coco.json", ""),
        ("elsewhere", "{name}.json", "elsewhere"),
    ],
)
def test_folders_of_coco(folder, annotations, images_path, tmp_path):
    train, held = (coco(tmp_path, name, folder, annotations) for name in ("train", "val"))
    source = COCO(train, validation_path=held, images_path=images_path and f"{tmp_path}/{images_path}")
    splits, _ = source.images_with_boxes()
    assert [int(splits[name][0]["image"].max()) for name in ("train", "validation")] == [139, 139]
    known = set(fingerprint(source.files()))
    assert {train, held} < known
    assert {str(file) for file in find_files(str(tmp_path)) if file.suffix == ".png"} < known


@pytest.mark.parametrize("name", ["train", "Train2017"])
@pytest.mark.parametrize("suffix", [".json.gz", ".json.xz", ".JSON"])
def test_compressed_files_of_coco(suffix, name, tmp_path):
    """Check that they are found in a folder, as the images are, and that a file precedes its compressed copy."""
    plain = Path(coco(tmp_path, name))
    path = plain.with_name(f"instances_{name}{suffix}")
    compress = {".gz": gzip.compress, ".xz": lzma.compress, ".JSON": bytes}[path.suffix]
    path.write_bytes(compress(plain.read_bytes()))
    if suffix != ".JSON":
        assert COCO(str(tmp_path)).paths() == {"train": str(plain)}
    plain.unlink()
    for given in (tmp_path, path):
        part = COCO(str(given)).images_with_boxes().splits["train"]
        assert [int(part[number]["image"].max()) for number in range(2)] == [139, 7]


def test_splits_of_coco(tmp_path):
    coco(tmp_path, "val2017")
    with pytest.raises(FileNotFoundError, match=r"There is no file .*annotations/instances_train\*\.json"):
        COCO(str(tmp_path)).images_with_boxes()
    other = coco(tmp_path, "train2014")
    given = COCO(str(tmp_path), validation_path=other, test_path=other)
    assert given.paths() == {"train": other, "validation": other, "test": other}
    assert set(given.files()) == {str(tmp_path), other}
    coco(tmp_path, "train2017")
    with pytest.raises(ValueError, match=r"has instances_train2014\.json and instances_train2017\.json: choose one"):
        COCO(str(tmp_path)).images_with_boxes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"annotations": None}, "is not a file of COCO: it must have lists of images, annotations, categories"),
        ({"images": []}, "has no images"),
        ({"images": [{"id": 1}]}, "has an image without `id` and `file_name`"),
        ({"images": [{"id": 1, "file_name": "a.png"}]}, "The image a.png of .* is not in .*/images, .*: set"),
        ({"images": [{"id": 139, "file_name": name} for name in "ab"]}, "has images with the same `id`"),
        ({"categories": [{"id": 1}]}, "has a category without `id` and `name`"),
        (
            {"categories": [{"id": 1.5, "name": "a"}]},
            r"has a category with the id 1\.5: it must be an integer or a text",
        ),
        ({"categories": [{"id": 1, "name": 5}]}, "has a category without `id` and `name`"),
        ({"categories": [{"id": 1, "name": name} for name in "ab"]}, "has categories with the same `id` or `name`"),
        ({"categories": [{"id": id, "name": "a"} for id in (1, 2)]}, "has categories with the same `id` or `name`"),
        ({"annotations": [annotation(139, n, [1, 2, 3, 4]) for n in (1, 2)]}, r"annotation 2 is not valid"),
        ({"annotations": [annotation(1, 1, [1, 2, 3, 4])]}, "annotation 1 is not valid: it must have the ids of an"),
        ({"annotations": [annotation(139, 1, [1, 2, -3, 4])]}, "annotation 1 is not valid"),
        ({"annotations": [annotation(139, 1, [1, float("nan"), 3, 4])]}, "annotation 1 is not valid"),
        ({"annotations": [annotation(139, 1, [1, 2, 3, 4]) | {"bbox": [1, 2, 3]}]}, "annotation 1 is not valid"),
        ({"annotations": [annotation(139, 1, [1, 2, 3, 4]) | {"bbox": "1234"}]}, "annotation 1 is not valid"),
        ({"annotations": [annotation(139, 1, [1, 2, 3, 4]) | {"iscrowd": "0"}]}, "annotation 1 is not valid"),
        ({"annotations": [7]}, "annotation 1 is not valid"),
    ],
)
def test_wrong_files_of_coco(changes, message, tmp_path):
    path = coco(tmp_path, **changes)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        COCO(path).images_with_boxes()
    assert path in str(caught.value)


def test_wrong_images_of_coco(tmp_path):
    path = coco(tmp_path)
    with pytest.raises(ValueError, match=r"instances_val\.json has other categories than .*instances_train2017\.json"):
        COCO(path, coco(tmp_path, "val", categories=[*CATEGORIES, {"id": 3, "name": "car"}])).images_with_boxes()
    image = tmp_path / "train2017" / "000000000007.png"
    draw(image, 0, (30, 40))
    part = COCO(path).images_with_boxes().splits["train"]
    part.check(0)
    for read in (lambda: part.take(np.arange(2)), lambda: part.check(1)):
        with pytest.raises(ValueError, match=r"0007\.png has 30x40 pixels: its annotation is for 40x30"):
            read()
    text = BoxedImages(part.files, [("30", 40)] * len(part.files), part.objects)
    with pytest.raises(ValueError, match=r"has 30x40 pixels: its annotation is for '30'x40"):
        text.check(1)
    image.write_bytes(b"torn")
    torn = COCO(path).images_with_boxes().splits["train"]
    for source, reason in ((part, "it has changed since"), (torn, "it is none of")):
        for read, index in ((source.check, 1), (source.take, np.arange(2))):
            with pytest.raises(ValueError, match=rf"0007\.png cannot be read as an image: {reason}"):
                read(index)
    image.unlink()
    with pytest.raises(FileNotFoundError, match=r"There is no file .*0007\.png, which .*instances_train2017\.json"):
        COCO(path).images_with_boxes()
    (tmp_path / "annotations/instances_train2017.json").write_text('{"images": [')
    with pytest.raises(ValueError, match=r"instances_train2017\.json is not JSON: Expecting value"):
        COCO(path).images_with_boxes()
    (tmp_path / "annotations/instances_train2017.json").write_text("9" * 5000)
    with pytest.raises(ValueError, match=r"instances_train2017\.json is not JSON: Exceeds the limit"):
        COCO(path).images_with_boxes()


OBJECT = """
  <object><name>{name}</name><pose>Left</pose><difficult>{hard}</difficult>
    <part><name>head</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></part>
    <bndbox><xmin>{0}</xmin><ymin>{1}</ymin><xmax>{2}</xmax><ymax>{3}</ymax></bndbox></object>"""


def voc(root, sets, difficult=(), suffix="jpg", size=(40, 30)):
    """Write sets of images named by a number, each with a dog and, if it is even, a cat."""
    for name, numbers in sets.items():
        (root / "ImageSets/Main").mkdir(parents=True, exist_ok=True)
        (root / f"ImageSets/Main/{name}.txt").write_text("".join(f"{number:06}\n" for number in numbers))
        for number in numbers:
            draw(root / f"JPEGImages/{number:06}.{suffix}", 0, size)
            kinds = [("dog", (1, 1, 40, 30))] + [("cat", (3, 5, 3.5, 9))] * (number % 2 == 0)
            objects = [OBJECT.format(*box, name=kind, hard=int((number, kind) in difficult)) for kind, box in kinds]
            (root / "Annotations").mkdir(exist_ok=True)
            (root / f"Annotations/{number:06}.xml").write_text(
                f"<annotation><folder>VOC2007</folder><filename>{number:06}.{suffix}</filename>"
                f"<size><width>40</width><height>30</height><depth>3</depth></size>{''.join(objects)}</annotation>"
            )
    return str(root)


SETS = {"train": [1, 2], "val": [3], "trainval": [1, 2, 3], "test": [4]}


def test_voc(tmp_path):
    path = voc(tmp_path / "VOC2007", SETS, {(2, "dog"), (4, "cat")})
    source = VOC(path)
    splits, names = source.images_with_boxes()
    assert names == ["cat", "dog"]
    assert {name: len(part) for name, part in splits.items()} == {"train": 2, "validation": 1, "test": 1}
    example = splits["train"][1]
    assert example["image"].shape == (30, 40, 3)
    np.testing.assert_array_equal(example["boxes"], [[0, 0, 40, 30], [2, 4, 3.5, 9]])
    assert (example["classes"].tolist(), example["crowd"].tolist()) == ([1, 0], [True, False])
    assert [row["crowd"].tolist() for row in (splits["train"][0], splits["test"][0])] == [[False], [False, True]]
    kept = VOC(path, difficult=True).images_with_boxes().splits
    assert not any(kept[name][i]["crowd"].any() for name in kept for i in range(len(kept[name])))
    assert source.files() == [path]
    whole = evaluating(source, Facts(class_names=("ant", "cat", "dog"))).images_with_boxes()
    assert whole.splits["train"][1]["classes"].tolist() == [2, 1]  # the numbers of a run's classes
    batch = load(source, ObjectDetection(image_size=40), batch_size=2).train[0]
    assert sorted(batch["boxes_mask"].sum(axis=1).tolist()) == [1, 1]


def test_sets_of_voc(tmp_path):
    voc(tmp_path / "VOC2007", SETS)
    voc(tmp_path / "VOC2012", {"train": [11], "val": [12, 13], "trainval": [11, 12, 13]}, suffix="png")
    splits, _ = VOC(str(tmp_path)).images_with_boxes()
    assert {name: len(part) for name, part in splits.items()} == {"train": 3, "validation": 3, "test": 1}
    assert [file.name for file in splits["train"].files] == ["000001.jpg", "000002.jpg", "000011.png"]
    splits, _ = VOC(str(tmp_path), train_set="trainval", validation_set="").images_with_boxes()
    assert {name: len(part) for name, part in splits.items()} == {"train": 6, "test": 1}
    assert "test" not in VOC(f"{tmp_path}/VOC2012", train_set="val", validation_set="").images_with_boxes().splits
    with pytest.raises(ValueError, match="The sets trainval and val share 3 images"):
        VOC(str(tmp_path), train_set="trainval").images_with_boxes()
    with pytest.raises(FileNotFoundError, match=r"There is no set tets\.txt in .*/ImageSets/Main"):
        VOC(str(tmp_path), test_set="tets").images_with_boxes()
    with pytest.raises(FileNotFoundError, match=r"There is no set \.txt in .*/ImageSets/Main"):
        VOC(str(tmp_path), train_set="").images_with_boxes()
    with pytest.raises(FileNotFoundError, match=r"There is no folder .*/ImageSets, and none in the folders of"):
        VOC(f"{tmp_path}/VOC2007/Annotations").images_with_boxes()


def test_names_with_spaces_of_voc(tmp_path):
    """Check sets with and without flags, in which one name is the beginning of another."""
    path, names = voc(tmp_path, SETS), {1: "photo", 2: "photo (1)", 3: "photo 1"}
    for number, name in names.items():
        for file in (*tmp_path.glob(f"*/{number:06}.*"),):
            file.rename(file.with_stem(name))
    sets = tmp_path / "ImageSets/Main"
    for flag in ("", " -1", "  1"):
        (sets / "train.txt").write_text(f"photo{flag}\nphoto (1){flag}\n")
        (sets / "val.txt").write_text(f"photo 1{flag}\n")
        splits, _ = VOC(path).images_with_boxes()
        found = [file.stem for split in ("train", "validation") for file in splits[split].files]
        assert found == ["photo", "photo (1)", "photo 1"]
    (sets / "val.txt").write_text("my photo\n")
    with pytest.raises(FileNotFoundError, match=r"There is no file .*/my photo\.xml"):
        VOC(path).images_with_boxes()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<annotation>", '<!DOCTYPE a [<!ENTITY b "c">]><annotation>', r"it has a document type, which is not read"),
        ("</annotation>", "", "no element found"),
        ("<name>dog</name>", "", "an object has no name"),
        ("<xmin>1</xmin>", "", "could not convert string to float: ''"),
        ("<xmax>40</xmax>", "<xmax>0</xmax>", "the box 1, 1, 0, 30 is empty"),
        ("<width>40</width>", "<width>many</width>", "invalid literal"),
        ("000001.jpg", f"1.{'9' * 300}", r"its image has the suffix '\.9{59}'"),
        ("000001.jpg", "1.j\npg", r"its image has the suffix '\.j\\npg'"),
    ],
)
def test_wrong_files_of_voc(old, new, message, tmp_path):
    path = voc(tmp_path, SETS)
    file = tmp_path / "Annotations/000001.xml"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(ValueError, match=rf"{file} is not an annotation of VOC: {message}"):
        VOC(path).images_with_boxes()


def test_wrong_images_of_voc(tmp_path):
    path = voc(tmp_path, SETS)
    (tmp_path / "Annotations/000003.xml").write_text(OBJECT.format(1, 1, 2, 2, name="cow", hard=0).strip())
    file = tmp_path / "Annotations/000003.xml"
    file.write_text(f"<annotation>{file.read_text()}</annotation>")
    with pytest.raises(ValueError, match=r"000003\.jpg has the class 'cow', which no training image has"):
        VOC(path).images_with_boxes()
    (tmp_path / "JPEGImages/000003.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"There is no file .*000003\.jpg, the image of .*000003\.xml"):
        VOC(path).images_with_boxes()
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"There is no file .*000003\.xml"):
        VOC(path).images_with_boxes()
