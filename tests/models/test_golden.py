"""Golden values: recorded outputs of small models."""

import jax
import numpy as np
import pytest

from lineage import models

SIZES = {"depth": 2, "width": 32, "num_heads": 2}
TEXT = {**SIZES, "vocab_size": 50, "max_length": 16}
IMAGE = {"num_classes": 0, "image_size": 16, "channels": 3}
BACKBONE = {"name": "resnet", "depths": (1, 1), "widths": (16, 32), "stem_width": 8, "image_size": 32, "channels": 3}
# model -> (variant, settings, mean absolute output on a CPU with parameters initialized by key 0)
GOLDEN = {
    "albert": ("base", {**TEXT, "embed_width": 16}, 0.0591311549),
    "bart": ("base", TEXT, 0.100013895),
    "bert": ("tiny", {**TEXT, "head": "masked_lm"}, 0.0818811869),
    "bigbird": ("base", {**TEXT, "block_size": 4, "num_random_blocks": 1, "max_length": 64}, 0.081881202),
    "deit": ("mu", {**SIZES, **IMAGE, "patch_size": 4}, 0.762482703),
    "detr": ("r50", {**SIZES, "num_classes": 5, "image_size": 32, "num_queries": 6, "backbone": BACKBONE}, 0.607535176),
    "distilbert": ("base", TEXT, 0.0803583372),
    "electra": ("base", {**TEXT, "embed_width": 16}, 0.00464639482),
    "elmo": ("small", {"vocab_size": 50, "width": 16}, 0.00243825431),
    "gpt": ("small", TEXT, 0.0964470769),
    "llama": ("llama2-7b", {**TEXT, "num_kv_heads": 1}, 0.0912119021),
    "mae": ("mu", {**SIZES, **IMAGE, "patch_size": 4, "mask_rate": 0.75}, 0.798979872),
    "resnet": ("18", {**IMAGE, "depths": (1, 1), "widths": (16, 32), "stem_width": 8}, 0.998245822),
    "roberta": ("base", TEXT, 0.0781798783),
    "seq2seq": ("rnnsearch", {"vocab_size": 50, "depth": 2, "width": 16, "embed_width": 8}, 0.00795361103),
    "swin": ("mu", {**IMAGE, "patch_size": 2, "window": 4}, 0.232279484),
    "t5": ("v1_1_small", {**SIZES, "vocab_size": 50}, 0.814850456),
    "transformer": ("tiny", TEXT, 0.863924003),
    "transformer_xl": ("standard", {**TEXT, "memory_length": 8}, 0.100673798),
    "vit": ("mu", {**SIZES, **IMAGE, "patch_size": 4}, 0.847014239),
    "xlmr": ("base", TEXT, 0.0781798783),
}


def inputs_of(name, model):
    """Return the inputs of a model: an image (and the order of its patches), or tokens (and target tokens)."""
    rng = np.random.default_rng(0)
    if hasattr(model, "image_size"):
        side = model.image_size
        image = rng.standard_normal((2, side, side, 3)).astype(np.float32)
        return [image, rng.random((2, 16)).astype(np.float32)] if name == "mae" else [image]
    tokens = rng.integers(0, 50, (2, 12)).astype(np.int32)
    encoder_decoder = name in ("bart", "seq2seq", "t5", "transformer")
    return [tokens, rng.integers(0, 50, (2, 10)).astype(np.int32)] if encoder_decoder else [tokens]


@pytest.mark.parametrize("name", models.MODELS)
def test_outputs_match_golden_values(name):
    variant, settings, recorded = GOLDEN[name]
    model = models.build(name, variant, **settings)
    inputs = inputs_of(name, model)
    variables = jax.jit(model.init)(jax.random.key(0), *inputs)
    output = jax.tree.leaves(jax.jit(model.apply)(variables, *inputs))[0]
    assert np.abs(np.asarray(output, np.float64)).mean() == pytest.approx(recorded, rel=1e-5)
