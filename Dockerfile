# Server and device in containers, for amd64 and arm64:
#   docker build --target server -t anycostfl-server .
#   docker build --target device -t anycostfl-device .
FROM python:3.13-slim AS wheel
COPY . /src
RUN pip wheel --no-deps --wheel-dir /wheels /src

FROM python:3.13-slim AS base
ARG TORCH_INDEX=""
# A CPU build of torch, if TORCH_INDEX names where one is found; else the default build.
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch>=2.6"
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/*.whl)[flower,export]" && rm -r /wheels
RUN useradd --create-home --uid 1000 anycostfl && mkdir /runs && chown anycostfl /runs
USER anycostfl
WORKDIR /runs
ENV PYTHONUNBUFFERED=1

FROM base AS server
EXPOSE 9443
ENTRYPOINT ["anycostfl", "serve"]

FROM base AS device
ENTRYPOINT ["anycostfl", "join"]
