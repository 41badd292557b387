"""energynn: what does it cost, in energy, time and accuracy, to train on more GPUs?"""

from typing import TYPE_CHECKING

__all__ = [
    "Window",
    "compare",
    "epochs",
    "load",
    "log_epoch",
    "phases",
    "table",
    "trace",
    "window",
]
__version__ = "0.3.0.dev0"

if TYPE_CHECKING:
    from energynn.analysis.interface import compare, epochs, load, table, trace
    from energynn.measure.window import Window, log_epoch, phases, window
else:

    def __getattr__(name):
        """Import a name of the Python interface when it is first used."""
        if name not in __all__:
            raise AttributeError(f"module 'energynn' has no attribute {name!r}")
        try:
            from energynn.measure import window as place

            if not hasattr(place, name):
                from energynn.analysis import interface as place
        except ModuleNotFoundError as error:
            raise ImportError(f"{error}; `pip install {__path__[0]}/..`") from error
        return getattr(place, name)
