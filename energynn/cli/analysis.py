"""Commands of the analysis: show, compare, export, number, claims, paper, reference."""

from __future__ import annotations

from pathlib import Path

from energynn.cli.options import (
    add_build_dir,
    add_command,
    add_json,
    add_run,
    add_runs_dir,
    find_run,
    reply,
    require_folder,
    runs_dir,
    tell,
)


def add_claims(commands) -> None:
    text = "judge the study's statements on published values and on own runs"
    parser = add_command(commands, claims, text, "energynn claims | less")
    parser.add_argument("--data", type=Path, default=runs_dir(), metavar="DIR", help="folder of own run records")
    add_json(parser)


def claims(options) -> int:
    from energynn.analysis import claims

    require_folder(options.data)
    verdicts = claims.evaluate(options.data)
    reply(options, verdicts, claims.report(verdicts))
    return 0


def add_paper(commands) -> None:
    text = "merge the numbers of the notebooks, compile paper and report; `make paper` executes the notebooks first"
    parser = add_command(commands, paper, text, "energynn paper")
    add_build_dir(parser)


def paper(options) -> int:
    from energynn.analysis import numbers, paper, report
    from energynn.reading import one_fault

    with one_fault(options.build_dir):
        numbers.colophon(options.build_dir)
        numbers.merge(options.build_dir)
        written = [*paper.compile(options.build_dir), report.build(options.build_dir)]
        tell(f"wrote {', '.join(map(str, written))}")
    return 0


def add_reference(commands) -> None:
    text = "check the default study against the committed reference: PASS or FAIL for each band"
    parser = add_command(commands, reference, text, "energynn reference")
    add_runs_dir(parser)
    add_build_dir(parser)


def reference(options) -> int:
    from energynn.analysis import reference
    from energynn.reading import one_fault

    require_folder(options.runs_dir)
    with one_fault(options.build_dir):
        lines, passed = reference.compare(options.runs_dir, options.build_dir)
    tell("\n".join(lines))
    return 0 if passed else 1


def add_show(commands) -> None:
    text = "one run: energy, time, metrics, and whether they are valid"
    parser = add_command(commands, show, text, "energynn show resnet50-photographs-n2")
    add_run(parser, dest="run")
    add_json(parser)
    add_runs_dir(parser)


def show(options) -> int:
    from energynn import records
    from energynn.launch import command

    run_dir = find_run(options.run, options.runs_dir)
    record = records.read_record(run_dir)
    lines = [command.report(record)]
    lines += [f"  {name}: {value:.6g}" for name, value in record.get("metrics", {}).items()]
    reply(options, record, "\n".join([*lines, f"  {run_dir}"]))
    return 0


def add_compare(commands) -> None:
    text = "two or more runs side by side: times, energies, metrics, and what of their configurations differs"
    parser = add_command(commands, compare, text, "energynn compare resnet50-photographs-n1 resnet50-photographs-n2")
    add_run(parser, dest="runs", nargs="+")
    add_json(parser)
    add_runs_dir(parser)


def compare(options) -> int:
    import json

    from energynn import interface

    table = interface.compare(*[find_run(run, options.runs_dir) for run in options.runs])
    rows = json.loads(table.reset_index().to_json(orient="records"))
    reply(options, {"rows": rows}, _side_by_side(table))
    return 0


BESIDE = 3  # runs beside each other on 80 columns; further ones stand below


def _side_by_side(table) -> str:
    runs = [name for name in table if not name.startswith("ratio")]
    numbers = {run: f"run {number}" for number, run in enumerate(runs, start=1)}
    lines = [f"{number}  {run}" for run, number in numbers.items()]
    width = 30 // min(len(runs), BESIDE)
    for begin in range(0, len(runs), BESIDE):
        shown = runs[begin : begin + BESIDE]
        is_last = begin + BESIDE >= len(runs)
        heads = "".join(f"{numbers[run]:>{width}}" for run in shown)
        lines.append(f"{'':28}{heads}" + (f"  {numbers[shown[-1]]} / run 1" if is_last else ""))
        for quantity, row in table.iterrows():
            cells = "".join(f"{_short(row[run], width - 1):>{width}}" for run in shown)
            lines.append(f"{quantity:28}{cells}" + (_ratio_text(row) if is_last else ""))
    return "\n".join([*lines, "in brackets: 95 %, statistical, without errors that sensors or models share"])


def _short(value, width: int) -> str:
    if value is None or value != value:
        return ""
    text = f"{value:.{min(5, width - 5)}g}" if isinstance(value, float) else str(value)
    return f"{value:.3g}" if len(text) > width and isinstance(value, int) else text[:width]


def _ratio_text(row) -> str:
    if row.get("ratio") is None or row["ratio"] != row["ratio"]:
        return ""
    interval = f" [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]" if row.get("ratio_low", 0) > 0 else ""
    return f"  {row['ratio']:.3f}{interval}"


def add_export(commands) -> None:
    text = "all runs, own and published, as one table for other programs"
    parser = add_command(commands, export, text, "energynn export --csv build/runs.csv")
    formats = parser.add_mutually_exclusive_group(required=True)
    for name in ("csv", "netcdf", "parquet"):
        formats.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"the table as {name}")
    add_runs_dir(parser)


def export(options) -> int:
    from energynn import interface

    require_folder(options.runs_dir)
    written, number = interface.export(options.runs_dir, options.csv, options.netcdf, options.parquet)
    tell(f"{written}: {number} runs; each says its origin and its provenance")
    return 0


def add_number(commands) -> None:
    text = "where a number of the paper comes from: value, source, notebook"
    parser = add_command(commands, number, text, "energynn number slope_ResNet50")
    parser.add_argument("name", metavar="NAME", help="as in build/numbers.json, or a part of it to list such names")
    add_build_dir(parser)


def number(options) -> int:
    from energynn.config import suggestion
    from energynn.reading import json_table

    path = options.build_dir / "numbers.json"
    if not path.is_file():
        raise ValueError(f"number: {path} is not there; `make paper` writes it")
    numbers = json_table(path)
    if options.name in numbers:
        found = numbers[options.name]
        tell(f"{options.name} = {found['text']} {found['unit']} ({found['provenance']})")
        tell(f"  from {found['source']}\n  by notebooks/{found['notebook']}.ipynb")
        return 0
    alike = [name for name in numbers if options.name.lower() in name.lower()]
    if not alike:
        near = suggestion(options.name, numbers)
        raise ValueError(f"number: no number of the paper is called {options.name!r}{near}")
    for name in alike:
        tell(f"{name} = {numbers[name]['text']} {numbers[name]['unit']}")
    return 0
