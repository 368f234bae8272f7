"""Several kernels on one machine: a test bed of hosts with page caches, locks and clocks of their own.

Each host is a User Mode Linux kernel, which boots in seconds as a process and uses this machine's files. One host
serves a folder over NFS, the others mount it. ``docs/test-bed.md`` has the results.

Scenes: ``pages`` (writes of adjacent ranges of one file), ``locks``, ``leftovers``, ``names``, ``faults`` (restarts of
the server, hosts that are cut off), ``failures`` (saves meanwhile), ``folders``, ``jobs``, ``saves`` and ``histories``.
``--mounts`` selects ``nfs4.2``, ``nfs3``, ``9p``, ``9p-loose``, ``fuse`` and ``fuse-writeback``; ``--times`` the number
of files, saves, histories or seconds; ``--seed`` the first history.

Requirements: Linux on x86-64, root, ``/dev/net/tun``, network namespaces with bridges; ``iproute2``, ``e2fsprogs``,
``gcc``, and ``apt-get`` with Debian's packages, which ``setup`` unpacks into ``~/.cache/rankless-hosts`` (42 MB; it
installs nothing); in ``/dev/shm`` 512 MB for the server and 1.2 GB for each client. Without them a scene prints the
reason and ends.

- A scene runs in namespaces of its own, and ends with its process. If it is killed, its two temporary folders stay.
- Each host has the machine's root as a read-only layer, and a writable layer in memory: do not edit the working tree
  during a scene. Calls of the campaign use a second network: ``Machine.worker()``, ``Worker.call(function, …)``.
  ``Machine.kill()`` is a power failure.
- The server's disk is a file with ext4, exported with ``sync``. The lease of NFS 4 and the grace period are 10 s
  instead of 90 s.
- ``fuse`` and ``fuse-writeback`` are libfuse's ``passthrough_ll`` on an NFS 4.2 mount, without and with the write-back
  cache. It returns ``ESTALE`` for a new file with the inode number of a removed one, so ``saves`` removes no
  checkpoints there. ``9p`` is diod with ``cache=none``; ``9p-loose`` has ``cache=loose``.
- A client forgets at a restart which servers its ``rpc.statd`` watched, so NFS 3 locks of a killed client stay.
"""
