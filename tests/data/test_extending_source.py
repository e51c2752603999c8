"""A new source is one class in one file, possibly outside of the repository."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from PIL import Image

from lineage.configs import schema
from lineage.data import (
    Documents,
    ExampleSource,
    Images,
    LabeledTexts,
    Loader,
    PairedTexts,
    TaggedSentence,
    load,
    tokenize,
)
from lineage.data.content import Arrays, check_content, gather
from lineage.data.fingerprint import fingerprint
from lineage.data.loader import TrainBatches
from lineage.data.sources import SOURCES, Source
from lineage.data.tokenizers import Bytes
from lineage.tasks import TASKS
from lineage.tasks.text_classification import TextClassification

CSV_SOURCE = '''\
"""A CSV file of texts and labels."""

import csv
from dataclasses import dataclass

from lineage.data import LabeledTexts
from lineage.data.sources import SOURCES, SplitFiles


@SOURCES.register("reviews")
@dataclass(frozen=True)
class CSV(SplitFiles):
    """CSV files with a header and a text and a label in each row.

    Attributes:
        text: the name of the column with the text.
        label: the name of the column with the label.
    """

    text: str = "text"
    label: str = "label"

    def labeled_texts(self):
        return {split: self._read(path) for split, path in self.paths().items()}

    def _read(self, path):
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        return LabeledTexts([(row[self.text],) for row in rows], [row[self.label] for row in rows])
'''


@pytest.fixture
def registered(tmp_path):
    """Import the module of the source, which stays registered during the test."""
    path = tmp_path / "csv_source.py"
    path.write_text(CSV_SOURCE)
    spec = importlib.util.spec_from_file_location("csv_source", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del SOURCES["reviews"]


def test_a_csv_of_texts_and_labels(registered, tmp_path):
    train, held_out = tmp_path / "train.csv", tmp_path / "held_out.csv"
    train.write_text('review,stars\n"good, really good",5\nbad,1\n"so ""so""",3\n')
    held_out.write_text("stars,review\n3,middling\n")
    section = schema.section(SOURCES, "reviews", path=str(train), validation_path=str(held_out), text="review")
    expected = {"path": "training data."}
    expected |= {f"{split}_path": f'{split} data; "": none.' for split in ("validation", "test")}
    expected |= {name: f"the name of the column with the {name}." for name in ("text", "label")}
    assert {key.name: key.documentation for key in schema.keys(registered.CSV)} == expected
    section.label = "stars"
    source = schema.build(SOURCES, section)
    assert source.content_kinds() == ["labeled_texts"]
    assert set(fingerprint(source.files())) == {str(train), str(held_out)}
    loaded = load(source, TextClassification(sequence_length=32), Bytes(), Loader(batch_size=3))
    assert loaded.facts.class_names == ("1", "3", "5")
    assert loaded.facts.examples == {"train": 3, "validation": 1}
    batch = loaded.train[0]
    texts = [
        loaded.tokenizer.decode(row[mask][1:-1])
        for row, mask in zip(batch["tokens"], batch["tokens_mask"], strict=True)
    ]
    assert dict(zip(texts, batch["label"].tolist(), strict=True)) == {"good, really good": 2, "bad": 0, 'so "so"': 1}
    (validation,) = loaded.splits["validation"]
    np.testing.assert_array_equal(validation["label"][validation["mask"]], [1])
    with pytest.raises(ValueError, match="The source 'reviews' provides labeled texts, not documents"):
        source.read("documents")


def test_reimport_is_allowed_and_duplicate_name_raises(registered):
    exec(CSV_SOURCE, {"__name__": "again"})
    with pytest.raises(ValueError, match=r"The source name 'reviews' is taken by .*CSV"):
        SOURCES.register("reviews")(Loader)


