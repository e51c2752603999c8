"""BigBird: `BigBirdForPreTraining`... <-> `BigBird` with the head of the same task; block-sparse attention with
`random_blocks="first"`, or full attention.

The two layers of the reference's text classifier are our pooler and classifier. The reference has dropout before both
of them, ours before the classifier.
"""

from lineage.models.convert import bert
from lineage.models.convert.family import Family

FIELDS = bert.FIELDS | {
    "vocab_size": ("vocab_size", 50_358),
    "max_position_embeddings": ("max_length", 4096),
    "hidden_act": ("activation", "gelu_new"),
    "block_size": ("block_size", 64),
    "num_random_blocks": ("num_random_blocks", 3),
}
ARCHITECTURES = bert.architectures("BigBird", "next_sentence", "question_answering")


def _rules(model):
    pooler = "classifier.dense" if model.head == "classification" else "bert.pooler"
    return [
        *bert.embeddings(model, "bert.embeddings"),
        *bert.layers("bert.encoder.layer"),
        *bert.head(model, pooler, pretraining=bert.SECOND, classification="classifier.out_proj"),
    ]


def _settings(config, architecture, names):
    head = bert.head_settings(config, ARCHITECTURES[architecture], names, second=bert.SECOND)
    kind = config.get("attention_type", "block_sparse")
    if kind not in ("block_sparse", "original_full"):
        raise ValueError(f"attention_type is {kind!r}: it must be 'block_sparse' or 'original_full'.")
    return head | ({"attention_type": kind} if kind == "original_full" else {"random_blocks": "first"})


def _config(model):
    if model.attention_type == "block_sparse" and model.random_blocks != "first":
        raise ValueError(f"random_blocks is {model.random_blocks!r}: it must be 'first', as in the reference.")
    config = {"classifier_dropout": model.head_dropout, "attention_type": model.attention_type}
    return bert.head_config(model, ARCHITECTURES) | config


FAMILY = Family(
    model="bigbird",
    architectures=tuple(ARCHITECTURES),
    prefix="bert.",
    fields=FIELDS,
    fixed=bert.FIXED | {"use_bias": True, "rescale_embeddings": False},
    rules=_rules,
    config=_config,
    settings=_settings,
    tied=bert.TIED,
    ignored=lambda model: bert.spare(
        model, "cls", "classifier", pooler=r"(bert\.)?pooler", pooled=("pooler", "pretraining", "choice")
    ),
)
