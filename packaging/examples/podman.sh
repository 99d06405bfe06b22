#!/bin/sh
# Runs a program in a container of podman, with the mounts that podfs has prepared for a container of a pod.
#
#   podman.sh BUNDLE UID CONTAINER PROGRAM
#
# BUNDLE is an empty directory on a file system from which programs may be run. The container is called UID-CONTAINER, and
# podman keeps its state in BUNDLE/state and in /run/pod-UID: podman refuses longer paths there. Needs root, podman, runc, and
# podfs in the PATH. Descriptors 3 and 4 are the program's, too.
set -eu
bundle=$1 uid=$2 container=$3 program=$4

podfs mounts prepare --pod "$uid" --container "$container" --output podman >"$bundle/mounts"

# The root file system: the programs of this machine, read-only.
root=$bundle/rootfs
mkdir -p "$root/dev" "$root/etc" "$root/proc" "$root/run" "$root/sys" "$root/tmp" "$root/usr"
for directory in bin lib lib64 sbin; do
  if [ -L "/$directory" ]; then cp -P "/$directory" "$root"; fi
done
cp "$program" "$root/program"

set --
while IFS= read -r mount; do set -- "$@" "$mount"; done <"$bundle/mounts"

# The state is apart from that of other containers, so that nothing of this example stays.
exec podman --root "$bundle/state" --runroot "/run/pod-$uid" --tmpdir "$bundle/state/tmp" --runtime runc \
  --cgroup-manager cgroupfs --events-backend none \
  run --name "$uid-$container" --network host --preserve-fds 2 --log-driver none \
  --ulimit nofile=1024:1024 --ulimit nproc=1024:1024 \
  --volume /usr:/usr:ro "$@" --rootfs "$root" /bin/sh /program </dev/null
