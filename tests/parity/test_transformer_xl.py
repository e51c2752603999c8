"""Transformer-XL matches the formulas of the paper in PyTorch, position by position, and checkpoints in the layout of
`transfo-xl-wt103` give the published module's outputs (`transformers` 5 has no such model).
"""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file

from lineage.models import Targets, convert
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
    sizes = {"vocab_size": 11, "depth": 2, "width": 6, "num_heads": 2, "mlp_dim": 7}
    model = TransformerXL(**sizes, max_length=SEGMENT, memory_length=memory_length)
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


WORDS, CUTOFFS, WIDTH, HEADS, HIDDEN, MEMORY, CLAMP = 30, [6, 12, 22], 8, 2, 10, 5, 3


def checkpoint(divisor, seed):
    """Return random tensors with the names and shapes of `transfo-xl-wt103`."""
    ends = [0, *CUTOFFS, WORDS]
    shapes = {"crit.cluster_weight": (3, WIDTH), "crit.cluster_bias": (3,)}
    for i, (start, stop) in enumerate(itertools.pairwise(ends) if divisor > 1 else [(0, WORDS)]):
        shapes[f"transformer.word_emb.emb_layers.{i}.weight"] = (stop - start, WIDTH // divisor**i)
        shapes[f"crit.out_layers.{i}.bias"] = (stop - start,)
        if divisor > 1:
            shapes[f"transformer.word_emb.emb_projs.{i}"] = (WIDTH, WIDTH // divisor**i)
    if divisor > 1:
        shapes["crit.out_projs.0"] = (WIDTH, WIDTH)
    for layer in ("transformer.layers.0.", "transformer.layers.1."):
        shapes |= {
            f"{layer}dec_attn.qkv_net.weight": (3 * WIDTH, WIDTH),
            f"{layer}dec_attn.r_net.weight": (WIDTH, WIDTH),
            f"{layer}dec_attn.o_net.weight": (WIDTH, WIDTH),
            f"{layer}dec_attn.r_w_bias": (HEADS, WIDTH // HEADS),
            f"{layer}dec_attn.r_r_bias": (HEADS, WIDTH // HEADS),
            f"{layer}pos_ff.CoreNet.0.weight": (HIDDEN, WIDTH),
            f"{layer}pos_ff.CoreNet.0.bias": (HIDDEN,),
            f"{layer}pos_ff.CoreNet.3.weight": (WIDTH, HIDDEN),
            f"{layer}pos_ff.CoreNet.3.bias": (WIDTH,),
        }
        for norm_name in ("dec_attn", "pos_ff"):
            shapes |= {f"{layer}{norm_name}.layer_norm.{part}": (WIDTH,) for part in ("weight", "bias")}
    rng = np.random.default_rng(seed)
    tensors = {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    frequencies = 10_000 ** -(np.arange(0, WIDTH, 2) / WIDTH)
    tensors["transformer.pos_emb.inv_freq"] = frequencies.astype(np.float32)
    for i in range(len(CUTOFFS) + 1):  # the tied copies
        for copy, original in (("out_layers.{}.weight", "emb_layers.{}.weight"), ("out_projs.{}", "emb_projs.{}")):
            name, tied = f"crit.{copy.format(i)}", tensors.get(f"transformer.word_emb.{original.format(i)}")
            if tied is not None and name not in tensors:
                tensors[name] = tied
    return tensors


def clusters_of(tensors, divisor):
    """Yield (first word, table, input projection, output projection, bias) of each cluster."""
    for i, (start, stop) in enumerate(itertools.pairwise([0, *CUTOFFS, WORDS])):
        part, rows = (i, slice(None)) if divisor > 1 else (0, slice(start, stop))
        table, bias = tensors[f"crit.out_layers.{part}.weight"][rows], tensors[f"crit.out_layers.{part}.bias"][rows]
        inputs = tensors[f"transformer.word_emb.emb_projs.{i}"] if divisor > 1 else torch.eye(WIDTH)
        outputs = tensors[f"crit.out_projs.{i}"] if divisor > 1 else torch.eye(WIDTH)
        yield start, table, inputs, outputs, bias


def published(tensors, tokens, divisor, same_length, memory):
    """Return the log-probabilities of the next words, [B, T, V], from tensors with the published names.

    `memory` has the inputs of each layer before the segment. Distances from `CLAMP` on count as equal; with
    `same_length`, a token attends to as many tokens as there are in the memory, itself included.
    """
    clusters = list(clusters_of(tensors, divisor))
    h = torch.zeros(*tokens.shape, WIDTH)
    for b, t in np.ndindex(tokens.shape):
        start, table, inputs, *_ = [part for part in clusters if part[0] <= tokens[b, t]][-1]
        h[b, t] = inputs @ table[tokens[b, t] - start] * WIDTH**0.5
    frequencies = tensors["transformer.pos_emb.inv_freq"]
    for layer, before in enumerate(memory):
        own = {name[21:]: x for name, x in tensors.items() if name.startswith(f"transformer.layers.{layer}.")}
        seen = torch.cat([before, h], dim=1)
        query, key, value = (seen @ own["dec_attn.qkv_net.weight"].T).unflatten(-1, (3, HEADS, -1)).unbind(2)
        out = torch.zeros(*tokens.shape, HEADS, WIDTH // HEADS)
        for b, t, n in np.ndindex(*tokens.shape, HEADS):
            i = before.shape[1] + t
            first = i + 1 - before.shape[1] if same_length else 0
            scores = []
            for j in range(first, i + 1):
                angles = min(i - j, CLAMP) * frequencies
                r = (own["dec_attn.r_net.weight"] @ torch.cat([angles.sin(), angles.cos()])).view(HEADS, -1)[n]
                q = query[b, i, n]
                scores.append((q + own["dec_attn.r_w_bias"][n]) @ key[b, j, n] + (q + own["dec_attn.r_r_bias"][n]) @ r)
            weights = torch.softmax(torch.stack(scores) / (WIDTH // HEADS) ** 0.5, dim=0)
            out[b, t, n] = weights @ value[b, first : i + 1, n]
        h = published_norm(own, "dec_attn", h + out.flatten(2) @ own["dec_attn.o_net.weight"].T)
        hidden = torch.relu(h @ own["pos_ff.CoreNet.0.weight"].T + own["pos_ff.CoreNet.0.bias"])
        h = published_norm(own, "pos_ff", h + hidden @ own["pos_ff.CoreNet.3.weight"].T + own["pos_ff.CoreNet.3.bias"])
    _, table, _, outputs, bias = clusters[0]
    table = torch.cat([table, tensors["crit.cluster_weight"]])
    head = torch.log_softmax(h @ outputs @ table.T + torch.cat([bias, tensors["crit.cluster_bias"]]), dim=-1)
    tails = [
        head[..., CUTOFFS[0] + i, None] + torch.log_softmax(h @ outputs @ table.T + bias, dim=-1)
        for i, (_, table, _, outputs, bias) in enumerate(clusters[1:])
    ]
    return torch.cat([head[..., : CUTOFFS[0]], *tails], dim=-1)


def published_norm(own, name, x):
    weight, bias = (own[f"{name}.layer_norm.{part}"] for part in ("weight", "bias"))
    return torch.nn.functional.layer_norm(x, (WIDTH,), weight, bias, 1e-5)


@pytest.mark.thorough
@tiered(("divisor", "same_length"), [(2, True), (1, False)])
def test_checkpoint_matches_the_published_module(divisor, same_length, tmp_path):
    """Check log-probabilities, loss and accuracy on a segment after a random memory, and saving."""
    tensors = checkpoint(divisor, seed=divisor)
    config = {"model_type": "transfo-xl", "architectures": ["TransfoXLLMHeadModel"], "vocab_size": WORDS}
    config |= {"cutoffs": CUTOFFS, "d_model": WIDTH, "d_embed": WIDTH, "n_head": HEADS, "d_head": WIDTH // HEADS}
    config |= {"d_inner": HIDDEN, "div_val": divisor, "n_layer": 2, "mem_len": MEMORY, "clamp_len": CLAMP}
    config |= {"same_length": same_length, "tgt_len": SEGMENT, "tie_projs": [False, True, True, True]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    model, variables = convert.load(tmp_path)

    rng = np.random.default_rng(0)
    tokens, hidden = rng.integers(0, WORDS, (2, SEGMENT + 1)), rng.normal(size=(2, 2, MEMORY, WIDTH)).astype(np.float32)
    state = {"hidden": jnp.asarray(hidden), "count": jnp.full((2,), MEMORY)}
    state = {"memory": {"stack": {"layers": {"attention": state}}}}
    arrays = {name: torch.tensor(array) for name, array in tensors.items()}
    expected = published(arrays, tokens[:, :-1], divisor, same_length, list(torch.tensor(hidden))).numpy()

    words, labels = (jnp.asarray(part, jnp.int32) for part in (tokens[:, :-1], tokens[:, 1:]))
    logits, _ = model.apply(variables | state, words, mutable=["memory"])
    assert_close(logits, expected)
    targets = Targets(labels, jnp.ones(labels.shape))
    actual, _ = model.apply(variables | state, words, targets=targets, mutable=["memory"])
    assert_close(actual.loss, -np.take_along_axis(expected, np.asarray(labels)[..., None], axis=-1)[..., 0])
    np.testing.assert_array_equal(actual.correct, expected.argmax(-1) == labels)

    convert.save(tmp_path / "again", model, variables)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert {"crit.cluster_weight", "transformer.word_emb.emb_layers.0.weight"} <= again.keys()
    for name, array in again.items():
        np.testing.assert_array_equal(array, tensors[name])
    reloaded, restored = convert.load(tmp_path / "again")
    assert reloaded == model
    jax.tree.map(np.testing.assert_array_equal, restored, variables)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_head": 3}, "d_head is 3: it must be 4"),
        ({"d_embed": 6}, "d_embed is 6: it must be 8"),
        ({"tie_projs": [True] * 4}, "tie_projs must be False for the first cluster"),
        ({"untie_r": False}, "untie_r is False: it must be True"),
    ],
)
def test_unsupported_checkpoints_raise(change, message, tmp_path):
    config = {"model_type": "transfo-xl", "d_model": 8, "n_head": 2} | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(checkpoint(2, seed=0), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        convert.load(tmp_path)


@pytest.mark.thorough
def test_model_without_an_adaptive_softmax_cannot_be_saved(tmp_path):
    model = TransformerXL(vocab_size=11, depth=1, width=6, num_heads=2)
    variables = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    with pytest.raises(ValueError, match="Transformer-XL has an adaptive softmax and 'relu'"):
        convert.save(tmp_path, model, {"params": variables["params"]})
