"""Laws of a distillation: it learns, changes only the LoRA, and can be interrupted and resumed."""

import contextlib
import itertools
import multiprocessing
from dataclasses import replace

import pytest
import tiny
import torch
from accelerate.state import AcceleratorState
from diffusers import FluxFillPipeline, FluxTransformer2DModel
from safetensors.torch import load_file
from torch.utils.data import DataLoader, default_collate
from training_runs import losses

import foveate
from foveate import HilbertA
from foveate.diffusers.adapter import ModelAdapter
from foveate.pipelines.lora import LORA_FILE, read_lora
from foveate.training.distill import distill
from foveate.training.pictures import NoisyPairs, noise_shift
from foveate.training.run import RunOptions
from foveate.training.student import Recipe, Student

forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
ADAMW = Recipe(method=HilbertA(tiles=4), optimizer="adamw", rate=1e-2, batch=2)
ONE = RunOptions(at_once=1)


@pytest.fixture
def run(pairs_folder, tmp_path):
    """Distils with training images that exist already."""

    def run(name, recipe=ADAMW, pipe=None, steps=1, at_once=1, **options):
        out, options = tmp_path / name, RunOptions(at_once=at_once, **options)
        given = {"pairs": pairs_folder, "steps": steps, "options": options}
        return out, distill(out, pipe or tiny.pipeline(), recipe, tiny.REQUEST, tiny.PROMPTS, **given)

    return run


@pytest.fixture
def power_cut(monkeypatch):
    """Makes every `number`-th micro-batch of a distillation fail."""

    def power_cut(number):
        calls, loss = itertools.count(1), Student.loss

        def failing(*arguments):
            if next(calls) % number == 0:
                raise SystemError
            return loss(*arguments)

        monkeypatch.setattr(Student, "loss", failing)

    return power_cut


@torch.no_grad()
def gap(pipe, batch):
    """Mean squared difference of the velocities to the untrained dense model's, on one fixed batch."""
    rows = pipe._prepare_latent_image_ids(1, 16, 16, "cpu", torch.float32)
    inputs = {"hidden_states": batch.latents, "timestep": batch.level, "img_ids": rows, "txt_ids": torch.zeros(64, 3)}
    inputs["encoder_hidden_states"] = batch.text["prompt_embeds"]
    inputs["pooled_projections"] = batch.text["pooled_prompt_embeds"]
    with foveate.apply(pipe, HilbertA(tiles=4)):
        return (pipe.transformer(**inputs)[0] - tiny.pipeline().transformer(**inputs)[0]).square().mean().item()


@pytest.mark.parametrize(
    ("optimizer", "rate", "part"),
    [
        pytest.param("adamw", 1e-2, 0.2, marks=pytest.mark.slow),
        pytest.param("prodigy", None, 0.99, marks=pytest.mark.slow),  # Prodigy begins with tiny steps
    ],
)
def test_the_sparse_model_approaches_the_dense_one(run, pipe, pairs_folder, optimizer, rate, part):
    pairs = NoisyPairs(pairs_folder, tiny.PROMPTS, seed=9)
    batch = default_collate([pairs[number] for number in range(10)])
    before = gap(pipe, batch)
    run("out", Recipe(method=HilbertA(tiles=4), optimizer=optimizer, rate=rate, batch=2), pipe=pipe, steps=40)
    assert gap(pipe, batch) < part * before


def test_blocks_are_compiled_before_the_method_is_applied(run, monkeypatch):
    seen = []
    monkeypatch.setattr(
        FluxTransformer2DModel, "compile_repeated_blocks", lambda model: seen.append(ModelAdapter.of(model))
    )
    run("out", steps=1, compile=True)
    assert seen == [None]


def test_the_rate_falls_to_zero_over_the_cool_down(run, monkeypatch):
    rates = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self, *args: rates.append(self.param_groups[0]["lr"]) or step(self, *args)
    )
    recipe = Recipe(method=HilbertA(tiles=4), optimizer="adamw", rate=1e-2, batch=2, cool_down=0.5)
    run("out", recipe, steps=4)
    assert rates == pytest.approx([1e-2, 1e-2, 1e-2, 5e-3])
    run("out", recipe, steps=8)  # a checkpoint is loaded into an optimizer that has made a step with rate 0
    assert rates[5:] == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])


def test_noise_levels_are_shifted_if_the_recipe_says_so(run, monkeypatch):
    shifts, init = [], NoisyPairs.__init__

    def noting(pairs, folder, prompts, seed, shift):
        shifts.append(shift)
        init(pairs, folder, prompts, seed, shift)

    monkeypatch.setattr(NoisyPairs, "__init__", noting)
    for levels in ("uniform", "shifted"):
        run(levels, replace(ADAMW, levels=levels), steps=1)
    assert shifts == [0, noise_shift(tiny.pipeline().scheduler, 16 * 16)]
    assert shifts[1] > 0.1


