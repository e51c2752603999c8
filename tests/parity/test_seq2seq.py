"""Seq2Seq matches the equations of the papers, implemented in PyTorch for single pairs without padding."""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from lineage.models.layers.recurrent import CELLS
from lineage.models.seq2seq import Seq2Seq
from tests.tiers import tiered
from tests.tolerance import assert_close

VOCAB, WIDTH, EMBED, WINDOW = 11, 8, 6, 2
LENGTHS = (7, 4)
RNG = np.random.default_rng(0)
INPUTS, TOKENS = RNG.integers(0, VOCAB, (2, 7)), RNG.integers(0, VOCAB, (2, 6))


class Reference(torch.nn.Module):
    def __init__(self, kind, depth, bidirectional, attention, span):
        super().__init__()
        linear, plain = torch.nn.Linear, lambda *sizes: torch.nn.Linear(*sizes, bias=False)
        self.kind, self.bidirectional, self.attention, self.span = kind, bidirectional, attention, span
        self.luong = attention in ("dot", "general", "concat")
        states, parts = WIDTH * (1 + bidirectional), CELLS[kind][2]
        self.sizes = EMBED, WIDTH if self.luong else states
        self.source, self.target = torch.nn.Embedding(VOCAB, EMBED), torch.nn.Embedding(VOCAB, EMBED)
        module = getattr(torch.nn, kind.upper())
        self.encoder = module(EMBED, WIDTH, depth, bidirectional=bidirectional, batch_first=True)
        cell = getattr(torch.nn, f"{kind.upper()}Cell")
        self.cells = torch.nn.ModuleList([cell(sum(self.sizes) if i == 0 else WIDTH, WIDTH) for i in range(depth)])
        self.w_s = torch.nn.ModuleList([linear(WIDTH, WIDTH) for _ in range(depth * parts * bidirectional)])
        self.w_a = plain(states, WIDTH) if attention == "general" else plain(WIDTH + states, WIDTH)
        self.v_a, self.w_p, self.v_p = plain(WIDTH, 1), plain(WIDTH, WIDTH), plain(WIDTH, 1)
        self.w_c, self.readout = plain(states + WIDTH, WIDTH), linear(WIDTH + states + EMBED, WIDTH)
        self.out = linear(WIDTH, VOCAB) if self.luong else linear(WIDTH // 2, VOCAB)

    def context(self, query, states, t):
        if self.attention == "fixed":
            return self.fixed, torch.zeros(len(states))
        if self.attention == "dot":
            scores = states @ query
        elif self.attention == "general":
            scores = self.w_a(states) @ query
        else:
            pairs = torch.cat([query.expand(len(states), -1), states], -1)
            scores = self.v_a(torch.tanh(self.w_a(pairs)))[:, 0]
        places, factor = torch.arange(len(states)), 1.0
        if self.span == "monotonic":
            center = torch.tensor(min(t, len(states) - 1))
        elif self.span == "predictive":
            center = len(states) * torch.sigmoid(self.v_p(torch.tanh(self.w_p(query))))
            factor = torch.exp(-((places - center) ** 2) / (2 * (WINDOW / 2) ** 2))
        if self.span != "global":
            scores = scores.masked_fill((places - center).abs() > WINDOW, -torch.inf)
        weights = torch.softmax(scores, 0) * factor
        return weights @ states, weights

    def forward(self, inputs, tokens):
        states, ends = self.encoder(self.source(inputs)[None])
        states, ends = states[0], [end[:, 0] for end in (ends if self.kind == "lstm" else (ends,))]
        if self.bidirectional:
            layers, starts = range(len(self.cells)), iter(self.w_s)
            state = [[torch.tanh(next(starts)(end[2 * i + 1])) for end in ends] for i in layers]
            self.fixed = torch.cat([ends[0][-2], ends[0][-1]])
        else:
            state = [[end[i] for end in ends] for i in range(len(self.cells))]
            self.fixed = ends[0][-1]
        fed, logits, looks = torch.zeros(WIDTH), [], []
        for t, token in enumerate(tokens):
            vector = self.target(token)
            if not self.luong:
                fed, weights = self.context(state[-1][0], states, t)
            x = torch.cat([vector, fed])
            for i, cell in enumerate(self.cells):
                new = cell(x[None], tuple(p[None] for p in state[i]) if self.kind == "lstm" else state[i][0][None])
                state[i] = [p[0] for p in (new if self.kind == "lstm" else (new,))]
                x = state[i][0]
            if self.luong:
                context, weights = self.context(x, states, t)
                fed = torch.tanh(self.w_c(torch.cat([context, x])))
                logits.append(self.out(fed))
            else:
                deep = self.readout(torch.cat([x, fed, vector])).view(WIDTH // 2, 2)
                logits.append(self.out(deep.max(-1).values))
            looks.append(weights)
        return torch.stack(logits), torch.stack(looks)

    def ours(self, get):
        """Return `get` of each parameter in our layout; None for the gradient of an unused parameter."""

        def cell(module, end, input_size):
            w_x, w_h, b_x, b_h = (get(getattr(module, f"{p}{end}")) for p in WEIGHTS)
            parts = {"input": {"kernel": w_x.T[:input_size], "bias": b_x}, "recurrent": {"kernel": w_h.T}}
            if self.kind == "gru":
                parts["recurrent"]["bias"] = b_h
            else:
                parts["input"]["bias"] = b_x if get is gradient else b_x + b_h
            return parts, w_x.T[input_size:]

        def linear(module, *shape):
            parts = {"kernel": get(module.weight).T}
            parts |= {} if module.bias is None else {"bias": get(module.bias)}
            return {name: x.reshape(-1, *shape) if name == "kernel" else x.reshape(shape) for name, x in parts.items()}

        depth, ways = len(self.cells), {"forward": "", "backward": "_reverse"}
        sides = {"encoder": self.source, "decoder": self.target}
        tree = {f"{side}_embed": {"table": get(module.weight)} for side, module in sides.items()}
        places = [(i, *way) for i in range(depth) for way in list(ways.items())[: 1 + self.bidirectional]]
        tree["encoder"] = {f"{way}_{i}": {"cell": cell(self.encoder, f"_l{i}{end}", None)[0]} for i, way, end in places}
        for i, module in enumerate(self.cells):
            tree[f"cells_{i}"], rest = cell(module, "", EMBED if i == 0 else WIDTH)
            tree |= {"fed": {"kernel": rest}} if i == 0 else {}
        parts = CELLS[self.kind][2]
        tree |= {f"start_{i // parts}_{i % parts}": linear(module, WIDTH) for i, module in enumerate(self.w_s)}
        if self.attention == "general":
            tree["key"] = linear(self.w_a, WIDTH)
        if self.attention in ("additive", "concat"):
            query, key = np.split(get(self.w_a.weight).T, [WIDTH])
            tree |= {"key": {"kernel": key}, "score": {"query": {"kernel": query}, "score": linear(self.v_a, 1)}}
        if self.span == "predictive":
            tree |= {"place_0": linear(self.w_p, WIDTH), "place_1": linear(self.v_p, 1)}
        if self.luong:
            tree["attentional"] = linear(self.w_c, WIDTH)
        else:
            tree["readout"] = linear(self.readout, WIDTH // 2, 2)
        return tree | {"head": linear(self.out, VOCAB)}


WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def value(parameter):
    return parameter.detach().numpy()


def gradient(parameter):
    return parameter.grad.numpy()


@tiered(
    ("kind", "depth", "bidirectional", "attention", "span"),
    [
        ("gru", 1, False, "fixed", "global"),
        ("lstm", 2, True, "fixed", "global"),
        ("gru", 1, True, "additive", "global"),
        ("lstm", 2, False, "additive", "predictive"),
        ("lstm", 2, False, "dot", "global"),
        ("lstm", 2, True, "general", "predictive"),
        ("gru", 1, False, "general", "global"),
        ("rnn", 2, True, "concat", "monotonic"),
    ],
    first=lambda kind, *others: kind == "gru",
)
def test_logits_attention_weights_and_gradients_match(kind, depth, bidirectional, attention, span):
    torch.manual_seed(0)
    reference = Reference(kind, depth, bidirectional, attention, span)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape))
    pairs = [(row[:length], tokens) for row, length, tokens in zip(INPUTS, LENGTHS, TOKENS)]
    rows = [reference(*map(torch.tensor, pair)) for pair in pairs]
    weigh = RNG.standard_normal((2, 6, VOCAB)).astype(np.float32)
    sum((logits * torch.tensor(part)).sum() for (logits, _), part in zip(rows, weigh)).backward()

    sizes = {"vocab_size": VOCAB, "depth": depth, "width": WIDTH, "embed_width": EMBED, "window": WINDOW}
    model = Seq2Seq(cell=kind, bidirectional=bidirectional, attention=attention, span=span, **sizes)
    mask = jnp.arange(7) < jnp.asarray(LENGTHS)[:, None]

    def loss(params):
        logits, sown = model.apply(
            {"params": params}, jnp.asarray(INPUTS), jnp.asarray(TOKENS), inputs_mask=mask, mutable=["intermediates"]
        )
        return (logits * weigh).sum(), (logits, sown["intermediates"])

    ours = reference.ours(value)
    grads, (logits, sown) = jax.jit(jax.grad(loss, has_aux=True))(ours)
    for i, (expected, weights) in enumerate(rows):
        assert_close(logits[i], expected.detach())
        if attention != "fixed":
            found = sown["attention"][0][i, 0]
            assert_close(found[:, : LENGTHS[i]], weights.detach())
            assert not found[:, LENGTHS[i] :].any()
    expected = reference.ours(gradient)
    assert jax.tree.structure(grads) == jax.tree.structure(expected)

    def compare(path, found, expected):
        scale = np.abs(expected).max() + 1e-3
        assert_close(found / scale, expected / scale, err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(compare, grads, expected)
