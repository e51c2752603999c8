"""Llama of the size of Llama 3.2 1B from scratch on a tenth of C4. Not run yet.

    hf download allenai/c4 --repo-type=dataset --include="en/c4-train.000*.json.gz" --local-dir=c4
    hf download allenai/c4 en/c4-validation.00000-of-00008.json.gz --repo-type=dataset --local-dir=c4
    lineage train --config=llama_1b

The data are 100 of the 1,024 training files of C4 from the Hugging Face Hub, and an eighth of its validation split. The
tokenizer is trained on them; `tokenizer` may be the path of a published `tokenizer.json` instead.
"""

from lineage.configs import base


def get_config() -> base.ConfigDict:
    config = base.get_config("llama", "causal_lm", "jsonl:c4/en/c4-train.000*.json.gz", tokenizer="bpe")
    config.model.update(variant="llama3.2-1b", vocab_size=32_000, max_length=2048, remat="dots", unroll=16)
    config.model.rope_scaling = "default"  # no pre-training on shorter sequences
    config.source.validation_path = "c4/en/c4-validation.00000-of-00008.json.gz"
    config.tokenizer.vocab_size = 32_000
    config.task.update(sequence_length=2048, cache_dir="outputs/c4_tokens")
    config.loader.update(batch_size=512, evaluation_batch_size=64, workers=4)  # a million tokens
    config.schedule.update(learning_rate=3e-4, end_factor=0.1, warmup_steps=2000)
    config.optimizer.update(b2=0.95, weight_decay=0.1, clip_norm=1.0)
    config.update(precision="bfloat16", grad_accum_steps=4, total_steps=20_000, log_every_steps=100)
    config.update(evaluate_every_steps=1000, save_every_steps=1000)
    config.mesh.update(data=1, fsdp=-1)
    config.checkpoint.best = "validation/loss"
    config.sampling.num_samples = 2
    return config
