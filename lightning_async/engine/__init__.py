"""The engine: exchanges between replicas in the background, each of headers, a payload and a commit.

Each rank has a control plane with a thread of its own. In a header every rank says what it has; all ranks draw the same
decision from all headers, move the payload, and commit it once all have it. An exchange that fails changes nothing, and
is repeated by the live ranks in new groups. The engine knows no algorithm: components register what they move.

- `ControlPlane` holds the shared parts; `EngineLoop` is the engine's thread; `GroupRecovery` forms new groups.
- `EngineComponent` and `RoundType` are the interfaces of components, implemented in `averaging` and `gradients`.
- `Replica` lays a module's tensors out in flat `Buckets`; `SharedState` is the rest of what both threads share.
- `SyncPoints` and `LightningCollectives` serve the training thread where all ranks must meet.

Threads: the training thread writes parameters, packs and merges. The engine's thread serves headers and payloads, and
never writes parameters. Both wait on the one lock `SharedState.changed`.

Read shared_state, buckets and decision first, then control_plane and transfer, and last sync_points and collectives.
"""
