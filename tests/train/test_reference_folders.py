"""Models in folders of `transformers` predict what `transformers` predicts, with the settings of the folder."""

import json
import os

import jax
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from PIL import Image
from tokenizers import decoders, normalizers, pre_tokenizers, processors

import lineage
from lineage.configs import cli
from lineage.data import Facts, Tokenizer
from lineage.models.convert import companions
from lineage.tasks import TASKS
from lineage.train import export, pretrained
from lineage.train.experiment import Experiment
from lineage.train.trained import Trained

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]


def words(folder, special, around=""):
    """Write a tokenizer of words that puts the tokens `around`, in which A is the text, around a text."""
    marked = [f"\u2581{word}" for word in WORDS]
    model = tokenizers.models.WordLevel({word: id for id, word in enumerate([*special, *marked])}, unk_token=special[0])
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(special)
    if around:
        ids = [(token, backend.token_to_id(token)) for token in special]
        backend.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


def random_weights(reference, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return reference.eval()


def llama(folder, ends, seed):
    """Write a random Llama whose texts end with the tokens `ends`, and return the reference and its tokenizer."""
    tokenizer = words(folder, ["<unk>", "<s>", "</s>", "<|eot_id|>"], "<s> $A")
    config = transformers.LlamaConfig(
        vocab_size=12, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32, eos_token_id=ends,
    )  # fmt: skip
    reference = random_weights(transformers.LlamaForCausalLM(config), seed)
    reference.save_pretrained(folder)
    return reference, tokenizer


@pytest.mark.thorough
@pytest.mark.parametrize("num_beams", [1, 2])
def test_continuations(num_beams, tmp_path):
    """Check that texts end with any of the end tokens of `config.json`, and that they begin with their space."""
    prompts, ended = ["one", "two three four", "five six"], 0
    for seed in range(4):
        reference, tokenizer = llama(tmp_path / f"llama{seed}", [2, 3], seed)
        changes = {"sampling.temperature": 0.0, "sampling.max_new_tokens": 8, "sampling.num_beams": num_beams}
        model = lineage.load(tmp_path / f"llama{seed}", task="causal_lm", changes=changes)
        for prompt, row in zip(prompts, model.predict(prompts)):
            given = tokenizer(prompt, return_tensors="pt").input_ids
            out = reference.generate(given, max_new_tokens=8, do_sample=False, num_beams=num_beams, pad_token_id=0)[0]
            ended += out[-1].item() == 3
            before, whole = (tokenizer.decode(ids[ids > 3]) for ids in (given[0], out))  # without special tokens
            assert row["prediction"] == whole[len(before) :]
            assert row["prediction"] in model.generate(prompt)
    assert ended


@pytest.mark.thorough
@pytest.mark.parametrize("task", ["sequence_to_sequence", "span_corruption"])
def test_special_tokens_in_generated_texts(task, tmp_path):
    """Check that they are omitted, as in pipelines, except for the sentinels of T5's pre-training."""
    special = ["<pad>", "</s>", "<unk>", "<extra_id_0>", "<extra_id_1>"]
    tokenizer = words(tmp_path, special, "$A </s>")
    config = transformers.T5Config(
        vocab_size=13, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    reference = random_weights(transformers.T5ForConditionalGeneration(config), 0)
    with torch.no_grad():
        reference.shared.weight[:5] *= 2
    reference.save_pretrained(tmp_path)
    changes = {"sampling.temperature": 0.0, "sampling.max_new_tokens": 12, "sampling.repetition_penalty": 2.0}
    model, seen = lineage.load(tmp_path, task=task, changes=changes), set()
    for text in ["one two", "three", "four five six"]:
        (row,), given = model.predict([text]), tokenizer(text, return_tensors="pt").input_ids
        out = reference.generate(given, max_new_tokens=12, do_sample=False, repetition_penalty=2.0)[0]
        seen |= {*out[1:].tolist()}
        shown = [id for id in out.tolist() if id > 4 or (id > 2 and task == "span_corruption")]
        assert row["prediction"] == tokenizer.decode(shown)
    assert {2, 3, 5} & seen == {2, 3, 5}, seen


def fine_tuned(folder, task, source, workdir, changes=()):
    """Return an experiment that fine-tunes the model in a folder, without training it."""
    config, _ = cli.load(f"finetune:{task}")
    given = {"init.path": str(folder), "source": source, "total_steps": 1, "total_epochs": None}
    cli.override(config, given | dict(changes))
    return Experiment(config, workdir, jax.devices()[:1])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ends", "known"),
    [(5, (5,)), ([5, 2], (2, 5)), ([4, 5], (4, 5)), ([3, 11, 99], (3,)), (9, (2,)), (None, (2,)), (2, (2,))],
)
def test_end_tokens_of_runs(ends, known, tmp_path):
    """Check that a run ends texts as its pre-trained model, also without its folder, and that its export does."""
    special = ["<unk>", "<s>", "</s>", "<|eot_id|>", "<eos>", "<|im_end|>"]
    words(tmp_path / "base", special, "<s> $A")
    config = transformers.LlamaConfig(
        vocab_size=14, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32, eos_token_id=ends,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("one two three four")
    changes = {"task.sequence_length": 4, "source.validation_fraction": 0.0, "task.cache_dir": str(tmp_path / "cache")}
    source, workdir = f"text:{tmp_path}/*.txt", tmp_path / "run"
    experiment = fine_tuned(tmp_path / "base", "causal_lm", source, workdir, changes)
    tokens = np.concatenate([experiment.data.train.source[0]["tokens"], experiment.data.train.source[1]["tokens"]])
    assert known[0] in tokens
    experiment.tokenizer.save(workdir)
    experiment.facts.save(workdir / "facts.json")
    saved = Experiment(experiment.config, workdir, saved_facts=experiment.facts).tokenizer
    assert experiment.tokenizer.ends == saved.ends == Tokenizer.load(workdir).ends == known
    assert saved.end_of_text == known[0]
    export.write(experiment, jax.jit(experiment.make_state)().variables(), "safetensors", tmp_path / "export")
    assert companions.end_tokens(tmp_path / "export") == known
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    assert exported.eos_token_id == known[0]
    assert lineage.load(tmp_path / "export", task="causal_lm").context.tokenizer.ends == known


@pytest.mark.thorough
def test_excluded_tokens_of_runs(tmp_path):
    """Check that a run never generates the tokens that its pre-trained model excludes, nor does its export."""
    base, workdir, out = tmp_path / "base", tmp_path / "run", tmp_path / "export"
    reference, tokenizer = llama(base, 2, 0)
    prompt = tokenizer("one two", return_tensors="pt").input_ids
    likely = int(reference(prompt).logits[0, -1].argmax())
    about = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(about | {"bad_words_ids": [[likely]]}))
    (tmp_path / "a.txt").write_text("one two three four")
    changes = {"task.sequence_length": 4, "source.validation_fraction": 0.0, "task.cache_dir": str(tmp_path / "cache")}
    sampling = {"sampling.temperature": 0.0, "sampling.max_new_tokens": 6}
    experiment = fine_tuned(base, "causal_lm", f"text:{tmp_path}/a.txt", workdir, changes | sampling)
    variables = lineage.load(base, task="causal_lm").original
    experiment.tokenizer.save(workdir)
    saved = Experiment(experiment.config, workdir, saved_facts=experiment.facts)
    export.write(saved, variables, "safetensors", out)
    generated = reference.generate(prompt, bad_words_ids=[[likely]], max_new_tokens=6, do_sample=False, eos_token_id=2)
    expected = tokenizer.decode(generated[0, prompt.shape[1] :], skip_special_tokens=True)
    for model in (Trained(saved, variables), lineage.load(out, task="causal_lm", changes=sampling)):
        assert model.predict(["one two"])[0]["prediction"].strip() == expected
    assert json.loads((out / "config.json").read_text())["bad_words_ids"] == [[likely]]


@pytest.mark.thorough
def test_no_other_tokenizer_is_trained_if_the_model_has_none(tmp_path):
    llama(tmp_path / "base", 2, 0)
    (tmp_path / "base" / "tokenizer.json").unlink()
    (tmp_path / "a.txt").write_text("one two three four")
    changes = {"task.sequence_length": 4, "source.validation_fraction": 0.0, "task.cache_dir": str(tmp_path / "cache")}
    arguments = tmp_path / "base", "causal_lm", f"text:{tmp_path}/*.txt", tmp_path / "run"
    with pytest.raises(FileNotFoundError, match=r"There is no .*/base/tokenizer\.json: write it with AutoTokenizer"):
        _ = fine_tuned(*arguments, changes).tokenizer
    assert fine_tuned(*arguments, changes | {"init.skip": ("^embed/",)}).tokenizer.vocab_size == 257
    with pytest.raises(FileNotFoundError, match=r"There is no .*/base/tokenizer\.json: write it with AutoTokenizer"):
        lineage.load(tmp_path / "base", task="causal_lm")


@pytest.mark.thorough
def test_no_other_tokenizer_is_trained_if_the_link_to_that_of_the_model_is_broken(tmp_path):
    llama(tmp_path / "base", 2, 0)
    (tmp_path / "a.txt").write_text("one two three four")
    (path := tmp_path / "base" / "tokenizer.json").unlink()
    path.symlink_to("missing")
    experiment = fine_tuned(tmp_path / "base", "causal_lm", f"text:{tmp_path}/a.txt", tmp_path / "run")
    with pytest.raises(ValueError, match=f"^{path} is neither a file nor a link to one that exists"):
        _ = experiment.data


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("ViT", SMALL | {"image_size": 16, "patch_size": 8}),
        ("ViTMAE", SMALL | {"image_size": 16, "patch_size": 8}),
        ("Swin", {"image_size": 8, "patch_size": 2, "embed_dim": 8, "depths": [1], "num_heads": [1], "window_size": 4}),
        ("ResNet", {"embedding_size": 8, "hidden_sizes": [8], "depths": [1], "layer_type": "basic"}),
        ("Bit", {"embedding_size": 8, "hidden_sizes": [8], "depths": [1], "num_groups": 2}),
    ],
)
def test_image_models_without_a_classifier_are_fine_tuned(kind, sizes, tmp_path):
    config = getattr(transformers, f"{kind}Config")(**sizes)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(tmp_path)
    experiment = fine_tuned(tmp_path, "image_classification", "folder:images", tmp_path / "run")
    pretrained.check(experiment)
    assert experiment.config.model.name == {"Swin": "swin", "ResNet": "resnet", "Bit": "resnet"}.get(kind, "vit")


