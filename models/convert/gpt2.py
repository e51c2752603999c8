"""GPT-2: `GPT2LMHeadModel`, or `GPT2Model` (whose head would be the embedding) <-> `GPT`. Weights are (in, out)."""

import numpy as np

from lineage.models.convert.family import Family, Rule, linear, norm, register


@register("gpt2")
class GPT2(Family):
    model = "gpt"
    architectures = ("GPT2LMHeadModel", "GPT2Model")
    prefix = "transformer."
    fields = {
        "vocab_size": ("vocab_size", 50_257),
        "n_positions": ("max_length", 1024),
        "n_layer": ("depth", 12),
        "n_embd": ("width", 768),
        "n_head": ("num_heads", 12),
        "n_inner": ("mlp_dim", None),
        "activation_function": ("activation", "gelu_new"),
        "layer_norm_epsilon": ("epsilon", 1e-5),
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), ("dropout", 0.1)),
    }
    synonyms = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    synonyms |= {"max_position_embeddings": "n_positions"}
    causal = True
    fixed = {"tie_word_embeddings": True, "scale_attn_weights": True}
    fixed |= {"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    unread = r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"  # causal masks, in old files
    tied = (("lm_head.weight", "transformer.wte.weight"),)

    def rules(self, model):
        layer, ours = "transformer.h.*.", "stack/layers/"
        qkv = [f"{ours}attention/{part}/" for part in ("query", "key", "value")]
        rules = [
            Rule("transformer.wte.weight", "embed/table"),
            Rule("transformer.wpe.weight", "position/table"),
            *norm(f"{layer}ln_1", f"{ours}attention_norm"),
            Rule(f"{layer}attn.c_attn.weight", tuple(part + "kernel" for part in qkv), "D (n H C) -> n D H C"),
            Rule(f"{layer}attn.c_attn.bias", tuple(part + "bias" for part in qkv), "(n H C) -> n H C"),
            *linear(f"{layer}attn.c_proj", f"{ours}attention/out", "(H C) D -> H C D"),
            *norm(f"{layer}ln_2", f"{ours}mlp_norm"),
            *linear(f"{layer}mlp.c_fc", f"{ours}mlp/up", ""),
            *linear(f"{layer}mlp.c_proj", f"{ours}mlp/down", ""),
            *norm("transformer.ln_f", "norm"),
        ]
        return [rule for rule in rules if model.use_bias or not rule.reference.endswith(".bias")]

    def constants(self, model):
        """Return zeros as the biases of a model without biases."""
        if model.use_bias:
            return {}
        width, hidden = model.width, model.mlp_size
        of_layer = {"ln_1": width, "attn.c_attn": 3 * width, "attn.c_proj": width, "ln_2": width}
        of_layer |= {"mlp.c_fc": hidden, "mlp.c_proj": width}
        sizes = {f"h.{layer}.{name}": size for layer in range(model.depth) for name, size in of_layer.items()}
        biases = {**sizes, "ln_f": width}
        return {f"transformer.{name}.bias": np.zeros(size, np.float32) for name, size in biases.items()}

    def config(self, model):
        # The default end-of-text token exists in the published vocabulary only.
        end = 50_256 if model.vocab_size == 50_257 else None
        return {"n_inner": model.mlp_dim, "bos_token_id": end, "eos_token_id": end}
