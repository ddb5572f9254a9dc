"""Transports: who starts the ranks, and what moves their bytes.

A `Transport` is a value that a strategy is given. For each run it opens a `Connection`, which holds the communicators,
the membership and Lightning's collectives of all ranks. `TorchTransport` uses torch.distributed, with ranks of
torchrun, SLURM, mpirun or Lightning. `HorovodTransport` is in `lightning_async.horovod`. `choose_transport` finds the
transport for a name such as "auto".

There are no threads here, except those of the membership and the launcher's `Listener`, which a connection starts and
ends. Read `base` first, then `torch` and `resolve`.
"""
