"""The arguments of the command line: a parser for each command, and the overrides of the config."""

import argparse
import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

DEFAULT = "vit_digits"  # the experiment when none is given


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith((".", "?")) else "."
        self.exit(2, f"error: {message}{end} (`{self.prog} --help` explains the arguments.)\n")


def parse(arguments: Sequence[str], program: str) -> tuple[argparse.Namespace, dict[str, str]]:
    """Parse a command line.

    Args:
        arguments: of the command line; without a command they are those of `train`.
        program: name of the program in help texts, such as "lineage".

    Returns:
        The options, with the name of the command as `command`, and the overrides of the config: texts by dotted key.

    Raises:
        SystemExit: an argument is wrong (exit code 2), or help was asked for (0).
    """
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments = ["train", *arguments]
    name, *rest = arguments
    if name not in COMMANDS:
        root = _root(program)
        root.parse_args([name] if name.startswith("-") else [])
        root.error(f"unknown command {name!r}{_nearest(name, COMMANDS) or ': use one of ' + ', '.join(COMMANDS)}")
    parser = _parser(name, program)
    own, changes = _overrides(rest, parser)
    options, unknown = parser.parse_known_args(own)
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        parser.error(f"unknown argument {unknown[0]!r}{_nearest(unknown[0].partition('=')[0], known)}")
    options.command = name
    return options, changes


def _overrides(arguments: Sequence[str], parser: Parser) -> tuple[list[str], dict[str, str]]:
    """Separate `--config.KEY=VALUE` and `--config.KEY VALUE` from the other arguments."""
    own, changes = [], {}
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("--config."):
            own.append(argument)
            continue
        key, equals, value = argument.removeprefix("--config.").partition("=")
        if not equals:
            value = next(rest, "--")
            if value.startswith("--"):
                parser.error(f"--config.{key} has no value: write --config.{key}=VALUE")
        if _experiment not in COMMANDS[parser.get_default("command")].options:
            parser.error(f"--config.{key} is not an argument of {parser.get_default('command')}, which reads no config")
        changes[key] = value
    return own, changes


def _nearest(name: str, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {nearest[0]!r}?" if nearest else ""


def _root(program: str) -> Parser:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items())
    return Parser(
        program,
        usage=f"{program} [COMMAND] [ARGUMENTS]",
        description="Train and use the Transformer and its family.",
        epilog=f"commands (train, if none is given):\n{commands}\n\n`{program} COMMAND --help` explains a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _parser(name: str, program: str) -> Parser:
    command = COMMANDS[name]
    examples = "\n".join(f"  {program} {example}" for example in command.examples)
    parser = Parser(
        f"{program} {name}",
        description=command.summary,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[parent() for parent in (*command.options, _common)],
        allow_abbrev=False,
    )
    parser.set_defaults(command=name)
    return parser


def _common() -> Parser:
    parent = Parser(add_help=False)
    parent.add_argument("--traceback", action="store_true", help="show where in the code an error was raised")
    return parent


def _experiment() -> Parser:
    parent = Parser(add_help=False)
    group = parent.add_argument_group(
        "experiment",
        "Every key of the config can be set by --config.KEY=VALUE; the command `config` lists the keys.",
    )
    group.add_argument(
        "--config",
        metavar="CONFIG",
        help="name of an experiment or path of a config file, with :ARGUMENT if its get_config() takes one "
        f"(default {DEFAULT}; for a trained model the config of the run)",
    )
    group.add_argument("--workdir", metavar="DIR", help="folder of the run (default outputs/NAME_OF_THE_CONFIG)")
    group.add_argument(
        "--force-config", action="store_true", help="accept a folder that holds a run with another config or other data"
    )
    return parent


def _processes() -> Parser:
    parent = Parser(add_help=False)
    group = parent.add_argument_group("runs of several processes (on SLURM these are found automatically)")
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="address of process 0, or `auto` where the cluster tells it"
    )
    group.add_argument("--num-processes", type=int, metavar="N", help="number of processes")
    group.add_argument("--process", type=int, metavar="I", help="index of this process, from 0")
    group.add_argument(
        "--heartbeat",
        type=int,
        default=60,
        metavar="SECONDS",
        help="declare a process dead after this many seconds without a heartbeat (default 60)",
    )
    return parent


def _checkpoint() -> Parser:
    parent = Parser(add_help=False)
    parent.add_argument(
        "--checkpoint",
        choices=("latest", "best"),
        default="latest",
        help="checkpoint to use (default latest; best: by the config's checkpoint.best)",
    )
    return parent


def _generate() -> Parser:
    parent = Parser(add_help=False)
    parent.add_argument("--prompt", metavar="TEXT", help="text to continue (default: the config's sampling.prompt)")
    return parent


def _positional_config() -> Parser:
    parent = Parser(add_help=False)
    parent.add_argument("experiment", nargs="?", metavar="CONFIG", help="the same as --config=CONFIG")
    return parent


def _section() -> Parser:
    parent = Parser(add_help=False)
    parent.add_argument("section", nargs="?", metavar="SECTION", help="print only the keys of a section, such as model")
    return parent


def _export() -> Parser:
    parent = Parser(add_help=False)
    parent.add_argument(
        "--format",
        choices=("safetensors", "stablehlo"),
        default="safetensors",
        help="safetensors: a folder for Hugging Face transformers (default); stablehlo: a program without this code",
    )
    parent.add_argument("--output", metavar="DIR", help="folder to write (default WORKDIR/export)")
    return parent


