"""BART: `BartForConditionalGeneration`, or `BartModel` (the head is the embedding anyway) <-> `BART`."""

import numpy as np

from models.convert.family import Family, Rule, heads, linear, norm

FIELDS = {
    "vocab_size": ("vocab_size", 50_265),
    "max_position_embeddings": ("max_length", 1024),
    "encoder_layers": ("depth", 12),
    "decoder_layers": ("decoder_depth", 12),
    "d_model": ("width", 1024),
    "encoder_attention_heads": ("num_heads", 16),
    "decoder_attention_heads": ("num_heads", 16),
    "encoder_ffn_dim": ("hidden", 4096),
    "decoder_ffn_dim": ("hidden", 4096),
    "activation_function": ("activation", "gelu"),
    "dropout": ("dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.0),
    "activation_dropout": ("activation_dropout", 0.0),
}


def _rules(model):
    table = [Rule("model.shared.weight", "embed/table")]
    for side in ("encoder", "decoder"):
        layer, ours = f"model.{side}.layers.*.", f"{side}_stack/layers/"
        table += [
            Rule(f"model.{side}.embed_positions.weight", f"{side}_position/table"),
            *norm(f"model.{side}.layernorm_embedding", f"{side}_norm"),
            *_attention(f"{layer}self_attn", f"{ours}attention"),
            *linear(f"{layer}fc1", f"{ours}mlp/up"),
            *linear(f"{layer}fc2", f"{ours}mlp/down"),
            *norm(f"{layer}final_layer_norm", f"{ours}mlp_norm"),
        ]
    table += _attention("model.decoder.layers.*.encoder_attn", "decoder_stack/layers/cross_attention")
    return [*table, Rule("final_logits_bias", "logits_bias", "1 V -> V")] if model.logits_bias else table


def _attention(reference, ours):
    return [
        *(
            rule
            for part in ("query", "key", "value")
            for rule in heads(f"{reference}.{part[0]}_proj", f"{ours}/{part}")
        ),
        *linear(f"{reference}.out_proj", f"{ours}/out", "D (H C) -> H C D"),
        *norm(f"{reference}_layer_norm", f"{ours}_norm"),
    ]


def _config(model):
    width = model.hidden or 4 * model.width
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
    sizes={"H": "num_heads"},
    example=lambda model: (np.zeros((1, 1), np.int32),) * 2,
    rules=_rules,
    config=_config,
    settings=lambda config, architecture, names: {"logits_bias": "final_logits_bias" in names},
    tied=tuple(
        (copy, "model.shared.weight")
        for copy in ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    ),
)
