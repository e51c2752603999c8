"""The descendants of BERT: ALBERT, BigBird, DistilBERT, ELECTRA, RoBERTa and XLM-R."""

from lineage.models.convert.bert import Bert
from lineage.models.convert.family import block, linear, register


@register("albert")
class Albert(Bert):
    """`AlbertForPreTraining`... <-> `ALBERT` with the head of the same task; groups have one inner layer.

    The reference, unlike the paper's code, has no dropout on the output of the MLP.
    """

    model = body = "albert"
    name = "Albert"
    fields = Bert.fields | {
        "vocab_size": ("vocab_size", 30_000),
        "num_hidden_groups": ("num_groups", 1),
        "embedding_size": ("embed_width", 128),
        "hidden_size": ("width", 4096),
        "num_attention_heads": ("num_heads", 64),
        "intermediate_size": ("mlp_dim", 16_384),
        "hidden_act": ("activation", "gelu_new"),
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), ("dropout", 0.0)),
    }
    fixed = Bert.fixed | {"inner_group_num": 1}
    pooler = "albert.pooler"
    predictions = ("predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias")
    second = "sop_classifier.classifier"
    dropout = "classifier_dropout_prob", 0.1

    def layers(self, model):
        rules = self.embeddings(model) + linear("albert.encoder.embedding_hidden_mapping_in", "projection")
        for group in range(model.num_groups):
            rules += block(
                f"albert.encoder.albert_layer_groups.{group}.albert_layers.0.",
                "stack/layers" if model.num_groups == 1 else f"stack/groups_{group}/layers",
                attended=("attention.query", "attention.key", "attention.value", "attention.dense"),
                mlp=("ffn", "ffn_output"),
                norms=("attention.LayerNorm", "full_layer_layer_norm"),
            )
        return rules


@register("big_bird")
class BigBird(Bert):
    """`BigBirdForPreTraining`... <-> `BigBird`; attention is block-sparse with `random_blocks="first"`, or full."""

    model = "bigbird"
    name = "BigBird"
    fields = Bert.fields | {
        "vocab_size": ("vocab_size", 50_358),
        "max_position_embeddings": ("max_length", 4096),
        "hidden_act": ("activation", "gelu_new"),
        "block_size": ("block_size", 64),
        "num_random_blocks": ("num_random_blocks", 3),
    }
    fixed = Bert.fixed | {"use_bias": True, "rescale_embeddings": False}
    pooler = "bert.pooler"
    two_layers = True

    def settings(self, config, architecture, names):
        attention = {"attention_type": config.get("attention_type", "block_sparse"), "random_blocks": "first"}
        return super().settings(config, architecture, names) | attention

    def config(self, model):
        if model.attention_type == "block_sparse" and model.random_blocks != "first":
            raise ValueError(f"random_blocks is {model.random_blocks!r}: it must be 'first', as in the reference.")
        if model.attention_type == "block_sparse" and not model.num_random_blocks:  # the reference cannot be applied
            raise ValueError("num_random_blocks is 0: `transformers` needs at least 1 for block-sparse attention.")
        return super().config(model) | {"attention_type": model.attention_type}


@register("distilbert")
class DistilBert(Bert):
    """`DistilBertForMaskedLM`... <-> `DistilBERT` with the head of the same task.

    The reference, unlike BERT, has no dropout on the output of attention.
    """

    model = body = "distilbert"
    name = "DistilBert"
    fields = {
        "vocab_size": ("vocab_size", 30_522),
        "max_position_embeddings": ("max_length", 512),
        "n_layers": ("depth", 6),
        "dim": ("width", 768),
        "n_heads": ("num_heads", 12),
        "hidden_dim": ("mlp_dim", 3072),
        "activation": ("activation", "gelu"),
        **dict.fromkeys(("dropout", "attention_dropout"), ("dropout", 0.1)),
    }
    synonyms = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
    fixed = {"tie_word_embeddings": True}
    pooler = "pre_classifier"
    predictions = ("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias")
    second = ""
    dropout = "seq_classif_dropout", 0.2

    def layers(self, model):
        if model.num_segments or model.epsilon != 1e-12:
            given = f"num_segments is {model.num_segments} and epsilon {model.epsilon}"
            raise ValueError(f"{given}: `transformers` has DistilBERT only with 0 and 1e-12.")
        return self.embeddings(model) + block(
            "distilbert.transformer.layer.*.",
            "stack/layers",
            attended=("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin"),
            mlp=("ffn.lin1", "ffn.lin2"),
            norms=("sa_layer_norm", "output_layer_norm"),
        )

    def settings(self, config, architecture, names):
        settings = super().settings(config, architecture, names)
        return settings if settings["head"] in ("classification", "choice") else settings | {"head_dropout": None}


@register("electra")
class Electra(Bert):
    """`ElectraForPreTraining`, which is the head "replaced", `ElectraForMaskedLM`... <-> `ELECTRA`."""

    model = body = "electra"
    name = "Electra"
    fields = Bert.fields | {"hidden_size": ("width", 256), "num_attention_heads": ("num_heads", 4)}
    fields |= {"intermediate_size": ("mlp_dim", 1024)}
    fixed = Bert.fixed | {"summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"}
    pooler = "sequence_summary.summary"
    predictions = ("generator_predictions.dense", "generator_predictions.LayerNorm")
    predictions += ("generator_lm_head", "generator_lm_head.bias")
    second = ""
    two_layers = True
    classifiers = Bert.classifiers | {"replaced": "discriminator_predictions.dense_prediction"}

    def layers(self, model):
        if model.embed_width == model.width:
            raise ValueError(f"width and embed_width are {model.width}: they must differ in ELECTRA in `transformers`.")
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
        config = {"embedding_size": model.embed_width or model.width, "summary_last_dropout": dropout}
        return super().config(model) | config


@register("roberta")
class Roberta(Bert):
    """`RobertaForMaskedLM`... <-> `RoBERTa`; the reference counts positions from that of the padding token."""

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
            given = f"pad_token_id is {str(pad)[:60]} and max_position_embeddings {str(length)[:60]}"
            raise ValueError(f"{given}: they must be integers, and the latter must be greater by at least 2.")
        return super().settings(config, architecture, names) | {"pad_id": pad, "max_length": length - pad - 1}

    def config(self, model):
        length = model.max_length + model.first_position
        return super().config(model) | {"pad_token_id": model.pad_id, "max_position_embeddings": length}


@register("xlm-roberta")
class XLMRoberta(Roberta):
    model = "xlmr"
    name = "XLMRoberta"
