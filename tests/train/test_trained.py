"""Use of trained models without the training data: `lineage.load`, evaluation, and models of `transformers`."""

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from PIL import Image

import lineage
from lineage import launch, models
from lineage.configs import adoption
from lineage.configs.run import Mesh
from lineage.data import SOURCES, Facts
from lineage.data.inputs import from_memory
from lineage.data.tokenizers.kinds import TOKENIZERS
from lineage.models import convert
from lineage.runs.folder import read_metrics
from lineage.tasks import TASKS
from lineage.train import loop, trained
from tests.data.conftest import load

pytestmark = pytest.mark.usefixtures("no_report")
ONE = {"devices": jax.devices()[:1]}
ENCODER = {"task.name": "text_classification", "task.sequence_length": 16, "total_epochs": 2.0}
TEXTS = [("good nice", "yes"), ("bad poor awful", "no"), ("fine nice good", "yes"), ("awful", "no")]


def write_labels(folder):
    """Write training and validation texts of two classes."""
    for name in ("train", "dev"):
        (folder / f"{name}.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in TEXTS * 2))
    return {"source": f"labels:{folder}/train.tsv", "source.validation_path": f"{folder}/dev.tsv"}


@pytest.mark.thorough
def test_evaluation_on_changed_data_prints_a_note(tiny, tmp_path, capsys):
    """Check a changed file, a file of another size without the training file, and no note without a change."""
    run, changes = tmp_path / "run", write_labels(tmp_path) | ENCODER
    loop.train(tiny("bert", changes), run, **ONE)
    dev = tmp_path / "dev.tsv"
    notes = {"": dev.read_text(), f"note: since the run in {run} began, {dev} changed": "fine bad\tno\n" * 8}
    for note, content in notes.items():
        dev.write_text(content)
        capsys.readouterr()
        assert launch.main(["evaluate", str(run)]) == 0
        assert capsys.readouterr().err.strip() == note
    (tmp_path / "train.tsv").unlink()
    assert launch.main(["evaluate", str(run)]) == 0
    assert capsys.readouterr().err.strip() == note


@pytest.mark.thorough
def test_evaluation_on_more_or_fewer_files_prints_a_note(tiny, tmp_path, capsys):
    """Check a new file of a glob, and a missing one; the training file of a table is not needed."""
    run, rows = tmp_path / "run", "".join(f"{text},{label}\n" for text, label in TEXTS)
    for name in ("train", "dev1", "dev2"):
        (tmp_path / f"{name}.csv").write_text(f"text,label\n{rows}")
    source = {"source": f"csv:{tmp_path}/train.csv", "source.validation_path": f"{tmp_path}/dev?.csv"}
    loop.train(tiny("bert", source | ENCODER), run, **ONE)
    (tmp_path / "train.csv").unlink()
    moved, new, began = tmp_path / "dev2.csv", tmp_path / "dev3.csv", "and had 8 when the run began"
    changed, other = f"note: since the run in {run} began, {new} changed", "note: the split validation has {} examples"
    changes = [
        (lambda: None, ""),
        (lambda: shutil.copy(moved, new), f"{changed}\n{other.format(12)} {began}"),
        (lambda: moved.rename(tmp_path / "gone"), changed),
        (new.unlink, f"{other.format(4)} {began}"),
    ]
    for change, note in changes:
        change()
        capsys.readouterr()
        assert launch.main(["evaluate", str(run)]) == 0
        assert capsys.readouterr().err.strip() == note


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ["key_sentences", "head"])
def test_classifier_without_its_training_data(rule, tiny, tmp_path, capsys):
    """Check each command after the training file is gone, and that the Python API gives what the command writes."""
    run, changes = tmp_path / "run", write_labels(tmp_path) | ENCODER | {"task.long_text": rule}
    metrics = loop.train(tiny("bert", changes), run, **ONE)
    (tmp_path / "train.tsv").unlink()
    texts = [text for text, _ in TEXTS]
    (tmp_path / "new.txt").write_text("\n".join(texts) + "\n")
    capsys.readouterr()
    assert launch.main(["predict", str(run), f"--inputs={tmp_path / 'new.txt'}"]) == 0
    written = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    model = lineage.load(run)
    assert model.predict(texts) == written
    assert [set(row["probabilities"]) for row in written] == [{"no", "yes"}] * 4
    assert model.embed(texts).shape == (4, 16)
    assert "data" not in vars(model.experiment)
    assert launch.main(["evaluate", str(run)]) == 0
    assert json.loads(capsys.readouterr().out) == pytest.approx(metrics)
    assert launch.main(["export", str(run)]) == 0
    assert json.loads((run / "export" / "config.json").read_text())["id2label"] == {"0": "no", "1": "yes"}
    (tmp_path / "dev.tsv").unlink()
    assert lineage.load(run).predict(texts) == written
    metadata = Facts.load(run / "facts.json")
    replace(metadata, class_names=metadata.class_names[::-1]).save(run / "facts.json")
    assert launch.main(["predict", str(run), f"--inputs={tmp_path / 'new.txt'}"]) == 1
    assert f"{run}/facts.json is not that of the newest checkpoint" in capsys.readouterr().err
    (run / "facts.json").unlink()
    assert launch.main(["predict", str(run), f"--inputs={tmp_path / 'new.txt'}"]) == 1
    assert f"There is no file {run}/facts.json: restore it, or continue the run" in capsys.readouterr().err
    (run / "facts.json").write_text("{}x")
    assert launch.main(["predict", str(run), f"--inputs={tmp_path / 'new.txt'}"]) == 1
    assert "facts.json is damaged" in capsys.readouterr().err


