"""Llama and Mistral: `LlamaForCausalLM`, `MistralForCausalLM` <-> `Llama` without and with a window.

A model whose heads do not divide its width is written as a Mistral without a window, which computes the same function:
`transformers` refuses such a Llama.

The reference has dropout on the attention weights only; ours also on the output of each sublayer.
"""

import math

from lineage.models.convert.family import Family, Rule, register

# Supported rope types -> their names of the two values of `rope_turns`.
TURNS = {"default": (), "linear": ()}
TURNS |= {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
ROPE_FIXED = {"attention_factor": None, "mscale": None, "mscale_all_dim": None}
ROPE_FIXED |= {"truncate": True, "partial_rotary_factor": 1.0}
# Size of a published vocabulary -> its first and last token of a text.
ENDS = {32_000: (1, 2), 128_256: (128_000, 128_001)}


@register("llama")
class Llama(Family):
    model = "llama"
    architectures = ("LlamaForCausalLM",)
    fields = {
        "vocab_size": ("vocab_size", 32_000),
        "max_position_embeddings": ("max_length", 2048),
        "num_hidden_layers": ("depth", 32),
        "hidden_size": ("width", 4096),
        "num_attention_heads": ("num_heads", 32),
        "num_key_value_heads": ("num_kv_heads", None),
        "head_dim": ("head_size", None),
        "intermediate_size": ("mlp_dim", 11_008),
        "hidden_act": ("activation", "silu"),
        "rms_norm_eps": ("epsilon", 1e-6),
        "attention_dropout": ("dropout", 0.0),
        "tie_word_embeddings": ("tied", False),
    }
    causal = True
    fixed = {"attention_bias": False, "mlp_bias": False}
    sizes = {"H": "num_heads", "K": "kv_heads"}
    kind = {"window": None}
    unread = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"  # in old files
    tied = (("lm_head.weight", "model.embed_tokens.weight"),)

    def fits(self, model):
        return super().fits(model) and model.width % model.num_heads == 0

    def rules(self, model):
        names = {
            "input_layernorm": ("attention_norm/scale", ""),
            "self_attn.q_proj": ("attention/query/kernel", "(H C) D -> D H C"),
            "self_attn.k_proj": ("attention/key/kernel", "(K C) D -> D K C"),
            "self_attn.v_proj": ("attention/value/kernel", "(K C) D -> D K C"),
            "self_attn.o_proj": ("attention/out/kernel", "D (H C) -> H C D"),
            "post_attention_layernorm": ("mlp_norm/scale", ""),
            "mlp.gate_proj": ("mlp/gate/kernel", "F D -> D F"),
            "mlp.up_proj": ("mlp/up/kernel", "F D -> D F"),
            "mlp.down_proj": ("mlp/down/kernel", "D F -> F D"),
        }
        ours = "stack/layers"
        return [
            Rule("model.embed_tokens.weight", "embed/table"),
            *(Rule(f"model.layers.*.{name}.weight", f"{ours}/{path}", axes) for name, (path, axes) in names.items()),
            Rule("model.norm.weight", "norm/scale"),
            *([] if model.tied else [Rule("lm_head.weight", "unembed/table")]),
        ]

    def settings(self, config, architecture, names):
        """Return our settings from `rope_parameters`, or from the older `rope_scaling` and `rope_theta`."""
        rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in TURNS:
            raise ValueError(f"rope_type is {kind!r}: it must be one of {', '.join(TURNS)}.")
        names = {"default": (), "linear": ("factor",)}.get(kind, ("factor", "original_max_position_embeddings"))
        for name, value in ROPE_FIXED.items():
            if rope.get(name) not in (None, value):
                raise ValueError(f"{name} of the rotary positions is {rope[name]!r}: it must be {value!r}.")
        values = {
            "rope_theta": config.get("rope_theta", 10_000.0),
            "original_max_position_embeddings": config.get("max_position_embeddings"),
            "beta_slow": 1.0,
            "beta_fast": 32.0,
        } | {name: value for name, value in rope.items() if value is not None}
        if (length := config.get("original_max_position_embeddings")) is not None:  # overrides that of the dictionary
            values["original_max_position_embeddings"] = length
        numbers = {name: values.get(name) for name in ("rope_theta", *names, *TURNS[kind])}
        for name, value in numbers.items():
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise ValueError(f"{name} of rope_type {kind!r} is {value!r}: it must be a number above 0.")
        settings = {"rope_base": float(numbers["rope_theta"]), "rope_scaling": kind}
        if kind == "default":
            return settings
        settings["rope_factor"] = float(numbers["factor"])
        if TURNS[kind]:
            turns = tuple(float(numbers[name]) for name in TURNS[kind])
            settings |= {"rope_length": int(numbers["original_max_position_embeddings"]), "rope_turns": turns}
        return settings

    def config(self, model):
        first, last = ENDS.get(model.vocab_size, (None, None))
        rope = {"rope_type": model.rope_scaling, "rope_theta": model.rope_base}
        if model.rope_scaling != "default":
            rope["factor"] = model.rope_factor
        if TURNS[model.rope_scaling]:
            rope["original_max_position_embeddings"] = model.rope_length or model.max_length
            rope |= zip(TURNS[model.rope_scaling], model.rope_turns)
        return {
            "num_key_value_heads": model.kv_heads,
            "rope_parameters": rope,
            "rope_theta": model.rope_base,  # where `transformers` 4 looks for it
            "rope_scaling": None if model.rope_scaling == "default" else rope,
            "bos_token_id": first,
            "eos_token_id": last,
        }


@register("mistral")
class Mistral(Llama):
    architectures = ("MistralForCausalLM",)
    fields = Llama.fields | {
        "max_position_embeddings": ("max_length", 131_072),
        "num_key_value_heads": ("num_kv_heads", 8),
        "intermediate_size": ("mlp_dim", 14_336),
        "sliding_window": ("window", None),
    }
    fixed = {}
    kind = {}

    def settings(self, config, architecture, names):
        config.setdefault("sliding_window", 4096)
        return super().settings(config, architecture, names)

    def fits(self, model):
        return model.window is not None or model.width % model.num_heads != 0
