"""Three families on one task: an encoder predicts the class, two decoders generate its name.

    lineage sweep --config=families:PATH

PATH contains train.tsv, validation.tsv and test.tsv with texts and class names. All three models have the same width,
the same number of parameters within 3%, and the same training texts. Each model uses the standard formulation of its
family: BERT classifies, GPT continues the text with the class name, and the Transformer generates the class name, as in
T5 (arXiv 1910.10683, section 3.2). `accuracy` (encoder) and `exact_match` (the others) are the same metric: the
fraction of correctly classified texts. Example: genres of sentences of UD_English-EWT (Universal Dependencies):

    for split in train dev:validation test; do
      cat en_ewt-ud-${split%:*}.conllu | awk -F ' = ' '/^# sent_id/ {split($2, id, "-")}
        /^# text/ {text = substr($0, 10); gsub("\\t", " ", text); print text "\\t" id[1]}' > PATH/${split#*:}.tsv
    done
"""

from collections.abc import Iterator

from lineage.configs import base


def get_config(path: str = "genres") -> base.ConfigDict:
    source = f"labels:{path}/train.tsv"
    config = base.get_config("bert", "text_classification", source, tokenizer="bpe", schedule="linear")
    config.model.update(depth=4, unroll=4, width=128, num_heads=4, num_classes=5, dropout=0.1, max_length=80)
    config.source.update(validation_path=f"{path}/validation.tsv", test_path=f"{path}/test.tsv")
    config.tokenizer.vocab_size = 4096
    config.task.sequence_length = 64
    config.loader.update(buckets=(16, 32), batch_size=32, evaluation_batch_size=256)
    config.schedule.update(learning_rate=5e-4, warmup_percent=10.0)
    config.optimizer.weight_decay = 0.01
    config.update(total_epochs=3.0, log_every_steps=20, evaluate_every_epochs=3.0, save_every_epochs=3.0)
    config.sampling.update(temperature=0.0, max_new_tokens=6)
    return config


def sweep() -> Iterator[dict]:
    yield {"model.name": "bert"}
    yield {"model.name": "gpt", "model.dropout": 0.1, "task.name": "conditional_lm"}
    yield {
        "model.name": "transformer",
        "model.depth": 2,  # per side; a decoder layer has 8 D^2 + 2 D F parameters, an encoder layer 4 D^2 + 2 D F
        "model.mlp_dim": 384,
        "task.name": "sequence_to_sequence",
    }
