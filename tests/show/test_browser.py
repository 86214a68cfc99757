"""The two ways people meet the toolkit, in a real browser: an exported report,
and JupyterLab with the explorer.
"""

import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser

from decodebench.show import notebooks, report

pytestmark = pytest.mark.skipif(
    not CHROMIUM, reason="Chromium is not installed (Debian: apt-get install chromium): pages were not opened"
)


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


# -- the exported report ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    pages = report.build(out, profile="test", only=["01"], progress=False)
    assert not pages[0].error, pages[0].error
    return out


@pytest.mark.parametrize("name", ["index.html", "01-quick-start.html"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_a_page_opens_without_errors_and_without_the_network(browser, exported, name, dark, width):
    browser.media(dark=dark)
    browser.size(width, 900)
    browser.open((exported / name).as_uri())
    assert browser.problems == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width, (
        "the page itself never scrolls sideways"
    )
    assert browser.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert browser.evaluate("[...document.querySelectorAll('main figure img')].every(i => i.alt.length > 30)")
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(22, 25, 29)" if dark else "rgb(255, 255, 255)")
    shown = browser.evaluate(
        "[...document.querySelectorAll('picture img')].map(i => atob(i.currentSrc.split('base64,')[1] || ''))"
    )
    assert (shown or name == "index.html") and all(("#e8eaed" in svg) == dark for svg in shown), (
        "figures follow the page"
    )


def test_text_keeps_its_contrast(browser, exported):
    """WCAG's 4.5 for what is read, in both colour schemes."""
    script = """(() => {
      const parse = c => c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
      const light = c => { const [r, g, b] = parse(c); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
      const ground = light(getComputedStyle(document.body).backgroundColor);
      return [...document.querySelectorAll('p, h1, h2, td, th, a, figcaption, summary, footer')].map(e => {
        const ink = light(getComputedStyle(e).color);
        return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
      }).reduce((a, b) => Math.min(a, b), 21);
    })()"""
    for dark in (False, True):
        browser.media(dark=dark)
        browser.open((exported / "01-quick-start.html").as_uri())
        assert browser.evaluate(script) >= 4.5


def test_on_paper_the_code_is_left_out_and_the_ground_is_white(browser, exported):
    browser.media(dark=True, kind="print")
    browser.open((exported / "01-quick-start.html").as_uri())
    assert browser.evaluate("[...document.querySelectorAll('details')].every(d => d.offsetHeight === 0)")
    assert browser.evaluate("getComputedStyle(document.body).color") == "rgb(31, 36, 41)"
    svg = browser.evaluate("atob(document.querySelector('main figure img').currentSrc.split('base64,')[1])")
    assert "#e8eaed" not in svg


@pytest.mark.parametrize("width", [718, 739], ids=["A4", "Letter"])
def test_on_paper_no_column_is_lost(browser, exported, width):
    """The width of the paper less Chromium's margins, in CSS pixels; nothing may lie outside it or scroll."""
    browser.media(kind="print")
    browser.size(width, 1000)
    browser.open((exported / "01-quick-start.html").as_uri())
    outside = browser.evaluate(
        """[...document.querySelectorAll('main td, main th, main img, main pre')]
        .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
        .map(e => e.tagName + ' ' + e.textContent.slice(0, 40))"""
    )
    assert outside == []
    assert browser.evaluate(
        "[...document.querySelectorAll('.table, .scroll, .text')].every(e => e.scrollWidth <= e.clientWidth + 1)"
    )
    browser.size(1200, 900)


def test_a_page_is_small_enough_to_send(exported):
    for path in exported.glob("*.html"):
        assert path.stat().st_size < 1_500_000, path.name


# -- JupyterLab ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A JupyterLab over a copy of the notebooks, so that nothing is saved into the checkout."""
    folder = tmp_path_factory.mktemp("lab")
    shutil.copy(notebooks.NOTEBOOKS / "01-quick-start.ipynb", folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = open(folder.parent / "lab.log", "w")
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "jupyterlab",
            "--no-browser",
            "--allow-root",
            f"--port={port}",
            "--IdentityProvider.token=",
            f"--ServerApp.root_dir={folder}",
            "--expose-app-in-browser",
        ],
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=Path(__file__).parents[2],
    )
    try:
        address = f"http://127.0.0.1:{port}"
        end = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{address}/api", timeout=5)
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < end, Path(log.name).read_text()[-2000:]
                time.sleep(0.2)
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


def choose(browser, label, value):
    """Pick ``value`` in the explorer's drop-down that is labelled ``label``, as a user's click would."""
    found = browser.evaluate(f"""(() => {{
      for (const box of document.querySelectorAll('.widget-dropdown')) {{
        if (box.querySelector('label')?.textContent.trim() !== {label!r}) continue;
        const select = box.querySelector('select');
        const index = [...select.options].findIndex(o => o.value === {value!r} || o.text.startsWith({value!r}));
        if (index < 0) return [...select.options].map(o => o.text).join(', ');
        select.selectedIndex = index;
        select.dispatchEvent(new Event('change', {{bubbles: true}}));
        return 'chosen';
      }}
      return 'no such drop-down';
    }})()""")
    assert found == "chosen", found


def test_a_notebook_runs_in_jupyterlab_and_the_explorer_answers(browser, lab, tmp_path):
    browser.media()
    browser.size(1300, 1000)
    browser.open(f"{lab}/lab/tree/01-quick-start.ipynb")
    browser.until("!!window.jupyterapp && document.querySelectorAll('.jp-Notebook .jp-Cell').length > 3", 60)
    browser.until("!!document.querySelector('.jp-Notebook-ExecutionIndicator[data-status=\"idle\"]')", 60)
    browser.evaluate("jupyterapp.commands.execute('notebook:run-all-cells')")
    # JupyterLab draws the cells that are in sight: scroll until the explorer's is among them
    sight = (
        "(() => { const book = document.querySelector('.jp-Notebook .jp-WindowedPanel-outer') ||"
        " document.querySelector('.jp-Notebook'); const down = book.scrollTop + 400;"
        " book.scrollTop = down > book.scrollHeight ? 0 : down;"
        " return !!document.querySelector('.db-explorer svg'); })()"
    )
    browser.until(sight, 120)
    errors = (
        '[...document.querySelectorAll(\'[data-mime-type="application/vnd.jupyter.stderr"], '
        ".jp-RenderedText[data-mime-type*=error]')].map(e => e.textContent)"
    )
    assert [text for text in browser.evaluate(errors) if "Error" in text or "Traceback" in text] == []
    verdict = "document.querySelector('.db-explorer .db-answer').textContent"
    assert browser.evaluate(verdict).startswith("0.0 %"), "the notebook opens it with fault A1"
    assert "never filled" in browser.evaluate("document.querySelector('.db-explorer').textContent")
    choose(browser, "fault", "none")
    browser.until(f"{verdict}.startsWith('100 %')", 30)
    labels = "[...document.querySelectorAll('.widget-dropdown select')].map(s => s.selectedOptions[0]?.text)"
    assert all(browser.evaluate(labels)), "no drop-down goes blank"
    choose(browser, "fault", "A8")
    browser.until(f"!{verdict}.startsWith('100 %')", 30)
    choose(browser, "model", "gemma-3-1b")
    browser.until("document.querySelector('.db-explorer').textContent.includes('sliding window')", 30)
    assert [problem for problem in browser.problems if "favicon" not in problem] == []
    browser.evaluate("document.querySelector('.db-explorer').scrollIntoView({block: 'center'})")
    assert browser.screenshot(tmp_path / "explorer.png")[:4] == b"\x89PNG"
