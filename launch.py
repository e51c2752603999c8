"""The command line: train, evaluate, generate, describe, report, watch, score, export and sweep.

python launch.py                                      trains a Vision Transformer on handwritten digits
python launch.py --config=gpt_stdlib       trains what the config says
  --workdir=outputs/gpt --config.optimizer.learning_rate=1e-3
python launch.py --mode=generate --workdir=outputs/gpt   writes with a trained model
python launch.py --sweep --parallel=2                 trains each of the config's sweep(), two at once
python launch.py --mode=watch --workdir=runs          follows the runs of a folder, or of several
python launch.py --mode=score --metric=bleu           scores a file of texts beside others
  --predictions=FILE --references=FILE --option=lowercase=true
"""

import argparse
import contextlib
import ctypes
import json
import logging
import os
import shlex
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from lineage.configs import cli

DEFAULT = "vit_digits"
MODES = ("train", "evaluate", "generate", "describe", "report", "watch", "score", "export")


def main(arguments: list[str]) -> int:
    """Runs the command line; returns the exit code."""
    options, changes = parse(arguments)
    try:
        with processes(options):
            return run(options, changes, arguments)
    except (ValueError, OSError, ArithmeticError, MemoryError, ModuleNotFoundError) as error:
        message = str(error) if str(error) else type(error).__name__
        print(f"\nerror: {message}", file=sys.stderr)
        if options.traceback:
            traceback.print_exc()
        else:
            print("(--traceback shows where it happened)", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def parse(arguments: list[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """The options, and the overrides of the config: `--config.a.b=value` or `--config.a.b value`."""
    parser = argparse.ArgumentParser(
        "launch.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", metavar="FILE", help=f"a config file, FILE:ARGUMENT for a variant ({DEFAULT})")
    parser.add_argument(
        "--workdir", metavar="DIR", help="what the run leaves goes there (outputs/<name of the config>)"
    )
    parser.add_argument("--mode", choices=MODES, default="train")
    parser.add_argument(
        "more", nargs="*", metavar="DIR", help="folders that --mode=watch follows or --mode=report compares"
    )
    parser.add_argument(
        "--sweep",
        nargs="?",
        const="all",
        choices=("all", "optuna"),
        help="run each of the config's sweep(), or let Optuna choose from its search()",
    )
    parser.add_argument(
        "--cluster",
        choices=("slurm", "status", "cancel"),
        help="submit the run, or the sweep's; how jobs are; end them",
    )
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="runs of a sweep at the same time (1)")
    parser.add_argument("--prompt", help="what --mode=generate goes on from (the config's)")
    parser.add_argument("--checkpoint", choices=("latest", "best"), default="latest", help="what is evaluated")
    parser.add_argument("--metric", help="what --mode=score computes")
    parser.add_argument("--predictions", metavar="FILE", help="texts, one a line, .jsonl, or COCO's .json")
    parser.add_argument("--references", metavar="FILE", action="append", default=[], help="once or more often")
    parser.add_argument("--option", metavar="NAME=VALUE", action="append", default=[], help="of the metric")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="where scores go (PREDICTIONS.METRIC.json), or what is exported (WORKDIR/export)",
    )
    parser.add_argument("--format", default="safetensors", help="what --mode=export writes, or stablehlo")
    parser.add_argument("--force-config", action="store_true", help="go on in a workdir of another config")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, where a run has several; or auto")
    parser.add_argument("--num-processes", type=int, metavar="N", help="of the run")
    parser.add_argument("--process", type=int, metavar="I", help="the number of this one, from 0")
    parser.add_argument("--heartbeat", type=int, default=60, metavar="SECONDS", help="of silence: a process is lost")
    parser.add_argument("--traceback", action="store_true", help="show where an error happened")
    own, changes = [], {}
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("--config."):
            own.append(argument)
            continue
        key, equals, value = argument.removeprefix("--config.").partition("=")
        changes[key] = value if equals else next(rest, "")
    options = parser.parse_args(own)
    if options.more and options.mode not in ("watch", "report"):
        parser.error(f"unrecognized arguments: {shlex.join(options.more)}")
    if (options.sweep or options.cluster) and options.mode != "train":
        parser.error(f"--mode={options.mode} is of one run: it goes with neither --sweep nor --cluster, which train.")
    return options, changes


def processes(options: argparse.Namespace) -> contextlib.AbstractContextManager:
    """The processes of this run, where it has several."""
    if options.sweep or options.mode not in ("train", "evaluate", "generate"):
        return contextlib.nullcontext()
    keep_freed_memory()
    from lineage.train.distributed import joined

    return joined(options.coordinator, options.num_processes, options.process, options.heartbeat)


def run(options: argparse.Namespace, changes: dict[str, str], arguments: list[str]) -> int:
    """Does what the options say."""
    file = options.config or DEFAULT
    workdir = Path(options.workdir or default_workdir(file))
    if options.mode in ("report", "watch"):
        from lineage.runs.live import runs_in, watch

        folders = [Path(folder) for folder in (options.workdir, *options.more) if folder] or [workdir]
        if options.mode == "watch":
            watch(folders)
        elif len(folders) > 1 or runs_in(folders[0]) not in ([], folders):
            from lineage.report.comparison import compare

            print(compare(folders))
        else:
            from lineage.report.run import write_report

            print(write_report(folders[0]))
        return 0
    command = "python launch.py " + shlex.join(arguments)
    if options.mode == "score":
        from lineage.evaluation.score import write_scores

        files = options.predictions, options.references
        print(write_scores(options.output, options.metric, *files, options.option, command))
        return 0
    trained = options.mode in ("evaluate", "generate", "export")
    if trained and not (workdir / "config.json").is_file():
        raise FileNotFoundError(f"there is no trained model in {workdir}: give the --workdir of a run.")
    config, sweep = cli.load(str(workdir / "config.json") if trained and not options.config else file)
    if trained:
        config.mesh.update({"data": -1, "fsdp": 1, "tensor": 1})  # what there is here
    cli.override(config, changes)
    logging.getLogger("absl").setLevel(logging.ERROR)
    if options.cluster:
        if options.sweep == "optuna":
            raise ValueError("--cluster is not for --sweep=optuna, whose next trials depend on those before.")
        return on_cluster(options, config, sweep, changes, workdir)
    if options.sweep:
        from lineage.runs.folder import plain
        from lineage.runs.search import run_search
        from lineage.runs.sweep import run_sweep

        start = [sys.executable, __file__, f"--config={file}", *passed_on(options, changes)]

        def config_of(overrides):
            return plain(changed(config, overrides))

        if options.sweep == "optuna":
            return run_search(start, cli.search(file), config_of, workdir, options.parallel)
        return run_sweep(start, sweep, [config_of(overrides) for overrides in sweep], workdir, options.parallel)

    from lineage.runs.folder import PREEMPTED
    from lineage.train import costs, loop
    from lineage.train import preemption as guard
    from lineage.train.experiment import Experiment

    if options.mode == "train":
        try:
            name, force = Path(default_workdir(file)).name, options.force_config
            metrics = loop.train(config, workdir, name=name, command=command, force_config=force)
        except guard.Preempted as stopped:
            print(stopped, file=sys.stderr)
            return PREEMPTED
        print(json.dumps(metrics) if metrics else "nothing was evaluated: the data have no validation or test split")
        print(f"report: {workdir / 'report.html'}")
    elif options.mode == "describe":
        print(costs.describe(Experiment(config)))
    else:
        use(options, config, changes, workdir)
    return 0


def use(options: argparse.Namespace, config: ConfigDict, changes: dict[str, str], workdir: Path) -> None:
    """Evaluates or exports a trained model, or lets it write."""
    from lineage.evaluation.evaluators import Evaluator, restore
    from lineage.evaluation.sampling import Sampler
    from lineage.train import experts, export
    from lineage.train import preemption as guard
    from lineage.train.experiment import Experiment

    if not options.force_config:
        guard.check_config(config, workdir)
    experiment = Experiment(config, workdir)
    state = restore(experiment, options.checkpoint)
    prompt = config.sampling.prompt if options.prompt is None else options.prompt
    if any(key.startswith("experts.") for key in changes):
        state, said = experts.choose(experiment, state, prompt if options.mode == "generate" else None)
        print(said, file=sys.stderr)
    if options.mode == "export":
        for path in export.write(experiment, state, options.format, Path(options.output or workdir / "export")):
            print(path)
    elif options.mode == "evaluate":
        print(json.dumps(Evaluator(experiment).evaluate(state), indent=2))
    else:
        sampler = Sampler(experiment, helpers(experiment))
        for text in sampler.write(state.variables(average=True), prompt):
            print(sampler.lead(prompt) + text)
        if sampler.acceptance_rate is not None:
            print(f"{sampler.acceptance_rate:.0%} of the draft's tokens were accepted")


def on_cluster(
    options: argparse.Namespace, config: ConfigDict, sweep: list[dict], changes: dict[str, str], workdir: Path
) -> int:
    """Submits the run, or the sweep's, as jobs; tells how they are, or cancels them."""
    from lineage.runs import slurm
    from lineage.runs.folder import plain
    from lineage.runs.live import Run
    from lineage.runs.sweep import plan

    if options.cluster == "cancel":
        return slurm.cancel(workdir)
    configs_of = [plain(changed(config, overrides)) for overrides in sweep]
    runs = plan(sweep, configs_of, workdir) if options.sweep else [Run(workdir.name, workdir, {}, plain(config))]
    if options.cluster == "status":
        return slurm.status(runs, workdir)
    command = [sys.executable, os.path.abspath(__file__), f"--config={options.config or DEFAULT}"]
    return slurm.submit(runs, [*command, *passed_on(options, changes)], workdir, config.cluster)


def passed_on(options: argparse.Namespace, changes: dict[str, str]) -> list[str]:
    """What the runs of a sweep, and jobs, are told as this process was."""
    return [f"--config.{key}={value}" for key, value in changes.items()] + ["--force-config"] * options.force_config


def helpers(experiment: Any) -> dict[str, tuple[Any, Any]]:
    """The models, with their variables, that `sampling.draft` and `sampling.contrast` name.

    Raises:
        ValueError: one has other tokens.
    """
    from lineage.evaluation.evaluators import restore
    from lineage.train.experiment import Experiment

    found = {}
    for role in ("draft", "contrast"):
        if folder := experiment.config.sampling.get(role):
            other = Experiment(cli.load(f"{folder}/config.json")[0], Path(folder))
            tokens = [one.data.tokenizer and one.data.tokenizer.to_str() for one in (experiment, other)]
            if tokens[0] != tokens[1]:
                raise ValueError(f"sampling.{role} is {folder}: its tokens are not those of {experiment.workdir}.")
            found[role] = other.model, restore(other).variables(average=True)
    return found


def changed(config: ConfigDict, overrides: Mapping[str, Any]) -> ConfigDict:
    """A copy of the config with the overrides."""
    config = config.copy_and_resolve_references()
    cli.override(config, overrides)
    return config


def keep_freed_memory() -> None:
    """Lets glibc keep the memory that a step frees for the next one.

    XLA's CPU backend allocates a step's scratch anew each time, and by default glibc returns large blocks to the
    kernel: thousands of page faults a step. Elsewhere than on Linux with glibc nothing is done.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        mmap_threshold, trim_threshold, arena_max = -3, -1, -8
        for option, value in ((mmap_threshold, 1 << 30), (trim_threshold, 2**31 - 1), (arena_max, 1)):
            libc.mallopt(option, value)


def default_workdir(file: str) -> str:
    """outputs/<config> or outputs/<config>_<argument>, one folder's name even where the argument has a path."""
    path, _, argument = file.partition(":")
    return os.path.join("outputs", Path(path).stem + (f"_{argument}" if argument else "").replace(os.sep, "_"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
