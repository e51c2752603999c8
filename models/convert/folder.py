"""Reading and writing of a folder in the layout of `transformers`: `config.json` and safetensors files."""

import contextlib
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from lineage import models
from lineage.configs.atomic import replacing, write_atomic
from lineage.models.convert import vit_npz
from lineage.models.convert.family import ACTIVATIONS, FAMILIES, read_json, rearrange

MAX_DEPTH = 1000  # maximum number of layers of a model in a folder
MAX_BLOCKS = 200  # maximum number of blocks of all its stages, which are not scanned
MAX_STAGES = 64  # maximum number of values of a setting
DTYPES = "F64", "F32", "F16", "BF16"  # of the tensors in a file
MAX_TENSORS = 100_000  # maximum number of tensors of a model
MAX_HEADER = 20_000_000  # maximum number of bytes of a file that describe its tensors
SHARD = re.compile(r"[^/\\\x00-\x1f]{1,200}\.safetensors")


def load(
    folder: str | os.PathLike, dtype: DTypeLike = jnp.float32, *, target: nn.Module | None = None, **settings
) -> tuple[nn.Module, dict]:
    """Return the model in a folder and its variables.

    Args:
        folder: folder with `config.json` and `model.safetensors`, or shards and `model.safetensors.index.json`; or an
            `.npz` file of google-research/vision_transformer, see `vit_npz`.
        dtype: dtype of the variables, which may differ from that of the file.
        target: model to initialize with the variables: if it needs a pooler, which the class of an encoder in the
            folder ignores, the model is returned with its pooler and without its head.
        settings: fields of the model, which override those of the folder: `dropout`, `remat`, `attend`...

    Raises:
        FileNotFoundError: the folder or one of its files is missing.
        ValueError: a file is corrupt, or its model is not supported.
    """
    folder = Path(folder)
    if folder.suffix == ".npz":
        return vit_npz.load(folder, dtype, **settings)
    with _errors_named(folder, config := read_json(folder / "config.json")):
        family, files, model, kinds = _open(folder, config, settings, target)
        params = _read(family, model, files, _merge(kinds), dtype)
    arrays = {kind: {path: jnp.asarray(params[path]) for path in paths} for kind, paths in kinds.items()}
    return model, {kind: unflatten_dict(flat, sep="/") for kind, flat in arrays.items()}


def describe(folder: str | os.PathLike) -> tuple[nn.Module, dict[str, tuple[int, ...]]]:
    """Return the model in a folder and the shapes of its variables by path, without their values; raise as `load`."""
    folder = Path(folder)
    if folder.suffix == ".npz":
        model, variables = vit_npz.load(folder)
        return model, {path: value.shape for path, value in flatten_dict(variables["params"], sep="/").items()}
    with _errors_named(folder, config := read_json(folder / "config.json")):
        _, _, model, kinds = _open(folder, config, {})
    return model, _merge(kinds)


def save(folder: str | os.PathLike, model: nn.Module, variables: dict) -> None:
    """Write `config.json` and `model.safetensors`, in the parameters' dtype.

    Settings that only matter in training, such as `stochastic_depth` and `remat`, are omitted.

    Raises:
        ValueError: `transformers` has no such model, or the variables are not the model's.
        OSError: the folder cannot be written to; existing files are kept.
    """
    config = config_of(model)
    family = FAMILIES[config["model_type"]]
    kinds = _shapes(family, model)
    params = _merge({kind: flatten_dict(variables[kind], sep="/") for kind in kinds})
    _match(_merge(kinds), {path: value.shape for path, value in params.items()})
    config["dtype"] = str(next(iter(params.values())).dtype)
    # safetensors would write the elements of a non-contiguous array in the wrong order.
    tensors = {name: np.ascontiguousarray(array) for name, array in _tensors(family, model, params)}
    tensors |= family.additional(tensors)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(target := folder / "model.safetensors") as path:
        mode = path.stat().st_mode
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{target} cannot be written: {error}.") from None
        path.chmod(mode)  # the library has replaced the file by one that only its owner can read
    write_atomic(folder / "config.json", json.dumps(config, indent=2) + "\n")


