"""The import rules: who may import whom. Read from the sources, so that an import inside a function counts too."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ARRAYS = {"jax", "flax", "numpy", "scipy", "jaxtyping"}
# package -> (what of the project, what else) it may import, beside the standard library and itself
RULES = {
    "metrics": (set(), ARRAYS | {"nltk", "sacrebleu", "ot"}),
    "models.layers": (set(), ARRAYS),
    "models.convert": ({"models"}, ARRAYS | {"safetensors", "ml_dtypes"}),
    "models": ({"models.layers"}, ARRAYS),
    "data": (
        set(),
        {"numpy", "grain", "tensorflow_datasets", "etils", "tokenizers", "sklearn", "PIL", "absl", "babel"},
    ),
    "train": (
        {"models", "metrics", "data"},
        ARRAYS
        | {
            "optax",
            "orbax",
            "ml_collections",
            "matplotlib",
            "tensorboardX",
            "wandb",
            "sklearn",
            "rich",
            "optuna",
            "submitit",
        },
    ),
    "configs": (set(), {"ml_collections"}),
}
PACKAGES = {"models", "metrics", "data", "train", "configs", "benchmarks", "launch", "tests"}


def package(module: str) -> str:
    """The package of `RULES` that a module belongs to, the longest first."""
    return next((name for name in sorted(RULES, key=len, reverse=True) if f"{module}.".startswith(f"{name}.")), "")


def imports(source: str) -> set[str]:
    """The absolute names of what a file imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what they import"
            found.add(node.module)
            if node.module in PACKAGES:
                found |= {f"{node.module}.{alias.name}" for alias in node.names if alias.name[0].islower()}
    return found


def violations(module: str, source: str) -> list[str]:
    own = package(module)
    project, others = RULES[own]
    bad = []
    for name in imports(source):
        top = name.partition(".")[0]
        if top in PACKAGES:
            allowed = package(name) in (own, *project) or (name == "models" and own == "models.convert")
            # A name imported from a package may be a function of the package itself.
            allowed = allowed or any(name.startswith(f"{rule}.") for rule in project)
        else:
            allowed = top in sys.stdlib_module_names or top in others
        if not allowed:
            bad.append(f"{module} imports {name}")
    return bad


@pytest.mark.parametrize(
    "path", sorted(p for name in RULES if "." not in name for p in (ROOT / name).rglob("*.py")), ids=str
)
def test_imports_follow_the_rules(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    assert not violations(module, path.read_text(encoding="utf-8"))


def test_every_package_is_there():
    for name in RULES:
        assert (ROOT / name.replace(".", "/") / "__init__.py").exists()


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("metrics.states", "import optax"),
        ("metrics.states", "from models import gpt"),
        ("models.layers.norm", "from models.gpt import GPT"),
        ("models.gpt", "def f():\n    import train.loop"),
        ("models.gpt", "import launch"),
        ("data.text", "import jax"),
        ("configs.base", "from models import MODELS"),
        ("train.loop", "import torch"),
        ("train.loop", "import configs"),
    ],
)
def test_the_check_sees_a_violation(module, source):
    assert violations(module, source)


def test_models_do_not_know_configs():
    for path in (ROOT / "models").rglob("*.py"):
        assert "ConfigDict" not in path.read_text(encoding="utf-8")
