# The suite and all it needs, every version as in constraints.txt: a job that is submitted to a cluster of this image
# installs nothing. launch/deploy/kuberay/ and launch/deploy/ray_up/ start Ray in it; docs/platforms.md has the commands.
#
#   docker build --tag gpipe-suite:0.1.0 .
#
# No CUDA image below: torch 2.13.0's wheel on PyPI brings CUDA 13.0, cuDNN and NCCL, so a node needs the driver (580 or
# newer) and NVIDIA's container runtime, no toolkit. DeepSpeed compiles nothing at installation (DS_BUILD_OPS=0, its
# default, spelled out), and the suite uses none of its compiled operations. On a machine without GPUs the same image
# runs on cores; the wheels are what makes it large (about 10 GB).
FROM python:3.11-slim-bookworm

# gcc and libc6-dev: torch compiles kernels for GPUs with them.
# wget: KubeRay's probes call it inside the container for some versions of Ray and of the operator; without it pods
#   are never ready. ssh and rsync: with `ray up` the head starts the other nodes from inside its container.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev openssh-client rsync wget \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 1000 gpipe \
 && install --directory --owner gpipe --group gpipe /storage

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    DS_BUILD_OPS=0 \
    RAY_USAGE_STATS_ENABLED=0 \
    GPIPE_STORAGE=/storage

WORKDIR /opt/gpipe

# What the suite needs first, under an empty package of its name: a change of the sources leaves this layer as it is.
# google-api-python-client: Ray asks Google for the other nodes by it (`ray up`, launch/deploy/ray_up/cluster.yaml).
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN pip install --constraint constraints.txt . google-api-python-client==2.202.0 \
 && pip uninstall --yes gpipe-suite

COPY suite suite
COPY models models
COPY experiments experiments
COPY launch launch
COPY tests/__init__.py tests/
COPY tests/gpu tests/gpu
RUN pip install --no-deps . \
 && pip check

# Runs and prepared text go to GPIPE_STORAGE, which all nodes mount at this path. Nobody needs root.
USER gpipe
WORKDIR /home/gpipe
CMD ["gpipe", "list"]
