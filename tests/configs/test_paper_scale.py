"""Configs at paper scale, without their data: there are as many parameters as in the paper's model, and the training
step lowers for a mesh of eight devices, over which its state is spread."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax.traverse_util import flatten_dict

from lineage.configs import cli, schema
from lineage.train.experiment import Experiment
from lineage.train.optimizer import OPTIMIZERS
from lineage.train.preparation import jit_step
from lineage.train.profiling.estimates import experiment_budget
from tests.tiers import tiered

FSDP, MIXED = {"mesh.data": 1, "mesh.fsdp": 8}, {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
# config, number of parameters, pattern of parameters that are not counted, mesh
MODELS = [
    # Encoder and pooler of bert-base-uncased and bert-large-uncased; the paper says 110M and 340M.
    ("bert_pretrain:base", 109_482_240, "masked_lm|classifier", MIXED),
    ("bert_pretrain:large", 335_141_888, "masked_lm|classifier", FSDP),
    # All parameters of the published checkpoints, shared embeddings once; the papers say 220M, 11B, 140M and 400M.
    ("t5_c4:base", 222_903_552, None, MIXED),
    ("t5_c4:11b", 11_307_321_344, None, MIXED),
    ("bart_pretrain:base", 139_420_416, None, MIXED),
    ("bart_pretrain:large", 406_291_456, None, FSDP),
    ("bart_cnn_dailymail", 406_291_456, None, FSDP),
    # BigBirdForMaskedLM of google/bigbird-roberta-base: the 128,112,824 of its pre-training model without the pooler
    # and the classifier of sentence pairs.
    ("bigbird_longdoc", 127_520_694, None, FSDP),
    # BERT base without the head of the task; the model for question answering has no pooler.
    ("bert_glue:mnli", 109_482_240, "classifier", MIXED | {"model.vocab_size": 30_522}),
    ("bert_squad", 108_891_648, "classifier", MIXED | {"model.vocab_size": 30_522}),
    # The paper says 151M. The width (410) and the batch (60) have few divisors: 64 sequences here.
    ("transformer_xl_wikitext103", 151_119_838, None, {"mesh.data": 4, "mesh.fsdp": 2, "loader.batch_size": 64}),
    # Vocabulary of 32,000, word vectors of 620 (divisible by four); the papers give no number.
    ("seq2seq_wmt14:rnnencdec", 71_065_000, None, {"mesh.data": 2, "mesh.fsdp": 4}),
    ("seq2seq_wmt14:rnnsearch", 83_933_000, None, {"mesh.data": 2, "mesh.fsdp": 4}),
    ("seq2seq_wmt14:luong", 166_064_000, None, FSDP),
    # Vocabulary of 37,000, shared embeddings once; the paper says 65M and 213M, of about 37,000.
    ("transformer_wmt14:base", 63_082_496, None, MIXED),
    ("transformer_wmt14:big", 214_245_376, None, FSDP),
    # Published: 1,235,814,400, less (128,256 - 32,000) x 2048 for the smaller vocabulary.
    ("llama_1b", 1_038_682_112, None, MIXED),
    # Published: 124,439,808, plus 47 x 768 for the vocabulary padded to a multiple of 128.
    ("gpt2_openwebtext", 124_475_904, None, MIXED),
    # The paper says 22M: 22,050,664 of ViT-S/16, less 76,032 for the class token and the learned positions, plus
    # 147,840 for the hidden layer of the head.
    ("vit_s16_imagenet", 22_122_472, None, MIXED),
    # The paper says 22M; the distilled model has a second token and head, as published.
    ("deit_s_imagenet", 22_050_664, None, FSDP),
    ("deit_s_imagenet:distilled", 22_436_432, None, FSDP | {"task.name": "image_classification"}),
    # facebook/vit-mae-base has 111,907,840, including 197 x (768 + 512) for position tables; the 86,567,656 of ViT-B
    # include a learned table.
    ("mae_vitb16_imagenet", 111_655_680, None, MIXED),
    ("mae_vitb16_imagenet:finetune", 86_567_656 - 197 * 768, None, MIXED),
    ("mae_vitb16_imagenet:probe", 86_567_656 - 197 * 768, None, FSDP),
    # Published numbers of ViT-B and ViT-L without classifiers; 21,843 classes are not divisible by 8.
    ("vit_imagenet21k:B", 85_798_656, "pre_logits|classifier", FSDP | {"model.num_classes": 21_848}),
    ("vit_imagenet21k:L", 303_301_632, "pre_logits|classifier", FSDP | {"model.num_classes": 21_848}),
    # The paper says 28.3M.
    ("swin_t_imagenet", 28_288_354, None, MIXED),
    # As published.
    ("resnet50_imagenet", 25_557_032, None, FSDP),
    # The paper says 41M: the trained parameters, without the norms and first convolutions of the backbone.
    ("detr_coco", 41_302_368, "backbone.*norm|stem_conv|stages_0", FSDP),
]


def test_paper_configs_are_described_without_data():
    """Check that the data are not read, not even for the length of an epoch, which the schedule needs."""
    config, _ = cli.load("vit_s16_imagenet")
    assert config.total_epochs
    config.model.depth = 2
    assert experiment_budget(Experiment(config)).memory["training"]["optimizer"] > 0


@tiered(
    ("name", "parameters", "uncounted", "mesh"),
    MODELS,
    ids=[row[0] for row in MODELS],
    first=lambda name, *others: name in ("gpt2_openwebtext", "bert_pretrain:base", "vit_s16_imagenet", "llama_1b"),
)
def test_paper_scale(name, parameters, uncounted, mesh):
    config, _ = cli.load(name)
    cli.override(config, mesh)
    if config.total_epochs:
        cli.override(config, {"total_steps": 100_000})  # the length of an epoch is unknown without the data
    experiment = Experiment(config)
    state = experiment.abstract_state
    paths = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)}
    counted = [leaf for path, leaf in paths.items() if not (uncounted and re.search(uncounted, path))]
    assert sum(math.prod(leaf.shape) for leaf in counted) == parameters
    batch = jax.eval_shape(lambda: experiment.zeros(config.loader.batch_size))
    lowered = jit_step(experiment).lower(state, batch)
    after, metrics = lowered.out_info
    assert [leaf.shape for leaf in jax.tree.leaves(after)] == [leaf.shape for leaf in jax.tree.leaves(state)]
    assert metrics["loss"].shape == ()
    leaves = zip(jax.tree.leaves(state), jax.tree.leaves(experiment.state_shardings), strict=True)
    here = sum(math.prod(place.shard_shape(leaf.shape)) for leaf, place in leaves)
    parts = mesh["mesh.fsdp"] * mesh.get("mesh.tensor", 1)
    assert here < 1.5 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state)) / parts


@pytest.mark.parametrize(
    ("name", "exempt"),
    [
        ("deit_s_imagenet", {"class_token", "table/table"}),
        ("deit_s_imagenet:distilled", {"class_token", "distillation_token", "table/table"}),
        ("mae_vitb16_imagenet", set()),
        ("mae_vitb16_imagenet:finetune", {"class_token"}),
        ("vit_imagenet21k", {"class_token", "table/table"}),
    ],
)
def test_weight_decay_of_vision_transformers(name, exempt):
    """Compare with `no_weight_decay` of timm and DeiT, and with the authors' code of MAE and ViT.

    No biases and scales are decayed. The positions of MAE are constants, and its pre-training decays the tokens.
    """
    config, _ = cli.load(name)
    model, decayed = Experiment(config).model, schema.build(OPTIMIZERS, config.optimizer).is_decayed
    inputs = jnp.zeros((1, 224, 224, 3)), *([jnp.arange(196)[None]] if config.model.name == "mae" else [])
    params = jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"]
    flat = flatten_dict(decayed(params), sep="/")
    others = {path for path, decays in flat.items() if not decays and not path.endswith(("bias", "scale"))}
    assert others == exempt
    assert not any(decays for path, decays in flat.items() if path.endswith(("bias", "scale")))
