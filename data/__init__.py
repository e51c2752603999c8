"""Data: `data.load` makes the batches of a run from a source's name. Imports neither JAX nor TensorFlow.

digits                          scikit-learn's handwritten digits
shapes                          drawn circles, squares, triangles and crosses, to be found
stdlib                          the source text of the running Python's standard library
text:PATH                       a file, a glob or a folder of UTF-8 text
cldr                            dates as twelve locales write them, and as ISO 8601 has them
pairs:PATH                      inputs and targets, a .tsv, a .jsonl or two parallel files "a.en,a.de", also gzipped
labels:PATH                     texts or pairs of texts and a label each, a .tsv or a .jsonl, also gzipped
conllu:PATH                     tagged words, a .conllu or a folder of Universal Dependencies, also gzipped
squad:PATH                      questions and answers in texts, a .json as SQuAD has it, also gzipped
folder:PATH                     images, PATH/<train|validation|test>/<class>/<file>
idx:PATH                        MNIST, Fashion-MNIST and their relatives, a folder of the four files, also gzipped
cifar:PATH                      CIFAR-10 or CIFAR-100, a folder of the binary version or of the one for Python
tfds:NAME[/CONFIG][:VERSION]    any prepared TensorFlow data set of images, of images with boxes or of texts

`data.tasks` has what they can be made into.
"""

from dataclasses import dataclass, replace
from typing import Any

from lineage.data.loader import Batch, EvaluationBatches, Source, TrainBatches
from lineage.data.options import Options
from lineage.data.sources import opening
from lineage.data.tasks import TASKS
from lineage.data.tokenizers import Tokenizer

__all__ = ["Batch", "Data", "EvaluationBatches", "Options", "Source", "Tokenizer", "TrainBatches", "load"]


@dataclass(frozen=True)
class Data:
    """What a run reads.

    `train` has endless batches, `splits` one exact pass by name; `tokenizer` is None for images. `info` has `kind`,
    `task` and, by split, `examples`; for images (with boxes too) `num_classes`, `class_names`, `image_size` (h, w),
    `channels`, `mean` and `std` (picture in 0..1 = image * std + mean); for texts and pairs `vocab_size` and
    `sequence_length`; for texts, by split, `tokens`, `characters_per_token` and `bytes_per_token`; for texts that are
    told apart `num_classes` and `class_names`; where outputs are written for inputs, `start`, their token before the
    first.
    """

    train: TrainBatches
    splits: dict[str, EvaluationBatches]
    tokenizer: Tokenizer | None
    info: dict[str, Any]


def load(source: str = "digits", **options: Any) -> Data:
    """Opens a source and makes its batches; `Options` has all that it can be told.

    Raises ValueError or FileNotFoundError, in one sentence, for what cannot be read or does not fit together.
    """
    options = Options(source=source, **options)
    opening.check(options)
    default = opening.KINDS[options.kind]
    if options.kind == "tfds" and options.sequence_length:
        default = "next_token"
    options = replace(options, task=options.task or default)
    if options.task not in TASKS:
        raise ValueError(f"task={options.task!r} must be one of {', '.join(TASKS)}")
    task = TASKS[options.task]
    if options.kind not in task.kinds:
        raise ValueError(f"task={options.task!r} is for {', '.join(task.kinds)}, not for source={source!r}")
    options.refuse_all_but(task.options)
    examples = task.make(options)
    info = examples.info | {
        "task": options.task,
        "examples": {name: len(part) for name, part in examples.splits.items()},
    }
    reading = {
        name: getattr(options, name) for name in ("order", "process_index", "process_count", "workers", "threads")
    }
    train = TrainBatches(
        source=examples.splits["train"],
        batch_size=options.batch_size,
        transform=examples.in_training,
        seed=options.seed,
        buckets=tuple(options.buckets),
        repeats=options.repeats,
        **reading,
    )
    size = options.evaluation_batch_size or options.batch_size
    changes = examples.in_evaluation
    changes = changes if isinstance(changes, dict) else dict.fromkeys(examples.splits, changes)
    splits = {
        name: EvaluationBatches(source=part, batch_size=size, transform=changes[name], **reading)
        for name, part in examples.splits.items()
        if name != "train"
    }
    return Data(train, splits, examples.tokenizer, info)
