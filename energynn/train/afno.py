"""AFNO, the network of FourCastNet: patches are mixed in Fourier space, channels by a small
network per patch.

Shapes: N batch, C channels, H W grid, h w patches, E embedding, B blocks, S = E / B channels of a
block, m modes. Names of parameters and numerics are those of the published FourCastNet (Pathak et
al. 2022, github.com/NVlabs/FourCastNet, networks/afnonet.py); the code is our own.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint


class AFNO(nn.Module):
    """Map a state (N, C, H, W) to the next.

    A difference to the published network: it has a final LayerNorm that it never uses; ours has
    not, so that DistributedDataParallel finds every parameter used. ``filter_options`` are those of
    ``FourierFilter``. Raises ValueError if patches do not fit the grid.
    """

    def __init__(
        self,
        img_size: tuple[int, int] = (720, 1440),
        patch_size: int = 8,
        channels: int = 20,
        embed_dim: int = 768,
        depth: int = 12,
        mlp_ratio: float = 4.0,
        activation_checkpointing: bool = False,
        **filter_options,
    ):
        super().__init__()
        self.activation_checkpointing = activation_checkpointing
        height, width = img_size
        if height % patch_size or width % patch_size:
            raise ValueError(
                f"patch_size: {patch_size} does not divide the grid of {height} x {width}"
            )
        self.img_size = img_size
        self.patch_size = patch_size
        self.patches = (height // patch_size, width // patch_size)
        self.patch_embed = PatchEmbedding(channels, embed_dim, patch_size)
        self.pos_embed = nn.Parameter(
            torch.zeros(1, self.patches[0] * self.patches[1], embed_dim)
        )
        self.blocks = nn.ModuleList(
            AfnoBlock(embed_dim, mlp_ratio, **filter_options) for _ in range(depth)
        )
        self.head = nn.Linear(embed_dim, channels * patch_size**2, bias=False)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        h, w = self.patches
        p = self.patch_size
        x = self.patch_embed(x) + self.pos_embed  # N, h w, E
        x = x.unflatten(1, (h, w))
        for block in self.blocks:
            # Keeping only the blocks' inputs and computing the rest again costs a forward pass,
            # and saves memory.
            again = self.activation_checkpointing and torch.is_grad_enabled()
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        x = self.head(x)  # N, h, w, p p C
        # N, C, h, p, w, p
        x = x.reshape(len(x), h, w, p, p, -1).permute(0, 5, 1, 3, 2, 4)
        return x.reshape(len(x), -1, *self.img_size)


class PatchEmbedding(nn.Module):
    def __init__(self, channels: int, embed_dim: int, patch_size: int):
        super().__init__()
        self.proj = nn.Conv2d(
            channels, embed_dim, kernel_size=patch_size, stride=patch_size
        )

    def forward(self, x: Tensor) -> Tensor:  # N, C, H, W -> N, h w, E
        # The convolution as a matrix product: its patches do not overlap, and on a CPU this takes
        # half the time.
        n, c, height, width = x.shape
        p1, p2 = self.proj.kernel_size
        patches = x.reshape(n, c, height // p1, p1, width // p2, p2).permute(
            0, 2, 4, 1, 3, 5
        )
        return F.linear(
            patches.reshape(n, -1, c * p1 * p2),
            self.proj.weight.flatten(1),
            self.proj.bias,
        )


class AfnoBlock(nn.Module):
    """Filter between patches, then a two-layer network within each, both with a skip connection
    ("double skip").
    """

    def __init__(self, embed_dim: int, mlp_ratio: float, **filter_options):
        super().__init__()
        self.norm1 = nn.LayerNorm(embed_dim, eps=1e-6)
        self.filter = FourierFilter(embed_dim, **filter_options)
        self.norm2 = nn.LayerNorm(embed_dim, eps=1e-6)
        self.mlp = MLP(embed_dim, int(embed_dim * mlp_ratio))

    def forward(self, x: Tensor) -> Tensor:  # N, h, w, E
        x = x + self.filter(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class MLP(nn.Module):
    def __init__(self, embed_dim: int, hidden_dim: int):
        super().__init__()
        self.fc1 = nn.Linear(embed_dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        tensors = (x, self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
        if torch.is_autocast_enabled(x.device.type):
            # it would cast for the products, but not for their gradients
            tensors = (
                tensor.to(torch.get_autocast_dtype(x.device.type)) for tensor in tensors
            )
        return TwoLayersWithoutActivations.apply(*tensors)


class TwoLayersWithoutActivations(torch.autograd.Function):
    """Apply two linear layers with GELU between them, whose output is computed again in the
    backward pass.

    It is the largest tensor of a block and the output of its cheapest function.
    ``torch.utils.checkpoint`` would do the same at more cost: here GELU's gradient takes the
    place of its output's, too.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor
    ) -> Tensor:
        rows = x.flatten(0, -2)
        hidden = F.linear(rows, weight1, bias1)
        ctx.save_for_backward(x, weight1, weight2, hidden)
        output = F.linear(F.gelu(hidden), weight2, bias2)
        return output.reshape(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, ...]:
        x, weight1, weight2, hidden = ctx.saved_tensors
        rows = x.flatten(0, -2)
        gradient = gradient.flatten(0, -2)
        of_hidden = gradient @ weight2
        torch.ops.aten.gelu_backward.grad_input(of_hidden, hidden, grad_input=of_hidden)
        # in its input's place, which is read no more: torch refuses a second backward pass
        output = torch.ops.aten.gelu_(hidden)
        of_x = (of_hidden @ weight1).reshape(x.shape)
        of_weight1 = of_hidden.t() @ rows
        of_weight2 = gradient.t() @ output
        return of_x, of_weight1, of_hidden.sum(0), of_weight2, gradient.sum(0)


