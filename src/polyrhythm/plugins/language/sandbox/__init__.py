"""Python code of strangers in a process of its own, confined by the kernel (docs/design/environments.md). `tool` is for
environments; `server` runs as a program of its own and, as `child`, `kernel` and `seccomp`, imports only the standard
library."""
