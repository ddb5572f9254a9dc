"""The samples of an epoch when ranks are lost or join, in terms of Lightning's loops.

`EpochAssignment` knows each rank's part of the epoch and its position. `LostRankData` redistributes the parts of lost
ranks, `JoinerData` gives a joining rank its part, and `EmptyShards` carries ranks without data through an epoch.
`SamplerResize` divides later epochs among the present ranks, and `UnevenEvaluation` and `ConsistentMetrics` do the
same for validations and metrics. `JoinState` is the state of Lightning that a joining rank takes over. The arithmetic
of partitions is in `lightning_async.data`, which knows no Lightning.

Everything runs on the training thread, except `JoinState.prepare_for`. The engine's thread reads positions, so these
are replaced as a whole. Read `epoch_data` first, then `samplers` and `join`.
"""
