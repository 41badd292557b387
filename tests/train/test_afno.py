"""The AFNO against a reference in float64 by the published code's operations."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from energynn.train import afno
from energynn.train.afno import AFNO, FourierFilter
from tests.processes import refused
from tests.published_afno import (
    PublishedFilter,
    bytes_saved_for_backward,
    every_activation_kept,
)

SMALL = dict(channels=3, embed_dim=16, depth=2, num_blocks=4)


def normalized(x, norm):
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, 1e-6)


def reference_network(model, state, patch):
    n, _, height, width = state.shape
    h, w = height // patch, width // patch
    patches = model.patch_embed.proj
    x = F.conv2d(state, patches.weight, patches.bias, stride=patch)
    x = x.movedim(1, -1) + model.pos_embed.reshape(1, h, w, -1)
    for block in model.blocks:
        x = x + PublishedFilter(block.filter)(normalized(x, block.norm1))
        x = x + every_activation_kept(block.mlp, normalized(x, block.norm2))
    x = (x @ model.head.weight.T).reshape(n, h, w, patch, patch, -1)
    result = state.new_empty(n, x.shape[-1], height, width)
    for a in range(patch):
        for b in range(patch):
            result[:, :, a::patch, b::patch] = x[:, :, :, a, b].movedim(-1, 1)
    return result


@pytest.mark.parametrize("fraction", [1.0, 0.6, 0.1])
@pytest.mark.parametrize(
    "grid, patch", [((16, 16), 4), ((12, 40), 4), ((24, 8), 2), ((6, 14), 2)]
)
def test_network_is_the_formula(grid, patch, fraction):
    torch.manual_seed(1)
    model = AFNO(
        grid,
        patch,
        hard_thresholding_fraction=fraction,
        sparsity_threshold=0.05,
        **SMALL,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            # large enough that each part of the formula matters
            parameter += 0.2 * torch.randn_like(parameter)
        state = torch.randn(2, 3, *grid)
        result = model(state)
        expected = reference_network(model.double(), state.double(), patch)
    assert result.shape == (2, 3, *grid)
    assert (result - expected).abs().max() < 2e-5 * expected.abs().max()


def test_full_size_has_the_published_parameters():
    with torch.device("meta"):
        model = AFNO((720, 1440), 8, 20, 768, 12, 4.0)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == 74_690_304
    # published, with the LayerNorm that it never uses
    assert count + 2 * 768 == 74_691_840
    # their names and axes: those that reference_network takes
    assert model.pos_embed.shape == (1, 16200, 768)
    assert model.patch_embed.proj.weight.shape == (768, 20, 8, 8)
    assert model.blocks[11].filter.w1.shape == (2, 8, 96, 96)


def test_impossible_sizes_are_refused():
    refused("patch_size: 4 .* 61 x 120", AFNO, (61, 120), 4, **SMALL)


def test_less_is_kept_for_the_backward_pass_at_no_matrix_product(monkeypatch):
    """The paper's widths: at least a quarter less by default, at least four fifths by the
    option.
    """
    state = torch.randn(1, 20, 176, 352)
    kept, gradients, flops = {}, {}, {}
    for name in ("default", "option", "everything"):
        if name == "everything":
            monkeypatch.setattr(afno.MLP, "forward", every_activation_kept)
        torch.manual_seed(0)
        model = AFNO((176, 352), depth=2, activation_checkpointing=name == "option")
        kept[name] = bytes_saved_for_backward(model, state)
        with FlopCounterMode(display=False) as counter:
            model(state).square().mean().backward()
        gradients[name] = [parameter.grad for parameter in model.parameters()]
        flops[name] = counter.get_total_flops()
    assert kept["default"] < 0.75 * kept["everything"]
    assert kept["option"] < 0.2 * kept["everything"]
    assert flops["default"] == flops["everything"] < flops["option"]
    assert all(map(torch.equal, gradients["option"], gradients["default"]))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("hidden_dim", [48, 1600])
def test_the_two_layers_are_those_of_torch(hidden_dim, autocast):
    """Same output and gradients, bit by bit, also where autocast makes the products of bfloat16."""
    torch.manual_seed(0)
    mlp, x = afno.MLP(16, hidden_dim), torch.randn(2, 3, 5, 16, requires_grad=True)
    results = []
    for forward in (afno.MLP.forward, every_activation_kept):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = forward(mlp, x)
        results.append(
            (
                output,
                *torch.autograd.grad(output.square().sum(), (x, *mlp.parameters())),
            )
        )
    assert results[0][0].dtype == (torch.bfloat16 if autocast else torch.float32)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_second_backward_pass_is_refused_where_the_first_has_used_up_what_was_kept():
    """Its gradients would be wrong."""
    output = afno.MLP(16, 48)(torch.randn(2, 16, requires_grad=True)).sum()
    output.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_the_corrected_filter_lets_every_zonal_mode_pass():
    """A wave of the shortest zonal length: stopped by the published filter on a grid twice as
    wide as high.
    """
    passed = {}
    for modes in ("published", "zonal"):
        torch.manual_seed(0)
        filter_ = FourierFilter(8, 2, 0.0, 1.0, modes)
        wave = (
            torch.cos(torch.pi * torch.arange(24.0))
            .expand(1, 12, 24)[..., None]
            .expand(1, 12, 24, 8)
        )
        passed[modes] = (
            (filter_(wave) - filter_(torch.zeros_like(wave)) - wave).abs().max().item()
        )
    assert passed["published"] < 1e-6 < 1e-4 < passed["zonal"]


def small_afno():
    return AFNO((12, 24), 4, **SMALL)


def test_a_compiled_network_does_not_make_its_transforms_in_each_step():
    """On a GPU every one of them would be a copy from the CPU."""
    network, x, called = small_afno(), torch.randn(1, 3, 12, 24), []

    def backend(graph, _inputs):
        called.extend(
            node.target for node in graph.graph.nodes if node.op == "call_function"
        )
        return graph.forward

    compiled = torch.compile(network, backend=backend)(x)
    assert torch.bmm in called and not {torch.arange, torch.outer} & set(called)
    torch.testing.assert_close(compiled, network(x))


def test_a_network_that_forecast_first_can_be_trained_later():
    network, x = small_afno(), torch.randn(1, 3, 12, 24)
    afno._make_fourier_matrices.cache_clear()
    with torch.inference_mode():
        network(x)
    network(x).sum().backward()
    assert all(weight.grad is not None for weight in network.parameters())
