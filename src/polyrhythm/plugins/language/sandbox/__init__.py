"""Runs untrusted Python code in a separate process, confined by the kernel (docs/design/environments.md).

Environments use `tool`. `server` runs as a program; it, `child`, `kernel` and `seccomp` import only the standard
library.
"""
