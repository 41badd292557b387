"""The published code's operations, and how much memory a forward pass keeps for the backward pass;
for tests and for the bench.
"""

import torch

from energynn.train import afno


def every_activation_kept(mlp: afno.MLP, x: torch.Tensor) -> torch.Tensor:
    """In place of ``MLP.forward``: the same from torch's own layers, which keep GELU's output,
    too.
    """
    return mlp.fc2(torch.nn.functional.gelu(mlp.fc1(x)))


class PublishedFilter(torch.nn.Module):
    """The filter of one of our blocks with the published code's operations (networks/afnonet.py,
    AFNO2D).
    """

    def __init__(self, ours: afno.FourierFilter):
        super().__init__()
        self.ours = ours

    def forward(self, x):
        (n, h, w, channels), ours = x.shape, self.ours
        blocks, size = ours.w1.shape[1:3]
        z = torch.fft.rfft2(x, dim=(1, 2), norm="ortho").reshape(
            n, h, w // 2 + 1, blocks, size
        )
        total = h // 2 + 1
        kept = int(total * ours.hard_thresholding_fraction)
        rows, columns = slice(total - kept, total + kept), slice(kept)
        first, second = ([torch.zeros_like(z.real) for _ in range(2)] for _ in range(2))

        def layer(real, imaginary, weight, bias, part):
            signs = (1, -1) if part == 0 else (1, 1)
            products = [torch.einsum("...bi,bio->...bo", real, weight[part])]
            products.append(
                torch.einsum("...bi,bio->...bo", imaginary, weight[1 - part])
            )
            return signs[0] * products[0] + signs[1] * products[1] + bias[part]

        z = z[:, rows, columns]
        for part in (0, 1):
            first[part][:, rows, columns] = torch.relu(
                layer(z.real, z.imag, ours.w1, ours.b1, part)
            )
        passed = [part[:, rows, columns] for part in first]
        for part in (0, 1):
            second[part][:, rows, columns] = layer(*passed, ours.w2, ours.b2, part)
        z = torch.nn.functional.softshrink(
            torch.stack(second, dim=-1), ours.sparsity_threshold
        )
        z = torch.view_as_complex(z).reshape(n, h, w // 2 + 1, channels)
        return torch.fft.irfft2(z, s=(h, w), dim=(1, 2), norm="ortho") + x


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
