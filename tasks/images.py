"""Base classes of tasks of images: examples, features and pictures."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from lineage.data import Examples, ExampleSource, Facts, Images, Tokenizer
from lineage.data.examples import images
from lineage.data.transforms import augmentation
from lineage.metrics.states import Confusion
from lineage.models import Model
from lineage.tasks.attention import attention_of_images
from lineage.tasks.base import Batch, Pictures, Spec, Task, check_range, specs

MISTAKES = 24  # shown in the report: those that the model was surest of


@dataclass(frozen=True)
class ImageTask(Task):
    """Base class of tasks of images.

    Attributes:
        image_size: side of the square that images are resized to, in pixels; 0 leaves images of one size as they are.
        mean: image = (pixel in 0..1 - mean) / std; one number, or one for each channel.
        std: see `mean`.
        augment: of training images, steps such as "crop | flip | randaugment(2, 10)"; "" is none.
    """

    reads: ClassVar[str] = "images"
    inputs: ClassVar[tuple[str, ...]] = ("image",)
    arguments: ClassVar[tuple[str, ...]] = ("image",)

    image_size: int = 0
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    augment: str = ""

    def __post_init__(self):
        super().__post_init__()
        check_range("image_size", self.image_size)
        if not self.mean or not self.std or min(self.std) <= 0:
            raise ValueError(f"task.std is {self.std} and task.mean {self.mean}: all of std must be above 0.")

    def image_spec(self, batch_size: int, model: Model, facts: Callable[[], Facts]) -> Spec:
        """Return the spec of `image` [B, height, width, channels]: the model's size, or the data's if none is set."""
        size = (model.image_size,) * 2 if self.image_size else facts().image_size
        return specs(jnp.float32, image=(batch_size, *size, model.channels))

    def forward(self, model: Model, batch: Batch) -> Any:
        return model(batch["image"])

    def normalisation(self, image: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and std, of which an image must have as many channels as there are numbers, or there is one.

        Raises:
            ValueError: there are other numbers.
        """
        mean, std, channels = tuple(self.mean), tuple(self.std), image.shape[-1]
        if not {len(mean), len(std)} <= {1, channels}:
            raise ValueError(f"task.mean is {mean} and task.std {std}: they need 1 or {channels} numbers each.")
        return mean, std


@dataclass(frozen=True)
class LabelledImageTask(ImageTask):
    """Base class of tasks of labelled images.

    Attributes:
        evaluation_crop: central fraction of a resized image that is kept; in training too, unless `augment` crops.
        resample: interpolation of resized images and of crops.
        max_examples: number of training images, drawn by the seed, smaller sets within larger ones; 0 is all.
        in_memory: whether to decode all images once, at the start.
    """

    loader_options: ClassVar[tuple[str, ...]] = ("repeats",)

    evaluation_crop: float = 1.0
    resample: Literal["bilinear", "bicubic"] = "bilinear"
    max_examples: int = 0
    in_memory: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_range("max_examples", self.max_examples)

    def examples(self, content: Images, tokenizer: Tokenizer | None, seed: int) -> Examples:
        splits, names = dict(content.splits), tuple(content.class_names)
        if self.max_examples:
            splits["train"] = images.draw(splits["train"], self.max_examples, seed)
        if self.in_memory:
            splits = {name: images.in_memory(part) for name, part in splits.items()}
        image = first_image(splits["train"])
        mean, std = self.normalisation(image)
        size = self.image_size
        resize = augmentation.CentreCrop(size, self.evaluation_crop, self.resample) if size else None
        steps = augmentation.parse(self.augment, size, self.resample)
        crop = steps.pop(0) if steps and isinstance(steps[0], augmentation.RandomCrop) else resize
        erase = steps.pop() if steps and isinstance(steps[-1], augmentation.Erase) else None
        facts = Facts(
            num_classes=len(names),
            class_names=names,
            image_size=(size, size) if size else image.shape[:2],
            channels=image.shape[2],
            mean=mean,
            std=std,
        )
        train = augmentation.Transform(crop, steps, mean, std, erase)
        return Examples(splits, facts, None, train, augmentation.Transform(resize, [], mean, std))

    def batch_spec(self, batch_size: int, model: Model, facts: Callable[[], Facts], length: int | None = None) -> Spec:
        image = self.image_spec(batch_size, model, facts)
        return image | specs(jnp.int32, label=(batch_size,)) | specs(bool, mask=(batch_size,))

    def feature_extractor(self, model: Model) -> Model:
        return model.clone(num_classes=0)


@dataclass(frozen=True)
class Classification(LabelledImageTask):
    """Base class of tasks whose models return the logits of an image's class."""

    def predict(self, outputs: Any, batch: dict[str, np.ndarray], facts: Facts) -> list[dict[str, Any]]:
        return class_predictions(outputs, batch["mask"], facts)

    def pictures(
        self,
        split: str,
        model: Model,
        variables: Mapping[str, Any],
        batches: Iterable[dict[str, np.ndarray]],
        facts: Facts,
        tokenizer: Tokenizer | None,
    ) -> Pictures:
        """Return a split's confusion matrix, the mistakes that the model was surest of, and attention weights."""
        names, first = np.asarray(facts.class_names), None
        ask = jax.jit(lambda variables, image: jax.nn.softmax(model.apply(variables, image).astype(jnp.float32)))
        confusion = Confusion.empty(len(names))
        mistakes: list[tuple[float, np.ndarray, int, int]] = []
        for batch in batches:
            first = batch if first is None else first
            chances = np.asarray(ask(variables, batch["image"]))
            predictions = chances.argmax(axis=-1)
            confusion = confusion.update(*map(jnp.asarray, (predictions, batch["label"], batch["mask"])))
            for i in np.flatnonzero((predictions != batch["label"]) & batch["mask"]):
                mistakes.append((chances[i].max(), batch["image"][i], batch["label"][i], predictions[i]))
            mistakes = sorted(mistakes, key=lambda mistake: -mistake[0])[:MISTAKES]
        found: Pictures = {f"confusion_{split}": {"counts": np.asarray(confusion.counts), "class_names": names}}
        if mistakes:
            probability, image, label, prediction = map(np.stack, zip(*mistakes))
            found[f"mistakes_{split}"] = {
                "image": to_pixels(image, facts),
                "label": label,
                "prediction": prediction,
                "probability": probability,
                "class_names": names,
            }
        return found | attention_of_images(model, variables, first["image"], lambda image: to_pixels(image, facts))


def first_image(train: ExampleSource) -> np.ndarray:
    """Return the first image [h, w, c] of a training set.

    Raises:
        ValueError: there is none.
    """
    if not len(train):
        raise ValueError("The training set is empty: at least one example is needed.")
    return train[0]["image"]


def class_predictions(logits: np.ndarray, mask: np.ndarray, facts: Facts) -> list[dict[str, Any]]:
    """Return the likeliest class and its probability for each example [B, V] whose mask [B] is True."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    chances = np.exp(shifted) / np.exp(shifted).sum(axis=-1, keepdims=True)
    return [
        {"label": facts.class_names[row.argmax()], "score": float(row.max())} for row in chances[np.flatnonzero(mask)]
    ]


def to_pixels(image: np.ndarray, facts: Facts) -> np.ndarray:
    """Return normalised images as pixel values from 0 to 1."""
    return np.clip(image * np.asarray(facts.std) + np.asarray(facts.mean), 0, 1).astype(np.float32)
