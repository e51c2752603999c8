"""The installed wheel runs from any folder, even one that contains a `models/` package of the user."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough  # builds and installs a wheel, and starts with an empty cache
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return `installed(*arguments)`, which runs the console command from another folder and returns its output."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    for name in filter(None, map(os.fsdecode, names)):
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, f"--wheel-dir={folder}", str(source)], check=True)
    (wheel,) = folder.glob("lineage-*.whl")
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    install = [sys.executable, "-m", "pip", f"--python={python}", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True)
    # The dependencies are those of this environment: its packages, but not the checkout that it may be an install of.
    (packages,) = (folder / "env" / "lib").glob("python3*/site-packages")
    installed = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(installed) + "\n")
    (folder / "empty" / "models").mkdir(parents=True)
    (folder / "empty" / "models" / "__init__.py").write_text("raise AssertionError('not the project')\n")

    def run(*arguments):
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
        command = [str(folder / "env" / "bin" / "lineage"), *arguments]
        done = subprocess.run(command, cwd=folder / "empty", env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run.folder = folder / "empty"
    return run


@pytest.mark.slow
def test_training_on_digits(installed):
    installed("train", "--config.model.depth=1", "--config.total_steps=3", "--workdir=digits")
    lines = (installed.folder / "digits" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 3
    assert (installed.folder / "digits" / "report.html").exists()


def test_experiments_are_listed_and_described(installed):
    listed = installed("list")
    assert "vit_digits" in listed
    assert "gpt2_openwebtext" in listed
    assert "model.patch_size" in installed("config", "vit_digits")
    assert "124,475,904" in installed("describe", "gpt2_openwebtext")
