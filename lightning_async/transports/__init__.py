"""Transports: who starts the ranks, and what moves their bytes.

A `Transport` is a value that a strategy is given. For each run it opens a `Connection`, which holds the communicators,
the membership and Lightning's collectives of all ranks. `TorchTransport` uses torch.distributed, with ranks that
torchrun, SLURM, mpirun or Lightning starts. `HorovodTransport` is in `lightning_async.horovod`. `choose_transport`
returns the transport for a name such as "auto".

There are no threads here, except those of the membership and the launcher's `Listener`, which a connection starts and
ends. Read `base` first, then `torch` and `resolve`.
"""
