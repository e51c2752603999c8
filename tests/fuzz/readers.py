"""Readers of files, with a sound file for each: `READERS[name]` is (make, read).

`make(folder)` writes a sound file, perhaps with others beside it, and returns its path; `read(path)` reads it, or a
mutation of it, as the package does.
"""

import gzip
import json
import lzma
import pickle
from functools import partial
from pathlib import Path

import jax
import numpy as np
from PIL import Image

from lineage import data, models
from lineage.configs import cli
from lineage.configs.atomic import sealed
from lineage.data.documents import Documents
from lineage.data.facts import FACTS, Facts
from lineage.data.fingerprint import fingerprint
from lineage.data.inputs import from_files
from lineage.data.sources import SOURCES
from lineage.data.tokenizers import TOKENIZERS, Bytes, Tokenizer
from lineage.data.tokens import tokenize
from lineage.data.transforms.pillow import decode
from lineage.evaluation import scorers
from lineage.evaluation.prediction import Output
from lineage.models import convert
from lineage.models.convert import companions
from lineage.models.resnet import ResNet
from lineage.report.run import write_report
from lineage.runs.folder import CONFIG, read_json, read_metrics, read_record
from lineage.runs.metrics import GrowingMetrics
from tests.data.test_raw_images import pickled

TEXTS = ["The cat sat on the mat.", "A dog; quoted", "Ein Satz über Öl.", "return None", "日本語 テキスト"] * 4
ROWS = [{"text": text, "input": text, "target": text, "label": number % 3} for number, text in enumerate(TEXTS)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
TABLE = "text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in ROWS)
TREE = "# text = a bc\n1\ta\ta\tDET\t_\t_\t0\troot\t_\t_\n2\tbc\tbc\tNOUN\t_\t_\t1\tobj\t_\t_\n\n" * 3
ASKED = [
    {"id": str(number), "question": "Who?", "answers": [{"text": "cat", "answer_start": 4}]} for number in range(5)
]
SQUAD = json.dumps({"version": "2.0", "data": [{"title": "t", "paragraphs": [{"context": TEXTS[0], "qas": ASKED}]}]})


def write(name, content, folder):
    """Write a file with some content (text or bytes) into a folder and return its path."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read_source(name, kinds, place, options, path):
    """Read all content of some kinds that a source has; its path is the parent number `place` of a file."""
    source = SOURCES[name](path=str([path, *path.parents][place]), **options)
    for kind in kinds.split():
        content = source.read(kind)
        splits = content.splits if isinstance(content, data.Images) else content
        for part in splits.values():
            if isinstance(content, data.Images):
                [*map(np.asarray, part.take(np.arange(min(len(part), 50)))["image"])]
            elif isinstance(part, Documents):
                list(part)
    fingerprint(source.files())


def from_source(name, kinds, make, place=0, **options):
    """Return a sound file and the reading of a source."""
    return make, partial(read_source, name, kinds, place, options)


def coco(folder):
    Image.new("RGB", (30, 24)).save(folder / "1.jpg")
    images = [{"id": 1, "file_name": "1.jpg", "width": 30, "height": 24}]
    boxes = [{"id": 1, "image_id": 1, "category_id": 3, "bbox": [1, 2, 10.5, 8], "area": 84, "iscrowd": 0}] * 3
    content = {"images": images, "annotations": boxes, "categories": [{"id": 3, "name": "cat"}]}
    return write("instances_train.json", json.dumps(content), folder)


def voc(folder):
    Image.new("RGB", (30, 24)).save(write("JPEGImages/1.jpg", "", folder))
    write("ImageSets/Main/train.txt", "1\n", folder)
    box = "<bndbox><xmin>1</xmin><ymin>2</ymin><xmax>12</xmax><ymax>9</ymax></bndbox>"
    item = f"<object><name>cat</name><difficult>0</difficult>{box}</object>"
    size = "<size><width>30</width><height>24</height><depth>3</depth></size>"
    content = f"<annotation><filename>1.jpg</filename>{size}{item * 2}</annotation>"
    return write("Annotations/1.xml", content, folder)


def parquet(folder):
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "a.parquet", row_group_size=5)
    return folder / "a.parquet"


def read_parquet_metadata(path):
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(ROWS).replace_schema_metadata({"huggingface": path.read_bytes()})
    pyarrow.parquet.write_table(table, path.with_name("a.parquet"))
    read_source("parquet", "labeled_texts", 0, {}, path.with_name("a.parquet"))


def idx(folder):
    for split in ("t10k", "train"):
        write(f"{split}-labels-idx1-ubyte", b"\0\0\x08\1\0\0\0\6" + bytes(range(6)), folder)
        content = b"\0\0\x08\3\0\0\0\6\0\0\0\x08\0\0\0\x08" + bytes(384)
        path = write(f"{split}-images-idx3-ubyte", content, folder)
    return path


def cifar(folder):
    write("batches.meta", pickle.dumps({b"label_names": [b"a", b"b", b"c", b"d"]}), folder)
    content = pickled(np.zeros((4, 32, 32, 3), np.uint8), range(4), b"labels")
    names = ["test_batch", *(f"data_batch_{number}" for number in range(1, 6))]
    return [write(name, content, folder) for name in names][-1]


def image(suffix, folder):
    pixels = np.random.default_rng(0).integers(0, 255, (24, 30, 3), np.uint8)
    Image.fromarray(pixels).save(folder / f"a.{suffix}")
    return folder / f"a.{suffix}"


def tokenizer(kind, folder):
    options = {} if kind == "words" else {"vocab_size": 300}
    TOKENIZERS[kind](**options).train(TEXTS, ["end_of_text"]).save(folder)
    return folder / "tokenizer.json"


def read_tokenizer(path):
    loaded = Tokenizer.load(path)
    return [loaded.decode(ids) for ids in loaded.encode_batch(TEXTS)]


def shards(name, folder):
    tokenize(Documents(TEXTS), Bytes().train(TEXTS), folder)
    return next(folder.glob(f"*/{name}"))


def read_shards(path):
    stream = tokenize(Documents(TEXTS), Bytes().train(TEXTS), path.parents[1])
    return np.asarray(stream.tokens), stream.ends


def model(name, folder, kind="gpt"):
    """Write a model in the layout of `transformers` and return the path of one of its files."""
    module = models.build(kind, **MODELS[kind])
    family = next(family for family in convert.FAMILIES.values() if family.model == kind and family.fits(module))
    convert.save(folder, module, zeros(module, *family.example(module)))
    return folder / name


def zeros(module, *inputs):
    """Return variables of a model, without compiling their initialization."""
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(module.init, jax.random.key(0), *inputs))


def read_model(path):
    return convert.load(path.parent)


def vit_file(folder):
    module = models.build("vit", num_classes=3, image_size=8, activation="gelu_tanh", epsilon=1e-6, **SMALL)
    convert.vit_npz.save(folder / "a.npz", module, zeros(module, np.zeros((1, 8, 8, 3), np.float32)))
    return folder / "a.npz"


def output(folder):
    """Write predictions, and what they were computed from; return their path."""
    predictions = Output(str(folder / "out.jsonl"), {"inputs": "a"})
    predictions.write([[{"label": "a"}, {"error": "Image 1"}]] * 3)
    return predictions.path


def run(name, folder):
    """Write the files of a run and return the path of one."""
    config = cli.load(f"{Path(__file__).parents[1]}/tiny.py:gpt")[0].to_json_best_effort()
    write(CONFIG, config, folder)
    Facts({"train": 9}, 300, 16, tokens={"train": 99}).save(folder / FACTS)
    lines = [{"step": step, "train/loss": 1 / step, "validation/loss": None, "time/a": 0.5} for step in range(1, 30)]
    write("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines), folder)
    samples = [{"step": step, "prompt": "a", "text": "b", "texts": ["a"]} for step in (10, 20)]
    write("artifacts/samples.jsonl", "".join(json.dumps(line) + "\n" for line in samples), folder)
    write("artifacts/run.json", json.dumps({"seconds": 9.5, "config": json.loads(config)}), folder)
    write("artifacts/cost.json", json.dumps({"parameters": 99, "memory": {"training": {"all": 5}}}), folder)
    np.savez(folder / "artifacts/attention_text.npz", tokens=np.array(["a", "b"]), weights=np.ones((1, 1, 2, 2)))
    write("checkpoints/8/about/metadata", json.dumps(sealed({"next_batch": 8, "config": {}})), folder)
    return folder / name


SMALL = {"depth": 1, "width": 8, "num_heads": 2, "mlp_dim": 16, "patch_size": 4}
TOKENS = {"vocab_size": 20, "max_length": 8, "depth": 1, "width": 8, "num_heads": 2, "mlp_dim": 16}
BACKBONE = {"num_classes": 0, "depths": (1, 1), "widths": (8, 16), "stem_width": 4, "frozen": True}
MODELS = {
    "gpt": TOKENS,
    "bert": TOKENS | {"head": "classification", "num_classes": 3},
    "llama": TOKENS | {"rope_scaling": "yarn", "rope_factor": 2.0, "rope_length": 4, "rope_turns": (1.0, 32.0)},
    "transformer_xl": TOKENS | {"cutoffs": (5, 10), "activation": "relu"},
    "swin": {"num_classes": 3, "image_size": 16, "patch_size": 2, "width": 8, "window": 2}
    | {"depths": (1, 1), "num_heads": (1, 2)},
    "detr": {"num_classes": 3, "num_queries": 4, "depth": 1, "width": 8, "num_heads": 2, "mlp_dim": 16}
    | {"backbone": ResNet(**BACKBONE)},
}
METADATA = json.dumps({"info": {"features": {"label": {"names": ["a", "b", "c"], "_type": "ClassLabel"}}}})
SENTENCES = "".join(json.dumps({"words": text.split()}) + "\n" for text in TEXTS)
IMAGES = {"size": {"height": 224, "width": 224}, "do_center_crop": True, "crop_size": 200, "resample": 2}
IMAGES |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_processor_type": "ViTImageProcessor"}
TEXT = "-DOCSTART- O\n\n" + "EU NNP B-ORG\nrejects VBZ O\n\n" * 5
ALL = {"validation_fraction": 0.0}
READERS = {
    "text": from_source("text", "documents", partial(write, "a.txt", "\n".join(TEXTS))),
    "csv": from_source("csv", "labeled_texts documents", partial(write, "a.csv", TABLE), **ALL),
    "csv.gz": from_source("csv", "documents", partial(write, "a.csv.gz", gzip.compress(TABLE.encode())), **ALL),
    "csv.xz": from_source("csv", "documents", partial(write, "a.csv.xz", lzma.compress(TABLE.encode())), **ALL),
    "tsv": from_source("tsv", "labeled_texts", partial(write, "a.tsv", TABLE.replace(",", "\t")), **ALL),
    "jsonl": from_source("jsonl", "documents pairs labeled_texts", partial(write, "a.jsonl", LINES), **ALL),
    "pairs": from_source("pairs", "pairs", partial(write, "a.jsonl", LINES)),
    "labels": from_source("labels", "labeled_texts pairs", partial(write, "a.jsonl", LINES)),
    "conllu": from_source("conllu", "tagged_sentences documents", partial(write, "a.conllu", TREE)),
    "bio": from_source("bio", "tagged_sentences documents", partial(write, "a.txt", TEXT)),
    "squad": from_source("squad", "questions", partial(write, "a.json", SQUAD)),
    "coco": from_source("coco", "images_with_boxes", coco),
    "voc": from_source("voc", "images_with_boxes", voc, place=2, validation_set=""),
    "parquet": from_source("parquet", "documents pairs labeled_texts", parquet, **ALL),
    "parquet metadata": (partial(write, "a.json", METADATA), read_parquet_metadata),
    "idx": from_source("idx", "images", idx, place=1),
    "cifar": from_source("cifar", "images", cifar, place=1),
    "inputs.csv": (partial(write, "a.csv", TABLE), lambda path: from_files(str(path), "documents")),
    "inputs.jsonl": (partial(write, "a.jsonl", LINES), lambda path: from_files(str(path), "documents")),
    "inputs of words": (partial(write, "a.jsonl", SENTENCES), lambda path: from_files(str(path), "tagged_sentences")),
    "output": (output, lambda path: Output(str(path), {"inputs": "a"})),
    "scores": (partial(write, "a.jsonl", LINES), lambda path: scorers.read(str(path), ["text"])),
    "shards": (partial(shards, "*.tokens"), read_shards),
    "index of shards": (partial(shards, "index.json"), read_shards),
    **{f"{kind} config": (partial(model, "config.json", kind=kind), read_model) for kind in MODELS},
    "safetensors": (partial(model, "model.safetensors"), read_model),
    "vit.npz": (vit_file, convert.load),
    "preprocessing": (
        partial(write, "preprocessor_config.json", json.dumps(IMAGES)),
        lambda path: companions.preprocessing(path.parent),
    ),
    "run config": (partial(run, CONFIG), lambda path: cli.load(str(path))),
    "run facts": (partial(run, FACTS), Facts.load),
    "run record": (partial(run, "checkpoints/8/about/metadata"), lambda path: read_record(path.parents[1])),
    "run.json": (partial(run, "artifacts/run.json"), read_json),
    "metrics": (partial(run, "metrics.jsonl"), lambda path: (read_metrics(path.parent), GrowingMetrics(path).read())),
    "report metrics.jsonl": (partial(run, "metrics.jsonl"), lambda path: write_report(path.parent)),
}
READERS |= {
    f"report {name}": (partial(run, f"artifacts/{name}"), lambda path: write_report(path.parents[1]))
    for name in ("samples.jsonl", "run.json", "cost.json", "attention_text.npz")
}
for _kind in ("png", "jpeg", "gif", "bmp", "webp", "tiff", "ppm"):
    READERS[f"image.{_kind}"] = partial(image, _kind), lambda path: decode(path, 3)
for _kind in ("bpe", "wordpiece", "unigram", "words"):
    READERS[f"tokenizer.{_kind}"] = partial(tokenizer, _kind), read_tokenizer
