#!/usr/bin/env bash
# Shows a running pod's volumes, before and after an edit. Needs root, /dev/fuse and Rust; removes all that it made.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)

# The first build takes two to three minutes. The profile is built quickly; a release is optimized.
cargo build --profile quick --locked --bin podfs --bin podfs-fuse --manifest-path "$top/Cargo.toml"
podfs=${CARGO_TARGET_DIR:-$top/target}/quick/podfs

# The manifests are copied, so that the edit below does not touch the example.
work=$(mktemp -d)
pid=
finish() { [ -z "$pid" ] || { kill "$pid" && wait "$pid"; } 2>/dev/null || true; rm -rf --one-file-system "$work"; }
trap finish EXIT
cp "$here/pod.yaml" "$work/"
cp -r "$here/objects" "$work/objects"
mkfifo "$work/ready"

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }

say "podfs run --pod pod.yaml --objects objects/"
"$podfs" run --pod "$work/pod.yaml" --objects "$work/objects" \
  --root-dir "$work/root" --run-dir "$work/run" --ready-fd 3 3>"$work/ready" &
pid=$!
cat "$work/ready" >"$work/ready.json" # ends when podfs is ready, or when it ends
[ -s "$work/ready.json" ] || exit 1

volumes=$(echo "$work"/root/pods/*/volumes)
config=$volumes/kubernetes.io~configmap/config
say "One FUSE mount per volume, where the kubelet would put it"
(cd "$volumes" && ls -d -- */*)

say "The layout is the kubelet's: ls -l $(basename "$config")"
ls -lA "$config"

say "The pod's labels, from downwardAPI: cat about/labels"
cat "$volumes/kubernetes.io~downward-api/about/labels"; echo

say "An edit: the port becomes 9090 in objects/web-config.yaml"
echo "before: $(head -n 1 "$config/web.conf")"
sed 's/8080/9090/' "$here/objects/web-config.yaml" >"$work/new.yaml"
before=$(readlink "$config/..data")
mv "$work/new.yaml" "$work/objects/web-config.yaml"
began=$(date +%s%N)
while [ "$(readlink "$config/..data")" = "$before" ]; do :; done
seen=$((($(date +%s%N) - began) / 1000))
echo "after:  $(head -n 1 "$config/web.conf")    (new generation seen after $seen us; a process was started for each look)"

say "An edit that does not parse changes nothing, and says so"
echo 'data: [' >"$work/objects/web-config.yaml"
sleep 0.3
echo "still:  $(head -n 1 "$config/web.conf")"

say "kill -TERM: everything is unmounted, and the directories are gone"
kill "$pid"; wait "$pid"; pid=
echo "mounts left: $(grep -c " $work/" /proc/self/mountinfo || true)"
[ -e "$work/root" ] || echo "directories left: none"
