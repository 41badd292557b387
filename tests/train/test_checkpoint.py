import pytest
import torch
from torch import nn

from energynn.train.checkpoint import load_weights, save_weights


def test_weights_come_back(tmp_path):
    path, saved, loaded = tmp_path / "weights.pt", nn.Linear(3, 2), nn.Linear(3, 2)
    save_weights(path, saved, {"size": 3})
    load_weights(path, loaded, {"size": 3})
    assert torch.equal(saved.weight, loaded.weight) and torch.equal(saved.bias, loaded.bias)
    assert [file.name for file in tmp_path.iterdir()] == ["weights.pt"]


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


def test_a_failed_write_keeps_the_old_weights(tmp_path, monkeypatch):
    path, model = tmp_path / "weights.pt", nn.Linear(3, 2)
    save_weights(path, model, {})
    old = path.read_bytes()

    def fail(value, file):
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError):
        save_weights(path, model, {})
    assert path.read_bytes() == old
