"""The commands of the command line, with their options and help texts."""

from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

DEFAULT = "vit_digits"  # default experiment
STEPS = ("train", "evaluate", "decode")  # choices of `compile --step`

Option = tuple[str, dict[str, Any]]  # arguments of `ArgumentParser.add_argument`


class Group(NamedTuple):
    """Options shared by several commands, under a heading of the help text."""

    title: str
    description: str | None
    options: Sequence[Option]


@dataclass(frozen=True)
class Command:
    """A command: a summary, examples (command lines without the program) and its options."""

    summary: str
    examples: Sequence[str]
    options: Sequence[Option] = ()
    groups: Sequence[Group] = ()


def count(text: str) -> int:
    """Return an integer of at least 0; raise ValueError for other texts."""
    if (value := int(text)) < 0:
        raise ValueError
    return value


def name_or_path(text: str) -> str:
    """Return a text that is not empty; an empty one, such as an unset variable, would select the default experiment."""
    if not text:
        raise ArgumentTypeError("the value is '': it must be a name or a path")
    return text


def _option(usage: str, text: str, **settings: Any) -> Option:
    """Return an option or a positional argument from its name and the placeholder of its value, if any.

    The placeholders N, I and SECONDS stand for integers from 0 on; CONFIG, RUN and DIR must not be empty.
    """
    name, _, value = usage.partition(" ")
    if value:
        types = dict.fromkeys(("N", "I", "SECONDS"), count) | dict.fromkeys(("CONFIG", "RUN", "DIR"), name_or_path)
        settings |= {"metavar": value} | ({"type": types[value]} if value in types else {})
    elif not settings:
        settings["action"] = "store_true"
    return name, settings | {"help": text}


TRACEBACK = _option("--traceback", "show where in the code an error was raised")
CONFIG = _option("experiment CONFIG", "the same as --config=CONFIG, or the folder of a run", nargs="?")
RUN = _option("run RUN", "folder of the run (the same as --workdir), or NAME for outputs/NAME", nargs="?")
BEST = "checkpoint to use: the latest (default), or the best by the metric in checkpoint.best"
CHECKPOINT = _option("--checkpoint", BEST, choices=("latest", "best"), default="latest")
FOLDERS = (
    _option("folders DIR", "folder of a run, or of several runs", nargs="*"),
    _option("--workdir DIR", "the same as DIR"),
)
EXPERIMENT = Group(
    "experiment",
    "Every key of the config can be set by --config.KEY=VALUE; the command `config` lists the keys.",
    (
        _option(
            "--config CONFIG",
            "name of an experiment or path of a config file, with :ARGUMENT if its get_config() takes one "
            f"(default {DEFAULT}; for a trained model, the config of the run)",
        ),
        _option(
            "--workdir DIR",
            "folder of the run, or a URL such as s3://BUCKET/RUN (default outputs/CONFIG, or "
            "outputs/CONFIG_sweep for a sweep)",
        ),
        _option("--force-config", "use the folder of a run although the config or the data have changed"),
    ),
)
PROCESSES = Group(
    "runs of several processes (on SLURM these are found automatically)",
    None,
    (
        _option("--coordinator HOST:PORT", "address of process 0, or `auto` to detect it from the cluster"),
        _option("--num-processes N", "number of processes"),
        _option("--process I", "index of this process, from 0"),
        _option(
            "--heartbeat SECONDS",
            "declare a process dead after this many seconds without a heartbeat (default 60)",
            default=60,
        ),
    ),
)

