"""A small BERT for part-of-speech tagging of a treebank of Universal Dependencies.

    lineage train --config=bert_tagging_ud:PATH        # PATH: a folder of *.conllu or *.conllu.gz files
    lineage train --config=bert_tagging_ud:PATH,RUN    # initialized with the parameters and the tokenizer of a run

RUN is the workdir of a pre-trained BERT: `bert_stdlib`, or one pre-trained on in-domain text:

    lineage train --config=bert_stdlib --workdir=RUN --config.source=conllu:PATH --config.task.name=masked_lm
"""

import json
from pathlib import Path

from lineage.configs import base


def get_config(paths: str = "ud_english_ewt") -> base.ConfigDict:
    path, _, run = paths.partition(",")
    config = base.get_config("bert", "token_classification", f"conllu:{path}", tokenizer="bpe", schedule="linear")
    config.model.update(depth=4, num_heads=4, width=128, num_segments=0, num_classes=17, unroll=4)
    if run:
        start_from(config, run)

    config.tokenizer.vocab_size = 4096
    config.task.sequence_length = 64
    config.loader.update(buckets=(16, 32), batch_size=32, evaluation_batch_size=128)
    config.schedule.update(learning_rate=1e-3, warmup_percent=10.0)
    config.optimizer.weight_decay = 0.01
    config.update(total_epochs=5.0, log_every_steps=20, evaluate_every_epochs=1.0, save_every_epochs=1.0)
    config.checkpoint.best = "validation/accuracy"
    return config


def start_from(config: base.ConfigDict, run: str) -> None:
    """Initialize from a run: copy its model sizes and all parameters except the head."""
    config.init.update(path=run, skip=("^classifier",))
    trained = json.loads(Path(run, "config.json").read_text(encoding="utf-8"))
    for key in ("variant", "depth", "num_heads", "width", "mlp_dim", "num_segments", "activation"):
        config.model[key] = trained["model"][key]
    config.model.max_length = trained["model"]["max_length"] or trained["task"]["sequence_length"]
