"""Token embeddings from a checkpoint of the BERT family, for `metrics.embedding`."""

import os
import string
from collections.abc import Collection, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from lineage.data.examples.encoded import join
from lineage.data.tokenizers import TokenizerFile
from lineage.evaluation.likelihood import by_length
from lineage.metrics.embedding import Embedded, power_means
from lineage.models import hidden_states
from lineage.models.convert import load

_MULTIPLE = 8  # pad lengths to multiples of this value to limit recompilation


class Encoder:
    """Encoder of texts as token embeddings of a layer; texts of similar length are batched together.

    Leading and trailing white space is stripped; texts longer than the maximum length of the model are truncated.
    """

    def __init__(self, folder: str | os.PathLike, layer: int | Sequence[int] = -1, batch_size: int = 64):
        """Load the model and its tokenizer.

        Args:
            folder: folder of a checkpoint, see `models.convert.load`, and its `tokenizer.json`, which has
                the settings in its `tokenizer_config.json`.
            layer: index of the layer whose hidden states are returned (0: embeddings, -1: last layer); for several
                layers, their `power_means`.
        """
        model, variables = load(folder)
        if not model.has_heads:
            raise ValueError(f"{folder} is a {type(model).__name__}: it must be an encoder of the BERT family.")
        self.tokenizer = TokenizerFile(str(folder)).train(())  # with the settings of the folder
        if None in (self.tokenizer.cls, self.tokenizer.sep):
            raise ValueError(f"{folder}: the tokenizer has no [CLS] and [SEP], or <s> and </s>.")
        if (size := self.tokenizer.vocab_size) > model.vocab_size:
            raise ValueError(f"{folder}: the tokenizer has {size} tokens, more than the model's {model.vocab_size}.")
        single, depth = isinstance(layer, int), model.depth
        layers = [number + depth + 1 if number < 0 else number for number in ([layer] if single else layer)]
        if not layers or min(layers) < 0 or max(layers) > depth:
            raise ValueError(f"layer is {layer}: the model has 0 (the embeddings) to {depth}.")
        params = variables["params"]
        group = model.layer_groups[0]
        if group.stacked:  # omit the layers above the last one that is needed
            depth, stack = max(*layers, 1), group.path.partition("/")[0]
            params = params | {stack: jax.tree.map(lambda a: a[:depth], params[stack])}
        self.model, self.batch_size = model.clone(head="none", depth=depth), batch_size

        @jax.jit
        def forward(params, tokens, mask):
            states = hidden_states(self.model, {"params": params}, tokens, mask=mask)
            hidden = jnp.stack([states.embedding["encoder"], *states.layers["encoder"]])
            return hidden[layers[0]] if single else power_means(hidden[np.array(layers)])

        self._forward = partial(forward, params)

    def __call__(self, texts: Sequence[str]) -> list[Embedded]:
        tokenizer, texts = self.tokenizer, [text.strip() for text in texts]
        if self.model.space_first:
            texts = [f" {text}" if text else "" for text in texts]  # words are preceded by a space
        rows = [join(tokenizer, ids[: self.model.max_length - 2])[0] for ids in tokenizer.encode_batch(texts)]
        embedded = {}
        for batch, size in by_length(list(map(len, rows)), self.batch_size, _MULTIPLE, self.model.max_length):
            tokens = np.full((self.batch_size, size), tokenizer.pad or 0, np.int32)
            mask = np.zeros(tokens.shape, bool)
            for place, i in enumerate(batch):
                tokens[place, : len(rows[i])], mask[place, : len(rows[i])] = rows[i], True
            vectors = np.asarray(self._forward(tokens, mask))
            embedded |= {i: Embedded(rows[i], vectors[place, : len(rows[i])]) for place, i in enumerate(batch)}
        return [embedded[i] for i in range(len(rows))]

    def skip(self, stop_words: Collection[str] = ()) -> frozenset[int]:
        """Return the ids of punctuation, stop words and word-continuation pieces, for `skip` of `mover_score`."""
        words = {*string.punctuation, *stop_words}
        begins = self.tokenizer.word_marks[0]
        ids = range(self.tokenizer.vocab_size)
        return frozenset(i for i in ids if not begins[i] or self.tokenizer.decode([i]).strip() in words)