@pytest.mark.thorough
def test_train_continues_a_run_that_is_given_by_its_folder(tiny, tmp_path):
    run = tmp_path / "run"
    loop.train(tiny("gpt", {"total_steps": 2}), run)
    assert launch.main(["train", str(run), "--config.total_steps=3"]) == 0
    assert [line["step"] for line in read_metrics(run) if "validation/loss" in line] == [2, 3]


@pytest.mark.thorough
def test_generator_without_its_training_data(tiny, tmp_path, capsys, monkeypatch):
    (tmp_path / "a.txt").write_text("abcdefgh" * 400)
    changes = {"source": f"text:{tmp_path}/a.txt", "total_steps": 2, "sampling.temperature": 0.0}
    loop.train(tiny("gpt", changes), tmp_path / "run", **ONE)
    (tmp_path / "a.txt").unlink()
    capsys.readouterr()
    assert launch.main(["generate", f"--workdir={tmp_path / 'run'}", "--prompt=abc"]) == 0
    printed = capsys.readouterr().out
    model = lineage.load(tmp_path / "run", changes={"sampling.num_samples": 2})
    assert [f"abc{text}\n" for text in model.generate("abc")] == [printed] * 2
    assert model.predict(["abc"]) == [{"prediction": printed[3:-1]}]
    with pytest.raises(ValueError, match="The inputs are 'abc': they must be a list of at least one input"):
        model.predict("abc")
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as for users
    with pytest.raises(ValueError, match=r"prompt is \['abc'\]: it must be a text\."):
        model.generate(["abc"])
    with pytest.raises(ValueError, match=r"checkpoint is 'Best': it must be 'latest' or 'best'\."):
        model.experiment.restore("Best")
    with pytest.raises(ValueError, match=r"task is 'causal_lm': it must be empty for a run"):
        lineage.load(tmp_path / "run", task="causal_lm")
    with pytest.raises(ValueError, match=r"experts\.paths is empty"):
        lineage.load(tmp_path / "run", changes={"experts.choice": "prompt"})
    for wrong in (["seed=1"], 5, {None: 1}):
        with pytest.raises(ValueError, match=r"changes is .*: it must be a dictionary of config keys"):
            lineage.load(tmp_path / "run", changes=wrong)


def test_run_without_its_checkpoints(tmp_path):
    """Check a run that failed before its first step, or whose checkpoints were moved away."""
    (tmp_path / "config.json").write_text('{"model": {"name": "gpt"}, "task": {"name": "causal_lm"}}')
    for read in (lineage.load, partial(lineage.load, task="causal_lm"), trained.language_model, adoption.model_of):
        with pytest.raises(ValueError, match=rf"^{tmp_path} has the config of a run but no folder `checkpoints`: "):
            read(tmp_path)


