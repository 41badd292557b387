"""Commands of the analysis: claims, paper, compare."""

from __future__ import annotations

from pathlib import Path

from energynn.cli.options import add_build_dir, add_command, add_json, add_runs_dir, require_folder


def add_claims(commands) -> None:
    parser = add_command(commands, claims, "judge the study's statements on published values and on own runs")
    parser.add_argument("--data", type=Path, default=Path("runs"), metavar="DIR", help="folder of own run records")
    add_json(parser)


def claims(options) -> int:
    import json

    from energynn.analysis import claims

    require_folder(options.data)
    verdicts = claims.evaluate(options.data)
    print(json.dumps(verdicts, indent=1) if options.json else claims.report(verdicts))
    return 0


def add_paper(commands) -> None:
    parser = add_command(commands, paper, "merge the numbers of the notebooks, compile paper and report")
    add_build_dir(parser)


def paper(options) -> int:
    from energynn.analysis import numbers, paper, report
    from energynn.reading import one_fault

    with one_fault(options.build_dir):
        numbers.colophon(options.build_dir)
        numbers.merge(options.build_dir)
        print(f"wrote {paper.compile(options.build_dir)} and {report.build(options.build_dir)}")
    return 0


def add_compare(commands) -> None:
    parser = add_command(commands, compare, "compare the default study with the committed reference")
    add_runs_dir(parser)
    add_build_dir(parser)


def compare(options) -> int:
    from energynn.analysis import reference
    from energynn.reading import one_fault

    require_folder(options.runs_dir)
    with one_fault(options.build_dir):
        lines, passed = reference.compare(options.runs_dir, options.build_dir)
    print("\n".join(lines))
    return 0 if passed else 1
