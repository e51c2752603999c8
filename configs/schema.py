"""Config sections from dataclasses: one declaration gives keys, types, defaults, choices and documentation."""

import dataclasses
import difflib
import inspect
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from ml_collections import ConfigDict, FieldReference
from ml_collections.config_dict import placeholder

from lineage.configs.registry import Registry

RESERVED = ("parent", "name")  # fields that Flax adds to every module


class Key(NamedTuple):
    """A key of a config section.

    Attributes:
        name: of the key, as on the command line.
        type: what a value may be, for people: "int", "float or None", "'token' | 'gap' | 'map'".
        default: used unless the config sets another value; None where it must be given or comes from the data.
        documentation: the entry of the docstring's `Attributes:` section.
    """

    name: str
    type: str
    default: Any
    documentation: str


def keys(cls: type) -> list[Key]:
    """Return the keys that a section of `cls` has, in the order of its fields."""
    hints, documented = typing.get_type_hints(cls), documentation(cls)
    return [
        Key(field.name, readable(hints[field.name]), _default(field), documented.get(field.name, ""))
        for field in dataclasses.fields(cls)
        if field.name not in RESERVED
    ]


def section(registry: Registry, name: str, **changes: Any) -> ConfigDict:
    """Return the config section of a registered dataclass, with its defaults and some changes.

    Keys whose default is None, and those that the class lists in `FROM_DATA` (such as the number of classes), stay
    empty until the config or the data give a value of the field's type.

    Raises:
        ValueError: the class has no such key; the message names the nearest one.
    """
    cls = registry[name]
    values = {"name": name}
    hints, from_data = typing.get_type_hints(cls), getattr(cls, "FROM_DATA", ())
    for key in keys(cls):
        empty = key.default is None or key.name in from_data
        values[key.name] = placeholder(_plain_type(hints[key.name])) if empty else key.default
    made = ConfigDict(values)
    for key, value in changes.items():
        made[_known(key, cls)] = value
    return made


def build(registry: Registry, values: ConfigDict, **given: Any) -> Any:
    """Construct what a section describes.

    Args:
        registry: where `values.name` is looked up.
        values: the section. None leaves the class's default.
        given: values of keys that the section leaves None, such as the number of classes that the data have.

    Raises:
        ValueError: a choice that the type does not allow, or what the class's `__post_init__` refuses.
        TypeError: a key that has neither a value nor a default.
    """
    cls = registry[values.name]
    hints = typing.get_type_hints(cls)
    chosen = {key: value for key, value in values.items() if key != "name" and value is not None}
    chosen = {key: value for key, value in given.items() if key in hints} | chosen
    chosen = {_known(key, cls): value for key, value in chosen.items()}
    for key, value in chosen.items():
        if (allowed := choices(hints[key])) and value not in allowed:
            raise ValueError(f"{registry.kind}.{key} is {value!r}. Allowed: {', '.join(map(repr, allowed))}.")
    return cls(**chosen)


def documentation(cls: type) -> dict[str, str]:
    """Return the entries of the `Attributes:` sections of a class and its bases, by attribute."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        text = inspect.cleandoc(base.__doc__ or "")
        body = re.search(r"^Attributes:\n((?:[ ]+.*\n?|\n)+)", text, re.MULTILINE)
        for entry in re.finditer(r"^ {4}([\w, ]+): (.+(?:\n {5,}.+)*)", body.group(1) if body else "", re.MULTILINE):
            found |= {name.strip(): " ".join(entry.group(2).split()) for name in entry.group(1).split(",")}
    return found


def choices(hint: Any) -> list[Any]:
    """Return the values that a type such as `Literal["a", "b"] | None` allows; empty where any value is allowed."""
    parts = (hint, *typing.get_args(hint))
    return [choice for part in parts if typing.get_origin(part) is Literal for choice in typing.get_args(part)]


def readable(hint: Any) -> str:
    """Return a type as people write it."""
    if allowed := choices(hint):
        return " | ".join(map(repr, allowed))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(readable(part) for part in typing.get_args(hint))
    return "None" if hint is types.NoneType else getattr(hint, "__name__", str(hint))


def _plain_type(hint: Any) -> type:
    parts = [part for part in typing.get_args(hint) if part is not types.NoneType] or [hint]
    if typing.get_origin(parts[0]) is Literal:
        return type(typing.get_args(parts[0])[0])
    return typing.get_origin(parts[0]) or parts[0]


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _known(key: str, cls: type) -> str:
    names = [one.name for one in keys(cls)]
    if key in names:
        return key
    nearest = difflib.get_close_matches(key, names, n=1, cutoff=0.7)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"{cls.__name__} has no key {key!r}.{hint} Keys: {', '.join(names)}.")


class Row(NamedTuple):
    """A key of a whole config, as `describe` lists it.

    Attributes:
        key: dotted, such as "optimizer.b1".
        type: allowed values, for people; see `Key`.
        value: in this config.
        default: of the class behind the section; None where there is none.
        documentation: see `Key`.
    """

    key: str
    type: str
    value: Any
    default: Any
    documentation: str


def describe(config: ConfigDict, classes: Mapping[str, type], section: str = "") -> list[Row]:
    """Return every key of a config.

    Args:
        config: the whole config, or a part of it.
        classes: the dataclass behind each section by its dotted key, "" for that of the config itself. Keys without one
            have neither a default nor documentation.
        section: dotted key of the part.
    """
    known = {key.name: key for key in keys(classes[section])} if section in classes else {}
    rows = []
    for name, field in config.items(preserve_field_references=True):
        path = f"{section}.{name}" if section else name
        if isinstance(field, ConfigDict):
            rows += describe(field, classes, path)
        elif name in known:
            rows.append(Row(path, known[name].type, config[name], known[name].default, known[name].documentation))
        else:
            optional = " or None" if isinstance(field, FieldReference) else ""
            rows.append(Row(path, config.get_type(name).__name__ + optional, config[name], None, ""))
    return rows
