import dataclasses
import errno

import numpy as np
import pytest

from lineage.configs import schema
from lineage.data import Loader, shards
from lineage.data.sources import SOURCES
from lineage.data.sources.folder import Folder
from lineage.data.sources.packages import Dates, Digits
from lineage.data.sources.text import StandardLibrary, Text
from lineage.data.tokenizers.kinds import BPE, Characters, TokenizerFile
from lineage.tasks import TASKS
from lineage.tasks.causal_lm import BidirectionalLM, CausalLM
from lineage.tasks.image_classification import ImageClassification
from lineage.tasks.sequence_to_sequence import SequenceToSequence
from tests.data.conftest import load, train

PROSE = "The quick brown fox jumps over the lazy dog.\n" * 40


@pytest.fixture
def prose(tmp_path):
    (tmp_path / "prose.txt").write_text(PROSE)
    return str(tmp_path / "prose.txt")


def test_digits():
    loaded = load(Digits(), ImageClassification(augment="shift(1)"), batch_size=128, evaluation_batch_size=100, seed=3)
    batch = loaded.train[5]
    actual = {name: (*value.shape, value.dtype.name) for name, value in batch.items()}
    assert actual == {"image": (128, 8, 8, 1, "float32"), "label": (128, "int32"), "mask": (128, "bool")}
    assert loaded.facts.examples == {"train": 1438, "test": 359}
    assert loaded.facts.num_classes == 10
    assert loaded.tokenizer is None
    assert len(loaded.splits["test"]) == 4
    assert sum(batch["mask"].sum() for batch in loaded.splits["test"]) == 359
    images = np.concatenate([batch["image"] for batch in loaded.splits["test"]])
    assert (images.min(), images.max()) == (-1, 1)
    assert loaded.train.examples_per_epoch == 1438
    assert loaded.train.batch_size == 128


def test_seed_changes_training_batches_only():
    first, second = (load(Digits(), ImageClassification(), batch_size=64, seed=seed) for seed in (0, 1))
    np.testing.assert_array_equal(first.splits["test"][2]["image"], second.splits["test"][2]["image"])
    assert (first.train[0]["label"] != second.train[0]["label"]).any()


def test_augmentation_is_for_training_only():
    plain, shifted = (
        load(Digits(), ImageClassification(augment=augment), batch_size=64) for augment in ("", "shift(2)")
    )
    np.testing.assert_array_equal(plain.splits["test"][0]["image"], shifted.splits["test"][0]["image"])
    np.testing.assert_array_equal(plain.train[0]["label"], shifted.train[0]["label"])
    assert (plain.train[0]["image"] != shifted.train[0]["image"]).any()


def test_processes_share_the_global_batch():
    what = Digits(), ImageClassification(augment="shift(1)")
    whole = load(*what, batch_size=64).train[7]
    parts = [load(*what, batch_size=64, process_index=i, process_count=4).train[7] for i in range(4)]
    np.testing.assert_array_equal(np.concatenate([part["image"] for part in parts]), whole["image"])


def test_image_size():
    loaded = load(Digits(), ImageClassification(image_size=16, augment="crop(0.5) | randaugment(1, 5)"), batch_size=4)
    assert loaded.train[0]["image"].shape == loaded.splits["test"][0]["image"].shape == (4, 16, 16, 1)
    assert loaded.facts.image_size == (16, 16)
    loaded = load(Digits(), ImageClassification(image_size=16, augment="flip"), batch_size=4)
    assert loaded.train[0]["image"].shape == (4, 16, 16, 1)


def test_text_file(prose):
    loaded = load(Text(prose, validation_fraction=0.2), CausalLM(sequence_length=16), Characters(), batch_size=4)
    cut = int(len(PROSE) * 0.8)
    assert loaded.facts.tokens == {"train": cut, "validation": len(PROSE) - cut}
    assert loaded.facts.vocab_size == len(set(PROSE))
    assert loaded.facts.characters_per_token == {"train": 1, "validation": 1}
    batch = loaded.train[0]
    assert batch["tokens"].shape == batch["targets"].shape == batch["mask"].shape == (4, 16)
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    held = loaded.splits["validation"]
    targets = np.concatenate([batch["targets"][batch["mask"]] for batch in held])
    assert loaded.tokenizer.decode(targets) == PROSE[cut + 1 :]


