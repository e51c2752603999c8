"""Hostile and damaged files of data: each is refused with one sentence that names the file or shows the text."""

import gzip
import io
import json
import os
import struct
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import EpsImagePlugin, Image

from lineage.data.inputs import from_files
from lineage.data.sources import files, parquet
from lineage.data.sources.boxes import COCO, VOC
from lineage.data.sources.files import inside
from lineage.data.sources.lines import SQuAD, read_pairs, read_questions, read_sentences
from lineage.data.sources.parquet import Parquet
from lineage.data.sources.raw_images import CIFAR, IDX
from lineage.data.sources.tables import CSV, JSONLines
from lineage.data.transforms.pillow import channels_of, decode
from lineage.evaluation import records
from tests.data.conftest import png, train


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def header(width, height):
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


@pytest.mark.parametrize(
    "content",
    [
        header(100_000, 100_000) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b""),  # DecompressionBomb
        header(64, 64) + chunk(b"IDAT", zlib.compress(bytes(13000), 0)[:5000]) + b"\0\0\0\5\0\0\0\0" * 9,  # SyntaxError
        png(np.zeros((4, 4, 3), np.uint8))[:30],
        b"P6\n4 four\n255\n" + bytes(48),  # ValueError of a PPM file
    ],
)
def test_hostile_images(tmp_path, content):
    path = tmp_path / "a.png"
    path.write_bytes(content)
    for file, name in ((path, str(path)), (content, "An example")):
        with pytest.raises(ValueError, match=f"^{name} cannot be read as an image: .+"):
            decode(file, 3)


def test_images_of_other_formats_start_no_program(tmp_path, monkeypatch):
    """Check PostScript, for which Pillow starts Ghostscript, and a pipe, which opens when somebody writes to it."""
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", None)
    path, page = tmp_path / "a.png", io.BytesIO()
    Image.new("RGB", (8, 8)).save(page, "EPS")
    path.write_bytes(page.getvalue())
    with pytest.raises(ValueError, match=r"a\.png cannot be read as an image: it is none of BMP, GIF, JPEG"):
        decode(path, 3)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"a\.png cannot be read as an image: it is not a regular file"):
        decode(path, 3)


def test_coco_with_a_list_for_a_name(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"images": [{"id": 1, "file_name": ["a"]}], "annotations": [], "categories": []}))
    with pytest.raises(ValueError, match=r"a\.json has an image without `id` and `file_name`"):
        COCO(str(path)).images_with_boxes()


def test_name_with_half_of_a_surrogate_pair(tmp_path):
    (path := tmp_path / "a.json").write_text(json.dumps({"images": [
        {"id": number, "file_name": name} for number, name in enumerate(("a.png", "\ud800.png"))],
        "annotations": [], "categories": []}))  # fmt: skip
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with pytest.raises(FileNotFoundError, match=r"\ud800\.png, which .*a\.json names"):
        COCO(str(path)).images_with_boxes()


NESTED = "[" * 100_000
JSON_READERS = {
    "squad.json": read_questions,
    "coco.json": lambda path: COCO(path).images_with_boxes(),
    "images.json": lambda path: from_files(path, "images_with_boxes"),
    "scores.json": records.read,
}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"context": 5, "qas": [{"question": "Who?", "answers": []}]}, "a question or context is 5, not text"),
        ({"context": "a", "qas": [{"question": ["Who?"], "answers": []}]}, r"a question or context is \['Who\?'\]"),
        ({"context": 5, "qas": [{"question": "Who?", "answers": [{"text": "a", "answer_start": 0}]}]}, "not text"),
        ({"context": "abc", "qas": [{"question": "Who?", "answers": [{"text": 5, "answer_start": 0}]}]}, "TypeError"),
        ({"context": "abc", "qas": 7}, "TypeError"),
    ],
)
def test_hostile_questions(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"data": [{"paragraphs": [content]}]}))
    with pytest.raises(ValueError, match=f"a.json is not a file in SQuAD's format: .*{message}"):
        read_questions(str(path))
    with pytest.raises(ValueError, match="is not a file in SQuAD's format"):
        SQuAD(str(path)).questions()


