"""GPT-2 small (124M parameters) on OpenWebText, after nanoGPT's recipe. Not run yet.

The data are OpenWebText from the Hugging Face Hub, and the tokenizer is trained on them. The command `hf` comes with
the package huggingface_hub:

    hf download Skylion007/openwebtext --repo-type=dataset --include="*.parquet" --local-dir=openwebtext
    lineage train --config=gpt2_openwebtext
"""

from lineage.configs import base


def get_config() -> base.ConfigDict:
    config = base.get_config("gpt", "causal_lm", "parquet:openwebtext", tokenizer="bpe")
    config.model.update(variant="small", max_length=1024, unroll=12)
    config.model.vocab_size = 50_304  # 50,257 rounded up to a multiple of 128
    config.source.validation_fraction = 0.01
    config.tokenizer.vocab_size = 50_257
    config.task.update(sequence_length=1024, cache_dir="outputs/openwebtext_tokens")
    config.loader.update(batch_size=480, workers=4)  # 491,520 tokens
    config.schedule.update(learning_rate=6e-4, end_factor=0.1, warmup_steps=2000)
    config.optimizer.update(b2=0.95, weight_decay=0.1, clip_norm=1.0)
    config.update(precision="bfloat16", total_steps=600_000, log_every_steps=100, evaluate_every_steps=2000)
    config.save_every_steps = 2000
    config.checkpoint.best = "validation/loss"
    config.sampling.num_samples = 2
    return config
