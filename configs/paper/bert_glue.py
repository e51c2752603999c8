"""BERT on a task of GLUE (arXiv 1810.04805, section 4.1; appendix A.3). Not run yet.

    pip install -e '.[prepare]'
    tfds build glue/mrpc --file_format=array_record
    hf download google-bert/bert-base-uncased config.json model.safetensors tokenizer.json --local-dir=bert-base
    lineage train --config=bert_glue:mrpc --config.init.path=bert-base

init.path may also be the workdir of a run. The paper selects the best of the learning rates 5e-5, 3e-5 and 2e-5.
"""

from lineage.configs import base

# task -> text features, number of classes (1: regression), evaluation metric
TASKS = {
    "cola": ("sentence", 2, "matthews"),
    "sst2": ("sentence", 2, "accuracy"),
    "mrpc": ("sentence1,sentence2", 2, "f1"),
    "stsb": ("sentence1,sentence2", 1, "pearson"),
    "qqp": ("question1,question2", 2, "f1"),
    "mnli": ("premise,hypothesis", 3, "accuracy"),
    "qnli": ("question,sentence", 2, "accuracy"),
    "rte": ("sentence1,sentence2", 2, "accuracy"),
    "wnli": ("sentence1,sentence2", 2, "accuracy"),
}


def get_config(task: str = "mrpc") -> base.ConfigDict:
    if task not in TASKS:
        raise ValueError(f"The GLUE task is {task!r}: it must be one of {', '.join(TASKS)}.")
    text_key, num_classes, metric = TASKS[task]
    kind = "text_regression" if num_classes == 1 else "text_classification"
    config = base.get_config("bert", kind, f"tfds:glue/{task}", schedule="linear")
    config.model.update(num_classes=num_classes, max_length=512)
    config.init.skip = ("^classifier",)
    config.source.text_key = text_key
    if task == "mnli":
        config.source.update(validation_split="validation_matched", test_split="validation_mismatched")
    config.task.sequence_length = 128
    config.loader.update(batch_size=32, threads=2)
    config.schedule.update(learning_rate=2e-5, warmup_percent=10.0)
    config.optimizer.update(epsilon=1e-6, weight_decay=0.01)
    config.update(total_epochs=3.0, log_every_steps=50, evaluate_every_epochs=1.0, save_every_epochs=1.0)
    config.checkpoint.best = f"validation/{metric}"
    return config
