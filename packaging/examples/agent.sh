#!/usr/bin/env bash
# A minimal agent of a node by podfs-agent(7): starts podfs node on a directory of manifests, waits for the volumes of each pod,
# runs a container on them, changes an object, and ends every pod.
#
#   agent.sh [--fork] [--podman] [PODS [AGENT]]
#
# Where systemd runs, podfs node is a systemd unit; elsewhere, and with --fork, it is a child of this script.
#   PODS           manifests of pods and of the objects that they refer to
#   AGENT/NAME.sh  the program of the container of the pod NAME
#   AGENT/changes  files that replace those of the same name in PODS, while the containers run
#
# runc runs the containers where it is installed (runc.sh); with --podman, podman does (podman.sh); else a container is a few
# namespaces (container.sh). A container has the name of its pod.
#
# Needs root, /dev/fuse, podfs in the PATH, and jq.
# Exit code 0: every pod was served and has stopped cleanly. The script always removes all that it made.
set -euo pipefail
units=no
[ ! -d /run/systemd/system ] || units=yes
runtime=namespaces # or runc, or podman
! command -v runc >/dev/null || runtime=runc
while :; do
  case ${1:-} in
    --fork) units=no ;;
    --podman) runtime=podman ;;
    *) break ;;
  esac
  shift
done
here=$(cd "$(dirname "$0")" && pwd)
pods=${1:-$here/pods} agent=${2:-$here/agent}
work=$(mktemp -d)
cp -r "$pods" "$work/pods"
# Separate directories, for podfs and all commands about its pods. On a real node, /etc/podfs/podfs.toml sets them.
export PODFS_CONFIG=/dev/null PODFS_ROOT_DIR=$work/root PODFS_RUN_DIR=$work/run
seconds=30           # how long a pod may take
waiting=             # the process that waits for volumes
node=                # the process of podfs node, unless it is a unit
declare -A containers=() # processes, by the name of their pod
declare -A uids=()       # and its uid
failed=0

say() { printf 'agent: %s\n' "$*"; }
fail() { say "$@"; failed=1; }

# Starts podfs node, and waits until it answers.
start_node() {
  if [ $units = yes ]; then
    # When the daemon is stopped or killed, the pods continue, so systemd kills the main process only.
    systemd-run --quiet --collect --unit=podfs-example-node --service-type=notify --slice=podfs.slice \
      --property=KillMode=process --setenv=PODFS_CONFIG --setenv=PODFS_ROOT_DIR --setenv=PODFS_RUN_DIR \
      "$(command -v podfs)" node --manifests "$work/pods"
    return
  fi
  # In a session of its own: a Ctrl-C is for this agent, which ends containers first.
  setsid podfs node --manifests "$work/pods" 2>"$work/log" &
  node=$!
  until podfs node state >"$work/state" 2>&1; do
    kill -0 "$node" 2>/dev/null || { fail "podfs node ended; it said: $(tail -n 1 "$work/log")"; return 1; }
    sleep 0.05
  done
}

# NAMESPACE/NAME of every pod of the node.
pods_of_node() {
  for _ in $(seq 100); do # until podfs has read all manifests
    if podfs node state --output json 2>/dev/null | jq -e .sourcesReady >/dev/null; then break; fi
    sleep 0.05
  done
  podfs node state --output json 2>/dev/null | jq -r '.pods[] | "\(.namespace)/\(.name)"'
}

