"""The interactive report: one HTML file with results, plan, explorer, figures and ledger, that needs no network."""

from __future__ import annotations

import html
import json
import re
import tomllib
from pathlib import Path
from string import Template

import vl_convert

from energynn.analysis.paper import PAPER, captions, figures
from energynn.progress import energy_words

INTERACTIVE = ("plan", "explore")  # drawings with choices; all others are the paper's figures
SVG_AT_MOST = 3000  # marks that a browser draws as elements of their own without becoming slow


def build(build_dir: str | Path = "build") -> Path:
    """Write ``build_dir``/report.html from the figures' specifications and claims.json; returns its path.

    Raises ValueError if the notebooks have not made them yet.
    """
    build_dir = Path(build_dir)
    headings = figures((PAPER / "energynn.typ").read_text())
    paths = {name: build_dir / "figures" / f"{name}.json" for name in [*INTERACTIVE, *headings]}
    specs = {name: json.loads(path.read_text()) for name, path in paths.items() if path.is_file()}
    if not set(INTERACTIVE) <= specs.keys() or not (build_dir / "claims.json").is_file():
        raise ValueError(f"{build_dir} has no plan, no explorer or no claims.json; run the notebooks first")
    ledger = json.loads((build_dir / "claims.json").read_text())
    points = max((len(rows) for rows in specs["explore"]["datasets"].values()), default=0)
    errata = {}
    for erratum in ledger["errata"]:
        words = f"{'; '.join(erratum['where'])}: {erratum['what']} {erratum['treated']}"
        errata[erratum["id"]] = html.escape(words)
    numbers = json.loads((build_dir / "numbers.json").read_text())
    texts = {name: entry["text"] for name, entry in numbers.items()}
    said = captions(build_dir)
    headings = {name: _heading(headings[name], texts) for name in headings if name in specs}
    contents = {
        "bundle": _bundle(build_dir),
        "results": _results(texts),
        "measured": _measured(build_dir),
        "sections": "".join(f'<li><a href="#{_id(one)}">{one}</a></li>' for one in dict.fromkeys(headings.values())),
        "figures": _figures(headings, said),
        "claims": "\n".join(_row(claim, errata) for claim in ledger["claims"]),
        "errata": "".join(f"<li>{words}</li>" for words in errata.values()),
        "claims_count": len(ledger["claims"]),
        "specs": json.dumps(specs, sort_keys=True).replace("</", "<\\/"),
        "renderer": "svg" if points <= SVG_AT_MOST else "canvas",
        "made": f"Made from commit {texts['git_commit']}, {texts['git_state']}.",
    }
    text = Template((PAPER / "report.html").read_text()).substitute(contents)
    path = build_dir / "report.html"
    path.write_text(text)
    return path


def _heading(words: str, texts: dict[str, str]) -> str:
    """A heading of the manuscript, with its numbers."""
    return html.escape(re.sub(r'#num\("(\w+)"\)', lambda number: texts[number[1]], words))


def _id(heading: str) -> str:
    return re.sub(r"\W+", "-", heading.lower()).strip("-")


def _figures(headings: dict[str, str], said: dict[str, str]) -> str:
    """The figures' places with the paper's captions, each under the heading that it has there."""
    parts, last = [], ""
    for name, heading in headings.items():
        if heading != last:
            parts.append(f'<h3 id="{_id(heading)}">{heading}</h3>')
        last = heading
        title, _, rest = said.get(name, f"{name.replace('_', ' ').capitalize()}. Not in this paper.").partition(". ")
        caption = f"<b>{html.escape(title.rstrip('.'))}.</b> {html.escape(rest)}"
        drawing = f'<div id="figure-{name}" class="figure"></div>'
        parts.append(f"<figure>{drawing}<figcaption>{caption}</figcaption></figure>")
    return "\n".join(parts)


def _measured(build_dir: Path) -> str:
    """A table of the measured commands and imported files, the newest first; a sentence where there are none."""
    path = build_dir / "without_training.json"
    rows = json.loads(path.read_text()) if path.is_file() else []
    if not rows:
        return '<p class="small">None yet. <code>energynn measure -- python train.py</code> measures any command.</p>'
    table = "<tr><th>what</th><th>energy</th><th></th><th>time</th><th>mean power</th><th>run</th></tr>"
    for row in sorted(rows, key=lambda row: row["run"], reverse=True):
        kind = {"command": "", "imported": "imported from perun: "}[row["origin"]]
        energy = energy_words(1000 * row["energy_total_kWh"])
        power_kW = row["energy_total_kWh"] / row["training_time_h"]
        cells = [f"{kind}{row['name']}", energy, row["provenance"], f"{3600 * row['training_time_h']:.1f} s"]
        cells += [f"{1000 * power_kW:.1f} W", row["run"]]
        table += f"<tr><td>{'</td><td>'.join(html.escape(cell) for cell in cells)}</td></tr>\n"
    return f'<div class="wide"><table>{table}</table></div>'


def _results(texts: dict[str, str]) -> str:
    """The rows of paper/results.toml, with the numbers of this build."""
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
    cells = "</td><td>".join([html.escape(claim["place"]), statement, published, own])
    title = html.escape(claim["test"], quote=True)
    return f'<tr data-verdict="{claim["published"]["verdict"]}" title="{title}"><td>{cells}</td></tr>'


def _judged(verdict: dict) -> str:
    """A verdict with its effect, its interval and its reason."""
    effect = ""
    if "effect" in verdict:
        effect = f"{verdict['effect']:.3g} [{verdict['low']:.3g}, {verdict['high']:.3g}]"
        effect += f"; as observed {verdict['observed']['verdict']}"
    reason = html.escape(" ".join([verdict.get("on", ""), verdict["reason"]]).strip())
    word = f'<span class="verdict {verdict["verdict"].split()[0]}">{verdict["verdict"]}</span>'
    return f'{word} {effect}<br><span class="small">{reason}</span>'
