from collections import OrderedDict

import pytest
import torch
from torch import nn

from energynn.train.afno import AFNO
from energynn.train.checkpoint import load_weights, save_weights
from tests.processes import refused


def test_unusable_weights_are_refused_with_the_remedy(tmp_path):
    path, model = tmp_path / "weights.pt", nn.Linear(3, 2)
    refused("weights.pt is missing .*; move its folder", load_weights, path, model, {})
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


def test_published_checkpoints_load(tmp_path):
    """As the published code writes them: from DistributedDataParallel, with a norm that the
    network never uses.
    """
    kind = dict(
        img_size=(8, 16), patch_size=4, in_chans=3, out_chans=3, depth=2, num_blocks=4
    )
    ours = AFNO(**kind, embed_dim=16)
    state = {
        f"module.{name}": torch.randn_like(values)
        for name, values in ours.state_dict().items()
    }
    state |= {"module.norm.weight": torch.ones(16), "module.norm.bias": torch.zeros(16)}
    torch.save({"epoch": 3, "model_state": OrderedDict(state)}, tmp_path / "weights.pt")
    load_weights(tmp_path / "weights.pt", ours, {"embed_dim": 16})
    found = ours.state_dict().items()
    assert all(torch.equal(values, state[f"module.{name}"]) for name, values in found)
    with pytest.raises(RuntimeError, match="size mismatch for pos_embed"):
        load_weights(
            tmp_path / "weights.pt", AFNO(**kind, embed_dim=32), {"embed_dim": 32}
        )
