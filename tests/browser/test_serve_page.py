"""The page of `vitlab serve` in a real browser, with the real server behind it: models so small that answers are quick.

With `VITLAB_SCREENSHOTS=FOLDER`, pictures of the page are stored there for the documentation.
"""

import base64
import csv
import dataclasses
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from slow_cases import slow_after

import vitlab
from vitlab.data.decode import ORIENTATION
from vitlab.data.preprocess import Preprocess
from vitlab.engines.classifier import Classifier
from vitlab.inspection.meanings import MEANINGS
from vitlab.inspection.saliency import METHODS
from vitlab.models.build import build
from vitlab.models.spec import BiTSpec, ModelSpec, ViTSpec, bit_trunk, changed
from vitlab.weights.bundle import Bundle, save_bundle

pytest.importorskip("starlette", reason="needs the extra serve")

Visit, Serious = Callable[..., Any], Callable[[Any], list[str]]
PICTURES = os.environ.get("VITLAB_SCREENSHOTS")
DATA = Path(os.environ.get("VITLAB_DATA") or Path(__file__).parents[3] / "shared" / "data")
HOSTILE = "<img src=x onerror=alert(1)>"
LABELS = (f"{HOSTILE} & “such”", "Käfer", "ant", "bee", "=1+1", "wasp", "fly")
CARD = f"""# Tiny {HOSTILE}

| what | |
|---|---|
| data | made **up** |

- [a page](https://example.org/a)
- [no page](javascript:alert(1))
"""
METHOD_TITLES = {name: MEANINGS[name].title for name in METHODS}
TOKEN = "a-token-of-letters"
PATIENCE_MS = 60_000
VIT = ViTSpec(width=24, depth=4, mlp_dim=48, heads=3, patch=8, image_size=(32, 32), num_classes=len(LABELS))


@dataclasses.dataclass(frozen=True)
class Served:
    address: str
    models: dict[str, Classifier]


def classifier(spec: ModelSpec, **more: Any) -> Classifier:
    """Random weights that do look somewhere: at its start, attention is nearly uniform."""
    model = build(spec, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    rule = Preprocess(image_size=spec.image_size, mean=(0.5,) * 3, std=(0.25,) * 3, resize="shorter-side")
    return Classifier(dataclasses.replace(Bundle(model, rule, LABELS, CARD, {}), **more), "cpu")


def photo(seed: int = 0, size: tuple[int, int] = (120, 80), kind: str = "PNG", **options: Any) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(buffer, kind, **options)
    return buffer.getvalue()


def started(folder: Path, *models: str) -> Generator[str]:
    """The address of a server on a free port of this machine."""
    (folder / "token").write_text(TOKEN)
    command = [sys.executable, "-m", "vitlab", "serve", *models, "--port", "0", "--token-file", str(folder / "token")]
    command += ["--threads", "1", "--decoders", "1", "--max-body-mb", "1", "--deadline", "60"]
    log = folder / "log.txt"
    with log.open("w") as errors, subprocess.Popen(command, stderr=errors, cwd=folder) as process:
        try:
            ending = time.monotonic() + 120
            while not (found := re.search(r"Serving .* at (http://127\.0\.0\.1:\d+)", log.read_text())):
                assert process.poll() is None and time.monotonic() < ending, log.read_text()
                time.sleep(0.1)
            yield found[1]
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    """Three models: one with tokens, one without, and one of images with several labels."""
    folder = tmp_path_factory.mktemp("served")
    models = {
        "tiny": classifier(VIT),
        "conv": classifier(BiTSpec(trunk=bit_trunk((1, 1), 1), image_size=(32, 32), num_classes=len(LABELS))),
        "several": classifier(changed(VIT, {"depth": 1}), thresholds=(0.0,) * len(LABELS)),
    }
    for name, model in models.items():
        save_bundle(folder / name, model.bundle)
    for address in started(folder, *(f"{name}={folder / name}" for name in models)):
        yield Served(address, models)


@pytest.fixture
def visit(browser: Any, served: Served) -> Generator[Visit]:
    """Opens the page; whatever it logs, throws or asks other servers for must be nothing at the end.

    A refused answer is in Chromium's own log, also where the page expects it: tests that ask for one say so.
    """
    contexts: list[Any] = []
    noted: list[str] = []

    def call(width: int = 1280, theme: str = "light", *, token: str = TOKEN, refusals: str = "", **more: Any) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme, has_touch=width < 500, **more
        )
        contexts.append(context)
        if token:
            context.add_init_script(
                f"sessionStorage.getItem('vitlab-token') ?? sessionStorage.setItem('vitlab-token', '{token}')"
            )
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        allowed = re.compile(rf"status of ({refusals}) ") if refusals else None
        page.on("console", lambda one: (allowed and allowed.search(one.text)) or noted.append(one.text))
        page.on("pageerror", lambda error: noted.append(f"error: {error}"))
        page.on("dialog", lambda dialog: noted.append(f"dialog: {dialog.message}"))
        inside = (served.address, "data:", f"blob:{served.address}")
        page.on("request", lambda one: one.url.startswith(inside) or noted.append(f"request: {one.url}"))
        page.goto(served.address)
        if token:
            page.locator("#about").wait_for()
        return page

    yield call
    for context in contexts:
        context.close()
    assert not noted


