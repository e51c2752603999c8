"""ALBERT: `AlbertForPreTraining`... <-> `ALBERT` with the head of the same task. All layers are one group of one."""

from models.convert import bert
from models.convert.family import Family, heads, linear, norm

FIELDS = bert.FIELDS | {
    "vocab_size": ("vocab_size", 30_000),
    "embedding_size": ("embed_width", 128),
    "hidden_size": ("width", 4096),
    "num_attention_heads": ("num_heads", 64),
    "intermediate_size": ("hidden", 16_384),
    "hidden_act": ("activation", "gelu_new"),
    "hidden_dropout_prob": ("dropout", 0.0),
    "attention_probs_dropout_prob": ("dropout", 0.0),
}
HEADS = {name: head for name, head in bert.HEADS.items() if name != "ForNextSentencePrediction"}


def _rules(model):
    if not model.num_segments:
        raise ValueError("num_segments is 0: ALBERT has at least one.")
    layer, ours = "albert.encoder.albert_layer_groups.0.albert_layers.0.", "stack/layers/"
    return [
        *bert.embeddings("albert.embeddings"),
        *linear("albert.encoder.embedding_hidden_mapping_in", "projection"),
        *heads(f"{layer}attention.query", f"{ours}attention/query"),
        *heads(f"{layer}attention.key", f"{ours}attention/key"),
        *heads(f"{layer}attention.value", f"{ours}attention/value"),
        *linear(f"{layer}attention.dense", f"{ours}attention/out", "D (H C) -> H C D"),
        *norm(f"{layer}attention.LayerNorm", f"{ours}attention_norm"),
        *linear(f"{layer}ffn", f"{ours}mlp/up"),
        *linear(f"{layer}ffn_output", f"{ours}mlp/down"),
        *norm(f"{layer}full_layer_layer_norm", f"{ours}mlp_norm"),
        *bert.head(
            model,
            pooler="albert.pooler",
            dense="predictions.dense",
            words_norm="predictions.LayerNorm",
            bias="predictions.bias",
            classifier={"pretraining": "sop_classifier.classifier", "span": "qa_outputs"}.get(model.head, "classifier"),
        ),
    ]


def _settings(config, architecture, names):
    head = HEADS[architecture.removeprefix("Albert")]
    if head == "masked_lm" and "sop_classifier.classifier.weight" in names:
        head = "pretraining"
    settings = bert.head_settings(config, head, names, dropout="classifier_dropout_prob")
    return {"head_dropout": 0.1} | settings


def _config(model):
    return bert.head_config(model, "Albert", HEADS) | {
        "intermediate_size": model.hidden or 4 * model.width,
        "classifier_dropout_prob": model.dropout if model.head_dropout is None else model.head_dropout,
    }


FAMILY = Family(
    model="albert",
    architectures=tuple(f"Albert{name}" for name in HEADS),
    prefix="albert.",
    fields=FIELDS,
    fixed=bert.FIXED | {"num_hidden_groups": 1, "inner_group_num": 1},
    sizes={"H": "num_heads"},
    example=bert.example,
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
