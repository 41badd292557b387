"""`python -m energynn.analysis`: write paper, supplement and report from executed notebooks."""

from pathlib import Path

from energynn.analysis import numbers, paper, report


def main(build_dir: Path) -> None:
    numbers.write_colophon(build_dir)
    numbers.merge_tables(build_dir)
    written = [*paper.compile_manuscripts(build_dir), report.build_report(build_dir)]
    print("wrote", ", ".join(map(str, written)))


if __name__ == "__main__":
    try:
        main(Path("build"))
    except ValueError as error:
        raise SystemExit(f"energynn: {error}") from None
