"""Report, plan and explorer in a real headless Chromium: no error, no network, clicks that act."""

import html
import json
import math
import re
import shutil

import pytest
import vl_convert

from energynn.analysis import numbers, report
from energynn.experiment import config
from energynn.forecast import wording
from energynn.host.reading import read_json, read_toml
from tests.analysis.conftest import write_run
from tests.analysis.notebook import execute
from tests.processes import answer, told
from tests.run_files import text_of

BROWSERS = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
BROWSER = next(filter(None, BROWSERS), None)
COMMAND = "20260101-000000-1-python"
MARKS = "#figure-explore g.mark-symbol.role-mark path"


@pytest.fixture(scope="module")
def page():
    """Open a browser page that records its errors and what it asks the network for."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="pip install playwright"
    )
    if BROWSER is None:
        pytest.skip("there is no Chromium on this machine")
    with sync_api.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1300, "height": 1400})
        page.errors, page.requests = [], []
        page.on(
            "console",
            lambda said: (
                page.errors.append(said.text) if said.type == "error" else None
            ),
        )
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("request", lambda request: page.requests.append(request.url))
        yield page
        browser.close()


@pytest.fixture(scope="module")
def planned(executed):
    """Execute the plan's notebook, and return what it leaves."""
    return execute("91_plan", executed, live=False)


@pytest.fixture(scope="module")
def built(executed, planned, tmp_path_factory):
    """Build the report with own runs that have a trace, and with a measured command."""
    runs_dir = tmp_path_factory.mktemp("measured") / "runs"
    shutil.copytree(executed / "runs", runs_dir)
    command = {"command": "python train.py", "sampling_period_s": 0.04}
    about = dict(workload="command", system="measured", run_id=COMMAND, config=command)
    about |= dict(time_s=30.0, parts_W={"cpu": 30.0})
    run = config.make("resnet50", repeat=9)
    write_run(runs_dir, run, "measured", **about)
    execute("90_explore", executed, runs_dir=str(runs_dir), live=False)
    return report.build_report(executed)


@pytest.fixture
def opened(built, page):
    page.errors.clear(), page.requests.clear()
    page.goto(built.as_uri())
    page.wait_for_function("window.views.explore && window.views.plan", timeout=60000)
    yield page
    assert page.errors == [] and page.requests == [built.as_uri()]


def texts(page, selector="#figure-explore"):
    marks = f"[...document.querySelectorAll('{selector} g.mark-text text')]"
    return page.evaluate(f"{marks}.map(text => text.textContent)")


def click_on(page, mark, *keys):
    mark.click(modifiers=keys, force=True)
    page.wait_for_timeout(300)


def test_the_report_shows_results_statements_and_captions_without_network(built):
    text = re.sub(r"<script>.*?</script>", "", built.read_text(), flags=re.DOTALL)
    assert not re.search(r'(src|href)="(?!data:|#)', text) and "#num" not in text
    tables = read_json(built.parent / "numbers.json")
    readme = text_of("README.md")
    readme = re.sub(r"<!--\w+-->| \(\[[^)]*\)\)", "", readme)
    for result in read_toml(report.PAPER_FOLDER / "results.toml")["result"]:
        answer = numbers.fill_sentence(result["answer"], tables)
        assert (
            html.escape(answer.replace("*", ""), quote=False) in text
            and f"| {result['question']} | {answer} |" in readme
        )
    for claim in read_json(built.parent / "claims.json")["claims"]:
        assert html.escape(claim["says"], quote=False) in text
    # no Markdown, and no reference that was lost from before a full stop
    page = re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)
    assert not re.search(r"\*\w|\s[.,;:]\s", page)
    # plan and explorer
    assert text.count("<figcaption>") == text.count('<div id="figure-') - 2