@pytest.mark.parametrize(
    ("task", "kind", "content", "message"),
    [
        (
            "text_classification",
            "labeled_texts",
            {"train": LabeledTexts([("a",)] * 2, ["1", "2", "1"])},
            "2 texts and 3",
        ),
        ("text_classification", "labeled_texts", LabeledTexts([("a",)], ["1"]), "returns LabeledTexts: it must be a"),
        (
            "sequence_to_sequence",
            "pairs",
            {"train": PairedTexts(["a"], ["b", "c"])},
            "1 inputs and 2 targets: the counts must be equal",
        ),
        (
            "text_classification",
            "labeled_texts",
            {"train": LabeledTexts([("a",), ("b",)], ["1", 2])},
            r"has 2 \(int\) in its labels: they must be texts",
        ),
        (
            "text_classification",
            "labeled_texts",
            {"train": LabeledTexts([("a", "b"), ("a", None)], ["1", "2"])},
            r"has None \(NoneType\) in its texts: they must be texts",
        ),
        (
            "sequence_to_sequence",
            "pairs",
            {"train": PairedTexts(["a", float("nan")], ["b", "c"])},
            r"has nan \(float\) in its inputs: they must be texts",
        ),
        (
            "text_classification",
            "labeled_texts",
            {"train": LabeledTexts(zip(["a"]), ["1"])},
            "split of the source 'reviews' has texts in a zip: use a list",
        ),
    ],
)
def test_wrong_content_is_refused(task, kind, content, message, registered, tmp_path):
    source = registered.CSV(str(tmp_path))
    registered.CSV.read_parts = lambda self, kind: {"reviews": content}
    assert TASKS[task].reads == kind
    with pytest.raises(ValueError, match=message):
        load(source, TASKS[task](), Bytes(), Loader(batch_size=1))


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("documents", {"train": "one text"}, "is str: it must be Documents"),
        ("documents", {"train": ["one", "two"]}, "is list: it must be Documents"),
        ("pairs", {"train": [("a", "b")]}, "is list: it must be PairedTexts"),
        ("labeled_texts", {"train": [("a", "x")]}, "is list: it must be LabeledTexts"),
        ("tagged_sentences", {"train": [(["a"], ["X"])]}, "a list of tuple: it must be a sequence of TaggedSentence"),
        ("questions", {"train": "who"}, "is str: it must be a sequence of Question"),
        ("images", {"train": []}, r"returns dict: it must be Images\(splits, class_names\)"),
        ("images", Images({"train": [{"image": 0, "label": 0}]}, ["a"]), "is list: it must be ExampleSource"),
    ],
)
def test_content_of_another_type_is_refused(kind, content, message):
    with pytest.raises(ValueError, match=message):
        check_content("reviews", content, kind)


def test_features_of_different_lengths_are_refused():
    """Labels would belong to other images, or be missing for the last ones."""
    with pytest.raises(ValueError, match=r"differ between the features, 3 of 'image' and 2 of 'label'"):
        Arrays({"image": np.zeros((3, 8, 8, 1), np.uint8), "label": np.zeros(2, int)})


def test_missing_training_split_is_named(registered, tmp_path):
    registered.CSV.read_parts = lambda self, kind: {"reviews": {"training": LabeledTexts([("a",)], ["1"])}}
    with pytest.raises(ValueError, match="has no training examples: its splits are training, none of them 'train'"):
        load(registered.CSV(str(tmp_path)), TASKS["text_classification"](), Bytes(), Loader(batch_size=1))


def test_sentences_have_a_tag_for_each_word():
    with pytest.raises(ValueError, match=r"^A sentence has 2 words and 1 tags"):
        TaggedSentence(["a", "b"], ["X"])


@pytest.mark.parametrize("texts", [(text for text in ["a", "b"]), map(str, range(3))])
def test_texts_that_can_be_read_only_once_are_refused(texts):
    """Otherwise, the texts that are read to count or identify them would be missing from the training data."""
    with pytest.raises(ValueError, match=f"are a {type(texts).__name__}, which can be read only once: they must be"):
        Documents(texts)
    assert list(Documents(lambda: iter(["a", "b"]))) == ["a", "b"]


WRONG_IMAGES = {
    "float32": lambda image: image.astype(np.float32) / 255,
    "uint16": lambda image: image.astype(np.uint16) * 257,
    "bool": lambda image: image > 127,
    "without channels": lambda image: image[..., 0],
    "of Pillow": lambda image: [Image.fromarray(one[..., 0]) for one in image],
}


@dataclass(frozen=True)
class Changed(ExampleSource):
    """Four images whose arrays or labels are changed by a function."""

    image: Callable = np.asarray
    label: Callable = np.asarray

    def __len__(self):
        return 4

    def take(self, indices):
        images = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 1), np.uint8)[indices]
        return {"image": self.image(images), "label": self.label(indices % 2)}


def image_batch(size, **changes):
    splits = {"train": Changed(**changes), "test": Changed(**changes)}
    task = TASKS["image_classification"](image_size=size)
    examples = task.examples(Images(splits, ["a", "b"]), None, 0)
    return TrainBatches(
        source=examples.splits["train"], transform=examples.train_transform, loader=Loader(batch_size=4), seed=0
    )[0]