COMMANDS = {
    "train": Command(
        "Train a model, or continue an interrupted run.",
        (
            "train",
            "train gpt_stdlib --workdir=outputs/gpt",
            "train outputs/gpt",
            "train gpt_stdlib --config.model.width=256 --config.total_steps=500",
            "train gpt_stdlib --workdir=outputs/gpt --max-restarts=5",
        ),
        (
            CONFIG,
            _option("--profile FIRST:LAST", "write a profile of these steps to DIR/profile, for TensorBoard and xprof"),
            _option("--debug-nans", "stop at the operation that produces the first NaN (slow)"),
            _option(
                "--max-restarts N",
                "restart a failed run up to N times, with increasing delays, unless it fails twice in a row at the "
                "same step",
                default=0,
            ),
        ),
        (EXPERIMENT, PROCESSES),
    ),
    "evaluate": Command(
        "Print the metrics of a trained model on every split.",
        ("evaluate gpt_stdlib", "evaluate outputs/gpt --checkpoint=best"),
        (RUN, CHECKPOINT),
        (EXPERIMENT, PROCESSES),
    ),
    "generate": Command(
        "Generate text with a trained model.",
        (
            'generate outputs/gpt --prompt="import "',
            "generate outputs/gpt --config.sampling.temperature=0.8 --config.sampling.top_k=40",
        ),
        (RUN, _option("--prompt TEXT", "text to continue (default: the config's sampling.prompt)"), CHECKPOINT),
        (EXPERIMENT, PROCESSES),
    ),
    "predict": Command(
        "Apply a trained model to inputs and write its predictions.",
        (
            "predict outputs/vit --inputs=photos --output=photos.jsonl",
            "predict outputs/bert --inputs=reviews.csv --columns=review --output=classes.jsonl",
            "predict outputs/bert --inputs=dev-v2.0.json --output=answers.json --config.task.no_answer_threshold=1.5",
            "predict outputs/mt --inputs=text.txt --output=out.jsonl --config.sampling.num_beams=4 "
            "--config.sampling.temperature=0",
            "predict outputs/detr --inputs=instances.json,val2017 --output=objects.json --batch-size=64",
            "predict outputs/vit --inputs=photos --output=photos.npz --features",
            "predict outputs/vit --split=test",
            "predict --model=bert-reviews --task=text_classification --inputs=reviews.csv --columns=review",
        ),
        (
            RUN,
            _option("--model DIR", "folder in the layout of transformers instead of a run; requires --task"),
            _option("--task NAME", "task of --model, such as text_classification"),
            _option(
                "--inputs INPUTS",
                "texts: a .txt (one per line), .jsonl, .csv, .tsv or .parquet; words: also a .conllu; questions: also "
                "a .json of SQuAD; images: a file, a folder, a .txt of paths, or a .json of COCO and, after a comma, "
                "its folder; or a source, NAME:PATH as in --config.source (default: the source of the run)",
            ),
            _option("--split SPLIT", "split of a source that has several", default=""),
            _option("--columns NAMES", "comma-separated columns or object keys (two for pairs of texts)"),
            _option(
                "--output FILE",
                "a .jsonl with an object per input (the same command continues it if interrupted); a .json in the "
                "format of SQuAD or COCO; a .npz or .parquet of features (default: print the objects)",
            ),
            _option("--batch-size N", "number of inputs in a batch (default: loader.evaluation_batch_size)"),
            _option("--features", "write the feature vectors of an encoder or an image model instead"),
            _option("--skip-bad N", "accept up to N inputs that cannot be used, with an `error` for each", default=0),
            CHECKPOINT,
        ),
        (EXPERIMENT, PROCESSES),
    ),
    "prepare": Command(
        "Train the tokenizer of an experiment and encode its documents into task.cache_dir before its runs.",
        ("prepare gpt2_openwebtext --workers=16",),
        (CONFIG, _option("--workers N", "number of encoding processes (default: number of cores)", default=0)),
        (EXPERIMENT,),
    ),
    "describe": Command(
        "Print the parameters, FLOPs and memory of an experiment, and the accelerators on which it fits.",
        ("describe gpt2_openwebtext", "describe gpt2_openwebtext --config.mesh.data=2 --config.mesh.fsdp=4"),
        (CONFIG, _option("--parameters", "print a table of all parameters and their initial statistics")),
        (EXPERIMENT,),
    ),
    "compile": Command(
        "Compile a step for TPUs or GPUs, present or not, and print its memory, estimated time and communication.",
        (
            "compile gpt2_openwebtext --target=v5e:2x2/1 --config.loader.batch_size=8",
            "compile gpt2_openwebtext --target=h100x8 --step=decode --config.sampling.num_samples=8",
        ),
        (
            CONFIG,
            _option(
                "--target TARGET",
                "a TPU slice such as v4:2x2x1, v5e:4x4, v5p:2x2x1 or v6e:2x4 (v5e:2x2/1: one chip of it), or GPUs: "
                "h100x8, h200x1 or b200x8",
                required=True,
            ),
            _option("--step", "step to compile (default train)", choices=STEPS, default="train"),
            _option("--json", "print the figures as JSON, in bytes and seconds"),
        ),
        (EXPERIMENT,),
    ),
    "export": Command(
        "Export a trained model.",
        ("export outputs/gpt", "export outputs/gpt --format=stablehlo --output=exported"),
        (
            RUN,
            CHECKPOINT,
            _option(
                "--format",
                "safetensors (default): a folder for transformers; stablehlo: a program that needs only JAX",
                choices=("safetensors", "stablehlo"),
                default="safetensors",
            ),
            _option(
                "--output DIR", "folder to write: new, empty, or an earlier export of the run (default WORKDIR/export)"
            ),
        ),
        (EXPERIMENT,),
    ),
    "report": Command(
        "Write the report of a run, or a comparison of several runs.",
        ("report outputs/gpt", "report outputs/gpt outputs/wide", "report outputs"),
        FOLDERS,
    ),
    "verify": Command(
        "Check every file of a run, or of all runs below a folder; the exit code is 1 if one is damaged.",
        ("verify outputs/gpt", "verify outputs --json", "verify s3://bucket/gpt"),
        (*FOLDERS, _option("--json", "print a list of objects with the keys path, sound and problem")),
    ),
    "watch": Command(
        "Show the progress of the runs in the given folders until all have ended.",
        ("watch outputs/positions", "watch outputs/positions outputs/gpt"),
        FOLDERS,
    ),
    "sweep": Command(
        "Train every run of a config's sweep(), or search with Optuna.",
        (
            "sweep --config=vit_digits --parallel=2 --workdir=outputs/positions",
            "sweep --config=gpt_stdlib --optuna --workdir=outputs/gpt_search",
        ),
        (
            _option("--optuna", "let Optuna choose the values from the config's search()"),
            _option("--trials N", "total number of Optuna runs (default: as in search())"),
            _option("--parallel N", "number of concurrent runs (default 1)", default=1),
        ),
        (EXPERIMENT,),
    ),
    "slurm": Command(
        "Submit a run or a sweep to a SLURM cluster, print its status or cancel it.",
        (
            "slurm submit --config=gpt2_openwebtext --workdir=/shared/run --config.cluster.gpus_per_node=8",
            "slurm submit --sweep --config=vit_digits --workdir=/shared/positions",
            "slurm status --sweep --config=vit_digits --workdir=/shared/positions",
            "slurm cancel --workdir=/shared/positions",
        ),
        (
            _option(
                "action",
                "submit the jobs, print their states, or cancel them (running jobs save first)",
                choices=("submit", "status", "cancel"),
            ),
            _option("--sweep", "submit a job for each run of the config's sweep()"),
        ),
        (EXPERIMENT,),
    ),
    "score": Command(
        "Compute a metric of predictions against references.",
        (
            "score --metric=bleu --predictions=out.txt --references=a.txt --references=b.txt",
            "score --metric=tagging --predictions=out.jsonl --references=true.jsonl --option=scheme=IOB2",
            "score --metric=perplexity --model=outputs/gpt_stdlib --predictions=texts.jsonl",
        ),
        (
            _option("--metric NAME", "metric to compute, such as bleu, rouge, coco, squad or perplexity"),
            _option("--model FOLDER", "run or folder of the model that a metric such as perplexity or bert_score uses"),
            _option("--predictions FILE", "a text file with one text per line, a .jsonl, or a .json of COCO or SQuAD"),
            _option(
                "--references FILE",
                "a file as for --predictions, a .csv, bio:FILE or a folder of images; repeat for several references",
                action="append",
                default=[],
            ),
            _option("--option NAME=VALUE", "option of the metric; repeat for several", action="append", default=[]),
            _option("--output FILE", "file to write (default PREDICTIONS.METRIC.json)"),
        ),
    ),
    "harness": Command(
        "Evaluate a causal language model on tasks of the LM evaluation harness.",
        (
            "harness --model=outputs/gpt_stdlib --tasks=lambada_openai,piqa --output=scores.json",
            "harness --model=gpt2 --tasks=own --include-path=tasks",
        ),
        (
            _option("--model FOLDER", "run, or folder in the layout of transformers"),
            _option("--tasks NAMES", "comma-separated names of tasks"),
            _option("--include-path FOLDER", "folder with the .yaml files of more tasks"),
            _option("--num-fewshot N", "number of solved examples before each question"),
            _option("--limit N", "number of examples per task (default all)"),
            _option("--output FILE", "JSON file to write with the scores, the versions and the settings"),
        ),
    ),
    "list": Command(
        "List the experiments that come with the project, or the parts that a config can choose.",
        ("list", "list sources", "list models"),
        (
            _option(
                "parts PARTS",
                "sources, tokenizers, tasks, models, adapters, optimizers, schedules or evaluators",
                nargs="?",
            ),
        ),
    ),
    "config": Command(
        "Print every key of a config with its value, type and documentation.",
        ("config", "config gpt_stdlib optimizer", "config gpt_stdlib --config.model.name=llama"),
        (CONFIG, _option("section SECTION", "print only the keys of a section, such as model", nargs="?")),
        (EXPERIMENT,),
    ),
}
