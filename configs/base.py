"""Every key of a config, with its type and its default. An experiment's file starts from here and changes what differs.

A duration (`total`, `warmup`, `log_every`, `evaluate_every`, `save_every`) is given in one unit: `_steps`, `_epochs`,
`_examples` or `_percent` (of the run). Setting one unit on the command line takes the place of another.
"""

from functools import partial

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from lineage.configs import schema
from lineage.train.adapters import ADAPTERS


def get_config(model: str) -> ConfigDict:
    """All keys, for a model of `MODELS`."""
    return ConfigDict(
        {
            "seed": 0,  # of the initial parameters, the order of the data and all that is random
            "model": MODELS[model](),
            "data": data(),
            "objective": objective(),
            "init": {  # what the parameters are before the first step
                "path": "",  # those of a run's workdir or a folder of transformers', its tokenizer too; "" = new
                "skip": (),  # parameters in whose path one of these regular expressions is found are new all the same
                # (regular expression, replacement) pairs in the other model's paths, such as ("^", "backbone/")
                "rename": (),
                "layers": (),  # of the other model that become this one's, from 0, such as (0, 2, 4); () = all
            },
            "adapter": schema.section(ADAPTERS, "none"),  # trains small changes of the matrices of init.path
            "experts": experts(),
            "teacher": "",  # of a distillation: a run's workdir, or a folder in transformers' layout
            "optimizer": optimizer(),
            "ema_decay": 0.0,  # of an average of the parameters, which is then what is evaluated; 0 = none
            "precision": "float32",  # what the model computes in: float32 | bfloat16; parameters stay float32
            "skip_nonfinite": 0,  # so many updates in a row may be left out as they are not finite; 0 = the run stops
            "grad_accum_steps": 1,  # parts that a batch is gone through in, to save memory
            "mesh": {  # the devices; one axis may be -1: what the others leave
                "data": -1,  # copies of the model
                "fsdp": 1,  # parts that parameters are stored in, gathered when they are used
                "tensor": 1,  # parts that heads and hidden layers are computed in
            },
            # rules before the model's own: (regular expression, mesh axes of the last dimensions)
            "sharding": (),
            "sequence_sharding": False,  # tokens between layers lie in parts on the tensor axis too
            **duration("total"),  # of the training; must be given
            **duration("log_every"),
            **duration("evaluate_every"),  # all splits, whole; always at the end
            **duration("save_every"),  # checkpoints; always at the end
            "checkpoint": {
                "keep": 2,  # how many of the newest stay: of two, one that is damaged can be done without
                "best": "",  # the best by this metric, such as validation/loss, stays too; "" = none
                "best_is_highest": False,  # more of the metric is better
                "on_error": "stop",  # when a save fails, as on a full disk: stop, or, of one process, continue
            },
            "cluster": cluster(),
            # of the features of a model of images, at evaluations, such as "knn(20) | few_shot(10) | linear"; "" = none
            "probes": "",
            "sampling": sampling(),
            "wandb": "",  # project of Weights & Biases to write to as well, if it is installed; "" = none
        }
    )


def objective() -> dict:
    """What is learned."""
    return {
        # classification | regression | tagging | span_extraction | causal_lm | masked_lm | pretraining | distillation |
        # bidirectional_lm | sequence_to_sequence | masked_reconstruction | distilled_classification | detection |
        # reinforcement
        "name": "classification",
        "label_smoothing": 0.0,  # this part of the target goes to all classes evenly, in training
        # of both models' logits; 0 = 2 in distillation, in distilled_classification the teacher's likeliest class alone
        "temperature": 0.0,
        # of the losses: soft targets, hidden words, cosine in distillation (() = (5, 2, 1)), labels and teacher in
        # distilled_classification (() = (0.5, 0.5)), class, distance, generalised IoU in detection (() = (1, 5, 2))
        "weights": (),
        "mixup": 0.0,  # a of the Beta(a, a) that examples are mixed by (of labelled images); 0 = not
        "cutmix": 0.0,  # a of the Beta(a, a) of the boxes cut into images; with mixup either, evenly; 0 = not
        "binary": False,  # each class is there or not, for itself (classification)
        "scheduled_sampling": 0.0,  # this part of a seq2seq's tokens is its own in the end, in training
        "kl": 0.0,  # what the divergence from the base costs (reinforcement)
        "decay": "",  # of the part of the others: linear (as "") | exponential | inverse_sigmoid
    }