def config_of(model: nn.Module) -> dict[str, Any]:
    """Return the `config.json` of a model in `transformers`; raise ValueError if it has no such model."""
    family = FAMILIES[kind := _model_type(model)]
    config = {name: family.value(model, setting) for name, (setting, _) in family.fields.items()}
    config |= {"architectures": [next(iter(family.architectures))], "model_type": kind}
    return config | family.fixed | family.config(model)


def _model_type(model: nn.Module) -> str:
    """Return the `model_type` of a model in `transformers`; raise ValueError if it has no such model."""
    classes = {kind: models.MODELS[family.model] for kind, family in FAMILIES.items()}
    for kind, cls in classes.items():
        if type(model) is cls and FAMILIES[kind].fits(model):
            return kind
    if own := [dict(FAMILIES[kind].kind) for kind, cls in classes.items() if type(model) is cls]:
        given = {name: getattr(model, name) for name in own[0]}
        needed = " or ".join(map(str, own))
        raise ValueError(
            f"a {type(model).__name__} with {given} cannot be written for `transformers`: it must have {needed}."
        )
    known = ", ".join(dict.fromkeys(cls.__name__ for cls in classes.values()))
    raise ValueError(f"a {type(model).__name__} cannot be written for `transformers`: it must be one of {known}.")


def _open(folder, config, settings, target=None):
    """Return the family, the files by tensor, the model, and the shapes of its variables by collection and path."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"model_type is {_short(kind)}: it must be one of {', '.join(sorted(FAMILIES))}.")
    family, files = FAMILIES[kind], _files(folder)
    weights = sum(math.prod(file.get_slice(name).get_shape()) for name, file in files.items())
    settings = _settings(family, config, files, settings)
    settings |= family.settings_for(target, settings, files)
    limit = 2 * weights + 1_000_000  # of the arrays that are created before `_read` compares all sizes exactly
    _check_sizes(settings, limit)
    model = models.build(family.model, **settings)
    kinds = _shapes(family, model)
    needed = sum(map(math.prod, _merge(kinds).values()))
    if needed > limit:
        raise ValueError(f"config.json describes a model of {needed:,} weights: the files have {weights:,}.")
    return family, files, model, kinds


@contextlib.contextmanager
def _errors_named(folder, config):
    """Prefix error messages with the folder, and turn errors caused by an unexpected config.json into ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:150]}"
        raise ValueError(f"{folder}: config.json is not that of a {config['model_type']!r} ({reason}).") from error


def _read(family, model, files, shapes, dtype):
    """Return the parameters and statistics with these shapes, by path, from files that contain nothing else."""
    # The expected tensors are those to which our parameters would be written.
    placeholders = {path: np.broadcast_to(False, shape) for path, shape in shapes.items()}
    expected = {name: array.shape for name, array in _tensors(family, model, placeholders)}
    copies = {copy: original for copy, original in family.tied if original in expected and copy not in expected}
    names = {name: _name_in_files(family, name, files) for name in [*expected, *copies]}
    ignored = family.ignored(model)
    known = {name for name in files if not re.fullmatch(ignored, name)} - {names[copy] for copy in copies}
    actual = {name: tuple(files[name].get_slice(name).get_shape()) for name in files if name in known}
    _match({names[name]: shape for name, shape in expected.items()}, actual)

    def read(name):
        kind = files[names[name]].get_slice(names[name]).get_dtype()
        if kind not in DTYPES:
            raise ValueError(f"tensor {name} has dtype {kind}: it must be one of {', '.join(DTYPES)}.")
        with np.errstate(over="ignore"):
            array = files[names[name]].get_tensor(names[name]).astype(dtype, copy=False)
        if not np.isfinite(array).all():
            raise ValueError(f"tensor {name} has values that are not finite in {array.dtype}.")
        return array

    for copy, original in copies.items():
        if names[copy] in files and not np.array_equal(read(copy), read(original)):
            raise ValueError(f"tensor {copy} differs from {original}: the model has one tensor for both.")
    for name, value in family.constants(model).items():
        if not np.allclose(read(name), value, atol=1e-2):  # in bfloat16 too
            raise ValueError(f"tensor {name} differs from the constant that the model computes.")
    params = {path: np.empty(shape, dtype) for path, shape in shapes.items()}
    for rule in family.rules(model):
        for name, paths, index in rule.places(shapes):
            array = read(name)
            if rule.layout:
                array = rearrange(array, *rule.layout.split("->"), _sizes(family, model) | {"n": len(paths)})
            for path, part in zip(paths, array if len(paths) > 1 else [array]):
                params[path][index] = part
    return params


