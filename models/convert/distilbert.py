"""DistilBERT: `DistilBertForMaskedLM`... <-> `DistilBERT` with the head of the same task."""

from lineage.models.convert import bert
from lineage.models.convert.family import Family, block

FIELDS = {
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
ARCHITECTURES = bert.architectures("DistilBert", "pretraining", "next_sentence") | {"DistilBertModel": "none"}


def _rules(model):
    if model.num_segments or model.epsilon != 1e-12:
        raise ValueError(
            f"num_segments is {model.num_segments} and epsilon {model.epsilon}: `transformers` has DistilBERT with 0 "
            "and 1e-12 alone."
        )
    return [
        *bert.words_and_positions("distilbert.embeddings"),
        *block(
            "distilbert.transformer.layer.*.",
            "stack/layers",
            attended=("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin"),
            mlp=("ffn.lin1", "ffn.lin2"),
            norms=("sa_layer_norm", "output_layer_norm"),
        ),
        *bert.head(model, "pre_classifier", ("vocab_transform", "vocab_layer_norm", "vocab_projector.bias")),
    ]


def _settings(config, architecture, names):
    settings = bert.head_settings(config, ARCHITECTURES[architecture], names)
    whole = settings["head"] in ("classification", "choice")
    return settings | {"head_dropout": config.get("seq_classif_dropout", 0.2) if whole else None}


def _config(model):
    dropout = model.dropout if model.head_dropout is None else model.head_dropout
    return bert.head_config(model, ARCHITECTURES, hidden="hidden_dim") | {"seq_classif_dropout": dropout}


FAMILY = Family(
    model="distilbert",
    architectures=tuple(ARCHITECTURES),
    prefix="distilbert.",
    fields=FIELDS,
    fixed={"tie_word_embeddings": True},
    rules=_rules,
    config=_config,
    settings=_settings,
    tied=(("vocab_projector.weight", "distilbert.embeddings.word_embeddings.weight"),),
    ignored=lambda model: bert.spare(
        model, "vocab_.*", "pre_classifier", "classifier", "qa_outputs", pooler="pre_classifier"
    ),
)
