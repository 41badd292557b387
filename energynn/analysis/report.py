"""The interactive report: one HTML file with plan, explorer, ledger and figures, that needs no network."""

from __future__ import annotations

import html
import json
import tomllib
from pathlib import Path
from string import Template

import vl_convert

from energynn.analysis.paper import PAPER, figures

INTERACTIVE = ("plan", "explore")  # drawings with choices; all others are the paper's figures
SVG_AT_MOST = 3000  # marks that a browser draws as elements of their own without becoming slow


def build(build_dir: str | Path = "build") -> Path:
    """Write ``build_dir``/report.html from the figures' specifications and claims.json; returns its path.

    Raises ValueError if the notebooks have not made them yet.
    """
    build_dir = Path(build_dir)
    names = [*INTERACTIVE, *figures((PAPER / "energynn.typ").read_text())]
    paths = {name: build_dir / "figures" / f"{name}.json" for name in names}
    specs = {name: json.loads(path.read_text()) for name, path in paths.items() if path.is_file()}
    if not set(INTERACTIVE) <= specs.keys() or not (build_dir / "claims.json").is_file():
        raise ValueError(f"{build_dir} has no plan, no explorer or no claims.json; run the notebooks first")
    ledger = json.loads((build_dir / "claims.json").read_text())
    points = max((len(rows) for rows in specs["explore"]["datasets"].values()), default=0)
    errata = {}
    for erratum in ledger["errata"]:
        words = f"{'; '.join(erratum['where'])}: {erratum['what']} {erratum['treated']}"
        errata[erratum["id"]] = html.escape(words)
    drawings = ""
    for name in specs:
        if name not in INTERACTIVE:
            drawings += f"<h3>{html.escape(name.replace('_', ' '))}</h3>"
            drawings += f'<div id="figure-{name}" class="figure printed"></div>\n'
    contents = {
        "bundle": _bundle(build_dir),
        "results": _results(build_dir),
        "figures": drawings,
        "claims": "\n".join(_row(claim, errata) for claim in ledger["claims"]),
        "errata": "".join(f"<li>{words}</li>" for words in errata.values()),
        "claims_count": len(ledger["claims"]),
        "specs": json.dumps(specs, sort_keys=True).replace("</", "<\\/"),
        "renderer": "svg" if points <= SVG_AT_MOST else "canvas",
        "made": _made(build_dir),
    }
    text = Template((PAPER / "report.html").read_text()).substitute(contents)
    path = build_dir / "report.html"
    path.write_text(text)
    return path


def _results(build_dir: Path) -> str:
    """The rows of paper/results.toml, with the numbers of this build."""
    numbers = json.loads((build_dir / "numbers.json").read_text())
    texts = {name: entry["text"] for name, entry in numbers.items()}
    rows = ""
    for result in tomllib.loads((PAPER / "results.toml").read_text())["result"]:
        answer = html.escape(result["answer"].format_map(texts))
        rows += f"<tr><th>{html.escape(result['question'])}</th><td>{answer}</td></tr>\n"
    return rows


def _bundle(build_dir: Path) -> str:
    """Vega, Vega-Lite and Vega-Embed in one script, kept in the build folder because making it takes seconds."""
    path = build_dir / f"vega-{vl_convert.__version__}.js"
    if not path.is_file():
        path.write_text(vl_convert.javascript_bundle().replace("</script", "<\\/script"))
    return path.read_text()


def _row(claim: dict, errata: dict[str, str]) -> str:
    """A statement as a row of the ledger: place, words, verdict on published values, verdicts on own runs."""
    statement = html.escape(claim["says"])
    if "base" in claim:
        statement += f' <span class="small">(base: {html.escape(claim["base"])})</span>'
    for erratum in claim["errata"]:
        statement += f'<br><span class="small"><b>Erratum.</b> {errata[erratum]}</span>'
    published, own = _judged(claim["published"]), "<br>".join(_judged(verdict) for verdict in claim["own"])
    derived = _judged(claim["derived"]) if "derived" in claim else ""
    model = f"{claim['model']['probability']:.0%}" if "model" in claim else ""
    cells = "</td><td>".join([html.escape(claim["place"]), statement, published, derived, model, own])
    title = html.escape(claim["test"], quote=True)
    return f'<tr data-verdict="{claim["published"]["verdict"]}" title="{title}"><td>{cells}</td></tr>'


def _judged(verdict: dict) -> str:
    """A verdict with its effect, its interval and its reason."""
    effect = ""
    if "effect" in verdict:
        effect = f"{verdict['effect']:.3g} [{verdict['low']:.3g}, {verdict['high']:.3g}]"
        effect += f"; as observed {verdict['observed']['verdict']}"
        effect += f"; half the tolerance: {verdict['at_half']}, double: {verdict['at_double']}"
    reason = html.escape(" ".join([verdict.get("on", ""), verdict["reason"]]).strip())
    word = f'<span class="verdict {verdict["verdict"].split()[0]}">{verdict["verdict"]}</span>'
    return f'{word} {effect}<br><span class="small">{reason}</span>'


def _made(build_dir: Path) -> str:
    numbers = json.loads((build_dir / "numbers.json").read_text())
    return f"Made from commit {numbers['git_commit']['text']}, {numbers['git_state']['text']}."
