"""Three families on one task: an encoder classifies, two decoders generate the class name.

    python launch.py sweep --config=families:PATH

PATH has train.tsv, validation.tsv and test.tsv of texts and their classes. All three models have the same width, the
same number of parameters within 3%, and see the same texts as often. Each learns by what is natural to its family: BERT
by classification, GPT by going on after the text, the Transformer by translating it to the class's name, as T5 does
(arXiv 1910.10683, section 3.2). The first's `accuracy` and the others' `exact_match` are the same thing: the part of
the texts whose class is right. Genres of English sentences, from a treebank of Universal Dependencies (UD_English-EWT):

    for split in train dev:validation test; do
      cat en_ewt-ud-${split%:*}.conllu | awk -F ' = ' '/^# sent_id/ {split($2, id, "-")}
        /^# text/ {text = substr($0, 10); gsub("\\t", " ", text); print text "\\t" id[1]}' > PATH/${split#*:}.tsv
    done
"""

from collections.abc import Iterator

from ml_collections import ConfigDict

from lineage.configs import base


def get_config(path: str = "genres") -> ConfigDict:
    config = base.get_config(
        "bert", "text_classification", f"labels:{path}/train.tsv", tokenizer="bpe", schedule="linear"
    )
    config.model.depth = config.model.unroll = 4
    config.model.update(width=128, num_heads=4, num_classes=5, dropout=0.1, max_length=80)
    config.source.validation_path = f"{path}/validation.tsv"
    config.source.test_path = f"{path}/test.tsv"
    config.tokenizer.vocab_size = 4096
    config.task.sequence_length = 64
    config.loader.update(buckets=(16, 32), batch_size=32, evaluation_batch_size=256)
    config.schedule.learning_rate = 5e-4
    config.optimizer.weight_decay = 0.01
    config.schedule.warmup_percent = 10.0
    config.update(total_epochs=3.0, log_every_steps=20, evaluate_every_epochs=3.0, save_every_epochs=3.0)
    config.sampling.update(temperature=0.0, max_new_tokens=6)
    return config


def sweep() -> Iterator[dict]:
    yield {"model.name": "bert"}
    yield {"model.name": "gpt", "model.dropout": 0.1, "task.name": "conditional_lm"}
    yield {
        "model.name": "transformer",
        "model.depth": 2,  # of each side; a decoder's layer has 16 D^2 + 2 D F parameters, an encoder's 8 less
        "model.mlp_dim": 384,
        "task.name": "sequence_to_sequence",
    }
