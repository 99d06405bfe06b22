#!/bin/sh
# Stands for a container runtime: runs a program with a root directory, mounts and process ids of its own.
#
#   container.sh ROOT PROGRAM <VOLUMES
#
# ROOT is an empty directory. VOLUMES has a line NAME<tab>PATH for each volume, which is then at /volumes/NAME.
set -eu
[ $$ = 1 ] || exec unshare --mount --propagation slave --pid --fork --kill-child sh "$0" "$@"

mount -t tmpfs -o mode=0755 container "$1"
cp "$2" "$1/program"
cd "$1"
mkdir dev old proc tmp usr volumes
mount --rbind /usr usr
mount -o remount,bind,ro usr
for directory in bin lib lib64 sbin; do
  if [ -L "/$directory" ]; then cp -P "/$directory" .; fi
done
: >dev/null
mount --bind /dev/null dev/null
mount -t proc proc proc

# The bind keeps the volume's own read-only flag. It is a slave, so that the new mount that podfs makes after both of its processes
# were killed appears here, too.
while IFS="$(printf '\t')" read -r name path; do
  if [ -d "$path" ]; then mkdir "volumes/$name"; else : >"volumes/$name"; fi
  mount --rbind "$path" "volumes/$name"
  mount --make-rslave "volumes/$name"
done

pivot_root . old
cd /
umount --lazy /old
rmdir /old
exec /bin/sh /program </dev/null
