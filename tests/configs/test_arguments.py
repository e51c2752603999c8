"""Help and overrides of the command line, and the commands `list` and `config`."""

import io
import re
import subprocess
import sys

import pytest

from lineage import launch
from lineage.configs import base, cli, schema
from lineage.configs.arguments import parse
from lineage.configs.commands import COMMANDS
from lineage.data import SOURCES
from lineage.models import MODELS


def test_every_command_has_a_handler_help_and_an_example(capsys):
    assert {f"run_{name}" for name in COMMANDS} == {name for name in vars(launch) if name.startswith("run_")}
    for name in COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            launch.main([name, "--help"])
        output = capsys.readouterr().out
        assert COMMANDS[name].summary in output
        for example in COMMANDS[name].examples:
            assert f" {example}\n" in output
            parse([part.strip('"') for part in re.findall(r'(?:[^ "]|"[^"]*")+', example)], "lineage")
    with pytest.raises(SystemExit, match="0"):
        launch.main(["--help"])
    output = capsys.readouterr().out
    assert all(f"  {name} " in output for name in COMMANDS)


def test_parse_separates_options_and_overrides():
    options, changes = parse(["--config=a", "--config.b.c=1", "--config.d", "-1", "--workdir", "w"], "lineage")
    assert (options.command, options.config, options.workdir) == ("train", "a", "w")
    assert changes == {"b.c": "1", "d": "-1"}
    assert parse(["train", "--config.a=--x=y"], "lineage")[1] == {"a": "--x=y"}
    assert parse([], "lineage")[0].command == "train"


@pytest.mark.parametrize(
    ("arguments", "workdir", "named"),
    [
        ("train gpt_stdlib", "outputs/gpt_stdlib", "gpt_stdlib"),
        ("train --debug-nans gpt_stdlib --workdir=w", "w", "gpt_stdlib"),
        ("train {run}", "{run}", "{run}"),
        ("train {run} --workdir=w", "w", "{run}"),
        ("evaluate gpt_stdlib", "outputs/gpt_stdlib", None),
        ("evaluate bert_glue:cola", "outputs/bert_glue_cola", None),
        ("evaluate {run} --config=gpt_stdlib", "{run}", "gpt_stdlib"),
        ("generate --prompt text {run}", "{run}", None),
        ("export absent/run", "absent/run", None),
        ("export s3://bucket/run", "s3://bucket/run", None),
        ("predict gpt_stdlib", "outputs/gpt_stdlib", None),
    ],
)
def test_experiments_and_runs_as_positional_arguments(arguments, workdir, named, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    options, actual = launch.parsed(arguments.format(run=run).split())
    assert (actual, options.named) == (workdir.format(run=run), named and named.format(run=run))


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", ""],
        ["train", "--config="],
        ["evaluate", ""],
        ["predict", "--model="],
        ["verify", "a", ""],
        ["--workdir="],
    ],
)
def test_empty_names_do_not_select_the_default_experiment(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(arguments, "lineage")
    assert "the value is '': it must be a name or a path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("export a --workdir=b", "RUN is 'a' and --workdir is 'b': give only one of them."),
        ("predict a --workdir=b", "RUN is 'a' and --workdir is 'b': give only one of them."),
        ("predict a --model=b --task=masked_lm", "--model and RUN are given: give only the model to use."),
        ("predict --workdir=a --model=b --task=masked_lm", "--model and --workdir are given: give only the model"),
        ("predict --config=gpt_stdlib --model=b", "--model and --config are given: give only the model to use."),
        ("predict a --task=masked_lm", "--task is only for --model: the task of a run is known."),
        ("train a --config=b", "the experiments 'a' and --config='b' are given: give only one of them."),
        ("describe a --config=b --workdir=c", "the experiments 'a' and --config='b' are given: give only one of them."),
        ("export a --config.weights=int8", "--config.weights has no effect on an export, which has the trained param"),
    ],
)
def test_arguments_without_effect_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(arguments.split(), "lineage")
    assert message in capsys.readouterr().err


def test_home_folder_in_values(monkeypatch):
    """Check the paths whose "~" shells leave as it is; in other places it is part of a name or of a text."""
    monkeypatch.setenv("HOME", "/home/me")
    given = ["--workdir=~/run", "--config.source=text:~/texts", "--config.init.path=a~/b", "--config.label_key=~x"]
    options, changes = parse(["train", *given], "lineage")
    assert options.workdir == "/home/me/run"
    assert changes == {"source": "text:/home/me/texts", "init.path": "a~/b", "label_key": "~x"}


def test_list_shows_every_experiment_with_a_summary(capsys):
    assert launch.main(["list"]) == 0
    small, paper = capsys.readouterr().out.split("\npaper:\n")
    for name, path in cli.experiments().items():
        group = small if path.parent.name == "small" else paper
        assert re.search(rf"^  {name} +{re.escape(cli.summary(path))}$", group, re.MULTILINE)
        assert cli.summary(path)
    assert all(len(line) <= 120 for line in [*small.splitlines(), *paper.splitlines()])