@pytest.mark.parametrize(("start", "answer"), [(-3, "bc"), (0, ""), (10**30, "")])
def test_answers_that_are_nowhere(start, answer, tmp_path):
    (path := tmp_path / "a.json").write_text(json.dumps({"data": [{"paragraphs": [{"context": "abcd", "qas": [
        {"question": "Who?", "answers": [{"text": answer, "answer_start": start}]}]}]}]}))  # fmt: skip
    with pytest.raises(ValueError, match=rf"a\.json, question 1: .* is not at character {start} of its context"):
        read_questions(str(path))


@pytest.mark.parametrize(
    ("content", "reason"),
    [(NESTED, "maximum recursion depth"), ('{"input": 1, "target": 2, "input": 3}', "the key 'input' occurs twice")],
)
def test_nested_json_and_objects_with_a_key_twice(content, reason, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"input": "a", "target": "b"}}\n{content}\n')
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 2 is not JSON: {reason}"):
        read_pairs(str(path))
    for name, read in JSON_READERS.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=rf"{name} is not JSON: {reason}"):
            read(str(tmp_path / name))


@pytest.mark.parametrize("id", ["1" * 5000, f"1-{'2' * 5000}"])
def test_long_ids_of_words(tmp_path, id):
    path = tmp_path / "a.conllu"
    path.write_text(f"{id}\ta\ta\tX\t_\t_\t0\troot\t_\t_\n\n")
    with pytest.raises(ValueError, match=r"a\.conllu, line 1 begins with '1.*', not with an ID") as raised:
        read_sentences(str(path))
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_half_of_a_surrogate_pair(kind):
    tokenizer = train(kind, ["text more"])
    for encode in (tokenizer.encode_batch, tokenizer.encode_with_offsets, tokenizer.encode_marked):
        with pytest.raises(ValueError, match=r"lone surrogate, .* in 'text \\ud800 more'"):
            encode(["sound", "text \ud800 more"])


def tiled(side):
    """Return a TIFF file of 16 x 16 pixels in a tile of other sides."""
    content = zlib.compress(bytes(3 * side**2))
    tags = {256: (4, 16), 257: (4, 16), 258: (3, 8), 259: (3, 8), 262: (3, 2), 277: (3, 3), 284: (3, 1)}
    tags |= {322: (4, side), 323: (4, side), 324: (4, 8), 325: (4, len(content))}
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, (kind, value) in tags.items())
    return b"II*\0" + struct.pack("<I", 8 + len(content)) + content + struct.pack("<H", len(tags)) + entries + bytes(4)


@pytest.mark.parametrize("kind", ["png", "tiff"])
def test_many_pixels_in_a_small_image(kind, tmp_path):
    """Check an image of one color, and a tile that is larger than the image."""
    if kind == "png":
        Image.new("1", (6400, 6400)).save(buffer := io.BytesIO(), "PNG")
        content = buffer.getvalue()
    else:
        assert decode(tiled(64), 3).shape == (16, 16, 3)
        content = tiled(6400)
    (path := tmp_path / "a.png").write_bytes(content)
    for file in (path, content):
        with pytest.raises(ValueError, match="6,400 x 6,400 pixels need 163,840,000 bytes, above 100 MB and 100 times"):
            decode(file, 3)
    with pytest.raises(ValueError, match=r"a\.png cannot be read as an image"):
        channels_of(path)


