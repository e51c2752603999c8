"""Data of the paper configs: tiny files in the layout that the commands in their headers make, and names of TFDS."""

import ast
import gzip
import importlib.util
import json
import re
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from lineage.configs import cli, schema
from lineage.data import SOURCES, PairedTexts
from lineage.tasks import TASKS
from lineage.train.experiment import Experiment
from tests.data.test_box_files import coco
from tests.data.test_images import imagenet

CONFIGS = {name: path for name, path in cli.experiments().items() if path.parent.name == "paper"}
ARGUMENTS = {"bert_glue": "mrpc"}


def hub(folder, files, **columns):
    """Write Parquet files as the Hugging Face Hub has them, each with 400 rows of the columns."""
    table = pa.table({name: [f"{value} {i}" for i in range(400)] for name, value in columns.items()})
    features = {name: {"dtype": "string", "_type": "Value"} for name in columns}
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    for file in files:
        Path(folder, file).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, Path(folder, file))


def openwebtext():
    hub("openwebtext/plain_text", [f"train-{i:05}-of-00080.parquet" for i in range(2)], text="a")


def wikipedia():
    files = [f"train-{i:05}-of-00041.parquet" for i in range(2)]
    hub("wikipedia/20231101.en", files, id="1", url="https://", title="b", text="a. b")


def wikitext():
    files = ["train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001", "test-00000-of-00001"]
    hub("wikitext/wikitext-103-v1", [f"{file}.parquet" for file in files], text=" = a = \n")


def cnn_dailymail():
    files = [f"{split}-00000-of-00001.parquet" for split in ("train", "validation", "test")]
    hub("cnn_dailymail/3.0.0", files, article="b", highlights="a", id="1")


def c4():
    Path("c4/en").mkdir(parents=True)
    for name in ("c4-train.00000-of-01024", "c4-train.00099-of-01024", "c4-validation.00000-of-00008"):
        lines = [json.dumps({"text": f"a {i}", "timestamp": "2019-04-25T12:57:54Z", "url": "x"}) for i in range(400)]
        Path(f"c4/en/{name}.json.gz").write_bytes(gzip.compress("\n".join(lines).encode()))


def imagenet21k():
    for label in ("n00004475", "n00005787"):
        Path("imagenet21k/train", label).mkdir(parents=True)
        for i in range(100):
            Image.new("RGB", (4, 4)).save(f"imagenet21k/train/{label}/{label}_{i}.JPEG")


# config -> the function that writes its data, and the number of examples in each split
FILES = {
    "gpt2_openwebtext": (openwebtext, {"train": 792, "validation": 8}),
    "bart_pretrain": (openwebtext, {"train": 792, "validation": 8}),
    "bert_pretrain": (wikipedia, {"train": 799, "validation": 1}),
    "transformer_xl_wikitext103": (wikitext, {"train": 800, "validation": 400, "test": 400}),
    "bart_cnn_dailymail": (cnn_dailymail, dict.fromkeys(("train", "validation", "test"), 400)),
    "t5_c4": (c4, {"train": 800, "validation": 400}),
    "llama_1b": (c4, {"train": 800, "validation": 400}),
    "vit_imagenet21k": (imagenet21k, {"train": 198, "validation": 2}),
}


def source_of(name, **changes):
    """Return the source of a config and the kind of content that its task reads."""
    config, _ = cli.load(f"{name}:{ARGUMENTS[name]}" if name in ARGUMENTS else name)
    cli.override(config, changes)
    return schema.build(SOURCES, config.source), TASKS[config.task.name].reads


def sizes(content):
    def size(part):
        if isinstance(part, PairedTexts):
            return len(part.inputs)
        return len(part) if hasattr(part, "take") else sum(1 for _ in part)

    return {split: size(part) for split, part in content.items()}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_data_of_a_config(name, tmp_path, monkeypatch):
    """Read the files of a config, or look for its data set among the ones of TFDS."""
    monkeypatch.chdir(tmp_path)
    source, kind = source_of(name)
    assert kind in source.content_kinds()
    if name in FILES:
        write, expected = FILES[name]
        write()
        content = source.read(kind)
        assert sizes(content.splits if kind == "images" else content) == expected
        if kind == "documents":
            assert next(iter(content["train"])).strip(" =\n").startswith("a")
    else:
        assert source.name == "tfds"
        package = Path(importlib.util.find_spec("tensorflow_datasets").origin).parent
        known = source.path.partition("/")[0]
        assert (package / "datasets" / known).is_dir() or (package / "url_checksums" / f"{known}.txt").is_file()