def give(page: Any, *files: tuple[str, bytes]) -> None:
    page.locator("#files").set_input_files(
        [{"name": name, "mimeType": "image/png", "buffer": data} for name, data in files]
    )


def answered(page: Any) -> Any:
    """The current picture has its answer and its maps."""
    page.locator("#canvas:not([hidden])").wait_for()
    page.locator("#legend:not([hidden])").wait_for()
    return settled(page)


def settled(page: Any) -> Any:
    """Until the fade from one map to the next is over."""
    page.wait_for_timeout(400)
    return page


def pixels(page: Any, canvas: str = "#canvas") -> str:
    return page.locator(canvas).evaluate("canvas => canvas.toDataURL()")


def picture(page: Any, size: tuple[int, int]) -> np.ndarray:
    """What is on the large canvas, reduced to a size, without its edges: there stands a line of the screen's own width."""
    drawn = Image.open(io.BytesIO(base64.b64decode(pixels(page).partition(",")[2]))).convert("RGB")
    return np.asarray(drawn.resize(size, Image.Resampling.BOX)).astype(float)


def view(page: Any, name: str) -> None:
    page.locator("#views label").filter(has=page.locator(f"input[value={name}]")).click()
    settled(page)


def slide(page: Any, name: str, value: int) -> str:
    page.locator(f"#{name}").fill(str(value))
    return pixels(settled(page))


DROP = """([files, how]) => {
  const carried = new DataTransfer();
  for (const [name, data] of files) {
    const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
    carried.items.add(new File([bytes], name, { type: 'image/png' }));
  }
  const target = document.querySelector('main');
  if (how === 'paste') target.dispatchEvent(new ClipboardEvent('paste', { clipboardData: carried, bubbles: true }));
  else for (const kind of ['dragenter', 'dragover', 'drop']) {
    target.dispatchEvent(new DragEvent(kind, { dataTransfer: carried, bubbles: true, cancelable: true }));
  }
}"""


@pytest.mark.parametrize("how", ["drop", "paste"])
def test_an_image_gives_five_bars_and_an_overlay(served: Served, visit: Visit, how: str) -> None:
    page = visit()
    page.evaluate(DROP, [[["Grüße.png", base64.b64encode(photo()).decode()]], how])
    answered(page)
    truth = served.models["tiny"](photo())
    bars = page.locator("#bars li")
    assert [bars.nth(k).locator(".name").text_content() for k in range(bars.count())] == [one.label for one in truth]
    shown = [float(re.sub(r"[^\d.]", "", bars.nth(k).locator(".number").text_content())) for k in range(5)]
    assert np.abs(np.array(shown) - [100 * one.p for one in truth]).max() < 0.11
    widths = [bars.nth(k).locator(".fill").evaluate("bar => parseFloat(bar.style.width)") for k in range(5)]
    assert np.abs(np.array(widths) - [100 * one.p for one in truth]).max() < 0.01
    assert truth[0].label in page.locator("#verdict").text_content()
    assert page.locator("#file-name").text_content() == "Grüße.png"
    assert "120 × 80" in page.locator("#file-facts").text_content()
    drawn = pixels(page)
    view(page, "photo")
    assert pixels(page) != drawn, "the map is drawn over the photo"
    assert "cut off" in page.locator("#caption").text_content(), "a square was seen of a wide photo"


