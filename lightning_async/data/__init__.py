"""Data for training that can be resumed exactly: positions in loaders, partitions of datasets, and redistribution.

Nothing here knows Lightning. A *position* is the state of an iteration over a loader, in plain values, so that a
checkpoint can hold it. A *partition* divides an epoch among replicas. *Redistribution* gives the samples of an epoch
that lost ranks had not trained on to the live ranks.

- `Source` saves the position of one loader, and begins at a saved one; `iterate` does this for torch's DataLoader.
- `Partition` and its classes divide samples; `PartitionedSampler` and `PartitionedStream` yield one replica's part.
- `DataShard` is one rank's share of an epoch; `inherited` and `streamed` redistribute its rest.
- `Generators` and `Tape` save and repeat random numbers.

There are no threads; parts of `random_states` run in the worker processes of loaders. Read partition and
stateful_loader first, then iterators and random_states, and last redistribution.
"""