def cluster() -> dict:
    """What a job of `--cluster=slurm` asks for; "" and 0 = the cluster's own."""
    return {
        "partition": "",
        "account": "",
        "qos": "",
        "constraint": "",
        "nodes": 1,
        "tasks_per_node": 1,  # processes of the run: one for each GPU, or one for all
        "gpus_per_node": 0,
        "cpus_per_task": 0,
        "memory_gb": 0,  # of a node
        "minutes": 1440,  # then the job is requeued, and the run goes on
        "save_seconds": 120,  # before the time is over, the run is told to save
        "requeues": 1000,  # at most, for want of time
        "parallel": 0,  # runs of a sweep at the same time; 0 = all
        "setup": (),  # commands before the run's, such as "module load cuda"
    }


def experts() -> dict:
    """Which runs of svf, all of one base, change the model before --mode=generate, or before a run's first step."""
    return {
        "paths": (),  # their workdirs; () = none
        # few_shot: mixed, so that the loss of `examples` is small | prompt: the one whose folder's name is the model's
        # answer to `question`, asked of the prompt, or of the examples
        "choice": "few_shot",
        "examples": 16,  # so many of the training data
        "question": "{text}\n### {name}\n",
        "classifier": "",  # workdir of another run of svf that answers it; "" = the base does
    }


def optimizer() -> dict:
    """How it is learned."""
    return {
        "name": "adamw",  # adamw | sgd | adafactor | lion | lars
        "learning_rate": 1e-3,  # the schedule's peak
        "schedule": "cosine",  # constant | cosine | linear | rsqrt | transformer
        **duration("warmup"),  # linear, from 0; part of the total
        "end_factor": 0.0,  # cosine and linear end at this part of the peak
        "b1": 0.9,  # decay of the first moment; momentum of sgd
        "b2": 0.999,  # decay of the second moment
        "epsilon": 1e-8,  # added to the root of the second moment
        "weight_decay": 0.0,  # decoupled, times the learning rate
        "no_decay": ("bias$", "scale$"),  # no weight decay where one of these is found in the path
        "clip_norm": 1.0,  # of the global gradient; 0 = no clipping
        "frozen": (),  # parameters in whose path one of these is found are not trained
        "frozen_layers": 0,  # so many of the first layers are not trained, nor what comes before them
        "layer_decay": 0.0,  # each layer learns at this part of the rate of the next one; 0 = at the same
        "lr_multipliers": (),  # (regular expression, factor) pairs of learning rates by path
    }


def sampling() -> dict:
    """What a language model writes at evaluations and with --mode=generate."""
    return {
        "prompt": "\n",
        "num_samples": 0,
        "max_new_tokens": 128,
        "temperature": 1.0,  # 0 = always the likeliest token
        "top_k": 0,  # only the k likeliest tokens; 0 = all
        "top_p": 0.0,  # only the likeliest tokens that together reach this probability; 0 = all
        "repetition_penalty": 1.0,  # above 1, tokens that were there before are less likely
        "no_repeat_ngram_size": 0,  # no sequence of so many tokens comes twice; 0 = it may
        "min_new_tokens": 0,  # no text ends before
        "forced_first_token": placeholder(int),  # the id that a text starts with; None = the model's choice
        "best_of": 1,  # samples that a text is the best of, by its tokens' mean log-probability
        "contrast": "",  # workdir of a weaker run, whose log-probability is subtracted (--mode=generate)
        "draft": "",  # workdir of a smaller run, whose drafts the model checks: faster (--mode=generate)
        "num_drafted": 4,  # tokens at a time
        "num_beams": 1,  # above 1: beam search, which needs temperature 0
        "length_penalty": 1.0,  # of beam search: above 0 prefers longer texts
    }


def duration(name: str) -> dict:
    """The keys of a duration, all unset."""
    return {f"{name}_{unit}": placeholder(int if unit in ("steps", "examples") else float) for unit in UNITS}


UNITS = ("steps", "epochs", "examples", "percent")


