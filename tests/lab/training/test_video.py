"""Laws of the video model: its scenes move as their captions say, and its training makes a pipeline that draws."""

import functools
import itertools
import json
import math

import pytest
import torch
from lab.quality import video as judged
from lab.quality.video import _cut, _detect, _frames, _strip, judge_video
from lab.training import video
from lab.training.moving import frame_scenes, moving_scenes, render_frames
from lab.training.stages import Stage
from lab.training.velocity import flow_loss
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from PIL import Image
from torch import nn

from foveate import HilbertA, ToMA
from foveate.apps.demo.atlas import load_atlas
from foveate.apps.demo.recogniser import load_recogniser
from foveate.apps.demo.text import TEXT_TOKENS
from foveate.pipelines.request import Request, draw, load_pipeline
from foveate.training.distill import distill
from foveate.training.run import RunOptions
from foveate.training.student import Recipe
from foveate_models import find

TINY = {"layers": 1, "heads": 1, "text_dim": 32, "text_layers": 1, "base": 8}
STAGE = Stage(name="one", images=12, batches={(1, 16): 2, (5, 16): 2}, rates=(1e-3, 0.0))


def first(count, **options):
    return list(itertools.islice(moving_scenes(0, **options), count))


def test_objects_move_as_their_captions_say_and_other_verdicts_are_wrong():
    atlas, recogniser, right = load_atlas(), load_recogniser(), 0
    for moving in first(12, evaluation=True):
        frames = _detect(recogniser, _cut(_strip(_frames(render_frames(atlas, frame_scenes([moving], 9), 9, 96)[0]))))
        verdict = judge_video(frames, moving)
        right += verdict == (verdict.objects, verdict.objects, True, 0)
        assert not judge_video(frames[::-1], moving).moves
        assert not judge_video([frames[0]] * 9, moving).moves
        assert judge_video([[]] * 9, moving) == (0, verdict.objects, False, 0)
        again = [[one._replace(patches=2) for one in frame] for frame in frames]
        assert judge_video([*frames, *again], moving).extra == verdict.extra + verdict.objects / 2
        dx, dy = moving.ways[0]
        words = {"right": dx > 0, "left moves": False, "up": dy < 0, "down": dy > 0}
        assert all(f"moves {word}" in moving.scene.caption for word, so in words.items() if so and word != "right")
    assert right >= 11


def test_scenes_of_the_evaluation_are_held_out_and_some_of_the_others_are_still():
    assert all(moving.scene.held_out for moving in first(50, evaluation=True))
    training = first(300)
    assert not any(moving.scene.held_out for moving in training)
    assert 30 < sum(not any(map(any, moving.ways)) for moving in training) < 90
    clips = render_frames(load_atlas(), frame_scenes(training[:8], 3), 3, 16)
    assert clips.shape == (8, 3, 3, 16, 16)
    still = torch.tensor([not any(map(any, moving.ways)) for moving in training[:8]])
    assert torch.equal((clips[:, :, 0] == clips[:, :, 2]).flatten(1).all(1), still)


@torch.no_grad()
def test_the_model_is_trained_on_what_the_pipeline_passes():
    pipeline = video.untrained_video_pipeline(**TINY)
    painter = video.VideoVelocityModel(pipeline)
    painter.initialise()
    batch = video.VideoBatches(STAGE, pipeline, 0, 1)[0]
    ids, real = batch.text
    assert ids.shape[1] == real.sum(1).max() < real.shape[1] == TEXT_TOKENS
    captions = pipeline.tokenizer.batch_decode(ids, skip_special_tokens=True)
    seen = {}
    pipeline.transformer.register_forward_pre_hook(lambda _, args: seen.update(text=args[2]))
    latents = video.VideoLatents(pipeline, torch.device("cpu"))
    clean = latents(batch)
    velocity = painter(clean, torch.ones(len(clean)), *batch.text)
    assert (velocity == 0).all()
    wanted, _ = pipeline.encode_prompt(captions, do_classifier_free_guidance=False, max_sequence_length=TEXT_TOKENS)
    torch.testing.assert_close(seen["text"], wanted)

    class Oracle(nn.Module):
        def forward(self, noisy, sigma, *_):
            return (noisy - clean) / sigma.view(-1, 1, 1, 1, 1)

    assert flow_loss(Oracle(), latents, batch, torch.Generator().manual_seed(0)) < 1e-6
    assert latents.shift(clean) == pytest.approx(math.log(3))


@torch.no_grad()
def test_a_new_text_encoder_tells_the_object_that_moves_from_the_other_one():
    pipeline = video.untrained_video_pipeline(**TINY)
    sentences = ("a star moves up to the left of a cloud", "a cloud moves up to the left of a star")
    ids = pipeline.tokenizer(list(sentences), return_tensors="pt").input_ids

    def same_word_in_both_roles():
        first, second = pipeline.text_encoder(ids).last_hidden_state
        return torch.cosine_similarity(first[1], second[ids[1] == ids[0, 1]][0], dim=0)

    assert same_word_in_both_roles() > 0.99
    torch.manual_seed(0)
    video.VideoVelocityModel(pipeline).initialise()
    assert same_word_in_both_roles() < 0.95


def test_the_recipe_is_that_of_the_shipped_model():
    recipe = json.loads(find("video/recipe.json").read_text())
    assert [*recipe["before"]["stages"], *recipe["stages"]] == [
        {
            "name": stage.name,
            "images": stage.images,
            "batches": {str(size): batch for size, batch in stage.batches.items()},
            "rates": [*stage.rates],
        }
        for stage in video.RECIPE
    ]


