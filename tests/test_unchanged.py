"""What a seed gives stays the same: pictures, answers and choices are those of version 0.1.

`unchanged/` holds the pictures, and `values.json` all else. Integers and texts must be equal, floats close, because
processors round differently. Tensors are compared by a checksum (integers) or by some statistics (floats).
"""

import json
import math
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import islice
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import tiny
import tiny_lm
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

import foveate
from foveate import LLSA, HilbertA, InfoFlowKV, SubCP, ToMA
from foveate.apps.demo.atlas import load_atlas
from foveate.apps.demo.evaluate import evaluate
from foveate.apps.demo.examples import write_examples
from foveate.apps.demo.facts import draw_facts
from foveate.apps.demo.labels import draw_labelled
from foveate.apps.demo.recogniser import judge, load_recogniser, recognise
from foveate.apps.demo.scenes import ScenePictures, Scenes, render, scenes
from foveate.methods import RECOMPUTE_POLICIES, ComposedMethod, ToDo, ToFu, ToMeSD
from foveate.methods.baselines.kv_baselines import CacheBlend
from foveate.ops.curves import CURVES, edge_average_stretch, geometric_distortion_error, grid_order
from foveate.ops.facility_location import facility_location, round_robin_greedy
from foveate.ops.hierarchical_pooling import select_blocks
from foveate.ops.log_linear_attention import log_linear_attention
from foveate.pipelines.lora import load_lora, using
from foveate.pipelines.request import Request, draw, draw_batch, load_pipeline
from foveate.transformers import ChunkEncoder
from foveate.transformers.in_context import prompt_with
from foveate.transformers.index import ChunkIndex
from foveate.transformers.rag import ask
from foveate.transformers.retrieval import bm25
from foveate.tuning import measure
from foveate.tuning.similarity import psnr
from foveate.tuning.tune import Budget, settings, tune
from foveate_models import find

BEFORE = Path(__file__).parent / "unchanged"
VALUES = json.loads((BEFORE / "values.json").read_text())
GRIDS = ((1, 1), (1, 7), (7, 1), (2, 7), (3, 4), (13, 7), (16, 16), (31, 18), (47, 53), (3, 4, 5), (5, 8, 9),
         (1, 9, 4), (7, 3, 2), (4, 16, 16))  # fmt: skip


