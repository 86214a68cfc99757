"""Notebooks → self-contained HTML: one page a notebook and an index with the verdicts.

    python -m decodebench report --profile quick --out reports

Pages need no network, fold their code, and read in light, dark, on paper and on a phone. Figures are
written as SVG and PNG as well, tables as CSV.
"""

from __future__ import annotations

import argparse
import base64
import html
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from decodebench.models.load import load_model
from decodebench.show.look import DARK_INKS
from decodebench.show.notebooks import (
    ONE_MODEL,
    Page,
    ReportError,
    _chosen,
    _code_cells,
    _facts,
    _parameters,
    _read,
    _tagged,
    anonymous,
    execute,
    parameter_names,
)

TEMPLATES = Path(__file__).parent / "templates"


def build(
    out: str | Path = "reports",
    *,
    profile: str = "quick",
    model: str | Path | None = None,
    only: Sequence[str] = (),
    parameters: Mapping[str, object] | None = None,
    progress: bool | None = None,
) -> list[Page]:
    """Execute the notebooks and write their pages, the index, figures and tables to ``out``.

    ``profile``: a section of notebooks/profiles.toml. ``model``: a model name or config path for the notebooks
    about one model (``ONE_MODEL``); the others are left out. ``only``: beginnings of notebook names ("03").
    ``parameters``: values for every notebook that has a parameter of that name. A notebook that fails
    becomes a page that ends in its error, and the others go on. Raises ``ReportError``.
    """
    from tqdm import tqdm

    paths = _chosen(only, profile)
    notebooks = {path: _read(path) for path in paths}
    if model is not None:
        notebooks = {
            path: notebook for path, notebook in notebooks.items() if path.stem.startswith(ONE_MODEL)
        }
    # a config is named relative to where the kernel runs, so that no machine's folders reach the page
    folder_of_model = None
    if model is not None and Path(model).exists():
        config = Path(model).resolve()
        folder_of_model, model = config.parent.parent, f"{config.parent.name}/{config.name}"
    out = Path(out)
    try:
        for folder in ("figures", "tables"):
            (out / folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(f"{out}: cannot write a report there ({error.strerror or error})") from error
    pages = []
    count = sum(len(_code_cells(nb)) for nb in notebooks.values())
    hidden = None if progress is None else not progress
    with tqdm(total=count, unit="cell", disable=hidden, leave=False) as bar:
        for path, notebook in notebooks.items():
            bar.set_description_str(path.stem)
            given = _parameters(path, notebook, profile, model) | {
                k: v for k, v in (parameters or {}).items() if k in parameter_names(notebook)
            }
            pages.append(execute(path, given, notebook=notebook, folder=folder_of_model, on_cell=bar.update))
    for i, page in enumerate(pages):
        near = [pages[j].file if 0 <= j < len(pages) else None for j in (i - 1, i + 1)]
        _write_page(page, out, *near, profile=profile)
    _write_index(pages, out, profile, model)
    return pages


# -- notebooks and their parameters ---------------------------------------------------------------


# -- pages -----------------------------------------------------------------------------------------


def _write_page(page: Page, out: Path, previous: str | None, following: str | None, profile: str) -> None:
    import jinja2
    from nbconvert import HTMLExporter

    for fact in _facts(page.notebook, "chart"):
        stem = out / "figures" / f"{page.stem}--{fact['name']}"
        _anonymous_write(stem.with_suffix(".svg"), fact["data"]["image/svg+xml"])
        stem.with_suffix(".png").write_bytes(base64.b64decode(fact["data"]["image/png"]))
        page.picture = page.picture or _picture(fact["data"]["image/svg+xml"], "")
    for fact in _facts(page.notebook, "table"):
        _anonymous_write(out / "tables" / f"{page.stem}--{fact['name']}.csv", fact["data"]["text/csv"])
    loader = jinja2.FileSystemLoader(TEMPLATES)
    exporter = HTMLExporter(
        template_name="base",
        template_file="notebook.html.j2",
        extra_loaders=[loader],
        exclude_anchor_links=True,
    )
    exporter.environment.globals |= {"render": lambda output: _render(output), "label": _label}
    resources = {
        "page": {
            "title": html.escape(page.title),
            "verdicts": page.verdicts,
            "previous": previous,
            "next": following,
            "css": _css(),
            "footer": f"{page.stem} · {profile} profile · executed in {page.seconds:.0f} s",
        }
    }
    text, _ = exporter.from_notebook_node(page.notebook, resources)
    _anonymous_write(out / page.file, text)


def _write_index(pages: Sequence[Page], out: Path, profile: str, model) -> None:
    import jinja2

    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True)
    facts = next((f["facts"] for page in pages for f in _facts(page.notebook, "provenance")), {})
    shown = [f"{key} {facts[key]}" for key in ("decodebench", "commit", "torch", "python") if key in facts]
    where = (
        f"Made {facts.get('date', '')} on {facts.get('device', 'a CPU')}, {facts.get('cores', '?')} cores; "
    )
    text = environment.get_template("index.html.j2").render(
        heading="decodebench report" + (f": {Path(model).stem}" if model is not None else ""),
        pages=pages,
        css=_css(),
        footer=f"{where}{', '.join(shown)}; {profile} profile.",
    )
    _anonymous_write(out / "index.html", text)


