"""What a task or an evaluator needs a model to offer: protocols, checked with `isinstance`.

A model of one's own fits as soon as it has the members; it inherits from nothing but `flax.linen.Module`.
"""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class ImageModel(Protocol):
    """A model of images.

    Attributes:
        image_size: side of the square images that the model is made for, in pixels; the data's unless it is set.
        channels: of the images; the data's unless it is set.
    """

    image_size: int
    channels: int


@runtime_checkable
class TextEncoder(Protocol):
    """A model of texts with one head out of several.

    Attributes:
        head: the name of the head, which must be that of the task (`Task.head`).
        vocab_size: number of tokens.
    """

    head: str
    vocab_size: int


@runtime_checkable
class Decoder(Protocol):
    """A model that generates text. See `lineage.models.decoding`."""

    def init_cache(self, batch_size: int, max_length: int) -> Any:
        """Return an empty cache."""

    def decode(self, tokens: Any, cache: Any, memory: Any = None) -> Any:
        """Return the logits of the next tokens, and the cache."""


@runtime_checkable
class EncoderDecoder(Decoder, Protocol):
    """A model that generates text from an input."""

    def encode(self, inputs: Any, mask: Any = None) -> Any:
        """Return the memory that the decoder attends to."""


@runtime_checkable
class Detector(Protocol):
    """A model that predicts a set of boxes with classes.

    Attributes:
        num_queries: the most objects in an image.
    """

    num_queries: int


@runtime_checkable
class MaskedAutoencoder(Protocol):
    """A model that reconstructs hidden patches of an image.

    Attributes:
        patch_size: side of a patch, in pixels.
        mask_rate: fraction of the patches that is hidden.
    """

    patch_size: int
    mask_rate: float

    def target(self, image: Any) -> Any:
        """Return what is to be predicted of each patch."""


@runtime_checkable
class DistilledModel(Protocol):
    """An image classifier with one head for labels and one for a teacher's outputs."""

    def heads(self, image: Any) -> Any:
        """Return the logits of both heads."""


@runtime_checkable
class ScheduledSampler(Protocol):
    """A decoder that can read its own predictions in training, with the argument `own_rate` of its call."""

    samples_own_tokens: bool


@runtime_checkable
class TargetMasked(Protocol):
    """A decoder whose call takes the `mask` of the targets.

    Attributes:
        needs_target_mask: whether norms use statistics of a batch, in which padding must not count.
    """

    needs_target_mask: bool