def shrink(monkeypatch):
    """Make the model and its training small."""
    monkeypatch.setattr(video, "RECIPE", (STAGE,))
    monkeypatch.setattr(video, "VAE_STEPS", 2)
    monkeypatch.setattr(video, "untrained_video_pipeline", functools.partial(video.untrained_video_pipeline, **TINY))
    monkeypatch.setattr(video, "SHOWN", 2)


def test_the_command_makes_a_pipeline_that_draws_and_resumes(tmp_path, monkeypatch, capsys):
    shrink(monkeypatch)
    video.main(tmp_path, batch=0.05, minutes=0, sample_every=0)
    assert "stopped" in capsys.readouterr().err
    video.main(tmp_path, batch=0.05, sample_every=0)
    assert "done" in capsys.readouterr().err
    assert len(list((tmp_path / "flow").glob("samples-*.png"))) == 2
    assert json.loads((tmp_path / "recipe.json").read_text())["stages"][0]["batches"] == {"(1, 16)": 1, "(5, 16)": 1}
    frames = draw(load_pipeline(str(tmp_path / "pipeline")), Request("an owl moves up", (32, 32), 1, 1.0, 0, frames=5))
    assert [frame.size for frame in frames] == 5 * [(32, 32)]


def test_a_training_goes_on_from_a_pipeline_with_some_of_the_stages(tmp_path, monkeypatch):
    shrink(monkeypatch)
    video.main(tmp_path / "a", batch=0.05, sample_every=0, stages="one")
    start = tmp_path / "a" / "pipeline"
    first = load_pipeline(str(start))
    first.transformer.blocks[0].attn1.to_q.weight.data.fill_(1)  # nothing that new weights would be
    first.save_pretrained(start)
    video.main(tmp_path / "b", batch=0.05, sample_every=0, stages="one", start=start, scale=0.5)
    again, recipe = (
        load_pipeline(str(tmp_path / "b" / "pipeline")),
        json.loads((tmp_path / "b" / "recipe.json").read_text()),
    )
    assert recipe["before"]["stages"][0]["images"] == 2 * recipe["stages"][0]["images"]
    pairs = [*zip(first.vae.parameters(), again.vae.parameters(), strict=True)]
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    ours, theirs = first.transformer, again.transformer
    torch.testing.assert_close(ours.blocks[0].attn1.to_q.weight, theirs.blocks[0].attn1.to_q.weight, atol=0.1, rtol=0)
    assert not torch.equal(ours.proj_out.weight, theirs.proj_out.weight)
    with pytest.raises(ValueError, match="unknown stage 'two': choose from one"):
        video.main(tmp_path / "c", stages="one,two")


def test_a_method_is_scored_with_its_lora_in_all_steps_and_in_late_ones(tmp_path, monkeypatch):
    made = "HilbertA T=2, distilled"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(judged, "showcase", lambda distilled=None: [distilled] if distilled else [])
    late = judged._late
    monkeypatch.setattr(judged, "_late", lambda method: late(method) if method.title == made else [])
    pipeline = video.untrained_video_pipeline(**TINY)
    pipeline.save_pretrained("model")
    request, recipe = Request("", (32, 32), 1, 1.0, 0, frames=5), Recipe(method=HilbertA(tiles=2), optimizer="adamw")
    distill(tmp_path / "lora", pipeline, recipe, request, ["an owl"], steps=1, options=RunOptions(at_once=32))
    judged.main("model", side=32, frames=5, prompts=1, lora="lora", device="cpu", dtype="float32")
    scores = json.loads((tmp_path / "lab/results/video-cpu-32px.json").read_text())["scores"]
    assert [score["label"] for score in scores] == [
        "real", "dense", made, *(f"HilbertA T=2 start_percent={start}, distilled" for start in judged.LATE)
    ]  # fmt: skip


def test_a_lora_of_another_make_is_refused(tmp_path):
    pipeline = video.untrained_video_pipeline(**TINY)
    pipeline.transformer.add_adapter(LoraConfig(r=2, target_modules=["attn1.to_q"]))
    pipeline.save_lora_weights(tmp_path / "lora", get_peft_model_state_dict(pipeline.transformer))
    video.untrained_video_pipeline(**TINY).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="does not say what it was distilled for: make one with foveate distill"):
        judged.main(str(tmp_path / "model"), lora=str(tmp_path / "lora"), device="cpu", dtype="float32")


def test_a_score_of_every_method_is_written_and_drawn_videos_are_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(judged, "showcase", lambda: [HilbertA(tiles=2, align=1), ToMA(tile=(2, 2, 2))])
    monkeypatch.setattr(judged, "_late", lambda _: [])
    video.untrained_video_pipeline(**TINY).save_pretrained("model")
    for prompts in (1, 2):
        judged.main("model", side=32, frames=5, prompts=prompts, device="cpu", dtype="float32", commit="abc")
    result = json.loads((tmp_path / "lab/results/video-cpu-32px.json").read_text())
    assert [score["label"] for score in result["scores"]][:2] == ["real", "dense"]
    assert len(result["scores"]) == 4
    assert result["scores"][0]["objects"] > 0.5
    assert len(list(tmp_path.rglob("eval-video/*/*.png"))) == 3 * 2
    video.untrained_video_pipeline(**TINY, seed=1).save_pretrained("model")
    with pytest.raises(ValueError, match="holds results of weights="):
        judged.main("model", side=32, frames=5, prompts=1, device="cpu", dtype="float32", commit="abc")
    with Image.open(tmp_path / "docs/images/video-32px.webp") as sheet:
        assert sheet.n_frames == 3
