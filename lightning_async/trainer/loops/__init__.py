"""Patches of Lightning's training loop: sync points, optimizer steps, schedulers, signals, logs and timing.

`FitSyncPoints` makes all ranks wait for one another and validate, save or stop together; `CollectiveActions` lets
callbacks act there, on all ranks together. `OptimizerUpdates` takes optimizer steps when a gradient has arrived, and
`AccumulationWindows` accumulates gradients over windows of any length. `LearningRates` and `SharedLearningRates` step
the schedulers. `AveragedModels` makes weight averages (EMA, SWA) equal on all ranks. `Saving` patches
`ModelCheckpoint`, `LoggingFailover` moves logging to the next rank 0, `Preemption` handles SIGTERM, `Pacing` measures
batches, and `loop_state` saves and restores what Lightning's checkpoints lack.

Everything runs on the training thread. Signal handlers only set flags or cast votes. Read `sync_points` first, then
`updates`, `accumulation` and `lr_schedules`; the other modules stand alone.
"""
