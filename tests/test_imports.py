"""Import rules between packages, checked in the sources, so that imports inside functions count too."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ARRAYS = {"jax", "flax", "numpy", "scipy", "jaxtyping"}
# package -> (packages of the project, other libraries) that it may import besides the standard library, itself
# and `EVERYWHERE`
RULES = {
    "metrics": (set(), ARRAYS | {"nltk", "sacrebleu", "ot"}),
    "models.layers": ({"models.kernels"}, ARRAYS),
    "models.kernels": ({"models.layers"}, ARRAYS),
    "models.convert": ({"models", "models.layers", "configs.registry"}, ARRAYS | {"safetensors", "ml_dtypes"}),
    "models": ({"models.layers", "models.kernels", "configs.registry"}, ARRAYS | {"qwix"}),
    "data": (
        {"configs.registry"},
        {
            "numpy",
            "grain",
            "array_record",
            "tensorflow_datasets",
            "etils",
            "tokenizers",
            "pyarrow",
            "sklearn",
            "PIL",
            "absl",
            "babel",
        },
    ),
    "tasks": ({"models", "data", "metrics", "configs.registry"}, ARRAYS | {"optax"}),
    "evaluation": (
        {"tasks", "models", "models.convert", "data", "metrics", "configs.registry"}
        | {"runs.folder", "runs.locks", "runs.provenance"},
        ARRAYS | {"sklearn", "lm_eval"},
    ),
    "train.adapters": ({"configs.registry"}, ARRAYS),
    "train.optimizer": ({"models", "configs.registry", "train.adapters"}, ARRAYS | {"optax"}),
    "train": (
        {
            "train.adapters",
            "train.optimizer",
            "evaluation",
            "tasks",
            "models",
            "models.convert",
            "models.kernels",
            "data",
            "metrics",
            "report",
            "runs.data_record",
            "runs.folder",
            "runs.locks",
            "runs.process",
            "runs.progress",
            "runs.provenance",
            "runs.remote",
            "configs",
            "configs.registry",
            "configs.schema",
        },
        ARRAYS | {"optax", "orbax", "tensorstore", "etils", "ml_collections", "tensorboardX", "wandb"},
    ),
    "report": (
        {"runs", "runs.data_record", "runs.folder", "runs.process", "runs.progress"},
        {"numpy", "scipy", "matplotlib", "markupsafe"},
    ),
    "runs.folder": (set(), set()),
    "runs.data_record": ({"runs.folder"}, set()),
    "runs.locks": (set(), set()),
    "runs.provenance": (set(), set()),
    "runs.process": ({"runs.folder", "runs.locks"}, set()),
    "runs.progress": ({"runs.folder", "runs.locks", "runs.process"}, {"rich"}),
    "runs.remote": ({"runs.folder", "runs.locks", "runs.process"}, set()),
    "runs": (
        {"runs.folder", "runs.locks", "runs.process", "runs.progress", "runs.remote"},
        {"numpy", "rich", "optuna", "submitit"},
    ),
    "configs.atomic": (set(), set()),
    "configs.cache": (set(), set()),
    "configs.directions": (set(), set()),
    "configs.hub": (set(), {"huggingface_hub"}),
    "configs.storage": ({"configs.hub", "configs.cache"}, {"fsspec"}),
    "configs.registry": (set(), {"ml_collections"}),
    "configs.schema": ({"configs.registry"}, {"ml_collections"}),
    "configs": (
        {"configs.registry", "configs.schema", "models", "models.convert", "tasks", "data", "evaluation"}
        | {"train.adapters", "train.optimizer", "runs.folder"},
        {"ml_collections", "cloudpickle"},
    ),
}
EVERYWHERE = ("configs.atomic", "configs.cache", "configs.directions", "configs.hub", "configs.storage")
PROJECT = "lineage"
ROOMS = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {"launch", "tests", "benchmarks"}


def package(module: str) -> str:
    """Return the longest package in `RULES` that contains a module."""
    return next((name for name in sorted(RULES, key=len, reverse=True) if f"{module}.".startswith(f"{name}.")), "")


def imports(source: str) -> set[str]:
    """Return the absolute names of the imports of a file."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what they import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def violations(module: str, source: str) -> list[str]:
    """Return the imports of a module, without the prefix `lineage.`, that break the rules."""
    importer = package(module)
    project, others = RULES[importer]
    bad = []
    for name in imports(source):
        top, _, rest = name.partition(".")
        if top == PROJECT:
            allowed = package(rest) in (importer, *EVERYWHERE, *project) and rest.partition(".")[0] in ROOMS - {
                "launch",
                "tests",
            }
        else:
            allowed = top not in ROOMS and (top in sys.stdlib_module_names or top in others)
        if not allowed:
            bad.append(f"{module} imports {name}")
    return bad


@pytest.mark.parametrize(
    "path", sorted(p for name in RULES if "." not in name for p in (ROOT / name).rglob("*.py")), ids=str
)
def test_imports_follow_the_rules(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    if module.startswith(("configs.small", "configs.paper")):
        pytest.skip("an experiment may import anything")
    assert not violations(module, path.read_text(encoding="utf-8"))


def test_rules_cover_every_package():
    for name in RULES:
        path = ROOT / name.replace(".", "/")
        assert (path / "__init__.py").exists() or path.with_suffix(".py").exists()


@pytest.mark.parametrize("path", sorted(p for room in ROOMS for p in (ROOT / room).rglob("*.py")), ids=str)
def test_packages_are_imported_with_the_prefix(path):
    """Check that there is no `import models`, which could load a package twice, or a package of the user."""
    for name in imports(path.read_text(encoding="utf-8")):
        assert name.partition(".")[0] not in ROOMS - {"benchmarks", "tests"}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("metrics.states", "import optax"),
        ("metrics.states", "from lineage.models import gpt"),
        ("metrics.states", "from lineage import models"),
        ("metrics.states", "import models"),
        ("models.layers.norm", "from lineage.models.gpt import GPT"),
        ("models.gpt", "def f():\n    import lineage.train.loop"),
        ("models.gpt", "from lineage import launch"),
        ("data.loader", "import jax"),
        ("configs.schema", "from lineage.models import MODELS"),
        ("train.loop", "import torch"),
        ("train.loop", "from lineage import launch"),
        ("train.loop", "from lineage.runs import sweep"),
        ("configs.cli", "from lineage.train import pretrained"),
        ("evaluation.base", "from lineage.train import loop"),
        ("runs.sweep", "def f():\n    from lineage.report.comparison import finish"),
    ],
)
def test_violations_are_detected(module, source):
    assert violations(module, source)
