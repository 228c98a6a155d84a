# headstart on CUDA, from PyTorch's public image:
#     docker build -t headstart .
#     docker run --gpus all -p 8000:8000 -v "$PWD/models:/headstart/models" headstart \
#         serve --host 0.0.0.0 --target models/SmolLM2-135M-Instruct --head assets/smollm2_head
# Not built or run yet. The image's torch must be the version in constraints.txt.
ARG PYTORCH=2.13.0-cuda13.0-cudnn9-runtime
FROM pytorch/pytorch:${PYTORCH}

WORKDIR /headstart
RUN useradd --create-home --uid 10001 headstart && chown headstart /headstart
COPY --chown=10001 . .

# The environment sees the image's torch, so that pip installs no other one.
RUN python3 -m venv --system-site-packages /opt/headstart \
    && /opt/headstart/bin/pip install --no-cache-dir -c constraints.txt -e '.[serve,images,data,report,lora]'

USER 10001
ENV PATH=/opt/headstart/bin:$PATH
EXPOSE 8000
ENTRYPOINT ["headstart"]
CMD ["--help"]