def data() -> dict:
    """What `data.load` takes."""
    return {
        # digits | shapes | stdlib | cldr | text:PATH | pairs:PATH | labels:PATH | conllu:PATH | squad:PATH |
        # folder:PATH | idx:PATH | cifar:PATH | tfds:NAME[/CONFIG][:VERSION]
        "source": "digits",
        # images | masked_images | detection | next_token | masked_tokens | next_sentence | sentence_order |
        # span_corruption | denoising | pairs | continuations | classification | regression | tagging | spans (see
        # data/tasks.py); "" = the source's
        "task": "",
        "batch_size": 128,  # examples of a step, on all devices together
        "evaluation_batch_size": 0,  # 0 = batch_size
        "train_split": "",  # a split of TFDS such as train[:99%]; "" = the source's own
        "validation_split": "",  # the same; for text:PATH and pairs:PATH other files
        "test_split": "",  # the same
        "data_dir": "",  # where TFDS data sets are prepared; "" = TFDS's default
        "max_examples": 0,  # so many training images, drawn by the seed, those of fewer among those of more; 0 = all
        "repeats": 1,  # copies of a training image in a batch, each changed by augment for itself
        "in_memory": False,  # decode all images once, at the start
        "image_key": "image",  # features of a TFDS set
        "label_key": "label",
        "text_key": "text",  # of pairs, two: "de,en"
        "start_token": "end_of_text",  # of outputs that are written for inputs; "pad" for a T5 from elsewhere
        # of the square that images are resized to, pixels; 0 = as they are, all of one size; of that which images with
        # boxes lie in, 0 = 64
        "image_size": 0,
        "shorter_side": 0,  # of images with boxes, if the longer one then fits in image_size; 0 = as it fits
        "max_boxes": 100,  # the most objects in an image
        "evaluation_crop": 1.0,  # the central part of a resized image, in training too unless augment crops
        "resample": "bilinear",  # of whole images and of crops: bilinear | bicubic
        # of training images, such as "crop | flip | randaugment(2, 10)", "jitter(0.4) | erase(0.25)" or "shift(1)", see
        # data/transforms.py; of images with boxes flip, crop and resize, see data/detection.py
        "augment": "",
        "mean": (0.5,),  # image = (pixel in 0..1 - mean) / std
        "std": (0.5,),
        # bytes | characters | words | bpe | bpe_words | wordpiece | unigram | path of a tokenizer.json; one in the
        # workdir comes first
        "tokenizer": "bytes",
        "vocab_size": 0,  # of sub-words (bpe and on), and of words (0 = all)
        "lowercase": False,  # upper and lower case are one (words, bpe_words, wordpiece, unigram)
        # tokens in a window of text; of pairs, in an input and in a target: longer ones are left out of the training,
        # and cut in evaluation
        "sequence_length": 0,
        # shorter lengths, rising: a training batch of pairs has pairs of about one length, and is padded to the
        # shortest of these, or to sequence_length, that all of them fit in
        "buckets": (),
        # tokens from one training window to the next, 0 = sequence_length, 1 = windows at every offset; of a long text
        # that is labelled or asked about, from one of its windows to the next, 0 = without overlap
        "stride": 0,
        # the same of evaluation windows: each token counts once, guessed from the sequence_length - evaluation_stride
        # before it at least, as far as there are so many
        "evaluation_stride": 0,
        "order": "",  # of windows: "" = shuffled | stream: each row of a batch goes on where it ended in the last one
        "long_text": "head",  # of labelled texts: head | tail | head_tail | key_sentences | segments
        "validation_fraction": 0.1,  # of a text without a validation split, by file if there are many; 0 = none
        "max_bytes": 0,  # of text, in whole documents; 0 = all
        "cache_dir": "",  # keeps token ids from run to run; "" = tokenise at each start
        "mask_rate": 0.15,  # the part of the tokens, or of the patches, that is hidden and to be guessed
        "masking": "random",  # of an image's patches: random | block | grid
        "patch_size": 0,  # of these, pixels; 0 = model.patch_size
        "mask_whole_words": False,  # all or none of a word's tokens are hidden
        "noise": "",  # of denoising, such as "permute_sentences | infill(0.3, 3)", see data/noise.py
        "workers": 0,  # processes that read ahead
        "threads": 0,  # threads in each that read ahead; 0 and 0 = read when asked for
    }