def seeded(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def unit(*shape, seed=0):
    return torch.nn.functional.normalize(seeded(*shape, seed=seed), dim=-1)


# --- pictures --------------------------------------------------------------------------------------------------------

PROMPT = "a red apple above a blue car on a green background"
OTHER = "an owl to the left of a cow on a pink background"
MOVING = "a red apple moves up on a green background"
METHODS = {
    "dense": (),
    "hilberta-4": (HilbertA(tiles=4, slide="curve"),),
    "hilberta-16": (HilbertA(tiles=16, slide="curve"),),
    "toma": (ToMA(keep=0.5),),
    "toma-module": (ToMA(keep=0.5, granularity="module", tile=(4, 4), merge_mlp=True),),
    "llsa": (LLSA(min_tokens=0),),
    "todo": (ToDo(),),
    "tomesd": (ToMeSD(),),
    "tofu": (ToFu(),),
    "hilberta-toma": (HilbertA(tiles=4), ToMA(keep=0.5)),
}


@cache
def pipe(name):
    return load_pipeline(str(find(name)), "cpu")


def applied(pipeline, *methods):
    return foveate.apply(pipeline, *methods) if methods else nullcontext()


def one(methods, size):
    with applied(pipe("pipeline"), *methods):
        return draw(pipe("pipeline"), Request(PROMPT, size, 4, None, 0))


def with_guidance():
    requests = [
        Request(prompt, (64, 64), 2, 2.5, seed, "a boat") for seed, prompt in enumerate((PROMPT, OTHER), start=7)
    ]
    with foveate.apply(pipe("pipeline"), HilbertA(tiles=4), ToMA(keep=0.75, skip=0)):
        return draw_batch(pipe("pipeline"), requests)


def with_preset(name):
    with foveate.apply(pipe("pipeline"), foveate.load(name)):
        return draw(pipe("pipeline"), Request(OTHER, (128, 128), 6, None, 1))


def with_lora(folder):
    pipeline = load_pipeline(str(find("pipeline")), "cpu")
    method = load_lora(pipeline, find(folder) / "pytorch_lora_weights.safetensors")
    request = Request(OTHER, (96, 96), 2, None, 3)
    with using(pipeline, method):
        return draw(pipeline, request)


def pixels(size, *methods):
    requests = [Request(prompt, size, 2, 2.0, seed) for seed, prompt in enumerate((PROMPT, OTHER))]
    with applied(pipe("pixel"), *methods):
        return draw_batch(pipe("pixel"), requests)


def video(*methods):
    with applied(pipe("video"), *methods):
        return draw(pipe("video"), Request(MOVING, (64, 64), 2, 3.0, 5, frames=9))[-1:]


FAST_PICTURES = {"guidance": with_guidance}
SLOW_PICTURES = {
    f"{name}-{height}x{width}": partial(one, methods, (height, width))
    for (name, methods), (height, width) in zip(METHODS.items(), 5 * ((96, 160), (128, 128)), strict=True)
} | {
    "pixel-llsa": partial(pixels, (32, 48), LLSA(top_k=2, levels=1, min_tokens=0)),
    "pixel": partial(pixels, (16, 24)),
    "video": video,
    "video-hilberta": partial(video, HilbertA(tiles=4)),
    "video-llsa": partial(video, LLSA(min_tokens=0, top_k=4)),
    "lora": partial(with_lora, "lora"),
    "lora-16": partial(with_lora, "lora-16"),
    "preset-0.9": partial(with_preset, "built-in-128px-ssim-0.9"),
    "preset-0.95": partial(with_preset, "built-in-128px-ssim-0.95"),
}  # fmt: skip
PICTURES = SLOW_PICTURES | FAST_PICTURES


def side_by_side(pictures):
    return Image.fromarray(np.concatenate([np.array(picture.convert("RGB")) for picture in pictures], 1))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST_PICTURES else pytest.mark.slow) for name in PICTURES]
)
def test_pictures_have_not_changed(name):
    before = Image.open(BEFORE / f"{name}.png").convert("RGB")
    assert psnr(side_by_side(PICTURES[name]()), before) > 50


# --- choices ---------------------------------------------------------------------------------------------------------


def curves():
    orders = {f"{curve} {grid}": grid_order(curve, *grid) for curve in CURVES for grid in GRIDS}
    locality = {
        f"{curve} {grid} {within}": [
            measured(grid_order(curve, *grid), *grid, within=within)
            for measured in (edge_average_stretch, geometric_distortion_error)
        ]
        for curve in CURVES
        for grid in ((13, 7), (16, 16))
        for within in (None, 8)
    }
    return orders, locality


def hilberta():
    methods = [
        *(HilbertA(tiles=4, curve=curve, slide=slide) for curve in CURVES for slide in ("auto", "curve")),
        HilbertA(tiles=6, period=3, centre=0, align=1),
        HilbertA(tiles=4, reference="tiled", centre=0.5),
        HilbertA(tiles=4, reference="tiled", slide="curve", period=1),
        HilbertA(tiles="auto"),
    ]
    grids = (((16, 20),), ((33, 37),), ((31, 33), (9, 14), (16, 16)), ((5, 8, 9),))
    found = {}
    for i, method in enumerate(methods):
        for text, grid in enumerate(grids):
            try:
                plan = method.plan(grid, text, block=32)
            except ValueError:
                found[f"method {i} {grid}"] = "refused"
                continue
            tables = [torch.cat([part.long() for part in table]) for table in plan.tables]
            tiled = len(grid) if method.reference == "tiled" else 1
            prefix = text + sum(tokens for _, tokens in plan.segments[:-tiled])  # tokens that all others read
            counts = [method.tiles_for(grid[0]), prefix, *map(list, plan.segments)]
            found[f"method {i} {grid}"] = [counts, torch.cat(plan.orders), torch.cat(tables), plan.tile_maps]
    return found


