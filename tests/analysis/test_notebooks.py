"""Notebooks are well-formed; the analysis ones run without and with own runs, and the paper
compiles from either.
"""

import re
import sys

import pytest

from energynn.analysis import numbers, paper, theme
from energynn.experiment import published_values
from energynn.forecast import fits, scaling_cost
from energynn.host.files import REPOSITORY
from energynn.host.reading import read_json, read_toml
from tests.analysis.notebook import execute
from tests.analysis.test_paper import MANUSCRIPT
from tests.processes import printed
from tests.run_files import text_of

# a first test waits until all notebooks are executed
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def built(executed):
    """Make a build folder by all analysis notebooks with own runs, and read the numbers in it."""
    return executed, read_json(executed / "numbers.json")


def test_papermill_executes_a_notebook(tmp_path):
    """As `make paper` does, with a kernel of its own.

    tests/launch/test_launch.py executes run_training so.
    """
    name = "10_scaling_schemes"
    words = f"-m papermill notebooks/{name}.ipynb {tmp_path}/{name}.ipynb"
    words += f" -p build_dir {tmp_path} --no-progress-bar"
    printed(sys.executable, *words.split(), cwd=REPOSITORY, timeout=300)
    (tmp_path / "here").mkdir()
    execute(name, tmp_path / "here")
    for made in (f"numbers/{name}.json", "figures/scaling_schemes.svg"):
        assert (tmp_path / made).read_bytes() == (tmp_path / "here" / made).read_bytes()


def test_the_first_notebook_shows_what_is_there(built):
    folder = built[0]
    execute("00_start_here", folder, runs_dir=str(folder / "runs"), train=False)


def test_all_notebooks_leave_figures_numbers_and_a_paper(built):
    folder, merged = built
    figures = {path.name for path in (folder / "figures").iterdir()}
    manuscript = (paper.PAPER_FOLDER / "energynn.typ").read_text()
    for name in re.findall(r'drawing\("(\w+)"', manuscript):
        assert {f"{name}.svg", f"{name}.png", f"{name}.pdf"} <= figures
    pdf, supplement = paper.compile_manuscripts(folder)
    assert supplement.name == "supplement.pdf" and supplement.stat().st_size > 20_000
    assert pdf.read_bytes().startswith(b"%PDF")
    # as `forecast plan` says it of the same function (tests/forecast/test_plan.py)
    added = scaling_cost.added_energy_percent(fits.published("resnet50", "horeka-a100"))
    ends = [merged["planner_change"]["more"][end] for end in ("low", "high")]
    assert ends == added["by_text"].tolist()
    # The slope of all published ResNet50 rows, computed here once more by its closed form.
    known = [
        (run["gpu_hours"], run["energy_total_kWh"])
        for run in published_values.printed_runs()
        if run["workload"] == "resnet50"
        and {"gpu_hours", "energy_total_kWh"} <= run.keys()
    ]
    assert len(known) == 17
    slope = sum(h * e for h, e in known) / sum(h * h for h, _ in known)
    assert merged["slope"]["ResNet50"]["value"] == pytest.approx(slope, rel=1e-9)
    assert merged["slope"]["ResNet50"]["provenance"] == "published"
    runs = merged["own"]["runs"]
    assert runs["all"] == 9 and runs["measured"] == 0
    # the energies that write_study gives: three repeats, on two devices, and those of 45 s
    times_s = [60.0, 60.6, 61.2, 60.0 / 2**0.85, 45.0]
    powers_W = [14.0, 14.0, 14.0, 23.0, 23.0]
    energies_Wh = [s * W / 3600 for s, W in zip(times_s, powers_W, strict=True)]
    own = merged["resnet50_own"]["all"]
    assert own["energy_Wh"] == pytest.approx(sum(energies_Wh), rel=1e-6)
    assert (own["runs"], own["provenance"]) == (5, "simulated")
    assert "spread" in (folder / "figures" / "power_profiles.svg").read_text()
    drawn = (folder / "figures" / "fourcastnet_scaling.svg").read_text()
    assert "model, fitted to the published values [90 %]" in drawn


