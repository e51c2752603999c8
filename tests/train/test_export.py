"""Exported models give the same outputs without the `lineage` package."""

import json
import subprocess
import sys

import flax.linen as nn
import jax
import jaxtyping
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from PIL import Image
from tokenizers import processors

from lineage import models
from lineage.configs import adoption, cli
from lineage.data import Facts, Loader
from lineage.data.inputs import from_memory
from lineage.data.tokenizers import TOKENIZERS
from lineage.models.convert import companions
from lineage.tasks import TASKS
from lineage.train import export, trained
from lineage.train.experiment import Experiment
from lineage.train.pretrained import facts_of
from tests.tiers import tiered

# A process that cannot import the project.
ALONE = """
import pathlib, sys
for name in ("lineage",):
    sys.modules[name] = None
import jax, numpy as np
for folder in map(pathlib.Path, sys.argv[1:]):
    program = jax.export.deserialize(bytearray((folder / "model.stablehlo").read_bytes()))
    for size in (1, 3):
        batch = {name: a[:size] for name, a in np.load(folder / "batch.npz").items()}
        found = jax.tree.leaves(program.call(batch))
        np.savez(folder / f"found_{size}.npz", *(np.asarray(a, np.float32) for a in found))
"""
TEXTS = {"source.max_bytes": 20_000, "model.depth": 1}
KINDS = {
    "gpt": ("gpt", TEXTS),
    "bert": (
        "bert",
        TEXTS
        | {"source": "stdlib", "task.sequence_length": 16, "task.name": "masked_lm"}
        | {"task.name": "masked_lm", "model.head": "masked_lm"},
    ),
    "transformer": ("transformer", {"model.depth": 1}),
    "seq2seq": ("transformer", {"model.name": "seq2seq", "model.depth": 1, "model.width": 16}),
    "vit": ("vit", {"model.depth": 1, "precision": "bfloat16"}),
}


@pytest.fixture(scope="module")
def exported(tiny, tmp_path_factory):
    """Export a model of each kind; return its folder, its outputs for a batch, the experiment and the state."""
    found = {}
    for kind, (model, changes) in KINDS.items():
        folder = tmp_path_factory.mktemp(kind)
        experiment = Experiment(tiny(model, changes), folder, jax.devices()[:1])
        state = jax.jit(experiment.make_state)()
        random = np.random.default_rng(0)
        params = jax.tree.map(lambda a: a + random.normal(size=a.shape).astype("f") * 0.2, state.params)  # noqa: B023
        state = state.replace(params=params)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # it does not support symbolic dimensions
            export.write(experiment, state.variables(average=True), "stablehlo", folder)
        about = json.loads((folder / "model.json").read_text())
        batch = {name: experiment.data.train[0][name][:3] for name in about["inputs"]}
        np.savez(folder / "batch.npz", **batch)
        said = jax.jit(nn.apply(experiment.task.forward, experiment.model))(state.variables(), batch)
        found[kind] = folder, np.asarray(said, np.float32), experiment, state
    folders = [str(folder) for folder, *_ in found.values()]
    subprocess.run([sys.executable, "-c", ALONE, *folders], check=True, cwd=folders[0])
    return found


@pytest.mark.parametrize("kind", KINDS)
@tiered("size", [1, 3])
def test_exported_program_matches_the_model(kind, size, exported):
    """Compare the logits for different batch sizes, within the precision of bfloat16 for ViT."""
    folder, said, *_ = exported[kind]
    actual = np.load(folder / f"found_{size}.npz")["arr_0"]
    assert said.std() > 0.1
    tolerance = 0.03 * np.abs(said).max() if kind == "vit" else 1e-4
    np.testing.assert_allclose(actual, said[:size], atol=tolerance)


def test_transformers_loads_the_model_and_the_tokenizer(exported):
    *_, experiment, state = exported["gpt"]
    folder = experiment.workdir / "transformers"
    files = [path.name for path in export.write(experiment, state.variables(average=True), "safetensors", folder)]
    assert files == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    text = "def f(x):\n  pass"
    tokens = np.array(tokenizer(text)["input_ids"])
    np.testing.assert_array_equal(tokens, experiment.data.tokenizer.encode(text))
    assert tokenizer.decode(tokens) == text
    with torch.no_grad():
        logits = model(torch.tensor(tokens[None])).logits
    ours = experiment.model.apply(state.variables(), jax.numpy.asarray(tokens[None]))
    np.testing.assert_allclose(logits, ours, atol=1e-4)


