#!/usr/bin/env bash
# Runs a command on a file system in RAM, behind a loop device. A disk this fast does not hide the cost of an engine.
#   sudo bench/ram_disk.sh 4G python bench/io_vs_fio.py --size 1GiB     ("--path MOUNT" is added)
# The file system and its image are removed afterwards, however the command ends.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,4p' "$0"; exit 2; }
[ "$(id -u)" = 0 ] || { echo "a loop device needs root: sudo $0 $*" >&2; exit 2; }
size=$1; shift
image=$(mktemp -p /dev/shm infinity-ram-disk-XXXXXX)
place=$(mktemp -d)
cleanup() { umount "$place" 2>/dev/null || true; rmdir "$place"; rm -f "$image"; }
trap cleanup EXIT
truncate -s "$size" "$image"
mkfs.ext4 -q -m 0 "$image"
mount -o loop "$image" "$place"
"$@" --path "$place"
