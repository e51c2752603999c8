"""The structure of the source and of the documentation: sizes, contents of packages, openings of docstrings, links."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("configs", "data", "evaluation", "metrics", "models", "report", "runs", "tasks", "train", "benchmarks")
FILES = [*sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py")), ROOT / "launch.py"]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
RELATIVE = re.compile(
    r"(What|Whatever|Which|Whether|That|Those|They|It|Its|Also|By|Of|Where|Who|Whose|So|How|When|If|As|For|From|On)\b"
)


def names(path):
    return str(path.relative_to(ROOT))


def parse(path):
    text = path.read_text(encoding="utf-8")
    parsed = ast.parse(text)
    parsed.lines = text.count("\n")
    return parsed


@pytest.fixture(scope="module", params=FILES, ids=names)
def tree(request):
    return parse(request.param)


def test_files_are_short(tree):
    assert tree.lines <= 350


def test_functions_are_short(tree):
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert not [node.name for node in functions if node.end_lineno - node.lineno + 1 > 60]


@pytest.mark.parametrize("path", [*FILES, *TESTS], ids=names)
def test_docstrings_begin_with_a_noun_phrase_or_an_imperative(path):
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    documented = [node for node in ast.walk(parse(path)) if isinstance(node, kinds)]
    actual = [(getattr(node, "name", "module"), ast.get_docstring(node)) for node in documented]
    assert not [(name, text.splitlines()[0]) for name, text in actual if text and RELATIVE.match(text)]


# Files with other writes than `write_atomic` and `replacing`, and why a part of what they write does no harm.
NOT_ATOMIC = {
    "configs/atomic.py": "temporary files",
    "configs/small/self_adaptive.py": "inputs of an experiment, which the same function writes again",
    "evaluation/prediction.py": "images are written again unless their line follows",
    "runs/remote.py": "a locked file, which cannot be replaced; a part of its id is not the id",
    "runs/sweep.py": "a locked file, which cannot be replaced; it is written in one piece",
    "train/export.py": "a locked file, which cannot be replaced; it is written in one piece",
}


def test_files_are_written_atomically():
    write = re.compile(r"\.write_(text|bytes)\(|(?<!temporary)\.open\(.(?:w|r\+)|\bopen\(.*, .(?:w|r\+)")
    actual = {names(path) for path in FILES if write.search(path.read_text(encoding="utf-8"))}
    assert {path for path in actual if not path.startswith("benchmarks/")} == NOT_ATOMIC.keys()


def test_train_has_at_most_16_files():
    assert len(list((ROOT / "train").glob("*.py"))) <= 16


PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", PAGES, ids=names)
def test_links_lead_to_files_and_headings(path):
    for file, heading in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", path.read_text(encoding="utf-8")):
        target = path.parent / file if file else path
        assert target.exists(), file
        if heading:
            actual = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
            assert heading in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in actual]


@pytest.mark.parametrize(
    "path", [page for page in PAGES if page.parent.name == "docs" or page.stem == "README"], ids=names
)
def test_lines_of_prose_are_short(path):
    prose = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    assert not [line for line in prose.splitlines() if len(line) > 120 and not line.startswith("|")]


def test_readme_lists_every_experiment():
    section = re.search(r"^### Experiments$(.*?)^##", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    listed = set(re.findall(r"`(\w+_\w+|finetune|families|cifar10)(?:[\[:][^`]*)?`", section[1]))
    existing = {path.stem for path in (ROOT / "configs").glob("*/*.py")} - {"__init__"}
    assert listed == existing