@pytest.mark.slow
def test_student_without_its_teacher(tiny, tmp_path):
    """Check that a distilled model does not need the folder of its teacher."""
    masked = {"source": "stdlib", "source.max_bytes": 20_000, "task.sequence_length": 24, "total_steps": 1}
    loop.train(tiny("bert", masked | {"task.name": "masked_lm"}), tmp_path / "teacher", **ONE)
    changes = masked | {"task.name": "masked_lm_distillation", "teacher": str(tmp_path / "teacher")}
    loop.train(tiny("bert", changes), tmp_path / "run", **ONE)
    (tmp_path / "teacher").rename(tmp_path / "gone")
    (actual,) = lineage.load(tmp_path / "run").predict(["def <mask>:"])
    assert actual["prediction"].startswith("def ")


@pytest.mark.thorough
def test_runs_that_a_run_names_execute_nothing(tiny, tmp_path):
    """Check a run without `imports`, whose config names a run with some."""
    run, other, module = tmp_path / "run", tmp_path / "other", tmp_path / "own.py"
    loop.train(tiny("gpt", {"total_steps": 1}), run, **ONE)
    shutil.copytree(run, other)
    module.write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    config = json.loads((run / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"imports": [str(module)]}))
    for role in ("draft", "contrast"):
        sampling = config["sampling"] | {role: str(other), "best_of": 2}
        (run / "config.json").write_text(json.dumps(config | {"sampling": sampling}))
        with pytest.raises(ValueError, match=r"the run in .*other would execute '.*own\.py': give --config\.imports="):
            lineage.load(run).predict(["a"])
    with pytest.raises(ValueError, match=r"the run in .*other would execute '.*own\.py'"):
        adoption.model_of(str(other))  # of a teacher, or for the initial parameters
    assert not (tmp_path / "executed").exists()
    assert lineage.load(run, changes={"imports": str(module)}).predict(["a"])
    assert (tmp_path / "executed").exists()


def test_import_is_light():
    """Check that `import lineage` loads neither JAX nor the package."""
    code = "import sys, lineage; print([m for m in sys.modules if m.split('.')[0] in ('jax', 'numpy', 'flax')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def bert_folder(folder, **settings):
    """Write a tiny BERT and its tokenizer in the layout of `transformers`; return the model and its variables."""
    tokenizer = TOKENIZERS["words"]().train([text for text, _ in TEXTS], ("cls", "sep", "pad", "mask"))
    tokenizer.save(folder)
    sizes = {"vocab_size": tokenizer.vocab_size, "depth": 2, "width": 16, "num_heads": 2, "max_length": 32}
    model = models.build("bert", **(sizes | settings))
    variables = model.init(jax.random.key(3), jnp.zeros((1, 4), jnp.int32))
    convert.save(folder, model, variables)
    return model, variables


def test_mesh_of_a_trained_model_is_reset(tiny):
    config = tiny("gpt", {"mesh.data": 2, "mesh.fsdp": 2, "mesh.context": 2, "mesh.tensor": 2})
    assert trained.with_changes(config, {"mesh.fsdp": "4"}).mesh.to_dict() == vars(Mesh(fsdp=4))


@pytest.mark.thorough
def test_folder_of_transformers(tmp_path):
    bert_folder(tmp_path / "bert", head="classification", num_classes=3)
    path = tmp_path / "bert" / "config.json"
    path.write_text(json.dumps(config := json.loads(path.read_text()) | {"id2label": {"0": "a", "1": "b", "2": "c"}}))
    model = lineage.load(tmp_path / "bert", task="text_classification")
    (actual,) = model.predict([("good", "bad")])
    assert set(actual["probabilities"]) == {"a", "b", "c"}
    with pytest.raises(ValueError, match="bert is not the folder of a run: give the task of its model"):
        lineage.load(tmp_path / "bert")
    with pytest.raises(ValueError, match="has a model with the outputs classification, not question_answering"):
        lineage.load(tmp_path / "bert", task="question_answering")
    for task in ("", "causal_lm"):
        with pytest.raises(FileNotFoundError, match="none does not exist: give the folder of a run or"):
            lineage.load(tmp_path / "none", task=task)
    path.write_text(json.dumps(config | {"id2label": {"0": "a", "5": "b", "2": "c"}}))
    with pytest.raises(ValueError, match="id2label must map the numbers from 0 on to names"):
        lineage.load(tmp_path / "bert", task="text_classification")
    path.write_text(json.dumps(config))
    more = "one for each of some more words than there were before", "has 13 tokens, more than the model's 11"
    with pytest.raises(ValueError, match=r"checkpoint is 'best': it must be 'latest' for .*bert, which"):
        lineage.load(tmp_path / "bert", task="text_classification", checkpoint="best")
    for text, message in (more, ("good", "does not have the special tokens cls, sep")):
        TOKENIZERS["words"]().train([text]).save(tmp_path / "bert")
        with pytest.raises(ValueError, match=f"The tokenizer {message}"):
            lineage.load(tmp_path / "bert", task="text_classification")


