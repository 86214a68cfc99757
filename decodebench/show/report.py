"""Notebooks → self-contained HTML: one page a notebook and an index with the verdicts.

    python -m decodebench report --profile quick --out reports

Pages need no network, fold their code, and read in light, dark, on paper and on a phone. Figures are
written as SVG and PNG as well, tables as CSV.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import os.path
import re
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from decodebench.layout.plan import parse_memory
from decodebench.models.load import load_model
from decodebench.show.look import darkened
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
from decodebench.words import short, some

TEMPLATES = Path(__file__).parent / "templates"


def build(
    out: str | Path = "reports",
    *,
    profile: str = "quick",
    model: str | Path | None = None,
    only: Sequence[str] = (),
    parameters: Mapping[str, object] | None = None,
    progress: bool | None = None,
    single_file: bool = False,
    on_page: Callable[[Page], None] | None = None,
) -> list[Page]:
    """Execute the notebooks and write their pages, the index, figures and tables to ``out``.

    ``profile``: a section of notebooks/profiles.toml. ``model``: a model name or config path for the notebooks
    about one model (``ONE_MODEL``); the others are left out. ``only``: beginnings of notebook names ("03").
    ``parameters``: values for every notebook that has a parameter of that name. ``single_file``: the index
    holds every page, so that the one file can be forwarded alone. ``on_page`` is told of each page as it is
    finished. A notebook that fails becomes a page that ends in its error, and the others go on. Pages that
    an earlier report of other notebooks left in ``out`` are refused: nothing is written over or beside them.
    Raises ``ReportError``.
    """
    from tqdm.auto import tqdm

    paths = _chosen(only, profile)
    notebooks = {path: _read(path) for path in paths}
    if model is not None:
        notebooks = {
            path: notebook for path, notebook in notebooks.items() if path.stem.startswith(ONE_MODEL)
        }
    # a config is named relative to where the kernel runs, so that no machine's folders reach the page
    folder_of_model = None
    if model is not None and os.path.exists(model):
        config = Path(model).resolve()
        folder_of_model, model = config.parent.parent, f"{config.parent.name}/{config.name}"
    out = Path(out)
    _refuse_other_report(out, [path.stem for path in notebooks])
    _refuse_unknown(parameters or {}, notebooks)
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
            if on_page:
                on_page(pages[-1])
    for i, page in enumerate(pages):
        near = [pages[j].file if 0 <= j < len(pages) else None for j in (i - 1, i + 1)]
        _write_page(page, out, *near, profile=profile)
    _write_index(pages, out, profile, model, single_file)
    return pages


def _refuse_other_report(out: Path, stems: Sequence[str]) -> None:
    """Pages of other notebooks in ``out`` would stay behind, with links into the new ones."""
    others = sorted(path.name for path in out.glob("[0-9][0-9]-*.html") if path.stem not in stems)
    if others and (out / "index.html").exists():
        raise ReportError(
            f"{out} holds another report ({some(others)}): give this one a folder of its own, --out FOLDER"
        )


def _refuse_unknown(parameters: Mapping[str, object], notebooks: Mapping[Path, object]) -> None:
    known = sorted({name for notebook in notebooks.values() for name in parameter_names(notebook)})
    for name in parameters:
        if name not in known and name != "contexts":  # --context asks for both names
            raise ReportError(f"no notebook has a parameter {name!r}: there are {', '.join(known)}")


# -- pages -----------------------------------------------------------------------------------------


def _write_page(page: Page, out: Path, previous: str | None, following: str | None, profile: str) -> None:
    import jinja2
    from nbconvert import HTMLExporter

    for fact in _facts(page.notebook, "chart"):
        stem = out / "figures" / f"{page.stem}--{fact['name']}"
        _anonymous_write(stem.with_suffix(".svg"), fact["data"]["image/svg+xml"])
        stem.with_suffix(".png").write_bytes(base64.b64decode(fact["data"]["image/png"]))
        page.picture = page.picture or _thumbnail(fact["data"]["image/png"])
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


def _made_on(pages: Sequence[Page]) -> str:
    """Machine and versions of every page, each said once; pages made elsewhere (a stored study) are named."""
    said: dict[str, list[str]] = {}
    for page in pages:
        for fact in _facts(page.notebook, "provenance"):
            facts = fact["facts"]
            versions = [f"{k} {facts[k]}" for k in ("decodebench", "commit", "torch", "python") if k in facts]
            where = f"{facts.get('device', 'a CPU')}, {facts.get('cores', '?')} cores; {', '.join(versions)}"
            said.setdefault(f"{str(facts.get('date', ''))[:10]} on {where}", []).append(page.stem[:2])
    most = max(said, key=lambda text: len(said[text]), default="")
    lines = [f"Made {most}."] if most else []
    lines += [f"{', '.join(stems)}: measured {text}." for text, stems in said.items() if text != most]
    return " ".join(lines)


def _write_index(pages: Sequence[Page], out: Path, profile: str, model, single_file: bool) -> None:
    import jinja2

    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True)
    text = environment.get_template("index.html.j2").render(
        heading="decodebench report" + (f": {short(model)}" if model is not None else ""),
        pages=pages,
        css=_css(),
        footer=f"{_made_on(pages)} {profile} profile.",
        bodies={page.stem: _body(out / page.file) for page in pages} if single_file else {},
    )
    _anonymous_write(out / "index.html", text)


def _body(path: Path) -> str:
    """What stands between a page's ``<main>`` and ``</main>``, its headings' ids made its own."""
    text = path.read_text()
    text = text[text.index("<main>") + len("<main>") : text.rindex("</main>")]
    return re.sub(r'(<h\d[^>]*?) id="[^"]*"', r"\1", text)


def _render(output) -> str:
    """One output as HTML: charts in both inks, tables with their CSV; verdicts were lifted to the top."""
    fact = output.get("metadata", {}).get("decodebench", {})
    data = output.get("data", {})
    if output.output_type == "error":
        lines = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(output.traceback))
        return f'<div class="text error"><pre>{html.escape(lines)}</pre></div>'
    if re.search(r"\d+%\|", data.get("text/plain", "")):
        return ""  # a progress bar, as a notebook shows it
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
    dark = darkened(svg)
    light_uri, dark_uri = (
        f"data:image/svg+xml;base64,{base64.b64encode(s.encode()).decode()}" for s in (svg, dark)
    )
    return (
        f'<picture><source media="screen and (prefers-color-scheme: dark)" srcset="{dark_uri}">'
        f'<img alt="{html.escape(alt)}" src="{light_uri}"></picture>'
    )


def _thumbnail(png: str) -> str:
    """A small picture for the index, where every drawing a second time would make the page too large."""
    from PIL import Image

    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    image = image.resize((560, round(image.height * 560 / image.width)), Image.Resampling.LANCZOS)
    small = io.BytesIO()
    image.quantize(48).save(small, "png", optimize=True)
    encoded = base64.b64encode(small.getvalue()).decode()
    return f'<img class="thumbnail" alt="" src="data:image/png;base64,{encoded}">'


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
    parser.add_argument("--memory", help="KV cache of every notebook that plans for one, such as 80GiB")
    parser.add_argument(
        "--context",
        type=int,
        metavar="TOKENS",
        help="tokens a request; notebooks over lengths take a 64th, a 16th, a quarter and all of it",
    )
    parser.add_argument(
        "-p",
        "--parameter",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any parameter of the notebooks, as TOML: -p requests=4 -p 'models=[\"gemma-3-1b\"]'; repeatable",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for the pages (default: reports; with --model reports/ and the model's name)",
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="NN", help="notebooks whose names begin so"
    )
    parser.add_argument(
        "--single-file", action="store_true", help="one index.html with every page in it, to forward alone"
    )


def parameters_of(arguments: argparse.Namespace) -> dict[str, object]:
    """What ``-p``, ``--memory`` and ``--context`` say, as parameters of notebooks."""
    given: dict[str, object] = {}
    if arguments.memory is not None:
        parse_memory(arguments.memory)
        given["memory"] = arguments.memory
    if arguments.context is not None:
        if arguments.context < 1:
            raise ReportError(f"--context {arguments.context}: at least one token is needed")
        given["context"] = arguments.context
        given["contexts"] = sorted({max(1, arguments.context // part) for part in (64, 16, 4, 1)})
    for text in arguments.parameter:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ReportError(f"-p {text}: NAME=VALUE is expected, such as -p requests=4")
        try:
            given[name] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            given[name] = value  # a text without quotes
    return given


def report_command(arguments: argparse.Namespace) -> int:
    """Make the pages, a line on each as it is finished; 0, or 2 with the first that stopped at an error."""
    start = time.perf_counter()
    out = arguments.out or Path("reports")
    if arguments.model:
        load_model(arguments.model)  # a name nobody knows is refused before any page is made
        out = arguments.out or out / short(arguments.model)
    pages = build(
        out,
        profile=arguments.profile,
        model=arguments.model,
        only=arguments.only,
        parameters=parameters_of(arguments),
        single_file=arguments.single_file,
        on_page=_tell,
    )
    print(f"{out / 'index.html'} ({time.perf_counter() - start:.0f} s)")
    failed = [page for page in pages if page.error]
    if failed:
        raise ReportError(
            f"{failed[0].stem} stopped at an error ({anonymous(failed[0].error)}); its page shows where"
        )
    return 0


def _tell(page: Page) -> None:
    verdicts = "; ".join(verdict["text"] for verdict in page.verdicts)
    print(f"{page.stem:28s} {page.seconds:5.0f} s  {verdicts}", flush=True)
