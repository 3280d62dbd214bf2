"""Confines a process on Linux without privileges: namespaces, Landlock, capabilities, seccomp, by system calls.

Each mechanism raises `Lacking` if the kernel does not provide it. seccomp has an allow-list on x86-64: computing,
memory, files by descriptor and path, time. All other calls fail with EPERM: those that create a process or thread,
start a program, open a socket, send a signal, trace another process, or change owners, modes and limits.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)

#: System calls that libc has no function for: the same numbers on all machines.
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446
#: By machine, as the numbers of older ones differ.
_PIVOT_ROOT, _CAPSET = {"x86_64": (155, 126), "aarch64": (41, 91)}.get(platform.machine(), (-1, -1))

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38

CLONE_NEWNS = 0x20000
_CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = (
    0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_MOUNT_RDONLY, _MOUNT_NOSUID, _MOUNT_NODEV = 1, 2, 4
_AT_RECURSIVE = 0x8000

#: The user that code runs as in its namespace.
_NOBODY = 65534

#: Landlock's rights to files, by bit, and how many of them each version of it knows.
_READ_FILE, _READ_DIR, _TRUNCATE = 1 << 2, 1 << 3, 1 << 14
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_RIGHTS_NOW = 16
#: Of a working folder: write, remove, make folders and regular files.
_WRITE = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | _TRUNCATE
#: TCP (version 4); signals and abstract sockets (version 6): nothing of them is allowed.
_TCP, _TCP_SINCE, _SCOPES, _SCOPES_SINCE = 3, 4, 3, 6
_BENEATH = 1


class Lacking(Exception):
    """A mechanism that this machine does not provide. mechanism: seccomp, landlock or namespaces."""

    def __init__(self, mechanism: str, problem: str) -> None:
        super().__init__(problem)
        self.mechanism, self.problem = mechanism, problem


def call(name: str, *arguments: object) -> int:
    """Call a function of libc, such as `syscall`; raise OSError if it fails."""
    found: int = getattr(_LIBC, name)(*arguments)
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found


def syscall(number: int, *arguments: object) -> int:
    return call("syscall", ctypes.c_long(number), *arguments)


def prctl(option: int, *arguments: int) -> None:
    call("prctl", option, *map(ctypes.c_long, (*arguments, *[0] * (4 - len(arguments)))))


def unshare_namespaces() -> None:
    """Give this single-threaded process its own user, mount, process, network, IPC and host name namespaces; its
    next child is process 1. Lacking: the kernel or its configuration does not allow it."""
    user, group = os.geteuid(), os.getegid()
    every = _CLONE_NEWUSER | CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
    try:
        call("unshare", every)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{_NOBODY} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{_NOBODY} {group} 1")
        call("sethostname", b"sandbox", 7)
    except OSError as error:
        raise Lacking("namespaces", f"unshare: {error.strerror}") from error


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())


def mount_folder(target: str, mib: int, files: int) -> None:
    """Mount an empty tmpfs limited to this many MiB and files, in a mount namespace of this process."""
    call("unshare", CLONE_NEWNS)
    mount("tmpfs", target, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, f"size={mib}m,nr_inodes={files},mode=700")


def change_root(readable: Sequence[str], hidden: Sequence[str], work: str) -> None:
    """Change the root, in process 1 of new namespaces, to one that has only the folders `readable`, read-only at their
    paths, with empty folders `hidden` below, and the empty folder `work`. Lacking: mounting is not allowed there."""
    real = {path: os.path.realpath(path) for path in readable}
    try:
        mount("none", "/", "", _MS_REC | _MS_PRIVATE)
        mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")  # noqa: S108 - a place, no file
        os.chdir("/tmp")  # noqa: S108
        Path("old").mkdir()
        syscall(_PIVOT_ROOT, b".", b"old")
        os.chdir("/")
        for path, source in real.items():
            Path(path).mkdir(parents=True, exist_ok=True)
            mount(f"/old{source}", path, "", _MS_BIND | _MS_REC)
            _set_read_only(path, _AT_RECURSIVE)
        for path in hidden:
            mount("tmpfs", path, "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, "size=4k,mode=755")
        call("umount2", b"/old", _MNT_DETACH)
        Path("/old").rmdir()
        Path(work).mkdir()
        _set_read_only("/", 0)
    except OSError as error:
        raise Lacking("namespaces", f"a root of its own: {error.strerror}") from error


def _set_read_only(path: str, flags: int) -> None:
    wanted = struct.pack("QQQQ", _MOUNT_RDONLY | _MOUNT_NOSUID | _MOUNT_NODEV, 0, 0, 0)
    syscall(_MOUNT_SETATTR, -100, path.encode(), flags, wanted, ctypes.c_size_t(len(wanted)))


def landlock_version() -> int:
    """Landlock's version. Lacking: the kernel is older than 5.13, or built or started without Landlock."""
    try:
        return syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    except OSError as error:
        raise Lacking("landlock", f"landlock_create_ruleset: {error.strerror}") from error


