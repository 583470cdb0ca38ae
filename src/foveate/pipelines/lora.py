# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false
"""Distilled LoRAs: LoRA files of diffusers with a method's options in their metadata."""

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from diffusers import FluxPipeline
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from foveate.diffusers.adapter import outside_compiled_code
from foveate.diffusers.apply import Handle, apply
from foveate.diffusers.preset import Preset
from foveate.methods import METHODS, ComposedMethod, Method
from foveate.pipelines.hub import fetch

__all__ = [
    "LORA_FILE",
    "Distilled",
    "MethodLike",
    "adapted",
    "find_lora",
    "load_lora",
    "pack_lora",
    "read_lora",
    "throughout",
    "using",
]

LORA_FILE = "pytorch_lora_weights.safetensors"
ANYWHERE = ("dense_layers", "start_percent", "end_percent", "min_tokens")  # where a method is active


class Distilled(NamedTuple):
    """A method together with the LoRA that was distilled for it.

    Attributes:
        method: The method with its options.
        size: (height, width) in pixels of the training images; None if the file does not say.
        weights: Checksum of the LoRA file.
        more: Further methods to apply.
    """

    method: Method
    size: tuple[int, int] | None = None
    weights: str = ""
    more: tuple[Method, ...] = ()

    @property
    def title(self) -> str:
        """Titles of the methods, marked as distilled."""
        return f"{' + '.join(part.title for part in self.parts)}, distilled"

    @property
    def parts(self) -> tuple[Method, ...]:
        """The methods."""
        return (self.method, *self.more)


def pack_lora(layers: Mapping[str, Tensor], method: Method, size: tuple[int, int]) -> bytes:
    """Content of a safetensors file for `pipe.load_lora_weights`.

    Args:
        layers: LoRA weights by name in the transformer; alpha equals the rank.
        method: Method that the weights were distilled for.
        size: (height, width) in pixels of the training images.
    """
    name = next(name for name, cls in METHODS.items() if type(method) is cls)
    about = json.dumps({"method": name, "options": asdict(method), "size": size})
    weights = {name: weight.contiguous() for name, weight in FluxPipeline.pack_weights(layers, "transformer").items()}
    return save(weights, {"format": "pt", "foveate": about})


def find_lora(lora: str) -> Path:
    """Path of the LoRA file of a path, folder or hub id.

    Raises:
        ValueError: If there is no such file.
    """
    path = Path(lora).expanduser()
    path = path / LORA_FILE if path.is_dir() else path
    if path.is_file():
        return path
    try:
        return fetch(lora, LORA_FILE)
    except ValueError as error:
        raise ValueError(f"cannot find the LoRA {lora}: {error}") from error


def read_lora(file: Path) -> Distilled | None:
    """The method that a LoRA was distilled for; None if foveate did not make it.

    Raises:
        ValueError: If the file is damaged or from another version of foveate.
    """
    try:
        with safe_open(file, "pt") as opened:
            about = (opened.metadata() or {}).get("foveate")
        if about is None:
            return None
        about = json.loads(about)
        method, size = METHODS[about["method"]](**about["options"]), about.get("size")
        return Distilled(method, tuple(size) if size else None, f"{crc32(file.read_bytes()):08x}")
    except SafetensorError as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is of another version of foveate, which knew {about}: update foveate") from error


def load_lora(pipeline: Any, file: Path) -> Distilled | None:
    """Load a LoRA into a pipeline; returns the method that it was distilled for, None if foveate did not make it.

    Raises:
        ValueError: If the file is damaged, from another version of foveate, or does not fit the model.
    """
    distilled = read_lora(file)
    if not hasattr(pipeline, "load_lora_weights"):
        raise ValueError(f"{type(pipeline).__name__} takes no LoRA: leave {file} out")
    try:
        pipeline.load_lora_weights(str(file.parent), weight_name=file.name)
    except (RuntimeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} does not fit this model: {str(error).strip().splitlines()[0]}") from error
    return distilled


