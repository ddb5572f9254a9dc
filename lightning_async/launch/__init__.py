"""The launcher: it starts one process for each rank on this host, supervises them, and starts them again after a death.

Nothing here knows Lightning. The launcher imports the standard library only, so that it starts in a tenth of a second.
It waits for descriptors, times and signals in one loop, on one thread.

- `Supervisor` owns the loop: it hands events to the pure functions of `state_machine`, and performs their actions.
- `Ranks` starts, signals and ends the processes; `Process` is one of them, and `Outputs` passes on what they write.
- `LaunchStore` is the launcher's side of the process that keeps torch's store, which is `store_main`.

Processes: the launcher, one for each rank, and one that keeps the store. The store's process has threads that open the
store and look for hangs.

Read state_machine first, then supervisor, ranks and process, and last store_main.
"""
