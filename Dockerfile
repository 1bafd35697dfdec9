# headrace in an image: `docker build -t headrace .`, then `docker run -v headrace-home:/var/headrace headrace --help`.
# The environment is the one of `make env`, from requirements/headrace.lock; Horovod is built for CPUs (gloo).
FROM debian:12-slim AS build

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# Versions are Debian 12's: its security updates are wanted.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        build-essential ca-certificates gradle openjdk-17-jdk-headless python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/headrace
# What the environment is made of comes first, so that a change of code alone leaves this layer as it is.
COPY Makefile pyproject.toml setup.py build.gradle settings.gradle ./
COPY requirements requirements
COPY scripts scripts
COPY native native
RUN make build/stamps/horovod.gloo build/stamps/native build/stamps/jars build/stamps/s3 HOROVOD=gloo
COPY . .
RUN make env s3 airflow HOROVOD=gloo && rm -rf build/tools ~/.gradle ~/.cache

FROM debian:12-slim
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates libgomp1 openjdk-17-jre-headless python3 tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 headrace \
    && install -d -o headrace -g headrace /var/headrace
COPY --from=build /opt/headrace /opt/headrace
ENV PATH=/opt/headrace/.venv/bin:$PATH HEADRACE_HOME=/var/headrace
USER 10001
WORKDIR /opt/headrace
VOLUME /var/headrace
# Ranks and JVMs are children of `headrace`: an init process reaps those whose parent has died.
ENTRYPOINT ["tini", "-g", "--", "headrace"]
CMD ["--help"]
