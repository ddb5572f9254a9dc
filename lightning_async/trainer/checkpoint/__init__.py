"""Checkpoints of a fit: what is captured, when ranks save, and how a fit resumes exactly.

`Checkpointing` drives the checkpoints of one fit. Its parts are `CheckpointDirectory` (one directory for one training),
`CheckpointRecovery` (which checkpoint to resume from), `TrainerState` (the state that Lightning saves), `Resume` and
`SafePoints` (the position within an epoch, which Lightning does not save), and one `SaveCoordinator`: `LockstepSaves`,
`AsyncSaves` or `ServerSaves`. `Peers` keeps copies of each rank's own state in the memory of another rank. Files and
formats are in `lightning_async.checkpoint`, which knows no Lightning.

Everything here runs on the training thread. Files are written by a process of their own, and copies to peers are sent
and received by threads of `checkpoint.peer_copy` and `comm.peer_storage`. Read `checkpointing` first, then `saves`,
`checkpoint_state`, `resume` and `safe_points`.
"""
