"""Communication: moving bytes between ranks, and between a worker and its server.

Nothing here knows training. There are two kinds of communication. *Collectives* join all ranks of a group, and every
operation is asynchronous, with a deadline. *Channels* join two processes that take turns.

- `Collectives` and `ElasticCollectives` are the interfaces of collectives. `TorchCollectives` implements them by
  torch's process groups. `StagedCollectives` adds GPUs to collectives that move host memory only.
- `PeerChannel` is the interface of a channel. `Dial` is the interface of an object that opens channels to one peer:
  `ShmDial` within a host, `PairDial` between hosts.
- `PeerStore` stores bytes of other ranks in memory. `encode` and `decode` turn values into bytes and back.

Threads: an operation may be completed by a thread of torch, by a helper thread that waits in torch, or by the thread
that asks whether the operation is done. A `PeerStore` has a thread that accepts connections, and one for each
connection.

Read collectives first, then torch_collectives, torch_groups and torch_rendezvous, and after them p2p and p2p_gloo.
"""
