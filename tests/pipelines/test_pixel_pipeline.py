"""Laws of the pixel pipeline: it walks the line from noise to image that the model was trained on."""

import numpy as np
import pytest
import tiny
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from foveate.nn.pixel_dit import PixelDiT
from foveate.pipelines.checks import check_request
from foveate.pipelines.pixel import PixelPipeline, noise_scale
from foveate.pipelines.request import Request, draw, load_pipeline


def pipeline(captioned=False, **config):
    torch.manual_seed(0)
    text_dim = 32 if captioned else None
    made = PixelDiT(num_layers=1, num_attention_heads=1, attention_head_dim=32, text_dim=text_dim, **config)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    words = (tiny.pipeline().tokenizer_2, tiny.pipeline().text_encoder_2) if captioned else ()
    pipe = PixelPipeline(made, FlowMatchEulerDiscreteScheduler(), *words, height=16, width=24)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("size", "scale"), [((32, 32), 1), ((64, 64), 1), ((256, 256), 4), ((64, 256), 2)])
def test_noise_grows_with_the_side_of_the_picture(size, scale):
    assert noise_scale(*size) == scale


@pytest.mark.parametrize("steps", [1, 3, 20])
@pytest.mark.parametrize("size", [(16, 24), (128, 160)])
def test_an_oracle_leads_to_the_picture_in_any_number_of_steps(steps, size, monkeypatch):
    pipe, picture = pipeline(), torch.rand(1, 3, *size) * 2 - 1
    told = []

    def oracle(x, time, text, return_dict):
        told.append(time.item())
        return ((x - picture) / (time / 1000),)  # x = (1 - t) image + t scale noise, so this is scale noise - image

    monkeypatch.setattr(pipe.transformer, "forward", oracle)
    got = pipe(height=size[0], width=size[1], num_inference_steps=steps, output_type="pt").images
    torch.testing.assert_close(got, picture / 2 + 0.5, atol=1e-5, rtol=0)
    assert told == pytest.approx(np.linspace(1000, 1000 / steps, steps))


def test_it_begins_with_noise_of_the_scale_of_the_size(monkeypatch):
    pipe, seen = pipeline(), []
    monkeypatch.setattr(pipe.transformer, "forward", lambda x, *_, **__: seen.append(x) or (torch.zeros_like(x),))
    pipe(height=128, width=128, num_inference_steps=1, generator=seeded())
    assert torch.equal(seen[0], 2 * torch.randn(1, 3, 128, 128, generator=seeded()))


def test_it_draws_the_same_after_a_trip_to_a_folder(tmp_path):
    for captioned in (False, True):
        pipe, folder = pipeline(captioned, attention="dense" if captioned else "log-linear"), tmp_path / str(captioned)
        pipe.save_pretrained(folder)
        prompt = "a cat" if captioned else ""
        options = {"num_inference_steps": 2, "output_type": "np"}
        want = pipe(prompt, generator=seeded(), **options).images
        assert want.shape == (1, 16, 24, 3)
        for again in (PixelPipeline.from_pretrained(folder), load_pipeline(str(folder), "cpu")):
            again.set_progress_bar_config(disable=True)
            got = again(prompt, generator=seeded(), **options).images
            assert abs(got - want).max() < 1e-5  # rounding differs with where in memory weights lie


def test_every_picture_of_a_batch_has_its_own_caption_and_noise():
    pipe = pipeline(captioned=True)
    options = {"num_inference_steps": 2, "output_type": "pt", "guidance_scale": 2.0}
    both = pipe(["a cat", "a dog"], generator=[seeded(0), seeded(1)], **options).images
    for index, prompt in enumerate(("a cat", "a dog")):
        alone = pipe(prompt, generator=seeded(index), **options).images
        torch.testing.assert_close(both[index : index + 1], alone, atol=1e-4, rtol=0)
    assert not torch.allclose(both[0], pipe("a dog", generator=seeded(0), **options).images[0], atol=1e-3)


def test_guidance_drives_away_from_the_empty_caption():
    pipe = pipeline(captioned=True)
    velocity = pipe._velocity
    x, time = torch.randn(1, 3, 16, 24), torch.tensor(1000.0)
    with torch.no_grad():
        own, empty = (velocity(x, time, pipe.encode([words])) for words in ("a cat", ""))
    pipe.scheduler.step = lambda v, *_, **__: (v,)
    pipe._velocity = lambda _x, _time, text: velocity(x, time, text)
    got = pipe("a cat", num_inference_steps=1, output_type="pt", guidance_scale=3.0).images
    want = (empty + 3 * (own - empty)) / 2 + 0.5
    torch.testing.assert_close(got, want.clamp(0, 1))
    pipe.register_to_config(guidance_scale=3.0)
    assert torch.equal(pipe("a cat", num_inference_steps=1, output_type="pt", generator=seeded()).images, got)


def test_the_rest_of_foveate_draws_with_it():
    pipe, steps = pipeline(captioned=True), []
    request = Request("a cat", (20, 28), 3, None, 5)
    check_request(pipe, request)
    (picture,) = draw(pipe, request, on_step=lambda: steps.append(1))
    assert picture.size == (28, 20)
    assert len(steps) == 3
    want = pipe("a cat", height=20, width=28, num_inference_steps=3, generator=seeded(5)).images[0]
    assert (np.asarray(picture) == np.asarray(want)).all()


def test_what_it_cannot_draw_is_refused():
    with pytest.raises(ValueError, match='trained without captions: use prompt "" and no guidance scale'):
        pipeline()("a cat")
    with pytest.raises(ValueError, match="trained without captions"):
        pipeline()("", guidance_scale=2.0)
    with pytest.raises(ValueError, match="this model packs 2 x 2 px into a token; use multiples of 2"):
        check_request(pipeline(patch_size=2), Request("", (15, 24), 1, None, 0))