def other_plans():
    grids = (((32, 32),), ((33, 37), (9, 14)), ((5, 8, 9),))
    methods = LLSA(), LLSA(curve="hilbert", top_k=2, block_size=32), ToDo(), ToDo(factor=3)
    found = {}
    for i, method in enumerate(methods):
        for grid in grids:
            plan = method.plan(grid, 5)
            found[f"method {i} {grid}"] = [plan.orders[0], [table.pairs() for table in plan.tables]]
    return found


def llsa():
    found = {}
    for tokens, options in (
        (300, {"top_k": 2}), (1000, {"top_k": 3, "levels": 1}), (1000, {"top_k": 4, "levels": 2, "block_size": 32}),
        (5000, {"top_k": 2}),
    ):  # fmt: skip
        q, k, v = (seeded(1, 2, tokens, 32, seed=seed) for seed in (1, 2, 3))
        lists = select_blocks(q, k, **options).lists
        found[f"{tokens} {options}"] = [*lists, log_linear_attention(q, k, v, **options)[0] if tokens < 2000 else None]
    return found


def features(*grids):
    """Smooth random features of images, so that neighbours are similar."""
    return torch.cat(
        [seeded(2, math.prod(grid), 16, seed=i).cumsum(1) / 8 + seeded(2, math.prod(grid), 16, seed=9 + i) / 4
         for i, grid in enumerate(grids)], 1
    )  # fmt: skip


def merging():
    methods = [
        ToMA(), ToMA(keep=0.25, tile=(4, 4), weights="hard"), ToMA(keep=0.7, tile=(4, 8), merge_reference=True),
        ToMeSD(), ToMeSD(keep=0.3, cell=(2, 3), random=True), ToFu(), ToFu(keep=0.6).at(0.9),
    ]  # fmt: skip
    found = {}
    for i, method in enumerate(methods):
        for grids in (((16, 16),), ((13, 17), (8, 9)), ((4, 8, 9),)):
            x = features(*grids)
            regions = method.regions(grids)
            merge = method.plan(x[:, regions.order], regions)
            merged = merge.merge(x[:, regions.order])
            found[f"method {i} {grids}"] = [
                regions.order, [list(map(int, (g.number, g.kept, *g.shape))) for g in regions.groups],
                merge.positions, merge.chosen, merged, merge.unmerge(merged),
            ]  # fmt: skip
            if isinstance(method, ToMA):
                later = method.plan(x[:, regions.order] * seeded(16, seed=20), regions, merge.chosen)
                found[f"method {i} {grids}"] += [merge.gather, later.spread]
    plan = HilbertA(tiles=4, slide="curve").plan(((16, 20),), 7)
    regions = ToMA().regions_along(plan, (16, 20))
    x = features((16, 20))
    found["along the curve"] = [regions.groups, ToMA().plan(x[:, regions.order], regions).chosen]
    return found


def picks():
    small, large = unit(3, 50, 8), unit(1100, 8, seed=1)
    bonus = seeded(1100, seed=2).abs()
    classes = torch.arange(1100) % 3
    return {
        "dense": facility_location(small @ small.mT, 20),
        "distances": facility_location(-torch.cdist(small, small), 7),
        "lazy": facility_location(large @ large.mT, 60),
        "turns": round_robin_greedy(large[:700], large, [0, 1, 2, 2, 1, 0] * 8),
        "bonus": round_robin_greedy(large, large, [0] * 40, bonus=bonus),
        "room": round_robin_greedy(
            large, large, [0, 1] * 12, classes=classes, room=torch.tensor([[6, 3, 3], [4, 4, 4]])
        ),
    }


