"""Laws of schedules: each step is that of the plain option, and settings change within a run without a trace."""

import threading
from dataclasses import replace

import pytest
import tiny
import torch
from tiny import call

import foveate
from foveate import LLSA, HilbertA, Preset, ToMA
from foveate.apps.demo.untrained import untrained_pipeline
from foveate.diffusers.preset import describe

TILES = ((0.0, "dense"), (0.25, 2), (0.5, 4))
KEEP = ((0.0, 0.75), (0.25, "dense"), (0.5, 0.5))
EVERY_STEP = {"dst_every": 1, "weights_every": 1}
SCHEDULES = {
    "hilberta": (HilbertA(tiles=TILES),),
    "llsa": (LLSA(top_k=((0.0, 1), (0.25, "dense"), (0.75, 2)), min_tokens=0),),
    "toma": (ToMA(keep=KEEP, skip=0, **EVERY_STEP),),
    "module": (ToMA(keep=KEEP, skip=0, granularity="module", **EVERY_STEP),),
    "both": (HilbertA(tiles=TILES, slide="curve"), ToMA(keep=KEEP, skip=0, **EVERY_STEP)),
    "other": (
        HilbertA(tiles=4, slide="curve", start_percent=0.5),
        ToMA(keep=KEEP, skip=0, end_percent=0.5, **EVERY_STEP),
    ),
}
STEPS = 4


@pytest.fixture(scope="module")
def pipe():
    pipeline = untrained_pipeline(layers=1, single_layers=1, heads=1, rope=(8, 12, 12), text_dim=32, text_layers=1)
    pipeline = pipeline.to(torch.float64)  # heads of 32 channels: LLSA takes no fewer
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def image(pipe, seed=0, steps=STEPS, **options):
    return pipe(
        "a lighthouse", height=64, width=96, num_inference_steps=steps, output_type="latent", max_sequence_length=16,
        generator=torch.Generator().manual_seed(seed), **options,
    ).images  # fmt: skip


def at(methods, progress):
    """The methods that are active at this fraction of the run, with plain options in every step."""
    active = [method.at_progress(progress) for method in methods if method.covers(progress)]
    return [replace(method, start_percent=0.0, end_percent=1.0) for method in active]


@pytest.mark.parametrize("methods", SCHEDULES.values(), ids=SCHEDULES)
def test_each_step_is_that_of_its_plain_options(pipe, methods):
    calls = []

    def keep(_model, _args, kwargs, output):
        calls.append((kwargs, output[0]))

    with foveate.apply(pipe, *methods) as run:
        hook = pipe.transformer.register_forward_hook(keep, with_kwargs=True)
        image(pipe)
        hook.remove()
        (settings,), (outcomes,) = run.summary().settings.values(), run.summary().outcomes.values()
    assert len(calls) == STEPS
    titles = []
    for number, (kwargs, got) in enumerate(calls):
        plain = at(methods, number / STEPS)
        with torch.no_grad():
            if not plain:
                assert torch.equal(got, pipe.transformer(**kwargs)[0])
                continue
            with foveate.apply(pipe.transformer, *plain) as run:
                assert torch.equal(got, pipe.transformer(**kwargs)[0])
            titles += run.summary().settings["FluxTransformer2DModel"]
    told = [title for title, (passes, _) in settings.items() for _ in range(passes)]
    assert [title.replace(" end_percent=0.5,", "") for title in told] == titles
    assert outcomes[""] == len(titles)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(("cls", "option", "value"), [(HilbertA, "tiles", 4), (LLSA, "top_k", 2), (ToMA, "keep", 0.5)])
def test_a_schedule_of_one_entry_is_the_plain_option(cls, option, value):
    assert cls(**{option: [[0, value]]}) == cls(**{option: value})
    assert cls(**{option: ((0.0, value),)}).always


def test_dense_until_a_fraction_is_start_percent(pipe):
    for method, late in (
        (HilbertA(tiles=((0.0, "dense"), (0.5, 4))), HilbertA(tiles=4, start_percent=0.5)),
        (ToMA(keep=((0.0, "dense"), (0.5, 0.5)), skip=0), ToMA(keep=0.5, skip=0, start_percent=0.5)),
    ):
        with foveate.apply(pipe, method) as run:
            got = image(pipe)
            assert "2 dense: the schedule of" in str(run.summary())
        with foveate.apply(pipe, late):
            assert torch.equal(image(pipe), got)


