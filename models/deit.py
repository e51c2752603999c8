"""DeiT (arXiv 2012.12877): a ViT with a distillation token, whose classifier learns from a teacher."""

from typing import ClassVar

import flax.linen as nn
from jaxtyping import Array, Float

from lineage.models.registry import MODELS
from lineage.models.vit import ViT


@MODELS.register("deit")
class DeiT(ViT):
    """A ViT with pooling "token" and two classifiers, of the class token and of the distillation token."""

    VARIANTS: ClassVar = {name: ViT.VARIANTS[name] for name in ("mu", "Ti", "S", "B")}

    SPECIAL = ("class_token", "distillation_token")

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("classes", "distilled_classes") if self.num_classes else ("features",)

    def setup(self):
        super().setup()
        if (self.pooling, self.head) != ("token", "linear"):
            raise ValueError(f"DeiT has linear heads of two tokens, not {self.head!r} and pooling {self.pooling!r}.")
        if self.num_classes:
            self.distillation_classifier = nn.Dense(self.num_classes, kernel_init=nn.initializers.zeros)

    def __call__(self, image: Float[Array, "B height width channels"]) -> Float[Array, "B V"]:
        """Return the mean of both classifiers' logits, or of both tokens [B, D] without classifiers."""
        return sum(self.heads(image)) / 2

    def heads(self, image: Float[Array, "B height width channels"]) -> tuple[Float[Array, "B V"], Float[Array, "B V"]]:
        """Return the logits of the classifier that learns from labels and of the one that learns from the teacher."""
        tokens = self.encode(image)
        label, teacher = tokens[:, 0], tokens[:, 1]
        return (self.classifier(label), self.distillation_classifier(teacher)) if self.num_classes else (label, teacher)
