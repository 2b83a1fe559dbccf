"""Hooks of the site: pages made from the README, the specs, docs/zoo.json and the public names; links that leave docs/."""

import json
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

import revzoo
from revzoo.format import format_bytes, format_flops
from revzoo.spec import Spec, list_models, load_spec

HERE = Path(__file__).parent
ROOT = HERE.parent
ASSETS = ("fits.js", "timeline.js", "table.js", "site.css")
TEXTS = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
SCRIPTS = {"fits.md": ("data.js", "timeline.js", "fits.js"), "zoo.md": ("table.js",)}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give every page the style."""
    config.extra_css.append("assets/site.css")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what does not stand in docs/."""
    table = json.loads((ROOT / "docs/zoo.json").read_text())

    def add(uri: str, **source: Any) -> None:
        file = File.generated(config, uri, **source)
        file.inclusion = InclusionLevel.INCLUDED
        if uri in files.src_uris:
            files.remove(files.src_uris[uri])
        files.append(file)

    for source, page in TEXTS.items():
        add(page, content=_move_to_docs((ROOT / source).read_text()))
    for asset in ASSETS:
        add(f"assets/{asset}", abs_src_path=str(HERE / asset))
    for picture in sorted((ROOT / "benchmarks/results").rglob("*.png")):
        add(str(picture.relative_to(ROOT)), abs_src_path=str(picture))
    add("assets/data.js", content=f"const ZOO = {json.dumps(_list_cards(table))};\n")
    add("api.md", content=_write_api())
    add("zoo.md", content=_write_zoo(table))
    for name in list_models():
        add(f"models/{name}.md", content=_write_model(load_spec(name), table[name]))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to pictures outside of docs/ to their copies in the site."""
    return markdown.replace("](../benchmarks/", "](benchmarks/")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Add the scripts of a page; those of others are not loaded."""
    scripts = SCRIPTS.get(page.file.src_uri, ())
    return html + "".join(f'<script src="assets/{name}"></script>\n' for name in scripts)


def _move_to_docs(text: str) -> str:
    """Return a text of the root with links as from docs/; those to files that are no page become the file's name."""
    text = re.sub(r"\]\(docs/", "](", text)
    for source, page in TEXTS.items():
        text = text.replace(f"]({source}", f"]({page}")
    return re.sub(r"\[([^]]+)\]\((?!https?:|#|\w+\.md|\w+\.png|benchmarks/results/)[^)]*\)", r"\1", text)


def _list_cards(table: dict[str, Any]) -> dict[str, Any]:
    """Return what the page computes with, of the models that are counted."""
    facts = ("card", "input", "parameters")
    return {name: {fact: row[fact] for fact in facts} for name, row in table.items() if row.get("card")}


def _write_api() -> str:
    intro = "# API\n\nThe public names of `revzoo`. Each is imported as `revzoo.NAME`.\n\n"
    return intro + "".join(f"::: {revzoo._HOMES[name]}.{name}\n\n" for name in sorted(revzoo.__all__, key=str.lower))


def _write_zoo(table: dict[str, Any]) -> str:
    families = sorted({row["family"] for row in table.values()})
    options = "".join(f"<option>{family}</option>" for family in families)
    heads = ("model", "family", "input", "parameters", "FLOPs", "stored", "inverted", "twin", "weights")
    rows = "".join(f"<tr>{''.join(_list_cells(name, row))}</tr>\n" for name, row in table.items())
    return f"""---
hide: [toc]
---
# The zoo

Click a heading to sort. FLOPs are those of a forward of one example, where a multiply-add counts once. Memory is the peak of
all activations in a training step in float32, for 32 images or 8 texts; [What fits my card?](fits.md) counts everything.

<form id="filter" class="controls">
<label>family <select name="family"><option value="">all</option>{options}</select></label>
<label>parameters, at most, millions <input name="parameters" type="number" min="0"></label>
<label>inverted, at most, GiB <input name="memory" type="number" min="0" step="any"></label>
<label><input name="weights" type="checkbox"> with weights</label>
<output></output>
</form>

<table id="zoo"><thead><tr>{"".join(f'<th><button type="button">{head}</button></th>' for head in heads)}</tr></thead>
<tbody>
{rows}</tbody></table>
"""


def _list_cells(name: str, row: dict[str, Any]) -> Iterator[str]:
    stored, inverted = (row["activation_bytes"][mode] for mode in ("store", "invert"))
    twin = row["twin_activation_bytes"]
    weights = "" if row["weights"] is None else ", ".join(f"{key} {value:g}" for key, value in row["weights"].items())
    yield f'<td><a href="models/{name}.html">{name}</a></td><td>{row["family"]}</td><td>{row["input"]}</td>'
    yield f'<td data-value="{row["parameters"]}">{row["parameters"]:,}</td>'
    yield f'<td data-value="{row["flops"]}">{format_flops(row["flops"])}</td>'
    for size in (stored, inverted, twin):
        yield f'<td data-value="{size or 0}">{"" if size is None else format_bytes(size)}</td>'
    yield f"<td>{weights}</td>"


def _write_model(spec: Spec, row: dict[str, Any]) -> str:
    sources = "".join(f"- {source['of']}: {source['cite']}\n" for source in spec.sources)
    fits = "[What fits my card?](../fits.md) counts it on your card.\n\n" if row.get("card") else ""
    peaks = ", ".join(f"{format_bytes(size)} {mode}" for mode, size in row["activation_bytes"].items())
    file = next((ROOT / "specs/models").rglob(f"{spec.name}.yaml"))
    return f"""# {spec.name}

{draw_network(spec)}

Family {spec.family}, input {row["input"]}, {row["parameters"]:,} parameters, {format_flops(row["flops"])} a forward of one
example.
Activations at the peak of a training step, batch of {row["batch_size"]}, float32: {peaks}. {fits}

```bash
revzoo show {spec.name}
revzoo verify {spec.name}
revzoo plan {spec.name} --budget 8GiB
```

## Sources

{sources}
## Spec

```yaml
{file.read_text()}```

[All models](../zoo.md)
"""


def draw_network(spec: Spec) -> str:
    """Return the network as a picture: stem, stages with their blocks, fuse and head, two streams between them."""
    boxes = [("stem", spec.stem.type)]
    boxes += [(f"stage {i}", f"{stage.depth} x {stage.width}") for i, stage in enumerate(spec.stages)]
    boxes += [("fuse", spec.fuse.type), ("head", spec.head.type)]
    parts, last = [], len(boxes) - 2
    for i, (title, text) in enumerate(boxes):
        x = 10 + 130 * i
        kind = "stage" if title.startswith("stage") else "node"
        if i < len(boxes) - 1:
            ys = (40, 60) if i < last else (50,)
            parts += [f'<line x1="{x + 110}" x2="{x + 130}" y1="{y}" y2="{y}"/>' for y in ys]
        parts.append(f'<rect class="{kind}" x="{x}" y="20" width="110" height="60" rx="6"/>')
        parts += [f'<text x="{x + 55}" y="{y}">{escape(line)}</text>' for y, line in ((46, title), (64, text))]
    width = 130 * len(boxes)
    label = escape(f"{spec.name}: " + ", ".join(" ".join(box) for box in boxes))
    size = f'viewBox="0 0 {width} 100" width="{width}"'
    return f'<svg class="network" {size} role="img" aria-label="{label}">{"".join(parts)}</svg>'