def test_an_ijepa_is_fine_tuned_with_another_pooling(tmp_path):
    """Check that a classifier of each patch is refused."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.IJepaModel(transformers.IJepaConfig(**sizes, image_size=16, patch_size=8)).save_pretrained(tmp_path)
    arguments = tmp_path, "image_classification", "folder:images", tmp_path / "run"
    with pytest.raises(ValueError, match="needs a model with the outputs classes: ViT has features"):
        pretrained.check(fine_tuned(*arguments))
    pretrained.check(fine_tuned(*arguments, {"model.pooling": "gap"}))


@pytest.mark.thorough
def test_regressions(tmp_path):
    """Check a regression on a model with the default number of classes, and its export in a pipeline."""
    words(tmp_path / "base", ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"], "[CLS] $A [SEP]")
    config = transformers.BertConfig(
        vocab_size=13, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, pad_token_id=1,
    )  # fmt: skip
    random_weights(transformers.BertModel(config), 0).save_pretrained(tmp_path / "base")
    (tmp_path / "rows.csv").write_text("text,label\none two,0.5\nthree,2.5\n")
    changes = {"loader.batch_size": 2, "task.sequence_length": 8}
    experiment = fine_tuned(tmp_path / "base", "text_regression", f"csv:{tmp_path}/rows.csv", tmp_path / "run", changes)
    pretrained.check(experiment)
    variables = jax.jit(experiment.make_state)().variables()
    export.write(experiment, variables, "safetensors", tmp_path / "export")
    (row,) = Trained(experiment, variables).predict(["one two"])
    (expected,) = transformers.pipeline("text-classification", model=str(tmp_path / "export"))(["one two"])
    assert row["value"] == pytest.approx(expected["score"], rel=1e-4)


def test_tokens_around_texts(tmp_path):
    """Check a tokenizer that has <s> and [CLS], as BigBird's: the tokens around a text are those that it adds."""
    special = ["<pad>", "</s>", "<s>", "[CLS]", "[SEP]", "[MASK]"]
    theirs = words(tmp_path, special, "[CLS] $A [SEP]")
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.cls, tokenizer.sep, tokenizer.encloses) == (3, 4, True)
    (examples, *_) = TASKS["text_classification"](sequence_length=8).input_examples([("one two",)], tokenizer, Facts())
    batch = examples.take(np.arange(1))
    assert batch["tokens"][batch["tokens_mask"]].tolist() == theirs("one two").input_ids


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "classes"), [("multi_label_classification", 3), (None, 1), (None, 2), (None, 3)])
def test_probabilities_of_classes(kind, classes, tmp_path):
    """Check the names, too, which the reference does not write for two classes with the default names."""
    reference, tokenizer = classifier(tmp_path, kind, classes)
    (row,) = lineage.load(tmp_path, task="text_classification").predict(["one two"])
    pipeline = transformers.pipeline("text-classification", model=reference, tokenizer=tokenizer, top_k=None)
    expected = {entry["label"]: entry["score"] for entry in pipeline(["one two"])[0]}
    assert row["probabilities"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.thorough
def test_missing_classifiers_are_refused(tmp_path):
    classifier(tmp_path, None, 2)
    message = f"^{tmp_path} has a model with the outputs classification, not question_answering: train it first, as --c"
    with pytest.raises(ValueError, match=message):
        lineage.load(tmp_path, task="question_answering")
    for name, value, wrong in (
        ("head", "masked_lm", r"masked_lm/bias of the changed model is missing: it must have the shape \(13,\)"),
        ("depth", 2, r"attention/key/bias of the changed model is of shape \(1, 2, 8\): .* shape \(2, 2, 8\)"),
    ):
        task = "masked_lm" if name == "head" else "text_classification"
        with pytest.raises(ValueError, match=f"^{tmp_path}: the parameter .*{wrong}"):
            lineage.load(tmp_path, task=task, changes={f"model.{name}": value})
    changes = {"model.dropout": 0.5, "model.attend": "dense"}
    assert lineage.load(tmp_path, task="text_classification", changes=changes).predict(["one"])


@pytest.mark.thorough
def test_numbers_are_not_read_as_probabilities(tmp_path):
    classifier(tmp_path, "regression", 1)
    with pytest.raises(ValueError, match="problem_type is 'regression', which only the task text_regression"):
        lineage.load(tmp_path, task="text_classification")
    classifier(tmp_path, "regression", 2)
    with pytest.raises(ValueError, match=r"model\.num_classes is 2: it must be 1 for a regression"):
        lineage.load(tmp_path, task="text_regression")


def classifier(folder, kind, classes):
    """Write a random classifier, and return the reference and its tokenizer."""
    tokenizer = words(folder, ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"], "[CLS] $A [SEP]")
    config = transformers.BertConfig(
        vocab_size=13, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, num_labels=classes, problem_type=kind, pad_token_id=1,
    )  # fmt: skip
    reference = random_weights(transformers.BertForSequenceClassification(config), 0)
    reference.save_pretrained(folder)
    return reference, tokenizer


@pytest.mark.thorough
def test_categories_of_published_detrs(tmp_path):
    """Check that labels without a class keep COCO's numbers for the others."""
    backbone = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic", out_features=["stage1"]
    )
    config = transformers.DetrConfig(
        backbone_config=backbone, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=1,
        decoder_attention_heads=1, encoder_ffn_dim=8, decoder_ffn_dim=8, num_queries=3,
        id2label={0: "N/A", 1: "person", 2: "bicycle", 3: "N/A", 4: "car"},
    )  # fmt: skip
    reference = random_weights(transformers.DetrForObjectDetection(config), 0)
    with torch.no_grad():
        reference.class_labels_classifier.bias.copy_(torch.tensor([0.0, 0.0, 9.0, 0.0, 0.0, 0.0]))
    reference.save_pretrained(tmp_path)
    transformers.DetrImageProcessor(size={"shortest_edge": 32, "longest_edge": 32}).save_pretrained(tmp_path)
    (row,) = lineage.load(tmp_path, task="object_detection").predict([np.zeros((32, 32, 3), np.uint8)])
    assert {(found["category_id"], found["category"]) for found in row["objects"]} == {(2, "bicycle")}


def test_exported_classes_with_own_probabilities(tmp_path):
    (tmp_path / "config.json").write_text('{"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}')
    companions.save_labels(tmp_path, ["cat", "dog"], "multi_label_classification")
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["problem_type"], config["id2label"]) == ("multi_label_classification", {"0": "cat", "1": "dog"})


