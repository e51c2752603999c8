"""Options of a run: documented dataclasses whose fields are config keys (see `lineage.configs.base`)."""

import dataclasses
import importlib.util
import re
from typing import Annotated, Any, Literal

from lineage.configs.directions import direction
from lineage.configs.registry import Count, Natural, Needs, Positive, Range, Rate, check_expressions, check_ranges
from lineage.data import Loader

MaybeNatural = Annotated[int | None, Range(0)]
MaybeNumber = Annotated[float | None, Range(0)]
MaybeCount = Annotated[int | None, Range(1)]
MaybePositive = Annotated[float | None, Range(above=0)]
Axis = Annotated[int, Range(1, other=-1)]
FILES = re.compile("_(to|from|dir|file|filename|path|flags)$|extra")  # names of XLA options that name files or programs


@dataclasses.dataclass(frozen=True)
class Options:
    """Base class of options whose ranges are checked. Their section is named after the class, in lower case."""

    def __post_init__(self):
        check_ranges(type(self).__name__.lower(), self)


@dataclasses.dataclass(frozen=True)
class Init(Options):
    """Initialization of the parameters.

    Attributes:
        path: workdir of a run, or folder in the layout of transformers, to copy parameters and tokenizer from; it may
            be remote, such as hf:ORG/NAME[@REVISION] or gs://BUCKET/RUN. If it has a tokenizer, the config's has no
            effect, unless that is a file. "" initializes at random.
        skip: regular expressions; parameters whose path matches one keep their random initialization.
        rename: pairs (regular expression, replacement), applied to the paths of the other model's parameters, such as
            ("^", "backbone/").
        layers: layers of the other model to copy from each stack, counted from 0, such as (0, 2, 4); (): all.
    """

    path: str = ""
    skip: Annotated[tuple[str, ...], Needs("path")] = ()
    rename: Annotated[tuple[tuple[str, str], ...], Needs("path")] = ()
    layers: Annotated[tuple[int, ...], Range(0), Needs("path")] = ()

    def __post_init__(self):
        super().__post_init__()
        check_expressions("init.skip", self.skip)
        check_expressions("init.rename", self.rename, paired=True)
        for pattern, replacement in self.rename:
            try:
                re.sub(pattern, replacement, "")
            except (re.error, IndexError, TypeError) as error:
                what = f"{replacement!r}, which cannot replace {pattern!r}"
                raise ValueError(f"init.rename has {what}: {error}.") from None


@dataclasses.dataclass(frozen=True)
class Experts(Options):
    """Combination of several SVF adapters of one base model, before generation or before the first step.

    Attributes:
        paths: workdirs of the runs with the adapters, whose tokenizer and base model must be those of this run or of
            `init.path`; (): no mixture.
        choice: "few_shot": the mixture that minimizes the loss of some examples; "prompt": the adapter whose folder
            name is the most probable answer to `question` about the prompt or the examples.
        examples: number of training examples from which the mixture is found.
        question: template of the question, with {text} and {name}.
        classifier: workdir of another SVF run that answers the question; "": the base model answers.
    """

    paths: tuple[str, ...] = ()
    choice: Annotated[Literal["few_shot", "prompt"], Needs("paths")] = "few_shot"
    examples: Annotated[Count, Needs("paths")] = 16
    question: Annotated[str, Needs("choice", ("prompt",))] = "{text}\n### {name}\n"
    classifier: Annotated[str, Needs("choice", ("prompt",))] = ""


@dataclasses.dataclass(frozen=True)
class Mesh(Options):
    """Shape of the device mesh; one axis may be -1 to use all remaining devices.

    Attributes:
        data: number of replicas of the model.
        fsdp: number of shards of the parameters, which are gathered for computation (FSDP).
        context: number of parts into which the tokens of each sequence are split, for long sequences. Attention is
            computed by heads, between two all-to-all exchanges (arXiv 2309.14509): the number of heads must be a
            multiple of context x tensor. In models without attention, such as ResNet, these devices repeat each
            other's work.
        tensor: number of parts into which attention heads and hidden units of MLPs are split; for models without them,
            it must be 1 unless `sequence_sharding` is set.
    """

    data: Axis = -1
    fsdp: Axis = 1
    context: Axis = 1
    tensor: Axis = 1


