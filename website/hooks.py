"""Hooks of the site: pages made from the specs, docs/zoo.json and the public names; links that leave docs/."""

import base64
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
from revzoo import errors, runtime
from revzoo.format import format_bytes, format_macs
from revzoo.metric import METRICS
from revzoo.spec import ImageInput, Spec, list_models, load_spec

HERE = Path(__file__).parent
ROOT = HERE.parent
ASSETS = ("fits.js", "timeline.js", "table.js", "iframe-worker.js", "site.css", "logo.svg")
TEXTS = {f"{name.upper()}.md": f"{name}.md" for name in ("contributing", "security", "changelog")}
# Pages of the API: a title, and the packages whose public names stand there; names of other packages are in `measure`.
API = {
    "plan": ("Plans", {"any_plan", "graph", "planning"}),
    "in_place": ("Networks in place", {"in_place"}),
    "convert": ("Convert and export", {"conversion"}),
    "measure": ("Count, compare and verify", {"analysis"}),
    "models": ("Models of the zoo", {"data", "model", "spec"}),
    "runtime": ("revzoo.runtime", {"runtime"}),
    "errors": ("revzoo.errors", {"errors"}),
}
LINE = 80  # characters of code that a page shows
_CODE = re.compile(r"^```(?:bash|python)\n.*?^```$", re.MULTILINE | re.DOTALL)
_PICTURE = re.compile(r'<img [^>]*src="([^"]+)"[^>]*>')
_EXAMPLE = re.compile(r"\]\(\.\./examples/(\w+)\.ipynb\)")
_COLOR = re.compile(r"\x1b\[[\d;]*m")  # of a terminal
SCRIPTS = {"fits.md": ("data.js", "timeline.js", "fits.js"), "zoo.md": ("table.js",)}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give every page the style, and the version."""
    config.extra_css.append("assets/site.css")
    config.copyright = f"revzoo {revzoo.__version__} · Apache-2.0"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what does not stand in docs/."""
    table = json.loads((ROOT / "docs/zoo.json").read_text(encoding="utf-8"))

    def add(uri: str, **source: Any) -> None:
        file = File.generated(config, uri, **source)
        file.inclusion = InclusionLevel.INCLUDED
        if uri in files.src_uris:
            files.remove(files.src_uris[uri])
        files.append(file)

    for source, page in TEXTS.items():
        add(page, content=_move_to_docs((ROOT / source).read_text(encoding="utf-8")))
    for asset in ASSETS:
        add(f"assets/{asset}", abs_src_path=str(HERE / asset))
    for picture in sorted((ROOT / "benchmarks/results").rglob("*.png")):
        add(str(picture.relative_to(ROOT)), abs_src_path=str(picture))
    add("assets/data.js", content=_write_data(table))
    for page, content in _write_api().items():
        add(f"api/{page}.md", content=content)
    for notebook in sorted((ROOT / "examples").glob("*.ipynb")):
        text, pictures = _write_notebook(notebook)
        add(f"examples/{notebook.stem}.md", content=text)
        for name, content in pictures.items():
            add(f"examples/{name}", content=content)
    add("zoo.md", content=_write_zoo(table))
    for name in list_models():
        add(f"models/{name}.md", content=_write_model(load_spec(name), table[name]))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to pictures, notebooks and texts outside of docs/ to their copies in the site, and let code fit its page."""
    markdown = _EXAMPLE.sub("](examples/\\1.md)", markdown.replace("](../benchmarks/", "](benchmarks/"))
    for source, name in TEXTS.items():
        markdown = markdown.replace(f"](../{source}", f"]({name}")
    return _CODE.sub(lambda block: _lift_comments(block[0]), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link pictures to their full size, and add the scripts of the page alone."""
    html = _PICTURE.sub(r'<a class="picture" href="\1">\g<0></a>', html)
    scripts = SCRIPTS.get(page.file.src_uri, ())
    return html + "".join(f'<script src="assets/{name}"></script>\n' for name in scripts)


def _move_to_docs(text: str) -> str:
    """Return a text of the root with links as from docs/; those to files that are no page become the file's name."""
    text = re.sub(r"\]\(docs/", "](", text)
    for source, page in TEXTS.items():
        text = text.replace(f"]({source}", f"]({page}")
    return re.sub(r"\[([^]]+)\]\((?!https?:|#|\w+\.md|\w+\.png|benchmarks/results/)[^)]*\)", r"\1", text)


