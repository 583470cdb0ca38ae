# pyright: basic
"""State and actions behind the page of `foveate ui`: images, history, attention maps, questions. See `studio_page`."""

import inspect
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import count, pairwise
from math import prod
from pathlib import Path
from statistics import median
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from PIL import Image

from foveate.apps.errors import remedy
from foveate.apps.web.compare import draw_variant
from foveate.apps.web.rag import reply_page
from foveate.apps.web.report import Variant, duration
from foveate.diffusers.preset import PRESETS, Preset, load
from foveate.methods import METHODS
from foveate.methods.base import DenseFallback, TokenMerging
from foveate.pipelines.image_files import write_picture
from foveate.pipelines.lora import ANYWHERE, Distilled, MethodLike, using
from foveate.pipelines.request import Request, denoiser, makes_video, pixels_per_token
from foveate.pipelines.steps import Call, record_step, recording
from foveate.plots.figures import draw_attention, draw_tiles
from foveate.transformers import ChunkEncoder
from foveate.transformers.index import index_documents
from foveate.transformers.model import chat_frame, unknown_words
from foveate.transformers.rag import Reply, ask, runs
from foveate.transformers.readers import describe_ignored, read_documents
from foveate.transformers.stored_documents import date_of, index_folder
from foveate.tuning.attention_map import attention_layers, attention_map
from foveate.tuning.similarity import psnr, ssim
from foveate.utils.files import slug
from foveate.utils.progress import Track, silent
from foveate.utils.timing import now

__all__ = [
    "Cancelled",
    "Commands",
    "Entry",
    "FieldError",
    "Form",
    "MethodOption",
    "QuestionForm",
    "Studio",
    "Tab",
    "options_of",
    "presets",
    "recommended",
    "scores",
]

MOST_ENTRIES = 50
"""Entries of a history; the images of older ones stay in the folder."""
MOST_STEPS = 6
"""Entries whose recorded step is kept in memory, for their attention."""
LIVE_TOKENS = 2**16
"""Largest number of tokens at which the method is checked against the size during typing."""
PROMPT = "Question: {question}\nAnswer:"


class Cancelled(Exception):
    """The user cancelled."""


class FieldError(ValueError):
    """Error to show beside one field of the page.

    Attributes:
        field: "prompt", "options", or "settings" for model, LoRA, size and the rest.
    """

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


