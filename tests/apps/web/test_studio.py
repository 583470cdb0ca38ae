"""Laws of the studio, without its page: its images are the library's, it keeps what is done, and stops when told."""

from dataclasses import fields
from pathlib import Path

import pytest
import tiny
from PIL import Image
from tiny_lm import DOCUMENTS, language_model, tokenizer

from foveate.apps.cli import ui
from foveate.apps.web.studio import (
    Cancelled,
    FieldError,
    Form,
    QuestionForm,
    Studio,
    Tab,
    options_of,
    presets,
    recommended,
    scores,
)
from foveate.apps.web.studio_page import file_of
from foveate.diffusers.preset import Preset, describe
from foveate.methods import METHODS, HilbertA, ToMA, method_from_text, options_in
from foveate.pipelines.lora import Distilled
from foveate.pipelines.request import denoiser, draw
from foveate.tuning.similarity import psnr, ssim

FORM = Form("a red apple", "toma", "keep=0.5", "tiny", "", "64", "2")


@pytest.fixture(scope="module")
def pipe():
    return tiny.pipeline()


@pytest.fixture
def studio(pipe, tmp_path):
    def open_model(name, lora):
        if name not in ("tiny", "other"):
            raise ValueError(f"cannot load {name}")
        return pipe, None

    def open_reader(name):
        return language_model("qwen3").eval(), tokenizer()

    shared = ui.commands("cpu", "float32")
    return Studio(shared._replace(open_model=open_model, open_reader=open_reader), tmp_path / "studio")


@pytest.fixture
def built_in(monkeypatch, pipe, studio):
    """A studio whose LoRA "built-in" is for HilbertA at 48 px."""
    made = Distilled(HilbertA(tiles=2, start_percent=0.5), (48, 48))

    def open_model(name, lora):
        return pipe, made if lora else None

    monkeypatch.setattr(studio, "commands", studio.commands._replace(open_model=open_model, lora=lambda name: made))
    return studio


def drawn(studio, tab, form):
    *_, last = studio.draw(tab, form)
    return last


def saved_with(entry):
    with Image.open(entry.path) as picture:
        return picture.text


def test_it_draws_what_the_library_draws_and_saves_it_with_its_settings(studio, pipe):
    tab = Tab()
    dense, merged = studio.draw(tab, FORM)
    assert tab.history == [dense, merged]
    assert dense.image.tobytes() == draw(pipe, dense.request)[0].tobytes()
    assert merged.variant.psnr == psnr(merged.image, dense.image)
    assert merged.variant.picked is not None
    assert merged.tiles.size != merged.image.size
    for entry, method in ((dense, "dense"), (merged, repr(ToMA(keep=0.5)))):
        with Image.open(entry.path) as saved:
            assert saved.tobytes() == entry.image.tobytes()
            assert saved.text["method"] == method
            assert saved.text["prompt"] == "a red apple"
            assert saved.text["steps"] == "2"
        assert len(entry.variant.step_seconds) == 2
        assert 0 < sum(entry.variant.step_seconds) <= entry.seconds


def test_dense_is_drawn_once_for_a_request_and_nothing_is_overwritten(studio):
    tab = Tab()
    studio_files = [entry.path for form in (FORM, FORM, FORM._replace(seed="1")) for entry in studio.draw(tab, form)]
    methods = [entry.variant.label for entry in tab.history]
    assert methods == ["dense", "ToMA keep=0.5", "ToMA keep=0.5", "dense", "ToMA keep=0.5"]
    assert len(set(studio_files)) == len(list(studio.out.glob("*.png"))) == 5
    assert [entry.number for entry in tab.history] == [1, 2, 3, 4, 5]


def test_tabs_have_histories_of_their_own(studio):
    drawn(studio, studio.tabs["one"], FORM)
    drawn(studio, studio.tabs["two"], FORM._replace(method="dense", options=""))
    assert [len(studio.tabs[name].history) for name in ("one", "two")] == [2, 1]


def test_cancelling_keeps_what_is_finished_and_leaves_the_model_as_it_was(studio, pipe):
    tab = Tab()
    rounds = studio.draw(tab, FORM, lambda name, length: tab.cancelled.set if name != "dense" else lambda: None)
    dense = next(rounds)
    with pytest.raises(Cancelled):
        next(rounds)
    assert tab.history == [dense]
    with pytest.raises(Cancelled):
        next(studio.draw(tab, FORM))
    tab.begin()
    assert drawn(studio, tab, FORM).variant.label == "ToMA keep=0.5"
    assert draw(pipe, dense.request)[0].tobytes() == dense.image.tobytes()


