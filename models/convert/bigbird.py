"""BigBird: `BigBirdForPreTraining`... <-> `BigBird` with the head of the same task and `random_blocks="first"`.

The two layers of the classifier of texts are our pooler and classifier. The reference drops out before both of them,
ours before the classifier.
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
ARCHITECTURES = bert.architectures("BigBird", "next_sentence", "span")


def _rules(model):
    pooler = "classifier.dense" if model.head == "classification" else "bert.pooler"
    return [
        *bert.embeddings(model, "bert.embeddings"),
        *bert.layers("bert.encoder.layer"),
        *bert.head(model, pooler, pretraining=bert.SECOND, classification="classifier.out_proj"),
    ]


def _settings(config, architecture, names):
    head = bert.head_settings(config, ARCHITECTURES[architecture], names, second=bert.SECOND)
    return head | {"random_blocks": "first"}


def _config(model):
    if model.random_blocks != "first":
        raise ValueError(f"random_blocks is {model.random_blocks!r}: the reference evaluates with 'first'.")
    return bert.head_config(model, ARCHITECTURES) | {"classifier_dropout": model.head_dropout}


FAMILY = Family(
    model="bigbird",
    architectures=tuple(ARCHITECTURES),
    prefix="bert.",
    fields=FIELDS,
    fixed=bert.FIXED | {"attention_type": "block_sparse", "use_bias": True, "rescale_embeddings": False},
    rules=_rules,
    config=_config,
    settings=_settings,
    tied=bert.TIED,
    ignored=lambda model: bert.spare(
        model, "cls", "classifier", pooler=r"(bert\.)?pooler", pooled=("pooler", "pretraining", "choice")
    ),
)
