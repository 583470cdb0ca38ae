"""Laws of LoRAs that carry the method they were distilled for."""

import json
from dataclasses import replace

import pytest
import tiny
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save

import foveate
from foveate import HilbertA, ToMA
from foveate.methods import ComposedMethod
from foveate.nn.pixel_dit import MODELS, PixelDiT
from foveate.pipelines import steps
from foveate.pipelines.lora import (
    LORA_FILE,
    Distilled,
    adapted,
    find_lora,
    load_lora,
    pack_lora,
    read_lora,
    using,
)
from foveate.pipelines.pixel import PixelPipeline
from foveate.pipelines.request import draw_batch

METHOD = HilbertA(tiles=4, centre=0.5, dense_layers="1")


def layers():
    """The weights of a LoRA that changes images."""
    model = tiny.pipeline().transformer
    model.add_adapter(LoraConfig(r=2, lora_alpha=2, init_lora_weights=False, target_modules=["attn.to_q", "ff.net.2"]))
    return get_peft_model_state_dict(model)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / LORA_FILE
    path.write_bytes(pack_lora(layers(), METHOD, (64, 96)))
    return path


def test_settings_come_back_from_file_or_folder(file):
    assert find_lora(str(file)) == find_lora(str(file.parent)) == file
    assert read_lora(file)[:2] == (METHOD, (64, 96))


def test_using_draws_dense_sparse_and_distilled_with_one_pipeline(file):
    def pixels(pipe, way):
        with using(pipe, way):
            return torch.tensor(list(draw_batch(pipe, [tiny.REQUEST])[0].tobytes()))

    plain, pipe = tiny.pipeline(), tiny.pipeline()
    dense, sparse = pixels(plain, None), pixels(plain, METHOD)
    distilled = load_lora(pipe, file)
    assert distilled is not None
    assert distilled.title == "HilbertA T=4 centre=0.5, dense_layers=1, distilled"
    assert torch.equal(pixels(pipe, None), dense)
    assert torch.equal(pixels(pipe, METHOD), sparse)
    assert not torch.equal(pixels(pipe, distilled), sparse)
    assert torch.equal(pixels(pipe, distilled), pixels(pipe, distilled))


def test_a_lora_is_out_of_steps_in_which_its_method_is_not_at_work(file):
    def velocities(pipe, way):
        said = []
        hook = pipe.transformer.register_forward_hook(lambda _module, _args, output: said.append(output[0]))
        with using(pipe, way):
            draw_batch(pipe, [tiny.REQUEST._replace(steps=6)])
        hook.remove()
        return said

    pipe = tiny.pipeline()
    distilled = load_lora(pipe, file)
    late = distilled._replace(method=replace(METHOD, start_percent=0.5))
    assert late.title == "HilbertA T=4 centre=0.5, dense_layers=1, start_percent=0.5, distilled"
    early = distilled._replace(method=replace(METHOD, end_percent=0.5))
    never = distilled._replace(method=replace(METHOD, min_tokens=10**6))
    dense, sparse = velocities(pipe, None), velocities(pipe, distilled)
    same = lambda ours, theirs: [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)]  # noqa: E731
    assert same(velocities(pipe, never), dense) == 6 * [True]
    # images are alike until the first step that is not
    assert same(velocities(pipe, late), dense) == [True, True, True, False, False, False]
    assert same(velocities(pipe, early), sparse) == [True, True, True, True, False, False]
    assert same(velocities(pipe, distilled), sparse) == 6 * [True]
    assert same(velocities(pipe, None), dense) == 6 * [True]


