"""Parquet files, in the layout of `datasets` and the Hugging Face Hub."""

import json
import os

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from lineage.data import Facts, Question
from lineage.data.facts import evaluating
from lineage.data.fingerprint import fingerprint
from lineage.data.sources import parquet
from lineage.data.sources.parquet import Parquet
from lineage.tasks.causal_lm import CausalLM
from lineage.tasks.image_classification import ImageClassification
from lineage.tasks.question_answering import QuestionAnswering
from tests.data.conftest import load, png

STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write(path, columns, class_names=None, rows_in_group=3):
    """Write a table, with the metadata that `datasets` writes if there are class names, and return the path."""
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    if class_names:
        features = {
            "label": {"num_classes": len(class_names), "names": class_names, "_type": "ClassLabel"},
            "text": {"dtype": "string", "_type": "Value"},
        }
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=rows_in_group)
    return str(path)


def encoded(values, size=4):
    return [png(np.full((size, size, 3), value, np.uint8)) for value in values]


def test_a_folder_of_the_hub(tmp_path):
    """Check the layout of `hf download --repo-type=dataset`, with shards, a data card and hidden files."""
    root = tmp_path / "imdb"
    for split, shards in (("train", 2), ("validation", 1), ("test", 1)):
        for shard in range(shards):
            columns = {"text": [f"{split} {shard} {i}" for i in range(4)], "label": [1, 0, 1, 1]}
            write(root / f"plain_text/{split}-{shard:05}-of-{shards:05}.parquet", columns, ["neg", "pos"])
    write(root / ".cache/huggingface/download/train-00000-of-00002.parquet", {"text": ["hidden"], "label": [0]})
    write(root / "plain_text/unsupervised-00000-of-00001.parquet", {"text": ["other"], "label": [-1]}, ["neg", "pos"])
    (root / "README.md").write_text("train")
    source = Parquet(str(root))
    assert source.content_kinds() == ["documents", "pairs", "labeled_texts", "questions", "images"]
    parts = source.labeled_texts()
    assert list(parts) == ["train", "validation", "test"]
    assert [text for (text,) in parts["train"].texts] == [f"train {shard} {i}" for shard in (0, 1) for i in range(4)]
    assert parts["train"].labels == ["pos", "neg", "pos", "pos"] * 2
    assert parts["train"].names == ["neg", "pos"]
    documents = source.documents()
    assert list(documents["validation"]) == [f"validation 0 {i}" for i in range(4)]
    names = ("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001", "test-00000-of-00001")
    assert {path.rpartition("/")[2] for path in fingerprint(source.files())} == {f"{name}.parquet" for name in names}


def test_missing_labels_are_left_out(tmp_path):
    write(tmp_path / "train.parquet", {"text": ["a", "b", "c"], "label": [1, -1, 0]}, ["no", "yes"])
    write(tmp_path / "test.parquet", {"text": ["d"], "label": [-1]}, ["no", "yes"])
    (part,) = Parquet(str(tmp_path)).labeled_texts().values()
    assert (part.texts, part.labels) == ([("a",), ("c",)], ["yes", "no"])
    write(tmp_path / "train.parquet", {"text": ["a", "b"], "label": [1, 2]}, ["no", "yes"])
    with pytest.raises(ValueError, match="has the class 2 in the split train: there are 2 classes"):
        Parquet(str(tmp_path)).labeled_texts()


def test_pairs_in_structs_and_other_types_of_text(tmp_path):
    rows = [{"de": "Haus", "en": "house"}, {"de": "zwei", "en": "two"}]
    wmt = Parquet(
        write(tmp_path / "a.parquet", {"translation": rows}), input_key="translation.en", target_key="translation.de"
    )
    assert wmt.pairs()["train"] == (["house", "two"], ["Haus", "zwei"])
    texts = ["", "ß\n"]
    kinds = (pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int8(), pa.string()))
    for kind in kinds:
        values = texts if kind != pa.binary() else [text.encode() for text in texts]
        path = write(tmp_path / "b.parquet", {"text": pa.array(values, kind), "label": [2.5, -1]})
        part = Parquet(path).labeled_texts()["train"]
        assert (part.texts, part.labels) == ([("",), ("ß\n",)], ["2.5", "-1.0"])