def layers(name: str, variant: str, **own) -> dict:
    """What every model of blocks takes, and what one has of its `own`; None is the variant's or the data's."""
    return {
        "name": name,
        "variant": variant,
        "depth": placeholder(int),
        "width": placeholder(int),
        "num_heads": placeholder(int),
        "mlp_dim": placeholder(int),  # of the feed-forward layers; None = 4 x width (Llama: 8/3, a multiple of 256)
        "dropout": 0.0,
        "remat": placeholder(str),  # None | dots | full: what the backward pass computes again
        "unroll": 1,  # layers in a turn of the compiled loop
        **own,
    }


def vit() -> dict:
    """What `models.vit.ViT` takes."""
    return layers(
        "vit",
        "mu",  # mu | Ti | S | B | L | H
        num_classes=placeholder(int),
        image_size=placeholder(int),  # pixels
        patch_size=16,  # pixels
        channels=placeholder(int),
        position="1d",  # none | 1d | 2d | relative | sincos2d | mae
        pooling="token",  # token | gap | map | tokens
        head="linear",  # linear | mlp | probe
        hybrid=(),  # blocks in each stage of a ResNet in front, such as (3, 4, 9); () = none
        num_registers=0,  # tokens that no output is read from
        layer_scale=0.0,  # where the factors of what each part adds begin; 0 = none
        qk_norm=False,  # queries and keys are normalised
        activation="gelu",  # gelu | gelu_tanh | relu | silu, here and below
        epsilon=1e-6,  # of LayerNorm
        stochastic_depth=0.0,  # rate of the last layer
        attend="auto",  # the strategy of attention: auto | dense | cudnn, here and below
    )


def deit() -> dict:
    """What `models.deit.DeiT` takes: a ViT's."""
    return vit() | {"name": "deit", "variant": "S", "distillation_head": True}  # mu | Ti | S | B


def mae() -> dict:
    """What `models.mae.MAE` takes: a ViT's, and of the decoder."""
    return vit() | {
        "name": "mae",
        "variant": "B",  # mu | B | L | H
        "num_classes": 0,
        "position": "mae",  # none | 1d | 2d | sincos2d | mae
        "mask_rate": placeholder(float),  # None = data.mask_rate
        "normalised": True,  # each patch's pixels are predicted less their mean, over their deviation
        "decoder_depth": placeholder(int),
        "decoder_width": placeholder(int),
        "decoder_num_heads": placeholder(int),
        "decoder_mlp_dim": placeholder(int),  # None = 4 x decoder_width
    }


def resnet() -> dict:
    """What `models.resnet.ResNet` takes; None is the variant's or the data's."""
    return {
        "name": "resnet",
        "variant": "50",  # 18 | 50 | 101 | bit50 | bit101
        "num_classes": placeholder(int),
        "image_size": placeholder(int),  # pixels
        "channels": placeholder(int),
        "depths": placeholder(tuple),  # blocks in each stage
        "widths": placeholder(tuple),  # channels of each stage
        "stem": placeholder(str),  # imagenet: to a quarter of the resolution | small: to all of it
        "stem_width": placeholder(int),
        "bottleneck": placeholder(bool),  # blocks of three convolutions with fewer channels inside
        "preactivation": placeholder(bool),  # norm and activation come before each convolution
        "norm": placeholder(str),  # batch | group (with standardised kernels)
        "groups": placeholder(int),  # of group norm
        "frozen": placeholder(bool),  # batch norm's statistics stay as they are in training
        "padding": placeholder(str),  # symmetric | same, as TensorFlow has it
        "epsilon": placeholder(float),  # of the norms
    }


def detr() -> dict:
    """What `models.detr.DETR` takes."""
    return layers(
        "detr",
        placeholder(str),  # r50 | r101
        backbone=resnet() | {"variant": placeholder(str)},
        num_classes=placeholder(int),
        image_size=placeholder(int),  # pixels
        num_queries=100,  # the most objects in an image
        decoder_depth=placeholder(int),  # None = depth
        activation="relu",
        placement="post",  # post | pre: where the norms are
    )


