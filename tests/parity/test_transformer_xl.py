"""Transformer-XL matches the formulas of the paper in PyTorch, position by position (`transformers` 5 has no
such model).
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax.traverse_util import flatten_dict, unflatten_dict

from lineage.models.transformer_xl import TransformerXL
from tests.tiers import tiered
from tests.tolerance import assert_close

SEGMENT = 4


def sinusoid(distance, width):
    angles = [distance / 10_000 ** (i // 2 * 2 / width) for i in range(width)]
    return torch.tensor([np.cos(a) if i % 2 else np.sin(a) for i, a in enumerate(angles)], dtype=torch.float32)


def attention(part, h, memory):
    """Compute section 3.3: A_ij = q_i k_j + q_i W_kR R_(i-j) + u k_j + v W_kR R_(i-j), keys and values of
    [SG(memory), h].
    """
    context = torch.cat([memory.detach(), h], dim=1)
    query, key, value = (
        torch.einsum("btd,dhc->bthc", x, part[name]["kernel"])
        for name, x in (("query", h), ("key", context), ("value", context))
    )
    rows, length, heads, size = query.shape
    result = torch.zeros_like(h)
    for b in range(rows):
        for n in range(heads):
            for t in range(length):
                i, scores = memory.shape[1] + t, []
                for j in range(i + 1):
                    r = sinusoid(i - j, h.shape[-1]) @ part["distance"]["kernel"][:, n]
                    q, k = query[b, t, n], key[b, j, n]
                    scores.append((q @ k + q @ r + part["u"][n] @ k + part["v"][n] @ r) / size**0.5)
                weights = torch.softmax(torch.stack(scores), dim=0)
                out = sum(w * value[b, j, n] for j, w in enumerate(weights)) @ part["out"]["kernel"][n]
                result = result.index_put((torch.tensor(b), torch.tensor(t)), out, accumulate=True)
    return result


def norm(part, x):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], part["scale"], part["bias"], 1e-5)


def reference(params, segments, memory_length):
    """Return the logits of each segment, and the hidden states of the last one."""
    table, width, results = params["embed"]["table"], params["embed"]["table"].shape[1], []
    layers = params["stack"]["layers"]
    depth = layers["attention"]["u"].shape[0]
    memory = [torch.zeros(segments.shape[1], 0, width)] * depth
    for tokens in segments:
        h, hidden = table[torch.tensor(np.array(tokens)).long()] * width**0.5, []
        for layer in range(depth):
            part = unflatten_dict({path: value[layer] for path, value in flatten_dict(layers).items()})
            before, start = h, memory[layer].shape[1] + h.shape[1] - memory_length
            h = norm(part["attention_norm"], h + attention(part["attention"], h, memory[layer]))
            up, down = part["mlp"]["up"], part["mlp"]["down"]
            inner = torch.relu(h @ up["kernel"] + up["bias"])
            h = norm(part["mlp_norm"], h + inner @ down["kernel"] + down["bias"])
            memory[layer] = torch.cat([memory[layer], before], dim=1)[:, max(start, 0) :]
            hidden.append(h)
        results.append(h @ table.T)
    return results, hidden


@tiered("memory_length", [0, 3, 6], first=lambda memory_length: memory_length == 3)
def test_segments_and_gradients_match_the_paper(memory_length, assert_same_gradients):
    """Check a memory shorter than a segment, one that takes several segments to fill, and none."""
    rng = np.random.default_rng(memory_length)
    model = TransformerXL(
        vocab_size=11, max_length=SEGMENT, memory_length=memory_length, depth=2, width=6, num_heads=2, mlp_dim=7
    )
    segments = jnp.asarray(rng.integers(0, 11, (4, 2, SEGMENT)), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), segments[0])["params"]
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) * 0.5, shapes)
    theirs = jax.tree.map(lambda x: torch.tensor(x, requires_grad=True), params)
    expected, expected_hidden = reference(theirs, segments, memory_length)
    sum(logits.sin().sum() for logits in expected).backward()

    def loss(params):
        memory, logits = {}, []
        for tokens in segments:
            out, state = model.apply({"params": params, **memory}, tokens, mutable=["memory", "intermediates"])
            memory = {name: value for name, value in state.items() if name == "memory"}
            logits.append(out)
        return sum(jnp.sin(out).sum() for out in logits), (logits, state["intermediates"])

    grads, (found, seen) = jax.jit(jax.grad(loss, has_aux=True))(params)
    for mine, other in zip(found, expected, strict=True):
        assert_close(mine, other.detach())
    for mine, other in zip(seen["stack"]["layers"]["hidden"][0], expected_hidden, strict=True):
        assert_close(mine, other.detach())
    assert_same_gradients(grads, jax.tree.map(lambda x: x.grad.numpy(), theirs))
