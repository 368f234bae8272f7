"""The local tier on several hosts: a demo, and measurements.

A host is a set of namespaces of this machine: it has its own processes, network device and ``/dev/shm``, and can be
destroyed at once. All hosts share one kernel, and a disk of limited speed.

It needs root, ``iproute2``, ``util-linux``, ``e2fsprogs``, cgroups of version 1, and about 10 GB of free memory for 2
GB. The output of the demo is in ``demo_run/hosts``. An elastic ``torchrun`` there needs

- ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``. Otherwise ranks that were started again found the addresses of dead ones;
- a script that ends with a status other than 0 after SIGTERM. Otherwise ``torchrun`` on other hosts takes the training
  for finished;
- a timeout of the process group: a host without power closes no connection.
"""
