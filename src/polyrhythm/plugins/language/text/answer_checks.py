"""Compares messages with answers; as a program, it is the process that runs comparisons which may not terminate.

The program imports nothing of this package. Lines on stdin: first {kind, options, limit_s, memory_mib}, then [message,
answer]; on stdout: first "ready", then true, false, or an error text for each. The kernel ends the process (SIGPROF)
after `limit_s` seconds of CPU time in one comparison.
"""

from __future__ import annotations

import json
import logging
import re
import resource
import signal
import sys
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

#: Around the answer at the end of a worked solution of GSM8K.
_GSM8K = "####"


def bare_answer(answer: str) -> str:
    """The final answer of a worked solution that ends with `#### 72`; other answers are returned unchanged."""
    return answer.rpartition(_GSM8K)[2].strip()


def regex_equal(message: str, answer: str, *, pattern: str, casefold: bool) -> bool:
    """Whether the pattern's last match in the message equals its last match in the answer, or the whole answer if
    there is none. A match is the pattern's first group, or the whole match without groups."""
    found, expected = _last_match(pattern, message), _last_match(pattern, answer)
    return found is not None and same_text(found, answer if expected is None else expected, casefold=casefold)


def same_text(one: str, other: str, *, casefold: bool) -> bool:
    """Whether two texts are equal after stripping spaces; casefold: ignore case."""
    one, other = one.strip(), other.strip()
    return one.casefold() == other.casefold() if casefold else one == other


def _last_match(pattern: str, text: str) -> str | None:
    found = deque(re.finditer(pattern, text), maxlen=1)
    return found[0][1 if found[0].re.groups else 0] if found else None


def math_equal(message: str, answer: str) -> bool:
    """Whether math-verify finds the answer in the message (in \\boxed{}, else its last formula or number)."""
    from math_verify import parse, verify

    found = parse(message, parsing_timeout=None)
    return bool(found) and bool(verify(_parsed(answer), found, timeout_seconds=None))


@lru_cache(maxsize=4096)
def _parsed(answer: str) -> Any:
    """The answer parsed by math-verify. ValueError: it cannot be parsed."""
    from math_verify import parse

    text = bare_answer(answer)
    forms = (text,) if "\\boxed" in text or "$" in text else (f"\\boxed{{{text}}}", text)
    found = next((made for form in forms if (made := parse(form, parsing_timeout=None))), None)
    if found is None:
        raise ValueError(f"math-verify finds no expression in {answer[:80]!r}")
    return found


def main() -> None:
    logging.disable(logging.CRITICAL)  # of math-verify, at each message that it cannot read
    start = json.loads(sys.stdin.readline())
    equal: Callable[[str, str], bool] = math_equal
    if start["kind"] == "regex":
        equal = partial(regex_equal, **start["options"])
    else:
        import math_verify  # noqa: F401 - takes a second, which no comparison is to have
    limit_s, memory = start["limit_s"], start["memory_mib"] << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, meant for the run, which ends this process by EOF
    print('"ready"', flush=True)  # noqa: T201 - to the one that started it
    for line in sys.stdin:
        message, answer = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            found: bool | str = equal(message, answer)
        except (Exception, MemoryError) as error:  # noqa: BLE001 - of a library, at what a model wrote
            found = f"{type(error).__name__}: {error}"[:300]
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(found), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
