"""With this folder on PYTHONPATH, each rank that energynn starts has the imagined GPU."""

import importlib.abc
import importlib.machinery
import sys


class GivesRanksAGPU(importlib.abc.MetaPathFinder):
    """Finds energynn.train.rank as usual, and has its ``run_rank`` done on the imagined GPU."""

    def find_spec(self, name, path, target=None):
        if name != "energynn.train.rank":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def load_and_wrap(module):
            load(module)
            module.run_rank = on_the_gpu(module.run_rank)

        spec.loader.exec_module = load_and_wrap
        return spec


def on_the_gpu(run):
    def run_there(folder):
        import pytest

        from tests.train.imagined_gpu import imagined

        with imagined(pytest.MonkeyPatch()):
            run(folder)

    return run_there


sys.meta_path.insert(0, GivesRanksAGPU())
