"""Checkpoints of a fit: what is captured, when ranks save, and how a fit resumes exactly.

`Checkpointing` drives the checkpoints of one fit. Its parts are:

- `CheckpointDirectory` reserves the directory for one training.
- `CheckpointRecovery` chooses the checkpoint to resume from.
- `TrainerState` captures the state that Lightning saves.
- `Resume` and `SafePoints` capture the position within an epoch, which Lightning does not save.
- A `SaveCoordinator` decides when to save: `LockstepSaves`, `AsyncSaves` or `ServerSaves`.

`Peers` stores copies of each rank's own state in the memory of another rank. Files and formats are in
`lightning_async.checkpoint`, which does not import Lightning.

Everything in this package runs on the training thread. A process of its own writes the files, and threads of
`checkpoint.peer_copy` and `comm.peer_storage` send and receive the copies for peers. Read `checkpointing` first, then
`saves`, `checkpoint_state`, `resume` and `safe_points`.
"""
