"""Laws of tuning: what it promises holds when generated again, and what it cannot promise it says."""

import json
import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
import tiny_pipelines
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import foveate
from foveate import Budget, HilbertA, StepCache, ToMA
from foveate.apps.demo.untrained import untrained_pipeline
from foveate.diffusers.preset import PRESETS, Preset, describe
from foveate.methods import ComposedMethod
from foveate.methods.base import layer_ranges
from foveate.nn.pixel_dit import PixelDiT
from foveate.pipelines.request import Request, draw
from foveate.tuning import measure
from foveate.tuning.similarity import psnr, ssim
from foveate.tuning.tune import Setting, _dense_layers, _weights, settings

PROMPTS = ["a cat", "an owl", "a car"]
METHODS = [ToMA(keep=0.5, tile=(4, 4), skip=0), HilbertA(tiles=4)]
SETTINGS = {"size": (64, 64), "steps": 4, "methods": METHODS, "caches": ()}
TIMES = {ToMA: 0.6, HilbertA: 0.8, StepCache: 0.2}


@pytest.fixture(scope="module")
def pipe():
    return untrained_pipeline(layers=1, single_layers=3, heads=2, rope=(4, 4, 8), text_dim=32, text_layers=1)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Every measurement takes a second with dense, and with a method what `TIMES` says."""
    time, active = 0.0, []

    @contextmanager
    def applied(pipe, method):
        with foveate.apply(pipe, method) as run:
            active.extend(part for part in (*method.parts, getattr(method, "cache", None)) if part)
            try:
                yield run
            finally:
                active.clear()

    def now(_device):
        nonlocal time
        time += math.prod(TIMES[type(part)] for part in active)
        return time

    monkeypatch.setattr(measure, "apply", applied)
    monkeypatch.setattr(measure, "now", now)


def drawn(pipe, number, preset=None):
    request = Request(PROMPTS[number], (64, 64), 4, None, number)
    if preset is None:
        return draw(pipe, request)[0]
    with foveate.apply(pipe, preset):
        return draw(pipe, request)[0]


@pytest.fixture(scope="module")
def tuned(pipe, tmp_path_factory):
    """Tunes in one folder, so that budgets share what was measured."""
    shared = tmp_path_factory.mktemp("tuned")
    return lambda budget, **more: foveate.tune(pipe, PROMPTS, budget, **{**SETTINGS, "out": shared, **more})


@pytest.mark.parametrize(
    ("budget", "score"),
    [
        (Budget(0.9998), ssim),
        pytest.param(Budget(50, "psnr"), psnr, marks=pytest.mark.slow),
        pytest.param(Budget(-0.002, lambda a, b: ssim(a, b) - 1), ssim, marks=pytest.mark.slow),
    ],
    ids=["ssim", "psnr", "a function"],
)
@pytest.mark.slow
def test_held_out_pictures_drawn_again_are_within_the_budget(pipe, tuned, budget, score):
    preset = tuned(budget)
    told = preset.evidence["held_out"]
    assert [one["prompt"] for one in told] == PROMPTS[1:]
    for number, one in enumerate(told, start=1):
        mine = budget.of(drawn(pipe, number, preset), drawn(pipe, number))
        assert mine == one["score"]
        assert mine >= budget.at_least
    assert preset.evidence["speed_up"] > 1.03
    assert score(drawn(pipe, 1, preset), drawn(pipe, 1)) < score(drawn(pipe, 1), drawn(pipe, 1))


def test_without_a_limit_the_fastest_candidate_works_everywhere(pipe, tuned):
    preset = tuned(Budget(-math.inf))
    assert preset.methods == (METHODS[0],)
    assert preset.evidence["speed_up"] == pytest.approx(1 / TIMES[ToMA])
    both = ComposedMethod((METHODS[1], METHODS[0]))
    assert tuned(Budget(-math.inf), methods=[*METHODS, both]).methods == both.parts


def test_a_budget_out_of_reach_says_what_came_nearest(pipe, tuned, tmp_path):
    with pytest.raises(
        ValueError, match=r"reaches SSIM 1 in every image: the nearest, HilbertA.* has 0\.99\d+ in the"
    ):
        tuned(Budget(1.0), out=tmp_path)
    assert {path.name for path in tmp_path.glob("*.json")} == {"settings.json", "measured.json"}


def test_a_candidate_that_saves_no_time_or_does_not_fit_is_left_out(pipe, tuned, monkeypatch):
    told = []
    monkeypatch.setitem(TIMES, ToMA, 1.2)
    preset = tuned(Budget(-math.inf), methods=[*METHODS, HilbertA(tiles=512)], say=told.append, out=None)
    assert preset.methods == (METHODS[1],)
    assert any("HilbertA T=512: tiles need 32 tokens" in line for line in told)
    with pytest.raises(ValueError, match=r"no method saves time here: ToMA .*: 0\.83x a step"):
        tuned(Budget(0.5), methods=METHODS[:1], out=None)


@pytest.mark.slow
def test_an_interrupted_run_resumes_with_the_same_result_and_repeats_nothing(pipe, tuned, tmp_path, monkeypatch):
    budget, draws = Budget(0.9998), []
    original = measure.Measurements._draw

    def counted(self, number, method, on_step):
        original(self, number, method, on_step)
        draws.append((number, repr(method)))

    monkeypatch.setattr(measure.Measurements, "_draw", counted)
    whole = tuned(budget, out=tmp_path / "whole")
    for stop in (1, 7):
        draws.clear()
        count = 0

        def interrupt(_name, _length, stop=stop):
            def advance():
                nonlocal count
                count += 1
                if count == 5 * stop:
                    raise KeyboardInterrupt

            return advance

        folder = tmp_path / str(stop)
        try:
            tuned(budget, out=folder, track=interrupt)
        except KeyboardInterrupt:
            assert not list(pipe.transformer._forward_hooks.values())
        again = tuned(budget, out=folder)
        assert again.methods == whole.methods
        assert again.evidence["held_out"] == [
            one | {"dense_s": mine["dense_s"], "picture_s": mine["picture_s"]}
            for one, mine in zip(whole.evidence["held_out"], again.evidence["held_out"], strict=True)
        ]
        sparse = [one for one in draws if one[1] != "None"]
        assert len(sparse) == len(set(sparse))
    draws.clear()
    assert tuned(budget, out=tmp_path / "whole") == whole
    assert draws == []
    tuned(Budget(-math.inf), out=tmp_path / "whole")
    assert all("start_percent=0.0, end_percent=1.0" in method or method == "None" for _, method in draws)
    with pytest.raises(ValueError, match="name another folder"):
        tuned(budget, out=tmp_path / "whole", steps=3)


@pytest.mark.parametrize(("disturbed", "told"), [(1, ""), (99, "too busy to tell")])
def test_what_noise_decides_is_measured_again_and_not_ranked(pipe, tmp_path, monkeypatch, disturbed, told):
    """The dense call of every other step takes twice as long, in some rounds."""
    measured = measure.Measurements(
        pipe, [Request(prompt, (64, 64), 4, None, i) for i, prompt in enumerate(PROMPTS)], 1, tmp_path, lambda *_: int
    )
    steady, calls, steps = measured._forward, 0, len(measured.recorded)

    def forward(recorded):
        nonlocal calls
        step, which = divmod(calls, 3)
        calls += 1
        seconds, predictions = steady(recorded)
        slow = which == 0 and step % 2 == 0 and step < disturbed * steps
        return seconds * (1 + slow), predictions

    monkeypatch.setattr(measured, "_forward", forward)
    cost = measured.cost(METHODS[1])
    known = json.loads((tmp_path / "measured.json").read_text()) if (tmp_path / "measured.json").exists() else {}
    if told:
        assert told in cost["why"]
        assert known == {}  # measured again the next time
        assert calls == 3 * steps * measure.ROUNDS
    else:
        assert cost["ratio"] == pytest.approx(TIMES[HilbertA])
        assert calls == 3 * steps * 2
        assert max(cost["ratios"]) <= measure.NOISE * min(cost["ratios"])


@torch.no_grad()
def test_errors_are_those_of_the_model_itself(pipe, tmp_path):
    measured = measure.Measurements(
        pipe, [Request(prompt, (64, 64), 4, None, i) for i, prompt in enumerate(PROMPTS)], 1, tmp_path, lambda *_: int
    )
    method = METHODS[1]
    cost = measured.cost(method)
    assert cost["steps"] == [0, 1, 2, 3]
    assert cost["ratio"] == pytest.approx(TIMES[HilbertA])
    assert cost["grids"] == [[[16, 16]]]
    calls = predictions(pipe, 0)
    for number, error in enumerate(cost["errors"]):
        args, kwargs, dense = calls[number]
        with foveate.apply(pipe, method):
            sparse = pipe.transformer(*args, **kwargs)[0]
        assert error == pytest.approx(((sparse - dense).norm() / dense.norm()).item(), rel=1e-4)
    layers = measured.layers([method])[method]
    assert [group["layers"] for group in layers] == [[0], [1], [2], [3]]
    for group in layers:
        with foveate.apply(pipe, replace(method, dense_layers=layer_ranges({0, 1, 2, 3} - set(group["layers"])))):
            sparse = [(pipe.transformer(*args, **kwargs)[0], dense) for args, kwargs, dense in calls[1:3]]
        errors = [((ours - dense).norm() / dense.norm()).item() for ours, dense in sparse]
        assert group["prediction_error"] == pytest.approx(sum(errors) / 2, rel=1e-4)


def predictions(pipe, number):
    """Arguments and prediction of every step of a dense run."""
    calls = []
    hook = pipe.transformer.register_forward_hook(
        lambda _model, args, kwargs, out: calls.append((args, kwargs, out[0])), with_kwargs=True
    )
    drawn(pipe, number)
    hook.remove()
    return calls


@pytest.mark.slow
def test_a_video_with_two_experts_and_guidance_is_tuned(tmp_path):
    pipe = tiny_pipelines.wan(experts=2)
    method = HilbertA(tiles=2)
    preset = foveate.tune(
        pipe, PROMPTS[:2], Budget(-math.inf), size=(128, 64), steps=4, guidance=3.0, frames=9, methods=[method],
        out=tmp_path,
    )  # fmt: skip
    assert preset.methods == (method,)
    assert len(preset.models) == 2
    assert preset.grids == (((3, 8, 4),),)
    with Image.open(tmp_path / "dense" / "001.png") as picture:
        assert picture.size == (64, 9 * 128)
    request = Request(PROMPTS[1], (128, 64), 4, 3.0, 1, frames=9)
    with foveate.apply(pipe, preset) as run:
        frames = draw(pipe, request)
        assert any(layer.method == "HilbertA T=2" for layer in run.summary().layers)
    scores = [ssim(*pair) for pair in zip(frames, draw(pipe, request), strict=True)]
    assert preset.evidence["held_out"][0]["score"] == pytest.approx(sum(scores) / 9, abs=0.02)


def test_the_settings_are_those_that_no_other_one_beats():
    steps, methods = 10, [HilbertA(tiles=4), ToMA()]
    costs = {
        methods[0]: {"ratio": 0.5, "steps": [0, 9], "errors": [0.4, 0.2]},
        methods[1]: {"ratio": 0.7, "steps": [0, 9], "errors": [0.1, 0.1]},
    }
    group = {"layers": [0], "prediction_error": 0.3, "saved": 10}
    layers = {m: [group, {"layers": [1, 2], "prediction_error": 0.1, "saved": 30}] for m in methods}
    weights = _weights([{"steps": list(range(10)), "picture_error": 1.0}], torch.full((10,), 0.1).numpy())
    assert sum((0.1 * weights) ** 2) == pytest.approx(1)
    front = settings(methods, costs, layers, weights, {}, 1.0)
    assert front[0].method == methods[0]
    assert front[0].time == 0.5
    assert [one.time for one in front] == sorted(one.time for one in front)
    assert [one.error for one in front] == sorted((one.error for one in front), reverse=True)
    for one in front:  # by hand
        (part,) = one.method.parts
        e = [0.4 - 0.2 * i / 9 if isinstance(part, HilbertA) else 0.1 for i in range(steps)]
        active = [i for i in range(steps) if part.start_percent <= i / steps <= part.end_percent]
        left, saving = (0.1, 0.75) if part.dense_layers else (1.0, 1.0)
        assert part.dense_layers in ("", "0")
        assert one.error == pytest.approx(math.sqrt(sum(e[i] ** 2 * 10 for i in active) * left))
        assert one.time == pytest.approx(
            1 - len(active) / steps * (1 - costs[methods[isinstance(part, ToMA)]]["ratio"]) * saving
        )
    assert [layers for layers, *_ in _dense_layers(layers[methods[0]])] == [[], [0]]


def test_schedules_of_two_candidates_are_among_the_settings():
    """Errors weigh little in late steps: first few tiles, then many, beats each of both from any step on."""
    steps, methods = 10, [HilbertA(tiles=4), HilbertA(tiles=16), HilbertA(tiles=4, centre=0), ToMA()]
    ratios, errors = (0.6, 0.3, 0.99, 0.99), (0.1, 0.3, 1.0, 1.0)
    costs = {
        method: {"ratio": ratio, "steps": [0, 9], "errors": [error, error]}
        for method, ratio, error in zip(methods, ratios, errors, strict=True)
    }
    weights = torch.linspace(1, 0.1, steps).numpy()
    front = settings(methods, costs, {method: [] for method in methods}, weights, {}, 1.0)
    assert [one.time for one in front] == sorted(one.time for one in front)
    assert [one.error for one in front] == sorted((one.error for one in front), reverse=True)
    scheduled = [one for one in front if len(one.method.schedule) > 1]
    assert len(scheduled) >= 3
    for one in scheduled:  # by hand
        cost, error = 0.0, 0.0
        for i in range(steps):
            tiles = [value for start, value in one.method.tiles if start <= i / steps][-1]
            cost += {"dense": 1.0, 4: 0.6, 16: 0.3}[tiles]
            error += ({"dense": 0.0, 4: 0.1, 16: 0.3}[tiles] * weights[i]) ** 2
            plain = one.in_step(i / steps)
            assert plain == (None if tiles == "dense" else HilbertA(tiles=tiles))
        assert one.time == pytest.approx(cost / steps)
        assert one.error == pytest.approx(math.sqrt(error))
        assert list(one.active(steps)) == [one.in_step(i / steps) is not None for i in range(steps)]


def test_a_schedule_that_is_chosen_has_its_measured_gain(pipe, tuned, monkeypatch):
    schedule = HilbertA(tiles=((0.0, "dense"), (0.2, 2), (0.5, 4)))
    monkeypatch.setattr("foveate.tuning.tune.settings", lambda *_: [Setting(schedule, None, 0.1, 0.9)])
    preset = tuned(Budget(-math.inf), methods=[HilbertA(tiles=2), HilbertA(tiles=4)])
    assert preset.methods == (schedule,)
    assert preset.evidence["speed_up"] == pytest.approx(4 / (1 + 3 * TIMES[HilbertA]))  # three of four steps
    assert preset.evidence["active_steps"] == 0.75


@pytest.mark.parametrize("layers", [set(), {0}, {0, 1, 2}, {1, 3, 4, 9}])
def test_layers_as_text_are_read_back(layers):
    assert HilbertA(dense_layers=layer_ranges(layers)).dense_layer_set() == layers


# --- presets ---


def test_a_preset_is_the_same_after_it_was_written_and_read(pipe, tuned, tmp_path):
    preset = tuned(Budget(0.9998))
    preset.save(tmp_path / "preset.json")
    assert json.loads((tmp_path / "preset.json").read_text())["size"] == [64, 64]
    again = foveate.load(tmp_path / "preset.json")
    assert again == preset
    assert drawn(pipe, 1, again).tobytes() == drawn(pipe, 1, preset).tobytes()
    assert again.grids == (((16, 16),),)


def test_a_preset_refuses_another_model_and_names_both(pipe):
    preset = Preset(methods=(HilbertA(tiles=4),), models=[describe(pipe.transformer)], size=(64, 64))
    other = untrained_pipeline(layers=1, single_layers=2, heads=2, rope=(4, 4, 8), text_dim=32, text_layers=1)
    told = r"a FluxTransformer2DModel with num_single_layers=3, and this one has num_single_layers=2"
    with pytest.raises(ValueError, match=told):
        foveate.apply(other, preset)
    with pytest.raises(ValueError, match="is for FluxTransformer2DModel, and this is PixelDiT"):
        foveate.apply(PixelDiT(text_dim=16, num_layers=1, num_attention_heads=1, attention_head_dim=32), preset)
    with pytest.raises(ValueError, match="apply it alone"):
        foveate.apply(pipe, preset, ToMA())
    foveate.apply(pipe.transformer, preset).remove()


def test_at_another_size_a_preset_warns_once(pipe, caplog):
    preset = Preset(
        methods=(HilbertA(tiles=2),), models=[describe(pipe.transformer)], size=(64, 64), grids=(((16, 16),),)
    )
    drawn(pipe, 0, preset)
    assert not caplog.messages
    with foveate.apply(pipe, preset):
        draw(pipe, Request("a cat", (96, 64), 2, None, 0))
    assert caplog.messages == ["the preset was measured at ((16, 16),) image tokens, not at ((24, 16),)"]


def test_files_that_are_no_presets_are_refused(tmp_path):
    path = tmp_path / "p.json"
    for content, told in (("{", "cannot read"), ("{}", "is no preset"), ("[1]", "is no preset")):
        path.write_text(content)
        with pytest.raises(ValueError, match=told):
            foveate.load(path)
    path.write_text(json.dumps({"methods": [{"method": "hilberta", "options": {"tilse": 4}}]}))
    with pytest.raises(ValueError, match=r"another version.*did you mean tiles"):
        foveate.load(path)
    with pytest.raises(ValueError, match="there is no preset nothing: name a file"):
        foveate.load("nothing")


@pytest.mark.parametrize("path", sorted(PRESETS.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_presets_are_of_the_built_in_model_and_have_their_evidence(path):
    preset = foveate.load(path.stem)
    assert preset.models == [describe(untrained_pipeline().transformer)]
    budget = preset.evidence["budget"]["at_least"]
    assert min(one["score"] for one in preset.evidence["held_out"]) >= budget
    assert preset.evidence["speed_up"] > 1.03


@pytest.mark.parametrize(
    ("prompts", "more", "told"),
    [
        (["a cat"], {}, "two prompts"),
        ("a cat", {}, "two prompts"),
        (PROMPTS, {"methods": []}, "name the methods"),
        (PROMPTS, {"methods": [HilbertA(start_percent=0.1)]}, "leave them out of HilbertA"),
        (PROMPTS, {"methods": [HilbertA(tiles=((0.0, "dense"), (0.5, 4)))]}, "schedules: leave them out of HilbertA"),
        (PROMPTS, {"size": (65, 64)}, "does not fit"),
        (PROMPTS, {"size": 64}, "such as"),
        (PROMPTS, {"steps": 0}, "1 or more, not 0"),
        (PROMPTS, {"methods": ToMA()}, "a list of methods"),
        (PROMPTS, {"methods": [ToMA]}, "pass an instance"),
        (PROMPTS, {"budget": 0.9}, r"such as foveate.Budget\(0.95\), not 0.9"),
    ],
)
def test_wrong_arguments_are_refused(as_a_user, pipe, prompts, more, told):
    with pytest.raises(ValueError, match=told):
        foveate.tune(pipe, prompts, **{"budget": Budget(0.9), **SETTINGS, **more})


@pytest.mark.parametrize(("at_least", "score"), [(1.1, "ssim"), (math.nan, "psnr"), (0.5, "lpips"), ("0.9", "ssim")])
def test_a_budget_must_be_possible(as_a_user, at_least, score):
    with pytest.raises(ValueError, match=r"at most|one of|a number"):
        Budget(at_least, score)


# --- step caches ---

CACHES = [StepCache(threshold=threshold, start_percent=0.25) for threshold in (0.0, 0.3, 9.0)]


def test_a_step_cache_may_be_all_or_join_a_method(pipe, tmp_path):
    options = {"size": (64, 64), "steps": 4, "out": tmp_path}
    told = []
    both = foveate.tune(pipe, PROMPTS, Budget(-math.inf), **options, methods=METHODS, caches=CACHES, say=told.append)
    assert (both.methods, both.cache) == ((METHODS[0],), CACHES[2])
    assert sum("of the steps computed" in line for line in told) == 3
    assert both.evidence["computed_steps"] == 0.25
    assert [one["cache"] for one in both.evidence["step_caches"]] == [cache.title for cache in CACHES[2:]]
    alone = foveate.tune(pipe, PROMPTS, Budget(-math.inf), **options, methods=[], caches=CACHES)
    assert (alone.methods, alone.cache) == ((), CACHES[2])
    assert both.evidence["speed_up"] > alone.evidence["speed_up"] > 2
    dense = drawn(pipe, 1)
    with foveate.apply(pipe, both) as run:
        assert ssim(drawn(pipe, 1), dense) == both.evidence["held_out"][0]["score"]
        assert run.summary().skipped == {"transformer": 3}


def test_a_model_without_a_step_cache_says_so_and_is_tuned_without():
    bria, told = tiny_pipelines.bria(), []
    foveate.tune(
        bria, PROMPTS, Budget(-math.inf), size=(64, 64), steps=2, methods=METHODS[:1], caches=CACHES, say=told.append
    )
    assert any("no First Block Cache for BriaTransformer2DModel" in line for line in told)


def test_the_time_with_a_step_cache_is_that_of_computed_and_skipped_steps():
    method, cache = HilbertA(tiles=4), StepCache(threshold=0.5)
    costs = {method: {"ratio": 0.5, "steps": [0, 3], "errors": [2.0, 2.0]}}
    layers = {method: [{"layers": [0], "prediction_error": 0.1, "saved": 1}]}
    caches = {cache: {"computed": [1.0, 1.0, 0.0, 0.5], "picture_error": 0.3}}
    weights = torch.full((4,), 0.5).numpy()
    front = settings([method], costs, layers, weights, caches, 0.1)
    whole = next(one for one in front if one.cache and one.method and one.method.always)
    assert whole.time == pytest.approx((0.5 + 0.5 + 0.1 + 0.5 * 0.5 + 0.5 * 0.1) / 4)
    assert whole.error == pytest.approx(math.sqrt(0.3**2 + (0.5 * 2.0) ** 2 * 2.5))
    alone = next(one for one in front if one.method is None)
    assert alone.time == pytest.approx((1 + 1 + 0.1 + 0.55) / 4)
    assert alone.error == pytest.approx(0.3)


def test_a_folder_of_before_step_caches_is_resumed(pipe, tmp_path):
    preset = foveate.tune(pipe, PROMPTS, Budget(-math.inf), **SETTINGS | {"out": tmp_path})
    for path in tmp_path.glob("*/*.png"):
        picture = Image.open(path)
        told = PngInfo()
        for name, text in picture.info.items():
            if name != "computed":
                told.add_text(name, text)
        picture.save(path, pnginfo=told)
    assert foveate.tune(pipe, PROMPTS, Budget(-math.inf), **SETTINGS | {"out": tmp_path}) == preset