def test_label_method_depth_head_and_strength_change_the_picture(served: Served, visit: Visit) -> None:
    page = visit()
    give(page, ("photo.png", photo()))
    seen = {pixels(answered(page))}
    page.locator("#bars li").nth(2).click()
    label = served.models["tiny"](photo())[2].label
    page.locator("#legend-title").filter(has_text=label).wait_for()
    seen.add(pixels(settled(page)))
    assert f"that of {label}." in page.locator("#caption").text_content()
    page.locator("#method").select_option("grad-cam")
    page.locator("#legend-unit").filter(has_text="of the strongest patch").wait_for()
    seen.add(pixels(settled(page)))
    assert len(seen) == 3, "label and method"
    view(page, "layers")
    seen |= {slide(page, "depth", depth) for depth in (1, 2, 4)}
    assert len(seen) == 6, "depth"
    assert "after layer 4 of 4" in page.locator("#legend-title").text_content()
    assert "does not prove" in page.locator("#caption").text_content()
    view(page, "heads")
    seen |= {slide(page, "layer", layer) for layer in (1, 3)} | {slide(page, "head", 3)}
    assert len(seen) == 9, "layer and head"
    box = page.locator("#sheet-canvas").bounding_box()
    page.locator("#sheet").click(position={"x": 0.3 * box["width"], "y": 0.5 * box["height"]})
    seen.add(pixels(settled(page)))
    assert (page.locator("#layer").input_value(), page.locator("#head").input_value()) == ("2", "2")
    page.locator("#squares").check()
    seen.add(pixels(settled(page)))
    assert len(seen) == 11, "a small map, and patches as squares"
    page.locator("#squares").uncheck()
    bare = slide(page, "opacity", 0)
    view(page, "photo")
    assert pixels(page) == bare, "without strength, the photo is as it was"


@pytest.mark.parametrize("method", slow_after(1, ["gradient-rollout", "grad-cam", "rollout"]))
def test_map_looks_as_the_overlay_of_the_classifier(served: Served, visit: Visit, method: str) -> None:
    clf, image = served.models["tiny"], photo(7)
    page = visit()
    give(page, ("photo.png", image))
    answered(page)
    page.locator("#method").select_option(method)
    page.locator(f"#canvas[aria-label*='{METHOD_TITLES[method]}']").wait_for()
    drawn = picture(settled(page), (120, 80))
    view(page, "photo")
    bare = picture(page, (120, 80))
    inside = np.s_[3:-3, 23:-23]  # of the white line
    truth = np.asarray(clf.explain(image, method).overlay).astype(float)  # type: ignore[arg-type]
    wrong, right = (np.abs(each - truth)[inside].mean() for each in (bare, drawn))
    assert right < 5 < 10 < wrong
    assert np.abs(bare - np.asarray(Image.open(io.BytesIO(image))))[inside].mean() < 5


def test_play_goes_through_the_layers(visit: Visit) -> None:
    page = visit()
    give(page, ("photo.png", photo()))
    answered(page)
    view(page, "layers")
    # Noted by the page itself: on a busy machine a layer may be over before anybody outside looks.
    page.evaluate(
        """() => {
            const said = document.querySelector("#depth-said");
            window.depths = [];
            const watched = { childList: true, characterData: true, subtree: true };
            new MutationObserver(() => window.depths.push(said.textContent)).observe(said, watched);
        }"""
    )
    page.locator("#play").click()
    page.locator("#play").filter(has_text="Pause").wait_for()
    page.locator("#play").filter(has_text="Play").wait_for()
    depths = page.evaluate("window.depths")
    assert all(any(f"1 to {depth}" in text for text in depths) for depth in (2, 4)), depths
    page.emulate_media(reduced_motion="reduce")
    assert not page.locator("#play").is_visible()