class FourierFilter(nn.Module):
    """Apply two complex layers, block-diagonal over channels, to each Fourier mode of the patch
    grid.

    Quirks of the published filter, kept because its weights were trained with them: the number of
    modes kept is computed from the h rows and applied to the columns, too (on 90 x 180 patches
    only 46 of 91 zonal modes pass); with a fraction below 1 the rows kept surround row h // 2,
    the highest frequency, not the lowest; and the filter's input is added to its output.
    ``filter_modes="zonal"`` corrects the first two: every column up to the fraction of its own
    number passes, and the rows of the lowest frequencies, of both signs.
    """

    def __init__(
        self,
        embed_dim: int,
        num_blocks: int = 8,
        sparsity_threshold: float = 0.01,
        hard_thresholding_fraction: float = 1.0,
        filter_modes: str = "published",
    ):
        super().__init__()
        self.filter_modes = filter_modes
        self.sparsity_threshold = sparsity_threshold
        self.hard_thresholding_fraction = hard_thresholding_fraction
        size = embed_dim // num_blocks
        # The first index is the real and the imaginary part.
        self.w1 = nn.Parameter(0.02 * torch.randn(2, num_blocks, size, size))
        self.b1 = nn.Parameter(0.02 * torch.randn(2, num_blocks, size))
        self.w2 = nn.Parameter(0.02 * torch.randn(2, num_blocks, size, size))
        self.b2 = nn.Parameter(0.02 * torch.randn(2, num_blocks, size))

    def forward(self, x: Tensor) -> Tensor:  # N, h, w, E
        n, h, w, channels = x.shape
        blocks = self.w1.shape[1]
        first, rows, columns = self.passing_modes(h, w)
        zonal, inverse_zonal, meridional = _transforms(
            h, w, first, rows, columns, x.device
        )
        z = _multiply_each(zonal, x.float().reshape(n * h, w, channels))
        z = _multiply_each(meridional, z.reshape(n, 2 * h, columns * channels))
        # The two layers are in the precision that surrounds them.
        # For each block and mode the real parts, then the imaginary ones: (B, m, 2 S).
        z = z.reshape(n, rows, 2, columns, blocks, channels // blocks)
        z = z.permute(4, 0, 1, 3, 2, 5).reshape(
            blocks, n * rows * columns, 2 * channels // blocks
        )
        z = F.relu(_complex_layer(z, self.w1, self.b1))
        z = F.softshrink(
            _complex_layer(z, self.w2, self.b2).float(), self.sparsity_threshold
        )
        z = z.reshape(blocks, n, rows, columns, 2, channels // blocks).permute(
            1, 2, 4, 3, 0, 5
        )
        z = z.reshape(n, 2 * rows, columns * channels)
        z = _multiply_each(meridional.t(), z)
        z = _multiply_each(inverse_zonal, z.reshape(n * h, 2 * columns, channels))
        return z.reshape(x.shape).to(x.dtype) + x

    def passing_modes(self, h: int, w: int) -> tuple[int, int, int]:
        """Return the first meridional frequency that passes, how many do, and how many zonal
        ones.
        """
        share = self.hard_thresholding_fraction
        if self.filter_modes == "zonal":
            half = math.ceil(h / 2 * share)
            first = max(0, h // 2 - half)
            end = min(h, h // 2 + half + 1)
            return first - h // 2, end - first, math.ceil((w // 2 + 1) * share)
        total = h // 2 + 1
        kept = int(total * share)
        first = max(0, total - kept)
        end = min(h, total + kept)
        return first, end - first, min(max(kept, 1), w // 2 + 1)


# a compiled network holds them; else it would make them in each step
@torch.compiler.assume_constant_result
def _transforms(*sizes: int | torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the matrices of ``_make_fourier_matrices``, made once; without gradients they may be
    needed with them later.
    """
    with torch.inference_mode(False):
        return _make_fourier_matrices(*sizes)


@functools.lru_cache(maxsize=8)
def _make_fourier_matrices(
    h: int, w: int, first: int, rows: int, columns: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Make matrices of the zonal transform (2 columns, w), its inverse (w, 2 columns), and the
    meridional one.

    ``torch.fft`` with norm="ortho" gives the same, but for rounding; channels lie innermost,
    where products are faster, and only the modes that pass are computed. Complex numbers are
    pairs: of the zonal modes all real parts come first, of a row and a frequency the real part.
    The meridional inverse is the transpose. The zonal one counts each mode for its conjugate,
    too, but the mean and the shortest wave. The meridional one is (2 rows, 2 h).
    """
    column = torch.arange(columns)
    angle = _dft_angles(column, w)
    zonal = torch.cat((angle.cos(), -angle.sin())) / math.sqrt(w)
    twice = 2 - ((column == 0) | (2 * column == w)).double()
    inverse_zonal = (zonal * twice.repeat(2)[:, None]).t()
    angle = _dft_angles(torch.arange(first, first + rows), h)
    cosine = angle.cos()
    sine = angle.sin()
    pairs = torch.stack((cosine, sine, -sine, cosine), dim=-1) / math.sqrt(h)
    meridional = pairs.reshape(rows, h, 2, 2).transpose(1, 2).reshape(2 * rows, 2 * h)
    matrices = (zonal, inverse_zonal, meridional)
    return tuple(matrix.float().to(device) for matrix in matrices)


def _dft_angles(frequencies: Tensor, points: int) -> Tensor:
    """Return the phase of each frequency at each of the points of a circle."""
    product = torch.outer(frequencies, torch.arange(points))
    return 2 * math.pi / points * product.double()


def _multiply_each(matrix: Tensor, z: Tensor) -> Tensor:
    """Multiply each matrix of a batch from the left by the same one, in float32 whatever surrounds
    that.
    """
    with torch.autocast(z.device.type, enabled=False):
        return torch.bmm(matrix.expand(len(z), -1, -1), z)


def _complex_layer(z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute weight times z plus bias, all complex: z (B, m, 2 S) has real before imaginary
    parts.

    weight (2, B, S, S), bias (2, B, S). A real matrix of twice the size instead of a complex one:
    one product.
    """
    real, imaginary = weight
    of_real = torch.cat((real, imaginary), dim=-1)
    of_imaginary = torch.cat((-imaginary, real), dim=-1)
    matrix = torch.cat((of_real, of_imaginary), dim=1)
    offset = bias.movedim(0, 1).reshape(len(real), 1, -1)
    return torch.baddbmm(offset, z, matrix)
