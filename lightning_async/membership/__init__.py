"""Membership: which ranks are live, how they meet and join, and the store through which they learn it.

`Membership` is one rank's heartbeat and its view of the others. It publishes a `Record` in a `HeartbeatStore`, and a
`FailureDetector` decides who is lost. A `Generation` says which ranks form one set of process groups. `startup` is how
ranks meet at the start, and `JoinBoard` how a rank joins later. `LocalProcessWatch` and `LivenessProbes` see the end of
a process at once. `launcher_channel` talks with the launcher, `StatusPublisher` publishes what each rank does,
`StoreProcess` lets the store outlive rank 0, and `Seal` signs everything in the store.

Each membership has one heartbeat thread, the status has another, and a `Listener` reads the launcher's messages.
Each class with a thread has a lock, which protects everything that the thread shares with callers.

Read `generation` first, then `failure_detector` (decisions without I/O), `membership` and `heartbeat_store`, and after
these `startup` and `join_protocol`. `launcher_channel` imports no torch, because the launcher runs without it.
"""
