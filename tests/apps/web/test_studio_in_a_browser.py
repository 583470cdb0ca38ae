"""Laws of the studio's page, tried in Chromium as a user would."""

import re
import shutil
import subprocess
import sys

import pytest
from PIL import Image

from foveate.apps.demo.untrained import untrained_pipeline
from foveate.apps.web.studio import options_of, recommended
from foveate.methods import METHODS, options_in

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium"),
]

HANGS = 300_000
"""Milliseconds after which a wait fails: generous, since a busy machine is slow and no law is about time."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("studio")
    tiny = untrained_pipeline(layers=1, single_layers=1, heads=2, rope=(4, 4, 8))
    tiny.save_pretrained(path / "tiny")
    return path


@pytest.fixture(scope="module")
def address(folder):
    command = [sys.executable, "-m", "foveate", "ui", "--model", "tiny", "--device", "cpu", "--port", "0"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        yield server.stdout.readline().strip()
        server.terminate()
        assert "Traceback" not in server.communicate()[1]


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def window(chromium):
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(HANGS)
    yield context
    context.close()


def opened(window, address, steps="2", size="64"):
    """A tab that asks for an image, by default the smallest."""
    tab = window.new_page()
    requests = []
    tab.on("request", lambda request: requests.append(request.url))
    tab.goto(address)
    tab.get_by_role("button", name="Model, size, steps").click()
    field(tab, "Size").fill(size)
    field(tab, "Steps").fill(steps)
    field(tab, "Prompt").fill("a red apple")
    assert all(url.startswith((address, "data:", "blob:")) for url in requests), requests
    return tab


def field(tab, name):
    return tab.get_by_label(name)


def option(tab, name):
    return tab.get_by_label(re.compile(rf"^\s*{name}"))  # a text's label begins with a space


def choose(tab, name, value):
    tab.get_by_label(re.compile(f"^{name}")).click()
    tab.get_by_role("option", name=value, exact=True).click()


def says(tab, text):
    tab.locator("#said, #noted").filter(has_text=text).wait_for()


def draw(tab):
    tab.get_by_role("button", name="Generate", exact=True).click()
    says(tab, "ToMA keep=0.5 is done")
    tab.locator("#scores", has_text="ToMA keep=0.5").wait_for()


def history(tab):
    return tab.locator("#history button.thumbnail-item").count()


def test_draw_slide_compare_look_inside_and_download(window, address, folder):
    tab = opened(window, address)
    draw(tab)
    assert "PSNR of the two" in tab.locator("#scores").inner_text()
    handle = tab.locator("#slider [data-testid=slider]")
    handle.scroll_into_view_if_needed()
    tab.wait_for_function("[...document.querySelectorAll('#slider img')].every(image => image.complete)")
    box = handle.bounding_box()
    middle = box["y"] + box["height"] / 2
    tab.mouse.move(box["x"] + box["width"] / 2, middle)
    tab.mouse.down()
    tab.mouse.move(box["x"] - 100, middle, steps=4)
    tab.mouse.up()
    assert handle.bounding_box()["x"] < box["x"] - 50
    tab.locator("#history button.thumbnail-item").first.click()
    tab.locator("#scores", has_text="identical").wait_for()
    with tab.expect_download() as file:
        tab.locator("#saved a[download]").first.click()
    with Image.open(file.value.path()) as saved:
        assert saved.text["prompt"] == "a red apple"
        assert saved.size == (64, 64)
    tab.get_by_role("button", name="Where a token attends").click()
    tab.locator("#tiles img").click()
    says(tab, "Attention of token")
    tab.locator("#attention img").first.wait_for()


def test_cancel_stops_and_the_next_drawing_works(window, address):
    tab = opened(window, address, steps="1000", size="256")  # minutes, so that Cancel is clicked in time
    tab.get_by_role("button", name="Generate", exact=True).click()
    tab.get_by_text(re.compile(r"\d+/1000 steps")).first.wait_for()
    says(tab, "Generating")
    tab.get_by_role("button", name="Cancel").first.click()
    says(tab, "Cancelled")
    assert tab.locator(".error, .said.wrong").count() == 0
    field(tab, "Size").fill("64")
    field(tab, "Steps").fill("2")
    draw(tab)
    assert history(tab) == 2


def test_a_mistake_is_a_message_while_typing(window, address):
    tab = opened(window, address)
    option(tab, "keep").fill("7")
    beside = tab.locator("#said-options", has_text="keep is the fraction of tokens kept")
    beside.wait_for()
    assert 0 < beside.bounding_box()["y"] - option(tab, "keep").bounding_box()["y"] < 150
    tab.get_by_role("button", name="Generate", exact=True).click()
    beside.wait_for()
    option(tab, "keep").fill("0.5")
    field(tab, "Size").fill("65")
    says(tab, "use multiples of 4")
    assert 0 < tab.locator("#noted").bounding_box()["y"] - field(tab, "Size").bounding_box()["y"] < 150
    field(tab, "Prompt").fill("")
    tab.locator("#said-prompt", has_text="write a prompt first").wait_for()
    assert history(tab) == 0


def test_before_the_first_image_there_are_no_empty_panels(window, address):
    tab = window.new_page()
    tab.goto(address)
    tab.locator("#scores", has_text="No images yet").wait_for()
    for panel in ("#slider", "#history", "#saved", "#left", "#inside", "#attention"):
        assert not tab.locator(panel).is_visible()
    assert tab.locator("input[type=range]").count() == 0  # the images have a line of their own


@pytest.mark.parametrize("name", METHODS)
def test_defaults_are_no_text_and_recommended_options_are_theirs(chromium, name):
    from foveate.apps.web.studio_page import field_of, options_text

    options, given = options_of(name), options_in(recommended(name))
    tab = chromium.new_page()
    text = f"values => ({options_text(options)})(...values)"
    defaults = [field_of(option, option.default).value for option in options]
    assert tab.evaluate(text, defaults) == ""
    first = [field_of(option, given.get(option.name, option.default)).value for option in options]
    assert tab.evaluate(text, first) in (recommended(name), "")
    changed = [not value if isinstance(value, bool) else " 7 " for value in defaults]
    assert tab.evaluate(text, changed).count("=") == len(options)
    tab.close()


def unanswered_but_generate(route):
    """A server that has not answered to changes of fields when Generate is clicked, whose only input is the tab."""
    if len(route.request.post_data_json["data"]) == 1:
        route.continue_()


def test_options_are_fields_of_the_method(window, address):
    tab = opened(window, address)
    choose(tab, "Method", "hilberta")
    option(tab, "tiles").wait_for()
    tab.get_by_role("button", name="More options").click()
    tab.get_by_text("Where the tiles slide").wait_for()
    tab.route("**/run/predict*", unanswered_but_generate)
    choose(tab, "slide", "curve")
    tab.get_by_role("button", name="Generate", exact=True).click()
    says(tab, "HilbertA T=4 slide=curve is done")
    tab.unroute("**/run/predict*")
    choose(tab, "Method", "dense")
    tab.get_by_text("The dense model has no options").wait_for()


def test_a_lora_brings_its_method_and_takes_its_options_with_it(window, address):
    tab = opened(window, address)
    choose(tab, "LoRA", "built-in")
    tab.get_by_role("button", name="Options: layers and steps").wait_for()
    assert field(tab, "Method").input_value() == "hilberta"
    says(tab, "This model is loaded when you generate")
    tab.get_by_role("button", name="Generate", exact=True).click()
    says(tab, "does not fit this model")  # it is for the built-in model, not for this one
    choose(tab, "Method", "toma")
    option(tab, "keep").wait_for()
    assert tab.get_by_label("LoRA").input_value() == ""
    draw(tab)


def test_a_late_answer_to_a_field_does_not_hide_what_generate_says(window, address):
    tab = opened(window, address)
    choose(tab, "LoRA", "built-in")
    tab.get_by_role("button", name="Options: layers and steps").wait_for()
    late = []

    def keep(route):
        (unanswered_but_generate if len(route.request.post_data_json["data"]) == 1 else late.append)(route)

    tab.route("**/run/predict*", keep)
    field(tab, "Seed").fill("1")
    tab.get_by_role("button", name="Generate", exact=True).click()
    says(tab, "does not fit this model")
    with tab.expect_response("**/run/predict*"):
        late[-1].continue_()
    tab.locator("#noted", has_text="This model is loaded").wait_for()
    says(tab, "does not fit this model")


def test_the_methods_to_choose_include_presets(window, address):
    tab = opened(window, address)
    choose(tab, "Method", "built-in-128px-ssim-0.9")
    tab.get_by_text("The options are part of this method").wait_for()
    tab.get_by_role("button", name="Generate", exact=True).click()
    tab.locator("#said-options", has_text="presets hold for one model").wait_for()


def test_tabs_do_not_mix_and_a_history_survives_a_reload(window, address):
    one, two = opened(window, address), opened(window, address)
    field(two, "Prompt").fill("a blue car")
    one.get_by_role("button", name="Generate", exact=True).click()
    draw(two)
    says(one, "ToMA keep=0.5 is done")
    for tab, other in ((one, "blue"), (two, "red")):
        assert history(tab) == 2
        assert other not in tab.locator("#saved").inner_text()
    one.reload()
    one.locator("#scores", has_text="ToMA keep=0.5").wait_for()
    one.locator("#history button.thumbnail-item").nth(1).wait_for()
    assert history(one) == 2


def test_the_keyboard_is_enough(window, address):
    tab = opened(window, address)
    field(tab, "Prompt").focus()
    tab.keyboard.press("Shift+Enter")
    says(tab, "ToMA keep=0.5 is done")
    handle, seen = tab.locator("#slider [data-testid=slider]"), set()
    before = handle.bounding_box()["x"]
    handle.focus()
    for _ in range(9):
        tab.keyboard.press("ArrowLeft")
    tab.wait_for_function(
        f"document.querySelector('#slider [data-testid=slider]').getBoundingClientRect().x < {before} - 20"
    )
    field(tab, "Prompt").focus()
    for _ in range(60):
        tab.keyboard.press("Tab")
        name = tab.evaluate("document.activeElement.ariaLabel || document.activeElement.innerText").strip()
        seen.add(name)
        if name.startswith("Where a token attends"):
            break
    tab.keyboard.press("Enter")
    tab.locator("#look").wait_for()
    for _ in range(9):
        tab.keyboard.press("Tab")
        if tab.evaluate("document.activeElement.id") == "look":
            break
    tab.keyboard.press("Enter")
    says(tab, "Attention of token 0, 0 in transformer_blocks.0.attn")
    assert {"Generate", "Cancel", "Method", "Left", "Right"} <= seen


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_is_accessible(chromium, address, scheme):
    from axe_playwright_python.sync_playwright import Axe

    context = chromium.new_context(viewport={"width": 400, "height": 900}, color_scheme=scheme)
    context.set_default_timeout(HANGS)
    tab = opened(context, address)
    draw(tab)
    tab.get_by_role("button", name="Where a token attends").click()
    wide = "document.documentElement.scrollWidth"
    assert tab.evaluate(wide) <= 400
    found = Axe().run(tab).response["violations"]
    tab.get_by_role("tab", name="Documents").click()
    tab.locator("#answer", has_text="No answer yet").wait_for()
    assert not tab.locator("#told").is_visible()
    tab.get_by_role("button", name="Ask").click()
    tab.locator("#told", has_text="Madrid").wait_for()
    assert tab.evaluate(wide) <= 400
    found += Axe().run(tab).response["violations"]
    context.close()
    bad = [
        (rule["id"], node["html"])
        for rule in found
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]
    assert not bad
