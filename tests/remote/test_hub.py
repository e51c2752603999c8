"""Downloads from the Hugging Face Hub, against a local stand-in of its HTTP interface."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import jax
import jax.numpy as jnp
import pyarrow
import pyarrow.parquet
import pytest

from lineage.configs import schema, storage
from lineage.configs.hub import download
from lineage.data import SOURCES
from lineage.data.facts import Facts, evaluating
from lineage.data.tokenizers import TOKENIZERS, Bytes
from lineage.models import build, convert
from lineage.runs.folder import read_json
from tests.remote.hub_server import Hub

ROOT = Path(__file__).parents[2]
MODEL = {"config.json": b"{}", "model.safetensors": b"weights" * 100, "tokenizer.json": b"tokens"}
OTHERS = {"pytorch_model.bin": b"pickle", "README.md": b"text", "flax_model.msgpack": b"more", "run.py": b"code"}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Return a stand-in of the Hub, to which all requests go, with an empty cache."""
    with Hub() as hub:
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        storage._local.cache_clear()
        yield hub
        storage._local.cache_clear()


def offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def files(folder):
    return {
        file.relative_to(folder).as_posix(): file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()
    }


def table(**columns):
    """Return the content of a Parquet file."""
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def rows(*lines):
    """Return the content of a CSV file."""
    file = io.StringIO()
    csv.writer(file).writerows(lines)
    return file.getvalue().encode()


def test_of_a_model_only_config_weights_and_tokenizer_are_downloaded(hub):
    hub.add("models/org/name", MODEL | OTHERS)
    assert files(download("hf:org/name")) == MODEL
    assert sorted(hub.downloads) == sorted(MODEL)


def test_a_revision_is_a_branch_or_a_commit(hub):
    old = hub.add("models/org/name", MODEL | {"config.json": b"old"}, "v1")
    hub.add("models/org/name", MODEL)
    for revision in ("v1", old):
        assert files(download(f"hf:org/name@{revision}"))["config.json"] == b"old"
    assert files(download("hf:org/name"))["config.json"] == b"{}"


def test_the_cache_is_reused_and_serves_offline(hub, monkeypatch):
    hub.add("models/org/name", MODEL)
    first = download("hf:org/name")
    hub.downloads.clear()
    assert download("hf:org/name") == first
    assert not hub.downloads
    offline(monkeypatch)
    assert download("hf:org/name") == first


@pytest.mark.parametrize("how", ["offline", "unreachable"])
def test_what_is_not_in_the_cache_is_named_offline(hub, monkeypatch, how):
    hub.add("models/org/name", MODEL)
    if how == "offline":
        offline(monkeypatch)
    else:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        FileNotFoundError, match=r"hf:org/name@v1 is not complete .*`hf download org/name --revision=v1`"
    ):
        download("hf:org/name@v1")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("hf:org/other", "the Hugging Face Hub has no model org/other, or it is private"),
        ("hf:org/name@v9", "org/name has no revision 'v9'"),
        ("hf:org/name/vocab.txt", "has no file hf:org/name/vocab.txt"),
        ("hf:org/pickled", "has no model.safetensors: weights are read from safetensors only"),
        ("hf:name", "it must be hf:ORG/NAME"),
        ("hf:org/name/../../x", "it must be hf:ORG/NAME"),
    ],
)
def test_what_is_missing_is_one_sentence(hub, path, message):
    hub.add("models/org/name", MODEL)
    hub.add("models/org/pickled", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    with pytest.raises((FileNotFoundError, ValueError), match=message) as caught:
        download(path)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_a_gated_repository_says_how_to_get_access(hub):
    hub.add("datasets/org/name", {"train.csv": b""})
    hub.gated.add("datasets/org/name")
    with pytest.raises(PermissionError, match="hf:org/name is gated: ask for access on the page of datasets/org/name"):
        download("hf:org/name", ())


def test_an_interrupted_download_is_an_error_and_then_continues(hub, monkeypatch):
    hub.add("models/org/name", MODEL)
    hub.truncated.add("model.safetensors")
    monkeypatch.setattr("time.sleep", lambda _: None)  # between the attempts
    with pytest.raises(OSError, match="hf:org/name cannot be downloaded"):
        download("hf:org/name")
    with monkeypatch.context() as patch:
        offline(patch)
        with pytest.raises(FileNotFoundError, match="is not complete in the cache"):
            download("hf:org/name")
    hub.truncated.clear()
    assert files(download("hf:org/name")) == MODEL


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModuleNotFoundError, match=r"hf:org/name needs .* `pip install 'lineage\[hub\]'`"):
        download("hf:org/name")


def test_a_source_reads_the_parquet_files_of_a_configuration(hub):
    content = {"train": ["a", "b"], "validation": ["c"], "test": ["d"]}
    hub.add(
        "datasets/org/name",
        {f"plain/{split}-00000-of-00001.parquet": table(text=texts) for split, texts in content.items()}
        | {"other/train.parquet": table(text=["x"]), "data.csv": rows(["text"], ["y"]), "name.py": b"code"},
    )
    source = schema.build(SOURCES, schema.parse(SOURCES, "hf:org/name/plain"))
    assert {split: list(part) for split, part in source.read("documents").items()} == content
    assert sorted(set(hub.downloads)) == [f"plain/{split}-00000-of-00001.parquet" for split in sorted(content)]
    with pytest.raises(ValueError, match="choose one of the folders"):
        SOURCES["hf"](path="org/name").read("documents")


