# The commands, on a CPU: docker run --rm -v "$PWD:/work" gqa gqa-convert --kv-heads 2 examples/stdlib-mha
# For a GPU build with --build-arg TORCH=https://download.pytorch.org/whl/cu128 and run with --gpus all.
FROM python:3.11-slim

ARG TORCH=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir -c constraints.txt --extra-index-url "$TORCH" torch \
    && pip install --no-cache-dir -c constraints.txt ".[report,lora]"

RUN useradd --create-home --uid 1000 gqa
USER 1000
WORKDIR /work
CMD ["gqa-convert", "--help"]
