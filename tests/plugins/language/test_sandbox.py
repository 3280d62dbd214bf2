"""The Python tool's sandbox: what it computes, what it ends, and what does not get out of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.long import long

from polyrhythm.errors import ConfigError, MissingError
from polyrhythm.plugins.language.sandbox.kernel import Lacking, filter_program
from polyrhythm.plugins.language.sandbox.tool import (
    PythonTool,
    SandboxLost,
    SandboxSettings,
    Shared,
    ToolOutcome,
    _ended,
    _packages_within,
    _readable,
    open_tool,
)

EVERY = ("namespaces", "landlock", "seccomp")
#: Its wall time is for a machine that is busy: code of these tests ends by itself, or by its CPU time.
QUICK = SandboxSettings(wall_s=600.0, cpu_s=1, memory_mib=256, files_mib=2, output_bytes=1000, at_a_time=8)


def opened(without: tuple[str, ...] = (), settings: SandboxSettings = QUICK) -> PythonTool:
    try:
        return PythonTool(settings, without)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tool() -> Iterator[PythonTool]:
    found = opened()
    yield found
    found.close()


@pytest.fixture(scope="module", params=["all", "without namespaces", "without landlock"])
def each_tool(request: pytest.FixtureRequest, tool: PythonTool) -> Iterator[PythonTool]:
    """A tool with all mechanisms, and with one less."""
    if request.param == "all":
        yield tool
        return
    found = opened((request.param.removeprefix("without "),))
    yield found
    found.close()


def test_it_runs_code_as_a_notebook_does(tool: PythonTool) -> None:
    assert tool.run("x = 2\nprint(x)\nx ** 10") == outcome("2\n1024\n")
    assert tool.run("") == outcome("")
    assert tool.run("import sys, math\nprint('é', file=sys.stderr)\nmath.pi").output == "é\n3.141592653589793\n"
    assert tool.run("exit()").ended == "done"
    assert tool.run("exit('no')") == outcome("no\n", "error")


def outcome(output: str, ended: str = "done") -> object:
    """Equal to outcomes that differ in times alone."""

    class Same:
        def __eq__(self, other: object) -> bool:
            return isinstance(other, ToolOutcome) and (other.output, other.ended) == (output, ended)

        __hash__ = None  # type: ignore[assignment]

        def __repr__(self) -> str:
            return f"{output!r}, {ended}"

    return Same()


def test_an_error_is_shown_without_frames_of_ours(tool: PythonTool) -> None:
    found = tool.run("def f():\n    return 1 / 0\nf()")
    assert found.ended == "error"
    assert found.output.startswith(
        'Traceback (most recent call last):\n  File "<python>", line 3, in <module>\n    f()'
    )
    assert found.output.endswith("ZeroDivisionError: division by zero\n")
    assert "sandbox" not in found.output
    assert tool.run("1 +").output.endswith("SyntaxError: invalid syntax\n")


def test_equal_code_gives_equal_output(tool: PythonTool) -> None:
    code = "import random\n(random.random(), list({'a', 'b', 'c', 'd'}), hash('a'))"
    other = opened()
    assert tool.run(code).output == tool.run(code).output == other.run(code).output
    other.close()


def test_a_call_leaves_nothing_to_the_next(tool: PythonTool) -> None:
    assert tool.run("open('f', 'w').write('x')\nimport math\nmath.pi = 3\nopen('f').read()").output == "'x'\n"
    assert tool.run("import os, math\nos.listdir('.'), math.pi, 'f' in globals()").output.startswith("([], 3.14159")


#: Code that must not get anywhere, and what it says then. Each ends by itself.
ESCAPES = {
    "fork": ("import os\nos.fork()", "PermissionError"),
    "fork bomb": (
        "import os\nn = 0\nfor _ in range(1000):\n    try: n += os.fork() >= 0\n    except OSError: pass\nn",
        "0\n",
    ),
    "subprocess": ("import subprocess\nsubprocess.run(['/bin/true'])", "Error"),
    "system": ("import os\nos.system('true')", "32512\n"),
    "thread": ("import threading\nthreading.Thread(target=print).start()", "can't start new thread"),
    "exec": ("import os\nos.execv('/bin/sh', ['sh'])", "Error"),
    "read /etc/passwd": ("open('/etc/passwd').read()", "Error"),
    "read the parent's environment": ("import os\nopen(f'/proc/{os.getppid()}/environ').read()", "Error"),
    "read its own memory file": ("open('/proc/self/mem').read()", "Error"),
    "write to /tmp": ("open('/tmp/escaped', 'w')", "Error"),
    "write to the root": ("open('/escaped', 'w')", "Error"),
    "write to Python": ("import random\nopen(random.__file__, 'a')", "Error"),
    "remove from Python": ("import os, random\nos.unlink(random.__file__)", "Error"),
    "modes": ("import os\nos.chmod('/', 0o777)", "PermissionError"),
    "links": ("import os\nos.symlink('/etc/passwd', 'p')", "PermissionError"),
    "hard links": ("import os, random\nos.link(random.__file__, 'p')", "PermissionError"),
    "devices": ("import os, stat\nos.mknod('d', stat.S_IFBLK | 0o600, os.makedev(254, 0))", "PermissionError"),
    "inet socket": ("import socket\nsocket.create_connection(('127.0.0.1', 80))", "PermissionError"),
    "raw socket": ("import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)", "PermissionError"),
    "unix socket": ("import socket\nsocket.socket(socket.AF_UNIX)", "PermissionError"),
    "socket pair": ("import socket\nsocket.socketpair()", "PermissionError"),
    "kill the parent": ("import os\nos.kill(os.getppid(), 9)", "PermissionError"),
    "kill all": ("import os\nos.kill(-1, 9)", "PermissionError"),
    "signal by a descriptor's owner": (
        "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, os.getppid())",
        "PermissionError",
    ),
    "raise a limit": ("import resource\nresource.setrlimit(resource.RLIMIT_CPU, (99, 99))", "Error"),
    "lower the priority of others": ("import os\nos.setpriority(os.PRIO_USER, 0, 19)", "PermissionError"),
    "memory": ("bytearray(10**9)", "MemoryError"),
    "memory bit by bit": ("x = []\nwhile True: x.append(bytearray(10**6))", "MemoryError"),
    "a file too large": ("open('f', 'w').truncate(10**9)", "Error"),
    "open files": ("x = []\nimport os\nwhile True: x.append(os.dup(1))", "Too many open files"),
    "packages that were not named": ("import psutil", "ModuleNotFoundError"),
    "files of packages that were not named": (
        (
            "from glob import glob\nfrom contextlib import suppress\nread = []\n"
            f"for path in sum((glob(f'{{top}}/*/*.py') for top in {_packages_within(_readable([]), [])}), []):\n"
            "    with suppress(OSError): read.append(open(path))\nprint('read', len(read))"
        ),
        "read 0\n",
    ),
}
#: System calls by number, through ctypes: none may succeed.
CALLS = {
    "socket": 41, "clone": 56, "fork": 57, "vfork": 58, "execve": 59, "kill": 62, "ptrace": 101, "setuid": 105,
    "prctl": 157, "chroot": 161, "mount": 165, "tkill": 200, "tgkill": 234, "unshare": 272, "open_by_handle_at": 304,
    "setns": 308, "process_vm_readv": 310, "memfd_create": 319, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425,
    "pidfd_open": 434, "clone3": 435, "pidfd_getfd": 438, "shmget": 29, "keyctl": 250, "perf_event_open": 298,
}  # fmt: skip


@pytest.mark.parametrize("name", ESCAPES)
def test_it_does_not_get_out(each_tool: PythonTool, name: str) -> None:
    code, told = ESCAPES[name]
    found = each_tool.run(code)
    assert told in found.output, found
    assert found.ended in ("error", "done"), found
    assert not Path("/tmp/escaped").exists()


def test_system_calls_by_number_fail(each_tool: PythonTool) -> None:
    numbers = list(CALLS.values())
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"[n for n in {numbers} if libc.syscall(n, 0, 0, 0, 0, 0) >= 0 or ctypes.get_errno() not in (1, 38)]"
    )
    assert each_tool.run(code) == outcome("[]\n")
    assert each_tool.run("import ctypes\nctypes.CDLL(None).syscall(0x40000000 + 39)").ended == "killed", "another ABI"
    interrupt = (  # mov eax, 20 (getpid); int 0x80; ret: the system calls of 32 bits have other numbers
        "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(bytes.fromhex('b814000000cd80c3'))\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()"
    )
    assert each_tool.run(interrupt).ended == "killed"


def test_folders_above_its_own_are_not_listed(tool: PythonTool) -> None:
    assert "PermissionError" in tool.run("import os\nos.listdir('/')").output
    assert "PermissionError" in tool.run("import os\nos.listdir('..')").output


def test_files_of_ours_are_not_to_be_found(each_tool: PythonTool, tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text("secret")
    assert "secret" not in each_tool.run(f"open({str(tmp_path / 'ledger')!r}).read()").output
    assert "Error" in each_tool.run(f"open({str(tmp_path / 'new')!r}, 'w')").output
    assert "Error" in each_tool.run(f"open({__file__!r}).read()").output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ledger"]


def test_no_environment_and_no_descriptors_are_inherited(
    each_tool: PythonTool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    code = "import ctypes, os\nlibc = ctypes.CDLL(None)\nlibc.getenv.restype = ctypes.c_char_p\n"
    assert each_tool.run(f"{code}dict(os.environ), libc.getenv(b'SECRET_TOKEN'), libc.getenv(b'PATH')") == outcome(
        "({}, None, None)\n"
    )
    again = opened(tuple(each_tool.without))
    assert again.run(f"{code}dict(os.environ), libc.getenv(b'SECRET_TOKEN')") == outcome("({}, None)\n")
    again.close()
    code = "import os\ndef there(n):\n    try: return bool(os.fstat(n))\n    except OSError: return False\n"
    assert each_tool.run(f"{code}[n for n in range(4096) if there(n)], os.read(0, 9)") == outcome("([0, 1, 2], b'')\n")


def test_what_it_writes_is_limited_in_all(tool: PythonTool) -> None:
    code = (
        "import os\nn = size = 0\ntry:\n    while True:\n        with open(str(n), 'wb', 0) as f:\n"
        "            size += f.write(bytes({each}))\n        n += 1\nexcept OSError as e:\n    print(e.strerror)\n"
        "size <= 2 * 2**20, n < 512, n"
    )
    assert tool.run(code.format(each=100_000)).output.startswith("No space left on device\n(True, True, 2")
    assert tool.run(code.format(each=1)).output.startswith("No space left on device\n(True, True, ")


def test_without_namespaces_nothing_can_be_written() -> None:
    with_less = opened(("namespaces",))
    assert "FileNotFoundError" in with_less.run("open('f', 'w')").output
    with_less.close()


def test_output_is_shortened(tool: PythonTool) -> None:
    assert tool.run("print('x' * 10**8)").output == "x" * 1000 + "…"
    assert tool.run("import os\nos.write(1, b'\\xff')").output == "\ufffd1\n"


def test_an_endless_loop_ends_at_its_cpu_time(tool: PythonTool) -> None:
    code = "import signal\nfor n in (2, 15, 24):\n    signal.signal(n, signal.SIG_IGN)\nprint('before')\n"
    code += "while True:\n    try:\n        print()\n    except BaseException:\n        pass"
    found = tool.run(code)
    assert found.ended == "time"
    assert found.cpu_s >= QUICK.cpu_s
    assert found.output.startswith("before\n")
    assert tool.run("1 + 1").output == "2\n"


def test_the_sampled_count_of_the_kernel_is_a_backstop(tool: PythonTool) -> None:
    found = tool.run("import resource\nprint(resource.getrlimit(resource.RLIMIT_CPU)[0])\nsum(iter(int, 1))")
    assert (found.ended, found.output) == ("time", "3\n"), "the server's exact count ends it at 1 s"


def test_a_kill_by_the_kernel_is_told_by_its_cpu_time() -> None:
    killed = {"status": -9, "timed_out": False}
    assert _ended({**killed, "cpu_s": 1.0}, QUICK) == "time", "the server was too late"
    assert _ended({**killed, "cpu_s": 0.95}, QUICK) == "killed", "memory of the machine ran out"


def test_calls_that_hang_end_at_their_wall_time_all_at_once() -> None:
    hanging = opened((), QUICK.model_copy(update={"wall_s": 1.0, "at_a_time": 16}))
    began = time.monotonic()
    calls = [hanging.start("import time\nprint('begun')\ntime.sleep(99)") for _ in range(16)]
    quick = hanging.start("1")
    outcomes = [hanging.finish(call) for call in calls]
    assert time.monotonic() - began < sum(found.wall_s for found in outcomes) / 2
    assert all(found == outcome("begun\n", "time") for found in outcomes)
    assert outcomes[0].text == "begun\n[stopped: it took too long]\n"
    assert hanging.finish(quick).output == "1\n", "it had waited for a place"
    hanging.close()


def test_a_crash_costs_its_call(tool: PythonTool) -> None:
    found = tool.run("print('a', end='')\nimport ctypes\nctypes.string_at(0)")
    assert (found.ended, found.text) == ("killed", "a\n[it crashed]\n")
    assert tool.run("import os\nos.abort()").ended == "killed"
    assert tool.run("import os\nos._exit(125)").ended == "error"
    assert tool.run("1 + 1").output == "2\n"


def server_of(tool: PythonTool) -> psutil.Process:
    """The process that runs its calls."""
    call = tool.start("1")
    tool.finish(call)
    return psutil.Process(call.server.pid)


def processes(first: psutil.Process) -> list[psutil.Process]:
    return [first, *first.children(recursive=True)]


def gone(found: list[psutil.Process], seconds: float = 60.0) -> bool:
    return not psutil.wait_procs(found, seconds)[1]


def wait_for(of: Callable[[], list[psutil.Process]], number: int) -> list[psutil.Process]:
    end = time.monotonic() + 60
    while len(found := of()) != number and time.monotonic() < end:
        time.sleep(0.01)
    return found


def test_a_call_that_is_given_up_is_ended() -> None:
    dropping = opened()
    server = server_of(dropping)
    before = len(processes(server))
    call = dropping.start("import time\ntime.sleep(99)")
    child = wait_for(lambda: processes(server), before + 1)[-1]
    dropping.drop(call)
    assert gone([child])
    dropping.close()


@pytest.mark.parametrize(
    "without",
    [pytest.param((), id="namespaces"), pytest.param(("namespaces",), id="no namespaces", marks=long(2, "without"))],
)
def test_a_sandbox_that_is_killed_is_started_again(without: tuple[str, ...]) -> None:
    killed = opened(without)
    server = server_of(killed)
    before = len(processes(server))
    call = killed.start("import time\ntime.sleep(99)")
    found = wait_for(lambda: processes(server), before + 1)
    found[0].kill()
    with pytest.raises(SandboxLost, match="its process ended"):
        killed.finish(call)
    assert killed.run("1 + 1").output == "2\n"
    assert gone(found[1:]), "with all that it ran"
    killed.close()


def test_a_sandbox_that_says_nothing_is_lost_and_started_again() -> None:
    silent = PythonTool(QUICK.model_copy(update={"may_lack": EVERY}))
    before = processes(server_of(silent))
    for process in before:
        process.suspend()
    call, other = silent.start("1"), silent.start("2")
    call.deadline = time.monotonic()
    with pytest.raises(SandboxLost, match="says nothing, 10 s after"):
        silent.finish(call)
    assert gone(before)
    with pytest.raises(SandboxLost):
        silent.finish(other)
    assert silent.run("1 + 1").output == "2\n", "another one"
    silent.close()


def test_a_call_has_the_time_of_those_before_it() -> None:
    queued = PythonTool(QUICK.model_copy(update={"at_a_time": 2, "may_lack": EVERY}), patience_s=1.0)
    begun = time.monotonic()
    calls = [queued.start("1") for _ in range(5)]
    for call, turns in zip(calls, (1, 1, 2, 2, 3), strict=True):
        assert call.deadline - begun == pytest.approx(turns * QUICK.wall_s + 1.0, abs=10.0)
        assert queued.finish(call).output == "1\n"
    after = queued.start("1")
    assert after.deadline < time.monotonic() + QUICK.wall_s + 1.0
    queued.finish(after)
    queued.close()


@pytest.mark.parametrize("code", ["#" * 2**20, "é" * 2**19 + "#"])
def test_code_that_is_too_long_is_not_run(tool: PythonTool, code: str) -> None:
    short = "print(1)\n"
    assert tool.run(short + code[: 2**20 - len(short)] * (code[0] == "#")).output == "1\n"
    assert tool.run(short + code) == outcome("the code is longer than 1 MiB; it was not run\n", "error")


CLIENT = """
from polyrhythm.plugins.language.sandbox.tool import PythonTool, SandboxSettings
import time
tools = [PythonTool(SandboxSettings(), without) for without in ((), ("namespaces",))]
calls = [tool.start("import time\\ntime.sleep(999)") for tool in tools]
print("ready", flush=True)
time.sleep(999)
"""


def test_nothing_survives_whoever_called() -> None:
    opened().close()
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", CLIENT], stdout=subprocess.PIPE, env=environment) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"ready\n"
        found = wait_for(lambda: psutil.Process(client.pid).children(recursive=True), 3 + 2)
        client.kill()
    assert len(found) == 3 + 2, "with namespaces one process more"
    assert gone(found)


def test_modules_that_are_named_are_there() -> None:
    with_numpy = opened((), QUICK.model_copy(update={"modules": ("numpy",), "memory_mib": 1024}))
    assert with_numpy.run("import numpy as np\nint(np.ones((3, 3)).dot(np.ones(3)).sum())").output == "9\n"
    with_numpy.close()
    with pytest.raises(
        MissingError, match=r"env\.sandbox\.modules = \['no_such'\]: No module named 'no_such'; install"
    ):
        PythonTool(QUICK.model_copy(update={"modules": ("no_such",)}))


@pytest.mark.parametrize("mechanism", ["seccomp", "landlock", "namespaces"])
def test_isolation_that_cannot_be_had_is_refused_unless_less_is_accepted(mechanism: str) -> None:
    told = {"lacks": mechanism, "problem": "Operation not permitted"}

    class Poor(PythonTool):
        """On a machine without the mechanism."""

        def _launch(self) -> object:
            return super()._launch() if mechanism in self.without else told

    with pytest.raises(ConfigError) as raised:
        Poor(QUICK)
    assert f"this machine does not give {mechanism} (Operation not permitted)" in str(raised.value)
    assert str(raised.value).endswith(f"or accept less with env.sandbox.may_lack: [{mechanism}]")
    accepted = Poor(QUICK.model_copy(update={"may_lack": (mechanism,)}))
    assert accepted.without == [mechanism]
    assert accepted.run("1 + 1").output == "2\n"
    accepted.close()


def test_another_machine_has_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(Lacking, match="no list of system calls for riscv64"):
        filter_program()


def test_a_process_has_one_sandbox_for_equal_settings() -> None:
    opened().close()
    (one, leave), (two, leave_too) = open_tool(QUICK), open_tool(QUICK)
    assert one is two
    leave()
    leave()
    assert two.run("1").output == "1\n"
    server = server_of(two)
    leave_too()
    assert gone([server])


def test_objects_that_end_do_not_hold_up_others() -> None:
    others: list[str] = []

    def end(value: str) -> None:
        opening = threading.Thread(target=lambda: others.append(shared.open(f"not {value}", str)[0]), daemon=True)
        opening.start()
        opening.join(10)

    shared = Shared(end)
    _, leave = shared.open("one", lambda: "one")
    leave()
    assert others == [""]