def _folders() -> Parser:
    parent = Parser(add_help=False)
    parent.add_argument("folders", nargs="*", metavar="DIR", help="folder of a run, or of several runs")
    parent.add_argument("--workdir", metavar="DIR", help="the same as DIR")
    return parent


def _sweep() -> Parser:
    parent = Parser(add_help=False)
    parent.add_argument("--optuna", action="store_true", help="let Optuna choose the values, by the config's search()")
    parent.add_argument("--parallel", type=int, default=1, metavar="N", help="number of runs at a time (default 1)")
    return parent


def _slurm() -> Parser:
    parent = Parser(add_help=False)
    parent.add_argument(
        "action",
        choices=("submit", "status", "cancel"),
        help="submit the jobs, print their states, or cancel them (running jobs save first)",
    )
    parent.add_argument("--sweep", action="store_true", help="a job for each run of the config's sweep()")
    return parent


def _score() -> Parser:
    parent = Parser(add_help=False)
    parent.add_argument("--metric", metavar="NAME", help="metric to compute, such as bleu, rouge, coco or squad")
    parent.add_argument("--predictions", metavar="FILE", help="one text a line, .jsonl, or a .json of COCO or SQuAD")
    parent.add_argument(
        "--references", metavar="FILE", action="append", default=[], help="file of references; may be repeated"
    )
    parent.add_argument(
        "--option", metavar="NAME=VALUE", action="append", default=[], help="option of the metric; may be repeated"
    )
    parent.add_argument("--output", metavar="FILE", help="file to write (default PREDICTIONS.METRIC.json)")
    return parent


@dataclass(frozen=True)
class Command:
    """A command of the command line.

    Attributes:
        summary: one sentence, for the help texts.
        options: functions that return a parser with some of its arguments.
        examples: command lines without the program.
    """

    summary: str
    options: Sequence[Callable[[], Parser]]
    examples: Sequence[str]


COMMANDS = {
    "train": Command(
        "Train a model, or continue an interrupted run.",
        (_experiment, _processes),
        (
            "train",
            "train --config=gpt_stdlib --workdir=outputs/gpt",
            "train --config=gpt_stdlib --config.model.width=256 --config.total_steps=500",
        ),
    ),
    "evaluate": Command(
        "Print the metrics of a trained model on every split.",
        (_experiment, _checkpoint, _processes),
        ("evaluate --workdir=outputs/gpt", "evaluate --workdir=outputs/gpt --checkpoint=best"),
    ),
    "generate": Command(
        "Generate text with a trained model.",
        (_experiment, _generate, _checkpoint, _processes),
        (
            'generate --workdir=outputs/gpt --prompt="import "',
            "generate --workdir=outputs/gpt --config.sampling.temperature=0.8 --config.sampling.top_k=40",
        ),
    ),
    "describe": Command(
        "Print parameters, FLOPs, memory and accelerators that fit, without training.",
        (_positional_config, _experiment),
        ("describe gpt2_openwebtext", "describe gpt2_openwebtext --config.mesh.data=2 --config.mesh.fsdp=4"),
    ),
    "export": Command(
        "Export a trained model.",
        (_experiment, _checkpoint, _export),
        ("export --workdir=outputs/gpt", "export --workdir=outputs/gpt --format=stablehlo --output=gpt.stablehlo"),
    ),
    "report": Command(
        "Write the report of a run, or a page that compares several runs.",
        (_folders,),
        ("report outputs/gpt", "report outputs/gpt outputs/wide", "report outputs"),
    ),
    "watch": Command(
        "Show the progress of the runs in some folders until all have ended.",
        (_folders,),
        ("watch outputs/positions", "watch outputs/positions outputs/gpt"),
    ),
    "sweep": Command(
        "Train every run of a config's sweep(), or search with Optuna.",
        (_experiment, _sweep),
        (
            "sweep --config=vit_digits --parallel=2 --workdir=outputs/positions",
            "sweep --config=gpt_stdlib --optuna --workdir=outputs/gpt_search",
        ),
    ),
    "slurm": Command(
        "Submit a run or a sweep to a SLURM cluster, follow it or cancel it.",
        (_slurm, _experiment),
        (
            "slurm submit --config=gpt2_openwebtext --workdir=/shared/run --config.cluster.gpus_per_node=8",
            "slurm submit --sweep --config=vit_digits --workdir=/shared/positions",
            "slurm status --sweep --config=vit_digits --workdir=/shared/positions",
            "slurm cancel --workdir=/shared/positions",
        ),
    ),
    "score": Command(
        "Compute a metric of a file of predictions against files of references.",
        (_score,),
        (
            "score --metric=bleu --predictions=out.txt --references=a.txt --references=b.txt",
            "score --metric=tagging --predictions=out.jsonl --references=true.jsonl --option=scheme=IOB2",
        ),
    ),
    "list": Command("List the experiments that come with the project.", (), ("list",)),
    "config": Command(
        "Print every key of a config with its value, type and documentation.",
        (_positional_config, _section, _experiment),
        ("config", "config gpt_stdlib optimizer", "config gpt_stdlib --config.model.name=llama"),
    ),
}
