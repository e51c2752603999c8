"""Fine-tuning of a trained model on your own data.

    lineage train --config=finetune:TASK --config.init.path=MODEL --config.source=NAME:PATH

TASK is the name of a task, such as question_answering. MODEL is the folder of a run, or one in the layout of
transformers; it determines the architecture, the tokenizer and the preprocessing of images; the data determine the
number of classes. Each task has one recipe for all models, with AdamW; its learning rates are those of the papers on
BERT (arXiv 1810.04805, appendix A.3) and on DETR (arXiv 2005.12872, appendix A.4: lower for the backbone). See
docs/using.md.
"""

from lineage.configs import base
from lineage.tasks import TASKS

# content of the task -> model, source, batch size, learning rate
RECIPES = {
    "documents": ("gpt", "text", 16, 5e-5),
    "labeled_texts": ("bert", "csv", 32, 3e-5),
    "pairs": ("t5", "pairs", 32, 3e-4),
    "questions": ("bert", "squad", 32, 3e-5),
    "tagged_sentences": ("bert", "bio", 32, 5e-5),
    "images": ("vit", "folder", 64, 1e-4),
    "images_with_boxes": ("detr", "coco", 16, 1e-4),
}


def get_config(task: str = "text_classification") -> base.ConfigDict:
    model, source, batch_size, learning_rate = RECIPES[TASKS[task].reads]
    config = base.get_config(model, task, source, schedule="linear")
    if "sequence_length" in config.task:
        config.task.sequence_length = 384 if task == "question_answering" else 128
    config.loader.batch_size = batch_size
    config.schedule.update(learning_rate=learning_rate, warmup_percent=10.0)
    config.optimizer.weight_decay = 0.01
    if TASKS[task].reads == "pairs":
        config.sampling.temperature = 0.0  # of the texts whose BLEU is computed
    if task == "object_detection":
        config.optimizer.update(clip_norm=0.1, lr_multipliers=(("^backbone/", 0.1),))
    config.update(total_epochs=3.0, log_every_steps=10, evaluate_every_epochs=1.0, save_every_epochs=1.0)
    return config
