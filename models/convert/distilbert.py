"""DistilBERT: `DistilBertForMaskedLM`... <-> `DistilBERT` with the head of the same task."""

from lineage.models.convert.bert import Bert
from lineage.models.convert.family import block, register


@register("distilbert")
class DistilBert(Bert):
    model = body = "distilbert"
    name = "DistilBert"
    fields = {
        "vocab_size": ("vocab_size", 30_522),
        "max_position_embeddings": ("max_length", 512),
        "n_layers": ("depth", 6),
        "dim": ("width", 768),
        "n_heads": ("num_heads", 12),
        "hidden_dim": ("mlp_dim", 3072),
        "activation": ("activation", "gelu"),
        "dropout": ("dropout", 0.1),
        "attention_dropout": ("dropout", 0.1),
    }
    fixed = {"tie_word_embeddings": True}
    pooler = "pre_classifier"
    predictions = ("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias")
    second = ""
    dropout = "seq_classif_dropout", 0.2
    hidden = "hidden_dim"

    def layers(self, model):
        if model.num_segments or model.epsilon != 1e-12:
            raise ValueError(
                f"num_segments is {model.num_segments} and epsilon {model.epsilon}: `transformers` has DistilBERT with "
                "0 and 1e-12 alone."
            )
        return self.tables(word="embed", position="position") + block(
            "distilbert.transformer.layer.*.",
            "stack/layers",
            attended=("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin"),
            mlp=("ffn.lin1", "ffn.lin2"),
            norms=("sa_layer_norm", "output_layer_norm"),
        )

    def settings(self, config, architecture, names):
        settings = super().settings(config, architecture, names)
        return settings if settings["head"] in ("classification", "choice") else settings | {"head_dropout": None}
