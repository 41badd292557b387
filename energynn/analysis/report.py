"""Write the interactive report: one HTML file that needs no network."""

import html
import json
from pathlib import Path
from string import Template

import pandas as pd
import vl_convert

from energynn.analysis import claims, numbers
from energynn.analysis.paper import PAPER_FOLDER, read_captions
from energynn.host.reading import read_json, read_toml
from energynn.host.texts import ScriptEncoder

MADE = "Made from commit {colophon[build][git_commit]}, {colophon[build][git_state]}."


def build_report(build_dir: Path) -> Path:
    """Write ``build_dir``/report.html from figures, numbers and claims.json, which the notebooks
    make; returns its path.
    """
    said = read_captions(build_dir)
    ledger = read_json(build_dir / "claims.json")
    counts = ledger["counts"]["published"]
    errata = pd.DataFrame(ledger["errata"])
    errata["where"] = errata["where"].str.join("; ")
    tables = read_json(build_dir / "numbers.json")
    specs = {
        name: read_json(build_dir / f"figures/{name}.json")
        for name in ("plan", "explore", *said)
    }
    results = read_toml(PAPER_FOLDER / "results.toml")["result"]
    # Emphasis is Markdown's, and a browser would show its asterisks.
    answers = {
        one["question"]: numbers.fill_sentence(one["answer"], tables).replace("*", "")
        for one in results
    }
    verdicts = map(_verdicts_of_claim, ledger["claims"] + ledger["restated"])
    contents = {
        # Vega, Vega-Lite and Vega-Embed
        "bundle": vl_convert.javascript_bundle().replace("</script", "<\\/script"),
        "results": _html_table(pd.DataFrame(answers.items(), columns=["", " "])),
        "figures": "\n".join(
            _html_figure(name, caption) for name, caption in said.items()
        ),
        "claims": _html_table(pd.DataFrame(verdicts)),
        "claims_count": sum(counts.values()),
        "restated_count": counts[claims.RESTATED],
        "errata": _html_table(errata[["where", "what", "treated"]]),
        "specs": json.dumps(specs, sort_keys=True, cls=ScriptEncoder),
        "made": html.escape(numbers.fill_sentence(MADE, tables)),
    }
    path = build_dir / "report.html"
    path.write_text(
        Template((PAPER_FOLDER / "report.html").read_text()).substitute(contents)
    )
    return path


def _html_table(table: pd.DataFrame) -> str:
    with pd.option_context("display.max_colwidth", None):
        return table.to_html(index=False, border=0)


def _html_figure(name: str, caption: str) -> str:
    title, _, rest = html.escape(caption).partition(". ")
    drawing = f'<div id="figure-{name}" class="figure"></div>'
    return f"<figure>{drawing}<figcaption><b>{title}.</b> {rest}</figcaption></figure>"


def _verdicts_of_claim(claim: dict) -> dict:
    base = f" (base: {claim['base']})" if "base" in claim else ""
    errata = f" Errata: {', '.join(claim['errata'])}." if claim.get("errata") else ""
    verdicts = [
        f"{one.get('on', column)}: {claims.verdict_text(one)}"
        for column, one in claims.verdicts_by_column(claim)
    ]
    return {
        "place": claim["place"],
        "statement": claim["says"] + base + errata,
        "verdicts": "; ".join(verdicts) or claims.RESTATED,
    }