def test_the_summary_counts_the_passes_of_each_setting(pipe):
    with foveate.apply(pipe, HilbertA(tiles=TILES)) as run:
        image(pipe, true_cfg_scale=2.0, negative_prompt="a dog")
        text = " ".join(str(run.summary()).split())
        told = run.summary().to_dict()["transformer"]
        (settings,) = run.summary().settings.values()
    assert "6 of 8 forward passes sparse (2 HilbertA T=2, 4 HilbertA T=4)" in text
    assert "2 dense: the schedule of tiles leaves this step dense" in text
    assert told["settings"] == {"HilbertA T=2": 2, "HilbertA T=4": 4}
    assert 0 < settings["HilbertA T=2"][1] < settings["HilbertA T=4"][1] < 1


def test_a_changed_fraction_to_keep_makes_a_new_merging_plan_at_once(pipe, monkeypatch):
    made, make = [], ToMA.plan

    def plan(method, features, regions, destinations=None):
        made.append((regions.kept, destinations is None))
        return make(method, features, regions, destinations)

    monkeypatch.setattr(ToMA, "plan", plan)
    with foveate.apply(pipe, ToMA(keep=((0.0, 0.75), (0.5, 0.5)), skip=0)):
        image(pipe, steps=12)
    # step 0; new weights in step 5; half of the tokens from step 6 on; new destinations in step 10
    assert made[::2] == made[1::2] == [(288, True), (288, False), (192, True), (192, True)]


@torch.no_grad()
def test_own_loops_and_threads_follow_the_timestep_they_pass(pipe):
    x = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in tiny.inputs().items()}
    x |= {"hidden_states": torch.randn(1, 320, 16, dtype=torch.float64)}
    steps = [x | {"timestep": torch.tensor([level])} for level in (1.0, 0.75, 0.5, 0.25)]

    def outputs(found):
        found += [call(pipe.transformer, step) for step in steps]

    want, lists = [], ([], [])
    with foveate.apply(pipe, HilbertA(tiles=TILES)) as run:
        outputs(want)
        threads = [threading.Thread(target=outputs, args=(found,)) for found in lists]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counts = {title: passes for title, (passes, _) in run.summary().settings["transformer"].items()}
    assert counts == {"HilbertA T=2": 3, "HilbertA T=4": 6}
    for found in lists:
        assert all(map(torch.equal, found, want))
    for step, got in zip(steps, want, strict=True):
        plain = at((HilbertA(tiles=TILES),), 1 - float(step["timestep"]))
        if plain:
            with foveate.apply(pipe.transformer, *plain):
                assert torch.equal(call(pipe.transformer, step), got)


def test_a_schedule_needs_a_pipeline_and_a_plan_one_setting(pipe):
    method = HilbertA(tiles=TILES)
    with pytest.raises(ValueError, match="schedules need a scheduler to tell the step: apply to the pipeline"):
        foveate.apply(pipe.transformer, method)
    for plan in (
        lambda: method.plan(((16, 16),), 0),
        lambda: method.tiles_for((16, 16)),
        lambda: LLSA(top_k=TILES).plan(((64, 64),), 0),
        lambda: ToMA(keep=KEEP).regions(((16, 16),)),
    ):
        with pytest.raises(ValueError, match=r"is a schedule.*take that of a step, as method.at_progress\(0.5\)"):
            plan()


def test_a_preset_keeps_its_schedules(pipe, tmp_path):
    methods = SCHEDULES["both"]
    preset = Preset(methods=methods, models=[describe(pipe.transformer)], size=(64, 96))
    preset.save(tmp_path / "preset.json")
    again = foveate.load(tmp_path / "preset.json")
    assert again == preset
    assert again.title == (
        "HilbertA T=(dense, 2 from 0.25, 4 from 0.5) slide=curve + "
        "ToMA keep=(0.75, dense from 0.25, 0.5 from 0.5) skip=0, dst_every=1, weights_every=1"
    )
    with foveate.apply(pipe, *methods):
        want = image(pipe)
    with foveate.apply(pipe, again):
        assert torch.equal(image(pipe), want)
