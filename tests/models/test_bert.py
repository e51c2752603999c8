import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from lineage import models
from lineage.models import convert
from lineage.models.albert import ALBERT
from lineage.models.bert import BERT
from lineage.models.distilbert import DistilBERT
from lineage.models.electra import ELECTRA
from lineage.models.roberta import RoBERTa
from tests.tolerance import assert_close

SIZES = {"vocab_size": 17, "max_length": 10, "depth": 2, "width": 16, "num_heads": 2}
TINY = BERT(**SIZES, head="token_classification", num_classes=5)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(3, 17, (2, 8)), jnp.int32)


def count(model):
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def test_electra_generator_has_the_embedding_size_of_its_discriminator():
    for size, share in (("small", 4), ("base", 3), ("large", 4)):
        discriminator, generator = (models.build("electra", size + kind) for kind in ("", "_generator"))
        assert generator.width * share == discriminator.width
        assert generator.width == 64 * generator.num_heads
        assert generator.embed_width == (discriminator.embed_width or discriminator.width)


@pytest.mark.parametrize(
    ("head", "shape"),
    [
        ("none", (2, 8, 16)),
        ("pooler", ((2, 8, 16), (2, 16))),
        ("masked_lm", (2, 8, 17)),
        ("pretraining", ((2, 8, 17), (2, 2))),
        ("next_sentence", (2, 2)),
        ("classification", (2, 5)),
        ("token_classification", (2, 8, 5)),
        ("question_answering", (2, 8, 2)),
    ],
)
def test_output_shapes_of_heads(head, shape):
    model = TINY.clone(head=head)
    out, _ = jax.eval_shape(model.init_with_output, jax.random.key(0), TOKENS)
    assert jax.tree.map(lambda leaf: leaf.shape, out) == shape


def test_choice_head_scores_texts_independently(variables):
    model = TINY.clone(head="choice")
    texts = TOKENS.reshape(1, 2, 8)
    segments = (texts > 9).astype(jnp.int32)
    params = variables(model, texts)
    apply = jax.jit(model.apply)
    scores = apply(params, texts, segments=segments)
    assert scores.shape == (1, 2)
    alone = [apply(params, texts[:, n : n + 1], segments=segments[:, n : n + 1])[:, 0] for n in range(2)]
    assert_close(scores, jnp.stack(alone, axis=1))


def test_predictions_at_given_positions_match_all_predictions(variables):
    model = TINY.clone(head="pretraining")
    params, places = variables(model, TOKENS), jnp.array([[1, 6, 2], [0, 7, 7]])
    words, following = jax.jit(model.apply)(params, TOKENS)
    chosen, again = jax.jit(model.apply)(params, TOKENS, masked_positions=places)
    assert_close(chosen, words[jnp.arange(2)[:, None], places])
    assert_close(again, following)


def test_gradients_reach_all_tokens(variables):
    params = variables(TINY, TOKENS)["params"]

    def logits(table):
        return TINY.apply({"params": params | {"position": {"table": table}}}, TOKENS[:1])[0].sum(-1)

    reached = np.abs(jax.jit(jax.jacobian(logits))(params["position"]["table"])).max(-1) > 0
    np.testing.assert_array_equal(reached, np.broadcast_to(np.arange(10) < 8, (8, 10)))


def test_padded_equals_unpadded(variables):
    params, apply = variables(TINY, TOKENS), jax.jit(TINY.apply)
    expected = apply(params, TOKENS[:, :5])
    for padding in ((3, 0), (0, 3)):
        mask = jnp.pad(jnp.ones((2, 5), bool), [(0, 0), padding])
        padded = jnp.pad(TOKENS[:, :5], [(0, 0), padding], constant_values=9)
        positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
        logits = apply(params, padded, mask=mask, positions=positions)
        assert_close(logits[mask].reshape(expected.shape), expected)


def test_masked_lm_head_is_tied_to_the_embedding():
    shapes = jax.eval_shape(TINY.clone(head="masked_lm").init, jax.random.key(0), TOKENS)["params"]
    wide = [path for path, leaf in flatten_dict(shapes, sep="/").items() if 17 in leaf.shape]
    assert sorted(wide) == ["embed/table", "masked_lm/bias"]


