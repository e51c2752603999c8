"""Metadata of the data of a run."""

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from lineage.configs.atomic import MAX_DATA, regular, unsealed, write_record

Part = TypeVar("Part")  # a source or a task
FACTS = "facts.json"  # name of the file of `Facts` in the folder of a run
MAX_NUMBER = 1 << 31  # limit of its numbers


def _of_each_split() -> Any:
    """Return a field of `Facts` that maps the names of splits to values."""
    return field(default_factory=dict, metadata={"by_split": True})


@dataclass(frozen=True)
class Facts:
    """Metadata of the data of a run; fields that do not apply are None or empty."""

    examples: Mapping[str, int] = _of_each_split()  # number of examples, set by `data.load`
    vocab_size: int | None = None  # number of token ids
    pad_id: int | None = None  # id of the padding token
    sequence_length: int | None = None  # length that sequences are padded to, in tokens
    num_classes: int | None = None  # 1 for regression
    class_names: tuple[str, ...] = ()  # in the order of their indices
    category_ids: tuple[int | str, ...] = ()  # ids of the classes in COCO files; if empty, 1, 2, ...
    has_unanswerable: bool = False  # whether some training question has no answer
    image_size: tuple[int, int] | None = None  # height and width of the model's images in pixels
    channels: int | None = None  # number of channels of an image
    mean: tuple[float, ...] = ()  # normalization (pixel / 255 - mean) / std of images; one number, or one per channel
    std: tuple[float, ...] = ()
    tokens: Mapping[str, int] = _of_each_split()  # number of tokens of documents
    characters_per_token: Mapping[str, float] = _of_each_split()  # mean of documents
    bytes_per_token: Mapping[str, float] = _of_each_split()  # mean of documents, in UTF-8
    start_token: int | None = None  # token that a decoder's input begins with
    begin_token: int | None = None  # token before each text, such as <s> of Llama and BART
    stop_tokens: tuple[int, ...] = ()  # tokens that end a generated text; (): `Tokenizer.ends`
    document_frequencies: Mapping[str, int] = field(default_factory=dict)  # number of training texts with each word

    @property
    def model_options(self) -> dict[str, int | None]:
        """Model options that the data determine unless the config sets them."""
        return {
            "num_classes": self.num_classes,
            "image_size": self.image_size and max(self.image_size),
            "channels": self.channels,
            "vocab_size": self.vocab_size,
            "pad_id": self.pad_id,
            "max_length": self.sequence_length,
        }

    def save(self, path: Path) -> None:
        """Write the fields that are set as JSON; raise ValueError for class names that UTF-8 cannot encode."""
        for name in self.class_names:
            if name != name.encode(errors="replace").decode():
                raise ValueError(f"The class name {name!r} has a character that UTF-8 cannot encode: rename the class.")
        default = asdict(Facts())
        write_record(path, {name: value for name, value in asdict(self).items() if value != default[name]})

    @classmethod
    def load(cls, path: Path) -> "Facts":
        """Read metadata that `save` wrote; raise ValueError if the file is damaged."""
        advice = "restore it, or continue the run with the command `train`, which writes it again"
        if not path.is_file():  # a pipe would be read forever
            raise FileNotFoundError(f"There is no file {path}: {advice}.")
        regular(path, MAX_DATA)
        try:
            values = unsealed(json.loads(path.read_text(encoding="utf-8"))).items()
            facts = cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values})
            wrong = [key for key, hint in get_type_hints(cls).items() if not _is(getattr(facts, key), hint)]
            if wrong := wrong or _out_of_range(facts):
                raise ValueError(f"{wrong[0]} is {str(getattr(facts, wrong[0]))[:60]}")
            return facts
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is damaged ({error}): {advice}.") from None


def evaluating(part: Part, facts: Facts | None) -> Part:
    """Return a copy of a source or a task that knows the metadata of the training data.

    The source then reads the training split only if other splits need it, and the task can do without that split.
    """
    part = copy.copy(part)
    object.__setattr__(part, "known", facts)
    return part


def _out_of_range(facts: Facts) -> list[str]:
    """Return the names of the fields whose values are impossible."""
    counts = ("vocab_size", "sequence_length", "num_classes", "channels")
    tokens = ("pad_id", "start_token", "begin_token")
    known = {name: value for name, value in vars(facts).items() if value is not None}
    wrong = [name for name in counts if name in known and not 0 < known[name] < MAX_NUMBER]
    wrong += [name for name in tokens if name in known and not 0 <= known[name] < known.get("vocab_size", MAX_NUMBER)]
    sound = {
        "image_size": all(0 < side < MAX_NUMBER for side in facts.image_size or ()),
        "mean": all(abs(value) < MAX_NUMBER for value in facts.mean),
        "std": all(0 < value < MAX_NUMBER for value in facts.std),
        "class_names": len(facts.class_names) in (0, facts.num_classes),
    }
    return wrong + [name for name, is_sound in sound.items() if not is_sound]


def _is(value: Any, hint: Any) -> bool:
    """Return whether a value has the type `hint` of a field of `Facts`."""
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if kind is UnionType:
        return any(_is(value, argument) for argument in arguments)
    if kind is Mapping:
        return isinstance(value, dict) and all(_is(item, arguments[1]) for item in value.values())
    if kind is tuple and arguments[1] is not Ellipsis:
        return isinstance(value, tuple) and len(value) == len(arguments) and all(map(_is, value, arguments))
    if kind is tuple:
        return isinstance(value, tuple) and all(_is(item, arguments[0]) for item in value)
    return type(value) is kind or (kind is float and type(value) is int)