MEAN = {"image_mean": [0.4] * 3, "image_std": [0.2] * 3}


@pytest.mark.parametrize("size", [(41, 60), (33, 100), (100, 27), (64, 64)])
@pytest.mark.parametrize(
    "about",
    [
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 18}, "crop_size": 16},
        {"feature_extractor_type": "ConvNextFeatureExtractor", "size": 16, "do_center_crop": False},
        {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 16}, "crop_size": 16},
    ],
    ids=lambda about: next(iter(about.values())),
)
def test_crops(about, size, tmp_path):
    """Check images whose longer side is no integer after resizing: it is rounded down."""
    about = {"do_center_crop": True, "do_resize": True, "do_normalize": True, "resample": 3, **MEAN} | about
    pixels, theirs = compare(about, "image_classification", size, tmp_path)
    np.testing.assert_allclose(pixels, theirs, atol=1e-4)


@pytest.mark.parametrize("size", [(41, 60), (33, 100), (100, 27), (64, 64)])
@pytest.mark.parametrize("sizes", [{"size": 40, "max_size": 66}, {"size": {"shortest_edge": 40, "longest_edge": 66}}])
def test_images_of_detr(sizes, size, tmp_path):
    """Check the two numbers in old files, such as those of the published models, too."""
    about = {"feature_extractor_type": "DetrFeatureExtractor", "do_normalize": True, "do_resize": True, **MEAN} | sizes
    pixels, theirs = compare(about, "object_detection", size, tmp_path)
    height, width = theirs.shape[:2]
    assert pixels.shape == (66, 66, 3)
    np.testing.assert_allclose(pixels[:height, :width], theirs, atol=1e-4)
    assert not pixels[height:].any()
    assert not pixels[:, width:].any()