def test_questions(tmp_path):
    answers = [{"text": ["Rome", "in Rome"], "answer_start": [13, 10]}, {"text": [], "answer_start": []}]
    context = "Ann lives in Rome."
    columns = {"id": ["a", "b"], "question": ["Where?", "Why?"], "context": [context] * 2, "answers": answers}
    (actual,) = Parquet(write(tmp_path / "a.parquet", columns)).questions().values()
    where = Question("Where?", context, [(13, "Rome"), (10, "in Rome")], "a")
    assert actual == [where, Question("Why?", context, [], "b")]
    (actual,) = Parquet(write(tmp_path / "a.parquet", columns | {"is_impossible": [True, False]})).questions().values()
    assert actual == [Question("Where?", context, [], "a"), Question("Why?", context, [], "b")]
    del columns["id"]
    (actual,) = Parquet(write(tmp_path / "a.parquet", columns)).questions().values()
    assert [question.id for question in actual] == ["", ""]
    loaded = load(Parquet(f"{tmp_path}/a.parquet"), QuestionAnswering(sequence_length=64), batch_size=2)
    assert sorted((loaded.train[0]["start"] > 0).tolist()) == [False, True]
    for wrong, message in (
        ({"text": ["Rome"], "answer_start": [12]}, "The answer 'Rome' to 'Why\\?' is not at character 12"),
        ({"text": ["Rome"], "answer_start": []}, "zip.. argument 2 is longer"),
        (None, "'NoneType' object is not subscriptable"),
    ):
        path = write(tmp_path / "b.parquet", columns | {"answers": [answers[0], wrong]})
        with pytest.raises(ValueError, match=rf"{path}, row 2 is not a question: {message}"):
            Parquet(path).questions()


def test_rows_are_read_by_group(tmp_path, monkeypatch):
    """Check that only the needed column is read, and in batches; `max_bytes` ends the reading."""
    path = write(tmp_path / "a.parquet", {"text": ["x" * 10] * 5000, "other": [0] * 5000}, rows_in_group=1000)
    seen, iterate = [], pq.ParquetFile.iter_batches

    def counted(*args, **options):
        for batch in iterate(*args, **options):
            seen.append((batch.num_rows, batch.schema.names))
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    source = Parquet(path, max_bytes=15_000, validation_fraction=0.5)
    assert [len(list(part)) for part in source.documents().values()] == [1500, 1500]
    assert all(names == ["text"] and count <= 1024 for count, names in seen)
    assert sum(count for count, _ in seen) < 2 * 4097
    assert load(source, CausalLM(sequence_length=8), batch_size=1).facts.tokens["train"] == 1500 * 11


@pytest.mark.parametrize("layout", ["bytes", "struct", "paths"])
def test_images(layout, tmp_path):
    values = {"train": list(range(8)), "test": [20, 21]}
    for split, numbers in values.items():
        images = encoded(numbers)
        if layout == "struct":
            images = pa.array([{"bytes": image, "path": None} for image in images], STRUCT)
        elif layout == "paths":
            for number, image in zip(numbers, images):
                (tmp_path / f"{number}.png").write_bytes(image)
            images = pa.array([{"bytes": None, "path": f"{number}.png"} for number in numbers], STRUCT)
        labels = [number % 2 for number in numbers]
        for shard, part in enumerate((slice(5), slice(5, None))):
            if labels[part]:
                columns = {"image": images[part], "label": labels[part]}
                write(tmp_path / f"{split}-{shard}.parquet", columns, ["even", "odd"])
    source = Parquet(str(tmp_path))
    splits, names = source.images()
    assert names == ["even", "odd"]
    assert {split: len(part) for split, part in splits.items()} == {"train": 8, "test": 2}
    batch = splits["train"].take(np.array([7, 0, 3, 7]))
    assert [int(np.mean(image)) for image in batch["image"]] == [7, 0, 3, 7]
    assert batch["label"].tolist() == [1, 0, 1, 1]
    assert batch["image"][0].shape == (4, 4, 3)
    loaded = load(source, ImageClassification(), batch_size=2)
    assert loaded.facts.class_names == ("even", "odd")
    held = Parquet(f"{tmp_path}/train-*.parquet", validation_fraction=0.25).images().splits
    assert [int(np.mean(held["validation"][i]["image"])) for i in range(2)] == [3, 7]
    assert [int(np.mean(held["train"][i]["image"])) for i in range(6)] == [0, 1, 2, 4, 5, 6]
    copy = cloudpickle.loads(cloudpickle.dumps(splits["train"]))
    assert int(np.mean(copy[5]["image"])) == 5
    read = {f"{split}-{shard}.parquet" for split, shard in (("train", 0), ("train", 1), ("test", 0))}
    read |= {f"{number}.png" for part in values.values() for number in part} if layout == "paths" else set()
    assert {path.rpartition("/")[2] for path in fingerprint(source.files())} == read


