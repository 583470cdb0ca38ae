"""Laws of the report: equal layers share a row, nothing is cut at 80 columns, and every form tells the same."""

import json
from collections import Counter

import tiny

import foveate
from foveate import HilbertA
from foveate.diffusers.summary import LayerReport, Summary

LATE = "this step lies outside start_percent to end_percent"
LAYERS = [
    *(LayerReport(f"blocks.{i}.attn", "HilbertA T=16 + ToMA keep=0.5", "hopper", 0.9, 0.6, 10**9) for i in range(19)),
    *(LayerReport(f"single.blocks.{i}.attn", "HilbertA T=16", "hopper", 0.9, 0.5, 10**9) for i in (0, 1, 4, 6, 7)),
    *(LayerReport(f"single.blocks.{i}.attn", "dense", why="named in dense_layers, <first> of all") for i in (2, 3, 5)),
]
SUMMARY = Summary({"transformer": LAYERS}, {"transformer": Counter({"": 2, LATE: 3})})


def test_equal_layers_share_a_row_with_what_they_saved_together():
    text = " ".join(str(SUMMARY).split())
    assert text.startswith(f"transformer: 2 of 5 forward passes sparse; 3 dense: {LATE}")
    assert "blocks.0-18.attn HilbertA T=16 +" in text
    assert "hopper 60.0% 19" in text
    assert "single.blocks.0-1,4,6-7.attn HilbertA T=16 hopper 50.0% 5" in text
    assert "dense: single.blocks.2-3,5.attn: named in dense_layers, <first> of all" in text


def test_a_summary_fits_80_columns_and_cuts_no_name():
    names = [f"single_transformer_blocks.{i}.attn.processor.of.a.name.that.is.long" for i in (7, 38)]
    layers = [LayerReport(name, "HilbertA T=16 + ToMA keep=0.5 granularity=module", "portable") for name in names]
    text = str(Summary({"transformer": layers}, {"transformer": Counter({"": 2})}))
    assert max(map(len, text.splitlines())) <= 80
    first = "".join(line[:36].strip() for line in text.splitlines()[2:])
    assert first == names[0].replace(".7.", ".7,38.")


def test_the_dictionary_holds_every_layer_and_is_json():
    (told,) = json.loads(json.dumps(SUMMARY.to_dict())).values()
    assert (told["sparse_forwards"], told["dense_forwards"], told["replaced"]) == (2, {LATE: 3}, False)
    assert [LayerReport(**layer) for layer in told["layers"]] == LAYERS


def test_a_notebook_shows_the_same_rows_escaped():
    html = SUMMARY._repr_html_()
    for text in (
        "5 forward passes sparse",
        "blocks.0-18.attn",
        "60.0%",
        "dense: named in dense_layers, &lt;first&gt;",
    ):
        assert text in html
    with foveate.apply(tiny.flux(), HilbertA(tiles=2)) as run:
        assert run._repr_html_() == run.summary()._repr_html_()
        assert repr(run) == str(run.summary())
        assert "no forward yet" in run._repr_html_()


def test_a_denoiser_that_was_loaded_after_apply_is_named_in_the_summary_and_the_log(caplog):
    pipe = tiny.pipeline()
    with foveate.apply(pipe, HilbertA(tiles=2)) as run:
        pipe.transformer_2 = tiny.flux()
        told = "transformer_2: the pipeline has another transformer_2 now, which is dense: apply again"
        assert told in str(run.summary())
        assert told in run._repr_html_()
        assert not run.summary().to_dict()["transformer"]["replaced"]
        assert "another transformer_2 since apply" in caplog.text


def test_a_denoiser_that_was_swapped_after_apply_is_named_in_the_summary_and_the_log(caplog):
    pipe = tiny.pipeline()
    run = foveate.apply(pipe, HilbertA(tiles=2))
    assert "another" not in str(run.summary())
    own, pipe.transformer = pipe.transformer, tiny.flux()
    text = " ".join(str(run.summary()).split())
    assert "the pipeline has another transformer now, which is dense: apply again" in text
    assert run.summary().to_dict()["transformer"]["replaced"]
    assert str(foveate.summary(pipe)) == "no method is applied"
    caplog.clear()
    run.remove()
    assert "the pipeline has another transformer since apply" in caplog.text
    assert not own._forward_pre_hooks
