"""Report, plan and explorer in a real headless Chromium: no error, no network, and a click changes what is linked."""

import functools
import html
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib

import pytest
import vl_convert

from energynn import config
from energynn.analysis import report, theme
from energynn.cluster import systems
from energynn.files import REPOSITORY
from energynn.forecast import accuracy, plan
from tests.analysis.notebook import execute
from tests.conftest import minimal_record

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


COMMAND = "20260101-000000-1-python"


@pytest.fixture(scope="module")
def page():
    """A browser page that records what it complains of and what it asks the network for."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright to test in a browser")
    if BROWSER is None:
        pytest.skip("there is no Chromium on this machine")
    with sync_api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1300, "height": 1400})
        page.errors, page.requests = [], []
        page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("request", lambda request: page.requests.append(request.url))
        yield page
        browser.close()


@pytest.fixture(scope="module")
def built(synthetic, executed, tmp_path_factory):
    """Report of a build with own runs that have a trace, and with a measured command."""
    folder = executed("with own runs", synthetic.write_study)
    runs_dir = shutil.copytree(folder / "runs", tmp_path_factory.mktemp("measured") / "runs")
    command = {"command": "python train.py", "sampling_period_s": 0.04}
    names = ("ended_at", "history", "phases", "segments", "files", "record_sha256")  # of a whole record
    about = {name: value for name, value in minimal_record().items() if name in names}
    about |= dict(workload="command", system="measured", run_id=COMMAND, config=command)
    synthetic.write_run(
        runs_dir, config.make("resnet50", repeat=9), "measured", time_s=30.0, parts_W={"cpu": 30.0}, **about
    )
    execute("90_explore", runs_dir=str(runs_dir), build_dir=str(folder), live=False)
    execute("91_plan", build_dir=str(folder), live=False)
    return report.build(folder)


def texts(page, selector="#figure-explore"):
    return page.evaluate(f"[...document.querySelectorAll('{selector} g.mark-text text')].map(t => t.textContent)")


def lines(page, selector="#figure-explore"):
    return page.evaluate(f"document.querySelectorAll('{selector} g.mark-line path').length")


def test_report_is_one_file_without_network(built):
    text = built.read_text()
    assert len(text) < 20e6
    markup = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r'(src|href)="(?!data:|#)', markup)
    assert text.count("data-verdict=") > 100


def test_statements_have_their_errata_and_the_verdicts_at_other_tolerances(built):
    ledger = json.loads((built.parent / "claims.json").read_text())
    text = built.read_text()
    rows = dict(zip([one["id"] for one in ledger["claims"]], re.findall(r"<tr data-.*?</tr>", text), strict=True))
    touched = [one for one in ledger["claims"] if one["errata"]]
    assert len(touched) > 10
    for one in ledger["claims"]:
        row = rows[one["id"]]
        assert row.count("<b>Erratum.</b>") == len(one["errata"])
        columns = (one["published"], one.get("derived", {}), *one["own"])
        judged = [verdict for verdict in columns if "effect" in verdict]
        assert row.count("half the tolerance: ") == len(judged)
        for verdict in judged:
            assert f"half the tolerance: {verdict['at_half']}, double: {verdict['at_double']}" in row
    for erratum in ledger["errata"]:
        assert html.escape(erratum["what"]) in text


def test_report_without_notebooks_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="run the notebooks first"):
        report.build(tmp_path)


def test_a_click_in_the_report_shows_record_and_profile(built, page):
    page.errors.clear(), page.requests.clear()
    page.goto(built.as_uri())
    page.wait_for_function("Object.keys(window.views).length >= 4", timeout=60000)
    assert page.requests == [built.as_uri()]
    before = texts(page)
    assert "simulated" in before and lines(page) == 1  # it starts on a run that has a profile
    own = page.query_selector_all("#figure-explore g.mark-symbol.role-mark path")
    clicked = 0
    for mark in reversed(own[:-1]):  # the last one is a command, those before are own runs; some lie under others
        mark.scroll_into_view_if_needed()
        box = mark.bounding_box()
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.wait_for_timeout(150)
        clicked += 1
        if lines(page) and texts(page) != before:
            break
    shown = texts(page)
    assert lines(page) == 1 and shown != before, f"{clicked} marks clicked, none showed another profile"
    run = shown[shown.index("run") :]
    assert any(text.startswith(("resnet50-n", "fourcastnet-")) for text in run) and "simulated" in run
    assert page.errors == []


def click_on(page, mark, *keys):
    mark.scroll_into_view_if_needed()
    box = mark.bounding_box()
    for key in keys:
        page.keyboard.down(key)
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    for key in keys:
        page.keyboard.up(key)
    page.wait_for_timeout(300)


def test_a_measured_command_is_in_explorer_and_report_and_stands_beside_a_run(built, page):
    page.goto(built.as_uri())
    page.wait_for_function("window.views.explore", timeout=60000)
    assert "python train.py" in page.inner_text("#measured + div") and COMMAND in page.inner_text("#measured + div")
    run = next(text for text in texts(page) if text.startswith(("resnet50-n", "fourcastnet-")))  # it starts on this
    click_on(page, page.query_selector_all("#figure-explore g.mark-symbol.role-mark path")[-1], "Shift")
    shown = texts(page)
    assert {run, COMMAND, "python train.py", "measured command", "measured"} <= set(shown)
    assert lines(page) == 2 and page.errors == []


def test_figures_have_the_papers_captions_and_own_runs_stand_apart(built):
    text = re.sub(r"<script>.*?</script>", "", built.read_text(), flags=re.DOTALL)
    headings = re.findall(r'<h3 id="([\w-]+)">', text)
    assert all(f'href="#{heading}"' in text for heading in headings) and headings[-1] == "own-runs"
    of_own_runs = text.partition('<h3 id="own-runs">')[2]
    assert "figure-resnet50_own" in of_own_runs and "figure-resnet50_scaled_data" not in of_own_runs
    numbers = json.loads((built.parent / "numbers.json").read_text())
    lines_said = f"the lines in D are least squares through the origin from {numbers['node_gpus']['text']} GPUs on."
    assert (
        f"Points and bars as in “Energy against GPU hours”; short dashes join the runs of a series; {lines_said}"
        in text
    )
    assert text.count("<figcaption>") == text.count('<div id="figure-') - len(report.INTERACTIVE)
    assert "«" not in text and "#num" not in text


def test_the_page_is_dark_where_the_reader_wants_it_and_figures_stay_on_white(built, page):
    page.emulate_media(color_scheme="dark")
    page.goto(built.as_uri())
    page.wait_for_function("window.views.claims", timeout=60000)
    colours = (
        "[document.body, document.querySelector('#figure-claims')].map(one => getComputedStyle(one).backgroundColor)"
    )
    assert page.evaluate(colours) == ["rgb(23, 25, 29)", "rgb(255, 255, 255)"]
    page.emulate_media(color_scheme="light")
    assert page.evaluate(colours)[0] == "rgb(255, 255, 255)"


def test_choices_and_brush_filter_the_points(built, page):
    page.goto(built.as_uri())
    page.wait_for_function("window.views.explore", timeout=60000)

    def count():
        marks = "#figure-explore g.mark-symbol.role-mark path"
        return page.evaluate(f"document.querySelectorAll('{marks}').length")

    everything = count()
    page.select_option("#choices-explore select >> nth=0", label="fourcastnet")
    page.wait_for_timeout(500)
    fewer = count()
    assert 0 < fewer < everything
    page.select_option("#choices-explore select >> nth=0", label="all")
    page.wait_for_timeout(300)
    page.evaluate("document.getElementById('explore').scrollIntoView()")
    box = page.query_selector("#figure-explore svg").bounding_box()
    page.mouse.move(box["x"] + 140, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 330, box["y"] + 250, steps=8)
    page.mouse.up()
    page.wait_for_timeout(500)
    assert count() < everything
    # The figure of the verdicts is drawn beside the ledger, not in its place.
    page.wait_for_function("window.views.claims", timeout=60000)
    page.select_option("#show", label="contradicted")
    visible = page.evaluate("[...document.querySelectorAll('#ledger tbody tr')].filter(row => !row.hidden).length")
    assert 0 < visible < 30 and page.errors == []


@functools.cache
def fitted(workload, system):
    return plan.published_fit(workload, systems.site(system))


def planned(workload, system, devices=None, **limits):
    """What `energynn forecast plan --json` answers within limits."""
    made = fitted(workload, system)
    run = plan.base_run(made, {})
    limits.setdefault("global_batch_size", accuracy.threshold(run))
    return plan.as_json(plan.make(made, run, *plan.grid(made, run, devices), limits))


@pytest.mark.parametrize(
    ("typed", "asked"),
    [
        ({}, {}),
        ({"deadline_h": "3", "most_kWh": "29"}, {"time_h": 3.0, "energy_kWh": 29.0}),
        ({"most_GPUs": 32, "most_batch": "3000"}, {"devices": (1, 32), "global_batch_size": 3000}),
        ({"most_hours": "90", "most_batch": "65536"}, {"gpu_hours": 90.0, "global_batch_size": 65536}),
    ],
)
def test_the_plan_in_the_report_is_that_of_the_command(built, typed, asked):
    spec = json.loads((built.parent / "figures" / "plan.json").read_text())
    expected = planned("resnet50", "horeka-a100", **asked)
    for param in spec["params"]:
        param["value"] = typed.get(param["name"], param.get("value"))
    svg = html.unescape(vl_convert.vegalite_to_svg(spec, vl_version=theme.VEGA_LITE))
    for name, row in expected["choices"].items():
        sizes = f"{row['devices']} GPUs, local batch {row['local_batch_size']}, global batch {row['global_batch_size']}"
        assert re.search(rf">{sizes}:  {row['time_h']['value']:#.3g} h", svg), name
        command = re.search(rf">energynn run (-p [^<]* -p devices {row['devices']} -p local_batch_size [^<]*)<", svg)
        parameters = dict(pair.split() for pair in command.group(1).removeprefix("-p ").split(" -p "))
        run = config.make(**{key: int(text) if text.isdigit() else text for key, text in parameters.items()})
        assert config.run_id(run) == row["run_id"]
    strong = re.findall(
        r'aria-label="time of the training \(h\), model: ([\d.]+); energy[^"]*"[^>]*fill="#0072B2"', svg
    )
    times = [row["time_h"]["value"] for row in expected["pareto"]]
    assert sorted(map(float, strong)) == pytest.approx(sorted(times), rel=1e-4)


def test_the_plan_says_when_nothing_keeps_the_limits(built):
    spec = json.loads((built.parent / "figures" / "plan.json").read_text())
    values = {"workload": "fourcastnet on horeka-h100", "deadline_h": "1"}
    for param in spec["params"]:
        param["value"] = values.get(param["name"], param.get("value"))
    least = planned("fourcastnet", "horeka-h100")["choices"]["fastest"]["time_h"]["value"]
    svg = vl_convert.vegalite_to_svg(spec, vl_version=theme.VEGA_LITE)
    assert f"Nothing keeps these limits. The least alone: {least:#.3g} h" in svg and "energynn run" not in svg


def test_a_click_in_the_plan_gives_its_command_to_copy(built, page):
    page.errors.clear()
    page.goto(built.as_uri())
    page.wait_for_function("window.views.plan", timeout=60000)
    field = "#choices-plan input[type=text]"
    assert page.input_value(field) == ""
    mark = page.query_selector("#figure-plan g.mark-symbol.role-mark path")
    mark.scroll_into_view_if_needed()
    box = mark.bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_function(f"document.querySelector('{field}').value.startsWith('energynn run ')", timeout=10000)
    assert page.input_value(field) in texts(page, "#figure-plan")
    page.fill("#choices-plan input[name=deadline_h]", "0.001")
    page.wait_for_timeout(300)
    assert any("Nothing keeps" in text for text in texts(page, "#figure-plan")) and page.errors == []


@pytest.fixture(scope="module")
def jupyter(synthetic, tmp_path_factory):
    """JupyterLab on a copy of the explorer with its own runs; the address to open."""
    pytest.importorskip("anywidget", reason="pip install anywidget (extra lab) to use the explorer")
    if BROWSER is None:
        pytest.skip("there is no Chromium on this machine")
    folder = tmp_path_factory.mktemp("jupyter")
    synthetic.write_study(folder / "runs")
    notebook = (REPOSITORY / "notebooks" / "90_explore.ipynb").read_text()
    for name, value in (("runs_dir", folder / "runs"), ("build_dir", folder / "build")):
        notebook = re.sub(rf'{name} = \\"\w+\\"', rf'{name} = \\"{value}\\"', notebook)
    (folder / "90_explore.ipynb").write_text(notebook)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}"]
    command += [f"--ServerApp.root_dir={folder}", "--IdentityProvider.token=", "--LabApp.news_url="]
    command += ["--LabApp.expose_app_in_browser=True", "--ServerApp.disable_check_xsrf=True"]
    with open(folder / "log.txt", "w") as log:
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.5)
    yield f"http://127.0.0.1:{port}/lab/tree/90_explore.ipynb"
    server.terminate()
    server.wait(30)


@pytest.mark.slow
def test_a_click_in_jupyterlab_shows_record_and_profile(jupyter, page):
    page.errors.clear(), page.requests.clear()
    page.goto(jupyter)
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=120000)
    page.wait_for_selector("text=/Python 3.*Idle/", timeout=240000, state="attached")
    page.wait_for_timeout(5000)  # a command given while the kernel is being connected is lost
    page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
    page.wait_for_selector(".vega-embed svg g.mark-symbol", timeout=200000, state="attached")
    page.wait_for_timeout(3000)
    before = texts(page, ".vega-embed")
    (upper, *_) = page.query_selector_all(".vega-embed")
    changed = False
    for mark in reversed(upper.query_selector_all("g.mark-symbol.role-mark path")):
        mark.scroll_into_view_if_needed()
        box = mark.bounding_box()
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.wait_for_timeout(1500)
        changed = lines(page, ".vega-embed") > 0 and texts(page, ".vega-embed") != before
        if changed:
            break
    assert changed, "no click changed the lower panels"
    ours = [error for error in page.errors if "vega" in error.lower() or "widget" in error.lower()]
    assert ours == []
    outside = [
        url for url in page.requests if not url.startswith(("http://127.0.0.1", "data:", "blob:", "ws://127.0.0.1"))
    ]
    assert outside == []


def test_results_stand_first_and_are_the_readmes(built):
    """README and report show the same sentences; tests/analysis/test_notebooks.py compares their numbers."""
    report_text = built.read_text()
    assert report_text.index('id="results"') < report_text.index('id="plan"') < report_text.index('id="statements"')
    numbers = json.loads((built.parent / "numbers.json").read_text())
    texts = {name: entry["text"] for name, entry in numbers.items()}
    results = tomllib.loads((report.PAPER / "results.toml").read_text())["result"]
    readme = re.sub(r"<!--\w+-->| \(\[[^)]*\)\)", "", (REPOSITORY / "README.md").read_text())
    for result in results:
        answer = result["answer"].format_map(texts)
        assert f"| {result['question']} | {answer} |" in readme
        assert html.escape(answer) in report_text


@pytest.mark.parametrize(("width", "height_at_most"), [(1440, 9000), (390, 24000)])
def test_the_report_fits_a_desktop_and_a_phone(page, built, width, height_at_most):
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(built.as_uri())
    page.wait_for_function("Object.keys(window.views || {}).length >= 10")
    wide, high = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
    boxes = "[...document.querySelectorAll('.figure')].filter(one => one.scrollWidth > one.clientWidth + 1)"
    sideways = page.evaluate(f"{boxes}.map(one => one.id)")  # figures that scroll in their box
    page.set_viewport_size({"width": 1300, "height": 1400})
    assert wide <= width and high <= height_at_most and sideways == []
