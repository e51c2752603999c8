"""BigBird matches `transformers` in evaluation for every head."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from lineage import models
from lineage.models import convert
from tests.tiers import tiered

HEADS = {
    "Model": "pooler",
    "ForPreTraining": "pretraining",
    "ForMaskedLM": "masked_lm",
    "ForSequenceClassification": "classification",
    "ForTokenClassification": "token_classification",
    "ForMultipleChoice": "choice",
}
UNPOOLED = ("masked_lm", "classification", "token_classification")  # the reference has an unused pooler here
OUTPUTS = ("last_hidden_state", "pooler_output", "prediction_logits", "seq_relationship_logits", "logits")
# length, block, random blocks: with full and partial last blocks, and a sequence too short for blocks
SIZES = [(37, 4, 1), (40, 4, 2), (29, 3, 2), (26, 2, 3), (31, 4, 1), (28, 4, 1)]
CASES = [pytest.param(task, *size, seed, id=task) for seed, (task, size) in enumerate(zip(HEADS, SIZES))]


@pytest.fixture
def reference_of(randomize):
    def make(task, length, block, others, seed, attention_type="block_sparse"):
        rng = np.random.default_rng(seed)
        heads = int(rng.integers(1, 4))
        config = transformers.BigBirdConfig(
            vocab_size=70, hidden_size=heads * int(rng.choice([3, 8])), num_hidden_layers=int(rng.integers(2, 4)),
            num_attention_heads=heads, intermediate_size=int(rng.integers(5, 40)), max_position_embeddings=length + 3,
            hidden_act=["gelu_new", "relu", "gelu"][seed % 3], layer_norm_eps=float(rng.choice([1e-12, 1e-5, 1e-2])),
            type_vocab_size=3, block_size=block, num_random_blocks=others, hidden_dropout_prob=0.2,
            attention_probs_dropout_prob=0.2, classifier_dropout=0.3, attention_type=attention_type,
            num_labels=3 if task in ("ForSequenceClassification", "ForTokenClassification") else 2,
            attn_implementation="eager",
        )  # fmt: skip
        return randomize(getattr(transformers, f"BigBird{task}")(config), seed)

    return make


def batch_of(task, length, seed):
    """Return sequences without padding, with padding on the right, and with a gap; pairs of them for multiple
    choice.
    """
    rng = np.random.default_rng(seed + 100)
    shape = (3, 2, length) if task == "ForMultipleChoice" else (3, length)
    mask = np.ones(shape, bool)
    mask[1, ..., length - 9 :] = False
    mask[2, ..., 2:7] = False
    tokens = np.where(mask, rng.integers(4, 70, shape), 0)
    return {"tokens": tokens, "segments": rng.integers(0, 3, shape), "mask": mask}


def run(reference, batch):
    """Return the outputs of the reference in our order, and its hidden states."""
    tokens, segments, mask = (torch.tensor(batch[name]).long() for name in ("tokens", "segments", "mask"))
    out = reference(input_ids=tokens, token_type_ids=segments, attention_mask=mask, output_hidden_states=True)
    return [out[key] for key in OUTPUTS if out.get(key) is not None], out.hidden_states


@tiered(("task", "length", "block", "others", "seed"), CASES, first=2)
def test_outputs_hidden_states_and_gradients_match(
    task, length, block, others, seed, reference_of, ours, assert_same_encoder
):
    reference = reference_of(task, length, block, others, seed)
    batch = batch_of(task, length, seed)
    model, variables = ours(reference)
    assert type(model) is models.MODELS["bigbird"]
    assert (model.head, model.block_size, model.num_random_blocks) == (HEADS[task], block, others)
    assert (model.each_layer(length) is None) == (length <= (5 + 2 * others) * block)
    trained = reference if task == "ForPreTraining" else None
    assert_same_encoder(model, variables, batch, *run(reference, batch), trained)


def test_full_attention_matches(reference_of, ours, exported, assert_same_encoder):
    """Check a sequence that is long enough for blocks, and the export of the config."""
    reference = reference_of("ForPreTraining", 40, 4, 2, 3, attention_type="original_full")
    batch = batch_of("ForPreTraining", 40, 3)
    model, variables = ours(reference)
    assert model.attention_type == "original_full"
    actual = assert_same_encoder(model, variables, batch, *run(reference, batch))
    sparse = jax.jit(model.clone(attention_type="block_sparse").apply)(variables, **batch)
    assert np.abs(sparse[0] - actual[0])[batch["mask"]].max() > 1e-3
    again = exported(model, variables, transformers.BigBirdForPreTraining, like=reference)
    assert again.config.attention_type == "original_full"


@tiered(("task", "length", "block", "others", "seed"), CASES)
def test_export_round_trip(task, length, block, others, seed, reference_of, ours, exported):
    reference = reference_of(task, length, block, others, seed)
    model, variables = ours(reference)
    unread = {"bert.pooler.weight", "bert.pooler.bias"} if model.head in UNPOOLED else frozenset()
    again = exported(model, variables, type(reference), like=reference, missing=unread)
    known = {field.name for field in dataclasses.fields(reference.config)} - {"_name_or_path", "dtype"}
    said, meant = ({key: getattr(config, key) for key in known} for config in (again.config, reference.config))
    assert said == meant


@tiered(("variant", "sizes"), [("base", (768, 12, 12)), ("large", (1024, 24, 16))])
def test_parameter_count_matches_the_reference(variant, sizes):
    width, depth, heads = sizes
    config = transformers.BigBirdConfig(
        hidden_size=width, num_hidden_layers=depth, num_attention_heads=heads, intermediate_size=4 * width
    )
    with torch.device("meta"):
        reference = transformers.BigBirdForPreTraining(config)
    model = models.build("bigbird", variant)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    number = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert number == sum(parameter.numel() for parameter in reference.parameters())
    assert number == {"base": 128_112_824, "large": 360_228_024}[variant]


def test_export_without_random_blocks_is_refused(tmp_path):
    """`transformers` cannot apply such a model to texts that are long enough for block-sparse attention."""
    sizes = {"depth": 1, "width": 8, "num_heads": 2, "vocab_size": 9, "max_length": 16, "block_size": 2}
    model = models.build("bigbird", **sizes, random_blocks="first", num_random_blocks=0)
    variables = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 4), np.int32))
    with pytest.raises(ValueError, match="num_random_blocks is 0: `transformers` needs at least 1"):
        convert.save(tmp_path, model, variables)
    convert.save(tmp_path, model.clone(attention_type="original_full"), variables)
