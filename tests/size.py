"""`make size`: code tokens by folder, tokens a line, rooms, arrows and floors.

A code token is one of Python's tokens that is no comment, no docstring and no end of a line.
"""

import ast
import graphlib
import io
import json
import tokenize
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
NOT_COUNTED = {
    "COMMENT",
    "NL",
    "NEWLINE",
    "INDENT",
    "DEDENT",
    "ENCODING",
    "ENDMARKER",
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstring_lines(source: str) -> set[int]:
    """The numbers of the lines that hold docstrings."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, DOCUMENTED)
            and ast.get_docstring(node, clean=False) is not None
        ):
            lines.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def of_source(source: str) -> tuple[int, int]:
    """Count the code tokens of a source, and the lines that hold them."""
    docstrings = docstring_lines(source)
    tokens, lines, depth = 0, set(), 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        name = tokenize.tok_name[token.type]
        if name not in NOT_COUNTED and token.start[0] not in docstrings:
            tokens += not depth  # of an f-string, whose parts Python 3.12 tells, one
            lines.update(range(token.start[0], token.end[0] + 1))
        depth += (name == "FSTRING_START") - (name == "FSTRING_END")
    return tokens, len(lines)


def notebooks(folder: Path) -> tuple[int, int]:
    """Count the code tokens of all code cells of a folder's notebooks, and their lines."""
    tokens, lines = 0, 0
    for path in folder.glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "code":
                of_cell = of_source("".join(cell["source"]))
                tokens, lines = tokens + of_cell[0], lines + of_cell[1]
    return tokens, lines


def sizes(folder: str) -> dict[str, tuple[int, int]]:
    """Count tokens and lines of code of each part of a folder, and of all of it."""
    parts: dict[str, tuple[int, int]] = {}
    for path in sorted((REPOSITORY / folder).rglob("*.py")):
        names = path.relative_to(REPOSITORY / folder).parts
        tokens, lines = of_source(path.read_text())
        for part in (
            folder,
            f"{folder}/{names[0]}" if len(names) > 1 else f"{folder}/*.py",
        ):
            known = parts.get(part, (0, 0))
            parts[part] = known[0] + tokens, known[1] + lines
    return parts


def imported(path: Path, at_top_only: bool = False) -> set[str]:
    """Full names of what a module imports when it runs; raises ValueError for a relative import."""
    names: set[str] = set()
    nodes: list[ast.AST] = [*ast.parse(path.read_text()).body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise ValueError(f"{path}: a relative import")
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes += node.orelse
        elif not at_top_only:
            nodes += ast.iter_child_nodes(node)
    return names


def module_imports() -> dict[str, set[str]]:
    """Map each module of the package to those that it imports, at its top or within a function.

    What stands in energynn/__init__.py belongs to none.
    """
    paths = {}
    for path in (REPOSITORY / "energynn").rglob("*.py"):
        names = path.relative_to(REPOSITORY).with_suffix("").parts
        paths[".".join(names).removesuffix(".__init__")] = path
    del paths["energynn"]
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        names = imported(path)
        names |= {name.rpartition(".")[0] for name in names}
        graph[module] = names & paths.keys() - {module}
    return graph


def room_imports() -> dict[str, set[str]]:
    """Map each room of the package, a folder or a module beside them, to those that it imports
    from.
    """
    arrows: dict[str, set[str]] = {}
    for module, used in module_imports().items():
        room = module.split(".")[1]
        of_room = arrows.setdefault(room, set())
        of_room |= {name.split(".")[1] for name in used} - {room}
    return arrows


def floors(arrows: dict[str, set[str]]) -> list[set[str]]:
    """Stack the rooms: each stands on the floor above the highest room that it imports from.

    Raises graphlib.CycleError, which names the rooms, where they import each other in a circle.
    """
    heights: dict[str, int] = {}
    for room in graphlib.TopologicalSorter(arrows).static_order():
        heights[room] = 1 + max((heights[used] for used in arrows[room]), default=0)
    return [
        {room for room, height in heights.items() if height == floor}
        for floor in range(1, 1 + max(heights.values()))
    ]


def main() -> None:
    parts = sorted(sizes("energynn").items()) + sorted(sizes("tests").items())
    for part, (tokens, lines) in [
        *parts,
        ("notebooks", notebooks(REPOSITORY / "notebooks")),
    ]:
        print(
            f"{part:22} {tokens:8,} tokens {lines:7,} lines {tokens / lines:6.1f} a line"
        )
    arrows = room_imports()
    stack = floors(arrows)
    number = sum(map(len, arrows.values()))
    print(f"{len(arrows)} rooms, {number} arrows between them, {len(stack)} floors:")
    for floor in reversed(stack):
        print(f"{'':22} {', '.join(sorted(floor))}")


if __name__ == "__main__":
    main()
