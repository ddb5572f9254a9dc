"""Checkpoints on disk and in other ranks' memory: saving, committing, deleting, finding and reading them.

Training waits only while its state is copied into memory. Each rank has a writer process, which writes the copy to
disk. The writer of the first rank commits the checkpoint once all parts are durable. Nothing here knows Lightning.

- `Saver` is one rank's view of all its saves; `Writer` is its channel to the process that writes.
- `CheckpointStore` is the directory of checkpoints; `LocalFiles` and `RemoteFiles` are its file systems.
- `shard` divides a state among ranks, and `load` puts it together again, for any number of ranks.
- `recover` finds the checkpoint to resume from, and `PeerCopySender` sends a rank's state to another rank's memory.

Threads and processes: the training thread copies and polls; `RetentionThread` deletes old checkpoints; a courier thread
sends peer copies; a short-lived thread allocates memory. The writer process imports only the standard library.

Read shards, store and writer first, then writer_process and saver, and last retention and recovery.
"""
