"""Adaptive inputs (arXiv 1809.10853) and the adaptive softmax (arXiv 1609.04309), which share their tables."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lineage.models.kernels.vocabulary import Scores, Targets, TokenLosses, scored
from lineage.models.layers.placement import gathered


class Cluster(NamedTuple):
    """Consecutive words of the vocabulary.

    Attributes:
        start: index of the first word.
        stop: index after the last word.
        table: vectors of the words, E = D or smaller.
        inputs: projection of the vectors to the width of the model; None if E = D without a projection.
        outputs: projection of the hidden states, transposed; None without one.
        bias: biases of the logits.
    """

    start: int
    stop: int
    table: Float[Array, "N E"]
    inputs: Float[Array, "E D"] | None
    outputs: Float[Array, "E D"] | None
    bias: Float[Array, "N"]


class AdaptiveEmbed(nn.Module):
    """Token vectors and output layer of a vocabulary that is sorted by frequency, in clusters.

    The first cluster, the head, has the most frequent words. The softmax of the head is over its words and one entry
    for each other cluster (tail); the probability of a word in a tail is that of the tail times that in the tail.
    The tables of input and output are shared, as are the projections of the tails. With `divisor` 1, all vectors have
    the width of the model, without projections.

    Attributes:
        vocab_size: number of words, V.
        width: size of the hidden states, D.
        cutoffs: indices of the first word of each tail.
        divisor: the vectors of tail i have D / divisor^i components.
    """

    vocab_size: int
    width: int
    cutoffs: tuple[int, ...]
    divisor: int = 1
    table_init: nn.initializers.Initializer = nn.initializers.normal(0.02)
    projection_init: nn.initializers.Initializer = nn.initializers.normal(0.01)

    def setup(self):
        ends = (0, *self.cutoffs, self.vocab_size)
        if not self.cutoffs or list(ends) != sorted(set(ends)):
            raise ValueError(f"cutoffs is {self.cutoffs}: they must rise, between 1 and {self.vocab_size - 1}.")
        widths = [self.width // self.divisor**i for i in range(len(ends) - 1)]
        if not widths[-1]:
            raise ValueError(f"divisor is {self.divisor}: the vectors of the last cluster would be empty.")
        if self.divisor == 1:
            shapes = {"": (self.vocab_size, self.width)}
        else:
            sizes = zip(pairwise(ends), widths)
            shapes = {f"_{i}": (stop - start, width) for i, ((start, stop), width) in enumerate(sizes)}
            names = {f"projection_{i}": (width, self.width) for i, width in enumerate(widths)}
            self.projections = [self.param(name, self.projection_init, shape) for name, shape in names.items()]
            self.head_projection = self.param("head_projection", self.projection_init, (self.width, self.width))
        tables = {f"table{name}": shape for name, shape in shapes.items()}
        self.tables = [gathered(self, name, self.param(name, self.table_init, tables[name])) for name in tables]
        self.biases = [self.param(f"bias{name}", nn.initializers.zeros, shape[:1]) for name, shape in shapes.items()]
        self.tail_table = self.param("tail_table", self.table_init, (len(self.cutoffs), self.width))
        self.tail_bias = self.param("tail_bias", nn.initializers.zeros, (len(self.cutoffs),))

    @property
    def table(self) -> Float[Array, "N E"]:
        """The vectors of the first words."""
        return self.tables[0]

    def _clusters(self) -> Iterator[Cluster]:
        for i, (start, stop) in enumerate(pairwise((0, *self.cutoffs, self.vocab_size))):
            if self.divisor == 1:
                yield Cluster(start, stop, self.tables[0][start:stop], None, None, self.biases[0][start:stop])
            else:
                outputs = self.projections[i] if i else self.head_projection
                yield Cluster(start, stop, self.tables[i], self.projections[i], outputs, self.biases[i])

    def __call__(self, tokens: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        """Return the vectors of tokens, times sqrt(width)."""
        if self.divisor == 1:
            return jnp.take(self.table, tokens, axis=0) * self.width**0.5
        vectors = 0
        for start, stop, table, inputs, *_ in self._clusters():
            inside = ((tokens >= start) & (tokens < stop))[..., None]
            found = jnp.take(table, jnp.clip(tokens - start, 0, stop - start - 1), axis=0)
            vectors += jnp.where(inside, found, 0) @ inputs
        return vectors * self.width**0.5

    def logits(self, x: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Return the log-probability of every word, as float32."""
        head, *tails = self._clusters()
        scores = self._scores(x, self._with_tails(head))
        words = head.stop
        parts = [scores[..., :words]]
        for i, tail in enumerate(tails):
            parts.append(scores[..., words + i, None] + self._scores(x, tail))
        return jnp.concatenate(parts, axis=-1)

    def losses(self, x: Float[Array, "B T D"], targets: Targets) -> TokenLosses:
        """Return the losses of targets. The time of a tail is proportional to the number of its tokens.

        Raises:
            ValueError: label smoothing is asked for, which needs the probabilities of all words.
        """
        if targets.label_smoothing:
            raise ValueError(f"label_smoothing is {targets.label_smoothing}: it must be 0 with an adaptive softmax.")
        head, *tails = self._clusters()
        labels, weights = targets.labels, targets.weights
        # The last cluster takes labels that are too large, so that their loss is nan.
        own = sum((labels >= tail.start).astype(jnp.int32) for tail in tails)
        entry = jnp.where(own == 0, labels, head.stop + own - 1)
        whole = self._with_tails(head)
        total, first = scored(*_inputs(x, whole), Targets(entry, weights), among=head.stop)
        loss, best = first.loss, first.index == labels
        for i, tail in enumerate(tails, 1):
            member = own == i
            inside = Targets(labels - tail.start, jnp.where(member, weights, 0))
            partial_sum, scores = scored(*_inputs(x, tail), inside, sparse=True)
            total += partial_sum
            loss += jnp.where(member & (weights != 0), scores.loss, 0)
            best = jnp.where(member, scores.index == inside.labels, best)
        correct = best & self._is_best(x, whole, tails, own, first, loss, weights)
        return TokenLosses(total, loss, correct)

    def _is_best(self, x, head, tails, own, first: Scores, loss, weights):
        """Return whether no word of another cluster has a higher probability than the label (or as high, before it).

        A tail is asked only for tokens for which its own probability leaves this open.
        """
        x, head, tails = jax.lax.stop_gradient((x, head, tails))
        best = (own == 0) | (first.highest - first.normalizer < -loss)
        entries = _logits(x, head.outputs, self.tail_table, self.tail_bias) - first.normalizer[..., None]
        for i, tail in enumerate(tails, 1):
            entry = jax.lax.stop_gradient(entries[..., i - 1])
            higher = jnp.where(own > i, entry >= -loss, entry > -loss)
            asked = best & higher & (own != i) & (weights != 0)
            _, scores = scored(*_inputs(x, tail), Targets(jnp.zeros_like(own), asked), sparse=True)
            highest = entry + scores.highest - scores.normalizer
            beaten = jnp.where(own > i, highest >= -loss, highest > -loss)
            best &= ~(asked & beaten)
        return best & ~jnp.isnan(loss)

    def _with_tails(self, head: Cluster) -> Cluster:
        """Return the head with an entry for each tail."""
        table = jnp.concatenate([head.table, self.tail_table])
        return head._replace(table=table, bias=jnp.concatenate([head.bias, self.tail_bias]))

    def _scores(self, x, cluster):
        return jax.nn.log_softmax(_logits(x, cluster.outputs, cluster.table, cluster.bias))


def _inputs(x, cluster):
    """Return the hidden states in the space of a cluster's vectors, its table and its biases."""
    return x if cluster.outputs is None else x @ cluster.outputs.T, cluster.table, cluster.bias


def _logits(x, projection, table, bias):
    x = x if projection is None else x @ projection.T
    return jnp.einsum("...D,VD->...V", x, table, preferred_element_type=jnp.float32) + bias.astype(jnp.float32)