@pytest.mark.parametrize(("size", "stride"), [(1, 0), (7, 0), (64, 0), (7, 4)])
def test_evaluation_counts_each_target_once_for_any_batch_size_and_stride(prose, size, stride):
    task = CausalLM(sequence_length=10, stride=3, evaluation_stride=stride)
    loaded = load(Text(prose), task, batch_size=1, evaluation_batch_size=size)
    batches = list(loaded.splits["validation"])
    assert sum(int(batch["mask"].sum()) for batch in batches) == loaded.facts.tokens["validation"] - 1
    text = PROSE[int(len(PROSE) * 0.9) :]
    assert loaded.tokenizer.decode(np.concatenate([batch["targets"][batch["mask"]] for batch in batches])) == text[1:]


def test_bidirectional_models_have_no_evaluation_stride():
    """A window's mask would hide the tokens before it from both models."""
    with pytest.raises(TypeError, match="evaluation_stride"):
        BidirectionalLM(sequence_length=8, evaluation_stride=4)


def test_files_for_each_split(tmp_path):
    for name, content in {"train/a": "aab", "train/b": "ba", "held": "cab", "test": "abc"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    source = Text(*(str(tmp_path / name) for name in ("train", "held", "test")))
    assert source.files() == [str(tmp_path / name) for name in ("train", "held", "test")]
    loaded = load(source, CausalLM(sequence_length=4), Characters(), batch_size=1)
    assert loaded.facts.tokens == {"train": 7, "validation": 3, "test": 3}
    assert loaded.facts.vocab_size == 4
    assert list(loaded.splits) == ["validation", "test"]


def test_no_validation(prose):
    loaded = load(Text(prose, validation_fraction=0.0), CausalLM(sequence_length=4), batch_size=1)
    assert loaded.splits == {}
    assert loaded.facts.tokens == {"train": len(PROSE)}


def test_stdlib_splits_by_module():
    loaded = load(StandardLibrary(max_bytes=2_000_000), CausalLM(sequence_length=64), batch_size=2)
    tokens = loaded.facts.tokens
    assert 0.02 < tokens["validation"] / (tokens["train"] + tokens["validation"]) < 0.4
    end = loaded.tokenizer.end_of_text
    assert loaded.train.source.tokens[-1] == loaded.splits["validation"].source.tokens[-1] == end


def test_tokenizer_of_the_workdir_is_reused(prose, tmp_path):
    run = tmp_path / "run"
    what, options = (Text(prose), CausalLM(sequence_length=8), BPE(280)), {"batch_size": 2, "workdir": run}
    first = load(*what, **options)
    assert not run.exists()
    first.tokenizer.save(run)
    (tmp_path / "prose.txt").write_text(PROSE[::-1])
    again = load(*what, **options)
    assert again.tokenizer.to_str() == first.tokenizer.to_str()
    assert load(*what, batch_size=2).tokenizer.to_str() != first.tokenizer.to_str()


def test_tokenizer_from_a_file(prose, tmp_path):
    train("bpe", ["fox " * 100], vocab_size=270).save(tmp_path / "own.json")
    loaded = load(Text(prose), CausalLM(sequence_length=8), TokenizerFile(str(tmp_path / "own.json")), batch_size=2)
    assert loaded.facts.vocab_size == loaded.tokenizer.vocab_size < 270
    assert loaded.facts.characters_per_token["train"] > 1


def test_images_from_folders(tmp_path):
    from PIL import Image

    for split in ("train", "validation"):
        for label in ("a", "b"):
            (tmp_path / split / label).mkdir(parents=True)
            for i in range(3):
                size = (6 + i, 9)
                Image.new("RGB", size, (i, 0, 0)).save(tmp_path / split / label / f"{i}.png")
    task = ImageClassification(image_size=8, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    loaded = load(Folder(str(tmp_path)), task, batch_size=4)
    assert loaded.train[0]["image"].shape == (4, 8, 8, 3)
    assert loaded.facts.class_names == ("a", "b")
    assert loaded.facts.mean == (0.4, 0.5, 0.6)
    assert list(loaded.splits) == ["validation"]
    unsized = load(Folder(str(tmp_path)), ImageClassification(), batch_size=6)
    with pytest.raises(ValueError, match=r"set task.image_size"):
        unsized.train[0]


IMAGES, WINDOWS = ImageClassification(), CausalLM(sequence_length=8)
SOME = StandardLibrary(max_bytes=100_000)


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        ((Digits(), IMAGES, BPE(300)), {}, "The task reads no texts, so the tokenizer must be left at its default"),
        ((Digits(), SequenceToSequence()), {}, "The source 'digits' provides images, not pairs"),
        ((Dates(), IMAGES), {}, "The source 'cldr' provides pairs, not images"),
        ((SOME, CausalLM()), {}, "task.sequence_length is 0"),
        ((StandardLibrary(max_bytes=1), WINDOWS), {}, "within max_bytes=1"),
        (
            (Dates(), SequenceToSequence()),
            {"buckets": (8, 4)},
            r"loader.buckets is \(8, 4\): it must be lengths in inc",
        ),
        ((Digits(), ImageClassification(mean=(0.1, 0.2))), {}, r"mean is \(0.1, 0.2\) and .*: they need 1 or 1"),
        ((Digits(), IMAGES), {"order": "stream"}, "loader.order is 'stream': the task 'image_classification' does not"),
        ((Digits(), IMAGES), {"buckets": (8,)}, r"loader.buckets is \(8,\): the task 'image_classification' does not"),
        ((SOME, WINDOWS), {"repeats": 2}, "loader.repeats is 2: the task 'causal_lm' does not"),
        *(
            (
                (SOME, CausalLM(8, **{key: 4})),
                {"order": "stream"},
                f"task.{key} is 4: it must be 0, because loader.order=",
            )
            for key in ("evaluation_stride", "stride")
        ),
        ((Digits(), IMAGES), {"batch_size": 9, "process_count": 2}, "size is 9, the number of processes 2: the"),
    ],
)
def test_invalid_options_raise(what, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        load(*what, **{"batch_size": 4, **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("registry", "name", "options", "message"),
    [
        (SOURCES, "digit", {}, "Unknown source 'digit'. Did you mean 'digits'"),
        (SOURCES, "text", {}, "The source 'text' needs a path, such as --config.source=text:PATH"),
        (SOURCES, "digits", {"path": "8"}, "Digits has no key 'path'"),
        (SOURCES, "digits", {"train_split": "train[:50%]"}, "Digits has no key 'train_split'"),
        (SOURCES, "text", {"path": "x", "train_split": "y"}, "Text has no key 'train_split'"),
        (TASKS, "image_classification", {"sequence_length": 8}, "ImageClassification has no key 'sequence_length'"),
        (TASKS, "causal_lm", {"augment": "flip"}, "CausalLM has no key 'augment'"),
        (TASKS, "image_classification", {"std": (0.0,)}, "std .* above 0"),
        (TASKS, "image_classification", {"evaluation_crop": 0.0}, "task.evaluation_crop is 0.0: it must be above 0"),
        (TASKS, "pears", {}, "Unknown task 'pears'"),
    ],
)
def test_invalid_sections_raise(registry, name, options, message):
    with pytest.raises(ValueError, match=message):
        schema.build(registry, schema.section(registry, name, **options))


@pytest.mark.parametrize(("key", "value"), [("batch_size", 0), ("evaluation_batch_size", -1)])
def test_invalid_loader_options_raise(key, value):
    with pytest.raises(ValueError, match=f"loader.{key} is {value}: it must be . or more"):
        Loader(**{key: value})


def test_empty_and_missing_texts_raise(tmp_path):
    (tmp_path / "empty").write_text("")
    with pytest.raises(ValueError, match="There is no text in"):
        load(Text(str(tmp_path / "empty")), CausalLM(sequence_length=8))
    with pytest.raises(FileNotFoundError, match="There is no text file at"):
        load(Text(str(tmp_path / "missing")), CausalLM(sequence_length=8))


def test_data_is_frozen():
    loaded = load(Digits(), ImageClassification(), batch_size=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.train = None


def test_shard_that_cannot_be_mapped_into_memory_is_named(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(np, "memmap", refuse)
    (path := tmp_path / "00000.tokens").write_bytes(bytes(8))
    with pytest.raises(OSError, match=f"Too many open files: '{path}'"):
        shards.ShardFile(path, np.dtype(np.uint16), shards.Shard(0, 0, 0, 0, 0, 0))