@dataclasses.dataclass(frozen=True)
class Checkpoint(Options):
    """Checkpoints that a run keeps.

    Attributes:
        every_minutes: a checkpoint is also written this many minutes after the start of the last one; 0: only at the
            interval `save_every`.
        keep: number of the newest checkpoints to keep; at least two survive a damaged one.
        best: metric by which the best checkpoint is also kept, such as "validation/loss"; a checkpoint is then also
            written after every evaluation that is better than those before; "" disables it.
        best_is_highest: whether a higher value of that metric is better; None: determined by its name.
        on_error: what happens when a save fails, as on a full disk; only runs of one process can "continue".
    """

    every_minutes: Annotated[float, Range(0)] = 30.0
    keep: Count = 2
    best: str = ""
    best_is_highest: Annotated[bool | None, Needs("best")] = None
    on_error: Literal["stop", "continue"] = "stop"

    @property
    def highest(self) -> bool:
        """Return whether a higher value of the metric `best` is better; False if it is empty."""
        return bool(self.best) and direction(self.best, self.best_is_highest, "checkpoint.best_is_highest")


@dataclasses.dataclass(frozen=True)
class Cluster(Options):
    """Resources of a SLURM job; "" and 0: the default of the cluster.

    Attributes:
        partition, account, qos, constraint: the option of sbatch with this name.
        nodes: number of nodes.
        tasks_per_node: processes of the run on a node: one for each GPU, or one for all.
        gpus_per_node: number of GPUs of a node.
        cpus_per_task: number of CPU cores of a process.
        memory_gb: memory of a node in GB.
        minutes: time limit, after which the job is requeued and the run resumes.
        save_seconds: seconds before the time limit, less than 60 x `minutes`, at which the run is signaled to save.
        requeues: maximum number of times that a job is requeued because of its time limit.
        parallel: maximum number of runs of a sweep at the same time; 0: all.
        setup: shell commands to run first, such as "module load cuda".
    """

    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    nodes: Count = 1
    tasks_per_node: Count = 1
    gpus_per_node: Natural = 0
    cpus_per_task: Natural = 0
    memory_gb: Natural = 0
    minutes: Count = 1440
    save_seconds: Natural = 120
    requeues: Natural = 1000
    parallel: Natural = 0
    setup: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Sampling(Options):
    """Text generation, at evaluations and by the commands `generate` and `predict`.

    Attributes:
        prompt: text to continue, or input of an encoder-decoder.
        num_samples: number of samples at each evaluation.
        max_new_tokens: maximum number of new tokens; a text also ends where it has `model.max_length` tokens.
        temperature: temperature of the softmax; 0 always takes the most probable token.
        top_k: sample from the k most probable tokens; 0 disables it.
        top_p: nucleus sampling: sample from the most probable tokens that reach this total; 0 disables it.
        repetition_penalty: penalty for tokens that have occurred; above 1, they are less likely.
        no_repeat_ngram_size: no sequence of this many tokens occurs twice; 0 disables it.
        min_new_tokens: minimum number of new tokens.
        forced_first_token: token id with which a text starts; None: of encoder-decoders, the token before targets, if
            there is one.
        best_of: number of samples from which the one with the highest mean log-probability is kept; above 1, it needs a
            temperature above 0.
        contrast: workdir of a weaker run whose log-probability is subtracted (not at evaluations); needs `best_of`.
        draft: workdir of a smaller run for speculative decoding (not at evaluations).
        num_drafted: tokens that the draft model proposes at a time.
        num_beams: number of beams; above 1, beam search, which needs temperature 0.
        length_penalty: length penalty of beam search; above 0 prefers longer texts.
        length_offset: k in ((k + n) / (k + 1))^length_penalty, by which beam search divides the log-probability of n
            tokens: 0 as in `transformers`, 5 in GNMT (arXiv 1609.08144, equation 14).
        cache_format: format of the key/value cache: "int8", with a scale for each token and head, needs about a quarter
            of the memory of float32 and changes the probabilities slightly; None: the dtype of the parameters.
    """

    prompt: str = "\n"
    num_samples: Natural = 0
    max_new_tokens: Count = 128
    temperature: Annotated[float, Range(0)] = 1.0
    top_k: Natural = 0
    top_p: Annotated[float, Range(0, 1)] = 0.0
    repetition_penalty: Positive = 1.0
    no_repeat_ngram_size: Natural = 0
    min_new_tokens: Natural = 0
    forced_first_token: MaybeNatural = None
    best_of: Count = 1
    contrast: str = ""
    draft: str = ""
    num_drafted: Annotated[Count, Needs("draft")] = 4
    num_beams: Count = 1
    length_penalty: Annotated[float, Needs("num_beams")] = 1.0
    length_offset: Annotated[Natural, Needs("num_beams")] = 0
    cache_format: Literal["int8"] | None = None


