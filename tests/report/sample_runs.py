"""Folders of finished runs with made-up numbers, for tests of reports."""

import json
import math

import numpy as np
from sklearn.datasets import load_digits


def attention_weights(rng, *shape, causal=False):
    """Return sparse row-stochastic attention weights [..., T, T]."""
    logits = rng.normal(size=shape) * 2
    if causal:
        logits = np.where(np.tri(shape[-1], dtype=bool), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


def write_run(workdir, config, lines, run, cost, samples=(), **arrays):
    (workdir / "artifacts").mkdir(parents=True, exist_ok=True)
    (workdir / "config.json").write_text(json.dumps(config))
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (workdir / "artifacts/run.json").write_text(json.dumps(run))
    (workdir / "artifacts/cost.json").write_text(json.dumps(cost))
    if samples:
        (workdir / "artifacts/samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    for name, data in arrays.items():
        np.savez(workdir / f"artifacts/{name}.npz", **data)
    return workdir


def train_lines(rng, steps, interval, start, end, speed, accuracy=True):
    for step in range(interval, steps + 1, interval):
        loss = (end + (start - end) * math.exp(-6 * step / steps)) * rng.lognormal(0, 0.15)
        line = {
            "step": step,
            "train/loss": loss,
            "train/learning_rate": 1e-3 * min(step / 100, 0.5 + 0.5 * math.cos(math.pi * step / steps)),
        }
        line |= {"train/accuracy": min(1.0, math.exp(-loss / 2))} if accuracy else {}
        line["train/gradient_norm"] = 0.6 * rng.lognormal(0, 0.3) * (1 + 3 * math.exp(-step / 80))
        line |= {"time/examples_per_second": speed * rng.normal(1, 0.03), "time/mfu": 0.31 * rng.normal(1, 0.03)}
        yield line | {"time/waiting": 0.05 * rng.lognormal(0, 0.2), "system/memory_gib": 1.5}


def vision_run(workdir, classes=10):
    """Create the folder of a ViT run on the digits."""
    rng = np.random.default_rng(0)
    digits = load_digits()
    images, labels = (digits.images[:27, :, :, None] / 16).astype(np.float32), digits.target[:27]
    lines = []
    for line in train_lines(rng, 2000, 10, 2.3, 0.01, 18400):
        lines.append(line)
        step = line["step"]
        if step % 200 == 0:
            loss = 0.05 + 2 * math.exp(-step / 250)
            lines.append({"step": step, "validation/loss": loss, "validation/accuracy": math.exp(-loss / 3)})
            lines[-1]["time/evaluation_seconds"] = 0.3
    counts = np.diag(rng.integers(30, 40, classes)) + rng.poisson(0.12, (classes, classes))
    names = np.array([str(i) for i in range(10)] if classes == 10 else [f"class number {i}" for i in range(classes)])
    run = {"device": "cpu", "device_count": 1, "python": "3.11.2", "jax": "0.10.2", "flax": "0.12.8", "seconds": 152.3}
    run |= {
        "config_name": "vit_digits",
        "command": "python launch.py --config=vit_digits --workdir=outputs/vit",
        "config": {"seed": 0},  # for sweeps, which check whether the run is finished
    }
    optimizer = {"name": "adamw", "learning_rate": 1e-3, "schedule": {"kind": "cosine", "warmup_steps": 100}}
    mistakes = {"image": images, "label": labels, "prediction": (labels + 3) % 10, "class_names": names}
    attention = {"image": images[:6], "weights": attention_weights(rng, 6, 6, 4, 17, 17), "grid": np.array([4, 4])}
    return write_run(
        workdir,
        {"seed": 0, "model": {"name": "vit", "patch_size": [2, 2], "dropout": 0.1}, "optimizer": optimizer},
        lines,
        run,
        {
            "parameters": {"patch embedding": 1280, "position": 1088, "blocks": 198784, "head": 778, "total": 201930},
            "flops": {"forward_per_example": 6.9e6, "training_step": 2.65e9, "whole_run": 5.3e12},
            "memory": {"weights": 807720, "optimizer": 1615440, "activations": 41943040, "total": 45173920},
        },
        confusion_validation={"counts": counts, "class_names": names},
        mistakes_validation=mistakes | {"probability": np.linspace(0.99, 0.5, 27)},
        attention_image=attention | {"has_class_token": np.array(True)},
    )


def text_run(workdir):
    """Create the folder of a GPT run whose texts need escaping in HTML."""
    rng = np.random.default_rng(1)
    lines = []
    for line in train_lines(rng, 5000, 10, 4.2, 1.5, 910, accuracy=False):
        lines.append(line)
        if line["step"] % 500 == 0:
            loss = 1.6 + 2.6 * math.exp(-line["step"] / 700)
            lines.append({"step": line["step"], "validation/loss": loss, "validation/perplexity": math.exp(loss)})
    text = "What light through yonder <b>window</b> breaks & is it $5 or $6?\n\ndef f():\n    return self\n"
    prompts = ("ROMEO:\n", "def main(")
    samples = [{"step": s, "prompt": p, "text": p + text * 2} for s in (500, 2500, 5000) for p in prompts]
    tokens = [
        "def",
        " __",
        "init",
        "__",
        "(",
        "self",
        ",",
        " cost",
        "$",
        "=",
        "$",
        "$5$",
        "):",
        "\n",
        "    ",
        "self",
        ".",
        "cost",
        " =",
        " cost",
        "日本",
    ]
    training = {"weights": 3192832, "optimizer": 6385664}
    return write_run(
        workdir,
        {"model": {"name": "gpt", "depth": 4}, "note": "</code><script>alert(1)</script>"},
        lines,
        {"device": "NVIDIA H100", "device_count": 8, "seconds": 11012, "config_name": "gpt_<stdlib>"},
        {
            "parameters": {"embed": 8192, "blocks": {"attention": 263168, "mlp": 526848}, "total": 798208},
            "memory": {"training": training, "inference": {"weights": 3192832, "kv_cache": 262144}},
            "textbook": 798000,
        },
        samples,
        attention_text={
            "tokens": np.array(tokens),
            "attention": attention_weights(rng, 4, 4, len(tokens), len(tokens), causal=True),
        },
    )
