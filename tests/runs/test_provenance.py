"""Commits and versions recorded by a run."""

import subprocess

import jax
import pytest

from lineage.runs import provenance as module
from lineage.runs.provenance import PROJECT, checkout, fingerprint, provenance


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_repository_with_uncommitted_changes(tmp_path):
    assert checkout(tmp_path) == {}
    assert checkout(tmp_path / "absent") == {}
    git(tmp_path, "init")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    clean = checkout(tmp_path / "a")
    assert (clean["root"], clean["dirty"], len(clean["commit"])) == (str(tmp_path), False, 40)
    (tmp_path / "new").write_text("")
    assert checkout(tmp_path) == clean | {"dirty": True}
    actual = provenance(tmp_path / "a")
    assert actual["config_git"] == clean | {"dirty": True}
    assert actual["packages"]["jax"] == jax.__version__


@pytest.mark.parametrize("name", ["two\nlines", "caf\udce9"])
def test_repository_with_an_unusual_name(tmp_path, name):
    (tmp_path / name).mkdir()
    git(tmp_path / name, "init")
    git(tmp_path / name, "commit", "--allow-empty", "-m", "first")
    assert checkout(tmp_path / name)["root"] == str(tmp_path / name)


def test_project_is_its_own_repository(tmp_path):
    actual = provenance(PROJECT / "configs" / "small")
    assert "config_git" not in actual
    if (PROJECT / ".git").exists():
        assert len(actual["git"]["commit"]) == 40


def test_fingerprint_depends_on_the_code_and_the_packages(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PROJECT", tmp_path)
    (tmp_path / "train" / "optimizer").mkdir(parents=True)
    (tmp_path / "outputs").mkdir()
    files = [tmp_path / name for name in ("launch.py", "train/__init__.py", "train/optimizer/rules.py")]
    for file in (*files, tmp_path / "outputs" / "mine.py"):
        file.write_text("1")
    before = fingerprint()
    (tmp_path / "outputs" / "mine.py").write_text("2")
    assert fingerprint() == before
    for file in files:
        file.write_text("2")
        assert fingerprint() != before
        file.write_text("1")
    monkeypatch.setattr(module, "PACKAGES", ["jax"])
    assert fingerprint() != before