def test_a_lora_is_merged_into_the_weights_which_come_back_bit_for_bit(file):
    pipe = tiny.pipeline()
    distilled = load_lora(pipe, file)
    layers = [module for module in pipe.transformer.modules() if isinstance(module, BaseTunerLayer)]
    before = {name: weight.clone() for name, weight in pipe.transformer.state_dict().items()}

    def velocity(way):
        said = []
        hook = pipe.transformer.register_forward_hook(lambda _module, _args, output: said.append(output[0]))
        with using(pipe, way):
            assert all(layer.merged for layer in layers) == (way is not None)
            draw_batch(pipe, [tiny.REQUEST._replace(steps=1)])
        hook.remove()
        return said[0]

    dense, merged = velocity(None), velocity(distilled)
    assert layers
    assert not any(layer.merged for layer in layers)
    for name, weight in pipe.transformer.state_dict().items():
        assert torch.equal(weight, before[name]), name
    assert torch.equal(velocity(None), dense)
    with foveate.apply(pipe, METHOD):  # beside the weights, as diffusers runs it
        said = []
        pipe.transformer.register_forward_hook(lambda _module, _args, output: said.append(output[0]))
        draw_batch(pipe, [tiny.REQUEST._replace(steps=1)])
    torch.testing.assert_close(said[0], merged, rtol=1e-4, atol=1e-5)


def test_what_works_in_a_part_of_the_steps_is_timed_at_work(monkeypatch):
    pipe, seen = tiny.pipeline(), []
    monkeypatch.setattr(steps, "using", lambda pipe, way: seen.append(way) or using(pipe, way))
    late, toma = replace(METHOD, start_percent=0.5), ToMA(end_percent=0.5)
    step = steps.record_step(pipe, tiny.REQUEST)
    list(steps.time_steps(pipe, step, [None, late, ComposedMethod((late, toma)), Distilled(late)], rounds=1))
    assert seen == 2 * [None, METHOD, ComposedMethod((METHOD, ToMA())), Distilled(METHOD)]


def test_two_loras_of_one_method_are_told_apart(file):
    ours = load_lora(tiny.pipeline(), file)
    file.write_bytes(pack_lora({name: 2 * weight for name, weight in layers().items()}, METHOD, (64, 96)))
    assert load_lora(tiny.pipeline(), file) != ours


def test_where_a_method_works_may_be_chosen_what_it_does_may_not():
    made = Distilled(METHOD)
    asked = HilbertA(tiles=4, start_percent=0.5)
    assert adapted(made, asked, {"tiles", "start_percent"}).method == HilbertA(
        tiles=4, centre=0.5, dense_layers="1", start_percent=0.5
    )
    with pytest.raises(ValueError, match="was distilled for tiles=4, not 2: leave tiles out"):
        adapted(made, HilbertA(tiles=2), {"tiles"})
    with pytest.raises(
        ValueError,
        match=r"was distilled for HilbertA T=4 centre=0\.5, dense_layers=1, not dense: leave one of them out",
    ):
        adapted(made, None, set())


def test_files_that_are_no_such_lora_are_named(file, tmp_path):
    with pytest.raises(ValueError, match="cannot find the LoRA nowhere: there is no such file or folder"):
        find_lora("nowhere")
    whole = file.read_bytes()
    file.write_bytes(whole[:50])
    with pytest.raises(ValueError, match="cannot read"):
        read_lora(file)
    later = json.dumps({"method": "hilberta", "options": {"colour": "blue"}})
    file.write_bytes(save(layers(), {"foveate": later}))
    with pytest.raises(ValueError, match=r"of another version of foveate, which knew .*colour"):
        read_lora(file)
    wide = {name: torch.zeros(2 * weight.shape[0], 2 * weight.shape[1]) for name, weight in layers().items()}
    file.write_bytes(pack_lora(wide, METHOD, (64, 96)))
    with pytest.raises(ValueError, match="does not fit this model"):
        load_lora(tiny.pipeline(), file)
    pixels = PixelPipeline(PixelDiT(**MODELS["DiT-T"]), FlowMatchEulerDiscreteScheduler())
    with pytest.raises(ValueError, match=r"PixelPipeline takes no LoRA: leave .* out"):
        load_lora(pixels, file)


def test_a_lora_of_another_make_has_no_method(file):
    file.write_bytes(save({f"transformer.{name}": weight for name, weight in layers().items()}))
    pipe = tiny.pipeline()
    assert load_lora(pipe, file) is None
    assert pipe.get_list_adapters()