def _name_in_files(family, name, files):
    """Return the name of a tensor in the files, which may lack the prefix, have an old suffix or differ entirely."""
    suffixes = {"": "", **family.old}
    names = [name.removesuffix(new) + old for new, old in suffixes.items() if name.endswith(new)] + [family.other(name)]
    candidates = [candidate for full in names for candidate in (full.removeprefix(family.prefix), full)]
    return next((candidate for candidate in candidates if candidate in files), name)


def _shapes(family, model):
    """Return the shapes of the model's parameters, and of its statistics if it has any, by collection and path."""
    variables = jax.eval_shape(model.init, jax.random.key(0), *family.example(model))
    kinds = {kind: flatten_dict(variables[kind], sep="/") for kind in ("params", "statistics") if kind in variables}
    return {kind: {path: value.shape for path, value in flat.items()} for kind, flat in kinds.items()}


def _merge(kinds):
    """Return one dictionary of the paths of all collections, which are distinct."""
    return {path: value for flat in kinds.values() for path, value in flat.items()}


def _sizes(family, model):
    return {letter: getattr(model, setting) for letter, setting in family.sizes.items()}


def _tensors(family, model, params):
    """Yield the name and the value of each tensor of the reference."""
    for rule in family.rules(model):
        for name, paths, index in rule.places({path: value.shape for path, value in params.items()}):
            parts = [np.asarray(params[path][index]) for path in paths]
            array = np.stack(parts) if len(parts) > 1 else parts[0]
            if rule.layout:
                array = rearrange(array, *rule.layout.split("->")[::-1], _sizes(family, model) | {"n": len(paths)})
            yield name, array
    yield from family.constants(model).items()


def _settings(family, config, names, overrides):
    """Return the model settings from the reference config, with overrides applied."""
    for synonym, name in family.synonyms.items():
        if synonym in config and config.setdefault(name, config[synonym]) != config[synonym]:
            given = f"{name} is {_short(config[name])} and {synonym} is {_short(config[synonym])}"
            raise ValueError(f"{given}: they must be equal, as both are names of one field.")
    architecture = (config.get("architectures") or [*family.architectures])[0]
    fixed = [(name, config.get(name, value), (value,)) for name, value in family.fixed.items()]
    fixed += [("is_causal", config.get("is_causal", family.causal), (family.causal,))]
    for name, value, allowed in [("architectures", architecture, family.architectures), *fixed]:
        if value not in allowed:
            texts = ("null or absent" if option is None else repr(option) for option in allowed)
            raise ValueError(f"{name} is {_short(value)}: it must be {' or '.join(texts)}.")
    settings, origin = {**family.settings(config, architecture, names), **family.kind, **overrides}, {}
    for name, (setting, default) in family.fields.items():
        if setting in overrides:
            continue
        value = _value(name, setting, config.get(name, default), default)
        if settings.setdefault(setting, value) != value:
            given = f"{origin[setting]} is {settings[setting]!r} and {name} is {value!r}"
            raise ValueError(f"{given}: the model has one setting for both: choose it in load(folder, {setting}=...).")
        origin.setdefault(setting, name)
    return settings