def test_a_cancelled_drawing_stays_cancelled_if_a_new_one_begins_before_its_step_ends(studio):
    tab = Tab()

    def during_a_step():
        tab.cancelled.set()
        tab.begin()

    with pytest.raises(Cancelled):
        next(studio.draw(tab, FORM, lambda name, length: during_a_step))
    assert tab.history == []
    assert drawn(studio, tab, FORM).variant.label == "ToMA keep=0.5"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": " "}, "write a prompt"),
        ({"method": "tomma"}, "did you mean toma"),
        ({"options": "keep"}, "has no value"),
        ({"options": "keep=2"}, "keep is the fraction"),
        ({"options": "kep=0.5"}, "did you mean keep"),
        ({"size": "65"}, "use multiples of 4"),
        ({"size": "big"}, "cannot read the size"),
        ({"method": "hilberta", "options": "tiles=99"}, "tiles need 32 tokens"),
        ({"steps": "0"}, "steps must be a whole number from 1 to 1000, not '0'"),
        ({"guidance": "much"}, "guidance must be a number"),
        ({"seed": "-1"}, "seed must be"),
    ],
)
def test_what_cannot_be_drawn_is_said_while_typing_and_before_anything_is_drawn(studio, change, message):
    studio.open("tiny", "")
    form, tab = FORM._replace(**change), Tab()
    with pytest.raises(ValueError, match=message):
        studio.check(form)
    with pytest.raises(ValueError, match=message):
        next(studio.draw(tab, form))
    assert tab.history == []


def test_a_good_form_has_remarks_only(studio):
    assert "loaded when you generate" in studio.check(FORM)
    studio.open("tiny", "")
    assert studio.check(FORM) == ""
    assert "16 x 16 image tokens are too few" in studio.check(FORM._replace(method="hilberta", options="tiles=auto"))
    assert "min_tokens" in studio.check(FORM._replace(method="llsa", options=""))
    changing = FORM._replace(method="hilberta", options="tiles=((0, dense), (0.3, 2), (0.5, auto)), centre=0")
    assert "16 x 16 image tokens are too few" in studio.check(changing)


def test_another_model_is_loaded_in_place_of_the_first(studio):
    studio.open("tiny", "")
    with pytest.raises(ValueError, match="cannot load nothing"):
        next(studio.draw(Tab(), FORM._replace(model="nothing")))
    other = drawn(studio, Tab(), FORM._replace(model="other"))
    assert "loaded when you generate" in studio.check(FORM)
    assert saved_with(other)["model"] == "other"


def test_attention_is_that_of_the_middle_step_and_of_recent_pictures(studio):
    tab = Tab()
    dense, merged = studio.draw(tab, FORM)
    layers = studio.layers(merged)
    assert layers == ["transformer_blocks.0.attn", "single_transformer_blocks.0.attn"]
    pictures = [studio.attention(entry, 1, (3, 4)) for entry in (dense, merged)]
    assert pictures[0].size == (384, 384)
    assert pictures[0].tobytes() != pictures[1].tobytes()
    assert studio.token_at(merged, 0.3, 0.99) == (15, 4)
    assert studio.token_at(merged, 1.2, -0.1) == (0, 15)
    with pytest.raises(ValueError, match="choose one of 0 to 1"):
        studio.attention(merged, 2, (0, 0))
    for seed in range(1, 4):
        drawn(studio, tab, FORM._replace(seed=str(seed)))
    with pytest.raises(ValueError, match="no longer in memory"):
        studio.attention(dense, 0, (0, 0))


def test_a_picture_that_is_shown_again_leaves_its_file_to_those_who_read_it(tmp_path):
    picture = Image.new("RGB", (8, 8), "red")
    path = Path(file_of(picture, tmp_path))
    before = path.stat()
    assert file_of(picture.copy(), tmp_path) == str(path)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    with Image.open(path) as saved:
        assert saved.tobytes() == picture.tobytes()
    assert file_of(Image.new("RGB", (8, 8), "blue"), tmp_path) != str(path)
    assert len([*tmp_path.iterdir()]) == 2


def test_scores_are_those_of_the_pictures(studio):
    dense, merged = studio.draw(Tab(), FORM)
    rows = {name: values for name, *values in scores(dense, merged)}
    assert rows["PSNR of the two"][1] == f"{psnr(merged.image, dense.image):.1f} dB"
    assert rows["SSIM of the two"][1] == f"{ssim(merged.image, dense.image):.3f}"
    assert f"({dense.seconds / merged.seconds:.2f} x)" in rows["Whole run"][1]
    assert {name: right for name, _, right in scores(dense, dense)}["PSNR of the two"] == "identical"


def test_a_method_that_stays_dense_says_why(studio):
    entry = drawn(studio, Tab(), FORM._replace(method="llsa", options=""))
    assert "min_tokens" in {name: right for name, _, right in scores(entry, entry)}["Stayed dense"]
    assert "min_tokens" in saved_with(entry)["stayed dense"]


@pytest.mark.parametrize("name", METHODS)
def test_every_option_is_explained_and_the_recommended_ones_are_the_first_of_compare(name):
    assert all(option.help for option in options_of(name))
    options = dict(pair.split("=") for pair in recommended(name).split(", ")) if recommended(name) else {}
    for shown in METHODS[name].showcase()[:1]:
        assert method_from_text(name, options) == shown