@pytest.mark.parametrize(
    "about",
    [
        {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 20}, "crop_size": 16},
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 20}, "crop_size": 16},
        {"feature_extractor_type": "DeiTFeatureExtractor", "size": 20, "crop_size": 16},
        {"feature_extractor_type": "ConvNextFeatureExtractor", "size": 16},
        {"feature_extractor_type": "BeitFeatureExtractor", "size": 16},
        {"image_processor_type": "ViTImageProcessor", "size": 16},
        {"image_processor_type": "BitImageProcessor", "size": 16, "do_center_crop": False, "default_to_square": True},
        *({"image_processor_type": f"{name}ImageProcessor"} for name in ("ViT", "DeiT", "Beit", "ConvNext", "Bit")),
        {"feature_extractor_type": "DetrFeatureExtractor", "size": 40, "max_size": 66},
    ],
    ids=lambda about: next(iter(about.values())),
)
def test_fields_that_a_file_omits(about, tmp_path):
    """Check that they have the values of the processor."""
    task = "object_detection" if "max_size" in about else "image_classification"
    pixels, theirs = compare(about, task, (41, 60), tmp_path)
    height, width = theirs.shape[:2]
    np.testing.assert_allclose(pixels[:height, :width], theirs, atol=1e-4)


@pytest.mark.parametrize("kind", ["vit", "deit", "swin", "resnet", "bit", "detr"])
def test_files_that_do_not_name_the_processor(kind, tmp_path):
    """Check that it is that of the model."""
    task = "object_detection" if kind == "detr" else "image_classification"
    pixels, theirs = compare({}, task, (41, 60), tmp_path, kind)
    height, width = theirs.shape[:2]
    np.testing.assert_allclose(pixels[:height, :width], theirs, atol=1e-4)


