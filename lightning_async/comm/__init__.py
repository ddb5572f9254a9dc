"""Communication: moving bytes between ranks, and between a worker and its server.

Nothing here knows training. There are two kinds of communication. *Collectives* join all ranks of a group, and every
operation is asynchronous, with a deadline. *Channels* join two processes that take turns.

- `Collectives` and `ElasticCollectives` are the interfaces; `TorchCollectives` implements them by torch's process
  groups, and `StagedCollectives` adds GPUs to a transport that moves host memory only.
- `PeerChannel` and `Dial` are the interfaces of channels: `ShmDial` within a host, `PairDial` between hosts.
- `PeerStore` keeps bytes of other ranks in memory; `encode` and `decode` turn values into bytes.

Threads: an operation may be completed by a thread of torch, by a helper thread that waits in torch, or by the thread
that asks whether it is done. A `PeerStore` has a thread that accepts connections, and one for each connection.

Read collectives first, then torch_collectives, torch_groups and torch_rendezvous, and after them p2p and p2p_gloo.
"""