@pytest.mark.parametrize("change", WRONG_IMAGES.values(), ids=WRONG_IMAGES)
@pytest.mark.parametrize("size", [0, 8])
def test_images_of_another_type_than_uint8_are_refused(change, size):
    """Pixels from 0 to 1 would be divided by 255 once more, and train a classifier on images that are almost black."""
    with pytest.raises(ValueError, match=r"An image is .*: it must be .*uint8 \[h, w, c\]"):
        image_batch(size, image=change)


@pytest.mark.parametrize("change", [list, np.uint8, lambda label: [int(number) for number in label]])
def test_labels_may_be_any_integers(change):
    labels = image_batch(0, label=change)["label"]
    assert labels.dtype == np.int32
    np.testing.assert_array_equal(labels, image_batch(0)["label"])


@pytest.mark.parametrize("change", [np.float32, bool, str, lambda label: np.eye(2)[label]])
def test_labels_that_are_not_integers_are_refused(change):
    changed = change if change not in (bool, str) else lambda label: np.array([change(number) for number in label])
    with pytest.raises(ValueError, match=r"The split 'train' has labels \S+ \[.*\]: they must be integers \[N\]"):
        image_batch(0, label=changed)


@dataclass(frozen=True)
class OneObject(ExampleSource):
    """Two images with an object of a given class each."""

    number: int

    def __len__(self):
        return 2

    def take(self, indices):
        objects = {"boxes": np.float32([[1, 1, 5, 5]]), "classes": np.int32([self.number]), "crowd": np.zeros(1, bool)}
        return gather([{"image": np.zeros((8, 8, 3), np.uint8), **objects} for _ in indices])


@pytest.mark.parametrize("number", [-1, 2])
def test_classes_of_objects_that_are_not_indices_are_refused(number):
    """The class after the last one means "no object" in the loss, so that objects would be trained to be background."""
    task = TASKS["object_detection"](image_size=8, max_boxes=2)
    content = Images({"train": OneObject(1), "test": OneObject(number)}, ["a", "b"])
    splits = task.examples(content, None, 0).splits
    assert splits["train"][0]["classes"] == 1
    message = f"of the split 'test' has an object of the class {number}: classes must be from 0 to 1"
    with pytest.raises(ValueError, match=message):
        splits["test"][0]


def test_labeled_texts_without_tuples_are_refused():
    """The characters of a text would be its texts: "ab" would be the pair of "a" and "b"."""
    content = {"train": LabeledTexts(["ab", "cd"], ["x", "y"])}
    with pytest.raises(ValueError, match=r"has the text 'ab': it must be a tuple of one or two texts, as in \(text,\)"):
        check_content("reviews", content, "labeled_texts")


@pytest.mark.parametrize("value", [None, 3, b"bytes", ["a block", None]])
def test_documents_that_are_not_texts_are_refused(value):
    with pytest.raises(ValueError, match=r"a document (is|has the block) .* it must be a text"):
        tokenize(Documents(lambda: iter(["a text", value])), Bytes().train([]))


def test_documents_that_differ_between_passes_are_refused(tmp_path):
    """A source that ends early in one pass must not leave its tokens in the cache of the whole texts."""
    passes = []

    def texts():
        passes.append(None)
        yield from ["one", "two", "three"][: 2 if len(passes) == 3 else 3]  # after counting and the fingerprint

    tokenizer = Bytes().train([])
    with pytest.raises(ValueError, match="the texts of documents differ between two passes"):
        tokenize(Documents(texts), tokenizer, tmp_path)
    assert len(passes) == 3
    assert tokenize(Documents(texts), tokenizer, tmp_path).characters == 11


def test_content_in_a_property_and_files_as_a_text_are_refused():
    """The characters of a text were read as paths, so that the check of the data read other files, or none."""

    class InProperty(Source):
        pairs = property(lambda self: {})

    class OneFile(Source):
        def files(self):
            return "/data/reviews.db"

        def pairs(self):
            return {}

    with pytest.raises(ValueError, match=r"^The source 'InProperty' has pairs as a dict: it must be a method\.$"):
        InProperty().read("pairs")
    with pytest.raises(ValueError, match=r"^The method files of OneFile returns '/data/reviews.db': it must return a"):
        OneFile().check_files()
