#!/usr/bin/env bash
# An agent that starts podfs run for each pod itself, without podfs node, as podfs-agent(7) describes it under SINGLE PODS: starts
# the pods of a directory, waits until their volumes are there, runs a container on each, changes an object, and stops everything.
#
#   agent.sh [--fork] [DIRECTORY]
#
# Where systemd runs, podfs is a systemd unit; elsewhere, and with --fork, it is a child of this script. DIRECTORY has a directory
# for each pod, named by its uid, like /etc/podfs/pods for podfs@.service:
#   pod.yaml       the manifest
#   objects/       the objects that it refers to; without it, the agent pushes objects:
#   push.yaml      the first objects
#   update.yaml    the change: the agent pushes it, or replaces the only file in objects/ by it
#   program.sh     the program of the container
#
# Needs root, /dev/fuse, podfs in the PATH, and jq.
# Exit code 0: every pod was served and has stopped cleanly. The script always removes all that it made.
set -euo pipefail
units=no
[ ! -d /run/systemd/system ] || units=yes
if [ "${1:-}" = --fork ]; then units=no; shift; fi
here=$(cd "$(dirname "$0")" && pwd)
pods=$(cd "${1:-$here/pods}" && pwd)
work=$(mktemp -d)
cp -r "$pods" "$work/pods"
# Separate directories, for podfs and all commands about its pods. On a real node, /etc/podfs/podfs.toml sets them.
export PODFS_CONFIG=/dev/null PODFS_ROOT_DIR=$work/root PODFS_RUN_DIR=$work/run
declare -A starting=() serving=() containers=() # processes, by the uid of their pod
failed=0

say() { printf 'agent: %s\n' "$*"; }
fail() { say "$@"; failed=1; }

# Starts podfs for a pod. The process in `starting` ends when podfs is ready, and when it has failed.
start() {
  local uid=$1 pod=$work/pods/$1 objects=(--push)
  [ ! -d "$pod/objects" ] || objects=(--objects "$pod/objects")
  if [ $units = yes ]; then
    # When the supervisor is killed, the server continues, so systemd kills the main process only.
    systemd-run --quiet --collect --unit="podfs-example-$uid" --service-type=notify --slice=podfs.slice \
      --property=KillMode=process --property=Delegate=memory \
      --setenv=PODFS_CONFIG --setenv=PODFS_ROOT_DIR --setenv=PODFS_RUN_DIR \
      "$(command -v podfs)" run --pod "$pod/pod.yaml" "${objects[@]}" &
    starting[$uid]=$!
    return
  fi
  mkfifo "$pod/ready"
  # In a session of its own: a Ctrl-C is for this agent, which ends containers first.
  setsid podfs run --pod "$pod/pod.yaml" "${objects[@]}" --ready-fd 3 3>"$pod/ready" 2>"$pod/log" &
  serving[$uid]=$!
  grep -q . "$pod/ready" &
  starting[$uid]=$!
}

# Gives a pod its first objects. podfs takes them a moment after it was started, and is not ready without them.
push_first() {
  until podfs push --pod "$1" -f "$work/pods/$1/push.yaml" 2>/dev/null; do
    kill -0 "${starting[$1]}" 2>/dev/null || return 0 # it has failed, and wait_ready says why
    sleep 0.05
  done
}

# Waits until the volumes of a pod are mounted.
wait_ready() {
  local uid=$1 pod=$work/pods/$1 code=0
  if wait "${starting[$uid]}"; then
    podfs status --pod "$uid" --output json | jq '.pods[0]' >"$pod/status"
    say "$(jq -r '"pod \(.namespace)/\(.name) has the volumes \([.volumes[].name] | join(", "))"' "$pod/status")"
    return
  fi
  if [ $units = yes ]; then
    fail "pod $uid: podfs failed; journalctl -u podfs-example-$uid says why"
    return 1
  fi
  wait "${serving[$uid]}" || code=$?
  unset "serving[$uid]"
  fail "pod $uid: podfs ended with exit code $code; it said: $(tail -n 1 "$pod/log")"
  return 1
}

# Runs a container on the volumes of a pod. Returns when its program has begun.
start_container() {
  local uid=$1 pod=$work/pods/$1
  mkdir "$pod/container"
  mkfifo "$pod/started"
  jq -r '.volumes[] | "\(.name)\t\(.path)"' "$pod/status" >"$pod/volumes"
  setsid sh "$here/../container.sh" "$pod/container" "$pod/program.sh" <"$pod/volumes" 4>"$pod/started" &
  containers[$uid]=$!
  grep -q . "$pod/started" &
  wait $! || { fail "pod $uid: its container ended before it had begun"; return 1; }
}

# Changes the objects of a pod.
update() {
  local pod=$work/pods/$1 files
  if [ -d "$pod/objects" ]; then
    # An array, since bash loses a SIGINT that comes at the end of a command substitution.
    files=("$pod"/objects/*.yaml)
    mv "$pod/update.yaml" "${files[0]}" # by rename, so that podfs never reads half of it
  else
    podfs push --pod "$1" -f "$pod/update.yaml"
  fi
}

# Stops a pod: first the container, then podfs, which unmounts.
stop() {
  local uid=$1 code=0
  if [ -n "${containers[$uid]:-}" ]; then
    kill -KILL "${containers[$uid]}" 2>/dev/null || true # unshare(1) takes its program along
    wait "${containers[$uid]}" 2>/dev/null || true
    unset "containers[$uid]"
  fi
  if [ $units = yes ]; then
    systemctl stop "podfs-example-$uid" 2>/dev/null || true
  elif [ -n "${serving[$uid]:-}" ]; then
    kill "${serving[$uid]}" 2>/dev/null || true
    wait "${serving[$uid]}" || code=$?
    unset "serving[$uid]"
    [ $code = 0 ] || fail "pod $uid: podfs ended with exit code $code"
  fi
}

# shellcheck disable=SC2317 # the trap below calls it when this process ends
leave() {
  trap '' INT TERM
  for uid in "${uids[@]}"; do stop "$uid"; done
  # Mounts and files that a killed podfs could not remove.
  podfs cleanup || true
  rm -rf --one-file-system "$work"
}

uids=()
for directory in "$work"/pods/*/; do uids+=("$(basename "$directory")"); done
trap leave EXIT
trap 'say interrupted; exit 130' INT TERM

for uid in "${uids[@]}"; do start "$uid"; done
ready=()
for uid in "${uids[@]}"; do
  [ -d "$work/pods/$uid/objects" ] || push_first "$uid"
  if wait_ready "$uid" && start_container "$uid"; then ready+=("$uid"); fi
done

for uid in "${ready[@]}"; do
  update "$uid" || { fail "pod $uid: its objects are not changed"; continue; }
  # Its program ends when it has seen the change.
  wait "${containers[$uid]}" || fail "pod $uid: its container failed"
  unset "containers[$uid]"
done

say "stopping"
for uid in "${ready[@]}"; do stop "$uid"; done
[ $failed = 0 ] && say "all pods have stopped well"
exit $failed
