"""Base classes of image tasks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from lineage.configs.registry import Natural, Needs, Range
from lineage.data import Examples, ExampleSource, Facts, Images, Tokenizer
from lineage.data.content import Transform, in_memory, random_subset
from lineage.data.transforms import augmentation
from lineage.data.transforms.pillow import check_pixels
from lineage.models import Model
from lineage.tasks.base import Batch, InputExamples, Sizes, Task


@dataclass(frozen=True)
class CheckedExamples(ExampleSource):
    """Base class of the examples of a split whose class indices are checked on access. A subclass has a method `take`.

    Attributes:
        split: name of the split, for messages.
        num_classes: number of classes; indices are from 0 to num_classes - 1.
    """

    source: ExampleSource
    split: str
    num_classes: int

    def __len__(self) -> int:
        return len(self.source)

    def check(self, index: int) -> None:
        self.source.check(index)

    def notes(self) -> Iterator[str]:
        return self.source.notes()


@dataclass(frozen=True)
class ImageTask(Task):
    """Base class of image tasks.

    Attributes:
        image_size: height and width that images are resized to, in pixels; 0: images keep their size.
        mean, std: normalization of pixels from 0 to 1, (pixel - mean) / std; one value, or one per channel.
        augment: augmentation of training images, such as "crop | flip | randaugment(2, 10)"; empty: none.
    """

    reads = "images"
    inputs = ("image",)
    arguments = ("image",)

    image_size: Natural = 0
    mean: tuple[float, ...] = (0.5,)
    std: Annotated[tuple[float, ...], Range(above=0)] = (0.5,)
    augment: str = ""

    def check_model(self, model: Model) -> None:
        super().check_model(model)
        classifies = not {"classes", "distilled_classes"}.isdisjoint(self.needs)
        for name, needed in {"channels": True, "image_size": self.image_size, "num_classes": classifies}.items():
            if needed and name not in dir(model):
                raise ValueError(f"The model {type(model).__name__} has no field {name}, which {self.name!r} needs.")

    def axes(self, sizes: Sizes) -> dict[str, int]:
        """Return B, height, width and channels: the size is that of the model, or of the data if none is set."""
        model = sizes.model
        height, width = (model.image_size,) * 2 if self.image_size else sizes.facts().image_size
        return {"B": sizes.batch_size, "height": height, "width": width, "channels": model.channels}

    def known_facts(self, model: Model, tokenizer: Callable[[], Tokenizer]) -> dict[str, Any]:
        size = {"image_size": (self.image_size,) * 2, "channels": model.channels} if self.image_size else {}
        return {"mean": self.mean, "std": self.std, **size}

    def forward(self, model: Model, batch: Batch) -> Any:
        return model(batch["image"])

    def evaluation_transform(self, facts: Facts) -> Transform:
        """Return the transform of images for evaluation and prediction."""
        raise NotImplementedError

    def input_examples(self, rows: ExampleSource, tokenizer: Tokenizer | None, facts: Facts) -> InputExamples:
        return InputExamples(rows, self.evaluation_transform(facts))

    def facts(self, train: ExampleSource, class_names: Sequence[str], size: int) -> Facts:
        """Return the metadata of images that are resized to `size`; raise ValueError if `mean` or `std` do not fit."""
        if not len(train):
            raise ValueError("The training set is empty: at least one example is needed.")
        image = train[0]["image"]
        check_pixels(image)
        height, width, channels = image.shape
        mean, std = tuple(self.mean), tuple(self.std)
        if not {len(mean), len(std)} <= {1, channels}:
            raise ValueError(f"task.mean is {mean} and task.std {std}: they need 1 or {channels} numbers each.")
        shape = (size, size) if size else (height, width)
        options = {"image_size": shape, "channels": channels, "mean": mean, "std": std}
        return Facts(num_classes=len(class_names), class_names=tuple(class_names), **options)


@dataclass(frozen=True)
class LabeledImageTask(ImageTask):
    """Base class of labeled-image tasks.

    Attributes:
        evaluation_crop: central fraction of a resized image to keep; also in training, unless `augment` crops.
        squash: whether to resize images without preserving their aspect ratio, instead of cropping their longer side.
        resample: interpolation of resized images and of crops.
        max_examples: number of training images, a random subset (by the seed) that contains smaller ones; 0: all.
        in_memory: whether to decode all images at the start.
    """

    loader_options = ("repeats",)
    arrays: ClassVar = {"image": "float32 B height width channels", "label": "int32 B", "mask": "bool B"}

    evaluation_crop: Annotated[float, Range(above=0, high=1), Needs("image_size")] = 1.0
    squash: Annotated[bool, Needs("image_size")] = False
    resample: Literal[*augmentation.RESAMPLING] = "bilinear"
    max_examples: Natural = 0
    in_memory: bool = False

    def examples(self, content: Images, tokenizer: Tokenizer | None, seed: int) -> Examples:
        splits, size = dict(content.splits), self.image_size
        if self.max_examples and "train" in splits:
            splits["train"] = random_subset(splits["train"], self.max_examples, seed)
        if self.in_memory:
            splits = {name: in_memory(part) for name, part in splits.items()}
        facts = self.known or self.facts(splits["train"], content.class_names, size)
        steps = augmentation.parse(self.augment, size, self.resample)
        crop = steps.pop(0) if steps and isinstance(steps[0], augmentation.RandomCrop) else self._resize
        erase = steps.pop() if steps and isinstance(steps[-1], augmentation.Erase) else None
        train = augmentation.Transform(crop, steps, facts.mean, facts.std, erase)
        return Examples(splits, facts, train, self.evaluation_transform(facts))

    def evaluation_transform(self, facts: Facts) -> Transform:
        return augmentation.Transform(self._resize, [], facts.mean, facts.std)

    @property
    def _resize(self):
        size, fraction = self.image_size, self.evaluation_crop
        return augmentation.CenterCrop(size, fraction, self.resample, self.squash) if size else None

    def feature_extractor(self, model: Model) -> Model:
        return model if model.data_options["num_classes"] is None else model.clone(num_classes=0)


def first_images(split: Any, count: int) -> dict[str, Any]:
    """Return at most `count` examples of the first batch of a split, without the padding of a small split."""
    batch = split.batches[0]
    return {name: value[batch["mask"]][:count] for name, value in batch.items()}


def to_pixels(image: np.ndarray, facts: Facts) -> np.ndarray:
    """Return normalized images as pixels from 0 to 1."""
    return np.clip(image * np.asarray(facts.std) + np.asarray(facts.mean), 0, 1).astype(np.float32)
