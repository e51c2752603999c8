"""Three families on one task: an encoder chooses a text's class, a decoder and an encoder-decoder write its name.

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
    config = base.get_config("bert")
    config.model.depth = config.model.unroll = 4
    config.model.update(width=128, num_heads=4, head="classification", num_classes=5, dropout=0.1, max_length=80)
    config.data.update(source=f"labels:{path}/train.tsv", validation_split=f"{path}/validation.tsv")
    config.data.update(test_split=f"{path}/test.tsv", task="classification", tokenizer="bpe", vocab_size=4096)
    config.data.update(sequence_length=64, buckets=(16, 32), batch_size=32, evaluation_batch_size=256)
    config.objective.name = "classification"
    config.optimizer.update(learning_rate=5e-4, schedule="linear", warmup_percent=10.0, weight_decay=0.01)
    config.update(total_epochs=3.0, log_every_steps=20, evaluate_every_epochs=3.0, save_every_epochs=3.0)
    config.sampling.update(temperature=0.0, max_new_tokens=6)
    return config


def sweep() -> Iterator[dict]:
    yield {"model.name": "bert"}
    yield {"model.name": "gpt", "data.task": "continuations", "objective.name": "causal_lm"}
    yield {
        "model.name": "transformer",
        "model.depth": 2,  # of each side; a decoder's layer has 16 D^2 + 2 D F parameters, an encoder's 8 less
        "model.mlp_dim": 384,
        "data.task": "pairs",
        "objective.name": "sequence_to_sequence",
    }