def test_a_click_shows_a_run_and_with_shift_a_second_one(opened):
    before = texts(opened)
    run = next(
        text for text in before if text.startswith(("resnet50-", "fourcastnet-"))
    )
    click_on(opened, opened.query_selector_all(MARKS)[-1], "Shift")
    assert {run, COMMAND, "python train.py", "measured"} <= set(texts(opened))


def middle(mark):
    box = mark.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_the_middle_of_a_ring_is_hit_and_a_miss_changes_nothing(opened):
    opened.locator("#explore").scroll_into_view_if_needed()

    groups = opened.query_selector_all("#figure-explore g.mark-symbol.role-mark")
    _, drawn, *_ = groups  # of the left panel: unseen discs, then what is seen
    marks = drawn.query_selector_all("path")
    at = {mark: middle(mark) for mark in marks}
    rings = [one for one in marks if "published" in one.get_attribute("aria-label")]
    # whose neighbours are far
    ring = max(
        rings,
        key=lambda one: sorted(math.dist(at[one], at[other]) for other in marks)[1],
    )
    (run,) = re.findall(r"\brun: ([^;]+)", ring.get_attribute("aria-label"))
    assert run not in texts(opened)
    opened.mouse.move(*at[ring])
    assert "published" in opened.inner_text("#vg-tooltip-element")
    click_on(opened, ring)
    shown = texts(opened)
    assert run in shown
    x, y = at[ring]
    opened.mouse.click(x + 40, y + 100)
    opened.wait_for_timeout(300)
    assert texts(opened) == shown


def test_the_middle_of_a_ring_in_a_figure_tells_its_values(opened):
    figure = "#figure-energy_against_gpu_hours g.mark-symbol.role-mark"
    ring = opened.query_selector(f'{figure} path[aria-label*="R4"]')
    ring.scroll_into_view_if_needed()
    opened.mouse.move(*middle(ring))
    opened.wait_for_selector("#vg-tooltip-element.visible", timeout=3000)


def test_choices_filter_points_and_statements(opened):
    everything = len(opened.query_selector_all(MARKS))
    opened.select_option("#choices-explore select >> nth=0", label="resnet50")
    opened.wait_for_timeout(500)
    assert 0 < len(opened.query_selector_all(MARKS)) < everything
    opened.check("#choices-explore input[type=checkbox]")
    opened.wait_for_timeout(500)
    assert opened.query_selector(MARKS)
    assert not opened.query_selector(f'{MARKS}[aria-label*="published"]')
    opened.select_option("#show", label="contradicted")
    rows = "[...document.querySelectorAll('#ledger tbody tr')].filter(row => !row.hidden).length"
    assert 0 < opened.evaluate(rows) < 30


def test_a_click_in_the_plan_gives_its_command_to_copy(opened):
    field = "#choices-plan input[type=text]"
    click_on(opened, opened.query_selector("#figure-plan g.mark-symbol.role-mark path"))
    assert opened.input_value(field).startswith("energynn submit ")
    opened.fill("#choices-plan input[name=deadline_h]", "0.001")
    opened.wait_for_timeout(300)
    assert any("Nothing keeps" in text for text in texts(opened, "#figure-plan"))


def drawn(spec: dict, **values) -> str:
    """The picture of a plan, with what a reader chooses and types."""
    for param in spec["params"]:
        if param["name"] in values:
            param["value"] = values[param["name"]]
    return vl_convert.vegalite_to_svg(spec)


def choices_in(picture: str) -> dict[str, tuple]:
    names = re.findall(">(fastest|balanced|most frugal)<", picture)
    sizes = re.findall(r">(\d+) GPUs, local batch (\d+), global batch (\d+)<", picture)
    return dict(zip(names, sizes, strict=True))


def unbeaten_in(picture: str) -> list[tuple]:
    sizes = r"configuration: (\d+) GPUs, local batch (\d+), global batch (\d+)"
    return re.findall(f"nothing within the limits beats it; {sizes}", picture)


def sizes_of(row: dict, *names: str) -> tuple:
    return tuple(str(row[name]) for name in names)


