"""Readers of files with sound files for each: `READERS[name]` is (make, read).

`make(folder)` writes a sound file, perhaps with others beside it, and returns the path of the one to mutate;
`read(path)` reads it as the package does.
"""

import gzip
import json
import lzma
import pickle
from pathlib import Path

import jax
import numpy as np
from PIL import Image

from lineage import data, models
from lineage.configs import cli
from lineage.data.content import FACTS, Documents, Facts
from lineage.data.fingerprint import fingerprint
from lineage.data.inputs import from_files
from lineage.data.sources import SOURCES
from lineage.data.tokenizers import TOKENIZERS, Bytes, Tokenizer
from lineage.data.tokens import tokenize
from lineage.data.transforms.pillow import decode
from lineage.evaluation import scorers
from lineage.models import convert
from lineage.report.run import write_report
from lineage.runs.folder import CONFIG, read_json, read_metrics, read_record, sealed
from lineage.runs.metrics import GrowingMetrics
from tests.data.test_raw_images import pickled

READERS = {}
TEXTS = ["The cat sat on the mat.", 'A dog, "quoted"', "Ein Satz über Öl.", "return None", "日本語 テキスト"] * 4


def _written(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def _source(kind, content, name, suffix="", **options):
    """Register the reading of all content that a source offers."""

    def read(path):
        source = SOURCES[name](path=str(path), **options)
        for each in [kind] if kind else source.offers():
            _walk(source.read(each))
        fingerprint(source.files())

    suffix = suffix or f".{name}"
    READERS[f"{name}{suffix}"] = (lambda folder: _written(folder / f"a{suffix}", content)), read


def _walk(content):
    """Read everything in some content."""
    if isinstance(content, Documents):
        list(content)
    elif isinstance(content, data.Images):
        for split in content.splits.values():
            for image in split.take(np.arange(min(len(split), 50)))["image"]:
                np.asarray(image)
    elif isinstance(content, dict):
        for part in content.values():
            _walk(part)


_rows = "".join(f"{text.replace(',', ';').replace(chr(34), '')},{number % 3}\n" for number, text in enumerate(TEXTS))
_lines = "".join(
    json.dumps({"text": text, "input": text, "target": text, "label": n % 3}) + "\n" for n, text in enumerate(TEXTS)
)
_tree = "".join(f"{n}\t{word}\t{word}\tNOUN\t_\t_\t0\troot\t_\t_\n" for n, word in enumerate(["a", "bc", "def"], 1))
_questions = [{"id": str(n), "question": "Who?", "answers": [{"text": "cat", "answer_start": 4}]} for n in range(5)]
_squad = {"version": "2.0", "data": [{"title": "t", "paragraphs": [{"context": TEXTS[0], "qas": _questions}]}]}
for _name, _pack in {
    "": str.encode,
    ".gz": lambda t: gzip.compress(t.encode()),
    ".xz": lambda t: lzma.compress(t.encode()),
}.items():
    _source("labeled_texts", _pack(f"text,label\n{_rows}"), "csv", f".csv{_name}", validation_fraction=0.0)
    _source("documents", _pack(_lines), "jsonl", f".jsonl{_name}", validation_fraction=0.0)
_source("labeled_texts", f"text,label\n{_rows}".replace(",", "\t"), "tsv", validation_fraction=0.0)
_source("documents", "\n".join(TEXTS), "text", ".txt")
_source("pairs", _lines, "pairs", ".jsonl")
_source("pairs", "".join(f"{text}\t{text}\n" for text in TEXTS), "pairs", ".tsv")
_source("", _lines, "labels", ".jsonl")
_source("", (f"# text = a bc def\n{_tree}\n" * 3), "conllu")
_source("", "-DOCSTART- O\n\n" + "EU NNP B-ORG\nrejects VBZ O\n\n" * 5, "bio", ".txt")
_source("", json.dumps(_squad), "squad", ".json")


def _image(format):
    def make(folder):
        pixels = np.random.default_rng(0).integers(0, 255, (24, 30, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"a.{format}")
        return folder / f"a.{format}"

    READERS[f"image.{format}"] = make, lambda path: decode(path, 3)


for _format in ("png", "jpeg", "gif", "bmp", "webp", "tiff", "ppm"):
    _image(_format)


def _boxes(folder):
    Image.new("RGB", (30, 24)).save(folder / "1.jpg")
    images = [{"id": 1, "file_name": "1.jpg", "width": 30, "height": 24}]
    annotation = {"id": 1, "image_id": 1, "category_id": 3, "bbox": [1, 2, 10.5, 8], "area": 84, "iscrowd": 0}
    content = {"images": images, "annotations": [annotation] * 3, "categories": [{"id": 3, "name": "cat"}]}
    return _written(folder / "instances_train.json", json.dumps(content))


def _voc(folder):
    Image.new("RGB", (30, 24)).save(_written(folder / "JPEGImages" / "1.jpg", ""))
    _written(folder / "ImageSets" / "Main" / "train.txt", "1\n")
    box = "<bndbox><xmin>1</xmin><ymin>2</ymin><xmax>12</xmax><ymax>9</ymax></bndbox>"
    size = "<size><width>30</width><height>24</height><depth>3</depth></size>"
    what = f"<object><name>cat</name><difficult>0</difficult>{box}</object>"
    content = f"<annotation><filename>1.jpg</filename>{size}{what * 2}</annotation>"
    return _written(folder / "Annotations" / "1.xml", content)


def _parquet(folder):
    import pyarrow.parquet

    table = {"text": TEXTS, "label": [n % 3 for n in range(len(TEXTS))], "input": TEXTS, "target": TEXTS}
    pyarrow.parquet.write_table(pyarrow.table(table), folder / "a.parquet", row_group_size=5)
    return folder / "a.parquet"


def _read_parquet(path):
    for kind in ("documents", "pairs", "labeled_texts"):
        _walk(SOURCES["parquet"](str(path), validation_fraction=0.0).read(kind))


def _idx(folder):
    for split in ("train", "t10k"):
        images, labels = np.zeros((6, 8, 8), np.uint8), np.arange(6, dtype=np.uint8)
        for name, array in ((f"{split}-images-idx3-ubyte", images), (f"{split}-labels-idx1-ubyte", labels)):
            _written(
                folder / name, bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()
            )
    return folder / "train-images-idx3-ubyte"


def _cifar(folder):
    for name in [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]:
        _written(folder / name, pickled(np.zeros((4, 32, 32, 3), np.uint8), range(4), b"labels"))
    _written(folder / "batches.meta", pickle.dumps({b"label_names": [b"a", b"b", b"c", b"d"]}))
    return folder / "data_batch_1"


READERS["coco"] = _boxes, lambda path: _walk(SOURCES["coco"](str(path)).read("images_with_boxes"))
READERS["voc"] = (
    _voc,
    lambda path: _walk(SOURCES["voc"](str(path.parents[1]), validation_set="").read("images_with_boxes")),
)
READERS["parquet"] = _parquet, _read_parquet
READERS["idx"] = _idx, lambda path: _walk(SOURCES["idx"](str(path.parent)).read("images"))
READERS["cifar"] = _cifar, lambda path: _walk(SOURCES["cifar"](str(path.parent)).read("images"))


def _tokenizer(kind):
    def make(folder):
        TOKENIZERS[kind](**({} if kind == "words" else {"vocab_size": 300})).train(TEXTS, ["end_of_text"]).save(folder)
        return folder / "tokenizer.json"

    READERS[f"tokenizer.{kind}"] = (
        make,
        lambda path: [t.decode(x) for t in [Tokenizer.load(path)] for x in t.encode_batch(TEXTS)],
    )


for _kind in ("bpe", "wordpiece", "unigram", "words"):
    _tokenizer(_kind)


def _shards(folder):
    tokenize(Documents(TEXTS), Bytes().train(TEXTS), folder)
    return next(folder.glob("*/*.tokens"))


def _read_shards(path):
    # The first call names a damaged file and deletes it; it encodes anew where the sizes are wrong.
    stream = tokenize(Documents(TEXTS), Bytes().train(TEXTS), path.parents[1])
    np.asarray(stream.tokens), stream.ends


def _saved_model(folder):
    model = models.build("gpt", vocab_size=20, max_length=8, depth=1, width=8, num_heads=2)
    convert.save(folder, model, model.init(jax.random.key(0), np.zeros((1, 4), np.int32)))
    return folder / "config.json"


def _run(folder):
    """Write the files of a run."""
    config = cli.load(f"{Path(__file__).parents[1]}/tiny.py:gpt")[0]
    _written(folder / CONFIG, config.to_json_best_effort())
    Facts({"train": 9}, 300, 16, tokens={"train": 99}).save(folder / FACTS)
    lines = [{"step": n, "train/loss": 1 / n, "validation/loss": None, "time/seconds": 0.5} for n in range(1, 30)]
    _written(folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    samples = [{"step": n, "prompt": "a", "text": "b", "texts": ["a"]} for n in (10, 20)]
    _written(folder / "artifacts" / "samples.jsonl", "".join(json.dumps(line) + "\n" for line in samples))
    _written(
        folder / "artifacts" / "run.json",
        json.dumps({"seconds": 9.5, "config": json.loads((folder / CONFIG).read_text())}),
    )
    _written(folder / "artifacts" / "cost.json", json.dumps({"parameters": 99, "memory": {"training": {"all": 5}}}))
    np.savez(folder / "artifacts" / "attention_text.npz", tokens=np.array(["a", "b"]), weights=np.ones((1, 1, 2, 2)))
    _written(folder / "checkpoints" / "8" / "about" / "metadata", json.dumps(sealed({"next_batch": 8, "config": {}})))
    return folder


def _report(path):
    folder = path.parent if path.parent.name != "artifacts" else path.parents[1]
    write_report(folder)


READERS["shards"] = _shards, _read_shards
READERS["shards index"] = (lambda folder: _shards(folder).with_name("index.json")), _read_shards
READERS["model config"] = _saved_model, lambda path: convert.load(path.parent)
READERS["safetensors"] = (lambda f: _saved_model(f).with_name("model.safetensors")), lambda p: convert.load(p.parent)
READERS["run config"] = (lambda f: _run(f) / CONFIG), lambda path: cli.load(str(path))
READERS["facts"] = (lambda f: _run(f) / FACTS), Facts.load
READERS["metrics"] = (lambda f: _run(f) / "metrics.jsonl"), lambda p: (read_metrics(p.parent), GrowingMetrics(p).read())
READERS["record"] = (lambda f: _run(f) / "checkpoints/8/about/metadata"), lambda path: read_record(path.parents[1])
READERS["run.json"] = (lambda f: _run(f) / "artifacts/run.json"), lambda path: read_json(path)
for _part in (
    "metrics.jsonl",
    "artifacts/samples.jsonl",
    "artifacts/run.json",
    "artifacts/cost.json",
    "artifacts/attention_text.npz",
):
    READERS[f"report {_part}"] = (lambda f, part=_part: _run(f) / part), _report
for _ending in (".jsonl", ".csv", ".txt"):
    _content = {".jsonl": _lines, ".csv": f"text,label\n{_rows}", ".txt": "\n".join(TEXTS)}[_ending]
    READERS[f"inputs{_ending}"] = (
        (lambda f, e=_ending, c=_content: _written(f / f"a{e}", c)),
        lambda p: from_files(str(p), "documents"),
    )
    READERS[f"score{_ending}"] = (
        (lambda f, e=_ending, c=_content: _written(f / f"a{e}", c)),
        lambda p: scorers.read(str(p), ["text"]),
    )
