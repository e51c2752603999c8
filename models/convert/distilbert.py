"""DistilBERT: `DistilBertForMaskedLM`... <-> `DistilBERT` with the head of the same task."""

from models.convert import bert
from models.convert.family import Family, heads, linear, norm

FIELDS = {
    "vocab_size": ("vocab_size", 30_522),
    "max_position_embeddings": ("max_length", 512),
    "n_layers": ("depth", 6),
    "dim": ("width", 768),
    "n_heads": ("num_heads", 12),
    "hidden_dim": ("hidden", 3072),
    "activation": ("activation", "gelu"),
    "dropout": ("dropout", 0.1),
    "attention_dropout": ("dropout", 0.1),
}
HEADS = {
    "ForMaskedLM": "masked_lm",
    "ForSequenceClassification": "classification",
    "ForTokenClassification": "tagging",
    "ForQuestionAnswering": "span",
    "ForMultipleChoice": "choice",
    "Model": "none",
}


def _rules(model):
    if model.num_segments or model.epsilon != 1e-12:
        raise ValueError(
            f"num_segments is {model.num_segments} and epsilon {model.epsilon}: `transformers` has DistilBERT with 0 "
            "and 1e-12 alone."
        )
    layer, ours = "distilbert.transformer.layer.*.", "stack/layers/"
    return [
        *bert.embeddings("distilbert.embeddings", segments=False),
        *heads(f"{layer}attention.q_lin", f"{ours}attention/query"),
        *heads(f"{layer}attention.k_lin", f"{ours}attention/key"),
        *heads(f"{layer}attention.v_lin", f"{ours}attention/value"),
        *linear(f"{layer}attention.out_lin", f"{ours}attention/out", "D (H C) -> H C D"),
        *norm(f"{layer}sa_layer_norm", f"{ours}attention_norm"),
        *linear(f"{layer}ffn.lin1", f"{ours}mlp/up"),
        *linear(f"{layer}ffn.lin2", f"{ours}mlp/down"),
        *norm(f"{layer}output_layer_norm", f"{ours}mlp_norm"),
        *bert.head(
            model,
            pooler="pre_classifier",
            dense="vocab_transform",
            words_norm="vocab_layer_norm",
            bias="vocab_projector.bias",
            classifier="qa_outputs" if model.head == "span" else "classifier",
        ),
    ]


def _settings(config, architecture, names):
    settings = bert.head_settings(config, HEADS[architecture.removeprefix("DistilBert")], names)
    whole = settings["head"] in ("classification", "choice")
    return settings | {"head_dropout": config.get("seq_classif_dropout", 0.2) if whole else None}


def _config(model):
    dropout = model.dropout if model.head_dropout is None else model.head_dropout
    config = {"hidden_dim": model.hidden or 4 * model.width, "seq_classif_dropout": dropout}
    return bert.head_config(model, "DistilBert", HEADS) | config


FAMILY = Family(
    model="distilbert",
    architectures=tuple(f"DistilBert{name}" for name in HEADS),
    prefix="distilbert.",
    fields=FIELDS,
    fixed={"tie_word_embeddings": True},
    sizes={"H": "num_heads"},
    example=bert.example,
    rules=_rules,
    config=_config,
    settings=_settings,
    tied=(("vocab_projector.weight", "distilbert.embeddings.word_embeddings.weight"),),
    ignored=lambda model: bert.spare(
        model, "vocab_.*", "pre_classifier", "classifier", "qa_outputs", pooler="pre_classifier"
    ),
)
