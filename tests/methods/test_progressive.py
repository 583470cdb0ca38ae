"""Laws of resolution over steps: factor 1 is the plain call, and each part is an ordinary call with its noise."""

import pytest
import tiny
import tiny_pipelines
import torch
from diffusers import DDIMScheduler, FlowMatchHeunDiscreteScheduler, FluxKontextPipeline, UniPCMultistepScheduler

import foveate
from foveate import HilbertA, ToMA
from foveate.methods.baselines.progressive import ProgressiveResolution, low_frequencies

SIZES = {"flux": (96, 64), "wan": (64, 96)}
ASKED = {
    "flux": {"max_sequence_length": 16},
    "wan": {"num_frames": 5, "max_sequence_length": 16, "guidance_scale": 1.0},
}


def euler_wan():
    """Wan's pipeline with the scheduler of the built-in model."""
    pipe = tiny_pipelines.wan()
    flow = tiny.pipeline().scheduler
    pipe.scheduler = type(flow).from_config(flow.config, use_dynamic_shifting=False, shift=3.0)
    return pipe


@pytest.fixture(scope="module", params=["flux", "wan", "wan unipc", "wan experts"])
def case(request):
    """A pipeline, its size and other arguments."""
    make = {"flux": tiny.pipeline, "wan": euler_wan, "wan unipc": tiny_pipelines.wan,
            "wan experts": lambda: tiny_pipelines.wan(experts=2)}  # fmt: skip
    pipe, kind = make[request.param](), request.param.split()[0]
    pipe.set_progress_bar_config(disable=True)
    return pipe, SIZES[kind], ASKED[kind]


def asked(case, seed=0, steps=5, **options):
    _, (height, width), more = case
    return {"prompt": "a lighthouse", "height": height, "width": width, "num_inference_steps": steps,
            "generator": torch.Generator().manual_seed(seed), "output_type": "latent", **more, **options}  # fmt: skip


def tensor(output):
    return getattr(output, "images", None) if hasattr(output, "images") else output.frames


@pytest.mark.parametrize("options", [{"factor": 1}, {"until": 0.0}, {"factor": 1.01}])
def test_factor_one_is_the_plain_call(case, options):
    want = tensor(case[0](**asked(case)))
    assert torch.equal(tensor(ProgressiveResolution(**options)(case[0], **asked(case))), want)


@pytest.mark.parametrize("factor", [2, 1.4])
def test_each_part_has_its_size_and_its_steps_of_the_schedule(case, factor, monkeypatch):
    """The second part begins from the upsampled estimate, with the plain call's noise up to the plain call's sigma."""
    pipe, size, _ = case
    seen, models = [], [model for model in (pipe.transformer, getattr(pipe, "transformer_2", None)) if model]

    def look(_model, _args, kwargs, output):
        seen.append((float(kwargs["timestep"].max()), kwargs["hidden_states"], output[0]))

    hooks = [model.register_forward_hook(look, with_kwargs=True) for model in models]
    scheduler = pipe.scheduler
    tensor(pipe(**asked(case)))
    plain, sigmas = seen[:], scheduler.sigmas
    seen.clear()
    method = ProgressiveResolution(factor=factor, until=0.4)
    small = method.small(pipe, size)
    tensor(pipe(**asked(case) | {"height": small[0], "width": small[1]}))
    low = seen[:]
    seen.clear()
    got = tensor(method(pipe, **asked(case)))
    for hook in hooks:
        hook.remove()
    assert pipe.scheduler is scheduler
    assert "prepare_latents" not in vars(pipe)
    assert [time for time, *_ in seen] == [time for time, *_ in (*low[:2], *plain[2:])]
    assert [x.shape for _, x, _ in seen] == [x.shape for _, x, _ in (*low[:2], *plain[2:])]
    noise, first = (unpacked(pipe, x, size).double() for _, x, _ in (plain[0], seen[2]))
    sides = unpacked(pipe, low[0][1], small).shape[-2:]
    begun = unpacked(pipe, seen[0][1], small).double()
    torch.testing.assert_close(begun, low_frequencies(noise, *sides), rtol=1e-5, atol=1e-5)
    if "UniPC" not in type(scheduler).__name__:  # by hand, with Euler's steps
        times = [time if time <= 1 else time / 1000 for time, *_ in seen[:2]]
        x = unpacked(pipe, seen[1][1], small).double()
        estimate = x - times[1] * unpacked(pipe, seen[1][2], small).double()
        flat = estimate.transpose(1, 2).flatten(0, 1) if estimate.ndim == 5 else estimate
        up = torch.nn.functional.interpolate(flat, noise.shape[-2:], mode="bicubic")
        if estimate.ndim == 5:
            up = up.unflatten(0, (len(estimate), -1)).transpose(1, 2)
        torch.testing.assert_close(first, (1 - sigmas[2]) * up + sigmas[2] * noise, rtol=1e-4, atol=1e-4)
    assert got.isfinite().all()
    assert got.shape == tensor(pipe(**asked(case))).shape


