"""BERT on SQuAD (arXiv 1810.04805, sections 4.2 and 4.3; appendix A.3). Not run yet.

    pip install -e '.[prepare]'
    tfds build squad/v1.1 --file_format=array_record
    hf download google-bert/bert-base-uncased config.json model.safetensors tokenizer.json --local-dir=bert-base
    lineage train --config=bert_squad --config.init.path=bert-base

init.path may also be the workdir of a run. `bert_squad:v2.0`, for squad/v2.0, includes unanswerable questions and uses
the paper's recipe for them. To read the original files, set `--config.source=squad:train-v1.1.json
--config.source.validation_path=dev-v1.1.json`.
"""

from lineage.configs import base


def get_config(version: str = "v1.1") -> base.ConfigDict:
    config = base.get_config("bert", "question_answering", f"tfds:squad/{version}", schedule="linear")
    config.model.max_length = 512
    config.init.skip = ("^classifier",)
    config.task.update(sequence_length=384, stride=128)
    config.loader.update(threads=2, batch_size=48 if version == "v2.0" else 32)
    config.schedule.update(learning_rate=5e-5, warmup_percent=10.0)
    config.optimizer.update(epsilon=1e-6, weight_decay=0.01)
    config.update(total_epochs=2.0 if version == "v2.0" else 3.0, log_every_steps=50, evaluate_every_epochs=1.0)
    config.save_every_epochs = 1.0
    config.checkpoint.best = "validation/f1"
    return config