@pytest.mark.parametrize(
    "content",
    [
        {"train.csv": rows(["text", "label"], ["a", "yes"]), "dataset_infos.json": b"{}"},
        {"data/train.tsv": b"text\tlabel\na\tyes\n"},
        {"train.jsonl": json.dumps({"text": "a", "label": "yes"}).encode()},
        {"train/part.parquet": table(text=["a"], label=["yes"])},
    ],
    ids=lambda content: next(iter(content)),
)
def test_a_source_reads_the_kind_of_files_that_there_is(hub, content):
    hub.add("datasets/org/name", content | {"README.md": b"text"})
    source = SOURCES["hf"](path="org/name")
    assert list(source.read("labeled_texts")["train"].labels) == ["yes"]
    assert "README.md" not in hub.downloads
    hub.add("datasets/org/other", {name.replace("train", "test"): file for name, file in content.items()})
    source = evaluating(SOURCES["hf"](path="org/other"), Facts())
    assert list(source.read("labeled_texts")) == ["test"]


def test_a_repository_without_data_files_is_refused(hub):
    hub.add("datasets/org/name", {"README.md": b"text"})
    with pytest.raises(FileNotFoundError, match="hf:org/name has no file of parquet, csv, tsv, jsonl"):
        SOURCES["hf"](path="org/name").read("documents")


def test_suffixes_in_upper_case(hub):
    table = rows(["text", "label"], ["a", "yes"])
    hub.add("datasets/org/name", {"train.csv": table, "TEST.CSV": table, "a.txt": b"one"})
    assert list(SOURCES["hf"](path="org/name").read("labeled_texts")) == ["train", "test"]
    assert "a.txt" not in hub.downloads


def test_fingerprints_do_not_depend_on_the_place_of_the_cache(hub, monkeypatch, tmp_path):
    from lineage.data.fingerprint import fingerprint

    hub.add("datasets/org/name", {"train.csv": rows(["text"], ["a"])})
    source, actual = SOURCES["hf"](path="org/name"), []
    for place in ("one", "two"):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / place))
        storage._local.cache_clear()
        actual.append(fingerprint(source.files()))
    assert actual[0] == actual[1]
    assert list(actual[0]) == ["hf:org/name/train.csv"]


def test_other_sources_read_paths_on_the_hub(hub):
    hub.add("datasets/org/name", {"texts/a.txt": b"one", "texts/b.txt": b"two", "other.txt": b"three"})
    source = SOURCES["text"](path="hf:org/name/texts", validation_fraction=0.0)
    assert list(source.read("documents")["train"]) == ["one", "two"]
    assert "other.txt" not in hub.downloads


def test_of_a_tokenizer_only_its_file_is_downloaded(hub, tmp_path):
    Bytes().train([]).save(tmp_path / "tokenizer.json")
    hub.add("models/org/name", MODEL | {"tokenizer.json": (tmp_path / "tokenizer.json").read_bytes()})
    tokenizer = TOKENIZERS["file"](path="hf:org/name").train([])
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    assert set(hub.downloads) == {"tokenizer.json"}


@pytest.mark.slow
def test_a_run_starts_from_a_model_of_the_hub_and_reads_its_data_from_there(hub, tmp_path):
    model = build("gpt", depth=1, width=16, num_heads=2, vocab_size=257, max_length=16)
    variables = model.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    convert.save(tmp_path / "model", model, variables)
    Bytes().train(["a"]).save(tmp_path / "model")
    hub.add("models/org/gpt", files(tmp_path / "model"))
    hub.add("datasets/org/texts", {"train.jsonl": b'{"text": "some words for a test"}\n' * 50})
    options = ["source=hf:org/texts", "init.path=hf:org/gpt", "total_steps=2", "task.sequence_length=16"]
    options += ["model.depth=1", "model.num_heads=2", "model.max_length=16", "evaluate_every_steps=2"]
    command = [sys.executable, "launch.py", f"--config={ROOT}/tests/tiny.py:gpt", f"--workdir={tmp_path / 'run'}"]
    command += [f"--config.{option}" for option in options]
    environment = dict(os.environ) | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "JAX_PLATFORMS": "cpu"}
    environment |= {"HF_HUB_DISABLE_XET": "1"}
    settings = {"cwd": ROOT, "capture_output": True, "text": True}
    ran = subprocess.run(command, env=environment, **settings)
    assert ran.returncode == 0, ran.stderr
    assert "starts from hf:org/gpt; new: nothing; not used: nothing" in ran.stderr
    assert list(read_json(tmp_path / "run/data.json")) == ["hf:org/texts/train.jsonl", "tokenizer.json"]
    environment |= {"HF_HUB_OFFLINE": "1"}
    ran = subprocess.run([*command, "--config.total_steps=4"], env=environment, **settings)
    assert ran.returncode == 0, ran.stderr
    assert "resuming from step 2" in ran.stderr
