"""All knowledge of Lightning's internals: patches of its loops, launchers, data loading and checkpoints.

Lightning assumes that all ranks take the same steps. The patches here let replicas be asynchronous between sync points,
and let ranks be lost and join. `LoopPatches` installs all patches of one fit on one Trainer, and undoes them at its
end. `StrategyView` lists what the patches read of a strategy, and `StepRunner` is the base of a strategy's steps. Each
patch replaces one method of one object by `namespace.override`; nothing is changed globally.

Everything runs on the training thread, except signal handlers, the watch of child processes
(`environment.subprocess_launcher`), and methods that say so.

Read `namespace` first, then `strategy_view` and `step_runner`, `loop_patches`, and the folders in this order: `loops`
(sync points and steps), `environment` (launchers and settings), `data` (who trains on which samples), `checkpoint`.
"""
