# Training and rollout on GPUs, from NVIDIA's NeMo container.  docs/howto/container.md: how to build, run and check it.
#
# The tag: NVIDIA's changelog (https://docs.nvidia.com/nemo-framework/user-guide/latest/changelog.html) has 25.04.00 to
# 25.04.02 and says that the tag 25.04 itself was moved to the newer ones in turn, so a patch is named here.  That 25.04
# holds NeMo 2.3 and Megatron-Core 0.12 stands in no page that could be read for this file; so the build looks (--check)
# and fails where it is not so.  The same changelog: "Nemo Aligner is deprecated from 25.04 onwards", so NeMo-Aligner is
# added from setup/train.lock where it is missing.
ARG NEMO_TAG=25.04.02
# sha256:..., shown by `docker buildx imagetools inspect nvcr.io/nvidia/nemo:TAG`; a tag can be moved, a digest cannot.
ARG NEMO_DIGEST=
# What runs in the container and imports NeMo.
ARG PYTHON=python3

FROM nvcr.io/nvidia/nemo:${NEMO_TAG}${NEMO_DIGEST:+@${NEMO_DIGEST}} AS nemo
ENV PIP_NO_CACHE_DIR=1
WORKDIR /opt/nemo_prorl
# ensurepip, which makes the rollout environment, is a package of its own on Ubuntu; its archive keeps no old versions.
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install --yes --no-install-recommends python3-venv && \
    rm -rf /var/lib/apt/lists/*

# docker build --target lock --output setup .    writes setup/rollout-cuda.lock anew, after its pins changed; no other
# stage needs this one.
FROM nemo AS resolve
ARG PYTHON
COPY setup/lock.py setup/rollout-cuda.in setup/
RUN PIP_CONSTRAINT= ${PYTHON} setup/lock.py --resolve setup/rollout-cuda.in setup/rollout-cuda.lock
FROM scratch AS lock
COPY --from=resolve /opt/nemo_prorl/setup/rollout-cuda.lock /

FROM nemo AS prorl
ARG PYTHON
COPY pyproject.toml README.md LICENSE ./
COPY setup/ setup/
COPY conf/ conf/
COPY launcher/ launcher/
COPY nemo_prorl/ nemo_prorl/
# vLLM in an environment of its own, for its dependencies and NeMo's exclude each other.  The container's constraints on
# pip are about NeMo's Python and must not hold here.  TORCH_INDEX: a package index with another build of torch.
ARG ROLLOUT_LOCK=setup/rollout-cuda.lock
ARG TORCH_INDEX=
RUN PIP_CONSTRAINT= ${PYTHON} setup/environments.py --only rollout --rollout-lock "${ROLLOUT_LOCK}" \
    --torch-index "${TORCH_INDEX}"
# This project, its plugins and what they lack, into the container's Python; nothing that is there is replaced.
COPY reward_plugins/ reward_plugins/
RUN ${PYTHON} setup/environments.py --in-place --only train
# Fails where a package of the container has changed, NeMo or Megatron-Core is of another series, a dependency of ours
# is missing, or a module does not import.  CHECK_IMPORTS= (empty) leaves the imports out, where a build machine
# without a driver cannot do them; the check on a node (docs/howto/container.md) does them then.
ARG CHECK_IMPORTS=torch,megatron.core,nemo.collections.nlp.models.language_modeling.megatron_gpt_model,\
nemo_aligner.models.nlp.gpt.gpt_sft_model
RUN ${PYTHON} setup/environments.py --check --rollout-lock "${ROLLOUT_LOCK}" --imports "${CHECK_IMPORTS}"

# Under pyxis and enroot it is the user of the job who runs; all of this is readable by everyone, and written by nobody.
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
# No ENTRYPOINT of ours: NVIDIA's, which ends in `exec "$@"`, stays for Docker, and pyxis runs a command without any.
# No HEALTHCHECK: this runs jobs that end; their supervisor looks after its processes and Slurm after the job.
CMD ["prorl", "doctor"]
