"""The command line of Lineage.

`python launch.py` trains a Vision Transformer on handwritten digits; `python launch.py --help` lists the commands.
"""

import argparse
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from lineage.configs import cache
from lineage.configs.arguments import parse
from lineage.configs.commands import DEFAULT
from lineage.configs.storage import local
from lineage.runs import process, remote
from lineage.runs.command import LAUNCH, default_workdir, displayed, folder_of
from lineage.runs.folder import CONFIG, last_step, plain, saved_config
from lineage.runs.supervisor import SUPERVISED, supervise

Options = argparse.Namespace


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default the arguments of this process; return the exit code."""
    sys.excepthook = process.print_error
    process.open_streams()
    given = sys.argv[1:] if arguments is None else list(arguments)
    with process.brief_errors("--traceback" in given, arguments is None), process.interruptible_imports():
        code = execute(given)
    if code == process.INTERRUPTED and arguments is None:
        process.end_interrupted()
    return code


def execute(arguments: Sequence[str]) -> int:
    """Run a command line by its function `run_COMMAND`; print user errors in one sentence."""
    try:
        with process.flushed():
            process.check_current_folder()
            options, workdir = parsed(arguments)
            if options.command == "train" and options.max_restarts and SUPERVISED not in os.environ:
                return supervise([*LAUNCH, *arguments], workdir, options.max_restarts)
            with processes(options), remote.for_command(options.command, workdir) as options.folder:
                return globals()[f"run_{options.command}"](options) or 0
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has closed it
        return 1
    except Exception as error:
        if not process.is_reported(error):
            raise
        message = process.printable(str(error) or type(error).__name__, kept="\n")
        details = traceback.format_exc() if "--traceback" in arguments else process.hint(error)
        process.say(f"\n{process.ERROR}{message}\n{details}")
        return process.exit_code(error)
    except KeyboardInterrupt:
        process.say("\ninterrupted")
        return process.INTERRUPTED


def parsed(arguments: Sequence[str]) -> tuple[Options, str]:
    """Return the options of a command line, with its overrides of the config as `changes`, and its workdir."""
    options, options.changes = parse(arguments, displayed(LAUNCH))
    options.line = displayed([*LAUNCH, *arguments])
    experiment = vars(options).get("experiment")
    options.named = vars(options).get("config") or experiment
    options.file = options.named or DEFAULT  # name or path of the experiment
    run = experiment if experiment and Path(experiment, CONFIG).is_file() else folder_of(vars(options).get("run"))
    folders = filter(None, [vars(options).get("workdir"), run, *vars(options).get("folders", ())])
    suffix = "_sweep" if options.command == "sweep" or vars(options).get("sweep") else ""
    return options, next(folders, default_workdir(options.file) + suffix)


def processes(options: Options) -> contextlib.AbstractContextManager:
    """Return a context that connects the processes of the run, if it has several; configure JAX's cache."""
    if options.command in ("train", "evaluate", "generate", "predict"):
        cache.keep_compiled_programs()
    elif options.command in ("prepare", "verify"):  # a run may be using the accelerators
        os.environ["JAX_PLATFORMS"] = "cpu"
    if "coordinator" not in options:
        return contextlib.nullcontext()
    process.keep_freed()
    from lineage.train.distributed import joined

    return joined(options.coordinator, options.num_processes, options.process, options.heartbeat, vars(options))


def configured(options: Options) -> tuple[ConfigDict, list[dict[str, Any]]]:
    """Build the config from the command line; return it with the overrides of its sweep."""
    from lineage.configs import cli

    path = Path(options.folder) / CONFIG
    shown = options.command in ("describe", "config") and options.workdir
    config, sweep = cli.load(str(path) if shown and not options.named else options.file)
    cli.override(config, options.changes, saved_config(path.parent) if last_step(path.parent) else None)
    return config, sweep


