"""Counts what this process and those that it forks ask of a folder, as they ask it: no cache answers before.

Python tells of most calls by its audit events; os.stat, os.lstat and os.fsync are counted by a function around them. A
sitecustomize.py that imports this module counts a process from its first line on. FOLDER is what is counted, OUT where
each process leaves what it asked, and when, at its end.
"""

import atexit
import json
import os
import sys
import time

FOLDER, OUT = os.environ.get("COUNTED_FOLDER"), os.environ.get("COUNTED_OUT")
AUDITED = ("open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.mkdir", "os.link", "os.rmdir")
calls: list[tuple[float, str]] = []


def _note(kind: str, what) -> None:
    if isinstance(what, int):
        what = os.readlink(f"/proc/self/fd/{what}")
    if isinstance(what, str | os.PathLike) and str(what).startswith(FOLDER):
        calls.append((time.monotonic(), kind))


def _audit(event: str, arguments: tuple) -> None:
    if event in AUDITED or event == "fcntl.flock":
        _note(event.removeprefix("os.").removeprefix("fcntl."), arguments[0])


def _counted(function, kind: str):
    def counted(what, *more, **named):
        _note(kind, what)
        return function(what, *more, **named)

    return counted


def leave() -> None:
    """Write what was counted; a process that was forked calls it itself."""
    with open(f"{OUT}/{os.uname().nodename}-{os.getpid()}.json", "w") as file:
        json.dump(calls, file)


if FOLDER:
    sys.addaudithook(_audit)
    os.stat, os.lstat, os.fsync = (
        _counted(os.stat, "stat"),
        _counted(os.lstat, "stat"),
        _counted(os.fsync, "fsync"),
    )
    atexit.register(leave)
