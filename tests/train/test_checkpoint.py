from torch import nn

from energynn.train.checkpoint import load_weights, save_weights
from tests.processes import refused


def test_unusable_weights_are_refused_with_the_remedy(tmp_path):
    path, model = tmp_path / "weights.pt", nn.Linear(3, 2)
    save_weights(path, model, {"depth": 4, "size": 3})
    refused(
        "depth': 4.* here is .*depth': 5.*choose the same sizes",
        load_weights,
        path,
        model,
        {"depth": 5, "size": 3},
    )
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    refused("damaged", load_weights, path, model, {"depth": 4, "size": 3})
