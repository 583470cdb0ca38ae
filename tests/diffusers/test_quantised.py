"""Quantised and cast weights beside the methods, which touch no linear layer, and under a LoRA."""

from contextlib import nullcontext

import pytest
import tiny
import torch
from tiny import built, call
from training_runs import losses

import foveate
from foveate import HilbertA, ToMA
from foveate.training.distill import distill
from foveate.training.run import RunOptions
from foveate.training.student import Recipe

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.slow]

torchao = pytest.importorskip("torchao.quantization", reason="make test-quantised installs it")
gguf = pytest.importorskip("gguf")
bitsandbytes = pytest.importorskip("bitsandbytes")

MERGING = {"tile": (4, 4), "skip": 0}


def quantised(config):
    return lambda model: torchao.quantize_(model, config, lambda module, name: isinstance(module, torch.nn.Linear))


def cast(model):
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


def replaced(make):
    """Every linear layer that has whole groups of 32 inputs, replaced by what `make` returns for it."""

    def change(model):
        for parent in [*model.modules()]:
            for name, linear in [*parent.named_children()]:
                if type(linear) is torch.nn.Linear and linear.in_features % 32 == 0:
                    setattr(parent, name, make(linear))

    return change


def gguf_linear(linear):
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    q8 = gguf.GGMLQuantizationType.Q8_0
    weight = torch.from_numpy(gguf.quants.quantize(linear.weight.numpy(), q8))
    made = GGUFLinear(linear.in_features, linear.out_features, linear.bias is not None, compute_dtype=torch.float32)
    made.weight, made.bias = GGUFParameter(weight, quant_type=q8), linear.bias
    return made


def nf4_linear(linear):
    sides = linear.in_features, linear.out_features
    made = bitsandbytes.nn.Linear4bit(*sides, linear.bias is not None, torch.float32, quant_type="nf4")
    made.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
    made.bias = linear.bias
    return made.to("cpu")


WEIGHTS = {
    "int8": quantised(torchao.Int8WeightOnlyConfig()),
    "int8 dynamic": quantised(torchao.Int8DynamicActivationInt8WeightConfig()),
    "float8": quantised(torchao.Float8WeightOnlyConfig()),
    "layerwise casting": cast,
    "gguf": replaced(gguf_linear),
    "nf4": replaced(nf4_linear),
}


CASES = [  # families and orders alternate
    (change, ("flux", "wan", "sdxl")[(i + j) % 3], when)
    for i, change in enumerate(WEIGHTS)
    for j, when in enumerate(("before", "after"))
]


@pytest.mark.parametrize(("change", "name", "when"), CASES)
def test_methods_run_on_changed_weights(name, change, when):
    def output(*methods):
        model, x = built(name, dtype=torch.float32)
        if when == "before" or not methods:
            WEIGHTS[change](model)
        with foveate.apply(model, *methods) if methods else nullcontext() as run:
            if when == "after" and methods:
                WEIGHTS[change](model)
            out = call(model, x)
            assert run is None or not any(row.why for row in run.summary().layers)
        return out

    dense = output()
    near = {"rtol": 1e-2, "atol": 2e-2} if "dynamic" in change else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(output(HilbertA(tiles=1)), dense, **near)
    torch.testing.assert_close(output(ToMA(keep=0.999, weights="hard", **MERGING)), dense, **near)
    for method in (HilbertA(tiles=2), ToMA(keep=0.5, **MERGING)):
        assert (output(method) - dense).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without:UserWarning")
@torch.enable_grad()
@pytest.mark.parametrize("change", ["int8", "float8", "layerwise casting"])
def test_a_lora_is_distilled_on_changed_weights(change, tmp_path):
    pipe = tiny.pipeline()
    WEIGHTS[change](pipe.transformer)
    recipe = Recipe(method=HilbertA(tiles=4), optimizer="adamw", rate=1e-2, batch=2)
    assert distill(tmp_path, pipe, recipe, tiny.REQUEST, tiny.PROMPTS, steps=5, options=RunOptions(at_once=2))
    (_, first), *_, (_, last) = losses(tmp_path)
    assert last < first / 2
