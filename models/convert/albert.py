"""ALBERT: `AlbertForPreTraining`... <-> `ALBERT` with the head of the same task; groups have one inner layer."""

from lineage.models.convert import bert
from lineage.models.convert.family import Family, block, linear

FIELDS = bert.FIELDS | {
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
ARCHITECTURES = bert.architectures("Albert", "next_sentence")
SECOND = "sop_classifier.classifier"


def _rules(model):
    return [
        *bert.embeddings(model, "albert.embeddings"),
        *linear("albert.encoder.embedding_hidden_mapping_in", "projection"),
        *(rule for group in range(model.num_groups) for rule in _layer(model, group)),
        *bert.head(
            model,
            "albert.pooler",
            ("predictions.dense", "predictions.LayerNorm", "predictions.bias"),
            pretraining=SECOND,
        ),
    ]


def _layer(model, group):
    return block(
        f"albert.encoder.albert_layer_groups.{group}.albert_layers.0.",
        "stack/layers" if model.num_groups == 1 else f"stack/groups_{group}/layers",
        attended=("attention.query", "attention.key", "attention.value", "attention.dense"),
        mlp=("ffn", "ffn_output"),
        norms=("attention.LayerNorm", "full_layer_layer_norm"),
    )


def _settings(config, architecture, names):
    config = {"classifier_dropout_prob": 0.1} | config
    head = ARCHITECTURES[architecture]
    return bert.head_settings(config, head, names, second=SECOND, dropout="classifier_dropout_prob")


def _config(model):
    dropout = model.dropout if model.head_dropout is None else model.head_dropout
    return bert.head_config(model, ARCHITECTURES) | {"classifier_dropout_prob": dropout}


FAMILY = Family(
    model="albert",
    architectures=tuple(ARCHITECTURES),
    prefix="albert.",
    fields=FIELDS,
    fixed=bert.FIXED | {"inner_group_num": 1},
    rules=_rules,
    config=_config,
    settings=_settings,
    tied=(
        ("predictions.decoder.weight", "albert.embeddings.word_embeddings.weight"),
        ("predictions.decoder.bias", "predictions.bias"),
    ),
    ignored=lambda model: bert.spare(
        model, "predictions", "sop_classifier", "classifier", "qa_outputs", pooler=r"(albert\.)?pooler"
    ),
)
