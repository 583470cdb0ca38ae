# pyright: basic, reportPrivateImportUsage=false
"""Gradio page of `foveate ui`: fields, events and layout. State and actions are in `foveate.apps.web.studio`."""

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gradio as gr
from PIL import Image

from foveate.apps.errors import remedy
from foveate.apps.web.studio import (
    Cancelled,
    Entry,
    Form,
    MethodOption,
    QuestionForm,
    Studio,
    Tab,
    options_of,
    presets,
    recommended,
    scores,
)
from foveate.methods import METHODS, RECOMPUTE_POLICIES, options_in
from foveate.pipelines.image_files import png
from foveate.plots.figures import enlarged
from foveate.utils.files import write_whole
from foveate.utils.progress import Track

__all__ = ["build", "field_of", "options_text", "serve"]

log = logging.getLogger("foveate")

FIRST = "toma"
TOGETHER = "hilberta:tiles=4+toma:keep=0.5"
TAB_ID = "sessionStorage.foveate ??= Math.random().toString(36).slice(2)"
"""JavaScript expression for the id of a browser tab; it survives a reload."""
AS_TAB: dict[str, Any] = {"js": f"(_, ...others) => [{TAB_ID}, ...others]"}
"""Event option: pass the id of the tab as the first of several inputs."""
AS_TAB_ALONE: dict[str, Any] = {"js": f"() => {TAB_ID}"}
"""Event option: pass the id of the tab as the only input."""
OPTIONS_TEXT = """(...values) => Object.entries(%s)
    .map(([name, usual], i) => [name, String(values[i] ?? "none").trim(), usual])
    .filter(([name, value, usual]) => value && value !== usual)
    .map(([name, value]) => `${name}=${value}`).join(", ")"""
"""JavaScript that runs in the browser, so that options are complete when Generate is clicked right after a change."""
AT_A_TIME: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "model"}
"""Event option: run one event after the other."""
NONE = "No images yet. *Generate* makes one with the dense model and one with the method, to compare."
UNASKED = "No answer yet. <em>Ask</em> shows one, where the time went, and which tokens were recomputed."
ARIA_NAMES = """<script>
new MutationObserver(() => {
    document.querySelector("#tiles button")?.setAttribute("aria-label", "Choose a token");
    document.querySelectorAll("div.empty[aria-label]").forEach(empty => empty.role = "img");
    document.querySelectorAll("[data-testid=slider]:not([tabindex])").forEach(line => {
        Object.assign(line, {tabIndex: 0, role: "slider", ariaLabel: "Line between left and right", ariaValueNow: 50});
        line.addEventListener("keydown", event => {
            const step = {ArrowLeft: -10, ArrowRight: 10}[event.key], box = line.getBoundingClientRect();
            if (!step) return;
            event.preventDefault();
            const [x, y] = [box.x + box.width / 2, box.y + box.height / 2], image = line.parentElement.parentElement;
            const drag = (on, type, x) => on.dispatchEvent(new MouseEvent(
                type, {bubbles: true, cancelable: true, view: window, clientX: x, clientY: y}));
            drag(line, "mousedown", x);
            drag(window, "mousemove", x + step);
            drag(window, "mouseup", x + step);
            const area = image.getBoundingClientRect();
            line.ariaValueNow = Math.round(100 * (x + step - area.x) / area.width);
        });
    });
}).observe(document, {childList: true, subtree: true});
</script>"""
"""Names, roles and keys that Gradio leaves out: the line of an image slider follows the arrow keys."""
STYLE = """
.gradio-container { width: 100% !important; max-width: 1280px !important; margin: 0 auto !important; }
#studio h1 { font-size: 1.4rem; margin: .2em 0; }
.said { margin: 0; padding: .5em .8em; border-left: 4px solid #5a6675; background: var(--block-background-fill); }
.said.wrong { border-color: #b00020; }
.said.good { border-color: #0072b2; }
:is(#said-prompt, #said-options, #noted, #said, #told):has(.said:empty) { display: none; }
#scores { min-height: 5em; }
#scores table { overflow-wrap: anywhere; }
body.dark, .dark { --color-accent: #6dbdf0 !important; }
#scores { overflow: visible !important; }
#scores table { width: 100%; }
#slider img, #tiles img, #attention img { image-rendering: pixelated; }
iframe.answer { width: 100%; height: 70vh; border: 1px solid var(--border-color-primary); border-radius: 8px; }
"""


