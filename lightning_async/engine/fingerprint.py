"""Fingerprints of tensors, by which replicas learn whether their models are equal to the bit."""

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
    """Return a view of a complex tensor as pairs of real numbers; return other tensors as they are."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


def strided(gradient: Tensor) -> Tensor:
    """Return a gradient as a dense, not lazily conjugated tensor: the gradient itself, if it is one already."""
    return gradient.resolve_conj() if gradient.layout is torch.strided else gradient.to_dense()


def digest(tensors: Iterable[Tensor]) -> int:
    r"""Return a fingerprint of 52 bits, which a float64 holds exactly; equal bits give equal fingerprints.

    .. math:: h = \sum_b p_b \sum_i w_i\, x_{b,i}

    :math:`x_{b,i}` are the words of all tensors as integers, in blocks :math:`b`. The sum over blocks is modulo a
    prime, and :math:`p_b` are powers of a constant. All weights depend on the position, so that a permutation changes
    the fingerprint. All arithmetic is on integers, so that different devices agree.

    >>> digest([torch.tensor([1.0, 2.0])]) == digest([torch.tensor([1.0, 2.0])])
    True
    >>> digest([torch.tensor([0.0])]) == digest([torch.tensor([-0.0])])
    False
    """
    return _combined([block for tensor in tensors for block in _blocks(tensor)])


def digests(tensors: Iterable[Tensor]) -> list[int]:
    return [_combined(_blocks(tensor)) for tensor in tensors]


def is_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all elements are finite; this waits for a GPU once."""
    return bool(all_finite(tensors))


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether all elements are finite, as a bool tensor on their device, without waiting for a GPU."""
    present = [real(_stored(tensor.detach())) for tensor in tensors if tensor.numel()]
    on_cpu = torch.tensor(all(ops.all_finite(tensor) for tensor in present if tensor.device.type == "cpu"))
    on_gpu = [torch.isfinite(tensor).all() for tensor in present if tensor.device.type != "cpu"]
    return torch.stack(on_gpu).all() & on_cpu if on_gpu else on_cpu


def _stored(tensor: Tensor) -> Tensor:
    """Return the stored elements of a tensor; the other elements of a sparse tensor are zero."""
    return tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Return odd weights of 31 bits, whose products with words of 32 bits fit an int64; 2 MiB, cached."""
    weights = (torch.arange(_BLOCK, device=device) * 2_654_435_761 + 40_503) % 2_147_483_647 | 1
    if device.type == "cuda":  # other threads use the cached weights on other streams
        torch.cuda.current_stream(device).synchronize()
    return weights


def _blocks(tensor: Tensor) -> list[Tensor]:
    flat = real(tensor.detach()).contiguous().reshape(-1)
    words = flat.view(_WORDS[flat.element_size()])
    weights = _weights(words.device)
    # All blocks share one buffer for products: allocating one for each costs the host more time than the arithmetic.
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