def _lift_comments(block: str) -> str:
    """Return a block of code that is too wide for a page with each comment above its line."""
    if max(map(len, block.splitlines())) <= LINE:
        return block
    return re.sub(r"^( *)(\S.*?) {2,}(# .*)$", r"\1\3\n\1\2", block, flags=re.MULTILINE)


def _write_data(table: dict[str, Any]) -> str:
    """Return what "What fits my card?" computes with, of the networks that are counted, and the names of the others."""
    facts = ("card", "input", "parameters", "dtype")
    ordinary = json.loads((ROOT / "docs/fits.json").read_text(encoding="utf-8"))
    cards = {
        name: {fact: row[fact] for fact in facts if fact in row} for name, row in (ordinary | table).items() if row.get("card")
    }
    data = {"ZOO": cards, "ORDINARY": list(ordinary), "UNCOUNTED": [name for name in table if name not in cards]}
    return "".join(f"const {name} = {json.dumps(value)};\n" for name, value in data.items())


def _write_api() -> dict[str, str]:
    """Return the pages of the API: every public name with its docstring and its source."""
    texts = {page: f"# {title}\n\n" for page, (title, _) in API.items()}
    failures = [name for name in vars(errors) if name.endswith("Error")]
    names = {revzoo: revzoo.__all__, runtime: runtime.__all__, errors: failures}
    for owner, name in [(owner, name) for owner, own in names.items() for name in sorted(own, key=str.lower)]:
        home = getattr(owner, name).__module__
        package = (home if owner is revzoo else owner.__name__).split(".")[1]
        page = next((page for page, (_, packages) in API.items() if package in packages), "measure")
        texts[page] += f"::: {home}.{name}\n\n"
    return texts


