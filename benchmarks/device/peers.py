"""PyTorch's side of `benchmarks.accelerator`: the same steps, compiled, in bfloat16 with float32 parameters.

Text models are from `transformers`, image models from timm in channels-last order. Attention is PyTorch's, which uses
flash attention if possible. Sizes are those of the same experiment, which this process constructs on the CPU.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # JAX, which provides the sizes of models and batches, must not use the device

import numpy as np
import torch
from torch.nn import functional

from benchmarks.device import ours
from benchmarks.device.ours import Rows, Run, Settings, measured

Loss = Callable[[dict[str, torch.Tensor]], torch.Tensor]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.set_float32_matmul_precision("high")
torch.backends.cudnn.benchmark = True


def check(settings: Settings) -> None:
    """Raise RuntimeError if full sizes would run on a CPU."""
    if DEVICE.type == "cpu" and not settings["on_cpu"]:
        raise RuntimeError("PyTorch finds no accelerator.")


def timed(function: Callable[[], Any], **facts: Any) -> tuple[dict[str, Any], Run]:
    """Return facts, and a function that times repeated calls; warm up."""
    run = measured(function, synchronize)
    run(0)
    return facts, run


def synchronize(_: Any = None) -> None:
    """Wait for the device."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def compiled(function: Callable, settings: Settings, mode: str | None = None) -> Callable:
    """Return the function compiled by Inductor, or only traced in a rehearsal; unchanged with "eager"."""
    if settings["backend"] == "eager":
        return function
    if settings["backend"] != "inductor":
        return torch.compile(function, dynamic=False, backend=settings["backend"])
    return torch.compile(function, dynamic=False, mode=mode or settings["mode"])


def training(settings: Settings) -> Rows:
    """Time the training step of an experiment: loss, gradients, clipping and the update by a fused optimizer.

    A first step compiles; then the model is in the memory of the host until it is measured.
    """

    def prepare():
        of = ours.experiment(settings)
        torch.manual_seed(0)
        model, loss_of = PEERS[type(of.model).__name__](of, settings)
        model.train()
        batch = {name: torch.from_numpy(array) for name, array in ours.random_batch(of).items()}
        if "image" in batch:
            model = model.to(memory_format=torch.channels_last)
            batch["image"] = batch["image"].permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
        loss_of, clip = compiled(loss_of, settings), of.config.optimizer.clip_norm
        low = of.run.precision == "bfloat16"
        placed = {}

        def once():
            if not placed:
                model.to(DEVICE)
                placed["optimizer"] = optimizer_of(of, model)
                placed["batch"] = {name: array.to(DEVICE) for name, array in batch.items()}
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=low):
                loss = loss_of(placed["batch"])
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            placed["optimizer"].step()
            placed["optimizer"].zero_grad(set_to_none=True)
            return loss

        once()
        placed.clear()
        model.to("cpu")
        torch.cuda.empty_cache()
        return {}, measured(once, synchronize)

    return {"training step": prepare}


def optimizer_of(of: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of an experiment's kind, in its fused form."""
    options = {"lr": 1e-4, "fused": True}
    if of.config.optimizer.name == "sgd":
        return torch.optim.SGD(model.parameters(), momentum=0.9, weight_decay=1e-4, **options)
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, **options)


def gpt2(of: Any, settings: Settings) -> tuple[torch.nn.Module, Loss]:
    """Return GPT-2 of `transformers`, or of a checkout of nanoGPT."""
    sizes = {"vocab_size": of.model.vocab_size, "n_layer": of.model.depth, "n_head": of.model.num_heads}
    sizes |= {"n_embd": of.model.width}
    length, rate = of.model.max_length, of.model.dropout
    if settings["nanogpt"]:
        sys.path.insert(0, settings["nanogpt"])
        from model import GPT, GPTConfig

        model = GPT(GPTConfig(block_size=length, dropout=rate, bias=of.model.use_bias, **sizes))
        return model, lambda batch: model(batch["tokens"].long(), batch["targets"].long())[1]
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), rate)
    model = GPT2LMHeadModel(GPT2Config(n_positions=length, **sizes, **rates))
    return model, partial(next_token_loss, model)


