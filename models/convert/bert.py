"""BERT: `BertForPreTraining`, `BertForMaskedLM`... <-> `BERT` with the head of the same task.

The parts that its descendants' checkpoints share with it are functions here.
"""

import numpy as np

from models.bert import OUTPUTS, POOLED, WORDS
from models.convert.family import Family, Rule, heads, linear, norm

FIELDS = {
    "vocab_size": ("vocab_size", 30_522),
    "max_position_embeddings": ("max_length", 512),
    "type_vocab_size": ("num_segments", 2),
    "num_hidden_layers": ("depth", 12),
    "hidden_size": ("width", 768),
    "num_attention_heads": ("num_heads", 12),
    "intermediate_size": ("hidden", 3072),
    "hidden_act": ("activation", "gelu"),
    "layer_norm_eps": ("epsilon", 1e-12),
    "hidden_dropout_prob": ("dropout", 0.1),
    "attention_probs_dropout_prob": ("dropout", 0.1),
}
FIXED = {
    "tie_word_embeddings": True,
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}
# What the reference calls a model, after its family's name, and our head.
HEADS = {
    "ForPreTraining": "pretraining",
    "ForMaskedLM": "masked_lm",
    "ForNextSentencePrediction": "next_sentence",
    "ForSequenceClassification": "classification",
    "ForTokenClassification": "tagging",
    "ForQuestionAnswering": "span",
    "ForMultipleChoice": "choice",
    "Model": "pooler",
}


def embeddings(reference: str, segments: bool = True) -> list[Rule]:
    """The tables of words, positions and segments, and their LayerNorm."""
    tables = {"word": "embed", "position": "position"} | ({"token_type": "segment"} if segments else {})
    rules = [Rule(f"{reference}.{name}_embeddings.weight", f"{ours}/table") for name, ours in tables.items()]
    return rules + norm(f"{reference}.LayerNorm", "embed_norm")


def layers(reference: str) -> list[Rule]:
    """Every layer, as BERT, RoBERTa and ELECTRA have it."""
    ours = "stack/layers"
    return [
        *heads(f"{reference}.*.attention.self.query", f"{ours}/attention/query"),
        *heads(f"{reference}.*.attention.self.key", f"{ours}/attention/key"),
        *heads(f"{reference}.*.attention.self.value", f"{ours}/attention/value"),
        *linear(f"{reference}.*.attention.output.dense", f"{ours}/attention/out", "D (H C) -> H C D"),
        *norm(f"{reference}.*.attention.output.LayerNorm", f"{ours}/attention_norm"),
        *linear(f"{reference}.*.intermediate.dense", f"{ours}/mlp/up"),
        *linear(f"{reference}.*.output.dense", f"{ours}/mlp/down"),
        *norm(f"{reference}.*.output.LayerNorm", f"{ours}/mlp_norm"),
    ]


def head(model, *, pooler: str, dense: str, words_norm: str, bias: str, classifier: str) -> list[Rule]:
    """The pooler, the layer that predicts words, and the classifier, as far as the model has them."""
    rules = linear(pooler, "pooler") if model.head in POOLED else []
    if model.head in WORDS:
        rules += linear(dense, "masked_lm/dense") + norm(words_norm, "masked_lm/norm") + [Rule(bias, "masked_lm/bias")]
    return rules + (linear(classifier, "classifier") if OUTPUTS.get(model.head, model.num_classes) else [])


def head_settings(config: dict, head: str, names, dropout: str = "classifier_dropout") -> dict:
    """Our settings of a head; a file without a pooler has none."""
    if head == "pooler" and not any("pooler" in name for name in names):
        head = "none"
    settings = {"head": head, "head_dropout": config.get(dropout)}
    if head not in OUTPUTS:  # the reference leaves out what is its default: two labels
        settings["num_classes"] = config.get("num_labels", len(config.get("id2label", "01")))
    return settings


def head_config(model, family: str, known=HEADS) -> dict:
    """The reference's name of the model, and its labels."""
    names = {ours: name for name, ours in known.items()} | {"none": "Model"}
    if model.head not in names:
        raise ValueError(f"head is {model.head!r}: {family} has {', '.join(names)}.")
    config = {"architectures": [family + names[model.head]]}
    if model.head not in OUTPUTS:
        labels = [f"LABEL_{label}" for label in range(model.num_classes)]
        config["id2label"] = dict(enumerate(labels))
        config["label2id"] = {name: label for label, name in enumerate(labels)}
    return config


def spare(model, *heads: str, pooler: str, pooled=POOLED) -> str:
    """Pattern of the tensors that a file may have beside the model's: of a head that the encoder alone does not have,
    of a pooler that no head reads, and the numbers of positions in old files."""
    patterns = [r".*\.position_ids"]
    patterns += [pooler] if model.head not in pooled else []
    patterns += heads if model.head in ("none", "pooler") else []
    return "|".join(rf"{pattern}(\..*)?" for pattern in patterns)


def example(model) -> np.ndarray:
    """One token."""
    return np.zeros((1, 1), np.int32)


def _rules(model):
    if not model.num_segments:
        raise ValueError("num_segments is 0: BERT has at least one.")
    return [
        *embeddings("bert.embeddings"),
        *layers("bert.encoder.layer"),
        *head(
            model,
            pooler="bert.pooler.dense",
            dense="cls.predictions.transform.dense",
            words_norm="cls.predictions.transform.LayerNorm",
            bias="cls.predictions.bias",
            classifier={
                "pretraining": "cls.seq_relationship",
                "next_sentence": "cls.seq_relationship",
                "span": "qa_outputs",
            }.get(model.head, "classifier"),
        ),
    ]


def _settings(config, architecture, names):
    task = HEADS[architecture.removeprefix("Bert")]
    # The published files hold all of pre-training, whatever they call it.
    if task == "masked_lm" and "cls.seq_relationship.weight" in names:
        task = "pretraining"
    return head_settings(config, task, names)


def _config(model):
    config = {"intermediate_size": model.hidden or 4 * model.width, "classifier_dropout": model.head_dropout}
    return head_config(model, "Bert") | config


FAMILY = Family(
    model="bert",
    architectures=tuple(f"Bert{name}" for name in HEADS),
    prefix="bert.",
    fields=FIELDS,
    fixed=FIXED,
    sizes={"H": "num_heads"},
    example=example,
    rules=_rules,
    config=_config,
    settings=_settings,
    tied=(
        ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
        ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    ),
    old={"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
    ignored=lambda model: spare(model, "cls", "classifier", "qa_outputs", pooler=r"(bert\.)?pooler"),
)
