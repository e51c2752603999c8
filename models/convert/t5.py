"""T5: `T5ForConditionalGeneration`, or `T5Model` (whose head would be the embedding) <-> `T5`, version 1.0 or 1.1."""

from lineage.models.convert.family import ACTIVATIONS, Family, Rule, register

# `feed_forward_proj` -> (gated, activation); gelu is the tanh approximation only in "gated-gelu".
PROJECTIONS = {name: (False, ours) for name, ours in ACTIVATIONS.items()}
PROJECTIONS |= {f"gated-{name}": (True, ours) for name, ours in ACTIVATIONS.items()}
PROJECTIONS |= {"gated-gelu": (True, "gelu_tanh")}


@register("t5")
class T5(Family):
    model = "t5"
    architectures = ("T5ForConditionalGeneration", "T5Model")
    fields = {
        "vocab_size": ("vocab_size", 32_128),
        "num_layers": ("depth", 6),
        "num_decoder_layers": ("decoder_depth", None),
        "d_model": ("width", 512),
        "num_heads": ("num_heads", 8),
        "d_kv": ("head_size", 64),
        "d_ff": ("mlp_dim", 2048),
        "relative_attention_num_buckets": ("buckets", 32),
        "relative_attention_max_distance": ("max_distance", 128),
        "layer_norm_epsilon": ("epsilon", 1e-6),
        "dropout_rate": ("dropout", 0.1),
    }
    synonyms = {"hidden_size": "d_model", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
    synonyms |= {"head_dim": "d_kv"}
    causal = None
    fixed = {"is_encoder_decoder": True}
    tied = tuple((f"{x}.weight", "shared.weight") for x in ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head"))
    num_inputs = 2
    # A bias of cross-attention in old files, which is not used.
    unread = r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"

    def rules(self, model):
        heads, out = "(H C) D -> D H C", "D (H C) -> H C D"
        attention = [("q", "query", heads), ("k", "key", heads), ("v", "value", heads), ("o", "out", out)]
        up = [("wi_0", "gate"), ("wi_1", "up")] if model.gated else [("wi", "up")]
        mlp = [(theirs, ours, "F D -> D F") for theirs, ours in (*up, ("wo", "down"))]
        first = ("SelfAttention", "attention", attention)
        cross = ("EncDecAttention", "cross_attention", attention)
        last = ("DenseReluDense", "mlp", mlp)

        table = [Rule("shared.weight", "embed/table")]
        for side, parts in (("encoder", (first, last)), ("decoder", (first, cross, last))):
            bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            norm = Rule(f"{side}.final_layer_norm.weight", f"{side}_norm/scale")
            table += [Rule(bias, f"{side}_relative/table"), norm]
            for number, (name, part, matrices) in enumerate(parts):
                layer, path = f"{side}.block.*.layer.{number}", f"{side}_stack/layers/{part}"
                table.append(Rule(f"{layer}.layer_norm.weight", f"{path}_norm/scale"))
                for theirs, ours, axes in matrices:
                    table.append(Rule(f"{layer}.{name}.{theirs}.weight", f"{path}/{ours}/kernel", axes))
        return table if model.tied else [*table, Rule("lm_head.weight", "head/kernel", "V D -> D V")]

    def settings(self, config, architecture, names):
        projection = config.get("feed_forward_proj", "relu")
        if projection not in PROJECTIONS:
            raise ValueError(f"feed_forward_proj is {projection!r}: it must be one of {', '.join(PROJECTIONS)}.")
        gated, activation = PROJECTIONS[projection]
        if (name := config.get("dense_act_fn")) is not None:  # overrides the function of `feed_forward_proj`
            if name not in ACTIVATIONS:
                raise ValueError(f"dense_act_fn is {name!r}: it must be one of {', '.join(ACTIVATIONS)}.")
            activation = ACTIVATIONS[name]
        # `transformers` 5 writes tie_word_embeddings=True for every T5, and scale_decoder_outputs=False for version
        # 1.1; earlier versions express both by tie_word_embeddings=False.
        scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings")) is not False
        tied = scaled or (architecture != "T5Model" and "lm_head.weight" not in names)
        scale = None if scaled == tied else scaled
        return {"gated": gated, "activation": activation, "tied": tied, "scale_decoder_outputs": scale}

    def config(self, model):
        kind, scale = (model.gated, model.activation), model.scale_decoder_outputs
        if scale and not model.tied:
            raise ValueError("scale_decoder_outputs is True, tied is False: `transformers` scales only tied outputs.")
        projection, tied = next(name for name, value in PROJECTIONS.items() if value == kind), model.tied
        tied = tied if scale is None else scale
        return {"feed_forward_proj": projection, "tie_word_embeddings": tied, "decoder_start_token_id": 0}