def reading_rules(readable: Iterable[str], hidden: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Landlock rules (path, rights) that allow reading below `readable` except files below `hidden`.

    A Landlock right covers everything below its path, so each file and folder beside a hidden one has its own rule.
    Hidden folders can still be listed.
    """
    found: list[tuple[str, int]] = []
    for folder in readable:
        if not any(f"{path}/".startswith(f"{folder}/") for path in hidden):
            found.append((folder, _READ_FILE | _READ_DIR))
        elif folder not in hidden:
            found.append((folder, _READ_DIR))
            entries = [entry for entry in os.scandir(folder) if not entry.is_symlink()]
            found += [(entry.path, _READ_FILE) for entry in entries if entry.is_file()]
            found += reading_rules([entry.path for entry in entries if entry.is_dir()], hidden)
    return tuple(found)


def restrict_files(version: int, readable: Sequence[tuple[str, int]], writable: Sequence[str]) -> None:
    """Restrict this process permanently to the rules `readable`, and to reading and writing below `writable`."""
    every = (1 << _RIGHTS.get(version, _RIGHTS_NOW)) - 1
    attributes = struct.pack(
        "QQQ", every, _TCP if version >= _TCP_SINCE else 0, _SCOPES if version >= _SCOPES_SINCE else 0
    )
    size = 8 if version < _TCP_SINCE else 16 if version < _SCOPES_SINCE else 24
    rules = syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), 0)
    for path, rights in (*readable, *((path, _READ_FILE | _READ_DIR | _WRITE) for path in writable)):
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        syscall(_LANDLOCK_ADD, rules, _BENEATH, struct.pack("=Qi", rights & every, folder), 0)
        os.close(folder)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    syscall(_LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def drop_capabilities() -> None:
    """Drop all capabilities and prevent this process from gaining any."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    syscall(_CAPSET, struct.pack("Ii", 0x20080522, 0), bytes(24))


#: Numbers of the calls that seccomp allows.
_ALLOWED = {
    "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8,
    "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14,
    "rt_sigreturn": 15, "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "pipe": 22,
    "select": 23, "sched_yield": 24, "mremap": 25, "madvise": 28, "dup": 32, "dup2": 33, "pause": 34,
    "nanosleep": 35, "getitimer": 36, "alarm": 37, "setitimer": 38, "getpid": 39, "exit": 60, "uname": 63,
    "fsync": 74, "fdatasync": 75, "ftruncate": 77, "getcwd": 79, "chdir": 80, "rename": 82, "mkdir": 83,
    "rmdir": 84, "creat": 85, "unlink": 87, "readlink": 89, "umask": 95, "gettimeofday": 96, "getrlimit": 97,
    "getrusage": 98, "sysinfo": 99, "times": 100, "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108,
    "getppid": 110, "sigaltstack": 131, "gettid": 186, "time": 201, "futex": 202, "sched_getaffinity": 204,
    "getdents64": 217, "fadvise64": 221, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230,
    "exit_group": 231, "openat": 257, "mkdirat": 258, "newfstatat": 262, "unlinkat": 263, "renameat": 264,
    "readlinkat": 267, "faccessat": 269, "pselect6": 270, "ppoll": 271, "set_robust_list": 273, "dup3": 292,
    "pipe2": 293, "getcpu": 309, "renameat2": 316, "getrandom": 318, "statx": 332, "rseq": 334, "faccessat2": 439,
}  # fmt: skip
#: Calls that fail with an error of their own, so that callers take another way.
_OTHER_ERRORS = {16: errno.ENOTTY, 435: errno.ENOSYS}  # ioctl, clone3
#: fcntl: duplicates and flags, but no owner, to whom a signal would be sent, and no lock.
_FCNTL, _FCNTL_COMMANDS = 72, (0, 1, 2, 3, 4, 1030)
#: prlimit64: limits are read, not set.
_PRLIMIT = 302

_AUDIT_X86_64, _X32 = 0xC000003E, 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
#: Places in what a filter is given: the call's number, the machine, the low half of each argument, before its high one.
_NUMBER, _MACHINE, _ARGUMENTS = 0, 4, range(16, 64, 8)
_SET_FILTER, _PR_SET_SECCOMP = 2, 22


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
        (_LOAD, 0, 0, _ARGUMENTS[2]),
        (_EQUAL, 0, 3, 0),
        (_LOAD, 0, 0, _ARGUMENTS[2] + 4),
        (_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERROR | errno.EPERM),
    ]
    lines += [(_EQUAL, 0, len(limits), _PRLIMIT), *limits]
    commands = [(_LOAD, 0, 0, _ARGUMENTS[1])]
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
