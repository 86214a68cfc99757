"""Notebooks → self-contained HTML: one page a notebook and an index with the verdicts.

    python -m decodebench report --profile quick --out reports

Pages need no network, fold their code, and read in light, dark, on paper and on a phone. Figures are
written as SVG and PNG as well, tables as CSV.
"""

from __future__ import annotations

import argparse
import base64
import copy
import getpass
import html
import os
import re
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from decodebench.display import DARK_INKS
from decodebench.models import load_model
from decodebench.specs import DecodebenchError

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
#: parameters of each notebook by profile; without an entry a notebook's own defaults hold
PROFILES = NOTEBOOKS / "profiles.toml"
#: beginnings of the notebooks that tell the story of one model, whichever it is
ONE_MODEL = ("01-", "09-")
TEMPLATES = Path(__file__).parent / "templates"


class ReportError(DecodebenchError):
    """A report that cannot be made: an unknown notebook or profile, a folder that cannot be written."""


@dataclass
class Page:
    """What the index and the notebook's own page say about it."""

    stem: str
    title: str
    question: str
    notebook: object
    seconds: float = 0.0
    error: str | None = None
    verdicts: list[dict] = field(default_factory=list)
    picture: str | None = None

    @property
    def file(self) -> str:
        return f"{self.stem}.html"


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


def execute(
    path: Path,
    parameters: Mapping[str, object] | None = None,
    *,
    notebook=None,
    folder: Path | None = None,
    on_cell=None,
) -> Page:
    """Run one notebook in a kernel of this very Python, with ``parameters`` in place of its own.

    ``folder``: where the kernel runs, the notebook's own by default.
    """
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = _with_parameters(notebook if notebook is not None else _read(path), parameters or {}, path)
    # this interpreter's kernel, whatever kernels the user has registered under the same name
    manager = AsyncKernelManager(kernel_name="python3")
    manager._kernel_spec = KernelSpec(
        argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=ERROR"],
        display_name="Python 3",
        language="python",
    )
    client = NotebookClient(
        notebook,
        km=manager,
        timeout=None,
        store_widget_state=False,
        resources={"metadata": {"path": str(folder or path.parent)}},
        on_cell_executed=(lambda **_: on_cell()) if on_cell else None,
    )
    title, question = _heading(notebook)
    page = Page(path.stem, title, question, notebook)
    start = time.perf_counter()
    try:
        # threads that wait must not spin: beside other work on the machine a step would take ten times as long
        client.execute(env=os.environ | {"OMP_WAIT_POLICY": "passive"})
    except CellExecutionError as error:
        page.error = f"{error.ename}: {error.evalue}"
    page.seconds = time.perf_counter() - start
    for fact in _facts(notebook, "verdict"):
        page.verdicts.append({"text": fact["text"], "ok": fact["ok"]})
    if page.error:
        page.verdicts.append(
            {"text": f"This notebook stopped at an error: {_anonymous(page.error)}", "ok": False}
        )
    return page


# -- notebooks and their parameters ---------------------------------------------------------------


def _chosen(only: Sequence[str], profile: str) -> list[Path]:
    paths = sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))
    if not paths:
        raise ReportError(
            f"no notebooks in {NOTEBOOKS.name}/: reports are made in a checkout of the repository"
        )
    if profile != "quick" and profile not in _profiles():
        raise ReportError(f"profile {profile!r}: choose quick, {', '.join(sorted(_profiles()))}")
    for start in only:
        if not any(path.stem.startswith(start) for path in paths):
            raise ReportError(
                f"no notebook begins with {start!r}; there are {', '.join(p.stem for p in paths)}"
            )
    return [path for path in paths if not only or path.stem.startswith(tuple(only))]


def _profiles() -> dict[str, dict]:
    return tomllib.loads(PROFILES.read_text()) if PROFILES.exists() else {}


def _read(path: Path):
    import nbformat

    return nbformat.read(path, as_version=4)


def _code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _tagged(cell, tag: str) -> bool:
    return tag in cell.metadata.get("tags", [])


def parameter_names(notebook) -> list[str]:
    """Names assigned in the notebook's ``parameters`` cell."""
    source = "\n".join(cell.source for cell in notebook.cells if _tagged(cell, "parameters"))
    return re.findall(r"^(\w+)\s*=", source, re.M)


def _parameters(path: Path, notebook, profile: str, model) -> dict:
    given = dict(_profiles().get(profile, {}).get(path.stem, {}))
    unknown = set(given) - set(parameter_names(notebook))
    if unknown:
        raise ReportError(f"{PROFILES.name}: {path.stem} has no parameter {sorted(unknown)[0]!r}")
    if model is not None:
        given["model"] = str(model)
    return given


def _with_parameters(notebook, parameters: Mapping[str, object], path: Path):
    """A copy without old outputs; the given parameters in a cell after the notebook's own, as papermill
    does.
    """
    import nbformat

    notebook = copy.deepcopy(notebook)
    for cell in _code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    if parameters:
        unknown = set(parameters) - set(parameter_names(notebook))
        if unknown:
            raise ReportError(f"{path.name} has no parameter {sorted(unknown)[0]!r}")
        source = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
        cell = nbformat.v4.new_code_cell(source, metadata={"tags": ["injected-parameters"]})
        where = next(i for i, cell in enumerate(notebook.cells) if _tagged(cell, "parameters"))
        notebook.cells.insert(where + 1, cell)
    return notebook


def _heading(notebook) -> tuple[str, str]:
    """Title and question: the first heading, and the paragraph after it."""
    paragraphs = re.split(r"\n\s*\n", notebook.cells[0].source.strip())
    title = paragraphs[0].lstrip("# ").strip()
    question = re.sub(r"[*_`]", "", paragraphs[1]).strip() if len(paragraphs) > 1 else ""
    return title, " ".join(question.split())


def _facts(notebook, role: str) -> list[dict]:
    """What outputs of a role (chart, table, verdict, provenance) said about themselves."""
    found = []
    for cell in _code_cells(notebook):
        for output in cell.get("outputs", []):
            fact = output.get("metadata", {}).get("decodebench", {})
            if fact.get("role") == role:
                found.append({**fact, "data": output["data"]})
    return found


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
    path.write_text(_anonymous(text))


def _anonymous(text: str) -> str:
    """The text without this machine's folders and user name."""
    for folder, stand_in in ((ROOT, "."), (Path(sys.prefix), "python"), (Path.home(), "~")):
        if len(str(folder)) > 1:
            text = text.replace(str(folder), stand_in)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        return text
    # "root" and other short names are words of their own: only paths and addresses give them away
    return re.sub(rf"/home/{re.escape(user)}\b|\b{re.escape(user)}@", "~", text)


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
            f"{failed[0].stem} stopped at an error ({_anonymous(failed[0].error)}); its page shows where"
        )
    return 0