@pytest.mark.thorough
def test_architecture_comes_from_the_folder(tiny, tmp_path):
    """Check what is taken over, what typed keys keep, and that a classifier of other classes is new."""
    bert_folder(tmp_path / "bert", head="classification", num_classes=5, epsilon=1e-4)
    changes = write_labels(tmp_path) | ENCODER | {"init.path": str(tmp_path / "bert")}
    config = tiny("vit", {**changes, "task": "text_classification"})
    assert (config.model.name, config.model.width, config.model.epsilon) == ("bert", 16, 1e-4)
    assert (config.model.num_classes, config.task.sequence_length) == (None, 16)
    del changes["task.sequence_length"]
    config = tiny("bert", changes | {"model.dropout": 0.25})
    assert (config.model.depth, config.model.dropout, config.task.sequence_length) == (2, 0.25, 32)
    loop.train(config, tmp_path / "run", **ONE)
    assert (tmp_path / "run" / "tokenizer.json").read_text() == (tmp_path / "bert" / "tokenizer.json").read_text()
    ours = lineage.load(tmp_path / "run").original["params"]
    assert ours["classifier"]["kernel"].shape == (16, 2)
    again = tiny("gpt", {"init.path": str(tmp_path / "run"), **write_labels(tmp_path), **ENCODER})
    assert (again.model.name, again.model.width, again.model.max_length, again.model.dropout) == ("bert", 16, 32, 0.25)


@pytest.mark.thorough
def test_fine_tuning_resumes_without_the_model_it_began_with(tmp_path, capsys):
    """Check that the architecture, the tokenizer and the preprocessing are those of the run."""
    bert_folder(tmp_path / "bert", head="classification", num_classes=5, epsilon=1e-4)
    changes = write_labels(tmp_path) | ENCODER | {"init.path": tmp_path / "bert", "model.dropout": 0.25}
    tiny = f"--config={Path(__file__).parents[1]}/tiny.py:vit"
    options = [tiny, *(f"--config.{key}={value}" for key, value in changes.items() if key != "task.sequence_length")]

    def train(name, *more):
        return launch.main(["train", *options, f"--workdir={tmp_path / name}", *more])

    assert train("whole") == train("resumed", "--config.total_steps=1", "--config.total_epochs=None") == 0
    whole = lineage.load(tmp_path / "whole")
    (tmp_path / "bert").rename(tmp_path / "gone")
    capsys.readouterr()
    assert train("resumed") == 0, capsys.readouterr().err
    resumed = lineage.load(tmp_path / "resumed")
    assert whole.step == resumed.step > 1
    assert whole.experiment.model.epsilon == resumed.experiment.model.epsilon == 1e-4
    jax.tree.map(np.testing.assert_array_equal, resumed.original, whole.original)
    assert train("resumed", "--config.model.width=32") == 1
    assert "holds a run of another config (model.width was 16, is 32)" in capsys.readouterr().err
    assert train("new") == 1
    assert "bert', which is not a folder: it must be the workdir of a run" in capsys.readouterr().err


