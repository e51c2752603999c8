"""What `data.load` can be told."""

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `data.load`, with their defaults."""

    source: str = "digits"  # what to read; see the package
    task: str = ""  # what its texts are made into, see `data.tasks`; "" = what the source is for
    batch_size: int  # examples in a training batch, of all processes together
    evaluation_batch_size: int = 0  # the same for evaluation; 0 = batch_size
    seed: int = 0  # of the order of training examples, of their augmentation and of their noise
    # TFDS splits such as `train[:99%]`; with a PATH of texts, other files for validation and test; "" = the source's
    # own, if it has one
    train_split: str = ""
    validation_split: str = ""
    test_split: str = ""
    data_dir: str = ""  # where TFDS data sets are prepared; "" = TFDS's default
    tokenizer: str = "bytes"  # of `tokenizers.KINDS`, or the path of a `tokenizer.json`; one in `workdir` comes first
    vocab_size: int = 0  # of a tokenizer that is trained; of words, 0 = every word
    lowercase: bool = False  # a tokenizer that is trained does not tell upper case from lower case
    # tokens in an example; of pairs, in an input and in a target: longer ones are left out of the training, and cut in
    # evaluation
    sequence_length: int = 0
    # shorter lengths, rising: a training batch of pairs has pairs of about one length and is padded to the shortest of
    # these, or to sequence_length, that all of them fit in
    buckets: Sequence[int] = ()
    # tokens from one training window to the next; 0 = sequence_length; 1 = windows at every offset; of a long text that
    # is labelled or asked about, from one of its windows to the next; 0 = without overlap
    stride: int = 0
    # tokens from one evaluation window to the next; 0 = sequence_length. Each token counts once, guessed from the
    # sequence_length - evaluation_stride before it at least, as far as there are so many
    evaluation_stride: int = 0
    # of a text's windows: "" = another one in each epoch; stream = row b of a batch goes on where row b of the batch
    # before ended, in training and in evaluation, for models with a memory
    order: str = ""
    long_text: str = "head"  # what of labelled texts that are too long is read, see `labelled.Fit`
    # the part of a text without a validation split that is held out, by file if there are many; 0 = none
    validation_fraction: float = 0.1
    max_bytes: int = 0  # reads at most so much text, in whole documents; 0 = everything
    text_key: str = "text"  # the feature of a TFDS data set; of pairs, two: "de,en"
    start_token: str = "end_of_text"  # what the outputs of pairs begin with, end_of_text, or pad as T5's do
    cache_dir: str = ""  # a folder that keeps the token ids from run to run; "" = tokenise at each start, in memory
    mask_rate: float = 0.15  # the part of the tokens, or of an image's patches, that is hidden, to be guessed
    masking: str = "random"  # of images: which patches are hidden, a name of `masking.PATTERNS`
    patch_size: int = 0  # of masked images, in pixels
    mask_whole_words: bool = False  # all or none of a word's tokens are hidden
    noise: str = ""  # done to texts that are to be restored, such as `permute_sentences | infill(0.3, 3)`
    max_examples: int = 0  # so many training images, drawn by the seed, those of fewer among those of more; 0 = all
    # of the square that images are resized to; 0 = as they are, all of one size; of detection, of the square that they
    # lie in, 0 = 64
    image_size: int = 0
    shorter_side: int = 0  # of detection, to which images are resized if the longer one then fits; 0 = image_size
    max_boxes: int = 100  # of detection, the most objects in an image
    # the central part of the resized image that is seen (in training too, unless `augment` crops)
    evaluation_crop: float = 1.0
    resample: str = "bilinear"  # of whole images and of crops: bilinear | bicubic, as Pillow does it
    augment: str = ""  # of training images, such as `shift(1)` or `crop | flip | randaugment(2, 10)`
    mean: Sequence[float] = (0.5,)  # of the normalisation, in 0..1; one number, or one for each channel
    std: Sequence[float] = (0.5,)
    image_key: str = "image"  # the features of a TFDS data set
    label_key: str = "label"
    repeats: int = 1  # copies of a training image in a batch, each changed by `augment` for itself
    in_memory: bool = False  # decodes all images at the start, for small images of one size
    workers: int = 0  # processes that make batches ahead
    threads: int = 0  # in each of them; 0 and 0 = made when asked for
    process_index: int = 0  # this process has an equal contiguous part of each global batch
    process_count: int = 1
    workdir: str | Path | None = None  # of the run; keeps its tokenizer

    @property
    def kind(self) -> str:
        """Of the source: what is before the colon."""
        return self.source.partition(":")[0]

    @property
    def path(self) -> str:
        """Of the source: what is after the colon."""
        return self.source.partition(":")[2]

    @property
    def splits(self) -> dict[str, str]:
        """The splits that are asked for by name."""
        asked = {"train": self.train_split, "validation": self.validation_split, "test": self.test_split}
        return {name: split for name, split in asked.items() if split}

    def refuse_all_but(self, names: Sequence[str]) -> None:
        """Raises ValueError for an option that would have no effect: it is a mistake of the user's."""
        for field in fields(self):
            value = getattr(self, field.name)
            value = tuple(value) if isinstance(value, list) else value
            if field.name not in (*_ALWAYS, *names) and value != field.default:
                raise ValueError(
                    f"{field.name}={value!r} has no meaning for source={self.source!r}, which is read for "
                    f"task={self.task!r}"
                )


_ALWAYS = (
    *("source", "task", "batch_size", "evaluation_batch_size", "seed", "train_split", "validation_split", "test_split"),
    *("data_dir", "workers", "threads", "process_index", "process_count", "workdir"),
)


def called(option: str, value: str, known: Mapping[str, Callable[..., Any]]) -> list[Any]:
    """What the functions return that an option's value such as `a | b(2, 10)` calls by their names in `known`.

    Raises ValueError, with what there is, for another name and for other arguments than a function takes.
    """
    results = []
    for text in filter(None, (part.strip() for part in value.split("|"))):
        try:
            call = ast.parse(text, mode="eval").body
            if isinstance(call, ast.Name):
                call = ast.Call(call, [], [])
            named = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
            results.append(known[call.func.id](*map(_literal, call.args), **named))
        except (SyntaxError, AttributeError, KeyError, TypeError) as error:
            takes = {name: ", ".join(inspect.signature(function).parameters) for name, function in known.items()}
            names = ", ".join(f"{name}({parameters})" if parameters else name for name, parameters in takes.items())
            raise ValueError(f"{option}={value!r}: {text!r} is not one of {names}") from error
    return results


def _literal(node):
    try:
        return ast.literal_eval(node)
    except ValueError:  # a name, or an expression; the functions' own ValueErrors are others
        raise TypeError(f"{ast.unparse(node)} is no literal") from None