def test_list_shows_the_parts_of_configs(capsys):
    assert launch.main(["list", "sources"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(SOURCES)
    assert "text      UTF-8 text files; each file is a document." in lines
    assert all(len(line) <= 132 for line in lines)
    assert launch.main(["list", "evaluators"]) == 0
    assert "\ntagging " in capsys.readouterr().out
    assert launch.main(["list", "source"]) == 1
    assert "unknown kind of parts 'source': it must be one of sources, tokenizers, tasks," in capsys.readouterr().err


def test_config_shows_every_key(capsys):
    assert launch.main(["config", "vit_digits", "--config.seed=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    config, _ = cli.load("vit_digits")
    shown = [line.split(" = ")[0] for line in lines if not line.startswith(" ")]
    assert shown == list(schema.describe(config, {}))
    assert "seed = 3  [int, 0 or more, default 0]" in lines
    assert "model.position = '1d'  ['none' | '1d' | '2d' | 'relative' | 'sincos2d' | 'mae']" in lines
    assert "model.patch_size = 2  [int, 1 or more, default 16]" in lines
    documented = schema.documentation(base.classes(config)["model"])["pooling"].split()[:4]
    assert "    " + " ".join(documented) in "\n".join(lines)
    for arguments in (["config", "vit_digits", "mesh"], ["config", "mesh", "--config=vit_digits"]):
        assert launch.main(arguments) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
        assert [line.split(" = ")[0] for line in lines] == ["mesh.context", "mesh.data", "mesh.fsdp", "mesh.tensor"]
    assert launch.main(["config", "vit_digits", "mash"]) == 1
    assert "the config has no section 'mash': its sections are " in capsys.readouterr().err


def test_reports_are_written_without_jax(tmp_path):
    (tmp_path / "config.json").write_text('{"model": {}, "task": {}}')
    code = "import sys; from lineage import launch; launch.main(['report', sys.argv[1]]); print('jax' in sys.modules)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True).stdout.split() == [
        f"{tmp_path}/report.html",
        "False",
    ]


def test_output_is_utf8_in_other_locales(monkeypatch):
    """Check that a redirected output, such as predictions in JSON, is UTF-8, as files are."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    assert launch.main(["list", "models"]) == 0
    print("é", "\udcff")
    sys.stdout.flush()
    assert sys.stdout.buffer.getvalue().endswith(b"\xc3\xa9 \\udcff\n")


@pytest.mark.parametrize("argument", ["", "a", "a:b"])
def test_colons_in_the_path_of_a_config(argument, tmp_path):
    """Check the folder and the config of a run, such as one named after a time, and a file with an argument."""
    run = tmp_path / "12:30" / "run 1:2"
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    (tmp_path / "12:30" / "x.py").write_text("")
    for path in (run, run / "config.json"):
        assert cli.find(str(path)) == (str(run / "config.json"), "")
    file = str(tmp_path / "12:30" / "x.py")
    assert cli.find(f"{file}:{argument}") == (file, argument)
    assert cli.find(f"bert_glue:{tmp_path}")[1] == str(tmp_path)


def test_a_module_beside_a_config_is_named(tmp_path):
    (tmp_path / "no_package.py").touch()
    (tmp_path / "own.py").write_text("import math\n\nimport no_package\n")
    advice = f"to import {tmp_path}/no_package.py, set PYTHONPATH={tmp_path}."
    with pytest.raises(ValueError, match=re.escape(f"own.py, line 3: No module named 'no_package'; {advice}")):
        cli.load(str(tmp_path / "own.py"))


@pytest.mark.parametrize("used", [True, False], ids=["used", "for a sweep"])
def test_a_config_that_imports_a_module_with_its_model_is_recorded(used, tmp_path, monkeypatch):
    """Check that the run names the config, so that other commands import the module again."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"beside_{used}".lower()
    (tmp_path / f"{name}.py").write_text(
        "from lineage.models import MODELS\nfrom lineage.models.vit import ViT\n\n\n"
        f'@MODELS.register("{name}")\nclass Own(ViT):\n    """A ViT."""\n'
    )
    (tmp_path / "own.py").write_text(
        f"import {name}\nfrom lineage.configs import base\n"
        f"def get_config():\n    return base.get_config('{name if used else 'vit'}')\n"
    )
    for _ in range(2):  # the second time, Python does not execute the module again
        assert cli.load(str(tmp_path / "own.py"))[0].imports == (str(tmp_path / "own.py"),)
    (tmp_path / "other.py").write_text("from lineage.configs.base import get_config\n")
    assert cli.load(str(tmp_path / "other.py"))[0].imports == ()
    del MODELS[name]