def serve(
    studio: Studio,
    model: str,
    lora: str,
    documents: Path,
    questions: Sequence[str],
    *,
    host: str,
    port: int,
    browser: bool,
    ready: Callable[[str], None],
) -> None:
    """Serve the page until it is interrupted.

    Args:
        studio: State of the page.
        model: Initial model; empty for the built-in one.
        lora: Initial LoRA; may be empty.
        documents: Initial folder of documents.
        questions: Example questions.
        host: Address to listen on.
        port: Port; 0 takes a free one.
        browser: Open the page in a browser.
        ready: Called with the address of the page.

    Raises:
        OSError: If the port is taken.
    """
    with TemporaryDirectory() as shown:
        page = build(studio, model, lora, documents, questions, Path(shown))
        _, address, _ = page.launch(
            server_name=host, server_port=port or None, inbrowser=browser, quiet=True, prevent_thread_lock=True,
            allowed_paths=[str(studio.out.resolve())], footer_links=[], share=False, css=STYLE, head=ARIA_NAMES,
            theme=_theme(),
        )  # fmt: skip
        ready(address)
        try:
            while True:
                time.sleep(3600)
        finally:
            for tab in studio.tabs.values():
                tab.cancelled.set()
            page.close(verbose=False)


def _theme() -> gr.themes.Base:
    """Gradio's default theme with system fonts and enough contrast."""
    soft, soft_in_the_dark, blue, light_blue = "#4b5563", "#b6bfca", "#0067a3", "#6dbdf0"
    return gr.themes.Default(
        primary_hue="blue", font=("system-ui", "sans-serif"), font_mono=("ui-monospace", "monospace")
    ).set(
        body_text_color_subdued=soft, body_text_color_subdued_dark=soft_in_the_dark,
        block_info_text_color=soft, block_info_text_color_dark=soft_in_the_dark,
        block_label_text_color=soft, block_label_text_color_dark=soft_in_the_dark,
        block_title_text_color=soft, block_title_text_color_dark=soft_in_the_dark,
        color_accent=blue, link_text_color=blue, link_text_color_dark=light_blue,
        button_primary_background_fill=blue, button_primary_background_fill_hover="#005282",
        button_primary_background_fill_dark=blue, button_primary_background_fill_hover_dark="#005282",
    )  # fmt: skip


def build(studio: Studio, model: str, lora: str, documents: Path, questions: Sequence[str], shown: Path) -> gr.Blocks:
    """The page; see `serve`. `shown` is the folder for the images on it."""
    with gr.Blocks(
        title="Foveate studio", analytics_enabled=False, delete_cache=(3600, 86400), elem_id="studio"
    ) as page:
        key = gr.Textbox(visible=False)
        gr.HTML("<h1>Foveate studio</h1>")
        with gr.Tab("Images"):
            _pictures(page, studio, key, model, lora, shown)
        with gr.Tab("Documents"):
            _documents(studio, key, documents, questions)
    return page.queue(max_size=64)


# --- images --------------------------------------------------------------------------------------------------------