def _render(output) -> str:
    """One output as HTML: charts in both inks, tables with their CSV; verdicts were lifted to the top."""
    fact = output.get("metadata", {}).get("decodebench", {})
    data = output.get("data", {})
    if output.output_type == "error":
        lines = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(output.traceback))
        return f'<div class="text error"><pre>{html.escape(lines)}</pre></div>'
    if output.output_type == "stream":
        # progress bars and warnings are for whoever runs the notebook
        return (
            ""
            if output.name == "stderr"
            else f'<div class="text"><pre>{html.escape(output.text)}</pre></div>'
        )
    if fact.get("role") == "verdict":
        return ""
    if "image/svg+xml" in data:
        caption = f"<figcaption>{html.escape(fact['caption'])}</figcaption>" if fact.get("caption") else ""
        picture = _picture(data["image/svg+xml"], fact.get("alt", ""))
        return f'<figure><div class="scroll">{picture}</div>{caption}</figure>'
    if "text/html" in data:
        link = ""
        if "text/csv" in data:
            encoded = base64.b64encode(data["text/csv"].encode()).decode()
            name = html.escape(fact.get("name", "table"))
            link = f'<a download="{name}.csv" href="data:text/csv;base64,{encoded}">CSV</a>'
        return f'<div class="table">{data["text/html"]}{link}</div>'
    if "image/png" in data:
        return f'<figure><img alt="" src="data:image/png;base64,{data["image/png"].strip()}"></figure>'
    return (
        f'<div class="text"><pre>{html.escape(data["text/plain"])}</pre></div>'
        if "text/plain" in data
        else ""
    )


def _picture(svg: str, alt: str) -> str:
    """An image that follows the page between light and dark, and is always light on paper."""
    svg = svg[svg.index("<svg") :]
    dark = svg
    for light, ink in DARK_INKS.items():
        dark = dark.replace(light, ink)
    light_uri, dark_uri = (
        f"data:image/svg+xml;base64,{base64.b64encode(s.encode()).decode()}" for s in (svg, dark)
    )
    return (
        f'<picture><source media="screen and (prefers-color-scheme: dark)" srcset="{dark_uri}">'
        f'<img alt="{html.escape(alt)}" src="{light_uri}"></picture>'
    )


def _label(cell) -> str:
    if _tagged(cell, "parameters"):
        return "Parameters"
    return "Parameters of this run" if _tagged(cell, "injected-parameters") else "Code"


def _css() -> str:
    from pygments.formatters import HtmlFormatter

    light = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    bare = ".highlight { background: none !important; }"
    style = (TEMPLATES / "style.css").read_text()
    return f"{style}{light}\n@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}\n{bare}"


def _anonymous_write(path: Path, text: str) -> None:
    path.write_text(anonymous(text))


# -- command ---------------------------------------------------------------------------------------


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", default="quick", help="quick (minutes) or full")
    parser.add_argument("--model", help="the story of one model: a name, or the path of a config.json")
    parser.add_argument(
        "--out", type=Path, default=Path("reports"), help="folder for the pages (default: reports)"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="NN", help="notebooks whose names begin so"
    )


def report_command(arguments: argparse.Namespace) -> int:
    start = time.perf_counter()
    if arguments.model:
        load_model(arguments.model)  # a name nobody knows is refused before any page is made
    pages = build(arguments.out, profile=arguments.profile, model=arguments.model, only=arguments.only)
    for page in pages:
        print(f"{page.stem:28s} {page.seconds:5.0f} s  {'; '.join(v['text'] for v in page.verdicts)}")
    print(f"{arguments.out / 'index.html'} ({time.perf_counter() - start:.0f} s)")
    failed = [page for page in pages if page.error]
    if failed:
        raise ReportError(
            f"{failed[0].stem} stopped at an error ({anonymous(failed[0].error)}); its page shows where"
        )
    return 0