def unpacked(pipe, x, size):
    return pipe._unpack_latents(x, *size, pipe.vae_scale_factor) if x.ndim == 3 else x


@pytest.mark.parametrize(
    "methods", [(HilbertA(tiles=2),), (ToMA(keep=0.5, skip=0, tile=(4, 4)),)], ids=["hilberta", "toma"]
)
def test_methods_have_plans_of_each_size(methods):
    pipe = tiny.pipeline()
    pipe.set_progress_bar_config(disable=True)
    case = pipe, (96, 64), ASKED["flux"]
    generate = ProgressiveResolution(factor=2, until=0.4)
    grids = []
    with foveate.apply(pipe, *methods) as run:
        (adapter,) = run._adapters.values()
        watch = pipe.transformer.register_forward_hook(
            lambda *_: grids.append(adapter.now.decisions[pipe.transformer].layout.grids)
        )
        first = tensor(generate(pipe, **asked(case)))
        watch.remove()
        assert torch.equal(tensor(generate(pipe, **asked(case))), first)
        assert run.summary().outcomes["transformer"] == {"": 10}
    assert grids == [((12, 8),)] * 2 + [((24, 16),)] * 3
    assert not torch.equal(first, tensor(generate(pipe, **asked(case))))


def test_batches_and_lists_of_generators_are_those_of_single_images():
    pipe = tiny.pipeline()
    pipe.set_progress_bar_config(disable=True)
    case, generate = (pipe, (96, 64), ASKED["flux"]), ProgressiveResolution(factor=2, until=0.4)
    seeds = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    both = tensor(generate(pipe, **asked(case, generator=seeds, prompt=["a lighthouse"] * 2)))
    for seed, image in enumerate(both):
        torch.testing.assert_close(image, tensor(generate(pipe, **asked(case, seed)))[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("full", "part"), [((8, 6), (4, 3)), ((9, 7), (5, 3)), ((5, 5), (5, 5))])
def test_low_frequencies_are_orthonormal_and_keep_slow_waves(full, part):
    torch.manual_seed(0)
    columns = low_frequencies(torch.eye(full[0] * full[1]).double().view(-1, *full), *part).flatten(1).mT
    torch.testing.assert_close(columns @ columns.mT, torch.eye(part[0] * part[1]).double())
    flat = low_frequencies(torch.ones(full).double(), *part)
    scale = (full[0] * full[1] / part[0] / part[1]) ** 0.5
    torch.testing.assert_close(flat, torch.full(part, scale).double())
    if full == part:
        x = torch.randn(2, *full).double()
        torch.testing.assert_close(low_frequencies(x, *part), x)


def test_what_does_not_work_is_refused_with_the_remedy():
    pipe, generate = tiny.pipeline(), ProgressiveResolution()
    with pytest.raises(ValueError, match=r"multiples of 4 pixels, not 94 x 64"):
        generate(pipe, **asked((pipe, (94, 64), {})))
    for other in (tiny_pipelines.flux2(), tiny_pipelines.wan(image=True), FluxKontextPipeline(**pipe.components)):
        with pytest.raises(ValueError, match=rf"ChromaPipeline and WanPipeline, not {type(other).__name__}"):
            generate(other, **asked((other, (96, 64), {})))
    for scheduler, told in (
        (DDIMScheduler(), "needs a flow-matching scheduler, not DDIMScheduler"),
        (UniPCMultistepScheduler(), "needs a flow-matching scheduler, not UniPC"),
        (FlowMatchHeunDiscreteScheduler(), "use one of first order"),
    ):
        pipe.scheduler = scheduler
        with pytest.raises(ValueError, match=told):
            generate(pipe, **asked((pipe, (96, 64), {})))
    for options, told in (({"factor": 0.5}, "1 or more, not 0.5"), ({"until": 1.0}, "0 to below 1, not 1.0")):
        with pytest.raises(ValueError, match=told):
            ProgressiveResolution(**options)
