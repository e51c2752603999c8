"""BERT (arXiv 1810.04805): a bidirectional, post-norm Transformer encoder with a task-specific head.

Its descendants are the same encoder with other settings: `roberta.py`, `distilbert.py`, `albert.py`, `electra.py`,
`bigbird.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lineage.configs.registry import Needs, Range
from lineage.models.base import MODELS, Layers, StackModel
from lineage.models.fields import Count, Epsilon, Implementation, Natural, Rate, Size
from lineage.models.layers import ACTIVATIONS, Attention, Block, Dropout, Embed, LayerNorm, Linear, Mask, Mlp
from lineage.models.layers.position import Learned
from lineage.models.layers.quantized import take_rows

Output = Float[Array, "..."] | tuple[Float[Array, "..."], Float[Array, "..."]]
WORDS = ("masked_lm", "pretraining")  # heads that predict tokens
POOLED = ("pooler", "pretraining", "next_sentence", "classification", "choice")  # heads that use the pooled first token
# Number of outputs of the classifier of a head; 0: it has none; that of other heads has `num_classes`.
OUTPUTS = {"none": 0, "pooler": 0, "masked_lm": 0, "choice": 1, "replaced": 1}
OUTPUTS |= {"pretraining": 2, "next_sentence": 2, "question_answering": 2}
CLASSIFIERS = ("classification", "token_classification")  # heads with `num_classes`
Classifier = Literal["classification", "token_classification", "question_answering", "choice"]  # of most models


@MODELS.register("bert")
class BERT(StackModel):
    """An encoder of token sequences. The output depends on the head:

    - "none": the last hidden states [B, T, D].
    - "pooler": these and the pooled vector of the first token [B, D].
    - "masked_lm": logits of each token [B, T, V].
    - "pretraining": these and logits [B, 2] of the second segment following the first (0) or not (1).
    - "next_sentence": only the logits [B, 2].
    - "classification": logits of the class of the text or of the pair [B, V].
    - "token_classification": logits of each token's class [B, T, V].
    - "question_answering": logits of the answer's first and last token [B, T, 2].
    - "choice": a logit for each of N texts [B, N].

    Attributes:
        num_segments: number of segments with an embedding; 0 disables segment embeddings.
        head: output of the model: the last hidden states ("none"), also the pooled vector of the first token
            ("pooler"), or the logits of a task.
        num_classes: number of classes of "classification" and "token_classification", V.
        head_dropout: rate before the classifier of "classification", "token_classification" and "choice"; None:
            `dropout`.
    """

    VARIANTS: ClassVar = {
        "tiny": {"depth": 2, "width": 128, "num_heads": 2},
        "mini": {"depth": 4, "width": 256, "num_heads": 4},
        "small": {"depth": 4, "width": 512, "num_heads": 8},
        "medium": {"depth": 8, "width": 512, "num_heads": 8},
        "base": {"depth": 12, "width": 768, "num_heads": 12},
        "large": {"depth": 24, "width": 1024, "num_heads": 16},
    }
    FROM_DATA = ("vocab_size", "max_length", "head", "num_classes")
    head_parameters = "^classifier/"

    vocab_size: Count = 30_522
    max_length: Count = 512
    num_segments: Natural = 2
    depth: Count = 12
    width: Count = 768
    num_heads: Count = 12
    mlp_dim: Size = None
    head: Literal["none", "pooler", "masked_lm", "pretraining", "next_sentence", Classifier] = "pretraining"
    num_classes: Annotated[Count, Needs("head", CLASSIFIERS)] = 2
    epsilon: Epsilon = 1e-12
    dropout: Rate = 0.1
    head_dropout: Annotated[float | None, Range(0, below=1), Needs("head", (*CLASSIFIERS, "choice"))] = None
    attend: Implementation = "auto"

    input_parameters = "^(embed|position|projection|segment)"

    # Attributes that subclasses override.
    attention = Attention
    embed_width = None  # E; None: D, without a projection
    first_position = 0  # row of the position table for the first token
    pooler_activation = staticmethod(jnp.tanh)
    words_activation = None  # between the two projections of "masked_lm"; None: `activation`
    dropout_first = False  # dropout on the embeddings comes before their norm

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("features" if self.head == "none" else self.head,)

    @property
    def layer_groups(self) -> tuple[Layers, ...]:
        return (Layers("stack/layers", self.depth),)

    def setup(self):
        init = nn.initializers.truncated_normal(0.02)
        activation = ACTIVATIONS[self.activation]
        norm, linear = partial(LayerNorm, epsilon=self.epsilon), partial(Linear, kernel_init=init)
        shared = {"kernel_init": init, "out_init": init}
        attention = partial(self.attention, self.num_heads, dropout=self.dropout, attend=self.attend, **shared)
        mlp = partial(Mlp, self.mlp_size, activation, **shared)
        block = partial(Block, attention=attention, mlp=mlp, norm=norm, norm_placement="post", dropout=self.dropout)
        embed_width = self.embed_width or self.width
        self.embed = Embed(self.vocab_size, embed_width, table_init=init)
        self.position = Learned(self.first_position + self.max_length, embed_width)
        if self.num_segments:
            self.segment = Embed(self.num_segments, embed_width, table_init=init)
        self.embed_norm = norm()
        self.embed_dropout = Dropout(self.dropout)
        if self.embed_width:
            self.projection = linear((self.width,))
        self.stack = self.make_stack(partial(self.new_stack, block))
        if self.head in POOLED:
            self.pooler = linear((self.width,))
        if self.head in WORDS:
            self.masked_lm = MaskedLM(self.words_activation or activation, norm, linear)
        outputs = OUTPUTS.get(self.head, self.num_classes)
        if outputs:
            self.classifier = linear((outputs,))
        self.classifier_dropout = Dropout(self.dropout if self.head_dropout is None else self.head_dropout)

    def __call__(
        self, tokens: Int[Array, "*B T"], *, masked_positions: Int[Array, "*B M"] | None = None, **inputs: Array | None
    ) -> Output:
        """Return the output of the head, see the documentation of the class.

        Args:
            tokens: at most `max_length` per sequence, or ValueError is raised; the first one represents the text.
                [B, N, T] for "choice".
            masked_positions: positions [B, M] of the tokens to predict; the logits are then [B, M, V].
            inputs: see `encode`.
        """
        return self.apply_head(self.encode(tokens, **inputs), masked_positions)

    def encode(
        self,
        tokens: Int[Array, "*B T"],
        *,
        segments: Int[Array, "*B T"] | None = None,
        mask: Bool[Array, "*B T"] | None = None,
        positions: Int[Array, "*#B T"] | None = None,
    ) -> Float[Array, "*B T D"]:
        """Return the last hidden states.

        Args:
            tokens: see `__call__`.
            segments: segment id of each token, the index of its text in a pair; None, or with one segment: 0.
            mask: True for real tokens, False for padding, which is masked out in attention.
            positions: positions of the tokens; None: 0 to T-1.
        """
        *batch, length = tokens.shape
        self.check_length(length)
        positions = self.positions(tokens) if positions is None else positions
        x = self.embed(tokens) + take_rows(self.position(), positions + self.first_position)
        if self.num_segments:
            x = x + self.segment(jnp.zeros_like(tokens) if segments is None or self.num_segments == 1 else segments)
        drop = self.embed_dropout
        x = self.embed_norm(drop(x)) if self.dropout_first else drop(self.embed_norm(x))
        x = self.projection(x) if self.embed_width else x
        self.sow("intermediates", "embedding", x)
        mask = None if mask is None else Mask(keys=mask.reshape(-1, length))
        x, _ = self.stack(x.reshape(-1, length, self.width), mask=mask, each=self.each_layer(length))
        return x.reshape(*batch, length, self.width)

    def make_stack(self, stack: Callable[..., nn.Module]) -> nn.Module:
        """Return the encoder's layers; `stack` constructs a stack of a given number of layers."""
        return stack(self.depth)

    def each_layer(self, length: int) -> dict[str, Any] | None:
        """Return inputs that differ between layers, with a leading layer axis, for sequences of a length."""

    def positions(self, tokens: Int[Array, "*B T"]) -> Int[Array, "*#B T"]:
        """Return the default positions of tokens."""
        return jnp.arange(tokens.shape[-1]).reshape(*[1] * (tokens.ndim - 1), -1)

    def pool(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B D"]:
        """Return the pooled output of the first token."""
        return self.pooler_activation(self.pooler(x[..., 0, :]))

    def apply_head(self, x: Float[Array, "*B T D"], masked_positions: Int[Array, "*B M"] | None = None) -> Output:
        """Return the output of the head for the last hidden states."""
        if self.head in ("none", "pooler"):
            return x if self.head == "none" else (x, self.pool(x))
        if self.head in WORDS:
            masked = x if masked_positions is None else jnp.take_along_axis(x, masked_positions[..., None], axis=-2)
            words = self.masked_lm(masked, self.embed)
            return words if self.head == "masked_lm" else (words, self.classifier(self.pool(x)))
        x = self.pool(x) if self.head in POOLED else x
        if self.head not in ("next_sentence", "question_answering"):
            x = self.classifier_dropout(x)
        logits = self.classifier(x)
        return logits[..., 0] if self.head == "choice" else logits


class MaskedLM(nn.Module):
    """Head of masked language modeling: a dense layer, the product with the token embeddings, and a bias."""

    activation: Callable
    norm: Callable[..., nn.Module]
    linear: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"], embed: Embed) -> Float[Array, "*B V"]:
        x = self.activation(self.linear((embed.width,), name="dense")(x))
        bias = self.param("bias", nn.initializers.zeros, (embed.vocab_size,))
        return embed.logits(self.norm(name="norm")(x)) + bias