def next_token_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    """Return the loss of a language model of `transformers`, which is called with the options."""
    logits = model(batch["tokens"].long(), **options).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch["targets"].long().flatten())


def llama(of: Any, settings: Settings) -> tuple[torch.nn.Module, Loss]:
    """Return Llama of `transformers`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=of.model.vocab_size,
        hidden_size=of.model.width,
        intermediate_size=of.model.mlp_size,
        num_hidden_layers=of.model.depth,
        num_attention_heads=of.model.num_heads,
        num_key_value_heads=of.model.kv_heads,
        max_position_embeddings=of.model.max_length,
        tie_word_embeddings=of.model.tied,
        rms_norm_eps=of.model.epsilon,
    )
    model = LlamaForCausalLM(config)
    return model, partial(next_token_loss, model, use_cache=False)


def bert(of: Any, settings: Settings) -> tuple[torch.nn.Module, Loss]:
    """Return BERT of `transformers`, with logits at the masked positions only, as in Lineage."""
    from transformers import BertConfig, BertForPreTraining

    sizes = {"hidden_size": of.model.width, "num_hidden_layers": of.model.depth}
    sizes |= {"num_attention_heads": of.model.num_heads, "intermediate_size": of.model.mlp_size}
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), of.model.dropout)
    length = {"max_position_embeddings": of.model.max_length}
    model = BertForPreTraining(BertConfig(vocab_size=of.model.vocab_size, **sizes, **rates, **length))

    def loss_of(batch):
        inputs = {"token_type_ids": batch["segments"], "attention_mask": batch["tokens_mask"]}
        output = model.bert(batch["tokens"], **inputs)
        at = batch["masked_positions"].long()[..., None].expand(-1, -1, output[0].shape[-1])
        logits, pairs = model.cls(output[0].gather(1, at), output[1])
        words = functional.cross_entropy(logits.flatten(0, 1), batch["targets"].long().flatten())
        return words + functional.cross_entropy(pairs, batch["label"].long())

    return model, loss_of


def image_model(name: str, *fields: str, of: Any, **more: Any) -> tuple[torch.nn.Module, Loss]:
    """Return a model of timm, with fields of Lineage's model as options."""
    import timm

    options = {theirs: getattr(of.model, mine) for mine, theirs in (field.split(":") for field in fields)}
    model = timm.create_model(name, num_classes=of.model.num_classes, **options, **more)
    return model, lambda batch: functional.cross_entropy(model(batch["image"]), batch["label"].long())


def vit(of: Any, settings: Settings) -> tuple[torch.nn.Module, Loss]:
    """Return ViT of timm."""
    sizes = ("width:embed_dim", "depth:depth", "num_heads:num_heads", "patch_size:patch_size", "image_size:img_size")
    return image_model("vit_base_patch16_224", *sizes, of=of)


def resnet(of: Any, settings: Settings) -> tuple[torch.nn.Module, Loss]:
    """Return ResNet of timm."""
    return image_model("resnet50", "depths:layers", of=of)


def swin(of: Any, settings: Settings) -> tuple[torch.nn.Module, Loss]:
    """Return Swin of timm."""
    sizes = ("width:embed_dim", "depths:depths", "num_heads:num_heads", "window:window_size", "image_size:img_size")
    rate = of.model.stochastic_depth
    return image_model("swin_tiny_patch4_window7_224", *sizes, of=of, drop_path_rate=rate)


PEERS = {"GPT": gpt2, "Llama": llama, "BERT": bert, "ViT": vit, "ResNet": resnet, "Swin": swin}


def decoding(settings: Settings) -> Rows:
    """Time greedy generation after a prompt: one compiled step for each token, and a static cache."""
    from transformers import StaticCache

    of, new, prompt = ours.experiment(settings), settings["new"], settings["prompt"]
    dtype = torch.bfloat16 if of.run.precision == "bfloat16" else torch.float32
    model = PEERS[type(of.model).__name__](of, settings | {"nanogpt": ""})[0].to(DEVICE, dtype).eval()

    def forward(tokens, cache):
        return model(tokens, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)

    def prepare(batch):
        prompts = np.random.default_rng(0).integers(0, of.model.vocab_size, (batch, prompt))
        prompts = torch.from_numpy(prompts).to(DEVICE)
        cache = StaticCache(model.config, max_cache_len=prompt + new)
        token = torch.zeros((batch, 1), dtype=torch.long, device=DEVICE)
        step = compiled(forward, settings, mode="reduce-overhead")

        @torch.no_grad()
        def once():
            cache.reset()
            token.copy_(forward(prompts, cache))
            for _ in range(new - 1):
                token.copy_(step(token, cache))

        return timed(once, steps=new)

    return {f"decoding, batch {batch}": partial(prepare, batch) for batch in settings["batches"]}