@tiered(
    ("model", "task", "vocab_size"),
    [
        ("t5", "sequence_to_sequence", 300),
        ("bart", "sequence_to_sequence", 300),
        ("gpt", "conditional_lm", 300),
        ("llama", "causal_lm", 32_000),
    ],
)
def test_transformers_generates_with_the_tokens_of_the_run(model, task, vocab_size, tiny, tmp_path):
    """Check the tokens, which differ from those of published models, and what a task takes over from the folder."""
    sizes = {"model.name": model, "model.depth": 1, "model.width": 16, "model.num_heads": 2, "model.mlp_dim": 16}
    changes = sizes | {"model.vocab_size": vocab_size, "task.name": task, "task.sequence_length": 48}
    config = tiny("gpt" if task == "causal_lm" else "transformer", changes)
    experiment = Experiment(config, tmp_path / "run", jax.devices()[:1])
    state = jax.jit(experiment.make_state)()
    export.write(experiment, state.variables(), "safetensors", tmp_path / "export")
    actual = transformers.AutoConfig.from_pretrained(tmp_path / "export")
    end, start = experiment.tokenizer.end_of_text, experiment.facts.start_token
    padding = None if start is None else end  # as in the run
    assert (actual.eos_token_id, actual.pad_token_id) == (end, padding)
    assert getattr(actual, "decoder_start_token_id", None) == start == (end if model in ("t5", "bart") else None)
    adopted = adoption.config_of(tmp_path / "export", task).task
    assert adopted.get("start_token", "end_of_text") == "end_of_text"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer.model_max_length == (experiment.model.max_length or 48)  # T5 has no maximum length
    tokens = tokenizer("1 Mai")["input_ids"]
    assert tokens == [*experiment.tokenizer.encode("1 Mai"), *([] if task == "causal_lm" else [end])]
    assert tokenizer.pad_token_id == padding
    if start is not None:  # texts of different lengths in one batch, and the loss
        reference = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "export")
        texts = tokenizer(["1 Mai", "12 September 2001"], padding=True, return_tensors="pt")
        labels = tokenizer(["01", "12"], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            result = reference(**texts, labels=labels)
        batch = {"inputs": texts["input_ids"], "inputs_mask": texts["attention_mask"] > 0}
        rows = np.roll(labels.numpy(), 1, axis=1)
        rows[:, 0] = start
        arrays = {name: jax.numpy.asarray(value) for name, value in batch.items()}
        ours = experiment.model.apply(
            state.variables(), arrays["inputs"], jax.numpy.asarray(rows), inputs_mask=arrays["inputs_mask"]
        )
        np.testing.assert_allclose(result.logits, ours, atol=1e-4)


def test_exported_marian_generates_the_last_token(tiny, tmp_path):
    """Check a model whose most probable token is the last one, which is the padding of published models only."""
    sizes = {"model.name": "bart", "model.depth": 1, "model.width": 16, "model.num_heads": 2, "model.mlp_dim": 16}
    marian = {"model.position": "sinusoidal", "model.embed_norm": False, "model.logits_bias": True}
    changes = sizes | marian | {"model.vocab_size": 300}
    experiment = Experiment(tiny("transformer", changes), tmp_path / "run", jax.devices()[:1])
    variables = jax.jit(experiment.make_state)().variables()
    last = experiment.model.vocab_size - 1
    params = variables["params"]
    params = params | {"logits_bias": params["logits_bias"].at[last].set(100.0)}
    export.write(experiment, variables | {"params": params}, "safetensors", tmp_path / "export")
    reference = transformers.MarianMTModel.from_pretrained(tmp_path / "export")
    generated = reference.generate(torch.tensor([[5, 6]]), max_new_tokens=2, do_sample=False)
    assert generated.tolist() == [[experiment.facts.start_token, last, last]]
    assert companions.excluded_tokens(tmp_path / "export") == experiment.tokenizer.excluded == ()


@pytest.mark.parametrize("task", ["causal_lm", "conditional_lm"])
@pytest.mark.parametrize("added", ["<s> $A", "<s> $A <|endoftext|>", "$A <|endoftext|>"])
def test_exported_language_model_reads_the_token_before_a_text(added, task, tiny, tmp_path):
    """Check the prompts of the run, of `transformers` and of the export that is read again, with a post-processor."""
    backend = tokenizers.Tokenizer.from_str(TOKENIZERS["bytes"]().train([], ("end_of_text", "cls")).to_str())
    backend.add_special_tokens(["</s>"])  # another name for an end of text, which is not used
    begin, end = map(backend.token_to_id, ("<s>", "<|endoftext|>"))
    names = [("<s>", begin), ("<|endoftext|>", end)]
    first = processors.TemplateProcessing(single=added, special_tokens=names)
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), first])
    backend.save(str(tmp_path / "tokenizer.json"))
    sizes = {"model.name": "gpt", "model.depth": 1, "model.width": 16, "model.num_heads": 2, "model.vocab_size": 300}
    changes = sizes | {"tokenizer": f"file:{tmp_path}", "task.name": task, "task.sequence_length": 48}
    experiment = Experiment(tiny("gpt" if task == "causal_lm" else "transformer", changes), tmp_path / "run")
    state = jax.jit(experiment.make_state)()
    export.write(experiment, state.variables(), "safetensors", tmp_path / "export")
    before = [begin] if added.startswith("<s>") else []
    if before:
        assert transformers.AutoConfig.from_pretrained(tmp_path / "export").bos_token_id == begin
    expected = [*before, *b"1 Mai", *([end] if task == "conditional_lm" else [])]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer("1 Mai")["input_ids"] == expected
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (begin if before else None, end)
    for found in (experiment, trained.load(tmp_path / "export", task=task).experiment):
        prompt = found.task.request(found.tokenizer.encode("1 Mai"), found.tokenizer, found.facts).prompts
        assert prompt[0].tolist() == expected
    assert trained.language_model(tmp_path / "export").encode("1 Mai").tolist() == [*before, *b"1 Mai"]


