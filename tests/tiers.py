"""Tiers of tests: the first is run by README's command, the thorough one by `.ci/run` too."""

from collections.abc import Callable, Iterable

import pytest


def tiered(
    names: str | tuple[str, ...], cases: Iterable, first: int | Callable[..., bool] = 1, **options
) -> pytest.MarkDecorator:
    """Parametrize a test, with some of the cases in the thorough tier.

    Args:
        names, cases, options: as in `pytest.mark.parametrize`.
        first: the first tier has this number of cases, or those for whose values the function is true.
    """
    marked = []
    for number, case in enumerate(cases):
        if not hasattr(case, "marks"):
            case = pytest.param(case) if isinstance(names, str) else pytest.param(*case)
        if not (first(*case.values) if callable(first) else number < first):
            case = case._replace(marks=[*case.marks, pytest.mark.thorough])
        marked.append(case)
    return pytest.mark.parametrize(names, marked, **options)