def _value(name, setting, value, default):
    if setting == "activation":
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise ValueError(f"{name} is {_short(value)}: it must be one of {', '.join(ACTIVATIONS)}.")
        return ACTIVATIONS[value]
    if isinstance(default, bool) and value not in (None, False, True):
        raise ValueError(f"{name} is {_short(value)}: it must be true or false.")
    if isinstance(default, bool | tuple):
        return type(default)(value)
    kind, wanted = int, "an integer of at least 1"
    if isinstance(default, float):
        kind, wanted = float, "a number of at least 0"
    if value is None and default is None:
        return None
    if type(value) not in (int, kind) or not (kind is int) <= value < math.inf:
        raise ValueError(f"{name} is {_short(value)}: it must be {wanted}.")
    return value


def _check_sizes(settings, limit):
    """Raise ValueError if a setting is too large for a model with at most `limit` weights."""
    for name, value in settings.items():
        if isinstance(value, nn.Module):  # a backbone
            _check_sizes(vars(value), limit)
        numbers = [number for number in (value if isinstance(value, tuple) else (value,)) if type(number) is int]
        if len(numbers) > MAX_STAGES:
            raise ValueError(f"{name} has {len(numbers):,} values: it must have at most {MAX_STAGES}.")
        largest, maximum = max(numbers, default=0), MAX_DEPTH if name.endswith("depth") else limit
        if name == "depths":
            largest, maximum = sum(numbers), MAX_BLOCKS
        if largest > maximum:
            raise ValueError(f"{name} is {_short(value)}: it must be at most {maximum:,} for the weights in the files.")
    size, patch = (settings.get(name) or 0 for name in ("image_size", "patch_size"))
    width = max(settings.get(name) or 1 for name in ("width", "decoder_width"))
    if patch and (size // patch) ** 2 * width > limit:  # a computed table of positions
        raise ValueError(f"image_size is {size:,}, in patches of {patch}: too large for the weights in the files.")
    if type(window := settings.get("window")) is int and settings.get("depths") and window**4 > limit:
        raise ValueError(f"window is {window:,}: its pairs of tokens are too many for the weights in the files.")


def _short(value):
    """Return a value of `config.json` as text of at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _match(expected, actual):
    """Raise ValueError unless both dictionaries have the same names with the same shapes."""
    for names, what in ((expected.keys() - actual, "missing"), (actual.keys() - expected, "unexpected")):
        if names:
            more = ", ..." if len(names) > 3 else "."
            raise ValueError(f"tensors are {what}: {', '.join(sorted(names)[:3])}{more}")
    for name, shape in expected.items():
        if actual[name] != shape:
            raise ValueError(f"tensor {name} has shape {_short(actual[name])}: it must be {shape}.")


def _files(folder):
    """Return the open file of each tensor, by the tensor's name."""
    paths, index = [folder / "model.safetensors"], folder / "model.safetensors.index.json"
    if not paths[0].exists() and index.exists():
        names = read_json(index).get("weight_map")
        names = list(names.values()) if isinstance(names, dict) else [names]
        if wrong := [name for name in names if not isinstance(name, str) or not SHARD.fullmatch(name)]:
            raise ValueError(f"{index} names {_short(wrong[0])}: `weight_map` must give names of files in the folder.")
        if len(names := sorted({*names})) > MAX_TENSORS:
            raise ValueError(f"{index} names {len(names):,} files: it must name at most {MAX_TENSORS:,}.")
        paths = [folder / name for name in names]
    files = {}
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: weights are read from safetensors only.")
        with path.open("rb") as content:
            size = int.from_bytes(content.read(8), "little")
        if MAX_HEADER < size <= path.stat().st_size:  # the file is not one of another kind
            raise ValueError(f"{path} has a header of {size:,} bytes: it must have at most {MAX_HEADER:,}.")
        try:
            file = safe_open(path, "numpy")
        except SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file: {str(error)[:200]}.") from None
        if (count := len(files) + len(file.keys())) > MAX_TENSORS:
            raise ValueError(f"the files have {count:,} tensors: they must have at most {MAX_TENSORS:,}.")
        if twice := files.keys() & file.keys():
            raise ValueError(f"tensor {min(twice)} is in two files, one of which is {path.name}: it must be in one.")
        files |= dict.fromkeys(file.keys(), file)
    return files