def compare(about, task, size, folder, kind="detr"):
    """Return the pixels of an image of our task and of the processor of `transformers`, [h, w, c]."""
    (folder / "preprocessor_config.json").write_text(json.dumps(about))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    theirs = np.asarray(processor(images=[Image.fromarray(image)], return_tensors="np")["pixel_values"])[0]
    task = TASKS[task](**companions.preprocessing(folder))
    batch = {"image": [image], "mask": np.ones(1, bool), "classes": [np.zeros(0, np.int32)]}
    batch |= {"boxes": [np.zeros((0, 4), np.float32)], "crowd": [np.zeros(0, bool)]}
    transform = task.evaluation_transform(Facts(mean=task.mean, std=task.std))
    return transform(batch, np.zeros(1, np.uint64))["image"][0], theirs.transpose(1, 2, 0)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"do_resize": False, "do_center_crop": True}, "do_resize is False and do_center_crop is True"),
        ({"image_processor_type": "DetrImageProcessor", "size": {"height": 8, "width": 8}}, "DETR's must have"),
        ({"image_processor_type": "DetrImageProcessor", "size": 8, "resample": 3}, "resample 'bicubic'"),
        ({"size": {"max_height": 8, "max_width": 8}}, "it must have"),
        (
            {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 8, "longest_edge": 9}},
            "only the pr",
        ),
        ({"image_processor_type": "LevitImageProcessor", "size": 8}, "its class is 'LevitImageProcessor', which must"),
        ({"size": 8, "crop_size": 16, "do_center_crop": True}, "crop_size is 16: it must be at most"),
    ],
)
def test_other_preprocessing_is_refused(about, message, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=message):
        companions.preprocessing(tmp_path)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_other_things_in_place_of_a_file_are_not_taken_for_a_missing_file(kind, tmp_path):
    path = tmp_path / "preprocessor_config.json"
    {"link": lambda: path.symlink_to("missing"), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    with pytest.raises(ValueError, match=f"^{path} is neither a file nor a link to one that exists"):
        companions.preprocessing(tmp_path)


def test_images_are_not_resized(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"do_resize": False, "size": 8} | MEAN))
    options = {"image_size": 0, "mean": (0.4,) * 3, "std": (0.2,) * 3, "resample": "bilinear"}
    assert companions.preprocessing(tmp_path) == options
