"""Tiers of tests: the README command runs the first, `.ci/run` also the thorough one."""

from collections.abc import Callable, Iterable

import pytest


def tiered(
    names: str | tuple[str, ...],
    cases: Iterable,
    first: int | Callable[..., bool] = 1,
    slow: Callable[..., bool] = lambda *values: False,
    **options,
) -> pytest.MarkDecorator:
    """Parametrize a test, with some cases in the later tiers.

    Args:
        names, cases, options: as in `pytest.mark.parametrize`.
        first: number of cases in the first tier, or a function of their values that selects them.
        slow: function that selects cases of the third tier.
    """
    marked = []
    for number, case in enumerate(cases):
        if not hasattr(case, "marks"):
            case = pytest.param(case) if isinstance(names, str) else pytest.param(*case)
        if not (first(*case.values) if callable(first) else number < first):
            case = case._replace(marks=[*case.marks, pytest.mark.slow if slow(*case.values) else pytest.mark.thorough])
        marked.append(case)
    return pytest.mark.parametrize(names, marked, **options)
