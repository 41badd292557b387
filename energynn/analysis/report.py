"""Write the interactive report: one HTML file that needs no network."""

import html
import json
from pathlib import Path
from string import Template

import pandas as pd
import vl_convert

from energynn.analysis import claims, numbers
from energynn.analysis.paper import PAPER, captions, require
from energynn.host.reading import json_table, toml_table
from energynn.host.texts import ForScript

MADE = "Made from commit {colophon[build][git_commit]}, {colophon[build][git_state]}."


def build(build_dir: Path) -> Path:
    """Write ``build_dir``/report.html from figures, numbers and claims.json; returns its path.

    Raises ValueError if the notebooks have not made them yet.
    """
    require(
        build_dir,
        ["claims.json", "numbers.json", "figures/plan.json", "figures/explore.json"],
    )
    said = captions(build_dir)
    ledger = json_table(build_dir / "claims.json")
    errata = pd.DataFrame(ledger["errata"])
    errata["where"] = errata["where"].str.join("; ")
    tables = json_table(build_dir / "numbers.json")
    shown = ["plan", "explore", *said]
    specs = {name: json_table(build_dir / f"figures/{name}.json") for name in shown}
    results = toml_table(PAPER / "results.toml")["result"]
    # Emphasis is Markdown's, and a browser would show its asterisks.
    answers = {
        one["question"]: numbers.filled(one["answer"], tables).replace("*", "")
        for one in results
    }
    contents = {
        # Vega, Vega-Lite and Vega-Embed
        "bundle": vl_convert.javascript_bundle().replace("</script", "<\\/script"),
        "results": _table(pd.DataFrame(answers.items(), columns=["", " "])),
        "figures": "\n".join(_figure(name, caption) for name, caption in said.items()),
        "claims": _table([_statement(claim) for claim in ledger["claims"]]),
        "claims_count": len(ledger["claims"]),
        "restated_count": len(ledger["restated"]),
        "errata": _table(errata[["where", "what", "treated"]]),
        "specs": json.dumps(specs, sort_keys=True, cls=ForScript),
        "made": html.escape(numbers.filled(MADE, tables)),
    }
    path = build_dir / "report.html"
    path.write_text(Template((PAPER / "report.html").read_text()).substitute(contents))
    return path


def _table(rows: list[dict] | pd.DataFrame) -> str:
    with pd.option_context("display.max_colwidth", None):
        return pd.DataFrame(rows).to_html(index=False, border=0)


def _figure(name: str, caption: str) -> str:
    title, _, rest = html.escape(caption).partition(". ")
    drawing = f'<div id="figure-{name}" class="figure"></div>'
    return f"<figure>{drawing}<figcaption><b>{title}.</b> {rest}</figcaption></figure>"


def _statement(claim: dict) -> dict:
    base = f" (base: {claim['base']})" if "base" in claim else ""
    errata = f" Errata: {', '.join(claim['errata'])}." if claim["errata"] else ""
    verdicts = [
        f"{one.get('on', column)}: {claims.words(one)}"
        for column, one in claims.verdicts_by_column(claim)
    ]
    return {
        "place": claim["place"],
        "statement": claim["says"] + base + errata,
        "verdicts": "; ".join(verdicts),
    }
