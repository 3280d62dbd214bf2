# syntax=docker/dockerfile:1
# Polyrhythm with the simulator of the quickstart, for a CPU or, with torch's CUDA builds, an NVIDIA GPU:
#
#   docker build --target cpu -t polyrhythm .                docker run --rm --shm-size 1g -v "$PWD/runs:/work/runs" polyrhythm
#   docker build --target cuda -t polyrhythm:cuda .          docker run --rm --gpus all --shm-size 8g … polyrhythm:cuda
#
# Both train the quickstart; other commands follow the image's name, such as `train cartpole` or `doctor`. Docker's
# default of 64 MB of shared memory is too small for a run. The CUDA image carries its libraries in torch's wheels and
# needs no CUDA of its own; the host needs NVIDIA's driver and container toolkit.

FROM python:3.11-slim-bookworm AS base
# What MuJoCo needs to draw without a screen (tools/render_libs.sh); git and make for developers.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends git make libegl1 libgl1 libosmesa6 \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 polyrhythm \
    && mkdir -p /work/runs \
    && chown -R polyrhythm /work
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY recipes recipes
COPY examples examples
COPY src src

FROM base AS cpu
# torch's builds for CPUs are on an index of their own; on PyPI they carry 2.5 GB of CUDA's libraries.
RUN pip install -c constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu torch \
    && pip install -c constraints.txt '.[metaworld,vla]'
USER 1000
WORKDIR /work
ENTRYPOINT ["polyrhythm"]
CMD ["train", "quickstart"]

FROM base AS cuda
RUN pip install -c constraints.txt torch \
    && pip install -c constraints.txt '.[metaworld,vla]'
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics
USER 1000
WORKDIR /work
ENTRYPOINT ["polyrhythm"]
CMD ["train", "quickstart"]
