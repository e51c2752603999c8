"""ELECTRA: `ElectraForPreTraining`, which is the head "replaced", `ElectraForMaskedLM`... <-> `ELECTRA`.

The two layers of its classifiers of texts are our pooler and classifier. The reference drops out before both of them,
ours before the classifier.
"""

from models.convert import bert
from models.convert.family import Family, linear

FIELDS = bert.FIELDS | {
    "hidden_size": ("width", 256),
    "num_attention_heads": ("num_heads", 4),
    "intermediate_size": ("hidden", 1024),
}
HEADS = {name: head for name, head in bert.HEADS.items() if name != "ForNextSentencePrediction"}
HEADS |= {"ForPreTraining": "replaced", "Model": "none"}


def _rules(model):
    if not model.num_segments or model.embed_width == model.width:
        raise ValueError(
            f"num_segments is {model.num_segments}, width {model.width} and embed_width {model.embed_width}: "
            "`transformers` has ELECTRA with segments, and with no projection from one width to the same."
        )
    classifier = {
        "replaced": "discriminator_predictions.dense_prediction",
        "classification": "classifier.out_proj",
        "span": "qa_outputs",
    }
    return [
        *bert.embeddings("electra.embeddings"),
        *(linear("electra.embeddings_project", "projection") if model.embed_width else []),
        *bert.layers("electra.encoder.layer"),
        *(linear("discriminator_predictions.dense", "detector") if model.head == "replaced" else []),
        *bert.head(
            model,
            pooler="classifier.dense" if model.head == "classification" else "sequence_summary.summary",
            dense="generator_predictions.dense",
            words_norm="generator_predictions.LayerNorm",
            bias="generator_lm_head.bias",
            classifier=classifier.get(model.head, "classifier"),
        ),
    ]


def _settings(config, architecture, names):
    embed_width, width = config.get("embedding_size", 128), config.get("hidden_size", 256)
    settings = bert.head_settings(config, HEADS[architecture.removeprefix("Electra")], names)
    if settings["head"] == "choice":
        settings["head_dropout"] = config.get("summary_last_dropout", 0.1)
    return settings | {"embed_width": None if embed_width == width else embed_width}


def _config(model):
    config = {
        "embedding_size": model.embed_width or model.width,
        "intermediate_size": model.hidden or 4 * model.width,
        "classifier_dropout": model.head_dropout,
        "summary_last_dropout": model.dropout if model.head_dropout is None else model.head_dropout,
    }
    return bert.head_config(model, "Electra", HEADS) | config


FAMILY = Family(
    model="electra",
    architectures=tuple(f"Electra{name}" for name in HEADS),
    prefix="electra.",
    fields=FIELDS,
    fixed=bert.FIXED | {"summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"},
    sizes={"H": "num_heads"},
    example=bert.example,
    rules=_rules,
    config=_config,
    settings=_settings,
    tied=(("generator_lm_head.weight", "electra.embeddings.word_embeddings.weight"),),
    ignored=lambda model: bert.spare(
        model,
        "discriminator_predictions",
        "generator_.*",
        "classifier",
        "qa_outputs",
        "sequence_summary",
        pooler="sequence_summary",
    ),
)
