"""What `foveate.apply` returns: removal bit for bit, pauses, copies, summaries, and calls that are refused."""

import contextlib
import copy
import io

import pytest
import tiny
import torch
from tiny import FAMILIES, LLSA_ONLY, built, call

import foveate
from foveate import HilbertA, ToMA
from foveate.diffusers.card import card_of

pytestmark = pytest.mark.usefixtures("no_grad")
MERGING = ToMA(skip=0, tile=(4, 4))
SPARSE = [(name, (family.method,)) for name, family in FAMILIES.items()]
MERGED = [(name, (MERGING,)) for name in FAMILIES]
OTHERS = *((name, (family.method,)) for name, family in LLSA_ONLY.items()), ("flux", (HilbertA(tiles=2), MERGING))


def cases(*chosen):
    ids = [f"{name}-{'+'.join(type(method).__name__ for method in methods)}" for name, methods in chosen]
    return pytest.mark.parametrize(("name", "methods"), chosen, ids=ids)


every_case = cases(*SPARSE, *MERGED, *OTHERS)
one_method_of_each_family = cases(*SPARSE[::2], *MERGED[1::2], *OTHERS)


class Foreign:
    def __call__(self, *args, **kwargs):
        raise AssertionError


def rows(run):
    return [(row.method, row.why) for row in run.summary().layers]


@every_case
def test_removal_gives_the_model_back_bit_for_bit_also_after_an_exception(name, methods):
    model, x = built(name)
    if methods != (MERGING,) and (FAMILIES | LLSA_ONLY)[name].checkpoints:
        model.enable_gradient_checkpointing()
    dense, before, state = call(model, x), tiny.fingerprint(model), list(model.state_dict())
    run = foveate.apply(model, *methods)
    assert list(model.state_dict()) == state
    with torch.enable_grad():
        call(model, x)
    run.remove()
    run.remove()
    assert tiny.fingerprint(model) == before
    assert torch.equal(call(model, x), dense)
    with contextlib.suppress(KeyboardInterrupt), foveate.apply(model, *methods):
        call(model, x)
        raise KeyboardInterrupt
    assert tiny.fingerprint(model) == before
    with foveate.apply(model, *methods) as again:
        run.remove()  # an older handle leaves the new one alone
        call(model, x)
        assert any(method != "dense" for method, _ in rows(again)) or model.is_gradient_checkpointing
    foveate.apply(model, *methods)
    foveate.remove(model)
    foveate.remove(model)
    assert foveate.summary(model).layers == []
    assert tiny.fingerprint(model) == before


@one_method_of_each_family
def test_pauses_are_dense_and_a_failed_forward_pass_does_not_spoil_the_next(name, methods, caplog):
    model, x = built(name)
    parts = "to_out", "ff", "to_query", "img_attn_qkv"
    last = [module for module in model.modules() if any(hasattr(module, part) for part in parts)][-1]
    with foveate.apply(model, *methods) as run:
        want = call(model, x)
        within = rows(run)
        with contextlib.suppress(KeyError), run.paused():
            with run.paused():
                dense = call(model, x)
            assert torch.equal(call(model, x), dense)
            raise KeyError
        last.forward, forward = None, last.forward
        with pytest.raises(TypeError):
            call(model, x)
        last.forward = forward
        assert torch.equal(call(model, x), want)
        assert run.summary().outcomes[type(model).__name__] == {"": 2, "paused": 2}
        assert "2 of 4 forward passes sparse; 2 dense: paused" in " ".join(str(run.summary()).split())
        del last.forward
    assert rows(run) == within
    assert any(method.startswith(methods[0].title.split()[0]) for method, _ in within)
    assert (want - dense).abs().max() > 1e-6
    if name not in LLSA_ONLY:  # a pixel model may have been trained with another attention than the dense one
        assert torch.equal(call(model, x), dense)
    assert not [record for record in caplog.records if record.name == "foveate" and "paused" in record.message]


@one_method_of_each_family
def test_a_deep_copy_and_a_saved_model_have_methods_of_their_own(name, methods):
    model, x = built(name)
    dense, before = call(model, x), tiny.fingerprint(model)
    run = foveate.apply(model, *methods)
    want = call(model, x)
    twin = copy.deepcopy(model)
    torch.save(model, file := io.BytesIO())
    run.remove()
    file.seek(0)
    assert torch.equal(call(torch.load(file, weights_only=False), x), want)
    assert torch.equal(call(twin, x), want)
    assert torch.equal(call(model, x), dense)
    foveate.remove(twin)
    assert torch.equal(call(twin, x), dense)
    for (path, ours), theirs in zip(tiny.fingerprint(twin).items(), before.values(), strict=True):
        assert ours[:3] == theirs[:3], path


@one_method_of_each_family
def test_an_apply_that_fails_leaves_nothing_behind(name, methods):
    model = built(name)[0]
    before = tiny.fingerprint(model)
    with pytest.raises(ValueError, match="names layer 99, but the model has layers 0 to "):
        foveate.apply(model, *(type(m)(**vars(m) | {"dense_layers": "99"}) for m in methods))
    assert tiny.fingerprint(model) == before


@pytest.mark.parametrize("name", FAMILIES)
def test_processors_that_foveate_does_not_know_are_refused_with_the_remedy(name):
    model, x = built(name)
    method = FAMILIES[name].method
    with foveate.apply(model, method) as run:
        paths = [row.layer for row in run.summary().layers if not row.layer.endswith(".attn2")]
    attn = model.get_submodule(paths[1])
    stock, attn.processor = attn.processor, Foreign()
    before = tiny.fingerprint(model)
    refused = (method, MERGING) if card_of(model).wrapper is None else (method,)
    for each in refused:
        with pytest.raises(ValueError, match=r"has a Foreign, which foveate does not know: .*dense_layers='1'"):
            foveate.apply(model, each)
    assert tiny.fingerprint(model) == before
    attn.processor = stock
    with foveate.apply(model, type(method)(**vars(method) | {"dense_layers": "1"})):
        call(model, x)


def test_a_model_of_a_pipeline_tells_the_same_as_the_pipeline(caplog):
    pipe = tiny.pipeline()
    with foveate.apply(pipe, HilbertA(tiles=4)):
        assert foveate.summary(pipe.transformer).layers == foveate.summary(pipe).layers
        assert not foveate.summary(pipe.transformer).replaced
    assert not caplog.text


def test_bad_calls_are_refused_with_the_remedy(as_a_user):
    model = tiny.flux()
    for target, methods, remedy in (
        (model, (), "nothing to apply"),
        (model, (HilbertA(start_percent=0.2),), "apply to the pipeline"),
        (torch.nn.Linear(2, 2), (HilbertA(),), "Linear is not supported: foveate knows FluxTransformer2DModel"),
        (model, (HilbertA(), HilbertA()), r"choose one method of sparse attention, .*, not HilbertA \+ HilbertA"),
        (model, ("hilberta",), "not a method: 'hilberta'"),
        ("pipe", (HilbertA(),), "str has no transformer"),
    ):
        with pytest.raises(ValueError, match=remedy):
            foveate.apply(target, *methods)
    with foveate.apply(model, HilbertA()), pytest.raises(ValueError, match="already applied"):
        foveate.apply(model, HilbertA())
