"""RoBERTa and XLM-R: `RobertaForMaskedLM`, `XLMRobertaForMaskedLM`... <-> `RoBERTa`, `XLMR` with the head of the task.

The two layers of the reference's text classifier are our pooler and classifier. The reference has dropout before both
of them, ours before the classifier.
"""

from lineage.models.convert import bert
from lineage.models.convert.family import Family

# Positions are counted from the padding's on.
FIELDS = {name: value for name, value in bert.FIELDS.items() if name != "max_position_embeddings"}
PREDICTIONS = ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias")


def _rules(model):
    pooler = "classifier.dense" if model.head == "classification" else "roberta.pooler.dense"
    return [
        *bert.embeddings(model, "roberta.embeddings"),
        *bert.layers("roberta.encoder.layer"),
        *bert.head(model, pooler, PREDICTIONS, classification="classifier.out_proj"),
    ]


def _family(model: str, name: str) -> Family:
    architectures = bert.architectures(name, "pretraining", "next_sentence")

    def settings(config, architecture, names):
        pad = config.get("pad_token_id", 1)
        length = config.get("max_position_embeddings", 512)
        if type(pad) is not int or type(length) is not int or not 0 <= pad < length - 1:
            raise ValueError(
                f"pad_token_id is {pad!r} and max_position_embeddings {length!r}: they must be integers, and the "
                "latter must be greater by at least 2."
            )
        head = bert.head_settings(config, architectures[architecture], names)
        return head | {"pad_id": pad, "max_length": length - pad - 1}

    def config(model):
        return bert.head_config(model, architectures) | {
            "pad_token_id": model.pad_id,
            "max_position_embeddings": model.max_length + model.first_position,
            "classifier_dropout": model.head_dropout,
        }

    def ignored(model):
        pooled = ("pooler", "choice")
        return bert.spare(model, "lm_head", "classifier", "qa_outputs", pooler=r"(roberta\.)?pooler", pooled=pooled)

    return Family(
        model=model,
        architectures=tuple(architectures),
        prefix="roberta.",
        fields=FIELDS,
        fixed=bert.FIXED,
        rules=_rules,
        config=config,
        settings=settings,
        tied=(
            ("lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"),
            ("lm_head.decoder.bias", "lm_head.bias"),
        ),
        ignored=ignored,
    )


ROBERTA = _family("roberta", "Roberta")
XLMR = _family("xlmr", "XLMRoberta")
