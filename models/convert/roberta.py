"""RoBERTa and XLM-R: `RobertaForMaskedLM`, `XLMRobertaForMaskedLM`... <-> `RoBERTa`, `XLMR` with the head of the task.

Positions of the reference are counted from that of the padding token.
"""

from lineage.models.convert.bert import Bert
from lineage.models.convert.family import register


@register("roberta")
class Roberta(Bert):
    model = body = "roberta"
    name = "Roberta"
    fields = {name: value for name, value in Bert.fields.items() if name != "max_position_embeddings"}
    pooler = "roberta.pooler.dense"
    predictions = ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")
    second = ""
    two_layers = True

    def settings(self, config, architecture, names):
        pad, length = config.get("pad_token_id", 1), config.get("max_position_embeddings", 512)
        if type(pad) is not int or type(length) is not int or not 0 <= pad < length - 1:
            raise ValueError(
                f"pad_token_id is {pad!r} and max_position_embeddings {length!r}: they must be integers, and the "
                "latter must be greater by at least 2."
            )
        return super().settings(config, architecture, names) | {"pad_id": pad, "max_length": length - pad - 1}

    def config(self, model):
        length = model.max_length + model.first_position
        return super().config(model) | {"pad_token_id": model.pad_id, "max_position_embeddings": length}


@register("xlm-roberta")
class XLMRoberta(Roberta):
    model = "xlmr"
    name = "XLMRoberta"
