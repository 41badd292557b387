"""energynn: what does it cost, in energy, time and accuracy, to train on more GPUs?"""

import importlib

__version__ = "0.2.0"
# The Python interface; each is imported when it is first used.
_PLACES = {name: "energynn.interface" for name in ("load", "table", "trace", "compare")}
_PLACES |= {name: "energynn.measure.window" for name in ("window", "Window")}


def __getattr__(name: str):
    if name not in _PLACES:
        raise AttributeError(f"module 'energynn' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
