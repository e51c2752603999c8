"""Targets, the reading of optimized HLO, and plans of compiled programs."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest

from benchmarks import plans
from lineage.configs import cli
from lineage.train.compiler import compile, targets
from lineage.train.compiler.chips import peak_flops
from lineage.train.compiler.hlo import Module, dimensions, size
from lineage.train.compiler.plan import ATTENTION_EFFICIENCY, DROPOUT_EFFICIENCY, MATMUL_EFFICIENCY, Plan
from lineage.train.experiment import Experiment
from lineage.train.loop import compile_step
from lineage.train.profiling.estimates import RESOURCE_EXHAUSTED

TINY = Path(__file__).parents[1] / "tiny.py"
V5E, H100 = targets.BY_TARGET["v5e"], targets.BY_TARGET["h100"]

KERNEL = """ENTRY %main (q: bf16[8,12,1024,64], k: bf16[8,12,1024,64]) -> bf16[8,12,1024,64] {
  %q = bf16[8,12,1024,64]{3,2,1,0} parameter(0)
  %k = bf16[8,12,1024,64]{3,2,1,0} parameter(1)
  %splash_fwd = bf16[8,12,1024,64]{3,2,1,0} custom-call(%q, %k), custom_call_target="tpu_custom_call", data={{
"block":"512"
}}, metadata={op_name="jit(f)/attention/visits_3_of_4_blocks/splash_fwd/call"}
  ROOT %copy = bf16[8,12,1024,64]{3,2,1,0} copy-done(%splash_fwd)
}
"""

GPU_KERNELS = """ENTRY %main (q: bf16[8,1024,12,64]) -> bf16[8,1024,12,64] {
  %q = bf16[8,1024,12,64]{3,2,1,0} parameter(0)
  %causal = bf16[8,1024,12,64]{3,2,1,0} custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", \
metadata={op_name="jit(f)/forward"}, backend_config={"mask_type": "CAUSAL"}
  %window = bf16[8,1024,12,64]{3,2,1,0} custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", \
metadata={op_name="jit(f)/window"}, backend_config={"mask_type": "CAUSAL", "sliding_window_length": 256}
  ROOT %dropped = bf16[8,1024,12,64]{3,2,1,0} custom-call(%q, %q, %q), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(f)/attention_of_500000000000_flops/pallas_call"}
}
"""

PROGRAM = """HloModule jit_step, input_output_alias={ {0}: (0, {}, may-alias), {1}: (1, {}, may-alias) }, entry={}

%fused (p0: f32[8,1024], p1: s32[]) -> f32[1,1024] {
  %p0 = f32[8,1024]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %slice = f32[1,1024]{1,0} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,1024}
}

%body (state: (s32[], bf16[64,64])) -> (s32[], bf16[64,64]) {
  %state = (s32[], bf16[64,64]{1,0}) parameter(0)
  %x = bf16[64,64]{1,0} get-tuple-element(%state), index=1
  %dot = bf16[64,64]{1,0} dot(%x, %x), lhs_contracting_dims={1}, metadata={op_name="jit(f)/while/layer_3/mlp/up/dot"}
  %add = bf16[64,64]{1,0} fusion(%dot), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"1503"}
  ROOT %next = (s32[], bf16[64,64]{1,0}) tuple(%add)
}

%condition (state: (s32[], bf16[64,64])) -> pred[] {
  %state = (s32[], bf16[64,64]{1,0}) parameter(0)
  %limit = s32[] constant(12)
  ROOT %less = pred[] compare(%state, %limit), direction=LT
}

%short (a: f32[16384,1024]) -> f32[16384,1024] {
  %a = f32[16384,1024]{1,0} parameter(0)
  ROOT %one = f32[16384,1024]{1,0} fusion(%a), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"1503"}
}

%long (b: f32[16384,1024]) -> f32[16384,1024] {
  %b = f32[16384,1024]{1,0} parameter(0)
  ROOT %two = f32[16384,1024]{1,0} fusion(%b), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"150300"}
}