def test_gray_images_and_classes_without_names(tmp_path):
    gray = png(np.zeros((3, 3, 1), np.uint8))
    path = write(tmp_path / "a.parquet", {"image": [gray] * 2, "label": [2, 0]})
    splits, names = Parquet(path).images()
    assert names == ["0", "1", "2"]
    assert splits["train"][1]["image"].shape == (3, 3, 1)
    path = write(tmp_path / "a.parquet", {"image": [gray, *encoded([9], 3)], "label": [2, 0]})
    assert Parquet(path).images().splits["train"][0]["image"].shape == (3, 3, 3)
    path = write(tmp_path / "b.parquet", {"picture": [gray] * 3, "animal": ["dog", "cat", "dog"]})
    splits, names = Parquet(path, image_key="picture", label_key="animal").images()
    assert names == ["cat", "dog"]
    assert splits["train"].label.tolist() == [1, 0, 1]


def test_classes_and_channels_are_those_of_training_images_that_are_not_read(tmp_path):
    gray = [png(np.full((4, 4, 1), value, np.uint8)) for value in (0, 1, 2)]
    write(tmp_path / "train.parquet", {"image": gray, "label": ["ant", "bee", "cow"]})
    write(tmp_path / "test.parquet", {"image": encoded([0, 1]), "label": ["cow", "bee"]})
    source = Parquet(str(tmp_path))
    content = source.images()
    facts = Facts(class_names=tuple(content.class_names), channels=1)
    (test,) = evaluating(source, facts).images().splits.values()
    for part in (test, content.splits["test"]):
        assert (part.label.tolist(), part.channels) == ([2, 1], 1)


def test_names_of_classes_in_another_order(tmp_path):
    """Check that the numbers in one file do not stand for the names in another."""
    write(tmp_path / "train.parquet", {"text": ["a"] * 2, "image": encoded([0, 1]), "label": [0, 1]}, ["cat", "dog"])
    write(tmp_path / "test.parquet", {"text": ["a"], "image": encoded([0]), "label": [0]}, ["dog", "cat"])
    source = Parquet(str(tmp_path))
    for read in (source.labeled_texts, source.images):
        with pytest.raises(ValueError, match=r"test\.parquet has other names of the classes of 'label' than .*/train"):
            read()
    facts = Facts(class_names=("cat", "dog"), channels=3)
    with pytest.raises(ValueError, match="class 0 of the source is 'dog', but 'cat' in the training data"):
        load(source, ImageClassification(), known=facts)
    (tmp_path / "test.parquet").unlink()
    write(tmp_path / "test.parquet", {"text": ["a"], "label": [1]})
    assert source.labeled_texts()["test"].labels == ["dog"]
    write(tmp_path / "train_2.parquet", {"text": ["a"], "image": encoded([0]), "label": [0]}, ["dog", "cat"])
    for read in (source.labeled_texts, source.images):
        with pytest.raises(ValueError, match=r"train_2\.parquet has other names of the classes"):
            read()


def test_images_without_labels_are_left_out(tmp_path):
    """Check the layout of ImageNet on the Hub, whose test images have the label -1."""
    write(tmp_path / "train.parquet", {"image": encoded([0, 1, 2, 3, 4]), "label": [1, -1, 0, -1, 1]}, ["no", "yes"])
    write(tmp_path / "test.parquet", {"image": encoded([5, 6]), "label": [-1, -1]}, ["no", "yes"])
    splits, _ = Parquet(str(tmp_path)).images()
    assert list(splits) == ["train"]
    batch = splits["train"].take(np.arange(3))
    assert [int(np.mean(image)) for image in batch["image"]] == [0, 2, 4]
    assert batch["label"].tolist() == [1, 0, 1]
    write(tmp_path / "train.parquet", {"image": encoded([0, 1]), "label": [-1, -1]}, ["no", "yes"])
    with pytest.raises(ValueError, match="The source 'parquet' has no training examples"):
        load(Parquet(str(tmp_path)), ImageClassification())