def swin() -> dict:
    """What `models.swin.Swin` takes; None is the variant's or the data's."""
    return {
        "name": "swin",
        "variant": "T",  # mu | T | S | B | L | V2-T | V2-S | V2-B | V2-L
        "num_classes": placeholder(int),
        "image_size": placeholder(int),  # pixels
        "patch_size": 4,  # pixels
        "channels": placeholder(int),
        "depths": placeholder(tuple),  # of the stages
        "width": placeholder(int),  # of the first stage
        "num_heads": placeholder(tuple),  # of the stages
        "window": placeholder(int),  # its side, tokens
        "version": placeholder(str),  # v1 | v2
        "trained_windows": (),  # of version 2's biases, if other windows than now; () = none
        "mlp_ratio": 4.0,  # of the feed-forward layers' width to the stage's
        "activation": "gelu",
        "epsilon": 1e-5,  # of LayerNorm
        "dropout": 0.0,
        "stochastic_depth": 0.0,  # rate of the last layer
        "remat": placeholder(str),  # None | dots | full: what the backward pass computes again
        "unroll": 1,  # layers in a turn of the compiled loop
    }


def texts(name: str, variant: str, **own) -> dict:
    """What models of texts take."""
    return layers(name, variant, vocab_size=placeholder(int), **own)


def gpt() -> dict:
    """What `models.gpt.GPT` takes."""
    return texts(
        "gpt",
        "small",  # small | medium | large | xl
        max_length=placeholder(int),  # tokens
        activation="gelu_tanh",
        epsilon=1e-5,  # of LayerNorm
        use_bias=True,  # in projections and norms
        attend="auto",
    )


def transformer() -> dict:
    """What `models.transformer.Transformer` takes."""
    return texts(
        "transformer",
        "base",  # tiny | base | big
        max_length=placeholder(int),  # tokens of an input, and of a target
        activation="relu",
        placement="post",  # post | pre: where the norms are
        norm="layer",  # layer | rms | batch | power
        norm_warmup=4000,  # steps in which power norm uses the batch's statistics
        epsilon=1e-6,  # of the norms
        position="sinusoidal",  # sinusoidal | learned | relative | rotary
        max_distance=16,  # of relative positions
        dropout=0.1,
        attend="auto",
    )


def seq2seq() -> dict:
    """What `models.seq2seq.Seq2Seq` takes; None is the variant's or the data's."""
    return {
        "name": "seq2seq",
        "variant": placeholder(str),  # rnnencdec | rnnsearch | luong | luong_local
        "vocab_size": placeholder(int),
        "cell": placeholder(str),  # rnn | gru | lstm
        "depth": placeholder(int),  # of the encoder, and of the decoder
        "width": placeholder(int),
        "embed_width": placeholder(int),  # of the tokens' vectors; None = width
        "bidirectional": placeholder(bool),  # the encoder
        "attention": placeholder(str),  # fixed (none) | additive | dot | general | concat
        "span": placeholder(str),  # of attention: global | monotonic | predictive
        "window": 10,  # how far monotonic and predictive attention see, tokens on each side
        "dropout": placeholder(float),
    }


def elmo() -> dict:
    """What `models.elmo.ELMo` takes; None is the variant's or the data's."""
    return {
        "name": "elmo",
        "variant": "original",  # small | medium | original
        "vocab_size": placeholder(int),
        "depth": 2,
        "width": placeholder(int),  # of what comes out of each direction
        "cell_dim": placeholder(int),  # of the LSTMs' memories
        "dropout": 0.1,
    }


def t5() -> dict:
    """What `models.t5.T5` takes."""
    return texts(
        "t5",
        "small",  # small | base | large | 3b | 11b | v1_1_small | v1_1_base | ... | v1_1_xxl
        decoder_depth=placeholder(int),  # None = depth
        head_size=placeholder(int),
        activation=placeholder(str),
        gated=placeholder(bool),  # the feed-forward layers
        tied=placeholder(bool),  # the embedding is the output projection too
        scale_decoder_outputs=placeholder(bool),  # None = as tied
        buckets=32,  # of distances between tokens
        max_distance=128,  # tokens; those farther apart share a bucket
        epsilon=1e-6,  # of RMSNorm
    )


