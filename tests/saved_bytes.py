"""How much memory a forward pass keeps for the backward pass; for a test and for the bench."""

import torch

from energynn.train import afno


def every_activation_kept(mlp: afno.MLP, x: torch.Tensor) -> torch.Tensor:
    """In place of ``MLP.forward``: the same from torch's own layers, which keep GELU's output,
    too.
    """
    return mlp.fc2(torch.nn.functional.gelu(mlp.fc1(x)))


def bytes_saved_for_backward(model: torch.nn.Module, state: torch.Tensor) -> int:
    """Bytes of what ``model(state)`` keeps besides parameters and the input, each storage
    counted once.
    """
    known = {
        tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), state)
    }
    kept = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            # held, so that its address is not given away again
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        result = model(state)
    del result
    return sum(storage.nbytes() for storage in kept.values())
