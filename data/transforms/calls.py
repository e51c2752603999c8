"""The parser of pipelines such as `crop | flip | randaugment(2, 10)`."""

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import Any


def parse_calls(option: str, value: str, known: Mapping[str, Callable[..., Any]]) -> list[Any]:
    """Return the results of the calls in a pipeline such as `a | b(2, 10)`, whose arguments are literals.

    Args:
        option: key of the pipeline, for error messages.
        value: pipeline.
        known: functions by name.

    Raises:
        ValueError: a name or its arguments are not those of a known function; the message lists the functions.
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
    except ValueError:  # A TypeError, because ValueErrors of the functions themselves must pass.
        raise TypeError(f"{ast.unparse(node)} is not a literal") from None
