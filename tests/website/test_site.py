"""The site as a reader has it: files without a server and without network, their links, and its pages in a browser."""

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import pytest
import timm
import torch

import revzoo
from revzoo.analysis.dry_run import compute_usual_loss
from revzoo.format import format_bytes
from revzoo.in_place.ways import list_ways

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow  # building takes half a minute
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Page(HTMLParser):
    """What a page links to, what it loads, and what can be linked to in it."""

    def __init__(self, file: Path):
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors |= {values[key] for key in ("id", "name") if values.get(key)}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag in ("script", "img", "iframe", "source") and values.get("src"):
            self.loads.append(values["src"])
        if tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload"):
            self.loads.append(values["href"])


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {file: Page(file) for file in sorted(site.rglob("*.html")) if file.name != "404.html"}


def test_every_link_leads_to_a_file_and_a_place_in_it(site, pages):
    assert len(pages) > 80
    broken = []
    for file, page in pages.items():
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if not target.is_file() or (parts.fragment and parts.fragment not in pages[target].anchors | {"__top"}):
                broken.append(f"{file.relative_to(site)}: {link}")
    assert broken == []


def test_nothing_is_loaded_from_the_network(site, pages):
    loads = {load for page in pages.values() for load in page.loads}
    assert [load for load in loads if urlsplit(load).netloc or load.startswith("/")] == []
    styles = "".join(file.read_text(encoding="utf-8") for file in site.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//[^)'\"]*", styles) == []


def test_every_model_has_a_page_and_every_public_name_an_entry(site, pages):
    assert {file.stem for file in (site / "models").glob("*.html")} == set(revzoo.list_models())
    anchors = {anchor for file in (site / "api").glob("*.html") for anchor in pages[file].anchors}
    assert {name for name in revzoo.__all__ if not any(anchor.endswith(f".{name}") for anchor in anchors)} == set()


def test_search_knows_the_words_that_readers_type(site):
    text = (site / "search/search_index.js").read_text(encoding="utf-8").lower()
    words = ("oom", "out of memory", "reproduce", "lightning", "citation", "quickstart")
    assert [word for word in words if word not in text] == []


@pytest.fixture(scope="module")
def browse(site, tmp_path_factory):
    """Return a function that opens a page, lets its scripts run, and returns its body as text."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")

    def browse(page: str) -> str:
        sandbox = ["--no-sandbox"] if os.getuid() == 0 else []
        folder = tmp_path_factory.mktemp("chromium")
        command = [CHROMIUM, "--headless", *sandbox, "--disable-gpu", f"--user-data-dir={folder}", "--dump-dom"]
        address = f"{site.as_uri()}/{page}"
        shown = subprocess.run([*command, "--virtual-time-budget=2000", address], capture_output=True, text=True, timeout=120)
        assert shown.returncode == 0, shown.stderr
        return shown.stdout

    return browse


@pytest.mark.parametrize(("card", "batch", "optimizer"), [(8, 64, "AdamW"), (192, 3, "SGD with momentum")])
def test_the_page_computes_what_the_lines_say(browse, site, card, batch, optimizer):
    data = json.loads((site / "assets/data.js").read_text().splitlines()[0].removeprefix("const ZOO = ").rstrip(";"))
    name = "rev_vit_s"
    shown = browse(f"fits.html#model={name}&batch={batch}&dtype=bfloat16&optimizer={optimizer.replace(' ', '+')}&card={card}")
    rows = re.findall(r"</i>([a-z ]+)</td><td>(.*?)</td>\s*<td class=\"(\w+)\">", shown)
    peaks = {}
    for method in data[name]["card"]["methods"]:
        lines = method["bfloat16"]
        alive = [fixed + each * batch for fixed, each in zip(lines["fixed"], lines["each"], strict=True)]
        kind = "twin_optimizers" if method["name"] == "twin" else "optimizers"
        state, update = data[name]["card"][kind][optimizer]
        peaks[method["name"]] = max(*alive, alive[-1] + update) + state
    expected = {"stored": peaks["store"], "checkpointed twin": peaks["twin"], "inverted": peaks["invert"]}
    fits = {label: "fits" if size <= 0.9e9 * card else "exceeds" for label, size in expected.items()}
    assert [row for row in rows if row[0] in expected] == [
        (label, format_bytes(size), fits[label]) for label, size in expected.items()
    ]
    assert shown.count('<path d="M') >= 4


WELL_KNOWN = json.loads((ROOT / "docs/fits.json").read_text())


@pytest.mark.parametrize("name", WELL_KNOWN)
def test_the_page_answers_for_well_known_networks(browse, name):
    shown = browse(f"fits.html#model={quote(name)}&batch=64&card=24")
    assert f"{name}: " in shown
    _, *methods = (method["name"] for method in WELL_KNOWN[name]["card"]["methods"] if not method["name"].startswith("plan"))
    assert re.findall(r"</i>([a-z0-9 ,]+)<", shown) == ["stored", *methods, "planned"]


@pytest.mark.parametrize("batch", [40, 57])  # 57 is cut into seven tiles of eight examples and one of one
def test_the_page_counts_steps_in_tiles(browse, batch):
    name, row = "ViT-B/16", "random signs, 8 tiles"
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch16_224")
        images = torch.zeros(batch, 3, 224, 224)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    with list_ways(model, images[:1])[row](model):
        counted = revzoo.measure_memory(model, images, sgd, loss=compute_usual_loss).peak_bytes
    shown = browse(f"fits.html#model={quote(name)}&batch={batch}&optimizer=SGD")
    assert re.findall(rf"</i>{row}</td><td>(.*?)</td>", shown) == [format_bytes(counted)]


def test_language_models_have_a_loss_in_chunks():
    table = WELL_KNOWN | json.loads((ROOT / "docs/zoo.json").read_text())
    own, foreign = ["rev_gpt2_small", "rev_llama_1b", "rev_roberta_base_mlm"], ["GPT-2", "Qwen3-8B"]
    for names, method in ((own, "invert"), (foreign, "random signs"), (foreign, "checkpointed")):
        for name in names:
            growths = {each["name"]: max(each["bfloat16"]["each"]) for each in table[name]["card"]["methods"]}
            assert growths[f"{method}, chunked loss"] < 0.7 * growths[method]


def test_the_page_says_which_models_are_not_counted(browse, site):
    table = json.loads((ROOT / "docs/zoo.json").read_text())
    uncounted = [name for name, row in table.items() if not row.get("card")]
    shown = browse("fits.html?model=revnet_56")
    assert shown.count("Not counted: ") == bool(uncounted)
    assert all(name in shown.split("Not counted: ")[1] for name in uncounted)
    assert "revnet_56: " in shown


def test_a_network_on_one_tensor_is_drawn_with_one_line(site):
    for name, streams in (("layerwise_digits", 1), ("revnet_digits", 2)):
        page = (site / f"models/{name}.html").read_text(encoding="utf-8")
        drawn = page.partition('<svg class="network"')[2].partition("</svg>")[0]
        boxes = drawn.count("<rect ")
        assert boxes >= 5
        assert drawn.count("<line ") == streams * (boxes - 2) + 1  # from the fuse to the head there is one


def test_sections_of_docstrings_are_tables(site):
    api = "".join(file.read_text(encoding="utf-8") for file in (site / "api").glob("*.html"))
    assert not re.findall(r"<p>(?:Args|Raises|Returns):", api)
    assert re.search(r"<strong>Cost:</strong> time of two training steps", api)


def test_a_model_has_picture_facts_sources_and_commands(site):
    page = (site / "models/rev_vit_digits.html").read_text(encoding="utf-8")
    text = re.sub(r"<[^>]+>", "", page)
    assert '<svg class="network"' in page
    assert "302,794" in page.split('<h2 id="sources"')[0]
    commands = re.findall(r"^revzoo \w+ .*rev_vit_digits.*$", text, re.MULTILINE)
    assert [command.split()[1] for command in commands] == ["show", "verify", "plan", "train", "eval"]


def test_the_table_shows_every_model_and_can_be_sorted(browse, site):
    shown = browse("zoo.html")
    assert f"{len(revzoo.list_models())} of {len(revzoo.list_models())} models" in shown
    assert shown.count('<button type="button">') == 9
    table = json.loads((ROOT / "docs/zoo.json").read_text())
    for clicks in (1, 2):  # from the smallest, from the largest
        script = f"<script>for (let i = 0; i < {clicks}; i++) document.querySelectorAll('#zoo th')[3].click()</script>"
        (site / "clicked.html").write_text((site / "zoo.html").read_text(encoding="utf-8") + script, encoding="utf-8")
        names = re.findall(r'<tr><td><a href="models/(\w+)\.html">', browse("clicked.html"))
        assert set(names) == table.keys()
        sizes = [table[name]["parameters"] for name in names]
        assert sizes == sorted(sizes, reverse=clicks == 2)
    (site / "clicked.html").unlink()