def test_row_groups_stay_in_memory_as_far_as_they_fit(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", {"image": encoded(range(9)), "label": [0] * 9}, ["one"])
    part, read, recent = Parquet(path).images().splits["train"], [], parquet._Recent()
    monkeypatch.setattr(parquet, "_RECENT", recent)
    opened = parquet._opened
    monkeypatch.setattr(parquet, "_opened", lambda file, **options: read.append(file) or opened(file, **options))

    def groups_read(*indices):
        read.clear()
        for index in indices:
            assert int(np.mean(part[index]["image"])) == index
        return len(read) / 2  # for the metadata and for the content

    assert groups_read(0, 4, 8, 1, 5, 6, 0) == 3
    size = recent._size
    assert size == sum(group.nbytes for group in recent._groups.values()) > 0
    monkeypatch.setattr(parquet, "CACHE", size * 5 // 6)  # of three groups, two fit
    recent._groups.clear()
    recent._size = 0
    assert groups_read(0, 4, 1, 8) == 3
    assert groups_read(0, 8) == 0
    assert groups_read(4) == 1
    assert groups_read(8, 0) == 1


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"body": ["a"], "s": [{"x": 1}]}, {}, "has no column 'text': its columns are body, s, s.x"),
        ({"text": ["a", None], "label": [0, 0]}, {}, "row 2: the column 'text' has no value"),
        ({"text": [["a"]], "label": [0]}, {}, "row 1: the column 'text' is of type list: it must be a text or a"),
        ({"text": ["a", "b"], "label": ["x", ""]}, {}, "row 2: the column 'label' has no value"),
        ({"text": ["a"], "label": [1]}, {"text_key": "text.b"}, "has no column 'text.b'"),
        (dict.fromkeys(("text", "label"), pa.array([], pa.string())), {}, "has no rows for the split train"),
        (pa.table([["a"]] * 3, ["text", "label", "text"]), {}, "has the column 'text' twice"),
        ({"text": ["a", "b"], "label": [1.0, float("nan")]}, {}, "row 2: the column 'label' has no value"),
    ],
)
def test_errors_of_texts_name_the_file_and_the_row(columns, options, message, tmp_path):
    path = write(tmp_path / "a.parquet", columns)
    with pytest.raises(ValueError, match=rf"{path}.* ?{message}"):
        Parquet(path, **options).labeled_texts()


def test_texts_that_are_not_utf8(tmp_path):
    values = [b"good"] * 1500 + [b"caf\xe9"] + [b"good"]
    wrong = pa.Array.from_buffers(pa.string(), len(values), pa.array(values, pa.binary()).buffers())
    path = write(tmp_path / "a.parquet", {"text": wrong})
    with pytest.raises(ValueError, match=r"a\.parquet, row 1501: the column 'text' is not UTF-8 text: unexpected end"):
        list(Parquet(path).documents()["train"])


def test_damaged_files(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 rubbish PAR1")
    with pytest.raises(ValueError, match=rf"{path} cannot be read as a Parquet file after row 0: .*"):
        list(Parquet(str(path)).documents()["train"])
    with pytest.raises(ValueError, match=rf"{path} cannot be read as a Parquet file: .*"):
        Parquet(str(path)).images()
    texts = [f"{number:0>900}" for number in np.random.default_rng(0).integers(1 << 60, size=3000)]
    write(path, {"text": texts}, rows_in_group=1500)
    content = bytearray(path.read_bytes())
    middle = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    content[middle : middle + 50] = bytes(50)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path} cannot be read as a Parquet file after row 1\d\d\d: .*") as caught:
        list(Parquet(str(path)).documents()["train"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (encoded([0]), [None], "row 1 has the label None: it must be a name or number of the 2 classes"),
        (encoded([0, 1]), [0, 2], "row 2 has the label 2: it must be"),
        (encoded([0]), [[0]], r"row 1 has the label \[0\]: it must be"),
        ([b"torn"], [0], "row 1 cannot be read as an image: it is none of BMP, GIF, JPEG, PNG, PPM, TIFF, WEBP"),
        ([None, *encoded([0])], [0, 1], "row 1 has no image in the column 'image'"),
        (["a.png"], [0], "row 1 has no image in the column 'image'"),
        (pa.array([{"bytes": None, "path": None}], STRUCT), [0], "row 1 has no image in the column 'image'"),
        (pa.array([{"bytes": None, "path": "nowhere.png"}], STRUCT), [0], "row 1 cannot be read as .*No such file"),
    ],
)
def test_errors_of_images_name_the_file_and_the_row(images, labels, message, tmp_path):
    path = write(tmp_path / "a.parquet", {"image": images, "label": labels}, ["no", "yes"])
    with pytest.raises(ValueError, match=rf"{path}, {message}"):
        Parquet(path).images()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (b"[]", "has metadata that are not those of `datasets`: 'list' object"),
        (b"[" * 100_000, "has metadata that are not those of `datasets`: maximum recursion"),
        (b'{"info": {"features": {"label": {"names": "yes"}}}}', "has yes as names of the classes of 'label'"),
        (b'{"info": {"features": {"label": {"names": ["a", "a"]}}}}', r"has \['a', 'a'\] as names of the classes"),
    ],
)
def test_wrong_metadata(metadata, message, tmp_path):
    table = pa.table({"text": ["a"], "label": [0]}).replace_schema_metadata({"huggingface": metadata})
    path = write(tmp_path / "a.parquet", table)
    with pytest.raises(ValueError, match=f"{path} {message}"):
        Parquet(path).labeled_texts()