ENTRY %main (w: f32[8,1024], i: s32[]) -> f32[16384,1024] {
  %w = f32[8,1024]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %row = f32[1,1024]{1,0} fusion(%w, %i), kind=kLoop, calls=%fused
  %loop = (s32[], bf16[64,64]{1,0}) while(%i), condition=%condition, body=%body
  %gathered = (bf16[1000], bf16[16000]) all-gather-start(%w), dimensions={0}
  %work = bf16[64]{0} fusion(%row), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"150"}
  %done = bf16[16000]{0} all-gather-done(%gathered)
  %sum = f32[1000]{0} all-reduce(%work), to_apply=%fused
  ROOT %chosen = f32[16384,1024]{1,0} conditional(%i, %w, %w), branch_computations={%short, %long}
}
"""


@pytest.fixture(scope="module")
def plan():
    return Plan(PROGRAM, V5E)


def test_sizes_and_dimensions():
    assert size("(bf16[2,3]{1,0}, f32[])") == 16
    assert size("bf16[2,3]{1,0:T(8,128)S(1)}", in_main_memory=True) == 0
    assert size("pred[7]") == 7
    assert dimensions("f32[4,5]{1,0}") == [4, 5]
    assert dimensions("f32[]") == []


def test_module_reads_computations_loops_and_donation():
    module = Module(PROGRAM)
    assert module.entry == "main"
    assert list(module.computations) == ["fused", "body", "condition", "short", "long", "main"]
    assert module.donated == 2
    main = module.computations["main"]
    assert module.trips(main["loop"]) == 12
    assert main["row"].operands == ("w", "i")
    assert module.moved(main["row"]) == 4096 + 4096 + 4  # the slice read, the result, the index
    body = module.computations["body"]
    assert module.products(body["dot"]) == (2 * 64**3, False)
    assert body["dot"].label == "mlp/up/dot"


def test_known_trip_count_is_preferred():
    text = PROGRAM.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}')
    module = Module(text)
    assert module.trips(module.computations["main"]["loop"]) == 5


def test_loops_count_their_trips(plan):
    (dot,) = (row for row in plan.rows if row.kind == "matmul")
    roofline = max(2 * 64**3 / V5E.peak / MATMUL_EFFICIENCY, 3 * 2 * 64**2 / V5E.bandwidth)
    assert dot.seconds == pytest.approx(12 * roofline)
    assert dot.times == 12
    assert not dot.estimated
    (add,) = (row for row in plan.rows if row.label == "add")
    assert add.seconds == pytest.approx(12e-6)  # 1,503 cycles at 1.503 GHz
    assert add.estimated


def test_the_slowest_branch_counts(plan):
    assert [row.label for row in plan.rows if row.label in ("one", "two")] == ["two"]


def test_collectives_are_hidden_by_the_work_between_start_and_done(plan):
    gather, reduce = plan.collectives
    assert (gather.kind, gather.bytes) == ("all-gather", 32000)
    assert gather.seconds == pytest.approx(32000 / V5E.link)
    assert gather.hidden == pytest.approx(150 / 1.503e9)
    assert (reduce.kind, reduce.hidden) == ("all-reduce", 0)
    assert reduce.seconds == pytest.approx(2 * 4000 / V5E.link)
    assert plan.exposed == pytest.approx(gather.seconds - gather.hidden + reduce.seconds)
    assert plan.seconds == pytest.approx(plan.estimated + plan.roofline + plan.exposed)


@pytest.mark.parametrize("channels", [64, 48])
def test_a_kernel_takes_the_time_of_the_blocks_that_it_visits(channels):
    (row,) = Plan(KERNEL.replace("64]", f"{channels}]"), V5E).rows
    assert row.label == "visits_of_blocks/splash_fwd/call"
    assert row.seconds == pytest.approx(3 / 4 * 4 * 8 * 12 * 1024**2 * 128 / V5E.peak / ATTENTION_EFFICIENCY)


def test_kernels_of_gpus_take_the_time_of_their_products():
    causal, window, dropped = (row.seconds * H100.peak for row in Plan(GPU_KERNELS, H100).rows)
    tile = 4 * 8 * 12 * 64 * 128 * 128 / ATTENTION_EFFICIENCY
    assert causal == pytest.approx(tile * sum(range(1, 9)), rel=1e-3)  # the tiles up to the diagonal
    assert window == pytest.approx(tile * sum(min(3, n) for n in range(1, 9)), rel=1e-3)  # and at most 2 before it
    assert dropped == pytest.approx(500e9 / DROPOUT_EFFICIENCY)


def test_large_buffers_are_listed(plan):
    assert {shape: (one.bytes, one.times) for shape, one in plan.buffers.items()} == {"f32[16384,1024]": (2**26, 2)}


def test_costliest_operations_are_merged_by_origin():
    text = PROGRAM.replace("estimated_cycles", "other")  # all by the roofline
    rows = Plan(text, dataclasses.replace(V5E, clock=None)).costliest()
    assert rows == sorted(rows, key=lambda row: -row.seconds)
    assert len({(row.label, row.kind) for row in rows}) == len(rows)


def test_flops_of_a_program_compiled_here():
    """The products of a scan of matrix products and of a convolution, as XLA's CPU compiler writes them."""

    def function(x, w, image, kernel):
        x, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, w)
        return x, jax.lax.conv_general_dilated(
            image, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    shapes = (16, 32), (5, 32, 32), (2, 8, 8, 3), (3, 3, 3, 4)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    module = Module(jax.jit(function).lower(*arguments).compile().as_text())
    found = 0

    def add(name, times):
        nonlocal found
        for one in module.computations[name].values():
            if one.kind == "while":
                add(one.called("body"), times * module.trips(one))
            elif one.kind == "call":
                add(one.called("to_apply"), times)
            else:
                found += times * module.products(one)[0]

    add(module.entry, 1)
    assert found == 5 * 2 * 16 * 32 * 32 + 2 * (2 * 6 * 6 * 4) * (3 * 3 * 3)


@pytest.mark.parametrize(
    ("kind", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H200", "float32", 494.7e12),
        ("NVIDIA A100-SXM4-40GB", "float16", 312e12),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2e12),
        ("TPU v5 lite", "bfloat16", 197e12),
        ("TPU v5", "bfloat16", 459e12),
        ("TPU v6 lite", "bfloat16", 918e12),
        ("NVIDIA H200", "int8", None),
        ("NVIDIA GeForce RTX 4090 D", "bfloat16", None),
        ("cpu", "float32", None),
    ],
)
def test_peaks(kind, dtype, peak):
    assert peak_flops(kind, dtype) == peak


