"""ALBERT: `AlbertForPreTraining`... <-> `ALBERT` with the head of the same task; groups have one inner layer."""

from lineage.models.convert.bert import Bert
from lineage.models.convert.family import block, linear, register


@register("albert")
class Albert(Bert):
    model = body = "albert"
    name = "Albert"
    fields = Bert.fields | {
        "vocab_size": ("vocab_size", 30_000),
        "num_hidden_groups": ("num_groups", 1),
        "embedding_size": ("embed_width", 128),
        "hidden_size": ("width", 4096),
        "num_attention_heads": ("num_heads", 64),
        "intermediate_size": ("mlp_dim", 16_384),
        "hidden_act": ("activation", "gelu_new"),
        "hidden_dropout_prob": ("dropout", 0.0),
        "attention_probs_dropout_prob": ("dropout", 0.0),
    }
    fixed = Bert.fixed | {"inner_group_num": 1}
    pooler = "albert.pooler"
    predictions = ("predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias")
    second = "sop_classifier.classifier"
    dropout = "classifier_dropout_prob", 0.1

    def layers(self, model):
        rules = self.embeddings(model) + linear("albert.encoder.embedding_hidden_mapping_in", "projection")
        for group in range(model.num_groups):
            rules += block(
                f"albert.encoder.albert_layer_groups.{group}.albert_layers.0.",
                "stack/layers" if model.num_groups == 1 else f"stack/groups_{group}/layers",
                attended=("attention.query", "attention.key", "attention.value", "attention.dense"),
                mlp=("ffn", "ffn_output"),
                norms=("attention.LayerNorm", "full_layer_layer_norm"),
            )
        return rules