def test_empty_label_is_refused(tmp_path):
    path = write(tmp_path / "a.parquet", {"image": encoded([0, 1]), "label": ["cat", ""]})
    with pytest.raises(ValueError, match=f"{path}, row 2 has the label '': it must be a name or number of the 1 class"):
        Parquet(path).images()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([1, None], "row 2 has the label None: it must be a name or number of the 2 classes"),
        ([0.5, 1.0], "row 1 has the label 0.5: it must be a text or a whole number"),
    ],
)
def test_the_row_without_a_class_is_named(labels, message, tmp_path):
    path = write(tmp_path / "a.parquet", {"image": encoded([0, 1]), "label": labels})
    with pytest.raises(ValueError, match=f"{path}, {message}"):
        Parquet(path).images()


def test_large_labels_are_refused(tmp_path):
    path = write(tmp_path / "a.parquet", {"image": encoded([0, 1]), "label": [0, 1 << 62]})
    with pytest.raises(ValueError, match=f"train has the label {1 << 62}: it must be below 1,000,000"):
        Parquet(path).images()


def test_file_that_is_replaced_is_read_anew(tmp_path):
    """Check that the images of a file are not those of an earlier file of the same name."""
    for value in (1, 2):
        path = write(tmp_path / "a.parquet", {"image": encoded([value]), "label": [0]})
        part = Parquet(path).images().splits["train"]
        assert np.asarray(part[0]["image"]).max() == value
    os.utime(write(tmp_path / "a.parquet", {"image": encoded([3]), "label": [0]}), (1, 1))
    with pytest.raises(ValueError, match=r"a\.parquet has changed since its rows and labels were read"):
        part.take(np.arange(1))


def test_damaged_images_are_named_when_they_are_read(tmp_path):
    whole = png(np.random.default_rng(0).integers(256, size=(40, 40, 3), dtype=np.uint8))
    torn = whole[: len(whole) // 2]
    path = write(tmp_path / "a.parquet", {"image": [*encoded([0]), torn], "label": [0, 1]}, ["no", "yes"])
    part = Parquet(path).images().splits["train"]
    with pytest.raises(ValueError, match=rf"{path}, row 2 cannot be read as an image"):
        np.stack(part.take(np.array([0, 1]))["image"])
    part.check(0)
    with pytest.raises(ValueError, match=rf"{path}, row 2 cannot be read as an image"):
        part.check(1)
    path = write(tmp_path / "b.parquet", {"picture": encoded([0]), "label": [0]})
    with pytest.raises(ValueError, match=r"b\.parquet has no column 'image': its columns are picture, label"):
        Parquet(path).images()


def test_images_of_any_format(tmp_path):
    Image.fromarray(np.full((4, 6, 4), 128, np.uint8)).save(tmp_path / "a.webp", lossless=True)
    path = write(tmp_path / "a.parquet", {"image": [(tmp_path / "a.webp").read_bytes()], "label": [0]}, ["one"])
    assert Parquet(path).images().splits["train"][0]["image"].shape == (4, 6, 3)