def sub_cp():
    pool, queries = seeded(120, 12), seeded(5, 12, seed=1)
    pool[60:80] = pool[:20]
    labels = [f"label {i * i % 7 % 3}" for i in range(120)]
    found = {}
    for strategy in foveate.methods.sub_cp.STRATEGIES:
        for size, order in ((6, "picked"), (None, "central_last")):
            blocks = SubCP(blocks=5, block_size=size, strategy=strategy, order=order).partition(pool)
            found[f"{strategy} {size}"] = [blocks.ids, blocks.report(labels), blocks.weights(queries)]
        if strategy != "local_coherent":
            sub = SubCP(blocks=4, block_size=5, strategy=strategy, query_bonus=3.0)
            found[f"{strategy} queries"] = sub.partition(pool, queries=queries).ids
        if strategy.startswith("global"):
            for balance in ("proportional", "equal"):
                sub = SubCP(blocks=4, block_size=6, strategy=strategy, balance=balance)
                found[f"{strategy} {balance}"] = sub.partition(pool, labels=labels).ids
        sub = SubCP(blocks=6, block_size=4, strategy=strategy, max_similarity=0.8)
        try:
            found[f"{strategy} apart"] = sub.partition(pool).ids
        except ValueError:
            found[f"{strategy} apart"] = "refused"
        found[f"{strategy} ids"] = SubCP(blocks=3, block_size=None, strategy=strategy).partition(pool, range(40)).ids
    found["select"] = SubCP().select(pool, 30)
    found["represent"] = SubCP(balance="equal").select(pool, 12, labels=labels, queries=queries, represent=queries)
    return found


# --- random models ---------------------------------------------------------------------------------------------------

FAMILIES = tiny.SPARSE | tiny.LLSA_ONLY
OUTPUTS = {
    "sparse": lambda family: (family.method,),
    "llsa": lambda family: (LLSA(top_k=2, min_tokens=0),),
    "todo": lambda family: (ToDo(),),
    "toma": lambda family: (ToMA(keep=0.5, tile=(4, 4), min_tokens=0),),
    "toma module": lambda family: (ToMA(keep=0.5, tile=(4, 4), min_tokens=0, granularity="module"),),
    "tomesd": lambda family: (ToMeSD(keep=0.5),),
    "tofu": lambda family: (ToFu(keep=0.5),),
    "both": lambda family: (HilbertA(tiles=2), ToMA(keep=0.5, tile=(4, 4))),
}


def outputs(name):
    """The output of a random model in two steps of a run, with each method."""
    family = FAMILIES[name]
    found = {}
    for method, make in OUTPUTS.items():
        torch.manual_seed(1)
        model, x = tiny.built(name, batch=2, **(family.wide if method == "llsa" else {}))
        try:
            with torch.no_grad(), foveate.apply(model, *make(family)) as run, run.image():
                found[method] = [tiny.call(model, tiny.at(x, left)) for left in (1, 0.5)]
        except ValueError:
            found[method] = "refused"
    return found


# --- answers ---------------------------------------------------------------------------------------------------------


@cache
def reader():
    model = AutoModelForCausalLM.from_pretrained(find("reader")).eval()
    return model, AutoTokenizer.from_pretrained(find("reader"))


def rag(folder):
    """Answers of the built-in reader with each policy."""
    questions, _ = write_examples(folder, seed=3)
    encoder = ChunkEncoder(*reader())
    index = ChunkIndex(folder / "index", encoder)
    index = index.add({path.name: path.read_text() for path in sorted((folder / "facts").glob("*.txt"))})
    index.build()
    policies = {name: policy() for name, policy in RECOMPUTE_POLICIES.items()} | {
        "reorder": InfoFlowKV(reorder=True, norm="l1", recompute=0.1),
        "boundary": InfoFlowKV(boundary=3, geometry="tl-tp", exclude_first=False),
        "keys": CacheBlend(rank="k", recompute=0.1),
    }
    found = {}
    for question in list(questions)[:1]:
        reply = ask(index, question, policies, prompt=" Question: {question} Answer:", top=6, max_new_tokens=4)
        found[question] = [
            reply.passages, reply.spans, reply.scores,
            [[answer.text, answer.rows, answer.order, answer.divergence] for answer in reply.answers],
        ]  # fmt: skip
    return found


def ranking(folder):
    questions, _ = write_examples(folder, seed=3)
    texts = tuple(path.read_text() for path in sorted((folder / "facts").glob("*.txt")))
    return {question: bm25(texts)(question) for question in list(questions)[:12]}