def bart() -> dict:
    """What `models.bart.BART` takes."""
    return texts(
        "bart",
        "base",  # base | large
        max_length=placeholder(int),  # tokens, of the input and of the output
        decoder_depth=placeholder(int),  # None = depth
        activation="gelu",
        scale_embedding=False,
        position="learned",  # learned | sinusoidal
        embed_norm=True,
        logits_bias=False,
        attention_dropout=0.0,  # of the attention weights
        activation_dropout=0.0,  # of the hidden layers
        attend="auto",
    )


def transformer_xl() -> dict:
    """What `models.transformer_xl.TransformerXL` takes."""
    return texts(
        "transformer_xl",
        "standard",  # standard | large
        max_length=placeholder(int),  # tokens of a segment
        memory_length=placeholder(int),  # tokens before it that it sees; needs data.order="stream" if above 0
        activation="relu",
        epsilon=1e-5,  # of LayerNorm
        attention_dropout=0.0,  # of the attention weights
    )


def llama() -> dict:
    """What `models.llama.Llama` takes."""
    return texts(
        "llama",
        "llama2-7b",  # llama2-7b | llama2-13b | llama2-70b | llama3-8b | llama3.2-1b | mistral-7b
        max_length=placeholder(int),  # tokens
        num_kv_heads=placeholder(int),  # of keys and values; None = num_heads
        head_size=placeholder(int),  # None = width / num_heads
        window=placeholder(int),  # tokens that each one sees, itself among them; None = all
        tied=placeholder(bool),  # the embedding's table gives the logits too
        rope_base=placeholder(float),  # 1 / the slowest rotary frequency
        rope_scaling=placeholder(str),  # default | linear | llama3 | yarn: for longer sequences than the training's
        rope_factor=placeholder(float),  # how much longer
        rope_length=placeholder(int),  # of the training's sequences; None = max_length
        rope_turns=placeholder(tuple),  # llama3, yarn: slowed below the first, kept above the second number of turns
        activation="silu",
        epsilon=1e-5,  # of RMSNorm
        attend="auto",
    )


def bert(name: str = "bert", **own) -> dict:
    """What `models.bert.BERT` and its descendants take."""
    return texts(
        name,
        "base",  # tiny | mini | small | medium | base | large, see the model's VARIANTS
        max_length=placeholder(int),  # tokens
        num_segments=placeholder(int),  # texts in a row; 0 = their vectors are left out
        # none | pooler | masked_lm | pretraining | next_sentence | classification | tagging | span | choice | replaced
        head=placeholder(str),
        num_classes=2,  # of classification and tagging; None = the data's
        activation=placeholder(str),
        epsilon=placeholder(float),  # of LayerNorm
        dropout=0.1,
        head_dropout=placeholder(float),  # before the classifier; None = dropout
        attend="auto",
        **own,
    )


def roberta(name: str = "roberta") -> dict:
    """What `models.roberta.RoBERTa` takes: also the id of the padding token."""
    return bert(name, pad_id=1)


def embed_width(name: str) -> dict:
    """What `models.albert.ALBERT` and `models.electra.ELECTRA` take: also the width of the words' vectors."""
    own = {"num_groups": 1} if name == "albert" else {}
    return bert(name, embed_width=placeholder(int), **own)


def bigbird() -> dict:
    """What `models.bigbird.BigBird` takes: BERT's, and who sees whom."""
    return bert(
        "bigbird",
        attention_type="block_sparse",  # block_sparse | original_full
        block_size=64,  # tokens
        num_random_blocks=3,  # that a block sees beside its neighbours, the first and the last
        random_blocks="seeded",  # seeded | first: the first block again, as the published code evaluates
        seed=0,  # of the random blocks
    )


MODELS = {
    "albert": partial(embed_width, "albert"),
    "bart": bart,
    "bert": bert,
    "bigbird": bigbird,
    "deit": deit,
    "detr": detr,
    "distilbert": partial(bert, "distilbert"),
    "electra": partial(embed_width, "electra"),
    "elmo": elmo,
    "gpt": gpt,
    "llama": llama,
    "mae": mae,
    "resnet": resnet,
    "roberta": roberta,
    "seq2seq": seq2seq,
    "swin": swin,
    "t5": t5,
    "transformer": transformer,
    "transformer_xl": transformer_xl,
    "vit": vit,
    "xlmr": partial(roberta, "xlmr"),
}
