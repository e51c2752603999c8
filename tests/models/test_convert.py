"""Reading and writing Hugging Face folders (for parity of the outputs see tests/parity)."""

import json
import os
import re
import resource

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save, save_file

from lineage.models import convert
from lineage.models.convert.family import rearrange
from lineage.models.gpt import GPT
from lineage.models.swin import Swin
from lineage.models.vit import ViT
from tests.tiers import tiered

TINY_GPT = GPT(vocab_size=7, max_length=6, depth=2, width=8, num_heads=2, mlp_dim=12, dropout=0.1)
TINY_VIT = ViT(num_classes=3, image_size=8, patch_size=4, channels=2, depth=2, width=8, num_heads=2, mlp_dim=12)
TINY_SWIN = Swin(num_classes=2, image_size=8, patch_size=2, depths=(1,), width=8, num_heads=(2,), window=2)
RESNET = {"model_type": "resnet", "architectures": "absent"}
ROBERTA = {"model_type": "roberta", "architectures": "absent"}
DETR = {"model_type": "detr", "architectures": "absent"}
BACKBONE = {"model_type": "resnet"}
SWIN = {"model_type": "swin", "architectures": "absent", "image_size": 64, "num_labels": 2}
MAE = {"model_type": "vit_mae", "architectures": "absent", "num_labels": 2}
LLAMA = {"model_type": "llama", "architectures": "absent"}
INPUTS = {GPT: jnp.zeros((1, 6), jnp.int32), ViT: jnp.zeros((1, 8, 8, 2)), Swin: jnp.zeros((1, 8, 8, 3))}


@pytest.fixture
def folder(tmp_path, variables):
    """Return a function that writes a model with random parameters, with edited config and tensors."""

    def make(model=TINY_GPT, config=(), tensors=lambda tensors: None):
        convert.save(tmp_path, model, variables(model, INPUTS[type(model)]))
        written = json.loads((tmp_path / "config.json").read_text()) | dict(config)
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in written.items() if v != "absent"}))
        content = load_file(tmp_path / "model.safetensors")
        tensors(content)
        save_file(content, tmp_path / "model.safetensors")
        return tmp_path

    return make


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_rearrange_orders_and_groups_axes():
    x = np.arange(2 * 3 * 4 * 5).reshape(6, 4, 5)
    expected = x.reshape(2, 3, 4, 5).transpose(2, 0, 3, 1).reshape(4, 2, 15)
    np.testing.assert_array_equal(rearrange(x, "(a b) c d", "c a (d b)", {"b": 3}), expected)
    np.testing.assert_array_equal(rearrange(expected, "c a (d b)", "(a b) c d", {"b": 3}), x)
    assert rearrange(np.zeros((1, 3)), "1 a", "a 1 1", {}).shape == (3, 1, 1)
    np.testing.assert_array_equal(rearrange(x, "(a 3) c d", "c a (d 3)", {}), expected)


@pytest.mark.parametrize(
    "model",
    [
        TINY_GPT,
        TINY_GPT.clone(activation="relu", epsilon=1e-3, mlp_dim=None, dropout=0.0),
        TINY_VIT,
        TINY_VIT.clone(num_classes=2, activation="gelu_tanh", epsilon=1e-6, dropout=0.2),
        TINY_VIT.clone(num_classes=0),
        TINY_VIT.clone(num_classes=0, head="mlp"),
    ],
)
@tiered("dtype", [jnp.float32, jnp.bfloat16])
def test_save_and_load_round_trip(model, dtype, variables, tmp_path):
    params = jax.tree.map(lambda x: x.astype(dtype), variables(model, INPUTS[type(model)]))
    convert.save(tmp_path, model, params)
    again, restored = convert.load(tmp_path, dtype=dtype)
    assert again == model
    assert_same(restored, params)
    stored = load_file(tmp_path / "model.safetensors")
    assert {array.dtype for array in stored.values()} == {np.dtype(dtype)}
    widened = convert.load(tmp_path)[1]
    assert {leaf.dtype for leaf in jax.tree.leaves(widened)} == {np.dtype(np.float32)}
    assert_same(widened, jax.tree.map(lambda x: x.astype(jnp.float32), params))