def cached_contexts(family, rope="default"):
    """Tokens that a random language model generates after cached chunks, with each policy."""
    encoder = tiny_lm.encoder(family, rope)
    context = encoder.compose(encoder.encode(tiny_lm.DOCUMENTS))
    found = {}
    for name, policy in RECOMPUTE_POLICIES.items():
        method = policy() if name in ("none", "full") else policy(recompute=0.3)
        with context.patch(method, tiny_lm.PROMPTS[1]) as patched:
            found[name] = [patched.rows, patched.logits(), patched.fidelity(), patched.generate(max_new_tokens=8)]
    return found


def in_context():
    """Labels and probabilities of the built-in reader after blocks of labelled examples."""
    model, tokenizer = reader()
    labelled = draw_labelled(1, 48, 3, torch.Generator().manual_seed(3), kinds=(4, 4))
    texts = [tokenizer.decode(example) for example in labelled.ids[0].split(6)]
    answers = sorted({text.split()[4] for text in texts})
    rows = model.get_input_embeddings().weight.detach()[labelled.ids[0].view(-1, 6)[:, :3]].mean(1)
    blocks = SubCP(blocks=4, block_size=6).partition(rows)
    shown = [[texts[i] for i in block] for block in blocks.ids]
    found = {"blocks": blocks.ids}
    for host in ("concatenate", "ensemble", "parallel_windows"):
        prompted = prompt_with(model, tokenizer, shown, host)
        for ids in labelled.questions[0]:
            question = tokenizer.decode(ids[:4])
            weights = blocks.weights(model.get_input_embeddings().weight.detach()[ids[:3]].mean(0))
            found[f"{host} {question}"] = [
                [prompted.probabilities(question, answers, weights, mix) for mix in ("moe", "poe", "max")],
                prompted.generate(question, 2),
            ]
    return found


# --- demonstration, tuning -------------------------------------------------------------------------------------------


def demonstration(folder):
    wanted = [*islice(scenes(0, evaluation=True), 6), *islice(scenes(4), 6)]
    pictures = render(load_atlas(), Scenes.of(wanted), 64)
    found, vectors = recognise(load_recogniser(), pictures)
    write_examples(folder, seed=5)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    generator = torch.Generator().manual_seed(7)
    return {
        "scenes": [[scene.caption, scene.objects, scene.boxes, scene.background] for scene in wanted],
        "training": ScenePictures(2).picture(5, (32, 32)),
        "pictures": pictures,
        "seen": [[one.object for one in several] for several in found],
        "vectors": vectors,
        "verdicts": [judge(one, scene) for one, scene in zip(found, wanted, strict=True)],
        "facts": draw_facts(3, 20, generator),
        "labelled": draw_labelled(3, 20, 4, generator),
        "files": {path.relative_to(folder).as_posix(): crc32(path.read_bytes()) for path in files},
    }


def limits(method):
    """Where a method is at work."""
    return [type(method).__name__, method.dense_layers, method.start_percent, method.end_percent]


def tuned_settings():
    """Settings from given costs: those that no other one beats."""
    methods = [ToMA(keep=0.5), HilbertA(tiles=4), ComposedMethod((HilbertA(tiles=2), ToMA(keep=0.75)))]
    costs = {
        method: {"ratio": 0.6 + i / 10, "steps": [0, 3, 7], "errors": [0.1 / (i + 1), 0.05, 0.2 / (i + 1)]}
        for i, method in enumerate(methods)
    }
    layers = {
        method: [
            {"layers": [layer], "prediction_error": (3 + i + layer * layer % 5) / 100, "saved": layer % 3 / 10}
            for layer in range(6)
        ]
        for i, method in enumerate(methods)
    }
    found = settings(methods, costs, layers, np.linspace(1, 2, 8), {}, 1.0)
    return [[*map(limits, one.method.parts), one.error, one.time, float(one.active(8).mean())] for one in found]


@contextmanager
def steady_clock():
    """Time of a step: 1 with dense, 0.6 with ToMA, 0.8 with HilbertA."""
    time, active = 0.0, []

    @contextmanager
    def apply(pipeline, method):
        with foveate.apply(pipeline, method) as run:
            active.extend(method.parts)
            try:
                yield run
            finally:
                active.clear()

    def now(_device):
        nonlocal time
        time += math.prod({ToMA: 0.6, HilbertA: 0.8}[type(part)] for part in active)
        return time

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "apply", apply)
        patch.setattr(measure, "now", now)
        yield