def test_export_keeps_the_length_of_the_model(exported):
    *_, experiment, state = exported["gpt"]
    export.write(experiment, state.variables(average=True), "safetensors", experiment.workdir / "length")
    tokenizer = transformers.AutoTokenizer.from_pretrained(experiment.workdir / "length")
    assert tokenizer.model_max_length == experiment.model.max_length == 16


def test_tokenizer_of_an_encoder_has_the_segments_of_pairs(exported):
    """Check that the reference gets segments from a model that tells them apart, and no others."""
    segments = {}
    for kind in ("bert", "gpt"):
        *_, experiment, state = exported[kind]
        folder = experiment.workdir / f"segments_{kind}"
        export.write(experiment, state.variables(average=True), "safetensors", folder)
        segments[kind] = transformers.AutoTokenizer.from_pretrained(folder)("def f", "x").get("token_type_ids")
    assert set(segments["bert"]) == {0, 1}
    assert segments["gpt"] is None


def test_refused_export_leaves_no_folder(exported):
    *_, experiment, state = exported["transformer"]
    with pytest.raises(ValueError, match=r"a Transformer cannot be written .* --format=stablehlo\."):
        export.write(experiment, state.variables(average=True), "safetensors", experiment.workdir / "none")
    assert not (experiment.workdir / "none").exists()


@pytest.mark.parametrize("kind", ["safetensors", "stablehlo"])
def test_run_is_not_overwritten(kind, exported, tmp_path):
    *_, experiment, state = exported["transformer"]
    (tmp_path / "config.json").write_text(text := json.dumps({"model": {}, "task": {}}))
    with pytest.raises(ValueError, match=f"{tmp_path} is the folder of a run: choose another --output"):
        export.write(experiment, state.variables(average=True), kind, tmp_path)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"config.json": text}


def test_file_is_not_overwritten(exported, tmp_path):
    (file := tmp_path / "file").write_text("text")
    *_, gpt, state = exported["gpt"]
    with pytest.raises(ValueError, match=f"--output is {file}, which is not a folder: choose another one"):
        export.write(gpt, state.variables(average=True), "safetensors", file)
    assert file.read_text() == "text"


