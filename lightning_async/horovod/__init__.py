"""Everything of Horovod: a plugin of the package's interfaces, loaded by name when a user asks for it.

`HorovodCollectives` implements the collectives of `lightning_async.comm` over a `HorovodWorld`, and `HorovodTransport`
the transport of averaging and gradient strategies. `HorovodStrategy` is synchronous training, whose gradients a
`GradientReducer` averages within the backward pass. `fit_elastic` is Horovod Elastic, and `build` compiles Horovod for
the installed torch. Nothing outside of this folder imports Horovod.

Horovod has threads of its own, to which operations are submitted by name; here any thread that waits for an operation
may advance it, under the lock of its `Flight`. Read `collectives` first, then `transport`, `reducer`, `strategy` and
`elastic`.
"""
