r"""Transformer-squared on a small GPT: experts for categories of text, and their mixtures.

    python -c "from lineage.configs.small.self_adaptive import mix; mix('TEXTS')"
    lineage train --config=self_adaptive:base,TEXTS --workdir=outputs/base
    lineage train --config=self_adaptive:svf,TEXTS/play.txt,outputs/base --workdir=outputs/play
    lineage train --config=self_adaptive:mixture,TEXTS/two.txt,outputs/base --workdir=outputs/mixture \
        "--config.experts.paths=('outputs/play','outputs/wiki','outputs/code')"
    lineage generate --workdir=outputs/base --prompt="JULIET:" --config.experts.choice=prompt \
        "--config.experts.paths=('outputs/play','outputs/wiki','outputs/code')"

TEXTS contains play.txt (tiny Shakespeare), wiki.txt (the validation text of WikiText-2) and code.txt (the concatenated
modules of Python's standard library), each truncated to 1,200,000 characters.
"""

import random
from pathlib import Path

from lineage.configs import base


def get_config(argument: str = "base,texts") -> base.ConfigDict:
    """Return the config of a stage: "base,FOLDER"; "svf,TEXT,RUN", "lora,TEXT,RUN" or "mixture,TEXT,RUN", where RUN is
    the workdir of the base model.
    """
    stage, *names = argument.split(",")
    if (stage, len(names)) not in (("base", 1), ("svf", 2), ("lora", 2), ("mixture", 2)):
        raise ValueError(f"self_adaptive takes base,FOLDER or svf|lora|mixture,TEXT,RUN, not {argument!r}.")
    text = f"{names[0]}/mix_train.txt" if stage == "base" else names[0]
    config = base.get_config("gpt", "causal_lm", f"text:{text}", tokenizer="bpe")
    config.model.update(depth=4, num_heads=4, width=128, unroll=4)
    config.tokenizer.vocab_size = 1024
    config.task.sequence_length = 128
    config.loader.update(batch_size=16, evaluation_batch_size=64)
    config.schedule.update(learning_rate=3e-3, end_factor=0.1, warmup_percent=5.0)
    config.optimizer.update(b2=0.99, weight_decay=0.1)
    config.update(total_steps=1000, log_every_steps=10, evaluate_every_steps=500, save_every_steps=500)
    if stage == "base":
        config.source.validation_path = f"{names[0]}/mix_valid.txt"
        return config
    config.init.path = names[1]
    base.replace(config, adapter="none" if stage == "mixture" else stage)
    config.schedule.learning_rate = 1e-2 if stage == "svf" else 2e-3
    config.optimizer.weight_decay = 0.0
    config.total_steps = 0 if stage == "mixture" else 100
    return config


def mix(folder: str) -> None:
    """Write the data sets: passages of three categories, each followed by its category name, for the base model; and
    unlabeled passages of two categories from held-out text.
    """
    texts = {kind: Path(folder, f"{kind}.txt").read_text(encoding="utf-8") for kind in ("play", "wiki", "code")}
    starts = {kind: text[: int(len(text) * 0.9)] for kind, text in texts.items()}
    ends = {kind: text[int(len(text) * 0.9) :] for kind, text in texts.items()}
    two = {kind: ends[kind] for kind in ("play", "wiki")}
    for name, parts, labeled in (("mix_train", starts, True), ("mix_valid", ends, True), ("two", two, False)):
        places = [(kind, text, i) for kind, text in parts.items() for i in range(0, len(text), 200)]
        pieces = [text[i : i + 200] + (f"\n### {kind}\n" if labeled else "\n") for kind, text, i in places]
        random.Random(0).shuffle(pieces)
        Path(folder, f"{name}.txt").write_text("".join(pieces), encoding="utf-8")
