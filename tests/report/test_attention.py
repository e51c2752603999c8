"""Attention explorer: the weights shown in a browser equal those recorded by the model."""

import csv
import io
import re
from html import unescape
from types import SimpleNamespace
from urllib.parse import unquote

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.image import imsave

from lineage import models
from lineage.data import Facts
from lineage.data.tokenizers import Tokenizer
from lineage.report import artifacts, html
from lineage.tasks import attention, image_classification, masked_autoencoding, object_detection
from lineage.tasks.attention import attention_of_texts, attention_weights
from lineage.tasks.image_classification import ImageClassification
from lineage.tasks.masked_autoencoding import MaskedAutoencoding
from lineage.tasks.object_detection import ObjectDetection

SIZES = {"vocab_size": 11, "depth": 2, "width": 16, "num_heads": 2, "max_length": 16}


class Letters(Tokenizer):
    """Tokenizer whose tokens are letters."""

    def __init__(self):
        """Skip the backend of the base class."""

    def decode(self, tokens):
        return "".join(chr(ord("a") + int(token)) for token in tokens)


def weights_of(*shape):
    weights = np.random.default_rng(0).random(shape) ** 4
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


@pytest.mark.thorough
def test_encoder_decoder_records_three_kinds_of_attention():
    model, rng = models.build("transformer", **SIZES), np.random.default_rng(0)
    batch = {"inputs": rng.integers(0, 11, (2, 9)), "tokens": rng.integers(0, 11, (2, 7))}
    masks = {"inputs_mask": np.arange(9) < np.array([[6], [9]]), "mask": np.arange(7) < np.array([[5], [7]])}
    inputs, tokens = batch["inputs"][:1, :6], batch["tokens"][:1, :5]
    variables = model.init(jax.random.key(0), *map(jnp.asarray, (inputs, tokens)))
    actual = attention_of_texts(model, variables, batch | masks, Letters())["attention_text"]
    assert "".join(actual["inputs"]) == Letters().decode(inputs[0])
    assert "".join(actual["tokens"]) == Letters().decode(tokens[0])
    shapes = {"encoder": (2, 2, 6, 6), "decoder": (2, 2, 5, 5), "cross": (2, 2, 5, 6)}
    assert {name: actual[name].shape for name in shapes} == shapes
    for name in shapes:
        np.testing.assert_allclose(actual[name].sum(-1), 1, rtol=1e-5)
    assert (actual["decoder"][..., ~np.tri(5, dtype=bool)] == 0).all()
    # The second input token changes the keys of the first layer at its position only.
    changed = inputs.copy()
    changed[0, 3] = (changed[0, 3] + 1) % 11
    changed = {"inputs": np.pad(changed, ((0, 1), (0, 3)))}
    other = attention_of_texts(model, variables, batch | masks | changed, Letters())["attention_text"]
    ratio = (other["encoder"] / actual["encoder"])[0, :, 0]  # of the first query, whose input is unchanged
    rest = np.delete(ratio, 3, axis=1)
    np.testing.assert_allclose(rest, rest[:, :1].repeat(5, 1), rtol=1e-4)
    assert (abs(ratio[:, 3] / rest[:, 0] - 1) > 1e-3).all()


def test_attention_of_a_decoder_covers_the_input_of_a_continuation():
    model, tokens = models.build("gpt", **SIZES | {"max_length": 48}), np.arange(40)[None] % 11
    variables = model.init(jax.random.key(0), jnp.asarray(tokens))
    batch = {"tokens": tokens, "mask": np.arange(40)[None] >= 35}  # the targets
    actual = attention_of_texts(model, variables, batch, Letters())["attention_text"]
    assert "".join(actual["tokens"]) == Letters().decode(tokens[0, : attention.TOKENS])
    assert actual["attention"].shape == (2, 2, attention.TOKENS, attention.TOKENS)


def test_attention_of_several_texts_covers_the_first_one():
    model = models.build("bert", head="choice", **SIZES)
    tokens = np.arange(2 * 3 * 8).reshape(2, 3, 8) % 11
    variables = model.init(jax.random.key(0), jnp.asarray(tokens))
    batch = {"tokens": tokens, "tokens_mask": np.tile(np.arange(8) < 6, (2, 3, 1)), "mask": np.ones(2, bool)}
    actual = attention_of_texts(model, variables, batch, Letters())["attention_text"]
    assert "".join(actual["tokens"]) == Letters().decode(tokens[0, 0, :6])
    expected = attention_weights(model, variables, tokens[0, :1, :6])["attention"]
    np.testing.assert_array_equal(actual["attention"], expected[:, 0])


@pytest.mark.thorough
def test_attention_of_recurrent_model_is_one_layer():
    model = models.build("seq2seq", vocab_size=11, width=16, depth=1)
    inputs, tokens = np.zeros((1, 4), int), np.zeros((1, 3), int)
    variables = model.init(jax.random.key(0), *map(jnp.asarray, (inputs, tokens)))
    actual = attention_weights(model, variables, inputs, tokens)
    assert {name: weights.shape for name, weights in actual.items()} == {"cross": (1, 1, 1, 3, 4)}
    diverged = jax.tree.map(lambda value: value * np.nan, variables)
    assert attention_weights(model, diverged, inputs, tokens) == {}


def test_large_attention_is_reduced_to_some_layers_and_heads(monkeypatch):
    monkeypatch.setattr(artifacts, "MAX_WEIGHTS", 12 * 25)
    view = artifacts.view("x", weights_of(6, 4, 5, 5), "abcde")
    assert view["layers"] == [1, 3, 5]
    assert view["heads"] == [1, 2, 3, 4]


def shown(page):
    """Return the displayed weights in order."""
    return [float(value) for value in re.findall(r'data-weight="([0-9.]+)"', page)]


