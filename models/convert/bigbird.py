"""BigBird: `BigBirdForPreTraining`... <-> `BigBird` with the head of the same task.

Attention is block-sparse with `random_blocks="first"`, or full.
"""

from lineage.models.convert.bert import Bert
from lineage.models.convert.family import register


@register("big_bird")
class BigBird(Bert):
    model = "bigbird"
    name = "BigBird"
    fields = Bert.fields | {
        "vocab_size": ("vocab_size", 50_358),
        "max_position_embeddings": ("max_length", 4096),
        "hidden_act": ("activation", "gelu_new"),
        "block_size": ("block_size", 64),
        "num_random_blocks": ("num_random_blocks", 3),
    }
    fixed = Bert.fixed | {"use_bias": True, "rescale_embeddings": False}
    pooler = "bert.pooler"
    two_layers = True

    def settings(self, config, architecture, names):
        kind = config.get("attention_type", "block_sparse")
        if kind not in ("block_sparse", "original_full"):
            raise ValueError(f"attention_type is {kind!r}: it must be 'block_sparse' or 'original_full'.")
        attention = {"attention_type": kind} if kind == "original_full" else {"random_blocks": "first"}
        return super().settings(config, architecture, names) | attention

    def config(self, model):
        if model.attention_type == "block_sparse" and model.random_blocks != "first":
            raise ValueError(f"random_blocks is {model.random_blocks!r}: it must be 'first', as in the reference.")
        return super().config(model) | {"attention_type": model.attention_type}
