"""Images as the inputs of predictions: files, arrays, and replacements of images that cannot be read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lineage.data.content import gather
from lineage.data.loader import ExampleSource
from lineage.data.sources.boxes import boxed, category_names
from lineage.data.sources.files import inside, read_json, read_lines
from lineage.data.sources.folder import SUFFIXES, ImageFiles, image_files
from lineage.data.transforms.pillow import check_pixels, decode

BOXES = "images_with_boxes"


@dataclass(frozen=True)
class MemoryImages(ExampleSource):
    """Examples of images in memory: paths, arrays uint8 [h, w, c], or Pillow's images."""

    images: Sequence[Any]
    channels: int

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: np.ndarray) -> dict[str, Any]:
        images = [self.images[index] for index in indices.tolist()]
        images = [image if isinstance(image, np.ndarray) else decode(image, self.channels) for image in images]
        for image in images:
            check_pixels(image)
        return {"image": images}


@dataclass(frozen=True)
class Readable(ExampleSource):
    """Examples of images without labels; after `note`, images that cannot be read are replaced by black ones."""

    images: ExampleSource
    shape: tuple[int, int, int]  # height, width and channels of the model's images
    resized: bool  # whether images are resized, so that they may have any height and width
    has_boxes: bool  # whether examples have (empty) boxes
    note: Callable[[int, ValueError], None]  # called with the index and error of such an image

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: np.ndarray) -> dict[str, Any]:
        images = [self._read(index) for index in indices.tolist()]
        return gather([{"image": image, **(boxed([]) if self.has_boxes else {})} for image in images])

    def _read(self, index):
        try:
            image = np.asarray(self.images[index]["image"])
            if image.shape != self.shape and not (self.resized and image.shape[2] == self.shape[2]):
                raise ValueError(f"The image has the shape {image.shape}: the model's images have {self.shape}.")
        except ValueError as error:
            self.note(index, ValueError(f"Image {index}: {error}"))
            return np.zeros(self.shape, np.uint8)
        return image


def images_of(path: str, kind: str, channels: int) -> tuple[ImageFiles, list[dict[str, Any]], Mapping[str, int]]:
    """Return the images of a file or folder, see `lineage.data.inputs.from_files`.

    With them are returned the entries that identify each image, its `file` and for images with boxes its `image_id`,
    and the ids of the categories in a file of COCO by name.
    """
    name, _, folder = (path, "", "") if Path(path).exists() else path.partition(",")
    root = Path(folder or (name if Path(name).is_dir() else Path(name).parent))
    suffix, ids, categories = Path(name).suffix.lower(), (), {}
    if Path(name).is_dir():
        files = image_files(name)
    elif suffix in SUFFIXES:
        files = [Path(name)]
    elif suffix == ".txt":
        files = [inside(root, line, name) for line in read_lines(name) if line.strip()]
    elif suffix == ".json":
        files, ids, categories = _coco(name, root)
    elif not Path(name).exists():
        raise FileNotFoundError(f"There is no file or folder {name}.")
    else:
        raise ValueError(f"{path} must be an image, a folder, a .txt with paths, a .json of COCO, or a source.")
    if not files:
        raise ValueError(f"There is no image in {path}.")
    entries = [{"file": str(file.relative_to(root) if file.is_relative_to(root) else file)} for file in files]
    if kind == BOXES:
        entries = [{"image_id": id, **file} for id, file in zip(ids or range(len(files)), entries)]
    return ImageFiles(files, np.zeros(len(files), np.int32), channels), entries, categories


def _coco(path, root):
    """Return the files of the images in a file of COCO, their ids, and the ids of its categories by name."""
    content = read_json(path)
    try:
        ids = [image["id"] for image in content["images"]]
        files = [inside(root, image["file_name"], path) for image in content["images"]]
        categories = category_names(path, content.get("categories", ()))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a file in COCO's format: {type(error).__name__} {error}.") from None
    return files, ids, {name: id for id, name in categories.items()}