OFFERS = [
    "resnet50 on horeka-a100",
    "fourcastnet on horeka-a100",
    "fourcastnet on horeka-h100",
]
LIMITS = {
    "": {"deadline_h": "", "most_batch": "", "most_GPUs": 256},
    "--deadline-h 40": {"deadline_h": "40"},
    "--deadline-h 40 --max-global-batch-size 99999 --devices 64": {
        "most_batch": "99999",
        "most_GPUs": 64,
    },
}


@pytest.fixture
def plan_spec(built):
    """The plan's specification, as the report embeds it."""
    embedded = re.search("^const specs = (.*);$", built.read_text(), re.MULTILINE)[1]
    return json.loads(embedded)["plan"]


@pytest.mark.parametrize("where", OFFERS)
def test_picture_table_and_terminal_choose_the_same_runs(planned, plan_spec, where):
    """The picture has the rules of forecast/plan.py as a browser reads them, without a kernel."""
    workload, _, system = where.split()
    answers = []
    for words, typed in LIMITS.items():
        command = f"forecast plan --workload {workload} --system {system}"
        said = told(f"{command} {words}")
        choices = said["choices"]
        names = ("devices", "local_batch_size", "global_batch_size")
        answers.append({name: sizes_of(row, *names) for name, row in choices.items()})
        picture = drawn(plan_spec, workload=where, **typed)
        assert choices_in(picture) == answers[-1]
        unbeaten = [sizes_of(row, *names) for row in said["pareto"]]
        assert sorted(unbeaten_in(picture)) == sorted(unbeaten)
        chances = [row["chance_percent"] for row in choices.values()]
        kept = [wording.chance_text(of["time_h"]) for of in chances if of]
        assert sorted(re.findall(r">[^<]* h kept: (\d+ %)", picture)) == sorted(kept)
    rows = [row for row in planned["answers"] if row["workload"] == where]
    names = ("GPUs", "local batch", "global batch")
    assert {row["choice"]: sizes_of(row, *names) for row in rows} == answers[0]


@pytest.mark.parametrize(
    "where, limits, typed",
    [
        (OFFERS[0], "0.6 --devices 100", {"most_GPUs": 100}),
        (OFFERS[2], "14 --devices 32", {"most_GPUs": 32}),
        (OFFERS[1], "30 --energy-kwh 20", {"most_kWh": "20"}),
        (
            OFFERS[1],
            "30 --energy-kwh 20 --gpu-hours 100",
            {"most_kWh": "20", "most_hours": "100"},
        ),
    ],
)
def test_picture_and_terminal_name_the_same_limits_that_can_be_kept(
    plan_spec, where, limits, typed
):
    workload, _, system = where.split()
    command = f"forecast plan --workload {workload} --system {system} --deadline-h"
    refusal = answer(f"{command} {limits}", status=2)
    deadline_h = limits.split()[0]
    picture = drawn(plan_spec, workload=where, deadline_h=deadline_h, **typed)
    shown = re.search(r">Nothing keeps[^<]*kept: ([^<]*)<", picture)[1]
    possible = re.search("others kept: (.*)", refusal)[1]
    # "0.9944 h" here is "--deadline-h 0.9944" there
    numbers = [re.findall(r"\b[\d.]+|none", words) for words in (shown, possible)]
    assert sorted(numbers[0]) == sorted(numbers[1]) != []


@pytest.mark.parametrize("width", [1440, 390])
def test_the_report_fits_a_desktop_and_a_phone(built, page, width):
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(built.as_uri())
    page.wait_for_function("Object.keys(window.views || {}).length >= 10")
    boxes = "[...document.querySelectorAll('.figure')]"
    boxes += ".filter(one => one.scrollWidth > one.clientWidth + 1)"
    assert page.evaluate(f"{boxes}.map(one => one.id)") == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.set_viewport_size({"width": 1300, "height": 1400})
