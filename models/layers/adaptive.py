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
from lineage.models.layers.quantized import take_rows


class Cluster(NamedTuple):
    """Consecutive words of the vocabulary, from `start` up to but excluding `stop`."""

    start: int
    stop: int
    table: Float[Array, "N E"]  # vectors of the words, E <= D
    inputs: Float[Array, "E D"] | None  # projection of the vectors to the width of the model
    outputs: Float[Array, "E D"] | None  # projection of the hidden states, transposed
    bias: Float[Array, "N"]  # biases of the logits


class AdaptiveEmbed(nn.Module):
    """Token embeddings and output layer of a vocabulary that is sorted by frequency, in clusters.

    The first cluster, the head, has the most frequent words. The softmax of the head is over its words and one entry
    for each other cluster (tail); the probability of a word in a tail is that of the tail times that of the word within
    the tail. Input and output share the tables, and the projections of the tails. With `divisor` 1, all vectors have
    the width of the model, and there are no projections.

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

    def setup(self):
        of_vectors, of_projections = nn.initializers.normal(0.02), nn.initializers.normal(0.01)
        ends = (0, *self.cutoffs, self.vocab_size)
        if not self.cutoffs or list(ends) != sorted(set(ends)):
            raise ValueError(f"cutoffs is {self.cutoffs}: they must increase, from 1 to {self.vocab_size - 1} at most.")
        widths = [self.width // self.divisor**i for i in range(len(ends) - 1)]
        if not widths[-1]:
            raise ValueError(f"divisor is {self.divisor}: the vectors of the last cluster would be empty.")
        if self.divisor == 1:
            shapes = {"": (self.vocab_size, self.width)}
        else:
            sizes = zip(pairwise(ends), widths)
            shapes = {f"_{i}": (stop - start, width) for i, ((start, stop), width) in enumerate(sizes)}
            names = {f"projection_{i}": (width, self.width) for i, width in enumerate(widths)}
            self.projections = [self.param(name, of_projections, shape) for name, shape in names.items()]
            self.head_projection = self.param("head_projection", of_projections, (self.width, self.width))
        tables = {f"table{name}": shape for name, shape in shapes.items()}
        self.tables = [gathered(self, name, self.param(name, of_vectors, tables[name])) for name in tables]
        self.biases = [self.param(f"bias{name}", nn.initializers.zeros, shape[:1]) for name, shape in shapes.items()]
        self.tail_table = self.param("tail_table", of_vectors, (len(self.cutoffs), self.width))
        self.tail_bias = self.param("tail_bias", nn.initializers.zeros, (len(self.cutoffs),))

    @property
    def table(self) -> Float[Array, "N E"]:
        """Vectors of the first cluster."""
        return self.tables[0]

    def _clusters(self) -> Iterator[Cluster]:
        for i, (start, stop) in enumerate(pairwise((0, *self.cutoffs, self.vocab_size))):
            if self.divisor == 1:
                yield Cluster(start, stop, self.tables[0][start:stop], None, None, self.biases[0][start:stop])
            else:
                outputs = self.projections[i] if i else self.head_projection
                yield Cluster(start, stop, self.tables[i], self.projections[i], outputs, self.biases[i])

    def __call__(self, tokens: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        """Return the vectors of tokens, multiplied by sqrt(D)."""
        if self.divisor == 1:
            return take_rows(self.table, tokens) * self.width**0.5
        vectors = 0
        for start, stop, table, inputs, *_ in self._clusters():
            inside = ((tokens >= start) & (tokens < stop))[..., None]
            chosen = take_rows(table, jnp.clip(tokens - start, 0, stop - start - 1))
            vectors += jnp.where(inside, chosen, 0) @ inputs
        return vectors * self.width**0.5

    def logits(self, x: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Return the log-probability of every word, as float32."""
        head, *tails = self._clusters()
        words, entries = jnp.split(jax.nn.log_softmax(_logits(x, self._with_tails(head))), [head.stop], axis=-1)
        parts = [entries[..., i, None] + jax.nn.log_softmax(_logits(x, tail)) for i, tail in enumerate(tails)]
        return jnp.concatenate([words, *parts], axis=-1)

    def losses(self, x: Float[Array, "B T D"], targets: Targets) -> TokenLosses:
        """Return the losses of targets. The time of a tail is proportional to the number of its tokens.

        Raise ValueError if label smoothing is above 0, because it needs the probabilities of all words.
        """
        if targets.label_smoothing:
            raise ValueError(f"label_smoothing is {targets.label_smoothing}: it must be 0 with an adaptive softmax.")
        head, *tails = self._clusters()
        labels, weights = targets.labels, targets.weights
        # Labels that are too large count as words of the last cluster, so that their loss is nan.
        cluster = sum((labels >= tail.start).astype(jnp.int32) for tail in tails)
        entry = jnp.where(cluster == 0, labels, head.stop + cluster - 1)
        full_head = self._with_tails(head)
        total, first = scored(*_inputs(x, full_head), Targets(entry, weights), among=head.stop)
        loss, best = first.loss, first.index == labels
        for i, tail in enumerate(tails, 1):
            member = cluster == i
            inside = Targets(labels - tail.start, jnp.where(member, weights, 0))
            partial_sum, scores = scored(*_inputs(x, tail), inside, sparse=True)
            total += partial_sum
            loss += jnp.where(member & (weights != 0), scores.loss, 0)
            best = jnp.where(member, scores.index == inside.labels, best)
        correct = best & self._is_best(x, full_head, tails, cluster, first, loss, weights)
        return TokenLosses(total, loss, correct)

    def _is_best(self, x, head, tails, cluster, first: Scores, loss, weights):
        """Return whether no word of another cluster is more probable than the label (or as probable and before it).

        A tail is evaluated only for tokens for which the probability of the whole tail does not decide this.
        """
        x, head, tails = jax.lax.stop_gradient((x, head, tails))
        best = (cluster == 0) | (first.highest - first.normalizer < -loss)
        entries = _logits(x, head._replace(table=self.tail_table, bias=self.tail_bias)) - first.normalizer[..., None]
        for i, tail in enumerate(tails, 1):
            entry = jax.lax.stop_gradient(entries[..., i - 1])
            higher = jnp.where(cluster > i, entry >= -loss, entry > -loss)
            undecided = best & higher & (cluster != i) & (weights != 0)
            _, scores = scored(*_inputs(x, tail), Targets(jnp.zeros_like(cluster), undecided), sparse=True)
            highest = entry + scores.highest - scores.normalizer
            exceeded = jnp.where(cluster > i, highest >= -loss, highest > -loss)
            best &= ~(undecided & exceeded)
        return best & ~jnp.isnan(loss)

    def _with_tails(self, head: Cluster) -> Cluster:
        """Return the head with an entry for each tail."""
        table = jnp.concatenate([head.table, self.tail_table])
        return head._replace(table=table, bias=jnp.concatenate([head.bias, self.tail_bias]))


def _inputs(x, cluster):
    """Return the hidden states in the space of a cluster's vectors, its table and its biases."""
    return x if cluster.outputs is None else x @ cluster.outputs.T, cluster.table, cluster.bias


def _logits(x, cluster):
    x, table, bias = _inputs(x, cluster)
    return jnp.einsum("...D,VD->...V", x, table, preferred_element_type=jnp.float32) + bias.astype(jnp.float32)