def changed(config: ConfigDict, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the overrides applied, in the form of `config.json`."""
    from lineage.configs import base, cli

    config = config.copy_and_resolve_references()
    cli.override(config, overrides)
    return plain(base.resolved(config))


def shared_command(options: Options) -> list[str]:
    """Return the command line shared by the runs of a sweep or a job, without their overrides and workdir."""
    settings = [f"--config={options.file}", *(f"--config.{key}={value}" for key, value in options.changes.items())]
    return [*LAUNCH, "train", *settings, *(["--force-config"] if options.force_config else [])]


def run_train(options: Options) -> int:
    config, _ = configured(options)
    import jax

    from lineage.configs import cli
    from lineage.runs.provenance import provenance
    from lineage.train import loop
    from lineage.train.profiling import trace

    folder, profile = options.folder, options.profile and trace.parse(options.profile)
    about = {"config_name": Path(default_workdir(options.file)).name, "command": options.line}
    about |= provenance(Path(cli.find(options.file)[0]).parent)
    try:
        with jax.debug_nans(True) if options.debug_nans else contextlib.nullcontext():
            metrics = loop.train(config, folder, about=about, force_config=options.force_config, profile=profile)
    except loop.Preempted as stopped:
        process.ignore_stop_signals()
        process.say(str(stopped))
        return process.PREEMPTED
    print(process.to_json(metrics) if metrics else "nothing was evaluated: the data have no validation or test split")
    process.show(f"report: {folder}/report.html")
    return 0


def restored(options: Options) -> Any:
    """Return the `Trained` model of a run, with the mixture of `config.experts` if the command line has one."""
    from lineage.configs import adoption
    from lineage.train import distributed, trained

    command, settings = options.command, {"file": options.named, "force": options.force_config}
    with distributed.agreed():
        if not ((path := options.folder / CONFIG).is_file() and adoption.is_run(path.parent)):
            raise FileNotFoundError(f"{path} is missing or not that of a run: give the --workdir of a trained model.")
    settings |= {"prompted": command == "generate", "alone": command == "predict"}
    return trained.restore(options.folder, options.checkpoint, options.changes, **settings)


def run_evaluate(options: Options) -> None:
    print(process.to_json(restored(options).evaluate(), indent=2))


def run_generate(options: Options) -> None:
    if options.prompt is not None:
        options.changes["sampling.prompt"] = options.prompt
    model = restored(options)
    text, sampler = model.experiment.config.sampling.prompt, model.sampler
    samples = model.generate(text)
    for number, continuation in enumerate(samples, 1):
        if len(samples) > 1:
            print(f"--- sample {number} of {len(samples)} ---")
        process.show(sampler.lead(text) + continuation)
    if sampler.acceptance_rate is not None:
        print(f"{sampler.acceptance_rate:.0%} of the draft's tokens were accepted")


def run_predict(options: Options) -> None:
    if options.batch_size is not None:
        options.changes["loader.evaluation_batch_size"] = str(options.batch_size)
    from lineage.evaluation import prediction
    from lineage.train import distributed, trained

    if options.model:
        if options.inputs is None:
            raise ValueError("--model is given without --inputs: a model folder has no data, so --inputs is required.")
        settings = {"checkpoint": options.checkpoint, "changes": options.changes, "alone": True}
        model = trained.load(options.model, task=options.task or "", **settings)
    else:
        model = restored(options)
    columns = options.columns.split(",") if options.columns else ()
    with distributed.agreed():
        inputs, files = model.inputs(options.inputs, options.split, columns, options.skip_bad)
    about = {"inputs": [options.inputs, options.split, options.columns, files], "features": options.features}
    about |= prediction.identity(model)
    settings = {"skip_bad": options.skip_bad, "as_features": options.features}
    model.write_predictions(inputs, options.output or "", about, **settings)


def run_export(options: Options) -> None:
    model = restored(options)
    from lineage.train import export as exporter

    with remote.written(options.output or str(options.folder / "export")) as place:
        for path in exporter.write(model.experiment, model.original, options.format, Path(place)):
            process.show(f"{options.output.rstrip('/')}/{path.name}" if options.output else path)


def run_prepare(options: Options) -> None:
    config, _ = configured(options)
    from lineage.train.experiment import Experiment

    experiment = Experiment(config)
    facts = experiment.read(experiment.source, workers=options.workers or len(os.sched_getaffinity(0))).facts
    counts = (f"{count:,} examples of {split}" for split, count in facts.examples.items())
    process.show(f"{experiment.task.cache_dir} has {', '.join(counts)}")


def run_describe(options: Options) -> None:
    config, _ = configured(options)
    from lineage.train.experiment import Experiment
    from lineage.train.profiling import description

    process.show((description.parameters if options.parameters else description.describe)(Experiment(config)))


def run_compile(options: Options) -> None:
    from lineage.train.compiler import targets

    target = targets.parse(options.target)
    targets.prepare(target)  # before JAX is imported
    config, _ = configured(options)
    from lineage.train.compiler.compile import compile_step, without_data
    from lineage.train.experiment import Experiment

    experiment = Experiment(without_data(config), devices=target.devices())
    title = f"{Path(default_workdir(options.file)).name}, {options.step} step, {options.target}"
    compiled = compile_step(experiment, target, options.step, title)
    process.show(json.dumps(compiled.figures()) if options.json else compiled)


def folders(options: Options) -> list[Path]:
    """Return the folders of `report`, `verify` or `watch`."""
    named = [folder for folder in (options.workdir, *options.folders) if folder]
    return [options.folder, *(Path(local(folder)) for folder in named[1:])]


def run_report(options: Options) -> None:
    from lineage.runs.live import runs_in

    chosen = folders(options)
    if len(chosen) > 1 or runs_in(chosen[0]) not in ([], chosen):
        from lineage.report.comparison import compare

        process.show(compare(chosen))
    else:
        from lineage.report.run import write_report

        process.show(write_report(chosen[0]))


def run_verify(options: Options) -> int:
    from lineage.train.verification import verify

    return verify(folders(options), options.json)


def run_watch(options: Options) -> None:
    from lineage.runs.live import watch

    watch(folders(options))


def run_sweep(options: Options) -> int:
    config, overrides = configured(options)
    from lineage.configs import cli
    from lineage.runs import search, sweep

    def finish(*results):
        from lineage.report import comparison  # imports matplotlib, which would delay the first run

        comparison.finish(*results)

    start, folder, parallel = shared_command(options), options.folder, options.parallel
    if options.optuna:
        objective = cli.search(options.file, options.trials)
        return search.run_search(start, objective, partial(changed, config), folder, finish, parallel)
    if options.trials:
        raise ValueError(f"--trials is {options.trials}: it requires --optuna.")
    return sweep.run_sweep(start, overrides, [changed(config, run) for run in overrides], folder, finish, parallel)


def run_slurm(options: Options) -> int:
    from lineage.runs import slurm
    from lineage.runs.live import Run

    folder = options.folder
    if options.action == "cancel":
        return slurm.cancel(folder)
    config, overrides = configured(options)
    alone = [Run(folder.name, folder, {}, changed(config, {}))]
    runs = slurm.plan(overrides, [changed(config, run) for run in overrides], folder) if options.sweep else alone
    if options.action == "status":
        return slurm.status(runs, folder)
    return slurm.submit(runs, shared_command(options), folder, config.cluster)


def run_score(options: Options) -> None:
    from lineage.evaluation.score import write_scores

    predictions, references = options.predictions and local(options.predictions), list(map(local, options.references))
    settings = [*options.option, *([f"model={options.model}"] if options.model else [])]
    with remote.written(options.output or f"{options.predictions}.{options.metric}.json") as place:
        table = write_scores(place, options.metric, predictions, references, settings, options.line, language_model)
        process.show(table)


def run_harness(options: Options) -> None:
    try:
        from lineage.evaluation import harness
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name} is not installed: `pip install 'lineage[harness]'`.") from None
    if not (options.model and options.tasks):
        raise ValueError("--model (a run or folder) and --tasks (comma-separated names) are required.")
    settings = {"limit": options.limit, "num_fewshot": options.num_fewshot, "include_path": options.include_path}
    with remote.written(options.output or "") as place:
        process.show(harness.evaluate(language_model(options.model), options.tasks.split(","), place, **settings))


def language_model(path: str) -> Any:
    """Return the `LanguageModel` of a run or a folder."""
    from lineage.train import trained

    return trained.language_model(path)


def run_list(options: Options) -> None:
    from lineage.configs import cli

    print(cli.parts(options.parts) if options.parts else cli.listing(f"{displayed(LAUNCH)} train NAME"))


def run_config(options: Options) -> None:
    from lineage.configs import cli

    if options.config and options.experiment:  # config --config=NAME SECTION
        options.section = options.section or options.experiment
    config, _ = configured(options)
    process.show(cli.described(config, options.section or ""))


if __name__ == "__main__":
    sys.exit(main())