@dataclasses.dataclass(frozen=True)
class Run:
    """Options of a run as a whole.

    A duration (`total`, `log_every`, `evaluate_every`, `save_every`) is given in one unit: steps, epochs, examples, or
    percent of the run. Setting one unit on the command line unsets the others.

    Attributes:
        seed: random seed of the initial parameters, the order of the data and everything else that is random.
        imports: modules, or paths of Python files, that register models, tasks, sources or evaluators.
        precision: dtype of computation; parameters stay float32.
        weights: format of the matrices of linear maps and tables of tokens in evaluations and in generation: "int8" or
            "fp8" (e4m3), with a scale for each output, need a quarter of the memory of float32 and lose some quality.
            Training and export do not quantize. Requires Qwix; None disables it.
        prng: generator of the random numbers of training steps: "threefry2x32" gives the same numbers on all platforms
            and meshes; "rbg" uses the hardware's generator.
        total_steps, total_epochs, total_examples: length of the training; exactly one of total_steps, total_epochs and
            total_examples must be set.
        log_every_steps, log_every_epochs, log_every_examples, log_every_percent: interval of logging; all None: 10
            steps.
        evaluate_every_steps, evaluate_every_epochs, evaluate_every_examples, evaluate_every_percent: interval of
            evaluations of all splits; there is always one at the end.
        save_every_steps, save_every_epochs, save_every_examples, save_every_percent: interval of checkpoints; there is
            always one at the end.
        step_timeout_minutes: maximum duration of a training step in minutes, without compilation; a longer step ends
            the run with the stacks of all threads and exit code 76. None: 20 times the mean step, and at least 10
            minutes, or an hour for the first step; 0 disables it. Saves and each batch of an evaluation may take as
            long, but at least an hour.
        grad_accum_steps: number of micro-batches of each batch, whose gradients are accumulated; batch normalization
            uses the statistics of each micro-batch.
        ema_decay: decay of the exponential moving average of the parameters, used for evaluation; 0 disables it.
        skip_nonfinite: number of consecutive updates that may be skipped because they are not finite; 0 stops the run.
        sharding: pairs (regular expression, mesh axes of the last dimensions); the first that matches a parameter's
            path applies; they take precedence over the model's own rules. The paths are those in the training state, in
            which "params/" or the names of moments come first, so an expression should not begin with "^".
        sequence_sharding: whether to shard activations between layers over the tensor axis (sequence parallelism).
        offload: whether to keep the optimizer's state and the average of the parameters in host memory except during
            the update: saves 8 to 12 bytes of device memory per parameter, but each step transfers them twice.
        compiler_options: pairs (name, value) of XLA options for the compiled steps, such as
            `(("xla_gpu_enable_latency_hiding_scheduler", True),)`; not those that name files, such as `xla_dump_to`.
        teacher: workdir of a run, or folder in the layout of transformers, of the teacher for distillation, whose
            tokenizer is used as that in `init.path` is; "": none.
        wandb: project of Weights & Biases to log to; "" disables it.
    """

    seed: Natural = 0
    imports: tuple[str, ...] = ()
    precision: Literal["float32", "bfloat16"] = "float32"
    weights: Literal["int8", "fp8"] | None = None
    prng: Literal["threefry2x32", "rbg"] = "threefry2x32"
    total_steps: MaybeNatural = None
    total_epochs: MaybeNumber = None
    total_examples: MaybeNatural = None
    log_every_steps: MaybeCount = None
    log_every_epochs: MaybePositive = None
    log_every_examples: MaybeCount = None
    log_every_percent: MaybePositive = None
    evaluate_every_steps: MaybeCount = None
    evaluate_every_epochs: MaybePositive = None
    evaluate_every_examples: MaybeCount = None
    evaluate_every_percent: MaybePositive = None
    save_every_steps: MaybeCount = None
    save_every_epochs: MaybePositive = None
    save_every_examples: MaybeCount = None
    save_every_percent: MaybePositive = None
    step_timeout_minutes: MaybeNumber = None
    grad_accum_steps: Count = 1
    ema_decay: Rate = 0.0
    skip_nonfinite: Natural = 0
    sharding: tuple[Any, ...] = ()
    sequence_sharding: bool = False
    offload: bool = False
    compiler_options: tuple[Any, ...] = ()
    teacher: str = ""
    wandb: str = ""
    init: Init = Init()
    experts: Experts = Experts()
    mesh: Mesh = Mesh()
    checkpoint: Checkpoint = Checkpoint()
    cluster: Cluster = Cluster()
    sampling: Sampling = Sampling()
    loader: Loader = dataclasses.field(default_factory=Loader)

    def __post_init__(self):
        check_ranges("", self)
        if self.weights and importlib.util.find_spec("qwix") is None:
            install = "pip install 'lineage[quantize]'"
            raise ModuleNotFoundError(f"weights is {self.weights!r}: this requires Qwix: `{install}`.")
        check_expressions("sharding", self.sharding, paired=True)
        for pair in self.compiler_options:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
                raise ValueError(f"compiler_options contains {pair!r}: it must be pairs (name, value).")
            if isinstance(pair[1], str) and FILES.search(pair[0]):
                where = "an option that names files must be given in the environment variable XLA_FLAGS"
                raise ValueError(f"compiler_options contains {pair[0]}: {where}.")
