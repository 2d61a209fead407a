# parallel3d in a container, for CPUs:
#     docker build -t parallel3d .
#     docker run --rm -v "$PWD/runs:/parallel3d/runs" parallel3d train --config ds.json
# For NVIDIA GPUs, where `docker run` also needs --gpus all --shm-size 8g:
#     docker build -t parallel3d --build-arg BASE=nvidia/cuda:12.8.1-devel-ubuntu24.04 .
# pip installs torch's CUDA build, which also runs without a GPU. For the smaller CPU build, or another
# CUDA version, add --build-arg PIP_EXTRA_INDEX_URL=... with that index of PyTorch.
# Several processes: docker run --entrypoint torchrun parallel3d \
#     --nproc_per_node 2 -m parallel3d train --config ds.json
ARG BASE=debian:bookworm-slim
FROM ${BASE}
ARG PIP_EXTRA_INDEX_URL=

# DeepSpeed compiles its CPU Adam and its NVMe operators at the first run that uses them.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        g++ libaio-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/parallel3d
ENV PATH=/opt/parallel3d/bin:$PATH

COPY . /src
RUN pip install --no-cache-dir -c /src/constraints.txt "/src[scaling]" && rm -r /src

WORKDIR /parallel3d
ENTRYPOINT ["parallel3d"]
