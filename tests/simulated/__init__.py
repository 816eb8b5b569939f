"""An accelerator in host memory, `simulated:0` to `simulated:3`, whose streams are threads; see `device.cpp`.

For torch it is a device of another package (`PrivateUse1`). Its kernels are those of the CPU, and its time means
nothing. It keeps the order of streams as CUDA does:

- A stream is a thread. An operation that writes to existing tensors, and a non-blocking copy between the device and
  pinned memory, return before they are done. Another stream does not wait for them.
- Freed memory is overwritten at the next allocation on its stream, after that stream's work; memory that
  `record_stream` names, after the work of all its streams. That is the earliest time at which CUDA reuses it.
- Non-blocking copies take 2 ms longer than they need, so that a reader that does not wait for one is too early.
- Operations refuse tensors of different devices, and of the CPU, as CUDA's do.
- There are four devices, of 2 GiB each. A rank takes the one of its local rank; gloo carries the messages
  (`collectives.py`).

It is more lenient than CUDA in three places: an operation that returns new tensors waits for the current stream, a
collective returns when it is done, and a copy between two devices is ordered on the first alone. So a missing wait for
a collective goes unnoticed.

`python -m tests.simulated COMMAND` compiles it, in a quarter of a minute, and runs the command with it; `torchrun` too.
`test_simulated_device.py` runs the tests of `cuda/` and the benchmarks of a device so, and moves a run between two
ranks of it and a CPU. Each of these mutations makes some of the tests fail: a save without its wait for the stream of
training, for a copy into the staging memory, for one into the buffer of a writer; a step that does not wait for the
copies; copies on the stream of training; tensors that may change at any time not copied first; checksums of replicas
read at once; a load that does not wait for the work on its memory.
"""
