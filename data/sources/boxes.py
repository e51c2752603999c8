"""Images with boxes in the formats of COCO and Pascal VOC; the images are read as RGB."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from lineage.configs.hub import uncompressed
from lineage.data.content import Images, gather
from lineage.data.sources.base import SOURCES, SPLITS, PathSource, SplitFiles
from lineage.data.sources.files import inside, read_json, read_lines, split_of, suffix_of
from lineage.data.sources.folder import Files

FLAGS = {0: False, 1: True}
LIMIT = 1e9  # of coordinates, in pixels; from 3e38 on, they would be infinite in float32


@SOURCES.register("coco")
@dataclass(frozen=True)
class COCO(SplitFiles):
    """Images with the boxes of objects in COCO's JSON files (arXiv 1405.0312).

    The classes are the categories in the order of their ids, numbered from 0.

    Attributes:
        path: folder with annotations/instances_<split>.json, such as instances_train2017.json, or a training JSON file;
            files may be compressed.
        validation_path: JSON file of the validation data; "": the folder's, if any.
        test_path: JSON file of the test data; "": the folder's, if any.
        images_path: folder of the images; "": the first of the folders NAME, images/NAME, images and . next to
            `annotations`, or else next to the JSON file, that has the first image (NAME as in instances_NAME.json).
    """

    images_path: str = ""

    def paths(self) -> dict[str, str]:
        explicit, folder = super().paths(), Path(self.path) / "annotations"
        if not Path(self.path).is_dir():
            return explicit
        del explicit["train"]
        files: dict[str, str] = {}
        found = sorted(file for file in folder.glob("instances_*") if suffix_of(str(file)) == ".json")
        without_copies = {uncompressed(file.name): file for file in reversed(found)}
        for _, file in sorted(without_copies.items()):
            split = split_of(file.name)
            if split in files:
                raise ValueError(f"{folder} has {Path(files[split]).name} and {file.name}: choose one by source.path.")
            if split:
                files[split] = str(file)
        if "train" not in files and (self.known is None or not files | explicit):
            raise FileNotFoundError(f"There is no file {folder}/instances_train*.json.")
        return files | explicit

    def files(self) -> list[str]:
        paths = super().paths().values()
        return [*paths, *([self.images_path] if self.images_path else {str(_root(path)) for path in paths})]

    def images_with_boxes(self) -> Images:
        splits, names = {}, list(self.known.class_names) if self.known else []
        for split, path in self.without_training(self.paths()).items():
            content, kinds = read_json(path), ("images", "annotations", "categories")
            if not isinstance(content, dict) or not all(isinstance(content.get(kind), list) for kind in kinds):
                raise ValueError(f"{path} is not a file of COCO: it must have lists of {', '.join(kinds)}.")
            categories = category_names(path, content["categories"])
            categories_of_split = list(categories.values())
            if names and names != categories_of_split:
                first = self.paths().get("train", "the training data")
                raise ValueError(f"{path} has other categories than {first}: they must be equal.")
            names = categories_of_split
            splits[split] = _coco_images(path, content, categories, self.images_path)
        return Images(splits, names)


@SOURCES.register("voc")
@dataclass(frozen=True)
class VOC(PathSource):
    """Images with the boxes of objects in the layout of Pascal VOC.

    A folder has ImageSets/Main/<set>.txt, Annotations/<image>.xml and JPEGImages/<image>.jpg. The classes are those of
    the training images, sorted. Pixels are numbered from 1, and those on the edges of a box belong to it.

    Attributes:
        path: folder of a year, such as VOCdevkit/VOC2007, or of several, such as VOCdevkit, whose sets are joined.
        train_set: name of the training set, such as trainval.
        validation_set: name of the validation set; "": none.
        test_set: name of the test set; "": none. The default is ignored if there is no such set.
        difficult: whether objects marked as difficult count; if False, they are treated as crowds, which are left out
            of training and ignored in evaluation.
    """

    train_set: str = "train"
    validation_set: str = "val"
    test_set: str = "test"
    difficult: bool = False

    def images_with_boxes(self) -> Images:
        annotations: dict[str, list[Path]] = {}
        for split, name in zip(SPLITS, (self.train_set, self.validation_set, self.test_set)):
            if not name and split != "train":
                continue
            if files := self._annotations(name):
                if shared := set(files) & set(annotations.get("train", ())):
                    raise ValueError(f"The sets {self.train_set} and {name} share {len(shared)} images.")
                annotations[split] = files
            elif (split, name) != ("test", "test"):
                raise FileNotFoundError(f"There is no set {name}.txt in {self.path}/ImageSets/Main with images.")
        rows = {split: [_voc_example(file) for file in files] for split, files in annotations.items()}
        classes = {name for _, _, objects in rows["train"] for name, *_ in objects}
        names = list(self.known.class_names if self.known else sorted(classes))
        return Images({split: self._images(part, names) for split, part in rows.items()}, names)

    def _annotations(self, name: str) -> list[Path]:
        """Return the paths of the annotations of a set in all folders that have it."""
        root = Path(self.path)
        folders = [root] if (root / "ImageSets").is_dir() else sorted(path.parent for path in root.glob("*/ImageSets"))
        if not folders:
            raise FileNotFoundError(f"There is no folder {root}/ImageSets, and none in the folders of {root}.")
        lists = [(folder, folder / "ImageSets" / "Main" / f"{name}.txt") for folder in folders]
        rows = [(folder, line.strip()) for folder, file in lists if file.is_file() for line in read_lines(str(file))]
        return [_annotation(folder, line) for folder, line in rows if line]

    def _images(self, rows: Iterable[tuple[Path, tuple[int, int], list[tuple]]], names: Sequence[str]) -> "BoxedImages":
        number, objects = {name: number for number, name in enumerate(names)}, []
        for file, _, annotated in rows:
            if unknown := {name for name, *_ in annotated} - number.keys():
                raise ValueError(f"{file} has the class {min(unknown)!r}, which no training image has.")
            objects.append(boxed([(box, number[name], flag and not self.difficult) for name, box, flag in annotated]))
        files, sizes, _ = zip(*rows)
        return BoxedImages(files, sizes, objects)


@dataclass(frozen=True)
class BoxedImages(Files):
    """Image files with boxes."""

    sizes: Sequence[tuple[int, int]]  # width and height of each image in its annotation; 0: unknown
    objects: Sequence[dict[str, np.ndarray]]  # `boxes`, `classes` and `crowd` of each image, see `content.Images`
    ids: Sequence[int | str] = ()  # id of each image in a file of COCO
    categories: Mapping[str, int] = field(default_factory=dict)  # id of each class by name, in a file of COCO

    def take(self, indices: np.ndarray) -> dict[str, Any]:
        return gather([{"image": self._image(index)} | self.objects[index] for index in indices])

    def notes(self) -> Iterator[str]:
        """Yield notes on boxes that are probably not in the right format: outside of the images, or in other units."""
        known = [all(type(side) is int and 0 < side < LIMIT for side in size) for size in self.sizes]
        counts = [len(example["boxes"]) * flag for example, flag in zip(self.objects, known)]
        known_boxes = [example["boxes"] for example, flag in zip(self.objects, known) if flag]
        boxes = np.concatenate([np.zeros((0, 4), np.float32), *known_boxes])
        sides = np.repeat(np.array([size if flag else (0, 0) for size, flag in zip(self.sizes, known)]), counts, axis=0)
        outside = ((boxes[:, :2] < -1) | (boxes[:, 2:] > sides + 1)).any(axis=1)
        if outside.sum() > len(boxes) / 100:
            file = self.files[int(np.searchsorted(np.cumsum(counts), np.argmax(outside), side="right"))]
            yield f"{outside.sum():,} of {len(boxes):,} boxes are partly outside of their images, such as {file}."
        if len(boxes) and boxes.max() <= 1:
            yield f"all {len(boxes):,} boxes lie in the first pixel of their images: they must be in pixels."
        if repeated := [file for file, count in Counter(self.files).items() if count > 1]:
            yield f"{repeated[0]} is listed several times and is counted each time ({len(repeated)} such images)."

    def check(self, index: int) -> None:
        picture = self.picture(index, 3)
        picture.check()
        self._check_size(index, picture.shape)

    def _image(self, index: int) -> np.ndarray:
        image = np.asarray(self.picture(index, 3))
        self._check_size(index, image.shape)
        return image

    def _check_size(self, index, shape):
        width, height = self.sizes[index]
        if width and height and shape[:2] != (height, width):
            actual = f"{shape[1]}x{shape[0]} pixels"
            raise ValueError(f"{self.files[index]} has {actual}: its annotation is for {f'{width!r}x{height!r}'[:40]}.")


def boxed(objects: Sequence[tuple[Sequence[float], int, bool]]) -> dict[str, np.ndarray]:
    """Return the `boxes`, `classes` and `crowd` of objects, see `content.Images`."""
    boxes, classes, crowd = zip(*objects) if objects else ((), (), ())
    boxes = np.array(boxes, np.float32).reshape(-1, 4)
    return {"boxes": boxes, "classes": np.array(classes, np.int32), "crowd": np.array(crowd, bool)}


def category_names(path: str, categories: Sequence[dict[str, Any]]) -> dict[int, str]:
    """Return the names of categories by id, in order."""
    try:
        names = dict(sorted((category["id"], "" + category["name"]) for category in categories))
    except (KeyError, TypeError):
        raise ValueError(f"{path} has a category without `id` and `name`.") from None
    if wrong := [id for id in names if type(id) not in (int, str)]:
        raise ValueError(f"{path} has a category with the id {wrong[0]!r}: it must be an integer or a text.")
    if len({*names.values()}) < len(categories):
        raise ValueError(f"{path} has categories with the same `id` or `name`: they must differ.")
    return names


def _coco_images(path: str, content: dict[str, Any], categories: Mapping[int, str], folder: str) -> BoxedImages:
    """Return the images of a COCO file, with the objects of each, given the names of the categories by id."""
    number = {category: number for number, category in enumerate(categories)}
    try:
        images = {image["id"]: image for image in content["images"]}
        names = ["" + image["file_name"] for image in images.values()]  # TypeError if one is not a text
    except (KeyError, TypeError):
        raise ValueError(f"{path} has an image without `id` and `file_name`.") from None
    if not names:
        raise ValueError(f"{path} has no images.")
    if len(images) < len(content["images"]):
        raise ValueError(f"{path} has images with the same `id`: they must differ.")
    root = _image_folder(path, names[0], folder)
    files = [inside(root, name, path) for name in names]
    if missing := next((file for file in files if not file.is_file()), None):
        raise FileNotFoundError(f"There is no file {missing}, which {path} names.")
    objects: dict[Any, list] = {image: [] for image in images}
    for index, annotation in enumerate(content["annotations"], 1):
        try:
            left, top, width, height = sides = list(map(float, [] + annotation["bbox"]))  # TypeError for a text
            if not (min(width, height) >= 0 and all(abs(side) < LIMIT for side in sides)):
                raise ValueError
            box, crowd = (left, top, left + width, top + height), FLAGS[annotation.get("iscrowd", 0)]
            objects[annotation["image_id"]].append((box, number[annotation["category_id"]], crowd))
        except (KeyError, TypeError, ValueError, OverflowError):
            needed = "the ids of an image and a category, a `bbox` of left, top, width and height, and `iscrowd` 0 or 1"
            raise ValueError(f"{path}, annotation {index} is not valid: it must have {needed}.") from None
    sizes = [(image.get("width", 0), image.get("height", 0)) for image in images.values()]
    ids_by_name = {name: id for id, name in categories.items()}
    return BoxedImages(files, sizes, list(map(boxed, objects.values())), list(images), ids_by_name)


def _root(path: str) -> Path:
    """Return the parent of a JSON file's folder `annotations`, the folder of another file, or a folder itself."""
    if Path(path).is_dir():
        return Path(path)
    parent = Path(path).parent
    return parent.parent if parent.name == "annotations" else parent


