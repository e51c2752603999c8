"""RoBERTa and XLM-R: `RobertaForMaskedLM`, `XLMRobertaForMaskedLM`... <-> `RoBERTa`, `XLMR` with the head of the task.

The two layers of their classifier of texts are our pooler and classifier. The reference drops out before both of them,
ours before the classifier.
"""

from models.convert import bert
from models.convert.family import Family

# Positions are counted after the padding's.
FIELDS = {name: value for name, value in bert.FIELDS.items() if name != "max_position_embeddings"}
HEADS = {name: head for name, head in bert.HEADS.items() if name not in ("ForPreTraining", "ForNextSentencePrediction")}


def _rules(model):
    if not model.num_segments:
        raise ValueError("num_segments is 0: RoBERTa has at least one.")
    whole = model.head == "classification"
    return [
        *bert.embeddings("roberta.embeddings"),
        *bert.layers("roberta.encoder.layer"),
        *bert.head(
            model,
            pooler="classifier.dense" if whole else "roberta.pooler.dense",
            dense="lm_head.dense",
            words_norm="lm_head.layer_norm",
            bias="lm_head.bias",
            classifier="classifier.out_proj" if whole else "qa_outputs" if model.head == "span" else "classifier",
        ),
    ]


def _family(name: str, prefix: str) -> Family:
    def settings(config, architecture, names):
        pad = config.get("pad_token_id", 1)
        length = config.get("max_position_embeddings", 512)
        if type(pad) is not int or type(length) is not int or not 0 <= pad < length - 1:
            raise ValueError(
                f"pad_token_id is {pad!r} and max_position_embeddings {length!r}: they must be integers, and the "
                "latter greater by 2 or more."
            )
        head = bert.head_settings(config, HEADS[architecture.removeprefix(prefix)], names)
        return head | {"pad_id": pad, "max_length": length - pad - 1}

    def config(model):
        return bert.head_config(model, prefix, HEADS) | {
            "pad_token_id": model.pad_id,
            "max_position_embeddings": model.max_length + model.first_position,
            "intermediate_size": model.hidden or 4 * model.width,
            "classifier_dropout": model.head_dropout,
        }

    def ignored(model):
        pooled = ("pooler", "choice")
        return bert.spare(model, "lm_head", "classifier", "qa_outputs", pooler=r"(roberta\.)?pooler", pooled=pooled)

    return Family(
        model=name,
        architectures=tuple(f"{prefix}{name}" for name in HEADS),
        prefix="roberta.",
        fields=FIELDS,
        fixed=bert.FIXED,
        sizes={"H": "num_heads"},
        example=bert.example,
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
