"""Long-running fault-injection campaigns, each with its own command. The tests run short forms of them.

Each campaign proves a promise of ``docs/failure-model.md``. ``crash``: "Crash anywhere". ``kill``, ``stop`` and
``exit_status``: "Killed and stopped ranks". ``faults``: "Faults of the disk". ``torn``: "Never torn". ``side_by_side``:
"Jobs side by side".

The others prove promises of other pages. ``fuzz``: corrupt or hostile files are refused with a typed error. ``resume``:
training continues exactly. ``matrix`` and ``optimizers``: any layout loads any other, and
every optimizer continues as if nothing had happened. ``large``: models larger than the
memory of a rank, tensors larger than 2 GiB. ``versions``: the tests pass with every supported Python and torch.
``mutate``: the tests fail if the source is changed at random. ``near`` selects the tests that can reach a change.
"""