def test_all_other_weights_stay_bit_for_bit(run, pipe):
    before = {name: weight.clone() for name, weight in pipe.transformer.state_dict().items()}
    run("out", pipe=pipe, steps=3)
    after = {name.replace(".base_layer", ""): weight for name, weight in pipe.transformer.state_dict().items()}
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert all("lora" in name for name in set(after) - set(before))


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("prodigy", marks=pytest.mark.slow)])
def test_an_interrupted_run_ends_like_an_uninterrupted_one(run, power_cut, optimizer):
    recipe = Recipe(method=HilbertA(tiles=4), optimizer=optimizer, batch=4)
    whole, _ = run("whole", recipe, steps=7, at_once=2)
    power_cut(6)  # in the middle of a batch
    attempts, done = 0, False
    while not done:
        attempts += 1
        with contextlib.suppress(SystemError):
            broken, done = run("broken", recipe, steps=7, at_once=2, checkpoint_minutes=0)
    assert attempts > 2
    assert losses(broken) == losses(whole)
    ours, theirs = (load_file(out / LORA_FILE) for out in (broken, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_steps_after_the_last_checkpoint_are_repeated_and_logged_once(run, power_cut, monkeypatch):
    whole, _ = run("whole", steps=4)
    broken, _ = run("broken", steps=1)
    power_cut(6)
    with pytest.raises(SystemError):
        run("broken", steps=4)
    assert len(losses(broken)) == 3
    monkeypatch.undo()
    run("broken", steps=4)
    assert losses(broken) == losses(whole)


def test_a_run_stops_in_time_and_can_be_extended(run):
    out, done = run("out", steps=2, minutes=0)
    assert not done
    assert [step for step, _ in losses(out)] == [1]
    assert (out / LORA_FILE).exists()
    assert run("out", steps=3)[1]
    assert run("out", steps=3)[1]  # nothing is left to do
    assert [step for step, _ in losses(out)] == [1, 2, 3]


def test_a_run_that_diverges_stops_and_keeps_its_last_good_state(run):
    wild = replace(ADAMW, rate=1e30)
    out, _ = run("out", wild, steps=1, minutes=0)
    good = (out / LORA_FILE).read_bytes()
    with pytest.raises(ValueError, match=r"the loss of step 2 is (nan|inf): start again with a lower learning rate"):
        run("out", wild, steps=3)
    assert (out / LORA_FILE).read_bytes() == good
    assert [step for step, _ in losses(out)] == [1]


@pytest.mark.slow
@forks
def test_worker_processes_change_no_loss_and_end_with_the_run(run, monkeypatch):
    alone, _ = run("alone", steps=3)

    def with_workers(*arguments, num_workers, **options):
        assert num_workers == 0  # on a CPU
        return DataLoader(*arguments, num_workers=2, **options)

    monkeypatch.setattr("foveate.training.run.DataLoader", with_workers)
    together, done = run("together", steps=5, minutes=0)
    assert not done
    assert not multiprocessing.active_children()
    run("together", steps=3)
    assert not multiprocessing.active_children()
    assert losses(together) == losses(alone)


@pytest.mark.gpu
@forks
def test_a_gpu_learns_what_a_cpu_learns(run):
    there, _ = run("gpu", pipe=tiny.pipeline().to("cuda"), steps=3)
    AcceleratorState._reset_state(reset_partial_state=True)
    here, _ = run("cpu", steps=3)
    assert [loss for _, loss in losses(there)] == pytest.approx([loss for _, loss in losses(here)], rel=1e-3)
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_runs_may_share_their_pairs(run, tmp_path):
    shared, _ = run("shared", steps=2)
    distill(tmp_path / "own", tiny.pipeline(), ADAMW, tiny.REQUEST, tiny.PROMPTS, steps=2, options=ONE)
    assert [path.parent.name for path in tmp_path.glob("*/pairs")] == ["own"]
    assert losses(tmp_path / "own") == losses(shared)


def test_a_run_of_another_recipe_is_refused(run):
    run("out", steps=1)
    with pytest.raises(ValueError, match="name another folder"):
        run("out", Recipe(method=HilbertA(tiles=2), optimizer="adamw", batch=2), steps=1)


def test_a_run_writes_lora_loss_curve_and_samples(run):
    bars = {}
    track = lambda name, length: lambda: bars.update({name: bars.get(name, 0) + 1})  # noqa: E731
    auto = Recipe(method=HilbertA(tiles=2, centre=0.5), optimizer="adamw", batch=1)
    out, _ = run("out", auto, steps=3, captions=["a cat", "a dog"], sample_every=2, track=track)
    assert bars == {"images": len(tiny.PROMPTS), "distilling": 3}
    assert read_lora(out / LORA_FILE).method == replace(auto.method, slide="diagonal")
    assert {path.name for path in out.glob("*.png")} == {"loss.png", "samples-000002.png", "samples-000003.png"}


def test_what_auto_chooses_is_kept_in_the_lora(pipe, tmp_path):
    recipe = Recipe(method=HilbertA(), optimizer="adamw", batch=1)
    request = tiny.REQUEST._replace(size=(128, 64), steps=1)
    distill(tmp_path, pipe, recipe, request, ["a cat"], steps=1, options=ONE)
    assert read_lora(tmp_path / LORA_FILE)[:2] == (HilbertA(tiles=2, slide="diagonal"), (128, 64))
    with pytest.raises(ValueError, match="16 x 16 image tokens are too few"):
        distill(tmp_path, tiny.pipeline(), recipe, tiny.REQUEST, tiny.PROMPTS, steps=1, options=ONE)


def test_bad_arguments_are_refused_before_anything_is_drawn(pipe, tmp_path, as_a_user):
    fill = FluxFillPipeline(
        pipe.scheduler, pipe.vae, pipe.text_encoder, pipe.tokenizer, pipe.text_encoder_2, pipe.tokenizer_2,
        pipe.transformer,
    )  # fmt: skip
    with pytest.raises(ValueError, match="needs a FluxPipeline or a WanPipeline, not a FluxFillPipeline"):
        distill(tmp_path, fill, ADAMW, tiny.REQUEST, tiny.PROMPTS, steps=1, options=ONE)
    assert list(tmp_path.iterdir()) == []