def test_roberta_positions_count_real_tokens():
    model = RoBERTa(**SIZES, pad_id=1, head="none")
    tokens = jnp.array([[5, 6, 1, 7, 1], [1, 1, 5, 1, 6]])
    rows = model.positions(tokens) + model.first_position
    np.testing.assert_array_equal(rows, [[2, 3, 1, 4, 1], [1, 1, 2, 1, 3]])
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    assert shapes["position"]["table"].shape == (12, 16)


def test_albert_shares_layers():
    shallow, deep = (ALBERT(**SIZES | {"depth": depth}, embed_width=4) for depth in (1, 9))
    assert count(shallow) == count(deep)


def test_electra_scores_each_token():
    model = ELECTRA(**SIZES, embed_width=4)
    out, _ = jax.eval_shape(model.init_with_output, jax.random.key(0), TOKENS)
    assert out.shape == (2, 8)


@pytest.mark.parametrize("rates", [{"dropout": 0.3, "head_dropout": 0.0}, {"dropout": 0.0, "head_dropout": 0.3}])
def test_dropout_only_with_its_rng(rates, variables):
    model = TINY.clone(head="classification", depth=1, **rates)
    params = variables(model, TOKENS)
    plain = jax.jit(TINY.clone(head="classification", depth=1).apply)(params, TOKENS)
    np.testing.assert_array_equal(jax.jit(model.apply)(params, TOKENS), plain)
    dropped = jax.jit(lambda key: model.apply(params, TOKENS, rngs={"dropout": key}))(jax.random.key(0))
    assert (dropped != plain).any()


def test_bfloat16_parameters_give_bfloat16_logits(variables):
    model = TINY.clone(head="masked_lm")
    params = variables(model, TOKENS, std=0.1)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    logits = jax.jit(model.apply)(half, TOKENS)
    assert logits.dtype == jnp.bfloat16
    np.testing.assert_allclose(logits.astype(jnp.float32), jax.jit(model.apply)(params, TOKENS), atol=0.05)


def test_invalid_settings_raise():
    with pytest.raises(ValueError, match="a sequence of 11 tokens is longer than the model's 10"):
        jax.eval_shape(partial(TINY.init, jax.random.key(0)), jnp.zeros((1, 11), jnp.int32))
    with pytest.raises(ValueError, match=r"model.head is 'masked_llm'\. Did you mean 'masked_lm'"):
        models.build("bert", "base", head="masked_llm")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (DistilBERT(**SIZES, epsilon=1e-5), "num_segments is 0 and epsilon 1e-05: .* DistilBERT only with 0 and 1e-12"),
        (ELECTRA(**SIZES, embed_width=16), "width and embed_width are 16: they must differ"),
    ],
)
def test_unsupported_models_raise(model, message, variables, tmp_path):
    with pytest.raises(ValueError, match=message):
        convert.save(tmp_path, model, variables(model, TOKENS))


@pytest.mark.parametrize("settings", [{"pad_token_id": None}, {"pad_token_id": 511}, {"max_position_embeddings": "m"}])
def test_invalid_roberta_positions_raise(settings, variables, tmp_path):
    model = RoBERTa(**SIZES)
    convert.save(tmp_path, model, variables(model, TOKENS))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["intermediate_size"] == 4 * config["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config | settings))
    with pytest.raises(ValueError, match=r"pad_token_id is .* and max_position_embeddings .*: they must be integers"):
        convert.load(tmp_path)


@pytest.mark.parametrize("name", ["roberta", "xlmr"])
def test_second_texts_have_the_only_segment(name):
    model = models.build(name, depth=1, width=16, num_heads=2, vocab_size=8, max_length=8, head="none")
    tokens = jnp.array([[2, 3, 4, 5]])
    variables = model.init(jax.random.key(0), tokens)
    both = (model.apply(variables, tokens, segments=segments) for segments in (None, jnp.array([[0, 0, 1, 1]])))
    np.testing.assert_array_equal(*both)
