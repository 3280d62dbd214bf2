"""Runs untrusted Python code in a separate process, confined by the kernel (docs/design/environments.md).

Environments use `tool`. `server` runs as a program; it and `kernel` import only the standard library.
"""
