"""Every operation in plain torch: the specification that the native libraries meet.

Elementwise operations are built from operations with a single rounding, so that results are defined to the bit. They
use no ``alpha=`` and no `torch.lerp`, which have one rounding on some processors and two on others. Any NaN equals any
NaN. Sums of squares are float64, and equal within rounding.

All functions run without autograd, and write through torch's in-place operations only, which increment the version
counters of tensors. Therefore a backward pass that needs overwritten values fails instead of returning wrong gradients.

`buckets` has lists of tensors and flat buckets, `compression` the messages, and `server` the steps of parameter
servers.
"""
