"""BART on the summaries of CNN and Daily Mail (arXiv 1910.13461, section 5.3). Not run yet.

    hf download abisee/cnn_dailymail --repo-type=dataset --include="3.0.0/*" --local-dir=cnn_dailymail
    hf download facebook/bart-large config.json model.safetensors tokenizer.json --local-dir=bart-large
    lineage train --config=bart_cnn_dailymail --config.init.path=bart-large

The settings are those of the authors' code, except that its batches of 2,048 tokens on 8 devices, accumulated 4 times,
are batches of 64 pairs here. The paper reports 44.16, 21.28 and 40.90 for ROUGE-1, ROUGE-2 and ROUGE-L (here Lsum).
"""

from lineage.configs import base


def get_config() -> base.ConfigDict:
    config = base.get_config("bart", "sequence_to_sequence", "parquet:cnn_dailymail/3.0.0", schedule="linear")
    config.model.update(variant="large", vocab_size=50_265, max_length=1024, dropout=0.1, attention_dropout=0.1)
    config.model.update(remat="dots", unroll=12)
    config.source.update(input_key="article", target_key="highlights")
    config.task.update(sequence_length=1024, truncate=True, label_smoothing=0.1)
    config.loader.update(batch_size=64, evaluation_batch_size=32, buckets=(256, 512, 768), workers=4)
    config.schedule.update(learning_rate=3e-5, warmup_steps=500)
    config.optimizer.update(epsilon=1e-8, weight_decay=0.01, clip_norm=0.1)
    config.update(precision="bfloat16", total_steps=20_000, log_every_steps=50, evaluate_every_steps=5000)
    config.save_every_steps = 1000
    config.evaluators.generation.update(metrics=("rouge kinds=1,2,Lsum",), split="test")
    config.checkpoint.best = "validation/loss"
    config.sampling.update(temperature=0.0, num_beams=4, length_penalty=2.0, no_repeat_ngram_size=3, min_new_tokens=55)
    config.sampling.max_new_tokens = 140
    return config
