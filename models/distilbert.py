"""DistilBERT (arXiv 1910.01108): BERT at half its depth, without segments and pooler, trained by distillation."""

from typing import ClassVar, Literal

import jax

from lineage.models.base import MODELS
from lineage.models.bert import BERT, Classifier
from lineage.models.fields import Count, Natural


@MODELS.register("distilbert")
class DistilBERT(BERT):
    """BERT without segments. The classifiers have a layer with a ReLU instead of the pooler."""

    VARIANTS: ClassVar = {"base": {"depth": 6, "width": 768, "num_heads": 12}}

    num_segments: Natural = 0
    depth: Count = 6
    head: Literal["none", "masked_lm", Classifier] = "masked_lm"

    pooler_activation = staticmethod(jax.nn.relu)