@pytest.mark.parametrize("name", [name for name in FILES if "cache_dir" in CONFIGS[name].read_text(encoding="utf-8")])
def test_cached_examples_of_a_config_are_those_of_texts_in_memory(name, tmp_path, monkeypatch):
    """Check the first batch, with a short context and with a tokenizer that is trained on the tiny files."""
    monkeypatch.chdir(tmp_path)
    FILES[name][0]()
    changes = {"tokenizer": "wordpiece" if name.startswith("bert") else "bpe", "tokenizer.vocab_size": "400"}
    changes |= {"task.sequence_length": "32", "loader.batch_size": "4"}
    if "validation_fraction" in cli.load(name)[0].source:
        changes["source.validation_fraction"] = "0.1"
    batches = []
    for cache_dir in ("", "cache", "cache"):
        config, _ = cli.load(name)
        cli.override(config, changes | {"task.cache_dir": cache_dir})
        batches.append(Experiment(config).data.train[0])
    for key, expected in batches[0].items():
        np.testing.assert_array_equal(batches[1][key], expected)
        np.testing.assert_array_equal(batches[2][key], expected)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_headers_say_how_to_obtain_the_data(name):
    """Check that a header has the commands that fetch and prepare the data, and then the one that trains."""
    text = ast.get_docstring(ast.parse(CONFIGS[name].read_text(encoding="utf-8")))
    commands = re.findall(r"^    (\S.*)$", text, re.M)
    source, _ = source_of(name)
    (first, *_) = [number for number, command in enumerate(commands) if command.startswith("lineage train")]
    assert commands[first].startswith(f"lineage train --config={name}")
    before = commands[:first]
    if source.name == "tfds":
        known = source.path
        assert f"tfds build {known} " in "\n".join(f"{command} " for command in before)
        assert all("--file_format=array_record" in command for command in before if command.startswith("tfds"))
    else:
        folder = source.path.split("/")[0]
        assert any(re.search(rf"(--local-dir=|-C ){folder}\b", command) for command in before)
    for command in before:
        assert re.match(r"(pip install|tfds build|hf download|mkdir|tar|\(cd) ", command)
    downloads = [command for command in before if command.startswith("hf")]
    config, _ = cli.load(f"{name}:{ARGUMENTS[name]}" if name in ARGUMENTS else name)
    if config.tokenizer.name == "file":
        folder, _, file = config.tokenizer.path.rpartition("/")
        assert any(f" {file} " in command and command.endswith(f"--local-dir={folder}") for command in downloads)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.endswith("_imagenet")])
def test_imagenet_configs_read_folders(name, tmp_path):
    path = imagenet(tmp_path, tmp_path)
    (tmp_path / "val/n01440764").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "val/n01440764/a.JPEG")
    source, kind = source_of(name, **{"source": f"imagenet:{path}", "source.validation_fraction": "0.2"})
    assert sizes(source.read(kind).splits) == {"train": 8, "validation": 1, "test": 1}


def test_detr_reads_the_files_of_coco(tmp_path):
    coco(tmp_path, "train2017")
    coco(tmp_path, "val2017")
    source, kind = source_of("detr_coco", source=f"coco:{tmp_path}")
    content = source.read(kind)
    assert sizes(content.splits) == {"train": 2, "validation": 2}
    assert content.splits["train"].take(np.arange(2))["classes"][0].max() < 91


def test_texts_of_configs_are_read_lazily(tmp_path, monkeypatch):
    """Check that the first texts of C4 are read without the rest of the file."""
    monkeypatch.chdir(tmp_path)
    c4()
    source, _ = source_of("llama_1b")
    whole = Path("c4/en/c4-train.00099-of-01024.json.gz")
    whole.write_bytes(whole.read_bytes()[:-20])
    assert len(list(islice(source.documents()["train"], 400))) == 400
    with pytest.raises(ValueError, match=r"c4-train\.00099-of-01024\.json\.gz is not a complete \.gz file"):
        list(source.documents()["train"])
