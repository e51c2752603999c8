"""ELECTRA: `ElectraForPreTraining`, which is the head "replaced", `ElectraForMaskedLM`... <-> `ELECTRA`."""

from lineage.models.convert.bert import Bert
from lineage.models.convert.family import linear, register


@register("electra")
class Electra(Bert):
    model = body = "electra"
    name = "Electra"
    fields = Bert.fields | {
        "hidden_size": ("width", 256),
        "num_attention_heads": ("num_heads", 4),
        "intermediate_size": ("mlp_dim", 1024),
    }
    fixed = Bert.fixed | {"summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"}
    pooler = "sequence_summary.summary"
    predictions = (
        "generator_predictions.dense",
        "generator_predictions.LayerNorm",
        "generator_lm_head",
        "generator_lm_head.bias",
    )
    second = ""
    two_layers = True
    classifiers = Bert.classifiers | {"replaced": "discriminator_predictions.dense_prediction"}

    def layers(self, model):
        if model.embed_width == model.width:
            raise ValueError(
                f"width and embed_width are {model.width}: they must differ, because ELECTRA has no "
                "projection between equal widths in `transformers`."
            )
        rules = super().layers(model)
        if model.embed_width:
            rules += linear("electra.embeddings_project", "projection")
        if model.head == "replaced":
            rules += linear("discriminator_predictions.dense", "detector")
        return rules

    def settings(self, config, architecture, names):
        embed_width, width = config.get("embedding_size", 128), config.get("hidden_size", 256)
        settings = super().settings(config, architecture, names)
        if settings["head"] == "choice":
            settings["head_dropout"] = config.get("summary_last_dropout", 0.1)
        return settings | {"embed_width": None if embed_width == width else embed_width}

    def config(self, model):
        dropout = model.dropout if model.head_dropout is None else model.head_dropout
        own = {"embedding_size": model.embed_width or model.width, "summary_last_dropout": dropout}
        return super().config(model) | own
