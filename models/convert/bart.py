"""BART: `BartForConditionalGeneration`, or `BartModel` (the head is the embedding anyway) <-> `BART`."""

import numpy as np

from lineage.models.convert.family import Family, Rule, attention, block, norm

FIELDS = {
    "vocab_size": ("vocab_size", 50_265),
    "max_position_embeddings": ("max_length", 1024),
    "encoder_layers": ("depth", 12),
    "decoder_layers": ("decoder_depth", 12),
    "d_model": ("width", 1024),
    "encoder_attention_heads": ("num_heads", 16),
    "decoder_attention_heads": ("num_heads", 16),
    "encoder_ffn_dim": ("mlp_dim", 4096),
    "decoder_ffn_dim": ("mlp_dim", 4096),
    "activation_function": ("activation", "gelu"),
    "dropout": ("dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.0),
    "activation_dropout": ("activation_dropout", 0.0),
}


def _rules(model):
    table = [Rule("model.shared.weight", "embed/table"), *layers()]
    for side in ("encoder", "decoder"):
        table.append(Rule(f"model.{side}.embed_positions.weight", f"{side}_position/table"))
        table += norm(f"model.{side}.layernorm_embedding", f"{side}_norm")
    return [*table, Rule("final_logits_bias", "logits_bias", "1 V -> V")] if model.logits_bias else table


def layers() -> list[Rule]:
    """Every layer of the encoder and of the decoder, as BART and DETR have them."""
    mlp, norms, rules = ("fc1", "fc2"), ("self_attn_layer_norm", "final_layer_norm"), []
    for side in ("encoder", "decoder"):
        reference, ours = f"model.{side}.layers.*.", f"{side}_stack/layers"
        rules += block(reference, ours, attended=_projections("self_attn"), mlp=mlp, norms=norms)
    cross = "model.decoder.layers.*.encoder_attn"
    return rules + attention(_projections(cross), f"{cross}_layer_norm", "decoder_stack/layers/cross_attention")


def _projections(attention):
    return [f"{attention}.{part}_proj" for part in ("q", "k", "v", "out")]


def _config(model):
    width = model.mlp_dim or 4 * model.width
    return {
        "architectures": ["BartForConditionalGeneration"],
        "decoder_layers": model.decoder_depth or model.depth,
        "encoder_ffn_dim": width,
        "decoder_ffn_dim": width,
    }


FAMILY = Family(
    model="bart",
    architectures=("BartForConditionalGeneration", "BartModel"),
    prefix="model.",
    fields=FIELDS,
    fixed={"is_encoder_decoder": True, "scale_embedding": False, "tie_word_embeddings": True},
    example=lambda model: (np.zeros((1, 1), np.int32),) * 2,
    rules=_rules,
    config=_config,
    settings=lambda config, architecture, names: {"logits_bias": "final_logits_bias" in names},
    tied=tuple(
        (copy, "model.shared.weight")
        for copy in ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    ),
)
