"""BERT: `BertForPreTraining`, `BertForMaskedLM`... <-> `BERT` with the head of the same task.

Its functions make the parts that the checkpoints of its descendants share with it.
"""

from lineage.models.bert import OUTPUTS, POOLED, WORDS
from lineage.models.convert.family import Family, Rule, block, labels, linear, norm, num_labels

FIELDS = {
    "vocab_size": ("vocab_size", 30_522),
    "max_position_embeddings": ("max_length", 512),
    "type_vocab_size": ("num_segments", 2),
    "num_hidden_layers": ("depth", 12),
    "hidden_size": ("width", 768),
    "num_attention_heads": ("num_heads", 12),
    "intermediate_size": ("mlp_dim", 3072),
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
# Name of the reference's class, after that of the family -> our head; the last one is the encoder alone.
HEADS = {
    "ForPreTraining": "pretraining",
    "ForMaskedLM": "masked_lm",
    "ForNextSentencePrediction": "next_sentence",
    "ForSequenceClassification": "classification",
    "ForTokenClassification": "token_classification",
    "ForQuestionAnswering": "question_answering",
    "ForMultipleChoice": "choice",
    "Model": "pooler",
}
# The masked-language-model head: its dense layer, LayerNorm and bias.
PREDICTIONS = ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias")
TIED = (
    ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ("cls.predictions.decoder.bias", "cls.predictions.bias"),
)


def architectures(family: str, *absent: str) -> dict[str, str]:
    """Return the names of a family's classes -> our heads, without those that it does not have."""
    return {f"{family}{name}": head for name, head in HEADS.items() if head not in absent}


def embeddings(model, reference: str) -> list[Rule]:
    """Return the rules of the word, position and segment embeddings, and of their LayerNorm."""
    if not model.num_segments:
        raise ValueError(f"num_segments is 0: `transformers` has {type(model).__name__} with at least 1.")
    return [Rule(f"{reference}.token_type_embeddings.weight", "segment/table"), *words_and_positions(reference)]


def words_and_positions(reference: str) -> list[Rule]:
    """Return the rules of the embeddings of a model without segments, and of their LayerNorm."""
    tables = {"word": "embed", "position": "position"}
    rules = [Rule(f"{reference}.{name}_embeddings.weight", f"{ours}/table") for name, ours in tables.items()]
    return rules + norm(f"{reference}.LayerNorm", "embed_norm")


def layers(reference: str) -> list[Rule]:
    """Return the rules of the layers of BERT, RoBERTa, ELECTRA and BigBird."""
    return block(
        f"{reference}.*.",
        "stack/layers",
        attended=("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"),
        mlp=("intermediate.dense", "output.dense"),
        norms=("attention.output.LayerNorm", "output.LayerNorm"),
    )


def head(model, pooler: str, predictions: tuple[str, str, str] = PREDICTIONS, **classifiers: str) -> list[Rule]:
    """Return the rules of the pooler, the masked-language-model head and the classifier, as far as the model has them.

    `classifiers` has, by head, the names of the classifiers that are not called `classifier`.
    """
    rules = linear(pooler, "pooler") if model.head in POOLED else []
    if model.head in WORDS:
        dense, after, bias = predictions
        rules += linear(dense, "masked_lm/dense") + norm(after, "masked_lm/norm") + [Rule(bias, "masked_lm/bias")]
    if not OUTPUTS.get(model.head, model.num_classes):
        return rules
    names = {"question_answering": "qa_outputs"} | classifiers
    return rules + linear(names.get(model.head, "classifier"), "classifier")


def head_settings(config: dict, head: str, names, *, second: str = "", dropout: str = "classifier_dropout") -> dict:
    """Return our settings of a head.

    Published files hold both heads of pre-training, whatever their class: then they have the tensor `second`, the
    classifier of two segments. An encoder without a pooler has the head "none".
    """
    if head == "masked_lm" and f"{second}.weight" in names:
        head = "pretraining"
    if head == "pooler" and not any("pooler" in name for name in names):
        head = "none"
    settings = {"head": head, "head_dropout": config.get(dropout)}
    return settings if head in OUTPUTS else settings | {"num_classes": num_labels(config)}


def head_config(model, known: dict[str, str], hidden: str = "intermediate_size") -> dict:
    """Return the reference's class of the model, its labels and the width of its hidden layers."""
    names = {ours: name for name, ours in known.items()} | {"none": list(known)[-1]}
    if model.head not in names:
        raise ValueError(f"head is {model.head!r}: it must be one of {', '.join(names)} for `transformers`.")
    config = {"architectures": [names[model.head]], hidden: model.mlp_dim or 4 * model.width}
    return config if model.head in OUTPUTS else config | labels(model)


def spare(model, *heads: str, pooler: str, pooled=POOLED) -> str:
    """Return the pattern of the tensors that a file may have beside those of the model.

    These are the heads if the model is an encoder alone, a pooler that no head reads, and the positions in old files.
    """
    patterns = [r".*\.position_ids"]
    patterns += [pooler] if model.head not in pooled else []
    patterns += heads if model.head in ("none", "pooler") else []
    return "|".join(rf"{pattern}(\..*)?" for pattern in patterns)


ARCHITECTURES = architectures("Bert")
SECOND = "cls.seq_relationship"


def _rules(model):
    return [
        *embeddings(model, "bert.embeddings"),
        *layers("bert.encoder.layer"),
        *head(model, "bert.pooler.dense", pretraining=SECOND, next_sentence=SECOND),
    ]


FAMILY = Family(
    model="bert",
    architectures=tuple(ARCHITECTURES),
    prefix="bert.",
    fields=FIELDS,
    fixed=FIXED,
    rules=_rules,
    config=lambda model: head_config(model, ARCHITECTURES) | {"classifier_dropout": model.head_dropout},
    settings=lambda config, name, names: head_settings(config, ARCHITECTURES[name], names, second=SECOND),
    tied=TIED,
    old={"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
    ignored=lambda model: spare(model, "cls", "classifier", "qa_outputs", pooler=r"(bert\.)?pooler"),
)
