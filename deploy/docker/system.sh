#!/bin/sh
# Prepares the system of the final image: `system.sh cpu` or `system.sh cuda`.
set -eu
kind=$1
packages="ca-certificates python3 tini"
# Triton compiles a small C program for every kernel that it launches.
if [ "$kind" = cuda ]; then packages="$packages gcc libc6-dev libpython3-dev"; fi
apt-get update
# shellcheck disable=SC2086
apt-get install --yes --no-install-recommends $packages
apt-get clean
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/log/*.log /var/log/apt

groupadd --gid 10001 bloomery
useradd --uid 10001 --gid 10001 --home-dir /data --no-create-home --shell /usr/sbin/nologin bloomery
mkdir --parents /data
chown 10001:10001 /data
