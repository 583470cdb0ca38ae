"""Laws of teacher and student in one model."""

import copy

import pytest
import tiny
import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from torch.utils.data import default_collate

import foveate
from foveate import HilbertA
from foveate.pipelines.lora import LORA_FILE, load_lora
from foveate.pipelines.request import fingerprint
from foveate.training.families import FluxFamily
from foveate.training.pictures import NoisyPairs
from foveate.training.student import LAYERS, Recipe, Student


def recipe(tiles=4, **options):
    return Recipe(method=HilbertA(tiles=tiles), **options)


def student_of(pipe, *arguments, **options):
    return Student(pipe, recipe(*arguments, **options), tiny.REQUEST)


@pytest.fixture
def batch(pairs_folder):
    pairs = NoisyPairs(pairs_folder, tiny.PROMPTS, seed=0)
    return default_collate([pairs[number] for number in range(3)])


def velocity(pipe, batch):
    return pipe.transformer(
        hidden_states=batch.latents,
        timestep=batch.level,
        pooled_projections=batch.text["pooled_prompt_embeds"],
        encoder_hidden_states=batch.text["prompt_embeds"],
        img_ids=pipe._prepare_latent_image_ids(1, 16, 16, "cpu", torch.float32),
        txt_ids=torch.zeros(64, 3),
        return_dict=False,
    )[0]


@pytest.mark.parametrize("layers", LAYERS)
def test_the_fingerprint_ignores_the_lora(pipe, layers):
    known = fingerprint(pipe.transformer)
    student = student_of(pipe, layers=layers, optimizer="adamw")
    unlearn(student)
    assert fingerprint(pipe.transformer) == known
    student.finish()
    pipe.transformer.proj_out.bias.data.add_(1)
    assert fingerprint(pipe.transformer) != known