@pytest.mark.parametrize("name", ["../secret.png", "images/../../secret.png", "/secret.png"])
def test_images_outside_of_the_folder_are_not_read(name, tmp_path):
    """Check images that a file of data names: it may come from somebody else, and pictures may be private."""
    (folder := tmp_path / "data").mkdir()
    (folder / "images").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    name = str(tmp_path / name[1:]) if name.startswith("/") else name
    content = {"images": [{"id": 1, "file_name": name}], "annotations": [], "categories": [{"id": 1, "name": "a"}]}
    (folder / "a.json").write_text(json.dumps(content))
    (folder / "a.txt").write_text(f"{name}\n")
    (folder / "a.jsonl").write_text(json.dumps({"file": name}) + "\n")
    image = pa.array([{"bytes": None, "path": name}] * 2)
    pyarrow.parquet.write_table(pa.table({"image": image, "label": [0, 1]}), folder / "a.parquet")
    for read in (
        COCO(f"{folder}/a.json").images_with_boxes,
        lambda: from_files(f"{folder}/a.json", "images_with_boxes"),
        lambda: from_files(f"{folder}/a.txt", "images"),
        lambda: records.pictures(f"{folder}/a.jsonl"),
        Parquet(f"{folder}/a.parquet").images,
    ):
        with pytest.raises(
            ValueError, match=r"a\.(jsonl?|txt|parquet, row 1) names the file '.*secret\.png', which is not in"
        ):
            read()
    if name[0] == "/":
        assert len(COCO(f"{folder}/a.json", images_path=str(tmp_path)).images_with_boxes().splits["train"]) == 1


def test_names_that_are_too_long_for_a_file_are_refused():
    with pytest.raises(ValueError, match=r"a\.json names the file 'x{200}', whose name is too long"):
        inside("/data", "x" * 300, "a.json")


def test_image_of_coco_whose_name_is_too_long(tmp_path):
    content = {"images": [{"id": 1, "file_name": "x" * 300}], "annotations": [], "categories": []}
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(FileNotFoundError, match=r"The image x{200} of .*a\.json is not in"):
        COCO(f"{tmp_path}/a.json").images_with_boxes()


def write_voc(folder, corners, name="1"):
    for part in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / part).mkdir(parents=True)
    Image.new("RGB", (30, 24)).save(folder / "JPEGImages/1.jpg")
    (folder / "ImageSets/Main/train.txt").write_text(name)
    sides = zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=True)
    box = "".join(f"<{side}>{value}</{side}>" for side, value in sides)
    found = f"<annotation><object><name>cat</name><bndbox>{box}</bndbox></object></annotation>"
    (folder / "Annotations/1.xml").write_text(found)
    return VOC(str(folder), validation_set="")


@pytest.mark.parametrize("corners", [("-inf", 1, "inf", 5), (1, 1, "1e300", 5), (1, "-1e39", 9, 5), (1, 1, "nan", 5)])
def test_boxes_without_end(corners, tmp_path):
    with pytest.raises(ValueError, match=r"1\.xml is not an annotation of VOC: the box .* is empty or infinite"):
        write_voc(tmp_path / "voc", corners).images_with_boxes()
    Image.new("RGB", (30, 24)).save(tmp_path / "1.png")
    for side in (1e300, 10**400, -1e39):
        box = {"image_id": 1, "category_id": 1, "bbox": [1, side, 3, 4]}
        content = {"images": [{"id": 1, "file_name": "1.png"}], "annotations": [box]}
        (tmp_path / "a.json").write_text(json.dumps(content | {"categories": [{"id": 1, "name": "a"}]}))
        with pytest.raises(ValueError, match=r"a\.json, annotation 1 is not valid: it must have"):
            COCO(f"{tmp_path}/a.json").images_with_boxes()


def test_difficult_that_is_not_a_number(tmp_path):
    source = write_voc(tmp_path / "voc", (1, 1, 9, 9))
    path = tmp_path / "voc/Annotations/1.xml"
    path.write_text(path.read_text().replace("<name>", "<difficult>true</difficult><name>"))
    with pytest.raises(
        ValueError, match=r"1\.xml is not an annotation of VOC: difficult is 'true', which must be 0 or"
    ):
        source.images_with_boxes()


