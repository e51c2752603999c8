"""Llama of the size of Llama 3.2 1B from scratch on a tenth of C4. It has not been run.

The data are a TFDS data set with the feature `text`, prepared under data.data_dir; the README says how to store one.
The tokenizer is trained on them; data.tokenizer may be the path of a published `tokenizer.json` instead.
"""

from ml_collections import ConfigDict

from lineage.configs import base


def get_config() -> ConfigDict:
    config = base.get_config("llama")
    config.model.update(variant="llama3.2-1b", vocab_size=32_000, max_length=2048)
    config.model.rope_scaling = "default"  # it never trained on shorter sequences
    config.model.remat = "full"
    config.data.update(source="tfds:c4/en", train_split="train[:10%]", validation_split="validation[:1%]")
    config.data.update(tokenizer="bpe", vocab_size=32_000, sequence_length=2048)
    config.data.batch_size = 512  # a million tokens
    config.data.update(evaluation_batch_size=64, cache_dir="outputs/c4_tokens", workers=4)
    config.objective.name = "causal_lm"
    config.optimizer.update(learning_rate=3e-4, end_factor=0.1, warmup_steps=2000, b2=0.95, weight_decay=0.1)
    config.optimizer.clip_norm = 1.0
    config.update(precision="bfloat16", grad_accum_steps=4)
    config.mesh.update(data=1, fsdp=-1)
    config.update(total_steps=20_000, log_every_steps=100, evaluate_every_steps=1000, save_every_steps=1000)
    config.checkpoint.best = "validation/loss"
    config.sampling.num_samples = 2
    return config
