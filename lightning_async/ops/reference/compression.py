"""Compressed messages with error feedback, in plain torch.

All encoders encode ``v = source + residual`` and keep ``residual = v - decoded``, so that the part that a message could
not hold is sent with the next one. Codes hold NaN for a value that is not finite; codes with scales hold NaN for all
values of that value's block. Receivers therefore notice it, and the residual of these elements is reset to zero, so
that the next message is not affected. `topk_` sends values that are not finite unchanged, before all others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_async.ops.reference.buckets import weighted_sum_

# Number of elements that share a scale.
BLOCK = 256
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def blocks(numel: int) -> int:
    """Return the number of blocks in a message of ``numel`` elements. Each block has one scale."""
    return -(-numel // BLOCK)


def _expand(scales: Tensor, numel: int) -> Tensor:
    return scales.repeat_interleave(BLOCK)[:numel]


def _finite_or_zero(rest: Tensor) -> Tensor:
    return torch.where(rest.isfinite(), rest, torch.zeros_like(rest))


def _decode(codes: Tensor, scales: Tensor | None) -> Tensor:
    return codes.float() if scales is None else codes.float() * _expand(scales, codes.numel())


@torch.no_grad()
def quantize_(codes: Tensor, scales: Tensor | None, source: Tensor, residual: Tensor) -> None:
    r"""Encode in int8 or fp8 with one scale per 256 elements, or in bf16, with error feedback.

    .. math::
        v &= x + r, & \sigma_b &= \max_{j \in b} |v_j| / M, & q_j &= \mathrm{round}(v_j / \sigma_b), &
        r_j &\leftarrow v_j - q_j \sigma_b

    with :math:`M` = 127 for int8 and 448 for fp8 (e4m3); bf16 has no scale. ``decoded + residual = v``, exactly. A
    finite value that bf16 would round to infinity becomes the largest finite bf16 value of its sign.

    Args:
        codes: :math:`q`, int8, float8_e4m3fn or bfloat16, shape (n,); overwritten.
        scales: :math:`\sigma`, fp32, shape (ceil(n / 256),); overwritten. None for bfloat16.
        source: :math:`x`, fp32, shape (n,).
        residual: :math:`r`, fp32, shape (n,), zeros at first; updated in place.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: Shapes or devices do not fit, or tensors are not contiguous or overlap.

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022, https://arxiv.org/abs/2110.02861;
    error feedback: Karimireddy et al., 2019, https://arxiv.org/abs/1901.09847

    >>> codes, scales, rest = torch.zeros(2, dtype=torch.int8), torch.zeros(1), torch.zeros(2)
    >>> quantize_(codes, scales, torch.tensor([127.0, 1.25]), rest)
    >>> codes.tolist(), scales.tolist(), rest.tolist()
    ([127, 1], [1.0], [0.0, 0.25])
    """
    residual.add_(source)
    if scales is None:
        codes.copy_(residual)
        cut = residual.view(torch.int32).bitwise_right_shift(16).to(torch.int16).view(torch.bfloat16)
        codes.copy_(torch.where(codes.isinf(), cut, codes))
        codes.masked_fill_(~residual.isfinite(), torch.nan)
        residual.copy_(_finite_or_zero(residual - codes.float()))
        return
    numel = residual.numel()
    largest = LARGEST[codes.dtype]
    padded = torch.nn.functional.pad(residual, (0, blocks(numel) * BLOCK - numel)).view(-1, BLOCK)
    magnitude = padded.abs().amax(dim=1) if numel else scales.new_empty(0)
    magnitude.masked_fill_(~magnitude.isfinite(), torch.nan)
    # The divisor is a tensor, because with a number some devices multiply by its rounded inverse.
    scales.copy_(magnitude / torch.full_like(magnitude, largest))
    each = _expand(scales, numel)
    scaled = torch.where(each > 0, (residual / each).clamp(-largest, largest), torch.zeros_like(residual))
    codes.copy_(scaled.round() if codes.dtype == torch.int8 else scaled)
    residual.copy_(_finite_or_zero(residual - _decode(codes, scales)))


@torch.no_grad()
def dequantize_average_(out: Tensor, codes: Tensor, scales: Tensor | None, weights: Tensor) -> None:
    r"""Decode the messages of K peers and add them up with weights, in one pass.

    .. math:: o \leftarrow \sum_{k=1}^K w_k\, (q_k \sigma_k)

    Args:
        out: :math:`o`, fp32, shape (n,); overwritten.
        codes: :math:`q`, shape (K, n), made by `quantize_`.
        scales: :math:`\sigma`, fp32, shape (K, ceil(n / 256)), or None, made by `quantize_`.
        weights: :math:`w`, fp32, shape (K,).

    Raises as `quantize_` does.

    >>> out = torch.zeros(1)
    >>> dequantize_average_(out, torch.tensor([[2], [4]], dtype=torch.int8), torch.ones(2, 1), torch.tensor([0.5, 0.5]))
    >>> out
    tensor([3.])
    """
    rows = [_decode(q, scales[k] if scales is not None else None) for k, q in enumerate(codes)]
    weighted_sum_(out, rows, weights)


@torch.no_grad()
def requantize_average_(
    out_codes: Tensor,
    out_scales: Tensor | None,
    residual: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    weights: Tensor,
) -> None:
    r"""Compute the weighted sum as `dequantize_average_` does, and encode it as `quantize_` does, in one pass.

    Args:
        out_codes: Codes of the sum, shape (n,), of the same dtype as ``codes``; overwritten.
        out_scales: Scales of the sum, as in `quantize_`; overwritten.
        residual: Residual of this encoding, which is added to the sum, fp32, shape (n,); updated in place.
        codes: As in `dequantize_average_`.
        scales: As in `dequantize_average_`.
        weights: As in `dequantize_average_`.

    Raises as `quantize_` does.

    Source: the server's error feedback of Tang et al., "DoubleSqueeze", 2019, https://arxiv.org/abs/1905.05957

    >>> codes, scales, rest = torch.zeros(1, dtype=torch.int8), torch.zeros(1), torch.zeros(1)
    >>> peers = torch.tensor([[127], [127]], dtype=torch.int8)
    >>> requantize_average_(codes, scales, rest, peers, torch.ones(2, 1), torch.tensor([0.5, 0.5]))
    >>> codes.item(), scales.item(), rest.item()
    (127, 1.0, 0.0)
    """
    mean = torch.empty_like(residual)
    dequantize_average_(mean, codes, scales, weights)
    quantize_(out_codes, out_scales, mean, residual)


@torch.no_grad()
def quantize_2bit_(codes: Tensor, source: Tensor, residual: Tensor, threshold: float) -> None:
    r"""Encode each element as one of :math:`0, +t, -t` in 2 bits, with error feedback.

    .. math:: v = x + r, \qquad q = t\,[v \ge t] - t\,[v \le -t], \qquad r \leftarrow v - q

    Code 1 is :math:`+t`, 2 is :math:`-t`, 3 NaN. Element :math:`4j + i` lies in bits :math:`2i` and :math:`2i + 1` of
    byte :math:`j`.

    Args:
        codes: uint8, shape (ceil(n / 4),); overwritten.
        source: :math:`x`, fp32, shape (n,).
        residual: :math:`r`, fp32, shape (n,), zeros at first; updated in place.
        threshold: :math:`t`, positive.

    Raises:
        TypeError: As in `quantize_`.
        ValueError: As in `quantize_`, or ``threshold`` is not positive.

    Source: MXNet's gradient compression, after Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud
    Computing", 2015

    >>> codes, rest = torch.zeros(1, dtype=torch.uint8), torch.zeros(3)
    >>> quantize_2bit_(codes, torch.tensor([0.75, -2.0, 0.25]), rest, 0.5)
    >>> codes.item(), rest.tolist()
    (9, [0.25, -1.5, 0.25])
    """
    residual.add_(source)
    each = (residual >= threshold).to(torch.uint8) + 2 * (residual <= -threshold).to(torch.uint8)
    each.masked_fill_(~residual.isfinite(), 3)
    padded = torch.nn.functional.pad(each, (0, -each.numel() % 4)).view(-1, 4)
    codes.copy_(padded[:, 0] | padded[:, 1] << 2 | padded[:, 2] << 4 | padded[:, 3] << 6)
    residual.copy_(_finite_or_zero(residual - _decode_2bit(codes, residual.numel(), threshold)))


def _decode_2bit(codes: Tensor, numel: int, threshold: float) -> Tensor:
    each = torch.stack([(codes >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1).flatten()[:numel]
    values = torch.tensor([0.0, threshold, -threshold, torch.nan], device=codes.device)
    return values[each.long()]


@torch.no_grad()
def dequantize_2bit_average_(out: Tensor, codes: Tensor, weights: Tensor, threshold: float) -> None:
    r"""Decode the 2-bit messages of K peers and add them up with weights, in one pass.

    Args:
        out: fp32, shape (n,); overwritten.
        codes: uint8, shape (K, ceil(n / 4)), made by `quantize_2bit_`.
        weights: fp32, shape (K,).
        threshold: As in `quantize_2bit_`.

    Raises as `quantize_2bit_` does.

    >>> out = torch.zeros(3)
    >>> dequantize_2bit_average_(out, torch.tensor([[9]], dtype=torch.uint8), torch.tensor([1.0]), 0.5)
    >>> out.tolist()
    [0.5, -0.5, 0.0]
    """
    weighted_sum_(out, [_decode_2bit(row, out.numel(), threshold) for row in codes], weights)


@torch.no_grad()
def topk_(values: Tensor, indices: Tensor, source: Tensor, residual: Tensor) -> None:
    r"""Take the k elements of largest magnitude out of ``v = source + residual``; the residual keeps the others.

    NaN counts as the largest. Of equal magnitudes the first are taken. The indices are in ascending order.

    Args:
        values: fp32, shape (k,); overwritten.
        indices: int64, shape (k,); overwritten.
        source: fp32, shape (n,), n at least k.
        residual: fp32, shape (n,), zeros at first; updated in place.

    Raises:
        TypeError: As in `quantize_`.
        ValueError: As in `quantize_`, or k is above n.

    Source: Stich et al., "Sparsified SGD with Memory", 2018, https://arxiv.org/abs/1809.07599

    >>> values, indices, rest = torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.zeros(3)
    >>> topk_(values, indices, torch.tensor([1.0, -3.0, 2.0]), rest)
    >>> values.item(), indices.item(), rest.tolist()
    (-3.0, 1, [1.0, 0.0, 2.0])
    """
    residual.add_(source)
    order = residual.view(torch.int32) & 0x7FFFFFFF  # the magnitudes, as integers of the same order
    order = torch.where(residual.isnan(), 0x7FC00000, order)
    taken = order.sort(descending=True, stable=True).indices[: values.numel()].sort().values
    indices.copy_(taken)
    values.copy_(residual[taken])
    residual[taken] = 0.0


@torch.no_grad()
def topk_accumulate_(out: Tensor, values: Tensor, indices: Tensor, weight: float) -> None:
    r"""Add one peer's selected elements, :math:`o_{i_j} \leftarrow o_{i_j} + w\, v_j`.

    Args:
        out: fp32, shape (n,); updated in place.
        values: fp32, shape (k,), made by `topk_`.
        indices: int64, shape (k,), made by `topk_`, without duplicates.
        weight: :math:`w`.

    Raises:
        IndexError: An index is out of range.
        TypeError: As in `quantize_`.
        ValueError: As in `quantize_`.

    >>> out = torch.zeros(3)
    >>> topk_accumulate_(out, torch.tensor([-3.0]), torch.tensor([1]), 0.5)
    >>> out.tolist()
    [0.0, -1.5, 0.0]
    """
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < out.numel():
        raise IndexError(f"`indices` must be in [0, {out.numel()}).")
    out[indices] = out[indices] + values * weight