def _image_folder(path: str, first_image: str, folder: str) -> Path:
    """Return the folder of the images of a COCO file, see `COCO.images_path`."""
    root, name = _root(path), Path(uncompressed(path)).stem.removeprefix("instances_")
    places = [Path(folder)] if folder else [root / name, root / "images" / name, root / "images", root]
    if place := next((place for place in places if os.path.isfile(place / first_image)), None):
        return place
    listed = ", ".join(map(str, places))
    raise FileNotFoundError(f"The image {first_image[:200]} of {path} is not in {listed}: set source.images_path.")


def _annotation(folder: Path, line: str) -> Path:
    """Return the path of the annotation of an image in a set; the sets of a class have a flag after each name."""
    flagged = re.fullmatch(r"(.*\S)\s+(-1|0|1)", line)
    if flagged and not os.path.isfile(folder / "Annotations" / f"{line}.xml"):  # the name of an image may have spaces
        line = flagged[1]
    return inside(folder / "Annotations", f"{line}.xml", folder / "ImageSets")


def _voc_example(path: Path) -> tuple[Path, tuple[int, int], list[tuple[str, tuple[float, ...], bool]]]:
    """Return the image file of a VOC XML file, its width and height, and the (class, box, difficult) of objects.

    Raises ValueError for a DTD, which could define entities of any size.
    """
    content = "\n".join(read_lines(str(path)))
    try:
        if "<!DOCTYPE" in content:
            raise ValueError("it has a document type, which is not read")
        root = ElementTree.fromstring(content)
        objects = []
        for item in root.iterfind("object"):
            sides = ("xmin", "ymin", "xmax", "ymax")
            left, top, right, bottom = (float(item.findtext(f"bndbox/{side}", "")) for side in sides)
            if not (-LIMIT < left <= right < LIMIT and -LIMIT < top <= bottom < LIMIT):
                raise ValueError(f"the box {left:g}, {top:g}, {right:g}, {bottom:g} is empty or infinite")
            if (difficult := item.findtext("difficult", "").strip()) not in ("", "0", "1"):
                raise ValueError(f"difficult is {difficult[:60]!r}, which must be 0 or 1")
            if not (name := item.findtext("name", "").strip()):
                raise ValueError("an object has no name")
            objects.append((name, (left - 1, top - 1, right, bottom), difficult == "1"))
        size = tuple(int(root.findtext(f"size/{side}", "0")) for side in ("width", "height"))
        suffix = Path(root.findtext("filename", "").strip()).suffix or ".jpg"
        if not re.fullmatch(r"\.\w{1,9}", suffix):
            raise ValueError(f"its image has the suffix {suffix[:60]!r}")
    except (ValueError, ElementTree.ParseError) as error:
        raise ValueError(f"{path} is not an annotation of VOC: {error}.") from None
    image = path.parent.with_name("JPEGImages") / f"{path.stem}{suffix}"
    if not image.is_file():
        raise FileNotFoundError(f"There is no file {image}, the image of {path}.")
    return image, size, objects