def test_several_files_are_a_table_and_a_csv(served: Served, visit: Visit) -> None:
    page = visit(refusals="422")
    turned = Image.Exif()
    turned[ORIENTATION] = 6
    alpha = io.BytesIO()
    Image.open(io.BytesIO(photo(3))).convert("RGBA").save(alpha, "PNG")
    files = {
        "Grüße, Köln.png": photo(1),
        '=HYPERLINK("x").png': photo(2),
        "portrait.jpg": photo(3, (200, 100), "JPEG", exif=turned),
        "alpha.png": alpha.getvalue(),
        f"{HOSTILE}.png": photo(4),
        "broken.png": photo(5)[:150],
        "empty.png": b"",
        "large.png": photo(6) + bytes(2**20),
    }
    sent: list[str] = []
    page.on("request", lambda one: sent.append(one.url))
    give(page, *files.items())
    page.locator("#progress[hidden]").wait_for(state="attached")
    rows = page.locator("#rows tr")
    assert [rows.nth(k).locator("button").text_content() for k in range(rows.count())] == list(files)
    outcomes = [rows.nth(k).locator(".outcome").text_content() for k in range(rows.count())]
    assert outcomes[:5] == ["done"] * 5
    assert "damaged" in outcomes[5] and "empty" in outcomes[6] and "at most 1 MB" in outcomes[7]
    assert len([url for url in sent if "/v1/predict" in url]) == 6, "what is empty or too large is not sent"
    assert "3 without an answer" in page.locator("#batch-said").text_content()

    with page.expect_download() as download:
        page.locator("#csv").click()
    data = Path(download.value.path()).read_bytes()
    assert download.value.suggested_filename == "tiny-answers.csv"
    assert data.startswith(b"\xef\xbb\xbf") and data.count(b"\r\n") == 9 and data.count(b"\n") == 9
    table = list(csv.DictReader(io.StringIO(data.decode("utf-8-sig"))))
    names = [re.sub(r"^=", "'=", name) for name in files]
    assert [row["file"] for row in table] == names, "a spreadsheet must not run a name"
    for row, image in zip(table[:5], files.values(), strict=False):
        truth = served.models["tiny"](image)
        assert [row[f"label {k}"].removeprefix("'") for k in range(1, 6)] == [one.label for one in truth]
        assert [float(row[f"p {k}"]) for k in range(1, 6)] == pytest.approx(
            [one.p for one in truth], rel=1e-4, abs=1e-6
        )
        assert (row["status"], row["error"]) == ("done", "")
    assert [row["status"] for row in table[5:]] == ["no answer"] * 3 and all(row["error"] for row in table[5:])

    rows.nth(2).click()
    page.locator("#file-facts").filter(has_text="100 × 200").wait_for()
    assert rows.nth(2).get_attribute("aria-current") == "true"
    rows.nth(5).locator("button").click()
    assert "No answer. The image cannot be read" in page.locator("#verdict").text_content()
    assert not page.locator("#look").is_visible()
    page.locator("#clear").click()
    assert page.locator("#examples").is_visible() and rows.count() == 0


def test_names_and_cards_are_text(visit: Visit) -> None:
    page = visit()
    give(page, (f"{HOSTILE}.png", photo()), ("second.png", photo(1)))
    answered(page)
    assert page.locator("#file-name").text_content() == f"{HOSTILE}.png"
    assert HOSTILE in page.locator("#labels").text_content() and HOSTILE in page.locator("#bars").text_content()
    assert page.locator("#card h3").text_content() == f"Tiny {HOSTILE}"
    assert page.locator("#card strong").text_content() == "up"
    links = page.locator("#card a")
    assert links.count() == 1 and links.get_attribute("href") == "https://example.org/a"
    assert page.locator("img[src=x]").count() == 0


def test_another_model_predicts_the_same_pictures(served: Served, visit: Visit) -> None:
    page = visit()
    give(page, ("photo.png", photo()))
    answered(page)
    view(page, "heads")
    for name, methods, tabs in (("conv", 2, [True, False, False, True]), ("several", 5, [True] * 4)):
        page.locator("#model").select_option(name)
        page.locator("#facts dd").first.filter(has_text=name).wait_for()
        answered(page)
        page.locator("#method option").nth(methods - 1).wait_for(state="attached")
        truth = served.models[name](photo())
        assert page.locator("#bars .name").first.text_content().startswith(truth[0].label)
        assert page.locator("#method option").count() == methods
        views = page.locator("#views label")
        assert [views.nth(k).is_visible() for k in range(4)] == tabs
        assert page.locator("#bars .has").count() == sum(one.has is True for one in truth)
        assert f"?model={name}" in page.locator("#curl").text_content()


def test_keyboard_alone_reaches_an_answer(visit: Visit) -> None:
    page = visit()
    chosen = [{"name": "photo.png", "mimeType": "image/png", "buffer": photo()}]
    page.on("filechooser", lambda chooser: chooser.set_files(chosen))  # early: it takes the browser a while to listen
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "choose"
    page.keyboard.press("Enter")
    answered(page)
    page.locator("#live").filter(has_text="photo.png: ").wait_for(state="attached")
    for _ in range(10):
        if page.evaluate("document.activeElement.name") == "view":
            break
        page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Tab")
    before = pixels(settled(page))
    page.keyboard.press("ArrowLeft")
    assert "1 to 3" in page.locator("#depth-said").text_content()
    assert pixels(settled(page)) != before
    assert page.evaluate("document.activeElement.matches(':focus-visible')")