def test_the_page_of_verdicts_is_the_notebooks(built):
    folder, _ = built
    assert (folder / "verdicts.md").read_text() == text_of("docs/verdicts.md")


def test_lettering_of_figures_is_8_pt_in_print(built):
    """1 px is 0.625 pt; what is wider than the page, or a narrow one than a column, shrinks."""
    folder, _ = built
    for path in (folder / "figures").glob("*.svg"):
        drawn = path.read_text()
        page_px = 240 / 0.625 if path.stem == "what_is_public" else theme.PAGE_WIDTH_px
        width_px = float(re.search(r'viewBox="0 0 ([\d.]+)', drawn)[1])
        shrinks = min(1, page_px / width_px)
        sizes = [float(px) for px in re.findall(r'font-size="([\d.]+)px"', drawn)]
        assert 0.625 * shrinks * min(sizes) >= 8, (path.stem, width_px)


def test_numbers_name_the_rows_they_rest_on(built):
    _, merged = built
    for table in merged.values():
        assert all(row["source"] and row["holds_for"] for row in table.values())
    derived = ("slope", "affine", "intercept", "exponents", "pooled", "no_work")
    sources = []
    for name in (*derived, "at_work", "bracket", "changes"):
        sources += [row["source"] for row in merged[name].values()]
    assert len(sources) > 40
    assert all(re.search(r"\b[RFT]\d n=\d", source) for source in sources)


def test_all_that_the_manuscripts_ask_for_is_there(built):
    """Also what they ask only where there are own runs of a kind."""
    _, merged = built
    asked = r'\b(num|value|range)\("([^"]+)", "([^"]+)"(?:, "([^"]+)")?'
    places = re.findall(asked, MANUSCRIPT)
    assert len(places) > 100
    for call, table, row, column in places:
        columns = {"low", "high"} if call == "range" else {column}
        assert columns <= merged[table][row].keys(), (table, row, column)


def test_first_cells_give_the_answers(built):
    """Each number is followed by its place in numbers.json: 0.284<!--slope[R4][value]-->."""
    _, merged = built
    answers = read_toml(paper.PAPER_FOLDER / "results.toml")
    for one in answers["result"] + answers["answer"]:
        path = REPOSITORY / f"notebooks/{one['notebook']}.ipynb"
        first, *_ = read_json(path)["cells"]
        marked = re.sub(r"\{([^:}]+).*?\}", r"\g<0><!--\1-->", one["answer"])
        answer = f"**{one['question']}** {numbers.fill_sentence(marked, merged)}"
        assert answer in "".join(first["source"]), (
            f"the first cell of {one['notebook']} should say: {answer}"
        )


SAID = {
    "GPU alone": "GPU alone",
    "devices 4 to": "four GPUs|nodes' memory",
    "from 4 GPUs": "A100",
}


def test_sentences_of_readme_and_abstract_say_what_their_numbers_hold_for(built):
    """Each is printed with the conditions of its numbers; `pytest -s` shows them."""
    _, merged = built
    answers = read_toml(paper.PAPER_FOLDER / "results.toml")["result"]
    asked = [(one["answer"], r"\{([^\[}]+)\[([^\]]+)\]") for one in answers]
    manuscript = paper.MANUSCRIPT_SOURCES["paper.pdf"].read_text()
    abstract = re.search(r"abstract: \[\n(.*?)\n  \],", manuscript, re.DOTALL)[1]
    for sentence in re.split(r"(?<=[.*])\s+(?=[A-Z#])", abstract):
        asked.append((sentence, r'#(?:num|range)\("([^"]+)", "([^"]+)"'))
    for sentence, call in asked:
        places = re.findall(call, sentence)
        conditions = {merged[table][row]["holds_for"] for table, row in places}
        print(sentence.strip(), *sorted(conditions), sep="\n    ")
        for part, words in SAID.items():
            if any(part in condition for condition in conditions):
                assert re.search(words, sentence), (part, sentence)
