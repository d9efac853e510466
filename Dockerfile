# Image for training and rollout on GPUs, based on NVIDIA's NeMo container.  docs/howto/container.md explains how to
# build, run and check it.
#
# The tag names a patch version, because NVIDIA moved the tag 25.04 from 25.04.00 to .01 and .02, says its changelog
# (https://docs.nvidia.com/nemo-framework/user-guide/latest/changelog.html).  We found no page which confirms that 25.04
# contains NeMo 2.3 and Megatron-Core 0.12, so the build checks it (--check) and fails otherwise.  The changelog also
# says "Nemo Aligner is deprecated from 25.04 onwards"; if NeMo-Aligner is missing, it is added from setup/train.lock.
ARG NEMO_TAG=25.04.02
# sha256:... of `docker buildx imagetools inspect nvcr.io/nvidia/nemo:TAG`; unlike a tag, a digest cannot be moved.
ARG NEMO_DIGEST=
# NVIDIA's small CUDA image, which contains the package cuda-compat-13-0: the part of driver 580 that a process loads.
# vLLM's wheel is built for CUDA 13; on nodes with a driver of branch 535, 550 or 570, engines load this part instead of
# the driver's own.  Data-centre GPUs only (https://docs.nvidia.com/deploy/cuda-compatibility/forward-compatibility.html).
ARG CUDA_TAG=13.0.3-base-ubuntu24.04
# Python of the container that imports NeMo
ARG PYTHON=python3

FROM nvcr.io/nvidia/cuda:${CUDA_TAG} AS cuda

FROM nvcr.io/nvidia/nemo:${NEMO_TAG}${NEMO_DIGEST:+@${NEMO_DIGEST}} AS nemo
ENV PIP_NO_CACHE_DIR=1
WORKDIR /opt/nemo_prorl
# The rollout environment needs ensurepip, which is a separate package on Ubuntu.  Its version is not pinned, because
# Ubuntu's archive does not keep old versions.
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install --yes --no-install-recommends python3-venv && \
    rm -rf /var/lib/apt/lists/*

# `docker build --target lock --output setup .` updates setup/rollout-cuda.lock after a change of its pins; no other
# stage uses this stage.
FROM nemo AS resolve
ARG PYTHON
COPY setup/lock.py setup/rollout-cuda.in setup/
RUN PIP_CONSTRAINT= ${PYTHON} setup/lock.py --resolve setup/rollout-cuda.in setup/rollout-cuda.lock
FROM scratch AS lock
COPY --from=resolve /opt/nemo_prorl/setup/rollout-cuda.lock /

FROM nemo AS prorl
ARG PYTHON
# In a folder that no library path names and that NVIDIA's container runtime does not look at: only engines get it, and
# only where the driver is older (launcher/environment.py).
COPY --from=cuda /usr/local/cuda-13.0/compat/ cuda-compat/
RUN test -e cuda-compat/libcuda.so.1
ENV PRORL_CUDA_COMPAT=/opt/nemo_prorl/cuda-compat
COPY pyproject.toml README.md LICENSE ./
COPY setup/ setup/
COPY conf/ conf/
COPY launcher/ launcher/
COPY nemo_prorl/ nemo_prorl/
# vLLM needs a separate environment, because its dependencies conflict with NeMo's.  PIP_CONSTRAINT is empty, because
# the container's constraints apply to NeMo's Python only.  TORCH_INDEX: a package index with another build of torch.
ARG ROLLOUT_LOCK=setup/rollout-cuda.lock
ARG TORCH_INDEX=
RUN PIP_CONSTRAINT= ${PYTHON} setup/environments.py --only rollout --rollout-lock "${ROLLOUT_LOCK}" \
    --torch-index "${TORCH_INDEX}"
# Add this project, the sandbox, the plugins and their missing dependencies to the container's Python.  Only packages of
# setup/container.txt that are too old are replaced.
COPY packages/ packages/
COPY reward_plugins/ reward_plugins/
RUN ${PYTHON} setup/environments.py --in-place --only train
# Fails if a package of the container has changed, if NeMo or Megatron-Core is of another series, if a dependency of
# this project is missing, or if a module cannot be imported.  CHECK_IMPORTS= (empty) skips the imports on a build
# machine without a driver; then the check on a node does them (docs/howto/container.md).
ARG CHECK_IMPORTS=torch,megatron.core,nemo.collections.nlp.models.language_modeling.megatron_gpt_model,\
nemo_aligner.models.nlp.gpt.gpt_sft_model
RUN ${PYTHON} setup/environments.py --check --rollout-lock "${ROLLOUT_LOCK}" --imports "${CHECK_IMPORTS}"

# User for Docker.  Under pyxis and enroot the job's user runs the image; its files are readable by every
# user and writable by root only.
ARG PRORL_UID=10001
RUN useradd --no-log-init --uid "${PRORL_UID}" --user-group --create-home prorl
ARG REVISION=unknown
ARG NEMO_TAG
ARG NEMO_DIGEST
LABEL org.opencontainers.image.title="nemo_prorl" \
      org.opencontainers.image.description="Prolonged RL (ProRL) on NeMo-Aligner: trainer, engines, reward plugins" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="nvcr.io/nvidia/nemo:${NEMO_TAG}" \
      org.opencontainers.image.base.digest="${NEMO_DIGEST}"
USER prorl
# No ENTRYPOINT: Docker keeps NVIDIA's, which ends with `exec "$@"`, and pyxis runs a command without one.
# No HEALTHCHECK: the image runs jobs that end; the supervisor watches its processes, and Slurm watches the job.
CMD ["prorl", "doctor"]