def _write_notebook(notebook: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as a page, and the pictures of its outputs by their names."""
    parts, pictures = [], {}
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace("](../docs/", "](../"))
            continue
        language = "bash" if source.startswith("%%bash") else "python"
        source = source.removeprefix("%%bash\n")
        parts.append(f"```{language}\n{source}\n```")
        printed = "".join(text for output in cell["outputs"] for text in output.get("text", ()))
        for data in (output.get("data", {}) for output in cell["outputs"]):
            if "image/png" in data:
                name = f"{notebook.stem}_{len(pictures)}.png"
                pictures[name] = base64.b64decode("".join(data["image/png"]))
                printed += f"\n![]({name})"
            else:
                printed += "".join(data.get("text/plain", ()))
        text, _, picture = _COLOR.sub("", printed).partition("\n![]")
        parts += [f"```text\n{text.rstrip()}\n```"] * bool(text.strip()) + [f"![]{picture}"] * bool(picture)
    return "\n\n".join(parts), pictures


def _write_zoo(table: dict[str, Any]) -> str:
    families = sorted({row["family"] for row in table.values()})
    options = "".join(f"<option>{family}</option>" for family in families)
    heads = ("model", "family", "input", "parameters", "MACs", "stored", "inverted", "twin", "weights")
    rows = "".join(f"<tr>{''.join(_list_cells(name, row))}</tr>\n" for name, row in table.items())
    return f"""---
hide: [toc]
---
# The zoo

Click a heading to sort. MACs are the multiply-adds of a forward of one example. Stored, inverted and twin are the activations
at the peak of a training step in float32, for 32 images or 8 texts: with everything kept, with reversible steps computed
again in backward, and of the ordinary network. [What fits my card?](fits.md) counts weights,
gradients and optimizer state, too.

<form id="filter" class="controls">
<label>name <input name="name" type="search"></label>
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
    yield f'<td><a href="models/{name}.html">{name}</a></td><td>{row["family"]}</td><td>{row["input"]}</td>'
    yield f'<td data-value="{row["parameters"]}">{row["parameters"]:,}</td>'
    yield f'<td data-value="{row["macs"]}">{format_macs(row["macs"])}</td>'
    for size in (stored, inverted, twin):
        yield f'<td data-value="{size or 0}">{"" if size is None else format_bytes(size)}</td>'
    yield f"<td>{_describe_weights(row)}</td>"


def _describe_weights(row: dict[str, Any]) -> str:
    metrics = row["weights"] or {}
    return ", ".join(f"{metric.label} {metric.format(metrics[metric.key])}" for metric in METRICS if metric.key in metrics)


def _write_model(spec: Spec, row: dict[str, Any]) -> str:
    sources = "".join(f"- {source['of']}: {source['cite']}\n" for source in spec.sources)
    head, *facts = (f"| {name} | {value} |" for name, value in _list_facts(row).items())
    table = "\n".join((head, "|---|---|", *facts))
    fits = f'<a href="../fits.html?model={spec.name}">What fits my card?</a> computes all of a step.' if row.get("card") else ""
    file = next((ROOT / "specs/models").rglob(f"{spec.name}.yaml"))
    return f"""# {spec.name}

<div class="scroll">{draw_network(spec)}</div>

{table}

Activations are those at the peak of a training step in float32, for {row["batch_size"]} examples. {fits}

```bash
{chr(10).join(_list_commands(spec, row))}
```

## Sources

{sources}
## Spec

```yaml
{file.read_text(encoding="utf-8")}```

[All models](../zoo.md)
"""


def _list_facts(row: dict[str, Any]) -> dict[str, str]:
    sizes = row["activation_bytes"]
    twin, twin_bytes = row["twin"], row["twin_activation_bytes"]
    facts = {"family": row["family"], "input": row["input"], "parameters": f"{row['parameters']:,}"}
    facts["a forward of one example"] = format_macs(row["macs"])
    facts |= {f"activations, mode `{mode}`": format_bytes(sizes[mode]) for mode in ("store", "recompute", "invert")}
    if twin is not None:
        counted = "" if twin_bytes is None else f", {format_bytes(twin_bytes)} of activations"
        facts["ordinary network"] = f"{twin['library']} {twin['name']}{counted}"
    if row["weights"] is not None:
        facts["weights"] = f"shipped, {_describe_weights(row)}"
    return facts


def _list_commands(spec: Spec, row: dict[str, Any]) -> Iterator[str]:
    """Yield what can be typed for a model."""
    yield f"revzoo show {spec.name}"
    yield f"revzoo verify {spec.name}"
    if row.get("card"):
        yield f"revzoo plan {spec.name} --budget 8GiB --meta"
    if isinstance(spec.input, ImageInput):
        yield f"revzoo train images model={spec.name} data.root=PHOTOS"
    elif spec.head.type == "sequence_classification":
        yield f"revzoo train texts model={spec.name} data.root=TABLE.csv"
    if row["weights"] is not None:
        yield f"revzoo eval {spec.name}"


def draw_network(spec: Spec) -> str:
    """Return the network as a picture: stem, stages with their blocks, fuse and head, and two streams or one tensor between."""
    boxes = [("stem", spec.stem.type)]
    boxes += [
        (f"stage {i}", f"{stage.depth} block{'s' * (stage.depth > 1)} of {stage.width}") for i, stage in enumerate(spec.stages)
    ]
    boxes += [("fuse", spec.fuse.type), ("head", spec.head.type)]
    parts, last, x = [], len(boxes) - 2, 10.0
    for i, (title, text) in enumerate(boxes):
        box = max(90.0, 6.8 * len(text) + 14)  # characters of 12 px are 6.8 px wide
        kind = "stage" if title.startswith("stage") else "node"
        if i < len(boxes) - 1:
            ys = (40, 60) if i < last and spec.split.type != "none" else (50,)
            parts += [f'<line x1="{x + box:g}" x2="{x + box + 20:g}" y1="{y}" y2="{y}"/>' for y in ys]
        parts.append(f'<rect class="{kind}" x="{x:g}" y="20" width="{box:g}" height="60" rx="6"/>')
        parts += [f'<text x="{x + box / 2:g}" y="{y}">{escape(line)}</text>' for y, line in ((46, title), (64, text))]
        x += box + 20
    label = escape(f"{spec.name}: " + ", ".join(" ".join(box) for box in boxes))
    size = f'viewBox="0 0 {x:g} 100" width="{x:g}" style="min-width: min({x:g}px, 34rem)"'
    return f'<svg class="network" {size} role="img" aria-label="{label}">{"".join(parts)}</svg>'