def _pictures(page: gr.Blocks, studio: Studio, key: gr.Textbox, model: str, lora: str, folder: Path) -> None:
    """Fill the tab of images."""
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            prompt = gr.Textbox("a red apple above a blue car", label="Prompt", lines=2)
            said_prompt = gr.HTML(_say(""), elem_id="said-prompt", padding=False)
            distilled_for = studio.distilled(lora)[0]
            first = distilled_for or FIRST
            method = gr.Dropdown(
                _methods(), value=first, label="Method", allow_custom_value=True,
                info="Several at once: hilberta:tiles=4+toma. A preset of foveate tune brings its options.",
            )  # fmt: skip
            lora_field = gr.Dropdown(
                ["", *studio.commands.loras], value=lora, label="LoRA", allow_custom_value=True,
                info="Weights that were distilled for one method, which is chosen with it: built-in for the built-in "
                "model, or a file, folder or hub id. Empty: none.",
            )  # fmt: skip
            options = gr.Textbox("" if distilled_for else recommended(FIRST), visible=False)

            @gr.render([method, lora_field], show_progress="hidden")
            def option_fields(name: str, lora: str) -> None:  # pyright: ignore[reportUnusedFunction]
                _options(options_of(name, studio.distilled(lora)[1]), name, lora, options)

            said_options = gr.HTML(_say(""), elem_id="said-options", padding=False)
            with gr.Accordion("Model, size, steps", open=False):
                model_field = gr.Textbox(
                    model, label="Model", info="Hub id or folder, or built-in-pixel. Empty: the built-in model."
                )
                with gr.Row():
                    guidance = gr.Textbox(label="Guidance", info="Empty: the pipeline's.", min_width=130)
                    seed = gr.Textbox("0", label="Seed", info="The same seed, the same image.", min_width=130)
                with gr.Row():
                    size = gr.Textbox(label="Size", info="1024, or WIDTHxHEIGHT. Empty: the default.", min_width=130)
                    steps = gr.Textbox(label="Steps", info="Empty: the default.", min_width=130)
            noted = gr.HTML(_say(""), elem_id="noted", padding=False)
            said = gr.HTML(_say(""), elem_id="said", padding=False)
            with gr.Row():
                draw = gr.Button("Generate", variant="primary", elem_id="draw")
                cancel = gr.Button("Cancel", elem_id="cancel")
        with gr.Column(scale=3, min_width=300):
            slider = gr.ImageSlider(
                label="Drag the line, or use the arrow keys", elem_id="slider", max_height=640,
                visible=False,
            )  # fmt: skip
            with gr.Row(visible=False) as pair:
                left = gr.Dropdown([], label="Left", elem_id="left", min_width=120)
                right = gr.Dropdown([], label="Right", elem_id="right", min_width=120)
            numbers = gr.Markdown(NONE, elem_id="scores")
            gallery = gr.Gallery(
                label="History", columns=6, fit_columns=False, height=190,
                allow_preview=False, elem_id="history", format="png",
                buttons=["download_all"], visible=False,
            )  # fmt: skip
            saved = gr.File(
                label="Left and right, with their settings inside",
                file_count="multiple",
                elem_id="saved",
                interactive=False,
                visible=False,
            )
    with gr.Accordion("Where a token attends", open=False, elem_id="inside", visible=False) as inside:
        with gr.Row():
            layer = gr.Number(0, label="Attention layer", precision=0, min_width=90)
            row = gr.Number(0, label="Row of the token", precision=0, min_width=90)
            column = gr.Number(0, label="Column", precision=0, min_width=90)
            look = gr.Button("Show its attention", elem_id="look")
        with gr.Row():
            tiles = gr.Image(
                label="Right, with its tiles or merged tokens: click a place",
                interactive=False, elem_id="tiles", buttons=[], min_width=300,
            )  # fmt: skip
            lit = gr.ImageSlider(
                label="Attention: left and right", elem_id="attention", min_width=300, max_height=640, visible=False
            )  # fmt: skip

    fields = [prompt, method, options, model_field, lora_field, size, steps, guidance, seed]
    shown = [left, right, slider, numbers, gallery, saved, tiles, pair, inside]
    said_all = [said, said_prompt, said_options]
    noted_all = [noted, said_prompt, said_options]  # not `said`: a late answer would hide what Generate says

    def form(values: Sequence[Any]) -> Form:
        return Form(*(value or "" for value in values))._replace(method=values[1] or "dense")

    def check(*values: Any) -> tuple[str, str, str]:
        try:
            return _beside(studio.check(form(values)), "good")
        except Exception as error:
            return _refused(error)

    def show(tab: Tab, left: int | None, right: int | None) -> tuple[Any, ...]:
        first, second = tab.entry(left), tab.entry(right)
        choices = [(entry.title, entry.number) for entry in tab.history]
        if first is None or second is None:
            none, hidden = gr.update(choices=[], value=None), gr.update(visible=False)
            return none, none, hidden, NONE, hidden, hidden, None, hidden, hidden
        names = [(str(entry.path), entry.title) for entry in tab.history]
        same = first.image.size == second.image.size
        pair = (first.image, second.image if same else second.image.resize(first.image.size))
        return (
            gr.update(choices=choices, value=first.number),
            gr.update(choices=choices, value=second.number),
            gr.update(value=tuple(file_of(enlarged(picture, 512), folder) for picture in pair), visible=True),
            _table(first, second),
            gr.update(value=names, visible=True),
            gr.update(value=[*dict.fromkeys((str(first.path), str(second.path)))], visible=True),
            file_of(second.tiles, folder),
            gr.update(visible=True),
            gr.update(visible=True),
        )

    def begin(key: str, *values: Any, progress: Any = gr.Progress()) -> Iterator[tuple[Any, ...]]:  # noqa: B008
        tab = studio.tabs[key]
        drawn: list[Entry] = []
        yield (
            *_beside("Generating." if studio.has(form(values)) else "Loading the model."),
            *[gr.skip()] * len(shown),
        )
        try:
            for entry in studio.draw(tab, form(values), _bar(progress)):
                drawn.append(entry)
                told = _beside(f"{entry.variant.label} is done.", "good")
                yield (*told, *show(tab, drawn[0].number, entry.number))
        except Exception as error:
            last = drawn[-1].number if drawn else None
            yield (*_refused(error), *show(tab, drawn[0].number if drawn else None, last))

    def restore(key: str, *values: Any) -> tuple[Any, ...]:
        tab = studio.tabs[key]
        return (
            *check(*values),
            gr.update(choices=_methods()),
            *show(tab, tab.history[-2].number if len(tab.history) > 1 else None, None),
        )

    def again(key: str, left: int | None, right: int | None) -> tuple[Any, ...]:
        return show(studio.tabs[key], left, right)

    def pick(key: str, left: int | None, event: gr.SelectData) -> tuple[Any, ...]:
        tab = studio.tabs[key]
        return show(tab, left, tab.history[event.index].number if event.index < len(tab.history) else None)

    def attend(key: str, left: int, right: int, layer: int, row: int, column: int) -> tuple[Any, Any]:
        pictures: list[Any] = []

        def light() -> str:
            first, second = (studio.tabs[key].entry(number) for number in (left, right))
            if first is None or second is None:
                raise ValueError("generate an image first")
            token = int(row or 0), int(column or 0)
            pictures.extend(studio.attention(entry, int(layer or 0), token) for entry in (first, second))
            return f"Attention of token {token[0]}, {token[1]} in {studio.layers(second)[int(layer or 0)]}."

        told = _trying(light)
        lit = tuple(file_of(enlarged(picture, 512), folder) for picture in pictures) or None
        return told, gr.update(value=lit, visible=lit is not None)

    def click(key: str, left: int, right: int, layer: int, event: gr.SelectData) -> tuple[Any, ...]:
        entry = studio.tabs[key].entry(right)
        if entry is None:
            return _say("Generate an image first."), None, 0, 0
        x, y = event.index
        width, height = entry.tiles.size
        row, column = studio.token_at(entry, x / width, y / height)
        return (*attend(key, left, right, layer, row, column), row, column)

    def choose_method(name: str, lora: str) -> tuple[str, Any]:
        fits = name == studio.distilled(lora)[0]
        return "" if fits else recommended(name), lora if fits else ""

    def choose_lora(lora: str, name: str) -> tuple[str, str]:
        made_for, _ = studio.distilled(lora)
        return (made_for, "") if made_for else (name, recommended(name))

    changes = [field.change for field in fields]  # one event, so that the message is about the last change
    gr.on(changes, check, fields, noted_all, show_progress="hidden", queue=False, trigger_mode="always_last")
    method.input(choose_method, [method, lora_field], [options, lora_field], queue=False, show_progress="hidden")
    lora_field.input(choose_lora, [lora_field, method], [method, options], queue=False, show_progress="hidden")
    starts = [draw.click, prompt.submit]
    gr.on(starts, None, None, noted, js=f"() => {json.dumps(_say(''))}")  # in the browser, before any answer
    _long(studio, key, starts, cancel, begin, fields, [*said_all, *shown], on=numbers)
    gr.on([left.input, right.input], again, [key, left, right], shown, queue=False, show_progress="hidden", **AS_TAB)
    gallery.select(pick, [key, left], shown, queue=False, show_progress="hidden", **AS_TAB)
    look.click(attend, [key, left, right, layer, row, column], [said, lit], **AT_A_TIME, **AS_TAB)
    tiles.select(click, [key, left, right, layer], [said, lit, row, column], **AT_A_TIME, **AS_TAB)
    page.load(restore, [key, *fields], [*noted_all, method, *shown], queue=False, **AS_TAB)


