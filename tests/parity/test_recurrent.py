"""Recurrent layers match PyTorch."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from lineage.models.elmo import ELMo
from lineage.models.layers.recurrent import Recurrent
from tests.tiers import tiered
from tests.tolerance import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections")
WIDTH, INPUTS = 6, 5
LENGTHS = np.array([7, 4, 1])
MASK = np.arange(7) < LENGTHS[:, None]


def kernels(kind, weights, suffix):
    """Convert one direction of a PyTorch layer: its two biases are added, except for the reset term of a GRU."""
    w_x, w_h, b_x, b_h = (weights[f"{part}_{suffix}"] for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    ours = {"input": {"kernel": w_x.T, "bias": b_x}, "recurrent": {"kernel": w_h.T}}
    if kind == "gru":
        ours["recurrent"]["bias"] = b_h
    else:
        ours["input"]["bias"] = b_x + b_h
    if f"weight_hr_{suffix}" in weights:
        ours["output"] = {"kernel": weights[f"weight_hr_{suffix}"].T}
    return {"cell": ours}


def params(kind, depth, weights):
    weights = {name: np.asarray(value) for name, value in weights.items()}
    both = any(name.endswith("reverse") for name in weights)
    directions = [("forward", ""), ("backward", "_reverse")] if both else [("forward", "")]
    return {f"{way}_{i}": kernels(kind, weights, f"l{i}{end}") for i in range(depth) for way, end in directions}


@tiered(
    ("kind", "depth", "bidirectional"),
    [("rnn", 1, False), ("lstm", 2, False), ("gru", 1, True), ("rnn", 2, True), ("gru", 2, True), ("lstm", 2, True)],
    first=lambda kind, depth, bidirectional: bidirectional and depth == 2,
)
def test_outputs_states_and_gradients_match_pytorch(kind, depth, bidirectional):
    torch.manual_seed(0)
    reference = getattr(torch.nn, kind.upper())(INPUTS, WIDTH, depth, batch_first=True, bidirectional=bidirectional)
    rng, directions = np.random.default_rng(0), 1 + bidirectional
    x = rng.standard_normal((3, 7, INPUTS)).astype(np.float32)
    weigh = rng.standard_normal((3, 7, directions * WIDTH)).astype(np.float32)

    inputs = torch.tensor(x, requires_grad=True)
    packed = torch.nn.utils.rnn.pack_padded_sequence(inputs, torch.tensor(LENGTHS), batch_first=True)
    out, ends = reference(packed)
    out, _ = torch.nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
    ends = ends if kind == "lstm" else (ends,)
    ((out * torch.tensor(weigh)).sum() + sum((end**2).sum() for end in ends)).backward()

    module = Recurrent(kind, WIDTH, depth, bidirectional)

    def loss(params, x):
        out, ends = module.apply({"params": params}, x, mask=jnp.asarray(MASK))
        out = jnp.where(MASK[..., None], out, 0)
        return (out * weigh).sum() + sum((part**2).sum() for end in ends for part in end), (out, ends)

    ours = params(kind, depth, {name: value.detach() for name, value in reference.named_parameters()})
    (grads, to_x), (actual, found_ends) = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(ours, x)
    np.testing.assert_allclose(actual, out.detach(), atol=2e-6)
    for i, end in enumerate(found_ends):
        for part, expected in zip(end, ends):
            np.testing.assert_allclose(part, expected[i].detach(), atol=2e-6)
    np.testing.assert_allclose(to_x, inputs.grad, atol=2e-5)
    expected = params(kind, depth, {name: value.grad for name, value in reference.named_parameters()})
    if kind != "gru":  # both biases have the gradient of their sum, so the converted sum is doubled
        expected = jax.tree_util.tree_map_with_path(lambda path, x: x / 2 if path[-1].key == "bias" else x, expected)
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    jax.tree.map(partial(np.testing.assert_allclose, atol=3e-5), grads, expected)


def test_elmo_matches_residual_stacks_of_projected_lstms():
    torch.manual_seed(0)
    model, mask = ELMo(vocab_size=11, depth=2, width=4, cell_dim=WIDTH, dropout=0.0), torch.tensor(MASK)[..., None]
    lstm = partial(torch.nn.LSTM, 4, WIDTH, batch_first=True, proj_size=4)
    stacks = {way: [lstm(), lstm()] for way in ("ahead", "back")}
    table, head = torch.nn.Embedding(11, 4), torch.nn.Linear(4, 11)
    tokens = torch.randint(11, MASK.shape)

    def turned(x):
        """Reverse the real tokens of each sequence."""
        return torch.stack([torch.cat([row[:size].flip(0), row[size:]]) for row, size in zip(x, LENGTHS)])

    layers, logits = [[table(tokens)] * 2], []
    params = {"embed": {"table": table.weight.detach().numpy()}}
    params["head"] = {"kernel": head.weight.detach().numpy().T, "bias": head.bias.detach().numpy()}
    for way, stack in stacks.items():
        x, outs = table(tokens), []
        for i, lstm in enumerate(stack):
            out = lstm(x)[0] if way == "ahead" else turned(lstm(turned(x))[0])
            x = out + x if i else out
            outs.append(x)
            weights = {name: value.detach().numpy() for name, value in lstm.named_parameters()}
            params[f"{'forward' if way == 'ahead' else 'backward'}_{i}"] = kernels("lstm", weights, "l0")
        layers.append(outs)
        logits.append(head(x))
    expected = [layers[0], *zip(layers[1], layers[2])]
    expected = torch.stack([torch.cat(list(halves), -1) for halves in expected])

    apply = jax.jit(lambda x, *args: model.apply({"params": x}, *args[:1], mask=args[1], mutable=["intermediates"]))
    found, sown = apply(params, jnp.asarray(tokens.numpy(), jnp.int32), jnp.asarray(MASK))
    real = mask.numpy()
    assert_close(sown["intermediates"]["layers"][0] * real, (expected * mask).detach())
    for ours, theirs in zip(found, logits):
        assert_close(ours * real, (theirs * mask).detach())
