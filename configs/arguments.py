"""The parser of the command line: commands with their options, and overrides of the config."""

import argparse
import os
import re
from collections.abc import Sequence
from typing import NoReturn

from lineage.configs.commands import COMMANDS, EXPERIMENT, TRACEBACK
from lineage.configs.registry import did_you_mean

HOME = re.compile(r"^(--[\w.-]+=(?:\w+:)?)~(?=/|$)")  # shells do not expand ~ after "="


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith((".", "?")) else "."
        self.exit(2, f"error: {message}{end} (`{self.prog} --help` explains the arguments.)\n")


def parse(arguments: Sequence[str], program: str) -> tuple[argparse.Namespace, dict[str, str]]:
    """Return the options of a command line (by default of `train`) and the config overrides: dotted key -> text.

    Raises:
        SystemExit: an argument is wrong (exit code 2), or help was requested (0).
    """
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments = ["train", *arguments]
    name, *rest = (HOME.sub(lambda match: f"{match[1]}{_home()}", argument) for argument in arguments)
    if name not in COMMANDS:
        root = _root(program)
        root.parse_args([name] if name.startswith("-") else [])
        root.error(f"unknown command {name!r}{did_you_mean(name, COMMANDS) or ': use one of ' + ', '.join(COMMANDS)}")
    parser = _parser(name, program)
    remaining, changes = _overrides(name, rest, parser)
    options, unknown = parser.parse_known_args(remaining)
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        hint = did_you_mean(unknown[0].partition("=")[0], known)
        if EXPERIMENT in COMMANDS[name].groups and not unknown[0].startswith("-"):
            hint = ": use --config for an experiment, --workdir for the folder of a run"
        parser.error(f"unknown argument {unknown[0]!r}{hint}")
    _check_ignored(name, options, changes, parser)
    options.command = name
    return options, changes


def _check_ignored(name: str, options: argparse.Namespace, changes: dict[str, str], parser: Parser) -> None:
    """Refuse arguments that would be ignored: a second model or experiment, the task of a run, weights of an export."""
    if name == "export" and "weights" in changes:
        parser.error("--config.weights has no effect on an export, which has the trained parameters")
    given = {name: value for name, value in vars(options).items() if value is not None}
    if {"run", "workdir"} <= given.keys():
        parser.error(f"RUN is {options.run!r} and --workdir is {options.workdir!r}: give only one of them")
    is_section = "section" in vars(options) and "section" not in given  # config --config=NAME SECTION
    if {"experiment", "config"} <= given.keys() and not is_section:
        names = f"{options.experiment!r} and --config={options.config!r}"
        parser.error(f"the experiments {names} are given: give only one of them")
    flags = {"run": "RUN", "workdir": "--workdir", "config": "--config"}
    others = [flag for name, flag in flags.items() if name in given]
    if "model" in given and others:
        parser.error(f"--model and {others[0]} are given: give only the model to use")
    if "task" in given and "model" not in given:
        parser.error("--task is only for --model: the task of a run is known")


def _home() -> str:
    """Return the home folder of the user; raise FileNotFoundError if there is none, as for some users in containers."""
    if (path := os.path.expanduser("~")) == "~":
        raise FileNotFoundError("~ stands for the home folder, which this user does not have: write the whole path.")
    return path


def _overrides(command: str, arguments: Sequence[str], parser: Parser) -> tuple[list[str], dict[str, str]]:
    """Separate `--config.KEY=VALUE` and `--config.KEY VALUE` from the other arguments."""
    remaining, changes = [], {}
    iterator = iter(arguments)
    for argument in iterator:
        if not argument.startswith("--config."):
            remaining.append(argument)
            continue
        key, equals, value = argument.removeprefix("--config.").partition("=")
        if not equals:
            value = next(iterator, "--")
            if value.startswith("--"):
                parser.error(f"--config.{key} has no value: write --config.{key}=VALUE")
        if EXPERIMENT not in COMMANDS[command].groups:
            parser.error(f"--config.{key} is not an argument of {command}, which reads no config")
        changes[key] = value
    return remaining, changes


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
    parser = Parser(
        f"{program} {name}",
        description=command.summary,
        epilog="\n".join(["examples:", *(f"  {program} {example}" for example in command.examples)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for flag, settings in (*command.options, TRACEBACK):
        parser.add_argument(flag, **settings)
    for title, description, options in command.groups:
        group = parser.add_argument_group(title, description)
        for flag, settings in options:
            group.add_argument(flag, **settings)
    return parser