def _methods() -> list[str]:
    """Methods, several together, and presets to choose from."""
    return ["dense", *METHODS, TOGETHER, *presets()]


def _options(found: list[MethodOption], name: str, lora: str, text: gr.Textbox) -> None:
    """Fields for the options of a method, the recommended ones first; they fill the text of the form."""
    given = {} if lora else options_in(recommended(name))
    if not found:
        gr.Markdown("The dense model has no options." if name == "dense" else "The options are part of this method.")
        return
    fields = [field_of(option, given.get(option.name, option.default)) for option in found if option.name in given]
    with gr.Accordion("More options" if fields else "Options: layers and steps", open=False):
        fields += [field_of(option, option.default) for option in found if option.name not in given]
    gr.on([field.change for field in fields], None, fields, text, js=options_text(found))


def options_text(options: list[MethodOption]) -> str:
    """JavaScript function: takes the values of the fields, returns the changed options as text, such as `keep=0.5`."""
    return OPTIONS_TEXT % json.dumps({option.name: _text(option.default) for option in options})


def _text(value: Any) -> str:
    """A default as the browser shows it."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def field_of(option: MethodOption, value: Any) -> Any:
    """A switch, a number, a choice or a text for an option."""
    about: dict[str, Any] = {"label": option.name, "info": option.help, "interactive": True}
    if option.kind == "switch":
        return gr.Checkbox(value, **about)
    if option.kind in ("whole", "number"):
        return gr.Number(float(value), precision=0 if option.kind == "whole" else None, step=1, **about)
    text = "" if value is None and not option.choices else _text(value)
    if option.choices:
        return gr.Dropdown(
            [*dict.fromkeys([*option.choices, text])], value=text, allow_custom_value=option.kind == "text", **about
        )
    return gr.Textbox(text, **about)


def _beside(message: str, kind: str = "", field: str = "settings") -> tuple[str, str, str]:
    """A message beside its field; the other places of messages are empty."""
    texts = {"settings": "", "prompt": "", "options": ""} | {field: message}
    return _say(texts["settings"], kind), _say(texts["prompt"], kind), _say(texts["options"], kind)


def _refused(error: Exception) -> tuple[str, str, str]:
    """Message of an error, beside the field that caused it."""
    return _beside(
        _explain(error), "" if isinstance(error, Cancelled) else "wrong", getattr(error, "field", "settings")
    )


def file_of(picture: Image.Image, folder: Path) -> str:
    """Path of a PNG file of the image, written once: Gradio would rewrite it while a browser reads it."""
    content = png(picture, {})
    path = folder / f"{sha256(content).hexdigest()}.png"
    if not path.exists():
        write_whole(path, content)
    return str(path)


def _table(left: Entry, right: Entry) -> str:
    lines = [f"| | {left.title} | {right.title} |", "|---|---|---|"]
    lines += [f"| {name} | {first} | {second} |" for name, first, second in scores(left, right)]
    return "\n".join(lines)


# --- documents -------------------------------------------------------------------------------------------------------


def _documents(studio: Studio, key: gr.Textbox, documents: Path, questions: Sequence[str]) -> None:
    """Fill the tab of documents."""
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            folder = gr.Textbox(
                str(documents),
                label="Folder",
                info="Its documents: text, code, HTML, CSV, PDF and Word files, with subfolders.",
            )
            question = gr.Textbox(next(iter(questions), ""), label="Question", lines=2, elem_id="question")
            if questions:
                gr.Examples([[text] for text in questions[:4]], question, label="Questions that these texts answer")
            model = gr.Textbox(
                "", label="Model", info="Hub id or folder of a language model. Empty: the built-in reader."
            )
            method = gr.Dropdown(list(RECOMPUTE_POLICIES), value="infoflow_kv", label="Method")
            recompute = gr.Slider(0, 1, 0.15, step=0.01, label="Fraction of the tokens to recompute")
            compare = gr.Checkbox(False, label="Compare with all methods and with full prefill")
            said = gr.HTML(_say(""), elem_id="told", padding=False)
            with gr.Row():
                ask = gr.Button("Ask", variant="primary", elem_id="ask")
                cancel = gr.Button("Cancel")
        with gr.Column(scale=3, min_width=300):
            page = gr.HTML(f"<p>{UNASKED}</p>", elem_id="answer", padding=False)

    def begin(key: str, *values: Any, progress: Any = gr.Progress()) -> tuple[str, Any]:  # noqa: B008
        pages: list[str] = []

        def reply() -> str:
            found, html, remark = studio.answer(studio.tabs[key], QuestionForm(*values), _bar(progress))
            pages.append(html)
            return f"{found.answers[0].text.strip()} {remark}"

        return _trying(reply), _framed(pages[0]) if pages else gr.skip()

    fields = [folder, question, model, method, recompute, compare]
    starts = [ask.click, question.submit]
    _long(studio, key, starts, cancel, begin, fields, [said, page], on=page)


def _framed(page: str) -> str:
    """An iframe with a page; scripts are off."""
    return f'<iframe class="answer" title="Recomputed tokens" sandbox="" srcdoc="{escape(page)}"></iframe>'


# --- events and messages ---------------------------------------------------------------------------------------------


def _long(
    studio: Studio, key: gr.Textbox, starts: list[Any], cancel: gr.Button, begin: Callable[..., Any],
    fields: list[Any], outputs: list[Any], *, on: Any,
) -> None:  # fmt: skip
    """Connect events to a long function with a progress bar on a component, and a button to cancel it.

    The first output is the message.
    """

    def stop(key: str) -> str:
        studio.tabs[key].cancelled.set()
        return _say("Stopping at the next step.")

    gr.on(starts, lambda key: studio.tabs[key].begin(), key, None, queue=False, **AS_TAB_ALONE).then(
        begin, [key, *fields], outputs, show_progress_on=on, **AT_A_TIME, **AS_TAB
    )
    cancel.click(stop, key, outputs[0], queue=False, **AS_TAB_ALONE)  # the work ends itself, and says so


def _bar(progress: Any) -> Track:
    """A progress bar of the page."""

    def track(name: str, length: int) -> Callable[[], None]:
        done = 0
        progress((0, length), desc=name)

        def advance() -> None:
            nonlocal done
            done += 1
            progress((done, length), desc=name)

        return advance

    return track


def _say(text: str, kind: str = "") -> str:
    """HTML of a message, marked up for screen readers."""
    role = "alert" if kind == "wrong" else "status"
    return f'<p class="said {kind}" role="{role}">{escape(text)}</p>'


def _trying(action: Callable[[], str]) -> str:
    """Message of an action, or of its error."""
    try:
        return _say(action(), "good")
    except Exception as error:
        return _say(_explain(error), "" if isinstance(error, Cancelled) else "wrong")


def _explain(error: Exception) -> str:
    """Message of an error. Unexpected errors are also logged with their traceback."""
    if isinstance(error, Cancelled):
        return "Cancelled. What was finished is kept."
    if message := remedy(error):
        return message
    log.error("the page met an error", exc_info=error)
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
