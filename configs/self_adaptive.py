"""Transformer-squared on a small GPT: experts of kinds of text, and what their mixture does for other texts."""

from ml_collections import ConfigDict

from configs import base


def get_config(argument: str) -> ConfigDict:
    """ "base,FOLDER" of mixed texts; on top of its run "svf,TEXT,RUN", "lora,TEXT,RUN" and "mixture,TEXT,RUN"."""
    stage, *names = argument.split(",")
    if (stage, len(names)) not in (("base", 1), ("svf", 2), ("lora", 2), ("mixture", 2)):
        raise ValueError(f"self_adaptive takes base,FOLDER or svf|lora|mixture,TEXT,RUN, not {argument!r}.")
    config = base.get_config("gpt")
    config.model.update(depth=4, num_heads=4, width=128, unroll=4)
    config.data.update(tokenizer="bpe", vocab_size=1024, sequence_length=128, batch_size=16, evaluation_batch_size=64)
    config.objective.name = "causal_lm"
    config.optimizer.update(learning_rate=3e-3, end_factor=0.1, warmup_percent=5.0, b2=0.99, weight_decay=0.1)
    config.update(total_steps=1000, log_every_steps=10, evaluate_every_steps=500, save_every_steps=500)
    if stage == "base":
        config.data.update(source=f"text:{names[0]}/mix_train.txt", validation_split=f"{names[0]}/mix_valid.txt")
        return config
    config.data.source = f"text:{names[0]}"
    config.init.path = names[1]
    config.adapt.name = "" if stage == "mixture" else stage
    config.optimizer.update(learning_rate=1e-2 if stage == "svf" else 2e-3, weight_decay=0.0)
    config.total_steps = 0 if stage == "mixture" else 200
    return config
