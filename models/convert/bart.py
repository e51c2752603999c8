"""BART and Marian: `BartForConditionalGeneration`, `MarianMTModel`, or `BartModel`, `MarianModel` (whose head would be
the embedding) <-> `BART`; Marian has sinusoidal positions and no norm of the embeddings."""

from lineage.models.convert.family import Family, Rule, attention, block, norm, register

SYNONYMS = {"hidden_size": "d_model", "num_hidden_layers": "encoder_layers"}
SYNONYMS |= {"num_attention_heads": "encoder_attention_heads"}


def layers() -> list[Rule]:
    """Return the rules of the layers of encoder and decoder, as in BART and DETR."""
    mlp, norms, rules = ("fc1", "fc2"), ("self_attn_layer_norm", "final_layer_norm"), []
    for side in ("encoder", "decoder"):
        reference, ours = f"model.{side}.layers.*.", f"{side}_stack/layers"
        rules += block(reference, ours, attended=_projections("self_attn"), mlp=mlp, norms=norms)
    cross = "model.decoder.layers.*.encoder_attn"
    return rules + attention(_projections(cross), f"{cross}_layer_norm", "decoder_stack/layers/cross_attention")


def _projections(attention):
    return [f"{attention}.{part}_proj" for part in ("q", "k", "v", "out")]


@register("bart")
class Bart(Family):
    model = "bart"
    architectures = ("BartForConditionalGeneration", "BartModel")
    prefix = "model."
    fields = {
        "vocab_size": ("vocab_size", 50_265),
        "max_position_embeddings": ("max_length", 1024),
        "encoder_layers": ("depth", 12),
        "decoder_layers": ("decoder_depth", 12),
        "d_model": ("width", 1024),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), ("num_heads", 16)),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), ("mlp_dim", 4096)),
        "activation_function": ("activation", "gelu"),
        "dropout": ("dropout", 0.1),
        "attention_dropout": ("attention_dropout", 0.0),
        "activation_dropout": ("activation_dropout", 0.0),
        "scale_embedding": ("scale_embedding", False),
    }
    synonyms = SYNONYMS
    causal = None
    fixed = {"is_encoder_decoder": True, "tie_word_embeddings": True}
    kind = {"position": "learned", "embed_norm": True}
    tied = tuple(
        (f"{copy}.weight", "model.shared.weight")
        for copy in ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
    )
    num_inputs = 2
    unread = r"(model\.)?(encoder|decoder)\.version"  # a number of fairseq, in old files

    def rules(self, model):
        table = [Rule("model.shared.weight", "embed/table"), *layers()]
        for side in ("encoder", "decoder"):
            if model.position == "learned":
                table.append(Rule(f"model.{side}.embed_positions.weight", f"{side}_position/table"))
            if model.embed_norm:
                table += norm(f"model.{side}.layernorm_embedding", f"{side}_norm")
        return [*table, Rule("final_logits_bias", "logits_bias", "1 V -> V")] if model.logits_bias else table

    def settings(self, config, architecture, names):
        return {"logits_bias": "final_logits_bias" in names}


@register("marian")
class Marian(Bart):
    architectures = ("MarianMTModel", "MarianModel")
    fields = Bart.fields | {"vocab_size": ("vocab_size", 58_101)}
    fixed = Bart.fixed | {"share_encoder_decoder_embeddings": True}
    kind = {"position": "sinusoidal", "embed_norm": False}
    unread = r"(model\.)?(encoder|decoder)\.embed_positions\.weight"  # the fixed table, in old files

    def config(self, model):
        last = model.vocab_size - 1  # by convention the padding token, with which the decoder starts
        starts = {"pad_token_id": last, "decoder_start_token_id": last, "bad_words_ids": [[last]]}
        return {"decoder_vocab_size": model.vocab_size, **starts}
