"""Allow-list of system calls for sandboxed code on x86-64: computing, memory, files by descriptor and path, time.

All other calls fail with EPERM: those that create a process or thread, start a program, open a socket, send a signal,
trace another process, or change owners, modes and limits.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from polyrhythm.plugins.language.sandbox.kernel import PR_SET_NO_NEW_PRIVS, Lacking, call, prctl

#: fmt: off
_ALLOWED = {
    "read": 0,
    "write": 1,
    "open": 2,
    "close": 3,
    "stat": 4,
    "fstat": 5,
    "lstat": 6,
    "poll": 7,
    "lseek": 8,
    "mmap": 9,
    "mprotect": 10,
    "munmap": 11,
    "brk": 12,
    "rt_sigaction": 13,
    "rt_sigprocmask": 14,
    "rt_sigreturn": 15,
    "pread64": 17,
    "pwrite64": 18,
    "readv": 19,
    "writev": 20,
    "access": 21,
    "pipe": 22,
    "select": 23,
    "sched_yield": 24,
    "mremap": 25,
    "madvise": 28,
    "dup": 32,
    "dup2": 33,
    "pause": 34,
    "nanosleep": 35,
    "getitimer": 36,
    "alarm": 37,
    "setitimer": 38,
    "getpid": 39,
    "exit": 60,
    "uname": 63,
    "fsync": 74,
    "fdatasync": 75,
    "ftruncate": 77,
    "getcwd": 79,
    "chdir": 80,
    "rename": 82,
    "mkdir": 83,
    "rmdir": 84,
    "creat": 85,
    "unlink": 87,
    "readlink": 89,
    "umask": 95,
    "gettimeofday": 96,
    "getrlimit": 97,
    "getrusage": 98,
    "sysinfo": 99,
    "times": 100,
    "getuid": 102,
    "getgid": 104,
    "geteuid": 107,
    "getegid": 108,
    "getppid": 110,
    "sigaltstack": 131,
    "gettid": 186,
    "time": 201,
    "futex": 202,
    "sched_getaffinity": 204,
    "getdents64": 217,
    "fadvise64": 221,
    "clock_gettime": 228,
    "clock_getres": 229,
    "clock_nanosleep": 230,
    "exit_group": 231,
    "openat": 257,
    "mkdirat": 258,
    "newfstatat": 262,
    "unlinkat": 263,
    "renameat": 264,
    "readlinkat": 267,
    "faccessat": 269,
    "pselect6": 270,
    "ppoll": 271,
    "set_robust_list": 273,
    "dup3": 292,
    "pipe2": 293,
    "getcpu": 309,
    "renameat2": 316,
    "getrandom": 318,
    "statx": 332,
    "rseq": 334,
    "faccessat2": 439,
}
#: fmt: on
#: Calls that fail with an error of their own, so that callers take another way.
_OTHER_ERRORS = {16: errno.ENOTTY, 435: errno.ENOSYS}  # ioctl, clone3
#: fcntl: duplicates and flags, but no owner, to whom a signal would be sent, and no lock.
_FCNTL, _FCNTL_COMMANDS = 72, (0, 1, 2, 3, 4, 1030)
#: prlimit64: limits are read, not set.
_PRLIMIT = 302

_AUDIT_X86_64, _X32 = 0xC000003E, 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
#: Places in what a filter is given: the call's number, the machine, the low half of argument i, the high one.
_NUMBER, _MACHINE = 0, 4
_SET_FILTER, _PR_SET_SECCOMP = 2, 22


def _low(argument: int) -> int:
    return 16 + 8 * argument


def filter_program() -> bytes:
    """The filter in classic BPF. Lacking: no filter exists for this machine."""
    if platform.machine() != "x86_64":
        raise Lacking("seccomp", f"there is no list of system calls for {platform.machine()}")
    lines = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, _AUDIT_X86_64),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    for number in sorted(_ALLOWED.values()):
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for number, error in _OTHER_ERRORS.items():
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | error)]
    limits = [
        (_LOAD, 0, 0, _low(2)),
        (_EQUAL, 0, 3, 0),
        (_LOAD, 0, 0, _low(2) + 4),
        (_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERROR | errno.EPERM),
    ]
    lines += [(_EQUAL, 0, len(limits), _PRLIMIT), *limits]
    commands = [(_LOAD, 0, 0, _low(1))]
    for command in _FCNTL_COMMANDS:
        commands += [(_EQUAL, 0, 1, command), (_RETURN, 0, 0, _ALLOW)]
    lines += [(_EQUAL, 0, len(commands), _FCNTL), *commands, (_RETURN, 0, 0, _ERROR | errno.EPERM)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def restrict_calls(program: bytes) -> None:
    """Install the filter in this process, permanently."""
    code = ctypes.create_string_buffer(program)
    head = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    try:
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        buffer = ctypes.create_string_buffer(head)
        call("prctl", _PR_SET_SECCOMP, ctypes.c_ulong(_SET_FILTER), buffer, ctypes.c_ulong(0), ctypes.c_ulong(0))
    except OSError as error:
        raise Lacking("seccomp", f"prctl: {error.strerror}") from error