@contextmanager
def _field(name: str) -> Iterator[None]:
    """Context that turns errors into a `FieldError` of one field."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise FieldError(remedy(error), name) from error


class Form(NamedTuple):
    """Fields of the tab of images; empty ones take the defaults of `foveate generate`."""

    prompt: str
    method: str = "dense"
    options: str = ""
    model: str = ""
    lora: str = ""
    size: str = ""
    steps: str = ""
    guidance: str = ""
    seed: str = "0"


class QuestionForm(NamedTuple):
    """Fields of the tab of documents."""

    folder: str
    question: str
    model: str = ""
    method: str = "infoflow_kv"
    recompute: float = 0.15
    compare: bool = False


class Commands(NamedTuple):
    """Functions of the command line that the page calls.

    Attributes:
        open_model: Opens a model with a LoRA; returns the pipeline and the LoRA's method, None without a LoRA.
        request: Validates pipeline, model, prompt, size, steps, guidance and seed; returns the request.
        method: Parses a name and options as text, beside the LoRA's method or None; returns the method, None is dense.
        settings: Metadata for the PNG file, from pipeline, model and request.
        remark: Warns of words that the model does not know, from pipeline, model and prompt; may be empty.
        open_reader: Opens a language model; returns it with its tokenizer.
        recompute: Recompute policies by name, from a name, a fraction and whether to compare with all others.
        lora: The method of a LoRA by its name or path; None if it names none.
        loras: Names of LoRAs to choose from.
    """

    open_model: Callable[[str, str], tuple[Any, Any]]
    request: Callable[..., Request]
    method: Callable[[Any, str, str], MethodLike | None]
    settings: Callable[[Any, str, Request], dict[str, str]]
    remark: Callable[[Any, str, str], str]
    open_reader: Callable[[str], tuple[Any, Any]]
    recompute: Callable[[str, float, bool], dict[str, Any]]
    lora: Callable[[str], Distilled | None]
    loras: tuple[str, ...] = ()


@dataclass
class Entry:
    """An image in the history.

    Attributes:
        number: Its number in the history, from 1.
        path: PNG file with the settings as metadata.
        variant: The image and its measurements; `step_seconds` has every step of the run.
        seconds: Duration of the whole run.
        form: Fields of the page as filled in.
        request: Validated request.
        method: Method; None is dense.
        step: Arguments of the denoiser in the middle step; None if no longer in memory.
    """

    number: int
    path: Path
    variant: Variant
    seconds: float
    form: Form
    request: Request
    method: MethodLike | None
    step: Call | None

    @property
    def image(self) -> Image.Image:
        """The image."""
        return self.variant.image

    @property
    def title(self) -> str:
        """Number and method."""
        return f"{self.number}: {self.variant.label}"

    @property
    def tiles(self) -> Image.Image:
        """The image with its tiles or merged tokens; plain where there are none."""
        if self.variant.tile_map is None:
            return self.image
        return draw_tiles(self.image, self.variant.tile_map, self.variant.picked)


@dataclass
class Tab:
    """History of one browser tab, and the event that cancels its work."""

    history: list[Entry] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> None:
        """Give the next image or question its own event, so that it does not revive a cancelled one."""
        self.cancelled = threading.Event()

    def entry(self, number: int | None) -> Entry | None:
        """The entry with this number, else the last one; None if the history is empty."""
        return next((entry for entry in self.history if entry.number == number), (self.history or [None])[-1])

    def dense_of(self, form: Form, request: Request) -> Entry | None:
        """The dense entry of the same request and model; None if there is none."""
        alike = (entry for entry in reversed(self.history) if entry.method is None and entry.request == request)
        return next((entry for entry in alike if entry.form.model == form.model), None)


class Studio:
    """Loaded models and the browser tabs, which take turns with the models.

    Args:
        commands: Functions of the command line that the page calls.
        out: Folder for the images.
    """

    def __init__(self, commands: Commands, out: Path) -> None:
        self.commands, self.out = commands, out
        self.tabs: dict[str, Tab] = defaultdict(Tab)
        self._busy = threading.Lock()
        self._model: tuple[tuple[str, str], Any, Any] | None = None
        self._reader: tuple[str, Any, Any] | None = None

    def open(self, model: str, lora: str) -> tuple[Any, Any]:
        """The pipeline and the LoRA's method; loads them unless they are in memory."""
        key = model.strip(), lora.strip()
        if self._model is None or self._model[0] != key:
            self._model = None  # free the old one first
            self._model = key, *self.commands.open_model(*key)
        return self._model[1:]

    def distilled(self, lora: str) -> tuple[str, Distilled | None]:
        """Name of the method that a LoRA was distilled for, and the method; "" and None if there is none to read."""
        try:
            found = self.commands.lora(lora.strip()) if lora.strip() else None
        except (ValueError, ImportError, OSError):
            found = None
        return next((name for name, cls in METHODS.items() if found and type(found.method) is cls), ""), found

    def has(self, form: Form) -> bool:
        """Whether the model and LoRA of a form are in memory."""
        return self._model is not None and self._model[0] == (form.model.strip(), form.lora.strip())

    def check(self, form: Form) -> str:
        """A remark on the form; may be empty. Loads no model: a model that is not loaded is checked on generation.

        Raises:
            ValueError: If the form is invalid.
        """
        _check_prompt(form)
        if not self.has(form):
            with _field("settings"):
                distilled = self.commands.lora(form.lora.strip()) if form.lora.strip() else None
            with _field("options"):
                self.commands.method(distilled, form.method, form.options)
            if self._busy.locked():
                return "The models are busy; size and options are checked when this one is loaded."
            return "This model is loaded when you generate; its size and options are checked then."
        _, pipe, distilled = self._model or ((), None, None)
        with _field("options"):
            method = self.commands.method(distilled, form.method, form.options)
        with _field("settings"):
            request = self._request(pipe, form, method)
        with _field("options"):
            remarks = [f"It stays dense: {why}." for why in _stays_dense(pipe, request, method)]
        if isinstance(method, Preset) and method.steps not in (None, request.steps):
            remarks.append(f"The preset was measured at {method.steps} steps, not at {request.steps}.")
        if self._busy.acquire(blocking=False):  # a tokenizer serves one at a time
            try:
                remarks.insert(0, self.commands.remark(pipe, form.model, form.prompt))
            finally:
                self._busy.release()
        return " ".join(filter(None, remarks))

    def draw(self, tab: Tab, form: Form, track: Track = silent) -> Iterator[Entry]:
        """Yield the dense image, from the history if possible, then the image with the method; both join the history.

        Raises:
            ValueError: If the form is invalid.
            Cancelled: If the user cancelled. Finished images are kept.
        """
        _check_prompt(form)
        cancelled = tab.cancelled
        track = _stoppable(track, cancelled)
        with self._work(cancelled):
            with _field("settings"):
                pipe, distilled = self.open(form.model, form.lora)
            with _field("options"):
                method = self.commands.method(distilled, form.method, form.options)
            with _field("settings"):
                request = self._request(pipe, form, method)
            if method is not None:
                with _field("options"), using(pipe, method):  # fails before anything is generated
                    record_step(pipe, request)
            dense = tab.dense_of(form, request) or self._draw(tab, form, pipe, request, None, None, track)
        yield dense
        if method is not None:
            with self._work(cancelled):
                entry = self._draw(tab, form, pipe, request, method, dense, track)
            yield entry

    def attention(self, entry: Entry, layer: int, token: tuple[int, int]) -> Image.Image:
        """The image, lit where a token attends in a layer, in the middle denoising step.

        Raises:
            ValueError: If the step is no longer in memory, or there is no such layer or token.
        """
        if entry.step is None:
            raise ValueError(f"the steps of {entry.title} are no longer in memory: generate it again to see attention")
        with self._busy:
            pipe, _ = self.open(entry.form.model, entry.form.lora)
            weights = attention_map(pipe, entry.step, entry.method, layer, token)
        return draw_attention(entry.image, weights, token)

    def layers(self, entry: Entry) -> list[str]:
        """Names of the attention layers of the model that generated an entry."""
        with self._busy:
            return attention_layers(self.open(entry.form.model, entry.form.lora)[0])

    def token_at(self, entry: Entry, x: float, y: float) -> tuple[int, int]:
        """(row, column) of the token at a point of the image, coordinates from 0 to 1."""
        with self._busy:
            side = pixels_per_token(self.open(entry.form.model, entry.form.lora)[0])
        rows, columns = (length // side for length in entry.request.size)
        return min(rows - 1, max(0, int(y * rows))), min(columns - 1, max(0, int(x * columns)))

    def answer(self, tab: Tab, asked: QuestionForm, track: Track = silent) -> tuple[Reply, str, str]:
        """The reply to a question about documents, the same page as of `foveate rag`, and remarks.

        Files that cannot be read are skipped, and a remark says why.

        Raises:
            ValueError: If the folder, the model or an option does not fit.
            Cancelled: If the user cancelled. Encoded passages are kept.
        """
        if not asked.question.strip():
            raise ValueError("write a question about the documents")
        methods = self.commands.recompute(asked.method, asked.recompute, asked.compare)
        cancelled = tab.cancelled
        track = _stoppable(track, cancelled)
        with self._work(cancelled):
            folder, name = Path(asked.folder).expanduser(), asked.model.strip()
            skipped, ignored = list[str](), Counter[str]()
            documents = read_documents(folder, skipped, ignored)
            if self._reader is None or self._reader[0] != name:
                self._reader = None
                self._reader = name, *self.commands.open_reader(name)
            _, language_model, tokenizer = self._reader
            place = index_folder(folder, name)
            before, after = chat_frame(tokenizer, date=(date := date_of(place)))
            encoder = ChunkEncoder(language_model, tokenizer, before)
            index = index_documents(place, encoder, documents, date=date)
            index.build(track)
            advance = track("answering", runs(methods))
            reply = ask(index, asked.question, methods, prompt=PROMPT + after, advance=advance)
            settings = {"model": name or "the built-in reader", "method": repr(methods[asked.method])}
            remarks = [f"Skipped: {why}." for why in skipped]
            if ignored:
                remarks.append(f"{describe_ignored(ignored).capitalize()}.")
            if unknown := unknown_words(tokenizer, asked.question):
                remarks.append(f"The model does not know the words {', '.join(unknown)}: it will guess.")
            return reply, reply_page(index, [reply], settings), " ".join(remarks)

    @contextmanager
    def _work(self, cancelled: threading.Event) -> Iterator[None]:
        """Context with exclusive use of the models."""
        with self._busy:
            _check(cancelled)
            yield

    def _request(self, pipe: Any, form: Form, method: Any) -> Request:
        """The request of a form; a LoRA and a preset bring the size, a preset the steps, at which they were made."""
        size = form.size.strip()
        if not size and (made := getattr(method, "size", None)):
            size = f"{made[1]}x{made[0]}"
        steps = _number("steps", form.steps, int, 1, 1000)
        if steps is None and isinstance(method, Preset):
            steps = method.steps
        if makes_video(pipe):
            raise ValueError("this page generates images: use foveate generate or foveate compare for a video model")
        return self.commands.request(
            pipe,
            form.model.strip(),
            form.prompt.strip(),
            size or None,
            steps,
            _number("guidance", form.guidance, float, 0, 1000),
            _number("seed", form.seed, int, 0, 2**63 - 1) or 0,
        )

    def _draw(
        self,
        tab: Tab,
        form: Form,
        pipe: Any,
        request: Request,
        method: MethodLike | None,
        dense: Entry | None,
        track: Track,
    ) -> Entry:
        advance = track(method.title if method else "dense", request.steps)
        times, calls = [now(pipe.device)], []

        def after_step() -> None:
            times.append(now(pipe.device))
            advance()

        def keep_middle(_model: Any, call: Call) -> None:
            if len(times) > request.steps // 2 and not calls:
                calls.append(call)

        with recording([denoiser(pipe)], keep_middle):  # before the methods' own hooks
            variant = draw_variant(pipe, request, method, dense.variant.frames if dense else [], after_step)
        seconds = now(pipe.device) - times[0]
        variant = variant._replace(step_seconds=[later - earlier for earlier, later in pairwise(times)])
        settings = self.commands.settings(pipe, form.model.strip(), request)
        settings |= {"method": repr(method) if method else "dense", "seconds": f"{seconds:.2f}"}
        settings |= {"lora": form.lora.strip()} if form.lora.strip() and method else {}
        settings |= {"stayed dense": variant.why_dense} if variant.why_dense else {}
        path = _unused(self.out, f"{slug(request.prompt)}-{request.seed}-{slug(variant.label)}")
        write_picture(path, variant.image, settings)
        number = tab.history[-1].number + 1 if tab.history else 1
        entry = Entry(number, path, variant, seconds, form, request, method, next(iter(calls), None))
        tab.history = [*tab.history, entry][-MOST_ENTRIES:]
        for old in tab.history[:-MOST_STEPS]:
            old.step = None
        return entry


def scores(left: Entry, right: Entry) -> list[tuple[str, str, str]]:
    """Table that compares two images: rows of a name and a value for each."""

    def step_of(entry: Entry) -> float:
        return median(entry.variant.step_seconds[1:] or entry.variant.step_seconds)  # the first one warms up

    rows = [
        (name, duration(first), f"{duration(second)} ({first / second:.2f} x)")
        for name, first, second in (
            ("Whole run", left.seconds, right.seconds),
            ("One step, median", step_of(left), step_of(right)),
        )
    ]
    if left.image.size == right.image.size:
        distance = psnr(right.image, left.image)
        rows.append(("PSNR of the two", "", "identical" if distance == float("inf") else f"{distance:.1f} dB"))
        rows.append(("SSIM of the two", "", f"{ssim(right.image, left.image):.3f}"))
    rows.append(("Attention skipped", f"{left.variant.true:.0%}", f"{right.variant.true:.0%}"))
    if left.variant.why_dense or right.variant.why_dense:
        rows.append(("Stayed dense", left.variant.why_dense, right.variant.why_dense))
    return rows


def recommended(method: str) -> str:
    """Initial options of a method, as text: its first setting on the page of `foveate compare`."""
    for shown in METHODS[method].showcase()[:1] if method in METHODS else ():
        texts = {option: f"{option.name}={getattr(shown, option.name)}" for option in fields(shown)}
        chosen = (o for o in texts if getattr(shown, o.name) != o.default or texts[o] in shown.title)
        return ", ".join(texts[option] for option in chosen)
    return ""


class MethodOption(NamedTuple):
    """An option of a method as a field of the page.

    Attributes:
        name: Name of the option.
        kind: "switch", "whole" or "number" for numbers, "choice" for one of `choices`, and "text" for all others.
        default: Its default.
        help: Its description in the docstring.
        choices: Values to choose from.
    """

    name: str
    kind: Literal["switch", "whole", "number", "choice", "text"]
    default: Any
    help: str
    choices: tuple[str, ...] = ()


def options_of(method: str, distilled: Distilled | None = None) -> list[MethodOption]:
    """The options of a method, from the fields of its dataclass and its docstring.

    Args:
        method: Name of a method; others have none.
        distilled: The method of a LoRA, which fixes all but the layers and steps in which it is active.
    """
    if (cls := METHODS.get(method)) is None:
        return []
    texts: dict[str, str] = {}
    for base in cls.__mro__:
        section = (inspect.cleandoc(base.__doc__ or "") + "\n\n").partition("Attributes:\n")[2].partition("\n\n")[0]
        for name, text in re.findall(r"^    (\w+): (.+(?:\n {5,}.+)*)", section, re.MULTILINE):
            texts.setdefault(name, re.sub(r"\s+", " ", text).replace("`", ""))
    named, made = recommended(method), distilled.method if distilled else None
    found = [
        MethodOption(
            option.name, kind, getattr(made, option.name, option.default), texts.get(option.name, ""), choices
        )
        for option in fields(cls)
        for kind, choices in [_kind(option.type)]
        if distilled is None or option.name in ANYWHERE
    ]
    return sorted(found, key=lambda option: f"{option.name}=" not in named)


def _kind(annotation: Any) -> tuple[Any, tuple[str, ...]]:
    """Kind and choices of a field for values of a type."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    choices = [str(value) for part in parts if get_origin(part) is Literal for value in get_args(part)]
    if len(parts) == 1:
        if choices:
            return "choice", tuple(choices)
        return {bool: "switch", int: "whole", float: "number"}.get(annotation, "text"), ()
    if set(parts) == {bool, NoneType}:
        return "choice", ("none", "true", "false")
    return "text", tuple(choices)


def presets(folder: Path = Path("tuned")) -> list[str]:
    """Names of the presets that come with Foveate, and the files of those that `foveate tune` wrote."""
    found = [path.stem for path in sorted(PRESETS.glob("*.json"))]
    for path in sorted(folder.glob("*.json")):
        try:
            load(path)
        except ValueError:  # measurements
            continue
        found.append(str(path))
    return found


def _check_prompt(form: Form) -> None:
    if not form.prompt.strip():
        raise FieldError("write a prompt first", "prompt")


def _number(name: str, text: str, kind: type, least: int, most: int) -> Any:
    """The number in a field; None if it is empty."""
    if not text.strip():
        return None
    try:
        if least <= (number := kind(text)) <= most:
            return number
    except ValueError:
        pass
    raise ValueError(f"{name} must be {'a whole' if kind is int else 'a'} number from {least} to {most}, not {text!r}")


def _stays_dense(pipe: Any, request: Request, method: MethodLike | None) -> Iterator[str]:
    """Reasons why parts of a method stay dense at this size; raises a ValueError if they do not fit it."""
    side = pixels_per_token(pipe)
    grid = request.size[0] // side, request.size[1] // side
    parts = [plain for part in (method.parts if method else ()) for plain in part.plain]
    for part in parts if grid[0] * grid[1] <= LIVE_TOKENS else ():
        try:
            part.check_tokens(prod(grid))
            if isinstance(part, TokenMerging):
                part.regions((grid,))
            else:
                part.plan((grid,), 0)  # type: ignore[attr-defined]  # sparse attention
        except DenseFallback as reason:
            yield str(reason)


def _check(cancelled: threading.Event) -> None:
    """Raise `Cancelled` if the user cancelled."""
    if cancelled.is_set():
        raise Cancelled


def _stoppable(track: Track, cancelled: threading.Event) -> Track:
    """A wrapped `track` whose steps raise `Cancelled` after the user cancelled."""

    def start(name: str, length: int) -> Callable[[], None]:
        advance = track(name, length)

        def step() -> None:
            _check(cancelled)
            advance()

        return step

    return start


def _unused(folder: Path, name: str) -> Path:
    """Path of a PNG file that does not exist yet."""
    names = (name if i == 1 else f"{name}-{i}" for i in count(1))
    return next(path for name in names if not (path := folder / f"{name}.png").exists())
