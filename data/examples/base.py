"""Examples: what a task makes from the content of a source."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lineage.data.loader import Batch, ExampleSource
from lineage.data.tokenizers import Tokenizer

Transform = Callable[[dict[str, Any], np.ndarray], Batch]


@dataclass(frozen=True)
class Facts:
    """Metadata of the data of a run; None or empty where one does not apply.

    Attributes:
        examples: number of examples in each split; `data.load` fills it in.
        vocab_size: number of token ids.
        sequence_length: length that sequences are padded to, in tokens.
        num_classes: number of classes; 1 for regression.
        class_names: names of the classes in order.
        image_size: height and width of the model's images in pixels.
        channels: number of channels of an image.
        mean, std: normalization of images, one number or one for each channel: (pixel / 255 - mean) / std.
        tokens: number of tokens in each split of documents.
        characters_per_token: mean number of characters of a token in each split of documents.
        bytes_per_token: same in UTF-8 bytes.
        start_token: token that a decoder's input begins with.
    """

    examples: Mapping[str, int] = field(default_factory=dict)
    vocab_size: int | None = None
    sequence_length: int | None = None
    num_classes: int | None = None
    class_names: tuple[str, ...] = ()
    image_size: tuple[int, int] | None = None
    channels: int | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    tokens: Mapping[str, int] = field(default_factory=dict)
    characters_per_token: Mapping[str, float] = field(default_factory=dict)
    bytes_per_token: Mapping[str, float] = field(default_factory=dict)
    start_token: int | None = None


@dataclass(frozen=True)
class Examples:
    """Examples of each split, "train" among them, and the transforms of their batches.

    A transform is called with a batch and a random key for each example. There is one `evaluation_transform` for all
    splits, or one for each. The tokenizer of images is None.
    """

    splits: Mapping[str, ExampleSource]
    facts: Facts
    tokenizer: Tokenizer | None = None
    train_transform: Transform | None = None
    evaluation_transform: Transform | Mapping[str, Transform] | None = None