def ceilings(settings: Settings) -> Rows:
    """Time a large matrix product and a pass over memory."""
    dtype = getattr(torch, settings["dtype"])
    size, length = settings["size"], settings["bytes"] // dtype.itemsize
    draw = partial(torch.randn, dtype=dtype, device=DEVICE)

    def product():
        a, b, out = draw(size, size), draw(size, size), draw(size, size)
        return timed(partial(torch.matmul, a, b, out=out))

    def copy():
        x, out = draw(length), draw(length)
        return timed(partial(torch.add, x, 1, out=out))

    return {"matrix product": product, "copy": copy}


def products(settings: Settings) -> Rows:
    """Time PyTorch's matrix products, forward and backward."""
    draw = partial(torch.randn, dtype=getattr(torch, settings["dtype"]), device=DEVICE)

    def prepare(tokens, inputs, features):
        x, kernel = (draw(shape).requires_grad_() for shape in ((tokens, inputs), (inputs, features)))
        cotangent = draw((tokens, features))
        return timed(lambda: torch.autograd.grad(x @ kernel, (x, kernel), cotangent))

    return {ours.product_name(*shape): partial(prepare, *shape) for shape in settings["shapes"]}


def convolutions(settings: Settings) -> Rows:
    """Time PyTorch's convolutions, forward and backward."""
    draw = partial(torch.randn, dtype=getattr(torch, settings["dtype"]), device=DEVICE)

    def prepare(pixels, inputs, features, size, stride):
        shapes = (settings["batch"], inputs, pixels, pixels), (features, inputs, size, size)
        image, kernel = (draw(shape).contiguous(memory_format=torch.channels_last).requires_grad_() for shape in shapes)
        convolve = partial(functional.conv2d, image, kernel, stride=stride, padding=size // 2)
        cotangent = torch.randn_like(convolve())
        return timed(lambda: torch.autograd.grad(convolve(), (image, kernel), cotangent))

    return {ours.convolution_name(*shape): partial(prepare, *shape) for shape in settings["shapes"]}


def embeddings(settings: Settings) -> Rows:
    """Time the gradient of PyTorch's table of float32 vectors, which mixed precision does not convert."""

    def prepare(tokens, vocabulary, width):
        table = torch.randn((vocabulary, width), device=DEVICE, requires_grad=True)
        indices = ours.zipf(np.random.default_rng(0), (tokens,), vocabulary)
        indices = torch.from_numpy(indices).long().to(DEVICE)
        output = functional.embedding(indices, table)
        cotangent = torch.randn_like(output)
        return timed(lambda: torch.autograd.grad(output, table, cotangent, retain_graph=True))

    return {ours.embedding_name(*shape): partial(prepare, *shape) for shape in settings["shapes"]}


def attention(settings: Settings) -> Rows:
    """Time PyTorch's fused attention in bfloat16, forward and backward."""

    def prepare(causal, kv_heads):
        heads = (settings["heads"], kv_heads, kv_heads, settings["heads"])
        shapes = [(settings["batch"], count, settings["length"], settings["channels"]) for count in heads]
        *inputs, cotangent = (torch.randn(s, dtype=torch.bfloat16, device=DEVICE) for s in shapes)
        for one in inputs:
            one.requires_grad_()
        grouped = {"enable_gqa": True} if kv_heads < settings["heads"] else {}

        def once():
            out = functional.scaled_dot_product_attention(*inputs, is_causal=causal, **grouped)
            torch.autograd.grad(out, inputs, cotangent)

        return timed(once)

    return {name: partial(prepare, *case) for name, case in ours.attention_cases(settings["heads"]).items()}
