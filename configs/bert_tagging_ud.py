"""A small BERT that tells the part of speech of every word in a treebank of Universal Dependencies.

    python launch.py --config=configs/bert_tagging_ud.py:PATH        PATH: a folder of *.conllu or *.conllu.gz files
    python launch.py --config=configs/bert_tagging_ud.py:PATH,RUN    from the parameters and the tokenizer of a run

RUN is the workdir of a BERT that has guessed hidden words: of bert_stdlib.py, or of one on texts that are nearer:

    python launch.py --config=configs/bert_stdlib.py --workdir=RUN --config.data.source=conllu:PATH \\
      --config.data.max_bytes=0 --config.data.task=masked_tokens --config.objective.name=masked_lm \\
      --config.model.head=masked_lm
"""

import json
from pathlib import Path

from ml_collections import ConfigDict

from configs import base


def get_config(paths: str = "ud_english_ewt") -> ConfigDict:
    path, _, run = paths.partition(",")
    config = base.get_config("bert")
    config.model.depth = 4
    config.model.num_heads = 4
    config.model.width = 128
    config.model.num_segments = 0
    config.model.head = "tagging"
    config.model.num_classes = 17
    config.model.unroll = 4
    if run:
        start_from(config, run)

    config.data.source = f"conllu:{path}"
    config.data.tokenizer = "bpe"
    config.data.vocab_size = 4096
    config.data.sequence_length = 64
    config.data.buckets = (16, 32)
    config.data.batch_size = 32
    config.data.evaluation_batch_size = 128
    config.objective.name = "tagging"

    config.optimizer.learning_rate = 1e-3
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_percent = 10.0
    config.optimizer.weight_decay = 0.01

    config.total_epochs = 5.0
    config.log_every_steps = 20
    config.evaluate_every_epochs = 1.0
    config.save_every_epochs = 1.0
    config.checkpoint.best = "validation/accuracy"
    config.checkpoint.best_is_highest = True
    return config


def start_from(config: ConfigDict, run: str) -> None:
    """The sizes of a run's model, and its parameters but for the head."""
    config.init.path = run
    config.init.skip = ("^classifier",)
    trained = json.loads(Path(run, "config.json").read_text(encoding="utf-8"))
    for key in ("variant", "depth", "num_heads", "width", "hidden", "num_segments", "activation"):
        config.model[key] = trained["model"][key]
    config.model.max_length = trained["model"]["max_length"] or trained["data"]["sequence_length"]