def unlearn(student, scale=0.1):
    """Change the LoRA, which has no effect at first."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in student.trained:
            weight.add_(scale * torch.randn_like(weight))


def test_the_loss_is_the_mean_squared_difference_to_the_dense_model(pipe, batch):
    with torch.no_grad():
        dense = velocity(pipe, batch)
        with foveate.apply(pipe, HilbertA(tiles=4)):
            sparse = velocity(pipe, batch)
    student = student_of(pipe)
    assert student.loss(pipe.transformer, batch).item() == pytest.approx(F.mse_loss(sparse, dense).item(), rel=1e-5)
    unlearn(student)
    with torch.no_grad(), student.teacher():
        assert torch.equal(velocity(pipe, batch), dense)
    with torch.no_grad(), student.without_lora():
        assert torch.equal(velocity(pipe, batch), sparse)
    taught = velocity(pipe, batch)
    assert student.loss(pipe.transformer, batch).item() == pytest.approx(F.mse_loss(taught, dense).item(), rel=1e-5)


def test_the_loss_of_one_tile_is_zero(pipe, batch):
    assert student_of(pipe, 1).loss(pipe.transformer, batch) < 1e-10


@pytest.mark.parametrize("layers", ["paper", "all"])
def test_only_the_loras_of_the_chosen_layers_have_gradients(pipe, batch, layers):
    student = student_of(pipe, rank=3, layers=layers)
    student.loss(pipe.transformer, batch).backward()
    trained = {name for name, weight in pipe.transformer.named_parameters() if weight.grad is not None}
    named = {f"transformer_blocks.0.{target}" for target in FluxFamily.layers["paper"]}
    named |= {f"single_transformer_blocks.0.attn.to_{name}" for name in "qkv"}
    if layers == "all":
        named |= {"single_transformer_blocks.0.proj_mlp", "single_transformer_blocks.0.proj_out", "proj_out"}
    assert trained == {f"{layer}.lora_{side}.default.weight" for layer in named for side in "AB"}
    assert all(min(weight.shape) == 3 for weight in student.trained)


def test_teacher_and_student_get_the_same_noise_level_and_guidance(pipe, batch):
    config = {name: value for name, value in pipe.transformer.config.items() if not name.startswith("_")}
    pipe.transformer = FluxTransformer2DModel(**{**config, "guidance_embeds": True})
    told = []
    pipe.transformer.time_text_embed.register_forward_pre_hook(lambda _module, inputs: told.append(inputs[:2]))
    student_of(pipe, guidance=3.5).loss(pipe.transformer, batch)
    assert len(told) == 2
    for level, guidance in told:
        torch.testing.assert_close(level, 1000 * batch.level)
        torch.testing.assert_close(guidance, torch.full((3,), 3500.0))


def test_checkpointing_changes_no_gradient(pipe, batch):
    gradients = []
    for model in (pipe, copy.deepcopy(pipe)):
        student = student_of(model)
        unlearn(student)
        if model is not pipe:
            model.transformer.enable_gradient_checkpointing()
        student.loss(model.transformer, batch).backward()
        gradients.append([weight.grad for weight in student.trained])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_in_bfloat16_the_lora_is_trained_in_float32(pipe, batch):
    pipe.to(torch.bfloat16)
    student = student_of(pipe)
    student.loss(pipe.transformer, batch).backward()
    assert {weight.dtype for weight in student.trained} == {torch.float32}
    assert sum(weight.grad.abs().sum() for weight in student.trained) > 0


@pytest.mark.parametrize("layers", ["paper", "all"])
def test_the_lora_file_reproduces_velocities_and_method(pipe, batch, tmp_path, layers):
    other = copy.deepcopy(pipe)
    student = student_of(pipe, layers=layers)
    unlearn(student)
    (tmp_path / LORA_FILE).write_bytes(student.lora_file())
    loaded = load_lora(other, tmp_path / LORA_FILE)
    assert loaded is not None
    assert loaded.method == HilbertA(tiles=4)
    with torch.no_grad(), foveate.apply(other, loaded.method):
        torch.testing.assert_close(velocity(other, batch), velocity(pipe, batch))
        student.finish()
        assert not torch.allclose(velocity(other, batch), velocity(pipe, batch))


def test_a_student_may_start_from_a_lora(pipe, batch, tmp_path):
    fresh, third = copy.deepcopy(pipe), copy.deepcopy(pipe)
    student = student_of(pipe)
    unlearn(student)
    path = tmp_path / LORA_FILE
    path.write_bytes(student.lora_file())
    again = Student(fresh, recipe(2), tiny.REQUEST, path)
    for ours, theirs in zip(again.trained, student.trained, strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="does not fit: it needs the model and the rank it was made with"):
        Student(third, recipe(rank=2), tiny.REQUEST, path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "sgd"}, "unknown optimizer 'sgd': choose prodigy or adamw"),
        ({"rank": 0}, "rank and batch must be 1 or more, not 0 and 32"),
        ({"layers": "none"}, "unknown layers 'none': choose paper or all"),
        ({"rate": 0.0}, "the learning rate must be above 0"),
        ({"levels": "high"}, "unknown levels 'high': choose uniform or shifted"),
        ({"cool_down": 1.5}, "last fraction of the steps, 0 to 1, not 1.5"),
        ({"method": HilbertA(start_percent=0.5)}, "leave start_percent and end_percent out"),
    ],
)
def test_bad_recipes_are_refused_with_the_value(options, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**{"method": HilbertA(tiles=4), **options})


def test_dense_fallback_and_float16_are_refused(pipe, batch):
    student = Student(pipe, Recipe(method=HilbertA(tiles=4, min_tokens=1000)), tiny.REQUEST)
    with pytest.raises(ValueError, match="min_tokens=1000: there is nothing to distil at this size"):
        student.loss(pipe.transformer, batch)
    with pytest.raises(ValueError, match="too small for float16"):
        student_of(pipe.to(torch.float16))