@pytest.mark.parametrize(
    ("width", "theme"), slow_after(2, [(1280, "light"), (360, "dark"), (1280, "dark"), (390, "light")])
)
def test_no_serious_fault_for_those_who_see_or_hear_it(visit: Visit, serious: Serious, width: int, theme: str) -> None:
    page = visit(width, theme, reduced_motion="reduce")
    assert serious(page) == []
    give(page, ("one.png", photo()), ("a-very-long-name-" + 8 * "without-a-space" + ".png", photo(1)))
    page.locator("#progress[hidden]").wait_for(state="attached")
    answered(page)
    for name in ("layers", "heads"):
        view(page, name)
        assert serious(page) == [], name
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name


def test_token_is_asked_for_once(visit: Visit) -> None:
    page = visit(token="", refusals="401")
    for text in ("not-the-token", TOKEN):
        page.locator("#token[open]").wait_for()
        assert page.locator("#token-wrong").is_visible() == (text == TOKEN)
        page.locator("#token-text").fill(text)
        page.keyboard.press("Enter")
    page.locator("#about").wait_for()
    assert "Bearer TOKEN" in page.locator("#curl").text_content()
    page.reload()
    page.locator("#about").wait_for()
    assert not page.locator("#token").is_visible()


def test_busy_server_is_asked_again(visit: Visit) -> None:
    page = visit(refusals="503")
    error = {"error": {"code": "queue_full", "message": "The server is busy. Try again shortly."}}
    turns = iter([True, True])

    def refuse(route: Any) -> None:
        if next(turns, False):
            route.fulfill(status=503, json=error, headers={"Retry-After": "1"})
        else:
            route.continue_()

    page.route("**/v1/predict*", refuse)
    give(page, ("photo.png", photo()))
    page.locator("#busy").filter(has_text="busy. Trying again in 1 second").wait_for()
    answered(page)
    assert page.locator("#bars li").count() == 5


def test_failure_is_reported_and_the_picture_can_be_sent_again(visit: Visit) -> None:
    page = visit(refusals="500")
    page.route("**/v1/predict*", lambda route: route.fulfill(status=500, body="no JSON"), times=1)
    give(page, ("photo.png", photo()))
    page.locator("#verdict").filter(has_text="No answer.").wait_for()
    page.get_by_role("button", name="Try again").click()
    answered(page)
    assert page.locator("#bars li").count() == 5


def test_example_is_a_picture_like_any_other(visit: Visit) -> None:
    page = visit()
    page.get_by_role("button", name="a cat").click()
    answered(page)
    assert page.locator("#file-name").text_content() == "cat.jpg"


def test_theme_can_be_chosen_and_stays(visit: Visit) -> None:
    page = visit()
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="Theme: system").click()
    page.get_by_role("button", name="Theme: light").click()
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert dark != light
    page.reload()
    page.locator("#about").wait_for()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark


# --- pictures for the documentation -----------------------------------------------------------------------------------

# Where photos of each label are found: the archive, and what the names of its files hold.
KINDS = {
    "cat": ("oxford_pets/pets_trainval", "Abyssinian Bengal Birman Persian Siamese Egyptian"),
    "dog": ("oxford_pets/pets_trainval", "beagle boxer pug samoyed saint shiba"),
    "ant": ("hymenoptera/hymenoptera_train", "ants"),
    "bee": ("hymenoptera/hymenoptera_train", "bees"),
    "bird": (
        "imagenet_samples/imagenet_850",
        "finch jay robin owl eagle hen heron pelican magpie bunting toucan goose",
    ),
    "boat": (
        "imagenet_samples/imagenet_850",
        "schooner yawl catamaran trimaran speedboat lifeboat canoe fireboat liner",
    ),
    "car": ("imagenet_samples/imagenet_850", "cab convertible jeep minivan racer limousine sports wagon pickup"),
    "fish": ("imagenet_samples/imagenet_850", "tench goldfish shark hammerhead ray eel coho sturgeon gar puffer"),
}
OF_EACH = 24
ABOUT = """# Eight things

| what | |
|---|---|
| model | ViT-Ti/16: the weights that vitlab ships, with a linear probe |
| data | up to 24 photos of each label |

It knows **eight labels** and nothing else: it answers every picture with one of them.

## Where it fails

- on whatever it was never shown
- on several things in one picture
"""


