"""DeiT (arXiv 2012.12877): a ViT with a distillation token, whose classifier learns from a teacher."""

from typing import ClassVar

import flax.linen as nn
from jaxtyping import Array, Float

from lineage.models.base import MODELS
from lineage.models.fields import Image
from lineage.models.vit import ViT


@MODELS.register("deit")
class DeiT(ViT):
    """A ViT with pooling "token" and two classifiers, of the class token and of the distillation token.

    Attributes:
        distillation_head: whether the distillation token has a classifier, which learns from a teacher.
    """

    VARIANTS: ClassVar = {name: ViT.VARIANTS[name] for name in ("mu", "Ti", "S", "B")}

    distillation_head: bool = True

    SPECIAL = ("class_token", "distillation_token")

    @property
    def outputs(self) -> tuple[str, ...]:
        distilled = ("distilled_classes",) if self.distillation_head else ()
        return ("classes", *distilled) if self.num_classes else ("features",)

    def setup(self):
        super().setup()
        if (self.pooling, self.head) != ("token", "linear"):
            raise ValueError(f"pooling is {self.pooling!r} and head {self.head!r}: DeiT requires 'token' and 'linear'.")
        if self.num_classes and self.distillation_head:
            self.distillation_classifier = nn.Dense(self.num_classes, kernel_init=nn.initializers.zeros)

    def __call__(self, image: Image) -> Float[Array, "B V"]:
        """Return the mean of the logits of the heads, or of their tokens [B, D] without a classifier."""
        if not self.distillation_head:
            return super().__call__(image)
        return sum(self.heads(image)) / 2

    def heads(self, image: Image) -> tuple[Float[Array, "B V"], Float[Array, "B V"]]:
        """Return the logits of the head for labels and of the head for the teacher's predictions."""
        if not self.distillation_head:
            raise ValueError("distillation_head is False: the model has one head.")
        tokens = self.encode(image)
        label, teacher = tokens[:, 0], tokens[:, 1]
        return (self.classifier(label), self.distillation_classifier(teacher)) if self.num_classes else (label, teacher)
