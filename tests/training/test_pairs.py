"""Laws of the training data of a distillation."""

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from safetensors.torch import load_file

from foveate.pipelines.request import draw
from foveate.training import pairs
from foveate.training.pairs import make_pairs
from foveate.training.pictures import NoisyPairs, captioned, noise_shift


@torch.no_grad()
def test_a_pair_holds_the_latents_that_the_pipeline_draws_and_the_embeddings(pipe, pairs_folder):
    pair = load_file(pairs_folder / "000001.safetensors")
    drawn = {"height": 64, "width": 64, "num_inference_steps": 2, "max_sequence_length": 64}
    want = pipe(tiny.PROMPTS[1], generator=torch.Generator().manual_seed(1), output_type="latent", **drawn).images[0]
    assert torch.equal(pair["latents"], want)
    text, pooled, _ = pipe.encode_prompt(tiny.PROMPTS[1], None, max_sequence_length=64)
    torch.testing.assert_close(pair["prompt_embeds"], text[0])
    torch.testing.assert_close(pair["pooled_prompt_embeds"], pooled[0])


def test_interrupted_drawing_is_resumed_and_nothing_is_drawn_twice(pipe, pairs_folder, tmp_path, monkeypatch):
    drawn = []

    def failing(family, requests):
        drawn.extend(request.prompt for request in requests)
        if len(drawn) == 3:
            raise SystemError
        return drawing(family, requests)

    drawing = pairs._drawn
    monkeypatch.setattr(pairs, "_drawn", failing)
    with pytest.raises(SystemError):
        make_pairs(tmp_path, pipe, tiny.PROMPTS, tiny.REQUEST)
    assert not make_pairs(tmp_path, pipe, tiny.PROMPTS, tiny.REQUEST, until=0)
    bars = []
    assert make_pairs(tmp_path, pipe, tiny.PROMPTS, tiny.REQUEST, advance=lambda: bars.append(1))
    assert drawn == [*tiny.PROMPTS[:3], *tiny.PROMPTS[2:]]
    assert len(bars) == len(tiny.PROMPTS)
    for path in pairs_folder.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_a_pair_does_not_depend_on_its_batch(pipe, pairs_folder, tmp_path):
    make_pairs(tmp_path, pipe, tiny.PROMPTS[:2], tiny.REQUEST)
    assert make_pairs(tmp_path, pipe, tiny.PROMPTS, tiny.REQUEST, at_once=2)  # 2 are there, then 2 and 1
    for path in pairs_folder.glob("*.safetensors"):
        together, alone = load_file(tmp_path / path.name), load_file(path)
        assert together.keys() == alone.keys()
        for name, tensor in alone.items():
            torch.testing.assert_close(together[name], tensor)


def test_pairs_of_other_settings_or_prompts_are_refused(pipe, pairs_folder):
    with pytest.raises(ValueError, match="steps=2: name another folder"):
        make_pairs(pairs_folder, pipe, tiny.PROMPTS, tiny.REQUEST._replace(steps=3))
    with pytest.raises(ValueError, match="was made from 'a cat', not from 'a fox'"):
        make_pairs(pairs_folder, pipe, ["a fox"], tiny.REQUEST)


def test_given_pictures_are_encoded_as_the_pipeline_decodes(pipe, tmp_path):
    pixels = np.linspace(0, 255, 64 * 96 * 3).reshape(64, 96, 3).astype(np.uint8)
    files = [tmp_path / "wide.png", tmp_path / "dark.png"]
    Image.fromarray(pixels).save(files[0])  # its middle is taken
    Image.fromarray(pixels[:, 16:80] // 2).save(files[1])
    make_pairs(tmp_path / "pairs", pipe, ["wide", "dark"], tiny.REQUEST, pictures=files, at_once=2)
    middle = torch.from_numpy(pixels[:, 16:80])
    for index, seen in enumerate([middle, middle // 2]):
        with torch.no_grad():
            want = pipe.vae.encode(seen.permute(2, 0, 1)[None] / 127.5 - 1).latent_dist.mean
        latents = load_file(tmp_path / "pairs" / f"00000{index}.safetensors")["latents"]
        unpacked = pipe._unpack_latents(latents[None], 64, 64, 2)
        torch.testing.assert_close(unpacked, want * pipe.vae.config.scaling_factor, atol=2e-2, rtol=0)


def test_captions_come_from_text_files_or_prompts(tmp_path):
    with pytest.raises(ValueError, match="holds no images"):
        captioned(tmp_path, None)
    for name in ("b.png", "a.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    (tmp_path / "a.txt").write_text("an owl\n")
    with pytest.raises(ValueError, match=r"b\.png has no caption: put one into b\.txt"):
        captioned(tmp_path, None)
    (tmp_path / "b.txt").write_text("a cat")
    assert captioned(tmp_path, None) == {tmp_path / "a.png": "an owl", tmp_path / "b.png": "a cat"}
    assert captioned(tmp_path, ["one", "two", "three"]) == {tmp_path / "a.png": "one", tmp_path / "b.png": "two"}
    with pytest.raises(ValueError, match=r"2 images in .* but 1 prompts"):
        captioned(tmp_path, ["one"])


def test_every_epoch_sees_every_pair_once_and_the_number_determines_a_sample(pairs_folder):
    samples = NoisyPairs(pairs_folder, tiny.PROMPTS, seed=1)
    epochs = [[samples[5 * epoch + place] for place in range(5)] for epoch in range(3)]
    orders = [[sample.text["pooled_prompt_embeds"].sum().item() for sample in epoch] for epoch in epochs]
    assert len(set(orders[0])) == 5
    assert {tuple(sorted(order)) for order in orders} == {tuple(sorted(orders[0]))}
    assert len({tuple(order) for order in orders}) > 1
    again, other = NoisyPairs(pairs_folder, tiny.PROMPTS, seed=1)[7], NoisyPairs(pairs_folder, tiny.PROMPTS, seed=2)[7]
    assert torch.equal(again.latents, samples[7].latents)
    assert not torch.equal(other.latents, samples[7].latents)


@pytest.mark.parametrize("shift", [0.0, 0.8])
def test_noise_levels_are_uniform_or_shifted_and_latents_interpolate_to_noise(pairs_folder, shift):
    samples = NoisyPairs(pairs_folder, tiny.PROMPTS[:1], seed=0, shift=shift)
    clean = load_file(pairs_folder / "000000.safetensors")["latents"]
    levels = []
    for number in range(500):
        noisy, level, _ = samples[number]
        noise = (noisy - (1 - level) * clean) / level
        levels.append(level.item())
        assert abs(noise.mean()) < 0.1
        assert abs(noise.std() - 1) < 0.1
    uniform = np.array([0.1, 0.5, 0.9])
    want = 1 / (1 + (1 / uniform - 1) * np.exp(-shift))
    assert np.quantile(levels, uniform) == pytest.approx(want, abs=0.05)


@pytest.mark.parametrize("size", [(64, 64), (256, 256), (512, 384)])
def test_shifted_levels_are_those_of_the_scheduler(size):
    pipe = tiny.pipeline()
    seen, tokens = [], (size[0] // 4) * (size[1] // 4)
    pipe.transformer.forward = lambda hidden_states, timestep, **rest: (seen.append(timestep.item()) or hidden_states,)
    draw(pipe, tiny.REQUEST._replace(prompt="a cat", size=size, steps=8))
    uniform = torch.linspace(1, 1 / 8, 8).double()
    want = torch.sigmoid(torch.logit(uniform) + noise_shift(pipe.scheduler, tokens))
    assert seen == pytest.approx(want.tolist(), abs=1e-3)
