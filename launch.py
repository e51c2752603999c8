"""The command line of Lineage.

`python launch.py` trains a Vision Transformer on handwritten digits; `python launch.py --help` lists the commands.
"""

import argparse
import contextlib
import ctypes
import json
import logging
import os
import sys
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from lineage.configs import cache, schema
from lineage.configs.arguments import DEFAULT, parse
from lineage.runs.folder import CONFIG, LAUNCH, PREEMPTED, check_config, displayed, plain

Options, Changes = argparse.Namespace, Mapping[str, str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process; return the exit code.

    The function of a command is `run_COMMAND`; `arguments.COMMANDS` describes it.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options, changes = parse(arguments, displayed(LAUNCH))
    options.line, given = displayed([*LAUNCH, *arguments]), vars(options)
    options.named = given.get("config") or given.get("experiment")
    options.file = options.named or DEFAULT  # name or path of the experiment
    options.folder = Path(given.get("workdir") or given.get("run") or default_workdir(options.file))  # of the run
    # Orbax logs the tracebacks of errors that it raises too.
    logging.getLogger("absl").setLevel(logging.ERROR if options.traceback else logging.CRITICAL)
    try:
        with processes(options):
            return globals()[f"run_{options.command}"](options, changes) or 0
    except BrokenPipeError:  # the reader of a pipe has closed it, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, ArithmeticError, MemoryError, ModuleNotFoundError, RecursionError) as error:
        said = str(error).replace("force_config=True", "--force-config") or type(error).__name__
        print(f"\nerror: {said}", file=sys.stderr)
        if options.traceback:
            traceback.print_exc()
        else:
            print("(use --traceback for the full traceback)", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def processes(options: Options) -> contextlib.AbstractContextManager:
    """Return a context in which the processes of the run are connected, if it has several; choose JAX's cache."""
    if options.command in ("train", "evaluate", "generate", "predict"):
        cache.keep_compiled_programs()
    if "coordinator" not in options:
        return contextlib.nullcontext()
    keep_freed_memory()
    from lineage.train.distributed import joined

    return joined(options.coordinator, options.num_processes, options.process, options.heartbeat)


def configured(options: Options, changes: Changes) -> tuple[ConfigDict, list[dict[str, Any]]]:
    """Build the config from the command line; return it with the overrides of its sweep."""
    from lineage.configs import cli

    path = options.folder / CONFIG
    trained = "checkpoint" in options  # whether the command is for a trained model
    if trained and not path.is_file():
        raise FileNotFoundError(f"there is no trained model in {path.parent}: give the --workdir of a run.")
    shown = options.command in ("describe", "config") and options.workdir and path.is_file()
    config, sweep = cli.load(str(path) if (trained or shown) and not options.named else options.file)
    if trained:
        config.mesh.update({"data": -1, "fsdp": 1, "tensor": 1})  # the devices of this machine
    cli.override(config, changes)
    return config, sweep


def default_workdir(file: str) -> str:
    """Return outputs/CONFIG or outputs/CONFIG_ARGUMENT, with underscores for the slashes of the argument."""
    path, _, argument = file.partition(":")
    return os.path.join("outputs", Path(path).stem + (f"_{argument}" if argument else "").replace(os.sep, "_"))


def changed(config: ConfigDict, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with some overrides, as `config.json` holds it."""
    from lineage.configs import cli

    config = config.copy_and_resolve_references()
    cli.override(config, overrides)
    return plain(config)


def child(options: Options, changes: Changes) -> list[str]:
    """Return the command line of a run of a sweep, or of a job, without its own overrides and its workdir."""
    own = [f"--config.{key}={value}" for key, value in changes.items()]
    return [*LAUNCH, "train", f"--config={options.file}", *own, *["--force-config"] * options.force_config]


def run_train(options: Options, changes: Changes) -> int:
    config, _ = configured(options, changes)
    import jax

    from lineage.configs import cli
    from lineage.runs.provenance import provenance
    from lineage.train import loop, trace

    folder, profile = options.folder, options.profile and trace.parse(options.profile)
    about = {"config_name": Path(default_workdir(options.file)).name, "command": options.line}
    about |= provenance(Path(cli.find(options.file)[0]).parent)
    try:
        with jax.debug_nans(True) if options.debug_nans else contextlib.nullcontext():
            metrics = loop.train(config, folder, about=about, force_config=options.force_config, profile=profile)
    except loop.Preempted as stopped:
        print(stopped, file=sys.stderr)
        return PREEMPTED
    print(json.dumps(metrics) if metrics else "nothing was evaluated: the data have no validation or test split")
    print(f"report: {folder / 'report.html'}")
    return 0


def restored(options: Options, changes: Changes) -> tuple[Any, Any]:
    """Restore a trained model; return its experiment and state, with the mixture of `config.experts` if it is given."""
    config, _ = configured(options, changes)
    from lineage.train import expert_mixture
    from lineage.train.experiment import Experiment

    folder = options.folder
    if not options.force_config:
        check_config(config, folder)
    experiment = Experiment(config, folder)
    state = experiment.restore(options.checkpoint)
    if any(key.startswith("experts.") for key in changes):
        prompt = experiment.config.sampling.prompt if options.command == "generate" else None
        state, said = expert_mixture.choose(experiment, state, prompt)
        print(said, file=sys.stderr)
    return experiment, state


def run_evaluate(options: Options, changes: Changes) -> None:
    experiment, state = restored(options, changes)
    print(json.dumps(experiment.evaluation()(experiment.variables(state)), indent=2))


def run_generate(options: Options, changes: Changes) -> None:
    if options.prompt is not None:
        changes = {**changes, "sampling.prompt": options.prompt}
    experiment, state = restored(options, changes)
    from lineage.evaluation.sampling import Sampler

    text, sampler = experiment.config.sampling.prompt, Sampler(experiment.context(), experiment.helpers())
    samples = sampler.write(experiment.variables(state), text)
    for number, continuation in enumerate(samples, 1):
        if len(samples) > 1:
            print(f"--- sample {number} of {len(samples)} ---")
        print(sampler.lead(text) + continuation)
    if sampler.acceptance_rate is not None:
        print(f"{sampler.acceptance_rate:.0%} of the draft's tokens were accepted")


def run_predict(options: Options, changes: Changes) -> None:
    if options.batch_size is not None:
        changes = {**changes, "loader.evaluation_batch_size": str(options.batch_size)}
    experiment, state = restored(options, changes)
    from lineage.evaluation import prediction

    context, columns = experiment.context(), options.columns.split(",") if options.columns else ()
    inputs, files = experiment.inputs(options.inputs, options.split, columns)
    about = {"inputs": [options.inputs, options.split, options.columns, files], "features": options.features}
    about |= prediction.identity(experiment, int(state.step))
    output = prediction.Output(options.output, about) if options.output else None
    found = prediction.predictions(
        context,
        experiment.variables(state),
        inputs,
        experiment.prediction_batch_size,
        start=output.count if output else 0,
        errors=output.errors if output else {},
        skip_bad=options.skip_bad,
        as_features=options.features,
        helpers=experiment.helpers(),
    )
    if not output:
        for some in found:
            print("".join(map(prediction.line, some)), end="", flush=True)
        return
    output.write(found)
    output.finish(context.task.document)
    bad = f" ({len(output.errors)} images could not be read)" * bool(output.errors)
    print(f"{output.count} predictions{bad}: {output.final}", file=sys.stderr)


def run_export(options: Options, changes: Changes) -> None:
    experiment, state = restored(options, changes)
    from lineage.train import export as exporter

    for path in exporter.write(experiment, state, options.format, Path(options.output or options.folder / "export")):
        print(path)


def run_describe(options: Options, changes: Changes) -> None:
    config, _ = configured(options, changes)
    from lineage.train import description
    from lineage.train.experiment import Experiment

    print((description.parameters if options.parameters else description.describe)(Experiment(config)))


def run_compile(options: Options, changes: Changes) -> None:
    from lineage.train.compiler import targets

    target = targets.parse(options.target)
    targets.prepare(target)  # before JAX is imported
    config, _ = configured(options, changes)
    from lineage.train.compiler.compile import compile_step, without_data
    from lineage.train.experiment import Experiment

    experiment = Experiment(without_data(config), devices=target.devices())
    title = f"{Path(default_workdir(options.file)).name}, {options.step} step, {options.target}"
    compiled = compile_step(experiment, target, options.step, title)
    print(json.dumps(compiled.figures()) if options.json else compiled)


def folders(options: Options) -> list[Path]:
    """Return the folders that `report` and `watch` are for."""
    given = [folder for folder in (options.workdir, *options.folders) if folder]
    return [Path(folder) for folder in given or [default_workdir(DEFAULT)]]


def run_report(options: Options, changes: Changes) -> None:
    from lineage.runs.live import runs_in

    chosen = folders(options)
    if len(chosen) > 1 or runs_in(chosen[0]) not in ([], chosen):
        from lineage.report.comparison import compare

        print(compare(chosen))
    else:
        from lineage.report.run import write_report

        print(write_report(chosen[0]))


def run_watch(options: Options, changes: Changes) -> None:
    from lineage.runs.live import watch

    watch(folders(options))


def run_sweep(options: Options, changes: Changes) -> int:
    config, overrides = configured(options, changes)
    from lineage.configs import cli
    from lineage.runs.search import run_search
    from lineage.runs.sweep import run_sweep

    start, folder = child(options, changes), options.folder
    if options.optuna:
        search = cli.search(options.file, options.trials)
        return run_search(start, search, partial(changed, config), folder, options.parallel)
    if options.trials:
        raise ValueError(f"--trials is {options.trials}: it is an option of --optuna.")
    return run_sweep(start, overrides, [changed(config, one) for one in overrides], folder, options.parallel)


def run_slurm(options: Options, changes: Changes) -> int:
    from lineage.runs import slurm
    from lineage.runs.live import Run
    from lineage.runs.sweep import plan

    folder = options.folder
    if options.action == "cancel":
        return slurm.cancel(folder)
    config, overrides = configured(options, changes)
    if options.sweep:
        runs = plan(overrides, [changed(config, one) for one in overrides], folder)
    else:
        runs = [Run(folder.name, folder, {}, plain(config))]
    if options.action == "status":
        return slurm.status(runs, folder)
    return slurm.submit(runs, child(options, changes), folder, config.cluster)


def run_score(options: Options, changes: Changes) -> None:
    from lineage.evaluation.score import write_scores

    files = options.predictions, options.references
    print(write_scores(options.output, options.metric, *files, options.option, options.line))


def run_list(options: Options, changes: Changes) -> None:
    from lineage.configs import cli

    if options.parts:
        found = cli.parts(options.parts)
        print("\n".join(f"{name:{max(map(len, found))}}  {summary}" for name, summary in found.items()))
        return
    width = max(map(len, cli.experiments()))
    for folder in ("small", "paper"):
        print(f"{folder}:")
        for name, path in cli.experiments().items():
            if path.parent.name == folder:
                print(f"  {name:{width}}  {cli.summary(path)}")
        print()
    print(f"Train one with `{displayed(LAUNCH)} --config=NAME`.")


def run_config(options: Options, changes: Changes) -> None:
    from lineage.configs import base

    if options.config and options.experiment:  # config --config=NAME SECTION
        options.section = options.section or options.experiment
    config, _ = configured(options, changes)
    rows = schema.describe(config, base.classes(config))
    chosen = [row for row in rows if not options.section or f"{row.key}.".startswith(f"{options.section}.")]
    if not chosen:
        sections = dict.fromkeys(row.key.partition(".")[0] for row in rows if "." in row.key)
        raise ValueError(f"the config has no section {options.section!r}: its sections are {', '.join(sections)}.")
    for row in chosen:
        default = "" if row.default in (None, row.value) else f", default {row.default!r}"
        print(f"{row.key} = {row.value!r}  [{row.type}{default}]")
        if row.documentation:
            print(textwrap.fill(row.documentation, 116, initial_indent="    ", subsequent_indent="    "))


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for reuse by the next step; without glibc, do nothing.

    XLA's CPU backend allocates the scratch space of each step anew, and by default glibc returns large blocks to the
    kernel, which costs thousands of page faults per step.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        mmap_threshold, trim_threshold, arena_max = -3, -1, -8
        for option, value in ((mmap_threshold, 1 << 30), (trim_threshold, 2**31 - 1), (arena_max, 1)):
            libc.mallopt(option, value)


if __name__ == "__main__":
    sys.exit(main())
