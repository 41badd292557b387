"""`python -m energynn.analysis`: write paper, supplement and report from executed notebooks."""

from pathlib import Path

from energynn.analysis import numbers, paper, report


def main(build_dir: Path) -> None:
    numbers.colophon(build_dir)
    numbers.merge(build_dir)
    written = [*paper.compile(build_dir), report.build(build_dir)]
    print("wrote", ", ".join(map(str, written)))


if __name__ == "__main__":
    try:
        main(Path("build"))
    except ValueError as error:
        raise SystemExit(f"energynn: {error}") from None
