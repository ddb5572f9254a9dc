"""Everything of Horovod: a plugin of the package's interfaces, loaded by name when a user asks for it.

`HorovodCollectives` implements the collectives of `lightning_async.comm` over a `HorovodWorld`, and `HorovodTransport`
the transport of averaging and gradient strategies. `HorovodStrategy` is synchronous training, whose gradients a
`GradientReducer` averages within the backward pass. `fit_elastic` is Horovod Elastic, and `build` compiles Horovod for
the installed torch. Nothing outside of this folder imports Horovod.

Horovod executes operations on a thread of its own; they are submitted to it by name. In this package, any thread that
waits for an operation may submit the operation's next piece, while it holds the lock of the operation's `Flight`.

Read `collectives` first, then `transport`, `reducer`, `strategy` and `elastic`.
"""
