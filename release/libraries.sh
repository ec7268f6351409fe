#!/bin/sh
# Builds what the native core takes from others, as static libraries, for images and machines that have none or too old
# ones: the manylinux images above all (AlmaLinux 8 has liburing 1.0; 2.3 is needed).
#
#   release/libraries.sh PREFIX     PREFIX/include: liburing.h, xxhash.h; PREFIX/lib: liburing.a
#
# The checksums are of the releases' archives; LIBRARIES_FROM names a folder that has them, for a machine without a network.
set -eu
prefix=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

get() {  # URL, file name, SHA-256
  if [ -n "${LIBRARIES_FROM:-}" ]; then
    cp "$LIBRARIES_FROM/$2" "$work/$2"
  else
    curl -fsSL --retry 3 -o "$work/$2" "$1"
  fi
  echo "$3  $work/$2" | sha256sum -c - >/dev/null
  tar -xzf "$work/$2" -C "$work"
}

get https://github.com/axboe/liburing/archive/refs/tags/liburing-2.9.tar.gz liburing-2.9.tar.gz \
  897b1153b55543e8b92a5a3eb9b906537a5fedcf8afaf241f8b8787940c79f8d
get https://github.com/Cyan4973/xxHash/archive/refs/tags/v0.8.3.tar.gz xxHash-0.8.3.tar.gz \
  aae608dfe8213dfd05d909a57718ef82f30722c392344583d3f39050c7f29a80

mkdir -p "$prefix/include" "$prefix/lib"
(
  cd "$work"/liburing-liburing-2.9
  ./configure --prefix="$prefix" >/dev/null
  # Position-independent, because it goes into a Python extension.
  make -C src ENABLE_SHARED=0 CFLAGS="-O2 -fPIC -fvisibility=hidden" liburing.a
  cp -r src/include/liburing.h src/include/liburing "$prefix/include"
  cp src/liburing.a "$prefix/lib"
)
cp "$work"/xxHash-0.8.3/xxhash.h "$prefix/include"  # compiled into each file that uses it