@pytest.mark.parametrize(("precision", "peak"), [("bfloat16", 989.4e12), ("float32", 494.7e12)])
def test_the_ideal_time_is_that_at_the_peak_of_the_precision(precision, peak):
    plan, sizes = Plan(PROGRAM, H100), dict.fromkeys(("arguments", "temporaries", "host", "peak", "leaves"), 0)
    compiled = compile.Compiled("gpt", plan, **sizes, flops=1e9, precision=precision, seconds=0.0)
    assert compiled.ideal == pytest.approx(1e9 / peak)


@pytest.mark.parametrize(
    ("text", "chip", "topology", "count"),
    [
        ("v5e:4x4", "v5e", "4x4", None),
        ("v5p:2x2x1", "v5p", "2x2x1", None),
        ("v6e:2x2/1", "v6e", "2x2", 1),
        ("h100x8", "h100", "8", None),
        ("b200x64", "b200", "64", None),
    ],
)
def test_targets_are_parsed(text, chip, topology, count):
    target = targets.parse(text)
    assert target == targets.Target(targets.BY_TARGET[chip], topology, count)
    assert str(target) == text


@pytest.mark.parametrize("text", ["", "v5e", "v5e:4", "v7x:4x4", "h100", "h100:2x2", "v5ex8", "a100x8"])
def test_unknown_targets_are_refused(text):
    with pytest.raises(ValueError, match=f"target is '{text}': it must be a chip and a topology"):
        targets.parse(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("h100x12", "several hosts have 8 GPUs each"),
        ("h100x0", "it must have at least one device, and no more than its topology"),
        ("v5e:2x2/5", "it must have at least one device, and no more than its topology"),
        ("v5p:2x2x1/0", "it must have at least one device, and no more than its topology"),
        ("v6e:2x2x2", "topologies of TPU v6e have 2 axes"),  # libtpu aborts the process
    ],
)
def test_devices_that_do_not_exist_are_refused(text, reason):
    with pytest.raises(ValueError, match=f"target is '{text}': {reason}"):
        targets.parse(text)


