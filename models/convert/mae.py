"""The masked autoencoder: `ViTMAEForPreTraining` <-> `MAE`; `ViTMAEModel` <-> `decoder_depth=0`.

Its sine-cosine tables are in the files, but are not parameters. For images of another size, the reference interpolates
the decoder's table along the sequence of patches, ours along the rows and columns of the grid.
"""

import numpy as np

from lineage.models.convert.family import ImageFamily, Rule, linear, norm, register
from lineage.models.convert.vit import ViT, encoder, layers, make_square, refuse_others
from lineage.models.layers.position import sincos_2d


@register("vit_mae")
class ViTMAE(ImageFamily):
    model = "mae"
    architectures = ("ViTMAEForPreTraining", "ViTMAEModel")
    prefix = "vit."
    fields = ViT.fields | {
        "decoder_hidden_size": ("decoder_width", 512),
        "decoder_num_attention_heads": ("decoder_num_heads", 16),
        "decoder_intermediate_size": ("decoder_mlp_dim", 2048),
        "mask_ratio": ("mask_rate", 0.75),
    }
    fixed = {"qkv_bias": True}
    sizes = ImageFamily.sizes | {"K": "decoder_num_heads"}

    def example(self, model):
        return *super().example(model), np.zeros((1, (model.image_size // model.patch_size) ** 2), np.float32)

    def rules(self, model):
        if not model.decoder_depth:
            return encoder("")
        return [
            *encoder("vit."),
            *linear("decoder.decoder_embed", "decoder_embed"),
            Rule("decoder.mask_token", "mask_token", "1 1 D -> D"),
            *layers("decoder.decoder_encoder.layer", "decoder_stack/layers", "K"),
            *norm("decoder.decoder_norm", "decoder_norm"),
            *linear("decoder.decoder_pred", "decoder_head"),
        ]

    def constants(self, model):
        side = model.image_size // model.patch_size
        names = {"vit.embeddings.position_embeddings": model.width, "decoder.decoder_pos_embed": model.decoder_width}
        if not model.decoder_depth:
            names = {"embeddings.position_embeddings": model.width}
        return {name: np.pad(sincos_2d(side, side, width), ((1, 0), (0, 0)))[None] for name, width in names.items()}

    def settings(self, config, architecture, names):
        make_square(config)
        depth = 0 if architecture == "ViTMAEModel" else config.get("decoder_num_hidden_layers", 8)
        return {"normalized": config.get("norm_pix_loss", False), "decoder_depth": depth}

    def config(self, model):
        refuse_others(model, position="mae")
        if model.num_classes:
            raise ValueError(f"num_classes is {model.num_classes}: `transformers` has no MAE with classes.")
        return {
            "architectures": [self.architectures[0 if model.decoder_depth else 1]],
            "decoder_num_hidden_layers": model.decoder_depth,
            "decoder_intermediate_size": model.decoder_mlp_dim or 4 * model.decoder_width,
            "norm_pix_loss": model.normalized,
        }
