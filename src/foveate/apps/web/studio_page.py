# pyright: basic, reportPrivateImportUsage=false
"""Gradio page of `foveate ui`: fields, events and layout. State and actions are in `foveate.apps.web.studio`."""

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
from foveate.apps.web.studio import Cancelled, Entry, Form, QuestionForm, Studio, Tab, option_help, recommended, scores
from foveate.methods import METHODS, RECOMPUTE_POLICIES
from foveate.pipelines.image_files import png
from foveate.plots.figures import enlarged
from foveate.utils.files import write_whole
from foveate.utils.progress import Track

__all__ = ["build", "serve"]

log = logging.getLogger("foveate")

FIRST = "toma"
TOGETHER = "hilberta:tiles=4+toma:keep=0.5"
TAB_ID = "sessionStorage.foveate ??= Math.random().toString(36).slice(2)"
"""JavaScript expression for the id of a browser tab; it survives a reload."""
AS_TAB: dict[str, Any] = {"js": f"(_, ...others) => [{TAB_ID}, ...others]"}
"""Event option: pass the id of the tab as the first of several inputs."""
AS_TAB_ALONE: dict[str, Any] = {"js": f"() => {TAB_ID}"}
"""Event option: pass the id of the tab as the only input."""
AT_A_TIME: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "model"}
"""Event option: run one event after the other."""
ARIA_NAMES = """<script>
new MutationObserver(() => {
    document.querySelector("#tiles button")?.setAttribute("aria-label", "Choose a token");
    document.querySelectorAll("div.empty[aria-label]").forEach(empty => empty.role = "img");
}).observe(document, {childList: true, subtree: true});
</script>"""
"""Names and roles for screen readers that Gradio leaves out."""
STYLE = """
.gradio-container { width: 100% !important; max-width: 1280px !important; margin: 0 auto !important; }
#studio h1 { font-size: 1.4rem; margin: .2em 0; }
.said { margin: 0; padding: .5em .8em; border-left: 4px solid #5a6675; background: var(--block-background-fill); }
.said.wrong { border-color: #b00020; }
.said.good { border-color: #0072b2; }
.said:empty { border-color: transparent; background: none; }
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
            method = gr.Dropdown(
                ["dense", *METHODS, TOGETHER], value=FIRST, label="Method", allow_custom_value=True,
                info="With a LoRA, the method that it was distilled for.",
            )  # fmt: skip
            options = gr.Textbox(
                recommended(FIRST), label="Options", info="NAME=VALUE, separated by commas. Empty: the defaults."
            )
            with gr.Accordion("What the options mean", open=False):
                meaning = gr.Markdown(_meaning(FIRST))
            with gr.Accordion("Model, size, steps", open=False):
                model_field = gr.Textbox(
                    model, label="Model", info="Hub id or folder, or built-in-pixel. Empty: the built-in model."
                )
                lora_field = gr.Textbox(
                    lora,
                    label="LoRA",
                    info="File, folder or hub id, or built-in or built-in-16 for the built-in model's. Empty: none.",
                )
                size = gr.Textbox(label="Size", info="1024, or WIDTHxHEIGHT. Empty: the default.")
                steps = gr.Textbox(label="Steps", info="Empty: the default.")
                guidance = gr.Textbox(label="Guidance", info="Empty: the pipeline's.")
                seed = gr.Textbox("0", label="Seed", info="The same seed gives the same image.")
            said = gr.HTML(_say(""), elem_id="said")
            with gr.Row():
                draw = gr.Button("Generate", variant="primary", elem_id="draw")
                cancel = gr.Button("Cancel", elem_id="cancel")
        with gr.Column(scale=3, min_width=300):
            slider = gr.ImageSlider(label="Left and right: drag the line", elem_id="slider", max_height=640)
            line = gr.Slider(0, 100, 50, step=1, label="Position of the line", elem_id="line")
            with gr.Row():
                left = gr.Dropdown([], label="Left", elem_id="left", min_width=120)
                right = gr.Dropdown([], label="Right", elem_id="right", min_width=120)
            numbers = gr.Markdown("No images yet.", elem_id="scores")
            gallery = gr.Gallery(
                label="History", columns=6, fit_columns=False, height=190,
                allow_preview=False, elem_id="history", format="png",
                buttons=["download_all"],
            )  # fmt: skip
            saved = gr.File(
                label="Left and right, with their settings inside",
                file_count="multiple",
                elem_id="saved",
                interactive=False,
            )
    with gr.Accordion("Where a token attends", open=False, elem_id="inside"):
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
                label="Attention: left and right", elem_id="attention", min_width=300, max_height=640
            )  # fmt: skip

    fields = [prompt, method, options, model_field, lora_field, size, steps, guidance, seed]
    shown = [left, right, slider, numbers, gallery, saved, tiles]

    def form(values: Sequence[Any]) -> Form:
        return Form(*(value or "" for value in values))._replace(method=values[1] or "dense")

    def check(*values: Any) -> str:
        return _trying(lambda: studio.check(form(values)))

    def show(tab: Tab, left: int | None, right: int | None) -> tuple[Any, ...]:
        first, second = tab.entry(left), tab.entry(right)
        choices = [(entry.title, entry.number) for entry in tab.history]
        if first is None or second is None:
            none = gr.update(choices=[], value=None)
            return none, none, None, "No images yet.", [], None, None
        names = [(str(entry.path), entry.title) for entry in tab.history]
        same = first.image.size == second.image.size
        pair = (first.image, second.image if same else second.image.resize(first.image.size))
        return (
            gr.update(choices=choices, value=first.number),
            gr.update(choices=choices, value=second.number),
            tuple(file_of(enlarged(picture, 512), folder) for picture in pair),
            _table(first, second),
            names,
            [*dict.fromkeys((str(first.path), str(second.path)))],
            file_of(second.tiles, folder),
        )

    def begin(key: str, *values: Any, progress: Any = gr.Progress()) -> Iterator[tuple[Any, ...]]:  # noqa: B008
        tab = studio.tabs[key]
        drawn: list[Entry] = []
        try:
            for entry in studio.draw(tab, form(values), _bar(progress)):
                drawn.append(entry)
                told = _say(f"{entry.variant.label} is done.", "good")
                yield (told, *show(tab, drawn[0].number, entry.number))
        except Exception as error:
            last = drawn[-1].number if drawn else None
            yield (_say(_explain(error), "wrong"), *show(tab, drawn[0].number if drawn else None, last))

    def restore(key: str, *values: Any) -> tuple[Any, ...]:
        tab = studio.tabs[key]
        return (check(*values), *show(tab, tab.history[-2].number if len(tab.history) > 1 else None, None))

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
        return told, tuple(file_of(enlarged(picture, 512), folder) for picture in pictures) or None

    def click(key: str, left: int, right: int, layer: int, event: gr.SelectData) -> tuple[Any, ...]:
        entry = studio.tabs[key].entry(right)
        if entry is None:
            return _say("Generate an image first."), None, 0, 0
        x, y = event.index
        width, height = entry.tiles.size
        row, column = studio.token_at(entry, x / width, y / height)
        return (*attend(key, left, right, layer, row, column), row, column)

    changes = [field.change for field in fields]  # one event, so that the message is about the last change
    gr.on(changes, check, fields, said, show_progress="hidden", queue=False, trigger_mode="always_last")
    method.input(lambda name: (recommended(name), _meaning(name)), method, [options, meaning], queue=False)
    starts = [draw.click, prompt.submit, options.submit]
    _long(
        studio, key, starts, cancel, begin, fields, [said, *shown], "What was finished is in the history.", on=slider
    )
    gr.on([left.input, right.input], again, [key, left, right], shown, queue=False, show_progress="hidden", **AS_TAB)
    line.input(
        lambda place: gr.update(slider_position=place), line, slider, queue=False, show_progress="hidden",
        trigger_mode="always_last",
    )  # fmt: skip
    gallery.select(pick, [key, left], shown, queue=False, show_progress="hidden", **AS_TAB)
    look.click(attend, [key, left, right, layer, row, column], [said, lit], **AT_A_TIME, **AS_TAB)
    tiles.select(click, [key, left, right, layer], [said, lit, row, column], **AT_A_TIME, **AS_TAB)
    page.load(restore, [key, *fields], [said, *shown], queue=False, **AS_TAB)


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


def _meaning(method: str) -> str:
    rows = option_help(method)
    if not rows:
        return "The dense model has no options."
    return "\n".join(
        [
            "| option | default | |",
            "|---|---|---|",
            *(f"| {' | '.join(cell.replace('|', '/') for cell in r)} |" for r in rows),
        ]
    )


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
            said = gr.HTML(_say(""), elem_id="told")
            with gr.Row():
                ask = gr.Button("Ask", variant="primary", elem_id="ask")
                cancel = gr.Button("Cancel")
        with gr.Column(scale=3, min_width=300):
            page = gr.HTML(elem_id="answer")

    def begin(key: str, *values: Any, progress: Any = gr.Progress()) -> tuple[str, Any]:  # noqa: B008
        pages: list[str] = []

        def reply() -> str:
            found, html, remark = studio.answer(studio.tabs[key], QuestionForm(*values), _bar(progress))
            pages.append(html)
            return f"{found.answers[0].text.strip()} {remark}"

        return _trying(reply), _framed(pages[0]) if pages else gr.skip()

    fields = [folder, question, model, method, recompute, compare]
    starts = [ask.click, question.submit]
    _long(studio, key, starts, cancel, begin, fields, [said, page], "Passages that were encoded are kept.", on=page)


def _framed(page: str) -> str:
    """An iframe with a page; scripts are off."""
    return f'<iframe class="answer" title="Recomputed tokens" sandbox="" srcdoc="{escape(page)}"></iframe>'


# --- events and messages ---------------------------------------------------------------------------------------------


def _long(
    studio: Studio, key: gr.Textbox, starts: list[Any], cancel: gr.Button, begin: Callable[..., Any],
    fields: list[Any], outputs: list[Any], kept: str, *, on: Any,
) -> None:  # fmt: skip
    """Connect events to a long function with a progress bar on a component, and a button to cancel it.

    The first output is the message.
    """

    def stop(key: str) -> str:
        studio.tabs[key].cancelled.set()
        return _say(f"Cancelled. {kept}")

    running = gr.on(starts, lambda key: studio.tabs[key].begin(), key, None, queue=False, **AS_TAB_ALONE).then(
        begin, [key, *fields], outputs, show_progress_on=on, **AT_A_TIME, **AS_TAB
    )
    cancel.click(stop, key, outputs[0], cancels=running, queue=False, **AS_TAB_ALONE)


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
        return _say(_explain(error), "wrong")


def _explain(error: Exception) -> str:
    """Message of an error. Unexpected errors are also logged with their traceback."""
    if isinstance(error, Cancelled):
        return "Cancelled. What was finished is in the history."
    if message := remedy(error):
        return message
    log.error("the page met an error", exc_info=error)
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
