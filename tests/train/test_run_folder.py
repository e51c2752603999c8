"""Run folders: checks of the config, the data and the tokenizer."""

import json
import math
import shutil
import sys
import zlib
from collections import defaultdict

import jax
import numpy as np
import pytest

from lineage.configs import base, cli, schema
from lineage.configs.atomic import sealed
from lineage.data.fingerprint import fingerprint
from lineage.data.sources import SOURCES
from lineage.models.vit import ViT
from lineage.runs import command as command_line
from lineage.runs import data_record, folder, provenance
from lineage.train import distributed, loop, preparation
from lineage.train.experiment import Experiment


def test_workdir_with_another_config_raises(tiny, tmp_path):
    folder.keep_config(tiny(), tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    other = tiny("gpt", {"model.width": 32, "seed": 1})
    folder.discard(tmp_path)
    folder.keep_config(other, tmp_path)  # nothing was saved yet: the config is replaced
    assert json.loads((tmp_path / "config.json").read_text())["model"]["width"] == 32
    assert not (tmp_path / "tokenizer.json").exists()  # of the previous config
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"another config \(model.width was 32, is 16; seed was 1, is 0\)"):
        folder.keep_config(tiny(), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model"]["width"] == 32
    longer = {"total_steps": 80, "log_every_steps": 7, "checkpoint.keep": 3, "sampling.temperature": 0.5}
    folder.keep_config(tiny("gpt", {"model.width": 32, "seed": 1} | longer), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["total_steps"] == 80
    assert (tmp_path / "tokenizer.json").exists()
    mixed = tiny("gpt", {"model.width": 32, "seed": 1, "experts.paths": ("a",)})
    with pytest.raises(ValueError, match=r"another config \(experts\.paths was \[\], is \['a'\]\)"):
        folder.keep_config(mixed, tmp_path)  # they would have no effect
    folder.check_config(mixed, tmp_path)  # an evaluation uses them


@pytest.mark.thorough
def test_results_without_checkpoints_are_not_replaced_by_those_of_another_config(tiny, tmp_path):
    config = tiny("gpt", {"total_steps": 2, "source": f"text:{__file__}"})
    loop.train(config, tmp_path, devices=jax.devices()[:1])
    shutil.rmtree(tmp_path / "checkpoints")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    for key, value in (("seed", 1), ("total_steps", 1)):
        other = config.copy_and_resolve_references()
        other[key] = value
        with pytest.raises(ValueError, match=rf"has the results of a run of another config \({key} was"):
            loop.train(other, tmp_path)
    assert all(path.read_bytes() == content for path, content in before.items())
    folder.check_results(base.resolved(config), tmp_path)
    (tmp_path / "artifacts" / "run.json").write_text("[]")
    folder.check_results(base.resolved(other), tmp_path)


def test_config_has_the_sizes_of_its_variant(tmp_path, monkeypatch):
    """Check that a run is refused if the sizes have changed, and that one of an earlier version is not."""
    config = base.get_config("vit")
    config.model.variant = "mu"
    folder.keep_config(base.resolved(config), tmp_path)
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    path = tmp_path / "config.json"
    stored = json.loads(path.read_text())["model"]
    assert (stored["variant"], stored["depth"], stored["width"], stored["mlp_dim"]) == ("mu", 4, 64, None)
    folder.check_config(base.resolved(config), tmp_path, earlier=config)
    other = config.copy_and_resolve_references()
    other.model.depth = 3
    monkeypatch.setitem(ViT.VARIANTS, "mu", ViT.VARIANTS["mu"] | {"width": 32})
    with pytest.raises(ValueError, match=r"another config \(model.width was 64, is 32\)"):
        folder.check_config(base.resolved(config), tmp_path, earlier=config)
    loaded, _ = cli.load(str(path))
    assert (loaded.model.width, loaded.model.depth) == (64, None)  # 4, as in the variant
    folder.check_config(base.resolved(loaded), tmp_path, earlier=loaded)
    path.write_text(json.dumps(folder.plain(config)))  # of an earlier version
    folder.check_config(base.resolved(config), tmp_path, earlier=config)
    with pytest.raises(ValueError, match=r"another config \(model.depth was None, is 3\)"):
        folder.check_config(base.resolved(other), tmp_path, earlier=other)


def test_processes_share_config_and_folder(tiny, tmp_path):
    folder.keep_config(tiny(), tmp_path)
    folder.check_shared(tiny(), tmp_path, 1)
    for config, workdir in ((tiny("gpt", {"seed": 1}), tmp_path), (tiny(), tmp_path / "other")):
        with pytest.raises(ValueError, match=f"{workdir}/config.json of process 1 differs from that of process 0"):
            folder.check_shared(config, workdir, 1)


def test_processes_have_the_same_data(tiny, tmp_path, monkeypatch):
    data = tmp_path / "a.txt"
    data.write_text("a b c d e f g h\n" * 100)
    experiment = Experiment(tiny("gpt", {"source": f"text:{data}"}), tmp_path / "run")
    experiment.workdir.mkdir()
    preparation.prepare_folder(experiment, {}, False)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    preparation.check_start(experiment)
    data.write_text("a b c d e f h g\n" * 100)  # has the same facts
    with pytest.raises(ValueError, match=r"a\.txt of process 1 differs from that of process 0"):
        preparation.check_start(experiment)


@pytest.mark.thorough
def test_processes_compare_their_data_code_and_folders(tiny, no_report, tmp_path, monkeypatch):
    texts = defaultdict(list)
    monkeypatch.setattr(distributed, "check_same", lambda what, text: texts[what.partition(":")[0]].append(text))
    for count in (100, 100, 101):
        (tmp_path / "a.txt").write_text("a b c d e f g h\n" * count)
        (tmp_path / "mine.py").write_text(f"count = {count}")
        workdir = tmp_path / f"{len(texts['data'])}"
        changes = {"source": f"text:{tmp_path}/a.txt", "total_steps": 0, "imports": f"{tmp_path}/mine.py"}
        loop.train(tiny("gpt", changes), workdir)
    for name in ("data", "the code of the modules in imports"):
        assert texts[name][0] == texts[name][1] != texts[name][2]
    assert len({*texts["the workdir must be on shared storage"]}) == 3


def test_displayed_command(tmp_path, monkeypatch):
    """Check that it is what the user types: in the checkout, elsewhere, and with the installed program."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["launch.py"])
    command = [*command_line.LAUNCH, "report", "a b"]
    assert command_line.displayed(command) == "lineage report 'a b'"
    (tmp_path / "launch.py").touch()
    assert command_line.displayed(command) == "python launch.py report 'a b'"
    monkeypatch.setattr(sys, "argv", ["/usr/bin/lineage"])
    assert command_line.displayed(command) == "lineage report 'a b'"
    assert command_line.displayed(["tensorboard", "a b"]) == "tensorboard 'a b'"


def test_versions_of_installed_packages():
    assert provenance.versions(["no-such-package", "numpy"]) == {"numpy": np.__version__}


def test_every_key_that_may_change_is_a_key(tiny):
    known = [*schema.describe(tiny("gpt"), {}), *schema.describe(tiny("bert", {"task.name": "question_answering"}), {})]
    for name in folder.MAY_CHANGE:
        # The name is that of a key, or the beginning of several.
        assert name in known or (name.endswith((".", "_")) and any(key.startswith(name) for key in known)), name


def test_keys_missing_in_older_configs_have_their_defaults(tiny, tmp_path):
    folder.keep_config(tiny(), tmp_path)
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    path = tmp_path / "config.json"
    older = json.loads(path.read_text())
    del older["skip_nonfinite"], older["teacher"], older["sampling"]["draft"], older["optimizer"]["b1"]
    older["model"]["dropout"] = 0.5
    path.write_text(json.dumps(older))
    with pytest.raises(ValueError, match=r"\(model.dropout was 0.5, is 0.0; optimizer.b1 was None, is 0.9\)"):
        folder.check_config(tiny(), tmp_path)
    config, _ = cli.load(str(path))
    assert (config.skip_nonfinite, config.teacher, config.optimizer.b1) == (0, "", 0.9)
    assert config.model.dropout == 0.5
    path.write_text(path.read_text()[:-9])
    with pytest.raises(ValueError, match=r"config.json is damaged \(.*\): restore it, or move it away to continue"):
        folder.keep_config(tiny(), tmp_path)
    folder.keep_config(tiny("gpt", {"seed": 1}), tmp_path, force=True)
    folder.check_config(tiny("gpt", {"seed": 1}), tmp_path)


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_text("{}"), None])
def test_config_of_the_checkpoint_is_compared(damage, tiny, tmp_path):
    """Check that a deleted or edited config.json does not let a run continue with another config."""
    folder.keep_config(tiny(), tmp_path)
    for step in (5, 10):
        about = tmp_path / "checkpoints" / str(step) / "about"
        about.mkdir(parents=True)
        record = sealed({"config": folder.plain(tiny("gpt", {"seed": 0 if step == 10 else 3})), "loss": math.nan})
        (about / "metadata").write_text(json.dumps(record))
    other = tiny("gpt", {"schedule.learning_rate": 0.5})
    path = tmp_path / "config.json"
    damage(path) if damage else path.write_text(json.dumps(folder.plain(other)))
    for check in (folder.check_config, folder.keep_config):
        with pytest.raises(ValueError, match=r"another config \(schedule.learning_rate was 0.01, is 0.5\)"):
            check(other, tmp_path)
    folder.keep_config(tiny(), tmp_path)
    assert json.loads(path.read_text()) == folder.plain(tiny())
    (about / "metadata").write_text("")  # the newest record is damaged: that of step 5 counts
    with pytest.raises(ValueError, match=r"another config \(seed was 3, is 0\)"):
        folder.keep_config(tiny(), tmp_path)


def test_damaged_config_of_a_run_without_checkpoints(tiny, tmp_path):
    """Check that the advice of the message works; moving the file away would only lead to another message."""
    for name in ("config.json", "run.json", "tokenizer.json"):
        (tmp_path / name).write_text('{"mod')
    message = r"config.json is damaged \(.*\): restore it, choose another workdir, or --force-config \(in Python, force"
    with pytest.raises(ValueError, match=message):
        folder.discard(tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == '{"mod'
    folder.discard(tmp_path, force=True)
    folder.keep_config(tiny(), tmp_path, force=True)
    assert folder.saved_config(tmp_path) == folder.plain(tiny())


def test_folder_of_another_program_is_left_alone(tiny, tmp_path):
    """Check that a run in the folder of a model of `transformers` neither overwrites nor deletes its files."""
    files = {"config.json": '{"model_type": "gpt2"}', "tokenizer.json": "{}"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"config.json does not belong to a run: choose another workdir"):
        loop.train(tiny(), tmp_path)
    assert {name: (tmp_path / name).read_text() for name in files} == files
    (tmp_path / "config.json").unlink()
    for name in ("tokenizer.json", "data.json", "metrics.jsonl"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(ValueError, match=f"{name} does not belong to a run: choose another workdir"):
            loop.train(tiny(), tmp_path)
        assert (tmp_path / name).read_text() == "{}"
        (tmp_path / name).unlink()
    (tmp_path / "tokenizer.json").touch()
    folder.discard(tmp_path, force=True)
    assert not (tmp_path / "tokenizer.json").exists()


def test_resuming_with_changed_data_raises(tmp_path):
    data = tmp_path / "data"
    (data / "more").mkdir(parents=True)
    for name in ("a.txt", "more/b.txt", "c.txt"):
        (data / name).write_text(f"text {name}")
    places = f"{data}/*.txt", str(data / "more"), "", "train[:9%]", "digits"
    data_record.keep(fingerprint(places[:1]), tmp_path)
    data_record.keep(fingerprint(places), tmp_path)  # nothing was saved yet
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    data_record.keep(fingerprint(places), tmp_path)
    for change in (lambda path: path.write_text("next more/b.txt"), lambda path: path.unlink()):
        change(data / "more" / "b.txt")
        with pytest.raises(
            ValueError, match=r"/more/b.txt changed since the run in .* began \(1 of 3 files\): restore"
        ):
            data_record.keep(fingerprint(places), tmp_path)
    data_record.keep(fingerprint(places), tmp_path, force=True)
    data_record.keep(fingerprint(places), tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    data_record.keep({}, tmp_path, force=True)  # as earlier versions recorded runs on data sets of TFDS
    data_record.keep(fingerprint(places), tmp_path)
    assert f"{data}/a.txt" in folder.read_json(tmp_path / folder.DATA)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer.json changed since"):
        data_record.keep(fingerprint(places), tmp_path)
    assert fingerprint(places, limit=8) == {str(data / name): [10, 0] for name in ("a.txt", "c.txt")}


def test_data_that_change_while_they_are_read_stop_the_run(tiny, tmp_path, monkeypatch):
    """Otherwise the run would be recorded as one on the new data, with which it would then resume."""
    path, workdir = tmp_path / "a.csv", tmp_path / "run"
    path.write_text("input,target\n" + "a,no\nb,yes\n" * 8)
    changes = {"source": f"csv:{path}", "task.name": "conditional_lm", "task.sequence_length": 16}
    monkeypatch.setattr(preparation, "check_examples", lambda data: path.write_text("input,target\na,yes\n"))
    with pytest.raises(ValueError, match=r"a.csv changed while the data were read: start again when they do not"):
        loop.train(tiny("gpt", changes), workdir)
    assert not any((workdir / name).exists() for name in ("tokenizer.json", folder.DATA, "checkpoints"))


def test_moved_fingerprints_do_not_let_a_run_continue_with_other_data(tmp_path):
    """Check that the checksum in the newest checkpoint counts, if it has one, also without data.json."""
    path, data = tmp_path / "data.json", tmp_path / "a.txt"
    about = tmp_path / "checkpoints" / "5" / "about"
    about.mkdir(parents=True)
    data.write_text("text")
    data_record.keep(fingerprint([str(data)]), tmp_path)
    (about / "metadata").write_text(json.dumps(sealed({"data": json.loads(path.read_text())["crc32"]})))
    path.write_text(path.read_text().replace('"crc32": ', '"crc32": 1'))
    with pytest.raises(ValueError, match=r"data.json is damaged \(its checksum does not match\): restore it, or move"):
        data_record.keep(fingerprint([str(data)]), tmp_path)
    path.unlink()
    data_record.keep(fingerprint([str(data)]), tmp_path)
    assert path.exists()
    path.unlink()
    data.write_text("next")
    with pytest.raises(ValueError, match=f"newest checkpoint in {tmp_path} is that of a run on other data: restore"):
        data_record.keep(fingerprint([str(data)]), tmp_path)
    assert not path.exists()
    (about / "metadata").write_text(json.dumps(sealed({})))  # of an earlier version
    data_record.keep(fingerprint([str(data)]), tmp_path)
    path.unlink()
    (about / "metadata").write_text(json.dumps(sealed({"data": 1})))
    data_record.keep(fingerprint([str(data)]), tmp_path, force=True)
    with pytest.raises(ValueError, match=f"newest checkpoint in {tmp_path} is that of a run on other data: restore"):
        data_record.keep(fingerprint([str(data)]), tmp_path)


@pytest.mark.parametrize("name", ["run[1]/a.txt", "one,two.txt", "a*b?.txt"])
def test_paths_with_special_characters_have_fingerprints(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("text")
    assert set(fingerprint([str(path)])) == {str(path)}
    other = tmp_path / "other.txt"
    other.write_text("more")
    if "," not in name:
        assert set(fingerprint([f"{other},{path}"])) == {str(path), str(other)}  # of parallel files


def test_large_files_are_read_in_parts(tmp_path):
    limit, path = 1 << 20, tmp_path / "a"
    content = bytearray(np.random.default_rng(0).bytes(5 << 20))
    path.write_bytes(content)
    seen = {tuple(fingerprint([str(path)], limit)[str(path)])}
    for start, stop in ((0, 1), (len(content) - 1, len(content)), (2 << 20, 3 << 20)):
        changed = bytearray(content)
        changed[start:stop] = bytes(byte ^ 1 for byte in content[start:stop])
        path.write_bytes(changed)
        seen.add(tuple(fingerprint([str(path)], limit)[str(path)]))
    assert len(seen) == 4
    (tmp_path / "b").write_bytes(b"x")
    assert fingerprint([str(tmp_path)], limit)[str(tmp_path / "b")] == [1, zlib.crc32(b"x")]


@pytest.mark.parametrize(("source", "name"), [("stdlib", "json/decoder.py"), ("cldr", "locale-data/de.dat")])
def test_data_of_packages_have_fingerprints(source, name):
    files = fingerprint(schema.build(SOURCES, schema.parse(SOURCES, source)).files())
    size, crc = next(value for file, value in files.items() if file.endswith(name))
    assert size > 1000
    assert crc


def test_files_that_differ_from_those_of_the_run(tmp_path):
    assert not data_record.changed({"a": [1, 2]}, tmp_path)  # there is no record
    data_record.keep({"a": [1, 2], "b": [3, 4]}, tmp_path)
    assert not data_record.changed({"b": [3, 0]}, tmp_path)
    assert data_record.changed({"b": [9, 4], "c": [5, 6]}, tmp_path) == ["b", "c"]


def test_resuming_with_another_tokenizer_or_teacher_raises(tmp_path):
    workdir, teacher = tmp_path / "run", tmp_path / "teacher"
    (workdir / "checkpoints" / "5").mkdir(parents=True)
    (teacher / "checkpoints" / "7" / "about").mkdir(parents=True)
    files = {
        workdir / "tokenizer.json": ('{"a": 0, "b": 1}', '{"a": 1, "b": 0}'),
        teacher / "checkpoints" / "7" / "about" / "metadata": ("sums", "other"),
        teacher / "model.safetensors": ("weights", "w3ights"),
    }
    for path, (content, _) in files.items():
        path.write_text(content)
    (workdir / "config.json").write_text(json.dumps({"teacher": str(teacher)}))
    data_record.keep({}, workdir)
    data_record.keep({}, workdir)
    for path, (content, changed) in files.items():
        path.write_text(changed)
        with pytest.raises(ValueError, match=f"^{path} changed since the run in .* began"):
            data_record.keep({}, workdir)
        assert data_record.changed({}, workdir) == [str(path).removeprefix(f"{workdir}/")]  # for an evaluation
        path.write_text(content)
        assert not data_record.changed({}, workdir)
        data_record.keep({}, workdir)
    (workdir / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=f"^{workdir}/tokenizer.json changed since the run"):
        data_record.keep({}, workdir)


@pytest.mark.parametrize("use", [data_record.check, lambda workdir: data_record.keep({}, workdir)])
def test_large_file_in_place_of_a_tokenizer_is_not_read(use, tmp_path):
    (tmp_path / folder.DATA).write_text(json.dumps({"tokenizer.json": "0"}))
    with (path := tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 31)  # a sparse file
    with pytest.raises(ValueError, match=f"^{path} is not a regular file of at most 268,435,456 bytes"):
        use(tmp_path)