def photos_of(kind: str) -> list[bytes]:
    archive, words = KINDS[kind]
    stored = np.load(DATA / f"{archive}.npz")
    data, ends = stored["data"].tobytes(), stored["offsets"]
    named = [
        f"{name} {stored['classes'][label]}" for name, label in zip(stored["names"], stored["labels"], strict=True)
    ]
    rows = [k for k, name in enumerate(named) if set(words.split()) & set(re.split(r"[\W\d_]+", name))]
    return [data[ends[k] : ends[k + 1]] for k in rows[:: max(1, len(rows) // OF_EACH)][:OF_EACH]]


def eight_things(folder: Path) -> Path:
    """The shipped weights with a linear probe by ridge regression: to be looked at, not to be measured."""
    trunk = vitlab.load("ViT-Ti/16@dinov2-distilled", quiet=True)
    photos = {kind: photos_of(kind) for kind in KINDS}
    y_BD = torch.cat([trunk.embed(each) for each in photos.values()]).double()
    mean_D = y_BD.mean(dim=0)
    y_BD = y_BD - mean_D
    index_B = torch.arange(len(KINDS)).repeat_interleave(torch.tensor([len(each) for each in photos.values()]))
    wanted_BK = torch.eye(len(KINDS)).double()[index_B] - 1 / len(KINDS)
    gram_DD = y_BD.mT @ y_BD
    ridge_DD = 0.05 * gram_DD.diagonal().mean() * torch.eye(len(gram_DD)).double()
    weight_DK = 10 * torch.linalg.solve(gram_DD + ridge_DD, y_BD.mT @ wanted_BK)
    model = build(changed(trunk.model.spec, {"num_classes": len(KINDS)}), seed=0)
    head = {"head.weight": weight_DK.mT.float(), "head.bias": -(mean_D @ weight_DK).float()}
    model.load_state_dict({**trunk.model.state_dict(), **head})
    save_bundle(folder / "things", Bundle(model, trunk.preprocess, tuple(KINDS), ABOUT, {}))
    return folder / "things"


def keep(page: Any, path: Path) -> None:
    """What the window shows, in the 256 colours that come nearest: a third of the bytes."""
    shown = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    ways = (Image.Quantize.MEDIANCUT, Image.Quantize.MAXCOVERAGE)
    tried = [shown.quantize(palette=shown.quantize(256, method=way, kmeans=2)) for way in ways]
    best = min(tried, key=lambda one: np.abs(np.asarray(one.convert("RGB")).astype(int) - np.asarray(shown)).mean())
    best.save(path, optimize=True)


@pytest.mark.skipif(not PICTURES, reason="pictures for the documentation are made with VITLAB_SCREENSHOTS")
def test_pictures_of_the_page(browser: Any, tmp_path: Path) -> None:
    """Of our own drawings."""
    out = Path(str(PICTURES))
    out.mkdir(parents=True, exist_ok=True)
    drawings = Path(vitlab.__file__).parent / "serving" / "page"
    for address in started(tmp_path, str(eight_things(tmp_path))):
        for name, width, theme in (("page", 1280, "light"), ("page-dark", 1280, "dark"), ("page-phone", 390, "light")):
            context = browser.new_context(
                viewport={"width": width, "height": 844 if width < 500 else 900},
                color_scheme=theme,
                has_touch=width < 500,
            )
            context.add_init_script(f"sessionStorage.setItem('vitlab-token', '{TOKEN}')")
            page = context.new_page()
            page.goto(address)
            page.locator("#about").wait_for()
            if name == "page":
                keep(page, out / "serve-page-empty.png")
            page.locator("#files").set_input_files(drawings / ("boat.jpg" if width < 500 else "bee.jpg"))
            answered(page)
            if theme == "dark":
                page.locator("#files").set_input_files([drawings / f"{one}.jpg" for one in ("boat", "cat", "dog")])
                page.locator("#progress[hidden]").wait_for(state="attached")
                answered(page)
                view(page, "heads")
                slide(page, "layer", 10)
                page.evaluate("document.activeElement.blur(); scrollTo({ top: 0, behavior: 'instant' })")
            keep(page, out / f"serve-{name}.png")
            context.close()
    assert {f"serve-{name}.png" for name in ("page", "page-dark", "page-phone", "page-empty")} <= {
        p.name for p in out.iterdir()
    }
