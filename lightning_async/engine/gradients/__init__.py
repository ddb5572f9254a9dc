"""Means of gradients as a component of the engine, for synchronous steps and for windows in the background.

Each replica sends its gradients as one message. The mean of all messages, weighted by samples, replaces the gradients
on every rank. In a synchronous step, gradients are sent while the backward pass computes others. In a `Window`, the
gradients of several batches are summed, and sent together while the next window fills.

- `SynchronousGradients` is the component, for the training thread. `GradientRounds` is its round type.
- `Overlap` (training thread) and `InParts` (engine's thread) share the gradients of a backward pass in an `Outgoing`.
- `GradientResiduals` keeps the error of compressed gradients for the next message.

Read the modules in this sequence: reduction, window, overlap, compression.
"""