def test_annotations_outside_of_the_folder_are_not_read(tmp_path):
    write_voc(tmp_path / "other", (1, 1, 9, 9))
    with pytest.raises(ValueError, match=r"ImageSets names the file '.*other/Annotations/1\.xml', which is not in"):
        write_voc(tmp_path / "voc", (1, 1, 9, 9), "../../other/Annotations/1").images_with_boxes()


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, 2], pa.timestamp("us", tz="Mars/Phobos")),  # KeyError of pytz
        pa.array([2**62, 2], pa.timestamp("us")),  # OverflowError
        pa.array([2**30, 2], pa.date32()),
    ],
)
def test_values_of_parquet_that_python_does_not_have(column, tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pa.table({"text": column, "image": column, "label": [0, 1]}), path)
    with pytest.raises(ValueError, match=r"a\.parquet .* after row 0: the column 'text' has a value that Python does"):
        list(Parquet(str(path)).documents()["train"])
    with pytest.raises(ValueError, match=r"a\.parquet, row 1 has no image in the column 'image'"):
        Parquet(str(path)).images()


def repeated(value, count, kind=None):
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([value], kind))


def test_many_rows_in_a_small_parquet_file(tmp_path):
    path, count = tmp_path / "a.parquet", 500_000
    answers = pa.array([{"answer_start": [], "text": []}]).take(pa.array(np.zeros(count, np.int32)))
    texts = {"question": repeated("Who?", count), "context": repeated("abc", count), "answers": answers}
    pyarrow.parquet.write_table(
        pa.table(texts | {"image": repeated(b"", count), "label": np.zeros(count, np.int8)}), path
    )
    for read in (Parquet(str(path)).questions, Parquet(str(path)).images):
        with pytest.raises(ValueError, match=r"a\.parquet needs more than 10\d,\d+,\d+ bytes: at most 100 MB and 100"):
            read()


