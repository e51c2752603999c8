"""Fine-tuning beside PyTorch: the same losses and gradient norms with the models of `transformers` and AdamW."""

import jax
import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from lineage.configs import cli
from lineage.data import TOKENIZERS
from lineage.models.layers import attend, dropout
from lineage.train import preparation
from lineage.train.checkpoint import Checkpoints
from lineage.train.experiment import Experiment
from tests.parity.conftest import tensor_of
from tests.tiers import tiered

STEPS, RATE, DECAY = 4, 1e-2, 0.1
WORDS, CLASSES, TAGS = [f"word{number}" for number in range(30)], ("a", "b", "c"), ("B-X", "I-X", "O")
# task -> source, class names, and the special tokens of the tokenizer, if any
TASKS = {
    "text_classification": ("csv:labels.csv", CLASSES, ("pad", "cls", "sep", "mask")),
    "token_classification": ("bio:tags.txt", TAGS, ("pad", "cls", "sep", "mask")),
    "causal_lm": ("text:text.txt", (), ("pad", "end_of_text")),
    "sentence_pair_pretraining": ("text:documents", (), ("pad", "cls", "sep", "mask", "end_of_text")),
    "sequence_to_sequence": ("pairs:pairs.tsv", (), ("pad", "end_of_text")),
    "image_classification": ("folder:images", CLASSES, ()),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write data for each task to a folder, and return it."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)

    def text():
        return " ".join(rng.choice(WORDS, rng.integers(2, 8)))

    rows = [f"{text()},{rng.choice(CLASSES)}" for _ in range(48)]
    (folder / "labels.csv").write_text("\n".join(["text,label", *rows, *(f"word0,{name}" for name in CLASSES)]))
    sentences = [[f"{word} {rng.choice(TAGS)}\n" for word in text().split()] for _ in range(48)]
    (folder / "tags.txt").write_text("\n".join("".join(sentence) for sentence in sentences))
    (folder / "text.txt").write_text("\n".join(text() for _ in range(200)))
    (folder / "documents").mkdir()
    for number in range(40):
        (folder / "documents" / f"{number}.txt").write_text("\n".join(text() for _ in range(6)))
    (folder / "pairs.tsv").write_text("\n".join(f"{text()}\t{text()}" for _ in range(48)))
    for name in CLASSES:
        (folder / "images" / "train" / name).mkdir(parents=True)
        for number in range(12):
            pixels = rng.integers(0, 256, (16, 16, 3), np.uint8)
            Image.fromarray(pixels).save(folder / "images" / "train" / name / f"{number}.png")
    return folder


def masked(batch):
    return tensor_of(np.where(batch["mask"], batch["targets"], -100))


def of_text(batch):
    mask, segments = tensor_of(batch["tokens_mask"]), tensor_of(batch["segments"])
    return {"input_ids": tensor_of(batch["tokens"]), "attention_mask": mask, "token_type_ids": segments}


def of_labels(batch):
    return of_text(batch) | {"labels": tensor_of(batch["label"])}


def of_tags(batch):
    return of_text(batch) | {"labels": masked(batch)}


def of_pairs_of_sentences(batch):
    labels = np.full(batch["tokens"].shape, -100)
    rows = np.nonzero(batch["mask"])[0]
    labels[rows, batch["masked_positions"][batch["mask"]]] = batch["targets"][batch["mask"]]
    labels = {"labels": tensor_of(labels), "next_sentence_label": tensor_of(batch["label"])}
    return of_text(batch) | labels


def of_windows(batch):
    return {"input_ids": tensor_of(batch["tokens"]), "labels": masked(batch), "shift_labels": masked(batch)}


def of_pairs(batch):
    inputs = {"input_ids": tensor_of(batch["inputs"]), "attention_mask": tensor_of(batch["inputs_mask"])}
    return inputs | {"decoder_input_ids": tensor_of(batch["tokens"]), "labels": masked(batch)}


def of_images(batch):
    return {"pixel_values": tensor_of(batch["image"].astype(np.float32)), "labels": tensor_of(batch["label"])}


def reference_of(kind, options):
    """Return a model of `transformers` in training mode, with noise added to its parameters."""
    config, generator = kind.config_class(attn_implementation="eager", **options), torch.Generator().manual_seed(0)
    reference = kind(config)
    for parameter in filter(lambda parameter: parameter.requires_grad, reference.parameters()):
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    for module in reference.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # would not train the embedding of padding, which can replace a masked token
    return reference.train()


ENCODER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
ENCODER |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = ENCODER | {"max_position_embeddings": 32, "classifier_dropout": 0.0}
VIT = ENCODER | {"image_size": 16, "patch_size": 4}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "eos_token_id": 1, "bos_token_id": 1}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LLAMA = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"intermediate_size": 32, "max_position_embeddings": 32, "eos_token_id": 1, "bos_token_id": None}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
T5 |= {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
BART = {"d_model": 16, "max_position_embeddings": 32, "dropout": 0.0, "pad_token_id": 0, "eos_token_id": 1}
BART |= {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
BART |= {
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "decoder_start_token_id": 1,
    "bos_token_id": 1,
}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
SWIN |= {"drop_path_rate": 0.0}
# task, class of the reference, its options, and a function from a batch to its arguments
CASES = {
    "bert": ("text_classification", transformers.BertForSequenceClassification, BERT, of_labels),
    "bert pairs": ("sentence_pair_pretraining", transformers.BertForPreTraining, BERT, of_pairs_of_sentences),
    "bert tags": ("token_classification", transformers.BertForTokenClassification, BERT, of_tags),
    "gpt2": ("causal_lm", transformers.GPT2LMHeadModel, GPT2, of_windows),
    "llama": ("causal_lm", transformers.LlamaForCausalLM, LLAMA, of_windows),
    "t5": ("sequence_to_sequence", transformers.T5ForConditionalGeneration, T5, of_pairs),
    "bart": ("sequence_to_sequence", transformers.BartForConditionalGeneration, BART, of_pairs),
    "vit": ("image_classification", transformers.ViTForImageClassification, VIT, of_images),
    "deit": ("image_classification", transformers.DeiTForImageClassification, VIT, of_images),
    "swin": ("image_classification", transformers.SwinForImageClassification, SWIN, of_images),
}


@tiered("name", ["bert", "bart", "deit", *sorted({*CASES} - {"bert", "bart", "deit"})], first=3)
def test_steps_are_those_of_pytorch(name, data, monkeypatch, tmp_path):
    monkeypatch.chdir(data)
    assert_same_steps(name, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["bert", "bert tags", "gpt2", "t5", "bart"])
def test_dropout_is_where_transformers_has_it(name, data, monkeypatch, tmp_path):
    """Replace every dropout by a multiplication by 1 minus its rate, on both sides."""
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, p=0.5, training=True, inplace=False: x * (1 - p))
    monkeypatch.setattr(dropout, "dropped", lambda rate, x, seed: x * (1 - rate))
    monkeypatch.setattr(attend.DropWeights, "__call__", lambda self, weights: weights * (1 - self.rate))
    monkeypatch.chdir(data)
    assert_same_steps(name, tmp_path, rate=0.2)


def assert_same_steps(name, tmp_path, rate=0.0):
    """Compare the first steps of `finetune:TASK` from a folder of `transformers`; `rate` is that of every dropout."""
    task, kind, options, arguments = CASES[name]
    options = options | {key: rate for key in options if "drop" in key}
    (source, names, roles), folder = TASKS[task], tmp_path / "model"
    changes = {"init.path": str(folder), "source": source, "total_steps": STEPS, "loader.batch_size": 8}
    changes |= {"schedule.name": "constant", "schedule.learning_rate": RATE, "optimizer.weight_decay": DECAY}
    if names:
        options = options | {"id2label": dict(enumerate(names))}
    if roles:
        tokenizer = TOKENIZERS["words"]().train(WORDS, roles)
        tokenizer.save(folder)
        options = options | {"vocab_size": tokenizer.vocab_size}
        changes["task.sequence_length"] = 16
    reference = reference_of(kind, options)
    reference.save_pretrained(folder)
    config, _ = cli.load(f"finetune:{task}")
    cli.override(config, changes)
    experiment = Experiment(config, tmp_path / "run", jax.devices()[:1])
    with Checkpoints(tmp_path / "run", experiment.run.checkpoint) as checkpoints:
        state = preparation.initial_state(experiment, checkpoints, lambda message: None)
    step = preparation.jit_step(experiment)

    decayed = [parameter for parameter in reference.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in reference.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    batches = experiment.data.train.iterate(0)
    for _ in range(STEPS):
        batch = next(batches)
        state, metrics = step(state, batch)
        optimizer.zero_grad()
        loss = reference(**arguments(batch)).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        np.testing.assert_allclose(metrics["loss"], loss.item(), rtol=1e-5)
        np.testing.assert_allclose(metrics["gradient_norm"], norm.item(), rtol=1e-4)
    batches.close()
