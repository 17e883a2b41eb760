# The trainer, and every other command: what it is started with is the arguments of `rollstream`.
#
#   docker build --file docker/trainer.Dockerfile --tag rollstream-trainer .
#   docker build --file docker/trainer.Dockerfile --tag rollstream-trainer --build-arg JAX='jax[tpu]' .
#   docker run rollstream-trainer train gs://my-bucket/runs/lake
#
# The same Python as in docker/worker.Dockerfile, so that jobs can be submitted from this image too.
FROM python:3.12-slim

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

# recipes/frozen_lake.toml and the others, as their names are in a checkout.
WORKDIR /opt/rollstream
COPY recipes ./recipes

ENTRYPOINT ["rollstream"]
CMD ["--help"]