@pytest.mark.thorough
def test_sizes_come_from_a_model_of_another_kind(tiny, tmp_path):
    """Check a masked autoencoder that is fine-tuned, half of its layers, and a backbone, which keeps the model."""
    sizes = {"depth": 4, "width": 24, "num_heads": 3, "patch_size": 2, "image_size": 8, "channels": 1}
    model = models.build("mae", decoder_depth=1, decoder_width=16, decoder_num_heads=2, **sizes)
    convert.save(tmp_path, model, model.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)), jnp.zeros((1, 16), jnp.int32)))
    given = {"init.path": str(tmp_path), "model.pooling": "gap", "model.num_heads": 2}
    config = tiny("vit", given | {"init.layers": (0, 3)})
    assert (config.model.name, config.model.pooling, config.model.position) == ("vit", "gap", "1d")
    assert (config.model.depth, config.model.width, config.model.num_heads, config.model.patch_size) == (2, 24, 2, 2)
    config = tiny("vit", given | {"init.rename": (("^", "backbone/"),)})
    assert (config.model.width, config.model.patch_size) == (16, 4)


@pytest.mark.thorough
def test_wrong_shapes_are_listed_before_the_data_are_read(tiny, tmp_path):
    bert_folder(tmp_path / "bert", head="pretraining")
    absent = {"source": f"labels:{tmp_path}/absent.tsv", "init.path": str(tmp_path / "bert")} | ENCODER
    with pytest.raises(ValueError, match=r"of other shapes than the model \(\d\d\): .*; .* and \d+ more: change"):
        loop.train(tiny("bert", absent | {"model.width": 32}), tmp_path / "run", **ONE)
    with pytest.raises(
        ValueError, match=r" \(3\): stack/layers/mlp/down/kernel \(2, 64, 16\), here \(2, 48, 16\); .*: ch"
    ):
        loop.train(tiny("bert", absent | {"model.mlp_dim": 48}), tmp_path / "run", **ONE)
    with pytest.raises(FileNotFoundError, match=r"absent\.tsv"):
        loop.train(tiny("bert", absent), tmp_path / "run", **ONE)


LINES = '{{"text": "x", "label": "{0}"}}\n{{"text": "y", "label": "{1}"}}\n'
SPLITS = {
    "csv": (".csv", "text,label\ngood,{0}\nbad,{1}\n", "text_classification"),
    "jsonl": (".jsonl", LINES, "text_classification"),
    "bio": (".txt", "Ann {0}\nruns {1}\n", "token_classification"),
    "text": (".txt", "some text {0} {1}" * 20, "causal_lm"),
}