def test_config_of_a_gpu():
    text = targets.target_config(H100)
    assert "core_count: 132" in text
    assert "device_memory_size: 84942979072" in text
    assert text.count("{") == text.count("}")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("on HBM, the HLO temporaries (32.00G) exceeds available HBM (15.75G).", "it needs 32.00G of 15.75G HBM."),
        ("in memory space hbm. Used 20.1G of 15.75G hbm.\nLargest", "it needs 20.1G of 15.75G HBM."),
        ("elsewhere.\nLargest", "RESOURCE_EXHAUSTED: Ran out of memory elsewhere."),
    ],
)
def test_programs_that_need_too_much_memory_are_refused(text, reason, monkeypatch):
    error = jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: Ran out of memory {text}", RESOURCE_EXHAUSTED)
    monkeypatch.setattr(compile, "lower", lambda experiment, step: (Mock(**{"compile.side_effect": error}), 0))
    with pytest.raises(MemoryError, match=f"^{re.escape(f'gpt does not fit: {reason}')}$"):
        compile.compile_step(Experiment.__new__(Experiment), targets.parse("v5e:2x2/1"), title="gpt")


def test_batch_of_a_compiled_step_is_that_of_its_config(tiny):
    experiment = Experiment(tiny("gpt", {"loader.evaluation_batch_size": 4}), devices=jax.devices()[:3])
    lowered, _ = compile.lower(dataclasses.replace(experiment, devices=jax.devices()[:2]), "evaluate")
    assert lowered.in_avals[0][1]["tokens"].shape[0] == 4
    with pytest.raises(ValueError, match=r"a batch of 4 examples cannot be split evenly over 3 devices"):
        compile.lower(experiment, "evaluate")


def test_other_errors_of_the_compiler_are_raised(monkeypatch):
    error = jax.errors.JaxRuntimeError("INTERNAL: Used 20.1G of 15.75G hbm", 13)
    monkeypatch.setattr(compile, "lower", lambda experiment, step: (Mock(**{"compile.side_effect": error}), 0))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"^INTERNAL"):
        compile.compile_step(Experiment.__new__(Experiment), targets.parse("v5e:2x2/1"))


def figures_of(config, target, *flags):
    """Return the figures of a step, compiled in another process; skip the test if the compiler is not installed."""
    pytest.importorskip("libtpu" if targets.parse(target).chip.gpu is None else "jax_cuda13_plugin")
    command = [sys.executable, "-m", "lineage.launch", "compile", f"--config={config}", f"--target={target}", "--json"]
    environment = os.environ | {"XLA_FLAGS": ""}
    run = subprocess.run([*command, *flags], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout[run.stdout.index("{") :])


