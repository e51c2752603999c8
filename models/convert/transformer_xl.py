"""Transformer-XL: `TransfoXLLMHeadModel`, which `transformers` had before version 5 <-> `TransformerXL`.

The first segment has no memory, as in the authors' PyTorch program; in `transformers`, it attends to `mem_len` zeros.
"""

import numpy as np

from lineage.models.convert.family import Family, Rule, linear, norm, register

CLUSTERS = range(20)  # more clusters than any model has


@register("transfo-xl")
class TransfoXL(Family):
    model = "transformer_xl"
    architectures = ("TransfoXLLMHeadModel",)
    fields = {
        "vocab_size": ("vocab_size", 267_735),
        "n_layer": ("depth", 18),
        "d_model": ("width", 1024),
        "n_head": ("num_heads", 16),
        "d_inner": ("mlp_dim", 4096),
        "div_val": ("divisor", 4),
        "layer_norm_epsilon": ("epsilon", 1e-5),
        "dropout": ("dropout", 0.1),
        "dropatt": ("attention_dropout", 0.0),
    }
    synonyms = {"hidden_size": "d_model", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    synonyms |= {"n_token": "vocab_size"}
    causal = True
    fixed = {"attn_type": 0, "pre_lnorm": False, "untie_r": True, "adaptive": True, "tie_word_embeddings": True}
    tied = (
        *((f"crit.out_layers.{i}.weight", f"transformer.word_emb.emb_layers.{i}.weight") for i in CLUSTERS),
        *((f"crit.out_projs.{i}", f"transformer.word_emb.emb_projs.{i}") for i in CLUSTERS[1:]),
    )

    def rules(self, model):
        if not model.cutoffs or model.activation != "relu":
            given = f"cutoffs is {model.cutoffs} and activation is {model.activation!r}"
            raise ValueError(f"{given}: Transformer-XL has an adaptive softmax and 'relu' in `transformers`.")
        layer, ours = "transformer.layers.*.", "stack/layers/"
        attention, part = f"{layer}dec_attn.", f"{ours}attention/"
        qkv = tuple(f"{part}{name}/kernel" for name in ("query", "key", "value"))
        return [
            *self.words(model),
            Rule(f"{attention}qkv_net.weight", qkv, "(n H C) D -> n D H C"),
            # In the reference, all sines come before all cosines.
            Rule(f"{attention}r_net.weight", f"{part}distance/kernel", "(H C) (2 f) -> (f 2) H C"),
            Rule(f"{attention}r_w_bias", f"{part}u"),
            Rule(f"{attention}r_r_bias", f"{part}v"),
            Rule(f"{attention}o_net.weight", f"{part}out/kernel", "D (H C) -> H C D"),
            *norm(f"{attention}layer_norm", f"{ours}attention_norm"),
            *linear(f"{layer}pos_ff.CoreNet.0", f"{ours}mlp/up"),
            *linear(f"{layer}pos_ff.CoreNet.3", f"{ours}mlp/down"),
            *norm(f"{layer}pos_ff.layer_norm", f"{ours}mlp_norm"),
        ]

    def words(self, model):
        """Return the rules of the adaptive inputs and the adaptive softmax."""
        tails = [Rule("crit.cluster_weight", "embed/tail_table"), Rule("crit.cluster_bias", "embed/tail_bias")]
        table, bias = "transformer.word_emb.emb_layers.{}.weight", "crit.out_layers.{}.bias"
        if model.divisor == 1:
            return [*tails, Rule(table.format(0), "embed/table"), Rule(bias.format(0), "embed/bias")]
        for i in range(len(model.cutoffs) + 1):
            tails += [
                Rule(table.format(i), f"embed/table_{i}"),
                Rule(bias.format(i), f"embed/bias_{i}"),
                Rule(f"transformer.word_emb.emb_projs.{i}", f"embed/projection_{i}", "D E -> E D"),
            ]
        return [*tails, Rule("crit.out_projs.0", "embed/head_projection", "D E -> E D")]

    def settings(self, config, architecture, names):
        width, heads = config.get("d_model", 1024), config.get("n_head", 16)
        for name, needed in (("d_embed", width), ("d_head", width // heads)):
            if (value := config.get(name, needed)) != needed:
                given = f"{name} is {str(value)[:60]}"
                raise ValueError(f"{given}: it must be {needed}, for d_model {width} and n_head {heads}.")
        cutoffs = tuple(config.get("cutoffs", (20_000, 40_000, 200_000)))
        shared = [False] + [config.get("proj_share_all_but_first", True)] * len(cutoffs)
        if config.get("tie_projs", shared) != [False] + [True] * len(cutoffs):
            raise ValueError("tie_projs must be False for the first cluster and True for the others.")
        return {
            "cutoffs": cutoffs,
            "memory_length": config.get("mem_len", 1600),
            "max_length": config.get("tgt_len", 128),
            "clamp_length": max(0, config.get("clamp_len", 1000)),
            "same_length": config.get("same_length", True),
        }

    def config(self, model):
        return {
            "cutoffs": [*model.cutoffs],
            "tie_projs": [False] + [True] * len(model.cutoffs),
            "d_embed": model.width,
            "d_head": model.width // model.num_heads,
            "mem_len": model.memory_length,
            "tgt_len": model.max_length,
            "clamp_len": model.clamp_length or -1,
            "same_length": model.same_length,
        }

    def constants(self, model):
        return {"transformer.pos_emb.inv_freq": 1e4 ** -(np.arange(0, model.width, 2, np.float32) / model.width)}
