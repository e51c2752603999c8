"""BigBird: `BigBirdForPreTraining`... <-> `BigBird` with the head of the same task and `random_blocks="first"`.

The two layers of the classifier of texts are our pooler and classifier. The reference drops out before both of them,
ours before the classifier.
"""

from models.convert import bert
from models.convert.family import Family

FIELDS = bert.FIELDS | {
    "vocab_size": ("vocab_size", 50_358),
    "max_position_embeddings": ("max_length", 4096),
    "hidden_act": ("activation", "gelu_new"),
    "block_size": ("block_size", 64),
    "num_random_blocks": ("num_random_blocks", 3),
}
HEADS = {
    name: head for name, head in bert.HEADS.items() if name not in ("ForNextSentencePrediction", "ForQuestionAnswering")
}


def _rules(model):
    if not model.num_segments:
        raise ValueError("num_segments is 0: BigBird has at least one.")
    whole = model.head == "classification"
    return [
        *bert.embeddings("bert.embeddings"),
        *bert.layers("bert.encoder.layer"),
        *bert.head(
            model,
            pooler="classifier.dense" if whole else "bert.pooler",
            dense="cls.predictions.transform.dense",
            words_norm="cls.predictions.transform.LayerNorm",
            bias="cls.predictions.bias",
            classifier={"pretraining": "cls.seq_relationship", "classification": "classifier.out_proj"}.get(
                model.head, "classifier"
            ),
        ),
    ]


def _settings(config, architecture, names):
    head = HEADS[architecture.removeprefix("BigBird")]
    if head == "masked_lm" and "cls.seq_relationship.weight" in names:
        head = "pretraining"
    return bert.head_settings(config, head, names) | {"random_blocks": "first"}


def _config(model):
    if model.random_blocks != "first":
        raise ValueError(f"random_blocks is {model.random_blocks!r}: the reference evaluates with 'first'.")
    config = {"intermediate_size": model.hidden or 4 * model.width, "classifier_dropout": model.head_dropout}
    return bert.head_config(model, "BigBird", HEADS) | config


FAMILY = Family(
    model="bigbird",
    architectures=tuple(f"BigBird{name}" for name in HEADS),
    prefix="bert.",
    fields=FIELDS,
    fixed=bert.FIXED | {"attention_type": "block_sparse", "use_bias": True, "rescale_embeddings": False},
    sizes={"H": "num_heads"},
    example=bert.example,
    rules=_rules,
    config=_config,
    settings=_settings,
    tied=(
        ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
        ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    ),
    ignored=lambda model: bert.spare(
        model,
        "cls",
        "classifier",
        pooler=r"(bert\.)?pooler",
        pooled=("pooler", "pretraining", "choice"),
    ),
)
