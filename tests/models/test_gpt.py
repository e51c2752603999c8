import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from lineage import models
from lineage.models.gpt import GPT

TINY = GPT(vocab_size=17, max_length=10, depth=2, width=16, num_heads=2)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 17, (2, 8)), jnp.int32)


def test_parameter_count_without_biases_matches_nanogpt():
    """Check nanoGPT's CPU recipe: 802,944 parameters in matrices and 1,152 in scales of the norms."""
    model = GPT(vocab_size=65, max_length=64, depth=4, width=128, num_heads=4, use_bias=False)
    shapes = flatten_dict(jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"], sep="/")
    assert not [path for path in shapes if path.endswith("bias")]
    assert sum(leaf.size for leaf in shapes.values()) == 802_944 + 1_152


def test_initialization_matches_the_paper():
    """Check that output projections of the 2 L sublayers are scaled by 1 / sqrt(2 L), and that logits are near zero."""
    model = TINY.clone(depth=8, width=64)
    logits, variables = jax.jit(model.init_with_output)(jax.random.key(0), TOKENS)
    assert logits.std() < 0.3
    params = variables["params"]
    layers = params["stack"]["layers"]
    for leaf in (params["embed"]["table"], layers["attention"]["query"]["kernel"], layers["mlp"]["up"]["kernel"]):
        assert leaf.std() == pytest.approx(0.02, rel=0.1)
    for leaf in (layers["attention"]["out"]["kernel"], layers["mlp"]["down"]["kernel"]):
        assert leaf.std() == pytest.approx(0.02 / 4, rel=0.1)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (("gtp",), {}, "Unknown model 'gtp'. Did you mean 'gpt'?"),
        (("detr",), {}, "detr needs backbone: give it, or a variant of r50, r101."),
        (("gpt", "smal"), {}, "Unknown variant of gpt 'smal'. Did you mean 'small'?"),
        (("gpt",), {"num_head": 3}, "Unknown setting of gpt 'num_head'. Did you mean 'num_heads'?"),
    ],
)
def test_build_suggests_similar_names(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        models.build(*args, **kwargs)


def test_build_settings_override_the_variant():
    model = models.build("gpt", "small", depth=3, mlp_dim=None)
    assert (model.depth, model.width, model.mlp_dim) == (3, 768, None)