def adapted(distilled: Distilled, asked: Method | ComposedMethod | Preset | None, options: set[str]) -> Distilled:
    """The distilled method in the layers and steps that `asked` names.

    Args:
        distilled: The method of the LoRA.
        asked: The method that the user asks for; None is dense.
        options: Names of the options that the user set.

    Raises:
        ValueError: If the two contradict each other.
    """
    if type(asked) is not type(distilled.method):
        other = asked.title if asked else "dense"
        raise ValueError(f"the LoRA was distilled for {distilled.method.title}, not {other}: leave one of them out")
    for name in sorted(options):
        if name not in ANYWHERE and (made := getattr(distilled.method, name)) != getattr(asked, name):
            raise ValueError(
                f"the LoRA was distilled for {name}={made}, not {getattr(asked, name)}: leave {name} out, "
                "or take another LoRA"
            )
    named = {name: getattr(asked, name) for name in options if name in ANYWHERE}
    return distilled._replace(method=replace(distilled.method, **named))


MethodLike = Method | ComposedMethod | Distilled | Preset
"""Anything that a pipeline can run with."""


def throughout(method: MethodLike, start: float = 0.0, end: float = 1.0, **options: Any) -> Any:
    """The same method in all steps, or in steps from `start` to `end` (fractions of the run), with these options.

    Of a schedule the last setting that is not dense remains. A preset loses its step cache: all steps are computed.
    """
    parts = tuple(replace(part.plain[-1], start_percent=start, end_percent=end, **options) for part in method.parts)
    if isinstance(method, Distilled):
        return method._replace(method=parts[0], more=parts[1:])
    return parts[0] if len(parts) == 1 else ComposedMethod(parts)


@contextmanager
def using(pipeline: Any, method: MethodLike | None) -> Generator[Handle | None]:
    """Context in which a pipeline runs with a method; None is dense.

    A LoRA in the pipeline is on only with a distilled method, and only in the steps in which the method is active.
    There it is merged into the weights if possible, which costs no time in a step; afterwards the weights are restored
    bit for bit.
    """
    lora, distilled = bool(getattr(pipeline, "get_list_adapters", dict)()), isinstance(method, Distilled)
    parts = method.parts if isinstance(method, Distilled) else (method,)
    if lora:
        pipeline.disable_lora()
    try:
        with (
            apply(pipeline, *parts) if method else nullcontext() as run,
            _where_sparse(pipeline, run, method) if lora and distilled else nullcontext(),
        ):
            yield run
    finally:
        if lora:
            pipeline.enable_lora()


@contextmanager
def _where_sparse(pipeline: Any, run: Handle, method: Distilled) -> Generator[None]:
    """Context that turns the LoRA off in dense steps: it was trained to correct the sparse pattern."""
    lora, on = _Lora(pipeline), False

    @outside_compiled_code
    def follow(*_: Any, sparse: bool | None = None) -> None:
        nonlocal on
        if on != (sparse := run.attends_sparsely() if sparse is None else sparse):
            on = sparse
            lora.switch(on)

    if all(part.always for part in method.parts):
        follow(sparse=True)  # not within the first step, whose time may be measured
    hook = pipeline.transformer.register_forward_pre_hook(follow)
    try:
        yield
    finally:
        hook.remove()
        follow(sparse=False)


class _Lora:
    """The LoRA of a pipeline, switched on and off: merged into the weights if there is room to keep the originals."""

    def __init__(self, pipeline: Any) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        self._pipeline = pipeline
        layers: list[Any] = [module for module in pipeline.transformer.modules() if isinstance(module, BaseTunerLayer)]
        bases = [layer.get_base_layer() for layer in layers]
        plain = all(type(base) is nn.Linear and not hasattr(base, "_hf_hook") for base in bases)
        free = not any(layer.merged for layer in layers)
        self._layers = layers if plain and free and _room_for([base.weight for base in bases]) else []
        self._originals: list[Tensor] = []

    def switch(self, on: bool) -> None:
        """Switch the LoRA on or off; off restores the original weights."""
        if on:
            self._pipeline.enable_lora()
        for layer in self._layers:
            base = layer.get_base_layer()
            if on:
                self._originals.append(base.weight.data)
                base.weight.data = base.weight.data.clone()
                layer.merge()
            else:
                layer.unmerge()
                base.weight.data = self._originals.pop(0)
        if not on:
            self._pipeline.disable_lora()


def _room_for(weights: Sequence[Tensor]) -> bool:
    """Whether the device of these tensors has room for two more copies."""
    if not weights or weights[0].device.type != "cuda":
        return True
    return 2 * sum(weight.nbytes for weight in weights) < torch.cuda.mem_get_info(weights[0].device)[0]
