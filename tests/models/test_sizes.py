"""Parameter counts of the variants match published models."""

import jax
import jax.numpy as jnp
import pytest

from lineage import models

# Of BERT and its descendants, these are the encoder and its pooler, if it has one. The vocabulary of the Transformer
# has 37,000 words in one table; the paper rounds to 65M and 213M. Transformer-XL has 151M.
COUNTS = {
    "albert": {"base": 11_683_584, "large": 17_683_968, "xlarge": 58_724_864, "xxlarge": 222_595_584},
    "bart": {"base": 139_420_416, "large": 406_291_456},
    "bert": {"tiny": 4_385_920, "mini": 11_170_560, "small": 28_763_648, "medium": 41_373_184}
    | {"base": 109_482_240, "large": 335_141_888},
    "distilbert": {"base": 66_362_880},
    "electra": {"small": 13_483_008, "base": 108_891_648, "large": 334_092_288},
    "gpt": {"small": 124_439_808, "medium": 354_823_168, "large": 774_030_080, "xl": 1_557_611_200},
    "llama": {"llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320, "llama2-70b": 68_976_648_192}
    | {"llama3-8b": 8_030_261_248, "llama3.2-1b": 1_235_814_400, "mistral-7b": 7_241_732_096},
    "resnet": {"18": 11_689_512, "50": 25_557_032, "101": 44_549_160, "bit50": 25_549_352},
    "roberta": {"base": 124_645_632, "large": 355_359_744},
    "t5": {"small": 60_506_624, "base": 222_903_552, "large": 737_668_096, "3b": 2_851_598_336}
    | {"11b": 11_307_321_344, "v1_1_small": 76_961_152, "v1_1_base": 247_577_856, "v1_1_large": 783_150_080}
    | {"v1_1_xl": 2_849_757_184, "v1_1_xxl": 11_135_332_352},
    "transformer": {"base": 44_138_496 + 37_000 * 512, "big": 176_357_376 + 37_000 * 1024},
    "transformer_xl": {"standard": 267_735 * 410 + 16 * (5 * 410**2 + 2 * 410 + 2 * 410 * 2100 + 410 + 2100 + 4 * 410)},
    "vit": {"B": 86_567_656, "L": 304_326_632, "H": 632_045_800},
    "xlmr": {"base": 278_043_648},
}
SETTINGS = {"transformer": {"vocab_size": 37_000}, ("vit", "H"): {"patch_size": 14}}
SETTINGS |= {name: {"head": "pooler"} for name in ("albert", "bert", "roberta", "xlmr")}
SETTINGS |= {name: {"head": "none"} for name in ("distilbert", "electra")}


@pytest.mark.parametrize(("name", "variant"), [(name, variant) for name in COUNTS for variant in COUNTS[name]])
def test_parameter_counts_match_published_models(name, variant):
    model = models.build(name, variant, **SETTINGS.get(name, {}), **SETTINGS.get((name, variant), {}))
    image, tokens = jnp.zeros((1, 224, 224, 3)), jnp.zeros((1, 4), jnp.int32)
    texts = 2 if name in ("bart", "t5", "transformer") else 1
    inputs = (image,) if hasattr(model, "image_size") else (tokens,) * texts
    shapes = jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == COUNTS[name][variant]
