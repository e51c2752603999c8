"""The Transformer matches the modules of PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from lineage.models.transformer import Transformer
from tests.tiers import tiered

DEPTH, WIDTH, HEADS, HIDDEN, VOCAB = 2, 12, 3, 20, 13


def linear(layer, *shape):
    """Convert the weights of a PyTorch linear layer."""
    return {"kernel": layer.weight.detach().numpy().T.reshape(*shape), "bias": layer.bias.detach().numpy()}


def attention(module):
    size, parts = WIDTH // HEADS, {}
    weights, biases = module.in_proj_weight.detach().numpy(), module.in_proj_bias.detach().numpy()
    for name, weight, bias in zip(("query", "key", "value"), np.split(weights, 3), np.split(biases, 3)):
        parts[name] = {"kernel": weight.T.reshape(WIDTH, HEADS, size), "bias": bias.reshape(HEADS, size)}
    return parts | {"out": linear(module.out_proj, HEADS, size, WIDTH)}


def norm(module):
    return {"scale": module.weight.detach().numpy(), "bias": module.bias.detach().numpy()}


def block(layer, cross):
    names = ("attention", "cross_attention", "mlp") if cross else ("attention", "mlp")
    ours = {f"{name}_norm": norm(getattr(layer, f"norm{i}")) for i, name in enumerate(names, 1)}
    ours["attention"] = attention(layer.self_attn)
    if cross:
        ours["cross_attention"] = attention(layer.multihead_attn)
    return ours | {"mlp": {"up": linear(layer.linear1, WIDTH, HIDDEN), "down": linear(layer.linear2, HIDDEN, WIDTH)}}


def stack(layers, cross):
    return {"layers": jax.tree.map(lambda *parts: jnp.stack(parts), *(block(layer, cross) for layer in layers))}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("placement", ["post", "pre"])
@tiered("activation", ["relu", "gelu"])
def test_logits_and_hidden_states_match(placement, activation, randomize):
    torch.manual_seed(0)
    options = {"norm_first": placement == "pre", "activation": activation, "batch_first": True, "dropout": 0.0}
    options |= {"layer_norm_eps": 1e-4}
    reference = torch.nn.Transformer(WIDTH, HEADS, DEPTH, DEPTH, HIDDEN, **options)
    if placement == "post":  # the PyTorch stack has a final norm, unlike the paper
        reference.encoder.norm = reference.decoder.norm = None
    randomize(reference, 1)
    embedding = torch.nn.Embedding(VOCAB, WIDTH)

    sizes = {"vocab_size": VOCAB, "max_length": 9, "depth": DEPTH, "width": WIDTH, "num_heads": HEADS}
    model = Transformer(**sizes, mlp_dim=HIDDEN, activation=activation, norm_placement=placement, epsilon=1e-4)
    params = {"embed": {"table": embedding.weight.detach().numpy()}}
    for side in ("encoder", "decoder"):
        params[f"{side}_stack"] = stack(getattr(reference, side).layers, side == "decoder")
        if placement == "pre":
            params[f"{side}_norm"] = norm(getattr(reference, side).norm)

    rng = np.random.default_rng(0)
    inputs, tokens = (rng.integers(0, VOCAB, (3, length)).astype(np.int32) for length in (8, 6))
    mask = np.arange(8) < np.array([[8], [5], [1]])

    position, place = np.arange(9)[:, None], np.arange(WIDTH)
    angle = position / 10_000 ** (place // 2 * 2 / WIDTH)
    table = torch.tensor(np.where(place % 2, np.cos(angle), np.sin(angle)), dtype=torch.float32)

    def embed(ids):
        return embedding(torch.tensor(ids, dtype=torch.long)) * WIDTH**0.5 + table[: ids.shape[1]]

    masks = dict.fromkeys(("src_key_padding_mask", "memory_key_padding_mask"), torch.tensor(~mask))
    masks["tgt_mask"] = torch.nn.Transformer.generate_square_subsequent_mask(6)
    out = reference(embed(inputs), embed(tokens), **masks)
    expected = (out @ embedding.weight.T).detach().numpy()
    actual = jax.jit(model.apply)({"params": params}, inputs, tokens, inputs_mask=mask)
    made = jax.eval_shape(model.init, jax.random.key(0), inputs, tokens)["params"]
    assert jax.tree.structure(made) == jax.tree.structure(params)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)
