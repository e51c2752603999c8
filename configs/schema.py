"""Config sections from dataclasses: one declaration gives keys, types, defaults, choices and documentation."""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from ml_collections import ConfigDict, FieldReference
from ml_collections.config_dict import placeholder

from lineage.configs.registry import (
    Needs,
    Range,
    Registry,
    choices,
    declared,
    field_types,
    from_data,
    has_effect,
    nearest,
    typed,
    variants,
)

UNITS = ("steps", "epochs", "examples", "percent")  # units of durations
NAME = "Registered name of the class:"
VARIANT = "Named settings of the class; the keys that it sets are empty, and values given for them take precedence."


class Section(ConfigDict):
    """Section of a config whose `name` is fixed, as its keys depend on it, and in which a duration has one unit.

    Setting `total_steps` unsets `total_epochs` and the others; setting a unit to None changes no other.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "name" and self.get(key, value) != value:
            change = f"choose(config, PART, {value!r}) of lineage.configs.base, where PART is 'model', 'task', ..."
            raise ValueError(f"the section {self.name!r} cannot become {value!r} with the same keys: use {change}")
        duration, _, unit = str(key).rpartition("_")
        is_duration = unit in UNITS and f"{duration}_epochs" in self  # grad_accum_steps is not a duration
        if is_duration and value is not None and not isinstance(value, FieldReference):
            for other in (f"{duration}_{other}" for other in UNITS):
                if other in self:
                    super().__setitem__(other, None)
        super().__setitem__(key, value)


class Key(NamedTuple):
    """A key of a config section."""

    name: str  # as on the command line
    type: str  # allowed values, as text: "int, 1 or more", "float or None", "'token' | 'gap' | 'map'"
    default: Any  # None if the value must be given or comes from the data
    documentation: str  # entry of the `Attributes:` section of the docstring


def keys(cls: type) -> list[Key]:
    """Return the keys that a section of `cls` has: its variant, if it has any, and its fields in order."""
    documented, limits = documentation(cls), declared(cls, Range)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    listed = [Key("variant", " | ".join(map(repr, variants(cls))), None, VARIANT)] if variants(cls) else []
    for name, hint in field_types(cls).items():
        field = fields[name]
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = None if default is dataclasses.MISSING else default
        listed.append(Key(name, readable(hint, limits.get(name)), default, documented.get(name, "")))
    return listed


def plain(cls: type) -> dict[str, Any]:
    """Return the keys of a dataclass with their values in a section; a field that is a dataclass is a section too.

    A key is empty (None, of the field's type) if the default is None, if a variant of the class sets the field (see
    `resolve`), or if the data determine it (`FROM_DATA`). `construct` is the inverse.
    """
    hints, values = field_types(cls) | {"variant": str}, {}
    empty = {*from_data(cls), *(key for settings in variants(cls).values() for key in settings)}
    for name, _, default, _ in keys(cls):
        if dataclasses.is_dataclass(hints[name]):
            values[name] = ConfigDict(plain(hints[name]))
        else:
            values[name] = placeholder(_plain_type(hints[name])) if default is None or name in empty else default
    return values


def construct(cls: type, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Construct a dataclass from a section made by `plain`; additional keys are ignored."""
    arguments = {}
    for name, hint in field_types(cls).items():
        value = values[name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            value = construct(hint, value, f"{prefix}{name}.")
        elif value is not None and (allowed := choices(hint)) and value not in allowed:
            raise ValueError(f"{prefix}{name} is {value!r}.{nearest(value, allowed)}")
        arguments[name] = value
    return cls(**arguments)


def parse(registry: Registry, text: str) -> ConfigDict:
    """Return the section described by a shorthand: a name, or a name and the first option, such as "text:PATH"."""
    name, colon, option = text.partition(":")
    values = section(registry, name)
    if colon:
        known = keys(registry[name])
        if not known:
            raise ValueError(f"The {registry.kind} {name!r} has no options: {text!r} must be {name!r}.")
        first = known[0].name
        values[first] = typed(f"{registry.kind}.{first}", option, values.get_type(first))
    return values


def swapped(registry: Registry, old: ConfigDict, text: str) -> ConfigDict:
    """Return the section of the class `text` (see `parse`), with the values of common keys that were changed.

    A value is not kept if the key has another type, such as the numbers of heads of all stages in place of one number.
    """
    new = parse(registry, text)
    if old.name == new.name:
        return new if ":" in text else old
    old_defaults, new_defaults = section(registry, old.name), section(registry, new.name)
    for key, value in old.items():
        changed = key in old_defaults and value != old_defaults[key]
        common = key in new and key not in ("name", "variant") and old.get_type(key) is new.get_type(key)
        if changed and common and new[key] == new_defaults[key]:
            new[key] = value
    return new


def section(registry: Registry, name: str, **changes: Any) -> ConfigDict:
    """Return the config section of a registered dataclass, with its defaults (see `plain`) and some changes.

    A field that a variant describes by a dictionary, such as a detector's backbone, is a section of its own; a change
    of it is a dictionary.

    Raises:
        ValueError: the class has no such key; the message names the nearest one.
    """
    cls = registry[name]
    values = Section({"name": name} | plain(cls))
    for key in field_types(cls):
        if parts := [settings[key] for settings in variants(cls).values() if isinstance(settings.get(key), Mapping)]:
            values[key] = _part(registry, parts, changes.pop(key, {}))
    for key, value in changes.items():
        if key not in values:
            raise ValueError(f"{cls.__name__} has no key {key!r}.{nearest(key, [known.name for known in keys(cls)])}")
        values[key] = value
    return values


def build(registry: Registry, values: Mapping[str, Any], **given: Any) -> Any:
    """Construct the entry of the registry that a section describes; raises the errors of `Registry.build`.

    Args:
        values: the section. None leaves the field to `given`, to the variant and to the class's default, in this order.
        given: values that the data determine, such as the number of classes; those that the class does not have are
            ignored.
    """
    values = values.to_dict() if isinstance(values, ConfigDict) else dict(values)
    known = {key: value for key, value in given.items() if key in field_types(registry[values["name"]])}
    return registry.build(**known | {key: value for key, value in values.items() if value is not None})


def resolve(registry: Registry, section: ConfigDict, given: Mapping[str, Any]) -> None:
    """Set the keys that are empty because of variants to the values that `build` would use.

    `given` are values that the task determines. Keys that the data determine (`FROM_DATA`) stay empty.
    """
    for part, key, value in _implied(registry, section, given):
        if part[key] is None:
            part[key] = value


def release(registry: Registry, section: ConfigDict, given: Mapping[str, Any]) -> None:
    """Empty the keys that `resolve` would set to their present values, so that another variant can be chosen."""
    for part, key, value in [*_implied(registry, section, given)]:
        if part[key] == value:
            part[key] = None


def _implied(registry, section, given, outer=types.MappingProxyType({})):
    """Yield (section, key, value) for the keys of a section and its parts that take a value from elsewhere if empty.

    `outer` are the values from a variant that has the section as a part.
    """
    cls, variant = registry[section.name], section.get("variant") or outer.get("variant")
    defaults = {key.name: key.default for key in keys(cls)} | variants(cls).get(variant, {})
    shared = {key: None for settings in variants(cls).values() for key in settings if key not in from_data(cls)}
    for key in shared | {key: None for key in outer if key in section and key != "name"}:
        value = {**defaults, **given, **outer}[key]
        if isinstance(section[key], ConfigDict):
            yield from _implied(registry, section[key], {}, value if isinstance(value, Mapping) else {})
        else:
            yield section, key, value


def documentation(cls: type) -> dict[str, str]:
    """Return the entries of the `Attributes:` sections of a class and its bases, by attribute."""
    entries: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        text = inspect.cleandoc(base.__doc__ or "")
        body = re.search(r"^Attributes:\n((?:[ ]+.*\n?|\n)+)", text, re.MULTILINE)
        for entry in re.finditer(r"^ {4}([\w, ]+): (.+(?:\n {5,}.+)*)", body.group(1) if body else "", re.MULTILINE):
            entries |= {name.strip(): " ".join(entry.group(2).split()) for name in entry.group(1).split(",")}
    return entries


def readable(hint: Any, limits: Range | None = None) -> str:
    """Return a readable form of a type and its range, such as "float, 0 or more and below 1"."""
    if limits:
        return f"{readable(hint)}, {limits}"
    if allowed := choices(hint):
        optional = [None] if types.NoneType in typing.get_args(hint) else []
        return " | ".join(map(repr, [*allowed, *optional]))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(readable(part) for part in typing.get_args(hint))
    return "None" if hint is types.NoneType else getattr(hint, "__name__", str(hint))


def _part(registry, parts, changes):
    """Return the section of a field that variants describe by dictionaries; the keys of these are empty."""
    named = changes.get("name", parts[0]["name"])
    values = section(registry, named)
    for part in parts if named == parts[0]["name"] else []:
        for key in part.keys() - {"name", "variant"}:
            values[key] = placeholder(_plain_type(field_types(registry[named])[key]))
    values.update({key: value for key, value in changes.items() if key != "name"})
    return values


def _plain_type(hint: Any) -> type:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    if typing.get_origin(hint) is Literal:
        return type(typing.get_args(hint)[0])
    return typing.get_origin(hint) or hint


def update(config: ConfigDict, values: Mapping[str, Any], prefix: str = "") -> None:
    """Set the values of a nested dictionary, read from JSON, in a config.

    An unknown key that is None is ignored: an earlier version had it, and it was unset. Other unknown keys, and values
    of another type, such as None or True for a number, raise ValueError.
    """
    fields = dict(config.items(preserve_field_references=True))
    for key, value in values.items():
        if key not in config and value is None:
            continue
        if key not in config:
            raise ValueError(f"Unknown config key {prefix + key!r}.{nearest(key, config)}")
        if isinstance(config[key], ConfigDict):
            update(config[key], value, f"{prefix}{key}.")
        else:
            is_optional = isinstance(fields[key], FieldReference)
            config[key] = typed(f"{prefix}{key}", tuples(value), config.get_type(key), is_optional)


def tuples(value: Any) -> Any:
    """Return a JSON value with its lists converted to tuples, as in configs."""
    if isinstance(value, Mapping):
        return {key: tuples(item) for key, item in value.items()}
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def classes(registry: Registry, section: ConfigDict, key: str) -> dict[str, type]:
    """Return the class of a section and of the sections in it, such as a detector's backbone, by their dotted keys."""
    by_key = {key: registry[section.name]}
    for name, value in section.items():
        if isinstance(value, ConfigDict):
            by_key |= classes(registry, value, f"{key}.{name}")
    return by_key


def describe(config: ConfigDict, classes: Mapping[str, type], section: str = "") -> dict[str, tuple[Key, Any]]:
    """Return the keys of a config, or of its section `section`, with their values, by dotted name.

    Args:
        classes: the dataclass of each section by dotted key, "" for the config itself. Keys of other sections have
            neither a default nor documentation.
    """
    known = {key.name: key for key in keys(classes[section])} if section in classes else {}
    if section in classes and "name" in config:
        summary = (inspect.getdoc(classes[section]) or "").partition("\n")[0]
        known["name"] = Key("name", "str", None, f"{NAME} {summary}")
    described: dict[str, tuple[Key, Any]] = {}
    for name, field in config.items(preserve_field_references=True):
        path = f"{section}.{name}" if section else name
        if isinstance(field, ConfigDict):
            described |= describe(field, classes, path)
        else:
            optional = " or None" if isinstance(field, FieldReference) else ""
            undocumented = Key(name, config.get_type(name).__name__ + optional, None, "")
            described[path] = known.get(name, undocumented), config[name]
    return described


def without_effect(config: ConfigDict, resolved: ConfigDict, classes: Mapping[str, type]) -> Iterator[str]:
    """Yield a note for each key that differs from its default, but has no effect because of another key (see `Needs`).

    `resolved` is the config with the values of variants and of the task; `classes` are as in `describe`.
    """
    chosen, effective = describe(config, classes), describe(resolved, classes)
    for section, cls in classes.items():
        for name, needs in declared(cls, Needs).items():
            path, other = (f"{section}.{key}".removeprefix(".") for key in (name, needs.field))
            (key, value), (_, condition) = chosen[path], effective[other]
            if value not in (None, key.default) and not has_effect(cls, name, {needs.field: condition}):
                state = "empty" if condition in ("", ()) else repr(condition)
                yield f"{path} has no effect, because {other} is {state}."