@pytest.mark.parametrize("kind", ["documents", "images"])
def test_large_value_in_a_small_parquet_file(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_ALL", 10**6)
    value = pa.array([b"a" * 3_000_000], pa.binary())
    table = pa.table({"text": value, "image": value, "label": [0]})
    pyarrow.parquet.write_table(table, path := tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(ValueError, match=r"a\.parquet needs more than 1,\d+,\d+ bytes: at most 1 MB and 100 times"):
        list(Parquet(str(path)).documents()["train"]) if kind == "documents" else Parquet(str(path)).images()


def scanned(count):
    """Return a progressive JPEG file whose last scan is repeated."""
    Image.new("L", (64, 64), 128).save(buffer := io.BytesIO(), "JPEG", progressive=True)
    content = buffer.getvalue()
    return content[:-2] + content[content.rindex(b"\xff\xda") : -2] * count + content[-2:]


def test_large_value_of_many_rows_of_parquet(tmp_path, monkeypatch):
    path, sizes, values = tmp_path / "a.parquet", [], parquet._values
    image = png(np.random.default_rng(0).integers(0, 255, (300, 300, 3), np.uint8))
    pa.parquet.write_table(pa.table({"image": [image] * 800, "label": [0] * 800}), path)
    monkeypatch.setattr(parquet, "_RECENT", recent := parquet._Recent())
    assert Parquet(str(path)).images().splits["train"][700]["image"].shape == (300, 300, 3)
    assert recent._size < 2 * len(image)
    monkeypatch.setattr(parquet, "BATCH", (1024, 10 * len(image)))
    monkeypatch.setattr(parquet, "_values", lambda batch, key: sizes.append(batch.nbytes) or values(batch, key))
    list(Parquet(str(path)).values("train", ["image"]))
    assert len(image) < max(sizes) < 12 * len(image)


def test_many_scans_of_an_image():
    assert decode(scanned(20), 1).shape == (64, 64, 1)
    with pytest.raises(ValueError, match=r"cannot be read as an image: it has 5,00\d scans, of which a photo"):
        decode(scanned(5000), 1)


def test_large_image_of_numbers_as_texts():
    with pytest.raises(ValueError, match="it is a plain PPM file, in which each number is a text, of more than 1 MB"):
        decode(b"P3 500 500 255\n" + b"0 0 0\n" * 500**2, 3)


def test_short_lines_of_a_small_compressed_file(tmp_path):
    """Check that the memory of the texts counts, not only their characters."""
    with gzip.open(path := tmp_path / "a.tsv.gz", "wb") as file:
        file.write(b"ab\tcd\n" * 3_000_000)
    with pytest.raises(ValueError, match=r"a\.tsv\.gz needs more than 10\d,\d+,\d+ bytes: at most 100 MB and 100"):
        read_pairs(str(path))


@pytest.mark.parametrize(("kind", "part"), [(CSV, b"," * 1_000_000), (JSONLines, b"[]," * 400_000)])
def test_line_of_many_values_in_a_small_compressed_file(kind, part, tmp_path):
    with gzip.open(path := tmp_path / "a.gz", "wb") as file:
        file.write(b"text\n" if kind is CSV else b'{"text": [')
        for _ in range(14):
            file.write(part)
    with pytest.raises(ValueError, match=r"a\.gz, line \d has more than 1\d,\d+,\d+ bytes: at most 10 MB and 100"):
        list(kind(str(path)).documents()["train"])


def test_json_of_many_values_in_a_small_compressed_file(tmp_path):
    """Check documents of many lines, of which none is too long."""
    content = gzip.compress(b"[" + (b"[]," * 300_000 + b"\n") * 13 + b"[]]")
    for name, read in JSON_READERS.items():
        (path := tmp_path / f"{name}.gz").write_bytes(content)
        if name != "images.json":  # whose files are not compressed
            with pytest.raises(ValueError, match=r"\.gz has more than 1\d,\d+,\d+ characters: at most 10 MB and 100"):
                read(str(path))


def test_quote_without_end(tmp_path):
    with gzip.open(path := tmp_path / "a.csv.gz", "wb") as file:
        file.write(b'text\n"')
        for _ in range(17):
            file.write((b"a" * 999 + b"\n") * 1000)
    with pytest.raises(ValueError, match=r"a\.csv\.gz, line 16\d+ cannot be read: field larger than field limit"):
        list(CSV(str(path)).documents()["train"])


def idx(*shape):
    return b"\0\0\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape)


@pytest.mark.parametrize("shape", [(0, 2**32 - 1, 2**32 - 1), (9, 0, 0), (1,) * 65])
def test_idx_files_of_odd_shapes(shape, tmp_path):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(*shape) + bytes(len(shape) == 65))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(shape[0]) + bytes(shape[0]))
    with pytest.raises(ValueError, match="train-images-idx3-ubyte is not an idx file of bytes, or is truncated"):
        IDX(str(tmp_path)).images()


def test_many_images_in_a_small_idx_file(tmp_path):
    count = 2_200_000
    for name, shape in (("images-idx3", (count, 1, 1)), ("labels-idx1", (count,))):
        (tmp_path / f"train-{name}-ubyte.gz").write_bytes(gzip.compress(idx(*shape) + bytes(count)))
    with pytest.raises(ValueError, match=r"labels-idx1-ubyte\.gz needs more than 10\d,\d+,\d+ bytes: at most 100 MB"):
        IDX(str(tmp_path)).images()


def test_class_names_that_are_not_utf8(tmp_path):
    (tmp_path / "batches.meta.txt").write_bytes(b"dog\ncaf\xe9")
    with pytest.raises(ValueError, match=r"batches\.meta\.txt, line 2 is not UTF-8 text: byte 0xe9"):
        CIFAR(str(tmp_path)).images()
