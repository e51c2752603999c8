"""Sections of `benchmarks.accelerator`, in order of importance."""

import ast
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class Section(NamedTuple):
    """Measurements that share one process per side.

    Attributes:
        title: description of the measurement.
        job: function of `benchmarks.device.ours` or `.checks`, and of `.peers`: settings -> {row: function}. Each
            function prepares one row, and returns its facts and a function that runs it `count` times.
        peer: library of the other side; None: no other side.
        settings: argument of the job; "config" names an experiment, and "changes" are its overrides.
        tiny: settings and overrides for a rehearsal on a CPU.
        cpu: settings and overrides for a measurement on a CPU; None: not measured on a CPU.
    """

    title: str
    job: str
    peer: str | None = None
    settings: Mapping[str, Any] = MappingProxyType({})
    tiny: Mapping[str, Any] = MappingProxyType({})
    cpu: Mapping[str, Any] | None = None

    def resolved(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings with changes, given as values or texts; names that are not settings are config keys."""
        settings = {**self.settings, "changes": dict(self.settings.get("changes", {}))}
        for key, value in changes.items():
            if key not in settings:
                settings["changes"][key] = value
            else:
                is_literal = isinstance(value, str) and not isinstance(settings[key], str)
                settings[key] = ast.literal_eval(value) if is_literal else value
        return settings


def training(
    title: str,
    peer: str | None,
    config: str,
    changes: dict[str, Any],
    tiny: dict[str, Any],
    cpu: dict[str, Any] | None = None,
) -> Section:
    """Return a section that times the training step of an experiment."""
    return Section(title, "training", peer, {"config": config, "changes": changes}, tiny, cpu)


def images(size: int) -> dict[str, Any]:
    """Return the overrides for small batches of images with a number of rows of pixels."""
    return {"model.num_classes": 10, "loader.batch_size": 2, "model.image_size": size, "task.image_size": size}


SMALL = {"model.depth": 2, "model.width": 32, "model.num_heads": 4, "loader.batch_size": 2}
TEXT = {**SMALL, "model.vocab_size": 512, "model.max_length": 128, "task.sequence_length": 128}
GPT2, LLAMA = "gpt2_openwebtext", "llama_1b"
# The text of Python's standard library, which every machine has.
LOCAL = {"source": "stdlib", "tokenizer": "bytes", "task.cache_dir": "", "loader.workers": 0, "sampling.num_samples": 0}
ON_CPU = {"precision": "float32", "loader.batch_size": 8}
SHORT = {"model.max_length": 256, "task.sequence_length": 256}
DECODING = {"prompt": 128, "new": 256, "batches": (1, 8, 64)}
TINY_DECODING = {**TEXT, "prompt": 8, "new": 8, "batches": (1, 2)}
TINY_LLAMA = {"model.num_kv_heads": 2, "model.mlp_dim": 64}
MEDIUM_LLAMA = {"model.depth": 8, "model.width": 512, "model.mlp_dim": 1408, "model.remat": None}
CONVOLUTIONS = (  # convolutions of ResNet-50: rows of pixels, input channels, output channels, kernel size, stride
    (224, 3, 64, 7, 2),
    (56, 64, 64, 3, 1),
    (56, 64, 256, 1, 1),
    (56, 256, 512, 1, 2),
    (28, 128, 128, 3, 1),
    (28, 512, 128, 1, 1),
    (14, 256, 256, 3, 1),
    (14, 1024, 256, 1, 1),
    (7, 512, 512, 3, 1),
    (7, 512, 2048, 1, 1),
)
PRODUCTS = (  # linear layers of nanoGPT's recipe for a CPU and of GPT-2: tokens, inputs, features
    (768, 128, 128),
    (768, 128, 512),
    (768, 512, 128),
    (1024, 768, 768),
    (1024, 768, 3072),
    (1024, 3072, 768),
)
SECTIONS = {
    "ceilings": Section(
        "largest matrix product and copy",
        "ceilings",
        "torch",
        {"size": 8192, "bytes": 2**30, "dtype": "bfloat16"},
        {"size": 256, "bytes": 2**20},
        {"size": 2048, "bytes": 2**28, "dtype": "float32"},
    ),
    "kernels": Section(
        "attention kernels against dense attention",
        "kernels",
        settings={"batch": 2, "length": 1024, "heads": 8, "channels": 64},
        tiny={"batch": 2, "length": 128, "heads": 4, "channels": 8},
    ),
    "gpt2": training(
        "GPT-2", "transformers", GPT2, {"loader.batch_size": 32}, TEXT, {**ON_CPU, "loader.batch_size": 4, **SHORT}
    ),
    "gpt2-decoding": Section("GPT-2 124M", "decoding", "transformers", {"config": GPT2, **DECODING}, TINY_DECODING),
    "llama": training(
        "Llama",
        "transformers",
        LLAMA,
        {"loader.batch_size": 8, "grad_accum_steps": 1},
        {**TEXT, **TINY_LLAMA},
        {**ON_CPU, **SHORT, **MEDIUM_LLAMA, "grad_accum_steps": 1},
    ),
    "trace": Section(
        "training loop of GPT-2 124M",
        "trace",
        settings={"config": GPT2, "steps": 20, "changes": {**LOCAL, "loader.batch_size": 32}},
        tiny={**TEXT, "source.max_bytes": 100_000},
    ),
    "vit": training(
        "ViT/16",
        "timm",
        "vit_imagenet21k:B",
        {"loader.batch_size": 128, "model.num_classes": 1000, "model.dropout": 0.0},
        {**SMALL, **images(32), "model.patch_size": 8},
        {**ON_CPU, "model.width": 384, "model.num_heads": 6},
    ),
    "resnet": training(
        "ResNet-50",
        "timm",
        "resnet50_imagenet",
        {"loader.batch_size": 256},
        {**images(32), "model.depths": (1, 1, 1, 1)},
        ON_CPU,
    ),
    "bert": training(
        "BERT base", "transformers", "bert_pretrain:base", {"loader.batch_size": 64}, TEXT, {**ON_CPU, **SHORT}
    ),
    "swin": training(
        "Swin-T",
        "timm",
        "swin_t_imagenet",
        {"loader.batch_size": 128},
        {**images(56), "model.depths": (1, 1), "model.num_heads": (2, 4), "model.width": 16},
        ON_CPU,
    ),
    "t5": training(
        "T5 base",
        None,
        "t5_c4",
        {"loader.batch_size": 32},
        {**SMALL, "model.vocab_size": 512, "task.sequence_length": 128},
    ),
    "bigbird": training("BigBird", None, "bigbird_longdoc", {"loader.batch_size": 8}, TEXT),
    "parity": Section(
        "float32 on the device against `transformers` on the CPU", "parity", None, {"small": False}, {"small": True}
    ),
    "attention": Section(
        "attention alone, forward and backward",
        "attention",
        "torch",
        {"batch": 8, "length": 2048, "heads": 16, "channels": 64},
        {"batch": 1, "length": 128, "heads": 4, "channels": 16},
    ),
    "embeddings": Section(
        "gradient of embeddings",
        "embeddings",
        "torch",
        {"shapes": ((32768, 50304, 768), (32768, 256, 768), (32768, 2, 768))},
        {"shapes": ((256, 64, 16), (256, 2, 16))},
    ),
    "products": Section(
        "matrix product, forward and backward",
        "products",
        "torch",
        {"dtype": "bfloat16", "shapes": PRODUCTS},
        {"shapes": ((8, 4, 4),)},
        {"dtype": "float32"},
    ),
    "convolutions": Section(
        "convolution, forward and backward",
        "convolutions",
        "torch",
        {"batch": 64, "dtype": "bfloat16", "shapes": CONVOLUTIONS},
        {"batch": 1, "shapes": ((8, 4, 4, 3, 1), (8, 4, 8, 1, 2))},
        {"batch": 8, "dtype": "float32"},
    ),
    "processes": Section(
        "data parallelism over processes with one device each",
        "processes",
        None,
        {"config": GPT2, "changes": {**TEXT, "precision": "float32", "loader.batch_size": 16}},
    ),
    "llama-decoding": Section(
        "Llama 1B", "decoding", "transformers", {"config": LLAMA, **DECODING}, {**TINY_DECODING, **TINY_LLAMA}
    ),
    "bert-without-dropout": training(
        "BERT without dropout",
        "transformers",
        "bert_pretrain:base",
        {"loader.batch_size": 64, "model.dropout": 0.0},
        TEXT,
    ),
}