@pytest.fixture
def explore(browse, tmp_path):
    """Return `explore(views, script)`, which returns the DOM of a page with an explorer after running the script."""
    return lambda views, script="": browse(
        html.write(tmp_path / "report.html", "", [artifacts.explorer(views)]).read_text(), script
    )


@pytest.mark.thorough
def test_browser_shows_attention_of_a_token(explore):
    tokens, read = ["the", "<cat>", "</script>"], ["die", "Katze", "&", "."]
    self_attention, cross_attention = weights_of(3, 2, 4, 4), weights_of(2, 4, 3, 4)
    views = [artifacts.view("encoder", self_attention, read), artifacts.view("cross", cross_attention, tokens, read)]
    page = explore(views)  # at first the mean of all for the last token
    np.testing.assert_allclose(shown(page), self_attention.mean((0, 1))[3], atol=6e-5)
    pick = (
        "const set = (name, value) => { const s = document.querySelector('.' + name); s.value = value; s.onchange(); };"
    )
    point = "document.querySelectorAll('.attend p span')[1].onpointerenter();"
    page = explore(views, f"{pick} set('view', 1); set('layer', 2); set('head', 3); {point}")
    np.testing.assert_allclose(shown(page), cross_attention[1, 2, 1], atol=6e-5)
    assert re.search(r'class="picked"[^>]*>&lt;cat&gt;<', page)
    assert f'title="Katze {100 * cross_attention[1, 2, 1, 1]:.1f}%"' in page
    page = explore(views, f"{pick} set('layer', 3); {point}")
    np.testing.assert_allclose(shown(page), self_attention[2, :, 1].mean(0), atol=6e-5)


def test_browser_makes_a_file_of_the_shown_weights(explore):
    tokens, weights = ["=a", '"b",;@c', "c\n", "\uff1da"], weights_of(2, 2, 4, 4)
    views = [artifacts.view("x", weights, tokens)]
    choose = "const s = document.querySelector('.layer'); s.value = 2; s.onchange();"
    page = explore(views, f"{choose} document.querySelector('.attend a').onclick();")
    text = unquote(unescape(re.search('href="data:text/csv;charset=utf-8,([^"]*)"', page)[1]))
    head, *rows = csv.reader(io.StringIO(text))
    assert head == ["query", "'=a", '"b",;\'@c', "c\n", "'\uff1da"]
    assert [row[0] for row in rows] == head[1:]
    np.testing.assert_allclose(np.array([row[1:] for row in rows], float), weights[1].mean(0), atol=6e-5)


def test_weights_fit_into_a_report(monkeypatch):
    weights = np.zeros((2, 6, 3, 5, 5), np.float32)
    monkeypatch.setattr(attention, "attention_weights", lambda *_: {"attention": weights})
    model = models.build("vit", "Ti", image_size=4, patch_size=2, num_classes=2)
    for fitting, limit in {6: weights.nbytes, 2: weights.nbytes // 2 - 1, 0: weights.nbytes // 6 - 1}.items():
        monkeypatch.setattr(attention, "MAX_BYTES", limit)
        actual = attention.attention_of_images(model, {}, np.zeros((6, 4, 4, 1)), Facts(mean=(0.5,), std=(0.5,)))
        shapes = {name: len(actual["attention_image"][name]) for name in ("image", "weights")} if actual else {}
        assert shapes == ({"image": fitting, "weights": 2} if fitting else {})
        assert not actual or actual["attention_image"]["weights"].shape[1] == fitting


def test_padding_of_a_small_split_is_not_shown(monkeypatch):
    batch = {"image": np.ones((4, 2, 2, 1)), "label": np.zeros(4, int), "noise": np.zeros((4, 1), int)}
    batch |= {"boxes": np.zeros((4, 1, 4)), "classes": np.zeros((4, 1), int), "extent": np.ones((4, 2))}
    batch |= dict.fromkeys(("boxes_mask", "crowd"), np.zeros((4, 1), bool)) | {"mask": np.arange(4) < 2}
    facts = Facts(mean=(0.5,), std=(0.5,), class_names=("a",), num_classes=1)
    split, context = SimpleNamespace(batches=[batch], facts=facts, name="test"), SimpleNamespace(model=None)
    monkeypatch.setattr(masked_autoencoding, "_reconstructed", lambda model, variables, image, noise: (image, image))
    monkeypatch.setattr(object_detection.nn, "apply", lambda *_: lambda variables, batch: (batch["boxes"][None],) * 2)
    shown = MaskedAutoencoding().snapshot(context, {}, split) | ObjectDetection().pictures(context, {}, split)
    assert [len(arrays["image"]) for arrays in shown.values()] == [2, 2]
    monkeypatch.setattr(image_classification, "attention_of_images", lambda *found: {"attention": found[2]})
    context.model = SimpleNamespace(apply=lambda variables, image: jnp.ones((len(image), 1)))
    assert len(ImageClassification().pictures(context, {}, split)["attention"]) == 2


def test_browser_shows_attention_of_a_patch(explore):
    picture = io.BytesIO()
    imsave(picture, np.zeros((4, 6, 3)), format="png")
    weights = weights_of(1, 1, 7, 7)
    views = [artifacts.view("a", weights, ["class"], image=picture.getvalue(), grid=(2, 3))]
    np.testing.assert_allclose(shown(explore(views)), weights[0, 0, 0], atol=6e-5)  # of the class token
    page = explore(views, "document.querySelectorAll('.patches span')[4].onclick();")
    np.testing.assert_allclose(shown(page), weights[0, 0, 5], atol=6e-5)
    assert re.search(
        r'title="row 2, column 2 [0-9.]+%"[^>]*class="picked"|class="picked"[^>]*title="row 2, column 2 ', page
    )
