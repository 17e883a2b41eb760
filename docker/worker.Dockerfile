# What the workers of Dataflow run, and of other runners that start containers: Beam's image, and Rollstream in it.
#
#   docker build --file docker/worker.Dockerfile --tag rollstream-worker .
#   docker build --file docker/worker.Dockerfile --tag rollstream-worker --build-arg JAX='jax[cuda12]' .
#
# Who submits needs the same Python (3.12) and the same Beam as this image. How to submit: docs/dataflow.md.
FROM apache/beam_python3.12_sdk:2.77.0

# Google's machines mount the NVIDIA driver here, where nothing else would look for it. Without a GPU it is not there.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64

COPY pyproject.toml constraints.txt /opt/rollstream/
COPY schemas /opt/rollstream/schemas
COPY jax_core /opt/rollstream/jax_core
COPY stages /opt/rollstream/stages
COPY pipelines /opt/rollstream/pipelines
COPY runners /opt/rollstream/runners

# jax for CPUs, jax[cuda12] for NVIDIA GPUs, jax[tpu] for TPUs.
ARG JAX=jax
ARG EXTRAS=gcp,models,tasks
RUN pip install --no-cache-dir --constraint /opt/rollstream/constraints.txt "${JAX}" "/opt/rollstream[${EXTRAS}]"

# The entry point stays that of Beam's image, which starts a worker.
