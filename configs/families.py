"""Three families on one task: an encoder chooses a text's class, a decoder and an encoder-decoder write its name.

    python launch.py --sweep --config=configs/families.py:PATH

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

from configs import base


def get_config(path: str = "genres") -> ConfigDict:
    config = base.get_config("bert")
    config.model.depth = config.model.unroll = 4
    config.model.width = 128
    config.model.num_heads = 4
    config.model.head = "classification"
    config.model.num_classes = 5
    config.model.dropout = 0.1
    config.model.max_length = 80

    config.data.source = f"labels:{path}/train.tsv"
    config.data.validation_split = f"{path}/validation.tsv"
    config.data.test_split = f"{path}/test.tsv"
    config.data.task = "classification"
    config.data.tokenizer = "bpe"
    config.data.vocab_size = 4096
    config.data.sequence_length = 64
    config.data.buckets = (16, 32)
    config.data.batch_size = 32
    config.data.evaluation_batch_size = 256
    config.objective.name = "classification"

    config.optimizer.learning_rate = 5e-4
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_percent = 10.0
    config.optimizer.weight_decay = 0.01

    config.total_epochs = 3.0
    config.log_every_steps = 20
    config.evaluate_every_epochs = 3.0
    config.save_every_epochs = 3.0
    config.sampling.temperature = 0.0
    config.sampling.max_new_tokens = 6
    return config


def sweep() -> Iterator[dict]:
    yield {"model.name": "bert"}
    yield {"model.name": "gpt", "data.task": "continuations", "objective.name": "causal_lm"}
    yield {
        "model.name": "transformer",
        "model.depth": 2,  # of each side; a decoder's layer has 16 D^2 + 2 D F parameters, an encoder's 8 less
        "model.hidden": 384,
        "data.task": "pairs",
        "objective.name": "sequence_to_sequence",
    }
