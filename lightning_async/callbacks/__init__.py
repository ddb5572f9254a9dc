"""Lightning callbacks of this package; each docstring says with which strategies the callback works.

`FaultTolerantCheckpoint` saves without stalling and resumes exactly. `PeerMemory` keeps a rank's own state in another
rank's memory. `DivergenceMonitor` detects diverging training and applies remedies. `HangWatchdog` ends a rank that
makes no progress. `AdaptiveGradientAccumulation` decides on the number of batches in a step. `AveragingMonitor` logs
averaging. The callbacks are thin: the work is in `lightning_async.trainer`, and the equations are in
`lightning_async.algorithms`.

Hooks run on the training thread. Only `HangWatchdog` has a thread of its own. Two modules are parts of others:
`accumulation_steps` of `accumulation`, and `divergence_signals` of `divergence`.
"""
