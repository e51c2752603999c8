"""T5 from scratch: span corruption on C4 (baseline of arXiv 1910.10683). Not run yet.

    hf download allenai/c4 --repo-type=dataset --include="en/c4-train.*.json.gz" --local-dir=c4
    hf download allenai/c4 en/c4-validation.00000-of-00008.json.gz --repo-type=dataset --local-dir=c4
    hf download google-t5/t5-base tokenizer.json --local-dir=t5-base
    lineage train --config=t5_c4:base

The argument is a variant of models/t5.py, such as base, 3b or v1_1_base. The data are C4 from the Hugging Face Hub,
with an eighth of its validation split; the tokenizer is the published one of t5-base. Two differences from the paper:
its learning rate, 0.01 until step 10,000, is relative to the scale of each parameter, and it has no warm-up.
"""

from lineage.configs import base


def get_config(variant: str = "base") -> base.ConfigDict:
    parts = {"tokenizer": "t5-base/tokenizer.json", "optimizer": "adafactor", "schedule": "rsqrt"}
    config = base.get_config("t5", "span_corruption", "jsonl:c4/en", **parts)
    config.model.update(variant=variant, dropout=0.0 if variant.startswith("v1_1") else 0.1, unroll=12)
    config.model.vocab_size = 32_128  # 32,100 rounded up to a multiple of 128
    config.model.remat = None if variant.endswith(("small", "base")) else "dots"
    config.source.validation_path = "c4/en/c4-validation.00000-of-00008.json.gz"
    config.task.update(sequence_length=512, cache_dir="outputs/c4_tokens_t5")  # from 568 tokens; targets have 114
    config.loader.update(batch_size=128, workers=4)
    config.schedule.update(learning_rate=1e-3, warmup_steps=10_000)
    config.optimizer.update(momentum=0.0, clip_norm=0.0)  # Adafactor clips the update of each parameter
    config.update(precision="bfloat16", total_steps=524_288, log_every_steps=100, evaluate_every_steps=10_000)
    config.save_every_steps = 5000
    config.checkpoint.best = "validation/loss"
    return config
