"""Contents of a folder in the layout of `transformers` other than the model: class names, preprocessing, tokenizer."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn

from lineage.configs.atomic import write_atomic
from lineage.configs.storage import is_present
from lineage.models.convert.family import num_labels, read_json

PREPROCESSOR, TOKENIZER = "preprocessor_config.json", "tokenizer_config.json"
GENERATION = "generation_config.json"
UNUSED = "N/A"  # name of a label without a class
MAX_SIDE = 1 << 14  # maximum size to which images are resized, in pixels
RESAMPLING = {2: "bilinear", 3: "bicubic"}  # number in Pillow -> our name
FIXED = {"do_rescale": True, "rescale_factor": 1 / 255}  # fields with only one supported value
_HALF = {"image_mean": (0.5,), "image_std": (0.5,), "resample": 2}
_IMAGENET = {"image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225), "resample": 2}
_CLIP = {"image_mean": (0.48145466, 0.4578275, 0.40821073), "image_std": (0.26862954, 0.26130258, 0.27577711)}
_CLIP |= {"resample": 3, "size": {"shortest_edge": 224}, "do_center_crop": True, "crop_size": 224}
# Start of the name of a processor in `transformers` -> its values of fields that a file may omit.
PROCESSORS: dict[str, dict[str, Any]] = {
    "ViT": {**_HALF, "size": 224},
    "DeiT": {**_HALF, "resample": 3, "size": 256, "do_center_crop": True, "crop_size": 224},
    "Beit": {**_HALF, "resample": 3, "size": 224, "crop_size": 224},
    "ConvNext": {**_HALF, "resample": 3, "size": 384},
    "Bit": _CLIP,
    "CLIP": _CLIP,
    "Detr": _IMAGENET,
}
# `model_type` -> start of the name of the processor, for files that do not name one; "ViT" for other models.
OF_MODELS = {"deit": "DeiT", "resnet": "ConvNext", "bit": "Bit", "detr": "Detr"}
# Role of a special token in `tokenizer_config.json` -> its name in `lineage.data.Tokenizer`.
ROLES = {"bos": "begin_of_text", "eos": "end_of_text", "unk": "unknown"}
ROLES |= {role: role for role in ("cls", "sep", "mask", "pad")}


def class_names(folder: Path) -> tuple[str, ...]:
    """Return the names of the classes in the order of their ids; () if `config.json` has none."""
    names = read_json(folder / "config.json").get("id2label") or {}
    if not isinstance(names, dict) or sorted(names) != sorted(map(str, range(len(names)))):
        raise ValueError(f"{folder}/config.json: id2label must map the numbers from 0 on to names.")
    return tuple(str(names[str(number)]) for number in range(len(names)))


def category_ids(folder: Path) -> tuple[int, ...]:
    """Return the ids of the classes in files of COCO; () if `config.json` does not give them.

    The published DETRs have labels without a class (`UNUSED`), so that the other labels have COCO's numbers.
    """
    names = class_names(folder)
    return tuple(range(len(names))) if UNUSED in names else ()


def start_role(folder: Path) -> str:
    """Return the role of the first token of a decoder's input: "pad", as in T5's checkpoints, or "end_of_text".

    Raise ValueError if the folder names a token of another role.
    """
    config = _generation(folder)
    start, ends = config.get("decoder_start_token_id"), end_tokens(folder)
    if start is not None and start == config.get("pad_token_id", 0) and start not in ends:
        return "pad"
    if start is not None and ends and start not in ends:
        given = f"{folder}: decoder_start_token_id is {str(start)[:60]}"
        raise ValueError(f"{given}: it must be pad_token_id or eos_token_id.")
    return "end_of_text"


def end_tokens(folder: Path) -> tuple[int, ...]:
    """Return the tokens that end a text according to `eos_token_id`; () if the folder names none."""
    ids = _generation(folder).get("eos_token_id")
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if wrong := [token for token in ids if type(token) is not int]:
        raise ValueError(f"{folder}: eos_token_id has {str(wrong[0])[:60]}: it must have integers.")
    return tuple(ids)


def excluded_tokens(folder: Path) -> tuple[int, ...]:
    """Return the tokens that are never generated according to `bad_words_ids`; () if the folder has none.

    Raise ValueError if it has sequences of several tokens.
    """
    words = _generation(folder).get("bad_words_ids") or []
    if not (isinstance(words, list) and all(isinstance(word, list) and [*map(type, word)] == [int] for word in words)):
        given = f"{folder}: bad_words_ids is {str(words)[:60]}"
        raise ValueError(f"{given}: it must be a list of lists of one token each.")
    ends = end_tokens(folder)
    return tuple(token for (token,) in words if token not in ends)


def _generation(folder):
    """Return the fields of `config.json`, and of `generation_config.json`, which overrides them."""
    config, path = read_json(folder / "config.json"), folder / GENERATION
    others = read_json(path) if is_present(path) else {}
    return config | {name: value for name, value in others.items() if value is not None}


def is_multi_label(folder: Path) -> bool:
    """Return whether the classes of a classifier have separate probabilities in the pipelines of `transformers`.

    Raise ValueError for a model whose outputs are numbers.
    """
    config = read_json(folder / "config.json")
    if (kind := config.get("problem_type")) == "regression":
        raise ValueError(
            f"{folder}/config.json: problem_type is 'regression', which only the task text_regression supports."
        )
    return kind == "multi_label_classification" or num_labels(config, "") == 1


def preprocessing(folder: Path) -> dict[str, Any]:
    """Return options of image tasks, such as `image_size` and `mean`, from `preprocessor_config.json`; {} without it.

    Raise ValueError if the file has values that no processor of `transformers` has.
    """
    if not is_present(folder / PREPROCESSOR):
        return {}
    config = read_json(folder / PREPROCESSOR)
    kind = config.get("image_processor_type") or config.get("feature_extractor_type")
    kind = kind or OF_MODELS.get(read_json(folder / "config.json").get("model_type"), "ViT")
    try:
        return _preprocessing(config, kind)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{folder / PREPROCESSOR} cannot be used: {str(error)[:200]}.") from None


def _preprocessing(config, kind):
    if (start := next(filter(kind.startswith, PROCESSORS), None)) is None:
        raise ValueError(f"its class is {kind[:60]!r}, which must be one of {', '.join(PROCESSORS)}")
    defaults = PROCESSORS[start] | dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True)
    if unclear := [name for name, value in config.items() if value is None and defaults.get(name) is True]:
        raise ValueError(f"{unclear[0]} is null: it must be true or false")
    config = defaults | {name: value for name, value in config.items() if value is not None}
    if config.get("do_pad") and config.get("pad_size") and not kind.startswith("Detr"):
        raise ValueError(f"pad_size is {str(config['pad_size'])[:60]}: images must not be padded")
    for name, value in FIXED.items():
        if config.get(name) not in (None, value):
            raise ValueError(f"{name} is {str(config[name])[:60]}: it must be {value}")
    options = {n: tuple(map(float, config[f"image_{n}"])) for n in ("mean", "std")}
    if not (all(map(math.isfinite, options.get("mean", ()))) and all(0 < x < math.inf for x in options.get("std", ()))):
        raise ValueError(f"the mean and the standard deviation of pixels are {str(options)[:120]}")
    if config.get("do_normalize") is False:
        options = {"mean": (0.0,), "std": (1.0,)}
    if (number := config["resample"]) not in RESAMPLING:
        raise ValueError(f"resample is {str(number)[:60]}: it must be {' or '.join(map(str, RESAMPLING))}")
    options["resample"] = RESAMPLING[number]
    if config.get("do_resize") is False:
        if config.get("do_center_crop"):
            raise ValueError("do_resize is False and do_center_crop is True: images must be resized before the crop")
        return options | {"image_size": 0}
    if kind.startswith("Detr"):
        return options | _detection(config, options.pop("resample"))
    side = _side(config.get("size"))
    if isinstance(config["size"], dict) and config["size"].get("longest_edge"):
        raise ValueError(f"size is {str(config['size'])[:60]}: only the processor of DETR may have longest_edge")
    return options | _resizing(config, side, kind)


def _detection(config, resample):
    """Return the options of the processor of DETR, whose old files have two numbers, `size` and `max_size`."""
    size = config.get("size")
    if not isinstance(size, dict):
        size = {"shortest_edge": size or 800, "longest_edge": config.get("max_size") or 1333}
    if set(size) != {"shortest_edge", "longest_edge"} or resample != "bilinear":
        given = f"size is {str(size)[:60]} and resample {resample!r}"
        raise ValueError(f"{given}: DETR's must have shortest_edge and longest_edge, and be 'bilinear'")
    return {"image_size": _side(size["longest_edge"]), "shorter_side": _side(size["shortest_edge"])}


def _resizing(config, side, kind):
    """Return the options that resize images to `side` pixels and crop them; raise ValueError if it is None."""
    if side is None:
        raise ValueError(f"size is {str(config['size'])[:60]}: it must be a number, or have shortest_edge or height")
    if kind.startswith("ConvNext"):  # of ResNets too; it crops images below 384 pixels and squashes larger ones
        if not 0 < (fraction := config.get("crop_pct") or 224 / 256) <= 1:
            raise ValueError(f"crop_pct is {str(fraction)[:60]}: it must be above 0 and at most 1")
        if config.get("do_center_crop") and (crop := _side(config.get("crop_size"))) not in (None, side):
            raise ValueError(f"crop_size is {crop}: it must be the size, {side}")
        resized = max(int(side / fraction), side)
        return {"image_size": side, "evaluation_crop": side / resized if side < 384 else 1.0, "squash": side >= 384}
    # A single number as the size means both sides in some processors, unless a file says otherwise.
    size, both = config["size"], config.get("default_to_square", kind.startswith(("ViT", "DeiT", "Beit")))
    options = {"squash": "height" in size if isinstance(size, dict) else bool(both)}
    if config.get("do_center_crop") and (crop := _side(config.get("crop_size"))):
        if crop > side:
            raise ValueError(f"crop_size is {crop}: it must be at most the size of the resized images, {side}")
        return options | {"image_size": crop, "evaluation_crop": crop / side}
    return options | {"image_size": side}


def _side(size):
    """Return the side of a square, or the shorter side, from a number or a dictionary; None for other sizes."""
    if isinstance(size, dict) and size and not {"shortest_edge", "longest_edge", "height"} & {*size}:
        raise ValueError(f"a size is {str(size)[:60]}: it must have shortest_edge, longest_edge, or height and width")
    if isinstance(size, dict) and size.get("height") != size.get("width"):
        raise ValueError(f"a size is {str(size)[:60]}: its height and width must be equal")
    side = (size.get("shortest_edge") or size.get("height")) if isinstance(size, dict) else size
    if side is not None and not (type(side) is int and 0 < side <= MAX_SIDE):
        raise ValueError(f"a size is {str(size)[:60]}: it must be an integer of at most {MAX_SIDE:,}")
    return side


def save_labels(folder: Path, names: Sequence[str], problem: str = "") -> None:
    """Write the names of the classes to `config.json`, if its model has at least as many classes, and its problem type.

    `problem`, if not empty, determines what pipelines of `transformers` compute: "multi_label_classification", a
    separate probability of each class; "regression", the number itself.
    """
    config = read_json(folder / "config.json")
    known = config.get("id2label", {})
    if problem:
        config["problem_type"] = problem
    if names and len(known) >= len(names):
        labels = {**known, **{str(number): name for number, name in enumerate(names)}}
        config |= {"id2label": labels, "label2id": {name: int(number) for number, name in labels.items()}}
    write_atomic(folder / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def save_preprocessing(folder: Path, model: nn.Module, options: Mapping[str, Any]) -> None:
    """Write `preprocessor_config.json`, with which `transformers` preprocesses images as the task of a run does.

    `options` are those of the task: `mean`, `std`, and possibly `image_size`, `resample`, `evaluation_crop`, `squash`.
    """
    side, channels = model.image_size, model.channels
    numbers = {n: [float(x) for x in options[n]] * (channels if len(options[n]) == 1 else 1) for n in ("mean", "std")}
    config = {
        "do_convert_rgb": channels == 3,
        "do_resize": True,
        "resample": {name: number for number, name in RESAMPLING.items()}[options.get("resample", "bilinear")],
        **FIXED,
        "do_normalize": True,
        **{f"image_{name}": values for name, values in numbers.items()},
    }
    if "shorter_side" in options:
        sides = {"shortest_edge": options["shorter_side"] or side, "longest_edge": side}
        config |= {"image_processor_type": "DetrImageProcessor", "size": sides, "do_pad": True}
    else:
        kept = options.get("image_size", side) == 0  # the size of images, whose central fraction is not taken
        resized = side if kept else round(side / options.get("evaluation_crop", 1.0))
        sides = dict.fromkeys(("height", "width") if options.get("squash") else ("shortest_edge",), resized)
        crop = {"do_center_crop": True, "crop_size": {"height": side, "width": side}}
        config |= {"image_processor_type": "CLIPImageProcessor", "size": sides, **crop}
    write_atomic(folder / PREPROCESSOR, json.dumps(config, indent=2) + "\n")


def save_tokenizer(folder: Path, names: Mapping[str, str], model: Any, length: int | None) -> None:
    """Write `tokenizer_config.json`: the special tokens by role, the maximum length and the model's inputs."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {f"{theirs}_token": names[ours] for theirs, ours in ROLES.items() if ours in names}
    if length is not None:
        config["model_max_length"] = length
    if model.num_segments > 1:  # `transformers` 5 omits them by default
        config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    write_atomic(folder / TOKENIZER, json.dumps(config, indent=2) + "\n")


def save_token_ids(
    folder: Path,
    begin: int | None,
    ends: Sequence[int],
    pad: int | None,
    start: int | None,
    excluded: Sequence[int] = (),
) -> None:
    """Write the ids of the tokens with which `transformers` generates text to `config.json`.

    Otherwise, they would be those of the vocabulary of the published models.

    Args:
        begin: token before each text; None if there is none.
        ends: tokens that end a text, of which the first is written after each text.
        pad: padding; None if the tokenizer has no such token.
        start: first token of a decoder's input; None for a model without an encoder.
        excluded: tokens that are never generated.
    """
    config, end = read_json(folder / "config.json"), next(iter(ends), None)
    if begin is not None or config.get("eos_token_id") != end:
        config["bos_token_id"] = end if begin is None else begin
    config |= {"eos_token_id": [*ends] if len(ends) > 1 else end, "pad_token_id": pad}
    config.pop("bad_words_ids", None)  # the padding token of published Marian models
    if excluded:
        config["bad_words_ids"] = [[token] for token in excluded]
    if start is not None:
        config |= {"decoder_start_token_id": start, "forced_bos_token_id": begin, "forced_eos_token_id": None}
    write_atomic(folder / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
