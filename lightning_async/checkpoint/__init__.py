"""Checkpoints on disk and in other ranks' memory: saving, committing, deleting, finding and reading them.

Training waits only while its state is copied into memory. Each rank has a writer process, which writes the copy to
disk. The first rank's writer process commits the checkpoint once all ranks' parts are durable. This package does not
import Lightning.

- `Saver` manages all saves of one rank; `Writer` is its channel to the writer process.
- `CheckpointStore` is the directory of checkpoints; `LocalFiles` and `RemoteFiles` are its file systems.
- `shard` divides a state among ranks, and `load` puts the state together again, for any number of ranks.
- `recover` finds the checkpoint to resume from, and `PeerCopySender` sends a rank's state to another rank's memory.

Threads and processes: the training thread copies the state, and polls for results; `RetentionThread` deletes old
checkpoints; the thread of `PeerCopySender` sends copies; the short-lived thread of `Growth` allocates memory. The
writer process imports only the standard library.

Read shards, store and writer first, then writer_process and saver, and last retention and recovery.
"""
