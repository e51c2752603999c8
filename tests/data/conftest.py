import dataclasses
import os

import numpy as np
import pytest

from lineage import data
from lineage.data.tokenizers import TOKENIZERS, Bytes
from lineage.data.transforms.pillow import png


def with_loader(options):
    """Return options with those of the loader replaced by a `loader`."""
    names = {field.name for field in dataclasses.fields(data.Loader)}
    loader = data.Loader(**{name: value for name, value in options.items() if name in names})
    return {name: value for name, value in options.items() if name not in names} | {"loader": loader}


def load(source, task, tokenizer=None, **options):
    """Call `data.load`, with the options of the loader as keyword arguments; the default tokenizer is bytes."""
    return data.load(source, task, tokenizer or Bytes(), **with_loader(options))


def train_batches(**options):
    """Return training batches, given the loader's options among the others."""
    return data.TrainBatches(**with_loader(options))


def evaluation_batches(**options):
    """Return evaluation batches, given the loader's options among the others."""
    return data.EvaluationBatches(**with_loader(options))


def train(kind, texts, special_tokens=("end_of_text",), **options):
    """Train a tokenizer of a registered kind."""
    return TOKENIZERS[kind](**options).train(texts, special_tokens)


@pytest.fixture(scope="session")
def prepare():
    """Return `prepare(folder, name, features, splits)`, which writes a TFDS data set without TensorFlow."""
    tfds = pytest.importorskip("tensorflow_datasets")
    from array_record.python.array_record_module import ArrayRecordWriter
    from tensorflow_datasets.core.dataset_info import DatasetIdentity
    from tensorflow_datasets.proto import tf_example_pb2

    def serialized(example):
        proto = tf_example_pb2.Example()
        for name, value in example.items():
            feature = proto.features.feature[name]
            array = np.atleast_1d(np.asarray(value, object if isinstance(value, bytes) else None))
            kind = {"i": feature.int64_list, "f": feature.float_list}.get(array.dtype.kind, feature.bytes_list)
            kind.SetInParent()  # also for empty lists
            kind.value.extend(array.tolist())
        return proto.SerializeToString()

    def write(folder, name, features, splits, version="1.0.0"):
        folder = folder / name / version
        folder.mkdir(parents=True)
        infos = []
        for split, examples in splits.items():
            template = tfds.core.ShardedFileTemplate(
                data_dir=folder, dataset_name=name, split=split, filetype_suffix="array_record"
            )
            records = [serialized(example) for example in examples]
            file = template.sharded_filepath(shard_index=0, num_shards=1)
            writer = ArrayRecordWriter(os.fspath(file), "group_size:1")
            for record in records:
                writer.write(record)
            writer.close()
            sizes = {"shard_lengths": [len(records)], "num_bytes": sum(map(len, records))}
            infos.append(tfds.core.SplitInfo(name=split, filename_template=template, **sizes))
        identity = DatasetIdentity(
            name=name, version=tfds.core.Version(version), data_dir=os.fspath(folder), module_name=""
        )
        info = tfds.core.DatasetInfo(builder=identity, features=tfds.features.FeaturesDict(features(tfds.features)))
        info.set_file_format("array_record")
        info.set_splits(tfds.core.splits.SplitDict(infos))
        info.write_to_directory(folder)

    return write


@pytest.fixture(scope="session")
def shapes(prepare, tmp_path_factory):
    """Prepare 40 and 7 gray 8x8 images, image i with all pixels i and class i % 3, and return the data_dir."""
    folder = tmp_path_factory.mktemp("tfds")

    def examples(n):
        return [{"image": png(np.full((8, 8, 1), i, np.uint8)), "label": i % 3} for i in range(n)]

    def features(kinds):
        return {"image": kinds.Image(shape=(8, 8, 1)), "label": kinds.ClassLabel(names=["circle", "line", "box"])}

    prepare(folder, "shapes", features, {"train": examples(40), "test": examples(7)})
    return folder
