"""Small decoders for tests of generation, and their fixtures in `conftest.py`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from lineage.models import Model

VOCAB = 11


def random_gpt(model):
    """Return a GPT with scaled-up random weights, so that generated texts are diverse."""
    rng = np.random.default_rng(1)

    def weight(path, shape):
        if path[-1].key in ("scale", "bias"):
            return np.full(shape.shape, path[-1].key == "scale", np.float32)
        return rng.normal(scale=0.7, size=shape.shape).astype(np.float32)

    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return model, jax.tree_util.tree_map_with_path(weight, shapes)


@struct.dataclass
class Last:
    """Minimal cache: the last token."""

    token: jax.Array

    def gather(self, rows):
        return Last(self.token[rows])


@struct.dataclass
class Extra:
    """Memory of `Bigram`: an offset of the logits of each sequence."""

    logits: jax.Array

    def gather(self, rows):
        return Extra(self.logits[rows])


class Bigram(Model):
    """Decoder with a known distribution: the logits after a token are its row of the table, plus the memory."""

    vocab_size: int = VOCAB

    def setup(self):
        self.table = self.param("table", nn.initializers.normal(1.5), (self.vocab_size, self.vocab_size))

    def __call__(self, tokens):
        return self.table[tokens]

    def encode(self, inputs):
        return None if inputs is None else Extra(inputs)

    def init_cache(self, batch_size, max_length, rewinds):
        return Last(jnp.zeros(batch_size, jnp.int32))

    def decode(self, tokens, cache, memory):
        logits = self.table[tokens]
        return logits if memory is None else logits + memory.logits[:, None], Last(tokens[:, -1])
