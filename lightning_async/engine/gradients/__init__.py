"""Sums of gradients as a component of the engine, for synchronous steps and for windows in the background.

Each replica's gradients are one message, and their mean, weighted by samples, replaces them on every rank. In a
synchronous step, gradients are sent while the backward pass computes others. In a `Window`, the gradients of several
batches are gathered and sent together while the next window fills.

- `SynchronousGradients` is the component, for the training thread; `GradientRounds` is its round type.
- `Overlap` (training thread) and `InParts` (engine's thread) share the gradients of a pass in an `Outgoing`.
- `GradientResiduals` keeps the error of compressed gradients for the next message.

Read reduction first, then window, overlap and compression.
"""
