"""BERT and its variants match `transformers` for every head."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from lineage import models
from lineage.models import convert
from tests.tiers import tiered
from tests.tolerance import assert_close

LENGTH = 9
TASKS = {
    "Model": "pooler",
    "ForPreTraining": "pretraining",
    "ForMaskedLM": "masked_lm",
    "ForNextSentencePrediction": "next_sentence",
    "ForSequenceClassification": "classification",
    "ForTokenClassification": "token_classification",
    "ForQuestionAnswering": "question_answering",
    "ForMultipleChoice": "choice",
}
# family -> prefix of the classes of the reference
FAMILIES = {"bert": "Bert", "roberta": "Roberta", "xlmr": "XLMRoberta"}
FAMILIES |= {"distilbert": "DistilBert", "albert": "Albert", "electra": "Electra"}
HEAD_DROPOUTS = ("classifier_dropout", "classifier_dropout_prob", "seq_classif_dropout", "summary_last_dropout")
# All heads of BERT, and the heads of its variants that differ; all of them are saved and loaded.
COMPUTED = {
    "bert": TASKS.values(),
    "roberta": ("masked_lm", "classification", "choice"),
    "xlmr": ("masked_lm",),
    "distilbert": ("masked_lm", "choice"),
    "albert": ("pretraining", "classification"),
    "electra": ("masked_lm", "replaced", "classification", "choice"),
}
TRAINED = {"bert": "pretraining", "roberta": "classification", "distilbert": "masked_lm"}
TRAINED |= {"albert": "pretraining", "electra": "replaced"}
# families whose heads have other names here
OTHER = {"electra": {"Model": "none", "ForPreTraining": "replaced"}, "distilbert": {"Model": "none"}}
CASES = [
    pytest.param(family, prefix + task, head, seed, id=prefix + task)
    for family, prefix in FAMILIES.items()
    for seed, (task, head) in enumerate((TASKS | OTHER.get(family, {})).items())
    if hasattr(transformers, prefix + task)
]


def config_of(family, head, seed):
    rng = np.random.default_rng(seed)
    heads = int(rng.integers(1, 5))
    width, hidden, depth = heads * int(rng.choice([3, 8])), int(rng.integers(5, 40)), int(rng.integers(2, 4))
    activation = ["gelu", "relu", "gelu_new", "silu"][seed % 4]
    settings = {
        "vocab_size": int(rng.integers(20, 40)),
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "intermediate_size": hidden,
        "hidden_act": activation,
        "layer_norm_eps": float(rng.choice([1e-12, 1e-5, 1e-2])),
        "max_position_embeddings": LENGTH + 4,
        "type_vocab_size": 3,
        "num_labels": 3 if head in ("classification", "token_classification") else 2,
        "hidden_dropout_prob": 0.2,
        "attention_probs_dropout_prob": 0.2,
        **dict.fromkeys(HEAD_DROPOUTS, 0.3 + 0.1 * (seed % 2)),
    }
    if family == "distilbert":
        names = {
            "n_layers": "num_hidden_layers",
            "n_heads": "num_attention_heads",
            "dim": "hidden_size",
            "hidden_dim": "intermediate_size",
            "activation": "hidden_act",
            "dropout": "hidden_dropout_prob",
            "attention_dropout": "attention_probs_dropout_prob",
        }
        settings |= {theirs: settings.pop(name) for theirs, name in names.items()}
    if family == "roberta":
        settings["pad_token_id"] = seed % 4
    if family in ("albert", "electra"):
        settings["embedding_size"] = width if seed % 3 == 2 else 6
    cls = getattr(transformers, f"{FAMILIES[family]}Config")
    return cls(**settings, attn_implementation="eager")


def reference_of(family, name, seed, randomize):
    head = TASKS[name.removeprefix(FAMILIES[family])]
    return randomize(getattr(transformers, name)(config_of(family, head, seed)), seed)


def batch_of(config, head, seed):
    """Return sequences without padding, with padding on the right, and with a gap; pairs of them for multiple
    choice.
    """
    rng = np.random.default_rng(seed + 100)
    shape = (3, 2, LENGTH) if head == "choice" else (3, LENGTH)
    tokens = rng.integers(4, config.vocab_size, shape)
    mask = np.ones(shape, bool)
    mask[1, ..., LENGTH - 3 :] = False
    mask[2, ..., 2:4] = False
    tokens = np.where(mask, tokens, config.pad_token_id)
    batch = {"tokens": tokens, "mask": mask}
    if getattr(config, "type_vocab_size", 0):
        batch["segments"] = rng.integers(0, config.type_vocab_size, shape)
    return {name: jnp.asarray(value, bool if name == "mask" else jnp.int32) for name, value in batch.items()}


def run(reference, batch):
    """Return the outputs of the reference in our order, and its hidden states."""
    names = {"tokens": "input_ids", "mask": "attention_mask", "segments": "token_type_ids"}
    inputs = {names[name]: torch.tensor(np.array(value), dtype=torch.long) for name, value in batch.items()}
    out = reference(**inputs, output_hidden_states=True)
    if "start_logits" in out:
        outputs = [torch.stack([out.start_logits, out.end_logits], -1)]
    else:
        keys = ("last_hidden_state", "pooler_output", "prediction_logits", "seq_relationship_logits", "sop_logits")
        outputs = [out[key] for key in (*keys, "logits") if out.get(key) is not None]
    return outputs, out.hidden_states


@tiered(
    ("family", "name", "head", "seed"),
    [case for case in CASES if case.values[2] in COMPUTED[case.values[0]]],
    first=lambda family, name, head, seed: seed == 0 or family == "bert",
)
def test_outputs_hidden_states_and_gradients_match(family, name, head, seed, randomize, ours, assert_same_encoder):
    reference = reference_of(family, name, seed, randomize)
    batch = batch_of(reference.config, head, seed)
    model, variables = ours(reference)
    assert type(model) is models.MODELS[family]
    assert (model.head, model.depth) == (head, reference.config.num_hidden_layers)
    trained = reference if TRAINED.get(family) == head else None
    assert_same_encoder(model, variables, batch, *run(reference, batch), trained)


@pytest.mark.thorough
def test_albert_with_several_groups_of_layers(randomize, ours, assert_same_encoder, exported):
    config = config_of("albert", "masked_lm", 2)
    config.num_hidden_layers, config.num_hidden_groups = 5, 2
    reference = randomize(transformers.AlbertForMaskedLM(config), 2)
    batch = batch_of(config, "masked_lm", 2)
    model, variables = ours(reference)
    assert (model.depth, model.num_groups) == (5, 2)
    again = exported(model, variables, transformers.AlbertForMaskedLM, like=reference)
    assert (again.config.num_hidden_groups, again.config.num_hidden_layers) == (2, 5)
    assert_same_encoder(model, variables, batch, *run(reference, batch), reference)


def test_albert_with_more_groups_than_layers_raises():
    model = models.build("albert", "base", num_groups=13)
    with pytest.raises(ValueError, match="num_groups is 13: it must be at least 1 and at most depth, 12"):
        jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))


@tiered("family", ["bert", "roberta"])
def test_plain_tokens(family, randomize, ours):
    reference = reference_of(family, FAMILIES[family] + "ForTokenClassification", 1, randomize)
    tokens = batch_of(reference.config, "token_classification", 1)["tokens"][:1]
    model, variables = ours(reference)
    expected = run(reference, {"tokens": tokens})[0][0].detach().numpy()
    assert_close(jax.jit(model.apply)(variables, tokens), expected)


@pytest.mark.thorough
@tiered(("family", "name", "head", "seed"), CASES, first=lambda family, name, head, seed: seed == 0)
def test_export_round_trip(family, name, head, seed, randomize, ours, exported):
    reference = reference_of(family, name, seed, randomize)
    model, variables = ours(reference)
    again = exported(model, variables, getattr(transformers, name), like=reference)
    # Fields that are not converted, and dropout rates of classifiers that the model does not have.
    unsaid = {"_name_or_path", "dtype"} | (set() if head == "classification" else set(HEAD_DROPOUTS))
    known = {field.name for field in dataclasses.fields(reference.config)} - unsaid
    said, meant = ({key: getattr(config, key) for key in known} for config in (again.config, reference.config))
    assert said == meant
    batch = batch_of(reference.config, head, seed)
    for actual, expected in zip(run(again, batch)[0], run(reference, batch)[0], strict=True):
        assert_close(actual.detach().numpy(), expected.detach().numpy())


@tiered(("family", "name", "head", "seed"), CASES, first=lambda family, name, head, seed: seed == 0)
def test_encoder_is_loaded_from_a_file_with_a_head(family, name, head, seed, randomize, ours):
    reference = reference_of(family, name, seed, randomize)
    whole = ours(reference)[1]["params"]
    model, variables = ours(reference, head="none")
    assert model.head == "none"
    heads = {"pooler", "masked_lm", "classifier", "detector"}
    assert variables["params"].keys() == whole.keys() - heads
    for part in variables["params"]:
        jax.tree.map(np.testing.assert_array_equal, variables["params"][part], whole[part])


def test_old_file_formats(randomize, ours, tmp_path):
    """Check old files, which contain the pre-training heads, and call the parameters of LayerNorm gamma and beta."""
    model, variables = ours(reference_of("bert", "BertForPreTraining", 0, randomize))
    folder = tmp_path / "reference"
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in load_file(folder / "model.safetensors").items()
    }
    tensors["bert.embeddings.position_ids"] = np.arange(LENGTH + 4)[None]
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    again, restored = convert.load(folder)
    assert again == model
    jax.tree.map(np.testing.assert_array_equal, restored, variables)


@pytest.mark.thorough
@pytest.mark.parametrize(("family", "sizes"), [("bert", {}), ("roberta", {}), ("albert", {"embed_width": 6})])
def test_models_without_segments_are_exported(family, sizes, tmp_path):
    """Check that the reference computes the same, and that the model is read again with segments of zeros."""
    sizes |= {"vocab_size": 17, "max_length": 10, "depth": 2, "width": 16, "num_heads": 2, "mlp_dim": 24}
    model = models.MODELS[family](**sizes, head="token_classification", num_classes=3, num_segments=0)
    tokens = np.random.default_rng(0).integers(3, 17, (2, 8)).astype(np.int32)
    random, shapes = np.random.default_rng(1), jax.eval_shape(model.init, jax.random.key(0), tokens)
    variables = jax.tree.map(lambda x: random.normal(0, 0.2, x.shape).astype(np.float32), shapes)
    convert.save(tmp_path, model, variables)
    reference, info = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert reference.config.type_vocab_size == 2
    expected = reference.eval()(torch.tensor(tokens, dtype=torch.long)).logits.detach().numpy()
    assert_close(jax.jit(model.apply)(variables, tokens), expected)
    again, restored = convert.load(tmp_path)
    assert again.num_segments == 2
    assert_close(jax.jit(again.apply)(restored, tokens), expected)


@pytest.mark.parametrize(
    ("family", "head", "taken"),
    [("bert", "classification", True), ("roberta", "choice", True), ("roberta", "classification", False)],
)
def test_pooler_is_taken_from_a_file_whose_class_ignores_it(family, head, taken, randomize, tmp_path):
    """Check old files of masked language models, from which `transformers` initializes the pooler of a classifier."""
    prefix = FAMILIES[family]
    config = config_of(family, "masked_lm", 0)
    kernel = np.random.default_rng(0).normal(size=(config.hidden_size, config.hidden_size)).astype(np.float32)
    getattr(transformers, f"{prefix}ForMaskedLM")(config).save_pretrained(tmp_path)
    tensors = load_file(file := tmp_path / "model.safetensors")
    pooler = {f"{family}.pooler.dense.weight": kernel, f"{family}.pooler.dense.bias": kernel[0]}
    save_file(tensors | pooler, file, metadata={"format": "pt"})
    task = {"classification": "ForSequenceClassification", "choice": "ForMultipleChoice"}[head]
    reference = getattr(transformers, prefix + task).from_pretrained(tmp_path).state_dict()
    assert any("pooler" in name for name in reference) == taken
    model, variables = convert.load(tmp_path, target=models.build(family, "base", head=head))
    assert (model.head, "pooler" in variables["params"]) == (("pooler", True) if taken else ("masked_lm", False))
    if taken:
        np.testing.assert_array_equal(reference[f"{family}.pooler.dense.weight"], kernel)
        np.testing.assert_array_equal(variables["params"]["pooler"]["kernel"], kernel.T)
    assert convert.load(tmp_path)[0].head == "masked_lm"