def tuned():
    """What tune decides for a random model."""
    methods = [ToMA(keep=0.5, tile=(4, 4), skip=0), HilbertA(tiles=4)]
    found, prompts = {}, tiny.PROMPTS[:3]
    for at_least in (0.9998, 0.99):
        with steady_clock():
            preset = tune(tiny.pipeline(), prompts, Budget(at_least), size=(64, 64), steps=4, methods=methods)
        scores = [picture["score"] for picture in preset.evidence["held_out"]]
        found[str(at_least)] = [*map(limits, preset.parts), preset.grids, preset.evidence["speed_up"], scores]
    return found


def evaluated(folder):
    """Scores of `foveate eval`."""
    request = Request("", (64, 64), 2, None, 0)
    scores = evaluate(pipe("pipeline"), [HilbertA(tiles=4)], folder, prompts=3, request=request, batch=2)
    fields = "objects", "relations", "extra", "psnr", "ssim", "flop_bound"
    return [[getattr(score, field) for field in fields] for score in scores]


# --- comparison ------------------------------------------------------------------------------------------------------

FAST_FAMILIES = ("flux", "wan")
FAST = {
    "curves": curves, "hilberta": hilberta, "other plans": other_plans, "llsa": llsa, "merging": merging,
    "picks": picks, "sub_cp": sub_cp, "rag": rag, "ranking": ranking, "in context": in_context,
    "demonstration": demonstration, "tuned settings": tuned_settings,
    **{f"outputs {name}": partial(outputs, name) for name in FAST_FAMILIES},
    "cached llama": partial(cached_contexts, "llama"),
}  # fmt: skip
SLOW = {
    **{f"outputs {name}": partial(outputs, name) for name in FAMILIES if name not in FAST_FAMILIES},
    **{f"cached {name}": partial(cached_contexts, name) for name in tiny_lm.FAMILIES if name != "llama"},
    "cached yarn": partial(cached_contexts, "gemma3", "yarn"),
    "tuned": tuned,
    "evaluated": evaluated,
}  # fmt: skip


def summary(value):
    """A result as JSON: a checksum for long integer tensors, and some statistics for float tensors."""
    if isinstance(value, torch.Tensor | np.ndarray):
        value = torch.as_tensor(value).detach().cpu()
        if not value.is_floating_point():
            if value.numel() <= 24:
                return value.tolist()
            return [*value.shape, crc32(value.to(torch.int64).contiguous().numpy().tobytes())]
        flat = value.double().flatten()
        some = flat[torch.linspace(0, len(flat) - 1, min(len(flat), 3)).long()]
        return [*value.shape, *map(summary, (flat.norm().item(), *some.tolist()))]
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: summary(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [summary(part) for part in value]
        whole = json.dumps(parts)
        return parts if len(whole) < 300 or "." in whole else crc32(whole.encode())
    return value


def assert_equal(now, before, where):
    """Equal integers and texts, close floats."""
    if isinstance(before, dict):
        assert now.keys() == before.keys(), where
        for name in before:
            assert_equal(now[name], before[name], f"{where}, {name}")
    elif isinstance(before, list):
        assert isinstance(now, list), where
        assert len(now) == len(before), where
        for i, pair in enumerate(zip(now, before, strict=True)):
            assert_equal(*pair, f"{where}, {i}")
    elif isinstance(before, float):
        rough = "outputs pixel" in where  # sines of its timesteps are float32, and processors round them differently
        assert now == pytest.approx(before, rel=1e-4, abs=1e-4 if rough else 1e-5), where
    else:
        assert now == before, where


def result(name, folder):
    """What a case gives today."""
    make = (FAST | SLOW)[name]
    return summary(make(folder) if make in (rag, ranking, demonstration, evaluated) else make())


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_answers_and_choices_have_not_changed(name, tmp_path):
    assert_equal(result(name, tmp_path), VALUES[name], name)