@pytest.mark.parametrize("kind", ["safetensors", "stablehlo"])
def test_other_files_are_not_overwritten(kind, exported, tmp_path):
    """Check that a folder is written again by the run that wrote it, and by no other run."""
    (*_, gpt, state), (*_, bert, other) = exported["gpt"], exported["bert"]
    export.write(gpt, state.variables(average=True), "safetensors", folder := tmp_path / "folder")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    message = f"{folder} has other files than an export of this run: choose another --output, or delete it"
    with pytest.raises(ValueError, match=message):
        export.write(bert, other.variables(average=True), kind, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (folder / "config.json").unlink()  # as if the export had been interrupted
    export.write(gpt, state.variables(average=True), "safetensors", folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="choose another --output"):
        export.write(gpt, state.variables(average=True), kind, tmp_path)


def test_image_model_with_its_preprocessing(exported):
    """Check the logits and the classes of the default architecture, through the image processor of `transformers`."""
    *_, experiment, state = exported["vit"]
    folder = experiment.workdir / "images"
    files = [path.name for path in export.write(experiment, state.variables(), "safetensors", folder)]
    assert files == ["config.json", "model.safetensors", "preprocessor_config.json"]
    model = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    assert type(model) is transformers.IJepaForImageClassification
    assert model.config.id2label == {number: str(number) for number in range(10)}
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 1), np.uint8)
    inputs = processor(images=[torch.tensor(pixels.transpose(2, 0, 1))], return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits
    context = experiment.context()
    (batch,) = context.inputs(from_memory([pixels], "images", 1).rows, Loader(batch_size=1))
    np.testing.assert_allclose(inputs["pixel_values"].numpy().transpose(0, 2, 3, 1), batch["image"], atol=1e-6)
    ours = experiment.model.apply(state.variables(), jax.numpy.asarray(batch["image"]))
    np.testing.assert_allclose(logits, ours, atol=1e-4)


def assert_same_pixels(task, folder, size):
    """Compare the pixels of an image of some height and width with those of the processor in a folder."""
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    processor = transformers.AutoImageProcessor.from_pretrained(folder, use_fast=False)
    theirs = processor(images=[Image.fromarray(image)], return_tensors="np")["pixel_values"].transpose(0, 2, 3, 1)
    transform = task.evaluation_transform(Facts(mean=task.mean or (0.4,), std=task.std or (0.2,)))
    ours = transform({"image": [image]}, np.zeros((1, 2), np.uint32))["image"]
    assert theirs.shape == ours.shape == (1, 16, 16, 3)
    np.testing.assert_allclose(theirs, ours, atol=1.01 / 255 / 0.2)


@tiered(
    ("crop", "resample", "squash"),
    [(0.875, "bicubic", True), (1.0, "bilinear", True), (0.875, "bicubic", False), (1.0, "bilinear", False)],
)
def test_image_processor_crops_as_the_task_does(crop, resample, squash, tmp_path):
    """Compare the pixels of an image that is not square with those of `transformers`."""
    task = TASKS["image_classification"](
        image_size=16, evaluation_crop=crop, resample=resample, squash=squash, mean=(0.4,), std=(0.2,)
    )
    model = models.build("vit", image_size=16, num_classes=2)
    companions.save_preprocessing(tmp_path, model, vars(task))
    assert_same_pixels(task, tmp_path, (40, 32))
    assert companions.preprocessing(tmp_path) == {
        "image_size": 16, "evaluation_crop": pytest.approx(crop, abs=0.03), "resample": resample,
        "mean": (0.4,) * 3, "std": (0.2,) * 3, "squash": squash,
    }  # fmt: skip


@pytest.mark.parametrize(
    "about",
    [
        {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}},
        {"feature_extractor_type": "ViTFeatureExtractor", "size": 16},
        {"image_processor_type": "DeiTImageProcessor", "size": 20, "crop_size": 16, "do_center_crop": True},
        {"image_processor_type": "CLIPImageProcessor", "size": 16, "crop_size": 16, "do_center_crop": True},
        {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}, "do_normalize": False},
        {"feature_extractor_type": "ConvNextFeatureExtractor", "size": 16, "crop_pct": 0.7},
        {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 16}},
    ],
    ids=["ViT", "number", "DeiT", "CLIP", "not normalized", "ConvNext", "default crop"],
)
def test_imported_preprocessing_is_that_of_transformers(about, tmp_path):
    """Compare the pixels of an image that is not square, which some processors squash and others crop."""
    about = {"image_mean": [0.4] * 3, "image_std": [0.2] * 3, "resample": 2, "do_normalize": True} | about
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(about))
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    task = TASKS["image_classification"](**companions.preprocessing(tmp_path))
    assert_same_pixels(task, tmp_path, (48, 24))