@pytest.mark.parametrize(
    "target",
    [
        pytest.param("v5e:2x2", marks=pytest.mark.thorough),
        *(pytest.param(target, marks=pytest.mark.slow) for target in ("v5e:2x2/1", "h100x1", "h100x4")),
    ],
)
def test_program_of_a_shallow_gpt(target):
    """Check a GPT-2 of two layers, with its paper's config, on one chip and with FSDP on four."""
    chips = 1 if target in ("v5e:2x2/1", "h100x1") else 4
    changes = {"model.depth": 2, "model.unroll": 2, "loader.batch_size": 8 * chips, "mesh.data": 1, "mesh.fsdp": chips}
    figures = figures_of("gpt2_openwebtext", target, *(f"--config.{name}={value}" for name, value in changes.items()))
    shapes = [(row["shape"], dimensions(row["shape"])) for row in figures["buffers"]]  # of 64 MiB or more
    assert any(axes[-1] == 50_304 for _, axes in shapes)  # logits in bfloat16
    assert not [shape for shape, axes in shapes if axes[-2:] == [1024, 1024]]  # weights of attention
    assert not [shape for shape, axes in shapes if shape.startswith("f32") and axes[-2:] == [1024, 50_304]]
    kinds = {row["kind"] for row in figures["collectives"]}
    assert kinds == set() if chips == 1 else "all-gather" in kinds and "collective-permute" not in kinds
    assert figures["donated"] >= figures["leaves"]
    assert figures["f32_matmul"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("step", ["train", "evaluate", "decode"])
def test_steps_compile_for_a_tpu(step):
    figures = figures_of(f"{TINY}:gpt", "v5e:2x2", f"--step={step}")
    assert figures["fits"]
    assert 0 < figures["seconds"] < 0.1
    assert figures["donated"] >= figures["leaves"]
    assert figures["estimated"] > figures["roofline"]
    assert step == "decode" or "all-reduce" in {row["kind"] for row in figures["collectives"]}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("bert_pretrain", ["8x512x768"]),  # gradients of masked positions, of which only those of padding repeat
        ("t5_c4", []),
        ("transformer_xl_wikitext103", []),
    ],
)
def test_gradients_of_repeated_vectors_are_summed_in_float32(name, allowed):
    config, _ = cli.load(name)
    cli.override(config, {"model.depth": 1, "model.unroll": 1, "loader.batch_size": 8, "grad_accum_steps": 1})
    of = Experiment(compile.without_data(config), None, jax.devices()[:1])
    text = compile.lower(of, "train")[0].as_text()
    sums = [
        (shape, kind)
        for options, shape, kind in re.findall(
            r'"stablehlo\.scatter"\((.*?)\}\) : \(tensor<([\dx]+)x(\w+)>', text, re.DOTALL
        )
        if "unique_indices = true" not in options
    ]
    assert "f32" in {kind for _, kind in sums}
    assert [shape for shape, kind in sums if kind == "bf16"] == allowed


@pytest.mark.slow
@pytest.mark.parametrize("name", plans.recorded())
def test_plan_is_not_worse_than_recorded(name):
    _, target, _ = plans.ROWS[name]
    pytest.importorskip("libtpu" if targets.parse(target).chip.gpu is None else "jax_cuda13_plugin")
    found, record = plans.compiled(name), plans.recorded()[name]
    assert found["fits"] == record["fits"]
    assert found["seconds"] <= plans.WORSE * record["seconds"]
    assert found["peak"] <= plans.WORSE * record["peak"]
    assert found["donated"] >= record["donated"]
    assert found["f32_matmul"] <= record["f32_matmul"] + 0.01


def test_recorded_plans_are_donated_and_compute_in_bfloat16():
    record = plans.recorded()
    assert record.keys() <= plans.ROWS.keys()
    for name, row in record.items():
        assert row["donated"] >= row["leaves"], name
        assert row["f32_matmul"] < 0.01, name
    assert len(plans.table(record).splitlines()) == 2 + len(record)


@pytest.mark.thorough
def test_cpu_sums_the_gradients_of_unrolled_layers_once():
    """Check that no fusion reads something of every layer; otherwise, 97 operands are read."""
    config, _ = cli.load(f"{TINY}:vit")
    cli.override(config, {"model.depth": 6, "model.unroll": 6})
    experiment = Experiment(config, devices=jax.devices()[:1])
    text = compile_step(experiment, experiment.abstract_state).as_text()
    fusions = re.findall(r" fusion\((.*?)\), kind", text)
    assert 20 < max(operands.count("%") for operands in fusions) < 60