# Starts a container on the volumes of a pod, once they are mounted. Returns when its program has begun.
start_pod() {
  local pod=$1 name=${1#*/}
  # In the background, because a shell handles signals while it waits, not while a command runs.
  podfs node wait "$pod" --timeout $seconds 2>"$work/$name.trouble" &
  waiting=$!
  wait $waiting ||
    { fail "pod $pod: $(tail -n 1 "$work/$name.trouble" | sed 's/^podfs: //')"; return 1; }
  podfs node volumes "$pod" --output json | jq -r '.volumes[] | "\(.name)\t\(.path)"' >"$work/$name.volumes"
  say "pod $pod has the volumes $(cut -f 1 "$work/$name.volumes" | paste -sd , | sed 's/,/, /g')"
  mkdir "$work/$name.root"
  mkfifo "$work/$name.started"
  uids[$pod]=$(podfs node state --output json | jq -r --arg pod "$pod" '.pods[] | select("\(.namespace)/\(.name)" == $pod) | .uid')
  if [ $runtime = namespaces ]; then
    setsid sh "$here/container.sh" "$work/$name.root" "$agent/$name.sh" <"$work/$name.volumes" 4>"$work/$name.started" &
  else
    setsid sh "$here/$runtime.sh" "$work/$name.root" "${uids[$pod]}" "$name" "$agent/$name.sh" 3</dev/null 4>"$work/$name.started" &
  fi
  containers[$pod]=$!
  grep -q . "$work/$name.started" &
  wait $! || { fail "pod $pod: its container ended before it had begun"; return 1; }
}

# Ends a pod: first the container, then its manifest, then the pod is released, and its volumes are unmounted.
end_pod() {
  local pod=$1 name=${1#*/} file
  local state=$work/$name.root/state
  if [ -e "$state" ]; then
    case $runtime in
      runc) runc --root "$state" delete --force "${uids[$pod]}-$name" 2>/dev/null || true ;;
      podman)
        podman --root "$state" --runroot "/run/pod-${uids[$pod]}" --tmpdir "$state/tmp" --runtime runc \
          --cgroup-manager cgroupfs --events-backend none rm --force --time 0 --ignore "${uids[$pod]}-$name" >/dev/null 2>&1 || true
        rm -rf --one-file-system "/run/pod-${uids[$pod]}" ;;
    esac
    podfs mounts release --pod "${uids[$pod]}" --container "$name" 2>/dev/null || true
  fi
  if [ -n "${containers[$pod]:-}" ]; then
    kill -KILL "${containers[$pod]}" 2>/dev/null || true # unshare(1) takes its program along
    wait "${containers[$pod]}" 2>/dev/null || true
    unset "containers[$pod]"
  fi
  file=$(podfs node state --output json | jq -r --arg pod "$pod" '.pods[] | select("\(.namespace)/\(.name)" == $pod) | .origin.file // empty')
  [ -z "$file" ] || rm -f "$file"
  # podfs notices the removal a moment later, and until then refuses to release the pod.
  for _ in $(seq 100); do
    if podfs node release "$pod" 2>"$work/trouble" || grep -q 'does not have it' "$work/trouble"; then break; fi
    sleep 0.05
  done
  podfs node wait "$pod" --unmounted --timeout $seconds || fail "pod $pod: $(cat "$work/trouble")"
}

# shellcheck disable=SC2317 # the trap below calls it when this process ends
leave() {
  trap '' INT TERM
  [ -z "$waiting" ] || kill "$waiting" 2>/dev/null || true
  # There may be pods that this agent does not know yet.
  rm -f "$work"/pods/*
  # shellcheck disable=SC2046 # names of pods are words
  for pod in "${!containers[@]}" $(pods_of_node); do end_pod "$pod" || true; done
  if [ "$units" = yes ]; then
    systemctl stop podfs-example-node 2>/dev/null || true
  elif [ -n "$node" ]; then
    kill "$node" 2>/dev/null || true
    wait "$node" 2>/dev/null || true
  fi
  # Mounts and files that a killed podfs could not remove.
  podfs cleanup || true
  # A supervisor that is just ending may still make and remove files of its own.
  for _ in $(seq 100); do
    ! rm -rf --one-file-system "$work" 2>/dev/null || return 0
    sleep 0.05
  done
  rm -rf --one-file-system "$work"
}

trap leave EXIT
trap 'say interrupted; exit 130' INT TERM

start_node || exit 1
mapfile -t names < <(pods_of_node)
mapfile -t trouble < <(podfs node state --output json | jq -r '.trouble[]')
for line in "${trouble[@]}"; do fail "podfs node says: $line"; done

ready=()
for pod in "${names[@]}"; do
  if start_pod "$pod"; then ready+=("$pod"); fi
done

for file in "$agent"/changes/*; do
  cp "$file" "$work/new"
  # Bash loses a SIGINT that comes at the end of a command substitution, so there is none here.
  mv "$work/new" "$work/pods/${file##*/}" # by rename, so that podfs never reads half of it
done
for pod in "${ready[@]}"; do
  # Its program ends when it has seen the change.
  wait "${containers[$pod]}" || fail "pod $pod: its container failed"
  unset "containers[$pod]"
done

say "stopping"
for pod in "${names[@]}"; do end_pod "$pod" || fail "pod $pod: it did not stop"; done
[ $failed = 0 ] && say "all pods have stopped well"
exit $failed
