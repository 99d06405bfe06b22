#!/bin/sh
# Runs a program in a container of runc, with the mounts that podfs has prepared for a container of a pod.
#
#   runc.sh BUNDLE UID CONTAINER PROGRAM
#
# BUNDLE is an empty directory on a file system from which programs may be run. The container is called UID-CONTAINER, and
# runc keeps its state in BUNDLE/state. Needs root, runc, jq, and podfs in the PATH. Descriptors 3 and 4 are the program's, too.
set -eu
bundle=$1 uid=$2 container=$3 program=$4

podfs mounts prepare --pod "$uid" --container "$container" --output oci >"$bundle/mounts.json"

# The root file system: the programs of this machine, read-only.
root=$bundle/rootfs
mkdir -p "$root/dev" "$root/proc" "$root/tmp" "$root/usr"
for directory in bin lib lib64 sbin; do
  if [ -L "/$directory" ]; then cp -P "/$directory" "$root"; fi
done
cp "$program" "$root/program"

jq --null-input --slurpfile volumes "$bundle/mounts.json" '{
  ociVersion: "1.0.2",
  process: {user: {uid: 0, gid: 0}, args: ["/bin/sh", "/program"], env: ["PATH=/usr/bin:/bin"], cwd: "/"},
  root: {path: "rootfs"},
  mounts: ([
    {destination: "/usr", type: "bind", source: "/usr", options: ["rbind", "ro"]},
    {destination: "/proc", type: "proc", source: "proc"},
    {destination: "/dev", type: "tmpfs", source: "tmpfs", options: ["nosuid", "mode=755"]}
  ] + $volumes[0]),
  # So that mounts with the option rslave see later mounts of podfs.
  linux: {rootfsPropagation: "rslave", namespaces: [{type: "pid"}, {type: "ipc"}, {type: "uts"}, {type: "mount"}]}
}' >"$bundle/config.json"

exec runc --root "$bundle/state" run --preserve-fds 2 --bundle "$bundle" "$uid-$container" </dev/null