@pytest.mark.parametrize(
    "about",
    [
        {"size": "x"},
        {"size": {"shortest_edge": "a"}},
        {"size": {"longest_edge": 1 << 30}},
        {"size": -5},
        {"size": True},
        {"size": 22.5},
        {"size": 8, "crop_size": "z", "do_center_crop": True},
        {"size": 8, "image_processor_type": 5},
        {"size": 8, "image_processor_type": "ConvNextImageProcessor", "crop_pct": 87.5},
        {"resample": [2]},
        {"image_mean": 5},
        {"image_mean": "abc"},
        {"image_mean": [float("nan")] * 3},
        {"image_std": [0.0] * 3},
        {"image_mean": [10**400] * 3},
        {"resample": 1},
        {"rescale_factor": 1 / 127.5},
        {"do_rescale": False},
        {"do_normalize": None},
        {"image_processor_type": "DeiTImageProcessor", "size": 256, "do_center_crop": None},
        {"image_processor_type": "ConvNextImageProcessor", "size": 20, "do_center_crop": True, "crop_size": 16},
        {"size": 8, "do_pad": True, "pad_size": {"height": 16, "width": 16}},
        {"size": {"height": 16, "width": 8}},
        {"size": 8, "crop_size": {"height": 8, "width": 4}, "do_center_crop": True},
    ],
    ids=lambda about: str(about)[:60],
)
def test_wrong_preprocessing_raises(about, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (path := tmp_path / "preprocessor_config.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=f"{path} cannot be used: "):
        companions.preprocessing(tmp_path)


def test_images_that_keep_their_size_are_not_cropped(tmp_path):
    task = TASKS["image_classification"](image_size=0, evaluation_crop=0.5)
    companions.save_preprocessing(tmp_path, models.build("vit", image_size=16, num_classes=2), vars(task))
    about = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert (about["size"], about["crop_size"]) == ({"shortest_edge": 16}, {"height": 16, "width": 16})


def test_normalization_of_other_channels_raises(tmp_path):
    model = models.build("vit", "Ti", image_size=8, patch_size=4, num_classes=2, channels=1)
    (tmp_path / "config.json").write_text("{}")
    facts_of(tmp_path, TASKS["image_classification"](image_size=8), model)
    task = TASKS["image_classification"](image_size=8, mean=(0.1, 0.2, 0.3))
    with pytest.raises(ValueError, match=rf"^{tmp_path}/preprocessor_config\.json gives .* channels \(1\)"):
        facts_of(tmp_path, task, model)


def test_interrupted_export_cannot_be_loaded(exported, tmp_path, monkeypatch):
    *_, experiment, state = exported["vit"]
    arguments = experiment, state.variables(average=True), "safetensors", tmp_path / "out"
    names = [path.name for path in export.write(*arguments)]
    with monkeypatch.context() as patched:
        patched.setattr(companions, "save_labels", lambda *_: sys.exit())
        with pytest.raises(SystemExit):
            export.write(*arguments)
        assert [path.name for path in sorted((tmp_path / "out").iterdir())] == [export.OWNER, *names]
        with pytest.raises(SystemExit):
            export.write(*arguments[:3], tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == [export.OWNER]
    assert [path.name for path in export.write(*arguments[:3], tmp_path / "new")] == names


def test_concurrent_export_to_the_same_folder_is_refused(exported, tmp_path, monkeypatch):
    """Check that a second process neither deletes the files that the first one is writing nor adds its own."""
    *_, experiment, state = exported["vit"]
    save = export.convert.save

    def save_during_another_export(*args):
        save(*args)
        with pytest.raises(ValueError, match=r"another process is exporting to .*: wait for it"):
            export.write(experiment, state.variables(), "stablehlo", tmp_path)

    monkeypatch.setattr(export.convert, "save", save_during_another_export)
    names = [path.name for path in export.write(experiment, state.variables(), "safetensors", tmp_path)]
    assert "model.safetensors" in names
    assert "model.stablehlo" not in names


def test_unsupported_export_raises(exported):
    *_, experiment, state = exported["transformer"]
    message = r"a Transformer cannot be written for `transformers`: .* exported with --format=stablehlo\."
    with pytest.raises(ValueError, match=message):
        export.write(experiment, state.variables(average=True), "safetensors", experiment.workdir / "no")


def test_model_that_the_reference_does_not_have_may_be_exported_as_a_program(tmp_path):
    config, _ = cli.load("resnet_digits")
    config.model.epsilon = 1e-3
    experiment = Experiment(config, tmp_path)
    with pytest.raises(ValueError, match=r"epsilon 1e-5\. Any model can be exported with --format=stablehlo\."):
        export.write(experiment, {}, "safetensors", tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_names_of_fewer_classes_than_those_of_the_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"id2label": {str(n): f"LABEL_{n}" for n in range(3)}}))
    companions.save_labels(tmp_path, ["no", "yes"])
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["id2label"] == {"0": "no", "1": "yes", "2": "LABEL_2"}
    assert saved["label2id"] == {"no": 0, "yes": 1, "LABEL_2": 2}
