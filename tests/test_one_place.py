"""No file outside of the registries checks which model, task or kind of content it has."""

import ast
from pathlib import Path

import pytest

from lineage.data.sources.base import CONTENT
from lineage.models import MODELS
from lineage.tasks import TASKS

ROOT = Path(__file__).parent.parent
FILES = [
    path
    for room in ("configs", "data", "evaluation", "report", "runs", "tasks", "train")
    for path in sorted((ROOT / room).rglob("*.py"))
    if path.parent.name not in ("small", "paper")
] + [ROOT / "launch.py"]
NAMES = {*MODELS, *TASKS, *CONTENT} - {"generation"}  # an evaluator has this name, too


def violations(tree: ast.AST, names: set[str] = NAMES) -> list[str]:
    """Return the comparisons with names in `names`, and the tests for attributes of a model, in a file."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr"):
            subject = ast.unparse(node.args[0])
            if subject.rpartition(".")[2] in ("model", "student", "teacher") and (
                node.func.id == "hasattr" or len(node.args) == 3
            ):
                found.append(ast.unparse(node))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("model.settings.get"):
            found.append(ast.unparse(node))
        if isinstance(node, ast.Compare):
            if any(ast.unparse(side).endswith("model.settings") for side in node.comparators):
                found.append(ast.unparse(node))
            for side in (node.left, *node.comparators):
                values = side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side]
                if any(isinstance(value, ast.Constant) and value.value in names for value in values):
                    found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_checks_which_model_or_task_it_has(path):
    assert not violations(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", sorted((ROOT / "models").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_of_models_tests_for_attributes(path):
    assert not violations(ast.parse(path.read_text(encoding="utf-8")), set())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_imports_an_architecture(path):
    imports = [
        node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)
    ]
    assert not {node.module for node in imports} & {model.__module__ for model in MODELS.values()}


@pytest.mark.parametrize(
    "source",
    [
        "hasattr(model, 'image_size')",
        "getattr(experiment.model, 'width', 512)",
        "config.model.name == 'vit'",
        "task in ('causal_lm', 'other')",
        "kind == 'tagged_sentences'",
        "'head' in model.settings",
        "self.model.settings.get('num_classes')",
    ],
)
def test_violations_are_detected(source):
    assert violations(ast.parse(source))