@pytest.mark.parametrize("name", METHODS)
def test_the_fields_of_a_method_are_those_of_its_dataclass_the_recommended_ones_first(name):
    options = options_of(name)
    assert {option.name for option in options} == {field.name for field in fields(METHODS[name])}
    first = options_in(recommended(name))
    assert {option.name for option in options[: len(first)]} == first.keys()
    kinds = {option.name: option.kind for option in options}
    assert kinds["start_percent"] == "number"
    assert kinds["min_tokens"] == "whole"


def test_fields_have_the_kind_of_their_type():
    kinds = {option.name: (option.kind, option.choices) for name in METHODS for option in options_of(name)}
    assert kinds["slide"] == ("choice", ("auto", "curve", "diagonal"))
    assert kinds["merge_reference"] == ("switch", ())
    assert kinds["tiles"] == ("text", ("auto",))
    assert kinds["merge_mlp"] == ("choice", ("none", "true", "false"))
    assert kinds["tile"] == ("text", ())


def test_a_lora_brings_its_method_and_size_and_leaves_layers_and_steps_to_choose(built_in):
    name, made = built_in.distilled("built-in")
    assert name == "hilberta"
    options = options_of(name, made)
    assert {option.name for option in options} == {"dense_layers", "start_percent", "end_percent", "min_tokens"}
    assert {option.name: option.default for option in options}["start_percent"] == 0.5
    form = FORM._replace(lora="built-in", method=name, options="", size="")
    assert "loaded when you generate" in built_in.check(form)
    entry = drawn(built_in, Tab(), form)
    assert entry.variant.label.startswith("HilbertA T=2")
    assert entry.request.size == (48, 48)
    with pytest.raises(FieldError) as raised:
        built_in.check(form._replace(options="keep=0.5"))
    assert raised.value.field == "options"
    assert built_in.distilled("") == ("", None)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"method": "tomma"}, "options"),
        ({"options": "keep=2"}, "options"),
        ({"size": "65"}, "settings"),
        ({"steps": "0"}, "settings"),
        ({"model": "nothing"}, "settings"),
    ],
)
def test_an_error_names_its_field(studio, change, field):
    studio.open("tiny", "")
    with pytest.raises(FieldError) as raised:
        next(studio.draw(Tab(), FORM._replace(**change)))
    assert raised.value.field == field


def test_presets_are_listed_and_bring_size_and_steps(studio, pipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "measured.json").write_text("{}")
    models = [describe(denoiser(pipe))]
    preset = Preset(methods=(HilbertA(tiles=2),), models=models, size=(48, 64), evidence={"steps": 3})
    preset.save("tuned/ssim-0.9.json")
    assert presets()[-1] == "tuned/ssim-0.9.json"
    assert "built-in-128px-ssim-0.9" in presets()
    form = FORM._replace(method="tuned/ssim-0.9.json", options="", size="", steps="")
    entry = drawn(studio, Tab(), form)
    assert (entry.request.size, entry.request.steps) == ((48, 64), 3)
    assert "measured at 3 steps, not at 2" in studio.check(form._replace(steps="2"))


@pytest.mark.slow
def test_documents_are_answered_as_the_command_does(studio, tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    for i, text in enumerate(DOCUMENTS):
        (folder / f"{i}.txt").write_text(text)
    (folder / "bad.txt").write_bytes(b"\xff")
    asked, tab = QuestionForm(str(folder), "w3", recompute=0.4), Tab()
    reply, page, remark = studio.answer(tab, asked)
    assert f"Skipped: {folder / 'bad.txt'} is not UTF-8 text: save it as UTF-8, or move it away." in remark
    assert page.count("<mark class") == len(reply.answers[0].rows)
    assert "recompute=0.4" in page
    compared, _, _ = studio.answer(tab, asked._replace(compare=True))
    assert [answer.method for answer in compared.answers][:2] == ["infoflow_kv", "epic"]
    tab.cancelled.set()
    with pytest.raises(Cancelled):
        studio.answer(tab, asked)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question": ""}, "write a question"),
        ({"folder": "nowhere"}, "not a folder"),
        ({"recompute": 2.0}, "recompute"),
    ],
)
def test_questions_that_cannot_be_answered_are_refused(studio, tmp_path, change, message):
    (tmp_path / "a.txt").write_text("w1")
    with pytest.raises(ValueError, match=message):
        studio.answer(Tab(), QuestionForm(str(tmp_path), "w3")._replace(**change))


@pytest.mark.slow
def test_the_built_in_lora_brings_its_method(tmp_path):
    studio = Studio(ui.commands("cpu", "float32"), tmp_path)
    form = Form("a red apple", "toma", "", "", "built-in", "64", "1")
    assert drawn(studio, Tab(), form).variant.label == "HilbertA T=4 slide=curve, start_percent=0.2, distilled"
