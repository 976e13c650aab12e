# Image for machines with NVIDIA GPUs. torch of requirements.txt brings the CUDA runtime, the host its driver (NVIDIA
# Container Toolkit). We have not built it. In the repository's root:
#
#   docker build -t roberta .
#   docker run --rm --gpus all --ipc host -v "$PWD/runs:/recipe/runs" roberta \
#       train_mlm.py --config presets/mlm/roberta_base.yaml
#
# runs/ must be writable for user 1000. `docker stop --time 600` leaves the time to save the step.
FROM python:3.12-slim-bookworm

# Triton (--torch_compile) and DeepSpeed compile at run time; run records name the commit
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential git \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 recipe \
    && install --directory --owner recipe /recipe
WORKDIR /recipe
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt
COPY --chown=recipe . .
RUN pip install --no-cache-dir --no-build-isolation --no-deps -e .
USER 1000
ENTRYPOINT ["python", "tools/launch.py"]