@pytest.mark.parametrize(
    ("model", "config", "setting", "value"),
    [
        (TINY_GPT, {"activation_function": "gelu"}, "activation", "gelu"),
        (TINY_GPT, {"activation_function": "gelu_pytorch_tanh"}, "activation", "gelu_tanh"),
        (TINY_GPT, {"activation_function": "swish"}, "activation", "silu"),
        (TINY_GPT, {"activation_function": "absent"}, "activation", "gelu_tanh"),
        (TINY_GPT, {"layer_norm_epsilon": 1e-3}, "epsilon", 1e-3),
        (TINY_GPT, {"layer_norm_epsilon": "absent"}, "epsilon", 1e-5),
        (TINY_GPT, {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}, "dropout", 0.3),
        (TINY_GPT, {"architectures": "absent"}, "depth", 2),
        (TINY_GPT, {"architectures": None}, "depth", 2),
        (TINY_GPT, {"n_head": "absent", "num_attention_heads": 4}, "num_heads", 4),  # `transformers` reads both names
        (TINY_VIT, {"hidden_act": "relu"}, "activation", "relu"),
        (TINY_VIT, {"layer_norm_eps": "absent"}, "epsilon", 1e-12),
        (TINY_VIT, {"image_size": [8, 8], "patch_size": [4, 4]}, "image_size", 8),
        (TINY_SWIN, {"image_size": [8, 8], "patch_size": [2, 2]}, "image_size", 8),
        (TINY_VIT, {"id2label": "absent", "num_labels": 3}, "num_classes", 3),
        (TINY_VIT, {"id2label": None, "num_labels": 3}, "num_classes", 3),
    ],
)
def test_fields_of_the_config(model, config, setting, value, folder):
    assert getattr(convert.load(folder(model, config))[0], setting) == value


def test_synonyms_of_fields_are_those_of_the_reference():
    configs = pytest.importorskip("transformers").CONFIG_MAPPING
    for kind, family in convert.FAMILIES.items():
        theirs = configs[kind].attribute_map if kind in configs else family.synonyms
        read = {synonym: name for synonym, name in theirs.items() if name in family.fields}
        assert family.synonyms == read, kind


def test_missing_dropout_in_albert_config():
    settings = convert.FAMILIES["albert"].settings({}, "AlbertForSequenceClassification", {})
    assert settings == {"head": "classification", "head_dropout": 0.1, "num_classes": 2}


def test_settings_override_the_folder(folder):
    path = folder(config={"attn_pdrop": 0.0})
    model, _ = convert.load(path, dropout=0.2, remat="full")
    assert (model.dropout, model.remat, model.depth) == (0.2, "full", 2)


