"""Every operation in plain torch: this is the specification that the native libraries meet.

Elementwise operations are built from single-rounding ones (no ``alpha=``, no `torch.lerp`: those are fused to one
rounding on some processors and not on others), so that equal results are defined, to the bit. Any NaN equals any NaN.
Sums of squares are float64, and equal within rounding.

All functions run without autograd, and write through torch's in-place operations only, so that the version counters
move and a backward pass over overwritten values fails instead of returning wrong gradients.
"""
