"""ELECTRA: `ElectraForPreTraining`, which is the head "replaced", `ElectraForMaskedLM`... <-> `ELECTRA`.

The two layers of the reference's text classifier are our pooler and classifier. The reference has dropout before both
of them, ours before the classifier.
"""

from lineage.models.convert import bert
from lineage.models.convert.family import Family, linear

FIELDS = bert.FIELDS | {
    "hidden_size": ("width", 256),
    "num_attention_heads": ("num_heads", 4),
    "intermediate_size": ("mlp_dim", 1024),
}
ARCHITECTURES = bert.architectures("Electra", "next_sentence")
ARCHITECTURES |= {"ElectraForPreTraining": "replaced", "ElectraModel": "none"}
PREDICTIONS = ("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head.bias")


def _rules(model):
    if model.embed_width == model.width:
        raise ValueError(
            f"width and embed_width are {model.width}: they must differ, because ELECTRA has no "
            "projection between equal widths in `transformers`."
        )
    classifiers = {"replaced": "discriminator_predictions.dense_prediction", "classification": "classifier.out_proj"}
    return [
        *bert.embeddings(model, "electra.embeddings"),
        *(linear("electra.embeddings_project", "projection") if model.embed_width else []),
        *bert.layers("electra.encoder.layer"),
        *(linear("discriminator_predictions.dense", "detector") if model.head == "replaced" else []),
        *bert.head(
            model,
            "classifier.dense" if model.head == "classification" else "sequence_summary.summary",
            PREDICTIONS,
            **classifiers,
        ),
    ]


def _settings(config, architecture, names):
    embed_width, width = config.get("embedding_size", 128), config.get("hidden_size", 256)
    settings = bert.head_settings(config, ARCHITECTURES[architecture], names)
    if settings["head"] == "choice":
        settings["head_dropout"] = config.get("summary_last_dropout", 0.1)
    return settings | {"embed_width": None if embed_width == width else embed_width}


def _config(model):
    return bert.head_config(model, ARCHITECTURES) | {
        "embedding_size": model.embed_width or model.width,
        "classifier_dropout": model.head_dropout,
        "summary_last_dropout": model.dropout if model.head_dropout is None else model.head_dropout,
    }


def _ignored(model):
    heads = ("discriminator_predictions", "generator_.*", "classifier", "qa_outputs", "sequence_summary")
    return bert.spare(model, *heads, pooler="sequence_summary")


FAMILY = Family(
    model="electra",
    architectures=tuple(ARCHITECTURES),
    prefix="electra.",
    fields=FIELDS,
    fixed=bert.FIXED | {"summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"},
    rules=_rules,
    config=_config,
    settings=_settings,
    tied=(("generator_lm_head.weight", "electra.embeddings.word_embeddings.weight"),),
    ignored=_ignored,
)