def test_shards(folder):
    path = folder()
    expected = convert.load(path)[1]
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    shards = {name: f"part-{number % 3}.safetensors" for number, name in enumerate(tensors)}
    for file in set(shards.values()):
        save_file({name: tensors[name] for name in tensors if shards[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert_same(convert.load(path)[1], expected)
    name = next(name for name in tensors if shards[name] == "part-1.safetensors")
    save_file({name: tensors[name] + 1}, path / "part-3.safetensors")  # of another version of the model
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards | {"a": "part-3.safetensors"}}))
    with pytest.raises(ValueError, match=rf"tensor {name} is in two files, one of which is part-3\.safetensors"):
        convert.load(path)
    (path / "part-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"part-1\.safetensors does not exist"):
        convert.load(path)


def test_names_without_prefix_old_masks_and_tied_heads(folder):
    def old(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["lm_head.weight"] = tensors["wte.weight"]
        tensors["h.0.attn.bias"] = np.ones((1, 1, 6, 6), np.uint8)
        tensors["h.1.attn.masked_bias"] = np.full((), -1e4, np.float32)

    expected = convert.load(folder())[1]
    assert_same(convert.load(folder(tensors=old, config={"architectures": ["GPT2Model"]}))[1], expected)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_other_dtypes_become_float32(dtype, folder):
    exact = convert.load(folder())[1]
    cast = convert.load(folder(tensors=lambda t: t.update({name: t[name].astype(dtype) for name in t})))[1]
    assert_same(cast, jax.tree.map(lambda x: np.asarray(x).astype(dtype).astype(np.float32), exact))


def transposed(tensors):
    tensors["transformer.h.1.mlp.c_fc.weight"] = tensors["transformer.h.1.mlp.c_fc.weight"].T.copy()


@tiered(
    ("model", "config", "message"),
    [
        (TINY_GPT, {"model_type": "word2vec"}, "model_type is 'word2vec': it must be one of .*gpt2, "),
        (TINY_GPT, {"model_type": "absent"}, "model_type is None: it must be one of .*gpt2, "),
        (TINY_GPT, {"architectures": ["GPT2ForSequenceClassification"]}, "must be 'GPT2LMHeadModel' or 'GPT2Model'"),
        (TINY_GPT, {"tie_word_embeddings": False}, "tie_word_embeddings is False: it must be True"),
        (TINY_GPT, {"scale_attn_weights": False}, "scale_attn_weights is False: it must be True"),
        (TINY_GPT, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True: .* False"),
        (TINY_GPT, {"add_cross_attention": True}, "add_cross_attention is True: it must be False"),
        (TINY_GPT, {"activation_function": "mish"}, "activation_function is 'mish': it must be one of relu, gelu,"),
        (TINY_GPT, {"n_layer": "2"}, "n_layer is '2': it must be an integer of at least 1"),
        (TINY_GPT, {"n_layer": 0}, "n_layer is 0: it must be an integer of at least 1"),
        (TINY_GPT, {"n_head": True}, "n_head is True: it must be an integer of at least 1"),
        (TINY_GPT, {"num_attention_heads": 4}, "n_head is 2 and num_attention_heads is 4: they must be equal, as both"),
        (TINY_GPT, {"n_head": 3}, "width 8, 3 heads and 3 key/value heads do not fit"),
        (TINY_GPT, {"n_layer": 3}, r"tensors are missing: transformer\.h\.2\.attn\.c_attn\.bias, .*\.\.\."),
        (TINY_GPT, {"n_layer": 1}, r"tensors are unexpected: transformer\.h\.1\.attn\.c_attn\.bias, .*\.\.\."),
        (TINY_GPT, {"n_inner": 10}, r"c_fc\.weight has shape \(8, 12\): it must be \(8, 10\)"),
        (TINY_GPT, {"layer_norm_epsilon": -1.0}, "layer_norm_epsilon is -1.0: it must be a number of at least 0"),
        (TINY_GPT, {"layer_norm_epsilon": np.nan}, "layer_norm_epsilon is nan: it must be a number of at least 0"),
        (TINY_GPT, {"attn_pdrop": float("inf")}, "attn_pdrop is inf: it must be a number of at least 0"),
        (TINY_GPT, {"n_layer": 10**6}, "depth is 1000000: it must be at most 1,000 for the weights"),
        (TINY_GPT, {**RESNET, "depths": [3, 10**12]}, r"depths is \(3, 1000000000000\): it must be at most 200"),
        (TINY_GPT, {**RESNET, "depths": [1, 199, 1]}, r"depths is \(1, 199, 1\): it must be at most 200"),
        (TINY_GPT, {**RESNET, "hidden_sizes": [8] * 65}, "widths has 65 values: it must have at most 64"),
        (
            TINY_GPT,
            {**DETR, "backbone_config": BACKBONE | {"depths": [10**9], "hidden_sizes": [8]}},
            "depths is .*: it must be at most 200",
        ),
        (
            TINY_GPT,
            {**DETR, "backbone_config": BACKBONE | {"hidden_sizes": [10**9]}},
            "widths is .*: it must be",
        ),
        (
            TINY_GPT,
            {**DETR, "backbone_config": BACKBONE | {"output_stride": 16}},
            "backbone_config has output_stride 16: it must be 32",
        ),
        (
            TINY_GPT,
            {**DETR, "backbone_config": BACKBONE | {"out_features": ["stage2"]}},
            r"backbone_config has out_features \['stage2'\]: the last must be 'stage4'",
        ),
        (
            TINY_GPT,
            {**DETR, "backbone_config": {"backbone": "resnet18", "out_indices": [1, 3]}},
            r"backbone_config has out_indices \[1, 3\]: the last must be 4",
        ),
        (TINY_GPT, {**DETR, "auxiliary_loss": True}, "auxiliary_loss is True: it must be False"),
        (TINY_GPT, {**SWIN, "window_size": 1000}, "window is 1,000: its pairs of tokens are too many for the weights"),
        (
            TINY_GPT,
            {**MAE, "decoder_hidden_size": 10**6},
            "image_size is 224, in patches of 16: too large for the weig",
        ),
        (
            TINY_GPT,
            {**LLAMA, "rope_parameters": {"rope_theta": np.nan}},
            "rope_theta of rope_type .* is nan",
        ),
        (TINY_GPT, {"is_causal": False}, "is_causal is False: it must be True"),
        (TINY_GPT, {**ROBERTA, "is_causal": True}, "is_causal is True: it must be False"),
        (
            TINY_GPT,
            {"model_type": "t5", "architectures": None, "is_causal": True},
            "is_causal is True: it must be null",
        ),
        (TINY_GPT, {**ROBERTA, "max_position_embeddings": [0] * 500}, "max_position_embeddings .*: they"),
        (TINY_GPT, {"n_embd": 40_000}, "describes a model of .* weights: the files have"),
        (TINY_GPT, {"n_embd": 1000, "n_layer": 1000}, "describes a model of .* weights: the files have"),
        (TINY_GPT, {"vocab_size": 10**12}, "vocab_size is 1000000000000: it must be at most"),
        (TINY_GPT, {"vocab_size": 10**400}, "vocab_size is 1000.*: it must be at most"),
        (TINY_GPT, {"model_type": ["gpt2"]}, r"model_type is \['gpt2'\]: it must be one of"),
        (TINY_GPT, {"architectures": [["GPT2LMHeadModel"]]}, r"architectures is \['GPT2LMHeadModel'\]: it must be"),
        (TINY_GPT, {"architectures": {"a": 1}}, "config.json is not that of a 'gpt2'"),
        (TINY_GPT, {"activation_function": ["gelu"]}, r"activation_function is \['gelu'\]: it must be one of relu"),
        (TINY_GPT, {"activation_function": "x" * 9999}, "activation_function is 'xxx.*: it must be one of relu"),
        (TINY_GPT, {"n_head": [2]}, r"n_head is \[2\]: it must be an integer of at least 1"),
        (TINY_VIT, {"qkv_bias": "yes"}, "qkv_bias is 'yes': it must be True"),
        (
            TINY_GPT,
            {**LLAMA, "tie_word_embeddings": "false"},
            "tie_word_embeddings is 'false': it must be true or false",
        ),
        (TINY_VIT, {"id2label": 5}, "config.json is not that of a 'vit'"),
        (TINY_VIT, {"id2label": "absent", "num_labels": 10**12}, "num_classes is 1000000000000: it must be at most"),
        (TINY_VIT, {"id2label": "absent", "num_labels": "3"}, "num_labels is '3': it must be an integer"),
        (TINY_VIT, {"image_size": 8192}, "image_size is 8,192, in patches of 4: too large for the weights"),
        (TINY_GPT, {"attn_pdrop": 0.0}, r"resid_pdrop is 0.1 and attn_pdrop is 0.0: .* load\(folder, dropout=\.\.\.\)"),
        (TINY_VIT, {"qkv_bias": False}, "qkv_bias is False: it must be True"),
        (TINY_VIT, {"image_size": [8, 4]}, r"image_size is \[8, 4\]: it must be an integer"),
        (TINY_VIT, {"architectures": ["ViTForX"]}, "must be 'ViTForImageClassification' or 'ViTModel'"),
        (TINY_VIT, {"id2label": {"0": "cat"}}, r"classifier\.\w+ has shape .*3.*: it must be .*1"),
        (TINY_VIT, {"image_size": 10}, "image 10x10 cannot be divided into patches of 4x4 pixels"),
        (TINY_VIT.clone(num_classes=0, head="mlp"), {"pooler_act": "relu"}, "pooler_act is 'relu': it must be 'tanh'"),
    ],
    first=19,
)
def test_unsupported_configs_raise(model, config, message, folder):
    path = folder(model, config)
    with pytest.raises(ValueError, match=message) as error:
        convert.load(path)
    assert str(error.value).startswith(str(path))
    assert len(str(error.value)) < 400 + len(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t["transformer.wpe.weight"].fill(np.nan), r"wpe\.weight has values that are not finite"),
        (lambda t: t["transformer.wpe.weight"].__setitem__((5, 7), -np.inf), r"wpe\.weight has values that are not"),
        (
            lambda t: t.update({"transformer.wpe.weight": np.full((6, 8), 1e300)}),
            r"wpe\.weight has values that are not finite in float32",
        ),
        (lambda t: t.pop("transformer.wpe.weight"), r"tensors are missing: \S*wpe\.weight\.$"),
        (lambda t: t.update(extra=np.zeros(3)), r"tensors are unexpected: extra\.$"),
        (transposed, r"h\.1\.mlp\.c_fc\.weight has shape \(12, 8\): it must be \(8, 12\)"),
        (lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"] + 1}), r"lm_head\.weight differs from"),
        (
            lambda t: t.update({"transformer.wte.weight": np.zeros((7, 8), np.int8)}),
            r"wte\.weight has dtype I8: it must be one of F64, F32, F16, BF16",
        ),
    ],
)
def test_incompatible_tensors_raise(edit, message, folder):
    path = folder(tensors=edit)
    with pytest.raises(ValueError, match=message) as error:
        convert.load(path)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{", r"config\.json is not JSON"),
        ("config.json", b"\xff{}", r"config\.json is not JSON"),
        ("config.json", b"[" * 100_000, r"config\.json is not JSON: maximum recursion depth"),
        ("config.json", b"[]", r"config\.json holds a list: it must be a JSON object"),
        ("model.safetensors", b"", r"model\.safetensors is not a safetensors file"),
        ("model.safetensors", b"nothing of the kind", r"model\.safetensors is not a safetensors file"),
        (
            "model.safetensors",
            save(dict.fromkeys(map(str, range(100_001)), np.zeros(0))),
            r"the files have 100,001 tensors: they must have at most 100,000",
        ),
        (
            "model.safetensors",
            (20_000_008).to_bytes(8, "little") + b" " * 20_000_008,
            r"model\.safetensors has a header of 20,000,008 bytes: it must have at most 20,000,000",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_corrupt_files_raise(name, content, message, folder):
    path = folder()
    (path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        convert.load(path)


def test_large_config_is_not_read(folder):
    os.truncate((path := folder()) / "config.json", 2**26 + 1)
    with pytest.raises(ValueError, match=r"config\.json is not a regular file of at most 67,108,864 bytes"):
        convert.load(path)


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["a.safetensors"], r"\['a.safetensors'\]"),
        (None, "None"),
        ({"wte": 5}, "5"),
        ({"wte": "../outside.safetensors"}, r"'\.\./outside.safetensors'"),
        ({"wte": "/etc/passwd"}, "'/etc/passwd'"),
        ({"wte": "part.bin"}, "'part.bin'"),
        ({"wte": "two\nlines.safetensors"}, r"'two\\nlines.safetensors'"),
    ],
)
def test_index_that_names_other_files_raises(folder, names, shown):
    path = folder()
    (path / "model.safetensors").rename(path.parent / "outside.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ValueError, match=rf"index\.json names {shown}: `weight_map` must give names of files in the"):
        convert.load(path)


def test_index_of_too_many_files_raises(folder):
    path = folder()
    (path / "model.safetensors").unlink()
    names = {str(number): f"{number}.safetensors" for number in range(100_001)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ValueError, match=r"index\.json names 100,001 files: it must name at most 100,000"):
        convert.load(path)


def test_truncated_file_raises(folder):
    path = folder()
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[:-5])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file"):
        convert.load(path)


def test_missing_files_raise(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere/config\.json does not exist"):
        convert.load(tmp_path / "nowhere")
    path = folder()
    (path / "model.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"model\.safetensors does not exist: weights are read from safetensors only"
    ):
        convert.load(path)
    (path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        convert.load(path)


OTHERS = {"pooling": ["tokens", "map"], "position": ["2d", "sincos2d"], "head": ["mlp"], "hybrid": [(1,)]}


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "value"), [(name, value) for name in OTHERS for value in OTHERS[name]])
def test_unsupported_models_raise(name, value, variables, tmp_path):
    model = TINY_VIT.clone(**{name: value})
    with pytest.raises(ValueError, match=f"`transformers` has no ViT with .*{re.escape(f'{name!r}: {value!r}')}"):
        convert.save(tmp_path / "out", model, variables(model, INPUTS[ViT]))
    with pytest.raises(ValueError, match=r"a Dense cannot be written for `transformers`: it must be one of .*GPT, "):
        convert.save(tmp_path / "out", nn.Dense(3), {"params": {}})
    assert not (tmp_path / "out").exists()


def test_variables_of_another_model_raise(variables, tmp_path):
    with pytest.raises(ValueError, match=r"tensor \S+ has shape .*: it must be"):
        convert.save(tmp_path / "out", TINY_GPT, variables(TINY_GPT.clone(depth=3), INPUTS[GPT]))
    with pytest.raises(ValueError, match="tensors are missing: embed/table, "):
        convert.save(tmp_path / "out", TINY_GPT, {"params": {}})
    assert not (tmp_path / "out").exists()


def test_full_disk_keeps_existing_files(folder, variables, monkeypatch):
    path = folder()
    before = {file.name: file.read_bytes() for file in path.iterdir()}

    def full(tensors, file, metadata):
        file.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert.folder, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        convert.save(path, TINY_GPT, variables(TINY_GPT, INPUTS[GPT], seed=1))
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_full_disk_is_named(variables, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match=r"model\.safetensors cannot be written: .*File too large"):
            convert.save(tmp_path, TINY_GPT, variables(TINY_GPT, INPUTS[GPT]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [*tmp_path.iterdir()]
