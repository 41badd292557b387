from collections import OrderedDict

import pytest
import torch
from torch import nn

from energynn.models.afno import AFNO
from energynn.train import checkpoint
from energynn.train.checkpoint import load_weights, save_weights
from energynn.train.distributed import World


def test_unusable_weights_are_refused_with_the_remedy(tmp_path):
    path, model = tmp_path / "weights.pt", nn.Linear(3, 2)
    with pytest.raises(ValueError, match="no weights in .*weights.pt; make that run first"):
        load_weights(path, model, {})
    save_weights(path, model, {"depth": 4, "size": 3})
    with pytest.raises(ValueError, match="depth 4 there, 5 here"):
        load_weights(path, model, {"depth": 5, "size": 3})
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="is damaged"):
        load_weights(path, model, {"depth": 4, "size": 3})


def test_published_checkpoints_load(tmp_path):
    """As the published code writes them: from DistributedDataParallel, with a norm that the network never uses."""
    kind = dict(img_size=(8, 16), patch_size=4, in_chans=3, out_chans=3, depth=2, num_blocks=4)
    ours = AFNO(**kind, embed_dim=16)
    state = {f"module.{name}": torch.randn_like(values) for name, values in ours.state_dict().items()}
    state |= {"module.norm.weight": torch.ones(16), "module.norm.bias": torch.zeros(16)}
    torch.save({"epoch": 3, "model_state": OrderedDict(state)}, tmp_path / "weights.pt")
    load_weights(tmp_path / "weights.pt", ours, {"embed_dim": 16})
    found = ours.state_dict().items()
    assert all(torch.equal(values, state[f"module.{name}"]) for name, values in found)
    with pytest.raises(ValueError, match=r"another architecture \(size mismatch for pos_embed"):
        load_weights(tmp_path / "weights.pt", AFNO(**kind, embed_dim=32), {"embed_dim": 32})


def test_a_checkpoint_of_another_network_or_number_of_devices_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(
        checkpoint.distributed.dist,
        "all_gather_object",
        lambda found, own: found.__setitem__(slice(None), [own] * len(found)),
    )
    monkeypatch.setattr(checkpoint.distributed, "barrier", lambda world: None)
    cpu = torch.device("cpu")

    def checkpoints(size, ranks=1):
        model = nn.Linear(size, 2)
        parts = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
        return checkpoint.Checkpoints(tmp_path, World(0, ranks, 0, cpu, "h"), 0, parts)

    checkpoints(3).save(10)
    assert checkpoints(3).load() == (10, {})
    for other, message in (
        (checkpoints(4), "000010.pt: of another network or optimizer .size mismatch for weight.*or delete"),
        (checkpoints(3, ranks=2), "000010.pt: of 1 devices, not 2"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            other.load()
        assert "\n" not in str(caught.value)


