"""Notebooks executed with the parameters of a profile, and what their cells say of themselves."""

from __future__ import annotations

import copy
import getpass
import os
import re
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from decodebench.errors import DecodebenchError
from decodebench.shipped import PACKAGE, shipped

NOTEBOOKS = shipped("notebooks")


#: parameters of each notebook by profile; without an entry a notebook's own defaults hold
PROFILES = NOTEBOOKS / "profiles.toml"


#: beginnings of the notebooks that tell the story of one model, whichever it is
ONE_MODEL = ("01-", "09-")


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
        client.execute(env=os.environ | {"OMP_WAIT_POLICY": "passive", "TQDM_DISABLE": "1"})
    except CellExecutionError as error:
        page.error = f"{error.ename}: {error.evalue}"
    page.seconds = time.perf_counter() - start
    for fact in _facts(notebook, "verdict"):
        page.verdicts.append({"text": fact["text"], "ok": fact["ok"]})
    if page.error:
        page.verdicts.append(
            {"text": f"This notebook stopped at an error: {anonymous(page.error)}", "ok": False}
        )
    return page


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


def anonymous(text: str) -> str:
    """The text without this machine's folders and user name."""
    for folder, stand_in in ((PACKAGE.parent, "."), (Path(sys.prefix), "python"), (Path.home(), "~")):
        if len(str(folder)) > 1:
            text = text.replace(str(folder), stand_in)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        return text
    # "root" and other short names are words of their own: only paths and addresses give them away
    return re.sub(rf"/home/{re.escape(user)}\b|\b{re.escape(user)}@", "~", text)