@pytest.mark.parametrize("name", SPLITS)
def test_evaluation_reads_no_training_data(name, tmp_path):
    """Check that the classes keep their numbers although the evaluation has other ones first."""
    suffix, template, task = SPLITS[name]
    train, dev = tmp_path / f"train{suffix}", tmp_path / f"dev{suffix}"
    train.write_text(template.format("b", "a"))
    dev.write_text(template.format("b", "b"))
    source = SOURCES[name](path=str(train), validation_path=str(dev))
    task = TASKS[task](sequence_length=8)
    whole = load(source, task, batch_size=2, workdir=tmp_path)
    whole.tokenizer.save(tmp_path)
    train.unlink()
    part = load(source, task, batch_size=2, workdir=tmp_path, known=whole.facts)
    assert part.train is None
    assert part.facts.class_names == whole.facts.class_names
    for ours, theirs in zip(part.splits["validation"], whole.splits["validation"], strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing"):
        load(source, task, batch_size=2, workdir=tmp_path, known=whole.facts)


@pytest.mark.parametrize("kind", ["folder", "coco"])
def test_evaluation_reads_no_training_images(kind, tmp_path):
    for split, size in (("train", 8), ("validation", 4)):
        for name in ("a", "b"):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            if name == "b" or split == "train":
                Image.fromarray(np.full((size, 8, 3), 50, np.uint8)).save(folder / "1.png")
        box = {"id": 1, "image_id": 1, "bbox": [0, 0, 2, 2], "category_id": 2, "area": 4, "iscrowd": 0}
        classes = [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]
        content = {"images": [{"id": 1, "file_name": "b/1.png"}], "annotations": [box], "categories": classes}
        (tmp_path / f"{split}.json").write_text(json.dumps(content))
    if kind == "folder":
        source, task = SOURCES["folder"](path=str(tmp_path)), TASKS["image_classification"](image_size=8)
    else:
        files = {split: str(tmp_path / f"{split}.json") for split in ("train", "validation")}
        source = SOURCES["coco"](path=files["train"], validation_path=files["validation"], images_path=str(tmp_path / "validation"))  # fmt: skip  # noqa: E501
        task = TASKS["object_detection"](image_size=8)
    whole = load(source, task, batch_size=2)
    (tmp_path / "train").rename(tmp_path / "gone")
    (tmp_path / "train.json").unlink()
    part = load(source, task, batch_size=2, known=whole.facts)
    assert part.train is None
    jax.tree.map(np.testing.assert_array_equal, part.splits["validation"][0], whole.splits["validation"][0])


def test_lists_of_inputs(tmp_path):
    Image.new("L", (4, 2), 7).save(tmp_path / "a.png")
    pixels = np.full((2, 4, 3), 7, np.uint8)
    rows = from_memory([str(tmp_path / "a.png"), pixels, Image.open(tmp_path / "a.png")], "images", 3).rows
    assert all((image == pixels).all() for image in rows.take(np.arange(3))["image"])
    actual = from_memory(["an apple", ["an", "apple"]], "tagged_sentences")
    assert [row.words for row in actual.rows] == [["an", " apple"]] * 2
    assert actual.identifiers == [{"words": ["an", "apple"]}] * 2
    (question,) = from_memory([("Who?", "Ann.")], "questions").rows
    assert (question.text, question.context) == ("Who?", "Ann.")
    assert from_memory(["a", ("b", "c")], "labeled_texts").rows == [("a",), ("b", "c")]
    with pytest.raises(ValueError, match=r"input 1 has 3: it must be a text"):
        from_memory([["a"], [3]], "labeled_texts")
    wrong = {"questions": (["a"], "2"), "documents": (["a", "b"], "1"), "labeled_texts": (["a", "b", "c"], "1 or 2")}
    for kind, (values, needed) in wrong.items():
        with pytest.raises(ValueError, match=f"input 0 has {len(values)} entries: it must have {needed}"):
            from_memory([values], kind)


def test_facts_are_saved_whole(tmp_path):
    options = {"class_names": ("ä", "b"), "image_size": (3, 4), "std": (0.5,), "document_frequencies": {"a": 1}}
    facts = Facts({"train": 3}, num_classes=2, **options)
    facts.save(tmp_path / "facts.json")
    assert Facts.load(tmp_path / "facts.json") == facts
    with pytest.raises(ValueError, match=r"The class name 'caf\\udce9' has a character that UTF-8 cannot encode"):
        Facts(class_names=(os.fsdecode(b"caf\xe9"),)).save(tmp_path / "facts.json")


@pytest.mark.parametrize(
    ("name", "value", "others"),
    [
        ("image_size", [-8, 8], {}),
        ("num_classes", 10**30, {}),
        ("begin_token", 300, {"vocab_size": 300}),
        ("mean", [math.nan], {}),
        ("std", [0.5, 0.0], {}),
        ("class_names", ["a"], {"num_classes": 2}),
    ],
)
def test_facts_out_of_range_are_damaged(name, value, others, tmp_path):
    (path := tmp_path / "facts.json").write_text(json.dumps({name: value, **others}))
    with pytest.raises(ValueError, match=rf"{path} is damaged \({name} is .*\): restore it"):
        Facts.load(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("class_names", 1.5),
        ("class_names", "ab"),
        ("class_names", [0]),
        ("num_classes", 2.0),
        ("image_size", [3]),
        ("std", ["x"]),
        ("examples", {"train": "x"}),
        ("examples", None),
        ("has_unanswerable", 1),
    ],
)
def test_facts_of_other_types_are_damaged(name, value, tmp_path):
    (path := tmp_path / "facts.json").write_text(json.dumps({name: value}))
    with pytest.raises(ValueError, match=rf"{path} is damaged \({name} is .*\): restore it"):
        Facts.load(path)


def test_facts_without_end_are_not_read(tmp_path):
    os.mkfifo(path := tmp_path / "facts.json")
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match=f"There is no file {path}: restore it"):
            Facts.load(path)
        path.unlink(missing_ok=True)
        path.symlink_to("/dev/zero")
