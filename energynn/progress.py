"""Lines for a person who waits for something long: how much is done, how fast, how long still."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PERIOD_S = 2.0  # between two lines


def meter(label: str, total: float, unit: str, progress: Callable[[str], None] = print) -> Callable[[float], None]:
    """A function to call with each amount done, from any thread; at most every two seconds it tells how it goes.

    ``total`` and the amounts are in ``unit``, for example "GB" or "images".
    """
    lock, begun, done, last = threading.Lock(), time.monotonic(), 0.0, time.monotonic()

    def advance(amount: float) -> None:
        nonlocal done, last
        with lock:
            done += amount
            now = time.monotonic()
            if now - last < PERIOD_S or not done:
                return
            last, rate = now, done / (now - begun)
            left_s = (total - done) / rate
            progress(f"{label}: {done:.6g} of {total:.6g} {unit}, {rate:.3g} {unit}/s, {left_s:.0f} s left")

    return advance
