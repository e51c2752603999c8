"""Parser of pipelines such as `crop | flip | randaugment(2, 10)`, and a base class of their steps."""

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from lineage.configs.registry import check_ranges, field_types


class Checked:
    """Base class of dataclasses whose fields may declare a `Range`."""

    def __post_init__(self):
        for name, kind in field_types(type(self)).items():
            if kind is int and not isinstance(value := getattr(self, name), int):
                raise ValueError(f"{type(self).__name__}.{name} is {value!r}: it must be an integer.")
        check_ranges(type(self).__name__, self)


def parse_calls(option: str, value: str, known: Mapping[str, Callable[..., Any]]) -> list[Any]:
    """Return the results of the calls in the pipeline `value`, of known functions with literal arguments.

    Error messages name the config key `option`.
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
            raise ValueError(f"{option} is {value!r}: {text!r} is not one of {names}.") from error
    return results


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:  # A TypeError, because ValueErrors of the functions themselves must propagate.
        raise TypeError(f"{ast.unparse(node)} is not a literal") from None
