"""BART from scratch: infilling and sentence permutation (arXiv 1910.13461). Not run yet.

    hf download Skylion007/openwebtext --repo-type=dataset --include="*.parquet" --local-dir=openwebtext
    hf download facebook/bart-large tokenizer.json --local-dir=bart-large
    lineage train --config=bart_pretrain:large

The argument is `base` or `large`. The data are OpenWebText from the Hugging Face Hub instead of the paper's 160 GB of
text, and the tokenizer is the published one of bart-large. The paper gives neither learning rate nor warm-up; the
values here are those of RoBERTa (arXiv 1907.11692). Windows of 512 tokens may cross document boundaries.
"""

from lineage.configs import base


def get_config(variant: str = "large") -> base.ConfigDict:
    tokenizer = "bart-large/tokenizer.json"
    config = base.get_config("bart", "denoising", "parquet:openwebtext", tokenizer=tokenizer, schedule="linear")
    config.model.update(variant=variant, vocab_size=50_265, max_length=1024, dropout=0.1, attention_dropout=0.1)
    config.model.update(remat=None if variant == "base" else "dots", unroll=12)
    config.source.validation_fraction = 0.01
    config.task.update(sequence_length=512, cache_dir="outputs/openwebtext_tokens_bart")
    config.loader.update(batch_size=8000, evaluation_batch_size=256, workers=8)
    learning_rate, warmup_steps = (4e-4, 30_000) if variant == "large" else (6e-4, 24_000)
    config.schedule.update(learning_rate=learning_rate, warmup_steps=warmup_steps)
    config.optimizer.update(b2=0.98, epsilon=1e-6, weight_decay=0.01)
    config.update(precision="bfloat16", grad_accum_steps=20, total_steps=500_000, log_every_steps=100)
    config.update(evaluate_every_steps=5000, save_every_steps=1000)
    config.checkpoint.best = "validation/loss"
    return config
