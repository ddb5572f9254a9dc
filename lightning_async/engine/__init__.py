"""The engine: exchanges of data between replicas, in the background.

Each rank has a control plane with a thread of its own. An exchange has three phases. In the first, every rank sends a
header, a short message that says what data it has ready and whether it waits at a sync point. From the headers of all
ranks, every rank computes the same decision. In the second phase, ranks exchange the payload, for example the
parameters of a round. In the third, each rank commits the exchange: its result becomes final once all ranks have the
payload. An exchange that fails changes nothing, and is repeated by the live ranks in new groups. The engine knows no
algorithm: components, such as model averaging and gradient averaging, register what they exchange.

- `ControlPlane` holds what all components share; `EngineLoop` is the engine's thread; `GroupRecovery` forms new groups.
- `EngineComponent` and `RoundType` are the interfaces of components, implemented in `averaging` and `gradients`.
- `Consensus` is the component of all strategies: it makes one model of all replicas at sync points.
- `ReplicaEngine` is what the training thread of every strategy uses of the engine.
- `Replica` lays a module's tensors out in flat `Buckets`. `SharedState` is all else that the two threads below share.
- `SyncPoints` and `LightningCollectives` are for the training thread, where it must wait for all other ranks.

Threads: the training thread writes parameters, packs them into buckets, and merges results into them. The engine's
thread exchanges headers and payloads, and never writes parameters. Both wait on the one lock `SharedState.changed`.

Read shared_state, buckets and decision first, then control_plane and transfer, then sync_points, consensus and
replica_engine, and last collectives.
"""
