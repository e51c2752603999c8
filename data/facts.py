"""Facts about the data that models, losses, evaluators and reports need."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Facts:
    """Facts about the data of a run; None or empty where a fact does not apply.

    Attributes:
        examples: the number of examples in each split; `data.load` fills it in.
        vocab_size: the number of token ids.
        sequence_length: the length that sequences are padded to, in tokens.
        num_classes: the number of classes; 1 for regression.
        class_names: the names of the classes in order.
        image_size: height and width of the model's images in pixels.
        channels: the number of channels of an image.
        mean, std: normalisation of images, one number or one for each channel: (pixel / 255 - mean) / std.
        tokens: the number of tokens in each split of documents.
        characters_per_token: the mean number of characters that a token stands for, for each split of documents.
        bytes_per_token: the same in UTF-8 bytes.
        start_token: the token that a decoder's input begins with.
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
