"""Fingerprints of tensors: replicas compare them to learn whether they are one model, to the bit."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_async import ops

_BLOCK = 1 << 18
_PRIME = (1 << 61) - 1
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def real(tensor: Tensor) -> Tensor:
    """Return the same memory as real numbers: a complex tensor as pairs of them, others as they are."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


def strided(gradient: Tensor) -> Tensor:
    """Return the same gradient as a dense tensor in memory of its own."""
    return gradient.resolve_conj() if gradient.layout is torch.strided else gradient.to_dense()


def digest(tensors: Iterable[Tensor]) -> int:
    r"""Return a number of 52 bits, which a float64 holds exactly; equal for equal bits, on any device.

    .. math:: h = \sum_b p_b \sum_i w_i\, x_{b,i}

    :math:`x_{b,i}` are the tensors' words in blocks, as integers. The weights depend on the place, so a permutation
    changes the number. Integer arithmetic only: unlike machines agree.

    >>> digest([torch.tensor([1.0, 2.0])]) == digest([torch.tensor([1.0, 2.0])])
    True
    >>> digest([torch.tensor([0.0])]) == digest([torch.tensor([-0.0])])
    False
    """
    return _combined([block for tensor in tensors for block in _blocks(tensor)])


def digests(tensors: Iterable[Tensor]) -> list[int]:
    return [_combined(_blocks(tensor)) for tensor in tensors]


def is_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all elements are finite; wait for a GPU once."""
    return bool(all_finite(tensors))


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether all elements are finite now, as a bool where the tensors are: no GPU is waited for."""
    present = [real(_stored(tensor.detach())) for tensor in tensors if tensor.numel()]
    on_cpu = torch.tensor(all(ops.all_finite(tensor) for tensor in present if tensor.device.type == "cpu"))
    on_gpu = [torch.isfinite(tensor).all() for tensor in present if tensor.device.type != "cpu"]
    return torch.stack(on_gpu).all() & on_cpu if on_gpu else on_cpu


def _stored(tensor: Tensor) -> Tensor:
    """Return the elements that it has; those that a sparse one lacks are zero."""
    return tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Return odd numbers of 31 bits, so that products with words of 32 bits fit an int64; 2 MiB, kept."""
    weights = (torch.arange(_BLOCK, device=device) * 2_654_435_761 + 40_503) % 2_147_483_647 | 1
    if device.type == "cuda":  # other threads use it on other streams
        torch.cuda.current_stream(device).synchronize()
    return weights


def _blocks(tensor: Tensor) -> list[Tensor]:
    flat = real(tensor.detach()).contiguous().reshape(-1)
    words = flat.view(_WORDS[flat.element_size()])
    weights = _weights(words.device)
    # One place for all products: with new memory for each block the host is busy longer than with the arithmetic.
    room = torch.empty(min(len(words), _BLOCK), dtype=torch.int64, device=words.device)
    products = (torch.mul(part, weights[: len(part)], out=room[: len(part)]) for part in words.split(_BLOCK))
    return [product.sum() for product in products if len(product)]


def _combined(blocks: list[Tensor]) -> int:
    if not blocks:
        return 0
    total = 0
    for value in torch.stack([block.to(blocks[0].device) for block in blocks]).tolist():
        total = (total * 1_000_003 + value) % _PRIME
    return total & ((1 << 52) - 1)
